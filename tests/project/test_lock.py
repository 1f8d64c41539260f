"""Test that requirements.txt lists the dependencies in pyproject.toml, that
deploy/requirements.lock pins allowed versions with hashes, and that docs/licenses.md lists the
license of every dependency."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def locked() -> dict[str, list[tuple[Requirement, list[str]]]]:
    """Map each package to its pinned versions and their hashes. A package may have several versions
    for different Python versions."""
    pins: dict[str, list[tuple[Requirement, list[str]]]] = {}
    text = (ROOT / "deploy" / "requirements.lock").read_text()
    for entry in re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", text, flags=re.M)):
        pin, *hashes = re.split(r"\s*\\\n\s*", entry.strip())
        requirement = Requirement(pin)
        pins.setdefault(canonicalize_name(requirement.name), []).append((requirement, hashes))
    return pins


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def wanted() -> list[str]:
    return sorted({*PROJECT["dependencies"], *itertools.chain.from_iterable(EXTRAS.values())})


def test_requirements_are_the_dependencies_of_the_package():
    text = (ROOT / "requirements.txt").read_text()
    lines = [line for line in text.splitlines() if line and line[0] not in "#-"]
    assert sorted(lines) == sorted(PROJECT["dependencies"])


@pytest.mark.parametrize("line", wanted())
def test_each_dependency_is_locked_within_its_range(line):
    requirement = Requirement(line)
    pins = locked().get(canonicalize_name(requirement.name), [])
    assert pins, f"{line}: not in deploy/requirements.lock; run make lock"
    for pin, _ in pins:
        [version] = pin.specifier
        assert version.operator == "=="
        assert requirement.specifier.contains(version.version), f"{line}: locked at {version}"


def test_each_file_that_may_be_installed_has_a_hash():
    for pins in locked().values():
        for pin, hashes in pins:
            assert hashes, pin
            assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), pin


def test_the_page_of_licenses_lists_what_a_linux_computer_installs():
    text = (ROOT / "docs" / "licenses.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z0-9.-]+) \| ([0-9]\S*) \|", text, re.M))
    linux = {"sys_platform": "linux", "python_full_version": "3.12.1", "python_version": "3.12"}
    for name, pins in locked().items():
        requirements = [pin for pin, _ in pins]
        if any(pin.marker is None or pin.marker.evaluate(linux) for pin in requirements):
            assert name in rows, f"{name}: not in docs/licenses.md; run make lock"
        if name in rows:
            assert any(pin.specifier.contains(rows[name], prereleases=True) for pin in requirements)
    assert set(rows) <= set(locked())


def test_the_page_has_the_licenses_of_the_installed_versions():
    """Compare the page's rows with the metadata that Python reads. The script that writes the page
    gets the metadata from pip."""
    text = (ROOT / "docs" / "licenses.md").read_text()
    stated_license = runpy.run_path(str(ROOT / "docs" / "licenses.py"))["stated_license"]
    compared = 0
    for name, version, stated in re.findall(r"^\| ([a-z0-9.-]+) \| (\S+) \| (.+?) \|", text, re.M):
        try:
            metadata = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if metadata["Version"] == version:
            classifiers = metadata.get_all("Classifier", [])
            expression, written = metadata["License-Expression"], metadata["License"]
            assert stated_license(expression or "", classifiers, written or "") == stated, name
            compared += 1
    assert compared > 40
