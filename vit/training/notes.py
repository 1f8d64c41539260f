"""What a part of a run contributes to its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Notes:
    """Contributions of a part of a run, before its first step."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Values that a resume must find unchanged."""
    record: dict[str, Any] = field(default_factory=dict)
    """Values of the record's `start` line."""
    lines: tuple[str, ...] = ()
    """Lines for people."""
