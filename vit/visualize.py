"""Pictures of a run.

The data's story: `metrics.jsonl` is read back, never the live run, so that a picture can be made again at any time.
"""

from __future__ import annotations

from pathlib import Path

from vit.record import read_metrics


def plot_curves(metrics: Path, picture: Path) -> Path:
    """Draw loss, accuracy, learning rate and throughput over the steps of a `metrics.jsonl` into a PNG. Returns `picture`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read_metrics(metrics)
    train, evals = ([line for line in lines if line["kind"] == kind] for kind in ("train", "eval"))
    restarts = [line["step"] for line in lines if line["kind"] == "start" and line["restarts"]]

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 6.4), sharex=True, layout="constrained")
    (loss, accuracy), (rate, speed) = axes
    loss.plot(_column(train, "step"), _column(train, "loss"), label="training, with augmentation and label smoothing", color="tab:blue")
    accuracy_columns = {"top1": "top-1", "top1_ema": "top-1 of the averaged weights"}
    loss_columns = {"loss": "validation", "loss_ema": "validation, averaged weights"}
    for names, axis in ((loss_columns, loss), (accuracy_columns, accuracy)):
        for (name, label), color in zip(names.items(), ("tab:orange", "tab:green"), strict=True):
            points = [line for line in evals if line.get(name) is not None]
            if points:
                axis.plot(_column(points, "step"), _column(points, name), "o-", markersize=3, label=label, color=color)
    rate.plot(_column(train, "step"), _column(train, "lr"), color="tab:purple")
    speed.plot(_column(train, "step"), _column(train, "images_per_s"), color="tab:gray")
    speed.set_ylim(bottom=0)
    if evals:
        best = max(max(line["top1"], line.get("top1_ema", 0.0)) for line in evals)
        accuracy.set_title(f"accuracy on {evals[-1]['num_images']:,} validation images, best {best:.2f} %", fontsize=10)
    loss.set_title("cross-entropy", fontsize=10)
    loss.set_ylim(bottom=0)
    rate.set_title("learning rate", fontsize=10)
    speed.set_title("training images per second", fontsize=10)
    accuracy.set_ylabel("%")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        for step in restarts:
            axis.axvline(step, color="tab:red", linestyle=":", linewidth=1)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    for axis in axes[1]:
        axis.set_xlabel("step" + (" (red: resumed)" if restarts else ""))
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)
    return picture


def _column(lines: list[dict], name: str) -> list[float]:
    return [float("nan") if line[name] is None else line[name] for line in lines]
