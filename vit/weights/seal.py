"""The hash of a file of weights in its own metadata, so that no flipped bit becomes other weights.

It is the sha256 of the complete file with zeros in its place. Other programs pass over it, as over
all metadata; files without it, of other programs or older runs, are not checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

SEAL = "sha256"
UNSEALED = "0" * 64
PIECE_BYTES = 2**24


def place_of_seal(header: bytes, digest: str = UNSEALED) -> int:
    """Return where in the file `digest` is; ValueError if the header does not have it."""
    return header.index(f'"{SEAL}":"{digest}"'.encode()) + len(SEAL) + 4


def is_intact(path: Path, metadata: Mapping[str, str]) -> bool:
    """Whether a safetensors file is what its metadata say; True where they say nothing."""
    seal = metadata.get(SEAL)
    if seal is None:
        return True
    with path.open("rb", buffering=0) as file:
        size = file.read(8)
        header = size + file.read(int.from_bytes(size, "little"))
        try:
            place = place_of_seal(header, seal)
        except ValueError:
            return False
        digest = hashlib.sha256(header[:place] + UNSEALED.encode() + header[place + len(seal) :])
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest() == seal
