"""The Vision Transformer: images in, logits out.

With B images, C channels, H x W pixels, a grid of h x w patches, P prefix tokens (1 or 0),
N = P + h*w tokens and D = `embed_dim`:

1. Patches    (B, C, H, W) -> (B, h*w, D)    one linear map per patch        patch_embed
2. Positions  (B, h*w, D)  -> (B, N, D)      class token in front, plus      cls_token, pos_embed
                                             a learned position per token
3. Blocks     (B, N, D)    -> (B, N, D)      `depth` times attention, MLP    blocks
4. Pooling    (B, N, D)    -> (B, D)         class token, or patch mean      norm, fc_norm
5. Head       (B, D) -> (B, num_classes)     linear, optional tanh layer     pre_logits, head

The equations are those of Dosovitskiy et al. 2021 (arXiv 2010.11929), quoted at the lines that
compute them. Arguments and state-dict keys are timm's
(huggingface/pytorch-image-models:timm/models/vision_transformer.py), so that weights travel both
ways without a mapping. `timm/<name>` makes one of timm's own models.

    python -m vit.model vit_b16 --image-size 224     shapes at each stage, parameters, GFLOP
"""

from __future__ import annotations

import math
import re
import runpy
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.config.schema import ModelConfig
from vit.layers.arguments import check_arguments, height_width
from vit.layers.blocks import Blocks
from vit.layers.drop_path import DropPath, add_branch, drop_path_rates
from vit.layers.layer_scale import LayerScale
from vit.layers.posemb import sincos2d_posemb
from vit.precision import without_autocast
from vit.system.spelling import did_you_mean
from vit.timm_model import create_timm_model

PRESETS = {
    "ti": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "s": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "b": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "l": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "h": {"embed_dim": 1280, "depth": 32, "num_heads": 16},
}
"""B, L, H: Table 1 of the paper. Ti, S: Table 1 of DeiT (Touvron et al. 2021, arXiv 2012.12877)."""


def create_model(
    name: str | ModelConfig,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    **fields: Any,
) -> nn.Module:
    """Create a model by name, with fresh weights.

    Args:
        name: `vit_{ti,s,b,l,h}{patch}`, such as vit_b16; or `timm/<name>`, without its weights; or
            a `ModelConfig`, which gives name and arguments.
        image_size: pixels, one number or (height, width); 224 by default.
        num_classes: outputs of the head; 1,000 by default.
        fields: further arguments of `VisionTransformer`, or of timm's constructor for
            `timm/<name>`. What is given here wins over the name and the `ModelConfig`.

    Raises:
        ValueError: an unknown name, with the nearest that exists; values that do not fit together.
    """
    given = {"image_size": image_size, "num_classes": num_classes}
    fields |= {key: value for key, value in given.items() if value is not None}
    if isinstance(name, ModelConfig):
        fields = name.model_dump(exclude={"name"}, exclude_none=True) | fields
        name = name.name
    if name.startswith("timm/"):
        return create_timm_model(name.removeprefix("timm/"), **fields)
    match = re.fullmatch(r"vit_(ti|s|b|l|h)([1-9]\d*)", name)
    if match is None:
        known = [f"vit_{size}{patch}" for patch in (16, 14, 32, 8) for size in PRESETS]
        raise ValueError(
            f"unknown model {name!r}{did_you_mean(name, known)}: expected"
            f" vit_{{{','.join(PRESETS)}}}{{patch}}, such as vit_b16, or timm/<name>"
        )
    return VisionTransformer(**{**PRESETS[match[1]], "patch_size": int(match[2]), **fields})


class PatchEmbed(nn.Module):
    """Cut images into patches and embed each: (B, C, H, W) -> (B, h*w, D), row by row.

    The products x_p E of equation 1.
    """

    def __init__(self, patch_size: tuple[int, int], in_chans: int, embed_dim: int):
        super().__init__()
        # Patches do not overlap, so a convolution whose stride is its kernel is that linear map.
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        # Row by row is the order of the positions, for `vit.layers.posemb` and for timm's weights.
        return self.proj(images).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention (appendix A): (B, N, D) -> (B, N, D)."""

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
        # [q, k, v] = z U_qkv (equation 5). The 3*D outputs are ordered (q/k/v, head, channel): any
        # other order would load timm's weights without an error and compute something else.
        qkv = self.qkv(x).unflatten(2, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, N, D / heads)
        # softmax(q k^T / sqrt(D / heads)) v (equations 6, 7) in one kernel. The N x N attention
        # matrix is never in memory, so vit/report computes it again for its attention maps. The
        # function does not know `self.training`: dropout must be set to 0 here in evaluation.
        dropout = self.attn_drop if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        # [SA_1; ...; SA_heads] U_msa (equation 8)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    """Two linear layers with a GELU between them, per token: (B, N, D) -> (B, N, D)."""

    def __init__(self, dim: int, hidden_dim: int, drop: float):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        # The exact GELU: published weights were trained with it, not with the tanh approximation.
        x = self.drop(F.gelu(self.fc1(x)))
        return self.drop(self.fc2(x))


class Block(nn.Module):
    """One pre-norm encoder block: (B, N, D) -> (B, N, D).

    Both residual branches may have LayerScale (`init_values`) and stochastic depth: `drop_path`, or
    in its other form `rows`, those samples of each branch that compute it
    (vit/layers/drop_path.py).
    """

    def __init__(
        self, dim: int, attn: Attention, mlp: Mlp, drop_path: nn.Module, init_values: float | None
    ):
        super().__init__()
        # The names, and their order, are those of timm's state dict.
        self.norm1 = layer_norm(dim)
        self.attn = attn
        self.ls1 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.norm2 = layer_norm(dim)
        self.mlp = mlp
        self.ls2 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path = drop_path

    def forward(self, x: Tensor, *rows: Tensor) -> Tensor:
        if rows:
            attn_rows, mlp_rows = rows
            x = add_branch(x, self._attn_branch, attn_rows)
            return add_branch(x, self._mlp_branch, mlp_rows)
        # The residual path itself has no norm: what the last block returns needs one more.
        # z' = MSA(LN(z)) + z (equation 2)
        x = x + self.drop_path(self._attn_branch(x))
        # z = MLP(LN(z')) + z' (equation 3)
        return x + self.drop_path(self._mlp_branch(x))

    def _attn_branch(self, x: Tensor) -> Tensor:
        return self.ls1(self.attn(self.norm1(x)))

    def _mlp_branch(self, x: Tensor) -> Tensor:
        return self.ls2(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    """A ViT for one image size.

    Args (all of them with a sentence each: `ModelConfig` in vit/config/schema.py):
        image_size, patch_size: pixels, one number or (height, width).
        global_pool: what the head sees: "token", the class token; or "avg", the mean of the patch
            tokens.
        pos_embed: "learn", or "sincos2d" (fixed, see `sincos2d_posemb`).
        proj_drop_rate: dropout after every dense layer but qkv; the paper's (appendix B.1) is this
            and `pos_drop_rate`.
        drop_path_schedule: "linear", from 0 at the first block to `drop_path_rate` at the last; or
            "constant".
        drop_path_form: "mask", or "subset", which does not compute what it drops.
        representation_size: width of a tanh layer before the head, for pre-training (section 3.1).

    Raises:
        ValueError: everything that does not fit together, with what would.
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
        drop_path_schedule: str = "linear",
        drop_path_form: str = "mask",
        init_values: float | None = None,
        representation_size: int | None = None,
    ):
        check_arguments(locals())
        super().__init__()
        self.image_size = height_width(image_size, "image_size")
        self.patch_size = height_width(patch_size, "patch_size")
        height, width = self.image_size
        self.grid_size = (height // self.patch_size[0], width // self.patch_size[1])
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.embed_dim = embed_dim
        self.depth = depth
        self.num_prefix_tokens = 1 if class_token else 0
        self.global_pool = global_pool

        self.patch_embed = PatchEmbed(self.patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim)) if class_token else None
        # The class token has a position, too, which a learned token could do without (DeiT III's
        # does). timm's weights have it, and each prefix token in front shifts all others.
        positions = torch.empty(1, self.num_prefix_tokens + math.prod(self.grid_size), embed_dim)
        if pos_embed == "learn":
            self.pos_embed = nn.Parameter(positions)
        else:
            # Persistent though it could be computed again: a state dict then always has positions
            # to resample for a different image size.
            self.register_buffer("pos_embed", positions)
        self.pos_drop = nn.Dropout(pos_drop_rate)

        blocks = []
        rates = drop_path_rates(drop_path_rate, depth, drop_path_schedule)
        has_subsets = drop_path_form == "subset"
        for rate in rates:
            attn = Attention(embed_dim, num_heads, qkv_bias, attn_drop_rate, proj_drop_rate)
            mlp = Mlp(embed_dim, int(embed_dim * mlp_ratio), proj_drop_rate)
            # The first block gets a DropPath too, also of rate 0: blocks of one structure share
            # one compiled graph.
            has_masks = drop_path_rate > 0 and not has_subsets
            drop_path = DropPath(rate) if has_masks else nn.Identity()
            blocks.append(Block(embed_dim, attn, mlp, drop_path, init_values))
        self.blocks = Blocks(blocks, rates if drop_path_rate and has_subsets else None)

        # With "avg" timm normalises after pooling, not before, and calls that norm `fc_norm`.
        pools_patches = global_pool == "avg"
        self.norm = nn.Identity() if pools_patches else layer_norm(embed_dim)
        self.fc_norm = layer_norm(embed_dim) if pools_patches else nn.Identity()
        self.pre_logits: nn.Module = nn.Identity()
        if representation_size is not None:
            dense = nn.Linear(embed_dim, representation_size)
            self.pre_logits = nn.Sequential(OrderedDict(fc=dense, act=nn.Tanh()))
        self.head = nn.Linear(representation_size or embed_dim, num_classes)
        self.init_weights()

    def forward(self, images: Tensor) -> Tensor:
        """images: (B, C, H, W) float -> logits: (B, num_classes)."""
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """images: (B, C, H, W) float -> tokens: (B, N, D), the class token first.

        With `global_pool="avg"` they are not normalised yet: that follows the pooling. Raises
        ValueError if C, H or W differ from the model's.
        """
        expected = (self.in_chans, *self.image_size)
        if tuple(images.shape[1:]) != expected:
            raise ValueError(
                f"images are {tuple(images.shape)}, expected (batch,"
                f" {', '.join(map(str, expected))}): resize them, or build the model for that"
                " image_size and in_chans (vit.weights.files resamples the positions)"
            )
        # z_0 = [x_class; x_p^1 E; ...; x_p^hw E] + E_pos (equation 1)
        x = self.patch_embed(images)
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.pos_drop(x + self.pos_embed)
        x = self.blocks(x)
        return self.norm(x)

    def forward_head(self, tokens: Tensor) -> Tensor:
        """tokens: (B, N, D) of `forward_features` -> logits: (B, num_classes).

        The logits have the dtype of the head's weight, also under autocast.
        """
        if self.global_pool == "token":
            x = tokens[:, 0]  # y = LN(z_L^0) (equation 4)
        else:
            x = tokens[:, self.num_prefix_tokens :].mean(dim=1)
        # No autocast here: bf16 has 8 significant bits, so for one image in 400 the two largest of
        # 1,000 logits would be equal, and the smaller class number would win. The head is less than
        # a thousandth of the operations.
        with without_autocast(x.device):
            x = self.fc_norm(x).to(self.head.weight.dtype)
            return self.head(self.pre_logits(x))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights, also those of a model made on the meta device and moved by `to_empty`.

        - Linear layers and learned positions: normal, std 0.02; class token: normal, std 1e-6;
          biases 0 (timm's `init_weights_vit_timm`).
        - Patches: LeCun's truncated normal, variance 1 / fan-in, as Flax draws it
          (google-research/vision_transformer:vit_jax/models_vit.py).
        - Head: 0 (the same file, and appendix B.1.1), so that the first loss is ln(num_classes).
        """
        # The order of the draws is part of a run's reproducibility: do not rearrange.
        for module in self.modules():
            if isinstance(module, nn.Linear):
                # torch cuts at -2 and 2 whatever the deviation is. At 0.02 that cuts nothing, as in
                # timm.
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, (nn.LayerNorm, LayerScale, DropPath)):
                module.reset_parameters()
            if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
                nn.init.zeros_(module.bias)
        proj = self.patch_embed.proj
        # A normal distribution cut at two standard deviations has 0.8796 of its original standard
        # deviation. Flax divides by that, torch does not.
        std = math.sqrt(1.0 / proj.weight[0].numel()) / 0.87962566103423978
        nn.init.trunc_normal_(proj.weight, std=std, a=-2 * std, b=2 * std)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=1e-6)
        if isinstance(self.pos_embed, nn.Parameter):
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        else:
            positions = sincos2d_posemb(self.grid_size, self.embed_dim, self.num_prefix_tokens)
            self.pos_embed.copy_(positions)
        nn.init.zeros_(self.head.weight)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters with several dimensions that are not weights of a linear map.

        timm's convention; `vit.optim` reads it. Biases, norms and scales have one dimension. Add
        each new token or embedding here: what is missing is decayed.
        """
        return {"pos_embed", "cls_token"}


def layer_norm(dim: int) -> nn.LayerNorm:
    """LayerNorm with the paper's epsilon, which is Flax's default and not torch's (1e-5)."""
    return nn.LayerNorm(dim, eps=1e-6)


if __name__ == "__main__":
    runpy.run_module("vit.model_summary", run_name="__main__")  # imports this module
