"""Resume a loop that combines timm's parts, and saves and resumes like timm's train.py.

timm's wheel does not contain train.py, so this loop calls the same functions in the same order
(https://github.com/huggingface/pytorch-image-models/blob/main/train.py): `CheckpointSaver` with
`save_recovery`, and `resume_checkpoint`, which returns the first epoch. States are saved as with
--recovery-interval 40. The interval is counted within an epoch, so the last state is that of step
248, not 240. "--resume: Resume full model and optimizer state from checkpoint". "--start-epoch:
manual epoch number (useful on restarts)", which overrides the returned epoch. The seed of each rank
is --seed plus the rank.

Variant "start epoch": pass --start-epoch the epoch in which the run was killed, instead of the
epoch after it. Variant "epochs": leave --recovery-interval at 0, its default, so that only
last.pth.tar is saved after each epoch.
"""

import re

import probe
import torch
from probe import EPOCHS, FOLDER, RANK, VARIANT, Samples, Training
from timm.models import resume_checkpoint
from timm.utils import CheckpointSaver, random_seed
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    training = Training()  # provides the model, DDP and SGD, but its state is not used
    random_seed(probe.SEED, RANK)
    start_epoch = 0

    files = list(FOLDER.glob("last.pth.tar" if VARIANT == "epochs" else "recovery-*.pth.tar"))
    if files:
        newest = max(files, key=lambda file: [int(part) for part in re.findall(r"\d+", file.name)])
        start_epoch = resume_checkpoint(training.probe, str(newest), training.optimizer) or 0
        if VARIANT == "start epoch":
            start_epoch = int(newest.name.split("-")[1])

    samples = Samples()
    sampler: DistributedSampler | None = DistributedSampler(samples) if probe.WORLD > 1 else None
    loader = torch.utils.data.DataLoader(
        samples,
        probe.RANK_BATCH,
        sampler is None,
        sampler,
        num_workers=probe.WORKERS,
        drop_last=True,
    )

    folders = {"checkpoint_dir": str(FOLDER), "recovery_dir": str(FOLDER)}
    saver = CheckpointSaver(training.probe, training.optimizer, **folders)

    for epoch in range(start_epoch, EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for index, batch in enumerate(loader):
            training.step(batch)
            due = (index + 1) % probe.SAVE_EVERY == 0 and VARIANT != "epochs"
            if RANK == 0 and due:
                saver.save_recovery(epoch, batch_idx=index)
        if RANK == 0:
            saver.save_checkpoint(epoch, metric=0.0)


if __name__ == "__main__":
    main()
