"""Thin commands, one for each source of images, over one writer. Free of torch."""

import sys

# Before an import fails at whatever an older Python lacks.
if sys.version_info < (3, 11):  # noqa: UP036
    print(f"error: Python 3.11 or newer is needed, {sys.executable} is {sys.version_info[0]}.{sys.version_info[1]}", file=sys.stderr)
    raise SystemExit(2)
