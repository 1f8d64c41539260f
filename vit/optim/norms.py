"""Measure norms of gradients, weights and updates per layer (`log.norms_every_steps`).

Layers are numbered as for layer-wise learning rate decay (`vit.optim.groups`): the parameters
before the blocks, each block, and norm and head together. Frozen parameters are ignored.

    gradients, unscaled and not clipped yet    \\
    weights before the update  -> a copy        -> one vector on the device -> metrics.jsonl
    weights after it, and their change         /

The copy exists only during the update, after the activations have been freed. An update is measured
as the change in the weights, which works for every optimizer and for skipped updates.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vit.optim.groups import layer_numbers

GRADIENT, WEIGHT, UPDATE = KINDS = ("grad_norm", "weight_norm", "update_norm")
RATIO = "update_ratio"
LARGEST_LOGIT = "max_attn_logit"
NormsByName = dict[str, dict[str, float]]
"""Maps kind (`KINDS`, `RATIO` or `LARGEST_LOGIT`) -> layer -> value."""


@dataclass(frozen=True)
class Measured:
    """The norms of one step, not yet copied to the host."""

    values: Tensor
    """(n,) float32 on the device: the norms per layer for each of `KINDS`, then attention
    logits."""
    layers: tuple[str, ...]

    def named(self, values: Sequence[float]) -> NormsByName:
        """Return `values`, the host's copy of `self.values`, keyed by kind and layer.

        Adds the ratio of update norm to weight norm. A layer whose weights are all 0 has no ratio.
        """
        # float32 has about six digits.
        rounded = [float(f"{value:.6g}") for value in values]
        num_layers = len(self.layers)
        norms: NormsByName = {}
        for number, kind in enumerate(KINDS):
            of_layers = rounded[number * num_layers : (number + 1) * num_layers]
            norms[kind] = dict(zip(self.layers, of_layers, strict=True))
        norms[RATIO] = {
            name: norms[UPDATE][name] / weight for name, weight in norms[WEIGHT].items() if weight
        }

        logits = rounded[len(KINDS) * num_layers :]
        if logits:
            norms[LARGEST_LOGIT] = {f"blocks.{n}": value for n, value in enumerate(logits)}
        return norms


class Norms:
    """Measures the update at every `every_steps`-th step, and at the last of `total_steps`.

    The norms are exact over all ranks, even if parameters are sharded (DTensor). Raises ValueError
    for a model whose layers are unknown.
    """

    def __init__(self, model: nn.Module, every_steps: int, total_steps: int):
        self.every_steps = every_steps
        self.total_steps = total_steps

        names = _layer_names(model)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Sort by depth, so that the parameters of a layer are next to each other.
        ordered = [name for name in names if name in trained]
        self._parameters: list[Tensor] = [trained[name] for name in ordered]
        sizes = Counter(names[name] for name in ordered)
        self.layers = tuple(sizes)
        self._sizes = list(sizes.values())

        self._before: list[Tensor] = []
        self._gradients: Tensor | None = None

    def is_due(self, step: int) -> bool:
        """Return whether to measure the update at `step`, counted from 0."""
        return (step + 1) % self.every_steps == 0 or step + 1 == self.total_steps

    @torch.no_grad()
    def begin(self, loss_scale: Tensor) -> None:
        """Measure the gradients, which include `loss_scale`, and copy the weights before the
        update.

        A missing gradient is treated as 0.
        """
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        self._gradients = self._by_layer(gradients) / loss_scale
        self._before = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def end(self, largest_logits: Tensor) -> Measured:
        """Return the norms of the update since `begin`. largest_logits: (blocks,)."""
        assert self._gradients is not None, "begin comes first"
        weights = self._by_layer(self._before)
        # The copy is not needed again, so subtract in place.
        torch._foreach_sub_(self._before, [parameter.detach() for parameter in self._parameters])
        parts = (self._gradients, weights, self._by_layer(self._before), largest_logits)
        self._before = []
        self._gradients = None
        return Measured(torch.cat(parts), self.layers)

    def _by_layer(self, tensors: list[Tensor]) -> Tensor:
        """Return the norm of `tensors` in each layer, (layers,) float32."""
        norms = torch.stack(torch._foreach_norm(tensors))
        if isinstance(norms, DTensor):
            norms = norms.full_tensor()
        # Combine norms per layer, so that an infinite norm does not affect other layers.
        return torch.stack(torch._foreach_norm(norms.split(self._sizes)))


def _layer_names(model: nn.Module) -> dict[str, str]:
    """Return the layer name of each parameter name, ordered by depth."""
    has_blocks = isinstance(getattr(model, "blocks", None), nn.Sequential | nn.ModuleList)
    try:
        numbers = layer_numbers(model, "beit" if has_blocks else "timm")
    except ValueError:
        raise ValueError(
            f"log.norms_every_steps: {type(model).__name__} does not list its layers: set"
            " log.norms_every_steps=null"
        ) from None

    ends = {0: "embed", max(numbers.values()): "head"} if has_blocks else {}
    block = "blocks.{}" if has_blocks else "layers.{}"
    shift = 1 if has_blocks else 0
    named = sorted(numbers.items(), key=lambda pair: pair[1])
    return {name: ends.get(number, block.format(number - shift)) for name, number in named}
