"""Shards as others make them: image and label under any name. webdataset's own reader is the oracle
of what the samples are."""

from __future__ import annotations

import hashlib
import io
import json
import random
import shlex
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_prep import verify
from data_prep.errors import PrepError
from data_prep.index import main
from data_prep.read.class_names import read_class_names
from vit.config.schema import AugmentConfig
from vit.data.batches import BatchLayout, ImageFormat, TrainBatches
from vit.data.order import make_order
from vit.data.shards.data_set import open_split
from vit.data.shards.members import SampleLayout
from vit.data.shards.tar import scan_tar
from vit.data.stream import StreamBatches, open_stream
from vit.system.files import ShardError

NAMES = ("tench", "cat", "dog", "crème brûlée", "hen of the woods")
FORMAT = ImageFormat((16, 16), 3, "bilinear")


def image(number: int, kind: str = "JPEG") -> bytes:
    """An image whose size and colour tell its number."""
    encoded = io.BytesIO()
    Image.new("RGB", (20 + number, 30), (10 * (number % 25), 100, 200)).save(encoded, kind)
    return encoded.getvalue()


def as_json(**fields: object) -> bytes:
    return json.dumps(fields).encode()


# Of each form: flags, the members of sample n with label y, and how its label is read of what
# webdataset gives.
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


def layout_of(flags: str) -> SampleLayout:
    words = shlex.split(flags)
    given = dict(zip(words[::2], words[1::2], strict=True))
    return SampleLayout(
        given.get("--image"),
        given.get("--label", "cls"),
        class_names=NAMES if "--classes" in given else (),
    )


def write_tar(path: Path, samples: list[tuple[str, dict[str, bytes]]]) -> Path:
    """By the standard library; (key, {suffix: content}) in order."""
    with tarfile.open(path, "w") as tar:
        for key, members in samples:
            for suffix, data in members.items():
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def made(form: str, numbers: list[int], seed: int = 0) -> list[tuple[str, dict[str, bytes]]]:
    """Samples of a form; members in any order, keys in folders whose names have dots."""
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
    """Two training shards and one of val, and a file of class names."""
    root.mkdir(exist_ok=True)
    (root / "names.txt").write_text("\n".join(NAMES) + "\n", "utf-8")
    for name, numbers in {
        "train-0": range(0, 8),
        "train-1": range(8, count),
        "val-0": range(count, count + 5),
    }.items():
        write_tar(root / f"{name}.tar", made(form, list(numbers)))
    return root


def index(root: Path, flags: str = "") -> int:
    return main(
        [
            str(root),
            "--workers",
            "1",
            *shlex.split(flags.replace("names.txt", str(root / "names.txt"))),
        ]
    )


def of_webdataset(tars: list[Path], label_of) -> list[tuple[str, bytes, int]]:
    """(key, image, label) as webdataset's own reader groups the members."""
    samples = webdataset.WebDataset(
        [str(tar) for tar in tars], shardshuffle=False, empty_check=False
    )
    found = []
    for sample in samples:
        images = [
            suffix
            for suffix in sample
            if suffix.split(".")[-1] in ("jpg", "jpeg", "png", "webp", "bmp")
            and suffix != "depth.png"
        ]
        found.append(
            (sample["__key__"], sample["jpg" if "jpg" in sample else images[0]], label_of(sample))
        )
    return found


# ---- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_the_scanner_sees_what_webdataset_sees(form, tmp_path):
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
    """Dots, slashes, underscores anywhere; where a sample of webdataset's has not one image and a
    label, it is an error here."""
    tar = tmp_path_factory.getbasetemp() / "names.tar"
    write_tar(tar, [(key, {"jpg": image(n), "cls": b"%d" % n}) for n, key in enumerate(keys)])
    try:
        theirs = list(webdataset.WebDataset(str(tar), shardshuffle=False, empty_check=False))
    except ValueError:  # a suffix that is there twice
        theirs = []
    if theirs and all({"jpg", "cls"} <= sample.keys() for sample in theirs):
        assert [(s.key, s.label) for s in scan_tar(tar)] == [
            (sample["__key__"], int(sample["cls"])) for sample in theirs
        ]
    else:
        with pytest.raises(ShardError):
            scan_tar(tar)


@pytest.mark.parametrize("form", ["json, nested", "names in json"])
def test_indexed_read_at_random_verified_and_streamed(form, tmp_path, capsys):
    """The stream gives samples with the same keys and labels as the index, and its settings mean
    the same as the flags."""
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

    given = layout_of(flags)
    layout = SampleLayout(given.image, given.label, given.keys_with_dots, tuple(split.class_names))
    stream = open_stream(
        f"{root}/train-{{0..1}}.tar", 18, split.num_classes, split.class_names, layout
    )
    order = make_order(18, 6, seed=0)
    batches = StreamBatches(stream, order, AugmentConfig(), FORMAT)
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
    """The index holds all that the loader needs: the same images in the same order give the same
    bytes, crops and tables."""
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
    """Keys that differ behind their first dot: webdataset's rule would make one sample of
    several."""
    root.mkdir(exist_ok=True)
    keys = [f"class{n % 2}/{n // 4:06}.v{n % 4}" for n in range(10)]
    samples = [(key, {"jpg": image(n), "cls": b"%d" % (n % 2)}) for n, key in enumerate(keys)]
    samples.sort(key=lambda sample: sample[0])
    write_tar(root / "train-0.tar", samples)
    return root


def test_keys_with_dots(tmp_path, capsys):
    root = dotted(tmp_path / "root")
    assert index(root) == 2
    error = capsys.readouterr().err
    assert " --keys-with-dots, " in error
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


def test_streamed_keys_with_dots(tmp_path):
    root = dotted(tmp_path / "root")
    stream = open_stream(f"{root}/train-0.tar", 10, 2, [], SampleLayout(keys_with_dots=True))
    batches = StreamBatches(stream, make_order(10, 10, seed=0), AugmentConfig(), FORMAT)
    rows = batches.layout.batch_in(memoryview(bytearray(batches.layout.num_bytes)))
    batches.fill(0, 0, rows)
    assert len(set(rows.ids.tolist())) == 10
    wrong = StreamBatches(
        open_stream(f"{root}/train-0.tar", 10, 2, []),
        make_order(10, 10, seed=0),
        AugmentConfig(),
        FORMAT,
    )
    with pytest.raises(
        ShardError, match=r"sample 'class0/000000' has no images .*data.stream_keys_with_dots=true"
    ):
        wrong.fill(0, 0, rows)


# ---- the record ----------------------------------------------------------------------------------


def test_an_index_that_is_made_again_is_made_alike(tmp_path, capsys):
    root = foreign(tmp_path / "root", "names in json")
    flags = FORMS["names in json"][0]
    assert index(root, flags) == 0
    info = json.loads((root / "_info.json").read_text())
    assert info["options"].keys() == {"image", "label", "class_names_sha256"}
    assert info["class_names"] == list(NAMES)
    before = {path.name: path.read_bytes() for path in root.iterdir()}
    (root / "train.index.npy").unlink()
    open_split(root, "train")  # makes it again
    assert {path.name: path.read_bytes() for path in root.iterdir()} == before
    for path in (*root.glob("*.npy"), *root.glob("*.idx")):
        path.unlink()
    assert index(root) == 0
    assert {path.name: path.read_bytes() for path in root.iterdir()} == before
    capsys.readouterr()
    assert index(root, "--label json:label") == 2
    assert (
        "indexed with --image image.jpg --label json:class, as its _info.json says; to do it"
        " otherwise, move that file away" in (capsys.readouterr().err)
    )


def test_beside_an_info_of_others_the_sidecars_tell(tmp_path):
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


def test_another_layout_takes_the_place_of_an_earlier_one(tmp_path):
    """A command that was stopped, or moved `_info.json` away, leaves sidecars of a layout that does
    not count any more."""
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


# ---- what is told --------------------------------------------------------------------------------


def test_the_words_for_image_and_json(tmp_path, capsys):
    root = tmp_path / "root"
    root.mkdir()
    samples = [
        (f"{n:06}", {"image.jpg": image(n), "json": as_json(caption="a dog", label=n % 4)})
        for n in range(12)
    ]
    write_tar(root / "train-0000.tar", samples)
    assert index(root) == 2
    assert (
        capsys.readouterr().err
        == f"error: {root}/train-0000.tar: sample '000000' has no images (its members: image.jpg,"
        " json; expected one of jpg, jpeg, png, webp) and no .cls with the label (12 of 12"
        " samples do not fit). Mend these, move the shard away, or describe others by --image"
        " SUFFIX, --label SUFFIX or SUFFIX:FIELD (of JSON), --keys-with-dots, and labels that are"
        " names by --classes names.txt\n"
    )
    assert {path.name for path in root.iterdir()} == {"train-0000.tar"}


@pytest.mark.parametrize(
    ("members", "flags", "told"),
    [
        (
            {"jpg": b"", "json": as_json(caption="x")},
            "",
            "has no .cls with the label (its members: jpg, json) (4 of 4",
        ),
        (
            {"txt": b"a photo", "cls": b"1"},
            "",
            "has no images (its members: txt, cls; expected one of jpg",
        ),
        (
            {"jpg": b"", "json": as_json(label=1, id=7)},
            "--label json:lable",
            "has no field 'lable' in its .json (there: label, id)",
        ),
        (
            {"jpg": b"", "json": b"{"},
            "--label json:label",
            "has a .json that is no JSON (Expecting property name",
        ),
        (
            {"jpg": b"", "json": as_json(label=None)},
            "--label json:label",
            "has the label 'None'; expected an integer",
        ),
        (
            {"jpg": b"", "json": as_json(label=True)},
            "--label json:label",
            "has the label 'True'; expected an integer",
        ),
        (
            {"jpg": b"", "cls": b"cow"},
            "--classes names.txt",
            "has the label 'cow'; expected one of the 5 class names (4 of 4 samples do not fit)",
        ),
    ],
)
def test_what_cannot_be_taken_is_told(members, flags, told, tmp_path):
    tar = write_tar(
        tmp_path / "train-0.tar",
        [(str(n), {k: v or image(n) for k, v in members.items()}) for n in range(4)],
    )
    with pytest.raises(ShardError) as caught:
        scan_tar(tar, layout_of(flags))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--label json:", "--label json:: no field behind the colon, expected json:label"),
        ("--image a/b", "--image a/b: expected what follows the key's dot, as jpg or json:label"),
        (
            "--keys-with-dots --image a.jpg",
            "--image a.jpg: with --keys-with-dots a suffix has no dot, as jpg",
        ),
        ("--image json --label json", "--image json and --label json: two members"),
        (
            "--classes names.txt",
            (
                "labels up to 7 (in train-0.tar), but 5 class names, which are those of labels 0 to"
                " 4: name all"
            ),
        ),
    ],
)
def test_flags_that_cannot_be(flags, told, tmp_path, capsys):
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    write_tar(tmp_path / "train-0.tar", [("a", {"jpg": image(1), "cls": b"7"})])
    assert index(tmp_path, flags) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "_info.json").exists()


def test_names_that_would_confuse_a_terminal_are_escaped(tmp_path):
    tar = write_tar(
        tmp_path / "train-0.tar",
        [("a", {"jpg": image(1), "\x1b[31mx": b"1", "json": as_json(**{"\x1b[2J": 1})})],
    )
    with pytest.raises(ShardError) as caught:
        scan_tar(tar)
    assert str(caught.value).isprintable()


def test_a_few_samples_that_do_not_fit_are_named(tmp_path, capsys):
    root = tmp_path / "root"
    root.mkdir()
    write_tar(
        root / "train-0.tar",
        [(f"{n:03}", {"jpg": image(n)} | ({} if n in (3, 5) else {"cls": b"1"})) for n in range(9)],
    )
    with pytest.raises(ShardError) as caught:
        scan_tar(root / "train-0.tar")
    of_two = (
        "sample '003' has no .cls with the label (its members: jpg) (2 of 9 samples do not fit)"
    )
    assert f"{of_two}. Mend " in str(caught.value)
    assert index(root, "--max-unreadable 0") == 2
    assert (
        "2 of 9 samples do not fit, more than the 0 that --max-unreadable 0"
        in capsys.readouterr().err
    )


def test_labels_from_1_and_the_last_lines(tmp_path, capsys):
    root = tmp_path / "root"
    root.mkdir()
    for split in ("train", "validation"):
        write_tar(
            root / f"{split}-0.tar",
            [(str(n), {"jpg": image(n), "cls": b"%d" % (1 + n % 3)}) for n in range(6)],
        )
    assert index(root) == 0
    assert (
        capsys.readouterr().out
        == f"train: 6 samples in 1 shards\nvalidation: 6 samples in 1 shards\n{root}: indexed, 4"
        " classes\nnote: labels are 1 to 3: class 0 has no images; models get an output for it"
        f" all the same\ntrain on it with data.root={root} data.val_split=validation; check it"
        f" with: python -m data_prep.verify {root}\n"
    )


# ---- class names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a b\nc\nd", "\ufeffa b\r\nc\r\nd\r\n"])
def test_class_names(text, tmp_path):
    (tmp_path / "names").write_text(text, "utf-8", newline="")
    assert read_class_names(tmp_path / "names") == ["a b", "c", "d"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\n\nb", "expected one class name a line, and no JSON"),
        ("a\nb\na", "'a' occurs twice"),
        ("0\n2\n1", "class 1 is called '2', and a label 2 could mean either"),
        ("", "expected one class name a line"),
        ('[\n  "a",\n  "b"\n]', "and no JSON"),
    ],
)
def test_class_names_that_are_none(text, told, tmp_path):
    (tmp_path / "names").write_text(text)
    with pytest.raises(PrepError, match=told):
        read_class_names(tmp_path / "names")
    with pytest.raises(PrepError, match="nowhere: cannot be read"):
        read_class_names(tmp_path / "nowhere")
