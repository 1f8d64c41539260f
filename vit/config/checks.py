"""Find contradictions between the settings of a `Config`. Each message includes a remedy.

`vit.config.schema` defines the allowed values of each setting. A `Config` calls `find_problems`
when it is created, so a contradictory `Config` cannot exist.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vit.config.base import VAL, OnlyWith, Section, Selection, SourceConfig, height_width
from vit.config.sample_layout import SETTINGS, layout_problems
from vit.system.redact import shown
from vit.system.urls import is_url

if TYPE_CHECKING:
    from vit.config.optim_section import OptimConfig
    from vit.config.schema import (
        AugmentConfig,
        Config,
        DataConfig,
        EvalConfig,
        LossConfig,
        RunConfig,
        ScheduleConfig,
        StreamConfig,
    )

EXCLUSIVE = (
    ("train", "epochs", "steps"),
    ("schedule", "warmup_epochs", "warmup_steps"),
    ("eval", "every_epochs", "every_steps"),
)
"""Mutually exclusive settings, as (section, setting, setting)."""
_LARGEST_MAGNITUDE = {"timm": 10, "timm_inc0": 10, "torchvision": 30, "big_vision": 20}


class Problem(NamedTuple):
    """A contradiction between settings."""

    text: str
    """The dotted keys, the problem, and the remedy, in one line."""
    void: tuple[str, ...] = ()
    """Settings, one of which has no effect because of a setting in `because`. If the command line
    gives that setting, the config file's values of these settings are dropped
    (`vit.config.io.load_with_origins`)."""
    because: tuple[str, ...] = ()


class Contradictions(ValueError):
    """All contradictions of a config."""

    def __init__(self, problems: list[Problem]):
        super().__init__("\n".join(problem.text for problem in problems))
        self.problems = problems


def find_problems(config: Config) -> list[Problem]:
    """Return each contradiction in `config`."""
    voids: list[Problem] = []
    for name in type(config).model_fields:
        voids += _void(config, getattr(config, name), f"{name}.")
    voids += _void_in_sources(config)
    voids += _void_by_others(config)

    texts = [
        *_training_rules(config),
        *_schedule_rules(config.schedule, config.optim),
        *_loss_rules(config.loss, config.model.num_classes, config.stream),
        *image_size_rules(config),
        *_eval_set_rules(config.eval),
        *_channel_rules(config.data, config.model.in_chans),
        *_stream_rules(config.stream),
        *_source_rules(config.data.sources),
        *_augment_rules(config.augment),
        *_gray_rules(config.augment, config.model.in_chans),
        *run_rules(config.run),
    ]
    return voids + [Problem(text) for text in texts]


def _is_given(section: Section, key: str) -> bool:
    """Return whether a setting differs from its default."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


def _void(config: Config, section: Section, prefix: str) -> Iterator[Problem]:
    """Yield a problem for each setting of `section` that lacks a setting it needs (`OnlyWith`).
    prefix: the start of the settings' keys, such as "optim."."""
    for key, field in type(section).model_fields.items():
        if not _is_given(section, key):
            continue

        needs = [each for each in field.metadata if isinstance(each, OnlyWith)]
        for needed in needs:
            verdicts = [_judge(config, section, prefix, each) for each in needed.conditions]
            fits, keys, values, remedies = zip(*verdicts, strict=True)
            default = (
                field.default
                if isinstance(field.default, str)
                else json.dumps(field.default, separators=(",", ":"))
            )
            # An item of a list cannot be set on the command line.
            unset = f"remove {prefix}{key}" if "[" in prefix else f"{prefix}{key}={default}"

            if not any(fits):
                text = (
                    f"{prefix}{key} has no effect with {' and '.join(values)}: set"
                    f" {' or '.join(remedies)}, or {unset}"
                )
                yield Problem(text, (f"{prefix}{key}",), keys)

    if isinstance(section, Selection) and None not in (section.fraction, section.samples_per_class):
        both = (f"{prefix}fraction", f"{prefix}samples_per_class")
        yield Problem(f"{' and '.join(both)} are both given: keep one of them", both, both)


def _judge(
    config: Config, section: Section, prefix: str, condition: str
) -> tuple[bool, str, str, str]:
    """Return whether an `OnlyWith` condition holds, its setting, the current value, and a
    remedy."""
    name, relation, allowed = re.split("(!?=|$)", condition, maxsplit=1)
    owner, _, key = name.rpartition(".")
    name = name if owner else prefix + key
    value: object = getattr(getattr(config, owner) if owner else section, key)
    text = value if isinstance(value, str) else json.dumps(value)
    current = f"{name}={shown(text)}"  # a stream command may contain a login

    if relation == "=":
        return text in allowed.split("|"), name, current, f"{name}={allowed.replace('|', ' or ')}"
    if relation:
        return text != allowed, name, current, f"another {name}"
    return value not in (None, 0, "none", ()), name, current, name


def _training_rules(config: Config) -> Iterator[str]:
    """Check the pairs in `EXCLUSIVE`, `train.exact_over_ranks` and AdaMuon."""
    for name, first, second in EXCLUSIVE:
        section = getattr(config, name)
        num_given = sum(getattr(section, key) is not None for key in (first, second))
        if num_given == 2:
            yield f"{name}.{first} and {name}.{second} are both given: keep one of them"
        if num_given == 0 and name == "train":
            yield f"neither {name}.{first} nor {name}.{second} is given: give one of them"

    if config.optim.name == "adamuon" and config.optim.adjust_lr_fn == "original":
        yield (
            "optim.adjust_lr_fn=original needs optim.name=muon: set"
            " optim.adjust_lr_fn=match_rms_adamw or rms_to_rms"
        )
    if config.train.exact_over_ranks and config.stream.urls is not None:
        yield (
            "train.exact_over_ranks needs an exact order of samples, but stream.urls has none:"
            " set stream.urls=null"
        )


def _loss_rules(loss: LossConfig, num_classes: int | None, stream: StreamConfig) -> Iterator[str]:
    """Check the `loss` section."""
    # Label smoothing gives each class at least this target.
    smallest_target = loss.label_smoothing / (num_classes or 1000)
    if loss.bce_target_thresh is not None and loss.bce_target_thresh < smallest_target:
        yield (
            f"loss.bce_target_thresh={loss.bce_target_thresh} is below the target that"
            " loss.label_smoothing gives every class: raise it, or set loss.label_smoothing=0"
        )

    if loss.class_weights is not None and not any(loss.class_weights):
        yield "loss.class_weights are all 0: give at least one class a weight"
    if loss.class_weights == "balanced" and stream.urls is not None:
        yield (
            "loss.class_weights=balanced needs the number of images per class, which is unknown"
            " for a stream: give the weights as numbers, or set stream.urls=null"
        )


def _schedule_rules(schedule: ScheduleConfig, optim: OptimConfig) -> Iterator[str]:
    """Check the learning rates of the schedule."""
    if schedule.min_lr > optim.lr:
        yield (
            f"schedule.min_lr={schedule.min_lr} exceeds optim.lr={optim.lr}: lower schedule.min_lr"
        )
    if schedule.warmup_lr is not None and schedule.warmup_lr > optim.lr:
        yield (
            f"schedule.warmup_lr={schedule.warmup_lr} exceeds optim.lr={optim.lr}: lower"
            " schedule.warmup_lr"
        )
    if schedule.cooldown_epochs is not None and schedule.min_lr == 0:
        yield (
            "schedule.cooldown_epochs trains with schedule.min_lr, which is 0: raise"
            " schedule.min_lr, or set schedule.cooldown_epochs=null"
        )


def _eval_set_rules(config: EvalConfig) -> Iterator[str]:
    """Check the names and settings in `eval.sets`, and `eval.best_by`."""
    if VAL in config.sets:
        yield f"eval.sets.{VAL}: the name is reserved for data.val_split: use another"

    names = dict.fromkeys([VAL, *config.sets])
    if config.best_by not in names:
        yield (
            f"eval.best_by={config.best_by} is not a set of this run: use one of {', '.join(names)}"
        )

    for name, eval_set in config.sets.items():
        if eval_set == type(eval_set)():
            yield (
                f"eval.sets.{name} is the same as data.val_split: give root, split or labels, or"
                " remove it"
            )


def _channel_rules(data: DataConfig, in_chans: int) -> Iterator[str]:
    """Check that mean and std have one value, or one per channel."""
    allowed = "1" if in_chans == 1 else f"1 or {in_chans}"
    for key, number in (("mean", len(data.mean)), ("std", len(data.std))):
        if number not in (1, in_chans):
            yield (
                f"data.{key} has {number} values, but model.in_chans is {in_chans}: give {allowed}"
            )


def _stream_rules(stream: StreamConfig) -> Iterator[str]:
    """Check the settings of a stream."""
    if stream.urls is None:
        return

    if stream.num_samples is None:
        yield "stream.urls needs stream.num_samples: give the number of images per epoch"
    yield from dict.fromkeys(
        layout_problems(stream.image, stream.label, keys_with_dots=False, names=SETTINGS)
    )


def _source_rules(sources: Sequence[SourceConfig]) -> Iterator[str]:
    if 0 < sum(source.weight is not None for source in sources) < len(sources):
        yield (
            "data.sources: only some sources have a weight: give a weight to all of them, or to"
            " none"
        )


def _void_in_sources(config: Config) -> Iterator[Problem]:
    """Yield a problem for each setting of `data` that its sources replace, and for each setting of
    a source that has no effect."""
    for key in Selection.model_fields:
        if config.data.sources and _is_given(config.data, key):
            yield Problem(
                f"data.{key} has no effect with data.sources: set it in each source",
                (f"data.{key}",),
                ("data.sources",),
            )

    for number, source in enumerate(config.data.sources):
        yield from _void(config, source, f"data.sources[{number}].")


def _void_by_others(config: Config) -> Iterator[Problem]:
    """Yield a problem for each setting that has no effect because of another setting's value."""
    augment = config.augment
    if augment.auto_augment is not None and augment.randaugment_layers > 0:
        yield Problem(
            f"augment.auto_augment={augment.auto_augment} replaces RandAugment: set"
            " augment.randaugment_layers=0 or augment.auto_augment=null",
            ("augment.auto_augment", "augment.randaugment_layers"),
            ("augment.auto_augment", "augment.randaugment_layers"),
        )

    if config.init.select_classes and config.init.reset_head:
        yield Problem(
            "init.select_classes keeps rows of the head, but init.reset_head drops the head: set"
            " init.select_classes=false or init.reset_head=false",
            ("init.select_classes", "init.reset_head"),
            ("init.select_classes", "init.reset_head"),
        )

    end, epochs = augment.mixup_off_epoch, config.train.epochs
    is_never_off = end is not None and epochs is not None and end >= epochs
    if is_never_off:
        yield Problem(
            f"augment.mixup_off_epoch={end} has no effect with train.epochs={epochs}: lower it, or"
            " set augment.mixup_off_epoch=null",
            ("augment.mixup_off_epoch",),
            ("train.epochs",),
        )

    decay = config.schedule.final_weight_decay
    if decay == config.optim.weight_decay:
        yield Problem(
            f"schedule.final_weight_decay={decay} equals optim.weight_decay: set"
            " schedule.final_weight_decay=null",
            ("schedule.final_weight_decay",),
            ("optim.weight_decay",),
        )

    if config.run.local_dir is not None and "://" not in (config.run.dir or ""):
        yield Problem(
            "run.local_dir has no effect if run.dir is a folder: set run.dir to a URL, or"
            " run.local_dir=null",
            ("run.local_dir",),
            ("run.dir",),
        )


def _augment_rules(augment: AugmentConfig) -> Iterator[str]:
    """Check the augmentation ranges, the RandAugment magnitude and the mixing groups."""
    for key in ("crop_scale", "crop_ratio", "erasing_area", "erasing_aspect"):
        low, high = getattr(augment, key)
        if low > high:
            yield f"augment.{key} is [{low}, {high}]: the first must not exceed the second"

    ops = augment.randaugment_ops
    magnitude = augment.randaugment_magnitude
    largest = _LARGEST_MAGNITUDE[ops]
    if magnitude > largest:
        yield (
            f"augment.randaugment_magnitude={magnitude:g} is outside the scale of"
            f" augment.randaugment_ops={ops}: use 0 to {largest}"
        )
    if ops == "torchvision" and magnitude % 1 != 0:
        yield (
            f"augment.randaugment_magnitude={magnitude:g} is not an integer: torchvision's scale"
            " has the integers from 0 to 30"
        )

    if augment.mixup_mode == "pair" and augment.mix_group_size % 2 == 1:
        yield (
            f"augment.mix_group_size={augment.mix_group_size} is odd, but augment.mixup_mode=pair"
            " needs pairs: use an even number"
        )


def _gray_rules(augment: AugmentConfig, in_chans: int) -> Iterator[str]:
    """Check that no color operation is applied to grayscale images."""
    if in_chans != 1:
        return

    needs_color = "needs color images (model.in_chans=3)"
    if augment.randaugment_layers > 0:
        yield f"augment.randaugment_layers {needs_color}: set augment.randaugment_layers=0"
    if augment.auto_augment is not None:
        yield f"augment.auto_augment {needs_color}: set augment.auto_augment=null"
    *_, saturation, hue = augment.color_jitter
    if saturation > 0 or hue > 0:
        yield (
            f"augment.color_jitter {needs_color}: set its third and fourth number, saturation and"
            " hue, to 0"
        )


_SLIP = re.compile(r"\s*(?:[a-z][a-z0-9+.-]+:/|(?:s3a?|gs|gcs):|(?:s3a?|gs|gcs)//)", re.IGNORECASE)
"""Matches misspelled URLs: `s3:/bucket`, `S3://bucket`, `s3://`, `s3:bucket`, `s3//bucket`."""


def run_rules(run: RunConfig) -> Iterator[str]:
    """Check the `run` section."""
    place = run.dir or ""
    if not is_url(place) and _SLIP.match(place):
        yield (
            f"run.dir={place} looks like a misspelled URL: expected a folder, or a URL such as"
            " s3://bucket/runs/name"
        )
    if is_url(place) and "?" in place:
        yield "run.dir: the URL of a run must not have a query (?...): remove it"


def image_size_rules(config: Config) -> Iterator[str]:
    """Check `schedule.image_sizes`."""
    stages = config.schedule.image_sizes
    epochs = config.train.epochs
    if stages and config.model.name.startswith("timm/"):
        yield (
            "schedule.image_sizes does not work with timm's models, such as"
            f" model.name={config.model.name}: set schedule.image_sizes=[], or use a model of this"
            " project, such as vit_s16"
        )

    # A name such as vit_s16 ends in the patch size.
    name = re.fullmatch(r"vit_.+?(?P<patch>[1-9]\d*)", config.model.name)
    patch = height_width(config.model.patch_size or (int(name["patch"]) if name else 1))
    sizes = [height_width(stage.image_size) for stage in stages]
    later_sizes = [*sizes[1:], height_width(config.model.image_size)]
    previous_end = 0
    for number, stage in enumerate(stages):
        key = f"schedule.image_sizes[{number}]"
        size = sizes[number]
        smaller = _multiple(size, patch)
        if size != smaller:
            nearest = (smaller, _multiple(size, patch, more=1))
            near = " and ".join(_side(each) for each in nearest if all(each))
            yield (
                f"{key}.image_size={_side(size)} is not a multiple of the patch size"
                f" {_side(patch)}: the nearest multiples are {near}"
            )

        if stage.until_epoch <= previous_end:
            yield (
                f"{key}.until_epoch={stage.until_epoch} is not after {previous_end}, the end of the"
                " previous stage: put the stages in order"
            )
        if epochs is not None and stage.until_epoch >= epochs:
            yield (
                f"{key}.until_epoch={stage.until_epoch} is not before train.epochs={epochs}, but"
                " the last epochs use model.image_size: lower it, or set schedule.image_sizes=[]"
            )
        if size == later_sizes[number]:
            yield (
                f"{key}.image_size={_side(size)} is also the size of the epochs after it: merge the"
                " stages"
            )

        previous_end = max(previous_end, stage.until_epoch)


def _multiple(size: tuple[int, int], patch: tuple[int, int], more: int = 0) -> tuple[int, int]:
    """Return `size` rounded down to a multiple of the patch size, or rounded up if `more` is 1."""
    height, width = (
        (side + more * (of_patch - 1)) // of_patch * of_patch
        for side, of_patch in zip(size, patch, strict=True)
    )
    return height, width


def _side(size: tuple[int, int]) -> str:
    return str(size[0]) if size[0] == size[1] else f"[{size[0]}, {size[1]}]"
