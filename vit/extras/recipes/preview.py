"""Show the parameter groups and learning rate of a recipe, and the differences between recipes.

The model is created on the meta device, which is fast for models of any size. An epoch has as many
images as ImageNet-1k, unless the number of images is given.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table

from vit.config.io import to_dict
from vit.config.schema import Config
from vit.data.image_format import ImageFormat
from vit.extras.recipes.difference import change_text, compare
from vit.extras.recipes.effects import KINDS
from vit.extras.recipes.rates import IMAGENET, VISIBLE_GAP, distance, in_percent, our_rate
from vit.extras.recipes.reference import read_reference
from vit.extras.recipes.summary import wrapped
from vit.model import create_model
from vit.optim.groups import parameter_groups
from vit.optim.schedule import weight_decay_at

POINTS = 1000
"""The number of points on each curve."""


def groups_table(config: Config) -> Table:
    """Return a table of the parameter groups with their learning rates and weight decays."""
    with torch.device("meta"):
        model = create_model(config.model, num_classes=config.model.num_classes or 1000)
    table = Table("group", "tensors", "parameters", "learning rate", "weight decay", box=None)
    for column in table.columns[1:]:
        column.justify = "right"

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    total = 0
    for group in parameter_groups(model, config.optim):
        parameters: Sequence[torch.Tensor] = group["params"]
        if not parameters:
            continue

        count = sum(parameter.numel() for parameter in parameters)
        total += count
        scale = group.get("lr_scale", 1.0)
        first = names[id(parameters[0])]
        more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        matrices = " (Muon's)" if group.get("use_muon") else ""
        table.add_row(
            f"{first}{more}{matrices}",
            f"{len(parameters)}",
            f"{count:,}",
            f"{config.optim.lr * scale:.3g}" + (f" ({scale:.3g} x)" if scale != 1 else ""),
            f"{group['weight_decay']:g}",
        )

    table.add_section()
    trained = sum(p.requires_grad for p in model.parameters())
    table.add_row("all trained", f"{trained}", f"{total:,}", "", "")
    return table


class Curves(NamedTuple):
    """The curves of a recipe over epochs."""

    times: list[float]
    """The epochs at which rates and decays are given."""
    rates: list[float]
    """The learning rate at each time."""
    decays: list[float]
    """The weight decay at each time."""
    reference: list[tuple[list[float], list[float]]]
    """The epochs and the top-1 accuracy in percent of each run of `eval.reference`; [] without a
    reference."""


def curves_of(config: Config, num_images: int) -> Curves:
    """Return the curves of `config`. num_images: the number of images in an epoch.

    Raises ValueError if the reference cannot be read.
    """
    per_epoch = max(num_images // config.data.global_batch_size, 1)
    epochs = config.train.epochs or (config.train.steps or 1) / per_epoch
    rate = our_rate(flat(to_dict(config)), per_epoch)

    final = config.schedule.final_weight_decay
    times = [epochs * n / POINTS for n in range(POINTS)]
    runs = read_reference(config.eval.reference).runs if config.eval.reference else []
    return Curves(
        times,
        rates=[rate(time) for time in times],
        decays=[
            weight_decay_at(
                int(time * per_epoch),
                first=config.optim.weight_decay,
                final=config.optim.weight_decay if final is None else final,
                total_steps=round(epochs * per_epoch),
            )
            for time in times
        ],
        reference=[(list(epochs * run["share"]), list(run["top1"])) for run in runs],
    )


def steps_line(config: Config, num_images: int = IMAGENET) -> str:
    """Return one line with the length and the peak learning rate of the recipe."""
    per_epoch = max(num_images // config.data.global_batch_size, 1)
    total = config.train.steps or round((config.train.epochs or 0) * per_epoch)
    form = ImageFormat.from_config(config.model, config.data, config.schedule)
    return (
        f"{config.model.name} at {form.sizes_text()}: {total:,} steps of"
        f" {config.data.global_batch_size:,} images, {per_epoch:,} an epoch of {num_images:,};"
        f" {config.optim.name}, {config.schedule.name}, peak {config.optim.lr:g}"
    )


def in_words(first: Config, second: Config, names: tuple[str, str]) -> str:
    """Describe all differences as text for a terminal."""
    differences = compare(first, second)
    lines = [f"A  {names[0]}", f"B  {names[1]}"]
    if not differences:
        return "\n".join([*lines, "", "no setting differs"])

    for kind, heading in KINDS:
        of_kind = [d for d in differences if d.kind == kind]
        if of_kind:
            lines += ["", f"{heading}: {len(of_kind)}"]
        for difference in of_kind:
            lines += wrapped(f"{difference.key}: {change_text(difference)}", "  ", "    ")
            # Without a text, no line is added.
            lines += wrapped(difference.text, "      ", "        ")

    rates = _rates(first, second)
    if rates:
        lines += ["", *wrapped(rates, "", "  ")]
    return "\n".join(lines)


def _rates(first: Config, second: Config) -> str:
    """Describe how the learning rates of two runs differ, or return "" if they are equal."""
    rates = []
    for config in (first, second):
        settings = flat(to_dict(config))
        per_epoch = max(IMAGENET // config.data.global_batch_size, 1)
        epochs = config.train.epochs or (config.train.steps or 1) / per_epoch
        rates.append((our_rate(settings, per_epoch), epochs))

    (rate, epochs), (other_rate, other_epochs) = rates
    peak = max(first.optim.lr, second.optim.lr)
    apart = distance(rate, lambda time: other_rate(time * other_epochs / epochs), peak, epochs)
    if apart.largest < VISIBLE_GAP:
        return ""

    return (
        "learning rates at equal shares of both runs differ by at most"
        f" {in_percent(apart.largest)} of the larger peak"
        f" ({in_percent(apart.at_epoch / epochs)} into the run), {in_percent(apart.mean)} on"
        " average"
    )


def flat(values: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of a config, keyed by dotted path."""
    return {
        f"{section}.{name}": value
        for section, group in values.items()
        for name, value in group.items()
    }
