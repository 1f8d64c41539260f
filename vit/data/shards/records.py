"""Types of the fields in `_info.json` and in sidecars, which people may edit.

JSON is read as a dictionary; `check_types` names the place of a value of a type other than the code
expects. Missing keys and unknown keys are left to the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from vit.system.files import ShardError

Count = Annotated[int, Field(ge=0)]


class _Options(TypedDict, total=False):
    seed: int
    image: str | None
    label: str
    keys_with_dots: bool


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
    passed_over: dict[str, Count]


INFO = TypeAdapter(_Info)
SIDECAR = TypeAdapter(_Sidecar)


def check_types(content: Mapping[str, Any], kind: TypeAdapter[Any], where: Path | str) -> None:
    """Raise ShardError for the first value in `content` that is not of its type in `kind`.

    where: the file, to show.
    """
    try:
        kind.validate_python(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]]
        place = "".join(parts).removeprefix(".")
        expected = first["msg"].replace("Input should be", "expected")
        problem = f"is {str(first['input'])[:60]!r}, {expected}"
        if first["type"] == "missing":
            problem = "is missing"
        raise ShardError(f"{where}: {place} {problem}; restore it from its source") from error


def is_sidecar(content: Mapping[str, Any]) -> bool:
    """Return whether a JSON file next to a tar is a sidecar of ours."""
    return {"filename", "num_samples", "bytes", "sha256"} <= content.keys()
