"""Write an imported recipe as YAML, and print how its settings were mapped."""

import textwrap
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain, takewhile
from pathlib import Path

from vit.config.io import dump_yaml, from_dict
from vit.extras.recipes.importing import Imported
from vit.extras.recipes.reading import Mapped, Reading

_ALWAYS = {
    "model.name",
    "model.image_size",
    "data.root",
    "data.global_batch_size",
    "optim.name",
    "optim.lr",
    "optim.weight_decay",
    "optim.clip_grad_norm",
    "augment.randaugment_magnitude",
    "schedule.name",
    "train.epochs",
    "train.precision",
}
"""The settings that are written even if they equal the defaults, because readers look for them
first."""
_COLUMNS = 100


def yaml_text(imported: Imported, out: Path | None) -> str:
    """Return the recipe as YAML in the style of configs/. out: the path of the YAML file."""
    optimizer = imported.settings.get("optim.name", "adamw")
    # `data` and `train` have settings without a default.
    defaults = from_dict(
        {"data": {"root": ""}, "train": {"epochs": 1}, "optim": {"name": optimizer}}, "the defaults"
    ).model_dump(mode="json")

    comments = dict(chain.from_iterable(f.comments.items() for f in imported.reading.findings))
    comments["data.root"] = "shards of the images (docs/data.md)"
    parts = [_header(imported, out)]
    for section, settings in imported.sections.items():
        written = {
            name: value
            for name, value in settings.items()
            if f"{section}.{name}" in _ALWAYS or value != defaults[section].get(name)
        }
        if written:
            parts.append(dump_yaml({section: written}, comments))

    return "\n".join(parts)


def account(imported: Imported) -> str:
    """Return the mapping of each argument as text for a terminal."""
    reading = imported.reading
    findings: dict[str, list[Mapped]] = defaultdict(list)
    for finding in reading.findings:
        findings[finding.verdict].append(finding)

    num_stated = len(reading.stated)
    arguments = "argument" if num_stated == 1 else "arguments"
    counts = count(reading)
    # Readers look for what differs, and most settings are the same.
    lines = [
        f"{reading.table.program} ({reading.table.source}): {num_stated} {arguments} stated, the"
        " rest are defaults",
        "",
        f"differs: {counts['differs']}",
        *_mapped_lines(reading, findings["differs"]),
        "",
        f"no equivalent: {counts['cannot']}",
        *_mapped_lines(reading, findings["cannot"]),
        "",
        f"the same: {counts['same']}",
        *_mapped_lines(reading, findings["same"]),
        "",
        f"without effect in the source program: {counts['inert']}",
    ]
    for finding in findings["inert"]:
        lines += wrapped(f"{', '.join(_flags(reading, finding.theirs))}: {finding.text}")

    places = chain.from_iterable(finding.theirs for finding in findings["place"])
    stated_places = ", ".join(_flags(reading, places)) or "none stated"
    lines += ["", f"paths, displays and devices (not part of a recipe): {stated_places}"]
    return "\n".join(lines)


def _mapped_lines(reading: Reading, findings: Iterable[Mapped]) -> list[str]:
    """Return the lines of `findings`. Arguments without a setting and a text share the last one."""
    lines = []
    silent: list[str] = []
    for finding in findings:
        if finding.settings or finding.text:
            lines += _finding_lines(reading, finding)
        else:
            silent += finding.theirs

    if silent:
        lines += wrapped(f"and, without a setting: {', '.join(_flags(reading, silent))}")
    return lines


def count(reading: Reading) -> dict[str, int]:
    """Count the arguments with each verdict. A finding without an argument counts as one."""
    counts = dict.fromkeys(("same", "differs", "cannot", "inert", "place"), 0)
    for finding in reading.findings:
        counts[finding.verdict] += len(finding.theirs) or (finding.verdict != "place")
    return counts


def _finding_lines(reading: Reading, finding: Mapped) -> list[str]:
    ours = ", ".join(f"{key}: {_shown(value)}" for key, value in finding.settings.items())
    theirs = ", ".join(_flags(reading, finding.theirs))
    parts = [part for part in (ours, theirs and f"<- {theirs}") if part]
    lines = wrapped("   ".join(parts)) if parts else []
    if finding.text:
        lines += wrapped(finding.text, "      " if parts else "  ")
    return lines


def _flags(reading: Reading, names: Iterable[str]) -> list[str]:
    """Format arguments as flags with values, or as the common prefix of several config keys."""
    names = list(names)
    if len(names) == 1 or not any("." in name for name in names):
        return [_flag(reading, name) for name in names]

    paths = [name.split(".") for name in names]
    shared = list(takewhile(lambda same: len(set(same)) == 1, zip(*paths, strict=False)))
    if shared:
        return [".".join(same[0] for same in shared)]
    return list(dict.fromkeys(path[0] for path in paths))


def _flag(reading: Reading, name: str) -> str:
    """Format an argument as a flag with its value, such as `--lr 0.001 (default)`."""
    value = reading.args[name]
    flag = reading.table.flag_of(name)
    if value is True:
        return flag
    is_off = value is None or value is False or value == ""
    if is_off:
        return f"no {flag}"

    items = value if isinstance(value, (list, tuple)) else [value]
    text = f"{flag} {' '.join(map(_shown, items))}"
    return text if name in reading.stated else f"{text} (default)"


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def wrapped(text: str, indent: str = "  ", below: str = "") -> list[str]:
    """Wrap `text`. below: the indent of all lines after the first, by default `indent` plus 4
    spaces."""
    return textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=indent,
        subsequent_indent=below or indent + "    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _header(imported: Imported, out: Path | None) -> str:
    """Return YAML comments that state the source of the recipe and how the settings differ from
    it."""
    reading = imported.reading
    size = imported.settings.get("model.image_size", 224)
    name = imported.settings.get("model.name", "vit_b16")
    lines = [
        f"# {name} at {size} px, as {reading.table.program} trains it.",
        "#",
        *_entry("source", f"{reading.table.source}: defaults, and the arguments below"),
        *_entry("stated", reading.source),
        f"# {'command':<10} torchrun --nproc_per_node=8 launch/train.py"
        f" --config {out or 'FILE.yaml'} data.root=SHARDS",
        *_entry("published", "see the source"),
        *_entry("measured", "no; `python launch/recipe.py import` lists the settings that match"),
    ]

    for verdict, label in (("cannot", "missing"), ("differs", "differs")):
        for finding in reading.findings:
            if finding.verdict == verdict:
                flags = ", ".join(_flags(reading, finding.theirs))
                lines += _entry(label, f"{flags}: {finding.text}" if flags else finding.text)

    return "\n".join(lines) + "\n"


def _entry(label: str, text: str) -> list[str]:
    return wrapped(text, f"# {label:<10} ", f"# {'':<10} ")
