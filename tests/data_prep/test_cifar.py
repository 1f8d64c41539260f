"""Test that CIFAR is downloaded, and that its pickles are never loaded."""

import hashlib
import pickle
from pathlib import Path

import pytest
from fake_imagenet import tar_of
from prep_sources import few_records, tgz_of, tiny, write
from servers import WebServer

from data_prep import cifar
from data_prep.errors import PrepError
from vit.data.storage.opening import open_split


def test_pickles_are_refused_unopened(tmp_path):
    """The pickle would create a file if it were loaded."""

    class Trap:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "sprung",))

    batch = pickle.dumps(Trap())
    packed = {"cifar/data_batch_1": batch, "cifar/readme.html": b"<html>"}
    write(
        {
            "a/data_batch_1": batch,
            "b/cifar-10-batches-py/data_batch_1": batch,
            "c/cifar-100-python/train": batch,
            "d/cifar-10-python.tar.gz": tgz_of(packed),
            "renamed.tar": tar_of(packed.items()),
            "half/cifar-10-python.tar.gz": b"half downloaded",
        },
        tmp_path,
    )
    for source in ("a", "b", "c", "d", "renamed.tar", "half"):
        with pytest.raises(
            PrepError, match="CIFAR's Python version, whose pickles can run code; expected the"
        ):
            cifar.source(tmp_path / source)
    assert not (tmp_path / "sprung").exists()


def test_download_from_a_mirror(tmp_path, capsys, monkeypatch):
    few_records(monkeypatch)
    archive = tiny("CIFAR-100 beside its archive").files["in/cifar-100-binary.tar.gz"]
    command = [
        str(tmp_path / "new"),
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "1",
        "--num-shards",
        "2",
    ]
    with WebServer({"/kriz/cifar-100-binary.tar.gz": archive}) as server:
        assert cifar.main([*command, "--url", f"{server.url}/kriz"]) == 2
        assert "--download requires --classes 10 or --classes 100" in capsys.readouterr().err
        assert cifar.main([*command, "--url", f"{server.url}/kriz", "--classes", "100"]) == 2
        assert "expected 03b5dce01913d631647c71ecec9e9cb8" in capsys.readouterr().err
        kind = cifar.KINDS[100]._replace(md5=hashlib.md5(archive).hexdigest())
        monkeypatch.setitem(cifar.KINDS, 100, kind)
        server.cuts = [5000]
        assert cifar.main([*command, "--url", f"{server.url}/kriz", "--classes", "100"]) == 0
    assert open_split(tmp_path / "out", "train").num_samples == 20
