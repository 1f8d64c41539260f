"""Test `pip install vitline`. The tests build the package from its sdist and install it outside any
checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from extras.deleted_extras import DELETED, is_deleted
from processes import REPOSITORY, call, environment, make_shards

from vit.data.decode import native

pytestmark = pytest.mark.slow
IN_AN_SDIST = "vit data_prep launch configs setup.py pyproject.toml README.md LICENSE"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Build a wheel from this checkout's sdist, install it into `site/` in an empty folder, and
    return that folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in IN_AN_SDIST.split():
        path = REPOSITORY / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "_native*")
            shutil.copytree(path, source / name, ignore=ignored)
        else:
            shutil.copy(path, source)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = folder.glob("vitline-*.whl")
    subprocess.run([*install, folder / "site", wheel], check=True, capture_output=True)
    shutil.rmtree(source)
    return folder


def installed(place: Path) -> dict[str, str]:
    path = os.pathsep.join([str(place / "site" / "bin"), os.environ["PATH"]])
    return {**environment(), "PYTHONPATH": str(place / "site"), "PATH": path}


def test_the_command_trains_and_evaluates_by_the_name_of_a_recipe(place, tmp_path):
    vitline = str(place / "site" / "bin" / "vitline")
    images = make_shards(tmp_path).parent / "images"
    env = installed(place)
    prepared = call([vitline, "prep", "imagefolder", str(images), "--out", "mine"], env, tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    small = ["data.root=mine", "train.epochs=null", "train.steps=2", "data.global_batch_size=12"]
    small += ["schedule.warmup_steps=1", "run.dir=run", "log.report=false", "log.wandb=off"]
    small += ["eval.reference=null"] if "recipes" in DELETED else []
    trained = call([vitline, "train", "--config", "demo", *small], env, tmp_path)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    evaluated = call([vitline, "eval", "run"], env, tmp_path)
    assert "23 images at 32x32" in evaluated.stdout, evaluated.stderr


def test_the_package_names_its_commands_and_itself(place):
    vitline = str(place / "site" / "bin" / "vitline")
    shown = call([vitline, "--help"], installed(place), place).stdout
    names = ("train", "eval", "report", "visualize", "prep")
    assert all(f"\n  {name} " in shown for name in names if not is_deleted(f"launch/{name}.py"))
    help_text = call([vitline, "train", "--help"], installed(place), place).stdout
    assert help_text.startswith("usage: vitline train")
    assert "launch/" not in help_text
    assert call([vitline, "trian"], installed(place), place).returncode == 2


@pytest.mark.skipif(not native.AVAILABLE, reason="no C compiler")
def test_contains_the_compiled_c_library(place):
    code = "from vit.data.decode import native; print(native.__file__, native.AVAILABLE)"
    done = call([sys.executable, "-c", code], installed(place), place)
    assert done.stdout.split() == [str(place / "site/vit/data/decode/native.py"), "True"]
    [library] = (place / "site" / "vit").glob("_native*")
    assert library.name == "_native.abi3.so"
    assert not list((place / "site").rglob("*.[ch]"))


def test_without_a_compiler_it_names_a_remedy_that_works_outside_of_a_checkout(place, tmp_path):
    site = shutil.copytree(place / "site", tmp_path / "site")
    for library in (site / "vit").glob("_native*"):
        library.unlink()
    code = "from vit.data.decode import native; print(native.UNAVAILABLE_REASON)"
    env = {**environment(), "PYTHONPATH": str(site)}
    done = call([sys.executable, "-c", code], env, tmp_path)
    assert "the C decoder was not built; install a C compiler" in done.stdout, done.stderr
    assert done.stdout.endswith("--no-cache-dir VITLINE.tar.gz (or a wheel)\n")


@pytest.mark.full
def test_tests_of_the_commands_pass_on_the_wheel(place):
    commands = ["tests/launch", "tests/system/test_command_line.py"]
    commands += [f"tests/extras/planner/test_{name}.py" for name in ("bench", "plan")]
    commands += [f"tests/extras/report/test_{name}.py" for name in ("page", "visualize")]
    paths = [str(REPOSITORY / path) for path in commands if not is_deleted(path)]
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0"]
    helpers = " ".join(str(REPOSITORY / "tests" / folder) for folder in ("helpers", ""))
    line += ["-o", f"pythonpath={helpers}", *paths]
    done = call(line, installed(place), place, timeout_s=600)
    assert done.returncode == 0, done.stdout[-5000:]


def test_the_notebook_installs_the_wheel_that_a_person_chooses_in_colab(place, tmp_path):
    """The test imports a fake `google.colab` before it runs the first cell, because the notebook
    uses this module to detect Colab.

    The fake upload dialog returns the name and content of the wheel, and writes the wheel to the
    working directory, as Colab does.
    """
    [wheel] = place.glob("vitline-*.whl")
    shutil.copy(wheel, tmp_path)
    colab = tmp_path / "google" / "colab"
    colab.mkdir(parents=True)
    upload = f"def upload():\n    return {{{wheel.name!r}: open({wheel.name!r}, 'rb').read()}}\n"
    (colab / "files.py").write_text(upload)
    (colab / "__init__.py").touch()
    notebook = json.loads((REPOSITORY / "docs" / "walkthrough.ipynb").read_text())
    first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    (tmp_path / "cell.py").write_text("import google.colab\n" + "".join(first["source"]))
    into = {"PIP_TARGET": str(tmp_path / "site"), "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}
    env = {**environment(), **into, "PYTHONPATH": str(tmp_path)}
    done = call([sys.executable, str(tmp_path / "cell.py")], env, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Choose a wheel" in done.stdout
    assert (tmp_path / "site" / "vit" / "model.py").is_file()
