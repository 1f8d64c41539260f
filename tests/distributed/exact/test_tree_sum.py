"""Test sums along a binary tree: which nodes each rank computes, and that results are bit-identical
on any number of ranks."""

from __future__ import annotations

import copy
import hashlib
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from plain_step import plain_step
from processes import REPOSITORY, run
from test_step import CONFIG, make_batch
from torch import Tensor, nn

from vit.data.augment.apply import Augment
from vit.distributed.exact.leaves import Leaves
from vit.distributed.exact.tree_sum import Node, Stack, TreeSum, held_bytes, nodes_of, tree_sum
from vit.distributed.world import World, leaves_of
from vit.extras.planner.device_memory import LiveBytes
from vit.model import create_model


def by_recursion(leaves: list[Tensor]) -> Tensor:
    """Compute the sum recursively. The size of the left half is the largest power of two below the
    number of leaves."""
    if len(leaves) == 1:
        return leaves[0]
    left = 1 << (len(leaves) - 1).bit_length() - 1
    return by_recursion(leaves[:left]) + by_recursion(leaves[left:])


def random_leaves(count: int, size: int = 50) -> Tensor:
    """Return leaves whose magnitudes differ so much that any other order of addition changes the
    bits of the sum."""
    generator = torch.Generator().manual_seed(count)
    scale = torch.randint(-8, 8, (count, size), generator=generator)
    return torch.randn(count, size, generator=generator) * 2.0**scale


@pytest.mark.parametrize("num_leaves", [*range(1, 18), 31, 64, 100])
def test_the_nodes_of_any_number_of_ranks_add_up_to_the_same_bits(num_leaves):
    leaves = random_leaves(num_leaves)
    expected = by_recursion(list(leaves))
    assert torch.equal(tree_sum(leaves), expected)
    for num_ranks in range(1, num_leaves + 1):
        between = Stack(num_leaves)
        sums: list[Tensor] = []
        shares = [leaves_of(rank, num_ranks, num_leaves) for rank in range(num_ranks)]
        assert [leaf for share in shares for leaf in share] == list(range(num_leaves))
        assert {len(share) for share in shares} <= {
            num_leaves // num_ranks,
            -(-num_leaves // num_ranks),
        }
        for share in shares:
            own = Stack(num_leaves)
            held: list[Tensor] = []
            for leaf in share:
                held.append(leaves[leaf])
                for _ in range(own.push(Node(0, leaf))):
                    held[-2:] = [held[-2] + held[-1]]
                assert len(held) == len(own.nodes) <= 2 * len(share).bit_length()
            assert own.nodes == nodes_of(share, num_leaves)
            for node, value in zip(own.nodes, held, strict=True):
                sums.append(value)
                for _ in range(between.push(node)):
                    sums[-2:] = [sums[-2] + sums[-1]]
        assert len(sums) == 1
        assert torch.equal(sums[0], expected), num_ranks


def test_the_order_matters():
    """If every order of addition gave the same bits, the other tests in this file would prove
    nothing."""
    leaves = random_leaves(16)
    sums = (tree_sum(leaves), leaves.sum(0), tree_sum(leaves.roll(1, 0)))
    assert len({hash_of([each]) for each in sums}) == 3


def test_equal_shares_of_a_power_of_two_leave_one_node():
    assert {len(nodes_of(leaves_of(rank, 8, 32), 32)) for rank in range(8)} == {1}
    assert nodes_of(range(2, 5), 8) == [Node(1, 1), Node(0, 4)]


class Layers(nn.Module):
    """A model with three layers, one of which does not affect the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.idle = nn.Linear(3, 2)
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def gradients(num_leaves: int, bucket_bytes: int, world: World, steps: int = 2) -> list[Tensor]:
    model = Layers()
    adding = TreeSum(list(model.parameters()), num_leaves, world, bucket_bytes)
    for step in range(steps):
        for leaf in adding.leaves:
            with adding.leaf():
                (model(rows(step, leaf)).sin() * 2.0**leaf).sum().backward()
        adding.finish()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def rows(step: int, leaf: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + leaf))


def hash_of(tensors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:12]


CASES = [(leaves, size) for leaves in (3, 4, 5, 8, 13) for size in (1, 100, 1 << 20)]
"""Pairs of a number of leaves and a bucket size in bytes. The bucket sizes lead to one bucket per
parameter, two buckets, and one bucket."""


def test_one_rank_equals_the_sum_of_the_gradients_of_each_micro_batch():
    for num_leaves in (1, 2, 5, 8):
        model = Layers()
        by_leaf = []
        for leaf in range(num_leaves):
            model.zero_grad()
            (model(rows(1, leaf)).sin() * 2.0**leaf).sum().backward()
            by_leaf.append(
                [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            )
        expected = [by_recursion(list(each)) for each in zip(*by_leaf, strict=True)]
        tree_gradients = gradients(num_leaves, 100, World(0, 1, torch.device("cpu")))
        assert hash_of(tree_gradients) == hash_of(expected)


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_each_gradient_is_aligned_on_any_number_of_ranks(ranks):
    """If gradients are not aligned, kernels that read several values at a time add them in a
    different order."""
    model = Layers()
    adding = TreeSum(list(model.parameters()), 21, World(0, ranks, torch.device("cpu")), 1)
    with adding.leaf():
        assert all(p.grad is not None and not p.grad.data_ptr() % 64 for p in model.parameters())


@pytest.mark.parametrize("num_leaves", [1, 2, 3, 7, 8, 13])
def test_uses_as_much_memory_as_it_counts(num_leaves):
    model = Layers()
    adding = TreeSum(list(model.parameters()), num_leaves, World(0, 1, torch.device("cpu")))
    for leaf in adding.leaves:
        with adding.leaf():
            model(rows(0, leaf)).sum().backward()
    held = [*adding._held, *adding._spare]
    assert held_bytes(held[0].numel(), num_leaves, 1) == sum(each.nbytes for each in held)


def test_the_count_includes_data_from_other_ranks():
    """With two leaves on one rank, a single tree node remains. At the peak, the rank stores the
    current leaf, the previous leaf, and two halves of the sum. If three ranks share eight leaves,
    at most three tree nodes are stored at the peak."""
    assert held_bytes(300, 4, 2) == 4 * (2 * 300 + 2 * 150)
    assert held_bytes(300, 8, 3) == 4 * (3 * 300 + 5 * 100)


def peak_over_count(num_leaves: int, world: World) -> float:
    """Return the measured peak memory of live tensors (maximum over ranks), divided by the
    predicted memory.

    Each gradient repeats a single number, so computing it needs no additional memory.
    """
    parameters = [nn.Parameter(torch.zeros(96 * 100)) for _ in range(6)]
    with LiveBytes() as live:
        adding = TreeSum(parameters, num_leaves, world, bucket_bytes=4 * 96 * 200)
        for _ in range(2):
            for _ in adding.leaves:
                with adding.leaf():
                    torch.stack([p.sum() for p in parameters]).sum().backward()
            adding.finish()
            # Gloo's threads retain sent and received data for a moment after `wait` has returned.
            deadline = time.monotonic() + 60
            while live.now > sum(each.nbytes for each in adding._spare):
                assert time.monotonic() < deadline, "the memory of a finished exchange is not freed"
                time.sleep(0.001)
    most = world.max_(torch.tensor(float(live.peak)))
    return float(most) / held_bytes(6 * 96 * 100, num_leaves, world.size)


SCRIPT = f"""
import sys
# The repository first: tests/ has folders of the same names.
sys.path += [{str(REPOSITORY)!r}, {str(REPOSITORY / "tests")!r}]
sys.path += [{str(REPOSITORY / "tests" / "helpers")!r}, {str(Path(__file__).parent)!r}]
from test_tree_sum import CASES, gradients, hash_of, peak_over_count
from vit.distributed.process_group import join_world
from vit.distributed.exit import leave_world
world = join_world("cpu")
found = [hash_of(gradients(*case, world)) for case in CASES]
sys.stdout.write(f"{{world.rank}} {{' '.join(found)}}\\n")  # at once: lines of ranks may mix
peaks = [f"{{peak_over_count(leaves, world):.2f}}" for leaves in (6, 8)]
sys.stdout.write(f"{{world.rank}} peaks {{' '.join(peaks)}}\\n")
leave_world(world)
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_have_the_bits_of_one_process_and_the_counted_memory(tmp_path, ranks):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(tmp_path / "script.py", ranks=ranks)
    assert done.returncode == 0, done.stderr
    one = World(0, 1, torch.device("cpu"))
    expected = " ".join(hash_of(gradients(*case, one)) for case in CASES)
    printed = [f"{rank} {line}" for rank in range(ranks) for line in (expected, "peaks 1.00 1.00")]
    assert sorted(done.stdout.splitlines()) == sorted(printed)


# ---- one step against a plain loop ---------------------------------------------------------------


def test_a_step_equals_a_plain_loop_over_micro_batches():
    torch.manual_seed(0)
    model = create_model("vit_ti8", 16, 5, embed_dim=32, depth=2, num_heads=2)
    torch.nn.init.normal_(model.head.weight)
    plain = copy.deepcopy(model)
    world = World(0, 1, torch.device("cpu"))

    augment = Augment(CONFIG, 5, (0.5,) * 3, (0.25,) * 3, world.device)
    optimizers = [torch.optim.AdamW(each.parameters(), fused=True) for each in (model, plain)]

    leaves = Leaves(model, 3, 2, world, 0)
    step = plain_step(
        model,
        model,
        optimizers[0],
        augment,
        world,
        lr_at=lambda step: 1e-3,
        micro_batch_size=2,
        leaves=leaves,
    )

    batch = make_batch(6)
    result = step(augment.change_batch(batch), 0).read()

    by_leaf, loss_sums = [], []
    for first in (0, 2, 4):
        plain.zero_grad()
        part = augment.change_batch(make_batch(6)).rows(first, first + 2)
        inputs, targets = augment.finish(part.images, part.labels, part.table)
        loss = F.cross_entropy(plain(inputs), targets, reduction="none").sum()
        (loss * (1 / 6)).backward()
        loss_sums.append(loss.detach())
        by_leaf.append([p.grad.clone() for p in plain.parameters()])

    for parameter, each in zip(plain.parameters(), zip(*by_leaf, strict=True), strict=True):
        parameter.grad = by_recursion(list(each))
    optimizers[1].param_groups[0]["lr"] = 1e-3
    optimizers[1].step()

    different = [
        name
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True)
        if not torch.equal(ours, theirs)
    ]
    assert not different
    assert result.loss == pytest.approx(float(by_recursion(loss_sums)) / 6, rel=1e-7)
