"""Sum gradients so that the bits do not depend on the number of ranks.

Floating-point addition rounds, so (a + b) + c and a + (b + c) may differ in the last bit. An
all-reduce adds the gradients of R ranks in an order that depends on R. In this module, the order
depends only on the global batch. The batch is split into leaves, which are micro-batches of the
same size, and their gradients are added along a binary tree over the leaves. With 6 leaves:

    level 3                 (3, 0)                  the sum
    level 2         (2, 0)          (2, 1)
    level 1     (1, 0)  (1, 1)      (1, 2)          (2, 1) is (1, 2), the last node of its level
    level 0     0   1   2   3       4   5           the leaves

Each rank computes consecutive leaves (`leaves_of`) and adds them like a binary counter (`Stack`):
as soon as both siblings exist, they are replaced by their parent, which is their sum. A rank
therefore stores at most two vectors per level. Then all ranks add the remaining nodes together
(`TreeSum.finish`). The gradients are split into one piece per rank. Each rank receives its piece of
all remaining nodes, adds these nodes in tree order, and sends the sum to all ranks. If each rank
has one remaining node, for example if each rank computed 2**k leaves, the traffic is the same as in
a ring all-reduce. A bucket of gradients is exchanged as soon as the rank's last backward pass has
computed it.

docs/exactness.md explains how all other parts of a training step are made independent of the number
of ranks.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vit.distributed.world import World, leaves_of

BUCKET_BYTES = 25 * 2**20
"""The size of a gradient bucket (DDP's default). Each bucket is exchanged as a whole."""
VALUE_BYTES = 4
"""The size of a gradient value, which is float32."""
ALIGNED_VALUES = 16
"""Each gradient begins at a multiple of this many values (64 bytes). Kernels add the values of an
unaligned tensor in a different order, so a norm would depend on the padding of earlier buckets,
which depends on the number of ranks."""


class Node(NamedTuple):
    """The sum of all existing leaves in [number * 2**level, (number + 1) * 2**level)."""

    level: int
    number: int


def _multiple_of(unit: int, length: int) -> int:
    return math.ceil(length / unit) * unit


class Stack:
    """The nodes of a rank from left to right. Two siblings at the end are replaced by their parent.

    The stack stores no vectors: `push` returns the number of additions, and the caller adds the
    vectors.
    """

    def __init__(self, num_leaves: int):
        self.num_leaves = num_leaves
        self.nodes: list[Node] = []

    def push(self, node: Node) -> int:
        """Append a node, and return how often the caller must add the last two vectors."""
        node = self._raised(node)
        additions = 0
        while node.number % 2 and self.nodes[-1:] == [(node.level, node.number - 1)]:
            self.nodes.pop()
            node = self._raised(Node(node.level + 1, node.number // 2))
            additions += 1
        self.nodes.append(node)
        return additions

    def _raised(self, node: Node) -> Node:
        """Return the highest node of the tree that contains the same leaves as `node`."""
        level, number = node
        while number and number % 2 == 0 and (number + 1) << level >= self.num_leaves:
            level += 1
            number //= 2
        return Node(level, number)


def nodes_of(leaves: range, num_leaves: int) -> list[Node]:
    """Return the nodes that remain on a rank after the rank has added its `leaves`."""
    stack = Stack(num_leaves)
    for leaf in leaves:
        stack.push(Node(0, leaf))
    return stack.nodes


def held_bytes(num_values: int, num_leaves: int, num_ranks: int) -> int:
    """Return the peak memory of `TreeSum` on a rank: partial sums, the gradients of a leaf, and
    pieces from other ranks. num_values: total number of gradient values."""
    max_held = 0
    received = 0
    for rank in range(num_ranks):
        stack = Stack(num_leaves)
        for leaf in leaves_of(rank, num_ranks, num_leaves):
            max_held = max(max_held, len(stack.nodes) + 1)
            stack.push(Node(0, leaf))
        received += len(stack.nodes)

    if num_ranks == 1:
        received = 0
    return VALUE_BYTES * (max_held * num_values + received * num_values // num_ranks)


def tree_sum(values: Tensor) -> Tensor:
    """Add values (leaves, ...) along the tree, and return the sum (...)."""
    while len(values) > 1:
        pairs = len(values) // 2 * 2
        values = torch.cat([values[0:pairs:2] + values[1:pairs:2], values[pairs:]])
    return values[0]


@dataclass
class _Bucket:
    """A group of neighboring parameters whose gradients are exchanged together."""

    first: int
    """The index of the bucket's first value in the flat vector of all gradients."""
    num_padded: int = 0
    """The number of values including padding, a multiple of the number of ranks."""
    waits_for: int = 0
    """The number of parameters whose gradients are still incomplete."""
    num_parameters: int = 0
    sent: list[tuple[Any, Tensor, Tensor]] = field(default_factory=list)
    """The pending exchanges, each (work, sent, received). There is one for each node that remains
    on the rank with the most remaining nodes."""


class TreeSum:
    """The gradient sum of `parameters` (float32) along the tree of `num_leaves` leaves.

    The backward passes of this rank's leaves must run in order, each inside `leaf()`. Then all
    ranks call `finish`, which stores the sum over all leaves of all ranks in the parameters'
    `grad`. The sum, which is not an average, has the same bits on all ranks and for any number
    of ranks.
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
        self._left: list[list[Node]] = [
            nodes_of(leaves_of(rank, world.size, num_leaves), num_leaves)
            for rank in range(world.size)
        ]
        """The nodes that remain on each rank."""

        # Backward passes compute gradients from the last layer to the first.
        self._parameters = list(reversed(parameters))
        self._places: list[int] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._num_values = self._lay_out(bucket_bytes)

        self._device = world.device
        self._spare: list[Tensor] = []
        """Free vectors that can be reused, each as long as all gradients together."""
        self._held: list[Tensor] = []
        """The vectors of the nodes on `Stack`."""
        self._stack = Stack(num_leaves)
        self._next_leaf = 0
        self._next_bucket = 0

        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _lay_out(self, bucket_bytes: int) -> int:
        """Assign each parameter an offset in the flat vector, and return the vector's length."""
        # Each rank's piece of a bucket must also be a multiple of `ALIGNED_VALUES`.
        bucket_unit = ALIGNED_VALUES * self.world.size
        place = 0
        bucket: _Bucket | None = None
        for parameter in self._parameters:
            if bucket is None:
                bucket = _Bucket(first=place)
                self._buckets.append(bucket)

            self._places.append(place)
            self._bucket_of[parameter] = bucket
            bucket.num_parameters += 1
            place = _multiple_of(ALIGNED_VALUES, place + parameter.numel())

            is_full = VALUE_BYTES * (place - bucket.first) >= bucket_bytes
            if is_full or parameter is self._parameters[-1]:
                bucket.num_padded = _multiple_of(bucket_unit, place - bucket.first)
                place = bucket.first + bucket.num_padded
                bucket = None
        return place

    @contextmanager
    def leaf(self) -> Iterator[None]:
        """Zero the gradients before the next leaf's backward pass, and add the gradients after
        it."""
        vector = (
            self._spare.pop() if self._spare else torch.empty(self._num_values, device=self._device)
        )
        vector.zero_()
        for parameter, place in zip(self._parameters, self._places, strict=True):
            parameter.grad = vector[place : place + parameter.numel()].view(parameter.shape)

        self._held.append(vector)
        self._additions = self._stack.push(Node(0, self.leaves[self._next_leaf]))
        self._next_leaf += 1
        self._is_last = self._next_leaf == len(self.leaves)
        if self._is_last:
            for bucket in self._buckets:
                bucket.waits_for = bucket.num_parameters

        yield

        if self._is_last:
            # No hook runs for parameters without a gradient, so send their buckets now.
            while self._next_bucket < len(self._buckets):
                self._send(self._buckets[self._next_bucket])
        else:
            self._add(slice(None))
        self._spare += self._held[len(self._stack.nodes) :]
        del self._held[len(self._stack.nodes) :]

    def _add(self, part: slice) -> None:
        """Do the pending additions for a slice of the gradients."""
        for right in range(len(self._held) - 1, len(self._held) - 1 - self._additions, -1):
            self._held[right - 1][part] += self._held[right][part]

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Send complete buckets, in the same order on all ranks."""
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
        """Finish the additions of a bucket on this rank, and start its exchange."""
        self._next_bucket += 1
        part = slice(bucket.first, bucket.first + bucket.num_padded)
        self._add(part)
        if self.world.size == 1:
            return

        piece = bucket.num_padded // self.world.size
        # A single exchange would require copying the vectors, so exchange each node separately.
        for turn in range(max(map(len, self._left))):
            takes_part = [turn < len(nodes) for nodes in self._left]
            own = self._held[turn][part] if takes_part[self.world.rank] else self._held[0][:0]
            received = torch.empty(sum(takes_part) * piece, device=self._device)

            # Rank r receives piece r.
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
        """Wait for the other ranks, and store the sum in the parameters' `grad`."""
        total = self._held[0]
        gathers: list[tuple[Any, Tensor]] = []
        for bucket in self._buckets if self.world.size > 1 else ():
            assert bucket.sent, "each rank has its last leaf inside `leaf()`"
            for work, _, _ in bucket.sent:
                work.wait()
            length = bucket.num_padded // self.world.size
            piece = self._finish_piece([received.split(length) for _, _, received in bucket.sent])
            bucket.sent = []
            # The slice has been sent, so its memory can receive the result.
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
        """Add the remaining nodes of all ranks in tree order, and return the sum (n,).

        received: for each exchange, a tuple of vectors (n,). The first exchange brought the first
        node of every rank, the second brought the second node of every rank that has two, and so
        on.
        """
        vectors_of_rank: list[list[Tensor]] = [[] for _ in self._left]
        for turn, vectors in enumerate(received):
            ranks = [rank for rank, nodes in enumerate(self._left) if turn < len(nodes)]
            for rank, vector in zip(ranks, vectors, strict=True):
                vectors_of_rank[rank].append(vector)

        stack = Stack(self.num_leaves)
        sums: list[Tensor] = []
        for nodes, own in zip(self._left, vectors_of_rank, strict=True):
            for node, vector in zip(nodes, own, strict=True):
                sums.append(vector)
                for _ in range(stack.push(node)):
                    right = sums.pop()
                    sums[-1] += right
        return sums[0]
