"""A command line as people paste it: launcher, script and arguments.

Lines are joined as a shell joins them, comments are dropped, integer arithmetic `$((...))` is
computed, other substitutions stay as they are written. What starts a command on several GPUs states
how many: torchrun, srun, mpirun, deepspeed, accelerate, timm's and OpenMMLab's shell scripts.
Nothing is run.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
import re
import shlex
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # a shell's / of integers
    ast.Mod: operator.mod,
}
_BEHIND_COMMAND = re.compile(r"\|(?!\|)|&$|\d*>|&>|<")
_TYPESET = re.compile(
    "^[\u2010-\u2015\u2212]"  # dashes for -- and -
    "|(?<=[0-9][eE])[\u2010-\u2015\u2212](?=[0-9])"  # of a number: 1e-3
    "|[\u2018-\u201f]"  # quotes
)
"""What word processors and PDFs make of hyphens and quotes."""
_TORCHRUN = (
    *("--nproc_per_node --nnodes", "--nproc --nnodes"),
    *("--nproc_per_node", "--nproc", "--nnodes", ""),
)
_LAUNCHERS = {
    "torchrun": _TORCHRUN,
    "torch.distributed": _TORCHRUN,
    "srun": ("--ntasks", "-n", "--ntasks-per-node --nodes", "--ntasks-per-node -N"),
    "mpirun": ("-np", "-n"),
    "mpiexec": ("-np", "-n"),
    "deepspeed": ("--num_gpus --num_nodes", "--num_gpus"),
    "accelerate": ("--num_processes",),
}
"""What starts processes -> the options that state how many: the first combination that is given,
multiplied. srun and accelerate may take their numbers from elsewhere, so they have no default."""
_LAUNCHER = re.compile(rf"(?:.*/)?({'|'.join(map(re.escape, _LAUNCHERS))})\b")
_BY_ITSELF = re.compile(
    r"(.*(&&|;) ?)?(\w+=\S* ?)*"  # other commands and variables
    r"($|(\S*/)?(python[\d.]*|nohup|time|env|nice|sudo|exec|uv|conda)( |$))"
)
"""What may stand before a script that starts as one process."""
_COMMANDS = ("big_vision.train", "lightly-train")
"""What is run without .py or -m."""
_HASH = "\ue000"
"""Stands for a # within a word while comments are dropped: shlex would drop such a word, too."""


class Command(NamedTuple):
    """What is run, with what, and what starts it."""

    script: str
    """`main.py`, or a module as `big_vision.train`."""
    words: list[str]
    """Its arguments."""
    launcher: list[str]
    """The words from the launcher on to the script; none if the script starts by itself."""

    def num_gpus(self) -> int | None:
        """Return how many processes the launcher starts, one for each GPU; None without one.

        Raises ValueError if the launcher does not state it in numbers.
        """
        if not self.launcher:
            return None
        match = _LAUNCHER.match(self.launcher[0])
        given = _given(self.launcher, _LAUNCHERS[match[1]] if match else ())
        wrong = [f"{k} {v}" for k, v in given.items() if not re.fullmatch(r"[1-9]\d*", v)]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: expected a number: pass --gpus N, of all GPUs")
        return math.prod(map(int, given.values()))


def split_command(text: str) -> Command:
    """Divide `text`, one command.

    Raises ValueError if it names no script, more than one command, or cannot be split.
    """
    joined = re.sub(r"\\[ \t]*\r?\n", " ", text)
    lines = [line.strip() for line in joined.splitlines()]
    lines = [line.removeprefix("$ ") for line in lines if line and not line.startswith("#")]
    if len(lines) != 1:
        raise ValueError(
            f"{len(lines)} commands are given, one is expected: lines of one command end with \\"
        )
    line = lines[0].replace("\N{NO-BREAK SPACE}", " ")
    line = re.sub(r"\$\(\((.*?)\)\)", lambda found: str(_compute(found[1])), line)
    line = re.sub(r"\$\(([^()]*)\)|`([^`]*)`", "SUBSTITUTED", line)
    try:
        words = shlex.split(re.sub(r"(?<=\S)#", _HASH, line), comments=True)
    except ValueError as error:
        raise ValueError(f"the command cannot be divided into words ({error}): {line}") from None
    words = [word.replace(_HASH, "#") for word in words]
    _check_signs(words)
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        del words[0]
    # Where its output goes is not the recipe's: > log.txt 2>&1, | tee log.txt, &
    ends = (place for place, word in enumerate(words) if _BEHIND_COMMAND.match(word))
    words = words[: next(ends, len(words))]
    return _find_script(words, line)


def _check_signs(words: list[str]) -> None:
    """Raise ValueError if `words` have dashes or quotes that no program reads as such."""
    found = {word: of_word for word in words if (of_word := _TYPESET.findall(word))}
    if not found:
        return
    signs = dict.fromkeys(sign for of_word in found.values() for sign in of_word)
    named = ", ".join(f"{sign} ({unicodedata.name(sign).lower()})" for sign in signs)
    raise ValueError(
        f"{' '.join(found)}: {named} is what a page makes of hyphens and quotes, which no program"
        " reads as such: write --, - and straight quotes"
    )


def _compute(text: str) -> int:
    """The value of an arithmetic substitution of integers."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        raise ValueError

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        raise ValueError(f"$(({text})): expected integers with + - * / %") from None


def _find_script(words: list[str], line: str) -> Command:
    """The script, and what stands before it."""
    for at, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name.endswith("_train.sh"):
            return _shell_script(name, words[at + 1 :])
        is_module = at > 0 and words[at - 1] in ("-m", "--module")
        if is_module and _LAUNCHER.match(word):
            continue
        if name.endswith(".py") or word in _COMMANDS or is_module:
            return Command(word, words[at + 1 :], _launcher(words[:at]))
    raise ValueError(f"no script is named (main.py, train.py, ...) in: {line}")


def _shell_script(name: str, words: list[str]) -> Command:
    """timm's `distributed_train.sh GPUS ...` or OpenMMLab's `dist_train.sh CONFIG GPUS ...`."""
    at = 0 if name.startswith("distributed") else 1
    if len(words) <= at or words[at].startswith("-"):
        raise ValueError(f"{name} is given no number of GPUs")
    # It hands the number to torchrun.
    launcher = ["torchrun", f"--nproc_per_node={words[at]}"]
    return Command(name, words[:at] + words[at + 1 :], launcher)


def _launcher(before: list[str]) -> list[str]:
    """The words `before` a script from its launcher on, the last if one starts another."""
    starts = [at for at, word in enumerate(before) if _LAUNCHER.match(word)]
    if starts:
        return before[starts[-1] :]
    return [] if _BY_ITSELF.match(" ".join(before)) else before


def _given(launcher: list[str], ways: tuple[str, ...]) -> dict[str, str]:
    """The options of `launcher` that state its processes. ways: as in `_LAUNCHERS`."""
    words = [part for word in launcher for part in re.split(r"(?<=^-[nN])(?=\d)", word)]
    options: dict[str, str] = {}
    for word, following in itertools.pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if word.startswith("-"):  # those of a program between launcher and script come later
            options.setdefault(_plain(name), value if equals else following)
    if options.keys() & {"hostfile", "H"}:  # how many hosts deepspeed takes is in that file
        ways = tuple(way for way in ways if way != "--num_gpus")
    for way in ways:
        if all(_plain(name) in options for name in way.split()):
            return {name: options[_plain(name)] for name in way.split()}
    without = f" without {' or '.join(ways)}" if ways else ""
    raise ValueError(
        f"{launcher[0]}: how many processes it starts is not known{without}: pass --gpus N"
    )


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
