"""Run a command of the installed package: `vitline COMMAND ...`.

    vitline train --config vit_b16 data.root=/data/imagenet
    torchrun --nproc_per_node=8 -m vit train --config vit_b16 data.root=/data/imagenet
    vitline prep imagefolder PHOTOS --out /data/photos

`vitline NAME` runs launch/NAME.py, and `vitline prep NAME` runs the module data_prep.NAME. An
installed package contains a copy of launch/ inside `vit`. `--config` accepts the name of a recipe:
`--config vit_b16` reads configs/vit_b16.yaml unless a file named `vit_b16` exists.
"""

import ast
import runpy
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from vit.system.spelling import did_you_mean

LAUNCH = next(
    folder
    for folder in (Path(__file__).with_name("launch"), Path(__file__).parents[1] / "launch")
    if folder.is_dir()
)
COMMANDS = sorted(path.stem for path in LAUNCH.glob("*.py") if path.stem != "check_versions")


def main() -> None:
    """Run the command given in `sys.argv`, or exit with status 2 if the command is unknown."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in COMMANDS:
        script = LAUNCH / f"{name}.py"
        sys.argv = [str(script), *sys.argv[2:]]
        # The scripts import check_versions from their own folder, which `python launch/NAME.py`
        # would add to sys.path.
        sys.path.insert(0, str(LAUNCH))
        runpy.run_path(str(script), run_name="__main__")
    elif name == "prep":
        _prepare()
    elif name == "--version":
        print(f"vitline {version('vitline')}")
    elif name in ("", "-h", "--help"):
        print(usage())
        raise SystemExit(0 if name else 2)
    else:
        refuse(name, did_you_mean(name, [*COMMANDS, "prep"]), "vitline --help")


def _prepare() -> None:
    """Run `vitline prep SOURCE`, or list all sources if no source is given."""
    from data_prep import COMMANDS as PREP_COMMANDS

    source = sys.argv[2] if len(sys.argv) > 2 else "--help"
    if source in ("-h", "--help"):
        module = "data_prep"
    elif source in PREP_COMMANDS:
        module = f"data_prep.{source}"
    else:
        refuse(f"prep {source}", did_you_mean(source, PREP_COMMANDS), "vitline prep")

    sys.argv = sys.argv[2:] or sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def refuse(command: str, hint: str, listing: str) -> NoReturn:
    """Report that `command` is unknown, suggest a command that lists all commands, and exit with
    status 2."""
    print(
        f"error: unknown command {command!r}{hint}: run {listing} to list the commands",
        file=sys.stderr,
    )
    raise SystemExit(2)


def usage() -> str:
    """Return a list of all commands with the first line of each command's docstring."""
    lines = [f"  {name:10} {_first_line(LAUNCH / f'{name}.py')}" for name in COMMANDS]
    lines.append(f"  {'prep':10} Write, index, verify and describe shards: see `vitline prep`.")
    lines += ["", "Every command has --help. `vitline --version` prints the version."]
    return "\n".join(["usage: vitline COMMAND ...", "", *lines])


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_bytes())) or "").splitlines()[0]


if __name__ == "__main__":
    main()
