"""Who opens and leaves a run's place: its folder, or its URL with a working copy.

Every rank calls `open_place` and `put_start`; the main rank alone talks to a store.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from vit.config.schema import Config
from vit.ranks.distributed import World
from vit.ranks.exit import Interrupted
from vit.run.folder import RunLock, remove_unfinished
from vit.run_store.place import is_url
from vit.run_store.store import RunStore


def open_place(config: Config, world: World) -> tuple[Path, RunStore | None]:
    """Return the run's folder, and on the main rank of a run at a URL what keeps the URL equal to
    it."""
    assert config.run.dir is not None, "load_config names the run folder"
    if not is_url(config.run.dir):
        return Path(config.run.dir), None
    opened: list[RunStore] = []

    def open_store() -> str:
        opened.append(RunStore(config))
        return str(opened[0].folder)

    folder = Path(world.broadcast_from_main(open_store))
    return folder, (opened[0] if opened else None)


def lock_place(lock: RunLock, folder: Path, store: RunStore | None) -> None:
    """Let no other job write to the run."""
    if store is not None:
        print(f"run folder: {store}, worked on in {folder}", file=sys.stderr)
        store.open(lock)
    elif folder.is_dir():
        lock.acquire()
    if lock.is_held:
        with suppress(OSError):  # whoever writes there next says why it cannot
            remove_unfinished(folder)


def put_start(store: RunStore | None, world: World) -> None:
    """Upload the first line of the record: from here on the run is at the URL, too."""
    with world.fail_together():
        if store is not None:
            store.push()


def leave(store: RunStore | None, error: BaseException | None) -> None:
    """Let another job have the run at a URL; its record tells of an `error`."""
    if store is not None:
        is_urgent = isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted)
        store.close(with_record=error is not None, at_once=is_urgent)
