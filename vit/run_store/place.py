"""Where a run is: in a folder, or at a URL with a working copy on a disk of this machine.

    run.dir=runs/demo              that folder
    run.dir=s3://bucket/runs/demo  worked on in `run.local_dir`, by default
                                   <cache>/runs/<hash of the URL>/demo
    run.dir=file:///mnt/b/demo     the same: for a mounted bucket, which has no locks and renames

All that trains, reads and draws works in a folder; `vit.run_store.store` keeps the URL equal to it.
The URL is used as the user gave it, with `${NAME}` and logins; its name is `bare`, without them.
"""

from __future__ import annotations

import hashlib
import secrets
from contextlib import suppress
from pathlib import Path

from vit.config.schema import RunConfig
from vit.data.storage.object_store import ObjectStore
from vit.system.files import ShardError
from vit.system.host import default_folder
from vit.system.redact import shown
from vit.system.retry import RetryPolicy
from vit.system.urls import bare, is_url, on_the_web, resolve


def store_at(url: str, patience_s: float, what: str = "run.dir=") -> ObjectStore:
    """Return what keeps the files at `url`, in which `${NAME}` means an environment variable.

    what: the setting or the flag that has the URL. Raises ValueError for one that cannot be written
    to.
    """
    resolved = resolve(url)
    if on_the_web(resolved):
        raise ValueError(
            f"{what}{shown(url)}: a web server keeps no runs: give a folder, or the URL of a store,"
            " such as s3://bucket/runs/name"
        )
    return ObjectStore(resolved, RetryPolicy(patience_s))


def try_store(url: str) -> str:
    """Write a file at `url` and remove it; return how to show the URL. Raises ValueError if that
    is refused, or not answered at once."""
    store = store_at(url, 0.0)
    store.try_writing(f".check.{secrets.token_hex(4)}")
    return str(store)


def local_folder(run: RunConfig) -> Path:
    """Return the folder in which the run is worked on: `run.dir`, or the copy of a URL.

    Raises ValueError if no disk of this machine is known for a copy.
    """
    assert run.dir is not None, "load_config names the run folder"
    if not is_url(run.dir):
        return Path(run.dir)
    return Path(run.local_dir) if run.local_dir is not None else cache_of(run.dir, "runs")


def cache_of(url: str, kind: str) -> Path:
    """Return the folder for a copy of `url` on a disk of this machine, named as the run is.

    kind: "runs", or "fetched" for what is only read. Raises ValueError as `local_folder`.
    """
    name = bare(url).rstrip("/")
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    try:
        place = default_folder()
    except ShardError:
        raise ValueError(
            f"{shown(url)}: no folder on a disk of this machine is known for the run's working"
            " copy: name one with run.local_dir, as /scratch/name, or set TMPDIR"
        ) from None
    with suppress(OSError):  # whoever writes there says what is wrong
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place / kind / digest / name.rpartition("/")[2]
