"""Compare fine-tuning with configs/photos.yaml and training from scratch, on crops of a few photos.

    pip install scikit-image
    python benchmarks/photos_pair.py --work build/photos_pair [--seeds 3]

Eighteen pictures that are part of scikit-image and scikit-learn are converted to gray. A small ViT
is pre-trained to classify crops of ten of them. Crops of the other eight represent a user's own
photos, with one class per picture. Training crops come from the left three fifths of a picture, and
validation crops come from the right two fifths, so they share no pixels. Training from scratch uses
the learning rate of the pre-training for all layers.

For each side, the benchmark prints the mean and range of the accuracy over seeds, on the same
images, and the CPU seconds of a training run including startup. Run the same command again to
resume.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ROOT = Path(__file__).parents[1]
WORLD = (
    *("camera", "coins", "page", "clock", "chelsea", "rocket", "hubble_deep_field", "brick"),
    *("cell", "china"),
)
"""The pictures for pre-training."""
OWN = (
    *("astronaut", "moon", "coffee", "retina", "immunohistochemistry", "grass", "gravel"),
    "flower",
)
"""The pictures for fine-tuning."""
TRAIN_SHARE = 0.6
"""The fraction of a picture's width, from the left, used for training."""
SIDES = (48, 96)
"""The minimum and maximum side of a crop in pixels."""
SETTINGS = {
    "model.name": "vit_ti8",
    "model.image_size": 64,
    "model.embed_dim": 96,
    "model.depth": 4,
    "model.num_heads": 3,
    "loader.num_workers": 0,
    "train.device": "cpu",
    "train.precision": "fp32",
    "log.wandb": "off",
    "log.report": "false",
}
SCRATCH = {
    "init.checkpoint": "null",
    "init.reset_head": "false",
    "optim.lr": 1e-3,
    "optim.layer_decay": "null",
}


def picture(name: str) -> NDArray[np.uint8]:
    """Return a picture as (H, W) uint8."""
    import skimage.data
    from sklearn.datasets import load_sample_image

    is_sample = name in ("china", "flower")
    pixels = load_sample_image(f"{name}.jpg") if is_sample else getattr(skimage.data, name)()
    return np.asarray(Image.fromarray(pixels).convert("L"))


def write_crops(names: tuple[str, ...], folder: Path, num_train: int, num_val: int) -> None:
    """Write `folder`/train and `folder`/val, each with one folder of crops per picture."""
    rng = np.random.default_rng(0)
    for name in names:
        pixels = picture(name)
        border = round(TRAIN_SHARE * pixels.shape[1])
        parts = {"train": pixels[:, :border], "val": pixels[:, border:]}
        for split, number in (("train", num_train), ("val", num_val)):
            place = folder / split / name
            place.mkdir(parents=True, exist_ok=True)
            height, width = parts[split].shape
            for n in range(number):
                side = int(rng.integers(SIDES[0], SIDES[1] + 1))
                top = int(rng.integers(0, height - side + 1))
                left = int(rng.integers(0, width - side + 1))
                crop = parts[split][top : top + side, left : left + side]
                Image.fromarray(crop).convert("RGB").save(place / f"{n:04d}.png")


def run(*words: object) -> None:
    """Run a command of this project on one core. Raises CalledProcessError if the command fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, *map(str, words)]
    subprocess.run(line, check=True, env=env, cwd=ROOT, stdout=subprocess.DEVNULL)


def prepared(names: tuple[str, ...], folder: Path, num_train: int, num_val: int) -> Path:
    """Return a folder of shards with crops of the pictures `names`. The first call creates it."""
    shards = folder / "shards"
    if not shards.exists():
        write_crops(names, folder / "images", num_train, num_val)
        run("-m", "data_prep.imagefolder", folder / "images", "--out", shards, "--workers", 1)
    return shards


def train(folder: Path, settings: dict[str, object]) -> dict[str, float]:
    """Train with configs/photos.yaml and `settings`. Return top-1 in percent and CPU seconds."""
    file = folder / "found.json"
    if not file.exists():
        words = [f"{key}={value}" for key, value in {**SETTINGS, **settings}.items()]
        config = ROOT / "configs" / "photos.yaml"

        before = os.times()
        run("launch/train.py", "--config", config, f"run.dir={folder}", *words)
        after = os.times()
        cpu_s = after.children_user - before.children_user
        cpu_s += after.children_system - before.children_system

        lines = (folder / "metrics.jsonl").read_text().splitlines()
        last = {line["kind"]: line for line in map(json.loads, lines)}["eval"]
        top1 = 100 * last["correct_top1"] / last["num_images"]
        file.write_text(json.dumps({"top1": top1, "cpu_s": cpu_s}))

    found: dict[str, float] = json.loads(file.read_text())
    return found


def main() -> None:
    """Prepare the data, pre-train once, train both sides with each seed, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("build/photos_pair"))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()

    work = args.work.absolute()
    world = prepared(WORLD, work / "world", 150, 20)
    own = prepared(OWN, work / "own", 30, 50)
    base = {**SCRATCH, "data.root": world, "train.epochs": 12}
    print(f"pre-training: {train(work / 'base', base)['top1']:.1f} % on its validation crops")
    sides = {
        "fine-tuned by `configs/photos.yaml`": {"init.checkpoint": work / "base"},
        "from scratch": SCRATCH,
    }

    print("\n| | top-1 %, mean (range) | CPU seconds |\n|---|---|---|")
    for number, (name, settings) in enumerate(sides.items()):
        found = [
            train(work / f"{number}_{seed}", {**settings, "data.root": own, "train.seed": seed})
            for seed in range(args.seeds)
        ]

        rights = [one["top1"] for one in found]
        middle = f"{statistics.mean(rights):.1f} ({min(rights):.1f} to {max(rights):.1f})"
        print(
            f"| {name} | {middle} | {statistics.mean(one['cpu_s'] for one in found):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
