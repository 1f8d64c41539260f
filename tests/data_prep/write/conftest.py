from pathlib import Path

import pytest
from small_shards import FOUR, small_splits, source_of

from data_prep.write.catalog import Source
from data_prep.write.writer import write


@pytest.fixture
def small(tmp_path) -> Source:
    return source_of(tmp_path / "source", small_splits())


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write(source_of(folder / "source", small_splits()), folder / "root", FOUR)
    return folder / "root"
