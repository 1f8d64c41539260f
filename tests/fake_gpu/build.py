"""Build the fake GPU, and return the environment in which torch finds it.

The C++ files in `cuda/` are compiled to `libcuda.so.1`. This library is preloaded, so that its
functions replace those of the CUDA runtime, the driver and cuBLAS in torch's libraries. All other
CUDA functions that torch's libraries import only report that they are missing. NVML is a separate
library. The build takes two seconds, and is stored in a folder whose name is derived from the
sources and torch's version. The folder is kept after the session, with everything that Triton and
Inductor compiled for the fake GPU.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = sorted((HERE / "cuda").iterdir())
TORCH_VERSIONS = ("2.15",)
"""The torch versions whose calls to CUDA are known. Another version may call functions that are
missing, or expect another order of arguments."""
CUDA_VERSION = "13"
"""The version of the CUDA headers whose declarations the sources in `cuda/` repeat."""
TORCH_LIBRARIES = ("torch_cuda", "c10_cuda", "torch_cuda_linalg", "torch_python", "caffe2_nvrtc")
REPLACED = re.compile(r"cu(?!File|dnn|solver|sparse|fft|rand)(da|blas|[A-Z])\w+")
"""The names of the functions that the fake GPU replaces. cuDNN's operators are replaced in
`operators.py`, and the other CUDA libraries are never called."""
USED_BY_TRITON = ("cuTensorMapEncodeIm2col",)


def reason_not_to_build() -> str:
    """Return why this machine cannot build or use the fake GPU, or ""."""
    version = torch.__version__
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the fake GPU needs Linux on x86-64"
    if torch.version.cuda is None:
        return f"the fake GPU needs torch's wheels with CUDA, not torch {version}"
    if not version.startswith(tuple(f"{known}." for known in TORCH_VERSIONS)):
        known = ", ".join(TORCH_VERSIONS)
        return f"the fake GPU knows torch {known}, not {version}: see {HERE / 'build.py'}"
    cuda = torch.version.cuda
    if cuda.partition(".")[0] != CUDA_VERSION:
        return f"the fake GPU knows CUDA {CUDA_VERSION}, not {cuda}: see {HERE / 'build.py'}"
    if importlib.util.find_spec("triton") is None:
        return "the fake GPU needs Triton, whose package has the headers of CUDA"
    missing = [name for name in ("gcc", "g++", "nm") if shutil.which(name) is None]
    if missing:
        return f"the fake GPU needs {' and '.join(missing)}: apt-get install g++"
    return ""


def build() -> Path:
    """Return the folder with the built libraries. Build them first unless an earlier session has
    built them."""
    name = hashlib.sha256(torch.__version__.encode() + Path(__file__).read_bytes())
    for source in SOURCES:
        name.update(source.read_bytes())
    # Do not use this session's temporary folder, which is deleted at the end of the session. The
    # space in the name tests that TMPDIR may contain spaces.
    shared = os.environ.get("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = Path(shared, f"vit-tests fake-gpu-{os.getuid()}-{name.hexdigest()[:12]}")
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(prefix="vit-tests-building-", dir=shared) as building:
        new = Path(building, "built")
        new.mkdir()
        _build_into(new)
        try:
            new.rename(folder)
        except OSError:  # another process has stored its build first
            assert folder.is_dir()
    return folder


def _build_into(folder: Path) -> None:
    # Compile all files as one file, which takes a quarter of the time.
    sources = [source for source in SOURCES if source.suffix == ".cpp"]
    whole = "".join(f'#include "{source}"\n' for source in sources)
    headers = [f"-I{header_folder}" for header_folder in _header_folders()]
    object_file = folder / "cuda.o"
    compile_ = ["g++", "-std=c++17", "-O1", "-fPIC", *headers, "-x", "c++", "-c", "-"]
    _run([*compile_, "-o", str(object_file)], whole)

    defined = _names(object_file, "--defined-only")
    stubs = "".join(
        f'int {name}(void) {{ fake_gpu_missing("{name}"); return 801; }}\n'  # cudaErrorNotSupported
        for name in sorted(_called_names() - defined)
    )
    stubs = f"void fake_gpu_missing(const char *);\n{stubs}"
    stub_file = folder / "stubs.o"
    _run(["gcc", "-fPIC", "-w", "-x", "c", "-c", "-", "-o", str(stub_file)], stubs)

    library = folder / "libcuda.so.1"
    name = "-Wl,-soname,libcuda.so.1"
    _run(["g++", "-shared", str(object_file), str(stub_file), "-ldl", name, "-o", str(library)])
    nvml = folder / "nvml"
    nvml.mkdir()
    [source] = [source for source in SOURCES if source.name == "nvml.c"]
    name = "-Wl,-soname,libnvidia-ml.so.1"
    _run(["gcc", "-fPIC", "-shared", str(source), name, "-o", str(nvml / "libnvidia-ml.so.1")])


def _header_folders() -> list[Path]:
    """Return the folders with CUDA's headers, which are in the wheels of Triton and cuBLAS."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None
    assert triton.origin is not None
    packages = Path(triton.origin).parents[1]
    return [packages / "triton/backends/nvidia/include", *packages.glob("nvidia/cu*/include")]


def _called_names() -> set[str]:
    folder = Path(torch.__file__).parent / "lib"
    names = set(USED_BY_TRITON)
    for library in TORCH_LIBRARIES:
        names |= _names(folder / f"lib{library}.so", "--dynamic", "--undefined-only")
    return {name for name in names if REPLACED.fullmatch(name)}


def _names(path: Path, *options: str) -> set[str]:
    lines = _run(["nm", *options, str(path)]).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}


def _run(line: list[str], text: str = "") -> str:
    done = subprocess.run(line, input=text, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(line)}:\n{done.stderr}"
    return done.stdout


def variables(folder: Path, *, nvml: bool = True) -> dict[str, str]:
    """Return the environment variables with which a new process sees the fake GPU.

    nvml: whether NVIDIA's management library can be loaded.
    """
    return {
        # The name has no folder, because LD_PRELOAD is split at spaces.
        "LD_PRELOAD": "libcuda.so.1",
        "LD_LIBRARY_PATH": f"{folder}:{folder / 'nvml'}" if nvml else str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        # Compile in the process itself, because worker processes would import torch in each
        # session.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCH_LOGS": "recompiles",
        "TRITON_DEFAULT_FP_FUSION": "1",  # the default value, set to avoid a warning
        # The start script of a child (`child.py`) is found by the name of its package.
        "PYTHONPATH": str(HERE.parent),
    }
