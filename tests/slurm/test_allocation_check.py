"""Test that `sbatch slurm/train.sh ... --check` writes a table to the log, and that the job's exit
status equals the check's."""

from __future__ import annotations

import re

import pytest
from extras.deleted_extras import needs
from processes import TINY, write_config

pytestmark = [pytest.mark.slow, pytest.mark.full, needs("planner")]

TWO_NODES = ("--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1", "--time=10")
# Both nodes are this machine. Like a container, this command prefix gives each node its own host
# name, and replaces the data on n2 with an empty folder.
AS_A_NODE = """#!/bin/bash
export HIDDEN={hidden}
exec unshare --uts --mount bash -c '
  hostname "$SLURMD_NODENAME"
  [[ $SLURMD_NODENAME != n2 || -z $HIDDEN ]] || mount -t tmpfs none "$HIDDEN"
  exec "$@"
' as_a_node "$@"
"""


def checked(cluster, folder, shards, hidden=""):
    program = folder / "as_a_node"
    program.write_text(AS_A_NODE.format(hidden=hidden))
    program.chmod(0o755)
    config = write_config(folder, shards)
    setting = f"run.dir={folder / 'run'}"
    line = ["slurm/train.sh", "--config", config, setting, *TINY, "--check"]
    job = cluster.submit(folder / "log", *TWO_NODES, *line, SRUN_ARGS=str(program))
    job.wait()
    return job


def rows(job):
    findings = re.findall(r"^ +(ok|note|FAIL|-) +(\S+(?: \S+)?) {2,}(.*)$", job.log, re.M)
    return {part: (verdict, finding) for verdict, part, finding in findings}


def test_a_check_of_two_nodes_ends_with_its_table_and_starts_nothing(cluster, shards, tmp_path):
    job = checked(cluster, tmp_path, shards)
    facts = job.facts()
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.log
    assert "2 rank(s) on 2 host(s), cpu" in " ".join(job.log.split())
    table = rows(job)
    parts = {"software", "shards", "run folder", "collectives", "pairs", "step", "checkpoint"}
    assert parts <= table.keys(), job.log
    assert {verdict for verdict, _ in table.values()} <= {"ok", "note"}, job.log
    assert job.log.splitlines()[-1].endswith("checked, and nothing was started; exit status 0")
    assert not (tmp_path / "run").exists()


def test_a_node_without_the_data_is_named_and_the_job_fails(cluster, shards, tmp_path):
    job = checked(cluster, tmp_path, shards, hidden=shards)
    facts = job.facts()
    assert facts["JobState"] == "FAILED", job.log
    assert facts["ExitCode"] != "0:0"
    verdict, finding = rows(job)["shards"]
    assert verdict == "FAIL", job.log
    # torchrun does not always start rank 0 on the first node of the job.
    assert re.match(r"n2 \(rank [01]\): ", finding), (
        "the message must name the node without the data"
    )
    assert rows(job)["step"][0] == "-", "the check must not try a step"
    assert re.search(r"checked, and nothing was started; exit status [1-9]", job.log)
    assert not (tmp_path / "run").exists()
