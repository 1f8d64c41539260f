"""The error of every command: a mistake that the user can correct, and parts of its message."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vit.system.files import unreadable

NEXT_LINE = "\n  "
"""The separator of several lines of a message."""


class PrepError(ValueError):
    """The source or the output folder is wrong; the message has the problem and a remedy."""


@contextmanager
def readable(
    path: Path, damage: tuple[type[Exception], ...] = (), problem: str = ""
) -> Iterator[None]:
    """Turn the system's refusal to read `path` into a PrepError, and `damage` into a `problem`."""
    try:
        yield
    except damage as error:
        raise PrepError(f"{path}: {problem} ({error}); copy or download it again") from error
    except OSError as error:
        raise PrepError(str(unreadable(path, error))) from error


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number and its noun: 1 image, 2 images."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def some(items: Sequence[str], most: int = 5, between: str = ", ") -> str:
    """Return the first of many items, for a message."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return between.join(items[:most]) + more


def share_to_allow(part: int, total: int) -> float:
    """Return the --max-unreadable with which `part` of `total` images may be skipped."""
    return min(0.999, math.ceil(1000 * part / total) / 1000)
