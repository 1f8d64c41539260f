"""Test which files in a folder of images are used, are skipped and reported, or are unreadable."""

import json
import re

import pytest
from PIL import Image
from small_shards import add

from data_prep.imagefolder import main
from vit.data.storage.opening import open_split


def test_a_few_broken_images_are_skipped_and_the_required_limit_is_reported(flat, tmp_path, capsys):
    """By default, 5 of 51 images may be unreadable, although this is more than one percent. With
    the limit that the error suggests, 7 images may be unreadable."""
    out = tmp_path / "out"
    for n in range(5):
        (flat / "ape" / f"{n}.jpg").write_bytes(b"broken")
    assert main([str(flat), "--out", str(out), "--workers", "1", "--num-shards", "4"]) == 0
    assert "skipped: 5 unreadable images" in capsys.readouterr().out
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
    assert "skipped: 7 unreadable images" in capsys.readouterr().out


def test_skipped_images_and_exif_orientations_are_reported(tmp_path, capsys):
    """In a phone's folder, HEIC images are skipped and counted, AVIF images are read, and EXIF
    orientations are counted. The classes are named 9 and 10."""
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
        "6 of 24 images would be skipped, more than the 5 that --max-unreadable 0.01 allows: 6"
        " files not" in capsys.readouterr().err
    )

    command += ["--max-unreadable", "0.25"]
    assert main([*command, "--no-apply-exif"]) == 0
    lines = [
        (
            "6 files not read as images: 2 .HEIC, 2 .cr2, 2 .heic; install a reader (pip install"
            " pillow-heif), or convert them to JPEG in their folder, for instance with"
            " ImageMagick: find . -iname '*.heic' -exec magick mogrify -format jpg {} +"
        ),
        "4 other files, no images: 2 .db, 2 .txt",
        (
            "6 of 18 images ask to be turned (EXIF orientation): --apply-exif turns them (published"
            " numbers do not)"
        ),
    ]

    printed = capsys.readouterr().out
    card = (tmp_path / "out" / "dataset.md").read_text().replace("\\", "")
    for line in lines:
        assert f"{line}\n" in printed
        assert line in card
    assert json.loads((tmp_path / "out" / "_info.json").read_text())["exif_oriented"] == 6
    assert json.loads((tmp_path / "out" / "_info.json").read_text())["class_names"] == ["9", "10"]

    command[2] = str(tmp_path / "upright")
    assert main(command) == 0
    assert "ask to be turned" not in capsys.readouterr().out
    assert "exif_oriented" not in (tmp_path / "upright" / "_info.json").read_text()


def test_all_readable_images_are_used_regardless_of_their_names(tmp_path, capsys):
    """All files that torchvision's ImageFolder uses are included. Files without a suffix are
    recognized by their first bytes."""
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


def test_skipped_files_are_counted_and_recorded(flat, tmp_path, capsys):
    (flat / "stray.png").write_bytes((flat / "ape" / "0.jpg").read_bytes())
    (flat / "ape" / "photo.heic").write_bytes(b"x")
    assert main([str(flat), "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    lines = [
        "1 file not read as images: 1 .heic; install a reader (pip install",
        f"1 image beside the class folders, of no class: {flat}/stray.png; not used",
    ]
    printed = capsys.readouterr().out
    info = json.loads((tmp_path / "out" / "_info.json").read_text())
    for line in lines:
        assert line in printed
        assert any(note.startswith(line) for note in info["origin"])
    assert (
        main(
            [str(flat), "--out", str(tmp_path / "other"), "--workers", "1", "--max-unreadable", "0"]
        )
        == 2
    )
    assert (
        "2 of 53 images would be skipped, more than the 0 that --max-unreadable 0.0 allows"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("at", "others"),
    {
        "in": (),
        "in/train": ("in/val/a/1.jpg",),
        "in/val": ("in/train/a/1.jpg", "in/train/b/1.jpg"),
        "in/train/St. Bernard": ("in/train/a/1.jpg", "in/train/b/1.jpg"),
        "in/c": ("in/a/1.jpg", "in/b/1.jpg"),
        "in/a/older": ("in/a/1.jpg", "in/b/1.jpg"),
        "in/metadata.csv": ("in/a/1.jpg", "in/b/1.jpg"),
    }.items(),
)
def test_a_link_to_nowhere_is_not_taken_for_an_absent_folder(at, others, tmp_path, capsys):
    for name in others:
        add(tmp_path / name)
    (tmp_path / at).symlink_to("/nowhere/x")
    assert main([str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--workers", "1"]) == 2
    error = capsys.readouterr().err
    is_table = at.endswith(".csv")
    problem = "cannot be read (No such file" if is_table else "is a link to /nowhere/x, which does"
    assert f"{tmp_path / at}: {problem}" in error
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*.tar"))
