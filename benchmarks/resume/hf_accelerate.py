"""Resume with Accelerate's `save_state`, `load_state` and `skip_first_batches`.

https://huggingface.co/docs/accelerate/usage_guides/checkpoint: "it may also be desirable to resume
from a particular point in the active DataLoader if the state was saved during the middle of an
epoch. You can use skip_first_batches() to do so." The loop follows Accelerate's example
(https://github.com/huggingface/accelerate/blob/main/examples/complete_cv_example.py).

Variants that Accelerate's page does not mention: "seedable sampler" sets `use_seedable_sampler` of
`DataLoaderConfiguration` and calls `set_epoch` ("without set_epoch" does not call it); "stateful
loader" sets `use_stateful_dataloader`, as in Accelerate's example by_feature/checkpointing.py.
"""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from probe import EPOCHS, FOLDER, RANK_BATCH, SAVE_EVERY, SEED, VARIANT, WORKERS, Probe, Samples


def main() -> None:
    set_seed(SEED)
    stateful = VARIANT == "stateful loader"
    seedable = VARIANT.startswith("seedable sampler")

    loading = DataLoaderConfiguration(
        use_seedable_sampler=seedable, use_stateful_dataloader=stateful
    )
    accelerator = Accelerator(cpu=True, dataloader_config=loading)

    probe = Probe()
    plain = torch.utils.data.DataLoader(
        Samples(), RANK_BATCH, shuffle=True, num_workers=WORKERS, drop_last=True
    )
    sgd = torch.optim.SGD(probe.parameters(), lr=1e-3, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(probe, sgd, plain)

    per_epoch = len(loader)
    done = max((int(path.name[5:]) for path in FOLDER.glob("step_*")), default=0)
    if done:
        accelerator.load_state(str(FOLDER / f"step_{done}"))
    start_epoch, skip = divmod(done, per_epoch)

    for epoch in range(start_epoch, EPOCHS):
        model.train()
        if VARIANT == "seedable sampler":
            loader.set_epoch(epoch)
        active = loader
        if epoch == start_epoch and skip and not stateful:
            active = accelerator.skip_first_batches(loader, skip)

        for batch in active:
            loss = model(batch["number"], batch["augmentation"])["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done % SAVE_EVERY == 0:
                accelerator.save_state(str(FOLDER / f"step_{done}"))


if __name__ == "__main__":
    main()
