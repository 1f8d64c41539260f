"""Run ranks as threads that share a torch store, to test their communication."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from vit.distributed.process_group import World


def together(size: int, function: Callable[[World], Any]) -> list[Any]:
    """Run `function` on `size` ranks, which are threads with a shared store. Return each rank's
    result or exception."""
    # Use a store in memory. Tests with processes use a store behind a socket.
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
