"""Make the pictures in docs/images that show our own pages, from the runs of the demo.

    make demo
    python docs/pictures.py               all pictures
    python docs/pictures.py report.png    only this picture

The pictures of docs/model.md are made by the commands on that page. replay.png needs a run with
mixed images, which trains for 20 steps. Screenshots need Chromium. `make pictures` runs this
script.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
DEMO = ROOT / "runs" / "demo"
MIXED = ("augment.randaugment_layers=2", "augment.mixup_alpha=0.8", "augment.cutmix_alpha=1.0")
MIXED_STEP = 20


def python(*arguments: object, **variables: str) -> None:
    """Run a script of the repository, and stop if it fails."""
    line = [sys.executable, *map(str, arguments)]
    print("$ python", *map(str, arguments), flush=True)
    env = {"OMP_NUM_THREADS": "1", **os.environ, **variables}  # as in launch/demo.sh
    subprocess.run(line, cwd=ROOT, env=env, check=True)


def train(run_dir: Path, *settings: str) -> None:
    config = ROOT / "configs" / "demo.yaml"
    more = ("eval.reference=null", "log.wandb=off", "log.report=false", *settings)
    python("launch/train.py", "--config", config, f"run.dir={run_dir}", *more)


def screenshot(page: Path, size_px: tuple[int, int], picture: Path) -> None:
    """Draw the top of a page, as wide as the window."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        sys.exit("error: no Chromium: apt-get install chromium")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    options += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    options += ["--disable-sync", "--hide-scrollbars", "--virtual-time-budget=5000"]
    with tempfile.TemporaryDirectory() as profile:
        view = [f"--window-size={size_px[0]},{size_px[1]}", f"--screenshot={picture}"]
        line = [program, *options, f"--user-data-dir={profile}", *view, page.as_uri()]
        subprocess.run(line, check=True, capture_output=True)


def make_report(picture: Path) -> None:
    python("launch/report.py", DEMO)
    screenshot(DEMO / "report" / "index.html", (1060, 1330), picture)


def make_wandb(picture: Path) -> None:
    """Write the files that `wandb sync` would upload, and draw them like W&B."""
    python("launch/report.py", DEMO, "--to-wandb", WANDB_MODE="offline")
    python("tests/extras/loggers/draw_wandb_page.py", DEMO, picture)


def make_replay(picture: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "demo_mixed"
        train(run_dir, f"train.steps={MIXED_STEP}", *MIXED)
        step = ("--step", MIXED_STEP, "--images", 9)
        python("launch/replay.py", run_dir, *step, "--sheet", picture)
    with Image.open(picture) as image:
        # The file is then a quarter as large.
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)


def make_samples(picture: Path) -> None:
    python("launch/samples.py", DEMO)
    screenshot(DEMO / "report" / "samples.html", (1000, 930), picture)


def make_figure(words: list[str], picture: Path) -> None:
    """Run a command of docs/model.md, which may also draw other images, and keep `picture`."""
    with tempfile.TemporaryDirectory() as folder:
        python(*words[:-1], Path(folder) / Path(words[-1]).name)
        shutil.copyfile(Path(folder) / picture.name, picture)


def makers() -> dict[str, Callable[[], None]]:
    """Return the function that makes each picture, keyed by file name."""
    page = (ROOT / "docs" / "model.md").read_text(encoding="utf-8")
    found = {
        f"{name}.png": partial(made, IMAGES / f"{name}.png")
        for name, made in (
            ("report", make_report),
            ("wandb", make_wandb),
            ("replay", make_replay),
            ("samples", make_samples),
        )
    }
    for line in re.findall(r"^python (launch/visualize\.py .* --out docs/images/\S+)", page, re.M):
        words = line.split()
        # The command adds the number of the image to the name of the picture.
        number = f"_{words[words.index('--samples') + 1]}" if "--samples" in words else ""
        name = f"{Path(words[-1]).stem}{number}.png"
        found[name] = partial(make_figure, words, IMAGES / name)
    return found


def main() -> None:
    made = makers()
    if unknown := set(sys.argv[1:]) - set(made):
        sys.exit(f"error: unknown pictures {', '.join(unknown)}; expected {', '.join(made)}")
    if not (DEMO / "report" / "index.html").is_file():
        sys.exit(f"error: {DEMO} is not a finished run: run make demo first")
    for name in sys.argv[1:] or made:
        made[name]()
        print(f"{IMAGES / name}: {(IMAGES / name).stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
