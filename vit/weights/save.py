"""Write tensors atomically to a safetensors file, and hash the file during writing.

    8 bytes        length of the header
    header         JSON: type, shape and data offsets of each tensor; and `__metadata__`
    data           tensors in little-endian order, without gaps

The safetensors package writes the same bytes in one call. However, a hash would then require
reading the file again, and a writer thread would hold the global interpreter lock (GIL). This
module writes the file in pieces, and releases the GIL while it hashes or writes a piece.

A sealed file stores its own hash in its metadata, so that a flipped bit is detected. The hash is
the sha256 of the complete file with zeros in place of the hash. Other programs ignore this
metadata. Files without a hash are not verified.
"""

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
"""The number of bytes hashed and written at a time, small enough for the CPU cache."""


def place_of_seal(header: bytes, digest: str = UNSEALED) -> int:
    """Return the file offset of `digest`. Raises ValueError if the header does not contain it."""
    return header.index(f'"{SEAL}":"{digest}"'.encode()) + len(SEAL) + 4


def is_intact(path: Path, metadata: Mapping[str, str]) -> bool:
    """Return whether a safetensors file matches the hash in its metadata; True without a hash."""
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
"""The names of single weights files in Hugging Face folders."""
ALIGNMENT = 8
"""The alignment of the data in bytes, so that tensors of any dtype can be memory-mapped."""

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
"""Maps the dtypes that weights and optimizers use to their safetensors names."""


class Written(NamedTuple):
    """The size and hash of a file written by `save_weights`."""

    num_bytes: int
    sha256: str
    """The hash of the file. If the file is sealed, the seal is replaced by zeros."""


def save_weights(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    is_sealed: bool = False,
) -> Written:
    """Write plain (unsharded) tensors and string metadata as safetensors.

    If writing fails, `path` keeps its old content. is_sealed: store the file's own hash in the
    metadata (see `vit.weights.save`).

    Raises:
        WeightsError: the file cannot be written, for example because the disk is full.
        TypeError: a tensor's type is not supported by the format, or metadata are not strings.
    """
    path = Path(path)
    # Write the largest dtypes first, so that each tensor begins at a multiple of its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    sealable = {**metadata, SEAL: UNSEALED} if is_sealed else metadata
    header = _header({name: tensors[name] for name in names}, sealable)

    digest = hashlib.sha256(header)
    num_bytes = len(header)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(header)
            for name in names:
                data = bytes_of(tensors[name]).numpy().data
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
    """Return the error for a weights file that could not be replaced."""
    return WeightsError(
        f"{path}: cannot be written ({error.strerror}); a previous file is unchanged: free some"
        " space or fix the permissions, and run the same command again"
    )


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes that precede the data, which are stored in the order of `tensors`."""
    if not all(isinstance(value, str) for value in metadata.values()):
        raise TypeError(f"metadata {metadata}: expected strings")

    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in TYPES:
            raise TypeError(
                f"{name} is {tensor.dtype}: expected one of {', '.join(map(str, TYPES))}"
            )
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }

    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order, (nbytes,) uint8 on the CPU.

    A contiguous CPU tensor shares its memory with the result.
    """
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
