"""Test that `launch/train.py --check` either succeeds or reports all problems together, and does
not leave any files behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from error_rows import leave_free, small_disk
from families import Family
from proc import children
from processes import REPOSITORY, TINY, Background, call, command, environment, run, run_here

from vit.system.meter import digits

PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

PARTS = [
    *("software", "shards", "run folder", "W&B", "clocks", "collectives", "config", "data"),
    *("hosts", "start", "reading", "step", "evaluation", "checkpoint"),
    "repeat",
]


def words(config: Path, run_dir: Path, *more: str) -> list[str]:
    return ["--config", str(config), f"run.dir={run_dir}", *TINY, "--check", *more]


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and modification time of each file in `folder`, and (0, 0) for each
    subfolder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    } | {str(path.relative_to(folder)): (0, 0) for path in folder.rglob("*") if path.is_dir()}


def verdicts(text: str) -> dict[str, str]:
    return {
        name.strip(): verdict
        for verdict, name in re.findall(r"^  (ok|note|FAIL|-) +(\S+(?: \S+)?)  ", text, re.M)
    }


def row(text: str, name: str) -> str:
    match = re.search(
        rf"^  (?:ok|note|FAIL|-) +{re.escape(name)}  +(.*(?:\n {{8}}.*)*)", text, re.M
    )
    assert match is not None, text
    return re.sub(r"\s+", " ", match[1]).strip()


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    # The table is wide enough that long paths are not wrapped.
    monkeypatch.setenv("COLUMNS", "400")


def test_the_check_of_a_new_run_succeeds_and_leaves_no_files(config, tmp_path, capsys):
    before = everything(tmp_path)
    run_here("launch/train.py", *words(config, tmp_path / "runs" / "new"))
    table = capsys.readouterr().out
    verdict_by_part = verdicts(table)
    assert list(verdict_by_part) == PARTS
    verdict_by_part.pop("hosts")
    assert set(verdict_by_part.values()) == {"ok"}, table
    assert "31,939 parameters: 12 steps of 12 images" in row(table, "config")
    assert "a new run" in row(table, "start")
    assert re.search(r"steps of 12 images of 16x16 px: .* loss 1\.\d+", row(table, "step"))
    assert everything(tmp_path) == before


def test_the_check_of_an_existing_run_changes_nothing(config, tmp_path, capsys):
    run_dir = tmp_path / "run"
    run_here("launch/train.py", *words(config, run_dir, "train.steps=3")[:-2], "train.steps=3")
    before = everything(run_dir)
    capsys.readouterr()
    run_here("launch/train.py", *words(config, run_dir, "train.steps=3"))
    assert everything(run_dir) == before
    assert "resumes at step 3 from step_00000003" in row(capsys.readouterr().out, "start")
    with pytest.raises(ValueError, match=r"check: .* 1 FAILED \(start\)"):
        run_here("launch/train.py", *words(config, run_dir, "train.steps=3", "optim.lr=1"))
    assert "belongs to a run with different settings: optim.lr: 0.001 there, 1 here" in row(
        capsys.readouterr().out, "start"
    ).replace("1.0 here", "1 here")
    assert everything(run_dir) == before


def test_all_problems_are_reported_at_once(config, shards, tmp_path, capsys):
    root = shutil.copytree(shards, tmp_path / "shards")
    config.write_text(config.read_text().replace(str(shards), str(root)))
    for shard in (root / "train-00001.tar", root / "val-00000.tar"):
        os.truncate(shard, shard.stat().st_size - 512)
    (root / "train-00002.tar").unlink()
    (tmp_path / "file").touch()
    before = everything(tmp_path)
    # Depending on the machine, one of the checks reports "note" instead of "ok".
    with pytest.raises(ValueError, match=r"[45] of 13 ok, 2 FAILED \(shards, run folder\)"):
        run_here("launch/train.py", *words(config, tmp_path / "file" / "run"))
    table = capsys.readouterr().out
    shards_row = row(table, "shards")
    assert re.search(r"val-00000.tar: \d+ bytes, expected \d+ \(truncated", shards_row)
    assert re.search(r"train-00001.tar: \d+ bytes, expected \d+ \(truncated", shards_row)
    assert "train-00002.tar: No such file or directory; copy it again" in shards_row
    assert "cannot be written (Not a directory): choose another" in row(table, "run folder")
    assert row(table, "step") == "skipped: needs data"
    assert everything(tmp_path) == before


def test_the_check_does_not_create_a_missing_index(config, shards, tmp_path, capsys):
    root = shutil.copytree(shards, tmp_path / "shards")
    config.write_text(config.read_text().replace(str(shards), str(root)))
    (root / "train.index.npy").unlink()
    before = everything(tmp_path)
    with pytest.raises(ValueError, match=r"FAILED \(shards\)"):
        run_here("launch/train.py", *words(config, tmp_path / "run"))
    assert "is absent: the next start must rebuild it" in row(capsys.readouterr().out, "shards")
    assert everything(tmp_path) == before


@pytest.mark.full
def test_the_check_succeeds_on_three_ranks_under_torchrun(config, tmp_path):
    exact = ("train.exact_over_ranks=true", "data.micro_batch_size=2", "loader.num_workers=1")
    before = everything(tmp_path)
    done = run("launch/train.py", *words(config, tmp_path / "run", *exact), ranks=3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert verdicts(done.stdout)["pairs"] in ("ok", "note")
    assert "\x1b[" not in done.stdout
    assert "same on all 3 ranks: torch " in row(done.stdout, "software")
    for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"):
        assert re.search(rf"{name} [\d.]+ [MG]B/s", row(done.stdout, "collectives"))
    assert "the slowest of 3: " in row(done.stdout, "pairs")
    assert "4 per rank in 2 micro-batches" in row(done.stdout, "config")
    assert "loaded on all ranks, removed" in row(done.stdout, "checkpoint")
    assert everything(tmp_path) == before


@pytest.mark.full
def test_a_failed_check_under_torchrun_ends_with_the_summary(config, shards, tmp_path):
    root = shutil.copytree(shards, tmp_path / "shards")
    config.write_text(config.read_text().replace(str(shards), str(root)))
    os.truncate(root / "val-00000.tar", 1024)
    done = run("launch/train.py", *words(config, tmp_path / "run"), ranks=2)
    assert done.returncode != 0
    assert "val-00000.tar: 1024 bytes, expected" in row(done.stdout, "shards")
    assert done.stdout.count("check of ") == 1
    assert len(re.findall(r"^error: check: .*FAILED \(shards\)", done.stderr, re.M)) == 1
    assert not (tmp_path / "run").exists()


SECONDS = ("model.image_size=224", "model.depth=12", "loader.num_workers=1")
"""Settings that make a step take several seconds."""


def has_workers(pid: int) -> bool:
    """Return whether a rank has started its loader workers. Child processes that are started by
    imports exit sooner than loader workers."""
    before = children(pid)
    time.sleep(0.5)
    return any(child in before for child in children(pid))


@pytest.mark.full
@pytest.mark.parametrize(
    ("victim", "number", "stage", "expected"),
    [
        (1, signal.SIGSTOP, "at once", r"rank 1 did not respond within 0:00:45"),
        (
            1,
            signal.SIGSTOP,
            "step",
            r"\(rank 1\) did not answer within 45 s \(process {pid}, stopped\)",
        ),
        (0, signal.SIGSTOP, "step", r"error: step: \S+ \(rank 0\) did not answer within 45 s"),
        (1, signal.SIGKILL, "step", r"\(rank 1\) exited without a message"),
    ],
)
def test_a_stopped_or_killed_rank_is_named(config, tmp_path, victim, number, stage, expected):
    more = ("--check", "--check-limit-s=15", *SECONDS)
    checking = Background(config, tmp_path / "run", *more, ranks=3, cold=True)
    while len(pids := checking.trainers()) < 3 or (
        stage == "step" and not has_workers(pids[victim])
    ):
        assert checking.process.poll() is None, checking.end()
        time.sleep(0.02)
    os.kill(pids[victim], number)
    try:
        seen = checking.wait_for_output("torch/distributed/elastic", timeout_s=200)
    finally:
        if number == signal.SIGSTOP:
            os.kill(pids[victim], signal.SIGKILL)
        seen_later = checking.end()
    output = re.sub(r"\s+", " ", seen + seen_later)
    assert re.search(expected.format(pid=pids[victim]), output), seen + seen_later
    assert checking.process.returncode != 0
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_test_checkpoint_leaves_no_files(config, tmp_path, number):
    large = ("model.embed_dim=768", "model.num_heads=12", "model.depth=4", "model.image_size=16")
    line = command("launch/train.py", *words(config, tmp_path / "run", *large), ranks=0)
    before = everything(tmp_path)
    with Family(line, env=environment(), cwd=REPOSITORY, **PIPES) as checking:
        deadline = time.monotonic() + 200
        while not list(tmp_path.glob(".check.*/checkpoints/*")):
            assert checking.process.poll() is None, checking.communicate(60)[0]
            assert time.monotonic() < deadline
            time.sleep(0.002)
        checking.process.send_signal(number)
        text, _ = checking.communicate(60)
    assert checking.process.returncode == 128 + number, text
    assert f"interrupted by {number.name}" in row(text, "checkpoint")
    assert everything(tmp_path) == before


@pytest.mark.full
def test_a_run_at_a_url_is_checked_at_the_url(config, tmp_path, capsys, monkeypatch):
    """On a machine without a copy of the run, the check must report which job holds the run and
    from which checkpoint the run would resume."""
    Lease = pytest.importorskip("vit.extras.remote_runs.lease").Lease
    from vit.run_folder.copying import store_at

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    url = f"file://{tmp_path}/bucket/run"
    for name in ("there", "here"):
        (tmp_path / name).mkdir()

    def line(name: str, *more: str) -> list[str]:
        return words(config, url, f"run.local_dir={tmp_path / name}", "train.steps=3", *more)

    run_here("launch/train.py", *[word for word in line("there") if word != "--check"])
    capsys.readouterr()
    before = everything(tmp_path / "bucket")
    run_here("launch/train.py", *line("here"))
    start = row(capsys.readouterr().out, "start")
    assert "resumes at step 3 from step_00000003, at its URL" in start
    with pytest.raises(ValueError, match=r"FAILED \(start\)"):
        run_here("launch/train.py", *line("here", "optim.lr=1"))
    assert "belongs to a run with different settings" in row(capsys.readouterr().out, "start")
    lease = Lease(store_at(url, 0.0), 60.0)
    lease.acquire("another machine")
    with pytest.raises(ValueError, match=r"FAILED \(run folder\)"):
        run_here("launch/train.py", *line("here"))
    lease.release()
    assert re.search(
        r"in use by \S+.* which is running or was killed",
        row(capsys.readouterr().out, "run folder"),
    )
    assert everything(tmp_path / "bucket") == before


def test_a_rate_below_one_is_not_printed_as_zero():
    assert [digits(value) for value in (2711.6, 27.12, 0.271, 0.00271)] == [
        *("2,712", "27.1", "0.27", "0.0027")
    ]


@pytest.mark.full
def test_a_disk_without_space_for_the_checkpoint_is_reported(config, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        leave_free(disk, 1200)
        before = everything(disk)
        line = command("launch/train.py", *words(config, disk / "run"), ranks=0)
        done = call(line, {**environment(), "COLUMNS": "120"})
        assert done.returncode == 2, done.stdout + done.stderr
        assert verdicts(done.stdout)["start"] == "FAIL"
        assert "the disk has only 1.2 MiB free: free some space" in row(done.stdout, "start")
        assert everything(disk) == before
