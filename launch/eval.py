"""Evaluate a checkpoint exactly, at any resolution; or fine-tune it first.

    python launch/eval.py                                            the newest run under runs/
    python launch/eval.py --checkpoint runs/demo --image-size 48     positions interpolated, nothing trained
    python launch/eval.py --checkpoint runs/demo --finetune configs/demo_finetune.yaml
    torchrun --nproc_per_node=8 launch/eval.py --checkpoint runs/b16 --data /data/imagenet --json

Every image of the split counts once, on any number of ranks. `--json` prints one object on stdout: num_images, correct_top1,
correct_top5, top1 and top5 in percent, loss. Exit status: 0 done, 2 something to set right.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import Progress

from vit import config_io, distributed
from vit.config import Config
from vit.data.shards import open_split
from vit.distributed import World
from vit.evaluate import evaluate
from vit.metrics import Accuracy
from vit.model import create_model
from vit.train import build, create_augment, image_format, train
from vit.weights import Trained, find_trained, load_weights, read_trained


def main() -> World:
    """The command line above; returns the world it started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", metavar="RUN_OR_FILE", help="run folder, checkpoint folder or weights file (default: the newest run)"
    )
    parser.add_argument("--data", metavar="ROOT", help="folder of shards (default: the one it was trained on)")
    parser.add_argument("--split", help="split to evaluate (default: the run's data.val_split)")
    parser.add_argument("--image-size", type=int, nargs="+", metavar="PIXELS", help="side, or height and width (default: as trained)")
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="images in one forward pass of one rank (default: the run's eval.batch_size)"
    )
    parser.add_argument("--num-workers", type=int, metavar="N", help="loader processes per rank (default: the run's data.num_workers)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: %(default)s)")
    parser.add_argument("--finetune", metavar="CONFIG", help="fine-tune with this config first, and evaluate before and after")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else there")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="with --finetune: settings that win over its file")
    args = parser.parse_intermixed_args()
    if args.overrides and not args.finetune:
        parser.error(f"{' '.join(args.overrides)}: settings belong to --finetune")
    if args.image_size and (len(args.image_size) > 2 or min(args.image_size) < 1):
        parser.error("--image-size takes a side, or height and width, in pixels")

    if args.finetune and not args.checkpoint:
        parser.error("--finetune needs --checkpoint: the newest run may be a fine-tuned one")

    said = sys.stderr if args.json else sys.stdout
    world = distributed.start(args.device)
    path = world.main_first(lambda: find_trained(args.checkpoint or newest_run()))
    with world.main_reports():
        trained = read_trained(path)
        config = with_flags(config_of(trained), args)
    world.check_same(f"{path}, step {trained.step}", "weights")
    results = {"before" if args.finetune else "result": evaluate_trained(trained, config, world, said)}
    if args.finetune:
        tuned, tuned_path = finetune(args.finetune, [f"init.checkpoint={json.dumps(args.checkpoint)}", *args.overrides], world)
        same_size = with_flags(config, argparse.Namespace(**{**vars(args), "image_size": list(image_format(tuned).size)}))
        results["before, at the higher resolution"] = evaluate_trained(trained, same_size, world, said)
        results["after"] = evaluate_trained(read_trained(tuned_path), tuned, world, said)
    if world.is_main and args.json:
        print(json.dumps(results.popitem()[1].to_dict()))
    return world


def newest_run() -> Path:
    """The folder under runs/ whose weights or checkpoints changed last."""
    changed = [p for pattern in ("*/weights/last.safetensors", "*/checkpoints/latest") for p in Path("runs").glob(pattern)]
    if not changed:
        raise ValueError("no --checkpoint given and no run with weights under runs/: train one first, or name a run folder or a file")
    run = max(changed, key=lambda p: p.stat().st_mtime).parent.parent
    if distributed.is_main_process():
        print(f"--checkpoint not given: taking the newest run, {run}", file=sys.stderr)
    return run


def config_of(trained: Trained) -> Config:
    """The config that came with the weights."""
    if trained.config is None:
        raise ValueError(
            f"{trained.path}: has no config inside, so this project's trainer did not write it: give a run folder or a file of its weights/"
        )
    return config_io.from_dict(trained.config, str(trained.path))


def with_flags(config: Config, args: argparse.Namespace) -> Config:
    """`config` with what the command line says otherwise."""
    values = config_io.to_dict(config)
    size = args.image_size and (args.image_size[0] if len(args.image_size) == 1 else args.image_size)
    for section, key, value in (
        ("data", "root", args.data),
        ("data", "val_split", args.split),
        ("model", "image_size", size),
        ("eval", "batch_size", args.batch_size),
        ("data", "num_workers", args.num_workers),
    ):
        if value is not None:
            values[section][key] = value
    return config_io.from_dict(values, "command line")


def evaluate_trained(trained: Trained, config: Config, world: World, said: TextIO) -> Accuracy:
    """Evaluate weights under `config`, which may name another image size than they were trained at, and tell the result to `said`."""
    split = world.main_first(lambda: open_split(config.data.root, config.data.val_split))
    assert trained.num_classes is not None, "it came with its config"
    if split.num_classes > trained.num_classes:
        raise ValueError(
            f"{split.root}: has {split.num_classes} classes, {trained.path} knows {trained.num_classes}: use data of its own kind"
        )
    image = image_format(config)
    model = create_model(config.model.name, config.model.image_size, trained.num_classes, **config.model.fields())
    notes = load_weights(model, trained.weights, trained.grid_size)
    model.to(world.device)
    size = "x".join(map(str, image.size))
    with Progress(console=Console(stderr=True), transient=True, disable=not (world.is_main and sys.stderr.isatty())) as progress:
        task = progress.add_task(f"{split.num_samples:,} images at {size}", total=None)
        results = evaluate(
            {"model": model},
            split,
            image,
            create_augment(config, trained.num_classes, world),
            world,
            batch_size=config.eval.batch_size,
            crop_ratio=config.eval.crop_ratio,
            precision=config.train.precision,
            num_workers=config.data.num_workers,
            on_batch=lambda done, total: progress.update(task, completed=done, total=total),
        )
    result = results["model"].accuracy
    if world.is_main:
        which = ", averaged weights" if trained.averaged else ""
        print(
            f"{trained.path} (step {trained.step}{which}) on {split.root} {split.name!r}: {result.num_images} images at {size}", file=said
        )
        for note in notes:
            print(f"  {note}", file=said)
        print(f"  {result}", file=said)
    return result


def finetune(file: str, overrides: list[str], world: World) -> tuple[Config, Path]:
    """Train with `file` from the checkpoint in `overrides`; returns its config and run folder."""
    config = config_io.load_config(file, overrides).config
    assert config.run.dir is not None, "load_config names it"
    if train(build(config, world)) == "stopped":
        raise ValueError("fine-tuning was stopped before its end and saved: the same command goes on")
    world.barrier()
    return config, Path(config.run.dir)


if __name__ == "__main__":
    distributed.run_command(main)
