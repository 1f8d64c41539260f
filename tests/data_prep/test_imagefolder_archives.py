"""Test class folders in a zip or tar, local or on a server: the shards must match those of the
unpacked folder."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
from checksums import digest
from prep_place import new_catalogue
from servers import WebServer
from small_shards import jpeg

from data_prep import animals10, imagefolder
from data_prep.errors import PrepError
from data_prep.read.archives import inflate_tar
from data_prep.read.class_tree import open_archive
from vit.data.shards.data_set import open_split
from vit.system.retry import RetryPolicy

SPLIT = {
    f"{split}/{name}/{number}.jpg": jpeg(100 * number + 10 * len(split) + len(name))
    for split, count in (("train", 6), ("test", 2))
    for name in ("pizza", "steak", "sushi")
    for number in range(count)
}
OTHERS = {"readme.txt": b"hello", "__MACOSX/train/pizza/._0.jpg": b"x", ".DS_Store": b"x"}


def as_zip(path: Path, files: dict[str, bytes], prefix: str = "") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(prefix + name, content)
    return path


def as_tar(path: Path, files: dict[str, bytes], prefix: str = "") -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def as_tgz(path: Path, files: dict[str, bytes], prefix: str = "") -> Path:
    tar = as_tar(path.with_name("inner.tar"), files, prefix)
    path.write_bytes(gzip.compress(tar.read_bytes()))
    tar.unlink()
    return path


def prepare(source: Path, out: Path, *words: str) -> dict[str, str]:
    """Run the command, and return the digests of the tars that it wrote."""
    line = [str(source), "--out", str(out), "--num-shards", "2", "--workers", "1", *words]
    assert imagefolder.main(line) == 0
    return {path.name: digest(path.read_bytes()) for path in out.glob("*.tar")}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> dict[str, str]:
    """Return the digests of shards prepared from the unpacked folder."""
    folder = tmp_path_factory.mktemp("unpacked")
    for name, content in SPLIT.items():
        (folder / "food" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "food" / name).write_bytes(content)
    return prepare(folder / "food", folder / "out")


@pytest.mark.parametrize(
    ("pack", "name", "prefix"),
    [
        (as_zip, "food.zip", "food/"),
        pytest.param(as_zip, "without_suffix", "", marks=pytest.mark.full),
        (as_tar, "food.tar", "./a/b/"),
        (as_tgz, "food.tgz", ""),
    ],
)
def test_an_archive_gives_the_shards_of_its_folder(pack, name, prefix, unpacked, tmp_path, capsys):
    archive = pack(tmp_path / name, {**SPLIT, **OTHERS}, prefix)
    assert prepare(archive, tmp_path / "out") == unpacked
    assert "in place, without unpacking" in capsys.readouterr().out
    assert open_split(tmp_path / "out", "train").class_names == ["pizza", "steak", "sushi"]
    assert open_split(tmp_path / "out", "val").num_samples == 6, (
        "val must come from the test folder of the archive"
    )
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"out", name} | ({"food.tar"} if name == "food.tgz" else set())


def test_an_archive_may_have_only_class_folders_and_other_files(tmp_path):
    files = {name.removeprefix("train/"): data for name, data in SPLIT.items() if "train" in name}
    files |= {"pizza/notes/names.txt": b"x", "pizza/a.txt": b"x", "pizza/deep/1.JPG": jpeg(1)}
    archive = as_zip(tmp_path / "flat.zip", files, "images/")
    options = imagefolder.Flags(val_fraction=0.5)
    catalogue = new_catalogue(imagefolder.source(archive, options), tmp_path / "c", seed=0)
    keys = {
        s.key
        for split, n in catalogue.splits.items()
        for s in catalogue.table(split).samples(range(n))
    }
    assert keys == {safe(name) for name in files if name.lower().endswith(".jpg")}
    assert catalogue.notes == ["2 other files, no images: 2 .txt"]
    assert str(open_archive(archive)) == f"{archive}/images"


def safe(name: str) -> str:
    return name.rpartition(".")[0].replace("/", "_")


def test_a_compressed_tar_that_is_cut_off_leaves_nothing(tmp_path):
    whole = as_tgz(tmp_path / "food.tar.gz", SPLIT).read_bytes()
    (tmp_path / "food.tar.gz").write_bytes(whole[:-1000])
    with pytest.raises(PrepError, match=r"food\.tar\.gz: damaged, or cut off"):
        inflate_tar(tmp_path / "food.tar.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["food.tar.gz"]


def test_the_tar_of_a_replaced_archive_is_not_used(tmp_path):
    archive = as_tgz(tmp_path / "food.tar.gz", SPLIT)
    tar = inflate_tar(archive)
    first = tar.read_bytes()
    assert inflate_tar(archive) == tar, "the same command must succeed again"
    as_tgz(archive, dict(list(SPLIT.items())[1:]))
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
    archive = as_zip(tmp_path / "packed.zip", SPLIT, "food/").read_bytes()
    with WebServer({"/a/food.zip": archive}) as server:
        yield server


def test_a_download_is_continued_verified_and_kept(web, unpacked, tmp_path, capsys):
    """The transfer is interrupted twice, the second time between two commands. A complete archive
    must not be downloaded again."""
    whole = web.files["/a/food.zip"]
    folder = tmp_path / "downloads"
    folder.mkdir()
    (folder / "food.zip.part").write_bytes(whole[:1000])
    web.cuts = [2000]
    url = f"{web.url}/a/food.zip"
    assert prepare(folder, tmp_path / "out", "--download", url) == unpacked
    ranges = [wanted for _, _, wanted in web.requests]
    assert ranges == ["bytes=1000-", f"bytes=3000-{len(whole) - 1}"]
    output = capsys.readouterr().err
    assert "not compared with any checksum" in output
    (sha256,) = re.findall(r"--sha256 (\w{64}) to verify it", output)
    assert sha256 == hashlib.sha256(whole).hexdigest()
    words = ("--download", url, "--sha256", sha256)
    assert prepare(folder, tmp_path / "again", *words) == unpacked
    assert "sha256 verified" in capsys.readouterr().err
    assert len(web.requests) == 2


def test_animals_are_downloaded_from_kaggle_with_a_login(tmp_path, monkeypatch, web, capsys):
    """Kaggle redirects to the zip. Only Kaggle may receive the login."""
    files = {f"raw-img/{name}/{n}.jpeg": jpeg(n) for name in animals10.ENGLISH for n in range(2)}
    with WebServer({"/storage.zip": as_zip(tmp_path / "a.zip", files).read_bytes()}) as storage:
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


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"<!DOCTYPE html><html>Please log in</html>", "expected a zip or a tar, found a web page"),
        (None, "no such file on the server; correct the address"),
        (b"CUT", "not a complete zip"),
        (bytes(range(256)) * 9, "not a tar"),
    ],
    ids=["page", "gone", "cut", "noise"],
)
def test_a_download_that_is_not_an_archive_is_not_kept(content, problem, web, tmp_path, capsys):
    whole = web.files["/a/food.zip"]
    web.files = {"/a/food.zip": whole[:-500] if content == b"CUT" else content} if content else {}
    out = tmp_path / "out"
    line = ["--download", f"{web.url}/a/food.zip", "--out", str(out), "--workers", "1"]
    assert imagefolder.main([str(tmp_path / "d"), *line]) == 2
    error = capsys.readouterr().err
    assert re.match(rf"error: {web.url}/a/food\.zip: .*\n\Z", error), error
    assert problem in error
    assert not list(tmp_path.glob("d/*"))
    assert not out.exists()
    if problem.startswith("neither"):
        web.files = {"/a/food.zip": whole}
        assert imagefolder.main([str(tmp_path / "d"), *line]) == 0, (
            "the command must succeed when the server has the file"
        )


def test_a_download_with_another_checksum_is_not_kept(web, tmp_path, capsys):
    line = ["--download", f"{web.url}/a/food.zip", "--sha256", "0" * 64]
    assert imagefolder.main([str(tmp_path / "d"), "--out", str(tmp_path / "out"), *line]) == 2
    error = capsys.readouterr().err
    sha256 = hashlib.sha256(web.files["/a/food.zip"]).hexdigest()
    assert f"sha256 is {sha256} (" in error
    assert f"expected {'0' * 64}" in error
    assert not list(tmp_path.glob("d/*"))
