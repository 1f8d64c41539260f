"""Start Python quickly by forking a server process that has already imported torch and this
project.

Most commands in tests take three seconds to import torch and then run for one second. A fork starts
in a tenth of a second. `python()` returns the path of a small program that accepts the same
arguments as `python [-u] SCRIPT ...`, `python -m MODULE ...` and `python -c CODE ...`. The program
keeps the caller's arguments, environment, working directory and streams, and forwards signals and
the exit status. Tests of package versions, missing packages, process limits or parent processes
must use `sys.executable` instead. Python is also started normally if a variable that Python, torch
or the project reads during import differs from its value in the server.

The program sends its streams to the server through a socket, and the server forks. The program runs
until the fork exits. If the program is killed, the fork is killed as well.
"""

from __future__ import annotations

import ast
import atexit
import gc
import importlib
import os
import pkgutil
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import families

READ_EARLY = (
    "PYTHON",
    "VIT_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "ATEN_",
    "ONEDNN_",
    "DNNL_",
    "TORCH_",
    "KMP_",
    "LD_",
    "MPL",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_",
)
NOT_EARLY = (
    "VIT_TEST_ID",
    "VIT_HTTP_HEADER",
    "VIT_OUTCOME_FILE",
    "PYTHON_EXEC",
    "TORCH_NCCL",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_ELASTIC",
)
PROGRAM = """#!{interpreter} -IS
import os, signal, socket, sys

def line(connection):
    text = b""
    while not text.endswith(b"\\n"):
        piece = connection.recv(1)
        if not piece:
            os._exit(255)  # the server was killed
        text += piece
    return text.decode().strip()

folder = os.path.dirname(os.path.abspath(__file__))
server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(folder, "socket"))
request = repr((sys.argv[1:], dict(os.environ), os.getcwd())).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
answer = line(server)
if answer == "cold":
    os.execv("{interpreter}", ["{interpreter}", *sys.argv[1:]])
with open(os.path.join(folder, str(os.getpid())), "w") as file:
    file.write(answer)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(int(answer), number))
status = int(line(server))
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""

_started: dict[str, tuple[str, subprocess.Popen]] = {}
"""Maps the value of LD_PRELOAD to the folder and the process of a server, because a running process
cannot preload another library (tests/fake_gpu)."""
_starting = threading.Lock()


def python(environment: dict[str, str]) -> str:
    """Return the path of the program that starts Python quickly.

    The first call for a value of LD_PRELOAD starts a server with `environment`. The server runs
    until `stop` is called. If the system does not support safe forks, the path of the real
    interpreter is returned.
    """
    if sys.platform != "linux":
        return sys.executable
    preloaded = environment.get("LD_PRELOAD", "")
    with _starting:
        if preloaded not in _started:
            # Use a short path, because the path of a Unix socket is limited to 107 bytes.
            folder = tempfile.mkdtemp(prefix="vit-warm-")
            program = Path(folder) / "python"
            program.write_text(PROGRAM.format(interpreter=sys.executable))
            program.chmod(0o755)
            # Remove the test's name from the environment, because all tests share the server.
            env = {key: value for key, value in environment.items() if key != families.NAME}
            server = subprocess.Popen(
                [sys.executable, __file__, folder], env=env, stdout=subprocess.PIPE, text=True
            )
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            _started[preloaded] = (folder, server)
        return os.path.join(_started[preloaded][0], "python")


def fork_of(pid: int) -> int:
    """Return the process id of the fork that the program with id `pid` has requested.

    The child processes of the command have the fork as their parent.
    """
    [path] = [path for folder, _ in _started.values() if (path := Path(folder, str(pid))).exists()]
    return int(path.read_text())


def stop() -> None:
    while _started:
        _, (folder, server) = _started.popitem()
        server.terminate()
        server.communicate()
        shutil.rmtree(folder, ignore_errors=True)


# ---- the server ----------------------------------------------------------------------------------


Request = tuple[list[str], dict[str, str], str]
"""The arguments that follow `python`, the environment, and the working directory."""


def _early(environment: dict[str, str]) -> dict[str, str]:
    return {
        key: value
        for key, value in environment.items()
        if key.startswith(READ_EARLY) and not key.startswith(NOT_EARLY)
    }


def _receive(client: socket.socket) -> tuple[Request, list[int]]:
    head, streams, _, _ = socket.recv_fds(client, 4, 3)
    with client.makefile("rb") as file:
        return ast.literal_eval(file.read(int.from_bytes(head, "big")).decode()), streams


def _serve(folder: str) -> tuple[Request, list[int]] | None:
    """Fork a process for each request until SIGTERM arrives or the parent exits.

    In the server, the function returns None. In a fork, the function returns the request and its
    streams.
    """
    expected = _early(dict(os.environ))
    parent = os.getppid()
    clients: dict[int, socket.socket] = {}
    ended: list[int] = []
    listener = socket.socket(socket.AF_UNIX)
    wake, awake = socket.socketpair()
    awake.setblocking(False)
    signal.set_wakeup_fd(awake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    listener.bind(os.path.join(folder, "socket"))
    listener.listen(64)
    selector = selectors.DefaultSelector()
    for source in (listener, wake):
        selector.register(source, selectors.EVENT_READ)
    print("ready", flush=True)
    while not ended and os.getppid() == parent:
        for key, _ in selector.select(timeout=1):
            if key.fileobj is listener:
                client = listener.accept()[0]
                try:
                    request, streams = _receive(client)
                except (OSError, SyntaxError):  # the client was killed before it sent its request
                    client.close()
                    continue
                if _early(request[1]) != expected:
                    client.sendall(b"cold\n")
                    client.close()
                elif pid := os.fork():
                    client.sendall(b"%d\n" % pid)
                    clients[pid] = client
                    selector.register(client, selectors.EVENT_READ, pid)
                else:
                    signal.set_wakeup_fd(-1)
                    for number in (signal.SIGCHLD, signal.SIGTERM):
                        signal.signal(number, signal.SIG_DFL)
                    selector.close()
                    for connection in (listener, wake, awake, client, *clients.values()):
                        connection.close()
                    return request, streams
                for stream in streams:
                    os.close(stream)
            elif key.fileobj is wake:
                wake.recv(4096)
            else:  # the client was killed
                os.kill(key.data, signal.SIGKILL)
                selector.unregister(key.fileobj)
        while clients and (done := os.waitpid(-1, os.WNOHANG))[0]:
            client = clients.pop(done[0])
            # Unregister the client first. Sending data to an exited client fails, and the next
            # client may get the same file descriptor.
            with suppress(KeyError):
                selector.unregister(client)
            with client, suppress(OSError):
                client.sendall(b"%d\n" % os.waitstatus_to_exitcode(done[1]))
    for pid in clients:
        os.kill(pid, signal.SIGKILL)
    return None


def _become(request: Request, streams: list[int]) -> NoReturn:
    arguments, environment, folder = request
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    arguments = arguments[1:] if arguments[0] == "-u" else arguments
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path[0] = folder
            sys.modules.pop(arguments[1], None)  # prevent a warning from runpy
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            if arguments[0] == "-c":
                sys.argv = ["-c", *arguments[2:]]
                sys.path[0] = ""
                code = compile(arguments[1], "<string>", "exec")
            else:
                sys.argv = arguments
                sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
                main.__file__ = arguments[0]
                code = compile(Path(arguments[0]).read_bytes(), arguments[0], "exec")
            exec(code, main.__dict__)
        status = 0
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
        if status != stopped.code and stopped.code is not None:
            print(stopped.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    # Run Python's shutdown steps but do not destroy the modules, because destroying them would copy
    # shared memory.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _import_all() -> None:
    for name in ("torch.distributed.run", "timm", "matplotlib.pyplot", "jinja2"):
        importlib.import_module(name)
    import vit

    for module in pkgutil.walk_packages(vit.__path__, "vit."):
        if not module.name.startswith("vit._native"):  # skip libraries that are not Python modules
            importlib.import_module(module.name)


if __name__ == "__main__":
    _import_all()
    gc.collect()
    gc.freeze()
    accepted = _serve(sys.argv[1])
    if accepted is not None:
        _become(*accepted)
    # Delete the socket's folder, because no other process deletes it if pytest was killed.
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    os._exit(0)  # exit without destroying the frozen modules
