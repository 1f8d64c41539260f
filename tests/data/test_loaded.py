"""Test that a process imports only the modules of vit/data that its kind of data needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vit.system.by_name import load

ROOT = Path(__file__).parents[2]


def loaded(shards: Path, cache_dir: Path | None) -> set[str]:
    """Open and read a split as training does. Return the names of the imported project modules."""
    code = f"""
import sys
from vit.config.schema import Config
from vit.data.open_data import open_split
loader = dict(cache_dir={cache_dir and str(cache_dir)!r})
config = Config(data=dict(root={str(shards)!r}), loader=loader, train=dict(steps=1))
split = open_split(config, "train")
split.prepare(1)
split.read(0)
print("\\n".join(name for name in sys.modules if name.startswith("vit.")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_shards_in_a_folder_need_neither_servers_nor_a_cache_nor_streams(shards, tmp_path):
    in_place = loaded(shards, None)
    assert "vit.data.shards.local_tars" in in_place
    assert not {n for n in in_place if n.startswith(("vit.data.storage", "vit.extras"))}
    assert loaded(shards, tmp_path / "cache") - in_place == {
        "vit.data.storage",
        "vit.data.storage.block_cache",
        "vit.data.storage.cached_tars",
        "vit.data.storage.file_lock",
    }


def test_a_folder_that_is_not_installed_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"^stream.urls needs vit/extras/x, which is not"):
        load("vit.extras.x.batches:open", "stream.urls")
    (tmp_path / "needs_more.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load("needs_more", "stream.urls")
