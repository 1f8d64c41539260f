"""Divide the parameters of a model into groups by learning rate and weight decay.

Each trainable parameter is in exactly one group. Frozen parameters are in no group. Three settings
of `optim` define the groups: `no_weight_decay` (decayed or not), `layer_decay` (by depth), and
`matrices` (updated by Muon or not).

    named parameters -> (layer, Muon or not, decayed or not) -> groups, for `torch.optim`
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from vit.config.optim_section import MuonConfig, OptimizerConfig

_STEM = (
    "patch_embed",
    "pos_embed",
    "norm_pre",
    "cls_token",
    "reg_token",
    "dist_token",
    "mask_token",
)
"""Name prefixes of the parameters before the blocks, in timm models and in `vit.model`."""
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm)


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return the parameter groups of a plain model (no DDP wrapper), without frozen parameters.

    Each group has `params`, `weight_decay` and `is_decayed`. With `layer_decay` it also has
    `lr_scale`, a factor of the learning rate, and for Muon `use_muon`. Raises ValueError if
    `layer_decay` finds no layers in the model, or Muon finds no matrices.
    """
    is_exempt = _exempt(model, config.no_weight_decay)
    is_matrix = _matrices(config.matrices) if isinstance(config, MuonConfig) else None
    layers = (
        {name: 0 for name, _ in model.named_parameters()}
        if config.layer_decay is None
        else layer_numbers(model, config.layer_decay_form)
    )

    # Keys are (layer, uses Muon, is decayed). With neither layers nor Muon, there are always the
    # same two groups in the same order, even if one of them is empty.
    parameters_of: dict[tuple[int, bool, bool], list[Tensor]] = {}
    if config.layer_decay is None and is_matrix is None:
        parameters_of = {(0, False, True): [], (0, False, False): []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            uses_muon = is_matrix is not None and is_matrix(name, parameter)
            key = (layers[name], uses_muon, not is_exempt(name, parameter))
            parameters_of.setdefault(key, []).append(parameter)

    if is_matrix is not None and not any(uses_muon for _, uses_muon, _ in parameters_of):
        raise ValueError(
            f"optim.name={config.name}: the trained parameters contain no matrices for Muon: set"
            " optim.matrices=timm, or use another optim.name"
        )

    last_layer = max(layers.values(), default=0)
    groups = []
    for (layer, uses_muon, is_decayed), parameters in parameters_of.items():
        group = {
            "params": parameters,
            "weight_decay": config.weight_decay if is_decayed else 0.0,
            "is_decayed": is_decayed,
        }
        if config.layer_decay is not None:
            group["lr_scale"] = config.layer_decay ** (last_layer - layer)
        if is_matrix is not None:
            group["use_muon"] = uses_muon
        groups.append(group)
    return groups


def _exempt(model: nn.Module, rule: str) -> Callable[[str, Tensor], bool]:
    """Return a function (name, value) -> whether the parameter is exempt from weight decay.

    rule: the setting `optim.no_weight_decay`.
    """
    if rule in ("timm", "embeddings"):
        # The model's own list contains multidimensional parameters that are not linear maps.
        named: set[str] = set(getattr(model, "no_weight_decay", set)())
        return lambda name, parameter: (rule == "timm" and parameter.ndim <= 1) or name in named

    def is_exempt(name: str, parameter: Tensor) -> bool:
        """Return whether the rule exempts the parameter `name`."""
        if rule == "nothing":
            return False

        prefix, _, own_name = name.rpartition(".")
        module = model.get_submodule(prefix)
        if rule == "norms":
            # These are torchvision's norms (references/classification/utils.py, set_weight_decay)
            # and RMSNorm. Norms in other libraries have "Norm" in their class name.
            return isinstance(module, _NORMS) or "Norm" in type(module).__name__
        return not isinstance(module, nn.Linear | _ConvNd) or own_name != "weight"

    return is_exempt


def layer_numbers(model: nn.Module, form: str) -> dict[str, int]:
    """Return the layer number of each parameter: 0 before the blocks, 1 in the first block.

    form: the setting `optim.layer_decay_form`. Sources: microsoft/unilm:beit/optim_factory.py
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
        return depth if form == "timm" and name.startswith("norm.") else depth + 1

    return {name: number(name) for name in names}


def _layers_of_timm(model: nn.Module, names: list[str], form: str) -> dict[str, int]:
    """Return layer numbers from timm's `group_matcher`, for a network without a block list."""
    matcher = getattr(model, "group_matcher", None)
    if form != "timm" or matcher is None:
        raise ValueError(
            f"optim.layer_decay: {type(model).__name__} has no list of blocks:"
            f" {'set optim.layer_decay_form=timm' if matcher else 'set optim.layer_decay=null'}"
        )
    from timm.models import group_parameters

    layers = group_parameters(model, matcher(coarse=False), reverse=True)
    last = max(layers.values())
    return {name: layers.get(name, last) for name in names}


def _matrices(rule: str) -> Callable[[str, Tensor], bool]:
    """Return a function (name, value) -> whether Muon updates the parameter.

    rule: the setting `optim.matrices`.
    """

    def is_matrix(name: str, parameter: Tensor) -> bool:
        """Return whether Muon updates the parameter `name`."""
        if rule == "blocks":
            return name.startswith("blocks.") and parameter.ndim == 2
        # timm's rule: timm/optim/muon.py, _is_suitable_for_muon.
        if parameter.ndim < 2 or 1 in parameter.shape[:2]:
            return False
        sides = (parameter.shape[0], math.prod(parameter.shape[1:]))
        return min(sides) >= 4 and max(sides) <= 128 * min(sides)

    return is_matrix
