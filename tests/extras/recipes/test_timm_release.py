"""Test that our copy of timm's arguments has every argument that the installed timm reads.

timm's train.py is not part of the package, but the functions that read its arguments are. If a new
release of timm fails these tests, update `timm_table` and the release that it names.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from timm.data import resolve_data_config
from timm.loss import create_classification_loss
from timm.optim import optimizer_kwargs
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler_factory import scheduler_kwargs

from vit.config.io import from_dict
from vit.extras.recipes.importing import import_recipe
from vit.extras.recipes.timm_table import TABLE
from vit.training.plan import make_plan, rates

VIT = "--model vit_base_patch16_224 --batch-size 128 --opt adamw --lr 3e-3"
RELEASE = TABLE.source.rpartition(" ")[2]
SCHEDULE = {
    # Our names for arguments of the factory whose names differ from timm's flags.
    "num_epochs": "epochs",
    "noise": "lr_noise",
    "noise_pct": "lr_noise_pct",
    "noise_std": "lr_noise_std",
    "noise_seed": "seed",
    "cycle_mul": "lr_cycle_mul",
    "cycle_decay": "lr_cycle_decay",
    "cycle_limit": "lr_cycle_limit",
    "k_decay": "lr_k_decay",
    "decay_fn": "lr_decay_fn",
    "stable_timescale": "lr_stable_timescale",
    "step_on_epochs": "sched_on_updates",
    "plateau_mode": "eval_metric",
}
OWN = {"optimizer", "updates_per_epoch"}
LOSS = {
    "loss_type": "loss",
    "multi_label": "task",
    "soft_targets": "mixup",
    "class_weight": "loss_class_weight",
    "pos_weight": "loss_pos_weight",
    "jsd_splits": "aug_splits",
    "class_counts": "class_stats",
    "num_samples": "class_stats",
}
UNKNOWN = {
    # Arguments of losses that we reject. The package does not show how train.py names their flags.
    *("asl_gamma_pos", "asl_gamma_neg", "asl_clip", "asl_reduction", "poly_alpha"),
    *("twoway_tp", "twoway_tn", "db_neg_scale", "db_init_bias", "db_focal_gamma"),
}


class Recorder:
    """Parsed arguments that record which arguments timm reads."""

    def __init__(self, **values):
        self.values = values
        self.read = set()

    def __getattr__(self, name):
        self.read.add(name)
        if name in self.values:
            return self.values[name]
        raise AttributeError(name)


def test_the_schedule_has_no_argument_that_the_table_lacks():
    names = set(TABLE.defaults())
    recorder = Recorder(sched="cosine")
    scheduler_kwargs(recorder)
    assert recorder.read <= names
    of_factory = inspect.signature(create_scheduler_v2).parameters.keys() - OWN
    assert {SCHEDULE.get(name, name) for name in of_factory} <= names


def test_the_optimizer_has_no_argument_that_the_table_lacks():
    recorder = Recorder(opt="sgd", lr=0.1, weight_decay=0.1, momentum=0.9)
    optimizer_kwargs(recorder)
    without_flag = {"opt_args", "opt_foreach"}
    assert recorder.read - without_flag <= set(TABLE.defaults())


def test_the_loss_has_no_argument_that_the_table_lacks():
    of_factory = inspect.signature(create_classification_loss).parameters.keys() - UNKNOWN
    assert {LOSS.get(name, name) for name in of_factory} <= set(TABLE.defaults())


def test_the_data_config_reads_no_argument_that_the_table_lacks():
    read = re.findall(r"args(?:\.get\(|\[)['\"](\w+)", inspect.getsource(resolve_data_config))
    of_others = {"chans", "crop_mode", "crop_border_pixels", "use_train_size"}
    assert {*read} - of_others <= set(TABLE.defaults())
    assert read


def test_the_defaults_of_the_schedule_equal_those_of_the_factory():
    parameters = inspect.signature(create_scheduler_v2).parameters
    defaults = TABLE.defaults()
    for name in ("decay_epochs", "warmup_lr", "min_lr", "patience_epochs", "decay_rate",
                 "decay_fn", "stable_timescale", "k_decay", "warmup_prefix"):  # fmt: skip
        assert defaults[SCHEDULE.get(name, name)] == parameters[name].default, name


def test_requirements_ask_for_the_release_of_the_table():
    requirements = (Path(__file__).parents[3] / "requirements.txt").read_text()
    assert re.search(rf"(?m)^timm>={re.escape(RELEASE)}\b", requirements)


SCHEDULES = [
    "--sched wsd",
    "--sched wsd --warmup-prefix --min-lr 1e-5",
    "--sched wsd --sched-on-updates",
    "--sched wsd --sched-on-updates --decay-epochs 0.37 --warmup-epochs 2",
    "--sched wsd --lr-decay-fn linear --decay-epochs 6 --min-lr 1e-6 --cooldown-epochs 3",
    "--sched wsd --lr-decay-fn power --warmup-epochs 0",
    "--sched constant",
    "--sched constant --sched-on-updates --warmup-epochs 3",
    "--sched constant --warmup-epochs 0",
]


@pytest.mark.parametrize("flags", SCHEDULES)
def test_each_step_of_the_imported_schedule_has_timms_rate(flags):
    imported = import_recipe(f"python train.py {VIT} --epochs 23 {flags}")
    (found,) = (f for f in imported.reading.findings if "sched" in f.theirs)
    assert found.verdict == "same"

    args = Recorder(**imported.reading.args)
    steps_per_epoch = 7
    group = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-3)
    options = scheduler_kwargs(args)
    scheduler, epochs = create_scheduler_v2(group, updates_per_epoch=steps_per_epoch, **options)
    config = from_dict(imported.sections, "test")
    plan, _ = make_plan(config, num_samples=128 * steps_per_epoch, world_size=1)
    assert plan.total_steps == epochs * steps_per_epoch
    learning_rate, _ = rates(config, plan)

    for step in range(plan.total_steps):
        scheduler.step(step // steps_per_epoch)
        scheduler.step_update(step)
        expected = group.param_groups[0]["lr"]
        assert learning_rate(step) == pytest.approx(expected, rel=1e-9), step


def test_a_decay_that_we_lack_is_reported_in_numbers():
    imported = import_recipe(f"python train.py {VIT} --sched wsd --lr-decay-fn cosine")
    (found,) = (f for f in imported.reading.findings if "sched" in f.theirs)
    assert found.verdict == "differs"
    assert re.search(r"at most \d+ % of its peak .*: --lr-decay-fn cosine$", found.text)
    assert imported.settings["schedule.name"] == "wsd"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--task multilabel", "this task is not available"),
        ("--sched wsd --epochs 9 --decay-epochs 8", "timm rejects a decay of 8 epochs in 4 epochs"),
        ("--newest-flag 3", r"timm's train\.py has no --newest-flag \(as of timm 1\.0\.31\)"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(flags, message):
    with pytest.raises(ValueError, match=message):
        import_recipe(f"python train.py {VIT} {flags}")


def test_an_abbreviated_flag_is_reported():
    """A newer timm may have a flag whose name is the abbreviation, such as --task, which also
    abbreviates --task-loss-weight."""
    imported = import_recipe("python train.py --model vit_base_patch16_224 --batch 64 --lr 1e-3")
    assert "note: --batch is read as --batch-size (as of timm 1.0.31)" in [
        finding.text for finding in imported.reading.findings
    ]


@pytest.mark.parametrize(
    ("flags", "name", "verdict", "settings"),
    [
        ("--stop-epoch 50 --save-epochs 30 40", "stop_epoch", "cannot", {}),
        ("--save-epochs 30 40 --resume auto", "save_epochs", "place", {}),
        ("--loss bce --bce-sum", "loss", "same", {"loss.name": "bce", "loss.bce_sum": True}),
        ("--loss poly", "loss", "cannot", {}),
        ("--loss ce", "loss", "same", {}),
        ("--loss bce --loss-pos-weight 2", "loss_pos_weight", "cannot", {}),
        ("--sched none", "sched", "same", {"schedule.name": "constant"}),
    ],
)
def test_arguments_of_the_newest_release_are_mapped(flags, name, verdict, settings):
    imported = import_recipe(f"python train.py {VIT} {flags}")
    (found,) = (f for f in imported.reading.findings if name in f.theirs)
    assert found.verdict == verdict
    assert settings.items() <= imported.settings.items()
    imported.config()
