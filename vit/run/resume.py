"""Which checkpoint a run goes on from, and whether it was this run's.

The data's story: the main rank takes the newest checkpoint whose bytes are whole, compares the
settings and the data that made it with those of now, and tells the others, who wait until their
host sees it. `vit.train` then fills what it has built.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from vit import config_io
from vit.config import Config
from vit.distributed import World
from vit.run import checkpoint as checkpoints
from vit.run.folder import CHECKPOINTS
from vit.system.urls import bare

MAY_CHANGE = (
    "run.",
    "log.",
    "checkpoint.",
    "eval.",
    "data.num_workers",
    "data.prefetch_gib",
    "data.micro_batch_size",
    "data.root",
    "data.val_split",
    "data.sources",
    "data.exclude",
    "data.filter",
    "data.fraction",
    "data.samples_per_class",
    "data.subset_seed",
    "data.cache_dir",
    "data.cache_gib",
    "data.patience_s",
    "data.stall_timeout_s",
    "data.on_bad_image",
    "train.device",
    "train.compile",
    "train.max_skipped_steps",
)
"""Prefixes of keys that a resumed run may have different from its checkpoint: same batches, same
recipe. (Another micro-batch draws other dropout masks; `on_bad_image` decides only about images
that cannot be read. What chooses samples is compared by what it chose.)"""

AS_BEFORE = {("train", "ema_warmup"): True}
"""What was done before a setting came, where its default is something else: a checkpoint that lacks
it was made so."""


def find_checkpoint(
    folder: Path, config: Config, facts: dict[str, Any], allowed: set[str], world: World
) -> tuple[Path, dict] | None:
    """The checkpoint to go on from and its info, None in a new folder. All ranks come here.

    `facts`: what must be the same beside the settings; `allowed`: settings that may differ. Raises
    ValueError where the run of the checkpoint was another.
    """

    def look() -> tuple[str, dict] | None:
        found = _newest_of_this_run(folder, config, facts, allowed)
        return None if found is None else (found[0].name, found[1])

    told = world.broadcast_from_main(look)
    if told is None:
        return None
    path = folder / CHECKPOINTS / told[0]
    with world.fail_together():
        checkpoints.wait_for_checkpoint(path, told[1])
    return path, told[1]


def _newest_of_this_run(
    folder: Path, config: Config, facts: dict[str, Any], allowed: set[str]
) -> tuple[Path, dict] | None:
    """The newest whole checkpoint. Raises ValueError if its run was another."""
    found = checkpoints.newest_checkpoint(
        folder, verify=True, say=lambda text: print(text, file=sys.stderr)
    )
    if found is None:
        return None
    path, info = found
    # settings younger than the checkpoint get their defaults
    stored = config_io.to_dict(config_io.from_dict(info["config"], str(path)))
    for (section, key), before in AS_BEFORE.items():
        if key not in info["config"].get(section, {}) and config.train.ema_decay is not None:
            stored[section][key] = before
    changed = config_io.differences(stored, config_io.to_dict(config))
    refused = {
        key: values
        for key, values in changed.items()
        if not key.startswith(MAY_CHANGE) and key not in allowed
    }
    # another login, same data
    refused = {
        key: (old, new) for key, (old, new) in refused.items() if bare(str(old)) != bare(str(new))
    }
    lines = [f"  {key}: {old} there, {new} here" for key, (old, new) in refused.items()]
    there, here = ({"chosen": "all samples", **known} for known in (info["facts"], facts))
    names = there.pop("class_names", []), here.pop("class_names", [])
    lines += [
        f"  data: {key} {there[key]} there, {value} here"
        for key, value in here.items()
        if there[key] != value
    ]
    # none where one has no names
    renamed = [label for label, pair in enumerate(zip(*names, strict=False)) if pair[0] != pair[1]]
    if renamed:
        old, new = (each[renamed[0]] for each in names)
        lines.append(
            f"  data: class {renamed[0]} is {old!r} there, {new!r} here ({len(renamed):,} of"
            f" {len(names[1]):,} names differ)"
        )
    if lines:
        hint = f", or accept a change with --allow-change {next(iter(refused))}" if refused else ""
        settings = "\n".join(lines)
        raise ValueError(
            f"{path} belongs to a run with other settings:\n{settings}\nUse another run.dir,"
            f" restore the settings{hint}"
        )
    return found
