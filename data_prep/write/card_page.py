"""A data set's card: dataset.md, contact_sheet.png and README.md."""

from __future__ import annotations

import bisect
import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data_prep.write.card_data import (
    THREADS,
    Card,
    decoded,
    fetch_index,
    read_card_info,
    read_quarantine,
    read_range,
    spread,
)
from data_prep.write.card_text import card_text
from data_prep.write.output import Output
from vit.data.shards.index_file import first_samples, sha256_of
from vit.system.files import replacing

SHEET_CELLS = 60
COLUMNS = 10
# pixels
CELL = 128
GAP = 10
TEXT_HEIGHT = 22
MARGIN = 16
INK = "#222222"
PALE = "#f2f2f2"
SEAL = b"\n<!-- sha256 of the above: %s; of contact_sheet.png: %s -->\n"
"""The last line of a card, by which `verify` sees whether it was altered."""


def write_card(place: Output | Path | str) -> None:
    """Write `dataset.md` and `contact_sheet.png` of the finished data set at `place`, a folder or a
    URL, into it.

    Raises ShardError if something is missing or an image cannot be decoded; OSError and PrepError
    as `Output` does.
    """
    output = place if isinstance(place, Output) else Output(place)
    info = read_card_info(output)
    # not the folder's name: equal data sets have equal cards
    name = str(info.get("source", "data set"))
    with output.staging() as folder:
        indexes = {
            split: fetch_index(output, f"{split}.index.npy", folder) for split in info["splits"]
        }

        def read(split: str, row: int) -> bytes:
            found = indexes[split][row]
            described = info["splits"][split]
            filename = described["filenames"][
                bisect.bisect_right(first_samples(described["shard_lengths"]), row) - 1
            ]
            return read_range(
                f"{info.get('shards_at', output)}/{filename}",
                int(found["offset"]),
                int(found["size"]),
            )

        card = Card(name, info, indexes, read, read_quarantine(output, info, folder))
        for path in draw_card(card, folder):
            output.publish(path)
    write_readme(output, info)


def write_readme(output: Output, info: Mapping[str, Any]) -> None:
    """Write `README.md` unless one is there, or there are no shards beside it: without it
    `load_dataset(ROOT)` takes sidecars for data."""
    if "shards_at" in info or output.size("README.md") >= 0:
        return
    # other names are none to Hugging Face
    if not all(re.fullmatch(r"\w+(\.\w+)*", split) for split in info["splits"]):
        return
    with output.staging() as folder:
        with replacing(folder / "README.md") as file:
            file.write(readme(info).encode())
        output.publish(folder / "README.md")


def readme(info: Mapping[str, Any]) -> str:
    """Hugging Face's description of the files, in YAML, and a line for people."""
    everything = {name for described in info["splits"].values() for name in described["filenames"]}
    files = []
    for split, described in info["splits"].items():
        names = described["filenames"]
        common = os.path.commonprefix([name.removesuffix(".tar") for name in names])  # noqa: RUF071  (of letters: they are names)
        pattern = f"{common.rstrip('0123456789')}*.tar"
        is_exact = set(fnmatch.filter(everything, pattern)) == set(names)
        paths = [pattern] if is_exact and not set(pattern[:-5]) & set("[]?*") else names
        files += [
            f"  - split: {split}",
            "    path:",
            *(f"    - {json.dumps(path)}" for path in paths),
        ]
    head = ["---", "configs:", "- config_name: default", "  data_files:", *files, "---", ""]
    told = (
        "Images in tar shards (WebDataset), with an index beside them; `python -m data_prep.card`"
        " writes dataset.md, which tells more."
    )
    return "\n".join([*head, "# Images", "", told]) + "\n"


def draw_card(card: Card, folder: Path) -> list[Path]:
    """Write both files to `folder`; returns their paths."""
    sheet = contact_sheet(card)
    text = card_text(card)
    paths = [folder / "contact_sheet.png", folder / "dataset.md"]
    with replacing(paths[0]) as file:
        sheet.save(file, "PNG")
    content = text.encode("utf-8", "replace")
    with replacing(paths[1]) as file:
        file.write(
            content
            + SEAL % (hashlib.sha256(content).hexdigest().encode(), sha256_of(paths[0]).encode())
        )
    return paths


def altered_card(folder: Path) -> str:
    """What is wrong with `dataset.md` in `folder`, or the picture beside it, by the line at its
    end; "" if nothing is."""
    content = (folder / "dataset.md").read_bytes()
    found = re.fullmatch(
        re.escape(SEAL).replace(b"%s", b"([0-9a-f]{64})"),
        content[-len(SEAL % (b"0" * 64, b"0" * 64)) :],
    )
    if found is None:
        return "its last line, with the hashes of the card, is missing"
    if hashlib.sha256(content[: -len(found[0])]).hexdigest().encode() != found[1]:
        return "altered: its text is not the one whose hash is in its last line"
    sheet = folder / "contact_sheet.png"
    if not sheet.exists():
        return "contact_sheet.png, which it shows, is missing"
    return (
        ""
        if sha256_of(sheet).encode() == found[2]
        else "contact_sheet.png is another one than it was drawn with"
    )


# ---- the picture ---------------------------------------------------------------------------------


def contact_sheet(card: Card) -> Image.Image:
    """One image for each of up to 60 classes, evenly spaced; of few classes several, side by side.
    Names stand under the images."""
    split = next(iter(card.indexes))
    labels = np.flatnonzero(card.images_per_class(split)).tolist()
    shown = [
        labels[number * len(labels) // min(len(labels), SHEET_CELLS)]
        for number in range(min(len(labels), SHEET_CELLS))
    ]
    copies = min(COLUMNS, SHEET_CELLS // len(shown))
    chosen = [_rows_of_class(card, split, label, copies) for label in shown]
    cells = [
        (label, row)
        for label, rows in zip(shown, chosen, strict=True)
        for row in [*rows, *[None] * (copies - len(rows))]
    ]
    columns = min(COLUMNS - COLUMNS % copies, len(cells))

    font = _font(14)
    width = 2 * MARGIN + columns * (CELL + GAP) - GAP
    height = 2 * MARGIN + -(-len(cells) // columns) * (CELL + TEXT_HEIGHT + GAP) - GAP
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    with ThreadPoolExecutor(THREADS) as pool:
        images = list(
            pool.map(
                lambda cell: None if cell[1] is None else _thumbnail(decoded(card, split, cell[1])),
                cells,
            )
        )
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


def _rows_of_class(card: Card, split: str, label: int, num_chosen: int) -> list[int]:
    rows = np.flatnonzero(card.indexes[split]["label"] == label)
    return [int(rows[number]) for number in spread(len(rows), num_chosen, label)]


def _thumbnail(image: Image.Image) -> Image.Image:
    """The whole image, as large as fits into a cell."""
    size = (
        max(1, CELL * image.width // max(image.size)),
        max(1, CELL * image.height // max(image.size)),
    )
    return image.resize(size, Image.Resampling.BICUBIC)


def _font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib and has the letters of many languages; Pillow's own
    has Latin ones only."""
    import matplotlib

    return ImageFont.truetype(
        Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), size
    )


def shortened(text: str, fits: Callable[[str], bool]) -> str:
    """`text` in one line, with as much of its middle left out as is needed to fit."""
    text = re.sub(r"\s+", " ", text)
    for left_out in range(max(1, len(text))):
        kept = len(text) - left_out
        short = text if not left_out else f"{text[: -(-kept // 2)]}…{text[len(text) - kept // 2 :]}"
        if fits(short):
            return short
    return "…"
