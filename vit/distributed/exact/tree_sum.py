"""A sum of gradients whose bits do not depend on how many ranks computed it.

Floating-point addition rounds, so (a + b) + c and a + (b + c) differ in the last bit. An all-reduce
adds the gradients of R ranks in an order that follows from R; here the order follows from the
global batch alone. It is cut into leaves, micro-batches of one size, and their gradients are added
along a binary tree over the leaves' global numbers. With 6 leaves:

    level 3                 (3, 0)                  the sum
    level 2         (2, 0)          (2, 1)
    level 1     (1, 0)  (1, 1)      (1, 2)          (2, 1) is (1, 2): there is nothing to its right
    level 0     0   1   2   3       4   5           the leaves

A rank has leaves that follow each other (`leaves_of`). It adds each to what it has as a binary
counter does (`Stack`): two neighbours of a level become their parent at once, so at most two
vectors for each level are kept. What cannot be added on one rank is finished between them
(`TreeSum.finish`): the gradients are cut into as many pieces as there are ranks, each rank gets one
piece of all nodes that are left, adds them in the order of the tree, and sends the sum to all.
That is the traffic of a ring's all-reduce where each rank is left with one node, as with equal
shares of 2**k leaves. The exchange of a part of the gradients begins as soon as the last backward
pass of the rank has computed it.

No other part of a step may depend on the ranks either: `vit.step` sees to that, docs/exactness.md
explains all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vit.distributed.world import World, leaves_of

BUCKET_BYTES = 25 * 2**20
"""Gradients that are exchanged together; DDP's default."""


ALIGNED_VALUES = 16
"""Each gradient begins at a multiple of 64 bytes. Kernels read several values at a time where a
tensor is aligned, and add them in another order where it is not: a norm would depend on the padding
of buckets before it, and so on the number of ranks."""


class Node(NamedTuple):
    """The sum of leaves [number * 2**level, (number + 1) * 2**level), as far as they exist."""

    level: int
    number: int


def _multiple_of(unit: int, length: int) -> int:
    """Return `length`, rounded up."""
    return -(-length // unit) * unit


class Stack:
    """Nodes from left to right; two siblings at its end become their parent.

    It knows numbers only: `push` says how many additions are due, and the caller adds.
    """

    def __init__(self, num_leaves: int):
        self.num_leaves = num_leaves
        self.nodes: list[Node] = []

    def push(self, node: Node) -> int:
        """Put a node behind the last one; return how many times the last two are to be added."""
        node = self._raised(node)
        additions = 0
        while self.nodes and node.number % 2 and self.nodes[-1] == (node.level, node.number - 1):
            self.nodes.pop()
            node = self._raised(Node(node.level + 1, node.number // 2))
            additions += 1
        self.nodes.append(node)
        return additions

    def _raised(self, node: Node) -> Node:
        """Return `node`, or the highest one that is the same sum since no leaf is to its right."""
        level, number = node
        while number and number % 2 == 0 and (number + 1) << level >= self.num_leaves:
            level += 1
            number //= 2
        return Node(level, number)


def nodes_of(leaves: range, num_leaves: int) -> list[Node]:
    """Return what a rank with `leaves` is left with."""
    stack = Stack(num_leaves)
    for leaf in leaves:
        stack.push(Node(0, leaf))
    return stack.nodes


def held_bytes(num_values: int, num_leaves: int, num_ranks: int) -> int:
    """Return what `TreeSum` holds at most on any rank: partial sums, with the gradients of a leaf,
    and what comes from other ranks. num_values: of all gradients."""
    most = 0
    received = 0
    for rank in range(num_ranks):
        stack = Stack(num_leaves)
        for leaf in leaves_of(rank, num_ranks, num_leaves):
            most = max(most, len(stack.nodes) + 1)
            stack.push(Node(0, leaf))
        received += len(stack.nodes)
    if num_ranks == 1:
        received = 0
    return 4 * (most * num_values + received * num_values // num_ranks)


def tree_sum(values: Tensor) -> Tensor:
    """Return the sum of (leaves, ...) values along the tree, (...)."""
    while len(values) > 1:
        pairs = len(values) // 2 * 2
        added = values[0:pairs:2] + values[1:pairs:2]
        values = torch.cat([added, values[pairs:]])
    return values[0]


@dataclass
class _Bucket:
    """Neighbouring parameters whose gradients are exchanged together."""

    first: int
    """Place of its first number in the flat vector of all gradients."""
    num_padded: int
    """A multiple of the number of ranks."""
    waits_for: int
    """Parameters whose gradients are not yet complete."""
    num_parameters: int
    sent: list[tuple[Any, Tensor, Tensor]] = field(default_factory=list)
    """The exchanges under way, one for each node of the rank that is left with most: what each
    sends, and what it receives."""


class TreeSum:
    """The gradients of `parameters`, float32, added along the tree of `num_leaves` leaves.

    Each leaf of this rank, in order, has its backward pass inside `leaf()`; then `finish` leaves
    the sum of all leaves of all ranks in the parameters' `grad`, to the bit the same on all ranks
    and on any number of them. Not divided by anything. All ranks call it at the same time.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        num_leaves: int,
        world: World,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self.world = world
        self.num_leaves = num_leaves
        self.leaves = leaves_of(world.rank, world.size, num_leaves)
        left = (
            nodes_of(leaves_of(rank, world.size, num_leaves), num_leaves)
            for rank in range(world.size)
        )
        self._left: list[list[Node]] = list(left)
        # Backward passes compute gradients from the last layer to the first.
        self._parameters = list(reversed(parameters))
        self._places: list[int] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._num_values = self._lay_out(bucket_bytes)
        self._device = world.device
        self._spare: list[Tensor] = []
        """Vectors of all gradients that are free."""
        self._held: list[Tensor] = []
        """One for each node of the stack."""
        self._stack = Stack(num_leaves)
        self._next_leaf = 0
        self._next_bucket = 0
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _lay_out(self, bucket_bytes: int) -> int:
        """Give each parameter a place in the flat vector; return the vector's length."""
        place = 0
        bucket: _Bucket | None = None
        for parameter in self._parameters:
            if bucket is None:
                bucket = _Bucket(place, 0, 0, 0)
                self._buckets.append(bucket)
            self._places.append(place)
            self._bucket_of[parameter] = bucket
            bucket.num_parameters += 1
            place = _multiple_of(ALIGNED_VALUES, place + parameter.numel())
            if 4 * (place - bucket.first) >= bucket_bytes or parameter is self._parameters[-1]:
                # Divided over the ranks, and still a multiple of `ALIGNED_VALUES`.
                unit = ALIGNED_VALUES * self.world.size
                place = bucket.first + _multiple_of(unit, place - bucket.first)
                bucket.num_padded = place - bucket.first
                bucket = None
        return place

    @contextmanager
    def leaf(self) -> Iterator[None]:
        """A context for the backward pass of this rank's next leaf, whose gradients begin at 0."""
        vector = self._spare.pop() if self._spare else self._new_vector()
        vector.zero_()
        for parameter, place in zip(self._parameters, self._places, strict=True):
            values = vector[place : place + parameter.numel()]
            parameter.grad = values.view(parameter.shape)
        self._held.append(vector)
        self._additions = self._stack.push(Node(0, self.leaves[self._next_leaf]))
        self._next_leaf += 1
        self._is_last = self._next_leaf == len(self.leaves)
        if self._is_last:
            for bucket in self._buckets:
                bucket.waits_for = bucket.num_parameters
        yield
        if self._is_last:
            # Also of parameters that have no part in the loss.
            while self._next_bucket < len(self._buckets):
                self._send(self._buckets[self._next_bucket])
        else:
            self._add(slice(None))
        self._spare += self._held[len(self._stack.nodes) :]
        del self._held[len(self._stack.nodes) :]

    def _new_vector(self) -> Tensor:
        return torch.empty(self._num_values, device=self._device)

    def _add(self, part: slice) -> None:
        """Do the additions that the last leaf has made due, for a part of the gradients."""
        for right in range(len(self._held) - 1, len(self._held) - 1 - self._additions, -1):
            self._held[right - 1][part] += self._held[right][part]

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Send the buckets that are complete; all ranks send them in the same order."""
        if not self._is_last:
            return
        self._bucket_of[parameter].waits_for -= 1
        while self._next_bucket < len(self._buckets):
            bucket = self._buckets[self._next_bucket]
            if bucket.waits_for:
                break
            self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        """Finish a bucket's additions on this rank, and begin its exchange."""
        self._next_bucket += 1
        part = slice(bucket.first, bucket.first + bucket.num_padded)
        self._add(part)
        if self.world.size == 1:
            return
        piece = bucket.num_padded // self.world.size
        # One exchange for each node: several in one would have to be copied next to each other.
        for turn in range(max(map(len, self._left))):
            takes_part = [turn < len(nodes) for nodes in self._left]
            own = self._held[turn][part] if takes_part[self.world.rank] else self._held[0][:0]
            received = torch.empty(sum(takes_part) * piece, device=self._device)
            # Piece r goes to rank r.
            work = dist.all_to_all_single(
                received,
                own,
                output_split_sizes=[piece * takes for takes in takes_part],
                input_split_sizes=[len(own) // self.world.size] * self.world.size,
                async_op=True,
            )
            bucket.sent.append((work, own, received))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the other ranks, and leave the sum in `grad`."""
        total = self._held[0]
        gathers: list[tuple[Any, Tensor]] = []
        for bucket in self._buckets if self.world.size > 1 else ():
            assert bucket.sent, "each rank has its last leaf inside `leaf()`"
            for work, _, _ in bucket.sent:
                work.wait()
            length = bucket.num_padded // self.world.size
            piece = self._finish_piece([received.split(length) for _, _, received in bucket.sent])
            bucket.sent = []
            # Sent already, so free.
            out = total[bucket.first : bucket.first + bucket.num_padded]
            work = dist.all_gather_into_tensor(out, piece, async_op=True)
            gathers.append((work, piece))
        for work, _ in gathers:
            work.wait()
        for parameter, place in zip(self._parameters, self._places, strict=True):
            parameter.grad = total[place : place + parameter.numel()].view(parameter.shape)
        self._spare += self._held
        self._held = []
        self._stack = Stack(self.num_leaves)
        self._next_leaf = 0
        self._next_bucket = 0

    def _finish_piece(self, received: list[tuple[Tensor, ...]]) -> Tensor:
        """Add the nodes that all ranks are left with, in their order; return (n,).

        received: (n,) each; first the first node of each rank, then the second ones, and so on.
        """
        of_turn = [iter(vectors) for vectors in received]
        stack = Stack(self.num_leaves)
        sums: list[Tensor] = []
        for nodes in self._left:
            for node, vectors in zip(nodes, of_turn, strict=False):
                sums.append(next(vectors))
                for _ in range(stack.push(node)):
                    right = sums.pop()
                    sums[-1] += right
        return sums[0]
