"""Index one shard that others wrote: its rows, `.idx` and sidecar; runs in a worker process.

A shard in a folder is scanned and hashed in place; one at a URL is fetched completely, unless an
earlier command has left what is needed of it. Invalid samples are left out of the index. The
sidecar, which is written last, lists them, and records the layout of samples, if unusual, and when
the hashed tar was last changed.
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
from vit.data.shards.index_file import open_index
from vit.data.shards.info_file import SIDECAR, check_types, is_sidecar
from vit.data.shards.members import SampleLayout
from vit.data.shards.tar import INDEX_DTYPE, Survey, index_rows, survey_tar, write_idx
from vit.system.files import ShardError, sha256_of
from vit.system.urls import bare


class Shard(NamedTuple):
    """A shard to index."""

    source: Output | WebShards
    output: Output
    """Where its index goes."""
    name: str
    split: str
    layout: SampleLayout
    rows: np.ndarray | None = None
    """Its rows in the index of an earlier command."""


def index_shard(shard: Shard) -> tuple[np.ndarray, dict[str, Any]]:
    """The index rows and the sidecar of a shard; its `.idx` and sidecar are there then."""
    if isinstance(shard.source, Output) and shard.source.local is not None:
        return _index_in_place(shard, shard.source.local / shard.name)
    return _indexed_before(shard) or _index_fetched(shard, shard.source)


def _index_in_place(shard: Shard, tar: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Write `.idx` and sidecar if missing.

    What an earlier sidecar records of the bytes holds while size and time are unchanged.
    """
    found = survey_tar(tar, shard.layout)
    status = tar.stat()
    about = _about(shard, found)
    sidecar = info_file.read_sidecar(tar)
    # our writer's sidecar has no time: its bytes depend on the data alone
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
    """The result of an earlier command, if the shard is unchanged as far as its size shows."""
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
    if sidecar.get("shards_at") != _elsewhere(shard):
        return None
    return (rows, sidecar) if shard.source.size(shard.name) in (-1, sidecar["bytes"]) else None


def _index_fetched(shard: Shard, source: Output | WebShards) -> tuple[np.ndarray, dict[str, Any]]:
    """Fetch a shard, scan and hash it, and publish its records; the sidecar marks completeness."""
    with temporary_folder() as folder:
        tar = source.fetch(shard.name, folder)
        with renamed_errors(str(source), folder):
            found = survey_tar(tar, shard.layout)
        rows = index_rows(found.samples)
        np.save(tar.with_suffix(".rows.npy"), rows)
        write_idx(tar, found.samples)
        extra = _about(shard, found)
        if (place := _elsewhere(shard)) is not None:
            extra["shards_at"] = place
        sidecar = info_file.write_sidecar(tar, len(found.samples), **extra)
        for extension in (".rows.npy", ".idx", ".json"):
            shard.output.publish(tar.with_suffix(extension))
    return rows, sidecar


OF_SAMPLES = ("members", "quarantined", "passed_over")
"""What a sidecar records of the samples in its tar."""


def _about(shard: Shard, found: Survey) -> dict[str, Any]:
    """OF_SAMPLES, as far as there is something to record."""
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
        for key, name, offset, reason in found.unfit
    ]
    about = (shard.layout.options(), quarantined, dict(sorted(found.passed_over.items())))
    return {key: value for key, value in zip(OF_SAMPLES, about, strict=True) if value}


def _elsewhere(shard: Shard) -> str | None:
    """Where the tar is, if not next to its index."""
    return None if str(shard.source) == str(shard.output) else bare(str(shard.source))


@contextmanager
def renamed_errors(place: str, folder: Path) -> Iterator[None]:
    """Make ShardErrors about files in a temporary folder name the place they came from."""
    try:
        yield
    except ShardError as error:
        raise ShardError(str(error).replace(str(folder), place)) from error


def stem(name: str) -> str:
    return name.removesuffix(".tar")
