"""Define every setting of a run: its type, default, unit and description.

`vit.config.io` creates a `Config` from a YAML file and the `key=value` overrides on the command
line. A `Config` is frozen, complete and checked (`vit.config.checks`). Each other module receives
only its own section and defines no defaults. `None` means that a value is derived from the data,
the model's preset or the number of ranks.

Image and patch sizes are in pixels. A *step* is one attempt to train on a global batch. The keys of
durations end with the unit.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vit.config.base import (
    MAY_CHANGE,
    VAL,
    OnlyWith,
    Positive,
    Probability,
    Rate,
    Section,
    Selection,
    Size,
    SourceConfig,
)
from vit.config.checks import Contradictions, find_problems
from vit.config.model_section import ModelConfig
from vit.config.optim_section import AdamWConfig, OptimConfig

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


class EvalSetConfig(Section):
    """One of `eval.sets`, which must differ from `data.val_split` in one of these settings."""

    root: str | None = None
    """Folder or URL of the shards; `None`: `data.root`."""
    split: str | None = None
    """A split, or a part of one, such as `train[99%:]`; `None`: `data.val_split`."""
    labels: str | None = None
    """JSON file with the correct classes of each image, such as ImageNet-ReaL's `real.json`: a list
    of lists in the order of the images' keys, or a list for each key. A prediction of any of these
    classes is correct. Images without a class are skipped and counted. `None`: the labels of the
    shards."""
    classes: Literal["own", "all"] = "own"
    """The set's classes are found in the model by name. `own`: only the logits of the set's classes
    compete, as with the 200 classes of ImageNet-A and -R; `all`: the logits of all the model's
    classes compete."""


class EvalConfig(Section):
    """Evaluation on `data.val_split`, exact on any number of ranks."""

    every_epochs: Annotated[float, Field(gt=0)] | None = None
    """Epochs between evaluations. Set at most one of `every_epochs` and `every_steps`. If neither
    is set, the run is evaluated only after the last step. Otherwise, the last step is also
    evaluated, unless the run is shorter than one interval."""
    every_steps: Positive | None = None
    """Steps between evaluations."""
    batch_size: Positive = 64
    """Number of images in one forward pass on one rank."""
    crop_pct: Annotated[float, Field(gt=0, le=1)] = 0.875
    """Side of the center crop divided by the shorter side of the resized image (224 / 256). The
    shorter side is rounded down to whole pixels."""
    crop_mode: Literal["center", "squash"] = "center"
    """`center` keeps the aspect ratio of the image; `squash` does not (timm's crop_mode). With
    `crop_pct: 1`, `squash` shows the entire image."""
    resizer: Literal["torch", "pillow"] = "torch"
    """Library that resizes images: `torch`, or `pillow`, which is slower but was used for most
    published numbers. Between the two, one pixel in 200 differs by one level of 255, and a few
    photos differ by up to 7 levels."""
    apply_exif: bool | None = None
    """Turn images upright by their EXIF orientation, in evaluation, in prediction and in the
    settings of exported models. `None`: the same choice as when the images in `data.root` were
    prepared."""
    sets: dict[SetName, EvalSetConfig] = Field(default={})
    """Further sets to evaluate on, by name, such as
    `{v2: {root: data/v2, split: train}, real: {labels: real.json}}` (docs/evaluation.md)."""
    best_by: str = VAL
    """The set whose accuracy chooses the `best` weights: one of `sets`, or `val`, which is
    `data.val_split`."""

    reference: str | None = None
    """Published curve to show next to evaluations of `data.val_split`, if the run has the data and
    the length of the curve's recipe: the name of a file in `configs/reference`, or a CSV file in
    the same format (docs/evaluation.md). `None`: no curve."""

    def further_places(self, root: str, split: str) -> list[tuple[str, str]]:
        """Return the root and split of each of `sets`, except those that are (`root`, `split`)."""
        places = [(each.root or root, each.split or split) for each in self.sets.values()]
        return [place for place in dict.fromkeys(places) if place != (root, split)]


class ImageSizeStage(Section):
    """A stage of training with its own image size."""

    until_epoch: Positive
    """Epoch of the run after which the stage ends."""
    image_size: Size
    """Side of the square training image, or `[height, width]`. Each must be a multiple of the patch
    size."""


class ScheduleConfig(Section):
    """Values that change over the run: learning rate (linear warm-up, a shape, and a cool-down),
    weight decay, and the size of training images."""

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after the warm-up. `wsd`: constant, then a decay at the end
    (warm-up, stable, decay: MiniCPM, arXiv 2404.06395)."""
    interval: Annotated[
        Literal["step", "epoch"], OnlyWith("name!=constant", "warmup_epochs", "warmup_steps")
    ] = "step"
    """When the learning rate changes: at every step, or at the beginning of every epoch, as in
    DeiT, torchvision, and timm without --sched-on-updates."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Length of the warm-up in steps. Set at most one of `warmup_steps` and `warmup_epochs`. If
    neither is set, there is no warm-up."""
    warmup_epochs: Annotated[float, Field(ge=0)] | None = None
    """Length of the warm-up in epochs."""
    warmup_lr: Annotated[
        Annotated[float, Field(ge=0)] | None, OnlyWith("warmup_epochs", "warmup_steps")
    ] = None
    """Learning rate of the first update. The rate rises to the peak, which it reaches right after
    the warm-up (timm, DeiT: 1e-6; torchvision: a fraction of the peak; big_vision, MAE: 0). `None`:
    update n of a warm-up of N steps uses n / N of the peak."""
    warmup_prefix: Annotated[
        bool, OnlyWith("warmup_epochs", "warmup_steps"), OnlyWith("name=cosine|linear")
    ] = True
    """`true`: `cosine` and `linear` begin after the warm-up (MAE, big_vision, torchvision);
    `false`: they begin with the run, so the learning rate jumps to their value after the warm-up
    (timm, DeiT)."""
    decay_fraction: Annotated[float, Field(gt=0, le=1), OnlyWith("name=wsd")] = 0.2
    """Length of the decay of `wsd` as a fraction of the run (MiniCPM: 0.1 to 0.2)."""
    decay_form: Annotated[Literal["1-sqrt", "linear"], OnlyWith("name=wsd")] = "1-sqrt"
    """Shape of the decay of `wsd`: 1 minus the square root of the time (timm's default; arXiv
    2405.18392), or linear."""
    cooldown_epochs: Annotated[Annotated[float, Field(gt=0)] | None, OnlyWith("name!=constant")] = (
        None
    )
    """Number of epochs at the end of the run with the constant rate `min_lr`. These epochs are part
    of the run's length, whereas timm adds them to it."""
    min_lr: Annotated[float, Field(ge=0), OnlyWith("name!=constant")] = 0.0
    """Learning rate at the end of the run, for all shapes but `constant`."""
    final_weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay at the end of the run, reached by a cosine from `optim.weight_decay` (DINO,
    BEiT); `None`: the decay is constant."""
    image_sizes: tuple[ImageSizeStage, ...] = ()
    """Stages with other training image sizes before the last epochs, which use `model.image_size`,
    such as `[{until_epoch: 180, image_size: 160}, {until_epoch: 240, image_size: 192}]`
    (EfficientNetV2, arXiv 2104.00298; docs/training.md). Evaluation always uses
    `model.image_size`."""


Action = Literal["skip", "stop"]


class GuardConfig(Section):
    """Reaction to a gradient that is not finite, and to a jump in the loss (docs/training.md)."""

    on_nonfinite: Action = "skip"
    """Reaction to a gradient that is not finite: only skip the update, or stop the run. Such a
    gradient never changes the weights. An overflow of fp16's loss scale only skips the update."""
    on_spike: Literal["none"] | Action = "none"
    """Reaction to an update whose loss is a spike; `none`: apply the update."""
    spike_sigmas: Annotated[float, Field(gt=0), OnlyWith("on_spike=skip|stop")] = 10.0
    """A loss is a spike if it exceeds the median of the last `window_steps` steps by more than this
    many standard deviations (1.4826 times the median distance from the median)."""
    window_steps: Annotated[int, Field(ge=8), OnlyWith("on_spike=skip|stop")] = 128
    """Number of steps from which the limit for spikes is computed. The first steps have no
    limit."""
    max_skips: Positive = 10
    """Stop the run after this many consecutive skipped updates."""


class LossConfig(Section):
    """The training loss, with soft targets; evaluation always reports cross-entropy."""

    name: Annotated[Literal["cross_entropy", "bce"], OnlyWith("distill.task_loss_weight")] = (
        "cross_entropy"
    )
    """`bce`: a binary cross-entropy for each class (timm's "ResNet strikes back", DeiT III,
    big_vision's sigmoid_xent)."""
    label_smoothing: Annotated[Rate, OnlyWith("distill.task_loss_weight")] = 0.0
    """Fraction of the target that is spread evenly over all classes, before `bce_target_thresh`
    applies."""
    bce_target_thresh: Annotated[
        Rate | None, OnlyWith("distill.task_loss_weight"), OnlyWith("name=bce")
    ] = None
    """After mixing, a target above this threshold becomes 1, and any other target 0 (timm's name;
    DeiT III: 0); `None`: soft targets."""
    bce_sum: Annotated[bool, OnlyWith("distill.task_loss_weight"), OnlyWith("name=bce")] = False
    """Sum the binary cross-entropy over the classes (big_vision; timm's --bce-sum) instead of
    averaging it (timm, DeiT III)."""
    class_weights: Annotated[
        Literal["balanced"] | tuple[Annotated[float, Field(ge=0)], ...] | None,
        OnlyWith("distill.task_loss_weight"),
    ] = None
    """Factor of each class's part of the loss, in the order of the classes, as in torch's losses.
    The mean over images is not divided by the factors. `balanced`: images / (classes x images of
    the class), counted in the training images (scikit-learn). `None`: 1 for all classes."""


class DistillConfig(Section):
    """Distillation: the output of a trained model, the teacher, is a second target of each image.

    A model with `model.dist_token` learns this target with its second head (DeiT, arXiv
    2012.12877), and any other model learns it with its only head.
    """

    teacher: Annotated[str | None, MAY_CHANGE] = None
    """Weights of the teacher: a run folder, checkpoint folder, exported folder or file, including
    those of other programs and of any timm model. A resumed run compares the weights, not the path.
    `None`: no teacher."""
    teacher_model: Annotated[str | None, OnlyWith("teacher")] = None
    """timm's name of a teacher from another program, if neither the file nor the folder contains
    the name."""
    distill_type: Annotated[Literal["hard", "soft"], OnlyWith("teacher")] = "hard"
    """`hard`: cross-entropy with the teacher's most likely class (DeiT's best); `soft`: the
    Kullback-Leibler divergence from the teacher's probabilities (timm's `logit`)."""
    temperature: Annotated[
        float, Field(gt=0), OnlyWith("teacher"), OnlyWith("distill_type=soft")
    ] = 1.0
    """Temperature by which the logits of student and teacher are divided. The divergence is
    multiplied by its square (Hinton et al. 2015; timm's --kd-temperature, DeiT's tau)."""
    task_loss_weight: Annotated[float, Field(ge=0), OnlyWith("teacher")] = 0.5
    """Factor of the loss against the labels (timm's name; DeiT's 1 - alpha); 0: only the teacher is
    a target."""
    distill_loss_weight: Annotated[float, Field(gt=0), OnlyWith("teacher")] = 0.5
    """Factor of the loss against the teacher, which is averaged over images and summed over classes
    (timm's name). In DeiT, this is alpha; for `soft`, it is alpha divided by the number of classes,
    because DeiT's code averages over classes."""


class DataConfig(Selection):
    """The source of samples, and their division into batches."""

    root: Annotated[str, MAY_CHANGE]
    """Folder that contains the shards and `_info.json`, or the folder's URL (docs/data.md)."""
    train_split: str = "train"
    """Split to train on, or a part of one: `train[:99%]` (docs/evaluation.md)."""
    val_split: Annotated[str, MAY_CHANGE] = "val"
    """Split to evaluate on."""
    sources: Annotated[tuple[SourceConfig, ...], MAY_CHANGE, OnlyWith("stream.urls=null")] = ()
    """Several data sets to train on, in place of the split `train_split` of `root`. `root` still
    provides the evaluation split and the class names. Each data set has `root`, `split`, `weight`
    and settings that select samples:
    `[{root: a, weight: 3}, {root: b, weight: 1, fraction: 0.5}]`."""
    global_batch_size: Positive = 1024
    """Number of images in one step, over all ranks and micro-steps. It never changes with the
    number of GPUs."""
    micro_batch_size: Annotated[Positive | None, MAY_CHANGE] = None
    """Maximum number of images in one forward pass of one rank. The largest divisor of a rank's
    share of the batch up to this number is used. `None`: the whole share."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Per-channel mean of images scaled to [0, 1]."""
    std: tuple[Annotated[float, Field(gt=0)], ...] = IMAGENET_STD
    """Per-channel standard deviation of images scaled to [0, 1]."""
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    """Method of the antialiased resize of training and evaluation images."""


class StreamConfig(Section):
    """A stream of tars to train on, for sources without random access. The order of its samples is
    not exact."""

    urls: str | None = None
    """URLs of tars, which may contain braces, or `pipe:` commands that print tars. Join several
    with `::`. `None`: training reads the shards of `data` at random, in an exact order."""
    image: Annotated[str | None, OnlyWith("urls")] = None
    """Suffix of the image's member in the tar, such as `image.jpg`, or several suffixes, of which
    each sample has one, such as `jpg;png`. `None`: jpg, jpeg, png or webp."""
    label: Annotated[str, OnlyWith("urls")] = "cls"
    """Suffix of the label's member in the tar, or a field of a JSON member, such as `json:label`. A
    label that is a class name becomes its index among the class names of `data.root`."""
    num_samples: Annotated[Positive | None, OnlyWith("urls")] = None
    """Number of images per epoch, which cannot be counted without reading the stream."""


class LoaderConfig(Section):
    """How images are read and decoded."""

    num_workers: Annotated[int, Field(ge=0)] = 4
    """Loader processes per rank; 0 decodes in the training process. Changes the speed, never
    the batches."""
    stall_timeout_s: Annotated[float | None, Field(gt=0)] = 240.0
    """If a loader worker makes no progress for this many seconds, all workers of its rank are
    replaced, once for each part of a batch. Waiting for a store that still answers counts as
    progress. `None`: keep waiting, and report the wait each minute. Twice the default is less than
    the ten minutes for which ranks wait for each other."""
    cache_dir: str | None = None
    """Folder on a local disk of each machine that caches blocks of shards. `None`: shards at a URL
    are cached in a folder in `SLURM_TMPDIR` or `TMPDIR`, else in `vit` in `XDG_CACHE_HOME` or
    `~/.cache`, whichever is on a local disk; shards in a folder are read in place, without a
    cache."""
    cache_gib: Annotated[float | None, Field(gt=0)] = None
    """Maximum size of the cache in GiB; if several jobs share it, the largest value applies.
    `None`: half of the free space on the cache's disk, at most 50. No effect without a cache."""
    patience_s: Annotated[float, Field(ge=0)] = 480.0
    """Seconds for which a read is retried while a server, an object store or a mounted folder
    does not answer. 0: one attempt. The default is two minutes less than `run.hang_timeout_s`,
    because the last attempt may take two minutes."""
    on_bad_image: Literal["error", "skip"] = "error"
    """Reaction to a training image that cannot be decoded: `error` stops the run and names the
    image; `skip` gives the image's row weight 0 and counts the image."""


class OrderConfig(Section):
    """The order of the training samples."""

    num_lanes: Annotated[Positive | None, OnlyWith("stream.urls=null")] = None
    """Number of parallel reading positions in the order, which must divide `global_batch_size`.
    `None`: the largest divisor of `global_batch_size` up to 64."""
    block_samples: Annotated[Positive | None, OnlyWith("stream.urls=null")] = None
    """Number of consecutive samples that are read together as a block. Each lane shuffles the
    samples of 16 blocks. `None`: 1 below 262,144 samples (a true permutation), else 64."""
    aug_repeats: Annotated[Positive, OnlyWith("stream.urls=null")] = 1
    """Repeated augmentation (Hoffer et al. 2020): number of copies of an image, each of which is
    augmented independently. An epoch keeps its number of steps. 1: off."""
    aug_repeats_form: Annotated[
        Literal["batch", "sampler"], OnlyWith("stream.urls=null"), OnlyWith("aug_repeats!=1")
    ] = "batch"
    """`batch`: a batch contains complete sets of copies, and seeing all images takes as many epochs
    as there are copies; `sampler`, as in DeiT: each epoch is shuffled again, and the batch size
    need not be a multiple of the number of copies."""


class AugmentConfig(Section):
    """Random changes to each training image, in the order of these settings.

    By default, images are only cropped and flipped.
    """

    crop: Literal["random_resized", "simple", "padded"] = "random_resized"
    """`random_resized`: a window of random area and aspect ratio (Inception); `simple`: resize to
    cover the view, then crop at random with 4 pixels of reflected margin (DeiT III); `padded`: the
    same with a black margin, as CIFAR recipes do."""
    crop_scale: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]],
        OnlyWith("crop=random_resized"),
    ] = (0.08, 1.0)
    """Random-resized crop: range of the window's area divided by the image's area (Inception)."""
    crop_ratio: Annotated[
        tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]],
        OnlyWith("crop=random_resized"),
    ] = (3 / 4, 4 / 3)
    """Random-resized crop: range of the window's width divided by its height."""
    hflip_prob: Probability = 0.5
    """Probability of a horizontal flip."""
    randaugment_layers: Annotated[int, Field(ge=0)] = 0
    """Number of RandAugment operations per image; 0: off."""
    randaugment_ops: Annotated[
        Literal["timm", "timm_inc0", "torchvision", "big_vision"], OnlyWith("randaugment_layers")
    ] = "timm"
    """Set of RandAugment operations: timm's, increasing (`inc1`) or not, each of which is applied
    with probability 0.5; or torchvision's 14 or big_vision's 16, which are always applied."""
    randaugment_magnitude: Annotated[float, Field(ge=0, le=30), OnlyWith("randaugment_layers")] = (
        9.0
    )
    """RandAugment strength on the scale of `randaugment_ops`: 0 to 10 for timm, integers from 0 to
    30 for torchvision, 0 to 20 for big_vision."""
    magnitude_std: Annotated[
        Annotated[float, Field(ge=0)] | None,
        OnlyWith("randaugment_layers", "auto_augment=original|originalr|v0|v0r"),
        OnlyWith("randaugment_ops=timm|timm_inc0", "auto_augment=original|originalr|v0|v0r"),
    ] = None
    """Standard deviation of the strength across the operations of timm's RandAugment and
    AutoAugment (`original-mstd0.5`). `None`: 0.5 with timm's RandAugment operations, 0 with all
    other operations."""
    auto_augment: (
        Literal[
            "ta_wide",
            "imagenet",
            "cifar10",
            "svhn",
            "original",
            "originalr",
            "v0",
            "v0r",
            "three_augment",
        ]
        | None
    ) = None
    """Policy that replaces RandAugment: torchvision's TrivialAugment (`ta_wide`) or AutoAugment
    (`imagenet`, `cifar10`, `svhn`); timm's AutoAugment (`original`, `originalr`, `v0`, `v0r`); or
    3-Augment (`three_augment`, DeiT III): grayscale, solarize or Gaussian blur for each image.
    `None`: off."""
    color_jitter: tuple[
        Probability, Probability, Probability, Annotated[float, Field(ge=0, le=0.5)]
    ] = (0.0, 0.0, 0.0, 0.0)
    """Largest change in brightness, contrast and saturation as a fraction, and in hue as a fraction
    of the color circle, applied in random order (torchvision); 0: off."""
    erasing_prob: Probability = 0.0
    """Probability that a box of the image is erased."""
    erasing_mode: Annotated[Literal["const", "rand", "pixel"], OnlyWith("erasing_prob")] = "pixel"
    """Fill of the erased box: the mean color, one random color, or noise per pixel (timm)."""
    erasing_area: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]],
        OnlyWith("erasing_prob"),
    ] = (0.02, 1 / 3)
    """Range of the erased box's area divided by the image's area."""
    erasing_aspect: Annotated[
        tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]],
        OnlyWith("erasing_prob"),
    ] = (0.3, 1 / 0.3)
    """Range of the erased box's height divided by its width."""
    mixup_alpha: Annotated[float, Field(ge=0, le=2)] = 0.0
    """MixUp: lambda ~ Beta(alpha, alpha); 0: off."""
    cutmix_alpha: Annotated[float, Field(ge=0, le=2)] = 0.0
    """CutMix: area of the pasted box ~ Beta(alpha, alpha); 0: off."""
    mix_prob: Annotated[Probability, OnlyWith("mixup_alpha", "cutmix_alpha")] = 1.0
    """Probability that a group, a pair or an image is mixed."""
    cutmix_switch_prob: Annotated[
        Probability, OnlyWith("mixup_alpha"), OnlyWith("cutmix_alpha")
    ] = 0.5
    """Probability of CutMix rather than MixUp."""
    mixup_off_epoch: Annotated[Positive | None, OnlyWith("mixup_alpha", "cutmix_alpha")] = None
    """MixUp and CutMix end after this many epochs of the run (timm's --mixup-off-epoch); `None`:
    never."""
    mixup_mode: Annotated[
        Literal["batch", "pair", "elem"], OnlyWith("mixup_alpha", "cutmix_alpha")
    ] = "batch"
    """Images that share lambda and box, as in timm: `batch`, all images in a group; `pair`, the two
    images that are mixed with each other; `elem`, none: each image has its own lambda and box."""
    mix_group_size: Annotated[int, Field(ge=2), OnlyWith("mixup_alpha", "cutmix_alpha")] = 4
    """Number of images in a group that mix with each other. It must divide the micro-batch, so that
    batches do not depend on the number of ranks."""


class TrainConfig(Section):
    """Length, device and number format."""

    epochs: Annotated[float, Field(gt=0)] | None = None
    """Length in epochs. Set either `epochs` or `steps`."""
    steps: Positive | None = None
    """Length in steps."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of initial weights, order, augmentation, mixing, dropout and stochastic depth."""
    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_CHANGE] = "auto"
    """`auto`: GPUs if every host has one per rank, else the CPU."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of activations and matrix products; weights, sums and the optimizer stay in
    fp32. With fp16, the loss is scaled. `auto`: bf16 if the GPUs or CPUs of all ranks compute in
    bf16, else fp32; a resumed run keeps its format."""
    residual_dtype: Annotated[Literal["fp32", "bf16"], OnlyWith("precision=bf16")] = "fp32"
    """Format of the tokens between the blocks, to which each block adds, in training and
    evaluation. If `compile` is on, `bf16` moves and stores half as many bytes as fp32; norms still
    compute in fp32."""
    attention: Annotated[
        Literal["auto", "flash", "cudnn", "efficient", "math", "flash3"], MAY_CHANGE
    ] = "auto"
    """The only attention kernel that torch may use; `auto`: torch's choice, but plain matrix
    products for training in bf16 on CPUs. `flash3` needs Dao's FlashAttention 3. If a kernel does
    not work on this machine, the error lists those that do."""
    reduce_dtype: Annotated[Literal["fp32", "bf16"], OnlyWith("exact_over_ranks=false")] = "fp32"
    """Format in which DDP sums gradients over ranks. `bf16` sends half as many bytes and rounds
    each partial sum to 8 bits (docs/training.md). No effect on one rank."""
    compile: Annotated[
        bool | Literal["auto", "max-autotune-no-cudagraphs", "reduce-overhead"], MAY_CHANGE
    ] = False
    """Compile the blocks of the model and of its average with `torch.compile`, in torch's default
    mode (`true`) or another mode: `max-autotune-no-cudagraphs` times more kernels, and
    `reduce-overhead` replays CUDA graphs, which was not tried on a GPU yet. `auto`: `true` on GPUs
    only, because on CPUs it costs more than it saves. If compilation fails, a note gives the
    reason, and training continues uncompiled."""
    deterministic: Annotated[bool, MAY_CHANGE] = False
    """Use only kernels that add in a fixed order, so that a resumed run gives the same result as an
    uninterrupted run, bit for bit, on GPUs too. This is slower on GPUs. CPUs always add in a fixed
    order (docs/resume.md)."""
    exact_over_ranks: bool = False
    """Add gradients along a tree over the micro-batches of the global batch, and draw dropout and
    drop path by sample. The weights are then the same, bit for bit, on any number of ranks
    (docs/exactness.md). Needs `data.micro_batch_size`; implies `deterministic`."""
    activation_checkpointing: Annotated[
        Literal["none", "block"] | Annotated[int, Field(ge=2)],
        MAY_CHANGE,
        OnlyWith("init.freeze!=backbone"),
    ] = "none"
    """`block`: each block keeps only its input for the backward pass, and computes its activations
    again. This takes a third more work and a fraction of the memory, and gives the same numbers. A
    number n of 2 or more: only every n-th block does this."""


class EmaConfig(Section):
    """The exponential moving average (EMA) of the weights."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay per update of the exponential moving average (EMA) of the weights; `None`: no
    average."""
    warmup: Annotated[bool | Annotated[float, Field(gt=0, lt=1)], OnlyWith("decay")] = False
    """Let the decay grow over steps t until it reaches `decay`, so that the average of a short run
    does not consist mostly of the initial weights. `true`: as (1 + t) / (10 + t); a number p: as
    1 - (1 + t)^-p (timm's ModelEmaV3; 2/3 for its --model-ema-warmup, 3/4 for short runs); `false`:
    a constant decay."""
    every_steps: Annotated[Positive, OnlyWith("decay")] = 1
    """Steps between two updates of the average, counted from the start of each epoch (torchvision's
    --model-ema-steps: 32). `decay` applies once per update."""
    after_epochs: Annotated[Annotated[float, Field(gt=0)] | None, OnlyWith("decay")] = None
    """Number of epochs in which the average is only a copy of the weights. In torchvision, these
    are the epochs of the warm-up; timm calls the setting update_after_step. `None`: averaging
    begins with the run."""


class CheckpointConfig(Section):
    """The full state for resuming. The last step of a run is also saved, even after a signal."""

    every_steps: Positive = 1000
    """Steps between checkpoints."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Number of newest checkpoints to keep. An older checkpoint is removed only after the newer one
    is complete."""
    keep_every: Positive | None = None
    """Also keep each checkpoint whose step is a multiple of `keep_every` times `every_steps`: with
    10 and 1000, those of steps 10,000, 20,000 and so on. `None`: keep only the newest."""


class InitConfig(Section):
    """Weights to start from."""

    checkpoint: str | None = None
    """Run folder, checkpoint folder, weights file, or a name on the Hugging Face hub: `timm/NAME`,
    `hf-hub:OWNER/REPO`. Positions are resampled to `model.image_size`."""
    reset_head: Annotated[bool, OnlyWith("checkpoint")] = False
    """Start with a zero head in place of the checkpoint's head, for other classes."""
    select_classes: Annotated[bool, OnlyWith("checkpoint")] = False
    """Keep only those rows of the checkpoint's head that belong to the data's classes, matched by
    name, in the data's order: 200 of 1,000 classes, or the same classes in a different order."""
    freeze: Annotated[
        Literal["none", "backbone"] | Annotated[int, Field(ge=0)], OnlyWith("checkpoint")
    ] = "none"
    """Parameters that training does not change. `backbone`: all but the head (a feature extractor).
    A number k: the patch embedding, tokens, positions and the first k blocks."""


class RunConfig(Section):
    """Location of the run."""

    dir: str | None = None
    """Folder of the run's checkpoints, weights and metrics, or the folder's URL, such as
    `s3://bucket/runs/name` (docs/resume.md). The same command resumes the run. `None`:
    `runs/<name of the config file>`."""
    local_dir: str | None = None
    """Folder on this machine for the local copy of a run at a URL. `None`: a folder in
    `SLURM_TMPDIR` or `TMPDIR`, else in `vit` in `XDG_CACHE_HOME` or `~/.cache`."""
    lease_s: Annotated[float, Field(ge=1)] = 60.0
    """Seconds after which another job may continue a run at a URL if the run's job has died. No
    effect on a run in a folder, which is locked."""
    hang_timeout_s: Annotated[float | None, Field(ge=1)] = 600.0
    """Seconds that a rank may make no progress, or be silent, while the others wait for it. Then
    all ranks end with an error that names this rank (docs/resume.md). `None`: only the ten-minute
    limit of gloo and NCCL applies, and their errors do not name the rank."""


class LogConfig(Section):
    """The metrics of a run, and the programs that show them."""

    every_steps: Positive | None = None
    """Steps between two lines of training metrics. `None`: 50, or a twentieth of the steps of a run
    with fewer than 1,000 steps."""
    norms_every_steps: Positive | None = None
    """Steps between two measurements of the norms of each layer's gradient, weights and update, and
    of its largest attention logit. The last step is also measured (docs/training.md). `None`:
    never."""
    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    """Weights & Biases: `auto` is online unless WANDB_MODE differs; `offline` writes a folder for
    `wandb sync` when the run ends. The project is `vit`, unless WANDB_PROJECT names another.
    `metrics.jsonl` is complete without W&B."""
    tensorboard: bool = False
    """Write event files for TensorBoard to `tensorboard/` in the run's folder. Needs `pip install
    tensorboard`; a log line reports if tensorboard is missing."""
    report: bool = True
    """Write `report/index.html` and its pictures when the run is finished."""
    sample_losses: Annotated[int, Field(ge=0)] = 1
    """Save the loss and margin of each training image in every n-th epoch, in 4 bytes per image
    (docs/samples.md); 1: in each epoch; 0: never. No effect with `stream.urls`."""


class Config(Section):
    """All settings of one run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig
    stream: StreamConfig = StreamConfig()
    order: OrderConfig = OrderConfig()
    loader: Annotated[LoaderConfig, MAY_CHANGE] = LoaderConfig()
    augment: AugmentConfig = AugmentConfig()
    loss: LossConfig = LossConfig()
    distill: DistillConfig = DistillConfig()
    optim: OptimConfig = AdamWConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig
    ema: EmaConfig = EmaConfig()
    guard: Annotated[GuardConfig, MAY_CHANGE] = GuardConfig()
    eval: Annotated[EvalConfig, MAY_CHANGE] = EvalConfig()
    checkpoint: Annotated[CheckpointConfig, MAY_CHANGE] = CheckpointConfig()
    init: InitConfig = InitConfig()
    run: Annotated[RunConfig, MAY_CHANGE] = RunConfig()
    log: Annotated[LogConfig, MAY_CHANGE] = LogConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := find_problems(self):
            raise Contradictions(problems)
        return self
