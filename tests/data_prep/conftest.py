import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import webdataset
from prep_place import Place, close_catalogs
from small_shards import add, jpeg
from verifying import PER_CLASS, image_bytes

from data_prep import imagefolder
from vit.system.retry import RetryPolicy


@pytest.fixture(autouse=True)
def no_catalog_is_left_open() -> Iterator[None]:
    """Close catalogs after each test, because each open catalog uses a file descriptor."""
    yield
    close_catalogs()
    held = []
    for link in Path("/proc/self/fd").glob("*"):  # This folder exists only on Linux.
        with suppress(OSError):  # the listing's descriptor is already closed
            held.append(os.readlink(link))
    assert not [path for path in held if "._catalog." in path]


@pytest.fixture
def foreign(tmp_path) -> Path:
    """Write shards with webdataset's writer and the file names of timm's ImageNet shards. The
    highest label is 4 in train and 2 in validation."""
    root = tmp_path / "foreign"
    root.mkdir()
    for split, num_shards in (("train", 3), ("validation", 1)):
        for shard in range(num_shards):
            with webdataset.TarWriter(str(root / f"imagenet1k-{split}-{shard:04d}.tar")) as tar:
                for n in range(4):
                    number = shard * 4 + n
                    tar.write(
                        {
                            "__key__": f"{split}{number}",
                            "jpg": jpeg(number),
                            "cls": number % (5 if split == "train" else 3),
                            "json": {"n": n},
                        }
                    )
    return root


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Prepare a dataset of 3 classes in 7 training shards and 1 validation shard. One image was
    converted from PNG, and one is unreadable."""
    folder = tmp_path_factory.mktemp("sound")
    for label, (name, count) in enumerate(PER_CLASS.items()):
        (folder / "images" / name).mkdir(parents=True)
        for n in range(count):
            (folder / "images" / name / f"{name}{n}.jpg").write_bytes(image_bytes(100 * label + n))
    (folder / "images" / "plum" / "png.png").write_bytes(image_bytes(999, "PNG"))
    (folder / "images" / "pear" / "broken.jpg").write_bytes(b"no image")
    options = ["--num-shards", "7", "--workers", "1", "--max-unreadable", "0.5"]
    assert imagefolder.main([str(folder / "images"), "--out", str(folder / "set"), *options]) == 0
    return folder / "set"


@pytest.fixture
def root(sound, tmp_path) -> Path:
    shutil.copytree(sound, tmp_path / "set")
    return tmp_path / "set"


@pytest.fixture
def flat(tmp_path) -> Path:
    for name, num in (("zebra", 20), ("ape", 31)):
        for n in range(num):
            add(tmp_path / "flat" / name / f"{n}.jpg", n)
    return tmp_path / "flat"


@pytest.fixture
def place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Place:
    """Return a `Place` for all files, including temporary files, and shorten all network
    timeouts."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(RetryPolicy.__init__, "__defaults__", (0.3, 0.01, 0.05))
    return Place(tmp_path, capfd)
