"""Where a run is: in a folder, or at a URL with a working copy on a disk of this machine.

    run.dir=runs/demo              that folder
    run.dir=s3://bucket/runs/demo  worked on in `run.local_dir`, by default
                                   <cache>/runs/<hash of the URL>/demo
    run.dir=file:///mnt/b/demo     the same: for a mounted bucket, which has no locks and renames

All that trains, reads and draws works in a folder; `vit.extras.remote_runs.store` keeps the URL
equal to it. The URL is used as the user gave it, with `${NAME}` and logins; its name is `bare`,
without them.
"""

from __future__ import annotations

import secrets

from vit.data.storage.object_store import ObjectStore
from vit.system.redact import shown
from vit.system.retry import RetryPolicy
from vit.system.urls import on_the_web, resolve


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
