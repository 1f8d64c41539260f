"""What files hold, in a few characters each: a comparison that fails names the files, and does not
print them. And images that were bad before they were indexed: their bytes are changed, and the
index says what they are now."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from vit.data.shards.split import Split
from vit.data.shards.tar import crc32c


def digest(content: bytes) -> str:
    """Different for different bytes."""
    return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()[:16]}"


def digests(folder: Path) -> dict[str, str]:
    """The digest of each file below `folder`, by its path there; "folder" of each folder."""
    return {
        str(path.relative_to(folder)): "folder" if path.is_dir() else digest(path.read_bytes())
        for path in folder.rglob("*")
    }


def indexed_as_it_is(split: Split, *samples: int) -> None:
    """Write the checksum of the bytes that samples have now into the index file, as if they had
    been so when it was made."""
    path = Path(split.root) / f"{split.name}.index.npy"
    rows = np.load(path)
    for sample in samples:
        with open(split.where(sample), "rb") as tar:
            tar.seek(int(rows["offset"][sample]))
            rows["crc32c"][sample] = crc32c(tar.read(int(rows["size"][sample])))
    with open(path, "r+b") as file:  # in place: a split that is open sees it
        file.seek(-rows.nbytes, 2)
        file.write(rows.tobytes())
