"""Draw the learning rate, the weight decay and the published curve of a recipe."""

from collections.abc import Sequence
from pathlib import Path

from vit.config.schema import Config
from vit.extras.report.drawing import BLUE, GRAY, ORANGE, add_title, drawing


def draw_curves(
    config: Config,
    title: str,
    picture: Path,
    times: Sequence[float],
    rates: Sequence[float],
    decays: Sequence[float],
    reference: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> Path:
    """Draw the curves of `config` over epochs, and return `picture`.

    Args:
        times: The epochs of `rates` and `decays`.
        rates: The learning rate.
        decays: The weight decay.
        reference: The epochs and the top-1 accuracy in percent of each published run. If there are
            published runs, their curves have a panel of their own.
    """
    with drawing(picture, 4.4, layout="constrained") as figure:
        add_title(figure, title)
        left, right, *reference_axes = figure.subplots(1, 3 if reference else 2)
        left.plot(times, rates, color=BLUE)
        left.set(title="Learning rate", xlabel="epoch", ylim=(0, None))
        right.plot(times, decays, color=ORANGE)
        right.set(title="Weight decay", xlabel="epoch", ylim=(0, None))

        for stage in config.schedule.image_sizes:
            left.axvline(stage.until_epoch, color=GRAY, linestyle=":")
        end = config.augment.mixup_off_epoch
        if end is not None:
            left.axvline(end, color=GRAY, linestyle=":")
            left.annotate("mixing ends", (end, 0), rotation=90, color=GRAY, ha="right")

        for axes in reference_axes:
            for line in reference:
                axes.plot(*line, color=GRAY, linewidth=1)
            axes.set(
                title="Reference, top-1 %", xlabel="epoch", xlim=left.get_xlim(), ylim=(0, 100)
            )
    return picture
