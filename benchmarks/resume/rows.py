"""Define the contestants, and create the table and the plot of their counts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = dict[str, Any]
"""{contestant: {version, measurements {scenario: one figure per run of the benchmark}}}."""
TITLES = {
    "same": "(a) killed once, the same workers and ranks",
    "other_workers": "(b) killed once, 3 workers instead of 2",
    "other_ranks": "(c) killed twice, on 2, then 1, then 3 ranks",
    "killed_twice": "(d) killed twice, the same workers and ranks",
}
SHORT_TITLES = ("(a) same", "(b) 3 workers", "(c) 2, 1, 3 ranks", "(d) killed twice")
HEAD = (
    "| | samples lost | seen again | equal batches | equal augmentation | steps | done again"
    " | ranks end together | second run |\n|---|---|---|---|---|---|---|---|---|\n"
)


@dataclass(frozen=True)
class Contestant:
    """One row of the table, for a script in this folder in one variant. The script's docstring
    quotes what the library promises."""

    name: str
    script: str
    package: str
    module: str
    variant: str = ""


_ALL = [
    Contestant("ours: trainer", "ours_fit", "vitline", "vit"),
    Contestant("ours: loader", "ours_loader", "vitline", "vit"),
    Contestant("torch DataLoader", "torch_dataloader", "torch", "torch"),
    Contestant(
        "torch DataLoader, seed per epoch", "torch_dataloader", "torch", "torch", "seed per epoch"
    ),
    Contestant("torchdata", "stateful_dataloader", "torchdata", "torchdata"),
    Contestant(
        "torchdata, RNG in the dataset",
        "stateful_dataloader",
        "torchdata",
        "torchdata",
        "RNG in the dataset",
    ),
    Contestant("Accelerate", "hf_accelerate", "accelerate", "accelerate"),
    Contestant(
        "Accelerate, seedable sampler",
        "hf_accelerate",
        "accelerate",
        "accelerate",
        "seedable sampler",
    ),
    Contestant(
        "Accelerate, seedable sampler without set_epoch",
        "hf_accelerate",
        "accelerate",
        "accelerate",
        "seedable sampler without set_epoch",
    ),
    Contestant(
        "Accelerate, stateful loader",
        "hf_accelerate",
        "accelerate",
        "accelerate",
        "stateful loader",
    ),
    Contestant("Transformers Trainer", "hf_trainer", "transformers", "accelerate"),
    Contestant("Lightning", "lightning_trainer", "lightning", "lightning"),
    Contestant(
        "Lightning, StatefulDataLoader",
        "lightning_trainer",
        "lightning",
        "lightning",
        "StatefulDataLoader",
    ),
    Contestant(
        "Lightning, StatefulDataLoader + steps",
        "lightning_trainer",
        "lightning",
        "lightning",
        "StatefulDataLoader + steps",
    ),
    Contestant("webdataset, resampled", "wds_shards", "webdataset", "webdataset"),
    Contestant("webdataset, detshuffle", "wds_shards", "webdataset", "webdataset", "detshuffle"),
    Contestant("webdataset, wids", "wids_shards", "wids", "wids"),
    Contestant("MosaicML Streaming", "mosaic_streaming", "mosaicml-streaming", "streaming"),
    Contestant("LitData", "lightning_litdata", "litdata", "litdata"),
    Contestant("Grain", "google_grain", "grain", "grain"),
    Contestant("Grain, ElasticIterator", "grain_elastic", "grain", "grain"),
    Contestant("timm, recovery", "timm_parts", "timm", "timm"),
    Contestant("timm, epochs only", "timm_parts", "timm", "timm", "epochs"),
    Contestant("timm, recovery, --start-epoch", "timm_parts", "timm", "timm", "start epoch"),
]
CONTESTANTS = {contestant.name: contestant for contestant in _ALL}


_LITDATA = "https://github.com/Lightning-AI/litData#readme"
_MOSAIC = "https://docs.mosaicml.com/projects/streaming/en/latest/distributed_training"
_STATEFUL = "https://github.com/meta-pytorch/data/blob/v0.11.0/torchdata/stateful_dataloader"
_TORCH = "https://docs.pytorch.org/docs/stable"
_HF = "https://huggingface.co/docs"
_TIMM = "https://github.com/huggingface/pytorch-image-models/blob/main/train.py"
_LIGHTNING = "https://lightning.ai/docs/pytorch/stable"
_WDS = "https://github.com/webdataset/webdataset"
_GRAIN = "https://google-grain.readthedocs.io/en/latest"
PROMISES = {
    "ours: trainer": "the same batches and crops on any workers and ranks ([resume](resume.md))",
    "ours: loader": "the same, from a step ([loop](own_loop.md))",
    "torch DataLoader": "nothing about the middle of an epoch; seeded samplers and workers"
    f" ([data]({_TORCH}/data.html), [seeds]({_TORCH}/notes/randomness.html))",
    "torchdata": "a saved position in an epoch, with the state of workers, not across ranks"
    f" ([README]({_STATEFUL}/README.md))",
    "torchdata, RNG in the dataset": "random states if the data set saves them (same page)",
    "Accelerate": "to continue at a point in the loader"
    f" ([checkpoints]({_HF}/accelerate/usage_guides/checkpoint))",
    "Accelerate, seedable sampler": "reproducible sampling"
    f" ([option]({_HF}/accelerate/package_reference/utilities))",
    "Transformers Trainer": "to skip to the same point of the data"
    f" ([`ignore_data_skip`]({_HF}/transformers/main_classes/trainer))",
    "Lightning": "all that is needed to restore a model"
    f" ([checkpoints]({_LIGHTNING}/common/checkpointing_basic.html)); in the middle of an epoch, it"
    " warns that the loader has no state",
    "Lightning, StatefulDataLoader": "this warning names such a loader as the remedy",
    "webdataset, resampled": f"the same distribution of samples ([#271]({_WDS}/issues/271))",
    "webdataset, detshuffle": f"parts for own loops ([#177]({_WDS}/issues/177))",
    "webdataset, wids": f"exact epochs; nothing about resuming ([README]({_WDS}#readme))",
    "MosaicML Streaming": "deterministic resumption"
    f" ([resumption]({_MOSAIC}/fast_resumption.html)), also on other workers and ranks"
    f" ([elastic]({_MOSAIC}/elastic_determinism.html))",
    "LitData": "to continue where it was, with other workers and ranks without repeating samples"
    f" ([README]({_LITDATA}))",
    "Grain": "the same output as if it was never preempted"
    f" ([README](https://github.com/google/grain#readme)), with the same sampler"
    f" ([tutorial]({_GRAIN}/tutorials/data_loader_tutorial.html))",
    "Grain, ElasticIterator": "to restore after changes in sharding"
    f" ([experimental]({_GRAIN}/grain.experimental.html))",
    "timm, recovery": f"`--resume` restores model and optimizer ([train.py]({_TIMM}))",
    "timm, recovery, --start-epoch": "`--start-epoch` is useful on restarts (same page)",
}
"""Maps contestants to a short form of what their documentation promises. A contestant that is
missing has no promise of its own."""


def table(rows: Rows) -> str:
    """Return the summary, and one Markdown table for each scenario."""
    text = _summary(rows)
    for scenario, title in TITLES.items():
        text += f"**{title}**\n\n{HEAD}"
        for name in CONTESTANTS:
            runs = rows.get(name, {}).get("measurements", {}).get(scenario)
            if runs:
                text += _line(f"{name} {rows[name]['version']}", runs)
        text += "\n"
    return text


def _summary(rows: Rows) -> str:
    letters = [title.split()[0] for title in TITLES.values()]
    text = f"| | {' | '.join(letters)} | promised |\n|---|{'---|' * (len(letters) + 1)}\n"
    for name in CONTESTANTS:
        if name in rows:
            measured = [rows[name]["measurements"].get(scenario) for scenario in TITLES]
            cells = [_in_short(runs) if runs else "not measured" for runs in measured]
            cells.append(PROMISES.get(name, ""))
            text += f"| {name} {rows[name]['version']} | {' | '.join(cells)} |\n"
    return text + "\n"


def _in_short(runs: list[dict[str, Any]]) -> str:
    first = runs[0]
    if first["ended"]:
        return "ends with an error"
    if first["equal_batches"] == first["resumed"]:
        equal = first["equal_augmentations"] == first["resumed"]
        return "equal" if equal else "equal batches"
    if first["lost"] == first["repeated"] == 0:
        return "other batches"
    return f"{first['lost']} lost, {first['repeated']} again"


def _line(name: str, runs: list[dict[str, Any]]) -> str:
    first = runs[0]
    others = [run for run in runs[1:] if run != first]
    again = "the same" if len(runs) > 1 else "not measured"
    if others:
        again = f"differs: {others[0]['lost']} lost, {others[0]['repeated']} again"

    if first["ended"]:
        return f"| {name} | ended: {first['ended'][:120]} | | | | | | | {again} |\n"

    of = first["resumed"]
    plain = first["undisturbed"]
    cells = [
        f"{first['lost']}{_without_kill(plain['lost'])}",
        f"{first['repeated']}{_without_kill(plain['repeated'])}",
        f"{first['equal_batches']} of {of}",
        f"{first['equal_augmentations']} of {of}",
        str(first["steps"]),
        str(first["done_again"]),
        "yes" if first["ends_together"] else "no",
        again,
    ]
    return f"| {name} | {' | '.join(cells)} |\n"


def _without_kill(number: int) -> str:
    """Return the number for the run without a kill, in parentheses. Return "" if the number is
    zero."""
    return f" (without a kill: {number})" if number else ""


def write_table(rows: Rows, out: Path) -> None:
    """Write FILE.md and FILE.png beside FILE.json."""
    from measure import machine

    about = machine(out.parent, ["torch"])
    head = "# Resuming after a kill\n\nThe columns are explained in docs/resume_truth.md.\n"
    head += ", ".join(f"{name} {value}" for name, value in about.items()) + ".\n\n"
    tables = re.sub(r"\]\((\w+\.md)\)", r"](../../docs/\1)", table(rows))
    out.with_suffix(".md").write_text(head + tables.rstrip() + "\n")
    draw(rows, out.with_suffix(".png"))


def draw(rows: Rows, picture: Path) -> None:
    """Plot how many of the 96 steps after the first resume have the same batches and augmentation
    as in the undisturbed run."""
    from vit.extras.report.drawing import BLUE, GRAY, drawing

    names = [name for name in CONTESTANTS if name in rows]
    with drawing(picture, 1.2 + 0.32 * len(names), layout="constrained") as figure:
        axes = figure.subplots(1, len(TITLES), sharey=True)
        for column, scenario, title in zip(axes, TITLES, SHORT_TITLES, strict=True):
            for position, name in enumerate(names):
                runs = rows[name]["measurements"].get(scenario)
                if not runs or runs[0]["ended"]:
                    word = "ended with an error" if runs else "not measured"
                    column.text(2, position, word, va="center", fontsize=7, color=GRAY)
                    continue
                total = runs[0]["resumed"]
                batches = 100 * runs[0]["equal_batches"] / total
                both = 100 * runs[0]["equal_augmentations"] / total
                column.barh(position, batches, 0.7, color=GRAY, alpha=0.4)
                column.barh(position, both, 0.35, color=BLUE)
                if not batches:
                    column.text(2, position, "0", va="center", fontsize=8)
            column.set_title(title, fontsize=9)
            column.set_xlim(0, 100)
            column.set_xticks([0, 50, 100], ["0", "50", "100 %"], fontsize=8)
        axes[0].set_yticks(range(len(names)), names, fontsize=8)
        axes[0].set_ylim(len(names) - 0.4, -0.6)
        words = (
            "steps after the first resume with equal batches (gray), and with equal augmentation"
        )
        figure.supxlabel(f"{words} (blue)", fontsize=9)
