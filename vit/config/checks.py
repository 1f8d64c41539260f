"""What cannot be together in a `Config`, found across its sections, each with its remedy.

`vit.config.schema` says what each setting may be by itself. A `Config` calls `find_problems` when
it is made, so that none exists that contradicts itself. A rule is its message and whether it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vit.config.base import Section, Selection
from vit.config.eval_section import VAL
from vit.config.run_checks import run_rules
from vit.config.size_checks import image_size_rules
from vit.data.row_filter import RowFilter
from vit.data.shards.members import SETTINGS, SampleLayout

if TYPE_CHECKING:
    from vit.config.distill_section import DistillConfig
    from vit.config.eval_section import EvalConfig
    from vit.config.guard_section import GuardConfig
    from vit.config.loss_section import LossConfig
    from vit.config.optim_section import OptimConfig
    from vit.config.schedule_section import ScheduleConfig
    from vit.config.schema import AugmentConfig, Config, DataConfig, ModelConfig

EXCLUSIVE = (
    ("train", "epochs", "steps"),
    ("schedule", "warmup_epochs", "warmup_steps"),
    ("schedule", "decay_epochs", "decay_steps"),
    ("eval", "every_epochs", "every_steps"),
)
"""Sections with two settings of which one at most is given."""
_OF_INDEX = ("num_lanes", "block_samples", "window_blocks", "aug_repeats", "aug_repeats_form")
"""Settings of `data` that only `reader: index` reads, next to those that select samples."""
_OF_STREAM = ("stream", "stream_image", "stream_label", "stream_keys_with_dots", "num_samples")
"""Settings of `data` that only `reader: webdataset` reads."""
_LARGEST_MAGNITUDE = {"timm": 10, "timm_inc0": 10, "torchvision": 30, "big_vision": 20}
_WITH_STD = ("original", "originalr", "v0", "v0r")
"""AutoAugment's policies whose strengths may vary."""
Rules = dict[str, bool]
"""What is wrong, in dotted keys and with a remedy -> whether it is."""


def find_problems(config: Config) -> list[str]:
    """All contradictions in `config`, one line each, in dotted keys."""
    rules = _training_rules(config)
    rules |= _distill_rules(config.distill, config.loss)
    rules |= _guard_rules(config.guard, config.data)
    rules |= _drop_path_rules(config.model)
    rules |= _rope_rules(config.model)
    rules |= image_size_rules(config)
    rules |= _view_rules(config.eval, config.model)
    rules |= _eval_set_rules(config.eval)
    rules |= _channel_rules(config.data, config.model.in_chans)
    rules |= _reader_rules(config.data)
    rules |= _selection_rules(config.data, "data.")
    rules |= _source_rules(config.data)
    rules |= _augment_rules(config.augment)
    rules |= _mixing_rules(config.augment, config.train.epochs)
    rules |= _grey_rules(config.augment, config.model.in_chans)
    rules |= run_rules(config.run)
    return [problem for problem, holds in rules.items() if holds]


def _is_given(section: Section, key: str) -> bool:
    """Whether a setting differs from its default."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


def _training_rules(config: Config) -> Rules:
    rules: Rules = {}
    for name, first, second in EXCLUSIVE:
        section = getattr(config, name)
        num_given = sum(getattr(section, key) is not None for key in (first, second))
        both = f"{name}.{first} and {name}.{second} are both given: keep one of them"
        neither = f"neither {name}.{first} nor {name}.{second} is given: give one of them"
        rules |= {both: num_given == 2, neither: num_given == 0 and name == "train"}
    schedule = config.schedule
    optim = config.optim
    return rules | {
        **_schedule_rules(schedule, optim),
        **_loss_rules(config.loss, config.model.num_classes, config.data.reader),
        "optim.nesterov needs optim.momentum above 0": (
            optim.name == "sgd" and optim.nesterov and optim.momentum == 0
        ),
        **_optimizer_rules(optim),
        **{
            f"train.{key} has no effect without train.ema_decay: give one": (
                _is_given(config.train, key) and config.train.ema_decay is None
            )
            for key in ("ema_warmup", "ema_every_steps", "ema_after_epochs")
        },
        "train.ema_warmup_power has no effect without train.ema_warmup=true: set it, or remove the"
        " power": config.train.ema_warmup_power is not None and not config.train.ema_warmup,
        "train.ema_warmup_gamma has no effect without train.ema_warmup_power: give one, or remove"
        " it": _is_given(config.train, "ema_warmup_gamma")
        and config.train.ema_warmup_power is None,
        f"model.weight_init={config.model.weight_init} has no effect with the weights of"
        " init.checkpoint: remove it": config.model.weight_init is not None
        and config.init.checkpoint is not None,
        "train.exact_over_ranks needs an exact order, which data.reader=webdataset has not: read by"
        " the index": config.train.exact_over_ranks and config.data.reader == "webdataset",
        "model.init_head_bias has no effect with the head of init.checkpoint: remove it, or set"
        " init.reset_head=true": config.model.init_head_bias is not None
        and config.init.checkpoint is not None
        and not config.init.reset_head,
        f"train.activation_checkpointing={config.train.activation_checkpointing} has no effect with"
        " init.freeze=backbone, where no block keeps anything for a backward pass: set none": (
            config.train.activation_checkpointing != "none" and config.init.freeze == "backbone"
        ),
        "optim.layer_decay has no effect with init.freeze=backbone, which trains the head alone:"
        " remove it": optim.layer_decay is not None and config.init.freeze == "backbone",
        "init.reset_head has no effect without init.checkpoint: give one, or remove"
        " init.reset_head": config.init.reset_head and config.init.checkpoint is None,
        "init.select_classes has no effect without init.checkpoint: give one, or remove"
        " init.select_classes": config.init.select_classes and config.init.checkpoint is None,
        "init.select_classes keeps rows of the head, init.reset_head drops it: keep one of"
        " them": config.init.select_classes and config.init.reset_head,
        f"init.freeze={config.init.freeze} keeps weights as they are, but init.checkpoint gives"
        " none: give one, or remove init.freeze": config.init.freeze != "none"
        and config.init.checkpoint is None,
    }


def _loss_rules(loss: LossConfig, num_classes: int | None, reader: str) -> Rules:
    weights = loss.class_weights
    # Smoothing gives each class at least this much.
    least = loss.label_smoothing / (num_classes or 1000)
    threshold = loss.bce_target_thresh
    return {
        f"loss.{key} has no effect with loss.name={loss.name}: remove it": (
            loss.name != "bce" and _is_given(loss, key)
        )
        for key in ("bce_target_thresh", "bce_sum")
    } | {
        f"loss.bce_target_thresh={threshold} makes each class a target, as loss.label_smoothing"
        " gives each a part: raise it, or set loss.label_smoothing=0": (
            threshold is not None and threshold < least
        ),
        "loss.class_weights are all 0: nothing would be trained": weights is not None
        and not any(weights),
        "loss.class_weights=balanced counts the images of each class, which a stream does not know:"
        " give the weights as numbers, or use data.reader=index": (
            weights == "balanced" and reader == "webdataset"
        ),
    }


def _distill_rules(distill: DistillConfig, loss: LossConfig) -> Rules:
    rules = {
        f"distill.{key} has no effect without distill.teacher: give one, or remove it": (
            distill.teacher is None and _is_given(distill, key)
        )
        for key in type(distill).model_fields
        if key != "teacher"
    } | {
        f"loss.{key} has no effect with distill.task_loss_weight=0: remove it": (
            distill.task_loss_weight == 0 and _is_given(loss, key)
        )
        for key in type(loss).model_fields
    }
    return rules | {
        "distill.temperature has no effect with distill.distill_type=hard: remove it, or set"
        " soft": (
            distill.teacher is not None
            and distill.distill_type == "hard"
            and _is_given(distill, "temperature")
        )
    }


def _schedule_rules(schedule: ScheduleConfig, optim: OptimConfig) -> Rules:
    name = schedule.name
    has_warmup = bool(schedule.warmup_steps or schedule.warmup_epochs)
    has_decay = schedule.decay_steps is not None or schedule.decay_epochs is not None
    moves = name in ("cosine", "linear")
    rules = {
        f"schedule.{key} has no effect with schedule.name={name}: remove it": (
            name != "wsd" and _is_given(schedule, key)
        )
        for key in ("decay_steps", "decay_epochs", "decay_form")
    }
    return rules | {
        "schedule.min_lr has no effect with schedule.name=constant: remove it": (
            name == "constant" and schedule.min_lr > 0
        ),
        f"schedule.min_lr={schedule.min_lr} exceeds optim.lr={optim.lr}: the rate falls towards"
        " it": schedule.min_lr > optim.lr,
        "schedule.name=wsd needs a length of its decay: give schedule.decay_epochs or"
        " decay_steps": name == "wsd" and not has_decay,
        "schedule.warmup_lr has no effect without a warm-up: give schedule.warmup_epochs, or remove"
        " it": schedule.warmup_lr is not None and not has_warmup,
        f"schedule.warmup_lr={schedule.warmup_lr} exceeds optim.lr={optim.lr}: the rate rises from"
        " it": schedule.warmup_lr is not None and schedule.warmup_lr > optim.lr,
        "schedule.warmup_prefix=false has no effect without a warm-up before a cosine or a line:"
        " remove it": not schedule.warmup_prefix and not (has_warmup and moves),
        "schedule.interval=epoch has no effect on a rate that never changes: remove it": (
            schedule.interval == "epoch" and name == "constant" and not has_warmup
        ),
        "schedule.cooldown_epochs has no effect with schedule.name=constant: remove it": (
            name == "constant" and schedule.cooldown_epochs is not None
        ),
        "schedule.cooldown_epochs trains with schedule.min_lr, which is 0: set one above, or remove"
        " it": schedule.cooldown_epochs is not None and schedule.min_lr == 0,
        f"schedule.final_weight_decay={schedule.final_weight_decay} is optim.weight_decay: remove"
        " it": schedule.final_weight_decay == optim.weight_decay,
        "optim.no_weight_decay has no effect with optim.weight_decay=0: remove it": (
            _is_given(optim, "no_weight_decay")
            and optim.weight_decay == 0
            and schedule.final_weight_decay is None
        ),
    }


def _optimizer_rules(optim: OptimConfig) -> Rules:
    return {
        "optim.layer_decay_form has no effect without optim.layer_decay: give one, or remove it": (
            _is_given(optim, "layer_decay_form") and optim.layer_decay is None
        ),
        "optim.adjust_lr_fn=original is of optim.algo=muon: use match_rms_adamw or rms_to_rms": (
            optim.name == "muon" and optim.algo == "adamuon" and optim.adjust_lr_fn == "original"
        ),
    }


def _guard_rules(guard: GuardConfig, data: DataConfig) -> Rules:
    rules = {
        f"guard.{key} has no effect with guard.on_spike=none: set skip, stop or rewind, or remove"
        " it": guard.on_spike == "none" and _is_given(guard, key)
        for key in ("spike_of", "spike_sigmas", "window_steps")
    }
    rules |= {
        f"guard.{key} has no effect without a rewind: set guard.on_nonfinite=rewind or"
        " guard.on_spike=rewind, or remove it": not guard.rewinds() and _is_given(guard, key)
        for key in ("rewind_skip_steps", "max_rewinds")
    }
    return rules | {
        f"guard.{key}=rewind needs data.reader=index: a stream cannot go back": (
            getattr(guard, key) == "rewind" and data.reader != "index"
        )
        for key in ("on_nonfinite", "on_spike")
    }


def _drop_path_rules(model: ModelConfig) -> Rules:
    return {
        f"model.{key} has no effect without model.drop_path_rate: give one, or remove it": (
            not model.drop_path_rate and getattr(model, key) is not None
        )
        for key in ("drop_path_schedule", "drop_path_form")
    }


def _rope_rules(model: ModelConfig) -> Rules:
    return {
        f"model.{key} has no effect without model.rope_type: give one, or remove it": (
            model.rope_type is None and getattr(model, key) is not None
        )
        for key in ("rope_temperature", "rope_reg_temperature", "ref_feat_shape")
    } | {
        "model.ref_feat_shape has no effect with model.rope_type=dinov3: remove it": (
            model.rope_type == "dinov3" and model.ref_feat_shape is not None
        ),
        "model.no_embed_class has no effect with model.pos_embed=none: remove it": (
            model.pos_embed == "none" and model.no_embed_class is not None
        ),
    }


def _view_rules(view: EvalConfig, model: ModelConfig) -> Rules:
    if view.resize_px is None:
        return {}
    height, width = model.height_width()
    return {
        "eval.crop_pct and eval.resize_px are both given: keep one of them": _is_given(
            view, "crop_pct"
        ),
        f"eval.resize_px needs square images, model.image_size is [{height}, {width}]: use"
        " eval.crop_pct": height != width,
        f"eval.resize_px={view.resize_px} is below model.image_size={max(height, width)}: the crop"
        " would not be filled": view.resize_px < max(height, width),
    }


def _eval_set_rules(config: EvalConfig) -> Rules:
    names = ", ".join(dict.fromkeys([VAL, *config.sets]))
    return {
        f"eval.sets.{VAL}: this is the name of data.val_split: use another": VAL in config.sets,
        f"eval.best_by={config.best_by}: no such set; there are: {names}": (
            config.best_by not in (VAL, *config.sets)
        ),
    } | {
        f"eval.sets.{name} is data.val_split itself, which is evaluated anyway: give root, split or"
        " labels, or remove it": chosen == type(chosen)()
        for name, chosen in config.sets.items()
    }


def _channel_rules(data: DataConfig, in_chans: int) -> Rules:
    allowed = "1" if in_chans == 1 else f"1 or {in_chans}"
    numbers = {"mean": len(data.mean), "std": len(data.std)}
    return {
        f"data.{key} has {number} values, model.in_chans is {in_chans}: give {allowed}": (
            number not in (1, in_chans)
        )
        for key, number in numbers.items()
    }


def _reader_rules(data: DataConfig) -> Rules:
    """What the reader needs and lacks, and what has no effect with it."""
    rules: Rules = {}
    without_effect: tuple[str, ...] = _OF_STREAM
    if data.reader == "webdataset":
        layout = SampleLayout(data.stream_image, data.stream_label, data.stream_keys_with_dots)
        without_effect = (*_OF_INDEX, "sources", *Selection.model_fields)
        rules = {
            "data.reader=webdataset needs data.stream: URLs of tars, as"
            " http://host/train-{0000..0099}.tar, or a pipe: command": data.stream is None,
            "data.reader=webdataset needs data.num_samples: how many images make an epoch": (
                data.num_samples is None
            ),
            **dict.fromkeys(layout.problems(SETTINGS), True),
        }
    for key in without_effect:
        problem = f"data.{key} has no effect with data.reader={data.reader}: remove it"
        rules[problem] = _is_given(data, key)
    return rules | {
        f"data.aug_repeats_form={data.aug_repeats_form} has no effect at data.aug_repeats=1: remove"
        " it": data.aug_repeats_form != "batch" and data.aug_repeats == 1
    }


def _selection_rules(selection: Selection, prefix: str) -> Rules:
    """About the settings that select samples, whose names begin with `prefix`."""
    has_fraction = selection.fraction is not None
    has_number = selection.samples_per_class is not None
    rules = {
        f"{prefix}fraction and {prefix}samples_per_class are both given: keep one of them": (
            has_fraction and has_number
        ),
        f"{prefix}fraction_of has no effect without {prefix}fraction: give one, or remove it": (
            not has_fraction and selection.fraction_of != "all"
        ),
        f"{prefix}subset_seed has no effect without {prefix}fraction or"
        f" {prefix}samples_per_class: remove it": (
            not has_fraction and not has_number and selection.subset_seed != 0
        ),
    }
    if selection.filter is not None:
        try:
            RowFilter(selection.filter)
        except ValueError as error:
            rules[f"{prefix}filter: {error}"] = True
    return rules


def _source_rules(data: DataConfig) -> Rules:
    rules = {
        f"data.{key} has no effect with data.sources: give it in each source": (
            bool(data.sources) and _is_given(data, key)
        )
        for key in Selection.model_fields
    }
    for number, source in enumerate(data.sources):
        rules |= _selection_rules(source, f"data.sources[{number}].")
    num_weights = sum(source.weight is not None for source in data.sources)
    return rules | {
        "data.sources: some have a weight and some have none: give all of them one, or none": (
            0 < num_weights < len(data.sources)
        )
    }


def _augment_rules(augment: AugmentConfig) -> Rules:
    rules: Rules = {}
    for key in ("crop_scale", "crop_ratio", "erasing_area", "erasing_aspect"):
        low, high = getattr(augment, key)
        rules[f"augment.{key} is [{low}, {high}]: the first must not exceed the second"] = (
            low > high
        )
    for key in ("crop_scale", "crop_ratio"):
        problem = (
            f"augment.{key} has no effect with augment.crop=simple: remove it, or set"
            " augment.crop=random_resized"
        )
        rules[problem] = augment.crop == "simple" and _is_given(augment, key)
    ops = augment.randaugment_ops
    auto = augment.auto_augment
    magnitude = augment.randaugment_magnitude
    largest = _LARGEST_MAGNITUDE[ops]
    return rules | {
        f"augment.randaugment_magnitude={magnitude:g} is beyond the scale of"
        f" augment.randaugment_ops={ops}: 0 to {largest}": magnitude > largest,
        f"augment.randaugment_magnitude={magnitude:g}: torchvision's scale has whole numbers only,"
        " 0 to 30": ops == "torchvision" and magnitude % 1 != 0,
        f"augment.randaugment_magnitude_std has no effect with augment.randaugment_ops={ops}:"
        " remove it": (
            not ops.startswith("timm") and augment.randaugment_magnitude_std is not None
        ),
        f"augment.auto_augment={auto} takes RandAugment's place: set augment.randaugment_layers to"
        " 0, or remove auto_augment": auto is not None and augment.randaugment_layers > 0,
        f"augment.auto_augment={auto} takes the place of augment.three_augment: keep one of"
        " them": auto is not None and augment.three_augment,
        "augment.auto_augment_magnitude_std has no effect with"
        f" augment.auto_augment={auto or 'null'}: remove it, or use original, originalr, v0 or"
        " v0r": augment.auto_augment_magnitude_std > 0 and auto not in _WITH_STD,
        "augment.three_augment takes RandAugment's place: set augment.randaugment_layers to 0, or"
        " three_augment to false": augment.three_augment and augment.randaugment_layers > 0,
        f"augment.mix_group_size={augment.mix_group_size} is odd, augment.mixup_mode=pair needs"
        " pairs: use an even number": (
            augment.mixup_mode == "pair" and augment.mix_group_size % 2 == 1
        ),
    }


def _mixing_rules(augment: AugmentConfig, epochs: float | None) -> Rules:
    end = augment.mixup_off_epoch
    mixes = augment.mixup_alpha > 0 or augment.cutmix_alpha > 0
    return {
        "augment.mixup_off_epoch has no effect without MixUp or CutMix: give"
        " augment.mixup_alpha or cutmix_alpha, or remove it": end is not None and not mixes,
        f"augment.mixup_off_epoch={end} has no effect at train.epochs={epochs}: give less, or"
        " remove it": end is not None and epochs is not None and end >= epochs,
    }


def _grey_rules(augment: AugmentConfig, in_chans: int) -> Rules:
    """Operations on colours that grey images do not have."""
    is_grey = in_chans == 1
    needs_colour = "needs colour images (model.in_chans=3)"
    *_, saturation, hue = augment.color_jitter
    return {
        f"augment.randaugment_layers {needs_colour}: set it to 0": (
            is_grey and augment.randaugment_layers > 0
        ),
        f"augment.auto_augment {needs_colour}: set it to null": (
            is_grey and augment.auto_augment is not None
        ),
        f"augment.three_augment {needs_colour}: set it to false": (
            is_grey and augment.three_augment
        ),
        f"augment.color_jitter {needs_colour}: set its third and fourth number, saturation and hue,"
        " to 0": is_grey and (saturation > 0 or hue > 0),
    }
