"""Resume with Lightning's Trainer, `ModelCheckpoint` and `ckpt_path="last"`.

https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html: "Lightning saves
everything you need to restore a model even in the most complex distributed training environments",
and "Resume training state" with `ckpt_path`. When a run resumes in mid-epoch, Lightning prints that
the data loader is "not resumable" and "can cause unreliable results if further training is done.
Consider using an end-of-epoch checkpoint or make your dataloader resumable by implementing the
`state_dict` / `load_state_dict` interface."

Variant "StatefulDataLoader": torchdata's loader, which has this interface. "+ steps" also reads
`trainer.estimated_stepping_batches` in `configure_optimizers`, as documented for schedules.
"""

from typing import Any

import lightning
import probe
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from probe import Probe, Samples
from torchdata.stateful_dataloader import StatefulDataLoader


class Module(lightning.LightningModule):
    """A Lightning module with the probe and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = Probe()

    def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
        return self.probe(batch["number"], batch["augmentation"])["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if probe.VARIANT.endswith("+ steps"):
            assert self.trainer.estimated_stepping_batches == probe.STEPS
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


if __name__ == "__main__":
    lightning.seed_everything(probe.SEED, workers=True)
    kind = StatefulDataLoader if probe.VARIANT else torch.utils.data.DataLoader
    options: dict[str, Any] = {"shuffle": True, "num_workers": probe.WORKERS, "drop_last": True}
    loader: Any = kind(Samples(), probe.RANK_BATCH, **options)
    save = ModelCheckpoint(
        probe.FOLDER, every_n_train_steps=probe.SAVE_EVERY, save_top_k=-1, save_last=True
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=probe.WORLD,
        strategy="ddp" if probe.WORLD > 1 else "auto",
        max_epochs=probe.EPOCHS,
        callbacks=[save],
        default_root_dir=probe.FOLDER,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), loader, ckpt_path="last")  # starts from step 0 if there is no checkpoint
