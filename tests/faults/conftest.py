"""Simulate two hosts with namespaces on this machine, to test a cut cable and a power failure."""

from __future__ import annotations

import itertools
import os
import signal
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from families import Family
from proc import children
from processes import REPOSITORY, TINY, environment

_letters = itertools.cycle(string.ascii_lowercase)
SUBNET = "10.213.9"
PORT = 29600


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Host:
    """A simulated host with its own name, network and process ids. All hosts share the files of
    this machine."""

    def __init__(self, name: str, network: str, folder: Path):
        self.name = name
        self._network = network
        self._folder = folder
        self._family: Family | None = None

    @property
    def log(self) -> Path:
        """Return the log file of the host's launcher and rank."""
        return self._folder / f"{self.name}.log"

    def start(self, arguments: list[str], **variables: str) -> None:
        # Run the shell as process 1, because even SIGKILL from inside the namespace cannot end
        # process 1.
        script = 'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; "$@"; exit $?'
        inside = [
            *("nsenter", f"--net=/run/netns/{self._network}"),
            *("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("bash", "-ec", script, "host", str(self._folder / "hosts"), self.name),
        ]
        with self.log.open("ab") as file:
            self._family = Family(
                [*inside, *arguments],
                env={**environment(), **variables},
                cwd=REPOSITORY,
                stdout=file,
                stderr=file,
            )

    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = 240) -> str:
        deadline = time.monotonic() + timeout_s
        while text not in self.printed():
            assert self.status is None, f"{self.name} ended without {text!r}:\n{self.printed()}"
            assert time.monotonic() < deadline, (
                f"{self.name} did not print {text!r}:\n{self.printed()}"
            )
            time.sleep(0.05)
        return self.printed()

    @property
    def status(self) -> int | None:
        return None if self._family is None else self._family.process.poll()

    def end(self, timeout_s: float) -> int:
        assert self._family is not None
        try:
            return self._family.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} has not ended:\n{self.printed()}") from None

    def kill(self) -> None:
        if self._family is None:
            return
        for first in children(self._family.process.pid):
            with suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
        self._family.process.wait()

    def close(self) -> None:
        if self._family is not None:
            self._family.kill()


class TwoHosts:
    """The hosts `first` and `second`, connected by a cable that a test can cut."""

    def __init__(self, folder: Path):
        self._mark = f"vh{os.getpid() % 100_000}{next(_letters)}"
        self.hosts: list[Host] = []
        ip("link", "add", f"{self._mark}b", "type", "bridge")
        ip("link", "set", f"{self._mark}b", "up")
        table = "127.0.0.1 localhost\n"
        for number, name in enumerate(("first", "second")):
            network = f"{self._mark}n{number}"
            ip("netns", "add", network)
            ip("link", "add", network, "type", "veth", "peer", "name", "eth0", "netns", network)
            ip("link", "set", network, "master", f"{self._mark}b", "up")
            ip("-n", network, "addr", "add", f"{SUBNET}.{number + 10}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", network, "link", "set", device, "up")
            table += f"{SUBNET}.{number + 10} {name}\n"
            self.hosts.append(Host(name, network, folder))
        (folder / "hosts").write_text(table)

    def cut(self) -> None:
        """Drop all packets silently, so that neither host receives an error."""
        ip("link", "set", f"{self._mark}n1", "down")

    def mend(self) -> None:
        ip("link", "set", f"{self._mark}n1", "up")

    def slow_down(self, rate: str) -> None:
        for number in range(len(self.hosts)):
            network = f"{self._mark}n{number}"
            limit = ["tbf", "rate", rate, "burst", "8kb", "latency", "400ms"]
            made = subprocess.run(["tc", "qdisc", "add", "dev", network, "root", *limit])
            if made.returncode:
                pytest.skip("this kernel cannot slow down links (tc tbf)")

    def train(
        self, config: Path, run_dir: Path, *overrides: str, launcher: tuple[str, ...] = ()
    ) -> None:
        for host in self.hosts:
            host.start(
                [
                    *(sys.executable, "-m", "torch.distributed.run"),
                    *("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"),
                    *(f"--rdzv-endpoint=first:{PORT}", "--rdzv-id=test", *launcher),
                    *("launch/train.py", "--config", str(config), f"run.dir={run_dir}"),
                    *TINY,
                    *overrides,
                ]
            )

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        for number in range(len(self.hosts)):
            # The hosts must be stopped first, because a namespace exists as long as one of its
            # processes.
            ip("link", "delete", f"{self._mark}n{number}")
            ip("netns", "delete", f"{self._mark}n{number}")
        ip("link", "delete", f"{self._mark}b")


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    """Simulate two hosts, which requires root on Linux."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        pytest.skip("network namespaces need root on Linux")
    probe = subprocess.run(["ip", "link", "add", "vhprobe", "type", "bridge"], capture_output=True)
    if probe.returncode:
        pytest.skip(f"network namespaces are not available: {probe.stderr.decode().strip()}")
    ip("link", "delete", "vhprobe")
    hosts = TwoHosts(tmp_path)
    yield hosts
    hosts.close()
