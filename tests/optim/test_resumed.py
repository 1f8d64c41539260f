"""Test that a resumed run on two ranks is bit-identical to an uninterrupted run with each
optimizer, schedule and loss."""

import pytest
from processes import final_state, train, write_config

RUNS = {
    "adamuon": ["optim.name=adamuon", "optim.layer_decay=0.7"],
    "adafactorbv": ["optim.name=adafactorbv", "optim.min_dim_size_to_factor=8"],
    "lamb": ["optim.name=lamb", "optim.no_weight_decay=norms"],
    "nadamw": ["optim.name=nadamw"],
}
EVERY_TIME = ("adafactorbv",)
"""The optimizers whose tests are not limited to full test runs. The state of Adafactor has two
dtypes and, if a GPU exists, is split over two devices."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in EVERY_TIME else [pytest.mark.full]) for n in RUNS]
)
def test_resumed_equals_uninterrupted(name, tmp_path, shards):
    config = write_config(tmp_path, shards, steps=6)
    settings = ["checkpoint.every_steps=3", *RUNS[name]]
    train(config, tmp_path / "run", *settings, ranks=2)
    whole = final_state(tmp_path / "run", 6)
    newest = tmp_path / "run" / "checkpoints" / "step_00000006" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    done = train(config, tmp_path / "run", *settings, ranks=2)
    assert "resumed at step 3 of 6" in done.stderr
    assert final_state(tmp_path / "run", 6) == whole
