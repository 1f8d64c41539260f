"""Test that each sample's random numbers match a reference hash, have the right frequencies, and
depend only on the sample's key."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from vit.distributed.exact.by_sample import (
    DropoutBySample,
    DropPathBySample,
    draw_bits,
    draw_by_sample,
)
from vit.model import create_model
from vit.system.hashing import fold, hash64

CPU = torch.device("cpu")


def test_draws_the_bits_of_the_hash():
    keys = fold(7, np.arange(5))
    expected = hash64(keys[:, None] ^ np.arange(1000, dtype=np.uint64)) >> np.uint64(33)
    bits = draw_bits(torch.from_numpy(keys.view(np.int64)), 1000)
    assert np.array_equal(bits.numpy(), expected.astype(np.int64))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_drops_at_the_given_rate_and_scales_the_rest(rate):
    keys = torch.from_numpy(fold(1, np.arange(64)).view(np.int64))
    output = DropoutBySample(rate, keys)(torch.ones(64, 10, 100))
    assert set(output.unique().tolist()) <= {0.0, float(np.float32(1 / (1 - rate)))}
    dropped = (output == 0).float()
    # Allow four to five standard deviations of independent random numbers.
    sigma = (rate * (1 - rate)) ** 0.5
    assert abs(dropped.mean() - rate) <= 4 * sigma / 64_000**0.5
    assert (dropped.mean((1, 2)) - rate).abs().max() <= 4.5 * sigma / 1000**0.5
    assert (dropped.mean(0) - rate).abs().max() <= 5 * sigma / 64**0.5 + 0.05


def test_drop_path_keeps_or_drops_a_whole_sample():
    keys = torch.from_numpy(fold(2, np.arange(4000)).view(np.int64))
    output = DropPathBySample(0.3, keys)(torch.ones(4000, 3, 5))
    assert torch.equal(output.amin((1, 2)), output.amax((1, 2)))
    assert abs((output[:, 0, 0] == 0).float().mean() - 0.3) < 4 * (0.21 / 4000) ** 0.5


def test_windows_of_a_sample_use_the_key_of_the_sample():
    """In Swin, the rows of a tensor are windows, with shape (rows * windows, ...). A position
    tensor may have one row that all samples share."""
    keys = torch.from_numpy(fold(2, np.arange(2)).view(np.int64))
    windows = DropoutBySample(0.5, keys)(torch.ones(6, 4, 5))
    assert torch.equal(windows.view(2, 12, 5), DropoutBySample(0.5, keys)(torch.ones(2, 12, 5)))
    paths = DropPathBySample(0.5, keys)(torch.ones(200, 3)).view(2, 100, 3)
    assert torch.equal(paths[:1].view(100, 3), DropPathBySample(0.5, keys[:1])(torch.ones(100, 3)))
    assert DropoutBySample(0.5, keys)(torch.ones(1, 4, 5)).shape == (1, 4, 5)


def tiny(**options: object) -> nn.Module:
    torch.manual_seed(0)
    model = create_model("vit_ti8", 16, 5, embed_dim=32, depth=2, num_heads=2, **options)
    nn.init.normal_(model.head.weight)
    return model.train()


OPTIONS = {"drop_path_rate": 0.4, "proj_drop_rate": 0.2, "pos_drop_rate": 0.1}


@pytest.mark.parametrize("mlp", ["mlp", "swiglu"])
def test_a_sample_has_the_same_random_numbers_alone_and_in_any_batch(mlp):
    images = torch.randn(6, 3, 16, 16)
    model = tiny(**OPTIONS, mlp_layer=mlp)
    whole = draw_by_sample(model, 6, CPU)
    whole.set(3, 5, 10)
    together = model(images)
    assert torch.equal(together, model(images)), "random numbers must not depend on an earlier pass"
    for first, size in ((0, 2), (2, 2), (4, 2), (3, 1)):
        alone = tiny(**OPTIONS, mlp_layer=mlp)
        keys = draw_by_sample(alone, size, CPU)
        keys.set(3, 5, 10 + first)
        part = alone(images[first : first + size])
        torch.testing.assert_close(part, together[first : first + size], rtol=1e-4, atol=1e-5)
    for other in ((4, 5, 10), (3, 6, 10), (3, 5, 11)):
        whole.set(*other)
        assert not torch.allclose(model(images), together), (
            "the numbers must depend on seed, step and row"
        )


def test_each_layer_draws_independently_and_evaluation_draws_nothing():
    model = tiny(**OPTIONS)
    plain = tiny()
    keys = draw_by_sample(model, 4, CPU)
    keys.set(0, 0, 0)
    block = model.blocks[1]
    places = [model.pos_drop, block.attn.proj_drop, block.mlp.drop1, block.mlp.drop2]
    rows = [place.keys for place in places] + list(model.drop_paths.keys)
    assert len({tuple(row.tolist()) for row in rows}) == len(places) + 2 * len(model.blocks)
    images = torch.randn(4, 3, 16, 16)
    assert torch.equal(model.eval()(images), plain.eval()(images))
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_blocks_share_a_compiled_graph_and_draw_the_same():
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    images = torch.randn(4, 3, 16, 16)
    model = tiny(**OPTIONS)
    draw_by_sample(model, 4, CPU).set(0, 0, 0)
    expected = model(images)
    for block in model.blocks:
        block.compile(backend=count)
    torch.testing.assert_close(model(images), expected)
    assert len(graphs) == 1


def test_the_drop_path_of_timm_is_replaced():
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_vit", drop_path_rate=0.5, proj_drop_rate=0.1, num_classes=5)
    model.train()
    draw_by_sample(model, 2, CPU).set(0, 0, 0)
    images = torch.randn(2, 3, *model.patch_embed.img_size)
    assert torch.equal(model(images), model(images))
