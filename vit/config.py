"""Every setting of a run: its type, default, unit and one sentence.

The data's story: `vit.config_io` reads one YAML file and the command line's `key=value` overrides,
and makes a `Config` of them. A `Config` is frozen, complete and checked; every other module takes
the section it needs. What a file does not say has the default written here, and nowhere else.
`None` means "derived": from the data, the model's preset or the number of ranks.

Images and patches are in pixels. A *step* is one global batch attempted. Durations carry their unit
in the key.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from vit.config_checks import find_problems
from vit.sections import Section, Selection, SourceConfig

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(gt=0)]
Size = Annotated[int, Field(gt=0)] | tuple[Positive, Positive]


class ModelConfig(Section):
    """The network. What is `None` is left to the preset or to the model's own default."""

    name: str = "vit_b16"
    """`vit_{ti,s,b,l,h}{patch}` (sizes: `PRESETS` in vit/model.py), or `timm/<any>` for any model
    of timm."""
    image_size: Size = 224
    """Side of the square training image, or `[height, width]`."""
    in_chans: Literal[1, 3] = 3
    """1: images are read as grey; 3: as RGB."""
    num_classes: Positive | None = None
    """Size of the head; `None`: as many classes as the data has."""
    patch_size: Size | None = None
    """Overrides the patch size in the name."""
    embed_dim: Positive | None = None
    """Width of the tokens."""
    depth: Positive | None = None
    """Number of blocks."""
    num_heads: Positive | None = None
    """Attention heads per block; divides `embed_dim`."""
    mlp_ratio: Annotated[float, Field(gt=0)] | None = None
    """Width of the hidden layer of a block's MLP over `embed_dim`."""
    qkv_bias: bool | None = None
    """Bias of the query, key and value projections."""
    class_token: bool | None = None
    """Prepend a learned token; needed by `global_pool: token`."""
    global_pool: Literal["token", "avg"] | None = None
    """What the head reads: the class token, or the mean of the patch tokens."""
    pos_embed: Literal["learn", "sincos2d"] | None = None
    """Learned positions, or fixed 2-D sine-cosine ones."""
    pos_drop_rate: Rate | None = None
    """Dropout after the positions are added."""
    proj_drop_rate: Rate | None = None
    """Dropout after the dense layers of a block, query-key-value apart."""
    attn_drop_rate: Rate | None = None
    """Dropout of attention weights."""
    drop_path_rate: Rate | None = None
    """Stochastic depth of the last block; grows linearly from 0 at the first."""
    init_values: Annotated[float, Field(gt=0)] | None = None
    """Initial LayerScale; `None`: no LayerScale."""
    representation_size: Positive | None = None
    """Width of the pre-logits layer (dense + tanh); `None`: the head is one linear layer."""

    def fields(self) -> dict[str, Any]:
        """The keyword arguments for `vit.model.create_model` beyond name, image size and classes:
        what is not `None`."""
        own = self.model_dump(exclude={"name", "image_size", "num_classes"})
        return {key: value for key, value in own.items() if value is not None}


class DataConfig(Selection):
    """Where samples come from and how they are dealt into batches."""

    root: str
    """Folder of shards with its `_info.json`, or its URL (see docs/data.md)."""
    train_split: str = "train"
    """Split to train on."""
    val_split: str = "val"
    """Split to evaluate on."""
    sources: tuple[SourceConfig, ...] = ()
    """Several data sets to train on instead of `train_split` of `root`, which is evaluated on and
    whose class names count: a list of `root`, `split`, `weight` and what chooses samples, as
    `[{root: a, weight: 3}, {root: b, weight: 1, fraction: 0.5}]`."""
    cache_dir: str | None = None
    """Folder on a disk of each machine for blocks of shards. `None`: for shards at a URL a folder
    in `SLURM_TMPDIR` or `TMPDIR`, else `vit` in `XDG_CACHE_HOME` or `~/.cache`, whichever is on a
    disk of the machine; shards in a folder are read in place, without a cache."""
    cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Most that blocks may take there, in GiB; of several jobs the largest counts. `None`: half of
    what is free on that disk, at most 50. Without effect where there is no cache."""
    patience_s: Annotated[float, Field(ge=0)] = 480.0
    """How long, in seconds, reading is tried again while a server, an object store or a mounted
    folder does not answer or gives nothing. 0: one attempt. Two minutes, which the last attempt may
    take, less than the ten for which ranks wait for each other."""
    reader: Literal["index", "webdataset"] = "index"
    """Of training images: `index` reads shards at random and is exact; `webdataset` streams
    `stream` and is not."""
    stream: str | None = None
    """For `reader: webdataset`: URLs of tars with braces, or `pipe:` commands that print tars;
    several joined by `::`."""
    stream_image: str | None = None
    """For `reader: webdataset`: suffix of the image's member, as `image.jpg`; several, one a
    sample, as `jpg;png`. `None`: jpg, jpeg, png or webp."""
    stream_label: str = "cls"
    """For `reader: webdataset`: suffix of the label's member, or a field of a JSON member, as
    `json:label`. A label that is a class name counts as its place among the class names of
    `root`."""
    stream_keys_with_dots: bool = False
    """For `reader: webdataset`: a key ends at the last dot of a member's name, not at the first."""
    num_samples: Positive | None = None
    """For `reader: webdataset`: images that make an epoch; nobody counts them before they are
    read."""
    global_batch_size: Positive = 1024
    """Images in one step, over all ranks and micro-steps. The hardware divides it; it never changes
    with the number of GPUs."""
    micro_batch_size: Positive | None = None
    """Images in one forward pass of one rank: a ceiling; the largest divisor of a rank's share is
    taken. `None`: the whole share."""
    num_workers: Annotated[int, Field(ge=0)] = 4
    """Loader processes per rank; 0 decodes in the training process. Changes the speed, never the
    batches."""
    prefetch_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of a rank for training batches that are being made, ready or in use, in GiB. `None`:
    what keeps the workers busy, and up to 16 batches ahead where 1 GiB holds them; so it always is
    in evaluation. Without effect at `num_workers: 0`."""
    stall_timeout_s: Annotated[float, Field(gt=0)] | None = 240.0
    """A loader worker that makes no progress for so long is killed, and another makes its part of
    the batch again, once; who waits for a store that answers now and then does make progress.
    `None`: it is told each minute and waited for. Twice the default is less than the ten minutes
    for which ranks wait for each other."""
    num_lanes: Positive | None = None
    """Parallel reading positions of the order; divides the batch. `None`: the largest divisor of it
    up to 64."""
    block_samples: Positive | None = None
    """Consecutive samples that stay together on disk reads. `None`: 1 below 262,144 samples (a true
    permutation), else 64."""
    window_blocks: Positive = 16
    """Blocks per shuffling window of a lane. Without effect at one sample a block, which already is
    a true permutation."""
    aug_repeats: Positive = 1
    """Repeated augmentation (Hoffer et al. 2020): copies of an image, each augmented anew; an epoch
    keeps its number of steps. 1: off."""
    aug_repeats_form: Literal["batch", "sampler"] = "batch"
    """Repeats by `batch`: a batch has whole sets of copies, and as many epochs as copies show every
    image; by `sampler`, as in DeiT: each epoch is shuffled anew, and the batch need not be a
    multiple of the copies."""
    on_bad_image: Literal["error", "skip"] = "error"
    """A training image that cannot be decoded: stop and name it, or give its row weight 0 and count
    it."""
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """Per-channel mean of images scaled to [0, 1]."""
    std: tuple[Annotated[float, Field(gt=0)], ...] = (0.229, 0.224, 0.225)
    """Per-channel standard deviation of images scaled to [0, 1]."""
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    """Antialiased resize of training and evaluation images."""
    scaled_decode: bool = False
    """Decode a JPEG at 1/2, 1/4 or 1/8 where a training crop is 2.5, 5 or 10 times the model's
    image: up to 1.6 times as fast for photos of many megapixels, where the C decoder is not
    installed, and no longer to the pixel (44 dB)."""


class AugmentConfig(Section):
    """What is drawn anew for each training image. The defaults crop and flip, nothing else. Fields
    stand in the order of what is done."""

    crop: Literal["random_resized", "simple"] = "random_resized"
    """`random_resized`: a window of random area and aspect (Inception); `simple`: resize until the
    view is covered, then a random view of it with 4 pixels of reflected margin (DeiT III)."""
    crop_scale: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (
        0.08,
        1.0,
    )
    """Random-resized crop: range of the area of the window over the image's (Inception)."""
    crop_ratio: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (3 / 4, 4 / 3)
    """Random-resized crop: range of the window's width over its height."""
    hflip_prob: Probability = 0.5
    """Probability of a horizontal flip."""
    randaugment_layers: Annotated[int, Field(ge=0)] = 0
    """RandAugment operations per image; 0: off."""
    randaugment_ops: Literal["timm", "torchvision", "big_vision"] = "timm"
    """Whose operations: timm's increasing ones, each done with probability .5; torchvision's 14 or
    big_vision's 16, always done. Without effect, like the next two, at `randaugment_layers: 0`."""
    randaugment_magnitude: Annotated[float, Field(ge=0, le=30)] = 9.0
    """RandAugment strength on the scale of `randaugment_ops`: timm 0 to 10, torchvision whole
    numbers from 0 to 30, big_vision 0 to 20."""
    randaugment_magnitude_std: Annotated[float, Field(ge=0)] | None = None
    """Standard deviation of the strength from one operation to the next; `None`: 0.5 with timm's
    operations; the others have none."""
    three_augment: bool = False
    """3-Augment (DeiT III): one of grey, solarize and Gaussian blur for each image, in place of
    RandAugment."""
    color_jitter: tuple[
        Probability, Probability, Probability, Annotated[float, Field(ge=0, le=0.5)]
    ] = (0.0, 0.0, 0.0, 0.0)
    """Largest change of brightness, contrast and saturation as a share, and of hue in turns, in
    random order (torchvision); 0: off."""
    erasing_prob: Probability = 0.0
    """Probability that a box of the image is erased; at 0 the next three are without effect."""
    erasing_mode: Literal["const", "rand", "pixel"] = "pixel"
    """Fill of the erased box: the mean colour, one random colour, or noise in each pixel (timm)."""
    erasing_area: tuple[
        Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]
    ] = (0.02, 1 / 3)
    """Range of the area of the erased box over the image's."""
    erasing_aspect: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (
        0.3,
        1 / 0.3,
    )
    """Range of the height of the erased box over its width."""
    mixup_alpha: Annotated[float, Field(ge=0, le=2)] = 0.0
    """MixUp: lambda ~ Beta(alpha, alpha); 0: off."""
    cutmix_alpha: Annotated[float, Field(ge=0, le=2)] = 0.0
    """CutMix: area of the pasted box ~ Beta(alpha, alpha); 0: off. With both off the next four are
    without effect."""
    mix_prob: Probability = 1.0
    """Probability that a group, a pair or a row is mixed at all."""
    cutmix_switch_prob: Probability = 0.5
    """Where both are on: probability of CutMix rather than MixUp."""
    mixup_mode: Literal["batch", "pair", "elem"] = "batch"
    """What shares lambda and box, as in timm: the group; two images, which mix with each other; or
    nothing, each image having its own."""
    mix_group_size: Annotated[int, Field(ge=2)] = 4
    """Images that mix with each other; divides the micro-batch, so batches do not depend on the
    ranks."""


class LossConfig(Section):
    """Cross-entropy with soft targets."""

    label_smoothing: Rate = 0.0
    """Share of the target spread evenly over all classes."""


class AdamWConfig(Section):
    """AdamW (Loshchilov & Hutter 2019), decay multiplied by the learning rate."""

    name: Literal["adamw"] = "adamw"
    """The optimizer."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate, as used: nothing scales it."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """Decay of weight matrices; biases, norms, positions and class token have none."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global norm of the gradient; `None`: no clipping."""


class SgdConfig(Section):
    """SGD with momentum, decay multiplied by the learning rate through the gradient (L2)."""

    name: Literal["sgd"]
    """The optimizer."""
    lr: Annotated[float, Field(gt=0)] = 1e-2
    """Peak learning rate, as used: nothing scales it."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 decay of weight matrices; biases, norms, positions and class token have none."""
    momentum: Rate = 0.9
    """Momentum."""
    nesterov: bool = False
    """Nesterov's form of the momentum."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global norm of the gradient; `None`: no clipping."""


def _optimizer_tag(value: Any) -> str:
    name = (
        value.get("name", "adamw") if isinstance(value, dict) else getattr(value, "name", "adamw")
    )
    return name if isinstance(name, str) else "adamw"


OptimConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")] | Annotated[SgdConfig, Tag("sgd")],
    Discriminator(_optimizer_tag),
]


class ScheduleConfig(Section):
    """Learning rate over the steps: linear warm-up from 0, then one of three shapes."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Length of the warm-up in steps; this or `warmup_epochs`, or neither for none."""
    warmup_epochs: Annotated[float, Field(ge=0)] | None = None
    """Length of the warm-up in epochs."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate that `cosine` and `linear` fall to, where the run ends."""


class TrainConfig(Section):
    """How long, on what, and in which number format."""

    epochs: Annotated[float, Field(gt=0)] | None = None
    """Length in epochs; this or `steps`."""
    steps: Positive | None = None
    """Length in steps."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds initial weights, order, augmentation, mixing, dropout and drop path."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: GPUs where a host has one for each of its ranks, else the CPU."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Format of activations and matrix products; weights, sums and the optimizer stay in fp32. fp16
    scales the loss."""
    compile: bool = False
    """`torch.compile` the model."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of the exponential average of the weights per step; `None`: no average."""
    ema_warmup: bool = False
    """Let the decay grow as (1 + t) / (10 + t) over steps t until it is `ema_decay`, so that a
    short run's average is not mostly the initial weights; the decay is constant where this is
    off."""
    max_skipped_steps: Positive = 10
    """Stop after so many updates in a row whose gradient was not finite."""


class EvalConfig(Section):
    """Evaluation on `data.val_split`, exact on any number of ranks."""

    every_epochs: Annotated[float, Field(gt=0)] | None = None
    """Evaluate each so many epochs; this or `every_steps`, or neither for the end only. The end is
    evaluated, too, unless the run is shorter than that."""
    every_steps: Positive | None = None
    """Evaluate each so many steps."""
    batch_size: Positive = 64
    """Images in one forward pass of one rank."""
    crop_pct: Annotated[float, Field(gt=0, le=1)] = 0.875
    """Side of the centre crop over the shorter side of the resized image (224 of 256)."""
    resize_px: Positive | None = None
    """Shorter side of the resized image in pixels, in place of `crop_pct`, where it is published
    so."""
    crop_mode: Literal["center", "squash"] = "center"
    """`center` keeps the aspect of the image; `squash` resizes both sides alike (timm's crop_mode):
    at `crop_pct: 1` all is seen."""
    resizer: Literal["torch", "pillow"] = "torch"
    """Whose resize: torch's, or Pillow's, slower, with which most numbers were published; a pixel
    in 200 differs by a level of 255."""


class CheckpointConfig(Section):
    """Full state for resuming; the last step and a stop by a signal are always saved."""

    every_steps: Positive = 1000
    """Save each so many steps."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept; an older one goes only after the newer is complete."""


class InitConfig(Section):
    """Weights to start from."""

    checkpoint: str | None = None
    """Run folder, checkpoint folder or weights file; positions are resampled to
    `model.image_size`."""
    reset_head: bool = False
    """Start with a zero head instead of the checkpoint's, for other classes."""


class RunConfig(Section):
    """Where the run lives."""

    dir: str | None = None
    """Folder of checkpoints, weights and record; the same command resumes it. `None`: `runs/<name
    of the config file>`."""


class LogConfig(Section):
    """The record and its views."""

    every_steps: Positive | None = None
    """Steps between two lines of training metrics. `None`: 50, or a twentieth of a run that is
    shorter than 1,000 steps."""
    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    """Weights & Biases: `auto` is online with a key and a network, else offline; the record is
    complete without it."""
    wandb_project: str = "vit"
    """Project the run is filed under."""
    report: bool = True
    """Make `report/index.html` and its pictures when the run is finished."""


class Config(Section):
    """One run, complete."""

    model: ModelConfig = ModelConfig()
    data: DataConfig
    augment: AugmentConfig = AugmentConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = AdamWConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    init: InitConfig = InitConfig()
    run: RunConfig = RunConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        if problems := find_problems(self):
            raise ValueError("\n".join(problems))
        return self
