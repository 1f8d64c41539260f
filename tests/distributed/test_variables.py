"""Test that wrong environment variables from torchrun or another launcher cause a one-line
error."""

from __future__ import annotations

import re

import pytest

from vit.distributed.launcher import NEEDED, NUMBERS, TASKS, check_variables
from vit.distributed.process_group import join_world

WITH_TORCHRUN = "start this command with torchrun"
MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TWO = {"RANK": "0", "WORLD_SIZE": "2", **MEET}


@pytest.fixture
def variables_of(monkeypatch):
    for name in (*NUMBERS, *NEEDED, *(name for names in TASKS.values() for name in names)):
        monkeypatch.delenv(name, raising=False)
    return lambda variables: [monkeypatch.setenv(*item) for item in variables.items()]


@pytest.mark.parametrize(
    ("variables", "texts"),
    [
        ({"RANK": "1"}, ["RANK=1: expected RANK below 1", WITH_TORCHRUN, "`unset RANK`"]),
        (
            {"WORLD_SIZE": "2"},
            ["WORLD_SIZE=2: missing: RANK, MASTER_ADDR, MASTER_PORT", "`unset WORLD_SIZE`"],
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["RANK=0 WORLD_SIZE=2: missing: MASTER_ADDR"]),
        ({**TWO, "RANK": "2"}, ["RANK=2 WORLD_SIZE=2", "expected RANK below 2"]),
        ({"WORLD_SIZE": "two"}, ["WORLD_SIZE=two: expected a number", "`unset WORLD_SIZE`"]),
        ({"RANK": "x"}, ["RANK=x: expected a number"]),
        ({"LOCAL_RANK": "-1"}, ["LOCAL_RANK=-1: expected a number"]),
        ({"LOCAL_WORLD_SIZE": ""}, ["LOCAL_WORLD_SIZE=: expected a number"]),
        ({**TWO, "MASTER_PORT": "port"}, ["MASTER_PORT=port: expected a number"]),
        (
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
            ["srun started this command as process 1 of 2", "`unset SLURM_STEP_NUM_TASKS`"],
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"},
            ["mpirun started this command as process 3 of 4", "start torchrun with mpirun"],
        ),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, ["mpiexec started this command as process 0 of 2"]),
    ],
)
def test_wrong_variables_are_named_in_one_line(variables_of, variables, texts):
    """tests/project/errors/rows.yaml contains the complete lines, which real commands print."""
    variables_of(variables)
    with pytest.raises(ValueError, match=re.escape(texts[0])) as error:
        check_variables()
    assert "\n" not in str(error.value)
    for text in texts:
        assert text in str(error.value)


def test_a_port_that_does_not_exist_is_a_mistake(variables_of):
    variables_of({**TWO, "MASTER_PORT": "70000"})
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:70000 .* MASTER_PORT are its address"):
        join_world("cpu")


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "nohost", "MASTER_PORT": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},  # in a batch script
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},  # srun --pty
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "RANK": "0", "WORLD_SIZE": "1"},
        {},
    ],
)
def test_one_process_trains_alone(variables_of, variables):
    variables_of(variables)
    assert join_world("cpu").size == 1
