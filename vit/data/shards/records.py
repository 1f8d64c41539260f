"""What may stand in `_info.json` and in sidecars, which people edit: types are looked at when they
are read. Free of torch.

The data's story: JSON comes in as a dictionary; a value of another type than the code reads is told
with its place, before it is used. Keys that are absent, and others than these, are left to who
reads them.
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
    """Raise ShardError naming the first value in the INFO or SIDECAR at `where` that is of another
    type than the code reads."""
    try:
        kind.validate_python(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
        ).removeprefix(".")
        expected = first["msg"].replace("Input should be", "expected")
        given = (
            f"is {str(first['input'])[:60]!r}, {expected}"
            if first["type"] != "missing"
            else "is missing"
        )
        raise ShardError(f"{where}: {place} {given}; restore it from its source") from error


def is_sidecar(content: Mapping[str, Any]) -> bool:
    """Whether a JSON file beside a tar is a sidecar of ours."""
    return {"filename", "num_samples", "bytes", "sha256"} <= content.keys()
