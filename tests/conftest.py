"""Shards that many tests read and none changes; what tests start ends with them; what is missing
here is listed."""

from __future__ import annotations

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

# A slow machine is no fault of an example.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 training and 23 validation images of 3 classes in 3 shards."""
    return make_shards(tmp_path_factory.mktemp("data"))


@pytest.fixture
def config(tmp_path: Path, shards: Path) -> Path:
    """Twelve steps of twelve images on `shards`."""
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
    """The longest files come first: dealt over processes file by file, none is left for the end."""
    items.sort(
        key=lambda item: (
            LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST)
        )
    )


# ---- what tests start ----------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Of pytest-xdist's processes those that run tests."""
    # torch takes what it has compiled for another set of the CPU's instructions, with vectors of
    # another length, and half of the numbers are what was in memory (torch 2.15).
    kernels = torch.backends.cpu.get_cpu_capability().lower()
    compiled = Path(tempfile.gettempdir(), f"vit-tests-compiled-{os.getuid()}-{kernels}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
    # As in what tests start (`processes.environment`): a sum over two threads has other bits. Those
    # of several processes that wait for each other would cost ten times what they gain.
    torch.set_num_threads(1)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        families.begin_session()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that failed, or was timed out, has not come to the lines that end what it had
    started."""
    try:
        return (yield)
    except BaseException:
        families.end_of_failed_test()
        raise


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """The last fixture that ends; an error here belongs to the tests that the left processes
    name."""
    yield
    warm_python.stop()
    left = families.end_session()
    assert not left, "these processes outlived the tests that started them:\n" + "\n".join(left)


# ---- what is missing here ------------------------------------------------------------------------


def remedy(reasons: list[str]) -> str:
    """One line for the programs that skipped tests ask for; empty if none does."""
    asked = [re.search(r"apt-get install ([a-z0-9.+ -]+)", reason) for reason in reasons]
    packages = sorted({package for found in asked if found for package in found[1].split()})
    number = sum(found is not None for found in asked)
    return (
        f"{number} tests were skipped for missing programs: apt-get install {' '.join(packages)}"
        if packages
        else ""
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line of all; -ra has told each reason."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        skipped = [report.longrepr for report in reporter.stats.get("skipped", [])]
        if line := remedy([longrepr[2] for longrepr in skipped if isinstance(longrepr, tuple)]):
            reporter.write_line(line, yellow=True)
