"""Read a run folder and its data for the report.

The run may be finished, stopped, killed or still running. Each file is read on first use. If a file
is missing, ValueError is raised, and the report shows its message.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vit.config import io as config_io
from vit.config.schema import Config
from vit.data.augment.apply import Augment, create_augment
from vit.data.changes import HOLE
from vit.data.decode.crops import decode_center
from vit.data.image_format import ImageFormat
from vit.data.open_data import choose_num_classes, open_split, open_train_set
from vit.data.order import Order
from vit.data.shards.split import Split
from vit.data.sources import Sources, TrainSet
from vit.extras.report.confusion import confusion_matrix
from vit.layers.image_model import ImageModel
from vit.model import create_model
from vit.run_folder.paths import CONFIG_FILE, PREDICTIONS_FILE
from vit.system.files import WeightsError
from vit.training.plan import create_order
from vit.weights.files import LoadedWeights, find_weights, load_weights, read_weights

MAX_CONFUSION_CLASSES = 5_000
"""The maximum number of classes in a confusion matrix, which takes 200 MB at this limit. A matrix
for the 21,841 classes of ImageNet-21k would take 3.8 GB."""
PREDICTIONS = ("predictions", "labels", "probabilities", "step")
"""The arrays in `predictions.npz`."""


class ReportSource:
    """A run folder and its data, with the model on `device`.

    overrides: settings that replace those of the run, as "section.key=value".
    """

    def __init__(self, run_dir: Path, device: torch.device, overrides: Sequence[str] = ()):
        self.run_dir = run_dir
        self.device = device
        self.overrides = overrides

    @cached_property
    def config(self) -> Config:
        """The config of the last attempt."""
        return config_io.load_config(self.run_dir / CONFIG_FILE, self.overrides, used_here=False)

    @cached_property
    def weights(self) -> LoadedWeights:
        """The last weights, or the last averaged weights if they exist."""
        try:
            path = find_weights(self.run_dir)
        except WeightsError:
            raise ValueError("The run has not saved any weights yet") from None
        return read_weights(path)

    @cached_property
    def train_set(self) -> TrainSet:
        """The training images."""
        if self.config.stream.urls is not None:
            raise ValueError(
                "The training images were streamed, and a stream cannot deliver the same images"
                " again"
            )
        return open_train_set(
            self.config, self.val_split, num_classes=self.config.model.num_classes
        )

    @cached_property
    def train_labels(self) -> NDArray[np.integer]:
        """The training labels, (N,). Labels in `data.relabel` replace the stored labels."""
        stored = self.train_set.split.index["label"]
        labels = self.train_set.changes.changed(np.arange(len(stored)), stored)
        return np.where(labels == HOLE, stored, labels)

    @cached_property
    def order(self) -> Order:
        """The order of the training images in batches."""
        return create_order(self.config, self.train_set.num_draws, self.train_set.shares)

    @cached_property
    def val_split(self) -> Split:
        """The validation images."""
        return open_split(self.config, self.config.data.val_split)

    @cached_property
    def predictions(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """The predictions and labels of the last evaluation, (num_images,) each, and its step.

        A prediction is -1 if the logits were NaN.
        """
        file = self._predictions_file
        return file["predictions"], file["labels"], int(file["step"])

    @cached_property
    def probabilities(self) -> NDArray[np.float32]:
        """The probability of each of `predictions`, (num_images,)."""
        return self._predictions_file["probabilities"]

    @cached_property
    def _predictions_file(self) -> dict[str, NDArray]:
        try:
            with np.load(self.run_dir / PREDICTIONS_FILE) as file:
                return {name: file[name] for name in PREDICTIONS}
        except FileNotFoundError:
            raise ValueError("The run has not been evaluated yet") from None
        except Exception as error:  # A damaged zip file raises many types of errors.
            raise ValueError(
                f"{PREDICTIONS_FILE} is damaged ({type(error).__name__}); the next evaluation"
                " replaces the file"
            ) from None

    @cached_property
    def class_names(self) -> list[str]:
        """The name of each class, such as "class 7" for a class without a name.

        Names come from the weights if available, and otherwise from the data. The number of classes
        is the maximum over weights, data and predictions.
        """
        num_classes = 0
        names = list[str]()
        with suppress(ValueError):
            num_classes = self.num_classes
            names = self.weights.class_names or []
        with suppress(ValueError):
            num_classes = max(num_classes, self.val_split.num_classes)
            names = names or self.val_split.class_names
        with suppress(ValueError):
            num_classes = max(num_classes, int(np.max(self.predictions[:2])) + 1)

        names = names + [""] * (num_classes - len(names))
        return [name or f"class {number}" for number, name in enumerate(names)]

    @cached_property
    def confusion(self) -> NDArray[np.int64]:
        """The confusion matrix (classes, classes), with true classes in rows."""
        predictions, labels, _ = self.predictions
        num_classes = len(self.class_names)
        if num_classes > MAX_CONFUSION_CLASSES:
            raise ValueError(
                f"{num_classes:,} classes are too many for a confusion matrix, which supports at"
                f" most {MAX_CONFUSION_CLASSES:,}"
            )
        return confusion_matrix(labels, predictions, num_classes)

    @cached_property
    def model(self) -> ImageModel:
        """The model with its weights, in evaluation mode."""
        model = create_model(self.config.model, num_classes=self.num_classes)
        load_weights(model, self.weights.weights, self.weights.grid_size)
        return model.to(self.device).eval()

    @cached_property
    def augment(self) -> Augment:
        """The augmentation on the device."""
        return create_augment(self.config.augment, self.config.data, self.num_classes, self.device)

    @property
    def num_classes(self) -> int:
        """The number of classes in the weights or, if no weights exist, in the data."""
        try:
            find_weights(self.run_dir)
        except WeightsError:
            return choose_num_classes(
                self.config.model, self.config.data, self.train_set.split, self.val_split
            )

        if self.weights.num_classes is None:
            raise ValueError(f"{self.weights.path} does not contain the number of classes")
        return self.weights.num_classes

    @property
    def image_format(self) -> ImageFormat:
        """The format of the model's inputs in evaluation and in the last training stage."""
        return ImageFormat.from_config(self.config.model, self.config.data)

    @property
    def train_format(self) -> ImageFormat:
        """The format of the model's inputs in training, including its stages."""
        config = self.config
        return ImageFormat.from_config(config.model, config.data, config.schedule)

    def eval_image(self, sample: int, split: Split | Sources | None = None) -> Tensor:
        """Decode an image, of `val_split` by default, as in evaluation: (C, H, W) uint8."""
        form = self.image_format
        data = (split or self.val_split).read(sample)
        return decode_center(data, form.size, self.config.eval, form.interpolation, form.channels)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Convert (B, C, H, W) uint8 to inputs on the model's device."""
        return self.augment.normalize(pixels.to(self.device))

    def check_same_images(self) -> None:
        """Raise ValueError if the validation split has changed since the evaluation."""
        if not np.array_equal(self.predictions[1], self.val_split.index["label"]):
            raise ValueError(
                f"{self.val_split.root} has changed since the evaluation: the labels of its split"
                f" {self.val_split.name!r} differ"
            )


def as_sentence(error: Exception) -> str:
    """Return an error as one sentence. The type is included unless it is ValueError.

    ValueError messages are written for users.
    """
    first, *more_lines = str(error).strip().splitlines() or [""]
    if more_lines:
        first += f" (and {len(more_lines)} more lines)"
    if not isinstance(error, ValueError) or not first:
        first = f"{type(error).__name__}: {first}".rstrip(": ")
    return first if first.endswith((".", "!", "?")) else f"{first}."
