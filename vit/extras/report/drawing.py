"""Draw the pictures of reports in a common style: width, colors, fonts and shortened names.

Every PNG is 1400 pixels wide. Color-blind readers can distinguish the colors of the palette (Okabe
and Ito 2008), and information is never conveyed by color only. Long class names are shortened in
the middle. A class without a name is shown as "class 7".
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from vit.system.files import picture_format, replacing, report_write_errors

# Only functions that draw import matplotlib, so that training starts faster.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 8.0
DPI = 175
TITLE_PT = 12.0
TEXT_PT = 10.5
SMALL_PT = 9.5
GAP_IN = 0.08
HEADING_IN = 0.5
"""The height of a sheet's heading."""
TITLES_IN = 0.25
"""The height of the column titles below the heading."""
TITLE_CENTER_IN = 0.1
"""The distance from the heading to the center of a column title."""
POINTS_PER_IN = 72
LETTER_WIDTH = 0.55
"""The average width of a letter, as a fraction of the font size."""
LINE_PT_PER_IN = 55
"""The number of 1 pt lines of text per inch. A point is 1/72 inch, but lines also need spacing."""
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
GRAY = "#666666"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
FONT = "DejaVu Sans"
"""The font that matplotlib includes. Pictures therefore look the same on all machines."""
STYLE: dict[str, Any] = {
    "font.size": TEXT_PT,
    "axes.titlesize": TITLE_PT,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.alpha": 0.3,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "legend.fontsize": 9,
    "legend.framealpha": 0.8,
    "savefig.dpi": DPI,
    "pdf.fonttype": 42,  # TrueType, because publishers reject Type 3 fonts
    "svg.fonttype": "path",  # Draw outlines, because phones lack DejaVu Sans.
    "svg.hashsalt": "vit",
    "text.parse_math": False,  # A class may be called "US$".
}
OTHER_LETTERS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Hiragino Sans",
    "Apple SD Gothic Neo",
    "Microsoft YaHei",
    "Malgun Gothic",
    "Noto Sans Devanagari",
    "Noto Sans Bengali",
    "Noto Sans Thai",
    "Noto Sans Tamil",
    "Arial Unicode MS",
)
"""Fallback fonts for letters that DejaVu Sans lacks. Only installed fonts are used."""
_missing_letters = set[str]()
"""The letters that have already been reported."""


@contextmanager
def drawing(
    picture: Path, height_in: float, *, width_in: float = WIDTH_IN, **options: Any
) -> Iterator[Figure]:
    """Yield a figure in the common style, and write it to `picture` after the block.

    The suffix of `picture` selects the format, which must be in `FORMATS`. If writing fails, the
    old picture is kept. Raises ValueError for an unknown suffix, and if the picture cannot be
    written.
    """
    form = picture_format(picture)
    import matplotlib.style

    style = STYLE | {"font.family": _fonts()}
    # "default" replaces the user's matplotlib settings.
    with matplotlib.style.context(["default", style]), _missing_letters_once():
        from matplotlib.figure import Figure

        figure = Figure((width_in, height_in), **options)
        yield figure
        with report_write_errors(picture):
            picture.parent.mkdir(parents=True, exist_ok=True)
            with replacing(picture) as file:
                figure.savefig(file, format=form)


@lru_cache
def _fonts() -> list[str]:
    """Return `FONT` and the installed fonts among `OTHER_LETTERS`."""
    from matplotlib.font_manager import fontManager

    present = {font.name for font in fontManager.ttflist}
    return [FONT, *(name for name in OTHER_LETTERS if name in present)]


@contextmanager
def _missing_letters_once() -> Iterator[None]:
    """Report in one line, instead of matplotlib's many warnings, all letters that no font has."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield

    letters = set[str]()
    for warning in caught:
        match = re.match(r"Glyph (?P<number>\d+) .*missing from", str(warning.message))
        if match:
            letters.add(chr(int(match["number"])))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )

    letters -= _missing_letters
    if letters:
        _missing_letters.update(letters)
        print(
            f"note: no installed font has {' '.join(sorted(letters)[:20])}, drawn as boxes: install"
            f" a font such as {OTHER_LETTERS[0]}",
            file=sys.stderr,
        )


def new_sheet(figure: Figure, heading: str) -> Axes:
    """Add axes that cover the figure, in inches from the top left corner, and draw a heading.

    The heading occupies the top `HEADING_IN`.
    """
    width, height = figure.get_size_inches()
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    axes.text(0.1, 0.25, heading, size=TITLE_PT, weight="bold", va="center")
    return axes


def place(
    sheet: Axes, pixels: NDArray, *, at: tuple[float, float], size: tuple[float, float]
) -> None:
    """Draw `pixels` (H, W, 3) centered in a box, as large as possible.

    Args:
        at: Left and top of the box, in inches.
        size: The width and height of the box, in inches.
    """
    scale = min(size[0] / pixels.shape[1], size[1] / pixels.shape[0])
    half_w = pixels.shape[1] * scale / 2
    half_h = pixels.shape[0] * scale / 2
    x, y = at[0] + size[0] / 2, at[1] + size[1] / 2
    sheet.imshow(pixels, extent=(x - half_w, x + half_w, y + half_h, y - half_h), aspect="auto")


class Cell(NamedTuple):
    """A picture with its caption, for a grid of pictures."""

    image: Tensor
    """(1 or 3, H, W) uint8, or float in [0, 1]."""
    caption: list[str]


def cell_width_in(num_columns: int) -> float:
    """Return the width of each picture in a grid, in inches."""
    return (WIDTH_IN - GAP_IN) / num_columns - GAP_IN


def plot_cells(
    cells: Sequence[Cell],
    num_columns: int,
    heading: str,
    picture: Path,
    titles: Sequence[str] = (),
    caption_pt: float = SMALL_PT,
) -> Path:
    """Draw pictures of equal size with captions, row by row. Return `picture`.

    titles: one title per column, or () for none.
    """
    height_px, width_px = cells[0].image.shape[1:]
    width_in = cell_width_in(num_columns)
    height_in = width_in * height_px / width_px
    caption_in = caption_pt / LINE_PT_PER_IN * max(len(cell.caption) for cell in cells)
    row_in = height_in + caption_in + 2 * GAP_IN
    header_in = HEADING_IN + TITLES_IN if titles else HEADING_IN
    lefts_in = [GAP_IN + column * (width_in + GAP_IN) for column in range(num_columns)]

    with drawing(picture, header_in + row_in * math.ceil(len(cells) / num_columns)) as figure:
        sheet = new_sheet(figure, heading)
        for column, title in enumerate(titles):
            x_in, y_in = lefts_in[column] + width_in / 2, HEADING_IN + TITLE_CENTER_IN
            sheet.text(x_in, y_in, title, ha="center", va="center", size=SMALL_PT)

        for number, cell in enumerate(cells):
            row, column = divmod(number, num_columns)
            top_left_in = (lefts_in[column], header_in + row * row_in)
            _draw_cell(sheet, cell, top_left_in, (width_in, height_in), caption_pt)
    return picture


def _draw_cell(
    sheet: Axes,
    cell: Cell,
    top_left_in: tuple[float, float],
    size_in: tuple[float, float],
    caption_pt: float,
) -> None:
    """Draw a picture, and its caption centered below it."""
    place(sheet, to_pixels(cell.image), at=top_left_in, size=size_in)

    center_in = top_left_in[0] + size_in[0] / 2
    bottom_in = top_left_in[1] + size_in[1]
    for number, line in enumerate(cell.caption, 1):
        baseline_in = bottom_in + caption_pt / LINE_PT_PER_IN * number
        sheet.text(center_in, baseline_in, line, ha="center", size=caption_pt)


def as_colors(inputs: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Undo the normalization of inputs (B, C, H, W). Return them on the CPU, clipped to [0, 1]."""
    shift, scale = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return (inputs.detach().float().cpu() * scale + shift).clamp(0, 1)


def add_title(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.1 / WIDTH_IN, ha="left", size=TITLE_PT, weight="bold")


def to_pixels(image: Tensor) -> NDArray:
    """Convert an image (1 or 3, H, W) to (H, W, 3) of the same dtype."""
    return image.detach().cpu().expand(3, -1, -1).permute(1, 2, 0).numpy()


def display_name(class_names: Sequence[str], label: int) -> str:
    return (
        " ".join(class_names[label].split()) if 0 <= label < len(class_names) else f"class {label}"
    )


def shorten(text: str, width_in: float, size: float = TEXT_PT, weight: str = "normal") -> str:
    """Shorten `text` in the middle until it is at most `width_in` inches wide.

    size: font size in points.
    """
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=_fonts(), size=size, weight=weight)
    num_letters = len(text)
    short = text
    with _missing_letters_once():
        while (
            num_letters > 1
            and text_to_path.get_text_width_height_descent(short, font, False)[0]
            > width_in * POINTS_PER_IN
        ):
            num_letters -= 1
            begin = text[: (num_letters + 1) // 2].rstrip()
            end = text[len(text) - num_letters // 2 :].lstrip()
            short = f"{begin}…{end}"
    return short


def wrap_caption(text: str, width_in: float, size_pt: float) -> list[str]:
    """Break `text` into lines that are about `width_in` inches wide or less."""
    return wrap(text, int(width_in * POINTS_PER_IN / (LETTER_WIDTH * size_pt)))


def share_lines(target: Tensor, class_names: Sequence[str], width_in: float) -> list[str]:
    """Return a line with the class, or a line such as "cat .72" for each of the two largest
    shares."""
    values, classes = target.topk(min(2, len(target)))
    if values[0] >= 0.995 or values[-1] < 0.005:
        return [shorten(display_name(class_names, int(classes[0])), width_in, SMALL_PT)]

    shares = [f" {value:.2f}".replace(" 0", " ") for value in values.tolist()]
    return [
        shorten(display_name(class_names, int(c)), width_in - 0.3, SMALL_PT) + share
        for c, share in zip(classes, shares, strict=True)
    ]
