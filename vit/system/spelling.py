"""Names in messages: the nearest known ones to a misspelt one, the first ones of many."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean a or b?)` with up to three of `known` that resemble `word`, or ""."""
    nearest = difflib.get_close_matches(word.lower(), dict.fromkeys(known), n=3, cutoff=0.4)
    return f" (did you mean {' or '.join(nearest)}?)" if nearest else ""


def few(names: Sequence[str], limit: int = 4) -> str:
    """Return the first of `names`, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
