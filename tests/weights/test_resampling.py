"""Test that resampling position embeddings to another grid gives the same results as in timm."""

import pytest
import torch
from timm.layers import resample_abs_pos_embed

from vit.layers.posemb import resample_posemb


def posemb(height: int, width: int, prefix: int = 1, dim: int = 8) -> torch.Tensor:
    return torch.randn(1, prefix + height * width, dim, generator=torch.Generator().manual_seed(0))


GRIDS = [
    ((14, 14), (24, 24)),
    ((14, 14), (7, 7)),
    ((16, 16), (14, 21)),
    ((6, 10), (10, 6)),
    ((5, 7), (11, 3)),
    ((37, 37), (16, 16)),
]


@pytest.mark.parametrize(("old", "new"), GRIDS)
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_resampling_equals_timm(old, new, interpolation, antialias, prefix):
    source = posemb(*old, prefix=prefix)
    ours = resample_posemb(source, old, new, prefix, interpolation, antialias)
    theirs = resample_abs_pos_embed(source, list(new), list(old), prefix, interpolation, antialias)
    assert ours.shape == (1, prefix + new[0] * new[1], 8)
    assert torch.equal(ours, theirs)


def test_resampling_to_the_same_grid_is_the_identity():
    source = posemb(6, 10)
    assert torch.equal(resample_posemb(source, (6, 10), (6, 10), 1), source)


@pytest.mark.parametrize(("old", "new"), GRIDS)
@pytest.mark.parametrize("antialias", [True, False])
def test_resampling_keeps_constants_prefix_and_order(old, new, antialias):
    y, x = torch.meshgrid(
        torch.arange(old[0], dtype=torch.float32),
        torch.arange(old[1], dtype=torch.float32),
        indexing="ij",
    )
    patches = torch.stack((torch.full(old, 0.7), y, x), dim=2).reshape(1, -1, 3)
    prefix = posemb(1, 1, dim=3)
    result = resample_posemb(torch.cat((prefix, patches), dim=1), old, new, 2, antialias=antialias)
    assert torch.equal(result[:, :2], prefix)
    constant, down, right = result[0, 2:].reshape(*new, 3).unbind(2)
    torch.testing.assert_close(constant, torch.full(new, 0.7))
    # A ramp along one side must still rise along this side and must be constant along the other
    # side. If height and width were swapped, these checks would fail.
    assert (down.diff(dim=0) > 0).all()
    assert (right.diff(dim=1) > 0).all()
    torch.testing.assert_close(down, down[:, :1].expand(new))
    torch.testing.assert_close(right, right[:1].expand(new))


@pytest.mark.parametrize(("antialias", "atol"), [(True, 1e-4), (False, 0.05)])
@pytest.mark.parametrize(
    ("old", "new"), [((14, 14), (24, 24)), ((8, 12), (24, 24)), ((9, 9), (9, 36))]
)
def test_ramps_stay_linear_away_from_the_border(old, new, antialias, atol):
    """The test compares only positions that do not depend on values outside the grid. The center of
    position i in `new` is at (i + 1/2) old / new - 1/2. Keys' cubic kernel preserves straight lines
    if a = -1/2, but torch uses this value only with antialias. Without antialias, torch uses a =
    -3/4, which causes errors of up to a twentieth of a position."""
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float32) for n in old), indexing="ij")
    patches = torch.stack((y, x), dim=2).reshape(1, -1, 2)
    resampled = resample_posemb(patches, old, new, 0, antialias=antialias)[0].unflatten(0, new)
    centers = [(torch.arange(n) + 0.5) * o / n - 0.5 for o, n in zip(old, new, strict=True)]
    inside = [(c >= 2) & (c <= o - 3) for c, o in zip(centers, old, strict=True)]
    for axis, (center, keep) in enumerate(zip(centers, inside, strict=True)):
        line = resampled[..., axis].movedim(axis, 0)[:, 0]
        assert keep.sum() >= 4
        torch.testing.assert_close(line[keep], center[keep], rtol=0, atol=atol)


def test_resampling_computes_in_float32_and_keeps_the_dtype():
    source = posemb(14, 14).bfloat16()
    result = resample_posemb(source, (14, 14), (24, 24), 1)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, resample_posemb(source.float(), (14, 14), (24, 24), 1).bfloat16())


def test_resampling_refuses_positions_that_do_not_match_the_grid():
    with pytest.raises(ValueError, match=r"pos_embed is \(1, 197, 8\), expected \(1, 170, dim\)"):
        resample_posemb(posemb(14, 14), (13, 13), (24, 24), 1)
