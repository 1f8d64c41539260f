"""Write tensors as safetensors: completely or not at all, hashed while they are written.

    8 bytes        length of the header
    header         JSON: of each tensor its type, shape and place in the data; and `__metadata__`
    data           tensors in little-endian order, without gaps

The safetensors package makes the same file, but hands it over as a whole: hashing would read it
back, and a thread that writes would hold Python's lock. Here it goes out in pieces, and the lock is
free while a piece is hashed or written.

A sealed file has its own hash in its metadata, so that no flipped bit becomes other weights: the
sha256 of the complete file with zeros in the place of the hash. Other programs ignore it, as they
ignore all metadata; files without it are not checked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vit.system.files import WeightsError, flush, replacing

SEAL = "sha256"
UNSEALED = "0" * 64
PIECE_BYTES = 2**24
"""Written and hashed at a time; the hash reads it from the processor's cache or close to it."""


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


HUB_FILES = ("model.safetensors", "pytorch_model.bin")
"""Names of weights in a folder of the Hugging Face hub."""
ALIGNMENT = 8
"""The data begin at a multiple of it, so that readers can map any type in place."""
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of types that weights and optimizers have."""


class Written(NamedTuple):
    """What `save_weights` has written."""

    num_bytes: int
    sha256: str
    """Of the file; of a sealed one, as long as zeros were in the place of the seal."""


def save_weights(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    is_sealed: bool = False,
) -> Written:
    """Write plain (unsharded) tensors and string metadata as safetensors.

    `path` then has the complete file or, if this fails, what it had before. is_sealed: add the
    file's own hash to the metadata (`vit.weights.save`).

    Raises:
        WeightsError: no space, no permission.
        TypeError: a type or metadata that the format does not have.
    """
    path = Path(path)
    # Larger types first: each tensor then begins at a multiple of its type's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    facts = {**metadata, SEAL: UNSEALED} if is_sealed else metadata
    header = _header({name: tensors[name] for name in names}, facts)
    digest = hashlib.sha256(header)
    num_bytes = len(header)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(header)
            for name in names:
                data = _bytes_of(tensors[name])
                for begin in range(0, len(data), PIECE_BYTES):
                    piece = data[begin : begin + PIECE_BYTES]
                    digest.update(piece)
                    file.write(piece)
                num_bytes += len(data)
            if is_sealed:
                file.seek(place_of_seal(header))
                file.write(digest.hexdigest().encode())
        flush(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    return Written(num_bytes, digest.hexdigest())


def cannot_write(path: Path, error: OSError) -> WeightsError:
    """The error of a file in `weights/` that could not be replaced."""
    return WeightsError(
        f"{path}: cannot be written ({error.strerror}); what was there before is untouched: free"
        " some space or fix the permissions, and run the same command again"
    )


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the data of `tensors`, which lie in their order."""
    if not all(isinstance(value, str) for value in metadata.values()):
        raise TypeError(f"metadata {metadata}: expected strings")
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in TYPES:
            raise TypeError(
                f"{name} is {tensor.dtype}: expected one of {', '.join(map(str, TYPES))}"
            )
        begin = end
        end += tensor.nbytes
        shape = list(tensor.shape)
        entries[name] = {"dtype": TYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order; of one on a GPU, those of a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
