"""Test that worker processes produce the same batches as a single process, and that shared memory
is limited."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from data.numbered import Numbered
from processes import REPOSITORY, environment

from vit.config.schema import AugmentConfig
from vit.data import slots
from vit.data.batches import Batch, BatchLayout, TrainBatches
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.data.order import make_order
from vit.data.shards.index_file import open_index
from vit.data.shards.split import Split
from vit.data.slots import PART_ROWS, Slots, plan_ring
from vit.data.storage.opening import open_split

# ---- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_are_complete_and_in_order(workers):
    batches = Numbered()
    with Loader(batches, 7, 60, num_workers=workers) as loader:
        for position, batch in enumerate(loader, 7):
            assert len(loader) == 53, "the length must not shrink, as in torch's DataLoader"
            batches.check(position, batch)
            firsts = range(0, 300, PART_ROWS if workers else 300)
            assert batch.bad_keys == tuple(f"key{position}-{first}" for first in firsts), (
                "rows of a batch must be in order"
            )
    assert position == 59
    assert loader.stats.num_made == 53 * 300
    assert loader.stats.busy_s > 0


class Held(Numbered):
    """Numbered batches that are not filled until the event `go` is set."""

    def __init__(self, *args: int):
        super().__init__(*args)
        self.go = multiprocessing.get_context().Event()

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        self.go.wait()
        return super().fill(position, first, rows)


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="Linux only")
def test_waiting_parts_fit_into_the_smallest_pipe():
    """Linux gives smaller pipes to users who have many pipes open. If the trainer had to wait for
    space in a pipe, it would deadlock with the workers."""
    batches = Held(40 * PART_ROWS, 1)
    with Loader(batches, 0, 40, num_workers=2) as loader:
        # Linux refuses to shrink the pipe if it already contains more than 4,096 bytes.
        fcntl.fcntl(loader._pool._put.fileno(), fcntl.F_SETPIPE_SZ, 4096)
        batches.go.set()
        for position, batch in enumerate(loader):
            batches.check(position, batch)
    assert position == 39


@pytest.mark.parametrize("workers", [0, 2])
def test_a_held_batch_stays_unchanged(workers):
    """The training loop keeps more batches than the loader has buffers, and then keeps only views
    of parts of the batches."""
    batches = Numbered()
    with Loader(batches, 0, 40, num_workers=workers, max_ready=0) as loader:
        assert loader.ring.num_slots < 8
        for position, batch in enumerate(list(loader)):
            batches.check(position, batch)
    del batch
    with Loader(batches, 0, 40, num_workers=workers) as loader:
        views = [
            batch.ids[10:20].numpy() if position % 10 else batch.images[3, 0]
            for position, batch in enumerate(loader)
        ]
        for position, view in enumerate(views):
            assert view.reshape(-1)[0] == (
                position * 300 + 10 if position % 10 else (position * 300 + 3) % 251
            )


def test_a_loop_that_holds_one_batch_gets_no_copies():
    with Loader(Numbered(), 0, 30, num_workers=1, max_ready=0) as loader:
        places = {batch.ids.data_ptr() for batch in loader}
        assert len(places) <= loader.ring.num_slots


def test_a_batch_outlives_its_loader():
    batches = Numbered()
    with Loader(batches, 0, 5, num_workers=1) as loader:
        batch = next(loader)
    del loader
    gc.collect()
    batches.check(0, batch)


def test_a_part_contains_whole_mixing_groups(shards, monkeypatch):
    monkeypatch.setattr(slots, "PART_ROWS", 8)
    augment = AugmentConfig(mixup_alpha=0.8, mix_group_size=20)
    batches = TrainBatches(
        open_split(shards, "train"), make_order(60, 60), augment, ImageFormat((8, 8), 3, "bilinear")
    )
    with Loader(batches, 0, 3, num_workers=2) as parts, Loader(batches, 0, 3) as whole:
        assert parts.ring.part_rows == 20
        for a, b in zip(parts, whole, strict=True):
            assert all(
                torch.equal(getattr(a, name), getattr(b, name))
                for name in ("images", "labels", "weights", "table", "ids")
            )


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_other_start_methods_map_the_same_memory(method, monkeypatch):
    context = multiprocessing.get_context(method)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    batches = Numbered()
    with Loader(batches, 0, 4, num_workers=1) as loader:
        for position, batch in enumerate(loader):
            batches.check(position, batch)


@pytest.mark.skipif(sys.platform != "linux", reason="forking is safe only on Linux")
def test_workers_are_forked_regardless_of_the_default_of_python():
    """Python 3.14 uses forkserver by default, which costs 340 MiB per worker, reopens every shard,
    and delays the first batch by seconds."""
    code = """
    import multiprocessing, os, sys
    from data.numbered import Numbered
    from vit.data.loader import Loader
    if __name__ == "__main__":
        multiprocessing.set_start_method("spawn")
        with Loader(Numbered(), 0, 4, num_workers=1) as loader:
            [worker] = multiprocessing.active_children()
            workers_line = open(f"/proc/{worker.pid}/cmdline").read()
            print(workers_line == open("/proc/self/cmdline").read(), len(list(loader)))
    """
    env = {
        **environment(),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "tests"), str(REPOSITORY)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True 4\n"


# ---- memory --------------------------------------------------------------------------------------


def test_the_ring_fits_its_budget_and_keeps_the_workers_busy():
    layout = BatchLayout(128, ImageFormat((224, 224)), 8)
    ring = plan_ring(layout, 4, 10**6, 4, False)
    assert ring.num_bytes <= 2**30
    assert ring.slot_bytes >= 128 * (224 * 224 * 3 + 8 + 8 + 4 + 8 * 4)
    assert plan_ring(layout, 4, 10**6, 4, False, max_ready=0).num_slots == 7
    # Large batches do not need one buffer per worker, and small batches must not use a gigabyte.
    large = BatchLayout(4096, ImageFormat((224, 224)), 8)
    assert plan_ring(large, 4, 10**6, 16, False).num_slots == 4
    small = BatchLayout(64, ImageFormat((32, 32)), 8)
    assert plan_ring(small, 1, 10**6, 16, False).num_slots == 35
    few = plan_ring(layout, 4, 2, 4, False)
    assert few.num_slots == 2 + few.held_slots, (
        "there must not be more buffers than batches in an epoch"
    )


def test_buffers_do_not_share_pages():
    layout = BatchLayout(3, ImageFormat((5, 5), 1), 0)
    made = Slots(plan_ring(layout, 1, 100, 1, False))
    for slot in range(made.ring.num_slots):
        batch = made.batch(slot, layout)
        for name in ("images", "labels", "weights", "table", "ids"):
            getattr(batch, name).fill_(slot + 1)
    for slot in range(made.ring.num_slots):
        assert all(
            (getattr(made.batch(slot, layout), name) == slot + 1).all()
            for name in ("images", "labels", "weights", "table", "ids")
        )
    made.close_file()


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(),
    reason="only Linux reports the memory of processes",
)


def memory_bytes(pid: int, *kinds: str) -> int:
    """Return the memory of a process in bytes, summed over `kinds` (Pss, Private_Dirty, ...)."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(
        int(re.search(rf"^{kind}:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024 for kind in kinds
    )


@needs_proc
def test_workers_share_one_index_of_any_length(shards, tmp_path):
    """A worker must need as much private memory for two million samples as for sixty. If workers
    copied the index, they would need more."""
    small = open_split(shards, "train")
    own_bytes = {}
    for repeats in (1, 120_000):
        path = tmp_path / f"{repeats}.npy"
        np.save(path, np.tile(small.index[: small.lengths[0]], repeats))
        split = Split(
            shards,
            "train",
            small.filenames[:1],
            [small.lengths[0] * repeats],
            open_index(path),
            small.num_classes,
            [],
        )
        batches = TrainBatches(
            split,
            make_order(split.num_samples, 20),
            AugmentConfig(),
            ImageFormat((16, 16), 3, "bilinear"),
        )
        with Loader(batches, 0, 50, num_workers=1) as loader:
            for _ in range(50):
                next(loader)
            [worker] = multiprocessing.active_children()
            # Count only anonymous memory, because the index file is in the page cache.
            own_bytes[repeats] = memory_bytes(worker.pid, "Pss_Anon")
    assert split.index.nbytes > 50 * 2**20
    assert own_bytes[120_000] - own_bytes[1] < 10 * 2**20, own_bytes


@needs_proc
def test_memory_does_not_grow_over_20_epochs(shards):
    batches = TrainBatches(
        open_split(shards, "train"),
        make_order(60, 12),
        AugmentConfig(),
        ImageFormat((64, 64), 3, "bilinear"),
    )
    used = []
    with Loader(batches, 0, 20 * 5, num_workers=2) as loader:
        for position, _ in enumerate(loader):
            # The sum excludes mapped files such as libraries, because other processes share them.
            if position % 5 == 4:
                tree = [os.getpid(), *(worker.pid for worker in multiprocessing.active_children())]
                used.append(sum(memory_bytes(pid, "Pss_Anon", "Pss_Shmem") for pid in tree))
    assert len(used) == 20
    assert max(used[5:]) - used[4] < 4 * 2**20, [round(u / 2**20, 1) for u in used]
