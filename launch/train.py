"""Train a Vision Transformer, or resume a run that was stopped or killed.

    python launch/train.py --config configs/demo.yaml
    torchrun --nproc_per_node=8 launch/train.py --config configs/vit_b16.yaml \\
        data.root=/data/imagenet run.dir=runs/b16
    python launch/train.py --config configs/vit_b16.yaml --print-config
    torchrun --nproc_per_node=8 launch/train.py --config configs/vit_b16.yaml --check

Settings have the form `section.key=value` and override those in the config file. The files in
`vit/config/` list all settings. Run the same command again to resume at the exact step. After
SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, the run saves at the next step and stops. `--check` tests
everything that the run needs on these hosts without leaving files behind. Exit status: 0 finished,
stopped and saved, or a check without failures; 2 a user mistake, or a check with failures.
"""

from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta

import check_versions  # noqa: F401

from vit.compose import fit, join_for, reader_of
from vit.config.command_line import training_parser
from vit.config.hints import all_keys, nearest
from vit.config.io import load_with_origins
from vit.distributed.exit import run_command
from vit.distributed.outcome import tell_outcome
from vit.distributed.process_group import World, is_main_process, world_size
from vit.system.optional import needed_for

JOIN_TIMES = 3.0
"""The time for all ranks to join in --check, as a multiple of the limit of the check. It is longer
than the limit, because importing torch may be slow."""


def main() -> World | None:
    args = read_command_line()
    config, origins = load_with_origins(args.config, args.overrides)
    for key in set(args.allow_change) - set(all_keys()):
        raise ValueError(f"--allow-change {key}: no such setting{nearest(key, all_keys())}")

    if args.print_config:
        if config.eval.reference is not None:
            # Report an invalid reference name before the run starts.
            with needed_for("eval.reference"):
                from vit.extras.recipes.reference import read_reference
            read_reference(config.eval.reference)
        if is_main_process():
            # Only these two flags need these modules, which take a second to import.
            from vit.config.reference import settings
            from vit.start.print_config import describe

            named = settings().items() if args.verbose else ()
            sentences = {key: setting.sentence for key, setting in named}
            print(describe(config, origins, world_size(), sentences, reader_of(config)), end="")
        return None

    if args.check:
        with needed_for("--check"):
            from vit.extras.planner.check.all_checks import check
        world = join_for(config, timedelta(seconds=JOIN_TIMES * args.check_limit_s))
        check(config, world, args.allow_change, args.check_limit_s)
        return world

    world = join_for(config)
    tell_outcome(fit(config, allow_change=args.allow_change, world=world))
    return world


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the flags and the settings (`overrides`). Raises ValueError for invalid arguments."""
    parser = training_parser("python launch/train.py", __doc__)
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print every value, its origin and the derived numbers, and exit",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="with --print-config, print what each setting does",
    )

    parser.add_argument(
        "--check",
        action="store_true",
        help="test everything that the run needs on these hosts, print a table and exit (minutes)",
    )
    parser.add_argument(
        "--check-limit-s",
        type=float,
        default=60.0,
        metavar="S",
        help="time limit of each part of --check in seconds (default: 60)",
    )

    args = parser.parse_intermixed_args(arguments)
    if not args.check_limit_s > 0:
        parser.error(f"--check-limit-s {args.check_limit_s:g}: expected more than 0")
    if args.verbose and not args.print_config:
        parser.error("--verbose: use it together with --print-config")

    return args


if __name__ == "__main__":
    run_command(main)
