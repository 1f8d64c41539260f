"""Gather the wheels and the image shards that a GPU machine without internet needs for `lease.sh`.

    make lease-kit IMAGES=CIFAR-10-images    # with train/<class>/*.jpg and test/<class>/*.jpg
    python benchmarks/gpu_check/kit.py CIFAR-10-images --out build/lease --mib 52 --python 3.12

The kit has wheels of the packages that PyTorch's container images lack. The remaining part of
`--mib` is filled with images, with an equal share of the space for each class. Five sixths of the
space are for training images.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from vit.distributed.exit import run_command
from vit.system.command_line import Parser

PACKAGES = (
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "simplejpeg"),
    "google-crc32c",
)
"""The packages that `vit` needs in addition to torch, timm and their dependencies."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
SHARES = {"train": 5 / 6, "test": 1 / 6}
BYTES_AROUND_AN_IMAGE = 1_750
"""The bytes of headers and padding for an image and its label in a tar."""


def main() -> None:
    args = read_command_line()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # Build in a folder beside the kit's, so that a single `rename` creates the complete kit.
    with tempfile.TemporaryDirectory(prefix=".vit-lease-", dir=args.out.parent) as scratch:
        folder = Path(scratch, "kit")
        download_wheels(folder / "wheels", args.python)
        free_bytes = args.mib * 2**20 - size_of(folder)

        images = Path(scratch, "images")
        count = link_images(args.images, images, free_bytes)
        command = [sys.executable, "-m", "data_prep.imagefolder", str(images)]
        shards = folder / "shards"
        run([*command, "--out", str(shards), "--num-shards", "4"], f"no shards of {args.images}")
        (shards / "contact_sheet.png").unlink()  # takes a megabyte and is not needed for training

        size_mib = size_of(folder) / 2**20
        folder.rename(args.out)
    print(f"{args.out}: {count:,} images, {size_mib:.1f} MiB with the wheels")


def read_command_line() -> Namespace:
    """Parse the command line. Raises ValueError for mistakes."""
    parser = Parser("python benchmarks/gpu_check/kit.py", __doc__)
    parser.add_argument("images", type=Path, metavar="IMAGES", help="folder with train/ and test/")
    parser.add_argument("--out", type=Path, default=Path("build/lease"), metavar="FOLDER")
    parser.add_argument("--mib", type=float, default=52.0, help="size of the kit (default: 52)")
    parser.add_argument("--python", default="3.12", help="version of the GPU machine's Python")
    args = parser.parse_args()
    for split in SHARES:
        if not (args.images / split).is_dir():
            parser.error(f"{args.images}: no folder {split}; expected {split}/<class>/*.jpg")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(f"--out {args.out}: already exists: remove it, or name another folder")
    return args


def download_wheels(folder: Path, python: str) -> None:
    """Download the wheels of PACKAGES, in the versions that this environment has."""
    platforms = [flag for name in PLATFORMS for flag in ("--platform", name)]
    options = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", *platforms]
    line = [*options, "--python-version", python, "--dest", str(folder), *_with_versions()]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *line]
    run(command, f"no wheels for Python {python} from pip's package index")


def run(line: list[str], failure: str) -> None:
    """Run a command that prints its own error messages. Raises ValueError with `failure` if the
    command fails."""
    status = subprocess.run(line).returncode
    if status:
        raise ValueError(f"{failure}: {line[2]} ended with status {status}, see above")


def _with_versions() -> Iterator[str]:
    for package in PACKAGES:
        yield f"{package}=={version(package)}"


def link_images(images: Path, folder: Path, free_bytes: float) -> int:
    """Link images to `folder`, as many of each class as fit into `free_bytes`. Return their
    number."""
    count = 0
    for split, share in SHARES.items():
        classes = sorted(each for each in (images / split).iterdir() if each.is_dir())
        for of_class in classes:
            left = free_bytes * share / len(classes)
            (folder / split / of_class.name).mkdir(parents=True)
            for image in sorted(of_class.iterdir()):
                left -= image.stat().st_size + BYTES_AROUND_AN_IMAGE
                if left < 0:
                    break
                (folder / split / of_class.name / image.name).symlink_to(image.resolve())
                count += 1
    return count


def size_of(folder: Path) -> int:
    """Return the total size of all files in `folder` in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    run_command(main)
