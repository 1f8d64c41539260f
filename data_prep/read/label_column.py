"""Which column of a table has the images or the labels, if the user does not say it."""

from __future__ import annotations

from collections.abc import Sequence

from data_prep.errors import PrepError
from vit.system.spelling import did_you_mean

USUAL_NAMES = ("image", "img", "label", "labels", "class", "class_name", "category")


def choose_column(
    place: object, flag: str, asked: str | None, candidates: Sequence[str], columns: Sequence[str]
) -> str:
    """The column that `flag` names, else the only candidate, or the only one with a usual name.

    Raises PrepError.
    """
    listed = ", ".join(columns)
    if asked is not None:
        if asked in columns:
            return asked
        hint = did_you_mean(asked, columns)
        raise PrepError(f"{flag} {asked}: {place} has no such column{hint}; it has {listed}")
    usual = [name for name in candidates if name.lower() in USUAL_NAMES]
    chosen = usual if len(usual) == 1 else candidates
    if len(chosen) == 1:
        return chosen[0]
    which = f"one of {', '.join(chosen)}" if chosen else "none that is known as it"
    raise PrepError(f"{place}: its columns are {listed}, and {which} is meant; say which: {flag}")
