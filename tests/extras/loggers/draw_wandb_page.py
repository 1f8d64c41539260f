"""Draw docs/images/wandb.png, a run's W&B page, from the files of an offline run.

    python tests/extras/loggers/draw_wandb_page.py runs/demo docs/images/wandb.png

The script imitates the layout of W&B, which has one section per key prefix and one panel per key.
The history and the images are read from RUN/wandb/offline-run-*, which contains the files that
`wandb sync` would upload.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "helpers")]

from extras.loggers.wandb_runs import parts, read_wandb  # noqa: E402

AXIS = "global_step"
SHOWN = {
    "train": ["loss", "images_per_s", "lr", "grad_norm"],
    "eval": ["top1", "loss", "top5", "ece"],
    "report": ["attention", "confusion", "augmented", "positions"],
}
COLOR = "#0f7b8a"
BACKGROUND = "#f7f8fa"


def draw(run_dir: Path, out: Path) -> None:
    part = parts(run_dir)[-1]
    run_id, _, history = read_wandb(part)
    media = {
        key.removesuffix(".path"): path
        for row in history
        for key, path in row.items()
        if key.startswith("report/") and key.endswith(".path")
    }
    panel_keys = {key.partition(".")[0] for row in history for key in row}
    figure = plt.figure(figsize=(11, 7.6))
    sections = figure.subfigures(len(SHOWN), 1)
    for section, (prefix, names) in zip(sections, SHOWN.items(), strict=True):
        section.set_facecolor(BACKGROUND)
        count = sum(key.startswith(f"{prefix}/") for key in panel_keys)
        title = f"{prefix}  {count}"
        section.suptitle(title, x=0.02, y=0.97, ha="left", fontsize=11, weight="bold")
        panels = section.subplots(1, len(names))
        section.subplots_adjust(left=0.05, right=0.98, top=0.8, bottom=0.17, wspace=0.28)
        for panel, name in zip(panels, names, strict=True):
            key = f"{prefix}/{name}"
            panel.set_title(key, fontsize=8)
            panel.tick_params(labelsize=6)
            if key in media:
                panel.imshow(plt.imread(part.parent / "files" / media[key])[:1400])
                panel.axis("off")
                continue
            points = [(row[AXIS], row[key]) for row in history if key in row]
            panel.plot(*zip(*points, strict=True), color=COLOR, linewidth=1.2)
            panel.set_xlabel(AXIS, fontsize=6)
            panel.grid(color="#e3e6ea", linewidth=0.5)
    figure.text(0.98, 0.99, f"{run_dir.name}  ({run_id})", ha="right", va="top", fontsize=9)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
