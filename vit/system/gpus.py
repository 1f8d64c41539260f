"""List GPUs with their peak FLOP/s for matrix products, memory size and memory bandwidth.

The table contains the dense peaks from the data sheets, because model FLOPs utilization (MFU) is
relative to the dense peak. The peak with structured sparsity is twice as high, but training does
not use sparsity.
"""

import re
from dataclasses import dataclass

from vit.system.spelling import did_you_mean


@dataclass(frozen=True)
class Gpu:
    """The data-sheet values of a GPU."""

    name: str
    bf16_tflops: float
    """Dense bf16 or fp16 TFLOP/s (10**12 operations per second) with fp32 accumulation. V100 and T4
    lack bf16, so their values are for fp16."""
    fp32_tflops: float
    """fp32 TFLOP/s without tensor cores, which torch avoids for fp32 unless TF32 is allowed."""
    memory_gib: float
    """The total memory that torch reports, slightly less than the advertised size."""
    bandwidth_gbs: float
    """The memory bandwidth in 10**9 bytes per second."""
    pattern: str
    """A regular expression that matches the driver's name for the GPU."""

    @property
    def has_bf16(self) -> bool:
        """Whether the GPU has bf16 instructions, as all GPUs in the table but V100 and T4."""
        return not self.name.startswith(("V100", "T4"))

    def peak_tflops(self, precision: str) -> float:
        """Return the peak TFLOP/s for `precision`: fp32, bf16 or fp16."""
        return self.fp32_tflops if precision == "fp32" else self.bf16_tflops


# Columns: name, bf16 TFLOP/s, fp32 TFLOP/s, memory in GiB, bandwidth in GB/s, pattern.
#
# Sources: NVIDIA's data sheets for V100, T4, A10, A100, L4, L40, L40S, H100 and H200 (SXM), GH200,
# HGX B200 and B300, GB200 and GB300 NVL72 (per GPU), RTX 6000 Ada and RTX PRO 6000 (fp16 from their
# fp8 and fp4). AWS's page about G5 for A10G, and sellers' pages for H20. Appendix A of the GA102,
# Ada and RTX Blackwell architectures for 3090, 4090 and 5090, whose tensor cores are half as fast
# with fp32 accumulation. AMD's data sheet for MI300X.
#
# The first matching pattern is used, so put narrower patterns first.
_TABLE = r"""
H100-PCIe      756.0   51.0   79.1  2039.0  \bH100.*PCIe
H100-NVL       835.0   60.0   93.1  3938.0  \bH100.*NVL
H100           989.4   66.9   79.1  3352.0  \bH100\b
H200-NVL       835.0   60.0  139.8  4800.0  \bH200.*NVL
H200           989.4   66.9  139.8  4800.0  \bH200\b
GH200-144GB    989.4   66.9  139.8  4900.0  \bGH200 144G
GH200          989.4   66.9   94.5  4000.0  \bGH200\b
H20            148.0   44.0   95.1  4000.0  \bH20\b(?!-3e)
B200          2250.0   75.0  178.3  7700.0  \bB200\b
B300          2250.0   75.0  267.7  7700.0  \bB300\b
GB200         2500.0   80.0  184.0  8000.0  \bGB200\b
GB300         2500.0   80.0  276.5  8000.0  \bGB300\b
A100-40GB      312.0   19.5   39.4  1555.0  \bA100\b.*40GB
A100           312.0   19.5   79.2  2039.0  \bA100\b
A10G            70.0   31.2   22.1   600.0  \bA10G\b
A10            125.0   31.2   22.1   600.0  \bA10\b
L40S           362.0   91.6   44.4   864.0  \bL40S\b
L40            181.0   90.5   44.4   864.0  \bL40\b
L4             121.0   30.3   22.0   300.0  \bL4\b
V100-PCIe      112.0   14.0   15.8   900.0  \bV100-PCIE
V100-32GB      125.0   15.7   31.7   900.0  \bV100.*32GB
V100           125.0   15.7   15.8   900.0  \bV100\b
T4              65.0    8.1   14.6   320.0  \bT4\b
RTX-3090        71.0   35.6   23.6   936.0  \b3090\b(?! Ti)
RTX-4090       165.2   82.6   23.5  1008.0  \b4090\b(?! D| Laptop)
RTX-5090       209.5  104.8   31.4  1792.0  \b5090\b(?! D| Laptop)
RTX-6000-Ada   364.2   91.1   47.4   960.0  \bRTX 6000 Ada\b
RTX-PRO-6000   503.8  125.0   94.9  1792.0  \bRTX PRO 6000 Blackwell Workstation\b
MI300X        1307.4  163.4  191.7  5300.0  \bMI300X\b
"""


def _read_row(row: str) -> Gpu:
    """Read a row of the table: name, TFLOP/s in bf16 and fp32, GiB, GB/s, and a pattern."""
    name, bf16, fp32, memory, bandwidth, pattern = row.split(maxsplit=5)
    return Gpu(
        name=name,
        bf16_tflops=float(bf16),
        fp32_tflops=float(fp32),
        memory_gib=float(memory),
        bandwidth_gbs=float(bandwidth),
        pattern=pattern,
    )


GPUS = tuple(map(_read_row, _TABLE.strip().splitlines()))


def find_gpu(name: str) -> Gpu:
    """Return the GPU with the common name `name`, such as H200, h100-pcie or 4090.

    For any other name, raises ValueError, which lists the known names.
    """
    for gpu in GPUS:
        if _plain(name) == _plain(gpu.name):
            return gpu

    names = [gpu.name for gpu in GPUS]
    raise ValueError(
        f"{name!r} is not a known GPU{did_you_mean(name, map(str.lower, names))}: use one of"
        f" {', '.join(names)}"
    )


def _plain(name: str) -> str:
    """Return `name` without words that do not distinguish the GPUs in the table."""
    return re.sub(r"[^a-z0-9]|rtx|sxm\d?|80gb$|141gb$", "", name.lower())


def find_device(device_name: str) -> Gpu | None:
    """Return the GPU for the driver's `device_name`, or None if the table does not list it.

    The result is also None for a MIG instance ("NVIDIA H200 MIG 1g.18gb"), whose peak is lower.
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    matches = (gpu for gpu in GPUS if re.search(gpu.pattern, device_name, re.IGNORECASE))
    return next(matches, None)


def parse_gpus(
    text: str,
    peak_tflops: float | None = None,
    bandwidth_gbs: float | None = None,
    memory_gib: float | None = None,
) -> tuple[int, Gpu]:
    """Parse `8xH200` or `H200` into a count and a GPU. Raises ValueError for anything else.

    The other arguments describe a GPU that is not in the table: its peak at the precision of the
    run, its memory bandwidth and its memory. Either all or none must be given.
    """
    match = re.fullmatch(r"\s*(?:(?P<count>\d+)\s*[x*]\s*)?(?P<name>\S.*?)\s*", text, re.IGNORECASE)
    expected = f"--gpus {text!r}: expected a number and a name, as in 8xH200"
    if match is None:
        raise ValueError(expected)
    count, name = int(match["count"] or 1), match["name"]
    if count == 0 or re.fullmatch(r"[\d\s*x]*", name, re.IGNORECASE):  # the name is missing
        raise ValueError(expected)

    given = [each for each in (peak_tflops, bandwidth_gbs, memory_gib) if each is not None]
    if not given:
        return count, find_gpu(name)
    if len(given) < 3:
        raise ValueError(
            f"--gpus {text!r}: --peak-tflops, --bandwidth-gbs and --memory-gib describe a GPU"
            " together: give all three, or none for a GPU in the table"
        )
    if not all(0 < number < float("inf") for number in given):
        raise ValueError(f"--gpus {text!r}: its peak, bandwidth and memory must be positive")

    peak, bandwidth, memory = given
    return count, Gpu(name, peak, peak, memory, bandwidth, re.escape(name))
