"""Which sample is in which row of which batch: pure arithmetic on (seed, epoch, position).

The numbering of all samples is divided into blocks of consecutive samples. In each epoch a Feistel
permutation keyed by (seed, epoch) shuffles the blocks. The shuffled sequence is cut into
`num_lanes` lanes of equal length; inside a lane, samples are permuted in tumbling windows, whose
borders are staggered from lane to lane so that disk reads do not come in bursts. A batch takes an
equal share from each lane, rows grouped by lane; of R ranks, rank r has rows [r G/R, (r+1) G/R). So
the content of a batch depends neither on ranks nor on workers, any batch of any epoch is found
without looking at another, and memory is bounded for any number of samples.

An epoch is N // G full batches of distinct samples; the tail that does not fill a batch differs
from epoch to epoch.

Repeated augmentation (Hoffer et al. 2020) shows each image `aug_repeats` times, in copies that are
augmented differently. With 8 images a to h, 2 copies, one lane and batches of 4:

    shuffled          d a f c e b h g
    form `batch`      d0 a0 d1 a1 | f0 c0 f1 c1 | e0 b0 e1 b1 | h0 g0 h1 g1 |    then shuffled again
    form `sampler`    d0 a0 d1 a1 | f0 c0 f1 c1 |    then shuffled again

An epoch keeps its N // G = 2 steps, so `batch` (affjljoo3581/deit3-jax:src/dataset.py) shows all
images but the tail exactly twice in two epochs, and `sampler` (facebookresearch/deit:samplers.py)
half of them in each. A lane's rows are sorted by copy: neighbours may mix, and copies must not.

Chosen samples, and several sources: with `shares`, what is ordered is not samples but draws, those
of the first source, then those of the second. A source with as many draws as samples gives each
once in an epoch. Any other goes through its samples in one pass after another, each permuted
differently, and an epoch takes the next `num_draws`. With 5 samples and 3 draws:

    epoch        0       1       2       3       4
    samples    3 2 0   4 1|1   3 4 0   2|2 4   1 3 0     | begins a new pass

Draw j of epoch e is number d = 3 e + j of this sequence: place d % 5 of pass d // 5, found without
the draws before it; so all samples are drawn equally often, give or take one. A pass permutes
blocks of samples that are stored together, and these begin where blocks of draws begin. Draws at
the end of an epoch that fill no batch are used up, but not shown. With repeats in the form `batch`,
a shuffle takes the place of an epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vit.config.base import DEFAULT_BLOCK_SAMPLES, PERMUTATION_BELOW
from vit.system.hashing import U64, Permutation, fold, hash64

TABLE_BELOW = 262_144
"""Blocks of an epoch up to which their permutation is kept: at most 2 MiB, and 0.03 s at its first
batch. For one batch it takes 1,600 calls of numpy, as the network is repeated until the last of the
positions is in range."""
MAX_DEFAULT_LANES = 64
MIN_DEFAULT_LANE_IMAGES = 4
"""Images that a lane gives to a batch by default, with repeats: copies are that many rows apart,
and few sets of copies are cut by the end of a lane."""


class _EpochBlocks:
    """An epoch with its blocks permuted: position -> sample.

    The last block may be short. It cannot take part in the permutation, or positions after it
    would depend on where it went; instead it is inserted at a random slot.
    """

    def __init__(self, num_samples: int, block: int, seed: int, epoch: int):
        self.block = block
        self.num_blocks = -(-num_samples // block)
        self.short_length = num_samples - (self.num_blocks - 1) * block
        # The last parts, 1 to 4 in this file, keep draws of one epoch apart. They are for ever:
        # with other numbers every run that was begun before would resume with other batches.
        self.short_slot = int(fold(seed, epoch, 2) % U64(self.num_blocks))
        self.permutation = Permutation(max(self.num_blocks - 1, 1), fold(seed, epoch, 1))
        self._table: NDArray[np.int64] | None = None

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        start = self.short_slot * self.block
        after = positions >= start + self.short_length
        # Positions as if the short block were full.
        spread = np.where(after, positions + self.block - self.short_length, positions)
        slot = spread // self.block
        inside = spread % self.block
        if self.num_blocks == 1:
            return inside
        # Positions in the short block are in no full one: clipped to any here, and replaced below.
        full = np.clip(np.where(slot > self.short_slot, slot - 1, slot), 0, self.num_blocks - 2)
        number = np.where(slot == self.short_slot, self.num_blocks - 1, self._permuted(full))
        return number * self.block + inside

    def _permuted(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Permute `slots`, by a table of the whole epoch if it is small."""
        if self.permutation.n > TABLE_BELOW:
            return self.permutation(slots)
        if self._table is None:
            self._table = self.permutation(np.arange(self.permutation.n))
        return self._table[slots]


@dataclass(frozen=True)
class Share:
    """What one source gives to each shuffle.

    Its samples have the numbers `first` and following among the samples of all sources.
    """

    num_draws: int
    num_samples: int
    """Samples that were chosen."""
    first: int = 0
    chosen: NDArray[np.integer] | None = field(default=None, repr=False, compare=False)
    """(num_samples,) their numbers in the source, ascending; None: all of the source."""

    def __call__(
        self, draws: NDArray[np.int64], shuffle: int, block: int, key: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Map draws (n,) in [0, num_draws) of one shuffle to samples (n,).

        Also returns how often each has come before in this shuffle, (n,).
        """
        if self.num_draws == self.num_samples:
            # The order has permuted them already: all of one source come as without shares.
            places = draws
            times = np.zeros_like(draws)
        else:
            passes, inside = np.divmod(draws + shuffle * self.num_draws, self.num_samples)
            places = np.empty_like(draws)
            # Counted from the first pass of this shuffle, which may have begun before it.
            times = passes - shuffle * self.num_draws // self.num_samples
            # One pass or two for most sources; a small one that is drawn often has more.
            for number in np.unique(passes).tolist():
                is_here = passes == number
                places[is_here] = self._place(inside[is_here], number, block, key)
        if self.chosen is not None:
            # Held in as few bytes as they need, which the sum below would wrap in.
            places = self.chosen[places].astype(np.int64)
        return self.first + places, times

    def _place(
        self, inside: NDArray[np.int64], number: int, block: int, key: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        """Map positions `inside` of pass `number` to range(num_samples), permuted in full blocks.

        Blocks begin at the borders of the blocks of all passes in a row. What is before the first
        border and after the last is filled by the short block and, if that is not enough, by one
        full block that is cut in two.
        """
        num_full, short = divmod(self.num_samples, block)
        # Passes follow each other without gaps, so the first border is rarely at a pass's begin. A
        # cache or a disk that has a block for the draws before it then reads it once, not twice.
        lead = min(-number * self.num_samples % block, self.num_samples)
        between = (self.num_samples - lead) // block
        permutation = Permutation(max(num_full, 1), fold(key, number))
        slot, offset = np.divmod(inside - lead, block)
        rest = np.where(inside < lead, inside, inside - between * block)
        is_full = (inside >= lead) & (slot < between)
        full = permutation(np.where(is_full, slot, 0)) * block + offset
        torn = rest
        # The last block of the permutation is cut in two, so that the others stay whole.
        if num_full:
            torn = permutation(num_full - 1) * block + rest - short
        return np.where(is_full, full, np.where(rest < short, num_full * block + rest, torn))


@dataclass(frozen=True)
class Order:
    """The order of `num_samples` samples in batches of `global_batch_size`, for all epochs.

    `make_order` fills in defaults and checks. `window_blocks` counts blocks per shuffling window;
    it has no effect with blocks of one sample. `aug_repeats` (r) copies of each image are dealt in
    the form `batch` or `sampler`.
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
    """If draws are not samples: what each source gives, `num_samples` draws in all."""

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in an epoch."""
        return self.num_samples // self.global_batch_size

    @property
    def dropped_per_epoch(self) -> int:
        """N % G: rows that an epoch lacks. Without repeats, the samples that it leaves out."""
        return self.num_samples % self.global_batch_size

    @property
    def steps_per_shuffle(self) -> int:
        """Batches from one shuffle to the next: an epoch, or r epochs in the form `batch`."""
        return self.steps_per_epoch * (self.aug_repeats if self.aug_repeats_form == "batch" else 1)

    @property
    def distinct_per_epoch(self) -> int:
        """Distinct samples in an epoch: with r repeats 1/r of the rows of each lane, rounded up.

        An upper bound if sources are drawn more often than they have samples.
        """
        drawn = self.num_lanes * -(-self.steps_per_epoch * self._lane_share // self.aug_repeats)
        # A source that is drawn more often than it has samples repeats them within an epoch.
        if not self.shares:
            return drawn
        return min(drawn, sum(min(share.num_draws, share.num_samples) for share in self.shares))

    @property
    def _lane_share(self) -> int:
        """Rows of a batch that come from one lane."""
        return self.global_batch_size // self.num_lanes

    def batch(self, position: int) -> NDArray[np.int64]:
        """Return sample ids (G,) of the batch at `position`, counted from batch 0 of epoch 0."""
        return self.rows(position, 0, self.global_batch_size)

    def rows(self, position: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return sample ids of rows [start, stop) of the batch at `position`."""
        return self.rows_and_copies(position, start, stop)[0]

    def rows_and_copies(
        self, position: int, start: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return sample ids and copy numbers of rows [start, stop) of the batch at `position`.

        Copies are 0 to `aug_repeats` - 1; more if a sample is drawn again in one epoch. No
        (sample, copy) comes twice in an epoch: with the epoch they name an augmentation.
        """
        shuffle, step = divmod(position, self.steps_per_shuffle)
        share = self._lane_share
        # Only the lanes that overlap the rows are computed: a rank pays for its own share.
        first_lane = start // share
        lanes = range(first_lane, -(-stop // share))
        in_lane = np.arange(step * share, (step + 1) * share)
        # Sorted by copy, so that copies of an image are not neighbours, which would mix. Stable:
        # numpy's default order of equal keys differs between versions and processors.
        in_lane = in_lane[np.argsort(in_lane % self.aug_repeats, kind="stable")]
        images = in_lane // self.aug_repeats
        copies = in_lane % self.aug_repeats
        # The copies of a batch may begin in the middle of an image's, in the form `sampler`.
        low, high = int(images.min()), int(images.max()) + 1
        # One call for all lanes: a hundred calls of numpy cost more than the few positions in them.
        places = np.stack([self._lane(shuffle, lane, low, high) for lane in lanes])
        samples = _epoch_blocks(self.num_samples, self.block_samples, self.seed, shuffle)(places)
        rows = slice(start - first_lane * share, stop - first_lane * share)
        drawn = samples[:, images - low].ravel()[rows]
        copies = np.tile(copies, len(lanes))[rows]
        # Only then: for all of one split, which is the rule, draws are samples.
        if self.shares:
            return self._samples_of_draws(drawn, copies, shuffle)
        return drawn, copies

    def _samples_of_draws(
        self, draws: NDArray[np.int64], copies: NDArray[np.int64], shuffle: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Map draws to samples, and give further copy numbers to samples that come again."""
        samples = np.empty_like(draws)
        start = 0
        for number, share in enumerate(self.shares):
            own = (draws >= start) & (draws < start + share.num_draws)
            if own.any():
                # By its place in the list, not by its name: a folder that was moved is no other
                # source to a resumed run.
                key = fold(self.seed, 4, number)
                samples[own], times = share(draws[own] - start, shuffle, self.block_samples, key)
                # (sample, copy) is what augmentation draws from: the same pair again would be the
                # same image again.
                copies[own] += self.aug_repeats * times
            start += share.num_draws
        return samples, copies

    def blocks_at_a_time(self, num_rows: int, batches_ahead: int) -> int:
        """Return how many blocks an LRU cache must hold to fetch almost none of them twice.

        For `num_rows` rows of each batch, requested `batches_ahead` batches before.
        """
        if self.block_samples == 1:
            return self.num_samples  # no block is used a second time soon
        lanes = min(-(-num_rows // self._lane_share), self.num_lanes)
        ahead = -(-batches_ahead * self._lane_share // (self.aug_repeats * self.block_samples))
        # A quarter more than the windows, for finished ones whose blocks are not evicted yet; and 1
        # of the next window, which has begun.
        return lanes * (-(-self.window_blocks * 5 // 4) + 1 + ahead)

    def _lane(self, shuffle: int, lane: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return where images [start, stop) of a lane are in the epoch of shuffled blocks."""
        length = -(-self.steps_per_shuffle * self._lane_share // self.aug_repeats)
        # Blocks of one sample are permuted over the complete data set: windows would add nothing.
        if self.block_samples == 1:
            return lane * length + np.arange(start, stop)
        window = self.window_blocks * self.block_samples
        # Staggered: if all lanes began a window at once, its blocks would be read in one burst.
        phase = lane * window // self.num_lanes if length > window else 0
        out = np.empty(stop - start, dtype=np.int64)
        place = start
        while place < stop:
            number = (place + phase) // window
            low, high = max(number * window - phase, 0), min((number + 1) * window - phase, length)
            end = min(high, stop)
            shuffled = _window(self.seed, shuffle, lane, number, high - low)
            out[place - start : end - start] = (
                lane * length + low + shuffled[place - low : end - low]
            )
            place = end
        return out


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
    """Return an `Order`, with `None` replaced by the defaults.

    num_lanes: the largest divisor of the batch up to 64 (with repeats see MIN_DEFAULT_LANE_IMAGES).
    block_samples: 1 below 262,144 samples, else 64. Raises ValueError for sizes that cannot work,
    with those that do.
    """
    g = global_batch_size
    r = aug_repeats
    if g > num_samples:
        raise ValueError(
            f"data.global_batch_size={g} exceeds the {num_samples} training samples: choose at most"
            f" {num_samples}"
        )
    # One read serves all copies of an image only if they are in one batch.
    if aug_repeats_form == "batch" and g % r:
        near = " or ".join(str(size) for size in (g // r * r, (g // r + 1) * r) if size)
        raise ValueError(
            f"data.aug_repeats={r} does not divide data.global_batch_size={g}: use {near} images a"
            f" batch, data.aug_repeats out of {divisors(g)}, or data.aug_repeats_form=sampler"
        )
    lanes = possible_lanes(g, r, aug_repeats_form)
    if num_lanes is None:
        # Each lane reads from a place of its own: more lanes mix more, and have more blocks open.
        room = MAX_DEFAULT_LANES if r == 1 else max(g // r // MIN_DEFAULT_LANE_IMAGES, 1)
        num_lanes = max(d for d in lanes if d <= min(room, MAX_DEFAULT_LANES))
    elif num_lanes not in lanes:
        raise ValueError(
            f"data.num_lanes={num_lanes} does not divide {lanes[-1]}"
            f" (data.global_batch_size={g}, data.aug_repeats={r}): choose one of {lanes}"
        )
    return Order(
        num_samples,
        g,
        seed,
        num_lanes,
        block_samples or default_block_samples(num_samples),
        window_blocks,
        r,
        aug_repeats_form,
        shares,
    )


def default_block_samples(num_samples: int) -> int:
    """Return the default of `data.block_samples`."""
    return 1 if num_samples < PERMUTATION_BELOW else DEFAULT_BLOCK_SAMPLES


def shares_of(
    sizes: Sequence[int], weights: Sequence[float | None], block_samples: int | None = None
) -> list[int]:
    """Return how many draws each of several sources, with `sizes` samples, gives to an epoch.

    Without weights as many as samples. With them an epoch has as many draws as there are samples,
    up to rounding: shares are full blocks, so that no block is of two sources. Raises ValueError if
    a weight gives less than one block.
    """
    if all(weight is None for weight in weights):
        return list(sizes)
    known = [weight for weight in weights if weight is not None]
    total = sum(sizes)
    block = block_samples or default_block_samples(total)
    # A block of two sources would be read, or fetched, once for each.
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
    """Return the numbers of lanes that work, ascending.

    Divisors of the batch or, if a batch has complete sets of copies, of its distinct images.
    """
    return divisors(global_batch_size // (aug_repeats if aug_repeats_form == "batch" else 1))


def divisors(n: int) -> list[int]:
    """Return all divisors of n, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


# The shuffle of now, that of batches which are read ahead, and as many of another order.
@lru_cache(maxsize=4)
def _epoch_blocks(num_samples: int, block: int, seed: int, epoch: int) -> _EpochBlocks:
    return _EpochBlocks(num_samples, block, seed, epoch)


# Consecutive batches share windows: each would sort a thousand hashes per lane again, 0.1 ms.
# Two per lane, for reading ahead of a border, at up to 128 lanes; 2 MiB of a process.
@lru_cache(maxsize=256)
def _window(seed: int, shuffle: int, lane: int, number: int, length: int) -> NDArray[np.int64]:
    """Return the permutation inside one window."""
    hashes = fold(seed, shuffle, 3, lane, number, np.arange(length))
    return np.argsort(hashes, kind="stable")


def sample_checksum(ids: NDArray[np.int64]) -> int:
    """Return the sum of the hashed `ids` modulo 2**64.

    Equal for equal multisets in any order and any partition, so that ranks can add theirs up.
    """
    with np.errstate(over="ignore"):  # modulo 2**64 is what a sum that wraps gives
        return int(hash64(ids).sum(dtype=U64))


def rows_sha256(order: Order, position: int) -> str:
    """Return a hash of the samples and copies of the batch at `position`, row by row."""
    rows = np.stack(order.rows_and_copies(position, 0, order.global_batch_size))
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
