"""Test that the same command accepts the remedies that it suggests when it refuses to resume."""

from __future__ import annotations

import re

import pytest
from processes import TINY, run_here

from vit.checkpoint.resume import check_belongs
from vit.config.io import load_config, to_dict


def attempt(config, run_dir, *arguments) -> list:
    return ["--config", config, *TINY, f"run.dir={run_dir}", *arguments]


@pytest.mark.slow
def test_the_printed_flags_accept_all_changes_at_once(config, tmp_path):
    run_here("launch/train.py", *attempt(config, tmp_path / "run", "train.steps=1"))
    other = attempt(config, tmp_path / "run", "train.steps=2", "optim.name=lamb", "optim.lr=2e-3")
    with pytest.raises(ValueError, match=r"accept the changes with") as refused:
        run_here("launch/train.py", *other)
    flags = re.findall(r"--allow-change \S+", str(refused.value))
    assert {"--allow-change optim.name", "--allow-change train.steps"} <= {*flags}
    run_here("launch/train.py", *other, *" ".join(flags).split())


@pytest.mark.slow
def test_another_optimizer_can_start_from_the_weights_of_a_run(config, tmp_path):
    run_here("launch/train.py", *attempt(config, tmp_path / "run", "train.steps=1"))
    sgd = ("train.steps=2", "optim.name=sgd")
    with pytest.raises(ValueError, match=r"accept the changes with") as refused:
        run_here("launch/train.py", *attempt(config, tmp_path / "run", *sgd))
    flags = " ".join(re.findall(r"--allow-change \S+", str(refused.value))).split()
    with pytest.raises(ValueError, match="does not fit this model and optimizer") as unfit:
        run_here("launch/train.py", *attempt(config, tmp_path / "run", *sgd, *flags))
    (start,) = re.findall(r"init\.checkpoint=\S+", str(unfit.value))
    assert start == f"init.checkpoint={tmp_path / 'run'}"
    run_here("launch/train.py", *attempt(config, tmp_path / "sgd", *sgd, start))


def test_no_flag_is_advised_if_the_data_changed_as_well(config, tmp_path):
    settings = to_dict(load_config(config, [*TINY]))
    info = {"config": to_dict(load_config(config, [*TINY, "model.num_classes=20"]))}
    with pytest.raises(ValueError, match="num_classes 20 there, 10 here") as refused:
        check_belongs(
            tmp_path,
            info | {"facts": {"num_classes": 20}},
            settings,
            {"num_classes": 10},
            allowed=set(),
        )
    assert "--allow-change" not in str(refused.value)
