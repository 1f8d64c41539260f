"""Every setting of a run: its type, default, unit and one sentence.

`vit.config.io` makes a `Config` of one YAML file and the command line's `key=value` overrides. A
`Config` is frozen, complete and checked (`vit.config.checks`); other modules take the section they
need. Defaults are written here and nowhere else. `None` means "derived": from the data, the model's
preset or the number of ranks.

Images and patches are in pixels. A *step* is one global batch attempted. Durations carry their unit
in the key.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from vit.config.base import (
    MAY_CHANGE,
    OnlyWith,
    Positive,
    Probability,
    Section,
    Selection,
    SourceConfig,
)
from vit.config.checks import find_problems
from vit.config.distill_section import DistillConfig
from vit.config.eval_section import EvalConfig
from vit.config.guard_section import GuardConfig
from vit.config.loss_section import LossConfig
from vit.config.model_section import ModelConfig
from vit.config.optim_section import AdamWConfig, OptimConfig
from vit.config.schedule_section import ScheduleConfig


class DataConfig(Selection):
    """Where samples come from and how they are dealt into batches."""

    root: Annotated[str, MAY_CHANGE]
    """Folder of shards with its `_info.json`, or its URL (see docs/data.md)."""
    train_split: str = "train"
    """Split to train on, or a part of one: `train[:99%]` (docs/evaluation.md)."""
    val_split: Annotated[str, MAY_CHANGE] = "val"
    """Split to evaluate on."""
    sources: Annotated[tuple[SourceConfig, ...], MAY_CHANGE, OnlyWith("reader=index")] = ()
    """Several data sets to train on, in place of `train_split` of `root`, which still provides the
    evaluation split and the class names. Each has `root`, `split`, `weight` and what selects
    samples, as
    `[{root: a, weight: 3}, {root: b, weight: 1, fraction: 0.5}]`."""
    cache_dir: Annotated[str | None, MAY_CHANGE] = None
    """Folder on a local disk of each machine that caches blocks of shards. `None`: for shards at a
    URL a folder in `SLURM_TMPDIR` or `TMPDIR`, else `vit` in `XDG_CACHE_HOME` or `~/.cache`,
    whichever is on a local disk; shards in a folder are read in place, without a cache."""
    cache_gib: Annotated[float | None, Field(gt=0), MAY_CHANGE] = None
    """Largest size of that cache in GiB; of several jobs the largest value counts. `None`: half of
    what is free on that disk, at most 50. No effect without a cache."""
    patience_s: Annotated[float, Field(ge=0), MAY_CHANGE] = 480.0
    """Seconds for which a read is retried while a server, an object store or a mounted folder
    does not answer. 0: one attempt. The default is two minutes, which the last attempt may take,
    less than `run.hang_timeout_s`, for which ranks wait for each other."""
    reader: Literal["index", "webdataset"] = "index"
    """How training images are read: `index` reads shards at random, in an exact order;
    `webdataset` streams `stream`, whose order is not exact."""
    stream: Annotated[str | None, OnlyWith("reader=webdataset")] = None
    """URLs of tars with braces, or `pipe:` commands that print tars;
    several joined by `::`."""
    stream_image: Annotated[str | None, OnlyWith("reader=webdataset")] = None
    """For `reader: webdataset`: suffix of the image's member, such as `image.jpg`; several,
    of which each sample has one, as `jpg;png`. `None`: jpg, jpeg, png or webp."""
    stream_label: Annotated[str, OnlyWith("reader=webdataset")] = "cls"
    """For `reader: webdataset`: suffix of the label's member, or a field of a JSON member, as
    `json:label`. A label that is a class name becomes its index among the class names of `root`."""
    stream_keys_with_dots: Annotated[bool, OnlyWith("reader=webdataset")] = False
    """For `reader: webdataset`: a key ends at the last dot of a member's name, not at the first."""
    num_samples: Annotated[Positive | None, OnlyWith("reader=webdataset")] = None
    """For `reader: webdataset`: images per epoch, which cannot be counted without reading
    the stream."""
    global_batch_size: Positive = 1024
    """Images in one step, over all ranks and micro-steps. It never changes with the number of
    GPUs."""
    micro_batch_size: Annotated[Positive | None, MAY_CHANGE] = None
    """Most images in one forward pass of one rank: the largest divisor of a rank's share up to
    this is used. `None`: the whole share."""
    num_workers: Annotated[int, Field(ge=0), MAY_CHANGE] = 4
    """Loader processes per rank; 0 decodes in the training process. Changes the speed, never
    the batches."""
    prefetch_gib: Annotated[float | None, Field(gt=0), MAY_CHANGE] = None
    """GiB per rank for training batches that are being made, ready or in use. `None`: what keeps
    the workers busy, and up to 16 batches ahead where 1 GiB holds them; evaluation always does so.
    No effect with `num_workers: 0`."""
    stall_timeout_s: Annotated[float | None, Field(gt=0), MAY_CHANGE] = 240.0
    """A loader worker that makes no progress for this many seconds is killed, and another makes
    its part of the batch again, once. Waiting for a store that answers now and then is progress.
    `None`: wait, and report it each minute. Twice the default is below the ten minutes for which
    ranks wait for each other."""
    num_lanes: Annotated[Positive | None, OnlyWith("reader=index")] = None
    """Parallel reading positions of the order; divides `global_batch_size`. `None`: its largest
    divisor up to 64."""
    block_samples: Annotated[Positive | None, OnlyWith("reader=index")] = None
    """Consecutive samples that are read together. `None`: 1 below 262,144 samples (a true
    permutation), else 64."""
    window_blocks: Annotated[Positive, OnlyWith("reader=index")] = 16
    """Blocks per shuffling window of a lane, unless a block is one sample: a true permutation."""
    aug_repeats: Annotated[Positive, OnlyWith("reader=index")] = 1
    """Repeated augmentation (Hoffer et al. 2020): copies of an image, each augmented by itself; an
    epoch keeps its number of steps. 1: off."""
    aug_repeats_form: Annotated[
        Literal["batch", "sampler"], OnlyWith("reader=index"), OnlyWith("aug_repeats!=1")
    ] = "batch"
    """`batch`: a batch holds complete sets of copies, and all images are seen in as many epochs
    as there are copies; `sampler`, as in DeiT: each epoch is shuffled again, and the batch need not
    be a multiple of the copies."""
    on_bad_image: Annotated[Literal["error", "skip"], MAY_CHANGE] = "error"
    """For a training image that cannot be decoded: stop and name it, or skip it, which gives its
    row weight 0 and counts it."""
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """Per-channel mean of images scaled to [0, 1]."""
    std: tuple[Annotated[float, Field(gt=0)], ...] = (0.229, 0.224, 0.225)
    """Per-channel standard deviation of images scaled to [0, 1]."""
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    """Antialiased resize of training and evaluation images."""
    scaled_decode: bool = False
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size where a training crop is 2.5, 5 or 10 times
    the model's image: up to 1.6 times as fast for photos of many megapixels where the C decoder is
    not installed, and not exact to the pixel (44 dB)."""


class AugmentConfig(Section):
    """Random changes of each training image, in the order of their fields.

    The defaults crop and flip, nothing else.
    """

    crop: Literal["random_resized", "simple"] = "random_resized"
    """`random_resized`: a window of random area and aspect (Inception); `simple`: resize to cover
    the view, then crop at random with 4 pixels of reflected margin (DeiT III)."""
    crop_scale: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]],
        OnlyWith("crop=random_resized"),
    ] = (0.08, 1.0)
    """Random-resized crop: range of the window's area over the image's (Inception)."""
    crop_ratio: Annotated[
        tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]],
        OnlyWith("crop=random_resized"),
    ] = (3 / 4, 4 / 3)
    """Random-resized crop: range of the window's width over its height."""
    hflip_prob: Probability = 0.5
    """Probability of a horizontal flip."""
    randaugment_layers: Annotated[int, Field(ge=0)] = 0
    """RandAugment operations per image; 0: off."""
    randaugment_ops: Annotated[
        Literal["timm", "timm_inc0", "torchvision", "big_vision"], OnlyWith("randaugment_layers")
    ] = "timm"
    """Whose operations: timm's, increasing (`inc1`) or not, each applied with probability 0.5;
    torchvision's 14 or big_vision's 16, always applied."""
    randaugment_magnitude: Annotated[float, Field(ge=0, le=30), OnlyWith("randaugment_layers")] = (
        9.0
    )
    """RandAugment strength on the scale of `randaugment_ops`: timm 0 to 10, torchvision integers
    from 0 to 30, big_vision 0 to 20."""
    randaugment_magnitude_std: Annotated[
        Annotated[float, Field(ge=0)] | None,
        OnlyWith("randaugment_layers"),
        OnlyWith("randaugment_ops=timm|timm_inc0"),
    ] = None
    """Standard deviation of the strength from one operation to the next; `None`: 0.5 with timm's
    operations; the others have none."""
    auto_augment: (
        Literal["ta_wide", "imagenet", "cifar10", "svhn", "original", "originalr", "v0", "v0r"]
        | None
    ) = None
    """In place of RandAugment: torchvision's TrivialAugment (`ta_wide`) or AutoAugment (`imagenet`,
    `cifar10`, `svhn`); timm's AutoAugment (`original`, `originalr`, `v0`, `v0r`). `None`: off."""
    auto_augment_magnitude_std: Annotated[
        float, Field(ge=0), OnlyWith("auto_augment=original|originalr|v0|v0r")
    ] = 0.0
    """Standard deviation of the strength of timm's AutoAugment (`original-mstd0.5`)."""
    three_augment: bool = False
    """3-Augment (DeiT III): one of grey, solarize and Gaussian blur for each image, in place of
    RandAugment."""
    color_jitter: tuple[
        Probability, Probability, Probability, Annotated[float, Field(ge=0, le=0.5)]
    ] = (0.0, 0.0, 0.0, 0.0)
    """Largest change of brightness, contrast and saturation as a fraction, and of hue in turns,
    in random order (torchvision); 0: off."""
    erasing_prob: Probability = 0.0
    """Probability that a box of the image is erased."""
    erasing_mode: Annotated[Literal["const", "rand", "pixel"], OnlyWith("erasing_prob")] = "pixel"
    """Fill of the erased box: the mean colour, one random colour, or noise per pixel (timm)."""
    erasing_area: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]],
        OnlyWith("erasing_prob"),
    ] = (0.02, 1 / 3)
    """Range of the erased box's area over the image's."""
    erasing_aspect: Annotated[
        tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]],
        OnlyWith("erasing_prob"),
    ] = (0.3, 1 / 0.3)
    """Range of the erased box's height over its width."""
    mixup_alpha: Annotated[float, Field(ge=0, le=2)] = 0.0
    """MixUp: lambda ~ Beta(alpha, alpha); 0: off."""
    cutmix_alpha: Annotated[float, Field(ge=0, le=2)] = 0.0
    """CutMix: area of the pasted box ~ Beta(alpha, alpha); 0: off."""
    mix_prob: Annotated[Probability, OnlyWith("mixup_alpha", "cutmix_alpha")] = 1.0
    """Probability that a group, a pair or an image is mixed at all."""
    cutmix_switch_prob: Annotated[
        Probability, OnlyWith("mixup_alpha"), OnlyWith("cutmix_alpha")
    ] = 0.5
    """Probability of CutMix rather than MixUp."""
    mixup_off_epoch: Annotated[Positive | None, OnlyWith("mixup_alpha", "cutmix_alpha")] = None
    """MixUp and CutMix end after so many epochs of the run (timm's --mixup-off-epoch); `None`:
    never."""
    mixup_mode: Annotated[
        Literal["batch", "pair", "elem"], OnlyWith("mixup_alpha", "cutmix_alpha")
    ] = "batch"
    """What shares lambda and box, as in timm: the group; two images, which mix with each other;
    or nothing, so that each image has its own."""
    mix_group_size: Annotated[int, Field(ge=2), OnlyWith("mixup_alpha", "cutmix_alpha")] = 4
    """Images that mix with each other; divides the micro-batch, so that batches do not depend on
    the number of ranks."""


class TrainConfig(Section):
    """Length, device and number format."""

    epochs: Annotated[float, Field(gt=0)] | None = None
    """Length in epochs; this or `steps`."""
    steps: Positive | None = None
    """Length in steps."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of initial weights, order, augmentation, mixing, dropout and stochastic depth."""
    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_CHANGE] = "auto"
    """`auto`: GPUs where every host has one per rank, else the CPU."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Format of activations and matrix products; weights, sums and the optimizer stay in fp32. fp16
    scales the loss."""
    compile: Annotated[bool, MAY_CHANGE] = False
    """`torch.compile` the blocks of the model and of its average. Where nothing can be compiled, a
    note says why, and training is as without."""
    deterministic: Annotated[bool, MAY_CHANGE] = False
    """Use only kernels that add in one order, so that a resumed run equals the uninterrupted one
    bit for bit on GPUs, too, where it is slower; CPUs do so by themselves (docs/resume.md)."""
    exact_over_ranks: bool = False
    """Add gradients along a tree over the micro-batches of the global batch, and draw dropout and
    drop path by sample: the same weights, bit for bit, on any number of ranks (docs/exactness.md).
    Needs `data.micro_batch_size`; implies `deterministic`."""
    activation_checkpointing: Annotated[
        Literal["none", "block"] | Annotated[int, Field(ge=2)],
        MAY_CHANGE,
        OnlyWith("init.freeze!=backbone"),
    ] = "none"
    """`block`: each block keeps only its input for the backward pass and computes the rest again: a
    third more work for a fraction of the memory, the same numbers. 2 or more: one of so many blocks
    does."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay per update of the exponential moving average (EMA) of the weights; `None`: no
    average."""
    ema_warmup: Annotated[bool, OnlyWith("ema_decay")] = False
    """Let the decay grow as (1 + t) / (10 + t) over steps t until it reaches `ema_decay`, so
    that the average of a short run is not mostly the initial weights; off: a constant decay."""
    ema_warmup_power: Annotated[
        Annotated[float, Field(gt=0)] | None, OnlyWith("ema_warmup=true")
    ] = None
    """With it the warm-up is 1 - (1 + t / `ema_warmup_gamma`)^-power (timm's ModelEmaV3; 2/3 for
    its --model-ema-warmup, 3/4 for short runs)."""
    ema_warmup_gamma: Annotated[float, Field(gt=0), OnlyWith("ema_warmup_power")] = 1.0
    """Steps by which that warm-up counts; larger is slower."""
    ema_every_steps: Annotated[Positive, OnlyWith("ema_decay")] = 1
    """Steps between two updates of the average, counted in each epoch (torchvision's
    --model-ema-steps: 32); `ema_decay` is that of an update."""
    ema_after_epochs: Annotated[Annotated[float, Field(gt=0)] | None, OnlyWith("ema_decay")] = None
    """Epochs in which the average is a copy of the weights (torchvision: the warm-up's; timm's
    update_after_step); `None`: it begins with the run."""
    max_skipped_steps: Annotated[Positive, MAY_CHANGE] = 10
    """Stop after this many consecutive updates that were left out, because a gradient was not
    finite or by `guard.on_spike`."""


class CheckpointConfig(Section):
    """Full state for resuming; the last step of a run is saved too, also when a signal stops it."""

    every_steps: Positive = 1000
    """Steps between checkpoints."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints to keep; an older one is removed only after the newer is complete."""


class InitConfig(Section):
    """Weights to start from."""

    checkpoint: str | None = None
    """Run folder, checkpoint folder or weights file; positions are resampled to
    `model.image_size`."""
    reset_head: Annotated[bool, OnlyWith("checkpoint")] = False
    """Start with a zero head in place of the checkpoint's, for other classes."""
    select_classes: Annotated[bool, OnlyWith("checkpoint")] = False
    """Of the checkpoint's head keep the rows of the data's classes, found by name, in the data's
    order: 200 of 1,000 classes, or the same ones in another order."""
    freeze: Annotated[
        Literal["none", "backbone"] | Annotated[int, Field(ge=0)], OnlyWith("checkpoint")
    ] = "none"
    """What training leaves as it is in the checkpoint: `backbone`, all but the head (a feature
    extractor); or a number k, the patch embedding, tokens, positions and the first k blocks."""


class RunConfig(Section):
    """Location of the run."""

    dir: str | None = None
    """Folder of checkpoints, weights and record, or its URL, as `s3://bucket/runs/name`
    (docs/resume.md); the same command resumes it. `None`: `runs/<name of the config file>`."""
    local_dir: str | None = None
    """Folder of this machine in which a run at a URL is worked on. `None`: one in `SLURM_TMPDIR` or
    `TMPDIR`, else in `vit` in `XDG_CACHE_HOME` or `~/.cache`."""
    lease_s: Annotated[float, Field(ge=1)] = 60.0
    """Seconds after which another job may go on with a run at a URL whose job has died. No effect
    on a run in a folder, which is locked."""
    hang_timeout_s: Annotated[float | None, Field(ge=1)] = 600.0
    """Seconds that a rank may stand still, or be silent, while the others wait for it; then all end
    with its name (docs/resume.md). `None`: only gloo and NCCL have a limit, of ten minutes, and
    name nobody."""


class LogConfig(Section):
    """The record of a run, and where it is shown."""

    every_steps: Positive | None = None
    """Steps between two lines of training metrics. `None`: 50, or a twentieth of a run of less
    than 1,000 steps."""
    norms_every_steps: Positive | None = None
    """Steps between two measurements of each layer's gradient, weights and update, and of its
    largest attention logit, also made at the last step (docs/training.md); `None`: never."""
    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    """Weights & Biases: `auto` is online with a key and a network, else offline. The record is
    complete without it."""
    wandb_project: str = "vit"
    """Project of the run on Weights & Biases."""
    tensorboard: bool = False
    """Event files for TensorBoard in `tensorboard/` of the run's folder. Needs `pip install
    tensorboard`; without it one line says so, and the record is complete."""
    report: bool = True
    """Write `report/index.html` and its pictures when the run is finished."""
    sample_losses: Annotated[int, Field(ge=0)] = 1
    """Keep loss and margin of each training image in every n-th epoch, at 4 bytes each
    (docs/samples.md); 1: in each epoch; 0: never. No effect with `reader: webdataset`."""


class Config(Section):
    """All settings of one run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig
    augment: AugmentConfig = AugmentConfig()
    loss: LossConfig = LossConfig()
    distill: DistillConfig = DistillConfig()
    optim: OptimConfig = AdamWConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig
    guard: Annotated[GuardConfig, MAY_CHANGE] = GuardConfig()
    eval: Annotated[EvalConfig, MAY_CHANGE] = EvalConfig()
    checkpoint: Annotated[CheckpointConfig, MAY_CHANGE] = CheckpointConfig()
    init: InitConfig = InitConfig()
    run: Annotated[RunConfig, MAY_CHANGE] = RunConfig()
    log: Annotated[LogConfig, MAY_CHANGE] = LogConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        if problems := find_problems(self):
            raise ValueError("\n".join(problems))
        return self
