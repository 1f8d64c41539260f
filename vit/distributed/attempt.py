"""A part of torchrun's store that no earlier attempt has written to.

torchrun has one store for all attempts of a job (torch 2.15), and hosts may count attempts
differently: the same keys would be read again, such as why the attempt before has ended, or where
its processes listened. So with `--max-restarts` rank 0 draws a name for each attempt, and whoever
reads one that is of an earlier attempt waits for its own:

    rank 0    round = <name>          collects the words of all, and writes them down as one list
    rank n    <name> n = <a word>     has met this rank 0 once its own word is in that list
"""

from __future__ import annotations

import json
import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from vit.distributed.world import POLL_S, RankLost


def may_restart() -> bool:
    """Whether torchrun starts the ranks again after a failure."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or "0") > 0


def part_of_attempt(store: dist.Store, rank: int, size: int, limit: timedelta) -> dist.Store:
    """Return a part of `store` that is the same on all ranks of this attempt, and empty.

    Raises RankLost if a rank does not come within `limit`.
    """
    word = secrets.token_hex(8)
    deadline = time.monotonic() + limit.total_seconds()
    name = word
    if rank == 0:
        store.set("round", name)
        keys = [f"{name} {other}" for other in range(1, size)]
        while not store.check(keys):
            if time.monotonic() > deadline:
                late = [key.split()[1] for key in keys if not store.check([key])]
                raise RankLost(f"rank {', '.join(late)} did not come within {limit}")
            time.sleep(POLL_S / 5)
        words = [text.decode() for text in store.multi_get(keys)]
        store.set(f"{name} all", json.dumps(words))
        return dist.PrefixStore(name, store)
    told = ""
    while True:
        name = store.get("round").decode() if store.check(["round"]) else ""
        if name and name != told:
            store.set(f"{name} {rank}", word)
            told = name
        if name and store.check([f"{name} all"]) and word in json.loads(store.get(f"{name} all")):
            return dist.PrefixStore(name, store)
        if time.monotonic() > deadline:
            raise RankLost(f"rank 0 did not come within {limit}")
        time.sleep(POLL_S / 5)
