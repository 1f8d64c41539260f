"""Decode images at given locations into batches, in order, as in evaluation.

An image that cannot be read or decoded has weight 0, and `bad_keys` contains the reason. Other
images are not affected.
"""

import math
from collections.abc import Sequence

import numpy as np

from vit.config.schema import EvalConfig
from vit.data import stages
from vit.data.batches import Batch, Batches, BatchLayout, write_rows
from vit.data.decode.crops import decode_center
from vit.data.image_format import ImageFormat
from vit.data.stages import Stage
from vit.inference.inputs import ImagePlace


class PlaceBatches(Batches):
    """Batches that contain each of `places` once. Padding rows at the end have weight 0."""

    def __init__(
        self,
        places: Sequence[ImagePlace],
        image_format: ImageFormat,
        view: EvalConfig,
        batch_size: int,
    ):
        self.places = places
        self.image_format = image_format
        self.view = view
        self.layout = BatchLayout(batch_size, image_format, 0)

    def __len__(self) -> int:
        return math.ceil(len(self.places) / self.layout.num_rows)

    def num_filled(self, position: int) -> int:
        """Return the number of rows in the batch at `position` that are not padding."""
        return min(len(self.places) - position * self.layout.num_rows, self.layout.num_rows)

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        """Fill `rows`, which start at row `first` of the batch at `position`.

        Returns one reason per image that could not be read or decoded, in the order of the rows.
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
                except ValueError as error:
                    reasons.append(str(error))

            if not weights[row]:
                view[:] = 0  # a reused buffer contains an image of an older batch

        stages.current.enter(Stage.DRAW)
        write_rows(rows, 0, weights, np.empty((len(ids), 0)), ids)
        return tuple(reasons)

    def where(self, sample: int) -> str:
        """Return the name of the image with number `sample`, for messages."""
        return self.places[sample].name
