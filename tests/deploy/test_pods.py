"""Train in the pods of deploy/kube/ on two nodes, with evictions, kills and wrong settings.

A run that Kubernetes restarts must end with the same weights as an uninterrupted run.
"""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from deploy.kubernetes_stand_in import documents, evict
from proc import children, command_line
from processes import TINY, final_state, last_checkpoint, last_step, metrics, train, write_config

from data_prep import verify

STEPS = 300
OFTEN = ("log.every_steps=5", "checkpoint.every_steps=50", "eval.every_steps=1000000")


def training(folder: Path, shards: Path, *overrides: str, steps: int = STEPS) -> list[object]:
    config = write_config(folder, shards, steps=steps)
    return ["--config", config, f"run.dir={folder / 'run'}", *TINY, *OFTEN, *overrides]


@pytest.fixture
def on_this_host() -> dict[str, str]:
    """Return the environment variables that let two pods communicate without namespaces."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    return {"PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}


@pytest.mark.full
@pytest.mark.slow
def test_an_evicted_pod_saves_and_all_pods_are_restarted(cluster, shards, tmp_path, on_this_host):
    """One pod receives SIGTERM. Both pods must save the same step and exit with the status that
    requests a restart. Kubernetes must not count the restart as a failure."""
    [jobset] = documents("jobset.yaml")
    run_dir = tmp_path / "run"

    def disturb(attempt, pods):
        if attempt == 0 and last_step(run_dir) >= 10:
            evict(pods[1], grace_s=60)

    arguments = training(tmp_path, shards, steps=60)
    ended = cluster.run(jobset, arguments, disturb, **on_this_host)
    assert ended.is_complete, cluster.logs()
    assert ended.actions == ["RestartJobSetAndIgnoreMaxRestarts"]
    assert ended.codes == [[75, 75], [0, 0]], cluster.logs()
    stopped, finished = metrics(run_dir, "end")
    assert (stopped["outcome"], finished["outcome"]) == ("stopped", "finished")
    starts = metrics(run_dir, "start")
    assert [start["step"] for start in starts] == [0, stopped["step"]]
    assert {start["world_size"] for start in starts} == {2}


@pytest.mark.slow
def test_a_mistake_of_the_user_fails_the_jobset_immediately(
    cluster, shards, tmp_path, on_this_host
):
    """The mistake can be detected only by the ranks: 13 images cannot be divided between two
    ranks."""
    [jobset] = documents("jobset.yaml")
    arguments = training(tmp_path, shards, "data.global_batch_size=13")
    ended = cluster.run(jobset, arguments, **on_this_host)
    assert (ended.is_complete, ended.actions) == (False, ["FailJobSet"]), cluster.logs()
    assert ended.codes[0][0] == 2, cluster.logs()
    assert "data.global_batch_size=13 is not a multiple of 2 ranks" in cluster.logs()


@pytest.mark.full
@pytest.mark.slow
def test_pods_with_their_own_network_survive_evictions_and_kills(
    isolated_cluster, shards, tmp_path
):
    """Ports, names and variables come from the JobSet file, but each pod has only one rank. In four
    attempts, a pod is evicted while it waits for the other pod, evicted during training, killed
    after a new checkpoint, and killed before a new checkpoint."""
    cluster = isolated_cluster
    [jobset] = documents("jobset.yaml")
    run_dir = tmp_path / "run"
    at = [0]

    def disturb(attempt, pods):
        step = last_step(run_dir)
        if attempt == 0 and _meets(pods[0]):
            evict(pods[0], grace_s=60)
        elif attempt == 1 and step >= 10:
            evict(pods[1], grace_s=60)
        elif attempt == 2 and last_checkpoint(run_dir) >= 100:
            pods[1].signal(signal.SIGKILL)
            at[0] = step
        elif attempt == 3 and len(metrics(run_dir, "start")) == 3 and step > at[0]:
            pods[0].signal(signal.SIGKILL)

    arguments = training(tmp_path, shards)
    ended = cluster.run(jobset, arguments, disturb, timeout_s=500, PET_NPROC_PER_NODE="1")
    logs = cluster.logs()
    assert ended.is_complete, logs
    ignored = "RestartJobSetAndIgnoreMaxRestarts"
    assert ended.codes[0] == [75, 75], logs
    assert ended.codes[1] == [75, 75], logs
    assert sorted(ended.codes[2]) == [75, 137], logs
    assert sorted(ended.codes[3]) == [75, 137], logs
    # The action depends on the killed pod, because that pod exits first. The exit status of a
    # killed pod does not show that a newer checkpoint exists.
    assert ended.actions == [ignored, ignored, "RestartJobSet", "RestartJobSet"], logs
    assert ended.codes[-1] == [0, 0], logs
    whole = tmp_path / "whole"
    whole.mkdir()
    train(write_config(whole, shards, steps=STEPS), whole / "run", *OFTEN, ranks=2)
    assert final_state(run_dir, STEPS) == final_state(whole / "run", STEPS)


@pytest.mark.full
@pytest.mark.slow
def test_parts_of_a_dataset_are_written_according_to_the_completion_index(
    cluster, shards, tmp_path
):
    """The arguments are those in prep-job.yaml, except for the source and the target. Together, the
    parts must contain the complete dataset."""
    [job] = documents("prep-job.yaml")
    [container] = job["spec"]["template"]["spec"]["containers"]
    [part] = [word for word in container["args"] if word.startswith("--shards=")]
    source = shards.parent / "images"
    arguments = [
        "imagefolder",
        source,
        "--out",
        tmp_path / "out",
        "--num-shards",
        "3",
        "--workers",
        "1",
    ]
    jobset = {
        "metadata": {"name": "prep"},
        "spec": {
            "failurePolicy": {"maxRestarts": 0, "rules": []},
            "replicatedJobs": [
                {"name": "a", "template": {"spec": {"backoffLimit": 0, **job["spec"]}}}
            ],
        },
    }
    ended = cluster.run(jobset, [*arguments, part])
    assert ended.is_complete, cluster.logs()
    assert verify.main([str(tmp_path / "out")]) == 0


def _meets(pod) -> bool:
    pids = [pid for first in children(pod.process.pid) for pid in children(first)]
    return any("torch.distributed.run" in command_line(pid) for pid in pids)
