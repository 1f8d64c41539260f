"""Index existing shards of other programs without changing any tar.

    python -m data_prep.index ROOT [--split NAME] [--max-unreadable F] [--workers N]
    python -m data_prep.index ROOT --image image.jpg --label json:label --classes names.txt
    python -m data_prep.index s3://bucket/folder [--out FOLDER]
    python -m data_prep.index 'https://host/path/imagenet1k-train-{0000..1023}.tar' --out FOLDER

Every `<split>-*.tar` or `<anything>-<split>-*.tar` in ROOT (imagenet1k-train-0000.tar) is scanned
and hashed once. The command writes an `.idx` file and a sidecar next to each tar,
`<split>.index.npy` for each split, and finally `_info.json`. An existing `_info.json`, which lists
each split's shards, is compared with the tars and never changed. Tars contain no class names.
Without --classes, the number of classes is the largest label of any split plus one. Invalid samples
(an image of 0 bytes, no image or two images, no label) are skipped and listed in the sidecars and
in `quarantine.jsonl`. It is an error if more samples are invalid than --max-unreadable allows.

As in webdataset, a sample is a run of members with the same name up to the first dot. The image is
the member jpg, jpeg, png or webp, and the label is the integer in the member cls. --image and
--label select other members or a field of a JSON member. `--label none` reads samples without
labels. With --keys-with-dots, a key ends at the last dot. `_info.json` and the sidecars record
these flags, and later runs of the command use them.

Shards at a URL are fetched one at a time into the temporary folder (TMPDIR) and then removed. ROOT
may be a folder that fsspec can list (s3://, gs://, hf://datasets/timm/imagenet-1k-wds) or a web
address. On the web, name the shards with braces, as in webdataset, unless the folder has an
`_info.json`. Files are written next to the shards if possible, and otherwise to FOLDER. In FOLDER,
"shards_at" in `_info.json` records the location of the shards. An interrupted command resumes after
the last shard it read. Until all shards are read, `<shard>.rows.npy` stores a shard's index rows.
"""

from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from data_prep.command import MAX_UNREADABLE_FLAG, WORKERS_FLAG, command_line
from data_prep.errors import NEXT_LINE, PrepError, counted, share_to_allow
from data_prep.read.class_names import NO_FLAGS, IndexFlags, choose_layout
from data_prep.read.download import WebShards
from data_prep.read.split_names import split_of
from data_prep.write.card_page import write_readme
from data_prep.write.index_records import (
    Indexed,
    IndexedShard,
    check_present,
    choose_classes,
    choose_output,
    compare_shards,
    group_by_split,
    index_shard,
    known_rows,
    locate,
    read_infos,
    stem,
    tars_by_split,
)
from data_prep.write.jobs import run_jobs
from data_prep.write.output import Output
from data_prep.write.plan import Settings, allowed_unreadable
from data_prep.write.writer import write_indexes, write_quarantine
from vit.data.shards import info_file
from vit.data.shards.members import SampleLayout
from vit.data.shards.tar import describe_ignored
from vit.system.files import remove_leftovers
from vit.system.redact import escape_to_one_line
from vit.system.spelling import few
from vit.system.urls import bare


def index(
    roots: list[str],
    workers: int = 1,
    out: str | None = None,
    split: str | None = None,
    flags: IndexFlags = NO_FLAGS,
    max_unreadable: float = Settings().max_unreadable,
) -> None:
    """Index the tars of a folder, and write all missing files next to the tars or to `out`.

    Raises PrepError or ShardError.

    Args:
        roots: One folder, one folder URL, or tar URLs, which may contain braces.
        split: The split of all shards, if their names do not contain one.
        max_unreadable: The maximum fraction of invalid samples.
    """
    source, names = locate(roots)
    output = choose_output(source, out)
    infos = read_infos(source, output, names is not None)
    splits = _choose_splits(source, names, infos.given, split)
    if infos.own is not None and tars_by_split(infos.own) != splits:
        raise PrepError(
            f"{output}: its _info.json lists different shards from those given: move _info.json"
            " away, or choose another --out"
        )

    split_of_tar: dict[str, str] = {}
    for name, filenames in splits.items():
        split_of_tar |= dict.fromkeys(filenames, name)
    tars = list(split_of_tar)
    check_present(source, tars)

    first_tar = source.local / tars[0] if isinstance(source, Output) and source.local else None
    recorded_info = infos.own or infos.given
    layout, class_names = choose_layout(
        flags, recorded_info, str(output if infos.own else source), first_tar
    )

    indexed = _index_shards(source, output, split_of_tar, layout, infos.own, workers)
    sidecars = {name: indexed[name].sidecar for name in tars}
    quarantined = list(chain(*(each.get("quarantined", ()) for each in sidecars.values())))
    invalid = [each for each in quarantined if "tar_offset" in each]  # Our writer adds no offsets.
    _refuse_invalid(sidecars, invalid, max_unreadable)
    for existing in filter(None, (infos.given, infos.own)):
        compare_shards(output, existing, indexed)
    classes = choose_classes(recorded_info, class_names, indexed)

    write_indexes(output, splits, {name: each.rows for name, each in indexed.items()})
    for name, filenames in splits.items():
        num_samples = sum(len(indexed[filename].rows) for filename in filenames)
        print(f"{name}: {num_samples:,} samples in {counted(len(filenames), 'shard')}")
    write_quarantine(output, quarantined)
    info = infos.own
    if info is None:
        extra = {} if output is source else {"shards_at": bare(str(source))}
        info = _new_info(splits, sidecars, layout, classes | extra, len(quarantined))
        output.write_json("_info.json", info)
    _clean(output, tars, is_ours=output is not source)
    write_readme(output, info)

    num_classes = classes["num_classes"]
    agreement = ", matches the existing _info.json" if infos.own else ""
    print(f"{output}: indexed, {counted(num_classes, 'class', 'classes')}{agreement}")
    _print_notes(output, splits, invalid, indexed, num_classes)
    _print_use(output, list(splits), num_classes, is_ours=output is not source)


def _choose_splits(
    source: Output | WebShards,
    names: list[str] | None,
    info: dict[str, Any] | None,
    split: str | None,
) -> dict[str, list[str]]:
    """Return the tars of each split, from the `_info.json` of `source` or from the tars' names.

    Args:
        names: The tars, if the user listed them.
        info: The `_info.json` of `source`.
        split: The split of all tars, if the user gave one.
    """
    if info is None or names is not None:
        files = names or (sorted(source.sizes()) if isinstance(source, Output) else [])
        return group_by_split(files, str(source), split)

    splits = tars_by_split(info)
    if split and set(splits) != {split}:
        raise PrepError(f"{source}: --split is {split}, but _info.json lists {', '.join(splits)}")
    return splits


def _index_shards(
    source: Output | WebShards,
    output: Output,
    split_of_tar: dict[str, str],
    layout: SampleLayout,
    own_info: dict[str, Any] | None,
    workers: int,
) -> dict[str, Indexed]:
    """Read the shards in worker processes. Rows of a previous index in `output` are reused."""
    rows_of = {} if output is source and output.local else known_rows(output, own_info)
    jobs = [
        (index_shard, IndexedShard(source, output, name, split, layout, rows_of.get(name)), name)
        for name, split in split_of_tar.items()
    ]
    return run_jobs(jobs, workers, "reading shards", num_jobs=len(jobs))


def _new_info(
    splits: dict[str, list[str]],
    sidecars: dict[str, dict[str, Any]],
    layout: SampleLayout,
    values: dict[str, Any],
    num_quarantined: int,
) -> dict[str, Any]:
    """Return a new `_info.json`. values: its classes and, if recorded, the place of the shards."""
    if num_quarantined:
        values["quarantined"] = num_quarantined
    return info_file.make_info(splits, sidecars, source="index", options=layout.options(), **values)


def _clean(output: Output, tars: list[str], is_ours: bool) -> None:
    """Remove temporary row files, and files that killed processes left behind."""
    for name in output.sizes().keys() & {f"{stem(tar)}.rows.npy" for tar in tars}:
        output.remove(name)
    if output.local and is_ours:  # Other programs may be writing to a folder of foreign tars.
        remove_leftovers(output.local)


def _print_notes(
    output: Output,
    splits: dict[str, list[str]],
    invalid: list[dict[str, Any]],
    indexed: dict[str, Indexed],
    num_classes: int,
) -> None:
    """Print notes about skipped samples, repeated samples, and classes without images."""
    if invalid:
        print(
            f"skipped {counted(len(invalid), 'invalid sample')}, listed in"
            f" {output}/quarantine.jsonl; the first: {_describe(invalid[0])}"
        )

    ignored = sum(
        (Counter(each.sidecar.get("ignored", {})) for each in indexed.values()), Counter[str]()
    )
    if ignored:
        print(f"note: {describe_ignored(ignored)}")

    labels = np.unique(np.concatenate([each.rows["label"] for each in indexed.values()]))
    empty = [str(label) for label in np.setdiff1d(np.arange(num_classes), labels)]
    if empty:
        print(
            f"note: labels are {labels[0]} to {labels[-1]}; models also get an output for classes"
            f" without images: {few(empty)}"
        )

    _print_repeated(output, splits, indexed)


def _print_repeated(
    output: Output, splits: dict[str, list[str]], indexed: dict[str, Indexed]
) -> None:
    """Print shards with identical bytes, and the number of keys that occur more than once."""
    by_sha256 = defaultdict[str, list[str]](list)
    for name, each in indexed.items():
        by_sha256[each.sidecar["sha256"] or name].append(name)
    for names in by_sha256.values():
        if len(names) > 1:
            print(
                f"note: {few(sorted(names))} have the same bytes: move _info.json and all but one"
                " of them away, and run this command again"
            )

    for split, names in splits.items():
        _, counts = np.unique(
            np.concatenate([indexed[name].keys for name in names]), return_counts=True
        )
        repeated = np.count_nonzero(counts > 1)
        if repeated:
            print(
                f"note: {repeated:,} keys of {split} occur more than once: `python -m"
                f" data_prep.verify {quote(str(output))}` lists them"
            )


def _describe(entry: dict[str, Any]) -> str:
    return escape_to_one_line(f"{entry['file']}: sample {entry['key']!r} {entry['reason']}")


def _refuse_invalid(
    sidecars: dict[str, dict[str, Any]], invalid: list[dict[str, Any]], max_unreadable: float
) -> None:
    """Raise PrepError if too many samples are invalid. The message states the fraction to allow."""
    total = sum(sidecar["num_samples"] for sidecar in sidecars.values()) + len(invalid)
    allowed = allowed_unreadable(max_unreadable, total)
    if len(invalid) > allowed:
        raise PrepError(
            f"{len(invalid):,} of {total:,} samples are invalid, more than the {allowed:,} that"
            f" --max-unreadable {max_unreadable} allows. Repair them, select other members"
            f" (--image, --label), or skip them (--max-unreadable"
            f" {share_to_allow(len(invalid), total)}):\n  "
            f"{few([_describe(entry) for entry in invalid], 20, NEXT_LINE)}"
        )


def _print_use(output: Output, splits: list[str], num_classes: int, is_ours: bool) -> None:
    """Print the commands to check the data set and to train on it or, without labels, to classify
    its images."""
    use = (
        f"train on it with {_settings(output, splits)}"
        if num_classes
        else f"classify its images with: python launch/predict.py {quote(str(output))}"
    )
    if output.local and not is_ours:
        use += f"; check it with: python -m data_prep.verify {quote(str(output))}"
    print(use)


def _settings(output: Output, splits: list[str]) -> str:
    """Return the command-line settings for training on this data set."""
    train = next((name for name in splits if split_of(name) == "train"), splits[0])
    # Prefer a split that means val to any other split.
    val = min(
        (name for name in splits if name != train),
        key=lambda name: split_of(name) != "val",
        default=None,
    )

    settings = quote(f"data.root={output}")
    if train != "train":
        settings += f" data.train_split={train}"
    if val is None:
        return f"{settings} (and set data.val_split to a split for evaluation)"
    return settings if val == "val" else f"{settings} data.val_split={val}"


main = command_line(
    "index",
    __doc__,
    {
        "": {
            "root": {
                "nargs": "+",
                "metavar": "ROOT",
                "help": "folder of tar shards, its URL, or shard URLs (quote the braces)",
            },
            "--out": {
                "metavar": "FOLDER",
                "help": "folder for the index of shards at a URL, if not next to the shards",
            },
            "--split": {
                "metavar": "NAME",
                "help": "split of all shards, if their names contain none (00000.tar)",
            },
            **MAX_UNREADABLE_FLAG,
            **WORKERS_FLAG,
        },
        "members of a sample": {
            "--image": {
                "metavar": "SUFFIX",
                "help": "member of the image, such as image.jpg, or several, such as 'jpg;png'",
            },
            "--label": {
                "metavar": "SUFFIX",
                "help": (
                    "member of the label: a text member such as label.cls, a JSON field such as"
                    " json:label, or none for samples without labels"
                ),
            },
            "--keys-with-dots": {
                "action": "store_true",
                "help": "end a key at the last dot of a name instead of the first",
            },
            "--classes": {
                "type": Path,
                "metavar": "FILE",
                "help": "file of class names in label order, one per line",
            },
        },
    },
    lambda args: index(
        args.root,
        args.workers,
        args.out,
        args.split,
        IndexFlags(args.image, args.label, args.keys_with_dots, args.classes),
        args.max_unreadable,
    ),
)


if __name__ == "__main__":
    raise SystemExit(main())
