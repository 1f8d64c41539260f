"""big_vision's configs: the settings that its trainer shares with ours.

Its own meanings: the batch is that of all devices; the decay is not multiplied by the rate, so
that ours is theirs over --lr; only kernels are decayed; preprocessing is one text of operations;
without a `loss` it is a sigmoid's; epochs are rounded to steps. Settings are those of a ViT; what
is set for evaluation in between, logs and few-shot probes is no part of the recipe.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from vit.extras.recipes.arguments import Argument, Given, Table
from vit.extras.recipes.command import Command
from vit.extras.recipes.python_config import Leaves, Opaque, PythonConfig, flattened
from vit.extras.recipes.rates import IMAGENET, after_warmup, say_rate, with_effect
from vit.extras.recipes.reading import ConfigReading, Reading
from vit.extras.recipes.timm_common import not_available, say_initial_weights, say_precision

SOURCE = "google-research/big_vision@0127fb6b"
_PLACES = re.compile(
    r"(evals|fewshot|log_\w+|ckpt_\w+|keep_ckpt\w*|pp_modules|prefetch_to_device|wandb|mesh"
    r"|sharding_\w+|input\.(cache\w*|prefetch|data\.(name|data_dir))|num_classes|model\.scan)\b"
)
"""Keys that say where things are, what is shown and how fast it runs."""
_NAMES = {"Ti": "ti", "S": "s", "B": "b", "L": "l", "H": "h", "So400m": "so400m", "G": "G"}
_PERCENT = re.compile(r"train\[(\d+%)?:(\d+%)?\]")
_CROPS = ("inception_crop", "decode_jpeg_and_inception_crop")


def is_config(text: str) -> bool:
    """Whether `text` is a config of big_vision."""
    return bool(re.search(r"^def get_config\(", text, re.M))


def read_command(command: Command) -> Reading:
    """Account for `big_vision.train --config FILE.py:ARGUMENTS --config.KEY=VALUE ...`."""
    words = " ".join(command.words)
    found = re.search(r"--config[= ]([^\s:]+)(?::(\S+))?", words)
    if not found:
        raise ValueError("big_vision.train needs --config FILE.py")
    path = Path(found[1])
    if not path.is_file():
        raise ValueError(f"{path}: cannot read the config file: give a path from here")
    overrides = re.findall(r"--config\.([\w.]+)[= ](\S+)", words)
    return read(path.read_text(encoding="utf-8"), found[2] or "", overrides)


def read(text: str, argument: str, overrides: list[tuple[str, str]]) -> Reading:
    """Account for a config. argument: as after the colon; overrides: dotted key and value."""
    file = PythonConfig(text, "the config", {"bvcc.parse_arg": _parse_arg})
    takes_argument = bool(file.names["get_config"].node.args.args)
    config = file.call("get_config", *([argument] if takes_argument else []))
    for key, value in overrides:
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = yaml.safe_load(value)
    leaves = {k: v for k, v in flattened(config).items() if not isinstance(v, Opaque)}
    model = leaves.get("model_name", "vit")
    if model != "vit":
        raise ValueError(f"config.model_name = {model!r}: only big_vision's vit is known here")
    arguments = tuple(Argument((key,), "str", None, "", not _PLACES.match(key)) for key in leaves)
    table = Table("big_vision's trainer", f"{SOURCE}:big_vision/train.py", arguments)
    reading = ConfigReading(table, Given(Leaves(leaves), frozenset(leaves)))
    _say_length(reading)
    _say_model(reading)
    _say_images(reading)
    _say_mixing(reading)
    _say_optimizer(reading)
    _say_rest(reading)
    reading.finish()
    return reading


def _parse_arg(arg: str, lazy: bool = False, **spec: Any) -> dict[str, Any]:
    """big_vision's own: `variant=B/16,aug=light1` with the defaults and types of `spec`."""
    found = {k: v[0] if isinstance(v, tuple) else v for k, v in spec.items()}
    for part in filter(None, (arg or "").split(",")):
        name, equals, value = part.partition("=")
        if not equals and name not in found:
            name = next(iter(spec))
            value = part
        if name not in found:
            raise ValueError(f"the config has no argument {name}: there are {', '.join(found)}")
        found[name] = type(found[name])(yaml.safe_load(value)) if value else True
    return found


def _say_length(reading: ConfigReading) -> None:
    batch = reading.args["input.batch_size"]
    reading.same("input.batch_size", {"data.global_batch_size": batch})
    if steps := reading.get("total_steps"):
        reading.same("total_steps", {"train.steps": steps})
    else:
        epochs = reading.args["total_epochs"]
        text = f"{epochs} epochs are rounded to whole steps there, of whole batches here"
        reading.differs("total_epochs", text, {"train.epochs": epochs})
    split = reading.get("input.data.split", "train")
    if split == "train":
        reading.same(reading.there("input.data.split"))
    elif _PERCENT.fullmatch(split):
        text = f"{split}: the samples by their order of storage there, by a hash here"
        reading.differs("input.data.split", text, _parts(reading, split))
    else:
        text = f"training on {split}: give a split of that part as data.train_split"
        reading.cannot("input.data.split", text)
    if "input.shuffle_buffer_size" in reading.args:
        size = reading.args["input.shuffle_buffer_size"]
        text = f"order from a buffer of {size:,} there, an exact one over all data here"
        reading.differs("input.shuffle_buffer_size", text)
    reading.same(reading.there("seed"), {"train.seed": reading.get("seed", 0)})


def _parts(reading: ConfigReading, split: str) -> dict[str, Any]:
    """Settings: what is trained on, and the part of the same split that evaluations are named for.

    `evals.*` are no part of the recipe, but `minival` is what training leaves out.
    """
    settings: dict[str, Any] = {"data.train_split": split}
    held_out = reading.get("evals.minival.data.split")
    if held_out is not None and _PERCENT.fullmatch(held_out):
        settings["eval.sets"] = {"minival": {"split": held_out}}
    return settings


def _say_model(reading: ConfigReading) -> None:
    variant = reading.args["model.variant"]
    size, _, patch = variant.partition("/")
    if size not in _NAMES or not patch:
        raise ValueError(f"config.model.variant = {variant!r}: expected one as B/16")
    names = reading.there("model_name model.variant")
    reading.same(names, {"model.name": f"vit_{_NAMES[size]}{patch}"})
    pool = reading.get("model.pool_type", "gap")
    settings: dict[str, Any] = {"model.class_token": False, "model.global_pool": "avg"}
    if pool == "map":
        settings["model.global_pool"] = "map"
    elif pool == "tok":
        settings = {"model.no_embed_class": True}
    if pool in ("gap", "tok", "map"):
        reading.same(reading.there("model.pool_type"), settings)
    else:
        reading.cannot("model.pool_type", f"pooling {pool}: the class token here")
    positions = reading.get("model.posemb", "learn")
    reading.same(reading.there("model.posemb"), {"model.pos_embed": positions})
    width = reading.get("model.rep_size", False)
    if width is True:
        widths = {"ti": 192, "s": 384, "b": 768, "l": 1024, "h": 1280, "so400m": 1152, "G": 1664}
        width = widths[_NAMES[size]]
    reading.same(
        reading.there("model.rep_size"), {"model.representation_size": width} if width else {}
    )
    rate = reading.get("model.dropout", 0.0)
    drops = {"model.pos_drop_rate": rate, "model.proj_drop_rate": rate}
    reading.same(reading.there("model.dropout"), drops if rate else {})
    bias = reading.get("init_head_bias")
    reading.same(
        reading.there("init_head_bias"), {} if bias is None else {"model.init_head_bias": bias}
    )
    start = reading.get("model_init")
    if start is None:
        reading.same(reading.there("model_init"))
    else:
        text = f"weights of big_vision's {start}: give their .npz file"
        reading.differs("model_init", text, {"init.checkpoint": f"{start.replace('/', '_')}.npz"})
    parts = list(reading.get("model_load.dont_load", ()))
    resets = {"init.reset_head": True} if any("head/" in part for part in parts) else {}
    reading.same(reading.there("model_load.dont_load"), resets)


def _operations(text: str) -> list[tuple[str, list[Any]]]:
    """A preprocessing text as names with their arguments."""
    found = []
    for part in filter(None, (p.strip() for p in text.split("|"))):
        name, _, inside = part.partition("(")
        words = re.findall(r"[^,()=]+(?=[,)]|$)", inside) if inside else []
        found.append((name, [yaml.safe_load(word) for word in words]))
    return found


def _say_images(reading: ConfigReading) -> None:
    """The text of operations of training, and of the evaluation named val."""
    settings: dict[str, Any] = {"data.interpolation": "bilinear"}
    unknown = []
    flips = False
    for name, values in _operations(reading.args["input.pp"]):
        if name in _CROPS:
            low, high = values[1:3] + [5, 100][len(values[1:3]) :]
            settings["model.image_size"] = values[0]
            settings["augment.crop_scale"] = [low / 100, high / 100]
        elif name == "flip_lr":
            flips = True
        elif name == "randaug":
            settings |= {
                "augment.randaugment_layers": values[0],
                "augment.randaugment_ops": "big_vision",
                "augment.randaugment_magnitude": float(values[1]),
            }
        elif name == "value_range":
            half = [0.5, 0.5, 0.5]
            settings |= {"data.mean": half, "data.std": half}
            if values != [-1, 1]:
                unknown.append(f"value_range({values})")
        elif name == "random_crop":
            settings["model.image_size"] = values[0]
            unknown.append("a random crop of a resized image")
        elif name not in ("decode", "onehot", "keep", "resize_small", "resize"):
            unknown.append(name)
    if not flips:
        settings["augment.hflip_prob"] = 0.0
    if unknown:
        text = f"{', '.join(unknown)}: a crop of random area and aspect here"
        reading.cannot("input.pp", text, settings)
    else:
        text = "bilinear resizing without antialiasing there, with it here"
        reading.differs("input.pp", text, settings)
    view = reading.get("evals.val.pp_fn", "")
    if found := re.search(r"resize_small\((\d+)\)\|central_crop\((\d+)\)", view):
        small, crop = int(found[1]), int(found[2])
        ours = {"eval.crop_pct": 0.875} if crop == small * 0.875 else {"eval.resize_px": small}
        text = "evaluation resizes by area there, bilinearly here"
        reading.differs("evals.val.pp_fn", text, ours)


def _say_mixing(reading: ConfigReading) -> None:
    alpha = reading.get("mixup.p", 0.0) or 0.0
    reading.same(reading.there("mixup.p"), {"augment.mixup_alpha": alpha})
    reading.same(reading.there("mixup.fold_in mixup.n"))
    if alpha:
        text = (
            "one lambda, the larger part, for the images of a device, each with its neighbour"
            " there; for each augment.mix_group_size images here"
        )
        reading.differs("", text)
    loss = reading.get("loss", "sigmoid_xent")
    if loss == "softmax_xent":
        reading.same(reading.there("loss"))
    elif loss == "sigmoid_xent":
        reading.same(reading.there("loss"), {"loss.name": "bce", "loss.bce_sum": True})
    else:
        reading.cannot(reading.there("loss"), f"the loss {loss}: cross-entropy here")


def _say_optimizer(reading: ConfigReading) -> None:
    lr = reading.args["lr"]
    name = reading.get("optax_name", "scale_by_adam")
    reading.same("lr", {"optim.lr": lr})
    names = reading.there("optax_name")
    if name == "scale_by_adam":
        betas = [reading.get("optax.b1", 0.9), reading.get("optax.b2", 0.999)]
        reading.same(names, {"optim.name": "adamw"})
        reading.same(reading.there("optax.b1 optax.b2"), {"optim.betas": betas})
        reading.same(reading.there("optax.eps"), {"optim.eps": reading.get("optax.eps", 1e-8)})
        if reading.get("optax.mu_dtype") == "bfloat16":
            text = "the first moment is kept in bf16 there, in fp32 here"
            reading.differs("optax.mu_dtype", text)
    elif name == "big_vision.momentum_hp":
        momentum = reading.get("optax.momentum", 0.9)
        text = "momentum is kept in bf16 there, in fp32 here"
        sgd = {"optim.name": "sgd", "optim.momentum": momentum}
        reading.differs(f"{names} {reading.there('optax.momentum')}".strip(), text, sgd)
    elif name == "big_vision.scale_by_adafactor":
        reading.same(names, {"optim.name": "adafactorbv"})
        for key in ("min_dim_size_to_factor", "decay_rate", "beta2_cap", "momentum"):
            given = reading.there(f"optax.{key}")
            reading.same(given, {f"optim.{key}": reading.args[given]} if given else {})
    else:
        raise not_available(f"config.optax_name {name}")
    clip = {"optim.clip_grad_norm": reading.get("grad_clip_norm")}
    reading.same(reading.there("grad_clip_norm"), clip)
    decay = reading.get("wd") or 0.0
    ours: dict[str, Any] = {"optim.weight_decay": decay / lr}
    if decay:
        ours["optim.no_weight_decay"] = "not_kernels"
    reading.same(reading.there("wd"), ours, f"{decay:g} / {lr:g}" if decay else "")
    _say_schedule(reading, lr)


def _say_schedule(reading: ConfigReading, lr: float) -> None:
    known = reading.settings
    per_epoch = max(IMAGENET // max(known["data.global_batch_size"], 1), 1)
    steps = known.get("train.steps") or round(known["train.epochs"] * per_epoch)
    warmup = reading.get("schedule.warmup_steps", 0)
    kind = reading.get("schedule.decay_type", "stair")
    settings: dict[str, Any] = {"schedule.name": "cosine", "schedule.warmup_steps": warmup}
    settings["schedule.warmup_lr"] = 0.0
    names = reading.there("schedule.warmup_steps schedule.decay_type")
    if kind == "linear":
        settings["schedule.name"] = "linear"
    elif kind != "cosine":
        reading.cannot(names, f"the schedule {kind}: a cosine here", with_effect(settings))
        return
    theirs = after_warmup(
        lr, steps / per_epoch, warmup_epochs=warmup / per_epoch, linear=kind == "linear"
    )
    say_rate(reading, names, theirs, settings, "")


def _say_rest(reading: ConfigReading) -> None:
    """What no setting says, and keys that are not known here."""
    say_precision(reading, "fp32 with products in bf16 (a TPU's)")
    say_initial_weights(reading, "learned positions of std 1 / sqrt(width)", "jax")
    accounted = {name for finding in reading.findings for name in finding.theirs}
    for argument in reading.table.arguments:
        name = argument.name
        if argument.in_recipe and name not in accounted:
            reading.cannot(name, f"config.{name} = {reading.args[name]!r} is not known here")
