"""The one writer of all sources: a catalogue of samples in, shards out. Free of torch.

The data's story: a source lists its samples (key, label, where the bytes are) for each split; a seed deals them to a fixed
number of shards, whose lengths differ by one at most; worker processes fetch, check and, where needed, convert each image
and write one shard at a time; the index and `_info.json` follow when every shard is whole.

    <root>/                 the format is told in vit/data/shards.py
      _writing.json         what this folder is for; from the first moment until `_info.json` takes its place
      .train-00000.tar.*    a shard being written; gets its name when it is complete and on the disk
      train-00000.tar  train-00000.idx  train-00000.json      written in this order
      train.index.npy  _info.json                             written last

Shard k is a pure function of (catalogue, options, k). So the number of workers and the order in which they finish leave no
trace in the bytes, and the same command run again after a kill only writes the shards that are missing. For the same reason
several machines can share the work (`--shards`): each writes its part, and whoever finds all shards whole writes the rest.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from data_prep.jobs import PrepError, UnreadableImages, count_one, run_jobs
from vit.data import shards
from vit.data.files import read_json, replacing, write_json
from vit.data.tar import TAR_BLOCK, index_rows, scan_tar, write_idx

SHARD_BYTES = 768 << 20
"""Aimed size of a shard when there is enough data: big enough for sequential disks, small enough to copy again."""
MIN_SHARDS = 8
"""Shards of a small train split: enough to share between the workers of readers that cannot seek."""
MAX_KEY_BYTES = 90
"""A ustar header holds names of 100 bytes, extension included."""


class Sample(NamedTuple):
    """One image of a source. `origin` is whatever the catalogue's `read` needs to get the bytes; it is pickled."""

    key: str
    label: int
    origin: Any


@dataclass(frozen=True)
class Catalogue:
    """All samples of a source, in any order: the order of the shards comes from the keys and the seed."""

    source: str
    """Name of the source, recorded in `_info.json`."""
    options: dict[str, Any]
    """The source's own settings that decide what is written (JSON values)."""
    class_names: list[str]
    """Name of each label."""
    splits: Mapping[str, Sequence[Sample]]
    """Samples by split; the first is the training split."""
    read: Callable[[Any], bytes]
    """Encoded image of a sample's `origin`; a module-level function, as it runs in worker processes."""


# ---- samples to shards ----------------------------------------------------------------------------------------------


def stable_hash(*parts: Any) -> bytes:
    """8 bytes that depend on the parts' text alone: not on the process (as `hash` does), nor on a library's version."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode("utf-8", "surrogateescape"), digest_size=8).digest()


def safe_key(text: str) -> str:
    """`text` as a key: no dot (webdataset ends the key at the first), no slash, no blank, at most 90 bytes.

    What is longer keeps its beginning and ends in a hash of the whole.
    """
    key = re.sub(r"[./\\\s\x00-\x1f]", "_", text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
    if len(key.encode()) > MAX_KEY_BYTES:
        key = f"{key.encode()[: MAX_KEY_BYTES - 17].decode(errors='ignore')}_{stable_hash(text).hex()}"
    return key


def deal(samples: Sequence[Sample], num_shards: int, seed: int) -> list[list[Sample]]:
    """Samples of each shard: a permutation keyed by (seed, key), dealt like cards, so lengths differ by one at most."""
    order = sorted(samples, key=lambda sample: (stable_hash(seed, sample.key), sample.key))
    return [order[shard::num_shards] for shard in range(num_shards)]


def choose_num_shards(catalogue: Catalogue, num_shards: int | None) -> dict[str, int]:
    """Shards of each split. `num_shards` is for the first (train); the others get as many in proportion, at least 1.

    By default train gets one for each 768 MiB, but at least 8; its size is estimated from 64 samples.
    """
    train = next(iter(catalogue.splits.values()))
    if num_shards is None:
        by_key = sorted(train)[:: max(1, len(train) // 64)]
        sizes = []
        for sample in by_key:
            try:
                sizes.append(len(catalogue.read(sample.origin)))
            except (OSError, ValueError):
                continue  # an image that cannot be read is reported with all the others, when its shard is written
        mean_bytes = sum(sizes) / max(1, len(sizes))
        num_shards = min(len(train), max(MIN_SHARDS, round(len(train) * mean_bytes / SHARD_BYTES)))
    chosen = {split: max(1, round(num_shards * len(samples) / len(train))) for split, samples in catalogue.splits.items()}
    for split, samples in catalogue.splits.items():
        if chosen[split] > len(samples):
            raise PrepError(
                f"{chosen[split]} shards for the {len(samples)} samples of split {split!r}; use --num-shards {len(train)} or fewer"
            )
    return chosen


def _checked(catalogue: Catalogue) -> Catalogue:
    """The catalogue with safe keys. Raises PrepError for empty splits, equal keys and labels without a class."""
    splits = {}
    for split, samples in catalogue.splits.items():
        if not samples:
            raise PrepError(f"split {split!r} has no samples")
        splits[split] = [sample._replace(key=safe_key(sample.key)) for sample in samples]
        twice = [key for key, count in Counter(sample.key for sample in splits[split]).items() if count > 1]
        if twice:
            raise PrepError(
                f"split {split!r}: {len(twice)} keys are used more than once: {_some(sorted(twice))}; "
                "keys must differ (dots, slashes and blanks count as '_')"
            )
        outside = [sample.key for sample in splits[split] if not 0 <= sample.label < len(catalogue.class_names)]
        if outside:
            raise PrepError(f"split {split!r}: {len(outside)} labels lie outside [0, {len(catalogue.class_names)}): {_some(outside)}")
    return Catalogue(catalogue.source, catalogue.options, catalogue.class_names, splits, catalogue.read)


def _some(items: list[str], most: int = 5) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


# ---- one shard, in a worker process ---------------------------------------------------------------------------------


class Shard(NamedTuple):
    """What a worker needs to write one shard. `plan` is the fingerprint of catalogue and options."""

    tar: Path
    samples: list[Sample]
    read: Callable[[Any], bytes]
    plan: str


def as_jpeg(data: bytes) -> bytes:
    """The image as RGB or grey JPEG: such bytes pass untouched after a full decode, all else is encoded at quality 95.

    Raises whatever Pillow raises for images it cannot decode to the end.
    """
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        if image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):  # MPO: a JPEG with further ones behind it
            return data
        encoded = io.BytesIO()
        image.convert("RGB").save(encoded, "JPEG", quality=95)
        return encoded.getvalue()


def _add_member(tar: BinaryIO, name: str, data: bytes) -> None:
    """Append a ustar member. By hand, as `tarfile` fills unused fields differently from one Python to the next."""
    fields = (name.encode(), b"0000644", b"0000000", b"0000000", b"%011o" % len(data), b"0" * 11)  # mode uid gid size mtime
    header = struct.pack("100s8s8s8s12s12s8s1s100s6s2s247x", *fields, b" " * 8, b"0", b"", b"ustar", b"00")
    tar.write(header[:148] + b"%06o\0 " % sum(header) + header[156:])
    tar.write(data + bytes(-len(data) % TAR_BLOCK))


def _write_shard(shard: Shard) -> np.ndarray:
    """Write tar, idx and sidecar of one shard and return its index rows. Raises UnreadableImages; the tar is then absent."""
    for leftover in shard.tar.parent.glob(f".{shard.tar.stem}.*.tmp"):
        if not _is_being_written(leftover):
            leftover.unlink(missing_ok=True)  # of a killed writer
    unreadable = []
    with replacing(shard.tar) as tar:
        for sample in shard.samples:
            try:
                data = as_jpeg(shard.read(sample.origin))
            except Exception as error:  # a decoder may raise anything for a damaged image
                reason = "not an image Pillow knows" if isinstance(error, UnidentifiedImageError) else str(error)
                place = f" ({sample.origin})" if isinstance(sample.origin, (str, Path)) else ""
                unreadable.append(f"{sample.key}{place}: {reason}")
            else:
                _add_member(tar, f"{sample.key}.jpg", data)
                _add_member(tar, f"{sample.key}.cls", b"%d" % sample.label)
            count_one()
        if unreadable:
            raise UnreadableImages(unreadable)
        tar.write(bytes(2 * TAR_BLOCK))
        tar.flush()
        scanned = scan_tar(tar.name)  # the reader's view of it, before it gets its name
        assert [(s.key, s.label) for s in scanned] == [(s.key, s.label) for s in shard.samples]
    write_idx(shard.tar, scanned)
    shards.write_sidecar(shard.tar, len(scanned), plan=shard.plan)
    return index_rows(scanned)


def _is_being_written(temporary: Path) -> bool:
    """Whether a live process has this file (overlapping `--shards`, a task repeated too early): it may finish, its bytes are the same.

    Of this host the process id in the name tells; of another one, whether the file has changed in the last ten minutes.
    """
    try:
        host, process = temporary.name.removesuffix(".tmp").rsplit(".", 1)
        if not host.endswith(f".{socket.gethostname()}"):
            return time.time() - temporary.stat().st_mtime < 600
        os.kill(int(process), 0)
    except PermissionError:
        return True  # alive, and somebody else's
    except (OSError, ValueError):
        return False
    return True


def _rows_of_whole_shard(tar: Path) -> np.ndarray:
    return index_rows(scan_tar(tar))


# ---- all shards -----------------------------------------------------------------------------------------------------


def write(
    catalogue: Catalogue, root: Path | str, *, num_shards: int | None = None, seed: int = 0, workers: int = 1, part: str | None = None
) -> None:
    """Write all splits of a catalogue to `root`, or complete them. Prints what it does.

    num_shards: of the first split, see `choose_num_shards`. seed: deals samples to shards. workers: processes, of no influence
    on the bytes. part: write these shards only, see `choose_part`; index and `_info.json` follow in the call that finds all
    shards whole, be they several at once.

    Raises PrepError, with nothing overwritten, if `root` holds another catalogue or other options, and listing all images
    that cannot be read (then there is no `_info.json`, and whole shards are kept). OSError: disk full, no permission; the
    same command continues.
    """
    start = time.monotonic()
    root = Path(root)
    catalogue = _checked(catalogue)
    counts = choose_num_shards(catalogue, num_shards)
    mine = choose_part(part, counts)
    plan = _plan(catalogue, counts, seed)
    _claim(root, plan)
    fingerprint = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()

    filenames = {split: [f"{split}-{k:05d}.tar" for k in range(count)] for split, count in counts.items()}
    tars = [root / name for names in filenames.values() for name in names]
    hands = [hand for split, samples in catalogue.splits.items() for hand in deal(samples, counts[split], seed)]
    todo = [Shard(tars[k], hands[k], catalogue.read, fingerprint) for k in mine if not _is_whole(tars[k], fingerprint)]
    if len(todo) < len(mine):
        print(f"{root}: {len(mine) - len(todo)} of {len(mine)} shards are whole already and are kept")
    jobs: list[tuple[Callable[[Any], Any], Any, Any]] = [(_write_shard, shard, shard.tar) for shard in todo]
    rows = run_jobs(jobs, workers, what="writing", num_images=sum(len(shard.samples) for shard in todo))

    if part is not None:
        if missing := [tar.name for tar in tars if not _is_whole(tar, fingerprint)]:
            written = f"{len(todo)} shards of part {part} written, {time.monotonic() - start:.1f} s"
            print(f"{root}: {written}; {len(missing)} of {len(tars)} are still missing ({_some(missing)}), other parts write them")
            return
        if not todo and (root / "_info.json").exists():
            print(f"{root}: complete already")
            return
    rows |= run_jobs([(_rows_of_whole_shard, tar, tar) for tar in tars if tar not in rows], workers, what="reading whole shards")
    for split, names in filenames.items():
        shards.write_index(root, split, [rows[root / name] for name in names])
    shards.write_info(
        root,
        filenames,
        source=plan["source"],
        options=plan["options"],
        catalogue=plan["catalogue"],
        class_names=catalogue.class_names,
        num_classes=len(catalogue.class_names),
    )
    (root / "_writing.json").unlink(missing_ok=True)
    for split, names in filenames.items():
        num_bytes = sum(_size(root / name) for name in names)
        print(f"{split}: {len(catalogue.splits[split]):,} samples in {len(names)} shards, {num_bytes / 1e6:,.1f} MB")
    print(f"{root}: complete, {len(catalogue.class_names)} classes, {time.monotonic() - start:.1f} s")


def choose_part(part: str | None, counts: Mapping[str, int]) -> range:
    """Numbers of the shards that `part` names, counted over all splits, train first: with {"train": 8, "val": 2} val has 8 and 9.

    part: "A-B", from A to B, both included; "I/N", the I-th of N equal parts, I from 0 (an empty one if N is larger than the
    number of shards); None: all. Raises PrepError for anything else.
    """
    total = sum(counts.values())
    if part is None:
        return range(total)
    there = "; ".join(f"{split} has {count}" for split, count in counts.items())
    if match := re.fullmatch(r"([0-9]+)-([0-9]+)", part):
        first, last = int(match[1]), int(match[2])
        if first <= last < total:
            return range(first, last + 1)
        raise PrepError(f"--shards {part}: there are shards 0 to {total - 1} ({there}), and A-B goes upwards")
    if match := re.fullmatch(r"([0-9]+)/([0-9]+)", part):
        number, parts = int(match[1]), int(match[2])
        if number < parts:
            return range(number * total // parts, (number + 1) * total // parts)
        raise PrepError(f"--shards {part}: {f'{parts} parts are numbered 0 to {parts - 1}' if parts else 'there cannot be 0 parts'}")
    raise PrepError(f"--shards {part}: expected A-B, such as 100-199, or I/N, such as 0/8, for the first of 8 parts")


def _is_whole(tar: Path, fingerprint: str) -> bool:
    """A shard of this very plan is there, with its sidecar, which is written last."""
    sidecar = shards.read_sidecar(tar)
    return sidecar is not None and sidecar.get("plan") == fingerprint and _size(tar) == sidecar["bytes"]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def _plan(catalogue: Catalogue, counts: dict[str, int], seed: int) -> dict[str, Any]:
    """All that decides the bytes, in the form `_writing.json` and `_info.json` record it."""
    digest = hashlib.sha256(json.dumps(catalogue.class_names).encode())
    for split, samples in catalogue.splits.items():
        for key, label in sorted((sample.key, sample.label) for sample in samples):
            digest.update(f"{split}\t{key}\t{label}\n".encode())
    options = {**catalogue.options, "seed": seed, "num_shards": counts}
    return {"source": catalogue.source, "options": options, "catalogue": digest.hexdigest()}


def _claim(root: Path, plan: dict[str, Any]) -> None:
    """Make `root` and note what it is for. Raises PrepError if it is for something else."""
    root.mkdir(parents=True, exist_ok=True)
    # In this order: another part may begin or end meanwhile, and tars are never there without one of the two files.
    foreign = sorted(path.name for path in root.glob("*.tar"))
    there = read_json(root / "_writing.json") or read_json(root / "_info.json")
    if there is None:
        if foreign:
            raise PrepError(f"{root}: holds shards of unknown origin ({_some(foreign)}); choose another --out")
        write_json(root / "_writing.json", plan)
        return
    flat, asked = ({**part.get("options", {}), **{key: part.get(key) for key in ("source", "catalogue")}} for part in (there, plan))
    differ = [
        f"{key} is {_short(flat.get(key))} there, {_short(asked.get(key))} here"
        for key in sorted(flat.keys() | asked.keys())
        if flat.get(key) != asked.get(key)
    ]
    if differ:
        raise PrepError(
            f"{root}: holds another data set or other options: {'; '.join(differ)}. Nothing was changed; use the "
            "same options, choose another --out or delete the folder"
        )


def _short(value: Any) -> str:
    """A value in an error message; of a sha256 the first 8 digits tell enough."""
    return f"{value[:8]}..." if isinstance(value, str) and len(value) == 64 else json.dumps(value)
