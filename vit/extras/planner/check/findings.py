"""Print the findings of all checks as a table, with a remedy for each failure."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from vit.distributed.host_differences import places

LINES = 3
"""The maximum number of problems to print. All other problems are only counted."""


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    NOTE = "note"
    """The check passed, but something is slow or missing."""
    FAIL = "FAIL"
    SKIPPED = "-"
    """The check did not run, because a check that it needs failed."""


_STYLES = {
    Verdict.OK: "green",
    Verdict.NOTE: "yellow",
    Verdict.FAIL: "bold red",
    Verdict.SKIPPED: "dim",
}


class Finding(NamedTuple):
    """A row of the findings table."""

    name: str
    verdict: Verdict
    text: str
    """The text of the finding. The text of a failure includes a remedy."""


def judge_main(results: Mapping[int, Sequence[Sequence[str]]], name: str) -> list[Finding]:
    """Combine rank 0's verdicts and lines into one finding, and use the worst verdict."""
    order = [Verdict.FAIL, Verdict.NOTE, Verdict.OK]
    verdict = min((Verdict(each) for each, _ in results[0]), key=order.index)
    return [Finding(name, verdict, "\n".join(line for _, line in results[0]))]


def summary(findings: Sequence[Finding]) -> str:
    """Return a line with the number of findings per verdict and the names of the failed checks."""
    names = {verdict: [f.name for f in findings if f.verdict == verdict] for verdict in Verdict}
    failed = names[Verdict.FAIL]

    parts = [f"{len(names[Verdict.OK])} of {len(findings)} ok"]
    if names[Verdict.NOTE]:
        parts.append(f"{len(names[Verdict.NOTE])} with a note")
    if failed:
        parts.append(f"{len(failed)} FAILED ({', '.join(failed)})")
    if names[Verdict.SKIPPED]:
        parts.append(f"{len(names[Verdict.SKIPPED])} skipped")
    return ", ".join(parts)


def print_table(title: str, findings: Sequence[Finding], console: Console) -> None:
    """Print a row for each finding. Colors are used only in terminals."""
    table = Table(
        "",
        Column("check", no_wrap=True),
        Column("found", overflow="fold"),
        box=SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
    )
    for finding in findings:
        verdict = Text(finding.verdict, _STYLES[finding.verdict])
        # `Text` prevents rich from parsing brackets in a finding as markup.
        table.add_row(verdict, Text(finding.name), Text(finding.text))
    console.print(table)


def by_message(problems: Mapping[int, str], hosts: Sequence[str]) -> list[str]:
    """Return a line for each distinct problem, with the affected ranks and hosts.

    problems: the problem of each rank, as one or more lines. hosts: see `places`.
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
    """Return the first `LINES` of `lines`, and a line that counts the rest."""
    more = len(lines) - LINES
    return [*lines[:LINES], f"and {more} more"] if more > 0 else list(lines)
