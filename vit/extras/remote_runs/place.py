"""Open the store of a run at a URL.

    run.dir=runs/demo              a plain folder, which needs no store
    run.dir=s3://bucket/runs/demo  the working copy is `run.local_dir`, by default
                                   <cache>/runs/<hash of the URL>/demo
    run.dir=file:///mnt/b/demo     the same, for a mounted bucket without locks or renames

Training, evaluation and reports use a local folder, and `vit.extras.remote_runs.store` uploads its
changes to the URL. The URL may contain environment variables (`${NAME}`) and credentials. Messages
omit credentials.
"""

from __future__ import annotations

import secrets

from vit.data.storage.object_store import ObjectStore
from vit.system.redact import shown
from vit.system.retry import RetryPolicy
from vit.system.urls import on_the_web, resolve


def store_at(url: str, patience_s: float, setting: str = "run.dir=") -> ObjectStore:
    """Return the store at `url`, which may contain environment variables as `${NAME}`.

    setting: the setting or flag with the URL, for messages. Raises ValueError for a web server,
    which is read-only.
    """
    resolved = resolve(url)
    if on_the_web(resolved):
        raise ValueError(
            f"{setting}{shown(url)}: a web server cannot store runs: pass a folder, or a store's"
            " URL, such as s3://bucket/runs/name"
        )
    return ObjectStore(resolved, RetryPolicy(patience_s))


def try_store(url: str) -> str:
    """Write a test file at `url` and remove it. Return the URL in the form shown in messages.

    Raises ValueError if the store refuses the file or does not answer. Requests are not retried.
    """
    store = store_at(url, 0.0)
    store.try_writing(f".check.{secrets.token_hex(4)}")
    return str(store)
