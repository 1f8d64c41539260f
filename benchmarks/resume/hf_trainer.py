"""Resume with Transformers' Trainer and `resume_from_checkpoint=True`.

https://huggingface.co/docs/transformers/main_classes/trainer: "ignore_data_skip (bool, defaults to
False): When resuming training, whether or not to skip the epochs and batches to get the data
loading at the same stage as in the previous training."
"""

from probe import BATCH, EPOCHS, FOLDER, SAVE_EVERY, SEED, WORKERS, WORLD, Probe, Samples
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


def main() -> None:
    out = FOLDER / "trainer"
    out.mkdir(exist_ok=True)
    arguments = TrainingArguments(
        output_dir=str(out),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH // WORLD,
        dataloader_num_workers=WORKERS,
        dataloader_drop_last=True,
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        seed=SEED,
        use_cpu=True,
        ddp_backend="gloo" if WORLD > 1 else None,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
    )

    trainer = Trainer(Probe(), arguments, train_dataset=Samples())
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out)) is not None)


if __name__ == "__main__":
    main()
