"""Arguments that timm's train.py, DeiT and MAE share: augmentation, mixing, optimizer, average."""

from __future__ import annotations

from typing import Any

from vit.config.hints import union_tags
from vit.data.augment.table import AUTO_AUGMENT_SETS
from vit.recipes.reading import Reading

_OPTIMIZERS = {
    "adamw": "adamw",
    "lamb": "lamb",
    "fusedlamb": "lamb",
    "nadamw": "nadamw",
    "adafactorbv": "adafactorbv",
}
"""Names of timm's factory -> ours."""
_BILINEAR_WARPS = "operations that warp are bilinear here, {} there: no known effect on accuracy"


def say_policy(reading: Reading, interpolation: str) -> None:
    """`--aa`, where it applies: timm's RandAugment, AutoAugment and 3-Augment.

    interpolation: that of the warps there (huggingface/pytorch-image-models@aa4b5850:
    timm/data/auto_augment.py, rand_augment_transform, auto_augment_transform).
    """
    policy = reading.args["aa"]
    if not policy or policy == "None":
        reading.same("aa")
        return
    first, *parts = policy.split("-")
    names = [part.rstrip("0123456789.") for part in parts]
    words = [(name, part.removeprefix(name)) for name, part in zip(names, parts, strict=True)]
    if first == "rand":
        settings, problems = _randaugment(words)
    elif first in AUTO_AUGMENT_SETS and AUTO_AUGMENT_SETS[first][0] == "timm_auto":
        settings, problems = _autoaugment(first, words)
    elif policy == "3a":
        reading.same("aa", {"augment.three_augment": True})
        return
    else:
        reading.cannot("aa", f"the policy {policy}: not available")
        return
    if problems:
        reading.cannot("aa", f"{policy} has {' and '.join(problems)}", settings)
    else:
        reading.differs("aa", _BILINEAR_WARPS.format(interpolation), settings)


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
            settings["augment.randaugment_ops"] = "timm_inc0" if number in ("", "0") else "timm"
        else:
            problems.append(f"{name}{number} of the policy")
    if settings["augment.randaugment_ops"] == "timm":  # the default
        del settings["augment.randaugment_ops"]
    return settings, problems


def _autoaugment(policy: str, words: list[tuple[str, str]]) -> tuple[dict[str, Any], list[str]]:
    """Return settings and what they cannot say of `original-...` and others."""
    settings: dict[str, Any] = {"augment.auto_augment": policy}
    problems = []
    for name, number in words:
        if name == "mstd":
            settings["augment.auto_augment_magnitude_std"] = float(number)
        else:
            problems.append(f"{name}{number} of the policy")
    return settings, problems


def say_color_jitter(reading: Reading, applies: bool) -> None:
    """`--color-jitter`; `applies`: no policy of `--aa` replaces it (transforms_factory)."""
    strength = reading.args["color_jitter"] or 0.0
    if strength and not applies:
        reading.inert("color_jitter", "timm leaves it out where --aa gives a policy, but for 3a")
    elif strength:
        reading.same("color_jitter", {"augment.color_jitter": [strength, strength, strength, 0]})
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
    """`--opt` with `--opt-eps`, `--opt-betas`, `--momentum`, `--weight-decay`.

    lr: the peak rate; how: how it follows, in words; lr_names: the arguments that it follows from.
    Groups are timm's: no decay of what has one dimension, nor of positions and tokens.
    """
    args = reading.args
    name = args["opt"].lower()
    rate = {"optim.lr": lr}
    decay = {"optim.weight_decay": args["weight_decay"] or 0.0}
    if name in ("sgd", "nesterov", "momentum"):
        sgd: dict[str, Any] = {"optim.name": "sgd", "optim.nesterov": name != "momentum"}
        reading.same("opt", sgd)
        reading.same("momentum", {"optim.momentum": args["momentum"]})
        reading.inert("opt_eps opt_betas", f"{name} has none")
    else:
        betas = list(args["opt_betas"] or (0.9, 0.999))
        say_optimizer_name(reading, "opt", name)
        reading.same("opt_betas", {"optim.betas": betas})
        reading.same("opt_eps", {"optim.eps": args["opt_eps"] or 1e-8})
        reading.inert("momentum", f"{name} has betas")
    reading.same(lr_names, rate, how)
    reading.same("weight_decay", decay)


def say_optimizer_name(reading: Reading, argument: str, name: str) -> None:
    """Which optimizer `argument` means; AdamW stands in the place of one that is not available."""
    ours = _OPTIMIZERS.get(name, "")
    if ours in union_tags("optim"):
        reading.same(argument, {"optim.name": ours})
    else:
        text = f"the optimizer {name}: AdamW stands in its place, at its rate and decay"
        reading.cannot(argument, text, {"optim.name": "adamw"})


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
