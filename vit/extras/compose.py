"""Select a run's hooks and components from its config, and train.

Optional components are imported by name, and only if a config needs them. If a component's folder
was deleted, the config is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from vit.build import build
from vit.config.schema import Config
from vit.distributed.exit import out_of_memory
from vit.distributed.outcome import Outcome
from vit.distributed.process_group import World, join_world
from vit.distributed.watchdog import collective_timeout
from vit.hooks.guard import GuardHook
from vit.hooks.host_check import HostCheck
from vit.hooks.order_check import OrderHook
from vit.run import Hook, Parts, Run
from vit.system.by_name import load
from vit.system.urls import is_url
from vit.train import train
from vit.training.reduce import Reduce, data_parallel


def build_run(config: Config, world: World, allow_change: Iterable[str] = ()) -> Run:
    """Build a run with the components that `config` selects. See `vit.build.build`."""
    return build(config, world, allow_change, parts_of(config))


def fit(config: Config, *, allow_change: Iterable[str] = (), world: World | None = None) -> Outcome:
    """Train as launch/train.py does, including metrics, checkpoints and resuming.

    Every rank must call this function. config: the result of `vit.load_config`. allow_change:
    settings that may differ from those of the resumed run. world: by default, the ranks that
    torchrun started, or a single process without torchrun. Returns "finished", or "stopped" after a
    signal. Raises ValueError if the settings or the data are invalid.
    """
    world = world or join_for(config)
    outcome = train(build_run(config, world, allow_change))
    world.barrier()  # rank 0 may still fail while writing the report
    return outcome


def join_for(config: Config, limit: timedelta | None = None) -> World:
    """Join the ranks that torchrun started for a run of `config`."""
    return join_world(
        config.train.device,
        deterministic=config.train.deterministic or config.train.exact_over_ranks,
        collective_timeout=collective_timeout(config.run.hang_timeout_s),
        limit=limit,
    )


def parts_of(config: Config) -> Parts:
    """Return the components of a run. Raises ValueError if a component is not installed."""
    parts: dict[str, Any] = {"create_reduce": create_reduce_of(config)}
    if is_url(config.run.dir):
        parts["open_place"] = load(
            "vit.extras.remote_runs.store:open_place", f"run.dir={config.run.dir}"
        )
    if config.distill.teacher is not None:
        parts["create_objective"] = load("vit.training.teacher:distilled", "distill.teacher")
    if config.init.checkpoint is not None:
        parts["load_weights"] = load(
            "vit.training.initial_weights:load_initial_weights", "init.checkpoint"
        )
    return Parts(hooks=hooks_of(config), **parts)


def create_reduce_of(config: Config) -> Callable[..., Reduce]:
    """Return the function that creates the gradient reduction that `config` selects."""
    if config.train.exact_over_ranks:
        return load("vit.hooks.exact_over_ranks:exact_over_ranks", "train.exact_over_ranks")
    return data_parallel


def hooks_of(config: Config) -> tuple[Hook, ...]:
    """Return the hooks that `config` selects, in the order in which they are called."""
    hooks: list[Hook] = [HostCheck(), OrderHook()]
    if config.train.exact_over_ranks:
        hooks.append(load("vit.hooks.exact_over_ranks:ExactFacts", "train.exact_over_ranks")())
    if config.log.sample_losses and config.stream.urls is None:
        # A stream has no fixed sample indices, so per-sample losses are not saved.
        hooks.append(load("vit.hooks.sample_losses:SamplesHook", "log.sample_losses")())
    hooks.append(GuardHook(config))
    if config.eval.reference is not None:
        hooks.append(load("vit.extras.recipes.reference:ReferenceCurve", "eval.reference")())
    if config.log.report:
        hooks.append(load("vit.extras.report.page:ReportHook", "log.report=true")())
    hooks.append(MemoryAdvice())
    return tuple(hooks)


class MemoryAdvice(Hook):
    """A hook that names the setting to lower after an out-of-memory error."""

    def failed(self, run: Run, error: Exception) -> None:
        """See `Hook`."""
        if out_of_memory(error):
            with suppress(ValueError):  # without the planner, no advice is added
                explain = load("vit.extras.planner.fitting:explain", "advice")
                num_classes = run.state.facts["num_classes"]
                explain(error, run.config, run.plan, num_classes, run.world.device)
