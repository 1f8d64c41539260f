"""Map the settings of another project to settings of this project, and record each mapping.

Each argument gets exactly one finding: same, differs, no equivalent, or no effect in the source
project. Each project's module records the arguments that need a computation or are an exception
(`Case`). All other arguments follow the rule of their line in the project's table. `Reading.finish`
raises an error if an argument has neither a finding nor a rule, so no argument is dropped silently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import yaml

from vit.config.hints import all_keys
from vit.extras.recipes.arguments import Argument, ParsedArguments, Table
from vit.extras.recipes.python_config import Leaves, Opaque, flattened

Verdict = Literal["same", "differs", "cannot", "inert", "place"]
_RULES: dict[str, Verdict] = {"=": "same", "=?": "same", "off:": "cannot", "inert:": "inert"}
"""The verdict for the first word of a rule (`vit.extras.recipes.arguments`)."""


class Finding(NamedTuple):
    """The mapping of one or more arguments of the source project."""

    verdict: Verdict
    theirs: tuple[str, ...]
    """The names of the arguments, or () for a property without an argument, such as the
    precision."""
    settings: dict[str, Any]
    """The closest settings of this project, by dotted key."""
    text: str
    """The difference, or the reason why no equivalent exists. "" if neither applies."""


class Case(NamedTuple):
    """An exception to the rules of a table."""

    verdict: Verdict
    names: str
    """The arguments, separated by spaces."""
    when: Callable[[dict[str, Any]], Any]
    """A function that returns whether the exception applies to the given arguments."""
    text: str = ""
    """The text of the finding. A name in braces is replaced by the argument's value."""
    settings: Mapping[str, Any] | Callable[[dict[str, Any]], dict[str, Any]] = MappingProxyType({})
    """The settings, or a function that computes them from the arguments."""


class Reading:
    """The findings for a recipe, collected while its arguments are mapped.

    `args` contains the values by name. `stated` contains the names of the arguments in the command.
    """

    def __init__(self, table: Table, parsed: ParsedArguments):
        self.table = table
        self.args = parsed.values
        self.stated = parsed.stated
        self.findings: list[Finding] = []
        self.comments: dict[str, str] = {}
        """The computation of each value by dotted key, written to the YAML file as a comment."""
        self._known = frozenset(all_keys())

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the findings and of the rules that still apply, by dotted key."""
        findings = [*self._usual_findings(), *self.findings]
        return {key: value for finding in findings for key, value in finding.settings.items()}

    def same(
        self, names: str, settings: Mapping[str, Any] | None = None, note: str = "", text: str = ""
    ) -> None:
        """Record that the arguments `names` (separated by spaces) equal `settings`.

        note: the computation of the first value. text: an assumption behind the computation.
        """
        self._add("same", names, settings, text)
        if note and settings:
            self.comments[next(iter(settings))] = note

    def differs(self, names: str, text: str, settings: Mapping[str, Any] | None = None) -> None:
        """Record that the arguments `names` are similar to `settings`. text: the difference."""
        self._add("differs", names, settings, text)

    def cannot(self, names: str, text: str, settings: Mapping[str, Any] | None = None) -> None:
        """Record that the arguments `names` have no equivalent. settings: the replacement."""
        self._add("cannot", names, settings, text)

    def inert(self, names: str, text: str) -> None:
        """Record that the arguments `names` have no effect in their project. text: the reason."""
        self._add("inert", names, None, text)

    def apply(self, cases: Sequence[Case]) -> None:
        """Record each exception in `cases` that applies to arguments without a finding."""
        for case in cases:
            names = self.unrecorded(case.names)
            if case.when(self.args) and (names or not case.names):
                settings = case.settings(self.args) if callable(case.settings) else case.settings
                self._add(case.verdict, " ".join(names), settings, case.text.format(**self.args))

    def unrecorded(self, names: str) -> list[str]:
        """Return the arguments in `names` that have no finding yet."""
        accounted = self._accounted()
        return [name for name in names.split() if name not in accounted]

    def finish(self) -> None:
        """Apply the rules of the table, and assert that each argument has one finding."""
        self.findings += self._usual_findings()
        accounted = [name for finding in self.findings for name in finding.theirs]
        places = [a.name for a in self.table.arguments if not a.in_recipe]
        stated = self.stated - set(accounted)
        self._add("place", " ".join(n for n in dict.fromkeys(places) if n in stated), None, "")
        recipe = {a.name for a in self.table.arguments if a.in_recipe}
        missing = recipe - set(accounted)
        double = {name for name in accounted if accounted.count(name) > 1}
        assert not missing, f"{self.table.program}: no finding for {sorted(missing)}"
        assert not double, f"{self.table.program}: several findings for {sorted(double)}"
        keys = [key for finding in self.findings for key in finding.settings]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"{self.table.program}: {sorted(twice)} are set twice"

    def _accounted(self) -> set[str]:
        return {name for finding in self.findings for name in finding.theirs}

    def _usual_findings(self) -> list[Finding]:
        """Return findings from the table's rules for arguments that have no finding."""
        accounted = self._accounted()
        usual = []
        for argument in self.table.arguments:
            rule, _, rest = argument.rule.partition(" ")
            if rule not in _RULES or argument.name in accounted:
                continue
            value = self.args[argument.name]
            if rule in ("=?", "off:") and (not value or value == "none"):
                rule, rest = "=", ""
            verdict = _RULES[rule]
            keys, text = (rest.split(), "") if verdict == "same" else ((), rest)
            usual.append(Finding(verdict, (argument.name,), dict.fromkeys(keys, value), text))
        return usual

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
        # Rounding keeps values such as 0.1 * 3 readable in the YAML file.
        rounded = {
            key: float(f"{value:.12g}") if isinstance(value, float) else value
            for key, value in (settings or {}).items()
        }
        self.findings.append(Finding(verdict, theirs, rounded, text))


class ConfigReading(Reading):
    """A reading of a nested config, whose arguments are dotted paths.

    program, source: as in `Table`. config: the nested values. places: a pattern for keys about
    paths, logging and speed. Recording a path also records all paths below it. Paths that are
    missing from the config are skipped.
    """

    def __init__(self, program: str, source: str, config: Any, places: re.Pattern[str]):
        leaves = {k: v for k, v in flattened(config).items() if not isinstance(v, Opaque)}
        arguments = tuple(Argument((k,), "str", None, "", not places.match(k)) for k in leaves)
        parsed = ParsedArguments(Leaves(leaves), frozenset(leaves))
        super().__init__(Table(program, source, arguments), parsed)

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at `path`, or `default`."""
        return self.args.get(path, default)

    def copy(self, rows: str) -> None:
        """Record values that equal settings of this project.

        rows: lines with a path, comma-separated settings, and the default for a missing path.
        `required`: the config must contain the path. `unset`: if the value is missing or off, the
        settings keep their defaults.
        """
        for row in rows.strip().splitlines():
            path, keys, default = row.split()
            value = self.args[path] if default == "required" else self.get(path)
            if value is None and default != "unset":
                value = yaml.safe_load(default)
            is_set = value or default != "unset"
            self.same(path, dict.fromkeys(keys.split(","), value) if is_set else {})

    def items(self, path: str) -> list[str]:
        """Return the paths of all items of a list, such as `path.0`."""
        below = [name.removeprefix(f"{path}.") for name in self.args if name.startswith(f"{path}.")]
        numbers = {int(name.partition(".")[0]) for name in below if name[:1].isdigit()}
        return [f"{path}.{number}" for number in sorted(numbers)]

    def finish(self) -> None:
        """Record all other values as unsupported."""
        accounted = self._accounted()
        for name in [a.name for a in self.table.arguments if a.in_recipe]:
            if name not in accounted:
                self.cannot(name, f"{name} = {self.args[name]!r} is not supported")
        super().finish()

    def unrecorded(self, paths: str) -> list[str]:
        """Return the keys at or below `paths` that have no finding yet."""
        below = [
            name
            for path in paths.split()
            for name in self.args
            if name == path or name.startswith(f"{path}.")
        ]
        return super().unrecorded(" ".join(below))

    def _add(
        self, verdict: Verdict, names: str, settings: Mapping[str, Any] | None, text: str
    ) -> None:
        super()._add(verdict, " ".join(self.unrecorded(names)), settings, text)
