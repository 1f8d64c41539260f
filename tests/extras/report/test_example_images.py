"""Test that the statistics of each training image match a manual count, and are shown on the page
and in the files."""

from __future__ import annotations

import csv
import math
import re
import shutil
from collections import defaultdict
from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import TINY, run_here, write_config

from data_prep import imagefolder
from vit.config.io import load_config
from vit.data.open_data import open_split, open_train_set
from vit.extras.report.replay import Replay
from vit.extras.report.source import ReportSource
from vit.extras.report.training_images.curves import read_curves
from vit.extras.report.training_images.doubles import find_duplicates

CPU = torch.device("cpu")
STEPS = 15
HOSTILE = "a<img_src=x_onerror=alert(1)>&"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards) -> Path:
    """Train for three epochs on 60 images, with mixing in two of the epochs.

    One image has a duplicate with a malicious file name in another class, and another image has a
    duplicate in the evaluation set.
    """
    folder = tmp_path_factory.mktemp("trained")
    images = shutil.copytree(shards.parent / "images", folder / "images")
    train = images / "train"
    (train / "class1" / "0001.jpg").unlink()
    shutil.copyfile(train / "class0" / "0000.jpg", train / "class1" / f"{HOSTILE}.jpg")
    shutil.copyfile(train / "class2" / "0002.jpg", images / "val" / "class2" / "0002.jpg")
    arguments = [
        str(images),
        "--out",
        str(folder / "shards"),
        "--num-shards",
        "2",
        "--workers",
        "1",
    ]
    assert imagefolder.main(arguments) == 0
    config = write_config(folder, folder / "shards", steps=STEPS)
    arguments = ["--config", str(config), f"run.dir={folder / 'run'}", *TINY]
    mixing = ["augment.mixup_mode=elem", "augment.mix_prob=0.5", "augment.mixup_off_epoch=2"]
    run_here("launch/train.py", *arguments, *mixing)
    return folder / "run"


def by_hand(source: ReportSource) -> dict[str, dict[str, float]]:
    """Return the expected statistics for each key, computed from the rows of all steps."""
    seen = defaultdict(list)
    for step in range(1, STEPS + 1):
        for piece in Replay(source, step).pieces():
            for row in piece.rows:
                weight = 2 * row.own_share - 1
                if weight > 0:
                    seen[row.key].append((Replay(source, step).epoch, weight, row))
    statistics = {}
    for key, rows in seen.items():
        total = sum(weight for _, weight, _ in rows)
        right = [epoch for epoch, _, row in rows if row.margin > 0]
        outcomes = [row.margin > 0 for _, _, row in rows]
        pairs = pairwise(outcomes)
        statistics[key] = {
            "mean_margin": sum(weight * row.margin for _, weight, row in rows) / total,
            "mean_loss": sum(weight * row.loss for _, weight, row in rows) / total,
            "epochs_seen": len(rows),
            "first_right_epoch": min(right, default=math.nan),
            "times_forgotten": sum(before and not now for before, now in pairs),
        }
    return statistics


def test_the_table_equals_a_count_by_hand(trained, capsys):
    run_here("launch/samples.py", trained)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == [
        str(trained / "report" / name) for name in ("samples.html", "samples.csv")
    ]
    with (trained / "report" / "samples.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    margins = [float(row["mean_margin"]) for row in rows]
    assert margins == sorted(margins)
    expected = by_hand(ReportSource(trained, CPU))
    assert {row["key"] for row in rows} == expected.keys()
    for row in rows:
        for name, value in expected[row["key"]].items():
            number = float(row[name] or "nan")
            assert number == pytest.approx(value, abs=1e-4, nan_ok=True), (row["key"], name)


def test_equal_images_with_different_labels_are_found(trained):
    source = ReportSource(trained, CPU)
    split = source.train_set.split
    duplicates = find_duplicates(split, source.val_split)
    assert [{split.key(i) for i in same} for same in duplicates.groups] == [
        {"class0_0000", f"class1_{HOSTILE}"}
    ]
    [(train, val)] = duplicates.also_evaluated
    assert (split.key(train), source.val_split.key(val)) == ("class2_0002", "class2_0002")


def test_the_labels_are_those_of_training(trained, tmp_path):
    """The page and the table must show the labels of `data.relabel`, to which the margins refer."""
    copy = shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "new.txt").write_text("class0_0003,class=class2\n")
    path = copy / "config.yaml"
    new = f"  relabel: {tmp_path / 'new.txt'}"
    text, count = re.subn(r"^  relabel: .*$", new, path.read_text(), flags=re.MULTILINE)
    assert count == 1
    path.write_text(text)
    run_here("launch/samples.py", copy)
    with (copy / "report" / "samples.csv").open(newline="") as file:
        rows = {row["key"]: row for row in csv.DictReader(file)}
    others = {row["class_name"] for key, row in rows.items() if key[:6] == "class0"} - {"class2"}
    assert (rows["class0_0003"]["label"], rows["class0_0003"]["class_name"]) == ("2", "class2")
    assert others == {"class0"}
    page = (copy / "report" / "samples.html").read_text()
    cards = [card for card in page.split("<figure") if "<code>class0_0003<" in card]
    assert all("label <b>class2</b>" in card for card in cards)


def test_the_page_is_self_contained_and_runs_no_foreign_script(trained):
    run_here("launch/samples.py", trained)
    page = (trained / "report" / "samples.html").read_text()
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert HOSTILE not in page
    assert escape(HOSTILE) in page
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(text.startswith(("#", "data:image/png;base64,")) for text in sources)
    # The page must show duplicates with different labels, and duplicates in the evaluation set.
    assert page.count('<div class="twins">') == 1
    assert "Training images that are also validation images" in page


def test_the_worst_keys_can_be_excluded_from_the_next_training(trained, tmp_path):
    path = tmp_path / "worst.txt"
    run_here("launch/samples.py", trained, "--worst", 7, "--exclude", path)
    source = ReportSource(trained, CPU)
    curves = read_curves(source)
    keys = [source.train_set.split.key(int(sample)) for sample in curves.suspects[:7]]
    assert path.read_text().splitlines() == keys
    config = load_config(trained / "config.yaml", [f"data.exclude={path}"])
    left = open_train_set(config, open_split(config, "val"))
    assert left.num_draws == source.train_set.num_draws - 7


def test_a_run_without_sample_losses_is_refused(trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(copy / "samples")
    with pytest.raises(ValueError, match=r"this run recorded no per-image losses"):
        read_curves(ReportSource(copy, CPU))


def test_margins_of_repeated_images_in_an_epoch_are_averaged(tmp_path, shards):
    config = write_config(tmp_path, shards, steps=5)
    arguments = ["--config", str(config), f"run.dir={tmp_path / 'run'}", *TINY]
    off = ["augment.mixup_alpha=0", "augment.cutmix_alpha=0", "augment.mix_group_size=4"]
    run_here("launch/train.py", *arguments, *off, "order.aug_repeats=3")
    source = ReportSource(tmp_path / "run", CPU)
    rows = [row for s in range(1, 6) for p in Replay(source, s).pieces() for row in p.rows]
    curves = read_curves(source)
    for sample in {row.sample for row in rows}:
        own = [row.margin for row in rows if row.sample == sample]
        assert len(own) == 3
        assert curves.mean_margin[sample] == pytest.approx(np.mean(own))
        assert curves.num_seen[sample] == 1
