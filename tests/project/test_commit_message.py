"""Test the check of commit messages in the same way as the Git hook and the CI workflow call it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = [sys.executable, str(ROOT / ".github" / "commit_message.py")]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("Add a page of settings\n\nUsers could not look one up.\n", ""),
        ("Process each shard once\n# a comment of git\n", ""),
        ("Embed the license", ""),
        ("Bring the record of a killed run", ""),
        ("Add a page" + " of settings" * 6, "is longer than 72 characters"),
        ("add a page", "does not begin with a capital letter"),
        ("Add a page.", "ends with a full stop"),
        ("Add a page; mend a test", "has a semicolon"),
        ("Added a page", "does not begin with an imperative"),
        ("Adds a page", "does not begin with an imperative"),
        ("Adding a page", "does not begin with an imperative"),
        ("Add a page\nof settings", "is not followed by an empty line"),
        ("", "is longer than"),
    ],
)
def test_a_message_is_checked(message, problem, tmp_path):
    (tmp_path / "message").write_text(message)
    done = subprocess.run([*CHECK, tmp_path / "message"], capture_output=True, text=True)
    assert done.returncode == bool(problem), done.stderr
    assert problem in done.stderr


def test_all_commits_of_a_range_are_checked(tmp_path):
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for subject in ("Start", "Add a page\n\nWhy.", "fix it; and that", "Mend a test"):
        git("commit", "-q", "--allow-empty", "-m", subject)
    done = subprocess.run(
        [*CHECK, "--range", "HEAD~3..HEAD"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 2
    assert all("'fix it; and that'" in line for line in done.stderr.splitlines())
    done = subprocess.run([*CHECK, "--range", "HEAD~1..HEAD"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0
