"""Weights in: read anybody's file, and fit it to a model. `vit.weights.save` writes them.

1. A run's folder, a checkpoint or a file leads to the file that is read; a
   name of the Hugging Face hub is fetched first (vit/weights/hub.py)         find_weights
2. The file is opened without running any code in it (vit/weights/formats.py),
   and its names become ours (vit/weights/layouts.py)                         read_weights
3. Positions are resampled to the model's grid, the head is dropped on demand load_weights
4. Everything else must fit exactly: a missing or unknown key is an error     load_weights

`read_weights` adds what a run recorded about them. What a user can mend is a `WeightsError`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vit.layers.parts import grid_size, head_prefixes
from vit.run_folder import (
    INFO_FILE,
    METRICS_FILE,
    DamagedCheckpoint,
    checked_info,
    complete_checkpoints,
    local_copy,
    weights_file,
)
from vit.system.files import WeightsError
from vit.system.spelling import few
from vit.weights.formats import PARTS_FILES, read_content, readable
from vit.weights.hub import fetch, in_words, is_hub_name
from vit.weights.layouts import family_of, layout_of, to_ours
from vit.weights.positions import fit_posemb, fold_prefix_positions
from vit.weights.save import HUB_FILES
from vit.weights.transformers_config import norm_notes

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".pth.tar", ".npz")
"""Of files that may be the weights of a folder; what a file is, its content says."""


def load_weights(
    model: nn.Module,
    state_dict: Mapping[str, Tensor],
    grid: tuple[int, int] | None = None,
    reset_head: bool = False,
) -> list[str]:
    """Copy weights into a model that is not wrapped or compiled yet.

    Positions are resampled to the model's grid. A source without positions for its prefix tokens
    (DeiT III) gets zeros there, which computes the same; a model without them (`no_embed_class`)
    gets the source's as part of the tokens, which does so, too. DeiT III's own names of LayerScale
    become timm's. Values are cast to the model's dtype; `state_dict` does not change.

    Args:
        grid: (h, w) of the source's positions; None: a square.
        reset_head: keep the model's own head and pre-logits layer (our head starts at zero).

    Returns:
        A sentence for each adaptation.

    Raises:
        WeightsError: all that is missing, left over or of a different shape; the model is
            unchanged.
    """
    target = model.state_dict()
    notes = list[str]()
    # Only names that the model does not have: BEiT's and CaiT's layers are called gamma_1, too.
    source = {
        name if name in target else re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name): value
        for name, value in state_dict.items()
    }
    head = head_prefixes(model)
    if reset_head:
        dropped = [name for name in source if name.startswith(head)]
        source = {name: value for name, value in source.items() if name not in dropped}
        outcome = f"dropped {few(dropped)}" if dropped else "the source has none"
        notes.append(f"the head is new: {outcome}")
        # Pre-training by MAE normalises all tokens. Its fine-tuning pools first, and then has a new
        # norm (facebookresearch/mae:models_vit.py), which belongs to the head.
        if not any(name.startswith("fc_norm.") for name in source) and "fc_norm.weight" in target:
            head = (*head, "fc_norm.")
            dropped = [name for name in source if name.startswith("norm.")]
            source = {name: value for name, value in source.items() if name not in dropped}
            notes.append(f"fc_norm is new, too: dropped {few(dropped) if dropped else 'nothing'}")
    if "pos_embed" in source and "pos_embed" in target:
        notes += fold_prefix_positions(source, target, grid_size(model), grid)
        source["pos_embed"], posemb_notes = fit_posemb(
            source["pos_embed"], target["pos_embed"], grid_size(model), grid
        )
        notes += posemb_notes
    expected = {
        name: value for name, value in target.items() if not (reset_head and name.startswith(head))
    }
    problems = _differences(source, expected, head) or _rounded(source, expected)
    if problems:
        if family := family_of(source.keys() - target.keys()):
            problems.insert(0, f"their names are those of {family}")
        raise WeightsError("the weights do not fit the model: " + "; ".join(problems))
    model.load_state_dict(source, strict=not reset_head)
    return notes


def _differences(
    source: Mapping[str, Tensor], target: Mapping[str, Tensor], head: tuple[str, ...]
) -> list[str]:
    """What keeps `source` from being `target`; `head`: how names of the head's weights begin."""
    missing = [name for name in target if name not in source]
    unexpected = [name for name in source if name not in target]
    shapes = {
        name: (tuple(source[name].shape), tuple(target[name].shape))
        for name in source
        if name in target and source[name].shape != target[name].shape
    }
    problems = []
    if any(name.startswith(head) for name in (*missing, *unexpected, *shapes)):
        reason = "the head is different"
        for name, (given, wanted) in shapes.items():
            if name.startswith(head) and given[1:] == wanted[1:]:
                reason = f"the source has {given[0]} classes, the model {wanted[0]}"
        problems.append(f"{reason}: for a new head set init.reset_head=true")
    if missing:
        problems.append(f"{len(missing)} missing from the source: {few(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} unknown to the model: {few(unexpected)}")
    if shapes:
        texts = [f"{name} {given}, expected {wanted}" for name, (given, wanted) in shapes.items()]
        problems.append(f"{len(shapes)} of a different shape: {few(texts)}")
    return problems


def _rounded(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> list[str]:
    """Whole numbers where the model has fractions: quantised, with scales that no one applies."""
    kinds = {
        name: str(source[name].dtype).removeprefix("torch.")
        for name, value in target.items()
        if name in source and value.is_floating_point() != source[name].is_floating_point()
    }
    if not kinds:
        return []
    texts = [f"{name} {kind}" for name, kind in kinds.items()]
    return [f"{len(kinds)} are no floating-point numbers ({few(texts)}): save them as such"]


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
    """What a run left behind, or a bare state dict of another program (`config` is then None)."""

    path: Path
    weights: dict[str, Tensor]
    averaged: bool = False
    """Whether these are the averaged weights (EMA)."""
    config: dict[str, Any] | None = None
    num_classes: int | None = None
    grid_size: tuple[int, int] | None = None
    step: int | None = None
    class_names: list[str] | None = None
    """Name of each class it was trained on; [] if those had none, None for another program's."""
    layout: str = ""
    """The program whose names the file has; "" for ours and timm's, which are the same."""
    arch: str = ""
    """The model's name that another program keeps beside its weights, or ""."""
    notes: tuple[str, ...] = ()
    """A sentence for each thing that was chosen or left away in reading."""
    source: dict[str, str] | None = None
    """Repository, commit and licence of weights of the Hugging Face hub (vit/weights/hub.py)."""

    def which(self) -> str:
        """Return "step 1,200, averaged weights" for people, or "" where no run says it."""
        kind = "averaged weights" if self.averaged else "weights not averaged"
        return "" if self.step is None else f"step {self.step:,}, {kind}"

    def report(self, adaptations: list[str]) -> list[str]:
        """What was read and how it fitted: a summary, and what was dropped or resampled.

        adaptations: what `load_weights` returned, which has matched everything else.
        """
        values = sum(tensor.numel() for tensor in self.weights.values())
        types = sorted({str(t.dtype).removeprefix("torch.") for t in self.weights.values()})
        layout = f", names of {self.layout}" if self.layout else ""
        fit = "with these changes" if adaptations else "all as they are"
        summary = f"{len(self.weights)} weights, {values:,} values in {', '.join(types)}{layout}"
        return [f"{summary}: fit the model, {fit}", *self.notes, *adaptations]


def find_weights(path: str | os.PathLike[str]) -> Path:
    """The file, or the checkpoint folder, that `read_weights` reads for `path`.

    `path` is a file, a checkpoint folder, a folder of Hugging Face's, a run folder, or its URL. Of
    a run it is what has come furthest: the last weights, averaged if there are such, or the newest
    checkpoint. Raises WeightsError.
    """
    with readable(path):
        return _find(local_copy(path, only_weights=True))


def _find(path: Path) -> Path:
    if not path.is_dir() or (path / INFO_FILE).is_file():
        return path
    candidates = [weights_file(path, "last", averaged) for averaged in (True, False)]
    candidates = [candidate for candidate in candidates if candidate.exists()]
    for folder in complete_checkpoints(path)[:1]:
        # A run that was killed has written its checkpoints since its last evaluation, not these.
        is_newer = not candidates or _step_of(folder) > _step_of(candidates[0])
        candidates.insert(0 if is_newer else len(candidates), folder)
    candidates += [path / name for name in (*HUB_FILES, *PARTS_FILES) if (path / name).exists()]
    if not candidates and (path / METRICS_FILE).exists():
        raise WeightsError(
            f"{path} has no weights: the run has not saved any yet, or weights/ and checkpoints/"
            " were removed"
        )
    if not candidates:
        # As `launch/export.py` writes Google's layout, and as timm takes folders.
        candidates = [file for file in path.glob("*") if file.name.endswith(SUFFIXES)]
        if len(candidates) > 1:
            names = few(sorted(file.name for file in candidates))
            raise WeightsError(f"{path} holds {names}: name one of these files")
    if not candidates:
        raise WeightsError(
            f"{path}: neither a run folder (with weights/ or checkpoints/) nor a checkpoint folder"
            f" nor Hugging Face's ({HUB_FILES[0]})"
        )
    return candidates[0]


def _step_of(path: Path) -> int:
    """The step of a checkpoint folder, by its name, or of a run's file of weights.

    Where that does not say, a file counts as the newest: whoever reads it finds out why.
    """
    try:
        if path.is_dir():
            return int(path.name.removeprefix("step_"))
        with safe_open(path, framework="pt", device="cpu") as file:
            return int(file.metadata()["step"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return sys.maxsize if path.is_file() else -1


def read_weights(path: str | os.PathLike[str]) -> LoadedWeights:
    """Read what `find_weights` finds: weights for use, the averaged ones if there are any.

    A name of the Hugging Face hub is fetched first, unless a path has it (vit/weights/hub.py).

    Raises WeightsError for anything else, with what was expected, and for weights that are not
    finite.
    """
    if not is_hub_name(path):
        return _read_path(path)
    copy = fetch(str(path))
    loaded = _read_path(copy.folder)
    notes = (f"from {in_words(copy.source)}", *loaded.notes)
    return replace(loaded, source=copy.source, notes=notes)


def _read_path(path: str | os.PathLike[str]) -> LoadedWeights:
    while True:
        found = find_weights(path)
        try:
            loaded = _read(found)
            _check_finite(loaded)
            return loaded
        except (WeightsError, OSError, RuntimeError):  # the last is safetensors' word for no file
            # A run that goes on removes what was its newest checkpoint, once there is a newer one.
            if find_weights(path) == found:
                raise


def _check_finite(loaded: LoadedWeights) -> None:
    """Raise WeightsError if a value is NaN or infinite: of such a model each answer is NaN."""
    numbers = {
        name: tensor.numel() - int(tensor.isfinite().sum())
        for name, tensor in loaded.weights.items()
    }
    if names := [name for name, number in numbers.items() if number]:
        raise WeightsError(
            f"{loaded.path}: {sum(numbers.values()):,} values in {len(names)} of {len(numbers)}"
            f" weights are NaN or infinite ({few(names)}): copy the file again, or take weights"
            " from before training diverged"
        )


def _read(path: Path) -> LoadedWeights:
    """Read a file of weights, or a checkpoint folder."""
    if path.is_dir():
        return _from_checkpoint(path)
    content = read_content(path)
    metadata = content.metadata
    if not {"config", "num_classes", "grid_size", "averaged", "step"} <= metadata.keys():
        layout = layout_of(content.tensors)
        weights, notes = to_ours(layout, content.tensors) if layout else (content.tensors, [])
        settings = path.with_name("config.json")
        return LoadedWeights(
            path,
            weights,
            grid_size=_stated_grid(settings, weights),
            layout=layout.name if layout else "",
            arch=content.arch,
            notes=(*content.notes, *notes, *norm_notes(settings)),
        )
    try:
        return _with_facts(
            LoadedWeights(path, content.tensors, averaged=bool(json.loads(metadata["averaged"]))),
            config=json.loads(metadata["config"]),
            num_classes=int(metadata["num_classes"]),
            grid_size=json.loads(metadata["grid_size"]),
            step=int(metadata["step"]),
            class_names=json.loads(metadata.get("class_names", "[]")),
        )
    except (ValueError, TypeError):
        raise WeightsError(
            f"{path}: what it says about its model is damaged (the metadata): copy it again"
        ) from None


def _stated_grid(config: Path, weights: Mapping[str, Tensor]) -> tuple[int, int] | None:
    """The grid of the positions by timm's or transformers' `config`; None if it does not say it.

    Without it 49 positions are 7x7 of patches as well as 6x8 and a class token.
    """
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
        size = (content.get("model_args") or {}).get("img_size") or content.get("image_size")
        size = size or (content.get("pretrained_cfg") or content)["input_size"][1:]
        sides = (size, size) if isinstance(size, int) else tuple(size)
        patch = weights["patch_embed.proj.weight"].shape[2:]
        grid = sides[0] // patch[0], sides[1] // patch[1]
        length = weights["pos_embed"].shape[1]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # no such file, or another program's
    further = ("dist_token", "reg_token")
    prefix = 1 + sum(weights[name].shape[1] for name in further if name in weights)
    return grid if math.prod(grid) in (length, length - prefix) else None


def _with_facts(
    loaded: LoadedWeights,
    config: Any,
    num_classes: Any,
    grid_size: Any,
    step: Any,
    class_names: Any,
) -> LoadedWeights:
    """`loaded` with what a run has written about it. ValueError: not of their kind."""
    names_fit = (
        isinstance(class_names, list)
        and all(isinstance(name, str) for name in class_names)
        and len(class_names) <= num_classes
    )
    grid_fits = grid_size is None or (
        isinstance(grid_size, list)
        and len(grid_size) == 2
        and all(isinstance(side, int) for side in grid_size)
    )
    if not (names_fit and grid_fits and isinstance(config, dict) and num_classes > 0):
        raise ValueError("the facts about the weights are damaged")
    return replace(
        loaded,
        config=config,
        num_classes=int(num_classes),
        grid_size=(grid_size[0], grid_size[1]) if grid_size else None,
        step=int(step),
        class_names=class_names,
    )


def _from_checkpoint(folder: Path) -> LoadedWeights:
    try:
        info = checked_info(folder)
        facts = info["facts"]
        loaded = _with_facts(
            LoadedWeights(folder, {}),
            config=info["config"],
            num_classes=facts["num_classes"],
            grid_size=facts["grid_size"],
            step=info["step"],
            class_names=facts.get("class_names", []),  # the first checkpoints had none
        )
    except DamagedCheckpoint as error:
        raise WeightsError(str(error)) from None
    except (ValueError, KeyError, TypeError):
        raise WeightsError(f"{folder}: {INFO_FILE} is damaged") from None
    tensors: dict[str, Tensor] = {}
    for name in info["files"]:
        tensors |= read_content(folder / name).tensors
    averaged = any(name.startswith("ema.") for name in tensors)
    prefix = "ema." if averaged else "model."
    weights = {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
    return replace(loaded, weights=weights, averaged=averaged)
