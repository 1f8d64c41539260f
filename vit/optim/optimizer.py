"""Create optimizers over the parameter groups of `vit.optim.groups`.

The training step sets the learning rate and weight decay of all groups from `vit.optim.schedule`
before each update. The optimizers come from torch and timm, and `_KINDS` lists them. If an
optimizer cannot skip an update on the device when `found_inf` is set, `vit.optim.skipping` undoes
the update. A non-finite gradient therefore never reaches weights or optimizer state, and skipping
it needs no host-device sync.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from vit.config.optim_section import (
    AdafactorConfig,
    AdamWConfig,
    LambConfig,
    MuonConfig,
    NAdamWConfig,
    OptimConfig,
    OptimizerConfig,
    SgdConfig,
)
from vit.optim.groups import parameter_groups
from vit.optim.skipping import Undo

Groups = list[dict[str, Any]]
State = dict[str, Tensor]


@dataclass(frozen=True)
class _Kind:
    """The functions that create an optimizer and its state."""

    create: Callable[[Groups, Any], torch.optim.Optimizer]
    """Creates the optimizer from the groups and the config's `optim` section."""
    new_state: Callable[[Tensor, Any, dict[str, Any]], State]
    """Creates a parameter's initial state, using the library's key names."""
    skips: bool
    """Whether the optimizer skips an update on the device when `found_inf` is set."""
    counts_steps: bool = False
    """Whether `step` in the state counts skipped updates, as schedules do."""


def create_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Create the optimizer of `config` for the parameters of a plain model (no DDP wrapper).

    The optimizer state is also created, so that a checkpoint can be loaded into it. Raises the
    ValueErrors of `parameter_groups`, and ValueError if the optimizer needs timm and timm is
    missing or too old.
    """
    kind = _kind(config)
    groups = parameter_groups(model, config)
    try:
        optimizer = kind.create(groups, config)
    except ImportError as error:
        raise ValueError(
            f"optim.name={config.name} needs timm 1.0.31 or newer ({error}): pip install -U timm"
        ) from error

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = kind.new_state(parameter, config, group)
            if state:
                optimizer.state[parameter].update(state)

    if not kind.skips:
        Undo(optimizer, ("step",) if kind.counts_steps else ())
        # GradScaler reads this attribute, which torch's fused optimizers have.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    # TrainStep sets `found_inf` on the device and calls step() without reading it back. An
    # optimizer that ignores `found_inf` would write NaN into the weights.
    assert getattr(optimizer, "_step_supports_amp_scaling", False), (
        f"{type(optimizer).__name__} does not skip its update when found_inf is set"
    )

    return optimizer


def state_bytes(config: OptimConfig, model: nn.Module) -> list[int]:
    """Return the size in bytes of each state tensor of the optimizer that `config` selects."""
    kind = _kind(config)
    return [
        value.nbytes
        for group in parameter_groups(model, config)
        for parameter in group["params"]
        for value in kind.new_state(parameter.detach().to("meta"), config, group).values()
    ]


def set_rates(optimizer: torch.optim.Optimizer, lr: float, weight_decay: float | None) -> None:
    """Set the learning rate (`lr` times the group's `lr_scale`) and the weight decay of all groups.

    weight_decay: the new value for groups with weight decay; None keeps the current value.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
        if weight_decay is not None and group["is_decayed"]:
            group["weight_decay"] = weight_decay


def _kind(config: OptimizerConfig) -> _Kind:
    assert type(config) in _KINDS, f"no optimizer for {type(config).__name__}"
    return _KINDS[type(config)]


# --- creation -------------------------------------------------------------------------------------


def _adamw(groups: Groups, config: AdamWConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _sgd(groups: Groups, config: SgdConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True
    )


def _lamb(groups: Groups, config: LambConfig) -> torch.optim.Optimizer:
    from vit.optim.lamb import Lamb  # slow to import, because it imports timm

    return Lamb(groups, lr=config.lr, betas=config.betas, eps=config.eps, max_grad_norm=None)


def _nadamw(groups: Groups, config: NAdamWConfig) -> torch.optim.Optimizer:
    """Create NAdamW, which counts its steps on the GPU."""
    from timm.optim import NAdamW

    return _counting_on_device(
        NAdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, capturable=_is_on_gpu(groups)
        )
    )


def _muon(groups: Groups, config: MuonConfig) -> torch.optim.Optimizer:
    """Create Muon or AdaMuon, with Adam's moments for parameters that are not matrices."""
    from timm.optim import Muon

    _iterate_in_fp32_on_cpus()
    return _counting_on_device(
        Muon(
            groups,
            lr=config.lr,
            algo=config.name,
            momentum=config.momentum,
            nesterov=config.nesterov,
            ns_steps=5,
            ns_coefficients="original" if config.adjust_lr_fn == "original" else "quintic",
            adjust_lr_fn=config.adjust_lr_fn,
            fallback_lr_scale=config.fallback_lr_scale,
            betas=config.betas,
            eps=config.eps,
            capturable=_is_on_gpu(groups),
        )
    )


@cache
def _iterate_in_fp32_on_cpus() -> None:
    """Replace the data type of timm's Muon on CPUs, for which timm has no option.

    CPUs that emulate bf16 take 20 times as long in bf16 as in fp32.
    """
    from timm.optim import muon

    module: Any = muon
    iterate = module.zeropower_via_newtonschulz

    def iterate_on_device(matrix: Tensor, *args: object, **options: object) -> Any:
        dtype = torch.bfloat16 if matrix.is_cuda else torch.float32
        return iterate(matrix, *args, dtype=dtype, **options)

    module.zeropower_via_newtonschulz = iterate_on_device


def _adafactor(groups: Groups, config: AdafactorConfig) -> torch.optim.Optimizer:
    """Create big_vision's form of Adafactor."""
    from timm.optim import AdafactorBigVision

    return AdafactorBigVision(
        groups,
        lr=config.lr,
        min_dim_size_to_factor=config.min_dim_size_to_factor,
        decay_rate=0.8,
        beta2_cap=config.beta2_cap,
        momentum=config.momentum,
        momentum_dtype="bfloat16",
    )


def _is_on_gpu(groups: Groups) -> bool:
    return any(p.is_cuda for group in groups for p in group["params"])


def _counting_on_device(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return `optimizer` without torch's warning about `capturable`.

    torch expects `capturable` only with CUDA graphs. The flag also puts the step counter on the
    GPU, which is needed because updates are skipped there.
    """
    optimizer._warned_capturable_if_run_uncaptured = True
    return optimizer


# --- state ----------------------------------------------------------------------------------------


def _zeros_like(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _moments(parameter: Tensor, config: object, group: dict[str, Any]) -> State:
    return {
        "step": torch.zeros((), device=parameter.device),
        "exp_avg": _zeros_like(parameter),
        "exp_avg_sq": _zeros_like(parameter),
    }


def _momentum(parameter: Tensor, config: SgdConfig, group: dict[str, Any]) -> State:
    # Fused SGD would allocate its momentum without initializing it, so a skipped first update would
    # leave arbitrary values.
    return {"momentum_buffer": _zeros_like(parameter)} if config.momentum else {}


def _muon_state(parameter: Tensor, config: MuonConfig, group: dict[str, Any]) -> State:
    """Return Muon's or AdaMuon's state, or Adam's moments for a parameter that is not a matrix."""
    if not group["use_muon"]:
        return _moments(parameter, config, group)
    state = {"momentum_buffer": _zeros_like(parameter)}
    if config.name == "adamuon":
        state["step"] = torch.zeros((), device=parameter.device)
        state["exp_avg_sq"] = _zeros_like(parameter)
    return state


def _adafactor_state(parameter: Tensor, config: AdafactorConfig, group: dict[str, Any]) -> State:
    """Return Adafactor's state, with second moments by row and column for large matrices."""
    shape = parameter.shape
    # Factor the two longest dimensions, as big_vision/optax.py and timm's _factored_dims do.
    longest = sorted(range(len(shape)), key=lambda side: (shape[side], side))[-2:]
    # timm computes the decay rate on the host, so keep `step` there.
    state = {"step": torch.zeros((), device="meta" if parameter.is_meta else "cpu")}
    if len(shape) >= 2 and shape[longest[0]] >= config.min_dim_size_to_factor:
        column, row = longest
        state["exp_avg_sq_r"] = _zeros_like(parameter.select(row, 0).unsqueeze(row))
        state["exp_avg_sq_c"] = _zeros_like(parameter.select(column, 0).unsqueeze(column))
    else:
        state["exp_avg_sq"] = _zeros_like(parameter)
    return {**state, "exp_avg": torch.zeros_like(parameter, dtype=torch.bfloat16)}


_KINDS = {
    AdamWConfig: _Kind(_adamw, _moments, skips=True),
    SgdConfig: _Kind(_sgd, _momentum, skips=True),
    LambConfig: _Kind(_lamb, _moments, skips=False),
    NAdamWConfig: _Kind(_nadamw, _moments, skips=False),
    MuonConfig: _Kind(_muon, _muon_state, skips=False),
    AdafactorConfig: _Kind(_adafactor, _adafactor_state, skips=False, counts_steps=True),
}
