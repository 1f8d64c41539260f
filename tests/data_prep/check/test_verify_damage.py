"""Test that verification names exactly the corrupt files."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from verifying import (
    edit,
    edit_json,
    edit_rows,
    foreign,
    image_bytes,
    members_of,
    pair,
    problems_in,
    verify,
    write_tar,
)

from data_prep import index

# ---- damage --------------------------------------------------------------------------------------


def reverse_samples(tar: Path) -> None:
    """Reverse the order of the samples. The result is a valid tar of the same size."""
    data = tar.read_bytes()
    members = members_of(tar)
    ends = [member.offset for member in members[2::2]] + [members[-1].offset_data + 512]
    samples = [data[first.offset : end] for first, end in zip(members[::2], ends, strict=True)]
    tar.write_bytes(b"".join(reversed(samples)) + data[ends[-1] :])


def overwrite_image(tar: Path, number: int) -> None:
    image = members_of(tar)[2 * number]
    edit(
        tar,
        lambda data: data.__setitem__(
            slice(image.offset_data + 300, image.offset_data + image.size),
            b"?" * (image.size - 300),
        ),
    )


def line_of_idx(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def one_sample_less(info: dict) -> None:
    val = info["splits"]["val"]
    val.update(num_samples=val["num_samples"] - 1, shard_lengths=[val["shard_lengths"][0] - 1])


TARS: list[tuple[Callable[[Path], object], list[str]]] = [
    (lambda root: (root / "train-00000.tar").unlink(), ["train-00000.tar: missing"]),
    (
        lambda root: edit(
            root / "train-00001.tar", lambda data: data.__delitem__(slice(-3000, None))
        ),
        ["train-00001.tar: .* bytes, but _info.json records "],
    ),
    (
        lambda root: edit(root / "train-00002.tar", lambda data: data.extend(bytes(512))),
        ["train-00002.tar: .* bytes, but _info.json records "],
    ),
    (
        lambda root: edit(
            root / "train-00003.tar", lambda data: data.__setitem__(slice(0, 512), b"\7" * 512)
        ),
        ["train-00003.tar: altered or replaced", "train-00003.tar: not a tar"],
    ),
    (
        lambda root: reverse_samples(root / "train-00004.tar"),
        [
            "train-00004.tar: altered or replaced",
            r"train-00004.idx: line \d",
            r"train.index.npy: wrong values in \d rows of train-00004.tar, .* row \d+ \(key ",
        ],
    ),
    (
        lambda root: overwrite_image(root / "train-00005.tar", 1),
        [
            "train-00005.tar: altered or replaced",
            r"train-00005.tar: 1 image differs from the indexed bytes: plum_plum1;",
            "train-00005.tar: .*: cannot be decoded",
        ],
    ),
    (
        lambda root: (root / "train-00009.tar").write_bytes(b""),
        ["train-00009.tar: not in _info.json"],
    ),
    (
        lambda root: edit(
            root / "train-00006.tar", lambda data: data.__setitem__(1200, data[1200] ^ 1)
        ),
        [
            "train-00006.tar: altered or replaced: its sha256",
            r"train-00006.tar: 1 image differs from the indexed bytes: \w+;",
        ],
    ),
]


BESIDE: list[tuple[Callable[[Path], object], list[str]]] = [
    (
        lambda root: edit_json(
            root / "train-00000.json", lambda sidecar: sidecar.update(sha256="0")
        ),
        ["train-00000.json: sha256 is '0', but _info.json records '"],
    ),
    (lambda root: (root / "train-00001.json").unlink(), ["train-00001.json: missing"]),
    (
        lambda root: (root / "train-00002.json").write_text("{}"),
        ["train-00002.json: has the name of a shard's sidecar"],
    ),
    (
        lambda root: edit_json(
            root / "train-00003.json", lambda sidecar: sidecar.update(quarantined=[1])
        ),
        ["train-00003.json: quarantined.0 is '1', expected a valid dictionary"],
    ),
    (lambda root: (root / "train-00004.idx").unlink(), ["train-00004.idx: missing"]),
    (
        lambda root: line_of_idx(root / "train-00005.idx", "jpg 512 ", "jpg 513 "),
        ["train-00005.idx: line 2"],
    ),
    (
        lambda root: line_of_idx(root / "train-00006.idx", "v1.2 ", "v1.2 1"),
        [r"train-00006.idx: line 1 is 'v1.2 1"],
    ),
    (
        lambda root: edit(root / "val-00000.idx", lambda data: data.extend(b"jpg 1 2 x\n")),
        [r"val-00000.idx: \d+ lines, expected \d+"],
    ),
    (
        lambda root: edit_rows(
            root / "val.index.npy",
            lambda rows: rows["label"].__setitem__(0, (rows["label"][0] + 1) % 3),
        ),
        [r"val.index.npy: wrong values in 1 row of val-00000.tar, .* row 0 \(key \w+\): label "],
    ),
    (
        lambda root: edit_rows(
            root / "train.index.npy", lambda rows: rows["width"].__setitem__(slice(0, 2), 99)
        ),
        ["train.index.npy: .* 2 rows of train-00000.tar, .*: width is 99, but the tar gives 32"],
    ),
    (
        lambda root: (root / "quarantine.jsonl").write_text('{"split": "val", "key": "x"}\n[1]\n'),
        ["quarantine.jsonl: altered: this file must list the 1 unreadable image in"],
    ),
    (
        lambda root: edit_json(root / "_info.json", lambda info: info.update(quarantined=5)),
        ["_info.json: quarantined is 5, but the sidecars have 1"],
    ),
]


NO_INDEX: list[tuple[Callable[[Path], object], list[str]]] = [
    (lambda root: (root / "train.index.npy").unlink(), ["train.index.npy: missing"]),
    (
        lambda root: np.save(root / "val.index.npy", np.zeros(3)),
        ["val.index.npy: unreadable .in another format"],
    ),
    (
        lambda root: (root / "quarantine.jsonl").unlink(),
        ["quarantine.jsonl: missing: this file must list the 1 unreadable image"],
    ),
    (
        lambda root: edit_json(root / "_info.json", lambda info: info.update(changed={})),
        ["_info.json: changed is {}, but the sidecars have {'PNG"],
    ),
]


TORN_INDEX: list[tuple[Callable[[Path], object], list[str]]] = [
    (
        lambda root: edit(root / "train.index.npy", lambda data: data.__delitem__(slice(50, None))),
        ["train.index.npy: unreadable"],
    ),
    (
        lambda root: np.save(root / "val.index.npy", np.load(root / "val.index.npy")[:-1]),
        ["val.index.npy: .* rows, but _info.json records"],
    ),
    (
        lambda root: edit_json(root / "_info.json", lambda info: info.update(num_classes=7)),
        ["_info.json: num_classes is 7, but class_names has 3"],
    ),
]


TOO_FEW_CLASSES: list[tuple[Callable[[Path], object], list[str]]] = [
    (
        lambda root: edit_json(
            root / "_info.json",
            lambda info: info.update(num_classes=2, class_names=["apple", "pear"]),
        ),
        [
            r"train: \d+ labels outside 0 to 1: 2",
            r"val: \d+ labels? outside 0 to 1: 2",
            "_info.json: class names, keys or labels have changed",
        ],
    )
]


TOO_MANY_CLASSES: list[tuple[Callable[[Path], object], list[str]]] = [
    (
        lambda root: edit_json(
            root / "_info.json", lambda info: info.update(num_classes=5, class_names=[*"abcde"])
        ),
        ["train: 2 classes without an image: d, e"],
    ),
    (
        lambda root: edit_json(root / "_info.json", one_sample_less),
        [
            "val-00000.tar: 3 samples, but _info.json records 2",
            "val-00000.json: num_samples",
            "val.index.npy: 3 rows",
            "_info.json: lists 3 images for val, but shards and quarantine have 2",
        ],
    ),
]
DAMAGES = [TARS, BESIDE, NO_INDEX, TORN_INDEX, TOO_FEW_CLASSES, TOO_MANY_CLASSES]


@pytest.mark.parametrize(
    "damages",
    DAMAGES,
    ids=["tars", "beside", "no index", "torn index", "too few classes", "too many classes"],
)
def test_exactly_the_damaged_files_are_named(root, damages, capsys):
    for break_it, _ in damages:
        break_it(root)
    assert verify(root) == 1
    output = capsys.readouterr().out
    expected = [text for _, texts in damages for text in texts]
    assert [text for text in expected if not re.search(rf"(?m)^    {text}", output)] == []
    assert [
        line for line in problems_in(output) if not any(re.match(text, line) for text in expected)
    ] == []
    assert f"{len(problems_in(output))} problem" in output.splitlines()[-1]


@pytest.mark.parametrize("damages", [TARS, BESIDE, NO_INDEX], ids=["tars", "beside", "no index"])
def test_a_quick_check_names_most_damaged_files(root, damages, capsys):
    for break_it, _ in damages:
        break_it(root)
    assert verify(root, "--quick") == 1
    output = capsys.readouterr().out
    # Only sha256 detects the flipped bit in train-00006.tar.
    named = {texts[0].split(":")[0] for _, texts in damages} - {"train-00006.tar"}
    assert [name for name in named if f"    {name}: " not in output] == []


def test_a_shard_with_a_damaged_header_is_named(root, capsys):
    second = members_of(root / "train-00002.tar")[2].offset
    edit(
        root / "train-00002.tar",
        lambda data: data.__setitem__(slice(second, second + 512), bytes(512)),
    )
    assert verify(root) == 1
    assert "train-00002.tar: damaged: data follow the end marker" in capsys.readouterr().out


def test_many_lines_about_one_shard_are_shortened(tmp_path, capsys):
    members = [
        member for n in range(15) for member in pair(f"k{n:02d}", image_bytes(n)[:-200], n % 2)
    ]
    assert verify(foreign(tmp_path / "foreign", members)) == 1
    output = capsys.readouterr().out
    assert "train-000.tar: k09: cannot be decoded" in output
    assert "k10: cannot" not in output
    assert "train-000.tar: and 5 more in this shard" in output


def test_samples_in_neither_shard_nor_quarantine_are_reported(root, capsys):
    tar = root / "train-00000.tar"
    kept = [
        member
        for member in members_of(tar)
        if member.name not in {m.name for m in members_of(tar)[2:8]}
    ]
    with tarfile.open(tar) as opened:
        contents = [(member.name, opened.extractfile(member).read()) for member in kept]
    write_tar(tar, contents)
    for path in (
        tar.with_suffix(".idx"),
        tar.with_suffix(".json"),
        root / "train.index.npy",
        root / "_info.json",
    ):
        path.rename(path.with_name(f"{path.name}.before"))
    # All files are consistent with each other again, but three samples are missing.
    assert index.main([str(root), "--workers", "1"]) == 0
    before = json.loads((root / "_info.json.before").read_text())
    edit_json(
        root / "_info.json",
        lambda info: info.update(
            {key: before[key] for key in ("catalog", "changed", "quarantined", "class_names")}
        ),
    )
    assert verify(root) == 1
    assert "class names, keys or labels have changed" in capsys.readouterr().out


def test_leftover_files_are_notes(root, capsys):
    for name in (".train-00001.tar.host.1.tmp", "_writing.json"):
        (root / name).write_text("{}")
    assert verify(root) == 0
    output = capsys.readouterr().out
    assert ".train-00001.tar.host.1.tmp: temporary file" in output
    assert "_writing.json: temporary file" in output
    assert "no problems, 2 notes" in output
    assert verify(root, "--strict") == 1
