"""Compare files by short digests, so that a failed comparison prints file names instead of
contents.

The module can also simulate images that were already corrupt when their checksums were computed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from vit.data.shards.split import Split
from vit.data.shards.tar import crc32c


def digest(content: bytes) -> str:
    return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()[:16]}"


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): "folder" if path.is_dir() else digest(path.read_bytes())
        for path in folder.rglob("*")
    }


def indexed_as_it_is(split: Split, *samples: int) -> None:
    """Recompute the checksums in the index from the current bytes of the given samples."""
    path = Path(split.root) / f"{split.name}.index.npy"
    rows = np.load(path)
    for sample in samples:
        with open(split.where(sample), "rb") as tar:
            tar.seek(int(rows["offset"][sample]))
            rows["crc32c"][sample] = crc32c(tar.read(int(rows["size"][sample])))
    # Modify the file in place, because the split may already be open.
    with open(path, "r+b") as file:
        file.seek(-rows.nbytes, 2)
        file.write(rows.tobytes())
