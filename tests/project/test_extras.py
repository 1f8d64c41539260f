"""Test that each folder in vit/extras/ can be deleted. All other modules must still be importable,
and a config that needs the deleted folder must be rejected in one line.

tests/extras/deleted_extras.py lists the files that are deleted together with each folder.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest
from extras.deleted_extras import DELETED, OWN, extra_of
from processes import environment
from warm_python import python

ROOT = Path(__file__).parents[2]
EXTRAS = sorted(path.parent.name for path in (ROOT / "vit" / "extras").glob("*/__init__.py"))
PLAIN = ("log.report=false", "eval.reference=null", "data.root=data", "run.dir=run")
NEEDED_BY = {
    "loggers": ("log.tensorboard=true", "log.tensorboard=true needs"),
    "planner": ("--check", "--check needs"),
    "recipes": ("eval.reference=demo", "eval.reference needs"),
    "remote_runs": ("run.dir=s3://bucket/run", "run.dir=s3://bucket/run needs"),
    "report": ("log.report=true", "log.report=true needs"),
    "stream": ("stream.urls=a.tar stream.num_samples=64", "stream.urls needs"),
}
"""Maps each extra to an argument of launch/train.py that requires it, and to the first words of the
expected error. Extras that are not listed cannot be required by a config."""
SCRIPT = """
import importlib, pkgutil, sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("vit", "data_prep")]:
    del sys.modules[name]  # imported before the fork
sys.path.insert(0, sys.argv[1])
import vit, data_prep
assert vit.__file__.startswith(sys.argv[1]), vit.__file__
for package in (vit, data_prep):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__") and not module.name.endswith("_native"):
            importlib.import_module(module.name)
from vit.config.io import load_config
from vit.compose import parts_of
from vit.system.optional import needed_for
config = load_config("configs/demo.yaml", sys.argv[3:])
print(len(parts_of(config).hooks))
word = sys.argv[2]
try:
    if word == "--check":
        with needed_for(word):
            import vit.extras.planner.check.all_checks
    else:
        parts_of(load_config("configs/demo.yaml", [*sys.argv[3:], *word.split()]))
except ValueError as error:
    print(error)
"""


def test_each_extra_needed_by_an_argument_exists():
    assert set(NEEDED_BY) < set(OWN)
    assert {*EXTRAS, *DELETED} == set(OWN), "tests/extras/deleted_extras.py must list each extra"


@pytest.mark.parametrize("name", EXTRAS)
def test_the_files_that_belong_to_an_extra_exist(name):
    assert [path for path in OWN[name] if not (ROOT / path).exists()] == []


def test_a_command_belongs_to_the_extra_that_it_cannot_start_without():
    for script in sorted((ROOT / "launch").glob("*.py")):
        imports = {
            node.module.split(".")[2]
            for node in ast.parse(script.read_text()).body
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vit.extras.")
        }
        assert imports - {"compose"} == {extra_of(f"launch/{script.name}")} - {""}, script.name


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTRAS)
def test_everything_else_works_without_the_extra(name, tmp_path):
    for folder in ("vit", "data_prep", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.pyc"))
    shutil.rmtree(tmp_path / "vit" / "extras" / name)
    env = {**environment(), "HOME": str(tmp_path)}
    word, refusal = NEEDED_BY.get(name, ("log.report=false", ""))
    done = subprocess.run(
        [python(env), "-c", SCRIPT, str(tmp_path), word, *PLAIN],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    num_hooks, *refusals = done.stdout.splitlines()
    assert int(num_hooks) >= 4
    expected = [f"{refusal} vit/extras/{name}, which is not installed"] if refusal else []
    assert refusals == expected
