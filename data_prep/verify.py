"""Check a finished data set: re-read everything and report what is wrong.

    python -m data_prep.verify ROOT [--workers N] [--strict]
    python -m data_prep.verify ROOT --quick [--sample N]

ROOT is a folder or its URL (https://, s3://, gs://). `_info.json` says which shards there are; the
folder is compared with it (data_prep/check/set_checks.py); worker processes read every shard
completely (data_prep/check/shard_checks.py) and decode every image; what they saw is put together
to find labels without images, repeated keys and equal images;
class names, keys and labels are compared with the hash taken of them before anything was written.
Shards at a URL are fetched one at a time into the folder for temporary files. Nothing is written or
repaired.

A problem is what differs from what was recorded, or cannot be trained on: exit status 1. A note is
what may be so in the source, such as the same image under two labels or in both splits, or a file
that does no harm; it fails with --strict only. Exit status 2: the check could not run.

--quick reads no shard completely: sizes, index rows, and a sample of the images, some of every
shard (at a URL by ranges). At its end it lists what it left out.

Memory: some 30 bytes an image in the main process (40 MB for ImageNet-1k), and one shard's headers
in each worker.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from data_prep.check.data_set import DataSet, SplitFiles, opened_data_set
from data_prep.check.set_checks import (
    check_catalogue,
    check_folder,
    check_labels,
    check_quarantine,
    check_repeated,
    images_per_class,
)
from data_prep.check.shard_checks import (
    Checked,
    Found,
    Shard,
    check_shard,
    check_shard_quickly,
    counted,
)
from data_prep.command import WORKERS_FLAG, Flags, make_parser, positive, run
from data_prep.write.card_text import number_range
from data_prep.write.jobs import run_jobs
from vit.data.shards.members import printable, recorded_layout

SAMPLE = 500
"""Images that a quick check decodes, of all splits together."""
SUBJECTS = {
    "files": "Files",
    "tars": "Tars",
    "indexes": "Indexes",
    "images": "Images",
    "labels": "Labels",
    "duplicates": "Equal images",
    "quarantine": "Quarantine",
}


@dataclass
class Report:
    """The result of `verify`."""

    data: DataSet
    quick: bool
    found: list[Found]
    elapsed_s: float

    def count(self, fails: bool) -> int:
        """Problems, or notes."""
        return sum(found.fails == fails for found in self.found)


def verify(place: str, workers: int = 1, num_sampled: int | None = None) -> Report:
    """Check the data set at `place`. num_sampled: images of a quick check; None: check everything.

    Raises PrepError or ShardError where there is nothing that could be checked.
    """
    start_s = time.monotonic()
    with opened_data_set(place) as data:
        found = [*check_folder(data), *check_quarantine(data)]
        found += check_shards(data, workers, num_sampled)
        found += check_labels(data)
        if num_sampled is None:
            found += [*check_catalogue(data), *check_repeated(data)]
        return Report(data, num_sampled is not None, found, time.monotonic() - start_s)


def check_shards(data: DataSet, workers: int, num_sampled: int | None) -> Iterator[Found]:
    """Check the contents of all existing shards, in worker processes.

    num_sampled: images of a quick check; None: all.
    """
    total = sum(part.num_samples for part in data.parts)
    check = check_shard if num_sampled is None else check_shard_quickly
    jobs: list[tuple[Any, Any, Any]] = []
    num_images = 0
    for which, part in enumerate(data.parts):
        for number in part.present:
            length = part.lengths[number]
            if num_sampled is not None:
                length = min(length, -(-num_sampled * length // max(1, total)))
            jobs.append((check, shard_of(data, part, number, length), (which, number)))
            num_images += length
    found: dict[tuple[int, int], list[Found]] = {}

    def keep(place: tuple[int, int], checked: Checked) -> None:
        part = data.parts[place[0]]
        found[place] = checked.found
        part.num_checked += checked.num_checked
        data.num_hashed += checked.hashed
        if len(checked.seen):
            part.seen[place[1]] = checked.seen

    run_jobs(jobs, workers, "verifying", num_jobs=len(jobs), num_images=num_images, on_result=keep)
    for place in sorted(found):
        yield from found[place]


def shard_of(data: DataSet, part: SplitFiles, number: int, num_sampled: int = 0) -> Shard:
    """A shard for a worker. num_sampled: images of a quick check."""
    name = part.filenames[number]
    return Shard(
        root=data.root,
        name=name,
        shown=data.shown,
        tars_at=data.tars_at,
        index_path=data.root / f"{part.name}.index.npy" if part.index is not None else None,
        first=part.firsts[number],
        num_samples=part.lengths[number],
        sha256=part.sha256_of(name),
        ours=data.ours,
        seed=data.seed,
        num_sampled=num_sampled,
        layout=recorded_layout(data.info, data.root / part.filenames[0]),
    )


# ---- what is printed -----------------------------------------------------------------------------


def print_report(report: Report) -> None:
    """Print problems and notes by subject, a table of the splits, what was checked, the verdict."""
    for fails, heading in ((True, "PROBLEMS"), (False, "Notes (they fail with --strict only)")):
        chosen = [found for found in report.found if found.fails == fails]
        if chosen:
            print(f"\n{heading}")
        for subject, title in SUBJECTS.items():
            lines = [found for found in chosen if found.about == subject]
            if lines:
                print(f"  {title}")
            for line in lines:
                print(f"    {printable(f'{line.where}: {line.text}')}")
                for detail in line.details:
                    print(f"      {printable(detail)}")
    print()
    Console(highlight=False).print(table(report))
    num_checked = sum(part.num_checked for part in report.data.parts)
    print("\n  ".join(["Checked:", *_compared(report, counted(num_checked, "image"))]))
    verdict = "right, as far as checked" if report.quick else "right"
    if problems := report.count(fails=True):
        verdict = counted(problems, "problem")
    if notes := report.count(fails=False):
        verdict += f", {counted(notes, 'note')}"
    print(f"{report.data.shown}: {verdict}, {report.elapsed_s:.1f} s")


RECORDS = "sizes of the files, sidecars, quarantine, and the hashes that are recorded of them"
QUICK = (
    "labels and images of each class in the index",
    "of these images, spread over all shards and found through the index: key, label, checksum,"
    " line of `.idx`, and the image decoded to its end",
    "NOT checked, leave out --quick for these: all other images, and their labels in the tars;"
    " sha256 of the shards; tar structure, class names, repeated keys, equal images",
)
COMPLETE = (
    "tar structure; `.idx` and index, row by row, against what the tars give",
    "these images, decoded to the end; sizes in pixels",
    "images of each class, repeated keys, equal images (by 64 bits of a hash)",
)
"""What a quick check and a complete one compare."""


def _compared(report: Report, images: str) -> list[str]:
    """What was compared, and after a quick check what was not."""
    if report.quick:
        return [images, RECORDS, *QUICK]
    data = report.data
    num_shards = sum(len(part.filenames) for part in data.parts)
    names = "the hash of those the data set was made of"
    if not data.catalogue_compared:
        names = "NOTHING: no hash of them is recorded, or not all samples were seen"
    return [
        images,
        RECORDS,
        f"every byte of {data.num_hashed:,} of {num_shards:,} shards against its sha256",
        *COMPLETE,
        f"class names, keys and labels against {names}",
    ]


def _images_per_class(data: DataSet, part: SplitFiles) -> str:
    counts = images_per_class(data, part)
    return number_range(counts) if len(counts) else "-"


ROWS: dict[str, Callable[[DataSet, SplitFiles], str]] = {
    "shards": lambda _, part: f"{len(part.filenames):,}",
    "MB of tars": lambda _, part: f"{part.num_bytes / 1e6:,.1f}",
    "samples recorded": lambda _, part: f"{sum(part.described['shard_lengths']):,}",
    "images checked": lambda _, part: f"{part.num_checked:,}",
    "images of a class": _images_per_class,
    "changed or remarked": lambda _, part: f"{part.changed().total():,}",
    "quarantined": lambda _, part: f"{len(part.quarantined()):,}",
}


def table(report: Report) -> Table:
    """The data set in numbers, a column for each split."""
    result = Table(box=None, padding=(0, 0, 0, 3))
    result.add_column("")
    for part in report.data.parts:
        result.add_column(part.name, justify="right")
    for title, number in ROWS.items():
        result.add_row(title, *(number(report.data, part) for part in report.data.parts))
    return result


FLAGS: Flags = {
    "root": {"metavar": "ROOT", "help": "folder of a finished data set, or its URL"},
    "--quick": {
        "action": "store_true",
        "help": "seconds instead of minutes: structure, and a sample of the images",
    },
    "--sample": {
        "type": positive,
        "default": SAMPLE,
        "metavar": "N",
        "help": "with --quick: images to decode, one of each shard at least (default: %(default)s)",
    },
    "--strict": {"action": "store_true", "help": "exit status 1 for notes, too"},
    **WORKERS_FLAG,
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = make_parser("verify", __doc__, {"": FLAGS}).parse_args(argv)
    reports: list[Report] = []
    status = run(
        lambda args: reports.append(
            verify(args.root, args.workers, args.sample if args.quick else None)
        ),
        args,
        "start it again",
    )
    for report in reports:
        try:
            print_report(report)
        except BrokenPipeError:  # `verify ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = int(report.count(fails=True) > 0 or (args.strict and bool(report.found)))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
