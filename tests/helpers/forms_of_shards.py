"""Write shards in the formats of other tools."""

from __future__ import annotations

import io
import json
import shlex
import tarfile
from pathlib import Path

from PIL import Image

from data_prep.index import main
from vit.data.shards.members import SampleLayout

NAMES = ("tench", "cat", "dog", "crème brûlée", "hen of the woods")


def image(number: int, kind: str = "JPEG") -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (20 + number, 30), (10 * (number % 25), 100, 200)).save(encoded, kind)
    return encoded.getvalue()


def as_json(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def layout_of(flags: str) -> SampleLayout:
    arguments = shlex.split(flags)
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    return SampleLayout(
        options.get("--image"),
        options.get("--label", "cls"),
        class_names=NAMES if "--classes" in options else (),
    )


def write_tar(path: Path, samples: list[tuple[str, dict[str, bytes]]]) -> Path:
    """Write samples, each given as (key, {suffix: content}), to a tar file in the given order,
    using only the standard library."""
    with tarfile.open(path, "w") as tar:
        for key, members in samples:
            for suffix, data in members.items():
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def index(root: Path, flags: str = "") -> int:
    return main(
        [
            str(root),
            "--workers",
            "1",
            *shlex.split(flags.replace("names.txt", str(root / "names.txt"))),
        ]
    )
