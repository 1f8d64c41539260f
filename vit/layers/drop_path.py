"""Stochastic depth (Huang et al. 2016, arXiv 1603.09382), by timm's name drop path.

In training, some samples of a micro-batch leave out a residual branch. The branch of the others is
scaled up, so that the expected output is that of evaluation, where nothing is left out. Which
samples, and at what cost, is a matter of form (`model.drop_path_form`):

mask    Each sample by itself, with probability `rate`: `DropPath` multiplies the branch of all by
        0 or 1 / (1 - rate). What is dropped has been computed.
subset  B * (1 - rate) of B samples, rounded: `choose_rows` draws them for all branches of a model,
        `add_branch` gathers them, computes the branch of these only and adds it back. At rate 0.45
        nearly half of the blocks' work is not done. DINOv2's way (Oquab et al. 2023, arXiv
        2304.07193, section 5; facebookresearch/dinov2:dinov2/layers/block.py), which truncates
        where we round.

`vit.model` has the equations of the network, and calls this where a branch joins the residual path.
`PatchDropout` drops patches of images, and not branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def drop_path_rates(rate: float, depth: int, schedule: str) -> list[float]:
    """Return the rate of each block.

    schedule: "constant", as in DeiT III and DINOv2; or "linear", from 0 at the first block to
    `rate` at the last.
    """
    if schedule == "constant":
        return [rate] * depth
    return [rate * number / max(depth - 1, 1) for number in range(depth)]


class DropPath(nn.Module):
    """The form `mask`: zeroes a sample's branch with probability `rate` in [0, 1).

    (B, ...) -> (B, ...), the kept ones scaled by 1 / (1 - rate). Does nothing in evaluation.
    """

    keep_prob: Tensor

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        # A tensor, not a float: torch.compile specialises its graph on each Python number that a
        # forward pass reads. Blocks may all have different rates, and after eight graphs it falls
        # back to eager. Not persistent: the rate is a setting, and timm's state dicts lack it.
        self.register_buffer("keep_prob", torch.empty(()), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the buffer, also after `to_empty`."""
        self.keep_prob.fill_(1.0 - self.rate)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        shape = (x.shape[0], *(1,) * (x.ndim - 1))  # one draw per sample
        # Drawn in fp32 also under autocast: bf16 has 128 values in [0.5, 1), too few for rate 0.1.
        kept = torch.rand(shape, device=x.device) < self.keep_prob
        return x * (kept.to(x.dtype) / self.keep_prob)


def num_kept(batch_size: int, rate: float) -> int:
    """Return how many of `batch_size` samples keep a branch in the form `subset`: at least one."""
    return max(round(batch_size * (1.0 - rate)), 1)


def choose_rows(batch_size: int, rates: Sequence[float], device: torch.device) -> list[Tensor]:
    """Draw the samples that keep their branch: (num_kept,) int64 for each of `rates`.

    How many they are depends on the arguments and not on the draw, so the device is not waited for.
    """
    # One sort for all branches of the model: a `randperm` each would be 64 for H.
    orders = torch.rand(len(rates), batch_size, device=device).argsort(dim=1)
    return [order[: num_kept(batch_size, rate)] for order, rate in zip(orders, rates, strict=True)]


def add_branch(x: Tensor, branch: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Return `x`, (B, ...), with B / kept times `branch(x[rows])` added to its `rows`, (kept,)."""
    added = branch(x.index_select(0, rows)).to(x.dtype)
    return x.index_add(0, rows, added, alpha=x.shape[0] / rows.shape[0])


class PatchDropout(nn.Module):
    """Leaves out patches, and their rotary positions: (B, N, D) -> (B, P + kept, D).

    Each image keeps its P prefix tokens and (1 - rate) of its patches, at least one, drawn by
    itself; attention costs less by the square (Liu et al. 2022, arXiv 2208.07220; timm's
    `PatchDropout`). Nothing is scaled up: tokens are attended to, not summed. Does nothing in
    evaluation.
    """

    def __init__(self, rate: float, num_prefix_tokens: int):
        super().__init__()
        self.rate = rate
        self.num_prefix_tokens = num_prefix_tokens

    def forward(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if not self.training:
            return x, rope
        first = self.num_prefix_tokens
        batch_size, num_tokens, _ = x.shape
        num_patches = num_tokens - first
        num_kept = max(int(num_patches * (1.0 - self.rate)), 1)
        order = torch.rand(batch_size, num_patches, device=x.device).argsort(dim=1)
        # Blocks do not mind the order of tokens, so it stays as drawn; only the prefix is in place.
        prefix = torch.arange(first, device=x.device).expand(batch_size, -1)
        kept = torch.cat((prefix, order[:, :num_kept] + first), dim=1)
        x = x.gather(1, kept.unsqueeze(2).expand(-1, -1, x.shape[2]))
        # (2, 1, 1, N, head_dim) -> (2, B, 1, P + kept, head_dim)
        return x, rope if rope is None else rope[:, 0, 0, kept].unsqueeze(2)
