"""Find the checkpoint from which a run resumes, and check that it fits the run.

Rank 0 selects the newest undamaged checkpoint, compares its settings and data with those of this
attempt, and broadcasts the result. To load the checkpoint, rank 0 then reads the files and
broadcasts the values.
"""

import hashlib
import json
import sys
from contextlib import suppress
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
from vit.run_folder.paths import CHECKPOINTS, weights_file
from vit.system.urls import bare
from vit.training.plan import Plan, make_plan, rates
from vit.training.run_data import Notes, RunData, choose_settings

NOTABLE_JUMP = 0.01
"""A note is logged if a changed schedule changes the learning rate by more than this fraction."""
_NOT_DATA = {"micro_batch_size": "data.micro_batch_size:", "kernels": "computed by"}
"""Maps each fact that determines the exact result with `train.exact_over_ranks` to its text in
messages."""


OF_A_HOST = {
    "data.root",
    "data.sources",
    "loader.cache_dir",
    "loader.cache_gib",
    "loader.patience_s",
    "loader.num_workers",
    "loader.stall_timeout_s",
    "run.dir",
    "run.local_dir",
    "run.lease_s",
    "distill.teacher",
    "eval.reference",
    "eval.sets",
    "init.checkpoint",
}
"""Settings that may differ between ranks, because hosts have different paths and speeds.
`vit.build` compares the ranks' training data."""


def find_checkpoint(
    folder: Path, settings: dict[str, Any], facts: dict[str, Any], allowed: set[str], world: World
) -> checkpoints.FoundCheckpoint | None:
    """Return the checkpoint from which to resume; None in a new folder.

    All ranks must call this. Raises ValueError if the checkpoint belongs to another run.

    Args:
        settings: The result of `config_io.to_dict`.
        facts: Other values that must match those of the checkpoint.
        allowed: Settings that may differ from those of the checkpoint.
    """

    def read_newest() -> tuple[str, dict] | None:
        """Return the name and content of the newest checkpoint; None if there is none. Only rank 0
        calls this."""
        newest = checkpoints.newest_checkpoint(
            folder, verify=True, log_line=lambda text: print(text, file=sys.stderr)
        )
        if newest is None:
            return None
        check_belongs(newest.folder, newest.info, settings, facts, allowed)
        return newest.folder.name, newest.info

    newest = world.broadcast_from_main(read_newest)
    if newest is None:
        return None

    name, info = newest
    return checkpoints.FoundCheckpoint(folder / CHECKPOINTS / name, info)


def settings_for_start(config: Config, folder: Path, world: World) -> Config:
    """Return `config` with values in place of `auto` (`choose_settings`), but with the precision of
    the checkpoint from which the run resumes.

    All ranks must call this. Prints a note if the device would change the precision.
    """
    chosen = choose_settings(config, world)
    stored = world.broadcast_from_main(lambda: _stored_precision(folder))
    if config.train.precision != "auto" or stored in (None, chosen.train.precision):
        return chosen

    if world.is_main:
        print(
            f"note: the run continues in {stored}, in which it began; train.precision=auto means"
            f" {chosen.train.precision} on this device: to change it, set"
            f" train.precision={chosen.train.precision} --allow-change train.precision",
            file=sys.stderr,
        )
    return config_io.with_settings(chosen, {"train.precision": stored})


def settings_of_step(
    config: Config, newest: checkpoints.FoundCheckpoint | None, plan: Plan
) -> Config:
    """Return `config`, with compilation turned off if the run has already finished all steps."""
    if newest is None or not checkpoints.state_of(newest.info).is_over(plan):
        return config
    return config_io.with_settings(config, {"train.compile": False})


def _stored_precision(folder: Path) -> str | None:
    """Return the precision of the newest checkpoint in `folder`, or None."""
    with suppress(ValueError):  # `find_checkpoint` reports this error
        newest = checkpoints.newest_checkpoint(folder)
        return newest.info["config"]["train"]["precision"] if newest else None
    return None


def fit_state(
    state: RunState, folder: Path, facts: dict[str, Any], plan: Plan, world: World
) -> None:
    """Update the state of a checkpoint for this attempt, in place. All ranks must call this.

    Raises ValueError if the checkpoint's step is larger than the run's number of steps.
    """
    with world.fail_together():
        if state.step > plan.total_steps:
            raise ValueError(
                f"{folder} has reached step {state.step}, but the run ends at step"
                f" {plan.total_steps}: nothing is left to train"
            )

    if not state.is_finished(plan):
        restart_best(folder, state, world)
    renew_bits(state.facts, facts)
    state.restarts += 1


def rate_notes(info: dict[str, Any], config: Config, data: RunData, state: RunState) -> Notes:
    """Return a note if the learning rate jumps because a changed setting changed the schedule.

    info: the content of the checkpoint's `checkpoint.json`.
    """
    saved_config = config_io.from_dict(info["config"], "the checkpoint")
    saved_plan, _ = make_plan(saved_config, data.train_set.num_draws, 1, data.train_set.shares)
    saved_rate, _ = rates(saved_config, saved_plan)
    rate, _ = rates(config, data.plan)

    # Compare the two schedules at the last step before the checkpoint.
    last_step = max(state.step - 1, 0)
    last_rate = saved_rate(last_step)
    is_equal = abs(last_rate - rate(last_step)) <= NOTABLE_JUMP * last_rate
    if state.is_over(data.plan) or is_equal:
        return Notes()

    return Notes(
        lines=(
            f"note: the learning rate goes from {last_rate:.3g} to {rate(state.step):.3g} at step"
            f" {state.step}, because the schedule changed",
        )
    )


def renew_bits(stored: dict[str, Any], facts: dict[str, Any]) -> None:
    """Replace the facts in `stored` that determine the exact result with those in `facts`, because
    `train.exact_over_ranks` may have changed."""
    for key in _NOT_DATA:
        stored.pop(key, None)
    stored |= {key: facts[key] for key in _NOT_DATA if key in facts}


def restart_best(folder: Path, state: RunState, world: World) -> None:
    """Reset the best result if the file of the best weights does not match `state`.

    Weights are written before the checkpoint that refers to them. If that checkpoint is damaged, or
    was never written because training was killed, the file is from a step that this run has not
    reached yet. The result at that step may differ, for example on another number of ranks. All
    ranks must call this.
    """
    if state.best_top1 < 0:
        return

    def check_best_file() -> str:
        """Return why the file does not match `state`, or "" if it does. Only rank 0 calls this."""
        path = weights_file(folder, "best")
        try:
            with safe_open(path, framework="pt") as file:
                step = int(file.metadata()["step"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError):
            return f"{path} is missing or damaged"
        problem = f"{path} is from step {step}, which the run has not reached"
        return problem if step > state.step else ""

    reason = world.broadcast_from_main(check_best_file)
    if reason:
        state.best_top1 = -1.0
        state.best_loss = None
        if world.is_main:
            print(f"note: {reason}: the next best weights will replace it", file=sys.stderr)


def may_change(key: str) -> bool:
    """Return whether the setting `section.name` may change when a run resumes."""
    section, _, name = key.partition(".")
    field = Config.model_fields[section]
    if MAY_CHANGE in field.metadata:
        return True
    fields = getattr(field.annotation, "model_fields", {})  # empty for a union, such as `optim`
    return name in fields and MAY_CHANGE in fields[name].metadata


def _shared(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that must be the same on all ranks, which are all except `OF_A_HOST`."""
    return {
        f"{section}.{name}": value
        for section, values in settings.items()
        for name, value in values.items()
        if f"{section}.{name}" not in OF_A_HOST
    }


def settings_sha256(settings: dict[str, Any]) -> str:
    """Return a short hash of the settings that must be the same on all ranks."""
    return hashlib.sha256(json.dumps(_shared(settings), sort_keys=True).encode()).hexdigest()[:12]


def check_same_settings(settings: dict[str, Any], world: World) -> None:
    """Raise ValueError on rank 0, and AlreadyReported on all other ranks, if the ranks' settings
    differ.

    Otherwise the ranks would train different models or wait for each other forever.
    """
    # The maximum of the negated hashes is the negated minimum of the hashes.
    own = int(settings_sha256(settings), 16)
    largest, negated = world.max_(torch.tensor([own, -own], device=world.device)).tolist()
    if largest == -negated:
        return

    if not world.is_main:
        world.gather("settings", _shared(settings))

    def report() -> None:
        """Raise ValueError with the differences between rank 0 and the first rank that differs."""
        by_rank = world.gather("settings", _shared(settings))
        rank = next(rank for rank, values in enumerate(by_rank) if values != by_rank[0])
        differing = config_io.differences(by_rank[0], by_rank[rank]).items()
        listed = "\n".join(
            f"  {key}: {old} on rank 0, {new} on rank {rank}" for key, (old, new) in differing
        )
        raise ValueError(
            f"rank {rank} on {world.host_of(rank)} was started with settings that differ from rank"
            f" 0:\n{listed}\nStart all ranks with the same command and the same config file"
        )

    world.broadcast_from_main(report)


def check_belongs(
    path: Path,
    info: dict[str, Any],
    settings: dict[str, Any],
    facts: dict[str, Any],
    allowed: set[str],
) -> None:
    """Raise ValueError if `path` belongs to another run. Arguments: see `find_checkpoint`.

    info: the content of the checkpoint's `checkpoint.json`.
    """
    changed = {
        key: values
        for key, values in _changed_settings(info["config"], str(path), settings).items()
        if key not in allowed
    }
    lines = [f"  {key}: {old} there, {new} here" for key, (old, new) in changed.items()]
    of_data = _changed_facts(info["facts"], facts)
    lines += of_data
    if not lines:
        return

    # No flag accepts different data, and some settings change which values a checkpoint contains.
    accepted = " ".join(f"--allow-change {key}" for key in changed)
    is_same_data = all(line.lstrip().startswith((*_NOT_DATA.values(),)) for line in of_data)
    hint = f", or accept the changes with {accepted}" if changed and is_same_data else ""
    if any(_changes_bits(key, info["facts"], facts) for key in _NOT_DATA):
        hint += (
            "; or continue with different bits: train.exact_over_ranks=false --allow-change"
            " train.exact_over_ranks"
        )

    differences = "\n".join(lines)
    raise ValueError(
        f"{path} belongs to a run with different settings:\n{differences}\nUse another run.dir,"
        f" restore the settings{hint}"
    )


def _changed_settings(
    stored: dict[str, Any], source: str, settings: dict[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that changed but must not change: dotted key -> (old, new)."""
    old_values = config_io.to_dict(config_io.from_dict(stored, source))
    return {
        key: (old, new)
        for key, (old, new) in config_io.differences(old_values, settings).items()
        # `bare`: URLs that differ only in their login refer to the same data
        if not may_change(key) and bare(str(old)) != bare(str(new))
    }


def _changes_bits(key: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether both dicts have the fact `key` of `_NOT_DATA` with different values.

    If only one dict has the fact, `train.exact_over_ranks` was changed, which is reported as a
    setting.
    """
    return key in old and key in new and old[key] != new[key]


def _changed_facts(stored: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """Return a line for each fact about the data that differs from the stored value."""
    old = {"chosen": "all samples", **stored}
    new = {"chosen": "all samples", **facts}
    old_names = old.pop("class_names", [])
    new_names = new.pop("class_names", [])

    lines = []
    if old.get("teacher_sha256") != new.get("teacher_sha256"):
        there, here = (
            f"weights {side['teacher_sha256'][:12]}" if "teacher_sha256" in side else "none"
            for side in (old, new)
        )
        lines.append(f"  teacher: {there} there, {here} here")

    ignored = {key for key in _NOT_DATA if not _changes_bits(key, old, new)} | {"teacher_sha256"}
    lines += [
        f"  {_NOT_DATA.get(key, f'data: {key}')} {old.get(key, 'none')} there, {value} here"
        for key, value in new.items()
        if old.get(key) != value and key not in ignored
    ]

    # Data without class names have an empty list, so `strict` must be off.
    pairs = zip(old_names, new_names, strict=False)
    renamed = [label for label, (before, after) in enumerate(pairs) if before != after]
    if renamed:
        label = renamed[0]
        lines.append(
            f"  data: class {label} is {old_names[label]!r} there, {new_names[label]!r} here"
            f" ({len(renamed):,} of {len(new_names):,} names differ)"
        )
    return lines
