"""Resume with Grain's experimental `ElasticIterator`, whose state each rank saves.

Its docstring (https://github.com/google/grain/blob/main/grain/_src/python/dataset/elastic_iterator.py):
"Iterator supporting recovery from a checkpoint after changes in sharding"; "State of any shard can
be used to restore the state of all of the shards after changes in sharding and global batch size".
"""

from typing import Any

import grain.python as grain
import numpy as np
from absl import app
from grain.experimental import ElasticIterator
from probe import BATCH, EPOCHS, RANK, SAMPLES, SEED, WORKERS, WORLD, Training


class Augment(grain.RandomMapTransform):
    """A transform that draws the augmentation with the generator that Grain gives to each
    record."""

    def random_map(self, element: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"number": element, "augmentation": rng.random()}


def main(_: list[str]) -> None:
    training = Training()
    samples = grain.MapDataset.range(SAMPLES).seed(SEED).shuffle().repeat(EPOCHS)
    batches = iter(
        ElasticIterator(
            samples.random_map(Augment()),
            BATCH,
            grain.ShardOptions(shard_index=RANK, shard_count=WORLD),
            multiprocessing_options=grain.MultiprocessingOptions(num_workers=WORKERS),
        )
    )

    if training.state:
        batches.set_state(training.state["batches"])

    for batch in batches:
        training.step(batch)
        if training.save_is_due:
            training.save(batches=batches.get_state())


if __name__ == "__main__":
    app.run(main)  # Grain's workers need absl's parsed flags
