"""Test that verification detects manual changes even if all hashes were updated."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from verifying import edit, edit_json, edit_rows, members_of, problems_in, verify

from data_prep import index
from data_prep.check.data_set import opened_data_set
from data_prep.check.set_checks import check_folder, check_quarantine
from data_prep.check.shard_checks import _check_idx, _check_index
from data_prep.errors import PrepError
from data_prep.verify import shard_of
from vit.data.shards.info_file import sidecars_sha256
from vit.data.shards.tar import scan_tar
from vit.data.storage.opening import open_split
from vit.system.files import ShardError

# ---- manual changes with updated hashes ----------------------------------------------------------


def swap_classes(info: dict) -> None:
    info["class_names"][:2] = reversed(info["class_names"][:2])


def swap_classes_only(root: Path) -> None:
    info = json.loads((root / "_info.json").read_text())
    swap_classes(info)
    (root / "_info.json").write_text(json.dumps(info))


def reseal(root: Path) -> None:
    """Update all file hashes, like someone who deliberately alters a dataset."""

    def seal(info: dict) -> None:
        for described in info["splits"].values():
            sidecars = []
            for number, name in enumerate(described["filenames"]):
                sha256 = hashlib.sha256((root / name).read_bytes()).hexdigest()
                edit_json(
                    (root / name).with_suffix(".json"),
                    lambda sidecar, sha256=sha256: sidecar.update(sha256=sha256),
                )
                described["shard_sha256"][number] = sha256
                sidecars.append(json.loads((root / name).with_suffix(".json").read_text()))
            described["sidecars_sha256"] = sidecars_sha256(sidecars)

    edit_json(root / "_info.json", seal)


def change_a_label(root: Path) -> None:
    """Change a label in the tar, in the index and in all hashes."""
    tar = root / "val-00000.tar"
    member = next(member for member in members_of(tar) if member.name.endswith(".cls"))
    label = (int(tar.read_bytes()[member.offset_data : member.offset_data + 1]) + 1) % 3
    edit(tar, lambda data: data.__setitem__(member.offset_data, ord("0") + label))
    edit_rows(root / "val.index.npy", lambda rows: rows["label"].__setitem__(0, label))
    reseal(root)


def forget_hashes(root: Path) -> None:
    for path in root.glob("*-*.json"):
        edit_json(path, lambda sidecar: sidecar.update(sha256=None))

    def forget(info: dict) -> None:
        for described in info["splits"].values():
            del described["shard_sha256"], described["sidecars_sha256"]

    edit_json(root / "_info.json", forget)


def hide(root: Path, name: str) -> None:
    (root / name).parent.mkdir(exist_ok=True)
    shutil.copy(root / "val-00000.tar", root / name)


def edit_plan(root: Path) -> None:
    edit_json(root / "train-00001.json", lambda sidecar: sidecar.update(plan="0" * 64))
    reseal(root)


BY_HAND: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    "class names swapped": (swap_classes_only, "_info.json: altered: the content", True),
    "class names swapped, info's hash brought up to date": (
        lambda root: edit_json(root / "_info.json", swap_classes),
        "_info.json: class names, keys or labels have changed since the data set was written",
        False,
    ),
    "a class name misspelt": (
        lambda root: edit_json(
            root / "_info.json", lambda info: info["class_names"].__setitem__(0, "aple")
        ),
        "_info.json: class names, keys or labels have changed since the data set was written",
        False,
    ),
    "a label changed": (
        change_a_label,
        "_info.json: class names, keys or labels have changed since the data set was written",
        False,
    ),
    "catalog": (
        lambda root: edit_json(root / "_info.json", lambda info: info.update(catalog="0" * 64)),
        (
            "train: 7 shards, the first is train-00000.tar: source, options or catalog in"
            " _info.json differ from the recorded plan"
        ),
        True,
    ),
    "options": (
        lambda root: edit_json(
            root / "_info.json", lambda info: info["options"].update(jpeg_quality=1)
        ),
        (
            "val: 1 shard, the first is val-00000.tar: source, options or catalog in _info.json"
            " differ from the recorded plan"
        ),
        True,
    ),
    "listed": (
        lambda root: edit_json(root / "_info.json", lambda info: info["listed"].update(val=9)),
        "_info.json: lists 9 images for val, but shards and quarantine have 3",
        True,
    ),
    "a sidecar's plan": (
        edit_plan,
        "train: 1 shard, the first is train-00001.tar: source, options or catalog",
        True,
    ),
    "a sidecar": (
        lambda root: edit_json(
            root / "train-00001.json", lambda sidecar: sidecar.update(exif_oriented=3)
        ),
        "train: sidecars are altered",
        True,
    ),
    "sha256 missing": (
        forget_hashes,
        "val: 1 shard, the first is val-00000.tar: no sha256 is recorded",
        True,
    ),
    "bytes behind the index": (
        lambda root: edit(root / "val.index.npy", lambda data: data.extend(b"12345")),
        "val.index.npy: 5 bytes after its last row",
        True,
    ),
    "a hidden tar": (lambda root: hide(root, ".more.tar"), ".more.tar: not in _info.json", True),
    "a nested tar": (
        lambda root: hide(root, "more/val-00001.tar"),
        "more/val-00001.tar: not in _info.json",
        True,
    ),
    "the card": (
        lambda root: edit(root / "dataset.md", lambda data: data.__setitem__(5, data[5] ^ 1)),
        "dataset.md: card missing or altered",
        True,
    ),
    "no card": (
        lambda root: (root / "dataset.md").unlink(),
        "dataset.md: card missing or altered",
        True,
    ),
    "no contact sheet": (
        lambda root: (root / "contact_sheet.png").unlink(),
        "dataset.md: card missing or altered",
        True,
    ),
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_manual_changes_are_detected(kind, root, capsys):
    alter, text, even_quickly = BY_HAND[kind]
    alter(root)
    # A full check must find everything that a quick check finds.
    assert verify(root, *(["--quick"] if even_quickly else [])) == 1
    assert f"    {text}" in capsys.readouterr().out


def test_the_printed_checks_are_made(root, capsys):
    assert verify(root) == 0
    assert "every byte of 8 of 8 shards against its sha256\n" in (output := capsys.readouterr().out)
    assert "class names, keys and labels against the hash recorded before writing\n" in output
    forget_hashes(root)
    assert verify(root) == 1
    assert "every byte of 0 of 8 shards against its sha256" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format_version", "1"),
        ("format_version", [1]),
        ("format_version", None),
        ("class_names", "abc"),
        ("class_names.0", [1, 2]),
        ("num_classes", "3"),
        ("options", True),
        ("splits.val", None),
        ("splits.val", [1]),
        ("splits.val.filenames", 5),
        ("splits.val.shard_lengths", "x"),
        ("splits.val.shard_bytes.0", [-1]),
    ],
)
def test_values_of_a_different_json_type_are_reported(key, value, root, capsys):
    def change(info: dict) -> None:
        *parents, last = key.removesuffix(".0").split(".")
        for parent in parents:
            info = info[parent]
        info[last] = value

    edit_json(root / "_info.json", change)
    assert verify(root) == 2
    error = capsys.readouterr().err
    assert re.search(
        rf"_info.json: {re.escape(key)} is .*, expected .*; restore it from its source\n$", error
    ), error
    with pytest.raises(ShardError, match=rf"_info.json: {re.escape(key)} is "):
        open_split(root, "val")
    assert index.main([str(root), "--workers", "1"]) == 2


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (5, "quarantined is '5', expected a valid list"),
        (
            [{"split": "val", "key": "a", "label": None, "tar_offset": [1]}],
            r"quarantined.0.tar_offset is '\[1\]', expected a valid integer",
        ),
        ([{"key": "a", "label": None}], r"quarantined.0.split is .*, Field required"),
        (
            [{"split": "val", "key": 1, "label": None}],
            "quarantined.0.key is '1', expected a valid string",
        ),
    ],
    ids=["no list", "offset", "no split", "key"],
)
def test_values_of_a_different_type_in_a_sidecar_are_reported(entries, message, root, capsys):
    edit_json(root / "val-00000.json", lambda sidecar: sidecar.update(quarantined=entries))
    (root / "val.index.npy").unlink()
    with pytest.raises(
        ShardError, match=f"val-00000.json: {message}.*; restore it from its source"
    ):
        open_split(root, "val")
    assert verify(root, "--quick") == 1
    assert re.search(rf"val-00000.json: {message}", capsys.readouterr().out)
    assert index.main([str(root), "--workers", "1"]) == 2


def test_every_flipped_bit_beside_the_tars_is_detected(root):
    """The test flips one bit at a time, at random positions in all files that describe the shards,
    including index headers."""
    rng = np.random.default_rng(3)
    unnoticed = []
    samples = {tar.name: scan_tar(tar) for tar in root.glob("*.tar")}
    for path in sorted(
        path
        for kind in ("*[0-9o].json", "*.jsonl", "*.npy", "*.idx", "dataset.md")
        for path in root.glob(kind)
    ):
        whole = path.read_bytes()
        for _ in range(8):
            place = int(rng.integers(len(whole)))
            bit = int(rng.integers(8))
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            problems = ["cannot be opened"]
            with suppress(ShardError, PrepError), opened_data_set(str(root)) as data:
                problems = [*check_folder(data), *check_quarantine(data)]
                for part in data.parts if not problems else []:
                    for shard in (shard_of(data, part, number) for number in part.present):
                        problems += [
                            *_check_idx(shard, samples[shard.name]),
                            *_check_index(shard, samples[shard.name], is_intact=True),
                        ]
            if not problems:
                unnoticed.append((path.name, place, bit))
        path.write_bytes(whole)
    assert unnoticed == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rows: rows["crc32c"].__setitem__(1, rows["crc32c"][1] ^ 4),
            r"wrong values in 1 row of val-00000.tar, the first in row 1 .*: crc32c ",
        ),
        (
            lambda rows: rows["crc32c"].__setitem__(slice(None), 0),
            r"wrong values in 3 rows of val-00000.tar, .*: crc32c is 0, but the tar gives ",
        ),
    ],
    ids=["one flipped bit", "all unknown"],
)
def test_a_wrong_checksum_in_the_index_is_not_blamed_on_a_shard_with_its_sha256(
    change, message, root, capsys
):
    edit_rows(root / "val.index.npy", change)
    assert verify(root) == 1
    [line] = problems_in(capsys.readouterr().out)
    assert re.match(
        rf"val.index.npy: {message}.*; delete val.index.npy and run `python -m data_prep.index ",
        line,
    ), line
