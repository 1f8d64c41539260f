"""Images that are nearly the same: encoded twice, brightened, cut a little.

1. What the head of the run's model reads, of each training and validation image  pooled_features
2. The same along its principal axes, each with the same spread, of length 1      whiten_
3. Of each image the most similar training image, by cosine                       nearest
4. Pairs above a threshold                                                        find_near_doubles

A classifier's features of one class lie close together (Papyan et al. 2020, arXiv 2008.08186): as
they are, two images of a class are as similar as two copies of one. What tells copies apart is in
directions with little spread, hence the whitening.

Cost, of N images with D features: 4 N D bytes on the host, and 2 N^2 D operations: for ImageNet-1k
and ViT-B/16 4 GB and 2.7e15, seconds of a GPU and a day of a CPU core.
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
"""Cosine from which two images are shown."""
RIDGE = 0.02
"""Of the largest deviation, added to that of each axis: axes without content stay small."""
BLOCK = 8192
"""Images on each side of a product of similarities: 256 MiB."""
FEW_IMAGES = 2000
"""Fewer are decoded by the process itself: workers take longer to start."""

OnImages = Callable[[int, int], None]
"""Is told how many images are done, and of how many."""


@dataclass(frozen=True)
class NearDoubles:
    """Pairs of images that are nearly the same, without those whose bytes are equal.

    Of each image only the most similar one is known.
    """

    pairs: list[tuple[int, int, float]]
    """Two training samples and their cosine; those with different labels come first."""
    also_evaluated: list[tuple[int, int, float]]
    """Training sample, validation sample and their cosine, the most similar first."""


def find_near_doubles(
    source: ReportSource,
    features: Tensor,
    duplicates: Duplicates,
    threshold: float,
    on_images: OnImages,
) -> NearDoubles:
    """Find the images of the run's training data that are nearly the same.

    features: of `pooled_features`; they are whitened in place. threshold: the least cosine, in
    (-1, 1].
    """
    train = source.train_set.split
    whiten_(features)
    similarity, found = nearest(features, len(train), source.device, on_images)
    twin_of = {sample: same[0] for same in duplicates.groups for sample in same}
    copied = {(mine, val) for mine, val in duplicates.also_evaluated}
    pairs: dict[tuple[int, int], float] = {}
    evaluated = []
    for sample in (similarity >= threshold).nonzero()[:, 0].tolist():
        other = int(found[sample])
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
    """Return what the head reads of each training and validation image, as evaluation shows them:
    (N, D) float32 on the CPU.

    Raises:
        ValueError: no weights yet, or a model without a linear head.
        ShardError: an image that cannot be read or decoded.
    """
    splits: list[Split | Sources] = [source.train_set.split, source.val_split]
    kept: list[Tensor] = []
    handle = head_of(source.model, "--near").register_forward_pre_hook(
        lambda _, inputs: kept.append(inputs[0])
    )
    config = source.config
    total = sum(len(split) for split in splits)
    features: Tensor | None = None
    done = 0
    for split in splits:
        # Both have what evaluation reads of a split.
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
                found = kept.pop().float()
                if features is None:
                    features = torch.empty(total, found.shape[1])
                features[done : done + filled] = found.cpu()
                done += filled
                on_images(done, total)
    handle.remove()
    assert features is not None
    return features


def whiten_(features: Tensor) -> None:
    """Turn `features` (N, D) in place to principal axes of equal spread, then to length 1."""
    mean = features.mean(0, dtype=torch.float64)
    covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for rows in features.split(BLOCK):
        centred = rows.double() - mean
        covariance += centred.T @ centred
    variances, axes = torch.linalg.eigh(covariance / len(features))
    deviations = variances.clamp(min=0).sqrt()
    # A floor for features that are all equal, as those of a model whose weights are 0.
    scale = 1 / (deviations + RIDGE * deviations[-1]).clamp(min=1e-12)
    whitening = (axes * scale).float()
    for rows in features.split(BLOCK):
        rows.copy_(nn.functional.normalize((rows - mean.float()) @ whitening, dim=1))


def nearest(
    features: Tensor, num_train: int, device: torch.device, on_images: OnImages
) -> tuple[Tensor, Tensor]:
    """Return the cosine and number of the most similar one of the first `num_train` images, of each
    image but itself: (N,) float32 and (N,) int64, on the CPU.

    features: (N, D) of length 1. Exact: all pairs are compared, block by block; on a GPU in fp16.
    """
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    similarity = torch.full((len(features),), -2.0)
    found = torch.zeros(len(features), dtype=torch.int64)
    for start in range(0, len(features), BLOCK):
        rows = features[start : start + BLOCK].to(device, dtype)
        best = torch.full((len(rows),), -2.0, dtype=dtype, device=device)
        where = torch.zeros(len(rows), dtype=torch.int64, device=device)
        for first in range(0, num_train, BLOCK):
            columns = features[first : min(first + BLOCK, num_train)].to(device, dtype)
            cosines = rows @ columns.T
            if first == start:
                cosines.fill_diagonal_(-2.0)  # itself
            values, places = cosines.max(1)
            closer = values > best
            best = torch.where(closer, values, best)
            where = torch.where(closer, places + first, where)
        similarity[start : start + BLOCK] = best.float().cpu()
        found[start : start + BLOCK] = where.cpu()
        on_images(min(start + BLOCK, len(features)), len(features))
    return similarity, found
