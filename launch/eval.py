"""Evaluate a checkpoint on every image at any resolution, optionally after fine-tuning it.

    python launch/eval.py                                    the newest run under runs/
    python launch/eval.py runs/demo --image-size 48          interpolated positions, no training
    python launch/eval.py runs/a runs/b                      compare runs image by image
    python launch/eval.py runs/demo eval.sets.v2.root=data/v2 eval.sets.v2.split=train
    python launch/eval.py --checkpoint runs/demo --finetune configs/demo_finetune.yaml
    torchrun --nproc_per_node=8 launch/eval.py --checkpoint runs/vit_b16 --data /data/imagenet
    python launch/eval.py --checkpoint vit_base_patch16_224.augreg_in1k.safetensors \\
        --data /data/imagenet                                a model published by timm

Every image in the split counts exactly once, with any number of ranks. With --finetune, the flags
below configure the fine-tuning, so --image-size is the training size. The command then prints the
accuracy before fine-tuning, at both image sizes, and after it. It also compares the models image by
image. Run the same command again to resume fine-tuning that was stopped or killed.

The sets in the run's `eval.sets` are also evaluated, unless --data or --split selects other images.
Settings on the command line can add further sets. If several checkpoints are given, a table
compares each one with the first, image by image, on the first checkpoint's sets
(docs/evaluation.md).

`--json` prints one object on stdout with these keys: num_images, correct_top1, correct_top5, top1
and top5 in percent, loss, ece (the calibration error in percentage points), top1_low and top1_high
(the 95 % interval of top1), `sets` (results by set name), and `note` if the data's classes differ
from the model's. In `sets`, num_skipped is the number of images without a label. For several
checkpoints, `checkpoints` is a list of such objects, and `difference` lists how each checkpoint
differs from the first on each set (see vit/training/metrics.py). --finetune adds `before` and
`before_resized`, which are objects of the same form, and `difference`. If a signal stops
fine-tuning, the object has only `stopped` and `run`. Exit status: 0 done, or stopped and saved; 1 a
bug, with its stack; 2 a user mistake; 130 interrupted.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import check_versions  # noqa: F401

from vit.compose import build_run
from vit.config import io as config_io
from vit.config.base import VAL
from vit.config.hints import setting_for
from vit.config.schema import Config
from vit.distributed import process_group
from vit.distributed.exit import run_command
from vit.distributed.process_group import World
from vit.evaluation.compare import Result, compare, evaluate_weights
from vit.finetune import finetune
from vit.run_folder.paths import LATEST_FILE, newest_run
from vit.system.command_line import Parser, add_model_flags, model_flag_problems, model_settings
from vit.weights.class_names import check_head
from vit.weights.files import LoadedWeights, read_weights
from vit.weights.on_ranks import on_all_ranks
from vit.weights.published import describe_published, with_published_config
from vit.weights.published_models import KnownModel


def main() -> World:
    args = read_command_line()
    out = sys.stderr if args.json else sys.stdout
    device_setting = "--device " if args.device else "train.device="
    if args.finetune:
        return _finetune(args, device_setting, out)

    settings = settings_of(args)
    world = process_group.join_world(args.device or "auto", device_setting)
    results = _evaluate_all(args, settings, world, out)
    if world.is_main:
        as_json = (
            results[0].as_json if len(results) == 1 else compare(args.checkpoints, results, out)
        )
        if args.json:
            print(json.dumps(as_json))
    return world


def _finetune(args: argparse.Namespace, device_setting: str, out: TextIO) -> World:
    """Fine-tune the checkpoint with the config of --finetune, and evaluate it before and after."""
    # Read the config first, so that mistakes are reported immediately.
    flags = {**settings_of(args), "init.checkpoint": args.checkpoints[0]}
    overrides = [f"{key}={json.dumps(value)}" for key, value in flags.items()]
    tuned = config_io.load_config(args.finetune, [*overrides, *args.overrides])

    world = process_group.join_world(
        tuned.train.device, device_setting, deterministic=tuned.train.deterministic
    )
    subject = _read(args.checkpoints[0], args, tuned.data.root, tuned.data.val_split, world)
    finetune(
        subject.loaded,
        subject.config,
        problem=subject.problem,
        tuned=tuned,
        world=world,
        build_run=build_run,
        out=out,
        as_json=args.json,
    )
    return world


def _evaluate_all(
    args: argparse.Namespace, settings: dict[str, Any], world: World, out: TextIO
) -> list[Result]:
    """Evaluate each checkpoint, or the newest run, on the images that are used for the first
    one."""
    if len(args.checkpoints) > 1:
        world.broadcast_from_main(lambda: _try_to_read(args.checkpoints))

    results: list[Result] = []
    root, split = args.data, args.split or "val"
    for path in args.checkpoints or [""]:
        subject = _read(path, args, root, split, world)
        assert subject.config is not None, "without --finetune a missing config is an error"
        config = config_io.with_settings(subject.config, settings)
        if not results:  # the following checkpoints are evaluated on the same images
            root, split = config.data.root, config.data.val_split
            settings |= {
                "data.root": root,
                "data.val_split": split,
                "eval.sets": config.eval.model_dump(mode="json")["sets"],
                "eval.best_by": config.eval.best_by,
            }

        result = evaluate_weights(
            subject.loaded, config, world=world, out=out, selected=args.select_classes
        )
        results.append(result)
        if world.is_main:
            _print_published(subject, config, result, args.select_classes, out)

    return results


def _try_to_read(paths: Sequence[str]) -> None:
    """Raise one ValueError that names all unreadable files, before hours of evaluation."""
    problems = []
    for path in paths:
        try:
            read_weights(path)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))


class _Subject(NamedTuple):
    """The weights to evaluate. They are the same on all ranks."""

    loaded: LoadedWeights
    config: Config | None
    published: KnownModel | None
    """The published model that has these weights. It is known only on rank 0."""
    problem: str
    """The reason why there is no config. Without --finetune, a missing config is an error."""


def _read(
    path: str, args: argparse.Namespace, root: str | None, split: str, world: World
) -> _Subject:
    """Read weights from a run or another program, to be evaluated on the split `split` of `root`.

    path: the path of the weights, or "" for the newest run. Raises ValueError if there is no config
    and --finetune is not set.
    """
    loaded_on_main, published, problem_on_main = world.on_main(
        lambda: _read_on_main(path, args, root, split)
    ) or (None, None, "")
    loaded = on_all_ranks(loaded_on_main, world)
    problem = world.broadcast_from_main(lambda: problem_on_main)

    config = None if problem else config_io.from_dict(loaded.config or {}, str(loaded.path))
    return _Subject(loaded, config, published, problem)


def _read_on_main(
    path: str, args: argparse.Namespace, root: str | None, split: str
) -> tuple[LoadedWeights, KnownModel | None, str]:
    """Return the weights, their published model (or None), and why they have no config (or "")."""
    loaded = read_weights(
        path or newest_run("--checkpoint", "weights/last.safetensors", LATEST_FILE)
    )
    if args.model and loaded.config is not None:
        raise ValueError(
            f"--model {args.model}: {loaded.path} was saved by this project and contains"
            " its model's name: omit --model"
        )

    published: KnownModel | None = None
    try:
        if loaded.config is None:
            loaded, published = with_published_config(loaded, args.model, root, split)
            check_head(loaded)
        config_io.from_dict(loaded.config or {}, str(loaded.path))
    except ValueError as error:
        if not args.finetune:
            raise
        # Weights without a head can be fine-tuned, but cannot be evaluated before fine-tuning.
        return loaded, published, str(error)

    return loaded, published, ""


def _print_published(
    subject: _Subject, config: Config, result: Result, is_selected: bool, out: TextIO
) -> None:
    """Print the published accuracy of the model next to the measured one, if it is known."""
    if subject.published is None or not result.sets:
        return

    num_classes = result.sets[VAL][0].split.num_classes
    head_classes = (0 if is_selected else subject.loaded.num_classes) or num_classes

    line = describe_published(
        subject.published,
        result.as_json["num_images"],
        config.model.height_width(),
        num_classes,
        head_classes,
    )
    print(f"  {line}", file=out)


def _create_parser() -> Parser:
    parser = Parser("python launch/eval.py", __doc__, setting_for)
    parser.add_argument(
        "--checkpoint",
        nargs="+",
        default=[],
        metavar="RUN_OR_FILE",
        help=(
            "run folder (its last weights, averaged if available), checkpoint folder, weights file"
            " (also from timm), or Hugging Face name such as timm/NAME (default: the newest run);"
            " the flag itself may be omitted; several checkpoints are compared with the first,"
            " image by image"
        ),
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="timm's name of weights from another program, if the file does not contain it",
    )

    parser.add_argument(
        "--data", metavar="ROOT", help="folder of shards (default: the run's data.root)"
    )
    parser.add_argument(
        "--select-classes",
        action="store_true",
        help="use only the model's classes that occur in the data, matched by name (200 of 1,000)",
    )
    parser.add_argument("--split", help="split to evaluate (default: the run's data.val_split)")

    add_model_flags(
        parser,
        batch_size="images per forward pass and rank (default: the run's eval.batch_size)",
        num_workers="loader processes per rank (default: the run's loader.num_workers)",
        device="(default: auto, GPUs if each rank of a host has one)",
    )

    parser.add_argument(
        "--finetune",
        metavar="CONFIG",
        help="first fine-tune with this config, and evaluate before and after",
    )
    parser.add_argument("--json", action="store_true", help="print only one JSON object on stdout")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN_OR_FILE | section.key=value",
        help="settings such as eval.sets.v2.root=data/v2; only eval.* without --finetune",
    )

    return parser


def read_command_line(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line into flags, `checkpoints` and `overrides` (settings).

    Raises ValueError for invalid arguments.
    """
    parser = _create_parser()
    args = parser.parse_intermixed_args(arguments)
    positionals = [*args.words, *args.checkpoint]
    # An argument with "=" is a setting, unless a file with that name exists.
    args.checkpoints = [word for word in positionals if "=" not in word or Path(word).exists()]
    args.overrides = [word for word in positionals if word not in args.checkpoints]

    named = " and ".join(args.checkpoints)
    if args.finetune and len(args.checkpoints) > 1:
        parser.error(f"{named}: pass one run or file to fine-tune")
    if len({*args.checkpoints}) < len(args.checkpoints):
        parser.error(f"{named}: a checkpoint is listed twice: remove one")

    foreign = [word for word in args.overrides if not word.startswith("eval.")]
    if foreign and not args.finetune:
        parser.error(f"{' '.join(foreign)}: only eval.* settings are allowed without --finetune")
    problems = model_flag_problems(args)
    if problems:
        parser.error("; ".join(problems))

    if args.finetune and args.select_classes:
        parser.error("--select-classes: with --finetune, use init.select_classes=true instead")
    if args.finetune and not args.checkpoints:
        parser.error(
            "--finetune requires --checkpoint, because the newest run may be a fine-tuned one"
        )

    return args


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the flags change, as a dict from dotted keys to values."""
    flags = {
        "data.root": args.data,
        "data.val_split": args.split,
        "eval.batch_size": args.batch_size,
        "loader.num_workers": args.num_workers,
        "train.device": args.device,
        **model_settings(args),
    }
    settings = {key: value for key, value in flags.items() if value is not None}
    if args.finetune:
        return settings
    if args.data or args.split:
        # The run's evaluation sets might be valid only for the run's own data.
        settings |= {"eval.sets": {}, "eval.best_by": VAL}
    return settings | config_io.read_overrides(args.overrides)


if __name__ == "__main__":
    run_command(main)
