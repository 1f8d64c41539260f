"""Images that were bad before they were indexed: their bytes are changed, and the index says what
they are now."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vit.data.shards.split import Split
from vit.data.shards.tar import crc32c


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
