"""Write a data set of shards from any source.

1. List the samples in a catalog (write/catalog.py).
2. Assign the samples to a fixed number of shards by a hash of (seed, key). Shard lengths differ by
   at most one sample.
3. Write one shard at a time in each worker process (write/shard.py).
4. When every shard is complete, write the index, the list of unreadable images, `_info.json` and
   the data set's card.

    <root>/                 the format: vit/data/shards/info_file.py
      _writing.json         the plan of this folder, later replaced by `_info.json`
      ._catalog.*/        the origin of each sample (write/catalog.py), while a command runs
      train-00000.rows.npy  index rows of a complete shard, finally removed
      _spool/               images of sources that cannot be read in place, finally removed
      .train-00000.tar.*    a shard being written, renamed when it is complete and on disk
      train-00000.tar  train-00000.idx  train-00000.json      written in this order
      train.index.npy  quarantine.jsonl  _info.json           written last
      dataset.md  contact_sheet.png                           drawn from all other files

Shard k is a pure function of (catalog, options, k), so the bytes do not depend on the number of
workers or their timing. If a command is killed, the same command writes only the missing shards.
Several machines can divide the work with `--shards`. The machine that finds all shards complete
writes the remaining files.

If the root is a URL, it gets the same files, but `_catalog` and `_spool` are in the temporary
folder (TMPDIR).
"""

import json
import os
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from data_prep.errors import NEXT_LINE, PrepError, counted, share_to_allow
from data_prep.write.card_page import write_card
from data_prep.write.catalog import SPOOL, Source
from data_prep.write.images import EXIF_ORIENTED, exif_summary
from data_prep.write.jobs import run_jobs
from data_prep.write.output import Output, remove_left_folders
from data_prep.write.plan import (
    Settings,
    WritePlan,
    allowed_unreadable,
    choose_part,
    compare,
    existing_record,
    make_plan,
    options_of,
)
from data_prep.write.shard import ROWS, ShardWork, load_rows, quarantine_holds, write_shard
from vit.data.shards.index_file import save_index
from vit.data.shards.info_file import make_info
from vit.system.files import remove_leftovers
from vit.system.meter import Meter
from vit.system.spelling import few

MANY_UNREADABLE = 100
"""If some unreadable images are allowed, writing continues up to this number of them, so that the
final error can list them and the fraction to allow."""
Sidecars = dict[str, dict[str, Any]]
"""Maps each shard's name, without .tar, to its sidecar."""


def write(source: Source, out: Path | str, settings: Settings | None = None) -> None:
    """Write all splits of a source to `out`, a folder or a URL, or complete an interrupted write.

    Prints progress. With `settings.part`, only the selected shards are written. The call that finds
    all shards complete writes the index and `_info.json`, even if several calls run in parallel.

    Raises PrepError, without overwriting anything, if `out` contains another catalog or other
    options. Raises PrepError if too many images are unreadable. Complete shards are kept, but
    `_info.json` is not written. Raises OSError for a full disk or missing permission. The same
    command resumes.
    """
    start_s = time.monotonic()
    settings = settings or Settings()
    output = Output(out)
    output.make()

    # Clean up explicitly, because no temporary folder is created if the data set is complete.
    remove_left_folders()

    try:
        is_complete = _is_complete_already(output, source, settings)
        if not is_complete and not _write(source, output, settings, start_s):
            return
    except FileNotFoundError as error:
        # Another process has completed the data set and removed the spool folder. Any other missing
        # file belongs to the source, so its absence is an error.
        in_spool = SPOOL in Path(str(error.filename)).parts
        if not (in_spool and _has_all_files(output, output.read_json("_info.json"))):
            raise
        print(f"{output}: completed by another process")
        _remove_intermediate(output, output.local)
        return
    finally:
        # Workers of a killed command exit only after their last bytes are on disk. On a slow disk,
        # they may still be running when the current command starts.
        remove_left_folders()
        if output.local:
            remove_leftovers(output.local)
            if not any(output.local.iterdir()):
                output.local.rmdir()  # Remove the folder if nothing was written.

    if output.size("dataset.md") < 0:
        write_card(output)
        check = f"; check it with: python -m data_prep.verify {quote(str(output))}"
        print(f"see {output}/contact_sheet.png and dataset.md" + (check if output.local else ""))


def _is_complete_already(output: Output, source: Source, settings: Settings) -> bool:
    """Return whether `_info.json` shows that the data set is complete, without listing the source.

    The source archives must be unchanged, and every image must have been readable.
    """
    info = output.read_json("_info.json") or {}
    may_differ = info.get("quarantined") or settings.num_shards or settings.shard_bytes
    if not info or may_differ:
        return False

    made_from = source.made_of(settings.seed, settings.minival)
    is_same_source = made_from is not None and info.get("made_of") == made_from
    if not is_same_source or not _has_all_files(output, info):
        return False

    compare(
        output,
        existing_record(output),
        {"source": source.name, "options": options_of(source, settings)},
        later=("num_shards", "catalog"),
    )
    print(f"{output}: already complete")
    return True


def _has_all_files(output: Output, info: dict[str, Any] | None) -> bool:
    """Return whether all files of a data set exist and have the sizes recorded in `info`."""
    sizes = output.sizes()
    if info is None or "_writing.json" in sizes:
        return False

    needed = {f"{split}.index.npy" for split in info["splits"]}
    if info.get("quarantined"):
        needed.add("quarantine.jsonl")
    for described in info["splits"].values():
        for name, num_bytes in zip(described["filenames"], described["shard_bytes"], strict=True):
            if sizes.get(name) != num_bytes:
                return False
            needed |= {f"{name.removesuffix('.tar')}.{kind}" for kind in ("idx", "json")}

    return needed <= sizes.keys()


def _write(source: Source, output: Output, settings: Settings, start_s: float) -> bool:
    """Write shards. If all shards are complete, write the records and return True."""
    with make_plan(source, output.url, settings) as plan:
        mine = [plan.work[k] for k in choose_part(settings.part, plan.counts)]
        _claim(plan)

        sidecars = _write_shards(plan, mine)
        if settings.part is not None:
            sidecars = _complete_shards(plan)  # includes shards that other machines wrote
            missing = [f"{job.name}.tar" for job in plan.work if job.name not in sidecars]
            if missing:
                print(
                    f"{output}: part {settings.part} written, {time.monotonic() - start_s:.1f} s;"
                    f" {len(missing)} of {len(plan.work)} shards are still missing"
                    f" ({few(missing)}): write them with the other parts"
                )
                return False

        _refuse_unreadable(sidecars, plan, _allowed(plan))
        info = _info(plan, sidecars)
        if output.read_json("_info.json") == info and _has_all_files(output, info):
            print(f"{output}: already complete")
        else:
            _complete(plan, sidecars, info)
            print(
                f"{output}: complete, {len(plan.catalog.class_names)} classes,"
                f" {time.monotonic() - start_s:.1f} s"
            )

        _remove_intermediate(output, plan.catalog.folder.parent)
        return True


def _remove_intermediate(output: Output, root: Path | None) -> None:
    """Remove the intermediate files of a complete data set.

    Another process may have created some of them after the data set was complete.
    """
    info = output.read_json("_info.json") or {"splits": {}}
    tars = chain.from_iterable(described["filenames"] for described in info["splits"].values())
    rows = output.sizes().keys() & {f"{name.removesuffix('.tar')}{ROWS}" for name in tars}

    # Remove `_writing.json` last, because the next command repeats this cleanup while it exists.
    for name in (*rows, "_writing.json"):
        output.remove(name)
    if root is not None:
        shutil.rmtree(root / SPOOL, ignore_errors=True)


def _claim(plan: WritePlan) -> None:
    """Record the plan in the output. Raises PrepError if the output records another plan."""
    output = plan.output
    if not {"_writing.json", "_info.json"} & output.sizes().keys():
        output.claim("_writing.json", plan.recorded)
    # Another command may have recorded its plan while this one listed the source.
    compare(output, existing_record(output), plan.recorded)


def _write_shards(plan: WritePlan, mine: list[ShardWork]) -> Sidecars:
    """Write the incomplete shards of `mine`. Return the sidecars of all complete shards."""
    sidecars = _complete_shards(plan)
    todo = [job for job in mine if job.name not in sidecars]
    if len(todo) < len(mine):
        print(
            f"{plan.output}: keeping {len(mine) - len(todo)} of {len(mine)} shards that already"
            " exist"
        )

    allowed = _allowed(plan)

    def on_result(name: str, sidecar: dict[str, Any]) -> None:
        sidecars[name] = sidecar
        os.utime(plan.catalog.folder)  # Show that the folder is in use even if locks do not work.
        _refuse_unreadable(sidecars, plan, allowed and max(allowed, MANY_UNREADABLE))

    run_jobs(
        ((write_shard, job, job.name) for job in todo),
        plan.settings.workers,
        "writing",
        num_jobs=len(todo),
        num_images=sum(len(job.places) for job in todo),
        on_result=on_result,
    )
    return sidecars


def _complete_shards(plan: WritePlan) -> Sidecars:
    """Return the sidecars of this plan's complete shards. A shard's sidecar is written last."""
    sizes = plan.output.sizes()
    jobs = [
        job
        for job in plan.work
        if {f"{job.name}.tar", f"{job.name}.idx", f"{job.name}.json"} <= sizes.keys()
    ]

    with ThreadPoolExecutor(16) as pool:  # Each request to an object store takes a round trip.
        sidecars = list(pool.map(lambda job: plan.output.read_json(f"{job.name}.json"), jobs))

    return {
        job.name: sidecar
        for job, sidecar in zip(jobs, sidecars, strict=True)
        if sidecar is not None and _is_of_plan(job, sidecar, sizes[f"{job.name}.tar"])
    }


def _is_of_plan(job: ShardWork, sidecar: dict[str, Any], num_bytes: int) -> bool:
    """Return whether a sidecar describes a job's shard, whose tar is `num_bytes` long."""
    return (
        sidecar.get("plan") == job.plan
        and sidecar["bytes"] == num_bytes
        and quarantine_holds(job, sidecar)
    )


def _allowed(plan: WritePlan) -> int:
    return allowed_unreadable(plan.settings.max_unreadable, sum(plan.catalog.splits.values()))


def _refuse_unreadable(sidecars: Sidecars, plan: WritePlan, allowed: int) -> None:
    """Raise PrepError if more than `allowed` images are unreadable. The message states the fraction
    to allow."""
    entries = list(chain.from_iterable(sidecar["quarantined"] for sidecar in sidecars.values()))
    if len(entries) <= allowed:
        return

    seen = len(entries) + sum(sidecar["num_samples"] for sidecar in sidecars.values())
    unseen = sum(plan.catalog.splits.values()) - seen
    hint = f"; the {unseen:,} images that were not read yet may add others" if unseen > 0 else ""

    lines = [
        f"{entry['key']} ({entry['file']}, {entry['name']}): {entry['reason']}" for entry in entries
    ]
    raise PrepError(
        f"{len(entries)} images cannot be read, more than the {_allowed(plan)} that"
        f" --max-unreadable {plan.settings.max_unreadable} allows{hint}. Repair or replace them,"
        f" or allow more (--max-unreadable {share_to_allow(len(entries), seen)}), and run the same"
        f" command again (complete shards are kept):\n  {few(lines, 20, NEXT_LINE)}"
    )


# ---- when all shards are complete ----------------------------------------------------------------


def _info(plan: WritePlan, sidecars: Sidecars) -> dict[str, Any]:
    """Return the content of `_info.json`, with the totals of all sidecars."""
    catalog = plan.catalog
    mine = [sidecars[job.name] for job in plan.work]
    changed = sum((Counter(sidecar["changed"]) for sidecar in mine), Counter[str]())

    num_oriented = sum(sidecar.get(EXIF_ORIENTED, 0) for sidecar in mine)
    extra: dict[str, Any] = {
        "origin": catalog.notes,
        "listed": dict(catalog.splits),
        "changed": dict(sorted(changed.items())),
        "quarantined": sum(len(sidecar["quarantined"]) for sidecar in mine),
        "made_of": plan.source.made_of(plan.settings.seed, plan.settings.minival),
        **({EXIF_ORIENTED: num_oriented} if num_oriented else {}),
    }

    return make_info(
        plan.filenames,
        {f"{name}.tar": sidecar for name, sidecar in sidecars.items()},
        **plan.recorded,
        **extra,
        class_names=catalog.class_names,
        num_classes=len(catalog.class_names),
    )


def _complete(plan: WritePlan, sidecars: Sidecars, info: dict[str, Any]) -> None:
    """Write the index, the list of unreadable images and `_info.json`, and print a summary."""
    output = plan.output
    output.remove("dataset.md")  # The existing card is outdated.

    rows = {}
    with (
        ThreadPoolExecutor(16) as pool,
        Meter("reading complete shards", len(plan.work), "shards") as meter,
    ):
        for job, of_shard in zip(plan.work, pool.map(load_rows, plan.work), strict=True):
            rows[f"{job.name}.tar"] = of_shard
            meter.update(len(rows))

    write_indexes(output, plan.filenames, rows)
    entries = list(chain.from_iterable(sidecars[job.name]["quarantined"] for job in plan.work))
    write_quarantine(output, entries)
    output.write_json("_info.json", info)

    for split, described in info["splits"].items():
        print(
            f"{split}: {described['num_samples']:,} samples in"
            f" {counted(len(described['filenames']), 'shard')},"
            f" {sum(described['shard_bytes']) / 1e6:,.1f} MB"
        )
    if info["changed"]:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in info["changed"].items())
        print(f"changed or noted: {reasons}")
    if info.get(EXIF_ORIENTED):
        print(exif_summary(info[EXIF_ORIENTED], sum(map(len, rows.values()))))
    if entries:
        print(f"skipped: {len(entries):,} unreadable images, listed in {output}/quarantine.jsonl")


def write_indexes(
    output: Output, filenames: dict[str, list[str]], rows_of: dict[str, np.ndarray]
) -> None:
    """Write `<split>.index.npy` for each split, from the index rows of its tars."""
    with output.staging() as folder:
        for split, names in filenames.items():
            save_index(folder / f"{split}.index.npy", [rows_of[name] for name in names])
            output.publish(folder / f"{split}.index.npy")


def write_quarantine(output: Output, entries: list[dict[str, Any]]) -> None:
    """Write `quarantine.jsonl` with one line per sidecar entry. Without entries, write no file."""
    if entries:
        lines = [json.dumps(entry) + "\n" for entry in entries]
        output.write("quarantine.jsonl", "".join(lines).encode())
    else:
        output.remove("quarantine.jsonl")
