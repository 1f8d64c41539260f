"""List the arguments of timm's train.py, including removed arguments and old defaults.

Defaults are from huggingface/pytorch-image-models@aa4b5850:train.py.
"""

from __future__ import annotations

import re

from vit.extras.recipes.arguments import make_table
from vit.extras.recipes.reading import Reading

_RECIPE = """
--model                   str     resnet50   model.name
--pretrained              on      -       =
--pretrained-path         str     -       init.checkpoint
--initial-checkpoint      str     -       init.checkpoint
--num-classes             int     -       =? model.num_classes
--gp                      str     -       =
--img-size                int     -       model.image_size
--in-chans                int     -       model.in_chans
--input-size              ints    -       model.in_chans and model.image_size
--crop-pct                float   -       eval.crop_pct
--mean                    floats  -       data.mean
--std                     floats  -       data.std
--interpolation           str     -       =
-b --batch-size           int     128     per GPU; data.global_batch_size is the total
--grad-accum-steps        int     1       batches per step
--model-kwargs            pairs   -       model
--head-init-scale         float   -       =
--head-init-bias          float   -       off: the initial bias of the head
--amp                     on      -       =
--apex-amp                on      -       =
--native-amp              on      -       =
--amp-dtype               str     float16  =
--model-dtype             str     -       =
--opt                     str     sgd     optim.name
--opt-eps                 float   -       =
--opt-betas               floats  -       optim.betas
--momentum                float   0.9     = optim.momentum
--weight-decay            float   2e-5    = optim.weight_decay
--clip-grad               float   -       optim.clip_grad_norm
--clip-mode               str     norm    =
--layer-decay             float   -       =
--layer-decay-min-scale   float   0       off: a minimum of the layer-wise rates
--layer-decay-no-opt-scale  float  -      off: freezing of layers below a rate
--opt-kwargs              pairs   -       off: arguments of the optimizer: set optim by hand
--sched                   str     cosine  schedule.name
--sched-on-updates        on      -       the rate changes each step instead of each epoch
--lr                      float   -       optim.lr
--lr-base                 float   0.1     optim.lr, for a batch of --lr-base-size
--lr-base-size            int     256     optim.lr
--lr-base-scale           str     -       linear, or sqrt for Adam and LAMB
--lr-noise                floats  -       off: noise on the learning rate
--lr-noise-pct            float   0.67    inert: --lr-noise is off
--lr-noise-std            float   1.0     inert: --lr-noise is off
--lr-cycle-mul            float   1.0     inert: restarts are off
--lr-cycle-decay          float   0.5     inert: restarts are off
--lr-cycle-limit          int     1       =
--lr-k-decay              float   1.0     shape of the cosine
--warmup-lr               float   1e-5    schedule
--min-lr                  float   0       schedule.min_lr
--epochs                  int     300     train.epochs
--epoch-repeats           float   0       off: several passes over the data in an epoch
--decay-milestones        ints    [90, 180, 270]   of step schedules
--decay-epochs            float   90      of step schedules
--warmup-epochs           int     5       schedule.warmup_epochs
--warmup-prefix           on      -       warm-up before --epochs
--cooldown-epochs         int     0       =
--patience-epochs         int     10      of the plateau schedule
--decay-rate --dr         float   0.1     of step schedules
--no-aug                  on      -       =
--train-crop-mode         str     -       =
--scale                   floats  [0.08, 1.0]   = augment.crop_scale
--ratio                   floats  [0.75, 1.3333333333333333]   = augment.crop_ratio
--hflip                   float   0.5     = augment.hflip_prob
--vflip                   float   0       off: vertical flips
--color-jitter            float   0.4     =
--color-jitter-prob       float   -       probability of a colour change
--grayscale-prob          float   -       off: random grey images
--gaussian-blur-prob      float   -       off: random blur
--aa                      str     -       =
--aug-repeats             float   0       =
--aug-splits              int     0       off: several augmentations of each image in a batch
--jsd-loss                on      -       off: a consistency loss between several augmentations
--bce-loss                on      -       =
--bce-sum                 on      -       loss
--bce-target-thresh       float   -       loss
--bce-pos-weight          float   -       off: a weight for positive targets
--reprob                  float   0       =? augment.erasing_prob
--remode                  str     pixel   = augment.erasing_mode
--recount                 int     1       =
--resplit                 on      -       off: no erasing in the first split of a batch
--mixup                   float   0.0     = augment.mixup_alpha
--cutmix                  float   0.0     = augment.cutmix_alpha
--cutmix-minmax           floats  -       off: CutMix boxes with a side between two fractions
--mixup-prob              float   1.0     = augment.mix_prob
--mixup-switch-prob       float   0.5     = augment.cutmix_switch_prob
--mixup-mode              str     batch   = augment.mixup_mode
--mixup-off-epoch         int     0       =? augment.mixup_off_epoch
--smoothing               float   0.1     = loss.label_smoothing
--train-interpolation     str     random  = data.interpolation
--drop                    float   0.0     off: dropout before the head
--drop-connect            float   -       off: drop path under its old name
--drop-path               float   -       =? model.drop_path_rate
--drop-block              float   -       off: DropBlock
--bn-momentum             float   -       off: momentum of batch norm
--bn-eps                  float   -       off: epsilon of batch norm
--sync-bn                 on      -       off: batch norm over all GPUs
--dist-bn                 str     reduce  =
--split-bn                on      -       off: batch norm by augmentation
--model-ema               on      -       =
--model-ema-decay         float   0.9998  = train.ema_decay
--model-ema-warmup        on      -       =
--seed                    int     42      = train.seed
--val-interval            int     1       = eval.every_epochs
--train-img-sizes         ints    -       off: varying sizes of training images
--train-batch-sizes       ints    -       inert: all images have one size
--train-size-probs        floats  -       inert: all images have one size
--train-size-schedule     str     constant   inert: all images have one size
--train-size-schedule-spread  float  0.65   inert: all images have one size
--train-size-random-mix   float   0.1     inert: all images have one size
--train-batches-per-epoch --train-steps-per-epoch  int  -  off: epochs of a fixed length
--variable-batch-loss-scale  str  none    inert: all images have one size
--naflex-loader           on      -       off: images of any aspect
--naflex-train-seq-lens   ints    [128, 256, 576, 784, 1024]   inert: images are square
--naflex-max-seq-len      int     576     inert: images are square
--naflex-patch-sizes      ints    -       inert: images are square
--naflex-patch-size-probs  floats  -      inert: images are square
--naflex-loss-scale       str     linear  inert: images are square
--naflex-patchify-channels-first  on  -   inert: images are square
--kd-model-name           str     -       off: a teacher: set distill by hand (docs/training.md)
--kd-distill-type         str     logit   inert: only with a teacher
--kd-loss-type            str     kl      inert: only with a teacher
--distill-loss-weight     float   -       inert: only with a teacher
--task-loss-weight        float   -       inert: only with a teacher
--kd-temperature          float   4.0     inert: only with a teacher
--kd-student-feature-dim  int     -       inert: only with a teacher
--kd-teacher-feature-dim  int     -       inert: only with a teacher
--kd-token-distill-type   str     soft    inert: only with a teacher
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
"""The old defaults that differ from the current ones, by the last day on which they were valid
(huggingface/pytorch-image-models@4f18d6dc and @fb943508:train.py)."""


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
