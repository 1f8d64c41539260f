"""Load modules by name that only few runs need, in the processes that need them."""

from __future__ import annotations

import importlib
from typing import Any


def load(name: str, needed_for: str) -> Any:
    """Return the module `name`, or an attribute for `module:attribute`.

    needed_for: the setting or address that the user gave. Raises ValueError if the folder of the
    module is not installed.
    """
    module, _, attribute = name.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{module}.".startswith(f"{missing}."):  # a package that the module needs
            raise
        raise ValueError(
            f"{needed_for} needs {missing.replace('.', '/')}, which is not installed here"
        ) from None
    return getattr(loaded, attribute) if attribute else loaded
