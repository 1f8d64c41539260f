"""Check a whole data set: its records, and the samples of all shards together.

The folder, sidecars, index files and `quarantine.jsonl` are compared with `_info.json`. After all
shards are read (data_prep/check/shard_checks.py), class names, labels, keys and duplicate images
are checked across shards.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from data_prep.check.data_set import DataSet, SplitFiles, tars_of
from data_prep.check.shard_checks import MOST_LINES, WRITE_AGAIN, ShardFinding
from data_prep.errors import counted
from data_prep.write.card_page import is_as_written
from data_prep.write.card_text import count_classes
from data_prep.write.catalog import catalog_sha256
from data_prep.write.plan import fingerprint
from data_prep.write.samples import HASH, key_hashes
from vit.data.shards.index_file import open_index
from vit.data.shards.info_file import info_sha256, read_sidecar, sidecars_sha256
from vit.data.shards.reader import Version
from vit.data.storage.remote import RemoteFolder
from vit.system.files import ShardError
from vit.system.spelling import few


def check_folder(data: DataSet) -> Iterator[ShardFinding]:
    """Compare the folder, sidecars and index files with `_info.json`.

    Sets `sidecars`, `present` and `index` of each split.
    """
    listed = Counter(tars_of(data.info))

    # Earlier versions of data_prep did not record hashes.
    if "info_sha256" in data.info or any(
        "sidecars_sha256" in part.described for part in data.parts
    ):
        yield from _check_sealed(data)

    for name, count in listed.items():
        if count > 1:
            yield ShardFinding(
                "files", "_info.json", f"lists {name} {count} times; restore it from its source"
            )
    yield from _report_other_files(data, set(listed))

    sizes = _sizes(data, list(listed))
    for part in data.parts:
        for number, name in enumerate(part.filenames):
            yield from _check_recorded(data, part, number, sizes[name])
        yield from _check_sidecars(data, part)
        yield from _open_index(data, part)


def _report_other_files(data: DataSet, listed: set[str]) -> Iterator[ShardFinding]:
    """Report tars that `_info.json` does not list, and temporary files."""
    for path in sorted(data.root.rglob("*.tar")):
        name = str(path.relative_to(data.root))
        if name not in listed:
            yield ShardFinding(
                "files",
                name,
                "not in _info.json, but tools that read all tars of a folder would read it; move"
                " it away",
            )

    for path in sorted(data.root.iterdir()):
        if path.name.endswith((".tmp", ".rows.npy")) or path.name in ("_writing.json", "_spool"):
            yield ShardFinding(
                "files",
                path.name,
                "temporary file of a writer; delete it, unless a writer is running",
                fails=False,
            )


def _sizes(data: DataSet, names: list[str]) -> dict[str, int | str]:
    """Return the size of each tar in bytes, or a text such as "missing"."""
    if data.tars_at is None:
        paths = {name: data.root / name for name in names}
        return {
            name: path.stat().st_size if path.exists() else "missing"
            for name, path in paths.items()
        }

    versions = RemoteFolder(data.tars_at).stats(names)
    return {
        name: version.size if isinstance(version, Version) else version
        for name, version in zip(names, versions, strict=True)
    }


def _check_sealed(data: DataSet) -> Iterator[ShardFinding]:
    """Compare `_info.json` and the card with their recorded hashes."""
    if data.info.get("info_sha256") != info_sha256(data.info):
        yield ShardFinding(
            "files",
            "_info.json",
            "altered: the content does not match the recorded hash; restore it from its source",
        )

    if data.ours and not is_as_written(data.root):
        yield ShardFinding(
            "files",
            "dataset.md",
            "card missing or altered (dataset.md or contact_sheet.png): run `python -m"
            f" data_prep.card {data.shown}` to write it again",
        )


def _check_sidecars(data: DataSet, part: SplitFiles) -> Iterator[ShardFinding]:
    """Check the hash, the plan and the image counts of a split's sidecars."""
    sidecars = [part.sidecars[name] for name in part.filenames if name in part.sidecars]
    if len(sidecars) < len(part.filenames):
        return  # already reported

    if part.described.get("sidecars_sha256") not in (None, sidecars_sha256(sidecars)):
        yield ShardFinding(
            "files",
            part.name,
            "sidecars are altered: their content does not match the hash in _info.json; restore"
            " the sidecars",
        )

    listed = (data.info.get("listed") or {}).get(part.name)
    total = part.num_samples + len(part.quarantined)
    if listed not in (None, total):
        yield ShardFinding(
            "files",
            "_info.json",
            f"lists {listed} images for {part.name}, but shards and quarantine have {total}",
        )
    if not data.ours:
        return

    plan = fingerprint(data.info)
    of_other_plans = [sidecar["filename"] for sidecar in sidecars if sidecar.get("plan") != plan]
    if of_other_plans:
        yield _finding_of_shards(
            part,
            of_other_plans,
            "source, options or catalog in _info.json differ from the recorded plan; restore"
            " _info.json or the sidecars",
        )

    without_hash = [name for name in part.filenames if part.sha256_of(name) is None]
    if without_hash:
        yield _finding_of_shards(
            part,
            without_hash,
            "no sha256 is recorded to compare the bytes with; restore _info.json and the sidecars",
        )


def _finding_of_shards(part: SplitFiles, names: list[str], text: str) -> ShardFinding:
    return ShardFinding(
        "files", part.name, f"{counted(len(names), 'shard')}, the first is {names[0]}: {text}"
    )


def _check_recorded(
    data: DataSet, part: SplitFiles, number: int, size: int | str
) -> Iterator[ShardFinding]:
    """Compare a shard's size and sidecar with `_info.json`."""
    name = part.filenames[number]
    recorded: dict[str, Any] = {"filename": name, "num_samples": part.lengths[number]}
    for key in ("bytes", "sha256"):
        if part.described.get(f"shard_{key}"):
            recorded[key] = part.described[f"shard_{key}"][number]

    if isinstance(size, str):
        yield ShardFinding("files", name, f"{size}; {WRITE_AGAIN}")
    else:
        part.num_bytes += size
        if recorded.get("bytes", size) == size:
            part.present.append(number)
        else:
            yield ShardFinding(
                "files",
                name,
                f"{size:,} bytes, but _info.json records {recorded['bytes']:,}; the contents were"
                f" not checked; {WRITE_AGAIN}",
            )

    yield from _check_sidecar(data, part, name, recorded)


def _check_sidecar(
    data: DataSet, part: SplitFiles, name: str, recorded: dict[str, Any]
) -> Iterator[ShardFinding]:
    """Compare a shard's sidecar with the values recorded in `_info.json`, and store the sidecar."""
    path = (data.root / name).with_suffix(".json")
    try:
        sidecar = read_sidecar(data.root / name)
    except ShardError as error:
        yield ShardFinding("files", path.name, str(error).removeprefix(f"{path}: "))
        return
    if sidecar is None:
        remedy = "repeat the command that wrote the data set" if data.ours else data.index_it
        yield ShardFinding("files", path.name, f"missing; {remedy}")
        return

    part.sidecars[name] = sidecar
    for key, value in recorded.items():
        if sidecar[key] != value:
            yield ShardFinding(
                "files",
                path.name,
                f"{key} is {sidecar[key]!r}, but _info.json records {value!r}; restore the wrong"
                " file",
            )


def _open_index(data: DataSet, part: SplitFiles) -> Iterator[ShardFinding]:
    """Open the index of a split, and check its number of rows and its size."""
    path = data.root / f"{part.name}.index.npy"

    def finding(text: str) -> ShardFinding:
        return ShardFinding("indexes", path.name, text)

    try:
        index = open_index(path)
    except FileNotFoundError:
        yield finding(f"missing; {data.index_it}")
        return
    except (ValueError, OSError, EOFError) as error:
        yield finding(f"unreadable ({error}); delete it and {data.index_it}")
        return
    if len(index) != part.num_samples:
        yield finding(
            f"{len(index):,} rows, but _info.json records {part.num_samples:,} samples; delete it"
            f" and {data.index_it}"
        )
        return

    part.index = index
    size = path.stat().st_size
    end = int(index.offset) + index.nbytes if isinstance(index, np.memmap) else 0
    if size != end:
        yield finding(
            f"{counted(size - end, 'byte')} after its last row; delete it and {data.index_it}"
        )


def check_quarantine(data: DataSet) -> Iterator[ShardFinding]:
    """Compare `quarantine.jsonl`, and the totals in `_info.json`, with the sidecars."""
    path = data.root / "quarantine.jsonl"
    entries = list(itertools.chain.from_iterable(part.quarantined for part in data.parts))
    expected = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
    actual = path.read_bytes() if path.exists() else b""
    if actual != expected:
        yield ShardFinding(
            "quarantine",
            path.name,
            f"{'altered' if actual else 'missing'}: this file must list the"
            f" {counted(len(entries), 'unreadable image')} in the sidecars; repeat the command that"
            " wrote the data set",
        )

    changed = sum((part.changed for part in data.parts), Counter[str]())
    for key, default, total in (("quarantined", 0, len(entries)), ("changed", {}, dict(changed))):
        if data.info.get(key, default) != total:
            yield ShardFinding(
                "quarantine",
                "_info.json",
                f"{key} is {data.info.get(key)}, but the sidecars have {total}; restore the wrong"
                " file",
            )


# ---- samples of all shards -----------------------------------------------------------------------


def check_catalog(data: DataSet) -> Iterator[ShardFinding]:
    """Compare a hash of class names, keys and labels with the hash recorded before writing."""
    if not data.ours or any(_incomplete(part) for part in data.parts):
        return

    splits = {}
    for part in data.parts:
        # The catalog contains the skipped images as well.
        skipped = part.quarantined
        skipped_labels = [-1 if entry["label"] is None else entry["label"] for entry in skipped]
        skipped_keys = key_hashes([entry["key"] for entry in skipped], data.seed)
        rows = np.empty(part.num_samples + len(skipped), HASH)
        rows["hash"] = np.concatenate([*(seen["key"] for seen in part.seen.values()), skipped_keys])
        rows["label"] = np.concatenate([part.labels(), np.array(skipped_labels, np.int32)])
        splits[part.name] = rows[np.argsort(rows["hash"], kind="stable")]

    data.catalog_compared = True
    sha256 = catalog_sha256(data.class_names, splits)
    if sha256 != data.info["catalog"]:
        yield ShardFinding(
            "labels",
            "_info.json",
            "class names, keys or labels have changed since the data set was written: their hash is"
            f" {sha256[:12]}..., but {str(data.info['catalog'])[:12]}... is recorded; restore"
            " the altered files, or write the data set again",
        )


def check_labels(data: DataSet) -> Iterator[ShardFinding]:
    """Check the class names, the range of labels, and that every class has a training image."""
    if data.class_names and data.info.get("num_classes") not in (None, len(data.class_names)):
        yield ShardFinding(
            "labels",
            "_info.json",
            f"num_classes is {data.info['num_classes']}, but class_names has"
            f" {len(data.class_names)}",
        )
    if not data.recorded_classes:  # The classes are unknown, or there are no labels.
        return

    for part in data.parts:
        labels = part.labels()
        outside = labels[(labels < 0) | (labels >= data.recorded_classes)]
        if len(outside):
            yield ShardFinding(
                "labels",
                part.name,
                f"{counted(len(outside), 'label')} outside 0 to {data.recorded_classes - 1}:"
                f" {few([str(label) for label in np.unique(outside)])}; correct the shards, or the"
                " classes in _info.json",
            )

    train = data.parts[0]
    empty = [
        data.class_name(int(label)).removeprefix("class ")
        for label in np.flatnonzero(images_per_class(data, train) == 0)
    ]
    if empty and not _incomplete(train):
        yield ShardFinding(
            "labels",
            train.name,
            f"{counted(len(empty), 'class', 'classes')} without an image: {few(empty)}",
            fails=data.ours and not (data.info.get("options") or {}).get("partial"),
        )


def images_per_class(data: DataSet, part: SplitFiles) -> np.ndarray:
    """Count the samples read for each class. Returns an empty array if the classes are unknown."""
    return count_classes(part.labels(), data.recorded_classes or 0)


def _incomplete(part: SplitFiles) -> bool:
    """Return whether samples were not read because a shard is missing or damaged."""
    return len(part.labels()) != part.num_samples


# ---- repeated samples ----------------------------------------------------------------------------


class _RepeatedSample(NamedTuple):
    """A sample whose key or image occurs at least twice: a row of `_repeated`."""

    value: int
    """The same number for samples with the same key or image."""
    split: int
    shard: int
    row: int
    label: int


def _repeated(parts: list[SplitFiles], column: str) -> np.ndarray:
    """Return a sorted array of samples whose value in `column` occurs at least twice.

    The columns of the (n, 5) int64 array are the fields of `_RepeatedSample`.
    """
    shards: list[tuple[int, int, np.ndarray]] = []
    for split, part in enumerate(parts):
        shards += [(split, shard, rows) for shard, rows in part.seen.items()]
    values = np.concatenate([np.empty(0, "<u8"), *(rows[column] for *_, rows in shards)])
    values.sort()
    repeated = np.unique(values[1:][values[1:] == values[:-1]])
    del values  # 8 bytes per sample
    if not len(repeated):
        return np.empty((0, 5), np.int64)

    samples = []
    for split, shard, rows in shards:
        # The position of each value in `repeated`, if the value is repeated.
        number = np.minimum(np.searchsorted(repeated, rows[column]), len(repeated) - 1)
        chosen = np.flatnonzero(repeated[number] == rows[column])
        place = np.broadcast_to([split, shard], (len(chosen), 2))
        samples.append(np.column_stack([number[chosen], place, chosen, rows["label"][chosen]]))

    together = np.concatenate(samples)
    return together[np.lexsort(together.T[::-1])]  # by the first column, then by the others


def check_repeated(data: DataSet) -> Iterator[ShardFinding]:
    """Report keys that occur twice in a split, and images with identical bytes.

    Identical images are reported only as notes, because published data sets contain some. Images
    that occur in two splits or under two labels are listed first.
    """
    for part in data.parts:
        for group in _groups(_repeated([part], "key"))[:MOST_LINES]:
            names = [data.sample_name(part, each.shard, each.row) for each in group[:3]]
            yield ShardFinding(
                "tars",
                part.name,
                f"a key occurs {len(group)} times: {' and '.join(names)}; write the shards again"
                " with unique keys",
            )

    groups = _groups(_repeated(data.parts, "image"))
    if groups:
        yield _note_of_equal_images(data, groups)


def _note_of_equal_images(data: DataSet, groups: list[list[_RepeatedSample]]) -> ShardFinding:
    """Count the groups of samples with identical images, and list the most conflicting ones."""

    def num_splits(group: list[_RepeatedSample]) -> int:
        return len({each.split for each in group})

    def num_labels(group: list[_RepeatedSample]) -> int:
        return len({each.label for each in group})

    details = []
    groups.sort(key=lambda group: (-num_splits(group), -num_labels(group)))
    for group in groups[:MOST_LINES]:
        names = [
            f"{data.sample_name(data.parts[each.split], each.shard, each.row)}"
            f" ({data.class_name(each.label)})"
            for each in group
        ]
        details.append(few(names, 4, " = "))

    return ShardFinding(
        "duplicates",
        ", ".join(part.name for part in data.parts),
        f"equal bytes: {counted(len(groups), 'image')} in"
        f" {counted(sum(map(len, groups)), 'sample')};"
        f" {sum(num_splits(group) > 1 for group in groups):,} of these images are in two splits,"
        f" {sum(num_labels(group) > 1 for group in groups):,} under two labels",
        fails=False,
        details=tuple(details),
    )


def _groups(rows: np.ndarray) -> list[list[_RepeatedSample]]:
    """Split the rows returned by `_repeated` into one group per value."""
    samples = map(_RepeatedSample._make, rows.tolist())
    return [list(group) for _, group in itertools.groupby(samples, lambda sample: sample.value)]
