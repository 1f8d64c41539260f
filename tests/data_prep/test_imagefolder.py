"""Image folders: both layouts, labels by sorted class name, and errors that say what was
expected."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.errors import PrepError
from data_prep.imagefolder import Asked, main, source
from data_prep.write.catalogue import open_catalogue
from data_prep.write.samples import Sample, safe_key
from vit.data.shards.data_set import open_split


def add(path: Path, number: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (number % 256, 50, 50)).save(path)
    return path


HELD_OUT = [
    "ape_11",
    "ape_21",
    "ape_22",
    "ape_26",
    "ape_27",
    "ape_8",
    "zebra_10",
    "zebra_14",
    "zebra_19",
    "zebra_7",
]


def listed(folder: Path, val_fraction: float | None = None) -> dict[str, list[Sample]]:
    """The samples of each split."""
    with tempfile.TemporaryDirectory() as temporary:
        found = open_catalogue(source(folder, Asked(val_fraction)), Path(temporary), seed=0)
        return {
            split: found.table(split).samples(range(total)) for split, total in found.splits.items()
        }


@pytest.fixture
def flat(tmp_path) -> Path:
    for name, num in (("zebra", 20), ("ape", 31)):
        for n in range(num):
            add(tmp_path / "flat" / name / f"{n}.jpg", n)
    return tmp_path / "flat"


def test_train_and_val(tmp_path, capsys):
    source = tmp_path / "source"
    for name in (
        "train/b/x.jpg",
        "train/b/deep/x.JPEG",
        "train/a/x.png",
        "train/a/x.y.jpg",
        "train/a/x.jpg",
        "val/b/x.jpg",
    ):
        add(source / name)
    for name in ("train/a/.hidden.jpg", "train/.ipynb_checkpoints/c.jpg", "train/a/notes.txt"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("no image")
    out = tmp_path / "out"
    assert main([str(source), "--out", str(out), "--num-shards", "2", "--workers", "1"]) == 0
    assert "complete, 2 classes" in capsys.readouterr().out
    train = open_split(out, "train")
    val = open_split(out, "val")
    assert train.class_names == ["a", "b"]
    labels = {train.key(i): int(train.index["label"][i]) for i in range(train.num_samples)}
    assert sorted(labels.values()) == [0, 0, 0, 1, 1]
    assert {"b_x", "b_deep_x", "a_x_y"} <= labels.keys()
    assert len(labels) == 5
    assert [val.key(i) for i in range(val.num_samples)] == ["b_x"]
    assert val.index["label"].tolist() == [1]
    assert val.read(0) == (source / "val/b/x.jpg").read_bytes()


@pytest.mark.parametrize("name", ["validation", "test"])
def test_other_names_of_val(tmp_path, name):
    for path in ("train/a/1.jpg", "train/b/1.jpg", f"{name}/a/2.jpg"):
        add(tmp_path / path)
    assert {split: len(samples) for split, samples in listed(tmp_path).items()} == {
        "train": 2,
        "val": 1,
    }


def test_classes_alone_are_split_by_class(flat):
    found = listed(flat, 0.2)
    counts = {
        split: [sum(s.label == label for s in samples) for label in (0, 1)]
        for split, samples in found.items()
    }
    assert counts == {"train": [25, 16], "val": [6, 4]}
    keys = {split: {s.key for s in samples} for split, samples in found.items()}
    assert not keys["train"] & keys["val"]
    assert len(keys["train"] | keys["val"]) == 51
    add(flat / "ape" / "another.jpg")  # one image more moves at most one other
    assert len(keys["val"] - {s.key for s in listed(flat, 0.2)["val"]}) <= 1
    assert list(listed(flat, 0)) == ["train"]
    assert [len(s) for s in listed(flat).values()] == [47, 5]


def test_what_is_held_out_stays_what_it_was(flat):
    """As the first version of this module chose: another choice would put images that a model was
    trained on into val."""
    assert sorted(sample.key for sample in listed(flat, 0.2)["val"]) == HELD_OUT


def test_awkward_names_give_safe_and_different_keys(tmp_path):
    for n, name in enumerate(
        ("a.jpg", "a.png", "a b.jpg", "a_b.jpg", "d/e.jpg", "d_e.jpg", "x" * 200 + ".jpg", "é.jpg")
    ):
        add(tmp_path / "c1" / name, n)
    add(tmp_path / "c2" / "a.jpg")
    keys = [sample.key for sample in listed(tmp_path, 0)["train"]]
    assert len(set(keys)) == len(keys) == 9
    assert all(key == safe_key(key) for key in keys)


def test_keys_that_two_classes_share_differ(tmp_path):
    paths = (
        "a/b_c.jpg",
        "a_b/c.jpg",
        "a b/c.jpg",
        "a/b/c.png",
        "a.b/d.jpg",
        "a_b_/d.jpg",
        "z/1.jpg",
    )
    for path in paths:
        add(tmp_path / path)
    samples = listed(tmp_path, 0)["train"]
    assert {sample.name for sample in samples} == set(paths)
    assert len({sample.key for sample in samples}) == len(paths)
    assert {sample.key for sample in samples if not re.search("_[0-9a-f]{16}$", sample.key)} == {
        "z_1",
        "a_b_d",
        "a_b__d",
    }


def test_links_are_followed_but_not_in_circles(tmp_path):
    for path in ("flat/a/1.jpg", "flat/b/1.jpg", "elsewhere/deep/2.jpg"):
        add(tmp_path / path)
    (tmp_path / "flat/b/more").symlink_to(tmp_path / "elsewhere")
    assert {sample.key for sample in listed(tmp_path / "flat", 0)["train"]} == {
        "a_1",
        "b_1",
        "b_more_deep_2",
    }
    (tmp_path / "elsewhere/deep/round").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        PrepError, match=r"b/more/deep/round: a link back to a folder above it; remove the link"
    ):
        listed(tmp_path / "flat", 0)
    (tmp_path / "flat/b/more").unlink()
    (tmp_path / "flat/b/itself.jpg").symlink_to("itself.jpg")
    with pytest.raises(
        PrepError,
        match=r"flat/b/itself.jpg: cannot be listed \(Too many levels of symbolic links\)",
    ):
        listed(tmp_path / "flat", 0)


WITHOUT_PRIVILEGES = """
import ctypes, os, sys
for capability in (1, 2):  # by which root passes over permission bits; they are gone after an exec
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_a_folder_that_cannot_be_listed_is_named(tmp_path):
    locked = add(tmp_path / "flat/a/locked/1.jpg").parent
    add(tmp_path / "flat/b/1.jpg")
    locked.chmod(0o000)
    command = [
        sys.executable,
        "-c",
        WITHOUT_PRIVILEGES,
        "-m",
        "data_prep.imagefolder",
        tmp_path / "flat",
        "--out",
        tmp_path / "out",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    locked.chmod(0o755)
    assert (done.returncode, done.stderr) == (
        2,
        (
            f"error: {locked}: cannot be listed (Permission denied); correct that, or move it"
            " elsewhere\n"
        ),
    )


def test_what_is_no_regular_file_is_left_out_and_listed(tmp_path):
    """A pipe would be waited for; a link to nowhere is an image that somebody meant to have."""
    for number in range(300):
        add(tmp_path / "flat" / "ab"[number % 2] / f"{number}.jpg", number)
    os.mkfifo(tmp_path / "flat/a/pipe.jpg")
    (tmp_path / "flat/a/lost.jpg").symlink_to("nowhere.jpg")
    assert main([str(tmp_path / "flat"), "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    lines = [
        json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()
    ]
    assert {line["name"]: line["reason"].partition("]")[0] for line in lines} == {
        "a/pipe.jpg": "not a regular file",
        "a/lost.jpg": "[Errno 2",
    }


@pytest.mark.parametrize(
    ("paths", "argument", "message"),
    [
        (
            [],
            "missing",
            (
                "missing: no such folder; expected a folder with one subfolder of images for each"
                " class"
            ),
        ),
        ([], "", "no images"),
        (["a/notes.txt", "b/notes.txt"], "", "no images .* in its 2 subfolders"),
        (["a/1.jpg", "a/2.jpg"], "", r"only one class \(a\)"),
        (["a/1.jpg", "b/x.txt"], "", "classes without images: b"),
        (["train/a/1.jpg", "train/b/1.jpg", "val/c/1.jpg"], "", "val: classes that train lacks: c"),
        (["train/a/1.jpg", "train/b/1.jpg", "val/a/x.txt"], "", "val: no images"),
        (["val/a/1.jpg"], "", "has val/ but no train/"),
        (["a/1.jpg"], "a/1.jpg", "1.jpg: not a folder; expected"),
    ],
)
def test_errors_are_one_line_and_status_2(tmp_path, paths, argument, message, capsys):
    folder = tmp_path / "source"
    folder.mkdir()
    for path in paths:
        (
            add(folder / path)
            if path.endswith("jpg")
            else (
                (folder / path).parent.mkdir(parents=True, exist_ok=True),
                (folder / path).write_text(""),
            )
        )
    assert main([str(folder / argument), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not list(tmp_path.glob("out/*"))


def test_a_val_folder_and_a_fraction_contradict(tmp_path, capsys):
    for path in ("train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg"):
        add(tmp_path / path)
    assert main([str(tmp_path), "--out", str(tmp_path / "out"), "--val-fraction", "0.2"]) == 2
    assert "--val-fraction 0.2 was given, but" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--out", str(tmp_path / "out"), "--val-fraction", "1"])
    assert "'1' is not a number in [0, 1)" in capsys.readouterr().err


def test_an_unreadable_image_is_named_with_its_path(flat, tmp_path, capsys):
    bad = flat / "ape" / "3.jpg"
    bad.write_bytes(bad.read_bytes()[:-20])
    assert (
        main([str(flat), "--out", str(tmp_path / "out"), "--workers", "1", "--max-unreadable", "0"])
        == 2
    )
    assert "1 images cannot be read, more than the 0 that --max-unreadable 0.0 allows" in (
        error := capsys.readouterr().err
    )
    assert "ape_3 (flat, ape/3.jpg): " in error
    assert not (tmp_path / "out" / "_info.json").exists()


def test_a_few_broken_images_are_left_out_and_the_share_that_passes_is_told(flat, tmp_path, capsys):
    """51 images: 5 may be broken, which is more than the usual hundredth; 7 may with the value that
    the refusal names."""
    out = tmp_path / "out"
    for n in range(5):
        (flat / "ape" / f"{n}.jpg").write_bytes(b"broken")
    assert main([str(flat), "--out", str(out), "--workers", "1", "--num-shards", "4"]) == 0
    assert "left out: 5 unreadable images" in capsys.readouterr().out
    for n in (5, 6):
        (flat / "zebra" / f"{n}.jpg").write_bytes(b"broken")
    out = tmp_path / "other"
    assert main([str(flat), "--out", str(out), "--workers", "1", "--num-shards", "4"]) == 2
    error = capsys.readouterr().err
    assert (
        "error: 7 images cannot be read, more than the 5 that --max-unreadable 0.01 allows."
        " Repair or replace them, or" in error
    )
    value = re.search(r"allow more \(--max-unreadable ([\d.]+)\)", error)[1]
    assert (
        main(
            [
                str(flat),
                "--out",
                str(out),
                "--workers",
                "1",
                "--num-shards",
                "4",
                "--max-unreadable",
                value,
            ]
        )
        == 0
    )
    assert "left out: 7 unreadable images" in capsys.readouterr().out


def test_what_is_not_read_or_asks_to_be_turned_is_told(tmp_path, capsys):
    """A phone's folder: HEIC is passed over and counted, AVIF is read, EXIF orientations are
    counted; classes are called 9 and 10."""
    folder = tmp_path / "phone"
    turned = Image.Exif()
    turned[0x0112] = 6
    for name in ("9", "10"):
        for n in range(4):
            add(folder / name / f"{n}.jpg", n)
        for n in range(4, 7):
            Image.open(folder / name / "0.jpg").save(folder / name / f"{n}.jpg", exif=turned)
        for other in ("a.HEIC", "b.heic", "c.cr2", "Thumbs.db", ".DS_Store", "notes.txt"):
            (folder / name / other).write_bytes(b"x")
        Image.new("RGB", (12, 10)).save(folder / name / "d.avif")
        Image.open(folder / name / "0.jpg").save(folder / name / "e.jfif", "JPEG")
    command = [
        str(folder),
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "1",
        "--num-shards",
        "2",
        "--class-order",
        "number",
    ]
    assert main(command) == 2
    assert (
        "6 of 24 images would be left out, more than the 5 that --max-unreadable 0.01 allows: 6"
        " files not" in capsys.readouterr().err
    )
    command += ["--max-unreadable", "0.25"]
    assert main(command) == 0
    told = [
        (
            "6 files not read as images: 2 .HEIC, 2 .cr2, 2 .heic; convert them to JPEG, with"
            " ImageMagick, say, in their folder: find . -iname '*.heic' -exec magick mogrify"
            " -format jpg {} +"
        ),
        "4 other files, no images: 2 .db, 2 .txt",
        (
            "6 of 18 images ask to be turned (EXIF orientation): --apply-exif turns them (published"
            " numbers do not)"
        ),
    ]
    printed = capsys.readouterr().out
    card = (tmp_path / "out" / "dataset.md").read_text().replace("\\", "")
    for line in told:
        assert f"{line}\n" in printed
        assert line in card
    assert json.loads((tmp_path / "out" / "_info.json").read_text())["asks_to_be_turned"] == 6
    assert json.loads((tmp_path / "out" / "_info.json").read_text())["class_names"] == ["9", "10"]
    command[2] = str(tmp_path / "upright")
    assert main([*command, "--apply-exif"]) == 0
    assert "ask to be turned" not in capsys.readouterr().out
    assert "asks_to_be_turned" not in (tmp_path / "upright" / "_info.json").read_text()


def test_all_that_is_read_is_taken_whatever_it_is_called(tmp_path, capsys):
    """What torchvision's ImageFolder takes and more, and files without a suffix by their first
    bytes."""
    folder = tmp_path / "odd"
    suffixes = (
        "jpg",
        "jpeg",
        "jfif",
        "png",
        "webp",
        "bmp",
        "gif",
        "tif",
        "ppm",
        "pgm",
        "avif",
        "jp2",
    )
    for number, name in enumerate("ab"):
        for suffix in suffixes:
            add(folder / name / "plain.jpg", number)
            image = Image.open(folder / name / "plain.jpg").convert(
                "L" if suffix == "pgm" else "RGB"
            )
            image.save(folder / name / f"{suffix}.{suffix}", None if suffix != "jfif" else "JPEG")
        (folder / name / "plain.jpg").rename(folder / name / "without")
        (folder / name / "LICENSE").write_text("a text")
    assert (
        main(
            [
                str(folder),
                "--out",
                str(tmp_path / "out"),
                "--workers",
                "1",
                "--num-shards",
                "1",
                "--val-fraction",
                "0",
            ]
        )
        == 0
    )
    assert len(open_split(tmp_path / "out", "train")) == 2 * (len(suffixes) + 1)
    assert "2 other files, no images: 2 without a suffix\n" in capsys.readouterr().out


def test_what_is_passed_over_is_counted_and_recorded(flat, tmp_path, capsys):
    """Images next to the class folders, and images of kinds that are not read."""
    (flat / "stray.png").write_bytes((flat / "ape" / "0.jpg").read_bytes())
    (flat / "ape" / "photo.heic").write_bytes(b"x")
    assert main([str(flat), "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    told = [
        "1 file not read as images: 1 .heic; convert",
        f"1 image beside the class folders, of no class: {flat}/stray.png; not used",
    ]
    printed = capsys.readouterr().out
    info = json.loads((tmp_path / "out" / "_info.json").read_text())
    for line in told:
        assert line in printed
        assert any(note.startswith(line) for note in info["origin"])
    assert (
        main(
            [str(flat), "--out", str(tmp_path / "other"), "--workers", "1", "--max-unreadable", "0"]
        )
        == 2
    )
    assert (
        "2 of 53 images would be left out, more than the 0 that --max-unreadable 0.0 allows"
        in capsys.readouterr().err
    )


def numbered(folder: Path, num_classes: int) -> list[str]:
    for number in range(num_classes):
        add(folder / str(number) / "0.jpg", number)
    return ["--workers", "1", "--num-shards", "1", "--val-fraction", "0"]


def test_classes_whose_names_are_labels_are_not_renumbered_silently(tmp_path, capsys):
    """ImageNet-V2's folders are called 0 to 999: sorted as text, 988 labels are others."""
    options = numbered(tmp_path / "v2", 12)
    assert main([str(tmp_path / "v2"), "--out", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert (
        "sorted as text label 2 is class 10, sorted as numbers it is class 2 (10 of 12 labels"
        " differ)" in error
    )
    for order, names in (
        ("number", [str(n) for n in range(12)]),
        ("text", sorted(str(n) for n in range(12))),
    ):
        out = tmp_path / order
        assert (
            main([str(tmp_path / "v2"), "--out", str(out), *options, "--class-order", order]) == 0
        )
        split = open_split(out, "train")
        assert split.class_names == names
        assert [split.key(i) for i in np.argsort(split.index["label"])] == [
            f"{name}_0" for name in names
        ]
    numbered(tmp_path / "ten", 10)
    assert main([str(tmp_path / "ten"), "--out", str(tmp_path / "plain"), *options]) == 0, (
        "both orders are one"
    )


def test_spellings_of_a_class_in_unicode(tmp_path, capsys):
    """macOS takes letters and accents apart: the same name, other bytes."""
    apart = "cafe\u0301"
    together = "caf\u00e9"
    for name in (f"train/{together}", "train/tea", f"val/{apart}", "val/tea"):
        add(tmp_path / "mixed" / name / "0.jpg")
    assert (
        main(
            [
                str(tmp_path / "mixed"),
                "--out",
                str(tmp_path / "out"),
                "--workers",
                "1",
                "--num-shards",
                "1",
            ]
        )
        == 0
    )
    assert sorted(open_split(tmp_path / "out", "val").index["label"].tolist()) == [0, 1]
    add(tmp_path / "mixed" / "train" / apart / "0.jpg")
    assert main([str(tmp_path / "mixed"), "--out", str(tmp_path / "other"), "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert "folders whose names are one in Unicode" in error
    assert str(apart.encode()) in error
    assert str(together.encode()) in error


def test_avif_where_pillow_cannot_read_it_is_an_error(flat, tmp_path, capsys, monkeypatch):
    """Elsewhere the same folder would give other shards."""
    (flat / "ape" / "x.avif").write_bytes(b"x")
    monkeypatch.setattr("data_prep.imagefolder.features.check", lambda feature: False)
    assert main([str(flat), "--out", str(tmp_path / "out"), "--workers", "1"]) == 2
    assert "ape/x.avif: an AVIF image, and this Pillow (" in (error := capsys.readouterr().err)
    assert "cannot read AVIF: pip install --upgrade 'pillow>=11.3'" in error


def test_a_class_of_other_images_only_is_told(flat, tmp_path, capsys):
    (flat / "phone").mkdir()
    (flat / "phone" / "1.heic").write_bytes(b"x")
    assert main([str(flat), "--out", str(tmp_path / "out"), "--workers", "1"]) == 2
    assert (
        "classes without images: phone (1 file not read as images: 1 .heic; convert them to JPEG"
        in capsys.readouterr().err
    )


def test_runs_without_torch(flat, tmp_path):
    """In the command and in its workers. (`sys.modules["torch"] = None` would be shorter, but scipy
    stumbles over it.)"""
    (tmp_path / "blocked" / "torch").mkdir(parents=True)
    (tmp_path / "blocked" / "torch" / "__init__.py").write_text(
        "raise ImportError('torch is blocked')"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'blocked'}:{os.getcwd()}"}
    assert (
        subprocess.run(
            [sys.executable, "-c", "import torch"], env=env, capture_output=True
        ).returncode
        == 1
    )
    out = str(tmp_path / "out")
    for command in (
        ["imagefolder", str(flat), "--out", out],
        ["index", out],
        [
            "digits",
            "--out",
            f"{out}-digits",
            "--image-size",
            "16",
            "--renderings",
            "1",
            "--val-renderings",
            "1",
        ],
    ):
        subprocess.run(
            [sys.executable, "-m", f"data_prep.{command[0]}", *command[1:], "--workers", "1"],
            env=env,
            check=True,
        )
    code = (
        "import sys; from vit.data.shards.data_set import open_split; open_split(sys.argv[1], "
        " 'val').read(0)"
    )
    subprocess.run([sys.executable, "-c", code, out], env=env, check=True)


def test_help_is_readable():
    done = subprocess.run(
        [sys.executable, "-m", "data_prep.imagefolder", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for flag in (
        "SOURCE",
        "--out ROOT",
        "--num-shards N",
        "--workers N",
        "--seed N",
        "--val-fraction F",
    ):
        assert flag in done.stdout
