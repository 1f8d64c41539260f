"""Write a data set card: dataset.md, a contact sheet, and a README.md for Hugging Face.

A hash selects up to 1,000 images from all parts of the training split. They are decoded to compute
the mean and standard deviation of colors. The contact sheet shows one image from each of up to 60
classes. Identical data sets produce identical bytes with the same version of Pillow.
"""

import fnmatch
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data_prep.write.card_text import THREADS, Card, card_text, load_card
from data_prep.write.output import Output
from data_prep.write.samples import spread
from vit.system.files import replacing, sha256_of

SHEET_CELLS = 60
COLUMNS = 10
CELL = 128
"""The side of a contact-sheet cell in pixels. The next three constants are also in pixels."""
GAP = 10
TEXT_HEIGHT = 22
MARGIN = 16
INK = "#222222"
PALE = "#f2f2f2"
SEAL = b"\n<!-- sha256 of the above: %s; of contact_sheet.png: %s -->\n"
"""The last line of a card, with which `verify` detects changes."""


def write_card(place: Output | Path | str) -> None:
    """Write the card of the finished data set at `place`, a folder or a URL.

    Raises ShardError if a file is missing or an image cannot be decoded, and OSError and PrepError
    in the same cases as `Output`.
    """
    output = place if isinstance(place, Output) else Output(place)
    with output.staging() as folder:
        card = load_card(output, folder)

        # Create the text and the picture before writing, so that an undecodable image does not
        # destroy the old card.
        picture = contact_sheet(card)
        text = card_text(card).encode("utf-8", "replace")

        sheet = folder / "contact_sheet.png"
        with replacing(sheet) as file:
            picture.save(file, "PNG")
        with replacing(folder / "dataset.md") as file:
            file.write(text + _seal(text, sheet))
        output.publish(sheet)
        output.publish(folder / "dataset.md")

    write_readme(output, card.info)


def is_as_written(folder: Path) -> bool:
    """Return whether `dataset.md` and its picture are unchanged since they were written."""
    card, sheet = folder / "dataset.md", folder / "contact_sheet.png"
    if not card.exists() or not sheet.exists():
        return False

    content = card.read_bytes()
    text = content[: content.rfind(SEAL[:5])]
    return content == text + _seal(text, sheet)


def _seal(text: bytes, sheet: Path) -> bytes:
    return SEAL % (hashlib.sha256(text).hexdigest().encode(), sha256_of(sheet).encode())


# ---- README.md -----------------------------------------------------------------------------------


def write_readme(output: Output, info: Mapping[str, Any]) -> None:
    """Write `README.md` next to the shards, unless it exists.

    Without this file, Hugging Face's `load_dataset(ROOT)` would read the sidecars as data.
    """
    if "shards_at" in info or output.size("README.md") >= 0:
        return

    # Hugging Face accepts only split names of this form.
    if all(re.fullmatch(r"\w+(\.\w+)*", split) for split in info["splits"]):
        output.write("README.md", readme(info).encode())


def readme(info: Mapping[str, Any]) -> str:
    """Return README.md, which lists each split's files in Hugging Face's YAML format."""
    names_of = {split: described["filenames"] for split, described in info["splits"].items()}
    all_names = set[str]().union(*names_of.values())

    files = []
    for split, names in names_of.items():
        # Use a pattern such as train-*.tar if it matches exactly the split's files.
        common = os.path.commonprefix([name.removesuffix(".tar") for name in names])  # noqa: RUF071  (of letters: they are names)
        pattern = f"{common.rstrip('0123456789')}*.tar"
        is_exact = set(fnmatch.filter(all_names, pattern)) == set(names)
        has_wildcards = set("[]?*") & set(pattern.removesuffix("*.tar"))
        paths = [pattern] if is_exact and not has_wildcards else names
        files += [
            f"  - split: {split}",
            "    path:",
            *(f"    - {json.dumps(path)}" for path in paths),
        ]

    return "\n".join(
        [
            "---",
            "configs:",
            "- config_name: default",
            "  data_files:",
            *files,
            "---",
            "",
            "# Images",
            "",
            # Rewording changes the output bytes.
            "Images in tar shards (WebDataset), with an index beside them; `python -m"
            " data_prep.card` writes dataset.md, which tells more.",
            "",
        ]
    )


# ---- the picture ---------------------------------------------------------------------------------


def contact_sheet(card: Card) -> Image.Image:
    """Draw images of up to 60 evenly spaced classes, with the class names.

    If there are only a few classes, several images per class are drawn side by side.
    """
    split = next(iter(card.indexes))
    labels = np.flatnonzero(card.images_per_class(split)).tolist()
    num_shown = min(len(labels), SHEET_CELLS)
    copies = min(COLUMNS, SHEET_CELLS // num_shown)

    cells: list[tuple[int, int | None]] = []  # (label, row); row is None for an empty cell
    for number in range(num_shown):
        label = labels[number * len(labels) // num_shown]  # evenly spaced
        rows = np.flatnonzero(card.labels(split) == label)
        cells += [(label, int(rows[place])) for place in spread(len(rows), copies, label)]
        cells += [(label, None)] * (copies - len(rows))

    # All images of a class are in one line.
    columns = min(COLUMNS - COLUMNS % copies, len(cells))
    num_lines = math.ceil(len(cells) / columns)

    font = _font(14)
    size = (
        2 * MARGIN + columns * (CELL + GAP) - GAP,
        2 * MARGIN + num_lines * (CELL + TEXT_HEIGHT + GAP) - GAP,
    )
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)

    def thumbnail(row: int | None) -> Image.Image | None:
        return None if row is None else _thumbnail(card.image(split, row))

    with ThreadPoolExecutor(THREADS) as pool:
        images = list(pool.map(thumbnail, [row for _, row in cells]))

    for place, ((label, _), image) in enumerate(zip(cells, images, strict=True)):
        if image is None:
            continue

        left = MARGIN + place % columns * (CELL + GAP)
        top = MARGIN + place // columns * (CELL + TEXT_HEIGHT + GAP)
        draw.rectangle((left, top, left + CELL - 1, top + CELL - 1), PALE)
        sheet.paste(image, (left + (CELL - image.width) // 2, top + (CELL - image.height) // 2))
        name = shortened(card.class_name(label), lambda text: font.getlength(text) <= CELL)
        draw.text((left + CELL / 2, top + CELL + TEXT_HEIGHT / 2), name, INK, font, anchor="mm")

    return sheet


def _thumbnail(image: Image.Image) -> Image.Image:
    """Resize an image so that its longer side fills a cell."""
    return image.resize(
        (
            max(1, CELL * image.width // max(image.size)),
            max(1, CELL * image.height // max(image.size)),
        ),
        Image.Resampling.BICUBIC,
    )


def _font(size: int) -> ImageFont.FreeTypeFont:
    """Return matplotlib's DejaVu Sans, because Pillow's own font has only Latin letters."""
    import matplotlib

    return ImageFont.truetype(
        Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), size
    )


def shortened(text: str, fits: Callable[[str], bool]) -> str:
    """Return `text` on one line. If it does not fit, replace its middle with an ellipsis."""
    text = re.sub(r"\s+", " ", text)
    for num_dropped in range(max(1, len(text))):
        length = len(text) - num_dropped
        cut = f"{text[: math.ceil(length / 2)]}…{text[len(text) - length // 2 :]}"
        short = cut if num_dropped else text
        if fits(short):
            return short
    return "…"
