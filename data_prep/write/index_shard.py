"""One shard that others wrote, for `data_prep.index`: its index rows, `.idx` and sidecar. Runs in a
worker process; free of torch.

The data's story: a shard in a folder is scanned and hashed where it lies; one at a URL is fetched
whole, unless an earlier command has left what is needed of it. Samples that do not fit are left out
of the index. The sidecar, which is written last, lists them, says how samples were taken, if not as
usual, and when the tar that was hashed had been changed last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.read.download import WebShards
from data_prep.write.output import Output, temporary_folder
from vit.data.shards import info_file
from vit.data.shards.index_file import open_index, sha256_of
from vit.data.shards.members import SampleLayout
from vit.data.shards.records import SIDECAR, check_types, is_sidecar
from vit.data.shards.tar import INDEX_DTYPE, Survey, index_rows, survey_tar, write_idx
from vit.system.files import ShardError
from vit.system.urls import bare


class Shard(NamedTuple):
    """A shard to index: where it is, where its index goes, and the rows that an index of an earlier
    command has for it."""

    source: Output | WebShards
    output: Output
    name: str
    split: str
    layout: SampleLayout
    rows: np.ndarray | None = None


def index_shard(shard: Shard) -> tuple[np.ndarray, dict[str, Any]]:
    """The index rows and the sidecar of a shard; its `.idx` and sidecar are there then."""
    if isinstance(shard.source, Output) and shard.source.local is not None:
        return _index_in_place(shard, shard.source.local / shard.name)
    return _indexed_before(shard) or _index_fetched(shard, shard.source)


def _index_in_place(shard: Shard, tar: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Write the missing of `.idx` and sidecar. What an earlier sidecar says of the bytes holds
    while size and time are as they were."""
    found = survey_tar(tar, shard.layout)
    status = tar.stat()
    about = _about(shard, found)
    sidecar = info_file.read_sidecar(tar)
    # lists images of its source, and no time: its bytes shall depend on nothing else
    of_writer = sidecar is not None and "plan" in sidecar
    fits = sidecar is not None and (
        of_writer or {key: sidecar[key] for key in OF_SAMPLES if key in sidecar} == about
    )
    if not tar.with_suffix(".idx").exists() or (sidecar is not None and not fits):
        write_idx(tar, found.samples)
    if (
        sidecar is None
        or not fits
        or (sidecar["bytes"], sidecar.get("mtime_ns")) != (status.st_size, status.st_mtime_ns)
    ):
        sha256 = sha256_of(tar)
        if not (of_writer and sidecar is not None and sidecar["sha256"] == sha256):
            sidecar = info_file.write_sidecar(
                tar, len(found.samples), sha256, mtime_ns=status.st_mtime_ns, **about
            )
    return index_rows(found.samples), sidecar


def _indexed_before(shard: Shard) -> tuple[np.ndarray, dict[str, Any]] | None:
    """What an earlier command found out about a shard that is still the same, as far as its size
    tells."""
    name = stem(shard.name)
    sidecar = shard.output.read_json(f"{name}.json")
    if sidecar is None:
        return None
    if sidecar.get("filename") != shard.name or not is_sidecar(sidecar):
        raise ShardError(
            f"{shard.output}/{name}.json: not a sidecar of ours, and its place is needed: move it"
            " away, or choose another --out"
        )
    check_types(sidecar, SIDECAR, f"{shard.output}/{name}.json")
    rows = shard.rows
    if rows is None and shard.output.size(f"{name}.rows.npy") > 0:
        with temporary_folder() as folder, suppress(ValueError):  # what is damaged is made again
            rows = np.array(open_index(shard.output.fetch(f"{name}.rows.npy", folder)))
    if (
        rows is None
        or rows.dtype != INDEX_DTYPE
        or len(rows) != sidecar["num_samples"]
        or sidecar.get("members", {}) != shard.layout.options()
    ):
        return None
    unchanged = sidecar.get("shards_at") == _elsewhere(shard) and shard.source.size(shard.name) in (
        -1,
        sidecar["bytes"],
    )
    return (rows, sidecar) if unchanged else None


def _index_fetched(shard: Shard, source: Output | WebShards) -> tuple[np.ndarray, dict[str, Any]]:
    """Fetch a shard, scan and hash it, and publish what is to be known of it; the sidecar last, as
    it says that all is there."""
    with temporary_folder() as folder:
        tar = source.fetch(shard.name, folder)
        with called(str(source), folder):
            found = survey_tar(tar, shard.layout)
        rows = index_rows(found.samples)
        np.save(tar.with_suffix(".rows.npy"), rows)
        write_idx(tar, found.samples)
        extra = _about(shard, found) | (
            {} if _elsewhere(shard) is None else {"shards_at": _elsewhere(shard)}
        )
        sidecar = info_file.write_sidecar(tar, len(found.samples), **extra)
        for extension in (".rows.npy", ".idx", ".json"):
            shard.output.publish(tar.with_suffix(extension))
    return rows, sidecar


OF_SAMPLES = ("members", "quarantined", "passed_over")
"""What a sidecar says of the samples in its tar."""


def _about(shard: Shard, found: Survey) -> dict[str, Any]:
    """These, as far as there is something to say."""
    quarantined = [
        {
            "split": shard.split,
            "key": key,
            "label": None,
            "name": name,
            "reason": reason,
            "file": shard.name,
            "tar_offset": offset,
        }
        for key, name, offset, _, reason in found.unfit
    ]
    about = (shard.layout.options(), quarantined, dict(sorted(found.passed_over.items())))
    return {key: value for key, value in zip(OF_SAMPLES, about, strict=True) if value}


def _elsewhere(shard: Shard) -> str | None:
    """Where the tar is, if not beside its index."""
    return None if str(shard.source) == str(shard.output) else bare(str(shard.source))


@contextmanager
def called(place: str, folder: Path) -> Iterator[None]:
    """ShardErrors about files in a temporary folder name the place they came from."""
    try:
        yield
    except ShardError as error:
        raise ShardError(str(error).replace(str(folder), place)) from error


def stem(name: str) -> str:
    return name.removesuffix(".tar")
