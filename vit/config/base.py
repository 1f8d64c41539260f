"""Define the base class of config sections, common value types, and settings that select samples.

`data` and each item of `data.sources` have the settings that select training samples.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_BLOCK_SAMPLES = 64
"""The default number of consecutive samples in a shuffled block of a large data set."""
PERMUTATION_BELOW = 262_144
"""By default, data sets with fewer samples use a true permutation, with blocks of one sample and no
shuffling windows."""
VAL = "val"
"""The name of `data.val_split` among the evaluation sets."""

MAY_CHANGE = "may change"
"""Annotates a setting or section that a resumed run may change without `--allow-change`, because
it affects neither the batches nor the recipe."""


class OnlyWith:
    """Annotates a setting that is refused unless at least one of `conditions` holds.

    A condition names another setting, by its key in the same section or by its dotted key. The
    condition `erasing_prob` holds if the setting is not null, 0, false, none or empty;
    `name=wsd|linear` holds if it has one of these values; `freeze!=backbone` holds if it has any
    other value.
    """

    def __init__(self, *conditions: str):
        self.conditions = conditions


Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(gt=0)]
Size = Annotated[int, Field(gt=0)] | tuple[Positive, Positive]


def height_width(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return a `Size` as (height, width)."""
    return (size, size) if isinstance(size, int) else size


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Selection(Section):
    """Settings that select the training samples of a split. Evaluation always uses all samples.

    When a run resumes, the selected samples are compared instead of these settings.
    """

    exclude: Annotated[str | None, MAY_CHANGE, OnlyWith("stream.urls=null")] = None
    """File that lists the samples to exclude: a key, `label=NUMBER` or `class=NAME` per line, or
    the lines of a `quarantine.jsonl`. If these are at most 5 % of the samples, they keep their
    places as rows without weight, so all other rows of all batches stay the same."""
    relabel: Annotated[str | None, MAY_CHANGE, OnlyWith("stream.urls=null")] = None
    """File that gives samples another class: a key, a comma, and `label=NUMBER` or `class=NAME` per
    line. Apart from these labels, all batches stay the same."""
    fraction: Annotated[
        float | None, Field(gt=0, le=1), MAY_CHANGE, OnlyWith("stream.urls=null")
    ] = None
    """Fraction of the samples to use, after exclusion, drawn with `subset_seed`. A smaller fraction
    selects a subset of the samples of a larger fraction."""
    fraction_of: Annotated[Literal["all", "class"], MAY_CHANGE, OnlyWith("fraction")] = "all"
    """Take `fraction` of all samples, or of each class (at least one sample per class)."""
    samples_per_class: Annotated[
        int | None, Field(gt=0), MAY_CHANGE, OnlyWith("stream.urls=null")
    ] = None
    """Number of samples per class (few-shot), drawn with `subset_seed`. Classes with fewer samples
    are used completely. A smaller number selects a subset of the samples of a larger number."""
    subset_seed: Annotated[
        int, Field(ge=0), MAY_CHANGE, OnlyWith("fraction", "samples_per_class")
    ] = 0
    """Seed of `fraction` and `samples_per_class`, which do not depend on `train.seed`."""


class SourceConfig(Selection):
    """One of several data sets to train on."""

    root: str | None = None
    """Folder or URL of the shards; `None`: `data.root`."""
    split: str | None = None
    """Split to train on; `None`: `data.train_split`."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of an epoch, relative to the sum of all weights. Without weights, an epoch contains
    each sample of each source once."""
