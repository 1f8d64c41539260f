"""Compare this ViT with timm, torchvision, Hugging Face, lucidrains and the hardware limit.

    python benchmarks/model.py [--model vit_s16] [--batch-size 8] [--rounds 5] [--quick]

All models have the same sizes, number format and images, and take turns. A cell is a training step
(forward, loss, backward, fused AdamW) or inference, in fp32 or bf16 autocast, eager or compiled per
block as in `train.compile`. *limit: matrix products* is the rate of a model that consists only of
square matrix products, measured in the same round. On a CPU, one thread computes, and figures are
images per second of its CPU time, which other programs disturb least. On a GPU, figures are images
per second.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from measure import Result, create_parser, keep, machine, rows_of, take_turns
from torch import nn

from vit.layers.image_model import ImageModel
from vit.layers.precision import AUTOCAST_DTYPE, autocast
from vit.model import create_model
from vit.start.compiling import compile_blocks
from vit.training.model_summary import count_parameters, flops_per_image

NUM_CLASSES = 1000
PASSES = {"training": 3, "inference": 1}
"""The number of operations in training and inference, relative to a forward pass."""
GEMM_SIDE = {"cpu": 1024, "cuda": 8192}
OURS = "ours"
LIMIT = "limit: matrix products"


@dataclass(frozen=True)
class Sizes:
    """The model sizes, which are equal for all contestants."""

    image_px: int
    patch_px: int
    dim: int
    depth: int
    heads: int
    hidden: int


@dataclass(frozen=True)
class Contestant:
    """A model to compare, and its blocks."""

    model: nn.Module
    blocks: Iterable[nn.Module]


def from_timm(sizes: Sizes) -> Contestant:
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        sizes.image_px,
        sizes.patch_px,
        embed_dim=sizes.dim,
        depth=sizes.depth,
        num_heads=sizes.heads,
        mlp_ratio=sizes.hidden / sizes.dim,
    )
    return Contestant(model, model.blocks)


def from_torchvision(sizes: Sizes) -> Contestant:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        sizes.image_px, sizes.patch_px, sizes.depth, sizes.heads, sizes.dim, sizes.hidden
    )
    return Contestant(model, model.encoder.layers)


def from_transformers(sizes: Sizes) -> Contestant:
    import transformers

    fields: Any = {
        "image_size": sizes.image_px,
        "patch_size": sizes.patch_px,
        "hidden_size": sizes.dim,
        "num_hidden_layers": sizes.depth,
        "num_attention_heads": sizes.heads,
        "intermediate_size": sizes.hidden,
        "num_labels": NUM_CLASSES,
    }
    config = transformers.models.vit.ViTConfig(**fields)
    model = transformers.models.vit.ViTForImageClassification(config)
    blocks = [module for module in model.modules() if type(module).__name__ == "ViTLayer"]
    return Contestant(model, blocks)


def from_lucidrains(sizes: Sizes) -> Contestant:
    """Return lucidrains' ViT, which has norms around the patch embedding, and no q, k and v
    biases."""
    from vit_pytorch import ViT

    model = ViT(
        image_size=sizes.image_px,
        patch_size=sizes.patch_px,
        num_classes=NUM_CLASSES,
        dim=sizes.dim,
        depth=sizes.depth,
        heads=sizes.heads,
        dim_head=sizes.dim // sizes.heads,
        mlp_dim=sizes.hidden,
    )
    blocks = [part for layer in model.transformer.layers for part in layer]
    return Contestant(model, blocks)


PEERS: dict[str, tuple[str, Callable[[Sizes], Contestant]]] = {
    "timm": ("timm", from_timm),
    "torchvision": ("torchvision", from_torchvision),
    "Hugging Face": ("transformers", from_transformers),
    "lucidrains": ("vit-pytorch", from_lucidrains),
}
"""Maps each contestant to its package and the function that creates its model."""


def create_contestants(name: str, fields: dict[str, Any], image_px: int) -> dict[str, Contestant]:
    """Return this project's model and all installed peers, with equal sizes and random weights."""
    model: Any = create_model(name, image_px, NUM_CLASSES, **fields)
    hidden = model.blocks[0].mlp.fc1.out_features
    heads = model.blocks[0].attn.num_heads
    sizes = Sizes(image_px, model.patch_size[0], model.embed_dim, model.depth, heads, hidden)
    contestants = {OURS: Contestant(model, model.blocks)}

    for peer, (package, make) in PEERS.items():
        try:
            contestants[peer] = make(sizes)
        except ImportError:
            print(f"{peer} is skipped: pip install {package}")

    expected = count_parameters(model)
    for peer, contestant in contestants.items():
        number = count_parameters(contestant.model)
        assert number == expected or peer == "lucidrains", f"{peer}: {number:,}, ours {expected:,}"
        for parameter in contestant.model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    return contestants


def now_s(device: torch.device) -> float:
    """Return the current time on the clock that `images_per_s` uses."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def logits_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    output = model(images)
    return getattr(output, "logits", output)


def images_per_s(
    model: nn.Module, images: torch.Tensor, work: str, precision: str, steps: int
) -> float:
    """Return the rate over `steps` training steps or forward passes, after one warm-up step."""
    device = images.device
    labels = torch.arange(len(images), device=device) % NUM_CLASSES
    model.train(work == "training")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        with autocast(precision, device):
            logits = logits_of(model, images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    def infer() -> None:
        with torch.no_grad(), autocast(precision, device):
            logits_of(model, images)

    function = step if work == "training" else infer
    function()
    began_s = now_s(device)
    for _ in range(steps):
        function()
    return steps * len(images) / (now_s(device) - began_s)


def gemm_images_per_s(device: torch.device, precision: str, flops: int) -> float:
    """Return the images per second at `flops` operations per image and the speed of a matrix
    product."""
    side = GEMM_SIDE[device.type]
    dtype = AUTOCAST_DTYPE.get(precision, torch.float32)
    a = torch.randn(side, side, device=device).to(dtype)
    torch.mm(a, a)
    began_s = now_s(device)
    for _ in range(4):
        torch.mm(a, a)
    return 4 * 2 * side**3 / (now_s(device) - began_s) / flops


def measure_cell(
    contestants: dict[str, Contestant], images: torch.Tensor, cell: tuple[str, str, str], args: Any
) -> Result:
    """Measure all contestants. Return a table with their ratios to the peers and the limit."""
    mode, precision, work = cell
    flops = PASSES[work] * flops_per_image(cast(ImageModel, contestants[OURS].model))
    turns: dict[str, Callable[[], float]] = {
        name: partial(images_per_s, contestant.model, images, work, precision, args.steps)
        for name, contestant in contestants.items()
    }
    turns[LIMIT] = partial(gemm_images_per_s, images.device, precision, flops)
    unit = "images/CPU-s" if images.device.type == "cpu" else "images/s"

    if mode == "compiled":
        for name, contestant in contestants.items():
            began_s = time.perf_counter()
            images_per_s(contestant.model, images, work, precision, 1)
            waited_s = time.perf_counter() - began_s
            print(f"{work}, {precision}: compiled {name} in {waited_s:.0f} s", file=sys.stderr)

    peers = [name for name in contestants if name != OURS]
    return take_turns(f"{work}, {precision}, {mode}", unit, turns, args.rounds, [*peers, LIMIT])


def compile_all(contestants: dict[str, Contestant]) -> None:
    """Compile all models per block, like `train.compile`. Blocks may share a graph."""
    torch._dynamo.reset()
    for name, contestant in contestants.items():
        if name == OURS:
            compile_blocks(contestant.model)
        else:
            for block in contestant.blocks:
                block.compile()


def overview(results: list[Result]) -> list[list[str]]:
    """Return one row per cell: this model, the best peer, and both as a fraction of the limit."""
    rows = [["", "ours", "best peer", "", "ours / best", "ours / limit", "best / limit"]]
    for result in results:
        ours = result["rows"][OURS]
        ratio, best = min((value, name) for name, value in ours["ratios"].items() if name != LIMIT)
        peer = result["rows"][best]
        rows.append(
            [
                result["title"],
                f"{ours['median']:.1f}",
                f"{peer['median']:.1f}",
                best,
                f"{ratio:.2f}",
                f"{ours['ratios'][LIMIT]:.2f}",
                f"{peer['ratios'][LIMIT]:.2f}",
            ]
        )
    return rows


def parse_args() -> argparse.Namespace:
    parser = create_parser(__doc__ or "", "model")
    parser.add_argument("--model", default="vit_s16", metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--depth", type=int, metavar="N", help="number of blocks (default: the model's)"
    )
    parser.add_argument(
        "--image-size", type=int, default=224, metavar="PIXELS", help="(default: 224)"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument(
        "--steps", type=int, default=4, metavar="N", help="steps per turn (default: 4)"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))

    for name, choices in (
        ("modes", ("eager", "compiled")),
        ("precisions", ("fp32", "bf16")),
        ("work", ("training", "inference")),
    ):
        parser.add_argument(f"--{name}", nargs="+", default=choices, choices=choices)

    args = parser.parse_args()
    if args.quick:
        args.model, args.image_size, args.batch_size = "vit_ti16", 32, 2
        args.steps, args.rounds, args.depth = 1, 1, 2

    return args


def main() -> None:
    args = parse_args()
    load = os.getloadavg()[0]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fields = {} if args.depth is None else {"depth": args.depth}
    device = torch.device(args.device)

    contestants = create_contestants(args.model, fields, args.image_size)
    for contestant in contestants.values():
        contestant.model.to(device)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)

    results = []
    for mode in args.modes:
        if mode == "compiled":
            compile_all(contestants)
        for precision in args.precisions:
            for work in args.work:
                cell = (mode, precision, work)
                results.append(measure_cell(contestants, images, cell, args))

    packages = ["torch", *(package for peer, (package, _) in PEERS.items() if peer in contestants)]
    depth = "" if args.depth is None else f" with {args.depth} block{'s' * (args.depth > 1)}"
    data = (
        f"{args.model}{depth} at {args.image_size} px, {args.batch_size} images per step,"
        f" {args.steps} steps per turn."
    )

    report = {
        "machine": machine(Path.cwd(), packages),
        "data": data,
        "rounds": args.rounds,
        "load": load,
        "results": results,
    }

    tables = {"Overview": overview(results)}
    tables |= {result["title"].capitalize(): rows_of(result) for result in results}
    keep(args.out, "model", report, tables)


if __name__ == "__main__":
    main()
