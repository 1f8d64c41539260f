"""PrepError, the exception for mistakes that the user can correct, and helpers for messages."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vit.system.files import unreadable

NEXT_LINE = "\n  "


class PrepError(ValueError):
    """An error in the source or the output folder. The message states the problem and a remedy."""


@contextmanager
def readable(
    path: Path, damage: tuple[type[Exception], ...] = (), problem: str = ""
) -> Iterator[None]:
    """Convert an OSError about `path`, or one of the exceptions in `damage`, to a PrepError."""
    try:
        yield
    except damage as error:
        reason = str(error).partition("\n")[0].rstrip(":")
        raise PrepError(f"{path}: {problem} ({reason}); copy or download it again") from error
    except OSError as error:
        raise PrepError(str(unreadable(path, error))) from error


def require(path: Path, expected: str) -> None:
    """Raise PrepError if a file or folder does not exist.

    expected: the expected files, as text for the message.
    """
    if not path.exists():
        problem = (
            f"is a link to {os.readlink(path)}, which does not exist"
            if path.is_symlink()
            else "no such file or folder"
        )
        raise PrepError(f"{path}: {problem}; expected {expected}")


def counted(number: int, noun: str, plural: str = "") -> str:
    """Format a number and its noun, singular or plural: "1 image", "2 images"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def share_to_allow(part: int, total: int) -> float:
    """Return the value of --max-unreadable that allows `part` of `total` images to be skipped."""
    return min(0.999, math.ceil(1000 * part / total) / 1000)
