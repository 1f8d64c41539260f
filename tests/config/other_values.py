"""List a non-default value for each setting, and the other settings that it needs to have an
effect.

When you add a setting to the project, add a value to `VALUES`. The settings required by `OnlyWith`
are read from the schema.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, get_args

from vit.config.base import OnlyWith, Section
from vit.config.checks import EXCLUSIVE
from vit.config.hints import sections


class Setting(NamedTuple):
    """A field of a config section, such as `momentum` of the optimizer `sgd`."""

    key: str
    """The full name of the setting, such as `optim.momentum`."""
    kind: type[Section]

    @property
    def needs(self) -> list[OnlyWith]:
        metadata = self.kind.model_fields[self.key.partition(".")[2]].metadata
        return [each for each in metadata if isinstance(each, OnlyWith)]

    def __str__(self) -> str:
        return self.key if self.kind in FIRST else f"{self.key} of {self.kind.__name__}"

    def default(self) -> Any:
        return self.kind.model_fields[self.key.partition(".")[2]].default


FIRST = {kinds[0] for kinds in sections().values()}
SETTINGS = [
    Setting(f"{section}.{name}", kind)
    for section, kinds in sections().items()
    for kind in kinds
    for name in kind.model_fields
]

VALUES: dict[str, Any] = {
    "model.name": "vit_ti4",
    "model.image_size": 24,
    "model.in_chans": 1,
    "model.num_classes": 5,
    "model.patch_size": 4,
    "model.embed_dim": 48,
    "model.depth": 1,
    "model.num_heads": 4,
    "model.head_dim": 8,
    "model.mlp_ratio": 2.0,
    "model.mlp_layer": "swiglu",
    "model.norm_layer": "rmsnorm",
    "model.qkv_bias": False,
    "model.qk_norm": True,
    "model.class_token": False,
    "model.dist_token": True,
    "model.reg_tokens": 4,
    "model.global_pool": "avg",
    "model.pos_embed": "none",
    "model.no_embed_class": True,
    "model.rope_type": "axial",
    "model.rope_temperature": 50.0,
    "model.rope_reg_temperature": 50.0,
    "model.ref_feat_shape": 5,
    "model.dual_patch_norm": True,
    "model.pos_drop_rate": 0.3,
    "model.patch_drop_rate": 0.5,
    "model.proj_drop_rate": 0.3,
    "model.mlp_drop_rate": 0.3,
    "model.attn_drop_rate": 0.3,
    "model.drop_path_rate": 0.3,
    "model.drop_path_schedule": "constant",
    "model.drop_path_form": "subset",
    "model.init_values": 0.1,
    "model.representation_size": 16,
    "model.weight_init": "jax",
    "model.init_head_bias": -3.0,
    "data.exclude": "{folder}/exclude.txt",
    "data.relabel": "{folder}/relabel.txt",
    "data.fraction": 0.8,
    "data.fraction_of": "class",
    "data.samples_per_class": 10,
    "data.subset_seed": 1,
    "data.root": "{other}",
    "data.train_split": "train[:80%]",
    "data.val_split": "train[90%:]",
    "data.sources": [{"split": "train[:50%]"}, {"split": "train[50%:]"}],
    "stream.urls": "{shards}/train-{{00000..00001}}.tar",
    "stream.image": "jpg",
    "stream.label": "json:label",
    "stream.num_samples": 90,
    "data.global_batch_size": 15,
    "data.micro_batch_size": 12,
    "order.num_lanes": 1,
    "order.block_samples": 2,
    "order.aug_repeats": 3,
    "order.aug_repeats_form": "sampler",
    "loader.on_bad_image": "skip",
    "data.mean": [0.4, 0.4, 0.4],
    "data.std": [0.3, 0.3, 0.3],
    "data.interpolation": "bilinear",
    "augment.crop": "simple",
    "augment.crop_scale": [0.5, 0.6],
    "augment.crop_ratio": [1.0, 1.0],
    "augment.hflip_prob": 0.0,
    "augment.randaugment_layers": 2,
    "augment.randaugment_ops": "big_vision",
    "augment.randaugment_magnitude": 5.0,
    "augment.magnitude_std": 2.0,
    "augment.auto_augment": "v0",
    "augment.color_jitter": [0.3, 0.0, 0.0, 0.0],
    "augment.erasing_prob": 0.7,
    "augment.erasing_mode": "const",
    "augment.erasing_area": [0.5, 0.6],
    "augment.erasing_aspect": [1.0, 1.0],
    "augment.mixup_alpha": 0.8,
    "augment.cutmix_alpha": 1.0,
    "augment.mix_prob": 0.5,
    "augment.cutmix_switch_prob": 0.0,
    "augment.mixup_off_epoch": 1,
    "augment.mixup_mode": "elem",
    "augment.mix_group_size": 6,
    "loss.name": "bce",
    "loss.label_smoothing": 0.1,
    "loss.bce_target_thresh": 0.2,
    "loss.bce_sum": True,
    "loss.class_weights": [1.0, 2.0, 3.0],
    "distill.teacher": "{trained}",
    "distill.teacher_model": "vit_tiny_patch16_224",
    "distill.distill_type": "soft",
    "distill.temperature": 3.0,
    "distill.task_loss_weight": 0.2,
    "distill.distill_loss_weight": 0.2,
    "optim.name": "sgd",
    "optim.lr": 0.002,
    "optim.weight_decay": 0.3,
    "optim.no_weight_decay": "nothing",
    "optim.layer_decay": 0.7,
    "optim.layer_decay_form": "timm",
    "optim.clip_grad_norm": 0.01,
    "optim.betas": [0.8, 0.9],
    "optim.eps": 1e-3,
    "optim.momentum": 0.5,
    "optim.nesterov": True,
    "optim.matrices": "timm",
    "optim.adjust_lr_fn": "rms_to_rms",
    "optim.fallback_lr_scale": 0.5,
    "optim.min_dim_size_to_factor": 64,
    "optim.beta2_cap": 0.5,
    "schedule.name": "wsd",
    "schedule.interval": "epoch",
    "schedule.warmup_steps": 10,
    "schedule.warmup_epochs": 4.0,
    "schedule.warmup_lr": 1e-5,
    "schedule.warmup_prefix": False,
    "schedule.decay_fraction": 0.5,
    "schedule.decay_form": "linear",
    "schedule.cooldown_epochs": 2.0,
    "schedule.min_lr": 1e-5,
    "schedule.final_weight_decay": 0.2,
    "schedule.image_sizes": [{"until_epoch": 1, "image_size": 8}],
    "train.epochs": 50.0,
    "train.steps": 220,
    "train.seed": 1,
    "train.precision": "bf16",
    "train.residual_dtype": "bf16",
    "train.reduce_dtype": "bf16",
    "train.exact_over_ranks": True,
    "train.activation_checkpointing": "block",
    "ema.decay": 0.9,
    "ema.warmup": True,
    "ema.every_steps": 2,
    "ema.after_epochs": 0.5,
    "guard.on_nonfinite": "stop",
    "guard.on_spike": "skip",
    "guard.spike_sigmas": 4.0,
    "guard.window_steps": 64,
    "guard.max_skips": 2,
    "eval.every_epochs": 3.0,
    "eval.every_steps": 5,
    "eval.crop_pct": 0.5,
    "eval.crop_mode": "squash",
    "eval.resizer": "pillow",
    "eval.apply_exif": True,
    "eval.sets": {"seen": {"split": "train"}},
    "eval.best_by": "seen",
    "eval.reference": "demo",
    "checkpoint.every_steps": 3,
    "checkpoint.keep_last": 3,
    "checkpoint.keep_every": 2,
    "init.checkpoint": "{trained}",
    "init.reset_head": True,
    "init.select_classes": True,
    "init.freeze": 1,
    "log.every_steps": 3,
    "log.norms_every_steps": 2,
    "log.sample_losses": 2,
}

BESIDE: dict[str, dict[str, Any]] = {
    "model.in_chans": {"data.mean": [0.5], "data.std": [0.2]},
    "model.class_token": {"model.global_pool": "avg"},
    "model.pos_embed": {"model.rope_type": "axial"},
    "model.rope_reg_temperature": {"model.reg_tokens": 4},
    "model.drop_path_schedule": {"model.depth": 3},
    "data.val_split": {"data.train_split": "train[:80%]"},
    "data.fraction_of": {"data.exclude": "{folder}/exclude.txt"},
    "augment.magnitude_std": {"augment.randaugment_layers": 2},
    "augment.mixup_mode": {"augment.mixup_alpha": 0.8},
    "loss.bce_target_thresh": {"augment.mixup_alpha": 0.8},
    "schedule.cooldown_epochs": {"schedule.min_lr": 1e-5},
    "train.residual_dtype": {"train.precision": "bf16"},
    "train.exact_over_ranks": {"data.micro_batch_size": 12},
    "eval.apply_exif": {"data.root": "{turned}"},
    "eval.best_by": {"eval.sets": VALUES["eval.sets"]},
    "init.select_classes": {"init.checkpoint": "{of_four}", "init.reset_head": True},
}
"""Maps a setting to other settings that both of its tested values require."""
THIRD = {"train.precision": "fp16"}
"""A third value of each setting whose default and value in `VALUES` both satisfy an `OnlyWith`."""
TOGETHER: dict[str, dict[str, Any]] = {
    "stream.urls": {"stream.num_samples": 60},
    "init.select_classes": {"init.reset_head": False},
}
"""Maps a setting to other settings that are required by its value in `VALUES`, but not by its
default."""


def _dotted(setting: Setting, name: str) -> str:
    return name if "." in name else f"{setting.key.partition('.')[0]}.{name}"


def _conditions(needed: OnlyWith, setting: Setting) -> list[tuple[str, str, list[str]]]:
    """Return the dotted key, relation and allowed values of each condition in `needed`."""
    split = [re.split("(!?=|$)", each, maxsplit=1) for each in needed.conditions]
    return [(_dotted(setting, name), sign, allowed.split("|")) for name, sign, allowed in split]


def _find(key: str, kind: type[Section]) -> Setting:
    """Return the setting named `key`. If several optimizers have this setting, select the one of
    class `kind`."""
    own = [each for each in SETTINGS if each.key == key]
    return next((each for each in own if each.kind is kind), own[0])


def _parsed(word: str) -> Any:
    return {"null": None, "true": True, "false": False, "1": 1}.get(word, word)


def optimizers_of(setting: Setting) -> tuple[str, ...]:
    return get_args(setting.kind.model_fields["name"].annotation)


def _holds(value: Any, sign: str, allowed: list[str]) -> bool:
    if not sign:
        return value not in (None, 0, "none")
    return (value in map(_parsed, allowed)) == (sign == "=")


def beside(setting: Setting) -> dict[str, Any]:
    chosen = dict(BESIDE.get(setting.key, {}))
    if setting.kind not in FIRST and setting.key != "optim.name":
        chosen["optim.name"] = optimizers_of(setting)[0]
    for needed in setting.needs:
        key, sign, allowed = _conditions(needed, setting)[0]
        partner = _find(key, setting.kind)
        if any(other in chosen for other, *_ in _conditions(needed, setting)):
            continue
        if not _holds(partner.default(), sign, allowed):
            value = _parsed(allowed[0]) if sign == "=" else VALUES[key]
            chosen |= {**beside(partner), **TOGETHER.get(key, {}), key: value}
    return chosen


def changed(setting: Setting) -> dict[str, Any]:
    """Return the value of `setting` in `VALUES`, and null for each setting that it excludes."""
    key = setting.key
    pairs = [[f"{section}.{name}" for name in pair] for section, *pair in EXCLUSIVE]
    excluded = [other for pair in pairs if key in pair for other in pair]
    is_name = key == "optim.name" and setting.kind not in FIRST
    value = optimizers_of(setting)[-1] if is_name else VALUES[key]
    return dict.fromkeys(excluded) | TOGETHER.get(key, {}) | {key: value}


def without(setting: Setting, needed: OnlyWith) -> dict[str, Any]:
    """Return settings that violate `needed` but satisfy all other requirements of `setting`."""
    chosen = beside(setting)
    for key, sign, allowed in _conditions(needed, setting):
        partner = _find(key, setting.kind)
        chosen.pop(key, None)
        if _holds(partner.default(), sign, allowed):
            value = {"=": THIRD.get(key, VALUES[key]), "!=": _parsed(allowed[0]), "": 0}[sign]
            chosen |= {**beside(partner), **TOGETHER.get(key, {}), key: value}
    return chosen
