"""A data set's card: what is in it, in numbers, text and pictures.

    python -m data_prep.card ROOT

`_info.json` and the index of a finished data set give counts, sizes and what the
writer did; of the training split up to 1,000 images, spread over it by a hash, are decoded for the
mean and standard deviation of their colours, and one image for each of up to 60 classes is drawn.
Every source's command ends with it; this one makes it again.

    <root>/
      dataset.md            splits, image sizes, colours, what was converted or left out, source and options, all classes
      contact_sheet.png     1,400 pixels wide at most
      README.md             if there is none yet: which shards are which split, in the form that Hugging Face's `load_dataset` reads

Equal data sets give equal bytes, with equal versions of Pillow.
"""

from __future__ import annotations

import argparse
import sys

from data_prep.command import Parser, run
from data_prep.write.card_page import write_card


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser("python -m data_prep.card", __doc__)
    parser.add_argument("root", metavar="ROOT", help="finished data set, a folder or a URL")

    def command(args: argparse.Namespace) -> None:
        write_card(args.root)
        print(f"look at {args.root}/contact_sheet.png and dataset.md")

    return run(command, parser.parse_args(argv), "start it again")


if __name__ == "__main__":
    sys.exit(main())
