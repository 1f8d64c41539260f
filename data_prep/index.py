"""Make shards that others wrote readable for us: add what is missing, touch no tar.

    python -m data_prep.index ROOT [--split NAME] [--max-unreadable F] [--workers N]
    python -m data_prep.index ROOT --image image.jpg --label json:label --classes names.txt
    python -m data_prep.index s3://bucket/folder [--out FOLDER]
    python -m data_prep.index 'https://host/path/imagenet1k-train-{0000..1023}.tar' --out FOLDER

The data's story: every `<split>-*.tar` or `<anything>-<split>-*.tar` in ROOT
(imagenet1k-train-0000.tar) is scanned and hashed once; its `.idx` and its sidecar are written
beside it, then `<split>.index.npy` for each split and last `_info.json`. An `_info.json` that is
there already says which shards belong to which split; it is compared with the tars and never
changed. Class names are not known from tars: --classes gives them, else the number of classes is
the largest label of any split plus one. Samples that do not fit (an image of 0 bytes, none or two
of them, no label) are left out, listed in the sidecars and in `quarantine.jsonl`, and an error if
they are many, by --max-unreadable.

A sample is a run of members with the same name up to the first dot, as webdataset has it; its image
is the member jpg, jpeg, png or webp, its label the integer in the member cls. --image and --label
name other members, or a field of a JSON member; --keys-with-dots takes names up to their last dot.
What was given is recorded in `_info.json` and the sidecars, and an index that is made again is made
so.

Shards at a URL are fetched one after the other, each whole, into the folder for temporary files
(TMPDIR), and removed again; ROOT is any folder that fsspec can list (s3://, gs://,
hf://datasets/timm/imagenet-1k-wds), or an address of the web: there the shards are named as
webdataset names them, with braces, unless an `_info.json` lies in that folder. What is written goes
beside the shards if that can be written, else to FOLDER, whose `_info.json` then says in
"shards_at" where they are. A command that was stopped goes on after the shards it has read; until
all are, their index rows wait in `<shard>.rows.npy`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.command import Parser, add_max_unreadable_argument, add_workers_argument, run
from data_prep.errors import PrepError
from data_prep.read.class_names import NOTHING_ASKED, Asked, choose_layout
from data_prep.read.download import WebShards
from data_prep.write.card_page import write_readme
from data_prep.write.catalogue import some
from data_prep.write.index_shard import Shard, called, index_shard, stem
from data_prep.write.jobs import run_jobs
from data_prep.write.output import Output, temporary_folder
from data_prep.write.plan import Settings, allowed_unreadable
from data_prep.write.writer import write_quarantine
from vit.data.shards import info_file
from vit.data.shards.index_file import first_samples, has_checksums, open_index, save_index
from vit.data.shards.members import printable
from vit.data.shards.tar import describe_ignored
from vit.data.storage.http_request import on_the_web
from vit.system import files
from vit.system.files import ShardError
from vit.system.urls import bare, did_you_mean, expand_braces, resolve, shown

SPLIT_NAMES = ("train", "training", "val", "valid", "validation", "test", "dev")


# ---- which shards --------------------------------------------------------------------------------


def split_of(filename: str) -> str | None:
    """The split in a shard's name: a usual name between dashes, else the part in front of the
    number; None without one."""
    *parts, number = filename.removesuffix(".tar").split("-")
    usual = [part for part in parts if part.lower() in SPLIT_NAMES]
    return (
        usual[0]
        if usual
        else parts[-1]
        if parts and number.isdecimal() and parts[-1].isalpha()
        else None
    )


def group_by_split(names: list[str], root: str, split: str | None = None) -> dict[str, list[str]]:
    """File names of each split, sorted; all in `split` if given. Raises PrepError if there are
    none, or their names do not fit."""
    if not names:
        raise PrepError(
            f"{root}: no .tar files; expected <split>-00000.tar or <anything>-<split>-00000.tar"
        )
    said = {name: split_of(name) for name in sorted(names)}
    if split is None and (unclear := [name for name, found in said.items() if found is None]):
        raise PrepError(
            f"{root}: no split in the name of {some(unclear)}; if they are all of one split, as"
            " img2dataset's 00000.tar, say which: --split train; else rename to <split>-00000.tar,"
            " or move away what is no shard"
        )
    if split and (others := [name for name, found in said.items() if found not in (None, split)]):
        raise PrepError(
            f"{root}: --split {split}, but another split is in the name of {some(others)}"
        )
    splits: dict[str, list[str]] = {}
    for name, found in said.items():
        splits.setdefault(split or str(found), []).append(name)
    return splits


def locate(roots: list[str]) -> tuple[Output | WebShards, list[str] | None]:
    """The place that `roots` names, and the names of its shards if they are given one by one.
    Raises PrepError."""
    urls = [
        url for root in roots for url in (expand_braces(resolve(root)) if "://" in root else [root])
    ]
    make = WebShards if on_the_web(urls[0]) else Output
    said = [re.fullmatch(r"([^?]*://[^?]*)/([^/?]+\.tar)(\?.*)?", url) for url in urls]
    if len(urls) == 1 and not said[0]:
        return make(urls[0]), None
    if strange := [shown(url) for url, found in zip(urls, said, strict=True) if not found]:
        raise PrepError(
            f"{some(strange)}: expected one folder, or URLs of shards, which end in .tar"
        )
    shards_of = [(f"{found[1]}{found[3] or ''}", found[2]) for found in said if found]
    folders = {folder for folder, _ in shards_of}
    if len(folders) > 1:
        raise PrepError(
            f"shards of several folders ({some(sorted(map(shown, folders)))}); a data set lies in"
            " one: index each for itself"
        )
    return make(folders.pop()), [name for _, name in shards_of]


# ---- all shards ----------------------------------------------------------------------------------


def index(
    roots: list[str],
    workers: int = 1,
    out: str | None = None,
    split: str | None = None,
    asked: Asked = NOTHING_ASKED,
    max_unreadable: float = Settings().max_unreadable,
) -> None:
    """Write what is missing beside the tars of a folder, or to `out`. Raises PrepError or
    ShardError; never alters a tar.

    roots: one folder, one URL of a folder, or URLs of tars, braces allowed. split: of all shards,
        where their names tell none.
    max_unreadable: part of the samples that may be unfit.
    """
    source, names = locate(roots)
    output = _choose_output(source, out)
    theirs, ours = _read_infos(source, output, names is not None)
    if theirs is not None and names is None:
        splits = {
            name: list(described["filenames"]) for name, described in theirs["splits"].items()
        }
        if split and set(splits) != {split}:
            raise PrepError(
                f"{source}: --split {split}, but its _info.json has {', '.join(splits)}"
            )
    else:
        splits = group_by_split(_listed(source) if names is None else names, str(source), split)
    _compare_lists(output, ours, splits)
    split_by_tar = {
        name: split for split, names_of_split in splits.items() for name in names_of_split
    }
    tars = list(split_by_tar)
    _check_names(source, tars)
    first_tar = source.local / tars[0] if isinstance(source, Output) and source.local else None
    layout, class_names = choose_layout(
        asked, ours or theirs, str(output if ours else source), first_tar
    )

    known = {} if output is source and output.local else _known_rows(output, ours)
    jobs = [
        (
            index_shard,
            Shard(source, output, name, split_by_tar[name], layout, known.get(name)),
            name,
        )
        for name in tars
    ]
    found = run_jobs(jobs, workers, what="reading shards", num_jobs=len(jobs))
    sidecars = {name: found[name][1] for name in tars}
    entries = [entry for sidecar in sidecars.values() for entry in sidecar.get("quarantined", [])]
    _refuse_unfit(sidecars, [entry for entry in entries if "tar_offset" in entry], max_unreadable)
    for info in (theirs, ours):
        if info is not None:
            _compare(output, info, found)
    classes = _classes(theirs if ours is None else ours, class_names, found)

    with output.staging() as folder:
        for name, filenames in splits.items():
            save_index(folder / f"{name}.index.npy", [found[filename][0] for filename in filenames])
            output.publish(folder / f"{name}.index.npy")
            print(
                f"{name}: {sum(len(found[filename][0]) for filename in filenames):,} samples in"
                f" {len(filenames)} shards"
            )
    write_quarantine(output, entries)
    about = (
        classes
        | ({} if output is source else {"shards_at": bare(str(source))})
        | ({"quarantined": len(entries)} if entries else {})
    )
    info = ours or info_file.make_info(
        splits, sidecars, source="index", options=layout.options(), **about
    )
    if ours is None:
        output.write_json("_info.json", info)
    for name in output.sizes().keys() & {f"{stem(tar)}.rows.npy" for tar in tars}:
        output.remove(name)
    write_readme(output, info)
    was_there = ", _info.json was there and fits" if ours is not None else ""
    print(
        f"{output}: indexed, {classes['num_classes']:,}"
        f" {'class' if classes['num_classes'] == 1 else 'classes'}{was_there}"
    )
    if unfit := [entry for entry in entries if "tar_offset" in entry]:
        count = "1 sample that does" if len(unfit) == 1 else f"{len(unfit):,} samples that do"
        print(
            f"left out: {count} not fit, listed in {output}/quarantine.jsonl; the first:"
            f" {_told(unfit[0])}"
        )
    passed_over = sum(
        (Counter(sidecar.get("passed_over", {})) for sidecar in sidecars.values()), Counter[str]()
    )
    if passed_over:
        print(f"note: {describe_ignored(passed_over)}")
    for line in _without_images(classes["num_classes"], found):
        print(line)
    check = (
        f"; check it with: python -m data_prep.verify {output}"
        if output is source and output.local
        else ""
    )
    print(f"train on it with {_settings(output, list(splits))}{check}")


def _told(entry: dict[str, Any]) -> str:
    return printable(f"{entry['file']}: sample {entry['key']!r} {entry['reason']}")


def _refuse_unfit(
    sidecars: dict[str, dict[str, Any]], unfit: list[dict[str, Any]], max_unreadable: float
) -> None:
    """Raise PrepError if more samples do not fit than may be left out, with the share that would
    pass."""
    total = sum(sidecar["num_samples"] for sidecar in sidecars.values()) + len(unfit)
    allowed = allowed_unreadable(max_unreadable, total)
    if len(unfit) > allowed:
        share = math.ceil(1000 * len(unfit) / total) / 1000
        told = "\n  ".join(map(_told, unfit[:20])) + (
            f"\n  and {len(unfit) - 20:,} more" if len(unfit) > 20 else ""
        )
        raise PrepError(
            f"{len(unfit):,} of {total:,} samples do not fit, more than the {allowed:,} that"
            f" --max-unreadable {max_unreadable} allows. Mend them, name other members (--image,"
            f" --label), or have them left out (--max-unreadable {share}):\n  {told}"
        )


def _without_images(
    num_classes: int, found: dict[str, tuple[np.ndarray, dict[str, Any]]]
) -> list[str]:
    """A line about classes that no split has images of: labels that begin with 1, say."""
    counts = np.zeros(num_classes, np.int64)
    for rows, _ in found.values():
        labels = rows["label"][(rows["label"] >= 0) & (rows["label"] < num_classes)]
        counts += np.bincount(labels, minlength=num_classes)
    there = np.flatnonzero(counts)
    empty = [str(label) for label in np.flatnonzero(counts == 0)]
    if not empty or not len(there):
        return []
    which = f"class {empty[0]} has" if len(empty) == 1 else f"{len(empty):,} classes have"
    listed = "" if len(empty) == 1 else f" ({some(empty)})"
    return [
        f"note: labels are {there[0]} to {there[-1]}: {which} no images{listed}; models get an"
        " output for it all the same"
    ]


def _settings(output: Output, splits: list[str]) -> str:
    """What a run has to be told of a data set."""
    train = next((name for name in splits if name.lower().startswith("train")), splits[0])
    val = next((name for name in splits if name != train), None)
    settings = f"data.root={output}"
    settings += f" data.train_split={train}" if train != "train" else ""
    settings += f" data.val_split={val}" if val not in ("val", None) else ""
    return settings if val else f"{settings} (and a split to evaluate on, as data.val_split)"


def _choose_output(source: Output | WebShards, out: str | None) -> Output:
    """Where the index goes, made and writable. Raises PrepError."""
    if isinstance(source, Output) and source.local is not None:
        if out is not None:
            meant = did_you_mean(str(source))
            raise PrepError(
                f"--out {out} is for shards at a URL; the index of a folder ({source}) is written"
                f" beside its shards{meant}"
            )
        if not source.local.is_dir():
            what = "not a folder" if source.local.exists() else "no such folder"
            raise PrepError(
                f"{source}: {what}; expected a folder of tar shards, or"
                f" URLs{did_you_mean(str(source))}"
            )
        return source
    if out is not None:
        output = Output(out)
    elif isinstance(source, Output):
        output = source
    else:
        raise PrepError(
            f"{source}: nothing can be written beside shards on the web; give a folder for their"
            " index with --out"
        )
    try:
        output.make()
    except (PrepError, ShardError) as error:
        raise PrepError(
            f"{error}{'' if out else '. Where nothing can be written, give a folder for the index with --out'}"
        ) from error
    if out is not None and (
        tars := sorted(name for name in output.sizes() if name.endswith(".tar"))
    ):
        raise PrepError(
            f"{output}: holds shards itself ({some(tars)}); choose an empty folder for the index of"
            f" {source}"
        )
    return output


def _read_infos(
    source: Output | WebShards, output: Output, listed: bool
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The `_info.json` beside the shards (not looked for if these are `listed` one by one), and
    that in the output; it may be the same."""
    for place in (source, output):
        if (
            isinstance(place, Output)
            and place.read_json("_writing.json")
            and not place.read_json("_info.json")
        ):
            raise PrepError(
                f"{place}: a writer has not finished here; run its command again, it continues"
            )
    ours = _info(output)
    if output is source:
        return ours, ours
    theirs = None if listed else _info(source)
    if theirs is None and not listed and isinstance(source, WebShards):
        raise PrepError(
            f"{source}: no _info.json there, and the web has no lists of files: name the shards, as"
            f" in '{source}/train-{{0000..0099}}.tar'"
        )
    if ours is not None and bare(ours.get("shards_at", "")) != bare(str(source)):
        raise PrepError(
            f"{output}: holds the index of {ours.get('shards_at', 'other shards')}, not of"
            f" {source}; choose another --out"
        )
    return theirs, ours


def _info(place: Output | WebShards) -> dict[str, Any] | None:
    """The `_info.json` of a place, as checked by `info_file.read_info`."""
    content = place.read_json("_info.json")
    if content is None:
        return None
    with temporary_folder() as folder, called(str(place), folder):
        files.write_json(folder / "_info.json", content)
        info = info_file.read_info(folder)
    for split, described in info["splits"].items():
        if not 0 < len(described.get("filenames", [])) == len(described.get("shard_lengths", [])):
            raise PrepError(
                f"{place}/_info.json: filenames and shard_lengths of split {split!r} do not fit"
                " together; move it away"
            )
    return info


def _listed(source: Output | WebShards) -> list[str]:
    assert isinstance(source, Output)
    return sorted(name for name in source.sizes() if name.endswith(".tar"))


def _check_names(source: Output | WebShards, tars: list[str]) -> None:
    """Raise PrepError for shards that are not there, as far as that can be told at once, and for
    names that lead elsewhere."""
    if isinstance(source, Output):
        there = source.sizes()
        if missing := [name for name in tars if name not in there and source.size(name) < 0]:
            raise PrepError(
                f"{source}: shards are missing: {some(missing)}; copy them again, or correct the"
                " list"
            )
        if source.local is not None:
            return
    if strange := [name for name in tars if not re.fullmatch(r"[^/]+\.tar", name)]:
        raise PrepError(
            f"{source}: {some(strange)} in _info.json: expected names of tars in this very folder"
        )


def _compare_lists(
    output: Output, info: dict[str, Any] | None, splits: dict[str, list[str]]
) -> None:
    there = (
        None
        if info is None
        else {name: list(described["filenames"]) for name, described in info["splits"].items()}
    )
    if there not in (None, splits):
        raise PrepError(
            f"{output}: its _info.json lists other shards than those named here; move it away, or"
            " choose another --out"
        )


def _known_rows(output: Output, info: dict[str, Any] | None) -> dict[str, np.ndarray]:
    """Rows by shard of the index files that an earlier command has written, with checksums, as its
    `_info.json` divides them."""
    known: dict[str, np.ndarray] = {}
    for split, described in ({} if info is None else info["splits"]).items():
        if output.size(f"{split}.index.npy") <= 0:
            continue
        with temporary_folder() as folder, suppress(ValueError):  # what is damaged is made again
            rows = open_index(output.fetch(f"{split}.index.npy", folder))
            pieces = itertools.pairwise(first_samples(described["shard_lengths"]))
            if has_checksums(rows) and len(rows) == sum(described["shard_lengths"]):
                known |= {
                    name: np.array(rows[a:b])
                    for name, (a, b) in zip(described["filenames"], pieces, strict=True)
                }
    return known


def _compare(
    output: Output, info: dict[str, Any], found: dict[str, tuple[np.ndarray, dict[str, Any]]]
) -> None:
    """Raise PrepError listing the shards whose length, size or sha256 is not what `_info.json`
    says."""
    problems = []
    for described in info["splits"].values():
        unknown = [None] * len(described["filenames"])
        recorded = (
            described[key] if described.get(key) else unknown
            for key in ("shard_lengths", "shard_bytes", "shard_sha256")
        )
        for name, length, size, sha256 in zip(described["filenames"], *recorded, strict=True):
            rows, sidecar = found[name]
            if len(rows) != length or size not in (None, sidecar["bytes"]):
                said = f"_info.json says {length}{'' if size is None else f' in {size}'}"
                without = sum("tar_offset" in entry for entry in sidecar.get("quarantined", []))
                also = f" without {without} that do not fit" if without else ""
                problems.append(
                    f"{name} holds {len(rows)} samples{also} in {sidecar['bytes']} bytes, {said}"
                )
            elif sha256 not in (None, sidecar["sha256"]):
                problems.append(
                    f"{name} has the sha256 {sidecar['sha256'][:12]}..., _info.json says"
                    f" {sha256[:12]}..."
                )
    if problems:
        raise PrepError(
            f"{output}: {'; '.join(problems)}. If the tars are right, move _info.json away and run"
            " this again"
        )


def _classes(
    info: dict[str, Any] | None,
    class_names: list[str],
    found: dict[str, tuple[np.ndarray, dict[str, Any]]],
) -> dict[str, Any]:
    """class_names and num_classes, from the `_info.json` that is there as far as it knows them.
    Raises PrepError for a label beyond."""
    largest, name = max((int(rows["label"].max()), name) for name, (rows, _) in found.items())
    known = len(class_names) or (info or {}).get("num_classes")
    if class_names and largest >= len(class_names):
        told = (
            f"labels up to {largest} (in {name}), but {len(class_names):,} class names, which are"
            " those of labels 0 to"
        )
        raise PrepError(f"{told} {len(class_names) - 1}: name all classes, in the order of labels")
    if known is None and largest >= (num_samples := sum(len(rows) for rows, _ in found.values())):
        told = (
            f"a label {largest:,} (in {name}) would make {largest + 1:,} classes of {num_samples:,}"
            " samples"
        )
        raise PrepError(
            f"{told}: labels count from 0; correct it, name another member (--label), or name all"
            " classes (--classes FILE)"
        )
    return {"class_names": class_names, "num_classes": known or largest + 1}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser("python -m data_prep.index", __doc__)
    parser.add_argument(
        "root",
        nargs="+",
        metavar="ROOT",
        help="folder of tar shards, its URL, or URLs of shards (quote the braces)",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="for shards at a URL: where the index goes if not beside them",
    )
    parser.add_argument(
        "--split",
        metavar="NAME",
        help="split of all shards, where their names tell none (00000.tar)",
    )
    members = parser.add_argument_group("members of a sample")
    members.add_argument(
        "--image",
        metavar="SUFFIX",
        help="the image's member, as image.jpg; several, one a sample, as 'jpg;png'",
    )
    members.add_argument(
        "--label",
        metavar="SUFFIX",
        help="the label's: a text member, as label.cls, or a JSON field, as json:label",
    )
    members.add_argument(
        "--keys-with-dots",
        action="store_true",
        help="a key ends at the last dot of a name, not at the first",
    )
    members.add_argument(
        "--classes",
        type=Path,
        metavar="FILE",
        help="class names in the order of labels: one a line, or JSON",
    )
    add_max_unreadable_argument(parser)
    add_workers_argument(parser)

    def command(args: argparse.Namespace) -> None:
        asked = Asked(args.image, args.label, args.keys_with_dots, args.classes)
        index(args.root, args.workers, args.out, args.split, asked, args.max_unreadable)

    return run(command, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
