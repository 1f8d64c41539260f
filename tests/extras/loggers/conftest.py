"""Provide fixtures for a W&B server and for an environment without a W&B account."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from extras.loggers.wandb_runs import Server, use_server


@pytest.fixture(autouse=True)
def no_account(tmp_path_factory, monkeypatch):
    """Hide the W&B key, proxy and settings of the person who runs the tests."""
    for name in os.environ:
        if name.startswith("WANDB_") or name.lower().endswith("_proxy") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def server(no_account, monkeypatch) -> Iterator[Server]:
    server = Server()
    use_server(monkeypatch, server.url)
    yield server
    server.leave()
