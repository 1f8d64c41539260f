"""Test reading shards from a folder: temporary read errors, file descriptors shared by workers,
readahead, and copies on a faster disk."""

from __future__ import annotations

import gc
import os
import re
import resource
import shutil
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import REPOSITORY, environment

from vit.config.schema import AugmentConfig, EvalConfig
from vit.data.batches import EvalBatches, TrainBatches
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.data.order import make_order
from vit.data.shards.local_tars import LocalTars
from vit.data.storage import cached_tars
from vit.data.storage.opening import open_split
from vit.system.files import ShardError
from vit.system.retry import RetryPolicy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and LD_PRELOAD")
FORMAT = ImageFormat((16, 16), 3, "bilinear")
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* pread of *.tar as from a file server that is away for FAIL_S seconds from the first read on, or
 * whose handles have gone stale. LOG: a file that gets what is read and what is asked for ahead. */
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static int is_shard(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    return n > 4 && !memcmp(path + n - 4, ".tar", 4);
}

static void note(const char *what, off_t at, off_t size) {
    if (!getenv("LOG")) return;
    FILE *log = fopen(getenv("LOG"), "a");
    fprintf(log, "%s %ld %ld\n", what, (long)at, (long)size);
    fclose(log);
}

int posix_fadvise64(int fd, off_t at, off_t size, int advice) {
    int (*real)(int, off_t, off_t, int) = dlsym(RTLD_NEXT, "posix_fadvise64");
    if (is_shard(fd) && advice == POSIX_FADV_WILLNEED) note("ahead", at, size);
    return real(fd, at, size, advice);
}

int posix_fadvise(int fd, off_t at, off_t size, int advice) {
    return posix_fadvise64(fd, at, size, advice);
}

static ssize_t read_at(const char *name, int fd, void *to, size_t size, off_t at) {
    static double began;
    static atomic_int stale[4096];
    ssize_t (*real)(int, void *, size_t, off_t) = dlsym(RTLD_NEXT, name);
    if (is_shard(fd)) {
        note("read", at, size);
        if (!began) began = now();
        if (getenv("FAIL_S") && now() - began < atof(getenv("FAIL_S"))) {
            errno = atoi(getenv("FAIL_ERRNO"));
            return -1;
        }
        const char *after = getenv("STALE_AFTER");
        if (after && fd < 4096 && atomic_fetch_add(&stale[fd], 1) == atoi(after)) {
            errno = ESTALE;
            return -1;
        }
    }
    return real(fd, to, size, at);
}

ssize_t pread(int fd, void *to, size_t size, off_t at) {
    return read_at("pread", fd, to, size, at);
}

ssize_t pread64(int fd, void *to, size_t size, off_t at) {
    return read_at("pread64", fd, to, size, at);
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> Path:
    """Build a library for LD_PRELOAD that makes reads of shards fail."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-o", folder / "shim.so", folder / "shim.c", "-ldl"],
        check=True,
    )
    return folder / "shim.so"


def run(
    code: str, shim: Path, *arguments: object, **settings: object
) -> subprocess.CompletedProcess:
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "helpers")])
    env = {
        **environment(),
        "PYTHONPATH": paths,
        "LD_PRELOAD": str(shim),
        **{name: str(value) for name, value in settings.items()},
    }
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


READ_ALL = """
    import hashlib, sys
    from vit.system.retry import RetryPolicy, num_retries
    from vit.data.storage.opening import open_split
    split = open_split(sys.argv[1], "train", retry=RetryPolicy(float(sys.argv[2]), 0.1))
    print(hashlib.sha256(b"".join(split.read(i) for i in range(60))).hexdigest(), num_retries())
"""


@pytest.mark.parametrize("name", ["EIO", "ESTALE", "ETIMEDOUT"])
def test_an_outage_of_a_file_server_costs_only_time(name, shim, shards):
    import errno

    good = run(READ_ALL, shim, shards, 10).stdout.split()
    done = run(READ_ALL, shim, shards, 10, FAIL_S=1.0, FAIL_ERRNO=getattr(errno, name))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == good[0]
    assert int(good[1]) == 0 < int(done.stdout.split()[1])


def test_a_permanent_outage_of_a_file_server_is_an_error_with_path_reason_and_time(shim, shards):
    done = run(READ_ALL, shim, shards, 1.0, FAIL_S=1000, FAIL_ERRNO=5)
    expected = (
        rf"{shards}/train-00000.tar: reading failed: Input/output error, \d+ times in \d+ s: .*"
        r" start again"
    )
    assert re.search(rf"ShardError: {expected}$", done.stderr.strip()), done.stderr


def test_a_stale_handle_is_reopened(shim, shards):
    """After a stale file handle, the shard must be reopened without a pause, and no file descriptor
    may leak."""
    code = textwrap.dedent(READ_ALL) + textwrap.dedent("""
        import os, pathlib
        links = pathlib.Path("/proc/self/fd").iterdir()
        print(sum(os.path.realpath(link).endswith(".tar") for link in links))
    """)
    good = run(code, shim, shards, 10).stdout.split()
    done = run(code, shim, shards, 10, STALE_AFTER=7)
    assert done.stdout.split() == good, done.stderr
    assert good[1:] == ["0", "3"], "a retry paused, or not exactly three shards are open"


READ_A_BATCH = """
    import sys
    from vit.config.schema import AugmentConfig
    from vit.data.batches import TrainBatches
    from vit.data.image_format import ImageFormat
    from vit.data.loader import Loader
    from vit.data.order import make_order
    from vit.data.storage.opening import open_split
    split = open_split(sys.argv[1], "train")
    image_format = ImageFormat((16, 16), 3, "bilinear")
    batches = TrainBatches(split, make_order(60, 12), AugmentConfig(), image_format)
    with Loader(batches, 0, 1, num_workers=0) as loader:
        list(loader)
"""


def test_readahead_covers_all_images_before_the_first_read(shim, shards, tmp_path):
    """With readahead, a slow disk reads all images in parallel. Without readahead, the disk reads
    one image at a time while a worker waits."""
    log = tmp_path / "log"
    done = run(READ_A_BATCH, shim, shards, LOG=log)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [kind for kind, _, _ in lines] == ["ahead"] * 12 + ["read"] * 12
    ranges = [(int(at), int(at) + int(size)) for _, at, size in lines]
    for advised, read in zip(ranges[:12], ranges[12:], strict=True):
        assert advised[0] <= read[0]
        assert read[1] <= advised[1]


def shards_open(pid: int, root: Path) -> dict[str, str]:
    """Return a dict that maps each open file descriptor of a shard in the process to the shard's
    name."""
    names = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        # The descriptor that was used to list the folder is already closed.
        with suppress(FileNotFoundError):
            path = Path(os.readlink(link))
            if path.parent == root and path.suffix == ".tar":
                names[link.name] = path.name
    return names


def test_workers_inherit_the_descriptors_of_training(shards, tmp_path):
    """If workers inherit the file descriptors, the file server has to open each shard only once."""
    root = shutil.copytree(shards, tmp_path / "set")
    split = open_split(root, "train")
    val = open_split(root, "val")
    batches = TrainBatches(split, make_order(60, 12), AugmentConfig(), FORMAT)
    with Loader(batches, 0, 40, num_workers=2) as loader:
        list(loader)
        ours = shards_open(os.getpid(), root)
        assert sorted(ours.values()) == ["train-00000.tar", "train-00001.tar", "train-00002.tar"]
        assert [shards_open(worker.pid, root) for worker, _ in loader._pool._workers.values()] == [
            ours,
            ours,
        ]
        with Loader(EvalBatches(val, FORMAT, EvalConfig(), 8), 0, 3, num_workers=1) as evaluation:
            list(evaluation)
            ours = shards_open(os.getpid(), root)
            assert len(ours) == 4
            assert [
                shards_open(worker.pid, root) for worker, _ in evaluation._pool._workers.values()
            ] == [ours]
    del split, val, batches, loader, evaluation
    gc.collect()
    assert shards_open(os.getpid(), root) == {}, "deleting a split must close its files"


def test_with_few_descriptors_shards_are_opened_for_each_image(shards):
    """Half of the process's file descriptors must remain available for other files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    expected = [open_split(shards, "train").read(i) for i in range(60)]
    split = open_split(shards, "train")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4, before[1]))
    try:
        assert isinstance(split.tars, LocalTars)
        assert split.tars._max_open() == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    split.tars._max_open = lambda: 2
    split.prepare(4)
    assert len(split.tars._fds) == 2
    assert [split.read(i) for i in range(60)] == expected
    split.prefetch(np.arange(60))


# ---- reading through a cache ---------------------------------------------------------------------


def test_blocks_of_a_mounted_folder_are_cached_on_a_local_disk(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(cached_tars, "BLOCK_BYTES", 16_000)
    root = shutil.copytree(shards, tmp_path / "mount")
    batches = [
        TrainBatches(open_split(root, "train", cache), make_order(60, 12), AugmentConfig(), FORMAT)
        for cache in (None, tmp_path / "near")
    ]
    read_bytes = []
    for workers in (0, 2):
        with (
            Loader(batches[0], 0, 5, num_workers=workers) as uncached,
            Loader(batches[1], 0, 5, num_workers=workers) as cached,
        ):
            for a, b in zip(uncached, cached, strict=True):
                assert torch.equal(a.images, b.images)
            read_bytes.append(cached.tally()["read_bytes"])
    assert read_bytes[0] == read_bytes[1], (
        "only bytes of samples must be counted, not those of fetched blocks"
    )
    blocks = list((tmp_path / "near").rglob("*.block"))
    assert len(blocks) == 15
    split = open_split(root, "train", tmp_path / "near")
    expected = [batches[0].split.read(i) for i in range(60)]
    # All blocks have been cached, so the shards can be moved away.
    for tar in root.glob("*.tar"):
        tar.rename(tar.with_suffix(".away"))
    assert [split.read(i) for i in range(60)] == expected
    assert list((tmp_path / "near").rglob("*.block")) == blocks


def test_a_replaced_shard_of_a_mounted_folder_is_reported_and_its_blocks_are_not_mixed(
    shards, tmp_path, monkeypatch
):
    monkeypatch.setattr(cached_tars, "BLOCK_BYTES", 16_000)
    root = shutil.copytree(shards, tmp_path / "mount")
    split = open_split(root, "train", tmp_path / "near")
    sample = split.read(0)
    # The new file must get a different modification time.
    time.sleep(0.05)
    (root / "train-00000.tar").write_bytes((root / "train-00000.tar").read_bytes())
    with pytest.raises(
        ShardError,
        match=(
            r"train-00000.tar: sample 12 .* failed: the file was replaced while in use; restore"
            r" the shard"
        ),
    ):
        split.read(12)
    again = open_split(root, "train", tmp_path / "near", retry=RetryPolicy(1.0))
    assert again.read(0) == sample
    assert len(list((tmp_path / "near").rglob("train-00000.*.0-*.block"))) == 2, (
        "the cache must have one block of the old shard and one of the new shard"
    )
