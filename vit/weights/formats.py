"""Read weights files of any supported format into tensors by name.

The format is detected from the content, not from the file name. No code in a file is run.

    one file      safetensors; torch's zip and its older pickle; numpy's .npz       `_open`
    its parts     Hugging Face's index, `*.index.json`, lists them                   `_open_parts`
        -> the averaged weights or the plain ones, out of their containers           `_unpack`
        -> without the prefixes of wrappers (`module.`, `_orig_mod.`)                `_bare_names`
        -> `Content`, whose names vit/weights/layouts.py converts to this project's
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
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

CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Keys under which training programs store the weights (timm; DeiT and MAE). The first match wins,
so the average is preferred, as in timm."""
PARTS_FILES = tuple(f"{name}.index.json" for name in HUB_FILES)
"""Names of the index in a Hugging Face folder whose weights are split into several files."""
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts that DDP, torch.compile, FSDP1 and activation checkpointing add to parameter names."""
KINDS = "safetensors, a file of torch.save (.pth, .pt, .bin), .npz, or an .index.json of parts"
OTHER_KINDS = {
    b"<": "a web page (HTML), perhaps the answer to a download that needs a login or a click:"
    " download it again",
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself: run `git lfs pull`",
    b"\x89HDF": "HDF5, in which Keras keeps weights: save them as .npz or safetensors",
    b"GGUF": "GGUF: use the safetensors file that it was made from",
    b"\x08": "perhaps ONNX, whose weights have no names to match: use what it was exported from",
}
"""First bytes of files that users mistake for weights, and a description with a remedy."""


@contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert an OSError inside the block, such as a missing permission, to WeightsError."""
    try:
        yield
    except OSError as error:
        raise WeightsError(
            f"{error.filename or path}: cannot be read ({error.strerror}): fix its permissions, or"
            " name another file"
        ) from error


@dataclass
class Content:
    """The content of a weights file."""

    tensors: dict[str, Tensor]
    """Tensors on the CPU by name, memory-mapped if the format allows it."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Metadata of a safetensors file; {} for other formats."""
    notes: list[str] = field(default_factory=list)
    """One sentence per choice or omission."""
    arch: str = ""
    """The model name of the program that trained the weights, if the file has it; else ""."""


def read_content(path: str | os.PathLike[str]) -> Content:
    """Return the weights in a file, or in the parts that an index lists.

    A pickle may only hold tensors, plain values and `argparse.Namespace`, in which MAE, DeiT and
    timm store their command lines.

    Raises:
        WeightsError: the file does not exist, is damaged, or has no weights or pickled objects.
    """
    path = Path(path)
    with readable(path):
        if not path.is_file():
            raise WeightsError(
                f"{path} {_instead_of_a_file(path)}: expected a file of weights, or a run's folder"
            )
        with path.open("rb") as file:
            head = file.read(64)
    if path.name.endswith(".index.json"):
        return _open_parts(path)
    opened, metadata = _open(path, head)
    notes: list[str] = []
    tensors = _bare_names(_unpack(opened, path, notes), path)
    return Content(tensors, metadata, notes, _arch(opened))


def _arch(content: Mapping[str, Any]) -> str:
    """Return `model` of the command line that timm, DeiT and MAE store, or `arch`; else ""."""
    args = content.get("args")
    options = vars(args) if isinstance(args, argparse.Namespace) else args
    names = [options.get("model") if isinstance(options, dict) else None, content.get("arch")]
    return next((name for name in names if isinstance(name, str)), "")


def _instead_of_a_file(path: Path) -> str:
    """Describe the state of `path`, which is not a file, for a message."""
    if path.is_dir():
        return "is a folder"
    if path.exists():
        return "is not a regular file"  # a pipe would block
    return "is a link that leads nowhere" if path.is_symlink() else "does not exist"


def _open(path: Path, head: bytes) -> tuple[Any, dict[str, str]]:
    """Return the unpickled or parsed content, and the metadata of a safetensors file."""
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**32:
        return _open_safetensors(path)
    if head.startswith(b"PK"):
        return _open_zip(path), {}
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    # A pickle may begin with any letter, but torch.save always writes the protocol first.
    if not head.startswith(b"\x80"):
        kind = next((kind for start, kind in OTHER_KINDS.items() if text.startswith(start)), "")
        if not kind and path.suffix == ".safetensors":
            return _open_safetensors(path)  # raises the library's reason
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
    return _open_torch(path, mapped=False), {}  # before torch 1.6


def _open_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
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
            f"{path}: its content does not match the sha256 in its metadata: it is damaged (copy it"
            " again, or take a checkpoint of the run, checkpoints/step_<n>), or another program has"
            " changed it (save it without 'sha256' in the metadata)"
        )
    metadata.pop(SEAL, None)  # the hash is of this file; a copy of its tensors has another
    return tensors, metadata


def _open_zip(path: Path) -> Any:
    """Return the content of a zip: numpy's arrays, or torch's archive, which has `data.pkl`."""
    try:
        with zipfile.ZipFile(path) as file:
            names = file.namelist()
    except (zipfile.BadZipFile, OSError):
        raise WeightsError(
            f"{path} is truncated or not a checkpoint (a zip without its list of contents, which is"
            " at the end): copy it again"
        ) from None
    if names and all(name.endswith(".npy") for name in names):
        return _open_npz(path)
    if any(name.endswith("/constants.pkl") for name in names):
        raise WeightsError(
            f"{path} is TorchScript, a program, which is not run: open it with torch.jit.load, and"
            " save its state_dict() with torch.save"
        )
    if not any(name.endswith("/data.pkl") for name in names):
        members = few(names) if names else "nothing"
        raise WeightsError(f"{path} is not a checkpoint but a zip of {members}: expected {KINDS}")
    return _open_torch(path, mapped=True)


def _open_npz(path: Path) -> dict[str, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise WeightsError(
                f"{path} is truncated or damaged ({error}): copy it again"
            ) from error
        raise WeightsError(
            f"{path} holds pickled objects (numpy's object arrays), which can run code, and is"
            " refused: save arrays of numbers alone"
        ) from error
    except (zipfile.BadZipFile, OSError, EOFError, KeyError) as error:
        raise WeightsError(f"{path} is truncated or damaged ({error}): copy it again") from error
    tensors = {}
    for name, array in arrays.items():
        if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # bfloat16, as JAX writes it
            tensors[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        elif array.dtype.kind in "fiub":
            tensors[name] = torch.from_numpy(array)
    return tensors


def _open_torch(path: Path, mapped: bool) -> Any:
    # torch.load picks the format by the suffix ".safetensors", so it gets the open file instead of
    # the name. It can memory-map names only.
    misnamed = path.suffix == ".safetensors"
    try:
        with (
            torch.serialization.safe_globals([argparse.Namespace]),
            path.open("rb") as file,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # torch warns about content that is refused or harmless
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
    ) as error:  # damaged files raise all of these
        refused_class = re.search(r"GLOBAL ([\w.]+)", str(error))
        if refused_class and isinstance(error, pickle.UnpicklingError):
            raise WeightsError(
                f"{path} holds pickled objects ({refused_class[1]}), which can run code, and is"
                " refused: if you trust it, open it with torch.load(weights_only=False) and save"
                " its state dict alone"
            ) from error
        protocol = 2 if mapped else _protocol_of(path)
        if isinstance(error, pickle.UnpicklingError) and 2 < protocol <= pickle.HIGHEST_PROTOCOL:
            raise WeightsError(
                f"{path} is a pickle of protocol {protocol}, which torch.save does not write and"
                " which can run code: refused; if you trust it, open it with Python's pickle and"
                " save its tensors with torch.save or as safetensors"
            ) from error
        # Keep the first sentence only, because the rest of torch's texts is for its developers.
        reason = (str(error).splitlines() or [""])[0].partition(". ")[0][:200]
        if isinstance(error, pickle.UnpicklingError):
            reason = "not a pickle"  # torch's text advises an unsafe way to load the file
        raise WeightsError(
            f"{path} is truncated or not a checkpoint ({type(error).__name__}: {reason}): copy it"
            " again"
        ) from error


def _protocol_of(path: Path) -> int:
    """Return the protocol number that a pickle of version 2 or later begins with."""
    with path.open("rb") as file:
        return (file.read(2) + b"\0\0")[1]


def _open_parts(index: Path) -> Content:
    """Return the weights of all files that Hugging Face's `index` lists."""
    try:
        file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(file_of.values()))
        # An index is untrusted: it must not make this program read files outside its folder.
        outside = [file for file in files if Path(file).name != file]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise WeightsError(f"{index} is not an index of weights in parts: copy it again") from None
    if outside:
        raise WeightsError(f"{index} names files outside of its folder ({few(outside)}): refused")
    if missing := [file for file in files if not (index.parent / file).is_file()]:
        raise WeightsError(
            f"{index} names {len(files)} parts, of which {few(missing)} are missing: copy them"
        )
    parts = [read_content(index.parent / file) for file in files]
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    if missing := [name for name in file_of if name not in tensors]:
        raise WeightsError(
            f"{index} names {len(file_of)} weights, of which its parts lack {few(missing)}: copy"
            " index and parts again"
        )
    notes = [f"read from {len(files)} parts", *(note for part in parts for note in part.notes)]
    return Content(tensors, parts[0].metadata, notes)


def _unpack(content: Any, path: Path, notes: list[str]) -> dict[str, Tensor]:
    """Return the tensors in `content`, taken out of its containers."""
    while isinstance(content, dict):
        keys = [name for name in CONTAINERS if isinstance(content.get(name), dict)]
        if not keys:
            break
        if len(keys) > 1:
            notes.append(f"{keys[0]} is used, {few(keys[1:])} in the same file is not")
        content = content[keys[0]]
    under = f"under {' or '.join(CONTAINERS[2:])}"
    if not isinstance(content, dict) or not content:
        kind = "nothing" if content == {} else f"a {type(content).__name__}"
        raise WeightsError(f"{path} holds {kind}: expected a state dict, or one {under}")
    non_tensors = [
        f"{name} ({type(value).__name__})"
        for name, value in content.items()
        if not (isinstance(name, str) and isinstance(value, Tensor))
    ]
    if non_tensors:
        raise WeightsError(
            f"{path} is not a state dict, it also holds {few(non_tensors)}: keep only tensors by"
            f" their names, or put them {under}"
        )
    return content


def _bare_names(content: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return `content` without the wrapper prefixes in its names."""
    weights = {
        ".".join(part for part in name.split(".") if part not in WRAPPERS): tensor
        for name, tensor in content.items()
    }
    if len(weights) < len(content):
        raise WeightsError(
            f"{path} holds the same weight twice once prefixes are removed: {len(content)} names"
            f" become {len(weights)}"
        )
    return weights
