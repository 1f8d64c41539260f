"""The training objective, which `vit.step` calls to compute losses.

`Objective` compares logits with labels. `vit.training.teacher.Distilled` also compares logits with
those of a teacher. To add an objective, such as masked autoencoding, write a subclass.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from vit.config.schema import Config
from vit.distributed.process_group import World
from vit.training.loss import Loss, create_loss
from vit.training.metrics import margins
from vit.training.run_data import Notes, RunData

Forward = Callable[[Tensor], Any]
"""A function that computes the model's logits, or the logits of two heads, under autocast."""


class Objective:
    """Computes the loss of each row of a micro-batch from logits and labels."""

    models: Sequence[nn.Module] = ()
    """Additional models that are compiled together with the trained model."""

    def __init__(self, loss: Loss):
        self.loss = loss

    @property
    def notes(self) -> Notes:
        """The notes and facts to record when a run starts."""
        return Notes(record={"teacher": None})

    def begin(self, model: nn.Module, mark_teacher: Callable[[], object]) -> None:
        """Prepare `model` for training. mark_teacher: marks the start of `StepPhase.TEACHER`."""

    def __call__(
        self, forward: Forward, inputs: Tensor, targets: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and margin (`vit.training.metrics.margins`) of each row, (B,) float32.

        Args:
            inputs: (B, C, H, W) float32.
            targets: (B, classes), mixed.
            labels: (B,), not mixed.
        """
        outputs = forward(inputs)
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        return self.loss(logits, targets), margins(logits.detach(), labels)


def supervised(config: Config, data: RunData, world: World) -> Objective:
    """Create the objective of `config` without a teacher. All ranks must call this."""
    return Objective(create_loss(config.loss, data.class_weights, world.device))
