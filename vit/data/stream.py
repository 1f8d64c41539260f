"""Batches from a stream of tars, for what cannot be read at random. Not exact.

The data's story: URLs are opened by `vit.data.storage.http`, `pipe:` commands by the webdataset
library, one after the other, and it groups the files of their tars into samples; a tar that ends
without its end mark, or whose command fails, is an error. Each worker of each rank has shards of
its own or, where there are fewer shards than workers, its share of the samples of all; a buffer
shuffles, and when the shards are at an end the next pass begins in another order. Crops and tables
are drawn from a hash of the key.

Exact it is not: workers pass through their shards at different speeds, so that in an epoch of
`data.num_samples` some samples come twice and others not at all, and a resumed run begins a new
pass. The record says so ("exact": false). Evaluation, which counts every image once, reads an
indexed split.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from vit.config import AugmentConfig
from vit.data.augment.draw import draw_crops, draw_mix, draw_table, mixes, sample_keys, table_layout
from vit.data.batches import Batch, Batches, BatchLayout, ImageFormat, write_rows
from vit.data.decode.images import read_image_size
from vit.data.decode.views import decode_views
from vit.data.order import Order, fold, hash64
from vit.data.shards.members import META, SETTINGS, InvalidSample, SampleLayout, describe
from vit.data.shards.tar import DEFAULT_LAYOUT, INDEX_DTYPE
from vit.data.shards.tar_walk import FILE, TarDamaged, decompressed, in_order, walk
from vit.data.storage.http import PIECE_BYTES, WebFile, on_the_web
from vit.data.storage.retry import RetryPolicy
from vit.system.files import ShardError
from vit.system.urls import expand_braces, shown

SHUFFLE_SAMPLES = 1000
SHUFFLE_BYTES = 64 << 20
"""Encoded samples that a worker shuffles among, at most."""
NOT_EXACT = "not exact: samples may repeat or be missed, resume starts a new pass"


@dataclass(frozen=True)
class Stream:
    """What is known of a stream before it is read; in place of a `Split` for training."""

    filenames: list[str]
    """URLs and `pipe:` commands."""
    num_samples: int
    """In an epoch, as somebody said."""
    num_classes: int
    class_names: list[str]
    layout: SampleLayout = DEFAULT_LAYOUT
    """Where image and label of a sample are."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """With servers."""

    def identity(self) -> str:
        """A hash of no rows."""
        return hashlib.sha256().hexdigest()

    @property
    def splits(self) -> list[Any]:
        """None: nothing is read at random."""
        return []

    @property
    def index(self) -> np.ndarray:
        """Empty: nothing is known of the samples."""
        return np.empty(0, INDEX_DTYPE)


def open_stream(
    shards: str,
    num_samples: int,
    num_classes: int,
    class_names: list[str],
    layout: SampleLayout = DEFAULT_LAYOUT,
    retry: RetryPolicy | None = None,
) -> Stream:
    """The stream of `shards`: URLs, files and `pipe:` commands with braces as `expand_braces` takes
    them, several joined by `::`.

    Nothing is opened. Raises ShardError if webdataset is not installed.
    """
    if find_spec("webdataset") is None:
        raise ShardError("data.reader: webdataset needs another package: pip install webdataset")
    urls = [url for part in shards.split("::") for url in expand_braces(part)]
    return Stream(urls, num_samples, num_classes, class_names, layout, retry or RetryPolicy())


class _Sample(NamedTuple):
    key: str
    number: int
    """63 bits of a hash of the key."""
    label: int
    data: bytes
    width: int
    height: int
    """0 x 0 if the image has no size that could be read."""


class StreamBatches(Batches):
    """This rank's rows of a batch: whatever the stream of the process that makes them holds next.
    See `TrainBatches`."""

    repeatable = False

    def __init__(
        self,
        split: Stream,
        order: Order,
        augment: AugmentConfig,
        image_format: ImageFormat,
        *,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        on_bad_image: str = "error",
    ):
        self.split = split
        self.order = order
        self.augment = augment
        self.image_format = image_format
        share = order.global_batch_size // world_size
        self.first_row = rank * share
        self.on_bad_image = on_bad_image
        self.layout = BatchLayout(share, image_format, table_layout(augment).width)
        self.row_unit = augment.mix_group_size if mixes(augment) else 1
        self._num_processes = max(num_workers, 1)
        self._first_reader = rank * self._num_processes
        self._num_readers = world_size * self._num_processes
        self._begun = multiprocessing.Value("i", 0)
        self._pid = 0
        self._samples: Iterator[_Sample] = iter(())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pid": 0, "_samples": iter(())}

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        """Make rows `first` and following of the batch at `position` in the tensors of `rows`.
        Returns the keys of bad images."""
        first += self.first_row
        epoch = position // self.order.steps_per_epoch
        if self._pid != os.getpid():  # a new process: the next free share of the stream is its own
            with self._begun.get_lock():
                reader = self._first_reader + self._begun.value % self._num_processes
                self._begun.value += 1
            self._pid, self._samples = os.getpid(), self._shuffled(reader, epoch)
        samples = list(itertools.islice(self._samples, len(rows.labels)))
        ids = np.array([sample.number for sample in samples], np.int64)
        widths, heights = np.maximum([(sample.width, sample.height) for sample in samples], 1).T
        keys = sample_keys(self.order.seed, epoch, ids)
        crops = draw_crops(self.augment, keys, widths, heights, self.image_format.size).tolist()
        weights = np.ones(len(ids), dtype=np.float32)
        bad_keys = []
        for row, (sample, crop) in enumerate(zip(samples, crops, strict=True)):
            try:
                size = (sample.width, sample.height)
                out = [rows.images[row]]
                decode_views(
                    sample.data,
                    [crop],
                    self.image_format.size,
                    self.image_format.interpolation,
                    self.image_format.channels,
                    out=out,
                    stored_size=size,
                )
            except ValueError as error:
                if self.on_bad_image == "error":
                    raise ShardError(
                        f"image {sample.key!r} of the stream: {error}; data.on_bad_image=skip"
                        " trains without it"
                    ) from None
                rows.images[row] = 0
                weights[row] = 0.0
                bad_keys.append(sample.key)
        table = draw_table(self.augment, keys, widths, heights, self.image_format.size)
        draw_mix(
            self.augment, table, weights, self.order.seed, position, first, self.image_format.size
        )
        write_rows(rows, [sample.label for sample in samples], weights, table, ids)
        return tuple(bad_keys)

    def _shuffled(self, reader: int, epoch: int) -> Iterator[_Sample]:
        """The samples of one of the readers, without end, each drawn at random from a buffer."""
        buffer: list[_Sample] = []
        held_bytes = 0
        draws = fold(self.order.seed, epoch, reader)
        # else a buffer would hold several passes
        most = min(SHUFFLE_SAMPLES, self.split.num_samples // self._num_readers // 4)
        for number, sample in enumerate(self._passes(reader, epoch)):
            buffer.append(sample)
            held_bytes += len(sample.data)
            while buffer and (len(buffer) > most or held_bytes > SHUFFLE_BYTES):
                chosen = int(hash64(draws ^ np.uint64(number)) % np.uint64(len(buffer)))
                buffer[chosen], buffer[-1] = buffer[-1], buffer[chosen]
                held_bytes -= len(buffer[-1].data)
                yield buffer.pop()

    def _passes(self, reader: int, epoch: int) -> Iterator[_Sample]:
        """The samples of one of the readers, pass after pass, the shards of each in an order of its
        own that all readers know."""
        for number in itertools.count():
            urls = self.split.filenames
            seen = 0
            own = 0
            shuffled = [
                urls[i]
                for i in np.argsort(
                    fold(self.order.seed, epoch, number, np.arange(len(urls))), kind="stable"
                )
            ]
            by_shard = len(urls) >= self._num_readers
            own_urls = shuffled[reader :: self._num_readers] if by_shard else shuffled
            for sample in _read_tars(own_urls, self.split.layout, self.split.retry):
                if by_shard or seen % self._num_readers == reader:
                    own += 1
                    yield self._checked(sample)
                seen += 1
            if not own:
                readers = (
                    f"; its {self._num_readers} readers (ranks times data.num_workers) need one"
                    " each at least"
                    if seen
                    else ""
                )
                raise ShardError(
                    f"{_brief(shuffled)}: {seen or 'no'} samples came, expected tars of <key>.jpg"
                    f" and <key>.cls{readers}"
                )

    def _checked(self, sample: dict[str, Any]) -> _Sample:
        """One of webdataset's samples, as we take them."""
        key = sample["__key__"]
        where = f"{shown(sample['__url__'])}: sample {sample['__key__']!r}"
        layout = self.split.layout
        suffixes = [suffix for suffix in sample if not suffix.startswith("__")]
        try:
            image = layout.find(suffixes)
            label = layout.label_of(sample[layout.label_suffix])
        except InvalidSample as error:
            members = [(f"{key}.{suffix}", sample[suffix]) for suffix in suffixes]
            raise ShardError(f"{where} {error}. {describe(members, layout, SETTINGS)}") from error
        if not 0 <= label < self.split.num_classes:
            raise ShardError(f"{where}: label {label}; expected 0 to {self.split.num_classes - 1}")
        data = sample[image]
        number = (
            int.from_bytes(
                hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
            )
            >> 1
        )
        return _Sample(key, number, label, data, *_size_of(data))


def _read_tars(
    urls: list[str], layout: SampleLayout, retry: RetryPolicy
) -> Iterator[dict[str, Any]]:
    """webdataset's samples of some tars, one after the other. Raises ShardError for one that cannot
    be read to its end."""
    from webdataset.tariterators import group_by_keys

    for url in urls:
        try:
            yield from group_by_keys(
                _read_files(url, retry), keys=lambda name: layout.cut(name) or (None, None)
            )
        except ShardError:
            raise
        except Exception as error:  # a damaged tar's, the system's, webdataset's own
            reason = next(
                (str(part) for part in error.args if isinstance(part, str) and part),
                type(error).__name__,
            )
            remedy = "run its command, or fetch its address, by hand to see why"
            raise ShardError(f"{shown(url)}: the stream broke ({reason}); {remedy}") from error


def _read_files(url: str, retry: RetryPolicy) -> Iterator[dict[str, Any]]:
    """The files of a tar, up to its end mark, as webdataset groups them. Raises OSError if its
    command fails, TarDamaged if cut.

    webdataset's own loop takes a damaged header, and an end between two files, for the end of the
    tar, and asks for a command's status without waiting for it. Its way to the web waits for a
    silent server for ever, and cannot go on where a connection broke.
    """
    from webdataset.gopen import gopen, set_options

    stream: Any = (
        io.BufferedReader(WebFile(url, "", retry), PIECE_BYTES) if on_the_web(url) else gopen(url)
    )
    set_options(stream, ignore_errors=True)  # `_wait_for_end` tells them
    try:
        read = in_order(decompressed(stream))
        for member in walk(read):
            # webdataset passes over them as well
            if member.kind == FILE and not META.match(member.name):
                data = read(member.size, member.offset)
                if len(data) < member.size:
                    raise TarDamaged(
                        f"cut off: {member.name!r} of {member.size} bytes begins at byte"
                        f" {member.offset}"
                    )
                yield {"fname": member.name, "data": data, "__url__": url}
    except Exception:
        if not on_the_web(url) and not stream.read(1):
            _wait_for_end(stream)  # if its command failed, that tells more
        raise
    _wait_for_end(stream)


def _wait_for_end(stream: Any) -> None:
    """Close a file, or a command's pipe. Raises OSError if the command failed."""
    stream.close()
    if status := getattr(stream, "status", 0):
        raise OSError(f"its command ended with status {status}")


def _size_of(data: bytes) -> tuple[int, int]:
    """Width and height in pixels; 0, 0 for what is no image, which decoding will tell."""
    try:
        return read_image_size(data)
    except ValueError:
        return 0, 0


def _brief(urls: list[str]) -> str:
    return shown(urls[0]) if len(urls) == 1 else f"{shown(urls[0])} and {len(urls) - 1} more"
