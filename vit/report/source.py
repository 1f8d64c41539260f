"""What a run folder and its data hold, for the report; each part is read on first use."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn

from vit import config_io
from vit.config import Config
from vit.data.batches import ImageFormat
from vit.data.decode.views import decode_center
from vit.data.shards.split import Split
from vit.data.sources import TrainSet
from vit.model import create_model
from vit.open_data import open_split, open_train_set
from vit.report.confusion import confusion_matrix
from vit.run.folder import CONFIG_FILE, PREDICTIONS_FILE
from vit.weights import LoadedWeights, WeightsError, find_weights, load_weights, read_weights

MAX_CONFUSION_CLASSES = 5_000
"""A matrix of 200 MB. The 21,841 classes of ImageNet-21k would take 3.8 GB, at the end of a run
that is finished."""


class ReportSource:
    """What a run folder holds, each part read when a picture asks for it. One that is not there
    raises ValueError with the reason."""

    def __init__(self, run_dir: Path, device: torch.device):
        self.run_dir = run_dir
        self.device = device

    @cached_property
    def config(self) -> Config:
        """As the newest attempt resolved it; `config.yaml` is younger than the weights after a
        resume with a changed setting."""
        try:
            return config_io.load_config(self.run_dir / CONFIG_FILE, used_here=False).config
        except ValueError as error:
            try:
                trained = self.trained
            except ValueError:
                raise error from None
            if trained.config is None:
                raise
            return config_io.from_dict(trained.config, str(trained.path))

    @cached_property
    def trained(self) -> LoadedWeights:
        try:
            find_weights(self.run_dir)
        except WeightsError:
            raise ValueError("The run has not saved any weights yet") from None
        return read_weights(self.run_dir)

    @cached_property
    def train_set(self) -> TrainSet:
        if self.config.data.reader == "webdataset":
            raise ValueError(
                "Training images were streamed, and a stream does not begin twice with the same"
                " ones"
            )
        return open_train_set(
            self.config.data, self.val_split, num_classes=self.config.model.num_classes
        )

    @cached_property
    def val_split(self) -> Split:
        data = self.config.data
        return open_split(data, data.val_split)

    @cached_property
    def predictions(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """predictions (num_images,), -1 where the logits were not numbers; labels (num_images,);
        the step of that evaluation."""
        try:
            with np.load(self.run_dir / PREDICTIONS_FILE) as file:
                predictions = file["predictions"]
                labels = file["labels"]
                step = int(file["step"])
        except FileNotFoundError:
            raise ValueError("The run has not been evaluated yet") from None
        except Exception as error:  # a damaged zip has many voices
            raise ValueError(
                f"{PREDICTIONS_FILE} is damaged ({type(error).__name__}); the next evaluation"
                " writes it anew"
            ) from None
        if predictions.shape != labels.shape or predictions.ndim != 1 or not len(labels):
            raise ValueError(
                f"{PREDICTIONS_FILE} is damaged: {predictions.shape} predictions for {labels.shape}"
                " labels"
            )
        return predictions, labels, step

    @cached_property
    def class_names(self) -> list[str]:
        """A name for each class, "class 7" where none is known."""
        num = 0
        names = list[str]()
        with suppress(ValueError):
            num = self.num_classes
            path = self.trained.path
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    names = json.loads((file.metadata() or {}).get("class_names", "[]"))
        with suppress(ValueError):
            num = max(num, self.val_split.num_classes)
            names = names or self.val_split.class_names
        with suppress(ValueError):
            num = max(num, int(np.max(self.predictions[:2])) + 1)
        return [
            names[n] if n < len(names) and names[n] else f"class {n}"
            for n in range(max(num, len(names)))
        ]

    @cached_property
    def confusion(self) -> NDArray[np.int64]:
        """(classes, classes): images of a class (row) by what they were taken for (column)."""
        predictions, labels, _ = self.predictions
        if len(self.class_names) > MAX_CONFUSION_CLASSES:
            raise ValueError(
                f"{len(self.class_names):,} classes are too many for a matrix: more than"
                f" {MAX_CONFUSION_CLASSES:,}"
            )
        return confusion_matrix(labels, predictions, len(self.class_names))

    @cached_property
    def model(self) -> nn.Module:
        model = create_model(self.config.model, num_classes=self.num_classes)
        load_weights(model, self.trained.weights, self.trained.grid_size)
        return model.to(self.device).eval()

    @property
    def num_classes(self) -> int:
        """The size of the model's head."""
        if self.trained.num_classes is None:
            raise ValueError(f"{self.trained.path} does not say how many classes it knows")
        return self.trained.num_classes

    def eval_image(self, sample: int) -> Tensor:
        """What evaluation sees of an image of the validation split: (C, H, W) uint8."""
        data = self.val_split.read(sample)
        image = ImageFormat.from_config(self.config.model, self.config.data)
        return decode_center(
            data, image.size, self.config.eval, image.interpolation, image.channels
        )

    def check_same_images(self) -> None:
        """Raise ValueError if the validation split is not the one that was evaluated."""
        if not np.array_equal(self.predictions[1], self.val_split.index["label"]):
            raise ValueError(
                f"{self.val_split.root} is no longer what was evaluated: its"
                f" {self.val_split.name!r} split has other labels"
            )


def sentence(error: Exception) -> str:
    """An error as one sentence: a ValueError of ours is written for people, others name their
    kind."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] + (f" (and {len(lines) - 1} more of the kind)" if len(lines) > 1 else "")
    text = (
        text
        if isinstance(error, ValueError) and text
        else f"{type(error).__name__}: {text}".rstrip(": ")
    )
    return text if text.endswith((".", "!", "?")) else f"{text}."
