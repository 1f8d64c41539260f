"""Test the examples in the documentation: commands must accept their arguments, files must exist,
settings must be valid, and Python code must run."""

from __future__ import annotations

import importlib
import io
import json
import re
import runpy
import shlex
import tarfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import warm_python
from extras.deleted_extras import is_deleted, needs_of
from PIL import Image
from processes import TINY, call, environment, metrics, run, write_config
from sklearn.datasets import load_digits

import data_prep.command
from vit.compose import build_run
from vit.config.io import load_config
from vit.distributed import process_group
from vit.train import train

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "slurm" / "README.md",
    ROOT / "CONTRIBUTING.md",
]
PAGES += [ROOT / "benchmarks" / "README.md"]
README = ROOT / "README.md"
SCRIPTS = {
    "slurm/train.sh": "launch/train.py",
    "slurm/sweep.sh": "launch/train.py",
    "slurm/eval.sh": "launch/eval.py",
}
BEGINNINGS = r"(?:\w+=\S+ )?(?:python3?|torchrun|sbatch|make|bash)"
"""A regular expression for the start of a command, optionally after a variable assignment."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


def commands(page: Path) -> list[str]:
    """Return the commands in shell blocks, indented lines and backticks. Commands with a
    <placeholder> are omitted."""
    text = page.read_text()
    lines = "\n".join(blocks(page, "sh")).replace("\\\n", "").splitlines()
    lines += re.findall(rf"^    ({BEGINNINGS} .*)", re.sub("```.*?```", "", text, flags=re.S), re.M)
    lines += re.findall(rf"(?<!`)`({BEGINNINGS} [^`\n]+)`(?!`)", text)
    plain = [re.split(r"\s{2,}(?:#|\S+ \S)", line)[0].strip() for line in lines]
    parts = [
        part
        for line in plain
        for part in line.split(" && ")
        if re.match(BEGINNINGS, part) and not re.search(r"<|\.\.\.", part)
    ]
    return list(dict.fromkeys(parts))


def commands_of_the_demo() -> list[str]:
    demo = (ROOT / "launch" / "demo.sh").read_text().replace('"$RANKS"', "2")
    return re.findall(r"^run (.*)$", demo, re.M)


SHOWN = [
    pytest.param(line, id=f"{name_of(page)}: {line}", marks=needs_of(line))
    for page in PAGES
    for line in commands(page)
]
SHOWN += [pytest.param(line, id=f"demo.sh: {line}") for line in commands_of_the_demo()]


def test_there_are_commands_to_test():
    assert {"make demo", "make test"} <= set(commands(README))
    assert len(commands(README)) > 15
    assert len(commands_of_the_demo()) == 3
    assert "sbatch slurm/prep.sh verify /data/imagenet" in commands(ROOT / "slurm" / "README.md")
    assert any(
        line.startswith("python launch/train.py --config configs/animals10.yaml")
        for line in commands(ROOT / "docs" / "data.md")
    )
    assert "make check" in commands(ROOT / "CONTRIBUTING.md")


class Understood(BaseException):
    """The exception raised when a command has accepted its arguments."""


@pytest.fixture
def understand(monkeypatch) -> Callable[[str, Sequence[str]], None]:
    """Return a function that lets a command parse its arguments but not run. If the arguments are
    invalid, the test fails with the command's error message."""

    def parse_only(parser: data_prep.command.PrepParser, arguments: Sequence[str]) -> None:
        data_prep.command.Parser.parse_args(parser, arguments)
        raise Understood

    def read(script: str, arguments: Sequence[str]) -> None:
        assert (ROOT / script).is_file(), script
        if script.startswith("launch/"):
            monkeypatch.syspath_prepend(str(ROOT / "launch"))
            args = runpy.run_path(str(ROOT / script))["read_command_line"](arguments)
            for config in filter(
                None, (getattr(args, "config", None), getattr(args, "finetune", None))
            ):
                if config != "FILE":
                    load_config(ROOT / config, args.overrides)
        elif script.startswith("data_prep/"):
            monkeypatch.setattr(data_prep.command.PrepParser, "parse_args", parse_only)
            with pytest.raises(Understood):
                importlib.import_module(script.removesuffix(".py").replace("/", ".")).main(
                    list(arguments)
                )
        else:
            assert all(
                word in (ROOT / script).read_text() for word in arguments if word.startswith("--")
            )

    return read


@pytest.mark.parametrize("line", SHOWN)
def test_the_real_command_accepts_each_command_of_a_page(line, understand):
    arguments = [
        word
        for word in shlex.split(line)
        if not re.match(r"[A-Z_]+=", word) or word.startswith("RANKS=")
    ]
    launcher = arguments.pop(0)
    if launcher == "make":
        targets = [word for word in arguments if "=" not in word]
        assert all(
            re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M) for target in targets
        )
        return
    if launcher == "bash":
        assert (ROOT / arguments[0]).is_file()
        return
    if launcher in ("torchrun", "sbatch"):  # skip the options of the launcher
        arguments = arguments[
            next(
                (i for i, word in enumerate(arguments) if not word.startswith("--")), len(arguments)
            ) :
        ]
    if launcher == "sbatch" and arguments:
        script = arguments.pop(0)
        assert (ROOT / script).is_file()
        if script == "slurm/prep.sh":
            arguments = ["-m", f"data_prep.{arguments[0]}", *arguments[1:]]
        else:
            arguments = [SCRIPTS[script], *arguments]
            # add the default that the script uses
            if "--config" not in arguments and script == "slurm/train.sh":
                arguments += ["--config", "configs/vit_b16.yaml"]
    if arguments[:2] in (["-m", "venv"], ["-m", "data_prep"]) or not arguments:
        return
    if arguments[0] == "-m":
        arguments[:2] = [arguments[1].replace(".", "/") + ".py"]
        if not arguments[1:]:  # the page only mentions the script
            assert (ROOT / arguments[0]).is_file()
            return
    understand(arguments[0], arguments[1:])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_examples_print_the_output_shown_below_them(page):
    """All examples on a page run from top to bottom in one namespace, as if a reader had pasted
    them into an interpreter. Examples that need data have separate tests."""
    names: dict[str, object] = {}
    shown = re.findall(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", page.read_text(), re.S)
    for code, output in shown:
        if "__main__" not in code and "data/" not in code:
            with redirect_stdout(io.StringIO()) as printed:
                exec(compile(code, page.name, "exec"), names)
            assert printed.getvalue() == output, code


def write_digits(root: Path) -> None:
    """Write shards with scikit-learn's 1,797 digits in white on black. Every fifth digit is a
    validation image."""
    root.mkdir()
    digits = load_digits()
    splits = {}
    for split in ("train", "val"):
        numbers = [n for n in range(len(digits.target)) if (n % 5 == 0) == (split == "val")]
        name = f"{split}-00000.tar"
        with tarfile.open(root / name, "w", format=tarfile.USTAR_FORMAT) as tar:
            for n in numbers:
                image = Image.fromarray(np.uint8(digits.images[n] * 15)).resize(
                    (32, 32), Image.Resampling.BICUBIC
                )
                file = io.BytesIO()
                image.convert("RGB").save(file, "JPEG", quality=95)
                for suffix, content in (
                    ("jpg", file.getvalue()),
                    ("cls", str(digits.target[n]).encode()),
                ):
                    member = tarfile.TarInfo(f"{n:04d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        splits[split] = {
            "name": split,
            "num_samples": len(numbers),
            "filenames": [name],
            "shard_lengths": [len(numbers)],
        }
    (root / "_info.json").write_text(
        json.dumps({"splits": splits, "class_names": [str(digit) for digit in range(10)]})
    )


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.full), 2])
def test_the_loop_of_the_docs_learns(ranks, tmp_path):
    """The code is trained on real digits that are easier to learn than the digits of the demo. Four
    epochs are enough and take a few seconds."""
    (code,) = blocks(ROOT / "docs" / "own_loop.md", "python")
    assert code.count("data/digits") == 2
    write_digits(tmp_path / "data")
    (tmp_path / "loop.py").write_text(code.replace("data/digits", str(tmp_path / "data")))
    done = run(tmp_path / "loop.py", cwd=tmp_path, ranks=ranks)
    assert done.returncode == 0, done.stderr
    *lines, accuracy = done.stdout.splitlines()
    steps = [re.fullmatch(r"step (\d+) of 176: loss ([\d.]+)", line) for line in lines]
    assert [int(match[1]) for match in steps] == [100, 176], (
        "the loop must print a line for each hundred steps, and one at the end"
    )
    assert float(steps[-1][2]) < 1.9 < np.log(10), "the loss must be well below that of chance"
    assert float(re.fullmatch(r"top-1 ([\d.]+) % \(\d+ of 360; .*", accuracy)[1]) > 40


COMMANDS_OF_USERS = sorted(
    path.name for path in (ROOT / "launch").glob("*.py") if path.name != "check_versions.py"
)


@pytest.mark.parametrize("script", COMMANDS_OF_USERS)
def test_a_command_starts_without_imported_project_modules(script):
    code = f"""
import runpy, sys
for name in list(sys.modules):
    if name.partition(".")[0] in ("vit", "data_prep"):
        del sys.modules[name]
sys.path.insert(0, {str(ROOT / "launch")!r})
runpy.run_path({str(ROOT / "launch" / script)!r}, run_name="__main__")
"""
    done = call([warm_python.python(environment()), "-c", code, "--help"])
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=[pytest.mark.full] * (script != "train.py"))
        for script in COMMANDS_OF_USERS
    ],
)
def test_a_command_starts_in_a_new_interpreter(script):
    done = run(f"launch/{script}", "--help", cold=True)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_trains_a_model_of_the_user_by_its_name(shards, tmp_path):
    """docs/own_loop.md promises that models that users register with timm work like timm's own
    models."""

    def own_for_this_test(
        num_classes: int = 1000, in_chans: int = 3, **options: object
    ) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(in_chans * 16 * 16, num_classes)
        )

    timm.models.register_model(own_for_this_test)
    ours = [setting for setting in TINY if not setting.startswith("model.")]
    settings = [
        "model.name=timm/own_for_this_test",
        "model.image_size=16",
        "model.drop_path_rate=null",
        "model.proj_drop_rate=null",
    ]
    config = load_config(
        write_config(tmp_path, shards, steps=6), [*settings, *ours, f"run.dir={tmp_path / 'run'}"]
    )
    assert train(build_run(config, process_group.join_world("cpu"))) == "finished"
    assert metrics(tmp_path / "run", "eval")[-1]["num_images"] == 23


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_targets_of_links_and_pictures_exist(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]+))?\)", page.read_text()):
        to = page.parent / target if target else page
        if not target.startswith("http") and not is_deleted(name_of(to.resolve())):
            assert to.exists(), f"{page.name} points to {target}"
            assert not anchor or anchor in anchors(to), f"{page.name} points to {target}#{anchor}"


def test_the_readme_is_short_and_its_measured_numbers_are_in_results_files():
    prose = re.sub(r"```.*?```", "", README.read_text(), flags=re.S)
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`", "", prose)
    text = re.sub(r"^\|.*$", "", prose, flags=re.M)
    assert len(text.split()) <= 1000
    results = (ROOT / "benchmarks" / "results").glob("*.md")
    measured = set(re.findall(r"[\d.,]*\d", "\n".join(path.read_text() for path in results)))
    numbers = re.findall(r"(?<![\w.])\d+(?:,\d{3})+|(?<![\w.])\d+\.\d+|(?<=\| )\**\d{3}\b", prose)
    assert {number.strip("*") for number in numbers} - {"3.11"} <= measured


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and the documentation site create for the headings of a
    Markdown page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def sections(name: str) -> dict[str, str]:
    parts = re.split(r"^### ", (ROOT / "docs" / name).read_text(), flags=re.M)[1:]
    cut = [part.partition("\n## ")[0].partition("\n") for part in parts]
    texts = {heading: text for heading, _, text in cut}
    assert len(texts) == len(parts), "a heading must appear only once"
    return texts


def test_the_design_page_takes_fifteen_minutes():
    text = (ROOT / "docs" / "design.md").read_text()
    assert len(text.splitlines()) <= 250
    assert len(text.split()) <= 2800


def test_a_design_decision_states_date_reason_cost_and_when_to_reconsider():
    decisions = sections("design.md")
    assert len(decisions) >= 12
    for heading, text in decisions.items():
        assert len(text.split()) <= 120, heading
        assert re.match(r"\s*20\d\d-\d\d-\d\d", text), heading
        assert "in force" in text or "replaced" in text, heading
        for mark in ("**Why:** ", "**Cost:** ", "**What would change it:** "):
            assert text.count(mark) == 1, f"{heading}: {mark}"


def test_a_smaller_decision_has_one_heading_and_at_most_60_words():
    decisions = sections("decisions.md")
    assert len(decisions) > 40
    for heading, text in decisions.items():
        assert 10 <= len(text.split()) <= 60, heading
    assert len((ROOT / "docs" / "decisions.md").read_text().split()) <= 3500


def test_each_page_of_experiments_is_in_the_index_and_each_entry_has_a_date():
    folder = ROOT / "docs" / "experiments"
    index = (folder / "README.md").read_text()
    pages = [page for page in folder.glob("*.md") if page.name != "README.md"]
    assert len(pages) > 10
    for page in pages:
        assert f"]({page.name})" in index, page.name
        headings = re.findall(r"^## (.*)$", page.read_text(), re.M)
        assert headings, page.name
        assert all(re.match(r"20\d\d-\d\d-\d\d ", heading) for heading in headings), page.name


def test_the_map_names_every_folder():
    lines = (ROOT / "docs" / "map.md").read_text().splitlines()
    mapped: set[Path] = set()
    parents: list[str] = []
    for line in lines:
        if match := re.match(r"    ( *)(\w+)/ ", line):
            parents[len(match[1]) // 2 :] = [match[2]]
            mapped.add(ROOT.joinpath(*parents))
    code = [
        path
        for name in ("vit", "data_prep", "launch", "benchmarks")
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".c") and "__pycache__" not in path.parts
    ]
    assert {path.parent for path in code} <= mapped
    assert all(folder.is_dir() or is_deleted(name_of(folder)) for folder in mapped)


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "configs").rglob("*.yaml"))], ids=lambda page: page.name
)
def test_no_placeholder_for_a_number_is_left(page):
    assert not re.search(r"\b[A-Z]+_(TIME|RESULT)\b|\bRESULT\b|\bTODO\b", page.read_text())
