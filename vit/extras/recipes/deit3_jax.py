"""Map commands of deit3-jax's main.py (DeiT and DeiT III in JAX) to settings of this project.

In deit3-jax, the batch size is the total over all devices. Lengths are in steps. The learning rate
changes each step, starts at 1e-6 and ends at 1e-5. Weight decay applies only to kernels. All blocks
have the same drop-path rate. LAMB clips gradients only with `--clip-grad`. All copies of an image
are in the same batch.
"""

from vit.extras.recipes.arguments import make_table, read_words
from vit.extras.recipes.rates import map_schedule
from vit.extras.recipes.reading import Findings, Program, Reading, Settings, differs, inert, same
from vit.extras.recipes.timm_common import (
    initial_weights,
    map_optimizer_name,
    precision,
    timm_policy,
)

_RECIPE = """
--train-batch-size        int     2048    data.global_batch_size
--layers                  int     12      model.depth
--dim                     int     768     model.embed_dim
--heads                   int     12      model.num_heads
--patch-size              int     16      model.patch_size
--image-size              int     224     model.image_size
--layerscale              on      -       {true: {model.init_values: 0.0001}}
--pooling                 str     cls     {gap: {model.class_token: false,\
 model.global_pool: norm_avg}, else: {model.no_embed_class: true}}
--posemb                  str     learnable   {sincos2d: {model.pos_embed: sincos2d}}
--labels                  int     -1      -
--droppath                float   0.1     {0: {model.drop_path_rate: 0.0},\
 else: {model.drop_path_rate: VALUE, model.drop_path_schedule: constant}}
--dropout                 float   0.0     [model.proj_drop_rate, model.attn_drop_rate]
--pretrained-ckpt         str     -       [init.checkpoint]
--label-mapping           str     -       off: a pretrained head remapped by a table of classes
--test-crop-ratio         float   0.875   eval.crop_pct
--random-crop             str     rrc     {rrc: {}, src: {augment.crop: simple},\
 else: "center crops in training: replaced by random crops"}
--auto-augment            str     rand-m9-mstd0.5-inc1   augment
--color-jitter            float   0.0     {0: {},\
 else: {augment.color_jitter: [VALUE, VALUE, VALUE, 0]}}
--random-erasing          float   0.25    {0: {}, else: {augment.erasing_prob: VALUE,\
 augment.erasing_area: [0.02, 0.33], augment.erasing_aspect: [0.3, 3.3]}}
--augment-repeats         int     3       order.aug_repeats
--mixup                   float   0.8     augment.mixup_alpha
--cutmix                  float   1.0     augment.cutmix_alpha
--criterion               str     ce      loss
--label-smoothing         float   0.1     loss.label_smoothing
--optimizer               str     adamw   optim.name
--learning-rate           float   1e-3    optim.lr
--weight-decay            float   0.05    {0: {optim.weight_decay: 0.0},\
 else: {optim.weight_decay: VALUE, optim.no_weight_decay: not_kernels}}
--adam-b1                 float   0.9     optim.betas
--adam-b2                 float   0.999   optim.betas
--adam-eps                float   1e-8    optim.eps
--clip-grad               float   0.0     {0: {optim.clip_grad_norm: null},\
 else: {optim.clip_grad_norm: VALUE}}
--lr-decay                float   1.0     {1: {},\
 else: "layer-wise rates with a factor of {}; the head has the last block's"}
--training-steps          int     200000  train.steps
--warmup-steps            int     10000   schedule.warmup_steps
--init-seed               int     -       -
--mixup-seed              int     -       -
--dropout-seed            int     -       -
--shuffle-seed            int     -       ?train.seed
--eval-interval           int     0       [eval.every_steps]
"""

_PLACES = """
--train-dataset-shards    str     -
--valid-dataset-shards    str     -
--valid-batch-size        int     256
--train-loader-workers    int     40
--valid-loader-workers    int     5
--grad-ckpt               on      -
--grad-accum              int     1
--log-interval            int     50
--project                 str     -
--name                    str     -
--ipaddr                  str     -
--hostname                str     -
--output-dir              str     .
"""

TABLE = make_table(
    "deit3-jax's main.py", "affjljoo3581/deit3-jax@753d01ba:src/main.py", _RECIPE, _PLACES
)

_SHAPES = {
    (12, 192, 3): "ti",
    (12, 384, 6): "s",
    (12, 768, 12): "b",
    (24, 1024, 16): "l",
    (32, 1280, 16): "h",
}


def _map_rest(reading: Reading) -> Findings:
    """Map what no argument of deit3-jax controls."""
    if reading.args["mixup"] or reading.args["cutmix"]:
        yield differs(
            "",
            "deit3-jax draws one lambda and box for the images of a device, with random partners;"
            " this project draws one for each augment.mix_group_size images, with neighbors",
        )

    yield precision("fp32 with matrix products in bf16, as on TPUs")
    yield initial_weights(
        reading,
        "normal values of std 0.02, truncated at twice that (0.0176 in effect), everywhere,"
        " including class token, patches and head",
    )


def _map_model(reading: Reading) -> Findings:
    """Map the model, whose size has a name only if its depth, width and heads are standard."""
    args = reading.args
    shape = (args["layers"], args["dim"], args["heads"])
    settings: Settings = {
        "model.name": f"vit_{_SHAPES.get(shape, 'b')}{args['patch_size']}",
        "model.mlp_layer": "mlp_tanh",  # flax.linen.gelu
    }
    if shape not in _SHAPES:
        settings |= {
            "model.depth": args["layers"],
            "model.embed_dim": args["dim"],
            "model.num_heads": args["heads"],
        }

    yield same("layers dim heads patch_size", settings)


def _map_policy(reading: Reading) -> Findings:
    policy = reading.args["auto_augment"]
    yield timm_policy("auto_augment", None if policy == "none" else policy, "bilinear or bicubic")


def _map_repeats(reading: Reading) -> Findings:
    """Map repeated augmentation, in which the copies of an image are in one batch."""
    batch = reading.args["train_batch_size"]
    repeats = reading.args["augment_repeats"]
    if repeats <= 1:
        yield same("augment_repeats")
        return

    settings = {"order.aug_repeats": repeats}
    text = (
        "all copies of an image are in one batch, as in this project, but an epoch of deit3-jax"
        f" has {repeats} times as many steps"
    )
    if batch % repeats:
        settings["order.aug_repeats_form"] = "sampler"
        text += (
            f"; a batch of {batch} is not a multiple of {repeats} copies, so samples are drawn"
            " like DeiT's sampler"
        )

    yield differs("augment_repeats", text, settings)


def _map_loss(reading: Reading) -> Findings:
    if reading.args["criterion"] == "ce":
        yield same("criterion")
    else:
        yield same("criterion", {"loss.name": "bce", "loss.bce_target_thresh": 0.0})
        yield inert("label_smoothing", "only with --criterion ce")


def _map_betas(reading: Reading) -> Findings:
    yield same(
        "adam_b1 adam_b2", {"optim.betas": [reading.args["adam_b1"], reading.args["adam_b2"]]}
    )


def _map_schedule(reading: Reading) -> Findings:
    settings = {
        "schedule.name": "cosine",
        "schedule.warmup_steps": reading.args["warmup_steps"],
        "schedule.warmup_lr": 1e-6,
        "schedule.min_lr": 1e-5,
    }

    return map_schedule(reading, "warmup_steps", settings)


PROGRAM = Program(
    parse=lambda command: read_words(TABLE, command.words),
    handlers={
        "layers": _map_model,
        "auto_augment": _map_policy,
        "augment_repeats": _map_repeats,
        "criterion": _map_loss,
        "optimizer": lambda reading: map_optimizer_name(
            reading, "optimizer", reading.args["optimizer"]
        ),
        "adam_b1": _map_betas,
        "warmup_steps": _map_schedule,
    },
    rest=_map_rest,
)
