"""Test that the dataset card's numbers match the images, that its contact sheet shows the images,
and that rewriting the card does not change its bytes."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from servers import S3Server

from data_prep import imagefolder, index
from data_prep.card import main
from data_prep.write import card_page
from data_prep.write.card_page import CELL, GAP, MARGIN, TEXT_HEIGHT, shortened, write_card
from data_prep.write.card_text import escaped, histogram, markdown_table
from data_prep.write.samples import spread
from vit.data.storage.opening import open_split
from vit.system.files import ShardError

COLORS = {
    "blue": (20, 40, 220),
    "green": (30, 200, 60),
    "red | rouge": (230, 30, 20),
    "Übergröße_die_viel_zu_lang_ist": (120, 120, 120),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Prepare a dataset of plain-colored images of different sizes with lighter centers. One image
    is CMYK, and one is truncated."""
    folder = tmp_path_factory.mktemp("card")
    for name, color in COLORS.items():
        (folder / "images" / name).mkdir(parents=True)
        for n in range(12):
            image = Image.new("RGB", (30 + 5 * n, 60), color)
            image.paste(tuple(value // 2 for value in color), (0, 0, 10, 60))
            image.save(folder / "images" / name / f"{n}.jpg", quality=95)
    Image.new("CMYK", (50, 50), (200, 20, 10, 0)).save(folder / "images" / "blue" / "cmyk.jpg")
    whole = (folder / "images" / "blue" / "3.jpg").read_bytes()
    (folder / "images" / "blue" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "images" / "green" / "11.jpg").unlink()
    command = [
        str(folder / "images"),
        "--out",
        str(folder / "set"),
        "--workers",
        "1",
        "--max-unreadable",
        "0.1",
        "--val-fraction",
        "0.3",
    ]
    assert imagefolder.main(command) == 0
    return folder / "set"


@pytest.fixture
def root(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "set")
    return tmp_path / "set"


def test_control_characters_are_shown_as_escapes(root):
    info = json.loads((root / "_info.json").read_text())
    info["class_names"][0] = "esc\x1b]0;title\x07\u202e"
    info["source"] = "a\x9bb"
    (root / "_info.json").write_text(json.dumps(info))
    assert main([str(root)]) == 0
    text = (root / "dataset.md").read_text()
    assert r"| esc\x1b\]0;title\x07\u202e |" in text
    assert text.startswith("# a\\x9bb\n")
    assert text.replace("\n", "").isprintable()


def samples(root: Path, split: str) -> list[tuple[Image.Image, int, int]]:
    """Return (image, its bytes, label) for all samples, read with tarfile."""
    results = []
    for path in sorted(root.glob(f"{split}-*.tar")):
        with tarfile.open(path) as tar:
            contents = [tar.extractfile(member).read() for member in tar.getmembers()]
        results += [
            (Image.open(io.BytesIO(data)), len(data), int(label))
            for data, label in zip(contents[::2], contents[1::2], strict=True)
        ]
    return results


def table(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without the header rows."""
    lines = text.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines()
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
        if line.startswith("|")
    ][2:]


def test_the_card_describes_the_shards(made):
    text = (made / "dataset.md").read_text()
    train = samples(made, "train")
    val = samples(made, "val")
    assert (
        f"{len(train) + len(val)} images of 4 classes: {len(train)} in `train`, {len(val)} in"
        " `val`." in text
    )

    counts = {
        name: Counter(label for _, _, label in samples_of_split)
        for name, samples_of_split in (("train", train), ("val", val))
    }
    rows = table(text, "Splits")
    assert [row[:2] + row[5:] for row in rows] == [
        ["train", str(len(train)), "1"],
        ["val", str(len(val)), "0"],
    ]
    fewest, most = (choose(counts["val"].values()) for choose in (min, max))
    assert rows[1][2] == f"{fewest} to {most}"
    assert rows[0][4] == f"{sum(size for _, size, _ in train) / 1e6:,.1f}"
    expected = [
        [str(n), name.replace("|", r"\|"), str(counts["train"][n]), str(counts["val"][n])]
        for n, name in enumerate(sorted(COLORS))
    ]
    assert table(text, "Classes") == expected

    for row, values in zip(
        table(text, "Sizes"),
        (
            [image.width for image, *_ in train + val],
            [image.height for image, *_ in train + val],
            [min(image.size) for image, *_ in train + val],
            [size for _, size, _ in train + val],
        ),
        strict=True,
    ):
        ordered = sorted(values)
        assert [row[1], row[3], row[5]] == [
            f"{value:,}" for value in (ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1])
        ], row[0]
    assert "| CMYK JPEG | 1 |" in text
    assert re.search(r"\| train \| [^|]+ \| 1 \|", text)
    assert "[quarantine.jsonl](quarantine.jsonl)" in text
    assert "`python -m data_prep.imagefolder`" in text
    assert "| val_fraction | 0.3 |" in text


def test_colors_equal_those_of_the_pixels(made):
    pixels = [
        np.asarray(image.convert("RGB"), np.float64).reshape(-1, 3) / 255
        for image, *_ in samples(made, "train")
    ]
    mean = np.mean([image.mean(0) for image in pixels], 0)
    std = np.sqrt(np.mean([((image - mean) ** 2).mean(0) for image in pixels], 0))
    rows = table((made / "dataset.md").read_text(), "Colors")
    assert [[float(cell) for cell in row[1:]] for row in rows] == [
        [pytest.approx(x, abs=6e-4) for x in values] for values in (mean, std)
    ]


def test_the_sheet_shows_every_class(made):
    with Image.open(made / "contact_sheet.png") as opened:
        sheet = opened.convert("RGB")
    assert sheet.width == 2 * MARGIN + 10 * (CELL + GAP) - GAP  # 10 images of each class
    for row, name in enumerate(sorted(COLORS)):
        top = MARGIN + row * (CELL + TEXT_HEIGHT + GAP)
        shown = 0
        for column in range(10):
            left = MARGIN + column * (CELL + GAP)
            middle = sheet.getpixel((left + CELL // 2, top + CELL // 2))
            text = np.asarray(
                sheet.crop((left, top + CELL + 1, left + CELL, top + CELL + TEXT_HEIGHT - 1))
            )
            if middle == (255, 255, 255):
                assert text.min() == 255
                continue
            shown += 1
            assert text.min() < 100
            if max(abs(a - b) for a, b in zip(middle, COLORS[name], strict=True)) > 12:
                assert name == "blue"  # the CMYK image
        assert shown == min(10, Counter(label for *_, label in samples(made, "train"))[row])


def test_the_readme_has_the_words_of_earlier_versions(made):
    words = "with an index beside them; `python -m data_prep.card` writes dataset.md, which tells"
    assert words in (made / "README.md").read_text()


def test_writing_the_card_again_gives_the_same_bytes(root, capsys):
    before = {name: (root / name).read_bytes() for name in ("dataset.md", "contact_sheet.png")}
    for name in before:
        (root / name).unlink()
    assert main([str(root)]) == 0
    assert capsys.readouterr().out == f"card written: see {root}/contact_sheet.png and dataset.md\n"
    assert {name: (root / name).read_bytes() for name in before} == before


def test_shards_of_other_tools_get_a_card(tmp_path):
    root = tmp_path / "foreign"
    root.mkdir()
    with tarfile.open(root / "train-000.tar", "w") as tar:
        for n in range(130):
            encoded = io.BytesIO()
            Image.new("L" if n % 2 else "RGB", (8 + n, 5)).save(encoded, "PNG" if n % 3 else "JPEG")
            for name, data in (
                (f"k{n:03d}.{'png' if n % 3 else 'jpg'}", encoded.getvalue()),
                (f"k{n:03d}.cls", b"%d" % n),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    assert index.main([str(root), "--workers", "1"]) == 0
    write_card(root)
    text = (root / "dataset.md").read_text()
    assert "130 images of 130 classes" in text
    assert "another program wrote these shards" in text
    assert table(text, "Classes")[129] == ["129", "class 129", "1"]
    with Image.open(root / "contact_sheet.png") as sheet:
        assert sheet.size == (
            2 * MARGIN + 10 * (CELL + GAP) - GAP,
            2 * MARGIN + 6 * (CELL + TEXT_HEIGHT + GAP) - GAP,
        )


def test_a_dataset_in_a_store_gets_a_card(made, tmp_path):
    import fsspec

    with S3Server() as server:
        bucket = server.new_bucket()
        fsspec.filesystem("s3").put(
            [
                str(path)
                for path in made.iterdir()
                if path.name not in ("dataset.md", "contact_sheet.png")
            ],
            f"{bucket}/set/",
        )
        write_card(f"{bucket}/set")
        objects = server.objects(bucket)
    for name in ("dataset.md", "contact_sheet.png"):
        assert objects[f"set/{name}"] == (made / name).read_bytes()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda root: shutil.rmtree(root), "no such directory"),
        (lambda root: (root / "_info.json").unlink(), "no _info.json"),
        (
            lambda root: (root / "train.index.npy").unlink(),
            "train.index.npy: no such file; run `python -m data_prep.index",
        ),
        (lambda root: (root / "train-00003.tar").unlink(), "train-00003.tar"),
        (
            lambda root: (root / "train-00003.tar").write_bytes(
                bytes((root / "train-00003.tar").stat().st_size)
            ),
            "image 15 of train: cannot decode",
        ),
    ],
)
def test_a_failed_drawing_prints_one_line_and_keeps_the_old_card(root, prepare, message, capsys):
    prepare(root)
    before = {path.name: path.stat().st_mtime_ns for path in root.glob("*")}
    assert main([str(root)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: ")
    assert message in error
    assert {path.name: path.stat().st_mtime_ns for path in root.glob("*")} == before


def test_a_failed_card_keeps_the_old_files(root, monkeypatch):
    def card_text(card):
        raise ShardError("an image of the color statistics: cannot decode")

    monkeypatch.setattr(card_page, "card_text", card_text)
    before = {path.name: path.stat().st_mtime_ns for path in root.glob("*")}
    with pytest.raises(ShardError):
        write_card(root)
    assert {path.name: path.stat().st_mtime_ns for path in root.glob("*")} == before


# ---- the parts of the card -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_rows", "num_chosen"), [(0, 3), (1, 1), (10, 3), (10, 10), (10, 99), (1_281_167, 1000)]
)
def test_spread_takes_one_item_of_each_interval(num_rows, num_chosen):
    rows = spread(num_rows, num_chosen)
    assert len(rows) == min(num_rows, num_chosen)
    if num_chosen < num_rows:
        assert [row * num_chosen // num_rows for row in rows] == pytest.approx(
            range(num_chosen), abs=1
        )
    assert rows == sorted(set(rows))
    assert all(0 <= row < num_rows for row in rows)
    assert spread(num_rows, num_chosen) == rows


def test_spread_is_not_regular():
    steps = np.diff(spread(100_000, 1000))
    assert len(set(steps.tolist())) > 50
    assert spread(100_000, 10, 1) != spread(100_000, 10, 2)


def test_shortened_keeps_both_ends():
    def fits(text: str) -> bool:
        return len(text) <= 8

    assert shortened("zebra", fits) == "zebra"
    assert shortened("a\n b", fits) == "a b"
    short = shortened("a_very_long_name_indeed", fits)
    assert len(short) == 8
    assert re.fullmatch(r"a_ve…eed", short)
    assert shortened("ab", lambda text: len(text) <= 1) == "…"
    assert shortened("", fits) == ""


def test_names_are_escaped_in_markdown():
    assert escaped("a|b *c* `d` <e>\n[f]") == r"a\|b \*c\* \`d\` \<e> \[f\]"
    assert escaped("snake_case and __init__") == r"snake_case and \_\_init\_\_"
    assert markdown_table(("a", "b"), [("x|y", 1)]) == "| a | b |\n|---|---:|\n| x\\|y | 1 |"


def test_the_histogram_counts_every_image():
    lines = histogram(np.array([1, 20, 20, 20, 40, 65535])).splitlines()
    assert len(lines) == 16  # from the first to the last nonempty bin
    assert [float(line.split()[3]) for line in lines if not line.endswith("0.0 %")] == [
        16.7,
        50.0,
        16.7,
        16.7,
    ]
    assert max(lines, key=lambda line: line.count("█")).split()[0] == "16"


def test_images_are_chosen_from_all_shards(made):
    split = open_split(made, "train")
    chosen = {split.where(row) for row in spread(split.num_samples, 20)}
    assert chosen == {f"{made}/{name}" for name in split.filenames}
    info = json.loads((made / "_info.json").read_text())
    assert len(split.filenames) == len(info["splits"]["train"]["filenames"])
