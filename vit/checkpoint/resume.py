"""Which checkpoint a run continues from, and whether it belongs to this run.

The main rank takes the newest checkpoint that is not damaged, compares the settings and the data
that made it with those of now, and hands the answer to the other ranks. `vit.build` then fills what
it has created: the main rank reads the files, the others get the values from it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vit.checkpoint import checkpoint as checkpoints
from vit.checkpoint.state import RunState
from vit.config import io as config_io
from vit.config.base import MAY_CHANGE
from vit.config.schema import Config
from vit.distributed.process_group import World
from vit.run_folder import CHECKPOINTS, weights_file
from vit.system.urls import bare
from vit.training.plan import Plan

BEFORE_IT_EXISTED = {("train", "ema_warmup"): True}
"""How the code behaved before a setting existed, where that is not its default now."""


_NOT_DATA = {"micro_batch_size": "data.micro_batch_size:", "kernels": "computed by"}
"""Facts that decide the bits of `train.exact_over_ranks`, and what a message calls them."""


OF_A_HOST = {
    *(f"data.{name}" for name in ("root", "sources", "cache_dir", "cache_gib", "patience_s")),
    *(f"data.{name}" for name in ("num_workers", "prefetch_gib", "stall_timeout_s")),
    *(f"run.{name}" for name in ("dir", "local_dir", "lease_s")),
    *("distill.teacher", "eval.reference", "eval.sets", "init.checkpoint"),
}
"""Settings that may differ between ranks: places on a host, and how fast it is. `vit.build`
compares the training data that are there."""


def find_checkpoint(
    folder: Path, settings: dict[str, Any], facts: dict[str, Any], allowed: set[str], world: World
) -> tuple[Path, dict] | None:
    """Return the checkpoint to continue from and its info, None in a new folder.

    Every rank calls it. settings: as `config_io.to_dict` gives them; facts: what must be the same
    in addition; allowed: settings that may differ. Raises ValueError if the checkpoint belongs to
    another run.
    """

    def look() -> tuple[str, dict] | None:
        found = _newest_of_this_run(folder, settings, facts, allowed)
        return None if found is None else (found[0].name, found[1])

    found = world.broadcast_from_main(look)
    if found is None:
        return None
    name, info = found
    return folder / CHECKPOINTS / name, info


def fit_state(
    state: RunState, folder: Path, facts: dict[str, Any], plan: Plan, world: World
) -> None:
    """Fit the state of a checkpoint in `folder` to this attempt, in place; every rank calls it.

    Raises ValueError if it is beyond the end of the run.
    """
    with world.fail_together():
        if state.step > plan.total_steps:
            raise ValueError(
                f"{folder} has come to step {state.step}, the run is to end at"
                f" {plan.total_steps}: nothing is left to train"
            )
    if not state.is_finished(plan):
        restart_best(folder, state, world)
    renew_bits(state.facts, facts)
    state.restarts += 1


def renew_bits(stored: dict[str, Any], facts: dict[str, Any]) -> None:
    """Let the facts of a checkpoint say what decides the bits from here on, in place: a resume may
    have switched `train.exact_over_ranks` on or off."""
    for key in _NOT_DATA:
        stored.pop(key, None)
    stored |= {key: facts[key] for key in _NOT_DATA if key in facts}


def restart_best(folder: Path, state: RunState, world: World) -> None:
    """Let the next evaluation count as the best if the best weights are not those of `state`.

    Weights are written before the checkpoint that tells of them. If training was killed in between,
    or its newest checkpoint is damaged, they are of a step that this run has yet to reach, and may
    reach with another result: on another number of ranks, or with settings that may change. Every
    rank calls it.
    """
    if state.best_top1 < 0:
        return

    def look() -> str:
        path = weights_file(folder, "best")
        try:
            with safe_open(path, framework="pt") as file:
                step = int(file.metadata()["step"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError):
            return f"{path} is gone or damaged"
        return f"{path} is of step {step}, which the run has left" if step > state.step else ""

    if reason := world.broadcast_from_main(look):
        state.best_top1 = -1.0
        state.best_loss = None
        if world.is_main:
            print(f"note: {reason}: the best from here on takes its place", file=sys.stderr)


def may_change(key: str) -> bool:
    """Return whether a resumed run may have a different value for the setting `section.name`."""
    section, _, name = key.partition(".")
    field = Config.model_fields[section]
    if MAY_CHANGE in field.metadata:
        return True
    fields = getattr(field.annotation, "model_fields", {})  # none in a union, such as `optim`
    return name in fields and MAY_CHANGE in fields[name].metadata


def _shared(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that all ranks must have alike: all but those of `OF_A_HOST`."""
    return {
        f"{section}.{name}": value
        for section, values in settings.items()
        for name, value in values.items()
        if f"{section}.{name}" not in OF_A_HOST
    }


def settings_sha256(settings: dict[str, Any]) -> str:
    """Return a short hash of the settings that all ranks must have alike."""
    return hashlib.sha256(json.dumps(_shared(settings), sort_keys=True).encode()).hexdigest()[:12]


def check_same_settings(settings: dict[str, Any], world: World) -> None:
    """Raise ValueError, on rank 0, if another rank has other settings, and AlreadyReported there.

    Each rank would train a model of its own, or wait for what the others never do.
    """
    own = int(settings_sha256(settings), 16)
    ends = torch.tensor([own, -own], device=world.device)
    largest, smallest = world.max_(ends).tolist()
    if largest == -smallest:
        return
    if not world.is_main:
        world.gather("settings", _shared(settings))

    def tell() -> None:
        found = world.gather("settings", _shared(settings))
        rank = next(rank for rank, values in enumerate(found) if values != found[0])
        differing = config_io.differences(found[0], found[rank]).items()
        listed = "\n".join(
            f"  {key}: {old} on rank 0, {new} on rank {rank}" for key, (old, new) in differing
        )
        raise ValueError(
            f"rank {rank} on {world.host_of(rank)} was started with other settings than rank 0:\n"
            f"{listed}\nStart all with the same command and the same config file"
        )

    world.broadcast_from_main(tell)


def _newest_of_this_run(
    folder: Path, settings: dict[str, Any], facts: dict[str, Any], allowed: set[str]
) -> tuple[Path, dict] | None:
    """Return the newest checkpoint that is not damaged; ValueError if it is of another run."""
    found = checkpoints.newest_checkpoint(
        folder, verify=True, say=lambda text: print(text, file=sys.stderr)
    )
    if found is not None:
        check_belongs(*found, settings, facts, allowed)
    return found


def check_belongs(
    path: Path,
    info: dict[str, Any],
    settings: dict[str, Any],
    facts: dict[str, Any],
    allowed: set[str],
) -> None:
    """Raise ValueError if the checkpoint `path` is of another run; arguments: `find_checkpoint`.

    info: the content of its `checkpoint.json`.
    """
    changed = _changed_settings(info["config"], str(path), settings)
    changed = {key: values for key, values in changed.items() if key not in allowed}
    lines = [f"  {key}: {old} there, {new} here" for key, (old, new) in changed.items()]
    lines += _changed_facts(info["facts"], facts)
    if lines:
        hint = f", or accept a change with --allow-change {next(iter(changed))}" if changed else ""
        if any(_changes_bits(key, info["facts"], facts) for key in _NOT_DATA):
            hint += (
                "; or go on without the same bits: train.exact_over_ranks=false --allow-change"
                " train.exact_over_ranks"
            )
        differences = "\n".join(lines)
        raise ValueError(
            f"{path} belongs to a run with other settings:\n{differences}\nUse another run.dir,"
            f" restore the settings{hint}"
        )


def _changed_settings(
    stored: dict[str, Any], source: str, settings: dict[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that must not change and did: dotted key -> (old, new)."""
    # Settings that are newer than the checkpoint get their defaults here.
    old_values = config_io.to_dict(config_io.from_dict(stored, source))
    for (section, key), value in BEFORE_IT_EXISTED.items():
        if key not in stored.get(section, {}) and settings["train"]["ema_decay"] is not None:
            old_values[section][key] = value
    return {
        key: (old, new)
        for key, (old, new) in config_io.differences(old_values, settings).items()
        # `bare`: a URL with another login names the same data
        if not may_change(key) and bare(str(old)) != bare(str(new))
    }


def _changes_bits(key: str, there: dict[str, Any], here: dict[str, Any]) -> bool:
    """Return whether a fact of `_NOT_DATA` is another one here, and not new: switched on by this
    resume, which is a change of a setting."""
    return key in there and key in here and there[key] != here[key]


def _changed_facts(stored: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """Return a line for each fact about the data that is not as stored."""
    there = {"chosen": "all samples", **stored}
    here = {"chosen": "all samples", **facts}
    old_names = there.pop("class_names", [])
    new_names = here.pop("class_names", [])
    lines = []
    if there.get("teacher_sha256") != here.get("teacher_sha256"):
        teachers = [
            f"weights {facts['teacher_sha256'][:12]}" if "teacher_sha256" in facts else "none"
            for facts in (there, here)
        ]
        lines.append(f"  teacher: {teachers[0]} there, {teachers[1]} here")
    lines += [
        f"  {_NOT_DATA.get(key, f'data: {key}')} {there.get(key, 'none')} there, {value} here"
        for key, value in here.items()
        if key != "teacher_sha256"
        and there.get(key) != value
        and (key not in _NOT_DATA or _changes_bits(key, there, here))
    ]
    # If the classes of one have no names, there is nothing to compare.
    pairs = zip(old_names, new_names, strict=False)
    renamed = [label for label, (old, new) in enumerate(pairs) if old != new]
    if renamed:
        label = renamed[0]
        lines.append(
            f"  data: class {label} is {old_names[label]!r} there, {new_names[label]!r} here"
            f" ({len(renamed):,} of {len(new_names):,} names differ)"
        )
    return lines
