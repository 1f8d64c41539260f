"""Run a program in a process with the fake GPU: python child.py PROGRAM ARGUMENTS ...

The environment variable FAKE_GPU_LOG is the path of the log for the whole process. If
FAKE_GPU_ZEROS is set, reads from the fake GPU return zeros.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import ExitStack
from pathlib import Path

from fake_gpu import log, operators


def main() -> None:
    operators.register()
    log.library().fake_gpu_read_zeros("FAKE_GPU_ZEROS" in os.environ)
    program, *arguments = sys.argv[1:]
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    with ExitStack() as stack:
        if path := os.environ.get("FAKE_GPU_LOG"):
            stack.enter_context(log.logged(Path(path)))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
