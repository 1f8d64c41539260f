"""The classes that a model was trained on, by name: compared with those of a data set, or selected.

`data_prep/read/class_names.py` reads the names of data when an index is made. Weights of this
project carry theirs. Those of others have them in a `config.json` or nowhere: then 1,000 classes
are taken for ImageNet-1k's, in the order of their WordNet ids, which all published weights have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vit.system.files import WeightsError
from vit.system.spelling import few
from vit.weights.files import LoadedWeights
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


IMAGENET_CLASSES = 1000


def imagenet_names() -> dict[str, list[str]]:
    """Return the names of ImageNet-1k's classes in the order of published weights; {} without timm.

    Three ways of naming: the WordNet ids that `data_prep.imagenet` takes ("n01440764"), timm's
    words ("tench, Tinca tinca"), and the first of these ("tench"). Source: timm's `ImageNetInfo`.
    """
    try:
        from timm.data import ImageNetInfo
    except ImportError:
        return {}
    info = ImageNetInfo("imagenet-1k")
    words = [info.index_to_description(label) for label in range(IMAGENET_CLASSES)]
    return {
        "WordNet ids": [info.index_to_label_name(label) for label in range(IMAGENET_CLASSES)],
        "words": words,
        "first words": [text.partition(",")[0] for text in words],
    }


def namings_of(loaded: LoadedWeights, num_rows: int) -> dict[str, list[str]]:
    """Return ways of naming the rows of the head: a remark about each -> the names.

    Raises WeightsError if only timm would know them, and is not installed.
    """
    own = loaded.class_names or class_names_in(loaded.path.with_name("config.json"), num_rows)
    found = {"": own} if own else {}
    if loaded.step is not None or num_rows != IMAGENET_CLASSES:  # ours say what they know
        return found
    guessed = imagenet_names()
    if not guessed and not own:
        raise WeightsError(
            f"{loaded.path} has no names of classes to select by; if its 1,000 classes are"
            " ImageNet's, timm knows them: pip install timm"
        )
    return found | {f", taken for ImageNet-1k's ({kind})": names for kind, names in guessed.items()}


_HEADS = ("head", "fc", "head.fc", "classifier")
"""Names of the layer with a row for each class, ours and those of timm's models."""


def select_classes(loaded: LoadedWeights, names: Sequence[str]) -> LoadedWeights:
    """`loaded` with a head of the classes `names` only, in their order.

    Logits of these classes stay what they were: probabilities are then among them. Of weights from
    elsewhere with 1,000 classes the names may also be ImageNet-1k's (`imagenet_names`): whichever
    way of naming knows the most of `names`, their own first.

    Raises WeightsError if weights or data have no names, or the weights do not know some of them.
    """
    weights = dict(loaded.weights)
    heads = [name for name in _HEADS if f"{name}.weight" in weights]
    num_rows = len(weights[f"{heads[0]}.weight"]) if heads else 0
    namings = namings_of(loaded, num_rows)
    if not namings or not names:
        whose = f"{loaded.path} has" if names else "the data have"
        raise WeightsError(f"{whose} no names of classes to select by: labels are only numbers")
    whose, known = min(namings.items(), key=lambda item: len({*names} - {*item[1]}))
    if missing := [name for name in names if name not in known]:
        others = " or ".join(few(found) for found in namings.values())
        raise WeightsError(
            f"{loaded.path} does not know {len(missing):,} of the data's {len(names):,} classes"
            f" ({few(missing)}), its own are {others}: for other classes start with a new head,"
            " init.reset_head=true"
        )
    if doubled := sorted({name for name in names if known.count(name) > 1}):
        raise WeightsError(f"{loaded.path} has several classes called {few(doubled)}")
    place = {name: number for number, name in enumerate(known)}
    rows = [place[name] for name in names]
    if num_rows != len(known):
        raise WeightsError(
            f"{loaded.path} has {len(known):,} names of classes and a head of {num_rows:,} rows"
        )
    for head in (heads[0], "head_dist"):  # DeiT's second one has the same classes
        for name in (f"{head}.weight", f"{head}.bias"):
            if name in weights:
                weights[name] = weights[name][rows]
    note = f"{len(names):,} of {len(known):,} classes selected by name{whose}"
    return replace(
        loaded,
        weights=weights,
        num_classes=len(names),
        class_names=list(names),
        notes=(*loaded.notes, note),
    )
