"""Measure how well this project and webdataset mix classes when they read the same tar shards.

    python benchmarks/shuffle.py [--classes N] [--per-class N] [--batch N]   three minutes; a table

Tar shards of --per-class samples each, with labels but no images, are written twice: sorted by
class, like a folder of images, and shuffled, like data_prep's shards. webdataset reads both sets of
shards from beginning to end. This project reads some batches, as at the start of training.
Everything runs in one process, because each of several webdataset processes would mix only its own
shards.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import webdataset
from numpy.typing import NDArray

from vit.data.order import DEFAULT_BLOCK_SAMPLES, make_order
from vit.start.shuffle_quality import ShuffleQuality, measure_shuffle, quality_of

BUFFERS = (1000, 5000)


def write_shards(folder: Path, labels: NDArray[np.int64], per_shard: int) -> list[str]:
    """Write shards whose samples are named by storage position. Return the paths."""
    folder.mkdir()
    paths = []
    for first in range(0, len(labels), per_shard):
        path = folder / f"train-{first // per_shard:05d}.tar"
        with tarfile.open(path, "w") as tar:
            for sample, label in enumerate(labels[first : first + per_shard].tolist(), first):
                info = tarfile.TarInfo(f"{sample:09d}.cls")
                data = str(label).encode()
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        paths.append(str(path))
    return paths


def webdataset_batches(
    paths: list[str], buffer: int, shuffle_shards: bool, batch_size: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the sample ids of each full batch in one epoch.

    shuffle_shards: shuffle all shards together. webdataset's usual buffer is only 100 shards.
    """
    options = {
        "shardshuffle": len(paths) if shuffle_shards else False,
        "seed": 0,
        "empty_check": False,
    }
    ids: list[int] = []
    for sample in webdataset.WebDataset(paths, **options).shuffle(buffer, initial=buffer, seed=1):
        ids.append(int(sample["__key__"]))
        if len(ids) == batch_size:
            yield np.array(ids)
            ids = []


def webdataset_quality(
    paths: list[str], labels: NDArray[np.int64], buffer: int, shuffle_shards: bool, batch_size: int
) -> ShuffleQuality:
    """Return the shuffle quality over all batches of an epoch."""
    batches = list(webdataset_batches(paths, buffer, shuffle_shards, batch_size))
    of_labels = [(labels[ids], ids) for ids in batches]
    return quality_of(
        of_labels,
        np.arange(len(batches)) / len(batches),
        1 / len(batches),
        len(labels),
        np.bincount(labels),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--classes", type=int, default=300)
    parser.add_argument(
        "--per-class", type=int, default=1000, help="samples per class and per shard"
    )
    parser.add_argument("--batch", type=int, default=1024)
    args = parser.parse_args()

    by_class = np.repeat(np.arange(args.classes), args.per_class)
    layouts = {"sorted by class": by_class, "dealt": np.random.default_rng(0).permutation(by_class)}
    rows: dict[str, list[ShuffleQuality]] = {}
    with tempfile.TemporaryDirectory() as place:
        for layout, labels in layouts.items():
            for block in (DEFAULT_BLOCK_SAMPLES, 1):
                order = make_order(len(labels), args.batch, block_samples=block)
                rows.setdefault(f"ours, blocks of {block}", []).append(
                    measure_shuffle(order, labels)
                )
            paths = write_shards(Path(place) / layout, labels, args.per_class)
            for buffer, shuffle_shards in (
                (BUFFERS[0], False),
                *((buffer, True) for buffer in BUFFERS),
            ):
                shards = "shuffled shards" if shuffle_shards else "shards in order"
                name = f"webdataset, {shards}, shuffle({buffer})"
                rows.setdefault(name, []).append(
                    webdataset_quality(paths, labels, buffer, shuffle_shards, args.batch)
                )

    perfect = rows[f"ours, blocks of {DEFAULT_BLOCK_SAMPLES}"][0].perfect_classes_per_batch
    print(
        f"{args.classes} classes of {args.per_class} samples, {args.classes} shards, batches of"
        f" {args.batch}\n"
    )
    print(
        "| order | "
        + " | ".join(f"{layout}: classes in a batch | moved" for layout in layouts)
        + " |\n"
        + "|---" * 5
        + "|"
    )
    print(f"| a perfect shuffle {f'| {perfect:.1f} | {100 / 3:.1f} % ' * 2}|")
    for name, (by_class_quality, dealt_quality) in rows.items():
        cells = [
            f"{quality.classes_per_batch:.1f} | {100 * quality.distance:.1f} %"
            for quality in (by_class_quality, dealt_quality)
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
