from __future__ import annotations

import functools
from pathlib import Path

import pytest
import yaml

from vit.extras.recipes.importing import Imported, import_recipe

HERE = Path(__file__).parent
PUBLISHED = yaml.safe_load((HERE / "published.yaml").read_text())


@functools.cache
def _import(name: str) -> Imported:
    entry = PUBLISHED[name]
    return import_recipe(entry.get("command") or entry["file"])


@pytest.fixture
def imported(monkeypatch):
    """Import published recipes by name. Each recipe is imported only once."""
    monkeypatch.chdir(HERE)
    return _import
