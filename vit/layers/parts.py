"""Find parts of a model by name, for this project's and timm's models."""

from torch import nn


def grid_size(model: nn.Module) -> tuple[int, int] | None:
    """Return the (h, w) of a model's patch grid, or None for a model without patches."""
    return getattr(model, "grid_size", None) or getattr(
        getattr(model, "patch_embed", None), "grid_size", None
    )


def head_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the name prefixes of the head's weights. timm models may use other names."""
    classifier = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or "head"
    names = (classifier,) if isinstance(classifier, str) else classifier
    return tuple(f"{name}." for name in (*names, "head_dist", "pre_logits"))
