"""Skip tests that need a deleted folder of vit/extras/.

When a folder is deleted, its tests (tests/extras/NAME), commands and pages are deleted as well.
Every other test that uses a folder of vit/extras/ is marked with `needs` or `needs_of`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = {
    "export": ("launch/export.py",),
    "loggers": (),
    "planner": (
        *("launch/bench.py", "launch/plan.py"),
        *("benchmarks/gpu_check", "benchmarks/planner"),
        *("docs/measuring.md", "docs/planning.md", "docs/planner_error.md"),
    ),
    "recipes": ("launch/recipe.py", "docs/recipes.md"),
    "remote_runs": (),
    "report": (
        *("launch/replay.py", "launch/report.py", "launch/samples.py", "launch/visualize.py"),
        "docs/samples.md",
    ),
    "stream": (),
}
"""Maps each folder of vit/extras/ to the commands and pages that are deleted with it."""
DELETED = [name for name in OWN if not (ROOT / "vit" / "extras" / name / "__init__.py").is_file()]
NO_REPORT = ["log.report=false"] if "report" in DELETED else []
"""The setting that turns off the report. Runs need this setting if the report's folder has been
deleted."""


def extra_of(path: str) -> str:
    """Return the folder of vit/extras/ to which `path` belongs, or an empty string."""
    if match := re.match(r"(?:vit|tests)/extras/(\w+)(?:/|$)", path):
        return match[1] if match[1] in OWN else ""
    return next(
        (name for name, own in OWN.items() if any(f"{path}/".startswith(f"{it}/") for it in own)),
        "",
    )


def is_deleted(path: str) -> bool:
    """Return whether `path` belongs to a deleted folder of vit/extras/."""
    return extra_of(path) in DELETED


def needs(*names: str) -> pytest.MarkDecorator:
    """Return a pytest mark for a test that needs the given folders of vit/extras/."""
    assert set(names) <= set(OWN), names
    deleted = [f"vit/extras/{name}" for name in names if name in DELETED]
    return pytest.mark.skipif(bool(deleted), reason=f"needs {', '.join(deleted)}, now deleted")


def needs_of(text: str) -> pytest.MarkDecorator:
    """Return a pytest mark for a test that needs the extras whose files are named in `text`."""
    paths = re.findall(r"\b(?:launch|benchmarks|docs|vit|tests)/[\w/.]*\w", text)
    return needs(*{name for path in paths if (name := extra_of(path))})
