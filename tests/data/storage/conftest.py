from __future__ import annotations

from pathlib import Path

import pytest
from remote_shards import epoch, files_of
from servers import S3Server, WebServer


@pytest.fixture
def web(shards):
    with WebServer(files_of(shards)) as server:
        yield server


@pytest.fixture(scope="module")
def s3():
    with S3Server() as server:
        yield server


@pytest.fixture
def url(web) -> str:
    return f"{web.url}/set"


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def local_epoch(shards):
    return epoch(shards, None)
