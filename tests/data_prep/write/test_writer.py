"""The writer: the same bytes whatever happens on the way, nothing torn, nothing overwritten, and
readable errors."""

import errno
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from data_prep.errors import PrepError
from data_prep.write.catalogue import Source
from data_prep.write.catalogue_builder import Builder
from data_prep.write.images import ImagePolicy
from data_prep.write.plan import Settings, choose_num_shards, choose_part
from data_prep.write.samples import Sample, read_range
from data_prep.write.shard import TarStream
from data_prep.write.writer import write
from vit.data.shards.data_set import open_split
from vit.data.shards.tar import scan_tar
from vit.system.files import temporary_beside, temporary_file

FOUR = Settings(num_shards=4)


def image_bytes(
    number: int = 0, format: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (24, 16)
) -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", size, (number * 7 % 256, number * 3 % 256, 90)).convert(mode).save(
        encoded, format
    )
    return encoded.getvalue()


def source_of(folder: Path, splits: dict[str, list[tuple[str, int, bytes]]], **options) -> Source:
    """A source of (name, label, encoded image) in a file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "images.bin"
    path.write_bytes(b"".join(data for samples in splits.values() for _, _, data in samples))

    def fill(builder: Builder) -> None:
        builder.classes(["a", "b", "c"])
        builder.note("made for a test")
        file = builder.file(path)
        end = 0
        for split, samples in splits.items():
            sizes = np.array([len(data) for _, _, data in samples], np.int64)
            ends = end + np.cumsum(sizes)
            builder.add(
                split,
                file,
                [name for name, _, _ in samples],
                [label for _, label, _ in samples],
                ends - sizes,
                sizes,
            )
            end = ends[-1] if len(ends) else end

    return Source("test", options, fill, read_range)


def small_splits(num_train: int = 23, num_val: int = 7) -> dict[str, list[tuple[str, int, bytes]]]:
    return {
        split: [(f"{split}.{n}.JPEG", n % 3, image_bytes(n)) for n in range(num)]
        for split, num in (("train", num_train), ("val", num_val))
    }


@pytest.fixture
def small(tmp_path) -> Source:
    return source_of(tmp_path / "source", small_splits())


def digest(root: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(root.iterdir())
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write(source_of(folder / "source", small_splits()), folder / "root", FOUR)
    return folder / "root"


def test_workers_and_order_leave_no_trace(written, tmp_path):
    backwards = {split: samples[::-1] for split, samples in small_splits().items()}
    write(source_of(tmp_path, backwards), tmp_path / "root", replace(FOUR, workers=2))
    assert digest(tmp_path / "root") == digest(written)
    assert not [
        path.name
        for path in written.iterdir()
        if path.name.startswith((".", "_")) and path.name != "_info.json"
    ]


def test_every_sample_once_with_its_label(written):
    for split, num in (("train", 23), ("val", 7)):
        opened = open_split(written, split)
        found = {
            opened.key(i): (opened.read(i), int(opened.index["label"][i]))
            for i in range(opened.num_samples)
        }
        assert found == {f"{split}_{n}": (image_bytes(n), n % 3) for n in range(num)}
        assert opened.class_names == ["a", "b", "c"]


def test_shards_are_plain_tars(written):
    info = json.loads((written / "_info.json").read_text())
    train = info["splits"]["train"]
    assert train["name"] == "train"
    assert train["num_samples"] == 23
    assert sorted(train["shard_lengths"]) == [5, 6, 6, 6]
    assert len(info["splits"]["val"]["filenames"]) == 1  # in proportion: 4 * 7 / 23
    for name, num_bytes, sha256 in zip(
        train["filenames"], train["shard_bytes"], train["shard_sha256"], strict=True
    ):
        data = (written / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (num_bytes, sha256)
        with tarfile.open(written / name) as tar:
            for member in tar:
                assert (
                    member.mode,
                    member.uid,
                    member.gid,
                    member.mtime,
                    member.uname,
                    member.gname,
                ) == (0o644, 0, 0, 0, "", "")
                assert member.isreg()
                assert not member.pax_headers
        listing = subprocess.run(
            ["tar", "-tvf", written / name], check=True, capture_output=True, text=True
        )
        assert listing.stderr == ""
        keys = [line.split()[-1] for line in listing.stdout.splitlines()]
        assert keys == [
            f"{sample.key}.{ext}" for sample in scan_tar(written / name) for ext in ("jpg", "cls")
        ]


def test_default_number_of_shards():
    assert choose_num_shards({"train": 23, "val": 7}, Settings(), 600.0) == {"train": 8, "val": 2}
    assert choose_num_shards({"train": 5, "val": 5}, Settings(), 600.0) == {"train": 5, "val": 5}
    assert choose_num_shards(
        {"train": 1000, "val": 100}, Settings(shard_bytes=50 * 600), 600.0
    ) == {"train": 20, "val": 2}
    with pytest.raises(PrepError, match="use --num-shards 23 or fewer"):
        choose_num_shards({"train": 23, "val": 7}, Settings(num_shards=24), 600.0)


def test_original_names_and_classes_are_there_on_request(tmp_path, small):
    write(small, tmp_path / "root", replace(FOUR, with_json=True))
    found = {}
    for tar in (tmp_path / "root").glob("*.tar"):
        for sample in webdataset.WebDataset(str(tar), shardshuffle=False).decode():
            found[sample["__key__"]] = sample["json"]
    expected = {
        f"{split}_{n}": {"name": f"{split}.{n}.JPEG", "label": n % 3, "class": "abc"[n % 3]}
        for split, num in (("train", 23), ("val", 7))
        for n in range(num)
    }
    assert found == expected


def test_minival_is_cut_by_class_and_hash(tmp_path, small):
    write(small, tmp_path / "root", replace(FOUR, minival=0.25))
    info = json.loads((tmp_path / "root" / "_info.json").read_text())
    assert {split: described["num_samples"] for split, described in info["splits"].items()} == {
        "train": 17,
        "val": 7,
        "minival": 6,
    }
    assert np.bincount(open_split(tmp_path / "root", "minival").index["label"]).tolist() == [
        2,
        2,
        2,
    ]


def test_again_keeps_what_is_whole_and_mends_the_rest(written, small, tmp_path, capsys):
    root = tmp_path / "root"
    write(small, root, FOUR)
    kept = (root / "train-00001.tar").stat().st_mtime_ns
    (root / "train-00000.tar").unlink()
    os.truncate(root / "train-00002.tar", 1000)
    (root / "train-00003.json").unlink()
    (root / "_info.json").unlink()
    (root / ".train-00000.tar.elsewhere.1.tmp").write_bytes(b"left by a killed writer")
    os.utime(root / ".train-00000.tar.elsewhere.1.tmp", (1, 1))
    temporary_beside(root / "train-00000.tar").write_bytes(
        b"left by a killed writer of this host, whose lock went with it"
    )
    # neither plan nor info: could be anyone's
    with pytest.raises(PrepError, match="shards of unknown origin"):
        write(small, root, FOUR)
    (root / "_info.json").write_bytes((written / "_info.json").read_bytes())
    capsys.readouterr()
    write(small, root, FOUR)
    assert "2 of 5 shards are there already and are kept" in capsys.readouterr().out
    assert (root / "train-00001.tar").stat().st_mtime_ns == kept
    assert digest(root) == digest(written)


@pytest.mark.parametrize(
    ("num_train", "options", "settings", "difference"),
    [
        (23, {}, {"seed": 1}, "seed is 0 there, 1 here"),
        (23, {}, {"num_shards": 5}, "num_shards is"),
        (23, {"quality": 9}, {}, "quality is null there, 9 here"),
        (23, {}, {"with_json": True}, "with_json is null there, true here"),
        (
            23,
            {},
            {"policy": ImagePolicy(resize_short_side=8)},
            "resize_short_side is null there, 8 here",
        ),
        (22, {}, {}, "catalogue is"),
    ],
)
def test_other_contents_are_refused(written, tmp_path, num_train, options, settings, difference):
    before = digest(written)
    source = source_of(tmp_path, small_splits(num_train), **options)
    with pytest.raises(
        PrepError,
        match=rf"holds another data set or other options: .*{difference}.*choose another --out",
    ):
        write(source, written, replace(FOUR, **settings))
    assert digest(written) == before


def test_parts_in_any_order_are_the_whole_and_a_repeated_part_changes_nothing(
    written, small, tmp_path, capsys
):
    root = tmp_path / "root"
    for part, missing in (
        ("3-4", "3 of 5 are still missing (train-00000.tar, train-00001.tar, train-00002.tar)"),
        ("0-0", "2 of 5"),
    ):
        write(small, root, replace(FOUR, part=part))
        assert missing in capsys.readouterr().out
    assert (root / "_writing.json").exists()
    assert not (root / "_info.json").exists()
    before = {path: path.stat().st_mtime_ns for path in root.iterdir()}
    write(small, root, replace(FOUR, part="0-0"))
    assert {path: path.stat().st_mtime_ns for path in root.iterdir()} == before
    write(small, root, replace(FOUR, part="0-2", workers=2))
    assert digest(root) == digest(written)
    before = {path: path.stat().st_mtime_ns for path in root.iterdir()}
    write(small, root, replace(FOUR, part="3-4"))
    assert "complete already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in root.iterdir()} == before


def test_the_file_of_a_live_writer_is_left_alone(small, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    elsewhere = root / ".train-00000.tar.elsewhere.1.tmp"
    elsewhere.write_bytes(b"being written")
    with temporary_file(root / "train-00000.tar") as file:
        write(small, root, replace(FOUR, part="0-0"))
        assert Path(file.name).exists()
    assert elsewhere.exists()


def refused_advice(*_: int) -> None:
    raise OSError(errno.EINVAL, "a file system that takes no advice")


def no_memory(*_: int) -> None:
    raise MemoryError


@pytest.mark.parametrize(("advise", "error"), [(refused_advice, None), (no_memory, MemoryError)])
def test_what_fails_in_the_hashing_thread_reaches_the_writer(tmp_path, monkeypatch, advise, error):
    monkeypatch.setattr(os, "posix_fadvise", advise)
    data = os.urandom(1 << 20)
    with open(tmp_path / "a.tar", "wb") as file, ThreadPoolExecutor(1) as pool:
        stream = TarStream(file.fileno(), pool)

        def add_all() -> None:
            try:
                for number in range(60):
                    stream.add(f"{number}.jpg", data)
                came.append(stream.close())
            except BaseException as error:
                came.append(type(error))

        came: list[object] = []
        thread = threading.Thread(target=add_all, daemon=True)
        thread.start()
        thread.join(timeout=120)
    assert came == [error or hashlib.sha256((tmp_path / "a.tar").read_bytes()).hexdigest()], (
        "waits for ever, or another end"
    )


def test_a_part_mends_what_is_gone_from_a_complete_data_set(written, small, tmp_path):
    root = tmp_path / "root"
    write(small, root, FOUR)
    (root / "val-00000.tar").unlink()
    write(small, root, replace(FOUR, part="1/2"))
    assert digest(root) == digest(written)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 10, 13])
def test_equal_parts_share_all_shards(num_parts):
    counts = {"train": 8, "val": 2}
    parts = [choose_part(f"{i}/{num_parts}", counts) for i in range(num_parts)]
    assert [number for part in parts for number in part] == list(range(10))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranges_include_both_ends():
    assert choose_part("7-8", {"train": 8, "val": 2}) == range(7, 9)
    assert choose_part(None, {"train": 8, "val": 2}) == range(10)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("8-10", r"shards 0 to 9 \(train has 8; val has 2\)"),
        ("5-3", "expected A-B"),
        ("3/3", "or I/N"),
        ("0/0", "or I/N"),
        ("-1-3", "expected A-B, such as 100-199, or I/N"),
        ("all", "expected A-B"),
    ],
)
def test_bad_parts(part, message, tmp_path):
    with pytest.raises(PrepError, match=f"^--shards {part}: .*{message}"):
        choose_part(part, {"train": 8, "val": 2})


def test_what_was_left_out_is_tried_again_even_if_the_end_of_that_was_killed(written, tmp_path):
    root = tmp_path / "root"
    lenient = replace(FOUR, max_unreadable=0.1)
    write(damaged(tmp_path), root, lenient)
    stale = (root / "_info.json").read_bytes()
    write(source_of(tmp_path, small_splits()), root, lenient)
    assert digest(root) == digest(written)
    (root / "_info.json").write_bytes(stale)  # as if killed before it was replaced
    for lost in ("quarantine.jsonl", "train.index.npy", "dataset.md", "train-00001.idx"):
        (root / lost).unlink(missing_ok=True)
        write(source_of(tmp_path, small_splits()), root, lenient)
        assert digest(root) == digest(written), lost


def test_the_number_of_shards_stays_when_unreadable_images_are_mended(tmp_path):
    splits = {
        "train": [
            (f"{n}.jpg", 0, image_bytes(n, size=(300, 300) if n == 5 else (8, 8)))
            for n in range(40)
        ]
    }
    broken = {
        "train": [
            (name, label, b"<html>" if name == "5.jpg" else data)
            for name, label, data in splits["train"]
        ]
    }
    settings = Settings(max_unreadable=0.5, shard_bytes=None)
    with pytest.raises(PrepError):
        write(
            source_of(tmp_path / "a", broken),
            tmp_path / "root",
            replace(settings, max_unreadable=0),
        )
    write(source_of(tmp_path / "a", splits), tmp_path / "root", settings)
    assert open_split(tmp_path / "root", "train").num_samples == 40


def hiccup(sample: Sample) -> bytes:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), sample.file)


def test_an_archive_that_cannot_be_read_for_a_moment_loses_no_image(written, small, tmp_path):
    root = tmp_path / "root"
    with pytest.raises(OSError, match="Stale file handle"):
        write(replace(small, read=hiccup), root, replace(FOUR, max_unreadable=0.9))
    assert not list(root.glob("*.tar"))
    write(small, root, replace(FOUR, max_unreadable=0.9))
    assert digest(root) == digest(written)


def test_a_complete_data_set_of_archives_is_not_listed_again(small, tmp_path, capsys):
    archive = tmp_path / "source" / "images.bin"
    calls = []

    def fill(builder: Builder) -> None:
        calls.append(1)
        small.fill(builder)

    source = replace(small, fill=fill, inputs=[archive])
    root = tmp_path / "root"
    for settings in (FOUR, Settings(), Settings()):
        write(source, root, settings)
    assert "complete already" in capsys.readouterr().out
    assert len(calls) == 1
    with pytest.raises(PrepError, match="jpeg_quality is 95 there, 90 here"):
        write(source, root, Settings(policy=ImagePolicy(jpeg_quality=90)))
    os.utime(archive, (5, 5))
    write(source, root, Settings())
    assert len(calls) == 2


def test_a_refused_command_leaves_the_work_of_another(small, tmp_path):
    root = tmp_path / "root"
    source = replace(small, inputs=[tmp_path / "source" / "images.bin"])
    write(source, root, replace(FOUR, part="0-1"))
    (root / "_spool").mkdir()
    before = sorted(path.name for path in root.iterdir())
    for settings, what in (
        (replace(FOUR, num_shards=5), "num_shards"),
        (replace(FOUR, seed=3), "seed"),
    ):
        with pytest.raises(PrepError, match=f"{what} is .* Nothing was changed"):
            write(source, root, settings)
    other = source_of(tmp_path / "other", small_splits(22))
    with pytest.raises(PrepError, match=r"catalogue is .* Nothing was changed"):
        write(replace(other, inputs=[tmp_path / "other" / "images.bin"]), root, FOUR)
    assert sorted(path.name for path in root.iterdir()) == before


@pytest.mark.parametrize(
    ("fraction", "splits", "message"),
    [
        (0.01, small_splits(), "--minival 0.01: of 8 images, the largest class, that is none"),
        (0.5, {"val": small_splits()["val"]}, "there is no training split to cut it from"),
    ],
)
def test_a_minival_of_nothing_is_an_error(tmp_path, fraction, splits, message):
    with pytest.raises(PrepError, match=message):
        write(source_of(tmp_path, splits), tmp_path / "root", Settings(minival=fraction))


def test_names_in_any_encoding(tmp_path, capsys):
    splits = {
        "train": [
            ("gut.jpg", 0, image_bytes()),
            ("b\udcff.jpg", 1, b"damaged"),
            ("c\udcfe.jpg", 1, image_bytes()),
        ]
    }
    root = tmp_path / "root"
    write(
        source_of(tmp_path, splits),
        root,
        Settings(num_shards=1, max_unreadable=0.5, with_json=True),
    )
    assert json.loads((root / "quarantine.jsonl").read_text())["name"] == "b\udcff.jpg"
    split = open_split(root, "train")
    assert sorted(split.key(i) for i in range(split.num_samples)) == ["c\ufffd", "gut"]


def damaged(folder: Path) -> Source:
    splits = small_splits()
    splits["train"][3] = ("train.3.JPEG", 0, image_bytes(3)[:-100])
    splits["train"][17] = ("train.17.JPEG", 2, b"<html>")
    return source_of(folder, splits)


def test_unreadable_images_are_left_out_and_listed(tmp_path, capsys):
    root = tmp_path / "root"
    write(damaged(tmp_path), root, replace(FOUR, max_unreadable=0.1))
    assert "left out: 2 unreadable images, listed in" in capsys.readouterr().out
    listed = {
        entry["key"]: entry
        for entry in map(json.loads, (root / "quarantine.jsonl").read_text().splitlines())
    }
    assert sorted(listed) == ["train_17", "train_3"]
    entry = listed["train_17"]
    expected = {
        "split": "train",
        "label": 2,
        "name": "train.17.JPEG",
        "file": "images.bin",
        "size": 6,
    }
    assert expected.items() <= entry.items()
    assert entry["sha256"] == hashlib.sha256(b"<html>").hexdigest()
    assert "cut off" in listed["train_3"]["reason"]
    split = open_split(root, "train")
    assert sorted(split.key(i) for i in range(split.num_samples)) == sorted(
        f"train_{n}" for n in range(23) if n not in (3, 17)
    )
    assert json.loads((root / "_info.json").read_text())["quarantined"] == 2


def test_too_many_unreadable_images_stop_it_until_they_are_mended(written, tmp_path):
    root = tmp_path / "root"
    strict = replace(FOUR, max_unreadable=0)
    with pytest.raises(
        PrepError,
        match=(
            r"[12] images cannot be read, more than the 0 that --max-unreadable 0"
            r" allows[^\0]*train_"
        ),
    ):
        write(damaged(tmp_path), root, strict)
    assert not (root / "_info.json").exists()
    for tar in root.glob("*.tar"):
        scan_tar(tar)
    # the same command, once they are mended
    write(source_of(tmp_path, small_splits()), root, strict)
    assert digest(root) == digest(written)


def test_images_that_are_no_rgb_jpeg_are_converted_and_counted(tmp_path, capsys):
    splits = small_splits()
    for n, (form, mode) in enumerate(
        [("JPEG", "CMYK"), ("PNG", "RGBA"), ("JPEG", "CMYK"), ("WEBP", "RGB")]
    ):
        splits["train"][n] = (f"train.{n}.JPEG", n % 3, image_bytes(n, form, mode))
    write(source_of(tmp_path, splits), tmp_path / "root", FOUR)
    info = json.loads((tmp_path / "root" / "_info.json").read_text())
    assert sum(info["changed"].values()) == 4
    assert info["changed"]["CMYK JPEG"] == 2
    assert "2 CMYK JPEG" in capsys.readouterr().out
    split = open_split(tmp_path / "root", "train")
    for i in range(split.num_samples):
        with Image.open(io.BytesIO(split.read(i))) as image:
            assert (image.format, image.mode) == ("JPEG", "RGB")


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "split 'train' has no samples"),
        ([("a.b.jpg", 0, b"x"), ("a_b.jpg", 1, b"y")], "1 keys are used more than once: a_b"),
        ([("a.jpg", 3, b"x")], r"1 labels are outside \[0, 3\), the first is 3"),
    ],
)
def test_bad_catalogues(tmp_path, samples, message):
    with pytest.raises(PrepError, match=message):
        write(source_of(tmp_path, {"train": samples}), tmp_path / "root")
    assert not (tmp_path / "root").exists()


# ---- real processes: kills, full disks -----------------------------------------------------------


@pytest.fixture(scope="module")
def prepare(tmp_path_factory) -> list[str]:
    """A command line without its --out: 120 and 30 images in 12 and 3 shards; each image takes some
    milliseconds."""
    folder = tmp_path_factory.mktemp("large") / "images"
    for split, each in (("train", 12), ("val", 3)):
        for label in range(10):
            name = f"class{label}"
            (folder / split / name).mkdir(parents=True)
            for number in range(each):
                (folder / split / name / f"{number}.jpg").write_bytes(
                    image_bytes(20 * label + number, size=(400, 400))
                )
    options = ["--num-shards", "12", "--resize-short-side", "300"]
    return [sys.executable, "-m", "data_prep.imagefolder", str(folder), *options]


@pytest.fixture(scope="module")
def undisturbed(prepare, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("undisturbed") / "root"
    subprocess.run([*prepare, "--out", root, "--workers", "2"], check=True)
    return root


def test_a_dry_run_tells_the_plan_and_writes_nothing(prepare, undisturbed, tmp_path):
    done = subprocess.run(
        [*prepare, "--out", tmp_path / "root", "--dry-run"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert not (tmp_path / "root").exists()
    info = json.loads((undisturbed / "_info.json").read_text())
    for split, described in info["splits"].items():
        assert (
            f"{split}: {described['num_samples']:,} images in {len(described['filenames'])} shards"
            in done.stdout
        )
    size = float(re.search(r"disk: about ([\d.]+) MB", done.stdout)[1]) * 1e6
    assert size == pytest.approx(
        sum(sum(described["shard_bytes"]) for described in info["splits"].values()), rel=0.5
    )


@pytest.mark.parametrize("num_tars", [pytest.param(0, marks=pytest.mark.full), 4])
def test_killed_and_continued(prepare, undisturbed, tmp_path, num_tars):
    root = tmp_path / "root"
    process = subprocess.Popen([*prepare, "--out", root, "--workers", "2"], start_new_session=True)
    while len(list(root.glob("*.tar"))) < num_tars or not list(root.glob(".*.tar.*.tmp")):
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # the workers follow their parent, or they would write on beside the next run
    wait_for_end_of_group(process.pid)
    for tar in root.glob("*.tar"):
        assert tar.read_bytes() == (undisturbed / tar.name).read_bytes(), "torn"
    assert not (root / "_info.json").exists()
    again = subprocess.run(
        [*prepare, "--out", root, "--workers", "1"], check=True, capture_output=True, text=True
    )
    assert num_tars == 0 or "are there already" in again.stdout
    assert digest(root) == digest(undisturbed)


@pytest.mark.parametrize(
    "ranges", [["8-12", "0-3", "4-14"], ["2/3", "0/3", "1/3"]], ids=["overlapping", "equal"]
)
def test_processes_that_share_the_work_write_what_one_would(prepare, undisturbed, tmp_path, ranges):
    root = tmp_path / "root"
    parts = [
        subprocess.Popen(
            [*prepare, "--out", root, "--workers", "1", "--shards", part], stdout=subprocess.PIPE
        )
        for part in ranges
    ]
    outputs = [part.communicate()[0].decode() for part in parts]
    assert [part.returncode for part in parts] == [0, 0, 0], outputs
    assert any(": complete, 10 classes" in output for output in outputs)
    assert digest(root) == digest(undisturbed)


def test_a_bad_part_is_one_line(prepare, tmp_path):
    failed = subprocess.run(
        [*prepare, "--out", tmp_path / "root", "--shards", "9-99"], capture_output=True, text=True
    )
    assert failed.returncode == 2
    assert (
        failed.stderr
        == "error: --shards 9-99: there are shards 0 to 14 (train has 12; val has 3)\n"
    )
    assert not (tmp_path / "root").exists()


def wait_for_end_of_group(group: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.01)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_ends_at_once_and_clean(
    prepare, undisturbed, tmp_path, number, status, early
):
    """The parent alone, as a batch system may; or all processes, as a terminal does, while workers
    start."""
    root = tmp_path / "root"
    process = subprocess.Popen(
        [*prepare, "--out", root, "--workers", "2"],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(root.glob("_writing.json" if early else ".*.tar.*.tmp")):
        assert process.poll() is None, "finished before it could be interrupted"
        time.sleep(0.001)
    if early:
        time.sleep(0.1)
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == status
    assert errors.endswith("; the same command continues\n")
    assert errors.count("\n") == 1
    wait_for_end_of_group(process.pid)
    assert not list(root.glob(".*.tar.*.tmp"))
    subprocess.run([*prepare, "--out", root, "--workers", "2"], check=True)
    assert digest(root) == digest(undisturbed)


def test_full_disk_is_one_line_and_continues(prepare, undisturbed, tmp_path):
    root = tmp_path / "root"
    command = " ".join(map(str, [*prepare, "--out", root, "--workers", "1"]))
    failed = subprocess.run(
        ["bash", "-c", f"ulimit -f 40; exec {command}"], capture_output=True, text=True
    )
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: ")
    assert failed.stderr.count("\n") == 1
    assert ".tar: File too large" in failed.stderr
    assert "the same command continues" in failed.stderr
    assert not list(root.glob("*.tar"))
    assert not list(root.glob(".*.tmp"))
    subprocess.run([*prepare, "--out", root, "--workers", "2"], check=True)
    assert digest(root) == digest(undisturbed)
