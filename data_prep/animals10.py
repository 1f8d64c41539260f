"""Write shards of Animals-10 (Kaggle, alessiocorrado99/animals10), 26,179 photos of ten animals.

    python -m data_prep.animals10 SOURCE --out ROOT [--fractions 0.85 0.15] [--split-seed N]
    python -m data_prep.animals10 FOLDER --out ROOT --download

SOURCE is Kaggle's zip, or a folder into which it was unpacked. The zip is read in place. The ten
class folders (`cane`, `cavallo`, ... or `dog`, `horse`, ...) may be at any depth. Other files, such
as translate.py, are ignored. Labels are positions in the sorted list of English names, and keys
have the form `dog_<file>`. Animals-10 has no official split. Within each class, the keys with the
smallest hash of (split seed, key) become `val`, and then `test` if three fractions are given.

--download first fetches the zip from Kaggle into FOLDER and resumes an interrupted download. Kaggle
serves public data sets without a login. If Kaggle requires one, the command sends KAGGLE_USERNAME
and KAGGLE_KEY, or the entry for www.kaggle.com in ~/.netrc.

The data set's translate.py does not translate `ragno` (spider). ENGLISH below has all ten names.
"""

import argparse
import os
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from data_prep.command import source_command
from data_prep.errors import PrepError, require
from data_prep.read.class_tree import Tree, add_images, open_tree, split_by_hash
from data_prep.read.download import download_archive
from data_prep.read.image_tree import Ignored, unique_keys
from data_prep.write.catalog import Builder, Source
from vit.system.spelling import few

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
"""Maps each class folder's Italian name to the English name."""
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
"""The number of images per class in Kaggle's zip."""
URL = "https://www.kaggle.com/api/v1/datasets/download/alessiocorrado99/animals10"
"""The download address that Kaggle's own client uses. It redirects to the zip."""
FRACTIONS = (0.85, 0.15)
SPLITS = ("train", "val", "test")


# ---- the images ----------------------------------------------------------------------------------


def _class_folder(path: str) -> PurePosixPath | None:
    """Return the outermost folder in an image's path that is named after a class."""
    parts = PurePosixPath(path).parts
    depth = next((depth for depth, part in enumerate(parts[:-1]) if part.lower() in CLASS_OF), None)
    return None if depth is None else PurePosixPath(*parts[: depth + 1])


def _by_class(
    source: Path, paths: Sequence[str]
) -> tuple[dict[str, tuple[PurePosixPath, list[str]]], list[str]]:
    """Return the folder and the images of each class, and the images outside the class folders.

    Raises PrepError if a class is missing, a class has two folders, or an unknown folder is next to
    the class folders.
    """
    by_folder: dict[PurePosixPath, list[str]] = defaultdict(list)
    outside = []
    for path in paths:
        folder = _class_folder(path)
        if folder is None:
            outside.append(path)
        else:
            by_folder[folder].append(path)

    folders: dict[str, list[PurePosixPath]] = {name: [] for name in CLASS_NAMES}
    for folder in by_folder:
        folders[CLASS_OF[folder.name.lower()]].append(folder)

    problems = [
        f"{name} has {len(copies)} folders ({', '.join(map(str, copies))})"
        for name, copies in folders.items()
        if len(copies) > 1
    ]
    missing = [f"{name} ({italian})" for italian, name in ENGLISH.items() if not folders[name]]
    if missing:
        problems.append(f"no images of {', '.join(missing)}")

    unknown = set[str]()
    for root in {folder.parent for folder in by_folder}:
        below = [_below(path, root) for path in outside]
        unknown.update(parts[0] for parts in below if len(parts) > 1)
    if unknown:
        problems.append(f"unknown folders next to the class folders: {few(sorted(unknown))}")

    if problems:
        raise PrepError(
            f"{source}: {'; '.join(problems)}: provide each of the ten Animals-10 class folders,"
            f" such as raw-img/{next(iter(ENGLISH))}, exactly once"
        )

    return {name: (folder, by_folder[folder]) for name, [folder] in folders.items()}, outside


def _below(path: str, root: PurePosixPath) -> tuple[str, ...]:
    """Return the parts of `path` below `root`, or () if `path` is not below `root`."""
    parts, above = PurePosixPath(path).parts, root.parts
    return parts[len(above) :] if parts[: len(above)] == above else ()


# ---- the source ----------------------------------------------------------------------------------


def source(path: Path, fractions: Sequence[float] = FRACTIONS, split_seed: int = 0) -> Source:
    """Return a `Source` for Kaggle's zip or an unpacked folder.

    Raises PrepError if the path does not exist or the fractions are invalid. Listing the images
    raises PrepError unless all ten classes exist.

    Args:
        fractions: The fractions of each class for train and val, or for train, val and test. They
            must sum to 1.
        split_seed: The seed of the split.
    """
    require(path, "Kaggle's animals10 zip, or the folder it was unpacked into")
    are_shares = all(0 < share < 1 for share in fractions) and abs(sum(fractions) - 1) <= 1e-6
    if len(fractions) not in (2, 3) or not are_shares:
        raise PrepError(
            f"--fractions {' '.join(map(str, fractions))}: expected two fractions (train, val) or"
            " three (train, val, test) between 0 and 1 that sum to 1"
        )

    tree = open_tree(path)
    return Source(
        "animals10",
        {"fractions": list(fractions), "split_seed": split_seed},
        partial(_fill, tree, fractions, split_seed),
        tree.read,
        tree.inputs,
    )


def _fill(tree: Tree, fractions: Sequence[float], split_seed: int, builder: Builder) -> None:
    """Add the images of each class, and report how they differ from Kaggle's zip."""
    by_class, outside = _by_class(tree.file, sorted(tree.images("", Ignored())))
    builder.classes(CLASS_NAMES)
    file = builder.file(tree.file)
    share_of_split = dict(zip(SPLITS[: len(fractions)], fractions, strict=True))
    for label, (name, (folder, paths)) in enumerate(by_class.items()):
        keys = unique_keys([f"{name}/{'/'.join(_below(path, folder))}" for path in paths])
        shares = split_by_hash(keys, share_of_split, split_seed)
        add_images(builder, file, label, tree, "", dict(zip(keys, paths, strict=True)), shares)

    builder.report_held_out("val", fractions[1], "--fractions with {} for val")
    _note_differences(
        tree.file.resolve().name,
        {name: len(paths) for name, (_, paths) in by_class.items()},
        outside,
        builder,
    )


def _note_differences(
    name: str, counts: dict[str, int], outside: Sequence[str], builder: Builder
) -> None:
    """Print and record the differences between the source `name` and Kaggle's zip."""
    if counts != OFFICIAL:
        differences = [
            f"{animal} {count:,} of {OFFICIAL[animal]:,}"
            for animal, count in counts.items()
            if count != OFFICIAL[animal]
        ]
        builder.report(
            f"{name}: {sum(counts.values()):,} images, Kaggle's zip has"
            f" {sum(OFFICIAL.values()):,}: {', '.join(differences)}"
        )

    if outside:
        builder.report(  # _info.json records this text, so rewording it changes the output.
            f"{name}: {len(outside):,} images outside the class folders are left out:"
            f" {few(sorted(outside))}"
        )


# ---- the command ---------------------------------------------------------------------------------


def _source(args: argparse.Namespace) -> Source:
    path = args.source
    if args.download or args.url:
        has_login = {"KAGGLE_USERNAME", "KAGGLE_KEY"} <= os.environ.keys()
        login = "${KAGGLE_USERNAME}:${KAGGLE_KEY}@" if has_login else ""
        url = args.url or URL.replace("//", f"//{login}")
        path = download_archive(url, path, name="animals10.zip")
    return source(path, args.fractions, args.split_seed)


main = source_command(
    "animals10",
    __doc__,
    {
        "source": {
            "type": Path,
            "metavar": "SOURCE",
            "help": "Kaggle's zip, or a folder into which it was unpacked",
        },
        "--fractions": {
            "type": float,
            "nargs": "+",
            "default": FRACTIONS,
            "metavar": "F",
            "help": (
                "fractions of each class for train and val, or for train, val and test (default:"
                " 0.85 0.15)"
            ),
        },
        "--split-seed": {
            "type": int,
            "default": 0,
            "metavar": "N",
            "help": "seed of the split (default: %(default)s)",
        },
        "--download": {
            "action": "store_true",
            "help": "first fetch Kaggle's zip (about 600 MB) into the folder SOURCE",
        },
        "--url": {"metavar": "URL", "help": "another address of the zip; implies --download"},
    },
    _source,
)


if __name__ == "__main__":
    raise SystemExit(main())
