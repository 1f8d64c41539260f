"""What is drawn in a picture, for tests of pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def pixels(picture: Path) -> np.ndarray:
    """(H, W, 3) int16 of a PNG that is 1400 wide and neither blank nor cut short."""
    with Image.open(picture) as image:
        assert image.format == "PNG"
        colors = image.convert("RGB").reduce(4).getcolors(2**24)
        found = np.array(image.convert("RGB")).astype(np.int16)
    assert found.shape[1] == 1400
    assert colors is not None
    assert len(colors) > 10, "blank"
    return found


def places(shown: np.ndarray, color: str | tuple, tolerance: int = 2) -> np.ndarray:
    """(H, W) bool: where a picture has a color, given as #rrggbb or as (red, green, blue) in
    0..255."""
    if isinstance(color, str):
        color = tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))
    return (np.abs(shown - np.array(color)) <= tolerance).all(2)
