"""Map arguments that several projects share: batch size, augmentation, optimizer and others."""

from __future__ import annotations

import difflib
import re
from typing import Any, get_args

from pydantic.fields import FieldInfo

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
_FIXED: dict[str, dict[str, Any]] = {
    "muon": {"ns_steps": 5, "ns_coefficients": "quintic"},
    "adamuon": {"ns_steps": 5, "ns_coefficients": "quintic"},
    "adafactorbv": {"decay_rate": 0.8, "momentum_dtype": "bfloat16", "clipping_threshold": None},
}
"""Maps optimizers to arguments of timm that have only this value, timm's default, here."""
_POLICIES = ("rand", "original", "originalr", "v0", "v0r", "3a", "augmix")
"""The prefixes of timm's augmentation policies."""


def map_batch(reading: Reading) -> None:
    """Map the batch size per GPU and the number of batches per step."""
    args = reading.args
    size = args["batch_size"]
    gpus = reading.num_gpus or 1  # None if the command starts a single process
    formula = f"{size} x {gpus} {'GPU' if gpus == 1 else 'GPUs'}"
    steps: int = args.get("accum_iter", max(1, args.get("grad_accum_steps", 1)))
    if steps > 1:
        formula += f" x {steps}"
    texts = [] if reading.num_gpus else ["1 GPU is assumed: pass --gpus N to change the number"]
    if args.get("grad_accum_steps", 1) > 1:
        texts.append(
            "timm also trains on an epoch's last batches that fill no step, this project does not"
        )
    names = [name for name in ("batch_size", "grad_accum_steps", "accum_iter") if name in args]
    batch = {"data.global_batch_size": size * gpus * steps}
    reading.same(" ".join(names), batch, formula, "; ".join(texts))


def map_policy(reading: Reading, interpolation: str | None = None, name: str = "aa") -> None:
    """Map the argument `name`, which selects timm's RandAugment, AutoAugment or 3-Augment.

    interpolation: the mode that the source project uses to warp images
    (huggingface/pytorch-image-models@aa4b5850:timm/data/auto_augment.py, rand_augment_transform,
    auto_augment_transform), by default that of `--train-interpolation`. Raises ValueError if timm
    would reject the policy.
    """
    policy = reading.args[name] or ""
    first, *parts = policy.split("-")
    is_auto = first in AUTO_AUGMENT_SETS and AUTO_AUGMENT_SETS[first][0] == "timm_auto"
    if policy in ("", "3a"):
        reading.same(name, {"augment.auto_augment": "three_augment"} if policy else {})
        return
    if first.startswith("augmix"):
        reading.cannot(name, f"the policy {policy}: AugMix is not available")
        return
    if first != "rand" and not is_auto:
        raise _unknown_policy(policy)
    # As in timm, "t" selects a set of operations. All other parts without a number are ignored.
    sets = [part for part in parts if part.startswith("t") and not is_auto]
    matches = [re.match(r"(\D*)(\d.*)", part) for part in parts if part not in sets]
    numbers = [(match[1], match[2]) for match in matches if match]
    names = ("mstd",) if is_auto else ("m", "n", "p", "mstd", "mmax", "inc")
    wrong = [
        part + number
        for part, number in numbers
        if part not in names or not _is_number(part, number)
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
        reading.cannot(name, f"{policy} has {' and '.join(problems)}", settings)
    else:
        theirs = interpolation or reading.args["train_interpolation"]
        text = f"this project warps bilinearly, the source by {theirs}: no known effect on accuracy"
        reading.differs(name, text, settings)


def _unknown_policy(policy: str) -> ValueError:
    first, *parts = policy.split("-")
    nearest = difflib.get_close_matches(first, _POLICIES, n=1, cutoff=0.5)
    hint = f" (did you mean {'-'.join([*nearest, *parts])}?)" if nearest else ""
    return ValueError(
        f"timm rejects the policy {policy}{hint}: expected {', '.join(_POLICIES[1:])}, or rand"
        " with numbers, such as rand-m9-mstd0.5-inc1, or '' for none"
    )


def _is_number(name: str, number: str) -> bool:
    """Return whether timm can parse the number of the policy part `name`."""
    return bool(re.fullmatch(r"\d+(\.\d*)?" if name in ("mstd", "p") else r"\d+", number))


def _randaugment(numbers: list[tuple[str, str]]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings for the policy `rand-...`, and the parts of the policy without an
    equivalent.

    numbers: the name and number of each part.
    """
    parts = dict(numbers)
    std = float(parts.get("mstd", 0))
    ops = {} if int(parts.get("inc", 0)) else {"augment.randaugment_ops": "timm_inc0"}
    settings = {
        "augment.randaugment_layers": int(parts.get("n", 2)),
        **ops,
        "augment.randaugment_magnitude": float(parts.get("m", 10)),
        "augment.magnitude_std": std if std <= 100 else 0.0,
    }
    return settings, [text for text in (_problem(*part) for part in numbers) if text]


def _problem(name: str, number: str) -> str:
    """Return why a part of RandAugment's policy has no equivalent, or ""."""
    if name == "mstd" and float(number) > 100:
        return "a strength drawn uniformly from 0 to its value (mstd above 100)"
    # The probability of each operation is 0.5 in this project.
    if name == "mmax" or (name == "p" and float(number) != 0.5):
        return f"{name}{number} of the policy"
    return ""


def map_color_jitter(reading: Reading) -> None:
    """Map `--color-jitter`, which most policies of `--aa` disable (transforms_factory)."""
    args = reading.args
    strength = args["color_jitter"] or 0.0
    applies = args["aa"] in ("", None, "3a") or args.get("ThreeAugment", False)
    saturation = 0 if reading.settings.get("model.in_chans") == 1 else strength
    jitter = {"augment.color_jitter": [strength, strength, saturation, 0]} if strength else {}
    reason = "timm ignores this argument if --aa has a policy other than 3a"
    reading.same_if_used(applies or not jitter, "color_jitter", jitter, reason)


def map_erasing(reading: Reading) -> None:
    """Map `--remode`, and note without `--reprob` that its related flags have no effect."""
    if reading.args["reprob"]:
        reading.same("remode", {"augment.erasing_mode": reading.args["remode"]})
    else:
        reading.inert("remode recount resplit", "erasing is off")


def map_repeats(reading: Reading, names: str, repeats: int, text: str) -> None:
    """Map repeated augmentation, which is off if `repeats` is below 2. text: why a single process
    ignores it."""
    settings = {"order.aug_repeats": repeats, "order.aug_repeats_form": "sampler"}
    is_off = repeats < 2
    reading.same_if_used(is_off or reading.is_distributed, names, {} if is_off else settings, text)


def map_train_interpolation(reading: Reading, text: str) -> str:
    """Map `--train-interpolation` and return our mode. text: the difference for other modes."""
    theirs = reading.args["train_interpolation"]
    ours = theirs if theirs in ("bicubic", "bilinear") else "bicubic"
    settings = {"data.interpolation": ours}
    reading.differs("train_interpolation", "" if theirs == ours else text, settings)
    return ours


def map_mixing(reading: Reading) -> None:
    """Map `--mixup-prob`, `--mixup-switch-prob` and `--mixup-mode`."""
    args = reading.args
    if not (args["mixup"] > 0 or args["cutmix"] > 0 or args["cutmix_minmax"]):
        reading.inert("mixup_prob mixup_switch_prob mixup_mode", "mixing is off")
        return
    reading.same("mixup_prob", {"augment.mix_prob": args["mixup_prob"]})
    has_both = args["mixup"] > 0 and args["cutmix"] > 0
    switch = {"augment.cutmix_switch_prob": args["mixup_switch_prob"]}
    reason = "only one of MixUp and CutMix is on"
    reading.same_if_used(has_both, "mixup_switch_prob", switch, reason)
    mode = args["mixup_mode"]
    text = (
        f"the source draws one lambda and box for the {args['batch_size']} images of a GPU;"
        " this project draws one for each augment.mix_group_size images, which makes batches"
        " independent of the number of GPUs"
    )
    settings = {"augment.mixup_mode": mode}
    reading.differs("mixup_mode", text if mode == "batch" else "", settings)


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
    fields = optimizer_fields(ours)
    if "betas" in fields:
        betas = args["opt_betas"] or fields["betas"].default  # equal to timm's default
        reading.same("opt_betas", {"optim.betas": list(betas)})
    else:
        reading.inert("opt_betas", f"{name} does not use them")
    if "eps" in fields:
        reading.same("opt_eps", {"optim.eps": args["opt_eps"] or fields["eps"].default})
    elif ours == "sgd":
        reading.inert("opt_eps", f"{name} does not use them")
    else:
        text = "Adafactor's epsilon: replaced by its default"
        reading.cannot("opt_eps", "" if args["opt_eps"] is None else text)
    momentum = {"optim.momentum": args["momentum"]}
    reading.same_if_used("momentum" in fields, "momentum", momentum, f"{name} uses betas")
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
    with_flags = OptimizerConfig.model_fields.keys() | {"betas", "eps", "momentum"}
    own = optimizer_fields(ours).keys() - with_flags
    stated = {f"optim.{key}": value for key, value in kwargs.items() if key in own}
    settings = {key: value for key, value in settings.items() if key not in stated}
    text = "Adam adds weight decay to the gradient: replaced by AdamW, which decays the weights"
    reading.cannot(argument, text if name == "adam" else "", settings)
    if "opt_kwargs" not in reading.args:
        return ours
    fixed = dict(_FIXED.get(ours, {}))
    # This project's Muon then also uses Jordan's polynomial, but timm's keeps its default.
    is_jordans = ours == "muon" and kwargs.get("adjust_lr_fn") == "original"
    if is_jordans:
        fixed["ns_coefficients"] = "original"
    lacking = kwargs.keys() - own
    lacking -= {key for key in lacking & fixed.keys() if kwargs[key] == fixed[key]}
    problems = []
    if lacking:
        problems.append(f"arguments of the optimizer: {', '.join(sorted(lacking))}")
    if is_jordans and "ns_coefficients" not in kwargs:
        problems.append("ns_coefficients=quintic beside adjust_lr_fn=original")
    reading.cannot("opt_kwargs", "; ".join(problems), stated)
    return ours


def optimizer_fields(name: str) -> dict[str, FieldInfo]:
    """Return the settings of the optimizer `name`."""
    (kind,) = (
        k for k in sections()["optim"] if name in get_args(k.model_fields["name"].annotation)
    )
    return kind.model_fields


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
    if "clip_mode" in args:
        reading.same_if_used(norm is not None, "clip_mode", {}, "--clip-grad is off")


def map_average(reading: Reading, note: str = "") -> None:
    """Map `--model-ema-decay`. note: how the use of the average differs."""
    if reading.args["model_ema"]:
        settings = {"ema.decay": reading.args["model_ema_decay"]}
        reading.differs("model_ema_decay", note, settings)
    else:
        reading.inert("model_ema_decay", "the average is off")


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
    text = f"initial weights: ours are {ours}; the source has {theirs or 'a head of std 0.02'}"
    reading.differs("", "" if settings and not theirs else text, settings)


def map_precision(reading: Reading, theirs: str) -> None:
    """Record the precision, which has no argument. theirs: the source project's precision."""
    text = f"the source uses {theirs}, this recipe bf16 on GPUs that have it (train.precision)"
    reading.differs("", "" if theirs == "bf16" else text, {"train.precision": "auto"})
