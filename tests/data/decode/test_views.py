"""Decoding and resizing against Pillow and torchvision."""

import io
import os
import struct
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import simplejpeg
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features
from sklearn.datasets import load_sample_images
from timm.data import create_transform
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

from vit.config.schema import EvalConfig
from vit.data.decode import images, native
from vit.data.decode import views as decoding
from vit.data.decode.images import decode, decode_box, decoder_name
from vit.data.decode.jpeg_header import read_header
from vit.data.decode.views import decode_center, decode_views, resize

needs_native = pytest.mark.skipif(
    not native.AVAILABLE and os.environ.get("VIT_REQUIRE_NATIVE") != "1",
    reason="the C decoder was not built: apt-get install build-essential, then pip install -e .",
)
PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def picture(width: int = 97, height: int = 64, mode: str = "RGB") -> Image.Image:
    """Smooth shapes with edges and some noise: neither flat nor pure noise, as photographs are."""
    generator = np.random.default_rng(width * height)
    y, x = np.mgrid[:height, :width]
    waves = (
        np.stack([np.sin(x / 9 + phase) + np.cos(y / 7 - phase) for phase in range(len(mode))], -1)
        * 55
        + 128
    )
    waves[height // 3 : height // 2, width // 4 : width // 2] += 60
    pixels = np.clip(waves + generator.normal(0, 6, waves.shape), 0, 255).astype(np.uint8)
    return Image.fromarray(pixels if mode == "RGB" else pixels[..., 0])


def encode(image: Image.Image, form: str = "JPEG", **options) -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, form, **options)
    return encoded.getvalue()


def by_pillow(data: bytes, mode: str = "RGB") -> np.ndarray:
    return np.array(Image.open(io.BytesIO(data)).convert(mode))


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return 10 * np.log10(255**2 / max(np.mean((a.astype(float) - b) ** 2), 1e-9))


# --- decode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"quality": 95, "subsampling": 0}, {"quality": 75, "subsampling": 2}, {"progressive": True}],
)
def test_jpeg_is_what_pillow_sees(options):
    data = encode(picture(), **options)
    pixels = decode(data)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, by_pillow(data))


def test_grey_jpeg_as_grey_and_as_colour():
    data = encode(picture(mode="L"))
    np.testing.assert_array_equal(decode(data, channels=1)[..., 0], by_pillow(data, "L"))
    np.testing.assert_array_equal(decode(data, channels=3), by_pillow(data, "RGB"))


def test_colour_jpeg_as_grey_is_its_luma():
    data = encode(picture(), quality=95)
    luma = Image.open(io.BytesIO(data))
    luma.draft("L", luma.size)
    np.testing.assert_array_equal(decode(data, channels=1)[..., 0], luma)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("form", "mode"),
    [
        ("PNG", "RGB"),
        ("PNG", "RGBA"),
        ("PNG", "L"),
        ("PNG", "P"),
        ("PNG", "1"),
        ("WEBP", "RGB"),
        ("GIF", "P"),
    ],
)
def test_forms_other_than_jpeg_are_what_pillow_sees(form, mode, channels):
    data = encode(picture().convert(mode), form)
    pixels = decode(data, channels)
    assert pixels.shape == (64, 97, channels)
    np.testing.assert_array_equal(
        pixels.squeeze(), by_pillow(data, "RGB" if channels == 3 else "L")
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_cmyk_jpeg_is_what_pillow_sees(channels):
    data = encode(picture().convert("CMYK"))
    theirs = by_pillow(data, "RGB" if channels == 3 else "L").reshape(64, 97, channels)
    assert np.abs(decode(data, channels).astype(int) - theirs).max() <= 2, (
        "simplejpeg and Pillow round the conversion differently, no more"
    )


def other_sampling(luma: bytes, progressive: bool = False) -> bytes:
    """A JPEG of 64 x 64 pixels whose luma has `luma` (4 bits across, 4 down) times the samples of
    its colours, in place of 4:2:0."""
    data = encode(picture(64, 64), quality=90, subsampling="4:2:0", progressive=progressive)
    at = data.index(b"\x01\x22\x00", read_header(data).frame_offset)
    return data[: at + 1] + luma + data[at + 2 :]


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("luma", [b"\x41", b"\x14"], ids=["4:1:1", "4:4:1"])
def test_rare_samplings_are_what_pillow_sees(luma, progressive, decoder):
    """simplejpeg has no name for 4:4:1. The blocks are the same, in another place."""
    data = other_sampling(luma, progressive)
    np.testing.assert_array_equal(decode(data), by_pillow(data))
    np.testing.assert_array_equal(
        decode_box(data, (30, 5, 20, 50))[0], by_pillow(data)[5:55, 30:50]
    )


def test_grey_is_the_luma_also_where_pillow_decodes(decoder):
    """As libjpeg stores it, not computed from colours once more."""
    data = other_sampling(b"\x14")
    luma = Image.open(io.BytesIO(data))
    luma.draft("YCbCr", None)
    np.testing.assert_array_equal(decode(data, 1)[..., 0], np.asarray(luma)[..., 0])
    np.testing.assert_array_equal(
        decode_box(data, (30, 5, 20, 50), 1)[0], decode(data, 1)[5:55, 30:50]
    )


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("kept", [0.02, 0.5, 0.95])
def test_truncated_images_are_refused(form, kept):
    data = encode(picture(), form)
    with pytest.raises(ValueError, match=rf"cannot decode {int(kept * len(data))} bytes: \w+"):
        decode(data[: int(kept * len(data))])


def huge_png() -> bytes:
    """A header that promises 40,000 x 40,000 pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    )


GARBAGE = {
    "empty": b"",
    "start of JPEG": b"\xff\xd8",
    "text": b"not an image",
    "zeros": bytes(1000),
    "bomb": huge_png(),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused(data):
    with pytest.raises(ValueError, match=f"cannot decode {len(data)} bytes: "):
        decode(data)


def test_a_jpeg_that_promises_too_much_is_refused_before_memory_is_asked_for():
    data = bytearray(encode(picture()))
    size = data.index(b"\xff\xc0") + 5  # start of frame: marker, length, precision, height, width
    data[size : size + 4] = struct.pack(">HH", 30_000, 30_000)
    with pytest.raises(ValueError, match="30000 x 30000 pixels are more than"):
        decode(bytes(data))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@settings(max_examples=300)
@given(
    st.sampled_from(["JPEG", "PNG", "WEBP", *(["AVIF"] if features.check("avif") else [])]),
    st.data(),
)
def test_damage_never_raises_anything_but_a_value_error(form, data):
    damaged = bytearray(encode(picture(24, 16), form))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        pixels = decode(bytes(damaged))
    except ValueError:
        return
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3


def test_exif_orientation_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    image = picture()
    turned = encode(image, exif=exif)
    assert Image.open(io.BytesIO(turned)).getexif()[0x0112] == 6
    np.testing.assert_array_equal(decode(turned), decode(encode(image)))


# --- resize ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "window",
    [(0, 0, 97, 64), (10, 5, 40, 50), (90, 60, 7, 4), (13, 7, 32, 32)],
    ids=["whole", "inner", "tiny", "as is"],
)
def test_window_is_the_antialiased_resize_of_the_crop(window, interpolation):
    left, top, width, height = window
    data = encode(picture())
    [ours] = decode_views(data, [window], (32, 32), interpolation)
    assert (ours.dtype, ours.shape) == (torch.uint8, (3, 32, 32))

    crop = (
        torch.from_numpy(by_pillow(data))
        .permute(2, 0, 1)[:, top : top + height, left : left + width]
        .contiguous()
    )
    np.testing.assert_array_equal(
        ours, F.interpolate(crop[None], (32, 32), mode=interpolation, antialias=True)[0]
    )

    image = Image.fromarray(by_pillow(data))
    cropped = np.array(
        image.crop((left, top, left + width, top + height)).resize((32, 32), PILLOW[interpolation])
    )
    assert np.abs(ours.permute(1, 2, 0).numpy().astype(int) - cropped).max() <= 2
    assert psnr(ours.permute(1, 2, 0).numpy(), cropped) > 55


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_window_is_close_to_pillows_resize_of_a_box(interpolation):
    data = encode(picture(400, 300), quality=90)
    left, top, width, height = (31, 17, 250, 260)
    ours = (
        decode_views(data, [(left, top, width, height)], (96, 96), interpolation)[0]
        .permute(1, 2, 0)
        .numpy()
    )
    box = (left, top, left + width, top + height)
    theirs = np.array(
        Image.fromarray(by_pillow(data)).resize((96, 96), PILLOW[interpolation], box=box)
    )
    assert psnr(ours[4:-4, 4:-4], theirs[4:-4, 4:-4]) > 55
    assert psnr(ours, theirs) > 38, (
        "Pillow's filter also sees what is outside the box, ours does not"
    )


def test_resize_to_the_same_size_changes_nothing():
    pixels = np.array(picture())
    np.testing.assert_array_equal(resize(pixels, (64, 97), "bicubic").permute(1, 2, 0), pixels)


def test_grey_windows_have_one_channel():
    data = encode(picture(mode="L"))
    [ours] = decode_views(data, [(3, 3, 50, 40)], (20, 24), "bicubic", channels=1)
    assert ours.shape == (1, 20, 24)
    [colour] = decode_views(data, [(3, 3, 50, 40)], (20, 24), "bicubic", channels=3)
    np.testing.assert_array_equal(colour, ours.expand(3, -1, -1))


# --- a window of a JPEG ---------------------------------------------------------------------------

BLOCKS = {"4:4:4": 8, "4:2:2": 16, "4:2:0": 16}


@pytest.fixture(params=["simplejpeg", pytest.param("native", marks=needs_native)])
def decoder(request, monkeypatch):
    """Each way to decode, where it can be had."""
    if request.param == "simplejpeg":
        monkeypatch.setattr(native, "AVAILABLE", False)
    assert decoder_name() == request.param
    return request.param


def without_native(function, *arguments, **options):
    """Hypothesis repeats a test's body, for which a fixture is set up once: this way both are in
    one body."""
    available = native.AVAILABLE
    native.AVAILABLE = False
    try:
        return function(*arguments, **options)
    finally:
        native.AVAILABLE = available


@settings(max_examples=200)
@given(
    st.tuples(st.integers(1, 140), st.integers(1, 140)),
    st.sampled_from([*BLOCKS, "grey", "progressive", "png"]),
    st.data(),
)
def test_every_way_to_a_window_gives_the_pixels_of_the_whole(size, form, data):
    """The C decoder, the cut by restart markers, the cut below and the whole, as simplejpeg decodes
    it."""
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
    image = picture(width, height, "L" if form == "grey" else "RGB")
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
    np.testing.assert_array_equal(without_native(decode_box, encoded, box, channels)[0], expected)
    np.testing.assert_array_equal(decode_box(encoded, box, channels)[0], expected)


@settings(max_examples=200)
@given(
    st.tuples(st.integers(1, 140), st.integers(1, 140)),
    st.sampled_from([*BLOCKS, "grey"]),
    st.sampled_from([2, 4, 8]),
    st.data(),
)
def test_a_reduced_window_is_that_of_the_reduced_whole(size, form, reduce, data):
    width, height = size
    markers = data.draw(st.sampled_from([0, 1, -(-width // BLOCKS.get(form, 8))]))
    options = {"quality": 90, "subsampling": form} if form in BLOCKS else {}
    encoded = encode(
        picture(width, height, "L" if form == "grey" else "RGB"),
        **options,
        restart_marker_blocks=markers,
    )
    left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    box = (
        left,
        top,
        data.draw(st.integers(1, width - left)),
        data.draw(st.integers(1, height - top)),
    )
    whole = simplejpeg.decode_jpeg(
        encoded, "RGB", False, False, -(-height // reduce), -(-width // reduce), reduce
    )
    rows, columns = (
        slice(top // reduce, -(-(top + box[3]) // reduce)),
        slice(left // reduce, -(-(left + box[2]) // reduce)),
    )
    np.testing.assert_array_equal(decode_box(encoded, box, reduce=reduce)[0], whole[rows, columns])


@pytest.mark.parametrize(("left", "width"), [(0, 12), (20, 4), (132, 8)])
def test_a_narrow_reduced_window_is_that_of_the_reduced_whole(left, width):
    """At 1/4 the cut of a tile has two colour samples in a line, which libjpeg upsamples in another
    way."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 140, 3), np.uint8)
    data = encode(Image.fromarray(noise), quality=90, subsampling="4:2:2", restart_marker_blocks=1)
    whole = simplejpeg.decode_jpeg(data, "RGB", False, False, 16, 35, 4)
    np.testing.assert_array_equal(
        decode_box(data, (left, 8, width, 40), reduce=4)[0],
        whole[2:12, left // 4 : (left + width) // 4],
    )


@pytest.mark.parametrize("form", ["CMYK", "YCbCr"])
def test_a_window_of_other_colours_is_the_wholes(form, decoder):
    data = encode(picture(128, 128).convert(form), restart_marker_blocks=2)
    np.testing.assert_array_equal(
        decode_box(data, (70, 40, 30, 20))[0], decode(data)[40:60, 70:100]
    )


@pytest.mark.parametrize("marker_blocks", [0, 2])
def test_simplejpeg_is_given_less_than_the_whole(marker_blocks, monkeypatch):
    """The cut is not only right: it is used, and does not end in decoding the whole after all."""
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
    assert decode_box(data, (40, 10, 20, 20))[0].shape == (20, 20, 3)
    assert sizes == [(32, 32) if marker_blocks else (128, 31)]


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.99])
@pytest.mark.parametrize("marker_blocks", [0, 2])
def test_a_truncated_jpeg_is_refused_also_where_the_window_is_whole(
    kept, marker_blocks, monkeypatch
):
    monkeypatch.setattr(native, "AVAILABLE", False)
    data = encode(picture(128, 128), restart_marker_blocks=marker_blocks)
    with pytest.raises(ValueError, match="cannot decode"):
        decode_box(data[: int(kept * len(data))], (0, 0, 16, 16))


def test_damage_in_the_window_is_left_to_whole_decoding(decoder):
    """An end of image amid the codes: simplejpeg refuses, Pillow shows what there is, as it always
    did."""
    data = bytearray(encode(picture(128, 128), restart_marker_blocks=2))
    start = read_header(bytes(data)).scan_offset
    data[start + 20 : start + 24] = b"\xff\xd9\xff\xd9"
    np.testing.assert_array_equal(
        decode_box(bytes(data), (0, 0, 20, 10))[0], decode(bytes(data))[:10, :20]
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("marker_blocks", [0, 2])
def test_views_of_one_decoding_are_those_of_several_and_stand_in_their_rows(
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
        match="it has 97 x 64 pixels, the index says 64 x 97: the index is of other images",
    ):
        decode_views(data, [(0, 0, 10, 10)], (8, 8), "bilinear", stored_size=(64, 97))
    for window in [(90, 0, 8, 8), (0, 60, 8, 8), (-1, 0, 8, 8), (0, 0, 0, 8), (0, 0, 98, 1)]:
        with pytest.raises(ValueError, match=r"are not inside of an image of 97 x 64"):
            decode_box(data, window)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (30_000, 10), (10, 30_000), (2, 3)])
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_images_of_odd_shapes_are_decoded(width, height, form, decoder):
    data = encode(picture(width, height), form)
    window = width // 3, height // 3, max(width // 2, 1), max(height // 2, 1)
    [view] = decode_views(data, [window], (16, 16), "bicubic", stored_size=(width, height))
    assert view.shape == decode_center(data, (16, 16), EvalConfig(), "bicubic").shape == (3, 16, 16)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("change", ["gone", "other arguments", "other pixels", "other scales"])
def test_another_release_of_torch_changes_no_pixels(change, interpolation, monkeypatch, caplog):
    """The operator that resizes is none of torch's promises: it is compared with the public
    function before it is used."""
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

    def inverted(image, size, corners, height=None, width=None, *, out):
        return theirs(image, size, corners, height and 1 / height, width and 1 / width, out=out)

    others = {
        "other arguments": lambda image, size: image,
        "other pixels": shifted,
        "other scales": inverted,
    }
    changed = SimpleNamespace() if change == "gone" else SimpleNamespace(out=others[change])
    monkeypatch.setattr(torch.ops.aten, f"_upsample_{interpolation}2d_aa", changed)
    decoding._resize_operator.cache_clear()
    try:
        for view, right in zip(made(), expected, strict=True):
            np.testing.assert_array_equal(view, right)
        assert [
            record.message.startswith(f"torch {torch.__version__}: its public function resizes")
            for record in caplog.records
        ] == [True]
    finally:
        decoding._resize_operator.cache_clear()


def test_the_operator_is_used_with_this_release_of_torch():
    """Or all is right, and slow: see what has changed, and whether the plan of the centre's lines
    still holds."""
    assert decoding._resize_operator("bilinear") is not None
    assert decoding._resize_operator("bicubic") is not None


# --- decoding at a smaller scale ------------------------------------------------------------------


def photographs() -> list[bytes]:
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    return [
        encode(photo, quality=90, subsampling=s, restart_marker_blocks=n)
        for photo in photos
        for s, n in ((0, 0), (2, 4))
    ]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("reduce", "times"), [(2, (2.5, 4.5)), (4, (5.0, 9.0)), (8, (10.0, 14.0))])
def test_scaled_decoding_is_close_to_exact(reduce, times, interpolation):
    found = []
    generator = np.random.default_rng(reduce)
    for data in photographs() * 5:  # 640 x 427
        width, height = generator.integers(230, 420, 2).tolist()
        left, top = (
            int(generator.integers(0, 640 - width)),
            int(generator.integers(0, 427 - height)),
        )
        side = int(min(width, height) / generator.uniform(*times))
        exact, scaled = (
            decode_views(data, [(left, top, width, height)], (side, side), interpolation, scaled=s)[
                0
            ]
            for s in (False, True)
        )
        assert not torch.equal(exact, scaled)
        found.append(psnr(exact.numpy(), scaled.numpy()))
    assert np.median(found) > 40, f"{reduce}: {np.round(found, 1)}"
    assert min(found) > 33, f"{reduce}: {np.round(found, 1)}"


def test_a_scaled_view_depends_neither_on_cuts_nor_on_other_views():
    for data in photographs():
        windows = [(101, 53, 333, 291), (203, 11, 170, 240), (5, 7, 50, 60), (300, 201, 201, 197)]
        together = decode_views(data, windows, (64, 64), "bicubic", scaled=True)
        for window, view in zip(windows, together, strict=True):
            [alone] = decode_views(data, [window], (64, 64), "bicubic", scaled=True)
            np.testing.assert_array_equal(alone, view)
            # nothing is cut out of this one
            [of_the_whole] = decode_views(data + b"\0", [window], (64, 64), "bicubic", scaled=True)
            np.testing.assert_array_equal(of_the_whole, view)


def test_windows_that_are_not_large_and_what_is_no_jpeg_stay_exact():
    data = encode(picture(200, 200))
    for window, form in [
        ((0, 0, 79, 200), data),
        ((0, 0, 200, 79), data),
        ((0, 0, 200, 200), encode(picture(200, 200), "PNG")),
    ]:
        exact, scaled = (
            decode_views(form, [window], (32, 32), "bicubic", scaled=s)[0] for s in (False, True)
        )
        np.testing.assert_array_equal(exact, scaled)


# --- the evaluation view --------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("size", "crop_pct"), [(32, 0.875), (33, 0.9), (28, 1.0), (48, 0.95)])
@pytest.mark.parametrize(
    "original",
    [(97, 64), (64, 97), (75, 75), (40, 300), (20, 23), (500, 375)],
    ids=lambda wh: f"{wh[0]}x{wh[1]}",
)
def test_center_view_is_torchvisions(original, size, crop_pct, interpolation):
    data = encode(picture(*original))
    view = v2.Compose(
        [
            v2.Resize(int(size / crop_pct), InterpolationMode(interpolation), antialias=True),
            v2.CenterCrop(size),
        ]
    )
    theirs = view(torch.from_numpy(by_pillow(data)).permute(2, 0, 1))
    ours = decode_center(data, (size, size), EvalConfig(crop_pct=crop_pct), interpolation)
    # Below AVX2 torchvision resizes bilinearly in floats and rounds them: the neighbouring level at
    # most.
    in_floats = interpolation == "bilinear" and torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    np.testing.assert_allclose(ours.int(), theirs.int(), rtol=0, atol=int(in_floats))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "view",
    [{"crop_pct": 0.875}, {"resize_px": 41}, {"crop_pct": 0.9, "crop_mode": "squash"}],
    ids=str,
)
@pytest.mark.parametrize(
    "original", [(97, 64), (64, 97), (40, 300), (20, 23)], ids=lambda wh: f"{wh[0]}x{wh[1]}"
)
def test_center_view_by_pillow_is_torchvisions_of_pillows_images_and_timms(
    original, view, interpolation, decoder
):
    data = encode(picture(*original), restart_marker_blocks=1)
    settings = EvalConfig(**view, resizer="pillow")
    size = 32
    ours = decode_center(data, (size, size), settings, interpolation)
    resized = settings.resize_px or int(size / settings.crop_pct)
    side = (resized, resized) if settings.crop_mode == "squash" else resized
    chain = v1.Compose(
        [v1.Resize(side, InterpolationMode(interpolation)), v1.CenterCrop(size), v1.PILToTensor()]
    )
    np.testing.assert_array_equal(ours, chain(Image.open(io.BytesIO(data))))
    if settings.resize_px is None:
        timms = {
            "crop_pct": settings.crop_pct,
            "crop_mode": settings.crop_mode,
            "interpolation": interpolation,
            "normalize": False,
        }
        np.testing.assert_array_equal(
            ours, create_transform(size, **timms)(Image.open(io.BytesIO(data)))
        )


@pytest.mark.parametrize(
    "view", [{"resize_px": 41}, {"crop_pct": 0.9, "crop_mode": "squash"}], ids=str
)
def test_other_center_views_are_torchvisions_of_tensors(view):
    data = encode(picture(97, 64))
    settings = EvalConfig(**view)
    side = 41 if settings.resize_px else (35, 35)
    chain = v2.Compose(
        [v2.Resize(side, InterpolationMode.BICUBIC, antialias=True), v2.CenterCrop(32)]
    )
    theirs = chain(torch.from_numpy(by_pillow(data)).permute(2, 0, 1))
    np.testing.assert_array_equal(decode_center(data, (32, 32), settings, "bicubic"), theirs)


@pytest.mark.parametrize(
    "original", [(97, 64), (64, 97), (50, 300)], ids=lambda wh: f"{wh[0]}x{wh[1]}"
)
def test_an_oblong_center_view_is_timms(original):
    data = encode(picture(*original))
    size = (40, 24)
    ours = decode_center(data, size, EvalConfig(crop_pct=0.9, resizer="pillow"), "bicubic")
    timms = create_transform((3, *size), crop_pct=0.9, interpolation="bicubic", normalize=False)
    np.testing.assert_array_equal(ours, timms(Image.open(io.BytesIO(data))))


def test_pillows_and_torchs_resize_differ_by_little():
    """What `eval.resizer` is about, in numbers: docs/experiments.md."""
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
def test_what_the_center_view_does_not_show_is_not_decoded_and_does_not_matter(
    original, side, crop_pct, interpolation, resizer, blocks
):
    """The resize of the whole image, cropped."""
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
def test_center_view_always_has_the_size_that_was_asked_for(original, size, crop_pct, channels):
    assert decode_center(
        encode(picture(*original)), size, EvalConfig(crop_pct=crop_pct), "bilinear", channels
    ).shape == (channels, *size)


def test_center_view_of_an_oblong_size_keeps_the_aspect_and_the_middle():
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
    assert len(columns) == 60, "the disc, 75 pixels wide, fills the width"
    assert abs(rows.mean() - 49.5) <= 1
    np.testing.assert_array_equal(view, view[:, ::-1])
