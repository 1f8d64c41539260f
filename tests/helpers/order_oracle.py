"""Compute the expected sample order one sample at a time.

The computation uses only Python integers and lists, and neither numpy nor the code under test. Only
`orders`, which generates random test cases, creates real `Order` objects.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from hypothesis import strategies as st

from vit.data.order import Order, make_order

RepeatForm = Literal["batch", "sampler"]

SEEDS = st.integers(0, 2**63 - 1)


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def key_of(*parts: int) -> int:
    key = 0
    for part in parts:
        key = mix(key ^ mix(part))
    return key


def feistel(n: int, key: int, value: int) -> int:
    half = (max(2, (n - 1).bit_length()) + 1) // 2
    while True:
        left, right = divmod(value, 2**half)
        for number in range(6):
            left, right = right, left ^ mix(right ^ key_of(key, number)) % 2**half
        value = left * 2**half + right
        if value < n:
            return value


def brute_force(order: Order, shuffle: int) -> list[list[tuple[int, int]]]:
    """Return all batches of one shuffle. Each batch is a list of (sample, copy).

    A shuffle covers one epoch. If `aug_repeats_form` is "batch", a shuffle covers one epoch per
    copy.
    """
    n = order.num_samples
    block = order.block_samples
    seed = order.seed
    repeats = order.aug_repeats
    last = (n - 1) // block
    blocks = [feistel(last, key_of(seed, shuffle, 1), i) for i in range(last)]
    blocks.insert(key_of(seed, shuffle, 2) % (last + 1), last)
    sequence = [sample for b in blocks for sample in range(b * block, min((b + 1) * block, n))]

    share = order.global_batch_size // order.num_lanes
    steps = n // order.global_batch_size * (repeats if order.aug_repeats_form == "batch" else 1)
    length = (steps * share + repeats - 1) // repeats
    window = order.window_blocks * block
    lanes = []
    for lane in range(order.num_lanes):
        places = sequence[lane * length : (lane + 1) * length]
        if block > 1:
            first_border = window - (lane * window // order.num_lanes if length > window else 0)
            borders = [0, *range(first_border, length, window), length]
            windows = [places[low:high] for low, high in pairwise(borders)]
            places = []
            for number, members in enumerate(windows):
                by_hash = sorted(
                    range(len(members)), key=lambda i: key_of(seed, shuffle, 3, lane, number, i)
                )
                places += [members[i] for i in by_hash]
        rows = [(sample, copy) for sample in places for copy in range(repeats)]
        lanes.append(
            [
                sorted(rows[step * share : (step + 1) * share], key=lambda row: row[1])
                for step in range(steps)
            ]
        )
    return [[row for lane in lanes for row in lane[step]] for step in range(steps)]


@st.composite
def orders(
    draw: st.DrawFn,
    lanes: tuple[int, ...] = (1, 2, 3, 4, 5, 6),
    repeats: tuple[int, ...] = (1, 2, 3, 4),
    forms: tuple[RepeatForm, ...] = ("batch", "sampler"),
) -> Order:
    num_lanes = draw(st.sampled_from(lanes))
    aug_repeats = draw(st.sampled_from(repeats))
    form: RepeatForm = draw(st.sampled_from(forms)) if aug_repeats > 1 else "batch"
    batch = num_lanes * draw(st.integers(1, 6)) * (aug_repeats if form == "batch" else 1)
    num_samples = draw(st.integers(batch, batch + 300))
    block = draw(st.integers(1, 20))
    window = draw(st.integers(1, 5))
    return make_order(num_samples, batch, draw(SEEDS), num_lanes, block, window, aug_repeats, form)


def anew(order: Order) -> Order:
    """Create a copy of `order` in the way another process would create the order."""
    o = order
    sizes = (
        o.num_samples,
        o.global_batch_size,
        o.seed,
        o.num_lanes,
        o.block_samples,
        o.window_blocks,
    )
    return make_order(*sizes, o.aug_repeats, o.aug_repeats_form)


def pairs(
    order: Order, position: int, start: int = 0, stop: int | None = None
) -> list[tuple[int, int]]:
    """Return (sample, copy) for the rows `start` to `stop` (exclusive) of the batch at
    `position`."""
    ids, copies = order.rows_and_copies(
        position, start, order.global_batch_size if stop is None else stop
    )
    return list(zip(ids.tolist(), copies.tolist(), strict=True))
