"""Test that an audit of an honest run finds nothing, and that it finds each planted fault and its
step."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from extras.audit.planted import FLIPPED, Plant, double_rate, edit_record, flip_weight, train_here
from processes import TINY, make_shards, run, run_here, train, write_config

from data_prep import imagefolder
from vit.config.io import load_config
from vit.data.shards.data_set import open_split
from vit.training.plan import create_order

KEEP = ("checkpoint.keep_last=1", "checkpoint.keep_every=1")
EXACT = ("train.exact_over_ranks=true", "data.micro_batch_size=2")
EVERY = ("--segments", "99")


def audited(capsys, *arguments: object) -> tuple[int, dict[str, list[tuple[int, str]]]]:
    """Audit in this process. Return the exit status and the differences of each part."""
    capsys.readouterr()
    status = 0
    try:
        run_here("launch/audit.py", *arguments, "--json")
    except SystemExit as ended:
        status = ended.code
    result = json.loads(capsys.readouterr().out)
    assert result["equal"] == (status == 0)
    return status, {
        name: differences for name, differences in result["differences"].items() if differences
    }


def everything(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture(scope="module")
def place(tmp_path_factory, shards) -> Path:
    """Return a folder with a config, and a run with four kept checkpoints and a log line for every
    second step."""
    folder = tmp_path_factory.mktemp("audited")
    config = write_config(folder, shards)
    train_here(config, folder / "run", *KEEP, "log.every_steps=2")
    return folder


@pytest.fixture
def honest(place, tmp_path) -> Path:
    """Return a copy of the run, for a test to change."""
    shutil.copytree(place / "run", tmp_path / "run")
    return tmp_path / "run"


# --- honest runs ----------------------------------------------------------------------------------


def test_an_honest_run_is_equal_and_unchanged(honest, capsys):
    before = everything(honest)
    assert audited(capsys, honest, *EVERY) == (0, {})
    assert everything(honest) == before
    run_here("launch/audit.py", honest, "--segments", 2, "--seed", 3)
    out = capsys.readouterr().out
    assert re.match(
        r"claim: where the audit agrees, this software gives the bits of the run on 1 rank\(s\)"
        r" of this kind of machine: torch .+, code \w{12}\n2 of 4 stretches, --seed 3: steps",
        out,
    )
    assert out.count(": equal") == 3


@pytest.mark.slow
def test_a_run_that_was_stopped_and_resumed_with_other_settings_is_equal(place, tmp_path, capsys):
    """The checkpoint of the stop is no multiple of `checkpoint.every_steps`, and the settings of
    the first attempt are only in its checkpoints."""
    stop = Plant(3, lambda run: run.signals.__dict__.update(received="SIGTERM"))
    with pytest.raises(AssertionError):
        train_here(place / "tiny.yaml", tmp_path / "run", *KEEP, hooks=(stop,))
    rest = ("optim.lr=2e-3", "checkpoint.keep_last=9")
    train(place / "tiny.yaml", tmp_path / "run", *rest, "--allow-change", "optim.lr")
    assert audited(capsys, tmp_path / "run", *EVERY) == (0, {})


@pytest.mark.full
def test_a_run_of_two_ranks_is_equal_on_one_and_three_if_it_is_exact(place, tmp_path):
    train(place / "tiny.yaml", tmp_path / "run", *KEEP, *EXACT, ranks=2)
    for ranks in (0, 2, 3):
        done = run("launch/audit.py", tmp_path / "run", "--segments", 3, ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "on any number of rank(s)" in done.stdout
        assert done.stdout.count(": equal") == 4


@pytest.mark.full
def test_a_plain_run_is_repeated_only_on_its_number_of_ranks(place, tmp_path):
    run_dir = tmp_path / "run"
    train(place / "tiny.yaml", run_dir, *KEEP, ranks=2)
    done = run("launch/audit.py", run_dir, ranks=2)
    assert (done.returncode, done.stdout.count(": equal")) == (0, 5), done.stdout + done.stderr
    refused = run("launch/audit.py", run_dir)
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        f"error: {run_dir}, steps 10 to 12: trained on 2 rank(s), and without"
        " train.exact_over_ranks another number gives other bits: torchrun --nproc_per_node=2"
        f" launch/audit.py {run_dir}"
    ]


@pytest.mark.full
def test_a_hundred_honest_audits_raise_no_alarm(tmp_path, shards, capsys):
    config = write_config(tmp_path, shards, steps=200)
    often = ("checkpoint.every_steps=2", "eval.every_steps=50", "log.every_steps=3")
    guard = ("guard.on_spike=skip", "guard.window_steps=8", "guard.spike_sigmas=1")
    train_here(config, tmp_path / "run", *KEEP, *often, *guard)
    run_here("launch/audit.py", tmp_path / "run", "--segments", 100)
    assert capsys.readouterr().out.count(": equal") == 101


# --- planted faults -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "step"), [(flip_weight, 8), pytest.param(double_rate, 8, marks=pytest.mark.full)]
)
def test_a_change_during_training_is_found_with_its_step(place, tmp_path, capsys, plant, step):
    """The loss of the next step is the first that a changed weight affects. The changed rate is
    used one step later, and affects the loss of the step after that."""
    train_here(place / "tiny.yaml", tmp_path / "run", *KEEP, hooks=(Plant(step - 1, plant),))
    status, differences = audited(capsys, tmp_path / "run", *EVERY)
    # Later stretches start from the flipped bit, but train with the right rate.
    later = [] if plant is flip_weight else ["steps 10 to 12"]
    assert (status, list(differences)) == (1, ["steps 7 to 9", *later])
    steps = differences["steps 7 to 9"]
    first_loss = next(at for at, text in steps if text.startswith("loss"))
    assert first_loss == (step if plant is flip_weight else step + 1)
    assert steps[0][0] == step
    assert re.match(r"the state of the run differs: \d+ tensor\(s\) differ: ", steps[-1][1])


@pytest.mark.full
def test_a_bit_that_flips_in_the_last_step_of_a_stretch_names_its_tensor(place, tmp_path, capsys):
    """No loss of the stretch has used the weight."""
    train_here(place / "tiny.yaml", tmp_path / "run", *KEEP, hooks=(Plant(9, flip_weight),))
    status, differences = audited(capsys, tmp_path / "run", *EVERY)
    assert (status, list(differences)) == (1, ["steps 7 to 9"])
    [[step, text]] = differences["steps 7 to 9"]
    assert step == 9
    assert re.match(
        rf"the state of the run differs: 1 tensor\(s\) differ: model\.{FLIPPED}, first at 5 \(",
        text,
    )


def test_a_flipped_bit_in_a_kept_checkpoint_is_found_with_its_tensor(honest, capsys):
    path = honest / "checkpoints" / "step_00000006" / "state.safetensors"
    content = bytearray(path.read_bytes())
    place = _place_of(path, f"optim.exp_avg.{FLIPPED}")
    content[place + 4 * 5 + 2] ^= 1 << 4
    path.write_bytes(bytes(content))
    status, differences = audited(capsys, honest, "--segments", 1)
    assert status == 1
    files = differences.pop("kept checkpoints and their hashes")
    assert [step for step, _ in files] == [6]
    assert "does not match the sha256 in checkpoint.json" in files[0][1]
    [[step, text]] = differences["steps 4 to 6"]
    assert step == 6
    assert f"1 tensor(s) differ: optim.exp_avg.{FLIPPED}, first at 5" in text


@pytest.mark.full
def test_an_edited_checkpoint_json_is_found(honest, capsys):
    path = honest / "checkpoints" / "step_00000012" / "checkpoint.json"
    path.write_text(path.read_text().replace('"step": 12', '"step": 13'))
    status, differences = audited(capsys, honest, *EVERY)
    [[[step, text]]] = differences.values()
    assert (status, step) == (1, 12)
    assert "its content does not match the sha256 stored in it" in text


def _place_of(path: Path, name: str) -> int:
    """Return the offset of a tensor in a safetensors file."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return 8 + size + json.loads(content[8 : 8 + size])[name]["data_offsets"][0]


@pytest.mark.parametrize(
    ("kind", "step", "change", "part", "expected"),
    [
        ("train", 8, lambda line: line["losses"].__setitem__(0, 1.5), "steps 7 to 9", (7, "loss")),
        # The repetition writes no line after step 9, so its loss is only in the checkpoint.
        pytest.param(
            *("train", 10, lambda line: line["losses"].__setitem__(0, 1.5)),
            *("steps 7 to 9", (9, "loss")),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *("train", 8, lambda line: line.update(loss=0.5)),
            *("steps 7 to 9", (8, "train line: loss")),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *("eval", 6, lambda line: line.update(top1_ema=99.5)),
            *("steps 4 to 6", (6, "eval line")),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *("epoch", 5, lambda line: line.update(sample_checksum="0")),
            *("steps 4 to 6", (5, "epoch")),
            marks=pytest.mark.full,
        ),
    ],
)
def test_an_edited_record_is_found_with_its_step(
    honest, capsys, kind, step, change, part, expected
):
    edit_record(honest, kind, step, change)
    status, differences = audited(capsys, honest, *EVERY)
    assert (status, list(differences)) == (1, [part])
    first, last = differences[part]
    assert first[0] == expected[0]
    assert first[1].startswith(expected[1])
    assert last[1] == "the state agrees, so the record was changed"


def test_an_edited_hash_in_the_record_is_found_without_a_repetition(honest, capsys):
    edit_record(honest, "checkpoint", 9, lambda line: line.update(sha256="0" * 64))
    status, differences = audited(capsys, honest, *EVERY)
    assert status == 1
    [[step, text]] = differences["kept checkpoints and their hashes"]
    assert step == 9
    assert text.endswith("but the record 000000000000")
    assert differences["steps 7 to 9"] == [[9, "the state agrees, so the record was changed"]]


@pytest.mark.full
def test_a_removed_line_of_the_record_is_found(honest, capsys):
    path = honest / "metrics.jsonl"
    rows = [row for row in path.read_text().splitlines(True) if '"train", "step": 8,' not in row]
    path.write_text("".join(rows))
    status, differences = audited(capsys, honest, *EVERY)
    assert (status, list(differences)) == (1, ["steps 7 to 9"])
    assert differences["steps 7 to 9"][0][0] == 7
    assert differences["steps 7 to 9"][0][1].startswith("loss missing in the record")


@pytest.mark.full
def test_a_changed_learning_rate_is_found_in_the_second_loss(honest, capsys):
    path = honest / "config.yaml"
    path.write_text(re.sub(r"(?m)^  lr: .*$", "  lr: 0.002", path.read_text()))
    status, differences = audited(capsys, honest, *EVERY)
    assert status == 1
    # The checkpoints before a stretch are honest, so each stretch differs from its second step on.
    for start in (0, 3, 6, 9):
        part = differences[f"steps {start + 1} to {start + 3}"]
        assert "optim.lr was 0.001" in part[0][1]
        losses = [step for step, text in part if text.startswith("loss")]
        assert losses[0] == start + 2


def steps_with(config: Path, ids: list[int]) -> list[int]:
    """Return the steps whose batch contains one of the samples, counted from 1."""
    order = create_order(load_config(config, TINY), 60)
    return [step + 1 for step in range(12) if np.isin(order.rows(step, 0, 12), ids).any()]


@pytest.mark.full
def test_a_swapped_image_is_found_with_its_step(tmp_path, capsys):
    """Two images trade places, and the index is written again, as by somebody who hides it."""
    shards = make_shards(tmp_path / "data")
    config = write_config(tmp_path, shards)
    train_here(config, tmp_path / "run", *KEEP)
    images = tmp_path / "data" / "images" / "train"
    one, two = images / "class0" / "0030.jpg", images / "class1" / "0031.jpg"
    one_bytes = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(one_bytes)
    shutil.rmtree(shards)
    words = [str(images.parent), "--out", str(shards), "--num-shards", "3", "--workers", "1"]
    assert imagefolder.main(words) == 0
    status, differences = audited(capsys, tmp_path / "run", *EVERY)
    assert status == 1
    split = open_split(shards, "train")
    ids = [n for n in range(60) if split.key(n).endswith(("0030", "0031"))]
    assert len(ids) == 2
    steps = steps_with(config, ids)
    for start in range(0, 12, 3):
        part = differences[f"steps {start + 1} to {start + 3}"]
        inside = [step for step in steps if start < step <= start + 3]
        assert part[0][1] == "the training images or labels have changed since the run"
        assert [step for step, _ in part[1:]][:1] == inside[:1]


@pytest.mark.slow
def test_an_image_that_does_not_match_its_checksum_is_named_with_its_step(tmp_path, capsys):
    shards = make_shards(tmp_path / "data")
    config = write_config(tmp_path, shards)
    train_here(config, tmp_path / "run", *KEEP)
    tar = sorted(shards.glob("*train*.tar"))[0]
    content = bytearray(tar.read_bytes())
    content[700] ^= 1
    tar.write_bytes(bytes(content))
    step = steps_with(config, [0])[0]
    with pytest.raises(ValueError, match=rf"^step {step}: .* sample 0 .*: .* a bit flipped"):
        run_here("launch/audit.py", tmp_path / "run", *EVERY)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"torch": "2.0.0"}, r"torch was 2\.0\.0, but is .* on this host: install that version"),
        ({"code": "abc"}, r"code was abc, but is \w+ on this host: check out the code of the run"),
        (
            {"kernels": "AVX9"},
            r"kernels was AVX9, but is torch .* on this host: audit on the same kind",
        ),
        (
            {"device": "cuda:3"},
            r"device was cuda, but is cpu on this host: audit on the same kind of dev",
        ),
    ],
)
def test_another_machine_or_software_is_refused(honest, values, message):
    edit_record(honest, "start", 0, lambda line: line.update(values))
    with pytest.raises(ValueError, match=f"run, steps 10 to 12: {message}"):
        run_here("launch/audit.py", honest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no run: give one run folder or two, and --segments of 1 or more"),
        (("a", "b", "c"), "a b c: give one run folder or two"),
        (("a", "--segments", 0), "a: give one run folder or two"),
        (("a", "--repeat", 3), "a: give one run folder or two"),
        (("--repeat", 1), "no run: give one run folder or two"),
        (("nowhere",), r"nowhere: metrics\.jsonl is missing or has no line of kind start: pass"),
    ],
)
def test_mistakes_are_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{message}"):
        run_here("launch/audit.py", *arguments)


# --- two runs -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_first_difference_of_two_runs(place, tmp_path, capsys):
    assert audited(capsys, place / "run", place / "run") == (0, {})
    other = tmp_path / "other"
    train_here(place / "tiny.yaml", other, *KEEP, hooks=(Plant(7, flip_weight),))
    status, differences = audited(capsys, place / "run", other)
    assert status == 1
    [[[first, loss], [saved, text]]] = differences.values()
    assert (first, saved) == (8, 9)
    assert re.match(r"the first loss that differs: \d\.\d+ and \d\.\d+$", loss)
    assert re.match(
        r"the first checkpoint that differs \(equal up to step 6\); at step 9, \d+ tensor\(s\)",
        text,
    )


def test_two_equal_runs_of_which_one_record_was_edited(place, honest, capsys):
    edit_record(honest, "train", 8, lambda line: line["losses"].__setitem__(0, 1.5))
    status, differences = audited(capsys, place / "run", honest)
    assert status == 1
    [[[first, _], [saved, text]]] = differences.values()
    assert (first, saved) == (7, 12)
    assert text == "checkpoints equal up to step 12: one of the records was changed"
