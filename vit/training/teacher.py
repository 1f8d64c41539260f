"""The teacher of a run (`distill`): a trained model from whose answers the model learns.

1. A path leads to weights and to the settings of their model                 find_teacher
2. Rank 0 reads them; classes are put into the data's order, by name          load_teacher
3. The batch of the student, augmented and mixed, in the teacher's
   normalisation and at its image size -> logits, without gradients           Teacher
4. Logits of both -> a loss for each image, added to that of its label        Teacher.blend

A teacher is not trained: it is in evaluation mode, and not part of optimizer, average, DDP or
checkpoints. A checkpoint has the hash of its weights instead.
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
from vit.layers.precision import autocast
from vit.model import create_model
from vit.system.files import WeightsError
from vit.system.spelling import few
from vit.training.initial_weights import read_once
from vit.training.loss import Loss, create_loss, hard_distillation, soft_distillation
from vit.training.metrics import margins
from vit.training.model_summary import count_parameters, flops_per_image
from vit.training.objective import Forward
from vit.training.run_data import Notes, RunData
from vit.weights.class_names import namings_of, select_classes
from vit.weights.files import LoadedWeights, fingerprint, load_weights, read_weights
from vit.weights.published import identify, to_config, with_published_config

if TYPE_CHECKING:
    from vit.distributed.process_group import World

SHOWN_DIGITS = 12
"""Digits of a hash that messages show."""


@dataclass(frozen=True)
class Identity:
    """The identity of a teacher, for the log, the record, and the comparison at a resume."""

    path: str
    model: str
    image_size: tuple[int, int]
    step: int | None
    """The step of its weights, if they are from a run of this project."""
    sha256: str
    """The hash of the weights (`vit.weights.files.fingerprint`)."""
    notes: tuple[str, ...] = ()
    """Sentences on how its weights or classes were fitted."""


class Teacher:
    """A model that is not trained, and the loss of its answers.

    Args:
        model: on the student's device.
        own: the settings that the model was trained with.
        student: the settings of the run.
        identity: None for a model with fresh weights, which is only counted.
    """

    def __init__(self, model: Any, own: Config, student: Config, identity: Identity | None = None):
        self.model: nn.Module = model.eval().requires_grad_(False)
        self.identity = identity
        self.config = student.distill
        self.precision = student.distill.precision or student.train.precision
        self._image_size = own.model.height_width()
        device = next(self.model.parameters()).device
        self._normalize = _renormalization(student.data, own.data, device)

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Tensor:
        """inputs: (B, C, H, W) float32, normalised for the student -> logits: (B, classes).

        It gets the student's inputs, with crop, colours and mixture (DeiT). Only mean, standard
        deviation and size are changed to those of its own training, by a bicubic, antialiased
        resize.
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

        task_losses: (B,), those of the labels. logits: (B, classes) of the head that learns from
        the teacher. answers: (B, classes), the result of `__call__`.
        """
        config = self.config
        if config.distill_type == "hard":
            losses = hard_distillation(logits, answers)
        else:
            losses = soft_distillation(logits, answers, config.temperature)
        return config.task_loss_weight * task_losses + config.distill_loss_weight * losses

    @property
    def sha256(self) -> str:
        """The hash of its weights."""
        assert self.identity is not None, "only loaded teachers are trained with"
        return self.identity.sha256

    def in_record(self) -> dict[str, Any]:
        """Return the teacher's identity and cost for the record."""
        assert self.identity is not None, "only loaded teachers are recorded"
        return {
            **asdict(self.identity),
            "parameters": count_parameters(self.model),
            "gflop_per_image": round(flops_per_image(self.model) / 1e9, 4),
            "precision": self.precision,
        }

    def lines(self) -> list[str]:
        """Return the lines about the teacher for the log, before the first step."""
        identity = self.identity
        assert identity is not None, "only loaded teachers are reported"
        step = "" if identity.step is None else f" (step {identity.step:,})"
        size = "x".join(map(str, identity.image_size))
        cost = _cost(self.model, identity.model, size, self.precision)
        kind = "hard"
        if self.config.distill_type == "soft":
            kind = f"soft at temperature {self.config.temperature:g}"
        return [
            f"teacher: {identity.path}{step}: {cost}, which no MFU counts; {kind}; sha256"
            f" {identity.sha256[:SHOWN_DIGITS]}",
            *(f"note: teacher: {note}" for note in identity.notes),
        ]


def _renormalization(
    data: DataConfig, own: DataConfig, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return (shift, scale), each (C, 1, 1), from one normalisation to another; None if equal.

    data: settings of the inputs; own: settings of the teacher.
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


class Distilled:
    """The objective that blends the loss of the labels with that of a teacher's answers."""

    def __init__(self, loss: Loss, teacher: Teacher):
        self.loss = loss
        self.teacher = teacher
        self.models: Sequence[nn.Module] = (teacher.model,)
        self._mark_teacher: Callable[[], object] = lambda: None

    @property
    def notes(self) -> Notes:
        """Hash, identity and cost of the teacher."""
        teacher = self.teacher
        return Notes(
            {"teacher_sha256": teacher.sha256},
            {"teacher": teacher.in_record()},
            tuple(teacher.lines()),
        )

    def begin(self, model: nn.Module, mark_teacher: Callable[[], object]) -> None:
        """Let a `model` with two heads return the logits of both."""
        self._mark_teacher = mark_teacher
        if hasattr(model, "distilled_training"):  # our models, and timm's, with a second head
            model.distilled_training = True  # type: ignore[assignment]

    def __call__(
        self, forward: Forward, inputs: Tensor, targets: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `vit.training.objective.Objective`."""
        # Before the student's forward pass, so that the teacher's temporaries are freed before the
        # student's activations are allocated.
        self._mark_teacher()
        answers = self.teacher(inputs)
        outputs = forward(inputs)
        # The second head of a model with two learns from the teacher, else the only head.
        logits, learning = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        losses = self.teacher.blend(self.loss(logits, targets), learning, answers)
        return losses, margins(logits.detach(), labels)


def distilled(config: Config, data: RunData, world: World) -> Distilled:
    """Create the objective of `distill`; every rank calls it. Raises as `load_teacher`."""
    loss = create_loss(config.loss, data.class_weights, world.device)
    teacher = load_teacher(config, data.class_names, data.num_classes, world)
    assert teacher is not None, "the caller checks"
    return Distilled(loss, teacher)


def load_teacher(
    config: Config, class_names: Sequence[str], num_classes: int, world: World
) -> Teacher | None:
    """Load the teacher of `config` on all ranks; rank 0 reads it. None without a teacher.

    class_names, num_classes: those of the data. Raises ValueError on rank 0 for weights that cannot
    be read, belong to an unknown model, or have different classes or channels, and AlreadyReported
    on the others.
    """
    if config.distill.teacher is None:
        return None
    sha256_of_all = ""

    def read() -> LoadedWeights:
        nonlocal sha256_of_all
        loaded = _read(config.distill)
        sha256_of_all = fingerprint(loaded.weights)  # before classes are selected
        return _with_classes(loaded, class_names, num_classes)

    loaded = read_once(read, world)
    sha256 = world.broadcast_from_main(lambda: sha256_of_all)
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


def find_teacher(config: Config, num_classes: int) -> tuple[nn.Module, Config] | None:
    """Return the teacher of `config` with fresh weights, to count or time it, and its settings.

    The file of weights may be missing if its name, or `distill.teacher_model`, identifies the
    model; otherwise it raises ValueError. None without a teacher.
    """
    distill = config.distill
    if distill.teacher is None:
        return None
    own = config_io.from_dict(_settings_of(distill.teacher, distill.teacher_model), "teacher")
    return _create(own, config, num_classes), own


def describe_teacher(config: Config, num_classes: int) -> str:
    """Return the model of the teacher of `config` and its cost, or why these are unknown."""
    try:
        with torch.device("meta"):
            teacher = find_teacher(config, num_classes)
    except ValueError as error:
        return f"not known: {error}"
    assert teacher is not None, "the caller checks"
    model, own = teacher
    precision = config.distill.precision or config.train.precision
    return _cost(model, own.model.name, own.model.size_text(), precision)


def _cost(model: nn.Module, name: str, size: str, precision: str) -> str:
    return (
        f"{name} at {size}, {count_parameters(model):,} parameters,"
        f" {flops_per_image(model) / 1e9:.2f} GFLOP forward beside the student's, in {precision}"
    )


@functools.lru_cache
def _settings_of(path: str, name: str | None) -> dict[str, Any]:
    """Return the settings of a teacher, from its weights if they exist."""
    if Path(path).exists():
        # The caller may be in a context for models without memory; reading needs memory.
        with torch.device("cpu"):
            return _read(DistillConfig(teacher=path, teacher_model=name)).config or {}
    try:
        return to_config(identify(path, name), data_root=".")
    except ValueError as error:
        raise ValueError(f"distill.teacher: {_in_our_words(error)}") from None


def _create(own: Config, student: Config, num_classes: int) -> nn.Module:
    """Create the model of a teacher for the data's classes. Raises ValueError."""
    if own.model.in_chans != student.model.in_chans:
        raise ValueError(
            f"distill.teacher: {student.distill.teacher} sees images of {own.model.in_chans}"
            f" channel(s), model.in_chans is {student.model.in_chans}: take a teacher of as many"
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
        elif name is not None:
            raise ValueError("its run says which model it is: remove distill.teacher_model")
    except ValueError as error:
        raise ValueError(f"distill.teacher: {_in_our_words(error)}") from None
    return loaded


def _in_our_words(error: ValueError) -> str:
    """Return the message of `error` with the setting in place of the flag --model."""
    return str(error).replace("--model NAME", "distill.teacher_model")


def _with_classes(
    loaded: LoadedWeights, class_names: Sequence[str], num_classes: int
) -> LoadedWeights:
    """Return `loaded` with a head for the data's classes in their order.

    If both have names of classes, the names are matched; otherwise the numbers of classes must be
    equal. Raises ValueError.
    """
    own_classes = loaded.num_classes
    assert own_classes is not None, "weights with a config have it"
    try:
        namings = namings_of(loaded, own_classes) if class_names else {}
    except WeightsError:  # published weights, whose names only timm would know
        namings = {}
    lacking = {
        naming: [name for name in class_names if name not in names]
        for naming, names in namings.items()
    }
    whose = min(namings, key=lambda naming: len(lacking[naming]), default="")
    is_guess = bool(whose)
    if namings and not lacking[whose]:
        same = list(namings[whose]) == list(class_names)
        return loaded if same else select_classes(loaded, class_names)
    if namings and not (is_guess and own_classes == num_classes):
        own_names = few(namings[whose])
        raise ValueError(
            f"distill.teacher: {loaded.path} does not know {len(lacking[whose])} of the data's"
            f" {num_classes} classes ({few(lacking[whose])}), its own are {own_names}: take a"
            " teacher that was trained on the data's classes"
        )
    if own_classes != num_classes:
        raise ValueError(
            f"distill.teacher: {loaded.path} knows {own_classes} classes, the data have"
            f" {num_classes}, and no names say which are the same: take a teacher of the data's"
            " classes"
        )
    note = "its classes are taken for the data's by number: not both have names that agree"
    return replace(loaded, notes=(*loaded.notes, note))
