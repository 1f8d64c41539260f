"""Open a split of a data set. This docstring defines the format of data sets on disk.

Images and labels are stored in tar files ("shards"), two members per sample. An index contains one
row per sample, with the image's position, so reading a sample takes one `pread`.

    <root>/
      _info.json        splits, shard lengths, sizes and sha256, class names, source; written last
      train-00000.tar   <key>.jpg, <key>.cls (the label in ASCII), <key>.jpg, ...   plain ustar
      train-00000.idx   the same shard for NVIDIA DALI (text, v1.2)
      train-00000.json  sidecar, written when the shard is complete; `_info.json` is made from these
      train.index.npy   INDEX_DTYPE, one row per sample, in (shard, position) order
      val-00000.tar ...

The tars are the source of truth: `.idx` and `.index.npy` can be rebuilt from them. `_info.json` has
timm's format plus optional keys. `<root>` may be a URL, or a folder that contains only `_info.json`
and the index of shards at a URL ("shards_at").
"""

import bisect
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np

from vit.data.shards.index_file import (
    describe_altered,
    first_samples,
    index_mismatch,
    open_index,
    replaced_shards,
    rows_of_tars,
    save_index,
)
from vit.data.shards.info_file import SplitInfo, check_info, describe_split, read_info
from vit.data.shards.local_tars import LocalTars
from vit.data.shards.members import NO_LABEL, SampleLayout, recorded_layout
from vit.data.shards.reader import Storage, Store, TarReader, Version
from vit.data.shards.split import Split
from vit.data.shards.split_slice import SplitSlice, parse_name
from vit.system.files import ShardError, sha256_of
from vit.system.retry import RetryPolicy
from vit.system.urls import bare, local_path

log = logging.getLogger(__name__)


def open_split(
    root: Path | str,
    split: str,
    storage: Storage,
    retry: RetryPolicy | None = None,
    is_checked: bool = False,
    versions: Sequence[Sequence[Any]] | None = None,
) -> Split:
    """Open one split of the data set at `root`. See `vit.data.storage.opening.open_split`.

    Args:
        storage: Opens shards at a URL, and the cache.
        retry: The retry limits for shards in a folder.
        is_checked: Skip the checks of index rows and of shards in a folder, because another process
            on this host has just made them. Otherwise, 4,096 ranks with 1,000 shards would send
            4 million requests to a shared file system.
        versions: `Split.versions` from another process that has just opened the split. Without it,
            each rank would send one request per shard to the server.
    """
    part = parse_name(split)
    whole = _open_whole(root, part.split, storage, retry, is_checked, versions)
    return whole if part.start is None else SplitSlice(whole, split)


def _open_whole(
    root: Path | str,
    split: str,
    storage: Storage,
    retry: RetryPolicy | None,
    is_checked: bool,
    versions: Sequence[Sequence[Any]] | None,
) -> Split:
    """Open an entire split, not a slice of it. See `open_split` for the parameters."""
    found = _find_shards(root, split, storage)
    folder, described = found.folder, found.described
    is_cached = not isinstance(folder, Path) or storage.caches_folders
    needs_versions = is_cached or not is_checked
    found_versions = _check_shards(folder, described, versions) if needs_versions else []

    layout = recorded_layout(found.info, found.home and found.home / described.filenames[0])
    sizes = None if is_checked else [version.size for version in found_versions]
    if is_cached:
        storage.open_cache()
    index = _open_index(found, split, storage, sizes, layout)

    if isinstance(folder, Path) and not is_cached:
        tars: TarReader = LocalTars(folder, described.filenames, retry)
    else:
        tars = storage.open_tars(
            folder, described.filenames, found_versions, index, first_samples(described.lengths)
        )

    class_names = list(found.info.get("class_names") or [])
    num_classes = len(class_names) or found.info.get("num_classes") or 0
    is_count_known = is_checked and num_classes > 0
    if layout.label != NO_LABEL and not is_count_known:
        num_classes = _check_labels(index, num_classes, found.shown, split, described)

    return Split(
        found.home or found.shown,
        split,
        filenames=described.filenames,
        lengths=described.lengths,
        index=index,
        num_classes=num_classes,
        class_names=class_names,
        tars=tars,
        # The split has the class names, and the layout is pickled for each worker, so drop the
        # names from the layout.
        layout=replace(layout, class_names=()),
        apply_exif=bool((found.info.get("options") or {}).get("apply_exif")),
    )


# ---- the shards ----------------------------------------------------------------------------------


class _Found(NamedTuple):
    home: Path | None
    """The folder of `_info.json`; None for a URL."""
    shown: str
    """The address of `_info.json` without credentials, for messages."""
    info: dict[str, Any]
    """The content of `_info.json`."""
    described: SplitInfo
    folder: Path | Store
    """The folder or store that contains the shards."""


def _find_shards(root: Path | str, split: str, storage: Storage) -> _Found:
    """Read `_info.json` and find the shards. Raises ShardError."""
    home = local_path(root)
    url = str(root).rstrip("/")
    if home is not None:
        shown = str(home)
        info = read_info(home)
    elif url.partition("://")[2]:
        shown = bare(url)
        info = check_info(storage.open_store(url).read_info(), shown)
    else:
        raise ShardError(
            f"{root}: this address has no host; expected https://host/folder or s3://bucket/folder"
        )

    described = describe_split(info, split, shown)
    shards_at = info.get("shards_at")
    if home is None:
        return _Found(home, shown, info, described, storage.open_store(shards_at or url))

    # A folder may contain only `_info.json` and the index of shards at a URL.
    has_shards = not shards_at or any((home / name).exists() for name in described.filenames)
    folder = home if has_shards else storage.open_store(info["shards_at"])
    return _Found(home, shown, info, described, folder)


def check_shards(root: Path | str, split: str, storage: Storage) -> tuple[int, int]:
    """Check every shard of a split from this host, and return the number of shards and of bytes.

    Does not write files. Raises ShardError in the same cases as `open_split`, and also if the index
    of a folder must be built first.
    """
    found = _find_shards(root, split, storage)
    folder, described = found.folder, found.described
    sizes = [version.size for version in _check_shards(folder, described, None)]

    if isinstance(folder, Path):
        path = folder / f"{split}.index.npy"
        _, reason = _read_index(path, lambda rows: _why_rebuild(rows, folder, described, sizes))
        if reason:
            raise ShardError(
                f"{path} is {reason}: the next start must rebuild it by reading"
                f" {sum(sizes) / 1e9:.1f} GB; run `python -m data_prep.index"
                f" {quote(found.shown)}` to rebuild it now"
            )

    return len(sizes), sum(sizes)


def _check_shards(
    folder: Path | Store, described: SplitInfo, of_other_process: Sequence[Sequence[Any]] | None
) -> list[Version]:
    """Return the version of each shard. Raises ShardError with a list of all mismatches."""
    names = described.filenames
    if of_other_process is not None and len(of_other_process) == len(names):
        results: list[Version | str] = [Version(*version) for version in of_other_process]
    elif isinstance(folder, Path):
        results = [_local_version(folder / name) for name in names]
    else:
        results = folder.stats(names)

    versions = []
    problems = []
    for name, version, expected in zip(names, results, described.sizes, strict=True):
        if isinstance(version, str):
            problems.append(f"{name}: {version}")
        elif expected not in (None, version.size):
            problems.append(
                f"{name}: {version.size} bytes, expected {expected} (truncated or replaced)"
            )
        else:
            versions.append(version)

    if problems:
        remedy = "copy it again or repeat the command that wrote it"
        raise ShardError("\n".join(f"{folder}/{problem}; {remedy}" for problem in problems))
    return versions


def _local_version(path: Path) -> Version | str:
    try:
        status = os.stat(path)
    except OSError as error:
        return error.strerror or type(error).__name__
    return Version(status.st_size, str(status.st_mtime_ns))


# ---- the index -----------------------------------------------------------------------------------


def build_index(root: Path, split: str, described: SplitInfo, layout: SampleLayout) -> np.ndarray:
    """Read the tars of a split, write `<root>/<split>.index.npy` and return its rows.

    layout: the members that contain image and label. If the folder is read-only, the index is not
    saved, so it is rebuilt every time. Such an index has no checksums, because computing them would
    require reading all images. Returns (num_samples,) INDEX_DTYPE, memory-mapped. Raises ShardError
    in the same cases as `rows_of_tars`.
    """
    path = root / f"{split}.index.npy"
    may_write = os.access(root, os.W_OK)
    tars = [root / name for name in described.filenames]
    rows = rows_of_tars(tars, layout, described.lengths, described.sha256, may_write)

    try:
        save_index(path, rows)
        return open_index(path)
    except OSError as error:
        log.warning(
            "%s is kept only in memory (%s), so it is rebuilt each time the data are opened%s",
            path,
            error.strerror,
            "" if may_write else "; images are not checked by checksums",
        )
        return np.concatenate(rows)


def _open_index(
    found: _Found, split: str, storage: Storage, sizes: Sequence[int] | None, layout: SampleLayout
) -> np.ndarray:
    """Open the index. Rebuild it if it does not match the shards in a folder.

    sizes: the sizes of the shards in bytes; None if the index rows are already checked.
    """
    if isinstance(found.folder, Path):
        return _local_index(found.folder, split, found.described, sizes, layout)

    if found.home is not None:
        path = found.home / f"{split}.index.npy"
        return _remote_index(found.folder, path, str(path), found.described, sizes)
    path = storage.fetch_index(found.folder, split)
    place = f"{found.folder}/{split}.index.npy"
    return _remote_index(found.folder, path, place, found.described, sizes)


def _local_index(
    root: Path, split: str, described: SplitInfo, sizes: Sequence[int] | None, layout: SampleLayout
) -> np.ndarray:
    """Open or rebuild the index of shards in a folder. sizes: None if already checked."""
    path = root / f"{split}.index.npy"
    index, reason = _read_index(path, lambda rows: _why_rebuild(rows, root, described, sizes))
    if index is not None and not reason:
        return index

    if sizes is None:  # the first process could not save its index
        sizes = [version.size for version in _check_shards(root, described, None)]
    log.warning(
        "%s is %s: rebuilding it from %d shards, %.1f GB to read",
        path,
        reason,
        len(sizes),
        sum(sizes) / 1e9,
    )
    return build_index(root, split, described, layout)


def _read_index(
    path: Path, find_mismatch: Callable[[np.ndarray], str]
) -> tuple[np.ndarray | None, str]:
    """Return the index (None if unreadable), and the reason why it cannot be used, or ""."""
    try:
        index = open_index(path)
    except FileNotFoundError:
        return None, "absent"
    except (ValueError, OSError) as error:
        return None, f"unreadable ({error})"
    return index, find_mismatch(index)


def _why_rebuild(
    index: np.ndarray, root: Path, described: SplitInfo, sizes: Sequence[int] | None
) -> str:
    """Return the reason why the index does not match the tars, or "" if it matches.

    Raises ShardError if the sha256 of a tar differs from the recorded one, because training with a
    rebuilt index would then use the wrong images.
    """
    mismatch = index_mismatch(index, described.lengths, sizes)
    if mismatch or sizes is None:
        return mismatch

    tars = [root / name for name in described.filenames]
    replaced = replaced_shards(index, described.lengths, tars)
    if not replaced:
        return ""

    # Hashing the whole data set can take minutes, so hash only the first tar.
    first = replaced[0]
    if described.sha256[first] in (None, sha256_of(tars[first])):
        return "outdated (images are at other offsets in their shard)"

    message = describe_altered(tars[first])
    if len(replaced) > 1:
        message += f" ({len(replaced) - 1} more shards differ from the index)"
    raise ShardError(message)


def _remote_index(
    folder: Store, path: Path, place: str, described: SplitInfo, sizes: Sequence[int] | None
) -> np.ndarray:
    """Open the index of shards at a URL. place: address of the index for messages."""
    index, reason = _read_index(path, lambda rows: index_mismatch(rows, described.lengths, sizes))
    if index is None or reason:
        raise ShardError(
            f"{place}: {reason}; rebuild it with `python -m data_prep.index {quote(str(folder))}"
            " --out ROOT`, where ROOT is another folder, and set data.root=ROOT"
        )
    return index


# ---- the labels ----------------------------------------------------------------------------------


def _check_labels(
    index: np.ndarray, num_classes: int, root: str, split: str, described: SplitInfo
) -> int:
    """Return the number of classes: `num_classes` or, if that is 0, the largest label plus 1.

    Raises ShardError if a label is not below the number of classes.
    """
    labels = index["label"]
    num_classes = num_classes or int(labels.max()) + 1

    if labels.min() < 0 or labels.max() >= num_classes:
        outside = np.flatnonzero((labels < 0) | (labels >= num_classes))
        first = int(outside[0])
        shard = bisect.bisect_right(first_samples(described.lengths), first) - 1
        raise ShardError(
            f"{root}/_info.json, split {split!r}: {len(outside)} labels are outside [0,"
            f" {num_classes}); the first is {labels[first]} (sample {first},"
            f" {described.filenames[shard]}): correct the shard, or the classes in _info.json. If"
            f" both are right, {split}.index.npy is outdated: delete it, and the next start"
            " rebuilds it"
        )

    return num_classes
