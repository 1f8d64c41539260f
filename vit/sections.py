"""The base of all groups of settings, and those that choose training samples, which stand in `data`
and in each of `data.sources`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Selection(Section):
    """Which samples of a split are trained on; evaluation counts every image."""

    exclude: str | None = None
    """File of samples to leave out: a key, `label=NUMBER` or `class=NAME` in each line, or lines of
    a `quarantine.jsonl`."""
    filter: str | None = None
    """Expression over columns of the index that is true for the samples to take: `min(width,
    height) >= 64 and size < 5_000_000`, with `width`, `height`, `size` (bytes), `label`; `label ==
    "class name"`, `label in (1, 2)`."""
    fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of what is left to take, drawn by `subset_seed`; a smaller share is a part of a larger
    one."""
    fraction_of: Literal["all", "class"] = "all"
    """`fraction` of all samples, or of those of each class, of which one at least is taken."""
    samples_per_class: Annotated[int, Field(gt=0)] | None = None
    """So many of each class, drawn by `subset_seed` (few-shot); a class with fewer gives all.
    Smaller sets are parts of larger ones."""
    subset_seed: Annotated[int, Field(ge=0)] = 0
    """Draws `fraction` and `samples_per_class`; `train.seed` does not change them."""


class SourceConfig(Selection):
    """One of several data sets to train on."""

    root: str | None = None
    """Folder or URL of its shards; `None`: `data.root`."""
    split: str | None = None
    """`None`: `data.train_split`."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Its share of an epoch, over the sum of all weights. Without weights each sample of each
    source comes once in an epoch."""
