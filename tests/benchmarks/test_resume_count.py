"""Test that benchmarks/resume/count.py sees lost, repeated and changed samples in made-up logs."""

import importlib
import json

import pytest
from processes import REPOSITORY

SIZES = {"steps_per_epoch": 3, "epochs": 2, "num_samples": 6}
EPOCH = [[0, 1], [2, 3], [4, 5]]


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks" / "resume"))
    return importlib.import_module("count")


@pytest.fixture
def log(tmp_path):
    """Return a function that writes the batches of a life from `start` on, split over ranks."""

    def write(name, life, start, batches, ranks=1, shift=0.0):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for rank in range(ranks):
            with (folder / f"life_{life}_rank_{rank}.jsonl").open("a") as file:
                for step, batch in enumerate(batches, start=start):
                    size = len(batch) // ranks
                    part = batch[rank * size : (rank + 1) * size]
                    line = {"step": step, "number": part, "augmentation": [n + shift for n in part]}
                    file.write(json.dumps(line) + "\n")
        return folder

    return write


@pytest.fixture
def counts(module, log):
    """Return a function that counts a run against an undisturbed run of two epochs."""
    plain = module.read_log(log("plain", 1, 1, EPOCH + EPOCH))

    def of(folder, ranks):
        end = module.read_end(folder, max(ranks))
        return module.count(module.read_log(folder), plain, ranks, **SIZES, end=end)

    return of


def test_an_exact_resume_on_other_ranks_counts_as_equal(counts, log):
    log("run", 1, 1, EPOCH + EPOCH[:2])
    found = counts(log("run", 2, 5, EPOCH[1:], ranks=2), {1: 1, 2: 2})
    assert (found.steps, found.lost, found.repeated) == (6, 0, 0)
    assert (found.resumed, found.equal_batches, found.equal_augmentations) == (2, 2, 2)
    assert found.done_again == 1  # step 5 of the first life
    assert found.ends_together


def test_an_epoch_that_begins_anew_repeats_samples(counts, log):
    log("run", 1, 1, EPOCH + EPOCH[:2])
    found = counts(log("run", 2, 5, EPOCH), {1: 1, 2: 1})
    assert (found.steps, found.lost, found.repeated) == (7, 0, 2)
    assert (found.resumed, found.equal_batches) == (2, 0)


def test_a_skipped_batch_is_lost(counts, log):
    log("run", 1, 1, EPOCH + EPOCH[:1])
    found = counts(log("run", 2, 5, EPOCH[2:]), {1: 1, 2: 1})
    assert (found.steps, found.lost, found.repeated) == (5, 2, 0)
    assert (found.resumed, found.equal_batches) == (2, 0)


def test_another_order_within_a_batch_is_equal_and_over_batches_is_not(counts, log):
    log("run", 1, 1, [*EPOCH, [0, 1]])
    found = counts(log("run", 2, 5, [[3, 2], [5, 4]]), {1: 1, 2: 1})
    assert (found.equal_batches, found.equal_augmentations) == (2, 2)
    log("mixed", 1, 1, [*EPOCH, [0, 1]])
    found = counts(log("mixed", 2, 5, [[2, 4], [3, 5]]), {1: 1, 2: 1})
    assert (found.lost, found.repeated, found.equal_batches) == (0, 0, 0)


def test_another_augmentation_is_seen(counts, log):
    log("run", 1, 1, [*EPOCH, [0, 1]])
    found = counts(log("run", 2, 5, EPOCH[1:], shift=0.5), {1: 1, 2: 1})
    assert (found.equal_batches, found.equal_augmentations) == (2, 0)


def test_steps_before_each_resume_are_part_of_the_weights(counts, log):
    log("run", 1, 1, EPOCH + EPOCH)  # killed before the end of the program
    log("run", 2, 5, EPOCH[1:])
    found = counts(log("run", 3, 6, [[0, 1]]), {1: 1, 2: 1, 3: 1})
    assert (found.lost, found.repeated, found.done_again) == (2, 2, 3)
    assert (found.resumed, found.equal_batches) == (2, 1)


def test_a_rank_that_ends_earlier_is_seen(counts, log):
    log("run", 1, 1, EPOCH)
    folder = log("run", 2, 4, EPOCH, ranks=2)
    short = folder / "life_2_rank_1.jsonl"
    short.write_text("".join(short.read_text().splitlines(keepends=True)[:2]))
    found = counts(folder, {1: 1, 2: 2})
    assert not found.ends_together
    assert found.lost == 1


def test_a_resumed_run_that_ends_at_once_has_only_the_saved_steps(counts, log):
    folder = log("run", 1, 1, EPOCH + EPOCH[:2])
    (folder / "life_2_rank_0.end").write_text("4")
    found = counts(folder, {1: 1, 2: 1})
    assert (found.steps, found.lost, found.repeated, found.done_again) == (4, 4, 0, 1)
    assert (found.resumed, found.equal_batches) == (2, 0)


def test_passes_that_a_library_undoes_are_not_steps(counts, log):
    log("run", 1, 1, EPOCH[:2])  # warm-up: the weights return to step 0
    log("run", 1, 1, EPOCH + EPOCH[:2])
    found = counts(log("run", 2, 5, EPOCH[1:]), {1: 1, 2: 1})
    assert (found.steps, found.lost, found.repeated, found.done_again) == (6, 0, 0, 1)
    assert found.ends_together


def test_the_page_and_the_record_show_the_recorded_counts(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks" / "resume"))
    rows = importlib.import_module("rows")
    record = next((REPOSITORY / "benchmarks" / "results").glob("*-resume-truth-*.json"))
    page = (REPOSITORY / "docs" / "resume_truth.md").read_text()
    for table in rows.table(json.loads(record.read_text())).strip().split("\n\n"):
        assert table in page
    for name in rows.PROMISES:
        assert name in rows.CONTESTANTS


def test_a_script_has_at_most_60_lines(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks" / "resume"))
    rows = importlib.import_module("rows")
    for script in {contestant.script for contestant in rows.CONTESTANTS.values()}:
        text = (REPOSITORY / "benchmarks" / "resume" / f"{script}.py").read_text()
        assert len([line for line in text.splitlines() if line.strip()]) <= 60, script
