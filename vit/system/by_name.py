"""Import modules that few runs need on first use."""

from __future__ import annotations

import importlib
from typing import Any


def load(name: str, needed_for: str) -> Any:
    """Return the module `name`, or an attribute for `module:attribute`.

    Raises ValueError if a parent package of the module is not installed.

    needed_for: the setting or address that needs the module, for messages.
    """
    module, _, attribute = name.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{module}.".startswith(f"{missing}."):  # The module's own import failed.
            raise
        raise ValueError(
            f"{needed_for} needs {missing.replace('.', '/')}, which is not installed"
        ) from None
    return getattr(loaded, attribute) if attribute else loaded
