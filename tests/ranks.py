"""Ranks as threads of a test, with a real store in common: for what they say to each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from vit.distributed import World


def together(size: int, function: Callable[[World], Any]) -> list[Any]:
    """What `function` returns or raises on each of `size` ranks, threads with a store in common."""
    master = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)
    ended: list[Any] = [None] * size

    def rank(number: int) -> None:
        store = dist.TCPStore("127.0.0.1", master.port, size, False)
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
