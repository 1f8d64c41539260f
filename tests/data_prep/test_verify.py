"""Every kind of damage to a finished data set is found and named; a sound one passes."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from servers import S3Server, WebServer

from data_prep import imagefolder, index
from data_prep.check.data_set import Part, opened_data_set
from data_prep.check.set_checks import _repeated, check_folder, check_quarantine
from data_prep.check.shard_checks import SEEN_DTYPE, _check_idx, _check_index
from data_prep.errors import PrepError
from data_prep.verify import main, shard_of
from data_prep.write.output import Output
from vit.data.shards.data_set import open_split
from vit.data.shards.info_file import info_sha256, sidecars_sha256
from vit.data.shards.tar import scan_tar
from vit.system.files import ShardError

PER_CLASS = {"apple": 10, "pear": 11, "plum": 9}


def image_bytes(
    seed: int, format: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (32, 24)
) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(encoded, format)
    return encoded.getvalue()


def verify(root: Path, *flags: str) -> int:
    return main([str(root), "--workers", "1", *flags])


def edit(path: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    # by somebody who knows of it: what else tells is tested
    if path.name == "_info.json" and "info_sha256" in content:
        content["info_sha256"] = info_sha256(content)
    path.write_text(json.dumps(content))


def edit_rows(path: Path, change: Callable[[np.ndarray], object]) -> None:
    rows = np.load(path)
    change(rows)
    np.save(path, rows)


def members_of(tar: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(tar) as opened:
        return opened.getmembers()


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A data set of ours: 3 classes, 7 + 1 shards; a PNG that was converted, an unreadable
    image."""
    folder = tmp_path_factory.mktemp("sound")
    for label, (name, count) in enumerate(PER_CLASS.items()):
        (folder / "images" / name).mkdir(parents=True)
        for n in range(count):
            (folder / "images" / name / f"{name}{n}.jpg").write_bytes(image_bytes(100 * label + n))
    (folder / "images" / "plum" / "png.png").write_bytes(image_bytes(999, "PNG"))
    (folder / "images" / "pear" / "broken.jpg").write_bytes(b"no image")
    options = ["--num-shards", "7", "--workers", "1", "--max-unreadable", "0.5"]
    assert imagefolder.main([str(folder / "images"), "--out", str(folder / "set"), *options]) == 0
    return folder / "set"


@pytest.fixture
def root(sound, tmp_path) -> Path:
    shutil.copytree(sound, tmp_path / "set")
    return tmp_path / "set"


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def foreign(folder: Path, *shards: Sequence[tuple[str, bytes]], split: str = "train") -> Path:
    """Shards that others made, indexed by `data_prep.index`."""
    folder.mkdir(exist_ok=True)
    for number, members in enumerate(shards):
        write_tar(folder / f"{split}-{number:03d}.tar", members)
    assert index.main([str(folder), "--workers", "1"]) == 0
    return folder


def pair(key: str, data: bytes, label: int) -> list[tuple[str, bytes]]:
    return [(f"{key}.jpg", data), (f"{key}.cls", b"%d" % label)]


# ---- sound ones ----------------------------------------------------------------------------------


def test_a_sound_data_set_passes(root, capsys):
    before = {path: path.read_bytes() for path in root.iterdir()}
    assert verify(root) == 0
    told = capsys.readouterr().out
    assert "PROBLEMS" not in told
    assert "Notes" not in told
    num_train, num_val = (
        sum(len(members_of(tar)) // 2 for tar in root.glob(f"{split}-*.tar"))
        for split in ("train", "val")
    )
    assert num_train + num_val == sum(PER_CLASS.values()) + 1
    for row in (
        ("shards", 7, 1),
        ("samples recorded", num_train, num_val),
        ("images checked", num_train, num_val),
        ("changed or remarked", "(0 +1|1 +0)"),
        ("quarantined", 1, 0),
    ):
        assert re.search(r"\s+".join(map(str, row)), told), row
    assert re.search(rf"{root}: right, \d+\.\d s\n$", told)
    assert {path: path.read_bytes() for path in root.iterdir()} == before
    assert verify(root, "--strict") == 0


def test_a_quick_check_says_what_it_left_out(root, capsys):
    assert verify(root, "--quick", "--sample", "10") == 0
    told = capsys.readouterr().out
    decoded = [
        int(number) for number in re.findall(r"\d+", re.search(r"images checked(.*)", told)[1])
    ]
    assert sum(decoded) in range(10, 18)
    assert f"{sum(decoded)} images, spread over all shards" in told
    assert "NOT checked, leave out --quick" in told
    assert "right, as far as checked" in told


def test_the_command_ends_with_its_status_and_writes_plain_lines(root):
    command = [sys.executable, "-m", "data_prep.verify", str(root), "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    (root / "train-00002.tar").unlink()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_shards_of_others_pass(tmp_path, capsys):
    shards = [
        [member for n in range(3) for member in pair(f"{s}_{n}", image_bytes(10 * s + n), n)]
        for s in range(2)
    ]
    root = foreign(tmp_path / "foreign", *shards)
    assert verify(root) == 0
    assert verify(root, "--quick") == 0
    described = {
        "name": "train",
        "filenames": ["train-000.tar", "train-001.tar"],
        "shard_lengths": [3, 3],
        "num_samples": 6,
    }
    # timm's, without our keys
    (root / "_info.json").write_text(json.dumps({"splits": {"train": described}}))
    assert verify(root) == 0
    edit(root / "train-001.tar", lambda data: data.__setitem__(700, data[700] ^ 1))
    capsys.readouterr()
    assert verify(root) == 1  # by its sidecar
    assert "train-001.tar: altered or replaced: its sha256" in capsys.readouterr().out


# ---- damage --------------------------------------------------------------------------------------


def reverse_samples(tar: Path) -> None:
    """The same samples in another order: a sound tar of the same size."""
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
        ["train-00001.tar: .* 3,000 bytes shorter"],
    ),
    (
        lambda root: edit(root / "train-00002.tar", lambda data: data.extend(bytes(512))),
        ["train-00002.tar: .* 512 bytes longer"],
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
            r"train.index.npy: \d rows of train-00004.tar, the first is row \d+ \(key ",
        ],
    ),
    (
        lambda root: overwrite_image(root / "train-00005.tar", 1),
        [
            "train-00005.tar: altered or replaced",
            r"train-00005.tar: 1 image has not the bytes that were indexed: plum_plum1;",
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
            r"train-00006.tar: 1 image has not the bytes that were indexed: \w+;",
        ],
    ),
]
BESIDE: list[tuple[Callable[[Path], object], list[str]]] = [
    (
        lambda root: edit_json(
            root / "train-00000.json", lambda sidecar: sidecar.update(sha256="0")
        ),
        ["train-00000.json: sha256 is '0', _info.json says '"],
    ),
    (lambda root: (root / "train-00001.json").unlink(), ["train-00001.json: absent"]),
    (
        lambda root: (root / "train-00002.json").write_text("{}"),
        ["train-00002.json: not a sidecar of ours"],
    ),
    (
        lambda root: edit_json(
            root / "train-00003.json", lambda sidecar: sidecar.update(quarantined=[1])
        ),
        [r"train-00003.json: quarantined\[0\] is '1', expected a valid dictionary"],
    ),
    (lambda root: (root / "train-00004.idx").unlink(), ["train-00004.idx: absent"]),
    (
        lambda root: line_of_idx(root / "train-00005.idx", "jpg 512 ", "jpg 513 "),
        ["train-00005.idx: line 2"],
    ),
    (
        lambda root: line_of_idx(root / "train-00006.idx", "v1.2 ", "v1.2 1"),
        [r"train-00006.idx: line 1: 'v1.2 1"],
    ),
    (
        lambda root: edit_rows(
            root / "val.index.npy",
            lambda rows: rows["label"].__setitem__(0, (rows["label"][0] + 1) % 3),
        ),
        [r"val.index.npy: 1 row of val-00000.tar, the first is row 0 \(key \w+\): label "],
    ),
    (
        lambda root: edit_rows(
            root / "train.index.npy", lambda rows: rows["width"].__setitem__(slice(0, 2), 99)
        ),
        ["train.index.npy: 2 rows of train-00000.tar, .*: width 99, the tar says 32"],
    ),
    (
        lambda root: (root / "quarantine.jsonl").write_text('{"split": "val", "key": "x"}\n[1]\n'),
        ["quarantine.jsonl: altered: the sidecars have 1 unreadable image, and it has not"],
    ),
    (
        lambda root: edit_json(root / "_info.json", lambda info: info.update(quarantined=5)),
        ["_info.json: quarantined is 5, the sidecars have 1"],
    ),
]
NO_INDEX: list[tuple[Callable[[Path], object], list[str]]] = [
    (lambda root: (root / "train.index.npy").unlink(), ["train.index.npy: absent"]),
    (
        lambda root: np.save(root / "val.index.npy", np.zeros(3)),
        ["val.index.npy: unreadable .of another format"],
    ),
    (
        lambda root: (root / "quarantine.jsonl").unlink(),
        ["quarantine.jsonl: absent: the sidecars have 1 unreadable image"],
    ),
    (
        lambda root: edit_json(root / "_info.json", lambda info: info.update(changed={})),
        ["_info.json: changed is {}, the sidecars have {'PNG"],
    ),
]
TORN_INDEX: list[tuple[Callable[[Path], object], list[str]]] = [
    (
        lambda root: edit(root / "train.index.npy", lambda data: data.__delitem__(slice(50, None))),
        ["train.index.npy: unreadable"],
    ),
    (
        lambda root: np.save(root / "val.index.npy", np.load(root / "val.index.npy")[:-1]),
        ["val.index.npy: .* rows, _info.json has"],
    ),
    (
        lambda root: edit_json(root / "_info.json", lambda info: info.update(num_classes=7)),
        ["_info.json: num_classes is 7, class_names are 3"],
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
            "_info.json: class names, keys or labels are not",
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
            "val-00000.tar: holds 3 samples, _info.json says 2",
            "val-00000.json: num_samples",
            "val.index.npy: 3 rows",
            "_info.json: listed is 3 for val, shards and quarantine have 2",
        ],
    ),
]
DAMAGES = [TARS, BESIDE, NO_INDEX, TORN_INDEX, TOO_FEW_CLASSES, TOO_MANY_CLASSES]


def problems_in(told: str) -> list[str]:
    """The lines of a report's problems."""
    return re.findall(
        r"(?m)^    (\S.*)$",
        told[told.index("PROBLEMS") : (told + "Notes").index("Notes")].split("\n\n")[0],
    )


@pytest.mark.parametrize(
    "damages",
    DAMAGES,
    ids=["tars", "beside", "no index", "torn index", "too few classes", "too many classes"],
)
def test_every_damage_is_named_and_nothing_else(root, damages, capsys):
    for break_it, _ in damages:
        break_it(root)
    assert verify(root) == 1
    told = capsys.readouterr().out
    expected = [text for _, texts in damages for text in texts]
    assert [text for text in expected if not re.search(rf"(?m)^    {text}", told)] == []
    assert [
        line for line in problems_in(told) if not any(re.match(text, line) for text in expected)
    ] == []
    assert f"{len(problems_in(told))} problem" in told.splitlines()[-1]


@pytest.mark.parametrize("damages", [TARS, BESIDE, NO_INDEX], ids=["tars", "beside", "no index"])
def test_a_quick_check_names_most_of_it(root, damages, capsys):
    for break_it, _ in damages:
        break_it(root)
    assert verify(root, "--quick") == 1
    told = capsys.readouterr().out
    # one bit, which only sha256 tells
    named = {texts[0].split(":")[0] for _, texts in damages} - {"train-00006.tar"}
    assert [name for name in named if f"    {name}: " not in told] == []


def test_a_shard_of_which_only_a_header_is_damaged(root, capsys):
    second = members_of(root / "train-00002.tar")[2].offset
    edit(
        root / "train-00002.tar",
        lambda data: data.__setitem__(slice(second, second + 512), bytes(512)),
    )
    assert verify(root) == 1
    assert "train-00002.tar: damaged: zeros instead of a header" in capsys.readouterr().out


def test_many_lines_about_one_shard_are_cut(tmp_path, capsys):
    members = [
        member for n in range(15) for member in pair(f"k{n:02d}", image_bytes(n)[:-200], n % 2)
    ]
    assert verify(foreign(tmp_path / "foreign", members)) == 1
    told = capsys.readouterr().out
    assert "train-000.tar: k09: cannot be decoded" in told
    assert "k10: cannot" not in told
    assert "train-000.tar: and 5 more like these in this shard" in told


def test_samples_that_are_in_neither_shard_nor_quarantine(root, capsys):
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
    # everything fits again, the three samples are gone
    assert index.main([str(root), "--workers", "1"]) == 0
    before = json.loads((root / "_info.json.before").read_text())
    edit_json(
        root / "_info.json",
        lambda info: info.update(
            {key: before[key] for key in ("catalogue", "changed", "quarantined", "class_names")}
        ),
    )
    assert verify(root) == 1
    assert "class names, keys or labels are not those" in capsys.readouterr().out


def test_leftovers_are_notes(root, capsys):
    for name in (".train-00001.tar.host.1.tmp", "_writing.json"):
        (root / name).write_text("{}")
    assert verify(root) == 0
    told = capsys.readouterr().out
    assert ".train-00001.tar.host.1.tmp: left over" in told
    assert "_writing.json: left over" in told
    assert "right, 2 notes" in told
    assert verify(root, "--strict") == 1


# ---- what somebody altered by hand, hashes and all -----------------------------------------------


def swap_classes(info: dict) -> None:
    info["class_names"][:2] = reversed(info["class_names"][:2])


def swap_classes_only(root: Path) -> None:
    info = json.loads((root / "_info.json").read_text())
    swap_classes(info)
    (root / "_info.json").write_text(json.dumps(info))


def reseal(root: Path) -> None:
    """Bring all hashes of files up to date, as who alters a data set on purpose could."""

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
    """In the tar, the index, and every hash of them."""
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
    "class names swapped": (swap_classes_only, "_info.json: altered: its content", True),
    "class names swapped, info's hash brought up to date": (
        lambda root: edit_json(root / "_info.json", swap_classes),
        "_info.json: class names, keys or labels are not those that the data set was made of",
        False,
    ),
    "a class name misspelt": (
        lambda root: edit_json(
            root / "_info.json", lambda info: info["class_names"].__setitem__(0, "aple")
        ),
        "_info.json: class names, keys or labels are not those that the data set was made of",
        False,
    ),
    "a label changed": (
        change_a_label,
        "_info.json: class names, keys or labels are not those that the data set was made of",
        False,
    ),
    "catalogue": (
        lambda root: edit_json(root / "_info.json", lambda info: info.update(catalogue="0" * 64)),
        (
            "train: 7 shards, the first is train-00000.tar: source, options or catalogue in"
            " _info.json are not those"
        ),
        True,
    ),
    "options": (
        lambda root: edit_json(
            root / "_info.json", lambda info: info["options"].update(jpeg_quality=1)
        ),
        (
            "val: 1 shard, the first is val-00000.tar: source, options or catalogue in _info.json"
            " are not those"
        ),
        True,
    ),
    "listed": (
        lambda root: edit_json(root / "_info.json", lambda info: info["listed"].update(val=9)),
        "_info.json: listed is 9 for val, shards and quarantine have 3",
        True,
    ),
    "a sidecar's plan": (
        edit_plan,
        "train: 1 shard, the first is train-00001.tar: source, options or catalogue",
        True,
    ),
    "a sidecar": (
        lambda root: edit_json(
            root / "train-00001.json", lambda sidecar: sidecar.update(asks_to_be_turned=3)
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
        "val.index.npy: 5 bytes behind its last row",
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
        "dataset.md: altered",
        True,
    ),
    "no card": (lambda root: (root / "dataset.md").unlink(), "dataset.md: absent", True),
    "no contact sheet": (
        lambda root: (root / "contact_sheet.png").unlink(),
        "dataset.md: contact_sheet.png, which it shows",
        True,
    ),
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_what_was_altered_by_hand_is_noticed(kind, root, capsys):
    alter, text, even_quickly = BY_HAND[kind]
    alter(root)
    # what a quick check does, a full one does, too
    assert verify(root, *(["--quick"] if even_quickly else [])) == 1
    assert f"    {text}" in capsys.readouterr().out


def test_what_is_printed_was_compared(root, capsys):
    assert verify(root) == 0
    assert "every byte of 8 of 8 shards against its sha256\n" in (told := capsys.readouterr().out)
    assert (
        "class names, keys and labels against the hash of those the data set was made of\n" in told
    )
    forget_hashes(root)
    assert verify(root) == 1
    assert (
        "every byte of 0 of 8 shards against its sha256; of the others none is recorded"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format_version", "1"),
        ("format_version", [1]),
        ("format_version", None),
        ("class_names", "abc"),
        ("class_names[0]", [1, 2]),
        ("num_classes", "3"),
        ("options", True),
        ("splits.val", None),
        ("splits.val", [1]),
        ("splits.val.filenames", 5),
        ("splits.val.shard_lengths", "x"),
        ("splits.val.shard_bytes[0]", [-1]),
    ],
)
def test_values_of_another_json_type_are_told(key, value, root, capsys):
    def change(info: dict) -> None:
        *parents, last = key.partition("[")[0].split(".")
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
    ("entries", "told"),
    [
        (5, "quarantined is '5', expected a valid list"),
        (
            [{"split": "val", "key": "a", "label": None, "tar_offset": [1]}],
            r"quarantined\[0\].tar_offset is '\[1\]', expected a valid integer",
        ),
        ([{"key": "a", "label": None}], r"quarantined\[0\].split is missing"),
        (
            [{"split": "val", "key": 1, "label": None}],
            r"quarantined\[0\].key is '1', expected a valid string",
        ),
    ],
    ids=["no list", "offset", "no split", "key"],
)
def test_values_of_another_type_in_a_sidecar_are_told(entries, told, root, capsys):
    edit_json(root / "val-00000.json", lambda sidecar: sidecar.update(quarantined=entries))
    (root / "val.index.npy").unlink()
    with pytest.raises(ShardError, match=f"val-00000.json: {told}.*; restore it from its source"):
        open_split(root, "val")
    assert verify(root, "--quick") == 1
    assert re.search(rf"val-00000.json: {told}", capsys.readouterr().out)
    assert index.main([str(root), "--workers", "1"]) == 2


def test_every_flipped_bit_beside_the_tars_is_noticed(root):
    """One at a time, at random places of all files that describe the shards; headers of indexes
    included."""
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
            found = ["cannot be opened"]
            with suppress(ShardError, PrepError), opened_data_set(str(root)) as data:
                found = [*check_folder(data), *check_quarantine(data)]
                for part in data.parts if not found else []:
                    for shard in (shard_of(data, part, number) for number in part.present):
                        found += [
                            *_check_idx(shard, samples[shard.name]),
                            *_check_index(shard, samples[shard.name], is_intact=True),
                        ]
            if not found:
                unnoticed.append((path.name, place, bit))
        path.write_bytes(whole)
    assert unnoticed == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda rows: rows["crc32c"].__setitem__(1, rows["crc32c"][1] ^ 4),
            r"1 row of val-00000.tar, the first is row 1 .*: crc32c ",
        ),
        (
            lambda rows: rows["crc32c"].__setitem__(slice(None), 0),
            r"3 rows of val-00000.tar, .*: crc32c 0, the tar says ",
        ),
    ],
    ids=["one flipped bit", "all unknown"],
)
def test_a_wrong_checksum_in_the_index_is_no_fault_of_a_shard_with_its_sha256(
    change, told, root, capsys
):
    edit_rows(root / "val.index.npy", change)
    assert verify(root) == 1
    [line] = problems_in(capsys.readouterr().out)
    assert re.match(
        rf"val.index.npy: {told}.*; delete val.index.npy and run `python -m data_prep.index ", line
    ), line


# ---- at a URL ------------------------------------------------------------------------------------


@pytest.fixture
def web(root, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with WebServer({f"/set/{path.name}": path.read_bytes() for path in root.iterdir()}) as server:
        yield server


def test_a_data_set_on_the_web(web, root, capsys):
    url = f"{web.url}/set"
    assert main([url, "--workers", "2"]) == 0
    assert "every byte of 8 of 8 shards against its sha256" in (told := capsys.readouterr().out)
    assert f"{url}: right" in told
    tar = bytearray(web.files["/set/train-00002.tar"])
    tar[1200] ^= 1
    web.files["/set/train-00002.tar"] = bytes(tar)
    del web.files["/set/train-00003.tar"]
    assert main([url, "--workers", "2"]) == 1
    told = capsys.readouterr().out
    assert "train-00002.tar: altered or replaced: its sha256" in told
    assert "train-00003.tar: no such file" in told
    assert "every byte of 7 of 8 shards against its sha256" in told


def test_a_quick_look_at_the_web_reads_ranges_of_shards_only(web, capsys):
    assert main([f"{web.url}/set", "--workers", "1", "--quick", "--sample", "8"]) == 0
    assert "right, as far as checked" in capsys.readouterr().out
    asked = [
        asked for method, path, asked in web.requests if method == "GET" and path.endswith(".tar")
    ]
    assert asked
    assert all(asked)


def test_an_index_of_shards_on_the_web(web, root, tmp_path, capsys):
    assert (
        index.main(
            [
                f"{web.url}/set/{{train-0000{{0..6}},val-00000}}.tar",
                "--out",
                str(tmp_path / "index"),
                "--workers",
                "1",
            ]
        )
        == 0
    )
    assert main([str(tmp_path / "index"), "--workers", "1"]) == 0
    assert "every byte of 8 of 8 shards against its sha256" in capsys.readouterr().out


def test_a_data_set_in_a_store(root, capsys):
    with S3Server() as server:
        output = Output(f"{server.new_bucket()}/set")
        for path in list(root.iterdir()):
            output.publish(path)
        assert main([str(output), "--workers", "1"]) == 0
        assert main([str(output), "--workers", "1", "--quick"]) == 0
        assert capsys.readouterr().out.count(f"{output}: right") == 2


# ---- what only foreign shards have ---------------------------------------------------------------


def test_broken_tars_of_others(tmp_path, capsys):
    root = foreign(
        tmp_path / "foreign",
        *(
            [*pair(f"k{s}", image_bytes(s), 0), *pair(f"l{s}", image_bytes(9 + s), 1)]
            for s in range(5)
        ),
    )
    write_tar(
        root / "train-000.tar", [*pair("a.b", image_bytes(0), 0), *pair("c", image_bytes(1), 0)]
    )
    write_tar(root / "train-001.tar", [("k.jpg", image_bytes(0)), *pair("c", image_bytes(1), 0)])
    write_tar(
        root / "train-002.tar", [*pair("k", image_bytes(0), 0), *pair("k", image_bytes(1), 0)]
    )
    edit(root / "train-003.tar", lambda data: data.__delitem__(slice(1000, None)))
    (root / "train-004.tar").write_bytes(b"\x1f\x8b" + bytes(2000))
    for path in (*root.glob("*.json"), *root.glob("*.idx"), *root.glob("*.npy")):
        path.unlink()
    filenames = [f"train-{n:03d}.tar" for n in range(5)]
    described = {
        "name": "train",
        "filenames": filenames,
        "shard_lengths": [2] * 5,
        "num_samples": 10,
    }
    (root / "_info.json").write_text(json.dumps({"splits": {"train": described}, "num_classes": 2}))
    assert verify(root) == 1
    told = capsys.readouterr().out
    for text in (
        "train-000.tar: sample 'a' has no images (its members: b.jpg, b.cls",
        "train-001.tar: sample 'k' has no .cls",
        "train-002.tar: sample 'k' has an extension twice",
        "train-003.tar: cut off",
        "train-004.tar: not a tar but compressed with gzip",
    ):
        assert text in told


def test_names_cannot_confuse_the_terminal(tmp_path, capsys):
    members = [
        *pair("k\x1b[31m\nall right\udcff", image_bytes(0)[:-300], 0),
        *pair("犬", image_bytes(1)[:-300], 1),
    ]
    assert verify(foreign(tmp_path / "foreign", members)) == 1
    told = capsys.readouterr().out
    assert r"train-000.tar: k\x1b[31m\nall right\udcff: cannot be decoded" in told
    assert "train-000.tar: 犬: cannot be decoded" in told


def test_a_key_in_two_shards_is_a_problem(tmp_path, capsys):
    root = foreign(
        tmp_path / "foreign",
        *(
            [*pair("same", image_bytes(s), 0), *pair(f"k{s}", image_bytes(9 + s), 1)]
            for s in range(2)
        ),
    )
    assert verify(root) == 1
    assert (
        "train: a key that is there 2 times: train-000.tar same and train-001.tar same"
        in capsys.readouterr().out
    )


def test_what_the_loader_converts_is_a_note_and_in_our_own_shards_a_problem(tmp_path, capsys):
    members = [
        *pair("cmyk", image_bytes(0, mode="CMYK"), 0),
        *pair("png", image_bytes(1, "PNG"), 1),
        *pair("rgb", image_bytes(2), 1),
    ]
    root = foreign(tmp_path / "foreign", members)
    assert verify(root) == 0
    told = capsys.readouterr().out
    assert "train-000.tar: 1 image: CMYK JPEG" in told
    assert "train-000.tar: 1 image: PNG (RGB)" in told
    edit_json(root / "_info.json", lambda info: info.update(catalogue="0"))
    assert verify(root) == 1
    told = capsys.readouterr().out.split("Notes")[0]
    assert "train-000.tar: cmyk: not an image our writer writes (CMYK JPEG)" in told
    assert "rgb:" not in told


# ---- equal images --------------------------------------------------------------------------------


def test_equal_images_are_counted_and_named(tmp_path, capsys):
    root = tmp_path / "foreign"
    same = image_bytes(0)
    leak = image_bytes(1)
    label = image_bytes(2)
    root.mkdir()
    write_tar(root / "val-000.tar", [*pair("v0", leak, 0), *pair("v1", image_bytes(3), 1)])
    foreign(
        root,
        [*pair("a", same, 0), *pair("b", leak, 0), *pair("c", label, 0)],
        [*pair("d", same, 0), *pair("e", label, 1), *pair("f", image_bytes(4), 1)],
    )
    assert verify(root) == 0
    told = capsys.readouterr().out
    for text in (
        "train, val: the same bytes: 3 images in 6 samples; 1 of these images are in two splits, 1"
        " under two labels\n"
        "      train-000.tar b (class 0) = val-000.tar v0 (class 0)\n"
        "      train-000.tar c (class 0) = train-001.tar e (class 1)\n"
        "      train-000.tar a (class 0) = train-001.tar d (class 0)\n",
        "right, 1 note",
    ):
        assert text in told
    assert verify(root, "--strict") == 1


@pytest.mark.parametrize("num_values", [3, 40, 10**9])
def test_repeated_values_are_all_found(num_values):
    rng = np.random.default_rng(num_values)
    parts = []
    for name in ("train", "val"):
        part = Part(name, {})
        for shard in range(3):
            part.seen[shard] = np.zeros(7, SEEN_DTYPE)
            part.seen[shard]["image"] = rng.integers(0, num_values, 7)
            part.seen[shard]["label"] = rng.integers(0, 4, 7)
        parts.append(part)
    samples = [
        (int(row["image"]), p, shard, number, int(row["label"]))
        for p, part in enumerate(parts)
        for shard, rows in part.seen.items()
        for number, row in enumerate(rows)
    ]
    count = Counter(sample[0] for sample in samples)
    expected = sorted(sample for sample in samples if count[sample[0]] > 1)
    found = _repeated(parts, "image")
    assert found[:, 1:].tolist() == [list(sample[1:]) for sample in expected]
    groups = Counter(found[:, 0].tolist())
    assert sorted(groups.values()) == sorted(n for n in count.values() if n > 1)


# ---- what cannot be checked ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda root: shutil.rmtree(root), "no such directory; expected a folder of shards"),
        (lambda root: (shutil.rmtree(root), root.write_text("")), "not a directory"),
        (lambda root: (root / "_info.json").unlink(), "no _info.json; if the shards are complete"),
        (
            lambda root: (root / "_info.json").rename(root / "_writing.json"),
            "not finished yet; run the command that writes it again",
        ),
        (lambda root: (root / "_info.json").write_text("{"), "_info.json: not valid JSON"),
        (
            lambda root: (root / "_info.json").write_text('{"splits": {"train": {}}}'),
            "split 'train': no filenames, shard_lengths, num_samples",
        ),
        (
            lambda root: edit_json(
                root / "_info.json", lambda info: info["splits"]["val"]["shard_bytes"].append(1)
            ),
            "2 shard_bytes",
        ),
    ],
)
def test_what_cannot_be_checked_is_one_line_and_status_2(root, prepare, message, capsys):
    prepare(root)
    assert verify(root) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
