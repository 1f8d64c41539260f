"""Test that forecasts of hours, sizes and limits match manual calculations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vit.config.io import load_config
from vit.config.schema import Config
from vit.extras.planner.forecast import (
    GIB,
    IMAGES_PER_CORE_S,
    Forecast,
    largest_micro_batch,
    make_forecast,
    usable_bytes,
)
from vit.extras.planner.memory import step_memory
from vit.system.gpus import find_gpu
from vit.training.plan import make_plan

H200 = find_gpu("H200")
TINY = {"name": "vit_ti16", "depth": 2, "image_size": 64}


def config_of(**sections: dict) -> Config:
    base = {"data": {"root": "none", "global_batch_size": 64}, "train": {"steps": 10}}
    return Config.model_validate({**base, **sections})


@pytest.mark.parametrize(
    ("gpu", "chosen"), [("H200", "bf16"), ("MI300X", "bf16"), ("V100-32GB", "fp32"), ("T4", "fp32")]
)
def test_auto_means_the_best_precision_of_the_planned_gpu(gpu, chosen):
    config = config_of(model=TINY)
    given = config_of(model=TINY, train={"steps": 10, "precision": chosen})
    assert config.train.precision == "auto"
    forecast = make_forecast(config, 1, find_gpu(gpu))
    assert forecast == make_forecast(given, 1, find_gpu(gpu))
    assert forecast.precision == chosen


def test_the_forecast_of_vit_b16_on_8_h200_equals_a_sum_by_hand():
    """The run has 300 epochs with 312 batches of 4,096 images. Each of the 12 blocks processes 197
    tokens of width 768."""
    config = load_config("vit_b16", ["data.root=/nonexistent"])
    forecast = make_forecast(config, 8, H200)
    assert forecast.plan.total_steps == 93_600
    linear = 12 * 197 * 2 * 12 * 768**2 + 2 * 196 * 768**2 + 2 * 768 * 1000
    attention = 12 * 4 * 197**2 * 768
    elements = 12 * 197 * 9 * 768 + 1000
    assert forecast.forward.linear_flops == linear
    assert forecast.forward.attention_flops == attention
    assert forecast.forward.elements == elements
    per_flop_s = 1 / (0.51 * 989.4e12)
    per_element_s = 9.8 / 4.8e12
    image_s = (3 * linear + 3.5 * attention) * per_flop_s + 3 * elements * per_element_s
    image_s += 13 * 4 * 86_567_656 / 4.8e12 / 512
    assert forecast.image_s == pytest.approx(image_s, rel=1e-6)
    eval_s = (linear + attention) * per_flop_s + elements * per_element_s
    num_evaluated = 300 // config.eval.every_epochs * 50_000 * 2
    hours = (93_600 * 4096 * image_s + num_evaluated * eval_s) / 8 / 3600
    assert forecast.compute_h == pytest.approx((hours / 1.3, hours * 1.3), rel=1e-6)
    low, high = forecast.end_to_end.low, forecast.end_to_end.high
    assert forecast.end_to_end_h(None, None) == pytest.approx((hours * low, hours * high))
    rates = [8 / image_s / 1.3, 8 / image_s * 1.3]
    assert forecast.images_per_s(image_s) == pytest.approx(rates)
    assert forecast.mfu[1] == pytest.approx(3 * (linear + attention) * rates[1] / 8 / 989.4e12)
    assert forecast.cores_per_gpu == pytest.approx([rate / 8 / IMAGES_PER_CORE_S for rate in rates])
    assert forecast.network_gbs == 0, "eight GPUs are one host"
    assert "/nonexistent" in forecast.data.assumed


def test_the_loader_and_the_network_can_limit_the_run():
    """A core decodes 899 images/s. Each step sends 2.5 GB of gradients twice through each host."""
    config = load_config("vit_h14", ["data.root=/none"])
    forecast = make_forecast(config, 64, H200)
    free_h = forecast.end_to_end_h(None, None)
    one_core_h = forecast.train_images / 64 / IMAGES_PER_CORE_S / 3600
    assert forecast.end_to_end_h(1, None) == free_h
    assert forecast.end_to_end_h(0.01, None) == pytest.approx([100 * one_core_h] * 2)
    sums_h = 62_400 * 2 * 4 * 632_045_800 / 10e9 / 3600
    assert forecast.end_to_end_h(None, 10) == pytest.approx([sums_h] * 2)
    step_s = 4096 / 64 * forecast.image_s
    assert forecast.network_gbs == pytest.approx(2 * 4 * 0.632 / (step_s * 2 / 3), rel=1e-3)


def test_skipped_and_repeated_computations_change_the_operations():
    """The model has two blocks. The patch embedding and the head account for a seventh of its
    operations."""
    plain = make_forecast(config_of(model=TINY), 1, H200)
    subset = {"drop_path_rate": 0.5, "drop_path_form": "subset", "drop_path_schedule": "constant"}
    by_subset = make_forecast(config_of(model={**TINY, **subset}), 1, H200)
    assert by_subset.forward == plain.forward
    assert 0.5 < by_subset.train_flops / plain.train_flops < 0.6
    assert 0.5 < by_subset.image_s / plain.image_s < 0.7
    for checkpointing, passes in (("block", 4), (2, 3.5)):
        train = {"steps": 10, "activation_checkpointing": checkpointing}
        again = make_forecast(config_of(model=TINY, train=train), 1, H200)
        assert again.train_flops == plain.train_flops, "MFU does not count repeated operations"
        repeated_s = (passes - 3) * plain.eval_image_s
        assert again.image_s - plain.image_s == pytest.approx(repeated_s)
        assert again.memory.activations < 0.8 * plain.memory.activations


def test_stages_of_image_size_count_with_their_own_operations():
    """The run has 100 epochs with 64 steps each. Half of the epochs use images of 32 px, a quarter
    use 48 px, and a quarter use 64 px."""
    data = {"root": "none", "global_batch_size": 64}
    stream = {"urls": "http://localhost/{0..1}.tar", "num_samples": 4096}
    stages = ({"until_epoch": 50, "image_size": 32}, {"until_epoch": 75, "image_size": 48})

    def forecast_at(side: int, **schedule: tuple) -> Forecast:
        model = {**TINY, "image_size": side}
        config = config_of(
            model=model, data=data, stream=stream, train={"epochs": 100}, schedule=schedule
        )
        return make_forecast(config, 1, H200)

    staged = forecast_at(64, image_sizes=stages)
    alone = {side: forecast_at(side) for side in (32, 48, 64)}
    # Only the run with changing image sizes resamples its position embeddings, which requires a
    # matrix product.
    expected = sum(
        share * alone[side].image_s
        for side, share in zip((32, 48, 64), (0.5, 0.25, 0.25), strict=True)
    )
    assert staged.image_s == pytest.approx(expected, rel=5e-3)
    assert [stage.stop for stage in staged.stages] == [50 * 64, 75 * 64, 100 * 64]
    of_stages = [stage.image_s for stage in staged.stages]
    assert of_stages == pytest.approx([each.image_s for each in alone.values()], rel=5e-3)
    assert staged.forward == alone[64].forward, "evaluations use the model's size"
    assert alone[32].compute_h[0] < staged.compute_h[0] < alone[64].compute_h[0]
    # The matrices for resampling position embeddings add a few kilobytes.
    assert staged.memory.total == pytest.approx(alone[64].memory.total, rel=1e-3)
    assert staged.host_memory == alone[64].host_memory
    assert len(alone[64].stages) == 1
    growing = forecast_at(32, image_sizes=({"until_epoch": 50, "image_size": 64},))
    assert growing.memory.activations == pytest.approx(alone[64].memory.activations, rel=1e-3)
    assert growing.host_memory.ring == alone[64].host_memory.ring


def test_available_data_replace_the_assumed_numbers(shards):
    config = config_of(data={"root": str(shards), "global_batch_size": 4}, train={"epochs": 2})
    data = make_forecast(config, 2, H200).data
    assert (data.num_classes, data.num_images, data.num_val_images) == (3, 60, 23)
    assert data.assumed == ""


@pytest.mark.parametrize(("gpu", "batch"), [("RTX-4090", 1024), ("H200", 1024), ("L40S", 8)])
def test_the_largest_micro_batch_fits_and_the_next_one_does_not(gpu, batch):
    large = {"name": "vit_h16", "image_size": 1024} if batch == 8 else {"name": "vit_b16"}
    config = config_of(
        model={"image_size": 384, "depth": 6, **large},
        data={"root": "none", "global_batch_size": batch},
        train={"steps": 10, "precision": "fp32" if batch == 8 else "bf16"},
        augment={} if batch == 8 else {"mixup_alpha": 0.8, "mix_group_size": 4},
    )
    plan, _ = make_plan(config, 4096, 2 if batch > 8 else 1)
    rank_batch = plan.micro_batch_size
    usable = usable_bytes(find_gpu(gpu))

    def total(size: int) -> int:
        tried = replace(plan, micro_batch_size=size)
        return step_memory(config, tried, 1000).total

    largest = largest_micro_batch(config, plan, 1000, find_gpu(gpu))
    assert largest > 0
    assert rank_batch % largest == 0
    assert largest % 4 == 0 or batch == 8
    assert total(largest) <= usable
    assert largest == rank_batch or total(2 * largest) > usable


def test_a_model_that_is_too_large_is_reported():
    config = config_of(model={"name": "vit_h14", "embed_dim": 10240, "num_heads": 80, "depth": 6})
    forecast = make_forecast(config, 1, find_gpu("RTX-4090"))
    assert forecast.largest_micro_batch_size == 0
    assert not forecast.fits
    assert forecast.memory.weights > 23.5 * GIB


@pytest.mark.parametrize(("steps", "every"), [(10, 3), (2, 3), (1, None)])
def test_the_number_of_evaluations_equals_the_plans(steps, every):
    config = config_of(train={"steps": steps}, eval={"every_steps": every})
    forecast = make_forecast(config, 1, H200)
    due = sum(forecast.plan.evaluates_at(step) for step in range(1, steps + 1))
    assert forecast.eval_images == due * 50_000
