"""Test the notes that a run prints before it starts, and the memory sizes and core counts in them.
Copies with changed values replace the kernel's files in these tests."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import torch
from processes import REPOSITORY, TINY, environment, metrics, train

from vit.compose import build_run
from vit.config.io import load_config
from vit.config.schema import Config
from vit.data.batches import EvalBatches, TrainBatches
from vit.data.decode import native
from vit.data.image_format import ImageFormat
from vit.data.storage.opening import open_split
from vit.distributed.process_group import World
from vit.model import create_model
from vit.start.preflight import preflight
from vit.system.host import free_memory_bytes, num_cores, num_oom_kills
from vit.training.plan import make_plan
from vit.training.run_data import Notes

GIB = 2**30
HERE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def machine(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


# 40 GiB of memory are available
MEMINFO = "MemTotal:       65536000 kB\nMemFree:         1024000 kB\nMemAvailable:   41943040 kB"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": MEMINFO}, 40 * GIB),
        # With cgroup version 2, the parent group may have the limit. The kernel can reclaim the
        # inactive file cache.
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/slurm/job_7/step_0",
                "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max",
                "sys/fs/cgroup/slurm/job_7/step_0/memory.current": 5 * GIB,
                "sys/fs/cgroup/slurm/job_7/memory.max": 8 * GIB,
                "sys/fs/cgroup/slurm/job_7/memory.current": 6 * GIB,
                "sys/fs/cgroup/slurm/job_7/memory.stat": (
                    f"anon {4 * GIB}\ninactive_file {GIB}\nactive_file {GIB}"
                ),
            },
            3 * GIB,
        ),
        # In a container with cgroup version 2, the group has the name that it has on the host, but
        # its files are at the mount point.
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/docker/0123",
                "sys/fs/cgroup/memory.max": 2 * GIB,
                "sys/fs/cgroup/memory.current": GIB // 2,
            },
            3 * GIB // 2,
        ),
        (  # cgroup versions 1 and 2, where version 2 has no controllers
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "12:cpu,cpuacct:/a\n4:memory:/a/b\n0::/",
                "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": 9223372036854771712,
                "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": GIB,
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": 4 * GIB,
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": 3 * GIB,
                "sys/fs/cgroup/memory/a/memory.stat": (
                    f"cache {2 * GIB}\ninactive_file 1\ntotal_inactive_file {GIB}"
                ),
            },
            2 * GIB,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/memory.max": GIB,
                # the limit has been lowered below the current usage
                "sys/fs/cgroup/memory.current": 2 * GIB,
            },
            0,
        ),
    ],
)
def test_free_memory_is_the_minimum_over_all_limits(files, expected, tmp_path):
    assert free_memory_bytes(machine(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, HERE),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
                "sys/fs/cgroup/a/cpu.max": "150000 100000",
            },
            1,
        ),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 1),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "max 100000"}, HERE),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "99900000 100000"}, HERE),
        (
            {
                "proc/self/cgroup": "3:cpuacct,cpu:/a\n2:memory:/a",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": 100000,
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": 100000,
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": -1,
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
            },
            HERE,
        ),
    ],
)
def test_cores_are_limited_by_affinity_and_quota(files, expected, tmp_path):
    assert num_cores(machine(tmp_path, files)) == expected


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux only")
def test_this_machine_has_memory_and_cores():
    assert 0 < free_memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 1 <= num_cores() <= os.cpu_count()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/vmstat": "pgfault 7\noom_kill 3\n"}, 3),
        (
            {
                "proc/self/cgroup": "0::/job",
                "sys/fs/cgroup/job/memory.events": "low 0\noom 2\noom_kill 5\n",
                "proc/vmstat": "oom_kill 4",
            },
            5,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job",
                "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 2",
            },
            2,
        ),
    ],
)
def test_reads_the_kernel_counter_of_out_of_memory_kills(files, expected, tmp_path):
    assert num_oom_kills(machine(tmp_path, files)) == expected


def check(
    config: Config, root: Path, device: str = "cpu", rank: int = 0, saved_bytes: int = 0
) -> Notes:
    world = World(rank, 3, torch.device(device), hosts=("a", "a", "b"))
    image = ImageFormat.from_config(config.model, config.data)
    splits = [
        open_split(config.data.root, name, config.loader.cache_dir, config.loader.cache_gib)
        for name in ("train", "val")
    ]
    plan, order = make_plan(config, splits[0].num_samples, 1)
    val = EvalBatches(splits[1], image, config.eval, config.eval.batch_size)
    train = TrainBatches(splits[0], order, config.augment, image)
    return preflight(config.loader, world, plan, train, [val], root, saved_bytes=saved_bytes)


def test_the_copy_for_saving_needs_memory_on_the_host_of_rank_0(config, tmp_path):
    # 1 GiB of memory is available.
    little = machine(tmp_path, {"proc/meminfo": "MemAvailable: 1048576 kB"})
    for rank, expected in enumerate((0.5, 0.5, 0.0)):
        report = check(tiny(config), little, rank=rank, saved_bytes=GIB // 2)
        assert report.record["save_copy_gib"] == expected
    with pytest.raises(
        ValueError, match=r"; 2048\.0 MiB to copy the state for a save\), but only 1\.00 GiB are"
    ):
        check(tiny(config), little, saved_bytes=2 * GIB)


def tiny(path: Path, *overrides: str) -> Config:
    return load_config(path, [*TINY, *overrides])


def test_notes_a_cache_that_is_too_small(config, shards, tmp_path):
    store = fsspec.filesystem("memory")
    for path in shards.iterdir():
        store.pipe_file(f"/preflight/{path.name}", path.read_bytes())
    empty = machine(tmp_path / "host", {})

    def notes(*overrides: str) -> str:
        return "".join(
            check(tiny(config, f"loader.cache_dir={tmp_path / 'cache'}", *overrides), empty).record[
                "notes"
            ]
        )

    remote_root = "data.root=memory://preflight"
    small = "loader.cache_gib=0.0001"
    assert "set order.block_samples=64" in notes(remote_root, small)
    assert "lower order.num_lanes" in notes(remote_root, small, "order.block_samples=8")
    assert (
        notes(remote_root, "loader.cache_gib=1")
        == notes(remote_root, "loader.cache_gib=1", "order.block_samples=8")
        == ""
    )
    assert "set order.block_samples=64" in notes(small), (
        "a folder with a cache must be treated as a mount"
    )
    assert notes("loader.cache_dir=null") == ""


def test_reports_whether_memory_suffices(config, tmp_path):
    """The message and metrics.jsonl must contain the same numbers. With eight ranks per host, eight
    times as much memory is needed."""
    enough = machine(tmp_path / "enough", {"proc/meminfo": "MemAvailable: 3145728 kB"})
    report = check(tiny(config, "loader.num_workers=2"), enough)
    assert report.record["free_memory_gib"] == 3.0
    assert report.record["train_shards"] == 3
    assert report.record["cores"] == HERE
    assert report.lines[0].startswith("data: 60 images in 3 shards, 23 in 1 to evaluate; index ")
    assert report.lines[0].endswith(f"JPEG decoder: {report.record['decoder']}")
    assert report.record["decoder"] == ("native" if native.AVAILABLE else "simplejpeg")
    assert "3.0 GiB of memory free" in report.lines[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            native,
            "UNAVAILABLE_REASON",
            "_native.so was built for another version of this package; build it again: pip"
            " install -e .",
        )
        message = (
            "JPEGs are decoded by simplejpeg, at 0.6 times the speed: _native.so was built for"
        )
        assert any(note.startswith(message) for note in check(tiny(config), enough).record["notes"])
    message = (
        r"this host \(1, with 2 loader workers each\) need 0.50 GiB .* 0.25 GiB are free: lower"
        r" loader.num_workers"
    )
    with pytest.raises(ValueError, match=message):
        check(
            tiny(config, "loader.num_workers=2"),
            machine(tmp_path / "little", {"proc/meminfo": "MemAvailable: 262144 kB"}),
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "8")
        with pytest.raises(ValueError, match=r"this host \(8, .* need 4.0\d GiB"):
            check(tiny(config, "loader.num_workers=2"), enough)
        cached = tiny(config, "loader.num_workers=2", f"loader.cache_dir={tmp_path / 'cache'}")
        # Each worker uses four threads to fetch data.
        with pytest.raises(
            ValueError, match=r"this host \(8, .* need 5.7\d GiB .* 184 MiB per worker"
        ):
            check(cached, enough)
    assert (
        check(tiny(config, "loader.num_workers=2"), tmp_path / "nothing is known").record[
            "free_memory_gib"
        ]
        is None
    )


def test_more_workers_than_cores_are_reported(config, tmp_path):
    one_core = machine(
        tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "100000 100000"}
    )
    report = check(tiny(config, "loader.num_workers=4"), one_core)
    assert report.record["notes"] == [
        "4 loader workers share 1 core(s): loader.num_workers=1 is as fast and needs less memory"
    ]
    assert report.lines[2] == f"note: {report.record['notes'][0]}"
    assert check(tiny(config, "loader.num_workers=1"), one_core).record["notes"] == []


def test_idle_cores_of_ranks_on_the_cpu_are_reported(config, tmp_path, monkeypatch):
    """By default, torchrun limits each rank to one thread."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        [note] = check(tiny(config), tmp_path).record["notes"]
        assert check(tiny(config), tmp_path, "cuda").record["notes"] == []
        torch.set_num_threads(8)
        assert check(tiny(config), tmp_path).record["notes"] == []
    finally:
        torch.set_num_threads(before)
    assert note.startswith("each of 2 ranks computes with 1 thread(s) on 16 cores")
    assert "export OMP_NUM_THREADS=8" in note


def test_notes_too_little_shared_memory_for_nccl(config, tmp_path, monkeypatch):
    """Docker's default is 64 MiB of shared memory. If NCCL needs more, it raises an error at the
    first collective."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**26))
    assert check(tiny(config), tmp_path, "cuda").record["notes"] == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(2), raising=False)
    assert check(tiny(config), tmp_path).record["notes"] == []
    assert check(tiny(config), tmp_path, "cuda").record["notes"] == [
        "/dev/shm has 0.06 GiB free, but NCCL needs 1 GiB between the GPUs of a host:"
        " use docker run --shm-size=1g (batches do not need it)"
    ]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    assert check(tiny(config), tmp_path, "cuda").record["notes"] == []


def test_the_limit_of_open_files_is_raised_as_far_as_allowed():
    """The test runs in a separate process, because a process without privileges cannot raise its
    hard limit again."""
    code = """
import resource, sys
from vit.system.host import raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))
print(raise_open_files(50), raise_open_files(150), end=" ")
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], raise_open_files(1000))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True
    )
    assert done.stdout.split() == ["64", "150", "150", "200"]


def test_too_few_open_files_are_a_note_with_the_command(config, tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 200))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    assert check(tiny(config), tmp_path).record["notes"] == [
        "the limit of 200 open files is low, so some shards are opened again for each"
        " image: run `ulimit -n 264` before the start, or ask the administrator"
    ]


def test_a_run_reports_its_preflight_and_the_rate_of_its_loader(config, tmp_path):
    steps = ("train.steps=40", "log.every_steps=10", "eval.every_steps=100")
    done = train(config, tmp_path / "run", "loader.num_workers=1", *steps)
    host = (
        r"^host: (\d+) core\(s\) for 1 rank\(s\) with 1 loader worker\(s\) each.*; batches take"
        r" [\d.]+ MiB a rank"
    )
    match = re.search(host, done.stderr, re.MULTILINE)
    [start], lines = (metrics(tmp_path / "run", kind) for kind in ("start", "train"))
    assert start["preflight"]["cores"] == int(match[1])
    # There are fewer buffers than batches, so the workers must prepare some batches after the first
    # step, even if the first step is slow.
    assert start["preflight"]["batch_slots"] == 20
    rates = [line["loader_images_per_s"] for line in lines]
    assert len(rates) == 4
    assert any(rate is not None and rate > 0 for rate in rates), json.dumps(rates)


def test_a_precision_that_the_cpu_emulates_is_reported_with_the_remedy():
    """If a CPU has to emulate bf16, two training steps of ViT-B take minutes, and the run seems to
    hang. The test simulates such a CPU by limiting torch's instruction set."""
    code = (
        "import torch; device = torch.device('cpu');"
        "from vit.layers.precision import precision_note;"
        "print(precision_note('bf16', device)); print(precision_note('fp32', device))"
    )
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment() | limits,
        check=True,
    )
    bf16, fp32 = done.stdout.splitlines()
    assert re.fullmatch(
        r"this CPU \(\w+\) has no bf16 instructions, so bf16 is emulated: matrix products take"
        r" about \d+ times as long as in fp32: "
        "set train.precision=fp32",
        bf16,
    )
    assert fp32 == "None"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["ema.decay=0.9999"], "leaves 100% of the initial weights"),
        (["ema.decay=0.9999", "init.checkpoint=FILE"], "leaves 100% of the initial"),
        (["ema.decay=0.9"], "leaves 28% of the initial"),
        (["ema.decay=0.9", "ema.every_steps=2"], "leaves 53% of"),
        (["ema.decay=0.9", "ema.after_epochs=1"], "leaves 48% of"),
        (["ema.decay=0.9", "ema.after_epochs=2.4"], ""),
        (["ema.decay=0.7"], ""),
        (["ema.decay=0.9999", "ema.warmup=true"], ""),
        (["ema.decay=null"], ""),
    ],
)
def test_notes_an_average_that_cannot_move(settings, expected, config, tmp_path, capfd):
    weights = tmp_path / "w.pth"
    torch.save(create_model(tiny(config).model, num_classes=3).state_dict(), weights)
    overrides = [word.replace("FILE", str(weights)) for word in settings]
    run_config = tiny(config, *overrides, f"run.dir={tmp_path / 'run'}")
    with build_run(run_config, World(0, 1, torch.device("cpu"))):
        pass
    printed = capfd.readouterr().err
    assert expected in printed
    assert printed.count("in the EMA, which eval, predict and export use") == bool(expected)
