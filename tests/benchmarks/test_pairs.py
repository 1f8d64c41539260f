"""Test that the settings of benchmarks that train the demo's model are valid."""

import importlib

import pytest
from processes import REPOSITORY

from vit.config.io import load_config


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module


def test_each_arm_of_the_pairs_has_its_optimizer(module):
    pairs = module("pairs")
    names = {
        arm: load_config(pairs.CONFIG, [*pairs.SETTINGS, *fields.settings]).optim.name
        for arm, fields in pairs.ARMS.items()
    }
    expected = {"Muon": "muon", "LAMB + BCE": "lamb"}
    assert names == dict.fromkeys(pairs.ARMS, "adamw") | expected


def test_the_comparisons_with_timm_and_of_ranks_use_adamw(module):
    config = module("pairs").CONFIG
    for settings in (module("convergence").SETTINGS, module("exact").SMALL):
        assert load_config(config, [*settings]).optim.name == "adamw"
