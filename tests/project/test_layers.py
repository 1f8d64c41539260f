"""Imports go down: no circle of any length, and each room knows only what is below it."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = (
    *("vit.exact", "vit.layers", "vit.optim", "vit.data", "vit.config", "vit.ranks"),
    "vit.system",
)
BELOW = {
    "vit.system": (),
    "vit.config": ("vit.data.row_filter", "vit.data.shards", "vit.system"),
    "vit.ranks": ("vit.system",),
    "vit.data": ("vit.system", "vit.config", "vit.ranks"),
    "vit.optim": ("vit.config",),
    "vit.layers": (),
    "vit.exact": ("vit.data.hashing", "vit.layers", "vit.ranks", "vit.system"),
    "vit.features": ("vit!", *ENGINE),
    "vit.run_store": (
        *("vit.run.folder", "vit.run.checkpoint_info"),
        *("vit.data.storage", "vit.data.shards", "vit.config", "vit.ranks", "vit.system"),
    ),
    "vit.weights": (
        *("vit!", "vit.layers", "vit.run.folder", "vit.run.checkpoint_info", "vit.run_store"),
        *("vit.config", "vit.system"),
    ),
    "vit.views": (),
    "vit.run": ("vit!", "vit.run_store", "vit.views", "vit.weights", *ENGINE),
    "vit.report": ("vit!", "vit.predict", "vit.features", "vit.run", "vit.weights", *ENGINE),
    "vit.recipes": ("vit!", "vit.report", "vit.run", *ENGINE),
    "vit.predict": ("vit!", "vit.data", "vit.config", "vit.system"),
    "vit": ("vit.run", "vit.run_store", "vit.weights", "vit.features", *ENGINE),
    "vit.estimate": (
        "vit.exact",
        *("vit!", "vit.optim", "vit.run", "vit.data", "vit.config", "vit.ranks", "vit.system"),
        "vit.weights.teacher",
    ),
    "vit.check": (
        *("vit!", "vit.measure", "vit.estimate", "vit.run", "vit.data", "vit.config", "vit.ranks"),
        *("vit.layers", "vit.run_store", "vit.system", "vit.views", "vit.weights"),
    ),
    "vit.measure": (
        *("vit!", "vit.estimate", "vit.optim", "vit.run", "vit.data", "vit.config", "vit.ranks"),
        *("vit.system", "vit.weights.teacher"),
    ),
    "vit.extras": ("vit.data", "vit.config", "vit.ranks", "vit.system"),
    "data_prep": ("vit.data.shards", "vit.data.storage", "vit.data.decode", "vit.system"),
    "launch": ("vit",),
}
"""What each room may import besides itself: modules, and rooms with all in them (`vit!`: the files
of vit/ itself). The longest name that fits counts."""
ENDS = ("vit.train", "vit.finetune")
"""Everything comes together here, so only launch/ and one another may import them; they alone may
import vit.report, vit.recipes and vit.estimate."""
NEEDS_TORCH = (
    "vit.system.device_memory",
    "vit.system.devices",
    "vit.data.decode.views",
    "vit.data.batches",
    "vit.data.loader",
    "vit.data.slots",
    "vit.data.to_gpu",
    "vit.data.worker_pool",
    "vit.data.augment.apply",
    "vit.data.augment.dialects",
    "vit.data.augment.kinds",
    "vit.data.augment.pixel_ops",
    "vit.data.augment.rounds",
)
"""Of vit.system, vit.data and data_prep; the rest works where torch is not installed."""


@functools.cache
def modules() -> dict[str, set[str]]:
    """Each module of ours with those that it imports, anywhere in it but for types."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for folder in ("vit", "data_prep", "launch")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "__init__.py"
    }
    found = {}
    for name, path in paths.items():
        imported: set[str] = set()
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        found[name] = imported & paths.keys()
    return found


def room_of(module: str) -> str:
    return max((room for room in BELOW if module.startswith(f"{room}.")), key=len)


def is_in(module: str, place: str) -> bool:
    """Whether `module` is `place`, or in it; `vit!` has the files of vit/ itself."""
    if place.endswith("!"):
        return module.rpartition(".")[0] == place[:-1]
    return module == place or module.startswith(f"{place}.")


def test_no_circle_of_imports():
    tuple(graphlib.TopologicalSorter(modules()).static_order())


@pytest.mark.parametrize("name", modules())
def test_imports_go_down(name):
    room = room_of(name)
    for imported in modules()[name]:
        assert (
            room == room_of(imported)
            or any(is_in(imported, place) for place in BELOW[room])
            or (
                name in ENDS
                and imported.startswith(("vit.report.", "vit.recipes.", "vit.estimate."))
            )
        ), f"{name} must not import {imported}: {room} knows {BELOW[room]} and itself"
        assert imported not in ENDS or name in ENDS or room == "launch", (
            f"{name} imports {imported}"
        )


def test_works_where_torch_is_not_installed():
    names = [
        name
        for name in modules()
        if is_in(name, "vit.system") or is_in(name, "vit.data") or is_in(name, "data_prep")
    ]
    free = [name for name in names if name not in NEEDS_TORCH and not name.endswith("__main__")]
    code = f"import sys; sys.modules['torch'] = None\nfor name in {free}: __import__(name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert set(NEEDS_TORCH) <= set(names), "no longer there"


PACKAGES = sorted((ROOT / "vit").rglob("__init__.py"))


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.parent.name)
def test_packages_import_nothing_by_themselves(path):
    body = ast.parse(path.read_text()).body
    if path.parent.name == "vit":  # `vit.load` imports when it is asked for
        assert ast.unparse(body[1]) == "from __future__ import annotations"
        code = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
import vit
loaded = [name for name in sys.modules if name.startswith("vit.")]
assert "load" in vit.__all__ and not loaded, loaded
"""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        return
    assert all(isinstance(node, ast.Expr) for node in body), "a docstring only"
