"""Map the arguments of another project to settings of this project.

A `Reading` is a value that contains the arguments of a recipe, and a finding for each argument that
is mapped. `map_arguments` returns the reading with all findings. Each argument is mapped by the
rule in its project's table, or by a function of its project's module, which returns findings: same,
differs, no equivalent, or no effect in the source project. An argument without a finding is an
error, so no argument is dropped silently.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, Self

import yaml

from vit.config.hints import all_keys
from vit.extras.recipes.arguments import Argument, ArgumentTable, ParsedArguments
from vit.extras.recipes.command import Command

Verdict = Literal["same", "differs", "cannot", "inert", "place"]
Settings = dict[str, Any]
"""Settings of this project, keyed by dotted path."""
Findings = Iterable["Mapped"]
Handler = Callable[["Reading"], Findings]
"""A function that maps one or more arguments of a reading."""
_KNOWN = frozenset(all_keys())


class Mapped(NamedTuple):
    """The mapping of one or more arguments of the source project."""

    verdict: Verdict
    theirs: tuple[str, ...]
    """The names of the arguments, or () for a property without an argument, such as the
    precision."""
    settings: Settings
    """This project's closest settings."""
    text: str
    """The difference, or the reason why no equivalent exists. "" if neither applies."""
    comments: dict[str, str]
    """An explanation of how a value was computed, keyed by dotted path, for the YAML file."""


def same(
    names: str, settings: Mapping[str, Any] | None = None, note: str = "", text: str = ""
) -> Mapped:
    """Return the finding that the arguments `names` (separated by spaces) equal `settings`.

    Args:
        names: The arguments, separated by spaces.
        settings: This project's settings, keyed by dotted path.
        note: How the first value was computed.
        text: An assumption made in the computation.
    """
    return _finding("same", names, settings, text, note)


def differs(names: str, text: str, settings: Mapping[str, Any] | None = None) -> Mapped:
    """Return the finding that the arguments `names` are similar to `settings`.

    Args:
        names: The arguments, separated by spaces, or "" for a property without an argument.
        text: The difference.
        settings: This project's settings, keyed by dotted path.
    """
    return _finding("differs", names, settings, text)


def cannot(names: str, text: str, settings: Mapping[str, Any] | None = None) -> Mapped:
    """Return the finding that the arguments `names` have no equivalent.

    Args:
        names: The arguments, separated by spaces.
        text: The reason.
        settings: The replacement.
    """
    return _finding("cannot", names, settings, text)


def inert(names: str, text: str) -> Mapped:
    """Return the finding that the arguments `names` have no effect in their project.

    text: the reason.
    """
    return _finding("inert", names, None, text)


def implied(settings: Mapping[str, Any]) -> Mapped:
    """Return the finding of `settings` that equal the program, but no argument of it."""
    return same("", settings)


def same_if_used(is_used: bool, names: str, settings: Mapping[str, Any], reason: str) -> Mapped:
    """Return the finding that the arguments `names` equal `settings`, or why they are not used."""
    return same(names, settings) if is_used else inert(names, reason)


def _finding(
    verdict: Verdict, names: str, settings: Mapping[str, Any] | None, text: str, note: str = ""
) -> Mapped:
    ours = {key: _plain(value) for key, value in (settings or {}).items()}
    comments = {next(iter(ours)): note} if note and ours else {}
    return Mapped(verdict, tuple(names.split()), ours, text, comments)


def _plain(value: Any) -> Any:
    """Return a value that is readable in a YAML file: 0.3 for 0.1 * 3, and a list for a tuple."""
    if isinstance(value, float):
        return float(f"{value:.12g}")
    return list(value) if isinstance(value, tuple) else value


class Program(NamedTuple):
    """A program whose recipes are imported."""

    parse: Callable[[Command], ParsedArguments]
    """A function that parses the arguments of a command."""
    handlers: Mapping[str, Handler]
    """The functions for arguments whose rule in the table is not enough."""
    rest: Handler
    """A function that maps what no argument controls."""
    rules: Sequence[Argument] = ()
    """The arguments to map, in this order, or () for the table's arguments that are part of a
    recipe."""


class Reading(NamedTuple):
    """The arguments of a recipe, and the findings for those that are mapped."""

    program: Program
    source: str
    """The command, or the name of the config file."""
    table: ArgumentTable
    args: Mapping[str, Any]
    """The values by name."""
    stated: frozenset[str]
    """The names of the arguments in the command."""
    num_gpus: int | None
    """The total number of GPUs, or None if it is unknown."""
    is_distributed: bool
    """Whether a launcher starts the processes."""
    findings: tuple[Mapped, ...]

    @property
    def settings(self) -> Settings:
        """Return the settings of all findings, keyed by dotted path."""
        return {key: value for finding in self.findings for key, value in finding.settings.items()}

    @property
    def accounted(self) -> list[str]:
        """Return the names of the arguments that have a finding."""
        return list(chain.from_iterable(finding.theirs for finding in self.findings))

    def plus(self, findings: Findings) -> Self:
        """Return this reading with more findings. Empty findings are dropped."""
        nonempty = [f for f in findings if any((f.theirs, f.settings, f.text))]
        return self._replace(findings=(*self.findings, *nonempty))

    def present(self, paths: str) -> str:
        """Return the arguments at or below the dotted `paths`, joined by spaces."""
        names = [
            name
            for path in paths.split()
            for name in self.args
            if name == path or name.startswith(f"{path}.")
        ]
        return " ".join(dict.fromkeys(names))


def map_arguments(reading: Reading) -> Reading:
    """Return `reading` with a finding for each argument, and with the stated paths.

    Arguments are mapped in the order of the program's rules, so a function can use the settings of
    earlier arguments. A function can map several arguments.
    """
    recipe = [argument for argument in reading.table.arguments if argument.in_recipe]
    rules = reading.program.rules or recipe
    for argument in rules:
        if argument.name in reading.accounted:
            continue
        handler = reading.program.handlers.get(argument.name)
        findings = handler(reading) if handler else [_follow_rule(reading, argument, rules)]
        reading = reading.plus(findings)

    reading = reading.plus(reading.program.rest(reading))
    _check(reading, {argument.name for argument in recipe})

    others = reading.stated - set(reading.accounted)
    places = [a.name for a in reading.table.arguments if not a.in_recipe and a.name in others]
    return reading.plus([_finding("place", " ".join(dict.fromkeys(places)), None, "")])


def _check(reading: Reading, recipe: set[str]) -> None:
    """Check that each argument of `recipe` has one finding, and that each setting exists."""
    names = reading.accounted
    keys = list(chain.from_iterable(finding.settings for finding in reading.findings))
    where = reading.table.program

    assert recipe <= set(names), f"{where}: no finding for {sorted(recipe - set(names))}"
    assert set(names) <= reading.args.keys(), f"{where}: a finding for more than its arguments"
    assert len(names) == len(set(names)), f"{where}: several findings for one of {names}"
    assert set(keys) <= _KNOWN, f"{where}: unknown settings among {keys}"
    assert len(keys) == len(set(keys)), f"{where}: one of {keys} is set twice"


def _follow_rule(reading: Reading, argument: Argument, rules: Sequence[Argument]) -> Mapped:
    """Return the finding that the rule of `argument` states for its value.

    A rule has one of three forms, which `vit.extras.recipes.arguments` lists with all variants:

        train.epochs                                the settings that equal the value
        {gap: {model.global_pool: avg}, else: ...}  the settings for each value
        off: vertical flips                         the kind of the finding, and its text
    """
    name = argument.name
    rule = argument.rule
    names = reading.present(" ".join((name, *argument.flags)))
    is_required = argument.type == "required"
    value = reading.args[name] if is_required else reading.args.get(name, argument.default)

    settings = rule.strip("[]?").split(", ")
    if _KNOWN.issuperset(settings):
        is_unset = (rule[0] == "[" and not value) or (rule[0] == "?" and value is None)
        return same(names, {} if is_unset else dict.fromkeys(settings, value))

    if rule.startswith("{"):
        return _choose(reading, argument, names, value)

    kind, _, text = rule.partition(": ")
    if kind == "differs":
        return differs(names, text.format(value)) if value else same(names)
    if kind == "off":
        return same(name) if not value or value == "none" else cannot(name, text)
    if kind == "inert":
        # All arguments with this rule become one finding, so that the reason is printed once.
        return inert(" ".join(each.name for each in rules if each.rule == rule), text)
    assert kind in ("", "-"), f"{reading.table.program}: no function maps {name}"
    return same(names)


def _choose(reading: Reading, argument: Argument, names: str, value: Any) -> Mapped:
    """Return the finding for `value` from a rule that lists values.

    In {ce: {}, mse: {loss.name: mse}, else: the loss {}}, a value is mapped to settings, or to a
    text that names what is missing. `else` stands for all other values, and `refuse` makes them an
    error.
    """
    choices = yaml.safe_load(argument.rule)
    if "refuse" in choices and value not in choices:
        raise ValueError(f"{reading.table.flag_of(argument.name)} {value}: {choices['refuse']}")

    choice = choices.get(value, choices.get("else", {}))
    if isinstance(choice, str):
        return cannot(names, choice.format(value))
    return same(names, {key: _filled(setting, value) for key, setting in choice.items()})


def _filled(setting: Any, value: Any) -> Any:
    """Return `setting`, a setting of a rule, with `value` in place of VALUE."""
    if isinstance(setting, list):
        return [_filled(item, value) for item in setting]
    return value if setting == "VALUE" else setting
