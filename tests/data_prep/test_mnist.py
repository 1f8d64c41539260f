"""Compare MNIST and similar datasets with torchvision, and test verified downloads and training."""

import hashlib

import numpy as np
import pytest
import torchvision
from prep_sources import Files, below, few_records, tiny, write
from processes import metrics, run
from servers import WebServer

from data_prep import mnist
from data_prep.errors import PrepError
from vit.data.storage.opening import open_split


@pytest.fixture
def small(monkeypatch) -> Files:
    """Return compressed files with 20 training and 20 validation images. The real files contain
    60,000 and 10,000 images."""
    few_records(monkeypatch)
    files = tiny("MNIST, compressed").files
    return {name.removeprefix("in/"): data for name, data in files.items()}


def with_md5_of(files: Files, variant: str) -> mnist.Variant:
    md5 = {name[:-3]: hashlib.md5(data).hexdigest() for name, data in files.items()}
    return mnist.VARIANTS[variant]._replace(md5=md5)


def test_the_expected_samples_are_those_of_torchvision(tmp_path):
    source = tiny("MNIST")
    write({f"MNIST/raw/{name[3:]}": data for name, data in source.files.items()}, tmp_path)
    for split in ("train", "val"):
        expected = torchvision.datasets.MNIST(tmp_path, train=split == "train")
        samples = [sample for sample in source.samples if sample.split == split]
        assert [sample.label for sample in samples] == expected.targets.tolist()
        assert np.stack([sample.image for sample in samples]).tolist() == expected.data.tolist()


def test_a_file_of_another_variant_is_refused(small, tmp_path, monkeypatch):
    write(below("in/KMNIST/raw/", small), tmp_path)
    monkeypatch.setitem(mnist.VARIANTS, "kmnist", with_md5_of(small, "kmnist"))
    with pytest.raises(
        PrepError, match=r"train-images-idx3-ubyte.gz: this file belongs to KMNIST; use --variant"
    ):
        mnist.source(tmp_path / "in" / "KMNIST", "fashion")


@pytest.mark.parametrize("variant", list(mnist.VARIANTS))
def test_variants_equal_those_of_torchvision(variant):
    described = mnist.VARIANTS[variant]
    reader = getattr(torchvision.datasets, described.torchvision_folder)
    assert {f"{name}.gz": md5 for name, md5 in described.md5.items()} == dict(reader.resources)
    assert [name.partition(" - ")[0] for name in reader.classes] == list(described.class_names)
    assert described.url in reader.mirrors


def test_download_from_a_mirror(small, tmp_path, capsys, monkeypatch):
    """The generated files must be rejected if MNIST's real md5s are expected, and accepted if their
    own md5s are expected."""
    served = below("/m/", small)
    command = [
        str(tmp_path / "new" / "folder"),
        "--out",
        str(tmp_path / "out"),
        "--download",
        "--workers",
        "1",
    ]
    with WebServer(served) as server:
        assert mnist.main([*command, "--url", f"{server.url}/m/"]) == 2
        assert "expected f68b3c2dcbeaaa9fbdd348bbdeb94873" in capsys.readouterr().err
        monkeypatch.setitem(mnist.VARIANTS, "mnist", with_md5_of(small, "mnist"))
        server.cuts = [1000]
        assert mnist.main([*command, "--url", f"{server.url}/m"]) == 0
        num_requests = len(server.requests)
        assert mnist.main([*command, "--url", f"{server.url}/m"]) == 0
        assert len(server.requests) == num_requests, "existing files must not be fetched again"
    assert open_split(tmp_path / "out", "train").num_samples == 20
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == sorted(small)


def test_the_recipe_trains_on_it(small, tmp_path):
    write(below("source/", small), tmp_path)
    assert (
        mnist.main([str(tmp_path / "source"), "--out", str(tmp_path / "root"), "--workers", "1"])
        == 0
    )
    overrides = [
        "data.global_batch_size=10",
        "train.steps=3",
        "train.epochs=null",
        "eval.every_epochs=null",
        "log.every_steps=1",
        "log.wandb=off",
        "log.report=false",
    ]
    where = [f"data.root={tmp_path / 'root'}", f"run.dir={tmp_path / 'run'}"]
    done = run("launch/train.py", "--config", "configs/small/mnist.yaml", *where, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [line["loss"] for line in metrics(tmp_path / "run", "train")]
    assert losses[0] == pytest.approx(np.log(10), abs=2e-3), (
        "a zero head of ten classes starts at a loss of ln 10"
    )
    assert len(losses) == 3
    assert [line["num_images"] for line in metrics(tmp_path / "run", "eval")] == [20]
