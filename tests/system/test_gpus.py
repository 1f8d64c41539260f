"""Test that GPUs are recognized by the names that users and drivers use for them."""

from __future__ import annotations

import pytest

from vit.system.gpus import GPUS, find_device, find_gpu, parse_gpus


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("H200", "H200"),
        ("h100", "H100"),
        ("H100-SXM5", "H100"),
        ("h100 pcie", "H100-PCIe"),
        ("A100-80GB", "A100"),
        ("a100_40gb", "A100-40GB"),
        ("4090", "RTX-4090"),
        ("rtx4090", "RTX-4090"),
        ("rtx 6000 ada", "RTX-6000-Ada"),
        ("rtx pro 6000", "RTX-PRO-6000"),
    ],
)
def test_finds_gpus_by_the_names_that_people_use(typed, name):
    assert find_gpu(typed).name == name


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIe"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_finds_gpus_by_the_names_that_drivers_use(reported, name):
    assert find_device(reported).name == name


@pytest.mark.parametrize(
    "reported",
    [
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA RTX A1000",
        "NVIDIA H200 MIG 1g.18gb",
        "Quadro RTX 6000",
        "",
    ],
)
def test_a_gpu_missing_from_the_table_is_not_found(reported):
    assert find_device(reported) is None


def test_every_gpu_is_found_by_its_own_name():
    assert [find_gpu(gpu.name) for gpu in GPUS] == list(GPUS)


def test_time_per_byte_and_per_operation_are_consistent():
    """If a peak performance, memory size or bandwidth were wrong by a factor of ten, the ratio of
    two of these values would be outside the expected range."""
    for gpu in GPUS:
        assert 30 < gpu.bf16_tflops * 1e3 / gpu.bandwidth_gbs < 550, gpu.name
        assert 0.5 < gpu.memory_gib / gpu.bandwidth_gbs * 40 < 3.1, gpu.name


def test_parses_a_number_of_gpus():
    assert parse_gpus("8xH200") == (8, find_gpu("H200"))
    assert parse_gpus(" 64 x h100-pcie ") == (64, find_gpu("H100-PCIe"))
    assert parse_gpus("L40S") == (1, find_gpu("L40S"))


@pytest.mark.parametrize("text", ["", "0xH200", "00xH200", "x", "8x", "8", "0", "8 x 8"])
def test_rejects_an_invalid_number_of_gpus(text):
    with pytest.raises(ValueError, match=r"--gpus '.*': expected .* as in 8xH200"):
        parse_gpus(text)


def test_an_unknown_name_is_reported_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'H300' is not a known GPU .*did you mean h.*MI300X"):
        parse_gpus("8xH300")


def test_an_unknown_gpu_is_described_by_three_numbers():
    number, gpu = parse_gpus("8x My GPU", 312, 2039, 79)
    assert (number, gpu.name) == (8, "My GPU")
    assert gpu.peak_tflops("bf16") == gpu.peak_tflops("fp32") == 312
    assert (gpu.bandwidth_gbs, gpu.memory_gib) == (2039, 79)
    with pytest.raises(ValueError, match=r"give all three, or none"):
        parse_gpus("8xMyGPU", peak_tflops=312)
    with pytest.raises(ValueError, match=r"must be positive"):
        parse_gpus("8xMyGPU", 312, 0, 79)
