"""Suggest the setting that a user meant by a misspelled key or another program's option."""

import difflib
from collections.abc import Mapping, Sequence
from typing import cast, get_args

from vit.config.base import Section
from vit.config.schema import Config


def sections() -> dict[str, list[type[Section]]]:
    """Return the classes of each section of `Config`: one class, or all members of a union."""
    classes: dict[str, list[type[Section]]] = {}
    for name, field in Config.model_fields.items():
        members = [get_args(member)[0] for member in get_args(field.annotation)]
        # Muon and AdaMuon share one class.
        classes[name] = list(dict.fromkeys(members)) or [cast(type[Section], field.annotation)]
    return classes


def union_tags(section: str) -> list[str]:
    """Return the names of the union's members if `section` is a union, such as `optim`; else []."""
    if section not in Config.model_fields:
        return []
    union = Config.model_fields[section].annotation
    return [get_args(member)[1].tag for member in get_args(union)]


def all_keys() -> list[str]:
    """Return the dotted keys of all settings, in the order of the schema."""
    keys = (
        f"{section}.{key}"
        for section, classes in sections().items()
        for cls in classes
        for key in cls.model_fields
    )
    return list(dict.fromkeys(keys))


OTHER_NAMES = {
    "data.root": "data dataset data_dir data_path data_root dataset_dir",
    "data.global_batch_size": "batch_size bs global_batch total_batch_size train_batch_size",
    "data.micro_batch_size": "per_device_batch_size per_device_train_batch_size",
    "loader.num_workers": "j n_workers workers",
    "order.aug_repeats": "repeated_aug repeats",
    "model.name": "arch architecture model model_name",
    "model.image_size": "img_size input_size res resolution",
    "model.num_classes": "classes n_classes nb_classes",
    "model.embed_dim": "dim hidden_dim hidden_size width",
    "model.depth": "layers n_layers num_layers",
    "model.num_heads": "heads n_heads",
    "model.drop_path_rate": "drop_path stochastic_depth",
    "model.proj_drop_rate": "drop drop_rate dropout",
    "model.init_values": "init_scale layer_scale layerscale",
    "augment.mixup_alpha": "mixup",
    "augment.cutmix_alpha": "cutmix",
    "augment.hflip_prob": "flip hflip",
    "augment.crop_scale": "scale",
    "augment.crop_ratio": "ratio",
    "augment.erasing_prob": "random_erase random_erasing reprob",
    "augment.randaugment_layers": "aa randaug randaugment",
    "loss.label_smoothing": "smoothing",
    "optim.name": "opt optimizer",
    "optim.lr": "learning_rate max_lr peak_lr",
    "optim.weight_decay": "decay wd",
    "optim.betas": "opt_betas",
    "optim.layer_decay": "layerwise_decay layer_wise_decay llrd",
    "optim.eps": "epsilon opt_eps",
    "optim.clip_grad_norm": (
        "clip_grad clip_norm grad_clip gradient_clip_val max_grad_norm max_norm"
    ),
    "schedule.name": "lr_schedule lr_scheduler sched scheduler",
    "schedule.warmup_epochs": "warmup",
    "train.epochs": "epoch max_epochs n_epochs num_epochs num_train_epochs",
    "train.steps": "iterations iters max_iters max_steps num_steps total_steps",
    "train.seed": "manual_seed random_seed",
    "train.precision": "amp bf16 dtype fp16 half mixed_precision torch_dtype",
    "train.compile": "torchcompile torch_compile",
    "train.attention": "attn_implementation flash_attention flash_attn use_flash_attn",
    "train.deterministic": "full_determinism use_deterministic_algorithms",
    "train.activation_checkpointing": (
        "checkpoint_activations grad_checkpointing gradient_checkpointing recompute"
    ),
    "ema.decay": "ema ema_decay model_ema model_ema_decay",
    "ema.every_steps": "ema_steps model_ema_steps",
    "eval.every_epochs": "eval_freq eval_interval val_every val_interval",
    "checkpoint.every_steps": "ckpt_every save_every save_freq save_interval save_steps",
    "init.checkpoint": "ckpt finetune from_checkpoint init_from pretrained weights",
    "run.dir": "experiment log_dir out out_dir output output_dir save_dir work_dir",
    "log.every_steps": "log_every log_freq log_interval logging_steps print_freq",
    "log.wandb": "use_wandb",
}
"""Maps each setting to its names in other programs (timm, DeiT, torchvision's references, Hugging
Face's Trainer)."""
ADVICE = {
    **dict.fromkeys(("auto_resume", "resume"), "run the same command again to resume"),
    **dict.fromkeys(
        ("devices", "gpus", "n_gpus", "num_gpus", "nproc_per_node"),
        "torchrun --nproc_per_node=N starts N ranks",
    ),
    **dict.fromkeys(
        (
            "accum_iter",
            "accum_steps",
            "grad_accum",
            "grad_accum_steps",
            "gradient_accumulation_steps",
            "update_freq",
        ),
        "set data.micro_batch_size, the images per forward pass of a rank, to accumulate gradients",
    ),
}
"""Advice about options of other programs for which this project has no setting."""
OTHER_VALUES = (
    "order.aug_repeats",
    "augment.randaugment_layers",
    "optim.name",
    "schedule.name",
    "schedule.warmup_epochs",
    "train.precision",
    "train.compile",
    "ema.decay",
    "eval.every_epochs",
    "log.wandb",
)
"""Settings whose values have another form or unit in other programs."""
_FROM_OTHER_NAME = {name: key for key, names in OTHER_NAMES.items() for name in names.split()}


def from_other_name(name: str) -> str:
    """Return the setting that other programs call `name` (such as "batch-size"), or ""."""
    return _FROM_OTHER_NAME.get(name.lower().replace("-", "_"), "")


def nearest(key: str, settings: Sequence[str]) -> str:
    """Return `; did you mean ...?` with the settings most similar to `key`, or advice, or ""."""
    if _word(key) in ADVICE:
        return f"; {ADVICE[_word(key)]}"
    meant = _meant(key, settings, cutoff=0.65)
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def setting_for(option: str, value: str) -> str:
    """Return a suggestion for an unknown option and its value ("" for none), or "" if there is
    none.

    `--lr`, `1e-3` -> did you mean optim.lr=1e-3?
    """
    name = option.lstrip("-").replace("-", "_").lower()
    if _word(name) in ADVICE:
        return ADVICE[_word(name)]

    key = _key_for(name)
    if key is None:
        return ""
    is_other_unit = key in OTHER_VALUES and name != key
    return f"did you mean {key}={'VALUE' if is_other_unit or not value else value}?"


def _key_for(option: str) -> str | None:
    """Return the setting that the user may have meant by `option`, or None."""
    keys = all_keys()
    # Several sections have a `name`, so this word alone means none of them.
    by_leaf = _by_leaf([key for key in keys if not key.endswith(".name")])
    if "." not in option:
        return _closest(option, by_leaf | _FROM_OTHER_NAME, cutoff=0.85)

    key = _closest(option, by_leaf | {key: key for key in keys}, cutoff=0.85)
    return key or next(iter(_meant(option, keys, cutoff=0.85)), None)


def _by_leaf(settings: Sequence[str]) -> dict[str, str]:
    """Map the last part of each dotted key to the first of `settings` that has it."""
    return {key.rpartition(".")[2]: key for key in reversed(settings)}


def _closest(word: str, key_of: Mapping[str, str], cutoff: float) -> str | None:
    """Return the value of the name in `key_of` that is most similar to `word`, or None."""
    names = difflib.get_close_matches(word, key_of, n=1, cutoff=cutoff)
    return key_of[names[0]] if names else None


def _word(key: str) -> str:
    """Return the last part of a key or option, spelled like the keys of `ADVICE`."""
    return key.rpartition(".")[2].lower().replace("-", "_")


def _meant(written: str, settings: Sequence[str], cutoff: float) -> list[str]:
    """Return those of `settings` that the user may have meant by the key `written`.

    Only the last parts of dotted keys are compared, in this order: names in other programs, the
    same word in another section, a similar word in the same section, a similar word in any section.
    """
    section, _, leaf = written.rpartition(".")
    same_section = [key for key in settings if key.rpartition(".")[0] == section]
    # A key that contains a section never refers to the `name` setting of another section.
    any_section = [key for key in settings if not (section and key.endswith(".name"))]
    same_word = [key for key in any_section if key.rpartition(".")[2] == leaf]
    matches = [key for key in (from_other_name(leaf), *same_word) if key in settings]
    if matches:
        return list(dict.fromkeys(matches))

    similar = _closest(leaf, _by_leaf(same_section), cutoff=0.65) or _closest(
        leaf, _by_leaf(any_section), cutoff=0.85 if section else cutoff
    )
    return [similar] if similar else []
