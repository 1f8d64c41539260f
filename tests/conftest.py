"""Shards that many tests read and none changes."""

from pathlib import Path

import pytest
from processes import make_shards, write_config


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 training and 23 validation images of 3 classes in 3 shards."""
    return make_shards(tmp_path_factory.mktemp("data"))


@pytest.fixture
def config(tmp_path: Path, shards: Path) -> Path:
    """Twelve steps of twelve images on `shards`."""
    return write_config(tmp_path, shards)


LONGEST = ("test_train.py", "test_errors.py", "test_readme.py", "test_model.py", "test_writer.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take minutes come first: dealt over processes file by file, none of them is left for the end, when the others idle."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
