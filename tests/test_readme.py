"""The README's commands are commands that work: its files exist, its settings fit the schema, its Python runs."""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from functools import cache
from pathlib import Path

import pytest
from processes import run

from vit.config_io import load_config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "slurm" / "README.md", ROOT / "CONTRIBUTING.md"]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


@cache
def usage(script: str, cold: bool = False) -> str:
    """What `--help` says."""
    done = run(script, "--help", cold=cold)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


def test_there_are_commands_to_test():
    assert {"make demo", "make test"} <= set(commands())
    assert len(commands()) > 10


@pytest.mark.parametrize("line", dict.fromkeys(commands()))
def test_a_command_of_the_readme_names_what_exists(line):
    words = shlex.split(line)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
        return
    launcher = words.pop(0)
    assert launcher in ("python", "torchrun", "sbatch")
    if launcher != "python":  # its own options come before the script
        words = words[next(i for i, word in enumerate(words) if not word.startswith("--")) :]
    if launcher == "sbatch":
        assert (ROOT / words[0]).is_file()
        words[0] = {"slurm/prep.sh": "data_prep/", "slurm/train.sh": "launch/train.py", "slurm/eval.sh": "launch/eval.py"}[words[0]]
        if words[0] == "data_prep/":
            words = ["-m", f"data_prep.{words[1]}", *words[2:]]
    if words[0] == "-m":
        assert (ROOT / (words[1].replace(".", "/") + ".py")).is_file()
        usage(words[1].replace(".", "/") + ".py", cold=True)  # without torch there is nothing to warm
        return
    script, *arguments = words
    assert all(flag in usage(script) for flag in arguments if flag.startswith("--"))
    if "--config" in arguments:
        overrides = [word for word in arguments if "=" in word and not word.startswith("--")]
        load_config(ROOT / arguments[arguments.index("--config") + 1], overrides)


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "launch").glob("*.py") if path.name != "check_versions.py"))
def test_a_command_starts_as_its_users_start_it(script):
    """In an interpreter that has imported nothing before."""
    assert "usage:" in usage(f"launch/{script}", cold=True)


def test_the_python_of_the_readme_runs():
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})


def test_the_loop_of_the_docs_trains(shards, tmp_path):
    """Three classes, 60 images, three epochs of three batches; classes are colours, so nine steps already help."""
    page = (ROOT / "docs" / "own_loop.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    code += textwrap.indent(
        textwrap.dedent("".join(re.findall(r"^      .*\n|^\n(?=      )", page.partition("**Evaluation**")[2], re.M))), "    "
    )
    (tmp_path / "loop.py").write_text(code.replace("data/digits", str(shards)))
    done = run(tmp_path / "loop.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.M)]
    assert len(losses) == 9
    assert losses[0] == pytest.approx(math.log(3), abs=0.01), "a zero head over three classes starts at ln 3"
    assert losses[-1] < losses[0]
    assert re.search(r"^top-1 [\d.]+ % ", done.stdout, re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "configs").glob("*.yaml"))], ids=lambda page: page.name)
def test_no_number_is_still_to_be_filled_in(page):
    assert not re.search(r"\b[A-Z]+_(TIME|RESULT)\b|\bRESULT\b|\bTODO\b", page.read_text())


def test_the_demo_runs_the_readmes_commands():
    demo = (ROOT / "launch" / "demo.sh").read_text().replace('"${RANKS:-2}"', "2")
    for line in commands()[2:5]:
        assert f"run {line}" in demo
