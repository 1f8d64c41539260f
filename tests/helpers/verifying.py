"""Create datasets for the tests of `verify`, modify them, and parse the problems that `verify`
reports."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from data_prep import index
from data_prep.verify import main
from vit.data.shards.info_file import info_sha256

PER_CLASS = {"apple": 10, "pear": 11, "plum": 9}


def image_bytes(
    seed: int, format: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (32, 24)
) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(encoded, format)
    return encoded.getvalue()


def verify(root: Path, *flags: str) -> int:
    return main([str(root), "--workers", "1", *flags])


def edit(path: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    # Update the digest, as a person who edits the file on purpose would. In other tests, the digest
    # stays unchanged.
    if path.name == "_info.json" and "info_sha256" in content:
        content["info_sha256"] = info_sha256(content)
    path.write_text(json.dumps(content))


def edit_rows(path: Path, change: Callable[[np.ndarray], object]) -> None:
    rows = np.load(path)
    change(rows)
    np.save(path, rows)


def members_of(tar: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(tar) as opened:
        return opened.getmembers()


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def foreign(folder: Path, *shards: Sequence[tuple[str, bytes]], split: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    for number, members in enumerate(shards):
        write_tar(folder / f"{split}-{number:03d}.tar", members)
    assert index.main([str(folder), "--workers", "1"]) == 0
    return folder


def pair(key: str, data: bytes, label: int) -> list[tuple[str, bytes]]:
    return [(f"{key}.jpg", data), (f"{key}.cls", b"%d" % label)]


def problems_in(report: str) -> list[str]:
    return re.findall(
        r"(?m)^    (\S.*)$",
        report[report.index("PROBLEMS") : (report + "Notes").index("Notes")].split("\n\n")[0],
    )
