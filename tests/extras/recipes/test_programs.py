"""Test that the program in a command is recognized, and that known programs that cannot be imported
are named."""

from __future__ import annotations

import pytest

from vit.extras.recipes.importing import import_recipe
from vit.extras.recipes.programs import PROGRAMS


@pytest.mark.parametrize(
    ("command", "whose"),
    [
        ("python submitit_linprobe.py --batch_size 512 --blr 0.1 --finetune X", "MAE's linear"),
        ("torchrun --nproc_per_node 8 main_linprobe.py --cls_token", "MAE's linear"),
        ("python submitit_pretrain.py --nodes 8 --mask_ratio 0.75", "MAE's pre-training"),
        ("python main_pretrain.py --norm_pix_loss", "MAE's pre-training"),
        ("torchrun --nproc_per_node 8 run_class_finetuning.py --layer_decay 0.65", "BEiT's"),
        ("python run_image_classification.py --dataset_name beans --do_train", "Hugging Face's"),
        ("accelerate launch run_image_classification_no_trainer.py", "Hugging Face's"),
        ("torchrun --nproc_per_node 4 -m open_clip_train.main --train-data x", "OpenCLIP's"),
        ("srun python -u src/training/main.py --train-data x", "OpenCLIP's"),
        ("lightly-train train out=o data=d model=dinov2/vitb14", "LightlyTrain's"),
        ("python -m vit_jax.main --workdir=w --config=c.py:b16,cifar10", "Google's"),
        ("python ./classy_train.py --config template.json", "ClassyVision's"),
        ("torchrun --nproc_per_node 8 main.py --cfg swin.yaml --batch-size 128", "Swin's"),
        ("PYTHONPATH=. python dinov2/run/eval/linear.py --config-file c.yaml", "DINOv2's"),
        ("torchrun --nproc_per_node 8 dinov2/train/train.py --config-file c.yaml", "DINOv2's"),
    ],
)
@pytest.mark.parametrize("program", [None, "mae", "deit", "timm"])
def test_an_unsupported_script_is_named_regardless_of_the_given_program(command, whose, program):
    with pytest.raises(ValueError, match=rf"is {whose}.*cannot be imported.*similar recipe of \w"):
        import_recipe(command, program)


@pytest.mark.parametrize(
    ("command", "own"),
    [
        ("python main_finetune.py", "mae"),
        ("python submitit_finetune.py", "mae"),
        ("python run_with_submitit.py", "deit"),
        ("./distributed_train.sh 8", "timm"),
        ("python -m big_vision.train --config c.py", "big_vision"),
    ],
)
def test_a_program_that_contradicts_the_name_of_the_script_is_refused(command, own):
    for program in set(PROGRAMS) - {own}:
        with pytest.raises(ValueError, match=f"^--program {program}: .* belongs to {own}"):
            import_recipe(command, program)


@pytest.mark.parametrize("script", ["training/main.py", "dinov2/main.py", "main.py"])
def test_the_folder_of_a_main_py_does_not_determine_its_program(script):
    command = f"torchrun --nproc_per_node 8 {script} --model deit_small_patch16_224"
    assert import_recipe(command).reading.table.program == "DeiT's main.py"


def test_the_given_program_is_used_if_the_scripts_name_is_unknown():
    imported = import_recipe("torchrun --nproc_per_node 8 finetune.py --batch_size 32", "mae")
    assert imported.reading.table.program == "MAE's main_finetune.py"
    assert imported.settings["data.global_batch_size"] == 256
