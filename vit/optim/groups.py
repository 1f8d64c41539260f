"""The parameters of a model in groups that one learning rate and one weight decay apply to.

Each trainable parameter is in exactly one group; a frozen one is in none. What divides them are
settings of `optim`: which are decayed (`no_weight_decay`), at which depth they are (`layer_decay`),
and which Muon takes as matrices (`matrices`).

    named parameters -> (layer, Muon's or not, decayed or not) -> groups, for `torch.optim`
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from vit.config.optim_section import MuonConfig, OptimizerConfig

_STEM = (
    *("patch_embed", "pos_embed", "norm_pre"),
    *("cls_token", "reg_token", "dist_token", "mask_token"),
)
"""How the names of what is before the blocks begin, in timm's models and ours."""


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return the groups of the trainable parameters of a plain model (no DDP wrapper).

    Of each group: `params`, `weight_decay`, `is_decayed`; with `layer_decay` also `lr_scale`, the
    factor of its learning rate; for Muon also `use_muon`. Raises ValueError where the model has no
    layers to tell apart, or no matrices.
    """
    is_exempt = _exempt(model, config.no_weight_decay)
    layer_of: Callable[[str], int] = lambda name: 0  # noqa: E731
    last = 0
    if config.layer_decay is not None:
        layers = layer_numbers(model, config.layer_decay_form)
        layer_of = layers.__getitem__
        last = max(layers.values())
    is_matrix = _matrices(config.matrices) if isinstance(config, MuonConfig) else None
    groups: dict[tuple[int, bool, bool], list[Tensor]] = {}
    if config.layer_decay is None and is_matrix is None:
        groups = {(0, False, True): [], (0, False, False): []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            uses_muon = is_matrix is not None and is_matrix(name, parameter)
            key = (layer_of(name), uses_muon, not is_exempt(name, parameter))
            groups.setdefault(key, []).append(parameter)
    if is_matrix is not None and not any(uses_muon for _, uses_muon, _ in groups):
        raise ValueError(
            "optim.name=muon finds no matrix in what is trained: set optim.matrices=timm, or"
            " another optim.name"
        )
    made = []
    for (layer, uses_muon, is_decayed), parameters in groups.items():
        decay = config.weight_decay if is_decayed else 0.0
        group = {"params": parameters, "weight_decay": decay, "is_decayed": is_decayed}
        if config.layer_decay is not None:
            group["lr_scale"] = config.layer_decay ** (last - layer)
        if is_matrix is not None:
            group["use_muon"] = uses_muon
        made.append(group)
    return made


def _exempt(model: nn.Module, which: str) -> Callable[[str, Tensor], bool]:
    """What says of a parameter, by name and value, whether it is not decayed."""
    if which in ("timm", "embeddings"):
        # Weights of several dimensions that are no linear maps are named by the model.
        named: set[str] = set(getattr(model, "no_weight_decay", set)())
        has_vectors = which == "timm"
        return lambda name, parameter: (has_vectors and parameter.ndim <= 1) or name in named
    kinds: tuple[type, ...] = (nn.Linear, nn.modules.conv._ConvNd)
    if which == "norms":
        # As torchvision's references/classification/utils.py: set_weight_decay has them, and RMS
        # norm, which it lacks. Ours are torch's, or called so.
        kinds = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm)
    of_kind = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if isinstance(module, kinds) or (which == "norms" and "Norm" in type(module).__name__)
        for name, _ in module.named_parameters(recurse=False)
        if which == "norms" or name == "weight"
    }
    if which == "nothing":
        return lambda name, parameter: False
    return lambda name, parameter: (name in of_kind) == (which == "norms")


def layer_numbers(model: nn.Module, form: str) -> dict[str, int]:
    """Return the layer of each parameter by its name: 0 what is before the blocks, 1 the first.

    form: `optim.layer_decay_form`. Source: microsoft/unilm:beit/optim_factory.py
    (get_num_layer_for_vit) and timm:timm/optim/_param_groups.py (param_groups_layer_decay).
    """
    names = [name for name, _ in model.named_parameters()]
    blocks: Any = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList):
        return _layers_of_timm(model, names, form)
    depth = len(blocks)

    def number(name: str) -> int:
        if name.startswith(_STEM):
            return 0
        if name.startswith("blocks."):
            return int(name.split(".")[1]) + 1
        if form == "timm" and name.startswith("norm."):
            return depth
        return depth + 1

    return {name: number(name) for name in names}


def _layers_of_timm(model: nn.Module, names: list[str], form: str) -> dict[str, int]:
    """Layers of a network of stages, as timm's own description of it says."""
    matcher: Any = getattr(model, "group_matcher", None)
    if form != "timm" or matcher is None:
        raise ValueError(
            f"optim.layer_decay: {type(model).__name__} has no blocks to count:"
            f" {'set optim.layer_decay_form=timm' if matcher else 'remove it'}"
        )
    from timm.models import group_parameters

    layers = group_parameters(model, matcher(coarse=False), reverse=True)
    last = max(layers.values())
    return {name: layers.get(name, last) for name in names}


def _matrices(which: str) -> Callable[[str, Tensor], bool]:
    """What says of a parameter whether Muon takes it."""

    def is_matrix(name: str, parameter: Tensor) -> bool:
        if which == "blocks":
            return name.startswith("blocks.") and parameter.ndim == 2
        # timm's rule: timm/optim/muon.py, _is_suitable_for_muon.
        if parameter.ndim < 2 or 1 in parameter.shape[:2]:
            return False
        sides = (parameter.shape[0], math.prod(parameter.shape[1:]))
        return min(sides) >= 4 and max(sides) <= 128 * min(sides)

    return is_matrix
