"""Map configs of big_vision's trainer to settings of this project.

In big_vision, the batch size is the total over all devices. The weight decay is not multiplied by
the learning rate, so this project's value is the weight decay divided by `lr`. Weight decay applies
only to kernels. Preprocessing is a string of operations. The default `loss` is the sigmoid loss.
Epochs are rounded to steps. Only ViTs are supported. Settings for intermediate evaluations, logging
and few-shot probes are skipped.
"""

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from vit.extras.recipes.arguments import (
    Argument,
    ArgumentTable,
    ParsedArguments,
    SafeNumberLoader,
    make_table,
)
from vit.extras.recipes.command import Command
from vit.extras.recipes.python_config import ConfigLeaves, Opaque, PythonConfig, flattened
from vit.extras.recipes.rates import after_warmup, map_schedule
from vit.extras.recipes.reading import Findings, Program, Reading, Settings, cannot, differs, same
from vit.extras.recipes.timm_common import crop_pct_for, initial_weights, not_available, precision
from vit.layers.presets import PRESETS

SOURCE = "google-research/big_vision@0127fb6b"
_PLACES = re.compile(
    r"(evals|fewshot|log_\w+|ckpt_\w+|keep_ckpt\w*|pp_modules|prefetch_to_device|wandb|mesh"
    r"|sharding_\w+|input\.(cache\w*|prefetch|data\.(name|data_dir))|num_classes|model\.scan)\b"
)
"""Keys for paths, logging and speed, which are not part of the recipe."""

_NAMES = {"Ti": "ti", "S": "s", "B": "b", "L": "l", "H": "h", "So400m": "so400m", "G": "G"}
_PERCENT = re.compile(r"train\[(\d+%)?:(\d+%)?\]")
RULES = make_table(
    "big_vision",
    SOURCE,
    """
input.batch_size               required  -  data.global_batch_size
total_steps                    int    -     train.steps, or train.epochs
input.data.split               str    train   data.train_split
input.shuffle_buffer_size      int    -     differs: big_vision shuffles in a buffer of {:,},\
 this project over all data
seed                           int    0     train.seed
model_name model.variant       str    -     model.name
model.pool_type                str    gap   {tok: {model.no_embed_class: true},\
 gap: {model.class_token: false, model.global_pool: norm_avg},\
 map: {model.class_token: false, model.global_pool: map},\
 else: "the pooling {}: replaced by the class token"}
model.posemb                   str    learn   model.pos_embed
model.rep_size                 int    -     model.representation_size
model.dropout                  float  0.0   [model.pos_drop_rate, model.proj_drop_rate]
init_head_bias                 float  -     ?model.init_head_bias
model_init                     str    -     init.checkpoint, init.reset_head
input.pp                       str    -     augment
evals.val.pp_fn                str    -     eval
mixup.p                        float  0.0   augment.mixup_alpha
mixup.fold_in mixup.n          str    -     -
loss                           str    sigmoid_xent  {softmax_xent: {},\
 sigmoid_xent: {loss.name: bce, loss.bce_sum: true}, else: "the loss {}: replaced by cross-entropy"}
lr                             float  -     optim.lr
grad_clip_norm                 float  -     optim.clip_grad_norm
wd                             float  -     optim.weight_decay
schedule.warmup_steps          int    0     schedule
""",
    "",
).arguments
"""The keys of a config that are mapped, in this order."""


def is_config(text: str) -> bool:
    """Return whether `text` is a config of big_vision."""
    return bool(re.search(r"^def get_config\(", text, re.M))


def _parse(command: Command) -> ParsedArguments:
    """Parse `big_vision.train --config FILE.py:ARGUMENTS --config.KEY=VALUE ...`."""
    arguments = " ".join(command.words)
    match = re.search(r"--config[= ](?P<file>[^\s:]+)(:(?P<argument>\S+))?", arguments)
    if not match:
        raise ValueError("big_vision.train has no config: pass --config FILE.py")
    path = Path(match["file"])
    if not path.is_file():
        raise ValueError(
            f"{path}: the config file cannot be read: pass a path relative to the current folder"
        )

    overrides = re.findall(r"--config\.([\w.]+)[= ](\S+)", arguments)
    return read_config(path.read_text(encoding="utf-8"), match["argument"] or "", overrides)


def read_config(
    text: str, argument: str = "", overrides: Iterable[tuple[str, str]] = ()
) -> ParsedArguments:
    """Evaluate a config. Its arguments are the dotted paths of its values.

    Args:
        text: The Python code.
        argument: The text after the colon.
        overrides: Dotted keys and values.
    """
    file = PythonConfig(text, "the config", {"bvcc.parse_arg": _parse_arg})
    config = file.call("get_config", argument)
    for key, value in overrides:
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = yaml.load(value, SafeNumberLoader)

    leaves = {k: v for k, v in flattened(config).items() if not isinstance(v, Opaque)}
    model = leaves.get("model_name", "vit")
    if model != "vit":
        raise ValueError(f"config.model_name = {model!r}: only big_vision's vit is supported")

    arguments = tuple(Argument((k,), "str", None, "", not _PLACES.match(k)) for k in leaves)
    table = ArgumentTable("big_vision's trainer", f"{SOURCE}:big_vision/train.py", arguments)
    return ParsedArguments(table, ConfigLeaves(leaves), frozenset(leaves))


def _parse_arg(arg: str, lazy: bool = False, **spec: Any) -> Settings:
    """Parse `variant=B/16,aug=light1` like big_vision, with the defaults and types in `spec`."""
    values = {k: v[0] if isinstance(v, tuple) else v for k, v in spec.items()}
    for part in filter(None, (arg or "").split(",")):
        name, equals, value = part.partition("=")
        if not equals and name not in values:
            # A value without a name belongs to the first argument.
            name = next(iter(spec))
            value = part
        if name not in values:
            raise ValueError(
                f"the config has no argument {name}: expected one of {', '.join(values)}"
            )
        values[name] = type(values[name])(yaml.load(value, SafeNumberLoader)) if value else True

    return values


def _map_rest(reading: Reading) -> Findings:
    """Map what no key controls, and report the keys that have no finding yet."""
    yield precision("fp32 with matrix products in bf16, as on TPUs")
    yield initial_weights(reading, "learned positions of std 1 / sqrt(width)", "jax")

    lacking = [
        a.name for a in reading.table.arguments if a.in_recipe and a.name not in reading.accounted
    ]
    for name in lacking:
        yield cannot(name, f"config.{name} = {reading.args[name]!r} is not supported")


def _map_length(reading: Reading) -> Findings:
    steps = reading.args.get("total_steps")
    if steps:
        yield same("total_steps", {"train.steps": steps})
    else:
        epochs = reading.args["total_epochs"]
        yield differs(
            "total_epochs",
            f"big_vision rounds {epochs} epochs to steps; this project drops the last partial"
            " batch",
            {"train.epochs": epochs},
        )


def _map_split(reading: Reading) -> Findings:
    """Map the split. `evals.*` are skipped, except `minival`, which is held out from training."""
    split = reading.args.get("input.data.split", "train")
    if split == "train":
        yield same(reading.present("input.data.split"))
    elif _PERCENT.fullmatch(split):
        settings: Settings = {"data.train_split": split}
        held_out = reading.args.get("evals.minival.data.split")
        if held_out is not None and _PERCENT.fullmatch(held_out):
            settings["eval.sets"] = {"minival": {"split": held_out}}

        text = f"{split}: big_vision selects samples by storage order, this project by a hash"
        yield differs("input.data.split", text, settings)
    else:
        yield cannot(
            "input.data.split",
            f"training on {split}: write these images as a split, and set data.train_split to it",
        )


def _map_model(reading: Reading) -> Findings:
    variant = reading.args["model.variant"]
    size, _, patch = variant.partition("/")
    if size not in _NAMES or not patch:
        raise ValueError(f"config.model.variant = {variant!r}: expected a value such as B/16")

    # flax.linen.gelu is the tanh approximation.
    yield same(
        reading.present("model_name model.variant"),
        {"model.name": f"vit_{_NAMES[size]}{patch}", "model.mlp_layer": "mlp_tanh"},
    )


def _map_head(reading: Reading) -> Findings:
    """Map `rep_size`, where True selects the width of the model."""
    width = reading.args.get("model.rep_size", False)
    if width is True:
        size = reading.args["model.variant"].partition("/")[0]
        width = PRESETS[_NAMES[size]]["embed_dim"]
    settings = {"model.representation_size": width} if width else {}
    yield same(reading.present("model.rep_size"), settings)


def _map_start(reading: Reading) -> Findings:
    """Map the initial weights, and whether the head is not loaded from them."""
    start = reading.args.get("model_init")
    if start is not None:
        yield differs(
            "model_init",
            f"weights of big_vision's {start}: set init.checkpoint to the .npz file",
            {"init.checkpoint": f"{start.replace('/', '_')}.npz"},
        )
    else:
        yield same(reading.present("model_init"))

    heads = [part for part in reading.args.get("model_load.dont_load", ()) if "head/" in part]
    yield same(reading.present("model_load.dont_load"), {"init.reset_head": True} if heads else {})


def _operations(text: str) -> list[tuple[str, list[Any]]]:
    """Return the name and the arguments of each operation of a preprocessing.

    For example, `inception_crop(224)|randaug(2,10)` gives ("inception_crop", [224]) and ("randaug",
    [2, 10]). The names of arguments are dropped.
    """
    operations = []
    for part in filter(None, (p.strip() for p in text.split("|"))):
        name, _, inside = part.partition("(")
        words = re.findall(r"[^,()=]+(?=[,)]|$)", inside) if inside else []
        operations.append((name, [yaml.load(word, SafeNumberLoader) for word in words]))
    return operations


def _map_images(reading: Reading) -> Findings:
    """Convert the preprocessing for training."""
    settings: Settings = {"data.interpolation": "bilinear"}
    unknown = []
    operations = _operations(reading.args["input.pp"])
    for name, values in operations:
        match name:
            case "inception_crop" | "decode_jpeg_and_inception_crop":
                # In percent of the image's area, with big_vision's defaults.
                low = values[1] if len(values) > 1 else 5
                high = values[2] if len(values) > 2 else 100
                settings["model.image_size"] = values[0]
                settings["augment.crop_scale"] = [low / 100, high / 100]
            case "randaug":
                settings |= {
                    "augment.randaugment_layers": values[0],
                    "augment.randaugment_ops": "big_vision",
                    "augment.randaugment_magnitude": float(values[1]),
                }
            case "value_range":
                half = [0.5, 0.5, 0.5]
                settings |= {"data.mean": half, "data.std": half}
                if values != [-1, 1]:
                    unknown.append(f"value_range({values})")
            case "random_crop":
                settings["model.image_size"] = values[0]
                unknown.append("a random crop of a resized image")
            case "decode" | "flip_lr" | "onehot" | "keep" | "resize_small" | "resize":
                pass
            case _:
                unknown.append(name)

    if not any(name == "flip_lr" for name, _ in operations):
        settings["augment.hflip_prob"] = 0.0

    if unknown:
        yield cannot(
            "input.pp",
            f"{', '.join(unknown)}: replaced by a crop of random area and aspect",
            settings,
        )
    else:
        yield differs(
            "input.pp",
            "big_vision resizes bilinearly without antialiasing, this project with antialiasing",
            settings,
        )


def _map_evaluation(reading: Reading) -> Findings:
    """Convert the preprocessing for the evaluation set `val`."""
    match = re.search(
        r"resize_small\((?P<resized>\d+)\)\|central_crop\((?P<crop>\d+)\)",
        reading.args.get("evals.val.pp_fn", ""),
    )
    if not match:
        return

    crop_pct = crop_pct_for(int(match["crop"]), int(match["resized"]))
    if crop_pct is None:
        yield cannot("evals.val.pp_fn", "an evaluation image smaller than the crop")
    else:
        yield differs(
            "evals.val.pp_fn",
            "for evaluation big_vision resizes by area, this project bilinearly",
            {"eval.crop_pct": crop_pct},
        )


def _map_mixing(reading: Reading) -> Findings:
    alpha = reading.args.get("mixup.p") or 0.0
    yield same(reading.present("mixup.p"), {"augment.mixup_alpha": alpha})
    if alpha:
        yield differs(
            "",
            "big_vision draws one lambda of at least 0.5 for the images of a device and mixes each"
            " with its neighbor; this project draws one for each augment.mix_group_size images",
        )


def _map_optimizer(reading: Reading) -> Findings:
    """Map the learning rate, and `optax_name` with the arguments of this optimizer."""
    yield same("lr", {"optim.lr": reading.args["lr"]})

    name = reading.args.get("optax_name", "scale_by_adam")
    names = reading.present("optax_name")
    if name == "scale_by_adam":
        betas = [reading.args.get("optax.b1", 0.9), reading.args.get("optax.b2", 0.999)]
        yield same(names, {"optim.name": "adamw"})
        yield same(reading.present("optax.b1 optax.b2"), {"optim.betas": betas})
        yield same(reading.present("optax.eps"), {"optim.eps": reading.args.get("optax.eps", 1e-8)})

        if reading.args.get("optax.mu_dtype") == "bfloat16":
            yield differs(
                "optax.mu_dtype", "big_vision stores the first moment in bf16, this project in fp32"
            )
    elif name == "big_vision.momentum_hp":
        yield differs(
            reading.present("optax_name optax.momentum"),
            "big_vision stores the momentum in bf16, this project in fp32",
            {"optim.name": "sgd", "optim.momentum": reading.args.get("optax.momentum", 0.9)},
        )
    elif name == "big_vision.scale_by_adafactor":
        yield same(names, {"optim.name": "adafactorbv"})
        if reading.args.get("optax.decay_rate") == 0.8:  # this project supports no other value
            yield same("optax.decay_rate")

        for key in ("min_dim_size_to_factor", "beta2_cap", "momentum"):
            path = reading.present(f"optax.{key}")
            if path:
                yield same(path, {f"optim.{key}": reading.args[path]})
    else:
        raise not_available(f"config.optax_name {name}")


def _map_decay(reading: Reading) -> Findings:
    lr = reading.args["lr"]
    decay = reading.args.get("wd") or 0.0
    ours: Settings = {"optim.weight_decay": decay / lr}
    if decay:
        ours["optim.no_weight_decay"] = "not_kernels"
    yield same(reading.present("wd"), ours, f"{decay:g} / {lr:g}" if decay else "")


def _map_schedule(reading: Reading) -> Findings:
    """Map the schedule, which changes each step and starts at 0."""
    kind = reading.args.get("schedule.decay_type", "stair")
    is_linear = kind == "linear"
    settings = {
        "schedule.name": "linear" if is_linear else "cosine",
        "schedule.warmup_steps": reading.args.get("schedule.warmup_steps", 0),
        "schedule.warmup_lr": 0.0,
    }

    return map_schedule(
        reading,
        reading.present("schedule.warmup_steps schedule.decay_type"),
        settings,
        partial(after_warmup, linear=is_linear),
        kind="" if is_linear or kind == "cosine" else kind,
    )


PROGRAM = Program(
    parse=_parse,
    handlers={
        "total_steps": _map_length,
        "input.data.split": _map_split,
        "model_name": _map_model,
        "model.rep_size": _map_head,
        "model_init": _map_start,
        "input.pp": _map_images,
        "evals.val.pp_fn": _map_evaluation,
        "mixup.p": _map_mixing,
        "lr": _map_optimizer,
        "wd": _map_decay,
        "schedule.warmup_steps": _map_schedule,
    },
    rest=_map_rest,
    rules=RULES,
)
