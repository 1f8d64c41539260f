"""Test the report about shards from other tools, and the class names of such shards."""

from __future__ import annotations

import pytest
from forms_of_shards import NAMES, as_json, image, index, layout_of, write_tar

from data_prep.errors import PrepError
from data_prep.read.class_names import read_class_names
from vit.config.sample_layout import SETTINGS
from vit.data.shards.members import SampleLayout, remedy
from vit.data.shards.tar import scan_tar
from vit.system.files import ShardError

# ---- the report ----------------------------------------------------------------------------------


def test_the_error_suggests_options_for_image_and_label(tmp_path, capsys):
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
        " samples do not fit); its .json has the fields caption, label; try --image image.jpg"
        " --label json:label\n"
    )
    assert {path.name for path in root.iterdir()} == {"train-0000.tar"}


@pytest.mark.parametrize(
    ("members", "flags", "message"),
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
            "has no field 'lable' in its .json (its fields: label, id)",
        ),
        (
            {"jpg": b"", "json": b"{"},
            "--label json:label",
            "has a .json that is not valid JSON (Expecting property name",
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
def test_unsupported_members_are_reported(members, flags, message, tmp_path):
    tar = write_tar(
        tmp_path / "train-0.tar",
        [(str(n), {k: v or image(n) for k, v in members.items()}) for n in range(4)],
    )
    with pytest.raises(ShardError) as caught:
        scan_tar(tar, layout_of(flags))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--label json:", "--label json:: expected the text after the key's dot, such as jpg or"),
        ("--image a/b", "--image a/b: expected the text after the key's dot, such as jpg or json:"),
        (
            "--keys-with-dots --image a.jpg",
            "--image a.jpg: expected the text after the key's last dot",
        ),
        ("--image json --label json", "--image json and --label json: use two different members"),
        (
            "--classes names.txt",
            (
                "labels go up to 7 (in train-0.tar), but there are only 5 class names, for labels 0"
                " to 4: name all"
            ),
        ),
    ],
)
def test_impossible_flags_are_refused(flags, message, tmp_path, capsys):
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    write_tar(tmp_path / "train-0.tar", [("a", {"jpg": image(1), "cls": b"7"})])
    assert index(tmp_path, flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "_info.json").exists()


@pytest.mark.parametrize(
    ("members", "flags", "tried"),
    [
        ({"jpg": b"", "txt": b" 3\n"}, "", "--label txt"),
        ({"jpg": b"", "txt": b"a photo", "cls": b"cow"}, "", "--classes names.txt"),
        ({"jpg": b"", "txt": b"cow"}, "", ""),
        ({"jpg": b"", "txt": b"cat\n"}, "--classes names.txt", "--label txt"),
        ({"bmp": b"", "cls": b"1"}, "", "--image bmp"),
        ({"v1.jpg": b"", "v1.cls": b"1"}, "", "--keys-with-dots"),
        ({"a b.jpg": b"", "cls": b"1"}, "", "--image 'a b.jpg'"),
        ({"jpg": b"", "json": as_json(width=3, height=4)}, "", ""),
        ({"jpg": b"", "json": as_json(width=3, label="cow")}, "", "--label json:label --classes"),
        ({"jpg": b"", "json": as_json(width=3, label=[3])}, "", "--label json:width"),
        ({"jpg": b"", "json": as_json(lable=1)}, "--label json:label", "--label json:lable"),
        ({"jpg": b"", "json": as_json(label=1), "cls": b"x"}, "", ""),
        ({"left.jpg": b"", "right.jpg": b"", "cls": b"1"}, "", ""),
        ({"jpg": b"", "cls": b"-3"}, "", ""),
        ({"jpg": b"", "cls": b" "}, "", ""),
        ({"jpg": b"", "json": b"{}"}, "", ""),
        ({"jpg": b"", "json": b"[" * 60_000}, "", ""),
    ],
)
def test_options_are_tried_where_one_image_and_one_label_are_plain(members, flags, tried, tmp_path):
    tar = write_tar(
        tmp_path / "train-0.tar", [("a", {k: v or image(1) for k, v in members.items()})]
    )
    with pytest.raises(ShardError) as caught:
        scan_tar(tar, layout_of(flags))
    assert ("; try " + tried in str(caught.value)) if tried else ("; try" not in str(caught.value))


def test_a_stream_of_keys_with_dots_is_advised_to_be_indexed():
    advice = remedy({"v1.bmp": b"", "v1.cls": b"1"}, SampleLayout(), SETTINGS)
    assert advice == (
        "; try an index for keys with dots (python -m data_prep.index ROOT --keys-with-dots)"
    )


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
    assert f"{of_two}. Repair " in str(caught.value)
    assert index(root, "--max-unreadable 0") == 2
    assert (
        "2 of 9 samples are invalid, more than the 0 that --max-unreadable 0"
        in capsys.readouterr().err
    )


def test_labels_from_1_and_the_last_lines(tmp_path, capsys):
    root = tmp_path / "my shards"
    root.mkdir()
    for first, split in enumerate(("train", "validation")):
        write_tar(
            root / f"{split}-0.tar",
            [(str(n), {"jpg": image(first + n), "cls": b"%d" % (1 + n % 3)}) for n in range(6)],
        )
    assert index(root) == 0
    assert (
        capsys.readouterr().out
        == f"train: 6 samples in 1 shard\nvalidation: 6 samples in 1 shard\n{root}: indexed, 4"
        " classes\nnote: labels are 1 to 3; models also get an output for classes without images: 0"
        f"\ntrain on it with 'data.root={root}' data.val_split=validation; check it"
        f" with: python -m data_prep.verify '{root}'\n"
    )


# ---- class names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a b\nc\nd", "\ufeffa b\r\nc\r\nd\r\n"])
def test_class_names(text, tmp_path):
    (tmp_path / "names").write_text(text, "utf-8", newline="")
    assert read_class_names(tmp_path / "names") == ["a b", "c", "d"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n\nb", "expected one class name per line, not JSON"),
        ("a\nb\na", "'a' occurs twice"),
        ("0\n2\n1", "class 1 is named '2', so the label 2 would be ambiguous"),
        ("", "expected one class name per line"),
        ('[\n  "a",\n  "b"\n]', "not JSON"),
    ],
)
def test_invalid_class_names_are_refused(text, message, tmp_path):
    (tmp_path / "names").write_text(text)
    with pytest.raises(PrepError, match=message):
        read_class_names(tmp_path / "names")
    with pytest.raises(PrepError, match="nowhere: cannot be read"):
        read_class_names(tmp_path / "nowhere")
