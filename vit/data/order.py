"""The order of samples in batches, computed only from (seed, epoch, position).

Samples are numbered and divided into blocks of consecutive samples. In each epoch, a Feistel
permutation keyed by (seed, epoch) shuffles the blocks. The shuffled sequence is split into
`num_lanes` lanes of equal length. Within a lane, samples are shuffled in consecutive windows.
Window borders differ between lanes, so that disk reads do not come in bursts. A batch takes the
same number of samples from each lane, and its rows are grouped by lane. With a global batch size of
G and R ranks, rank r gets rows [r G/R, (r+1) G/R). The content of a batch therefore depends neither
on the number of ranks nor on workers. Any batch can be computed without the earlier batches, and
memory use is bounded for any number of samples.

With N samples, an epoch consists of N // G full batches of distinct samples. The N % G samples that
are dropped differ between epochs.

Repeated augmentation (Hoffer et al. 2020) shows each image `aug_repeats` times, each time with a
different augmentation. An example with 8 images a to h, 2 copies, one lane and a batch size of 4:

    shuffled          d a f c e b h g
    form `batch`      d0 a0 d1 a1 | f0 c0 f1 c1 | e0 b0 e1 b1 | h0 g0 h1 g1 |    then shuffled again
    form `sampler`    d0 a0 d1 a1 | f0 c0 f1 c1 |    then shuffled again

An epoch still has N // G = 2 steps. With the `batch` form (affjljoo3581/deit3-jax:src/dataset.py),
two epochs show each image exactly twice, except the images left over from an incomplete batch. With
the `sampler` form (facebookresearch/deit:samplers.py), each epoch shows half of the images. MixUp
and CutMix mix neighboring rows, so the rows of a lane are sorted by copy to avoid mixing two copies
of one image.

`shares` describes selected samples and multiple sources. The order then permutes draws instead of
samples, numbered source by source. A source with as many draws as samples shows each sample once
per epoch. Any other source goes through its samples in passes, each with a new permutation, and
each epoch takes the next `num_draws`. An example with 5 samples and 3 draws:

    epoch        0       1       2       3       4
    samples    3 2 0   4 1|1   3 4 0   2|2 4   1 3 0     | begins a new pass

Draw j of epoch e is element d = 3 e + j of this sequence. Its sample is element d % 5 of pass d //
5, which is computed without earlier draws. The numbers of draws of any two samples differ by at
most one. A pass permutes blocks of samples that are stored together. These blocks are aligned with
the blocks of draws. Draws that do not fill a batch at the end of an epoch are skipped. In the form
`batch`, all of this applies to a shuffle (`aug_repeats` epochs) instead of an epoch.
"""

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
"""The maximum number of blocks whose permutation is stored as a table, which takes 2 MiB and delays
the first batch by 0.03 s. Without the table, each batch makes 1,600 numpy calls, because the
Feistel network is repeated until all positions are in range."""
MAX_DEFAULT_LANES = 64
MIN_DEFAULT_LANE_IMAGES = 4
"""With repeated augmentation, the default minimum number of distinct images that a batch takes from
a lane. Copies of an image are this many rows apart, and few sets of copies are split at the end of
a lane."""


class _EpochBlocks:
    """Maps positions in an epoch to samples, by a permutation of blocks.

    The last block may be short. If it were permuted with the others, all later positions would
    depend on its slot, so it is inserted at a random slot afterwards.
    """

    def __init__(self, num_samples: int, block: int, seed: int, epoch: int):
        self.block = block
        self.num_blocks = math.ceil(num_samples / block)
        self.short_length = num_samples - (self.num_blocks - 1) * block

        # The last element of each key in this file, 1 to 4, keeps random numbers for different
        # purposes independent. Never change these constants, because older runs would then resume
        # with different batches.
        self.short_slot = int(fold(seed, epoch, 2) % U64(self.num_blocks))
        self.permutation = Permutation(max(self.num_blocks - 1, 1), fold(seed, epoch, 1))
        self._table: NDArray[np.int64] | None = None

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        after = positions >= self.short_slot * self.block + self.short_length
        # Pad the short block to full length, so that one division gives the slot of any position.
        spread = np.where(after, positions + self.block - self.short_length, positions)
        slot, inside = np.divmod(spread, self.block)
        if self.num_blocks == 1:
            return inside

        # The permutation is defined only on [0, n), so clip the short block's slot to this range.
        # The next line replaces the result for this slot.
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

    In the joint numbering of all sources, this source starts at `first`.
    """

    num_draws: int
    num_samples: int
    """The number of selected samples."""
    first: int = 0
    chosen: NDArray[np.integer] | None = field(default=None, repr=False, compare=False)
    """(num_samples,) numbers of the selected samples within the source, ascending; None if all are
    selected."""

    def __call__(
        self, draws: NDArray[np.int64], shuffle: int, block: int, key: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Map draws (n,) in [0, num_draws) of one shuffle to samples (n,).

        Also returns the number of earlier draws of each sample in this shuffle, (n,).
        """
        if self.num_draws == self.num_samples:
            # The order has already permuted the draws, so do not permute again. A run with one
            # complete source therefore has the same order as a run without `shares`.
            places = draws
            times = np.zeros_like(draws)
        else:
            passes, inside = np.divmod(draws + shuffle * self.num_draws, self.num_samples)
            places = np.empty_like(draws)

            # Count from the first pass that this shuffle uses, even if that pass began in an
            # earlier shuffle. Augmentation keys contain the epoch, so only repeats within a shuffle
            # could get the same keys.
            times = passes - shuffle * self.num_draws // self.num_samples
            # Most sources need one or two passes. A small source with a high weight needs more.
            for number in np.unique(passes).tolist():
                in_pass = passes == number
                places[in_pass] = self._place(inside[in_pass], number, block, key)

        if self.chosen is not None:
            # `chosen` has the narrowest possible dtype, and adding `first` could overflow, so cast
            # first.
            places = self.chosen[places].astype(np.int64)
        return self.first + places, times

    def _place(
        self, inside: NDArray[np.int64], number: int, block: int, key: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        """Map positions `inside` of pass `number` to range(num_samples), permuting full blocks.

        Blocks start at multiples of `block` in the sequence of all passes. The short block fills
        the positions before the first start and after the last full block. If the short block is
        too small, a full block is split in two to fill the remaining positions.

        An example is pass 1 of 7 samples in the blocks `a b c`, `d e f` and `g`. It consists of
        elements 7 to 13 of the sequence of all passes, so blocks start at elements 9 and 12. The
        order may be `g d | a b c | e f`.
        """
        num_full, short = divmod(self.num_samples, block)
        # A pass rarely starts at a block border of the draws, because passes follow each other
        # without gaps. Blocks of samples must nevertheless align with blocks of draws. Otherwise
        # most blocks would be split between two distant blocks of draws, and a cache would fetch
        # them twice.
        lead = min(-number * self.num_samples % block, self.num_samples)
        between = (self.num_samples - lead) // block
        permutation = Permutation(max(num_full, 1), fold(key, number))

        slot, offset = np.divmod(inside - lead, block)
        rest = np.where(inside < lead, inside, inside - between * block)
        is_full = (inside >= lead) & (slot < between)

        full = permutation(np.where(is_full, slot, 0)) * block + offset
        # Split only the last block of the permutation, so that all others are read as a whole.
        torn = permutation(num_full - 1) * block + rest - short if num_full else rest
        return np.where(is_full, full, np.where(rest < short, num_full * block + rest, torn))


@dataclass(frozen=True)
class Order:
    """The order of `num_samples` samples in batches of `global_batch_size`, for all epochs.

    Use `make_order` to create an order with defaults and checked sizes. `window_blocks` is the
    number of blocks in a shuffle window, and has no effect if blocks contain one sample. Each image
    has `aug_repeats` (r) copies, in the form `batch` or `sampler`.
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
    """The share of each source, with `num_samples` draws in total; () if every draw is a sample."""

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches in an epoch."""
        return self.num_samples // self.global_batch_size

    @property
    def dropped_per_epoch(self) -> int:
        """The number of rows that do not fill a batch (N % G). Without repeats, each is a skipped
        sample."""
        return self.num_samples % self.global_batch_size

    @property
    def steps_per_shuffle(self) -> int:
        """The number of batches in a shuffle, which is one epoch, or r epochs in the form
        `batch`."""
        return self.steps_per_epoch * (self.aug_repeats if self.aug_repeats_form == "batch" else 1)

    @property
    def distinct_per_epoch(self) -> int:
        """The number of distinct samples in an epoch; with r repeats, 1/r of each lane's rows.

        If a source has more draws than samples, the number is an upper bound.
        """
        lane_rows = self.steps_per_epoch * self._lane_share
        drawn = self.num_lanes * math.ceil(lane_rows / self.aug_repeats)
        if not self.shares:
            return drawn
        return min(drawn, sum(min(share.num_draws, share.num_samples) for share in self.shares))

    @property
    def _lane_share(self) -> int:
        """The number of rows in each batch that come from one lane."""
        return self.global_batch_size // self.num_lanes

    def batch(self, position: int) -> NDArray[np.int64]:
        """Return sample ids (G,) of the batch at `position`, counted from the first batch of epoch
        0."""
        return self.rows(position, 0, self.global_batch_size)

    def rows(self, position: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return sample ids of rows [start, stop) of the batch at `position`."""
        return self.rows_and_copies(position, start, stop)[0]

    def rows_and_copies(
        self, position: int, start: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return sample ids and copy numbers of rows [start, stop) of the batch at `position`.

        Copies are numbered from 0 to `aug_repeats` - 1. If a sample is drawn again in an epoch, its
        copies get higher numbers. Each pair (sample, copy) seeds an augmentation, so it occurs only
        once per epoch.
        """
        shuffle, step = divmod(position, self.steps_per_shuffle)
        share = self._lane_share
        # Each rank computes only the lanes that overlap its own rows.
        first_lane = start // share
        lanes = range(first_lane, math.ceil(stop / share))

        in_lane = np.arange(step * share, (step + 1) * share)
        # MixUp and CutMix mix neighboring rows, and copies of one image must not be mixed, so sort
        # by copy. Without a stable sort, the order of equal keys would depend on the numpy version
        # and the processor.
        in_lane = in_lane[np.argsort(in_lane % self.aug_repeats, kind="stable")]
        images, copies = np.divmod(in_lane, self.aug_repeats)

        # In the form `sampler`, a batch may start between two copies of one image, so the images
        # are not a function of the step number.
        low, high = int(images.min()), int(images.max()) + 1
        # A lane has so few positions that numpy's overhead per call dominates, so map all lanes in
        # one call.
        places = np.stack([self._lane(shuffle, lane, low, high) for lane in lanes])
        samples = _epoch_blocks(self.num_samples, self.block_samples, self.seed, shuffle)(places)

        rows = slice(start - first_lane * share, stop - first_lane * share)
        drawn = samples[:, images - low].ravel()[rows]
        copies = np.tile(copies, len(lanes))[rows]
        # Without shares (the common case), draws are already samples.
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
                # Hash the source's index in the list, not its path, so that a run keeps its order
                # if the user moves a folder.
                key = fold(self.seed, 4, number)
                samples[is_of_source], times = share(
                    draws[is_of_source] - start, shuffle, self.block_samples, key
                )
                # Each (sample, copy) pair seeds an augmentation. Make the pairs unique, because a
                # repeated pair would show the same pixels twice.
                copies[is_of_source] += self.aug_repeats * times
            start += share.num_draws
        return samples, copies

    def blocks_at_a_time(self, num_rows: int, batches_ahead: int) -> int:
        """Return how many blocks an LRU cache must hold so that almost no block is fetched twice.

        Assumes that `num_rows` rows of each batch are read, and that each row is requested
        `batches_ahead` batches earlier.
        """
        if self.block_samples == 1:
            return self.num_samples  # An epoch uses a block of one sample only once.

        lanes = min(math.ceil(num_rows / self._lane_share), self.num_lanes)
        images_ahead = batches_ahead * self._lane_share
        blocks_ahead = math.ceil(images_ahead / (self.aug_repeats * self.block_samples))
        # Blocks of a finished window are not evicted immediately, so hold 1.25 windows. Hold one
        # more block, because the next window may have started.
        return lanes * (math.ceil(self.window_blocks * 5 / 4) + 1 + blocks_ahead)

    def _lane(self, shuffle: int, lane: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the positions of images [start, stop) of a lane in the shuffled sequence."""
        length = math.ceil(self.steps_per_shuffle * self._lane_share / self.aug_repeats)
        # Blocks of one sample are already permuted over the whole data set, so windows would not
        # help.
        if self.block_samples == 1:
            return lane * length + np.arange(start, stop)

        window = self.window_blocks * self.block_samples
        # Give each lane a different phase. If all lanes started a window at the same batch,
        # training would wait for a burst of disk reads.
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
    """Return an `Order`, with defaults in place of `None`.

    The default of `num_lanes` is the largest divisor of the batch size up to 64; for repeats, see
    MIN_DEFAULT_LANE_IMAGES. The default of `block_samples` is 1 for fewer than 262,144 samples,
    else 64. Raises ValueError if the sizes contradict each other; the message lists valid sizes.
    """
    g, r = global_batch_size, aug_repeats
    if g > num_samples:
        raise ValueError(
            f"data.global_batch_size={g} exceeds the {num_samples} training samples: choose at most"
            f" {num_samples}"
        )
    # If the copies of an image were in several batches, each batch would read the image again.
    if aug_repeats_form == "batch" and g % r:
        sizes = " or ".join(str(size) for size in (g // r * r, (g // r + 1) * r) if size)
        raise ValueError(
            f"order.aug_repeats={r} does not divide data.global_batch_size={g}: use {sizes} images"
            f" per batch, order.aug_repeats from {divisors(g)}, or order.aug_repeats_form=sampler"
        )

    lanes = possible_lanes(g, r, aug_repeats_form)
    if num_lanes is None:
        # Each lane reads from a different location in the data set. More lanes mix a batch better,
        # but each lane needs its own window of blocks.
        most = MAX_DEFAULT_LANES if r == 1 else max(g // r // MIN_DEFAULT_LANE_IMAGES, 1)
        num_lanes = max(d for d in lanes if d <= min(most, MAX_DEFAULT_LANES))
    elif num_lanes not in lanes:
        raise ValueError(
            f"order.num_lanes={num_lanes} does not divide {lanes[-1]}"
            f" (data.global_batch_size={g}, order.aug_repeats={r}): choose one of {lanes}"
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
    """Return the default value of `order.block_samples`."""
    return 1 if num_samples < PERMUTATION_BELOW else DEFAULT_BLOCK_SAMPLES


def shares_of(
    sizes: Sequence[int], weights: Sequence[float | None], block_samples: int | None = None
) -> list[int]:
    """Return the number of draws per epoch for each of several sources with `sizes` samples.

    Without weights, a source has as many draws as samples. With weights, the draws per epoch add up
    to the total number of samples, up to rounding to full blocks. Raises ValueError if the share of
    a source is less than one block.
    """
    if all(weight is None for weight in weights):
        return list(sizes)

    numbers = [weight for weight in weights if weight is not None]
    total = sum(sizes)
    block = block_samples or default_block_samples(total)

    # Round shares to whole blocks. A block shared by two sources would need two reads and waste
    # half of two cache blocks.
    draws = [round(weight / sum(numbers) * total / block) * block for weight in numbers]
    if not all(draws):
        least = block * sum(numbers) / total
        raise ValueError(
            f"data.sources: weight {min(numbers):g} of {sum(numbers):.6g} yields less than {block}"
            f" of {total:,} draws: set it to {least:.2g} or more"
        )
    return draws


def possible_lanes(
    global_batch_size: int, aug_repeats: int, aug_repeats_form: Literal["batch", "sampler"]
) -> list[int]:
    """Return the valid numbers of lanes in ascending order.

    Valid numbers divide the batch size, or the number of distinct images in a batch that contains
    complete sets of copies.
    """
    return divisors(global_batch_size // (aug_repeats if aug_repeats_form == "batch" else 1))


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


# Cache four entries: the current shuffle and the next one (for reading ahead), for two orders.
@lru_cache(maxsize=4)
def _epoch_blocks(num_samples: int, block: int, seed: int, epoch: int) -> _EpochBlocks:
    return _EpochBlocks(num_samples, block, seed, epoch)


# Cache windows, because consecutive batches share them. Without the cache, each batch sorts a
# thousand hashes per lane, which takes 0.1 ms. Reading ahead needs two windows per lane, so 256
# entries are enough for 128 lanes. They take 2 MiB per process.
@lru_cache(maxsize=256)
def _window(seed: int, shuffle: int, lane: int, number: int, length: int) -> NDArray[np.int64]:
    # Without a stable sort, numpy versions may order equal hashes differently.
    return np.argsort(fold(seed, shuffle, 3, lane, number, np.arange(length)), kind="stable")


def sample_checksum(ids: NDArray[np.int64]) -> int:
    """Return the sum of the hashed `ids` modulo 2**64.

    The sum does not depend on the order of the ids, so the sums of all ranks can be added.
    """
    with np.errstate(over="ignore"):  # overflow is intended (modulo 2**64)
        return int(hash64(ids).sum(dtype=U64))


def rows_sha256(order: Order, position: int) -> str:
    """Return a hash of the samples and copies in each row of the batch at `position`."""
    rows = np.stack(order.rows_and_copies(position, 0, order.global_batch_size))
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
