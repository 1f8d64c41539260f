"""Run training steps on the fake GPU: python steps.py FOLDER GROUP [CASE ...]

For each case, run seven steps, and write the log of the next two steps to FOLDER/CASE.log.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fake_gpu import log

from vit.config.io import load_config, recipes_folder
from vit.distributed.process_group import World, join_world
from vit.extras.planner.benchmark.step_time import create_step
from vit.extras.planner.benchmark.subject import synthetic_batches
from vit.training.plan import make_plan
from vit.training.run_data import choose_settings
from vit.training.step_result import StepResult

IMAGENET_IMAGES = 1_281_167
NUM_CLASSES = 10
WARM_UP_STEPS = 7
"""The number of steps before the logged ones. In these steps, torch allocates memory and creates
constants."""
LOGGED_STEPS = 2
SMALL = (
    "data.root=none",
    "model.name=vit_ti16",
    "model.depth=2",
    "model.embed_dim=64",
    "model.num_heads=2",
    "model.image_size=32",
    "data.global_batch_size=16",
    "data.micro_batch_size=8",
    "train.compile=false",
)
FP32 = "train.precision=fp32"
FP16 = "train.precision=fp16"
NO_TOKEN = "model.class_token=false"
DROPOUTS = ("model.proj_drop_rate=0.1", "model.attn_drop_rate=0.1", "model.pos_drop_rate=0.1")
DETERMINISTIC = "train.deterministic=true"
DISTILLED = ("distill.teacher=missing", "distill.teacher_model=vit_tiny_patch16_224")
NEW_FORMS = ("model.qk_norm=true", "model.norm_layer=rmsnorm", "model.mlp_layer=swiglu")
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "number formats": {
        "bf16": (),
        "fp16 clipped": (FP16, "optim.clip_grad_norm=1.0"),
        "fp32": (FP32,),
        "bf16 residual": ("train.precision=bf16", "train.residual_dtype=bf16"),
        "exact sums": (FP32, "train.exact_over_ranks=true"),
        "norms of layers": ("log.norms_every_steps=1",),
        "no average": ("ema.decay=null",),
    },
    "networks": {
        "dropouts": DROPOUTS,
        "subset drop path": ("model.drop_path_form=subset", "model.drop_path_rate=0.4"),
        "patch dropout": (
            *("model.rope_type=dinov3", "model.pos_embed=none", "model.patch_drop_rate=0.5"),
        ),
        "axial": ("model.rope_type=axial",),
        "new forms": (*NEW_FORMS, "model.reg_tokens=4", "model.init_values=0.1"),
        "map": ("model.global_pool=map", NO_TOKEN),
        "average": ("model.dual_patch_norm=true", "model.global_pool=avg", NO_TOKEN),
        "fixed positions": ("model.pos_embed=sincos2d",),
        "checkpointed": ("train.activation_checkpointing=block",),
        "timm": (
            *("model.name=timm/vit_tiny_patch16_224", "model.depth=null"),
            *("model.embed_dim=null", "model.num_heads=null"),
        ),
        "hard distillation": DISTILLED,
        "soft distillation": (*DISTILLED, "distill.distill_type=soft"),
    },
    "attention": {
        "flash": ("train.attention=flash",),
        "cudnn": ("train.attention=cudnn",),
        "efficient": ("train.attention=efficient",),
        "math": ("train.attention=math",),
    },
    "optimizers": {
        "sgd": ("optim.name=sgd",),
        "sgd with Nesterov": ("optim.name=sgd", "optim.nesterov=true"),
        "sgd without momentum": ("optim.name=sgd", "optim.momentum=0.0"),
        "adafactorbv": ("optim.name=adafactorbv",),
        "lamb": ("optim.name=lamb",),
        "nadamw": ("optim.name=nadamw",),
        "muon": ("optim.name=muon", FP16, "optim.clip_grad_norm=1.0"),
        "adamuon": ("optim.name=adamuon", "optim.nesterov=true"),
        "warmed-up average": ("ema.warmup=true", "optim.clip_grad_norm=1.0"),
        "layer decay": ("optim.layer_decay=0.75",),
    },
    "batches": {
        "bce": ("loss.name=bce", "loss.label_smoothing=0.0"),
        "erased": ("augment.erasing_prob=0.5", "augment.erasing_mode=pixel"),
        "erased by levels": ("augment.erasing_prob=0.5", "augment.erasing_mode=rand"),
        "mixed images": ("augment.mixup_mode=elem",),
        "mixed pairs": ("augment.mixup_mode=pair",),
    },
    "deterministic": {
        "deterministic": (DETERMINISTIC,),
        "deterministic muon": (DETERMINISTIC, "optim.name=muon"),
        "deterministic subset": (
            *(DETERMINISTIC, "model.drop_path_form=subset", "model.drop_path_rate=0.4"),
        ),
    },
}
"""Groups of cases, with the settings of each case. The settings change which operations a step
runs. One process runs all cases in a group."""


def run(settings: tuple[str, ...], world: World, path: Path) -> None:
    config = load_config(recipes_folder() / "vit_b16.yaml", [*SMALL, *settings])
    config = choose_settings(config, world)
    plan, _ = make_plan(config, IMAGENET_IMAGES, 1)
    step = create_step(config, plan, NUM_CLASSES, world)
    batches = synthetic_batches(config, config.data.global_batch_size, NUM_CLASSES, world.device)

    def queue(number: int) -> StepResult:
        batch = step.augment.change_batch(batches[number % len(batches)])
        return step(batch, number, loss_limit=9.0)

    # Read each result one step late, as training does.
    before = queue(0)
    for number in range(1, WARM_UP_STEPS):
        result = queue(number)
        before.read()
        before = result
    with log.logged(path):
        for number in range(LOGGED_STEPS):
            queue(number)


def main() -> None:
    folder, group, *cases = sys.argv[1:]
    world = join_world("cuda", deterministic=group == "deterministic")
    for case, settings in GROUPS[group].items():
        if not cases or case in cases:
            run(settings, world, Path(folder, f"{case}.log"))


if __name__ == "__main__":
    main()
