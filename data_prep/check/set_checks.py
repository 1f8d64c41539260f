"""Checks of a finished data set's records: folder, sidecars, index files and quarantine.

`_info.json` says which shards there are; everything else is compared with it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.check.data_set import DataSet, Part, tars_of
from data_prep.check.shard_checks import WRITE_AGAIN, Found, counted
from data_prep.write.card_page import altered_card, readme
from data_prep.write.plan import fingerprint
from vit.data.shards.index_file import has_checksums, open_index
from vit.data.shards.info_file import info_sha256, read_sidecar, sidecars_sha256
from vit.data.shards.records import is_sidecar
from vit.data.storage.http import Version
from vit.data.storage.remote import RemoteFolder
from vit.system.files import ShardError, read_json


def check_folder(data: DataSet) -> Iterator[Found]:
    """Compare folder, `_info.json`, sidecars and index files.

    Fills each part's `sidecars`, `present` and `index`.
    """
    listed = Counter(tars_of(data.info))
    # earlier versions recorded no hashes
    sealed = "info_sha256" in data.info or any(
        "sidecars_sha256" in part.described for part in data.parts
    )
    if sealed:
        yield from _check_sealed(data)
    for name, count in listed.items():
        if count > 1:
            yield Found(
                "files", "_info.json", f"lists {name} {count} times; restore it from its source"
            )
    for path in sorted(data.root.rglob("*.tar")):
        if (name := str(path.relative_to(data.root))) not in listed:
            yield Found(
                "files",
                name,
                "not in _info.json, and tools that take all tars of a folder would read it; move it"
                " away",
            )
    for path in sorted(data.root.iterdir()):
        is_temporary = path.name.endswith(".tmp") or path.name in ("_writing.json", "_spool")
        if is_temporary or path.name.startswith("_catalogue-"):
            yield Found(
                "files",
                path.name,
                "left over from a writer; delete it, unless one is at work here",
                fails=False,
            )
        elif _is_stray(path, data.info["splits"], listed):
            yield Found(
                "files",
                path.name,
                "describes no split or shard that is in _info.json; delete it",
                fails=False,
            )
    if data.tars_at is None:
        sizes = {name: _stat(data.root / name) for name in listed}
    else:
        versions = RemoteFolder(data.tars_at).stats(list(listed))
        sizes = {
            name: version.size if isinstance(version, Version) else version
            for name, version in zip(listed, versions, strict=True)
        }
    for part in data.parts:
        total = part.described.get("num_samples")
        if part.num_samples != total:
            yield Found(
                "files",
                "_info.json",
                f"{part.name}: num_samples is {total}, shard_lengths add up to {part.num_samples}",
            )
        for number, name in enumerate(part.filenames):
            yield from _check_recorded(data, part, number, sizes[name])
        yield from _check_sidecars(data, part)
        yield from _open_index(data, part)


def _check_sealed(data: DataSet) -> Iterator[Found]:
    """The hashes of `_info.json` and the card, and Hugging Face's README.md."""
    if data.info.get("info_sha256") != info_sha256(data.info):
        yield Found(
            "files",
            "_info.json",
            "altered: its content is not the one whose hash it holds; restore it from its source",
        )
    if not data.ours:
        return
    command = f"run `python -m data_prep.card {data.shown}`, which writes"
    if not (data.root / "dataset.md").exists():
        yield Found("files", "dataset.md", f"absent; {command} it")
    elif reason := altered_card(data.root):
        yield Found("files", "dataset.md", f"{reason}; {command} both again")
    card = data.root / "README.md"
    if card.exists() and card.read_bytes() != readme(data.info).encode():
        yield Found(
            "files",
            "README.md",
            f"not as `python -m data_prep.card {data.shown}` writes it where there is none, and"
            " Hugging Face finds the shards by it; delete it and run that, unless it was altered"
            " on purpose",
            fails=False,
        )


def _is_stray(path: Path, splits: Container[str], tars: Container[str]) -> bool:
    """Whether a file is an index, `.idx` or sidecar of something that is not in `_info.json`."""
    if path.name.endswith(".index.npy"):
        return path.name.removesuffix(".index.npy") not in splits
    if path.suffix not in (".idx", ".json") or path.with_suffix(".tar").name in tars:
        return False
    with suppress(ShardError):  # not a JSON file of ours
        return path.suffix == ".idx" or is_sidecar(read_json(path) or {})
    return False


def _stat(path: Path) -> int | str:
    """Bytes of a file, or why they are unknown."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return str(error.strerror)


def _check_sidecars(data: DataSet, part: Part) -> Iterator[Found]:
    """The sidecars of a split together: their hash, their plan, and what was listed."""
    sidecars = [part.sidecars[name] for name in part.filenames if name in part.sidecars]
    if len(sidecars) < len(part.filenames):
        return  # reported already
    found = sidecars_sha256(sidecars)
    if part.described.get("sidecars_sha256", found) != found:
        yield Found(
            "files",
            part.name,
            "sidecars are altered: their content is not the one whose hash is in _info.json;"
            " restore them",
        )
    listed = (data.info.get("listed") or {}).get(part.name)
    total = part.num_samples + len(part.quarantined())
    if listed not in (None, total):
        yield Found(
            "files",
            "_info.json",
            f"listed is {listed} for {part.name}, shards and quarantine have {total}",
        )
    if not data.ours:
        return
    plan = fingerprint(data.info)
    others = [sidecar["filename"] for sidecar in sidecars if sidecar.get("plan") != plan]
    without = [name for name in part.filenames if part.sha256_of(name) is None]
    for names, text in (
        (
            others,
            "source, options or catalogue in _info.json are not those that they were written by"
            " (plan); restore what is wrong",
        ),
        (
            without,
            "no sha256 is recorded, so their bytes cannot be compared; restore _info.json and the"
            " sidecars",
        ),
    ):
        if names:
            where = f"{counted(len(names), 'shard')}, the first is {names[0]}"
            yield Found("files", part.name, f"{where}: {text}")


def _check_recorded(data: DataSet, part: Part, number: int, size: int | str) -> Iterator[Found]:
    """One shard's size and sidecar against `_info.json`."""
    name = part.filenames[number]
    recorded: dict[str, Any] = {"filename": name, "num_samples": part.lengths[number]}
    for key in ("bytes", "sha256"):
        if part.described.get(f"shard_{key}"):
            recorded[key] = part.described[f"shard_{key}"][number]
    if isinstance(size, str):
        yield Found("files", name, f"{size}; {WRITE_AGAIN}")
    else:
        part.num_bytes += size
        missing = recorded.get("bytes", size) - size
        if missing == 0:
            part.present.append(number)
        else:
            way = "shorter" if missing > 0 else "longer"
            yield Found(
                "files",
                name,
                f"{size:,} bytes, _info.json says {recorded['bytes']:,}: {abs(missing):,} bytes"
                f" {way}; its contents were not checked; {WRITE_AGAIN}",
            )
    path = (data.root / name).with_suffix(".json")
    try:
        sidecar = read_sidecar(data.root / name)
    except ShardError as error:
        yield Found("files", path.name, str(error).removeprefix(f"{path}: "))
        return
    if sidecar is None:
        remedy = "repeat the command that wrote the data set" if data.ours else data.index_it
        yield Found("files", path.name, f"absent; {remedy}")
        return
    part.sidecars[name] = sidecar
    for key, value in recorded.items():
        if sidecar[key] != value:
            text = f"{key} is {sidecar[key]!r}, _info.json says {value!r}"
            yield Found("files", path.name, f"{text}; restore the one that is wrong")


def _open_index(data: DataSet, part: Part) -> Iterator[Found]:
    path = data.root / f"{part.name}.index.npy"

    def found(text: str, fails: bool = True) -> Found:
        return Found("indexes", path.name, f"{text}{data.index_it}", fails=fails)

    try:
        index = open_index(path)
    except FileNotFoundError:
        yield found("absent; ")
        return
    except (ValueError, OSError, EOFError) as error:
        yield found(f"unreadable ({error}); delete it and ")
        return
    if not has_checksums(index):
        yield found("without checksums of images (an earlier version wrote it); ", fails=False)
    if len(index) != part.num_samples:
        total = f"{len(index):,} rows, _info.json has {part.num_samples:,} samples"
        yield found(f"{total}; delete it and ")
        return
    part.index = index
    end = int(index.offset) + index.nbytes if isinstance(index, np.memmap) else 0
    if (size := path.stat().st_size) != end:
        yield found(f"{counted(size - end, 'byte')} behind its last row; delete it and ")


def check_quarantine(data: DataSet) -> Iterator[Found]:
    """`quarantine.jsonl` and the totals in `_info.json` against the sidecars."""
    path = data.root / "quarantine.jsonl"
    recorded = Counter(json.dumps(entry) for part in data.parts for entry in part.quarantined())
    if path.exists():
        yield from _compare_quarantine(path, recorded)
    elif recorded:
        images = counted(recorded.total(), "unreadable image")
        yield Found(
            "quarantine",
            path.name,
            f"absent, but the sidecars have {images}; repeat the command that wrote the data set",
        )
    for part in data.parts if data.ours else []:
        dealt = [
            sidecar["num_samples"] + len(sidecar.get("quarantined", []))
            for sidecar in part.sidecars.values()
        ]
        if dealt and max(dealt) - min(dealt) > 1:
            yield Found(
                "quarantine",
                part.name,
                f"shards have {min(dealt):,} to {max(dealt):,} samples with the quarantined ones,"
                " but they were dealt evenly: some are in neither shard nor sidecar",
            )
    changed = sum((part.changed() for part in data.parts), Counter[str]())
    for key, found in (("quarantined", recorded.total()), ("changed", dict(changed))):
        if data.info.get(key, type(found)()) != found:
            text = f"{key} is {data.info.get(key)}, the sidecars have {found}"
            yield Found("quarantine", "_info.json", f"{text}; restore the one that is wrong")


def _compare_quarantine(path: Path, recorded: Counter[str]) -> Iterator[Found]:
    listed: Counter[str] = Counter()
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            _named(line)
            listed[json.dumps(json.loads(line))] += 1
        except (ValueError, KeyError, TypeError):
            yield Found(
                "quarantine",
                path.name,
                f"line {number} is no JSON object with split and key: {line[:60]!r}",
            )
    for entry in sorted(recorded - listed):
        yield Found(
            "quarantine", path.name, f"{_named(entry)} is not in it, but in its shard's sidecar"
        )
    for entry in sorted(listed - recorded):
        yield Found("quarantine", path.name, f"{_named(entry)} is in it, but in no sidecar")


def _named(line: str | bytes) -> str:
    """Split and key of an entry."""
    entry = json.loads(line)
    return f"{entry['split']} {entry['key']}"
