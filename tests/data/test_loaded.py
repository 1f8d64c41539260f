"""Test that a process imports only what its kind of data needs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from vit.system.optional import needed_for

ROOT = Path(__file__).parents[2]


def loaded(shards: Path, cache_dir: Path | None) -> set[str]:
    """Open and read a split as training does. Return the names of the imported modules."""
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


def test_shards_in_a_folder_need_no_client_of_a_server_and_no_stream(shards, tmp_path):
    for cache_dir in (None, tmp_path / "cache"):
        names = loaded(shards, cache_dir)
        assert "vit.data.shards.local_tars" in names
        assert not names & {"urllib3", "obstore", "webdataset", "vit.extras"}


def test_a_folder_that_is_not_installed_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"^stream.urls needs vit/extras/x, which is not"):
        with needed_for("stream.urls"):
            importlib.import_module("vit.extras.x.batches")
    (tmp_path / "needs_more.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        with needed_for("stream.urls"):
            importlib.import_module("needs_more")
