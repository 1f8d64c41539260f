"""Compare the evaluation view with the views that torchvision, timm and Pillow produce."""

import io

import numpy as np
import pytest
import torch
from decoding import by_pillow, encode, photographs, picture
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import create_transform
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

from vit.config.schema import EvalConfig
from vit.data.decode import crops as decoding
from vit.data.decode.crops import decode_center, resize
from vit.data.decode.images import decode

# --- the evaluation view --------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("size", "crop_pct"), [(32, 0.875), (33, 0.9), (28, 1.0), (48, 0.95)])
@pytest.mark.parametrize(
    "original",
    [(97, 64), (64, 97), (75, 75), (40, 300), (20, 23), (500, 375)],
    ids=lambda wh: f"{wh[0]}x{wh[1]}",
)
def test_center_view_equals_torchvision(original, size, crop_pct, interpolation):
    data = encode(picture(*original))
    view = v2.Compose(
        [
            v2.Resize(int(size / crop_pct), InterpolationMode(interpolation), antialias=True),
            v2.CenterCrop(size),
        ]
    )
    theirs = view(torch.from_numpy(by_pillow(data)).permute(2, 0, 1))
    ours = decode_center(data, (size, size), EvalConfig(crop_pct=crop_pct), interpolation)
    # Without AVX2, torchvision's bilinear resize uses floating-point arithmetic, so pixel values
    # may differ by one.
    in_floats = interpolation == "bilinear" and torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    np.testing.assert_allclose(ours.int(), theirs.int(), rtol=0, atol=int(in_floats))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "view",
    [{"crop_pct": 0.875}, {"crop_pct": 0.78}, {"crop_pct": 0.9, "crop_mode": "squash"}],
    ids=str,
)
@pytest.mark.parametrize(
    "original", [(97, 64), (64, 97), (40, 300), (20, 23)], ids=lambda wh: f"{wh[0]}x{wh[1]}"
)
def test_center_view_by_pillow_equals_timm_and_torchvision_on_pillow_images(
    original, view, interpolation, decoder
):
    data = encode(picture(*original), restart_marker_blocks=1)
    settings = EvalConfig(**view, resizer="pillow")
    size = 32
    ours = decode_center(data, (size, size), settings, interpolation)
    resized = int(size / settings.crop_pct)
    side = (resized, resized) if settings.crop_mode == "squash" else resized
    chain = v1.Compose(
        [v1.Resize(side, InterpolationMode(interpolation)), v1.CenterCrop(size), v1.PILToTensor()]
    )
    np.testing.assert_array_equal(ours, chain(Image.open(io.BytesIO(data))))
    timms = {
        "crop_pct": settings.crop_pct,
        "crop_mode": settings.crop_mode,
        "interpolation": interpolation,
        "normalize": False,
    }
    np.testing.assert_array_equal(
        ours, create_transform(size, **timms)(Image.open(io.BytesIO(data)))
    )


def test_a_squashed_center_view_equals_torchvision_on_tensors():
    data = encode(picture(97, 64))
    settings = EvalConfig(crop_pct=0.9, crop_mode="squash")
    chain = v2.Compose(
        [v2.Resize((35, 35), InterpolationMode.BICUBIC, antialias=True), v2.CenterCrop(32)]
    )
    theirs = chain(torch.from_numpy(by_pillow(data)).permute(2, 0, 1))
    np.testing.assert_array_equal(decode_center(data, (32, 32), settings, "bicubic"), theirs)


@pytest.mark.parametrize(
    "original", [(97, 64), (64, 97), (50, 300)], ids=lambda wh: f"{wh[0]}x{wh[1]}"
)
def test_an_oblong_center_view_equals_timm(original):
    data = encode(picture(*original))
    size = (40, 24)
    ours = decode_center(data, size, EvalConfig(crop_pct=0.9, resizer="pillow"), "bicubic")
    timms = create_transform((3, *size), crop_pct=0.9, interpolation="bicubic", normalize=False)
    np.testing.assert_array_equal(ours, timms(Image.open(io.BytesIO(data))))


def test_pillow_and_torch_resize_with_small_differences():
    for data in photographs():
        for interpolation in ("bilinear", "bicubic"):
            torchs, pillows = (
                decode_center(data, (224, 224), EvalConfig(resizer=r), interpolation).int()
                for r in ("torch", "pillow")
            )
            difference = (torchs - pillows).abs()
            assert 0 < difference.max() <= 2
            assert (difference > 0).float().mean() < 0.01


@settings(max_examples=150)
@given(
    st.tuples(st.integers(1, 200), st.integers(1, 200)),
    st.integers(1, 90),
    st.floats(0.3, 1.0),
    st.sampled_from(["bilinear", "bicubic"]),
    st.sampled_from(["torch", "pillow"]),
    st.sampled_from([0, 1]),
)
def test_pixels_outside_the_center_view_are_not_decoded_and_have_no_effect(
    original, side, crop_pct, interpolation, resizer, blocks
):
    data = encode(picture(*original), restart_marker_blocks=blocks)
    view = EvalConfig(crop_pct=crop_pct, resizer=resizer)
    ours = decode_center(data, (side, side), view, interpolation)
    pixels = decode(data)
    size = decoding.resized_size((original[1], original[0]), (side, side), view)
    top, left = round((size[0] - side) / 2), round((size[1] - side) / 2)
    resized = (
        decoding._resize_by_pillow(pixels, size, interpolation)
        if resizer == "pillow"
        else resize(pixels, size, interpolation)
    )
    np.testing.assert_array_equal(ours, resized[:, top : top + side, left : left + side])


@settings(max_examples=100)
@given(
    st.tuples(st.integers(1, 120), st.integers(1, 120)),
    st.tuples(st.integers(1, 64), st.integers(1, 64)),
    st.floats(0.3, 1.0),
    st.sampled_from([1, 3]),
)
def test_center_view_always_has_the_requested_size(original, size, crop_pct, channels):
    assert decode_center(
        encode(picture(*original)), size, EvalConfig(crop_pct=crop_pct), "bilinear", channels
    ).shape == (channels, *size)


def test_center_view_of_an_oblong_size_keeps_aspect_ratio_and_center():
    width, height = 400, 200
    y, x = np.mgrid[:height, :width]
    disc = (((x - width / 2 + 0.5) ** 2 + (y - height / 2 + 0.5) ** 2 < 60**2) * 255).astype(
        np.uint8
    )
    view = (
        decode_center(
            encode(Image.fromarray(disc), quality=95),
            (100, 60),
            EvalConfig(crop_pct=0.8),
            "bilinear",
            channels=1,
        )[0].numpy()
        > 127
    )
    rows, columns = np.flatnonzero(view.any(1)), np.flatnonzero(view.any(0))
    scale = int(100 / 0.8) / height
    assert abs(len(rows) - 120 * scale) <= 2
    assert len(columns) == 60, "the disc has the full width of 75 pixels"
    assert abs(rows.mean() - 49.5) <= 1
    np.testing.assert_array_equal(view, view[:, ::-1])
