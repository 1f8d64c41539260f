"""Resume with WebDataset and `resampled=True`, which its author recommends for restarts.

https://github.com/webdataset/webdataset/issues/271: "With resampling, there is no need to resume
training, since simply restarting the job will give you the same distribution of samples". The state
consists of the model's state and the number of steps. An epoch is a fixed number of batches.

Variant "detshuffle": seeded shuffles instead of resampling. The first batches are skipped.
https://github.com/webdataset/webdataset/issues/177: "WebDataset gives you the primitives you need
(slice, detshuffle, rng= arguments), but it can't do it for you". No page shows such a loop.
"""

from itertools import islice
from typing import Any

import probe
import webdataset
from probe import EPOCHS, SAMPLES, SEED, STEPS_PER_EPOCH, VARIANT, Training, augment

SHARDS = probe.SHARED / "tars"
NUM_SHARDS = 36


def read(sample: dict[str, Any]) -> dict[str, Any]:
    return augment(int(sample["number"]))


def main() -> None:
    if not SHARDS.exists():
        SHARDS.mkdir()
        with webdataset.ShardWriter(f"{SHARDS}/%d.tar", SAMPLES // NUM_SHARDS) as writer:
            for number in range(SAMPLES):
                writer.write({"__key__": str(number), "number": str(number).encode()})

    training = Training()
    urls = f"{SHARDS}/{{0..{NUM_SHARDS - 1}}}.tar"
    for epoch in range(training.done // STEPS_PER_EPOCH, EPOCHS):
        split = webdataset.split_by_node
        if VARIANT == "detshuffle":
            seed: dict[str, Any] = {"detshuffle": True, "seed": SEED + epoch}
            samples = webdataset.WebDataset(urls, shardshuffle=36, nodesplitter=split, **seed)
            samples = samples.compose(webdataset.detshuffle(1000, seed=SEED + epoch))
        else:
            samples = webdataset.WebDataset(urls, resampled=True, nodesplitter=split).shuffle(1000)

        loader = webdataset.WebLoader(
            samples.map(read), batch_size=probe.RANK_BATCH, num_workers=probe.WORKERS
        )

        done = training.done - epoch * STEPS_PER_EPOCH
        skip = done if VARIANT == "detshuffle" else 0
        for batch in islice(loader, skip, skip + STEPS_PER_EPOCH - done):
            training.step(batch)
            if training.save_is_due:
                training.save()


if __name__ == "__main__":
    main()
