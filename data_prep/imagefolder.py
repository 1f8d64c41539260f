"""Shards from a folder of images, one subfolder for each class.

    python -m data_prep.imagefolder SOURCE --out ROOT [--num-shards N] [--workers N] [--seed N] [--val-fraction F]
                                    [--shards A-B | --shards I/N]

The data's story: SOURCE is `train/<class>/...` with `val/<class>/...` (or `validation`, or `test`), or `<class>/...` alone,
of which each class gives a tenth to `val`. Images may lie in subfolders of their class. A label is the position of the class
among the sorted names of train's classes; a key is the path below the split, without extension, in safe characters.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

from data_prep.command import add_arguments, run
from data_prep.jobs import PrepError
from data_prep.writer import Catalogue, Sample, safe_key, stable_hash, write

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
VAL_FOLDERS = ("val", "validation", "test")
VAL_FRACTION = 0.1


def _folders(parent: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(parent) if entry.is_dir() and not entry.name.startswith("."))


def _images(split: Path) -> dict[str, list[Path]]:
    """Images of each class below `split`, sorted, hidden files and folders left out. Classes may be empty."""
    by_class = {}
    for name in _folders(split):
        found = []
        for folder, subfolders, files in os.walk(split / name, followlinks=True):
            subfolders[:] = [sub for sub in subfolders if not sub.startswith(".")]
            found += [Path(folder, file) for file in files if file.lower().endswith(EXTENSIONS) and not file.startswith(".")]
        by_class[name] = sorted(found)
    return by_class


def _samples(split: Path, by_class: dict[str, list[Path]], labels: dict[str, int]) -> list[Sample]:
    """Samples of a split. Paths that give the same key (a.jpg and a.png) get a hash of the path at its end."""
    paths = [(path.relative_to(split), labels[name]) for name, found in by_class.items() for path in found]
    keys = Counter(safe_key(str(path.with_suffix(""))) for path, _ in paths)
    samples = []
    for path, label in paths:
        key = str(path.with_suffix(""))
        if keys[safe_key(key)] > 1:
            key = f"{key}_{stable_hash(path).hex()}"
        samples.append(Sample(key, label, str(split / path)))
    return samples


def _hold_out(samples: list[Sample], val_fraction: float) -> tuple[list[Sample], list[Sample]]:
    """(train, val): of each class the given fraction, chosen by a hash of the key alone, so no seed moves an image."""
    train, val = [], []
    for label in sorted({sample.label for sample in samples}):
        members = sorted((sample for sample in samples if sample.label == label), key=lambda s: (stable_hash(s.key), s.key))
        num_val = min(round(val_fraction * len(members)), len(members) - 1)
        val += members[:num_val]
        train += members[num_val:]
    return train, val


def catalogue(source: Path, val_fraction: float | None = None) -> Catalogue:
    """The catalogue of an image folder.

    val_fraction: in [0, 1), of each class; only where SOURCE has no val folder, by default 0.1. Raises PrepError if the
    folder is missing, holds no images or a single class, or if val has classes that train lacks.
    """
    if not source.is_dir():
        raise PrepError(
            f"{source}: {'not a folder' if source.exists() else 'no such folder'}; "
            "expected a folder with one subfolder of images for each class"
        )
    train_folder = source / "train" if (source / "train").is_dir() else source
    val_folder = next((source / name for name in VAL_FOLDERS if (source / name).is_dir()), None)
    if train_folder == source and val_folder is not None and not (set(_folders(source)) - set(VAL_FOLDERS)):
        raise PrepError(f"{source}: has {val_folder.name}/ but no train/; expected train/<class>/* and val/<class>/*, or <class>/* alone")
    if train_folder == source:
        val_folder = None  # then `test` is a class like any other
    train_images = _images(train_folder)
    num_images = sum(map(len, train_images.values()))
    if num_images == 0:
        raise PrepError(
            f"{train_folder}: no images ({', '.join(EXTENSIONS)}) in its {len(train_images)} subfolders; expected <class>/<image>"
        )
    if empty := [name for name, found in train_images.items() if not found]:
        raise PrepError(f"{train_folder}: classes without images: {', '.join(empty)}; remove these folders or fill them")
    if len(train_images) < 2:
        raise PrepError(f"{train_folder}: only one class ({', '.join(train_images)}); expected two subfolders at least")
    class_names = list(train_images)
    labels = {name: label for label, name in enumerate(class_names)}
    samples = _samples(train_folder, train_images, labels)
    options = {}
    if val_folder is None:
        options["val_fraction"] = VAL_FRACTION if val_fraction is None else val_fraction
        train, val = _hold_out(samples, options["val_fraction"])
    elif val_fraction is not None:
        raise PrepError(f"--val-fraction {val_fraction} was given, but {val_folder} is there; leave one of them out")
    else:
        val_images = {name: found for name, found in _images(val_folder).items() if found}
        if unknown := [name for name in val_images if name not in labels]:
            raise PrepError(f"{val_folder}: classes that train lacks: {', '.join(unknown)}; train has {len(labels)} classes")
        if not val_images:
            raise PrepError(f"{val_folder}: no images; expected <class>/<image>, or no such folder and --val-fraction")
        train, val = samples, _samples(val_folder, val_images, labels)
    splits = {"train": train, **({"val": val} if val else {})}
    return Catalogue("imagefolder", options, class_names, splits, read)


def read(path: str) -> bytes:
    """Bytes of one image file."""
    return Path(path).read_bytes()


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number in [0, 1)")
    return value


def _prepare(args: argparse.Namespace) -> None:
    write(
        catalogue(args.source, args.val_fraction),
        args.out,
        num_shards=args.num_shards,
        seed=args.seed,
        workers=args.workers,
        part=args.shards,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.imagefolder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder with train/ and val/, or with the classes")
    parser.add_argument(
        "--val-fraction",
        type=_fraction,
        metavar="F",
        help=f"part of each class that becomes val, if SOURCE has no val folder (default: {VAL_FRACTION})",
    )
    add_arguments(parser)
    return run(_prepare, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
