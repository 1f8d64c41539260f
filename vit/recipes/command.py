"""A command line as people paste it: launcher, script and arguments.

Lines are joined as a shell joins them, integer arithmetic `$((...))` is computed, other
substitutions stay as they are written. What starts a command on several GPUs says how many there
are: torchrun, torch.distributed.launch, timm's and OpenMMLab's shell scripts. Nothing is run.
"""

from __future__ import annotations

import ast
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
_GPUS_OF_A_NODE = ("nproc_per_node", "nproc")
_NODES = ("nnodes", "n_nodes")
_BEHIND_COMMAND = re.compile(r"\|(?!\|)|&$|\d*>|&>|<")
_TYPESET = re.compile(
    "^[\u2010-\u2015\u2212]"  # dashes for -- and -
    "|(?<=[0-9][eE])[\u2010-\u2015\u2212](?=[0-9])"  # of a number: 1e-3
    "|[\u2018-\u201f]"  # quotes
)
"""What word processors and PDFs make of hyphens and quotes."""
_WITHOUT_VALUE = {"standalone", "use_env", "no_python", "module"}
"""Options of torchrun that have no value."""


class Command(NamedTuple):
    """What is run, with what, on how many GPUs."""

    script: str
    """`main.py`, or a module as `big_vision.train`."""
    words: list[str]
    """Its arguments."""
    num_gpus: int
    """As the launcher says; 1 without one, as such a command means it."""
    is_distributed: bool
    """Whether a launcher starts it."""


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
    _check_signs(line)
    line = re.sub(r"\$\(\((.*?)\)\)", lambda found: str(_compute(found[1])), line)
    line = re.sub(r"\$\(([^()]*)\)|`([^`]*)`", "SUBSTITUTED", line)
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"the command cannot be divided into words ({error}): {line}") from None
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        del words[0]
    # Where its output goes is not the recipe's: > log.txt 2>&1, | tee log.txt, &
    ends = (place for place, word in enumerate(words) if _BEHIND_COMMAND.match(word))
    words = words[: next(ends, len(words))]
    return _find_script(words, line)


def _check_signs(line: str) -> None:
    """Raise ValueError if words of `line` have dashes or quotes that no program reads as such."""
    found = {word: of_word for word in line.split() if (of_word := _TYPESET.findall(word))}
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
        if is_module and word.startswith("torch.distributed."):
            continue
        if name.endswith(".py") or word == "big_vision.train" or is_module:
            launcher = words[:at]
            starts_ranks = any("torchrun" in w or "torch.distributed." in w for w in launcher)
            gpus, nodes = _counts(launcher) if starts_ranks else (1, 1)
            return Command(word, words[at + 1 :], gpus * nodes, starts_ranks)
    raise ValueError(f"no script is named (main.py, train.py, ...) in: {line}")


def _shell_script(name: str, words: list[str]) -> Command:
    """timm's `distributed_train.sh GPUS ...` or OpenMMLab's `dist_train.sh CONFIG GPUS ...`."""
    at = 0 if name.startswith("distributed") else 1
    if len(words) <= at or not words[at].isdigit():
        raise ValueError(f"{name} is given no number of GPUs")
    return Command(name, words[:at] + words[at + 1 :], int(words[at]), True)


def _counts(launcher: list[str]) -> tuple[int, int]:
    """GPUs of a node and nodes, from the options of torchrun."""
    options = {}
    for at, word in enumerate(launcher):
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if word.startswith("-") and name not in _WITHOUT_VALUE:
            following = launcher[at + 1] if at + 1 < len(launcher) else ""
            options[name] = value if equals else following

    def number(names: tuple[str, ...]) -> int:
        given = next((options[name] for name in names if name in options), "1")
        if not given.isdigit():
            raise ValueError(f"--{names[0]} {given}: give the number of GPUs with --gpus")
        return int(given)

    return number(_GPUS_OF_A_NODE), number(_NODES)
