"""Find contradictions between the settings of a `Config`. Each message includes a remedy.

`vit.config.schema` defines the allowed values of each setting. A `Config` calls `find_problems`
when it is created, so a contradictory `Config` cannot exist.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from vit.config.base import VAL, OnlyWith, Section, Selection, height_width
from vit.config.sample_layout import SETTINGS, layout_problems
from vit.system.redact import shown

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
Rules = dict[str, bool]
"""Maps each message (dotted keys, problem, remedy) to whether its problem exists."""


class Problem(NamedTuple):
    """A contradiction between settings."""

    text: str
    """The dotted keys, the problem, and the remedy, in one line."""
    void: tuple[str, ...] = ()
    """The settings of which one has no effect because of a setting in `because`. A config file's
    are dropped if the command line gives that setting (`vit.config.io.load_with_origins`)."""
    because: tuple[str, ...] = ()


class Contradictions(ValueError):
    """All contradictions of a config."""

    def __init__(self, problems: list[Problem]):
        super().__init__("\n".join(problem.text for problem in problems))
        self.problems = problems


def find_problems(config: Config) -> list[Problem]:
    """Return each contradiction in `config`."""
    names = type(config).model_fields
    rules = (
        _training_rules(config),
        _schedule_rules(config.schedule, config.optim),
        _loss_rules(config.loss, config.model.num_classes, config.stream),
        image_size_rules(config),
        _eval_set_rules(config.eval),
        _channel_rules(config.data, config.model.in_chans),
        _stream_rules(config.stream),
        _source_rules(config),
        _augment_rules(config.augment),
        _gray_rules(config.augment, config.model.in_chans),
        run_rules(config.run),
    )
    voids = [
        *(each for name in names for each in _void(config, getattr(config, name), f"{name}.")),
        *_void_in_sources(config),
        *_void_by_others(config),
    ]
    return voids + [Problem(text) for part in rules for text, holds in part.items() if holds]


def _is_given(section: Section, key: str) -> bool:
    """Return whether a setting differs from its default."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


def _void(config: Config, section: Section, prefix: str) -> Iterator[Problem]:
    """Yield the settings of `section` without those they need (`OnlyWith`). prefix: "optim."."""
    for key, field in type(section).model_fields.items():
        if not _is_given(section, key):
            continue
        for needed in [each for each in field.metadata if isinstance(each, OnlyWith)]:
            fits, keys, values, remedies = zip(
                *(_judge(config, section, prefix, each) for each in needed.conditions), strict=True
            )
            default = field.default
            if not isinstance(default, str):
                default = json.dumps(default, separators=(",", ":"))
            # An item of a list cannot be set on the command line.
            unset = f"remove {prefix}{key}" if "[" in prefix else f"{prefix}{key}={default}"
            text = (
                f"{prefix}{key} has no effect with {' and '.join(values)}: set"
                f" {' or '.join(remedies)}, or {unset}"
            )
            if not any(fits):
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


def _training_rules(config: Config) -> Rules:
    rules: Rules = {}
    for name, first, second in EXCLUSIVE:
        section = getattr(config, name)
        num_given = sum(getattr(section, key) is not None for key in (first, second))
        both = f"{name}.{first} and {name}.{second} are both given: keep one of them"
        neither = f"neither {name}.{first} nor {name}.{second} is given: give one of them"
        rules |= {both: num_given == 2, neither: num_given == 0 and name == "train"}
    optim = config.optim
    return rules | {
        "optim.adjust_lr_fn=original needs optim.name=muon: set"
        " optim.adjust_lr_fn=match_rms_adamw or rms_to_rms": (
            optim.name == "adamuon" and optim.adjust_lr_fn == "original"
        ),
        "train.exact_over_ranks needs an exact order of samples, but stream.urls has none:"
        " set stream.urls=null": (config.train.exact_over_ranks and config.stream.urls is not None),
    }


def _loss_rules(loss: LossConfig, num_classes: int | None, stream: StreamConfig) -> Rules:
    weights = loss.class_weights
    # Label smoothing gives each class at least this target.
    least = loss.label_smoothing / (num_classes or 1000)
    threshold = loss.bce_target_thresh
    return {
        f"loss.bce_target_thresh={threshold} is below the target that loss.label_smoothing gives"
        " every class: raise it, or set loss.label_smoothing=0": (
            threshold is not None and threshold < least
        ),
        "loss.class_weights are all 0: give at least one class a weight": weights is not None
        and not any(weights),
        "loss.class_weights=balanced needs the number of images per class, which is unknown for a"
        " stream: give the weights as numbers, or set stream.urls=null": (
            weights == "balanced" and stream.urls is not None
        ),
    }


def _schedule_rules(schedule: ScheduleConfig, optim: OptimConfig) -> Rules:
    return {
        f"schedule.min_lr={schedule.min_lr} exceeds optim.lr={optim.lr}: lower schedule.min_lr": (
            schedule.min_lr > optim.lr
        ),
        f"schedule.warmup_lr={schedule.warmup_lr} exceeds optim.lr={optim.lr}: lower"
        " schedule.warmup_lr": schedule.warmup_lr is not None and schedule.warmup_lr > optim.lr,
        "schedule.cooldown_epochs trains with schedule.min_lr, which is 0: raise schedule.min_lr,"
        " or set schedule.cooldown_epochs=null": (
            schedule.cooldown_epochs is not None and schedule.min_lr == 0
        ),
    }


def _eval_set_rules(config: EvalConfig) -> Rules:
    names = ", ".join(dict.fromkeys([VAL, *config.sets]))
    return {
        f"eval.sets.{VAL}: the name is reserved for data.val_split: use another": (
            VAL in config.sets
        ),
        f"eval.best_by={config.best_by} is not a set of this run: use one of {names}": (
            config.best_by not in (VAL, *config.sets)
        ),
    } | {
        f"eval.sets.{name} is the same as data.val_split: give root, split or labels, or remove"
        " it": chosen == type(chosen)()
        for name, chosen in config.sets.items()
    }


def _channel_rules(data: DataConfig, in_chans: int) -> Rules:
    allowed = "1" if in_chans == 1 else f"1 or {in_chans}"
    numbers = {"mean": len(data.mean), "std": len(data.std)}
    return {
        f"data.{key} has {number} values, but model.in_chans is {in_chans}: give {allowed}": (
            number not in (1, in_chans)
        )
        for key, number in numbers.items()
    }


def _stream_rules(stream: StreamConfig) -> Rules:
    """Check the settings of a stream."""
    if stream.urls is None:
        return {}
    problems = layout_problems(stream.image, stream.label, keys_with_dots=False, names=SETTINGS)
    return {
        "stream.urls needs stream.num_samples: give the number of images per epoch": (
            stream.num_samples is None
        ),
        **dict.fromkeys(problems, True),
    }


def _source_rules(config: Config) -> Rules:
    sources = config.data.sources
    num_weights = sum(source.weight is not None for source in sources)
    return {
        "data.sources: only some sources have a weight: give a weight to all of them, or to none": (
            0 < num_weights < len(sources)
        )
    }


def _void_in_sources(config: Config) -> Iterator[Problem]:
    """Yield the settings of `data` that its sources replace, and those without effect in them."""
    data = config.data
    for key in Selection.model_fields if data.sources else ():
        if _is_given(data, key):
            yield Problem(
                f"data.{key} has no effect with data.sources: set it in each source",
                (f"data.{key}",),
                ("data.sources",),
            )
    for number, source in enumerate(data.sources):
        yield from _void(config, source, f"data.sources[{number}].")


def _void_by_others(config: Config) -> list[Problem]:
    """Return the settings without effect beside a value of another setting."""
    augment, init, run = config.augment, config.init, config.run
    end, epochs = augment.mixup_off_epoch, config.train.epochs
    decay = config.schedule.final_weight_decay
    policies = ("augment.auto_augment", "augment.randaugment_layers")
    heads = ("init.select_classes", "init.reset_head")
    rules = {
        Problem(
            f"augment.auto_augment={augment.auto_augment} replaces RandAugment: set"
            " augment.randaugment_layers=0 or augment.auto_augment=null",
            policies,
            policies,
        ): augment.auto_augment is not None and augment.randaugment_layers > 0,
        Problem(
            "init.select_classes keeps rows of the head, but init.reset_head drops the head: set"
            " init.select_classes=false or init.reset_head=false",
            heads,
            heads,
        ): init.select_classes and init.reset_head,
        Problem(
            f"augment.mixup_off_epoch={end} has no effect with train.epochs={epochs}: lower it, or"
            " set augment.mixup_off_epoch=null",
            ("augment.mixup_off_epoch",),
            ("train.epochs",),
        ): end is not None and epochs is not None and end >= epochs,
        Problem(
            f"schedule.final_weight_decay={decay} equals optim.weight_decay: set"
            " schedule.final_weight_decay=null",
            ("schedule.final_weight_decay",),
            ("optim.weight_decay",),
        ): decay == config.optim.weight_decay,
        Problem(
            "run.local_dir has no effect if run.dir is a folder: set run.dir to a URL, or"
            " run.local_dir=null",
            ("run.local_dir",),
            ("run.dir",),
        ): run.local_dir is not None and "://" not in (run.dir or ""),
    }
    return [problem for problem, holds in rules.items() if holds]


def _augment_rules(augment: AugmentConfig) -> Rules:
    rules: Rules = {}
    for key in ("crop_scale", "crop_ratio", "erasing_area", "erasing_aspect"):
        low, high = getattr(augment, key)
        rules[f"augment.{key} is [{low}, {high}]: the first must not exceed the second"] = (
            low > high
        )
    ops = augment.randaugment_ops
    magnitude = augment.randaugment_magnitude
    largest = _LARGEST_MAGNITUDE[ops]
    return rules | {
        f"augment.randaugment_magnitude={magnitude:g} is outside the scale of"
        f" augment.randaugment_ops={ops}: use 0 to {largest}": magnitude > largest,
        f"augment.randaugment_magnitude={magnitude:g} is not an integer: torchvision's scale has"
        " the integers from 0 to 30": ops == "torchvision" and magnitude % 1 != 0,
        f"augment.mix_group_size={augment.mix_group_size} is odd, but augment.mixup_mode=pair needs"
        " pairs: use an even number": (
            augment.mixup_mode == "pair" and augment.mix_group_size % 2 == 1
        ),
    }


def _gray_rules(augment: AugmentConfig, in_chans: int) -> Rules:
    """Check that no color operation is applied to grayscale images."""
    is_gray = in_chans == 1
    needs_color = "needs color images (model.in_chans=3)"
    *_, saturation, hue = augment.color_jitter
    return {
        f"augment.randaugment_layers {needs_color}: set augment.randaugment_layers=0": (
            is_gray and augment.randaugment_layers > 0
        ),
        f"augment.auto_augment {needs_color}: set augment.auto_augment=null": (
            is_gray and augment.auto_augment is not None
        ),
        f"augment.color_jitter {needs_color}: set its third and fourth number, saturation and hue,"
        " to 0": is_gray and (saturation > 0 or hue > 0),
    }


_URL = re.compile(r"[a-z][a-z0-9+.-]+://.")
_SLIP = re.compile(r"\s*(?:[a-z][a-z0-9+.-]+:/|(?:s3a?|gs|gcs):|(?:s3a?|gs|gcs)//)", re.IGNORECASE)
"""Matches misspelled URLs: `s3:/bucket`, `S3://bucket`, `s3://`, `s3:bucket`, `s3//bucket`."""


def run_rules(run: RunConfig) -> dict[str, bool]:
    """Check the `run` section. Returns `Rules`."""
    place = run.dir or ""
    is_url = _URL.match(place) is not None
    return {
        f"run.dir={place} looks like a misspelled URL: expected a folder, or a URL such as"
        " s3://bucket/runs/name": not is_url and _SLIP.match(place) is not None,
        "run.dir: the URL of a run must not have a query (?...): remove it": (
            is_url and "?" in place
        ),
    }


def image_size_rules(config: Config) -> dict[str, bool]:
    """Check `schedule.image_sizes`. Returns `Rules`."""
    stages = config.schedule.image_sizes
    model = config.model
    epochs = config.train.epochs
    name = re.fullmatch(r"vit_.+?([1-9]\d*)", model.name)
    rules = {
        f"schedule.image_sizes does not work with timm's models, such as model.name={model.name}:"
        " set schedule.image_sizes=[], or use a model of this project, such as vit_s16": (
            bool(stages) and model.name.startswith("timm/")
        )
    }
    patch = height_width(model.patch_size or (int(name[1]) if name else 1))
    following = [*(stage.image_size for stage in stages[1:]), model.image_size]
    before = 0
    for number, (stage, after) in enumerate(zip(stages, following, strict=False)):
        size = height_width(stage.image_size)
        key = f"schedule.image_sizes[{number}]"
        around = [_multiple(size, patch, more) for more in (0, 1)]
        near = " and ".join(_side(each) for each in around if all(each))
        rules |= {
            f"{key}.image_size={_side(size)} is not a multiple of the patch size {_side(patch)}:"
            f" the nearest multiples are {near}": any(
                side % of_patch for side, of_patch in zip(size, patch, strict=True)
            ),
            f"{key}.until_epoch={stage.until_epoch} is not after {before}, the end of the previous"
            " stage: put the stages in order": stage.until_epoch <= before,
            f"{key}.until_epoch={stage.until_epoch} is not before train.epochs={epochs}, but the"
            " last epochs use model.image_size: lower it, or set schedule.image_sizes=[]": (
                epochs is not None and stage.until_epoch >= epochs
            ),
            f"{key}.image_size={_side(size)} is also the size of the epochs after it: merge the"
            " stages": size == height_width(after),
        }
        before = max(before, stage.until_epoch)
    return rules


def _multiple(size: tuple[int, int], patch: tuple[int, int], more: int) -> tuple[int, int]:
    """Return `size` rounded down to a multiple of the patch; with more=1, rounded up."""
    height, width = (
        (side + more * (of_patch - 1)) // of_patch * of_patch
        for side, of_patch in zip(size, patch, strict=True)
    )
    return height, width


def _side(size: tuple[int, int]) -> str:
    return str(size[0]) if size[0] == size[1] else f"[{size[0]}, {size[1]}]"
