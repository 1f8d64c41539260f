"""Map arguments that several projects share: batch size, augmentation, optimizer and others."""

import difflib
import re
from typing import get_args

from pydantic.fields import FieldInfo

from vit.config.hints import sections
from vit.config.optim_section import OptimizerConfig
from vit.data.augment.table import AUTO_AUGMENT_SETS
from vit.extras.recipes.reading import (
    Findings,
    Mapped,
    Reading,
    Settings,
    cannot,
    differs,
    implied,
    inert,
    same,
    same_if_used,
)

_ADAMW = {"optim.name": "adamw"}
_LAMB = {"optim.name": "lamb"}
_NESTEROV = {"optim.name": "sgd", "optim.nesterov": True}
_MUON = {"optim.name": "muon", "optim.matrices": "timm"}
_ADAMUON = {"optim.name": "adamuon", "optim.matrices": "timm"}

_OPTIMIZERS: dict[str, Settings] = {
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

_FIXED: dict[str, Settings] = {
    "muon": {"ns_steps": 5, "ns_coefficients": "quintic"},
    "adamuon": {"ns_steps": 5, "ns_coefficients": "quintic"},
    "adafactorbv": {"decay_rate": 0.8, "momentum_dtype": "bfloat16", "clipping_threshold": None},
}
"""Maps optimizers to timm's arguments for which this project supports only the given value, which
is timm's default."""

_POLICIES = ("rand", "original", "originalr", "v0", "v0r", "3a", "augmix")
"""The prefixes of timm's augmentation policies."""


def map_batch(reading: Reading) -> Findings:
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
    yield same(
        reading.present("batch_size grad_accum_steps accum_iter"),
        {"data.global_batch_size": size * gpus * steps},
        formula,
        "; ".join(texts),
    )


def map_policy(reading: Reading) -> Findings:
    """Map `--aa` of a program that warps images as `--train-interpolation` states."""
    yield timm_policy("aa", reading.args["aa"], reading.args["train_interpolation"])


def timm_policy(name: str, policy: str | None, interpolation: str) -> Mapped:
    """Map the argument `name`, which selects timm's RandAugment, AutoAugment or 3-Augment.

    Args:
        name: The argument.
        policy: Its value.
        interpolation: The mode that the source project uses to warp images
            (huggingface/pytorch-image-models@aa4b5850:timm/data/auto_augment.py,
            rand_augment_transform, auto_augment_transform).

    Raises ValueError if timm would reject the policy.
    """
    if not policy:
        return same(name)
    if policy == "3a":
        return same(name, {"augment.auto_augment": "three_augment"})

    kind, *parts = policy.split("-")
    if kind.startswith("augmix"):
        return cannot(name, f"the policy {policy}: AugMix is not available")

    is_auto = kind in AUTO_AUGMENT_SETS and AUTO_AUGMENT_SETS[kind][0] == "timm_auto"
    if is_auto:
        settings: Settings = {"augment.auto_augment": kind}
        numbers = _numbers(policy, parts, ("mstd",))
        if numbers:
            settings["augment.magnitude_std"] = float(numbers[0][1])
    elif kind == "rand":
        # "t" selects a set of operations.
        sets = [part for part in parts if part.startswith("t")]
        others = [part for part in parts if part not in sets]
        numbers = _numbers(policy, others, ("m", "n", "p", "mstd", "mmax", "inc"))
        settings = _randaugment(dict(numbers))
        problems = [*filter(None, (_problem(*number) for number in numbers))]
        problems += [f"{part} of the policy" for part in sets]
        if problems:
            return cannot(name, f"{policy} has {' and '.join(problems)}", settings)
    else:
        raise _unknown_policy(policy)

    return differs(
        name,
        f"this project warps bilinearly, the source by {interpolation}: no known effect on"
        " accuracy",
        settings,
    )


def _numbers(policy: str, parts: list[str], names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the name and the number of each part of a policy, such as `mstd` and `0.5`.

    As in timm, parts without a number are ignored. Raises ValueError if timm would reject a part
    that is not one of `names` with a number.
    """
    matches = [re.match(r"(?P<name>\D*)(?P<number>\d.*)", part) for part in parts]
    numbers = [(match["name"], match["number"]) for match in matches if match]
    wrong = [key + text for key, text in numbers if key not in names or not _is_number(key, text)]
    if wrong:
        raise ValueError(
            f"timm rejects {', '.join(wrong)} in the policy {policy}: expected only"
            f" {', '.join(names)} after {policy.partition('-')[0]}, each with a number"
        )
    return numbers


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


def _randaugment(numbers: dict[str, str]) -> Settings:
    """Return the settings for the policy `rand-...`. numbers: the number of each part by name."""
    std = float(numbers.get("mstd", 0))
    ops = {} if int(numbers.get("inc", 0)) else {"augment.randaugment_ops": "timm_inc0"}
    return {
        "augment.randaugment_layers": int(numbers.get("n", 2)),
        **ops,
        "augment.randaugment_magnitude": float(numbers.get("m", 10)),
        "augment.magnitude_std": std if std <= 100 else 0.0,
    }


def _problem(name: str, number: str) -> str:
    """Return why a part of RandAugment's policy has no equivalent, or ""."""
    if name == "mstd" and float(number) > 100:
        return "a strength drawn uniformly from 0 to its value (mstd above 100)"
    # The probability of each operation is 0.5 in this project.
    has_no_equivalent = name == "mmax" or (name == "p" and float(number) != 0.5)
    return f"{name}{number} of the policy" if has_no_equivalent else ""


def map_color_jitter(reading: Reading) -> Findings:
    """Map `--color-jitter`, which most policies of `--aa` disable (transforms_factory)."""
    args = reading.args
    strength = args["color_jitter"] or 0.0
    applies = args["aa"] in ("", None, "3a") or args.get("ThreeAugment", False)
    saturation = 0 if reading.settings.get("model.in_chans") == 1 else strength
    jitter = {"augment.color_jitter": [strength, strength, saturation, 0]} if strength else {}
    yield same_if_used(
        applies or not jitter,
        "color_jitter",
        jitter,
        "timm ignores this argument if --aa has a policy other than 3a",
    )


def map_erasing(reading: Reading) -> Findings:
    """Map `--remode`, and note without `--reprob` that its related flags have no effect."""
    if reading.args["reprob"]:
        yield same("remode", {"augment.erasing_mode": reading.args["remode"]})
    else:
        yield inert("remode recount resplit", "erasing is off")


def map_repeats(reading: Reading, names: str, repeats: int, text: str) -> Findings:
    """Map repeated augmentation.

    Args:
        reading: The reading with the arguments.
        names: The arguments.
        repeats: The number of copies. Below 2, repeated augmentation is off.
        text: Why a single process ignores the arguments.
    """
    if repeats < 2:
        yield same(names)
    else:
        settings = {"order.aug_repeats": repeats, "order.aug_repeats_form": "sampler"}
        yield same_if_used(reading.is_distributed, names, settings, text)


def train_interpolation(theirs: str, text: str) -> Mapped:
    """Map `--train-interpolation`, whose value is `theirs`. text: the difference for modes that
    this project lacks."""
    ours = theirs if theirs in ("bicubic", "bilinear") else "bicubic"
    settings = {"data.interpolation": ours}
    if theirs == ours:
        return same("train_interpolation", settings)
    return differs("train_interpolation", text, settings)


def map_mixing(reading: Reading) -> Findings:
    """Map `--mixup-prob`, `--mixup-switch-prob` and `--mixup-mode`."""
    args = reading.args
    is_on = args["mixup"] > 0 or args["cutmix"] > 0 or args["cutmix_minmax"]
    if not is_on:
        yield inert("mixup_prob mixup_switch_prob mixup_mode", "mixing is off")
        return

    yield same("mixup_prob", {"augment.mix_prob": args["mixup_prob"]})
    has_both = args["mixup"] > 0 and args["cutmix"] > 0
    yield same_if_used(
        has_both,
        "mixup_switch_prob",
        {"augment.cutmix_switch_prob": args["mixup_switch_prob"]},
        "only one of MixUp and CutMix is on",
    )

    settings = {"augment.mixup_mode": args["mixup_mode"]}
    if args["mixup_mode"] == "batch":
        text = one_draw_per_gpu("the source", args["batch_size"])
        yield differs("mixup_mode", text, settings)
    else:
        yield same("mixup_mode", settings)


def one_draw_per_gpu(source: str, batch_size: int) -> str:
    """Return how `source`, which mixes all images of a GPU alike, differs from this project."""
    return (
        f"{source} draws one lambda and box for the {batch_size} images of a GPU;"
        " this project draws one for each augment.mix_group_size images, which makes batches"
        " independent of the number of GPUs"
    )


def map_optimizer(reading: Reading, lr: float, formula: str, lr_names: str) -> Findings:
    """Map `--opt`, `--opt-eps`, `--opt-betas`, `--momentum`, `--opt-kwargs`, `--weight-decay`.

    As in timm, one-dimensional tensors, position embeddings and tokens have no weight decay.

    Args:
        reading: The reading with the arguments.
        lr: The peak learning rate.
        formula: The formula for `lr`, as text.
        lr_names: The arguments in the formula.
    """
    args = reading.args
    name = args["opt"].lower()
    if name == "adam" and not args["weight_decay"]:
        name = "adamw"  # Adam and AdamW are equal without weight decay
    yield from map_optimizer_name(reading, "opt", name)

    ours = _OPTIMIZERS[name]["optim.name"]
    fields = optimizer_fields(ours)
    unused = f"{name} does not use them"
    if "betas" in fields:
        betas = args["opt_betas"] or fields["betas"].default  # equal to timm's default
        yield same("opt_betas", {"optim.betas": list(betas)})
    else:
        yield inert("opt_betas", unused)

    if "eps" in fields:
        yield same("opt_eps", {"optim.eps": args["opt_eps"] or fields["eps"].default})
    elif ours == "sgd":
        yield inert("opt_eps", unused)
    elif args["opt_eps"] is None:
        yield same("opt_eps")
    else:
        yield cannot("opt_eps", "Adafactor's epsilon: replaced by its default")
    yield same_if_used(
        "momentum" in fields, "momentum", {"optim.momentum": args["momentum"]}, f"{name} uses betas"
    )

    yield same(lr_names, {"optim.lr": lr}, formula)
    yield same("weight_decay", {"optim.weight_decay": args["weight_decay"] or 0.0})


def not_available(optimizer: str) -> ValueError:
    """Return an error for an unsupported optimizer, such as "--opt lars"."""
    return ValueError(
        f"{optimizer}: this optimizer is not available: use AdamW with a learning rate that suits"
        " AdamW"
    )


def map_optimizer_name(reading: Reading, argument: str, name: str) -> Findings:
    """Map the optimizer `name`, and timm's `--opt-kwargs`.

    Raises ValueError for an unsupported optimizer.
    """
    if name not in _OPTIMIZERS:
        raise not_available(f"{reading.table.flag_of(argument)} {name}")
    settings = _OPTIMIZERS[name]
    ours = settings["optim.name"]
    kwargs = reading.args.get("opt_kwargs") or {}
    with_flags = OptimizerConfig.model_fields.keys() | {"betas", "eps", "momentum"}
    own = optimizer_fields(ours).keys() - with_flags
    stated = {f"optim.{key}": value for key, value in kwargs.items() if key in own}

    unstated = {key: value for key, value in settings.items() if key not in stated}
    if name == "adam":
        yield cannot(
            argument,
            "Adam adds weight decay to the gradient: replaced by AdamW, which decays the weights",
            unstated,
        )
    else:
        yield same(argument, unstated)
    if "opt_kwargs" not in reading.args:
        return

    fixed = _FIXED.get(ours, {})
    # This project's Muon then also uses Jordan's polynomial, but timm's keeps its default.
    is_jordans = ours == "muon" and kwargs.get("adjust_lr_fn") == "original"
    if is_jordans:
        fixed = {**fixed, "ns_coefficients": "original"}
    supported = {key for key, value in fixed.items() if kwargs.get(key) == value}
    lacking = kwargs.keys() - own - supported

    problems = []
    if lacking:
        problems.append(f"arguments of the optimizer: {', '.join(sorted(lacking))}")
    if is_jordans and "ns_coefficients" not in kwargs:
        problems.append("ns_coefficients=quintic beside adjust_lr_fn=original")
    if problems:
        yield cannot("opt_kwargs", "; ".join(problems), stated)
    else:
        yield same("opt_kwargs", stated)


def optimizer_fields(name: str) -> dict[str, FieldInfo]:
    """Return the settings of the optimizer `name`."""
    (kind,) = (
        k for k in sections()["optim"] if name in get_args(k.model_fields["name"].annotation)
    )
    return kind.model_fields


def map_clipping(reading: Reading) -> Findings:
    """Map `--clip-grad` and timm's `--clip-mode`. LAMB also clips gradients to a norm of 1."""
    args = reading.args
    norm = args["clip_grad"]
    has_own = "lamb" in args["opt"].lower() and (norm is None or norm > 1)
    mode = args.get("clip_mode", "norm")
    if norm is not None and mode != "norm":
        yield cannot(
            "clip_grad clip_mode",
            f"clipping of gradients by {mode}: switched off",
            {"optim.clip_grad_norm": None},
        )
        return

    note = "LAMB's own (max_grad_norm)" if has_own else ""
    yield same("clip_grad", {"optim.clip_grad_norm": 1.0 if has_own else norm}, note)
    if "clip_mode" in args:
        yield same_if_used(norm is not None, "clip_mode", {}, "--clip-grad is off")


def map_average(reading: Reading) -> Findings:
    """Map `--model-ema-decay`."""
    decay = {"ema.decay": reading.args["model_ema_decay"]}
    yield same_if_used(reading.args["model_ema"], "model_ema_decay", decay, "the average is off")


def crop_pct_for(crop: int, resized: int) -> float | None:
    """Return the shortest decimal `eval.crop_pct` with which evaluation resizes an image's shorter
    side to `resized` pixels before it cuts `crop` pixels, or None if there is none."""
    if resized < crop:
        return None

    for digits in range(1, 17):
        scale = 10**digits
        nearest = scale * crop // resized
        # A quotient that is a whole number may be rounded to a little less.
        for number in (nearest, nearest - 1):
            if number > 0 and int(crop / (number / scale)) == resized:
                return number / scale
    return None


def local_file(source: str) -> tuple[str, str]:
    """Return a local path for weights at a path or URL, and a note that the URL must be
    downloaded."""
    if "://" not in source:
        return source, ""
    return source.rpartition("/")[2], f"download {source}"


def initial_weights(reading: Reading, theirs: str, source: str | None = None) -> Mapped:
    """Return the finding for the distribution of initial weights, which has no argument.

    Args:
        reading: The reading with the checkpoint, if the recipe has one.
        theirs: How the source project's distribution differs, or "".
        source: The nearest `model.weight_init`.
    """
    # With a checkpoint, only the head is new, and its weights start at 0.
    if source is None or "init.checkpoint" in reading.settings:
        settings = {}
        ours = "normal, std 0.02 (patches LeCun's), and a head of zeros"
    else:
        settings = {"model.weight_init": source}
        ours = f"model.weight_init={source}"

    text = f"initial weights: ours are {ours}; the source has {theirs or 'a head of std 0.02'}"
    return implied(settings) if settings and not theirs else differs("", text, settings)


def precision(theirs: str) -> Mapped:
    """Return the finding for the precision, which has no argument.

    theirs: the source project's precision.
    """
    settings = {"train.precision": "auto"}
    text = f"the source uses {theirs}, this recipe bf16 on GPUs that have it (train.precision)"
    return implied(settings) if theirs == "bf16" else differs("", text, settings)
