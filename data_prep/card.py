"""A data set's card: what is in it, in numbers, text and pictures.

    python -m data_prep.card ROOT

Every source's command ends with it; this one draws it again for a finished or indexed data set.

    <root>/
      dataset.md            splits, image sizes, colours, conversions, source, options, all classes
      contact_sheet.png     1,400 pixels wide at most
      README.md             if there is none yet: the shards of each split, for Hugging Face
"""

from __future__ import annotations

import argparse

from data_prep.command import command_line
from data_prep.write.card_page import write_card


def _run(args: argparse.Namespace) -> None:
    write_card(args.root)
    print(f"look at {args.root}/contact_sheet.png and dataset.md")


main = command_line(
    "card",
    __doc__,
    {"": {"root": {"metavar": "ROOT", "help": "finished data set, a folder or a URL"}}},
    _run,
    "start it again",
)


if __name__ == "__main__":
    raise SystemExit(main())
