"""Compare the classes of a data set with those that a model was trained on.

`data_prep/read/class_names.py` reads the names when an index is made.
"""

from __future__ import annotations

from collections.abc import Sequence

from vit.weights.files import LoadedWeights


def class_mismatch(loaded: LoadedWeights, names: Sequence[str], num_classes: int) -> str:
    """How the classes of a data set differ from those of `loaded`, or "".

    Labels are numbers: nothing else would show that an accuracy on other classes means nothing.

    Args:
        names: class name of label 0, 1, ...; [] if the data have none.
        num_classes: classes in the data.
    """
    if loaded.class_names is None or loaded.num_classes is None:
        return ""
    known = loaded.class_names
    counts = ""
    if num_classes != loaded.num_classes:
        counts = f"{num_classes:,} classes in the data, {loaded.num_classes:,} in the model"
    if not known or not names:
        if counts:
            return f"{counts}, and no names to compare them by: labels are compared by number"
        # Equal counts prove little: classes numbered from 1, or two sets of ten classes, have them.
        if known:
            return "the data have no names of classes, the model has: labels are compared by number"
        return ""
    differing = [n for n, name in enumerate(names) if [name] != known[n : n + 1]]
    if not differing:
        if len(names) == len(known):
            return ""
        return f"{len(names):,} classes in the data, the first of the model's {len(known):,}"
    shown = []
    for n in differing[:3]:
        in_model = repr(known[n]) if n < len(known) else "nothing"
        shown.append(f"label {n} is {names[n]!r} in the data, {in_model} in the model")
    if len(differing) > 3:
        shown[-1] += f" and {len(differing) - 3:,} more"
    agree = f"{len(names) - len(differing):,} of {len(names):,} names agree"
    if counts:
        agree += f"; {counts}"
    if sorted(known) == sorted(names):
        meaning = "they are in a different order, so the accuracy means nothing: write new shards"
    elif len(differing) < len(names):
        meaning = "the accuracy counts these labels as the model's"
    elif counts:
        meaning = "the accuracy means nothing"
    else:
        meaning = "the accuracy means nothing, unless only the names differ"
    return f"the data's classes are not the model's: {', '.join(shown)} ({agree}): {meaning}"
