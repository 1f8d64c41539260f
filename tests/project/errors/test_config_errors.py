"""Test the rows of errors/rows.yaml that describe mistakes in a config."""

from __future__ import annotations

import os
from concurrent.futures import Future

import pytest
import warm_python
from error_rows import Place, Row, Scenarios
from processes import command, environment

scenario = Scenarios()


@scenario("an unknown or misspelt key")
def _(place):
    place.config.write_text(place.config.read_text() + "optim: {weight_dekay: 0.1}\n")
    place.train()


@scenario("an option of another program")
def _(place):
    place.train("--lr", "1e-3")


@scenario("a value of the wrong type")
def _(place):
    place.train("data.global_batch_size=many")


@scenario("a value out of range")
def _(place):
    place.config.write_text(place.config.read_text() + "optim: {lr: -1}\n")
    place.train()


@scenario("several of these at once")
def _(place):
    place.train("optim.lr=fast", "data.num_worker=3")


@scenario("a key given twice")
def _(place):
    place.config.write_text(place.config.read_text() + "loss: {label_smoothing: 0.2}\n")
    place.train()


@scenario("both `epochs` and `steps`")
def _(place):
    place.config.write_text(place.config.read_text().replace("steps: 12}", "steps: 12, epochs: 3}"))
    place.train()


@scenario("no such config file")
def _(place):
    place.train(config=place.folder / "other.yaml")


DIVERGING = ["optim.lr=1e30", "optim.clip_grad_norm=null", "schedule.warmup_steps=0"]


@scenario("a learning rate that makes training diverge, with `guard.on_nonfinite=stop`", begun=True)
def _(place):
    place.train(*DIVERGING, "guard.on_nonfinite=stop")


OF_GUEST = ["model.embed_dim=null", "model.depth=null", "model.num_heads=null"]
OF_GUEST += ["model.proj_drop_rate=null", "model.drop_path_rate=null"]
EXACT = ["train.exact_over_ranks=true", "data.micro_batch_size=6"]
ALONE = {
    "an unknown model name": ["model.name=vit_base16"],
    "an unknown model of timm": ["model.name=timm/resnet5"],
    "a model of timm with settings of ours that it has not": [
        *("model.name=timm/resnet18", "model.proj_drop_rate=null")
    ],
    "activations of every second block of a model of timm": [
        *("model.name=timm/resnet10t", *OF_GUEST, "train.activation_checkpointing=2")
    ],
    "activations of a model of timm that must keep them": [
        *("model.name=timm/dla34", *OF_GUEST, "train.activation_checkpointing=block")
    ],
    "a global batch that cannot be divided": ["data.global_batch_size=7"],
    "parts of a schedule that are longer than the run": [
        *("schedule.name=wsd", "schedule.decay_fraction=1")
    ],
    "rates by depth of a network without blocks": [
        *("model.name=timm/resnet10t", *OF_GUEST, "optim.layer_decay=0.7")
    ],
    "weights of classes of another number": ["loss.class_weights=[1,2]"],
    "exact weights of a model with batch norms": [
        *("model.name=timm/resnet10t", *OF_GUEST, *EXACT)
    ],
    "a setting that has no effect without another one": ["guard.spike_sigmas=4"],
    "limits for spikes in a run that ends before the first": ["guard.on_spike=skip"],
    "a batch larger than the data": ["data.global_batch_size=64"],
    "no such dataset folder": ["data.root=data/nowhere"],
    "a set to evaluate on with the name of the validation split": ["eval.sets.val.split=train"],
    "the best weights chosen by a set that is not there": ["eval.best_by=v2"],
    "a published curve that is not there": ["eval.reference=vit_b16_deit3"],
    "labels to evaluate with that are not there": ["eval.sets.real.labels=real.json"],
    "a part of a split that is none": ["data.train_split=train[99%]"],
    "images that are evaluated on and trained on": ["data.val_split=train[95%:]"],
    "an unknown split": ["data.train_split=trian"],
    "a URL of a misspelt kind": ["data.root=htps://example.org/shards"],
    "a variable of the environment that is not set": ["data.root=https://host/shards?${SAS}"],
    "more classes in the data than `model.num_classes`": ["model.num_classes=2"],
    "an image size that the patch does not divide": ["model.image_size=30"],
    "two policies of augmentation": [
        *("augment.auto_augment=ta_wide", "augment.randaugment_layers=2")
    ],
    "stages of image size that do not fit": [
        "schedule.image_sizes=[{until_epoch: 2, image_size: 20}, {until_epoch: 1, image_size: 16}]"
    ],
    "a stage of image size behind the end of the run": [
        "schedule.image_sizes=[{until_epoch: 3, image_size: 24}]"
    ],
}
"""Scenarios that need only settings and no code."""
for problem, settings in ALONE.items():
    scenario.of[problem] = lambda place, settings=settings: place.train(*settings)


@scenario("an optimizer of timm's where it is not installed")
def _(place):
    folder = place.folder / "path"
    folder.mkdir()
    (folder / "timm.py").write_text("raise ImportError(\"No module named 'timm'\")\n")
    path = f"{folder}{os.pathsep}{environment().get('PYTHONPATH', '')}"
    place.train("optim.name=lamb", PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")


@scenario("exact weights with `OMP_NUM_THREADS=0`")
def _(place):
    place.train(*EXACT, OMP_NUM_THREADS="0")


@scenario("a published curve without numbers")
def _(place):
    file = place.folder / "curve.csv"
    header = {"title": "t", "source": "s", "recipe": "demo", "epochs": 2, "images": 23}
    lines = [f"# {key}: {value}\n" for key, value in {**header, "classes": 3}.items()]
    file.write_text("".join([*lines, "epoch,top1\n"]))
    place.train(f"eval.reference={file}")


@scenario("a contact sheet of more images than there are")
def _(place):
    python = warm_python.python(environment())
    place.run(
        *command(
            "launch/visualize.py",
            "augment",
            "--config",
            place.config,
            "--images",
            "64",
            ranks=0,
            python=python,
        )
    )


@pytest.mark.parametrize("row", scenario.rows())
def test_the_mistake_has_the_stated_result(row: Row, happened: dict[str, Future[Place]]):
    scenario.check(row, happened[row.what].result())
