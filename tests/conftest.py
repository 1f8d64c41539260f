"""Define fixtures with small shards, and pytest hooks that kill leftover processes and report
missing programs."""

from __future__ import annotations

import gc
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import families
import hypothesis
import pytest
import torch
import warm_python
from processes import make_shards, write_config
from system import forked_workers

# Disable the Hypothesis deadline, because examples would fail on slow machines.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write shards with 60 training images and 23 validation images from three classes."""
    return make_shards(tmp_path_factory.mktemp("data"))


@pytest.fixture
def config(tmp_path: Path, shards: Path) -> Path:
    """Return a config that trains on `shards` for twelve steps with twelve images each."""
    return write_config(tmp_path, shards)


LONGEST = (
    "test_train.py",
    "test_writer_processes.py",
    "test_data_errors.py",
    "test_run_folder_errors.py",
    "test_machine_errors.py",
    "test_page.py",
    "test_imagenet_whole.py",
    "test_wandb_servers.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest test files first. pytest-xdist assigns whole files to workers, so a long file
    that starts last would keep one worker busy while the others are idle."""
    items.sort(
        key=lambda item: (
            LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST)
        )
    )


def pytest_collection_finish() -> None:
    """Exclude the collected tests and the imported modules from garbage collections, each of which
    would scan them for half a second."""
    gc.collect()
    gc.freeze()


# ---- processes that tests start ------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    # Use one compilation cache per vector length, because torch 2.15 computes garbage with code
    # that was compiled for a different vector length.
    kernels = torch.backends.cpu.get_cpu_capability().lower()
    compiled = Path(tempfile.gettempdir(), f"vit-tests-compiled-{os.getuid()}-{kernels}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
    # Use one thread, because two threads sum numbers in a different order. Processes started by
    # tests also use one thread (`processes.environment`), because the threads of several processes
    # would slow each other down.
    torch.set_num_threads(1)
    forked_workers.install()
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        families.begin_session()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Kill the processes started by a test that failed or timed out before it could clean up."""
    try:
        return (yield)
    except BaseException:
        families.end_of_failed_test()
        raise


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail if processes are still running when the test session ends, and list the tests that
    started them."""
    yield
    warm_python.stop()
    left = families.end_session()
    assert not left, "these processes outlived the tests that started them:\n" + "\n".join(left)


# ---- missing programs ----------------------------------------------------------------------------


def remedy(reasons: list[str]) -> str:
    """Return a line that lists the missing programs that caused tests to be skipped, or ""."""
    matches = [re.search(r"apt-get install ([a-z0-9.+ -]+)", reason) for reason in reasons]
    packages = sorted({package for match in matches if match for package in match[1].split()})
    number = sum(match is not None for match in matches)
    return (
        f"{number} tests were skipped for missing programs: apt-get install {' '.join(packages)}"
        if packages
        else ""
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the missing programs after pytest's list of skipped tests (-ra)."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        skipped = [report.longrepr for report in reporter.stats.get("skipped", [])]
        if line := remedy([longrepr[2] for longrepr in skipped if isinstance(longrepr, tuple)]):
            reporter.write_line(line, yellow=True)
