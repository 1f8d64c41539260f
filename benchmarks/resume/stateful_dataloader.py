"""Resume with torchdata's StatefulDataLoader, whose state each rank saves.

https://github.com/meta-pytorch/data/blob/v0.11.0/torchdata/stateful_dataloader/README.md:
"state_dict/load_state_dict methods for handling mid-epoch checkpointing"; "StatefulDataLoader
handles aggregation and distribution of state across multiprocess workers (but not across ranks)".
"If your dataset has worker-specific state (eg RNG transform state) you can add
state_dict/load_state_dict methods to your dataset."

Variant "RNG in the dataset": the dataset saves its random generator, as the page suggests.
"""

from typing import Any

import probe
import torch
from probe import Samples, Training
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader


class StatefulSamples(Samples):
    """A data set that saves the state of the worker's generator."""

    def state_dict(self) -> dict[str, Any]:
        return {"rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["rng"])


def main() -> None:
    training = Training()
    samples = StatefulSamples() if probe.VARIANT else Samples()
    sampler: DistributedSampler = DistributedSampler(
        samples,
        num_replicas=probe.WORLD,
        rank=probe.RANK,
        shuffle=True,
        seed=probe.SEED,
        drop_last=True,
    )

    loader = StatefulDataLoader(
        samples, probe.RANK_BATCH, sampler=sampler, num_workers=probe.WORKERS, drop_last=True
    )

    if training.state:
        loader.load_state_dict(training.state["loader"])

    for epoch in range(training.done // probe.STEPS_PER_EPOCH, probe.EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            training.step(batch)
            if training.save_is_due:
                training.save(loader=loader.state_dict())


if __name__ == "__main__":
    main()
