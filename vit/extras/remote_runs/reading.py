"""What reads a run at a URL, without the lease: a copy of what is asked for, in the cache.

    launch/eval.py, predict, export, init.checkpoint   the weights that have come furthest
    launch/report.py, replay, samples                  the same, record, settings, predictions,
                                                       losses of images

Files that are in the copy already, in the version that is at the URL, are not fetched again. The
run may go on meanwhile: what it has removed in between is looked for once more.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from vit.data.shards.stores import Version
from vit.data.storage.http import Refused
from vit.data.storage.object_store import ObjectStore
from vit.extras.remote_runs.copying import (
    Copy,
    bring,
    bring_checkpoint,
    complete_in,
    info_name,
    plain_names,
    remove_stale_checkpoints,
)
from vit.extras.remote_runs.lease import LEASE_FILE
from vit.extras.remote_runs.place import store_at
from vit.extras.remote_runs.record_parts import parts_in, read_record
from vit.run_folder import (
    CHECKPOINTS,
    INFO_FILE,
    METRICS_FILE,
    REPORT_FOLDER,
    cache_of,
    weights_file,
)
from vit.system.files import replacing

PATIENCE_S = 60.0
"""For a store that does not answer somebody who waits for a picture."""
NUM_LOOKS = 3
READ = (
    *("weights/last", "weights/config.json", "config.yaml", "predictions.npz", "samples/"),
    "wandb_id",
)
OF_WEIGHTS = ("weights/last", "weights/config.json")


def local_run(url: str, only_weights: bool = False) -> Path:
    """Return a folder with a copy of what is read of the run at `url`.

    The URL may also be that of a checkpoint, or of one file. only_weights: fetch only them and the
    record. Raises ValueError if the URL holds neither, or the store cannot be used.
    """
    store = store_at(url, PATIENCE_S, "")
    folder = cache_of(url, "fetched")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:
        with suppress(OSError):  # a file system without locks: files are replaced as a whole anyway
            fcntl.flock(lock, fcntl.LOCK_EX)
        for look in range(1, NUM_LOOKS + 1):
            try:
                return _fetch(store, folder, url, OF_WEIGHTS if only_weights else READ)
            except FileNotFoundError as error:
                if look == NUM_LOOKS:
                    raise ValueError(f"{store}: {error}") from None
            except OSError as error:
                raise ValueError(
                    f"{folder}: cannot be written ({error.strerror}): free some space, or set"
                    " TMPDIR"
                ) from None
    raise AssertionError("unreachable")


def newest_info(url: str) -> Path:
    """Return a folder with the `checkpoint.json` of the run's complete checkpoints, and no
    tensors."""
    store = store_at(url, PATIENCE_S)
    folder = cache_of(url, "infos")
    listing = store.list_below()
    folder.mkdir(parents=True, exist_ok=True)
    copy = Copy(folder, url)
    copy.load()
    kept = complete_in(listing)
    bring(store, {info_name(name): listing[info_name(name)] for name in kept}, copy, url)
    remove_stale_checkpoints(folder, kept)
    copy.save()
    return folder


def is_in_use(url: str) -> bool | None:
    """Return False if no job has the run, else None: whether its job lives is not visible here."""
    store = store_at(url, PATIENCE_S, "")
    try:
        store.stat(LEASE_FILE)
    except FileNotFoundError:
        return False
    except ValueError:
        pass
    return None


def publish_report(url: str, folder: Path) -> str:
    """Upload the report that was made in `folder`; return what to tell people."""
    store = store_at(url, PATIENCE_S, "")
    report = folder / REPORT_FOLDER
    try:
        for path in sorted(report.rglob("*")):
            if path.is_file():
                store.upload(path, path.relative_to(folder).as_posix())
    except (Refused, FileNotFoundError) as error:
        return f"not uploaded: {error}"
    return f"uploaded to {store}/{REPORT_FOLDER}/"


def _fetch(store: ObjectStore, folder: Path, url: str, read: tuple[str, ...]) -> Path:
    """Bring what is read, and return the path of it; FileNotFoundError if some of it is gone."""
    listing = store.list_below()
    if not listing:
        raise ValueError(f"{store}: there is nothing: give the URL of a run, or of a file")
    if "" in listing:
        folder.parent.mkdir(parents=True, exist_ok=True)
        store.download("", folder)
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    copy = Copy(folder, url)
    copy.load()
    if INFO_FILE in listing:  # a checkpoint
        bring(store, listing, copy, str(store))
        copy.save()
        return folder
    wanted = {name: listing[name] for name in plain_names(listing) if name.startswith(read)}
    if not (wanted or parts_in(listing) or complete_in(listing)):
        raise ValueError(
            f"{store}: neither a run (with {CHECKPOINTS}/ or weights/) nor a checkpoint: there are"
            f" {', '.join(sorted(listing)[:3])}"
        )
    bring(store, wanted, copy, str(store))
    for name in set(plain_names(copy.names())) - listing.keys():
        (folder / name).unlink(missing_ok=True)
        copy.forget(name)
    with replacing(folder / METRICS_FILE) as file:
        file.write(read_record(store, listing))
    kept = _bring_newer_checkpoint(store, listing, copy)
    remove_stale_checkpoints(folder, kept)
    copy.save()
    return folder


def _bring_newer_checkpoint(
    store: ObjectStore, listing: Mapping[str, Version], copy: Copy
) -> list[str]:
    """Bring the newest checkpoint, if it has come further than the weights; return its name."""
    newest = complete_in(listing)[:1]
    if not newest or int(newest[0].removeprefix("step_")) <= _step_of_weights(copy.folder):
        return []

    def on_damage(folder: str, problem: str) -> None:
        print(f"{store}/{CHECKPOINTS}/{folder}: {problem}: passed over", file=sys.stderr)

    found = bring_checkpoint(store, listing, copy, on_damage)
    return [found] if found else []


def _step_of_weights(folder: Path) -> int:
    """Return the step of the last weights, -1 without any."""
    for averaged in (True, False):
        path = weights_file(folder, "last", averaged)
        if os.path.exists(path):
            try:
                with safe_open(path, framework="numpy") as file:
                    return int(file.metadata()["step"])
            except (SafetensorError, OSError, KeyError, TypeError, ValueError):
                return -1
    return -1
