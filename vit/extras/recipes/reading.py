"""Map the settings of another project to settings of this project, and record each mapping.

Each project's module records one finding per argument: same, differs, no equivalent, or no effect
in the source project. `Reading.finish` raises an error if an argument has no finding, so no
argument is dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from vit.config.hints import all_keys
from vit.extras.recipes.arguments import ParsedArguments, Table

Verdict = Literal["same", "differs", "cannot", "inert", "place"]


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

    def __init__(self, table: Table, parsed: ParsedArguments):
        self.table = table
        self.args = parsed.values
        self.stated = parsed.stated
        self.findings: list[Finding] = []
        self.comments: dict[str, str] = {}
        """An explanation of how each value was computed, keyed by dotted path. The YAML file
        contains these texts as comments."""
        self._known = frozenset(all_keys())

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of all findings recorded before this call, keyed by dotted path."""
        return {k: v for finding in self.findings for k, v in finding.settings.items()}

    def has_setting(self, key: str) -> bool:
        """Return whether this project has the setting `key`."""
        return key in self._known

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
        """Record that the arguments `names` are similar to `settings`. text: the difference."""
        self._add("differs", names, settings, text)

    def cannot(self, names: str, text: str, settings: Mapping[str, Any] | None = None) -> None:
        """Record that the arguments `names` have no equivalent. settings: the replacement."""
        self._add("cannot", names, settings, text)

    def inert(self, names: str, text: str) -> None:
        """Record that the arguments `names` have no effect in their project. text: the reason."""
        self._add("inert", names, None, text)

    def rename(self, name: str, theirs: str) -> None:
        """Replace the argument `name` by `theirs`, its name in the source project."""
        del self.args[name]
        self.findings = [
            f._replace(theirs=tuple(theirs if n == name else n for n in f.theirs))
            for f in self.findings
        ]

    def expect_off(self, parts: Mapping[str, str]) -> None:
        """Record arguments that this project can reproduce only if they are off.

        parts: maps argument names to descriptions.
        """
        for name, description in parts.items():
            value = self.args[name]
            if value in (None, False, "", "none", {}, []) or value == 0:
                self.same(name)
            else:
                self.cannot(name, description)

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
        # Rounding keeps values such as 0.1 * 3 readable in the YAML file.
        rounded = {
            key: float(f"{value:.12g}") if isinstance(value, float) else value
            for key, value in (settings or {}).items()
        }
        self.findings.append(Finding(verdict, theirs, rounded, text))


class ConfigReading(Reading):
    """A reading of a nested config, whose arguments are dotted paths."""

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at `path`, or `default`."""
        return self.args.get(path, default)

    def remaining(self, paths: str) -> str:
        """Return the keys at or below `paths` that have no finding yet, joined by spaces."""
        accounted = {name for finding in self.findings for name in finding.theirs}
        return " ".join(
            name
            for path in paths.split()
            for name in self.args
            if (name == path or name.startswith(f"{path}.")) and name not in accounted
        )

    def items(self, path: str) -> list[str]:
        """Return the paths of all items of a list, such as `path.0`."""
        below = [name.removeprefix(f"{path}.") for name in self.args if name.startswith(f"{path}.")]
        numbers = {int(name.partition(".")[0]) for name in below if name[:1].isdigit()}
        return [f"{path}.{number}" for number in sorted(numbers)]
