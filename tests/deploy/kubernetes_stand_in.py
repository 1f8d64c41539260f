"""Run the files in deploy/kube/ as processes that behave as in Kubernetes.

A pod is a process with the command, arguments and environment variables of its container. If the
cluster is isolated, each pod has its own network, host name, process ids, and an /etc/hosts with
the names of a headless service. The pod's main process is then process 1, as in a container. Pods
are terminated as a kubelet would terminate them: SIGTERM, the grace period, SIGKILL.
`podFailurePolicy` applies to a failed pod, and JobSet's `failurePolicy` to a failed Job. Both
policies are read from the file, and the first matching rule is used
(https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy;
kubernetes-sigs/jobset:keps/262-ConfigurableFailurePolicy).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import warm_python
import yaml
from proc import children
from processes import REPOSITORY, environment

KUBE = REPOSITORY / "deploy" / "kube"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
SUBNET = "10.213.7"


class Ended(NamedTuple):
    """The result of running a JobSet. `codes` contains the exit codes of the pods in each attempt,
    in the order in which the pods exited."""

    is_complete: bool
    actions: list[str]
    codes: list[list[int]]


class Pod:
    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path):
        self.name = name
        self.log = log
        self.conditions: set[str] = set()
        self.kill_at: float | None = None
        self._is_killed = False
        self._is_isolated = command[0] == "nsenter"
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, env=env, stdout=file, stderr=file, start_new_session=True, cwd=REPOSITORY
            )

    def _first(self) -> int | None:
        """Return the id of the pod's main process, or None if the pod is not running."""
        pid = self.process.pid
        if not self._is_isolated:
            return pid
        # nsenter has replaced itself with unshare, whose child is process 1 in the pod.
        pids = children(pid)
        return pids[0] if pids else None

    def signal(self, number: int) -> None:
        pid = self._first()
        self._is_killed |= number == signal.SIGKILL
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def terminate(self, grace_s: float) -> None:
        """Send SIGTERM. `poll` sends SIGKILL if the pod is still alive after the grace period."""
        if self.kill_at is None and self.process.poll() is None:
            self.kill_at = time.monotonic() + grace_s
            self.signal(signal.SIGTERM)

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is None and self.kill_at is not None and time.monotonic() > self.kill_at:
            self.signal(signal.SIGKILL)
        if code is None:
            return None
        # Return the exit status of process 1 in the pod instead of unshare's exit status.
        if self._is_killed:
            return 128 + signal.SIGKILL
        return code if code >= 0 else 128 - code


class Cluster:
    """A simulated cluster that runs the Job in a file from deploy/kube/, and restarts the Job
    according to the JobSet's policy."""

    def __init__(self, folder: Path, isolated: bool):
        self.folder = folder
        self.isolated = isolated
        self._networks: list[str] = []
        self.pods: list[Pod] = []

    def run(
        self,
        jobset: dict[str, Any],
        arguments: list[object],
        disturb: Callable[[int, list[Pod]], None] = lambda attempt, pods: None,
        timeout_s: float = 300,
        **variables: str,
    ) -> Ended:
        """Run the only Job of a JobSet with the given `arguments` until the Job is complete or has
        failed.

        disturb: a function that is called repeatedly with (attempt, pods). variables: override
        those in the file.
        """
        spec = jobset["spec"]
        [replicated] = spec["replicatedJobs"]
        job = replicated["template"]["spec"]
        prefix = f"{jobset['metadata']['name']}-{replicated['name']}-0"
        service = jobset["metadata"]["name"]
        deadline = time.monotonic() + timeout_s
        actions: list[str] = []
        codes: list[list[int]] = []
        while True:
            names = [f"{prefix}-{index}" for index in range(job["completions"])]
            pods = [
                self._start(job, index, names, service, arguments, variables)
                for index in range(job["completions"])
            ]
            reason, message, ended = self._watch(
                job, pods, lambda pods: disturb(len(codes), pods), deadline
            )
            codes.append(ended)
            if not reason:
                return Ended(True, actions, codes)
            action = jobset_action(spec["failurePolicy"], reason, message)
            actions.append(action)
            counted = actions.count("RestartJobSet")
            if action == "FailJobSet" or counted > spec["failurePolicy"]["maxRestarts"]:
                return Ended(False, actions, codes)

    def logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def _start(
        self,
        job: dict[str, Any],
        index: int,
        names: list[str],
        service: str,
        arguments: list[object],
        variables: dict[str, str],
    ) -> Pod:
        [container] = job["template"]["spec"]["containers"]
        env = environment()
        python = sys.executable if self.isolated else warm_python.python(env)
        env["PYTHON_EXEC"] = python
        env.update(variables_of(container, index), **variables)
        typed = [*container["command"], *map(str, arguments)]
        command = [python, "-m", "vit"] if typed[0] == "vitline" else typed[:1]
        command += [re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], word) for word in typed[1:]]
        if self.isolated:
            command = [*self._namespaces(index, names, service), *command]
        pod = Pod(names[index], command, env, self.folder / f"{names[index]}.log")
        self.pods.append(pod)
        return pod

    def _watch(
        self,
        job: dict[str, Any],
        pods: list[Pod],
        disturb: Callable[[list[Pod]], None],
        deadline: float,
    ) -> tuple[str, str, list[int]]:
        """Wait until all pods have exited. Return the reason and message of the Job's failure, or
        two empty strings, and the exit codes in the order in which the pods exited."""
        grace_s = job["template"]["spec"]["terminationGracePeriodSeconds"]
        running = list(pods)
        failures = 0
        codes: list[int] = []
        reason = message = ""
        while running:
            assert time.monotonic() < deadline, self.logs()
            disturb(pods)
            for pod in list(running):
                code = pod.poll()
                if code is None:
                    continue
                running.remove(pod)
                codes.append(code)
                if code == 0 or reason:
                    continue
                action, message = pod_action(job, pod, code)
                failures += action == "Count"
                if action == "FailJob":
                    reason = "PodFailurePolicy"
                elif failures > job["backoffLimit"]:
                    reason = "BackoffLimitExceeded"
                    message = "Job has reached the specified backoff limit"
            if reason:
                for pod in running:
                    pod.terminate(grace_s)
            time.sleep(0.05)
        return reason, message, codes

    def _namespaces(self, index: int, names: list[str], service: str) -> list[str]:
        """Return a command prefix that runs a command in the pod's own namespaces."""
        if not self._networks:
            self._make_networks(names, service)
        script = 'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; exec "$@"'
        return [
            *("nsenter", f"--net=/run/netns/{self._networks[index]}"),
            *("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("bash", "-ec", script, "pod", str(self.folder / "hosts"), names[index]),
        ]

    def _make_networks(self, names: list[str], service: str) -> None:
        mark = f"vt{os.getpid() % 100_000}"
        ip("link", "add", f"{mark}b", "type", "bridge")
        ip("link", "set", f"{mark}b", "up")
        hosts = "127.0.0.1 localhost\n"
        for number, name in enumerate(names):
            network = f"{mark}n{number}"
            self._networks.append(network)
            ip("netns", "add", network)
            ip("link", "add", network, "type", "veth", "peer", "name", "eth0", "netns", network)
            ip("link", "set", network, "master", f"{mark}b", "up")
            address = f"{SUBNET}.{number + 10}"
            ip("-n", network, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", network, "link", "set", device, "up")
            hosts += f"{address} {name}.{service} {name}\n"
        (self.folder / "hosts").write_text(hosts)

    def close(self) -> None:
        for pod in self.pods:
            if pod.process.poll() is None:
                pod.signal(signal.SIGKILL)
                pod.process.kill()
                pod.process.wait()
        for network in self._networks:
            ip("netns", "delete", network)
        if self._networks:
            ip("link", "delete", f"vt{os.getpid() % 100_000}b")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def variables_of(container: dict[str, Any], index: int) -> dict[str, str]:
    """Return the environment variables of the container, without secrets, for the pod with the
    given completion index."""
    variables = {"JOB_COMPLETION_INDEX": str(index)}
    for variable in container.get("env", ()):
        source = variable.get("valueFrom")
        if source is None:
            variables[variable["name"]] = variable["value"]
        elif "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == INDEX
            variables[variable["name"]] = str(index)
        else:
            assert source["secretKeyRef"]["optional"] is True
    # TMPDIR is in a volume that does not exist outside Kubernetes.
    variables.pop("TMPDIR", None)
    return variables


def pod_action(job: dict[str, Any], pod: Pod, code: int) -> tuple[str, str]:
    """Return the action of the first rule in podFailurePolicy that matches a failed pod, or "Count"
    if no rule matches. If the action fails the Job, also return the Job's failure message."""
    for number, rule in enumerate(job["podFailurePolicy"]["rules"]):
        if requirement := rule.get("onExitCodes"):
            is_in = code in requirement["values"]
            if is_in == (requirement["operator"] == "In"):
                container = f"Container {requirement['containerName']} for pod default/{pod.name}"
                message = f"{container} failed with exit code {code}"
                return rule["action"], f"{message} matching {rule['action']} rule at index {number}"
        elif any(condition["type"] in pod.conditions for condition in rule["onPodConditions"]):
            message = f"Pod default/{pod.name} has condition DisruptionTarget"
            return rule["action"], f"{message} matching {rule['action']} rule at index {number}"
    return "Count", ""


def jobset_action(policy: dict[str, Any], reason: str, message: str) -> str:
    """Return the action of the first rule in a JobSet's failurePolicy that matches a failed Job."""
    for rule in policy["rules"]:
        reasons = rule.get("onJobFailureReasons") or [reason]
        patterns = rule.get("onJobFailureMessagePatterns") or [""]
        if reason in reasons and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"


def evict(pod: Pod, grace_s: float) -> None:
    """Evict a pod like a node drain or a preemption: set the pod's condition, then send the
    kubelet's signal."""
    pod.conditions.add("DisruptionTarget")
    pod.terminate(grace_s)


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBE / name).read_text()))
