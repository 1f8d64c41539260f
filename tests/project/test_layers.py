"""Imports go down the layers only; what must be free of torch is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = [
    {
        "vit.config",
        "vit.config_io",
        "vit.system.command_line",
        "vit.distributed",
        "vit.exit",
        "vit.system.devices",
        "vit.system.meter",
        "vit.system.child_process",
        "vit.system.host",
    }
    | {
        "vit.system.files",
        "vit.system.spelling",
        "vit.system.urls",
        "vit.data.row_filter",
        "vit.sections",
        "vit.data.storage.retry",
        "vit.data.decode.jpeg_header",
        "vit.data.shards.members",
        "vit.data.shards.records",
        "vit.data.decode.native",
        "vit.data.shards.tar_walk",
    }
    | {"vit.data.stages"},
    {"vit.data.decode.images"}
    | {
        "vit.data.shards.tar",
        "vit.data.shards.index_file",
        "vit.data.shards.split",
        "vit.data.select",
        "vit.data.sources",
        "vit.data.shards.data_set",
        "vit.data.warm",
        "vit.data.order",
        "vit.data.shuffle_quality",
        "vit.data.decode.jpeg_cut",
        "vit.data.decode.views",
        "vit.schedule",
    }
    | {"vit.data.warm"}
    | {
        "vit.data.augment.draw",
        "vit.data.storage.block_cache",
        "vit.data.storage.http",
        "vit.data.storage.object_store",
        "vit.data.storage.remote",
        "vit.data.storage.tars",
    },
    {
        "vit.data.batches",
        "vit.data.stream",
        "vit.data.slots",
        "vit.data.loader",
        "vit.data.augment.apply",
        "vit.data.augment.dialects",
        "vit.data.augment.pixel_ops",
    }
    | {
        "vit.data.worker_pool",
        "vit.timm_model",
        "vit.posemb",
        "vit.model",
        "vit.model_summary",
        "vit.loss",
        "vit.optim",
        "vit.ema",
        "vit.metrics",
    },
    {
        "vit.step",
        "vit.evaluate",
        "vit.run.checkpoint",
        "vit.weights",
        "vit.published",
        "vit.plan",
        "vit.run.record",
        "vit.run.wandb_process",
        "vit.run.monitor",
    }
    | {"vit.run.order_check", "vit.open_data", "vit.precision", "vit.run.folder"}
    | {
        "vit.run.resume",
        "vit.run.preflight",
        "vit.report.history",
        "vit.report.plots",
        "vit.report.figures",
        "vit.report.attention",
        "vit.report.confusion",
        "vit.report.source",
        "vit.report.facts",
        "vit.report.contact_sheet",
        "vit.report.curves",
        "vit.report.pictures",
        "vit.report.page",
    },
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
        assert LEVEL[imported] <= LEVEL[name], (
            f"{name} (layer {LEVEL[name]}) imports {imported} (layer {LEVEL[imported]})"
        )
        if LEVEL[imported] == LEVEL[name]:
            assert name not in imports_of(ROOT / (imported.replace(".", "/") + ".py")), (
                f"{name} and {imported} import each other"
            )


@pytest.mark.parametrize("path", modules("data_prep"), ids=name_of)
def test_data_prep_knows_the_format_and_itself_only(path):
    assert {name for name in imports_of(path) if name.startswith("vit.")} <= {
        "vit.system.files",
        "vit.data.decode.images",
        "vit.data.shards.index_file",
        "vit.data.storage.http",
        "vit.data.decode.jpeg_header",
        "vit.data.shards.members",
        "vit.data.shards.records",
        "vit.data.decode.native",
        "vit.data.storage.retry",
        "vit.data.storage.object_store",
        "vit.data.shards.tar",
        "vit.data.shards.tar_walk",
        "vit.data.shards.data_set",
        "vit.data.warm",
        "vit.data.storage.remote",
        "vit.data.shards.split",
        "vit.system.urls",
        "vit.system.command_line",
        "vit.system.meter",
        "vit.system.child_process",
        "vit.system.host",
    }


@pytest.mark.parametrize(
    "name",
    [
        "vit.data.decode.images",
        "vit.data.decode.jpeg_header",
        "vit.data.shards.members",
        "vit.data.shards.records",
        "vit.data.decode.native",
        "vit.data.shards.tar",
        "vit.data.shards.data_set",
        "vit.data.warm",
        "vit.data.shards.split",
        "vit.system.urls",
        "vit.data.decode.jpeg_cut",
        "vit.data.order",
        "vit.data.shuffle_quality",
        "vit.data.augment.draw",
        "vit.schedule",
        "vit.system.command_line",
        "vit.system.meter",
        "vit.system.host",
        "data_prep.write.images",
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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_packages_import_nothing_by_themselves():
    for package in ("vit", "vit/data"):
        source = (ROOT / package / "__init__.py").read_text()
        assert all(isinstance(node, ast.Expr) for node in ast.parse(source).body), (
            "a docstring only"
        )
