"""Open a run at a URL and train it in a working copy on a local disk."""

from __future__ import annotations

import sys
from pathlib import Path

from vit.config.schema import Config
from vit.distributed.exit import Interrupted
from vit.distributed.process_group import World
from vit.extras.remote_runs.store import RunStore
from vit.run_folder import Place, RunLock


class StoredPlace(Place):
    """The working copy of a run at a URL. On rank 0, a store uploads the changes."""

    setting = "run.local_dir"

    def __init__(self, folder: Path, store: RunStore | None):
        """Set the folder and the store. store: None on all ranks except rank 0."""
        super().__init__(folder)
        self._store = store

    @property
    def is_lost(self) -> bool:  # type: ignore[override]
        """See `Place`."""
        return self._store is not None and self._store.is_lost

    def lock(self, lock: RunLock) -> None:
        """Acquire the lease and download the files that a resume needs."""
        assert self._store is not None, "only rank 0 locks the run"
        print(f"run folder: {self._store}, with its working copy in {self.folder}", file=sys.stderr)
        self._store.open(lock)
        self.remove_unfinished()

    def check(self) -> None:
        """See `Place`."""
        if self._store is not None:
            self._store.check()

    def push(self) -> float | None:
        """See `Place`."""
        return None if self._store is None else self._store.push()

    def address(self) -> str:
        """See `Place`."""
        return str(self._store)

    def leave(self, error: BaseException | None) -> None:
        """Upload the metrics if an `error` ended the run, and release the lease."""
        if self._store is not None:
            is_urgent = isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted)
            self._store.close(with_record=error is not None, at_once=is_urgent)


def open_place(config: Config, world: World) -> StoredPlace:
    """Open the run at the URL `run.dir`. Every rank must call this function.

    Raises ValueError if the URL is invalid.
    """
    store = world.on_main(lambda: RunStore(config))
    folder = world.broadcast_from_main(lambda: "" if store is None else str(store.folder))
    return StoredPlace(Path(folder), store)
