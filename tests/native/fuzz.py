"""Build and run fuzz.c: what the C decoder and transcoder do with files that lie. `python
tests/native/fuzz.py --minutes 10`.

The data's story: seeds are JPEGs of every kind that there is, small, so that changes hit all parts
of them. fuzz.c changes them, with the library built beside it by gcc or clang with the sanitizers
of addresses, leaks and undefined behaviour.
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

import numpy as np
import simplejpeg
from PIL import Image

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "vit" / "data" / "decode" / "c"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SIZES = ((1, 1), (2, 7), (8, 8), (17, 33), (64, 48), (97, 61), (130, 40), (40, 130), (300, 9))
MARKERS = ({}, *({"restart_marker_blocks": n} for n in (1, 2, 3, 5)), {"restart_marker_rows": 1})


class NoSanitizer(Exception):
    """No compiler here makes a program with sanitizers that runs; its words."""


def write_seeds(folder: Path) -> Path:
    """All samplings, grey, CMYK, RGB, progressive, restart intervals, qualities; from 1 x 1 on."""
    rng = np.random.default_rng(0)

    def write(name: str, data: bytes) -> None:
        (folder / f"{len(list(folder.iterdir())):04d}-{name}.jpg").write_bytes(data)

    folder.mkdir()
    for width, height in SIZES:
        coarse = Image.fromarray(
            rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), np.uint8)
        ).resize((width, height))
        pixels = (
            (np.asarray(coarse, np.float32) + 12 * rng.standard_normal((height, width, 3)))
            .clip(0, 255)
            .astype(np.uint8)
        )
        image = Image.fromarray(pixels)
        for mode, markers in itertools.product(
            ("420", "422", "444", "grey", "CMYK", "progressive", "optimised"), MARKERS
        ):
            options: dict[str, object] = (
                {"subsampling": ("444", "422", "420").index(mode)} if mode.isdigit() else {}
            )
            options |= {"progressive": mode == "progressive", "optimize": mode == "optimised"}
            of_mode = (
                image.convert({"grey": "L"}.get(mode, mode)) if mode in ("grey", "CMYK") else image
            )
            encoded = io.BytesIO()
            of_mode.save(
                encoded, "JPEG", quality=int(rng.choice((5, 75, 90, 100))), **options, **markers
            )
            write(mode, encoded.getvalue())
        for sampling in ("440", "411"):
            write(sampling, simplejpeg.encode_jpeg(pixels, 90, colorsubsampling=sampling))
        encoded = io.BytesIO()
        image.save(encoded, "JPEG", keep_rgb=True)
        write("RGB", encoded.getvalue())
    write("longest", longest_block())
    return folder


def longest_block() -> bytes:
    """A block of 64 codes of 16 bits with values of 15, all zeros, none of which is there: what is
    read lies furthest beyond the end."""

    def segment(marker: int, content: bytes) -> bytes:
        return bytes((0xFF, marker)) + (len(content) + 2).to_bytes(2, "big") + content

    one_code = bytes([*[0] * 15, 1, 15])  # of 16 bits: no zeros before, 15 bits
    tables = (
        segment(0xDB, bytes([0] + [1] * 64))
        + segment(0xC4, bytes([0x00]) + one_code)
        + segment(0xC4, bytes([0x10]) + one_code)
    )
    frame = segment(0xC0, bytes([8, 0, 8, 0, 8, 1, 1, 0x11, 0]))
    scan = segment(0xDA, bytes([1, 1, 0, 0, 63, 0]))
    return b"\xff\xd8" + tables + frame + scan + b"\xff\xd9"


def build(folder: Path, sources: Path = SOURCES) -> Path:
    """The program, from the C files in `sources`. Raises NoSanitizer."""
    program = folder / "fuzz"
    problems = []
    files = [str(path) for path in (HERE / "fuzz.c", *sorted(sources.glob("*.c")))]
    for compiler in filter(shutil.which, ("gcc", "clang")):
        if works(compiler, folder, problems):
            subprocess.run(
                [
                    compiler,
                    "-O1",
                    "-g",
                    "-Wall",
                    "-Wextra",
                    "-Werror",
                    f"-I{sources}",
                    *SANITIZERS,
                    *files,
                    "-o",
                    str(program),
                ],
                check=True,
            )
            return program
    raise NoSanitizer("; ".join(problems) or "neither gcc nor clang is there: apt-get install gcc")


def works(compiler: str, folder: Path, problems: list[str]) -> bool:
    """Whether it makes programs with sanitizers that run here; else why not is appended to
    `problems`."""
    (folder / "nothing.c").write_text("int main(void) { return 0; }")
    for command in (
        [compiler, *SANITIZERS, str(folder / "nothing.c"), "-o", str(folder / "nothing")],
        [str(folder / "nothing")],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            problems.append(
                f"{compiler} {' '.join(SANITIZERS)}:"
                f" {(done.stderr.strip() or 'killed').splitlines()[-1]}"
            )
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
    """Exit status and what was printed. A file that broke it is left beside the folder of seeds.
    fill: what fresh memory holds."""
    options = "quarantine_size_mb=64" + (
        f":malloc_fill_byte={fill}:max_malloc_fill_size={2**30}" if fill >= 0 else ""
    )
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
