"""Vision Transformers from ImageNet-scale archives to trained, evaluated and used models.

    import vit

    config = vit.load_config("configs/demo.yaml", ["train.steps=100"])
    vit.fit(config)                         # what launch/train.py does
    trained = vit.load("runs/demo")         # a run, a file of weights, a model folder, or a name of
                                            # the Hugging Face hub (timm/NAME, hf-hub:OWNER/REPO)
    trained.classify("photo.jpg")           # [("seven", 0.93), ("one", 0.04), ...]

Your own training loop needs `create_model`, `open_split`, `create_loader` and `evaluate_model`
(docs/own_loop.md). These names and their arguments are stable. A name is imported when it is first
used, so data preparation works without torch, and starts in a tenth of the time.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit.config.io import load_config as load_config
    from vit.data.create_loader import create_loader as create_loader
    from vit.data.shards.data_set import open_split as open_split
    from vit.evaluation.evaluate import evaluate_model as evaluate_model
    from vit.extras.compose import fit as fit
    from vit.inference.predictor import load as load
    from vit.model import create_model as create_model

    __version__: str

MODULES = {
    "create_loader": "vit.data.create_loader",
    "create_model": "vit.model",
    "evaluate_model": "vit.evaluation.evaluate",
    "fit": "vit.extras.compose",
    "load": "vit.inference.predictor",
    "load_config": "vit.config.io",
    "open_split": "vit.data.shards.data_set",
}
"""A name of the Python interface -> the module that has it."""
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
