"""Download a run at a URL into the cache for reading, without acquiring the lease.

    launch/eval.py, predict, export, init.checkpoint   the weights of the latest step
    launch/report.py, replay, samples                  also metrics, settings, predictions and
                                                       losses of samples

Files whose current version is already in the cache are not downloaded again. The run can continue
during the download. If a file is removed during the download, the listing is read again.
"""

import fcntl
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from vit.checkpoint.seal import INFO_FILE
from vit.data.shards.reader import Version
from vit.data.storage.http import Refused
from vit.data.storage.object_store import ObjectStore
from vit.run_folder.copying import (
    LEASE_FILE,
    Copy,
    bring,
    bring_checkpoint,
    complete_in,
    info_name,
    parts_in,
    plain_names,
    read_record,
    remove_stale_checkpoints,
    store_at,
)
from vit.run_folder.paths import CHECKPOINTS, METRICS_FILE, REPORT_FOLDER, weights_file
from vit.run_folder.place import cache_of
from vit.system.files import replacing
from vit.system.urls import is_url

PATIENCE_S = 60.0
"""The maximum time to retry if a store does not answer. The timeout is short because a user is
waiting."""
NUM_LOOKS = 3
READ = (
    "weights/last",
    "weights/config.json",
    "config.yaml",
    "predictions.npz",
    "samples/",
    "wandb_id",
)
OF_WEIGHTS = ("weights/last", "weights/config.json")


def local_copy(run: object, only_weights: bool = False) -> Path:
    """Return `run` if it is a path. If it is a URL, download the run and return the local folder.

    only_weights: whether to download only weights and metrics.jsonl. Raises the errors of
    `local_run`.
    """
    return local_run(str(run), only_weights) if is_url(run) else Path(str(run))


def local_run(url: str, only_weights: bool = False) -> Path:
    """Return a folder with a copy of the run at `url`.

    The URL can also point to a checkpoint or a single file. only_weights: whether to download only
    the weights and metrics. Raises ValueError if the URL points to none of these, or if the store
    cannot be used.
    """
    store = store_at(url, PATIENCE_S, "")
    folder = cache_of(url, "fetched")
    folder.parent.mkdir(parents=True, exist_ok=True)

    with open(folder.parent / "lock", "w") as lock:
        with suppress(OSError):
            # Without locks on this file system, replacing whole files is still safe.
            fcntl.flock(lock, fcntl.LOCK_EX)

        read = OF_WEIGHTS if only_weights else READ
        try:
            # A run that continues removes old checkpoints, perhaps after they were listed.
            for _ in range(NUM_LOOKS - 1):
                with suppress(FileNotFoundError):
                    return _fetch(store, folder, url, read)
            return _fetch(store, folder, url, read)
        except FileNotFoundError as error:
            raise ValueError(f"{store}: {error}") from None
        except OSError as error:
            raise ValueError(
                f"{folder}: cannot be written ({error.strerror}): free some space, or set TMPDIR"
            ) from None


def newest_info(url: str) -> Path:
    """Download the `checkpoint.json` of each complete checkpoint, without the tensors.

    Returns a folder with the layout of a run.
    """
    store = store_at(url, PATIENCE_S)
    folder = cache_of(url, "infos")
    listing = store.list_below()
    folder.mkdir(parents=True, exist_ok=True)
    copy = Copy(folder, url)
    copy.load()

    complete = complete_in(listing)
    bring(store, {info_name(name): listing[info_name(name)] for name in complete}, copy, url)
    remove_stale_checkpoints(folder, complete)
    copy.save()
    return folder


def is_in_use(url: str) -> bool | None:
    """Return False if no lease exists, or None otherwise, because the lease holder may be dead."""
    store = store_at(url, PATIENCE_S, "")
    try:
        store.stat(LEASE_FILE)
    except FileNotFoundError:
        return False
    except ValueError:
        pass
    return None


def publish_report(url: str, folder: Path) -> str:
    """Upload the report in `folder`, and return a message for the user."""
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
    """Download the files that `read` selects, and return the path of the copy.

    Raises FileNotFoundError if a file was removed after the listing.
    """
    listing = store.list_below()
    if not listing:
        raise ValueError(f"{store}: found no files at this URL: pass the URL of a run or a file")
    if "" in listing:
        folder.parent.mkdir(parents=True, exist_ok=True)
        store.download("", folder)
        return folder

    folder.mkdir(parents=True, exist_ok=True)
    copy = Copy(folder, url)
    copy.load()
    if INFO_FILE in listing:  # the URL is a checkpoint
        bring(store, listing, copy, str(store))
        copy.save()
        return folder

    versions = {name: listing[name] for name in plain_names(listing) if name.startswith(read)}
    if not any((versions, parts_in(listing), complete_in(listing))):
        raise ValueError(
            f"{store}: neither a run (with {CHECKPOINTS}/ or weights/) nor a checkpoint: it"
            f" contains {', '.join(sorted(listing)[:3])}"
        )

    bring(store, versions, copy, str(store))
    for name in set(plain_names(copy.names())) - listing.keys():
        (folder / name).unlink(missing_ok=True)
        copy.forget(name)
    with replacing(folder / METRICS_FILE) as file:
        file.write(read_record(store, listing))

    remove_stale_checkpoints(folder, _bring_newer_checkpoint(store, listing, copy))
    copy.save()
    return folder


def _bring_newer_checkpoint(
    store: ObjectStore, listing: Mapping[str, Version], copy: Copy
) -> list[str]:
    """Download the newest checkpoint if it is newer than the weights, and return its name."""
    newest = complete_in(listing)[:1]
    if not newest or int(newest[0].removeprefix("step_")) <= _step_of_weights(copy.folder):
        return []

    def on_damage(folder: str, problem: str) -> None:
        print(f"{store}/{CHECKPOINTS}/{folder}: {problem}: skipped", file=sys.stderr)

    name = bring_checkpoint(store, listing, copy, on_damage)
    return [name] if name else []


def _step_of_weights(folder: Path) -> int:
    """Return the step of the last weights, or -1 if no weights exist."""
    for averaged in (True, False):
        path = weights_file(folder, "last", averaged)
        if os.path.exists(path):
            try:
                with safe_open(path, framework="numpy") as file:
                    return int(file.metadata()["step"])
            except (SafetensorError, OSError, KeyError, TypeError, ValueError):
                return -1
    return -1
