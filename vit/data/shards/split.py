"""One split of a data set, opened: the encoded bytes of any sample, by its number. Free of torch.

The data's story: the index says in which row a sample's bytes stand; `tars` reads them; their
checksum must be the index's, or where it has none the size in the tar header in front. Who opens a
split, and what it is checked for before: `vit.data.shards.data_set.open_split`.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vit.data.decode.images import decode
from vit.data.shards.index_file import (
    first_samples,
    has_checksums,
    index_sha256,
    open_index,
    sha256_of,
)
from vit.data.shards.members import SampleLayout
from vit.data.shards.tar import DEFAULT_LAYOUT, crc32c, member_size
from vit.data.shards.tar_walk import TAR_BLOCK, TarDamaged, walk
from vit.data.storage.cached_tars import CachedTars, LocalTars
from vit.data.storage.http import Version
from vit.data.storage.remote import RemoteFolder
from vit.system.files import ShardError

FLIPPED = "gave others than were indexed, twice: a bit flipped on the disk or on the way"
log = logging.getLogger(__name__)


class Split:
    """One split of a data set, opened by `open_split`: the encoded bytes of any sample, by its
    number.

    May be read from any number of threads, after a fork and after pickling (to worker processes):
    reads carry their own position, file descriptors and connections stay behind when pickling, and
    a mapped index travels as its path.
    """

    root: Path | str
    """Folder or URL."""
    name: str
    filenames: list[str]
    lengths: list[int]
    """How many samples each shard has."""
    tars: LocalTars | CachedTars
    """Where the bytes come from."""
    index: np.ndarray
    """(num_samples,) INDEX_DTYPE, or UNCHECKED_DTYPE of an earlier version; normally
    memory-mapped."""
    num_samples: int
    num_classes: int
    class_names: list[str]
    """Name of each label; [] if unknown."""

    def __init__(
        self,
        root: Path | str,
        name: str,
        filenames: list[str],
        lengths: list[int],
        index: np.ndarray,
        num_classes: int,
        class_names: list[str],
        tars: LocalTars | CachedTars | None = None,
        layout: SampleLayout = DEFAULT_LAYOUT,
        sha256: Sequence[str | None] = (),
    ):
        """sha256: what is recorded of each shard, to tell a damaged shard from a damaged index."""
        self.root = root
        self.name = name
        self.filenames = filenames
        self.lengths = lengths
        self.index = index
        self._layout = layout
        self._firsts = first_samples(lengths)
        self._has_checksums = has_checksums(index)
        self.num_samples = len(index)
        self.num_classes = num_classes
        self.class_names = class_names
        self.tars = tars or LocalTars(Path(root), filenames)
        self._sha256 = sha256

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        """Sample `i` to look at, from the end if negative, as torchvision's data sets give it: the
        whole image in RGB, and its label.

        Training reads windows of images instead (`vit.data.batches`). Raises IndexError, and
        ShardError as `read`.
        """
        i = range(self.num_samples)[i]
        return Image.fromarray(decode(self.read(i))), int(self.index[i]["label"])

    def read(self, i: int) -> bytes:
        """Encoded image bytes of sample `i` (0 <= i < num_samples), as stored.

        Raises ShardError with shard, key and offset if the shard is gone, truncated, replaced or
        cannot be read, or the bytes have not the index's checksum, nor when they are read again.
        Where the index has none, the tar header in front of the image is read with it and must say
        the index's size: in a shard that was replaced other images lie elsewhere.
        """
        row = self.index[i]
        shard = self._shard_of(i)
        offset = int(row["offset"])
        size = int(row["size"])
        expected = int(row["crc32c"]) if self._has_checksums else 0
        for is_last in (False, True):
            try:
                data, problem = self._read_once(i, shard, offset, size, expected)
            except OSError as error:
                problem = f"failed: {error.strerror}"
            if not problem:
                if is_last:
                    log.warning(
                        "%s: the bytes at offset %d were read wrongly once, and rightly the second"
                        " time",
                        self.where(i),
                        offset,
                    )
                return data
            if problem != FLIPPED:
                break
            self.tars.forget(i, shard, size, offset)  # what the system, or the cache, keeps of them
        try:
            key = self.key(i)
        except (ShardError, OSError):
            key = "unknown"
        remedy = "restore the shard and start again"
        if problem == FLIPPED:
            remedy = (
                f"copy the shard again (`python -m data_prep.verify {self.root}` tells which are"
                " damaged) and start again"
            )
        if not problem.startswith("failed") and self._is_intact(shard):
            problem = (
                f"{problem.partition(',')[0]}; the shard has its recorded sha256, so the index is"
                " damaged"
            )
            remedy = (
                f"delete {self.root}/{self.name}.index.npy and start again, which makes it of the"
                " shards"
            )
        raise ShardError(
            f"{self.where(i)}: sample {i} (key {key}): reading {size} bytes at offset {offset}"
            f" {problem}; {remedy}"
        )

    def _read_once(
        self, i: int, shard: int, offset: int, size: int, expected: int
    ) -> tuple[bytes, str]:
        """The bytes of a sample, and what is wrong with them: "" for nothing. expected: their
        checksum, 0 for none."""
        # without the header, which would have to be cut off: a copy of the whole image
        if expected:
            data = self.tars.pread(i, shard, size, offset)
            if len(data) == size and crc32c(data) == expected:
                return data, ""
            header = self.tars.pread(i, shard, TAR_BLOCK, offset - TAR_BLOCK)
        else:
            block = self.tars.pread(i, shard, TAR_BLOCK + size, offset - TAR_BLOCK)
            header = block[:TAR_BLOCK]
            data = block[TAR_BLOCK:]
        if len(data) < size:
            return data, f"gave {len(data)}"
        if member_size(header) != size:
            return data, "found no image of this size there, the shard is not the indexed one"
        return data, FLIPPED if expected else ""

    def where(self, i: int) -> str:
        """Path or URL of the shard that sample `i` is in."""
        return self.tars.where(self._shard_of(i))

    def _is_intact(self, shard: int) -> bool:
        """Whether a shard of a folder has its recorded sha256: the whole of it is read."""
        expected = self._sha256[shard] if shard < len(self._sha256) else None
        try:
            return (
                expected is not None
                and isinstance(self.root, Path)
                and expected == sha256_of(self.root / self.filenames[shard])
            )
        except OSError:  # told already: it cannot be read, or its index alone lies here
            return False

    def _shard_of(self, i: int) -> int:
        return bisect.bisect_right(self._firsts, i) - 1

    def prepare(self, num_processes: int) -> None:
        """Before workers start, of whom and of others so many processes of this host will read:
        what they inherit is opened once."""
        self.tars.prepare(num_processes)

    @property
    def versions(self) -> list[Version] | None:
        """Of shards at a URL, what the server has told of each; None for a folder, which each host
        sees for itself."""
        return (
            self.tars.versions
            if isinstance(self.tars, CachedTars) and isinstance(self.tars.folder, RemoteFolder)
            else None
        )

    @property
    def read_ahead_batches(self) -> int:
        """How many batches before it is needed a sample should be given to `prefetch`; 0: never."""
        return self.tars.read_ahead_batches

    def prefetch(self, samples: NDArray[np.int64]) -> None:
        """Say which samples will be read soon, (n,) numbers: they are read, or from a URL fetched,
        in the background."""
        if isinstance(self.tars, CachedTars):
            self.tars.prefetch(samples)
        else:
            rows = self.index[samples]
            shards = np.searchsorted(self._firsts, samples, side="right") - 1
            self.tars.prefetch(shards.tolist(), rows["offset"].tolist(), rows["size"].tolist())

    def key(self, i: int) -> str:
        """Key of sample `i`, from the tar headers between the image before and its own: a name may
        have one of its own (GNU, pax)."""
        row = self.index[i]
        shard = self._shard_of(i)
        offset = int(row["offset"])
        before = self.index[i - 1] if i > self._firsts[shard] else None
        start = (
            0
            if before is None
            else -(-(int(before["offset"]) + int(before["size"])) // TAR_BLOCK) * TAR_BLOCK
        )
        try:
            members = walk(
                lambda size, position: self.tars.pread(i, shard, size, position),
                start,
                offset + int(row["size"]),
                needs_end=False,
            )
            name = next((member.name for member in members if member.offset == offset), None)
            reason = "no tar header"
        except TarDamaged as error:
            name = None
            reason = str(error)
        if name is None:
            where = f"{self.where(i)}: no tar header in front of offset {offset}"
            raise ShardError(
                f"{where} ({reason}); restore the shard, or delete {self.name}.index.npy if it was"
                " replaced"
            )
        return self.key_in(name)

    def key_in(self, name: str) -> str:
        """The key in a member's name."""
        cut = self._layout.cut(name)
        return cut[0] if cut else name

    def identity(self) -> str:
        """A hash of which samples lie where."""
        return index_sha256(self.index, self.lengths)

    def divided(self, samples: NDArray[np.int64]) -> list[tuple[Split, NDArray[np.int64]]]:
        """Itself and `samples`; of several sources each with its own samples, by its own
        numbers."""
        return [(self, samples)]

    @property
    def splits(self) -> list[Split]:
        """Itself; of several sources all of them."""
        return [self]

    def close(self) -> None:
        """Close the shards' file descriptors; the next read opens them again."""
        self.tars.close()

    def __getstate__(self) -> dict[str, Any]:
        index = Path(str(self.index.filename)) if isinstance(self.index, np.memmap) else self.index
        return {**self.__dict__, "index": index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.index, Path):
            self.index = open_index(self.index)
