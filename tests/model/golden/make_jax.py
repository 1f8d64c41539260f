"""Compute golden files with programs written in JAX. Run this script outside of this project.

    python make_jax.py PROGRAM FOLDER OUT.npz

PROGRAM: a key of `PROGRAMS`. FOLDER: a checkout of the program's repository. README.md lists the
commits and the packages. The script calls the program's own network, and contains none of the
program's code.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import optax

SIDE, PATCH, WIDTH, DEPTH, HEADS, CLASSES = 12, 4, 16, 2, 2, 5
"""The sizes of the small network, which has 3x3 patches."""
SMALL = {"num_classes": CLASSES, "patch_size": (PATCH, PATCH), "width": WIDTH, "depth": DEPTH}
SMALL |= {"mlp_dim": 4 * WIDTH, "num_heads": HEADS}
FULL = {"num_classes": 1000, "patch_size": (16, 16), "depth": 1}
"""The sizes of a network with the recipe's width. Only its initial weights are recorded."""


def stub(name: str, **content: Any) -> None:
    """Replace a module that the network imports but does not call."""
    module = types.ModuleType(name)
    vars(module).update(content)
    module.__path__ = []
    sys.modules[name] = module


def big_vision(folder: Path) -> Any:
    sys.path.insert(0, str(folder))
    import big_vision

    stub("big_vision.utils")
    big_vision.utils = sys.modules["big_vision.utils"]
    from big_vision.models import vit

    return vit


def softmax_loss(logits: Any, targets: Any) -> Any:
    return optax.softmax_cross_entropy(logits, targets).mean()


def sigmoid_loss(logits: Any, targets: Any) -> Any:
    return optax.sigmoid_binary_cross_entropy(logits, targets).sum(-1).mean()


def make_big_vision(folder: Path) -> tuple[Any, Any, Any]:
    vit = big_vision(folder)
    fields = {"rep_size": True, "pool_type": "gap", "posemb": "sincos2d"}
    small = vit.Model(**SMALL, **fields, dtype_mm="float64")
    full = vit.Model(**FULL, **fields, width=384, mlp_dim=1536, num_heads=6)
    return lambda p, x: small.apply(p, x)[0], full, softmax_loss


def make_augreg(folder: Path) -> tuple[Any, Any, Any]:
    vit = big_vision(folder)
    fields = {"rep_size": True, "pool_type": "tok"}
    small = vit.Model(**SMALL, **fields, dtype_mm="float64")
    full = vit.Model(**FULL, **fields, width=768, mlp_dim=3072, num_heads=12)
    return lambda p, x: small.apply(p, x)[0], full, sigmoid_loss


def make_algoperf(folder: Path) -> tuple[Any, Any, Any]:
    sys.path.insert(0, str(folder))
    stub("algoperf")
    sys.modules["algoperf"].__path__ = [str(folder / "algoperf")]
    stub("algoperf.spec", Tensor=Any)
    vars(sys.modules["algoperf"])["spec"] = sys.modules["algoperf.spec"]
    for name in ("workloads", "workloads.imagenet_vit", "workloads.imagenet_vit.imagenet_jax"):
        stub(f"algoperf.{name}")
        path = folder / "algoperf" / name.replace(".", "/")
        sys.modules[f"algoperf.{name}"].__path__ = [str(path)]
    from algoperf.workloads.imagenet_vit.imagenet_jax.models import ViT

    small = ViT(**SMALL)
    full = ViT(**FULL, width=384, mlp_dim=1536, num_heads=6)
    return small.apply, full, softmax_loss


def make_vision_transformer(folder: Path) -> tuple[Any, Any, Any]:
    sys.path.insert(0, str(folder))
    from vit_jax.models_vit import VisionTransformer

    def model(width: int, patch: int, depth: int, heads: int, classes: int) -> Any:
        blocks = {"num_layers": depth, "num_heads": heads, "mlp_dim": 4 * width}
        blocks |= {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}
        patches = types.SimpleNamespace(size=(patch, patch))
        return VisionTransformer(
            num_classes=classes,
            patches=patches,
            transformer=blocks,
            hidden_size=width,
            representation_size=width,
            classifier="token",
        )

    small = model(WIDTH, PATCH, DEPTH, HEADS, CLASSES)
    full = model(768, 16, 1, 12, 1000)
    full_apply = types.SimpleNamespace(init=lambda k, x: full.init(k, x, train=False))
    return lambda p, x: small.apply(p, x, train=False), full_apply, softmax_loss


def make_deit3_jax(folder: Path) -> tuple[Any, Any, Any]:
    sys.path.insert(0, str(folder / "src"))
    stub("utils", fixed_sincos2d_embeddings=None)
    from modeling import ViT

    def loss(logits: Any, targets: Any) -> Any:
        return optax.sigmoid_binary_cross_entropy(logits, targets > 0).mean(-1).mean()

    small = ViT(DEPTH, WIDTH, HEADS, CLASSES, layerscale=True, patch_size=PATCH, image_size=SIDE)
    full = ViT(1, 768, 12, 1000, layerscale=True, patch_size=16, image_size=192)
    return small.apply, full, loss


PROGRAMS = {
    "big_vision": make_big_vision,
    "augreg": make_augreg,
    "algoperf": make_algoperf,
    "vision_transformer": make_vision_transformer,
    "deit3_jax": make_deit3_jax,
}


def random_weight(name: str, shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    """Return float64 values that are exact in float32, and large enough that every part of the
    network affects the results."""
    values = random.standard_normal(shape)
    if name.endswith("bias"):
        values = 0.3 * values
    elif len(shape) == 1:  # scales of norms, LayerScale
        values = 1 + 0.3 * values
    elif name.endswith("kernel"):
        values = values / np.sqrt(values.size / shape[-1])
    return values.astype(np.float32).astype(np.float64)


def main() -> None:
    program, folder, out = sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3]
    jax.config.update("jax_enable_x64", True)
    apply, full, loss = PROGRAMS[program](folder)
    random = np.random.RandomState(0)
    images = random.standard_normal((3, SIDE, SIDE, 3)).astype(np.float32)
    targets = random.dirichlet(np.ones(CLASSES), 3).astype(np.float32)
    side = 192 if program == "deit3_jax" else 224
    drawn = full.init(jax.random.PRNGKey(0), np.zeros((1, side, side, 3), np.float32))
    first = flax.traverse_util.flatten_dict(drawn["params"], sep="/")
    if program == "augreg":
        first["head/bias"] += -6.9  # as train.py does with config.init_head_bias
    golden: dict[str, Any] = {"images": images.transpose(0, 3, 1, 2), "targets": targets}
    for name, value in first.items():
        value = np.asarray(value, np.float64)
        golden[f"drawn/{name}"] = [value.mean(), value.std(), np.abs(value).max()]
    weights = small_weights(apply, images, random)
    golden |= {f"w/{name}": value.astype(np.float32) for name, value in weights.items()}

    def run(flat: dict[str, Any]) -> tuple[Any, Any]:
        params = {"params": flax.traverse_util.unflatten_dict(flat, sep="/")}
        logits = apply(params, images.astype(np.float64))
        return loss(logits, targets.astype(np.float64)), logits

    (value, logits), gradients = jax.value_and_grad(run, has_aux=True)(weights)
    assert logits.dtype == np.float64, "a part of the network computes in float32"
    golden |= {"loss": value, "logits": logits}
    golden |= {f"g/{name}": np.float32(gradient) for name, gradient in gradients.items()}
    np.savez_compressed(out, **golden)
    print(out, Path(out).stat().st_size, np.asarray(logits)[0])


def small_weights(apply: Any, images: np.ndarray, random: np.random.RandomState) -> Any:
    """Return random weights for the network, by name."""
    model = getattr(apply, "__self__", None)
    if model is None:
        model = next(cell.cell_contents for cell in apply.__closure__)
    keywords = {"train": False} if type(model).__name__ == "VisionTransformer" else {}
    shapes = jax.eval_shape(lambda: model.init(jax.random.PRNGKey(0), images, **keywords))
    flat = flax.traverse_util.flatten_dict(shapes["params"], sep="/")
    return {name: random_weight(name, flat[name].shape, random) for name in sorted(flat)}


if __name__ == "__main__":
    main()
