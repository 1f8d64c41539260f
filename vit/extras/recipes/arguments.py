"""The arguments of another program as a table, and its command line read by that table.

A line of a table is `flags  type  default  what it means here`, with two or more blanks between.
Flags are written as the program writes them; the first long one names the argument. Types: `int`,
`float`, `str`, `ints`, `floats`, `strs` (one or more), `on` (sets true), `off:NAME` (sets NAME
false), `pairs` (key=value words) and `word` (not a flag). The default `-` is None.

Arguments that say where things are, what is shown and how fast it runs are no part of a recipe:
they have a table of their own. Command lines are read as argparse reads them, abbreviations too:
published commands have `--batch 256` for `--batch-size 256`.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import yaml

from vit.config.hints import all_keys, from_other_name

_ONE: dict[str, type[int | float | str]] = {"int": int, "float": float, "str": str}
_MANY = {f"{name}s": kind for name, kind in _ONE.items()}
_IN_WORDS: dict[type, str] = {int: "a whole number", float: "a number"}


class Argument(NamedTuple):
    """One argument of another program."""

    flags: tuple[str, ...]
    type: str
    default: Any
    meaning: str
    """What it means here, in words."""
    in_recipe: bool
    """False: a place, a display, a device."""

    @property
    def name(self) -> str:
        """The name under which its program keeps the value."""
        if self.type.startswith("off:"):
            return self.type[4:]
        long = [flag for flag in self.flags if flag.startswith("--")] or self.flags
        return long[0].lstrip("-").replace("-", "_")


class Table(NamedTuple):
    """All arguments of a program."""

    program: str
    """Its name in messages, such as "DeiT's main.py"."""
    source: str
    """repo@commit:path of the parser."""
    arguments: tuple[Argument, ...]

    def defaults(self) -> dict[str, Any]:
        """Name -> default."""
        found: dict[str, Any] = {}
        for argument in self.arguments:
            found.setdefault(argument.name, argument.default)
        return found

    def flag_of(self, name: str) -> str:
        """The flag to show for the argument `name`."""
        flags = next(a.flags for a in self.arguments if a.name == name)
        return max(flags, key=len)


class Given(NamedTuple):
    """The arguments of one command: every one has its value."""

    values: dict[str, Any]
    stated: frozenset[str]
    """Names of those that the command states; the others are defaults."""


def make_table(program: str, source: str, recipe: str, places: str) -> Table:
    """Read the two tables of a program."""
    lines = [(line, True) for line in recipe.splitlines()]
    lines += [(line, False) for line in places.splitlines()]
    return Table(program, source, tuple(_argument(*line) for line in lines if line[0].strip()))


def _argument(line: str, in_recipe: bool) -> Argument:
    cells = re.split(r"\s{2,}", line.strip(), maxsplit=3)
    assert len(cells) >= 3, f"a line of a table has flags, a type and a default: {line!r}"
    flags, kind, default, *rest = cells
    meaning = rest[0] if rest else ""
    value: Any = None if default == "-" else yaml.safe_load(default)
    if kind == "float" and value is not None:
        value = float(value)  # YAML takes 5e-4 for text
    elif kind == "floats" and value is not None:
        value = [float(number) for number in value]
    elif kind == "str" and value is not None:
        value = str(value)
    elif kind == "on":
        value = bool(value)
    elif kind.startswith("off:"):
        value = True
    elif kind == "pairs":
        value = {}
    return Argument(tuple(flags.split()), kind, value, meaning, in_recipe)


class _Parser(argparse.ArgumentParser):
    """argparse's, whose mistakes are a ValueError of one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}")


def read_words(table: Table, words: Sequence[str]) -> Given:
    """The arguments that the command line `words` means.

    Raises ValueError naming all unknown flags, each with the nearest, and values of a wrong type.
    """
    parser = _Parser(prog=table.program, add_help=False, argument_default=argparse.SUPPRESS)
    problems: list[str] = []
    for argument in table.arguments:
        name = argument.name
        if argument.type == "word":
            parser.add_argument(name, nargs="?")
        elif argument.type == "on":
            parser.add_argument(*argument.flags, dest=name, action="store_true")
        elif argument.type.startswith("off:"):
            parser.add_argument(*argument.flags, dest=name, action="store_false")
        elif argument.type == "pairs":
            parser.add_argument(*argument.flags, dest=name, nargs="*")
        else:
            one = (_ONE | _MANY)[argument.type]
            kind = partial(_value, one, table.flag_of(name), problems)
            # A flag that may stand alone, as timm's --torchcompile, is a place: never a number.
            alone: dict[str, Any] = {} if argument.in_recipe else {"nargs": "?", "const": ""}
            number = {"nargs": "+"} if argument.type in _MANY else alone
            parser.add_argument(*argument.flags, dest=name, type=kind, **number)
    try:
        known, unknown = parser.parse_known_args(list(words))
    except ValueError as error:  # a flag without its value, or one that may mean two
        raise ValueError("; ".join([str(error), *problems])) from None
    if unknown:
        problems.insert(0, _unknown(table, unknown))
    elif problems:
        problems[0] = f"{table.program}: {problems[0]}"
    if problems:
        raise ValueError("; ".join(problems))
    stated = vars(known)
    for name in [a.name for a in table.arguments if a.type == "pairs"]:
        if name in stated:
            stated[name] = _pairs(stated[name])
    return Given({**table.defaults(), **stated}, frozenset(stated))


def _value(kind: type[int | float | str], flag: str, problems: list[str], text: str) -> Any:
    """`text` as a `kind`; what is none is put among `problems`, so that all are found."""
    try:
        value = kind(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError
    except ValueError:
        problems.append(f"{flag} {text}: expected {_IN_WORDS[kind]}")
        return None
    return value


def read_mapping(table: Table, values: Mapping[str, Any]) -> Given:
    """The arguments that a YAML file of the program gives, by their names.

    Raises ValueError naming all unknown keys, each with the nearest.
    """
    known = table.defaults()
    if unknown := [key for key in values if key not in known]:
        hints = [f"{key}{_near(key, known)}" for key in unknown]
        raise ValueError(f"{table.program} has no argument {', '.join(hints)} ({table.source})")
    return Given({**known, **values}, frozenset(values))


def _unknown(table: Table, words: Sequence[str]) -> str:
    flags = [flag for argument in table.arguments for flag in argument.flags]
    named = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not named:
        return f"{table.program} takes no {' '.join(words)!r} ({table.source})"
    hints = [f"{flag}{_near(flag, flags)}" for flag in dict.fromkeys(named)]
    return f"{table.program} has no {', '.join(hints)} ({table.source})"


def _near(word: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` with what means the same setting or is nearly the same word, or ""."""
    plain = {name.lstrip("-").replace("-", "_").lower(): name for name in known}
    given = word.lstrip("-").replace("-", "_").lower()
    meant = _setting(given)
    same = [name for text, name in plain.items() if meant and _setting(text) == meant]
    close = [plain[text] for text in difflib.get_close_matches(given, plain, n=1, cutoff=0.75)]
    nearest = close if given in plain else same or close
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def _setting(name: str) -> str:
    """The setting of ours that programs call `name`, or ""."""
    own = (key for key in all_keys() if key.endswith(f".{name}") and not key.endswith(".name"))
    return from_other_name(name) or next(own, "")


def _pairs(words: Sequence[str]) -> dict[str, Any]:
    """`a=1 b=x` as timm's ParseKwargs reads them."""
    divided = (word.partition("=") for word in words)
    return {key: yaml.safe_load(value) for key, _, value in divided}
