"""The Vision Transformer: images in, logits out.

The data's story, with B images, C channels, H x W pixels, a grid of h x w patches, P prefix tokens
(1 or 0), N = P + h*w tokens, D = `embed_dim`:

1. Patches    (B, C, H, W) -> (B, h*w, D)    one linear map for each patch, row by row       patch_embed
2. Positions  (B, h*w, D) -> (B, N, D)       the class token goes first, positions are added  cls_token, pos_embed
3. Blocks     (B, N, D) -> (B, N, D)         `depth` times attention and MLP, both residual    blocks
4. Pooling    (B, N, D) -> (B, D)            the class token, or the mean of the patch tokens  norm, fc_norm
5. Head       (B, D) -> (B, num_classes)     linear, after a tanh layer if one is asked for    pre_logits, head

The paper is Dosovitskiy et al. 2021 (arXiv 2010.11929), equations 1-4 and Table 1. Arguments and
state-dict keys are those of huggingface/pytorch-image-models:timm/models/vision_transformer.py, so
that weights travel both ways without a mapping; `timm/<any>` makes one of timm's own models.
Attention picks its kernel and autocast its dtypes, up to the head, whose logits are in fp32.

    python -m vit.model vit_b16 --image-size 224        shapes at every stage, parameters, GFLOP (needs neither data nor memory)
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vit.config import ModelConfig

PRESETS = {
    "ti": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "s": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "b": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "l": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "h": {"embed_dim": 1280, "depth": 32, "num_heads": 16},
}
"""B, L, H: Table 1 of the paper; Ti and S: Touvron et al. 2021 (DeiT, arXiv 2012.12877), Table
1."""


class PatchEmbed(nn.Module):
    """Cuts images into patches and maps each to a token: (B, C, H, W) -> (B, h*w, D), row by row
    (equation 1)."""

    def __init__(self, patch_size: tuple[int, int], in_chans: int, embed_dim: int):
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention, (B, N, D) -> (B, N, D) (appendix A of the paper). `qkv` holds
    queries, keys and values, in that order."""

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool, attn_drop: float, proj_drop: float
    ):
        super().__init__()
        self.num_heads = num_heads
        self.attn_drop = attn_drop
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        # each (B, heads, N, D / heads)
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.attn_drop if self.training else 0.0
        )
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    """Two linear layers with a GELU between them, for each token alone: (B, N, D) -> (B, N, D)."""

    def __init__(self, dim: int, hidden_dim: int, drop: float):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(F.gelu(self.fc1(x)))))


class LayerScale(nn.Module):
    """A learned factor for each channel of a residual branch (Touvron et al. 2021, CaiT, arXiv
    2103.17239, equation 4)."""

    def __init__(self, dim: int, init_values: float):
        super().__init__()
        self.init_values = init_values
        self.gamma = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016, arXiv 1603.09382): in training, zeroes the branch of a
    sample with probability `rate` in [0, 1).

    Those kept are divided by 1 - rate, so that the expectation is that of evaluation.
    """

    keep_prob: Tensor

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        # torch.compile makes a graph for each value of a Python number that a forward pass reads:
        # one for each block, as each has another rate, and after eight of them none at all. Of a
        # tensor it looks at the shape only. Not in the state dict: the rate is not learned.
        self.register_buffer("keep_prob", torch.empty(()), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fills the buffer, also after `to_empty`."""
        self.keep_prob.fill_(1.0 - self.rate)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        # In fp32: bf16 has 256 numbers between 1/2 and 1, too few for a rate of .1.
        kept = torch.rand(x.shape[0], *(1,) * (x.ndim - 1), device=x.device) < self.keep_prob
        return x * (kept.to(x.dtype) / self.keep_prob)

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3f}"


class Block(nn.Module):
    """One pre-norm encoder block, (B, N, D) -> (B, N, D) (equations 2 and 3), with LayerScale and
    stochastic depth on both branches."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        qkv_bias: bool,
        proj_drop: float,
        attn_drop: float,
        drop_path: float | None,
        init_values: float | None,
    ):
        super().__init__()
        self.norm1 = layer_norm(dim)
        self.attn = Attention(dim, num_heads, qkv_bias, attn_drop, proj_drop)
        self.ls1 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.norm2 = layer_norm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), proj_drop)
        self.ls2 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path = nn.Identity() if drop_path is None else DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))


class VisionTransformer(nn.Module):
    """A ViT for one image size. Images, patches: pixels, one number or (height, width); rates:
    probabilities in [0, 1).

    Args: class_token: prepend a learned token, which `global_pool="token"` reads. global_pool: what
        the head sees: "token", or "avg", the mean of the patch tokens. pos_embed: "learn", or
        "sincos2d" (fixed, see `sincos2d_posemb`; a buffer, so that it travels in checkpoints all
        the same). pos_drop_rate: dropout after the positions; proj_drop_rate: after every dense
        layer but qkv (the paper's, appendix B.1, is both). drop_path_rate: stochastic depth of the
        last block, growing linearly from 0 at the first. init_values: initial LayerScale; None: no
        LayerScale. representation_size: width of the tanh layer before the head; None: no such
        layer (the paper's section 3.1: only for pre-training).

    Raises:
        ValueError: all that does not fit together, with what would.
    """

    def __init__(
        self,
        image_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        class_token: bool = True,
        global_pool: str = "token",
        pos_embed: str = "learn",
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        init_values: float | None = None,
        representation_size: int | None = None,
    ):
        super().__init__()
        self.image_size = _height_width(image_size, "image_size")
        self.patch_size = _height_width(patch_size, "patch_size")
        problems = []
        for side, size, patch in zip(
            ("height", "width"), self.image_size, self.patch_size, strict=True
        ):
            if size % patch:
                nearest = [
                    str(n) for n in (size // patch * patch, size // patch * patch + patch) if n
                ]
                problems.append(
                    f"image {side} {size} is no multiple of patch {side} {patch}: the nearest that"
                    f" work are {' and '.join(nearest)}"
                )
        if embed_dim % num_heads:
            divisor = min(
                (n for n in range(1, embed_dim + 1) if embed_dim % n == 0),
                key=lambda n: abs(n - num_heads),
            )
            problems.append(
                f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}: the nearest"
                f" number of heads is {divisor}"
            )
        if global_pool not in ("token", "avg"):
            problems.append(f"global_pool is {global_pool!r}: expected 'token' or 'avg'")
        if global_pool == "token" and not class_token:
            problems.append(
                "global_pool 'token' needs class_token=True: set it, or use global_pool 'avg'"
            )
        if pos_embed not in ("learn", "sincos2d"):
            problems.append(f"pos_embed is {pos_embed!r}: expected 'learn' or 'sincos2d'")
        if pos_embed == "sincos2d" and (embed_dim % 4 or embed_dim < 8):
            problems.append(
                f"pos_embed 'sincos2d' needs an embed_dim of 8, 12, 16 and so on, not {embed_dim}"
            )
        if not 0.0 <= drop_path_rate < 1.0:
            problems.append(f"drop_path_rate is {drop_path_rate}: expected 0 <= rate < 1")
        if problems:
            raise ValueError("; ".join(problems))

        self.grid_size = (
            self.image_size[0] // self.patch_size[0],
            self.image_size[1] // self.patch_size[1],
        )
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.embed_dim = embed_dim
        self.depth = depth
        self.num_prefix_tokens = 1 if class_token else 0
        self.global_pool = global_pool
        # timm then normalises after pooling, and calls that norm fc_norm
        pools = global_pool == "avg"

        self.patch_embed = PatchEmbed(self.patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim)) if class_token else None
        positions = torch.empty(1, self.num_prefix_tokens + math.prod(self.grid_size), embed_dim)
        if pos_embed == "learn":
            self.pos_embed = nn.Parameter(positions)
        else:
            self.register_buffer("pos_embed", positions)
        self.pos_drop = nn.Dropout(pos_drop_rate)
        drop_path_rates: list[float | None] = [None] * depth
        if drop_path_rate:  # also of the first block, whose rate is 0: all blocks are one graph
            drop_path_rates = [drop_path_rate * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = nn.Sequential(
            *(
                Block(
                    embed_dim,
                    num_heads,
                    mlp_ratio,
                    qkv_bias,
                    proj_drop_rate,
                    attn_drop_rate,
                    rate,
                    init_values,
                )
                for rate in drop_path_rates
            )
        )
        self.norm = nn.Identity() if pools else layer_norm(embed_dim)
        self.fc_norm = layer_norm(embed_dim) if pools else nn.Identity()
        self.pre_logits: nn.Module = nn.Identity()
        if representation_size is not None:
            self.pre_logits = nn.Sequential(
                OrderedDict(fc=nn.Linear(embed_dim, representation_size), act=nn.Tanh())
            )
        self.head = nn.Linear(representation_size or embed_dim, num_classes)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draws all weights anew, also those of a model that was built on the meta device and moved
        by `to_empty`.

        Linear layers and learned positions: normal, std .02; class token: normal, std 1e-6; biases
        0 (timm's `init_weights_vit_timm`). Patches: LeCun's truncated normal, variance 1 / fan-in,
        as Flax draws it (google-research/vision_transformer:vit_jax/models_vit.py). Head: 0 (the
        same file, and the paper's appendix B.1.1), so that the first logits are 0 and the first
        loss is ln(num_classes).
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, (nn.LayerNorm, DropPath)):
                module.reset_parameters()
            elif isinstance(module, LayerScale):
                nn.init.constant_(module.gamma, module.init_values)
            if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
                nn.init.zeros_(module.bias)
        proj = self.patch_embed.proj
        # Cutting a normal at two deviations leaves .8796 of its deviation; torch does not make up
        # for that, Flax does.
        std = math.sqrt(1.0 / proj.weight[0].numel()) / 0.87962566103423978
        nn.init.trunc_normal_(proj.weight, std=std, a=-2 * std, b=2 * std)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=1e-6)
        if isinstance(self.pos_embed, nn.Parameter):
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        else:
            self.pos_embed.copy_(
                sincos2d_posemb(self.grid_size, self.embed_dim, self.num_prefix_tokens)
            )
        nn.init.zeros_(self.head.weight)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters of more than one dimension that are no weights of a linear map
        (timm's convention)."""
        return {"pos_embed", "cls_token"}

    def forward_features(self, images: Tensor) -> Tensor:
        """images: (B, C, H, W) float -> tokens: (B, N, D), prefix first; normalised here with
        `global_pool="token"`, after pooling with "avg"."""
        expected = (self.in_chans, *self.image_size)
        if tuple(images.shape[1:]) != expected:
            raise ValueError(
                f"images are {tuple(images.shape)}, expected (batch,"
                f" {', '.join(map(str, expected))}): resize them, or build the model for that"
                " image_size and in_chans (vit.weights resamples the positions)"
            )
        x = self.patch_embed(images)
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.pos_drop(x + self.pos_embed)
        return self.norm(self.blocks(x))

    def forward_head(self, tokens: Tensor) -> Tensor:
        """tokens: (B, N, D) of `forward_features` -> logits: (B, num_classes), which autocast
        leaves in the weights' dtype."""
        x = (
            tokens[:, 0]
            if self.global_pool == "token"
            else tokens[:, self.num_prefix_tokens :].mean(dim=1)
        )
        # bf16 keeps 8 bits: of a thousand logits the two largest are the same number for one image
        # in 400, and the class number would decide. The head is a thousandth of the operations.
        with without_autocast(x.device):
            return self.head(self.pre_logits(self.fc_norm(x).to(self.head.weight.dtype)))

    def forward(self, images: Tensor) -> Tensor:
        """images: (B, C, H, W) float -> logits: (B, num_classes). Raises ValueError for another C,
        H or W than the model's."""
        return self.forward_head(self.forward_features(images))


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Autocast off on `device`; the meta device has none (torch.amp.is_autocast_available would
    tell, but torch 2.11 does not compile it)."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def layer_norm(dim: int) -> nn.LayerNorm:
    """LayerNorm with the paper's epsilon, which is Flax's default and not torch's."""
    return nn.LayerNorm(dim, eps=1e-6)


def sincos2d_posemb(grid_size: tuple[int, int], dim: int, num_prefix_tokens: int) -> Tensor:
    """Fixed 2-D sine-cosine positions, (1, P + h*w, dim) float32: a quarter each of sin x, cos x,
    sin y, cos y; 0 for prefix tokens.

    As in google-research/big_vision:big_vision/models/vit.py (`posemb_sincos_2d`): frequencies from
    1 down to exactly 1/10,000. MoCo v3 (arXiv 2104.02057), where they come from, stops one step
    before. `dim` is a multiple of 4 and at least 8.
    """
    quarter = dim // 4
    frequencies = 10_000.0 ** (-torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid_size), indexing="ij")
    x, y = x.reshape(-1, 1) * frequencies, y.reshape(-1, 1) * frequencies
    positions = torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), dim=1)
    return torch.cat((positions.new_zeros(num_prefix_tokens, dim), positions)).unsqueeze(0).float()


def create_model(
    name: str | ModelConfig,
    image_size: int | tuple[int, int] = 224,
    num_classes: int = 1000,
    **fields: Any,
) -> nn.Module:
    """Create a model by name: `vit_{ti,s,b,l,h}{patch}` (such as vit_b16), or `timm/<any>` for a
    timm model, without its weights.

    A `ModelConfig` as first argument gives name, image size and fields: `create_model(config.model,
    num_classes=10)`. `fields` are arguments of `VisionTransformer`, or of timm's model, and win
    over the name. A guest gets `image_size` (height, width) and `in_chans` as attributes, for
    `flops_per_image` and others who need an input for it.

    Raises: ValueError: unknown name or field, with the nearest that exists; or values that do not
        fit together.
    """
    if isinstance(name, ModelConfig):
        return create_model(name.name, name.image_size, num_classes, **{**name.fields(), **fields})
    if name.startswith("timm/"):
        return _create_guest(name.removeprefix("timm/"), image_size, num_classes, fields)
    match = re.fullmatch(r"vit_(ti|s|b|l|h)([1-9]\d*)", name)
    if match is None:
        known = [f"vit_{size}{patch}" for patch in (16, 14, 32, 8) for size in PRESETS]
        form = f"vit_{{{','.join(PRESETS)}}}{{patch}}"
        raise ValueError(
            f"unknown model {name!r}{_did_you_mean(name, known)}: expected {form}, such as vit_b16,"
            " or timm/<name>"
        )
    allowed = list(inspect.signature(VisionTransformer).parameters)
    unknown = [
        f"{field!r}{_did_you_mean(field, allowed)}" for field in fields if field not in allowed
    ]
    if unknown:
        raise ValueError(
            f"unknown model field {', '.join(unknown)}; the fields are {', '.join(allowed)}"
        )
    return VisionTransformer(
        image_size,
        num_classes=num_classes,
        **{**PRESETS[match[1]], "patch_size": int(match[2]), **fields},
    )


def _create_guest(
    name: str, image_size: int | tuple[int, int], num_classes: int, fields: dict[str, Any]
) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise ValueError(
            f"model timm/{name} needs timm, which is not installed: pip install timm"
        ) from error
    if not timm.is_model(name):
        raise ValueError(
            f"timm {timm.__version__} has no model"
            f" {name!r}{_did_you_mean(name, timm.list_models())}"
        )
    fields = {"num_classes": num_classes, "in_chans": 3, **fields}
    model: Any
    try:
        try:
            model = timm.create_model(name, img_size=image_size, **fields)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            # convolutional networks take any size and have no such argument
            model = timm.create_model(name, **fields)
    except (TypeError, RuntimeError, ValueError, AssertionError) as error:
        if unknown := _unknown_to_guest(name, fields):
            remedy = " ".join(f"model.{field}=null" for field in unknown)
            raise ValueError(
                f"timm's {name} has no {', '.join(unknown)}: set {remedy}, or leave them out of the"
                " config"
            ) from error
        raise ValueError(
            f"timm {timm.__version__} cannot make {name!r} with image_size={image_size} and"
            f" {fields}: {error}"
        ) from error
    model.image_size = _height_width(image_size, "image_size")
    model.in_chans = fields["in_chans"]
    return model


def _unknown_to_guest(name: str, fields: dict[str, Any]) -> list[str]:
    """Those of `fields` that timm's model does not take, which Python names one at a time."""
    import timm

    fields = dict(fields)
    unknown = list[str]()
    while True:
        try:
            with torch.device("meta"):
                timm.create_model(name, **fields)
            return sorted(unknown)
        except TypeError as error:
            found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if found is None or found[1] not in fields:
                return sorted(unknown)
            unknown.append(found[1])
            del fields[found[1]]
        except (RuntimeError, ValueError, AssertionError):
            return sorted(unknown)


def count_parameters(model: nn.Module) -> int:
    """Number of trainable and frozen parameters; buffers (fixed positions) do not count."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_image(model: Any) -> int:
    """Floating-point operations of one image's forward pass in matrix products and convolutions: 2
    for each multiply-add.

    `model` comes from `create_model` and is not wrapped (DDP, FSDP2) yet. Nothing is computed and
    nothing allocated: the pass runs on the meta device.
    """
    weights = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }
    # two, since a batch norm in training refuses one
    images = torch.empty(2, model.in_chans, *model.image_size, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        torch.func.functional_call(model, weights, (images,))
    return counter.get_total_flops() // 2


def _height_width(size: int | tuple[int, int], name: str) -> tuple[int, int]:
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
        raise ValueError(
            f"{name} is {size!r}: expected a positive number of pixels, or (height, width)"
        )
    return pair


def _did_you_mean(word: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(word.lower(), known, n=3, cutoff=0.4)
    return f" (did you mean {' or '.join(nearest)}?)" if nearest else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vit.model",
        description="Shapes at every stage, parameters and GFLOP of a model.",
    )
    parser.add_argument(
        "name",
        nargs="?",
        default="vit_b16",
        help="vit_{ti,s,b,l,h}{patch} or timm/<any> (default: %(default)s)",
    )
    parser.add_argument(
        "--image-size",
        type=int,
        nargs="+",
        default=[224],
        metavar="PIXELS",
        help="side, or height and width (default: 224)",
    )
    parser.add_argument("--num-classes", type=int, default=1000, help="(default: %(default)s)")
    args = parser.parse_args()
    model: Any
    try:
        with torch.device("meta"):
            model = create_model(
                args.name,
                args.image_size[0] if len(args.image_size) == 1 else args.image_size,
                args.num_classes,
            )
    except ValueError as error:
        parser.error(str(error))

    def report(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            shapes = [
                "({})".format(", ".join(map(str, ("B", *tensor.shape[1:]))))
                for tensor in (inputs[0], output)
            ]
            print(
                f"{name:<20} {type(module).__name__:<18} {shapes[0]:<20} -> {shapes[1]:<20}"
                f" {count_parameters(module):>12,}"
            )

        return hook

    for name, module in model.named_modules():
        if (
            name
            and ("." not in name or name.startswith("blocks.0."))
            and not isinstance(module, (nn.Identity, nn.Dropout, DropPath))
        ):
            module.register_forward_hook(report(name))
    print(f"{'stage':<20} {'module':<18} {'in':<20}    {'out':<20} {'parameters':>12}")
    gflop = flops_per_image(model) / 1e9
    print(
        f"{args.name} at {model.image_size[0]}x{model.image_size[1]}: {count_parameters(model):,}"
        f" parameters, {gflop:.2f} GFLOP an image forward (2 for each multiply-add; papers often"
        " count 1)"
    )


if __name__ == "__main__":
    main()
