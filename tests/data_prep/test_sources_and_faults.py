"""Test every source with every fault. A command must either write the undamaged source's samples or
print one error, and must not leave any other files.

- `FAULTS` damage the files of a source before the command starts.
- `STOPS` end the command at random file operations. The same command must then complete the shards.
- `REFUSED` are commands that write to a folder that already contains the source's shards.

`SENSELESS` lists combinations of a fault and a source that cannot exist. Faults that only one
source can have are in prep_wrong_sources.py.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checksums import digests
from prep_place import Place, forked, whole_shards_only, without_privileges
from prep_sources import (
    SOURCES,
    Files,
    Tiny,
    bare,
    cut,
    few_records,
    in_order,
    is_same,
    put,
    stored,
    tiny,
    without,
    write,
)
from prep_wrong_sources import WRONG


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    few_records(monkeypatch)


# ---- every source, in every form -----------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_has_its_samples(name: str, tmp_path: Path):
    source = tiny(name)
    source.write(tmp_path)
    assert_samples(source.listed(tmp_path), source)


def assert_samples(listed: list[Any], source: Tiny) -> None:
    found, expected = in_order(listed), in_order(source.samples)
    assert [sample[:3] for sample in found] == [sample[:3] for sample in expected]
    assert all(is_same(a.image, b.image) for a, b in zip(found, expected, strict=True))


# ---- files that are damaged before the command starts --------------------------------------------

IGNORED = (".jpg", ".jpeg", ".png", ".JPEG", ".xml")
PAGE = b"<!DOCTYPE html><html>Please log in</html>" * 100


def parts_of(source: Tiny) -> list[str]:
    """Return the paths of files that are neither images nor annotations. If several files in a
    folder have the same suffix, return only the last one."""
    kinds = {
        re.sub(r"[^/]*(?=\.[a-z]+$)", "*", p): p for p in source.files if "." in p or "idx" in p
    }
    return [path for path in kinds.values() if not path.endswith(IGNORED) and source.files[path]]


def one_by_one(change: Callable[[str], Callable[[Files], Files]]) -> Callable[[Tiny], list[Files]]:
    """Return a function that returns several versions of a source's files. Each version applies
    `change` to a different file."""
    return lambda source: [change(part)(source.files) for part in parts_of(source)]


FAULTS: dict[str, Callable[[Tiny], list[Files]]] = {
    "missing": lambda source: [{}],
    "empty": lambda source: [
        {name if name in source.files else f"{name}/": b"" for name in source.at.split()}
    ],
    "one file is missing": one_by_one(without),
    "one file is empty": one_by_one(partial(cut, part=0)),
    "one file is cut off": one_by_one(cut),
    "one file is a web page": one_by_one(lambda name: put({name: PAGE})),
}
SENSELESS = {
    ("one file", r"folder|animals( in English|, .*)?|Animals"): "an image is no source by itself",
    ("one file is missing", "ImageNet, .*"): "--partial accepts missing files",
}


def skip_senseless(fault: str, name: str) -> None:
    for (beginning, names), reason in SENSELESS.items():
        if fault.startswith(beginning) and re.fullmatch(names, name):
            pytest.skip(reason)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SOURCES)
def test_a_damaged_source_is_refused_or_has_the_same_samples(name: str, fault: str, place: Place):
    skip_senseless(fault, name)
    source = tiny(name)
    for number, files in enumerate(FAULTS[fault](source)):
        folder = place.folder / str(number)
        write(files, folder)
        paths = [folder / at for at in source.at.split()]
        place.prepare(source.command, *paths, *source.flags, "--dry-run")
        if place.status:
            place.refused(rf"{re.escape(str(folder))}|this source is not ImageNet-1k:\n  val: ")
        else:
            assert_samples(source.listed(folder), source)


@pytest.mark.parametrize("name", SOURCES)
def test_files_of_another_user_are_refused_or_not_needed(name: str, place: Place):
    """If the source contains neither an archive nor a table, a class folder belongs to the other
    user."""
    source = tiny(name)
    for number, part in enumerate(parts_of(source) or [os.path.dirname(max(source.files))]):
        folder = place.folder / str(number)
        paths = source.write(folder)
        (folder / part).chmod(0)
        line = (*paths, *source.flags, "--dry-run")
        place.prepare(source.command, *line, fork=without_privileges)
        (folder / part).chmod(0o755)
        if place.status:
            place.refused(rf"{re.escape(str(folder))}.*Permission denied")
        else:
            assert_samples(source.listed(folder), source)


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_of_one_source_is_refused(name: str, place: Place):
    WRONG[name].prepare(place)
    place.refused(WRONG[name].message)


# ---- commands that are stopped -------------------------------------------------------------------

WRITTEN = (
    "folder",
    "tgz",
    "animals in a zip",
    "CIFAR-100 beside its archive",
    "MNIST, compressed",
    "parquet",
    "ImageNet, official",
    "ImageNet, parquet",
)
"""Sources that cover each way to read files: in place, inflated, unpacked or copied."""
OPTIONS = ("--num-shards", "3", "--workers", "1")
AGAIN = "; run the same command again to continue"


class Set(NamedTuple):
    """A source's shards, written by a command that was not disturbed."""

    source: Tiny
    root: Path
    main: Callable[[list[str]], int]
    line: list[str]
    """The command's arguments without --out."""


@pytest.fixture(scope="module", params=WRITTEN)
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Set:
    source = tiny(request.param)
    folder = tmp_path_factory.mktemp("undisturbed")
    line = [*map(str, source.write(folder)), *source.flags, *OPTIONS]
    main = importlib.import_module(f"data_prep.{source.command}").main
    with pytest.MonkeyPatch.context() as patch:
        few_records(patch)
        assert main([*line, "--out", str(folder / "out")]) == 0
    return Set(source, folder / "out", main, line)


def test_the_shards_contain_the_samples(undisturbed: Set):
    """Images that cannot be decoded must be listed, and other images may have been converted."""
    source, root, *_ = undisturbed
    info = json.loads((root / "_info.json").read_text())
    found = {
        (split, bare(key), sample.label, sample.data)
        for split in info["splits"]
        for key, sample in stored(root, split).items()
    }
    splits = {sample.split for sample in source.samples} - {""}
    expected = [sample for sample in source.samples if sample.key not in source.unreadable]
    same = [
        sample
        for sample in expected
        for split, key, label, data in found
        if (split if splits else "", key, label) == sample[:3] and is_same(data, sample.image)
    ]
    assert len(found) == len(expected) == len(same) + sum(info["changed"].values())
    listed = (root / "quarantine.jsonl").read_text().splitlines() if source.unreadable else []
    assert {bare(json.loads(entry)["key"]) for entry in listed} == source.unreadable
    whole_shards_only(root, complete=True)


def signal_at(number: int, out: Path, sent: signal.Signals) -> None:
    """Send a signal to this process before its file operation `number` in `out`."""
    seen = itertools.count()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        is_operation = event == "open" or event.startswith("os.")
        if is_operation and str(out) in str(arguments[0]) and next(seen) == number:
            os.kill(os.getpid(), sent)

    sys.addaudithook(watch)


def full_disk(number: int, out: Path) -> None:
    """Simulate a full disk by limiting the size of files. `number` determines the limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (400 + 60 * number, 400 + 60 * number))


STOPS: dict[str, tuple[Callable[[int, Path], None], int, str]] = {
    "killed": (partial(signal_at, sent=signal.SIGKILL), -signal.SIGKILL, ""),
    "Ctrl-C": (partial(signal_at, sent=signal.SIGINT), 130, rf"^interrupted{AGAIN}$"),
    "SIGTERM": (partial(signal_at, sent=signal.SIGTERM), 143, rf"^terminated{AGAIN}$"),
    "a full disk": (full_disk, 2, rf"^error: (.*: )?{os.strerror(errno.EFBIG)}; .*{AGAIN[2:]}$"),
}
"""Maps each name to the function that runs in the command's process, the expected exit status, and
a regular expression for the error output."""


def lose_files(root: Path) -> None:
    """Damage a complete data set as if its disk had failed."""
    shards = sorted(root.glob("*.tar"))
    shards[0].unlink()
    os.truncate(shards[1], 1000)
    shards[2].with_suffix(".json").unlink()
    (root / "train.index.npy").unlink()


@pytest.mark.parametrize("begun", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_stopped_command_continues_with_the_same_bytes(
    undisturbed: Set, begun: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """The test stops either a new command or a command that repairs a damaged data set, in each of
    the ways in `STOPS`."""
    out = tmp_path / undisturbed.root.name
    if begun:
        shutil.copytree(undisturbed.root, out)
        lose_files(out)
    line = [*undisturbed.line, "--out", str(out)]
    before = digests(undisturbed.root)
    moments = random.Random(f"{undisturbed.source.command} {begun}")
    for stop, (disturb, status, message) in STOPS.items():
        number = moments.randrange(24)
        capfd.readouterr()
        ended = forked(partial(disturb, number, out), undisturbed.main, line)
        printed = capfd.readouterr().err
        assert ended == status, (stop, number, printed)
        assert re.search(message, printed, re.MULTILINE), (stop, number, printed)
        assert "Traceback" not in printed
        assert len(re.findall("^(error|interrupted|terminated)", printed, re.MULTILINE)) <= 1
        now = digests(out) if out.exists() else {}
        written = [name for name in now if re.fullmatch(r"[a-z].*\.(tar|idx|npy|jsonl)", name)]
        for name in written:
            is_whole = now[name] == before.get(name) or name.endswith(".rows.npy") or begun
            assert is_whole, (stop, number, name)
        # The next command removes a catalog whose creation was interrupted.
        left = [name for name in now if name.endswith(".tmp") and "_catalog" not in name]
        assert ended < 0 or not left, f"{stop} {number}: partial files were left"
    assert undisturbed.main(line) == 0
    assert digests(out) == before


# ---- commands that write to a folder with the source's shards ------------------------------------


def another_source(folder: Path) -> list[str]:
    """Write a source with two classes, and return the arguments with which `imagefolder` prepares
    it."""
    write({f"other/{name}/1.jpg": b"x" for name in ("ant", "bee")}, folder)
    return [str(folder / "other")]


def remove_info(root: Path) -> None:
    (root / "_info.json").unlink()


REFUSED: dict[str, tuple[tuple[str, ...], Callable[[Path], None], str]] = {
    "another seed": (("--seed", "1"), digests, "seed was 0, now 1. Nothing was changed"),
    "other images": (
        ("--resize-short-side", "8"),
        digests,
        "resize_short_side was null, now 8. Nothing was changed",
    ),
    "unknown shards": ((), remove_info, "contains shards of unknown origin"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_shards_are_not_overwritten(undisturbed: Set, case: str, place: Place):
    flags, change, message = REFUSED[case]
    shutil.copytree(undisturbed.root, place.out)
    change(place.out)
    place.run(undisturbed.source.command, *undisturbed.line, "--out", place.out, *flags)
    place.refused(message)


def test_another_source_is_refused(undisturbed: Set, place: Place):
    shutil.copytree(undisturbed.root, place.out)
    place.prepare("imagefolder", *another_source(place.folder))
    place.refused(
        "contains a data set with a different source or options: .* was .* Nothing was changed"
    )


def test_a_complete_set_stays_as_it_is(undisturbed: Set, place: Place):
    shutil.copytree(undisturbed.root, place.out)
    times = {path: path.stat().st_mtime_ns for path in place.out.iterdir()}
    place.run(undisturbed.source.command, *undisturbed.line, "--out", place.out)
    assert (place.status, place.after) == (0, place.before)
    assert "already complete" in place.stdout
    assert {path: path.stat().st_mtime_ns for path in place.out.iterdir()} == times
