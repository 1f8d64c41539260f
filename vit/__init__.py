"""Train, evaluate and use Vision Transformers.

    import vit

    config = vit.load_config("configs/demo.yaml", ["train.steps=100"])
    vit.fit(config)                         # the same as launch/train.py
    trained = vit.load("runs/demo")         # or a weights file, a model folder, or a model name on
                                            # the Hugging Face hub (timm/NAME, hf-hub:OWNER/REPO)
    trained.classify("photo.jpg")           # [("seven", 0.93), ("one", 0.04), ...]

Use `create_model`, `open_split`, `create_loader` and `evaluate_model` in your own training loop
(docs/own_loop.md). The names in `vit` and their arguments are stable. The module of each name is
imported on first use, so data preparation starts quickly and does not need torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit.compose import fit as fit
    from vit.config.io import load_config as load_config
    from vit.data.create_loader import create_loader as create_loader
    from vit.data.storage.opening import open_split as open_split
    from vit.evaluation.evaluate import evaluate_model as evaluate_model
    from vit.inference.predictor import load as load
    from vit.model import create_model as create_model

    __version__: str

MODULES = {
    "create_loader": "vit.data.create_loader",
    "create_model": "vit.model",
    "evaluate_model": "vit.evaluation.evaluate",
    "fit": "vit.compose",
    "load": "vit.inference.predictor",
    "load_config": "vit.config.io",
    "open_split": "vit.data.storage.opening",
}
"""Maps each public name to the module that defines it."""

__all__ = [
    "__version__",
    "create_loader",
    "create_model",
    "evaluate_model",
    "fit",
    "load",
    "load_config",
    "open_split",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("vitline")
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
