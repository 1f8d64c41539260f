"""Classify differences between recipes by kind, and quote published ablations."""

from typing import Any, NamedTuple

from vit.checkpoint.resume import may_change
from vit.config.base import Selection
from vit.config.schema import Config

_DEIT = "DeiT-B with all: 81.8, arXiv 2012.12877"
_PLAIN = "ViT-S/16 with all: 76.5 in 90 epochs, arXiv 2205.01580, Table 1"

KINDS = (
    ("known", "changes accuracy, by published ablations"),
    ("network", "a different network"),
    ("optimization", "different updates"),
    ("images", "different training images"),
    ("order", "the same images in a different order, or different random numbers"),
    ("evaluation", "the same training, evaluated differently"),
    ("start", "different initial weights"),
    ("harmless", "no effect on training"),
)
"""The kinds of differences and their headings, in order of importance."""

KNOWN = {
    "order.aug_repeats": f"76.5 without repetitions ({_DEIT})",
    "augment.mixup_alpha": f"78.7 without MixUp, 75.8 without it and CutMix ({_DEIT})",
    "augment.cutmix_alpha": f"80.0 without CutMix ({_DEIT})",
    "augment.randaugment_layers": f"79.6 without RandAugment ({_DEIT}); 73.6 without it and MixUp"
    f" ({_PLAIN})",
    "augment.randaugment_ops": "76.9 with torchvision's operations, 77.3 with big_vision's (S/16,"
    " 90 epochs, EIFY/mup-vit@ee4c63c3)",
    "augment.erasing_prob": f"training fails without erasing, 4.3 ({_DEIT}); less than the noise in"
    " fine-tuning (facebookresearch/mae@efb2a806:FINETUNE.md)",
    "model.drop_path_rate": f"training fails without drop path, 3.4 ({_DEIT})",
    "model.proj_drop_rate": f"81.3 with dropout in addition ({_DEIT})",
    "model.pos_embed": f"75.0 with learned positions, 76.5 with sine-cosine ones ({_PLAIN})",
    "model.global_pool": f"75.0 with a class token, 76.5 with the mean of patches ({_PLAIN})",
    "model.representation_size": f"76.7 with a linear head ({_PLAIN})",
    "model.image_size": f"83.1 at 384 px ({_DEIT})",
    "optim.name": f"74.5 with SGD ({_DEIT})",
    "data.global_batch_size": "78.8 with a batch of 512 (DeiT-B, 81.8 with 1,024:"
    f" facebookresearch/deit#63); 74.7 with 4,096 ({_PLAIN})",
    "schedule.warmup_epochs": "79.2 with 10 epochs of warm-up (DeiT-B, 81.8 with 5:"
    " facebookresearch/deit#63)",
    "train.epochs": f"78.5 in 150 epochs, 80.0 in 300 ({_PLAIN})",
    "ema.decay": "82.1 without the average, 82.3 with it; L 81.5 and 82.6, H 80.9 and 83.1"
    " (MAE's supervised recipe, arXiv 2111.06377, A.2)",
    "distill.teacher": "81.8 without a teacher, 83.4 with RegNetY-16GF's hard labels and a second"
    " head (DeiT-B, arXiv 2012.12877, Table 3)",
    "eval.crop_pct": "81.8 at .875, 82.0 at .9 (DeiT-B's README and timm's results)",
}
"""Maps settings to published ablations."""

_ABLATED: dict[str, tuple[Any, ...]] = {
    "order.aug_repeats": (1,),
    "augment.mixup_alpha": (0,),
    "augment.cutmix_alpha": (0,),
    "augment.randaugment_layers": (0,),
    "augment.erasing_prob": (0,),
    "model.drop_path_rate": (0,),
    "model.proj_drop_rate": (0,),
    "model.global_pool": (None, "token"),
    "model.representation_size": (None,),
    "optim.name": ("sgd",),
    "ema.decay": (None,),
    "distill.teacher": (None,),
}
"""The value that switches a component off, for ablations that removed the component. The ablation
applies only if one of the two recipes has this value."""

_SEED = "noise from different random numbers: 0.2 (DeiT), 0.08 over 4 seeds (MAE's fine-tuning)"
_TEXTS = {
    "train.seed": _SEED,
    "train.precision": "rounding; fp16 may overflow, which skips updates",
    "train.residual_dtype": "rounding of the tokens after each block",
    "train.reduce_dtype": "rounding of the sums over ranks",
    "train.attention": "rounding",
    "train.compile": "rounding",
    "data.micro_batch_size": "the same batch in different micro-batches: rounding",
    "data.mean": "a different normalization of images; pretrained weights need their own",
    "data.std": "a different normalization of images; pretrained weights need their own",
    "train.exact_over_ranks": "sums and random numbers are independent of the number of ranks",
    "augment.mix_group_size": "the number of images that share one draw of MixUp and CutMix",
    "model.weight_init": "initial weights from a different distribution",
    "eval.reference": "the published curve in plots of evaluations",
    "eval.every_epochs": "frequency and speed of evaluations",
    "eval.every_steps": "frequency and speed of evaluations",
    "eval.batch_size": "frequency and speed of evaluations",
}

_KINDS = {
    "order.num_lanes": "order",
    "order.block_samples": "order",
    "train.seed": "order",
    "train.exact_over_ranks": "order",
    # A resumed run may change some of these settings, because its samples are compared instead.
    "data.mean": "images",
    "data.std": "images",
    "data.interpolation": "images",
    "schedule.image_sizes": "images",
    "data.sources": "images",
    "loader.on_bad_image": "images",
    **{f"data.{name}": "images" for name in Selection.model_fields},
    "train.precision": "harmless",
    "train.residual_dtype": "harmless",
    "train.reduce_dtype": "harmless",
    "train.compile": "harmless",
    "train.deterministic": "harmless",
    "log.sample_losses": "harmless",
    "eval.reference": "harmless",
    "eval.every_epochs": "harmless",
    "eval.every_steps": "harmless",
    "eval.batch_size": "harmless",
    "model.weight_init": "start",
}
"""Maps settings to their kind, if it differs from the kind of their section."""

_KINDS_BY_SECTION = {
    "model": "network",
    "optim": "optimization",
    "schedule": "optimization",
    "loss": "optimization",
    "distill": "optimization",
    "train": "optimization",
    "guard": "optimization",
    "augment": "images",
    "data": "images",
    "eval": "evaluation",
    "init": "start",
}


class Effect(NamedTuple):
    """The effect of a difference between recipes."""

    kind: str
    """A key of `KINDS`."""
    text: str
    """The published effect, or "" if none is known."""


def effect_of(key: str, values: tuple[Any, ...] = ()) -> Effect:
    """Return the effect of changing the setting `key`. values: both values, if known."""
    section = key.partition(".")[0]
    assert section in Config.model_fields, f"the config has no section {section}"

    ablated = _ABLATED.get(key, values)
    is_ablation = not values or any(value in ablated for value in values)
    if key in KNOWN and is_ablation:
        return Effect("evaluation" if section == "eval" else "known", KNOWN[key])

    is_place = key in ("data.val_split", "data.root")
    is_harmless = may_change(key) and section not in ("eval", "guard") and not is_place
    section_kind = "harmless" if is_harmless else _KINDS_BY_SECTION.get(section, "harmless")
    return Effect(_KINDS.get(key, section_kind), _TEXTS.get(key, ""))
