from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from deploy.kubernetes_stand_in import Cluster, ip


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    """Return a simulated cluster whose pods are ordinary processes. Two pods communicate over the
    network of this host."""
    cluster = Cluster(tmp_path, isolated=False)
    yield cluster
    cluster.close()


@pytest.fixture
def isolated_cluster(tmp_path) -> Iterator[Cluster]:
    """Return a simulated cluster whose pods have their own Linux namespaces, which requires
    root."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        pytest.skip("network namespaces need root on Linux")
    probe = subprocess.run(["ip", "link", "add", "vtprobe", "type", "bridge"], capture_output=True)
    if probe.returncode:
        pytest.skip(f"network namespaces are not available: {probe.stderr.decode().strip()}")
    ip("link", "delete", "vtprobe")
    cluster = Cluster(tmp_path, isolated=True)
    yield cluster
    cluster.close()
