"""Load a trained model with its preprocessing and class names to classify images.

    trained = load("runs/demo")                              also vit.load
    trained.classify("photo.jpg")                            names and probabilities
    trained.classify([array, Image.open("photo.jpg")])       a list of these for each image
    logits = trained(trained.preprocess("a.jpg", "b.png"))   (2, classes)
    tokens = trained.model.forward_features(trained.preprocess("a.jpg"))

1. Read the weights and the settings of their run                           read_weights
2. Create the model and the preprocessing from the settings                 load
3. Decode, resize and crop an image as in evaluation                        Preprocess.pixels
4. Normalize the pixels as in evaluation                                    Preprocess.normalize
"""

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as pillow
from PIL import ImageOps
from torch import Tensor

from vit.config import io as config_io
from vit.config.schema import Config, EvalConfig
from vit.data.augment.apply import Augment, create_augment
from vit.data.decode.crops import decode_center
from vit.data.decode.images import to_mode
from vit.data.image_format import ImageFormat
from vit.layers.blocks import set_residual_dtype
from vit.layers.image_model import ImageModel
from vit.layers.precision import autocast, has_bf16
from vit.model import create_model
from vit.training.run_data import with_precision
from vit.weights.class_names import IMAGENET_CLASSES, check_head, imagenet_names
from vit.weights.files import LoadedWeights, load_weights, read_weights
from vit.weights.published import with_published_config

Image = str | os.PathLike[str] | bytes | pillow.Image | NDArray[np.uint8]
"""The path of an image, its encoded bytes, a Pillow image, or an array: (H, W, 3) uint8 in RGB, or
(H, W) uint8 in gray."""


@dataclass(frozen=True)
class Preprocess:
    """Converts images to model inputs, exactly as `launch/eval.py` does.

    `vit.data.decode.images` decodes all supported formats and color spaces.
    """

    image_format: ImageFormat
    view: EvalConfig
    """The settings for resizing and cropping."""
    augment: Augment
    """The object whose `normalize` is used. Its augmentations are not used."""

    def __call__(self, *images: Image) -> Tensor:
        """Return `images` as normalized inputs, (B, C, H, W) float32 on the model's device.

        Raises ValueError if an image cannot be read or decoded.
        """
        pixels = torch.stack([self.pixels(image) for image in images])
        # Use the loader's memory layout, because another layout may change the order of summation.
        return self.normalize(pixels.contiguous(memory_format=torch.channels_last))

    def pixels(self, image: Image) -> Tensor:
        """Return `image` decoded, resized and cropped: (C, H, W) uint8 on the host, channels last.

        Raises ValueError if the image cannot be read or decoded.
        """
        if isinstance(image, bytes):
            return self._decoded(image)
        if not isinstance(image, (str, os.PathLike)):
            return self._decoded(_encoded(image, self.image_format.channels, self.view))

        try:
            return self._decoded(Path(image).read_bytes())
        except OSError as error:
            raise ValueError(f"{os.fspath(image)}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise ValueError(f"{os.fspath(image)}: {error}") from None

    def normalize(self, pixels: Tensor) -> Tensor:
        """Return (B, C, H, W) uint8 as normalized float32 on the model's device."""
        return self.augment.normalize(pixels.to(self.augment.scale.device, non_blocking=True))

    def _decoded(self, data: bytes) -> Tensor:
        form = self.image_format
        return decode_center(data, form.size, self.view, form.interpolation, form.channels)


def _encoded(image: Any, channels: int, view: EvalConfig) -> bytes:
    """Encode an image in memory without loss, so that it is decoded and cropped like a file.

    channels: 1 (gray) or 3 (RGB). Raises ValueError if `image` has another type or pixel format.
    """
    is_gray_or_rgb = (
        isinstance(image, np.ndarray)
        and image.dtype == np.uint8
        and (image.ndim == 2 or image.shape[2:] == (3,))
    )
    if is_gray_or_rgb:
        image = pillow.fromarray(image)

    is_image = isinstance(image, pillow.Image)
    if not is_image or image.mode in ("I", "F"):
        form = image.mode if is_image else getattr(image, "shape", "")
        raise ValueError(
            f"an image is a {type(image).__name__} {form}: expected a path, encoded bytes, an image"
            " of Pillow with 8 bits, or an array of uint8, (height, width, 3) in RGB or (height,"
            " width) in gray"
        )

    if view.apply_exif:
        image = ImageOps.exif_transpose(image)
    encoded = io.BytesIO()
    to_mode(image.copy(), "RGB" if channels == 3 else "L").save(encoded, "PPM")
    return encoded.getvalue()


@dataclass(frozen=True)
class Trained:
    """A trained model from `load`. `trained(inputs)` computes the logits of `launch/eval.py`."""

    model: ImageModel
    """The model with its weights, in evaluation mode, on `device`."""
    preprocess: Preprocess
    class_names: tuple[str, ...]
    """A name for each output; "class 7" if the name is unknown."""
    config: Config
    """The settings of the run, or settings with which another program's weights can be
    evaluated."""
    weights: LoadedWeights
    """The source of the weights (path, step, whether they are averaged), without tensors."""
    notes: tuple[str, ...] = ()
    """Notes on how the weights were read, and on changes that make them fit the model."""

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self.preprocess.augment.scale.device

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Tensor:
        """Compute logits, (B, classes), from normalized inputs, (B, C, H, W) float32.

        For weights without a head, compute features, (B, D).
        Gradients are off, and the precision is the run's `train.precision`.
        """
        with autocast(self.config.train.precision, self.device):
            return self.model(inputs.to(self.device, non_blocking=True))

    @overload
    def classify(self, image: Image, top: int = 5) -> list[tuple[str, float]]: ...

    @overload
    def classify(self, image: list[Image], top: int = 5) -> list[list[tuple[str, float]]]: ...

    def classify(self, image: Image | list[Image], top: int = 5) -> list[Any]:
        """Return the `top` most likely classes of an image with probabilities in [0, 1].

        For a list of images, return one such list per image. Raises ValueError if an image cannot
        be read or decoded, or if the weights have no head.
        """
        check_head(self.weights)
        if isinstance(image, list):
            return [self.classify(each, top) for each in image]
        probabilities = self(self.preprocess(image)).float().softmax(1)[0]
        values, classes = probabilities.topk(min(top, len(probabilities)))
        return [
            (self.class_names[label], value)
            for label, value in zip(classes.tolist(), values.tolist(), strict=True)
        ]

    def __repr__(self) -> str:
        height, width = self.preprocess.image_format.size
        step = f", {self.weights.which()}" if self.weights.which() else ""
        return (
            f"Trained({self.config.model.name} at {width} x {height}, {len(self.class_names)}"
            f" classes, {self.weights.path}{step}, on {self.device})"
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
        path: A run folder (its last weights, or their EMA if it exists), a checkpoint folder, a
            weights file, a Hugging Face folder with `config.json`, or a model on the Hugging Face
            hub, such as "timm/vit_small_patch16_224.augreg_in1k" or "hf-hub:OWNER/REPO".
        name: timm's model name for another program's weights, if the path does not identify it.
        settings: Values that override the run's settings, such as `{"train.precision": "fp32"}`.
            Position embeddings are resampled if `model.image_size` changes.
        class_names: The names of the outputs. By default, the names stored with the weights are
            used.

    Raises:
        ValueError: The weights do not exist, are damaged, or belong to an unknown model.
    """
    loaded = read_weights(path)
    if name and loaded.config is not None:
        raise ValueError(
            f"name {name}: {loaded.path} was saved by this project and contains the name of its"
            " model: omit the name"
        )
    if loaded.config is None:
        # The config needs a data root, but no data are read.
        loaded, _ = with_published_config(loaded, name, data_root=".")

    device = torch.device(device)
    config = config_io.from_dict(loaded.config or {}, str(loaded.path))
    config = with_precision(
        config_io.with_settings(config, settings or {}), has_bf16=has_bf16(device)
    )
    num_classes = loaded.num_classes
    assert num_classes is not None, "weights with a config have it"
    if class_names and len(class_names) != num_classes:
        raise ValueError(
            f"{len(class_names)} class names were given, but {loaded.path} has {num_classes}"
            " classes: give one name per class"
        )

    model = create_model(config.model, num_classes=num_classes)
    notes = [*loaded.notes, *load_weights(model, loaded.weights, loaded.grid_size)]
    set_residual_dtype(model, config.train.residual_dtype)
    augment = create_augment(config.augment, config.data, num_classes, device)

    names = list(class_names or loaded.class_names or [])
    may_be_imagenet = loaded.step is None and num_classes == IMAGENET_CLASSES
    if not names and may_be_imagenet:
        names = imagenet_names().get("words", [])
        if names:
            notes.append("1,000 classes without names are assumed to be those of ImageNet-1k")
    names += [""] * (num_classes - len(names))

    return Trained(
        model.to(device).eval(),
        Preprocess(ImageFormat.from_config(config.model, config.data), config.eval, augment),
        class_names=tuple(name or f"class {number}" for number, name in enumerate(names)),
        config=config,
        weights=replace(loaded, weights={}),
        notes=tuple(notes),
    )
