"""Locate shards that other programs wrote, and compute their records and index rows.

A local shard is scanned and hashed in place. A shard at a URL is downloaded completely, unless an
earlier command wrote its records. The sidecar is written last and lists the invalid samples, which
the index omits. It also records an unusual sample layout and the tar's modification time.
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

from data_prep.errors import PrepError
from data_prep.read.download import WebShards
from data_prep.read.split_names import SPLIT_WORDS
from data_prep.write.output import Output, temporary_folder
from data_prep.write.samples import key_hashes
from vit.data.shards import info_file
from vit.data.shards.index_file import first_samples, open_index
from vit.data.shards.members import SampleLayout
from vit.data.shards.tar import INDEX_DTYPE, Survey, idx_lines, index_rows, survey_tar, write_idx
from vit.system.files import ShardError, sha256_of
from vit.system.redact import shown
from vit.system.spelling import few
from vit.system.urls import bare, expand_braces, on_the_web, resolve

COMPRESSED_TAR = re.compile(r"\.(tar\.(gz|bz2|xz|zst)|tgz)$")
TAR_URL = re.compile(r"(?P<folder>[^?]*://[^?]*)/(?P<name>[^/?]+\.tar)(?P<query>\?.*)?")
"""Matches the URL of a tar. Its query, such as an access token, is kept for the folder."""


def split_of(filename: str) -> str | None:
    """Return the split named in a shard's file name: a common split name between hyphens, or
    otherwise the text before the number."""
    *parts, number = filename.removesuffix(".tar").split("-")
    usual = [part for part in parts if part.lower() in SPLIT_WORDS]
    if usual:
        return usual[0]
    has_split = parts and number.isdecimal() and parts[-1].isalpha()
    return parts[-1] if has_split else None


def group_by_split(files: list[str], root: str, split: str | None = None) -> dict[str, list[str]]:
    """Group the sorted tar names by split. If `split` is given, it contains all tars.

    Raises PrepError if there are no tars, or if a name has no split.
    """
    names = sorted({name for name in files if name.endswith(".tar")})
    if not names:
        compressed = [name for name in files if COMPRESSED_TAR.search(name)]
        if compressed:
            raise PrepError(
                f"{root}: contains only compressed tars ({few(compressed)}), which do not allow"
                " random access: decompress them first (gunzip, bunzip2, unxz, unzstd)"
            )
        folders = few(sorted({path.parent.name for path in Path(root).glob("*/*.tar")}))
        inside = f", only in its subfolders {folders}: move or link them into this folder"
        raise PrepError(
            f"{root}: found no .tar files{inside if folders else ''}; expected <split>-00000.tar or"
            " <anything>-<split>-00000.tar"
        )

    split_of_name = {name: split_of(name) or split for name in names}
    unclear = [name for name in names if split_of_name[name] is None]
    if unclear:
        raise PrepError(
            f"{root}: the names {few(unclear)} contain no split: use --split train if all shards"
            " belong to that split (as in img2dataset's 00000.tar), rename the shards to"
            " <split>-00000.tar, or move other files away. If each tar contains the images of one"
            " class, use `python -m data_prep.imagefolder`"
        )

    different = [name for name in names if split not in (None, split_of_name[name])]
    if different:
        raise PrepError(
            f"{root}: --split is {split}, but these file names belong to another split:"
            f" {few(different)}"
        )

    splits: dict[str, list[str]] = {}
    for name, split_in_name in split_of_name.items():
        splits.setdefault(str(split_in_name), []).append(name)
    return splits


def locate(roots: list[str]) -> tuple[Output | WebShards, list[str] | None]:
    """Return the location of the shards, and the tar names if `roots` are tar URLs.

    Raises PrepError for several folders, and for a folder together with tar URLs.
    """
    urls: list[str] = []
    for root in roots:
        urls += expand_braces(resolve(root)) if "://" in root else [root]
    location_type = WebShards if on_the_web(urls[0]) else Output
    if len(urls) == 1 and not TAR_URL.fullmatch(urls[0]):
        return location_type(urls[0]), None

    tars = []
    strange: dict[str, str] = {}  # maps URLs of no tar to what to show of them
    for url in urls:
        tar = TAR_URL.fullmatch(url)
        if tar:
            tars.append(tar)
        else:
            strange[url] = shown(url)

    if strange:
        raise PrepError(
            f"{few(list(strange.values()))}: expected a single folder, or shard URLs ending in .tar"
        )
    folders = {tar["folder"] + (tar["query"] or "") for tar in tars}
    if len(folders) > 1:
        raise PrepError(
            f"the shards are in several folders ({few(sorted(map(shown, folders)))}): index each"
            " folder separately"
        )
    return location_type(folders.pop()), [tar["name"] for tar in tars]


def choose_output(source: Output | WebShards, out: str | None) -> Output:
    """Return a writable output location for the index. Raises PrepError if there is none."""
    if isinstance(source, Output) and source.local is not None:
        if out is not None:
            raise PrepError(
                f"--out {out} is for shards at a URL; the index of a folder ({source}) is written"
                " next to its shards: remove --out"
            )
        if not source.local.is_dir():
            problem = "not a folder" if source.local.exists() else "no such folder"
            raise PrepError(f"{source}: {problem}; expected a folder of tar shards, or URLs")
        return source

    if out is None:
        if isinstance(source, WebShards):
            raise PrepError(
                f"{source}: the index cannot be written next to shards at a URL: pass a folder with"
                " --out"
            )
        _make(
            source, ". For shards without write permission, pass a folder for the index with --out"
        )
        return source

    output = Output(out)
    _make(output)
    tars = sorted(fnmatch.filter(output.sizes(), "*.tar"))
    if tars:
        raise PrepError(
            f"{output}: contains shards ({few(tars)}): choose an empty folder for the index of"
            f" {source}"
        )
    return output


def _make(output: Output, hint: str = "") -> None:
    """Create a folder for the index. hint: text to add to the error message if this fails."""
    try:
        output.make()
    except (PrepError, ShardError) as error:
        raise PrepError(f"{error}{hint}") from error


class Infos(NamedTuple):
    """The `_info.json` next to the shards and the one in the output (maybe the same file)."""

    given: dict[str, Any] | None
    """None as well if the shards were listed one by one."""
    own: dict[str, Any] | None


def read_infos(source: Output | WebShards, output: Output, listed: bool) -> Infos:
    """Read the existing `_info.json` files. listed: whether the shards were listed one by one."""
    for place in (source, output):
        is_incomplete = (
            isinstance(place, Output)
            and place.read_json("_writing.json")
            and not place.read_json("_info.json")
        )
        if is_incomplete:
            raise PrepError(
                f"{place}: this data set is incomplete: rerun the command that writes it"
            )

    own_info = _info(output)
    if output is source:
        return Infos(own_info, own_info)

    given_info = None if listed else _info(source)
    has_unknown_shards = given_info is None and not listed
    if has_unknown_shards and isinstance(source, WebShards):
        raise PrepError(
            f"{source}: no _info.json, and web servers cannot list files: pass the shard URLs, as"
            f" in '{source}/train-{{0000..0099}}.tar'"
        )
    if own_info is not None and bare(own_info.get("shards_at", "")) != bare(str(source)):
        raise PrepError(
            f"{output}: contains the index of {own_info.get('shards_at', 'other shards')}, not of"
            f" {source}: choose another --out"
        )
    return Infos(given_info, own_info)


def _info(place: Output | WebShards) -> dict[str, Any] | None:
    """Return the `_info.json` of a location, or None if it is missing. Raises ShardError."""
    info = place.read_json("_info.json")
    if info is not None:
        info_file.check_info(info, str(place))
        for split in info["splits"]:
            info_file.describe_split(info, split, str(place))
    return info


def tars_by_split(info: dict[str, Any]) -> dict[str, list[str]]:
    """Return the shard file names of each split in an `_info.json`."""
    return {name: list(described["filenames"]) for name, described in info["splits"].items()}


def check_present(source: Output | WebShards, tars: list[str]) -> None:
    """Raise PrepError if shards are missing. Shards on the web are not checked."""
    if isinstance(source, Output):
        sizes = source.sizes()
        missing = [name for name in tars if name not in sizes and source.size(name) < 0]
        if missing:
            raise PrepError(
                f"{source}: these shards are missing: {few(missing)}; copy them again, or correct"
                " the list"
            )


def known_rows(output: Output, info: dict[str, Any] | None) -> dict[str, np.ndarray]:
    """Return each shard's rows, as recorded in a previous index."""
    rows_of: dict[str, np.ndarray] = {}
    for split, described in (info or {"splits": {}})["splits"].items():
        if output.size(f"{split}.index.npy") > 0:
            # A damaged index is rebuilt.
            with temporary_folder() as folder, suppress(ValueError):
                path = output.fetch(f"{split}.index.npy", folder)
                rows_of |= _cut_by_shard(open_index(path), described)
    return rows_of


def _cut_by_shard(rows: np.ndarray, described: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return a copy of each shard's rows, or {} if the number of rows is wrong."""
    firsts = first_samples(described["shard_lengths"])
    if len(rows) != firsts[-1]:
        return {}
    ranges = zip(described["filenames"], itertools.pairwise(firsts), strict=True)
    return {name: np.array(rows[start:stop]) for name, (start, stop) in ranges}


def compare_shards(output: Output, info: dict[str, Any], indexed: dict[str, Indexed]) -> None:
    """Raise a PrepError that lists all shards whose length, size or sha256 differs from `info`."""
    problems = []
    for split in info["splits"]:
        for name, *recorded in zip(
            *info_file.describe_split(info, split, str(output)), strict=True
        ):
            rows, sidecar, _ = indexed[name]
            actual = [len(rows), sidecar["bytes"], sidecar["sha256"]]
            # None means that no value is recorded.
            if any(old not in (None, new) for old, new in zip(recorded, actual, strict=True)):
                problems.append(
                    f"{name} has {actual[0]} valid samples, {actual[1]} bytes and the sha256"
                    f" {actual[2]}, but _info.json records {', '.join(map(str, recorded))}"
                )

    if problems:
        raise PrepError(
            f"{output}: {'; '.join(problems)}. If the tars are right, move _info.json away and run"
            " this command again"
        )


def choose_classes(
    info: dict[str, Any] | None, class_names: list[str], indexed: dict[str, Indexed]
) -> dict[str, Any]:
    """Return class_names and num_classes, taken from an existing `_info.json` if it has them.

    Raises PrepError if a label exceeds the number of classes.
    """
    largest, name = max((int(each.rows["label"].max()), name) for name, each in indexed.items())
    num_classes = len(class_names) or (info or {}).get("num_classes")
    if class_names and largest >= len(class_names):
        raise PrepError(
            f"labels go up to {largest} (in {name}), but there are only {len(class_names):,} class"
            f" names, for labels 0 to {len(class_names) - 1}: name all classes in label order"
        )

    num_samples = sum(len(each.rows) for each in indexed.values())
    if num_classes is None and largest >= num_samples:
        raise PrepError(
            f"label {largest:,} (in {name}) would require {largest + 1:,} classes for"
            f" {num_samples:,} samples: correct the label, select another member (--label), or name"
            " all classes (--classes FILE)"
        )

    return {"class_names": class_names, "num_classes": num_classes or largest + 1}


# ---- one shard, in a worker process --------------------------------------------------------------


class IndexedShard(NamedTuple):
    source: Output | WebShards
    output: Output
    name: str
    split: str
    layout: SampleLayout
    rows: np.ndarray | None = None
    """The shard's rows in a previous index."""


class Indexed(NamedTuple):
    rows: np.ndarray
    sidecar: dict[str, Any]
    keys: np.ndarray
    """The hashes of the keys, (num_samples,) uint64, or (0,) if an earlier command read the
    shard."""


def index_shard(shard: IndexedShard) -> Indexed:
    """Index a shard. Write its `.idx` and sidecar if needed."""
    if isinstance(shard.source, Output) and shard.source.local is not None:
        return _index_in_place(shard, shard.source.local / shard.name)
    return _indexed_before(shard) or _index_fetched(shard, shard.source)


def _index_in_place(shard: IndexedShard, tar: Path) -> Indexed:
    """Index a local shard, and write missing or wrong `.idx` and sidecar files.

    An existing sidecar is valid while the tar's size and modification time are unchanged.
    """
    survey = survey_tar(tar, shard.layout)
    status = tar.stat()
    about = _about(shard, survey)
    sidecar = info_file.read_sidecar(tar) or {}

    idx = tar.with_suffix(".idx")
    if not idx.exists() or idx.read_bytes() != b"".join(idx_lines(survey.samples)):
        write_idx(tar, survey.samples)

    # Sidecars from this project's writer contain no modification time, because their bytes must
    # depend only on the data.
    of_writer = "plan" in sidecar
    has_same_samples = of_writer or about == {
        key: sidecar[key] for key in OF_SAMPLES if key in sidecar
    }
    is_current = (
        has_same_samples
        and sidecar.get("bytes") == status.st_size
        and sidecar.get("mtime_ns") == status.st_mtime_ns
    )
    if not is_current:
        sha256 = sha256_of(tar)
        if not (of_writer and sidecar["sha256"] == sha256):
            sidecar = info_file.write_sidecar(
                tar, len(survey.samples), sha256, mtime_ns=status.st_mtime_ns, **about
            )

    return Indexed(index_rows(survey.samples), sidecar, key_hashes([s.key for s in survey.samples]))


def _indexed_before(shard: IndexedShard) -> Indexed | None:
    """Return the records that an earlier command wrote, if the shard's size is unchanged."""
    name = stem(shard.name)
    sidecar = shard.output.read_json(f"{name}.json")
    if sidecar is None:
        return None
    if sidecar.get("filename") != shard.name or not info_file.is_sidecar(sidecar):
        raise ShardError(
            f"{shard.output}/{name}.json: not a sidecar written by this package: move it away, or"
            " choose another --out"
        )
    info_file.check_types(sidecar, info_file.SIDECAR, f"{shard.output}/{name}.json")

    rows = shard.rows
    if rows is None and shard.output.size(f"{name}.rows.npy") > 0:
        with temporary_folder() as folder, suppress(ValueError):  # A damaged file is rebuilt.
            rows = np.array(open_index(shard.output.fetch(f"{name}.rows.npy", folder)))

    if rows is None:
        return None
    is_current = (
        rows.dtype == INDEX_DTYPE
        and len(rows) == sidecar["num_samples"]
        and sidecar.get("members", {}) == shard.layout.options()
        and sidecar.get("shards_at") == _elsewhere(shard)
        and shard.source.size(shard.name) in (-1, sidecar["bytes"])
    )
    return Indexed(rows, sidecar, np.empty(0, np.uint64)) if is_current else None


def _index_fetched(shard: IndexedShard, source: Output | WebShards) -> Indexed:
    """Download, scan and hash a shard, and publish its records, with the sidecar last."""
    with temporary_folder() as folder:
        tar = source.fetch(shard.name, folder)
        with renamed_errors(str(source), folder):
            survey = survey_tar(tar, shard.layout)

        rows = index_rows(survey.samples)
        np.save(tar.with_suffix(".rows.npy"), rows)
        write_idx(tar, survey.samples)
        sidecar = info_file.write_sidecar(tar, len(survey.samples), **_about(shard, survey))
        for extension in (".rows.npy", ".idx", ".json"):
            shard.output.publish(tar.with_suffix(extension))

    return Indexed(rows, sidecar, key_hashes([sample.key for sample in survey.samples]))


OF_SAMPLES = ("members", "quarantined", "ignored", "shards_at")
"""The sidecar keys that describe the samples in a tar and the tar's location."""


def _about(shard: IndexedShard, survey: Survey) -> dict[str, Any]:
    """Return the nonempty values for the keys in OF_SAMPLES."""
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

    values = {
        "members": shard.layout.options(),
        "quarantined": quarantined,
        "ignored": dict(sorted(survey.ignored.items())),
        "shards_at": _elsewhere(shard),
    }
    return {key: value for key, value in values.items() if value}


def _elsewhere(shard: IndexedShard) -> str | None:
    """Return the location of the tar, or None if the tar is next to its index."""
    return None if str(shard.source) == str(shard.output) else bare(str(shard.source))


@contextmanager
def renamed_errors(place: str, folder: Path) -> Iterator[None]:
    """Replace the temporary folder with the original location in the message of a ShardError."""
    try:
        yield
    except ShardError as error:
        raise ShardError(str(error).replace(str(folder), place)) from error


def stem(name: str) -> str:
    return name.removesuffix(".tar")
