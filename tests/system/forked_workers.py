"""Start preparation's workers quickly by forking a server that has imported data_prep.

A spawned worker, as in users' commands, needs 0.3 CPU-seconds to import data_prep, and the tests
start hundreds of workers. Only workers of the tests' own process are forked. Commands that are
tested in their own process spawn their workers.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from multiprocessing.context import BaseContext

NOT_READ = ("PYTEST_CURRENT_TEST",)
SOCKET_PATH_BYTES = 70
"""The maximum length of the temporary folder's path in bytes. The path of the server's socket is 32
bytes longer, and macOS limits socket paths to 103 bytes."""
_get_context = multiprocessing.get_context
_environment: dict[str, str] = {}
"""The environment in which the server was started. Its workers have the same environment."""


def install() -> None:
    """Replace `multiprocessing.get_context`. Later calls fork the workers that they would otherwise
    spawn, if the environment equals the server's."""
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
