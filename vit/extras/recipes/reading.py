"""What each setting of another program means here, and the settings that follow.

A program's module asks for its values and says of every argument, exactly once, that it is the
same here (with our settings), differs (and how), cannot be said, or has no effect there.
`Reading.finish` makes sure that none was forgotten: nothing is silently dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from vit.config.hints import all_keys
from vit.extras.recipes.arguments import Given, Table

Verdict = Literal["same", "differs", "cannot", "inert", "place"]


class Finding(NamedTuple):
    """What one or several arguments of theirs mean here."""

    verdict: Verdict
    theirs: tuple[str, ...]
    """Names of their arguments; () for what no argument says, such as a number format."""
    settings: dict[str, Any]
    """Our settings (dotted key -> value) that say it, as near as can be."""
    text: str
    """Why it differs, or cannot be said; "" where there is nothing to add."""


class Reading:
    """The account of one recipe, while it is read.

    `args` has their values by name, `stated` the names that the command states.
    """

    def __init__(self, table: Table, given: Given):
        self.table = table
        self.args = given.values
        self.stated = given.stated
        self.findings: list[Finding] = []
        self.comments: dict[str, str] = {}
        """Dotted key -> how its value follows from theirs, for the end of its line."""
        self._known = frozenset(all_keys())

    @property
    def settings(self) -> dict[str, Any]:
        """Our settings so far: dotted key -> value."""
        return {k: v for finding in self.findings for k, v in finding.settings.items()}

    def can_say(self, key: str) -> bool:
        """Whether there is such a setting."""
        return key in self._known

    def same(
        self, names: str, settings: Mapping[str, Any] | None = None, note: str = "", text: str = ""
    ) -> None:
        """`names` (blank-separated) mean `settings`; note: how the first value follows from
        theirs; text: what that takes for granted."""
        self._add("same", names, settings, text)
        if note and settings:
            self.comments[next(iter(settings))] = note

    def differs(self, names: str, text: str, settings: Mapping[str, Any] | None = None) -> None:
        """`names` mean nearly `settings`; text: what is there and what is here."""
        self._add("differs", names, settings, text)

    def cannot(self, names: str, text: str, settings: Mapping[str, Any] | None = None) -> None:
        """`names` say what cannot be said here; settings: what stands in its place."""
        self._add("cannot", names, settings, text)

    def inert(self, names: str, text: str) -> None:
        """`names` have no effect there, because of others."""
        self._add("inert", names, None, text)

    def rename(self, name: str, theirs: str) -> None:
        """Let what was said of `name` be said of `theirs`, this program's name for it."""
        del self.args[name]
        self.findings = [
            f._replace(theirs=tuple(theirs if n == name else n for n in f.theirs))
            for f in self.findings
        ]

    def expect_off(self, parts: Mapping[str, str]) -> None:
        """Each argument of `parts` is the same here if it is off, else it cannot be said.

        parts: name -> what it is, in words.
        """
        for name, what in parts.items():
            value = self.args[name]
            if value in (None, False, "", "none", {}, []) or value == 0:
                self.same(name)
            else:
                self.cannot(name, what)

    def finish(self) -> None:
        """Account for places, and make sure that each argument has one finding."""
        places = [a.name for a in self.table.arguments if not a.in_recipe]
        accounted = [name for finding in self.findings for name in finding.theirs]
        stated = [name for name in dict.fromkeys(places) if name in self.stated]
        self._add("place", " ".join(name for name in stated if name not in accounted), None, "")
        recipe = {a.name for a in self.table.arguments if a.in_recipe}
        missing = recipe - set(accounted)
        double = {name for name in accounted if accounted.count(name) > 1}
        assert not missing, f"{self.table.program}: no word about {sorted(missing)}"
        assert not double, f"{self.table.program}: two words about {sorted(double)}"
        keys = [key for finding in self.findings for key in finding.settings]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"{self.table.program}: {sorted(twice)} set twice"

    def _add(
        self, verdict: Verdict, names: str, settings: Mapping[str, Any] | None, text: str
    ) -> None:
        theirs = tuple(names.split())
        if not (theirs or settings or text):
            return
        unknown = set(theirs) - self.args.keys()
        assert not unknown, f"{self.table.program} has no {sorted(unknown)}"
        wrong = set(settings or {}) - self._known
        assert not wrong, f"there is no setting {sorted(wrong)}"
        # Products of their arguments, without the noise of the last digits.
        rounded = {
            key: float(f"{value:.12g}") if isinstance(value, float) else value
            for key, value in (settings or {}).items()
        }
        self.findings.append(Finding(verdict, theirs, rounded, text))


class ConfigReading(Reading):
    """A reading of a tree of settings by their paths."""

    def get(self, path: str, default: Any = None) -> Any:
        """The value at `path`."""
        return self.args.get(path, default)

    def there(self, paths: str) -> str:
        """The leaves at or below `paths` that the config has and nothing was said of."""
        told = {name for finding in self.findings for name in finding.theirs}
        return " ".join(
            name
            for path in paths.split()
            for name in self.args
            if (name == path or name.startswith(f"{path}.")) and name not in told
        )

    def items(self, path: str) -> list[str]:
        """The paths of the items of a list, `path.0` and so on."""
        below = [name.removeprefix(f"{path}.") for name in self.args if name.startswith(f"{path}.")]
        numbers = {int(name.partition(".")[0]) for name in below if name[:1].isdigit()}
        return [f"{path}.{number}" for number in sorted(numbers)]
