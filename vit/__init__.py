"""Vision Transformers from ImageNet-scale archives to trained, evaluated and used models.

    import vit

    trained = vit.load("runs/demo")         # a run folder, a file of weights, or a model folder;
                                            # also timm/NAME or hf-hub:OWNER/REPO, fetched
    trained.classify("photo.jpg")           # [("seven", 0.93), ("one", 0.04), ...]

`vit.load` is `vit.inference.predictor.load`. Nothing is imported before it is asked for, torch
neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit.inference.predictor import load as load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    # Preparation of data works without torch, and starts in a tenth of the time.
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vit.inference.predictor import load

    return load
