"""Modules that few runs need, loaded by their name in the process that does."""

from __future__ import annotations

import importlib
from typing import Any


def load(name: str, needed_for: str) -> Any:
    """Return what `name` stands for: a module, or `module:attribute`.

    needed_for: the setting or address that the user gave. Raises ValueError if the folder of the
    module is not installed.
    """
    module, _, attribute = name.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{module}.".startswith(f"{missing}."):  # a package that it needs
            raise
        raise ValueError(
            f"{needed_for} needs {missing.replace('.', '/')}, which is not installed here"
        ) from None
    return getattr(loaded, attribute) if attribute else loaded
