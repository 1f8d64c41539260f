"""Test images without classes: the shards record the absence of classes, prediction accepts the
shards, and training rejects them."""

import json
import tarfile
import zipfile
from pathlib import Path

import pytest
import webdataset
from error_rows import snapshot
from processes import TINY, run_here, write_config
from small_shards import image_bytes

from data_prep import card, imagefolder, index, verify
from vit.data.storage.opening import open_split

IMAGES = {f"{'sub/' if n % 3 else ''}{n}.jpg": image_bytes(n) for n in range(24)}


@pytest.fixture
def photos(tmp_path) -> Path:
    for name, data in IMAGES.items():
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "photos"


@pytest.fixture
def root(photos, tmp_path) -> Path:
    prepare(photos, tmp_path / "shards")
    return tmp_path / "shards"


def prepare(source: Path, out: Path, *flags: str) -> None:
    command = [str(source), "--out", str(out), "--no-classes", "--workers", "1", *flags]
    assert imagefolder.main(command) == 0


def members(root: Path) -> dict[str, bytes]:
    contents = {}
    for path in root.glob("*.tar"):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                contents[member.name] = file.read()
    return contents


def test_every_image_is_stored_once_without_a_label(root):
    assert members(root) == {name.replace("/", "_"): data for name, data in IMAGES.items()}
    info = json.loads((root / "_info.json").read_text())
    assert (info["num_classes"], info["class_names"]) == (0, [])
    assert info["options"]["label"] == "none"
    assert list(info["splits"]) == ["train"]
    split = open_split(root, "train")
    assert {label for _, label in (split[n] for n in range(len(split)))} == {-1}


def test_verify_index_and_card_accept_them(root, capsys):
    assert verify.main([str(root), "--workers", "1", "--strict"]) == 0
    assert verify.main([str(root), "--workers", "1", "--strict", "--quick"]) == 0
    assert "24 images without labels: 24 in `train`." in (root / "dataset.md").read_text()
    before = snapshot(root)
    (root / "train.index.npy").unlink()
    assert len(open_split(root, "train")) == 24
    assert snapshot(root) == before
    assert index.main([str(root), "--workers", "1"]) == 0
    assert "classify its images with: python launch/predict.py" in capsys.readouterr().out
    assert card.main([str(root)]) == 0
    assert snapshot(root) == before


def test_training_refuses_them_in_one_line(root, tmp_path, capsys):
    config = write_config(tmp_path, root, steps=2)
    words = ("--config", config, *TINY, f"run.dir={tmp_path / 'run'}", "data.val_split=train[:20%]")
    with pytest.raises(ValueError, match="the images have no labels: choose data with classes"):
        run_here("launch/train.py", *words)


def test_predict_reads_them(root, shards, tmp_path):
    config = write_config(tmp_path, shards, steps=2)
    run_here("launch/train.py", "--config", config, *TINY, f"run.dir={tmp_path / 'run'}")
    run_here(
        "launch/predict.py", "--checkpoint", tmp_path / "run", root, "--csv", tmp_path / "out.csv"
    )
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert len(lines) == 1 + len(IMAGES)


def test_a_zip_a_fraction_and_the_third_member(photos, tmp_path):
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as file:
        for name, data in IMAGES.items():
            file.writestr(name, data)
    flags = ("--val-fraction", "0.25", "--with-json", "--minival", "0.2")
    prepare(tmp_path / "photos.zip", tmp_path / "a", *flags)
    prepare(photos, tmp_path / "b", *flags)
    info = json.loads((tmp_path / "a" / "_info.json").read_text())
    assert info["listed"] == {"train": 14, "val": 6, "minival": 4}
    names = {
        json.loads(data)["name"] for key, data in members(tmp_path / "a").items() if "json" in key
    }
    assert names == set(IMAGES)
    assert members(tmp_path / "a") == members(tmp_path / "b")


def test_tars_with_only_images_are_indexed(tmp_path, capsys):
    (tmp_path / "tars").mkdir()
    with webdataset.TarWriter(str(tmp_path / "tars" / "test-000.tar")) as tar:
        for number in range(6):
            tar.write({"__key__": f"{number}", "webp": image_bytes(number, "WEBP")})
    assert index.main([str(tmp_path / "tars"), "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert "named after their classes, write shards with `python -m data_prep.imagefolder`" in error
    assert "if no sample has a label, try --label none" in error
    assert index.main([str(tmp_path / "tars"), "--label", "none", "--workers", "1"]) == 0
    assert "indexed, 0 classes" in capsys.readouterr().out
    assert verify.main([str(tmp_path / "tars"), "--workers", "1"]) == 0
