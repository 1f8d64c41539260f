"""Test that a window of a JPEG has the same pixels as the full image on every decoding path."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from decoding import encode, picture
from hypothesis import given, settings
from hypothesis import strategies as st

from vit.config.schema import EvalConfig
from vit.data.decode import crops as decoding
from vit.data.decode import images, native
from vit.data.decode.crops import decode_center, decode_views
from vit.data.decode.images import decode, decode_box
from vit.data.decode.jpeg_header import read_header

# --- a window of a JPEG ---------------------------------------------------------------------------


BLOCKS = {"4:4:4": 8, "4:2:2": 16, "4:2:0": 16}


def without_native(function, *arguments, **options):
    """Call `function` without the C decoder. A fixture would not work, because Hypothesis repeats
    only the body of a test."""
    available = native.AVAILABLE
    native.AVAILABLE = False
    try:
        return function(*arguments, **options)
    finally:
        native.AVAILABLE = available


@settings(max_examples=200)
@given(
    st.tuples(st.integers(1, 140), st.integers(1, 140)),
    st.sampled_from([*BLOCKS, "gray", "progressive", "png"]),
    st.data(),
)
def test_every_path_to_a_window_gives_the_pixels_of_the_complete_image(size, form, data):
    """The test compares four paths: the C decoder, a cut at restart markers, a cut below the
    window, and decoding the full image with simplejpeg."""
    width, height = size
    options = (
        {"quality": 90, "subsampling": form}
        if form in BLOCKS
        else {"progressive": form == "progressive"}
    )
    per_line = -(-width // BLOCKS.get(form, 8))
    if form not in ("png", "progressive"):
        options["restart_marker_blocks"] = data.draw(
            st.sampled_from([0, 1, per_line, *(n for n in (2, 3, 5) if per_line % n == 0)])
        )
    image = picture(width, height, "L" if form == "gray" else "RGB")
    encoded = encode(image, "PNG") if form == "png" else encode(image, **options)
    left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    box = (
        left,
        top,
        data.draw(st.integers(1, width - left)),
        data.draw(st.integers(1, height - top)),
    )
    channels = data.draw(st.sampled_from([1, 3]))
    expected = decode(encoded, channels)[top : top + box[3], left : left + box[2]]
    np.testing.assert_array_equal(without_native(decode_box, encoded, box, channels), expected)
    np.testing.assert_array_equal(decode_box(encoded, box, channels), expected)


@pytest.mark.parametrize("form", ["CMYK", "YCbCr"])
def test_a_window_in_another_color_space_equals_that_of_the_complete_image(form, decoder):
    data = encode(picture(128, 128).convert(form), restart_marker_blocks=2)
    np.testing.assert_array_equal(decode_box(data, (70, 40, 30, 20)), decode(data)[40:60, 70:100])


@pytest.mark.parametrize("marker_blocks", [0, 2])
def test_simplejpeg_gets_only_part_of_the_file(marker_blocks, monkeypatch):
    monkeypatch.setattr(native, "AVAILABLE", False)
    sizes = []
    decode_jpeg = images.decode_jpeg
    monkeypatch.setattr(
        images,
        "decode_jpeg",
        lambda data, size, *rest, **options: (
            sizes.append(size) or decode_jpeg(data, size, *rest, **options)
        ),
    )
    data = encode(picture(128, 128), restart_marker_blocks=marker_blocks)
    assert decode_box(data, (40, 10, 20, 20)).shape == (20, 20, 3)
    assert sizes == [(32, 32) if marker_blocks else (128, 31)]


@pytest.mark.parametrize("fraction", [0.3, 0.6, 0.99])
@pytest.mark.parametrize("marker_blocks", [0, 2])
def test_a_truncated_jpeg_is_refused_even_if_the_window_is_complete(
    fraction, marker_blocks, monkeypatch
):
    monkeypatch.setattr(native, "AVAILABLE", False)
    data = encode(picture(128, 128), restart_marker_blocks=marker_blocks)
    with pytest.raises(ValueError, match="cannot decode"):
        decode_box(data[: int(fraction * len(data))], (0, 0, 16, 16))


def test_damage_in_the_window_is_left_to_full_decoding(decoder):
    """simplejpeg rejects an end-of-image marker inside the compressed data, but Pillow decodes the
    remaining data."""
    data = bytearray(encode(picture(128, 128), restart_marker_blocks=2))
    start = read_header(bytes(data)).scan_offset
    data[start + 20 : start + 24] = b"\xff\xd9\xff\xd9"
    np.testing.assert_array_equal(
        decode_box(bytes(data), (0, 0, 20, 10)), decode(bytes(data))[:10, :20]
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("marker_blocks", [0, 2])
def test_views_from_one_decoding_equal_those_from_several(
    marker_blocks, interpolation, channels, decoder
):
    data = encode(picture(160, 128), restart_marker_blocks=marker_blocks)
    windows = [(5, 3, 60, 50), (70, 40, 31, 64), (8, 60, 24, 24), (0, 0, 160, 128)]
    batch = torch.zeros(6, 24, 24, channels, dtype=torch.uint8).permute(0, 3, 1, 2)
    rows = [batch[n] for n in (4, 0, 2, 5)]
    views = decode_views(data, windows, (24, 24), interpolation, channels, out=rows)
    assert all(view.data_ptr() == row.data_ptr() for view, row in zip(views, rows, strict=True))
    for view, window in zip(views, windows, strict=True):
        left, top, width, height = window
        crop = torch.from_numpy(
            decode(data, channels)[top : top + height, left : left + width]
        ).permute(2, 0, 1)
        expected = F.interpolate(
            crop[None].contiguous(), (24, 24), mode=interpolation, antialias=True
        )[0]
        np.testing.assert_array_equal(view, expected)
        np.testing.assert_array_equal(
            decode_views(data, [window], (24, 24), interpolation, channels)[0], view
        )
    assert not batch[[1, 3]].any()


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_a_window_for_another_image_is_refused(form, decoder):
    data = encode(picture(97, 64), form)
    with pytest.raises(
        ValueError,
        match="the image has 97 x 64 pixels, but the index says 64 x 97: delete the split's",
    ):
        decode_views(data, [(0, 0, 10, 10)], (8, 8), "bilinear", stored_size=(64, 97))
    for window in [(90, 0, 8, 8), (0, 60, 8, 8), (-1, 0, 8, 8), (0, 0, 0, 8), (0, 0, 98, 1)]:
        with pytest.raises(ValueError, match=r"is outside the image of 97 x 64"):
            decode_box(data, window)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (30_000, 10), (10, 30_000), (2, 3)])
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_images_of_odd_shapes_are_decoded(width, height, form, decoder):
    data = encode(picture(width, height), form)
    window = width // 3, height // 3, max(width // 2, 1), max(height // 2, 1)
    [view] = decode_views(data, [window], (16, 16), "bicubic", stored_size=(width, height))
    assert view.shape == decode_center(data, (16, 16), EvalConfig(), "bicubic").shape == (3, 16, 16)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "change", ["gone", "other arguments", "other pixels", "other row scale", "other column scale"]
)
def test_a_changed_operator_in_torch_changes_no_pixels(change, interpolation, monkeypatch, caplog):
    """torch's resize operator is private and may change, so the project compares it with the public
    function before using it."""
    data = encode(picture(160, 128))
    window = (5, 3, 90, 70)

    def made() -> list[torch.Tensor]:
        return [
            *decode_views(data, [window], (24, 24), interpolation),
            decode_center(data, (32, 32), EvalConfig(), interpolation),
        ]

    expected = made()
    theirs = getattr(torch.ops.aten, f"_upsample_{interpolation}2d_aa").out

    def shifted(image, size, corners, height=None, width=None, *, out):
        return theirs(image, size, corners, height, width, out=out).add_(1)

    def rows_inverted(image, size, corners, height=None, width=None, *, out):
        return theirs(image, size, corners, height and 1 / height, width, out=out)

    def columns_inverted(image, size, corners, height=None, width=None, *, out):
        return theirs(image, size, corners, height, width and 1 / width, out=out)

    operators = {
        "other arguments": lambda image, size: image,
        "other pixels": shifted,
        "other row scale": rows_inverted,
        "other column scale": columns_inverted,
    }
    changed = SimpleNamespace() if change == "gone" else SimpleNamespace(out=operators[change])
    monkeypatch.setattr(torch.ops.aten, f"_upsample_{interpolation}2d_aa", changed)
    decoding._resize_operator.cache_clear()
    try:
        for view, right in zip(made(), expected, strict=True):
            np.testing.assert_array_equal(view, right)
        assert [
            record.message.startswith(
                f"torch {torch.__version__}: resizing takes 1.7 times as long"
            )
            for record in caplog.records
        ] == [True]
    finally:
        decoding._resize_operator.cache_clear()


def test_the_operator_is_used_with_this_release_of_torch():
    """If this test fails, results are still correct, but resizing is slow. Check what has changed
    in torch, and whether the code that plans the rows of the center crop is still valid."""
    assert decoding._resize_operator("bilinear") is not None
    assert decoding._resize_operator("bicubic") is not None
