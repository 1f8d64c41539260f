"""Undo updates with a non-finite gradient, for any optimizer.

torch's fused optimizers read `found_inf` on the device and skip the update. For all other
optimizers, this module undoes the update on the device, so the host does not wait:

    pre-hook: copy weights and state -> library's step -> post-hook: found_inf ? copy : result

The copy exists only during the update, after the activations have been freed.
benchmarks/optimizers.py measures the cost.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type for each element size in bytes."""


class Undo:
    """Undoes an update of `optimizer` if `found_inf` is 1. All optimizer state must already exist.

    unless_named: state entries that are not undone, such as a schedule's counter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, unless_named: tuple[str, ...] = ()):
        tensors = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        tensors += [
            value
            for state in optimizer.state.values()
            for name, value in state.items()
            if isinstance(value, Tensor) and name not in unless_named
        ]

        # In floating point, NaN times 0 is NaN, so compute with the bits as integers. Integer sums
        # wrap around, so every bit of (old - new) + new is the same as in old.
        self._live: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            kind = _INTEGERS[tensor.element_size()]
            self._live[kind].append(tensor.view(kind))

        self._saved: dict[torch.dtype, tuple[Tensor, ...]] = {}
        optimizer.register_step_pre_hook(self._save)
        optimizer.register_step_post_hook(self._restore)

    @torch.no_grad()
    def _save(self, optimizer: Any, args: object, kwargs: object) -> None:
        if getattr(optimizer, "found_inf", None) is None:
            return
        # Multiply by 1 to copy many tensors with one launch, because `clone` needs one launch per
        # tensor.
        self._saved = {kind: torch._foreach_mul(live, 1) for kind, live in self._live.items()}

    @torch.no_grad()
    def _restore(self, optimizer: Any, args: object, kwargs: object) -> None:
        """Add old minus new values to all tensors if `found_inf` is 1, and zeros if it is 0."""
        for kind, difference in self._saved.items():
            live = self._live[kind]
            torch._foreach_sub_(difference, live)
            torch._foreach_mul_(difference, optimizer.found_inf.to(kind))
            torch._foreach_add_(live, difference)
        self._saved = {}
