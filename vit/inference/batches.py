"""Batches of the images at given places, in order, decoded in the same way as for evaluation.

An image that cannot be read or decoded has weight 0, and the reason is in `bad_keys`. The other
images are not affected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vit.config.schema import EvalConfig
from vit.data.batches import Batch, Batches, BatchLayout, write_rows
from vit.data.decode.crops import decode_center
from vit.data.image_format import ImageFormat
from vit.inference.inputs import Place
from vit.system import stages
from vit.system.stages import Stage


class PlaceBatches(Batches):
    """Batches with each of `places` once; rows after the last place have weight 0."""

    def __init__(
        self, places: Sequence[Place], image_format: ImageFormat, view: EvalConfig, batch_size: int
    ):
        self.places = places
        self.image_format = image_format
        self.view = view
        self.layout = BatchLayout(batch_size, image_format, 0)

    def __len__(self) -> int:
        return math.ceil(len(self.places) / self.layout.num_rows)

    def num_filled(self, position: int) -> int:
        """Return the number of rows of the batch at `position` with a place; these are first."""
        start = position * self.layout.num_rows
        return min(len(self.places) - start, self.layout.num_rows)

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        """Fill `rows` with the rows from `first` on of the batch at `position`.

        Returns the reason for each image that could not be read or decoded, in the rows' order.
        """
        ids = position * self.layout.num_rows + first + np.arange(len(rows.labels))
        weights = np.zeros(len(ids), np.float32)
        reasons = []
        form = self.image_format
        for row, number in enumerate(ids.tolist()):
            view = rows.images[row]
            if number < len(self.places):
                stages.current.read(number)
                try:
                    data = self.places[number].read()
                    stages.current.enter(Stage.DECODE)
                    decode_center(
                        data, form.size, self.view, form.interpolation, form.channels, out=view
                    )
                    weights[row] = 1.0
                    continue
                except ValueError as error:
                    reasons.append(str(error))
            # Slots are reused, so without this the row would show an image of an older batch.
            view[:] = 0
        stages.current.enter(Stage.DRAW)
        write_rows(rows, 0, weights, np.empty((len(ids), 0)), ids)
        return tuple(reasons)

    def where(self, sample: int) -> str:
        """Return the name of the image `sample`, for messages."""
        return self.places[sample].name
