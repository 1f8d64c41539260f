"""Compute golden files with programs written in PyTorch. Run this script outside of this project.

    PYTHONPATH=TIMM python make_torch.py PROGRAM FOLDER OUT.npz

PROGRAM: a key of `PROGRAMS`. FOLDER: a checkout of the program's repository. TIMM: a folder with
timm 0.3.2, which these programs require. README.md lists the commits and the packages. The script
calls the program's own network, loss and parameter groups, and contains none of the program's code.
"""

from __future__ import annotations

import re
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SIDE, PATCH, WIDTH, DEPTH, HEADS, CLASSES = 12, 4, 16, 2, 2, 5
"""The sizes of the small network, which has 3x3 patches."""
NORM = partial(nn.LayerNorm, eps=1e-6)
SMALL = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH}
SMALL |= {"num_heads": HEADS, "num_classes": CLASSES, "mlp_ratio": 4, "qkv_bias": True}
SMALL |= {"norm_layer": NORM}
FULL = SMALL | {"img_size": 224, "patch_size": 16, "embed_dim": 768, "depth": 12}
FULL |= {"num_heads": 12, "num_classes": 1000}


def prepare_timm() -> None:
    """Provide `torch._six`, a module that timm 0.3.2 imports and that PyTorch has removed."""
    six = types.ModuleType("torch._six")
    vars(six).update(container_abcs=__import__("collections.abc").abc, string_classes=(str,))
    vars(six).update(int_classes=int, inf=float("inf"))
    sys.modules["torch._six"] = six


def soft_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return timm's loss with smoothed targets. In timm, MixUp smooths the targets and the loss
    does not."""
    from timm.loss import SoftTargetCrossEntropy

    smoothed = targets * (1 - smoothing) + smoothing / targets.shape[1]
    return SoftTargetCrossEntropy()(logits, smoothed)


def binary_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss that engine.py in DeiT and ViT-5 computes with --bce-loss."""
    return nn.BCEWithLogitsLoss()(logits, targets.gt(0.0).type(targets.dtype))


def make_deit(folder: Path) -> tuple[Any, Any, Any]:
    import models  # the repository's models.py, which registers timm's ViT
    from timm.models.vision_transformer import VisionTransformer

    del models
    make = partial(VisionTransformer, drop_path_rate=0.1)
    return make, make, partial(soft_cross_entropy, smoothing=0.1)


def make_deit_distilled(folder: Path) -> tuple[Any, Any, Any]:
    import models

    make = partial(models.DistilledVisionTransformer, drop_path_rate=0.1)
    return make, make, partial(soft_cross_entropy, smoothing=0.1)


def make_deit3(folder: Path) -> tuple[Any, Any, Any]:
    import models_v2 as deit

    layers = {"block_layers": deit.Layer_scale_init_Block}
    make = partial(deit.vit_models, drop_path_rate=0.2, **layers)
    return make, make, binary_loss


def make_vit5(folder: Path) -> tuple[Any, Any, Any]:
    import models_vit5 as vit5

    torch.Tensor.cuda = lambda tensor: tensor  # type: ignore[method-assign]  # its positions' device
    fields = {"block_layers": vit5.Block, "num_registers": 4, "flash": False, "rope": True}
    fields |= {"rope_reg": True, "reg_theta": 100, "qk_norm": True, "drop_path_rate": 0.2}

    def make(**sizes: Any) -> Any:
        sizes |= {"qkv_bias": False, "norm_layer": partial(vit5.RMSNorm, eps=1e-6)}
        return vit5.vit_models(**sizes, **fields)

    return make, make, binary_loss


def make_mae(folder: Path) -> tuple[Any, Any, Any]:
    import models_vit

    make = partial(models_vit.VisionTransformer, global_pool=True, drop_path_rate=0.1)
    return make, make, partial(soft_cross_entropy, smoothing=0.1)


def make_torchvision(folder: Path) -> tuple[Any, Any, Any]:
    from torchvision.models.vision_transformer import VisionTransformer

    def make(**sizes: Any) -> Any:
        return VisionTransformer(
            image_size=sizes["img_size"],
            patch_size=sizes["patch_size"],
            num_layers=sizes["depth"],
            num_heads=sizes["num_heads"],
            hidden_dim=sizes["embed_dim"],
            mlp_dim=4 * sizes["embed_dim"],
            num_classes=sizes["num_classes"],
        )

    return make, make, nn.CrossEntropyLoss(label_smoothing=0.11)


PROGRAMS = {
    "deit": make_deit,
    "deit_distilled": make_deit_distilled,
    "deit3": make_deit3,
    "vit5": make_vit5,
    "mae": make_mae,
    "torchvision": make_torchvision,
}


def groups_of(program: str, model: nn.Module, folder: Path) -> dict[str, tuple[float, float]]:
    """Return each parameter's weight decay and its factor of the learning rate, for a decay of 1.

    torchvision's reference has parameter groups in a script that is not part of its package.
    """
    if program == "torchvision":
        return {}
    if program == "mae":
        sys.path.insert(0, str(folder / "util"))
        from lr_decay import param_groups_lrd

        listed = model.no_weight_decay()
        groups = param_groups_lrd(model, 1.0, listed, layer_decay=0.65)
    else:
        from timm.optim.optim_factory import add_weight_decay

        groups = add_weight_decay(model, 1.0, model.no_weight_decay())
    names = {id(value): name for name, value in model.named_parameters()}
    return {
        names[id(value)]: (group["weight_decay"], group.get("lr_scale", 1.0))
        for group in groups
        for value in group["params"]
    }


@torch.no_grad()
def randomize(model: nn.Module, random: np.random.RandomState) -> None:
    """Fill `model` with values that are exact in float32, and large enough that every part of the
    model affects the results."""
    for name, value in model.named_parameters():
        drawn = random.standard_normal(tuple(value.shape))
        if name.endswith("bias"):
            drawn = 0.3 * drawn
        elif value.ndim == 1:  # scales of norms, LayerScale
            drawn = 1 + 0.3 * drawn
        elif value.shape[0] > 1:
            drawn = drawn / np.sqrt(value[0].numel())
        value.copy_(torch.from_numpy(drawn.astype(np.float32)))


def main() -> None:
    program, folder, out = sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3]
    prepare_timm()
    sys.path.insert(0, str(folder))
    make, make_full, loss = PROGRAMS[program](folder)
    random = np.random.RandomState(0)
    images = random.standard_normal((3, 3, SIDE, SIDE)).astype(np.float32)
    targets = random.dirichlet(np.ones(CLASSES), 3).astype(np.float32)
    golden: dict[str, Any] = {"images": images, "targets": targets}
    torch.manual_seed(0)
    full = make_full(**FULL)
    for name, value in full.named_parameters():
        if not re.search(r"(blocks\.|encoder_layer_)([1-9])", name):
            drawn = value.detach().double()
            golden[f"drawn/{name}"] = [drawn.mean(), drawn.std(correction=0), drawn.abs().max()]
    paths = [(name, m) for name, m in full.named_modules() if type(m).__name__ == "DropPath"]
    rates = {name: module.drop_prob for name, module in paths}
    golden["drop_path"] = [
        rates.get(f"blocks.{n}.drop_path", 0.0) for n in range(len(getattr(full, "blocks", ())))
    ]
    model = make(**SMALL)
    golden |= {f"group/{n}": pair for n, pair in groups_of(program, model, folder).items()}
    randomize(model, random)
    golden |= {f"w/{name}": p.detach().numpy().copy() for name, p in model.named_parameters()}
    model = model.double().eval()
    logits = model(torch.from_numpy(images).double())
    value = loss(logits, torch.from_numpy(targets).double())
    value.backward()
    golden |= {"loss": value.detach(), "logits": logits.detach()}
    for name, parameter in model.named_parameters():
        # No head reads MAE's class token, but it has a gradient, because patches attend to it.
        if parameter.grad is not None:
            golden[f"g/{name}"] = parameter.grad.float()
    np.savez_compressed(out, **golden)
    print(out, Path(out).stat().st_size, logits[0].tolist())


if __name__ == "__main__":
    main()
