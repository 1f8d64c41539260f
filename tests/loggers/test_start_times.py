"""Test that a run reports the duration of each startup phase exactly once, after the first
batch."""

from __future__ import annotations

import re

from processes import metrics, train


def test_a_line_and_the_record_contain_the_startup_time(tmp_path, config):
    messages = train(config, tmp_path / "run", "train.steps=3").stderr
    resumed = train(config, tmp_path / "run", "train.steps=6", "--allow-change", "train.steps")
    parts = ["ranks", "data", "checkpoint", "model", "record", "workers and first batch"]
    for text, line in zip(
        (messages, resumed.stderr), metrics(tmp_path / "run", "ready"), strict=True
    ):
        ready_lines = re.findall(r"^ready in (\d+\.\d) s: (.*)$", text, re.MULTILINE)
        assert len(ready_lines) == 1
        assert re.findall(r"([a-z ]+?) \d+\.\d", ready_lines[0][1].replace(", ", ",")) == parts
        assert list(line["parts_s"]) == parts
        assert abs(sum(line["parts_s"].values()) - line["total_s"]) < 0.01
        assert float(ready_lines[0][0]) == round(line["total_s"], 1)
    assert [line["step"] for line in metrics(tmp_path / "run", "ready")] == [0, 3]


def test_a_run_that_is_finished_has_no_first_batch(tmp_path, config):
    train(config, tmp_path / "run", "train.steps=3")
    again = train(config, tmp_path / "run", "train.steps=3")
    assert "ready in" not in again.stderr
    assert len(metrics(tmp_path / "run", "ready")) == 1
