"""GPUs that people train on: their peak in matrix products, and their memory.

The peak is what a share of it (MFU) refers to, so it is the dense number of the data sheet: those
with structured sparsity are twice as large, and no training of ours reaches them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vit.system.spelling import did_you_mean


@dataclass(frozen=True)
class Gpu:
    """One GPU of a data sheet."""

    name: str
    bf16_tflops: float
    """Dense bf16 and fp16 with fp32 accumulation, 10**12 operations per second."""
    fp32_tflops: float
    """fp32 outside of the tensor cores, which is what torch uses unless TF32 is allowed."""
    memory_gib: float
    """What torch reports as total memory, a little less than is sold."""
    pattern: str
    """Matches what the driver calls it."""

    def peak_tflops(self, precision: str) -> float:
        """The peak of `precision`: fp32, bf16 or fp16."""
        return self.fp32_tflops if precision == "fp32" else self.bf16_tflops


GPUS = (
    # NVIDIA's data sheets: H100 and H200 (SXM), HGX B200, A100 (SXM), L40S; "NVIDIA Ada GPU
    # Architecture", appendix A, for the RTX 4090; AMD's data sheet of the MI300X. The first pattern
    # that matches counts, so the narrower ones come first.
    Gpu("H100-PCIe", 756.0, 51.0, 79.1, r"\bH100.*PCIe"),
    Gpu("H100-NVL", 835.0, 60.0, 93.1, r"\bH100.*NVL"),
    Gpu("H100", 989.4, 66.9, 79.1, r"\bH100\b"),
    Gpu("H200-NVL", 835.0, 60.0, 139.8, r"\bH200.*NVL"),
    Gpu("H200", 989.4, 66.9, 139.8, r"\bH200\b"),
    Gpu("B200", 2250.0, 75.0, 178.3, r"\bB200\b"),
    Gpu("A100-40GB", 312.0, 19.5, 39.4, r"\bA100\b.*40GB"),
    Gpu("A100", 312.0, 19.5, 79.2, r"\bA100\b"),
    Gpu("L40S", 362.0, 91.6, 44.4, r"\bL40S\b"),
    Gpu("RTX-4090", 165.2, 82.6, 23.5, r"\b4090\b(?! D| Laptop)"),
    Gpu("MI300X", 1307.4, 163.4, 191.7, r"\bMI300X\b"),
)


def find_gpu(name: str) -> Gpu:
    """Return the GPU that people call `name`: H200, h100-pcie, 4090.

    Raises ValueError with the known names.
    """
    for gpu in GPUS:
        if _plain(name) == _plain(gpu.name):
            return gpu
    names = [gpu.name for gpu in GPUS]
    raise ValueError(
        f"{name!r} is not in the table of GPUs{did_you_mean(name, map(str.lower, names))}: it has"
        f" {', '.join(names)}"
    )


def _plain(name: str) -> str:
    """Return `name` without what distinguishes no two GPUs of the table."""
    return re.sub(r"[^a-z0-9]|rtx|sxm\d?|80gb$|141gb$", "", name.lower())


def find_device(device_name: str) -> Gpu | None:
    """Return the GPU that the driver calls `device_name`, None if the table does not have it.

    Nor for an instance of a divided GPU ("NVIDIA H200 MIG 1g.18gb"), whose peak is a part.
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    matches = (gpu for gpu in GPUS if re.search(gpu.pattern, device_name, re.IGNORECASE))
    return next(matches, None)


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """Parse `8xH200` or `H200` into a count and a GPU. Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*(?:(\d+)\s*[x*]\s*)?(\S.*?)\s*", text, re.IGNORECASE)
    expected = f"--gpus {text!r}: expected a number and a name, as in 8xH200"
    if match is None or (match[1] is not None and int(match[1]) == 0):
        raise ValueError(expected)
    try:
        return int(match[1] or 1), find_gpu(match[2])
    except ValueError:
        if re.fullmatch(r"[\d\s*x]*", match[2], re.IGNORECASE):  # a number without a name
            raise ValueError(expected) from None
        raise
