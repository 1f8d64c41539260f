"""Compare the classes of a data set with those that a model was trained on.

`data_prep/read/class_names.py` reads the names when an index is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vit.weights.files import LoadedWeights
from vit.weights.formats import WeightsError, few
from vit.weights.transformers_config import class_names_in


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
        told = "the data have no names of classes, the model has: labels are compared by number"
        return told if known else ""
    differing = [n for n, name in enumerate(names) if [name] != known[n : n + 1]]
    if not differing:
        first = f"{len(names):,} classes in the data, the first of the model's {len(known):,}"
        return "" if len(names) == len(known) else first
    shown = [
        f"label {n} is {names[n]!r} in the data, {repr(known[n]) if n < len(known) else 'nothing'}"
        " in the model"
        for n in differing[:3]
    ]
    more = f" and {len(differing) - 3:,} more" if len(differing) > 3 else ""
    agree = f"{len(names) - len(differing):,} of {len(names):,} names agree"
    if sorted(known) == sorted(names):
        meaning = "they are in a different order, so the accuracy means nothing: write new shards"
    elif len(differing) < len(names):
        meaning = "the accuracy counts these labels as the model's"
    else:
        meaning = "the accuracy means nothing, unless only the names differ"
    return (
        f"the data's classes are not the model's: {', '.join(shown)}{more}"
        f" ({'; '.join(filter(None, (agree, counts)))}): {meaning}"
    )


_HEADS = ("head", "fc", "head.fc", "classifier")
"""Names of the layer with a row for each class, ours and those of timm's models."""


def select_classes(loaded: LoadedWeights, names: Sequence[str]) -> LoadedWeights:
    """`loaded` with a head of the classes `names` only, in their order.

    Logits of these classes stay what they were: probabilities are then among them.

    Raises WeightsError if weights or data have no names, or the weights do not know some of them.
    """
    weights = dict(loaded.weights)
    heads = [name for name in _HEADS if f"{name}.weight" in weights]
    num_rows = len(weights[f"{heads[0]}.weight"]) if heads else 0
    known = loaded.class_names or class_names_in(loaded.path.with_name("config.json"), num_rows)
    if not known or not names:
        whose = f"{loaded.path} has" if not known else "the data have"
        raise WeightsError(f"{whose} no names of classes to select by: labels are only numbers")
    if missing := [name for name in names if name not in known]:
        raise WeightsError(
            f"{loaded.path} does not know {len(missing):,} of the data's {len(names):,} classes"
            f" ({few(missing)}): for other classes start with a new head, init.reset_head=true"
        )
    if doubled := sorted({name for name in names if known.count(name) > 1}):
        raise WeightsError(f"{loaded.path} has several classes called {few(doubled)}")
    place = {name: number for number, name in enumerate(known)}
    rows = [place[name] for name in names]
    if num_rows != len(known):
        raise WeightsError(
            f"{loaded.path} has {len(known):,} names of classes and a head of {num_rows:,} rows"
        )
    for name in (f"{heads[0]}.weight", f"{heads[0]}.bias"):
        if name in weights:
            weights[name] = weights[name][rows]
    note = f"{len(names):,} of {len(known):,} classes selected by name"
    return replace(
        loaded,
        weights=weights,
        num_classes=len(names),
        class_names=list(names),
        notes=(*loaded.notes, note),
    )
