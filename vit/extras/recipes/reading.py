"""Map the settings of another project to settings of this project, and record each mapping.

`Reading.follow` records one finding per argument: same, differs, no equivalent, or no effect in the
source project. The finding follows from the rule in the project's table, or is recorded by a
function of the project's module. `Reading.finish` raises an error if an argument has no finding, so
no argument is dropped silently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import yaml

from vit.config.hints import all_keys
from vit.extras.recipes.arguments import Argument, ParsedArguments, Table
from vit.extras.recipes.python_config import Leaves, Opaque, flattened

Verdict = Literal["same", "differs", "cannot", "inert", "place"]
Handler = Callable[["Reading"], None]
"""A function that maps one or more arguments of a reading."""


class Finding(NamedTuple):
    """The mapping of one or more arguments of the source project."""

    verdict: Verdict
    theirs: tuple[str, ...]
    """The names of the arguments, or () for a property without an argument, such as the
    precision."""
    settings: dict[str, Any]
    """This project's closest settings, keyed by dotted path."""
    text: str
    """The difference, or the reason why no equivalent exists. "" if neither applies."""


def crop_pct_for(crop: int, resized: int) -> float | None:
    """Return the shortest decimal `eval.crop_pct` with which evaluation resizes an image's shorter
    side to `resized` pixels before it cuts `crop` pixels, or None if there is none."""
    if resized < crop:
        return None
    for digits in range(1, 17):
        scale = 10**digits
        nearest = scale * crop // resized
        # A quotient that is a whole number may be rounded to a little less.
        for number in (nearest, nearest - 1):
            if number > 0 and int(crop / (number / scale)) == resized:
                return number / scale
    return None


class Reading:
    """The findings for a recipe, collected while its arguments are mapped.

    `args` contains the values by name. `stated` contains the names of the arguments in the command.
    """

    def __init__(
        self,
        table: Table,
        parsed: ParsedArguments,
        num_gpus: int | None = None,
        is_distributed: bool = False,
    ):
        self.table = table
        self.args = parsed.values
        self.stated = parsed.stated
        self.num_gpus = num_gpus
        """The total number of GPUs, or None if it is unknown."""
        self.is_distributed = is_distributed
        """Whether a launcher starts the processes."""
        self.findings: list[Finding] = []
        self.comments: dict[str, str] = {}
        """An explanation of how each value was computed, keyed by dotted path. The YAML file
        contains these texts as comments."""
        self._known = frozenset(all_keys())

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of all findings recorded before this call, keyed by dotted path."""
        return {k: v for finding in self.findings for k, v in finding.settings.items()}

    def same(
        self, names: str, settings: Mapping[str, Any] | None = None, note: str = "", text: str = ""
    ) -> None:
        """Record that the arguments `names` (separated by spaces) equal `settings`.

        note: how the first value was computed. text: an assumption made in the computation.
        """
        self._add("same", names, settings, text)
        if note and settings:
            self.comments[next(iter(settings))] = note

    def differs(self, names: str, text: str, settings: Mapping[str, Any] | None = None) -> None:
        """Record that the arguments `names` are similar to `settings`. text: the difference, or ""
        if they are the same."""
        self._add("differs" if text else "same", names, settings, text)

    def cannot(self, names: str, text: str, settings: Mapping[str, Any] | None = None) -> None:
        """Record that the arguments `names` have no equivalent. text: the reason, or "" if
        `settings` is the same. settings: the replacement."""
        self._add("cannot" if text else "same", names, settings, text)

    def inert(self, names: str, text: str) -> None:
        """Record that the arguments `names` have no effect in their project. text: the reason."""
        self._add("inert", names, None, text)

    def same_if_used(
        self, is_used: bool, names: str, settings: Mapping[str, Any], reason: str
    ) -> None:
        """Record that the arguments `names` equal `settings`, or why they are not used."""
        if is_used:
            self.same(names, settings)
        else:
            self.inert(names, reason)

    def follow(self, arguments: Sequence[Argument], handlers: Mapping[str, Handler]) -> None:
        """Map each argument by its handler or its rule, in the order of `arguments`.

        A handler can map several arguments. Arguments that already have a finding are skipped.
        """
        for argument in arguments:
            if argument.name in self.accounted:
                continue
            if argument.name in handlers:
                handlers[argument.name](self)
            else:
                self._apply(argument, arguments)

    def _apply(self, argument: Argument, arguments: Sequence[Argument]) -> None:
        """Map `argument` by its rule (see `vit.extras.recipes.arguments`)."""
        name = argument.name
        names = self.remaining(" ".join(dict.fromkeys((name, *argument.flags))))
        is_required = argument.type == "required"
        value = self.args[name] if is_required else self.args.get(name, argument.default)
        kind, _, text = argument.rule.partition(": ")
        settings = argument.rule.strip("[]?").split(", ")
        if self._known.issuperset(settings):
            is_off = value is None if argument.rule.startswith("?") else not value
            is_optional = argument.rule.startswith(("[", "?"))
            self.same(names, {} if is_optional and is_off else dict.fromkeys(settings, value))
        elif argument.rule.startswith("{"):
            choices = yaml.safe_load(argument.rule)
            if "refuse" in choices and value not in choices:
                raise ValueError(f"{self.table.flag_of(name)} {value}: {choices['refuse']}")
            choice = choices.get(value, choices.get("else", {}))
            if isinstance(choice, str):
                self.cannot(names, choice.format(value))
            else:
                ours = {key: value if each == "VALUE" else each for key, each in choice.items()}
                self.same(names, ours)
        elif kind == "differs":
            self.differs(names, text.format(value) if value else "")
        elif kind == "off":
            self.cannot(name, "" if not value or value == "none" else text)
        elif kind == "inert":
            self.inert(" ".join(a.name for a in arguments if a.rule == argument.rule), text)
        else:
            assert kind in ("", "-"), f"{self.table.program}: no function maps {name}"
            self.same(names)

    @property
    def accounted(self) -> set[str]:
        """Return the names of all arguments that have a finding."""
        return {name for finding in self.findings for name in finding.theirs}

    def remaining(self, paths: str) -> str:
        """Return the arguments at or below the dotted `paths` that have no finding yet, joined by
        spaces."""
        accounted = self.accounted
        names = [
            name
            for path in paths.split()
            for name in self.args
            if (name == path or name.startswith(f"{path}.")) and name not in accounted
        ]
        return " ".join(dict.fromkeys(names))

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at `path`, or `default`."""
        return self.args.get(path, default)

    def items(self, path: str) -> list[str]:
        """Return the paths of all items of a list, such as `path.0`."""
        below = [name.removeprefix(f"{path}.") for name in self.args if name.startswith(f"{path}.")]
        numbers = {int(name.partition(".")[0]) for name in below if name[:1].isdigit()}
        return [f"{path}.{number}" for number in sorted(numbers)]

    def refuse_rest(self, prefix: str = "") -> None:
        """Record the keys of a config that have no finding yet. prefix: the config's name."""
        for argument in self.table.arguments:
            name = argument.name
            if argument.in_recipe and name not in self.accounted:
                self.cannot(name, f"{prefix}{name} = {self.args[name]!r} is not supported")

    def finish(self) -> None:
        """Record the paths and logging options, and check that each argument has exactly one
        finding."""
        places = [a.name for a in self.table.arguments if not a.in_recipe]
        accounted = [name for finding in self.findings for name in finding.theirs]
        stated = [name for name in dict.fromkeys(places) if name in self.stated]
        self._add("place", " ".join(name for name in stated if name not in accounted), None, "")
        recipe = {a.name for a in self.table.arguments if a.in_recipe}
        missing = recipe - set(accounted)
        double = {name for name in accounted if accounted.count(name) > 1}
        assert not missing, f"{self.table.program}: no finding for {sorted(missing)}"
        assert not double, f"{self.table.program}: several findings for {sorted(double)}"
        keys = [key for finding in self.findings for key in finding.settings]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"{self.table.program}: {sorted(twice)} are set twice"

    def _add(
        self, verdict: Verdict, names: str, settings: Mapping[str, Any] | None, text: str
    ) -> None:
        theirs = tuple(names.split())
        if not (theirs or settings or text):
            return
        unknown = set(theirs) - self.args.keys()
        assert not unknown, f"{self.table.program} has no {sorted(unknown)}"
        wrong = set(settings or {}) - self._known
        assert not wrong, f"unknown settings: {sorted(wrong)}"
        ours = {key: _plain(value) for key, value in (settings or {}).items()}
        self.findings.append(Finding(verdict, theirs, ours, text))


def _plain(value: Any) -> Any:
    """Return a value that is readable in a YAML file: 0.3 for 0.1 * 3, and a list for a tuple."""
    if isinstance(value, float):
        return float(f"{value:.12g}")
    return list(value) if isinstance(value, tuple) else value


def reading_of(
    config: Mapping[str, Any],
    program: str,
    source: str,
    places: re.Pattern[str],
    num_gpus: int | None = None,
) -> Reading:
    """Return a reading of a nested config, whose arguments are dotted paths.

    places: matches the paths of values that are not part of a recipe.
    """
    leaves = {k: v for k, v in flattened(config).items() if not isinstance(v, Opaque)}
    arguments = tuple(Argument((k,), "str", None, "", not places.match(k)) for k in leaves)
    parsed = ParsedArguments(Leaves(leaves), frozenset(leaves))
    return Reading(Table(program, source, arguments), parsed, num_gpus)
