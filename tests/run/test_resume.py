"""What a resumed run makes of the files of weights that it finds."""

from __future__ import annotations

import shutil

import pytest
import torch
from processes import TINY
from torch import Tensor

from vit.build import build
from vit.config.io import load_config
from vit.ranks.distributed import World
from vit.train import train
from vit.weights.files import read_weights


@pytest.mark.parametrize("present", ["discarded", "gone"])
def test_the_best_weights_are_never_those_of_a_branch_that_was_left(
    config, tmp_path, capfd, present
):
    """Killed between weights and checkpoint, then resumed to another end: on other ranks numbers
    differ by rounding, here the rate by a setting."""
    folder = tmp_path / "run"
    given = ("train.ema_decay=null", "train.steps=6", "eval.every_steps=3", f"run.dir={folder}")

    def weights_of(name: str) -> tuple[int, dict[str, Tensor]]:
        loaded = read_weights(folder / "weights" / f"{name}.safetensors")
        assert loaded.step is not None
        return loaded.step, loaded.weights

    def go_on(*overrides: str) -> None:
        settings = load_config(config, [*TINY, *given, *overrides]).config
        changed = [override.partition("=")[0] for override in overrides]
        with build(settings, World(0, 1, torch.device("cpu")), changed) as run:
            train(run)

    go_on("optim.lr=1e-2")
    assert weights_of("best")[0] == 6, "otherwise nothing is shown here"
    shutil.rmtree(folder / "checkpoints" / "step_00000006")
    if present == "gone":
        (folder / "weights" / "best.safetensors").unlink()
    go_on("optim.lr=1e-30")  # at step 6 as good as at step 3, which alone is no new best
    assert "resumed at step 3 of 6" in (said := capfd.readouterr().err)
    step, best = weights_of("best")
    last = weights_of("last")[1]
    assert step == 6
    assert best.keys() == last.keys()
    assert all(torch.equal(best[name], value) for name, value in last.items())
    reason = "of step 6, which the run has left" if present == "discarded" else "gone or damaged"
    assert f"best.safetensors is {reason}" in said
