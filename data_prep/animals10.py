"""Shards of Animals-10 (Kaggle, alessiocorrado99/animals10): 26,179 photographs of ten animals.

    python -m data_prep.animals10 SOURCE --out ROOT [--fractions 0.85 0.15] [--split-seed N]
    python -m data_prep.animals10 FOLDER --out ROOT --download

SOURCE is Kaggle's zip, read in place, or a folder into which it was unpacked. The ten class folders
(`cane`, `cavallo`, ... or `dog`, `horse`, ...) are found at any depth, as unpacking and moving
often adds a folder or drops raw-img; other files, such as translate.py, are ignored. Labels are
positions among the sorted English names, keys `dog_<file>`. There is no official split: each class
gives the fraction of its keys with the smallest hash of (split seed, key) to `val`, and to `test`
if three fractions are given.

--download fetches the zip from Kaggle into FOLDER first, continued if it was interrupted. Kaggle
gives public data sets without a login; if it wants one, KAGGLE_USERNAME and KAGGLE_KEY are sent to
it, or what ~/.netrc has for www.kaggle.com.

The data set's translate.py lacks the translation of `ragno` to spider; the table here has all ten.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath

from data_prep.command import Parser, add_arguments, run, write_or_plan
from data_prep.errors import PrepError, some
from data_prep.read.class_tree import Tree, open_tree
from data_prep.read.download import download_archive
from data_prep.read.image_tree import unique_keys
from data_prep.write.catalogue import Source
from data_prep.write.catalogue_builder import Builder
from data_prep.write.samples import stable_hash

ENGLISH = {
    "cane": "dog",
    "cavallo": "horse",
    "elefante": "elephant",
    "farfalla": "butterfly",
    "gallina": "chicken",
    "gatto": "cat",
    "mucca": "cow",
    "pecora": "sheep",
    "ragno": "spider",
    "scoiattolo": "squirrel",
}
"""English name of each class folder."""
CLASS_OF = {**ENGLISH, **{english: english for english in ENGLISH.values()}}
CLASS_NAMES = sorted(ENGLISH.values())
OFFICIAL = {
    "dog": 4863,
    "cat": 1668,
    "horse": 2623,
    "cow": 1866,
    "elephant": 1446,
    "sheep": 1820,
    "butterfly": 2112,
    "spider": 4821,
    "chicken": 3098,
    "squirrel": 1862,
}
"""Images of each class in Kaggle's zip."""
URL = "https://www.kaggle.com/api/v1/datasets/download/alessiocorrado99/animals10"
"""What Kaggle's own client asks for; answered by a redirect to the zip."""
FRACTIONS = (0.85, 0.15)
SPLITS = ("train", "val", "test")


# ---- the images ----------------------------------------------------------------------------------


def _class_folder(path: str) -> PurePosixPath | None:
    """The outermost folder on an image's path that has the name of a class."""
    parts = PurePosixPath(path).parts
    depth = next((depth for depth, part in enumerate(parts[:-1]) if part.lower() in CLASS_OF), None)
    return None if depth is None else PurePosixPath(*parts[: depth + 1])


def _by_class(source: Path, paths: Sequence[str]) -> tuple[dict[str, list[int]], list[str]]:
    """(numbers of the images of each class, paths outside the class folders).

    Raises PrepError for missing or repeated classes, and for other folders next to the classes.
    """
    by_folder: dict[PurePosixPath, list[int]] = defaultdict(list)
    outside = []
    for number, path in enumerate(paths):
        folder = _class_folder(path)
        if folder is None:
            outside.append(path)
        else:
            by_folder[folder].append(number)
    folders: dict[str, list[PurePosixPath]] = {name: [] for name in CLASS_NAMES}
    for folder in by_folder:
        folders[CLASS_OF[folder.name.lower()]].append(folder)
    problems = [
        f"{name} is there {len(there)} times ({', '.join(map(str, there))})"
        for name, there in folders.items()
        if len(there) > 1
    ]
    if missing := [f"{name} ({italian})" for italian, name in ENGLISH.items() if not folders[name]]:
        problems.append(f"no images of {', '.join(missing)}")
    roots = {folder.parent for folder in by_folder}
    unknown = {
        parts[0] for path in outside for root in roots if len(parts := _below(path, root)) > 1
    }
    if unknown and by_folder:
        problems.append(
            f"folders next to the class folders that are not classes: {some(sorted(unknown))}"
        )
    if problems:
        raise PrepError(
            f"{source}: {'; '.join(problems)}. Expected the ten class folders of Animals-10, such"
            f" as raw-img/{next(iter(ENGLISH))}, once"
        )
    return {name: by_folder[there[0]] for name, there in folders.items()}, outside


def _below(path: str, root: PurePosixPath) -> tuple[str, ...]:
    """Parts of a path below `root`; empty if it is elsewhere."""
    parts = PurePosixPath(path).parts
    above = root.parts
    return parts[len(above) :] if parts[: len(above)] == above else ()


# ---- the source ----------------------------------------------------------------------------------


def source(path: Path, fractions: Sequence[float] = FRACTIONS, split_seed: int = 0) -> Source:
    """The images of Kaggle's zip or of a folder.

    fractions: train and val, or train, val and test, of each class; they sum to 1. split_seed:
    draws the split. Raises PrepError for a missing path and wrong fractions; when it is listed,
    unless the ten classes are there.
    """
    if not path.exists():
        raise PrepError(
            f"{path}: no such file or folder; expected Kaggle's animals10 zip, or a folder into"
            " which it was unpacked"
        )
    if (
        len(fractions) not in (2, 3)
        or any(not 0 < fraction < 1 for fraction in fractions)
        or abs(sum(fractions) - 1) > 1e-6
    ):
        given = " ".join(map(str, fractions))
        raise PrepError(
            f"--fractions {given}: expected two (train, val) or three (train, val, test) between 0"
            " and 1 that sum to 1"
        )
    options = {"fractions": list(fractions), "split_seed": split_seed}
    tree = open_tree(path)
    fill = partial(_fill, tree, fractions, split_seed)
    return Source("animals10", options, fill, tree.read, tree.inputs)


def _fill(tree: Tree, fractions: Sequence[float], split_seed: int, builder: Builder) -> None:
    source = tree.file
    images = sorted(tree.images(""))
    by_class, outside = _by_class(source, images)
    builder.classes(CLASS_NAMES)
    file = builder.file(source)
    for label, name in enumerate(CLASS_NAMES):
        numbers = by_class[name]
        folder = _class_folder(images[numbers[0]])
        assert folder is not None
        keys = unique_keys(
            [f"{name}/{'/'.join(_below(images[number], folder))}" for number in numbers]
        )
        for split, chosen in zip(SPLITS, _split(keys, fractions, split_seed), strict=False):
            rows = [numbers[place] for place in chosen]
            if rows:
                names, offsets, sizes = tree.places([images[row] for row in rows])
                chosen_keys = [keys[place] for place in chosen]
                builder.add(split, file, names, label, offsets, sizes, chosen_keys)
    _note_differences(source, {name: len(by_class[name]) for name in CLASS_NAMES}, outside, builder)


def _split(keys: Sequence[str], fractions: Sequence[float], split_seed: int) -> Iterator[list[int]]:
    """Places in `keys` of train, val and test, one list for each fraction.

    By a hash of (seed, key), val first, then test, so val does not depend on test. At least one key
    stays in train.
    """
    order = sorted(
        range(len(keys)), key=lambda place: (stable_hash(split_seed, keys[place]), keys[place])
    )
    ends = [
        min(round(sum(fractions[1:count]) * len(keys)), len(keys) - 1)
        for count in range(1, len(fractions) + 1)
    ]
    yield order[ends[-1] :]
    for start, end in pairwise(ends):
        yield order[start:end]


def _note_differences(
    source: Path, counts: dict[str, int], outside: Sequence[str], builder: Builder
) -> None:
    """Print and record how the source differs from Kaggle's zip; a difference is not an error."""
    notes = []
    if counts != OFFICIAL:
        total = f"{sum(counts.values()):,} images, Kaggle's zip has {sum(OFFICIAL.values()):,}"
        differ = [
            f"{name} {count:,} of {OFFICIAL[name]:,}"
            for name, count in counts.items()
            if count != OFFICIAL[name]
        ]
        notes.append(f"{source.resolve().name}: {total}: {', '.join(differ)}")
    if outside:
        notes.append(
            f"{source.resolve().name}: {len(outside):,} images outside the class folders are left"
            f" out: {some(sorted(outside))}"
        )
    for note in notes:
        builder.report(note)


# ---- the command ---------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> None:
    path = args.source
    if args.download or args.url:
        path = download_archive(args.url or _kaggle_url(), path, name="animals10.zip")
    write_or_plan(source(path, args.fractions, args.split_seed), args)


def _kaggle_url() -> str:
    if {"KAGGLE_USERNAME", "KAGGLE_KEY"} <= os.environ.keys():
        return URL.replace("//", "//${KAGGLE_USERNAME}:${KAGGLE_KEY}@")
    return URL


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser("python -m data_prep.animals10", __doc__)
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="Kaggle's zip, or a folder into which it was unpacked",
    )
    parser.add_argument(
        "--fractions",
        type=float,
        nargs="+",
        default=FRACTIONS,
        metavar="F",
        help=(
            "fractions of each class for train and val, or train, val and test (default: 0.85 0.15)"
        ),
    )
    parser.add_argument(
        "--split-seed",
        type=int,
        default=0,
        metavar="N",
        help="draws the split (default: %(default)s)",
    )
    parser.add_argument(
        "--download",
        action="store_true",
        help="fetch Kaggle's zip into the folder SOURCE first (about 600 MB)",
    )
    parser.add_argument("--url", metavar="URL", help="of the zip elsewhere; implies --download")
    add_arguments(parser)
    return run(_run, parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
