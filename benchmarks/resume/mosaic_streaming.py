"""Resume with MosaicML's `StreamingDataset` and `StreamingDataLoader`, whose state rank 0 saves.

https://docs.mosaicml.com/projects/streaming/en/stable/distributed_training/fast_resumption.html:
"Streaming allows for immediate and deterministic resumption in the middle of an epoch"; "simply
call the state_dict method of StreamingDataLoader and save it along with your checkpoint".
https://docs.mosaicml.com/projects/streaming: "Elastic Determinism: Samples are in the same order
regardless of the number of GPUs, nodes, or CPU workers."
"""

from typing import Any

from probe import EPOCHS, RANK_BATCH, SAMPLES, SHARED, STEPS_PER_EPOCH, WORKERS, Training, augment
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

SHARDS = SHARED / "mds"


class Numbers(StreamingDataset):
    """A data set that augments each sample in `__getitem__`, where the documentation places
    transforms."""

    def __getitem__(self, at: int) -> Any:
        return augment(super().__getitem__(at)["number"])


def main() -> None:
    if not SHARDS.exists():
        with MDSWriter(out=str(SHARDS), columns={"number": "int"}, size_limit="16kb") as writer:
            for number in range(SAMPLES):
                writer.write({"number": number})

    training = Training()
    clean_stale_shared_memory()  # left by the killed run
    samples = Numbers(local=str(SHARDS), shuffle=True, batch_size=RANK_BATCH)
    loader = StreamingDataLoader(
        samples, batch_size=RANK_BATCH, num_workers=WORKERS, drop_last=True
    )

    if training.state:
        loader.load_state_dict(training.state["loader"])

    for _ in range(training.done // STEPS_PER_EPOCH, EPOCHS):
        for batch in loader:
            training.step(batch)
            if training.save_is_due:
                training.save(loader=loader.state_dict())


if __name__ == "__main__":
    main()
