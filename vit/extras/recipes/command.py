"""Split a command line into launcher, script and arguments, without running the command.

Lines that end with a backslash are joined, comments are removed, and integer arithmetic `$((...))`
is evaluated. Other substitutions are replaced by SUBSTITUTED. The number of GPUs is read from the
launcher: torchrun, srun, mpirun, deepspeed, accelerate, or timm's shell script.
"""

import itertools
import math
import re
import shlex
import unicodedata
from typing import NamedTuple

from vit.extras.recipes.python_config import PythonConfig

_BEHIND_COMMAND = re.compile(r"\|(?!\|)|&$|\d*>|&>|<")
"""Matches a pipe, a redirection, or & at the end of a command, which are no arguments."""
_TYPESET = re.compile(
    "^[\u2010-\u2015\u2212]"  # dashes for -- and -
    "|(?<=[0-9][eE])[\u2010-\u2015\u2212](?=[0-9])"  # in numbers such as 1e-3
    "|[\u2018-\u201f]"  # quotes
)
"""Matches the typographic dashes and quotes that word processors and PDFs insert in place of plain
characters."""

_TORCHRUN = (
    "--nproc_per_node --nnodes",
    "--nproc --nnodes",
    "--nproc_per_node",
    "--nproc",
    "--nnodes",
    "",
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
"""Maps each launcher to the options that set its number of processes. The values of the first
combination found in the command are multiplied. srun and accelerate have no default, because they
can read the number from the environment or a file."""
_LAUNCHER = re.compile(rf"(.*/)?(?P<name>{'|'.join(map(re.escape, _LAUNCHERS))})\b")
"""Matches a launcher, with or without its folder."""
_SINGLE_PROCESS = re.compile(
    r"(.*(&&|;) ?)?(\w+=\S* ?)*"  # preceding commands and variables
    r"($|(\S*/)?(python[\d.]*|nohup|time|env|nice|sudo|exec|uv|conda)( |$))"
)
"""The words that may come before a script that runs as one process."""

_COMMANDS = ("big_vision.train", "lightly-train")
"""The programs that are called by name, without .py or -m."""
_HASH = "\ue000"
"""A placeholder for # inside a word, because shlex would start a comment at the #."""


class Command(NamedTuple):
    """A command, split into script, arguments and launcher."""

    script: str
    """A file such as `main.py`, or a module such as `big_vision.train`."""
    words: list[str]
    """The arguments of the script."""
    launcher: list[str]
    """The words from the launcher up to the script, or [] without a launcher."""

    def num_gpus(self) -> int | None:
        """Return the number of processes (one per GPU), or None without a launcher.

        Raises ValueError if the launcher's options do not set the number.
        """
        if not self.launcher:
            return None

        match = _LAUNCHER.match(self.launcher[0])
        counts = _process_counts(self.launcher, _LAUNCHERS[match["name"]] if match else ())
        wrong = [f"{k} {v}" for k, v in counts.items() if not re.fullmatch(r"[1-9]\d*", v)]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)}: expected a number: pass --gpus N, the total number of GPUs"
            )
        return math.prod(map(int, counts.values()))


def split_command(text: str) -> Command:
    """Split the command `text`.

    Raises ValueError if `text` has unbalanced quotes, contains more than one command, or does not
    name a script.
    """
    lines = [line.strip() for line in re.sub(r"\\[ \t]*\r?\n", " ", text).splitlines()]
    lines = [line.removeprefix("$ ") for line in lines if line and not line.startswith("#")]
    if len(lines) != 1:
        raise ValueError(
            f"{len(lines)} commands were given: pass one, and end each of its lines with \\"
        )

    # Compute $((...)), and replace what only the shell knows: $(...) and `...`.
    line = lines[0].replace("\N{NO-BREAK SPACE}", " ")
    line = re.sub(r"\$\(\((?P<sum>.*?)\)\)", lambda match: str(_compute(match["sum"])), line)
    line = re.sub(r"\$\([^()]*\)|`[^`]*`", "SUBSTITUTED", line)
    try:
        tokens = shlex.split(re.sub(r"(?<=\S)#", _HASH, line), comments=True)
    except ValueError as error:
        raise ValueError(f"the command cannot be split into words ({error}): {line}") from None
    tokens = [word.replace(_HASH, "#") for word in tokens]
    _check_signs(tokens)

    while tokens and re.match(r"[A-Za-z_]\w*=", tokens[0]):
        del tokens[0]  # a variable that is set for the command
    ends = (at for at, word in enumerate(tokens) if _BEHIND_COMMAND.match(word))
    return _find_script(tokens[: next(ends, len(tokens))], line)


def _check_signs(tokens: list[str]) -> None:
    """Raise ValueError if `tokens` contain typographic dashes or quotes."""
    typeset = dict.fromkeys(word for word in tokens if _TYPESET.search(word))
    signs = dict.fromkeys(itertools.chain(*map(_TYPESET.findall, typeset)))
    named = ", ".join(f"{sign} ({unicodedata.name(sign).lower()})" for sign in signs)
    if typeset:
        raise ValueError(
            f"{' '.join(typeset)}: {named} is a typographic character that programs do not"
            " accept: use --, - and straight quotes"
        )


def _compute(text: str) -> int:
    """Evaluate the text inside `$((...))`. The shell uses integer division."""
    try:
        value = PythonConfig(f"value = ({text.replace('/', '//')})", "").names["value"]
    except ValueError:
        value = None
    if type(value) is not int:
        raise ValueError(f"$(({text})): expected integers with + - * / %")
    return value


def _find_script(tokens: list[str], line: str) -> Command:
    """Split `tokens` at the script: a .py file, a module behind -m, or a program by name.

    A launcher can be a module too, and is not the script. line: the command, for the error.
    """
    for at, word in enumerate(tokens):
        name = word.rpartition("/")[2]
        if name.endswith("_train.sh"):
            return _shell_script(name, tokens[at + 1 :])

        is_module = at > 0 and tokens[at - 1] in ("-m", "--module")
        if is_module and _LAUNCHER.match(word):
            continue
        is_script = is_module or name.endswith(".py") or word in _COMMANDS
        if is_script:
            return Command(word, tokens[at + 1 :], _launcher(tokens[:at]))

    raise ValueError(f"the command has no script (main.py, train.py, ...): {line}")


def _shell_script(name: str, tokens: list[str]) -> Command:
    """Parse timm's `distributed_train.sh GPUS ...`."""
    if not tokens or tokens[0].startswith("-"):
        raise ValueError(f"{name} was given no number of GPUs: pass it as an argument")
    # The shell script passes the number of GPUs to torchrun.
    return Command(name, tokens[1:], ["torchrun", f"--nproc_per_node={tokens[0]}"])


def _launcher(before: list[str]) -> list[str]:
    """Return the words from the last launcher to the end."""
    starts = [at for at, word in enumerate(before) if _LAUNCHER.match(word)]
    if starts:
        return before[starts[-1] :]
    return [] if _SINGLE_PROCESS.match(" ".join(before)) else before


def _process_counts(launcher: list[str], combinations: tuple[str, ...]) -> dict[str, str]:
    """Return the options of `launcher` that state its number of processes, with their values.

    combinations: a value of `_LAUNCHERS`.
    """
    parts = [re.split(r"(?<=^-[nN])(?=\d)", word) for word in launcher]  # -n8 is -n 8
    options: dict[str, str] = {}
    for token, next_token in itertools.pairwise(itertools.chain(*parts, [""])):
        name, equals, value = token.partition("=")
        if token.startswith("-"):  # A repeated option can be an argument of a later program.
            options.setdefault(_plain(name), value if equals else next_token)

    if options.keys() & {"hostfile", "H"}:  # deepspeed reads the number of hosts from the hostfile.
        combinations = tuple(names for names in combinations if names != "--num_gpus")
    for names in combinations:
        if all(_plain(name) in options for name in names.split()):
            return {name: options[_plain(name)] for name in names.split()}

    without = f" without {' or '.join(combinations)}" if combinations else ""
    raise ValueError(f"{launcher[0]}: the number of processes is unknown{without}: pass --gpus N")


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
