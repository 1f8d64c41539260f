"""The interface between a run and its features.

A feature decides from its settings whether it is on, and returns the parts that it adds to a run:

    hook        calls during training, and checks before step 1                   Hook
    place       where the run is stored                                           OpenPlace
    objective   the loss of each row                                              CreateObjective
    reduction   the sum of gradients over ranks                                   CreateReduce
    reader      the training data                                                 TrainReader
    logger      a program that displays metrics.jsonl                             CreateLogger
    weights     the initial weights                                               LoadWeights

`vit.compose` lists all features. `vit.config.schema` defines their settings, and
`vit.config.checks` finds contradictions between settings, so a config can be checked, and a stored
run can be read, without the feature. `Hook.opened` rejects settings that contradict the data, and
returns notes to log.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import nn

from vit.config.schema import Config
from vit.data.open_data import INDEXED_SHARDS, TrainReader
from vit.distributed.process_group import World
from vit.loggers.logger import CreateLogger
from vit.run import Hook
from vit.run_folder.place import Place, open_folder
from vit.training.objective import Objective, supervised
from vit.training.plan import Plan
from vit.training.reduce import Reduce, data_parallel
from vit.training.run_data import RunData


class OpenPlace(Protocol):
    """Opens the place where a run is stored."""

    def __call__(self, config: Config, world: World) -> Place:
        """Return the place where the run is stored. All ranks must call this. Raises ValueError if
        the place cannot be opened."""


class CreateObjective(Protocol):
    """Creates the training objective."""

    def __call__(self, config: Config, data: RunData, world: World) -> Objective:
        """Return the training objective. All ranks must call this. Raises ValueError if it cannot
        be created."""


class CreateReduce(Protocol):
    """Creates the object that sums gradients over ranks."""

    def __call__(
        self, model: nn.Module, config: Config, plan: Plan, world: World, is_filled_later: bool
    ) -> Reduce:
        """Return the object that sums gradients. is_filled_later: whether a checkpoint will replace
        the weights."""


class LoadWeights(Protocol):
    """Loads the initial weights of a new run."""

    def __call__(
        self, model: nn.Module, config: Config, data: RunData, world: World
    ) -> dict[str, Any]:
        """Load weights into `model` on all ranks, and return facts about the weights. Raises
        ValueError if they cannot be loaded."""


@dataclass(frozen=True)
class Parts:
    """The parts that a feature adds to a run. The default values describe a plain run."""

    hooks: tuple[Hook, ...] = ()
    """The hooks in calling order, which is the same on all ranks."""
    open_place: OpenPlace = open_folder
    check_place: Callable[[str], str] | None = None
    """A function for `--check` that tests the address `run.dir`, and returns what it found."""
    create_objective: CreateObjective = supervised
    create_reduce: CreateReduce = data_parallel
    reader: TrainReader = INDEXED_SHARDS
    create_loggers: tuple[CreateLogger, ...] = ()
    load_weights: LoadWeights | None = None
    """A function that loads the initial weights; None keeps the random weights."""
    lines: tuple[str, ...] = ()
    """Lines for the log before step 1."""


class Feature(Protocol):
    """An optional part of training."""

    @property
    def order(self) -> int:
        """The position of the feature's hooks. Hooks with smaller numbers are called first."""

    def is_on(self, config: Config) -> bool:
        """Return whether a run of `config` has this feature."""

    def parts(self, config: Config) -> Parts:
        """Return the feature's parts. Raises ValueError if the feature is not installed."""


def combine(features: Sequence[Feature], config: Config) -> Parts:
    """Return the parts of all features that are on, in their order.

    Raises ValueError if two features replace the same part.
    """
    chosen = sorted(
        (feature for feature in features if feature.is_on(config)), key=lambda each: each.order
    )

    combined: dict[str, Any] = {}
    for parts in (feature.parts(config) for feature in chosen):
        for field in fields(Parts):
            value = getattr(parts, field.name)
            if value is field.default:
                continue
            if isinstance(value, tuple):
                value = (*combined.get(field.name, ()), *value)
            elif field.name in combined:
                raise ValueError(f"two features replace {field.name}: turn one of them off")
            combined[field.name] = value

    return Parts(**combined)
