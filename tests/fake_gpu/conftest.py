"""Define a fixture that runs programs on the fake GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import warm_python
from fake_gpu import build
from processes import REPOSITORY, call, environment

HERE = Path(__file__).parent
Rehearse = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def rehearse() -> Rehearse:
    """Return a function that runs a program with its arguments on the fake GPU.

    fault: the name of a fault in `faults.py` to plant. log: the file to which all CUDA calls of the
    process are written. zeros: whether reads from the fake GPU return zeros. nvml: see
    `build.variables`.
    """
    if reason := build.reason_not_to_build():
        pytest.skip(reason)
    folder = build.build()

    def rehearse(
        program: str | Path,
        *arguments: object,
        fault: str = "",
        log: Path | None = None,
        zeros: bool = False,
        nvml: bool = True,
        **variables: str,
    ) -> subprocess.CompletedProcess:
        env = environment() | build.variables(folder, nvml=nvml) | variables
        if log is not None:
            env["FAKE_GPU_LOG"] = str(log)
        if zeros:
            env["FAKE_GPU_ZEROS"] = "1"
        line = [warm_python.python(env), str(HERE / "child.py")]
        if fault:
            line += [str(HERE / "faults.py"), fault]
        return call([*line, str(REPOSITORY / program), *map(str, arguments)], env)

    return rehearse
