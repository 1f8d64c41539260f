"""Audit a run: print what this machine can claim, draw stretches, repeat them and judge them."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from shlex import quote

import torch

from vit.config.schema import Config
from vit.distributed.exact.leaves import same_kernels
from vit.distributed.process_group import World, kernels_of
from vit.extras.audit.history import History, Stretch
from vit.extras.audit.judging import Difference, damages, judge
from vit.extras.audit.repeating import repeat
from vit.loggers.record import code_sha256
from vit.system.meter import Meter

REMEDIES = {
    "device": "audit on the same kind of device",
    "torch": "install that version",
    "code": "check out the code of the run (`git` in its record)",
    "kernels": "audit on the same kind of machine, with the same OMP_NUM_THREADS",
}
"""Maps each value that must be equal in the run and the audit to the remedy if it differs."""


def audit(
    history: History,
    world: World,
    overrides: list[str],
    num_stretches: int,
    seed: int,
    log_line: Callable[[str], None],
) -> dict[str, list[Difference]]:
    """Repeat `num_stretches` stretches, drawn with `seed`, and return the differences of each.

    All ranks must call this, and only rank 0's result is complete. log_line: receives the claim and
    the progress of the audit. Raises ValueError if this machine can repeat no stretch.
    """
    # A live run may save a checkpoint while the ranks list its folder, so only rank 0 lists it.
    stretches = [Stretch(*each) for each in world.broadcast_from_main(history.stretches)]
    if not stretches:
        raise ValueError(f"{history.run_dir}: no checkpoint was saved, so nothing can be repeated")
    configs = {each: history.config(each, overrides) for each in stretches}
    newest = configs[stretches[-1]]
    values = _own_values(newest, world)
    own = world.broadcast_from_main(lambda: values)  # all ranks must decide alike
    reasons = {each: refusal(history, each, configs[each], own, world.size) for each in stretches}
    possible = [each for each in stretches if not reasons[each]]
    if not possible:
        raise ValueError(f"{history.run_dir}, {stretches[-1]}: {reasons[stretches[-1]]}")
    ranks = "any number of" if newest.train.exact_over_ranks else str(world.size)
    log_line(
        f"claim: where the audit agrees, this software gives the bits of the run on {ranks} rank(s)"
        f" of this kind of machine: {own['kernels']}, code {own['code']}"
        + (f"; {history.num_unreadable} unreadable lines" if history.num_unreadable else "")
    )
    differences = world.broadcast_from_main(lambda: [*damages(history)])
    results = {"kept checkpoints and their hashes": [Difference(*each) for each in differences]}
    damaged = {step for step, _ in differences}
    intact = [each for each in possible if each.start not in damaged]
    drawn = random.Random(seed).sample(intact, min(num_stretches, len(intact)))
    # A repetition that ends at a damaged checkpoint shows which tensor is damaged.
    chosen = sorted({*drawn, *(each for each in intact if each.end in damaged)})
    log_line(
        f"{len(chosen)} of {len(stretches)} stretches, --seed {seed}: {', '.join(map(str, chosen))}"
    )
    on_step = _progress(sum(end - start for start, end in chosen), world.is_main)
    for each in chosen:
        results[str(each)] = _audit_stretch(history, each, configs[each], world, on_step)
    if world.is_main and sys.stderr.isatty():
        print(end="\r\033[K", file=sys.stderr, flush=True)
    return results


def _audit_stretch(
    history: History, stretch: Stretch, config: Config, world: World, on_step: Callable[[], None]
) -> list[Difference]:
    """Repeat a stretch, twice if it differs. Return its differences on rank 0."""
    with tempfile.TemporaryDirectory(prefix="audit_") as own_folder:
        folder = Path(world.broadcast_from_main(lambda: own_folder))
        first = repeat(history, stretch, config, world, folder / "first", on_step)
        differences = [] if first is None else judge(history, stretch, first)
        if world.broadcast_from_main(lambda: bool(differences)):
            second = repeat(history, stretch, config, world, folder / "second", lambda: None)
            if first is not None and second is not None:
                differences += _compare_repetitions(stretch, first, second)
    return differences


def _compare_repetitions(stretch: Stretch, first: History, second: History) -> list[Difference]:
    """Return a difference if this machine disagrees with itself."""
    if first.tensors_sha256(stretch.end) == second.tensors_sha256(stretch.end):
        return []
    losses, others = first.losses(), second.losses()
    steps = [step for step, loss in losses.items() if others[step] != loss]
    text = "two repetitions on this host differ, so this machine computes wrong"
    return [Difference(min(steps, default=stretch.end), text)]


def _own_values(config: Config, world: World) -> dict[str, str]:
    """Return this machine's values of `REMEDIES`. All ranks must call this."""
    exact = config.train.exact_over_ranks
    return {
        "device": world.device.type,
        "torch": torch.__version__,
        "code": code_sha256(),
        "kernels": same_kernels(world) if exact else kernels_of(world.device),
    }


def refusal(
    history: History, stretch: Stretch, config: Config, own: dict[str, str], num_ranks: int
) -> str:
    """Return why this machine cannot repeat the stretch, or "" if it can."""
    exact = config.train.exact_over_ranks
    if config.stream.urls is not None:
        return "the images were streamed, and a stream does not repeat its order"
    if own["device"] == "cuda" and not exact and not config.train.deterministic:
        return "train.deterministic was off, so even the same GPU may give other bits"
    if stretch.start not in history.kept and config.init.checkpoint is not None:
        return "the initial weights came from a file (init.checkpoint), which may have changed"
    for start in history.attempts(stretch):
        recorded = {**start, "device": start["device"].partition(":")[0]}
        for key, remedy in REMEDIES.items():
            if recorded[key] != own[key]:
                return f"{key} was {recorded[key]}, but is {own[key]} on this host: {remedy}"
        size = start["world_size"]
        if size != num_ranks and not exact:
            return (
                f"trained on {size} rank(s), and without train.exact_over_ranks another number"
                f" gives other bits: torchrun --nproc_per_node={size} launch/audit.py"
                f" {quote(str(history.run_dir))}"
            )
    return ""


def _progress(total: int, is_main: bool) -> Callable[[], None]:
    """Return a function that counts a step, and shows a live line on rank 0 in a terminal."""
    stderr = sys.stderr  # repetitions replace it
    show = stderr.isatty() and is_main
    meter = Meter(
        "audit",
        total,
        "steps",
        show,
        into=lambda text: print(end=f"\r\033[K{text}\r", file=stderr, flush=True),
    )
    done = iter(range(1, total + 1))
    return lambda: meter.update(next(done, total))
