"""Classify images by the labels of the most similar training images.

DINO's weighted k-NN (Caron et al. 2021, arXiv 2104.14294; facebookresearch/dino:eval_knn.py):
similarity is the cosine of features, and each of the k nearest training images votes for its label
with exp(cosine / 0.07). Nothing is fitted or drawn at random.

    queries in blocks, each rank its blocks -> against the training features, block by block
    -> the k nearest so far -> votes -> the classes of all queries on every rank
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
"""The temperature of DINO and DINOv2."""
QUERIES = 256
"""Images classified at a time; the same for any number of ranks, so that products have one
shape."""
NEIGHBOURS = 65_536
"""Training images in one product: 64 MiB of similarities with `QUERIES`."""


class Voted(NamedTuple):
    """The classes that neighbours voted for, the same on every rank."""

    k: int
    predictions: Tensor
    """(N,) int64 on the CPU: the class with most votes; the smaller number in a tie."""
    in_top5: Tensor
    """(N,) bool on the CPU: whether the label is among the five classes with most votes; a class
    without a vote is not among them."""


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
    """Classify `queries` by their `ks` nearest neighbours in `train`, one result for each k.

    train: (N, D), queries: (M, D), on the device of the rank, equal on all ranks; labels: int64 on
    any device. No k may exceed N. `on_queries` gets the number of finished queries.
    """
    assert max(ks) <= len(train), "run_probes checks this"
    device = train.device
    train_labels = train_labels.to(device)
    labels = labels.to(device)
    # Each rank sets the rows of its blocks, and the rest stays 0, so a sum over the ranks has all.
    predictions = torch.zeros(len(ks), len(queries), dtype=torch.int64, device=device)
    in_top5 = torch.zeros_like(predictions)
    starts = range(0, len(queries), QUERIES)
    for start in starts[world.rank :: world.size]:
        rows = slice(start, start + QUERIES)
        similarity, places = nearest(queries[rows], train, max(ks))
        # Minus 1, so that the largest vote of an image is at most 1 for any temperature.
        weights = ((similarity.double() - 1) / TEMPERATURE).exp()
        own = train_labels[places]
        for number, k in enumerate(ks):
            votes = torch.zeros(len(own), num_classes, dtype=torch.float64, device=device)
            # Neighbour by neighbour, so that sums have the same order also on GPUs.
            for column in range(k):
                votes.scatter_add_(1, own[:, column, None], weights[:, column, None])
            predictions[number, rows] = votes.argmax(1)
            voted = votes.gather(1, labels[rows, None]).squeeze(1) > 0
            in_top5[number, rows] = (correct_in_top_k(votes, labels[rows], 5) & voted).long()
        on_queries(min((start + QUERIES) * world.size, len(queries)))
    results = zip(ks, world.sum_(predictions).cpu(), world.sum_(in_top5).cpu(), strict=True)
    return [Voted(k, predicted, is_in.bool()) for k, predicted, is_in in results]


def nearest(queries: Tensor, train: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return cosines, descending, and indices in `train` of the `k` nearest of each query.

    queries: (B, D), train: (N, D) of any float type -> (B, k) float32 and (B, k) int64. The result
    is exact, because all pairs are compared.
    """
    rows = normalize(queries.float(), dim=1)
    best = torch.empty(len(rows), 0, device=rows.device)
    places = torch.empty(len(rows), 0, dtype=torch.int64, device=rows.device)
    for start in range(0, len(train), NEIGHBOURS):
        columns = normalize(train[start : start + NEIGHBOURS].float(), dim=1)
        similarity, indices = (rows @ columns.T).topk(min(k, len(columns)), dim=1)
        best = torch.cat([best, similarity], 1)
        places = torch.cat([places, indices + start], 1)
        best, order = best.topk(min(k, best.shape[1]), dim=1)
        places = places.gather(1, order)
    return best, places
