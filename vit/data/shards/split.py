"""An open split of a data set, which reads the encoded image of any sample by its number.

The index contains the position of each image, and `tars` reads the bytes. The checksum of the bytes
must match the index. If the index has no checksums, the size in the preceding tar header must
match. `vit.data.storage.opening.open_split` checks and opens a split.
"""

from __future__ import annotations

import bisect
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vit.data.decode.images import decode
from vit.data.shards.index_file import first_samples, index_sha256, open_index, unmapped
from vit.data.shards.local_tars import LocalTars
from vit.data.shards.members import SampleLayout
from vit.data.shards.reader import TarReader, Version
from vit.data.shards.tar import DEFAULT_LAYOUT, crc32c, member_size
from vit.data.shards.tar_walk import TAR_BLOCK, TarDamaged, padded, walk
from vit.system.files import ShardError

FLIPPED = (
    "twice returned other bytes than the indexed ones, so a bit flipped on the disk or in transit"
)
log = logging.getLogger(__name__)


class Split:
    """One split of a data set, opened by `open_split`.

    A split can be read from any number of threads, after a fork, and after pickling. File
    descriptors and connections are not pickled. A memory-mapped index is pickled as its path.
    """

    def __init__(
        self,
        root: Path | str,
        name: str,
        filenames: list[str],
        lengths: list[int],
        index: Any,
        num_classes: int,
        class_names: list[str],
        tars: TarReader | None = None,
        layout: SampleLayout = DEFAULT_LAYOUT,
        apply_exif: bool = False,
    ):
        """Create a split from parts that `open_split` has checked.

        Args:
            root: The folder or URL.
            lengths: The number of samples in each shard.
            index: (num_samples,) INDEX_DTYPE; an array, or an object that is indexed like one, as
                in `vit.data.shards.split_slice`.
            class_names: The name of each label, [] if unknown.
            apply_exif: Whether images were rotated upright when the shards were written.
        """
        self.root = root
        self.name = name
        self.filenames = filenames
        self.lengths = lengths
        self.index = index
        self.num_samples = len(index)
        self.num_classes = num_classes
        self.class_names = class_names
        self.tars: TarReader = tars or LocalTars(Path(root), filenames)
        self.apply_exif = apply_exif
        self._layout = layout
        self._firsts = first_samples(lengths)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        """Return the entire image in RGB and the label, as in torchvision.

        Training does not use this method but decodes windows (`vit.data.batches`). A negative `i`
        counts from the end. Raises IndexError if `i` is out of range, and ShardError in the same
        cases as `read`.
        """
        i = range(self.num_samples)[i]
        return Image.fromarray(decode(self.read(i))), int(self.index[i]["label"])

    def read(self, i: int) -> bytes:
        """Return the encoded image of sample `i` (0 <= i < num_samples) as stored.

        Raises ShardError with shard, key and offset if the shard is missing, truncated, replaced or
        unreadable. Also raises ShardError if two reads do not match the checksum.
        """
        row = self.index[i]
        shard = self._shard_of(i)
        offset, size, checksum = int(row["offset"]), int(row["size"]), int(row["crc32c"])

        data, problem = self._read_once(i, shard, offset, size, checksum)
        if problem == FLIPPED:
            # The page cache or the block cache may contain a damaged copy, so drop the bytes from
            # both, and read again.
            self.tars.forget(i, shard, size, offset)
            data, problem = self._read_once(i, shard, offset, size, checksum)
            if not problem:
                log.warning(
                    "%s: the bytes at offset %d were wrong in the first read and right in the"
                    " second",
                    self.where(i),
                    offset,
                )

        if problem:
            raise self._error(i, shard, offset, size, problem)
        return data

    def _read_once(
        self, i: int, shard: int, offset: int, size: int, checksum: int
    ) -> tuple[bytes, str]:
        """Return the bytes of a sample, and a description of the problem ("" if none).

        checksum: the expected checksum, 0 if unknown.
        """
        try:
            if checksum:
                # Read only the image, because removing a header would require a copy of it.
                data = self.tars.pread(i, shard, size, offset)
                if len(data) == size and crc32c(data) == checksum:
                    return data, ""
                header = self.tars.pread(i, shard, TAR_BLOCK, offset - TAR_BLOCK)
            else:
                block = self.tars.pread(i, shard, TAR_BLOCK + size, offset - TAR_BLOCK)
                header, data = block[:TAR_BLOCK], block[TAR_BLOCK:]
        except OSError as error:
            return b"", f"failed: {error.strerror}"

        if len(data) < size:
            return data, f"returned {len(data)}"
        if member_size(header) != size:
            return data, "found no image of this size, so the shard is not the indexed one"
        return data, FLIPPED if checksum else ""

    def _error(self, i: int, shard: int, offset: int, size: int, problem: str) -> ShardError:
        try:
            key = self.key(i)
        except (ShardError, OSError):
            key = "unknown"
        return ShardError(
            f"{self.where(i)}: sample {i} (key {key}): reading {size} bytes at offset {offset}"
            f" {problem}; restore the shard and start again (if `python -m data_prep.verify"
            f" {self.root}` finds that the index is damaged, delete the index)"
        )

    def _shard_of(self, i: int) -> int:
        return bisect.bisect_right(self._firsts, i) - 1

    def where(self, i: int) -> str:
        """Return the path or URL of the shard that contains sample `i`."""
        return self.tars.where(self._shard_of(i))

    def prepare(self, num_processes: int) -> None:
        """Open files that worker processes will inherit; call this before they start.

        num_processes: number of reading processes on this host.
        """
        self.tars.prepare(num_processes)

    @property
    def versions(self) -> list[Version] | None:
        """The versions of the shards on the server; None for a folder, which each host checks."""
        cached = self.tars.cached
        return None if cached is None or cached.store is None else cached.versions

    @property
    def read_ahead_batches(self) -> int:
        """How many batches in advance to prefetch a sample; 0 if this is not needed."""
        return self.tars.read_ahead_batches

    def prefetch(self, samples: NDArray[np.int64]) -> None:
        """Read or fetch these (n,) samples in the background before they are needed."""
        self.tars.prefetch(samples, self.index, self._firsts)

    def key(self, i: int) -> str:
        """Return the key of sample `i`, read from the tar headers before its image.

        There may be several headers, because a long name needs an additional one (GNU, pax).
        """
        row = self.index[i]
        shard = self._shard_of(i)
        offset = int(row["offset"])

        start = 0
        if i > self._firsts[shard]:
            before = self.index[i - 1]
            start = padded(int(before["offset"]) + int(before["size"]))

        reason = "no tar header"
        try:
            for member in walk(
                lambda size, position: self.tars.pread(i, shard, size, position),
                start,
                offset + int(row["size"]),
                needs_end=False,
            ):
                if member.offset == offset:
                    return self.key_in(member.name)
        except TarDamaged as error:
            reason = str(error)

        raise ShardError(
            f"{self.where(i)}: no tar header before offset {offset} ({reason}); restore the shard,"
            f" or delete {self.name}.index.npy if the shard was replaced on purpose"
        )

    def key_in(self, name: str) -> str:
        """Return the key contained in a member's name."""
        cut = self._layout.cut(name)
        return cut[0] if cut else name

    def identity(self) -> str:
        """Return a hash of the positions of all samples, which identifies the split."""
        return index_sha256(self.index, self.lengths)

    def divided(self, samples: NDArray[np.int64]) -> list[tuple[Split, NDArray[np.int64]]]:
        """Return pairs (source, sample numbers in it) for `samples`. The only source is this
        split."""
        return [(self, samples)]

    @property
    def splits(self) -> list[Split]:
        """The sources: a list that contains only this split."""
        return [self]

    def close(self) -> None:
        """Close the shard files. The next read opens them again."""
        self.tars.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "index": unmapped(self.index)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.index, Path):
            self.index = open_index(self.index)
