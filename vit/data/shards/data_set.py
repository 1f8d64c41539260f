"""The on-disk format of a data set: what `data_prep` writes and the loader reads. Free of torch.

The data's story: images and their labels are dealt to tar files ("shards"), two members for each
sample; one index row for each sample says where its bytes lie; the loader asks for sample i and
gets its encoded bytes with one `pread`.

    <root>/
      _info.json            splits, shard lengths, sizes and sha256, class names, source, options; written last
      train-00000.tar       <key>.jpg, <key>.cls (the label in ASCII), <key>.jpg, ...   plain ustar
      train-00000.idx       the same shard for NVIDIA DALI (text, v1.2)
      train-00000.json      sidecar, written when the shard is whole; `_info.json` is made from these
      train.index.npy       INDEX_DTYPE, one row a sample, in (shard, position) order
      val-00000.tar ...

The tars are the truth: `.idx` and `.index.npy` are rebuilt from them. `_info.json` has timm's
layout plus our own keys, and one without our keys is accepted. `<root>` may be a URL; or a folder
that holds `_info.json` and index of shards at one ("shards_at").
"""

from __future__ import annotations

import bisect
import difflib
import hashlib
import json
import logging
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit.data.shards.index_file import (
    altered,
    first_samples,
    has_checksums,
    index_mismatch,
    labels_outside,
    moved_shards,
    open_index,
    rows_of_tars,
    save_index,
    sha256_of,
)
from vit.data.shards.members import recorded_layout
from vit.data.shards.records import INFO, SIDECAR, check_types, is_sidecar
from vit.data.shards.split import Split
from vit.data.storage.block_cache import BlockCache
from vit.data.storage.http import Version
from vit.data.storage.remote import RemoteFolder, local_path
from vit.data.storage.retry import RetryPolicy
from vit.data.storage.tars import CachedTars, LocalTars, MountedFolder
from vit.system.files import ShardError, read_json, unreadable, write_json
from vit.system.urls import bare, did_you_mean

FORMAT_VERSION = 1
log = logging.getLogger(__name__)


# ---- what describes the tars ---------------------------------------------------------------------


def write_sidecar(
    tar: Path, num_samples: int, sha256: str | None = None, **extra: Any
) -> dict[str, Any]:
    """Write and return the sidecar of a whole tar: filename, num_samples, bytes, sha256 (None: of
    the tar, read again) and `extra`."""
    sidecar = dict(
        filename=tar.name,
        num_samples=num_samples,
        bytes=tar.stat().st_size,
        sha256=sha256 or sha256_of(tar),
        **extra,
    )
    write_json(tar.with_suffix(".json"), sidecar)
    return sidecar


def read_sidecar(tar: Path) -> dict[str, Any] | None:
    """The sidecar of `tar`, or None. Raises ShardError if that file exists and is something
    else."""
    path = tar.with_suffix(".json")
    sidecar = read_json(path)
    if sidecar is not None and not is_sidecar(sidecar):
        raise ShardError(f"{path}: not a sidecar of ours, and its place is needed: move it away")
    check_types(sidecar or {}, SIDECAR, path)
    return sidecar


def make_info(
    splits: dict[str, list[str]],
    sidecars: Mapping[str, dict[str, Any]],
    *,
    source: str,
    options: dict[str, Any],
    class_names: list[str],
    num_classes: int,
    **extra: Any,
) -> dict[str, Any]:
    """The content of `_info.json`.

    splits: shard file names of each split, in order. sidecars: by file name. source, options: where
        the data come from, recorded as given.
    class_names: name of each label, or [] if unknown.
    """
    info: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "source": source,
        "options": options,
        **extra,
        "num_classes": num_classes,
    }
    info |= {"class_names": class_names, "splits": {}}
    for split, names in splits.items():
        lengths, sizes, sha256 = (
            [sidecars[name][key] for name in names] for key in ("num_samples", "bytes", "sha256")
        )
        described = {
            "name": split,
            "num_samples": sum(lengths),
            "filenames": names,
            "shard_lengths": lengths,
        }
        described |= {
            "shard_bytes": sizes,
            "shard_sha256": sha256,
            "sidecars_sha256": sidecars_sha256(sidecars[name] for name in names),
        }
        info["splits"][split] = described
    return info | {"info_sha256": info_sha256(info)}


def info_sha256(info: Mapping[str, Any]) -> str:
    """sha256 of the content of `_info.json`, but for itself: of what nothing else could be compared
    with."""
    return _content_sha256({key: value for key, value in info.items() if key != "info_sha256"})


def sidecars_sha256(sidecars: Iterable[Mapping[str, Any]]) -> str:
    """sha256 of the content of a split's sidecars, but for where and when their tars were found."""
    return _content_sha256(
        [
            {key: value for key, value in sidecar.items() if key not in ("mtime_ns", "shards_at")}
            for sidecar in sidecars
        ]
    )


def _content_sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_info(root: Path | str) -> dict[str, Any]:
    """`<root>/_info.json`. Raises ShardError if it is missing, broken or of a later format than
    this code knows."""
    root = Path(root)
    index_it = f"run `python -m data_prep.index {root}`"
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        who = "expected a folder of shards (`python -m data_prep` lists who makes them)"
        raise ShardError(f"{root}: no such directory; {who}{did_you_mean(str(root))}") from None
    except NotADirectoryError:
        raise ShardError(f"{root}: not a directory; expected a folder of shards") from None
    except OSError as error:
        raise unreadable(root, error) from error
    info = read_json(root / "_info.json")
    if info is None and not any(name.endswith(".tar") for name in names):
        write_them = (
            f"`python -m data_prep.imagefolder IMAGES --out {root}` makes them of a folder of"
            " images"
        )
        # data_prep refuses to write shards among the images they are made of.
        if any((root / name).is_dir() for name in names if not name.startswith(".")):
            command = shlex.join(
                ("python", "-m", "data_prep.imagefolder", f"{root}", "--out", f"{root}_shards")
            )
            write_them = (
                f"if it holds folders of images, one for each class, `{command}` makes them"
            )
        raise ShardError(f"{root}: no _info.json and no shards; {write_them}")
    if info is None:
        raise ShardError(
            f"{root}: no _info.json; if the shards are complete, {index_it}, else repeat the"
            " command that writes them"
        )
    return _checked_info(info, root)


def _checked_info(info: dict[str, Any], root: Path | str) -> dict[str, Any]:
    if not isinstance(info.get("splits"), dict) or not info["splits"]:
        raise ShardError(
            f"{root}/_info.json: no `splits`; move it away and run `python -m data_prep.index"
            f" {root}`"
        )
    check_types(info, INFO, f"{root}/_info.json")
    version = info.get("format_version", FORMAT_VERSION)
    if version > FORMAT_VERSION:
        raise ShardError(
            f"{root}/_info.json: format_version {version}, this code reads up to {FORMAT_VERSION};"
            " update the code"
        )
    return info


class _Described(NamedTuple):
    """What `_info.json` says of a split's shards, an item for each; None: not said."""

    filenames: list[str]
    lengths: list[int]
    sizes: list[int | None]
    sha256: list[str | None]


def _describe(info: dict[str, Any], split: str, shown: str) -> _Described:
    """A split in the `_info.json` of the data set called `shown`. Raises ShardError."""
    if split not in info["splits"]:
        near = difflib.get_close_matches(split, info["splits"], n=1, cutoff=0.3)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ShardError(
            f"{shown}: no split {split!r}; there are {', '.join(info['splits'])}{hint}"
        )
    said = info["splits"][split]
    where = f"{shown}/_info.json, split {split!r}"
    if missing := [key for key in ("filenames", "shard_lengths", "num_samples") if key not in said]:
        raise ShardError(
            f"{where}: no {', '.join(missing)}; move it away and run `python -m data_prep.index"
            f" {shown}`"
        )
    names = list(said["filenames"])
    lengths = list(said["shard_lengths"])
    sizes, sha256 = (
        list(said.get(key) or [None] * len(names)) for key in ("shard_bytes", "shard_sha256")
    )
    if (
        not 0 < len(names) == len(lengths) == len(sizes) == len(sha256)
        or sum(lengths) != said["num_samples"]
    ):
        counts = (
            f"{len(names)} filenames, {len(lengths)} shard_lengths (sum {sum(lengths)}),"
            f" {len(sizes)} shard_bytes"
        )
        raise ShardError(
            f"{where}: {counts} and num_samples {said['num_samples']} do not fit together; restore"
            " it from its source"
        )
    return _Described(names, lengths, sizes, sha256)


# ---- the index -----------------------------------------------------------------------------------


def build_index(root: Path | str, split: str, filenames: list[str] | None = None) -> np.ndarray:
    """Read the tars of a split, write `<root>/<split>.index.npy` and return it, mapped:
    (num_samples,) INDEX_DTYPE.

    Image and label are where `recorded_layout` says. filenames: the shards in order; by default
    those in `_info.json`. In a folder that cannot be written the index is only returned, and has no
    checksums: it is made each time, and reading all images would take long. Raises ShardError like
    `rows_of_tars`.
    """
    root = Path(root)
    path = root / f"{split}.index.npy"
    may_write = os.access(root, os.W_OK)
    info = read_info(root) if filenames is None or (root / "_info.json").exists() else {}
    described = info.get("splits", {}).get(split, {})
    names = described["filenames"] if filenames is None else filenames
    sha256 = described.get("shard_sha256") or [None] * len(names)
    rows = rows_of_tars(
        [root / name for name in names], recorded_layout(info, root / names[0]), sha256, may_write
    )
    lengths = described.get("shard_lengths") or [len(of_shard) for of_shard in rows]
    if problems := [
        f"{root / name}: holds {len(of_shard)} samples, _info.json says {length}; restore the one"
        " that is wrong"
        for name, of_shard, length in zip(names, rows, lengths, strict=True)
        if len(of_shard) != length
    ]:
        raise ShardError("\n".join(problems))
    try:
        save_index(path, rows)
        return open_index(path)
    except OSError as error:
        told = "" if may_write else "; images are not compared with checksums"
        log.warning(
            "%s is kept in memory only (%s); it is rebuilt each time the data are opened%s",
            path,
            error.strerror,
            told,
        )
        return np.concatenate(rows)


def _load_index(
    root: Path, split: str, described: _Described, sizes: list[int], is_checked: bool
) -> np.ndarray | None:
    """The index file, mapped, or None with the reason logged if it does not fit the tars (sizes:
    bytes of each).

    Where a tar is at fault and not the index, which the recorded sha256 tells, ShardError is
    raised: nobody asked for other images. is_checked: another process has done this just now.
    """
    path = root / f"{split}.index.npy"
    lengths = described.lengths
    tars = [root / name for name in described.filenames]
    try:
        index = open_index(path)
    except FileNotFoundError:
        reason = "absent"
    except (ValueError, OSError) as error:
        reason = f"unreadable ({error})"
    else:
        if is_checked:
            return index
        if misfit := index_mismatch(index, lengths, sizes):
            reason = misfit
        elif moved := moved_shards(index, lengths, tars):
            # The first of them is enough: hashing a whole data set would take minutes.
            if described.sha256[moved[0]] not in (None, sha256_of(tars[moved[0]])):
                others = (
                    f" ({len(moved) - 1} more shards differ from the index)"
                    if len(moved) > 1
                    else ""
                )
                raise ShardError(altered(tars[moved[0]]) + others)
            reason = "stale (images lie elsewhere in their shard)"
        elif has_checksums(index):
            return index
        elif not os.access(root, os.W_OK):
            log.warning("%s: %s", path, UNCHECKED)
            return index
        else:
            reason = "without checksums of images (an earlier version wrote it)"
    gigabytes = sum(sizes) / 1e9
    log.warning(
        "%s is %s: rebuilding it from %d shards, %.1f GB to read",
        path,
        reason,
        len(lengths),
        gigabytes,
    )
    return None


def _labels_are_its_shards(
    root: Path, info: dict[str, Any], described: _Described, index: np.ndarray, sample: int
) -> bool:
    """Whether the index has the labels that are in the shard of `sample`; of this one shard headers
    and labels are read."""
    firsts = first_samples(described.lengths)
    shard = bisect.bisect_right(firsts, sample) - 1
    [rows] = rows_of_tars(
        [root / described.filenames[shard]],
        recorded_layout(info, root / described.filenames[0]),
        [None],
        False,
    )
    return np.array_equal(rows["label"], index["label"][firsts[shard] : firsts[shard + 1]])


def _open_remote(
    folder: RemoteFolder,
    home: Path | None,
    split: str,
    described: _Described,
    versions: list[Version],
    cache: BlockCache,
    is_checked: bool,
) -> CachedTars:
    """The shards in `folder` with their index, which lies beside them or in the folder `home`.
    Raises ShardError if it does not fit."""
    path = folder.fetch_index(split, cache) if home is None else home / f"{split}.index.npy"
    place = f"{folder}/{split}.index.npy" if home is None else str(path)
    try:
        index = open_index(path)
        reason = (
            ""
            if is_checked
            else index_mismatch(index, described.lengths, [version.size for version in versions])
        )
    except (ValueError, OSError) as error:
        reason = f"unreadable ({error})"
    if reason:
        remedy = (
            f"make it again with `python -m data_prep.index {folder} --out ROOT`, ROOT being"
            " another folder, and give data.root=ROOT"
        )
        raise ShardError(f"{place}: {reason}; {remedy}")
    if not has_checksums(index):
        log.warning("%s: %s", place, UNCHECKED)
    return CachedTars(
        folder, described.filenames, versions, index, first_samples(described.lengths), cache
    )


UNCHECKED = (
    "of an earlier version, without checksums of images: they are not compared; `python -m"
    " data_prep.index` writes it with them"
)


def _local_versions(root: Path, filenames: list[str]) -> list[Version | str]:
    """Sizes of the shards; a text says why one cannot be told."""

    def version(path: Path) -> Version | str:
        try:
            status = os.stat(path)
            return Version(status.st_size, str(status.st_mtime_ns))
        except OSError as error:
            return error.strerror or type(error).__name__

    return [version(root / name) for name in filenames]


# ---- all of it -----------------------------------------------------------------------------------


def open_split(
    root: Path | str,
    split: str,
    cache_dir: Path | str | None = None,
    cache_gib: float | None = None,
    retry: RetryPolicy | None = None,
    is_checked: bool = False,
    versions: Sequence[Sequence[Any]] | None = None,
) -> Split:
    """Open one split of the data set in `root`, a folder or a URL, after checks that read no image.

    An index that is absent or does not fit the tars of a folder is made of them (all are read,
    which is logged as a warning). cache_dir, cache_gib: see `BlockCache`; shards in a folder are
    read in place where cache_dir is None. retry: with what does not answer for a while.
    is_checked: another process of this host has opened it just now, so the rows of the index are
    not looked at again. versions: `Split.versions` as another process has found them just now: 64
    ranks would ask for each of 5,000 shards. Raises ShardError listing all problems at once:
    missing folder, `_info.json`, split or shards, shards of another size than recorded, lengths
    that do not add up, labels outside [0, num_classes).
    """
    home = local_path(root)
    url = str(root).rstrip("/")
    shown = bare(url) if home is None else str(home)
    if home is None and not url.partition("://")[2]:
        raise ShardError(
            f"{root}: no host in this address; expected https://host/folder or s3://bucket/folder"
        )
    info = (
        _checked_info(RemoteFolder(url, retry).read_info(), shown)
        if home is None
        else read_info(home)
    )
    described = _describe(info, split, shown)
    where = f"{shown}/_info.json, split {split!r}"

    # 1. The shards themselves.
    filenames = described.filenames
    lengths = described.lengths
    elsewhere = (
        info.get("shards_at")
        if home is None or not any((home / name).exists() for name in filenames)
        else None
    )
    folder = RemoteFolder(elsewhere or url, retry) if elsewhere or home is None else None
    if versions is not None and len(versions) == len(filenames):
        found: list[Version | str] = [Version(*version) for version in versions]
    else:
        found = (
            _local_versions(Path(shown), filenames) if folder is None else folder.stats(filenames)
        )
    remedy = "copy it again or repeat the command that wrote it"
    problems = []
    for name, version, expected in zip(filenames, found, described.sizes, strict=True):
        if isinstance(version, str):
            problems.append(f"{folder or shown}/{name}: {version}; {remedy}")
        elif expected not in (None, version.size):
            problems.append(
                f"{folder or shown}/{name}: {version.size} bytes, expected {expected} (truncated or"
                f" replaced); {remedy}"
            )
    if problems:
        raise ShardError("\n".join(problems))
    known = [version for version in found if isinstance(version, Version)]
    sizes = [version.size for version in known]

    # 2. The index; in a folder it is made anew if it does not fit.
    tars: LocalTars | CachedTars | None = None
    index = None
    if folder is not None:
        tars = _open_remote(
            folder, home, split, described, known, BlockCache(cache_dir, cache_gib), is_checked
        )
        index = tars.index
    elif home is not None:
        index = _load_index(home, split, described, sizes, is_checked)
    if index is None:
        index = build_index(shown, split, filenames)

    # 3. The labels.
    class_names = list(info.get("class_names") or [])
    num_classes = len(class_names) or info.get("num_classes")
    if not (is_checked and num_classes):
        outside, first, largest = labels_outside(index, num_classes, lengths)
        if (
            outside
            and home is not None
            and folder is None
            and not _labels_are_its_shards(home, info, described, index, first)
        ):
            log.warning(
                "%s/%s.index.npy has labels that are not in the shards: rebuilding it", home, split
            )
            index = build_index(home, split, filenames)
            outside, first, largest = labels_outside(index, num_classes, lengths)
        num_classes = num_classes or largest + 1
        if outside:
            told = (
                f"the first is {index['label'][first]} (sample {first},"
                f" {filenames[bisect.bisect_right(first_samples(lengths), first) - 1]})"
            )
            raise ShardError(
                f"{where}: {outside} labels lie outside [0, {num_classes}), {told}; correct the"
                " shard, or the classes in _info.json"
            )

    # 4. How the shards are read.
    if tars is None and home is not None and cache_dir is not None:
        mounted = MountedFolder(home, filenames, retry)
        cache = BlockCache(cache_dir, cache_gib)
        tars = CachedTars(mounted, filenames, known, index, first_samples(lengths), cache)
    # a split travels to workers
    layout = replace(recorded_layout(info, home and home / filenames[0]), class_names=())
    tars = tars or LocalTars(Path(shown), filenames, retry)
    return Split(
        home or shown,
        split,
        filenames,
        lengths,
        index,
        num_classes,
        class_names,
        tars,
        layout,
        described.sha256,
    )
