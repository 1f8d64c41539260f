"""Define the argument parser of all commands. It reports an error in one line, with a
suggestion."""

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
"""A function that returns a hint, or "", for an unknown option and its value ("" for none)."""


INSTALLED_LAUNCH = Path(__file__).parents[1] / "launch"
"""The folder of commands in an installed package. In a checkout, this folder is at the top
level."""


def as_typed(text: str) -> str:
    """Return `text` with its commands rewritten as users of an installed package type them."""
    if not INSTALLED_LAUNCH.is_dir():
        return text
    text = re.sub(r"(torchrun .*?)launch/(\w+)\.py", r"\1-m vit \2", text)
    text = re.sub(r"python launch/(\w+)\.py", r"vitline \1", text)
    return re.sub(r"python -m data_prep\.(\w+)", r"vitline prep \1", text)


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises one-line ValueErrors and allows no abbreviations.

    `hint` is called for unknown options that resemble no known option.
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
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, and store the arguments for `error`."""
        self._typed = self._typed or list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def parse_known_intermixed_args(  # type: ignore[override]  # argparse has one for each kind of namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, and store the arguments for `error`."""
        self._typed = self._typed or list(sys.argv[1:] if args is None else args)
        return super().parse_known_intermixed_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Check a value as argparse does, and suggest the nearest choices."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None

    def error(self, message: str) -> NoReturn:
        """Raise a ValueError that names unknown options.

        When an option is missing, argparse does not report unknown options, although the user has
        often just misspelled the missing option.
        """
        is_unknown = message.startswith("unrecognized arguments: ")
        options = self._unknown_options() if is_unknown or "are required: " in message else {}
        if options:
            hints = dict.fromkeys(hint for hint in options.values() if hint)
            message = "; ".join([f"unknown: {' '.join(options)}", *hints])
        elif is_unknown:
            message = f"unknown: {message.partition(': ')[2]}"

        raise ValueError(f"{shown(message)} ({self.prog} --help lists the options)")

    def _unknown_options(self) -> dict[str, str]:
        """Return a hint for each unknown option. The keys are the options as typed, with their
        values."""
        options = list(self._option_string_actions)
        arguments = self._typed[: self._typed.index("--")] if "--" in self._typed else self._typed
        hints = {}
        for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
            option, equals, value = argument.partition("=")
            if option in options or not re.match(r"--?[A-Za-z]", option):
                continue

            # An argument like "x=y" is a setting, not the value of the option before it.
            value_follows = not equals and re.match(r"[^-=][^=]*$", following)
            if self._hint and value_follows:
                value = following
                argument = f"{argument} {value}"

            # The result of `_hint` takes precedence over an option that is only somewhat similar.
            similar = difflib.get_close_matches(option, options, n=1)
            misspelled = difflib.get_close_matches(option, options, n=1, cutoff=0.8)
            hint = self._hint(option, value) if self._hint and not misspelled else ""
            if similar and not hint:
                hint = f"did you mean {similar[0]}?"
            hints[argument] = hint

        return hints


def add_model_flags(
    parser: argparse.ArgumentParser, batch_size: str, num_workers: str, device: str
) -> None:
    """Add flags for commands that use a trained model: sizes, workers, precision and device.

    batch_size, num_workers, device: help texts of these flags. All flags default to None.
    """
    parser.add_argument(
        "--image-size",
        type=int,
        nargs="+",
        metavar="PIXELS",
        help="side, or height and width (default: the size used in training)",
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
    """Return a message for each invalid number among the flags of `add_model_flags`."""
    numbers = {"--batch-size": (args.batch_size, 1), "--num-workers": (args.num_workers, 0)}
    problems = [
        f"{flag} {value}: expected at least {least}"
        for flag, (value, least) in numbers.items()
        if value is not None and value < least
    ]

    sides = args.image_size or [1]
    if len(sides) > 2 or min(sides) < 1:
        problems.append("--image-size: expected a side, or height and width, in pixels")
    return problems


def image_size(args: argparse.Namespace) -> int | list[int] | None:
    """Return the value of --image-size: one side length, or the height and the width."""
    size = args.image_size
    return size[0] if size and len(size) == 1 else size


def model_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings changed by the flags of `add_model_flags`: dotted key -> value."""
    settings = {"model.image_size": image_size(args), "train.precision": args.precision}
    if args.precision in ("fp32", "fp16"):
        settings["train.residual_dtype"] = "fp32"  # bf16 needs train.precision=bf16
    return settings


def parse_run_words(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse the flags, a run folder or URL (`run`, or None), and settings (`overrides`).

    Raises ValueError if more than one folder is given.
    """
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN",
        help="run folder (default: the newest run under runs/), and settings that differ from the"
        " run's, such as data.root=ELSEWHERE",
    )

    args = parser.parse_intermixed_args(arguments)
    args.overrides = [word for word in args.words if re.match(r"[a-z]+\.\w+=", word)]
    folders = [word for word in args.words if word not in args.overrides]
    if len(folders) > 1:
        raise ValueError(f"{' '.join(folders)}: give one run folder")
    args.run = folders[0] if folders else None
    return args
