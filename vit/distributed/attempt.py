"""Give each attempt of a job its own key prefix in torchrun's key-value store.

torchrun uses one store for all attempts of a job (torch 2.15), and hosts may count attempts
differently. Without a prefix, a rank could read keys from an earlier attempt, such as the reason
why that attempt ended. With `--max-restarts`, rank 0 therefore draws a random name for each
attempt. A rank that reads the name of an earlier attempt waits until rank 0 replaces the name. The
ranks write these keys:

    rank 0    round = <name>          collects the tokens of all ranks, and writes them as one list
    rank n    <name> n = <token>      joins the attempt when its token is in that list
"""

import json
import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from vit.distributed.world import POLL_S, RankLost


def may_restart() -> bool:
    """Return whether torchrun restarts the ranks after a failure."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or "0") > 0


def part_of_attempt(store: dist.Store, rank: int, size: int, limit: timedelta) -> dist.Store:
    """Return a view of `store` whose key prefix is unique to this attempt and the same on all
    ranks.

    Raises RankLost if a rank does not join within `limit`.
    """
    name = _announce(store, size, limit) if rank == 0 else _join(store, rank, limit)
    return dist.PrefixStore(name, store)


def _announce(store: dist.Store, size: int, limit: timedelta) -> str:
    """Announce a random name for this attempt, and return the name once all other ranks have sent
    their tokens and the list of tokens is in the store. Only rank 0 calls this."""
    deadline = time.monotonic() + limit.total_seconds()
    name = secrets.token_hex(8)
    store.set("round", name)

    keys = [f"{name} {rank}" for rank in range(1, size)]
    while not store.check(keys):
        if time.monotonic() > deadline:
            late = [key.split()[1] for key in keys if not store.check([key])]
            raise RankLost(f"rank {', '.join(late)} did not respond within {limit}")
        time.sleep(POLL_S / 5)

    store.set(f"{name} all", json.dumps([text.decode() for text in store.multi_get(keys)]))
    return name


def _join(store: dist.Store, rank: int, limit: timedelta) -> str:
    """Answer each name that rank 0 announces with this process's token, and return the name whose
    list contains the token. An earlier attempt's list contains only tokens of earlier processes."""
    deadline = time.monotonic() + limit.total_seconds()
    token = secrets.token_hex(8)
    answered_name = ""
    while True:
        name = store.get("round").decode() if store.check(["round"]) else ""
        if name and name != answered_name:
            store.set(f"{name} {rank}", token)
            answered_name = name

        is_complete = name and store.check([f"{name} all"])
        if is_complete and token in json.loads(store.get(f"{name} all")):
            return name

        if time.monotonic() > deadline:
            raise RankLost(f"rank 0 did not respond within {limit}")
        time.sleep(POLL_S / 5)
