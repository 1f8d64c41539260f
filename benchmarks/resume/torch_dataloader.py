"""Resume with torch's DataLoader and a saved epoch and step.

PyTorch's documentation describes no resume in the middle of an epoch. Its pages advise users to use
DistributedSampler with `set_epoch`
(https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler), to
use a seeded `generator` (https://docs.pytorch.org/docs/stable/notes/randomness.html#dataloader) and
to save the epoch (https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html). This
script saves the epoch and the step, and skips the batches before the step.

Variant "seed per epoch": the generator is seeded for each epoch, which no page mentions.
"""

from itertools import islice

import torch
from probe import (
    EPOCHS,
    RANK,
    RANK_BATCH,
    SEED,
    STEPS_PER_EPOCH,
    VARIANT,
    WORKERS,
    WORLD,
    Samples,
    Training,
)
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    training = Training()
    samples = Samples()
    sampler: DistributedSampler = DistributedSampler(
        samples, num_replicas=WORLD, rank=RANK, shuffle=True, seed=SEED, drop_last=True
    )

    generator = torch.Generator().manual_seed(SEED)
    loader = DataLoader(
        samples,
        RANK_BATCH,
        sampler=sampler,
        num_workers=WORKERS,
        generator=generator,
        drop_last=True,
    )

    for epoch in range(training.done // STEPS_PER_EPOCH, EPOCHS):
        sampler.set_epoch(epoch)
        if VARIANT == "seed per epoch":
            generator.manual_seed(SEED + epoch)
        skip = training.done - epoch * STEPS_PER_EPOCH
        for batch in islice(loader, skip, None):
            training.step(batch)
            if training.save_is_due:
                training.save()


if __name__ == "__main__":
    main()
