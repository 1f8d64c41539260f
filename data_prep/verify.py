"""Is a finished data set what it says it is? Re-reads everything and names what is wrong.

    python -m data_prep.verify ROOT [--workers N] [--strict]
    python -m data_prep.verify ROOT --quick [--sample N]

The data's story: `_info.json` says which shards there are; the folder is compared with it; worker processes read every shard to the last
byte (data_prep/shard_checks.py) and decode every image; what they saw is put together (data_prep/set_checks.py) to find labels without
images, keys that are there twice, and equal images. Nothing is written or repaired.

Problems and notes. A problem is what differs from what was recorded, or cannot be trained on: exit status 1. A note is what may be so in
the source: the same image under two labels or in both splits (published data sets have such), or counts that a part of ImageNet cannot
have; or files that are in nobody's way. It is told and counted, and fails with --strict only. Status 2: it could not run at all.

--quick reads no whole shard: sizes, structure, all `.idx` and index rows, and a sample of the images, some of every shard. It ends by
saying what it left out.

Memory: some 30 bytes an image in the main process (40 MB for ImageNet-1k), and one shard's headers in each worker.
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

from data_prep.command import Parser, add_workers_argument, positive, run
from data_prep.jobs import run_jobs
from data_prep.set_checks import (
    DataSet,
    Part,
    check_duplicates,
    check_folder,
    check_imagenet,
    check_keys,
    check_labels,
    check_quarantine,
    images_per_class,
    open_data_set,
)
from data_prep.shard_checks import Checked, Found, Shard, check_shard, check_shard_quickly, counted
from vit.data.members import printable, recorded_layout

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
    "ImageNet": "ImageNet",
}
CHECKED = """Checked:
  every byte of every shard against its sha256
  tar structure and member names, by our own walk and by tarfile
  `.idx` and index, row by row, against the tars
  every image, decoded to the end; its size in pixels
  labels, images of each class, keys, quarantine
  equal images, by 64 bits of a hash"""
CHECKED_QUICKLY = """Checked:
  sizes of the files, sidecars, quarantine
  `.idx` against index, row by row; labels and images of each class in the index
  {num_checked}, spread over all shards, found through the index and decoded to the end; their labels
NOT checked, leave out --quick for these:
  all other images, and their labels in the tars
  sha256 of the shards
  tar structure, member names, keys that are there twice, equal images"""


@dataclass
class Report:
    """What came out."""

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
    start = time.monotonic()
    data = open_data_set(place)
    found = [*check_folder(data), *check_quarantine(data), *check_shards(data, workers, num_sampled)]
    found += [*check_labels(data), *check_imagenet(data)]
    if num_sampled is None:
        found += [*check_keys(data), *check_duplicates(data)]
    return Report(data, num_sampled is not None, found, time.monotonic() - start)


def check_shards(data: DataSet, workers: int, num_sampled: int | None) -> Iterator[Found]:
    """Check the contents of all shards that are there, in worker processes. num_sampled: images of a quick check; None: all."""
    total = sum(sum(part.described["shard_lengths"]) for part in data.parts)
    jobs: list[tuple[Any, Any, Any]] = []
    num_images = 0
    for which, part in enumerate(data.parts):
        index = data.root / f"{part.name}.index.npy" if part.index is not None else None
        sha256 = part.described.get("shard_sha256") or [part.sidecars.get(name, {}).get("sha256") for name in part.filenames]
        firsts = part.firsts
        for number in part.present:
            length = part.described["shard_lengths"][number]
            chosen = 0 if num_sampled is None else min(length, -(-num_sampled * length // max(1, total)))
            shard = Shard(
                root=data.root,
                name=part.filenames[number],
                index_path=index,
                first=firsts[number],
                num_samples=length,
                sha256=sha256[number],
                ours=data.ours,
                num_sampled=chosen,
                layout=recorded_layout(data.info, data.root / part.filenames[0]),
            )
            jobs.append((check_shard if num_sampled is None else check_shard_quickly, shard, (which, number)))
            num_images += length if num_sampled is None else chosen
    found: dict[tuple[int, int], list[Found]] = {}

    def keep(place: tuple[int, int], checked: Checked) -> None:
        found[place] = checked.found
        data.parts[place[0]].num_checked += checked.num_checked
        if len(checked.seen):
            data.parts[place[0]].seen[place[1]] = checked.seen

    run_jobs(jobs, workers, what="verifying", num_jobs=len(jobs), num_images=num_images, on_result=keep)
    for place in sorted(found):
        yield from found[place]


# ---- what is printed ------------------------------------------------------------------------------------------------


def print_report(report: Report) -> None:
    """Problems and notes by subject, then a table of what is there, then what was checked and the verdict. Plain lines in a log file."""
    for fails, heading in ((True, "PROBLEMS"), (False, "Notes (they fail with --strict only)")):
        chosen = [found for found in report.found if found.fails == fails]
        if chosen:
            print(f"\n{heading}")
        for subject, title in SUBJECTS.items():
            lines = [found for found in chosen if found.about == subject]
            if lines:
                print(f"  {title}")
            for line in lines:
                print("\n      ".join([f"    {printable(f'{line.where}: {line.text}')}", *map(printable, line.details)]))
    print()
    Console(highlight=False).print(table(report))
    num_checked = sum(part.num_checked for part in report.data.parts)
    print(CHECKED_QUICKLY.format(num_checked=counted(num_checked, "image")) if report.quick else CHECKED)
    problems, notes = report.count(fails=True), report.count(fails=False)
    verdict = counted(problems, "problem") if problems else "right, as far as checked" if report.quick else "right"
    print(f"{report.data.root}: {verdict}{', ' + counted(notes, 'note') if notes else ''}, {report.elapsed_s:.1f} s")


def _images_per_class(data: DataSet, part: Part) -> str:
    counts = images_per_class(data, part)
    if not len(counts):
        return "-"
    return f"{counts.min():,} to {counts.max():,}" if counts.min() < counts.max() else f"{counts.min():,}"


ROWS: dict[str, Callable[[DataSet, Part], str]] = {
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


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser("python -m data_prep.verify", __doc__)
    parser.add_argument("root", metavar="ROOT", help="folder of a finished data set")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: structure, and a sample of the images")
    parser.add_argument(
        "--sample",
        type=positive,
        default=SAMPLE,
        metavar="N",
        help="with --quick: images to decode, one of each shard at least (default: %(default)s)",
    )
    parser.add_argument("--strict", action="store_true", help="exit status 1 for notes, too")
    add_workers_argument(parser)
    args = parser.parse_args(argv)
    reports: list[Report] = []
    status = run(lambda args: reports.append(verify(args.root, args.workers, args.sample if args.quick else None)), args, "start it again")
    for report in reports:
        try:
            print_report(report)
        except BrokenPipeError:  # `verify ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = int(report.count(fails=True) > 0 or (args.strict and bool(report.found)))
    return status


if __name__ == "__main__":
    sys.exit(main())
