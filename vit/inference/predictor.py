"""A trained model, ready to use: weights, the evaluation's view of an image, names of classes.

    trained = load("runs/demo")                              also vit.load
    trained.classify("photo.jpg")                            names and probabilities
    logits = trained(trained.preprocess("a.jpg", "b.png"))   (2, classes)
    tokens = trained.model.forward_features(trained.preprocess("a.jpg"))

1. A path leads to weights and to the settings of the run that made them    read_weights
2. The settings give model and preprocessing                                load
3. Bytes of an image become the view that evaluation has of it              Preprocess.pixels
4. Views become inputs, by the same function as in evaluation               Preprocess.normalize
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vit.config import io as config_io
from vit.config.schema import Config, EvalConfig
from vit.data.augment.apply import Augment, create_augment
from vit.data.decode.crops import decode_center
from vit.data.image_format import ImageFormat
from vit.layers.precision import autocast
from vit.model import create_model
from vit.weights.class_names import IMAGENET_CLASSES, imagenet_names
from vit.weights.files import LoadedWeights, load_weights, read_weights
from vit.weights.published import with_published_config

Image = str | os.PathLike[str] | bytes
"""The path of an image, or its encoded bytes."""


@dataclass(frozen=True)
class Preprocess:
    """Encoded images to inputs of a model, exactly as `launch/eval.py` makes them.

    Decoding is that of `vit.data.decode.images`, for all formats and colours.
    """

    image_format: ImageFormat
    view: EvalConfig
    """Which part of an image is shown, and what resizes it."""
    augment: Augment
    """Only its `normalize` is used."""

    def __call__(self, *images: Image) -> Tensor:
        """Return `images` as (B, C, H, W) float32 on the model's device, channels last, normalised.

        Raises ValueError for one that cannot be read or decoded.
        """
        pixels = torch.stack([self.pixels(image) for image in images])
        # The loader's memory layout: with another one, kernels may add in another order.
        return self.normalize(pixels.contiguous(memory_format=torch.channels_last))

    def pixels(self, image: Image) -> Tensor:
        """Return the evaluation's view of `image`: (C, H, W) uint8 on the host, channels last.

        Raises ValueError if it cannot be read or decoded.
        """
        if isinstance(image, bytes):
            return self._decoded(image)
        try:
            return self._decoded(Path(image).read_bytes())
        except OSError as error:
            raise ValueError(f"{os.fspath(image)}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise ValueError(f"{os.fspath(image)}: {error}") from None

    def normalize(self, pixels: Tensor) -> Tensor:
        """Return (B, C, H, W) uint8 as float32 on the model's device, normalised."""
        return self.augment.normalize(pixels.to(self.augment.scale.device, non_blocking=True))

    def _decoded(self, data: bytes) -> Tensor:
        form = self.image_format
        return decode_center(data, form.size, self.view, form.interpolation, form.channels)


@dataclass(frozen=True)
class Trained:
    """What `load` returns; `trained(inputs)` computes logits as `launch/eval.py` does."""

    model: nn.Module
    """In evaluation mode, with its weights, on `device`."""
    preprocess: Preprocess
    class_names: tuple[str, ...]
    """A name for each output; "class 7" where none is known."""
    config: Config
    """The settings of the run; of weights from elsewhere those that evaluate them."""
    weights: LoadedWeights
    """Where they come from: path, step, whether they are averages. Without the tensors."""
    notes: tuple[str, ...] = ()
    """One sentence for each choice in reading the weights, and for each change to fit them."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.preprocess.augment.scale.device

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Tensor:
        """inputs: (B, C, H, W) float32, normalised -> logits: (B, classes).

        Without gradients, in the run's precision (`train.precision`).
        """
        with autocast(self.config.train.precision, self.device):
            return self.model(inputs.to(self.device, non_blocking=True))

    def classify(self, image: Image, top: int = 5) -> list[tuple[str, float]]:
        """Return the `top` likeliest classes of one image, with probabilities in [0, 1].

        Raises ValueError if the image cannot be read or decoded.
        """
        probabilities = self(self.preprocess(image)).float().softmax(1)[0]
        values, classes = probabilities.topk(min(top, len(probabilities)))
        return [
            (self.class_names[label], value)
            for label, value in zip(classes.tolist(), values.tolist(), strict=True)
        ]

    def __repr__(self) -> str:
        height, width = self.preprocess.image_format.size
        which = f", {self.weights.which()}" if self.weights.which() else ""
        return (
            f"Trained({self.config.model.name} at {width} x {height}, {len(self.class_names)}"
            f" classes, {self.weights.path}{which}, on {self.device})"
        )


def load(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    device: str | torch.device = "cpu",
    settings: dict[str, Any] | None = None,
    class_names: Sequence[str] = (),
) -> Trained:
    """Load a trained model, ready to use.

    Args:
        path: a run folder (its last weights, averaged if there are such), a checkpoint folder, a
            file of weights, a folder of Hugging Face's with `config.json`, or a name of its hub
            that is fetched, as "timm/vit_small_patch16_224.augreg_in1k" or "hf-hub:OWNER/REPO".
        name: timm's name of weights that were trained elsewhere, if path and folder do not say it.
        settings: that override those of the run, as in `{"model.image_size": 384}`: positions are
            resampled to another size; `{"train.precision": "fp32"}`.
        class_names: of the outputs; by default those that the weights carry.

    Raises:
        ValueError: no weights there, damaged ones, weights of an unknown model, with what is
            expected.
    """
    loaded = read_weights(path)
    if name and loaded.config is not None:
        raise ValueError(
            f"name {name}: {loaded.path} comes from this project and contains its model's name:"
            " leave the name out"
        )
    if loaded.config is None:
        # Nothing is evaluated here, so no data are named.
        loaded, _ = with_published_config(loaded, name, data_root=".")
    config = config_io.from_dict(loaded.config or {}, str(loaded.path))
    config = config_io.with_settings(config, settings or {})
    num_classes = loaded.num_classes
    assert num_classes is not None, "it comes with a config"
    if class_names and len(class_names) != num_classes:
        raise ValueError(
            f"{len(class_names)} names of classes are given, {loaded.path} has {num_classes}"
            " classes: give one for each"
        )
    model = create_model(config.model, num_classes=num_classes)
    notes = [*loaded.notes, *load_weights(model, loaded.weights, loaded.grid_size)]
    device = torch.device(device)
    augment = create_augment(config.augment, config.data, num_classes, device)
    names = list(class_names or loaded.class_names or [])
    if not names and loaded.step is None and num_classes == IMAGENET_CLASSES:
        names = imagenet_names().get("words", [])
        if names:
            notes.append("1,000 classes without names are taken for ImageNet-1k's")
    names += [""] * (num_classes - len(names))
    return Trained(
        model.to(device).eval(),
        Preprocess(ImageFormat.from_config(config.model, config.data), config.eval, augment),
        class_names=tuple(name or f"class {number}" for number, name in enumerate(names)),
        config=config,
        weights=replace(loaded, weights={}),
        notes=tuple(notes),
    )
