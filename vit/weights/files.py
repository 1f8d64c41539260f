"""Read the weights of this project or of another program, and fit them to a model.

1. Find the file in a run folder or checkpoint, or fetch a name from the
   Hugging Face hub (vit/weights/hub.py)                                      find_weights
2. Open the file without running any code in it (vit/weights/formats.py), and
   convert its names to this project's names (vit/weights/layouts.py)         read_weights
3. Fit patches and positions to the model, and drop the head on demand        load_weights
4. Raise an error if any other key is missing, unknown or of another shape    load_weights

`read_weights` also returns the facts that a run recorded about its weights. Errors that a user can
fix are raised as `WeightsError`. `vit.weights.save` writes weights.
"""

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vit.checkpoint.seal import INFO_FILE, CheckpointError, checked_info
from vit.layers.parts import grid_size, head_prefixes
from vit.run_folder.paths import METRICS_FILE, complete_checkpoints, weights_file
from vit.system.files import WeightsError
from vit.system.spelling import few
from vit.weights.fields import PROGRAM_OPTIONS, TIMM_OPTIONS
from vit.weights.formats import PARTS_FILES, Content, read_content, readable
from vit.weights.hub import fetch, in_words, is_hub_name
from vit.weights.layouts import family_of, layout_of, to_ours, without_prefix
from vit.weights.patches import fit_patches
from vit.weights.positions import PREFIX_TOKENS, fit_positions
from vit.weights.save import HUB_FILES
from vit.weights.transformers_config import network_notes, object_in

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".pth.tar", ".npz")
"""The suffixes of weights files to look for in a folder. The content determines the format."""


def load_weights(
    model: nn.Module,
    state_dict: Mapping[str, Tensor],
    grid: tuple[int, int] | None = None,
    reset_head: bool = False,
) -> list[str]:
    """Copy weights into a model that is not wrapped or compiled yet.

    Positions are resampled to the model's grid, and patches to the model's patch size. For gray
    images, the filters of the color channels are summed (vit/weights/patches.py). If only the model
    has positions for prefix tokens, as with weights of DeiT III, these positions are zero. If only
    the source has such positions, as with a model that has `no_embed_class`, they are added to the
    tokens. Neither change of positions affects the network's output. DeiT III's LayerScale names
    are converted to timm's. Values are cast to the model's dtype, and `state_dict` is not changed.

    Args:
        grid: (h, w) of the source's positions. None means a square.
        reset_head: Keep the model's initial head and pre-logits layer (the head starts at zero).

    Returns:
        One sentence per adaptation.

    Raises:
        WeightsError: names are missing or unknown, or shapes differ. The error lists them, and
            the model is unchanged.
    """
    target = model.state_dict()
    # BEiT and CaiT have gamma_1 parameters, so rename only if the model lacks the name.
    source = {
        name if name in target else re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name): value
        for name, value in state_dict.items()
    }

    head = head_prefixes(model)
    expected = target
    notes = list[str]()
    if reset_head:
        notes.append(f"the head is new: {_drop(source, head) or 'the source has none'}")
        if _needs_new_norm(source, target):
            head = (*head, "fc_norm.")
            notes.append(f"fc_norm is new: {_drop(source, ('norm.',)) or 'dropped nothing'}")
        expected = {name: value for name, value in target.items() if not name.startswith(head)}

    notes += fit_patches(source, target, model)
    if "pos_embed" not in source and "pos_embed" in dict(model.named_buffers()):
        # big_vision computes fixed positions, and does not store them.
        source["pos_embed"] = target["pos_embed"]
        notes.append("the source has no positions: the model's fixed ones are kept")
    if "pos_embed" in source and "pos_embed" in target:
        notes += fit_positions(source, target, grid_size(model), grid)

    problems = _differences(source, expected, head) or _rounded(source, expected)
    if problems:
        family = family_of(source.keys() - target.keys())
        if family:
            problems.insert(0, f"they are probably the weights of {family}")
        raise WeightsError("the weights do not fit the model: " + "; ".join(problems))

    model.load_state_dict(source, strict=not reset_head)
    return notes


def _needs_new_norm(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> bool:
    """Return whether the norm after pooling is new, and thus a part of the new head.

    MAE normalizes all tokens in pre-training. In fine-tuning, it pools first and then applies a new
    norm (facebookresearch/mae:models_vit.py).
    """
    return "fc_norm.weight" in target and not any(name.startswith("fc_norm.") for name in source)


def _drop(source: dict[str, Tensor], prefixes: tuple[str, ...]) -> str:
    """Remove the weights whose names begin with `prefixes`. Return "dropped NAMES", or ""."""
    dropped = [name for name in source if name.startswith(prefixes)]
    for name in dropped:
        del source[name]
    return f"dropped {few(dropped)}" if dropped else ""


def _differences(
    source: Mapping[str, Tensor], target: Mapping[str, Tensor], head: tuple[str, ...]
) -> list[str]:
    """List the differences between `source` and `target`. head: name prefixes of the head."""
    if not source.keys() & target.keys():
        return [
            f"no name fits: the source has {few([*source])}, but the model {few([*target])}: choose"
            " the model of these weights, or rename them"
        ]

    missing = [name for name in target if name not in source]
    unexpected = [name for name in source if name not in target]
    shapes = {
        name: (tuple(source[name].shape), tuple(target[name].shape))
        for name in source
        if name in target and source[name].shape != target[name].shape
    }

    problems = []
    if {"norm.weight", "fc_norm.weight"} <= {*missing, *unexpected}:
        theirs = "avg" if "norm.weight" in missing else "norm_avg, or token"
        problems.append(f"the source pools as with model.global_pool={theirs}")
    if any(name.startswith(head) for name in (*missing, *unexpected, *shapes)):
        reason = "the head is different"
        for name, (shape, target_shape) in shapes.items():
            if name.startswith(head) and shape[1:] == target_shape[1:]:  # only the classes differ
                reason = f"the source has {shape[0]} classes, but the model has {target_shape[0]}"
        problems.append(f"{reason}: for a new head set init.reset_head=true")

    if missing:
        problems.append(f"{len(missing)} missing from the source: {few(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} unknown to the model: {few(unexpected)}")
    if shapes:
        texts = [
            f"{name} {shape}, expected {target_shape}"
            for name, (shape, target_shape) in shapes.items()
        ]
        problems.append(f"{len(shapes)} of a different shape: {few(texts)}")
    return problems


def _rounded(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> list[str]:
    """List the integer weights of parameters that are floating-point in the model.

    Integer weights are quantized, and this project does not apply their scales.
    """
    kinds = {
        name: str(source[name].dtype).removeprefix("torch.")
        for name, value in target.items()
        if name in source and value.is_floating_point() != source[name].is_floating_point()
    }
    if not kinds:
        return []

    texts = [f"{name} {kind}" for name, kind in kinds.items()]
    return [f"{len(kinds)} are not floating-point numbers ({few(texts)}): convert them"]


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Return a sha256 hash of all names, shapes, dtypes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


@dataclass(frozen=True)
class LoadedWeights:
    """Weights, and the facts that a run recorded about them.

    The facts are None for the weights of another program.
    """

    path: Path
    weights: dict[str, Tensor]
    averaged: bool = False
    """Whether these are averaged weights (EMA)."""

    config: dict[str, Any] | None = None
    num_classes: int | None = None
    grid_size: tuple[int, int] | None = None
    step: int | None = None
    class_names: list[str] | None = None
    """The names of the training classes; [] if the data had none; None for other programs'
    weights."""

    layout: str = ""
    """The program whose parameter names the file uses; "" for timm's names, which this project
    uses."""
    arch: str = ""
    """The model name that another program stored with its weights, or ""."""
    options: dict[str, Any] = field(default_factory=dict)
    """The command-line options that another program stored with its weights."""

    notes: tuple[str, ...] = ()
    """One sentence for each choice or omission made during reading."""
    source: dict[str, str] | None = None
    """The repository, commit and license of weights from the hub (vit/weights/hub.py)."""

    def which(self) -> str:
        """Return a description such as "step 1,200, averaged weights", or "" for another program's
        weights."""
        kind = "averaged weights" if self.averaged else "weights not averaged"
        return "" if self.step is None else f"step {self.step:,}, {kind}"

    def report(self, adaptations: list[str]) -> list[str]:
        """Return a summary line, followed by one line for each note and adaptation.

        adaptations: the return value of `load_weights`.
        """
        values = sum(tensor.numel() for tensor in self.weights.values())
        types = sorted({str(t.dtype).removeprefix("torch.") for t in self.weights.values()})
        layout = f", names of {self.layout}" if self.layout else ""
        fit = "with these changes" if adaptations else "without changes"
        summary = f"{len(self.weights)} weights, {values:,} values in {', '.join(types)}{layout}"
        return [f"{summary}: fit the model, {fit}", *self.notes, *adaptations]


def find_weights(path: str | os.PathLike[str]) -> Path:
    """Return the file or checkpoint folder that `read_weights` would read for `path`.

    `path` is a file, a checkpoint folder, a Hugging Face folder, a run folder, or a run's URL. For
    a run, the weights of the latest step are chosen: the file of last weights (averaged, if the run
    has an average) or the newest checkpoint. Raises WeightsError.
    """
    # Import this only here, because few weights are at a URL.
    from vit.run_folder.reading import local_copy

    with readable(path):
        return _find(local_copy(path, only_weights=True))


def _find(path: Path) -> Path:
    """Return the weights to read for a local path. For a run, these are the latest weights."""
    if not path.is_dir() or (path / INFO_FILE).is_file():
        return path

    last_weights = (weights_file(path, "last", averaged) for averaged in (True, False))
    candidates = [file for file in last_weights if file.exists()]
    for folder in complete_checkpoints(path)[:1]:
        # A killed run may have saved newer checkpoints after it last wrote this file.
        if not candidates or _step_of(folder) > _step_of(candidates[0]):
            candidates.insert(0, folder)
    candidates += [path / name for name in (*HUB_FILES, *PARTS_FILES) if (path / name).exists()]

    if candidates:
        return candidates[0]
    if (path / METRICS_FILE).exists():
        raise WeightsError(
            f"{path} has no weights: the run has not saved any yet, or weights/ and checkpoints/"
            " have been removed"
        )
    return _only_file_in(path)


def _only_file_in(path: Path) -> Path:
    """Return the only weights file in a folder of another program. Raises WeightsError.

    `launch/export.py` can write Google's .npz file to such a folder, which timm accepts.
    """
    files = [file for file in path.glob("*") if file.name.endswith(SUFFIXES)]

    if len(files) > 1:
        raise WeightsError(
            f"{path} contains {few(sorted(file.name for file in files))}: pass the path of one of"
            " these files"
        )
    if not files:
        raise WeightsError(
            f"{path}: expected a run folder (with weights/ or checkpoints/), a checkpoint folder,"
            f" or a Hugging Face folder (with {HUB_FILES[0]})"
        )

    return files[0]


def _step_of(path: Path) -> int:
    """Return the step of a checkpoint folder (from its name) or of a run's weights file.

    A file without a readable step counts as the newest, so that reading it reports the reason.
    """
    try:
        if path.is_dir():
            return int(path.name.removeprefix("step_"))
        with safe_open(path, framework="pt", device="cpu") as file:
            return int(file.metadata()["step"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return sys.maxsize if path.is_file() else -1


def read_weights(path: str | os.PathLike[str]) -> LoadedWeights:
    """Read the weights found by `find_weights`, averaged if the run has an average.

    A name on the Hugging Face hub is fetched first, unless a local path has this name
    (vit/weights/hub.py).

    Raises WeightsError for any other file, and for weights that are not finite. The error states
    the expected content.
    """
    if not is_hub_name(path):
        return _read_path(path)
    copy = fetch(str(path))
    loaded = _read_path(copy.folder)
    return replace(
        loaded, source=copy.source, notes=(f"from {in_words(copy.source)}", *loaded.notes)
    )


def _read_path(path: str | os.PathLike[str]) -> LoadedWeights:
    """Read the weights of a local path or a run's URL, even while a job is saving new ones."""
    while True:
        weights_path = find_weights(path)
        try:
            loaded = _read(weights_path)
            _check_finite(loaded)
            return loaded
        except (WeightsError, OSError, RuntimeError):
            # safetensors raises RuntimeError if the file is gone. A running job may have replaced
            # its newest checkpoint. If so, read the new checkpoint.
            if find_weights(path) == weights_path:
                raise


def _check_finite(loaded: LoadedWeights) -> None:
    """Raise WeightsError if a value is NaN or infinite, because all outputs would become NaN."""
    counts = {
        name: tensor.numel() - int(tensor.isfinite().sum())
        for name, tensor in loaded.weights.items()
    }
    if names := [name for name, count in counts.items() if count]:
        raise WeightsError(
            f"{loaded.path}: {sum(counts.values()):,} values in {len(names)} of {len(counts)}"
            f" weights are NaN or infinite ({few(names)}): copy the file again, or use weights"
            " from before training diverged"
        )


def _read(path: Path) -> LoadedWeights:
    """Read a weights file or a checkpoint folder."""
    if path.is_dir():
        return _from_checkpoint(path)

    content = read_content(path)
    metadata = content.metadata
    if not {"config", "num_classes", "grid_size", "averaged", "step"} <= metadata.keys():
        return _from_other_program(path, content)

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
            f"{path}: the metadata of its model are damaged: copy it again"
        ) from None


def _from_other_program(path: Path, content: Content) -> LoadedWeights:
    """Return the weights of a file that lacks this project's metadata, under this project's
    names."""
    tensors, notes = without_prefix(content.tensors, path)
    layout = layout_of(tensors)
    weights, dropped = to_ours(layout, tensors) if layout else (tensors, [])

    settings = path.with_name("config.json")
    return LoadedWeights(
        path,
        weights,
        grid_size=_stated_grid(settings, content.options, weights),
        layout=layout.name if layout else "",
        arch=content.arch,
        options={
            name: content.options[name]
            for name in (*TIMM_OPTIONS, *PROGRAM_OPTIONS)
            if content.options.get(name)
        },
        notes=(*content.notes, *notes, *dropped, *network_notes(settings)),
    )


def _stated_grid(
    config: Path, options: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[int, int] | None:
    """Return the position grid stated in `config` or `options`; None if neither states one.

    Without a stated grid, 49 positions could mean 7x7 patches, or 6x8 patches and a class token.

    Args:
        config: timm's or transformers' config.json.
        options: The command line that the training program stored in the file.
    """
    for content in (object_in(config), options):
        with suppress(LookupError, TypeError, AttributeError):
            made_with = content.get("model_args") or content.get("model_kwargs") or {}
            size = (
                made_with.get("img_size")
                or content.get("image_size")
                or content.get("img_size")
                or (content.get("pretrained_cfg") or content)["input_size"]
            )

            sides = (size, size) if isinstance(size, int) else tuple(size)[-2:]
            patch = weights["patch_embed.proj.weight"].shape[2:]
            grid = sides[0] // patch[0], sides[1] // patch[1]
            prefix = sum(weights[name].shape[1] for name in PREFIX_TOKENS if name in weights)
            if weights["pos_embed"].shape[1] - math.prod(grid) in (0, prefix):
                return grid
    return None


def _with_facts(
    loaded: LoadedWeights,
    config: Any,
    num_classes: Any,
    grid_size: Any,
    step: Any,
    class_names: Any,
) -> LoadedWeights:
    """Return `loaded` with the facts recorded by a run. Raises ValueError if a fact is
    malformed."""
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
    is_damaged = not (names_fit and grid_fits and isinstance(config, dict) and num_classes > 0)
    if is_damaged:
        raise ValueError("the metadata of the weights are damaged")

    return replace(
        loaded,
        config=config,
        num_classes=int(num_classes),
        grid_size=(grid_size[0], grid_size[1]) if grid_size else None,
        step=int(step),
        class_names=class_names,
    )


def _from_checkpoint(folder: Path) -> LoadedWeights:
    """Read a checkpoint folder's averaged weights if it has any, and otherwise its weights."""
    try:
        info = checked_info(folder)
        facts = info["facts"]
        loaded = _with_facts(
            LoadedWeights(folder, {}),
            config=info["config"],
            num_classes=facts["num_classes"],
            grid_size=facts["grid_size"],
            step=info["step"],
            class_names=facts.get("class_names", []),  # old checkpoints have none
        )
    except CheckpointError as error:
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
