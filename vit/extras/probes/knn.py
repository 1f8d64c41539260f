"""Weighted k-NN: classify images by the labels of the most similar training images.

This is DINO's method (Caron et al. 2021, arXiv 2104.14294; facebookresearch/dino:eval_knn.py).
Similarity is the cosine between features. Each of the k nearest training images votes for its label
with weight exp(cosine / 0.07). The method needs no fit and no random numbers.

Each rank compares its blocks of queries with the training features block by block. Every rank gets
the classes of all queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vit.distributed.process_group import World
from vit.training.metrics import correct_in_top_k

TEMPERATURE = 0.07
"""The softmax temperature of DINO and DINOv2."""
QUERIES = 256
"""The number of images classified in one block, equal for any number of ranks, so that all products
have the same shape."""
NEIGHBORS = 65_536
"""The number of training images in one product. With `QUERIES` rows, the similarities take 64
MiB."""


class Voted(NamedTuple):
    """The classes chosen by the nearest neighbors, equal on all ranks."""

    k: int
    predictions: Tensor
    """(N,) int64 on the CPU: the class with the most votes. Ties favor the lower class number."""
    in_top5: Tensor
    """(N,) bool on the CPU: whether the label has votes and is among the five classes with the most
    votes."""


def classify(
    train: Tensor,
    train_labels: Tensor,
    queries: Tensor,
    labels: Tensor,
    ks: Sequence[int],
    num_classes: int,
    world: World,
    on_queries: Callable[[int], None] = lambda done: None,
) -> list[Voted]:
    """Classify `queries` by their nearest neighbors in `train`, with one result for each of `ks`.

    train: (N, D) and queries: (M, D) on the device of the rank, equal on all ranks. labels: int64
    on any device. No k may exceed N. `on_queries` receives the number of finished queries.
    """
    assert max(ks) <= len(train), "run_probes checks this"
    device = train.device
    train_labels = train_labels.to(device)
    labels = labels.to(device)
    # Each rank writes only its own blocks, so the sum over ranks contains all rows.
    predictions = torch.zeros(len(ks), len(queries), dtype=torch.int64, device=device)
    in_top5 = torch.zeros_like(predictions)
    starts = range(0, len(queries), QUERIES)
    for start in starts[world.rank :: world.size]:
        rows = slice(start, start + QUERIES)
        similarity, places = nearest(queries[rows], train, max(ks))
        # Subtract 1, so that the largest vote is at most 1 for any temperature.
        weights = ((similarity.double() - 1) / TEMPERATURE).exp()
        own = train_labels[places]
        for number, k in enumerate(ks):
            votes = torch.zeros(len(own), num_classes, dtype=torch.float64, device=device)
            # Add one neighbor at a time, so that the order of summation is fixed even on GPUs.
            for column in range(k):
                votes.scatter_add_(1, own[:, column, None], weights[:, column, None])
            predictions[number, rows] = votes.argmax(1)
            voted = votes.gather(1, labels[rows, None]).squeeze(1) > 0
            in_top5[number, rows] = (correct_in_top_k(votes, labels[rows], 5) & voted).long()
        on_queries(min((start + QUERIES) * world.size, len(queries)))
    results = zip(ks, world.sum_(predictions).cpu(), world.sum_(in_top5).cpu(), strict=True)
    return [Voted(k, predicted, is_in.bool()) for k, predicted, is_in in results]


def nearest(queries: Tensor, train: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return cosines, descending, and `train` indices of the `k` nearest neighbors per query.

    queries: (B, D), train: (N, D) of any float dtype -> (B, k) float32 and (B, k) int64. The search
    is exact, because all pairs are compared.
    """
    rows = normalize(queries.float(), dim=1)
    best = torch.empty(len(rows), 0, device=rows.device)
    places = torch.empty(len(rows), 0, dtype=torch.int64, device=rows.device)
    for start in range(0, len(train), NEIGHBORS):
        columns = normalize(train[start : start + NEIGHBORS].float(), dim=1)
        similarity, indices = (rows @ columns.T).topk(min(k, len(columns)), dim=1)
        best = torch.cat([best, similarity], 1)
        places = torch.cat([places, indices + start], 1)
        best, order = best.topk(min(k, best.shape[1]), dim=1)
        places = places.gather(1, order)
    return best, places
