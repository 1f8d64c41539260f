"""Find images that are nearly the same: encoded twice, brightened, or slightly cropped.

1. Compute the input of the model's head for each training and validation image   pooled_features
2. Turn it to principal axes, scale these to equal variance, and to length 1      whiten_
3. Find the most similar training image of each image, by cosine                  nearest
4. Select pairs above a threshold                                                 find_near_doubles

A classifier's features of one class lie close together (Papyan et al. 2020, arXiv 2008.08186), so
two images of a class look as similar as two copies of one image. Directions with little variance
distinguish copies, and whitening scales these up.

The cost of N images with D features is 4 N D bytes on the host and 2 N^2 D operations. ImageNet-1k
and ViT-B/16 need 4 GB and 2.7e15 operations, seconds of a GPU or a day of a CPU core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vit.data.batches import EvalBatches
from vit.data.loader import Loader
from vit.data.shards.split import Split
from vit.data.sources import Sources
from vit.evaluation.features import head_of
from vit.extras.report.source import ReportSource
from vit.extras.report.training_images.doubles import Duplicates
from vit.layers.precision import autocast
from vit.system.host import num_cores

THRESHOLD = 0.9
"""The least cosine of two images that are shown."""
RIDGE = 0.02
"""The share of the largest deviation that is added to each axis, so that empty axes stay small."""
BLOCK = 8192
"""The images on each side of a product of similarities: 256 MiB."""
FEW_IMAGES = 2000
"""The number of images up to which this process decodes, because workers take longer to start."""

OnImages = Callable[[int, int], None]
"""A function that is called with the number of finished images and of all images."""


@dataclass(frozen=True)
class NearDoubles:
    """The pairs of images that are nearly the same, without pairs of equal bytes.

    Each image is compared only with its most similar image.
    """

    pairs: list[tuple[int, int, float]]
    """The pairs of training samples with their cosine; pairs with different labels come first."""
    also_evaluated: list[tuple[int, int, float]]
    """The triples of training sample, validation sample and cosine, the most similar first."""


def find_near_doubles(
    source: ReportSource,
    features: Tensor,
    duplicates: Duplicates,
    threshold: float,
    on_images: OnImages,
) -> NearDoubles:
    """Find the images of the run's training data that are nearly the same.

    features: the result of `pooled_features`, which is whitened in place. threshold: the least
    cosine, in (-1, 1].
    """
    train = source.train_set.split
    whiten_(features)
    similarity, nearest_samples = nearest(features, len(train), source.device, on_images)
    twin_of = {sample: same[0] for same in duplicates.groups for sample in same}
    copied = {(mine, val) for mine, val in duplicates.also_evaluated}
    pairs: dict[tuple[int, int], float] = {}
    evaluated = []
    for sample in (similarity >= threshold).nonzero()[:, 0].tolist():
        other = int(nearest_samples[sample])
        cosine = min(float(similarity[sample]), 1.0)
        val = sample - len(train)
        if val >= 0:
            if (other, val) not in copied:
                evaluated.append((other, val, cosine))
        elif twin_of.get(sample, -1) != twin_of.get(other, -2):
            pairs[min(sample, other), max(sample, other)] = cosine
    labels = train.index["label"]
    ordered = sorted(
        ((first, second, cosine) for (first, second), cosine in pairs.items()),
        key=lambda pair: (labels[pair[0]] == labels[pair[1]], -pair[2], pair[0]),
    )
    return NearDoubles(ordered, sorted(evaluated, key=lambda pair: (-pair[2], pair[1])))


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
    handle = head_of(source.model, "--near").register_forward_pre_hook(
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
        device = source.device
        with Loader(batches, 0, len(batches), num_workers=num_workers, device=device) as loader:
            for number, batch in enumerate(loader):
                filled = batches.num_filled(number)
                with autocast(config.train.precision, device):
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
    """Turn `features` (N, D) in place to principal axes of equal variance, then to length 1."""
    mean = features.mean(0, dtype=torch.float64)
    covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for rows in features.split(BLOCK):
        centred = rows.double() - mean
        covariance += centred.T @ centred
    variances, axes = torch.linalg.eigh(covariance / len(features))
    deviations = variances.clamp(min=0).sqrt()
    # The floor is for features that are all equal, as of a model whose weights are 0.
    scale = 1 / (deviations + RIDGE * deviations[-1]).clamp(min=1e-12)
    whitening = (axes * scale).float()
    for rows in features.split(BLOCK):
        rows.copy_(nn.functional.normalize((rows - mean.float()) @ whitening, dim=1))


def nearest(
    features: Tensor, num_train: int, device: torch.device, on_images: OnImages
) -> tuple[Tensor, Tensor]:
    """Return the cosine and the number of each image's most similar image among the first
    `num_train`, without itself: (N,) float32 and (N,) int64, on the CPU.

    features: (N, D) of length 1. Compares all pairs, block by block; on a GPU in fp16.
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
                cosines.fill_diagonal_(-2.0)  # an image must not be its own nearest
            values, places = cosines.max(1)
            closer = values > best
            best = torch.where(closer, values, best)
            best_numbers = torch.where(closer, places + first, best_numbers)
        similarity[start : start + BLOCK] = best.float().cpu()
        numbers[start : start + BLOCK] = best_numbers.cpu()
        on_images(min(start + BLOCK, len(features)), len(features))
    return similarity, numbers
