"""A data set's card: what is in it, in numbers, words and pictures. Free of torch.

    python -m data_prep.card ROOT

The data's story: `_info.json` and the index of a finished data set give counts, sizes and what the
writer did; of the training split up to 1,000 images, spread over it by a hash, are decoded for the
mean and standard deviation of their colours, and one image for each of up to 60 classes is drawn.
Every source's command ends with it; this one makes it again.

    <root>/
      dataset.md            splits, image sizes, colours, what was converted or left out, source and options, all classes
      contact_sheet.png     1,400 pixels wide at most
      README.md             if there is none yet: which shards are which split, in the form that Hugging Face's `load_dataset` reads

Equal data sets give equal bytes, with equal versions of Pillow.
"""

from __future__ import annotations

import argparse
import bisect
import fnmatch
import hashlib
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data_prep.command import Parser, run
from data_prep.write import restart_markers
from data_prep.write.catalogue import stable_hash
from data_prep.write.images import ASKS_TO_BE_TURNED, told_of_turned
from data_prep.write.output import Output
from vit.data.decode.images import decode
from vit.data.shards.data_set import read_info
from vit.data.shards.index_file import firsts_of, open_index, sha256_of
from vit.system.files import ShardError, replacing

COLOUR_IMAGES = 1000
"""Images decoded for mean and standard deviation: some seconds, and the error of the mean is below
0.01."""
THREADS = 8
"""Images decoded at a time."""
SHEET_CELLS = 60
COLUMNS = 10
# pixels
CELL = 128
GAP = 10
TEXT_HEIGHT = 22
MARGIN = 16
INK = "#222222"
PALE = "#f2f2f2"
QUANTILES = {"smallest": 0, "5 %": 5, "median": 50, "95 %": 95, "largest": 100}
SIDE_EDGES = (1, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 65536)
"""Bins of the histogram of shorter sides, in pixels."""
BAR = 40
"""Letters of the longest bar."""
MOST_REASONS = 20
SEAL = b"\n<!-- sha256 of the above: %s; of contact_sheet.png: %s -->\n"
"""The last line of a card, by which `verify` sees whether it was altered."""


@dataclass(frozen=True)
class Card:
    """What a card is made of."""

    name: str
    info: Mapping[str, Any]
    indexes: Mapping[str, np.ndarray]
    """INDEX_DTYPE of each split; the first is the training split."""
    read: Callable[[str, int], bytes]
    """Encoded image of a sample of a split, by its number; called from several threads."""
    quarantined: Sequence[Mapping[str, Any]] = ()

    @property
    def num_classes(self) -> int:
        known = len(self.info.get("class_names") or []) or self.info.get("num_classes")
        return known or 1 + max(int(index["label"].max()) for index in self.indexes.values())

    def class_name(self, label: int) -> str:
        names = self.info.get("class_names") or []
        return str(names[label]) if label < len(names) else f"class {label}"

    def images_per_class(self, split: str) -> np.ndarray:
        """(num_classes,) images of each class."""
        return np.bincount(self.indexes[split]["label"], minlength=self.num_classes)


def write_card(place: Output | Path | str) -> None:
    """Write `dataset.md` and `contact_sheet.png` of the finished data set at `place`, a folder or a
    URL, into it.

    Raises ShardError if something is missing or an image cannot be decoded; OSError and PrepError
    as `Output` does.
    """
    output = place if isinstance(place, Output) else Output(place)
    info = _read_info(output)
    # not the folder's name: equal data sets have equal cards
    name = str(info.get("source", "data set"))
    with output.staging() as folder:
        indexes = {
            split: _fetch_index(output, f"{split}.index.npy", folder) for split in info["splits"]
        }

        def read(split: str, row: int) -> bytes:
            found = indexes[split][row]
            described = info["splits"][split]
            filename = described["filenames"][
                bisect.bisect_right(firsts_of(described["shard_lengths"]), row) - 1
            ]
            return _read_range(
                f"{info.get('shards_at', output)}/{filename}",
                int(found["offset"]),
                int(found["size"]),
            )

        card = Card(name, info, indexes, read, _quarantined(output, info, folder))
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


def _read_info(output: Output) -> Mapping[str, Any]:
    if output.local is not None:
        return read_info(output.local)
    info = output.read_json("_info.json")
    if info is None:
        raise ShardError(f"{output}: no _info.json; expected a finished data set")
    return info


def _fetch_index(output: Output, name: str, folder: Path) -> np.ndarray:
    if output.size(name) < 0:
        raise ShardError(
            f"{output}/{name}: no such file; run `python -m data_prep.index {output}`, which"
            " writes it"
        )
    return open_index(output.fetch(name, folder))


def _read_range(place: str, offset: int, size: int) -> bytes:
    if "://" not in place:
        with open(place, "rb") as file:
            return os.pread(file.fileno(), size, offset)
    import fsspec  # here, as a local folder needs none of it

    system, path = fsspec.core.url_to_fs(place)
    return system.cat_file(path, start=offset, end=offset + size)


def _quarantined(output: Output, info: Mapping[str, Any], folder: Path) -> list[Mapping[str, Any]]:
    if not info.get("quarantined"):
        return []
    return [
        json.loads(line)
        for line in output.fetch("quarantine.jsonl", folder).read_bytes().splitlines()
    ]


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


def _decoded(card: Card, split: str, row: int) -> Image.Image:
    """One image in RGB."""
    try:
        return Image.fromarray(decode(card.read(split, row)))
    except ValueError as error:
        raise ShardError(
            f"{card.name}: image {row} of {split}: {error}; `python -m data_prep.verify` tells more"
        ) from error


def spread(num_rows: int, num_chosen: int, *seed: Any) -> list[int]:
    """Row numbers, ascending: from each of `num_chosen` equal stretches one that a hash chooses;
    all rows if there are not more."""
    if num_chosen >= num_rows:
        return list(range(num_rows))
    edges = [part * num_rows // num_chosen for part in range(num_chosen + 1)]
    chances = (
        int.from_bytes(stable_hash("spread", *seed, part), "little") for part in range(num_chosen)
    )
    return [
        low + chance % (high - low)
        for (low, high), chance in zip(itertools.pairwise(edges), chances, strict=True)
    ]


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
                lambda cell: (
                    None if cell[1] is None else _thumbnail(_decoded(card, split, cell[1]))
                ),
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


# ---- the text ------------------------------------------------------------------------------------


def card_text(card: Card) -> str:
    """The card in Markdown."""
    counts = ", ".join(f"{len(index):,} in `{split}`" for split, index in card.indexes.items())
    sections = {
        f"# {card.name}": [
            f"{sum(map(len, card.indexes.values())):,} images of {card.num_classes:,} classes:"
            f" {counts}."
        ],
        "![Images by class](contact_sheet.png)": [],
        "## Splits": _splits(card),
        "## Sizes": _sizes(card),
        "## Colours": _colours(card),
        "## Converted or left out": _conversions(card),
        "## Source": _source(card),
        "## Classes": _classes(card),
    }
    return (
        "\n\n".join("\n\n".join([heading, *paragraphs]) for heading, paragraphs in sections.items())
        + "\n"
    )


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]], left: int = 1) -> str:
    """A table whose first `left` columns are aligned left, the others right."""

    def line(cells: Iterable[Any]) -> str:
        return f"| {' | '.join(escaped(str(cell)) for cell in cells)} |"

    rule = f"|{'|'.join('---' if column < left else '---:' for column in range(len(head)))}|"
    return "\n".join([line(head), rule, *map(line, rows)])


def escaped(text: str) -> str:
    """`text` in one line, without meaning to Markdown."""
    return re.sub(r"([\\`*|<\[\]]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", re.sub(r"\s+", " ", text))


def _splits(card: Card) -> list[str]:
    left_out = Counter(entry["split"] for entry in card.quarantined)
    rows = []
    for split, index in card.indexes.items():
        described = card.info["splits"][split]
        counts = card.images_per_class(split)
        per_class = (
            f"{counts.min():,} to {counts.max():,}"
            if counts.min() < counts.max()
            else f"{counts.min():,}"
        )
        megabytes = f"{int(index['size'].sum(dtype=np.uint64)) / 1e6:,.1f}"
        rows.append(
            (
                split,
                f"{len(index):,}",
                per_class,
                f"{len(described['filenames']):,}",
                megabytes,
                f"{left_out[split]:,}",
            )
        )
    return [
        markdown_table(
            ("split", "images", "of each class", "shards", "MB of images", "left out"), rows
        )
    ]


def _sizes(card: Card) -> list[str]:
    columns = {
        name: np.concatenate([index[name] for index in card.indexes.values()])
        for name in ("width", "height", "size")
    }
    shorter = np.minimum(columns["width"], columns["height"])
    rows = []
    for title, values in (
        ("width", columns["width"]),
        ("height", columns["height"]),
        ("shorter side", shorter),
        ("bytes", columns["size"]),
    ):
        found = np.percentile(values, list(QUANTILES.values()), method="inverted_cdf")
        rows.append((title, *(f"{int(value):,}" for value in found)))
    pairs, counts = np.unique(
        columns["width"].astype(np.uint32) << 16 | columns["height"], return_counts=True
    )
    most = np.argsort(-counts, kind="stable")[:5]
    common = ", ".join(
        f"{pairs[k] >> 16} x {pairs[k] & 65535} ({_percent(counts[k], len(shorter))})" for k in most
    )
    more = f", and {len(pairs) - len(most):,} others" if len(pairs) > len(most) else ""
    return [
        "Of all splits together, in pixels and bytes:",
        markdown_table(("", *QUANTILES), rows),
        f"Most frequent (width x height): {common}{more}.",
        "Shorter sides:",
        f"```text\n{histogram(shorter)}\n```",
    ]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def histogram(sides: np.ndarray) -> str:
    """A bar of text for each bin of SIDE_EDGES between the first and the last that are not
    empty."""
    counts, _ = np.histogram(sides, SIDE_EDGES)
    filled = np.flatnonzero(counts)
    lines = []
    for k in range(filled[0], filled[-1] + 1):
        bar = "█" * round(BAR * counts[k] / counts.max())
        lines.append(
            f"{SIDE_EDGES[k]:>6} to {SIDE_EDGES[k + 1] - 1:<6} {_percent(counts[k], len(sides)):>7}"
            f"  {bar}".rstrip()
        )
    return "\n".join(lines)


def _colours(card: Card) -> list[str]:
    split = next(iter(card.indexes))
    rows = spread(len(card.indexes[split]), COLOUR_IMAGES)
    mean, std = colour_statistics(card, split, rows)
    which = f"all {len(rows):,}" if len(rows) == len(card.indexes[split]) else f"{len(rows):,}"
    told = (
        f"Over {which} images of `{split}`, each with the same weight, decoded in full; red, green"
        " and blue from 0 to 1:"
    )
    table = markdown_table(
        ("", "red", "green", "blue"),
        [(name, *(f"{x:.3f}" for x in v)) for name, v in (("mean", mean), ("std", std))],
    )
    return [told, table]


def colour_statistics(card: Card, split: str, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of red, green and blue, (3,) each in [0, 1], over all pixels;
    each image has the same weight."""
    levels = np.arange(256) / 255

    def moments(row: int) -> np.ndarray:
        counts = np.array(_decoded(card, split, row).histogram(), np.float64).reshape(3, 256)
        return np.stack([counts @ levels, counts @ levels**2]) / counts[0].sum()

    with ThreadPoolExecutor(THREADS) as pool:
        mean, square = np.mean(list(pool.map(moments, rows)), axis=0)
    return mean, np.sqrt(np.maximum(0, square - mean**2))


def _conversions(card: Card) -> list[str]:
    if "catalogue" not in card.info:
        return ["Not known: these shards were made elsewhere and indexed."]
    told = []
    if changed := card.info.get("changed"):
        told.append(
            "What the writer changed or remarked; all other images have the bytes of their source."
        )
        told.append(
            markdown_table(
                ("", "images"),
                [(reason, f"{count:,}") for reason, count in sorted(changed.items())],
            )
        )
        told += _restart_markers(changed)
    else:
        told.append("No image was converted.")
    if turned := card.info.get(ASKS_TO_BE_TURNED):
        told.append(f"{told_of_turned(turned, sum(map(len, card.indexes.values())))}.")
    if card.quarantined:
        reasons = Counter((entry["split"], entry["reason"]) for entry in card.quarantined)
        told.append(
            f"{len(card.quarantined):,} images cannot be read and were left out;"
            " [quarantine.jsonl](quarantine.jsonl) names them."
        )
        told.append(
            markdown_table(
                ("split", "reason", "images"),
                [(*key, f"{n:,}") for key, n in reasons.most_common(MOST_REASONS)],
                2,
            )
        )
        if len(reasons) > MOST_REASONS:
            told.append(f"And {len(reasons) - MOST_REASONS:,} other reasons.")
    else:
        told.append("No image was left out.")
    return told


def _restart_markers(changed: Mapping[str, int]) -> list[str]:
    marked = sum(
        count for reason, count in changed.items() if reason.endswith(restart_markers.MARKED)
    )
    kept: Counter[str] = Counter()
    for reason, count in changed.items():
        if restart_markers.UNMARKED in reason:
            kept[reason.partition(restart_markers.UNMARKED)[2]] += count
    if not marked and not kept:
        return []
    told = (
        f"{marked:,} images got restart markers and better Huffman tables: other bytes, the same"
        " pixels in every decoder."
    )
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in kept.most_common())
    return [told + (f" {kept.total():,} stayed as they were: {reasons}." if kept else "")]


def _source(card: Card) -> list[str]:
    options = card.info.get("options") or {}
    notes = [f"- {escaped(line)}" for line in card.info.get("origin") or []]
    told = [
        (
            f"Made by `python -m data_prep.{card.info['source']}`."
            if "source" in card.info
            else "Not known."
        )
    ]
    told += ["\n".join(notes)] if notes else []
    rows = [(name, json.dumps(value, ensure_ascii=False)) for name, value in options.items()]
    return told + ([markdown_table(("option", "value"), rows, 2)] if rows else [])


def _classes(card: Card) -> list[str]:
    counts = {split: card.images_per_class(split) for split in card.indexes}
    rows = [
        (label, card.class_name(label), *(f"{count[label]:,}" for count in counts.values()))
        for label in range(card.num_classes)
    ]
    return [markdown_table(("label", "class", *counts), rows, 2)]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser("python -m data_prep.card", __doc__)
    parser.add_argument("root", metavar="ROOT", help="finished data set, a folder or a URL")

    def command(args: argparse.Namespace) -> None:
        write_card(args.root)
        print(f"look at {args.root}/contact_sheet.png and dataset.md")

    return run(command, parser.parse_args(argv), "start it again")


if __name__ == "__main__":
    sys.exit(main())
