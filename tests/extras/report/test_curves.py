"""Test that a run's curves and norms are plotted from its metrics."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from decoding import pixels, places
from matplotlib.figure import Figure
from PIL import Image

from vit.extras.report import curves, drawing

PLAN = {"global_batch_size": 12}


def record(folder: Path, *lines: dict) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"time": 0.0, **line}) + "\n" for line in lines))
    return path


def train_line(step: int, **values) -> dict:
    return {
        "kind": "train",
        "step": step,
        "epoch": step / 20,
        "loss": 2.0,
        "lr": 0.1,
        "images_per_s": 60.0,
        "data_wait_s": 0.5,
        **values,
    }


def troubled_run(folder: Path) -> Path:
    evals = {
        "kind": "eval",
        "num_images": 1234,
        "top1": 50.0,
        "loss": 1.5,
        "top1_ema": 51.0,
        "loss_ema": None,
    }
    return record(
        folder,
        {"kind": "start", "step": 0, "restarts": 0, "plan": PLAN},
        *(train_line(step) for step in range(10, 1000, 10)),
        {
            "kind": "fault",
            "step": 15,
            "reason": "gradient not finite, update skipped",
            "loss": None,
        },
        {"kind": "start", "step": 500, "restarts": 1, "plan": PLAN},
        *(train_line(step, loss=None if step == 510 else 2.0) for step in range(510, 800, 10)),
        evals | {"step": 400},
        evals | {"step": 800, "top1": 77.7},
    )


def test_the_share_of_waiting_follows_from_the_record(tmp_path):
    path = record(
        tmp_path,
        {"kind": "start", "step": 0, "restarts": 0, "plan": PLAN},
        # Ten steps with 12 images each at 60 images/s take 2 s, including 0.5 s of waiting for
        # data.
        train_line(10),
        train_line(30, data_wait_s=4.0),
        # The line for step 50 is ignored, because the step is repeated after the restart.
        train_line(50, data_wait_s=1.0),
        {"kind": "start", "step": 40, "restarts": 1, "plan": PLAN},
        # After the restart, the line for step 50 covers 10 steps instead of 20.
        train_line(50, data_wait_s=0.4),
        train_line(60, data_wait_s=99.0),
        train_line(70, images_per_s=None),
    )
    history = curves._read_curves(path)
    assert [line.get("data_wait_percent") for line in history.of_kind("train")] == pytest.approx(
        [25.0, 100.0, 20.0, 100.0, None]
    )
    without_plan = curves._read_curves(
        record(tmp_path, {"kind": "start", "step": 0, "restarts": 0}, train_line(10))
    )
    assert "data_wait_percent" not in without_plan.of_kind("train")[0]


@pytest.mark.parametrize(
    ("settings", "title", "training"),
    [
        ("loss: {label_smoothing: 0.1}", "Cross-entropy", "training, augmented"),
        ("loss: {name: bce}", "Loss", "training: BCE"),
        ("distill: {teacher: x}", "Loss", "training: cross-entropy + teacher"),
    ],
)
def test_a_training_loss_that_differs_from_the_evaluation_loss_is_named(
    settings, title, training, tmp_path
):
    (tmp_path / "config.yaml").write_text(f"data: {{root: x}}\ntrain: {{epochs: 2}}\n{settings}\n")
    evaluated = {"kind": "eval", "step": 10, "num_images": 5, "top1": 0.0, "loss": 2.0}
    axes = Figure().subplots()
    path = record(tmp_path, train_line(10), evaluated)
    curves._draw_panel(axes, curves._read_curves(path), "loss")
    assert axes.get_title() == title
    assert axes.get_legend().get_texts()[0].get_text() == training


def test_a_long_legend_is_below_the_curves(tmp_path):
    evaluated = {"kind": "eval", "step": 10, "num_images": 5, "top1": 40.0, "loss": 2.0}
    for sets, is_inside in ((("a",), True), (("a", "b", "c", "d"), False)):
        further = {f"{name}/{key}": 9.0 for name in sets for key in ("top1", "num_images")}
        figure = Figure((5, 3.2), layout="constrained")
        axes = figure.subplots()
        path = record(tmp_path, train_line(10), evaluated | further)
        curves._draw_panel(axes, curves._read_curves(path), "accuracy")
        figure.draw_without_rendering()
        legend = axes.get_legend().get_window_extent()
        assert (legend.y0 > axes.get_window_extent().y0) == is_inside
        labels = axes.xaxis.label.get_window_extent()
        assert is_inside or 0 <= legend.y0 < legend.y1 < labels.y0, (
            "the legend must be below the curves and inside the picture"
        )


def test_many_points_are_averaged_and_gaps_stay_visible():
    lines = [{"step": i, "loss": None if i == 1234 else 3.0 + i % 2} for i in range(2000)]
    steps, values = curves._points(lines, "loss")
    assert len(steps) == 500
    assert steps[:2].tolist() == [1.5, 5.5]
    assert np.isnan(values).nonzero()[0].tolist() == [1234 // 4]
    assert np.nanmin(values) == np.nanmax(values) == 3.5
    assert curves._points(lines[:3], "loss").tolist() == [[0, 1, 2], [3, 4, 3]]
    assert curves._points(lines, "unheard of").shape == (2, 0)


def test_the_curves_of_a_run_are_drawn(tmp_path):
    troubled = pixels(
        curves.plot_curves(troubled_run(tmp_path), tmp_path / "report" / "curves.png")
    )
    for color in (drawing.BLUE, drawing.ORANGE, drawing.GREEN):
        assert places(troubled, color).sum() > 100
    start = {"kind": "start", "step": 0, "restarts": 0, "plan": PLAN}
    shown = [troubled]
    for lines in (
        [start],
        [start, train_line(10)],
        [train_line(10), {"kind": "eval", "step": 10, "num_images": 5, "top1": 0.0, "loss": 2.0}],
    ):
        shown.append(pixels(curves.plot_curves(record(tmp_path, *lines), tmp_path / "short.png")))
    assert len({picture.tobytes() for picture in shown}) == 4


def test_the_axis_of_accuracy_ends_at_100(tmp_path):
    evals = {"kind": "eval", "num_images": 20, "loss": 1.5}
    path = record(
        tmp_path,
        train_line(10),
        evals | {"step": 5, "top1": 40.0},
        evals | {"step": 10, "top1": 100.0},
    )
    axes = Figure().subplots()
    curves._draw_panel(axes, curves._read_curves(path), "accuracy")
    assert axes.get_ylim()[1] == 100
    assert 0 < axes.get_ylim()[0] < 40
    assert not any(line.get_clip_on() for line in axes.get_lines()), (
        "the marker at 100 must not be cut off"
    )


def test_a_weight_decay_that_changes_is_drawn_beside_the_rate(tmp_path):
    figure = Figure()
    axes = figure.subplots()
    lines = [train_line(step, weight_decay=step / 100) for step in (10, 20, 30)]
    curves._draw_panel(axes, curves._read_curves(record(tmp_path, *lines)), "learning_rate")
    _, decay = figure.axes
    assert axes.get_title() == "Learning rate and weight decay"
    assert decay.get_lines()[0].get_xydata().tolist() == [[10, 0.1], [20, 0.2], [30, 0.3]]


def test_a_users_matplotlib_settings_change_nothing(tmp_path):
    path = troubled_run(tmp_path)
    expected = pixels(curves.plot_curves(path, tmp_path / "curves.png"))
    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 9, "axes.facecolor": "pink"}):
        before = dict(matplotlib.rcParams)
        drawn = pixels(curves.plot_curves(path, tmp_path / "curves.png"))
        assert dict(matplotlib.rcParams) == before, "our settings must not remain after drawing"
    np.testing.assert_array_equal(drawn, expected)


# --- training accuracy, and several runs ----------------------------------------------------------


def run_with_margins(folder: Path, mixup: str = "mixup_alpha: 0.0") -> tuple[Path, np.ndarray]:
    """Write the metrics of a run with 2 epochs, 10 steps per epoch and 4 images per step. Some
    images are unreadable."""
    folder.mkdir()
    (folder / "config.yaml").write_text(
        f"data: {{root: x, global_batch_size: 4}}\ntrain: {{epochs: 2}}\naugment: {{{mixup}}}\n"
    )
    rng = np.random.default_rng(0)
    values = rng.normal(size=(2, 10, 2, 4)).astype(np.float16)
    values[0, 3, :, 1] = np.nan
    (folder / "samples").mkdir()
    for epoch in (1, 2):
        np.save(folder / "samples" / f"epoch_{epoch:04d}.npy", values[epoch - 1])
    plan = {**PLAN, "steps_per_epoch": 10, "global_batch_size": 4}
    lines = [train_line(step, epoch=step / 10) for step in (4, 8, 12, 16, 20)]
    evals = [{"kind": "eval", "num_images": 9, "step": 20, "top1": 40.0, "loss": 2.0}]
    record(folder, {"kind": "start", "step": 0, "plan": plan}, *lines, *evals)
    return folder, values.transpose(0, 1, 3, 2)[..., 1].reshape(20, 4)


def test_accuracy_in_training_is_counted_from_the_margins(tmp_path):
    folder, margins = run_with_margins(tmp_path / "run")
    lines = curves._read_curves(folder / "metrics.jsonl").of_kind("train")
    for line in lines:
        rows = margins[line["step"] - 4 : line["step"]].ravel()
        rows = rows[~np.isnan(rows)]
        assert line["top1"] == pytest.approx(100 * np.mean(rows > 0))
    assert len({line["top1"] for line in lines}) > 2
    (folder / "samples" / "epoch_0002.npy").write_bytes(b"damaged")
    lines = curves._read_curves(folder / "metrics.jsonl").of_kind("train")
    assert ["top1" in line for line in lines] == [True, True, True, False, False]


def test_mixed_images_have_no_accuracy(tmp_path):
    folder, _ = run_with_margins(tmp_path / "run", "mixup_alpha: 0.2")
    lines = curves._read_curves(folder / "metrics.jsonl").of_kind("train")
    assert not any("top1" in line for line in lines)


def test_accuracy_begins_where_mixing_ends(tmp_path):
    folder, margins = run_with_margins(tmp_path / "run", "mixup_alpha: 0.2, mixup_off_epoch: 1")
    lines = curves._read_curves(folder / "metrics.jsonl").of_kind("train")
    accuracy_by_step = {line["step"]: line["top1"] for line in lines if "top1" in line}
    assert list(accuracy_by_step) == [12, 16, 20]
    assert accuracy_by_step[12] == pytest.approx(100 * np.mean(margins[10:12] > 0)), (
        "steps 9 and 10 were mixed and must not count"
    )


def test_a_smoothed_curve_is_the_mean_over_a_symmetric_window():
    rng = np.random.default_rng(0)
    x = np.cumsum(rng.uniform(0.1, 1, 40))
    y = rng.normal(size=40)
    y[7] = np.nan
    for width in (0.0, 1.5, 8.0):
        half = [min(width / 2, at - x[0], x[-1] - at) for at in x]
        near = [np.abs(x - at) <= h + 1e-9 for at, h in zip(x, half, strict=True)]
        expected = [np.nanmean(y[rows]) if np.any(~np.isnan(y[rows])) else np.nan for rows in near]
        np.testing.assert_allclose(curves.smoothed(x, y, width), expected, atol=1e-12)
    even = np.arange(40.0)
    np.testing.assert_allclose(curves.smoothed(even, 3 * even, 8.0), 3 * even, err_msg="a line")


def test_several_runs_are_drawn_over_their_epochs(tmp_path, monkeypatch):
    runs = [run_with_margins(tmp_path / name)[0] for name in ("one", "two")]
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: drawn.append(figure))
    curves.plot_learning_curves(runs, tmp_path / "a.png")
    loss, accuracy = drawn[0].axes
    labels = [text.get_text() for text in accuracy.get_legend().get_texts()]
    assert labels == [f"{run}: {panel}" for run in ("one", "two") for panel in WHAT]
    assert [line.get_xdata()[-1] for line in loss.lines] == [2.0] * 6, (
        "the axis must show epochs instead of steps"
    )
    with pytest.raises(ValueError, match=r"nowhere: contains no metrics\.jsonl"):
        curves.plot_learning_curves([tmp_path / "nowhere"], tmp_path / "b.png")


def test_runs_in_folders_of_equal_names_are_all_drawn(tmp_path, monkeypatch):
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        runs.append(run_with_margins(tmp_path / name / "run")[0])
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: drawn.append(figure))
    curves.plot_learning_curves(runs, tmp_path / "a.png")
    labels = [text.get_text() for text in drawn[0].axes[1].get_legend().get_texts()]
    assert labels == [f"{tmp_path}/{name}/run: {panel}" for name in "ab" for panel in WHAT]


WHAT = ("training, augmented", "validation")


# --- norms ----------------------------------------------------------------------------------------


def norms_line(step: int, **changes) -> dict:
    layers = ("embed", "blocks.0", "blocks.1", "head")
    values = {key: dict.fromkeys(layers, 1.0) for key in curves.NORM_PANELS}
    values["max_attn_logit"] = {"blocks.0": 3.0, "blocks.1": 40.0}
    return {"step": step, "update_norm": dict.fromkeys(layers, 1e-3), **values, **changes}


def test_each_column_ends_at_its_step_and_gaps_are_gray(tmp_path, monkeypatch):
    drawn = {}
    plain = Figure.colorbar

    def colorbar(figure, mesh, ax, **options):
        drawn[ax.get_title(loc="left")] = mesh
        return plain(figure, mesh, ax=ax, **options)

    monkeypatch.setattr(Figure, "colorbar", colorbar)
    weights = {"embed": 2.0, "blocks.0": 4.0, "blocks.1": None, "head": 0.5}
    lines = [norms_line(10), norms_line(20, weight_norm=weights), norms_line(25)]
    picture = curves.plot_norms(lines, tmp_path / "norms.png")
    assert list(drawn) == list(curves.NORM_PANELS.values())
    growth = drawn[curves.NORM_PANELS[curves.WEIGHT]]
    assert growth.get_coordinates()[0, :, 0].tolist() == [0, 10, 20, 25]
    expected = [[1, 2, 1], [1, 4, 1], [1, np.nan, 1], [1, 0.5, 1]]
    np.testing.assert_array_equal(growth.get_array().filled(np.nan), expected)
    logits = drawn[curves.NORM_PANELS[curves.LARGEST_LOGIT]]
    assert logits.get_array().tolist() == [[3.0] * 3, [40.0] * 3]
    with Image.open(picture) as image:
        assert image.width == 1400


def test_other_attention_and_missing_measurements_are_stated(tmp_path):
    lines = [{k: v for k, v in norms_line(10).items() if k != "max_attn_logit"}]
    assert curves.plot_norms(lines, tmp_path / "norms.png").is_file()
    with pytest.raises(ValueError, match=r"log\.norms_every_steps"):
        curves.plot_norms([], tmp_path / "none.png")
