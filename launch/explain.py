"""Explain settings: their effects, types and defaults, and the recipes that set them.

    python launch/explain.py optim.lr
    python launch/explain.py optim              # all settings of a section
    python launch/explain.py layer_decay ema    # every key that contains one of the words

Exit status: 0, or 2 if no key contains one of the words.
"""

import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence

import check_versions  # noqa: F401

from vit.config.hints import nearest
from vit.config.reference import Setting, as_yaml, recipes, settings
from vit.system.command_line import Parser

MOST_VALUES = 6
"""The maximum number of recipe values to list, most frequent first."""


def main() -> None:
    """Run the command. Raises ValueError if no key contains one of the words."""
    parser = Parser("python launch/explain.py", __doc__)
    parser.add_argument("keys", nargs="+", metavar="KEY", help="a setting, a section or a word")
    unknown = []
    for word in parser.parse_args().keys:
        chosen = matching(word)
        for setting in chosen:
            print(explain(setting, is_alone=len(chosen) == 1))
        if not chosen:
            unknown.append(f"no setting contains {word!r}{nearest(word, list(settings()))}")
    if unknown:
        raise ValueError("\n".join(unknown))


def matching(word: str) -> list[Setting]:
    """Return the setting named `word`, all settings in the section `word`, or all settings whose
    keys contain `word`."""
    every = settings()
    if word in every:
        return [every[word]]
    in_section = [each for key, each in every.items() if key.startswith(f"{word}.")]
    return in_section or [each for key, each in every.items() if word in key]


def explain(setting: Setting, is_alone: bool) -> str:
    """Return the lines that explain a setting. If `is_alone` is true, include the recipes that set
    it."""
    lines = [
        f"{setting.key}: {setting.type}; default {setting.default}",
        *textwrap.wrap(setting.sentence, 88, initial_indent="    ", subsequent_indent="    "),
    ]
    if setting.only_with:
        groups = [" or ".join(group) for group in setting.only_with]
        lines.append(f"    Only with {', and with '.join(groups)}.")

    if is_alone:
        if setting.may_change:
            lines.append("    A resumed run may have another value.")
        else:
            lines.append(
                f"    A resumed run keeps its value, unless --allow-change {setting.key} is given."
            )
        lines += recipe_lines(setting.key)

    return "\n".join(lines)


def recipe_lines(key: str) -> Sequence[str]:
    """Return lines with the values that recipes give to `key`, each with the names of those
    recipes."""
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    for name, values in recipes().items():
        if key in values:
            names_of[as_yaml(values[key])].append(name)

    most_frequent = sorted(names_of.items(), key=lambda item: -len(item[1]))[:MOST_VALUES]
    if not most_frequent:
        return ["    No recipe sets it."]

    lines = [f"    {sum(map(len, names_of.values()))} of {len(recipes())} recipes set it:"]
    for value, names in most_frequent:
        text = textwrap.shorten(", ".join(names), 70, placeholder=" ...")
        lines.append(f"      {value}  {text}")

    return lines


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:  # `run_command` would import torch, which takes seconds.
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
