"""Checks over the samples of all shards: class names, labels, keys, equal images.

After the shards were read (data_prep/check/shard_checks.py), what was seen of each sample is put
together here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from data_prep.check.data_set import DataSet, Part
from data_prep.check.shard_checks import MOST_LINES, Found, counted
from data_prep.errors import some
from data_prep.write.catalogue_builder import catalogue_sha256
from data_prep.write.samples import HASH, key_hashes


def check_catalogue(data: DataSet) -> Iterator[Found]:
    """Class names, keys and labels against their hash, taken before the first shard was written."""
    if not data.ours or any(_incomplete(data, part) for part in data.parts):
        return
    splits = {}
    for part in data.parts:
        left_out = part.quarantined()
        labels = [-1 if entry["label"] is None else entry["label"] for entry in left_out]
        keys = key_hashes([entry["key"] for entry in left_out], data.seed)
        rows = np.empty(part.num_samples + len(left_out), HASH)
        rows["hash"] = np.concatenate([*(seen["key"] for seen in part.seen.values()), keys])
        rows["label"] = np.concatenate([part.labels(), np.array(labels, np.int32)])
        splits[part.name] = rows[np.argsort(rows["hash"], kind="stable")]
    data.catalogue_compared = True
    if (found := catalogue_sha256(data.class_names, splits)) != data.info["catalogue"]:
        yield Found(
            "labels",
            "_info.json",
            "class names, keys or labels are not those that the data set was made of: their hash is"
            f" {found[:12]}..., recorded is {str(data.info['catalogue'])[:12]}...; restore what was"
            " altered, or write the data set again",
        )


def check_labels(data: DataSet) -> Iterator[Found]:
    """Labels in range; a training image for every class; as many names as classes."""
    info = data.info
    if data.class_names and info.get("num_classes") not in (None, len(data.class_names)):
        yield Found(
            "labels",
            "_info.json",
            f"num_classes is {info['num_classes']}, class_names are {len(data.class_names)}",
        )
    if twice := [name for name, count in Counter(data.class_names).items() if count > 1]:
        yield Found(
            "labels", "_info.json", f"class_names are there twice: {some(twice)}", fails=False
        )
    if data.num_classes is None:
        return
    for part in data.parts:
        labels = part.labels()
        outside = labels[(labels < 0) | (labels >= data.num_classes)]
        if len(outside):
            yield Found(
                "labels",
                part.name,
                f"{counted(len(outside), 'label')} outside 0 to {data.num_classes - 1}:"
                f" {some([str(label) for label in np.unique(outside)])}; correct the shards, or the"
                " classes in _info.json",
            )
    train = data.parts[0]
    empty = [
        data.class_name(int(label)).removeprefix("class ")
        for label in np.flatnonzero(images_per_class(data, train) == 0)
    ]
    if empty and not _incomplete(data, train):
        is_partial = bool((data.info.get("options") or {}).get("partial"))
        classes = "class" if len(empty) == 1 else "classes"
        yield Found(
            "labels",
            train.name,
            f"{len(empty)} {classes} without an image: {some(empty)}",
            fails=data.ours and not is_partial,
        )


def images_per_class(data: DataSet, part: Part) -> np.ndarray:
    """(num_classes,) samples of each class that were seen; labels outside are left out.

    Empty if the number of classes is not recorded.
    """
    labels = part.labels()
    num_classes = data.num_classes or 0
    return np.bincount(labels[(labels >= 0) & (labels < num_classes)], minlength=num_classes)


def _incomplete(data: DataSet, part: Part) -> bool:
    """Some samples were not seen, as their shard is missing or damaged, which is reported."""
    return len(part.labels()) != part.num_samples


# ---- equal samples -------------------------------------------------------------------------------


GROUP, PART, SHARD, ROW, LABEL = range(5)
"""Columns of `_repeated`."""


def _repeated(parts: list[Part], column: str) -> np.ndarray:
    """The samples whose value in `column` occurs twice or more, sorted.

    (n, 5) int64: GROUP, PART, SHARD, ROW and LABEL of each.
    """
    every = [(p, shard, rows) for p, part in enumerate(parts) for shard, rows in part.seen.items()]
    values = np.concatenate([np.empty(0, "<u8"), *(rows[column] for *_, rows in every)])
    values.sort()
    repeated = np.unique(values[1:][values[1:] == values[:-1]])
    del values
    found = [np.empty((0, 5), np.int64)]
    for p, shard, rows in every if len(repeated) else []:
        group = np.minimum(np.searchsorted(repeated, rows[column]), len(repeated) - 1)
        here = np.flatnonzero(repeated[group] == rows[column])
        place = np.broadcast_to([p, shard], (len(here), 2))
        found.append(np.column_stack([group[here], place, here, rows["label"][here]]))
    together = np.concatenate(found)
    return together[np.lexsort(together.T[::-1])]


def check_keys(data: DataSet) -> Iterator[Found]:
    """No key occurs twice in a split."""
    for part in data.parts:
        for group in _groups(_repeated([part], "key"))[:MOST_LINES]:
            names = [
                data.sample_name(part, int(sample[SHARD]), int(sample[ROW])) for sample in group[:3]
            ]
            yield Found(
                "tars",
                part.name,
                f"a key that is there {len(group)} times: {' and '.join(names)}; write the shards"
                " again with keys that differ",
            )


def _groups(rows: np.ndarray) -> list[np.ndarray]:
    """The rows of each group."""
    return np.split(rows, np.flatnonzero(np.diff(rows[:, GROUP])) + 1) if len(rows) else []


def check_duplicates(data: DataSet) -> Iterator[Found]:
    """Images of the same bytes: in two splits, under two labels, or just twice.

    All are notes: published data sets have them.
    """
    groups = _groups(_repeated(data.parts, "image"))
    two_splits = [group for group in groups if np.ptp(group[:, PART])]
    two_labels = [group for group in groups if np.ptp(group[:, LABEL])]
    neither = [group for group in groups if not np.ptp(group[:, (PART, LABEL)], axis=0).any()]
    for kind, chosen in (
        ("in two splits", two_splits),
        ("under two labels", two_labels),
        ("twice in a split, under one label", neither),
    ):
        if chosen:
            yield _duplicates(data, kind, chosen)


def _duplicates(data: DataSet, kind: str, groups: list[np.ndarray]) -> Found:
    parts = np.unique(np.concatenate([group[:, PART] for group in groups]))
    images = counted(len(groups), "image")
    samples = counted(sum(map(len, groups)), "sample")
    details = []
    for group in groups[:MOST_LINES]:
        names = [
            f"{data.sample_name(data.parts[p], shard, row)} ({data.class_name(label)})"
            for _, p, shard, row, label in group[:4].tolist()
        ]
        more = f" and {len(group) - 4:,} more" if len(group) > 4 else ""
        details.append(f"{' = '.join(names)}{more}")
    if len(groups) > MOST_LINES:
        details.append(f"and {counted(len(groups) - MOST_LINES, 'more such image')}")
    return Found(
        "duplicates",
        ", ".join(data.parts[p].name for p in parts),
        f"the same bytes {kind}: {images} in {samples}",
        fails=False,
        details=tuple(details),
    )
