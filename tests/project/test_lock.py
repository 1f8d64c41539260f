"""requirements.lock has what pyproject.toml asks for, within its ranges, with hashes."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def locked() -> dict[str, list[tuple[Requirement, list[str]]]]:
    """Pins by name, each with its hashes; a package may have one for each range of Pythons."""
    found: dict[str, list[tuple[Requirement, list[str]]]] = {}
    text = (ROOT / "requirements.lock").read_text()
    for entry in re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", text, flags=re.M)):
        pin, *hashes = re.split(r"\s*\\\n\s*", entry.strip())
        requirement = Requirement(pin)
        found.setdefault(canonicalize_name(requirement.name), []).append((requirement, hashes))
    return found


def wanted() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    return sorted({*project["dependencies"], *itertools.chain.from_iterable(extras)})


@pytest.mark.parametrize("line", wanted())
def test_each_dependency_is_locked_within_its_range(line):
    requirement = Requirement(line)
    pins = locked().get(canonicalize_name(requirement.name), [])
    assert pins, f"{line}: not in requirements.lock; run make lock"
    for pin, _ in pins:
        [version] = pin.specifier
        assert version.operator == "=="
        assert requirement.specifier.contains(version.version), f"{line}: locked at {version}"


def test_each_file_that_may_be_installed_has_a_hash():
    for pins in locked().values():
        for pin, hashes in pins:
            assert hashes, pin
            assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), pin
