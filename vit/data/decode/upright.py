"""Rotate images upright according to their EXIF orientation.

Cameras store the unrotated picture and the camera's orientation. Published results use unrotated
images. `data_prep` rotates new photos when it writes shards. The model's inputs must then be
rotated too (`eval.apply_exif`).
"""

import io

from PIL import Image

from vit.data.decode.images import decode, open_image, undecodable
from vit.data.decode.jpeg_header import read_header

UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Maps each EXIF orientation to the Pillow operation that makes the image upright."""
ORIENTATION_TAG = 0x0112


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation of a Pillow image, or 1 (upright) if it has none."""
    try:
        return image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # a damaged EXIF block does not affect the pixels
        return 1


def upright(data: bytes, channels: int = 3) -> bytes:
    """Rotate an encoded image upright without loss. channels: 1 (gray) or 3 (RGB).

    Returns `data` unchanged if the image is already upright. Raises ValueError in the same cases as
    `decode`.
    """
    try:
        orientation = read_header(data).orientation
    except ValueError:  # another format, or extra bytes between the headers
        try:
            image = open_image(data)
        except ValueError as error:
            raise undecodable(data, error) from None
        orientation = 1 if image.format == "TIFF" else orientation_of(image)  # Pillow rotates TIFFs

    if orientation not in UPRIGHT:
        return data
    pixels = decode(data, channels)
    turned = Image.fromarray(pixels.squeeze(2) if channels == 1 else pixels)
    encoded = io.BytesIO()
    turned.transpose(UPRIGHT[orientation]).save(encoded, "PPM")
    return encoded.getvalue()
