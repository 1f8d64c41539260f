"""Train as one of n ranks in one process, and count the communication in each part of the run.

    python tests/scale/one_of_many.py SHARDS --batch 4096 --ranks 64 512 4096 > counts.json

The rank calls the functions of launch/train.py on a real folder of shards. All other ranks are
simulated: they use the code of `World` to send their messages just before rank 0 reads them. If the
real rank is the last one, it reads the messages that rank 0 has already sent. A replacement for
torch's store counts every request and its bytes, and a replacement for torch's process group counts
every collective.

Simulated ranks are never late, so a rank that waits for them polls only once. In a real run, a rank
that waits polls again after at most `World.look_s`. Collectives assume that all ranks contribute
the same values, so the counts are correct but the weights are not. `tests/scale/table.py` formats
the counts as tables.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import vit.build
import vit.compose
import vit.start.host_check
import vit.train
from vit.checkpoint import checkpoint
from vit.checkpoint.saver import Saver
from vit.config.io import load_config
from vit.distributed import exit, process_group
from vit.distributed.devices import HostDevices
from vit.distributed.watchdog import Watch
from vit.distributed.world import World
from vit.hooks.order_check import OrderHook
from vit.monitor import Monitor
from vit.step import TrainStep

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.scale.counting import Connection, Counts, Group, Store

RANKS_OF_A_HOST = 8
MICRO_BATCH = 1
"""The number of images per micro-batch when `--exact` is set."""
CONFIG = """
model: {name: vit_ti8, embed_dim: 32, depth: 1, num_heads: 2, image_size: 16}
loader: {num_workers: 0}
train: {steps: 12, precision: fp32, device: cpu}
ema: {decay: 0.9}
checkpoint: {every_steps: 6}
eval: {every_steps: 6}
log: {wandb: "off", report: false, every_steps: 6}
"""
PARTS: tuple[tuple[Any, str, str], ...] = (
    (process_group, "join_world", "start: ranks meet"),
    (vit.compose, "build", "start: rest"),
    (vit.build, "open_data", "start: data"),
    (vit.start.host_check, "check_host", "start: hosts compared"),
    (vit.build, "find_checkpoint", "start: checkpoint found"),
    (checkpoint, "load_checkpoint", "start: checkpoint read"),
    (TrainStep, "prepare", "start: DDP's buckets"),
    (TrainStep, "__call__", "step"),
    (Monitor, "queue", "step read, logged"),
    (Monitor, "pause", "step read, logged"),
    (OrderHook, "compare", "order check"),
    (vit.train, "evaluate", "evaluation"),
    (vit.train, "_save", "save"),
    # a separate part, because it may happen in the next save or in the next step
    (Saver, "_tell_complete", "save recorded"),
    (vit.train, "_finish", "end"),
    (exit, "leave_world", "end"),
    (Watch, "_verdict", "watch: a beat"),
)
"""The functions whose calls are counted as parts of a run. If one of these functions calls another,
the call is counted only in the inner part."""


class _Waits(BaseException):
    """The exception raised when a simulated rank has sent its message and would have to wait."""


class _SendingStore:
    """The store of a simulated rank, which accepts messages and raises _Waits when the rank reads
    for the first time."""

    def __init__(self, store: dist.Store):
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def add(self, key: str, value: int) -> int:
        if not value:
            raise _Waits
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        raise _Waits


def host_of(rank: int) -> str:
    return f"gpu-node-{rank // RANKS_OF_A_HOST:04d}.cluster"


def others_speak(
    world: World, counts: Counts, function: Callable[..., Any], *arguments: Any
) -> None:
    """Make every other rank call the function of `World` until it would have to wait."""
    with counts.of_others():
        hosts = world.hosts or tuple(map(host_of, range(world.size)))
        for rank in range(1, world.size):
            stub: Any = _SendingStore(world.store)
            other = World(rank, world.size, world.device, stub, hosts)
            own = arguments
            # `gather` sends one value from each rank.
            if len(arguments) == 2 and isinstance(arguments[1], dict):
                own = (arguments[0], _value_of(rank, *arguments, other))
            try:
                function(other, *own)
            except _Waits:
                continue


def _value_of(rank: int, name: str, value: dict[str, Any], other: World) -> Any:
    if name == "software":
        return value if other.is_local_main else None
    boot = f"{rank // RANKS_OF_A_HOST:08d}-0000-4000-8000-000000000000 4026531836"
    is_here = rank < RANKS_OF_A_HOST
    pid = value["pid"] if is_here else [boot, 1_000_000 + rank]
    return {"pid": pid, "found": {**value["found"], "host": host_of(rank)}}


def let_others_speak(counts: Counts) -> None:
    gather = World.gather
    exchange = World._exchange
    look = Watch._look

    def gather_all(self: World, name: str, value: Any, limit: timedelta | None = None) -> list[Any]:
        if self.is_main:
            others_speak(self, counts, gather, name, value)
        return gather(self, name, value, limit)

    def exchange_all(self: World, key: str, problem: ValueError | None) -> tuple[bool, str]:
        if self.is_main:
            others_speak(self, counts, exchange, key, None)
        return exchange(self, key, problem)

    def beat(other: World) -> None:
        assert other.store is not None
        watch = Watch(other, 1.0, lambda verdict: None)
        watch._compare(other.store, 1.0, 1.0, threading.Event())

    def look_at_all(self: Watch, store: dist.Store, seen: Any, limit_s: float) -> None:
        if self._world.is_main:
            others_speak(self._world, counts, beat)
        look(self, store, seen, limit_s)

    Watch._look = look_at_all
    World.gather = gather_all
    World._exchange = exchange_all


def attempt(settings: tuple[Path, list[str]], size: int, rank: int, store: Store) -> None:
    local = {"LOCAL_RANK": rank % RANKS_OF_A_HOST, "LOCAL_WORLD_SIZE": RANKS_OF_A_HOST}
    store_at = {"MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    variables = {"RANK": rank, "WORLD_SIZE": size, **local, **store_at}
    os.environ.update({name: str(value) for name, value in variables.items()})
    host = HostDevices(host_of(rank), RANKS_OF_A_HOST, 0, 8, "no CUDA runtime is found")
    dist.rendezvous = lambda *_, **__: iter([(store, rank, size)])
    config = load_config(*settings)
    world = process_group.join_world("cpu", found=host)
    vit.train.train(vit.compose.build_run(config, world))
    world.barrier()
    exit.leave_world(world)


def stopped_attempt(settings: tuple[Path, list[str]], size: int, rank: int, store: Store) -> None:
    """Stop an `attempt` at its first step, so that it leaves a checkpoint from which a run can
    resume."""
    train_on = vit.train._train_from_state

    def stopped(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return train_on(*arguments)

    vit.train._train_from_state = stopped
    attempt(settings, size, rank, store)
    vit.train._train_from_state = train_on


def first_and_last(
    settings: tuple[Path, list[str]], size: int, counts: Counts
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the counts of rank 0 and of the last of `size` ranks for a run that resumes from a
    checkpoint and finishes."""
    stopped_attempt(settings, size, 0, Store({}, counts))
    entries: dict[str, bytes] = {}
    counts_by_rank = {}
    for name, rank in (("first", 0), ("last", size - 1)):
        counts.take()
        counts.is_on = True
        attempt(settings, size, rank, Store(entries, counts))
        counts.is_on = False
        counts_by_rank[name] = counts.take()
    return counts_by_rank


def real(shards: Path, batch: int, folder: Path) -> None:
    """Train as one of the ranks that torchrun has started, and write this rank's counts to
    `folder`."""
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    counts = Counts()
    store, _, _ = next(dist.rendezvous("env://"))
    for each in PARTS:
        counts.watch(*each)
    exit.leave = lambda status: None
    config = folder / f"config{rank}.yaml"
    config.write_text(CONFIG)
    settings = (config, settings_of(shards, folder / "run", batch, size))
    stopped_attempt(settings, size, rank, Connection(dist.PrefixStore("1", store), counts))
    counts.take()
    counts.is_on = True
    attempt(settings, size, rank, Connection(dist.PrefixStore("2", store), counts))
    (folder / f"{rank}.json").write_text(json.dumps(counts.take()))
    sys.stdout.flush()
    os._exit(0)  # Skip the normal exit of the interpreter, which gloo's threads can block.


def settings_of(shards: Path, run: Path, batch: int, size: int) -> list[str]:
    return [
        *(f"data.root={shards}", f"run.dir={run}", f"data.global_batch_size={batch}"),
        f"eval.batch_size={batch // size}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shards", type=Path, help="their val has as many images as --batch")
    parser.add_argument("--batch", type=int, required=True, help="images, the most ranks or more")
    parser.add_argument("--ranks", type=int, nargs="+", default=[])
    parser.add_argument("--real", type=Path, help="under torchrun: where each rank leaves counts")
    parser.add_argument("--exact", action="store_true", help="with train.exact_over_ranks")
    args = parser.parse_args()
    if args.real:
        real(args.shards, args.batch, args.real)

    counts = Counts()
    create = dist.init_process_group
    dist.Backend.register_backend(
        "counted", lambda store, rank, size, timeout: Group(rank, size, counts), devices=["cpu"]
    )
    dist.init_process_group = lambda backend, **options: create("counted", **options)
    exit.leave = lambda status: None
    for each in PARTS:
        counts.watch(*each)
    let_others_speak(counts)
    gc.freeze()  # without this call, each garbage collection would scan all imported objects
    counts_by_size = {}
    with tempfile.TemporaryDirectory(prefix="one_of_many-") as name:
        folder = Path(name)
        shards = folder / "shards"
        shutil.copytree(args.shards, shards)
        counts.count_files(folder)
        config = folder / "config.yaml"
        config.write_text(CONFIG)
        for size in args.ranks:
            settings = settings_of(shards, folder / f"run{size}", args.batch, size)
            if args.exact:
                settings += ["train.exact_over_ranks=true", f"data.micro_batch_size={MICRO_BATCH}"]
            counts_by_size[size] = first_and_last((config, settings), size, counts)
    print(json.dumps(counts_by_size))


if __name__ == "__main__":
    main()
