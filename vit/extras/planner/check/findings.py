"""Print the findings of a check as one table: green or red, with the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vit.distributed.host_differences import places

LINES = 3
"""The lines of a list of problems that are printed; the rest is counted."""


class Verdict(StrEnum):
    """The result of a part."""

    OK = "ok"
    NOTE = "note"
    """The part works, but something is slow or missing."""
    FAIL = "FAIL"
    SKIPPED = "-"
    """The part did not run, because a part that it needs failed."""


_STYLES = {
    Verdict.OK: "green",
    Verdict.NOTE: "yellow",
    Verdict.FAIL: "bold red",
    Verdict.SKIPPED: "dim",
}


class Finding(NamedTuple):
    """A row of the table."""

    name: str
    verdict: Verdict
    said: str
    """The lines of the finding, for a failure with the remedy."""


def summary(findings: Sequence[Finding]) -> str:
    """Return the number of findings by verdict, and the names of failed parts."""
    names = {verdict: [f.name for f in findings if f.verdict == verdict] for verdict in Verdict}
    failed = names[Verdict.FAIL]
    parts = [f"{len(names[Verdict.OK])} of {len(findings)} ok"]
    if names[Verdict.NOTE]:
        parts.append(f"{len(names[Verdict.NOTE])} with a note")
    if failed:
        parts.append(f"{len(failed)} FAILED ({', '.join(failed)})")
    if names[Verdict.SKIPPED]:
        parts.append(f"{len(names[Verdict.SKIPPED])} not tried")
    return ", ".join(parts)


def print_table(title: str, findings: Sequence[Finding], console: Console) -> None:
    """Print a row for each finding; without colour if the console is not a terminal."""
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        style = _STYLES[finding.verdict]
        # As `Text`, because rich would read brackets in a finding as markup.
        table.add_row(Text(finding.verdict, style), Text(finding.name), Text(finding.said))
    console.print(table)


def by_message(problems: Mapping[int, str], hosts: Sequence[str]) -> list[str]:
    """Return the distinct problems of ranks as lines, each with the names of its hosts.

    problems: rank -> its problem, of one or more lines. hosts: see `places`.
    """
    ranks_by_message: dict[str, list[int]] = {}
    for rank, message in sorted(problems.items()):
        ranks_by_message.setdefault(message, []).append(rank)
    lines = []
    for message, ranks in ranks_by_message.items():
        prefix = f"{places(ranks, hosts)}: " if hosts else ""
        lines += [prefix + line for line in few(message.splitlines())]
    return lines


def few(lines: Sequence[str]) -> list[str]:
    """Return the first `LINES` of `lines`, and a line with the number of the others."""
    more = len(lines) - LINES
    return [*lines[:LINES], f"and {more} more"] if more > 0 else list(lines)
