"""Fuzz the C decoder and transcoder with corrupt files: `python tests/native/fuzz.py --minutes 10`.

The fuzzer starts from small JPEGs of every kind, so that its mutations reach every part of the
format. fuzz.c mutates these files, decodes them with both implementations of the library, and
compares the results. gcc or clang compiles the code with the address, leak and undefined-behavior
sanitizers.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "vit" / "data" / "decode" / "c"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SIZES = ((1, 1), (2, 7), (8, 8), (17, 33), (64, 48), (97, 61), (130, 40), (40, 130), (300, 9))
MODES: dict[str, dict[str, Any]] = {
    "420": {"subsampling": "4:2:0"},
    "422": {"subsampling": "4:2:2"},
    "444": {"subsampling": "4:4:4"},
    "L": {},
    "CMYK": {},
    "progressive": {"progressive": True},
    "optimized": {"optimize": True},
}
MARKERS: tuple[dict[str, Any], ...] = (
    {},
    *({"restart_marker_blocks": n} for n in (1, 2, 3, 5)),
    {"restart_marker_rows": 1},
)


class NoSanitizer(Exception):
    """The exception raised if no compiler can build a working program with sanitizers."""


def write_seeds(folder: Path) -> Path:
    rng = np.random.default_rng(0)

    def write(name: str, data: bytes) -> None:
        (folder / f"{len(list(folder.iterdir())):04d}-{name}.jpg").write_bytes(data)

    folder.mkdir()
    for width, height in SIZES:
        colors = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), np.uint8)
        smooth = np.asarray(Image.fromarray(colors).resize((width, height)), np.float32)
        noise = 12 * rng.standard_normal((height, width, 3))
        pixels = (smooth + noise).clip(0, 255).astype(np.uint8)
        image = Image.fromarray(pixels)
        for mode, markers in itertools.product(MODES, MARKERS):
            converted = image.convert(mode) if mode in ("L", "CMYK") else image
            quality = int(rng.choice((5, 75, 90, 100)))
            encoded = io.BytesIO()
            converted.save(encoded, "JPEG", quality=quality, **MODES[mode], **markers)
            write(mode, encoded.getvalue())
        for sampling in ("440", "411"):
            write(sampling, simplejpeg.encode_jpeg(pixels, 90, colorsubsampling=sampling))
        encoded = io.BytesIO()
        image.save(encoded, "JPEG", keep_rgb=True)
        write("RGB", encoded.getvalue())
    write("longest", longest_block())
    return folder


def longest_block() -> bytes:
    """Return a JPEG that makes the decoder try to read as far beyond the end of the file as
    possible.

    The only block of this JPEG needs 64 codes of 16 bits, each followed by a 15-bit value, but the
    file ends before these bits.
    """

    def segment(marker: int, content: bytes) -> bytes:
        return bytes((0xFF, marker)) + (len(content) + 2).to_bytes(2, "big") + content

    # The table contains a single 16-bit code, which stands for zero zeros and a 15-bit value.
    one_code = bytes([*[0] * 15, 1, 15])
    tables = (
        segment(0xDB, bytes([0] + [1] * 64))
        + segment(0xC4, bytes([0x00]) + one_code)
        + segment(0xC4, bytes([0x10]) + one_code)
    )
    frame = segment(0xC0, bytes([8, 0, 8, 0, 8, 1, 1, 0x11, 0]))
    scan = segment(0xDA, bytes([1, 1, 0, 0, 63, 0]))
    return b"\xff\xd8" + tables + frame + scan + b"\xff\xd9"


def build(folder: Path, sources: Path = SOURCES) -> Path:
    """Compile the fuzzer with the C files in `sources`. Raises NoSanitizer if no compiler supports
    sanitizers."""
    program = folder / "fuzz"
    problems: list[str] = []
    files = [str(path) for path in (HERE / "fuzz.c", *sorted(sources.glob("*.c")))]
    for compiler in filter(shutil.which, ("gcc", "clang")):
        if works(compiler, folder, problems):
            options = ["-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{sources}", *SANITIZERS]
            subprocess.run([compiler, *options, *files, "-o", str(program)], check=True)
            return program
    raise NoSanitizer("; ".join(problems) or "no gcc or clang found: apt-get install gcc")


def works(compiler: str, folder: Path, problems: list[str]) -> bool:
    source = folder / "empty.c"
    program = folder / "empty"
    source.write_text("int main(void) { return 0; }")
    build_command = [compiler, *SANITIZERS, str(source), "-o", str(program)]
    for command in (build_command, [str(program)]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip() or "killed").splitlines()[-1]
            problems.append(f"{compiler} {' '.join(SANITIZERS)}: {reason}")
            return False
    return True


def run(
    program: Path,
    seeds: Path,
    *,
    seed: int,
    files: int = 2**63,
    seconds: int = 10**9,
    fill: int = -1,
) -> tuple[int, str]:
    """Run the fuzzer, and return its exit status and its output.

    If a file fails, the fuzzer saves this file next to the folder of seeds. `fill` is the value of
    each byte in newly allocated memory, or -1 for the sanitizer's default.
    """
    options = "quarantine_size_mb=64"
    if fill >= 0:
        options += f":malloc_fill_byte={fill}:max_malloc_fill_size={2**30}"
    command = [str(program), str(seeds), str(seed), str(files), str(seconds)]
    environment = os.environ | {"ASAN_OPTIONS": options}
    done = subprocess.run(
        command,
        cwd=seeds.parent,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the changes; the same files for the same number"
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="vit-fuzz-"))
    try:
        program = build(folder)
    except NoSanitizer as error:
        sys.exit(f"error: {error}")
    status, printed = run(
        program,
        write_seeds(folder / "seeds"),
        seed=options.seed,
        seconds=round(60 * options.minutes),
    )
    print(printed, end="")
    if status:
        sys.exit(f"error: exit status {status}; the file is {folder}/fuzz-failure.jpg")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
