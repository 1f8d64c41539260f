"""Shards of other programs: their place, their records, and the index rows of each.

A shard in a folder is scanned and hashed in place; a shard at a URL is fetched completely, unless
an earlier command left its records. The index omits invalid samples. The sidecar, which is written
last, lists them, and records the layout of samples, if unusual, and when the hashed tar was last
changed.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.errors import PrepError, some
from data_prep.read.download import WebShards
from data_prep.write.output import Output, temporary_folder
from data_prep.write.samples import key_hashes
from vit.data.shards import info_file
from vit.data.shards.index_file import first_samples, has_checksums, open_index
from vit.data.shards.info_file import SIDECAR, check_types, is_sidecar
from vit.data.shards.members import SampleLayout
from vit.data.shards.tar import INDEX_DTYPE, Survey, idx_lines, index_rows, survey_tar, write_idx
from vit.system.files import ShardError, sha256_of
from vit.system.redact import shown
from vit.system.urls import bare, expand_braces, on_the_web, resolve

COMPRESSED_TAR = re.compile(r"\.(tar\.(gz|bz2|xz|zst)|tgz)$")
SPLIT_NAMES = ("train", "training", "val", "valid", "validation", "test", "dev")


def split_of(filename: str) -> str | None:
    """Return the split in a shard's name: a usual name between dashes, else the part before the
    number."""
    *parts, number = filename.removesuffix(".tar").split("-")
    usual = [part for part in parts if part.lower() in SPLIT_NAMES]
    if usual:
        return usual[0]
    return parts[-1] if parts and number.isdecimal() and parts[-1].isalpha() else None


def group_by_split(files: list[str], root: str, split: str | None = None) -> dict[str, list[str]]:
    """Return the sorted file names of the tars of each split; all in `split` if given.

    Raises PrepError without tars, and for names that do not fit.
    """
    names = [name for name in files if name.endswith(".tar")]
    if compressed := [name for name in files if COMPRESSED_TAR.search(name) and not names]:
        raise PrepError(
            f"{root}: no .tar files but compressed ones ({some(compressed)}), of which no sample"
            " can be read by itself: unpack them first (gunzip, bunzip2, unxz, unzstd)"
        )
    if not names:
        folders = sorted({path.parent.name for path in Path(root).glob("*/*.tar")})
        inside = ""
        if folders:
            inside = f" but in its folders {some(folders)}: move or link them into it"
        raise PrepError(
            f"{root}: no .tar files{inside}; expected <split>-00000.tar or"
            " <anything>-<split>-00000.tar"
        )
    split_of_name = {name: split_of(name) for name in sorted(names)}
    unclear = [name for name in split_of_name if split_of_name[name] is None]
    if split is None and unclear:
        raise PrepError(
            f"{root}: no split in the name of {some(unclear)}; if they are all of one split, as"
            " img2dataset's 00000.tar, say which: --split train; else rename to <split>-00000.tar,"
            " or move away what is not a shard"
        )
    splits: dict[str, list[str]] = {}
    for name, of_name in split_of_name.items():
        splits.setdefault(str(of_name), []).append(name)
    if split is None:
        return splits
    if different := [name for name in split_of_name if split_of_name[name] not in (None, split)]:
        raise PrepError(
            f"{root}: --split {split}, but another split is in the name of {some(different)}"
        )
    return {split: list(split_of_name)}


def locate(roots: list[str]) -> tuple[Output | WebShards, list[str] | None]:
    """Return the place of the shards, and their names if `roots` are URLs of tars."""
    urls = [
        url for root in roots for url in (expand_braces(resolve(root)) if "://" in root else [root])
    ]
    make = WebShards if on_the_web(urls[0]) else Output
    matches = {url: re.fullmatch(r"([^?]*://[^?]*)/([^/?]+\.tar)(\?.*)?", url) for url in urls}
    if len(urls) == 1 and not matches[urls[0]]:
        return make(urls[0]), None
    if strange := [shown(url) for url, match in matches.items() if not match]:
        raise PrepError(
            f"{some(strange)}: expected one folder, or URLs of shards, which end in .tar"
        )
    places = [(f"{match[1]}{match[3] or ''}", match[2]) for url in urls if (match := matches[url])]
    folders = {folder for folder, _ in places}
    if len(folders) > 1:
        raise PrepError(
            f"shards of several folders ({some(sorted(map(shown, folders)))}); a data set is in"
            " one: index each by itself"
        )
    return make(folders.pop()), [name for _, name in places]


def choose_output(source: Output | WebShards, out: str | None) -> Output:
    """Return the place of the index, made and writable. Raises PrepError."""
    if isinstance(source, Output) and source.local is not None:
        if out is not None:
            raise PrepError(
                f"--out {out} is for shards at a URL; the index of a folder ({source}) is written"
                " next to its shards"
            )
        if not source.local.is_dir():
            problem = "not a folder" if source.local.exists() else "no such folder"
            raise PrepError(f"{source}: {problem}; expected a folder of tar shards, or URLs")
        return source
    if out is None and isinstance(source, WebShards):
        raise PrepError(
            f"{source}: nothing can be written next to shards on the web; give a folder for their"
            " index with --out"
        )
    output = Output(out) if out is not None else source
    assert isinstance(output, Output)
    try:
        output.make()
    except (PrepError, ShardError) as error:
        hint = ". Where nothing can be written, give a folder for the index with --out"
        raise PrepError(f"{error}{'' if out else hint}") from error
    if out is not None and (tars := sorted(fnmatch.filter(output.sizes(), "*.tar"))):
        raise PrepError(
            f"{output}: holds shards itself ({some(tars)}); choose an empty folder for the index of"
            f" {source}"
        )
    return output


def read_infos(
    source: Output | WebShards, output: Output, listed: bool
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the `_info.json` next to the shards, and that in the output; they may be the same.

    listed: the shards were given one by one, so the first file is not read.
    """
    for place in (source, output):
        if (
            isinstance(place, Output)
            and place.read_json("_writing.json")
            and not place.read_json("_info.json")
        ):
            raise PrepError(
                f"{place}: a writer has not finished here; run its command again, it continues"
            )
    own_info = _info(output)
    if output is source:
        return own_info, own_info
    given_info = None if listed else _info(source)
    if given_info is None and not listed and isinstance(source, WebShards):
        raise PrepError(
            f"{source}: no _info.json there, and the web has no lists of files: name the shards, as"
            f" in '{source}/train-{{0000..0099}}.tar'"
        )
    if own_info is not None and bare(own_info.get("shards_at", "")) != bare(str(source)):
        raise PrepError(
            f"{output}: holds the index of {own_info.get('shards_at', 'other shards')}, not of"
            f" {source}; choose another --out"
        )
    return given_info, own_info


def _info(place: Output | WebShards) -> dict[str, Any] | None:
    """Return the `_info.json` of a place, None if it does not exist. Raises ShardError."""
    info = place.read_json("_info.json")
    if info is not None:
        info_file.check_info(info, str(place))
        for split in info["splits"]:
            info_file.describe_split(info, split, str(place))
    return info


def tars_by_split(info: dict[str, Any]) -> dict[str, list[str]]:
    """Return the file names of each split in an `_info.json`."""
    return {name: list(described["filenames"]) for name, described in info["splits"].items()}


def check_present(source: Output | WebShards, tars: list[str]) -> None:
    """Raise PrepError for missing shards; not on the web, where each would take a request."""
    if isinstance(source, Output):
        sizes = source.sizes()
        if missing := [name for name in tars if name not in sizes and source.size(name) < 0]:
            raise PrepError(
                f"{source}: shards are missing: {some(missing)}; copy them again, or correct the"
                " list"
            )


def known_rows(output: Output, info: dict[str, Any] | None) -> dict[str, np.ndarray]:
    """Return the rows of each shard in the index of an earlier command, if it has checksums."""
    rows_of: dict[str, np.ndarray] = {}
    for split, described in ({} if info is None else info["splits"]).items():
        if output.size(f"{split}.index.npy") <= 0:
            continue
        with temporary_folder() as folder, suppress(ValueError):  # a damaged file is made again
            rows = open_index(output.fetch(f"{split}.index.npy", folder))
            firsts = first_samples(described["shard_lengths"])
            if has_checksums(rows) and len(rows) == firsts[-1]:
                for name, (start, stop) in zip(
                    described["filenames"], itertools.pairwise(firsts), strict=True
                ):
                    rows_of[name] = np.array(rows[start:stop])
    return rows_of


def compare_shards(output: Output, info: dict[str, Any], indexed: dict[str, Indexed]) -> None:
    """Raise PrepError listing shards that differ from `_info.json` in length, size or sha256."""
    problems = []
    for split in info["splits"]:
        for name, *recorded in zip(
            *info_file.describe_split(info, split, str(output)), strict=True
        ):
            rows, sidecar, _ = indexed[name]
            actual = [len(rows), sidecar["bytes"], sidecar["sha256"]]
            if any(old not in (None, new) for old, new in zip(recorded, actual, strict=True)):
                problems.append(
                    f"{name} has {actual[0]} samples that fit, {actual[1]} bytes and the sha256"
                    f" {actual[2]}, _info.json says {', '.join(map(str, recorded))}"
                )
    if problems:
        raise PrepError(
            f"{output}: {'; '.join(problems)}. If the tars are right, move _info.json away and run"
            " this again"
        )


def choose_classes(
    info: dict[str, Any] | None, class_names: list[str], indexed: dict[str, Indexed]
) -> dict[str, Any]:
    """Return class_names and num_classes, from the existing `_info.json` if it has them.

    Raises PrepError for a label that is too large.
    """
    largest, name = max((int(each.rows["label"].max()), name) for name, each in indexed.items())
    num_classes = len(class_names) or (info or {}).get("num_classes")
    if class_names and largest >= len(class_names):
        raise PrepError(
            f"labels up to {largest} (in {name}), but {len(class_names):,} class names, which are"
            f" those of labels 0 to {len(class_names) - 1}: name all classes, in the order of"
            " labels"
        )
    num_samples = sum(len(each.rows) for each in indexed.values())
    if num_classes is None and largest >= num_samples:
        raise PrepError(
            f"a label {largest:,} (in {name}) would make {largest + 1:,} classes of"
            f" {num_samples:,} samples: labels count from 0; correct it, name another member"
            " (--label), or name all classes (--classes FILE)"
        )
    return {"class_names": class_names, "num_classes": num_classes or largest + 1}


# ---- one shard, in a worker process --------------------------------------------------------------


class Shard(NamedTuple):
    """A shard to index."""

    source: Output | WebShards
    output: Output
    """The place of its index."""
    name: str
    split: str
    layout: SampleLayout
    rows: np.ndarray | None = None
    """Its rows in the index of an earlier command."""


class Indexed(NamedTuple):
    """The records of an indexed shard."""

    rows: np.ndarray
    """(num_samples,) INDEX_DTYPE."""
    sidecar: dict[str, Any]
    keys: np.ndarray
    """(num_samples,) uint64, hashes of the keys; (0,) for a shard that an earlier command read."""


def index_shard(shard: Shard) -> Indexed:
    """Index a shard; write its `.idx` and sidecar if needed."""
    if isinstance(shard.source, Output) and shard.source.local is not None:
        return _index_in_place(shard, shard.source.local / shard.name)
    return _indexed_before(shard) or _index_fetched(shard, shard.source)


def _index_in_place(shard: Shard, tar: Path) -> Indexed:
    """Write `.idx` and sidecar if missing or wrong.

    An earlier sidecar stays valid while size and time of the tar are unchanged.
    """
    survey = survey_tar(tar, shard.layout)
    status = tar.stat()
    about = _about(shard, survey)
    sidecar = info_file.read_sidecar(tar)
    # our writer's sidecar has no time: its bytes depend on the data alone
    of_writer = sidecar is not None and "plan" in sidecar
    fits = sidecar is not None and (
        of_writer or {key: sidecar[key] for key in OF_SAMPLES if key in sidecar} == about
    )
    idx = tar.with_suffix(".idx")
    if not idx.exists() or idx.read_bytes() != b"".join(idx_lines(survey.samples)):
        write_idx(tar, survey.samples)
    if (
        sidecar is None
        or not fits
        or (sidecar["bytes"], sidecar.get("mtime_ns")) != (status.st_size, status.st_mtime_ns)
    ):
        sha256 = sha256_of(tar)
        if not (of_writer and sidecar is not None and sidecar["sha256"] == sha256):
            sidecar = info_file.write_sidecar(
                tar, len(survey.samples), sha256, mtime_ns=status.st_mtime_ns, **about
            )
    return Indexed(index_rows(survey.samples), sidecar, key_hashes([s.key for s in survey.samples]))


def _indexed_before(shard: Shard) -> Indexed | None:
    """Return the records of an earlier command, if the shard still has its size."""
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
        with temporary_folder() as folder, suppress(ValueError):  # a damaged file is made again
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
    if shard.source.size(shard.name) not in (-1, sidecar["bytes"]):
        return None
    return Indexed(rows, sidecar, np.empty(0, np.uint64))


def _index_fetched(shard: Shard, source: Output | WebShards) -> Indexed:
    """Fetch a shard, scan and hash it, and publish its records; the sidecar marks completeness."""
    with temporary_folder() as folder:
        tar = source.fetch(shard.name, folder)
        with renamed_errors(str(source), folder):
            survey = survey_tar(tar, shard.layout)
        rows = index_rows(survey.samples)
        np.save(tar.with_suffix(".rows.npy"), rows)
        write_idx(tar, survey.samples)
        extra = _about(shard, survey)
        if (place := _elsewhere(shard)) is not None:
            extra["shards_at"] = place
        sidecar = info_file.write_sidecar(tar, len(survey.samples), **extra)
        for extension in (".rows.npy", ".idx", ".json"):
            shard.output.publish(tar.with_suffix(extension))
    return Indexed(rows, sidecar, key_hashes([sample.key for sample in survey.samples]))


OF_SAMPLES = ("members", "quarantined", "passed_over")
"""The keys of a sidecar about the samples in its tar."""


def _about(shard: Shard, survey: Survey) -> dict[str, Any]:
    """Return those of OF_SAMPLES that are not empty."""
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
        for key, name, offset, reason in survey.unfit
    ]
    about = (shard.layout.options(), quarantined, dict(sorted(survey.passed_over.items())))
    return {key: value for key, value in zip(OF_SAMPLES, about, strict=True) if value}


def _elsewhere(shard: Shard) -> str | None:
    """Return the place of the tar if it is not next to its index."""
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
