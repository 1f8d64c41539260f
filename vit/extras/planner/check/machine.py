"""What is alike on the hosts: software, clocks, and what the record's views need.

Clocks are compared through torch's store: a rank of each host asks, rank 0 answers with its time,
and half of the way there and back is taken for the way of the answer.
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
"""How often a host asks for the time; the quickest answer counts."""
LARGEST_DIFFERENCE_S = 1.0
"""Between clocks. Signed addresses and locks with an end bear more; hosts that keep time by NTP
are within milliseconds."""
ANSWER_S = 5.0
"""For one answer of a clock, or of W&B's server."""
WANDB_URL = "https://api.wandb.ai"


# --- software -------------------------------------------------------------------------------------


def own_software(config: Config) -> dict[str, str]:
    """Return what this rank runs, by name: `vit.distributed.host_differences.software`, our code
    and the config."""
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


def judge_software(found: dict[int, dict[str, str]], hosts: tuple[str, ...]) -> Iterator[Finding]:
    """Yield whether all ranks run the same."""
    unlike = differences(found, hosts)
    if any(each.is_fatal for each in unlike):
        yield Finding("software", Verdict.FAIL, "\n".join(each.said for each in unlike))
        return
    first = next(iter(found.values()))
    names = [
        name
        for name in ("torch", "Python", "CUDA", "driver", "NCCL", "GPU", "vit")
        if name in first and name not in {each.name for each in unlike}
    ]
    said = ", ".join(f"{name} {first[name]}" for name in names)
    same = f"the same on all {len(found)} ranks: " if len(found) > 1 else ""
    lines = [same + said, *(each.said for each in unlike)]
    yield Finding("software", Verdict.NOTE if unlike else Verdict.OK, "\n".join(lines))


# --- clocks ---------------------------------------------------------------------------------------


class Clock(NamedTuple):
    """A host's clock beside that of rank 0."""

    ahead_s: float
    within_s: float
    """The error of `ahead_s`: half of the way there and back."""


def compare_clocks(world: World) -> Clock | None:
    """Return how far this host's clock is ahead of rank 0's; None where another rank asks.

    Every rank calls it. Rank 0 serves one host after the other, in `ASKED` messages each, so that
    none waits for another with the clock running. Raises RankLost for a rank that does not ask.
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
    found = []
    # The hosts before this one are served first.
    limit = timedelta(seconds=ANSWER_S * (1 + asking.index(world.rank)))
    for count in range(ASKED):
        key = f"clock {world.rank} {count}"
        wait_for(f"{key} turn", 0)
        asked_s = time.time()
        store.set(f"{key} ask", "")
        wait_for(f"{key} time", 0)
        answered_s = time.time()
        its_s = float(store.get(f"{key} time"))
        found.append(Clock((asked_s + answered_s) / 2 - its_s, (answered_s - asked_s) / 2))
    return min(found, key=lambda clock: clock.within_s)


def judge_clocks(found: dict[int, Any], hosts: tuple[str, ...]) -> Iterator[Finding]:
    """Yield how far the clocks of the hosts are apart."""
    clocks = {rank: Clock(*each) for rank, each in found.items() if each is not None}
    if len(clocks) < 2:
        yield Finding("clocks", Verdict.OK, "one host")
        return
    wrong = [
        f"{hosts[rank]} is {abs(clock.ahead_s):.2f} s"
        f" {'ahead of' if clock.ahead_s > 0 else 'behind'} {hosts[0]}:"
        " keep time by NTP (timedatectl set-ntp true)"
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


# --- views of the record --------------------------------------------------------------------------


def look_at_views(log: LogConfig) -> list[list[str]]:
    """Return verdict and line of each view that the settings ask for; rank 0 calls it."""
    found = [_look_at_wandb(log)]
    if log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        found.append((Verdict.NOTE, "log.tensorboard: not installed: pip install tensorboard"))
    return [[verdict, said] for verdict, said in found]


def judge_views(found: dict[int, list[list[str]]]) -> Iterator[Finding]:
    """Yield whether W&B, and TensorBoard, will get the record."""
    verdicts = [Verdict(verdict) for verdict, _ in found[0]]
    order = [Verdict.FAIL, Verdict.NOTE, Verdict.OK]
    said = "\n".join(said for _, said in found[0])
    yield Finding("W&B", min(verdicts, key=order.index), said)


def _look_at_wandb(log: LogConfig) -> tuple[Verdict, str]:
    mode = wanted_mode(log.wandb)
    if mode == "off":
        return Verdict.OK, "off, as asked"
    # A run goes on without it; who asks for "online" wants to know.
    lacking = Verdict.FAIL if log.wandb == "online" else Verdict.NOTE
    if importlib.util.find_spec("wandb") is None:
        return lacking, "not installed: pip install wandb, or log.wandb=off"
    if mode == "offline":
        return Verdict.OK, "offline, as asked; wandb sync uploads it later"
    url = _wandb_url()
    offline = "the run is kept offline, and wandb sync uploads it later"
    if not _has_wandb_key(url):
        return lacking, f"no key for {url}: {offline}; wandb login, or log.wandb=offline"
    began_s = time.perf_counter()
    try:
        urllib.request.urlopen(url, timeout=ANSWER_S).close()
    except urllib.error.HTTPError:
        pass  # an answer like any other
    except OSError as error:
        reason = getattr(error, "reason", error)
        return lacking, f"{url} does not answer ({reason}): {offline}; is there a proxy to set?"
    return Verdict.OK, f"{url} answers in {time.perf_counter() - began_s:.2f} s; there is a key"


def _wandb_url() -> str:
    """Return the server that W&B would use: its variable, its settings, or its own."""
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
