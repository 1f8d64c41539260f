"""Test the number of steps and micro-batches, and the error if a batch cannot be divided."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vit.config import io as config_io
from vit.training.plan import make_plan


class TestPlan:
    def plan(self, tmp_path: Path, world_size: int, *overrides: str, num_samples: int = 1000):
        path = tmp_path / "plan.yaml"
        path.write_text("data: {root: x}\ntrain: {epochs: 2}\n")
        return make_plan(config_io.load_config(path, overrides), num_samples, world_size)[0]

    def test_steps_and_micro_batches_follow_from_the_config(self, tmp_path):
        plan = self.plan(
            tmp_path,
            4,
            "data.global_batch_size=96",
            "data.micro_batch_size=10",
            "schedule.warmup_epochs=0.5",
            "eval.every_epochs=1",
        )
        assert (
            plan.steps_per_epoch,
            plan.dropped_per_epoch,
            plan.total_steps,
            plan.warmup_steps,
            plan.eval_every_steps,
        ) == (10, 40, 20, 5, 10)
        assert (plan.micro_batch_size, plan.accumulation_steps) == (8, 3)

    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("mode", ["batch", "pair"])
    @pytest.mark.parametrize("world_size", [1, 2, 3])
    @pytest.mark.parametrize("batch", range(1, 25))
    def test_the_sizes_of_an_error_work(self, tmp_path, batch, world_size, mode, exact):
        settings = [f"data.global_batch_size={batch}", "augment.mixup_alpha=0.8"]
        settings += [f"augment.mixup_mode={mode}", f"train.exact_over_ranks={str(exact).lower()}"]
        if exact:
            settings.append("data.micro_batch_size=1024")
        try:
            self.plan(tmp_path, world_size, *settings)
        except ValueError as error:
            message = str(error)
        else:
            return
        assert "[]" not in message
        if "does not divide" in message or "mix_group_size from" in message:
            for size in re.findall(r"\d+", (re.findall(r"\[.*\]", message) or [""])[0]):
                group = [*settings, f"augment.mix_group_size={size}"]
                if exact:
                    group.append(f"data.micro_batch_size={size}")
                self.plan(tmp_path, world_size, *group)

    def test_an_impossible_division_names_the_sizes_that_work(self, tmp_path):
        with pytest.raises(
            ValueError,
            match=(
                r"data.global_batch_size=100 is not a multiple of 3 ranks: use 99 or 102, or a"
                r" number of ranks from \[1, 2, 4"
            ),
        ):
            self.plan(tmp_path, 3, "data.global_batch_size=100")
        with pytest.raises(
            ValueError, match=r"2 ranks times augment.mix_group_size=4: use 8 or 16"
        ):
            self.plan(tmp_path, 2, "data.global_batch_size=12", "augment.mixup_alpha=0.5")
        with pytest.raises(
            ValueError,
            match=(
                r"data.micro_batch_size=3 is below augment.mix_group_size=4: use one of"
                r" \[4, 8\]"
            ),
        ):
            self.plan(
                tmp_path,
                1,
                "data.global_batch_size=8",
                "data.micro_batch_size=3",
                "augment.cutmix_alpha=1.0",
            )

    def test_a_batch_larger_than_the_data_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="exceeds the 10 training samples"):
            self.plan(tmp_path, 1, "data.global_batch_size=16", num_samples=10)
