"""Test that the check compares the clocks of all hosts and tests the connection to W&B."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ranks import together
from servers import WebServer

from vit.config.schema import LogConfig
from vit.distributed.process_group import RankLost, World
from vit.extras.planner.check import machine
from vit.extras.planner.check.findings import judge_main
from vit.extras.planner.check.machine import judge_clocks, look_at_views, note_times

HOSTS = ("a", "b", "b", "c")


def clocks(monkeypatch: pytest.MonkeyPatch, ahead_s: dict[int, float]) -> list:
    """Return the clock readings of four ranks. `ahead_s` contains the seconds by which each rank's
    clock is ahead."""
    own = threading.local()
    shifted = SimpleNamespace(time=lambda: time.time() + own.ahead_s)
    monkeypatch.setattr(machine, "time", shifted)

    def rank(world: World) -> list[float] | None:
        own.ahead_s = ahead_s.get(world.rank, 0.0)
        return note_times(replace(world, hosts=HOSTS))

    return together(4, rank)


def test_one_rank_of_each_host_compares_its_clock_with_rank_0s(monkeypatch):
    times = clocks(monkeypatch, {0: 100.0, 1: 100.25, 3: 40.0})
    assert times[2] is None, "rank 1 reads the clock of its host"
    [wrong] = judge_clocks(dict(enumerate(times)), HOSTS)
    assert wrong.verdict == "FAIL"
    remedy = "synchronize the clock by NTP (timedatectl set-ntp true)"
    match = re.fullmatch(rf"c is (\S+) s behind a: {re.escape(remedy)}", wrong.text)
    assert float(match[1]) == pytest.approx(60.0, abs=0.2)
    [right] = judge_clocks(dict(enumerate(times[:3])), HOSTS)
    assert right.verdict == "ok"
    match = re.fullmatch(r"2 hosts within (\S+) ms of a \(b\)", right.text)
    assert float(match[1]) == pytest.approx(250.0, abs=200.0)


def test_a_host_that_does_not_answer_ends_the_wait(monkeypatch):
    monkeypatch.setattr(machine, "ANSWER_S", 1.0)

    def rank(world: World) -> list[float] | None:
        return None if world.rank == 3 else note_times(replace(world, hosts=HOSTS))

    main, *_ = together(4, rank)
    assert isinstance(main, RankLost)
    assert str(main) == "c did not answer within 1 s"


def test_a_damaged_settings_file_of_wandb_means_its_default_server(no_key, tmp_path):
    (tmp_path / "settings").write_text("base_url = http://no.section")
    assert machine._wandb_url() == machine.WANDB_URL


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))


def checked_wandb(setting: str) -> tuple[str, str]:
    """Return the verdict and message of the W&B check for `log.wandb=setting`."""
    results = {0: look_at_views(LogConfig.model_validate({"wandb": setting}))}
    [finding] = judge_main(results, "W&B")
    return finding.verdict, finding.text


def test_wandb_is_checked_with_and_without_a_reachable_server(no_key, monkeypatch, tmp_path):
    assert checked_wandb("off") == ("ok", "off, as configured")
    assert checked_wandb("offline")[0] == "ok"
    verdict, message = checked_wandb("auto")
    assert (verdict, message.split(":")[0]) == ("note", "no key for https")
    assert checked_wandb("online")[0] == "FAIL"
    with WebServer({}) as server:
        (tmp_path / "settings").write_text(f"[default]\nbase_url = {server.url}\n")
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password secret\n")
        verdict, message = checked_wandb("auto")
        assert verdict == "ok", message
        assert message.startswith(f"{server.url} answered in ")
        assert "secret" not in message
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        assert checked_wandb("online")[0] == "ok"
    verdict, message = checked_wandb("auto")
    assert verdict == "note"
    assert "does not answer (" in message
    assert "--to-wandb" in message
