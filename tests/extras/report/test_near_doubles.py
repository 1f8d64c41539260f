"""Test that duplicates are found after re-encoding or brightening, and that similarities are
exact."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from extras.report.browser import faults_in, needs_chromium
from PIL import Image, ImageEnhance
from processes import TINY, run_here, write_config

from data_prep import imagefolder
from vit.extras.report.source import ReportSource
from vit.extras.report.training_images import doubles as doubles_module
from vit.extras.report.training_images.doubles import (
    find_duplicates,
    find_near_doubles,
    nearest,
    pooled_features,
    whiten_,
)

CPU = torch.device("cpu")
NUM_IMAGES = 90


def ignore(done: int, total: int) -> None:
    pass


def draw(rng: np.random.Generator) -> Image.Image:
    """Return an image of randomly colored patches that does not resemble any other image."""
    patches = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(patches).resize((48, 48), Image.Resampling.BICUBIC)


def encode(image: Image.Image, quality: int = 92) -> bytes:
    data = io.BytesIO()
    image.save(data, "JPEG", quality=quality)
    return data.getvalue()


COPIES = {
    "encoded": lambda image: encode(image, 60),
    "brighter": lambda image: encode(ImageEnhance.Brightness(image).enhance(1.15)),
    "cut": lambda image: encode(image.crop((1, 1, 47, 47)).resize((48, 48))),
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Path:
    """Train for two epochs on data with planted duplicates.

    Images 0 to 8 have a copy with another class in the training set. Images 9 to 17 have a copy in
    the evaluation set. Image 18 has a byte-identical copy.
    """
    folder = tmp_path_factory.mktemp("planted")
    rng = np.random.default_rng(0)

    def write(split: str, label: int, name: str, data: bytes) -> None:
        path = folder / "images" / split / f"class{label}" / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    for number in range(NUM_IMAGES):
        image = draw(rng)
        write("train", number % 3, f"image{number:02}", encode(image))
        if number < 18:
            kind = list(COPIES)[number % 3]
            split = "train" if number < 9 else "val"
            write(split, (number + 1) % 3, f"{kind}{number:02}", COPIES[kind](image))
        if number == 18:
            write("train", number % 3, f"same{number:02}", encode(image))
    for number in range(12):
        write("val", number % 3, f"other{number:02}", encode(draw(rng)))
    arguments = [str(folder / "images"), "--out", str(folder / "shards"), "--num-shards", "1"]
    assert imagefolder.main([*arguments, "--workers", "1"]) == 0
    config = write_config(folder, folder / "shards", steps=16)
    run_here("launch/train.py", "--config", config, f"run.dir={folder / 'run'}", *TINY)
    return folder / "run"


def test_exactly_the_planted_copies_are_found(planted, monkeypatch):
    # The images must span several blocks, the last of which contains images from both splits.
    monkeypatch.setattr(doubles_module, "BLOCK", 32)
    source = ReportSource(planted, CPU)
    train = source.train_set.split
    val = source.val_split
    duplicates = find_duplicates(train, val)
    assert [{train.key(n)[7:] for n in same} for same in duplicates.groups] == [
        {"image18", "same18"}
    ]
    features = pooled_features(source, ignore)
    doubles = find_near_doubles(source, features, duplicates, 0.75, ignore)
    pairs = {frozenset(train.key(n)[7:] for n in pair[:2]) for pair in doubles.pairs}
    expected = {frozenset({f"image{n:02}", f"{list(COPIES)[n % 3]}{n:02}"}) for n in range(9)}
    assert pairs == expected, (
        "recall and precision must be 1, and the report lists the identical file elsewhere"
    )
    assert {(train.key(a)[7:], val.key(b)[7:]) for a, b, _ in doubles.also_evaluated} == {
        (f"image{n:02}", f"{list(COPIES)[n % 3]}{n:02}") for n in range(9, 18)
    }


def test_similarities_equal_those_over_all_pairs(monkeypatch):
    monkeypatch.setattr(doubles_module, "BLOCK", 7)
    torch.manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(31, 5), dim=1)
    similarity, neighbors = nearest(features, 23, CPU, ignore)
    for own in range(31):
        similarities = {n: float(features[own] @ features[n]) for n in range(23) if n != own}
        best = max(similarities, key=lambda n: similarities[n])
        assert int(neighbors[own]) == best
        assert float(similarity[own]) == pytest.approx(similarities[best], abs=1e-6)


def test_whitened_features_have_equal_variance(monkeypatch):
    monkeypatch.setattr(doubles_module, "RIDGE", 0.0)
    monkeypatch.setattr(torch.nn.functional, "normalize", lambda rows, dim: rows)
    torch.manual_seed(0)
    features = torch.randn(500, 6) @ torch.randn(6, 6) * torch.tensor([9, 1, 1, 1, 1, 0.1]) + 5
    whiten_(features)
    torch.testing.assert_close(features.T @ features / 500, torch.eye(6), atol=1e-3, rtol=0)


def test_the_page_and_the_table_show_both_images(planted, capsys):
    run_here("launch/samples.py", planted, "--near", "0.75")
    assert "9 pairs of training images, 9 evaluation images" in capsys.readouterr().out
    page = (planted / "report" / "samples.html").read_text()
    near = page[page.index('id="near"') :]
    assert near.count('<div class="twins">') == 18
    assert near.count("<img") == 36
    with (planted / "report" / "samples.csv").open(newline="") as file:
        rows = {row["key"][7:]: row for row in csv.DictReader(file)}
    trained_on = [n for n in range(NUM_IMAGES) if f"image{n:02}" in rows]
    assert len(trained_on) > NUM_IMAGES // 2, (
        "most images must have a line, but not images that were never seen"
    )
    for number in trained_on:
        row = rows[f"image{number:02}"]
        if number < 18:
            assert row["near_to"].endswith(f"{list(COPIES)[number % 3]}{number:02}")
            assert float(row["near_cosine"]) >= 0.75
        assert row["near_split"] == ("train" if number < 9 else "val" if number < 18 else "")


@pytest.mark.slow
@needs_chromium
def test_a_browser_shows_the_page_without_faults(planted, tmp_path):
    run_here("launch/samples.py", planted, "--near", "0.75")
    page = planted / "report" / "samples.html"
    assert faults_in([page], tmp_path) == {"samples.html": []}


FAULTS = {
    "the curves of the report": (
        "figure svg { min-width: 40rem; }",
        r'<svg curve> "" leaves its box <figure sample>',
    ),
    "a card over the next card": (
        ".sample:first-child { margin-right: -3rem; }",
        r"<figure sample> .* overlaps <figure sample>",
    ),
    "a wide page": (".samples { min-width: 2000px; }", r"the page is 2\d+ px wide, the window"),
    "a cut text": ("figcaption { height: 1rem; overflow: hidden; }", r"<figcaption> .* is cut"),
    "a text that cannot wrap": (
        ".lede { white-space: nowrap; }",
        r"<p lede> .* has text that leaves its box",
    ),
    "a tiny text": ("figcaption small { font-size: 6px; }", r"<small> .* has tiny text"),
    "a stretched picture": (
        ".sample img { object-fit: fill; height: 50px; }",
        r'<img> "" is stretched by 2\.56',
    ),
    "a hidden part": (
        "nav .inner { background: none; } nav a { min-width: 20rem; }",
        r"<div inner> .* scrolls without a visible sign",
    ),
}


@pytest.mark.slow
@needs_chromium
def test_planted_faults_are_found(planted, tmp_path):
    run_here("launch/samples.py", planted, "--near", "0.75")
    html = (planted / "report" / "samples.html").read_text()
    pages = {}
    for name, (rule, message) in FAULTS.items():
        pages[f"{name}.html"] = html.replace("</style>", f"{rule}</style>"), message
    broken = html.replace("data:image/png;base64,", "data:image/png;base64,AAAA", 1)
    pages["broken picture.html"] = broken, r'<img> "" is not loaded'
    for name, (content, _) in pages.items():
        (tmp_path / name).write_text(content)
    found = faults_in([tmp_path / name for name in pages], tmp_path)
    for name, (_, message) in pages.items():
        assert any(re.fullmatch(rf"\d+ px: {message}.*", fault) for fault in found[name]), (
            name,
            found[name],
        )


def test_a_model_without_a_linear_head_is_refused(planted):
    source = ReportSource(planted, CPU)
    source.model.head = torch.nn.ReLU()
    with pytest.raises(ValueError, match="VisionTransformer ends in ReLU"):
        pooled_features(source, ignore)
