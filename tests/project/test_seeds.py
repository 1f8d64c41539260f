"""Test that the table in seeds.md contains each row of the five projects exactly once, and that
each command in the table runs with the small settings described on the page."""

from __future__ import annotations

import ast
import gzip
import hashlib
import importlib
import io
import re
import shlex
import struct
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
import warm_python
from extras.deleted_extras import DELETED, needs, needs_of
from fake_imagenet import make_fake, write_archives
from processes import call, environment, jpeg, run, run_here
from servers import WebServer

from data_prep import animals10, cifar, mnist

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).with_name("seeds.md").read_text()
ROWS = [
    *(f"S{number}" for number in range(1, 10)),
    *(f"L{number}" for number in range(1, 8)),
    *(f"M{number}" for number in range(1, 9)),
    *(f"A{number}" for number in range(1, 9)),
    *(f"E{number}" for number in range(1, 9)),
]
HERE = {
    row: re.findall(r"`([^`]+)`|\]\(([^)#]+)\)", cell)
    for row, cell in re.findall(r"^\| ([A-Z]\d) \| [^|]* \| ([^|]*) \|", PAGE, re.M)
}
"""Maps each row to the entries in its column "here". An entry is a pair of the text in backticks
and the link target, one of which is empty."""
COMMANDS = {
    row: [text for text, _ in entries if text.startswith(("python ", "torchrun "))]
    for row, entries in HERE.items()
}
SMALL = re.search(r"to training commands `([^`]+)`", PAGE)[1].split()
NEEDS = (
    ("data/digits", "E1"),
    ("configs/demo.yaml", "E1"),
    ("inputs/digits_adamw.yaml", "E1"),
    ("runs/demo", "S2"),
    ("configs/small/mnist.yaml", "S3"),
    ("runs/small_mnist", "M6"),
    ("animals10.zip", "A1"),
    ("configs/animals10.yaml", "A1"),
    ("data/animals10 ", "A1"),
)
"""Maps a part of a command to a row of the table whose first command must run before this
command."""
CHEAP = "shapes vit_b16"
"""The end of the only command in the table that `make test` runs. The tests of all other commands
are marked `full`."""


# ---- the page ------------------------------------------------------------------------------------


def test_each_row_occurs_once():
    assert re.findall(r"^\| ([A-Z]\d) \|", PAGE, re.M) == ROWS
    assert list(HERE) == ROWS
    assert all(HERE.values()), "each row must give a command, a file or a function"


def test_referenced_files_and_functions_exist():
    for row, entries in HERE.items():
        for text, target in entries:
            if text and text not in COMMANDS[row] and ":" in text:
                path, _, name = text.partition(":")
                defined = [
                    getattr(n, "name", "") for n in ast.parse((ROOT / path).read_text()).body
                ]
                assert name in defined, f"{row}: {text}"
            assert not target or (Path(__file__).parent / target).exists(), f"{row}: {target}"


# ---- the page's commands -------------------------------------------------------------------------


def packed(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def image(label: int, number: int) -> bytes:
    rng = np.random.default_rng((label, number))
    return jpeg(np.uint8(rng.integers(0, 60, (48, 40, 3)) + 15 * label))


def digits_as_mnist() -> dict[str, bytes]:
    files = {}
    for part, count in (("train", 40), ("t10k", 20)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 28, 28), np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = struct.pack(">4I", 0x803, count, 28, 28) + pixels.tobytes()
        files[f"{part}-images-idx3-ubyte"] = gzip.compress(images)
        files[f"{part}-labels-idx1-ubyte"] = gzip.compress(
            struct.pack(">2I", 0x801, count) + labels.tobytes()
        )
    return files


def cifar_archive(kind: cifar.CifarKind) -> bytes:
    content = io.BytesIO()
    files = {kind.class_names: "\n".join(f"class{n}" for n in range(10)).encode()}
    for name in kind.files:
        records = np.random.default_rng(0).integers(0, 256, (20, 1 + cifar.PIXEL_BYTES), np.uint8)
        records[:, 0] = np.arange(20) % 10
        files[name] = records.tobytes()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{kind.folder}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


class Checkout:
    def __init__(self, folder: Path, web: WebServer):
        self.folder = folder
        self.web = web
        self.done = set[str]()

    def run(self, command: str) -> None:
        for text, row in NEEDS:
            first = COMMANDS[row][0]
            if text in f"{command} " and first != command and first not in self.done:
                self.run(first)
        if command in self.done:
            return
        arguments = shlex.split(command.replace("https://HOST", self.web.url))
        launcher = arguments.pop(0)
        if launcher == "torchrun":
            (ranks,) = re.findall(r"--nproc_per_node=(\d+)", arguments.pop(0))
            done = run(
                arguments[0],
                *arguments[1:],
                *self.added(arguments),
                ranks=int(ranks),
                cwd=self.folder,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        elif arguments[0].startswith("launch/"):
            run_here(arguments[0], *arguments[1:], *self.added(arguments))
        elif arguments[1].startswith("data_prep."):
            module = importlib.import_module(arguments[1])
            assert module.main([*arguments[2:], *self.added(arguments), "--workers", "1"]) == 0
        else:
            env = environment()
            line = [warm_python.python(env), *arguments]
            if arguments[0] != "-m":
                line[1] = str(ROOT / arguments[0])
            done = call(line, env, ROOT)
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout
        self.done.add(command)

    def added(self, arguments: Sequence[str]) -> list[str]:
        if arguments[0] == "launch/train.py":
            if "--print-config" in arguments:
                return ["eval.reference=null"] if "recipes" in DELETED else []
            added = [*SMALL, *(["eval.reference=null"] if "recipes" in DELETED else [])]
            if "init.freeze=backbone" in arguments:
                added = [word for word in added if not word.startswith("model.")]
                added = [*added, "train.steps=1", "data.global_batch_size=4", "eval.batch_size=4"]
            keys = {word.partition("=")[0] for word in arguments}
            return [word for word in added if word.partition("=")[0] not in keys]
        return {
            "data_prep.digits": ["--renderings", "1", "--val-renderings", "1"],
            "data_prep.mnist": ["--url", f"{self.web.url}/mnist"],
            "data_prep.cifar": ["--url", f"{self.web.url}/cifar"],
            "data_prep.imagenet": ["--partial"],
        }.get(arguments[1], [])


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """Create a folder with configs, a photo and ImageNet's archives, and run a server for all other
    files."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    (folder / "photo.jpg").write_bytes(image(0, 0))

    digits = digits_as_mnist()
    small_cifar = cifar.KINDS[10]
    small_cifar = small_cifar._replace(
        files={name: (split, 20) for name, (split, _) in small_cifar.files.items()}
    )
    cifar_files = cifar_archive(small_cifar)

    foods = {
        f"food/{split}/{name}/{n}.jpg": image(label, n)
        for split in ("train", "test")
        for label, name in enumerate(("pizza", "steak", "sushi"))
        for n in range(4)
    }
    animals = {
        f"raw-img/{name}/{n}.jpeg": image(label, n)
        for label, name in enumerate(animals10.ENGLISH)
        for n in range(10)
    }

    served = {f"/mnist/{name}.gz": content for name, content in digits.items()}
    served |= {f"/cifar/{small_cifar.archive}": cifar_files, "/food.zip": packed(foods)}
    served |= {"/kaggle/animals10": packed(animals)}

    with WebServer(served) as web, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("no_proxy", "127.0.0.1")
        patch.setattr(mnist, "PARTS", {"train": ("train", 40), "val": ("t10k", 20)})
        md5 = {name: hashlib.md5(content).hexdigest() for name, content in digits.items()}
        patch.setitem(mnist.VARIANTS, "mnist", mnist.VARIANTS["mnist"]._replace(md5=md5))
        md5 = hashlib.md5(cifar_files).hexdigest()
        patch.setitem(cifar.KINDS, 10, small_cifar._replace(md5=md5))
        patch.setattr(animals10, "URL", f"{web.url}/kaggle/animals10")
        yield Checkout(folder, web)


def runs() -> Iterator[object]:
    for row, commands in COMMANDS.items():
        for command in commands:
            marks = [needs_of(command), *([] if command.endswith(CHEAP) else [pytest.mark.full])]
            marks += [needs("planner")] if re.search(" (shapes|summary) ", command) else []
            marks += [needs("report")] if "--sheet" in command else []
            yield pytest.param(row, command, marks=marks, id=f"{row}: {command}")


@pytest.mark.parametrize(("row", "command"), list(runs()))
def test_a_command_runs(row, command, checkout):
    if row == "A4":
        model = torchvision.models.vit_b_16(weights=None)
        torch.save(model.state_dict(), checkout.folder / "vit_b_16-c867db91.pth")
    if row == "L5":
        write_archives(make_fake(num_classes=10, train_per_class=4), Path("downloads/imagenet"))
    checkout.run(command)
    for path in re.findall(r"(?:--out|--separate|--sheet|run\.dir=)[ =]?(\S+)", command):
        assert Path(path).exists(), "the command must have written the files that it names"
