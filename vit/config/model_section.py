"""Define the `model` section of the config: the arguments of `vit.model.create_model`.

Each setting except `name` is an argument of `vit.model.VisionTransformer`, which defines the
defaults.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from vit.config.base import OnlyWith, Positive, Rate, Section, Size, height_width


def _without_hub(name: str) -> str:
    return re.sub(r"^hf[-_]hub:(?=timm/)", "", name)


class ModelConfig(Section):
    """The network. `None` means the preset's value, or the model's default if the preset has
    none."""

    name: Annotated[str, AfterValidator(_without_hub)] = "vit_b16"
    """`vit_{ti,s,b,l,h,so400m,g,G}{patch}` (sizes: vit/layers/presets.py), or `timm/<name>` for any
    timm model. `hf_hub:timm/<name>`, the form on timm's pages, is also accepted."""
    image_size: Size = 224
    """Side of the square training image, or `[height, width]`."""
    in_chans: Literal[1, 3] = 3
    """1: read images as grayscale; 3: as RGB."""
    num_classes: Positive | None = None
    """Number of classes of the head; `None`: the number of classes in the data."""
    patch_size: Size | None = None
    """Side of a patch, or `[height, width]`; overrides the patch size in the name."""
    embed_dim: Positive | None = None
    """Width of the tokens."""
    depth: Positive | None = None
    """Number of blocks."""
    num_heads: Positive | None = None
    """Number of attention heads per block, which must divide `embed_dim` unless `head_dim` is
    given."""
    head_dim: Positive | None = None
    """Number of channels per attention head; `None`: `embed_dim / num_heads`
    (explainingai-code/VIT-Pytorch)."""
    mlp_ratio: Annotated[float, Field(gt=0)] | None = None
    """Width of the first linear layer of a block's MLP as a multiple of `embed_dim`."""
    mlp_layer: Literal["mlp", "mlp_tanh", "swiglu", "swiglu_packed"] | None = None
    """MLP of each block: `mlp`, the default; `mlp_tanh`, with the tanh approximation of GELU
    (Flax's default: big_vision, AlgoPerf, deit3-jax); `swiglu`, with a gate as a second linear
    layer (EVA-02, DINOv3's H+); `swiglu_packed`, with the gate in the first linear layer, whose
    total width `mlp_ratio` then sets (DINOv2's g)."""
    norm_layer: Literal["layernorm", "rmsnorm"] | None = None
    """Norm layer in the blocks and before the head: `layernorm`, the default, or `rmsnorm` (ViT-5,
    arXiv 2602.08071)."""
    qkv_bias: bool | None = None
    """Add a bias to the query, key and value projections."""
    qk_norm: bool | None = None
    """Normalize each head's queries and keys, which keeps attention from collapsing in large models
    and at high learning rates (ViT-22B, arXiv 2302.05442; ViT-5)."""
    class_token: bool | None = None
    """Prepend a learned token, which `global_pool: token` needs."""
    dist_token: bool | None = None
    """Add a second learned token, whose own head learns from the teacher (`distill`); the output is
    the mean of both heads. The name is timm's; DeiT's distilled models have this token (arXiv
    2012.12877)."""
    reg_tokens: Annotated[int, Field(ge=0)] | None = None
    """Registers: learned tokens after the class token whose outputs are not used (Darcet et al.
    2023, arXiv 2309.16588: DINOv2, DINOv3, ViT-5)."""
    global_pool: Literal["token", "avg", "norm_avg", "map"] | None = None
    """Input of the head: `token`, the class token; `avg`, the normalized mean of the patch tokens
    (MAE's fine-tuning); `norm_avg`, the mean of the normalized patch tokens (big_vision, AlgoPerf;
    timm's `avg` with `fc_norm=False`); or `map`, the result of a learned query that attends to the
    normalized patch tokens (big_vision, arXiv 2106.04560; SO400M, g and G)."""
    pos_embed: Literal["learn", "sincos2d", "none"] | None = None
    """Learned positions, fixed 2-D sine-cosine positions, or none, as in DINOv3, which uses rotary
    positions instead."""
    no_embed_class: Annotated[bool | None, OnlyWith("pos_embed!=none")] = None
    """Add positions only to patches, not to the class token and registers (timm's name; DeiT III,
    big_vision, ViT-5)."""
    rope_type: Literal["axial", "dinov3"] | None = None
    """Rotary positions in each block, with angles from the row and column (`axial`: EVA-02, timm's
    SBB ViTs, ViT-5) or from coordinates between -1 and 1 (`dinov3`); `None`: no rotary positions.
    vit/layers/rope.py describes other image sizes."""
    rope_temperature: Annotated[Annotated[float, Field(gt=1)] | None, OnlyWith("rope_type")] = None
    """Approximate ratio of the highest to the lowest rotary frequency; `None`: 10,000 for `axial`
    and 100 for `dinov3`, as in their sources."""
    rope_reg_temperature: Annotated[Annotated[float, Field(gt=1)] | None, OnlyWith("rope_type")] = (
        None
    )
    """Temperature for registers, which are rotated as if they were on a square grid (ViT-5: 100);
    `None`: registers are not rotated."""
    ref_feat_shape: Annotated[Size | None, OnlyWith("rope_type=axial")] = None
    """Side of the grid in patches, or `[height, width]`, to which `axial` scales positions, usually
    the grid of pre-training (timm's name; EVA-02); `None`: no scaling (ViT-5)."""
    dual_patch_norm: bool | None = None
    """Apply LayerNorm to each patch's pixels and to its embedding (Dual PatchNorm, arXiv
    2302.01327; explainingai-code/VIT-Pytorch)."""
    pos_drop_rate: Rate | None = None
    """Dropout rate after the positions are added."""
    patch_drop_rate: Rate | None = None
    """Fraction of the patches that each training image drops (PatchDropout, arXiv 2208.07220); the
    step time falls by more than this fraction."""
    proj_drop_rate: Rate | None = None
    """Dropout rate after the dense layers of a block, except the query-key-value projection."""
    mlp_drop_rate: Rate | None = None
    """Dropout rate in the MLP; `None`: `proj_drop_rate` (explainingai-code/VIT-Pytorch has one rate
    for attention and one for the MLP)."""
    attn_drop_rate: Rate | None = None
    """Dropout rate of the attention weights."""
    drop_path_rate: Rate | None = None
    """Stochastic depth: the probability that a sample skips a residual branch of the last block."""
    drop_path_schedule: Annotated[
        Literal["linear", "constant"] | None, OnlyWith("drop_path_rate")
    ] = None
    """Stochastic depth of the other blocks: with `linear`, the default, the probability rises from
    0 at the first block; with `constant`, it is the same for all blocks (DeiT III, DINOv2)."""
    drop_path_form: Annotated[Literal["mask", "subset"] | None, OnlyWith("drop_path_rate")] = None
    """`mask`, the default: each sample skips independently, by multiplication with 0; `subset`: a
    fixed number of samples in each micro-batch skip, and their branch is not computed (DINOv2), so
    the computation falls by almost the drop path rate."""
    init_values: Annotated[float, Field(gt=0)] | None = None
    """Initial value of LayerScale's factors; `None`: no LayerScale."""
    representation_size: Positive | None = None
    """Width of the pre-logits layer (dense + tanh); `None`: the head is one linear layer."""
    weight_init: Annotated[
        Literal["timm", "jax", "mha"] | None, OnlyWith("init.checkpoint=null")
    ] = None
    """Initialization of the weights (timm's name). `timm`, as in DeiT and DeiT III: torch's default
    for the patch convolution, and a standard deviation of 0.02 for the head; `jax`, as in the ViT
    paper's code and big_vision: Xavier's rule for linear maps; `mha`: like `timm`, but with
    torch.nn.MultiheadAttention's rule for queries, keys and values; `None`: a normal distribution
    for linear maps, LeCun's rule for patches, and zeros for the head."""
    init_head_bias: Annotated[
        float | None, OnlyWith("init.checkpoint=null", "init.reset_head=true")
    ] = None
    """Initial bias of the head; `None`: 0 (big_vision's name; big_vision uses -6.9 for sigmoid
    losses over 1,000 classes)."""

    def height_width(self) -> tuple[int, int]:
        """Return `image_size` as (height, width)."""
        return height_width(self.image_size)

    def size_text(self) -> str:
        """Return the height and width of an image as text, such as "224x224"."""
        height, width = self.height_width()
        return f"{height}x{width}"
