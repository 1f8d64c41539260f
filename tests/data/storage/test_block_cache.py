"""Test the block cache that jobs and users share: its locks, limits, permissions and default
folder."""

from __future__ import annotations

import logging
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import REPOSITORY, environment

from vit.data.storage import block_cache, file_lock
from vit.data.storage.block_cache import GIB, BlockCache, Fetched
from vit.data.storage.file_lock import locked_part
from vit.system.files import ShardError
from vit.system.host import default_folder, file_system, is_shared

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache"


def block(letter: bytes = b"x", num_bytes: int = 1000) -> Callable[[], Fetched]:
    return lambda: Fetched(letter * num_bytes, [num_bytes])


def blocks(folder: Path) -> int:
    return len(list(folder.rglob("*.block")))


def other_process(code: str, *arguments: object) -> subprocess.Popen:
    """Run `code` in another Python process, and wait until it signals that it is ready by printing
    a line."""
    env = {**environment(), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "here\n"
    return process


# ---- locks ---------------------------------------------------------------------------------------

HOLDS = """
import sys, time
from pathlib import Path
from vit.data.storage.block_cache import BlockCache, Fetched
cache = BlockCache(sys.argv[1], 1)
def get():
    print("here", flush=True)
    time.sleep(600)
if sys.argv[2] == "block":
    cache.fetch("set/0.block", get)
else:
    with cache._locked_count():
        get()
"""


def test_threads_that_meet_a_full_disk_report_it_once(folder, caplog, monkeypatch):
    """Logging is artificially slow in this test, so all threads arrive while the first thread is
    still logging its message."""
    slow = logging.Filter()
    monkeypatch.setattr(slow, "filter", lambda _: time.sleep(0.1) or True)
    block_cache.log.addFilter(slow)
    try:
        threads = [
            threading.Thread(
                target=block_cache._warn_once, args=(folder, "No space left on device")
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        block_cache.log.removeFilter(slow)
    assert [message for message in caplog.messages if message.startswith(str(folder))] == [
        f"{folder}: cannot be written (No space left on device); blocks are used but not stored"
    ]


@pytest.mark.parametrize("locked", ["block", "count"])
def test_a_stopped_process_with_a_lock_delays_other_processes_only_briefly(
    locked, folder, caplog, monkeypatch
):
    """A process that holds a lock may be suspended by Slurm, or may hang on an unavailable mount.
    Other processes must then fetch the block without storing it, and log one message."""
    monkeypatch.setattr(file_lock, "LOCK_WAIT_S", 0.5)
    monkeypatch.setattr(file_lock, "WARN_AFTER_S", 0.2)
    holder = other_process(HOLDS, folder, locked)
    os.kill(holder.pid, signal.SIGSTOP)
    try:
        cache = BlockCache(folder, 1)
        for _ in range(20):
            assert cache.fetch("set/0.block", block()) == b"x" * 1000
        assert caplog.text.count("waiting for up to") == 1, (
            "only the first access may wait for the lock"
        )
        assert not blocks(folder)
        file_name = "0.block.part" if locked == "block" else "used_bytes"
        assert re.search(
            rf"{file_name}: locked by process {holder.pid}, stopped; waiting for up to 0 s",
            caplog.text,
        ), caplog.text
        reason = rf"{file_name} is locked by process {holder.pid}, stopped"
        reports = re.findall(
            rf"cannot be written \({reason}\); blocks are used but not stored", caplog.text
        )
        assert len(reports) == 1
    finally:
        holder.kill()
        holder.wait()
    assert cache.fetch("set/0.block", block()) == b"x" * 1000
    assert blocks(folder) == 1, "blocks must be stored again once the lock is free"
    assert cache.fetch("set/0.block", block()) is None


# ---- limits --------------------------------------------------------------------------------------

HAS_LIMIT = """
import sys, time
from vit.data.storage.block_cache import GIB, BlockCache
cache = BlockCache(sys.argv[1], float(sys.argv[2]) / GIB)
print("here", flush=True)
time.sleep(600)
"""


def test_a_job_with_a_smaller_limit_removes_no_blocks_of_a_larger_one(folder):
    larger = BlockCache(folder, 100_000 / GIB)
    smaller = BlockCache(folder, 3000 / GIB)
    for n in range(40):
        larger.fetch(f"a/{n}.block", block())
    assert smaller.fetch("b/0.block", block()) is not None
    assert blocks(folder) == 41
    assert smaller.fetch("b/1.block", block(num_bytes=4000)) is not None
    assert not (folder / "b" / "1.block").exists(), "the block exceeds the job's limit"


def test_the_limit_of_a_job_applies_until_the_job_ends(folder):
    smaller = BlockCache(folder, 3500 / GIB)
    other = other_process(HAS_LIMIT, folder, 100_000)
    for n in range(10):
        smaller.fetch(f"a/{n}.block", block())
    assert blocks(folder) == 10
    other.kill()
    other.wait()
    smaller.fetch("a/10.block", block())
    assert blocks(folder) <= 3
    assert [path.name for path in folder.glob("limit.*")] == ["limit.3500"]


def test_the_default_limit_is_50_gib_or_half_of_the_free_disk(folder):
    free = os.statvfs(folder.parent)
    assert BlockCache(folder).limit_bytes == pytest.approx(
        min(50 * GIB, free.f_bavail * free.f_frsize // 2), rel=0.05
    )


# ---- users ---------------------------------------------------------------------------------------

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to run as other users")


def as_user(user: int, group: int, function: Callable[[], None]) -> str:
    """Call `function` as another user in a child process. Return the error message, or "" if the
    call succeeds."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        problem = ""
        try:
            os.setgroups([group])
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
            os.umask(0o022)
            function()
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
        os.write(writing, problem.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading) as file:
        return file.read()


@pytest.fixture
def open_to_all(tmp_path) -> Path:
    for parent in (tmp_path, *tmp_path.parents):
        if parent != Path("/") and not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    return tmp_path


def test_only_its_user_can_read_a_new_cache(folder):
    BlockCache(folder, 1).fetch("set/0.block", block())
    for path in (folder, *folder.rglob("*")):
        assert not path.stat().st_mode & 0o077, path


@root_only
def test_a_group_shares_a_cache_in_a_folder_that_it_may_write(open_to_all):
    folder = open_to_all / "shared"
    folder.mkdir()
    os.chown(folder, 0, 4242)
    folder.chmod(0o2770)

    def fetches(letter: bytes, expected: int) -> Callable[[], None]:
        def run() -> None:
            cache = BlockCache(folder, 8000 / GIB)
            for n in range(6):
                cache.fetch(f"set/{n}.block", block(letter))
            for n in range(2):
                cache.fetch(f"set/{letter.decode()}{n}.block", block(letter))
            assert cache.read("set/5.block", 1000, 1, 0, 0, 1000) in (b"a" * 1000, b"b" * 1000)
            assert blocks(folder) == expected

        return run

    assert as_user(1001, 4242, fetches(b"a", 7)) == ""
    assert as_user(1002, 4242, fetches(b"b", 7)) == "", (
        "the second user must be able to count, read and remove the first user's blocks"
    )
    problem = as_user(1003, 4243, fetches(b"c", 7))
    assert "cannot store the shard cache (Permission denied); choose a folder" in problem


@root_only
@pytest.mark.parametrize("kind", ["link", "hard link", "foreign file"])
def test_files_of_another_user_are_not_written_to(kind, open_to_all, caplog):
    folder = open_to_all / "shared"
    victim = open_to_all / "victim"
    folder.mkdir()
    victim.write_bytes(b"precious")
    os.chown(victim, 1001, 4242)
    folder.chmod(0o2770)
    os.chown(folder, 0, 4242)
    (folder / "set").mkdir()
    (folder / "set").chmod(0o777)
    part = folder / "set" / "0.block.part"
    if kind == "link":
        part.symlink_to(victim)
    elif kind == "hard link":
        os.link(victim, part)
    else:
        part.write_bytes(b"")
        os.chown(part, 1002, 4243)
        part.chmod(0o666)

    def fetch() -> None:
        cache = BlockCache(folder, 1)
        assert cache.fetch("set/0.block", block()) == b"x" * 1000, (
            "the block must be returned but not stored"
        )
        assert not (folder / "set" / "0.block").exists()

    assert as_user(1001, 4242, fetch) == ""
    assert victim.read_bytes() == b"precious"


def test_a_world_writable_folder_is_refused(folder):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(
        ShardError,
        match=(
            rf"{folder}: any user can write to this folder .*: run `chmod o-w {folder}`, or"
            r" choose another folder with"
        ),
    ):
        BlockCache(folder, 1)


# ---- the default folder --------------------------------------------------------------------------


def mounts(root: Path, **kinds: str) -> Path:
    """Create a root folder with a fake mount table, and return it. `kinds` maps folders to file
    system types, and `all` stands for all other folders."""
    (root / "proc" / "self").mkdir(parents=True)
    device = os.stat(root).st_dev
    lines = [
        f"{n} 1 {os.major(device)}:{os.minor(device)} / {'/' if place == 'all' else place}"
        f" rw,relatime shared:1 - {kind} server:/x rw"
        for n, (place, kind) in enumerate(kinds.items(), 20)
    ]
    (root / "proc" / "self" / "mountinfo").write_text("\n".join(lines) + "\n")
    return root


def test_the_default_folder_is_on_a_local_disk(tmp_path, monkeypatch):
    for name in ("SLURM_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    node = tmp_path / "node"
    home.mkdir()
    node.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    local = mounts(tmp_path / "1", all="ext4")
    assert default_folder(local) == home / "vit"
    monkeypatch.setenv("TMPDIR", str(node))
    assert default_folder(local) == node / f"vit-{os.getuid()}"
    for kind in ("nfs4", "lustre", "gpfs", "beegfs", "fuse.sshfs", "tmpfs"):
        shared_home = mounts(tmp_path / kind / "home", **{"all": "xfs", str(home): kind})
        assert default_folder(shared_home) == node / f"vit-{os.getuid()}"
        shared_node = mounts(tmp_path / kind / "node", **{"all": "xfs", str(node): kind})
        assert default_folder(shared_node) == home / "vit"
        both = mounts(tmp_path / kind / "both", all=kind)
        named = (
            rf"only {node}/vit-\d+ \({kind}\), {home}/vit \({kind}\): set loader.cache_dir to one"
        )
        with pytest.raises(ShardError, match=named):
            default_folder(both)
    assert default_folder(tmp_path) == node / f"vit-{os.getuid()}", (
        "without /proc the first candidate must be used"
    )


def test_file_systems_are_read_from_the_kernel(tmp_path):
    described = subprocess.run(
        ["stat", "--file-system", "--format=%T", tmp_path], capture_output=True, text=True
    ).stdout.strip()
    kind = file_system(tmp_path)
    assert kind
    assert kind.startswith("ext") == described.startswith("ext")
    assert file_system(Path("/proc")) == "proc"
    assert not is_shared(kind)


def test_waiting_for_a_lock_continues_while_its_part_grows(folder, monkeypatch):
    monkeypatch.setattr(file_lock, "LOCK_WAIT_S", 3.0)
    folder.mkdir()
    with locked_part(folder / "index") as part:
        pid = os.fork()
        if pid == 0:
            try:
                with locked_part(folder / "index") as other:
                    os._exit(0 if other is not None else 2)
            except BaseException:
                os._exit(1)
        for _ in range(40):
            part.write(b"more")
            time.sleep(0.1)
    assert os.waitpid(pid, 0)[1] == 0


def test_waiting_for_a_lock_is_reported_repeatedly(folder, monkeypatch, caplog):
    monkeypatch.setattr(file_lock, "LOCK_WAIT_S", 3.0)
    monkeypatch.setattr(file_lock, "WARN_AFTER_S", 0.05)
    monkeypatch.setattr(file_lock, "WARN_AGAIN_S", 0.1)
    folder.mkdir()
    with locked_part(folder / "index"):
        with (
            pytest.raises(TimeoutError, match=r"index\.part is locked by process"),
            locked_part(folder / "index"),
        ):
            pass
    assert caplog.text.count("index.part: locked by process") >= 2
