"""The order of samples in batches, computed from (seed, epoch, position) alone.

All samples are numbered and divided into blocks of consecutive samples. In each epoch, a Feistel
permutation keyed by (seed, epoch) shuffles the blocks. The shuffled sequence is cut into
`num_lanes` lanes of equal length. Inside a lane, samples are shuffled in consecutive windows. The
window borders differ from lane to lane, so that disk reads do not come in bursts. A batch takes
equally many samples from each lane, with rows grouped by lane. With R ranks, rank r gets the rows
[r G/R, (r+1) G/R). The content of a batch therefore depends neither on ranks nor on workers. Any
batch of any epoch is computed without the batches before it, and memory is bounded for any number
of samples.

An epoch consists of N // G full batches of distinct samples. The samples that do not fill a batch
differ from epoch to epoch.

Repeated augmentation (Hoffer et al. 2020) shows each image `aug_repeats` times, in copies that are
augmented differently. An example with 8 images a to h, 2 copies, one lane and batches of 4:

    shuffled          d a f c e b h g
    form `batch`      d0 a0 d1 a1 | f0 c0 f1 c1 | e0 b0 e1 b1 | h0 g0 h1 g1 |    then shuffled again
    form `sampler`    d0 a0 d1 a1 | f0 c0 f1 c1 |    then shuffled again

An epoch still has N // G = 2 steps. In the form `batch` (affjljoo3581/deit3-jax:src/dataset.py),
two epochs show each image exactly twice, except those that do not fill a batch. In the form
`sampler` (facebookresearch/deit:samplers.py), each epoch shows half of the images. The rows of a
lane are sorted by copy, because MixUp and CutMix mix neighboring rows and two copies of one image
must not mix.

Selected samples and several sources use `shares`. The order then permutes draws instead of samples,
first all draws of source 0, then those of source 1. A source with as many draws as samples shows
each sample once in an epoch. Any other source repeats its samples in passes, each with a new
permutation, and an epoch takes the next `num_draws`. An example with 5 samples and 3 draws:

    epoch        0       1       2       3       4
    samples    3 2 0   4 1|1   3 4 0   2|2 4   1 3 0     | begins a new pass

Draw j of epoch e is number d = 3 e + j of this sequence. Its sample is at place d % 5 of pass d //
5, which is computed without earlier draws. The counts of any two samples differ by at most one. A
pass permutes blocks of samples that are stored together. These blocks begin where blocks of draws
begin. Draws that do not fill a batch at the end of an epoch are consumed but not shown. In the form
`batch`, all of this applies to a shuffle (`aug_repeats` epochs) instead of an epoch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vit.config.base import DEFAULT_BLOCK_SAMPLES, PERMUTATION_BELOW
from vit.system.hashing import U64, Permutation, fold, hash64

TABLE_BELOW = 262_144
"""The largest permutation of blocks that is stored as a table, which takes 2 MiB and costs the
first batch 0.03 s. Without a table, each batch makes 1,600 numpy calls, because the Feistel network
is repeated until all positions are in range."""
MAX_DEFAULT_LANES = 64
MIN_DEFAULT_LANE_IMAGES = 4
"""The default minimum of images per lane in a batch with repeats. Copies of an image are this many
rows apart, and few sets of copies are cut at the end of a lane."""


class _EpochBlocks:
    """The permuted blocks of an epoch, as a function from position to sample.

    The last block may be short. If it took part in the permutation, all later positions would
    depend on its slot, so it is inserted at a random slot afterwards.
    """

    def __init__(self, num_samples: int, block: int, seed: int, epoch: int):
        self.block = block
        self.num_blocks = math.ceil(num_samples / block)
        self.short_length = num_samples - (self.num_blocks - 1) * block
        # The last part of each key, 1 to 4 in this file, makes the random numbers of an epoch
        # independent. These numbers must never change, or a run of an older version would resume
        # with different batches.
        self.short_slot = int(fold(seed, epoch, 2) % U64(self.num_blocks))
        self.permutation = Permutation(max(self.num_blocks - 1, 1), fold(seed, epoch, 1))
        self._table: NDArray[np.int64] | None = None

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        start = self.short_slot * self.block
        after = positions >= start + self.short_length
        # Widen the short block to a full one, so that one division gives the slot of any position.
        spread = np.where(after, positions + self.block - self.short_length, positions)
        slot = spread // self.block
        inside = spread % self.block
        if self.num_blocks == 1:
            return inside
        # Positions inside the short block have no full block. Clip them to a valid one, because the
        # permutation only maps [0, n). The next line replaces their result.
        full = np.clip(np.where(slot > self.short_slot, slot - 1, slot), 0, self.num_blocks - 2)
        number = np.where(slot == self.short_slot, self.num_blocks - 1, self._permuted(full))
        return number * self.block + inside

    def _permuted(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.permutation.n > TABLE_BELOW:
            return self.permutation(slots)
        if self._table is None:
            self._table = self.permutation(np.arange(self.permutation.n))
        return self._table[slots]


@dataclass(frozen=True)
class Share:
    """The samples that one source contributes to each shuffle.

    The source's samples are numbered from `first` in the joint numbering of all sources.
    """

    num_draws: int
    num_samples: int
    """The number of selected samples."""
    first: int = 0
    chosen: NDArray[np.integer] | None = field(default=None, repr=False, compare=False)
    """(num_samples,) numbers of the selected samples in the source, ascending; None: all."""

    def __call__(
        self, draws: NDArray[np.int64], shuffle: int, block: int, key: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Map draws (n,) in [0, num_draws) of one shuffle to samples (n,).

        Also returns how often each sample was drawn earlier in this shuffle, (n,).
        """
        if self.num_draws == self.num_samples:
            # The order has already permuted the draws. A second permutation would make the order of
            # a run with one complete source differ from that of a run without `shares`.
            places = draws
            times = np.zeros_like(draws)
        else:
            passes, inside = np.divmod(draws + shuffle * self.num_draws, self.num_samples)
            places = np.empty_like(draws)
            # Count from the first pass of this shuffle, although that pass may have begun in an
            # earlier one. The augmentation key contains the epoch, so only repeats within a shuffle
            # can collide.
            times = passes - shuffle * self.num_draws // self.num_samples
            # Most sources touch one or two passes. A small source with a high weight touches more.
            for number in np.unique(passes).tolist():
                in_pass = passes == number
                places[in_pass] = self._place(inside[in_pass], number, block, key)
        if self.chosen is not None:
            # Cast first, because `chosen` has the narrowest type for its numbers, and adding
            # `first` could overflow.
            places = self.chosen[places].astype(np.int64)
        return self.first + places, times

    def _place(
        self, inside: NDArray[np.int64], number: int, block: int, key: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        """Map positions `inside` of pass `number` to range(num_samples), permuting full blocks.

        Block borders are multiples of `block` in the sequence of all passes. The short block fills
        the positions before the first border and after the last one. If it is too small, a full
        block is cut in two to fill the rest.
        """
        num_full, short = divmod(self.num_samples, block)
        # Passes follow each other without gaps, so a pass rarely begins at a border. Blocks of
        # samples must start where blocks of draws start. Otherwise most blocks would be split
        # between two distant blocks of draws, and a cache would fetch them twice.
        lead = min(-number * self.num_samples % block, self.num_samples)
        between = (self.num_samples - lead) // block
        permutation = Permutation(max(num_full, 1), fold(key, number))
        slot, offset = np.divmod(inside - lead, block)
        rest = np.where(inside < lead, inside, inside - between * block)
        is_full = (inside >= lead) & (slot < between)
        full = permutation(np.where(is_full, slot, 0)) * block + offset
        torn = rest
        # Only the last block of the permutation is cut in two. All others are read in one piece.
        if num_full:
            torn = permutation(num_full - 1) * block + rest - short
        return np.where(is_full, full, np.where(rest < short, num_full * block + rest, torn))


@dataclass(frozen=True)
class Order:
    """The order of `num_samples` samples in batches of `global_batch_size`, for all epochs.

    `make_order` fills in defaults and checks the sizes. `window_blocks` is the number of blocks in
    a shuffling window; it has no effect with blocks of one sample. Each image has `aug_repeats` (r)
    copies, in the form `batch` or `sampler`.
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
    """The share of each source, `num_samples` draws in total; () if each draw is a sample."""

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches in an epoch."""
        return self.num_samples // self.global_batch_size

    @property
    def dropped_per_epoch(self) -> int:
        """N % G: the rows that do not fill a batch. Without repeats, each is a skipped sample."""
        return self.num_samples % self.global_batch_size

    @property
    def steps_per_shuffle(self) -> int:
        """The number of batches in a shuffle: an epoch, or r epochs in the form `batch`."""
        return self.steps_per_epoch * (self.aug_repeats if self.aug_repeats_form == "batch" else 1)

    @property
    def distinct_per_epoch(self) -> int:
        """The number of distinct samples in an epoch; with r repeats, 1/r of each lane's rows.

        This is an upper bound if a source is drawn more often than it has samples.
        """
        lane_rows = self.steps_per_epoch * self._lane_share
        drawn = self.num_lanes * math.ceil(lane_rows / self.aug_repeats)
        # A source with more draws than samples repeats samples within an epoch.
        if not self.shares:
            return drawn
        return min(drawn, sum(min(share.num_draws, share.num_samples) for share in self.shares))

    @property
    def _lane_share(self) -> int:
        """The number of rows in a batch that come from one lane."""
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

        Copies are numbered from 0 to `aug_repeats` - 1, and higher if a sample is drawn again in an
        epoch. A pair (sample, copy) occurs once in an epoch, because it seeds the augmentation.
        """
        shuffle, step = divmod(position, self.steps_per_shuffle)
        share = self._lane_share
        # Compute only the lanes that overlap the rows, so that each rank pays only for its own
        # rows.
        first_lane = start // share
        lanes = range(first_lane, math.ceil(stop / share))
        in_lane = np.arange(step * share, (step + 1) * share)
        # Sort by copy: MixUp and CutMix mix neighboring rows, and copies of one image must not mix.
        # A stable sort is needed because numpy's default order of equal keys depends on the version
        # and the processor.
        in_lane = in_lane[np.argsort(in_lane % self.aug_repeats, kind="stable")]
        images = in_lane // self.aug_repeats
        copies = in_lane % self.aug_repeats
        # In the form `sampler`, a batch may begin between two copies of one image, so the step
        # alone does not determine its images.
        low, high = int(images.min()), int(images.max()) + 1
        # Map all lanes in one call, because a hundred numpy calls would cost more than the few
        # positions of each lane.
        places = np.stack([self._lane(shuffle, lane, low, high) for lane in lanes])
        samples = _epoch_blocks(self.num_samples, self.block_samples, self.seed, shuffle)(places)
        rows = slice(start - first_lane * share, stop - first_lane * share)
        drawn = samples[:, images - low].ravel()[rows]
        copies = np.tile(copies, len(lanes))[rows]
        # Without shares, the common case, draws are already samples.
        if self.shares:
            return self._samples_of_draws(drawn, copies, shuffle)
        return drawn, copies

    def _samples_of_draws(
        self, draws: NDArray[np.int64], copies: NDArray[np.int64], shuffle: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        samples = np.empty_like(draws)
        start = 0
        for number, share in enumerate(self.shares):
            is_of_source = (draws >= start) & (draws < start + share.num_draws)
            if is_of_source.any():
                # The key contains the source's number in the list, not its path, so that a run
                # resumes with the same order after the user moves a folder.
                key = fold(self.seed, 4, number)
                samples[is_of_source], times = share(
                    draws[is_of_source] - start, shuffle, self.block_samples, key
                )
                # The pair (sample, copy) seeds the augmentation. A repeated pair would show the
                # same pixels twice.
                copies[is_of_source] += self.aug_repeats * times
            start += share.num_draws
        return samples, copies

    def blocks_at_a_time(self, num_rows: int, batches_ahead: int) -> int:
        """Return how many blocks an LRU cache must hold to fetch almost none of them twice.

        Assumes that `num_rows` rows of each batch are read, and requested `batches_ahead` batches
        earlier.
        """
        if self.block_samples == 1:
            return self.num_samples  # a block of one sample is not used again in this epoch
        lanes = min(math.ceil(num_rows / self._lane_share), self.num_lanes)
        images_ahead = batches_ahead * self._lane_share
        blocks_ahead = math.ceil(images_ahead / (self.aug_repeats * self.block_samples))
        # A window and a quarter, because blocks of a finished window are not evicted immediately.
        # One more block, because the next window may have begun.
        return lanes * (math.ceil(self.window_blocks * 5 / 4) + 1 + blocks_ahead)

    def _lane(self, shuffle: int, lane: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the places of images [start, stop) of a lane in the shuffled sequence."""
        length = math.ceil(self.steps_per_shuffle * self._lane_share / self.aug_repeats)
        # Blocks of one sample are permuted over the complete data set, so a window would add
        # nothing.
        if self.block_samples == 1:
            return lane * length + np.arange(start, stop)
        window = self.window_blocks * self.block_samples
        # Each lane has a different phase. If all lanes began a window at the same batch, training
        # would wait for a burst of disk reads.
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
    """Return an `Order`, with `None` replaced by defaults.

    The default of `num_lanes` is the largest divisor of the batch up to 64 (with repeats see
    MIN_DEFAULT_LANE_IMAGES). The default of `block_samples` is 1 below 262,144 samples, else 64.
    Raises ValueError if the sizes contradict each other; the message lists valid sizes.
    """
    g = global_batch_size
    r = aug_repeats
    if g > num_samples:
        raise ValueError(
            f"data.global_batch_size={g} exceeds the {num_samples} training samples: choose at most"
            f" {num_samples}"
        )
    # All copies of an image must be in one batch, or each batch would read the image again.
    if aug_repeats_form == "batch" and g % r:
        sizes = " or ".join(str(size) for size in (g // r * r, (g // r + 1) * r) if size)
        raise ValueError(
            f"data.aug_repeats={r} does not divide data.global_batch_size={g}: use {sizes} images"
            f" per batch, data.aug_repeats from {divisors(g)}, or data.aug_repeats_form=sampler"
        )
    lanes = possible_lanes(g, r, aug_repeats_form)
    if num_lanes is None:
        # Each lane reads at a different place of the data set. More lanes mix a batch better, but
        # each lane keeps a window of blocks open.
        most = MAX_DEFAULT_LANES if r == 1 else max(g // r // MIN_DEFAULT_LANE_IMAGES, 1)
        num_lanes = max(d for d in lanes if d <= min(most, MAX_DEFAULT_LANES))
    elif num_lanes not in lanes:
        raise ValueError(
            f"data.num_lanes={num_lanes} does not divide {lanes[-1]}"
            f" (data.global_batch_size={g}, data.aug_repeats={r}): choose one of {lanes}"
        )
    return Order(
        num_samples,
        g,
        seed=seed,
        num_lanes=num_lanes,
        block_samples=block_samples or default_block_samples(num_samples),
        window_blocks=window_blocks,
        aug_repeats=r,
        aug_repeats_form=aug_repeats_form,
        shares=shares,
    )


def default_block_samples(num_samples: int) -> int:
    """Return the default of `data.block_samples`."""
    return 1 if num_samples < PERMUTATION_BELOW else DEFAULT_BLOCK_SAMPLES


def shares_of(
    sizes: Sequence[int], weights: Sequence[float | None], block_samples: int | None = None
) -> list[int]:
    """Return how many draws each of several sources, with `sizes` samples, adds to an epoch.

    Without weights, a source has as many draws as samples. With weights, the number of draws per
    epoch equals the total number of samples, up to rounding to full blocks. Raises ValueError if
    the share of a source is less than one block.
    """
    if all(weight is None for weight in weights):
        return list(sizes)
    numbers = [weight for weight in weights if weight is not None]
    total = sum(sizes)
    block = block_samples or default_block_samples(total)
    # Shares are multiples of a block. Mixing two sources in a block would cost two reads, and two
    # half-used blocks in the cache.
    draws = [round(weight / sum(numbers) * total / block) * block for weight in numbers]
    if not all(draws):
        least = block * sum(numbers) / total
        raise ValueError(
            f"data.sources: weight {min(numbers):g} of {sum(numbers):.6g} is less than {block} of"
            f" {total:,} draws: set it to {least:.2g} or more"
        )
    return draws


def possible_lanes(
    global_batch_size: int, aug_repeats: int, aug_repeats_form: Literal["batch", "sampler"]
) -> list[int]:
    """Return the valid numbers of lanes, ascending.

    They are the divisors of the batch size, or of the number of distinct images in a batch if it
    contains complete sets of copies.
    """
    return divisors(global_batch_size // (aug_repeats if aug_repeats_form == "batch" else 1))


def divisors(n: int) -> list[int]:
    """Return all divisors of n, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


# Four entries: the current shuffle and the next one (for reading ahead), for two orders.
@lru_cache(maxsize=4)
def _epoch_blocks(num_samples: int, block: int, seed: int, epoch: int) -> _EpochBlocks:
    return _EpochBlocks(num_samples, block, seed, epoch)


# Consecutive batches share windows. Without this cache, each batch would sort a thousand hashes per
# lane again, which takes 0.1 ms. Reading ahead needs two windows per lane, so 256 entries serve up
# to 128 lanes and take 2 MiB per process.
@lru_cache(maxsize=256)
def _window(seed: int, shuffle: int, lane: int, number: int, length: int) -> NDArray[np.int64]:
    hashes = fold(seed, shuffle, 3, lane, number, np.arange(length))
    # A stable sort, because versions of numpy may order equal hashes differently.
    return np.argsort(hashes, kind="stable")


def sample_checksum(ids: NDArray[np.int64]) -> int:
    """Return the sum of the hashed `ids` modulo 2**64.

    Equal multisets have equal sums in any order and any partition, so ranks can add their sums.
    """
    with np.errstate(over="ignore"):  # the overflow is intended: it computes modulo 2**64
        return int(hash64(ids).sum(dtype=U64))


def rows_sha256(order: Order, position: int) -> str:
    """Return a hash of the samples and copies of the batch at `position`, row by row."""
    rows = np.stack(order.rows_and_copies(position, 0, order.global_batch_size))
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
