"""Read samples from shards at a URL, and inspect the requests that the server received."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import torch
from servers import WebServer

from vit.config.schema import AugmentConfig
from vit.data.batches import TrainBatches
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.data.order import make_order
from vit.data.shards.split import Split
from vit.data.storage.opening import open_split

FORMAT = ImageFormat((16, 16), 3, "bilinear")


def files_of(shards: Path) -> dict[str, bytes]:
    return {f"/set/{path.name}": path.read_bytes() for path in shards.iterdir() if path.is_file()}


def samples(split: Split) -> list[tuple[str, bytes]]:
    return [(split.key(i), split.read(i)) for i in range(split.num_samples)]


def parts_asked(web: WebServer) -> list[tuple[str, str | None]]:
    """Return (shard, byte range) for each request that fetched a block."""
    return [
        (path, byte_range)
        for _, path, byte_range in web.requests
        if path.endswith(".tar") and byte_range != "bytes=0-0"
    ]


def claim_encoding(web: WebServer, encoding: str) -> None:
    """Add a Content-Encoding header to all later responses without encoding the bytes."""
    handler: Any = web._server.RequestHandlerClass
    original = handler.end_headers
    handler.end_headers = lambda self: (
        self.send_header("Content-Encoding", encoding),
        original(self),
    )


def upload(shards: Path, url: str) -> str:
    fs, place = fsspec.core.url_to_fs(url)
    for path in shards.iterdir():
        if path.is_file():
            fs.pipe_file(f"{place}/set/{path.name}", path.read_bytes())
    return f"{url}/set"


def epoch(
    root: str | Path, cache: Path | None, *, workers: int = 0, epochs: int = 1
) -> list[list[torch.Tensor]]:
    """Return the ids, images, labels and augmentation parameters of each batch in an epoch."""
    split = open_split(root, "train", cache)
    batches = TrainBatches(
        split, make_order(split.num_samples, 12, seed=3), AugmentConfig(), FORMAT
    )
    with Loader(batches, 0, 5 * epochs, num_workers=workers) as loader:
        return [[tensor.clone() for tensor in (b.ids, b.images, b.labels, b.table)] for b in loader]


def assert_same(ours: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
