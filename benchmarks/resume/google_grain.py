"""Resume with Grain's DataLoader, whose iterator state each rank saves.

https://google-grain.readthedocs.io/en/latest/tutorials/data_loader_tutorial.html: the sampler gives
a "per-record Random Number Generator"; "the checkpoint contains the string representation of the
sampler and the data source. Checkpoints are only valid when loaded with the same sampler/data
source". Orbax, which the page recommends for saving, calls `get_state` and `set_state` as this
script does, for the state of each process.
"""

from typing import Any

import grain.python as grain
import numpy as np
from absl import app
from probe import EPOCHS, RANK, RANK_BATCH, SAMPLES, SEED, WORKERS, WORLD, Training


class Augment(grain.RandomMapTransform):
    """A transform that draws the augmentation with the generator that Grain gives to each
    record."""

    def random_map(self, element: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"number": element, "augmentation": rng.random()}


def main(_: list[str]) -> None:
    training = Training()
    sampler = grain.IndexSampler(
        num_records=SAMPLES,
        shard_options=grain.ShardOptions(shard_index=RANK, shard_count=WORLD, drop_remainder=True),
        shuffle=True,
        num_epochs=EPOCHS,
        seed=SEED,
    )

    loader = grain.DataLoader(
        data_source=grain.RangeDataSource(0, SAMPLES, 1),
        sampler=sampler,
        operations=[Augment(), grain.Batch(RANK_BATCH, drop_remainder=True)],
        worker_count=WORKERS,
    )

    batches = iter(loader)
    if training.state:
        batches.set_state(training.state["batches"])

    for batch in batches:
        training.step(batch)
        if training.save_is_due:
            training.save(batches=batches.get_state())


if __name__ == "__main__":
    app.run(main)  # Grain's workers need absl's parsed flags
