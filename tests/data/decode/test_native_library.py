"""Test that a C library that does not match the Python code is not loaded, and that the error
message contains a remedy."""

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
"""A change of a constant in the C sources that makes red slightly stronger."""
OTHER = (
    r"library.so was built for another version of this package; build it again: pip install -e \."
)


def built(folder: Path, *sources: Path, stamp: str = "") -> Path:
    library = folder / "library.so"
    options = ["-O1", "-shared", "-fPIC", f'-DVIT_NATIVE_SOURCES="{stamp}"']
    subprocess.run(["gcc", *options, *map(str, sources), "-o", str(library)], check=True)
    return library


def small(folder: Path, functions: str) -> Path:
    (folder / "small.c").write_text(functions)
    return built(folder, folder / "small.c")


def copied(folder: Path, *change: str) -> tuple[Path, Path]:
    """Copy the C sources, edit pixels.h, and build the library. Return the folder and the
    library."""
    sources = shutil.copytree(SOURCES, folder / "sources")
    pixels = (sources / "pixels.h").read_text()
    assert not change or pixels.count(change[0]) == 1
    (sources / "pixels.h").write_text(pixels.replace(*change) if change else pixels)
    return sources, built(folder, *sources.glob("*.c"), stamp=stamp_of(sources))


def abi(number: int) -> str:
    return f"int vit_native_abi(void) {{ return {number}; }}\n"


@needs_gcc
def test_a_library_of_another_version_is_refused(tmp_path):
    with pytest.raises(UnusableLibrary, match=OTHER):
        load(small(tmp_path, "int vit_decode_window(void) { return 0; }"))
    (tmp_path / "next").mkdir()
    functions = abi(ABI + 1) + "const char *vit_native_sources(void) { return 0; }"
    with pytest.raises(UnusableLibrary, match=OTHER):
        load(small(tmp_path / "next", functions))


@needs_gcc
def test_a_library_built_from_other_sources_is_refused(tmp_path):
    """After `git pull` without a reinstall, the library no longer matches the sources. Wheels
    contain no sources, so the check is skipped for them."""
    sources, library = copied(tmp_path)
    load(library, sources)
    (sources / "window.c").open("a").write("\n")
    with pytest.raises(
        UnusableLibrary,
        match=r"was not built from the current sources in .*sources; build it again",
    ):
        load(library, sources)
    load(library, tmp_path / "none")


@needs_gcc
def test_a_library_that_decodes_wrongly_is_refused(tmp_path):
    sources, library = copied(tmp_path, *WRONG)
    with pytest.raises(
        UnusableLibrary,
        match="and simplejpeg decode to different pixels on this machine; build it again",
    ):
        load(library, sources)


@needs_gcc
def test_a_library_that_cannot_add_restart_markers_is_refused(tmp_path):
    functions = """
const char *vit_native_sources(void) { return ""; }
int vit_decode_window(void) { return 0; }
int vit_jpeg_transcode(void) { return 1; }
"""
    library = small(tmp_path, abi(ABI) + functions)
    with pytest.raises(UnusableLibrary, match="and simplejpeg decode to different pixels"):
        load(library, tmp_path / "none")


def test_a_file_that_is_not_a_library_is_refused(tmp_path):
    (tmp_path / "library.so").write_bytes(b"\x7fELF" + bytes(60))
    with pytest.raises(
        UnusableLibrary, match=r"library.so cannot be loaded \(.*\); build it again"
    ):
        load(tmp_path / "library.so")


@needs_gcc
def test_a_process_does_not_use_a_mismatched_library_in_the_package(tmp_path):
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
    for reason in ("was not built;", "was built for another version"):
        if reason != "was not built;":
            shutil.move(
                small(tmp_path, "int vit_decode_window(void) { return 0; }"),
                package / f"_native{EXTENSION_SUFFIXES[0]}",
            )
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith("False ")
        assert reason in done.stdout
        assert done.stdout.endswith("pip install -e .\n")
    shutil.rmtree(package / "data" / "decode" / "c")  # an installed package has no sources
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "--no-cache-dir VITLINE.tar.gz" in done.stdout


def test_the_environment_can_turn_the_library_off(monkeypatch):
    monkeypatch.setenv("VIT_NATIVE", "0")
    assert native._find() == (None, None)


def test_setup_and_loader_use_the_same_stamp():
    """setup.py stores a hash of the sources in the library, and the loader compares this hash with
    the current sources."""
    if native.LIBRARY is None:
        pytest.skip(f"no library: {native.UNAVAILABLE_REASON or 'VIT_NATIVE=0'}")
    assert native.LIBRARY.vit_native_sources().decode() == stamp_of(SOURCES)
