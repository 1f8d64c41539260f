"""Test the rows of errors/rows.yaml that describe missing, corrupt, rejected or swapped data."""

from __future__ import annotations

import json
import os
import shutil
import sys
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from checksums import indexed_as_it_is
from error_rows import WITHOUT_PRIVILEGES, Place, Row, Scenarios
from processes import as_by_another_program, call, environment
from remote_shards import claim_encoding
from safetensors import safe_open
from safetensors.torch import save_file
from servers import WebServer
from small_shards import add

from vit.data.storage.opening import open_split

scenario = Scenarios()


@scenario("images that are not shards yet")
def _(place):
    (place.folder / "photos" / "cats").mkdir(parents=True)
    place.train(f"data.root={place.folder / 'photos'}")


@scenario("images without labels")
def _(place):
    for name in ("a.jpg", "b.jpg"):
        add(place.folder / "photos" / name)
    out = place.folder / "unlabeled"
    words = ["data_prep.imagefolder", f"{place.folder / 'photos'}", "--out", f"{out}"]
    done = call([sys.executable, "-m", *words, "--no-classes", "--workers", "1"], environment())
    assert done.returncode == 0, done.stderr
    place.train(f"data.root={out}", "data.val_split=train")


@scenario("a dataset without the split `val`")
def _(place):
    for name in ("cat/a.jpg", "dog/b.jpg"):
        add(place.folder / "few" / name)
    words = ["data_prep.imagefolder", f"{place.folder / 'few'}", "--out", f"{place.folder / 'out'}"]
    done = call([sys.executable, "-m", *words, "--workers", "1"], environment())
    assert done.returncode == 0, done.stderr
    place.train(f"data.root={place.folder / 'out'}")


@scenario("labels to evaluate with that are of other images")
def _(place):
    path = place.folder / "real.json"
    path.write_text("[[0], [1]]")
    place.train(f"eval.sets.real.labels={path}")


@scenario(
    "the same in a set of `eval.sets`, or in a copy of the data: training goes on", begun=True
)
def _(place):
    place.train("train.steps=1", "eval.sets.trained.split=train[:50%]")
    notes = [line for line in place.done.stderr.splitlines() if "byte-equal" in line]
    assert len(notes) == 1, "the images in val differ, so only the dataset must be reported"


@scenario("a set to evaluate on with a class that the model does not have")
def _(place):
    root = shutil.copytree(place.shards, place.folder / "other")
    info = json.loads((root / "_info.json").read_text())
    names = [*info["class_names"][:-1], "lynx"]
    (root / "_info.json").write_text(json.dumps({**info, "class_names": names}))
    place.train(f"eval.sets.a.root={root}")


@scenario("a dataset folder that may not be read")
def _(place):
    (place.own_shards() / "_info.json").chmod(0)
    place.train(prefix=WITHOUT_PRIVILEGES)


@scenario("an `_info.json` that names shards of another folder")
def _(place):
    info = place.own_shards() / "_info.json"
    info.write_text(info.read_text().replace('"train-00000.tar"', '"../train-00000.tar"'))
    place.train()


@scenario("a shard is missing")
def _(place):
    (place.own_shards() / "train-00001.tar").unlink()
    place.train()


@scenario("a shard is truncated")
def _(place):
    os.truncate(place.own_shards() / "train-00001.tar", 30_000)
    place.train()


@scenario("a shard was replaced by another of the same size")
def _(place):
    root = place.own_shards()
    shutil.copy(root / "train-00001.tar", root / "train-00000.tar")
    assert (root / "train-00000.tar").stat().st_size == json.loads(
        (root / "train-00000.json").read_text()
    )["bytes"]
    place.train()


@scenario("a shard does not match its index, as its reader finds", begun=True)
def _(place):
    root = place.own_shards()
    data = (root / "train-00000.tar").read_bytes()
    index = np.load(root / "train.index.npy")
    offset = [int(row["offset"]) for row in index[:3]]
    a, b, c = (start - 512 for start in offset)
    assert index["size"][0] != index["size"][1]
    # swap the first two samples
    (root / "train-00000.tar").write_bytes(data[:a] + data[b:c] + data[a:b] + data[c:])
    place.train("train.steps=5")


def spoil_an_image(root: Path) -> str:
    split = open_split(root, "train")
    row = split.index[0]
    key = split.key(0)
    with open(root / split.filenames[0], "r+b") as tar:
        tar.seek(int(row["offset"]))
        tar.write(bytes(200))
    indexed_as_it_is(split, 0)
    return key


@scenario("a bit flipped in a shard after it was indexed", begun=True)
def _(place):
    split = open_split(place.own_shards(), "train")
    with open(split.where(0), "r+b") as tar:
        tar.seek(int(split.index["offset"][0]) + 300)
        [byte] = tar.read(1)
        tar.seek(-1, 1)
        tar.write(bytes([byte ^ 1]))
    place.train("train.steps=5", "loader.on_bad_image=skip")


@scenario("a file of samples to leave out that names none of them")
def _(place):
    path = place.folder / "exclude.txt"
    path.write_text("nobody\n")
    place.train(f"data.exclude={path}")


@scenario("balanced weights where a class has no image")
def _(place):
    path = place.folder / "exclude.txt"
    path.write_text("label=1\n")
    place.train("loss.class_weights=balanced", f"data.exclude={path}")


@scenario("a source with classes that are not evaluated on")
def _(place):
    root = shutil.copytree(place.shards, place.folder / "other")
    info = json.loads((root / "_info.json").read_text())
    info["class_names"][1] = "walrus"
    (root / "_info.json").write_text(json.dumps(info))
    place.train(f"data.sources=[{{root: {root}}}]")


@scenario("sources that name their classes differently, where the evaluated images have no names")
def _(place):
    def named(root: Path, names: list[str]) -> None:
        info = json.loads((root / "_info.json").read_text())
        (root / "_info.json").write_text(json.dumps({**info, "class_names": names}))

    named(place.own_shards(), [])
    sources = [shutil.copytree(place.shards, place.folder / name) for name in ("one", "two")]
    named(sources[0], ["cat", "dog", "eel"])
    named(sources[1], ["eel", "dog", "cat"])
    place.train(f"data.sources=[{{root: {sources[0]}}}, {{root: {sources[1]}}}]")


@scenario("a corrupt image in training", begun=True)
def _(place):
    key = spoil_an_image(place.own_shards())
    place.train("train.steps=5")
    assert f"'{key}'" in place.done.stderr


@scenario("the same, with `loader.on_bad_image=skip`: training goes on", begun=True)
def _(place):
    key = spoil_an_image(place.own_shards())
    place.train("train.steps=5", "loader.on_bad_image=skip")
    assert f"{key} could not" in place.done.stderr
    lines = [
        json.loads(line) for line in (place.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["bad_images"] for line in lines if line["kind"] == "train"][-1] == 1


@scenario("a corrupt image in evaluation")
def _(place):
    root = place.own_shards()
    split = open_split(root, "val")
    with open(root / split.filenames[0], "r+b") as tar:
        tar.seek(int(split.index[0]["offset"]))
        tar.write(bytes(200))
    indexed_as_it_is(split, 0)
    place.evaluate(place.finished, "--data", root)


@scenario("an index with another size than the image's, as its decoder finds", begun=True)
def _(place):
    path = place.own_shards() / "train.index.npy"
    index = np.load(path)
    index["width"] -= 1
    np.save(path, index)
    place.train("train.steps=5")


@scenario("a URL without `_info.json`")
def _(place):
    with WebServer({}) as server:
        place.train(f"data.root={server.url}/shards")


@scenario("a URL that wants a login")
def _(place):
    with WebServer({}) as server:
        server.login = "me:pa55word"
        place.train(f"data.root={server.url}/shards")


@scenario("a login that is not accepted")
def _(place):
    with WebServer({}) as server:
        server.login = "me:pa55word"
        place.train(f"data.root={server.url.replace('://', '://me:another@')}/shards")


@scenario("`launch/eval.py` on a run whose data had a login in their address")
def _(place):
    run = shutil.copytree(place.finished, place.folder / "finished")
    weights = run / "weights" / "last.safetensors"
    with WebServer({}) as server, safe_open(weights, "pt") as file:
        server.login = "me:pa55word"
        config = json.loads(file.metadata()["config"])
        config["data"]["root"] = f"{server.url.replace('://', '://***@')}/shards"
        save_file(
            {name: file.get_tensor(name) for name in file.keys()},  # noqa: SIM118
            weights,
            {**as_by_another_program(file.metadata()), "config": json.dumps(config)},
        )
        place.evaluate(weights)


@scenario("`VIT_HTTP_HEADER` of another form")
def _(place):
    with WebServer({}) as server:
        place.train(f"data.root={server.url}/shards", VIT_HTTP_HEADER="Authorization: Bearer abc")


@scenario("a server that does not give parts of files")
def _(place):
    with WebServer({"/shards/_info.json": b"{}"}) as server:
        server.ranges = False
        place.train(f"data.root={server.url}/shards")


@scenario("a server that compresses what it sends")
def _(place):
    with WebServer({"/shards/_info.json": b"{}"}) as server:
        claim_encoding(server, "gzip")
        place.train(f"data.root={server.url}/shards")


@scenario("a server that cannot be reached", slow=True)
def _(place):
    place.train("data.root=http://127.0.0.1:9/shards", "loader.patience_s=1")


@scenario("shards at a URL whose package is not installed")
def _(place):
    place.train("data.root=gs://bucket/shards")


@scenario("a stream without the number of its images")
def _(place):
    place.train("stream.urls=pipe:exit 3")


@scenario("a stream that breaks", begun=True)
def _(place):
    place.train("stream.urls=pipe:exit 3", "stream.num_samples=60")


@scenario("a label out of range")
def _(place):
    info = place.own_shards() / "_info.json"
    info.write_text(info.read_text().replace('"class1",\n  "class2"', '"class1"'))
    place.train()


@pytest.mark.parametrize("row", scenario.rows())
def test_the_mistake_has_the_stated_result(row: Row, happened: dict[str, Future[Place]]):
    scenario.check(row, happened[row.what].result())
