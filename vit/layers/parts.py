"""Parts of a model by name, of ours and of timm's."""

from __future__ import annotations

from torch import nn


def grid_size(model: nn.Module) -> tuple[int, int] | None:
    """(h, w) of a model's patches, ours or timm's; None for a model without them."""
    return getattr(model, "grid_size", None) or getattr(
        getattr(model, "patch_embed", None), "grid_size", None
    )


def head_prefixes(model: nn.Module) -> tuple[str, ...]:
    """How the names of head weights begin; a timm model states its own."""
    classifier = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or "head"
    names = (classifier,) if isinstance(classifier, str) else classifier
    return tuple(f"{name}." for name in (*names, "head_dist", "pre_logits"))
