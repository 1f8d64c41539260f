"""Write predictions to a CSV file, which is complete or absent, and to tables in the terminal.

file,problem,class_1,probability_1,class_2,probability_2
cats/1.jpg,,cat,0.981244,dog,0.012345
cats/2.jpg,0 bytes,,,,
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from vit.inference.inputs import ImagePlace
from vit.inference.predict import Predictions
from vit.system.files import csv_writer
from vit.system.redact import escape_to_one_line

BAR_CELLS = 20
"""The width of the bar for a probability of 1, in characters."""


@contextmanager
def csv_file(path: Path, num_classes: int) -> Iterator[Any]:
    """Open a CSV file with `num_classes` classes per image, and yield a writer for `write_rows`.

    The file gets its name only when the block ends, so a killed command leaves no file that looks
    complete. Raises ValueError if the file cannot be written.
    """
    with csv_writer(path, "--csv ", "\n") as writer:
        columns = ["file", "problem"]
        for rank in range(1, num_classes + 1):
            columns += [f"class_{rank}", f"probability_{rank}"]
        writer.writerow(columns)
        yield writer


def write_rows(
    writer: Any, predictions: Predictions, places: Sequence[ImagePlace], class_names: Sequence[str]
) -> None:
    """Write a line for each image in `predictions`."""
    labels = predictions.labels.tolist()
    probabilities = predictions.probabilities.tolist()
    num_columns = 2 * predictions.labels.shape[1]
    for row, number in enumerate(range(predictions.first, predictions.first + len(labels))):
        cells: list[str] = []
        if number not in predictions.problems:
            for label, probability in zip(labels[row], probabilities[row], strict=True):
                cells += [class_names[label], f"{probability:.6f}"]
        cells += [""] * (num_columns - len(cells))
        writer.writerow([places[number].name, predictions.problems.get(number, ""), *cells])


def image_table(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> Table:
    """Return a table of images with their classes and probabilities.

    rows: the file name and the classes of each image, the most likely class first.
    """
    table = Table("image", "class", "%", "", box=None, pad_edge=False)
    table.columns[0].overflow = "fold"
    table.columns[1].overflow = "fold"
    table.columns[2].justify = "right"

    for name, classes in rows:
        for rank, (class_name, probability) in enumerate(classes):
            table.add_row(
                Text(escape_to_one_line(name) if rank == 0 else ""),
                Text(class_name, style="bold" if rank == 0 else ""),
                f"{100 * probability:.1f}",
                Text("█" * round(BAR_CELLS * probability), style="blue"),
                end_section=rank == len(classes) - 1,
            )
    return table


@dataclass
class Summary:
    """Totals over all predictions, and the first predictions as examples."""

    places: Sequence[ImagePlace]
    class_names: Sequence[str]
    num_examples: int
    """How many of the first images become examples."""
    examples: list[tuple[str, list[tuple[str, float]]]] = field(default_factory=list)
    """The file name and the classes of each example that could be read."""
    pixels: list[Tensor] = field(default_factory=list)
    """The pixels of each example, (C, H, W) uint8, if the predictions contain pixels."""
    num_done: int = 0
    num_problems: int = 0
    """The number of unreadable images, which the caller counts and reports."""
    _images: Tensor = field(init=False)
    _probabilities: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._images = torch.zeros(len(self.class_names), dtype=torch.int64)
        self._probabilities = torch.zeros(len(self.class_names), dtype=torch.float64)

    def add(self, predictions: Predictions) -> None:
        """Add a batch of predictions."""
        numbers = range(predictions.first, predictions.first + len(predictions.labels))
        good = [row for row, number in enumerate(numbers) if number not in predictions.problems]
        likeliest = predictions.labels[good, 0]
        self._images += torch.bincount(likeliest, minlength=len(self.class_names))
        self._probabilities.index_add_(0, likeliest, predictions.probabilities[good, 0].double())
        self.num_done += len(numbers)

        for row in good:
            if numbers[row] >= self.num_examples:
                break
            names = [self.class_names[label] for label in predictions.labels[row].tolist()]
            classes = list(zip(names, predictions.probabilities[row].tolist(), strict=True))
            self.examples.append((self.places[numbers[row]].name, classes))
            if predictions.pixels is not None:
                self.pixels.append(predictions.pixels[row])

    def class_table(self, num_rows: int = 20) -> Table:
        """Return a table of the most frequently predicted classes (first choice only)."""
        table = Table("class", "images", "share", "mean probability", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"

        total = int(self._images.sum())
        by_count = self._images.argsort(descending=True, stable=True).tolist()
        present = [label for label in by_count if self._images[label]]
        for label in present[:num_rows]:
            number = int(self._images[label])
            mean = float(self._probabilities[label]) / number
            table.add_row(
                Text(self.class_names[label]),
                f"{number:,}",
                f"{100 * number / total:.1f} %",
                f"{100 * mean:.1f} %",
            )

        hidden = present[num_rows:]
        if hidden:
            number = int(self._images[hidden].sum())
            table.add_row(
                f"{len(hidden):,} more classes", f"{number:,}", f"{100 * number / total:.1f} %", ""
            )
        return table
