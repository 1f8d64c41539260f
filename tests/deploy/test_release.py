"""Test `make release` in a copy of the repository whose version has been changed.

The copy has no Python environment, so `MAKE=true` omits the style checks and the site. `make lint
docs` tests both anyway.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from processes import REPOSITORY, call, environment, make_shards

from vit.data.decode import native

LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
    capture_output=True,
    text=True,
    cwd=REPOSITORY,
).stdout.split("\0")
pytestmark = [pytest.mark.full, pytest.mark.skipif(len(LISTED) < 2, reason="not a git checkout")]
URLS = '[project.urls]\nRepository = "https://example.org/vitline"'
DATED = "## 0.2.0, 2026-11-26\n\n**Planted.** A line of the changelog.\n\n## 0.1.0, 2026-11-20"


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "gc.auto=0"]
    command = ["git", *settings, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Path:
    """Copy the repository, with version 0.2.0 in pyproject.toml and the changelog."""
    copy = tmp_path_factory.mktemp("release") / "copy"
    for name in filter(None, LISTED):
        if (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, copy / name)
    replace(copy / "pyproject.toml", 'version = "0.1.0"', 'version = "0.2.0"')
    replace(copy / "pyproject.toml", "[project.scripts]", f"{URLS}\n\n[project.scripts]")
    replace(copy / "CHANGELOG.md", "## 0.1.0, not yet released", DATED)
    git(copy, "init", "--quiet")
    git(copy, "add", ".")
    git(copy, "commit", "--quiet", "--message", "Plant a version")
    return copy


def release(copy: Path, version: str = "0.2.0") -> subprocess.CompletedProcess[str]:
    identity = {"GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@example.com"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**environment(), **identity, "PATH": path, "MAKE": "true"}
    return call(["bash", ".github/release.sh", version], env, copy)


def change(copy: Path) -> None:
    (copy / "new.txt").write_text("not committed")


def tag(copy: Path) -> None:
    git(copy, "tag", "v0.2.0")


def forget_the_address(copy: Path) -> None:
    replace(copy / "pyproject.toml", URLS, "")
    git(copy, "commit", "--quiet", "--all", "--message", "Forget the address")


def forget_the_heading(copy: Path) -> None:
    replace(copy / "CHANGELOG.md", "## 0.2.0, 2026-11-26", "## 0.2.0, not yet released")
    git(copy, "commit", "--quiet", "--all", "--message", "Forget the heading")


@pytest.mark.parametrize(
    ("plant", "version", "message"),
    [
        (None, "0.2", "VERSION='0.2': expected three numbers, as in make release VERSION=0.2.0"),
        (None, "0.3.0", 'VERSION=0.3.0, but pyproject.toml has version = "0.2.0": change one'),
        (change, "0.2.0", "the checkout has changes or files outside of commits: commit or remove"),
        (tag, "0.2.0", "the tag v0.2.0 exists: choose another VERSION, or git tag --delete v0.2.0"),
        (forget_the_address, "0.2.0", "pyproject.toml has no [project.urls]: add Repository"),
        (forget_the_heading, "0.2.0", "CHANGELOG.md has no heading '## 0.2.0, "),
    ],
)
def test_a_release_is_refused(planted, tmp_path, plant, version, message):
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "--quiet", str(planted), str(copy))
    if plant:
        plant(copy)
    before = git(copy, "tag")
    done = release(copy, version)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")
    assert git(copy, "tag") == before
    assert not (copy / "build").exists()


def built(copy: Path) -> tuple[Path, str]:
    """Run a release with a prepared site, and return the release's folder and the lines that it
    printed."""
    (copy / "build" / "site").mkdir(parents=True)
    (copy / "build" / "site" / "index.html").write_text("a page")
    done = release(copy)
    assert done.returncode == 0, done.stderr
    assert git(copy, "status", "--porcelain") == ""
    assert git(copy, "rev-parse", "v0.2.0^{commit}") == git(copy, "rev-parse", "HEAD")
    return copy / "build" / "release" / "0.2.0", done.stdout + done.stderr


@pytest.mark.skipif(not native.AVAILABLE, reason="no C compiler")
def test_a_release_has_all_files_with_their_hashes_and_a_tag(planted, tmp_path):
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "--quiet", str(planted), str(copy))
    folder, printed = built(copy)
    names = {path.name for path in folder.iterdir()}
    [wheel] = [name for name in names if name.endswith(".whl")]
    expected = {"vitline-0.2.0.tar.gz", "vitline-site-0.2.0.tar.gz", "notes.md", "SHA256SUMS"}
    assert names == {wheel, *expected}
    assert re.match(r"vitline-0\.2\.0-cp311-abi3-(manylinux|macosx)", wheel)
    sums = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == {name for name in names if name.startswith("vitline-")}
    for name, written in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == written
    notes = (folder / "notes.md").read_text()
    assert notes == DATED.partition("## 0.1.0")[0]
    assert git(copy, "tag", "--list", "--format=%(contents)", "v0.2.0") == notes.strip()
    assert "Nothing was published" in printed
    assert "run make demo, then git tag --delete v0.2.0 and this command again" in printed


@pytest.mark.full
@pytest.mark.skipif(not native.AVAILABLE, reason="no C compiler")
def test_a_release_has_the_weights_of_the_demo_with_card_and_record(planted, tmp_path):
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "--quiet", str(planted), str(copy))
    root = make_shards(tmp_path)
    small = [f"data.root={root}", "train.epochs=null", "train.steps=2", "log.report=false"]
    small += ["data.global_batch_size=12", "schedule.warmup_steps=1", "log.wandb=off"]
    small += ["eval.reference=null"]
    command = [sys.executable, "launch/train.py", "--config", "configs/demo.yaml", *small]
    trained = call(command, environment(), copy)
    assert trained.returncode == 0, trained.stderr
    folder, _ = built(copy)
    with tarfile.open(folder / "vitline-demo-0.2.0.tar.gz") as tar:
        names = {Path(name).name for name in tar.getnames()}
    assert {"model.safetensors", "config.json", "README.md", "metrics.jsonl"} <= names
