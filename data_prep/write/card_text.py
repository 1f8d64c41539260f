"""Write the Markdown text of a data set card from the data set's records, index and some images."""

import bisect
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from PIL import Image

from data_prep.write import restart_markers
from data_prep.write.images import EXIF_ORIENTED, exif_summary
from data_prep.write.output import Output
from data_prep.write.samples import spread
from vit.data.decode.images import decode
from vit.data.shards.index_file import first_samples, open_index
from vit.data.shards.info_file import read_info
from vit.system.files import ShardError
from vit.system.redact import escape_unprinted

THREADS = 8
QUANTILES = {"smallest": 0, "5 %": 5, "median": 50, "95 %": 95, "largest": 100}
SIDE_EDGES = (1, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 65536)
"""The bin edges, in pixels, of the histogram of shorter image sides."""
BAR = 40
"""The length of the longest histogram bar in characters."""
MOST_REASONS = 20
COLOR_IMAGES = 1000
"""The number of images decoded to estimate the mean and standard deviation of colors. The estimate
takes seconds, and its error is below 0.01."""


class Classes:
    """The classes recorded in a data set's `_info.json`."""

    info: Mapping[str, Any]

    @property
    def class_names(self) -> list[str]:
        return list(self.info.get("class_names") or [])

    @property
    def recorded_classes(self) -> int | None:
        """The number of classes, 0 if the data set has no labels, or None if the number is
        unknown."""
        return len(self.class_names) or self.info.get("num_classes")


def count_classes(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return how often each label occurs, (num_classes,), ignoring labels that are out of range."""
    return np.bincount(labels[(labels >= 0) & (labels < num_classes)], minlength=num_classes)


@dataclass(frozen=True)
class Card(Classes):
    """The data set that the card describes."""

    info: Mapping[str, Any]
    indexes: Mapping[str, np.ndarray]
    """The index of each split, as an INDEX_DTYPE array. The first split is for training."""
    tars_at: str
    """The folder or URL that contains the shards."""
    quarantined: Sequence[Mapping[str, Any]] = ()

    @property
    def name(self) -> str:
        # Do not fall back to the folder's name, because identical data sets must have identical
        # cards.
        return str(self.info.get("source", "data set"))

    @property
    def num_classes(self) -> int:
        return self.recorded_classes or 1 + max(
            int(self.labels(name).max()) for name in self.indexes
        )

    def labels(self, split: str) -> np.ndarray:
        """Return the label of each image, or zeros if the data set has no labels."""
        return np.maximum(self.indexes[split]["label"], 0)

    @property
    def num_images(self) -> int:
        return sum(map(len, self.indexes.values()))

    def class_name(self, label: int) -> str:
        if self.info.get("num_classes") == 0:
            return "no label"
        names = self.class_names
        return str(names[label]) if label < len(names) else f"class {label}"

    def images_per_class(self, split: str) -> np.ndarray:
        """Return the number of images per class, (num_classes,)."""
        return count_classes(self.labels(split), self.num_classes)

    def image(self, split: str, row: int) -> Image.Image:
        """Decode image `row` of a split to RGB. This method is thread-safe."""
        sample = self.indexes[split][row]
        described = self.info["splits"][split]
        shard = bisect.bisect_right(first_samples(described["shard_lengths"]), row) - 1
        tar = f"{self.tars_at}/{described['filenames'][shard]}"
        data = _read_range(tar, int(sample["offset"]), int(sample["size"]))

        try:
            return Image.fromarray(decode(data))
        except ValueError as error:
            raise ShardError(
                f"{self.name}: image {row} of {split}: {error}: run `python -m data_prep.verify`"
                " for details"
            ) from error


def load_card(output: Output, folder: Path) -> Card:
    """Read the data for the card. folder: the target of downloads if the output is at a URL.

    Raises ShardError if a file is missing.
    """
    info = output.read_json("_info.json") if output.local is None else read_info(output.local)
    if info is None:
        raise ShardError(f"{output}: no _info.json; expected a finished data set")

    indexes = {split: _load_index(output, split, folder) for split in info["splits"]}
    quarantined = []
    if info.get("quarantined"):
        lines = output.fetch("quarantine.jsonl", folder).read_bytes().splitlines()
        quarantined = [json.loads(line) for line in lines]

    return Card(info, indexes, str(info.get("shards_at", output)), quarantined)


def _load_index(output: Output, split: str, folder: Path) -> np.ndarray:
    """Open the index of a split. folder: the target of a download. Raises ShardError."""
    name = f"{split}.index.npy"
    if output.size(name) < 0:
        raise ShardError(
            f"{output}/{name}: no such file; run `python -m data_prep.index"
            f" {quote(str(output))}` to write it"
        )
    return open_index(output.fetch(name, folder))


def _read_range(place: str, offset: int, size: int) -> bytes:
    """Return `size` bytes at `offset` of a file, given by its path or URL."""
    if "://" not in place:
        with open(place, "rb") as file:
            return os.pread(file.fileno(), size, offset)

    import fsspec  # fsspec loads slowly, and a local folder does not need it.

    system, path = fsspec.core.url_to_fs(place)
    return system.cat_file(path, start=offset, end=offset + size)


def card_text(card: Card) -> str:
    """Return the card as Markdown."""
    is_unlabeled = card.info.get("num_classes") == 0
    classes = "without labels" if is_unlabeled else f"of {card.num_classes:,} classes"
    counts = ", ".join(f"{len(index):,} in `{split}`" for split, index in card.indexes.items())

    paragraphs = [
        f"# {card.name}",
        f"{card.num_images:,} images {classes}: {counts}.",
        "![Images by class](contact_sheet.png)",
        "## Splits",
        _splits(card),
        "## Sizes",
        *_sizes(card),
        "## Colors",
        *_colors(card),
        "## Converted or skipped images",
        *_conversions(card),
        "## Source",
        *_source(card),
        "## Classes",
        _classes(card),
    ]
    return escape_unprinted("\n\n".join(paragraphs)) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]], left: int = 1) -> str:
    """Return a table with the first `left` columns left-aligned and the others right-aligned."""

    def line(cells: Iterable[Any]) -> str:
        return f"| {' | '.join(escaped(str(cell)) for cell in cells)} |"

    rule = f"|{'|'.join('---' if column < left else '---:' for column in range(len(head)))}|"
    return "\n".join([line(head), rule, *map(line, rows)])


def escaped(text: str) -> str:
    """Return `text` on one line, with Markdown's special characters escaped."""
    return re.sub(r"([\\`*|<\[\]]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", re.sub(r"\s+", " ", text))


def number_range(counts: np.ndarray) -> str:
    """Return the range from the smallest to the largest count, or "-" if there are none."""
    if not len(counts):
        return "-"
    low, high = counts.min(), counts.max()
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _splits(card: Card) -> str:
    """Return a table with each split's numbers."""
    quarantined = Counter(entry["split"] for entry in card.quarantined)
    rows = [
        (
            split,
            f"{len(index):,}",
            number_range(card.images_per_class(split)),
            f"{len(card.info['splits'][split]['filenames']):,}",
            f"{int(index['size'].sum(dtype=np.uint64)) / 1e6:,.1f}",
            f"{quarantined[split]:,}",
        )
        for split, index in card.indexes.items()
    ]

    return markdown_table(
        ("split", "images", "per class", "shards", "MB of images", "skipped"), rows
    )


def _sizes(card: Card) -> list[str]:
    """Return paragraphs about the sizes of images, over all splits."""
    images = np.concatenate(list(card.indexes.values()))
    width, height = images["width"], images["height"]
    shorter = np.minimum(width, height)
    columns = {"width": width, "height": height, "shorter side": shorter, "bytes": images["size"]}

    rows = []
    for title, values in columns.items():
        quantiles = np.percentile(values, list(QUANTILES.values()), method="inverted_cdf")
        rows.append((title, *(f"{int(value):,}" for value in quantiles)))

    # A size is one number, with the width in the upper 16 bits and the height in the lower 16.
    sizes, counts = np.unique(width.astype(np.uint32) << 16 | height, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:5]
    common = ", ".join(
        f"{sizes[k] >> 16} x {sizes[k] & 65535} ({_percent(counts[k], len(shorter))})" for k in most
    )
    more = f", and {len(sizes) - len(most):,} others" if len(sizes) > len(most) else ""

    return [
        "Over all splits, in pixels and bytes:",
        markdown_table(("", *QUANTILES), rows),
        f"Most frequent (width x height): {common}{more}.",
        "Shorter sides:",
        f"```text\n{histogram(shorter)}\n```",
    ]


def _percent(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %"


def histogram(sides: np.ndarray) -> str:
    """Draw a text bar for each SIDE_EDGES bin, from the first to the last nonempty bin."""
    counts, _ = np.histogram(sides, SIDE_EDGES)
    filled = np.flatnonzero(counts)

    lines = [
        f"{SIDE_EDGES[k]:>6} to {SIDE_EDGES[k + 1] - 1:<6} {_percent(counts[k], len(sides)):>7}"
        f"  {'█' * round(BAR * counts[k] / counts.max())}".rstrip()
        for k in range(filled[0], filled[-1] + 1)
    ]
    return "\n".join(lines)


def _colors(card: Card) -> list[str]:
    """Return paragraphs about the colors of training images."""
    split = next(iter(card.indexes))
    rows = spread(len(card.indexes[split]), COLOR_IMAGES)
    mean, std = color_statistics(card, split, rows)
    number = f"all {len(rows):,}" if len(rows) == len(card.indexes[split]) else f"{len(rows):,}"
    table_rows = [
        ("mean", *(f"{value:.3f}" for value in mean)),
        ("std", *(f"{value:.3f}" for value in std)),
    ]

    return [
        f"Computed over {number} images of `{split}` with equal weight, decoded in full. Red,"
        " green and blue range from 0 to 1:",
        markdown_table(("", "red", "green", "blue"), table_rows),
    ]


def color_statistics(card: Card, split: str, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and standard deviation of RGB over all pixels, (3,) in [0, 1].

    All images have the same weight.
    """
    levels = np.arange(256) / 255

    def moments(row: int) -> np.ndarray:
        counts = np.array(card.image(split, row).histogram(), np.float64).reshape(3, 256)
        return np.stack([counts @ levels, counts @ levels**2]) / counts[0].sum()

    with ThreadPoolExecutor(THREADS) as pool:
        mean, square = np.mean(list(pool.map(moments, rows)), axis=0)
    return mean, np.sqrt(np.maximum(0, square - mean**2))


def _conversions(card: Card) -> list[str]:
    """Return paragraphs about the images that the writer changed, noted or skipped."""
    if "catalog" not in card.info:
        return ["Unknown, because another program wrote these shards."]

    lines = ["No image was converted."]
    if card.info.get("changed"):
        rows = [(reason, f"{count:,}") for reason, count in sorted(card.info["changed"].items())]
        lines = [
            "Changes and notes of the writer. All other images have the bytes of their source.",
            markdown_table(("", "images"), rows),
            *_restart_markers(card.info["changed"]),
        ]
    if card.info.get(EXIF_ORIENTED):
        lines.append(f"{exif_summary(card.info[EXIF_ORIENTED], card.num_images)}.")

    if not card.quarantined:
        return [*lines, "No image was skipped."]
    reasons = Counter((entry["split"], entry["reason"]) for entry in card.quarantined)
    listed = [(*key, f"{count:,}") for key, count in reasons.most_common(MOST_REASONS)]
    lines += [
        f"{len(card.quarantined):,} images cannot be read and were skipped."
        " [quarantine.jsonl](quarantine.jsonl) lists them.",
        markdown_table(("split", "reason", "images"), listed, 2),
    ]
    if len(reasons) > MOST_REASONS:
        lines.append(f"And {len(reasons) - MOST_REASONS:,} other reasons.")
    return lines


def _restart_markers(changed: Mapping[str, int]) -> list[str]:
    """Return a line about restart markers, or nothing if the writer was not asked to add any.

    changed: the number of images with each change, such as "resized, with restart markers".
    """
    marked = 0
    unchanged: Counter[str] = Counter()
    for change, count in changed.items():
        _, is_unmarked, reason = change.partition(restart_markers.UNMARKED)
        if is_unmarked:
            unchanged[reason] += count
        elif change.endswith(restart_markers.MARKED):
            marked += count
    if not marked and not unchanged:
        return []

    line = (
        f"{marked:,} images got restart markers and better Huffman tables, with other bytes but the"
        " same pixels in every decoder."
    )
    if unchanged:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in unchanged.most_common())
        line += f" {unchanged.total():,} were not changed: {reasons}."
    return [line]


def _source(card: Card) -> list[str]:
    """Return paragraphs about the source: the command, its notes and its options."""
    source = card.info.get("source")
    lines = ["Unknown." if source is None else f"Created by `python -m data_prep.{source}`."]
    if card.info.get("origin"):
        lines.append("\n".join(f"- {escaped(line)}" for line in card.info["origin"]))
    if card.info.get("options"):
        rows = [
            (name, json.dumps(value, ensure_ascii=False))
            for name, value in card.info["options"].items()
        ]
        lines.append(markdown_table(("option", "value"), rows, 2))
    return lines


def _classes(card: Card) -> str:
    """Return a table of all classes with their number of images in each split."""
    counts = {split: card.images_per_class(split) for split in card.indexes}
    rows = [
        (label, card.class_name(label), *map("{:,}".format, numbers))
        for label, numbers in enumerate(zip(*counts.values(), strict=True))
    ]
    return markdown_table(("label", "class", *counts), rows, 2)
