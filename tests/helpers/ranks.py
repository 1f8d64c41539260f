"""Run ranks as threads with a shared torch store, to test how ranks communicate."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from vit.distributed.process_group import World


def together(size: int, function: Callable[[World], Any]) -> list[Any]:
    """Run `function` on `size` ranks, and return the result or exception of each rank. The ranks
    are threads with a shared store."""
    # Use an in-memory store. Tests with several processes use a store that is accessed through a
    # socket.
    store = dist.HashStore()
    ended: list[Any] = [None] * size

    def rank(number: int) -> None:
        world = World(number, size, torch.device("cpu"), dist.PrefixStore("words", store))
        try:
            ended[number] = function(world)
        except BaseException as error:
            ended[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended
