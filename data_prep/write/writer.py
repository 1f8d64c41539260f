"""The one writer of all sources: a source in, a data set of shards out. Free of torch.

The data's story: the source's samples are listed in a catalogue; a hash of (seed, key) deals them
to a fixed number of shards, whose lengths differ by one at most; worker processes write one shard
at a time; when every shard is whole, the index, `_info.json`, the list of unreadable images and the
data set's card follow.

    <root>/                 the format is told in vit/data/shards/data_set.py
      _writing.json         what this folder is for; from the first moment until `_info.json` takes its place
      _catalogue-*/         where each sample comes from, see data_prep/write/catalogue.py; goes at the end
      _spool/               images of sources that cannot be read in place; goes at the end
      .train-00000.tar.*    a shard being written; gets its name when it is complete and on the disk
      train-00000.tar  train-00000.idx  train-00000.json      written in this order
      train.index.npy  quarantine.jsonl  _info.json           written last
      dataset.md  contact_sheet.png                           drawn of all that

Shard k is a pure function of (catalogue, options, k). So the number of workers and the order in
which they finish leave no trace in the bytes, and the same command run again after a kill only
writes the shards that are missing. For the same reason several machines can share the work
(`--shards`): each writes its part, and whoever finds all shards whole writes the rest.

A root that is a URL gets the same files; `_catalogue` and `_spool` then lie in the folder for
temporary files.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import PrepError
from data_prep.write.card_page import write_card
from data_prep.write.catalogue import (
    Source,
    is_of_catalogue,
    remove_catalogue,
    remove_catalogues,
    some,
)
from data_prep.write.images import ASKS_TO_BE_TURNED, exif_summary
from data_prep.write.jobs import run_jobs
from data_prep.write.output import Output
from data_prep.write.plan import (
    Plan,
    Settings,
    allowed_unreadable,
    choose_part,
    compare,
    made_of,
    make_plan,
    options_of,
    recorded_there,
    size,
)
from data_prep.write.shard import Work, rows_path, scan_shard, still_holds, write_shard
from vit.data.shards.data_set import make_info
from vit.data.shards.index_file import save_index
from vit.system.files import replacing

MANY_UNREADABLE = 100
"""So few images do not stop the writing where some are allowed: at its end all of them can be
named, and the share that would pass."""


def write(source: Source, out: Path | str, settings: Settings | None = None) -> None:
    """Write all splits of a source to `out`, a folder or a URL, or complete them. Prints what it
    does.

    With `settings.part` only these shards; index and `_info.json` follow in the call that finds all
    shards whole, be they several at once.

    Raises PrepError, with nothing overwritten, if `out` holds another catalogue or other options,
    and if too many images are unreadable (then there is no `_info.json`, and whole shards are
    kept). OSError: disk full, no permission; the same command continues.
    """
    began = time.monotonic()
    settings = settings or Settings()
    output = Output(out)
    output.make()
    try:
        if not _is_complete_already(output, source, settings) and not _write(
            source, output, settings, began
        ):
            return
    except FileNotFoundError as error:
        if not is_of_catalogue(error) or not _is_all_there(output):
            raise
        print(f"{output}: completed by another process meanwhile")
        return
    finally:
        if output.local and not any(output.local.iterdir()):
            output.local.rmdir()  # nothing came of it
    if output.size("dataset.md") < 0:
        write_card(output)
        check = f"; check it with: python -m data_prep.verify {output}" if output.local else ""
        print(f"look at {output}/contact_sheet.png and dataset.md{check}")


def _is_complete_already(output: Output, source: Source, settings: Settings) -> bool:
    """Whether all is there, as `_info.json` tells without listing the source again: its archives
    are the same, and none was unreadable."""
    info = output.read_json("_info.json")
    if (
        not info
        or info.get("quarantined")
        or settings.num_shards
        or settings.shard_bytes
        or info.get("made_of") != made_of(source, settings)
    ):
        return False
    if info["made_of"] is None or not _is_all_there(output):
        return False
    asked = {**options_of(source, settings), "source": source.name}
    compare(output, recorded_there(output), asked, later=("num_shards", "catalogue"))
    print(f"{output}: complete already")
    return True


def _is_all_there(output: Output) -> bool:
    """Whether a data set is complete, by the names and sizes of its files."""
    info = output.read_json("_info.json")
    sizes = output.sizes()
    if (
        info is None
        or "_writing.json" in sizes
        or (info.get("quarantined") and "quarantine.jsonl" not in sizes)
    ):
        return False
    for split, described in info["splits"].items():
        for name, num_bytes in zip(described["filenames"], described["shard_bytes"], strict=True):
            stem = name.removesuffix(".tar")
            if sizes.get(name) != num_bytes or not {f"{stem}.idx", f"{stem}.json"} <= sizes.keys():
                return False
        if f"{split}.index.npy" not in sizes:
            return False
    return True


def _write(source: Source, output: Output, settings: Settings, began: float) -> bool:
    """Write shards, and what describes them when all are whole; returns whether the data set is
    complete."""
    plan = make_plan(source, output.url, settings)
    try:
        work = plan.work()
        mine = [work[k] for k in choose_part(settings.part, plan.counts)]
        _claim(plan)
        whole = _write_shards(plan, work, mine)
        if settings.part is not None:
            whole = _whole_shards(plan, work)  # other parts have gone on meanwhile
            if missing := [f"{job.shard.name}.tar" for job in work if job.shard.name not in whole]:
                left = (
                    f"{len(missing)} of {len(work)} are still missing ({some(missing)}), other"
                    " parts write them"
                )
                print(
                    f"{output}: part {settings.part} written, {time.monotonic() - began:.1f} s;"
                    f" {left}"
                )
                return False
        _refuse_unreadable(whole, plan, _allowed(plan))
        info = _info(plan, work, whole)
        if output.read_json("_info.json") == info and _is_all_there(output):
            print(f"{output}: complete already")
        else:
            _complete(plan, work, whole, info)
            print(
                f"{output}: complete, {len(plan.catalogue.class_names)} classes,"
                f" {time.monotonic() - began:.1f} s"
            )
        output.remove("_writing.json")
        remove_catalogues(plan.catalogue.folder.parent)
        return True
    finally:
        if source.inputs is None:  # the catalogue is this process's own
            remove_catalogue(plan.catalogue.folder)
        if output.local is None:
            with suppress(OSError):  # catalogues of others may be in it
                plan.catalogue.folder.parent.rmdir()


def _claim(plan: Plan) -> None:
    """Note what the folder is for. Raises PrepError if another command did so first."""
    output = plan.output
    if not {"_writing.json", "_info.json"} & output.sizes().keys():
        output.claim("_writing.json", plan.recorded)
        compare(output, recorded_there(output), plan.compared)


def _write_shards(plan: Plan, work: list[Work], mine: list[Work]) -> dict[str, dict[str, Any]]:
    """Write those of `mine` that are not whole; returns the sidecars of all whole shards."""
    whole = _whole_shards(plan, work)
    todo = [job for job in mine if job.shard.name not in whole]
    if len(todo) < len(mine):
        print(
            f"{plan.output}: {len(mine) - len(todo)} of {len(mine)} shards are there already and"
            " are kept"
        )
    _warn_of_full_disk(plan, len(todo) / len(work))
    allowed = _allowed(plan)

    def on_result(name: str, sidecar: dict[str, Any]) -> None:
        whole[name] = sidecar
        _refuse_unreadable(whole, plan, allowed and max(allowed, MANY_UNREADABLE))

    num_images = sum(len(job.shard.places) for job in todo)
    jobs = ((write_shard, job, job.shard.name) for job in todo)
    run_jobs(
        jobs,
        plan.settings.workers,
        "writing",
        num_jobs=len(todo),
        num_images=num_images,
        on_result=on_result,
    )
    return whole


def _whole_shards(plan: Plan, work: list[Work]) -> dict[str, dict[str, Any]]:
    """Sidecars, by name, of the shards of this very plan that are there; a sidecar is written
    last."""
    sizes = plan.output.sizes()
    there = [
        job
        for job in work
        if {f"{job.shard.name}.{kind}" for kind in ("tar", "idx", "json")} <= sizes.keys()
    ]
    with ThreadPoolExecutor(16) as pool:  # a store takes a round trip for each
        sidecars = pool.map(lambda job: plan.output.read_json(f"{job.shard.name}.json"), there)
        return {
            job.shard.name: sidecar
            for job, sidecar in zip(there, sidecars, strict=True)
            if sidecar is not None
            and sidecar.get("plan") == job.plan
            and sizes[f"{job.shard.name}.tar"] == sidecar["bytes"]
            if still_holds(job, sidecar)
        }


def _allowed(plan: Plan) -> int:
    """Images that may be unreadable."""
    return allowed_unreadable(plan.settings.max_unreadable, sum(plan.catalogue.splits.values()))


def _refuse_unreadable(sidecars: Mapping[str, dict[str, Any]], plan: Plan, allowed: int) -> None:
    """Raise PrepError if more images than `allowed` are unreadable in the shards that are whole,
    with the share that would pass."""
    entries = [entry for sidecar in sidecars.values() for entry in sidecar["quarantined"]]
    if len(entries) <= allowed:
        return
    total = sum(plan.catalogue.splits.values())
    seen = sum(
        sidecar["num_samples"] + len(sidecar["quarantined"]) for sidecar in sidecars.values()
    )
    share = min(0.999, math.ceil(1000 * len(entries) / seen) / 1000)
    follow = (
        f"; others may follow in the {total - seen:,} images that were not read yet"
        if seen < total
        else ""
    )
    listed = "\n  ".join(
        f"{entry['key']} ({entry['file']}, {entry['name']}): {entry['reason']}"
        for entry in entries[:20]
    )
    more = f"\n  and {len(entries) - 20} more" if len(entries) > 20 else ""
    raise PrepError(
        f"{len(entries)} images cannot be read, more than the {_allowed(plan)} that"
        f" --max-unreadable {plan.settings.max_unreadable} allows{follow}. Mend or replace them, or"
        f" allow more (--max-unreadable {share}); then run the same command again, whole shards are"
        f" kept:\n  {listed}{more}"
    )


def _warn_of_full_disk(plan: Plan, share: float) -> None:
    free = plan.output.free_bytes()
    needed = plan.num_bytes * share
    if free is not None and needed > free:
        sizes = f"about {size(needed)} are to be written, {size(free)} are free"
        print(
            f"warning: {sizes}; if the disk fills up, whole shards stay, and the same command goes"
            " on when there is room",
            flush=True,
        )


# ---- when all shards are whole -------------------------------------------------------------------


def _info(plan: Plan, work: list[Work], sidecars: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The content of `_info.json`."""
    catalogue = plan.catalogue
    changed = sum((Counter(sidecars[job.shard.name]["changed"]) for job in work), Counter[str]())
    found: dict[str, Any] = {
        "origin": catalogue.notes,
        "listed": dict(catalogue.splits),
        "changed": dict(sorted(changed.items())),
        "quarantined": sum(len(sidecars[job.shard.name]["quarantined"]) for job in work),
        "made_of": made_of(plan.source, plan.settings),
    }
    if turned := sum(sidecars[job.shard.name].get(ASKS_TO_BE_TURNED, 0) for job in work):
        found[ASKS_TO_BE_TURNED] = turned
    classes: dict[str, Any] = {
        "class_names": catalogue.class_names,
        "num_classes": len(catalogue.class_names),
    }
    by_name = {f"{name}.tar": sidecar for name, sidecar in sidecars.items()}
    return make_info(plan.filenames, by_name, **plan.recorded, **found, **classes)


def _complete(
    plan: Plan, work: list[Work], sidecars: Mapping[str, dict[str, Any]], info: dict[str, Any]
) -> None:
    """Write index, list of unreadable images and `_info.json`."""
    output = plan.output
    catalogue = plan.catalogue
    output.remove("dataset.md")  # of an earlier state
    unknown = [job for job in work if not rows_path(catalogue, job.shard.name).exists()]
    jobs = ((scan_shard, job, job.shard.name) for job in unknown)
    run_jobs(jobs, plan.settings.workers, "reading whole shards", num_jobs=len(unknown))
    with output.staging() as folder:
        for split, names in plan.filenames.items():
            save_index(
                folder / f"{split}.index.npy",
                (np.load(rows_path(catalogue, name.removesuffix(".tar"))) for name in names),
            )
            output.publish(folder / f"{split}.index.npy")
    entries = [entry for job in work for entry in sidecars[job.shard.name]["quarantined"]]
    write_quarantine(output, entries)
    output.write_json("_info.json", info)
    for split, described in info["splits"].items():
        megabytes = f"{sum(described['shard_bytes']) / 1e6:,.1f} MB"
        print(
            f"{split}: {described['num_samples']:,} samples in {len(described['filenames']):,}"
            f" shards, {megabytes}"
        )
    if info["changed"]:
        print(
            "changed or remarkable: "
            + ", ".join(f"{count:,} {reason}" for reason, count in info["changed"].items())
        )
    if turned := info.get(ASKS_TO_BE_TURNED):
        print(
            exif_summary(
                turned, sum(described["num_samples"] for described in info["splits"].values())
            )
        )
    if entries:
        print(f"left out: {len(entries):,} unreadable images, listed in {output}/quarantine.jsonl")


def write_quarantine(output: Output, entries: list[dict[str, Any]]) -> None:
    """Write `quarantine.jsonl`, a line for each of the sidecars' entries; without any there is
    none."""
    if not entries:
        output.remove("quarantine.jsonl")
        return
    with output.staging() as folder:
        with replacing(folder / "quarantine.jsonl") as file:
            file.write("".join(json.dumps(entry) + "\n" for entry in entries).encode())
        output.publish(folder / "quarantine.jsonl")
