"""Write docs/licenses.md: the license of every package of deploy/requirements.lock.

    python docs/licenses.py

`make lock` runs this script. pip reads the metadata of the locked versions, and downloads a package
only if PyPI does not serve its metadata separately. Packages that are never installed on Linux are
omitted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "deploy" / "requirements.lock"
PAGE = ROOT / "docs" / "licenses.md"
HEAD = """# Licenses of the dependencies

Here you can look up under which license each dependency is.
vitline has the [MIT license](../LICENSE), and its wheels contain none of these packages.
The table lists all packages of `deploy/requirements.lock` for Linux.
These include the optional groups of `pyproject.toml`.
The licenses are quoted from the metadata of the packages.
`cuda-toolkit` and `nvidia-...` are not open source.
They belong to PyPI's torch for Linux, and torch for CPUs does not need them.

| package | version | license | page |
|---|---|---|---|
"""
PAGES = ("source", "repository", "source code", "homepage", "github", "documentation")
"""Names of a package's page, the preferred ones first."""


def stated_license(expression: str, classifiers: Sequence[str], text: str) -> str:
    """Return the license from the metadata fields License-Expression, Classifier and License."""
    named = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License :: ")]
    lines = text.strip().splitlines() or ["not stated"]
    return expression or " / ".join(sorted(set(named) - {"OSI Approved"})) or lines[0][:60].strip()


def row(metadata: dict[str, Any]) -> str:
    """Return a row of the table, from the metadata of a package as pip reports them."""
    urls = dict(line.split(", ", 1) for line in reversed(metadata.get("project_url", [])))
    named = {name.lower(): url for name, url in urls.items()}
    page = next((named[name] for name in PAGES if name in named), metadata.get("home_page", ""))
    stated = stated_license(
        metadata.get("license_expression", ""),
        metadata.get("classifier", []),
        metadata.get("license", ""),
    )
    name = re.sub(r"[-_.]+", "-", metadata["name"]).lower()
    return f"| {name} | {metadata['version']} | {stated} | {f'<{page}>' if page else ''} |"


def main() -> None:
    """Get the metadata of the locked packages from pip, and write the page."""
    pins = re.findall(r"^([\w.\[\]-]+==[^\\\n]+)", LOCK.read_text(encoding="utf-8"), re.M)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
    command += ["--ignore-installed", "--report", "-", "--requirement", "/dev/stdin"]
    printed = subprocess.run(
        command, input="\n".join(pins), stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    rows = sorted(row(package["metadata"]) for package in json.loads(printed)["install"])
    PAGE.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
