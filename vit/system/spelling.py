"""The nearest known names to a misspelt one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean a or b?)` with up to three of `known` that resemble `word`, or ""."""
    nearest = difflib.get_close_matches(word.lower(), dict.fromkeys(known), n=3, cutoff=0.4)
    return f" (did you mean {' or '.join(nearest)}?)" if nearest else ""
