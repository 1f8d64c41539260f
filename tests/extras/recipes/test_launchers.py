"""Test that the launcher in a command determines the number of GPUs, and thus the batch size and
the learning rate."""

from __future__ import annotations

import pytest

from vit.extras.recipes.importing import import_recipe
from vit.extras.recipes.summary import account

DEIT = "main.py --model deit_base_patch16_224 --batch-size 32"
ASSUMED = "1 GPU is assumed: pass --gpus N"


def test_processes_on_several_nodes_count_for_batch_rate_and_sampler():
    """The DeiT paper states a batch size of 1,024 and a learning rate of 1e-3 (Table 9)."""
    started = "srun -N 4 --gpus-per-node 8 --ntasks-per-node 8 python"
    imported = import_recipe(f"{started} {DEIT}")
    assert imported.settings["data.global_batch_size"] == 1024
    assert imported.settings["optim.lr"] == pytest.approx(1e-3)
    assert imported.settings["order.aug_repeats"] == 3
    assert ASSUMED not in account(imported)


def test_a_script_without_a_launcher_is_assumed_to_use_one_gpu_with_a_note():
    imported = import_recipe(f"python {DEIT}")
    assert imported.settings["data.global_batch_size"] == 32
    lines = account(imported).splitlines()
    (at,) = (at for at, line in enumerate(lines) if "data.global_batch_size" in line)
    assert ASSUMED in lines[at + 1]
    stated = import_recipe(f"python {DEIT}", num_gpus=1)
    assert ASSUMED not in account(stated)


@pytest.mark.parametrize(
    "started",
    [
        "jsrun -n 4 python",
        "srun -N 4 --gpus-per-node 8 python",
        "torchrun --nnodes=1:4 --nproc_per_node gpu",
    ],
)
def test_an_unknown_number_of_gpus_is_an_error_and_is_taken_from_gpus(started):
    with pytest.raises(ValueError, match="--gpus N"):
        import_recipe(f"{started} {DEIT}")
    imported = import_recipe(f"{started} {DEIT}", num_gpus=12)
    assert imported.settings["data.global_batch_size"] == 12 * 32


def test_the_option_gpus_wins_over_submitit():
    submitit = "python run_with_submitit.py --model deit_base_patch16_224 --nodes 2 --ngpus 4"
    assert import_recipe(submitit).settings["data.global_batch_size"] == 8 * 64
    assert import_recipe(submitit, num_gpus=3).settings["data.global_batch_size"] == 3 * 64
