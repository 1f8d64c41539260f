"""The on-disk format of a data set: what `data_prep` writes and the loader reads. Free of torch.

The data's story: images and their labels are dealt to tar files ("shards"), two members for each sample; one index
row for each sample says where its bytes lie; the loader asks for sample i and gets its encoded bytes with one `pread`.

    <root>/
      _info.json            splits, shard lengths, sizes and sha256, class names, source, options; written last
      train-00000.tar       <key>.jpg, <key>.cls (the label in ASCII), <key>.jpg, ...   plain ustar
      train-00000.idx       the same shard for NVIDIA DALI (text, v1.2)
      train-00000.json      sidecar, written when the shard is whole; `_info.json` is made from these
      train.index.npy       INDEX_DTYPE, one row a sample, in (shard, position) order
      val-00000.tar ...

The tars are the truth: `.idx` and `.index.npy` are rebuilt from them. `_info.json` has timm's layout plus our own keys,
and one without our keys is accepted. `<root>` may be a URL; or a folder that holds `_info.json` and index of shards at one ("shards_at").
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vit.data.block_cache import BlockCache
from vit.data.files import ShardError, read_json, replacing, unreadable, write_json
from vit.data.http import Version
from vit.data.images import decode
from vit.data.members import SampleLayout, recorded_layout
from vit.data.patience import Patience
from vit.data.remote import RemoteFolder, local_path
from vit.data.storage import LocalTars, RemoteTars
from vit.data.tar import DEFAULT_LAYOUT, INDEX_DTYPE, index_rows, scan_tar, size_said_by
from vit.data.tar_walk import TAR_BLOCK, TarDamaged, walk

FORMAT_VERSION = 1
log = logging.getLogger(__name__)


# ---- what describes the tars --------------------------------------------------------------------------------------


def write_sidecar(tar: Path, num_samples: int, sha256: str | None = None, **extra: Any) -> dict[str, Any]:
    """Write and return the sidecar of a whole tar: filename, num_samples, bytes, sha256 (None: of the tar, read again) and `extra`."""
    sidecar = dict(filename=tar.name, num_samples=num_samples, bytes=tar.stat().st_size, sha256=sha256 or sha256_of(tar), **extra)
    write_json(tar.with_suffix(".json"), sidecar)
    return sidecar


def read_sidecar(tar: Path) -> dict[str, Any] | None:
    """The sidecar of `tar`, or None. Raises ShardError if that file exists and is something else."""
    sidecar = read_json(tar.with_suffix(".json"))
    if sidecar is not None and not {"filename", "num_samples", "bytes", "sha256"} <= sidecar.keys():
        raise ShardError(f"{tar.with_suffix('.json')}: not a sidecar of ours, and its place is needed: move it away")
    return sidecar


def make_info(
    splits: dict[str, list[str]],
    sidecars: Mapping[str, dict[str, Any]],
    *,
    source: str,
    options: dict[str, Any],
    class_names: list[str],
    num_classes: int,
    **extra: Any,
) -> dict[str, Any]:
    """The content of `_info.json`.

    splits: shard file names of each split, in order. sidecars: by file name. source, options: where the data come from, recorded as given.
    class_names: name of each label, or [] if unknown.
    """
    info: dict[str, Any] = {"format_version": FORMAT_VERSION, "source": source, "options": options, **extra, "num_classes": num_classes}
    info |= {"class_names": class_names, "splits": {}}
    for split, names in splits.items():
        lengths, sizes, sha256 = ([sidecars[name][key] for name in names] for key in ("num_samples", "bytes", "sha256"))
        described = {"name": split, "num_samples": sum(lengths), "filenames": names, "shard_lengths": lengths}
        info["splits"][split] = described | {"shard_bytes": sizes, "shard_sha256": sha256}
    return info


def read_info(root: Path | str) -> dict[str, Any]:
    """`<root>/_info.json`. Raises ShardError if it is missing, broken or of a later format than this code knows."""
    root = Path(root)
    index_it = f"run `python -m data_prep.index {root}`"
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        raise ShardError(f"{root}: no such directory; expected a folder of shards (`python -m data_prep` lists who makes them)") from None
    except NotADirectoryError:
        raise ShardError(f"{root}: not a directory; expected a folder of shards") from None
    except OSError as error:
        raise unreadable(root, error) from error
    info = read_json(root / "_info.json")
    if info is None and not any(name.endswith(".tar") for name in names):
        write_them = f"`python -m data_prep.imagefolder IMAGES --out {root}` makes them of a folder of images"
        # data_prep refuses to write shards among the images they are made of.
        if any((root / name).is_dir() for name in names if not name.startswith(".")):
            command = shlex.join(("python", "-m", "data_prep.imagefolder", f"{root}", "--out", f"{root}_shards"))
            write_them = f"if it holds folders of images, one for each class, `{command}` makes them"
        raise ShardError(f"{root}: no _info.json and no shards; {write_them}")
    if info is None:
        raise ShardError(f"{root}: no _info.json; if the shards are complete, {index_it}, else repeat the command that writes them")
    return _checked_info(info, root)


def _checked_info(info: dict[str, Any], root: Path | str) -> dict[str, Any]:
    if not isinstance(info.get("splits"), dict) or not info["splits"]:
        raise ShardError(f"{root}/_info.json: no `splits`; move it away and run `python -m data_prep.index {root}`")
    version = info.get("format_version", FORMAT_VERSION)
    if version > FORMAT_VERSION:
        raise ShardError(f"{root}/_info.json: format_version {version}, this code reads up to {FORMAT_VERSION}; update the code")
    return info


# ---- the index ----------------------------------------------------------------------------------------------------


def save_index(path: Path, rows_by_shard: Iterable[np.ndarray]) -> None:
    """Write an index file from the `index_rows` of each shard, in order, one shard in memory at a time."""
    with replacing(path) as file:
        _write_header(file, 0)
        num_samples = 0
        for shard, rows in enumerate(rows_by_shard):
            rows["shard"] = shard
            file.write(rows.tobytes())
            num_samples += len(rows)
        file.seek(0)
        _write_header(file, num_samples)


def _write_header(file: BinaryIO, num_samples: int) -> None:
    """The header of a .npy file; its length does not depend on the number, for which numpy leaves room."""
    described = {"descr": np.lib.format.dtype_to_descr(INDEX_DTYPE), "fortran_order": False, "shape": (num_samples,)}
    np.lib.format.write_array_header_1_0(file, described)


def write_index(root: Path, split: str, rows_by_shard: Iterable[np.ndarray]) -> np.ndarray:
    """Write `<root>/<split>.index.npy` from the `index_rows` of each shard, in order, and return it, mapped.

    Where the folder cannot be written the index is only returned: a read-only data set stays usable.
    """
    path, all_rows = root / f"{split}.index.npy", list(rows_by_shard)
    try:
        save_index(path, all_rows)
        return np.load(path, mmap_mode="r")
    except OSError as error:
        log.warning("%s is kept in memory only (%s); it is rebuilt each time the data are opened", path, error.strerror)
        return np.concatenate(all_rows)


def build_index(root: Path | str, split: str, filenames: list[str] | None = None) -> np.ndarray:
    """Scan the tars of a split, write `<root>/<split>.index.npy` and return it: (num_samples,) INDEX_DTYPE.

    Image and label are where `recorded_layout` says. filenames: the shards in order; by default those in `_info.json`. Raises ShardError
    like `scan_tar`.
    """
    root = Path(root)
    info = read_info(root) if filenames is None or (root / "_info.json").exists() else {}
    names = info["splits"][split]["filenames"] if filenames is None else filenames
    layout = recorded_layout(info, root / names[0])
    return write_index(root, split, (index_rows(scan_tar(root / name, layout, left_out(root / name))) for name in names))


def left_out(tar: Path) -> set[int]:
    """Where samples of a shard begin that `data_prep.index` left out, as its sidecar says: without them lengths fit `_info.json`."""
    return {entry["tar_offset"] for entry in (read_json(tar.with_suffix(".json")) or {}).get("quarantined", []) if "tar_offset" in entry}


def _load_index(
    root: Path, split: str, filenames: list[str], lengths: list[int], sizes: list[int], sha256: list[str | None]
) -> np.ndarray | None:
    """The index file, mapped, or None with the reason logged if it does not fit the tars (sizes: bytes of each).

    Where a tar is at fault and not the index, which the recorded sha256 tells, ShardError is raised: nobody asked for other images.
    """
    path = root / f"{split}.index.npy"
    try:
        index = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        reason = "absent"
    except (ValueError, OSError, EOFError) as error:
        reason = f"unreadable ({error})"
    else:
        if misfit := _misfit(index, lengths, sizes):
            reason = misfit
        # A shard replaced by another of equal length: the header in front of its last image tells, at one read a shard.
        elif moved := [
            shard for shard, row in enumerate(index[np.cumsum(lengths) - 1]) if _size_in_header(root / filenames[shard], row) != row["size"]
        ]:
            # The first of them is enough: hashing a whole data set would take minutes.
            if sha256[moved[0]] not in (None, sha256_of(tar := root / filenames[moved[0]])):
                others = f" ({len(moved) - 1} more shards differ from the index)" if len(moved) > 1 else ""
                raise ShardError(
                    f"{tar}: replaced by a file with other content, its sha256 is not the one in _info.json{others}; "
                    f"copy it again; if that is meant, move _info.json away and run `python -m data_prep.index {root}`"
                )
            reason = "stale (images lie elsewhere in their shard)"
        else:
            return index
    log.warning("%s is %s: rebuilding it from %d shards", path, reason, len(lengths))
    return None


def _misfit(index: np.ndarray, lengths: list[int], sizes: list[int]) -> str:
    """Why an index does not fit shards of these lengths and sizes in bytes, as far as can be told without reading them; "" if it does."""
    if index.dtype != INDEX_DTYPE or index.ndim != 1:
        return "of another format"
    if not np.array_equal(index["shard"], np.repeat(np.arange(len(lengths)), lengths)):
        return "stale (other shard lengths than _info.json)"
    if (index["offset"] + index["size"] > np.array(sizes, np.uint64)[index["shard"]]).any():
        return "stale (images beyond the end of their shard)"
    return ""


def _open_remote(
    folder: RemoteFolder,
    home: Path | None,
    split: str,
    lengths: list[int],
    filenames: list[str],
    versions: list[Version],
    cache: BlockCache,
) -> RemoteTars:
    """The shards in `folder` with their index, which lies beside them or in the folder `home`. Raises ShardError if it does not fit."""
    path = folder.fetch_index(split, cache) if home is None else home / f"{split}.index.npy"
    place = f"{folder}/{split}.index.npy" if home is None else str(path)
    try:
        index = np.load(path, mmap_mode="r")
        reason = _misfit(index, lengths, [version.size for version in versions])
    except (ValueError, OSError, EOFError) as error:
        reason = f"unreadable ({error})"
    if reason:
        remedy = f"make it again with `python -m data_prep.index {folder} --out ROOT`, ROOT being another folder, and give data.root=ROOT"
        raise ShardError(f"{place}: {reason}; {remedy}")
    return RemoteTars(folder, filenames, versions, index, cache)


def _local_versions(root: Path, filenames: list[str]) -> list[Version | str]:
    """Sizes of the shards; a text says why one cannot be told."""

    def version(path: Path) -> Version | str:
        try:
            return Version(os.stat(path).st_size, "")
        except OSError as error:
            return error.strerror or type(error).__name__

    return [version(root / name) for name in filenames]


def _size_in_header(tar: Path, row: np.void) -> int:
    """Size in bytes of an index row's image as the tar header in front of it says, -1 if there is no header."""
    try:
        with open(tar, "rb") as file:
            file.seek(max(0, int(row["offset"]) - TAR_BLOCK))
            return size_said_by(file.read(TAR_BLOCK))
    except OSError as error:
        raise unreadable(tar, error) from error


def sha256_of(path: Path) -> str:
    """Of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- reading ------------------------------------------------------------------------------------------------------


class Split:
    """One split of a data set, opened by `open_split`: the encoded bytes of any sample, by its number.

    May be read from any number of threads, after a fork and after pickling (to worker processes): reads carry their own
    position, file descriptors and connections stay behind when pickling, and a mapped index travels as its path.
    """

    root: Path | str
    """Folder or URL."""
    name: str
    filenames: list[str]
    tars: LocalTars | RemoteTars
    """Where the bytes come from."""
    index: np.ndarray
    """(num_samples,) INDEX_DTYPE, normally memory-mapped."""
    num_samples: int
    num_classes: int
    class_names: list[str]
    """Name of each label; [] if unknown."""

    def __init__(
        self,
        root: Path | str,
        name: str,
        filenames: list[str],
        index: np.ndarray,
        num_classes: int,
        class_names: list[str],
        tars: RemoteTars | None = None,
        layout: SampleLayout = DEFAULT_LAYOUT,
    ):
        self.root, self.name, self.filenames, self.index = root, name, filenames, index
        self._layout = layout
        self.num_samples, self.num_classes, self.class_names = len(index), num_classes, class_names
        self.tars = tars or LocalTars(Path(root), filenames)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        """Sample `i` to look at, from the end if negative, as torchvision's data sets give it: the whole image in RGB, and its label.

        Training reads windows of images instead (`vit.data.loader`). Raises IndexError, and ShardError as `read`.
        """
        i = range(self.num_samples)[i]
        return Image.fromarray(decode(self.read(i))), int(self.index[i]["label"])

    def read(self, i: int) -> bytes:
        """Encoded image bytes of sample `i` (0 <= i < num_samples), as stored.

        Raises ShardError with shard, key and offset if the shard is gone, truncated, replaced or cannot be read. The tar header in front
        of the image is read with it and must say the index's size: in a shard that was replaced other images lie elsewhere.
        """
        row = self.index[i]
        shard, offset, size = int(row["shard"]), int(row["offset"]), int(row["size"])
        try:
            block = self.tars.pread(i, shard, TAR_BLOCK + size, offset - TAR_BLOCK)
            data, said = block[TAR_BLOCK:], size_said_by(block[:TAR_BLOCK])
            problem = f"gave {len(data)}" if len(data) < size else "found no image of this size there, the shard is not the indexed one"
        except OSError as error:
            data, said, problem = b"", size, f"failed: {error.strerror}"
        if len(data) == said == size:
            return data
        try:
            key = self.key(i)
        except (ShardError, OSError):
            key = "unknown"
        where = f"{self.tars.where(shard)}: sample {i} (key {key})"
        raise ShardError(f"{where}: reading {size} bytes at offset {offset} {problem}; restore the shard and start again")

    def where(self, i: int) -> str:
        """Path or URL of the shard of sample `i`."""
        return self.tars.where(int(self.index[i]["shard"]))

    def prepare(self, num_processes: int) -> None:
        """Before workers start, of whom and of others so many processes of this host will read: what they inherit is opened once."""
        self.tars.prepare(num_processes)

    @property
    def read_ahead_batches(self) -> int:
        """How many batches before it is needed a sample should be given to `prefetch`; 0: never."""
        return self.tars.read_ahead_batches

    def prefetch(self, samples: NDArray[np.int64]) -> None:
        """Say which samples will be read soon, (n,) numbers: they are read, or from a URL fetched, in the background."""
        if isinstance(self.tars, RemoteTars):
            self.tars.prefetch(samples)
        else:
            rows = self.index[samples]
            self.tars.prefetch(rows["shard"].tolist(), rows["offset"].tolist(), rows["size"].tolist())

    def key(self, i: int) -> str:
        """Key of sample `i`, from the tar headers between the image before and its own: a name may have one of its own (GNU, pax)."""
        row = self.index[i]
        shard, offset = int(row["shard"]), int(row["offset"])
        before = self.index[i - 1] if i and self.index[i - 1]["shard"] == shard else None
        start = 0 if before is None else -(-(int(before["offset"]) + int(before["size"])) // TAR_BLOCK) * TAR_BLOCK
        try:
            members = walk(
                lambda size, position: self.tars.pread(i, shard, size, position), start, offset + int(row["size"]), needs_end=False
            )
            name = next((member.name for member in members if member.offset == offset), None)
            reason = "no tar header"
        except TarDamaged as error:
            name, reason = None, str(error)
        if name is None:
            where = f"{self.tars.where(shard)}: no tar header in front of offset {offset}"
            raise ShardError(f"{where} ({reason}); restore the shard, or delete {self.name}.index.npy if it was replaced")
        cut = self._layout.cut(name)
        return cut[0] if cut else name

    def close(self) -> None:
        """Close the shards' file descriptors; the next read opens them again."""
        self.tars.close()

    def __getstate__(self) -> dict[str, Any]:
        index = Path(str(self.index.filename)) if isinstance(self.index, np.memmap) else self.index
        return {**self.__dict__, "index": index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.index, Path):
            self.index = np.load(self.index, mmap_mode="r")


def open_split(
    root: Path | str, split: str, cache_dir: Path | str | None = None, cache_gib: float | None = None, patience: Patience | None = None
) -> Split:
    """Open one split of the data set in `root`, a folder or a URL, after checks that read no image.

    An index that is absent or does not fit the tars of a folder is rebuilt from them (a pass over their headers, logged as a warning).
    cache_dir, cache_gib: of shards at a URL, see `BlockCache`. patience: with what does not answer for a while.
    Raises ShardError listing all problems at once: missing folder, `_info.json`, split or shards, shards of another size
    than recorded, lengths that do not add up, labels outside [0, num_classes).
    """
    home = local_path(root)
    shown = str(root).rstrip("/") if home is None else str(home)
    info = _checked_info(RemoteFolder(shown, patience).read_info(), shown) if home is None else read_info(home)
    if split not in info["splits"]:
        near = difflib.get_close_matches(split, info["splits"], n=1, cutoff=0.3)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ShardError(f"{shown}: no split {split!r}; there are {', '.join(info['splits'])}{hint}")
    described = info["splits"][split]
    where = f"{shown}/_info.json, split {split!r}"
    if missing := [key for key in ("filenames", "shard_lengths", "num_samples") if key not in described]:
        raise ShardError(f"{where}: no {', '.join(missing)}; move it away and run `python -m data_prep.index {shown}`")
    filenames, lengths, num_samples = list(described["filenames"]), list(described["shard_lengths"]), described["num_samples"]
    recorded = described.get("shard_bytes") or [None] * len(filenames)
    sha256 = described.get("shard_sha256") or [None] * len(filenames)
    problems = []

    # 1. The shards themselves.
    if not 0 < len(filenames) == len(lengths) == len(recorded) == len(sha256) or sum(lengths) != num_samples:
        counts = f"{len(filenames)} filenames, {len(lengths)} shard_lengths (sum {sum(lengths)}), {len(recorded)} shard_bytes"
        problems.append(f"{where}: {counts} and num_samples {num_samples} do not fit together; restore it from its source")
    elsewhere = info.get("shards_at") if home is None or not any((home / name).exists() for name in filenames) else None
    folder = RemoteFolder(elsewhere or shown, patience) if elsewhere or home is None else None
    found = _local_versions(Path(shown), filenames) if folder is None else folder.stats(filenames)
    remedy = "copy it again or repeat the command that wrote it"
    for name, version, expected in zip(filenames, found, recorded, strict=False):  # other lengths are reported already
        if isinstance(version, str):
            problems.append(f"{folder or shown}/{name}: {version}; {remedy}")
        elif expected not in (None, version.size):
            problems.append(f"{folder or shown}/{name}: {version.size} bytes, expected {expected} (truncated or replaced); {remedy}")
    if problems:
        raise ShardError("\n".join(problems))
    versions = [version for version in found if isinstance(version, Version)]

    # 2. The index; in a folder it is made anew if it does not fit.
    tars, index = None, None
    if folder is not None:
        tars = _open_remote(folder, home, split, lengths, filenames, versions, BlockCache(cache_dir, cache_gib))
        index = tars.index
    elif home is not None:
        index = _load_index(home, split, filenames, lengths, [version.size for version in versions], sha256)
    if index is None:
        index = build_index(shown, split, filenames)
        counted = np.bincount(index["shard"], minlength=len(lengths)).tolist()
        problems += [
            f"{shown}/{name}: holds {n} samples, _info.json says {length}; restore the one that is wrong"
            for name, n, length in zip(filenames, counted, lengths, strict=True)
            if n != length
        ]

    # 3. The labels.
    class_names = list(info.get("class_names") or [])
    num_classes = len(class_names) or info.get("num_classes") or int(index["label"].max()) + 1
    outside = np.flatnonzero((index["label"] < 0) | (index["label"] >= num_classes))
    if len(outside):
        first = f"the first is {index['label'][outside[0]]} (sample {outside[0]}, {filenames[index['shard'][outside[0]]]})"
        problems.append(
            f"{where}: {len(outside)} labels lie outside [0, {num_classes}), {first}; correct the shard, or the classes in _info.json"
        )
    if problems:
        raise ShardError("\n".join(problems))
    layout = replace(recorded_layout(info, home and home / filenames[0]), class_names=())  # a split travels to workers
    return Split(home or shown, split, filenames, index, num_classes, class_names, tars, layout)
