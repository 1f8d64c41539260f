"""Test whether trainers also restore the optimizer, the schedule and the averaged weights.

    python benchmarks/resume/restored.py --work FOLDER

Each trainer trains the probe twice. One run is undisturbed, and the other run is killed after step
268 and resumed. Before each step of an optimizer, the learning rate and checksums of the
optimizer's state and of the averaged weights are logged. The first line after the resume is
compared with the undisturbed run's line for the same step. The learning rates in all later lines
are compared as well.

The trainers use the means that their documentation describes: Accelerate's
`register_for_checkpointing` (https://huggingface.co/docs/accelerate/usage_guides/checkpoint),
Lightning's `EMAWeightAveraging`
(https://lightning.ai/docs/pytorch/latest/api/lightning.pytorch.callbacks.WeightAveraging.html), and
timm's train.py with --model-ema and --start-epoch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import probe
import torch
from lives import Life, copy_run, live
from probe import EPOCHS, FOLDER, SAVE_EVERY, STEPS, STEPS_PER_EPOCH, Probe, Samples
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

FIND: dict[str, Callable[[], Any]] = {"step": lambda: probe.last_step, "average": lambda: None}
"""Functions that return the number of the current step, and the averaged weights of the current
trainer. The averaged weights are None if the trainer has none, or, as ours, does not provide
them."""


def checksum(tensors: Any) -> int:
    total = 0
    for tensor in tensors:
        total = zlib.crc32(torch.as_tensor(tensor).cpu().numpy().tobytes(), total)
    return total


def log(optimizer: Optimizer, *_: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [v for p in parameters for _, v in sorted(optimizer.state.get(p, {}).items())]
    average = FIND["average"]()
    line = {
        "step": FIND["step"](),
        "rate": float(optimizer.param_groups[0]["lr"]),
        "optimizer": checksum(state for state in states if state is not None),
        "average": average and checksum(p.detach() for p in average.parameters()),
    }
    with (FOLDER / "log" / f"life_{probe.LIFE}.optimizer").open("a") as file:
        file.write(json.dumps(line) + "\n")


def make_loader() -> torch.utils.data.DataLoader[dict[str, Any]]:
    return torch.utils.data.DataLoader(Samples(), probe.BATCH, shuffle=True, drop_last=True)


def make_sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def average_of(model: nn.Module) -> AveragedModel:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    FIND["average"] = lambda: average
    return average


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Probe()
    average, sgd = average_of(model), make_sgd(model)
    prepared = accelerator.prepare(model, sgd, make_loader(), CosineAnnealingLR(sgd, STEPS))
    model, optimizer, loader, schedule = prepared
    accelerator.register_for_checkpointing(average)
    done = max((int(path.name[5:]) for path in FOLDER.glob("step_*")), default=0)
    if done:
        accelerator.load_state(str(FOLDER / f"step_{done}"))
    for epoch in range(done // STEPS_PER_EPOCH, EPOCHS):
        skip = done - epoch * STEPS_PER_EPOCH
        for batch in accelerator.skip_first_batches(loader, skip):
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            done += 1
            if done % SAVE_EVERY == 0:
                accelerator.save_state(str(FOLDER / f"step_{done}"))


def transformers() -> None:
    importlib.import_module("hf_trainer").main()


def lightning() -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
    from lightning_trainer import Module

    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            sgd = make_sgd(self)
            schedule = {"scheduler": CosineAnnealingLR(sgd, STEPS), "interval": "step"}
            return {"optimizer": sgd, "lr_scheduler": schedule}

    save = ModelCheckpoint(FOLDER, every_n_train_steps=SAVE_EVERY, save_top_k=-1, save_last=True)
    average = EMAWeightAveraging(decay=0.9, use_buffers=False)
    FIND["average"] = lambda: average._average_model
    quiet: Any = {"logger": False, "enable_progress_bar": False, "default_root_dir": FOLDER}
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, callbacks=[save, average], **quiet
    )
    FIND["step"] = lambda: trainer.global_step + 1  # the step has begun with its forward pass
    trainer.fit(Scheduled(), make_loader(), ckpt_path="last")


def timm_parts() -> None:
    from timm.models import load_checkpoint, resume_checkpoint
    from timm.scheduler import create_scheduler_v2
    from timm.utils import CheckpointSaver, ModelEmaV3

    on_updates = probe.VARIANT.endswith("on updates")
    model = Probe()
    sgd = make_sgd(model)
    files = sorted(FOLDER.glob("recovery-1-*"), key=lambda path: path.stat().st_mtime)
    if files:
        resume_checkpoint(model, str(files[-1]), sgd)
    ema = ModelEmaV3(model, decay=0.9)
    if files:
        load_checkpoint(ema.module, str(files[-1]), use_ema=True)
    FIND["average"] = lambda: ema.module
    folders = {"checkpoint_dir": str(FOLDER), "recovery_dir": str(FOLDER)}
    saver = CheckpointSaver(model, sgd, model_ema=ema, **folders)
    schedule, _ = create_scheduler_v2(
        sgd, num_epochs=EPOCHS, updates_per_epoch=STEPS_PER_EPOCH, step_on_epochs=not on_updates
    )
    start_epoch = 1 if files else 0  # --start-epoch
    if start_epoch and on_updates:
        schedule.step_update(start_epoch * STEPS_PER_EPOCH)
    elif start_epoch:
        schedule.step(start_epoch)
    for epoch in range(start_epoch, EPOCHS):
        for index, batch in enumerate(make_loader()):
            model(**batch)["loss"].backward()
            sgd.step()
            sgd.zero_grad()
            updates = epoch * STEPS_PER_EPOCH + index + 1
            ema.update(model, step=updates)
            if (index + 1) % SAVE_EVERY == 0:
                saver.save_recovery(epoch, batch_idx=index)
            schedule.step_update(num_updates=updates)
        schedule.step(epoch + 1)


def ours() -> None:
    importlib.import_module("ours_fit").fit("ema.decay=0.9")


TRAINERS: dict[str, Callable[[], None]] = {
    "ours": ours,
    "Accelerate": accelerate,
    "Transformers Trainer": transformers,
    "Lightning": lightning,
    "timm": timm_parts,
    "timm, --sched-on-updates": timm_parts,
}


def read(folder: Path, life: int) -> dict[int, dict[str, Any]]:
    lines = (folder / "log" / f"life_{life}.optimizer").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, lines)}


def average_in_last_checkpoint(folder: Path) -> int | None:
    """Return the checksum of the averaged weights in our own last checkpoint."""
    from safetensors.torch import load_file

    files = sorted((folder / "run" / "checkpoints").glob("step_*/state.safetensors"))
    tensors = load_file(files[-1]) if files else {}
    averaged = [tensor for name, tensor in sorted(tensors.items()) if name.startswith("ema.")]
    return checksum(averaged) if averaged else None


def compare(name: str, work: Path) -> dict[str, str]:
    plain, killed, resumed = (work / name / part for part in ("plain", "killed", "resumed"))
    script = Path(__file__).stem
    variant = name.replace("--sched-on-updates", "on updates")

    ends = [
        live(script, variant, plain, 1, Life()),
        live(script, variant, killed, 1, Life(kill_at=268)),
    ]
    copy_run(killed, resumed)
    ends.append(live(script, variant, resumed, 2, Life()))

    if any(ends):
        return {"ended": " ".join(ends)}

    expected, seen = read(plain, 1), read(resumed, 2)
    first = min(seen)
    word = {True: "yes", False: "no"}
    average = [expected[first]["average"], seen[first]["average"]]
    if None in average:
        average = [average_in_last_checkpoint(folder) for folder in (plain, resumed)]

    return {
        "first step": str(first),
        "optimizer": word[expected[first]["optimizer"] == seen[first]["optimizer"]],
        "average": "has none" if None in average else word[average[0] == average[1]],
        "schedule": word[
            all(expected[s]["rate"] == seen[s]["rate"] for s in expected if s >= first)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="default: a temporary folder")
    parser.add_argument("--only", nargs="+", default=list(TRAINERS), choices=list(TRAINERS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.only:
            row = compare(name, args.work or Path(temporary))
            print(f"| {name} | {' | '.join(row.values())} |", flush=True)


if __name__ == "__main__":
    if probe.VARIANT:
        torch.manual_seed(probe.SEED)
        register_optimizer_step_pre_hook(log)
        TRAINERS[probe.VARIANT.replace("on updates", "--sched-on-updates")]()
    else:
        main()
