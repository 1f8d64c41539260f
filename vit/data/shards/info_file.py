"""Read and write `_info.json`, which describes a data set, and the sidecars of its shards.

A writer calls `write_sidecar` for each complete tar, and then `make_info`. A reader calls
`read_info`, which checks all values because users may edit the file, and then `describe_split`.
JSON is read as a dictionary. Callers handle missing and unknown keys.
"""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from vit.system.files import ShardError, read_json, sha256_of, unreadable, write_json
from vit.system.spelling import did_you_mean

FORMAT_VERSION = 1


# ---- the fields and their types ------------------------------------------------------------------

Count = Annotated[int, Field(ge=0)]


class _Options(TypedDict, total=False):
    seed: int
    image: str | None
    label: str
    keys_with_dots: bool
    apply_exif: bool


class _Split(TypedDict, total=False):
    num_samples: Count
    filenames: list[str]
    shard_lengths: list[Count]
    shard_bytes: list[Count | None] | None
    shard_sha256: list[str | None] | None


class _Info(TypedDict, total=False):
    format_version: int
    num_classes: Count | None
    class_names: list[str] | None
    splits: dict[str, _Split]
    options: _Options | None
    listed: dict[str, Count] | None
    shards_at: str


class _LeftOut(TypedDict):
    split: str
    key: str
    label: int | None
    tar_offset: NotRequired[Count]


class _Sidecar(TypedDict, total=False):
    filename: str
    num_samples: Count
    bytes: Count
    sha256: str | None
    members: _Options
    quarantined: list[_LeftOut]
    changed: dict[str, Count]
    ignored: dict[str, Count]


INFO = TypeAdapter(_Info)
SIDECAR = TypeAdapter(_Sidecar)


def check_types(content: Mapping[str, Any], kind: TypeAdapter[Any], path: Path | str) -> None:
    """Raise ShardError for the first value in `content` whose type does not match `kind`.

    path: the file that contains `content`, named in the message.
    """
    try:
        kind.validate_python(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        expected = first["msg"].replace("Input should be", "expected")
        raise ShardError(
            f"{path}: {place} is {str(first['input'])[:60]!r}, {expected}; restore it from its"
            " source"
        ) from error


def is_sidecar(content: Mapping[str, Any]) -> bool:
    """Return whether a JSON file with this content is a sidecar."""
    return {"filename", "num_samples", "bytes", "sha256"} <= content.keys()


# ---- writing and reading -------------------------------------------------------------------------


def write_sidecar(
    tar: Path, num_samples: int, sha256: str | None = None, **extra: object
) -> dict[str, Any]:
    """Write and return the sidecar of a complete tar.

    sha256: hash of the tar; if omitted, the tar is read again to compute it.
    """
    sidecar = {
        "filename": tar.name,
        "num_samples": num_samples,
        "bytes": tar.stat().st_size,
        "sha256": sha256 or sha256_of(tar),
        **extra,
    }
    write_json(tar.with_suffix(".json"), sidecar)
    return sidecar


def read_sidecar(tar: Path) -> dict[str, Any] | None:
    """Return the sidecar of `tar`, or None. Raises ShardError if the file is not a sidecar."""
    path = tar.with_suffix(".json")
    sidecar = read_json(path)
    if sidecar is not None and not is_sidecar(sidecar):
        raise ShardError(f"{path}: has the name of a shard's sidecar, but is not one: move it away")
    check_types(sidecar or {}, SIDECAR, path)
    return sidecar


def make_info(
    splits: Mapping[str, list[str]],
    sidecars: Mapping[str, Mapping[str, Any]],
    *,
    source: str,
    options: dict[str, Any],
    class_names: list[str],
    num_classes: int,
    **extra: object,
) -> dict[str, Any]:
    """Return the content of `_info.json`.

    Args:
        splits: The shard file names of each split, in order.
        sidecars: Maps file names to sidecars.
        source, options: The origin of the data, which is recorded without checks.
        class_names: The name of each label, or [] if unknown.
    """
    # Identical data sets must give identical files, so keep the order of keys.
    described = {}
    for split, names in splits.items():
        lengths = [sidecars[name]["num_samples"] for name in names]
        described[split] = {
            "name": split,
            "num_samples": sum(lengths),
            "filenames": names,
            "shard_lengths": lengths,
            "shard_bytes": [sidecars[name]["bytes"] for name in names],
            "shard_sha256": [sidecars[name]["sha256"] for name in names],
            "sidecars_sha256": sidecars_sha256(sidecars[name] for name in names),
        }

    info = {
        "format_version": FORMAT_VERSION,
        "source": source,
        "options": options,
        **extra,
        "num_classes": num_classes,
        "class_names": class_names,
        "splits": described,
    }
    return info | {"info_sha256": info_sha256(info)}


def info_sha256(info: Mapping[str, Any]) -> str:
    """Return the hash of `_info.json` without the key `info_sha256`, which stores this hash."""
    return _content_sha256({key: value for key, value in info.items() if key != "info_sha256"})


def sidecars_sha256(sidecars: Iterable[Mapping[str, Any]]) -> str:
    """Return the hash of a split's sidecars, ignoring the locations and times of the tars."""
    return _content_sha256(
        [
            {key: value for key, value in sidecar.items() if key not in ("mtime_ns", "shards_at")}
            for sidecar in sidecars
        ]
    )


def _content_sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_info(root: Path | str) -> dict[str, Any]:
    """Read `<root>/_info.json`.

    Raises ShardError if the file is missing, damaged, or has a later format version.
    """
    root = Path(root)
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        raise ShardError(
            f"{root}: no such directory; expected a folder of shards (`python -m data_prep` lists"
            f" the commands that make them)"
        ) from None
    except OSError as error:
        raise unreadable(root, error) from error

    info = read_json(root / "_info.json")
    if info is not None:
        return check_info(info, root)

    quoted = shlex.quote(str(root))
    if any(name.endswith(".tar") for name in names):
        raise ShardError(
            f"{root}: no _info.json; if the shards are complete, run `python -m data_prep.index"
            f" {quoted}`, otherwise rerun the command that writes them"
        )
    # data_prep refuses to write shards next to the images, so suggest another folder.
    out = shlex.quote(f"{root}_shards")
    raise ShardError(
        f"{root}: no _info.json and no shards; if the folder contains one folder of images per"
        f" class, make shards with `python -m data_prep.imagefolder {quoted} --out {out}`"
    )


def check_info(info: dict[str, Any], root: Path | str) -> dict[str, Any]:
    """Return `info` unchanged. Raises ShardError, which names `root`, if `info` is invalid."""
    place = f"{root}/_info.json"
    if not isinstance(info.get("splits"), dict) or not info["splits"]:
        raise ShardError(
            f"{place}: has no `splits`; move it away and run `python -m data_prep.index"
            f" {shlex.quote(str(root))}`"
        )

    check_types(info, INFO, place)
    version = info.get("format_version", FORMAT_VERSION)
    if version > FORMAT_VERSION:
        raise ShardError(
            f"{place}: has format_version {version}, but this release reads only up to"
            f" {FORMAT_VERSION}; update the code"
        )
    return info


class SplitInfo(NamedTuple):
    """The shards of a split according to `_info.json`. Each list has one item per shard, or is None
    if unknown."""

    filenames: list[str]
    lengths: list[int]
    sizes: list[int | None]
    sha256: list[str | None]


def describe_split(info: Mapping[str, Any], split: str, root: str) -> SplitInfo:
    """Return the description of a split of the data set at `root`. Raises ShardError."""
    if split not in info["splits"]:
        advice = (
            ": write one with a larger --val-fraction, or use a part of the training images:"
            " data.val_split='train[90%:]' data.train_split='train[:90%]'"
        )
        hint = did_you_mean(split, info["splits"]) or (advice if split == "val" else "")
        raise ShardError(f"{root}: has no split {split!r}, only {', '.join(info['splits'])}{hint}")

    entry = info["splits"][split]
    place = f"{root}/_info.json, split {split!r}"
    missing = [key for key in ("filenames", "shard_lengths", "num_samples") if key not in entry]
    if missing:
        raise ShardError(
            f"{place}: has no {', '.join(missing)}; move it away and run `python -m data_prep.index"
            f" {root}`"
        )
    invalid_names = [name for name in entry["filenames"] if not re.fullmatch(r"[^/]+\.tar", name)]
    if invalid_names:
        raise ShardError(
            f"{place}: {', '.join(invalid_names)}: expected names of tars in the same folder;"
            " restore the file from its source"
        )

    unknown: list[Any] = [None] * len(entry["filenames"])
    shards = SplitInfo(
        entry["filenames"],
        entry["shard_lengths"],
        entry.get("shard_bytes") or unknown,
        entry.get("shard_sha256") or unknown,
    )
    num_shards = {len(column) for column in shards}
    is_consistent = len(num_shards) == 1 and sum(shards.lengths) == entry["num_samples"]
    if not is_consistent or not shards.filenames:
        raise ShardError(
            f"{place}: {len(shards.filenames)} filenames, {len(shards.lengths)} shard_lengths (sum"
            f" {sum(shards.lengths)}), {len(shards.sizes)} shard_bytes and num_samples"
            f" {entry['num_samples']} contradict each other; restore the file from its source"
        )

    return shards
