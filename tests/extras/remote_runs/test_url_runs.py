"""Test that a run stored at a URL and a run in a local folder have bit-identical results.

The tests use a real S3 server, machines without local files, and network faults.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import boto3
import pytest
from processes import TINY, Background, final_state, run, run_here, train, write_config
from servers import forget_clients

from vit.checkpoint.checkpoint import newest_checkpoint
from vit.data.storage.object_store import ObjectStore
from vit.loggers.lines import read_metrics
from vit.run_folder.copying import parts_in, read_record, store_at
from vit.run_folder.reading import local_run

STEPS = 24
LEASE_S = 2.0
SECRET = "wJalrXUtnFEMI/K7MDENG"


def settings(url: str, local: Path, *more: str) -> list[str]:
    return [f"run.local_dir={local}", f"run.lease_s={LEASE_S}", "loader.patience_s=60", *more]


def train_here(config: Path, url: str, local: Path, *more: str) -> None:
    arguments = [*TINY, f"run.dir={url}", *settings(url, local), *more]
    run_here("launch/train.py", "--config", config, *arguments)


def train_at(config: Path, url: str, local: Path, *more: str, ranks: int = 0, ok: bool = True):
    arguments = [*TINY, f"run.dir={url}", *settings(url, local), *more]
    done = run("launch/train.py", "--config", config, *arguments, ranks=ranks)
    assert not ok or done.returncode == 0, done.stdout + done.stderr
    return done


def record_at(url: str, folder: Path) -> list[dict]:
    """Return the complete lines of metrics.jsonl at a URL."""
    store = store_at(url, 60)
    path = folder / "record.jsonl"
    path.write_bytes(read_record(store, store.list_below()))
    return read_metrics(path)


def assert_whole(url: str, folder: Path, steps: int = STEPS) -> None:
    """Assert that the metrics at the URL contain each step once, and that all checkpoints are
    complete."""
    lines = record_at(url, folder)
    counts = Counter(line["step"] for line in lines if line["kind"] == "train")
    assert counts == dict.fromkeys(range(1, steps + 1), 1)
    assert lines[-1]["kind"] == "end"
    assert lines[-1]["outcome"] == "finished"


def objects_of(s3, url: str) -> dict[str, bytes]:
    prefix = url.split("/", 3)[3] + "/"
    return {
        name.removeprefix(prefix): data
        for name, data in s3.objects(url).items()
        if name.startswith(prefix)
    }


@pytest.fixture
def config(tmp_path: Path, shards: Path) -> Path:
    return write_config(tmp_path, shards, steps=STEPS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> dict[str, str]:
    """Return the final state of an uninterrupted run in a local folder."""
    folder = tmp_path_factory.mktemp("whole")
    run_here(
        *("launch/train.py", "--config", write_config(folder, shards, steps=STEPS), *TINY),
        f"run.dir={folder / 'run'}",
    )
    return final_state(folder / "run", STEPS)


@pytest.mark.slow
def test_a_run_resumes_in_an_empty_folder_from_the_url_alone(
    s3, tmp_path, shards, capfd, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    forget_clients()
    config = write_config(tmp_path, shards, steps=9)
    url = f"{s3.new_bucket()}/runs/some run"
    with s3.only("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
        train_here(config, url, tmp_path / "one", "train.steps=6")
    # Delete the local files as if the first machine had been lost.
    shutil.rmtree(tmp_path / "one")
    train_here(config, url, tmp_path / "two", "--allow-change", "train.steps")
    objects = objects_of(s3, url)
    assert "lease.json" not in objects
    assert {name.split("/")[1] for name in objects if name.startswith("checkpoints/step")} == {
        "step_00000006",
        "step_00000009",
    }, "the URL must have the checkpoints that a folder would keep"
    assert objects["checkpoints/latest"] == b"step_00000009\n"
    for name, data in objects.items():
        if not name.startswith(("record/", "checkpoints/latest")):
            assert (tmp_path / "two" / name).read_bytes() == data, name
    parts = [objects[name] for name in sorted(objects) if name.startswith("record/")]
    assert b"".join(parts) == (tmp_path / "two" / "metrics.jsonl").read_bytes()
    starts = [json.loads(line) for line in b"".join(parts).splitlines() if b'"start"' in line[:20]]
    assert [start["restarts"] for start in starts] == [0, 1]
    assert_whole(url, tmp_path, 9)
    assert SECRET.encode() not in b"".join(objects.values())
    left = (path for path in (tmp_path / "two").rglob("*") if path.is_file())
    assert not any(SECRET.encode() in path.read_bytes() for path in left)
    assert SECRET not in "".join(capfd.readouterr())

    capfd.readouterr()
    run_here("launch/eval.py", url, "--json")
    printed = json.loads(capfd.readouterr().out)
    evals = [line for line in record_at(url, tmp_path) if line["kind"] == "eval"]
    assert printed["correct_top1"] == evals[-1]["correct_top1_ema"]
    fetched = local_run(url)
    assert newest_checkpoint(fetched) is None, (
        "the weights are as new as the checkpoint, so it must not be fetched"
    )
    assert (fetched / "metrics.jsonl").read_bytes() == b"".join(parts)
    weights = f"{url}/weights/best.safetensors"
    assert local_run(weights).read_bytes() == objects["weights/best.safetensors"]


def holds(at: str, number: int, sent: list[str]) -> Callable[[str, str], str | None]:
    """Return a fault that suspends one of the PUT requests whose path contains `at`, namely request
    `number`. The paths of all these requests are appended to `sent`."""

    def fault(method: str, path: str) -> str | None:
        if method == "PUT" and at in path:
            sent.append(path)
            return "hold" if len(sent) == number else None
        return None

    return fault


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("at", ["state.safetensors", "checkpoint.json", "latest", "record/part"])
def test_a_run_killed_during_an_upload_resumes_on_another_machine_to_the_same_bits(
    s3, proxy, tmp_path, config, shards, at, ranks
):
    train(config, tmp_path / "whole", ranks=ranks)
    expected = final_state(tmp_path / "whole", STEPS)
    url = f"{s3.new_bucket()}/runs/x"
    proxy.fault = holds(at, 3, [])
    arguments = [f"run.dir={url}", *settings(url, tmp_path / "one")]
    background = Background(config, tmp_path / "one", *arguments, ranks=ranks)
    assert proxy.is_holding.wait(120), background.end()
    background.kill_all()
    proxy.is_good()
    shutil.rmtree(tmp_path / "one")
    objects = objects_of(s3, url)
    latest = objects["checkpoints/latest"].decode().strip()
    assert f"checkpoints/{latest}/checkpoint.json" in objects
    assert f"checkpoints/{latest}/state.safetensors" in objects, (
        "`latest` must never name an incomplete checkpoint"
    )
    done = train_at(config, url, tmp_path / "two", ranks=ranks)
    assert "taking over" in done.stderr or "waiting up to" in done.stderr
    assert f"resumed at step {int(latest.removeprefix('step_'))} of" in done.stderr or (
        at == "latest"
    )
    assert final_state(tmp_path / "two", STEPS) == expected
    assert_whole(url, tmp_path)
    proxy.let_go.set()


@pytest.mark.full
def test_throttled_and_interrupted_uploads_cost_only_time(s3, proxy, tmp_path, config, whole):
    url = f"{s3.new_bucket()}/runs/x"
    counts = Counter[str]()

    def fault(method: str, path: str) -> str | None:
        counts[method] += 1
        if method == "PUT" and counts[method] % 3 == 0:
            return "503 SlowDown" if counts[method] % 2 else "cut"
        return "503 SlowDown" if method != "PUT" and counts[method] % 7 == 0 else None

    proxy.fault = fault
    train_at(config, url, tmp_path / "one")
    proxy.is_good()
    assert counts["PUT"] > 30, "no fault happened"
    assert final_state(tmp_path / "one", STEPS) == whole
    assert_whole(url, tmp_path)


@pytest.mark.full
def test_an_outage_of_the_store_at_a_save_costs_only_time(s3, proxy, tmp_path, config, whole):
    url = f"{s3.new_bucket()}/runs/x"
    began: list[float] = []

    def fault(method: str, path: str) -> str | None:
        num_saves = sum(each[0] == "PUT" and "latest" in each[1] for each in proxy.requests)
        if num_saves >= 2 and "lease.json" in path and not began:
            began.append(time.monotonic())
        return "503 SlowDown" if began and time.monotonic() < began[0] + 2 * LEASE_S else None

    proxy.fault = fault
    train_at(config, url, tmp_path / "one")
    assert began
    assert final_state(tmp_path / "one", STEPS) == whole
    assert_whole(url, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [0, 2])
def test_expired_keys_end_a_run_with_their_name_and_it_resumes_with_new_keys(
    s3, proxy, tmp_path, config, ranks
):
    train(config, tmp_path / "whole", ranks=ranks)
    expected = final_state(tmp_path / "whole", STEPS)
    url = f"{s3.new_bucket()}/runs/x"
    is_expired = False

    def fault(method: str, path: str) -> str | None:
        nonlocal is_expired
        is_expired |= "step_00000009" in path
        return "400 ExpiredToken" if is_expired else None

    proxy.fault = fault
    done = train_at(config, url, tmp_path / "one", ranks=ranks, ok=False)
    assert done.returncode == (1 if ranks else 2), done.stderr
    assert "ExpiredToken it is" in done.stderr
    assert "credentials come from AWS_ACCESS_KEY_ID" in done.stderr
    assert f"the working copy {tmp_path / 'one'} is complete, and the same command" in done.stderr
    assert done.stderr.count("error: ") <= 2, (
        "the error must occur once, and once in torchrun's report"
    )
    assert "AKIA" not in done.stderr
    proxy.is_good()
    train_at(config, url, tmp_path / "one", ranks=ranks)
    assert final_state(tmp_path / "one", STEPS) == expected
    assert_whole(url, tmp_path)


@pytest.mark.parametrize("script", ["launch/train.py", "launch/job.py"])
def test_a_missing_bucket_is_a_users_mistake_for_train_and_for_a_scheduler(
    s3, tmp_path, config, script
):
    url = "s3://my-misspelt-bucket/runs/x"
    arguments = ["--config", config, *TINY, f"run.dir={url}", *settings(url, tmp_path / "one")]
    done = run(script, *arguments)
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {url}: the bucket does not exist ("), line
    assert line.endswith("): correct the URL, or create the bucket first"), line


@pytest.mark.full
def test_expired_keys_are_not_reported_to_a_scheduler_as_a_mistake(s3, proxy, tmp_path, config):
    """The ranks exit with status 2, but the launcher cannot check whether a newer checkpoint
    exists."""
    url = f"{s3.new_bucket()}/runs/x"
    is_expired = False

    def fault(method: str, path: str) -> str | None:
        nonlocal is_expired
        is_expired |= "step_00000006" in path
        return "400 ExpiredToken" if is_expired else None

    proxy.fault = fault
    arguments = ["--config", config, *TINY, f"run.dir={url}", *settings(url, tmp_path / "one")]
    done = run("launch/job.py", *arguments, cold=True)
    assert done.returncode == 1, done.stderr
    assert "the store does not show whether a newer checkpoint exists" in done.stdout
    proxy.is_good()
    done = run("launch/job.py", *arguments, cold=True)
    assert done.returncode == 0, done.stderr
    assert_whole(url, tmp_path)


@pytest.mark.full
def test_a_second_job_is_refused_and_a_third_takes_over_from_a_suspended_job(
    s3, tmp_path, config, shards
):
    url = f"{s3.new_bucket()}/runs/x"
    # The first job must renew its lease in this time, even on a busy machine.
    more = ("train.steps=100000", "run.lease_s=12")
    local = [tmp_path / name for name in ("one", "two", "three")]
    first = Background(
        config, local[0], f"run.dir={url}", *settings(url, local[0]), *more, ranks=0, cold=True
    )
    first.wait_for_checkpoint(3)
    second = train_at(config, url, local[1], *more, ok=False)
    assert second.returncode == 2
    assert "in use by a live run (process " in second.stderr
    assert not (local[1] / "metrics.jsonl").exists(), "nothing may be fetched for a rejected job"

    os.kill(first.process.pid, signal.SIGSTOP)
    third = Background(
        config, local[2], f"run.dir={url}", *settings(url, local[2]), *more, ranks=0, cold=True
    )
    third.wait_for_output("resumed at step ")
    os.kill(first.process.pid, signal.SIGCONT)
    ended = first.end()
    assert first.process.returncode == 2, ended
    assert "has taken over the run, because this job did not reach the store for 12 s" in ended
    third.wait_for_checkpoint(200)
    third.process.send_signal(signal.SIGTERM)
    stderr = third.end()
    assert third.process.returncode == 0, stderr
    lines = record_at(url, tmp_path)
    assert lines[-1]["outcome"] == "stopped"
    steps_of = Counter(line["step"] for line in lines if line["kind"] == "train")
    assert set(steps_of.values()) == {1}
    assert len(steps_of) == lines[-1]["step"]


@pytest.mark.parametrize("name", ["../../../harm", "{tmp}/harm"])
def test_a_file_name_that_leads_out_of_the_run_is_refused(s3, tmp_path, monkeypatch, name):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    bucket = s3.new_bucket()
    for key, data in (("checkpoint.json", b"{}"), (name.format(tmp=tmp_path), b"harm")):
        boto3.client("s3").put_object(Bucket=bucket[5:], Key=f"run/{key}", Body=data)
    with pytest.raises(ValueError, match=r"harm', whose path leads outside the folder"):
        local_run(f"{bucket}/run")
    assert not list(tmp_path.rglob("harm"))


@pytest.mark.full
@pytest.mark.parametrize("at", ["weights/last.safetensors", "record/part", "state.safetensors"])
def test_a_job_suspended_in_an_upload_overwrites_no_file_of_the_next_job(
    s3, proxy, tmp_path, config, at
):
    url = f"{s3.new_bucket()}/runs/x"
    sent: list[str] = []
    proxy.fault = holds(at, 2, sent)
    arguments = [f"run.dir={url}", *settings(url, tmp_path / "one")]
    first = Background(config, tmp_path / "one", *arguments, ranks=0, cold=True)
    assert proxy.is_holding.wait(120), first.end()
    os.kill(first.process.pid, signal.SIGSTOP)
    proxy.is_good()
    train_at(config, url, tmp_path / "two")
    before = objects_of(s3, url)
    proxy.let_go.set()
    os.kill(first.process.pid, signal.SIGCONT)
    stderr = first.end()
    assert first.process.returncode == 2, stderr
    assert "another job took over the run and exited" in stderr
    after = objects_of(s3, url)
    changed = {name for name in after.keys() | before.keys() if after.get(name) != before.get(name)}
    assert changed <= {sent[1].partition("/runs/x/")[2].partition("?")[0]}, (
        "only the suspended upload may arrive"
    )
    assert_whole(url, tmp_path)


@pytest.mark.full
def test_a_damaged_checkpoint_at_the_url_is_skipped(s3, tmp_path, config, whole):
    import boto3

    url = f"{s3.new_bucket()}/runs/x"
    train_at(config, url, tmp_path / "one", "train.steps=24")
    bucket = url.split("/")[2]
    key = "runs/x/checkpoints/step_00000024/state.safetensors"
    client = boto3.client("s3")
    data = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
    data[-1] ^= 1
    client.put_object(Bucket=bucket, Key=key, Body=bytes(data))
    done = train_at(config, url, tmp_path / "two")
    assert "damaged (state.safetensors does not match the sha256 in checkpoint.json)" in done.stderr
    assert "resumed at step 21 of 24" in done.stderr
    assert final_state(tmp_path / "two", STEPS) == whole


@pytest.mark.full
def test_an_outdated_working_copy_is_updated_and_an_emptied_url_is_refused(
    s3, tmp_path, config, whole
):
    url = f"{s3.new_bucket()}/runs/x"
    stop = ["train.steps=24", "log.sample_losses=1"]
    background = Background(
        config, tmp_path / "one", f"run.dir={url}", *settings(url, tmp_path / "one"), ranks=1
    )
    background.wait_for_checkpoint(6)
    background.kill_all()
    # Finish the run on another machine.
    train_at(config, url, tmp_path / "two", *stop)
    done = train_at(config, url, tmp_path / "one")
    assert "another job has continued the run, so" in done.stderr
    assert "is finished: 24 steps" in done.stderr
    assert final_state(tmp_path / "one", STEPS) == whole
    store = store_at(url, 60)
    for name in store.list_below():
        store.remove(name)
    done = train_at(config, url, tmp_path / "one", ok=False)
    assert done.returncode == 2
    assert "no run exists at this URL, but its working copy" in done.stderr
    assert (tmp_path / "one" / "checkpoints" / "step_00000024").exists(), (
        "the working copy must not be removed"
    )


@pytest.mark.full
def test_a_run_moves_from_a_folder_to_a_url_and_back(tmp_path, config):
    arguments = ["--config", config, *TINY]
    home = tmp_path / "home"
    run_here("launch/train.py", *arguments, f"run.dir={home}", "train.steps=6")
    url = f"file://{tmp_path}/there"
    shutil.copytree(home, tmp_path / "there")
    more = "--allow-change", "train.steps"
    train_here(config, url, tmp_path / "copy", "train.steps=9", *more)
    lines = record_at(url, tmp_path)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 10))
    assert not (tmp_path / "there" / "metrics.jsonl").exists()
    back = tmp_path / "back"
    shutil.copytree(tmp_path / "there", back)
    parts = sorted((back / "record").iterdir())
    (back / "metrics.jsonl").write_bytes(b"".join(part.read_bytes() for part in parts))
    run_here("launch/train.py", *arguments, f"run.dir={back}", "train.steps=12", *more)
    lines = read_metrics(back / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 13))


@pytest.mark.full
def test_a_file_url_works_without_locks_and_keeps_its_parts(tmp_path, config):
    url = f"file://{tmp_path}/mnt/run"
    for number, steps in enumerate((6, 9, 12)):
        change = ["--allow-change", "train.steps"] if number else []
        local = tmp_path / f"copy{number}"
        train_here(config, url, local, f"train.steps={steps}", "eval.every_steps=100", *change)
    store = store_at(url, 60)
    listing = store.list_below()
    assert len(parts_in(listing)) >= 3, "each start must add a part"
    assert read_record(store, listing) == (tmp_path / "copy2" / "metrics.jsonl").read_bytes()
    assert_whole(url, tmp_path, 12)


def test_a_working_copy_whose_list_of_files_is_damaged_can_be_used(tmp_path, config):
    url = f"file://{tmp_path}/there"
    listed = tmp_path / "copy" / ".copy_of.json"
    train_here(config, url, tmp_path / "copy", "train.steps=3")
    # Truncate the file as if the disk had become full.
    listed.write_bytes(listed.read_bytes()[:50])
    more = "--allow-change", "train.steps"
    train_here(config, url, tmp_path / "copy", "train.steps=6", *more)
    assert_whole(url, tmp_path, 6)
    fetched = local_run(url)
    # Fill the file with zeros, as a power failure can.
    (fetched / ".copy_of.json").write_bytes(bytes(100))
    assert local_run(url) == fetched
    assert json.loads(listed.read_text())["url"] == url


def test_the_url_keeps_the_checkpoints_of_keep_every(tmp_path, config):
    """The second machine has a copy of only the newest checkpoint, and must not remove the other
    checkpoints at the URL."""
    url = f"file://{tmp_path / 'bucket'}"
    keep = ("checkpoint.every_steps=1", "checkpoint.keep_last=1", "checkpoint.keep_every=3")
    train_here(config, url, tmp_path / "one", *keep, "train.steps=5")
    shutil.rmtree(tmp_path / "one")
    more = ("train.steps=8", "--allow-change", "train.steps")
    train_here(config, url, tmp_path / "two", *keep, *more)
    files = (tmp_path / "bucket" / "checkpoints").glob("step_*/*")
    names = sorted({path.parent.name for path in files})
    assert names == ["step_00000003", "step_00000006", "step_00000008"]


# --- the order of writes --------------------------------------------------------------------------


def assert_saved_whole(bucket: Path) -> None:
    """Assert that each listed checkpoint has all its files, and that the metrics contain all steps
    up to that checkpoint."""
    record = b"".join(path.read_bytes() for path in sorted(bucket.glob("record/part_*")))
    lines = [json.loads(line) for line in record.splitlines()]
    trained = {line["step"] for line in lines if line["kind"] == "train"}
    for path in bucket.glob("checkpoints/step_*/checkpoint.json"):
        info = json.loads(path.read_text())
        for name, expected in info["files"].items():
            content = (path.parent / name).read_bytes()
            assert hashlib.sha256(content).hexdigest() == expected["sha256"]
        assert trained >= set(range(1, info["step"] + 1))


def test_the_run_is_complete_between_any_two_operations(tmp_path, config, monkeypatch):
    bucket = tmp_path / "bucket"
    done = list[str]()

    def watched(name: str) -> None:
        real = getattr(ObjectStore, name)

        def operate(store: ObjectStore, *arguments, **options):
            assert_saved_whole(bucket)
            done.append(f"{name} {arguments[0] if name != 'upload' else arguments[1]}")
            return real(store, *arguments, **options)

        monkeypatch.setattr(ObjectStore, name, operate)

    for name in ("upload", "write", "remove"):
        watched(name)
    run_here(
        *("launch/train.py", "--config", config, *TINY, "train.steps=6", "checkpoint.keep_last=1"),
        *(f"run.dir=file://{bucket}", f"run.local_dir={tmp_path / 'here'}", "run.lease_s=600"),
    )
    assert_saved_whole(bucket)
    places = [number for number, each in enumerate(done) if each.endswith("/checkpoint.json")]
    assert [done[number].split()[0] for number in places] == ["upload", "upload", "remove"]
    for before, now in pairwise(done):
        begins_save = now.startswith("upload") and before.startswith(
            ("remove", "write checkpoints")
        )
        assert not begins_save, (
            "the lease must be confirmed first, because another job may hold the run"
        )
        if now.startswith("upload checkpoints") and now.endswith(".json"):
            assert before == "write lease.json", "the previous upload may have outlasted the lease"
