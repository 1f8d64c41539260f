"""Test the table of findings that the check prints."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from vit.extras.planner.check.findings import Finding, Verdict, by_message, print_table, summary

FINDINGS = [
    Finding("software", Verdict.OK, "the same on all 2 ranks: torch 2.15.0, Python 3.11.7"),
    Finding("shards", Verdict.FAIL, f"train[:50%] of /data/{'x' * 90}.tar: 3 bytes, expected 4"),
    Finding("pairs", Verdict.NOTE, "slow"),
    Finding("step", Verdict.SKIPPED, "skipped: needs data"),
]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_table_fits_and_is_colored_only_on_a_terminal(width, is_terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = io.StringIO()
    print_table(
        "check of runs/x", FINDINGS, Console(file=out, width=width, force_terminal=is_terminal)
    )
    text = out.getvalue()
    assert ("\x1b[" in text) == is_terminal
    if not is_terminal:
        assert max(map(len, text.splitlines())) <= width
        assert "train[:50%] of" in text, "brackets must not be read as markup"
        together = "".join(line[12:].strip() for line in text.splitlines())
        assert f"/data/{'x' * 90}.tar" in together, "a path must not be shortened"


def test_the_summary_names_the_failed_parts():
    assert summary(FINDINGS) == "1 of 4 ok, 1 with a note, 1 FAILED (shards), 1 skipped"


def test_equal_problems_are_merged_and_long_lists_are_counted():
    many = "\n".join(f"train-{number}.tar: truncated" for number in range(5))
    lines = by_message({0: "no such disk", 1: "no such disk", 2: many}, ("a", "a", "b"))
    assert lines == [
        "a (ranks 0-1): no such disk",
        *(f"b (rank 2): train-{number}.tar: truncated" for number in range(3)),
        "b (rank 2): and 2 more",
    ]
    assert by_message({0: "no such disk"}, ()) == ["no such disk"]
