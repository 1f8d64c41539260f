"""Check before a run starts that all hosts meet its requirements.

    launch/train.py --check -> check -> CheckStages (stages.py), on all ranks
        machine      software, clocks, W&B
        storage      shards, reading rate, the run's folder
        collectives  each collective, pairs of ranks
        trial        plan, data, steps at full size, an evaluation batch, a checkpoint
        repeat       the same step several times on each rank
    -> one table on rank 0 (vit/extras/planner/check/findings.py)

`trial` includes the checks of `vit.start.preflight`, which every run performs when it starts.
Single-host checks come first, so their results are printed even if ranks cannot reach each other.
"""

import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from vit.compose import parts_of
from vit.config.schema import Config
from vit.distributed.exit import Interrupted, StopSignals
from vit.distributed.process_group import AlreadyReported, World
from vit.extras.planner.check import collectives, machine, save_trial, storage
from vit.extras.planner.check.findings import (
    Finding,
    Verdict,
    few,
    judge_main,
    print_table,
    summary,
)
from vit.extras.planner.check.repeated_step import differing, repeat_step
from vit.extras.planner.check.stages import CheckStage, CheckStages
from vit.extras.planner.check.trial import Trial
from vit.system.meter import Meter

REPEATS = 3
"""The number of times that each rank repeats a step, to compare the bits."""
STEP_TIMES = 3.0
"""The time limit of the first steps is multiplied by this factor, because these steps compile the
model."""


def check(config: Config, world: World, allow_change: Iterable[str], limit_s: float) -> None:
    """Check a run's requirements, print a table of findings, and remove all test files.

    Every rank must call this function. If a check fails, rank 0 raises ValueError, and all other
    ranks raise AlreadyReported. A signal raises Interrupted.

    Args:
        config: The settings of the run.
        world: All ranks of the run.
        allow_change: Settings that may differ from a checkpoint's.
        limit_s: The time limit of each check.
    """
    began_s = time.monotonic()
    signals = StopSignals()
    trial = Trial(config, world, allow_change)
    parts = CheckStages(world, limit_s)
    all_parts = _parts(config, world, trial)

    try:
        with Meter("check", len(all_parts), "parts", shown=world.is_main) as meter:
            parts.run(all_parts, meter.update)
    except Interrupted as error:
        if world.is_main:
            signals.remember_only()  # torchrun repeats the signal
            parts.interrupt(error.number.name)
            _print(config, world, parts, began_s)
            storage.remove_passing()
        raise
    finally:
        signals.restore()
        parts.close()

    if world.is_main:
        _print(config, world, parts, began_s)
    if parts.failed:
        if world.is_main:
            raise ValueError(
                f"check: {summary(parts.findings)}; nothing was started: follow the remedies in the"
                " table"
            )
        raise AlreadyReported("the check has failed")


def look_at_place(config: Config, run_dir: Path) -> list[tuple[str, str]]:
    """Test a run's local folder and, if `run.dir` is a URL, the URL."""
    results = storage.look_at_folder(run_dir)
    check_place = parts_of(config).check_place
    if check_place is not None:
        results.append((Verdict.OK, check_place(str(config.run.dir))))
    return results


def _parts(config: Config, world: World, trial: Trial) -> list[CheckStage]:
    """Return the parts of the check in order. Every rank runs all of them."""
    return [
        CheckStage(
            "software",
            partial(machine.own_software, config),
            partial(machine.judge_software, hosts=world.hosts),
        ),
        CheckStage("shards", partial(storage.look_at_shards, config, world), storage.judge_shards),
        CheckStage(
            "run folder",
            lambda: look_at_place(config, trial.run_dir) if world.is_main else None,
            partial(judge_main, name="run folder"),
        ),
        CheckStage(
            "W&B",
            lambda: machine.look_at_views(config.log) if world.is_main else None,
            partial(judge_main, name="W&B"),
        ),
        CheckStage(
            "clocks",
            partial(machine.note_times, world),
            partial(machine.judge_clocks, hosts=world.hosts),
            is_joint=True,
        ),
        CheckStage(
            "collectives",
            partial(collectives.try_collectives, world, config.train.exact_over_ranks),
            partial(collectives.judge_collectives, world=world),
            is_joint=True,
        ),
        CheckStage(
            "pairs",
            partial(collectives.try_pairs, world),
            partial(collectives.judge_pairs, world=world),
            is_joint=True,
            needs=("collectives",),
        ),
        CheckStage("data", trial.open_data, trial.judge_data, is_joint=True, needs=("shards",)),
        CheckStage(
            "start",
            lambda: save_trial.look_at_checkpoint(trial) if world.is_main else None,
            partial(judge_main, name="start"),
            needs=("data", "run folder"),
        ),
        CheckStage(
            "reading",
            lambda: storage.read_rate(trial.data.batches, trial.data.plan.total_steps, world),
            trial.judge_reading,
            needs=("data",),
        ),
        CheckStage(
            "step",
            trial.try_step,
            trial.judge_step,
            is_joint=True,
            needs=("data",),
            times=STEP_TIMES,
        ),
        CheckStage(
            "evaluation",
            trial.try_evaluation,
            trial.judge_evaluation,
            is_joint=True,
            needs=("step",),
        ),
        CheckStage(
            "checkpoint",
            partial(save_trial.try_checkpoint, trial),
            partial(judge_main, name="checkpoint"),
            is_joint=True,
            needs=("step", "run folder"),
        ),
        CheckStage(
            "repeat",
            partial(repeat_step, world, REPEATS),
            partial(_judge_repeats, trial.config, world),
            is_joint=True,
        ),
    ]


def _judge_repeats(
    config: Config, world: World, answers: dict[int, dict[str, Any]]
) -> Iterator[Finding]:
    """Yield whether all ranks with the same kernels got the same bits."""
    texts = differing(list(answers.values()), world.hosts)
    if not texts:
        yield Finding(
            "repeat", Verdict.OK, f"the same step {REPEATS} times on each rank gave the same bits"
        )
        return

    # Without these settings, kernels on GPUs may add in any order.
    is_exact = config.train.deterministic or config.train.exact_over_ranks
    verdict = Verdict.FAIL if is_exact or world.device.type == "cpu" else Verdict.NOTE
    yield Finding(
        "repeat",
        verdict,
        "\n".join([*few(texts), "the host may be faulty: repeat the check, or exclude it"]),
    )


def _print(config: Config, world: World, parts: CheckStages, began_s: float) -> None:
    hosts = f" on {len(set(world.hosts))} host(s)" if world.hosts else ""
    title = f"check of {config.run.dir}: {world.size} rank(s){hosts}, {world.device.type}"
    console = Console()
    print_table(title, parts.findings, console)
    took_s = time.monotonic() - began_s
    console.print(f"{summary(parts.findings)}, in {took_s:.0f} s", highlight=False, markup=False)
