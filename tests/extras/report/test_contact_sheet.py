"""Test that the contact sheet has a row per image and a column per random augmentation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decoding import pixels
from PIL import Image
from processes import run

from vit.config.io import load_config
from vit.extras.report import contact_sheet

CPU = torch.device("cpu")


@pytest.fixture
def sheets(monkeypatch):
    """Collect the cells of the contact sheet instead of drawing them."""
    caught = []

    def catch(cells, num_columns, heading, picture, titles, caption_pt):
        caught.append([(title, cells[n::num_columns]) for n, title in enumerate(titles)])

    monkeypatch.setattr(contact_sheet, "plot_cells", catch)
    return caught


def test_each_row_shows_one_image_and_its_augmented_versions(config, sheets, tmp_path):
    """Every augmentation flips the whole image, and half of the augmentations also erase a box.
    Outside the box, the result must equal the mirrored original."""
    chosen = [
        "augment.crop_scale=[1,1]",
        "augment.crop_ratio=[1,1]",
        "augment.hflip_prob=1.0",
        "augment.erasing_prob=0.5",
    ]
    contact_sheet.make_contact_sheet(load_config(config, chosen), 3, 2, tmp_path / "sheet.png", CPU)
    (columns,) = sheets
    assert [title for title, _ in columns] == ["original", "draw 1", "draw 2", "as mixed"]
    assert {len(cells) for _, cells in columns} == {4}, (
        "three images are requested, but mixing groups have two"
    )
    originals, first, second, mixed = (cells for _, cells in columns)
    for row, original in enumerate(originals):
        for drawn in (first[row], second[row]):
            same = ((drawn.image * 255 - original.image.flip(-1).float()).abs() < 0.01).all(0)
            assert same.all() if drawn.caption == ["flip"] else 0.1 < same.float().mean() < 1
            assert drawn.caption in (["flip"], ["flip, erase"])
        assert 1 <= len(mixed[row].caption) <= 2
    assert len({tuple(cell.caption) for cell in (*first, *second)}) == 2


def test_mixed_images_are_shown_even_if_mixing_ends_early(config, sheets, tmp_path):
    for end in ("null", "1"):
        chosen = load_config(config, [f"augment.mixup_off_epoch={end}"])
        contact_sheet.make_contact_sheet(chosen, 3, 2, tmp_path / "sheet.png", CPU)
    always, early = (dict(columns)["as mixed"] for columns in sheets)
    assert [cell.caption for cell in always] == [cell.caption for cell in early]
    assert all(torch.equal(a.image, b.image) for a, b in zip(always, early, strict=True))


def test_without_mixing_there_is_no_mixed_column(config, sheets, tmp_path):
    unmixed = ["augment.mixup_alpha=0", "augment.cutmix_alpha=0", "augment.mix_group_size=4"]
    contact_sheet.make_contact_sheet(load_config(config, unmixed), 3, 1, tmp_path, CPU)
    assert [(title, len(cells)) for title, cells in sheets[0]] == [("original", 3), ("draw 1", 3)]


def test_the_command_writes_a_picture(config, tmp_path):
    picture = tmp_path / "new" / "sheet.png"
    done = run(
        "launch/visualize.py",
        "augment",
        "--config",
        config,
        "augment.auto_augment=three_augment",
        "--out",
        picture,
        "--images",
        "2",
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(picture)), done.stderr
    assert Image.open(picture).width == 1400
    assert np.std(pixels(picture)) > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--images", "0"], "--images 0: expected a number from 1 to 64"),
        (["--draws", "65"], "--draws 65: expected a number from 1 to 64"),
        (["--what"], "unknown: --what"),
    ],
)
def test_a_wrong_argument_is_reported(config, arguments, message):
    done = run("launch/visualize.py", "augment", "--config", config, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_device_is_that_of_the_config(config, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run("launch/visualize.py", "augment", "--config", config, "train.device=cuda")
    assert done.returncode == 2
    assert "train.device=cuda: 1 of 1 hosts cannot train on GPUs" in done.stderr
