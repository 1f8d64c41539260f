"""Write a data set card, which describes a data set in numbers, text and pictures.

    python -m data_prep.card ROOT

Every source command writes the card last. This command rewrites the card of an existing data set.

    <root>/
      dataset.md            splits, image sizes, colors, conversions, source, options, all classes
      contact_sheet.png     sample images, at most 1,400 pixels wide
      README.md             the shards of each split for Hugging Face, if no README.md exists yet
"""

import argparse

from data_prep.command import command_line
from data_prep.write.card_page import write_card


def _run(args: argparse.Namespace) -> None:
    write_card(args.root)
    print(f"card written: see {args.root}/contact_sheet.png and dataset.md")


main = command_line(
    "card",
    __doc__,
    {"": {"root": {"metavar": "ROOT", "help": "folder or URL of a finished data set"}}},
    _run,
    "run the command again",
)


if __name__ == "__main__":
    raise SystemExit(main())
