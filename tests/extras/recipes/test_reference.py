"""Test the published curves in configs/reference, and that a run is compared with its curve."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from processes import TINY, metrics, run_here, write_config

from vit.config.io import load_config, recipes_folder
from vit.data.open_data import open_split
from vit.extras.recipes.difference import deviations, read_recipe
from vit.extras.recipes.reference import Comparison, Reference, create_comparison, read_reference
from vit.training.plan import Plan

CURVES = recipes_folder() / "reference"
SHIPPED = sorted(
    path.relative_to(CURVES).with_suffix("").as_posix() for path in CURVES.rglob("*.csv")
)
# Top-1 accuracy from the tables in DeiT III's README and paper. The tables round the final values
# in the logs.
TABLES = {
    "deit3/vit_s16_800ep": 81.4,
    "deit3/vit_b16_800ep_ft224": 83.8,
    "deit3/vit_l16_800ep_ft224": 84.9,
    "deit3/vit_h14_800ep_ft224": 85.2,
    "deit3/vit_s16_800ep_ft384": 83.4,
    "deit3/vit_b16_800ep_ft384": 85.1,
    "deit3/vit_l16_800ep_ft384": 85.8,
}
HEAD = """# title: A curve
# source: a test
# recipe: {recipe}
# settings: {{optim.weight_decay: 0.2}}
# epochs: 4
# images: 23
# classes: 3
# train_images: 60
"""


@pytest.mark.parametrize("name", SHIPPED)
def test_each_curve_belongs_to_a_recipe_that_names_it(name):
    reference = read_reference(name)
    header = reference.header
    config = load_config(recipes_folder() / f"{header.recipe}.yaml", used_here=False)
    assert config.eval.reference == name
    theirs = read_recipe(
        Path(header.recipe), [f"{key}={value}" for key, value in header.settings.items()]
    )
    assert (theirs.train.epochs, theirs.train.steps) == (header.epochs, header.steps)
    changes = deviations(config, header.recipe, header.settings)
    assert len(changes) == len(header.settings)
    assert re.search(r"@[0-9a-f]{7,}:|at [0-9a-f]{7,}", header.source)
    for run in reference.runs:
        assert 100 > run["top1"][-1] > run["top1"][0]
    if name in TABLES:
        assert reference.runs[0]["top1"][-1] == pytest.approx(TABLES[name], abs=0.05)


def reference_of(folder: Path, text: str, recipe: str = "demo") -> Reference:
    path = folder / "curve.csv"
    path.write_text(HEAD.format(recipe=recipe) + text)
    return read_reference(str(path))


def plan(epochs: int, per_epoch: int = 10) -> Plan:
    return Plan(
        *(1, 6, 6, 1, per_epoch, 0, 60),
        total_steps=epochs * per_epoch,
        warmup_steps=0,
        eval_every_steps=per_epoch,
        log_every_steps=1,
    )


def test_values_are_interpolated_only_between_published_points(tmp_path):
    text = "run,epoch,top1\na,1,10\na,3,30\na,4,50\nb,1,20\nb,3.5,45\n"
    reference = reference_of(tmp_path, text)
    own = Comparison(reference, plan(4), "")

    def expected(epoch: Fraction) -> list[Fraction]:
        a = 10 * epoch if epoch <= 3 else 30 + (epoch - 3) * 20
        return [a, 20 + (epoch - 1) * 10]

    for step in range(41):
        epoch = Fraction(step, 10)
        line_values = own.values(step, {"top1": 12.5})
        if not 1 <= epoch <= Fraction(7, 2):
            assert line_values == {}
            continue
        values = [float(value) for value in expected(epoch)]
        value = reference.at(step / 40)["top1"]
        assert value == pytest.approx((sum(values) / 2, min(values), max(values)))
        assert line_values["top1_reference"] == pytest.approx(sum(values) / 2)
        assert line_values["top1_minus_reference"] == pytest.approx(12.5 - sum(values) / 2)
    assert own.line(5, {"top1": 1.0}) == "epoch 0.5: 1.00 % (the reference begins at epoch 1)"
    assert own.line(20, {"top1": 26.0}) == (
        "epoch 2: 26.00 % (reference 25.00 %, 2 runs 20.00 to 30.00, +1.00)"
    )
    nearly = "epoch 2: 25.00 % (reference 25.00 %, 2 runs 20.00 to 30.00, +0.00)"
    assert own.line(20, {"top1": 24.999}) == nearly
    assert own.line(40, {"top1": 1.0}) == "epoch 4: 1.00 % (the reference ends at epoch 3.5)"


def test_a_run_of_another_length_is_compared_at_the_same_share(tmp_path):
    reference = reference_of(tmp_path, "epoch,top1\n1,10\n3,30\n")
    longer = Comparison(reference, plan(8, per_epoch=7), "")
    assert "8 epochs, the reference 4" in longer.length_note
    assert not Comparison(reference, plan(4, per_epoch=3), "").length_note
    assert longer.line(4 * 7, {"top1": 21.0}) == (
        "epoch 4: 21.00 % (reference at its epoch 2: 20.00 %, +1.00)"
    )
    [curve] = longer.curves()
    assert curve == {"step": [14.0, 42.0], "top1": [10.0, 30.0]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("epoch,top1", "epoch,top2"), "expected the columns epoch and top1"),
        (("3,30", "3,"), "line 11: expected a number in every column"),
        (("3,30", "1,30"), "the epochs must ascend"),
        (("3,30", "5,30"), "the epochs must be between 0 and 4"),
        (("# images: 23\n", ""), "header: images: Field required"),
        (("# epochs: 4", "# epochs: 4\n# steps: 5"), "needs either `epochs` or `steps`"),
        (("3,30", "3,nan"), "line 11: expected a number in every column"),
        (("3,30", "3,130"), "top1 and top5 must be percentages between 0 and 100"),
        (("1,10\n3,30\n", ""), "no data rows follow the header: add the column names"),
        (("# ", ""), "the header is missing: start the file with '# title: ...'"),
        (
            ("# title: A curve", "# title A curve"),
            "the header must have lines of the form '# key: value'",
        ),
    ],
)
def test_an_invalid_file_is_reported_in_one_line(tmp_path, change, message):
    path = tmp_path / "curve.csv"
    text = HEAD.format(recipe="demo") + "epoch,top1\n1,10\n3,30\n"
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_reference(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_recipe_is_reported_before_training(tmp_path, shards):
    path = tmp_path / "curve.csv"
    path.write_text(HEAD.format(recipe="configs/nix.yaml") + "epoch,top1\n1,10\n3,30\n")
    config = load_config(write_config(tmp_path, shards), [f"eval.reference={path}"])
    with pytest.raises(ValueError, match=r"curve\.csv: header: recipe: configs/nix\.yaml: cannot"):
        create_comparison(config, plan(4), open_split(config, "val"))


def test_a_run_logs_and_records_its_distance_from_the_curve(tmp_path, shards, capfd):
    read_history = pytest.importorskip("vit.extras.report.history").read_history
    config = write_config(tmp_path, shards, steps=6)
    path = tmp_path / "curve.csv"
    rows = "epoch,top1,loss\n1,10,2\n3,30,1\n"
    path.write_text(HEAD.format(recipe=config) + "# weights: ema\n" + rows)
    run_dir = tmp_path / "run"
    arguments = [*TINY, f"eval.reference={path}", "eval.every_steps=2", "optim.weight_decay=0.1"]
    run_here("launch/train.py", "--config", config, *arguments, f"run.dir={run_dir}")
    log = capfd.readouterr().err

    lines = {line["step"]: line for line in metrics(run_dir, "eval")}
    # After a third of the run, the run is compared with the curve at a third of the published
    # schedule, which is epoch 4/3 of 4.
    for step, top1, loss in ((2, 10 + 10 / 3, 2 - 1 / 6), (4, 10 + 50 / 3, 2 - 5 / 6)):
        line = lines[step]
        assert line["top1_reference"] == pytest.approx(top1)
        assert line["top1_minus_reference"] == pytest.approx(line["top1_ema"] - top1)
        assert line["loss_minus_reference"] == pytest.approx(line["loss_ema"] - loss)
        assert f"averaged weights {line['top1_ema']:.2f} % (reference at its epoch" in log
    assert "top1_reference" not in lines[6]
    assert "(the reference ends at epoch 3)" in log

    [note] = metrics(run_dir, "reference")
    assert "optim.weight_decay 0.2 -> 0.1" in note["unlike"]
    assert (
        f"reference: differs from its recipe: {'; '.join(note['unlike'])} (for the effects: python"
        in log
    )
    history = read_history(run_dir / "metrics.jsonl")
    assert np.allclose(history.of_kind("reference")[0]["curves"][0]["step"], [1.5, 4.5])


@pytest.mark.parametrize(
    ("header", "settings", "reason"),
    [
        (("images: 23", "images: 50000"), [], "its validation set has 50,000 images of 3 classes"),
        (("epochs: 4", "epochs: 2"), ["train.steps=2"], "its recipe has 6 steps, this run 2"),
    ],
    ids=["own data", "a trial"],
)
def test_a_run_on_other_data_or_of_another_length_is_not_compared(
    header, settings, reason, tmp_path, shards, capfd
):
    config = write_config(tmp_path, shards, steps=6)
    path = tmp_path / "curve.csv"
    text = HEAD.format(recipe=config) + "epoch,top1\n1,10\n2,30\n"
    assert header[0] in text
    path.write_text(text.replace(*header))
    arguments = [*TINY, f"eval.reference={path}", "eval.every_steps=2", *settings]
    run_here("launch/train.py", "--config", config, *arguments, f"run.dir={tmp_path / 'run'}")
    log = capfd.readouterr().err
    assert not [line for line in metrics(tmp_path / "run", "eval") if "top1_reference" in line]
    lines = metrics(tmp_path / "run", "reference")
    if header[0] == "images: 23":
        # A curve from another data set, such as the demo's, is not compared with the run.
        assert f"note: eval.reference={path} is not compared: {reason}" in log
        assert not lines
        return
    assert "reference" not in log
    assert reason in lines[0]["refused"]
    assert lines[0]["curves"] == []


def test_a_shipped_recipe_is_compared_with_its_curve_and_half_of_it_is_not(tmp_path):
    """The comparison must also work if the published run was longer than the recipe, as for
    AlgoPerf."""

    class Val(NamedTuple):
        num_samples: int
        num_classes: int

    for name in SHIPPED:
        header = read_reference(name).header
        config = load_config(recipes_folder() / f"{header.recipe}.yaml", used_here=False)
        train = config.train
        val = Val(header.images, header.classes)
        for share in (1, 2):
            steps = (train.steps or train.epochs * 100) // share
            run = replace(plan(1), total_steps=steps, steps_per_epoch=100)
            assert bool(create_comparison(config, run, val).refusal) == (share == 2)
