"""A library that does not fit the code next to it is not used, and the message says what to do."""

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from vit.data.decode import native
from vit.data.decode.native import ABI, PACKAGE, SOURCES, UnusableLibrary, load, stamp_of

needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None and os.environ.get("VIT_REQUIRE_NATIVE") != "1",
    reason="no gcc: apt-get install gcc",
)
WRONG = ("CR_TO_R = 91881", "CR_TO_R = 93881")
"""What makes red a little redder."""
OTHER = r"library.so is of another version of this package; build it again: pip install -e \."


def built(folder: Path, *sources: Path, stamp: str = "") -> Path:
    library = folder / "library.so"
    options = ["-O1", "-shared", "-fPIC", f'-DVIT_NATIVE_SOURCES="{stamp}"']
    subprocess.run(["gcc", *options, *map(str, sources), "-o", str(library)], check=True)
    return library


def small(folder: Path, functions: str) -> Path:
    """A library of nothing but these functions."""
    (folder / "small.c").write_text(functions)
    return built(folder, folder / "small.c")


def copied(folder: Path, *change: str) -> tuple[Path, Path]:
    """A copy of the C files, with pixels.h changed, and the library that was built from it."""
    sources = shutil.copytree(SOURCES, folder / "sources")
    pixels = (sources / "pixels.h").read_text()
    assert not change or pixels.count(change[0]) == 1
    (sources / "pixels.h").write_text(pixels.replace(*change) if change else pixels)
    return sources, built(folder, *sources.glob("*.c"), stamp=stamp_of(sources))


def abi(number: int) -> str:
    return f"int vit_native_abi(void) {{ return {number}; }}\n"


@needs_gcc
def test_one_of_another_version(tmp_path):
    """Calling it with other arguments than it takes ends the process, or worse does not."""
    with pytest.raises(UnusableLibrary, match=OTHER):
        load(small(tmp_path, "int vit_decode_window(void) { return 0; }"))
    (tmp_path / "next").mkdir()
    functions = abi(ABI + 1) + "const char *vit_native_sources(void) { return 0; }"
    with pytest.raises(UnusableLibrary, match=OTHER):
        load(small(tmp_path / "next", functions))


@needs_gcc
def test_one_of_other_sources(tmp_path):
    """After git pull without installing again. Where no sources are, as in a wheel, none are asked
    for."""
    sources, library = copied(tmp_path)
    load(library, sources)
    (sources / "window.c").open("a").write("\n")
    with pytest.raises(
        UnusableLibrary,
        match=r"was built from other sources than .*sources holds now; build it again",
    ):
        load(library, sources)
    load(library, tmp_path / "none")


@needs_gcc
def test_one_that_decodes_wrongly(tmp_path):
    sources, library = copied(tmp_path, *WRONG)
    with pytest.raises(
        UnusableLibrary, match="gives other pixels than simplejpeg on this machine; build it again"
    ):
        load(library, sources)


def test_one_that_is_not_a_library(tmp_path):
    (tmp_path / "library.so").write_bytes(b"\x7fELF" + bytes(60))
    with pytest.raises(
        UnusableLibrary, match=r"library.so cannot be loaded \(.*\); build it again"
    ):
        load(tmp_path / "library.so")


@needs_gcc
def test_a_misfit_next_to_the_package_is_not_used(tmp_path):
    """A whole process with the library of another version in the place of ours."""
    package = shutil.copytree(
        PACKAGE, tmp_path / "vit", ignore=shutil.ignore_patterns("_native*", "__pycache__")
    )
    command = [
        sys.executable,
        "-c",
        "from vit.data.decode import native; print(native.AVAILABLE, native.UNAVAILABLE_REASON)",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "VIT_NATIVE"} | {
        "PYTHONPATH": str(tmp_path)
    }
    for said in ("was not built", "is of another version"):
        if said != "was not built":
            shutil.move(
                small(tmp_path, "int vit_decode_window(void) { return 0; }"),
                package / f"_native{EXTENSION_SUFFIXES[0]}",
            )
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith("False ")
        assert said in done.stdout
        assert done.stdout.endswith("pip install -e .\n")


def test_turned_off_by_the_environment(monkeypatch):
    monkeypatch.setenv("VIT_NATIVE", "0")
    assert native._find() == (None, None)


def test_it_is_built_as_it_is_loaded():
    """setup.py stamps the library with the very hash that is compared here."""
    if native.LIBRARY is None:
        pytest.skip(f"no library: {native.UNAVAILABLE_REASON or 'VIT_NATIVE=0'}")
    assert native.LIBRARY.vit_native_sources().decode() == stamp_of(SOURCES)
