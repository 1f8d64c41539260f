"""Read training batches from a stream of tars, for sources without random access.

`vit.data.storage.http` opens URLs, and the webdataset library opens `pipe:` commands and groups the
files of tars into samples. A truncated tar or a failed command raises an error. Each worker of each
rank reads its own shards. If there are fewer shards than workers, each worker reads all shards and
uses a share of the samples. A buffer shuffles the samples, and each pass over the shards has a
different order. The random numbers used for augmentation depend on a hash of the sample's key.

The order of samples is not exact. Workers read at different speeds, so an epoch of
`stream.num_samples` repeats some samples and omits others. A resumed run starts a new pass.
metrics.jsonl records "exact": false. Evaluation counts each image once, because it reads an indexed
split.
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

from vit.config.sample_layout import SETTINGS
from vit.config.schema import AugmentConfig, Config
from vit.data.batches import AugmentedBatches, Batch, Samples
from vit.data.decode.images import read_image_size
from vit.data.image_format import ImageFormat
from vit.data.order import Order
from vit.data.shards.members import META, InvalidSample, SampleLayout, remedy
from vit.data.shards.split import Split
from vit.data.shards.tar import DEFAULT_LAYOUT, INDEX_DTYPE
from vit.data.shards.tar_walk import FILE, TarDamaged, unpacked, walk
from vit.data.sources import TrainSet
from vit.data.storage.http import PIECE_BYTES, WebFile
from vit.distributed.process_group import World
from vit.feature import Parts
from vit.system.files import ShardError
from vit.system.hashing import fold, hash64
from vit.system.redact import shown
from vit.system.retry import RetryPolicy
from vit.system.urls import expand_braces, on_the_web, resolve

SHUFFLE_SAMPLES = 1000
SHUFFLE_BYTES = 64 << 20
"""The maximum number of samples in a worker's shuffle buffer, and their maximum total bytes."""


@dataclass(frozen=True)
class Stream:
    """A description of a stream, which replaces a `Split` in training."""

    filenames: list[str]
    """The URLs and `pipe:` commands of the shards."""
    num_samples: int
    """The number of samples in an epoch, from the config."""
    num_classes: int
    class_names: list[str]
    layout: SampleLayout = DEFAULT_LAYOUT
    """The names of the files in a tar that contain the image and the label of a sample."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """The retry limits for requests to a server."""
    splits: tuple[()] = ()
    """Empty, because a stream has no random access."""
    index: np.ndarray = field(default_factory=lambda: np.empty(0, INDEX_DTYPE))
    """Empty, because samples are not known in advance."""

    def identity(self) -> str:
        """Return the hash of an empty index, because a stream has no index."""
        return hashlib.sha256().hexdigest()


def open_stream(
    shards: str,
    num_samples: int,
    num_classes: int,
    class_names: list[str],
    layout: SampleLayout = DEFAULT_LAYOUT,
    retry: RetryPolicy | None = None,
) -> Stream:
    """Return a stream of `shards`, without opening them.

    shards: URLs, files and `pipe:` commands, joined by `::`. Braces are expanded (see
    `expand_braces`). Raises ShardError if webdataset is not installed.
    """
    if find_spec("webdataset") is None:
        raise ShardError("stream.urls needs the webdataset package: pip install webdataset")

    urls: list[str] = []
    for part in shards.split("::"):
        urls += expand_braces(part)

    return Stream(
        filenames=urls,
        num_samples=num_samples,
        num_classes=num_classes,
        class_names=class_names,
        layout=layout,
        retry=retry or RetryPolicy(),
    )


class StreamReader:
    """Reads `stream.urls`. See `TrainReader`."""

    def open_splits(self, config: Config, world: World | None = None) -> list[Split]:
        """Return [], because a stream has no random access."""
        return []

    def choose(
        self,
        config: Config,
        splits: list[Split],
        val_split: Split,
        world: World | None = None,
        num_classes: int | None = None,
    ) -> TrainSet:
        """Return the training stream of `config`, with the classes of `val_split`."""
        settings = config.stream
        assert settings.urls is not None, "the feature is on"
        assert settings.num_samples is not None, "the schema requires it"

        stream = open_stream(
            resolve(settings.urls),
            num_samples=settings.num_samples,
            num_classes=max(val_split.num_classes, num_classes or 0),
            class_names=val_split.class_names,
            layout=SampleLayout(
                settings.image, settings.label, class_names=tuple(val_split.class_names)
            ),
            retry=RetryPolicy(config.loader.patience_s),
        )

        return TrainSet(stream, settings.num_samples)

    def create_batches(
        self,
        config: Config,
        train_set: TrainSet,
        order: Order,
        image_format: ImageFormat,
        world: World,
        *,
        rows: range,
        num_batches: int,
    ) -> StreamBatches:
        """See `TrainReader`."""
        return StreamBatches(
            train_set.split,
            order,
            config.augment,
            image_format,
            rank=world.rank,
            world_size=world.size,
            num_workers=config.loader.num_workers,
            on_bad_image=config.loader.on_bad_image,
        )


def parts(config: Config) -> Parts:
    """Return the parts of a run that streams its training images."""
    return Parts(reader=StreamReader())


class _Sample(NamedTuple):
    key: str
    number: int
    """The sample's number: 63 bits of a hash of its key."""
    label: int
    data: bytes
    width: int
    height: int
    """Width and height are 1 if they cannot be read. Decoding reports such an image."""


class StreamBatches(AugmentedBatches):
    """The batches of this rank. Each worker fills rows with the next samples of its own stream.

    See `TrainBatches`.
    """

    exact = False

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
        num_rows = order.global_batch_size // world_size
        super().__init__(
            split,
            order,
            augment,
            image_format,
            rows=range(rank * num_rows, (rank + 1) * num_rows),
            on_bad_image=on_bad_image,
        )

        self._num_processes = max(num_workers, 1)
        self._first_reader = rank * self._num_processes
        self._num_readers = world_size * self._num_processes
        self._num_started = multiprocessing.Value("i", 0)
        self._pid = 0
        self._samples: Iterator[_Sample] = iter(())

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        """Write the next samples into `rows`, from row `first` of the batch at `position`.

        Returns the keys of images that cannot be decoded.
        """
        if self._pid != os.getpid():  # a new worker, which has no samples yet
            self._pid = os.getpid()
            self._samples = self._shuffled(position // self.order.steps_per_epoch)

        parts = list(itertools.islice(self._samples, len(rows.labels)))
        samples = Samples(
            ids=np.array([sample.number for sample in parts], np.int64),
            copies=0,
            entries=np.array(
                [(sample.label, sample.width, sample.height) for sample in parts],
                [("label", np.int64), ("width", np.int64), ("height", np.int64)],
            ),
            weights=np.ones(len(parts), np.float32),
            groups=[[row] for row in range(len(parts))],
            read=lambda row: parts[row].data,
            key=lambda row: parts[row].key,
            describe=lambda row: f"image {parts[row].key!r} of the stream",
        )
        return self.make_rows(position, self.first_row + first, rows, samples)

    def _shuffled(self, epoch: int) -> Iterator[_Sample]:
        """Yield this process's samples endlessly in random order, using a buffer."""
        with self._num_started.get_lock():  # Each new process reads the next share of the stream.
            reader = self._first_reader + self._num_started.value % self._num_processes
            self._num_started.value += 1

        buffer: list[_Sample] = []
        buffer_bytes = 0
        draws = fold(self.order.seed, epoch, reader)
        # With a larger buffer, several passes over a small stream would mix.
        max_samples = min(SHUFFLE_SAMPLES, self.split.num_samples // self._num_readers // 4)

        for number, sample in enumerate(self._passes(reader, epoch)):
            buffer.append(sample)
            buffer_bytes += len(sample.data)
            while len(buffer) > max_samples or buffer_bytes > SHUFFLE_BYTES:
                chosen = int(hash64(draws ^ np.uint64(number)) % np.uint64(len(buffer)))
                buffer[chosen], buffer[-1] = buffer[-1], buffer[chosen]
                buffer_bytes -= len(buffer[-1].data)
                yield buffer.pop()

    def _passes(self, reader: int, epoch: int) -> Iterator[_Sample]:
        """Yield a reader's samples, pass after pass. All readers use the same shard order."""
        urls = self.split.filenames
        num_readers = self._num_readers
        has_own_shards = len(urls) >= num_readers
        for number in itertools.count():
            hashes = fold(self.order.seed, epoch, number, np.arange(len(urls)))
            own_urls = [urls[i] for i in np.argsort(hashes, kind="stable")]
            if has_own_shards:
                own_urls = own_urls[reader::num_readers]

            num_seen = num_own = 0
            for sample in _read_tars(own_urls, self.split.layout, self.split.retry):
                if has_own_shards or num_seen % num_readers == reader:
                    num_own += 1
                    yield self._checked(sample)
                num_seen += 1

            if not num_own:
                more = f" and {len(own_urls) - 1} more" if len(own_urls) > 1 else ""
                raise ShardError(
                    f"{shown(own_urls[0])}{more}: {num_seen or 'no'} samples found, expected tars"
                    " of <key>.jpg and <key>.cls with at least one sample for each of the"
                    f" {num_readers} readers (ranks times loader.num_workers)"
                )

    def _checked(self, sample: dict[str, Any]) -> _Sample:
        """Convert a webdataset sample. Raises ShardError if its image or label is missing."""
        key = sample["__key__"]
        prefix = f"{shown(sample['__url__'])}: sample {key!r}"

        layout = self.split.layout
        suffixes = [suffix for suffix in sample if not suffix.startswith("__")]
        try:
            image_suffix = layout.find(suffixes)
            label = layout.label_of(sample[layout.label_suffix])
        except InvalidSample as error:
            members = {suffix: sample[suffix] for suffix in suffixes}
            raise ShardError(f"{prefix} {error}{remedy(members, layout, SETTINGS)}") from error

        if not 0 <= label < self.split.num_classes:
            raise ShardError(
                f"{prefix}: the label is {label}, expected 0 to {self.split.num_classes - 1}"
            )

        data = sample[image_suffix]
        try:
            width, height = read_image_size(data)
        except ValueError:
            width, height = 1, 1  # Decoding will fail too, which `on_bad_image` handles.

        # The number seeds the random augmentation of this image.
        digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        return _Sample(
            key=key,
            number=int.from_bytes(digest) >> 1,  # fits in int64
            label=label,
            data=data,
            width=width,
            height=height,
        )


def _read_tars(
    urls: list[str], layout: SampleLayout, retry: RetryPolicy
) -> Iterator[dict[str, Any]]:
    """Yield webdataset's samples from the tars, one tar after the other.

    Raises ShardError if a tar cannot be read to its end.
    """
    from webdataset.tariterators import group_by_keys

    for url in urls:
        try:
            yield from group_by_keys(
                _read_files(url, retry), keys=lambda name: layout.cut(name) or (None, None)
            )
        except ShardError:
            raise
        except Exception as error:  # from a damaged tar, the system or webdataset
            texts = [part for part in error.args if isinstance(part, str) and part]
            reason = texts[0] if texts else type(error).__name__
            raise ShardError(
                f"{shown(url)}: the stream was interrupted ({reason}): to find the cause, run the"
                " command or download the URL by hand"
            ) from error


def _read_files(url: str, retry: RetryPolicy) -> Iterator[dict[str, Any]]:
    """Yield the files of a tar, in the form that webdataset groups into samples.

    Raises OSError if the command fails, and TarDamaged if the tar is truncated. webdataset's own
    loop is not used, because it treats a damaged header or a missing end as the end of the tar. It
    also reads a command's status without waiting. webdataset's HTTP reader has no timeout and
    cannot continue after a broken connection.
    """
    from webdataset.gopen import gopen, set_options

    stream: Any
    if on_the_web(url):
        stream = io.BufferedReader(WebFile(url, "", retry), PIECE_BYTES)
    else:
        stream = gopen(url)
    set_options(stream, ignore_errors=True)  # `_wait_for_end` reports errors

    try:
        read = unpacked(stream)
        for member in walk(read):
            if member.kind != FILE or META.match(member.name):
                # webdataset also skips these members.
                continue
            data = read(member.size, member.offset)
            if len(data) < member.size:
                raise TarDamaged(
                    f"truncated: too short for the member {member.name!r} of {member.size} bytes at"
                    f" byte {member.offset}"
                )
            yield {"fname": member.name, "data": data, "__url__": url}
    except Exception:
        if not on_the_web(url) and not stream.read(1):
            _wait_for_end(stream)  # If the command failed, its error is clearer.
        raise
    _wait_for_end(stream)


def _wait_for_end(stream: Any) -> None:
    """Close a file or a command's pipe. Raises OSError if the command failed."""
    stream.close()
    status = getattr(stream, "status", 0)
    if status:
        raise OSError(f"the command exited with status {status}")
