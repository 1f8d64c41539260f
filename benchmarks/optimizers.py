"""Measure the update time of each optimizer, and the cost of undoing updates on the device.

    python benchmarks/optimizers.py [--model vit_s16] [--device cpu] [--updates 3] [--rounds 5]

The contenders take turns updating a model's weights, using gradients of all ones. Every optimizer
is created as in training. Optimizers that can undo updates (`vit.optim.skipping`) are also measured
with `found_inf=None`, which disables undoing. The command prints a table of milliseconds per
update. On a CPU, it measures CPU time, so that other programs do not count. On a GPU, it measures
wall time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from measure import rows_of, show, take_turns

from vit.config.optim_section import (
    AdafactorConfig,
    AdamWConfig,
    LambConfig,
    MuonConfig,
    NAdamWConfig,
    OptimConfig,
)
from vit.model import create_model
from vit.optim.optimizer import create_optimizer

CONFIGS: dict[str, OptimConfig] = {
    "adamw": AdamWConfig(),
    "lamb": LambConfig(name="lamb"),
    "nadamw": NAdamWConfig(name="nadamw"),
    "muon": MuonConfig(name="muon"),
    "adafactorbv": AdafactorConfig(name="adafactorbv"),
}


def milliseconds(
    optimizer: torch.optim.Optimizer, found_inf: torch.Tensor | None, updates: int
) -> float:
    """Return the mean time per update in milliseconds, over `updates` updates."""
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    on_gpu = optimizer.param_groups[0]["params"][0].is_cuda
    clock = time.perf_counter if on_gpu else time.process_time
    begin = clock()
    for _ in range(updates):
        optimizer.step()
    if on_gpu:
        torch.cuda.synchronize()
    return 1000 * (clock() - begin) / updates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="vit_s16", help="a model name of vit/model.py")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--updates", type=int, default=3, help="updates per turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns per optimizer")
    args = parser.parse_args()

    contestants: dict[str, Callable[[], float]] = {}
    zero = torch.zeros((), device=args.device)
    for name, config in CONFIGS.items():
        model = create_model(args.model).to(args.device)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = create_optimizer(model, config)
        contestants[name] = partial(milliseconds, optimizer, zero, args.updates)
        if name != "adamw":
            plain = partial(milliseconds, optimizer, None, args.updates)
            contestants[f"{name}, not undone"] = plain

    title = f"an update of {args.model} on {args.device}"
    result = take_turns(title, "ms", contestants, args.rounds, ["adamw"])
    show(title, rows_of(result))


if __name__ == "__main__":
    main()
