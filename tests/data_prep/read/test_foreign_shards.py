"""Test that shards from other tools are read as webdataset reads them."""

from __future__ import annotations

import hashlib
import json
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from checksums import digests
from forms_of_shards import NAMES, as_json, image, index, layout_of, write_tar
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import verify
from vit.config.schema import AugmentConfig
from vit.data.batches import BatchLayout, TrainBatches
from vit.data.image_format import ImageFormat
from vit.data.order import make_order
from vit.data.shards.members import SampleLayout
from vit.data.shards.tar import scan_tar
from vit.data.storage.opening import open_split
from vit.system.files import ShardError

FORMAT = ImageFormat((16, 16), 3, "bilinear")


# Maps each format to its flags, a function that returns the members of sample n with label y, and a
# function that reads the label from webdataset's result.
FORMS = {
    "jpg + cls": ("", lambda n, y: {"jpg": image(n), "cls": b"%d\n" % y}, lambda s: int(s["cls"])),
    "JPEG + cls": ("", lambda n, y: {"JPEG": image(n), "CLS": b"%d" % y}, lambda s: int(s["cls"])),
    "png or webp": (
        "",
        lambda n, y: {
            ("png", "webp")[n % 2]: image(n, ("PNG", "WEBP")[n % 2]),
            "cls": b"%d" % y,
            "json": b"no JSON",
        },
        lambda s: int(s["cls"]),
    ),
    "json": (
        "--label json:label",
        lambda n, y: {"jpg": image(n), "json": as_json(label=y, n=n)},
        lambda s: json.loads(s["json"])["label"],
    ),
    "json, nested": (
        "--image image.jpg --label json:meta.label.id",
        lambda n, y: {
            "image.jpg": image(n),
            "json": as_json(caption="x", meta={"label": {"id": y, "name": "x"}}),
        },
        lambda s: json.loads(s["json"])["meta"]["label"]["id"],
    ),
    "json, a float": (
        "--label json:label",
        lambda n, y: {"jpg": image(n), "json": as_json(label=float(y))},
        lambda s: int(json.loads(s["json"])["label"]),
    ),
    "json, a field with a dot": (
        "--label json:a.label",
        lambda n, y: {"jpg": image(n), "json": json.dumps({"a.label": str(y)}).encode()},
        lambda s: int(json.loads(s["json"])["a.label"]),
    ),
    "image.jpg + label.cls": (
        "--image image.jpg --label label.cls",
        lambda n, y: {
            "image.jpg": image(n),
            "label.cls": b" %d " % y,
            "depth.png": image(n, "PNG"),
        },
        lambda s: int(s["label.cls"]),
    ),
    "txt": (
        "--label txt",
        lambda n, y: {"jpg": image(n), "txt": b"%d\n" % y},
        lambda s: int(s["txt"]),
    ),
    "index": (
        "--label index",
        lambda n, y: {"index": b"%d" % y, "jpg": image(n)},
        lambda s: int(s["index"]),
    ),
    "two images": (
        "--image jpg",
        lambda n, y: {"jpg": image(n), "png": image(0, "PNG"), "cls": b"%d" % y},
        lambda s: int(s["cls"]),
    ),
    "either of two": (
        "--image 'a.jpg;b.jpg'",
        lambda n, y: {"ab"[n % 2] + ".jpg": image(n), "cls": b"%d" % y},
        lambda s: int(s["cls"]),
    ),
    "names in cls": (
        "--classes names.txt",
        lambda n, y: {"jpg": image(n), "cls": NAMES[y].encode()},
        lambda s: NAMES.index(s["cls"].decode()),
    ),
    "names in json": (
        "--image image.jpg --label json:class --classes names.txt",
        lambda n, y: {"image.jpg": image(n), "json": as_json(**{"class": NAMES[y]})},
        lambda s: NAMES.index(json.loads(s["json"])["class"]),
    ),
    "bmp": (
        "--image bmp",
        lambda n, y: {"bmp": image(n, "BMP"), "cls": b"%d" % y},
        lambda s: int(s["cls"]),
    ),
}


def made(form: str, numbers: list[int], seed: int = 0) -> list[tuple[str, dict[str, bytes]]]:
    """Return samples in the given format, with members in random order. Keys include folders whose
    names contain dots."""
    dice = random.Random(seed)
    samples = []
    for n in numbers:
        members = list(FORMS[form][1](n, (3 * n + 1) % len(NAMES)).items())
        dice.shuffle(members)
        samples.append(
            (dice.choice([f"{n:06}", f"class.{n % 3}/{n:06}", f"./a b/{n}"]), dict(members))
        )
    return samples


def foreign(root: Path, form: str, count: int = 18) -> Path:
    """Write two training shards, one validation shard, and a file with class names."""
    root.mkdir(exist_ok=True)
    (root / "names.txt").write_text("\n".join(NAMES) + "\n", "utf-8")
    for name, numbers in {
        "train-0": range(0, 8),
        "train-1": range(8, count),
        "val-0": range(count, count + 5),
    }.items():
        write_tar(root / f"{name}.tar", made(form, list(numbers)))
    return root


def of_webdataset(tars: list[Path], label_of) -> list[tuple[str, bytes, int]]:
    """Return (key, image, label) for each sample that webdataset's reader yields."""
    samples = webdataset.WebDataset(
        [str(tar) for tar in tars], shardshuffle=False, empty_check=False
    )
    results = []
    for sample in samples:
        images = [
            suffix
            for suffix in sample
            if suffix.split(".")[-1] in ("jpg", "jpeg", "png", "webp", "bmp")
            and suffix != "depth.png"
        ]
        results.append(
            (sample["__key__"], sample["jpg" if "jpg" in sample else images[0]], label_of(sample))
        )
    return results


# ---- reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_the_scanner_finds_the_samples_that_webdataset_finds(form, tmp_path):
    flags, _, label_of = FORMS[form]
    for seed in range(5):
        tar = write_tar(
            tmp_path / f"{seed}.tar",
            [("__notes__/x", {"jpg": b"passed over"}), *made(form, list(range(12)), seed)],
        )
        data = tar.read_bytes()
        scanned = scan_tar(tar, layout_of(flags))
        ours = [
            (s.key, data[s.image.offset : s.image.offset + s.image.size], s.label) for s in scanned
        ]
        assert ours == of_webdataset([tar], label_of)
        assert [s.width for s in scanned] == [20 + n for n in range(12)]


@settings(max_examples=60)
@given(st.lists(st.text("ab._/- é", min_size=1, max_size=6), min_size=1, max_size=4, unique=True))
def test_any_names_make_the_samples_that_webdataset_makes(tmp_path_factory, keys):
    """Names contain dots, slashes and underscores in any position. A sample in which webdataset
    finds no image or no label must raise an error."""
    tar = tmp_path_factory.getbasetemp() / "names.tar"
    write_tar(tar, [(key, {"jpg": image(n), "cls": b"%d" % n}) for n, key in enumerate(keys)])
    try:
        theirs = list(webdataset.WebDataset(str(tar), shardshuffle=False, empty_check=False))
    except ValueError:  # a duplicate suffix
        theirs = []
    if theirs and all({"jpg", "cls"} <= sample.keys() for sample in theirs):
        assert [(s.key, s.label) for s in scan_tar(tar)] == [
            (sample["__key__"], int(sample["cls"])) for sample in theirs
        ]
    else:
        with pytest.raises(ShardError):
            scan_tar(tar)


@pytest.mark.parametrize("form", ["json, nested", "names in json"])
def test_indexed_shards_are_read_at_random_and_verified(form, tmp_path, capsys):
    flags, _, label_of = FORMS[form]
    root = foreign(tmp_path / "root", form)
    assert index(root, flags) == 0, capsys.readouterr().err
    split = open_split(root, "train")
    expected = of_webdataset([root / "train-0.tar", root / "train-1.tar"], label_of)
    assert [
        (split.key(i), split.read(i), int(split.index["label"][i])) for i in range(18)
    ] == expected
    assert split.class_names == (list(NAMES) if "--classes" in flags else [])
    assert split.num_classes == 5
    for how in ([], ["--quick"]):
        assert verify.main([str(root), "--workers", "1", *how]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_equals_the_index(form, tmp_path, capsys):
    """The stream must have the same keys and labels as the index. Its settings must have the same
    meaning as the flags."""
    reader = pytest.importorskip("vit.extras.stream.batches")
    flags, _, label_of = FORMS[form]
    root = foreign(tmp_path / "root", form)
    assert index(root, flags) == 0, capsys.readouterr().err
    split = open_split(root, "train")
    expected = of_webdataset([root / "train-0.tar", root / "train-1.tar"], label_of)
    shard_layout = layout_of(flags)
    names = tuple(split.class_names)
    layout = SampleLayout(shard_layout.image, shard_layout.label, class_names=names)
    stream = reader.open_stream(
        f"{root}/train-{{0..1}}.tar", 18, split.num_classes, split.class_names, layout
    )
    order = make_order(18, 6, seed=0)
    batches = reader.StreamBatches(stream, order, AugmentConfig(), FORMAT)
    seen = set()
    for position in range(9):
        rows = BatchLayout(6, FORMAT, batches.layout.num_columns).batch_in(
            memoryview(bytearray(batches.layout.num_bytes))
        )
        batches.fill(position, 0, rows)
        seen.update(zip(rows.ids.tolist(), rows.labels.tolist(), strict=True))
    numbers = [
        int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1
        for key, _, _ in expected
    ]
    assert seen == {
        (number, label) for number, (_, _, label) in zip(numbers, expected, strict=True)
    }


def test_batches_are_those_of_our_own_shards(tmp_path):
    filled = []
    for form in ("jpg + cls", "json, nested"):
        root = foreign(tmp_path / form.replace(" ", ""), form)
        assert index(root, FORMS[form][0]) == 0
        split = open_split(root, "train")
        batches = TrainBatches(
            split,
            make_order(18, 6, seed=5),
            AugmentConfig(mixup_alpha=0.8, mix_group_size=2),
            FORMAT,
        )
        for position in (0, 4, 7):
            rows = batches.layout.batch_in(memoryview(bytearray(batches.layout.num_bytes)))
            batches.fill(position, 0, rows)
            filled.append(rows)
    for ours, theirs in zip(filled[:3], filled[3:], strict=True):
        for name in ("images", "labels", "weights", "table", "ids"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


# ---- keys with dots ------------------------------------------------------------------------------


def dotted(root: Path) -> Path:
    """Write samples whose keys differ only after their first dot. webdataset would read them as a
    single sample."""
    root.mkdir(exist_ok=True)
    keys = [f"class{n % 2}/{n // 4:06}.v{n % 4}" for n in range(10)]
    samples = [(key, {"jpg": image(n), "cls": b"%d" % (n % 2)}) for n, key in enumerate(keys)]
    samples.sort(key=lambda sample: sample[0])
    write_tar(root / "train-0.tar", samples)
    return root


def test_keys_with_dots_are_read(tmp_path, capsys):
    root = dotted(tmp_path / "root")
    assert index(root) == 2
    error = capsys.readouterr().err
    assert error.endswith("try --keys-with-dots\n")
    assert index(root, "--keys-with-dots") == 0
    split = open_split(root, "train")
    with tarfile.open(root / "train-0.tar") as tar:
        names = [name for name in tar.getnames() if name.endswith(".jpg")]
        datas = [tar.extractfile(name).read() for name in names]
        labels = [int(tar.extractfile(name.removesuffix(".jpg") + ".cls").read()) for name in names]
    assert [split.key(i) for i in range(10)] == [name.removesuffix(".jpg") for name in names]
    assert [split.read(i) for i in range(10)] == datas
    assert split.index["label"].tolist() == labels
    assert [line.split()[0::4] for line in (root / "train-0.idx").read_text().splitlines()[1:]] == [
        ["jpg", "cls"]
    ] * 10
    assert verify.main([str(root), "--workers", "1"]) == 0, capsys.readouterr().out
    (root / "train.index.npy").unlink()
    assert np.array_equal(open_split(root, "train").index, split.index)


def test_a_stream_of_keys_with_dots_is_refused_with_a_remedy(tmp_path):
    reader = pytest.importorskip("vit.extras.stream.batches")
    root = dotted(tmp_path / "root")
    stream = reader.open_stream(f"{root}/train-0.tar", 10, 2, [])
    batches = reader.StreamBatches(stream, make_order(10, 10, seed=0), AugmentConfig(), FORMAT)
    rows = batches.layout.batch_in(memoryview(bytearray(batches.layout.num_bytes)))
    with pytest.raises(
        ShardError,
        match=r"sample 'class0/000000' has no images .* an index for keys with dots"
        r" \(python -m data_prep\.index ROOT --keys-with-dots\)",
    ):
        batches.fill(0, 0, rows)


# ---- `_info.json` --------------------------------------------------------------------------------


def test_indexing_again_gives_the_same_index(tmp_path, capsys):
    root = foreign(tmp_path / "root", "names in json")
    flags = FORMS["names in json"][0]
    assert index(root, flags) == 0
    info = json.loads((root / "_info.json").read_text())
    assert info["options"].keys() == {"image", "label", "class_names_sha256"}
    assert info["class_names"] == list(NAMES)
    before = digests(root)
    (root / "train.index.npy").unlink()
    open_split(root, "train")  # write the index again
    assert digests(root) == before
    for path in (*root.glob("*.npy"), *root.glob("*.idx")):
        path.unlink()
    assert index(root) == 0
    assert digests(root) == before
    capsys.readouterr()
    assert index(root, "--label json:label") == 2
    assert (
        "_info.json records an index made with image image.jpg, label json:class: to use"
        " other members, move _info.json away" in (capsys.readouterr().err)
    )


def test_sidecars_take_precedence_over_the_info_of_another_tool(tmp_path):
    root = foreign(tmp_path / "root", "json")
    theirs = {
        "splits": {
            "train": {
                "name": "train",
                "filenames": ["train-0.tar"],
                "shard_lengths": [8],
                "num_samples": 8,
            }
        }
    }
    (root / "_info.json").write_text(json.dumps(theirs))
    assert index(root, "--label json:label") == 0
    assert json.loads((root / "_info.json").read_text()) == theirs
    labels = open_split(root, "train").index["label"].tolist()
    (root / "train.index.npy").unlink()
    assert open_split(root, "train").index["label"].tolist() == labels
    (root / "train.index.npy").unlink()
    assert index(root) == 0
    assert open_split(root, "train").index["label"].tolist() == labels


def test_another_layout_replaces_an_earlier_one(tmp_path):
    """Sidecars from an earlier layout may remain if a command was interrupted or moved `_info.json`
    away."""
    root = tmp_path / "root"
    root.mkdir()
    write_tar(
        root / "train-0.tar",
        [(f"{n}", {"jpg": image(n), "cls": b"0", "json": as_json(label=n % 3)}) for n in range(6)],
    )
    assert index(root) == 0
    (root / "_info.json").unlink()
    assert index(root, "--label json:label") == 0
    assert json.loads((root / "train-0.json").read_text())["members"] == {"label": "json:label"}
    assert open_split(root, "train").index["label"].tolist() == [0, 1, 2, 0, 1, 2]


def test_several_labels_of_a_sample_are_named_as_such(tmp_path, capsys):
    samples = [(f"{n}", {"jpg": image(n), "json": as_json(label=[n, n + 1])}) for n in range(3)]
    write_tar(tmp_path / "train-0.tar", samples)
    assert index(tmp_path, "--label json:label") == 2
    assert "'0' has several labels ([0, 1]); vitline trains with one class per image" in (
        capsys.readouterr().err
    )
