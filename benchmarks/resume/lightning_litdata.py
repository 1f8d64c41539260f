"""Resume with LitData's `StreamingDataset` and `StreamingDataLoader`, whose state each rank saves.

https://github.com/Lightning-AI/litData#pause-resume: "if interrupted, pick up right where you left
off without any issues. LitData provides a stateful Streaming DataLoader e.g. you can pause and
resume your training whenever you want." #shuffle: "the same settings always yield the same order
(required for resumable state_dict)".
"""

from typing import Any

import litdata
from probe import (
    EPOCHS,
    FOLDER,
    RANK_BATCH,
    SAMPLES,
    SHARED,
    STEPS_PER_EPOCH,
    WORKERS,
    Training,
    augment,
)

CHUNKS = SHARED / "chunks"


def write(number: int) -> dict[str, int]:
    return {"number": number}


def transform(sample: dict[str, int]) -> dict[str, Any]:
    return augment(sample["number"])


def main() -> None:
    if not CHUNKS.exists():
        litdata.optimize(write, list(range(SAMPLES)), str(CHUNKS), chunk_size=420, num_workers=1)

    training = Training()
    samples = litdata.StreamingDataset(
        str(CHUNKS), str(FOLDER / "cache"), shuffle=True, drop_last=True, transform=transform
    )
    loader = litdata.StreamingDataLoader(
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
