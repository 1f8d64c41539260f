"""What pyproject.toml cannot say: the optional part in C, and what else goes into a wheel."""

import hashlib
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

FILES = sorted(Path("vit/data/decode/c").glob("*.[ch]"))
STAMP = hashlib.sha256(b"".join(path.read_bytes() for path in FILES)).hexdigest()[:16]
NATIVE = Extension(
    "vit._native",
    sources=[str(path) for path in FILES if path.suffix == ".c"],
    depends=[str(path) for path in FILES],
    # vit/data/decode/native.py (stamp_of) compares it with the files that it finds
    define_macros=[("VIT_NATIVE_SOURCES", f'"{STAMP}"')],
    # Many builds of Python add -fwrapv to all extensions, with which decoding takes 4 % longer. The
    # code has no signed overflow: tests/native/fuzz.py would end at it.
    extra_compile_args=["-O3", "-g0", "-fno-wrapv"],
    optional=True,
)


ADDED = [
    path
    for folder, pattern in (("launch", "*.py"), ("configs", "*.yaml"), ("configs", "*.csv"))
    for path in sorted(Path(folder).rglob(pattern))
]


class BuildWithCommands(build_py):
    """Puts launch/ and configs/ into the installed `vit`; vit/__main__.py runs them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for path in ADDED:
                target = Path(self.build_lib, "vit", path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)

    def get_source_files(self) -> list[str]:
        """Return what an sdist contains."""
        return [*super().get_source_files(), *map(str, ADDED), *map(str, FILES)]


setup(
    ext_modules=[NATIVE],
    cmdclass={"build_py": BuildWithCommands},
    # By dates alone a checkout of older files would build nothing.
    options={"build_ext": {"force": True}},
)
