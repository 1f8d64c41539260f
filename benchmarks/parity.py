"""Convert weights to other programs' layouts and back, and print a table that compares bits and
logits.

    python benchmarks/parity.py                     B/16, L/16 and H/14 at 224 px, 1,000 classes
    python benchmarks/parity.py --models vit_b16 --programs timm npz

Each program's model strictly loads this project's random weights under the program's names, and
sees the same images. The names are then converted back. "logits" is the largest difference relative
to the largest logit. Kernels that sum values in different orders differ in float32's last digits.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torchvision
import transformers
from timm.models.vision_transformer import _load_weights
from torch import Tensor, nn

from vit.model import create_model
from vit.weights.layouts import LAYOUTS, from_ours, to_ours

VERSIONS = {
    "timm": f"timm {timm.__version__}",
    "torchvision": f"torchvision {torchvision.__version__}",
    "huggingface": f"transformers {transformers.__version__}",
    "npz": f"Google's .npz, read by timm {timm.__version__}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["vit_b16", "vit_l16", "vit_h14"])
    parser.add_argument("--programs", nargs="+", default=list(VERSIONS), choices=list(VERSIONS))
    parser.add_argument("--image-size", type=int, default=224)
    args = parser.parse_args()

    print("| model | program | weights | turned back | logits |")
    print("|---|---|---:|---|---:|")
    for name in args.models:
        torch.manual_seed(0)
        model: Any = create_model(name, args.image_size, 1000).eval()
        with torch.no_grad():  # Replace the zero head, which would make all logits equal.
            for parameter in model.parameters():
                spread = 0.5 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
                parameter.normal_(0, spread)

        images = torch.randn(2, 3, args.image_size, args.image_size)
        with torch.inference_mode():
            expected = model(images)
        for program in args.programs:
            sent, equal = send(program, model)
            other = load(program, model, sent)
            with torch.inference_mode():
                output = other(images)
            logits = getattr(output, "logits", output)
            share = float((logits - expected).abs().max() / expected.abs().max())
            print(
                f"| {name} | {VERSIONS[program]} | {len(sent)} | {equal} | {share:.1e} |",
                flush=True,
            )
            del other, sent


def send(program: str, model: Any) -> tuple[dict[str, Tensor], str]:
    """Convert the weights to the names of `program` and back. Return them and whether the bits
    match."""
    ours = model.state_dict()
    if program == "timm":
        return ours, "the same names"
    sent, left = from_ours(LAYOUTS[program], ours, model.blocks[0].attn.num_heads)
    again, _ = to_ours(LAYOUTS[program], sent)
    equal = not left and again.keys() == ours.keys()
    equal = equal and all(torch.equal(again[name], ours[name]) for name in ours)
    return sent, "equal to the bit" if equal else "DIFFERENT"


def load(program: str, model: Any, weights: dict[str, Tensor]) -> nn.Module:
    """Create the model of `program`, and load `weights` with the program's own function."""
    block = model.blocks[0]
    size, patch = model.image_size[0], model.patch_size[0]
    heads, hidden = block.attn.num_heads, block.mlp.fc1.out_features

    if program == "huggingface":
        config = transformers.ViTConfig(
            hidden_size=model.embed_dim,
            num_hidden_layers=model.depth,
            num_attention_heads=heads,
            intermediate_size=hidden,
            image_size=size,
            patch_size=patch,
            layer_norm_eps=1e-6,
        )
        config.num_labels = model.num_classes
        kind = transformers.ViTForImageClassification
        return kind.from_pretrained(None, config=config, state_dict=dict(weights)).eval()

    if program == "torchvision":
        other = torchvision.models.vision_transformer.VisionTransformer(
            image_size=size,
            patch_size=patch,
            num_layers=model.depth,
            num_heads=heads,
            hidden_dim=model.embed_dim,
            mlp_dim=hidden,
            num_classes=model.num_classes,
        )
        other.load_state_dict(weights)
        return other.eval()

    other = timm.create_model(
        "vit_base_patch16_224",
        img_size=size,
        patch_size=patch,
        embed_dim=model.embed_dim,
        depth=model.depth,
        num_heads=heads,
        num_classes=model.num_classes,
    )

    if program == "timm":
        other.load_state_dict(weights)
        return other.eval()

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "w.npz"
        np.savez(path, **{name: tensor.numpy() for name, tensor in weights.items()})  # type: ignore[arg-type]
        _load_weights(other, str(path))
    return other.eval()


if __name__ == "__main__":
    main()
