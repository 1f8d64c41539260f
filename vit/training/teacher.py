"""Knowledge distillation (`distill`): the model learns from the logits of a trained teacher.

1. Find the weights and the settings of their model                            find_teacher
2. Read them on rank 0, and match classes by name                              load_teacher
3. Change the student's augmented batch to the teacher's normalization and
   image size, and compute logits without gradients                           Teacher
4. Combine the losses against the teacher and the labels                       Teacher.blend

A teacher is never trained. The teacher stays in evaluation mode and is not part of optimizer, EMA,
DDP or checkpoints. A checkpoint stores only the hash of the teacher's weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.config import io as config_io
from vit.config.schema import Config, DataConfig, DistillConfig
from vit.layers.image_model import ImageModel
from vit.layers.precision import autocast
from vit.model import create_model
from vit.system.files import WeightsError
from vit.system.spelling import few
from vit.training.loss import Loss, create_loss, hard_distillation, soft_distillation
from vit.training.metrics import margins
from vit.training.model_summary import count_parameters, flops_per_image
from vit.training.objective import Forward, Objective
from vit.training.run_data import Notes, RunData
from vit.weights.class_names import check_head, namings_of, select_classes
from vit.weights.files import LoadedWeights, fingerprint, load_weights, read_weights
from vit.weights.on_ranks import on_all_ranks
from vit.weights.published import identify, to_config, with_published_config

if TYPE_CHECKING:
    from vit.distributed.process_group import World

SHOWN_DIGITS = 12
"""The number of hash digits that messages show."""


@dataclass(frozen=True)
class Identity:
    """The facts that identify a teacher in the log, in metrics.jsonl and when a run resumes."""

    path: str
    model: str
    image_size: tuple[int, int]
    step: int | None
    """The step at which the weights were saved, if a run of this project saved them."""
    sha256: str
    """The hash of the weights (`vit.weights.files.fingerprint`)."""
    notes: tuple[str, ...] = ()
    """Notes on how the weights and the classes were matched."""


class Teacher:
    """A trained model and the loss against its logits.

    Args:
        model: The teacher's model, on the student's device.
        own: The settings that the teacher was trained with.
        student: The settings of the run.
        identity: None for an untrained model that is only used to count FLOPs or measure time.
    """

    def __init__(
        self, model: ImageModel, own: Config, student: Config, identity: Identity | None = None
    ):
        self.model: ImageModel = model.eval().requires_grad_(False)
        self.identity = identity
        self.config = student.distill
        self.precision = student.train.precision
        self._image_size = own.model.height_width()
        self._normalize = _renormalization(
            student.data, own.data, next(self.model.parameters()).device
        )

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the teacher's logits, (B, classes), for the student's inputs, (B, C, H, W)
        float32.

        The teacher sees the student's crop, colors and mixing (DeiT). Only the normalization and
        the size are changed to the teacher's, with a bicubic, antialiased resize.
        """
        if self._normalize is not None:
            shift, scale = self._normalize
            inputs = torch.addcmul(shift, inputs, scale)
        if inputs.shape[2:] != self._image_size:
            inputs = F.interpolate(inputs, self._image_size, mode="bicubic", antialias=True)
        with autocast(self.precision, inputs.device):
            return self.model(inputs)

    def blend(self, task_losses: Tensor, logits: Tensor, answers: Tensor) -> Tensor:
        """Return the loss of each image, (B,) float32.

        Args:
            task_losses: The losses against the labels, (B,).
            logits: The logits of the head that learns from the teacher, (B, classes).
            answers: The result of `__call__`, (B, classes).
        """
        config = self.config
        if config.distill_type == "hard":
            losses = hard_distillation(logits, answers)
        else:
            losses = soft_distillation(logits, answers, config.temperature)
        return config.task_loss_weight * task_losses + config.distill_loss_weight * losses

    @property
    def notes(self) -> Notes:
        """The hash, identity and cost of a loaded teacher."""
        identity = self.identity
        assert identity is not None, "only loaded teachers are trained with"
        record = {
            **asdict(identity),
            "parameters": count_parameters(self.model),
            "gflop_per_image": round(flops_per_image(self.model) / 1e9, 4),
            "precision": self.precision,
        }

        step = "" if identity.step is None else f" (step {identity.step:,})"
        cost = _cost(
            self.model, identity.model, "x".join(map(str, identity.image_size)), self.precision
        )
        is_soft = self.config.distill_type == "soft"
        kind = f"soft at temperature {self.config.temperature:g}" if is_soft else "hard"

        lines = (
            f"teacher: {identity.path}{step}: {cost}, not counted in MFU; {kind}; sha256"
            f" {identity.sha256[:SHOWN_DIGITS]}",
            *(f"note: teacher: {note}" for note in identity.notes),
        )
        return Notes({"teacher_sha256": identity.sha256}, {"teacher": record}, lines)


def _renormalization(
    data: DataConfig, own: DataConfig, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return (shift, scale), each (C, 1, 1), which convert the student's normalization to the
    teacher's, or None if both are the same.

    Args:
        data: The settings that normalized the inputs.
        own: The settings of the teacher.
    """
    settings = (data.mean, data.std, own.mean, own.std)
    channels = max(map(len, settings))
    mean, std, own_mean, own_std = (
        values * channels if len(values) == 1 else values for values in settings
    )
    if (mean, std) == (own_mean, own_std):
        return None

    rows = zip(mean, std, own_mean, own_std, strict=True)
    values = [((m - own_m) / own_s, s / own_s) for m, s, own_m, own_s in rows]
    shift, scale = torch.tensor(values, device=device).T.reshape(2, channels, 1, 1)
    return shift, scale


class Distilled(Objective):
    """The objective that combines the loss against the labels with the loss against a teacher."""

    def __init__(self, loss: Loss, teacher: Teacher):
        super().__init__(loss)
        self.teacher = teacher
        self.models = (teacher.model,)
        self._mark_teacher: Callable[[], object] = lambda: None

    @property
    def notes(self) -> Notes:
        """The hash, identity and cost of the teacher."""
        return self.teacher.notes

    def begin(self, model: nn.Module, mark_teacher: Callable[[], object]) -> None:
        """Make a `model` with two heads return the logits of both."""
        self._mark_teacher = mark_teacher
        if hasattr(model, "distilled_training"):  # only such models have this attribute
            model.distilled_training = True  # type: ignore[assignment]

    def __call__(
        self, forward: Forward, inputs: Tensor, targets: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `vit.training.objective.Objective`."""
        # Run the teacher before the student, so that its temporary memory is freed before the
        # student's activations are allocated.
        self._mark_teacher()
        answers = self.teacher(inputs)
        outputs = forward(inputs)

        # If the model has a second head, only that head learns from the teacher.
        logits, learning = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        losses = self.teacher.blend(self.loss(logits, targets), learning, answers)
        return losses, margins(logits.detach(), labels)


def distilled(config: Config, data: RunData, world: World) -> Distilled:
    """Create the objective of `distill`. All ranks must call this. Raises the errors of
    `load_teacher`."""
    loss = create_loss(config.loss, data.class_weights, world.device)
    teacher = load_teacher(config, data.class_names, data.num_classes, world)
    assert teacher is not None, "the caller checks"
    return Distilled(loss, teacher)


def load_teacher(
    config: Config, class_names: Sequence[str], num_classes: int, world: World
) -> Teacher | None:
    """Load the teacher of `config` on all ranks, or return None if there is no teacher.

    Rank 0 reads the weights. class_names, num_classes: the classes of the data. On rank 0, raises
    ValueError if the weights cannot be read, their model is unknown, or their classes or channels
    differ. Raises AlreadyReported on the other ranks.
    """
    if config.distill.teacher is None:
        return None

    def read() -> tuple[LoadedWeights, str]:
        loaded = _read(config.distill)
        sha256 = fingerprint(loaded.weights)  # before classes are selected
        return _with_classes(loaded, class_names, num_classes), sha256

    loaded_on_main, sha256_on_main = world.on_main(read) or (None, "")
    loaded = on_all_ranks(loaded_on_main, world)
    sha256 = world.broadcast_from_main(lambda: sha256_on_main)
    own = config_io.from_dict(loaded.config or {}, str(loaded.path))
    with world.fail_together():
        model = _create(own, config, num_classes)
        try:
            notes = load_weights(model, loaded.weights, loaded.grid_size)
        except WeightsError as error:
            raise WeightsError(f"distill.teacher: {loaded.path}: {error}") from None

    identity = Identity(
        path=str(loaded.path),
        model=own.model.name,
        image_size=own.model.height_width(),
        step=loaded.step,
        sha256=sha256,
        notes=(*loaded.notes, *notes),
    )
    return Teacher(model.to(world.device), own, config, identity)


def find_teacher(config: Config, num_classes: int) -> tuple[ImageModel, Config] | None:
    """Return an untrained copy of the teacher, to count FLOPs or measure time, and its settings.

    The weights file may be missing if its name or `distill.teacher_model` identifies the model;
    otherwise ValueError is raised. Returns None without a teacher.
    """
    distill = config.distill
    if distill.teacher is None:
        return None
    own = config_io.from_dict(_settings_of(distill.teacher, distill.teacher_model), "teacher")
    return _create(own, config, num_classes), own


def describe_teacher(config: Config, num_classes: int) -> str:
    """Return the teacher's model and cost, or the reason why they are unknown."""
    try:
        with torch.device("meta"):
            teacher = find_teacher(config, num_classes)
    except ValueError as error:
        return f"unknown: {error}"
    assert teacher is not None, "the caller checks"
    model, own = teacher
    return _cost(model, own.model.name, own.model.size_text(), config.train.precision)


def _cost(model: ImageModel, name: str, size: str, precision: str) -> str:
    return (
        f"{name} at {size}, {count_parameters(model):,} parameters,"
        f" {flops_per_image(model) / 1e9:.2f} GFLOP forward on top of the student's, with"
        f" train.precision={precision}"
    )


@functools.lru_cache
def _settings_of(path: str, name: str | None) -> dict[str, Any]:
    """Return the settings of a teacher, read from its weights if they exist."""
    if Path(path).exists():
        # The caller may be in a meta-device context, but reading needs real memory.
        with torch.device("cpu"):
            return _read(DistillConfig(teacher=path, teacher_model=name)).config or {}
    try:
        return to_config(identify(path, name), data_root=".")
    except ValueError as error:
        raise ValueError(f"distill.teacher: {_in_our_words(error)}") from None


def _create(own: Config, student: Config, num_classes: int) -> ImageModel:
    """Create the teacher's model for the data's classes. Raises ValueError if channels differ."""
    if own.model.in_chans != student.model.in_chans:
        raise ValueError(
            f"distill.teacher: {student.distill.teacher} expects images with"
            f" in_chans={own.model.in_chans}, but model.in_chans is {student.model.in_chans}: use a"
            " teacher with as many channels"
        )
    return create_model(own.model, num_classes=num_classes)


def _read(distill: DistillConfig) -> LoadedWeights:
    """Read the weights of the teacher, with the settings of its model."""
    path, name = distill.teacher, distill.teacher_model
    assert path is not None, "the caller checks"
    try:
        loaded = read_weights(path)
        if loaded.config is None:
            loaded, _ = with_published_config(loaded, name, data_root=".")
            check_head(loaded)
        elif name is not None:
            raise ValueError("its run stores the model: set distill.teacher_model=null")
    except ValueError as error:
        raise ValueError(f"distill.teacher: {_in_our_words(error)}") from None

    return loaded


def _in_our_words(error: ValueError) -> str:
    """Return the message of `error`, with the flag --model replaced by the setting."""
    return str(error).replace("--model NAME", "distill.teacher_model")


def _with_classes(
    loaded: LoadedWeights, class_names: Sequence[str], num_classes: int
) -> LoadedWeights:
    """Return `loaded` with a head for the data's classes, in their order.

    Class names are matched if both sides have them. Otherwise, both sides must have the same number
    of classes. Raises ValueError if the classes differ.
    """
    own_classes = loaded.num_classes
    assert own_classes is not None, "weights with a config have it"
    try:
        namings = namings_of(loaded, own_classes) if class_names else {}
    except WeightsError:  # published weights whose class names only timm knows
        namings = {}

    lacking = {
        naming: [name for name in class_names if name not in names]
        for naming, names in namings.items()
    }
    # Choose the list of class names that lacks the fewest classes. The weights' own names have the
    # key "", and all other lists are guesses.
    closest = min(namings, key=lambda naming: len(lacking[naming]), default="")
    if namings and not lacking[closest]:
        is_same_order = list(namings[closest]) == list(class_names)
        return loaded if is_same_order else select_classes(loaded, class_names)

    is_guess_of_same_size = bool(closest) and own_classes == num_classes
    if namings and not is_guess_of_same_size:
        raise ValueError(
            f"distill.teacher: {loaded.path} lacks {len(lacking[closest])} of the data's"
            f" {num_classes} classes ({few(lacking[closest])}); its own classes are"
            f" {few(namings[closest])}: use a teacher trained on the data's classes"
        )
    if own_classes != num_classes:
        raise ValueError(
            f"distill.teacher: {loaded.path} has {own_classes} classes, but the data have"
            f" {num_classes}, and there are no class names to match: use a teacher trained on the"
            " data's classes"
        )

    note = "its classes are matched to the data's by number, because their names do not match"
    return replace(loaded, notes=(*loaded.notes, note))
