"""Test that repetitions of a step are equal on all ranks, and that a planted flip is found."""

from __future__ import annotations

import json
from functools import partial

import torch
from extras.audit.planted import ALONE, flip_bit
from processes import run, run_here

from vit.config.io import from_dict
from vit.extras.audit.self_test import SMALL, create_step, differing, hashes_of


def test_honest_repetitions_are_equal(capsys):
    run_here("launch/audit.py", "--repeat", 3)
    out = capsys.readouterr().out
    assert "3 times the same step on 1 rank(s): torch" in out
    assert "repetitions of the step: equal\n" in out


def test_the_ranks_and_a_config_are_used(tmp_path, config):
    words = ("--repeat", 2, "--config", config, "model.name=vit_ti16", "model.depth=2", "--json")
    done = run("launch/audit.py", *words, ranks=2)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["equal"]
    assert "on 2 rank(s)" in result["notes"][0]


def test_a_flipped_bit_in_one_repetition_is_found():
    """The bit flips in an activation of the second step, as in a faulty multiplier."""
    calls = []

    def create():
        step, batch = create_step(from_dict(SMALL, "test"), ALONE)
        calls.append(0)

        def corrupt(module, inputs, output):
            if len(calls) == 2:
                flip_bit(output.data, bit=16)

        step.model.blocks[1].register_forward_hook(corrupt)
        return step, batch

    faulty = {"kernels": "k", "hashes": hashes_of(create, 3)}
    honest = {
        "kernels": "k",
        "hashes": hashes_of(partial(create_step, from_dict(SMALL, ""), ALONE), 2),
    }
    [(number, text)] = differing([honest, faulty], ("a", "b"))
    assert number == 2
    assert text.startswith("rank 1 on b: ")
    assert "but most repetitions of this step gave " in text
    other = {**honest, "kernels": "of another GPU", "hashes": ["x", "x"]}
    assert differing([honest, honest, other], ()) == []
    assert torch.get_num_threads() == 1
