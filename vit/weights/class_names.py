"""Compare a model's class names with those of a data set, or select classes by name.

`data_prep/read/class_names.py` reads a data set's class names when it creates the index. This
project's weights store class names in their metadata. Other programs store them in `config.json`,
or not at all. A head with 1,000 rows and no class names is assumed to be for ImageNet-1k in the
order of WordNet ids, which all published weights use.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest

from vit.system.files import WeightsError
from vit.system.spelling import few
from vit.weights.files import LoadedWeights
from vit.weights.transformers_config import class_names_in


def class_mismatch(loaded: LoadedWeights, names: Sequence[str], num_classes: int) -> str:
    """Describe how a data set's classes differ from those of `loaded`, or return "".

    An accuracy on the wrong classes is meaningless. No other check detects this, because labels are
    only numbers.

    Args:
        names: Class names of labels 0, 1, ...; [] if the data have none.
        num_classes: Number of classes in the data.
    """
    if loaded.num_classes is None:
        return ""
    if loaded.class_names is None:
        return _other_numbers(loaded, names)

    counts = (
        f"{num_classes:,} classes in the data, {loaded.num_classes:,} in the model"
        if num_classes != loaded.num_classes
        else ""
    )
    if loaded.class_names and names:
        return _other_names(names, loaded.class_names, counts)
    if counts:
        return f"{counts}, and no class names to compare: labels are compared by number"
    if loaded.class_names:
        # The same number of classes proves little, because many different data sets have ten
        # classes.
        return "the model has class names, but the data do not: labels are compared by number"
    return ""


def _other_names(names: Sequence[str], model_names: Sequence[str], counts: str) -> str:
    """Describe how the data's and the model's class names differ, or return "".

    counts: the different numbers of classes, or "".
    """
    pairs = zip_longest(map(repr, names), map(repr, model_names[: len(names)]), fillvalue="nothing")
    examples = [
        f"label {label} is {in_data} in the data, {in_model} in the model"
        for label, (in_data, in_model) in enumerate(pairs)
        if in_data != in_model
    ]

    if not examples and len(names) == len(model_names):
        return ""
    if not examples:
        return f"the data have the first {len(names):,} of the model's {len(model_names):,} classes"

    agreement = f"{len(names) - len(examples):,} of {len(names):,} names agree"
    facts = f"{agreement}; {counts}" if counts else agreement
    if {*names} <= {*model_names}:
        meaning = f"the accuracy is meaningless: {_SELECT}"
    elif len(examples) < len(names):
        meaning = "the accuracy treats these labels as the model's"
    else:
        meaning = "the accuracy is meaningless, unless only the names differ"
    return f"the classes of data and model differ: {few(examples, 3)} ({facts}): {meaning}"


def _other_numbers(loaded: LoadedWeights, names: Sequence[str]) -> str:
    """Return a warning if published weights probably assign other labels to the classes `names`,
    or ""."""
    namings: dict[str, list[str]] = {}
    with suppress(WeightsError):  # timm, which has the names, is not installed
        namings = namings_of(loaded, loaded.num_classes or 0)
    are_labels = list(names) == [str(label) for label in range(len(names))]
    if not names or not namings or are_labels:
        return ""

    for naming in namings.values():
        if naming[: len(names)] == list(names):
            return ""
        if {*names} <= {*naming}:
            return (
                f"the model has the data's {len(names):,} classes, but at other labels (label 0"
                f" is {names[0]!r} in the data, {naming[0]!r} in the model), so the accuracy is"
                f" meaningless: {_SELECT}"
            )

    first_names = " or ".join(repr(naming[0]) for naming in namings.values())
    return (
        f"label 0 is {names[0]!r} in the data, but probably {first_names} in the model: the"
        " accuracy is meaningless, unless only the names differ (for ImageNet,"
        " `python -m data_prep.imagenet` gives the labels of published weights)"
    )


_SELECT = "match the classes by name with --select-classes or init.select_classes=true"
IMAGENET_CLASSES = 1000


def imagenet_names() -> dict[str, list[str]]:
    """Return ImageNet-1k's class names in the order of published weights; {} without timm.

    Each class has three names: the WordNet id that `data_prep.imagenet` uses ("n01440764"), timm's
    description ("tench, Tinca tinca"), and the description up to its first comma ("tench"). Source:
    timm's `ImageNetInfo`.
    """
    try:
        from timm.data import ImageNetInfo
    except ImportError:
        return {}

    info = ImageNetInfo("imagenet-1k")
    descriptions = [info.index_to_description(label) for label in range(IMAGENET_CLASSES)]
    return {
        "WordNet ids": [info.index_to_label_name(label) for label in range(IMAGENET_CLASSES)],
        "words": descriptions,
        "first words": [text.partition(",")[0] for text in descriptions],
    }


def namings_of(loaded: LoadedWeights, num_rows: int) -> dict[str, list[str]]:
    """Return the possible class names for the head's rows, keyed by a note on their source.

    Raises WeightsError if the names can only come from timm, but timm is not installed.
    """
    own = loaded.class_names or class_names_in(loaded.path.with_name("config.json"), num_rows)
    namings = {"": own} if own else {}
    # This project's weights record their class names, so do not guess.
    if loaded.step is not None or num_rows != IMAGENET_CLASSES:
        return namings

    guesses = imagenet_names()
    if not guesses and not own:
        raise WeightsError(
            f"{loaded.path} has no class names to select by; if its 1,000 classes are ImageNet's,"
            " install timm, which has their names: pip install timm"
        )
    return namings | {
        f", assumed to be ImageNet-1k's ({kind})": names for kind, names in guesses.items()
    }


_HEADS = ("head", "fc", "head.fc", "classifier")
"""The names of the classifier layer in this project's models and in timm's."""


def check_head(loaded: LoadedWeights) -> None:
    """Raise WeightsError if `loaded` has no head, and thus only features."""
    if loaded.num_classes == 0:
        raise WeightsError(
            f"{loaded.path} has no head, so it cannot classify: fine-tune it first"
            " (init.checkpoint, init.reset_head; init.freeze=backbone trains only the head), or"
            " pass --model NAME if it is another model"
        )


def select_classes(loaded: LoadedWeights, names: Sequence[str]) -> LoadedWeights:
    """Return `loaded` with its head reduced to the classes `names`, in this order.

    The logits of these classes do not change, and the softmax covers only these classes. For other
    programs' weights with 1,000 classes, the names of ImageNet-1k are also tried
    (`imagenet_names`). The naming that contains the most of `names` is used. In case of a tie, the
    names stored with the weights are preferred.

    Raises WeightsError if the weights or the data have no names, or if the weights lack some of
    `names`.
    """
    weights = dict(loaded.weights)
    heads = [name for name in _HEADS if f"{name}.weight" in weights]
    num_rows = len(weights[f"{heads[0]}.weight"]) if heads else 0
    namings = namings_of(loaded, num_rows)
    if not namings or not names:
        subject = f"{loaded.path} has" if names else "the data have"
        raise WeightsError(f"{subject} no class names to select by: labels are only numbers")

    remark, model_names = min(namings.items(), key=lambda item: len({*names} - {*item[1]}))
    missing = [name for name in names if name not in model_names]
    if missing:
        own = " or ".join(few(naming) for naming in namings.values())
        raise WeightsError(
            f"{loaded.path} lacks {len(missing):,} of the data's {len(names):,} classes"
            f" ({few(missing)}); its classes are {own}: start with a new head by setting"
            " init.reset_head=true"
        )

    doubled = sorted({name for name in names if model_names.count(name) > 1})
    if doubled:
        raise WeightsError(f"{loaded.path} has several classes called {few(doubled)}")
    if num_rows != len(model_names):
        raise WeightsError(
            f"{loaded.path} has {len(model_names):,} class names, but its head has {num_rows:,}"
            " rows"
        )

    row_of = {name: row for row, name in enumerate(model_names)}
    rows = [row_of[name] for name in names]
    for head in (heads[0], "head_dist"):  # DeiT's distillation head
        for name in (f"{head}.weight", f"{head}.bias"):
            if name in weights:
                weights[name] = weights[name][rows]

    note = f"{len(names):,} of {len(model_names):,} classes selected by name{remark}"
    return replace(
        loaded,
        weights=weights,
        num_classes=len(names),
        class_names=list(names),
        notes=(*loaded.notes, note),
    )
