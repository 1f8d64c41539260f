"""Test facts in the documentation: Python calls must match the signatures in the code, and counts
must be correct."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from extras.deleted_extras import needs_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
ELSEWHERE = {
    *("AutoAugment", "HuggingFaceStorageWriter", "KNeighborsClassifier", "LogisticRegression"),
    *("fn.readers.webdataset", "wandb.login", "webdataset.WebDataset"),
}
"""Calls to functions of other programs, which the documentation mentions for comparison."""


def calls_of(text: str) -> list[str]:
    """Return all calls that have a keyword argument and appear in backticks in a page's prose."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    spans = re.findall(r"(?<!`)`([A-Za-z_][\w.]*\([^`\n]*)`(?!`)", prose)
    return [span for span in spans if re.search(r"[(,]\s*\w+=[^=]", span)]


@functools.cache
def places_of_names() -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for path in sorted([*(ROOT / "vit").rglob("*.py"), *(ROOT / "data_prep").rglob("*.py")]):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_":
                places.setdefault(node.name, []).append(module)
    return places


def meanings_of(name: str, places: dict[str, list[str]]) -> list[Any]:
    """Return the objects to which `name` may refer. If the name does not include a module, the
    function searches `places`."""
    prefix, _, last = name.rpartition(".")
    if prefix:
        try:
            return [getattr(importlib.import_module(prefix), last)]
        except (ImportError, AttributeError):
            return []
    return [getattr(importlib.import_module(place), last) for place in places.get(last, [])]


def problem_of(call: str, places: dict[str, list[str]]) -> str:
    """Return the reason why a call does not match the signature of its function, or "" if it
    matches."""
    name = call.partition("(")[0]
    if name in ELSEWHERE:
        return ""
    if not (meanings := meanings_of(name, places)):
        return f"{call}: unknown {name}"
    node = ast.parse(call, mode="eval").body
    while not (isinstance(node, ast.Call) and ast.unparse(node.func) == name):
        node = node.func if isinstance(node, ast.Call) else node.value  # type: ignore[attr-defined]
    positional = [
        arg for arg in node.args if not isinstance(arg, ast.Constant) or arg.value is not ...
    ]
    keywords = {str(keyword.arg): keyword.value for keyword in node.keywords}
    reasons = []
    for meaning in meanings:
        try:
            inspect.signature(meaning).bind_partial(*positional, **keywords)
        except TypeError as error:
            reasons.append(f"{call}: {error}")
    return "; ".join(reasons) if len(reasons) == len(meanings) else ""


def test_calls_within_sentences_fit_the_real_signatures():
    places = places_of_names()
    calls = [(page.name, call) for page in PAGES for call in calls_of(page.read_text())]
    assert ("own_loop.md", "create_loader(..., start=step)") in calls
    problems = [f"{page}: {reason}" for page, call in calls if (reason := problem_of(call, places))]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("TrainBatches(..., rank=r, world_size=n)", "unexpected keyword argument 'rank'"),
        ("vit.load(path, nam='x')", "unexpected keyword argument 'nam'"),
        ("Loaders(batches, start=0)", "unknown Loaders"),
        ("vit.loads(path, start=0)", "unknown vit.loads"),
        ("TrainBatches(..., rows=range(8))", ""),
        ("vit.load(path, device=device).classify(image, top=3)", ""),
    ],
)
def test_reports_a_call_that_does_not_fit_its_signature(call, reason):
    problem = problem_of(call, places_of_names())
    assert (reason in problem) if reason else not problem


# --- counts ---------------------------------------------------------------------------------------

NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
]


def lines_of(*patterns: str) -> int:
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return sum(len(path.read_text().splitlines()) for path in paths)


def limit(name: str) -> int:
    text = (ROOT / "tests" / "project" / "test_sizes.py").read_text()
    return int(re.search(rf"^{name} = (\d+)$", text, re.M)[1])


def published_commands() -> int:
    return len(
        yaml.safe_load((ROOT / "tests" / "extras" / "recipes" / "published.yaml").read_text())
    )


def recipes_with_a_curve() -> int:
    recipes = (ROOT / "configs").rglob("*.yaml")
    return sum(bool(re.search(r"^ +reference: \w", path.read_text(), re.M)) for path in recipes)


COUNTS: list[tuple[str, str, Callable[[], int], float]] = [
    ("design.md", r"decoder is ([\d,]+) lines of our own C", lambda: lines_of(C_FILES), 0.05),
    (
        "style.md",
        r"A function has at most (\d+) statements",
        lambda: limit("FUNCTION_STATEMENTS"),
        0,
    ),
    ("style.md", r"a folder (\d+) files", lambda: limit("FOLDER_FILES"), 0),
    (
        "recipes.md",
        r"`tests/extras/recipes/published.yaml` has (\d+) published",
        published_commands,
        0,
    ),
    ("recipes.md", r"(\w+) recipes come with a \[curve", recipes_with_a_curve, 0),
]
"""Each row contains a page, a sentence, the objects to count, and the relative tolerance if the
sentence contains a rounded number."""
C_FILES = "vit/data/decode/c/*.[ch]"


@pytest.mark.parametrize(
    ("page", "sentence", "count", "rounding"),
    [pytest.param(*row, id=row[1], marks=needs_of(f"docs/{row[0]}")) for row in COUNTS],
)
def test_each_count_on_a_page_is_correct(page, sentence, count, rounding):
    [path] = [path for path in PAGES if path.name == page]
    [word] = re.findall(sentence, path.read_text())
    number_word = word.replace(",", "").lower()
    number = NUMBERS.index(number_word) if number_word in NUMBERS else int(number_word)
    assert number == pytest.approx(count(), rel=rounding, abs=0), f"{page}: {sentence}"


def test_each_picture_of_the_docs_is_made_by_the_script_and_is_small(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    pictures = importlib.import_module("pictures")
    files = {path.name: path for path in (ROOT / "docs" / "images").glob("*.png")}
    assert files.keys() == pictures.makers().keys()
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name, path in files.items():
        assert f"images/{name})" in texts, f"no page shows {name}"
        assert path.stat().st_size <= 400_000, name
