"""Other people's weights in and out: read a file, fit it to a model, write one that every tool can
read.

The data's story:

1. A file, `.safetensors` or torch's, is opened without running any code that it may hold                           read_state_dict
2. Its containers (`model`, `state_dict`) and the prefixes of wrappers (`module.`, `_orig_mod.`) are taken off       read_state_dict
3. Position embeddings are resampled to the model's grid, and the head is dropped if the classes are others          load_weights
4. Everything else must fit exactly: a key too many or too few is an error, never a warning                          load_weights
5. Trained weights leave as safetensors, complete or not at all                                                      save_weights

What a person can get wrong is a `WeightsError` of one line.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vit.posemb import resample_posemb
from vit.run.folder import CHECKPOINTS, INFO_FILE, weights_file

CONTAINERS = ("state_dict", "model", "model_ema")
"""Keys under which training programs keep the weights (timm; DeiT and MAE), the first of them
wins."""
TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".pth.tar")
"""Of files that torch.save writes; the last are timm's training's, which are no tars."""
HUB_FILES = ("model.safetensors", "pytorch_model.bin")
"""What weights are called in a folder of the Hugging Face hub."""
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""What DDP, torch.compile, FSDP1 and activation checkpointing add to parameter names, at any
depth."""


class WeightsError(ValueError):
    """Weights that cannot be read, or do not fit the model; the message is for people."""


def read_state_dict(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights in a file, on the CPU and memory-mapped where the format allows, and its metadata
    (none but in `.safetensors`).

    Containers are opened and the prefixes of wrappers removed, whatever their nesting. Never more
    than tensors and plain values are unpickled, of classes `argparse.Namespace` alone, in which
    MAE, DeiT and timm keep their command lines; it runs nothing.

    Raises:
        WeightsError: no such file, cut short, no checkpoint, or one that holds pickled objects.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(
            f"{path} {'is a folder' if path.is_dir() else 'does not exist'}: expected a file of"
            " weights, or a run's folder"
        )
    metadata: dict[str, str] = {}
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                content = {name: file.get_tensor(name) for name in file.keys()}
                metadata = file.metadata() or {}
        except SafetensorError as error:
            raise WeightsError(
                f"{path} is cut short or no safetensors file ({error}): copy it again"
            ) from error
    elif path.name.endswith(TORCH_SUFFIXES):
        content = _torch_load(path)
    else:
        raise WeightsError(
            f"{path} has the suffix {path.suffix!r}: expected .safetensors,"
            f" {', '.join(TORCH_SUFFIXES)}"
        )

    while container := next(
        (
            name
            for name in CONTAINERS
            if isinstance(content, dict) and isinstance(content.get(name), dict)
        ),
        None,
    ):
        content = content[container]
    if not isinstance(content, dict) or not content:
        held = "nothing" if content == {} else f"a {type(content).__name__}"
        raise WeightsError(
            f"{path} holds {held}: expected a state dict, or one under {' or '.join(CONTAINERS)}"
        )
    others = [
        f"{name} ({type(value).__name__})"
        for name, value in content.items()
        if not isinstance(value, Tensor)
    ]
    if others:
        raise WeightsError(
            f"{path} is no state dict, it also holds {_few(others)}: keep only tensors, or put them"
            f" under {' or '.join(CONTAINERS)}"
        )
    weights = {
        ".".join(part for part in name.split(".") if part not in WRAPPERS): tensor
        for name, tensor in content.items()
    }
    if len(weights) < len(content):
        raise WeightsError(
            f"{path} holds the same weight twice once prefixes are removed: {len(content)} names"
            f" become {len(weights)}"
        )
    return weights, metadata


def _torch_load(path: Path) -> Any:
    # torch's format since 1.6; the older one cannot be memory-mapped
    is_zip = zipfile.is_zipfile(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found:
            raise WeightsError(
                f"{path} holds pickled objects ({found[1]}), which can run code, and is refused: if"
                " you trust it, open it with torch.load(weights_only=False) and save its state"
                " dict alone"
            ) from error
        raise WeightsError(f"{path} is cut short or no checkpoint: copy it again") from error
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, AttributeError) as error:
        # all of these come from damaged files
        reason = (str(error).splitlines() or [""])[0][:200]
        raise WeightsError(
            f"{path} is cut short or no checkpoint ({type(error).__name__}: {reason}): copy it"
            " again"
        ) from error


def load_weights(
    model: nn.Module,
    state_dict: Mapping[str, Tensor],
    grid: tuple[int, int] | None = None,
    reset_head: bool = False,
) -> list[str]:
    """Copies weights into a model, before it is wrapped or compiled; returns a sentence for each
    thing that was adapted.

    Positions are resampled to the model's grid from `grid` (h, w), by default a square one. A
    source without a position for its class token (DeiT III) gets zeros there, which computes the
    same; LayerScale under DeiT III's own names gets timm's. With `reset_head`, head and pre-logits
    layer stay the model's own: our head is zero. Neither `state_dict` nor its tensors change;
    values are cast to the model's dtype.

    Raises: WeightsError: anything missing, left over or of another shape, all at once. The model is
        then unchanged.
    """
    target = model.state_dict()
    notes = list[str]()
    # DeiT III's own names; BEiT's and CaiT's layers are really called so.
    source = {
        name if name in target else re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name): value
        for name, value in state_dict.items()
    }
    head = _head_prefixes(model)
    if reset_head:
        dropped = [name for name in source if name.startswith(head)]
        for name in dropped:
            del source[name]
        notes.append(
            f"head starts anew: dropped {_few(dropped)}"
            if dropped
            else "head starts anew: the source has none"
        )
    if "pos_embed" in source and "pos_embed" in target:
        source["pos_embed"] = _fit_posemb(
            source["pos_embed"], target["pos_embed"], grid_size(model), grid, notes
        )

    missing = [
        name for name in target if name not in source and not (reset_head and name.startswith(head))
    ]
    unexpected = [name for name in source if name not in target]
    shapes = {
        name: (tuple(source[name].shape), tuple(target[name].shape))
        for name in source
        if name in target
    }
    shapes = {name: (given, wanted) for name, (given, wanted) in shapes.items() if given != wanted}
    problems = []
    if any(name.startswith(head) for name in (*missing, *unexpected, *shapes)):
        counts = [
            (given[0], wanted[0])
            for name, (given, wanted) in shapes.items()
            if name.startswith(head) and given[1:] == wanted[1:]
        ]
        reason = (
            f"the source has {counts[0][0]} classes, the model {counts[0][1]}"
            if counts
            else "the head is another"
        )
        problems.append(f"{reason}: for a new head set init.reset_head=true")
    if missing:
        problems.append(f"{len(missing)} missing from the source: {_few(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} unknown to the model: {_few(unexpected)}")
    if shapes:
        problems.append(
            f"{len(shapes)} of another shape: "
            + _few(
                [f"{name} {given}, expected {wanted}" for name, (given, wanted) in shapes.items()]
            )
        )
    if problems:
        raise WeightsError("the weights do not fit the model: " + "; ".join(problems))
    model.load_state_dict(source, strict=not reset_head)
    return notes


def save_weights(
    path: str | os.PathLike[str], model_state_dict: Mapping[str, Tensor], metadata: dict[str, str]
) -> None:
    """Writes plain (unsharded) tensors and string metadata as safetensors; `path` has the whole
    file or, if this fails, what it had before.

    Raises:
        WeightsError: no room, no permission.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in model_state_dict.items()},
            temporary,
            metadata,
        )
        # safetensors 0.8 lets nobody but the owner read its files, whatever the umask
        temporary.chmod(mode)
        flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)
    except (OSError, SafetensorError) as error:
        remedy = "make room or mend its permissions, and run the same command again"
        raise WeightsError(
            f"{path}: cannot be written ({error}); what was there before is untouched: {remedy}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """sha256 of names, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


@dataclass(frozen=True)
class LoadedWeights:
    """What a run of ours left behind, or a bare state dict of somebody else's (`config` is then
    None)."""

    path: Path
    weights: dict[str, Tensor]
    averaged: bool = False
    """Whether these are the averaged weights (EMA)."""
    config: dict[str, Any] | None = None
    num_classes: int | None = None
    grid_size: tuple[int, int] | None = None
    step: int | None = None
    class_names: list[str] | None = None
    """Name of each class it was trained on; [] if those had none, None for weights of somebody
    else's."""


def find_weights(path: str | os.PathLike[str]) -> Path:
    """The file, or the checkpoint folder, that `read_weights` reads for a run folder, a checkpoint
    folder, one of Hugging Face or a file.

    A run folder means `weights/last_ema.safetensors`, else `weights/last.safetensors`, else its
    newest checkpoint. Raises WeightsError.
    """
    path = Path(path)
    if not path.is_dir() or (path / INFO_FILE).is_file():
        return path
    candidates = [weights_file(path, "last", averaged) for averaged in (True, False)]
    candidates += [
        info.parent for info in sorted(path.glob(f"{CHECKPOINTS}/step_*/{INFO_FILE}"), reverse=True)
    ]
    candidates += [path / name for name in HUB_FILES]
    found = next((candidate for candidate in candidates if candidate.exists()), None)
    if found is None:
        raise WeightsError(
            f"{path}: neither a run folder (with weights/ or checkpoints/) nor a checkpoint folder"
            f" nor Hugging Face's ({HUB_FILES[0]})"
        )
    return found


def read_weights(path: str | os.PathLike[str]) -> LoadedWeights:
    """Weights as they are meant to be used, the averaged ones where there are some, from what
    `find_weights` finds.

    Raises WeightsError for anything else, saying what was expected.
    """
    path = find_weights(path)
    if path.is_dir():
        return _from_checkpoint(path)
    weights, metadata = read_state_dict(path)
    if not {"config", "num_classes", "grid_size", "averaged", "step"} <= metadata.keys():
        return LoadedWeights(path, weights)
    return LoadedWeights(
        path,
        weights,
        averaged=json.loads(metadata["averaged"]),
        config=json.loads(metadata["config"]),
        num_classes=int(metadata["num_classes"]),
        grid_size=_pair(json.loads(metadata["grid_size"])),
        step=int(metadata["step"]),
        class_names=json.loads(metadata.get("class_names", "[]")),
    )


def _from_checkpoint(folder: Path) -> LoadedWeights:
    try:
        info = json.loads((folder / INFO_FILE).read_text())
        config = info["config"]
        facts = info["facts"]
        step = info["step"]
        files = info["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise WeightsError(
            f"{folder}: {INFO_FILE} is damaged, so this is not a checkpoint of this project"
        ) from None
    tensors: dict[str, Tensor] = {}
    for name in files:
        tensors |= read_state_dict(folder / name)[0]
    averaged = any(name.startswith("ema.") for name in tensors)
    prefix = "ema." if averaged else "model."
    weights = {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
    names = facts.get("class_names", [])  # younger than the first checkpoints
    return LoadedWeights(
        folder,
        weights,
        averaged,
        config,
        facts["num_classes"],
        _pair(facts["grid_size"]),
        step,
        names,
    )


def class_mismatch(trained: LoadedWeights, names: Sequence[str], num_classes: int) -> str:
    """How the classes of data (`names` of labels 0, 1, ..., [] if unknown) differ from those that
    `trained` knows, or "".

    Labels are numbers, so nothing else would tell that an accuracy on other classes means nothing.
    """
    if trained.class_names is None or trained.num_classes is None:
        return ""
    known = trained.class_names
    counts = (
        ""
        if num_classes == trained.num_classes
        else f"{num_classes:,} classes in the data, {trained.num_classes:,} in the model"
    )
    if not known or not names:
        if counts:
            return f"{counts}, and no names to compare them by: labels are compared by number"
        # Equal counts say little: classes numbered from 1, or two foreign sets of ten classes, have
        # them too.
        return (
            "the data have no names of classes, the model has: labels are compared by number"
            if known
            else ""
        )
    differing = [
        number for number, name in enumerate(names) if [name] != known[number : number + 1]
    ]
    if not differing:
        return (
            f"{len(names):,} classes in the data, the first of the model's {len(known):,}"
            if len(names) < len(known)
            else ""
        )
    shown = [
        f"label {n} is {names[n]!r} in the data, {repr(known[n]) if n < len(known) else 'nothing'}"
        " in the model"
        for n in differing[:3]
    ]
    agree = f"{len(names) - len(differing):,} of {len(names):,} names agree" + (
        f"; {counts}" if counts else ""
    )
    if sorted(known) == sorted(names):
        meaning = "they are in another order, so the accuracy means nothing: write the shards anew"
    elif len(differing) < len(names):
        meaning = "the accuracy counts these labels as the model's"
    else:
        meaning = "the accuracy means nothing" + (
            "" if counts else ", unless only the names are others"
        )
    more = f" and {len(differing) - 3:,} more" if len(differing) > 3 else ""
    return f"the data's classes are not the model's: {', '.join(shown)}{more} ({agree}): {meaning}"


def _pair(grid: list[int] | None) -> tuple[int, int] | None:
    return (grid[0], grid[1]) if grid else None


def _fit_posemb(
    source: Tensor,
    target: Tensor,
    new_grid: tuple[int, int] | None,
    grid: tuple[int, int] | None,
    notes: list[str],
) -> Tensor:
    if new_grid is None or source.ndim != 3 or source.shape[2] != target.shape[2]:
        return source  # nothing that resampling could mend: the comparison of shapes reports it
    length = source.shape[1]
    num_prefix_tokens = target.shape[1] - math.prod(new_grid)
    # Without `grid` a square is assumed, before the model's own grid: 8x32 and 16x16 are both 256,
    # and published weights are square.
    squares = [(math.isqrt(n), math.isqrt(n)) for n in (max(length - num_prefix_tokens, 0), length)]
    candidates = [*squares, new_grid] if grid is None else [(grid[0], grid[1])]
    old_grid = next(
        (hw for hw in candidates if math.prod(hw) in (length - num_prefix_tokens, length)), None
    )
    if old_grid is None:
        assumed = "a square grid" if grid is None else f"a grid of {grid[0]}x{grid[1]}"
        prefix = f"with or without {num_prefix_tokens} for prefix tokens"
        raise WeightsError(
            f"the source's pos_embed has {length} positions, which is not {assumed} {prefix}: give"
            " its grid (height, width)"
        )
    if num_prefix_tokens and math.prod(old_grid) == length:
        source = torch.cat((source.new_zeros(1, num_prefix_tokens, source.shape[2]), source), dim=1)
        notes.append("the source has no position for its class token: it gets zeros")
    if old_grid != tuple(new_grid):
        notes.append(
            f"positions resampled from {old_grid[0]}x{old_grid[1]} to {new_grid[0]}x{new_grid[1]}"
            " (bicubic, antialiased)"
        )
    return resample_posemb(source, old_grid, new_grid, num_prefix_tokens)


def grid_size(model: nn.Module) -> tuple[int, int] | None:
    """(h, w) of our models and of timm's; None for a guest without one."""
    return getattr(model, "grid_size", None) or getattr(
        getattr(model, "patch_embed", None), "grid_size", None
    )


def _head_prefixes(model: nn.Module) -> tuple[str, ...]:
    """How the names of head weights begin; timm's models say theirs."""
    classifier = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or "head"
    names = (classifier,) if isinstance(classifier, str) else classifier
    return tuple(f"{name}." for name in (*names, "pre_logits"))


def _few(names: list[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (
        f" and {len(names) - limit} more" if len(names) > limit else ""
    )


def flush(path: Path) -> None:
    """Force a file, or a folder's entries, to the disk: after a power cut a renamed file must not
    be empty."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
