"""Test that the planner can read the benchmark's result files."""

from __future__ import annotations

import json

import pytest
import torch

from vit.extras.planner.benchmark.certificate import loading_table, step_table, write_results
from vit.extras.planner.roofline import bound_s, forward_work, seconds, training_work
from vit.extras.planner.speed import WITHIN_MEASURED, choose_speed
from vit.model import create_model
from vit.system.gpus import find_gpu
from vit.training.step_result import StepPhase

H200 = find_gpu("H200")
B16_FLOPS = 105_000_000_000
LOADING = {
    "model": "vit_b16",
    "num_workers": 8,
    "loader_images_per_s": 9000.0,
    "step_images_per_s": 3000.0,
    "together_images_per_s": 2940.0,
    "data_wait_share": 0.01,
    "lost_share": 0.02,
    "compiled": True,
}


def row(**changes) -> dict:
    return {
        "model": "vit_b16",
        "image_size": [224, 224],
        "precision": "bf16",
        "compiled": True,
        "deterministic": False,
        "activation_checkpointing": "none",
        "drop_path_form": "mask",
        "num_devices": 1,
        "rank_batch_size": 4096,
        "micro_batch_size": 512,
        "images_per_s": 3000.0,
        "images_per_s_per_gpu": 3000.0,
        "mfu": 0.32,
        "flops_per_image": B16_FLOPS,
        "num_steps": 7,
        "step_s": 1.36,
        "bound_s": 0.5,
        "fastest_step_s": 1.35,
        "slowest_step_s": 1.4,
        "parts_s": dict.fromkeys(map(str, StepPhase), 0.272),
        "all_reduce": None,
        "peak_memory_gib": 33.0,
        "planned_memory_gib": 34.4,
        "largest_micro_batch_size": 2048,
        **changes,
    }


def result(
    *rows: dict, device: str = "NVIDIA H200", kind: str = "cuda", loading: dict | None = None
) -> dict:
    peak = {"peak_tflops": 989.4, "peak_source": "data sheet"}
    num_devices = rows[0]["num_devices"]
    return {
        "device": device,
        "device_type": kind,
        "num_devices": num_devices,
        **peak,
        "training": list(rows),
        "loading": loading,
    }


@pytest.mark.parametrize(
    "fields", [{"drop_path_rate": 0.5, "drop_path_form": "subset"}, {"patch_drop_rate": 0.5}]
)
def test_the_limits_of_the_gpu_count_only_what_a_step_computes(fields):
    fields |= {"depth": 3, "drop_path_schedule": "constant"}
    with torch.device("meta"):
        whole, dropping = (create_model("vit_b16", **each) for each in ({"depth": 3}, fields))
    whole_s, dropping_s = (bound_s(each, 4096, 64, H200.name, "bf16") for each in (whole, dropping))
    assert dropping_s == pytest.approx(0.52 * whole_s, rel=0.05)


@pytest.mark.full
def test_the_planner_reads_the_results_of_the_benchmark(tmp_path):
    assert choose_speed("vit_b16", "bf16", B16_FLOPS, H200, True, tmp_path).factor == 1
    with torch.device("meta"):
        work = training_work(*forward_work(create_model("vit_b16")))
    eager = row(compiled=False, mfu=0.22)
    path = write_results(tmp_path, result(eager, row(), loading=LOADING))
    assert path.name.endswith("-gpu-h200.json")
    speed = choose_speed("vit_b16", "bf16", B16_FLOPS, H200, True, tmp_path)
    measured_s = B16_FLOPS / (0.32 * 989.4e12)
    assert speed.factor == pytest.approx(measured_s / seconds(work, H200, "bf16", True), rel=0.01)
    assert speed.within == 1
    eager_speed = choose_speed("vit_b16", "bf16", B16_FLOPS, H200, False, tmp_path)
    measured_s = B16_FLOPS / (0.22 * 989.4e12)
    assert eager_speed.factor == pytest.approx(
        measured_s / seconds(work, H200, "bf16", False), rel=0.01
    )
    assert path.name in speed.source
    again = row(activation_checkpointing="block", mfu=0.9)
    write_results(tmp_path, result(again))
    assert choose_speed("vit_b16", "bf16", B16_FLOPS, H200, True, tmp_path) == speed, (
        "a different workload must not count as measured"
    )
    shallow = row(flops_per_image=B16_FLOPS // 6, mfu=0.9)
    write_results(tmp_path, result(shallow))
    assert choose_speed("vit_b16", "bf16", B16_FLOPS, H200, True, tmp_path) == speed, (
        "a measurement of another depth must not count as this network's"
    )
    other = choose_speed("vit_l16", "bf16", 3 * B16_FLOPS, H200, True, tmp_path)
    assert other.within == WITHIN_MEASURED, "one measured model corrects the others"
    assert other.factor <= speed.factor
    for precision, gpu in [("fp32", "H200"), ("bf16", "H100")]:
        assert (
            choose_speed("vit_b16", precision, B16_FLOPS, find_gpu(gpu), True, tmp_path).factor == 1
        )


def test_a_file_collects_models_and_replaces_repeated_measurements(tmp_path):
    path = write_results(tmp_path, result(row(), loading=LOADING))
    large = row(model="vit_l16", mfu=0.4)
    eight = row(num_devices=8, mfu=0.3)
    assert write_results(tmp_path, result(large)) == path
    write_results(tmp_path, result(eight))
    write_results(tmp_path, result(row(mfu=0.34)))
    content = json.loads(path.read_text())
    assert [(each["model"], each["num_devices"], each["mfu"]) for each in content["training"]] == [
        ("vit_l16", 1, 0.4),
        ("vit_b16", 8, 0.3),
        ("vit_b16", 1, 0.34),
    ]
    assert content["loading"] == [LOADING], (
        "a measurement without data must not delete the loading results"
    )
    page = path.with_suffix(".md").read_text()
    for cells in ("vit_l16 at 224x224", "on 8 x NVIDIA H200", "34.0 %", "| 2,940 | 2.0 % less"):
        assert cells in page, page


def test_an_unknown_gpu_and_a_cpu_have_separate_files(tmp_path):
    other = write_results(tmp_path, result(row(), device="NVIDIA GeForce RTX 3060"))
    assert other.name.endswith("-gpu-nvidia-geforce-rtx-3060.json")
    processor = "AMD EPYC 9B14 (2 thread(s))"
    cpu = write_results(tmp_path, result(row(), device=processor, kind="cpu"))
    assert cpu.name.endswith("-amd-epyc-9b14.json")
    assert "-gpu-" not in cpu.name, "the planner reads all files with gpu in their names"
    assert choose_speed("vit_b16", "bf16", B16_FLOPS, H200, True, tmp_path).factor == 1


def test_tables_have_a_column_for_each_measurement():
    reduced = {"alone_s": 0.004, "exposed_s": 0.136, "num_bytes": 346_000_000}
    rows = step_table(result(*(row(num_devices=2, all_reduce=reduced) for _ in range(3))))
    assert {len(each) for each in rows} == {4}
    cells = {each[0].strip(): each[1] for each in rows}
    assert cells["backward"] == "20.0 %"
    assert cells["all-reduce not hidden"] == "10.0 %"
    assert cells["of each device"] == "3,000"
    alone = {each[0].strip() for each in step_table(result(row()))}
    assert not alone & {"all-reduce not hidden", "of each device"}
    assert loading_table(result(row())) == []
    faster = {**LOADING, "lost_share": -0.03}
    assert "nothing lost" in loading_table({"loading": faster})[-1][2]
