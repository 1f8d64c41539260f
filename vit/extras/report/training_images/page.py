"""Write an HTML page of suspicious training images of a run, with their curves.

    runs/<name>/report/samples.html    a single file that works offline, like the run's report
    runs/<name>/report/samples.csv     all images, in order of mean margin

Pictures are embedded as data URIs, and curves as inline SVG. The page has no script. Predictions
use the run's last weights and the evaluation preprocessing.
"""

import base64
import io
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from PIL import Image

from vit.data.decode.images import decode
from vit.data.shards.split import Split
from vit.data.sources import Sources
from vit.extras.report.page import page_template, write_html
from vit.extras.report.source import ReportSource, as_sentence
from vit.extras.report.training_images.curves import SampleCurves
from vit.extras.report.training_images.doubles import Duplicates, NearDoubles
from vit.run_folder.paths import REPORT_FOLDER

PAGE_FILE = f"{REPORT_FOLDER}/samples.html"
TABLE_FILE = f"{REPORT_FOLDER}/samples.csv"
PICTURE_PX = 128
"""The longer side of a picture on the page, in pixels."""
CURVE_WIDTH, CURVE_HEIGHT = 128, 36
AT_ONCE = 32


def write_samples_page(
    source: ReportSource,
    curves: SampleCurves,
    duplicates: Duplicates,
    near: NearDoubles | None,
    num_images: int,
) -> Path:
    """Write the page with up to `num_images` in each section, and return its path.

    near: None if near duplicates were not searched for.

    Raises ValueError if the page cannot be written, and ShardError if an image cannot be read.
    """
    suspicious, never_learnt, forgotten = _choose(curves, num_images)
    doubles = [same[:4] for same in duplicates.groups[: max(num_images // 2, 1)]]
    evaluated = [train for train, _ in duplicates.also_evaluated[:num_images]]

    found = near or NearDoubles([], [])
    pairs = found.pairs[:num_images]
    val_pairs = found.also_evaluated[:num_images]

    chosen = [
        *chain(suspicious, never_learnt, forgotten, *doubles, evaluated),
        *chain(*((first, second) for first, second, _ in pairs)),
        *(train for train, _, _ in val_pairs),
    ]

    # The template shows these fields of an image, keyed by its sample.
    train = source.train_set.split
    predictions, why_silent = _predict(source, train, list(dict.fromkeys(chosen)))
    fields = {n: _shown(source, train, n, pair, curves) for n, pair in predictions.items()}

    val_predictions, _ = _predict(source, source.val_split, [sample for _, sample, _ in val_pairs])
    val_fields = {
        n: _shown(source, source.val_split, n, pair) for n, pair in val_predictions.items()
    }

    content = page_template("samples.html.j2").render(
        name=source.run_dir.resolve().name,
        made_s=time.time(),
        root=str(source.train_set.split.root),
        epochs=curves.epochs,
        num_images=int((curves.num_seen > 0).sum()),
        num_late_wrong=int(curves.late_wrong.sum()),
        num_never=int(curves.never_learnt.sum()),
        num_forgotten=int((curves.times_forgotten > 0).sum()),
        num_double=sum(len(same) - 1 for same in duplicates.groups),
        num_evaluated=len(duplicates.also_evaluated),
        suspicious=[fields[sample] for sample in suspicious],
        never=[fields[sample] for sample in never_learnt],
        forgotten=[fields[sample] for sample in forgotten],
        doubles=[[fields[sample] for sample in same] for same in doubles],
        evaluated=[fields[sample] for sample in evaluated],
        looked_for_near=near is not None,
        num_near=len(found.pairs),
        num_near_evaluated=len(found.also_evaluated),
        near=[([fields[first], fields[second]], cosine) for first, second, cosine in pairs],
        near_evaluated=[([fields[own], val_fields[n]], cosine) for own, n, cosine in val_pairs],
        why_silent=why_silent,
    )
    return write_html(source.run_dir / PAGE_FILE, content)


def _choose(curves: SampleCurves, num_images: int) -> tuple[list[int], list[int], list[int]]:
    """Return up to `num_images` images that are probably mislabeled, were never learned, and were
    forgotten most often. Each image is in one list only."""
    suspects = curves.suspects
    suspicious = suspects[curves.mean_margin[suspects] < 0][:num_images]
    others = suspects[~np.isin(suspects, suspicious)]
    never_learnt = others[curves.never_learnt[others]][:num_images]
    by_times = others[np.argsort(-curves.times_forgotten[others], kind="stable")]
    forgotten = by_times[curves.times_forgotten[by_times] > 0][:num_images]
    return suspicious.tolist(), never_learnt.tolist(), forgotten.tolist()


@torch.no_grad()
def _predict(
    source: ReportSource, split: Split | Sources, samples: list[int]
) -> tuple[dict[int, tuple[int, float]], str]:
    """Return the predicted class and probability of each sample, and an error message or "".

    Classes are -1 if the model cannot run.
    """
    predictions = dict.fromkeys(samples, (-1, 0.0))
    try:
        for start in range(0, len(samples), AT_ONCE):
            part = samples[start : start + AT_ONCE]
            images = torch.stack([source.eval_image(sample, split) for sample in part])
            shares, classes = source.model(source.normalize(images)).float().softmax(1).max(1)
            for sample, share, label in zip(part, shares.tolist(), classes.tolist(), strict=True):
                predictions[sample] = (label, share)
    except ValueError as error:  # The weights do not exist yet, or an image cannot be decoded.
        return predictions, as_sentence(error)
    return predictions, ""


def _shown(
    source: ReportSource,
    split: Split | Sources,
    sample: int,
    prediction: tuple[int, float],
    curves: SampleCurves | None = None,
) -> dict[str, Any]:
    """Return the template fields for an image. curves: None for a validation image."""
    if curves is None:
        label = int(split.index[sample]["label"])
        curve = Markup("")
        notes = [f"validation image in {split.name!r}"]
    else:
        label = int(source.train_labels[sample])
        curve = _curve(curves, sample)
        notes = _training_notes(curves, sample)

    # Without weights, no class is predicted (-1).
    predicted, share = prediction
    percent = f"{100 * share:.0f}\N{NO-BREAK SPACE}%"
    return {
        "key": split.key(sample),
        "label": source.class_names[label],
        "uri": _picture(split, sample),
        "curve": curve,
        "notes": notes,
        "predicted": f"{source.class_names[predicted]}, {percent}" if predicted >= 0 else "",
        "differs": predicted != label,
    }


def _training_notes(curves: SampleCurves, sample: int) -> list[str]:
    """Describe how a training image was classified during training."""
    notes = []
    if curves.num_seen[sample]:
        first_epoch = int(curves.first_right[sample])
        notes.append(f"augmented: mean margin {curves.mean_margin[sample]:.2f}")
        notes.append(f"first correct in epoch {first_epoch}" if first_epoch else "never correct")

    times = int(curves.times_forgotten[sample])
    if times:
        notes.append(f"forgotten {times} time{'s' if times > 1 else ''}")
    return notes


def _picture(split: Split | Sources, sample: int) -> str:
    """Return the stored image as a data URI, or "" if it cannot be decoded."""
    try:
        image = Image.fromarray(decode(split.read(sample)))
    except ValueError:
        return ""

    scale = PICTURE_PX / max(image.size)
    small = image.resize([max(round(side * scale), 1) for side in image.size])
    encoded = io.BytesIO()
    small.save(encoded, "PNG")
    return f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"


def _curve(curves: SampleCurves, sample: int) -> Markup:
    """Return an SVG of an image's margin over the epochs, with 0 at half of its height."""
    margins = curves.margins[:, sample].astype(np.float64)
    seen = np.flatnonzero(np.isfinite(margins))
    if not len(seen):
        return Markup("")

    largest = max(float(np.abs(margins[seen]).max()), 1e-6)
    last = max(len(margins) - 1, 1)
    places: list[tuple[Any, Any]] = [
        (
            round(2 + (CURVE_WIDTH - 4) * int(epoch) / last, 1),
            round(CURVE_HEIGHT / 2 - margins[epoch] / largest * (CURVE_HEIGHT / 2 - 3), 1),
        )
        for epoch in seen
    ]

    line = " ".join(f"{x},{y}" for x, y in places)
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="1.6"/>' for x, y in places if len(places) <= 32)

    # `Markup` prevents escaping. The SVG is safe, because it is generated from numbers.
    return Markup(
        f'<svg class="curve" viewBox="0 0 {CURVE_WIDTH} {CURVE_HEIGHT}" role="img"'
        f' aria-label="margins from {margins[seen[0]]:.2f} to {margins[seen[-1]]:.2f}">'
        f'<path d="M0 {CURVE_HEIGHT / 2}H{CURVE_WIDTH}" stroke="var(--rule)"/>'
        f'<polyline points="{line}" fill="none" stroke="var(--blue)" stroke-width="1.5"/>'
        f'<g fill="var(--blue)">{dots}</g></svg>'
    )
