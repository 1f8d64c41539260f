"""Check a finished data set and report what is wrong.

    python -m data_prep.verify ROOT [--workers N] [--strict]
    python -m data_prep.verify ROOT --quick [--sample N]

ROOT is a folder or its URL (https://, s3://, gs://). The shards are compared with `_info.json`,
which lists them (data_prep/check/set_checks.py). Worker processes read every shard completely and
decode every image (data_prep/check/shard_checks.py). The combined results show labels without
images, repeated keys and identical images. Class names, keys and labels are compared with a hash
that was computed before any shard was written. Shards at a URL are fetched one at a time into the
temporary folder. Nothing is written or repaired.

A problem contradicts the records or prevents training, and leads to exit status 1. A note concerns
a harmless file, or a property of the source, such as the same image under two labels or in both
splits. Notes lead to exit status 1 only with --strict. The exit status is 2 if the check could not
run.

--quick does not read whole shards. It checks sizes, index rows and some images of every shard (at a
URL with range requests), and finally lists the checks that it skipped.

The main process needs about 30 bytes per image (40 MB for ImageNet-1k). Each worker holds one
shard's headers in memory.
"""

import argparse
import math
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
    check_catalog,
    check_folder,
    check_labels,
    check_quarantine,
    check_repeated,
    images_per_class,
)
from data_prep.check.shard_checks import (
    Checked,
    CheckedShard,
    ShardFinding,
    check_shard,
    check_shard_quickly,
    counted,
)
from data_prep.command import WORKERS_FLAG, Flags, command_line, positive
from data_prep.write.card_text import number_range
from data_prep.write.jobs import run_jobs
from vit.data.shards.members import recorded_layout
from vit.system.redact import escape_to_one_line

SAMPLE = 500
"""The total number of images that a quick check decodes."""
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
class VerifyReport:
    """The findings and numbers that `verify` returns."""

    data: DataSet
    quick: bool
    findings: list[ShardFinding]
    elapsed_s: float

    def count(self, fails: bool) -> int:
        """Count the problems if `fails` is True, otherwise the notes."""
        return sum(finding.fails == fails for finding in self.findings)


def verify(place: str, workers: int = 1, num_sampled: int | None = None) -> VerifyReport:
    """Check the data set at `place`.

    num_sampled: the number of images in a quick check, or None to check all. Raises PrepError or
    ShardError if the data set cannot be checked.
    """
    start_s = time.monotonic()
    with opened_data_set(place) as data:
        findings = [*check_folder(data), *check_quarantine(data)]
        findings += check_shards(data, workers, num_sampled)
        findings += check_labels(data)
        if num_sampled is None:
            findings += [*check_catalog(data), *check_repeated(data)]
        return VerifyReport(data, num_sampled is not None, findings, time.monotonic() - start_s)


def check_shards(data: DataSet, workers: int, num_sampled: int | None) -> Iterator[ShardFinding]:
    """Check the contents of all existing shards in worker processes.

    num_sampled: number of images in a quick check, or None to check all.
    """
    total = sum(part.num_samples for part in data.parts)
    check = check_shard if num_sampled is None else check_shard_quickly

    jobs: list[tuple[Any, Any, Any]] = []
    num_images = 0
    for split, part in enumerate(data.parts):
        for number in part.present:
            length = part.lengths[number]
            if num_sampled is not None:
                length = min(length, math.ceil(num_sampled * length / max(1, total)))
            jobs.append((check, shard_of(data, part, number, length), (split, number)))
            num_images += length

    results = run_jobs(jobs, workers, "verifying", num_jobs=len(jobs), num_images=num_images)
    for split, number in sorted(results):
        checked: Checked = results[split, number]
        part = data.parts[split]
        part.num_checked += checked.num_checked
        data.num_hashed += checked.hashed
        if len(checked.seen):
            part.seen[number] = checked.seen
        yield from checked.findings


def shard_of(data: DataSet, part: SplitFiles, number: int, num_sampled: int = 0) -> CheckedShard:
    """Return the arguments for checking a shard. num_sampled: number of images in a quick check."""
    name = part.filenames[number]
    return CheckedShard(
        root=data.root,
        name=name,
        shown=data.shown,
        tars_at=data.tars_at,
        index_name="" if part.index is None else f"{part.name}.index.npy",
        first=part.firsts[number],
        num_samples=part.lengths[number],
        sha256=part.sha256_of(name),
        ours=data.ours,
        seed=data.seed,
        num_sampled=num_sampled,
        layout=recorded_layout(data.info, data.root / part.filenames[0]),
    )


# ---- what is printed -----------------------------------------------------------------------------


def print_report(report: VerifyReport) -> None:
    """Print problems and notes by subject, a table of splits, the checks and the verdict."""
    for fails, heading in ((True, "PROBLEMS"), (False, "Notes (they fail only with --strict)")):
        if report.count(fails):
            print(f"\n{heading}")
        for subject, title in SUBJECTS.items():
            findings = [
                finding
                for finding in report.findings
                if (finding.fails, finding.subject) == (fails, subject)
            ]
            if findings:
                print(f"  {title}")
            for finding in findings:
                print(f"    {escape_to_one_line(f'{finding.place}: {finding.text}')}")
                for detail in finding.details:
                    print(f"      {escape_to_one_line(detail)}")

    print()
    Console(highlight=False).print(table(report))
    num_checked = sum(part.num_checked for part in report.data.parts)
    print("\n  ".join(["Checked:", *_compared(report, counted(num_checked, "image"))]))

    verdict = "no problems in the checked part" if report.quick else "no problems"
    if report.count(fails=True):
        verdict = counted(report.count(fails=True), "problem")
    if report.count(fails=False):
        verdict += f", {counted(report.count(fails=False), 'note')}"
    print(f"{report.data.shown}: {verdict}, {report.elapsed_s:.1f} s")


RECORDS = "sizes and recorded hashes of files, sidecars and quarantine"


def _compared(report: VerifyReport, images: str) -> list[str]:
    """Describe the comparisons and, after a quick check, the skipped comparisons.

    images: the number of decoded images, with its noun.
    """
    if report.quick:
        return [
            images,
            RECORDS,
            "labels and number of images per class in the index",
            "key, label, checksum, `.idx` line and complete decoding of these images, found through"
            " the index and spread over all shards",
            "NOT checked (run without --quick): all other images and their labels in the tars,"
            " sha256 of the shards, tar structure, class names, repeated keys, equal images",
        ]

    data = report.data
    num_shards = sum(len(part.filenames) for part in data.parts)
    reference = (
        "the hash recorded before writing"
        if data.catalog_compared
        else "NOTHING, because no hash is recorded or some samples were not read"
    )
    return [
        images,
        RECORDS,
        f"every byte of {data.num_hashed:,} of {num_shards:,} shards against its sha256",
        "tar structure, and each row of `.idx` and index against the tars",
        "complete decoding of these images, and their sizes in pixels",
        "images per class, repeated keys, equal images (by 64 bits of a hash)",
        f"class names, keys and labels against {reference}",
    ]


ROWS: dict[str, Callable[[DataSet, SplitFiles], str]] = {
    "shards": lambda _, part: f"{len(part.filenames):,}",
    "MB of tars": lambda _, part: f"{part.num_bytes / 1e6:,.1f}",
    "samples recorded": lambda _, part: f"{sum(part.described['shard_lengths']):,}",
    "images checked": lambda _, part: f"{part.num_checked:,}",
    "images per class": lambda data, part: number_range(images_per_class(data, part)),
    "changed or noted": lambda _, part: f"{part.changed.total():,}",
    "quarantined": lambda _, part: f"{len(part.quarantined):,}",
}


def table(report: VerifyReport) -> Table:
    """Return a table of the data set's numbers, with one column per split."""
    result = Table(box=None, padding=(0, 0, 0, 3))
    result.add_column("")
    for part in report.data.parts:
        result.add_column(part.name, justify="right")
    for title, number in ROWS.items():
        result.add_row(title, *(number(report.data, part) for part in report.data.parts))
    return result


FLAGS: Flags = {
    "root": {"metavar": "ROOT", "help": "folder or URL of a finished data set"},
    "--quick": {
        "action": "store_true",
        "help": "check structure and a sample of the images, in seconds instead of minutes",
    },
    "--sample": {
        "type": positive,
        "default": SAMPLE,
        "metavar": "N",
        "help": "images to decode with --quick, at least one per shard (default: %(default)s)",
    },
    "--strict": {"action": "store_true", "help": "exit with status 1 for notes as well"},
    **WORKERS_FLAG,
}


def _run(args: argparse.Namespace) -> int:
    report = verify(args.root, args.workers, args.sample if args.quick else None)
    try:
        print_report(report)
    except BrokenPipeError:  # raised by `verify ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(report.count(fails=True) > 0 or (args.strict and bool(report.findings)))


main = command_line("verify", __doc__, {"": FLAGS}, _run, "run the command again")


if __name__ == "__main__":
    raise SystemExit(main())
