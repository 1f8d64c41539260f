"""Start preparation's workers quickly by forking a server that has imported data_prep.

A worker that is spawned, as in users' commands, imports data_prep for 0.3 CPU-seconds, and the
tests start hundreds. Only workers of the tests' own process are forked. Tests of commands spawn
them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from multiprocessing.context import BaseContext

NOT_READ = ("PYTEST_CURRENT_TEST",)
SOCKET_PATH_BYTES = 70
"""The maximum length of the temporary folder's path. The path of the server's socket is 32 bytes
longer, and macOS limits it to 103."""
_get_context = multiprocessing.get_context
_environment: dict[str, str] = {}
"""The environment in which the server started, which its workers keep."""


def install() -> None:
    """Fork the workers of each later call that would spawn them in the server's environment."""
    multiprocessing.get_context = get_context


def get_context(method: str | None = None) -> BaseContext:
    environment = {name: value for name, value in os.environ.items() if name not in NOT_READ}
    if method != "spawn" or len(os.fsencode(tempfile.gettempdir())) > SOCKET_PATH_BYTES:
        return _get_context(method)
    if not _environment:
        _environment.update(environment)
    if environment != _environment:
        return _get_context(method)
    server = _get_context("forkserver")
    server.set_forkserver_preload([name for name in sys.modules if name.startswith("data_prep.")])
    return server
