"""The class of each image of ImageNet's flat validation set.

One of two files gives it: the development kit or Kaggle's table. Both become one mapping, image
name without extension -> WordNet id (WNID). The kit's own numbers
(ILSVRC2012_ID, from 1) are only used to find its WNIDs: they are not the labels of published
weights, which are positions among the sorted WNIDs.
"""

from __future__ import annotations

import csv
import io
import re
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import PrepError, readable
from data_prep.read.archives import read_zip_member
from data_prep.write.samples import Sample
from vit.system.files import unreadable
from vit.system.tar_walk import describe_content

WNID = re.compile(r"n\d{8}", re.ASCII)
DEVKIT = re.compile(r".*devkit.*\.(tar\.gz|tgz)", re.IGNORECASE)
META = "meta.mat"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
KAGGLE_TABLE = "LOC_val_solution.csv"
LABEL_FILES = f"ILSVRC2012_devkit_t12.tar.gz (or its unpacked folder), {KAGGLE_TABLE}"
MAX_BYTES = 1 << 26
"""The kit's largest file has some MB; a file of more than 64 MiB is none of these."""


@dataclass(frozen=True)
class ValLabels:
    """A file of labels; `read()` returns {image name without extension: WNID}."""

    path: Path
    what: str
    read: Callable[[], dict[str, str]]
    inputs: tuple[Path, ...]


def _content(path: Path) -> bytes:
    with readable(path):
        return path.read_bytes()


def _text(content: bytes, where: str) -> str:
    if describe_content(content):
        raise PrepError(f"{where}: is {describe_content(content)}; download it again")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PrepError(f"{where}: not a text file ({error}); download it again") from error


def _wnids_by_id(meta: bytes, where: str) -> dict[int, str]:
    """{ILSVRC2012_ID: WNID} of the classes in the kit's `meta.mat`, which also has 860 groups."""
    from scipy.io import loadmat  # slow to import, and only needed here

    try:
        synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"].reshape(-1)
        leaves = synsets[synsets["num_children"].astype(int) == 0]
        found = {
            int(number): str(wnid)
            for number, wnid in zip(leaves["ILSVRC2012_ID"], leaves["WNID"], strict=True)
        }
    except Exception as error:
        # scipy raises many kinds of errors for a file that is not MATLAB's
        raise PrepError(
            f"{where}: not the kit's table of classes ({type(error).__name__}: {error}); download"
            " the kit again"
        ) from error
    if bad := [wnid for wnid in found.values() if not WNID.fullmatch(wnid)]:
        raise PrepError(f"{where}: {bad[0]!r} is no WordNet id; download the kit again")
    return found


def _by_kit(meta: bytes, truth: bytes, where: str) -> dict[str, str]:
    wnids = _wnids_by_id(meta, f"{where}: {META}")
    lines = _text(truth, f"{where}: {TRUTH}").split()
    if bad := [n for n, line in enumerate(lines) if not line.isdecimal() or int(line) not in wnids]:
        raise PrepError(
            f"{where}: {TRUTH}: line {bad[0] + 1} is {lines[bad[0]]!r}; "
            f"expected an ILSVRC2012_ID of one of the {len(wnids)} classes in {META}"
        )
    return {
        f"ILSVRC2012_val_{number:08d}": wnids[int(line)] for number, line in enumerate(lines, 1)
    }


def read_devkit_folder(path: Path) -> dict[str, str]:
    """Labels from the kit's unpacked folder `data`."""
    return _by_kit(_content(path / META), _content(path / TRUTH), str(path))


def read_devkit_archive(path: Path) -> dict[str, str]:
    """Labels from two members of the downloaded kit (`.tar.gz`)."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as kit:
            for member in kit:
                if member.size > MAX_BYTES:
                    raise PrepError(
                        f"{path}: its member {member.name!r} has {member.size:,} bytes; not"
                        " ImageNet's development kit"
                    )
                if (name := Path(member.name).name) in (META, TRUTH) and member.isreg():
                    content = kit.extractfile(member)
                    assert content is not None
                    found[name] = content.read()
                if len(found) == 2:
                    return _by_kit(found[META], found[TRUTH], str(path))
    except (tarfile.TarError, EOFError, zlib.error) as error:
        with open(path, "rb") as file:
            kind = describe_content(file.read(256))
        reason = f"it is {kind}" if kind and "gzip" not in kind else error
        raise PrepError(
            f"{path}: not a readable .tar.gz ({reason}); download it again, its md5 is checked with"
            " --md5"
        ) from error
    except OSError as error:
        raise PrepError(
            str(unreadable(path, error))
            if error.strerror
            else f"{path}: {error}; download it again"
        ) from error
    missing = [name for name in (META, TRUTH) if name not in found]
    raise PrepError(
        f"{path}: has no {' and no '.join(missing)}; expected ImageNet's development kit of tasks 1"
        " and 2"
    )


def _by_table(text: str, where: str) -> dict[str, str]:
    try:
        return _rows_by_image(csv.DictReader(io.StringIO(text)), where)
    except csv.Error as error:
        raise PrepError(f"{where}: not a table of ImageId,PredictionString ({error})") from error


def _rows_by_image(rows: csv.DictReader[str], where: str) -> dict[str, str]:
    if not {"ImageId", "PredictionString"} <= set(rows.fieldnames or ()):
        raise PrepError(
            f"{where}: its columns are {', '.join(rows.fieldnames or ()) or 'none'}; expected"
            " ImageId,PredictionString"
        )
    labels: dict[str, str] = {}
    for row in rows:
        name = row["ImageId"] or ""
        wnid = ((row["PredictionString"] or "").split() or [""])[0]
        if not WNID.fullmatch(wnid):
            raise PrepError(
                f"{where}: line {rows.line_num}: expected a WordNet id and a box for {name!r},"
                f" found {row['PredictionString']!r}"
            )
        if labels.setdefault(name, wnid) != wnid:
            raise PrepError(
                f"{where}: line {rows.line_num}: {name!r} is {wnid} here and {labels[name]} above"
            )
    return labels


def read_kaggle_table(path: Path) -> dict[str, str]:
    """Labels from Kaggle's table, by its column ImageId."""
    return _by_table(_text(_content(path), str(path)), str(path))


def read_kaggle_table_in_zip(member: Sample) -> dict[str, str]:
    """Labels from the table inside Kaggle's zip."""
    where = f"{member.file}: {member.name}"
    try:
        content = read_zip_member(member)
    except (OSError, ValueError) as error:
        raise PrepError(f"{where}: {error}; download the zip again") from error
    return _by_table(_text(content, where), where)


def read_all(files: list[ValLabels]) -> dict[str, str]:
    """The labels of all files. Raises PrepError where two of them differ."""
    labels: dict[str, str] = {}
    for file in files:
        found = file.read()
        differ = [name for name, wnid in found.items() if labels.get(name, wnid) != wnid]
        if differ:
            raise PrepError(
                f"{file.path}: says {found[differ[0]]} of {differ[0]}, and {files[0].path} says"
                f" {labels[differ[0]]}: they differ on {len(differ):,} images; leave out the file"
                " that is wrong"
            )
        labels |= found
    return labels
