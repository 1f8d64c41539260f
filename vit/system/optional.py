"""Convert the error for a missing optional package of this project to a message for the user."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Raise ValueError if an import in the block finds that a folder of `vit` was deleted.

    purpose: the setting, flag or address that needs the folder, for the message.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not missing.startswith("vit."):
            raise
        raise ValueError(
            f"{purpose} needs {missing.replace('.', '/')}, which is not installed"
        ) from None
