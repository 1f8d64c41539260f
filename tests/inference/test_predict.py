"""Test that `launch/predict.py` makes the same predictions as `vit.load`, writes its rows in the
order of the arguments, and names unreadable files."""

from __future__ import annotations

import csv
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from decoding import pixels
from extras.deleted_extras import DELETED, needs
from PIL import Image
from processes import run, run_here

import vit
from vit.inference.inputs import ImagePlace, find_inputs
from vit.inference.output import csv_file
from vit.inference.predict import predict
from vit.system.redact import escape_to_one_line

IN_ORDER = [
    *("a/alpha.png", "a/cmyk.jpg", "a/turned.jpg", "b/gray16.png", "b/smaller_than_a_patch.png"),
    *("b/without_suffix", "broken/cut.jpg", "broken/empty.jpg", "broken/line.png"),
    "broken/page.jpg",
]
BROKEN = {
    "broken/cut.jpg": "cannot decode 400 bytes: ",
    "broken/empty.jpg": "cannot decode 0 bytes: 0 bytes",
    "broken/line.png": "9000000 x 1 pixels are too elongated",
    "broken/page.jpg": "not an image but a web page",
}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def predicted(tiny_run, odd_files, tmp_path_factory) -> SimpleNamespace:
    """Run the command on a folder that contains images and a tar file, and return all outputs.

    A contact sheet is written only if the extra `report` is installed.
    """
    out = tmp_path_factory.mktemp("out")
    flags = ["--csv", out / "out.csv"]
    flags += [] if "report" in DELETED else ["--sheet", out / "sheet.png", "--attention"]
    done = run("launch/predict.py", "--checkpoint", tiny_run, odd_files, *flags, "--top", 2)
    return SimpleNamespace(done=done, out=out)


def test_each_image_is_predicted_as_it_is_alone(predicted, tiny_run, odd_files):
    trained = vit.load(tiny_run)
    rows = rows_of(predicted.out / "out.csv")
    # Files directly in a folder come before files in its subfolders.
    names = ["c.tar/x/one.jpg", "c.tar/x/two.jpg", *IN_ORDER]
    assert [row["file"] for row in rows] == [f"{odd_files}/{name}" for name in names]
    for row, name in zip(rows, names, strict=True):
        source = {"c.tar/x/one.jpg": "a/cmyk.jpg", "c.tar/x/two.jpg": "broken/cut.jpg"}
        alone = source.get(name, name)
        if alone in BROKEN:
            assert BROKEN[alone] in row["problem"]
            assert not row["class_1"]
            assert not row["probability_1"]
            continue
        expected = trained.classify(odd_files / alone, top=2)
        assert not row["problem"]
        assert [row["class_1"], row["class_2"]] == [class_name for class_name, _ in expected]
        probabilities = [float(row["probability_1"]), float(row["probability_2"])]
        assert probabilities == pytest.approx([value for _, value in expected], abs=2e-6)


def test_unreadable_files_are_named_and_counted(predicted, odd_files):
    done = predicted.done
    assert done.returncode == 1
    for name, reason in BROKEN.items():
        assert f"skipped: {odd_files}/{name}: " in done.stderr
        assert reason in done.stderr
    assert "7 of 12 images predicted by" in done.stdout
    assert "last.safetensors (step 3, weights not averaged); 5 could not" in done.stdout
    assert "; 5 could not be read and were skipped\n" in done.stdout
    assert "note: 2 other files skipped: 1 .cls, 1 .txt\n" in done.stderr
    assert done.stdout.count("alpha.png") == 1
    if "report" not in DELETED:
        assert pixels(predicted.out / "sheet.png").shape[0] > 400
    sheets = set[str]() if "report" in DELETED else {"sheet.png"}
    assert {path.name for path in predicted.out.iterdir()} == {"out.csv"} | sheets


@pytest.mark.slow
def test_class_names_that_stdout_cannot_encode_are_escaped(
    tiny_run, odd_files, tmp_path, monkeypatch
):
    names = ["猫", "Käse & Öl", "ひ"]
    (tmp_path / "names.txt").write_text("\n".join(names), "utf-8")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    flags = ["--csv", tmp_path / "out.csv", "--classes", tmp_path / "names.txt"]
    image = odd_files / "a" / "cmyk.jpg"
    done = run("launch/predict.py", "--checkpoint", tiny_run, image, *flags, cold=True)
    assert done.returncode == 0, done.stderr
    [row] = rows_of(tmp_path / "out.csv")
    assert {row["class_1"], row["class_2"], row["class_3"]} == set(names)
    assert "\\u732b" in done.stdout
    assert done.stdout.isascii()


def test_workers_and_batches_change_nothing(tiny_run, odd_files):
    trained = vit.load(tiny_run)
    places = find_inputs([str(odd_files)]).places * 3
    alone = list(predict(trained, places, 3, batch_size=36, num_workers=0))
    parts = list(predict(trained, places, 3, batch_size=5, num_workers=2, num_pixels=7))
    assert [part.first for part in parts] == list(range(0, 36, 5))
    assert len(alone) == 1
    problems = {number: reason for part in parts for number, reason in part.problems.items()}
    assert problems == alone[0].problems
    assert len(problems) == 15
    good = [number for number in range(36) if number not in problems]
    assert torch.equal(torch.cat([part.labels for part in parts])[good], alone[0].labels[good])
    probabilities = torch.cat([part.probabilities for part in parts])
    # Kernels sum batches of 5 and of 36 images in different orders.
    torch.testing.assert_close(
        probabilities[good], alone[0].probabilities[good], rtol=1e-5, atol=1e-6
    )
    saved = torch.cat([part.pixels for part in parts if part.pixels is not None])
    assert len(saved) == 7
    assert torch.equal(saved[3], trained.preprocess.pixels(places[3].path))


def test_a_list_on_stdin_may_name_a_missing_file(tiny_run, odd_files, tmp_path, monkeypatch, capfd):
    name = os.fsdecode(b"not utf-8 \xff.png")
    Image.new("RGB", (9, 9)).save(tmp_path / "x.png")
    os.rename(tmp_path / "x.png", tmp_path / name)
    content = f"{odd_files}/a/alpha.png\r\n{tmp_path}/gone.jpg\n\n{tmp_path}/{name}\n"
    raw = io.BytesIO(os.fsencode(content))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=raw))
    out = tmp_path / "out.csv"
    from vit.distributed import exit

    left = []
    monkeypatch.setattr(exit, "leave", left.append)
    run_here("launch/predict.py", "--checkpoint", tiny_run, "-", "--csv", out, "--device", "cpu")
    rows = rows_of(out)
    expected = [f"{odd_files}/a/alpha.png", f"{tmp_path}/gone.jpg", f"{tmp_path}/{name}"]
    assert [row["file"] for row in rows] == expected
    assert rows[1]["problem"] == "cannot be read (No such file or directory)"
    assert left == [1]
    assert "not utf-8" in capfd.readouterr().out


def test_a_list_may_separate_names_by_zero_bytes(tmp_path):
    with_line_end = tmp_path / "a\nb.jpg"
    inputs = find_inputs(["-"], io.BytesIO(os.fsencode(f"{with_line_end}\0c.jpg\0")))
    assert inputs.places == [ImagePlace(str(with_line_end)), ImagePlace("c.jpg")]


def test_circular_links_do_not_loop(odd_files, tmp_path):
    (tmp_path / "a").symlink_to(odd_files / "a")
    (tmp_path / "again").symlink_to(tmp_path)
    inputs = find_inputs([str(tmp_path)])
    assert [place.name for place in inputs.places] == [
        f"{tmp_path}/{name}" for name in IN_ORDER[:3]
    ]


def test_an_unfinished_csv_leaves_no_file(tmp_path):
    path = tmp_path / "out.csv"
    path.write_text("before")

    def write_and_stop() -> None:
        with csv_file(path, 2) as writer:
            writer.writerow(["a"] * 100_000)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert [file.name for file in tmp_path.iterdir()] == ["out.csv"]
    assert path.read_text() == "before"


def test_many_images_are_summed_up_by_class(tiny_run, shards, tmp_path, capfd):
    out = tmp_path / "out.csv"
    folder = shards.parent / "images" / "val"
    flags = ["--csv", out, "--device", "cpu", "--classes", tmp_path / "names.txt"]
    (tmp_path / "names.txt").write_text("red\ngreen\nblue\n")
    run_here("launch/predict.py", "--checkpoint", tiny_run, folder, *flags)
    counts = [row["class_1"] for row in rows_of(out)]
    assert len(counts) == 23
    printed = capfd.readouterr().out
    for name in set(counts):
        line = next(line for line in printed.splitlines() if line.startswith(name))
        share = 100 * counts.count(name) / 23
        assert line.split()[1:4] == [str(counts.count(name)), f"{share:.1f}", "%"]


def test_damaged_files_in_a_folder_or_a_list_are_skipped(odd_files, tmp_path):
    """A truncated tar and a symbolic link that points to itself must each count as one problem. All
    other images must be read."""
    image = (odd_files / "a" / "cmyk.jpg").read_bytes()
    (tmp_path / "z").mkdir()
    for name in ("a.jpg", "z/b.jpg"):
        (tmp_path / name).write_bytes(image)
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "cut.tar").write_bytes((odd_files / "c.tar").read_bytes()[:700])
    names = ["a.jpg", "cut.tar", "loop.jpg", "z/b.jpg"]
    listed = "".join(f"{tmp_path / name}\n" for name in names)
    for inputs in (find_inputs([str(tmp_path)]), find_inputs("-", io.BytesIO(listed.encode()))):
        assert [place.name for place in inputs.places] == [str(tmp_path / name) for name in names]
        for place, message in zip(
            inputs.places, ("", "truncated: ", "Too many levels", ""), strict=True
        ):
            if message:
                with pytest.raises(ValueError, match=message):
                    place.read()
            else:
                assert place.read() == image
    with pytest.raises(ValueError, match=r"cut.tar: truncated"):
        find_inputs([str(tmp_path / "cut.tar")])


def test_file_names_cannot_control_the_terminal():
    """Control characters must be escaped, but letters of all languages must remain readable."""
    assert escape_to_one_line("a\x1b[31m\n\r\udcff\u202e.jpg") == r"a\x1b[31m\n\r\udcff\u202e.jpg"
    assert escape_to_one_line("größe 猫\u202fAM.jpg") == "größe 猫\u202fAM.jpg"


@needs("report")
def test_an_unwritable_sheet_is_reported_before_any_prediction(tiny_run, odd_files, tmp_path):
    (tmp_path / "taken").touch()
    flags = ["--csv", tmp_path / "out.csv", "--sheet", tmp_path / "taken" / "sheet.png"]
    image = odd_files / "a" / "alpha.png"
    with pytest.raises(ValueError, match=r"--sheet .*sheet.png: cannot be written"):
        run_here("launch/predict.py", "--checkpoint", tiny_run, image, *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_sheet_without_the_report_is_rejected_before_any_prediction(
    tiny_run, odd_files, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "vit.extras.report.model_figures", None)
    flags = ["--csv", tmp_path / "out.csv", "--sheet", tmp_path / "sheet.png"]
    image = odd_files / "a" / "alpha.png"
    with pytest.raises(ValueError, match=r"--sheet needs vit/extras/report.*, which is not inst"):
        run_here("launch/predict.py", "--checkpoint", tiny_run, image, *flags)
    assert not list(tmp_path.iterdir())


def test_unsupported_photos_are_listed_with_a_command_that_converts_them(tmp_path):
    for name in ("a.png", "b.HEIC", "c.txt", "d.NEF"):
        (tmp_path / name).touch()
    assert find_inputs([str(tmp_path)]).summary() == (
        "3 other files skipped: 1 .HEIC, 1 .NEF, 1 .txt; install a reader (pip install"
        " pillow-heif), or convert them to JPEG in their folder, for instance with ImageMagick:"
        " find . -iname '*.heic' -exec magick mogrify -format jpg {} +"
    )
