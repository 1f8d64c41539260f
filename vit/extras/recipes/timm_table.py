"""List the arguments of timm's train.py, including removed arguments and old defaults.

Defaults are from huggingface/pytorch-image-models@aa4b5850:train.py.
"""

from __future__ import annotations

import re

from vit.extras.recipes.arguments import make_table
from vit.extras.recipes.reading import Reading

_RECIPE = """
--model                   str     resnet50   model.name
--pretrained              on      -       init.checkpoint
--pretrained-path         str     -       init.checkpoint
--initial-checkpoint      str     -       init.checkpoint
--num-classes             int     -       model.num_classes
--gp                      str     -       model.global_pool
--img-size                int     -       model.image_size
--in-chans                int     -       model.in_chans
--input-size              ints    -       model.in_chans and model.image_size
--crop-pct                float   -       eval.crop_pct
--mean                    floats  -       data.mean
--std                     floats  -       data.std
--interpolation           str     -       data.interpolation, of evaluation
-b --batch-size           int     128     per GPU; data.global_batch_size is the total
--grad-accum-steps        int     1       batches per step
--model-kwargs            pairs   -       model
--head-init-scale         float   -       initial weights of the head
--head-init-bias          float   -       model.init_head_bias
--amp                     on      -       train.precision
--apex-amp                on      -       train.precision, in old versions
--native-amp              on      -       train.precision, in old versions
--amp-dtype               str     float16  train.precision
--model-dtype             str     -       dtype of the weights
--opt                     str     sgd     optim.name
--opt-eps                 float   -       optim.eps
--opt-betas               floats  -       optim.betas
--momentum                float   0.9     optim.momentum
--weight-decay            float   2e-5    optim.weight_decay
--clip-grad               float   -       optim.clip_grad_norm
--clip-mode               str     norm    kind of clipping
--layer-decay             float   -       layer-wise rates
--layer-decay-min-scale   float   0       layer-wise rates
--layer-decay-no-opt-scale  float  -      layer-wise rates
--opt-kwargs              pairs   -       of the optimizer
--sched                   str     cosine  schedule.name
--sched-on-updates        on      -       the rate changes each step instead of each epoch
--lr                      float   -       optim.lr
--lr-base                 float   0.1     optim.lr, for a batch of --lr-base-size
--lr-base-size            int     256     optim.lr
--lr-base-scale           str     -       linear, or sqrt for Adam and LAMB
--lr-noise                floats  -       -
--lr-noise-pct            float   0.67    -
--lr-noise-std            float   1.0     -
--lr-cycle-mul            float   1.0     of restarts
--lr-cycle-decay          float   0.5     of restarts
--lr-cycle-limit          int     1       of restarts
--lr-k-decay              float   1.0     shape of the cosine
--warmup-lr               float   1e-5    schedule
--min-lr                  float   0       schedule.min_lr
--epochs                  int     300     train.epochs
--epoch-repeats           float   0       passes over the data in an epoch
--decay-milestones        ints    [90, 180, 270]   of step schedules
--decay-epochs            float   90      of step schedules
--warmup-epochs           int     5       schedule.warmup_epochs
--warmup-prefix           on      -       warm-up before --epochs
--cooldown-epochs         int     0       epochs at --min-lr after --epochs
--patience-epochs         int     10      of the plateau schedule
--decay-rate --dr         float   0.1     of step schedules
--no-aug                  on      -       no augmentation
--train-crop-mode         str     -       augment.crop
--scale                   floats  [0.08, 1.0]   augment.crop_scale
--ratio                   floats  [0.75, 1.3333333333333333]   augment.crop_ratio
--hflip                   float   0.5     augment.hflip_prob
--vflip                   float   0       vertical flips
--color-jitter            float   0.4     augment.color_jitter
--color-jitter-prob       float   -       probability of a colour change
--grayscale-prob          float   -       probability of grey images
--gaussian-blur-prob      float   -       probability of blurred images
--aa                      str     -       augment.randaugment_layers and others
--aug-repeats             float   0       order.aug_repeats
--aug-splits              int     0       parts of a batch with different augmentation
--jsd-loss                on      -       loss
--bce-loss                on      -       loss
--bce-sum                 on      -       loss
--bce-target-thresh       float   -       loss
--bce-pos-weight          float   -       loss
--reprob                  float   0       augment.erasing_prob
--remode                  str     pixel   augment.erasing_mode
--recount                 int     1       number of erased boxes
--resplit                 on      -       -
--mixup                   float   0.0     augment.mixup_alpha
--cutmix                  float   0.0     augment.cutmix_alpha
--cutmix-minmax           floats  -       -
--mixup-prob              float   1.0     augment.mix_prob
--mixup-switch-prob       float   0.5     augment.cutmix_switch_prob
--mixup-mode              str     batch   augment.mixup_mode
--mixup-off-epoch         int     0       epoch after which mixing stops
--smoothing               float   0.1     loss.label_smoothing
--train-interpolation     str     random  data.interpolation
--drop                    float   0.0     dropout before the head
--drop-connect            float   -       drop path's old name
--drop-path               float   -       model.drop_path_rate
--drop-block              float   -       of convolutions
--bn-momentum             float   -       of batch norm
--bn-eps                  float   -       of batch norm
--sync-bn                 on      -       of batch norm
--dist-bn                 str     reduce  of batch norm
--split-bn                on      -       of batch norm
--model-ema               on      -       ema.decay
--model-ema-decay         float   0.9998  ema.decay
--model-ema-warmup        on      -       ema.warmup
--seed                    int     42      train.seed
--val-interval            int     1       eval.every_epochs
--train-img-sizes         ints    -       varying sizes of training images
--train-batch-sizes       ints    -       varying sizes of training images
--train-size-probs        floats  -       varying sizes of training images
--train-size-schedule     str     constant   varying sizes of training images
--train-size-schedule-spread  float  0.65   varying sizes of training images
--train-size-random-mix   float   0.1     varying sizes of training images
--train-batches-per-epoch --train-steps-per-epoch  int  -  length of an epoch
--variable-batch-loss-scale  str  none    varying sizes of training images
--naflex-loader           on      -       images of any aspect
--naflex-train-seq-lens   ints    [128, 256, 576, 784, 1024]   images of any aspect
--naflex-max-seq-len      int     576     images of any aspect
--naflex-patch-sizes      ints    -       images of any aspect
--naflex-patch-size-probs  floats  -      images of any aspect
--naflex-loss-scale       str     linear  images of any aspect
--naflex-patchify-channels-first  on  -   images of any aspect
--kd-model-name           str     -       distillation
--kd-distill-type         str     logit   distillation
--kd-loss-type            str     kl      distillation
--distill-loss-weight     float   -       distillation
--task-loss-weight        float   -       distillation
--kd-temperature          float   4.0     distillation
--kd-student-feature-dim  int     -       distillation
--kd-teacher-feature-dim  int     -       distillation
--kd-token-distill-type   str     soft    distillation
"""
_PLACES = """
data                      word    -
--data-dir                str     -
--dataset                 str     -
--train-split             str     train
--val-split               str     validation
--train-num-samples       int     -
--val-num-samples         int     -
--dataset-download        on      -
--class-map               str     -
--input-img-mode          str     -
--input-key               str     -
--target-key              str     -
--dataset-trust-remote-code  on   -
--resume                  str     -
--no-resume-opt           on      -
-vb --validation-batch-size  int  -
--channels-last           on      -
--fuser                   str     -
--grad-checkpointing      on      -
--fast-norm               on      -
--torchcompile-mode       str     -
--torchscript             on      -
--torchcompile            str     -
--device                  str     cuda
--no-ddp-bb               on      -
--synchronize-step        on      -
--local_rank              int     0
--device-modules          strs    -
--start-epoch             int     -
--model-ema-force-cpu     on      -
--worker-seeding          str     all
--log-interval            int     50
--recovery-interval       int     0
--checkpoint-hist         int     10
-j --workers              int     4
--save-images             on      -
--pin-mem                 on      -
--no-prefetcher           on      -
--output                  str     -
--experiment              str     -
--eval-metric             str     top1
--tta                     int     0
--use-multi-epochs-loader  on     -
--log-wandb               on      -
--wandb-project           str     -
--wandb-tags              strs    -
--wandb-resume-id         str     -
--amp-impl                str     native
--force-cpu               on      -
--aot-autograd            on      -
--dynamo                  on      -
--dynamo-backend          str     -
"""
TABLE = make_table(
    "timm's train.py", "huggingface/pytorch-image-models@aa4b5850:train.py", _RECIPE, _PLACES
)
OLDER_DEFAULTS = {
    "2022-10-07": "--lr 0.05 --warmup-lr 1e-4 --min-lr 1e-6 --warmup-epochs 3 --cooldown-epochs 10"
    " --decay-epochs 100",
    "2021-09-02": "--lr 0.01 --weight-decay 1e-4 --warmup-lr 1e-4 --min-lr 1e-5 --epochs 200"
    " --warmup-epochs 3 --cooldown-epochs 10 --sched step --decay-epochs 30 --batch-size 32"
    " --remode const",
}
"""Maps the last day on which old defaults were valid to those that have since changed
(huggingface/pytorch-image-models@4f18d6dc and @fb943508:train.py)."""
OFF = {
    "aug_splits": "several augmentations of each image in a batch",
    "jsd_loss": "a consistency loss between several augmentations",
    "vflip": "vertical flips",
    "grayscale_prob": "random grey images",
    "gaussian_blur_prob": "random blur",
    "epoch_repeats": "several passes over the data in an epoch",
    "drop_connect": "drop path under its old name",
    "drop_block": "DropBlock",
    "bn_momentum": "momentum of batch norm",
    "bn_eps": "epsilon of batch norm",
    "sync_bn": "batch norm over all GPUs",
    "split_bn": "batch norm by augmentation",
    "layer_decay_min_scale": "a minimum of the layer-wise rates",
    "layer_decay_no_opt_scale": "freezing of layers below a rate",
    "train_img_sizes": "varying sizes of training images",
    "naflex_loader": "images of any aspect",
    "train_batches_per_epoch": "epochs of a fixed length",
    "lr_noise": "noise on the learning rate",
}
"""Maps arguments that have no equivalent if they are on to descriptions."""
ONLY_WITH = {
    "train_batch_sizes train_size_probs train_size_schedule train_size_schedule_spread"
    " train_size_random_mix variable_batch_loss_scale": "all images have one size",
    "naflex_train_seq_lens naflex_max_seq_len naflex_patch_sizes naflex_patch_size_probs"
    " naflex_loss_scale naflex_patchify_channels_first": "images are square",
    "lr_noise_pct lr_noise_std": "--lr-noise is off",
    "lr_cycle_mul lr_cycle_decay": "restarts are off",
}
"""Maps arguments to the reason why they have no effect if the arguments in `OFF` are off."""


def note_old_defaults(reading: Reading) -> None:
    """Record omitted arguments whose defaults differed in earlier versions of timm."""
    without_effect = {n for f in reading.findings if f.verdict == "inert" for n in f.theirs}
    parts = []
    for day, defaults in OLDER_DEFAULTS.items():
        unstated = [
            f"--{name} {value}"
            for name, value in re.findall(r"--(\S+) (\S+)", defaults)
            if name.replace("-", "_") not in reading.stated | without_effect
        ]
        if unstated:
            parts.append(f"until {day} {' '.join(unstated)}")
    if parts and "lr_base" not in reading.stated:
        # --lr-base was added together with the current defaults.
        text = (
            "arguments that are not given have timm's current defaults. For an older command, pass"
            f" the old defaults: {'; '.join(parts)}. For a fork, pass the defaults of its train.py"
        )
        reading.differs("", text)
