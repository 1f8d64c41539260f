"""Format names in messages: suggest similar names and shorten long lists of names."""

import difflib
from collections.abc import Iterable, Sequence


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return ` (did you mean a or b?)` with up to three of `names` that resemble `word`, or ""."""
    nearest = difflib.get_close_matches(word.lower(), dict.fromkeys(names), n=3, cutoff=0.4)
    return f" (did you mean {' or '.join(nearest)}?)" if nearest else ""


def few(names: Sequence[str], limit: int = 5, between: str = ", ") -> str:
    """Join the first `limit` of `names` for a message, and count the remaining names."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return between.join(names[:limit]) + more
