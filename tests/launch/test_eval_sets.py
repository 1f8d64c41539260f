"""Test that the results of additional evaluation sets are as exact as those of the validation
split, and that the names of the sets appear in all outputs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import TINY, Background, make_shards, metrics, run_here, train, write_config
from torch import nn

from data_prep import imagefolder
from vit.config.io import ConfigError, from_dict, load_config
from vit.config.schema import Config
from vit.data.augment.apply import create_augment
from vit.data.eval_sets import EvalSet, ModelClasses, open_sets
from vit.data.image_format import ImageFormat
from vit.data.storage.opening import open_split
from vit.distributed.process_group import World
from vit.evaluation.evaluate import Evaluator
from vit.weights.files import read_weights

WORLD = World(0, 1, torch.device("cpu"))
NAMES = [f"class{label}" for label in range(3)]


class ByColor(nn.Module):
    """A model with 12 classes whose logits depend only on the mean color of the image. The expected
    results can therefore be computed in a simple loop."""

    def __init__(self) -> None:
        super().__init__()
        weights = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
        self.weights = nn.Parameter(weights)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3)) @ self.weights.T


def renamed(root: Path, folder: Path, names: list[str]) -> Path:
    copy = shutil.copytree(root, folder)
    info = json.loads((copy / "_info.json").read_text())
    (copy / "_info.json").write_text(json.dumps({**info, "class_names": names}))
    return copy


def config_of(root: Path, sets: dict) -> Config:
    values = {
        "data": {"root": str(root)},
        "train": {"steps": 1},
        "model": {"name": "vit_ti8", "image_size": 16},
        "eval": {"batch_size": 5, "sets": sets},
    }
    return from_dict(values, "test")


def opened(root: Path, sets: dict, names: list[str] = NAMES, num_classes: int = 3):
    model = ModelClasses(num_classes, {"": names} if names else {})
    return open_sets(config_of(root, sets), open_split(root, "val"), model, WORLD)


def evaluated(root: Path, sets: dict, names: list[str]) -> tuple[dict, dict[str, EvalSet]]:
    config = config_of(root, sets)
    results = {}
    sets_by_name = {}
    for group in opened(root, sets, names, num_classes=12):
        evaluator = Evaluator(
            group,
            ImageFormat.from_config(config.model, config.data),
            create_augment(config.augment, config.data, 12, WORLD.device),
            WORLD,
            config.eval,
        )
        with closing(evaluator):
            results |= evaluator.evaluate({"model": ByColor()})
        sets_by_name |= {each.name: each for each in group}
    return {name: by_model["model"] for name, by_model in results.items()}, sets_by_name


def logits_of(root: Path) -> tuple[torch.Tensor, np.ndarray]:
    config = config_of(root, {})
    split = open_split(root, "val")
    model = ByColor()
    seen = []
    original = model.forward
    model.forward = lambda images: seen.append(original(images)) or seen[-1]
    evaluator = Evaluator(
        (EvalSet("val", split),),
        ImageFormat.from_config(config.model, config.data),
        create_augment(config.augment, config.data, 12, WORLD.device),
        WORLD,
        config.eval,
    )
    with closing(evaluator):
        evaluator.evaluate({"model": model})
    return torch.cat(seen)[: split.num_samples], split.index["label"].astype(int)


@pytest.fixture(scope="module")
def model_classes() -> list[str]:
    """Return twelve class names for the model. The classes of the shards are among them, at
    different positions."""
    names = [f"other{number}" for number in range(12)]
    names[7], names[2], names[11] = NAMES
    return names


def test_only_the_logits_of_the_sets_own_classes_compete_or_all_of_them(
    shards, model_classes, tmp_path
):
    """The expected results are computed in a simple loop, both over the set's own classes (the
    protocol of ImageNet-A) and over all outputs of the model."""
    logits, labels = logits_of(shards)
    other = renamed(shards, tmp_path / "a", NAMES)
    sets = {"own": {"root": str(other)}, "all": {"root": str(other), "classes": "all"}}
    results, opened_sets = evaluated(shards, sets, model_classes)
    among = logits[:, [7, 2, 11]]
    expected = torch.nn.functional.cross_entropy(among, torch.from_numpy(labels)).item()
    assert results["own"].predictions.tolist() == among.argmax(1).tolist()
    assert results["own"].accuracy.correct_top1 == int((among.argmax(1).numpy() == labels).sum())
    assert results["own"].accuracy.loss == pytest.approx(expected, abs=1e-5)
    outputs = np.array([7, 2, 11])[labels]
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(outputs)).item()
    top5 = (logits.topk(5).indices.numpy() == outputs[:, None]).any(1).sum()
    assert results["all"].predictions.tolist() == logits.argmax(1).tolist()
    assert results["all"].accuracy.correct_top1 == int((logits.argmax(1).numpy() == outputs).sum())
    assert results["all"].accuracy.correct_top5 == int(top5)
    assert results["all"].accuracy.loss == pytest.approx(expected, abs=1e-5)
    for name, each in opened_sets.items():
        right = int(each.is_right(results[name].predictions).sum())
        assert right == results[name].accuracy.correct_top1


def test_lists_of_labels_follow_the_keys_and_images_without_one_do_not_count(shards, tmp_path):
    logits, own = logits_of(shards)
    split = open_split(shards, "val")
    keys = [split.key(i) for i in range(split.num_samples)]
    rows = [[] if i % 4 == 0 else sorted({int(own[i]), i % 3}) for i in range(len(keys))]
    by_key = tmp_path / "by_key.json"
    by_key.write_text(json.dumps(dict(zip(keys, rows, strict=True))))
    # ReaL's labels are sorted by the number at the end of the key, but the shards are in a
    # different order.
    ordered = sorted(range(len(keys)), key=lambda i: int(keys[i].rpartition("_")[2]))
    assert ordered != list(range(len(keys)))
    in_order = tmp_path / "real.json"
    in_order.write_text(json.dumps([rows[i] for i in ordered]))
    sets = {"real": {"labels": str(in_order)}, "keyed": {"labels": str(by_key)}}
    results, opened_sets = evaluated(shards, sets, [*NAMES, *map(str, range(9))])
    # Of the model's twelve classes, only the first three exist in the shards. Only these three
    # classes are compared.
    scored = [i for i, row in enumerate(rows) if row]
    best = logits[:, :3].argmax(1).tolist()
    right = sum(best[i] in rows[i] for i in scored)
    share = logits[:, :3].softmax(1)
    loss = -np.mean([np.log(share[i, rows[i]].sum().item()) for i in scored])
    for name in sets:
        accuracy = results[name].accuracy
        assert (accuracy.num_images, accuracy.correct_top1) == (len(scored), right)
        assert accuracy.loss == pytest.approx(loss, abs=1e-5)
        assert opened_sets[name].num_skipped == len(keys) - len(scored)
        assert int(opened_sets[name].is_right(results[name].predictions).sum()) == right
    assert results["val"].accuracy.num_images == len(keys)


def test_numbered_folders_are_the_models_classes_in_any_order(tmp_path):
    """ImageNet-V2's folders are named with the numbers from 0. If these names are sorted as text,
    the order is wrong."""
    shards = make_shards(tmp_path, num_train=12, num_val=24, num_classes=12)
    # The labels are the same as in the shards.
    names = sorted(f"class{label}" for label in range(12))
    for label, name in enumerate(names):
        shutil.copytree(tmp_path / "images" / "val" / name, tmp_path / "v2" / str(label))
    for order in ("text", "number"):
        out = tmp_path / order
        arguments = ["--class-order", order, "--val-fraction", "0", "--num-shards", "1"]
        done = imagefolder.main(
            [str(tmp_path / "v2"), "--out", str(out), *arguments, "--workers", "1"]
        )
        assert done == 0
    sets = {
        order: {"root": str(tmp_path / order), "split": "train"} for order in ("text", "number")
    }
    results, opened_sets = evaluated(shards, sets, names)
    assert opened_sets["number"].columns is None
    assert opened_sets["text"].columns.tolist()[:4] == [0, 1, 10, 11]
    for order in sets:
        numbered, standard = (results[name].accuracy.to_dict() for name in (order, "val"))
        # The kernels sum equal logits in different orders.
        assert numbered == pytest.approx(standard, abs=1e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "eval.sets.real.labels=<path>: cannot be read (No such file or directory)"),
        ("[[0], [1]", "eval.sets.real.labels=<path>: cannot be read (not JSON)"),
        ([[0]], "eval.sets.real.labels=<path>: has labels for 1 images, but <root> 'val' has 23"),
        ({str(i): [0] for i in range(23)}, "has no labels for 23 images (class"),
        ([[3]] * 23, "contains the label 3, expected whole numbers from 0 to 2"),
        ([["0"]] * 23, 'contains the label "0", expected whole numbers from 0 to 2'),
        ([[]] * 23, "eval.sets.real.labels=<path>: no image has a label"),
        ([[1]] * 23, "only 35% of the labels of <root> 'val' agree with this list"),
    ],
)
def test_reports_wrong_labels_in_one_line(content, message, shards, tmp_path):
    path = tmp_path / "real.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match="real") as caught:
        opened(shards, {"real": {"labels": str(path)}})
    assert message.replace("<path>", str(path)).replace("<root>", str(shards)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_are_names_if_the_model_has_one_of_them(shards, tmp_path):
    """If a model has the classes 1 to 12, its output 4 is class 5, even if the set has a class
    0."""
    names = [str(number) for number in range(1, 13)]
    root = renamed(shards, tmp_path / "n", ["0", "5", "7"])
    with pytest.raises(ValueError, match=r"eval\.sets\.n: the model lacks 1 of the 3 .* \(0\)"):
        opened(shards, {"n": {"root": str(root)}}, names, num_classes=12)
    root = renamed(shards, tmp_path / "known", ["5", "7", "12"])
    _, (known,) = opened(shards, {"known": {"root": str(root)}}, NAMES + names, num_classes=15)
    assert known.columns.tolist() == [7, 9, 14]


def test_reports_unknown_classes_of_all_sets_together(shards, tmp_path):
    foreign = renamed(shards, tmp_path / "f", ["class0", "lynx", "class2"])
    numbers = renamed(shards, tmp_path / "n", ["0", "1", "999"])
    sets = {
        "a": {"root": str(foreign)},
        "v2": {"root": str(numbers)},
        "gone": {"root": str(tmp_path / "nowhere")},
        "fine": {"split": "train"},
    }
    with pytest.raises(ValueError, match=r"eval\.sets") as caught:
        opened(shards, sets)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        f"eval.sets.a: the model lacks 1 of the 3 classes of {foreign} (lynx); its own classes are"
        " class0, class1, class2: use data whose classes have the same names"
    )
    assert lines[1] == (
        f"eval.sets.v2: {numbers} has class 999, but the model's classes are 0 to 2: use"
        " data with the same classes"
    )
    assert lines[2].startswith("eval.sets.gone: ")
    assert len(lines) == 3
    with pytest.raises(ValueError, match="but the model's classes do not: use data"):
        opened(shards, {"mini": {"split": "train"}}, names=[])
    with pytest.raises(ValueError, match="the model has several classes called class1: use data"):
        opened(shards, {"mini": {"split": "train"}}, [*NAMES, "class1"], num_classes=4)


def test_settings_that_contradict_each_other_are_refused(shards, tmp_path):
    path = write_config(tmp_path, shards)
    for setting, message in {
        "eval.sets.val.split=train": "eval.sets.val: the name is reserved for data.val_split",
        "eval.best_by=v2": "eval.best_by=v2 is not a set of this run: use one of val",
        "eval.sets.a={}": "eval.sets.a is the same as data.val_split",
        "eval.sets.a.splt=x": "'eval.sets.a.splt'; the keys of an evaluation set are root, split",
        'eval.sets={"a b": {split: x}}': "expected a name of letters, digits, _ and -",
        "eval.sets.a.root=${VIT_NOWHERE}": "VIT_NOWHERE",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_config(path, [setting])
    twice = path.read_text().replace("6}", "6, sets: {a: {split: x}, a: {split: y}}}")
    path.write_text(twice)
    with pytest.raises(ValueError, match=r"eval\.sets\.a is given twice"):
        load_config(path)


# --- a run ----------------------------------------------------------------------------------------


def set_words(shards: Path, folder: Path) -> list[str]:
    """Return settings for two additional evaluation sets. The best weights are selected by the
    accuracy on one of these sets."""
    split = open_split(shards, "val")
    labels = {split.key(i): [int(split.index["label"][i]), 0][i % 2 :] for i in range(22)}
    path = folder / "real.json"
    path.write_text(json.dumps({**labels, split.key(22): []}))
    sets = {"real": {"labels": str(path)}, "mini": {"split": "train"}}
    return [f"eval.sets={json.dumps(sets)}", "eval.best_by=mini", "eval.every_steps=2"]


def results_of(run_dir: Path) -> list[dict]:
    """Return the evaluation results in metrics.jsonl without fields that depend on time."""
    dropped = ("time", "seconds", "images_per_s", "data_wait_s")
    lines = {line["step"]: line for line in metrics(run_dir, "eval")}
    return [{k: v for k, v in lines[s].items() if k not in dropped} for s in sorted(lines)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    arguments = set_words(shards, folder)
    config = write_config(folder, shards, steps=6)
    run_here("launch/train.py", "--config", config, *TINY, *arguments, f"run.dir={folder / 'run'}")
    return folder / "run"


def test_the_record_has_each_set_under_its_name_and_best_is_chosen_by_one(finished, capfd):
    lines = results_of(finished)
    assert [line["step"] for line in lines] == [2, 4, 6]
    for line in lines:
        counts = [line[key] for key in ("num_images", "real/num_images", "mini/num_images")]
        assert counts == [23, 22, 60]
        assert {"mini/ece_ema", "real/loss", "real/top5_ema"} <= line.keys()
    state = json.loads(max(finished.glob("checkpoints/step_*/checkpoint.json")).read_text())
    best = max(
        (line[f"mini/top1{suffix}"], -line[f"mini/loss{suffix}"], -line["step"])
        for line in lines
        for suffix in ("", "_ema")
    )
    assert (state["best_set"], state["best_top1"]) == ("mini", best[0])
    assert read_weights(finished / "weights" / "best.safetensors").step == -best[2]


def test_the_command_agrees_with_the_record_and_compares_image_by_image(finished, capfd):
    best = finished / "weights" / "last.safetensors"
    capfd.readouterr()
    run_here("launch/eval.py", finished, best, "--device", "cpu", "--json")
    printed = capfd.readouterr()
    report = json.loads(printed.out)
    line = results_of(finished)[-1]
    for number, suffix in enumerate(("_ema", "")):
        sets = report["checkpoints"][number]["sets"]
        for name in ("real", "mini"):
            for key in ("num_images", "correct_top1", "correct_top5", "loss", "ece"):
                expected = line[f"{name}/{key}{suffix}"]
                assert sets[name][key] == pytest.approx(expected, abs=1e-4), (name, key)
        assert sets["real"]["num_skipped"] == 1
    [differences] = report["difference"]
    assert list(differences) == ["val", "real", "mini"]
    for name, difference in differences.items():
        first, second = (
            each if name == "val" else each["sets"][name] for each in report["checkpoints"]
        )
        gained = second["correct_top1"] - first["correct_top1"]
        assert difference["only_second"] - difference["only_first"] == gained
        assert difference["points"] == pytest.approx(100 * gained / first["num_images"])
    rows = printed.err[printed.err.index("set ") :].splitlines()
    assert len(rows) == 7
    assert rows[0].split()[:3] == ["set", "weights", "images"]
    # If other data is evaluated, the run's evaluation sets are skipped, but the sets given on the
    # command line are still evaluated.
    arguments = ["--split", "train", "eval.sets.again.split=val"]
    run_here("launch/eval.py", finished, *arguments, "--device", "cpu", "--json")
    other = json.loads(capfd.readouterr().out)
    assert (other["num_images"], list(other["sets"])) == (60, ["again"])


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, pytest.param(True, marks=pytest.mark.full)])
def test_two_ranks_have_the_counts_of_one_also_after_a_stop(
    is_stopped, tmp_path, shards, finished, capfd
):
    arguments = set_words(shards, tmp_path)
    config = write_config(tmp_path, shards, steps=6)
    run_dir = tmp_path / "run"
    if is_stopped:
        background = Background(config, run_dir, *arguments, ranks=2)
        background.wait_for_step(3)
        os.kill(background.trainers()[0], signal.SIGTERM)
        background.end()
        assert (run_dir / "stopped_early").exists()
    train(config, run_dir, *arguments, ranks=2)
    lines = results_of(run_dir)
    assert [line.keys() for line in lines] == [line.keys() for line in results_of(finished)]
    capfd.readouterr()
    run_here("launch/eval.py", run_dir, "--device", "cpu", "--json")
    report = json.loads(capfd.readouterr().out)
    for name in ("real", "mini"):
        for key in ("num_images", "correct_top1", "correct_top5"):
            assert lines[-1][f"{name}/{key}_ema"] == report["sets"][name][key]
        for key in ("loss", "ece"):
            theirs = report["sets"][name][key]
            assert lines[-1][f"{name}/{key}_ema"] == pytest.approx(theirs, abs=1e-4)
