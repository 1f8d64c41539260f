"""Test the image policy against Pillow, torchvision and the loader's decoder."""

import hashlib
import io
import json
import random
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest
import simplejpeg
import torch
from decoding import sixteen_bit_png
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile
from torchvision.transforms import InterpolationMode, v2

from data_prep.errors import PrepError
from data_prep.write.images import REFUSED_BY_STRICT, ImagePolicy, Unreadable, prepare
from vit.data.decode.images import decode

DECODE = ImagePolicy("decode")
HEADERS = ImagePolicy("headers")
# At quality 100, pixels stay close to the original.
BEST = ImagePolicy(jpeg_quality=100)


def picture(width: int = 97, height: int = 64, mode: str = "RGB") -> Image.Image:
    """Return smooth colors with some noise, and a different color in each corner."""
    generator = np.random.default_rng(width * height)
    coarse = Image.fromarray(generator.integers(0, 256, (4, 5, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(coarse) + generator.normal(0, 3, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).convert(mode)


def encode(image: Image.Image, form: str = "JPEG", **options) -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, form, **options)
    return encoded.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def psnr(a, b) -> float:
    return 10 * np.log10(
        255**2 / max(np.mean((np.asarray(a).astype(float) - np.asarray(b)) ** 2), 1e-9)
    )


# --- unchanged images -----------------------------------------------------------------------------

UNTOUCHED = {
    "plain": encode(picture()),
    "gray": encode(picture(mode="L")),
    "progressive": encode(picture(), progressive=True),
    "restart markers": encode(picture(), restart_marker_rows=1),
    "stored as RGB": encode(picture(), keep_rgb=True),
    "MPO": encode(picture(), "MPO", save_all=True, append_images=[picture(mode="RGB")]),
    "1 x 1": encode(picture(1, 1)),
    "turned": encode(picture(), exif=oriented(6)),
    "profile": encode(picture(), icc_profile=bytes(200_000)),
    "bytes behind the end": encode(picture()) + b"\xff\xd9 and more" * 100,
}


@pytest.mark.parametrize("check", ["decode", "headers"])
@pytest.mark.parametrize("data", UNTOUCHED.values(), ids=UNTOUCHED)
def test_ordinary_jpegs_are_copied_unchanged(data, check):
    prepared = prepare(data, ImagePolicy(check))
    assert prepared.data is data
    assert (prepared.width, prepared.height) == opened(data).size
    assert prepared.change is None


@pytest.mark.parametrize(
    "policy",
    [
        ImagePolicy(apply_exif=True),
        ImagePolicy(resize_short_side=64),
        ImagePolicy(resize_short_side=500),
    ],
)
def test_images_that_need_no_change_stay_unchanged_under_any_policy(policy):
    data = encode(picture(97, 64))
    assert prepare(data, policy)[:4] == (data, 97, 64, None)


# --- converted images -----------------------------------------------------------------------------

TRANSLUCENT = picture(mode="RGBA")
TRANSLUCENT.putalpha(picture(mode="L"))
CONVERTED = {
    "CMYK JPEG": encode(picture(mode="CMYK")),
    "PNG (RGB)": encode(picture(), "PNG"),
    "PNG (RGBA)": encode(TRANSLUCENT, "PNG"),
    "PNG (L)": encode(picture(mode="L"), "PNG"),
    "PNG (LA)": encode(picture(mode="L").convert("LA"), "PNG"),
    "PNG (P)": encode(picture(mode="P"), "PNG"),
    "PNG (1)": encode(picture(mode="1"), "PNG"),
    "GIF (P)": encode(picture(mode="P"), "GIF", comment=b"a comment is no part of the image"),
    "WEBP (RGB)": encode(picture(), "WEBP", lossless=True),
    "WEBP (RGBA)": encode(TRANSLUCENT, "WEBP", lossless=True, exact=True),
    "BMP (RGB)": encode(picture(), "BMP"),
    "TIFF (RGB)": encode(picture(), "TIFF", compression="tiff_deflate"),
    "TIFF (CMYK)": encode(picture(mode="CMYK"), "TIFF"),
    "PPM (RGB)": encode(picture(), "PPM"),
}


@pytest.mark.parametrize("check", ["decode", "headers"])
@pytest.mark.parametrize("change", CONVERTED)
def test_all_other_images_become_rgb_jpegs(change, check):
    data = CONVERTED[change]
    prepared = prepare(data, ImagePolicy(check, jpeg_quality=100))
    assert (prepared.width, prepared.height, prepared.change) == (97, 64, change)
    image = opened(prepared.data)
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (97, 64))
    assert isinstance(image, JpegImageFile)
    assert image.layer[0][1:3] == (1, 1), "chroma must have full resolution"
    expected = np.asarray(opened(data).convert("RGB")).astype(int)
    assert np.abs(np.asarray(image).astype(int) - expected).max() <= 4
    np.testing.assert_array_equal(decode(prepared.data), image)
    assert b"comment" not in prepared.data


def test_transparent_pixels_keep_their_hidden_color():
    image = picture(mode="RGBA")
    image.putalpha(0)
    assert psnr(opened(prepare(encode(image, "PNG"), BEST).data), picture()) > 45


@pytest.mark.parametrize("quality", [30, 75, 95])
def test_the_requested_jpeg_quality_is_used(quality):
    prepared = prepare(CONVERTED["PNG (RGB)"], ImagePolicy(jpeg_quality=quality))
    ours = opened(prepared.data)
    pillows = opened(encode(picture(), quality=quality))
    assert isinstance(ours, JpegImageFile)
    assert isinstance(pillows, JpegImageFile)
    assert ours.quantization == pillows.quantization


SIXTEEN = (np.add.outer(np.arange(64), np.arange(97)) * 407).astype(np.uint16)  # 0 to 65120


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("PNG", "PNG (I;16)"),
        ("TIFF", "TIFF (I;16)"),
        ("PPM", "PPM (I)"),
        ("JPEG2000", "JPEG2000 (I;16)"),
    ],
)
def test_sixteen_bits_are_scaled_not_clipped(form, change):
    prepared = prepare(encode(Image.fromarray(SIXTEEN), form), BEST)
    assert prepared.change == change
    pixels = np.asarray(opened(prepared.data))
    assert pixels.shape == (64, 97, 3)
    assert np.abs(pixels - SIXTEEN[..., None] / 257).max() <= 2


@pytest.mark.parametrize(("largest", "num_bits"), [(4095, 12), (1000, 10), (16384, None)])
def test_a_dark_image_is_noted_because_its_range_is_unknown(largest, num_bits):
    """Cameras store 12-bit values in 16 bits, and the file does not declare the largest possible
    value."""
    values = np.linspace(0, largest, 64 * 97).round().astype(np.uint16).reshape(64, 97)
    note = ""
    if num_bits:
        note = (
            f" with no value above {2**num_bits - 1:,} of 65,535 (dark: scale {num_bits}-bit values"
            " to 16 bits first)"
        )
    for data, form in (
        (encode(Image.fromarray(values), "PNG"), "PNG (I;16)"),
        (encode(Image.fromarray(values.astype(">u2")), "TIFF"), "TIFF (I;16B)"),
        (sixteen_bit_png(np.repeat(values[..., None], 3, axis=2)), "PNG (RGB)"),
    ):
        prepared = prepare(data, BEST)
        assert prepared.change == form + note
        assert np.abs(np.asarray(opened(prepared.data)) - values[..., None] / 257).max() <= 3


def test_big_endian_sixteen_bit_images_are_read():
    prepared = prepare(encode(Image.fromarray(SIXTEEN.astype(">u2")), "TIFF"), BEST)
    assert prepared.change == "TIFF (I;16B)"
    assert np.abs(np.asarray(opened(prepared.data)) - SIXTEEN[..., None] / 257).max() <= 2


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_used(form):
    first = picture()
    second = ImageOps.invert(picture())
    data = encode(first, form, save_all=True, append_images=[second])
    assert opened(data).n_frames == 2  # type: ignore[attr-defined]
    assert psnr(opened(prepare(data, BEST).data), first) > 25


# --- rotated and resized images -------------------------------------------------------------------


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(2, 9))
def test_exif_is_applied_on_demand(orientation, form):
    data = encode(
        picture(),
        form,
        exif=oriented(orientation),
        **({"quality": 95} if form == "JPEG" else {"lossless": True}),
    )
    prepared = prepare(data, ImagePolicy(apply_exif=True, jpeg_quality=100))
    upright = ImageOps.exif_transpose(opened(data))
    assert (prepared.width, prepared.height) == upright.size
    assert prepared.change.endswith(f"EXIF orientation {orientation} applied")
    image = opened(prepared.data)
    assert 0x0112 not in image.getexif()
    assert psnr(image, upright.convert("RGB")) > 45


def test_an_image_encoded_for_another_reason_keeps_its_orientation():
    for data in (encode(picture(), exif=oriented(6)), encode(picture(), "PNG", exif=oriented(6))):
        prepared = prepare(data, ImagePolicy(resize_short_side=32))
        assert opened(prepared.data).getexif()[0x0112] == 6
        assert (prepared.width, prepared.height) == (48, 32)


@pytest.mark.parametrize("orientation", [0, *range(1, 9), 9])
def test_images_with_a_rotating_orientation_are_recognized(orientation):
    """Images must be recognized if and only if Pillow's exif_transpose rotates them. 0 and 9 are
    invalid orientations."""
    for form in ("JPEG", "PNG", "WEBP"):
        data = encode(picture(), form, exif=oriented(orientation))
        asks = (
            np.asarray(ImageOps.exif_transpose(opened(data))).tobytes()
            != np.asarray(opened(data)).tobytes()
        )
        for policy in (DECODE, HEADERS, ImagePolicy(resize_short_side=32)):
            assert prepare(data, policy).exif_oriented == asks, (form, policy)
        assert not prepare(data, ImagePolicy(apply_exif=True)).exif_oriented
    assert not prepare(encode(picture()), DECODE).exif_oriented


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", [(97, 64), (64, 97), (80, 80), (300, 41)], ids=str)
def test_resize_equals_torchvision(size, mode):
    data = encode(picture(*size, mode=mode), quality=95)
    prepared = prepare(data, ImagePolicy(resize_short_side=40, jpeg_quality=100))
    original = torch.from_numpy(np.array(opened(data).convert("RGB"))).permute(2, 0, 1)
    theirs = (
        v2.Resize(40, InterpolationMode.BICUBIC, antialias=True)(original).permute(1, 2, 0).numpy()
    )
    image = opened(prepared.data)
    assert (prepared.width, prepared.height) == image.size == (theirs.shape[1], theirs.shape[0])
    assert (image.mode, prepared.change) == (mode, "resized")
    assert psnr(image.convert("RGB"), theirs) > 48


@settings(max_examples=200)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_target_size_equals_torchvision(width, height, short):
    target = ImagePolicy(resize_short_side=short).target_size(width, height)
    if min(width, height) <= short:
        assert target == (width, height), "images must never be upscaled"
    else:
        theirs = v2.functional.resize(torch.empty(1, height, width, device="meta"), [short])
        assert target == (theirs.shape[2], theirs.shape[1])


def test_reducing_large_images_in_the_decoder_is_invisible():
    data = encode(picture(1100, 800), quality=92)
    by_resize_alone = opened(data).resize((55, 40), Image.Resampling.BICUBIC)
    assert (
        psnr(
            opened(prepare(data, ImagePolicy(resize_short_side=40, jpeg_quality=100)).data),
            by_resize_alone,
        )
        > 45
    )


def test_several_changes_are_all_named():
    policy = ImagePolicy(apply_exif=True, resize_short_side=32)
    prepared = prepare(encode(picture(mode="CMYK"), exif=oriented(8)), policy)
    assert prepared[1:4] == (32, 48, "CMYK JPEG, resized, EXIF orientation 8 applied")


# --- damaged images -------------------------------------------------------------------------------


def damage(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, zero, insert or move bytes, as disks, networks and crashed writers do."""
    hurt = bytearray(data)
    # Choose mostly bytes of the image data.
    start = rng.randrange(len(hurt)) if rng.random() < 0.3 else rng.randrange(500, len(hurt))
    match rng.randrange(7):
        case 0:
            del hurt[start:]
        case 1:
            hurt[start] ^= 1 << rng.randrange(8)
        case 2:
            hurt[start : start + 64] = bytes(len(hurt[start : start + 64]))
        case 3:
            del hurt[start : start + rng.choice([1, 100])]
        case 4:
            hurt[start:start] = rng.randbytes(rng.choice([1, 50]))
        case 5:
            hurt[start] = 0xFF
        case 6:
            del hurt[-rng.randint(1, 3) :]
    return bytes(hurt)


def raises(function, data: bytes) -> bool:
    try:
        function(data)
    except Exception:
        return True
    return False


@pytest.mark.parametrize(
    "kind", ["plain", "gray", "progressive", "restart markers", "stored as RGB"]
)
def test_the_check_finds_what_a_full_decode_finds(kind):
    rng = random.Random(kind)
    outcomes = []
    for _ in range(150):
        data = damage(UNTOUCHED[kind], rng)
        strict = not raises(simplejpeg.decode_jpeg, data)
        lenient = not raises(lambda data: opened(data).load(), data)
        try:
            change = prepare(data, DECODE).change
        except Unreadable:
            change = "unreadable"
        assert change == (None if strict else REFUSED_BY_STRICT if lenient else "unreadable")
        assert (change != "unreadable") == (not raises(decode, data)), (
            "the loader must decode exactly the accepted images"
        )
        outcomes.append(change)
    assert len(set(outcomes)) == 3, "the test must include intact, doubtful and unreadable images"


@pytest.mark.parametrize(
    "policy",
    [DECODE, HEADERS, ImagePolicy(resize_short_side=20)],
    ids=lambda policy: str(policy.options()),
)
@pytest.mark.parametrize(
    "kind", ["plain", "gray", "restart markers", "CMYK JPEG", "PNG (RGB)", "WEBP (RGB)"]
)
def test_truncated_images_are_unreadable(kind, policy):
    data = (UNTOUCHED | CONVERTED)[kind]
    for end in range(3, len(data) - 50, len(data) // 23):
        with pytest.raises(Unreadable, match=r"\w+"):
            prepare(data[:end], policy)


def test_a_missing_end_marker_is_treated_as_in_decoding():
    for kind in ("plain", "gray", "progressive"):
        data = UNTOUCHED[kind][:-2]
        assert raises(lambda data: prepare(data, HEADERS), data) == raises(decode, data)


def test_headers_alone_do_not_show_damaged_image_data():
    data = bytearray(UNTOUCHED["plain"])
    data[-500:-400] = bytes(100)
    assert prepare(bytes(data), HEADERS).change is None
    assert prepare(bytes(data), DECODE).change == REFUSED_BY_STRICT


def test_re_encoded_doubtful_images_are_named_too():
    data = UNTOUCHED["plain"][:20] + b"stray" + UNTOUCHED["plain"][20:]
    assert prepare(data, DECODE)[:4] == (data, 97, 64, REFUSED_BY_STRICT)
    assert prepare(data, ImagePolicy(resize_short_side=32))[1:4] == (
        48,
        32,
        f"{REFUSED_BY_STRICT}, resized",
    )


def jpeg_of(width: int, height: int, components: int = 3, precision: int = 8) -> bytes:
    """Return a JPEG whose header was changed to declare the given size."""
    data = bytearray(encode(picture()))
    frame = data.index(b"\xff\xc0") + 4
    data[frame : frame + 6] = struct.pack(">BHHB", precision, height, width, components)
    if components == 2:
        data[frame - 2 : frame] = struct.pack(">H", 14)
        del data[frame + 12 : frame + 15]
    return bytes(data)


def png_of(width: int, height: int) -> bytes:
    """Return a black PNG. If the image has more than a million pixels, return only its header."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    rows = zlib.compress(bytes((width + 1) * height)) if width * height < 1e6 else b""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


REFUSED = {
    "nothing": (b"", "^0 bytes$"),
    "a web page": (
        b"<!DOCTYPE html><html>Not found</html>",
        r"^not an image but a web page \(a login or an error page was saved in its place\)$",
    ),
    "zeros": (
        bytes(1000),
        r"not an image; expected one of JPEG, .*, but the data begin with b'\\x00",
    ),
    "start of a JPEG": (b"\xff\xd8", "truncated JPEG headers, after 2 bytes"),
    "JPEG bomb": (jpeg_of(60_000, 60_000), "60000 x 60000 pixels exceed the limit of 178956970"),
    "PNG bomb": (png_of(40_000, 40_000), "more than 178956970 pixels"),
    "wide JPEG": (
        jpeg_of(65_501, 8),
        "65501 x 8 pixels, but the sides of a JPEG are limited to 65500 pixels",
    ),
    "wide PNG": (
        png_of(65_501, 2),
        "65501 x 2 pixels, but the sides of a JPEG are limited to 65500",
    ),
    "12 bits": (jpeg_of(97, 64, precision=12), "the JPEG has 12 bits and 3 components"),
    "2 components": (jpeg_of(97, 64, components=2), "the JPEG has 8 bits and 2 components"),
    "floats": (encode(picture().convert("F"), "TIFF"), "the range of pixels of mode F is unknown"),
    "32-bit integers": (
        encode(picture().convert("I"), "TIFF"),
        "the range of pixels of mode I is unknown",
    ),
    "signature of a PNG": (b"\x89PNG\r\n\x1a\n" + bytes(50), "^the PNG is damaged$"),
    "signature of a GIF": (b"GIF89a", "^the GIF is damaged$"),
    "first letter of a PPM": (b"P", "not an image; .*, but the data begin with b'P'"),
    "signature of a TIFF": (b"II*\0" + bytes(50), "^the TIFF is damaged, or has too many bits"),
    "PostScript": (
        encode(picture(), "EPS"),
        "not an image; .*, but the data begin with b'%!PS-Adobe",
    ),
}


@pytest.mark.parametrize("check", ["decode", "headers"])
@pytest.mark.parametrize(("data", "reason"), REFUSED.values(), ids=REFUSED)
def test_the_reason_is_reported(data, reason, check):
    with pytest.raises(Unreadable, match=reason):
        prepare(data, ImagePolicy(check))


def test_a_long_png_is_accepted_if_it_is_resized():
    assert prepare(png_of(65_536, 2), ImagePolicy(resize_short_side=1))[1:4] == (
        32_768,
        1,
        "PNG (L), resized",
    )


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(UNTOUCHED | CONVERTED)),
    st.sampled_from([DECODE, HEADERS, ImagePolicy("decode", True, 20)]),
    st.integers(0),
)
def test_damage_raises_only_unreadable(kind, policy, seed):
    data = damage((UNTOUCHED | CONVERTED)[kind], random.Random(seed))
    try:
        prepared = prepare(data, policy)
    except Unreadable:
        return
    assert opened(prepared.data).size == (prepared.width, prepared.height)


def test_decoding_prints_nothing_and_warns_of_nothing(capfd):
    broken_exif = b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\1" * 99
    strange = [
        encode(picture(mode="CMYK"), exif=broken_exif),
        encode(picture(), exif=broken_exif)[:20]
        + b"stray"
        + encode(picture(), exif=broken_exif)[20:],
        encode(picture(mode="P"), "PNG", transparency=bytes(range(256))),
        png_of(10_000, 10_000),  # truncated, with a size between Pillow's warning and its limit
    ]
    reasons = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for data in strange:
            for policy in (DECODE, ImagePolicy(apply_exif=True, resize_short_side=32)):
                try:
                    prepare(data, policy)
                except Unreadable as error:
                    reasons.append(str(error))
    assert reasons == ["image file is truncated (0 bytes not processed)"] * 2
    assert capfd.readouterr() == ("", "")


# --- the policy -----------------------------------------------------------------------------------


def test_equal_input_gives_equal_bytes_in_any_process(tmp_path):
    (tmp_path / "cmyk.jpg").write_bytes(CONVERTED["CMYK JPEG"])
    code = (
        "import hashlib, sys; from data_prep.write.images import *; policy ="
        " ImagePolicy(apply_exif=True,"
        " resize_short_side=40)\nprint(hashlib.sha256(prepare(open(sys.argv[1], 'rb').read(),"
        " policy).data).hexdigest())"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cmyk.jpg")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = prepare(CONVERTED["CMYK JPEG"], ImagePolicy(apply_exif=True, resize_short_side=40)).data
    assert output.strip() == hashlib.sha256(here).hexdigest()


def test_options_are_json_and_differ_between_policies():
    options = [
        ImagePolicy(),
        HEADERS,
        ImagePolicy(apply_exif=True),
        ImagePolicy(resize_short_side=256),
        ImagePolicy(jpeg_quality=90),
    ]
    assert len({json.dumps(policy.options(), sort_keys=True) for policy in options}) == 5
    assert all(
        ImagePolicy(**json.loads(json.dumps(policy.options()))) == policy for policy in options
    )


def test_an_invalid_quality_is_refused():
    with pytest.raises(PrepError, match="--jpeg-quality 101: expected 1 to 100"):
        ImagePolicy(jpeg_quality=101)
