"""The Vision Transformer: a model that maps images to logits.

Notation: B images, C channels, H x W pixels, a grid of h x w patches, P prefix tokens (class token,
registers), N = P + h*w tokens, and D = `embed_dim`.

1. Patches    (B, C, H, W) -> (B, h*w, D)    one linear map for all patches  patch_embed
2. Positions  (B, h*w, D)  -> (B, N, D)      prepend the class token, add    cls_token, pos_embed
                                             a learned position per token
3. Blocks     (B, N, D)    -> (B, N, D)      `depth` x (attention, MLP)      blocks
4. Pooling    (B, N, D)    -> (B, D)         class token, or patch mean      norm, fc_norm
5. Head       (B, D) -> (B, num_classes)     linear, optional tanh layer     pre_logits, head

Comments refer to the equations in Dosovitskiy et al. 2021 (arXiv 2010.11929). Features from later
papers, such as rotary positions, are off by default. Each feature is an argument of
`VisionTransformer` and a module in `vit.layers`. Argument names and state-dict keys match timm's
(huggingface/pytorch-image-models:timm/models/vision_transformer.py), so each library can load the
other's weights. The name `timm/<name>` creates a timm model.

    python launch/visualize.py shapes vit_b16     print shapes, parameters and GFLOP
"""

import math
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.config.schema import ModelConfig
from vit.layers.arguments import check_arguments, check_images, grid_size, height_width
from vit.layers.attention_pool import AttentionPool
from vit.layers.blocks import Blocks, Kept
from vit.layers.drop_path import DropPaths, PatchDropout, add_branch
from vit.layers.image_model import ImageModel
from vit.layers.image_sizes import AtSize, OtherSizes
from vit.layers.init import draw_as, lecun_normal_
from vit.layers.norm import LayerScale, NormOf, create_norm
from vit.layers.patch_embed import NormedPatchEmbed, PatchEmbed
from vit.layers.posemb import sincos2d_posemb
from vit.layers.precision import weight_dtype, without_autocast
from vit.layers.presets import PRESETS
from vit.layers.rope import RotaryEmbedding, rotate
from vit.layers.swiglu import SwiGLU, SwiGLUPacked
from vit.system.spelling import did_you_mean


def create_model(
    name: str | ModelConfig,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    **fields: Any,
) -> ImageModel:
    """Create a model by name, with newly initialized weights.

    Args:
        name: `vit_{size}{patch}` (sizes: `PRESETS`), such as vit_b16; or `timm/<name>`, which is
            created without pretrained weights; or a `ModelConfig`.
        image_size: The height and width in pixels, or one number for both; 224 by default.
        num_classes: The number of outputs of the head; 1,000 by default. With 0, the model has no
            head and returns the features that the head would receive, as in timm.
        fields: Further arguments of `VisionTransformer`, or of timm's constructor for
            `timm/<name>`, which override the defaults of the model.

    Raises:
        ValueError: The name is unknown, or arguments contradict each other.
    """
    named_fields = {"image_size": image_size, "num_classes": num_classes}
    fields |= {key: value for key, value in named_fields.items() if value is not None}
    if isinstance(name, ModelConfig):
        fields = name.model_dump(exclude={"name"}, exclude_none=True) | fields
        name = name.name

    if name.startswith("timm/"):
        # timm takes seconds to import.
        from vit.layers.timm_model import create_timm_model

        return create_timm_model(name.removeprefix("timm/"), **fields)

    match = re.fullmatch(rf"vit_(?P<size>{'|'.join(PRESETS)})(?P<patch>[1-9]\d*)", name)
    if match is None:
        usual_names = [f"vit_{size}{patch}" for patch in (16, 14, 32, 8) for size in PRESETS]
        raise ValueError(
            f"unknown model {name!r}{did_you_mean(name, usual_names)}: expected"
            f" vit_{{{','.join(PRESETS)}}}{{patch}}, such as vit_b16, or timm/<name>"
        )
    return VisionTransformer(
        **{**PRESETS[match["size"]], "patch_size": int(match["patch"]), **fields}
    )


class Attention(nn.Module):
    """Multi-head self-attention (appendix A): (B, N, D) -> (B, N, D).

    Args:
        qk_norm: Whether to normalize queries and keys.
        rope_type: The type of rotary embedding.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        qkv_bias: bool,
        qk_norm: bool,
        norm: NormOf,
        rope_type: str | None,
        attn_drop: float,
        proj_drop: float,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.attn_drop = attn_drop
        self.trains_unfused = False
        """Whether training multiplies matrices instead of calling torch's fused kernel, which is
        slow in bf16 on CPUs (set by `vit.start.attention`)."""
        self.rope_type = rope_type
        self.qkv = nn.Linear(dim, 3 * num_heads * head_dim, bias=qkv_bias)
        self.q_norm = norm(head_dim) if qk_norm else nn.Identity()
        self.k_norm = norm(head_dim) if qk_norm else nn.Identity()
        self.proj = nn.Linear(num_heads * head_dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def project(self, x: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (B, heads, N, head_dim).

        rope: the table computed by `vit.layers.rope.RotaryEmbedding`.
        """
        # [q, k, v] = z U_qkv (equation 5). The outputs are ordered (q/k/v, head, channel), as in
        # timm. In any other order, timm's weights would load but give wrong results.
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)

        q = self.q_norm(q)
        k = self.k_norm(k)
        if rope is not None and self.rope_type is not None:
            q = rotate(q, rope, self.rope_type)
            k = rotate(k, rope, self.rope_type)
        return q.to(v.dtype), k.to(v.dtype), v

    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """Return the layer's output: (B, N, D) -> (B, N, D)."""
        q, k, v = self.project(x, rope)
        # softmax(q k^T / sqrt(head_dim)) v (equations 6, 7)
        if self.trains_unfused and torch.is_grad_enabled():
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            x = scores.softmax(-1) @ v
        else:
            # One kernel computes all this, and never stores the N x N attention matrix. It does
            # not know about `self.training`, so pass a dropout rate of 0 in evaluation.
            x = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.attn_drop if self.training else 0.0
            )
        # [SA_1; ...; SA_heads] U_msa (equation 8)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    """Two linear layers with a GELU between them, applied to each token: (B, N, D) -> (B, N, D).

    approximate: "none" for the exact GELU, as in timm, or "tanh" for the approximation that is
    Flax's default.
    """

    def __init__(self, dim: int, hidden_dim: int, drop: float, approximate: str = "none"):
        super().__init__()
        self.approximate = approximate
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop1 = nn.Dropout(drop)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop1(F.gelu(self.fc1(x), approximate=self.approximate))
        return self.drop2(self.fc2(x))


class Block(nn.Module):
    """One pre-norm encoder block: (B, N, D) -> (B, N, D).

    Both residual branches may use LayerScale (`init_values`) and stochastic depth.
    """

    def __init__(
        self, dim: int, norm: NormOf, attn: Attention, mlp: nn.Module, init_values: float | None
    ):
        super().__init__()
        # Names and order match timm's state dict.
        self.norm1 = norm(dim)
        self.attn = attn
        self.ls1 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.norm2 = norm(dim)
        self.mlp = mlp
        self.ls2 = nn.Identity() if init_values is None else LayerScale(dim, init_values)

    def forward(self, x: Tensor, rope: Tensor | None = None, kept: Kept = (None, None)) -> Tensor:
        """Run both branches. kept: the samples that keep each branch (`vit.layers.drop_path`)."""
        # The residual path is not normalized, so the model normalizes the output of the last block.
        return self.add_mlp(self.add_attn(x, rope, kept[0]), kept[1])

    def add_attn(self, x: Tensor, rope: Tensor | None, kept: Tensor | None) -> Tensor:
        """Compute z' = MSA(LN(z)) + z (equation 2)."""
        if rope is not None and rope.shape[1] > 1 and kept is not None and kept.ndim == 1:
            rope = rope.index_select(1, kept)
        return add_branch(x, lambda z: self.ls1(self.attn(self.norm1(z), rope)), kept)

    def add_mlp(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """Compute z = MLP(LN(z')) + z' (equation 3)."""
        return add_branch(x, lambda z: self.ls2(self.mlp(self.norm2(z))), kept)


MLPS: dict[str, Callable[..., nn.Module]] = {
    "mlp": Mlp,
    "mlp_tanh": partial(Mlp, approximate="tanh"),
    "swiglu": SwiGLU,
    "swiglu_packed": SwiGLUPacked,
}


class VisionTransformer(ImageModel):
    """A Vision Transformer for one image size.

    Args: see `ModelConfig` in vit/config/model_section.py, which documents every argument.

    Raises:
        ValueError: Arguments contradict each other. The message suggests valid values.
    """

    pos_embed: Tensor | None
    distilled_training = False
    """Whether forward passes in training return the logits of both heads (timm's attribute
    name)."""

    def __init__(
        self,
        image_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        mlp_layer: str = "mlp",
        norm_layer: str = "layernorm",
        qkv_bias: bool = True,
        qk_norm: bool = False,
        class_token: bool = True,
        dist_token: bool = False,
        reg_tokens: int = 0,
        global_pool: str = "token",
        pos_embed: str = "learn",
        no_embed_class: bool = False,
        rope_type: str | None = None,
        rope_temperature: float | None = None,
        rope_reg_temperature: float | None = None,
        ref_feat_shape: int | tuple[int, int] | None = None,
        dual_patch_norm: bool = False,
        pos_drop_rate: float = 0.0,
        patch_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        mlp_drop_rate: float | None = None,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        drop_path_schedule: str = "linear",
        drop_path_form: str = "mask",
        init_values: float | None = None,
        representation_size: int | None = None,
        weight_init: str | None = None,
        init_head_bias: float = 0.0,
    ):
        check_arguments(locals())
        super().__init__()
        self.image_size = height_width(image_size, "image_size")
        self.patch_size = height_width(patch_size, "patch_size")
        self.grid_size = grid_size(self.image_size, self.patch_size)
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.embed_dim = embed_dim
        self.depth = depth

        num_summaries = int(class_token) + int(dist_token)
        self.num_prefix_tokens = num_summaries + reg_tokens
        self.no_embed_class = no_embed_class
        self.global_pool = global_pool
        self.weight_init = weight_init
        self.init_head_bias = init_head_bias

        norm: NormOf = partial(create_norm, norm_layer)
        head_size = head_dim or embed_dim // num_heads
        mlp_drop = proj_drop_rate if mlp_drop_rate is None else mlp_drop_rate

        patch_embed = NormedPatchEmbed if dual_patch_norm else PatchEmbed
        self.patch_embed = patch_embed(self.patch_size, in_chans, embed_dim)
        self._create_tokens(class_token, dist_token, reg_tokens, pos_embed)

        self.rope = None
        if rope_type:
            self.rope = RotaryEmbedding(
                rope_temperature,
                rope_reg_temperature,
                ref_feat_shape,
                rope_type,
                self.grid_size,
                head_size,
                class_tokens=num_summaries,
                reg_tokens=reg_tokens,
            )
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.patch_drop = (
            PatchDropout(patch_drop_rate, self.num_prefix_tokens) if patch_drop_rate else None
        )

        def make_block() -> Block:
            attention = Attention(
                embed_dim,
                num_heads,
                head_size,
                qkv_bias,
                qk_norm,
                norm,
                rope_type,
                attn_drop_rate,
                proj_drop_rate,
            )
            mlp = MLPS[mlp_layer](embed_dim, int(embed_dim * mlp_ratio), mlp_drop)
            return Block(embed_dim, norm, attention, mlp, init_values)

        self.drop_paths = DropPaths(drop_path_rate, depth, drop_path_schedule, drop_path_form)
        self.blocks = Blocks(*(make_block() for _ in range(depth)))
        self._create_head(norm, num_heads, mlp_ratio, mlp_layer, representation_size)
        self.other_sizes = OtherSizes()
        self.init_weights()

    def _create_tokens(self, class_token: bool, dist_token: bool, regs: int, pos: str) -> None:
        """Create the prefix tokens and the position embeddings that are added to the patches."""
        dim = self.embed_dim
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, regs, dim)) if regs else None

        # The class token has a position embedding, because timm's weights contain one. DeiT III
        # omits the embedding (`no_embed_class`), because the token is learned anyway.
        num_prefix_tokens = 0 if self.no_embed_class else self.num_prefix_tokens
        positions = torch.empty(1, num_prefix_tokens + math.prod(self.grid_size), dim)
        if pos == "sincos2d":
            # Positions are resampled when a checkpoint is loaded at another image size, so store
            # even constant positions in the state dict.
            self.register_buffer("pos_embed", positions)
        else:
            self.pos_embed = nn.Parameter(positions) if pos == "learn" else None
        self.dist_token = nn.Parameter(torch.empty(1, 1, dim)) if dist_token else None

    def _create_head(
        self,
        norm: NormOf,
        num_heads: int,
        mlp_ratio: float,
        mlp_layer: str,
        representation_size: int | None,
    ) -> None:
        """Create the norm, the pooling and the head, which compute logits from the tokens."""
        dim = self.embed_dim
        # With "avg", timm normalizes after pooling and names that norm `fc_norm`. "norm_avg" is
        # timm's "avg" with fc_norm=False.
        pools_first = self.global_pool == "avg"
        self.norm = nn.Identity() if pools_first else norm(dim)

        self.attn_pool = None
        if self.global_pool == "map":
            gelu = "tanh" if mlp_layer == "mlp_tanh" else "none"
            mlp = Mlp(dim, int(dim * mlp_ratio), drop=0.0, approximate=gelu)
            self.attn_pool = AttentionPool(dim, num_heads, mlp, norm)
        self.fc_norm = norm(dim) if pools_first else nn.Identity()

        self.pre_logits: nn.Module = nn.Identity()
        if representation_size is not None:
            dense = nn.Linear(dim, representation_size)
            self.pre_logits = nn.Sequential(OrderedDict(fc=dense, act=nn.Tanh()))
        self.head = self._classifier(representation_size or dim)
        self.head_dist = None if self.dist_token is None else self._classifier(dim)

    def _classifier(self, num_features: int) -> nn.Module:
        """Return a layer from features to logits, or to the features in a model without a head."""
        return nn.Linear(num_features, self.num_classes) if self.num_classes else nn.Identity()

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Compute logits, (B, num_classes), from images, (B, C, H, W) float."""
        x = self._run_blocks(images)
        if self.global_pool == "token":
            # The head reads only prefix tokens, so normalize only these tokens.
            x = x[:, : self.num_prefix_tokens]
        return self.forward_head(self.norm(x))

    def forward_features(self, images: Tensor) -> Tensor:
        """Compute tokens, (B, N, D), from images, (B, C, H, W) float. Prefix tokens come first.

        With `global_pool="avg"`, the norm follows the pooling, so the tokens are not normalized.
        With any other value, the tokens are normalized. Raises ValueError if C, H or W differ from
        the model's, unless `take_sizes` added the size.
        """
        return self.norm(self._run_blocks(images))

    def _run_blocks(self, images: Tensor) -> Tensor:
        """Compute the tokens, (B, N, D), before the last norm."""
        other = self.other_sizes.find(images)
        if other is None:
            check_images(images, self.in_chans, self.image_size)

        x = self.pos_drop(self.add_tokens(self.patch_embed(images), other))
        rope = self.rope if other is None else other.rope
        table = None if rope is None else rope.table
        if self.patch_drop is not None:
            x, table = self.patch_drop(x, table)
        return self.blocks(x, table, self.drop_paths(x))

    def add_tokens(self, x: Tensor, other: AtSize | None = None) -> Tensor:
        """Add prefix tokens and positions to `x`: (B, h*w, D) -> (B, N, D).

        other: the positions for the images' size, if this size differs from the model's.
        """
        positions = self.pos_embed
        if other is not None and positions is not None:
            with without_autocast(x.device):
                positions = other.positions(positions)
        if positions is None:
            # The residual path keeps the dtype of the weights, even under autocast.
            x = x.to(weight_dtype(self.patch_embed, self))
        elif self.no_embed_class:
            x = x + positions

        # z_0 = [x_class; x_p^1 E; ...; x_p^hw E] + E_pos (equation 1)
        prefix = (self.cls_token, self.dist_token, self.reg_token)
        tokens = [token for token in prefix if token is not None]
        if tokens:
            x = torch.cat([*(token.expand(x.shape[0], -1, -1) for token in tokens), x], dim=1)
        return x if positions is None or self.no_embed_class else x + positions

    def forward_head(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Compute logits, (B, num_classes), from the tokens of `forward_features`, (B, N, D).

        The logits have the dtype of the head's weights, even under autocast.
        """
        if self.global_pool == "token":
            x = tokens[:, 0]  # y = LN(z_L^0) (equation 4)
        elif self.attn_pool is not None:
            x = self.attn_pool(tokens[:, self.num_prefix_tokens :])
        else:
            x = tokens[:, self.num_prefix_tokens :].mean(dim=1)

        # Disable autocast, because bf16 has only 8 significant bits. For one image in 400, the two
        # largest of 1,000 logits would be the same, and argmax would choose the lower class number.
        # The head performs less than a thousandth of all operations.
        with without_autocast(x.device):
            x = self.fc_norm(x).to(weight_dtype(self.head, self))
            logits = self.head(self.pre_logits(x))
            if self.head_dist is None:
                return logits
            distilled_logits = self.head_dist(tokens[:, 1].to(logits.dtype))
            # In training, the second head learns from the teacher.
            if self.training and self.distilled_training:
                return logits, distilled_logits
            return (logits + distilled_logits) / 2

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize all weights, even after `to_empty` has moved a model off the meta device.

        - Linear layers, learned positions, registers (DINOv3, ViT-5), distillation token (DeiT):
          normal, std 0.02. Class token: normal, std 1e-6. Biases: 0 (`init_weights_vit_timm`).
        - Patches: LeCun normal (google-research/vision_transformer:vit_jax/models_vit.py).
        - Head: 0 (the same file, and appendix B.1.1), so that the first loss is ln(num_classes).
        - Norms and other modules: initialized by their own `reset_parameters`.
        - `weight_init` replaces these rules with those of timm, JAX or torch (`vit.layers.init`).
        """
        # Do not reorder these calls, because the same seed would then give different weights.
        for module in self.modules():
            if isinstance(module, nn.Linear):
                # As in timm, few values are truncated, because torch's bounds are -2 and 2 and not
                # two standard deviations.
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif not isinstance(module, nn.Conv2d):
                getattr(module, "reset_parameters", lambda: None)()
            if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
                nn.init.zeros_(module.bias)

        lecun_normal_(self.patch_embed.proj.weight)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=1e-6)
        if isinstance(self.pos_embed, nn.Parameter):
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        elif self.pos_embed is not None:
            num_prefix = self.pos_embed.shape[1] - math.prod(self.grid_size)
            self.pos_embed.copy_(sincos2d_posemb(self.grid_size, self.embed_dim, num_prefix))
        for token in (self.reg_token, self.dist_token):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02)

        heads = [head for head in (self.head, self.head_dist) if isinstance(head, nn.Linear)]
        for head in heads:
            nn.init.zeros_(head.weight)
            nn.init.constant_(head.bias, self.init_head_bias)
        draw_as(self.weight_init, self, self.patch_embed.proj, heads)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay, like timm's method of this name.

        `vit.optim` reads this set. Biases, norms and scales need no entry, because they have one
        dimension. Add every new token or embedding here, or it will get weight decay.
        """
        return {"pos_embed", "cls_token", "dist_token", "reg_token", "attn_pool.latent"}
