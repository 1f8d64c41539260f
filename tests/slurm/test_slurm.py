"""Test slurm/*.sh on a real Slurm cluster with two nodes. Jobs finish, time out, are canceled or
preempted, or contain mistakes.

Both nodes are this machine, and the GPUs that Slurm allocates do not exist. Each job runs one rank
on the CPU for each allocated GPU.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from checksums import digests
from proc import all_pids, command_line
from processes import TINY, final_state, last_step, metrics, run, train, write_config

pytestmark = [pytest.mark.slow, pytest.mark.full]

TWO_NODES = ("--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1", "--time=10")
STEPS = 300
OFTEN = ("log.every_steps=10", "checkpoint.every_steps=50", "eval.every_steps=1000000")


def submit_training(
    cluster, folder: Path, shards: Path, *overrides: str, steps: int = STEPS, options=TWO_NODES
):
    config = write_config(folder, shards, steps=steps)
    return cluster.submit(
        folder / "log",
        *options,
        "slurm/train.sh",
        "--config",
        config,
        f"run.dir={folder / 'run'}",
        *TINY,
        *OFTEN,
        *overrides,
    )


def wait_for_step(job, run_dir: Path, step: int, timeout_s: float = 180) -> None:
    """Wait until metrics.jsonl contains `step`. If the job ends before this step, the test
    fails."""
    deadline = time.monotonic() + timeout_s
    while last_step(run_dir) < step:
        state = job.facts()["JobState"]
        if (
            state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
            or time.monotonic() > deadline
        ):
            raise AssertionError(f"{state} before step {step}\n{job.log}")
        time.sleep(0.1)


def starts(run_dir: Path) -> list[int]:
    return [line["step"] for line in metrics(run_dir, "start")]


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(write_config(folder, shards, steps=STEPS), folder / "run", *OFTEN, ranks=2)
    return final_state(folder / "run", STEPS)


@pytest.fixture(scope="module")
def finished(cluster, shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    job = submit_training(cluster, folder, shards, steps=12)
    job.wait()
    return job, folder / "run"


def test_two_nodes_train_one_run_to_the_end(finished):
    job, run_dir = finished
    facts = job.facts()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "0"), (
        job.log
    )
    assert [line["world_size"] for line in metrics(run_dir, "start")] == [2]
    assert metrics(run_dir, "end")[-1]["outcome"] == "finished"
    assert "2 node(s) (n[1-2]) with 1 rank(s) each" in job.log
    assert f"finished: {run_dir}" in job.log
    assert "Traceback" not in job.log


def test_evaluation_on_two_nodes_equals_one_process(cluster, finished, tmp_path):
    run_dir = finished[1]
    job = cluster.submit(
        tmp_path / "log", *TWO_NODES, "slurm/eval.sh", "--checkpoint", run_dir, "--json"
    )
    local = run("launch/eval.py", "--checkpoint", run_dir, "--json")
    assert job.wait()["JobState"] == "COMPLETED", job.log
    results = [json.loads(line) for line in job.log.splitlines() if line.startswith("{")]
    assert results == [json.loads(local.stdout)]


def test_a_job_at_its_time_limit_is_requeued_and_ends_like_an_undisturbed_job(
    cluster, shards, tmp_path, whole
):
    job = submit_training(cluster, tmp_path, shards)
    run_dir = tmp_path / "run"
    wait_for_step(job, run_dir, 20)
    # Slurm sends SIGUSR1 shortly before the time limit.
    job.cancel("--batch", "--signal=USR1")
    facts = job.wait()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "1"), (
        job.log
    )
    first, second = metrics(run_dir, "end")
    assert (first["outcome"], second["outcome"]) == ("stopped", "finished")
    assert starts(run_dir) == [0, first["step"]]
    assert not (run_dir / "stopped_early").exists()
    assert final_state(run_dir, STEPS) == whole
    assert (
        f'stopped and saved: {{"step": {first["step"]}, "signal": "SIGUSR1"}}. Queueing job'
        f" {job.number} again" in job.log
    )
    assert "restart 1: 2 node(s)" in job.log
    assert "Traceback" not in job.log


def test_a_one_node_job_resumes_after_a_crash_without_requeuing(cluster, shards, tmp_path, whole):
    # the job starts one rank for each of the two GPUs
    options = ("--nodes=1", "--gpus-per-node=2", "--cpus-per-task=2", "--time=10")
    job = submit_training(cluster, tmp_path, shards, options=options)
    run_dir = tmp_path / "run"
    wait_for_step(job, run_dir, 60)
    os.kill(next(iter(trainers(run_dir))), signal.SIGKILL)
    facts = job.wait()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "0"), (
        job.log
    )
    assert [line["world_size"] for line in metrics(run_dir, "start")] == [2, 2]
    assert starts(run_dir)[1] % 50 == 0
    assert "starting again from there" in job.log
    assert final_state(run_dir, STEPS) == whole


def test_a_failed_node_ends_the_step_on_the_waiting_node(cluster, shards, tmp_path, whole):
    """The test stops a rank to simulate a failed node. On real GPUs, the other ranks would wait for
    the failed node as well. SRUN_ARGS contains the options for srun."""
    config = write_config(tmp_path, shards, steps=STEPS)
    arguments = ("--config", config, f"run.dir={tmp_path / 'run'}", *TINY, *OFTEN)
    job = cluster.submit(
        tmp_path / "log", *TWO_NODES, "slurm/train.sh", *arguments, SRUN_ARGS="--label"
    )
    wait_for_step(job, tmp_path / "run", 60)
    still, other = trainers(tmp_path / "run")
    os.kill(still, signal.SIGSTOP)
    os.kill(other, signal.SIGKILL)
    facts = job.wait()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "0"), (
        job.log
    )
    assert starts(tmp_path / "run")[1] % 50 == 0
    assert "starting again from there" in job.log
    assert final_state(tmp_path / "run", STEPS) == whole
    assert re.search(r"^[01]: disk: ", job.log, re.MULTILINE), "srun --label must number the lines"
    assert "OMP_NUM_THREADS" not in job.log


@pytest.mark.patient
def test_a_node_that_dies_costs_the_steps_since_the_checkpoint(cluster, shards, tmp_path, whole):
    """The slurmd, the job step and the ranks of the node are killed without a message. After
    SlurmdTimeout, Slurm requeues the job, which waits until the node returns."""
    job = submit_training(cluster, tmp_path, shards)
    run_dir = tmp_path / "run"
    wait_for_step(job, run_dir, 60)
    cluster.end_node("n2", signal.SIGKILL)
    assert cluster.nodes["n2"].wait(120) != 0
    job.wait(lambda facts: facts["Restarts"] == "1" and facts["JobState"] == "PENDING")
    cluster.start_node("n2")
    facts = job.wait()
    # When the node returns, Slurm may repeat the request to terminate the job. The job then saves
    # and is requeued a second time.
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.log
    assert int(facts["Restarts"]) >= 1
    first, second, *_ = starts(run_dir)
    assert (first, second % 50) == (0, 0)
    assert second > 0
    assert final_state(run_dir, STEPS) == whole


@pytest.mark.patient
def test_a_task_of_an_array_is_requeued_without_the_other_tasks(cluster, shards, tmp_path):
    """The last task of an array has the job id of the array, which names all of its tasks."""
    config = write_config(tmp_path, shards, steps=1_000_000)
    folder = tmp_path / "sweep"
    options = ("--array=0-1", "--nodes=1", "--gpus-per-node=1", "--cpus-per-task=1", "--time=10")
    arguments = ("slurm/sweep.sh", "--config", config, f"run.dir={folder}", *TINY, *OFTEN)
    job = cluster.submit(tmp_path / "log-%a", *options, *arguments)
    for task in range(2):
        wait_for_step(job, folder / str(task), 20)

    cluster.call("scancel", "--batch", "--signal=USR1", f"{job.number}_1")
    deadline = time.monotonic() + 240
    while len(starts(folder / "1")) < 2:
        assert time.monotonic() < deadline, (tmp_path / "log-1").read_text()
        time.sleep(0.2)
    assert starts(folder / "0") == [0], (tmp_path / "log-0").read_text()
    assert not metrics(folder / "0", "end"), (tmp_path / "log-0").read_text()
    job.cancel()


def trainers(run_dir: Path) -> list[int]:
    """Return the process ids of the ranks that train in `run_dir`. The launchers and srun are
    excluded, because their command lines contain torchrun."""
    lines = {pid: command_line(pid).split() for pid in all_pids()}
    return [
        pid
        for pid, arguments in lines.items()
        if "launch/train.py" in arguments[1:3] and f"run.dir={run_dir}" in arguments
    ]


@pytest.mark.parametrize(
    ("override", "message", "started"),
    [
        ("optim.lr=-1", "optim.lr", False),
        # only the training command detects this mistake
        ("data.root=/nowhere", "/nowhere: no such directory", True),
    ],
)
def test_a_mistake_fails_once_with_its_reason(
    cluster, shards, tmp_path, override, message, started
):
    job = submit_training(cluster, tmp_path, shards, override)
    facts = job.wait()
    assert (facts["JobState"], facts["Restarts"]) == ("FAILED", "0"), job.log
    assert facts["ExitCode"] != "0:0"
    errors = [line for line in job.log.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert job.log.count("training in") == started
    assert ("not queued again" if started else "not started") in job.log.splitlines()[-1]


def test_a_node_that_cannot_reach_the_head_reports_it_before_training(cluster, shards, tmp_path):
    (tmp_path / "getent").write_text(
        "#!/bin/sh\n# every name resolves, says the head node; the other one finds out\n"
    )
    (tmp_path / "getent").chmod(0o755)
    path = f"{tmp_path}:{cluster.environment['PATH']}"
    job = cluster.submit(
        tmp_path / "log", *TWO_NODES, "slurm/eval.sh", "--checkpoint", "/nowhere", PATH=path
    )
    assert job.wait()["JobState"] == "FAILED"
    assert re.search(r"^n2 cannot reach n1:\d+: .*(not known|resolution|address)", job.log, re.M), (
        job.log
    )
    assert "error: not started: not every node reaches n1 at n1:" in job.log


def test_does_not_choose_a_port_in_use(cluster, tmp_path):
    job = cluster.submit(
        tmp_path / "log", "--hold", *TWO_NODES, "slurm/eval.sh", "--checkpoint", "/nowhere"
    )
    port = 20000 + int(job.number) % 12000
    with socket.create_server(("", port)):
        cluster.call("scontrol", "release", job.number)
        job.wait()
    assert f"n1: port {port} is taken (" in job.log
    assert f"head node n1 at 127.0.0.1:{20000 + (int(job.number) + 4001) % 12000}" in job.log
    assert "error: /nowhere" in job.log, "the job must reach the evaluation"


def test_an_array_of_tasks_writes_the_same_shards_as_one_process(cluster, shards, tmp_path):
    command = (
        "slurm/prep.sh",
        "imagefolder",
        shards.parent / "images",
        "--out",
        tmp_path / "out",
        "--num-shards",
        3,
    )
    alone = cluster.submit(tmp_path / "alone", "--cpus-per-task=1", "--array=3", *command)
    assert alone.wait()["JobState"] == "FAILED"
    assert "an array of 1 tasks, 3 to 3: submit --array=0-N again" in alone.log
    repeated = cluster.submit(
        tmp_path / "log-2", "--cpus-per-task=1", "--array=2", *command, PARTS="4"
    )
    array = cluster.submit(
        tmp_path / "log-%a", "--cpus-per-task=1", "--array=0-1,3", *command, PARTS="4"
    )
    for job in (repeated, array):
        job.wait(lambda facts: facts["JobState"] in ("COMPLETED", "FAILED"))
    logs = "".join(path.read_text() for path in sorted(tmp_path.glob("log-*")))
    assert digests(tmp_path / "out") == digests(shards), logs
    assert "complete, 3 classes" in logs


@pytest.fixture(scope="module")
def limited(cluster, shards, tmp_path_factory):
    """Submit a job to a partition without preemption, and return the job and its run folder. The
    job repeatedly reaches its time limit of one minute."""
    folder = tmp_path_factory.mktemp("limited")
    options = (*TWO_NODES[:-1], "--time=1", "--signal=B:USR1@20", "--partition=urgent")
    return (
        submit_training(cluster, folder, shards, steps=1_000_000, options=options),
        folder / "run",
    )


def test_preempted_jobs_save_and_are_requeued(cluster, shards, tmp_path, limited):
    """If a partition gives no notice of a preemption, Slurm itself ends and requeues the job. If a
    partition gives notice, the job's script must requeue the job."""
    jobs = {}
    for partition in ("main", "grace"):
        (tmp_path / partition).mkdir()
        options = (
            "--nodes=2",
            "--gpus-per-node=1",
            "--cpus-per-task=6",
            "--time=10",
            f"--partition={partition}",
        )
        jobs[partition] = submit_training(
            cluster, tmp_path / partition, shards, steps=1_000_000, options=options
        )

    for partition, job in jobs.items():
        wait_for_step(job, tmp_path / partition / "run", 20)
    cluster.submit(
        tmp_path / "urgent",
        "--partition=urgent",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=14",
        "--wrap=true",
    ).wait()

    for partition, job in jobs.items():
        run_dir = tmp_path / partition / "run"
        job.wait(lambda facts: facts["Restarts"] == "1" and facts["JobState"] == "RUNNING")
        stopped = metrics(run_dir, "end")[0]
        assert stopped["outcome"] == "stopped", job.log
        wait_for_step(job, run_dir, stopped["step"] + 20)
        assert starts(run_dir) == [0, stopped["step"]]
        job.cancel()

    assert "Not queued again by this script" in jobs["main"].log
    assert f"Queueing job {jobs['grace'].number} again" in jobs["grace"].log


def test_a_job_is_requeued_at_its_time_limit_but_not_after_scancel(limited):
    job, run_dir = limited
    # Cancel the job early. Because of its time limit of one minute, the job would save and requeue
    # itself after 40 s.
    job.wait(
        lambda facts: (
            int(facts["Restarts"]) > 0
            and facts["JobState"] == "RUNNING"
            and facts["RunTime"] < "00:00:10"
        )
    )
    stopped = metrics(run_dir, "end")
    assert {line["outcome"] for line in stopped} == {"stopped"}, job.log
    assert "SIGUSR1: the time limit is near" in job.log
    wait_for_step(job, run_dir, stopped[-1]["step"] + 1)
    assert starts(run_dir)[1] == stopped[0]["step"]
    job.cancel()
    facts = job.wait(lambda facts: facts["JobState"] == "CANCELLED")
    restarts = facts["Restarts"]
    deadline = time.monotonic() + 180
    # The second message is printed if the job is canceled while it restarts.
    ended = ("the job itself was asked to end", "not started")
    while not any(message in job.log.splitlines()[-1] for message in ended):
        assert time.monotonic() < deadline, job.log
        time.sleep(0.2)
    assert (run_dir / "stopped_early").exists()
    time.sleep(7)  # wait longer than a requeued job would wait before it starts
    facts = job.facts()
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", restarts), job.log


def test_only_tasks_of_srun_without_torchrun_are_refused(cluster, shards, tmp_path):
    """A process trains alone in the batch script, in `salloc` and in a step with one task, although
    SLURM_NTASKS is 2."""
    config = write_config(tmp_path, shards, steps=2)
    settings = " ".join(TINY)
    script = tmp_path / "job.sh"
    script.write_text(f"""#!/bin/bash
train() {{ name=$1; shift; "$@" python launch/train.py --config {config} {settings} \\
  run.dir={tmp_path}/$name >{tmp_path}/$name.log 2>&1; echo "$name $?"; }}
train batch
train one srun --ntasks=1
train tasks srun --ntasks=2
""")
    job = cluster.submit(tmp_path / "log", "--ntasks=2", "--time=10", script)
    assert job.wait()["JobState"] == "COMPLETED", job.log
    statuses = [line for line in job.log.splitlines() if line.startswith(("batch", "one", "tasks"))]
    assert statuses == ["batch 0", "one 0", "tasks 2"], job.log
    errors = (tmp_path / "tasks.log").read_text()
    for task in (0, 1):
        assert f"error: srun started this command as process {task} of 2, and each would" in errors
    assert not (tmp_path / "tasks").exists()
    shell = f"python launch/train.py --config {config} {settings} run.dir={tmp_path}/shell"
    cluster.call("salloc", "--ntasks=2", "--quiet", "bash", "-c", shell)
    assert [line["world_size"] for line in metrics(tmp_path / "shell", "start")] == [1]
