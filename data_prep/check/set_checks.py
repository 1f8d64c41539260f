"""What can be wrong with a finished data set as a whole: its files, its labels, its keys, equal
images. Free of torch.

The data's story: `_info.json` says which shards there are; folder, sidecars, index files and
`quarantine.jsonl` are compared with it. After the shards were read
(data_prep/check/shard_checks.py), what was seen of each sample is put together over all of them.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.check.data_set import DataSet, Part, tars_of
from data_prep.check.shard_checks import MOST_LINES, WRITE_AGAIN, Found, counted
from data_prep.write.card_page import altered_card, readme
from data_prep.write.catalogue import HASH, catalogue_sha256, key_hashes, some
from data_prep.write.plan import fingerprint
from vit.data.shards.index_file import has_checksums, open_index
from vit.data.shards.info_file import info_sha256, read_sidecar, sidecars_sha256
from vit.data.shards.records import is_sidecar
from vit.data.storage.http import Version
from vit.data.storage.remote import RemoteFolder
from vit.system.files import ShardError, read_json

# ---- what is recorded ----------------------------------------------------------------------------


def check_folder(data: DataSet) -> Iterator[Found]:
    """Compare folder, `_info.json`, sidecars and index files, and fill each part's `sidecars`,
    `present` and `index`."""
    listed = Counter(tars_of(data.info))
    # not by earlier versions
    sealed = "info_sha256" in data.info or any(
        "sidecars_sha256" in part.described for part in data.parts
    )
    if sealed and data.info.get("info_sha256") != info_sha256(data.info):
        yield Found(
            "files",
            "_info.json",
            "altered: its content is not the one whose hash it holds; restore it from its source",
        )
    if sealed and data.ours and not (data.root / "dataset.md").exists():
        yield Found(
            "files",
            "dataset.md",
            f"absent; run `python -m data_prep.card {data.shown}`, which writes it",
        )
    elif sealed and data.ours and (reason := altered_card(data.root)):
        yield Found(
            "files",
            "dataset.md",
            f"{reason}; run `python -m data_prep.card {data.shown}`, which writes both again",
        )
    for name, count in listed.items():
        if count > 1:
            yield Found(
                "files", "_info.json", f"lists {name} {count} times; restore it from its source"
            )
    for path in sorted(data.root.rglob("*.tar")):
        if (name := str(path.relative_to(data.root))) not in listed:
            text = (
                "not in _info.json, and tools that take all tars of a folder would read it; move it"
                " away"
            )
            yield Found("files", name, text)
    for name in sorted(os.listdir(data.root)):
        if (
            name.endswith(".tmp")
            or name in ("_writing.json", "_spool")
            or name.startswith("_catalogue-")
        ):
            yield Found(
                "files",
                name,
                "left over from a writer; delete it, unless one is at work here",
                fails=False,
            )
        elif _is_stray(data.root / name, data.info["splits"], listed):
            yield Found(
                "files",
                name,
                "describes no split or shard that is in _info.json; delete it",
                fails=False,
            )
    card = data.root / "README.md"
    if sealed and data.ours and card.exists() and card.read_bytes() != readme(data.info).encode():
        told = (
            f"not as `python -m data_prep.card {data.shown}` writes it where there is none, and"
            " Hugging Face finds the shards by it"
        )
        yield Found(
            "files",
            "README.md",
            f"{told}; delete it and run that, unless it was altered on purpose",
            fails=False,
        )
    names = list(listed)
    versions: list[Any] = (
        [_stat(data.root / name) for name in names]
        if data.tars_at is None
        else RemoteFolder(data.tars_at).stats(names)
    )
    sizes = {
        name: version.size if isinstance(version, Version) else version
        for name, version in zip(names, versions, strict=True)
    }
    for part in data.parts:
        lengths = part.described["shard_lengths"]
        total = part.described.get("num_samples")
        if sum(lengths) != total:
            yield Found(
                "files",
                "_info.json",
                f"{part.name}: num_samples is {total}, shard_lengths add up to {sum(lengths)}",
            )
        for number in range(len(part.filenames)):
            yield from _check_recorded(data, part, number, sizes[part.filenames[number]])
        yield from _check_sidecars(data, part)
        yield from _open_index(data, part)


def _is_stray(path: Path, splits: Container[str], tars: Container[str]) -> bool:
    """Whether a file is an index, `.idx` or sidecar of something that `_info.json` does not
    have."""
    if path.name.endswith(".index.npy"):
        return path.name.removesuffix(".index.npy") not in splits
    if path.suffix not in (".idx", ".json") or path.with_suffix(".tar").name in tars:
        return False
    try:
        return path.suffix == ".idx" or is_sidecar(read_json(path) or {})
    except ShardError:  # whatever it is, none of ours
        return False


def _stat(path: Path) -> int | str:
    """Bytes of a file, or why that cannot be told."""
    try:
        return path.stat().st_size
    except OSError as error:
        return "missing" if isinstance(error, FileNotFoundError) else str(error.strerror)


def _check_sidecars(data: DataSet, part: Part) -> Iterator[Found]:
    """All sidecars of a split together: their hash, the plan they were written by, and what was
    listed."""
    sidecars = [part.sidecars[name] for name in part.filenames if name in part.sidecars]
    if len(sidecars) < len(part.filenames):
        return  # told already
    if part.described.get("sidecars_sha256", sidecars_sha256(sidecars)) != sidecars_sha256(
        sidecars
    ):
        yield Found(
            "files",
            part.name,
            "sidecars are altered: their content is not the one whose hash is in _info.json;"
            " restore them",
        )
    if data.ours and (
        others := [
            sidecar["filename"]
            for sidecar in sidecars
            if sidecar.get("plan") != fingerprint(data.info)
        ]
    ):
        text = (
            "source, options or catalogue in _info.json are not those that they were written by"
            " (plan); restore what is wrong"
        )
        yield Found(
            "files", part.name, f"{counted(len(others), 'shard')}, the first is {others[0]}: {text}"
        )
    listed = (data.info.get("listed") or {}).get(part.name)
    if listed not in (
        None,
        found := sum(part.described["shard_lengths"]) + len(part.quarantined()),
    ):
        yield Found(
            "files",
            "_info.json",
            f"listed is {listed} for {part.name}, shards and quarantine have {found}",
        )
    if data.ours and (missing := [name for name in part.filenames if part.sha256_of(name) is None]):
        text = (
            "no sha256 is recorded, so their bytes cannot be compared; restore _info.json and the"
            " sidecars"
        )
        yield Found(
            "files",
            part.name,
            f"{counted(len(missing), 'shard')}, the first is {missing[0]}: {text}",
        )


def _check_recorded(data: DataSet, part: Part, number: int, size: int | str) -> Iterator[Found]:
    """One shard's size and sidecar against `_info.json`."""
    name = part.filenames[number]
    tar = data.root / part.filenames[number]
    recorded = {"filename": name, "num_samples": part.described["shard_lengths"][number]}
    for key in ("bytes", "sha256"):
        if part.described.get(f"shard_{key}"):
            recorded[key] = part.described[f"shard_{key}"][number]
    if isinstance(size, str):
        yield Found("files", name, f"{size}; {WRITE_AGAIN}")
    else:
        part.num_bytes += size
        if size == recorded.get("bytes", size):
            part.present.append(number)
        else:
            way = "shorter" if size < recorded["bytes"] else "longer"
            told = f"{size:,} bytes, _info.json says {recorded['bytes']:,}"
            by = f"{abs(size - recorded['bytes']):,} bytes {way}"
            yield Found(
                "files", name, f"{told}: {by}; its contents were not checked; {WRITE_AGAIN}"
            )
    try:
        sidecar = read_sidecar(tar)
    except ShardError as error:
        yield Found(
            "files",
            tar.with_suffix(".json").name,
            str(error).removeprefix(f"{tar.with_suffix('.json')}: "),
        )
        return
    if sidecar is None:
        remedy = "repeat the command that wrote the data set" if data.ours else data.index_it
        yield Found("files", tar.with_suffix(".json").name, f"absent; {remedy}")
        return
    part.sidecars[name] = sidecar
    for key, value in recorded.items():
        if sidecar[key] != value:
            text = (
                f"{key} is {sidecar[key]!r}, _info.json says {value!r}; restore the one that is"
                " wrong"
            )
            yield Found("files", tar.with_suffix(".json").name, text)


def _open_index(data: DataSet, part: Part) -> Iterator[Found]:
    path = data.root / f"{part.name}.index.npy"
    remedy = data.index_it
    try:
        index = open_index(path)
    except FileNotFoundError:
        yield Found("indexes", path.name, f"absent; {remedy}")
    except (ValueError, OSError, EOFError) as error:
        yield Found("indexes", path.name, f"unreadable ({error}); delete it and {remedy}")
    else:
        if not has_checksums(index):
            yield Found(
                "indexes",
                path.name,
                f"without checksums of images (an earlier version wrote it); {remedy}",
                fails=False,
            )
        if len(index) != sum(part.described["shard_lengths"]):
            told = (
                f"{len(index):,} rows, _info.json has {sum(part.described['shard_lengths']):,}"
                " samples"
            )
            yield Found("indexes", path.name, f"{told}; delete it and {remedy}")
        else:
            part.index = index
            end = int(index.offset) + index.nbytes if isinstance(index, np.memmap) else 0
            if (size := path.stat().st_size) != end:
                yield Found(
                    "indexes",
                    path.name,
                    f"{counted(size - end, 'byte')} behind its last row; delete it and {remedy}",
                )


def check_quarantine(data: DataSet) -> Iterator[Found]:
    """`quarantine.jsonl` and the totals in `_info.json` against the sidecars."""
    path = data.root / "quarantine.jsonl"
    recorded = Counter(json.dumps(entry) for part in data.parts for entry in part.quarantined())
    if path.exists():
        yield from _compare_quarantine(path, recorded)
    elif recorded:
        told = f"absent, but the sidecars have {counted(recorded.total(), 'unreadable image')}"
        yield Found("quarantine", path.name, f"{told}; repeat the command that wrote the data set")
    for part in data.parts if data.ours else []:
        dealt = [
            sidecar["num_samples"] + len(sidecar.get("quarantined", []))
            for sidecar in part.sidecars.values()
        ]
        if dealt and max(dealt) - min(dealt) > 1:
            told = (
                f"shards have {min(dealt):,} to {max(dealt):,} samples with the quarantined ones,"
                " but they were dealt evenly"
            )
            yield Found("quarantine", part.name, f"{told}: some are in neither shard nor sidecar")
    changed = sum((part.changed() for part in data.parts), Counter[str]())
    for key, found in (("quarantined", recorded.total()), ("changed", dict(changed))):
        if data.info.get(key, type(found)()) != found:
            yield Found(
                "quarantine",
                "_info.json",
                f"{key} is {data.info.get(key)}, the sidecars have {found}; restore the one that is"
                " wrong",
            )


def _compare_quarantine(path: Path, recorded: Counter[str]) -> Iterator[Found]:
    listed: Counter[str] = Counter()
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            entry = json.loads(line)
            _named(line)
            listed[json.dumps(entry)] += 1
        except (ValueError, KeyError, TypeError):
            yield Found(
                "quarantine",
                path.name,
                f"line {number} is no JSON object with split and key: {line[:60]!r}",
            )
    for text in sorted(recorded - listed):
        yield Found(
            "quarantine", path.name, f"{_named(text)} is not in it, but in its shard's sidecar"
        )
    for text in sorted(listed - recorded):
        yield Found("quarantine", path.name, f"{_named(text)} is in it, but in no sidecar")


def _named(line: str | bytes) -> str:
    """Split and key of an entry."""
    entry = json.loads(line)
    return f"{entry['split']} {entry['key']}"


def check_catalogue(data: DataSet) -> Iterator[Found]:
    """Class names, keys and labels against their hash, which was taken before the first shard was
    written."""
    if not data.ours or any(_incomplete(data, part) for part in data.parts):
        return
    splits = {}
    for part in data.parts:
        left_out = part.quarantined()
        rows = np.empty(len(part.labels()) + len(left_out), HASH)
        keys = key_hashes([entry["key"] for entry in left_out], data.seed)
        rows["hash"] = np.concatenate([*(seen["key"] for seen in part.seen.values()), keys])
        rows["label"] = np.concatenate(
            [
                part.labels(),
                np.array(
                    [-1 if entry["label"] is None else entry["label"] for entry in left_out],
                    np.int32,
                ),
            ]
        )
        splits[part.name] = rows[np.argsort(rows["hash"], kind="stable")]
    data.catalogue_compared = True
    if (found := catalogue_sha256(data.class_names, splits)) != data.info["catalogue"]:
        told = f"their hash is {found[:12]}..., recorded is {str(data.info['catalogue'])[:12]}..."
        text = "class names, keys or labels are not those that the data set was made of"
        yield Found(
            "labels",
            "_info.json",
            f"{text}: {told}; restore what was altered, or write the data set again",
        )


# ---- labels and keys, over all shards ------------------------------------------------------------


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
        outside = np.unique(labels[(labels < 0) | (labels >= data.num_classes)])
        if len(outside):
            count = int(np.isin(labels, outside).sum())
            told = (
                f"{counted(count, 'label')} outside 0 to {data.num_classes - 1}:"
                f" {some([str(label) for label in outside])}"
            )
            yield Found(
                "labels", part.name, f"{told}; correct the shards, or the classes in _info.json"
            )
    train = data.parts[0]
    empty = [
        data.class_name(int(label)).removeprefix("class ")
        for label in np.flatnonzero(images_per_class(data, train) == 0)
    ]
    if empty and not _incomplete(data, train):
        fails = data.ours and not _partial(data)
        yield Found(
            "labels",
            train.name,
            f"{len(empty)} {'class' if len(empty) == 1 else 'classes'} without an image:"
            f" {some(empty)}",
            fails=fails,
        )


def images_per_class(data: DataSet, part: Part) -> np.ndarray:
    """(num_classes,) samples of each class that were seen, labels outside left out; empty if the
    number of classes is not recorded."""
    labels = part.labels()
    num_classes = data.num_classes or 0
    return np.bincount(labels[(labels >= 0) & (labels < num_classes)], minlength=num_classes)


def _incomplete(data: DataSet, part: Part) -> bool:
    """Some samples were not seen, as their shard is missing or damaged: then counts say nothing,
    and that is reported already."""
    return len(part.labels()) != sum(part.described["shard_lengths"])


def _partial(data: DataSet) -> bool:
    return bool((data.info.get("options") or {}).get("partial"))


# ---- equal ones ----------------------------------------------------------------------------------


GROUP, PART, SHARD, ROW, LABEL = range(5)
"""Columns of `_repeated`."""


def _repeated(parts: list[Part], column: str) -> np.ndarray:
    """(n, 5) int64, sorted: GROUP, PART, SHARD, ROW and LABEL of each sample whose value in
    `column` is there twice or more."""
    every = [(p, shard, rows) for p, part in enumerate(parts) for shard, rows in part.seen.items()]
    values = np.concatenate([np.empty(0, "<u8"), *(rows[column] for *_, rows in every)])
    values.sort()
    repeated = np.unique(values[1:][values[1:] == values[:-1]])
    del values
    found = [np.empty((0, 5), np.int64)]
    for p, shard, rows in every if len(repeated) else []:
        group = np.minimum(np.searchsorted(repeated, rows[column]), len(repeated) - 1)
        here = np.flatnonzero(repeated[group] == rows[column])
        one = np.ones(len(here), np.int64)
        found.append(np.stack([group[here], p * one, shard * one, here, rows["label"][here]], 1))
    together = np.concatenate(found)
    return together[np.lexsort(together.T[::-1])]


def check_keys(data: DataSet) -> Iterator[Found]:
    """No key is there twice in a split."""
    for part in data.parts:
        for group in _groups(_repeated([part], "key"))[:MOST_LINES]:
            where = " and ".join(
                data.sample_name(part, int(sample[SHARD]), int(sample[ROW])) for sample in group[:3]
            )
            yield Found(
                "tars",
                part.name,
                f"a key that is there {len(group)} times: {where}; write the shards again with keys"
                " that differ",
            )


def _groups(rows: np.ndarray) -> list[np.ndarray]:
    """The rows of each group."""
    return np.split(rows, np.flatnonzero(np.diff(rows[:, GROUP])) + 1) if len(rows) else []


def check_duplicates(data: DataSet) -> Iterator[Found]:
    """Images of the same bytes: in two splits, under two labels, or just twice. All are notes:
    sources have them."""
    groups = _groups(_repeated(data.parts, "image"))
    two_splits = [group for group in groups if np.ptp(group[:, PART])]
    two_labels = [group for group in groups if np.ptp(group[:, LABEL])]
    neither = [
        group for group in groups if not np.ptp(group[:, PART]) and not np.ptp(group[:, LABEL])
    ]
    for kind, chosen in (
        ("in two splits", two_splits),
        ("under two labels", two_labels),
        ("twice in a split, under one label", neither),
    ):
        if chosen:
            yield from _tell_duplicates(data, kind, chosen)


def _tell_duplicates(data: DataSet, kind: str, groups: list[np.ndarray]) -> Iterator[Found]:
    there = np.unique(np.concatenate([group[:, PART] for group in groups]))
    where = ", ".join(data.parts[p].name for p in there)
    told = (
        f"the same bytes {kind}: {counted(len(groups), 'image')} in"
        f" {counted(sum(map(len, groups)), 'sample')}"
    )
    details = []
    for group in groups[:MOST_LINES]:
        same = [
            f"{data.sample_name(data.parts[p], shard, row)} ({data.class_name(label)})"
            for _, p, shard, row, label in group[:4].tolist()
        ]
        details.append(
            f"{' = '.join(same)}{f' and {len(group) - 4:,} more' if len(group) > 4 else ''}"
        )
    if len(groups) > MOST_LINES:
        details.append(f"and {counted(len(groups) - MOST_LINES, 'more such image')}")
    yield Found("duplicates", where, told, fails=False, details=tuple(details))
