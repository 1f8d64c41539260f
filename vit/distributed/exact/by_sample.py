"""Draw dropout and drop path per sample, independently of the rank and the micro-batch.

torch's generators are stateful, so the random numbers of a sample depend on all earlier draws in
the same process. In this module, a random number is a pure function of (seed, step, row of the
global batch, layer, position in the sample). This function is the hash that also orders samples and
draws augmentations (vit/system/hashing.py), but it is computed on the device.

`draw_by_sample` replaces the random modules of a model. `SampleKeys.set` sets the keys for the rows
of the next micro-batch. Each dropout module runs about ten elementwise int64 operations, which
torch.compile fuses into one kernel. The cost of drop path is negligible.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vit.layers.drop_path import DropPaths
from vit.layers.precision import branch_dtype
from vit.system.hashing import fold

# torch's unsigned integers lack most operations, so the SplitMix64 constants are signed.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_FACTOR_1 = 0xBF58476D1CE4E5B9 - 2**64
_FACTOR_2 = 0x94D049BB133111EB - 2**64
_NUM_BITS = 31
"""The number of random bits per value. Probabilities are therefore multiples of 2**-31."""


def draw_bits(keys: Tensor, num_draws: int) -> Tensor:
    """Return the highest 31 bits of `hash64(key ^ n)` for each key and each n < num_draws.

    keys: (rows,) int64. Returns (rows, num_draws) int64 in [0, 2**31).
    """
    x = (keys.unsqueeze(1) ^ torch.arange(num_draws, device=keys.device)) + _INCREMENT
    # Right-shifting a signed number copies the sign bit, so mask out the copies.
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _FACTOR_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _FACTOR_2
    # Omit the last step of the hash, which only changes bits that are shifted out.
    return (x >> (64 - _NUM_BITS)) & (2**_NUM_BITS - 1)


class _BySample(nn.Module):
    """The base class of modules that zero values with probability `rate` and rescale the others."""

    keys: Tensor
    threshold: Tensor
    scale: Tensor

    def __init__(self, rate: float, keys: Tensor):
        """Store `rate` in [0, 1) and `keys`, (rows,) int64. `SampleKeys` later sets the values of
        the keys."""
        super().__init__()
        self.rate = rate
        self.register_buffer("keys", keys, persistent=False)

        # torch.compile would compile a separate graph for each value of a Python number, so use
        # tensors.
        buffers = {"threshold": round(rate * 2**_NUM_BITS), "scale": 1.0 / (1.0 - rate)}
        for name, value in buffers.items():
            self.register_buffer(name, torch.tensor(value, device=keys.device), persistent=False)

    def _kept(self, num_rows: int, num_draws: int) -> Tensor:
        """Return a mask of the values to keep, (keys, values per key) bool, with `num_draws` values
        in total."""
        # Windows of an image, as in Swin, are consecutive rows and share the key of their image. If
        # the number of rows is not a multiple of the number of keys, only the first keys are used,
        # so the values depend on the micro-batch.
        num_keys = math.gcd(num_rows, len(self.keys))
        return draw_bits(self.keys[:num_keys], num_draws // num_keys) >= self.threshold


class DropoutBySample(_BySample):
    """A replacement for `nn.Dropout` on inputs of shape (rows, ...)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (self._kept(x.shape[0], x.numel()).view(x.shape) * self.scale).to(x.dtype)


class DropPathBySample(_BySample):
    """A replacement for timm's `DropPath` on inputs of shape (rows, ...)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask = self._kept(x.shape[0], x.shape[0])
        return x * (mask.view(-1, *(1,) * (x.ndim - 1)) * self.scale).to(x.dtype)


class DropPathsBySample(nn.Module):
    """A replacement for `vit.layers.drop_path.DropPaths` whose form is `mask`."""

    keys: Tensor
    thresholds: Tensor
    scales: Tensor

    def __init__(self, rates: Sequence[float], keys: Tensor):
        """Store the rate of each branch, and `keys`, (branches, rows) int64."""
        super().__init__()
        self.register_buffer("keys", keys, persistent=False)
        dropped = torch.tensor(rates, dtype=torch.float64, device=keys.device).unsqueeze(1)
        self.register_buffer(
            "thresholds", (dropped * 2**_NUM_BITS).round().long(), persistent=False
        )
        self.register_buffer("scales", (1.0 / (1.0 - dropped)).float(), persistent=False)

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        """Return the factors of each branch, (rows, 1, 1), or () in evaluation mode."""
        if not self.training:
            return ()
        bits = draw_bits(self.keys.flatten(), 1).view(self.keys.shape)
        factors = (bits >= self.thresholds) * self.scales
        return factors.to(branch_dtype(x))[:, :, None, None].unbind()


class SampleKeys:
    """The random keys for all layers of a model: (layers, rows) int64 on the device, updated in
    place."""

    def __init__(self, num_layers: int, num_rows: int, device: torch.device):
        self.by_layer = torch.zeros(num_layers, num_rows, dtype=torch.int64, device=device)
        self._layers = np.arange(num_layers)[:, None]

    def set(self, seed: int, step: int, first_row: int) -> None:
        """Set the keys of rows [first_row, first_row + rows) of the global batch at `step`."""
        rows = first_row + np.arange(self.by_layer.shape[1])
        keys = torch.from_numpy(fold(seed, step, rows, self._layers).view(np.int64))
        if self.by_layer.is_cuda:
            keys = keys.pin_memory()  # Copying from pinned memory does not block.
        self.by_layer.copy_(keys, non_blocking=True)


def draw_by_sample(model: nn.Module, num_rows: int, device: torch.device) -> SampleKeys:
    """Replace `model`'s modules for dropout and drop path, and return the random keys of all of
    them.

    A module that is called twice per forward pass must be registered under two names. Otherwise
    both calls would drop the same values. Other random modules (dropout in attention, patch
    dropout, `drop_path_form: subset`) are not replaced.

    num_rows: the number of rows in a micro-batch.
    """
    # `named_children` would skip the second name of a module.
    children = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and _rates(child)
    ]

    num_layers = [len(_rates(child)) for _, _, child in children]
    keys = SampleKeys(sum(num_layers), num_rows, device)
    for (parent, name, child), rows in zip(children, keys.by_layer.split(num_layers), strict=True):
        setattr(parent, name, _by_sample(child, rows).train(child.training))
    return keys


def _rates(module: nn.Module) -> Sequence[float]:
    """Return the drop rates of the layers for which `module` draws, or [] if `module` is not
    replaced."""
    if isinstance(module, nn.Dropout):
        return [module.p] if module.p else []  # Rate 0 drops nothing, so do not replace it.
    if isinstance(module, DropPaths):
        return module.rates if module.form == "mask" else []
    # timm may not be installed, so recognize its class by name.
    if type(module).__name__ == "DropPath" and isinstance(rate := module.drop_prob, float):
        return [rate]
    return []


def _by_sample(module: nn.Module, keys: Tensor) -> nn.Module:
    """Return the replacement of `module`. keys: (layers, rows) int64."""
    rates = _rates(module)
    if isinstance(module, DropPaths):
        return DropPathsBySample(rates, keys)
    by_sample = DropoutBySample if isinstance(module, nn.Dropout) else DropPathBySample
    return by_sample(rates[0], keys[0])
