"""Choose the sample layout for `data_prep.index` from flags, class names and `_info.json`.

The layout (vit/data/shards/members.py) is given by flags or by the folder's existing `_info.json`.
Flags that contradict `_info.json` are an error, because they would change labels.
(`vit.weights.class_names` compares a model's classes with those of a data set.)
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.errors import PrepError
from vit.config.sample_layout import layout_problems
from vit.data.shards.members import FLAGS, INTEGER, SampleLayout, recorded_layout


class IndexFlags(NamedTuple):
    """The command-line flags that define the sample layout."""

    image: str | None = None
    label: str | None = None
    keys_with_dots: bool = False
    classes: Path | None = None


NO_FLAGS = IndexFlags()


def choose_layout(
    flags: IndexFlags, info: Mapping[str, Any] | None, place: str, first_tar: Path | None
) -> tuple[SampleLayout, list[str]]:
    """Return the sample layout and the class names ([] if unknown).

    Without flags, the recorded layout and class names are returned. Flags replace the entire
    layout, but the class names are kept unless --classes is given. Raises PrepError if the flags
    are invalid or contradict `info`.

    Args:
        info: The `_info.json` at `place`, or None if there is none.
        first_tar: A local shard, whose sidecar records the layout if another program wrote
            `_info.json`.
    """
    recorded_names = [str(name) for name in (info or {}).get("class_names") or []]
    recorded = SampleLayout() if info is None else recorded_layout(info, first_tar)
    if flags == NO_FLAGS:
        return recorded, recorded_names

    chosen_names = recorded_names if flags.classes is None else read_class_names(flags.classes)
    chosen = SampleLayout(
        image=_suffix(flags.image),
        label=_suffix(flags.label) or "cls",
        keys_with_dots=flags.keys_with_dots,
        class_names=recorded.class_names if flags.classes is None else tuple(chosen_names),
    )
    problems = layout_problems(chosen.image, chosen.label, chosen.keys_with_dots, FLAGS)
    if problems:
        raise PrepError("; ".join(problems))

    if info is None:
        return chosen, chosen_names
    if chosen_names != recorded_names:
        had = f"{len(recorded_names):,} class names" if recorded_names else "no class names"
        raise PrepError(
            f"{place}: _info.json has {had}, which does not match {flags.classes}: to use this"
            " file, move _info.json away"
        )
    # Only this package records which members a sample has.
    if "source" in info and chosen.options() != recorded.options():
        options = replace(recorded, class_names=()).options()
        members = ", ".join(f"{name} {value}" for name, value in options.items())
        raise PrepError(
            f"{place}: _info.json records an index made with {members or 'the usual members'}: to"
            " use other members, move _info.json away"
        )

    return chosen, chosen_names


def _suffix(text: str | None) -> str | None:
    return None if text is None else text.removeprefix(".")


def read_class_names(path: Path) -> list[str]:
    """Read class names in label order, one per line. Raises PrepError if the file is invalid."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise PrepError(
            f"--classes {path}: cannot be read ({reason}); expected a file with one class name per"
            " line"
        ) from error

    names = [line.strip() for line in text.strip().splitlines()]
    is_list_of_names = names and "" not in names and not names[0].startswith(("[", "{"))
    if not is_list_of_names:
        raise PrepError(f"--classes {path}: expected one class name per line, not JSON")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise PrepError(
            f"--classes {path}: {twice[0]!r} occurs twice: give each class a unique name"
        )

    for number, name in enumerate(names):
        if INTEGER.fullmatch(name) and int(name) != number:
            raise PrepError(
                f"--classes {path}: class {number} is named {name!r}, so the label {name} would be"
                " ambiguous: use a name that is not a number"
            )
    return names
