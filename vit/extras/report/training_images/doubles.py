"""Find images that occur twice in the training data, or in training and validation data.

Images with equal checksums in the index are compared byte by byte. Near duplicates are images that
were encoded twice, brightened or slightly cropped:

1. Compute the input of the model's head for each training and validation image   pooled_features
2. Whiten these features along principal axes, and scale them to length 1         whiten_
3. Find the most similar training image of each image by cosine similarity        nearest
4. Select pairs above a threshold                                                 find_near_doubles

A classifier's features of one class are close together (Papyan et al. 2020, arXiv 2008.08186), so
two images of a class can be as similar as two copies of one image. Copies differ less in directions
with little variance, which whitening scales up.

N images with D features need 4 N D bytes on the host and 2 N^2 D operations. ImageNet-1k with
ViT-B/16 needs 4 GB and 2.7e15 operations, which take seconds on a GPU or a day on a CPU core.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vit.data.batches import EvalBatches
from vit.data.loader import Loader
from vit.data.overlap import image_keys
from vit.data.shards.split import Split
from vit.data.sources import Sources
from vit.extras.report.source import ReportSource
from vit.layers.image_model import ImageModel
from vit.layers.precision import autocast
from vit.system.host import num_cores

THRESHOLD = 0.9
"""The minimum cosine similarity of near duplicates."""
RIDGE = 0.02
"""This fraction of the largest standard deviation is added to the standard deviation of each axis,
so that axes without variance stay small."""
BLOCK = 8192
"""The number of rows and columns in a block of the similarity matrix (256 MiB)."""
FEW_IMAGES = 2000
"""The maximum number of images to process without workers, because starting workers takes
longer."""

OnImages = Callable[[int, int], None]
"""A callback that receives the number of finished images and the total number."""


@dataclass(frozen=True)
class Duplicates:
    """The groups and pairs of images with identical bytes."""

    groups: list[list[int]]
    """The groups of identical training samples. Groups with different labels come first."""
    also_evaluated: list[tuple[int, int]]
    """The pairs of a training sample and an identical validation sample, one per training
    sample."""


def find_duplicates(split: Split | Sources, val_split: Split) -> Duplicates:
    """Find identical images in the training data, and between training and validation data.

    Images with equal checksums and sizes in the index are compared byte by byte. Raises
    ShardError if an image cannot be read.
    """
    keys = _keys(split)
    return Duplicates(_equal_groups(split, keys), _equal_pairs(split, keys, val_split))


def _equal_groups(split: Split | Sources, keys: NDArray[np.uint64]) -> list[list[int]]:
    """Return the groups of identical training images, those with different labels first."""
    # Sort the images by key, and cut wherever the key changes.
    order = np.argsort(keys, kind="stable")
    groups = []
    for candidates in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        if len(candidates) > 1:
            by_bytes: dict[bytes, list[int]] = {}
            for sample in candidates.tolist():
                by_bytes.setdefault(split.read(sample), []).append(sample)
            groups += [same for same in by_bytes.values() if len(same) > 1]

    labels = split.index["label"]
    return sorted(groups, key=lambda same: (len(set(labels[same].tolist())) == 1, same))


def _equal_pairs(
    split: Split | Sources, keys: NDArray[np.uint64], val_split: Split
) -> list[tuple[int, int]]:
    """Return the training images that are also validation images, each with the identical
    validation image."""
    # For each training image, find the first validation image whose key is not smaller.
    val_keys = _keys(val_split)
    val_order = np.argsort(val_keys, kind="stable")
    places = np.searchsorted(val_keys[val_order], keys)
    val_samples = val_order[np.minimum(places, len(val_keys) - 1)]

    return [
        (sample, int(val_samples[sample]))
        for sample in np.flatnonzero(val_keys[val_samples] == keys).tolist()
        if split.read(sample) == val_split.read(int(val_samples[sample]))
    ]


def _keys(split: Split | Sources) -> NDArray[np.uint64]:
    """Return a number for each image that combines its checksum and its size, (N,)."""
    return np.concatenate([image_keys(each.index) for each in split.splits])


@dataclass(frozen=True)
class NearDoubles:
    """The pairs of near duplicates, without identical images.

    Each image is paired only with its most similar image.
    """

    pairs: list[tuple[int, int, float]]
    """The pairs of training samples and their cosine. Pairs with different labels come first."""
    also_evaluated: list[tuple[int, int, float]]
    """The triples of training sample, validation sample and cosine, most similar first."""


def find_near_doubles(
    source: ReportSource,
    features: Tensor,
    duplicates: Duplicates,
    threshold: float,
    on_images: OnImages,
) -> NearDoubles:
    """Find near duplicates in the run's training data.

    Args:
        features: The result of `pooled_features`, which is whitened in place.
        threshold: The minimum cosine similarity, in (-1, 1].
    """
    train = source.train_set.split
    whiten_(features)
    similarity, nearest_samples = nearest(features, len(train), source.device, on_images)

    twin_of: dict[int, int] = {}  # the first image of a group of identical ones
    for same in duplicates.groups:
        twin_of.update(dict.fromkeys(same, same[0]))
    copied = set(duplicates.also_evaluated)

    pairs: dict[tuple[int, int], float] = {}
    evaluated = []
    for sample in (similarity >= threshold).nonzero()[:, 0].tolist():
        other = int(nearest_samples[sample])
        cosine = min(float(similarity[sample]), 1.0)
        val = sample - len(train)  # negative for a training image
        is_identical = sample in twin_of and twin_of[sample] == twin_of.get(other)
        if val >= 0 and (other, val) not in copied:
            evaluated.append((other, val, cosine))
        elif val < 0 and not is_identical:
            pairs[min(sample, other), max(sample, other)] = cosine

    labels = source.train_labels
    ordered = sorted(
        ((first, second, cosine) for (first, second), cosine in pairs.items()),
        key=lambda pair: (labels[pair[0]] == labels[pair[1]], -pair[2], pair[0]),
    )
    return NearDoubles(ordered, sorted(evaluated, key=lambda pair: (-pair[2], pair[1])))


def _head_of(model: ImageModel) -> nn.Module:
    """Return the layer that computes the logits of a model, including timm models.

    Raises ValueError if the layer is neither linear nor, in a model without a head, an identity.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Linear) and hasattr(model, "get_classifier"):
        head = model.get_classifier()
    if not isinstance(head, (nn.Linear, nn.Identity)):
        raise ValueError(
            f"--near needs a model with a linear head, but {type(model).__name__} ends in"
            f" {type(head).__name__}: omit --near"
        )
    return head


@torch.no_grad()
def pooled_features(source: ReportSource, on_images: OnImages) -> Tensor:
    """Return the input of the model's head for each training and validation image.

    The result is (N, D) float32 on the CPU. Images are preprocessed as in evaluation.

    Raises:
        ValueError: the run has no weights yet, or the model has no linear head.
        ShardError: an image cannot be read or decoded.
    """
    splits: list[Split | Sources] = [source.train_set.split, source.val_split]
    head_inputs: list[Tensor] = []
    handle = _head_of(source.model).register_forward_pre_hook(
        lambda _, inputs: head_inputs.append(inputs[0])
    )

    config = source.config
    total = sum(len(split) for split in splits)
    features: Tensor | None = None
    done = 0
    for split in splits:
        # `Sources` has all attributes of a split that `EvalBatches` reads.
        whole: Any = split
        batch_size = min(config.eval.batch_size, len(split))
        batches = EvalBatches(whole, source.image_format, config.eval, batch_size)
        num_workers = num_cores() if len(split) > FEW_IMAGES else 0
        with Loader(
            batches, 0, len(batches), num_workers=num_workers, device=source.device
        ) as loader:
            for number, batch in enumerate(loader):
                filled = batches.num_filled(number)  # the last batch may have fewer images
                with autocast(config.train.precision, source.device):
                    source.model(source.normalize(batch.images[:filled]))
                batch_features = head_inputs.pop().float()
                if features is None:
                    features = torch.empty(total, batch_features.shape[1])
                features[done : done + filled] = batch_features.cpu()
                done += filled
                on_images(done, total)

    handle.remove()
    assert features is not None
    return features


def whiten_(features: Tensor) -> None:
    """Whiten `features` (N, D) in place along principal axes, and scale each row to length 1."""
    mean = features.mean(0, dtype=torch.float64)
    covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for rows in features.split(BLOCK):
        centered = rows.double() - mean
        covariance += centered.T @ centered

    variances, axes = torch.linalg.eigh(covariance / len(features))
    deviations = variances.clamp(min=0).sqrt()
    # Avoid division by 0 if all features are equal, as in a model whose weights are all 0.
    scale = 1 / (deviations + RIDGE * deviations[-1]).clamp(min=1e-12)
    whitening = (axes * scale).float()

    for rows in features.split(BLOCK):
        rows.copy_(nn.functional.normalize((rows - mean.float()) @ whitening, dim=1))


def nearest(
    features: Tensor, num_train: int, device: torch.device, on_images: OnImages
) -> tuple[Tensor, Tensor]:
    """For each image, return the cosine similarity and the number of the most similar training
    image.

    The results are (N,) float32 and (N,) int64, on the CPU. Training images are the first
    `num_train` images, and an image is not compared with itself. features: (N, D), rows of length
    1. GPUs compute in fp16.
    """
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    similarity = torch.full((len(features),), -2.0)
    numbers = torch.zeros(len(features), dtype=torch.int64)
    for start in range(0, len(features), BLOCK):
        rows = features[start : start + BLOCK].to(device, dtype)
        best = torch.full((len(rows),), -2.0, dtype=dtype, device=device)
        best_numbers = torch.zeros(len(rows), dtype=torch.int64, device=device)
        for first in range(0, num_train, BLOCK):
            columns = features[first : min(first + BLOCK, num_train)].to(device, dtype)
            cosines = rows @ columns.T
            if first == start:
                cosines.fill_diagonal_(-2.0)  # An image must not match itself.
            values, places = cosines.max(1)
            closer = values > best
            best = torch.where(closer, values, best)
            best_numbers = torch.where(closer, places + first, best_numbers)

        similarity[start : start + BLOCK] = best.float().cpu()
        numbers[start : start + BLOCK] = best_numbers.cpu()
        on_images(min(start + BLOCK, len(features)), len(features))

    return similarity, numbers
