"""Read the class of each image in ImageNet's flat validation set.

The classes come from the development kit or Kaggle's table. Both readers map each image name
without extension to a WordNet ID (WNID). The kit's own numbers (ILSVRC2012_ID, starting at 1) are
used only to look up WNIDs, because labels in published weights are positions in the sorted list of
WNIDs.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import PrepError, readable
from data_prep.read.archives import read_zip_member, small_members
from data_prep.write.samples import Sample
from vit.system.tar_walk import describe_content

WNID = re.compile(r"n\d{8}", re.ASCII)
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


# ---- the development kit -------------------------------------------------------------------------


def read_devkit(path: Path) -> dict[str, str]:
    """Read labels from the downloaded kit (`.tar.gz`), or from its unpacked folder `data`."""
    needed = (META, TRUTH)
    if path.is_dir():
        with readable(path):
            files = {name: (path / name).read_bytes() for name in needed}
    else:
        files = dict(small_members(path, needed, MAX_MEMBERS, MAX_BYTES, "ImageNet's kit"))
    if missing := [name for name in needed if name not in files]:
        raise PrepError(
            f"{path}: contains no {' and no '.join(missing)}; expected ImageNet's development kit"
            " for tasks 1 and 2"
        )
    wnids = _wnids_by_id(files[META], f"{path}: {META}")
    lines = _text(files[TRUTH], f"{path}: {TRUTH}").split()
    labels = {}
    for number, line in enumerate(lines, 1):
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
        ids = [int(number) for number in classes["ILSVRC2012_ID"]]
        wnids = dict(zip(ids, map(str, classes["WNID"]), strict=True))
    except Exception as error:
        # scipy raises many kinds of errors for a file that is not a MATLAB file.
        raise PrepError(
            f"{place}: not the kit's class table ({type(error).__name__}: {error}); download the"
            " kit again"
        ) from error
    if strange := [wnid for wnid in wnids.values() if not WNID.fullmatch(wnid)]:
        raise PrepError(f"{place}: {strange[0]!r} is not a WordNet ID; download the kit again")
    return wnids


# ---- Kaggle's table ------------------------------------------------------------------------------


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


def read_all(files: Sequence[ValLabels]) -> Mapping[str, str]:
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
