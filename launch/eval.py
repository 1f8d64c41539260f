"""Evaluate a checkpoint exactly, at any resolution; or fine-tune it first.

    python launch/eval.py                                            the newest run under runs/
    python launch/eval.py runs/demo --image-size 48                  positions interpolated, nothing trained
    python launch/eval.py --checkpoint runs/demo --finetune configs/demo_finetune.yaml
    torchrun --nproc_per_node=8 launch/eval.py --checkpoint runs/vit_b16 --data /data/imagenet --json
    python launch/eval.py --checkpoint vit_base_patch16_224.augreg_in1k.safetensors --data /data/imagenet     a published model of timm's

Every image of the split counts once, on any number of ranks. With --finetune the flags below are
settings of the fine-tuning, so --image-size is the size it trains at; it prints the accuracy
before, at both sizes, and after, and compares them image by image. A fine-tuning that was stopped
or killed goes on with the same command.

`--json` prints one object on stdout: num_images, correct_top1, correct_top5, top1 and top5 in
percent, loss, top1_low and top1_high (the 95 % interval of top1), and `note` where the data's
classes are not the model's; with --finetune also `before`, `before_resized` (objects of this form)
and `difference` (see vit/metrics.py), or `stopped` and `run` after a signal. Exit status: 0 done,
or stopped and saved; 1 a bug, with its stack; 2 something to set right; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import check_versions  # noqa: F401
import torch

from vit import config_io, distributed
from vit.config import Config
from vit.config_hints import setting_for
from vit.data.augment.apply import create_augment
from vit.data.batches import ImageFormat
from vit.distributed import World
from vit.evaluate import Evaluation, evaluate
from vit.exit import run_command
from vit.metrics import interval95, paired_difference
from vit.model import create_model
from vit.open_data import open_split
from vit.published import adopt, published
from vit.run.checkpoint import newest_checkpoint
from vit.run.folder import LATEST_FILE, newest_run
from vit.run.preflight import precision_note
from vit.system.command_line import Parser
from vit.system.meter import Meter
from vit.train import build, train
from vit.weights import (
    LoadedWeights,
    class_mismatch,
    find_weights,
    fingerprint,
    load_weights,
    read_weights,
)


def main() -> World:
    """The command line above; returns the world it started."""
    args = read_command_line()
    settings = settings_of(args)
    said = sys.stderr if args.json else sys.stdout
    if args.finetune:  # read before anything starts, so that a mistake in it shows at once
        given = [
            f"{key}={json.dumps(value)}"
            for key, value in {**settings, "init.checkpoint": args.checkpoint}.items()
        ]
        tuned = config_io.load_config(args.finetune, [*given, *args.overrides]).config
    setting = "--device " if args.device else "train.device="
    world = distributed.join_world(
        tuned.train.device if args.finetune else args.device or "auto", setting
    )
    path = world.main_first(lambda: find_weights(args.checkpoint or _newest_run()))
    known = None
    config = None
    problem = ""
    with world.fail_together():
        trained = read_weights(path)
        if args.model and trained.config is not None:
            raise ValueError(
                f"--model {args.model}: {trained.path} comes from this project and knows what it"
                " is: leave --model out"
            )
        try:
            if trained.config is None:
                root, split = (
                    (tuned.data.root, tuned.data.val_split)
                    if args.finetune
                    else (args.data, args.split or "val")
                )
                trained, known = adopt(trained, args.model, root, split)
            config = config_io.from_dict(trained.config or {}, str(trained.path))
        except ValueError as error:
            if not args.finetune:
                raise
            # weights without a head can be fine-tuned, though not evaluated before
            problem = str(error)
    world.check_same(lambda: f"{path}, step {trained.step}", "weights")
    if args.finetune:
        finetune(trained, config, problem, tuned, world, said, args.json)
        return world
    assert config is not None, "or the problem was raised"
    config = with_settings(config, settings)
    _, as_json = evaluate_trained(trained, config, world, said)
    if world.is_main and known is not None:
        num_classes = open_split(config.data, config.data.val_split).num_classes
        size = ImageFormat.from_config(config.model, config.data).size
        head_classes = trained.num_classes or num_classes
        line = published(known, as_json["num_images"], size, num_classes, head_classes)
        print(f"  {line}", file=said)
    if world.is_main and args.json:
        print(json.dumps(as_json))
    return world


def read_command_line(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags; what else is there is the run or file (`checkpoint`) and the settings
    (`overrides`). Raises ValueError for mistakes."""
    parser = Parser("python launch/eval.py", __doc__, setting_for)
    parser.add_argument(
        "--checkpoint",
        metavar="RUN_OR_FILE",
        help=(
            "run folder (its last weights, averaged where there are some), checkpoint folder, or"
            " weights file, also of timm's (default: the newest run); may stand without"
            " --checkpoint"
        ),
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="timm's name of weights that were trained elsewhere, if their file does not tell",
    )
    parser.add_argument(
        "--data", metavar="ROOT", help="folder of shards (default: the one it was trained on)"
    )
    parser.add_argument("--split", help="split to evaluate (default: the run's data.val_split)")
    parser.add_argument(
        "--image-size",
        type=int,
        nargs="+",
        metavar="PIXELS",
        help="side, or height and width (default: as trained)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="images in one forward pass of one rank (default: the run's eval.batch_size)",
    )
    parser.add_argument(
        "--num-workers",
        type=int,
        metavar="N",
        help="loader processes per rank (default: the run's data.num_workers)",
    )
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16", "fp16"],
        help="format of matrix products (default: the run's train.precision)",
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        help="(default: auto, GPUs where each rank of a host has one)",
    )
    parser.add_argument(
        "--finetune",
        metavar="CONFIG",
        help="fine-tune with this config first, and evaluate before and after",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout and nothing else there"
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN_OR_FILE | section.key=value",
        help="with --finetune: settings that win over its file",
    )
    args = parser.parse_intermixed_args(words)
    paths = [word for word in args.words if "=" not in word or Path(word).exists()]
    args.overrides = [word for word in args.words if word not in paths]
    if len(paths := [*paths, *filter(None, [args.checkpoint])]) > 1:
        parser.error(f"{' and '.join(paths)}: give one run or file to evaluate")
    args.checkpoint = paths[0] if paths else None
    if args.overrides and not args.finetune:
        parser.error(f"{' '.join(args.overrides)}: settings belong to --finetune")
    if args.image_size and (len(args.image_size) > 2 or min(args.image_size) < 1):
        parser.error("--image-size takes a side, or height and width, in pixels")
    if args.finetune and not args.checkpoint:
        parser.error("--finetune needs --checkpoint: the newest run may be a fine-tuned one")
    return args


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, as settings: dotted key -> value."""
    size = args.image_size and (
        args.image_size[0] if len(args.image_size) == 1 else args.image_size
    )
    flags = {
        "data.root": args.data,
        "data.val_split": args.split,
        "model.image_size": size,
        "eval.batch_size": args.batch_size,
        "data.num_workers": args.num_workers,
        "train.precision": args.precision,
        "train.device": args.device,
    }
    return {key: value for key, value in flags.items() if value is not None}


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """`config` with what `settings` (dotted key -> value) say otherwise."""
    values = config.model_dump(mode="json")
    for key, value in settings.items():
        section, _, name = key.partition(".")
        values[section][name] = value
    return config_io.from_dict(values, "command line")


def size_of(config: Config) -> str:
    """Height and width of its images in words."""
    return "x".join(map(str, ImageFormat.from_config(config.model, config.data).size))


def _newest_run() -> Path:
    """The run whose weights or checkpoints changed last."""
    run = newest_run("weights/last.safetensors", LATEST_FILE)
    if run is None:
        raise ValueError(
            "no --checkpoint given and no run with weights under runs/: train one first, or name a"
            " run folder or a file"
        )
    if distributed.is_main_process():
        print(f"--checkpoint not given: taking the newest run, {run}", file=sys.stderr)
    return run


def evaluate_trained(
    trained: LoadedWeights, config: Config, world: World, said: TextIO
) -> tuple[Evaluation, dict[str, Any]]:
    """Evaluate weights under `config`, which may name another image size than they were trained at,
    and tell the result to `said`.

    Returns it, and as the object that `--json` prints.
    """
    split = open_split(config.data, config.data.val_split, world)
    assert trained.num_classes is not None, "it came with its config"
    image = ImageFormat.from_config(config.model, config.data)
    with world.fail_together():
        if split.num_classes > trained.num_classes:
            raise ValueError(
                f"{split.root}: has {split.num_classes} classes, {trained.path} knows"
                f" {trained.num_classes}: use data of its own kind"
            )
        model = create_model(config.model, num_classes=trained.num_classes)
        notes = load_weights(model, trained.weights, trained.grid_size)
    model.to(world.device)
    if world.is_main and (
        note := precision_note(config.train.precision, world.device, "--precision fp32")
    ):
        print(f"note: {note}", file=sys.stderr)
    size = size_of(config)
    with Meter(f"evaluating at {size}", split.num_samples, "images", shown=world.is_main) as meter:
        result = evaluate(
            {"model": model},
            split,
            image,
            create_augment(
                config.augment,
                config.data,
                trained.num_classes,
                world.device,
                compiled=config.train.compile,
            ),
            world,
            batch_size=config.eval.batch_size,
            view=config.eval,
            precision=config.train.precision,
            num_workers=config.data.num_workers,
            stall_timeout_s=config.data.stall_timeout_s,
            on_batch=lambda done, total: meter.update(split.num_samples * done // total),
        )["model"]
    if world.is_main:
        which = (
            f" (step {trained.step}{', averaged weights' if trained.averaged else ''})"
            if trained.step is not None
            else ""
        )
        print(
            f"{trained.path}{which} on {split.root} {split.name!r}: {split.num_samples} images at"
            f" {size}",
            file=said,
        )
        for note in notes:
            print(f"  {note}", file=said)
        print(f"  {result.accuracy}", file=said)
    as_json: dict[str, Any] = dict(result.accuracy.to_dict())
    as_json["top1_low"], as_json["top1_high"] = interval95(
        result.accuracy.correct_top1, result.accuracy.num_images
    )
    if note := class_mismatch(trained, split.class_names, split.num_classes):
        as_json["note"] = note
        if world.is_main:
            print(f"  note: {note}", file=said)
    return result, as_json


def finetune(
    trained: LoadedWeights,
    base: Config | None,
    problem: str,
    tuned: Config,
    world: World,
    said: TextIO,
    as_json: bool,
) -> None:
    """Fine-tune `trained` by `tuned`; evaluate before, at both sizes, and after, on the images of
    `tuned`.

    `base` is the config of `trained`, or None for weights that cannot be evaluated, with the
    `problem` in words.
    """
    assert tuned.run.dir is not None, "load_config names it"
    # a run that goes on, or is finished, must have begun with these weights
    with world.fail_together():
        found = newest_checkpoint(Path(tuned.run.dir)) if world.is_main else None
        if found is not None and found[1]["facts"].get("init_sha256") not in (
            None,
            fingerprint(trained.weights),
        ):
            raise ValueError(
                f"{tuned.run.dir} was fine-tuned from other weights than {trained.path} holds now:"
                " use another run.dir, or remove it"
            )
    split = open_split(tuned.data, tuned.data.val_split, world)
    new_size = size_of(tuned)
    before: dict[str, tuple[Evaluation, dict[str, Any]]] = {}
    if base is not None and split.num_classes != trained.num_classes:
        problem = (
            f"{trained.path} knows {trained.num_classes} classes, {split.root} has"
            f" {split.num_classes}"
        )
    if base is not None and not problem:
        data = {"data.root": tuned.data.root, "data.val_split": tuned.data.val_split}
        hardware = {
            "data.num_workers": tuned.data.num_workers,
            "eval.batch_size": tuned.eval.batch_size,
        }
        before["before"] = evaluate_trained(
            trained, with_settings(base, {**data, **hardware}), world, said
        )
        if new_size != size_of(base):
            keys = ("crop_pct", "resize_px", "crop_mode", "resizer")
            view = {
                "model.image_size": tuned.model.image_size,
                **{f"eval.{key}": getattr(tuned.eval, key) for key in keys},
            }
            before["before_resized"] = evaluate_trained(
                trained, with_settings(base, {**data, **hardware, **view}), world, said
            )
    elif world.is_main:
        print(f"no accuracy before: {problem}", file=said)

    if train(build(tuned, world)) == "stopped":
        if world.is_main:
            print(
                f"fine-tuning was stopped before its end and is saved in {tuned.run.dir}: the same"
                " command goes on",
                file=said,
            )
            if as_json:
                print(json.dumps({"stopped": True, "run": tuned.run.dir}))
        return
    world.barrier()
    after, after_json = evaluate_trained(read_weights(tuned.run.dir), tuned, world, said)
    if not world.is_main:
        return

    labels = torch.from_numpy(split.index["label"].astype("int64"))
    is_right = after.predictions == labels
    differences = {
        name: paired_difference(result.predictions == labels, is_right)
        for name, (result, _) in before.items()
    }
    if before:
        print(
            f"fine-tuned at {new_size}, image by image on the same {split.num_samples}:", file=said
        )
    for name, difference in differences.items():
        against = (
            f"base at {size_of(base)}"
            if base is not None and name == "before"
            else f"base at {new_size}, untrained there"
        )
        print(f"  against the {against}: {difference}", file=said)
    if as_json:
        others = {name: values for name, (_, values) in before.items()}
        print(
            json.dumps(
                {
                    **after_json,
                    **others,
                    "difference": {k: asdict(v) for k, v in differences.items()},
                }
            )
        )


if __name__ == "__main__":
    run_command(main)
