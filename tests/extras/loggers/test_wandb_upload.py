"""Test that `launch/report.py --to-wandb` recreates a W&B run from metrics.jsonl, and that each
line is uploaded exactly once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from extras.deleted_extras import needs
from extras.loggers.wandb_runs import numbers, one_run, parts, read_wandb, recorded
from processes import run_here

from vit.extras.loggers.wandb_upload import ToWandb


def with_record(folder: Path) -> Path:
    """Return the folder of a run that has never been sent to W&B and whose second attempt starts at
    step 2."""
    one_run(folder, range(1, 6), setting="off")
    one_run(folder, range(3, 9), setting="off", restarts=1)
    return folder


def test_writes_an_offline_part_without_a_service(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = with_record(tmp_path / "run")
    before = (folder / "metrics.jsonl").read_bytes()
    messages = list[str]()
    ToWandb(folder, is_in_use=False).show({}, messages.append)
    (part,) = parts(folder)
    run_id, config, history = read_wandb(part)
    assert run_id == (folder / "wandb_id").read_text().split()[0]
    assert config["optim"] == {"lr": 0.1}
    assert numbers(history) == recorded(folder)
    assert [row["global_step"] for row in recorded(folder)] == [*range(1, 9), 8]
    assert [line.partition(";")[0] for line in messages] == ["wandb: offline"]
    assert (folder / "metrics.jsonl").read_bytes() == before


@needs("report")
@pytest.mark.full
def test_uploads_missing_lines_and_rebuilds_a_deleted_run(tmp_path, server, capsys):
    folder = with_record(tmp_path / "run")
    command = ("launch/report.py", folder, "--to-wandb")
    run_here(*command)
    assert f"wandb: {server.url}/me/vit/runs/" in capsys.readouterr().out
    assert numbers(server.history) == recorded(folder)

    one_run(folder, range(9, 12), setting="off", restarts=2)
    run_here(*command)
    assert numbers(server.history) == recorded(folder)

    server.history.clear()  # the run was deleted on the server, which rejects its id
    (folder / "wandb_id").unlink()
    shutil.rmtree(folder / "wandb")
    run_here(*command)
    assert numbers(server.history) == recorded(folder)
    assert len(set(server.names)) == 2
