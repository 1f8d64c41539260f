"""Read samples from shards using only the standard library."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import NamedTuple


class Stored(NamedTuple):
    data: bytes
    label: int


def stored(root: Path, split: str) -> dict[str, Stored]:
    members: dict[str, bytes] = {}
    for path in root.glob(f"{split}-*.tar"):
        with tarfile.open(path) as tar:
            for member in tar:
                assert member.name not in members
                file = tar.extractfile(member)
                assert file is not None
                members[member.name] = file.read()
    return {
        name.removesuffix(".jpg"): Stored(data, int(members[name.replace(".jpg", ".cls")]))
        for name, data in members.items()
        if name.endswith(".jpg")
    }
