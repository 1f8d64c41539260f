"""Which sample stands where in which batch: pure arithmetic on (seed, epoch, position).

The data's story: blocks of consecutive samples lie over the numbering of all samples. In each epoch
a Feistel permutation keyed by (seed, epoch) shuffles the blocks. The shuffled sequence is cut into
`num_lanes` lanes of equal length; inside a lane, samples are permuted in tumbling windows, whose
borders are staggered from lane to lane so that disk reads do not come in bursts. A batch takes an
equal share from each lane, rows grouped by lane; rank r has rows [r G/R, (r+1) G/R). So the content
of a batch depends neither on ranks nor on workers, any batch of any epoch is found without looking
at another, and memory does not grow with the number of samples.

An epoch is N // G full batches of distinct samples; the tail that does not fill a batch differs
from epoch to epoch.

Repeated augmentation (Hoffer et al. 2020) shows each image `aug_repeats` = r times, in copies that
are augmented differently. Each row of a lane is then row // r of the shuffled samples, copy row %
r, and an epoch keeps its N // G steps. In the form `sampler` (facebookresearch/deit:samplers.py)
each epoch is shuffled anew and shows the first r-th; copies may stand in two consecutive batches.
In the form `batch` (affjljoo3581/deit3-jax:src/dataset.py) a batch holds G / r images with all
their copies and one shuffle lasts r epochs, after which every image but the tail was shown exactly
r times. A lane's rows of a batch are sorted by copy: copies of an image are apart, so that they do
not mix with each other, and yet on one rank where the ranks divide the lanes, so that one reading
can serve them all.

Chosen samples, and several sources. With `shares` the numbers that are ordered are not samples but
draws: those of the first source, then those of the second. A source with as many draws as samples
gives each of them once in an epoch. Else draw j of shuffle e is number d = e * num_draws + j of an
endless sequence: pass d // n over the source's n samples, each pass permuted anew in whole blocks,
whose borders stay those of the draws' own blocks, so that what lies together is read together.
After any number of draws a sample has come as often as any other, give or take one; the draws of an
epoch that fill no batch count as come, and are not shown. A batch is found as before, without
looking at another.

The hash is our own because generators of libraries promise no stable streams;
`tests/data/golden_order.json` holds its output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

U64 = np.uint64
PERMUTATION_BELOW = 262_144
"""Below so many samples the default order is a true permutation: blocks of one sample, no
windows."""
DEFAULT_BLOCK_SAMPLES = 64
MAX_DEFAULT_LANES = 64
MIN_DEFAULT_LANE_IMAGES = 4
"""With repeats a lane gives a batch so many images by default: copies stand so many rows apart, and
few sets of them are cut by its end."""


def hash64(values: ArrayLike) -> NDArray[np.uint64]:
    """Mix 64-bit integers (any shape) into uniformly distributed ones: the output function of
    SplitMix64 (Steele, Lea & Flood 2014)."""
    with np.errstate(over="ignore"):
        x = np.asarray(values, dtype=U64) + U64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
        return x ^ (x >> U64(31))


def fold(*parts: ArrayLike) -> NDArray[np.uint64]:
    """One key from several integers or arrays of integers (broadcast together). The order of the
    parts matters."""
    key: NDArray[np.uint64] = np.zeros((), dtype=U64)
    for part in parts:
        key = hash64(key ^ hash64(np.asarray(part).astype(U64)))
    return key


def uniform(key: ArrayLike, *index: ArrayLike) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, one for each (key, *index), broadcast
    together."""
    return (fold(key, *index) >> U64(11)).astype(np.float64) * 2.0**-53


class Permutation:
    """A keyed permutation of range(n) in O(1) memory: a six-round Feistel network, walked until the
    value is below n."""

    def __init__(self, n: int, key: ArrayLike, rounds: int = 6):
        bits = max(2, (n - 1).bit_length())
        self.n = n
        self.half = U64((bits + 1) // 2)
        self.mask = U64((1 << ((bits + 1) // 2)) - 1)
        self.keys = fold(key, np.arange(rounds))

    def __call__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Map positions in [0, n), any shape, to values in [0, n); each value comes once."""
        out = np.array(positions, dtype=U64)
        todo = np.ones(out.shape, dtype=bool)
        # the network permutes a power of four below 4 n, so four rounds of this are expected at the
        # most
        while todo.any():
            left, right = out[todo] >> self.half, out[todo] & self.mask
            for key in self.keys:
                left, right = right, left ^ (hash64(right ^ key) & self.mask)
            out[todo] = (left << self.half) | right
            todo[todo] = out[todo] >= U64(self.n)
        return out.astype(np.int64)


class _EpochBlocks:
    """The block-permuted epoch: position -> sample. The last block may be short; it gets a drawn
    slot of its own."""

    def __init__(self, num_samples: int, block: int, seed: int, epoch: int):
        self.block = block
        self.num_blocks = -(-num_samples // block)
        self.short_length = num_samples - (self.num_blocks - 1) * block
        self.short_slot = int(fold(seed, epoch, 2) % U64(self.num_blocks))
        self.permutation = Permutation(max(self.num_blocks - 1, 1), fold(seed, epoch, 1))

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        start = self.short_slot * self.block
        after = positions >= start + self.short_length
        # as if the short block were full
        spread = np.where(after, positions + self.block - self.short_length, positions)
        slot = spread // self.block
        inside = spread % self.block
        if self.num_blocks == 1:
            return inside
        full = np.clip(np.where(slot > self.short_slot, slot - 1, slot), 0, self.num_blocks - 2)
        return (
            np.where(slot == self.short_slot, self.num_blocks - 1, self.permutation(full))
            * self.block
            + inside
        )


@dataclass(frozen=True)
class Share:
    """What one source gives to each shuffle: draws from samples that stand at the numbers `first`
    and following of all sources' samples."""

    num_draws: int
    num_samples: int
    """Chosen ones."""
    first: int = 0
    chosen: NDArray[np.integer] | None = field(default=None, repr=False, compare=False)
    """(num_samples,) their numbers in the source, ascending; None: all of the source."""

    def __call__(
        self, draws: NDArray[np.int64], shuffle: int, block: int, key: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of draws in [0, num_draws) of one shuffle the samples, and how often each has come in
        this shuffle before: (n,), (n,)."""
        if self.num_draws == self.num_samples:
            places = draws
            times = np.zeros_like(draws)
        else:
            passes, inside = np.divmod(draws + shuffle * self.num_draws, self.num_samples)
            places = np.empty_like(draws)
            times = passes - shuffle * self.num_draws // self.num_samples
            for number in np.unique(passes).tolist():
                of_pass = passes == number
                places[of_pass] = self._place(inside[of_pass], number, block, key)
        return (
            self.first + (places if self.chosen is None else self.chosen[places].astype(np.int64)),
            times,
        )

    def _place(
        self, inside: NDArray[np.int64], number: int, block: int, key: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        """Pass `number` over range(num_samples), at positions `inside`: whole blocks between the
        next borders of the endless sequence's blocks; before the first border and behind the last
        stand the short block and, where more is needed, one whole block.
        """
        num_whole, short = divmod(self.num_samples, block)
        lead = min(-number * self.num_samples % block, self.num_samples)
        between = (self.num_samples - lead) // block
        permutation = Permutation(max(num_whole, 1), fold(key, number))
        slot, offset = np.divmod(inside - lead, block)
        rest = np.where(inside < lead, inside, inside - between * block)
        is_whole = (inside >= lead) & (slot < between)
        whole = permutation(np.where(is_whole, slot, 0)) * block + offset
        torn = permutation(num_whole - 1) * block + rest - short if num_whole else rest
        return np.where(is_whole, whole, np.where(rest < short, num_whole * block + rest, torn))


@dataclass(frozen=True)
class Order:
    """The order of `num_samples` samples in batches of `global_batch_size`, for all epochs.
    `make_order` fills in defaults and checks.

    `window_blocks` counts blocks per shuffling window and has no effect where blocks hold one
    sample. `aug_repeats` (r) copies of each image are dealt in the form `batch` or `sampler`.
    """

    num_samples: int
    global_batch_size: int
    seed: int
    num_lanes: int
    block_samples: int
    window_blocks: int
    aug_repeats: int = 1
    aug_repeats_form: Literal["batch", "sampler"] = "batch"
    shares: tuple[Share, ...] = ()
    """Where draws are not samples: what each source gives, `num_samples` draws in all."""
    _windows: OrderedDict[tuple[int, int, int], NDArray[np.int64]] = field(
        default_factory=OrderedDict, repr=False, compare=False
    )

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in an epoch."""
        return self.num_samples // self.global_batch_size

    @property
    def dropped_per_epoch(self) -> int:
        """N % G: by how many rows an epoch is shorter than N. Without repeats the samples that it
        leaves out, others each time."""
        return self.num_samples % self.global_batch_size

    @property
    def steps_per_shuffle(self) -> int:
        """Batches from one shuffle to the next: an epoch, or r epochs where one shuffle serves all
        of them."""
        return self.steps_per_epoch * (self.aug_repeats if self.aug_repeats_form == "batch" else 1)

    @property
    def distinct_per_epoch(self) -> int:
        """Distinct samples in an epoch: all rows without repeats, else an r-th of the rows of each
        lane, rounded up; at most so many where sources are drawn more often than they have
        samples."""
        drawn = self.num_lanes * -(-self.steps_per_epoch * self._lane_share // self.aug_repeats)
        return (
            min(drawn, sum(min(share.num_draws, share.num_samples) for share in self.shares))
            if self.shares
            else drawn
        )

    @property
    def _lane_share(self) -> int:
        """Rows of a batch that come from one lane."""
        return self.global_batch_size // self.num_lanes

    def batch(self, position: int) -> NDArray[np.int64]:
        """Sample ids (G,) of the batch at `position`, counted from the first batch of epoch 0."""
        return self.rows(position, 0, self.global_batch_size)

    def rows(self, position: int, start: int, stop: int) -> NDArray[np.int64]:
        """Sample ids of rows [start, stop) of the batch at `position`. Only the lanes that overlap
        the rows are computed."""
        return self.rows_and_copies(position, start, stop)[0]

    def rows_and_copies(
        self, position: int, start: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sample ids and copy numbers (0 to `aug_repeats` - 1; more where a sample is drawn again
        in one epoch) of rows [start, stop) of the batch at `position`.

        No (sample, copy) comes twice in an epoch: with the epoch they name an augmentation.
        """
        shuffle, step = divmod(position, self.steps_per_shuffle)
        share = self._lane_share
        first, last = start // share, -(-stop // share)
        in_lane = np.arange(step * share, (step + 1) * share)
        in_lane = in_lane[np.argsort(in_lane % self.aug_repeats, kind="stable")]
        images = in_lane // self.aug_repeats
        copies = in_lane % self.aug_repeats
        low, high = int(images.min()), int(images.max()) + 1
        places = np.stack([self._lane(shuffle, lane, low, high) for lane in range(first, last)])
        samples = _epoch_blocks(self.num_samples, self.block_samples, self.seed, shuffle)(places)
        asked = slice(start - first * share, stop - first * share)
        drawn = samples[:, images - low].ravel()[asked]
        copies = np.tile(copies, last - first)[asked]
        return self._drawn(drawn, copies, shuffle) if self.shares else (drawn, copies)

    def _drawn(
        self, draws: NDArray[np.int64], copies: NDArray[np.int64], shuffle: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The samples of draws, and numbers of copies that are others where a sample comes
        again."""
        samples = np.empty_like(draws)
        copies = copies.copy()
        start = 0
        for number, share in enumerate(self.shares):
            own = (draws >= start) & (draws < start + share.num_draws)
            if own.any():
                samples[own], times = share(
                    draws[own] - start, shuffle, self.block_samples, fold(self.seed, 4, number)
                )
                copies[own] += self.aug_repeats * times
            start += share.num_draws
        return samples, copies

    def blocks_at_a_time(self, num_rows: int, batches_ahead: int) -> int:
        """How many blocks a cache that forgets what was used longest ago must hold, so that next to
        none is fetched twice: for `num_rows` rows of each batch, asked for `batches_ahead`
        before."""
        if self.block_samples == 1:
            return self.num_samples  # no block comes a second time soon
        lanes = min(-(-num_rows // self._lane_share), self.num_lanes)
        ahead = -(-batches_ahead * self._lane_share // (self.aug_repeats * self.block_samples))
        # A quarter more than the windows: of finished ones, whose blocks are not forgotten yet; and
        # 1 of the next, which is begun.
        return lanes * (-(-self.window_blocks * 5 // 4) + 1 + ahead)

    def _lane(self, shuffle: int, lane: int, start: int, stop: int) -> NDArray[np.int64]:
        """Positions among the shuffled blocks of the images [start, stop) of a lane, windows
        permuted."""
        length = -(-self.steps_per_shuffle * self._lane_share // self.aug_repeats)
        if self.block_samples == 1:
            return lane * length + np.arange(start, stop)
        window = self.window_blocks * self.block_samples
        phase = lane * window // self.num_lanes if length > window else 0
        out = np.empty(stop - start, dtype=np.int64)
        place = start
        while place < stop:
            number = (place + phase) // window
            low, high = max(number * window - phase, 0), min((number + 1) * window - phase, length)
            until = min(high, stop)
            shuffled = self._window(shuffle, lane, number, high - low)
            out[place - start : until - start] = (
                lane * length + low + shuffled[place - low : until - low]
            )
            place = until
        return out

    def _window(self, shuffle: int, lane: int, number: int, length: int) -> NDArray[np.int64]:
        """The permutation inside one window: consecutive batches share it, so the last ones of each
        lane are kept."""
        key = (shuffle, lane, number)
        if key not in self._windows:
            self._windows[key] = np.argsort(
                fold(self.seed, shuffle, 3, lane, number, np.arange(length)), kind="stable"
            )
            if len(self._windows) > 2 * self.num_lanes:
                self._windows.popitem(last=False)
        return self._windows[key]


def make_order(
    num_samples: int,
    global_batch_size: int,
    seed: int = 0,
    num_lanes: int | None = None,
    block_samples: int | None = None,
    window_blocks: int = 16,
    aug_repeats: int = 1,
    aug_repeats_form: Literal["batch", "sampler"] = "batch",
    shares: tuple[Share, ...] = (),
) -> Order:
    """An `Order`, with `None` replaced by the defaults: as many lanes as the largest divisor of the
    batch up to 64 (fewer with repeats, see MIN_DEFAULT_LANE_IMAGES); blocks of one sample below
    262,144 samples, else of 64.

    Raises ValueError for sizes that cannot work, with those that do.
    """
    n = num_samples
    g = global_batch_size
    r = aug_repeats
    if g > n:
        raise ValueError(
            f"data.global_batch_size={g} exceeds the {n} training samples: choose at most {n}"
        )
    if aug_repeats_form == "batch" and g % r:
        near = " or ".join(str(size) for size in (g // r * r, (g // r + 1) * r) if size)
        other = f"data.aug_repeats out of {divisors(g)}, or data.aug_repeats_form=sampler"
        raise ValueError(
            f"data.aug_repeats={r} does not divide data.global_batch_size={g}: use {near} images a"
            f" batch, {other}"
        )
    lanes = possible_lanes(g, r, aug_repeats_form)
    if num_lanes is None:
        most = (
            MAX_DEFAULT_LANES
            if r == 1
            else min(g // r // MIN_DEFAULT_LANE_IMAGES, MAX_DEFAULT_LANES)
        )
        num_lanes = max(d for d in lanes if d <= max(most, 1))
    elif num_lanes not in lanes:
        images = (
            f"the {lanes[-1]} distinct images of a batch (data.global_batch_size={g} /"
            f" data.aug_repeats={r})"
        )
        divided = f"data.global_batch_size={g}" if lanes[-1] == g else images
        raise ValueError(
            f"data.num_lanes={num_lanes} does not divide {divided}: choose one of {lanes}"
        )
    if block_samples is None:
        block_samples = default_block_samples(n)
    return Order(
        n, g, seed, num_lanes, block_samples, window_blocks, aug_repeats, aug_repeats_form, shares
    )


def default_block_samples(num_samples: int) -> int:
    """Samples of a block where nothing else is asked for."""
    return 1 if num_samples < PERMUTATION_BELOW else DEFAULT_BLOCK_SAMPLES


def shares_of(
    sizes: Sequence[int], weights: Sequence[float | None], block_samples: int | None = None
) -> list[int]:
    """How many draws each of several sources gives to an epoch, from how many samples each has.

    Without weights as many as samples. With them an epoch has as many draws as there are samples,
    up to rounding: shares are whole blocks, so that no block holds two sources. Raises ValueError
    where a weight gives less than one block.
    """
    if all(weight is None for weight in weights):
        return list(sizes)
    known = [weight for weight in weights if weight is not None]
    total = sum(sizes)
    block = block_samples or default_block_samples(total)
    draws = [round(weight / sum(known) * total / block) * block for weight in known]
    if not all(draws):
        least = block * sum(known) / total
        raise ValueError(
            f"data.sources: weight {min(known):g} of {sum(known):.6g} is less than {block} of"
            f" {total:,} draws: give {least:.2g} or more"
        )
    return draws


def possible_lanes(
    global_batch_size: int, aug_repeats: int, aug_repeats_form: Literal["batch", "sampler"]
) -> list[int]:
    """Numbers of lanes that work, ascending: divisors of the batch, or of its distinct images where
    a batch has whole sets of copies."""
    return divisors(global_batch_size // (aug_repeats if aug_repeats_form == "batch" else 1))


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


@lru_cache(maxsize=4)
def _epoch_blocks(num_samples: int, block: int, seed: int, epoch: int) -> _EpochBlocks:
    return _EpochBlocks(num_samples, block, seed, epoch)


def sample_checksum(ids: NDArray[np.int64]) -> int:
    """Sum of the hashed `ids` modulo 2**64: equal for equal multisets in any order and any
    partition, which ranks add up."""
    with np.errstate(over="ignore"):
        return int(hash64(ids).sum(dtype=U64))
