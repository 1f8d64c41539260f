"""Train on two ranks while the data server is down for some time.

The result must be the same as without an outage. The cache has space for only two of three shards,
so the run keeps fetching blocks from the server. At step 4, the server closes all connections, and
then answers new requests with status 503 until the outage ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
from processes import Background, final_state, train, write_config
from servers import Gate, S3Server, WebServer, forget_clients

STEPS = 12


@contextmanager
def served(kind: str, shards: Path) -> Iterator[tuple[str, Gate]]:
    files = {path.name: path.read_bytes() for path in shards.iterdir() if path.is_file()}
    if kind == "http":
        with (
            WebServer({f"/set/{name}": content for name, content in files.items()}) as web,
            Gate(int(web.url.rsplit(":", 1)[1])) as gate,
        ):
            yield f"http://127.0.0.1:{gate.port}/set", gate
        return
    with S3Server() as s3, Gate(s3.port) as gate, pytest.MonkeyPatch.context() as environment:
        url = s3.new_bucket()
        for name, content in files.items():
            boto3.client("s3").put_object(
                Bucket=url.removeprefix("s3://"), Key=f"set/{name}", Body=content
            )
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{gate.port}")
        forget_clients()
        yield f"{url}/set", gate


def settings(url: str, shards: Path, cache: Path, patience_s: float) -> list[str]:
    room = sum(path.stat().st_size for path in shards.glob("train-*.tar")) * 0.75
    return [
        f"data.root={url}",
        f"loader.cache_dir={cache}",
        f"loader.cache_gib={room / (1 << 30)}",
        f"loader.patience_s={patience_s}",
    ]


def trained_through(
    kind: str, folder: Path, shards: Path, away_s: float, patience_s: float = 600.0
) -> tuple[str, bool]:
    """Train once without an outage and once with an outage of `away_s` seconds.

    Returns the output of the second run, and whether both runs ended in the same state.
    """
    config = write_config(folder, shards, steps=STEPS)
    with served(kind, shards) as (url, gate):
        train(
            config, folder / "whole", *settings(url, shards, folder / "cache0", patience_s), ranks=2
        )
        run = Background(
            config, folder / "away", *settings(url, shards, folder / "cache1", patience_s), ranks=2
        )
        run.wait_for_step(4)
        gate.close()
        while not gate.num_refused and run.process.poll() is None:
            time.sleep(0.01)
        time.sleep(away_s)
        gate.open()
        output = run.end()
        assert gate.num_refused, "no request was made during the outage"
    assert run.process.returncode == 0, output
    return output, final_state(folder / "away", STEPS) == final_state(folder / "whole", STEPS)
