"""Read a weights file of any supported format into tensors, keyed by name.

The content, not the file name, determines the format. Code in a file is never executed.

    one file        safetensors, torch's zip or older pickle, numpy's .npz           `_open`
    several files   the parts that Hugging Face's `*.index.json` lists               `_open_parts`
        -> take the weights, averaged if possible, out of their container            `_unpack`
        -> remove the prefixes of wrappers (`module.`, `_orig_mod.`)                 `renamed`
        -> `Content`, whose names vit/weights/layouts.py converts to this project's
"""

import argparse
import json
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vit.system.files import WeightsError
from vit.system.spelling import few
from vit.weights.save import HUB_FILES, SEAL, is_intact

CONTAINERS = (
    "state_dict_ema",
    "model_ema",
    "ema",
    "swa_model",
    "swa_state_dict",
    "state_dict",
    "model",
    "teacher",
    "target_encoder",
)
"""The keys under which training programs store weights (timm, DeiT, MAE, DINO, I-JEPA). The first
existing key is used, so averaged weights are preferred, as in timm. A file without these keys may
have one other dict of weights, such as `model_state_dict` or `net`."""
PARTS_FILES = tuple(f"{name}.index.json" for name in HUB_FILES)
"""The index file names of Hugging Face folders with several weights files."""
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""The name parts that DDP, torch.compile, FSDP1 and activation checkpointing insert into parameter
names."""
HEAD_BYTES = 64
"""The number of bytes at the start of a file that determine its format."""
NUMBER_KINDS = "fiub"
"""numpy's codes for floats, integers, unsigned integers and booleans."""
KINDS = "safetensors, a file of torch.save (.pth, .pt, .bin), .npz, or an .index.json of parts"
OTHER_KINDS = {
    b"<": "a web page (HTML), perhaps the answer to a download that needs a login or a click:"
    " download it again",
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself: run `git lfs pull`",
    b"\x89HDF": "HDF5, in which Keras keeps weights: save them as .npz or safetensors",
    b"GGUF": "GGUF: use the safetensors file that it was made from",
    b"\x08": "perhaps ONNX, whose weights have no names to match: use what it was exported from",
}
"""Maps the first bytes of files that users mistake for weights to a description with a remedy."""


@contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert an OSError inside the block, such as a missing permission, to a WeightsError."""
    try:
        yield
    except OSError as error:
        raise WeightsError(
            f"{error.filename or path}: cannot be read ({error.strerror}): fix its permissions, or"
            " use another file"
        ) from error


@dataclass
class Content:
    """The content of a weights file."""

    tensors: dict[str, Tensor]
    """Tensors on the CPU, keyed by name, memory-mapped if the format allows it."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Metadata of a safetensors file; {} for other formats."""
    notes: list[str] = field(default_factory=list)
    """One sentence for each choice or omission made during reading."""
    arch: str = ""
    """The model name that the training program stored in the file, or ""."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The command line that the training program stored in the file (timm, DeiT, MAE)."""


def read_content(path: str | os.PathLike[str]) -> Content:
    """Return the weights in a file, or in all files that an index lists.

    A pickle may contain only tensors, plain values and `argparse.Namespace`, which MAE, DeiT and
    timm use to store their command lines.

    Raises:
        WeightsError: the file does not exist, is damaged, has no weights, or contains pickled
            objects.
    """
    path = Path(path)
    with readable(path):
        if not path.is_file():
            raise WeightsError(
                f"{path} {_instead_of_a_file(path)}: expected a weights file or a run folder"
            )
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)

    if path.name.endswith(".index.json"):
        return _open_parts(path)
    opened, metadata = _open(path, head)
    unpacked, notes = _unpack(opened, path)
    tensors = renamed(unpacked, _without_wrappers, path)
    notes += _remove_counts(tensors)

    options = _stored_options(opened)
    names = [name for name in (options.get("model"), opened.get("arch")) if isinstance(name, str)]
    return Content(tensors, metadata, notes, names[0] if names else "", options)


def _instead_of_a_file(path: Path) -> str:
    """Return a phrase for messages about `path`, which is not a regular file."""
    if path.is_dir():
        return "is a folder"
    if path.exists():
        return "is not a regular file"  # reading a pipe would block
    return "is a broken link" if path.is_symlink() else "does not exist"


def _open(path: Path, head: bytes) -> tuple[Any, dict[str, str]]:
    """Return the unpickled or parsed content, and the metadata of a safetensors file."""
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**32:
        return _open_safetensors(path)
    if head.startswith(b"PK"):
        return _open_zip(path), {}

    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    # A pickle may begin with any byte, but torch.save always writes the protocol first.
    if not head.startswith(b"\x80"):
        kind = next((kind for start, kind in OTHER_KINDS.items() if text.startswith(start)), "")
        if not kind and path.suffix == ".safetensors":
            return _open_safetensors(path)  # raises an error with the library's reason
        if not head:
            raise WeightsError(
                f"{path} is truncated or not a checkpoint (it is empty): copy it again"
            )
        if not kind:
            raise WeightsError(
                f"{path} is truncated or not a checkpoint (it begins with {head[:8]!r}): expected"
                f" {KINDS}"
            )
        raise WeightsError(f"{path} is not a checkpoint but {kind}")

    # the format of torch before version 1.6, in a pickle whose second byte is its protocol
    return _open_torch(path, mapped=False, protocol=int.from_bytes(head[1:2])), {}


def _open_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata, and check the file's hash if the file contains one."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise WeightsError(
            f"{path} is truncated or not a safetensors file ({error}): copy it again"
        ) from error

    if not is_intact(path, metadata):
        raise WeightsError(
            f"{path}: its content does not match the sha256 in its metadata: copy it again or use"
            " another checkpoint. If another program changed the file, save it without 'sha256' in"
            " the metadata"
        )
    metadata.pop(SEAL, None)  # The hash applies only to this file, not to files written later.
    return tensors, metadata


def _open_zip(path: Path) -> Any:
    """Return the content of a zip file: numpy arrays, or torch's `data.pkl`."""
    try:
        with zipfile.ZipFile(path) as file:
            names = file.namelist()
    except (zipfile.BadZipFile, OSError):
        raise WeightsError(
            f"{path} is truncated or not a checkpoint (a zip without its table of contents): copy"
            " it again"
        ) from None

    if names and all(name.endswith(".npy") for name in names):
        return _open_npz(path)
    if any(name.endswith("/constants.pkl") for name in names):
        raise WeightsError(
            f"{path} is a TorchScript program, which this project does not run: load it with"
            " torch.jit.load and save its state_dict() with torch.save"
        )
    if not any(name.endswith("/data.pkl") for name in names):
        members = few(names) if names else "nothing"
        raise WeightsError(f"{path} is not a checkpoint but a zip of {members}: expected {KINDS}")
    return _open_torch(path, mapped=True)


def _open_npz(path: Path) -> dict[str, Tensor]:
    """Return the arrays of numbers as tensors. All other arrays are ignored."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, zipfile.BadZipFile, OSError, EOFError, KeyError) as error:
        if isinstance(error, ValueError) and "allow_pickle" in str(error):
            raise WeightsError(
                f"{path} is refused, because it contains pickled objects (numpy's object arrays),"
                " which can run code: save only arrays of numbers"
            ) from error
        raise WeightsError(f"{path} is truncated or damaged ({error}): copy it again") from error

    tensors = {}
    for name, array in arrays.items():
        # numpy has no bfloat16, so files from JAX store it as raw items of two bytes.
        if array.dtype.kind == "V" and array.dtype.itemsize == 2:
            tensors[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        elif array.dtype.kind in NUMBER_KINDS:
            tensors[name] = torch.from_numpy(array)
    return tensors


def _open_torch(path: Path, mapped: bool, protocol: int = 2) -> Any:
    """Open a file of `torch.save` without running code in it. protocol: its pickle protocol."""
    # torch.load would choose the format by the suffix ".safetensors". Passing the open file
    # prevents that, but an open file cannot be memory-mapped.
    misnamed = path.suffix == ".safetensors"
    try:
        with (
            torch.serialization.safe_globals([argparse.Namespace]),
            path.open("rb") as file,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # warnings about rejected or harmless content
            return torch.load(
                file if misnamed else path,
                map_location="cpu",
                weights_only=True,
                mmap=mapped and not misnamed,
            )
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        LookupError,
        AttributeError,
    ) as error:  # Damaged files can raise any of these errors.
        raise WeightsError(f"{path} is {_why_not_opened(error, protocol)}") from error


def _why_not_opened(error: Exception, protocol: int) -> str:
    """Complete the message "PATH is ..." for an error from torch.load: unsafe or damaged content.

    protocol: the pickle protocol of the file.
    """
    if isinstance(error, pickle.UnpicklingError):
        refused_class = re.search(r"GLOBAL ([\w.]+)", str(error))
        if refused_class:
            return (
                f"refused, because it contains pickled objects ({refused_class[1]}), which can run"
                " code: if you trust it, open it with torch.load(weights_only=False) and save only"
                " its state dict"
            )
        if 2 < protocol <= pickle.HIGHEST_PROTOCOL:
            return (
                f"refused, because it is a pickle of protocol {protocol}, which can run code: if"
                " you trust it, open it with Python's pickle and save its tensors with torch.save"
                " or as safetensors"
            )
        reason = "not a pickle"  # torch's message recommends an unsafe option
    else:
        # Keep only the first sentence of torch's message, because the others are for developers.
        reason = (str(error).splitlines() or [""])[0].partition(". ")[0][:200]

    return f"truncated or not a checkpoint ({type(error).__name__}: {reason}): copy it again"


def _open_parts(index: Path) -> Content:
    """Return the weights in all files that Hugging Face's `index` lists."""
    try:
        file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(file_of.values()))
        # The index is untrusted, so its file names must not lead out of the folder.
        outside = [file for file in files if Path(file).name != file]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise WeightsError(f"{index} is not an index of sharded weights: copy it again") from None

    if outside:
        raise WeightsError(
            f"{index} is refused, because it lists files outside its folder ({few(outside)})"
        )
    missing = [file for file in files if not (index.parent / file).is_file()]
    if missing:
        raise WeightsError(
            f"{index} lists {len(files)} parts, but {few(missing)} are missing: copy them"
        )

    parts = [read_content(index.parent / file) for file in files]
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    lacking = [name for name in file_of if name not in tensors]
    if lacking:
        raise WeightsError(
            f"{index} lists {len(file_of)} weights, but its parts do not contain {few(lacking)}:"
            " copy the index and the parts again"
        )

    notes = [f"read from {len(files)} parts", *(note for part in parts for note in part.notes)]
    return Content(tensors, parts[0].metadata, notes)


def _unpack(content: object, path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors in `content`, extracted from nested containers, and notes on ignored ones.

    A container is a dict under one of the keys `CONTAINERS`, or else the only dict of weights.
    """
    notes = []
    while isinstance(content, dict):
        known = [name for name in CONTAINERS if isinstance(content.get(name), dict)]
        others = [name for name, value in content.items() if _has_matrices(value)]
        if not known and len(others) != 1:
            break

        used, *ignored = dict.fromkeys(known + others)
        if ignored:
            notes.append(f"{used} is used, {few(ignored)} in the same file is ignored")
        content = content[used]

    under = "under state_dict or model"
    if not isinstance(content, dict) or not content:
        kind = "nothing" if content == {} else f"a {type(content).__name__}"
        raise WeightsError(f"{path} contains {kind}: expected a state dict, or one {under}")

    non_tensors = [
        f"{name} ({type(value).__name__})"
        for name, value in content.items()
        if not (isinstance(name, str) and isinstance(value, Tensor))
    ]
    if non_tensors:
        raise WeightsError(
            f"{path} is not a state dict, because it also contains {few(non_tensors)}: keep only"
            f" named tensors, or put them {under}"
        )
    return content, notes


def _has_matrices(value: object) -> bool:
    """Return whether `value` is a dict of weights, unlike the states of random generators."""
    return isinstance(value, dict) and any(
        isinstance(each, Tensor) and each.ndim > 1 for each in value.values()
    )


def _remove_counts(tensors: dict[str, Tensor]) -> list[str]:
    """Remove `n_averaged`, which is not a weight, and return a note for each.

    A class around the average adds a prefix to this name as well.
    """
    counts = [name for name in tensors if name.rpartition(".")[2] == "n_averaged"]
    return [
        f"the average of {int(tensors.pop(name)):,} updates (torch.optim.swa_utils.AveragedModel)"
        for name in counts
    ]


def _stored_options(opened: dict[str, Any]) -> dict[str, Any]:
    """Return the command line that the training program stored, or {}."""
    args = opened.get("args")
    if isinstance(args, argparse.Namespace):
        return vars(args)
    return args if isinstance(args, dict) else {}


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def renamed(
    content: Mapping[str, Tensor], rename: Callable[[str], str], path: Path
) -> dict[str, Tensor]:
    """Return `content` without the prefixes of its names. Raises WeightsError if two names become
    identical."""
    weights = {rename(name): tensor for name, tensor in content.items()}
    if len(weights) < len(content):
        raise WeightsError(
            f"{path} contains duplicate weights after prefixes are removed: {len(content)} names"
            f" become {len(weights)}"
        )
    return weights
