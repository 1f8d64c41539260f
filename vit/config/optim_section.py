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
    MAE); `not_kernels`: all but weights of linear maps and convolutions (big_vision); `norms`:
    norms only (torchvision's --norm-weight-decay 0); `embeddings`: positions and tokens only
    (MMPretrain's ViTs); `nothing`: all is decayed (torchvision, AlgoPerf)."""
    layer_decay: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None, OnlyWith("init.freeze!=backbone")
    ] = None
    """Layer-wise decay of the learning rate, for fine-tuning (BEiT, MAE, timm): the head has `lr`,
    and each layer this factor times the rate of the layer above. Patch embedding, tokens and
    positions are below the first block. `None`: the same rate for all."""
    layer_decay_form: Annotated[Literal["beit", "timm"], OnlyWith("layer_decay")] = "beit"
    """Rate of the norm after the last block: the head's (BEiT, MAE) or the last block's (timm).
    Models of timm without `blocks` support only `timm`."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Largest global norm of the gradient; `None`: no clipping."""


class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter 2019) with the decay multiplied by the learning rate."""

    name: Literal["adamw"] = "adamw"
    """The optimizer."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""


class SgdConfig(OptimizerConfig):
    """SGD with momentum; the decay is added to the gradient (L2)."""

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
    """LAMB (You et al. 2020, arXiv 1904.00962) as timm has it, after apex's FusedLAMB: DeiT III."""

    name: Literal["lamb"]
    """The optimizer."""
    lr: PositiveFloat = 3e-3
    """Peak learning rate, which is not scaled by the batch size. Parameters without decay have no
    trust ratio."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-6
    """Added to the denominator (DeiT's scripts pass 1e-8)."""


class NAdamWConfig(OptimizerConfig):
    """AdamW with Nesterov's look-ahead (Dozat 2016) as timm and AlgoPerf have it."""

    name: Literal["nadamw"]
    """The optimizer."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""


class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al. 2024) or AdaMuon (arXiv 2507.11005), which scales each element of the
    orthogonal update by its second moment, for matrices, as timm has them; for all others AdamW, or
    NAdamW with `nesterov`. Newton-Schulz iterations run in bf16 on GPUs and in fp32 on CPUs."""

    name: Literal["muon", "adamuon"]
    """The optimizer."""
    matrices: Literal["blocks", "timm"] = "blocks"
    """Parameters that are treated as matrices: the linear maps of the blocks (Jordan et al.); or
    also patch embedding and head (timm)."""
    momentum: Rate = 0.95
    """Decay rate of the matrices' momentum."""
    nesterov: bool = False
    """Use Nesterov momentum, also for parameters that are not matrices (timm's nmuon and
    nadamuon)."""
    adjust_lr_fn: Literal["match_rms_adamw", "original", "rms_to_rms"] = "match_rms_adamw"
    """Learning rate of an (out, in) matrix: 0.2 sqrt(max(out, in)) times `lr`, so that AdamW's
    rates fit (arXiv 2502.16982); sqrt(max(1, out/in)), Jordan's; or sqrt(out/in). With `original`,
    the five iterations also use Jordan's first polynomial, as in torch.optim.Muon; otherwise each
    has its own (timm's `quintic`)."""
    fallback_lr_scale: PositiveFloat = 1.0
    """Learning rate of parameters that are not matrices, as a multiple of `lr`."""
    betas: tuple[Rate, Rate] = (0.9, 0.95)
    """Decay rates of the moments of parameters that are not matrices; AdaMuon also uses the
    second."""
    eps: PositiveFloat = 1e-7
    """Added to denominators, and the least norm of an update."""


class AdafactorConfig(OptimizerConfig):
    """big_vision's Adafactor (Zhai et al. 2021, arXiv 2106.04560, section 3.4) as timm has it:
    factored second moments, momentum in bfloat16, 2 bytes a weight in all."""

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
