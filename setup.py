"""Build steps that pyproject.toml cannot express: the optional C code and extra wheel files."""

import hashlib
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

FILES = sorted(Path("vit/data/decode/c").glob("*.[ch]"))
STAMP = hashlib.sha256(b"".join(path.read_bytes() for path in FILES)).hexdigest()[:16]
# The C code does not call Python, so one wheel per platform serves every Python from 3.11 on.
# Only Pythons without a GIL lack the stable ABI, and get a wheel of their own.
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")
NATIVE = Extension(
    "vit._native",
    sources=[str(path) for path in FILES if path.suffix == ".c"],
    depends=[str(path) for path in FILES],
    # stamp_of in vit/data/decode/native.py compares this hash with the source files that it finds
    define_macros=[("VIT_NATIVE_SOURCES", f'"{STAMP}"')],
    # Many Python builds add -fwrapv to all extensions, which makes decoding 4 % slower. The code
    # has no signed overflow: tests/native/fuzz.py would fail on one.
    extra_compile_args=["-O3", "-g0", "-fno-wrapv"],
    optional=True,
    py_limited_api=STABLE_ABI,
)


ADDED = [
    path
    for folder, pattern in (("launch", "*.py"), ("configs", "*.yaml"), ("configs", "*.csv"))
    for path in sorted(Path(folder).rglob(pattern))
]


class BuildWithCommands(build_py):
    """A build step that copies launch/ and configs/ into `vit`, where vit/__main__.py runs them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for path in ADDED:
                target = Path(self.build_lib, "vit", path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)

    def get_source_files(self) -> list[str]:
        """Return the files of an sdist."""
        return [*super().get_source_files(), *map(str, ADDED), *map(str, FILES)]


setup(
    ext_modules=[NATIVE],
    cmdclass={"build_py": BuildWithCommands},
    options={
        # Always build, because a checkout of older files has older modification dates.
        "build_ext": {"force": True},
        "bdist_wheel": {"py_limited_api": "cp311" if STABLE_ABI else False},
    },
)
