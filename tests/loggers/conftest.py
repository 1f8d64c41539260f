"""W&B's server, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loggers.wandb_runs import Server, use_server


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    server = Server()
    use_server(monkeypatch, server.url)
    yield server
    server.leave()
