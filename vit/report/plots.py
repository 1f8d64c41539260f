"""Pictures of a run: what the model sees, where it looks, what it mistakes. `vit.report.curves`
draws how it learned.

The data's story: arrays and files come in, a PNG goes out; nothing here reads a live run or knows
the trainer, so that a picture can be made again at any time.

    inputs and targets of one batch        -> plot_augmented                    what augmentation makes of images
    model, images  -> attention_maps -> attention_rollout -> plot_attention     which patches the output gathers from
    pos_embed                              -> plot_position_similarity          what the positions have learned
    labels, predictions -> confusion_matrix -> plot_confusion; -> most_confused -> plot_most_confused

Every PNG is 1400 pixels wide. Colours are those of Okabe and Ito (2008) and viridis, which
colour-blind readers tell apart; nothing is said by colour alone. Class names are shortened in the
middle to the room there is; where a class has no name it is "class 7".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

if TYPE_CHECKING:  # matplotlib is imported where something is drawn: training starts without it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 8.0
DPI = 175
TITLE_PT = 12.0
TEXT_PT = 10.5
SMALL_PT = 9.5
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
GREY = "#666666"
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters everywhere
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
    "svg.fonttype": "path",  # text as outlines: a phone has no DejaVu Sans
    "svg.hashsalt": "vit",
    "text.parse_math": False,  # a class may be called "US$"
}


@contextmanager
def drawing(picture: Path, height_in: float, **options: Any) -> Iterator[Figure]:
    """A figure of the common width and style, written to `picture` when the block ends."""
    with style():
        from matplotlib.figure import Figure

        figure = Figure((WIDTH_IN, height_in), **options)
        yield figure
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, format="png")


@contextmanager
def style() -> Iterator[None]:
    """Our settings over matplotlib's own, whatever the user's are."""
    import matplotlib.style

    with matplotlib.style.context(["default", STYLE]):
        yield


def new_sheet(figure: Figure, heading: str) -> Axes:
    """One axes over the whole figure, in inches from its top left corner, for pictures and text.
    Content begins at 0.5."""
    width, height = figure.get_size_inches()
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    axes.text(0.1, 0.25, heading, size=TITLE_PT, weight="bold", va="center")
    return axes


def place(
    sheet: Axes, pixels: NDArray, left: float, top: float, width: float, height: float
) -> None:
    """Draw `pixels` (H, W, 3) into a box of a sheet, in inches, as large as their aspect allows."""
    scale = min(width / pixels.shape[1], height / pixels.shape[0])
    half_w = pixels.shape[1] * scale / 2
    half_h = pixels.shape[0] * scale / 2
    x, y = left + width / 2, top + height / 2
    sheet.imshow(pixels, extent=(x - half_w, x + half_w, y + half_h, y - half_h), aspect="auto")


def _title(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.1 / WIDTH_IN, ha="left", size=TITLE_PT, weight="bold")


def to_pixels(image: Tensor) -> NDArray:
    """(1 or 3, H, W) -> (H, W, 3), of the same dtype."""
    return image.detach().cpu().expand(3, -1, -1).permute(1, 2, 0).numpy()


def _name(class_names: Sequence[str], label: int) -> str:
    return (
        " ".join(class_names[label].split()) if 0 <= label < len(class_names) else f"class {label}"
    )


def shorten(text: str, width_in: float, size: float = TEXT_PT, weight: str = "normal") -> str:
    """`text`, or its beginning and end with an ellipsis between, so that it is at most `width_in`
    wide in letters of `size` points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    kept = len(text)
    shown = text
    while (
        kept > 1
        and text_to_path.get_text_width_height_descent(shown, font, False)[0] > width_in * 72
    ):
        kept -= 1
        shown = text[: (kept + 1) // 2].rstrip() + "…" + text[len(text) - kept // 2 :].lstrip()
    return shown


# --- what the model sees --------------------------------------------------------------------------


def plot_augmented(
    inputs: Tensor,
    targets: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    class_names: Sequence[str],
    picture: Path,
) -> Path:
    """Draw training inputs as the model gets them, each over its class, or its classes with their
    shares. Returns `picture`.

    inputs: (B, C, H, W) float, normalised by `mean` and `std` per channel, which is taken back;
    targets: (B, classes) float shares.
    """
    shift, scale = (
        torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (mean, std)
    )
    images = (inputs.detach().float().cpu() * scale + shift).clamp(0, 1)
    height, width = images.shape[2:]
    columns = min(6, max(3, len(images)))
    gap = 0.1
    side = (WIDTH_IN - gap) / columns - gap
    tall = side * height / width
    captions = [share_lines(target, class_names, side) for target in targets.detach().float().cpu()]
    row = tall + 0.16 + 0.18 * max(map(len, captions), default=1)
    with drawing(picture, 0.5 + row * -(-len(images) // columns)) as figure:
        sheet = new_sheet(
            figure, f"Training inputs, {width} × {height} pixels, as the model gets them"
        )
        for i, (image, caption) in enumerate(zip(images, captions, strict=True)):
            left, top = gap + i % columns * (side + gap), 0.5 + i // columns * row
            place(sheet, to_pixels(image), left, top, side, tall)
            for j, line in enumerate(caption):
                sheet.text(
                    left + side / 2, top + tall + 0.17 + 0.18 * j, line, ha="center", size=SMALL_PT
                )
    return picture


def share_lines(target: Tensor, class_names: Sequence[str], width_in: float) -> list[str]:
    """A line for a class alone, or one for each of the two largest shares: "cat .72", "dog .28"."""
    values, classes = target.topk(min(2, len(target)))
    if values[0] >= 0.995 or values[-1] < 0.005:
        return [shorten(_name(class_names, int(classes[0])), width_in, SMALL_PT)]
    shares = [f" {value:.2f}".replace(" 0", " ") for value in values.tolist()]
    return [
        shorten(_name(class_names, int(c)), width_in - 0.3, SMALL_PT) + share
        for c, share in zip(classes, shares, strict=True)
    ]


# --- where it looks -------------------------------------------------------------------------------


@torch.no_grad()
def attention_maps(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The attention of every block, images (B, C, H, W) float -> (B, heads, N, N) float32 each: row
    i says where token i looks, sum 1.

    For our VisionTransformer and timm's. The fused kernels never hold these weights, so they are
    computed again from the tokens that come into each `blocks[i].attn`. In evaluation mode and full
    precision; ViT-B/16 at 224 pixels takes 22 MB an image.

    Raises ValueError for a model without such blocks, or whose attention is not softmax(q k /
    sqrt(dim)) alone.
    """
    blocks = getattr(model, "blocks", None)
    attentions = (
        [getattr(block, "attn", None) for block in blocks]
        if isinstance(blocks, nn.Sequential | nn.ModuleList)
        else []
    )
    if not attentions or not all(_is_plain(attention) for attention in attentions):
        raise ValueError(
            f"{type(model).__name__} has no plain self-attention in its blocks"
            " (blocks[i].attn.qkv): no attention maps of it"
        )
    maps = list[Tensor]()

    def catch(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens, *others = (*args, *kwargs.values())
        if tokens.ndim != 3 or any(other is not None and other is not False for other in others):
            raise ValueError(
                f"{type(model).__name__} masks, rotates or cuts up its attention: no attention maps"
                " of it"
            )
        q, k, _ = (
            attention.qkv(tokens).unflatten(2, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
        )
        q, k = (
            getattr(attention, norm, nn.Identity())(x).float()
            for norm, x in (("q_norm", q), ("k_norm", k))
        )
        maps.append((q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(-1))

    was_training = model.training
    model.eval()
    handles = [
        attention.register_forward_pre_hook(catch, with_kwargs=True)
        for attention in attentions
        if attention is not None
    ]
    try:
        with torch.autocast(images.device.type, enabled=False):
            model(images)
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    return maps


def _is_plain(attention: Any) -> bool:
    """Whether nothing but queries and keys can decide where it looks: a relative position bias,
    say, would be a further parameter."""
    if not isinstance(getattr(attention, "qkv", None), nn.Linear) or not isinstance(
        getattr(attention, "num_heads", None), int
    ):
        return False
    names = [
        name.partition(".")[0]
        for tensors in (attention.named_parameters(), attention.named_buffers())
        for name, _ in tensors
    ]
    return set(names) <= {"qkv", "q_norm", "k_norm", "norm", "gate", "proj"}


def attention_rollout(maps: list[Tensor], num_prefix_tokens: int, global_pool: str) -> Tensor:
    """How much each patch of the input reaches the output: maps, one (B, heads, N, N) a block ->
    (B, h*w) float32, at most 1 in each image.

    Attention rollout, Abnar & Zuidema 2020 (arXiv 2005.00928): the residual branch counts as half
    of each layer, A = 0.5 W + 0.5 I with rows of sum 1, and layers multiply; heads are averaged, as
    for the ViT paper's figure 6. Read from the class token's row (`global_pool` "token") or as the
    mean over the patches' rows ("avg"). An image of which nothing reaches the class token gets
    zeros.

    Raises ValueError for another `global_pool`, or "token" without a class token.
    """
    if global_pool not in ("token", "avg") or (global_pool == "token" and num_prefix_tokens == 0):
        raise ValueError(
            f"global_pool {global_pool!r} with {num_prefix_tokens} prefix tokens: expected 'avg',"
            " or 'token' with a class token"
        )
    identity = torch.eye(maps[0].shape[-1], device=maps[0].device)
    rollout = identity
    for attention in maps:
        layer = 0.5 * attention.float().mean(1) + 0.5 * identity
        rollout = layer / layer.sum(-1, keepdim=True) @ rollout
    rows = rollout[:, 0] if global_pool == "token" else rollout[:, num_prefix_tokens:].mean(1)
    relevance = rows[:, num_prefix_tokens:]
    return relevance / relevance.amax(1, keepdim=True).clamp(min=torch.finfo(relevance.dtype).tiny)


def plot_attention(
    images: Tensor,
    relevance: Tensor,
    labels: Sequence[int] | Tensor,
    predictions: Sequence[int] | Tensor,
    probabilities: Sequence[float] | Tensor,
    class_names: Sequence[str],
    picture: Path,
) -> Path:
    """Draw each image beside itself under the relevance of its patches, with what it is and what it
    was taken for. Returns `picture`.

    images: (B, C, H, W) uint8; relevance: (B, h, w) float, stretched from its lowest to its highest
    in each image; labels, predictions: (B,) classes, a prediction of -1 is no number;
    probabilities: (B,) in [0, 1], of the predicted class.
    """
    from matplotlib import colormaps

    # inches: two images, between pairs, two lines of text
    pair = 3.75
    gap = 0.3
    head = 0.43
    side = (pair - 0.06) / 2
    tall = side * images.shape[2] / images.shape[3]
    row = head + tall + 0.25
    values = relevance.detach().float().cpu()
    low, high = values.amin((1, 2), keepdim=True), values.amax((1, 2), keepdim=True)
    stretched = (values - low) / (high - low).clamp(min=1e-12)
    smooth = (
        F.interpolate(stretched[:, None], images.shape[2:], mode="bicubic")
        .clamp(0, 1)[:, 0]
        .numpy()
    )
    with drawing(picture, 0.8 + row * -(-len(images) // 2)) as figure:
        sheet = new_sheet(figure, "Where the model looks: attention rollout")
        note = (
            "Yellow patches reach the output most, violet ones least; colours are stretched anew"
            " for each image."
        )
        sheet.text(0.1, 0.52, note, size=SMALL_PT, va="center", color=GREY)
        for i, image in enumerate(images):
            left, top = 0.1 + i % 2 * (pair + gap), 0.8 + i // 2 * row
            label = int(labels[i])
            predicted = int(predictions[i])
            probability = float(probabilities[i])
            mark, color, weight = (
                ("✓", BLUE, "normal") if label == predicted else ("✗", ORANGE, "bold")
            )
            name = (
                shorten(_name(class_names, predicted), pair - 1.9, weight=weight)
                + f" ({100 * probability:.0f} %)"
            )
            sheet.text(left, top + 0.13, "true: " + shorten(_name(class_names, label), pair - 0.5))
            taken_for = f"{mark} predicted: {name if predicted >= 0 else 'not a number'}"
            sheet.text(left, top + 0.33, taken_for, color=color, weight=weight)
            pixels = to_pixels(image)
            overlay = (
                0.45 * pixels.mean(2, keepdims=True) / 255
                + 0.55 * colormaps["viridis"](smooth[i])[..., :3]
            )
            place(sheet, pixels, left, top + head, side, tall)
            place(sheet, overlay, left + side + 0.06, top + head, side, tall)
    return picture


def plot_position_similarity(pos_embed: Tensor, grid: tuple[int, int], picture: Path) -> Path:
    """Draw the cosine similarity of every position with all others, as in figure 7 (centre) of the
    ViT paper. Returns `picture`.

    pos_embed: (h*w, D) float, without prefix tokens; grid: (h, w). One tile for each position, at
    most 14 x 14 of them, evenly chosen.
    """
    height, width = grid
    rows, columns = (np.unique(np.linspace(0, n - 1, min(n, 14)).round().astype(int)) for n in grid)
    unit = F.normalize(pos_embed.detach().float().cpu(), dim=1)
    tiles = (
        (unit.view(height, width, -1)[rows][:, columns] @ unit.T)
        .view(len(rows), len(columns), height, width)
        .numpy()
    )
    # pixels of the assembled array for each patch, so that the gaps can be thinner than a patch
    zoom = max(1, 12 // max(grid))
    gap = max(1, zoom * max(grid) // 12)
    tall = zoom * height + gap
    wide = zoom * width + gap
    whole = np.full((len(rows) * tall - gap, len(columns) * wide - gap), np.nan)
    for y, x in np.ndindex(len(rows), len(columns)):
        whole[y * tall : (y + 1) * tall - gap, x * wide : (x + 1) * wide - gap] = (
            tiles[y, x].repeat(zoom, 0).repeat(zoom, 1)
        )
    shown = (
        ""
        if tiles.shape[:2] == grid
        else f" ({len(rows)} × {len(columns)} of {height} × {width} shown)"
    )
    with drawing(
        picture, 1.0 + 6.2 * min(max(len(whole) / whole.shape[1], 0.3), 1.5), layout="constrained"
    ) as figure:
        _title(figure, f"Positions: each one's cosine similarity with all{shown}")
        axes = figure.subplots()
        drawn = axes.imshow(
            whole, cmap="viridis", vmin=float(tiles.min()), vmax=1.0, interpolation="nearest"
        )
        axes.set(xlabel="column of the patch", ylabel="row of the patch")
        axes.set_xticks(
            [i * wide + (wide - gap - 1) / 2 for i in range(len(columns))],
            [str(n + 1) for n in columns],
        )
        axes.set_yticks(
            [i * tall + (tall - gap - 1) / 2 for i in range(len(rows))], [str(n + 1) for n in rows]
        )
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.colorbar(drawn, ax=axes, label="cosine similarity", shrink=0.8, aspect=30)
    return picture


# --- what it mistakes -----------------------------------------------------------------------------


def confusion_matrix(labels: NDArray, predictions: NDArray, num_classes: int) -> NDArray[np.int64]:
    """Count images by their class and the class predicted: labels, predictions (N,) integers -> (C,
    C) int64, rows true, columns predicted.

    A prediction of -1 (the logits were not numbers) is in no cell, so a row adds up to its class's
    images that have a prediction; the caller says how many have none. Raises ValueError for classes
    outside [0, num_classes).
    """
    outside = (
        (labels < 0) | (labels >= num_classes) | (predictions < -1) | (predictions >= num_classes)
    ).sum()
    if len(labels) != len(predictions) or outside:
        raise ValueError(
            f"{len(labels)} labels and {len(predictions)} predictions, {outside} of them outside"
            f" the {num_classes} classes: expected the labels and predictions of one evaluation"
        )
    seen = predictions >= 0
    cells = labels[seen].astype(np.int64) * num_classes + predictions[seen]
    return (
        np.bincount(cells, minlength=num_classes**2)
        .reshape(num_classes, num_classes)
        .astype(np.int64, copy=False)
    )


def most_confused(matrix: NDArray[np.int64], num: int = 10) -> list[tuple[int, int, int, int]]:
    """The `num` commonest mistakes in a confusion matrix: (true, predicted, images so mistaken,
    images of the true class).

    Most images first; of equals the larger share of its class, then the smaller class numbers.
    Fewer where there are fewer mistakes.
    """
    totals = matrix.sum(1)
    pairs = [
        (int(t), int(p), int(matrix[t, p]), int(totals[t]))
        for t, p in np.argwhere(matrix > 0)
        if t != p
    ]
    return sorted(pairs, key=lambda pair: (-pair[2], pair[3], pair[0], pair[1]))[:num]


def plot_confusion(matrix: NDArray[np.int64], class_names: Sequence[str], picture: Path) -> Path:
    """Draw a confusion matrix (C, C), rows true, columns predicted. Returns `picture`.

    Up to 20 classes: counts and names; the right ones blue by their share of the row, mistakes
    orange, the largest share darkest. More: the mistakes alone as an image without names, on a
    logarithmic scale, neighbouring classes pooled to at most 350 cells on a side, since cells
    smaller than a pixel would not be seen.
    """
    is_small = len(matrix) <= 20
    with drawing(picture, 7.6 if is_small else 6.9, layout="constrained") as figure:
        num = int(matrix.sum())
        right = int(matrix.trace())
        _title(figure, f"Confusion: {num - right:,} mistakes on {num:,} images")
        axes = figure.subplots()
        axes.set(xlabel="predicted class", ylabel="true class")
        if is_small:
            _draw_counts(axes, matrix, [_name(class_names, c) for c in range(len(matrix))])
        else:
            _draw_mistakes(axes, matrix)
    return picture


def _draw_counts(axes: Axes, matrix: NDArray[np.int64], names: list[str]) -> None:
    from matplotlib import colormaps

    num_classes = len(matrix)
    cell_in = 5.8 / len(matrix)
    share = matrix / matrix.sum(1, keepdims=True).clip(1)
    right = np.eye(len(matrix), dtype=bool)
    largest = share[~right].max(initial=1e-12)
    colors = np.where(
        right[..., None],
        colormaps["Blues"](0.85 * share),
        colormaps["Oranges"](0.12 + 0.6 * share / largest),
    )[..., :3]
    colors[matrix == 0] = 1.0
    axes.imshow((255 * colors).astype(np.uint8))
    # the longest number fits a cell
    size = min(11.0, cell_in * 72 / (0.66 * len(str(matrix.max())) + 0.2))
    for t, p in np.argwhere(matrix > 0).tolist():
        is_dark = colors[t, p] @ (0.299, 0.587, 0.114) < 0.55
        axes.text(
            p,
            t,
            str(matrix[t, p]),
            ha="center",
            va="center",
            size=size,
            color="white" if is_dark else "black",
        )
    for t in range(num_classes):
        recall = f"{100 * share[t, t]:.1f} %" if matrix[t].any() else "-"
        axes.annotate(
            recall,
            (1, t),
            (5, 0),
            ("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            size=SMALL_PT,
            color=BLUE,
        )
    axes.annotate(
        "right",
        (1, 1),
        (5, 5),
        "axes fraction",
        textcoords="offset points",
        size=SMALL_PT,
        color=BLUE,
    )
    is_upright = all(shorten(name, cell_in - 0.05, SMALL_PT) == name for name in names)
    shortened = [shorten(name, 1.3, SMALL_PT) for name in names]
    axes.set_xticks(range(num_classes), shortened, rotation=0 if is_upright else 90, size=SMALL_PT)
    axes.set_yticks(range(num_classes), shortened, size=SMALL_PT)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(np.arange(num_classes + 1) - 0.5, minor=True)
    axes.grid(True, which="minor", color="#dddddd", alpha=1.0, linewidth=0.6)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def _draw_mistakes(axes: Axes, matrix: NDArray[np.int64]) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogLocator, NullFormatter

    pool = -(-len(matrix) // 350)
    edges = np.arange(0, len(matrix), pool)
    mistakes = matrix.copy()
    np.fill_diagonal(mistakes, 0)
    mistakes = np.add.reduceat(np.add.reduceat(mistakes, edges, axis=0), edges, axis=1)
    percent = 100.0 * mistakes / np.add.reduceat(matrix.sum(1), edges).clip(1)[:, None]
    lowest = percent[percent > 0].min(initial=100.0)
    drawn = axes.imshow(
        np.ma.masked_equal(percent, 0),
        cmap=colormaps["inferno"].with_extremes(bad="black"),
        # the darkest colours are left out: they would not show on black
        norm=LogNorm(lowest / 3, max(percent.max(), 3 * lowest)),
        extent=(0, len(edges) * pool, len(edges) * pool, 0),
        interpolation="nearest",
    )
    bar = axes.figure.colorbar(
        drawn, ax=axes, shrink=0.8, aspect=30, ticks=LogLocator(subs=(1, 2, 3, 5)), format="{x:g}"
    )
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.set_label("mistakes, % of the images in the row")
    bar.ax.set_ylim(lowest / 1.1)
    if pool > 1:
        axes.set(xlabel=f"predicted class (a cell: {pool} × {pool} classes)")


def plot_most_confused(
    pairs: list[tuple[int, int, int, int]],
    examples: list[list[NDArray[np.uint8]]],
    class_names: Sequence[str],
    picture: Path,
) -> Path:
    """Draw a row for each mistake of `most_confused`, with a bar for its count and up to 6 images
    so mistaken. Returns `picture`.

    examples: for each pair a list of (H, W, 1 or 3) uint8, which may be short or empty.
    """
    row = 0.92
    text_in = 2.75
    thumb = 0.78
    with drawing(picture, 0.5 + row * len(pairs)) as figure:
        sheet = new_sheet(figure, "Most frequent mistakes: true → predicted")
        for i, ((true, predicted, count, total), images) in enumerate(
            zip(pairs, examples, strict=True)
        ):
            top = 0.5 + i * row
            lines = [_name(class_names, true), f"→ {_name(class_names, predicted)}"]
            if shorten(" ".join(lines), text_in, weight="bold") == " ".join(lines):
                lines = [" ".join(lines)]
            for j, line in enumerate(lines):
                sheet.text(
                    0.1, top + 0.14 + 0.2 * j, shorten(line, text_in, weight="bold"), weight="bold"
                )
            sheet.text(
                0.1,
                top + 0.14 + 0.2 * len(lines),
                f"{count:,} of {total:,} ({100 * count / total:.1f} %)",
            )
            sheet.barh(top + 0.7, text_in * count / pairs[0][2], 0.1, 0.1, color=ORANGE)
            for j, image in enumerate(images[:6]):
                left = text_in + 0.25 + j * (thumb + 0.06)
                sheet.barh(top + thumb / 2, thumb, thumb, left, color="#eeeeee", zorder=-1)
                place(
                    sheet,
                    image if image.shape[2] == 3 else image.repeat(3, axis=2),
                    left,
                    top,
                    thumb,
                    thumb,
                )
    return picture
