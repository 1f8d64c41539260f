"""Imports go down the layers only; what must be free of torch is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    {
        "vit.config",
        "vit.config_io",
        "vit.command_line",
        "vit.distributed",
        "vit.exit",
        "vit.devices",
        "vit.progress",
        "vit.worker",
        "vit.host",
    }
    | {
        "vit.data.files",
        "vit.data.urls",
        "vit.data.row_filter",
        "vit.sections",
        "vit.data.patience",
        "vit.data.jpeg",
        "vit.data.members",
        "vit.data.records",
        "vit.data.native",
        "vit.data.tar_walk",
    }
    | {"vit.data.stages"},
    {"vit.data.images"}
    | {
        "vit.data.tar",
        "vit.data.index_file",
        "vit.data.split",
        "vit.data.select",
        "vit.data.sources",
        "vit.data.shards",
        "vit.data.warm",
        "vit.data.order",
        "vit.data.mixing",
        "vit.data.window",
        "vit.data.decode",
        "vit.schedule",
    }
    | {"vit.data.warm"}
    | {"vit.data.draw", "vit.data.block_cache", "vit.data.http", "vit.data.store", "vit.data.remote", "vit.data.storage"},
    {"vit.data.batches", "vit.data.stream", "vit.data.slots", "vit.data.workers", "vit.data.augment", "vit.data.op_sets", "vit.data.ops"}
    | {"vit.data.crew", "vit.model", "vit.loss", "vit.optim", "vit.ema", "vit.metrics"},
    {"vit.step", "vit.evaluate", "vit.checkpoint", "vit.weights", "vit.known", "vit.plan", "vit.record", "vit.tracking", "vit.monitor"}
    | {"vit.order_check"}
    | {"vit.resume", "vit.preflight", "vit.history", "vit.visualize", "vit.contact_sheet", "vit.curves", "vit.pictures", "vit.report"},
    {"vit.train"},
    {"launch.check_versions", "launch.train", "launch.eval", "launch.report", "launch.visualize"},
]
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}


def modules(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if path.name != "__init__.py"]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports_of(path: Path) -> set[str]:
    """Dotted names of our own modules that `path` imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name in LEVEL or name.startswith("data_prep.")}


@pytest.mark.parametrize("path", [*modules("vit"), *modules("launch")], ids=name_of)
def test_imports_go_down_and_never_in_a_circle(path):
    name = name_of(path)
    assert name in LEVEL, f"{name} has no layer: give it one here and in docs/design.md"
    for imported in imports_of(path):
        assert LEVEL[imported] <= LEVEL[name], f"{name} (layer {LEVEL[name]}) imports {imported} (layer {LEVEL[imported]})"
        if LEVEL[imported] == LEVEL[name]:
            assert name not in imports_of(ROOT / (imported.replace(".", "/") + ".py")), f"{name} and {imported} import each other"


@pytest.mark.parametrize("path", modules("data_prep"), ids=name_of)
def test_data_prep_knows_the_format_and_itself_only(path):
    assert {name for name in imports_of(path) if name.startswith("vit.")} <= {
        "vit.data.files",
        "vit.data.images",
        "vit.data.index_file",
        "vit.data.http",
        "vit.data.jpeg",
        "vit.data.members",
        "vit.data.records",
        "vit.data.native",
        "vit.data.patience",
        "vit.data.store",
        "vit.data.tar",
        "vit.data.tar_walk",
        "vit.data.shards",
        "vit.data.warm",
        "vit.data.remote",
        "vit.data.split",
        "vit.data.urls",
        "vit.command_line",
        "vit.progress",
        "vit.worker",
    }


@pytest.mark.parametrize(
    "name",
    [
        "vit.data.images",
        "vit.data.jpeg",
        "vit.data.members",
        "vit.data.records",
        "vit.data.native",
        "vit.data.tar",
        "vit.data.shards",
        "vit.data.warm",
        "vit.data.split",
        "vit.data.urls",
        "vit.data.window",
        "vit.data.order",
        "vit.data.mixing",
        "vit.data.draw",
        "vit.schedule",
        "vit.command_line",
        "vit.progress",
        "vit.host",
        "data_prep.images",
        "data_prep.animals10",
        "data_prep.card",
        "data_prep.cifar",
        "data_prep.imagefolder",
        "data_prep.imagenet",
        "data_prep.mnist",
        "data_prep.verify",
        "data_prep.digits",
        "data_prep.index",
    ],
)
def test_works_where_torch_is_not_installed(name):
    code = f"import sys; sys.modules['torch'] = None; import {name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_the_packages_import_nothing_by_themselves():
    for package in ("vit", "vit/data"):
        assert not ast.parse((ROOT / package / "__init__.py").read_text()).body
