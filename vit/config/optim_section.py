"""Define the `optim` section of the config: one class per optimizer, selected by `name`.

`vit.optim.optimizer` creates the optimizers, and `vit.optim.groups` forms parameter groups.
"""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from vit.config.base import OnlyWith, Positive, Rate, Section

PositiveFloat = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class OptimizerConfig(Section):
    """The settings that all optimizers share."""

    name: str
    """The optimizer."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate, which is not scaled by the batch size."""
    weight_decay: NotNegative = 0.05
    """Decay of weight matrices; `no_weight_decay` selects the parameters without decay."""
    no_weight_decay: Annotated[
        Literal["timm", "not_kernels", "norms", "embeddings", "nothing"],
        OnlyWith("weight_decay", "schedule.final_weight_decay"),
    ] = "timm"
    """Parameters without decay. `timm`: biases, norms, scales, positions and tokens (timm, DeiT,
    MAE); `not_kernels`: all but the weights of linear maps and convolutions (big_vision); `norms`:
    only norms (torchvision's --norm-weight-decay 0); `embeddings`: only positions and tokens
    (MMPretrain's ViTs); `nothing`: no parameters, so all are decayed (torchvision, AlgoPerf)."""
    layer_decay: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None, OnlyWith("init.freeze!=backbone")
    ] = None
    """Layer-wise decay of the learning rate, for fine-tuning (BEiT, MAE, timm): the head has the
    rate `lr`, and each layer has this factor times the rate of the layer above. Patch embedding,
    tokens and positions are below the first block. `None`: the same rate for all layers."""
    layer_decay_form: Annotated[Literal["beit", "timm"], OnlyWith("layer_decay")] = "beit"
    """Learning rate of the norm after the last block: the head's rate (`beit`, also MAE) or the
    last block's rate (`timm`). timm models without `blocks` support only `timm`."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Largest global norm of the gradient; `None`: no clipping."""


class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter 2019) with the decay multiplied by the learning rate."""

    name: Literal["adamw"] = "adamw"
    """The optimizer."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Constant added to the denominator."""


class SgdConfig(OptimizerConfig):
    """SGD with momentum. The weight decay is added to the gradient (L2)."""

    name: Literal["sgd"]
    """The optimizer."""
    lr: PositiveFloat = 1e-2
    """Peak learning rate, which is not scaled by the batch size."""
    weight_decay: NotNegative = 0.0
    """L2 decay of weight matrices; `no_weight_decay` selects the parameters without decay."""
    momentum: Rate = 0.9
    """Decay rate of the momentum."""
    nesterov: Annotated[bool, OnlyWith("momentum")] = False
    """Use Nesterov momentum."""


class LambConfig(OptimizerConfig):
    """timm's LAMB (You et al. 2020, arXiv 1904.00962), which follows apex's FusedLAMB. DeiT III
    uses it."""

    name: Literal["lamb"]
    """The optimizer."""
    lr: PositiveFloat = 3e-3
    """Peak learning rate, which is not scaled by the batch size. No trust ratio scales the updates
    of parameters without decay."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-6
    """Constant added to the denominator (DeiT's scripts pass 1e-8)."""


class NAdamWConfig(OptimizerConfig):
    """AdamW with Nesterov's look-ahead (Dozat 2016), as in timm and AlgoPerf."""

    name: Literal["nadamw"]
    """The optimizer."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Constant added to the denominator."""


class MuonConfig(OptimizerConfig):
    """timm's Muon (Jordan et al. 2024) or AdaMuon (arXiv 2507.11005) for matrices, and AdamW, or
    NAdamW with `nesterov`, for all other parameters. AdaMuon scales each element of the orthogonal
    update by its second moment. Newton-Schulz iterations run in bf16 on GPUs and in fp32 on
    CPUs."""

    name: Literal["muon", "adamuon"]
    """The optimizer."""
    matrices: Literal["blocks", "timm"] = "blocks"
    """Parameters that are treated as matrices: `blocks`, the linear maps in the blocks (Jordan et
    al.); `timm`, also the patch embedding and the head."""
    momentum: Rate = 0.95
    """Decay rate of the matrices' momentum."""
    nesterov: bool = False
    """Use Nesterov momentum, including for parameters that are not matrices (timm's nmuon and
    nadamuon)."""
    adjust_lr_fn: Literal["match_rms_adamw", "original", "rms_to_rms"] = "match_rms_adamw"
    """Learning rate of an (out, in) matrix, as a multiple of `lr`. `match_rms_adamw`: 0.2
    sqrt(max(out, in)), so that AdamW's rates fit (arXiv 2502.16982); `original`: sqrt(max(1,
    out/in)), by Jordan; `rms_to_rms`: sqrt(out/in). With `original`, all five iterations also use
    Jordan's first polynomial, as in torch.optim.Muon; otherwise, each iteration has its own
    polynomial (timm's `quintic`)."""
    fallback_lr_scale: PositiveFloat = 1.0
    """Learning rate of parameters that are not matrices, as a multiple of `lr`."""
    betas: tuple[Rate, Rate] = (0.9, 0.95)
    """Decay rates of the moments of parameters that are not matrices; AdaMuon also uses the second
    rate for matrices."""
    eps: PositiveFloat = 1e-7
    """Constant added to denominators, and the smallest norm by which an update is divided."""


class AdafactorConfig(OptimizerConfig):
    """timm's version of big_vision's Adafactor (Zhai et al. 2021, arXiv 2106.04560, section 3.4).
    Second moments are factored and the momentum is in bfloat16, so the state takes 2 bytes per
    weight."""

    name: Literal["adafactorbv"]
    """The optimizer."""
    min_dim_size_to_factor: Positive = 32
    """Factor second moments of weights whose two longest sides have at least this length."""
    beta2_cap: Rate = 0.999
    """Largest decay rate of the second moment, which is 1 - t^-0.8 at step t."""
    momentum: Rate = 0.9
    """Decay rate of the momentum."""


def optimizer_name(value: object) -> str:
    """Return the optimizer's name from the `optim` section, given as a dictionary or a section."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return name if isinstance(name, str) else "adamw"


OptimConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")]
    | Annotated[SgdConfig, Tag("sgd")]
    | Annotated[LambConfig, Tag("lamb")]
    | Annotated[NAdamWConfig, Tag("nadamw")]
    | Annotated[MuonConfig, Tag("muon")]
    | Annotated[MuonConfig, Tag("adamuon")]
    | Annotated[AdafactorConfig, Tag("adafactorbv")],
    Discriminator(optimizer_name),
]
