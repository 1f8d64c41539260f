"""Shards from a folder of images, one subfolder for each class.

    python -m data_prep.imagefolder SOURCE --out ROOT [--val-fraction F]

The data's story: SOURCE is `train/<class>/...` with `val/<class>/...` (or `validation`, or `test`), or `<class>/...` alone,
of which each class gives a tenth to `val`. Images may lie in subfolders of their class. A label is the position of the class
among the sorted names of train's classes; a key is the path below the split, without extension, in safe characters.

Folders are listed one class at a time, so the memory needed is that of the largest class. Links are followed; one that leads
back to a folder above it is an error.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import PIL
from PIL import features

from data_prep.archives import MAX_IMAGE_BYTES
from data_prep.catalogue import Builder, Sample, Source, safe_key, stable_hash
from data_prep.command import Parser, add_arguments, fraction, prepare, run
from data_prep.jobs import PrepError

EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")
NOT_READ = (
    *(".heic", ".heif", ".hif", ".jxl", ".jp2", ".j2k", ".psd", ".svg", ".eps", ".tga", ".ico"),
    *(".exr", ".hdr", ".ppm", ".pgm", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2", ".pef", ".srw"),
)
"""Suffixes of images that are passed over, and told: phones', cameras' raw data, drawings, rarities."""
VAL_FOLDERS = ("val", "validation", "test")
VAL_FRACTION = 0.1


# ---- any tree of images, for other sources too ------------------------------------------------------------------------


def images_below(folder: Path, passed_over: Counter[str] | None = None) -> Iterator[str]:
    """Paths of the images below `folder`, relative to it, in the system's order; hidden files and folders are left out.

    passed_over: counts, by suffix, files that are images but of a kind that is not read. Raises PrepError for a folder that cannot be
    listed, and for a link back to a folder above it.
    """
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while waiting:
        prefix, above = waiting.pop()
        here = os.path.join(folder, prefix)
        try:
            status = os.stat(here)
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                link = next((path for path in (Path(here), *Path(here).parents) if path.is_symlink()), here)
                raise PrepError(f"{link}: a link back to a folder above it; remove the link")
            with os.scandir(here) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir():
                        waiting.append((f"{prefix}{entry.name}/", above | {identity}))
                    elif entry.name.lower().endswith(EXTENSIONS):
                        yield prefix + entry.name
                    elif passed_over is not None and entry.name.lower().endswith(NOT_READ):
                        passed_over[os.path.splitext(entry.name)[1]] += 1
        except OSError as error:
            raise _cannot_list(error, here) from error


def told_of_passed_over(passed_over: Counter[str]) -> str:
    """A line about images that are not read; "" if there are none."""
    if not passed_over:
        return ""
    counts = sorted(passed_over.items(), key=lambda item: (-item[1], item[0]))
    kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in counts)
    first = counts[0][0].lower()
    number = passed_over.total()
    return (
        f"{number:,} file{'s' if number > 1 else ''} not read as images: {kinds}; convert them to JPEG, with ImageMagick, say, in their "
        f"folder: find . -iname '*{first}' -exec magick mogrify -format jpg {{}} +"
    )


def folders_in(parent: Path) -> list[str]:
    """Sorted names of the folders in `parent`, hidden ones left out. Raises PrepError if it cannot be listed."""
    try:
        with os.scandir(parent) as entries:
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except OSError as error:
        raise _cannot_list(error, str(parent)) from error


def _cannot_list(error: OSError, folder: str) -> PrepError:
    return PrepError(f"{(error.filename or folder).rstrip('/')}: cannot be listed ({error.strerror}); set that right, or move it elsewhere")


def unique_keys(paths: Sequence[str]) -> list[str]:
    """The key of each path: without its extension. Those that would be equal (a.jpg and a.png) get a hash of the path at the end."""
    keys = [os.path.splitext(path)[0] for path in paths]
    safe = [safe_key(key) for key in keys]
    times = Counter(safe)
    return [f"{key}_{stable_hash(path).hex()}" if times[same] > 1 else key for path, key, same in zip(paths, keys, safe, strict=True)]


def read(sample: Sample) -> bytes:
    """Bytes of the image at `name` below the folder `file`. Raises OSError, and ValueError for what is no regular file."""
    path = os.path.join(sample.file, sample.name)
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise ValueError("not a regular file")
    with open(path, "rb") as file:
        if (num_bytes := os.fstat(file.fileno()).st_size) > MAX_IMAGE_BYTES:
            raise ValueError(f"{num_bytes:,} bytes; no image has more than {MAX_IMAGE_BYTES:,}")
        return file.read()


# ---- the source -------------------------------------------------------------------------------------------------------


def source(folder: Path, val_fraction: float | None = None, out: Path | None = None) -> Source:
    """The images of class folders.

    val_fraction: in [0, 1), of each class; only where `folder` has no val folder, by default 0.1. Raises PrepError if the
    folder is missing or has a val folder without train; when it is listed, if it holds no images or a single class, if a class
    has no images, or if val has classes that train lacks.
    """
    train, val = _layout(folder)
    if out is not None and (out == folder.resolve() or out.is_relative_to(train.resolve())):
        raise PrepError(f"{out}: lies among the images of {folder}; give --out another folder")
    if val is None:
        val_fraction = VAL_FRACTION if val_fraction is None else val_fraction
        return Source("imagefolder", {"val_fraction": val_fraction}, partial(_fill, train, None, val_fraction), read)
    if val_fraction is not None:
        raise PrepError(f"--val-fraction {val_fraction} was given, but {val} is there; leave one of them out")
    return Source("imagefolder", {}, partial(_fill, train, val, 0.0), read)


def _layout(folder: Path) -> tuple[Path, Path | None]:
    """Folders of train and val; val is None if it is to be cut from train."""
    if not folder.is_dir():
        raise PrepError(
            f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}; "
            "expected a folder with one subfolder of images for each class"
        )
    val = next((folder / name for name in VAL_FOLDERS if (folder / name).is_dir()), None)
    if (folder / "train").is_dir():
        return folder / "train", val
    if val is not None and not (set(folders_in(folder)) - set(VAL_FOLDERS)):
        raise PrepError(f"{folder}: has {val.name}/ but no train/; expected train/<class>/* and val/<class>/*, or <class>/* alone")
    return folder, None  # `test` is a class like any other then


def _fill(train: Path, val: Path | None, val_fraction: float, builder: Builder) -> None:
    names = folders_in(train)
    if train.name == "train" and (unused := [name for name in folders_in(train.parent) if train.parent / name not in (train, val)]):
        _tell(builder, f"folders beside {train} that are not used: {', '.join(unused)}")
    labels = {name: label for label, name in enumerate(names)}
    if all(map(str.isdecimal, names)) and (by_number := sorted(names, key=int)) != names:
        first = next(k for k, (name, other) in enumerate(zip(names, by_number, strict=True)) if name != other)
        _tell(
            builder, f"the classes' names are numbers and are sorted as text: label {first} is class {names[first]}, not {by_number[first]}"
        )
    builder.classes(names)
    passed_over: Counter[str] = Counter()
    _add_split(builder, "train", train, labels, val_fraction, passed_over)
    per_class = builder.count("train")
    also = f" ({told_of_passed_over(passed_over)})" if passed_over else ""
    if not per_class.sum():
        raise PrepError(f"{train}: no images ({', '.join(EXTENSIONS)}) in its {len(names)} subfolders{also}; expected <class>/<image>")
    if empty := [name for name, count in zip(names, per_class, strict=True) if not count]:
        raise PrepError(f"{train}: classes without images: {', '.join(empty)}{also}; remove these folders or fill them")
    if len(names) < 2:
        raise PrepError(f"{train}: only one class ({', '.join(names)}); expected two subfolders at least")
    if val is not None:
        if unknown := [name for name in folders_in(val) if name not in labels and any(images_below(val / name))]:
            raise PrepError(f"{val}: classes that train lacks: {', '.join(unknown)}; remove these folders, or add these classes to train")
        _add_split(builder, "val", val, {name: labels[name] for name in folders_in(val) if name in labels}, 0.0, passed_over)
        if not builder.count("val").sum():
            raise PrepError(f"{val}: no images; expected <class>/<image>, or no such folder and --val-fraction")
    if passed_over:
        _tell(builder, told_of_passed_over(passed_over))


def _tell(builder: Builder, text: str) -> None:
    """Say it now, and on the card."""
    builder.note(text)
    print(text, flush=True)


def _add_split(builder: Builder, split: str, folder: Path, labels: dict[str, int], val_fraction: float, passed_over: Counter[str]) -> None:
    """Add the images of these classes of `folder` to `split`, or the given fraction of each class to val."""
    file = builder.file(folder)
    for classes in _classes_with_common_keys(labels):
        paths = [f"{name}/{path}" for name in classes for path in images_below(folder / name, passed_over)]
        _refuse_unknown_to_pillow(paths)
        keys = dict(zip(paths, unique_keys(paths), strict=True))
        for name in classes:
            of_class = {path: keys[path] for path in paths if path.startswith(f"{name}/")}
            held = held_out(list(of_class.values()), val_fraction)
            for into, held_there in ((split, False), ("val", True)):
                chosen = {path: key for path, key in of_class.items() if (key in held) == held_there}
                if chosen:
                    nothing = np.zeros(len(chosen), np.int64)  # a file is read whole: it has no offset, and its size need not be asked for
                    builder.add(into, file, list(chosen), labels[name], nothing, nothing, list(chosen.values()))


def _refuse_unknown_to_pillow(paths: Sequence[str]) -> None:
    """Raise PrepError for AVIF where Pillow cannot read it: what becomes of a folder must not depend on the machine."""
    of_avif = [path for path in paths if path.lower().endswith(".avif")]
    if of_avif and not features.check("avif"):
        raise PrepError(
            f"{of_avif[0]}: an AVIF image, and this Pillow ({PIL.__version__}) cannot read AVIF: pip install --upgrade 'pillow>=11.3', or "
            "convert these images to JPEG"
        )


def _classes_with_common_keys(names: Iterable[str]) -> Iterator[list[str]]:
    """The classes, those together whose keys might be equal, such as a/b_c.jpg and a_b/c.jpg; mostly each one alone."""
    group: list[str] = []
    first = ""
    for start, name in sorted((f"{safe_key(name)}_", name) for name in names):
        if group and not start.startswith(first):
            yield group
            group = []
        if not group:
            first = start
        group.append(name)
    if group:
        yield group


def held_out(keys: Sequence[str], fraction: float, *seed: int) -> set[str]:
    """The fraction of a class's keys with the smallest hash, rounded; one key at least stays.

    By default of the key alone, so neither the seed nor another image moves an image.
    """
    num_held = min(round(fraction * len(keys)), len(keys) - 1)
    return set(sorted(keys, key=lambda key: (stable_hash(*seed, key), key))[: max(0, num_held)])


# ---- the command ------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser("python -m data_prep.imagefolder", __doc__)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder with train/ and val/, or with the classes")
    parser.add_argument(
        "--val-fraction",
        type=fraction,
        metavar="F",
        help=f"part of each class that becomes val, if SOURCE has no val folder (default: {VAL_FRACTION})",
    )
    add_arguments(parser)
    return run(lambda args: prepare(source(args.source, args.val_fraction, Path(args.out).resolve()), args), parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
