"""Test docs/walkthrough.ipynb, which contains the code from docs/model.md, a training run, and
plots of the trained model."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import nbclient
import nbformat
import pytest
from extras.deleted_extras import needs
from processes import run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "model.md"
NOTEBOOK = ROOT / "docs" / "walkthrough.ipynb"


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT)


def code_of(notebook: nbformat.NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_the_page_and_the_notebook_have_the_same_code_in_the_same_order(notebook):
    cells = code_of(notebook)
    on_page = re.findall(r"```python\n(.*?)\n```", PAGE.read_text(), re.S)
    assert len(on_page) > 10
    assert [cell for cell in cells if cell in on_page] == on_page


def test_the_notebook_has_no_outputs(notebook):
    nbformat.validate(notebook)
    assert notebook.nbformat == 4
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (not cell.outputs and cell.execution_count is None)
    written = json.loads(NOTEBOOK.read_text())
    assert NOTEBOOK.read_text() == json.dumps(written, indent=1, ensure_ascii=False) + "\n"


def test_all_links_have_targets(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)#]+)", text)
    assert targets
    assert all((NOTEBOOK.parent / target).exists() for target in targets)


def test_the_notebook_uses_the_address_of_the_project_in_colab(notebook):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    address = project.get("urls", {}).get("Repository", "")
    assert f'REPOSITORY = "{address}"' in code_of(notebook)[0]
    link = address.replace("https://github.com/", "https://colab.research.google.com/github/")
    in_colab = f"{link}/blob/main/docs/walkthrough.ipynb" if address else ""
    assert f"]({in_colab or 'https://colab.research.google.com/'})" in PAGE.read_text()


@needs("report")
def test_all_cells_run(notebook, tmp_path):
    """The test runs the cells as a script that trains for three steps. The accuracy is checked by
    another test."""
    script = "\n\n".join(code_of(notebook))
    assert script.count("steps = 1000\n") == 1
    (tmp_path / "cells.py").write_text(script.replace("steps = 1000\n", "steps = 3\n"))
    done = run(tmp_path / "cells.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^right: \d+ of 360 ", done.stdout, re.M)
    assert list(tmp_path.iterdir()) == [tmp_path / "cells.py"], "the cells must write no files"


@needs("report")
@pytest.mark.full
def test_a_kernel_runs_the_unchanged_notebook(notebook, monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    (right,) = re.findall(r"^right: (\d+) of 360 ", printed, re.M)
    assert int(right) > 300, "guessing gives only 36 of 360"
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 12
    page = PAGE.read_text()
    for code, shown in re.findall(r"```python\n(.*?)\n```\n+```text\n(.*?)```", page, re.S):
        (cell,) = (cell for cell in notebook.cells if cell.source == code)
        assert "".join(output.text for output in cell.outputs) == shown
