"""Map the settings of another program to ours, and account for each of them.

A program's module looks up the values and records exactly one finding for each argument: it is the
same in our settings, differs, has no equivalent, or has no effect in the source program.
`Reading.finish` raises if an argument has no finding, so that nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from vit.config.hints import all_keys
from vit.extras.recipes.arguments import ParsedArguments, Table

Verdict = Literal["same", "differs", "cannot", "inert", "place"]


class Finding(NamedTuple):
    """The mapping of one or several arguments of the source program."""

    verdict: Verdict
    theirs: tuple[str, ...]
    """Names of the arguments; () for a property without an argument, such as a number format."""
    settings: dict[str, Any]
    """Our nearest settings: dotted key -> value."""
    text: str
    """The difference, or the reason for no equivalent; "" if there is nothing to explain."""


class Reading:
    """The findings for one recipe, collected while its arguments are mapped.

    `args` holds the program's values by name, `stated` the names that the command states.
    """

    def __init__(self, table: Table, parsed: ParsedArguments):
        self.table = table
        self.args = parsed.values
        self.stated = parsed.stated
        self.findings: list[Finding] = []
        self.comments: dict[str, str] = {}
        """Dotted key -> the computation of its value, as a comment at the end of its line."""
        self._known = frozenset(all_keys())

    @property
    def settings(self) -> dict[str, Any]:
        """Return our settings so far: dotted key -> value."""
        return {k: v for finding in self.findings for k, v in finding.settings.items()}

    def has_setting(self, key: str) -> bool:
        """Return whether this project has the setting `key`."""
        return key in self._known

    def same(
        self, names: str, settings: Mapping[str, Any] | None = None, note: str = "", text: str = ""
    ) -> None:
        """Record that `names` (blank-separated) equal `settings`.

        note: the computation of the first value. text: an assumption behind it.
        """
        self._add("same", names, settings, text)
        if note and settings:
            self.comments[next(iter(settings))] = note

    def differs(self, names: str, text: str, settings: Mapping[str, Any] | None = None) -> None:
        """Record that `names` almost equal `settings`; text: the difference."""
        self._add("differs", names, settings, text)

    def cannot(self, names: str, text: str, settings: Mapping[str, Any] | None = None) -> None:
        """Record that `names` have no equivalent; settings: the values used instead."""
        self._add("cannot", names, settings, text)

    def inert(self, names: str, text: str) -> None:
        """Record that `names` have no effect in the source program; text: the reason."""
        self._add("inert", names, None, text)

    def rename(self, name: str, theirs: str) -> None:
        """Rename the argument `name` to `theirs`, the program's own name, in all findings."""
        del self.args[name]
        self.findings = [
            f._replace(theirs=tuple(theirs if n == name else n for n in f.theirs))
            for f in self.findings
        ]

    def expect_off(self, parts: Mapping[str, str]) -> None:
        """Record the arguments of `parts`: same if off, otherwise without equivalent.

        parts: name -> description.
        """
        for name, description in parts.items():
            value = self.args[name]
            if value in (None, False, "", "none", {}, []) or value == 0:
                self.same(name)
            else:
                self.cannot(name, description)

    def finish(self) -> None:
        """Record paths and displays, and assert that each argument has exactly one finding."""
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
        # Products such as 0.1 * 3 would put rounding noise into the YAML file.
        rounded = {
            key: float(f"{value:.12g}") if isinstance(value, float) else value
            for key, value in (settings or {}).items()
        }
        self.findings.append(Finding(verdict, theirs, rounded, text))


class ConfigReading(Reading):
    """A reading of a config tree, whose arguments are dotted paths."""

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at `path`, or `default`."""
        return self.args.get(path, default)

    def remaining(self, paths: str) -> str:
        """Return the leaves at or below `paths` without a finding so far, blank-separated."""
        accounted = {name for finding in self.findings for name in finding.theirs}
        return " ".join(
            name
            for path in paths.split()
            for name in self.args
            if (name == path or name.startswith(f"{path}.")) and name not in accounted
        )

    def items(self, path: str) -> list[str]:
        """Return the paths of the items of a list: `path.0` and so on."""
        below = [name.removeprefix(f"{path}.") for name in self.args if name.startswith(f"{path}.")]
        numbers = {int(name.partition(".")[0]) for name in below if name[:1].isdigit()}
        return [f"{path}.{number}" for number in sorted(numbers)]
