"""Test progress messages: the rate, the remaining time, regular lines in a log file, and no output
if nobody can read it."""

import math
import re

import pytest

from vit.system.meter import Meter, duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00:00"),
        (59.9, "0:00:59"),
        (3661, "1:01:01"),
        (360_000, "100:00:00"),
        (math.nan, "-:--:--"),
        (math.inf, "-:--:--"),
    ],
)
def test_durations_are_printed_as_hours_minutes_and_seconds(seconds, text):
    assert duration(seconds) == text


def test_a_log_file_gets_a_line_with_rate_and_remaining_time_every_ten_seconds(capfd, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("vit.system.meter.time.monotonic", lambda: clock[0])
    with Meter("evaluating", 1_000, "images") as meter:
        for second in range(1, 26):
            clock[0] = 100.0 + second
            meter.update(done=40 * second)
    assert capfd.readouterr().err.splitlines() == [
        "evaluating: 400 of 1,000 images, ETA 0:00:15, 40 images/s",
        "evaluating: 800 of 1,000 images, ETA 0:00:05, 40 images/s",
    ]


def test_prints_nothing_if_hidden_or_short(capfd):
    for meter in (
        Meter("a", 10, "images", shown=False),
        Meter("b", 0, "images"),
        Meter("c", 10, "images"),
    ):
        with meter:
            for done in range(11):
                meter.update(done)
    assert capfd.readouterr().err == ""


def test_a_live_line_that_exists_is_moved_each_time():
    lines: list[str] = []
    meter = Meter("evaluating", 4, "batches", into=lines.append)
    for done in (0, 1, 4):
        meter.update(done)
    assert "ETA -:--:--" in lines[0]
    assert re.fullmatch(r"evaluating: 1 of 4 batches, ETA 0:00:0\d, [\d,.]+ batches/s", lines[1])
    assert "ETA 0:00:00" in lines[2]
