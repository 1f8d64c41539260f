"""Extract tests/deploy/schemas.json from the schemas of JobSet, Kubeflow Trainer and SkyPilot.

    python tests/deploy/extract_schemas.py JOBSET TRAINER PYTHON > tests/deploy/schemas.json

JOBSET and TRAINER are git repositories (kubernetes-sigs/jobset, kubeflow/trainer), and PYTHON is an
interpreter with SkyPilot installed. All three projects use the Apache-2.0 license. The script drops
descriptions, and fields that the files in deploy/ do not use. The extracted schemas forbid unknown
fields, so a misspelled field is an error, although an API server would silently drop it. Unknown
fields remain allowed in the Job inside a JobSet, because the tests check the Job against
Kubernetes' own schema.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import yaml

JOBSET = "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"
TRAINER = "manifests/base/crds/trainer.kubeflow.org_{}.yaml"
WORDS = ("description", "default", "format")
CUT = {
    "JobSet": ("coordinator", "volumeClaimPolicies", "status"),
    "TrainJob": ("runtimePatches", "initializer", "status"),
    "TrainingRuntime": ("flux", "jax", "mpi", "xgboost", "podGroupPolicy"),
}
SKY = """
import json, sky
from sky.utils import schemas
found = [schemas.get_task_schema(), schemas.get_resources_schema()]
print(json.dumps([sky.__version__, found]))
"""
SKY_KEPT = {
    "task": ["name", "workdir", "num_nodes", "resources", "setup", "run", "envs", "secrets"],
    "resources": [
        "accelerators",
        "use_spot",
        "disk_size",
        "job_recovery",
        "image_id",
        "infra",
        "cpus",
        "memory",
    ],
}


def read(repository: str, path: str) -> tuple[str, dict[str, Any]]:
    def git(*arguments: str) -> str:
        line = ["git", "-C", repository, *arguments]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout

    return git("rev-parse", "HEAD").strip(), yaml.safe_load(git("show", f"HEAD:{path}"))


def extract(schema: Any, cut: tuple[str, ...]) -> Any:
    """Return `schema` with unknown fields forbidden, and without descriptions and the properties in
    `cut`."""
    if isinstance(schema, list):
        return [extract(item, cut) for item in schema]
    if not isinstance(schema, dict):
        return schema
    reduced = {
        key: value
        for key, value in schema.items()
        if key not in WORDS and not key.startswith("x-kubernetes-")
    }
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if "properties" in reduced:
        properties = {
            name: extract(value, cut)
            for name, value in reduced.pop("properties").items()
            if name not in cut
        }
        return {**extract(reduced, cut), "properties": properties, "additionalProperties": False}
    return {key: extract(value, cut) for key, value in reduced.items()}


def extract_sky(python: str) -> tuple[str, dict[str, Any]]:
    """Return the source of SkyPilot's schemas, and the schemas for tasks and resources."""
    done = subprocess.run([python, "-c", SKY], check=True, capture_output=True, text=True)
    version, sky_schemas = json.loads(done.stdout.splitlines()[-1])
    schemas = {}
    for (name, property_names), schema in zip(SKY_KEPT.items(), sky_schemas, strict=True):
        properties = {key: schema["properties"][key] for key in property_names}
        schemas[f"sky_{name}"] = {
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
        }
    for choice in schemas["sky_resources"]["properties"]["job_recovery"]["anyOf"]:
        # SkyPilot's server rejects unknown names.
        if "properties" in choice:
            choice["additionalProperties"] = False
    return f"skypilot {version} (PyPI): sky/utils/schemas.py", schemas


def main(jobset_repository: str, trainer_repository: str, python: str) -> dict[str, Any]:
    commit, crd = read(jobset_repository, JOBSET)
    sources = [f"kubernetes-sigs/jobset@{commit}:{JOBSET}"]
    schemas = {}
    for kind, repository, path in (
        ("JobSet", jobset_repository, JOBSET),
        ("TrainJob", trainer_repository, TRAINER.format("trainjobs")),
        ("TrainingRuntime", trainer_repository, TRAINER.format("trainingruntimes")),
    ):
        commit, crd = read(repository, path)
        if kind != "JobSet":
            sources.append(f"kubeflow/trainer@{commit}:{path}")
        [version] = crd["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]
        spec = schema["properties"]["spec"]["properties"]
        if kind == "JobSet":
            spec["replicatedJobs"]["items"]["properties"]["template"] = {"type": "object"}
        elif kind == "TrainingRuntime":
            spec["template"]["properties"]["spec"] = schemas["JobSet"]["properties"]["spec"]
        group = crd["spec"]["group"]
        schemas[kind] = extract(schema, CUT[kind])
        schemas[kind]["properties"]["apiVersion"] = {"const": f"{group}/{version['name']}"}
    source, of_sky = extract_sky(python)
    sources.append(source)
    schemas.update(of_sky)
    return {"sources": sources, "license": "Apache-2.0", "schemas": schemas}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:]), indent=1))
