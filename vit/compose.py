"""List all training features, and build and train a run with the features that its config selects.

Optional features are imported by name, and only if a config needs them. Apart from
`vit/__init__.py`, this is the only module that names modules in strings. If the folder of a feature
was deleted, a config that needs it is rejected.
"""

import importlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from vit.build import build
from vit.config.schema import Config
from vit.data.open_data import TrainReader
from vit.distributed.exit import out_of_memory
from vit.distributed.outcome import Outcome
from vit.distributed.process_group import World, join_world
from vit.distributed.watchdog import collective_timeout
from vit.feature import Feature, Parts, combine
from vit.hooks.guard import GuardHook
from vit.hooks.order_check import OrderHook
from vit.hooks.sample_losses import SamplesHook
from vit.loggers.record import wandb_mode
from vit.run import Hook, Run
from vit.start.host_check import HostCheck
from vit.system.optional import needed_for
from vit.system.urls import is_url
from vit.train import train


@dataclass(frozen=True)
class Core:
    """A feature of the core. See `Feature`."""

    order: int
    is_on: Callable[[Config], bool]
    parts: Callable[[Config], Parts]


@dataclass(frozen=True)
class Extra:
    """A feature in vit/extras/, which is imported only if the config turns it on. See `Feature`."""

    order: int
    module: str
    """The module whose function `parts` returns the feature's parts."""
    setting: Callable[[Config], str]
    """A function that returns the setting that needs the feature, to name in messages."""
    is_on: Callable[[Config], bool]
    if_missing: Callable[[Config, str], Parts | None] = lambda config, message: None
    """A function that returns other parts if the feature's folder was deleted, or None to reject
    the config."""

    def parts(self, config: Config) -> Parts:
        """See `Feature`."""
        try:
            with needed_for(self.setting(config)):
                module = importlib.import_module(self.module)
        except ValueError as error:
            instead = self.if_missing(config, str(error))
            if instead is None:
                raise
            return instead

        return module.parts(config)


def _exact_over_ranks(config: Config) -> Parts:
    from vit.hooks.exact_over_ranks import ExactFacts, exact_over_ranks

    return Parts(hooks=(ExactFacts(),), create_reduce=exact_over_ranks)


def _teacher(config: Config) -> Parts:
    from vit.training.teacher import distilled

    return Parts(create_objective=distilled)


def _initial_weights(config: Config) -> Parts:
    from vit.start.initial_weights import load_initial_weights

    return Parts(load_weights=load_initial_weights)


class MemoryAdvice(Hook):
    """A hook that names the setting to lower after an out-of-memory error."""

    def failed(self, run: Run, error: Exception) -> None:
        """See `Hook`."""
        if not out_of_memory(error):
            return
        with suppress(ValueError), needed_for("advice"):  # without the planner, add no advice
            importlib.import_module("vit.extras.planner.fitting").explain(
                error, run.config, run.plan, run.state.facts["num_classes"], run.world.device
            )


def _without_wandb(config: Config, message: str) -> Parts | None:
    """Return a note in place of the W&B logger, or None if the user asked for W&B."""
    if config.log.wandb != "auto":
        return None
    return Parts(lines=(f"wandb: {message}: metrics.jsonl only (log.wandb=off silences this)",))


READERS: tuple[Feature, ...] = (
    Extra(
        80,
        "vit.extras.stream.batches",
        setting=lambda config: "stream.urls",
        is_on=lambda config: config.stream.urls is not None,
    ),
)
"""The features that read training data. `reader_of` asks only these features, because asking other
features would import them."""

FEATURES: tuple[Feature, ...] = (
    Core(10, lambda config: True, lambda config: Parts(hooks=(HostCheck(),))),
    Core(20, lambda config: True, lambda config: Parts(hooks=(OrderHook(),))),
    Core(30, lambda config: config.train.exact_over_ranks, _exact_over_ranks),
    # A stream has no fixed sample numbers, so its sample losses are not saved.
    Core(
        40,
        lambda config: config.log.sample_losses > 0 and config.stream.urls is None,
        lambda config: Parts(hooks=(SamplesHook(),)),
    ),
    Core(50, lambda config: True, lambda config: Parts(hooks=(GuardHook(config),))),
    Core(60, lambda config: config.distill.teacher is not None, _teacher),
    Core(70, lambda config: config.init.checkpoint is not None, _initial_weights),
    *READERS,
    Extra(
        90,
        "vit.extras.remote_runs.store",
        setting=lambda config: f"run.dir={config.run.dir}",
        is_on=lambda config: is_url(config.run.dir),
    ),
    Extra(
        100,
        "vit.extras.recipes.reference",
        setting=lambda config: "eval.reference",
        is_on=lambda config: config.eval.reference is not None,
    ),
    Extra(
        110,
        "vit.extras.report.page",
        setting=lambda config: "log.report=true",
        is_on=lambda config: config.log.report,
    ),
    Core(120, lambda config: True, lambda config: Parts(hooks=(MemoryAdvice(),))),
    Extra(
        130,
        "vit.extras.loggers.tensorboard",
        setting=lambda config: "log.tensorboard=true",
        is_on=lambda config: config.log.tensorboard,
    ),
    Extra(
        140,
        "vit.extras.loggers.wandb_logger",
        setting=lambda config: f"log.wandb={config.log.wandb}",
        is_on=lambda config: wandb_mode(config.log.wandb) != "off",
        if_missing=_without_wandb,
    ),
)
"""All features. The number of each feature is the position of its hooks."""


def parts_of(config: Config) -> Parts:
    """Return the parts of a run of `config`. Raises ValueError if one of its features is not
    installed."""
    return combine(FEATURES, config)


def reader_of(config: Config) -> TrainReader:
    """Return the reader of the training data. Raises ValueError if the reader is not installed."""
    return combine(READERS, config).reader


def build_run(config: Config, world: World, allow_change: Iterable[str] = ()) -> Run:
    """Build a run with the features that `config` selects. See `vit.build.build`."""
    return build(config, world, allow_change, parts_of(config))


def fit(config: Config, *, allow_change: Iterable[str] = (), world: World | None = None) -> Outcome:
    """Train as launch/train.py does, including metrics, checkpoints and resuming.

    Every rank must call this function. Returns "finished", or "stopped" after a signal. Raises
    ValueError if the settings or the data are invalid.

    Args:
        config: The result of `vit.load_config`.
        allow_change: Settings that may differ from those of the resumed run.
        world: By default, the ranks that torchrun started, or a single process without torchrun.
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
