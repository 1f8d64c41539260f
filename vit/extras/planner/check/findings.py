"""What a check has found, as one table for people: green or red, with the remedy."""

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
"""Of a list of problems; the rest is counted."""


class Verdict(StrEnum):
    """How a part has ended."""

    OK = "ok"
    NOTE = "note"
    """It works, and costs something."""
    FAIL = "FAIL"
    SKIPPED = "-"
    """Not tried, because of another one."""


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
    """What was found, and for a failure what to do; lines."""


def summary(findings: Sequence[Finding]) -> str:
    """Return the counts, and which have failed."""
    of = {kind: [each.name for each in findings if each.verdict == kind] for kind in Verdict}
    parts = [f"{len(of[Verdict.OK])} of {len(findings)} ok"]
    parts += [f"{len(of[Verdict.NOTE])} with a note"] * bool(of[Verdict.NOTE])
    failed = of[Verdict.FAIL]
    parts += [f"{len(failed)} FAILED ({', '.join(failed)})"] * bool(failed)
    parts += [f"{len(of[Verdict.SKIPPED])} not tried"] * bool(of[Verdict.SKIPPED])
    return ", ".join(parts)


def print_table(title: str, findings: Sequence[Finding], console: Console) -> None:
    """Print a row for each finding; without colour where nobody looks."""
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        style = _STYLES[finding.verdict]
        # As text: brackets in what is told are no markup.
        table.add_row(Text(finding.verdict, style), Text(finding.name), Text(finding.said))
    console.print(table)


def by_message(told: Mapping[int, str], hosts: Sequence[str]) -> list[str]:
    """Return lines of the problems of ranks, each once, behind the hosts that have it.

    told: rank -> its problem, of one line or more. hosts: as of `places`.
    """
    ranks: dict[str, list[int]] = {}
    for rank, message in sorted(told.items()):
        ranks.setdefault(message, []).append(rank)
    lines = []
    for message, own in ranks.items():
        where = f"{places(own, hosts)}: " if hosts else ""
        lines += [where + line for line in few(message.splitlines())]
    return lines


def few(lines: Sequence[str]) -> list[str]:
    """Return the first `LINES` of `lines`, and how many more there are."""
    more = len(lines) - LINES
    return [*lines[:LINES], f"and {more} more"] if more > 0 else list(lines)
