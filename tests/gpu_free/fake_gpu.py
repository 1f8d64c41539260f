"""Simulate a GPU whose tensors have shapes but no values, to find the lines where the CPU waits for
the GPU.

Under torch's FakeTensorMode, an operation on tensors on "cuda:0" computes only the shape of its
result, and needs no driver. FakeTensorMode raises an error if a value is read, if a shape depends
on values, or if a tensor is on the wrong device. Backward passes cannot run on the fake GPU,
because autograd requires a CUDA context. `tests/fake_gpu` runs backward passes, but needs a
compiler and torch's wheels with CUDA.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from vit.data.augment import pixel_ops

GPU = torch.device("cuda", 0)
OURS = f"{Path(__file__).parents[2] / 'vit'}/"
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
NO_LAUNCH = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
}
"""Functions that create a tensor without computing anything. Views do not have to be listed,
because their schema identifies them."""


class GpuWithoutMemory(TorchDispatchMode):
    """A mode for use inside a FakeTensorMode, in which GPU tensors have only shapes and CPU tensors
    are real.

    FakeTensorMode raises an error if a value on the GPU is read. `waits` lists the copies between
    GPU and CPU that block the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        tensors = [
            leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, torch.Tensor)
        ]
        devices = {tensor.device.type for tensor in tensors}
        if options.get("device") is not None:
            devices.add(torch.device(options["device"]).type)
        if devices <= {"cpu"}:
            with _disable_current_modes():
                return function(*arguments, **options)
        non_blocking = options.get("non_blocking") or any(item is True for item in arguments[2:])
        # Python numbers are passed directly to the kernel, but masks and indices on the CPU are
        # copied to the GPU first.
        on_host = any(tensor.device.type == "cpu" and tensor.ndim for tensor in tensors)
        copied = len(devices) > 1 if function in COPIES else on_host
        if copied and not (function in COPIES and non_blocking):
            self.waits.append(f"{function} of {[tuple(tensor.shape) for tensor in tensors]}")
        return function(*arguments, **options)


@contextmanager
def gpu_without_memory() -> Iterator[GpuWithoutMemory]:
    """Yield a `GpuWithoutMemory` in a FakeTensorMode. On exit, remove the constants that were
    created inside."""
    _forget_constants()
    with FakeTensorMode(allow_non_fake_inputs=True), GpuWithoutMemory() as mode:
        yield mode
    _forget_constants()


def _forget_constants() -> None:
    for function in vars(pixel_ops).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def move_to_fake_gpu(model: nn.Module) -> nn.Module:
    """Replace the parameters and buffers of `model` with fake tensors of the same shapes on `GPU`.

    Call this function inside the mode. `Module.to` cannot be used here, because `Module.to` swaps
    tensors, which fake tensors do not allow.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=GPU)
                module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=GPU)
    return model


class Launches(TorchDispatchMode):
    """A mode that counts the operations launched on a device, by name and by line of code.

    Copies to `device` ("meta", "cuda" or "cpu") are counted as well. A CPU can stand in for a GPU,
    because it runs the same operations one by one.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.device = device
        self.by_name: Counter[str] = Counter()
        self.by_line: Counter[tuple[str, str]] = Counter()
        """The number of launches of each operation by (name, `module.py:line`). The line is empty
        for operations in the backward pass."""

    def total(self) -> int:
        return self.by_name.total()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        name = function._schema.name.removeprefix("aten::")
        leaves = tree_leaves((arguments, result))
        used = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if self.device in used and not function.is_view and name not in NO_LAUNCH:
            self.by_name[name] += 1
            self.by_line[name, _our_line()] += 1
        return result

    def __str__(self) -> str:
        lines = Counter({f"{name} {line}".rstrip(): n for (name, line), n in self.by_line.items()})
        return ", ".join(f"{n} {text}" for text, n in lines.most_common())


def _our_line() -> str:
    for frame, line in traceback.walk_stack(None):
        if frame.f_code.co_filename.startswith(OURS):
            return f"{frame.f_code.co_filename.removeprefix(OURS)}:{line}"
    return ""
