"""Resume with wids, WebDataset's library for indexed shards, and a saved epoch and step.

https://github.com/webdataset/webdataset/blob/main/docs/index.md#the-wids-library-for-indexed-webdatasets:
"Being indexed, it is easily backwards compatible with existing data pipelines based on indexed
dataset, including precise epochs for multinode training"; `DistributedChunkedSampler` is its
sampler, with `set_epoch`. No page describes a resume in the middle of an epoch, so this script
skips the batches before the step, as with torch's DataLoader. Since webdataset 1, wids is a
separate package.
"""

from itertools import islice
from typing import Any

import wids
from probe import EPOCHS, RANK_BATCH, SAMPLES, SEED, SHARED, STEPS_PER_EPOCH, WORKERS, Training
from probe import augment as augment_number
from torch.utils.data import DataLoader
from webdataset import ShardWriter

SHARDS = SHARED / "tars"
NUM_SHARDS = 36


def augment(sample: dict[str, Any]) -> dict[str, Any]:
    return augment_number(int(sample[".number"].read()))


def main() -> None:
    per_shard = SAMPLES // NUM_SHARDS
    if not SHARDS.exists():
        SHARDS.mkdir()
        with ShardWriter(f"{SHARDS}/%d.tar", per_shard) as writer:
            for number in range(SAMPLES):
                writer.write({"__key__": str(number), "number": str(number).encode()})

    training = Training()
    shards = [{"url": f"{SHARDS}/{i}.tar", "nsamples": per_shard} for i in range(NUM_SHARDS)]
    samples = wids.ShardListDataset(shards, transformations=[augment], keep=True)
    sampler = wids.DistributedChunkedSampler(samples, chunksize=1000, shuffle=True, seed=SEED)
    loader = DataLoader(samples, RANK_BATCH, sampler=sampler, num_workers=WORKERS, drop_last=True)

    for epoch in range(training.done // STEPS_PER_EPOCH, EPOCHS):
        sampler.set_epoch(epoch)
        skip = training.done - epoch * STEPS_PER_EPOCH
        for batch in islice(loader, skip, None):
            training.step(batch)
            if training.save_is_due:
                training.save()


if __name__ == "__main__":
    main()
