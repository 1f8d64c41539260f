"""Test class folders in a zip or tar, which may be on a server or may have been decompressed
earlier."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from checksums import digest
from prep_place import new_catalog
from prep_sources import FOOD, OTHERS, tgz_of, zip_of
from servers import WebServer
from small_shards import jpeg

from data_prep import animals10, imagefolder
from data_prep.errors import PrepError
from data_prep.read.archives import inflate_tar
from data_prep.read.class_tree import open_tree
from data_prep.read.folder_layout import read_layout
from vit.data.storage.opening import open_split
from vit.system.retry import RetryPolicy


def prepare(source: Path, out: Path, *words: str) -> dict[str, str]:
    """Run the command, and return the digests of the tars that it wrote."""
    line = [str(source), "--out", str(out), "--num-shards", "2", "--workers", "1", *words]
    assert imagefolder.main(line) == 0
    return {path.name: digest(path.read_bytes()) for path in out.glob("*.tar")}


def test_an_archive_may_have_only_class_folders_and_other_files(tmp_path):
    files = {f"{name}/{n}.jpg": jpeg(n) for name in ("pizza", "steak") for n in range(6)}
    files |= {"pizza/notes/names.txt": b"x", "pizza/a.txt": b"x", "pizza/deep/1.JPG": jpeg(1)}
    archive = tmp_path / "flat.zip"
    archive.write_bytes(zip_of(files, "images/"))
    catalog = new_catalog(imagefolder.source(archive, val_fraction=0.5), tmp_path / "c", seed=0)
    keys = {
        s.key for split, n in catalog.splits.items() for s in catalog.table(split).samples(range(n))
    }
    assert keys == {name[:-4].replace("/", "_") for name in files if name.lower().endswith(".jpg")}
    assert catalog.notes == ["2 other files, no images: 2 .txt"]
    layout = read_layout(open_tree(archive), None, with_classes=True)
    assert str(layout.trees["train"]) == f"{archive}/images"


def test_the_tar_of_a_replaced_archive_is_not_used(tmp_path):
    archive = tmp_path / "food.tar.gz"
    archive.write_bytes(tgz_of(FOOD))
    tar = inflate_tar(archive)
    first = tar.read_bytes()
    assert inflate_tar(archive) == tar, "the same command must succeed again"
    archive.write_bytes(tgz_of(OTHERS))
    with pytest.raises(
        PrepError, match=r"food\.tar: its modification time differs from that of food\.tar\.gz"
    ):
        inflate_tar(archive)
    assert tar.read_bytes() == first, (
        "the tar must not change, because the user may have created it"
    )
    tar.unlink()
    assert inflate_tar(archive).read_bytes() != first


# ---- archives on a server ------------------------------------------------------------------------


@pytest.fixture
def web(tmp_path, monkeypatch):
    monkeypatch.setattr(RetryPolicy.__init__, "__defaults__", (0.3, 0.01, 0.05))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with WebServer({"/a/food.zip": zip_of(FOOD, "food/")}) as server:
        yield server


def test_a_download_is_continued_verified_and_kept(web, tmp_path, capsys):
    """The transfer is interrupted twice, the second time between two commands. A complete archive
    must not be downloaded again."""
    whole = web.files["/a/food.zip"]
    folder = tmp_path / "downloads"
    folder.mkdir()
    (folder / "food.zip.part").write_bytes(whole[:1000])
    web.cuts = [2000]
    url = f"{web.url}/a/food.zip"
    shards = prepare(folder, tmp_path / "out", "--download", url)
    ranges = [wanted for _, _, wanted in web.requests]
    assert ranges == ["bytes=1000-", f"bytes=3000-{len(whole) - 1}"]
    output = capsys.readouterr().err
    assert "not compared with any checksum" in output
    (sha256,) = re.findall(r"--sha256 (\w{64}) to verify it", output)
    assert sha256 == hashlib.sha256(whole).hexdigest()
    words = ("--download", url, "--sha256", sha256)
    assert prepare(folder, tmp_path / "again", *words) == shards
    assert "sha256 verified" in capsys.readouterr().err
    assert len(web.requests) == 2


def test_animals_are_downloaded_from_kaggle_with_a_login(tmp_path, monkeypatch, web, capsys):
    """Kaggle redirects to the zip. Only Kaggle may receive the login."""
    files = {f"raw-img/{name}/{n}.jpeg": jpeg(n) for name in animals10.ENGLISH for n in range(2)}
    with WebServer({"/storage.zip": zip_of(files)}) as storage:
        web.redirects = {"/api/animals10": f"{storage.url}/storage.zip"}
        monkeypatch.setattr(animals10, "URL", f"{web.url}/api/animals10")
        monkeypatch.setenv("KAGGLE_USERNAME", "somebody")
        monkeypatch.setenv("KAGGLE_KEY", "a-secret-key")
        line = [str(tmp_path / "d"), "--out", str(tmp_path / "out"), "--download", "--workers", "1"]
        assert animals10.main(line) == 0
        assert [headers.get("Authorization") for headers in storage.headers] == [None]
    assert web.headers[0]["Authorization"].startswith("Basic ")
    printed = capsys.readouterr()
    assert "a-secret-key" not in printed.out + printed.err
    assert (tmp_path / "d" / "animals10.zip").exists()
    assert open_split(tmp_path / "out", "train").num_samples == 20
