"""The losses of a batch: the seam `Objective` of `vit.step`.

`Supervised` compares logits with labels; `vit.training.teacher.Distilled` also with the answers of
a teacher. A further objective, such as masked autoencoding, is a class with these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from vit.config.schema import Config
from vit.distributed.process_group import World
from vit.training.loss import Loss, create_loss
from vit.training.metrics import margins
from vit.training.run_data import Notes, RunData

Forward = Callable[[Tensor], Any]
"""Inputs -> outputs of the model under autocast: logits, or a tuple of the logits of two heads."""


class Objective(Protocol):
    """A loss for each row of a micro-batch, called between its augmentation and its backward."""

    models: Sequence[nn.Module]
    """The models beside the trained one; they are compiled with it."""

    @property
    def notes(self) -> Notes:
        """Its contributions to the start of a run."""

    def begin(self, model: nn.Module, mark_teacher: Callable[[], object]) -> None:
        """Take the model that is to learn. mark_teacher: begins `StepPhase.TEACHER`."""

    def __call__(
        self, forward: Forward, inputs: Tensor, targets: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return loss and margin (`vit.training.metrics.margins`) of each row, (B,) float32.

        inputs: (B, C, H, W) float32. targets: (B, classes), mixed; labels: (B,), not mixed.
        """


class Supervised:
    """The loss of the labels."""

    models: Sequence[nn.Module] = ()
    notes = Notes(record={"teacher": None})

    def __init__(self, loss: Loss):
        self.loss = loss

    def begin(self, model: nn.Module, mark_teacher: Callable[[], object]) -> None:
        """Do nothing."""

    def __call__(
        self, forward: Forward, inputs: Tensor, targets: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Objective`."""
        outputs = forward(inputs)
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        return self.loss(logits, targets), margins(logits.detach(), labels)


def supervised(config: Config, data: RunData, world: World) -> Objective:
    """Create the loss of `config`; every rank calls it.

    Raises ValueError where `config` names a teacher, which `vit.extras.compose` loads.
    """
    if config.distill.teacher is not None:
        raise ValueError("distill.teacher: build the run by vit.extras.compose.build_run")
    return Supervised(create_loss(config.loss, data.class_weights, world.device))
