"""Test that a background thread saves checkpoints while training continues.

Each file must be complete and must contain the state of a single step.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from error_rows import WITH_SHORT_FILES
from processes import TINY, call, command, final_state, last_step, metrics, train
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

import vit.train
from vit.checkpoint.checkpoint import CheckpointError, newest_checkpoint
from vit.checkpoint.saver import Saver
from vit.compose import build_run
from vit.config import io as config_io
from vit.config.schema import CheckpointConfig
from vit.distributed.process_group import World
from vit.run import Run
from vit.run_folder.paths import complete_checkpoints
from vit.weights.files import find_weights, read_weights

ALONE = World(0, 1, torch.device("cpu"))
STEPS = 3


def built(config: Path, folder: Path, *overrides: str) -> Run:
    """Build a run with an idle saver thread, but do not start training."""
    settings = config_io.load_config(config, [*TINY, f"run.dir={folder}", *overrides])
    run = build_run(settings, ALONE)
    run.saver.finish()
    return run


def fill(run: Run, step: int) -> None:
    run.state.step = step
    with torch.no_grad():
        for model in run.models().values():
            for parameter in model.parameters():
                parameter.fill_(step)
        for slots in run.train_step.optimizer.state.values():
            for value in slots.values():
                value.fill_(step)


def held_at(path: Path, step: int) -> bool:
    """Return whether every weight in the file equals `step`."""
    with safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if not name.startswith("scaler.")]  # noqa: SIM118
        return all((file.get_tensor(name) == step).all() for name in names)


# ---- a hook for every file operation of the thread -----------------------------------------------

_at_each: Callable[[str, tuple], None] | None = None
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def _hook(event: str, args: tuple) -> None:
    if _at_each is None or event not in OPERATIONS:
        return
    if threading.current_thread().name == "saver":
        _at_each(event, args)


@contextmanager
def at_each_operation(function: Callable[[str, tuple], None]) -> Iterator[None]:
    """Call `function` before each file operation of the saver thread, using Python audit hooks."""
    global _at_each
    # Add the hook only once, because Python cannot remove audit hooks.
    if not getattr(sys, "_saver_hook", False):
        sys.addaudithook(_hook)
        sys._saver_hook = True  # type: ignore[attr-defined]
    _at_each = function
    try:
        yield
    finally:
        _at_each = None


def in_a_fork(function: Callable[[], None]) -> int:
    pid = os.fork()
    if not pid:
        try:
            function()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def save_all(run: Run) -> None:
    """Save a checkpoint and an evaluation at each step from 1 to STEPS."""
    saver = Saver(
        run.place,
        run.train_step,
        config_io.to_dict(run.config),
        [],
        CheckpointConfig(keep_last=1),
        run.record,
    )
    saver.prepare()
    for step in range(1, STEPS + 1):
        fill(run, step)
        saver.save(run.state, True, ("best", "last"))
        saver.finish()


def count_operations(run: Run) -> int:
    read, write = os.pipe()

    def count() -> None:
        with at_each_operation(lambda event, args: os.write(write, b".") and None):
            save_all(run)

    assert in_a_fork(count) == 0
    os.close(write)
    with os.fdopen(read, "rb") as file:
        return len(file.read())


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.full), 4])
def test_a_kill_before_any_file_operation_leaves_the_run_folder_whole(tmp_path, config, stride):
    first = built(config, tmp_path / "counted")
    first.record.close()
    total = count_operations(first)
    assert total > 30 * STEPS, "a save must consist of more than 30 file operations"
    steps_found = set()
    # Start with the second save, because the first save does not replace any files.
    moments = range(total // STEPS, total, stride)
    run = built(config, tmp_path / "run")
    run.record.close()
    for moment in moments:
        left = iter(range(moment))

        def kill(event: str, args: tuple, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        def save_until_killed(kill: Callable[[str, tuple], None] = kill) -> None:
            with at_each_operation(kill):
                save_all(run)

        status = in_a_fork(save_until_killed)
        assert os.WIFSIGNALED(status), f"operation {moment} of {total} was never reached"
        steps_found.add(assert_whole(run.folder))
        _empty(run.folder)
    assert steps_found == set(range(1, STEPS + 1))


def assert_whole(folder: Path) -> int:
    """Check the run folder after a kill, and return the step of the newest checkpoint."""
    checkpoint = newest_checkpoint(folder, verify=True)
    assert checkpoint is not None, (
        "the previous checkpoint may be removed only when a newer one exists"
    )
    newest, info = checkpoint
    assert held_at(newest / "state.safetensors", info["step"])
    assert len(complete_checkpoints(folder)) <= 2
    latest = (folder / "checkpoints" / "latest").read_text().strip()
    assert (folder / "checkpoints" / latest / "checkpoint.json").is_file()
    for name in ("last", "best", "last_ema", "best_ema"):
        path = folder / "weights" / f"{name}.safetensors"
        with safe_open(path, framework="pt") as file:
            step = int(file.metadata()["step"])
        assert held_at(path, step)
        assert step >= info["step"], (
            "a checkpoint must not be newer than the weights that it refers to"
        )
    return info["step"]


def _empty(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
        elif path.name not in ("config.yaml", "metrics.jsonl"):
            path.unlink()


@pytest.mark.parametrize("limit_kib", [60, 300])
def test_a_kill_while_writing_a_file_leaves_the_run_folder_intact(tmp_path, config, limit_kib):
    """A file size limit makes the kernel kill the process while it writes either the weights (125
    KiB) or the training state (500 KiB)."""
    run = built(config, tmp_path / "run")
    run.record.close()

    def limit(event: str, args: tuple) -> None:
        # The first checkpoint is removed only after the second one has been saved.
        if event == "shutil.rmtree":
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_kib << 10, limit_kib << 10))

    def save_until_killed() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        with at_each_operation(limit):
            save_all(run)

    status = in_a_fork(save_until_killed)
    assert os.WTERMSIG(status) == signal.SIGXFSZ
    assert assert_whole(run.folder) == 2
    unfinished = list(run.folder.rglob("*.tmp"))
    assert [path.stat().st_size for path in unfinished] == [limit_kib << 10]
    assert (".tmp_step_00000003" in str(unfinished[0])) is (limit_kib == 300)

    # The next save must remove the partly written files.
    assert in_a_fork(lambda: save_all(run)) == 0
    assert not list(run.folder.rglob("*.tmp")), "the partial files must be removed"


def test_the_next_save_removes_a_partly_removed_checkpoint(tmp_path, config):
    """The process is killed after it has removed one of the two files in a checkpoint folder. The
    other file could occupy gigabytes."""
    run = built(config, tmp_path / "run")
    run.record.close()
    removed = []

    def kill(event: str, args: tuple) -> None:
        if event == "os.remove" and str(args[0]) in ("checkpoint.json", "state.safetensors"):
            removed.append(args)
            if len(removed) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    def save_until_killed() -> None:
        with at_each_operation(kill):
            save_all(run)

    assert os.WTERMSIG(in_a_fork(save_until_killed)) == signal.SIGKILL
    assert_whole(run.folder)
    fill(run, 9)
    saver = Saver(run.place, run.train_step, {}, [], CheckpointConfig(keep_last=1), run.record)
    saver.prepare()
    saver.save(run.state, True)
    saver.finish()
    saver.close()
    names = {path.name for path in (run.folder / "checkpoints").iterdir()}
    assert names == {"step_00000009", "latest"}


def test_a_process_forked_during_a_save_does_not_inherit_its_file(tmp_path, config):
    """Evaluation workers live as long as the run. If a worker inherited the open file, a removed
    checkpoint would continue to occupy disk space."""
    run = built(config, tmp_path / "run")
    observations = list[tuple[list[str], int]]()

    def look(event: str, args: tuple) -> None:
        if event == "os.rename" and not observations:
            observations.append((open_files(tmp_path, ".tmp"), in_a_fork(expect_nothing)))

    def expect_nothing() -> None:
        assert not open_files(tmp_path, ".tmp")

    with at_each_operation(look):
        run.saver.save(run.state, True)
        run.saver.finish()
    run.__exit__(None, None, None)
    [(files, status)] = observations
    assert [Path(file).name.split(".")[1] for file in files] == ["state"]
    assert status == 0


def open_files(folder: Path, ending: str) -> list[str]:
    open_now = Path("/proc/self/fd")
    links = [os.readlink(file) for file in open_now.iterdir() if file.exists()]
    return [link for link in links if link.startswith(str(folder)) and link.endswith(ending)]


def test_an_error_in_the_thread_is_raised_at_the_next_save_and_at_the_end(tmp_path, config):
    run = built(config, tmp_path / "run")
    fill(run, 1)
    run.saver.save(run.state, True, ("last",))
    run.saver.finish()
    assert not run.saver.has_failed
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 10, before[1]))
    try:
        fill(run, 2)
        run.saver.save(run.state, True)
        with pytest.raises(CheckpointError, match=r"state\.safetensors: cannot be written \(File"):
            run.saver.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run.saver.has_failed
    with pytest.raises(CheckpointError, match="cannot be written"):
        run.saver.save(run.state, True)
    run.__exit__(None, None, None)
    [folder] = complete_checkpoints(run.folder)
    assert folder.name == "step_00000001"
    assert not list(run.folder.rglob("*.tmp*")), "partial files were left"
    assert [line["step"] for line in metrics(run.folder, "checkpoint")] == [1], (
        "metrics.jsonl must list only existing checkpoints"
    )


@pytest.mark.slow
def test_a_disk_that_becomes_full_during_a_save_ends_all_ranks_with_one_message(tmp_path, config):
    """The saver thread of rank 0 fails while all ranks are training."""
    arguments = ("--config", config, f"run.dir={tmp_path / 'run'}", *TINY)
    output = call([*WITH_SHORT_FILES, *command("launch/train.py", *arguments, ranks=2)]).stderr
    assert len(re.findall(r"^error: .*: cannot be written", output, re.MULTILINE)) == 1, output
    assert "\nrank 1: " not in output, output
    assert "exitcode  : 2 " in output
    assert "Traceback (most recent call last)" not in output.split("failed (exitcode")[0]
    assert not list((tmp_path / "run").rglob("*.safetensors*"))


def test_saves_the_state_of_the_copy_in_a_format_that_torch_reads(tmp_path, config):
    """torch.distributed.checkpoint must be able to load the saved files into uninitialized
    tensors."""
    run = built(config, tmp_path / "run")
    release = threading.Event()

    def hold(event: str, args: tuple) -> None:
        assert release.wait(240)

    with at_each_operation(hold):
        fill(run, 1)
        run.saver.save(run.state, True, ("last", "best"))
        # Change the weights while the saver thread is still blocked.
        fill(run, 2)
        release.set()
        run.saver.finish()
    run.__exit__(None, None, None)
    folder = run.folder / "checkpoints" / "step_00000001"
    assert held_at(folder / "state.safetensors", 1)
    assert all(held_at(path, 1) for path in (run.folder / "weights").glob("*.safetensors"))
    with safe_open(folder / "state.safetensors", framework="pt") as file:
        names = file.keys()
        tensors = {name: torch.full_like(file.get_tensor(name), 7) for name in names}
    load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    assert all((value == 1).all() for name, value in tensors.items() if "scaler" not in name)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_run_whose_folder_was_removed_ends_with_the_next_save(tmp_path, config, is_replaced):
    """A run must not save to a path from which its folder has been removed, because another run may
    have created a new folder there."""
    run = built(config, tmp_path / "run")
    run.saver.save(run.state, True)
    run.saver.finish()
    run.folder.rename(tmp_path / "moved")
    if is_replaced:
        run.folder.mkdir()
        (run.folder / ".lock").touch()
    with pytest.raises(ValueError, match="was removed, moved or replaced"):
        run.saver.save(run.state, True)
    run.__exit__(None, None, None)
    assert not (run.folder / "checkpoints").exists()
    assert complete_checkpoints(tmp_path / "moved")


def test_a_second_interrupt_does_not_wait_for_a_blocked_thread(tmp_path, config):
    """Writing to a lost network mount can block forever. The previous checkpoint must remain
    complete."""
    run = built(config, tmp_path / "run", "checkpoint.every_steps=2")
    release = threading.Event()
    give_up = threading.Timer(120, release.set)

    def hold(event: str, args: tuple) -> None:
        if event == "os.rename" and str(args[1]).endswith("step_00000004"):
            give_up.start()
            assert release.wait(240)

    def interrupt_twice(part: object) -> None:
        if run.state.step == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    run.train_step.mark = interrupt_twice
    with at_each_operation(hold):
        with pytest.raises(KeyboardInterrupt):
            vit.train.train(run)
        has_waited = release.is_set()
        release.set()
        give_up.cancel()
    assert not has_waited
    assert [path.name for path in complete_checkpoints(run.folder)][-1] == "step_00000002"


@pytest.mark.slow
def test_a_signal_during_a_save_waits_for_the_save_and_then_saves_again(tmp_path, config):
    """The run receives SIGTERM while the saver thread is blocked. The run must wait for the thread,
    and then save a checkpoint from which it can resume."""
    overrides = ("train.steps=18", "eval.every_steps=100", "checkpoint.every_steps=6")
    train(config, tmp_path / "whole", *overrides)
    run = built(config, tmp_path / "run", *overrides, "checkpoint.keep_last=9")
    held_at_step = []
    main = threading.main_thread().ident
    release = threading.Event()

    def hold(event: str, args: tuple) -> None:
        if event == "os.rename" and str(args[1]).endswith("step_00000006"):
            assert release.wait(240)

    def stop() -> None:
        while last_step(run.folder) < 8:
            time.sleep(0.01)
        held_at_step.append(last_step(run.folder))
        os.kill(os.getpid(), signal.SIGTERM)
        while "_wait" not in _functions(main):
            time.sleep(0.01)
        assert not complete_checkpoints(run.folder)
        release.set()

    helper = threading.Thread(target=stop)
    with at_each_operation(hold):
        helper.start()
        assert vit.train.train(run) == "stopped"
    helper.join()
    steps = [line["step"] for line in metrics(run.folder, "checkpoint")]
    assert steps[0] == 6
    assert 8 <= held_at_step[0] <= steps[-1] <= 14
    assert [int(path.name[5:]) for path in complete_checkpoints(run.folder)] == steps[::-1]
    assert read_weights(run.folder).step == steps[-1]
    train(config, run.folder, *overrides)
    assert final_state(run.folder, 18) == final_state(tmp_path / "whole", 18)


def _functions(thread: int | None) -> set[str]:
    frame = sys._current_frames().get(thread or 0)
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def test_weights_are_read_from_a_newer_checkpoint(tmp_path, config):
    """Weights files are written only after evaluations, so a killed run may have a checkpoint that
    is newer than its weights files."""
    folder = tmp_path / "run"
    train(config, folder, "train.steps=9", "eval.every_steps=6", "checkpoint.every_steps=3")
    assert find_weights(folder) == folder / "weights" / "last_ema.safetensors"
    assert read_weights(folder).step == 9
    older = tmp_path / "older"
    train(config, older, "train.steps=6", "eval.every_steps=6", "checkpoint.every_steps=3")
    for path in (older / "weights").iterdir():
        path.rename(folder / "weights" / path.name)
    assert find_weights(folder) == folder / "checkpoints" / "step_00000009"
    weights = read_weights(folder)
    assert (weights.step, weights.averaged) == (9, True)
    for path in (folder / "weights").iterdir():
        path.unlink()
    assert find_weights(folder) == folder / "checkpoints" / "step_00000009"
