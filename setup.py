"""The part in C, a plain shared library for vit/data/decode/native.py: optional, all works without
it. The rest is in pyproject.toml."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

FILES = sorted(Path("vit/data/decode/c").glob("*.[ch]"))
# vit/data/decode/native.py: stamp_of
STAMP = hashlib.sha256(b"".join(path.read_bytes() for path in FILES)).hexdigest()[:16]
NATIVE = Extension(
    "vit._native",
    sources=[str(path) for path in FILES if path.suffix == ".c"],
    depends=[str(path) for path in FILES],
    define_macros=[("VIT_NATIVE_SOURCES", f'"{STAMP}"')],
    extra_compile_args=["-O3", "-g0"],
    optional=True,
)

# by dates alone a checkout of older files would build nothing
setup(ext_modules=[NATIVE], options={"build_ext": {"force": True}})
