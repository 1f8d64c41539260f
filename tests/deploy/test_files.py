"""Check the files in deploy/ against the schemas, and with the checkers, of the programs that read
these files."""

from __future__ import annotations

import importlib.util
import json
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import kubernetes_validate
import pytest
import yaml
from deploy.kubernetes_stand_in import documents, jobset_action, pod_action
from processes import REPOSITORY

from vit.config.io import load_config

sys.path.insert(0, str(REPOSITORY / "launch"))
job = SimpleNamespace(**runpy.run_path(str(REPOSITORY / "launch" / "job.py")))
sys.path.pop(0)
# Kubernetes 1.31 is the oldest version that docs/clusters.md supports.
KUBERNETES = "1.31"
SCHEMAS = json.loads((Path(__file__).parent / "schemas.json").read_text())["schemas"]
[JOBSET] = documents("jobset.yaml")
RUNTIME, TRAINJOB = documents("trainjob.yaml")
[PREP] = documents("prep-job.yaml")
DEPLOY = REPOSITORY / "deploy"
SKY = yaml.safe_load((DEPLOY / "sky.yaml").read_text())


def job_of(jobset_spec) -> dict:
    [replicated] = jobset_spec["replicatedJobs"]
    return replicated["template"]["spec"]


def container_of(job_spec) -> dict:
    [container] = job_spec["template"]["spec"]["containers"]
    return container


TRAINING_JOBS = [
    pytest.param(job_of(JOBSET["spec"]), id="jobset"),
    pytest.param(job_of(RUNTIME["spec"]["template"]["spec"]), id="trainjob"),
]


def validate(document) -> None:
    jsonschema.validate(document, SCHEMAS[document["kind"]])


def validate_job(spec) -> None:
    document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": spec}
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    "document", [JOBSET, RUNTIME, TRAINJOB], ids=lambda document: document["kind"]
)
def test_custom_resources_follow_their_own_schemas(document):
    validate(document)
    misspelt = json.loads(json.dumps(document).replace("failurePolicy", "failurPolicy"))
    misspelt = json.loads(json.dumps(misspelt).replace("numNodes", "numNode"))
    with pytest.raises(jsonschema.ValidationError):
        validate(misspelt)


@pytest.mark.parametrize("spec", [*TRAINING_JOBS, pytest.param(PREP["spec"], id="prep")])
def test_jobs_follow_the_schema_of_kubernetes(spec):
    validate_job(spec)
    misspelt = json.loads(json.dumps(spec).replace("podFailurePolicy", "podFailurPolicy"))
    with pytest.raises(kubernetes_validate.ValidationError):
        validate_job(misspelt)


@pytest.mark.parametrize("spec", TRAINING_JOBS)
def test_each_exit_status_of_a_job_has_its_action(spec):
    class Pod:
        name = "vit-node-0-1"
        conditions: frozenset[str] = frozenset()

    policy = JOBSET["spec"]["failurePolicy"]
    assert policy == RUNTIME["spec"]["template"]["spec"]["failurePolicy"]
    actions = {}
    for code in (job.MISTAKE, job.AGAIN, job.ACCIDENT, 137):
        action, message = pod_action(spec, Pod(), code)
        reason = "PodFailurePolicy" if action == "FailJob" else "BackoffLimitExceeded"
        actions[code] = jobset_action(policy, reason, message)
    Pod.conditions = frozenset(["DisruptionTarget"])
    action, message = pod_action(spec, Pod(), 137)
    assert action == "FailJob"
    assert actions == {
        job.MISTAKE: "FailJobSet",
        job.AGAIN: "RestartJobSetAndIgnoreMaxRestarts",
        job.ACCIDENT: "RestartJobSet",
        137: "RestartJobSet",
    }
    again = jobset_action(policy, "PodFailurePolicy", message)
    assert again == "RestartJobSetAndIgnoreMaxRestarts"


def test_numbers_that_are_repeated_across_files_are_equal():
    spec = job_of(JOBSET["spec"])
    container = container_of(spec)
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(env["PET_NNODES"])
    assert int(env["PET_NPROC_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    name = f"{JOBSET['metadata']['name']}-{JOBSET['spec']['replicatedJobs'][0]['name']}-0-0"
    assert env["PET_MASTER_ADDR"] == f"{name}.{JOBSET['metadata']['name']}"
    trainer = TRAINJOB["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    args = container_of(PREP["spec"])["args"]
    assert args[-1] == f"--shards=$(JOB_COMPLETION_INDEX)/{PREP['spec']['completions']}"
    cores = container_of(PREP["spec"])["resources"]["requests"]["cpu"]
    assert f"--workers={cores}" in args
    assert TRAINJOB["spec"]["runtimeRef"]["name"] == RUNTIME["metadata"]["name"]


@pytest.mark.parametrize("spec", TRAINING_JOBS)
def test_the_grace_period_covers_the_time_that_torchrun_gives_a_save(spec):
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > job.SHUTDOWN_S


def test_our_commands_parse_the_arguments_in_the_files():
    lines = [container_of(job_of(JOBSET["spec"]))["args"], TRAINJOB["spec"]["trainer"]["args"]]
    [line] = [line for line in SKY["run"].splitlines() if line.startswith("exec ")]
    for name, value in SKY["envs"].items():
        line = line.replace(f"${name}", value)
    sky_arguments = shlex.split(line.partition(" job ")[2], comments=True)
    for arguments, run_dir in [
        *((line, "/runs/vit_b16") for line in lines),
        (sky_arguments, "s3://BUCKET/runs/vit_b16"),
    ]:
        args = job.read_command_line(arguments)
        assert load_config(args.config, args.overrides).run.dir == run_dir
    command = container_of(PREP["spec"])["args"][0]
    assert (REPOSITORY / "data_prep" / f"{command}.py").is_file()
    assert SKY["resources"]["job_recovery"]["recover_on_exit_codes"] == [job.AGAIN]


def test_the_dockerfile_passes_hadolint():
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_contains_the_sources_of_the_wheel():
    """Dockerfile.dockerignore must include every file that setup.py and pyproject.toml name."""
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in ignore if line.startswith("!")}
    needed = {"pyproject.toml", "setup.py", "README.md", "LICENSE"}
    needed |= {"vit", "data_prep", "launch", "configs"}
    assert let_through == needed
    assert all((REPOSITORY / name).exists() for name in let_through)


def test_the_skypilot_file_follows_the_schema_of_skypilot():
    validate_sky(SKY)
    for key, misspelt in (("num_nodes", "num_node"), ("recover_on_exit_codes", "recover_on_codes")):
        with pytest.raises(jsonschema.ValidationError):
            validate_sky(json.loads(json.dumps(SKY).replace(key, misspelt)))


def validate_sky(task) -> None:
    jsonschema.validate(task, SCHEMAS["sky_task"])
    jsonschema.validate(task["resources"], SCHEMAS["sky_resources"])


@pytest.mark.full
def test_skypilot_reads_its_file():
    if importlib.util.find_spec("sky") is None:
        pytest.skip("pip install skypilot (460 MB)")
    task = importlib.import_module("sky.task").Task.from_yaml(str(DEPLOY / "sky.yaml"))
    [resources] = task.resources
    assert resources.use_spot
    assert task.num_nodes == SKY["num_nodes"]
