"""Generate random settings, numbers of ranks and kills for training runs that take seconds."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from checksums import indexed_as_it_is
from processes import make_shards, train

from vit.data.storage.opening import open_split

CHANCE = 0.25
"""The probability that a row of the tables below is used."""
BATCH = 12
_NO_VIT = tuple(f"model.{name}=null" for name in ("embed_dim", "depth", "num_heads"))

Choices = dict[str, list[tuple[str, ...]]]

OPTIONS: Choices = {
    "optimizer": [
        ("optim.name=sgd",),
        ("optim.name=sgd", "optim.nesterov=true", "optim.weight_decay=0.01"),
        ("optim.name=lamb",),
        ("optim.name=nadamw",),
        ("optim.name=muon",),
        ("optim.name=muon", "optim.nesterov=true", "optim.matrices=timm"),
        ("optim.name=adamuon",),
        ("optim.name=adafactorbv", "optim.min_dim_size_to_factor=8"),
    ],
    "rates": [
        ("optim.layer_decay=0.7",),
        ("optim.layer_decay=0.6", "optim.layer_decay_form=timm"),
        ("optim.no_weight_decay=nothing",),
    ],
    "clipping": [("optim.clip_grad_norm=null",), ("optim.clip_grad_norm=0.3",)],
    "schedule": [
        ("schedule.name=wsd", "schedule.decay_fraction=0.4", "schedule.warmup_steps=2"),
        ("schedule.name=linear", "schedule.interval=epoch"),
        ("schedule.warmup_epochs=1", "schedule.warmup_lr=1e-5", "schedule.warmup_prefix=false"),
        ("schedule.final_weight_decay=0.3",),
    ],
    "precision": [("train.precision=bf16",), ("train.precision=fp16",)],
    "memory": [("train.activation_checkpointing=block",), ("train.deterministic=true",)],
    "average": [
        ("ema.decay=0.9",),
        ("ema.decay=0.9", "ema.warmup=true"),
        ("ema.decay=0.9", "ema.warmup=0.75"),
        ("ema.decay=0.9", "ema.every_steps=3"),
        ("ema.decay=0.9", "ema.after_epochs=1"),
    ],
    "micro-batches": [("data.micro_batch_size=2",), ("data.micro_batch_size=4",)],
    "exact": [
        ("train.exact_over_ranks=true", "data.micro_batch_size=2"),
        ("train.exact_over_ranks=true", "data.micro_batch_size=4"),
    ],
    "guard": [
        (
            *("guard.on_spike=skip", "guard.window_steps=8"),
            *(f"guard.spike_sigmas={sigmas}", "guard.max_skips=100"),
        )
        for sigmas in (0.3, 1)
    ],
    "loss": [
        ("loss.name=bce",),
        ("loss.name=bce", "loss.bce_sum=true", "loss.bce_target_thresh=0"),
        ("loss.label_smoothing=0.1",),
        ("loss.class_weights=[0.5,1,2]",),
    ],
    "mixing": [
        ("augment.mixup_alpha=0.8", "augment.cutmix_alpha=1.0", "augment.mix_group_size=2"),
        ("augment.cutmix_alpha=1.0", "augment.mixup_mode=pair", "augment.mix_group_size=2"),
        ("augment.mixup_alpha=0.2", "augment.mixup_mode=elem", "augment.mix_group_size=2"),
        ("augment.mixup_alpha=0.8", "augment.mixup_off_epoch=1", "augment.mix_group_size=2"),
    ],
    "augmentation": [
        ("augment.randaugment_layers=2",),
        ("augment.randaugment_layers=1", "augment.randaugment_ops=torchvision"),
        ("augment.auto_augment=ta_wide", "augment.erasing_prob=0.5"),
        ("augment.auto_augment=three_augment", "augment.crop=simple"),
        ("augment.color_jitter=[0.3,0.3,0.3,0.1]",),
    ],
    "repeats": [
        ("order.aug_repeats=2",),
        ("order.aug_repeats=3", "order.aug_repeats_form=sampler"),
    ],
    "order": [("order.block_samples=4", "order.num_lanes=3"), ("order.num_lanes=1",)],
    "selection": [
        ("data.fraction=0.7", "data.fraction_of=class"),
        ("data.samples_per_class=12",),
        ("data.train_split=train[20%:]",),
    ],
    "loader": [("loader.num_workers=1",), ("loader.num_workers=2",)],
    "lines": [
        ("log.every_steps=3",),
        ("log.every_steps=5", "log.norms_every_steps=3"),
        ("log.sample_losses=2", "log.norms_every_steps=4"),
    ],
    "saves": [
        ("checkpoint.every_steps=1", "checkpoint.keep_last=1"),
        ("checkpoint.every_steps=2",),
        ("checkpoint.every_steps=5",),
    ],
    "seed": [("train.seed=7",)],
}
"""Maps the name of each row to the settings to choose from, which work with any model."""

VIT: Choices = {
    "dropout": [
        ("model.proj_drop_rate=0.1",),
        ("model.proj_drop_rate=0.1", "model.attn_drop_rate=0.1", "model.mlp_drop_rate=0.2"),
        ("model.pos_drop_rate=0.1", "model.patch_drop_rate=0.5"),
    ],
    "drop path": [
        ("model.drop_path_rate=0.3",),
        ("model.drop_path_rate=0.3", "model.drop_path_schedule=constant"),
        ("model.drop_path_rate=0.5", "model.drop_path_form=subset"),
    ],
    "tokens": [
        ("model.reg_tokens=2",),
        ("model.class_token=false", "model.global_pool=avg"),
        ("model.class_token=false", "model.global_pool=map"),
    ],
    "positions": [
        ("model.pos_embed=sincos2d",),
        ("model.pos_embed=none", "model.rope_type=axial"),
        ("model.rope_type=dinov3", "model.no_embed_class=true"),
    ],
    "layers": [
        ("model.mlp_layer=swiglu", "model.norm_layer=rmsnorm"),
        ("model.qk_norm=true", "model.init_values=0.1"),
        ("model.dual_patch_norm=true", "model.representation_size=16"),
    ],
    "images": [
        ("model.image_size=[16,24]",),
        ("model.in_chans=1", "data.mean=[0.5]", "data.std=[0.25]"),
    ],
    "sizes": [
        ("schedule.image_sizes=[{until_epoch: 1, image_size: 8}]",),
        (
            "schedule.image_sizes=[{until_epoch: 1, image_size: 8},"
            " {until_epoch: 2, image_size: 24}]",
        ),
    ],
}
"""Rows whose settings work only with this project's ViT."""

GUESTS = [
    (f"model.name=timm/test_{name}", "model.image_size=32", *_NO_VIT)
    for name in ("resnet", "efficientnet", "byobnet", "vit")
]
"""Models from timm. Most of them use batch norm."""


@dataclass(frozen=True)
class Data:
    """The files that random settings use: shards with 60 images, shards with 24 images (one of them
    unreadable), and a run whose weights are used for initialization or as a teacher."""

    shards: Path
    spoiled: Path
    trained: Path


@dataclass(frozen=True)
class Kill:
    """A SIGKILL to one rank or to all ranks. The signal is sent `delay_s` seconds after `step`
    appears in the metrics, or after the start if `step` is -1. `takes_folder` tells whether the
    local folder of a run at a URL is also deleted."""

    ranks: int
    step: int
    delay_s: float
    hits_all: bool
    takes_folder: bool


@dataclass(frozen=True)
class Combination:
    """The settings, location and number of ranks of a run, and the kills during the run. `place` is
    "" for a folder, "file" or "s3". `other_ranks` is a second number of ranks that must produce the
    same bits, or 0."""

    settings: tuple[str, ...]
    place: str
    steps: int
    ranks: int
    other_ranks: int
    kills: tuple[Kill, ...]


def make_data(folder: Path) -> Data:
    shards = make_shards(folder)
    spoiled = make_shards(folder / "spoiled", num_train=24, num_val=3, seed=1)
    index = np.load(spoiled / "train.index.npy")
    with open(spoiled / "train-00000.tar", "r+b") as tar:
        tar.seek(int(index["offset"][0]))
        tar.write(bytes(200))
    indexed_as_it_is(open_split(spoiled, "train"), 0)
    config = folder / "trained.yaml"
    config.write_text(f"data: {{root: {shards}, global_batch_size: {BATCH}}}\ntrain: {{steps: 4}}")
    train(config, folder / "trained")
    return Data(shards, spoiled, folder / "trained")


def draw(rng: random.Random, data: Data) -> Combination:
    steps = rng.randrange(8, 21)
    lines: list[tuple[str, ...]] = [
        (f"data.global_batch_size={BATCH}", f"train.steps={steps}"),
        ("checkpoint.every_steps=3", f"eval.every_steps={rng.choice([4, 6])}"),
    ]
    is_guest = rng.random() < 0.2
    tables = [OPTIONS, _named(data)]
    if is_guest:
        lines.append(rng.choice(GUESTS))
    else:
        tables += [VIT, _trained(data)]
    for table in tables:
        lines += [rng.choice(row) for row in table.values() if rng.random() < CHANCE]
    if rng.random() < 0.1:
        lines.append(("train.compile=true",))
    settings = tuple(setting for line in lines for setting in line)
    ranks = rng.choice([1, 2, 2, 3])
    numbers = [number for number in (1, 2, 3) if number != ranks]
    is_exact = "train.exact_over_ranks=true" in settings
    other_ranks = rng.choice(numbers) if is_exact else 0
    moments = sorted(rng.randrange(-1, steps - 1) for _ in range(rng.randrange(1, 4)))
    kills = [
        Kill(
            rng.choice([ranks, other_ranks or ranks]),
            step,
            rng.choice([0.0, rng.uniform(0, 2.0 if step < 0 else 0.2)]),
            rng.random() < 0.5,
            rng.random() < 0.5,
        )
        for step in moments
    ]
    place = rng.choice(["", "", "", "file", "s3"])
    return Combination(settings, place, steps, ranks, other_ranks, tuple(kills))


def _named(data: Data) -> Choices:
    spoiled = str(data.spoiled)
    sources = [
        [{"split": "train[:60%]"}, {"split": "train[60%:]", "fraction": 0.5}],
        [{"weight": 1}, {"root": spoiled, "weight": 2}],
        [
            {"split": "train[:50%]", "weight": 2},
            {"root": spoiled, "split": "train[10%:]", "weight": 1},
        ],
    ]
    skip = "loader.on_bad_image=skip"
    return {
        "sources": [(f"data.sources={json.dumps(each)}", skip) for each in sources],
        "bad images": [(f"data.root={spoiled}", skip)],
    }


def _trained(data: Data) -> Choices:
    """Return settings for a run that starts from a trained model, which must be this project's
    ViT."""
    teacher = f"distill.teacher={data.trained}"
    begin = f"init.checkpoint={data.trained}"
    return {
        "teacher": [
            (teacher,),
            (teacher, "distill.distill_type=soft", "distill.temperature=3"),
            (teacher, "model.dist_token=true"),
        ],
        "first weights": [
            (begin,),
            (begin, "init.freeze=1"),
            (begin, "init.freeze=backbone", "init.reset_head=true"),
        ],
    }
