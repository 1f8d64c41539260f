"""Map arguments that several projects share: batch size, augmentation, optimizer and others."""

from __future__ import annotations

import difflib
import re
from typing import Any, get_args

from vit.config.hints import sections
from vit.config.optim_section import OptimizerConfig
from vit.data.augment.table import AUTO_AUGMENT_SETS
from vit.extras.recipes.reading import Reading

_ADAMW = {"optim.name": "adamw"}
_LAMB = {"optim.name": "lamb"}
_NESTEROV = {"optim.name": "sgd", "optim.nesterov": True}
_MUON = {"optim.name": "muon", "optim.matrices": "timm"}
_ADAMUON = {"optim.name": "adamuon", "optim.matrices": "timm"}
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": _ADAMW,  # `map_optimizer` handles differences in weight decay
    "adamw": _ADAMW,
    "adamwlegacy": _ADAMW,
    "fusedadamw": _ADAMW,
    "lamb": _LAMB,
    "fusedlamb": _LAMB,
    "nadamw": {"optim.name": "nadamw"},
    "muon": _MUON,
    "nmuon": {**_MUON, "optim.nesterov": True},
    "adamuon": _ADAMUON,
    "nadamuon": {**_ADAMUON, "optim.nesterov": True},
    "adafactorbv": {"optim.name": "adafactorbv", "optim.min_dim_size_to_factor": 16},
    "sgd": _NESTEROV,
    "nesterov": _NESTEROV,
    "momentum": {"optim.name": "sgd", "optim.nesterov": False},
}
"""Maps timm's optimizer names to settings of this project."""
_BETAS = {"muon": (0.9, 0.95), "adamuon": (0.9, 0.95)}
_EPS = {"lamb": 1e-6, "muon": 1e-7, "adamuon": 1e-7}
"""The default epsilons of timm's optimizers that differ from AdamW's, by this project's name."""
_FIXED = {
    "ns_steps": 5,
    "ns_coefficients": "quintic",
    "decay_rate": 0.8,
    "momentum_dtype": "bfloat16",
    "clipping_threshold": None,
}
"""Arguments of timm's optimizers that have only this value, timm's default, in this project."""
_POLICIES = ("rand", "original", "originalr", "v0", "v0r", "3a", "augmix")
"""The prefixes of timm's augmentation policies."""
_BILINEAR_WARPS = "this project warps bilinearly, the source by {}: no known effect on accuracy"


def map_batch(reading: Reading, names: str, num_gpus: int | None, steps: int = 1) -> int:
    """Map the batch size per GPU and the number of batches per step, and return the global batch
    size.

    num_gpus: None if the command starts a single process.
    """
    size = reading.args["batch_size"]
    gpus = num_gpus or 1
    formula = f"{size} x {gpus} {'GPU' if gpus == 1 else 'GPUs'}"
    if steps > 1:
        formula += f" x {steps}"
    text = "" if num_gpus else "1 GPU is assumed: pass --gpus N to change the number"
    batch: int = size * gpus * steps
    reading.same(names, {"data.global_batch_size": batch}, formula, text)
    return batch


def map_policy(reading: Reading, interpolation: str) -> None:
    """Map `--aa`, which selects timm's RandAugment, AutoAugment or 3-Augment.

    interpolation: the mode that the source project uses to warp images
    (huggingface/pytorch-image-models@aa4b5850:timm/data/auto_augment.py, rand_augment_transform,
    auto_augment_transform). Raises ValueError if timm would reject the policy.
    """
    policy = reading.args["aa"]
    if not policy:
        reading.same("aa")
        return
    first, *parts = policy.split("-")
    is_auto = first in AUTO_AUGMENT_SETS and AUTO_AUGMENT_SETS[first][0] == "timm_auto"
    if policy == "3a":
        reading.same("aa", {"augment.auto_augment": "three_augment"})
        return
    if first.startswith("augmix"):
        reading.cannot("aa", f"the policy {policy}: AugMix is not available")
        return
    if first != "rand" and not is_auto:
        nearest = difflib.get_close_matches(first, _POLICIES, n=1, cutoff=0.5)
        hint = f" (did you mean {'-'.join([*nearest, *parts])}?)" if nearest else ""
        raise ValueError(
            f"timm rejects the policy {policy}{hint}: expected {', '.join(_POLICIES[1:])}, or rand"
            " with numbers, such as rand-m9-mstd0.5-inc1, or '' for none"
        )
    # As in timm, "t" selects a set of operations. All other parts without a number are ignored.
    sets = [part for part in parts if part.startswith("t") and not is_auto]
    numbers = [
        (match[1], match[2])
        for part in parts
        if part not in sets and (match := re.match(r"(\D*)(\d.*)", part))
    ]
    names = ("mstd",) if is_auto else ("m", "n", "p", "mstd", "mmax", "inc")
    wrong = [
        name + number
        for name, number in numbers
        if name not in names or not _is_number(name, number)
    ]
    if wrong:
        raise ValueError(
            f"timm rejects {', '.join(wrong)} in the policy {policy}: expected only"
            f" {', '.join(names)} after {first}, each with a number"
        )
    if is_auto:
        settings: dict[str, Any] = {"augment.auto_augment": first}
        if numbers:
            settings["augment.magnitude_std"] = float(numbers[0][1])
        problems: list[str] = []
    else:
        settings, problems = _randaugment(numbers)
        problems += [f"{part} of the policy" for part in sets]
    if problems:
        reading.cannot("aa", f"{policy} has {' and '.join(problems)}", settings)
    else:
        reading.differs("aa", _BILINEAR_WARPS.format(interpolation), settings)


def _is_number(name: str, number: str) -> bool:
    """Return whether timm can parse the number of the policy part `name`."""
    return bool(re.fullmatch(r"\d+(\.\d*)?" if name in ("mstd", "p") else r"\d+", number))


def _randaugment(numbers: list[tuple[str, str]]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings for the policy `rand-...`, and the parts of the policy without an
    equivalent.

    numbers: the name and number of each part.
    """
    settings: dict[str, Any] = {
        "augment.randaugment_layers": 2,
        "augment.randaugment_ops": "timm_inc0",
        "augment.randaugment_magnitude": 10.0,
        "augment.magnitude_std": 0.0,
    }
    problems = []
    for name, number in numbers:
        if name == "m":
            settings["augment.randaugment_magnitude"] = float(number)
        elif name == "n":
            settings["augment.randaugment_layers"] = int(number)
        elif name == "mstd" and float(number) <= 100:
            settings["augment.magnitude_std"] = float(number)
        elif name == "mstd":
            problems.append("a strength drawn uniformly from 0 to its value (mstd above 100)")
        elif name == "inc":
            settings["augment.randaugment_ops"] = "timm" if int(number) else "timm_inc0"
        elif name != "p" or float(number) != 0.5:  # the probability of each operation
            problems.append(f"{name}{number} of the policy")
    if settings["augment.randaugment_ops"] == "timm":  # the default
        del settings["augment.randaugment_ops"]
    return settings, problems


def map_color_jitter(reading: Reading, applies: bool) -> None:
    """Map `--color-jitter`. applies: False if `--aa` disables color jitter (transforms_factory)."""
    strength = reading.args["color_jitter"] or 0.0
    if strength and not applies:
        reading.inert(
            "color_jitter", "timm ignores this argument if --aa has a policy other than 3a"
        )
    elif strength:
        saturation = 0 if reading.settings.get("model.in_chans") == 1 else strength
        jitter = {"augment.color_jitter": [strength, strength, saturation, 0]}
        reading.same("color_jitter", jitter)
    else:
        reading.same("color_jitter")


def map_erasing(reading: Reading) -> None:
    """Map `--reprob`, `--remode`, `--recount` and `--resplit`."""
    args = reading.args
    prob = args["reprob"] or 0.0
    if not prob:
        reading.same("reprob")
        reading.inert("remode recount resplit", "erasing is off")
        return
    reading.same("reprob", {"augment.erasing_prob": prob})
    reading.same("remode", {"augment.erasing_mode": args["remode"]})
    if args["recount"] == 1:
        reading.same("recount")
    else:
        reading.cannot("recount", f"up to {args['recount']} erased boxes: replaced by one")
    reading.expect_off({"resplit": "no erasing in the first split of a batch"})


def map_mixing(reading: Reading, rank_batch_size: int) -> bool:
    """Map `--mixup`, its related flags and `--smoothing`. Return whether images are mixed."""
    args = reading.args
    mixes = bool(args["mixup"] > 0 or args["cutmix"] > 0 or args["cutmix_minmax"])
    if args["cutmix_minmax"]:
        reading.cannot("cutmix_minmax", "CutMix boxes with a side between two fractions")
    else:
        reading.same("cutmix_minmax")
    reading.same("mixup", {"augment.mixup_alpha": args["mixup"]})
    reading.same("cutmix", {"augment.cutmix_alpha": args["cutmix"]})
    reading.same("smoothing", {"loss.label_smoothing": args["smoothing"]})
    if not mixes:
        reading.inert("mixup_prob mixup_switch_prob mixup_mode", "mixing is off")
        return False
    reading.same("mixup_prob", {"augment.mix_prob": args["mixup_prob"]})
    if args["mixup"] > 0 and args["cutmix"] > 0:
        switch = {"augment.cutmix_switch_prob": args["mixup_switch_prob"]}
        reading.same("mixup_switch_prob", switch)
    else:
        reading.inert("mixup_switch_prob", "only one of MixUp and CutMix is on")
    mode = {"augment.mixup_mode": args["mixup_mode"]}
    if args["mixup_mode"] == "batch":
        text = (
            f"the source draws one lambda and box for the {rank_batch_size} images of a GPU; this"
            " project draws one for each augment.mix_group_size images, which makes batches"
            " independent of the number of GPUs"
        )
        reading.differs("mixup_mode", text, mode)
    else:
        reading.same("mixup_mode", mode)
    return True


def map_optimizer(reading: Reading, lr: float, formula: str, lr_names: str) -> None:
    """Map `--opt`, `--opt-eps`, `--opt-betas`, `--momentum`, `--opt-kwargs`, `--weight-decay`.

    lr: the peak learning rate. formula: the formula for `lr`, as text. lr_names: the arguments in
    the formula. As in timm, one-dimensional tensors, position embeddings and tokens have no weight
    decay.
    """
    args = reading.args
    name = args["opt"].lower()
    if name == "adam" and not args["weight_decay"]:
        name = "adamw"  # Adam and AdamW are equal without weight decay
    ours = map_optimizer_name(reading, "opt", name)
    if ours in ("sgd", "adafactorbv"):
        reading.inert("opt_betas", f"{name} does not use them")
    else:
        betas = args["opt_betas"] or _BETAS.get(ours, (0.9, 0.999))
        reading.same("opt_betas", {"optim.betas": list(betas)})
    if ours == "sgd":
        reading.inert("opt_eps", f"{name} does not use them")
    elif ours != "adafactorbv":
        reading.same("opt_eps", {"optim.eps": args["opt_eps"] or _EPS.get(ours, 1e-8)})
    elif args["opt_eps"] is None:
        reading.same("opt_eps")
    else:
        reading.cannot("opt_eps", "Adafactor's epsilon: replaced by its default")
    if ours in ("sgd", "muon", "adamuon", "adafactorbv"):
        reading.same("momentum", {"optim.momentum": args["momentum"]})
    else:
        reading.inert("momentum", f"{name} uses betas")
    reading.same(lr_names, {"optim.lr": lr}, formula)
    reading.same("weight_decay", {"optim.weight_decay": args["weight_decay"] or 0.0})


def not_available(optimizer: str) -> ValueError:
    """Return an error for an unsupported optimizer, such as "--opt lars"."""
    return ValueError(
        f"{optimizer}: this optimizer is not available: use AdamW with a learning rate that suits"
        " AdamW"
    )


def map_optimizer_name(reading: Reading, argument: str, name: str) -> str:
    """Map the optimizer and timm's `--opt-kwargs`. Return this project's name for the optimizer.

    Raises ValueError for an unsupported optimizer.
    """
    if name not in _OPTIMIZERS:
        raise not_available(f"{reading.table.flag_of(argument)} {name}")
    settings = _OPTIMIZERS[name]
    ours: str = settings["optim.name"]
    kwargs = reading.args.get("opt_kwargs") or {}
    own = _own_settings(ours)
    stated = {f"optim.{key}": value for key, value in kwargs.items() if key in own}
    settings = {key: value for key, value in settings.items() if key not in stated}
    if name == "adam":
        text = "Adam adds weight decay to the gradient: replaced by AdamW, which decays the weights"
        reading.cannot(argument, text, settings)
    else:
        reading.same(argument, settings)
    if "opt_kwargs" not in reading.args:
        return ours
    fixed = dict(_FIXED)
    if kwargs.get("adjust_lr_fn") == "original":
        # This project's Muon then also uses another polynomial, but timm's keeps its default.
        fixed["ns_coefficients"] = "original"
        kwargs = {"ns_coefficients": _FIXED["ns_coefficients"], **kwargs}
    lacking = {
        key
        for key, value in kwargs.items()
        if key not in own and not (key in fixed and value == fixed[key])
    }
    if lacking:
        text = f"arguments of the optimizer: {', '.join(sorted(lacking))}"
        reading.cannot("opt_kwargs", text, stated)
    else:
        reading.same("opt_kwargs", stated)
    return ours


def _own_settings(name: str) -> set[str]:
    """Return the settings of the optimizer `name` that have no flag in timm."""
    (kind,) = (
        k for k in sections()["optim"] if name in get_args(k.model_fields["name"].annotation)
    )
    with_flags = {"betas", "eps", "momentum"}
    return kind.model_fields.keys() - OptimizerConfig.model_fields.keys() - with_flags


def map_clipping(reading: Reading) -> None:
    """Map `--clip-grad` and timm's `--clip-mode`. LAMB also clips gradients to a norm of 1."""
    args = reading.args
    norm = args["clip_grad"]
    has_own = "lamb" in args["opt"].lower() and (norm is None or norm > 1)
    note = "LAMB's own (max_grad_norm)" if has_own else ""
    mode = args.get("clip_mode", "norm")
    if norm is not None and mode != "norm":
        text = f"clipping of gradients by {mode}: switched off"
        reading.cannot("clip_grad clip_mode", text, {"optim.clip_grad_norm": None})
        return
    reading.same("clip_grad", {"optim.clip_grad_norm": 1.0 if has_own else norm}, note)
    if "clip_mode" in args and norm is None:
        reading.inert("clip_mode", "--clip-grad is off")
    elif "clip_mode" in args:
        reading.same("clip_mode")


def map_layer_decay(reading: Reading, argument: str, factor: float | None, form: str) -> None:
    """Map the factor for layer-wise learning rates. form: `beit` gives the last norm the head's
    rate."""
    if factor is None or factor == 1:
        reading.same(argument)
    else:
        reading.same(argument, {"optim.layer_decay": factor, "optim.layer_decay_form": form})


def map_average(reading: Reading, decay: float | None, *, note: str = "") -> None:
    """Map `--model-ema-decay`. decay: None if the average is off. note: how its use differs."""
    if decay is None:
        reading.inert("model_ema_decay", "the average is off")
    elif note:
        reading.differs("model_ema_decay", note, {"ema.decay": decay})
    else:
        reading.same("model_ema_decay", {"ema.decay": decay})


def local_file(source: str) -> tuple[str, str]:
    """Return a local path for weights at a path or URL, and a note that the URL must be
    downloaded."""
    if "://" not in source:
        return source, ""
    return source.rpartition("/")[2], f"download {source}"


def map_initial_weights(reading: Reading, theirs: str, source: str | None = None) -> None:
    """Record the distribution of initial weights, which has no argument.

    theirs: how the source project's distribution differs, or "". source: the nearest
    `model.weight_init`.
    """
    ours = "normal, std 0.02 (patches LeCun's), and a head of zeros"
    settings = {}
    # With a checkpoint, only the head is new, and its weights start at 0.
    if source is not None and "init.checkpoint" not in reading.settings:
        settings = {"model.weight_init": source}
        ours = f"model.weight_init={source}"
    if settings and not theirs:
        reading.same("", settings)
    else:
        text = f"initial weights: ours are {ours}; the source has {theirs or 'a head of std 0.02'}"
        reading.differs("", text, settings)


def map_precision(reading: Reading, theirs: str) -> None:
    """Record the precision, which has no argument. theirs: the source project's precision."""
    if theirs == "bf16":
        reading.same("", {"train.precision": "bf16"})
        return
    text = f"the source uses {theirs}, this recipe bf16 (train.precision can also be fp16 or fp32)"
    reading.differs("", text, {"train.precision": "bf16"})
