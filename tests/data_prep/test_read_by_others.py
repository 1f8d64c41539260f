"""Run the code in docs/data.md under "Read by others" on our shards and on webdataset's shards."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image
from processes import REPOSITORY, jpeg

from data_prep import imagefolder, index
from data_prep.write.output import Output
from vit.data.storage.opening import open_split

PAGE = (REPOSITORY / "docs" / "data.md").read_text()
LINES = dict(re.findall(r"^\| ([\w ]+) \| `([^`]*ROOT[^`]*)` \|", PAGE, re.MULTILINE))


def photo(number: int) -> bytes:
    return jpeg(np.full((20, 20 + number, 3), 9 * number, np.uint8))


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    """Write 8 training shards and one validation shard. One image is unreadable, so a list of
    unreadable images exists."""
    folder = tmp_path_factory.mktemp("others")
    for n in range(18):
        path = folder / "images" / ("cat", "dog")[n % 2] / f"{n}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(n))
    (folder / "images" / "cat" / "broken.jpg").write_bytes(b"no image")
    assert (
        imagefolder.main([str(folder / "images"), "--out", str(folder / "set"), "--workers", "1"])
        == 0
    )
    assert (folder / "set" / "quarantine.jsonl").exists()
    return folder / "set"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("theirs")
    for shard in range(8):
        with webdataset.TarWriter(str(root / f"train-{shard:05d}.tar")) as tar:
            for n in (2 * shard, 2 * shard + 1):
                tar.write({"__key__": f"{n:03}", "jpg": photo(n), "cls": n % 2, "json": {"n": n}})
    with webdataset.TarWriter(str(root / "val-00000.tar")) as tar:
        tar.write({"__key__": "000", "jpg": photo(0), "cls": 0})
    assert index.main([str(root), "--workers", "1"]) == 0
    return root


def expected(root: Path) -> list[tuple[tuple[int, int], int]]:
    split = open_split(root, "train")
    sizes = [Image.open(io.BytesIO(split.read(i))).size for i in range(split.num_samples)]
    return sorted(zip(sizes, split.index["label"].tolist(), strict=True))


def read(reader: str, root: Path, tmp_path: Path) -> list[tuple[tuple[int, int], int]]:
    """Return (image size, label) for all training samples, read with the code from docs/data.md."""
    line = LINES[reader].replace("ROOT", str(root))
    if reader == "Hugging Face":
        import datasets

        samples = eval(
            f"{line.removesuffix(')')}, cache_dir={str(tmp_path)!r})", {"datasets": datasets}
        )
        assert samples.keys() == {"train", "val"}
        by_files = datasets.load_dataset(
            "webdataset", data_files={"train": f"{root}/train-*.tar"}, cache_dir=str(tmp_path / "2")
        )
        assert by_files["train"]["cls"] == samples["train"]["cls"]
        return [(sample["jpg"].size, sample["cls"]) for sample in samples["train"]]
    if reader == "timm":
        import timm.data

        # The training loader repeats its shards endlessly. A single sequential pass yields the same
        # samples.
        dataset = eval(
            line.replace("is_training=True, batch_size=64", "is_training=False, batch_size=1"),
            {"timm": timm},
        )
        return [(image.size, label) for image, label in dataset]
    return [(image.size, label) for image, label in eval(line, {"webdataset": webdataset})]


@pytest.mark.parametrize("reader", ["Hugging Face", "webdataset", "timm"])
@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_other_programs_read_the_shards(reader, whose, tmp_path, request, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    root = request.getfixturevalue(whose)
    assert sorted(read(reader, root, tmp_path)) == expected(root)


def test_timm_reads_labels_in_json(tmp_path):
    import timm.data

    assert "in timm, use `target_key` for a field of a `.json` file" in PAGE
    with webdataset.TarWriter(str(tmp_path / "train-0.tar")) as tar:
        for n in range(4):
            tar.write({"__key__": f"{n}", "jpg": photo(n), "json": {"label": n % 3}})
    assert index.main([str(tmp_path), "--label", "json:label", "--workers", "1"]) == 0
    options = {"root": str(tmp_path), "split": "train", "is_training": False, "batch_size": 1}
    dataset = timm.data.create_dataset("wds/", **options, target_key="label")
    assert [(image.size, label) for image, label in dataset] == expected(tmp_path)


def test_the_page_has_a_line_for_each():
    assert LINES.keys() == {"Hugging Face", "webdataset", "timm", "DALI"}


def test_an_existing_readme_is_kept(ours, tmp_path):
    from data_prep.write.card_page import readme, write_readme

    info = {
        "splits": {
            "train": {"filenames": ["x-train-0.tar", "x-train-1.tar"]},
            "val": {"filenames": ["x-train-val-0.tar"]},
        }
    }
    assert '    - "x-train-0.tar"\n    - "x-train-1.tar"\n' in readme(info), (
        "the page must list the files, because a pattern would match val shards, too"
    )
    (tmp_path / "README.md").write_text("mine")
    write_readme(Output(tmp_path), info)
    assert (tmp_path / "README.md").read_text() == "mine"
