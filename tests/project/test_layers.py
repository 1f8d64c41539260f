"""Test that each package imports only from packages in lower layers, and that no file imports too
many modules."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import NamedTuple

import pytest
from extras.deleted_extras import is_deleted

from vit.compose import FEATURES, Extra
from vit.config.schema import Config
from vit.feature import Parts

ROOT = Path(__file__).parents[2]
ROOMS = (
    "vit.system",
    "vit.config",
    "vit.layers",
    "vit.model",
    "vit.distributed",
    "vit.data.stages",
    "vit.data.decode",
    "vit.data.shards",
    "vit.data.storage",
    "vit.data.augment",
    "vit.data",
    "data_prep",
    "vit.optim",
    "vit.checkpoint.seal",
    "vit.run_folder",
    "vit.weights",
    "vit.training",
    "vit.step",
    "vit.evaluation",
    "vit.loggers",
    "vit.checkpoint",
    "vit.run",
    "vit.feature",
    "vit.hooks",
    "vit.start",
    "vit.build",
    "vit.monitor",
    "vit.validate",
    "vit.train",
    "vit.compose",
    "vit.inference",
    "vit.finetune",
    "vit.extras.stream",
    "vit.extras.remote_runs",
    "vit.extras.export",
    "vit.extras.loggers",
    "vit.extras.planner",
    "vit.extras.report",
    "vit.extras.recipes",
    "vit",
    "launch",
)
"""The packages from the lowest layer to the highest. A module is part of the package with the
longest name that is a prefix of the module's name."""
LATE = {
    ("vit.compose", "vit.hooks.exact_over_ranks"): "a feature that few runs have",
    ("vit.compose", "vit.start.initial_weights"): "the same",
    ("vit.compose", "vit.training.teacher"): "the same",
    ("vit.data.storage.opening", "vit.data.storage.block_cache"): "a folder needs no cache",
    ("vit.data.storage.opening", "vit.data.storage.cached_tars"): "the same",
    ("vit.data.storage.opening", "vit.data.storage.remote"): "a folder needs no server",
    ("vit.start.create_step", "vit.training.norm_probes"): "few runs measure norms",
    ("vit.weights.files", "vit.run_folder.reading"): "few weights are at a URL",
    ("vit.model", "vit.layers.timm_model"): "few models need timm, which takes seconds",
    ("vit.optim.optimizer", "vit.optim.lamb"): "its base class is timm's, and timm takes seconds",
}
"""Maps (module, imported module) to the reason why the module imports it inside a function."""
MOST_IMPORTS = 20
MOST_STRINGS = 15
"""The largest number of modules that `vit.compose` names in strings."""
MOST_FILES = 12
MOST_FOLDERS = 16
NEEDS_TORCH = (
    "vit.data.decode.crops",
    "vit.data.batches",
    "vit.data.create_loader",
    "vit.data.eval_sets",
    "vit.data.loader",
    "vit.data.open_data",
    "vit.data.slots",
    "vit.data.to_gpu",
    "vit.data.worker_pool",
    "vit.data.augment.apply",
    "vit.data.augment.dialects",
    "vit.data.augment.kinds",
    "vit.data.augment.pixel_ops",
    "vit.data.augment.rounds",
)
"""The modules of vit.system, vit.data and data_prep that require torch. The other modules of these
packages work without torch."""


class Arrow(NamedTuple):
    target: str
    line: int
    is_late: bool


@functools.cache
def modules() -> dict[str, tuple[Arrow, ...]]:
    """Map each module of the project to its imports of other project modules. Type-only imports and
    imports inside functions are included."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for folder in ("vit", "data_prep", "launch")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "__init__.py"
    }
    return {name: tuple(arrows(ast.parse(path.read_text()), paths)) for name, path in paths.items()}


def arrows(tree: ast.Module, paths: dict[str, Path]) -> list[Arrow]:
    imports = []
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, functions)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in paths else node.module for name in names]
        imports += [
            Arrow(name, node.lineno, id(node) in late)
            for name in dict.fromkeys(names)
            if name in paths
        ]
    return imports


def room_of(module: str) -> str:
    return max((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), key=len)


def is_extra(room: str) -> bool:
    return room.startswith("vit.extras.")


def shown(module: str, arrow: Arrow) -> str:
    return f"{module.replace('.', '/')}.py:{arrow.line} imports {arrow.target}"


def violations(rule) -> str:
    """Return one line for each import that breaks a rule. `rule(module, arrow)` returns the reason,
    or an empty string if the import is allowed."""
    lines = [
        f"{shown(module, arrow)}: {text}"
        for module, all_arrows in modules().items()
        for arrow in all_arrows
        if (text := rule(module, arrow))
    ]
    return "\n".join(lines)


def test_every_module_is_in_a_listed_package():
    lost = [
        module for module in modules() if not any(f"{module}.".startswith(f"{r}.") for r in ROOMS)
    ]
    assert not lost
    in_use = {room_of(module) for module in modules()}
    in_use |= {room for room in ROOMS if is_deleted(room.replace(".", "/"))}
    assert not set(ROOMS) - in_use, "a package has no modules: remove the package from the list"


def test_packages_import_only_packages_below_them():
    def rule(module, arrow):
        own, target = room_of(module), room_of(arrow.target)
        if is_extra(own) and is_extra(target):
            return ""  # the next test checks such imports
        return f"{target} is above {own}" if ROOMS.index(target) > ROOMS.index(own) else ""

    upward = violations(rule)
    assert not upward, (
        f"a package may import only packages below it (ROOMS in {__file__}):\n{upward}"
    )


def test_extras_import_the_core_and_not_each_other():
    def rule(module, arrow):
        own, target = room_of(module), room_of(arrow.target)
        is_other = is_extra(own) and is_extra(target) and own != target
        return "an extra must work without the others" if is_other else ""

    between = violations(rule)
    assert not between, f"move the shared code into the core:\n{between}"


def test_files_do_not_import_each_other_in_a_cycle():
    graph = {name: {arrow.target for arrow in imports} for name, imports in modules().items()}
    # The types in a settings class and in its checks may refer to each other.
    graph = {
        name: {t for t in imports if t != name} for name, imports in without_types(graph).items()
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())


def without_types(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return `graph` without type-only imports. The files of a package may import each other for
    type annotations."""
    graph_at_run_time = {}
    for name in graph:
        tree = ast.parse((ROOT / f"{name.replace('.', '/')}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        targets = {arrow.target for arrow in arrows(tree, dict.fromkeys(graph, ROOT))}
        graph_at_run_time[name] = targets
    return graph_at_run_time


def test_imports_are_at_the_top():
    used = set()

    def rule(module, arrow):
        if not arrow.is_late or room_of(module) == "launch":
            return ""
        used.add((module, arrow.target))
        return "" if (module, arrow.target) in LATE else "in a function"

    late = violations(rule)
    assert not late, f"functions may import only third-party packages:\n{late}"
    assert used == set(LATE), "an exception is no longer needed: remove it from the list"


def test_no_file_imports_too_many():
    numbers = {
        name: len({arrow.target for arrow in imports}) for name, imports in modules().items()
    }
    many = [f"{name}: {number}" for name, number in numbers.items() if number > MOST_IMPORTS]
    assert not many, (
        f"split files that import more than {MOST_IMPORTS} project modules by role:\n"
        + "\n".join(many)
    )


def test_no_two_classes_have_one_name():
    """A reader who searches for a class name must find only one class."""
    places: dict[str, list[str]] = {}
    for module in modules():
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_only_one_file_names_modules_in_strings():
    """No reader, type checker or other test in this file sees the import of a module that is named
    in a string."""
    names = {
        f"{module}: {node.value}"
        for module in modules()
        for node in ast.walk(ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.partition(":")[0] in modules()
    }
    # `vit` imports its eight public functions on first use.
    elsewhere = {name for name in names if not name.startswith("vit.compose: ")}
    assert not elsewhere, elsewhere
    assert len(names) <= MOST_STRINGS, names


def test_every_module_that_a_test_may_skip_exists():
    """A test that is skipped if a module is missing would always be skipped after the module is
    moved."""
    named = {
        name
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in re.findall(r'importorskip\(\s*"(vit[.\w]+)"', path.read_text())
    }
    gone = {name for name in named if not any(f"{m}.".startswith(f"{name}.") for m in modules())}
    assert not {name for name in gone if not is_deleted(name.replace(".", "/"))}


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: str(feature.order))
def test_a_feature_has_a_place_in_the_order_and_typed_parts(feature):
    assert [each.order for each in FEATURES].count(feature.order) == 1
    if isinstance(feature, Extra) and not is_deleted(feature.module.replace(".", "/")):
        module = importlib.import_module(feature.module)
        assert typing.get_type_hints(module.parts) == {"config": Config, "return": Parts}


def test_every_import_in_a_shell_script_exists():
    """Batch scripts contain lines of Python that neither mypy nor ruff checks."""
    imports = [
        (path, match[1], name.strip())
        for folder in ("slurm", "deploy", "launch")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and path.suffix != ".py" and path.suffix != ".pyc"
        for match in re.finditer(
            r"from ((?:vit|data_prep)[.\w]*) import ([\w, ]+)", path.read_text()
        )
        for name in match[2].split(",")
    ]
    assert imports, "slurm/train.sh must contain imports for this test"
    code = "import importlib\n" + "".join(
        f"getattr(importlib.import_module({module!r}), {name!r}, None) or"
        f" importlib.import_module({f'{module}.{name}'!r})\n"
        for _, module, name in imports
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_list_of_modules_matches_the_map():
    files = sorted(path.name for path in (ROOT / "vit").glob("*.py"))
    folders = sorted(path.parent.name for path in (ROOT / "vit").glob("*/__init__.py"))
    assert len(files) <= MOST_FILES, files
    assert len(folders) <= MOST_FOLDERS, folders


def test_works_without_torch():
    rooms = ("vit.system", "vit.data", "data_prep")
    names = [name for name in modules() if room_of(name).startswith(rooms)]
    free = [name for name in names if name not in NEEDS_TORCH and not name.endswith("__main__")]
    code = f"import sys; sys.modules['torch'] = None\nfor name in {free}: __import__(name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert set(NEEDS_TORCH) <= set(names), "a listed module no longer exists"


PACKAGES = sorted((ROOT / "vit").rglob("__init__.py"))


@pytest.mark.parametrize(
    "path", PACKAGES, ids=lambda path: ".".join(path.relative_to(ROOT).parent.parts)
)
def test_importing_a_package_imports_no_module(path):
    body = ast.parse(path.read_text()).body
    if path.parent.name == "vit":  # `vit.load` imports its modules on demand
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
    assert all(isinstance(node, ast.Expr) for node in body), "only a docstring is allowed"
