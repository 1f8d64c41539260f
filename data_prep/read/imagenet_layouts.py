"""Describe the supported layouts of ImageNet, list their images, and read their label files.

    train   ILSVRC2012_img_train.tar            a tar of 1,000 tars
            <wnid>.tar ...                      these 1,000 tars
            train/<wnid>/*.JPEG                 torchvision's and Kaggle's folders (ILSVRC/...)
    val     ILSVRC2012_img_val.tar, val/*.JPEG  flat: needs a label file
            val/<wnid>/*.JPEG
    both    *.zip                               Kaggle's zip, or a zip of train/ and val/
            data/train-*.parquet, data/validation-*.parquet     Hugging Face's files

A layout lists each image with its archive or folder, name, WNID, offset and size. Listing reads
only headers and folders. `data_prep/read/imagenet_search.py` finds the layouts.

The classes of a flat validation set come from the development kit or Kaggle's table. Both readers
map each image name without extension to a WordNet ID (WNID). The kit's own numbers (ILSVRC2012_ID,
starting at 1) are used only to look up WNIDs, because labels in published weights are positions in
the sorted list of WNIDs.
"""

import csv
import io
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.errors import PrepError, readable
from data_prep.read import parquet
from data_prep.read.archives import Members, read_zip_member, small_members, walk_tar, walk_zip
from data_prep.read.image_tree import listed
from data_prep.read.split_names import SPLIT_WORDS
from data_prep.write.catalog import Builder
from data_prep.write.samples import Sample
from vit.data.decode.content import describe_content

WNID = re.compile(r"n\d{8}", re.ASCII)
IMAGE = re.compile(
    r"(?P<key>(?P<training_wnid>n\d{8})_\d+|ILSVRC2012_val_\d{8})"
    r"(?:_(?P<added_wnid>n\d{8}))?\.(?:jpe?g|png|webp)",
    re.IGNORECASE | re.ASCII,
)
"""Matches an image name. Hugging Face adds the WNID to names: n01440764_10026_n01440764.JPEG."""
IMAGE_EXTENSIONS = (".jpeg", ".jpg", ".png", ".webp")
SPLIT_FOLDERS = {word: split for word, split in SPLIT_WORDS.items() if split != "test"}
"""Maps the usual names of folders to splits. ImageNet's test images have no labels."""
TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
READERS = 4
"""The number of archives or folders to list in parallel, to hide disk or network latency."""


class ImageNetImages(NamedTuple):
    """A batch of images in a layout. If their location does not determine the class, `wnid` is "",
    and `wnids` contains each image's WNID if known."""

    file: Path
    wnid: str
    names: list[str]
    offsets: np.ndarray
    sizes: np.ndarray
    wnids: list[str] | None = None


@dataclass(frozen=True)
class ImageNetLayout:
    """One split of ImageNet in a supported layout."""

    split: str
    title: str
    path: Path
    images: Callable[[Builder], Iterator[ImageNetImages]]
    wnids: Callable[[Builder], Collection[str]]
    """A function that returns the WNIDs of the classes, or nothing if only a label file lists
    them."""
    inputs: tuple[Path, ...]
    """The archives and folders whose modification times reveal changes to the split."""
    flat: bool = False
    lacking: str = ""
    """A line about missing files, inferred from the names of the existing files, or ""."""


# ---- tars and folders ----------------------------------------------------------------------------


class TarPlace(NamedTuple):
    """A folder of images, or a tar of images in the bytes [start, stop) of a file."""

    wnid: str
    """The WNID of all images, or "" for images of several classes."""
    path: Path
    start: int = 0
    stop: int | None = None

    def members(self) -> list[Members]:
        """List the images. Raises OSError and PrepError."""
        if self.path.is_dir():
            return [members_of(self.path)]
        return list(walk_tar(self.path, self.start, self.stop))


def members_of(folder: Path) -> Members:
    """List the images directly in a folder. Their offsets are 0."""
    names = [name for name in listed(folder)[1] if name.lower().endswith(IMAGE_EXTENSIONS)]
    sizes = [os.stat(folder / name).st_size for name in names]
    return Members(names, np.zeros(len(names), np.int64), np.array(sizes, np.int64))


def _images_in(places: Callable[[], Sequence[TarPlace]], _: Builder) -> Iterator[ImageNetImages]:
    """Yield the images of all places in order, while threads list the next places."""
    todo = places()
    with ThreadPoolExecutor(READERS) as pool:
        for place, batches in zip(todo, pool.map(TarPlace.members, todo), strict=True):
            for names, offsets, sizes in batches:
                bare = [name.rpartition("/")[2] for name in names]
                yield ImageNetImages(place.path, place.wnid, bare, offsets, sizes)


def _layout_of(
    split: str,
    title: str,
    path: Path,
    places: Callable[[], Sequence[TarPlace]],
    inputs: Iterable[Path] = (),
) -> ImageNetLayout:
    """Return the layout for tars or folders. inputs: see `ImageNetLayout`; defaults to `path`."""
    return ImageNetLayout(
        split,
        title,
        path,
        partial(_images_in, places),
        lambda _: {place.wnid for place in places()} - {""},
        tuple(inputs) or (path,),
    )


def nested_tar(path: Path) -> ImageNetLayout:
    """Return the layout for the official training tar, which contains one tar per class."""
    return _layout_of("train", "a tar of tars, read in place", path, partial(_inner_tars, path))


def _inner_tars(path: Path) -> list[TarPlace]:
    """Return the places of the tars inside a tar. Raises PrepError if it contains anything else."""
    tars = []
    for members in walk_tar(path):
        for name, offset, size in zip(*members, strict=True):
            base = name.rpartition("/")[2]
            if base.startswith("."):  # macOS writes a file `._x` next to each x.
                continue

            wnid, _, extension = base.rpartition(".")
            if not WNID.fullmatch(wnid) or extension != "tar":
                raise PrepError(
                    f"{path}: contains {name!r}; expected tars named by WordNet ID (n01440764.tar)"
                )
            tars.append(TarPlace(wnid, path, int(offset), int(offset + size)))
    return tars


def folder_of_tars(paths: Sequence[Path]) -> ImageNetLayout:
    """Return the layout for a folder with one tar per class."""
    tars = [TarPlace(path.stem, path) for path in paths]
    return _layout_of(
        "train",
        f"{len(paths):,} tars, one a class, read in place",
        path=paths[0].parent,
        places=lambda: tars,
        inputs=paths,
    )


def tree(split: str, folder: Path, wnids: Sequence[str]) -> ImageNetLayout:
    """Return the layout for a folder with one subfolder per class."""
    classes = [TarPlace(wnid, folder / wnid) for wnid in wnids]
    return _layout_of(
        split,
        f"{len(wnids):,} class folders",
        path=folder,
        places=lambda: classes,
        inputs=(folder, *(place.path for place in classes)),
    )


def flat(path: Path) -> ImageNetLayout:
    """Return the layout for validation images of all classes in a single tar or folder."""
    title = "a flat folder" if path.is_dir() else "a flat tar, read in place"
    return replace(_layout_of("val", title, path, lambda: [TarPlace("", path)]), flat=True)


# ---- zip and parquet -----------------------------------------------------------------------------

IN_ZIP = re.compile(
    rf"(?:.*/)?(?P<split>{'|'.join(SPLIT_FOLDERS)})/(?:(?P<wnid>n\d{{8}})/)?(?P<file>[^./][^/]*)",
    re.IGNORECASE | re.ASCII,
)
"""Matches the path of an image in a class folder, or in a flat folder, of a split."""


class PlaceInZip(NamedTuple):
    """The place of an image in ImageNet's zip."""

    split: str
    wnid: str
    """The WNID of the class folder, or "" in a flat folder."""
    file: str


def place_in_zip(name: str) -> PlaceInZip | None:
    """Return the place of an image of ImageNet, or None for other members."""
    match = IN_ZIP.fullmatch(name) if name.lower().endswith(IMAGE_EXTENSIONS) else None
    if match is None or name.startswith("__MACOSX/"):
        return None
    return PlaceInZip(SPLIT_FOLDERS[match["split"].lower()], match["wnid"] or "", match["file"])


def _zip_images(path: Path, split: str, _: Builder) -> Iterator[ImageNetImages]:
    """Yield the images of a split in a zip, class by class in each batch of members."""
    for members in walk_zip(path):
        # Maps each WNID to its rows in `members`, and each row to a file name.
        rows_of_class = defaultdict[str, dict[int, str]](dict)
        for row, place in enumerate(map(place_in_zip, members.names)):
            if place is not None and place.split == split:
                rows_of_class[place.wnid][row] = place.file

        for wnid, name_of_row in rows_of_class.items():
            rows = list(name_of_row)
            yield ImageNetImages(
                path, wnid, [*name_of_row.values()], members.offsets[rows], members.sizes[rows]
            )


def zip_layout(path: Path, split: str, wnids: set[str]) -> ImageNetLayout:
    """Return the layout for a split in a zip.

    wnids: the names of the split's class folders, with "" for images outside of them.
    """
    is_flat = "" in wnids
    folders = "a flat folder" if is_flat else f"{len(wnids):,} class folders"
    return ImageNetLayout(
        split,
        title=f"{folders} in a zip, read in place",
        path=path,
        images=partial(_zip_images, path, split),
        wnids=lambda _: wnids - {""},
        inputs=(path,),
        flat=is_flat,
    )


def _parquet_images(files: Sequence[Path], builder: Builder) -> Iterator[ImageNetImages]:
    """Yield the images, and check that labels are positions in the sorted list of WNIDs.

    Some mirrors number the classes differently.
    """
    wnid_of: dict[int, str] = {}
    for rows in parquet.spool(files, builder, parquet.Columns()):
        matches = [IMAGE.fullmatch(os.path.basename(name)) for name in rows.names]
        wnids = [
            (match["added_wnid"] or match["training_wnid"] or "") if match else ""
            for match in matches
        ]
        for name, label, wnid in zip(rows.names, rows.labels, wnids, strict=True):
            if not wnid or label is None:
                raise _wrong_label(rows.parquet, name, label)
            wnid_of_label = wnid_of.setdefault(label, wnid)
            if wnid_of_label != wnid:
                reason = f", and label {label} is {wnid_of_label} elsewhere"
                raise _wrong_label(rows.parquet, name, label, reason)

        names = [
            match["key"] + os.path.splitext(name)[1] if match else name
            for match, name in zip(matches, rows.names, strict=True)
        ]
        yield ImageNetImages(rows.file, "", names, rows.offsets, rows.sizes, wnids)

    if [wnid_of[label] for label in sorted(wnid_of)] != sorted(set(wnid_of.values())):
        raise PrepError(
            f"{files[0].parent}: the labels do not follow the order of the WordNet IDs; expected"
            " the numbering of ILSVRC/imagenet-1k"
        )


def _wrong_label(file: Path, name: str, label: int | None, reason: str = "") -> PrepError:
    return PrepError(
        f"{file}: image {name!r} has label {label}; expected a name that ends in its WordNet ID"
        f"{reason}"
    )


def parquet_layout(split: str, files: Sequence[Path]) -> ImageNetLayout:
    """Return the layout for a split in Hugging Face's parquet files."""
    images = partial(_parquet_images, files)
    return ImageNetLayout(
        split,
        title=f"{len(files):,} parquet files, copied once to read them",
        path=files[0].parent,
        images=images,
        wnids=lambda builder: set(
            chain.from_iterable(part.wnids or () for part in images(builder))
        ),
        inputs=tuple(files),
        lacking=parquet.missing_files(split, files),
    )


# ---- label files ---------------------------------------------------------------------------------

DEVKIT = re.compile(r".*devkit.*\.(tar\.gz|tgz)", re.IGNORECASE)
META = "meta.mat"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
KAGGLE_TABLE = "LOC_val_solution.csv"
LABEL_FILES = f"ILSVRC2012_devkit_t12.tar.gz (or its unpacked folder), {KAGGLE_TABLE}"
MAX_MEMBERS = 1000
MAX_BYTES = 1 << 26
"""The size limit for files in the development kit. The largest file has a few MB."""


@dataclass(frozen=True)
class ValLabels:
    """A label file. `read()` returns {image name without extension: WNID}."""

    path: Path
    title: str
    read: Callable[[], dict[str, str]]
    inputs: tuple[Path, ...]


def _text(content: bytes, place: str) -> str:
    if kind := describe_content(content):
        raise PrepError(f"{place}: this file is {kind}; download it again")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PrepError(f"{place}: not a text file ({error}); download it again") from error


def read_devkit(path: Path) -> dict[str, str]:
    """Read labels from the downloaded kit (`.tar.gz`), or from its unpacked folder `data`."""
    needed = (META, TRUTH)
    if path.is_dir():
        with readable(path):
            files = {name: (path / name).read_bytes() for name in needed}
    else:
        files = dict(small_members(path, needed, MAX_MEMBERS, MAX_BYTES, "ImageNet's kit"))

    missing = [name for name in needed if name not in files]
    if missing:
        raise PrepError(
            f"{path}: contains no {' and no '.join(missing)}; expected ImageNet's development kit"
            " for tasks 1 and 2"
        )

    wnids = _wnids_by_id(files[META], f"{path}: {META}")
    labels = {}
    for number, line in enumerate(_text(files[TRUTH], f"{path}: {TRUTH}").split(), 1):
        if not line.isdecimal() or int(line) not in wnids:
            raise PrepError(
                f"{path}: {TRUTH}: line {number} is {line!r}; expected the ILSVRC2012_ID of one of"
                f" the {len(wnids)} classes in {META}"
            )
        labels[f"ILSVRC2012_val_{number:08d}"] = wnids[int(line)]
    return labels


def _wnids_by_id(meta: bytes, place: str) -> dict[int, str]:
    """Return {ILSVRC2012_ID: WNID} for the classes in `meta.mat`, skipping its 860 class groups."""
    from scipy.io import loadmat  # scipy loads slowly, and only the kit needs it.

    try:
        synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"].reshape(-1)
        classes = synsets[synsets["num_children"].astype(int) == 0]
        wnids = dict(
            zip(map(int, classes["ILSVRC2012_ID"]), map(str, classes["WNID"]), strict=True)
        )
    except Exception as error:
        # scipy raises many kinds of errors for a file that is not a MATLAB file.
        raise PrepError(
            f"{place}: not the kit's class table ({type(error).__name__}: {error}); download the"
            " kit again"
        ) from error

    for wnid in wnids.values():
        if not WNID.fullmatch(wnid):
            raise PrepError(f"{place}: {wnid!r} is not a WordNet ID; download the kit again")
    return wnids


def read_kaggle_table(path: Path) -> dict[str, str]:
    """Read the labels in Kaggle's table, whose column ImageId contains the image names."""
    with readable(path):
        return _labels_in_table(path.read_bytes(), str(path))


def read_kaggle_table_in_zip(member: Sample) -> dict[str, str]:
    """Read the labels in the table inside Kaggle's zip."""
    place = f"{member.file}: {member.name}"
    try:
        content = read_zip_member(member)
    except (OSError, ValueError) as error:
        raise PrepError(f"{place}: {error}; download the zip again") from error
    return _labels_in_table(content, place)


def _labels_in_table(content: bytes, place: str) -> dict[str, str]:
    """Return {image name: WNID} from Kaggle's table.

    The column PredictionString has a WNID and a box for each object: "n01440764 10 20 110 120 ".
    """
    labels: dict[str, str] = {}
    rows = csv.DictReader(io.StringIO(_text(content, place)))
    try:
        columns = rows.fieldnames or ()
        if not {"ImageId", "PredictionString"} <= set(columns):
            raise PrepError(
                f"{place}: the columns are {', '.join(columns) or 'none'}; expected"
                " ImageId,PredictionString"
            )

        for row in rows:
            name = row["ImageId"] or ""
            wnid = (row["PredictionString"] or "").strip().partition(" ")[0]
            line = f"{place}: line {rows.line_num}:"

            if not WNID.fullmatch(wnid):
                raise PrepError(
                    f"{line} expected a WordNet ID and a box for {name!r}, found"
                    f" {row['PredictionString']!r}"
                )
            if labels.setdefault(name, wnid) != wnid:
                raise PrepError(
                    f"{line} {name!r} has the label {wnid}, but {labels[name]} in an earlier line"
                )
    except csv.Error as error:
        raise PrepError(
            f"{place}: not a table with the columns ImageId,PredictionString ({error})"
        ) from error
    return labels


def read_all_labels(files: Sequence[ValLabels]) -> Mapping[str, str]:
    """Read the labels in all files. Raises PrepError if files contradict each other."""
    labels: dict[str, str] = {}
    for file in files:
        more = file.read()
        differing = [name for name, wnid in more.items() if labels.get(name, wnid) != wnid]
        if differing:
            name = differing[0]
            raise PrepError(
                f"{file.path}: has the label {more[name]} for {name}, but {files[0].path} has"
                f" {labels[name]}; {len(differing):,} labels differ: pass only the correct label"
                " file"
            )

        labels |= more
    return labels
