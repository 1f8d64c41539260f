"""What cannot be together in a `Config`, found across its sections, each with its remedy.

`vit.config.schema` says what each setting may be by itself. A `Config` calls `find_problems` when
it is made, so that none exists that contradicts itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vit.config.base import Section, Selection
from vit.data.row_filter import RowFilter
from vit.data.shards.members import SETTINGS, SampleLayout

if TYPE_CHECKING:
    from vit.config.schema import AugmentConfig, Config, DataConfig, EvalConfig

_EXCLUSIVE = (
    ("train", "epochs", "steps"),
    ("schedule", "warmup_epochs", "warmup_steps"),
    ("eval", "every_epochs", "every_steps"),
)
_OF_INDEX = ("num_lanes", "block_samples", "window_blocks", "aug_repeats", "aug_repeats_form")
"""Settings of `data` that only `reader: index` reads, next to those that select samples."""
_OF_STREAM = ("stream", "stream_image", "stream_label", "stream_keys_with_dots", "num_samples")
"""Settings of `data` that only `reader: webdataset` reads."""
_LARGEST_MAGNITUDE = {"timm": 10, "torchvision": 30, "big_vision": 20}


def find_problems(config: Config) -> list[str]:
    """All contradictions in `config`, one line each, in dotted keys."""
    return [
        *_length_problems(config),
        *_training_problems(config),
        *_view_problems(config.eval, config.model.image_size),
        *_channel_problems(config),
        *_reader_problems(config.data),
        *_selection_problems(config.data, "data."),
        *_source_problems(config.data),
        *_augment_problems(config.augment),
        *_grey_problems(config.augment, config.model.in_chans),
    ]


def optimizer_name(value: Any) -> str:
    """Which optimizer the section `optim` is about: given as a dictionary or as a section."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return name if isinstance(name, str) else "adamw"


def _is_given(section: Section, key: str) -> bool:
    """Whether a setting differs from its default."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


def _length_problems(config: Config) -> Iterator[str]:
    for name, first, second in _EXCLUSIVE:
        section = getattr(config, name)
        num_given = sum(getattr(section, key) is not None for key in (first, second))
        if num_given == 2:
            yield f"{name}.{first} and {name}.{second} are both given: keep one of them"
        if num_given == 0 and name == "train":
            yield f"neither {name}.{first} nor {name}.{second} is given: give one of them"


def _training_problems(config: Config) -> Iterator[str]:
    schedule = config.schedule
    optim = config.optim
    if schedule.name == "constant" and schedule.min_lr > 0:
        yield "schedule.min_lr has no effect with schedule.name=constant: remove it"
    if schedule.min_lr > optim.lr:
        yield (
            f"schedule.min_lr={schedule.min_lr} exceeds optim.lr={optim.lr}: the rate falls"
            " towards it"
        )
    if optim.name == "sgd" and optim.nesterov and optim.momentum == 0:
        yield "optim.nesterov needs optim.momentum above 0"
    if config.train.ema_warmup and config.train.ema_decay is None:
        yield "train.ema_warmup has no effect without train.ema_decay: give one"
    if config.init.reset_head and config.init.checkpoint is None:
        yield (
            "init.reset_head has no effect without init.checkpoint: give one, or remove"
            " init.reset_head"
        )


def _view_problems(view: EvalConfig, image_size: int | tuple[int, int]) -> Iterator[str]:
    if view.resize_px is None:
        return
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if _is_given(view, "crop_pct"):
        yield "eval.crop_pct and eval.resize_px are both given: keep one of them"
    if height != width:
        yield (
            f"eval.resize_px needs square images, model.image_size is [{height}, {width}]: use"
            " eval.crop_pct"
        )
    if view.resize_px < max(height, width):
        yield (
            f"eval.resize_px={view.resize_px} is below model.image_size={max(height, width)}: the"
            " crop would not be filled"
        )


def _channel_problems(config: Config) -> Iterator[str]:
    in_chans = config.model.in_chans
    for key in ("mean", "std"):
        values = getattr(config.data, key)
        if len(values) not in (1, in_chans):
            allowed = "1" if in_chans == 1 else f"1 or {in_chans}"
            yield (
                f"data.{key} has {len(values)} values, model.in_chans is {in_chans}: give {allowed}"
            )


def _reader_problems(data: DataConfig) -> Iterator[str]:
    """What the reader needs and lacks, and what has no effect with it."""
    without_effect: tuple[str, ...] = _OF_STREAM
    if data.reader == "webdataset":
        if data.stream is None:
            yield (
                "data.reader=webdataset needs data.stream: URLs of tars, as"
                " http://host/train-{0000..0099}.tar, or a pipe: command"
            )
        if data.num_samples is None:
            yield "data.reader=webdataset needs data.num_samples: how many images make an epoch"
        layout = SampleLayout(data.stream_image, data.stream_label, data.stream_keys_with_dots)
        yield from layout.problems(SETTINGS)
        without_effect = (*_OF_INDEX, "sources", *Selection.model_fields)
    for key in without_effect:
        if _is_given(data, key):
            yield f"data.{key} has no effect with data.reader={data.reader}: remove it"
    if data.aug_repeats_form != "batch" and data.aug_repeats == 1:
        yield (
            f"data.aug_repeats_form={data.aug_repeats_form} has no effect at"
            " data.aug_repeats=1: remove it"
        )


def _selection_problems(selection: Selection, prefix: str) -> Iterator[str]:
    """Contradictions among the settings that select samples, whose names begin with `prefix`."""
    if selection.fraction is not None and selection.samples_per_class is not None:
        yield f"{prefix}fraction and {prefix}samples_per_class are both given: keep one of them"
    if selection.fraction is None and selection.fraction_of != "all":
        yield (
            f"{prefix}fraction_of has no effect without {prefix}fraction: give one, or remove it"
        )
    if selection.fraction is None and selection.samples_per_class is None and selection.subset_seed:
        yield (
            f"{prefix}subset_seed has no effect without {prefix}fraction or"
            f" {prefix}samples_per_class: remove it"
        )
    if selection.filter is not None:
        try:
            RowFilter(selection.filter)
        except ValueError as error:
            yield f"{prefix}filter: {error}"


def _source_problems(data: DataConfig) -> Iterator[str]:
    if not data.sources:
        return
    for key in Selection.model_fields:
        if _is_given(data, key):
            yield f"data.{key} has no effect with data.sources: give it in each source"
    for number, source in enumerate(data.sources):
        yield from _selection_problems(source, f"data.sources[{number}].")
    num_weights = sum(source.weight is not None for source in data.sources)
    if 0 < num_weights < len(data.sources):
        yield ("data.sources: some have a weight and some have none: give all of them one, or none")


def _augment_problems(augment: AugmentConfig) -> Iterator[str]:
    for key in ("crop_scale", "crop_ratio", "erasing_area", "erasing_aspect"):
        low, high = getattr(augment, key)
        if low > high:
            yield f"augment.{key} is [{low}, {high}]: the first must not exceed the second"
    for key in ("crop_scale", "crop_ratio"):
        if augment.crop == "simple" and _is_given(augment, key):
            yield (
                f"augment.{key} has no effect with augment.crop=simple: remove it, or set"
                " augment.crop=random_resized"
            )
    ops = augment.randaugment_ops
    magnitude = augment.randaugment_magnitude
    if magnitude > _LARGEST_MAGNITUDE[ops]:
        yield (
            f"augment.randaugment_magnitude={magnitude:g} is beyond the scale of"
            f" augment.randaugment_ops={ops}: 0 to {_LARGEST_MAGNITUDE[ops]}"
        )
    if ops == "torchvision" and magnitude % 1:
        yield (
            f"augment.randaugment_magnitude={magnitude:g}: torchvision's scale has whole numbers"
            " only, 0 to 30"
        )
    if ops != "timm" and augment.randaugment_magnitude_std is not None:
        yield (
            f"augment.randaugment_magnitude_std has no effect with augment.randaugment_ops={ops}:"
            " remove it"
        )
    if augment.three_augment and augment.randaugment_layers:
        yield (
            "augment.three_augment takes RandAugment's place: set augment.randaugment_layers to 0,"
            " or three_augment to false"
        )
    if augment.mixup_mode == "pair" and augment.mix_group_size % 2:
        yield (
            f"augment.mix_group_size={augment.mix_group_size} is odd, augment.mixup_mode=pair needs"
            " pairs: use an even number"
        )


def _grey_problems(augment: AugmentConfig, in_chans: int) -> Iterator[str]:
    """Operations on colours that grey images do not have."""
    if in_chans != 1:
        return
    needs_colour = "needs colour images (model.in_chans=3)"
    if augment.randaugment_layers:
        yield f"augment.randaugment_layers {needs_colour}: set it to 0"
    if augment.three_augment:
        yield f"augment.three_augment {needs_colour}: set it to false"
    *_, saturation, hue = augment.color_jitter
    if saturation or hue:
        yield (
            f"augment.color_jitter {needs_colour}: set its third and fourth number, saturation and"
            " hue, to 0"
        )
