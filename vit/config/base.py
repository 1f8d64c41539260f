"""The base of all sections of the config, types of values, and the settings that select training
samples, which are part of `data` and of each item of `data.sources`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_BLOCK_SAMPLES = 64
"""Samples that the order of a large data set keeps together."""
PERMUTATION_BELOW = 262_144
"""Below this number of samples the default order is a true permutation: blocks of one sample, no
windows."""
VAL = "val"
"""The name of `data.val_split` among the sets to evaluate on."""

MAY_CHANGE = "may change"
"""Annotates a setting, or a section, that a resumed run may have different from its checkpoint
without `--allow-change`: the batches and the recipe stay the same."""


class OnlyWith:
    """Annotates a setting that has no effect unless one of `conditions` holds, and is then refused.

    A condition is about another setting, of the same section or in dotted keys. `erasing_prob`: it
    is not null, 0, false, none or empty. `name=wsd|linear`: it is one of these. `freeze!=backbone`:
    it is not this.
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
    """Which samples of a split to train on; evaluation always uses all.

    A resumed run compares the samples that are selected, not these settings.
    """

    exclude: Annotated[str | None, MAY_CHANGE, OnlyWith("data.reader=index")] = None
    """File of samples to exclude: a key, `label=NUMBER` or `class=NAME` per line, or the lines
    of a `quarantine.jsonl`."""
    filter: Annotated[str | None, MAY_CHANGE, OnlyWith("data.reader=index")] = None
    """Expression over columns of the index that is true for the samples to use, such as
    `min(width, height) >= 64 and size < 5_000_000`. Columns: `width`, `height`, `size` (bytes) and
    `label`, as in `label == "class name"` or `label in (1, 2)`."""
    fraction: Annotated[
        float | None, Field(gt=0, le=1), MAY_CHANGE, OnlyWith("data.reader=index")
    ] = None
    """Fraction of the remaining samples to use, drawn with `subset_seed`; a smaller fraction is a
    subset of a larger one."""
    fraction_of: Annotated[Literal["all", "class"], MAY_CHANGE, OnlyWith("fraction")] = "all"
    """`fraction` of all samples, or of each class, of which at least one is used."""
    samples_per_class: Annotated[
        int | None, Field(gt=0), MAY_CHANGE, OnlyWith("data.reader=index")
    ] = None
    """Samples of each class, drawn with `subset_seed` (few-shot); all of a smaller class. Smaller
    sets are subsets of larger ones."""
    subset_seed: Annotated[
        int, Field(ge=0), MAY_CHANGE, OnlyWith("fraction", "samples_per_class")
    ] = 0
    """Seed of `fraction` and `samples_per_class`, which do not depend on `train.seed`."""


class SourceConfig(Selection):
    """One of several data sets to train on."""

    root: str | None = None
    """Folder or URL of its shards; `None`: `data.root`."""
    split: str | None = None
    """`None`: `data.train_split`."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Its share of an epoch, relative to the sum of all weights. Without weights an epoch has each
    sample of each source once."""
