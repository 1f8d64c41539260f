"""Start and stop a real Slurm cluster with two nodes on this machine, using the daemons from
Debian's packages.

Debian's slurmd can run several times on one host (`slurmd -N n1`). The daemons require root. If
root or Slurm is missing, the tests are skipped with a reason. If VIT_REQUIRE_SLURM=1 is set, as in
CI, the tests fail instead.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import families
import pytest
from proc import children
from processes import REPOSITORY, environment

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")

# All timeouts are short, and all other settings have Slurm's default values. The GPUs do not exist,
# but scripts that request GPUs can run unchanged.
CONFIGURATION = """
ClusterName=tests
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MpiDefault=none
SwitchType=switch/none
TaskPlugin=task/none
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=20
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=DEFAULT CPUs=16 RealMemory=1000 Gres=gpu:4 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second_port}
PartitionName=main Nodes=n1,n2 Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=grace Nodes=n1,n2 PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=urgent Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF
"""


UNFINISHED = (
    "PENDING",
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "SUSPENDED",
    "REQUEUED",
    "PREEMPTED",
)


class Cluster:
    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {
            **{
                key: value
                for key, value in environment().items()
                if not key.startswith(("SLURM", "SBATCH", "PYTHONPATH", "RANKS_PER_NODE"))
            },
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            # sbatch passes this variable on to the jobs
            families.MARK: f"{os.environ[families.MARK]}.cluster.",
        }
        self.submitted: list[Job] = []
        self.nodes: dict[str, subprocess.Popen] = {}

    def start(self, *command: object) -> subprocess.Popen:
        """Start a daemon in its own session, and write its output to `daemons.log`."""
        path = f"{self.environment['PATH']}:/usr/sbin:/sbin"
        with open(self.folder / "daemons.log", "ab") as log:
            return subprocess.Popen(
                [*map(str, command)],
                env={**self.environment, "PATH": path},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node in a new process namespace. When the namespace ends, all of
        its processes are killed, as if the node had lost power."""
        slurmd = f"slurmd -D -f {self.folder}/slurm.conf -N {name}"
        # bash adopts orphaned processes in the same way as an init process. unshare ignores
        # SIGTERM.
        line = f'{slurmd} & trap "kill $!" TERM; wait $!; wait $!'
        apart = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child=KILL")
        self.nodes[name] = self.start(*apart, "bash", "-c", line)

    def end_node(self, name: str, number: signal.Signals) -> None:
        for child in children(self.nodes[name].pid):
            os.kill(child, number)

    def call(self, *command: object) -> str:
        done = subprocess.run(
            [*map(str, command)],
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=REPOSITORY,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, log: Path, *arguments: object, **variables: str) -> Job:
        command = [
            "env",
            *(f"{key}={value}" for key, value in variables.items()),
            "sbatch",
            "--parsable",
            f"--output={log}",
        ]
        self.submitted.append(Job(self, self.call(*command, *arguments), log))
        return self.submitted[-1]

    def end(self, jobs: list[Job]) -> None:
        numbers = {job.number for job in jobs}
        subprocess.run(
            ["scancel", *sorted(numbers)], env=self.environment, capture_output=True, check=False
        )
        deadline = time.monotonic() + 180
        while numbers & set(self.call("squeue", "--noheader", "--format=%F").split()):
            assert time.monotonic() < deadline, f"jobs {sorted(numbers)} did not end"
            time.sleep(0.2)


class Job:
    def __init__(self, cluster: Cluster, number: str, log: Path):
        self.cluster = cluster
        self.number = number
        self.path = log

    def facts(self) -> dict[str, str]:
        """Return the output of `scontrol show job` as a dict. For a job array, the dict describes
        an unfinished task, if there is one."""
        lines = self.cluster.call("scontrol", "--oneliner", "show", "job", self.number).splitlines()
        tasks = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]
        return next((task for task in tasks if task["JobState"] in UNFINISHED), tasks[-1])

    @property
    def log(self) -> str:
        return self.path.read_text() if self.path.exists() else ""

    def wait(
        self, happened: Callable[[dict[str, str]], bool] | None = None, timeout_s: float = 240
    ) -> dict[str, str]:
        """Wait until `happened(facts)` returns true, and return the facts. By default, wait until
        the job has finished."""
        deadline = time.monotonic() + timeout_s
        while True:
            facts = self.facts()
            over = facts["JobState"] not in UNFINISHED
            if happened(facts) if happened else over:
                return facts
            if (over and happened) or time.monotonic() > deadline:
                raise AssertionError(
                    f"{facts['JobState']}, Restarts={facts['Restarts']}\n{self.log}"
                )
            time.sleep(0.2)

    def cancel(self, *options: str) -> None:
        self.cluster.call("scancel", *options, self.number)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [opened.getsockname()[1] for opened in sockets]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start a cluster with the nodes n1 and n2 and three partitions: main, grace (with 30 s of
    notice before a preemption) and urgent. Jobs in the partition `urgent` preempt jobs in the other
    partitions."""
    missing = [
        name
        for name in DAEMONS
        if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
    ]
    if missing or os.geteuid() != 0 or not sys.platform.startswith("linux"):
        reason = (
            "no real Slurm here:"
            f" {'missing ' + ', '.join(missing) if missing else 'its daemons need root on Linux'}"
        )
        remedy = "apt-get install slurmctld slurmd slurm-client munge, and run the tests as root"
        if os.environ.get("VIT_REQUIRE_SLURM") == "1":
            pytest.fail(f"{reason}, and VIT_REQUIRE_SLURM=1 requires it: {remedy}")
        pytest.skip(f"{reason} ({remedy})")
    # Use a short path, because the path of a Unix socket is limited to 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="vit-slurm-"))
    os.chmod(folder, 0o755)
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    controller_port, first_port, second_port = free_ports(3)
    host = socket.gethostname().split(".")[0]
    numbers = {
        "controller_port": controller_port,
        "first_port": first_port,
        "second_port": second_port,
    }
    # Slurm derives ports from job numbers. Two test runs on one machine therefore need different
    # job numbers.
    numbers["first_job"] = random.randrange(1000, 60000)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, host=host, **numbers))
    (folder / "gres.conf").write_text(
        "".join(f"Name=gpu File=/dev/{device}\n" for device in ("null", "zero", "full", "random"))
    )
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    cluster = Cluster(folder)
    started: list[subprocess.Popen] = []

    def wait_until(true: Callable[[], bool], awaited: str) -> None:
        deadline = time.monotonic() + 120
        while not true():
            logs = "".join(path.read_text() for path in sorted(folder.glob("*.log")))
            daemons = [*started, *cluster.nodes.values()]
            if time.monotonic() > deadline or any(each.poll() is not None for each in daemons):
                raise AssertionError(f"{awaited}:\n{logs[-3000:]}")
            time.sleep(0.05)

    try:
        files = [
            f"--{name}-file={folder / 'munge'}.{name}" for name in ("key", "pid", "seed", "log")
        ]
        munged = ("munged", "--foreground", "--force", f"--socket={folder / 'munge.socket'}")
        started.append(cluster.start(*munged, *files))
        wait_until((folder / "munge.socket").exists, "munged does not start")
        started.append(cluster.start("slurmctld", "-D", "-f", folder / "slurm.conf"))
        for node in ("n1", "n2"):
            cluster.start_node(node)
        wait_until(lambda: idle_nodes(cluster) == 2, "the nodes do not come up")
        yield cluster
        subprocess.run(["scancel", "--user=root"], env=cluster.environment, check=False)
        # Wait for the jobs before stopping the daemons, because the jobs would otherwise become
        # orphans.
        wait_until(lambda: not cluster.call("squeue", "--noheader"), "jobs do not end")
    finally:
        for node in cluster.nodes:
            cluster.end_node(node, signal.SIGTERM)
        for daemon in reversed(started):
            daemon.send_signal(signal.SIGTERM)
        for daemon in [*cluster.nodes.values(), *reversed(started)]:
            try:
                daemon.wait(60)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        families.kill(cluster.environment[families.MARK])
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def jobs_end_with_their_test(cluster: Cluster) -> Iterator[None]:
    """Cancel the jobs of a failed test, because they would occupy the nodes during the next
    test."""
    before = len(cluster.submitted)
    yield
    if jobs := cluster.submitted[before:]:
        cluster.end(jobs)


def idle_nodes(cluster: Cluster) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return sum(map(int, done.stdout.split()))
