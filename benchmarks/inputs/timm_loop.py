"""Train with a plain loop that combines timm's parts and reads this project's configs.

    tars -> torch's DataLoader with timm's transforms -> timm's Mixup -> timm's model and loss
         -> timm's optimizer and schedule; after each epoch all images are evaluated

The loop combines timm's parts like timm's train.py on a CPU (`--no-prefetcher`, schedule by
updates), with the config's values. None of this project's code is used for computation. Settings
that the loop does not support must have their defaults.
"""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from inputs.trainings import Outcome
from numpy.typing import NDArray
from PIL import Image
from timm import create_model
from timm.data import Mixup, create_transform
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import dispatch_clip_grad
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vit.config.io import differences, to_dict
from vit.config.schema import Config

KNOWN = {
    "model.name",
    "model.image_size",
    "model.patch_size",
    "model.embed_dim",
    "model.depth",
    "model.num_heads",
    "model.global_pool",
    "model.class_token",
    "model.drop_path_rate",
    "model.weight_init",
    "data.root",
    "data.global_batch_size",
    "loader.num_workers",
    "data.interpolation",
    "augment.crop_scale",
    "augment.crop_ratio",
    "augment.hflip_prob",
    "augment.randaugment_layers",
    "augment.randaugment_magnitude",
    "augment.mixup_alpha",
    "augment.cutmix_alpha",
    "augment.mix_group_size",
    "loss.label_smoothing",
    "optim.lr",
    "optim.weight_decay",
    "schedule.warmup_epochs",
    "schedule.warmup_lr",
    "train.epochs",
    "train.seed",
    "train.precision",
    "train.device",
    "eval.every_epochs",
    "eval.batch_size",
    "eval.crop_pct",
    "eval.reference",
    "checkpoint.every_steps",
    "run.dir",
    "log.wandb",
    "log.report",
}
"""The settings that the loop reads, and settings that do not affect training."""
ONE_WAY = {"train.precision": "fp32", "loader.num_workers": 0, "eval.every_epochs": 1}
"""The settings for which the loop supports only a single value."""


class Place(NamedTuple):
    """The position of an image in a tar."""

    tar: int
    offset: int
    size: int
    label: int


class TarImages(Dataset[tuple[Tensor, int]]):
    """A data set that reads images by their offsets from tars with `<key>.jpg` and `<key>.cls`."""

    def __init__(self, tars: list[Path], transform: Callable[[Image.Image], Tensor]):
        self.transform = transform
        self._files = [os.open(tar, os.O_RDONLY) for tar in tars]
        self.places = list[Place]()
        for number, tar in enumerate(tars):
            with tarfile.open(tar) as members:
                members_by_key: dict[str, dict[str, tuple[int, int]]] = {}
                for member in members:
                    key, _, suffix = member.name.partition(".")
                    members_by_key.setdefault(key, {})[suffix] = (member.offset_data, member.size)
            for parts in members_by_key.values():
                offset, size = parts["cls"]
                label = int(os.pread(self._files[number], size, offset))
                self.places.append(Place(number, *parts["jpg"], label))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        place = self.places[i]
        encoded = os.pread(self._files[place.tar], place.size, place.offset)
        with Image.open(io.BytesIO(encoded)) as image:
            return self.transform(image.convert("RGB")), place.label


def timm_loop(config: Config) -> Outcome:
    """Train with timm's parts in this process. Raises ValueError for unsupported settings."""
    check_known(config)
    assert config.train.epochs is not None, "checked: whole epochs"
    assert config.run.dir is not None, "load_config names it"
    assert config.optim.clip_grad_norm is not None, "checked: the default"

    torch.manual_seed(config.train.seed)
    random.seed(config.train.seed)
    np.random.seed(config.train.seed % 2**32)

    train_loader, eval_loader, num_classes = _loaders(config)
    model = _model(config, num_classes)
    optimizer = create_optimizer_v2(
        model, opt="adamw", lr=config.optim.lr, weight_decay=config.optim.weight_decay
    )

    per_epoch = len(train_loader)
    warmup = round((config.schedule.warmup_epochs or 0) * per_epoch)
    total = round(config.train.epochs * per_epoch)
    scheduler = CosineLRScheduler(
        optimizer,
        t_initial=total - warmup,
        warmup_t=warmup,
        warmup_lr_init=config.schedule.warmup_lr or 0.0,
        warmup_prefix=True,
        t_in_epochs=False,
    )

    mixup = Mixup(
        mixup_alpha=config.augment.mixup_alpha,
        cutmix_alpha=config.augment.cutmix_alpha,
        label_smoothing=config.loss.label_smoothing,
        num_classes=num_classes,
    )
    loss_of = SoftTargetCrossEntropy()

    step = 0
    scheduler.step_update(step)
    curve = list[tuple[float, float]]()
    for epoch in range(round(config.train.epochs)):
        model.train()
        for images, labels in train_loader:
            mixed, targets = mixup(images, labels)
            loss = loss_of(model(mixed), targets)
            optimizer.zero_grad()
            loss.backward()
            dispatch_clip_grad(model.parameters(), config.optim.clip_grad_norm, mode="norm")
            optimizer.step()
            step += 1
            scheduler.step_update(step)
        right = evaluate(model, eval_loader)
        curve.append((epoch + 1.0, 100 * float(right.mean())))
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, top-1 {curve[-1][1]:.2f} %", flush=True)

    Path(config.run.dir).mkdir(exist_ok=True)
    torch.save(model.state_dict(), Path(config.run.dir) / "weights.pth")
    return Outcome(curve, {"model": right}, was_cut=False)


def check_known(config: Config) -> None:
    """Raise ValueError for settings and values that the loop does not support."""
    plain = Config.model_validate(
        {"data": {"root": config.data.root}, "train": {"epochs": config.train.epochs}}
    )
    values = to_dict(config)
    problems = [
        f"{key}: the plain loop has no such setting: keep the default"
        for key in sorted(differences(to_dict(plain), values).keys() - KNOWN)
    ]

    needed = {**ONE_WAY, "augment.mix_group_size": config.data.global_batch_size}
    for key, only_value in needed.items():
        section, _, name = key.partition(".")
        if values[section][name] != only_value:
            problems.append(f"{key}={values[section][name]}: the plain loop requires {only_value}")

    if config.schedule.warmup_lr is None:
        problems.append("schedule.warmup_lr is missing: timm's schedule requires a value")
    if not float(config.train.epochs or 0.5).is_integer():
        problems.append("train.epochs: the plain loop trains only whole epochs")

    if problems:
        raise ValueError("\n".join(problems))


def _loaders(config: Config) -> tuple[DataLoader[Any], DataLoader[Any], int]:
    """Return the loaders for training and evaluation, and the number of classes."""
    augment = config.augment
    both: dict[str, Any] = {
        "input_size": (3, *config.model.height_width()),
        "interpolation": config.data.interpolation,
        "mean": config.data.mean,
        "std": config.data.std,
    }

    policy = None
    if augment.randaugment_layers:
        policy = (
            f"rand-m{augment.randaugment_magnitude:g}-n{augment.randaugment_layers}-mstd0.5-inc1"
        )

    training = create_transform(
        **both,
        is_training=True,
        scale=augment.crop_scale,
        ratio=augment.crop_ratio,
        hflip=augment.hflip_prob,
        color_jitter=0.0,
        auto_augment=policy,
    )
    whole = create_transform(**both, crop_pct=config.eval.crop_pct)

    root = Path(config.data.root)
    train_set = TarImages(sorted(root.glob("train-*.tar")), training)
    eval_set = TarImages(sorted(root.glob("val-*.tar")), whole)
    train_loader = DataLoader(
        train_set, config.data.global_batch_size, shuffle=True, drop_last=True, num_workers=0
    )
    eval_loader = DataLoader(eval_set, config.eval.batch_size, num_workers=0)
    return train_loader, eval_loader, 1 + max(place.label for place in train_set.places)


def _model(config: Config, num_classes: int) -> nn.Module:
    """Create timm's model with the sizes in the config and timm's random initialization."""
    sizes = config.model
    model: nn.Module = create_model(
        "vit_tiny_patch16_224",
        img_size=sizes.height_width(),
        patch_size=sizes.patch_size or int(sizes.name.rpartition("ti")[2]),
        embed_dim=sizes.embed_dim,
        depth=sizes.depth,
        num_heads=sizes.num_heads,
        num_classes=num_classes,
        class_token=sizes.class_token,
        global_pool=sizes.global_pool,
        drop_path_rate=sizes.drop_path_rate or 0.0,
        weight_init="jax" if sizes.weight_init == "jax" else "",
    )
    return model


@torch.inference_mode()
def evaluate(model: nn.Module, loader: DataLoader[Any]) -> NDArray[np.bool_]:
    """Return a mask (N,) of the images that are classified correctly, in shard order."""
    model.eval()
    is_right = [model(images).argmax(1) == labels for images, labels in loader]
    return torch.cat(is_right).numpy()
