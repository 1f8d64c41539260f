"""List the arguments of timm's train.py, including removed arguments and old defaults.

The table is as of timm 1.0.31. Its train.py is not part of the package, so flags and defaults are
from huggingface/pytorch-image-models@aa4b5850:train.py (1.0.29.dev0). Newer flags and defaults are
from the package's release notes, its scheduler and loss factories, and the tests in its source
archive (test_multilabel.py, test_train_resume.py, test_sweep.py and test_checkpoint_loading.py).
"""

from vit.extras.recipes.arguments import make_table

_RECIPE = """
-b --batch-size           int     128     per GPU; data.global_batch_size is the total
--grad-accum-steps        int     1       batches per step
--aug-splits              int     0       off: several augmentations of each image in a batch
--jsd-loss                on      -       off: a consistency loss between several augmentations
--vflip                   float   0       off: vertical flips
--grayscale-prob          float   -       off: random gray images
--gaussian-blur-prob      float   -       off: random blur
--epoch-repeats           float   0       off: several passes over the data in an epoch
--drop-connect            float   -       off: drop path under its old name
--drop-block              float   -       off: DropBlock
--bn-momentum             float   -       off: momentum of batch norm
--bn-eps                  float   -       off: epsilon of batch norm
--sync-bn                 on      -       off: batch norm over all GPUs
--split-bn                on      -       off: batch norm by augmentation
--layer-decay-min-scale   float   0       off: a minimum of the layer-wise rates
--layer-decay-no-opt-scale  float  -      off: freezing of layers below a rate
--train-img-sizes         ints    -       off: varying sizes of training images
--naflex-loader           on      -       off: images of any aspect
--train-batches-per-epoch --train-steps-per-epoch  int  -  off: epochs of a fixed length
--lr-noise                floats  -       off: noise on the learning rate
--train-batch-sizes       ints    -       inert: all images have one size
--train-size-probs        floats  -       inert: all images have one size
--train-size-schedule     str     constant  inert: all images have one size
--train-size-schedule-spread  float  0.65  inert: all images have one size
--train-size-random-mix   float   0.1     inert: all images have one size
--variable-batch-loss-scale  str  none    inert: all images have one size
--naflex-train-seq-lens   ints    [128, 256, 576, 784, 1024]  inert: images are square
--naflex-max-seq-len      int     576     inert: images are square
--naflex-patch-sizes      ints    -       inert: images are square
--naflex-patch-size-probs  floats  -      inert: images are square
--naflex-loss-scale       str     linear  inert: images are square
--naflex-patchify-channels-first  on  -   inert: images are square
--lr-noise-pct            float   0.67    inert: --lr-noise is off
--lr-noise-std            float   1.0     inert: --lr-noise is off
--lr-cycle-mul            float   1.0     inert: restarts are off
--lr-cycle-decay          float   0.5     inert: restarts are off
--model                   str     resnet50   model.name
--input-size              ints    -       model.in_chans and model.image_size
--img-size                int     -       model.image_size
--in-chans                int     -       model.in_chans
--gp                      str     -       model.global_pool
--model-kwargs            pairs   -       model
--head-init-bias          float   -       model.init_head_bias
--drop-path               float   -       [model.drop_path_rate]
--drop                    float   0.0     off: dropout before the head
--crop-pct                float   -       eval.crop_pct
--mean                    floats  -       data.mean
--std                     floats  -       data.std
--num-classes             int     -       [model.num_classes]
--dist-bn                 str     reduce  of batch norm
--pretrained              on      -       init.checkpoint
--pretrained-path         str     -       init.checkpoint
--pretrained-cfg-overlay  pairs   -       off: another config of the weights
--initial-checkpoint      str     -       init.checkpoint
--no-aug                  on      -       no augmentation
--train-crop-mode         str     -       {null: {}, "": {}, rrc: {},\
 else: "crops {}, which keep the aspect ratio"}
--scale                   floats  [0.08, 1.0]   augment.crop_scale
--ratio                   floats  [0.75, 1.3333333333333333]   augment.crop_ratio
--hflip                   float   0.5     augment.hflip_prob
--train-interpolation     str     random  data.interpolation
--interpolation           str     -       data.interpolation, of evaluation
--aa                      str     -       augment.randaugment_layers and others
--color-jitter            float   0.4     augment.color_jitter
--color-jitter-prob       float   -       probability of a color change
--reprob                  float   0       [augment.erasing_prob]
--remode                  str     pixel   augment.erasing_mode
--recount                 int     1       {1: {}, else: "up to {} erased boxes: replaced by one"}
--resplit                 on      -       off: no erasing in the first split of a batch
--aug-repeats             float   0       order.aug_repeats
--cutmix-minmax           floats  -       off: CutMix boxes with a side between two fractions
--mixup                   float   0.0     augment.mixup_alpha
--cutmix                  float   0.0     augment.cutmix_alpha
--smoothing               float   0.1     loss.label_smoothing
--mixup-prob              float   1.0     augment.mix_prob
--mixup-switch-prob       float   0.5     augment.cutmix_switch_prob
--mixup-mode              str     batch   augment.mixup_mode
--mixup-off-epoch         int     0       epoch after which mixing stops
--bce-loss                on      -       loss
--bce-sum                 on      -       loss
--bce-target-thresh       float   -       loss
--bce-pos-weight          float   -       off: a weight for positive targets
--loss                    str     -       loss
--loss-pos-weight         str     -       off: a weight for positive targets
--loss-class-weight       str     -       off: weights of classes in the loss
--loss-weight-power       float   1.0     inert: only for weights by the frequency of classes
--class-stats             str     -       inert: only for weights by the frequency of classes
--poly-epsilon            float   2.0     inert: of the loss poly
--poly-gamma              float   0.0     inert: of the loss poly
--task                    str     classification   {classification: {},\
 refuse: "this task is not available: expected classification"}
--kd-model-name           str     -       distillation
--kd-distill-type         str     logit   distillation
--kd-loss-type            str     kl      -
--task-loss-weight        float   -       distillation
--distill-loss-weight     float   -       distillation
--kd-temperature          float   4.0     distillation
--kd-student-feature-dim  int     -       distillation
--kd-teacher-feature-dim  int     -       distillation
--kd-token-distill-type   str     soft    distillation
--opt                     str     sgd     optim.name
--opt-kwargs              pairs   -       of the optimizer
--opt-betas               floats  -       optim.betas
--opt-eps                 float   -       optim.eps
--momentum                float   0.9     optim.momentum
--lr                      float   -       optim.lr
--lr-base                 float   0.1     optim.lr, for a batch of --lr-base-size
--lr-base-size            int     256     optim.lr
--lr-base-scale           str     -       linear, or sqrt for Adam and LAMB
--weight-decay            float   2e-5    optim.weight_decay
--clip-grad               float   -       optim.clip_grad_norm
--clip-mode               str     norm    kind of clipping
--layer-decay             float   -       {null: {}, 1: {}, else: {optim.layer_decay: VALUE,\
 optim.layer_decay_form: timm}}
--epochs                  int     300     train.epochs
--stop-epoch              int     -       {null: {}, else: "a stop after {} epochs of the schedule"}
--warmup-prefix           on      -       warm-up before --epochs
--lr-cycle-limit          int     1       {1: {}, else: "{} cycles of the schedule"}
--sched                   str     cosine  schedule.name
--sched-on-updates        on      -       the rate changes each step instead of each epoch
--min-lr                  float   0       schedule.min_lr
--warmup-lr               float   1e-5    schedule
--warmup-epochs           int     5       schedule.warmup_epochs
--lr-k-decay              float   1.0     shape of the cosine
--cooldown-epochs         int     0       epochs at --min-lr after --epochs
--decay-epochs            float   -       90 in step schedules, a fifth of the run in wsd
--lr-decay-fn             str     -       schedule.decay_form
--lr-stable-timescale     float   -       of the schedule rsqrt
--decay-rate --dr         float   0.1     of step schedules
--decay-milestones        ints    [90, 180, 270]   of step schedules
--patience-epochs         int     10      of the plateau schedule
--model-ema               on      -       -
--model-ema-decay         float   0.9998  ema.decay
--model-ema-warmup        on      -       ema.warmup
--seed                    int     42      train.seed
--val-interval            int     1       eval.every_epochs
--amp                     on      -       train.precision
--amp-dtype               str     float16  train.precision
--apex-amp                on      -       train.precision, in old versions
--native-amp              on      -       train.precision, in old versions
--model-dtype             str     -       {null: {}, float32: {}, else: "weights in {}"}
--head-init-scale         float   -       initial weights of the head
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
--save-epochs             ints    []
--sweep-locks             strs    -
--sweep-attempt           strs    -
--target-format           str     -
--multilabel-threshold    float   0.5
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

TABLE = make_table("timm's train.py", "as of timm 1.0.31", _RECIPE, _PLACES)

OLDER_DEFAULTS = {
    "2022-10-07": {
        "--lr": "0.05",
        "--warmup-lr": "1e-4",
        "--min-lr": "1e-6",
        "--warmup-epochs": "3",
        "--cooldown-epochs": "10",
        "--decay-epochs": "100",
    },
    "2021-09-02": {
        "--lr": "0.01",
        "--weight-decay": "1e-4",
        "--warmup-lr": "1e-4",
        "--min-lr": "1e-5",
        "--epochs": "200",
        "--warmup-epochs": "3",
        "--cooldown-epochs": "10",
        "--sched": "step",
        "--decay-epochs": "30",
        "--batch-size": "32",
        "--remode": "const",
    },
}
"""Maps the last day on which old defaults were valid to the defaults that have since changed, by
flag (huggingface/pytorch-image-models@4f18d6dc and @fb943508:train.py)."""
