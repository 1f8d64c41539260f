"""The layout of samples for `data_prep.index`, from flags, a file of class names and `_info.json`.

The flags and the file become a layout (vit/data/shards/members.py). An existing `_info.json`
records the layout of its folder: without flags it is used again, and different flags, which would
give other labels, are an error. (`vit.weights.class_names` compares the classes of data and model.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.errors import PrepError
from vit.data.shards.members import FLAGS, INTEGER, SampleLayout, recorded_layout


class Asked(NamedTuple):
    """The flags about samples."""

    image: str | None = None
    label: str | None = None
    keys_with_dots: bool = False
    classes: Path | None = None


NOTHING_ASKED = Asked()


def choose_layout(
    flags: Asked, info: Mapping[str, Any] | None, place: str, first_tar: Path | None
) -> tuple[SampleLayout, list[str]]:
    """Return the layout, and the name of each class ([] if unknown). Raises PrepError.

    info: the `_info.json` at `place`. first_tar: a shard in a folder, whose sidecar has the layout
    if another program wrote `_info.json`.
    """
    recorded_names = [str(name) for name in (info or {}).get("class_names") or []]
    recorded = SampleLayout() if info is None else recorded_layout(info, first_tar)
    if flags == NOTHING_ASKED:
        return recorded, recorded_names
    names = recorded_names if flags.classes is None else read_class_names(flags.classes)
    listed = tuple(names) if flags.classes is not None else recorded.class_names
    layout = SampleLayout(
        _suffix(flags.image), _suffix(flags.label) or "cls", flags.keys_with_dots, listed
    )
    if problems := layout.problems(FLAGS):
        raise PrepError("; ".join(problems))
    if info is not None and names != recorded_names:
        had = f"{len(recorded_names):,} class names" if recorded_names else "no class names"
        raise PrepError(
            f"{place}: its _info.json has {had}, and others than {flags.classes}; to index with"
            " these, move it away"
        )
    if info is not None and "source" in info and layout.options() != recorded.options():
        options = replace(recorded, class_names=()).options()
        members = ", ".join(f"{name} {value}" for name, value in options.items())
        raise PrepError(
            f"{place}: indexed with {members or 'the usual members'}, as its _info.json says; to do"
            " it otherwise, move that file away"
        )
    return layout, names


def _suffix(text: str | None) -> str | None:
    """Return a suffix without its dot."""
    return None if text is None else text.removeprefix(".")


def read_class_names(path: Path) -> list[str]:
    """Read the name of each label, one a line. Raises PrepError."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise PrepError(
            f"--classes {path}: cannot be read ({reason}); expected a file with one class name a"
            " line"
        ) from error
    names = [line.strip() for line in text.strip().splitlines()]
    if "" in names or not names or names[0].startswith(("[", "{")):
        raise PrepError(f"--classes {path}: expected one class name a line, and no JSON")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise PrepError(
            f"--classes {path}: {twice[0]!r} occurs twice; labels need names that differ"
        )
    for number, name in enumerate(names):
        if INTEGER.fullmatch(name) and int(name) != number:
            raise PrepError(
                f"--classes {path}: class {number} is called {name!r}, and a label {name} could"
                " mean either; give it a name that is not a number"
            )
    return names
