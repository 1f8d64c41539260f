"""Test that repetitions of a step give equal results on all ranks, and that a bit flip is found."""

from __future__ import annotations

from functools import partial

import torch

from vit.distributed.process_group import World
from vit.extras.planner.check.repeated_step import create_step, differing, hashes_of

ALONE = World(0, 1, torch.device("cpu"))


def test_a_flipped_bit_in_one_repetition_is_found():
    """The test flips a bit of an activation in the second step, as a faulty multiplier would."""
    calls = []

    def create():
        step, batch = create_step(ALONE)
        calls.append(0)

        def corrupt(module, inputs, output):
            if len(calls) == 2:
                output.data.view(-1).view(torch.int32)[5] ^= 1 << 16

        step.model.blocks[1].register_forward_hook(corrupt)
        return step, batch

    faulty = {"kernels": "k", "hashes": hashes_of(create, 3)}
    honest = {"kernels": "k", "hashes": hashes_of(partial(create_step, ALONE), 2)}
    [text] = differing([honest, faulty], ("a", "b"))
    assert text.startswith("rank 1 on b: ")
    assert "but most repetitions of this step gave " in text
    other = {**honest, "kernels": "of another GPU", "hashes": ["x", "x"]}
    assert differing([honest, honest, other], ()) == []
    assert torch.get_num_threads() == 1
