"""Arguments that several programs share: batch, augmentation, mixing, optimizer, average."""

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
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": _ADAMW,  # but for the decay
    "adamw": _ADAMW,
    "adamwlegacy": _ADAMW,
    "fusedadamw": _ADAMW,
    "lamb": _LAMB,
    "fusedlamb": _LAMB,
    "nadamw": {"optim.name": "nadamw"},
    "muon": _MUON,
    "nmuon": {**_MUON, "optim.nesterov": True},
    "adamuon": {**_MUON, "optim.algo": "adamuon"},
    "nadamuon": {**_MUON, "optim.algo": "adamuon", "optim.nesterov": True},
    "adafactorbv": {"optim.name": "adafactorbv", "optim.min_dim_size_to_factor": 16},
    "sgd": _NESTEROV,
    "nesterov": _NESTEROV,
    "momentum": {"optim.name": "sgd", "optim.nesterov": False},
}
"""Names of timm's factory -> what they mean here."""
_BETAS = {"muon": (0.9, 0.95)}
_EPS = {"lamb": 1e-6, "muon": 1e-7}
"""Defaults of timm's optimizers, by our name, that are not AdamW's."""
_POLICIES = ("rand", "original", "originalr", "v0", "v0r", "3a", "augmix")
"""What timm's policies begin with."""
_BILINEAR_WARPS = "operations that warp are bilinear here, {} there: no known effect on accuracy"


def say_batch(reading: Reading, names: str, num_gpus: int | None, steps: int = 1) -> int:
    """`names`: the images of a GPU and the batches of a step. Return the batch of all GPUs.

    num_gpus: None if the command does not state it, which starts one process.
    """
    size = reading.args["batch_size"]
    gpus = num_gpus or 1
    how = f"{size} x {gpus} GPU{'s' * (gpus > 1)}" + f" x {steps}" * (steps > 1)
    text = "" if num_gpus else "1 GPU is assumed: pass --gpus N for another number"
    batch: int = size * gpus * steps
    reading.same(names, {"data.global_batch_size": batch}, how, text)
    return batch


def say_policy(reading: Reading, interpolation: str) -> None:
    """`--aa`, where it applies: timm's RandAugment, AutoAugment and 3-Augment.

    interpolation: that of the warps there (huggingface/pytorch-image-models@aa4b5850:
    timm/data/auto_augment.py, rand_augment_transform, auto_augment_transform). Raises ValueError
    for a policy that timm stops at.
    """
    policy = reading.args["aa"]
    if not policy:
        reading.same("aa")
        return
    first, *parts = policy.split("-")
    is_auto = first in AUTO_AUGMENT_SETS and AUTO_AUGMENT_SETS[first][0] == "timm_auto"
    if policy == "3a":
        reading.same("aa", {"augment.three_augment": True})
        return
    if first.startswith("augmix"):
        reading.cannot("aa", f"the policy {policy}: AugMix is not available")
        return
    if first != "rand" and not is_auto:
        nearest = difflib.get_close_matches(first, _POLICIES, n=1, cutoff=0.5)
        hint = f" (did you mean {'-'.join([*nearest, *parts])}?)" if nearest else ""
        raise ValueError(
            f"the policy {policy}: timm stops at it{hint}: expected {', '.join(_POLICIES[1:])}, or"
            " rand with its numbers, as rand-m9-mstd0.5-inc1; '' for none"
        )
    # As timm divides them: t names a set of operations, others without a number are passed over.
    sets = [part for part in parts if part.startswith("t") and not is_auto]
    words = [
        (found[1], found[2])
        for part in parts
        if part not in sets and (found := re.match(r"(\D*)(\d.*)", part))
    ]
    known = ("mstd",) if is_auto else ("m", "n", "p", "mstd", "mmax", "inc")
    wrong = [n + number for n, number in words if n not in known or not _is_number(n, number)]
    if wrong:
        raise ValueError(
            f"the policy {policy}: timm stops at {', '.join(wrong)}: after {first} it knows"
            f" {', '.join(known)}, each with a number"
        )
    if is_auto:
        settings: dict[str, Any] = {"augment.auto_augment": first}
        if words:
            settings["augment.auto_augment_magnitude_std"] = float(words[0][1])
        problems: list[str] = []
    else:
        settings, problems = _randaugment(words)
        problems += [f"{part} of the policy" for part in sets]
    if problems:
        reading.cannot("aa", f"{policy} has {' and '.join(problems)}", settings)
    else:
        reading.differs("aa", _BILINEAR_WARPS.format(interpolation), settings)


def _is_number(name: str, number: str) -> bool:
    """Whether timm can read the number of the part `name` of a policy."""
    return bool(re.fullmatch(r"\d+(\.\d*)?" if name in ("mstd", "p") else r"\d+", number))


def _randaugment(words: list[tuple[str, str]]) -> tuple[dict[str, Any], list[str]]:
    """Return settings and what they cannot say of `rand-...`; words: names with their numbers."""
    settings: dict[str, Any] = {
        "augment.randaugment_layers": 2,
        "augment.randaugment_ops": "timm_inc0",
        "augment.randaugment_magnitude": 10.0,
        "augment.randaugment_magnitude_std": 0.0,
    }
    problems = []
    for name, number in words:
        if name == "m":
            settings["augment.randaugment_magnitude"] = float(number)
        elif name == "n":
            settings["augment.randaugment_layers"] = int(number)
        elif name == "mstd" and float(number) <= 100:
            settings["augment.randaugment_magnitude_std"] = float(number)
        elif name == "mstd":
            problems.append("a strength drawn evenly between 0 and its value (mstd above 100)")
        elif name == "inc":
            settings["augment.randaugment_ops"] = "timm" if int(number) else "timm_inc0"
        elif name != "p" or float(number) != 0.5:  # how often each is applied
            problems.append(f"{name}{number} of the policy")
    if settings["augment.randaugment_ops"] == "timm":  # the default
        del settings["augment.randaugment_ops"]
    return settings, problems


def say_color_jitter(reading: Reading, applies: bool) -> None:
    """`--color-jitter`; `applies`: no policy of `--aa` replaces it (transforms_factory)."""
    strength = reading.args["color_jitter"] or 0.0
    if strength and not applies:
        reading.inert("color_jitter", "timm leaves it out where --aa gives a policy, but for 3a")
    elif strength:
        saturation = 0 if reading.settings.get("model.in_chans") == 1 else strength
        jitter = {"augment.color_jitter": [strength, strength, saturation, 0]}
        reading.same("color_jitter", jitter)
    else:
        reading.same("color_jitter")


def say_erasing(reading: Reading) -> None:
    """`--reprob`, `--remode`, `--recount`, `--resplit`."""
    args = reading.args
    prob = args["reprob"] or 0.0
    if not prob:
        reading.same("reprob")
        reading.inert("remode recount resplit", "nothing is erased")
        return
    reading.same("reprob", {"augment.erasing_prob": prob})
    reading.same("remode", {"augment.erasing_mode": args["remode"]})
    if args["recount"] == 1:
        reading.same("recount")
    else:
        reading.cannot("recount", f"up to {args['recount']} boxes are erased; here one")
    reading.expect_off({"resplit": "no erasing in the first split of a batch"})


def say_mixing(reading: Reading, rank_batch_size: int) -> bool:
    """`--mixup` and its companions, and `--smoothing`. Return whether images mix."""
    args = reading.args
    mixes = bool(args["mixup"] > 0 or args["cutmix"] > 0 or args["cutmix_minmax"])
    if args["cutmix_minmax"]:
        reading.cannot("cutmix_minmax", "boxes of CutMix between two shares of the side")
    else:
        reading.same("cutmix_minmax")
    reading.same("mixup", {"augment.mixup_alpha": args["mixup"]})
    reading.same("cutmix", {"augment.cutmix_alpha": args["cutmix"]})
    reading.same("smoothing", {"loss.label_smoothing": args["smoothing"]})
    if not mixes:
        reading.inert("mixup_prob mixup_switch_prob mixup_mode", "nothing is mixed")
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
            f"one draw of lambda and box for the {rank_batch_size} images of a GPU there, for each"
            " augment.mix_group_size images here, so that batches do not depend on the GPUs"
        )
        reading.differs("mixup_mode", text, mode)
    else:
        reading.same("mixup_mode", mode)
    return True


def say_optimizer(reading: Reading, lr: float, how: str, lr_names: str) -> None:
    """`--opt` with `--opt-eps`, `--opt-betas`, `--momentum`, `--opt-kwargs`, `--weight-decay`.

    lr: the peak rate; how: how it follows, in words; lr_names: the arguments that it follows from.
    Groups are timm's: no decay of what has one dimension, nor of positions and tokens.
    """
    args = reading.args
    name = args["opt"].lower()
    if name == "adam" and not args["weight_decay"]:
        name = "adamw"  # they differ in the decay
    ours = say_optimizer_name(reading, "opt", name)
    if ours in ("sgd", "adafactorbv"):
        reading.inert("opt_betas", f"{name} has none")
    else:
        betas = args["opt_betas"] or _BETAS.get(ours, (0.9, 0.999))
        reading.same("opt_betas", {"optim.betas": list(betas)})
    if ours == "sgd":
        reading.inert("opt_eps", f"{name} has none")
    elif ours != "adafactorbv":
        reading.same("opt_eps", {"optim.eps": args["opt_eps"] or _EPS.get(ours, 1e-8)})
    elif args["opt_eps"] is None:
        reading.same("opt_eps")
    else:
        reading.cannot("opt_eps", "Adafactor's epsilon: as without --opt-eps here")
    if ours in ("sgd", "muon", "adafactorbv"):
        reading.same("momentum", {"optim.momentum": args["momentum"]})
    else:
        reading.inert("momentum", f"{name} has betas")
    reading.same(lr_names, {"optim.lr": lr}, how)
    reading.same("weight_decay", {"optim.weight_decay": args["weight_decay"] or 0.0})


def not_available(optimizer: str) -> ValueError:
    """Return the error for an optimizer that is not here, such as "--opt lars"."""
    return ValueError(
        f"{optimizer}: this optimizer is not available, and its learning rate suits no other: put"
        " AdamW in its place, with a rate for it"
    )


def say_optimizer_name(reading: Reading, argument: str, name: str) -> str:
    """Which optimizer `argument` means, and timm's `--opt-kwargs`. Return our name of it.

    Raises ValueError for one that is not available.
    """
    if name not in _OPTIMIZERS:
        raise not_available(f"{reading.table.flag_of(argument)} {name}")
    settings = _OPTIMIZERS[name]
    ours: str = settings["optim.name"]
    further = reading.args.get("opt_kwargs") or {}
    own = _own_settings(ours)
    said = {f"optim.{key}": value for key, value in further.items() if key in own}
    settings = {key: value for key, value in settings.items() if key not in said}
    if name == "adam":
        text = "adam adds the decay to the gradient: AdamW here, which decays weights themselves"
        reading.cannot(argument, text, settings)
    else:
        reading.same(argument, settings)
    if "opt_kwargs" not in reading.args:
        return ours
    if lacking := further.keys() - own:
        text = f"arguments of the optimizer: {', '.join(sorted(lacking))}"
        reading.cannot("opt_kwargs", text, said)
    else:
        reading.same("opt_kwargs", said)
    return ours


def _own_settings(name: str) -> set[str]:
    """Settings that only some optimizers have, such as `name`, and no argument of its own says."""
    (kind,) = (
        k for k in sections()["optim"] if name in get_args(k.model_fields["name"].annotation)
    )
    said = {"betas", "eps", "momentum"}
    return kind.model_fields.keys() - OptimizerConfig.model_fields.keys() - said


def say_clipping(reading: Reading) -> None:
    """`--clip-grad`, and timm's `--clip-mode`: LAMB clips by itself, too, to a norm of 1."""
    args = reading.args
    norm = args["clip_grad"]
    has_own = "lamb" in args["opt"].lower() and (norm is None or norm > 1)
    note = "LAMB's own (max_grad_norm)" if has_own else ""
    mode = args.get("clip_mode", "norm")
    if norm is not None and mode != "norm":
        text = f"gradients are clipped by {mode}: not clipped here"
        reading.cannot("clip_grad clip_mode", text, {"optim.clip_grad_norm": None})
        return
    reading.same("clip_grad", {"optim.clip_grad_norm": 1.0 if has_own else norm}, note)
    if "clip_mode" in args and norm is None:
        reading.inert("clip_mode", "nothing is clipped by --clip-grad")
    elif "clip_mode" in args:
        reading.same("clip_mode")


def say_layer_decay(reading: Reading, argument: str, factor: float | None, form: str) -> None:
    """Rates by depth. form: whether the last norm goes with the head (`beit`) or the last block."""
    if factor is None or factor == 1:
        reading.same(argument)
    else:
        reading.same(argument, {"optim.layer_decay": factor, "optim.layer_decay_form": form})


def say_average(reading: Reading, decay: float | None, *, note: str = "") -> None:
    """`--model-ema-decay`, where an average is kept; note: what differs in its use."""
    if decay is None:
        reading.inert("model_ema_decay", "no average is kept")
    elif note:
        reading.differs("model_ema_decay", note, {"train.ema_decay": decay})
    else:
        reading.same("model_ema_decay", {"train.ema_decay": decay})


def file_here(given: str) -> tuple[str, str]:
    """The file that stands for weights `given`, which may be at a URL, and what to do, in words."""
    if "://" not in given:
        return given, ""
    return given.rpartition("/")[2], f"download {given}"


def say_initial_weights(reading: Reading, theirs: str, source: str | None = None) -> None:
    """What no argument says: how weights are drawn.

    theirs: what is not so here, "" if nothing is. source: the `model.weight_init` that is nearest.
    """
    ours = "normal, std 0.02 (patches LeCun's), and a head of zeros"
    settings = {}
    # Weights of a file are not drawn, and a new head begins at 0.
    if source is not None and "init.checkpoint" not in reading.settings:
        settings = {"model.weight_init": source}
        ours = f"model.weight_init={source}"
    if settings and not theirs:
        reading.same("", settings)
    else:
        text = f"first weights: {ours} here; {theirs or 'a head of std 0.02'} there"
        reading.differs("", text, settings)


def say_precision(reading: Reading, theirs: str) -> None:
    """What no argument says: the number format. theirs: in words."""
    if theirs == "bf16":
        reading.same("", {"train.precision": "bf16"})
        return
    text = f"{theirs} there, bf16 here (train.precision: fp16 and fp32 are available)"
    reading.differs("", text, {"train.precision": "bf16"})
