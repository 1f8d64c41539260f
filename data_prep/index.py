"""Make shards that others wrote readable for us: add what is missing, touch no tar.

    python -m data_prep.index ROOT [--workers N]

The data's story: every `<split>-*.tar` or `<anything>-<split>-*.tar` in ROOT (imagenet1k-train-0000.tar) is scanned and hashed
once; its `.idx` and its sidecar are written beside it, then `<split>.index.npy` for each split and last `_info.json`. An
`_info.json` that is there already says which shards belong to which split; it is compared with the tars and never changed.
Class names are not known from tars, so the number of classes is the largest label of any split plus one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.command import add_workers_argument, run
from data_prep.jobs import PrepError, run_jobs
from vit.data import shards
from vit.data.tar import index_rows, scan_tar, write_idx

SPLIT_NAMES = ("train", "training", "val", "valid", "validation", "test", "dev")


def split_of(filename: str) -> str | None:
    """The split in a shard's name: a usual name between dashes, else the part in front of the number; None without one."""
    *parts, number = filename.removesuffix(".tar").split("-")
    usual = [part for part in parts if part.lower() in SPLIT_NAMES]
    return usual[0] if usual else parts[-1] if parts and number.isdecimal() and parts[-1].isalpha() else None


def find_shards(root: Path) -> dict[str, list[str]]:
    """File names of each split, sorted. Raises PrepError if there are none, or one whose name tells no split."""
    names = sorted(path.name for path in root.glob("*.tar"))
    if not names:
        raise PrepError(f"{root}: no .tar files; expected <split>-00000.tar or <anything>-<split>-00000.tar")
    split_by_name = {name: split_of(name) for name in names}
    if unclear := [name for name, split in split_by_name.items() if split is None]:
        raise PrepError(
            f"{root}: no split in the name of {', '.join(unclear[:5])}; rename to <split>-00000.tar, or move away what is no shard"
        )
    splits: dict[str, list[str]] = {}
    for name, split in split_by_name.items():
        splits.setdefault(str(split), []).append(name)
    return splits


def _index_shard(tar: Path) -> np.ndarray:
    """Write the missing of `.idx` and sidecar, and return the index rows. A sidecar older than its tar does not count."""
    samples = scan_tar(tar)
    if not tar.with_suffix(".idx").exists():
        write_idx(tar, samples)
    sidecar = shards.read_sidecar(tar)
    if sidecar is None or tar.with_suffix(".json").stat().st_mtime < tar.stat().st_mtime:
        shards.write_sidecar(tar, len(samples))
    return index_rows(samples)


def _compare(root: Path, info: dict[str, Any], rows: dict[Path, np.ndarray]) -> None:
    """Raise PrepError listing the shards whose length or size is not what `_info.json` says."""
    problems = []
    for described in info["splits"].values():
        sizes = described.get("shard_bytes") or [None] * len(described["filenames"])
        for name, length, size in zip(described["filenames"], described["shard_lengths"], sizes, strict=True):
            found = (root / name).stat().st_size
            if len(rows[root / name]) != length or size not in (None, found):
                problems.append(
                    f"{name} holds {len(rows[root / name])} samples in {found} bytes, "
                    f"_info.json says {length}{'' if size is None else f' in {size}'}"
                )
    if problems:
        raise PrepError(f"{root}: {'; '.join(problems)}. If the tars are right, move _info.json away and run this again")


def index(root: Path, workers: int = 1) -> None:
    """Write what is missing beside the tars of `root`. Raises PrepError or ShardError; never alters a tar."""
    if not root.is_dir():
        raise PrepError(f"{root}: {'not a folder' if root.exists() else 'no such folder'}; expected a folder of tar shards")
    if (root / "_writing.json").exists() and not (root / "_info.json").exists():
        raise PrepError(f"{root}: a writer has not finished here; run its command again, it continues")
    info = shards.read_info(root) if (root / "_info.json").exists() else None
    if info is None:
        splits = find_shards(root)
    else:
        splits = {split: list(described["filenames"]) for split, described in info["splits"].items()}
    tars = [root / name for names in splits.values() for name in names]
    if missing := [tar.name for tar in tars if not tar.exists()]:
        raise PrepError(f"{root}: shards that _info.json lists are missing: {', '.join(missing[:5])}; copy them again")
    rows = run_jobs([(_index_shard, tar, tar) for tar in tars], workers, what="reading shards")
    if info is not None:
        _compare(root, info, rows)
    for split, names in splits.items():
        shards.write_index(root, split, [rows[root / name] for name in names])
        print(f"{split}: {sum(len(rows[root / name]) for name in names):,} samples in {len(names)} shards")
    if info is None:
        num_classes = max(int(part["label"].max()) for part in rows.values()) + 1
        shards.write_info(root, splits, source="index", options={}, class_names=[], num_classes=num_classes)
    print(f"{root}: indexed{', _info.json was there and fits' if info is not None else ''}")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.index", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path, metavar="ROOT", help="folder of tar shards")
    add_workers_argument(parser)
    return run(lambda args: index(args.root, args.workers), parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
