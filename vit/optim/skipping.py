"""An update that has not happened where its gradient was not finite, for any optimizer.

torch's fused optimizers read `found_inf` on the device. Others apply the update; here it is undone
there, without a wait of the host:

    pre-hook: copy weights and state -> library's step -> post-hook: found_inf ? copy : result

The copy lives during the update, when the activations are gone. What it costs:
benchmarks/optimizers.py.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element."""


class Undo:
    """Undoes updates of `optimizer`, whose state is complete, where its `found_inf` is 1.

    unless_named: entries of the state that go on, such as the counter of a schedule.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, unless_named: tuple[str, ...] = ()):
        tensors = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        tensors += [
            value
            for state in optimizer.state.values()
            for name, value in state.items()
            if isinstance(value, Tensor) and name not in unless_named
        ]
        # As integers: in float32, NaN times 0 is NaN. Their sums wrap around, so that old minus new
        # plus new is old in each bit.
        self._live: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            kind = _INTEGERS[tensor.element_size()]
            self._live[kind].append(tensor.view(kind))
        self._saved: dict[torch.dtype, tuple[Tensor, ...]] = {}
        optimizer.register_step_pre_hook(self._save)
        optimizer.register_step_post_hook(self._restore)

    @torch.no_grad()
    def _save(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if getattr(optimizer, "found_inf", None) is None:
            return
        # Times 1 is a copy: one launch for many tensors, where `clone` needs one for each.
        self._saved = {kind: torch._foreach_mul(live, 1) for kind, live in self._live.items()}

    @torch.no_grad()
    def _restore(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for kind, difference in self._saved.items():
            live = self._live[kind]
            torch._foreach_sub_(difference, live)
            torch._foreach_mul_(difference, optimizer.found_inf.to(kind))
            torch._foreach_add_(live, difference)
        self._saved = {}
