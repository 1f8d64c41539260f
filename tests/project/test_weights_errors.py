"""Test the rows of errors/rows.yaml about weights from other programs and about exports.

The command must print the error in each row, and must not leave any files.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from error_rows import Row, pattern_of, rows, snapshot
from processes import TINY, as_by_another_program, run, train, write_config
from safetensors import safe_open
from safetensors.torch import save_file

ROWS = rows("Weights of other programs, and exports")


class Place(NamedTuple):
    folder: Path
    config: Path
    finished: Path

    def train(self, *settings: str) -> list:
        folder = f"run.dir={self.folder / 'run'}"
        return ["launch/train.py", "--config", self.config, *TINY, folder, *settings]

    def export(self, path: Path, to: str, *arguments: object) -> list:
        return ["launch/export.py", path, "--to", to, *arguments]


def html(place):
    (place.folder / "page.pth").write_text("<!DOCTYPE html><title>Sign in</title>")
    return ["launch/eval.py", place.folder / "page.pth"]


class Canary:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def code(place):
    torch.save({"a": Canary(place.folder / "canary")}, place.folder / "code.pth")
    return ["launch/eval.py", place.folder / "code.pth"]


def python_pickle(place):
    (place.folder / "python.pth").write_bytes(pickle.dumps({"a": [1.0]}, protocol=4))
    return ["launch/predict.py", "--checkpoint", place.folder / "python.pth", "photo.jpg"]


def torchscript(place):
    with zipfile.ZipFile(place.folder / "script.pt", "w") as file:
        for name in ("data.pkl", "constants.pkl", "code/m.py"):
            file.writestr(f"script/{name}", b"")
    return place.export(place.folder / "script.pt", "timm")


def photos(place):
    with zipfile.ZipFile(place.folder / "photos.zip", "w") as file:
        file.writestr("photo.jpg", b"")
    return ["launch/predict.py", "--checkpoint", place.folder / "photos.zip", "photo.jpg"]


def cut_safetensors(place):
    whole = (place.finished / "weights" / "last.safetensors").read_bytes()
    (place.folder / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    return place.export(place.folder / "cut.safetensors", "timm")


def objects(place):
    np.savez(place.folder / "objects.npz", a=np.array([Path("a")], dtype=object))
    return ["launch/eval.py", place.folder / "objects.npz"]


def refilled(place, name, value):
    """Return the weights of the finished run with one tensor filled with `value`."""
    path = place.folder / "refilled.safetensors"
    with safe_open(place.finished / "weights" / "last.safetensors", framework="pt") as file:
        metadata = as_by_another_program(file.metadata())
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    tensors[name].fill_(value)
    save_file(tensors, path, metadata)
    return path


def nan_weights(place):
    path = refilled(place, "blocks.0.norm1.bias", float("nan"))
    return place.export(path, "timm", "--out", place.folder / "out")


def huge_weights(place):
    return ["launch/eval.py", refilled(place, "head.weight", 3e38)]


def missing_part(place):
    save_file({"a": torch.zeros(1)}, place.folder / "a.safetensors")
    places = {"a": "a.safetensors", "b": "b.safetensors"}
    index = place.folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return ["launch/eval.py", place.folder]


def another_family(place):
    names = ("conv1.weight", "bn1.weight", "fc.weight", "fc.bias")
    torch.save({name: torch.zeros(3, 3) for name in names}, place.folder / "resnet.pth")
    return place.train(f"init.checkpoint={place.folder / 'resnet.pth'}")


def two_networks(place):
    names = ("encoder_k.patch_embed.proj.weight", "encoder_q.patch_embed.proj.weight")
    torch.save({name: torch.zeros(1) for name in names}, place.folder / "moco.pth")
    return place.train(f"init.checkpoint={place.folder / 'moco.pth'}")


def no_head(place):
    path = place.folder / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
    save_file({"norm.weight": torch.zeros(1)}, path)
    return place.export(path, "timm")


def no_grid(place):
    with safe_open(place.finished / "weights" / "last.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors["pos_embed"] = torch.zeros(1, 7, tensors["pos_embed"].shape[2])
    torch.save(tensors, place.folder / "rows.pth")
    return place.train(f"init.checkpoint={place.folder / 'rows.pth'}")


def of_transformers(place, outputs: int = 3, processor: object = None, **config: object) -> list:
    """Write a folder in transformers' format, and return the command that evaluates it."""
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    content = {"model_type": "vit", "architectures": [], "image_size": 224, "patch_size": 16}
    content |= {**dict.fromkeys(sizes, 1), "layer_norm_eps": 1e-6, **config}
    (place.folder / "config.json").write_text(json.dumps(content))
    (place.folder / "preprocessor_config.json").write_text(json.dumps(processor or {}))
    save_file({"head.weight": torch.zeros(outputs, 1)}, place.folder / "model.safetensors")
    return ["launch/eval.py", place.folder, "--data", place.folder]


def another_activation(place):
    return of_transformers(place, hidden_act="quick_gelu", pruned_heads={"0": [1]})


def no_resize(place):
    return of_transformers(place, processor={"do_resize": False})


def another_size(place):
    return of_transformers(place, processor={"size": {"height": 384, "width": 384}})


def several_labels(place):
    return of_transformers(place, problem_type="multi_label_classification")


def one_output(place):
    return of_transformers(place, outputs=1)


def no_place(place):
    with safe_open(place.finished / "weights" / "last.safetensors", framework="pt") as file:
        metadata = as_by_another_program(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config = json.loads(metadata["config"])
    config["model"]["init_values"] = 0.1
    blocks = {name.rpartition(".norm1")[0] for name in tensors if ".norm1.weight" in name}
    width = len(tensors["patch_embed.proj.bias"])
    scales = (f"{block}.{scale}.gamma" for block in blocks for scale in ("ls1", "ls2"))
    tensors |= {name: torch.ones(width) for name in scales}
    path = place.folder / "scaled.safetensors"
    save_file(tensors, path, metadata | {"config": json.dumps(config)})
    return place.export(path, "torchvision", "--out", place.folder / "out")


def taken(place):
    (place.folder / "taken").touch()
    return place.export(place.finished, "timm", "--out", place.folder)


def no_weights(place):
    return place.export(place.folder / "none.pth", "timm")


def frozen_beyond_the_depth(place):
    return place.train(f"init.checkpoint={place.finished}", "init.freeze=7")


def of_other_classes(place):
    path = place.folder / "other.safetensors"
    with safe_open(place.finished / "weights" / "last.safetensors", framework="pt") as file:
        metadata = as_by_another_program(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata | {"class_names": json.dumps(["a", "b", "c"])})
    return path


def classes_that_it_does_not_know(place):
    return ["launch/eval.py", of_other_classes(place), "--select-classes"]


def no_teacher(place):
    return place.train(f"distill.teacher={place.folder / 'none.pth'}")


def teacher_of_other_classes(place):
    return place.train(f"distill.teacher={of_other_classes(place)}")


def another_teacher(place):
    teacher = f"distill.teacher={place.finished}"
    return [*place.train(teacher), f"run.dir={place.finished}"]


SCENARIOS: dict[str, Callable[[Place], list]] = {
    "an HTML page saved as `.pth`": html,
    "a pickle that would run code, as `.pth`": code,
    "a pickle that Python wrote": python_pickle,
    "TorchScript": torchscript,
    "a zip of photos": photos,
    "safetensors that are cut off": cut_safetensors,
    "an array of objects in an `.npz`": objects,
    "weights that are NaN or infinite": nan_weights,
    "an evaluation with logits that are NaN or infinite": huge_weights,
    "weights in parts, one of which is missing": missing_part,
    "weights of another family": another_family,
    "several networks in one file": two_networks,
    "an export of weights without a head": no_head,
    "positions that form no grid": no_grid,
    "a network of transformers that computes something else": another_activation,
    "preprocessing of transformers without a resize": no_resize,
    "preprocessing of transformers for another size": another_size,
    "a model of transformers with several labels per image": several_labels,
    "a head with one output": one_output,
    "an export to a program that has no place for a part of the model": no_place,
    "an export to a folder that holds something": taken,
    "an export of something else than weights": no_weights,
    "`init.freeze` of more blocks than there are": frozen_beyond_the_depth,
    "`--select-classes` with names that the model does not know": classes_that_it_does_not_know,
    "a teacher that is not there": no_teacher,
    "a teacher of other classes": teacher_of_other_classes,
    "another teacher, or the first one, for a run that goes on": another_teacher,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, shards):
    folder = tmp_path_factory.mktemp("weights_errors")
    train(write_config(folder, shards), folder / "run")
    return folder / "run"


@pytest.mark.parametrize("row", [row.case() for row in ROWS])
def test_the_mistake_has_the_stated_result(row: Row, tmp_path, shards, finished):
    config = write_config(tmp_path, shards)
    place = Place(tmp_path / "place", config, finished)
    place.folder.mkdir()
    line = SCENARIOS[row.what](place)
    before = snapshot(tmp_path)
    done = run(*line)
    assert re.search(f"(?m)^{pattern_of(row.printed)}$", done.stderr), done.stderr
    assert done.returncode == row.status
    assert snapshot(tmp_path) == before, "the mistake must be found before the start"


def test_each_scenario_has_its_row():
    assert [row.what for row in ROWS] == list(SCENARIOS)
