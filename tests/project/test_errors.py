"""docs/errors.md is true: each row of its first table is provoked with the real command, and what
is printed is compared with the row.

A row's first cell names its scenario. Besides text and exit status each row is checked for what was
left behind: nothing for a mistake that is found before the start; for one that shows later, only
whole files. Scenarios run at once in as many threads as there are cores, for nearly all of their
time is spent on starting Python.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm_python
from checksums import indexed_as_it_is
from error_rows import (
    NEEDS_MOUNT,
    WITH_SHORT_FILES,
    WITHOUT_PRIVILEGES,
    Row,
    leave_free,
    pattern_of,
    python,
    rows,
    small_disk,
    snapshot,
)
from processes import REPOSITORY, TINY, Background, call, command, environment, write_config
from safetensors import safe_open
from safetensors.torch import save_file
from servers import WebServer

from vit.data.batches import Batch, Batches, BatchLayout, ImageFormat
from vit.data.loader import Loader
from vit.data.shards.data_set import open_split
from vit.ranks import exit
from vit.run.checkpoint import complete_checkpoints, newest_checkpoint, read_info

VERSIONS = runpy.run_path(str(REPOSITORY / "launch" / "check_versions.py"))
ROWS = rows("Training and evaluation")


class Place:
    """A folder with a config of its own; runs commands there and remembers the last one and what it
    changed."""

    def __init__(self, folder: Path, shards: Path, finished: Path):
        self.folder = folder
        self.shards = shards
        self.finished = finished
        self.run_dir = folder / "run"
        self.config = write_config(folder, shards)

    def run(self, *line: object, **variables: str) -> None:
        self.before = snapshot(self.folder)
        env = {**environment(), "CUDA_VISIBLE_DEVICES": "", **variables}
        self.done = call([str(part) for part in line], env)
        self.after = snapshot(self.folder)

    def train(
        self,
        *overrides: object,
        prefix: tuple[object, ...] = (),
        config: Path | None = None,
        **variables: str,
    ) -> None:
        """`launch/train.py` on one rank. With a prefix, which changes what a process may do, or
        variables a real interpreter starts."""
        arguments = [
            "--config",
            config or self.config,
            f"run.dir={self.run_dir}",
            *TINY,
            *overrides,
        ]
        python = sys.executable if prefix or variables else warm_python.python(environment())
        self.run(
            *prefix, *command("launch/train.py", *arguments, ranks=0, python=python), **variables
        )

    def evaluate(self, checkpoint: Path, *flags: object) -> None:
        python = warm_python.python(environment())
        self.run(
            *command(
                "launch/eval.py",
                "--checkpoint",
                checkpoint,
                "--num-workers",
                0,
                *flags,
                ranks=0,
                python=python,
            )
        )

    def own_shards(self) -> Path:
        """A copy of the shards that may be spoilt."""
        root = shutil.copytree(self.shards, self.folder / "shards")
        self.config.write_text(self.config.read_text().replace(str(self.shards), str(root)))
        return root


SCENARIOS: dict[str, Callable[[Place], None]] = {}
BEGUN: set[str] = set()
SLOW: set[str] = set()


def scenario(what: str, *, begun: bool = False, slow: bool = False):
    """Register the scenario of the row `what`. `begun`: training was under way. `slow`: over five
    seconds."""

    def register(function: Callable[[Place], None]) -> Callable[[Place], None]:
        SCENARIOS[what] = function
        BEGUN.update([what] if begun else [])
        SLOW.update([what] if slow else [])
        return function

    return register


# ---- what a command can be started under ---------------------------------------------------------


WITH_6_GIB = python("import resource\nresource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))")


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        yield server.getsockname()[1]


# ---- configuration -------------------------------------------------------------------------------


@scenario("an unknown or misspelt key")
def _(place):
    place.config.write_text(place.config.read_text() + "optim: {weight_dekay: 0.1}\n")
    place.train()


@scenario("an option of another program")
def _(place):
    place.train("--lr", "1e-3")


@scenario("a value of the wrong type")
def _(place):
    place.train("data.global_batch_size=many")


@scenario("a value out of range")
def _(place):
    place.config.write_text(place.config.read_text() + "optim: {lr: -1}\n")
    place.train()


@scenario("several of these at once")
def _(place):
    place.train("optim.lr=fast", "data.num_worker=3")


@scenario("a key given twice")
def _(place):
    place.config.write_text(place.config.read_text() + "loss: {label_smoothing: 0.2}\n")
    place.train()


@scenario("both `epochs` and `steps`")
def _(place):
    place.config.write_text(place.config.read_text().replace("steps: 12,", "steps: 12, epochs: 3,"))
    place.train()


@scenario("no such config file")
def _(place):
    place.train(config=place.folder / "other.yaml")


OF_GUEST = ["model.embed_dim=null", "model.depth=null", "model.num_heads=null"]
OF_GUEST += ["model.proj_drop_rate=null", "model.drop_path_rate=null"]
ALONE = {
    "an unknown model name": ["model.name=vit_base16"],
    "an unknown model of timm": ["model.name=timm/resnet5"],
    "a model of timm with settings of ours that it has not": [
        *("model.name=timm/resnet18", "model.proj_drop_rate=null")
    ],
    "activations of every second block of a model of timm": [
        *("model.name=timm/resnet10t", *OF_GUEST, "train.activation_checkpointing=2")
    ],
    "activations of a model of timm that must keep them": [
        *("model.name=timm/dla34", *OF_GUEST, "train.activation_checkpointing=block")
    ],
    "a global batch that cannot be divided": ["data.global_batch_size=7"],
    "a batch larger than the data": ["data.global_batch_size=64"],
    "no such dataset folder": ["data.root=data/nowhere"],
    "an unknown split": ["data.train_split=trian"],
    "a filter with a column that is not there": ["data.filter=widht >= 64"],
    "a URL of a misspelt kind": ["data.root=htps://example.org/shards"],
    "a variable of the environment that is not set": ["data.root=https://host/shards?${SAS}"],
    "more classes in the data than `model.num_classes`": ["model.num_classes=2"],
    "an image size that the patch does not divide": ["model.image_size=30"],
    "augmentations that exclude each other": [
        *("augment.three_augment=true", "augment.randaugment_layers=2")
    ],
}
"""Settings that are the scenario."""
for what, settings in ALONE.items():
    SCENARIOS[what] = lambda place, settings=settings: place.train(*settings)


@scenario("a contact sheet of more images than there are")
def _(place):
    python = warm_python.python(environment())
    place.run(
        *command(
            "launch/visualize.py",
            "augment",
            "--config",
            place.config,
            "--images",
            "64",
            ranks=0,
            python=python,
        )
    )


# ---- data ----------------------------------------------------------------------------------------


@scenario("images that are not shards yet")
def _(place):
    (place.folder / "photos" / "cats").mkdir(parents=True)
    place.train(f"data.root={place.folder / 'photos'}")


@scenario("a dataset folder that may not be read")
def _(place):
    (place.own_shards() / "_info.json").chmod(0)
    place.train(prefix=WITHOUT_PRIVILEGES)


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
    # the first two samples change places
    (root / "train-00000.tar").write_bytes(data[:a] + data[b:c] + data[a:b] + data[c:])
    place.train("train.steps=5")


def spoil_an_image(root: Path) -> str:
    """Zeros over the first bytes of an image; returns its key."""
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
    place.train("train.steps=5", "data.on_bad_image=skip")


@scenario("a file of samples to leave out that names none of them")
def _(place):
    path = place.folder / "exclude.txt"
    path.write_text("nobody\n")
    place.train(f"data.exclude={path}")


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
    others = [shutil.copytree(place.shards, place.folder / name) for name in ("one", "two")]
    named(others[0], ["cat", "dog", "eel"])
    named(others[1], ["eel", "dog", "cat"])
    place.train(f"data.sources=[{{root: {others[0]}}}, {{root: {others[1]}}}]")


@scenario("a corrupt image in training", begun=True)
def _(place):
    key = spoil_an_image(place.own_shards())
    place.train("train.steps=5")
    assert f"'{key}'" in place.done.stderr


@scenario("the same, with `data.on_bad_image=skip`: training goes on", begun=True)
def _(place):
    key = spoil_an_image(place.own_shards())
    place.train("train.steps=5", "data.on_bad_image=skip")
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
            {**file.metadata(), "config": json.dumps(config)},
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


@scenario("a server that cannot be reached", slow=True)
def _(place):
    place.train("data.root=http://127.0.0.1:9/shards", "data.patience_s=1")


@scenario("shards at a URL whose package is not installed")
def _(place):
    place.train("data.root=gs://bucket/shards")


@scenario("`data.reader=webdataset` and nothing to stream")
def _(place):
    place.train("data.reader=webdataset")


@scenario("a stream that breaks", begun=True)
def _(place):
    place.train("data.reader=webdataset", "data.stream=pipe:exit 3", "data.num_samples=60")


@scenario("a label out of range")
def _(place):
    info = place.own_shards() / "_info.json"
    info.write_text(info.read_text().replace('"class1",\n  "class2"', '"class1"'))
    place.train()


# ---- checkpoints and run folders -----------------------------------------------------------------


@scenario("`init.checkpoint` of another architecture")
def _(place):
    place.train(f"init.checkpoint={place.finished}", "model.depth=3")


@scenario("`init.checkpoint` of other classes")
def _(place):
    place.train(f"init.checkpoint={place.finished}", "model.num_classes=7")


@scenario("a truncated weights file")
def _(place):
    whole = (place.finished / "weights" / "last.safetensors").read_bytes()
    (place.folder / "cut.safetensors").write_bytes(whole[:-100])
    place.evaluate(place.folder / "cut.safetensors")


@scenario("a foreign file with pickled objects")
def _(place):
    torch.save({"what": Path}, place.folder / "foreign.pth")
    place.evaluate(place.folder / "foreign.pth")


@scenario("a folder that is neither a run nor a checkpoint")
def _(place):
    place.train(f"init.checkpoint={place.shards}")


@scenario("a truncated checkpoint, and none before it")
def _(place):
    shutil.copytree(place.finished, place.run_dir)
    state = place.run_dir / "checkpoints" / "step_00000003" / "state.safetensors"
    os.truncate(state, state.stat().st_size - 10)
    place.train("train.steps=3")
    # set aside for a person to look at, not deleted: under another name the files are the same
    place.after = {
        re.sub(r"damaged_(step_\d+)_\d+", r"\1", name): data for name, data in place.after.items()
    }


@scenario("a checkpoint of a newer release")
def _(place):
    shutil.copytree(place.finished, place.run_dir)
    info = place.run_dir / "checkpoints" / "step_00000003" / "checkpoint.json"
    info.write_text(json.dumps({**json.loads(info.read_text()), "format_version": 2}))
    place.train("train.steps=3")


@scenario("a run folder that was written with another config")
def _(place):
    shutil.copytree(place.finished, place.run_dir)
    place.train("train.steps=3", "model.depth=3", "optim.lr=0.5")


@scenario("a run folder that a live run is using", slow=True)
def _(place):
    background = Background(
        place.config, place.run_dir, "train.steps=100000", "log.every_steps=100", ranks=0
    )
    background.wait_for_step(100)
    # holds still, so that what is compared does not change
    os.kill(background.process.pid, signal.SIGSTOP)
    try:
        place.train("train.steps=100000", "log.every_steps=100")
    finally:
        background.process.kill()
        background.process.communicate()


@scenario("no permission to write the run folder")
def _(place):
    (place.folder / "mine").mkdir(mode=0o555)
    place.train(f"run.dir={place.folder / 'mine' / 'run'}", prefix=WITHOUT_PRIVILEGES)


@scenario("no room on the disk for what the run will save")
def _(place):
    with small_disk(place.folder / "disk") as disk:
        place.run_dir = disk / "run"
        leave_free(disk, 2200)
        place.train()


@scenario(
    "others have filled the disk since: no room for the next checkpoint", begun=True, slow=True
)
def _(place):
    fill_the_disk_meanwhile(place, leave_kib=1200)


@scenario("the disk is full while something is written", begun=True)
def _(place):
    place.train(prefix=WITH_SHORT_FILES)


ENDLESS = (
    "train.steps=1000000",
    "eval.every_steps=1000000",
    "checkpoint.every_steps=100",
    "log.every_steps=50",
)


def fill_the_disk_meanwhile(place: Place, leave_kib: int, ranks: int = 0) -> None:
    """Train until somebody else takes the room; then the checkpoint before is whole, and the same
    command goes on from it once there is room again."""
    with small_disk(place.folder / "disk") as disk:
        place.run_dir = disk / "run"
        background = Background(place.config, place.run_dir, *ENDLESS, ranks=ranks)
        background.wait_for_checkpoint(100)
        place.before = {}
        filler = leave_free(disk, leave_kib)
        output = background.end()
        place.done = subprocess.CompletedProcess([], background.process.returncode, "", output)
        place.after = snapshot(place.folder)
        newest = newest_checkpoint(place.run_dir, verify=True)
        assert newest is not None
        filler.unlink()
        steps = f"train.steps={newest[1]['step'] + 2}"
        allowed = ("--allow-change", "train.steps")
        full = command(
            "launch/train.py",
            "--config",
            place.config,
            f"run.dir={place.run_dir}",
            *TINY,
            *ENDLESS,
            steps,
            *allowed,
            ranks=ranks,
        )
        again = subprocess.run(
            full, capture_output=True, text=True, cwd=REPOSITORY, env=environment()
        )
        assert again.returncode == 0, again.stderr
        assert f"resumed at step {newest[1]['step']} of" in again.stderr


# ---- machine -------------------------------------------------------------------------------------


@scenario("a GPU asked for where none is")
def _(place):
    place.train("train.device=cuda")


@scenario("the same, by a flag of `launch/eval.py`")
def _(place):
    place.evaluate(place.finished, "--device", "cuda")


@scenario("out of memory in a step", begun=True)
def _(place):
    if sys.platform != "linux":
        pytest.skip("only Linux limits a process's memory")
    place.train(
        "model.patch_size=1", "model.mlp_ratio=10000.0", "train.device=cpu", prefix=WITH_6_GIB
    )


@scenario("a loader worker was killed, perhaps as memory ran out", begun=True)
def _(place):
    endless = [
        "train.steps=100000",
        "eval.every_steps=100000",
        "checkpoint.every_steps=100000",
        "log.every_steps=10",
    ]
    background = Background(place.config, place.run_dir, *endless, "data.num_workers=1", ranks=0)
    background.wait_for_step(10)
    place.before = {}
    [worker] = background.trainers()
    os.kill(worker, signal.SIGKILL)
    output = background.end()
    place.done = subprocess.CompletedProcess([], background.process.returncode, "", output)
    place.after = snapshot(place.folder)


@scenario("hardly any room in /dev/shm (Docker gives 64 MiB): training needs none", begun=True)
def _(place):
    mount = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"',
        "sh",
    ]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*mount, "true"], capture_output=True).returncode
    ):
        pytest.skip(NEEDS_MOUNT)
    place.train(
        "data.num_workers=1",
        "model.image_size=256",
        "train.steps=2",
        "eval.every_steps=2",
        prefix=tuple(mount),
    )


@scenario("more memory for batches than the machine has")
def _(place):
    if not Path("/proc/meminfo").exists():
        pytest.skip("only Linux tells how much memory is free")
    place.train("data.num_workers=1000000")


@scenario("a prefetch that holds too few batches")
def _(place):
    place.train("data.num_workers=2", "data.prefetch_gib=0.00001")


@scenario("the port is taken, ranks started by hand")
def _(place):
    with taken_port() as port:
        place.train(
            RANK="0",
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )


@scenario(
    "the port is taken, `torchrun --master_port`: torchrun's own words, below its stack;"
    " `--standalone` finds a free port"
)
def _(place):
    with taken_port() as port:
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node=2",
            f"--master_port={port}",
        ]
        place.run(
            *launcher,
            REPOSITORY / "launch/train.py",
            "--config",
            place.config,
            f"run.dir={place.run_dir}",
            *TINY,
        )


@scenario("Python is too old")
def _(place):
    names = [f"python3.{minor}" for minor in range(8, 11)]
    found = [shutil.which(name) for name in names] + [
        str(p) for p in Path(sys.base_prefix).parent.glob("*/bin/python3")
    ]
    is_old = "import sys; sys.exit(not (3, 8) <= sys.version_info < (3, 11))"
    old = next(
        (
            path
            for path in found
            if path and subprocess.run([path, "-c", is_old], capture_output=True).returncode == 0
        ),
        None,
    )
    if old is not None:
        place.run(
            old,
            REPOSITORY / "launch/train.py",
            "--config",
            place.config,
            f"run.dir={place.run_dir}",
        )
    else:  # ours, under a false name
        (place.folder / "sitecustomize.py").write_text(
            "import sys\nsys.version_info = (3, 9, 18)\n"
        )
        place.train(PYTHONPATH=str(place.folder), PYTHONDONTWRITEBYTECODE="1")


@scenario("torch is too old")
def _(place):
    (place.folder / "torch").mkdir()
    (place.folder / "torch" / "__init__.py").write_text('__version__ = "2.4.1+cpu"\n')
    place.train(PYTHONPATH=str(place.folder), PYTHONDONTWRITEBYTECODE="1")


@scenario("the environment is not active")
def _(place):
    interpreter = Path(sys.base_prefix) / "bin" / "python3"
    place.run(
        interpreter,
        "-S",
        REPOSITORY / "launch/train.py",
        "--config",
        place.config,
        f"run.dir={place.run_dir}",
    )


# ---- the table and what happened -----------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """A finished run of three steps."""
    place = Place(tmp_path_factory.mktemp("finished"), shards, Path())
    place.train("train.steps=3", "eval.every_steps=100")
    assert place.done.returncode == 0, place.done.stderr
    return place.run_dir


@pytest.fixture(scope="module")
def happened(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    shards: Path,
    finished: Path,
):
    """Row -> the future of its scenario, for the rows that were chosen on pytest's command line."""
    base = tmp_path_factory.mktemp("errors")

    def provoke(what: str) -> Place:
        place = Place(Path(tempfile.mkdtemp(dir=base)), shards, finished)
        SCENARIOS[what](place)
        return place

    here = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and "row" in item.fixturenames
    ]
    rows: list[Any] = [item.callspec.params["row"] for item in here]
    chosen = [row.what for row in rows if row.what in SCENARIOS]
    with ThreadPoolExecutor(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    ) as pool:
        by_length = sorted(chosen, key=lambda what: what not in SLOW)
        futures: dict[str, Future[Place]] = {what: pool.submit(provoke, what) for what in by_length}
        yield futures
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.what, marks=[pytest.mark.slow] if row.what in SLOW else [])
        for row in ROWS
    ],
)
def test_the_row_is_what_happens(row: Row, happened: dict[str, Future[Place]]):
    assert row.what in SCENARIOS, "this row has no scenario"
    place = happened[row.what].result()
    output = place.done.stderr
    assert place.done.returncode == row.status, output
    assert re.search(f"^{pattern_of(row.printed)}$", output, re.MULTILINE), (
        f"expected\n{row.printed}\nbut this was printed:\n{output}"
    )
    if row.printed.startswith("error: "):
        assert "Traceback" not in output
        assert len(re.findall(r"^(rank \d+: )?error: ", output, re.MULTILINE)) == 1, output
        assert re.search(f"^{pattern_of(row.printed)}\\s*\\Z", output, re.MULTILINE), (
            f"more was printed behind it:\n{output}"
        )
    if row.what not in BEGUN:
        assert place.after == place.before, "files were written or changed"
        return
    changed = {name for name in place.before if place.after.get(name) != place.before[name]}
    assert {Path(name).name for name in changed} <= {"metrics.jsonl", "config.yaml"}, (
        "what was there before has changed"
    )
    left_over = [name for name in place.after if name.endswith(".tmp") or "/.tmp_" in name]
    assert not left_over, "half-written files were left"
    for checkpoint in complete_checkpoints(place.run_dir):
        read_info(checkpoint, verify=True)


@pytest.mark.slow
def test_a_full_disk_ends_all_ranks_with_one_message(tmp_path, shards):
    place = Place(tmp_path, shards, Path())
    fill_the_disk_meanwhile(place, leave_kib=100, ranks=2)
    output = place.done.stderr
    assert len(re.findall(r"^error: .*: needs .* MiB, the disk has", output, re.MULTILINE)) == 1
    assert "rank 1" not in output
    assert "exitcode  : 2 " in output
    assert "Traceback (most recent call last)" not in output.split("failed (exitcode")[0]


def test_every_scenario_has_a_row_and_every_row_a_scenario():
    listed = [row.what for row in ROWS]
    assert len(set(listed)) == len(listed)
    assert set(listed) == set(SCENARIOS)


class TooLarge(Batches):
    """Batches for which no machine has memory."""

    layout = BatchLayout(4, ImageFormat((8, 8)), 0)

    def __init__(self, allocate: Callable[[int], object]):
        self.allocate = allocate

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        self.allocate(1 << 50)
        raise AssertionError("there was memory")


@pytest.mark.parametrize("allocate", [np.ones, torch.ones])
def test_whichever_memory_runs_out_the_setting_is_named(allocate):
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        allocate(1 << 50)
    assert "Lower data.micro_batch_size in training" in exit.out_of_memory(caught.value)
    for num_workers in (0, 1):
        with Loader(TooLarge(allocate), 0, 1, num_workers=num_workers) as loader:
            with pytest.raises((MemoryError, RuntimeError)) as caught:
                next(loader)
        assert not multiprocessing.active_children(), (
            "a worker outlives its loader while a traceback holds the iterator"
        )
        assert "while loading a batch. Lower data.num_workers" in exit.out_of_memory(caught.value)


def test_the_required_versions_are_those_of_pyproject():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">={}.{}".format(*VERSIONS["PYTHON"])
    assert "torch>={}.{}".format(*VERSIONS["TORCH"]) in project["dependencies"]


def test_old_pythons_can_read_the_commands_far_enough_to_be_told():
    for path in [*(REPOSITORY / "launch").glob("*.py"), REPOSITORY / "data_prep" / "__init__.py"]:
        ast.parse(path.read_text(), feature_version=(3, 8))
    for path in (REPOSITORY / "launch").glob("*.py"):
        if path.name != "check_versions.py":
            imports = [
                line for line in path.read_text().splitlines() if re.match(r"(import|from) ", line)
            ]
            ours = [
                line
                for line in imports
                if line.split()[1].split(".")[0] not in sys.stdlib_module_names
            ]
            assert ours[0].startswith("import check_versions"), (
                f"{path.name}: another import may fail before it can tell"
            )
