"""Test each function that writes files, on a disk that is full or becomes full.

The function must print one line that names the file. Every file on the disk must be complete, with
either its old or its new content. No partial file may remain. When space is available again, the
same call must succeed.

Other tests cover checkpoints and weights (tests/checkpoint/test_saver.py), the block cache
(tests/data/storage), `--check` (tests/extras/planner/check) and shards
(tests/data_prep/test_prep_errors.py).
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import warm_python
from error_rows import leave_free, small_disk, snapshot
from extras.deleted_extras import needs
from processes import TINY, call, command, environment, metrics, run_here

from data_prep.read.archives import inflate_tar
from vit.checkpoint.checkpoint import checkpoint_folder, update_info, write_checkpoint
from vit.checkpoint.state import RunState
from vit.config.io import from_dict
from vit.config.schema import CheckpointConfig, LogConfig
from vit.distributed.exit import problem_of
from vit.distributed.outcome import OUTCOME_VARIABLE, read_outcome, tell_outcome
from vit.distributed.process_group import World
from vit.evaluation.evaluate import save_predictions
from vit.extras.report.drawing import drawing
from vit.hooks.sample_losses import SampleLosses
from vit.inference.output import csv_file
from vit.loggers.lines import read_lines
from vit.loggers.record import Record
from vit.model import create_model
from vit.run_folder.lock import RunLock
from vit.run_folder.paths import METRICS_FILE, mark_stopped
from vit.training.plan import Plan
from vit.weights.programs import ProgramModel

ALONE = World(0, 1, torch.device("cpu"))
FACTS = {"num_classes": 3, "grid_size": [2, 2], "class_names": ["a", "b", "c"]}
PAGE_KIB = 4
"""The size of a page in KiB. A file occupies whole pages, so even the smallest file needs one
page."""


@pytest.fixture(scope="module")
def mounted(tmp_path_factory) -> Iterator[Path]:
    with small_disk(tmp_path_factory.mktemp("mounted") / "disk", "size=4m") as disk:
        yield disk


@pytest.fixture
def disk(mounted, tmp_path) -> Iterator[Path]:
    yield mounted
    for path in mounted.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


# ---- the writers ---------------------------------------------------------------------------------


class Writer(NamedTuple):
    write: Callable[[Path], object]
    prepare: Callable[[Path], object] = lambda folder: None
    names: str = ""
    """The file that the error message must name, or "" if the message must name the folder."""
    notes: str = ""
    """The name of a JSON file whose content includes times."""


def predictions(folder: Path, step: int = 7) -> None:
    evaluation = SimpleNamespace(predictions=torch.arange(3000), probabilities=torch.ones(3000))
    split = SimpleNamespace(index={"label": np.arange(3000)})
    save_predictions(folder, evaluation, split, step)


def losses(folder: Path) -> None:
    plan = Plan(1, 4, 4, 1, 3, 0, 12, 8, 0, 8, 1)
    samples = SampleLosses(folder, ALONE, plan, 1)
    samples.add(0, *np.ones((2, 4), np.float32))
    samples.write(samples.collect())


def checkpoint(folder: Path) -> None:
    state = asdict(RunState(step=3, facts=FACTS))
    write_checkpoint(
        folder, {"model.a": torch.zeros(9000)}, state, {"a": {}}, 1, CheckpointConfig(keep_last=2)
    )


def note_evaluation(folder: Path) -> None:
    update_info(checkpoint_folder(folder, 3), {"evaluated_step": 3})


def table(folder: Path) -> None:
    with csv_file(folder / "out.csv", 2) as writer:
        for row in range(2000):
            writer.writerow([f"image {row}", "", "cat", 0.5, "dog", 0.5])


def picture(folder: Path, form: str) -> None:
    with drawing(folder / f"curve.{form}", 2.0) as figure:
        figure.subplots().plot([1, 2, 4])


def subject() -> ProgramModel:
    model = {"name": "vit_ti8", "image_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2}
    config = from_dict({"data": {"root": "-"}, "train": {"steps": 1}, "model": model}, "test")
    return ProgramModel(
        create_model(config.model, num_classes=3).eval(), config, 3, ["a", "b", "c"]
    )


def handed_over(folder: Path, program: str) -> None:
    Origin = pytest.importorskip("vit.extras.export.model_card").Origin
    export = pytest.importorskip("vit.extras.export.export").export
    torch.manual_seed(0)
    export(program, subject(), Origin("a run", "export", "0" * 64), folder / program)


def recipe(folder: Path) -> None:
    pytest.importorskip("vit.extras.recipes")
    line = "torchrun main.py --model deit_small_patch16_224 --batch-size 128"
    # Use a relative path, because the file records the command that created it.
    with chdir(folder):
        run_here("launch/recipe.py", "import", line, "--out", "recipe.yaml")


def compressed(folder: Path) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a"))
    (folder / "images.tar.gz").write_bytes(gzip.compress(plain.getvalue(), mtime=0))


def results(folder: Path) -> None:
    certificate = pytest.importorskip("vit.extras.planner.benchmark.certificate")
    promise = {"what": "it trains", "passed": True, "text": "yes"}
    path = certificate.write_document(folder, "a CPU", "cpu", {"promises": [promise]})
    for written in (path, path.with_suffix(".md")):  # both files contain the date and the commit
        written.rename(folder / f"results{written.suffix}")


def fetched(folder: Path) -> None:
    from vit.run_folder.reading import local_run

    place_at_url = Path(os.environ["PLACE_WITH_ROOM"])
    (place_at_url / "weights").mkdir(exist_ok=True)
    (place_at_url / "weights" / "last.safetensors").write_bytes(bytes(30_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vit.run_folder.reading.cache_of", lambda url, kind: folder / "cache" / "run")
        local_run(f"file://{place_at_url}")


def page(folder: Path) -> None:
    write_html = pytest.importorskip("vit.extras.report.page").write_html
    write_html(folder / "report" / "index.html", "page " * 9000)


WRITERS = {
    "predictions of an evaluation": Writer(
        predictions, partial(predictions, step=6), "predictions.npz"
    ),
    "losses of images": Writer(losses, names="epoch_0001.npy"),
    "a checkpoint": Writer(checkpoint, names="step_00000003"),
    "an evaluation in a checkpoint": Writer(note_evaluation, checkpoint, "checkpoint.json"),
    "the mark of a stop": Writer(
        lambda folder: mark_stopped(folder, 3, "SIGTERM"), names="stopped_early"
    ),
    "a table of predictions": Writer(table, names="out.csv"),
    **{
        f"a picture, {form}": Writer(partial(picture, form=form), names=f"curve.{form}")
        for form in ("png", "pdf", "svg")
    },
    "a page": Writer(page, names="index.html"),
    **{
        f"an export to {program}": Writer(partial(handed_over, program=program), names=program)
        for program in ("timm", "huggingface", "torchvision", "npz")
    },
    "an imported recipe": Writer(recipe, names="recipe.yaml"),
    "results of a measurement": Writer(results),
    "an inflated tar": Writer(
        lambda folder: inflate_tar(folder / "images.tar.gz"), compressed, "images.tar"
    ),
    "a copy of a run at a URL": Writer(fetched, notes="cache/run/.copy_of.json"),
}


def whole_files(folder: Path, notes: str) -> dict[str, str]:
    """Return the digests of all files except `notes`, which must contain valid JSON."""
    digests = snapshot(folder)
    if digests.pop(notes, None) is not None:
        json.loads((folder / notes).read_text())
    return digests


def line_of(write: Callable[[Path], object], folder: Path) -> str:
    try:
        write(folder)
    except Exception as error:
        return problem_of(error)
    raise AssertionError("the write must fail")


REPEATED = ("pdf", "svg", "to huggingface", "to torchvision")
"""The writers that share their code with another writer in the table."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if name.endswith(REPEATED) else [])
        for name in WRITERS
    ],
)
def test_reports_a_full_disk_keeps_files_intact_and_works_with_free_space(
    name, disk, tmp_path, monkeypatch, capfd
):
    # Fix the time that matplotlib writes into its files.
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    monkeypatch.setenv("PLACE_WITH_ROOM", str(tmp_path))
    writer = WRITERS[name]
    whole = tmp_path / "whole" / "place"
    whole.mkdir(parents=True)
    writer.prepare(whole)
    before = snapshot(whole)
    writer.write(whole)
    expected = whole_files(whole, writer.notes)
    changed = [path for path in expected if expected[path] != before.get(path)]
    new_bytes = max((whole / path).stat().st_size for path in changed)
    place = disk / "room" / "place"
    place.mkdir(parents=True)
    for room_kib in {0, new_bytes // 2048 // PAGE_KIB * PAGE_KIB}:
        writer.prepare(place)
        filler = leave_free(disk, room_kib)
        line = line_of(writer.write, place)
        assert "No space left on device" in line
        assert "\n" not in line
        assert str(place / writer.names) in line or writer.names in line.split(":")[0]
        digests = whole_files(place, writer.notes)
        for path in digests.keys() | before.keys():
            assert digests.get(path) in (before.get(path), expected.get(path)), (
                f"{path} is incomplete"
            )
            assert not path.endswith(".tmp")
            assert "/." not in f"/{path}" or path in expected
        assert "Exception ignored" not in capfd.readouterr().err
        filler.unlink()
        writer.write(place)
        assert whole_files(place, writer.notes) == expected
        shutil.rmtree(place)
        place.mkdir()


# ---- files that a run writes while it trains -----------------------------------------------------


def test_writes_a_record_line_again_after_the_disk_was_full(disk):
    folder = disk / "run"
    folder.mkdir()
    record = Record(folder, LogConfig(), True, total_steps=9)
    filler = leave_free(disk, PAGE_KIB)
    record.write("train", 1, loss=1.0)

    def write_on() -> None:
        for _ in range(200):
            record.write("train", 2, loss=2.0)

    with pytest.raises(ValueError, match=r"metrics\.jsonl: cannot be written \(No space left"):
        write_on()
    record.close()
    filler.unlink()
    lines, num_unreadable = read_lines(folder / METRICS_FILE)
    record = Record(folder, LogConfig(), True, total_steps=9)
    record.write("train", 2, loss=2.0)
    record.close()
    again, _ = read_lines(folder / METRICS_FILE)
    assert not num_unreadable
    assert again[:-1] == lines


def test_locks_a_run_on_a_full_disk(disk):
    """The run must be locked even if the disk has no space left for the owner's name in the lock
    file."""
    folder = disk / "run"
    folder.mkdir()
    leave_free(disk, 0)
    lock = RunLock(folder)
    lock.acquire()
    assert lock.is_held
    lock.release()


def test_the_launcher_gets_the_outcome_on_a_full_disk(disk, monkeypatch):
    """If the launcher did not learn the outcome, it would restart a finished run forever."""
    monkeypatch.setenv(OUTCOME_VARIABLE, str(disk / "outcome"))
    leave_free(disk, 0)
    for word in ("stopped", "finished"):
        tell_outcome(word)
        assert read_outcome(disk / "outcome") == word


# Python only prints unhandled exceptions in threads, so this mark makes such an exception fail the
# test.
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@needs("loggers")
@pytest.mark.parametrize("free_kib", [0, 16], ids=["later", "while it is made"])
def test_tensorboard_ends_with_one_line(disk, free_kib):
    from vit.extras.loggers.tensorboard import TensorboardView

    messages = list[str]()

    numbers = {f"train/{number}": 1.0 for number in range(100)}
    line = {"kind": "train", "step": 1, "time": 0.0, **numbers}
    (disk / METRICS_FILE).write_text(f"{json.dumps(line)}\n" * (40 if free_kib else 0))
    if free_kib:
        leave_free(disk, free_kib)
        view = TensorboardView(disk, LogConfig(), messages.append)
    else:
        view = TensorboardView(disk, LogConfig(), messages.append)
        leave_free(disk, free_kib)
    deadline = time.monotonic() + 60
    while not messages and time.monotonic() < deadline:
        view.send(1, 0.0, numbers)
        time.sleep(0.05)
    view.close("finished")
    assert len(messages) == 1
    assert "tensorboard: stopped (" in messages[0]
    assert "metrics.jsonl has everything" in messages[0]


@needs("loggers")
def test_wandb_ends_with_one_line(disk):
    from vit.extras.loggers.wandb_logger import WandbProcess

    messages = list[str]()
    (disk / "run").mkdir()
    leave_free(disk, 0)
    view = WandbProcess(disk / "run", LogConfig(wandb="offline"), messages.append)
    view.close("finished")
    assert not view.is_complete
    [message] = messages
    assert message.startswith("wandb: stopped (No space left on device); metrics.jsonl has every")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_stderr_does_not_end_a_run_but_a_full_stdout_fails_a_command(config, tmp_path):
    python = warm_python.python(environment())
    arguments = command("launch/train.py", "--config", config, *TINY, "train.steps=3", ranks=0)
    arguments[0] = python
    with_full = [
        "sh",
        "-c",
        'exec "$@" 2>/dev/full',
        "sh",
        *arguments,
        f"run.dir={tmp_path / 'run'}",
    ]
    assert call(with_full).returncode == 0
    assert metrics(tmp_path / "run", "end")[-1]["outcome"] == "finished"
    done = call(["sh", "-c", 'exec "$@" >/dev/full', "sh", *arguments, "--print-config"])
    assert done.returncode == 2
    assert done.stderr.startswith("error: No space left on device")
    assert done.stderr.count("\n") == 1
