"""The section `eval`: when, how and on which sets a model is evaluated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vit.config.base import Positive, Section

VAL = "val"
"""What `data.val_split` is called among the sets."""
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


class EvalSetConfig(Section):
    """One of `eval.sets`; with none of these it would be `data.val_split` itself."""

    root: str | None = None
    """Folder or URL of its shards; `None`: `data.root`."""
    split: str | None = None
    """A split, or a part of one, as `train[99%:]`; `None`: `data.val_split`."""
    labels: str | None = None
    """JSON file with the right classes of each image, as ImageNet-ReaL's `real.json`: a list of
    lists in the order of the images' keys, or a list for each key. Any of them counts as right;
    images with none are left out, and counted. `None`: the labels of the shards."""
    classes: Literal["own", "all"] = "own"
    """Classes are found in the model by name. `own`: only the logits of the set's classes compete,
    as on the 200 of ImageNet-A and -R; `all`: those of all classes of the model."""


class EvalConfig(Section):
    """Evaluation on `data.val_split`, exact on any number of ranks."""

    every_epochs: Annotated[float, Field(gt=0)] | None = None
    """Epochs between evaluations; this, `every_steps`, or neither for the end only. The end is
    evaluated too, unless the run is shorter than that."""
    every_steps: Positive | None = None
    """Steps between evaluations."""
    batch_size: Positive = 64
    """Images in one forward pass of one rank."""
    crop_pct: Annotated[float, Field(gt=0, le=1)] = 0.875
    """Side of the centre crop over the shorter side of the resized image (224 of 256)."""
    resize_px: Positive | None = None
    """Shorter side of the resized image in pixels, in place of `crop_pct`, for recipes that are
    published so."""
    crop_mode: Literal["center", "squash"] = "center"
    """`center` keeps the aspect of the image; `squash` does not (timm's crop_mode): with
    `crop_pct: 1` it shows the entire image."""
    resizer: Literal["torch", "pillow"] = "torch"
    """Library that resizes: `torch`, or `pillow`, which is slower and with which most numbers
    were published; one pixel in 200 differs by one level of 255."""
    apply_exif: bool | None = None
    """Turn images upright as their EXIF orientation says, in evaluation, in prediction and in
    what exports tell other programs. `None`: as the images of `data.root` were prepared."""
    sets: dict[SetName, EvalSetConfig] = Field(default={})
    """Further sets to evaluate on, by name, each exact, as
    `{v2: {root: data/v2, split: train}, real: {labels: real.json}}` (docs/evaluation.md)."""
    best_by: str = VAL
    """The set whose accuracy chooses the `best` weights: one of `sets`, or `val`, which is
    `data.val_split`."""

    reference: str | None = None
    """Published curve that evaluations of `data.val_split` are shown beside, if the run has the
    data and the length of its recipe: the name of one of `configs/reference`, or a CSV file of that
    form (docs/evaluation.md); `None`: no curve."""

    def further_places(self, root: str, split: str) -> list[tuple[str, str]]:
        """Root and split of what `sets` name besides `split` of `root`, `data.val_split`."""
        places = [(each.root or root, each.split or split) for each in self.sets.values()]
        return [place for place in dict.fromkeys(places) if place != (root, split)]
