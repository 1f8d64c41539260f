"""Kill, stop and resume training in real processes that communicate through gloo, and check that
the results are bit-identical."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import warm_python
from extras.deleted_extras import DELETED, NO_REPORT
from proc import is_alive
from processes import (
    TINY,
    Background,
    call,
    command,
    environment,
    final_state,
    last_step,
    make_shards,
    metrics,
    run,
    train,
    write_config,
)
from servers import WebServer

from vit.hooks.sample_losses import epoch_files
from vit.loggers.lines import read_metrics

STEPS = 24


@pytest.fixture
def config(tmp_path: Path, shards: Path) -> Path:
    return write_config(tmp_path, shards, steps=STEPS)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, shards: Path):
    """Return a function that returns the final state of an uninterrupted run on a given number of
    ranks. For each number of ranks, the run is trained only once."""
    made: dict[int, dict[str, str]] = {}

    def state(ranks: int) -> dict[str, str]:
        if ranks not in made:
            folder = tmp_path_factory.mktemp(f"whole{ranks}")
            train(write_config(folder, shards, steps=STEPS), folder / "run", ranks=ranks)
            made[ranks] = final_state(folder / "run", STEPS)
        return made[ranks]

    return state


def assert_equal_state(run_dir: Path, expected: dict[str, str]) -> None:
    state = final_state(run_dir, STEPS)
    assert state.keys() == expected.keys()
    assert not [name for name in state if state[name] != expected[name]], (
        "some tensors or loss files differ from those of the uninterrupted run"
    )


def victims_of_ranks() -> list:
    """Return the sets of ranks to kill. Most of these sets are used only in full test runs."""
    cases = [(victims, ranks) for victims in ("one rank", "all") for ranks in (1, 2, 3)]
    marks = {case: [pytest.mark.full] for case in cases if case[1] != 2}
    return [
        pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=marks.get(case, [])) for case in cases
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("victims", "ranks"), victims_of_ranks())
def test_killed_and_resumed_equals_uninterrupted(
    ranks, victims, tmp_path, config, uninterrupted, request
):
    expected = uninterrupted(ranks)
    background = Background(
        config,
        tmp_path / "run",
        ranks=ranks,
        cold=request.node.get_closest_marker("full") is not None,
    )
    background.wait_for_checkpoint(3)
    background.wait_for_step(random.randrange(4, STEPS // 2 + 2))
    if victims == "all":
        background.kill_all()
    else:
        os.kill(random.choice(background.trainers()), signal.SIGKILL)
        background.end()
        assert background.process.returncode != 0
    train(config, tmp_path / "run", ranks=ranks)
    assert metrics(tmp_path / "run", "start")[-1]["restarts"] == 1, (
        "the run must resume instead of starting over"
    )
    assert_equal_state(tmp_path / "run", expected)
    record = read_metrics(tmp_path / "run" / "metrics.jsonl")
    steps = [line["step"] for line in record if line["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1)), (
        "each step must occur once, although some were trained twice"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.full)]
)
def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_run_resumes(
    number, tmp_path, config, uninterrupted
):
    background = Background(config, tmp_path / "run", "checkpoint.every_steps=100", ranks=2)
    background.wait_for_step(1)
    os.kill(background.trainers()[0], number)
    output = background.end()
    marker = json.loads((tmp_path / "run" / "stopped_early").read_text())
    assert 1 < marker["step"] < STEPS
    assert f"stopped at step {marker['step']} of {STEPS}, saved" in output
    assert background.process.returncode == 0, output
    train(config, tmp_path / "run", "checkpoint.every_steps=100", ranks=2)
    assert not (tmp_path / "run" / "stopped_early").exists()
    assert_equal_state(tmp_path / "run", uninterrupted(2))
    checked = [line for line in metrics(tmp_path / "run", "epoch") if line["exact"]]
    batches = [
        number for line in checked for number in range(line["first_batch"], line["last_batch"] + 1)
    ]
    assert batches == list(range(STEPS)), (
        "steps before the stop, in the middle of an epoch, must also be compared with the plan"
    )


@pytest.mark.slow
def test_a_signal_during_the_last_evaluation_stops_the_run_and_a_resume_repeats_it(tmp_path):
    config = write_config(tmp_path, make_shards(tmp_path, num_val=600), steps=6)
    background = Background(config, tmp_path / "run", "eval.batch_size=1", ranks=1)
    background.wait_for_step(6)
    os.kill(background.trainers()[0], signal.SIGTERM)
    background.end()
    assert json.loads((tmp_path / "run" / "stopped_early").read_text()) == {
        "step": 6,
        "signal": "SIGTERM",
    }
    assert not metrics(tmp_path / "run", "eval")
    quicker = ("eval.batch_size=60", "--allow-change", "eval.batch_size")
    train(config, tmp_path / "run", *quicker, ranks=1)
    assert [(line["step"], line["num_images"]) for line in metrics(tmp_path / "run", "eval")] == [
        (6, 600)
    ]


@pytest.mark.slow
def test_a_resume_repeats_an_interrupted_evaluation(tmp_path):
    config = write_config(tmp_path, make_shards(tmp_path, num_val=600), steps=12)
    background = Background(config, tmp_path / "run", "eval.batch_size=1", ranks=2)
    background.wait_for_step(6)
    os.kill(background.trainers()[1], signal.SIGUSR1)
    background.end()
    assert not metrics(tmp_path / "run", "eval")
    quicker = ("eval.batch_size=60", "--allow-change", "eval.batch_size")
    train(config, tmp_path / "run", *quicker, ranks=2)
    assert [line["step"] for line in metrics(tmp_path / "run", "eval")] == [6, 12]
    checked = [
        number
        for line in metrics(tmp_path / "run", "epoch")
        for number in range(line["first_batch"], line["last_batch"] + 1)
    ]
    assert checked == list(range(12)), (
        "each batch must be compared with the plan once, whenever the run was stopped"
    )


def test_a_signal_before_the_first_step_ends_a_run_and_marks_a_saved_one_as_stopped(
    tmp_path, shards, config
):
    """The data server in this test does not respond. If a run is marked as stopped, Slurm's batch
    script requeues it."""
    folder = tmp_path / "run"
    train(config, folder, "train.steps=3")
    more = ("train.steps=6", "--allow-change", "train.steps")
    with WebServer(
        {f"/shards/{path.name}": path.read_bytes() for path in shards.iterdir()}
    ) as server:
        server.delay_s = 3600.0
        background = Background(config, folder, f"data.root={server.url}/shards", *more, ranks=0)
        while not server.requests:
            assert background.process.poll() is None, background.end()
            time.sleep(0.05)
        os.kill(background.process.pid, signal.SIGTERM)
        output = background.end()
    assert background.process.returncode == 143, output
    assert output.splitlines()[-1] == "ended by SIGTERM before the first step: nothing to save"
    assert json.loads((folder / "stopped_early").read_text()) == {"step": 3, "signal": "SIGTERM"}
    assert last_step(folder) == 3, "metrics.jsonl must not change"
    train(config, folder, *more)
    assert not (folder / "stopped_early").exists()


def test_marks_a_new_run_that_is_preempted_before_its_first_step(tmp_path, shards, config):
    """Slurm does not requeue a run that is preempted before its first step. If the run is marked as
    stopped, the project's batch script requeues it."""
    folder = tmp_path / "run"
    files = {f"/shards/{path.name}": path.read_bytes() for path in shards.iterdir()}
    with WebServer(files) as server:
        server.delay_s = 3600.0
        background = Background(config, folder, f"data.root={server.url}/shards", ranks=0)
        while not server.requests:
            assert background.process.poll() is None, background.end()
            time.sleep(0.05)
        os.kill(background.process.pid, signal.SIGTERM)
        output = background.end()
    assert background.process.returncode == 143, output
    assert json.loads((folder / "stopped_early").read_text()) == {"step": 0, "signal": "SIGTERM"}


@pytest.mark.slow
def test_ranks_do_not_outlive_their_launcher(tmp_path, shards, monkeypatch):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")  # restore torch's default
    config = write_config(tmp_path, shards, steps=5000)
    background = Background(config, tmp_path / "run", ranks=2, cold=True)
    background.wait_for_step(4)
    ranks = background.trainers()
    os.kill(background.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 240
    while any(map(is_alive, ranks)):
        assert time.monotonic() < deadline, (
            "the ranks must not continue training after torchrun has died"
        )
        time.sleep(0.1)
    assert (tmp_path / "run" / "stopped_early").exists(), "the ranks must save a checkpoint"
    output = background.end()
    # For each pending request, torch may print a page-long stack trace.
    assert output.count("TCPStore.cpp") <= 4, "each request to a dead store must not print a page"


@pytest.mark.slow
def test_any_number_of_ranks_sees_the_same_batches_and_a_finished_run_stays_finished(
    tmp_path, shards
):
    checksums = set()
    losses = []
    rows = []
    steps = 12
    config = write_config(tmp_path, shards, steps=steps)

    for ranks in (0, 2, 3):
        train(
            config,
            tmp_path / f"run{ranks}",
            "model.drop_path_rate=0",
            "model.proj_drop_rate=0",
            ranks=ranks,
        )
        checksums.add(
            tuple(line["sample_checksum"] for line in metrics(tmp_path / f"run{ranks}", "epoch"))
        )
        losses.append([line["loss"] for line in metrics(tmp_path / f"run{ranks}", "train")])
        rows.append(np.concatenate([*map(np.load, epoch_files(tmp_path / f"run{ranks}").values())]))

    assert len(checksums) == 1
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4), (
            "without dropout, the number of ranks may affect only rounding"
        )
    for other in rows[1:]:
        assert np.allclose(other, rows[0], rtol=2e-3, atol=2e-3, equal_nan=True), (
            "losses of images may differ only by rounding to fp16"
        )

    before = final_state(tmp_path / "run2", steps)
    again = train(
        config, tmp_path / "run2", "model.drop_path_rate=0", "model.proj_drop_rate=0", ranks=2
    )
    assert f"is finished: {steps} steps" in again.stderr
    assert final_state(tmp_path / "run2", steps) == before


def test_accumulation_and_workers_change_nothing_but_rounding(tmp_path, shards):
    config = write_config(tmp_path, shards, steps=4)
    off = ["model.drop_path_rate=0", "model.proj_drop_rate=0"]
    train(config, tmp_path / "whole", *off)
    train(config, tmp_path / "parts", *off, "data.micro_batch_size=5", "loader.num_workers=2")
    whole, parts = (
        [line["loss"] for line in metrics(tmp_path / name, "train")] for name in ("whole", "parts")
    )
    assert parts == pytest.approx(whole, rel=1e-4)
    assert [line["sample_checksum"] for line in metrics(tmp_path / "whole", "epoch")] == [
        line["sample_checksum"] for line in metrics(tmp_path / "parts", "epoch")
    ]


def test_a_changed_setting_is_refused_on_resume_unless_allowed(tmp_path, config):
    train(config, tmp_path / "run", "train.steps=3")
    arguments = ["--config", config, f"run.dir={tmp_path / 'run'}"]
    refused = run("launch/train.py", *arguments, *TINY, "train.steps=6", "optim.lr=0.5")
    assert refused.returncode == 2
    assert "optim.lr: 0.001 there, 0.5 here" in refused.stderr
    assert "train.steps: 3 there, 6 here" in refused.stderr
    assert "Traceback" not in refused.stderr
    allowed = run(
        "launch/train.py", *arguments, *TINY, "train.steps=6", "--allow-change", "train.steps"
    )
    assert allowed.returncode == 0, allowed.stderr
    assert last_step(tmp_path / "run") == 6


def test_sets_a_damaged_newest_checkpoint_aside_and_resumes_from_the_previous(tmp_path, config):
    train(config, tmp_path / "run", "train.steps=6")
    newest = tmp_path / "run" / "checkpoints" / "step_00000006" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    done = train(config, tmp_path / "run", "train.steps=6")
    assert "the file is truncated or missing; renamed to damaged_step_00000006" in done.stderr
    assert "resumed at step 3 of 6" in done.stderr
    assert newest.exists(), "the step must be repeated"


def test_a_resume_repeats_the_random_numbers_of_drop_path_by_subsets(tmp_path, config):
    """The run uses micro-batches and activation checkpointing, so dropout must use the same random
    numbers twice."""
    settings = [
        "train.steps=6",
        "model.drop_path_form=subset",
        "model.drop_path_rate=0.5",
        "data.micro_batch_size=6",
    ]
    train(config, tmp_path / "run", *settings)
    whole = final_state(tmp_path / "run", 6)
    newest = tmp_path / "run" / "checkpoints" / "step_00000006" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    done = train(config, tmp_path / "run", *settings, "train.activation_checkpointing=block")
    assert "resumed at step 3 of 6" in done.stderr
    assert final_state(tmp_path / "run", 6) == whole
    assert "drops no sample" not in done.stderr


def test_micro_batches_that_are_too_small_to_drop_a_sample_are_reported(tmp_path, config):
    settings = ["train.steps=1", "model.drop_path_form=subset", "data.micro_batch_size=2"]
    done = train(config, tmp_path / "run", *settings, "log.wandb=off")
    assert "at model.drop_path_rate=0.2 from a micro-batch of 2" in " ".join(done.stderr.split())


def test_non_finite_gradients_are_skipped_counted_and_end_the_run(tmp_path, config):
    done = run(
        "launch/train.py",
        "--config",
        config,
        f"run.dir={tmp_path / 'run'}",
        *TINY,
        "optim.lr=1e30",
        "optim.clip_grad_norm=null",
        "schedule.warmup_steps=0",
        "guard.max_skips=3",
        "train.steps=40",
        "optim.weight_decay=0.0",
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the gradient was not finite 3 times in a row" in done.stderr
    assert len(metrics(tmp_path / "run", "fault")) >= 3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precisions_train(precision, tmp_path, config):
    train(config, tmp_path / "run", f"train.precision={precision}", "train.steps=3")
    assert all(line["loss"] is not None for line in metrics(tmp_path / "run", "train"))


@pytest.mark.slow
def test_compiled_blocks_train_as_eager_ones_and_resume(tmp_path, shards):
    config = write_config(tmp_path, shards, steps=4)
    off = [
        "model.drop_path_rate=0",
        "model.proj_drop_rate=0",
        "model.depth=1",
        "eval.every_steps=100",
    ]
    train(config, tmp_path / "eager", *off)
    train(config, tmp_path / "compiled", *off, "train.compile=true")
    eager, compiled = (
        [line["loss"] for line in metrics(tmp_path / name, "train")]
        for name in ("eager", "compiled")
    )
    assert compiled == pytest.approx(eager, rel=1e-3)
    runs = [metrics(tmp_path / name, "start")[0]["compiled"] for name in ("eager", "compiled")]
    assert runs == [False, True]
    assert (
        final_state(tmp_path / "compiled", 4).keys() == final_state(tmp_path / "eager", 4).keys()
    ), "compiling must not rename weights"


@pytest.mark.full
def test_trains_eagerly_with_a_note_if_compilation_is_impossible(tmp_path, shards):
    config = write_config(tmp_path, shards, steps=3)
    train(config, tmp_path / "eager")
    arguments = ["--config", config, f"run.dir={tmp_path / 'run'}", *TINY, "train.compile=true"]
    env = {**environment(), "CXX": "/nonexistent"}
    done = call(command("launch/train.py", *arguments, ranks=0), env)
    assert done.returncode == 0, done.stderr
    assert "note: torch.compile does not work on this host (" in done.stderr
    assert "No working C++ compiler" in done.stderr
    assert "or set train.compile=false" in done.stderr
    assert metrics(tmp_path / "run", "start")[0]["compiled"] is False
    assert final_state(tmp_path / "run", 3) == final_state(tmp_path / "eager", 3)
    again = call(
        command("launch/train.py", *arguments, ranks=0, python=warm_python.python(env)), env
    )
    assert f"{tmp_path / 'run'} is finished: 3 steps" in again.stderr
    assert "torch.compile" not in again.stderr, "a run without a step must not compile"


def test_a_timm_model_trains_in_the_same_loop(tmp_path, shards):
    config = tmp_path / "guest.yaml"
    config.write_text(
        f"model: {{name: timm/resnet10t, image_size: 32}}\ndata: {{root: {shards},"
        " global_batch_size: 12}\ntrain: {steps: 2}\n"
    )
    arguments = [
        "--config",
        config,
        f"run.dir={tmp_path / 'run'}",
        "loader.num_workers=0",
        "log.wandb=off",
        "train.precision=fp32",
        "log.every_steps=1",
        *NO_REPORT,
    ]
    done = run("launch/train.py", *arguments, ranks=2)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "run", "eval")[-1]["num_images"] == 23


def test_the_model_learns(tmp_path, shards):
    config = write_config(tmp_path, shards, steps=60)
    train(
        config,
        tmp_path / "run",
        "eval.every_steps=60",
        "model.drop_path_rate=0",
        "model.proj_drop_rate=0",
        "log.every_steps=20",
        "optim.lr=3e-3",
        *([] if "report" in DELETED else ["log.report=true"]),
    )
    assert metrics(tmp_path / "run", "eval")[-1]["top1"] > 80
    if "report" not in DELETED:
        assert (tmp_path / "run" / "report" / "curves.png").stat().st_size > 10_000
        assert (tmp_path / "run" / "report" / "index.html").is_file()


def test_finetuning_at_a_higher_resolution_starts_from_the_run(tmp_path, config):
    train(config, tmp_path / "base", "train.steps=6")
    tuned = train(
        config,
        tmp_path / "tuned",
        "train.steps=6",
        "model.image_size=[32, 24]",
        f"init.checkpoint={tmp_path / 'base'}",
    )
    assert "positions resampled from 2x2 to 4x3" in tuned.stderr
    assert metrics(tmp_path / "tuned", "eval")[-1]["num_images"] == 23


LIST_MODULES = """
import sys
sys.path.insert(0, "launch")
sys.argv[0] = "launch/train.py"
import train
train.main()
print(*(name for name in sys.modules if name == "vit" or name.startswith("vit.")))
"""
MAX_MODULES = 160


def test_a_run_imports_only_what_it_uses(config: Path, tmp_path: Path):
    arguments = [
        "--config",
        str(config),
        *TINY,
        "loader.num_workers=1",
        f"run.dir={tmp_path / 'run'}",
    ]
    done = call([sys.executable, "-c", LIST_MODULES, *arguments], environment())
    assert done.returncode == 0, done.stderr
    modules = done.stdout.split()
    assert "vit.step" in modules
    assert [name for name in modules if name.startswith("vit.extras.")] == []
    assert len(modules) <= MAX_MODULES
