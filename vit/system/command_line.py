"""The argument parser of all commands: mistakes as one line, with the option that was meant."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

from vit.system.redact import shown
from vit.system.spelling import did_you_mean

Hint = Callable[[str, str], str]
"""From an unknown option and its value ("" for none) to a hint at what is meant, or ""."""


INSTALLED_LAUNCH = Path(__file__).parents[1] / "launch"
"""Where setup.py puts the commands of a wheel; a checkout has them at its top."""


def as_typed(text: str) -> str:
    """`text` with our commands as people type them; of an installed package: vit/__main__.py."""
    if not INSTALLED_LAUNCH.is_dir():
        return text
    text = re.sub(r"(torchrun .*?)launch/(\w+)\.py", r"\1-m vit \2", text)
    text = re.sub(r"python launch/(\w+)\.py", r"vitline \1", text)
    return re.sub(r"python -m data_prep\.(\w+)", r"vitline prep \1", text)


class Parser(argparse.ArgumentParser):
    """argparse's, but a mistake is a ValueError of one line, and options cannot be abbreviated.

    `hint` is called for unknown options that resemble none of the known ones.
    """

    def __init__(self, prog: str, description: str | None = None, hint: Hint | None = None):
        super().__init__(
            prog=as_typed(prog),
            description=as_typed(description or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._hint = hint
        self._typed: list[str] = []

    def parse_known_args(  # type: ignore[override]  # argparse has one for each kind of namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """As argparse's; keeps the arguments for `error`."""
        self._typed = self._typed or list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def parse_known_intermixed_args(  # type: ignore[override]  # argparse has one for each kind of namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """As argparse's; keeps the arguments for `error`."""
        self._typed = self._typed or list(sys.argv[1:] if args is None else args)
        return super().parse_known_intermixed_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's; also suggests the choice that was meant."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            choices = map(str, action.choices or ())
            message = f"{error.message}{did_you_mean(str(value), choices)}"
            raise argparse.ArgumentError(action, message) from None

    def error(self, message: str) -> NoReturn:
        """Raise a ValueError that names unknown options.

        argparse reports the missing option first, which often is the misspelt one.
        """
        is_unknown = message.startswith("unrecognized arguments: ")
        if options := self._unknown_options() if is_unknown or "are required: " in message else {}:
            hints = dict.fromkeys(hint for hint in options.values() if hint)
            message = "; ".join([f"unknown: {' '.join(options)}", *hints])
        elif is_unknown:
            message = f"unknown: {message.partition(': ')[2]}"
        raise ValueError(f"{shown(message)} ({self.prog} --help lists the options)")

    def _unknown_options(self) -> dict[str, str]:
        """Options that there are not, as typed and with the value for `hint`: what was meant."""
        known = list(self._option_string_actions)
        words = self._typed[: self._typed.index("--")] if "--" in self._typed else self._typed
        found = {}
        for word, following in zip_longest(words, words[1:], fillvalue=""):
            option, equals, value = word.partition("=")
            if option in known or not re.match(r"--?[A-Za-z]", option):
                continue
            if self._hint and not equals and re.match(r"[^-=][^=]*$", following):
                value = following
                word = f"{word} {value}"
            close = difflib.get_close_matches(option, known, n=1, cutoff=0.8)
            hint = self._hint(option, value) if self._hint and not close else ""
            if not hint and (close := difflib.get_close_matches(option, known, n=1)):
                hint = f"did you mean {close[0]}?"
            found[word] = hint
        return found


def add_model_flags(
    parser: argparse.ArgumentParser, batch_size: str, num_workers: str, device: str
) -> None:
    """Add how a trained model is used: size, batches, workers, format and device.

    The three texts are what help says of a flag. What is not given is None.
    """
    parser.add_argument(
        "--image-size",
        type=int,
        nargs="+",
        metavar="PIXELS",
        help="side, or height and width (default: as trained)",
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help=batch_size)
    parser.add_argument("--num-workers", type=int, metavar="N", help=num_workers)
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16", "fp16"],
        help="format of matrix products (default: the run's train.precision)",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], help=device)


def model_flag_problems(args: argparse.Namespace) -> list[str]:
    """Return what is wrong with the numbers of `add_model_flags`, a sentence each."""
    problems = [
        f"--{name.replace('_', '-')} {value}: give a number from {least} on"
        for name, least in (("batch_size", 1), ("num_workers", 0))
        if (value := getattr(args, name)) is not None and value < least
    ]
    if args.image_size and (len(args.image_size) > 2 or min(args.image_size) < 1):
        problems.append("--image-size takes a side, or height and width, in pixels")
    return problems


def model_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return those flags of `add_model_flags` that change a model: dotted key -> value or None."""
    size = args.image_size
    if size and len(size) == 1:
        size = size[0]
    return {"model.image_size": size, "train.precision": args.precision}


def add_run_words(parser: argparse.ArgumentParser) -> None:
    """Add a run folder and settings that differ from the run's, for `run_and_settings`."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN",
        help="run folder (default: the newest run under runs/), and settings that differ from the"
        " run's, such as data.root=ELSEWHERE",
    )


def run_and_settings(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Divide `words` into a run folder or its URL, None if there is none, and settings
    (section.key=value).

    Raises ValueError for two folders.
    """
    settings = [word for word in words if re.match(r"[a-z]+\.\w+=", word)]
    folders = [word for word in words if word not in settings]
    if len(folders) > 1:
        raise ValueError(f"{' '.join(folders)}: give one run folder")
    return (folders[0] if folders else None), settings
