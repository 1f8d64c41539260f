"""Stochastic depth (Huang et al. 2016, arXiv 1603.09382), called drop path in timm.

In training, some samples of a micro-batch skip a residual branch. The branch is scaled up for all
other samples, so that the expected output equals the output in evaluation. `model.drop_path_form`
selects one of two forms:

mask    Each sample skips independently with probability `rate`. A branch is multiplied by 0 or
        1 / (1 - rate), so even skipped branches are computed.
subset  Only B * (1 - rate) of B samples, rounded, compute a branch. They are gathered, and their
        branch is added back. At rate 0.45 this saves nearly half of the computation. DINOv2 does
        the same, but truncates instead of rounding (Oquab et al. 2023, arXiv 2304.07193, section 5;
        facebookresearch/dinov2:dinov2/layers/block.py).

Both forms draw the samples for all branches before the first block, and `add_branch` adds each
branch:

    DropPaths -> for each branch, factors (B, 1, 1) or rows (kept,) -> Block -> add_branch

`PatchDropout` drops patches of images instead of branches.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vit.layers.precision import branch_dtype


def drop_path_rates(rate: float, depth: int, schedule: str) -> list[float]:
    """Return the rate of each block.

    schedule: "constant", as in DeiT III and DINOv2; or "linear", from 0 at the first block to
    `rate` at the last.
    """
    if schedule == "constant":
        return [rate] * depth
    return [rate * number / max(depth - 1, 1) for number in range(depth)]


class DropPaths(nn.Module):
    """Draws the samples that keep each branch, for all branches of a model.

    The samples are drawn before the first block. If a block drew them, torch.compile would make a
    graph for each number of rows, and the compiled backward pass would read draws and rates in
    place of factors.

    Args:
        rate, schedule: See `drop_path_rates`; with rate 0, nothing is drawn.
        form: "mask" or "subset".
    """

    keep_probs: Tensor

    def __init__(self, rate: float, depth: int, schedule: str, form: str):
        super().__init__()
        of_blocks = drop_path_rates(rate, depth, schedule) if rate else []
        self.rates = [of_blocks[branch // 2] for branch in range(2 * len(of_blocks))]
        """The rate of each branch, in the order of the blocks, which have two branches each."""
        self.form = form

        # timm's state dicts do not contain the rates, which are a setting, so the buffer is not
        # persistent.
        self.register_buffer("keep_probs", torch.empty(len(self.rates), 1), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the buffer, for example after `to_empty`."""
        # Subtract in fp64, because in fp32 some probabilities would be rounded twice.
        self.keep_probs.copy_(1.0 - torch.tensor(self.rates, dtype=torch.float64).unsqueeze(1))

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        """Return the argument `kept` of `add_branch` for each branch, for tokens `x`, (B, ...).
        Without drop path, the result is empty."""
        if not (self.training and self.rates):
            return ()
        if self.form == "subset":
            return choose_rows(x.shape[0], self.rates, x.device)

        # Draw in fp32 even under autocast, because bf16 has only 128 values in [0.5, 1), which is
        # too coarse for a rate of 0.1.
        draws = torch.rand(len(self.rates), x.shape[0], device=x.device)
        factors = (draws < self.keep_probs) / self.keep_probs
        return factors.to(branch_dtype(x))[:, :, None, None].unbind()


def num_kept(batch_size: int, rate: float) -> int:
    """Return how many of `batch_size` samples compute a branch in the form `subset` (at least
    1)."""
    return max(round(batch_size * (1.0 - rate)), 1)


def choose_rows(batch_size: int, rates: Sequence[float], device: torch.device) -> list[Tensor]:
    """Draw the samples that compute each branch: (num_kept,) int64 for each of `rates`.

    The host knows the number of samples, so no host-device sync is needed.
    """
    # Sort once for all branches, because one `randperm` per branch would take 64 calls for ViT-H.
    orders = torch.rand(len(rates), batch_size, device=device).argsort(dim=1)
    return [order[: num_kept(batch_size, rate)] for order, rate in zip(orders, rates, strict=True)]


def add_branch(x: Tensor, branch: Callable[[Tensor], Tensor], kept: Tensor | None) -> Tensor:
    """Return `x` + `branch(x)`, in the dtype of `x`, (B, ...).

    kept: None if all samples keep the branch. Floats, (B, 1, 1), are the factors that `DropPaths`
    drew for this branch. Integers, (kept,), are the rows that keep the branch. The branch is then
    computed only for these rows, and multiplied by B / kept.
    """
    if kept is None:
        return (x + branch(x)).to(x.dtype)
    if kept.is_floating_point():
        return (x + branch(x) * kept).to(x.dtype)
    added = branch(x.index_select(0, kept)).to(x.dtype)
    return x.index_add(0, kept, added, alpha=x.shape[0] / kept.shape[0])


class PatchDropout(nn.Module):
    """Drops patches and their rotary embeddings: (B, N, D) -> (B, P + kept, D).

    Each image keeps its P prefix tokens and a random (1 - rate) of its patches, at least one. The
    cost of attention falls quadratically (Liu et al. 2022, arXiv 2208.07220; timm's
    `PatchDropout`). Tokens are not scaled up, because attention averages over them. In evaluation,
    nothing is dropped.
    """

    def __init__(self, rate: float, num_prefix_tokens: int):
        super().__init__()
        self.rate = rate
        self.num_prefix_tokens = num_prefix_tokens

    def forward(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return a random subset of the patches, (B, P + kept, D), and their rotations."""
        if not self.training:
            return x, rope

        first = self.num_prefix_tokens
        batch_size, num_tokens, _ = x.shape
        num_patches = num_tokens - first
        num_kept = max(int(num_patches * (1.0 - self.rate)), 1)
        order = torch.rand(batch_size, num_patches, device=x.device).argsort(dim=1)

        # Blocks do not depend on the order of patches, so leave them in random order. Prefix tokens
        # remain first, because heads find them by position.
        prefix = torch.arange(first, device=x.device).expand(batch_size, -1)
        tokens = torch.cat((prefix, order[:, :num_kept] + first), dim=1)
        x = x.gather(1, tokens.unsqueeze(2).expand(-1, -1, x.shape[2]))
        # (2, 1, 1, N, head_dim) -> (2, B, 1, P + kept, head_dim)
        return x, rope if rope is None else rope[:, 0, 0, tokens].unsqueeze(2)
