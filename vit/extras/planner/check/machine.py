"""Compare the hosts' software and clocks, and check W&B and TensorBoard.

Clocks are compared through torch's store. When the last host has arrived, the store notifies all
hosts within milliseconds, and one rank per host reads its clock.
"""

import configparser
import importlib.util
import netrc
import os
import statistics
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from vit.checkpoint.resume import settings_sha256
from vit.config import io as config_io
from vit.config.schema import Config, LogConfig
from vit.data.decode.images import decoder_name
from vit.distributed.host_differences import differences, software
from vit.distributed.process_group import RankLost, World
from vit.extras.planner.check.findings import Finding, Verdict, few
from vit.loggers.record import code_sha256, wandb_mode

NUM_TIMES = 5
"""The number of clock readings on each host. The median difference is used."""
LARGEST_DIFFERENCE_S = 1.0
"""The maximum allowed difference between clocks. Signed URLs and expiring locks tolerate larger
differences. Clocks of hosts with NTP differ by milliseconds."""
ANSWER_S = 5.0
"""The maximum time to wait for other hosts, or for an answer from the W&B server."""
WANDB_URL = "https://api.wandb.ai"


# --- software -------------------------------------------------------------------------------------


def own_software(config: Config) -> dict[str, str]:
    """Return the versions of this rank's software, and hashes of `vit` and of the config."""
    return {
        **software(),
        "vit": code_sha256(skipped=()),
        "config": settings_sha256(config_io.to_dict(config)),
        "JPEG decoder": decoder_name(),
    }


def judge_software(
    versions: dict[int, dict[str, str]], hosts: tuple[str, ...]
) -> Iterator[Finding]:
    """Yield a finding on whether all ranks run the same software."""
    unlike = differences(versions, hosts)
    if any(difference.is_fatal for difference in unlike):
        yield Finding("software", Verdict.FAIL, "\n".join(difference.text for difference in unlike))
        return

    first = next(iter(versions.values()))
    different = {difference.name for difference in unlike}
    names = ("torch", "Python", "CUDA", "driver", "NCCL", "GPU", "vit")
    shown = [name for name in names if name in first and name not in different]
    text = ", ".join(f"{name} {first[name]}" for name in shown)
    same = f"same on all {len(versions)} ranks: " if len(versions) > 1 else ""
    lines = [same + text, *(difference.text for difference in unlike)]
    yield Finding("software", Verdict.NOTE if unlike else Verdict.OK, "\n".join(lines))


# --- clocks ---------------------------------------------------------------------------------------


def note_times(world: World) -> list[float] | None:
    """Read this host's clock `NUM_TIMES` times, simultaneously with all other hosts.

    Returns None on all but one rank per host. Raises RankLost if a host does not take part.
    """
    store = world.store
    if store is None or not world.is_local_main:
        return None

    times = []
    for number in range(NUM_TIMES):
        key = f"clocks {number}"
        store.set(f"{key} {world.hosts[world.rank]}", "")
        # The last host to arrive wakes up all other hosts.
        if store.add(f"{key} hosts", 1) == len(set(world.hosts)):
            store.set(key, "")
        try:
            store.wait([key], timedelta(seconds=ANSWER_S))
        except RuntimeError:
            hosts = dict.fromkeys(world.hosts)
            late = [host for host in hosts if not store.check([f"{key} {host}"])]
            raise RankLost(f"{', '.join(late)} did not answer within {ANSWER_S:.0f} s") from None
        times.append(time.time())
    return times


def judge_clocks(
    rank_times: dict[int, list[float] | None], hosts: tuple[str, ...]
) -> Iterator[Finding]:
    """Yield a finding on the differences between the hosts' clocks."""
    times = {rank: own for rank, own in rank_times.items() if own is not None}
    if len(times) < 2:
        yield Finding("clocks", Verdict.OK, "one host")
        return

    ahead_s = {}
    for rank, own in times.items():
        differences_s = [here - main for here, main in zip(own, times[0], strict=True)]
        ahead_s[rank] = statistics.median(differences_s)

    wrong = [
        f"{hosts[rank]} is {abs(seconds):.2f} s {'ahead of' if seconds > 0 else 'behind'}"
        f" {hosts[0]}: synchronize the clock by NTP (timedatectl set-ntp true)"
        for rank, seconds in ahead_s.items()
        if abs(seconds) > LARGEST_DIFFERENCE_S
    ]
    if wrong:
        yield Finding("clocks", Verdict.FAIL, "\n".join(few(wrong)))
        return

    worst = max(ahead_s, key=lambda rank: abs(ahead_s[rank]))
    within = f"{1e3 * abs(ahead_s[worst]):.3g} ms of {hosts[0]} ({hosts[worst]})"
    yield Finding("clocks", Verdict.OK, f"{len(times)} hosts within {within}")


# --- W&B and TensorBoard --------------------------------------------------------------------------


def look_at_views(log: LogConfig) -> list[tuple[str, str]]:
    """Return a verdict and a line of text for each configured logger. Only rank 0 calls this."""
    results: list[tuple[str, str]] = [_look_at_wandb(log)]
    if log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        results.append(
            (Verdict.NOTE, "log.tensorboard: tensorboard is not installed: pip install tensorboard")
        )
    return results


def _look_at_wandb(log: LogConfig) -> tuple[Verdict, str]:
    """Test whether W&B is installed, has a key and answers, as far as the run needs it."""
    mode = wandb_mode(log.wandb)
    if mode == "off":
        return Verdict.OK, "off, as configured"

    # A run continues without W&B, but a user who set "online" relies on it.
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
        pass  # even an HTTP error shows that the server answers
    except OSError as error:
        reason = getattr(error, "reason", error)
        return (
            lacking,
            f"{url} does not answer ({reason}): {offline}; check the network and the proxy",
        )
    return Verdict.OK, f"{url} answered in {time.perf_counter() - began_s:.2f} s, and a key exists"


def _wandb_url() -> str:
    """Return the W&B server's URL from the environment or the W&B settings file, or the default."""
    url = os.environ.get("WANDB_BASE_URL")
    if url:
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
