"""Compare the hosts' software and clocks, and check W&B and TensorBoard.

Clocks are compared through torch's store. A rank of each host requests the time, and rank 0 answers
with its time. The delay of the answer is assumed to be half of the round-trip time.
"""

from __future__ import annotations

import configparser
import hashlib
import importlib.util
import netrc
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import vit
from vit.checkpoint.resume import settings_sha256
from vit.config import io as config_io
from vit.config.schema import Config, LogConfig
from vit.data.decode.images import decoder_name
from vit.distributed.host_differences import differences, places, software
from vit.distributed.process_group import RankLost, World
from vit.extras.planner.check.findings import Finding, Verdict, few
from vit.loggers.wandb_logger import wanted_mode

ASKED = 5
"""The number of times that a host requests the time. The fastest answer is used."""
LARGEST_DIFFERENCE_S = 1.0
"""The largest allowed difference between clocks. Signed URLs and locks with an expiry tolerate
larger differences. Hosts with NTP differ by milliseconds."""
ANSWER_S = 5.0
"""The time limit for an answer with the time, or from W&B's server."""
WANDB_URL = "https://api.wandb.ai"


# --- software -------------------------------------------------------------------------------------


def own_software(config: Config) -> dict[str, str]:
    """Return the versions of this rank's software, and hashes of `vit` and of the config."""
    code = hashlib.sha256()
    folder = Path(vit.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        code.update(path.read_bytes())
    return {
        **software(),
        "vit": code.hexdigest()[:12],
        "config": settings_sha256(config_io.to_dict(config)),
        "JPEG decoder": decoder_name(),
    }


def judge_software(
    versions: dict[int, dict[str, str]], hosts: tuple[str, ...]
) -> Iterator[Finding]:
    """Yield a finding on whether all ranks run the same software."""
    unlike = differences(versions, hosts)
    if any(difference.is_fatal for difference in unlike):
        yield Finding("software", Verdict.FAIL, "\n".join(difference.said for difference in unlike))
        return
    first = next(iter(versions.values()))
    names = [
        name
        for name in ("torch", "Python", "CUDA", "driver", "NCCL", "GPU", "vit")
        if name in first and name not in {difference.name for difference in unlike}
    ]
    text = ", ".join(f"{name} {first[name]}" for name in names)
    same = f"same on all {len(versions)} ranks: " if len(versions) > 1 else ""
    lines = [same + text, *(difference.said for difference in unlike)]
    yield Finding("software", Verdict.NOTE if unlike else Verdict.OK, "\n".join(lines))


# --- clocks ---------------------------------------------------------------------------------------


class Clock(NamedTuple):
    """The difference between a host's clock and that of rank 0."""

    ahead_s: float
    within_s: float
    """The uncertainty of `ahead_s`, which is half of the round-trip time."""


def compare_clocks(world: World) -> Clock | None:
    """Return how far this host's clock is ahead of rank 0's.

    Every rank must call this function. Returns None on all but one rank of a host. Rank 0 answers
    one host after the other, so a round trip never includes the time of another host. Raises
    RankLost if a rank does not send its request.
    """
    store = world.store
    if store is None:
        return None
    hosts = list(dict.fromkeys(world.hosts))
    asking = [world.hosts.index(host) for host in hosts[1:]]
    limit = timedelta(seconds=ANSWER_S)

    def wait_for(key: str, rank: int) -> None:
        try:
            store.wait([key], limit)
        except RuntimeError:
            raise RankLost(
                f"{places([rank], world.hosts)} did not answer within {ANSWER_S:.0f} s"
            ) from None

    if world.is_main:
        for rank in asking:
            for count in range(ASKED):
                store.set(f"clock {rank} {count} turn", "")
                wait_for(f"clock {rank} {count} ask", rank)
                store.set(f"clock {rank} {count} time", repr(time.time()))
        return Clock(0.0, 0.0)
    if world.rank not in asking:
        return None
    clocks = []
    # The limit is longer for later hosts, because rank 0 answers the hosts in order.
    limit = timedelta(seconds=ANSWER_S * (1 + asking.index(world.rank)))
    for count in range(ASKED):
        key = f"clock {world.rank} {count}"
        wait_for(f"{key} turn", 0)
        asked_s = time.time()
        store.set(f"{key} ask", "")
        wait_for(f"{key} time", 0)
        answered_s = time.time()
        main_s = float(store.get(f"{key} time"))
        clocks.append(Clock((asked_s + answered_s) / 2 - main_s, (answered_s - asked_s) / 2))
    return min(clocks, key=lambda clock: clock.within_s)


def judge_clocks(rank_clocks: dict[int, Any], hosts: tuple[str, ...]) -> Iterator[Finding]:
    """Yield a finding on the differences between the hosts' clocks."""
    clocks = {rank: Clock(*clock) for rank, clock in rank_clocks.items() if clock is not None}
    if len(clocks) < 2:
        yield Finding("clocks", Verdict.OK, "one host")
        return
    wrong = [
        f"{hosts[rank]} is {abs(clock.ahead_s):.2f} s"
        f" {'ahead of' if clock.ahead_s > 0 else 'behind'} {hosts[0]}:"
        " synchronize the clock by NTP (timedatectl set-ntp true)"
        for rank, clock in clocks.items()
        if abs(clock.ahead_s) - clock.within_s > LARGEST_DIFFERENCE_S
    ]
    if wrong:
        yield Finding("clocks", Verdict.FAIL, "\n".join(few(wrong)))
        return
    worst = max(clocks, key=lambda rank: abs(clocks[rank].ahead_s))
    ahead_s, within_s = clocks[worst]
    yield Finding(
        "clocks",
        Verdict.OK,
        f"{len(clocks)} hosts within {1e3 * abs(ahead_s):.3g} ms of {hosts[0]} ({hosts[worst]},"
        f" measured within {1e3 * within_s:.2g} ms)",
    )


# --- W&B and TensorBoard --------------------------------------------------------------------------


def look_at_views(log: LogConfig) -> list[list[str]]:
    """Return a verdict and a line of text for each configured logger. Only rank 0 calls this."""
    results = [_look_at_wandb(log)]
    if log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        results.append(
            (Verdict.NOTE, "log.tensorboard: tensorboard is not installed: pip install tensorboard")
        )
    return [[verdict, line] for verdict, line in results]


def judge_views(results: dict[int, list[list[str]]]) -> Iterator[Finding]:
    """Yield a finding on whether W&B and TensorBoard will receive metrics."""
    verdicts = [Verdict(verdict) for verdict, _ in results[0]]
    order = [Verdict.FAIL, Verdict.NOTE, Verdict.OK]
    text = "\n".join(line for _, line in results[0])
    yield Finding("W&B", min(verdicts, key=order.index), text)


def _look_at_wandb(log: LogConfig) -> tuple[Verdict, str]:
    mode = wanted_mode(log.wandb)
    if mode == "off":
        return Verdict.OK, "off, as configured"
    # A run continues without W&B, but a user who set "online" depends on it.
    lacking = Verdict.FAIL if log.wandb == "online" else Verdict.NOTE
    if importlib.util.find_spec("wandb") is None:
        return lacking, "wandb is not installed: pip install wandb, or set log.wandb=off"
    if mode == "offline":
        return Verdict.OK, "offline, as configured: upload the run later with wandb sync"
    url = _wandb_url()
    offline = "launch/report.py --to-wandb uploads the run later"
    if not _has_wandb_key(url):
        return lacking, f"no key for {url}: {offline}; run wandb login, or set log.wandb=offline"
    began_s = time.perf_counter()
    try:
        urllib.request.urlopen(url, timeout=ANSWER_S).close()
    except urllib.error.HTTPError:
        pass  # an HTTP error also shows that the server answers
    except OSError as error:
        reason = getattr(error, "reason", error)
        return (
            lacking,
            f"{url} does not answer ({reason}): {offline}; check the network and the proxy",
        )
    return Verdict.OK, f"{url} answered in {time.perf_counter() - began_s:.2f} s, and a key exists"


def _wandb_url() -> str:
    """Return W&B's server, from the environment, W&B's settings file or its default."""
    if url := os.environ.get("WANDB_BASE_URL"):
        return url.rstrip("/")
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb")
    settings = configparser.ConfigParser()
    try:
        settings.read(folder / "settings")
        return settings.get("default", "base_url", fallback=WANDB_URL).rstrip("/")
    except configparser.Error:
        return WANDB_URL


def _has_wandb_key(url: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = os.environ.get("NETRC") or Path.home() / ".netrc"
    try:
        return (
            netrc.netrc(path).authenticators(urllib.parse.urlsplit(url).hostname or "") is not None
        )
    except (OSError, netrc.NetrcParseError):
        return False
