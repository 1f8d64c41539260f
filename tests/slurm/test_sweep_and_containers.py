"""Test job arrays, command prefixes (containers) and shards on node-local disks, on a real Slurm
cluster with two nodes."""

from __future__ import annotations

import re
import time

import pytest
from processes import TINY, metrics, write_config

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_a_sweep_trains_its_tasks_and_the_last_prints_one_table(cluster, shards, tmp_path):
    config = write_config(tmp_path, shards, steps=6)
    folder = tmp_path / "sweep"
    options = ["--array=0-1", "--nodes=1", "--gpus-per-node=1", "--cpus-per-task=1", "--time=10"]
    arguments = ["slurm/sweep.sh", "--config", config, f"run.dir={folder}", *TINY]
    job = cluster.submit(tmp_path / "log-%a", *options, *arguments)
    job.wait()
    logs = [(tmp_path / f"log-{task}").read_text() for task in range(2)]
    for task in range(2):
        assert metrics(folder / str(task), "end")[-1]["outcome"] == "finished", logs[task]
        assert f"task {task} of {folder}: train.seed={task}; W&B group sweep" in logs[task]
    tables = [log.partition("train.seed  step")[2].splitlines() for log in logs]
    table = max(tables, key=len)
    assert [line.split()[:2] for line in table[1:3]] == [["0", "0"], ["1", "1"]], logs
    assert "(2 seeds, standard deviation)" in table[3]


@pytest.mark.patient
def test_a_sweep_with_failed_tasks_also_ends_with_a_table(cluster, shards, tmp_path):
    config = write_config(tmp_path, shards, steps=6)
    folder = tmp_path / "sweep"
    lines = tmp_path / "lines.txt"
    source = f'"data.sources=[{{root: {shards}, weight: 1}}]"'
    lines.write_bytes(f"optim.lr=-1\r\n# lower\r\n\r\noptim.lr=2e-3 {source}\r\n".encode())
    options = ["--array=0-1", "--nodes=1", "--gpus-per-node=1", "--cpus-per-task=1", "--time=10"]
    arguments = ["slurm/sweep.sh", "--config", config, f"run.dir={folder}", *TINY]
    cluster.submit(tmp_path / "log-%a", *options, *arguments, SWEEP=str(lines)).wait()
    failed, finished = [(tmp_path / f"log-{task}").read_text() for task in range(2)]
    assert "optim.lr is -1, expected greater than 0" in failed
    assert "0 of 2 runs are finished" in failed
    assert metrics(folder / "1", "end")[-1]["outcome"] == "finished", finished
    assert re.search(r"^run .* outcome .*\n +1 .* finished ", finished, re.MULTILINE), finished
    assert [path.name for path in folder.iterdir()] == ["1"]


@pytest.mark.patient
def test_handles_signals_while_shards_are_staged(cluster, shards, tmp_path):
    """If the time limit is reached while shards are being staged, training must start, save and be
    requeued. If the job is canceled with scancel, training must not start."""
    slow = tmp_path / "slow"
    slow.write_text(
        '#!/bin/bash\n[[ "$*" != *vit.data.warm* ]] || { echo staging now; exec sleep 600; }\n'
        'exec "$@"\n'
    )
    slow.chmod(0o755)

    options = ["--nodes=1", "--gpus-per-node=1", "--cpus-per-task=1", "--time=20"]
    jobs = []
    for name in ("limit", "canceled"):
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name, shards, steps=1_000_000)
        arguments = [
            "slurm/train.sh",
            "--config",
            config,
            f"run.dir={tmp_path / name / 'run'}",
            *TINY,
        ]
        variables = {"SRUN_ARGS": f"--mpi=none\n{slow}", "STAGE": str(tmp_path / "stage")}
        jobs.append(cluster.submit(tmp_path / name / "log", *options, *arguments, **variables))

    for job in jobs:
        job.wait(lambda facts, job=job: "staging now" in job.log)
    limit, canceled = jobs
    limit.cancel("--batch", "--signal=USR1")
    canceled.cancel()

    limit.wait(lambda facts: facts["Restarts"] == "1")
    assert metrics(tmp_path / "limit" / "run", "end")[-1]["outcome"] == "stopped", limit.log
    assert "note: not all shards were staged" in limit.log

    canceled.wait()
    deadline = time.monotonic() + 60
    while "not started: ended by SIGTERM" not in canceled.log:
        assert time.monotonic() < deadline, canceled.log
        time.sleep(0.2)
    assert "training in" not in canceled.log


def test_srun_arguments_prefix_every_python_command_and_each_node_stages_shards(
    cluster, shards, tmp_path
):
    """The test replaces `apptainer exec IMAGE` with a script that records each command."""
    container = tmp_path / "container"
    container.write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/calls\nexec "$@"\n')
    container.chmod(0o755)
    config = write_config(tmp_path, shards, steps=6)
    arguments = ["slurm/train.sh", "--config", config, f"run.dir={tmp_path / 'run'}", *TINY]
    job = cluster.submit(
        tmp_path / "log",
        *("--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1", "--time=10"),
        *arguments,
        SRUN_ARGS=f"--mpi=none {container}",
        STAGE=str(tmp_path / "stage"),
    )
    assert job.wait()["JobState"] == "COMPLETED", job.log
    assert metrics(tmp_path / "run", "end")[-1]["outcome"] == "finished"
    calls = (tmp_path / "calls").read_text()
    counts = {
        part: sum(part in line for line in calls.splitlines())
        for part in ("--print-config", "-m vit.data.warm", "exec python -m torch.distributed.run")
    }
    assert list(counts.values()) == [1, 2, 2], calls
    assert calls.count("import os, socket, sys, time") == 2, (
        "each node must check the connection to the head node"
    )
    assert f"staging shards in {tmp_path / 'stage'} on each node" in job.log
    assert "note: not all shards were staged" not in job.log
    [start] = metrics(tmp_path / "run", "start")
    assert start["world_size"] == 2
    lines = metrics(tmp_path / "run", "train")
    assert sum(line.get("loader_cache_misses", 0) for line in lines) == 0, (
        "all shards must be in the cache"
    )
