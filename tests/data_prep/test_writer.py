"""The writer: the same bytes whatever happens on the way, nothing torn, nothing overwritten, and readable errors."""

import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from data_prep.jobs import PrepError
from data_prep.writer import Catalogue, Sample, as_jpeg, choose_num_shards, choose_part, deal, safe_key, write
from vit.data.shards import open_split
from vit.data.tar import scan_tar


def image_bytes(number: int = 0, format: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (24, 16)) -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", size, (number * 7 % 256, number * 3 % 256, 90)).convert(mode).save(encoded, format)
    return encoded.getvalue()


def small_catalogue(num_train: int = 23, num_val: int = 7, **options) -> Catalogue:
    """`read` is the builtin `bytes`: the origin of a sample is its encoded image."""
    splits = {
        split: [Sample(f"{split}.{n}", n % 3, image_bytes(n)) for n in range(num)]
        for split, num in (("train", num_train), ("val", num_val))
    }
    return Catalogue("test", options, ["a", "b", "c"], splits, bytes)


def digest(root: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(root.iterdir())}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("written") / "root"
    write(small_catalogue(), root, num_shards=4, workers=1)
    return root


def test_workers_and_order_leave_no_trace(written, tmp_path):
    catalogue = small_catalogue()
    backwards = {split: samples[::-1] for split, samples in catalogue.splits.items()}
    write(Catalogue("test", {}, ["a", "b", "c"], backwards, bytes), tmp_path / "b", num_shards=4, workers=2)
    assert digest(tmp_path / "b") == digest(written)
    assert not list(written.glob(".*"))
    assert not (written / "_writing.json").exists()


def test_every_sample_once_with_its_label(written):
    for split, num in (("train", 23), ("val", 7)):
        opened = open_split(written, split)
        found = {opened.key(i): (opened.read(i), int(opened.index["label"][i])) for i in range(opened.num_samples)}
        assert found == {f"{split}_{n}": (image_bytes(n), n % 3) for n in range(num)}
        assert opened.class_names == ["a", "b", "c"]


def test_shards_are_plain_tars(written):
    info = json.loads((written / "_info.json").read_text())
    train = info["splits"]["train"]
    assert train["name"] == "train"
    assert train["num_samples"] == 23
    assert sorted(train["shard_lengths"]) == [5, 6, 6, 6]
    assert len(info["splits"]["val"]["filenames"]) == 1  # in proportion: 4 * 7 / 23
    for name, num_bytes, sha256 in zip(train["filenames"], train["shard_bytes"], train["shard_sha256"], strict=True):
        data = (written / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (num_bytes, sha256)
        with tarfile.open(written / name) as tar:
            for member in tar:
                assert (member.mode, member.uid, member.gid, member.mtime, member.uname, member.gname) == (0o644, 0, 0, 0, "", "")
                assert member.isreg()
                assert not member.pax_headers
        listing = subprocess.run(["tar", "-tvf", written / name], check=True, capture_output=True, text=True)
        assert listing.stderr == ""
        keys = [line.split()[-1] for line in listing.stdout.splitlines()]
        assert keys == [f"{sample.key}.{ext}" for sample in scan_tar(written / name) for ext in ("jpg", "cls")]


def test_deal_is_fair_and_seeded():
    samples = [Sample(f"k{n}", 0, None) for n in range(101)]
    hands = deal(samples, 8, seed=1)
    assert sorted(map(len, hands)) == [12] * 3 + [13] * 5
    assert Counter(s for hand in hands for s in hand) == Counter(samples)
    assert hands == deal(samples[::-1], 8, seed=1) != deal(samples, 8, seed=2)
    assert [s.key for s in hands[0][:4]] == ["k14", "k49", "k4", "k18"], "the permutation is part of the format: do not change it"


def test_default_number_of_shards(monkeypatch):
    assert choose_num_shards(small_catalogue(), None) == {"train": 8, "val": 2}
    assert choose_num_shards(small_catalogue(5, 5), None) == {"train": 5, "val": 5}
    catalogue = small_catalogue(1000, 100)
    monkeypatch.setattr("data_prep.writer.SHARD_BYTES", len(image_bytes()) * 50)
    assert choose_num_shards(catalogue, None)["train"] == pytest.approx(20, abs=1)
    with pytest.raises(PrepError, match="use --num-shards 23 or fewer"):
        choose_num_shards(small_catalogue(), 24)


def test_again_keeps_what_is_whole_and_mends_the_rest(written, tmp_path, capsys):
    root = tmp_path / "root"
    write(small_catalogue(), root, num_shards=4)
    kept = (root / "train-00001.tar").stat().st_mtime_ns
    (root / "train-00000.tar").unlink()
    os.truncate(root / "train-00002.tar", 1000)
    (root / "train-00003.json").unlink()
    (root / "_info.json").unlink()
    (root / ".train-00000.tar.elsewhere.1.tmp").write_bytes(b"left by a killed writer")
    os.utime(root / ".train-00000.tar.elsewhere.1.tmp", (1, 1))
    ended = subprocess.Popen(["true"])
    ended.wait()
    (root / f".train-00000.tar.{socket.gethostname()}.{ended.pid}.tmp").write_bytes(b"left by a killed writer of this host")
    with pytest.raises(PrepError, match="shards of unknown origin"):  # neither plan nor info: could be anyone's
        write(small_catalogue(), root, num_shards=4)
    (root / "_info.json").write_bytes((written / "_info.json").read_bytes())
    capsys.readouterr()
    write(small_catalogue(), root, num_shards=4)
    assert "2 of 5 shards are whole already and are kept" in capsys.readouterr().out
    assert (root / "train-00001.tar").stat().st_mtime_ns == kept
    assert digest(root) == digest(written)


@pytest.mark.parametrize(
    ("catalogue", "settings", "difference"),
    [
        (small_catalogue(), {"seed": 1}, "seed is 0 there, 1 here"),
        (small_catalogue(), {"num_shards": 5}, "num_shards is"),
        (small_catalogue(quality=9), {}, "quality is null there, 9 here"),
        (small_catalogue(22), {}, "catalogue is"),
    ],
)
def test_other_contents_are_refused(written, catalogue, settings, difference):
    before = digest(written)
    with pytest.raises(PrepError, match=rf"holds another data set or other options: .*{difference}.*choose another --out"):
        write(catalogue, written, **{"num_shards": 4, **settings})
    assert digest(written) == before


def test_parts_in_any_order_are_the_whole_and_a_repeated_part_changes_nothing(written, tmp_path, capsys):
    root = tmp_path / "root"
    for part, missing in (("3-4", "3 of 5 are still missing (train-00000.tar, train-00001.tar, train-00002.tar)"), ("0-0", "2 of 5")):
        write(small_catalogue(), root, num_shards=4, part=part)
        assert missing in capsys.readouterr().out
    assert (root / "_writing.json").exists()
    assert not (root / "_info.json").exists()
    before = {path: path.stat().st_mtime_ns for path in root.iterdir()}
    write(small_catalogue(), root, num_shards=4, part="0-0")
    assert {path: path.stat().st_mtime_ns for path in root.iterdir()} == before
    write(small_catalogue(), root, num_shards=4, part="0-2", workers=2)
    assert digest(root) == digest(written)
    before = {path: path.stat().st_mtime_ns for path in root.iterdir()}
    write(small_catalogue(), root, num_shards=4, part="3-4")
    assert "complete already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in root.iterdir()} == before


def test_the_file_of_a_live_writer_is_left_alone(written, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    live = [root / f".train-00000.tar.{name}.tmp" for name in (f"{socket.gethostname()}.{os.getppid()}", "elsewhere.1")]
    for path in live:
        path.write_bytes(b"being written")
    write(small_catalogue(), root, num_shards=4, part="0-0")
    assert all(path.exists() for path in live)


def test_a_part_mends_what_is_gone_from_a_complete_data_set(written, tmp_path):
    root = tmp_path / "root"
    write(small_catalogue(), root, num_shards=4)
    (root / "val-00000.tar").unlink()
    write(small_catalogue(), root, num_shards=4, part="1/2")
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
        ("5-3", "A-B goes upwards"),
        ("3/3", "3 parts are numbered 0 to 2"),
        ("0/0", "there cannot be 0 parts"),
        ("-1-3", "expected A-B, such as 100-199, or I/N"),
        ("4", "expected A-B"),
        ("all", "expected A-B"),
    ],
)
def test_bad_parts(part, message, tmp_path):
    with pytest.raises(PrepError, match=f"^--shards {part}: .*{message}"):
        choose_part(part, {"train": 8, "val": 2})


def test_unreadable_images_are_all_listed(tmp_path):
    catalogue = small_catalogue()
    train = catalogue.splits["train"]
    good = dict(enumerate(train))
    train[3] = train[3]._replace(origin=image_bytes(3)[:-100])
    train[17] = train[17]._replace(origin=b"<html>")
    root = tmp_path / "root"
    with pytest.raises(PrepError, match=r"2 images cannot be read[^\0]*train_17: not an image[^\0]*train_3: .*[Tt]runcated"):
        write(catalogue, root, num_shards=4)
    assert not (root / "_info.json").exists()
    for tar in root.glob("*.tar"):
        scan_tar(tar)
    train[3], train[17] = good[3], good[17]
    write(catalogue, root, num_shards=4)  # the same command, once they are mended
    assert open_split(root, "train").num_samples == 23


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "split 'train' has no samples"),
        ([Sample("a.b", 0, b""), Sample("a_b", 1, b"")], "1 keys are used more than once: a_b"),
        ([Sample("a", 2, b"")], r"1 labels lie outside \[0, 2\): a"),
    ],
)
def test_bad_catalogues(tmp_path, samples, message):
    with pytest.raises(PrepError, match=message):
        write(Catalogue("test", {}, ["a", "b"], {"train": samples}, bytes), tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_images_pass_untouched_or_become_rgb_jpeg():
    for mode in ("RGB", "L"):
        assert as_jpeg(image_bytes(5, "JPEG", mode)) == image_bytes(5, "JPEG", mode)
    for format, mode in (("JPEG", "CMYK"), ("PNG", "RGBA"), ("PNG", "P"), ("PNG", "RGB"), ("WEBP", "RGB"), ("GIF", "P"), ("TIFF", "RGB")):
        given = Image.open(io.BytesIO(image_bytes(5, format, mode))).convert("RGB").resize((1, 1), Image.Resampling.BOX)
        with Image.open(io.BytesIO(as_jpeg(image_bytes(5, format, mode)))) as image:
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (24, 16))
            assert all(
                abs(a - b) <= 6
                for a, b in zip(image.resize((1, 1), Image.Resampling.BOX).getpixel((0, 0)), given.getpixel((0, 0)), strict=True)
            ), (format, mode)


def test_safe_keys():
    assert safe_key("n01/a.b c\n") == "n01_a_b_c_"
    long = "é" * 80
    assert len(safe_key(long).encode()) <= 90
    assert safe_key(long) != safe_key(long + "x")
    assert safe_key("bad\udcff") == "bad\ufffd"


# ---- real processes: kills, full disks --------------------------------------------------------------------------------

DIGITS = [
    sys.executable,
    "-m",
    "data_prep.digits",
    "--renderings",
    "1",
    "--val-renderings",
    "1",
    "--num-shards",
    "12",
    "--image-size",
    "32",
]


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("digits") / "root"
    subprocess.run([*DIGITS, "--out", root, "--workers", "2"], check=True)
    return root


@pytest.mark.parametrize("num_tars", [0, 4])
def test_killed_and_continued(digits, tmp_path, num_tars):
    root = tmp_path / "root"
    process = subprocess.Popen([*DIGITS, "--out", root, "--workers", "2"], start_new_session=True)
    while len(list(root.glob("*.tar"))) < num_tars or not list(root.glob(".*.tar.*.tmp")):
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10  # the workers follow their parent, or they would write on beside the next run
    while group_exists(process.pid):
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.01)
    for tar in root.glob("*.tar"):
        assert tar.read_bytes() == (digits / tar.name).read_bytes(), "torn"
    assert not (root / "_info.json").exists()
    again = subprocess.run([*DIGITS, "--out", root, "--workers", "1"], check=True, capture_output=True, text=True)
    assert num_tars == 0 or "are whole already" in again.stdout
    assert digest(root) == digest(digits)


@pytest.mark.parametrize("ranges", [["8-12", "0-3", "4-14"], ["2/3", "0/3", "1/3"]], ids=["overlapping", "equal"])
def test_processes_that_share_the_work_write_what_one_would(digits, tmp_path, ranges):
    root = tmp_path / "root"
    parts = [subprocess.Popen([*DIGITS, "--out", root, "--workers", "1", "--shards", part], stdout=subprocess.PIPE) for part in ranges]
    outputs = [part.communicate()[0].decode() for part in parts]
    assert [part.returncode for part in parts] == [0, 0, 0], outputs
    assert any(": complete, 10 classes" in output for output in outputs)
    assert digest(root) == digest(digits)


def test_a_bad_part_is_one_line(tmp_path):
    failed = subprocess.run([*DIGITS, "--out", tmp_path / "root", "--shards", "9-99"], capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr == "error: --shards 9-99: there are shards 0 to 14 (train has 12; val has 3), and A-B goes upwards\n"
    assert not (tmp_path / "root").exists()


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_full_disk_is_one_line_and_continues(digits, tmp_path):
    root = tmp_path / "root"
    command = " ".join(map(str, [*DIGITS, "--out", root, "--workers", "1"]))
    failed = subprocess.run(["bash", "-c", f"ulimit -f 100; exec {command}"], capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: ")
    assert failed.stderr.count("\n") == 1
    assert ".tar: File too large" in failed.stderr
    assert "it continues" in failed.stderr
    assert not list(root.glob("*.tar"))
    assert not list(root.glob(".*.tmp"))
    subprocess.run([*DIGITS, "--out", root, "--workers", "2"], check=True)
    assert digest(root) == digest(digits)
