"""What `data_prep.index` starts from: the shards, the output, and the existing records."""

from __future__ import annotations

import itertools
import re
from contextlib import suppress
from typing import Any

import numpy as np

from data_prep.errors import PrepError, some
from data_prep.read.download import WebShards
from data_prep.write.index_shard import renamed_errors
from data_prep.write.output import Output, temporary_folder
from vit.data.shards import info_file
from vit.data.shards.index_file import first_samples, has_checksums, open_index
from vit.data.storage.http_request import on_the_web
from vit.system import files
from vit.system.files import ShardError
from vit.system.redact import shown
from vit.system.urls import bare, expand_braces, resolve

SPLIT_NAMES = ("train", "training", "val", "valid", "validation", "test", "dev")


def split_of(filename: str) -> str | None:
    """The split in a shard's name: a usual name between dashes, else the part before the number."""
    *parts, number = filename.removesuffix(".tar").split("-")
    usual = [part for part in parts if part.lower() in SPLIT_NAMES]
    if usual:
        return usual[0]
    return parts[-1] if parts and number.isdecimal() and parts[-1].isalpha() else None


def group_by_split(names: list[str], root: str, split: str | None = None) -> dict[str, list[str]]:
    """File names of each split, sorted; all in `split` if given.

    Raises PrepError if there are none, or their names do not fit.
    """
    if not names:
        raise PrepError(
            f"{root}: no .tar files; expected <split>-00000.tar or <anything>-<split>-00000.tar"
        )
    found = {name: split_of(name) for name in sorted(names)}
    if split is None and (unclear := [name for name in found if found[name] is None]):
        raise PrepError(
            f"{root}: no split in the name of {some(unclear)}; if they are all of one split, as"
            " img2dataset's 00000.tar, say which: --split train; else rename to <split>-00000.tar,"
            " or move away what is not a shard"
        )
    if split and (others := [name for name in found if found[name] not in (None, split)]):
        raise PrepError(
            f"{root}: --split {split}, but another split is in the name of {some(others)}"
        )
    splits: dict[str, list[str]] = {}
    for name in found:
        splits.setdefault(split or str(found[name]), []).append(name)
    return splits


def locate(roots: list[str]) -> tuple[Output | WebShards, list[str] | None]:
    """The place that `roots` names, and the names of its shards if they are listed one by one."""
    urls = [
        url for root in roots for url in (expand_braces(resolve(root)) if "://" in root else [root])
    ]
    make = WebShards if on_the_web(urls[0]) else Output
    matches = {url: re.fullmatch(r"([^?]*://[^?]*)/([^/?]+\.tar)(\?.*)?", url) for url in urls}
    if len(urls) == 1 and not matches[urls[0]]:
        return make(urls[0]), None
    if strange := [shown(url) for url, match in matches.items() if not match]:
        raise PrepError(
            f"{some(strange)}: expected one folder, or URLs of shards, which end in .tar"
        )
    places = [(f"{match[1]}{match[3] or ''}", match[2]) for url in urls if (match := matches[url])]
    folders = {folder for folder, _ in places}
    if len(folders) > 1:
        raise PrepError(
            f"shards of several folders ({some(sorted(map(shown, folders)))}); a data set is in"
            " one: index each by itself"
        )
    return make(folders.pop()), [name for _, name in places]


def choose_output(source: Output | WebShards, out: str | None) -> Output:
    """Where the index goes, made and writable. Raises PrepError."""
    if isinstance(source, Output) and source.local is not None:
        if out is not None:
            raise PrepError(
                f"--out {out} is for shards at a URL; the index of a folder ({source}) is written"
                " next to its shards"
            )
        if not source.local.is_dir():
            what = "not a folder" if source.local.exists() else "no such folder"
            raise PrepError(f"{source}: {what}; expected a folder of tar shards, or URLs")
        return source
    if out is None and isinstance(source, WebShards):
        raise PrepError(
            f"{source}: nothing can be written next to shards on the web; give a folder for their"
            " index with --out"
        )
    output = Output(out) if out is not None else source
    assert isinstance(output, Output)
    try:
        output.make()
    except (PrepError, ShardError) as error:
        hint = ". Where nothing can be written, give a folder for the index with --out"
        raise PrepError(f"{error}{'' if out else hint}") from error
    if out is not None and (tars := list_tars(output)):
        raise PrepError(
            f"{output}: holds shards itself ({some(tars)}); choose an empty folder for the index of"
            f" {source}"
        )
    return output


def read_infos(
    source: Output | WebShards, output: Output, listed: bool
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The `_info.json` next to the shards, and that in the output; they may be the same.

    listed: the shards were given one by one, so the first is not looked for.
    """
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
    """The `_info.json` of a place, checked by `info_file.read_info`; None if there is none."""
    content = place.read_json("_info.json")
    if content is None:
        return None
    with temporary_folder() as folder, renamed_errors(str(place), folder):
        files.write_json(folder / "_info.json", content)
        info = info_file.read_info(folder)
    for split, described in info["splits"].items():
        if not 0 < len(described.get("filenames", [])) == len(described.get("shard_lengths", [])):
            raise PrepError(
                f"{place}/_info.json: filenames and shard_lengths of split {split!r} do not fit"
                " together; move it away"
            )
    return info


def tars_by_split(info: dict[str, Any]) -> dict[str, list[str]]:
    """File names of each split in an `_info.json`."""
    return {name: list(described["filenames"]) for name, described in info["splits"].items()}


def list_tars(source: Output | WebShards) -> list[str]:
    """The tars in a folder."""
    assert isinstance(source, Output)
    return sorted(name for name in source.sizes() if name.endswith(".tar"))


def check_names(source: Output | WebShards, tars: list[str]) -> None:
    """Raise PrepError for missing shards, as far as can be seen at once, and for foreign names."""
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


def known_rows(output: Output, info: dict[str, Any] | None) -> dict[str, np.ndarray]:
    """Rows, by shard, of the index files with checksums that an earlier command has written."""
    known: dict[str, np.ndarray] = {}
    for split, described in ({} if info is None else info["splits"]).items():
        if output.size(f"{split}.index.npy") <= 0:
            continue
        with temporary_folder() as folder, suppress(ValueError):  # what is damaged is made again
            rows = open_index(output.fetch(f"{split}.index.npy", folder))
            firsts = first_samples(described["shard_lengths"])
            if has_checksums(rows) and len(rows) == firsts[-1]:
                for name, (start, stop) in zip(
                    described["filenames"], itertools.pairwise(firsts), strict=True
                ):
                    known[name] = np.array(rows[start:stop])
    return known


def compare_shards(
    output: Output, info: dict[str, Any], found: dict[str, tuple[np.ndarray, dict[str, Any]]]
) -> None:
    """Raise PrepError listing shards that differ from `_info.json` in length, size or sha256."""
    problems = []
    for described in info["splits"].values():
        names = described["filenames"]
        lengths, sizes, hashes = (
            described.get(key) or [None] * len(names)
            for key in ("shard_lengths", "shard_bytes", "shard_sha256")
        )
        for name, length, size, sha256 in zip(names, lengths, sizes, hashes, strict=True):
            rows, sidecar = found[name]
            if len(rows) != length or size not in (None, sidecar["bytes"]):
                left_out = sum("tar_offset" in entry for entry in sidecar.get("quarantined", []))
                problems.append(
                    f"{name} holds {len(rows)} samples"
                    f"{f' without {left_out} that do not fit' if left_out else ''} in"
                    f" {sidecar['bytes']} bytes, _info.json says {length}"
                    f"{'' if size is None else f' in {size}'}"
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


def choose_classes(
    info: dict[str, Any] | None,
    class_names: list[str],
    found: dict[str, tuple[np.ndarray, dict[str, Any]]],
) -> dict[str, Any]:
    """class_names and num_classes, from the existing `_info.json` as far as it has them.

    Raises PrepError for a label beyond.
    """
    largest, name = max((int(rows["label"].max()), name) for name, (rows, _) in found.items())
    known = len(class_names) or (info or {}).get("num_classes")
    if class_names and largest >= len(class_names):
        raise PrepError(
            f"labels up to {largest} (in {name}), but {len(class_names):,} class names, which are"
            f" those of labels 0 to {len(class_names) - 1}: name all classes, in the order of"
            " labels"
        )
    num_samples = sum(len(rows) for rows, _ in found.values())
    if known is None and largest >= num_samples:
        raise PrepError(
            f"a label {largest:,} (in {name}) would make {largest + 1:,} classes of"
            f" {num_samples:,} samples: labels count from 0; correct it, name another member"
            " (--label), or name all classes (--classes FILE)"
        )
    return {"class_names": class_names, "num_classes": known or largest + 1}
