"""Check commit messages: a subject in the imperative with one fact, at most 72 characters.

python .github/commit_message.py FILE            # the hook of .pre-commit-config.yaml
python .github/commit_message.py --range A..B    # the workflow: all commits of a push
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

MOST_CHARACTERS = 72
RULES = {
    rf".{{1,{MOST_CHARACTERS}}}": f"is longer than {MOST_CHARACTERS} characters",
    r"[A-Z].*": "does not begin with a capital letter",
    r".*[^.\s]": "ends with a full stop or a space",
    r"[^;]*": "has a semicolon: write one commit for each fact",
    r"(?!\w+([^eb]ed|[^r]ing|[^su]s)\b).*": "does not begin with an imperative, such as `Add`",
}
"""A pattern that the whole subject has to match -> what is wrong if it does not."""


def problems(message: str) -> list[str]:
    """Return what is wrong with a commit message, [] if nothing is."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    wrong = [text for pattern, text in RULES.items() if not re.fullmatch(pattern, subject)]
    if len(lines) > 1 and lines[1]:
        wrong.append("is not followed by an empty line")
    return [f"{subject!r} {text}" for text in wrong]


def main() -> int:
    """Run the command line above; return its exit status."""
    if sys.argv[1] == "--range":
        command = ["git", "log", "--no-merges", "--format=%B%x00", sys.argv[2]]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        messages = [message.strip("\n") for message in printed.split("\0")[:-1]]
    else:
        messages = [Path(sys.argv[1]).read_text(encoding="utf-8")]
    wrong = [problem for message in messages for problem in problems(message)]
    for problem in wrong:
        print(f"commit message: {problem}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
