"""List the data preparation commands: `python -m data_prep`."""

import ast
from pathlib import Path

from data_prep import COMMANDS

for name in COMMANDS:
    source = Path(__file__).with_name(f"{name}.py").read_bytes()
    docstring = ast.get_docstring(ast.parse(source)) or ""
    print(f"python -m data_prep.{name:<12} {docstring.splitlines()[0]}")
print("Every command has --help. The guide is docs/data.md.")
