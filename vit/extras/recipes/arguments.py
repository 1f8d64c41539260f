"""Describe the arguments of another project's script as a table, and parse its command lines.

A table row is `flags   type   default   rule`, separated by two or more spaces. The first long flag
names the argument. Types: `int`, `float`, `str`, `ints`, `floats`, `strs` (one or more), `on` (sets
true), `off:NAME` (sets NAME false), `pairs` (key=value words), `word` (not a flag) and `required`
(a config must have this key). The default `-` is None.

The rule states how the argument is mapped (`vit.extras.recipes.reading.map_arguments`):

    train.epochs             equals this setting, or several, separated by commas
    [model.drop_path_rate]   equals this setting, which is set unless the value is 0, "" or None
    ?train.seed              equals this setting, which is set unless the value is None
    {gap: {model.global_pool: avg}, else: the pooling {}}     equals the settings for its value, in
                             YAML; a text names what is missing, and may contain the value
    {0: {}, else: {optim.lr: VALUE}, ...}    the same; VALUE stands for the value
    {ce: {}, refuse: expected ce}   the same; all other values are an error
    off: vertical flips      supported only if it is off; the text names the missing feature
    differs: shuffles {:,} images at a time     similar unless it is off; the text has the value
    inert: --sched is off    no effect in the source program, for this reason
    evaluates: --eval        an error, because the script then only evaluates
    -                        supported with any value, without a setting
    other text               mapped by a function; the text is for readers

If a function maps an argument, the program ignores the argument's rule. The rule then only explains
the mapping to readers of the table.

A second table lists the arguments for paths, logging, devices and speed, which are not part of a
recipe. Abbreviated flags, such as `--batch 256` for `--batch-size 256`, are accepted, because
published commands use them.
"""

import argparse
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from vit.config.hints import all_keys, from_other_name

_SCALARS: dict[str, type[int | float | str]] = {"int": int, "float": float, "str": str}
_LISTS = {f"{name}s": kind for name, kind in _SCALARS.items()}
_VALUE_TYPES = _SCALARS | _LISTS
"""Maps the types of arguments with values to the type of one value."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "word": {"nargs": "?"},
    "on": {"action": "store_true"},
    "off": {"action": "store_false"},
    "pairs": {"nargs": "*"},
    **{name: {} for name in _SCALARS},
    **{name: {"nargs": "+"} for name in _LISTS},
}
"""Maps the types of arguments to options of argparse."""


class SafeNumberLoader(yaml.SafeLoader):
    """A YAML 1.1 loader in which `1e-3` is a number, as it is for argparse."""


SafeNumberLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)

_IN_WORDS: dict[type, str] = {int: "a whole number", float: "a number"}


class Argument(NamedTuple):
    """An argument of another project's script."""

    flags: tuple[str, ...]
    type: str
    default: object
    rule: str
    """The rule that maps the argument, or a short explanation if a function maps it."""
    in_recipe: bool
    """False for paths, logging and devices, which are not part of the recipe."""

    @property
    def name(self) -> str:
        """The argument's name in the parsed values."""
        if self.type.startswith("off:"):
            return self.type[4:]
        long = [flag for flag in self.flags if flag.startswith("--")] or self.flags
        return long[0].lstrip("-").replace("-", "_")


class ArgumentTable(NamedTuple):
    """All arguments of a script."""

    program: str
    """The script's name in messages, such as "DeiT's main.py"."""
    source: str
    """The file with the argument parser, as repo@commit:path."""
    arguments: tuple[Argument, ...]

    def defaults(self) -> dict[str, Any]:
        """Return the default of each argument, keyed by argument name."""
        defaults: dict[str, Any] = {}
        for argument in self.arguments:
            defaults.setdefault(argument.name, argument.default)
        return defaults

    def flag_of(self, name: str) -> str:
        """Return the flag that messages use for the argument `name`."""
        return max(next(a.flags for a in self.arguments if a.name == name), key=len)


class ParsedArguments(NamedTuple):
    """The values of all arguments for one command."""

    table: ArgumentTable
    values: Mapping[str, Any]
    stated: frozenset[str]
    """The names of the arguments in the command. All other arguments have their defaults."""
    shortened: tuple[str, ...] = ()
    """A sentence for each abbreviated flag. A newer version of the script may have another flag
    with the abbreviated name."""


def make_table(program: str, source: str, recipe: str, places: str) -> ArgumentTable:
    """Parse the two tables of a script: `recipe`, and `places` for paths, logging and devices."""
    lines = [(line, True) for line in recipe.splitlines()]
    lines += [(line, False) for line in places.splitlines()]
    return ArgumentTable(
        program, source, tuple(_argument(*line) for line in lines if line[0].strip())
    )


def _argument(line: str, in_recipe: bool) -> Argument:
    """Parse a line of a table, which has a rule only if the argument is part of a recipe."""
    cells = re.split(r"\s{2,}", line.strip(), maxsplit=3)
    assert len(cells) >= 3, f"a line of a table has flags, a type and a default: {line!r}"
    flags, kind, default, *rest = cells

    value: Any = None if default == "-" else yaml.safe_load(default)
    if kind == "on":
        value = bool(value)
    elif kind.startswith("off:"):
        value = True
    elif kind == "pairs":
        value = {}
    elif value is not None and kind in _SCALARS:
        value = _SCALARS[kind](value)  # YAML parses 5e-4 as text
    elif value is not None:
        value = [_LISTS[kind](item) for item in value]

    return Argument(tuple(flags.split()), kind, value, rest[0] if rest else "", in_recipe)


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises ValueError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}")


def read_words(table: ArgumentTable, tokens: Sequence[str]) -> ParsedArguments:
    """Parse the arguments of a command.

    Raises a ValueError that lists every value of the wrong type, and every unknown flag with the
    closest known flags.
    """
    problems: list[str] = []  # The parser appends each value of the wrong type.
    try:
        parsed, unknown = _create_parser(table, problems).parse_known_args(list(tokens))
    except ValueError as error:  # a flag without its value, or an ambiguous abbreviation
        raise ValueError("; ".join([str(error), *problems])) from None

    shortened = _shortened(table, tokens)
    if unknown:
        problems.insert(0, _unknown(table, unknown))
    elif problems:
        problems[0] = f"{table.program}: {problems[0]}"
    if problems:
        raise ValueError("; ".join([*problems, *shortened]))

    stated = vars(parsed)
    for argument in table.arguments:
        if argument.type == "pairs" and argument.name in stated:
            stated[argument.name] = _pairs(stated[argument.name])
    return ParsedArguments(table, {**table.defaults(), **stated}, frozenset(stated), shortened)


def _create_parser(table: ArgumentTable, problems: list[str]) -> _Parser:
    """Create the parser of a script, which appends values of the wrong type to `problems`."""
    parser = _Parser(prog=table.program, add_help=False, argument_default=argparse.SUPPRESS)
    for argument in table.arguments:
        kind = argument.type.partition(":")[0]
        options = dict(_OPTIONS[kind])
        if kind in _VALUE_TYPES:
            options["type"] = partial(
                _value, _VALUE_TYPES[kind], table.flag_of(argument.name), problems
            )
        if kind in _SCALARS and not argument.in_recipe:
            # Only flags that are not part of a recipe, such as timm's --torchcompile, take an
            # optional value.
            options |= {"nargs": "?", "const": ""}
        if kind != "word":
            options["dest"] = argument.name
        parser.add_argument(*argument.flags, **options)
    return parser


def _shortened(table: ArgumentTable, tokens: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence for each flag that argparse completes."""
    flags = list(chain.from_iterable(argument.flags for argument in table.arguments))
    typed = [token.partition("=")[0] for token in tokens if re.match("--[a-z]", token)]
    incomplete = [word for word in dict.fromkeys(typed) if word not in flags]
    return tuple(
        f"{word} is read as {flag} ({table.source})"
        for word, flag in product(incomplete, flags)
        if flag.startswith(word)
    )


def _value(kind: type[int | float | str], flag: str, problems: list[str], text: str) -> Any:
    """Convert `text` to `kind`. Append an error to `problems` instead of raising."""
    try:
        value = kind(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError
    except ValueError:
        problems.append(f"{flag} {text}: expected {_IN_WORDS[kind]}")
        return None
    return value


def read_yaml(table: ArgumentTable, text: str, path: Path) -> ParsedArguments:
    """Parse the arguments in `text`, the content of the YAML file `path`.

    Raises a ValueError that lists every unknown key with the closest known key.
    """
    try:
        values = yaml.load(text, SafeNumberLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"{path}: expected arguments of {table.program}, such as `model: vit_base`"
        )

    defaults = table.defaults()
    unknown = [key for key in values if key not in defaults]
    if unknown:
        hints = [f"{key}{_near(key, defaults)}" for key in unknown]
        raise ValueError(f"{table.program} has no argument {', '.join(hints)} ({table.source})")
    return ParsedArguments(table, {**defaults, **values}, frozenset(values))


def _unknown(table: ArgumentTable, unparsed: Sequence[str]) -> str:
    """Return the error for unknown flags or, if there are none, for words that nothing takes."""
    named = [word.partition("=")[0] for word in unparsed if word.startswith("-")]
    if not named:
        return f"{table.program} does not accept {' '.join(unparsed)!r} ({table.source})"

    flags = list(chain.from_iterable(argument.flags for argument in table.arguments))
    hints = [f"{flag}{_near(flag, flags)}" for flag in dict.fromkeys(named)]
    return f"{table.program} has no {', '.join(hints)} ({table.source})"


def _near(word: str, candidates: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` with a candidate for the same setting or a similar name."""
    plain = {name.lstrip("-").replace("-", "_").lower(): name for name in candidates}
    normalized = word.lstrip("-").replace("-", "_").lower()
    setting = _setting(normalized)

    same = [name for text, name in plain.items() if setting and _setting(text) == setting]
    close = [plain[text] for text in difflib.get_close_matches(normalized, plain, n=1, cutoff=0.75)]
    nearest = close if normalized in plain else same or close
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def _setting(name: str) -> str:
    """Return this project's setting for another project's argument name, or ""."""
    own = (key for key in all_keys() if key.endswith(f".{name}") and not key.endswith(".name"))
    return from_other_name(name) or next(own, "")


def _pairs(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse `a=1 b=x` as timm's ParseKwargs does."""
    parts = (assignment.partition("=") for assignment in assignments)
    return {key: yaml.load(value, SafeNumberLoader) for key, _, value in parts}
