"""Everything together: `build` makes a `Run` of a config, `train` runs it. The only module that knows all the others.

The data's story: shards are opened and checked, the plan derives every number from config, data and ranks; model, optimizer and step are
built, and filled from the newest checkpoint if there is one. Then one loop with one clock: `step` counts global batches attempted, and order, learning
rate and all seeds are functions of it. After each step, what the step before did is read, so the device always has work queued.

    runs/<name>/
      config.yaml            the resolved config; command, commit and versions in its header
      metrics.jsonl          the record
      checkpoints/           full state, see vit.checkpoint
      weights/               last, best (and last_ema, best_ema): for evaluation and for other tools
      report/curves.png      learning curve
      stopped_early          only while the run was asked to stop and is not finished
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from vit import checkpoint as checkpoints
from vit import config_io
from vit.checkpoint import Progress
from vit.config import Config
from vit.data.augment import Augment
from vit.data.loader import Batch, ImageFormat, Loader, TrainBatches
from vit.data.order import Order, divisors, make_order, sample_checksum
from vit.data.shards import Split, open_split
from vit.distributed import World, wrap
from vit.ema import Ema
from vit.evaluate import evaluate
from vit.model import count_parameters, create_model, flops_per_image
from vit.optim import create_optimizer
from vit.record import METRICS_FILE, Record, duration, provenance
from vit.schedule import lr_at
from vit.step import StepResult, TrainStep
from vit.visualize import plot_curves
from vit.weights import grid_size, load_weights, read_trained, save_weights

MAY_CHANGE = ("run.", "log.", "checkpoint.", "eval.", "data.num_workers", "data.prefetch_batches", "data.micro_batch_size", "data.root",
              "data.val_split", "data.on_bad_image", "train.device", "train.compile", "train.max_skipped_steps")  # fmt: skip
"""Keys that a resumed run may have different from its checkpoint: they change neither batches nor updates beyond rounding."""


@dataclass(frozen=True)
class Plan:
    """What follows from config, data and ranks."""

    world_size: int
    micro_batch_size: int
    accumulation_steps: int
    steps_per_epoch: int
    dropped_per_epoch: int
    total_steps: int
    warmup_steps: int
    eval_every_steps: int
    num_lanes: int
    block_samples: int

    def evaluates_at(self, step: int) -> bool:
        """Each `eval_every_steps`, and at the end of a run that is at least that long: a trial of two steps of ViT-B is not evaluated for an hour."""
        at_end = step == self.total_steps and self.total_steps >= self.eval_every_steps
        return at_end or (step > 0 and step % self.eval_every_steps == 0)


def make_plan(config: Config, num_samples: int, world_size: int) -> tuple[Plan, Order]:
    """Derive all numbers of a run over `num_samples` training images on `world_size` ranks.

    Raises ValueError with everything that does not divide, and the sizes that work.
    """
    batch, group = config.data.global_batch_size, config.augment.mix_group_size
    mixes = config.augment.mixup_alpha > 0 or config.augment.cutmix_alpha > 0
    unit = group if mixes else 1
    if batch % (world_size * unit):
        step = world_size * unit
        near = sorted({max(batch // step, 1) * step, (batch // step + 1) * step})
        needs = f"{world_size} ranks" + (f" times augment.mix_group_size={group}" if mixes else "")
        fits = [n for n in divisors(batch) if batch % (n * unit) == 0]
        raise ValueError(
            f"data.global_batch_size={batch} is not a multiple of {needs}: use {' or '.join(map(str, near))}"
            + (f", or a number of ranks out of {fits}" if fits else f", or augment.mix_group_size out of {divisors(batch)[1:]}")
        )
    share = batch // world_size
    ceiling = config.data.micro_batch_size or share
    sizes = [size for size in divisors(share) if size % unit == 0]
    micro = max((size for size in sizes if size <= ceiling), default=0)
    if not micro:
        raise ValueError(f"data.micro_batch_size={ceiling} is below augment.mix_group_size={group}: sizes that work are {sizes}")
    order = make_order(num_samples, batch, config.train.seed, config.data.num_lanes, config.data.block_samples, config.data.window_blocks)

    def steps(count: int | None, epochs: float | None, default: int) -> int:
        return count if count is not None else max(round(epochs * order.steps_per_epoch), 1) if epochs else default

    total = steps(config.train.steps, config.train.epochs, 0)
    warmup = steps(config.schedule.warmup_steps, config.schedule.warmup_epochs, 0)
    plan = Plan(world_size, micro, share // micro, order.steps_per_epoch, order.dropped_per_epoch, total, warmup,
                steps(config.eval.every_steps, config.eval.every_epochs, total), order.num_lanes, order.block_samples)  # fmt: skip
    return plan, order


@dataclass
class Run:
    """A run that is ready to go, or to go on."""

    config: Config
    world: World
    folder: Path
    plan: Plan
    order: Order
    train_split: Split
    val_split: Split
    image: ImageFormat
    train_step: TrainStep
    record: Record
    progress: Progress


def image_format(config: Config) -> ImageFormat:
    """What the model of `config` takes."""
    size = config.model.image_size
    return ImageFormat((size, size) if isinstance(size, int) else size, config.model.in_chans, config.data.interpolation)


def create_augment(config: Config, num_classes: int, world: World) -> Augment:
    """The device's part of the image path, for training and evaluation."""
    return Augment(config.augment, num_classes, config.data.mean, config.data.std, world.device)


def build(config: Config, world: World, allow_change: Iterable[str] = ()) -> Run:
    """Make the run of `config`, from its newest checkpoint if its folder has one. Raises ValueError for what a user can get wrong.

    1. data and plan, 2. weights: seeded, or `init.checkpoint`, 3. everything that surrounds them, 4. a checkpoint over all of it.
    """
    assert config.run.dir is not None, "the command names the run folder"
    folder = Path(config.run.dir)

    # 1. The cheap checks come first: a mistake should show in a second.
    train_split = world.main_first(lambda: open_split(config.data.root, config.data.train_split))
    val_split = world.main_first(lambda: open_split(config.data.root, config.data.val_split))
    plan, order = make_plan(config, train_split.num_samples, world.size)
    num_classes = config.model.num_classes or train_split.num_classes
    if num_classes < train_split.num_classes:
        raise ValueError(f"model.num_classes={num_classes}, but {config.data.root} has {train_split.num_classes} classes: remove the key")
    facts = {"num_samples": train_split.num_samples, "index_sha256": _digest(train_split), "num_classes": num_classes}
    found = world.main_first(lambda: _find_checkpoint(folder, config, facts, set(allow_change), world))

    # 2. All ranks draw the same weights.
    torch.manual_seed(config.train.seed)
    model = create_model(config.model.name, config.model.image_size, num_classes, **config.model.fields())
    if config.init.checkpoint is not None and found is None:
        trained = read_trained(config.init.checkpoint)
        for note in load_weights(model, trained.weights, trained.grid_size, config.init.reset_head):
            if world.is_main:
                print(f"{trained.path}: {note}", file=sys.stderr)
    model.to(world.device)

    # 3. The average copies the model before anything is compiled into it.
    ema = Ema(model, config.train.ema_decay) if config.train.ema_decay is not None else None
    if config.train.compile:
        for block in getattr(model, "blocks", [model]):  # block by block: one compilation serves all of them
            block.compile()
    optimizer = create_optimizer(model, config.optim)
    peak = {"peak_lr": config.optim.lr, "total_steps": plan.total_steps, "warmup_steps": plan.warmup_steps}
    train_step = TrainStep(
        model, wrap(model, world), optimizer, create_augment(config, num_classes, world), world,
        lr_at=partial(lr_at, name=config.schedule.name, min_lr=config.schedule.min_lr, **peak),  # type: ignore[arg-type]
        micro_batch_size=plan.micro_batch_size, precision=config.train.precision, label_smoothing=config.loss.label_smoothing,
        clip_grad_norm=config.optim.clip_grad_norm, ema=ema, seed=config.train.seed,
    )  # fmt: skip

    # 4. In place: DDP and the average keep their tensors.
    progress = Progress(facts={**facts, "grid_size": grid_size(model)})
    if found is not None:
        progress = checkpoints.load_checkpoint(found[0], found[1], train_step)
        progress.restarts += 1
    record = _open_record(config, world, folder, plan, progress, model)
    return Run(config, world, folder, plan, order, train_split, val_split, image_format(config), train_step, record, progress)


def _digest(split: Split) -> str:
    return hashlib.sha256(split.index.tobytes()).hexdigest()[:16]


def _find_checkpoint(folder: Path, config: Config, facts: dict[str, Any], allowed: set[str], world: World) -> tuple[Path, dict] | None:
    """The checkpoint to go on from, if its run was this run."""
    found = checkpoints.newest_checkpoint(folder, say=lambda text: print(text, file=sys.stderr)) if world.is_main else _newest_whole(folder)
    if found is None or not world.is_main:
        return found
    path, info = found
    changed = config_io.differences(info["config"], config_io.to_dict(config))
    refused = {key: values for key, values in changed.items() if not key.startswith(MAY_CHANGE) and key not in allowed}
    lines = [f"  {key}: {old} there, {new} here" for key, (old, new) in refused.items()]
    lines += [f"  data: {key} was {info['facts'].get(key)}, is {value}" for key, value in facts.items() if info["facts"].get(key) != value]
    if lines:
        raise ValueError(
            f"{path}: belongs to a run with other settings:\n" + "\n".join(lines) + "\nUse another run.dir, restore the settings, or"
            f" accept a change with --allow-change {next(iter(refused), 'KEY')}"
        )
    return found


def _newest_whole(folder: Path) -> tuple[Path, dict] | None:
    """What the main rank has just checked, without hashing it again."""
    newest = next(iter(checkpoints.complete_checkpoints(folder)), None)
    return (newest, json.loads((newest / checkpoints.INFO_FILE).read_text())) if newest else None


def _open_record(config: Config, world: World, folder: Path, plan: Plan, progress: Progress, model: torch.nn.Module) -> Record:
    if world.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stopped_early").unlink(missing_ok=True)
        header = "".join(f"# {key}: {value}\n" for key, value in provenance().items())
        (folder / "config.yaml").write_text(header + config_io.dump_yaml(config_io.to_dict(config)))
    record = Record(folder, config.log, world.is_main, total_steps=plan.total_steps, first_step=progress.step)
    record.write("start", progress.step, restarts=progress.restarts, world_size=world.size, device=str(world.device), **provenance())
    if world.is_main:
        accumulation = f" in {plan.accumulation_steps} micro-steps" if plan.accumulation_steps > 1 else ""
        record.say(f"{config.model.name}: {count_parameters(model):,} parameters, {flops_per_image(model) / 1e9:.2f} GFLOP per image; {world.size} rank(s) on "
                   f"{world.device.type}, {config.train.precision}; {plan.total_steps} steps of {config.data.global_batch_size} images{accumulation}")  # fmt: skip
        record.start_wandb({**config_io.to_dict(config), "provenance": provenance()})
    if progress.restarts:
        record.say(f"resumed at step {progress.step} of {plan.total_steps} from {folder}/checkpoints (restart {progress.restarts})")
    return record


class StopSignals:
    """Remembers that this process was asked to end. The handler only sets a flag; the loop acts at the next step boundary, on all ranks."""

    def __init__(self) -> None:
        self.received = ""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name


@dataclass
class _Interval:
    """What is gathered between two lines of the record."""

    began: float = field(default_factory=time.perf_counter)
    waited_before_s: float = 0.0
    losses: list[float] = field(default_factory=list)


def train(run: Run) -> str:
    """Train to the end or to a signal; returns "finished" or "stopped". Saves at every ending that is in its hands."""
    config, world, plan, progress, record = run.config, run.world, run.plan, run.progress, run.record
    signals, began, first_step = StopSignals(), time.perf_counter() - progress.elapsed_s, progress.step
    position = progress.step + progress.batches_skipped
    batches = TrainBatches(run.train_split, run.order, config.augment, run.image, rank=world.rank, world_size=world.size,
                           on_bad_image=config.data.on_bad_image)  # fmt: skip
    loader = Loader(batches, position, position + plan.total_steps - progress.step, num_workers=config.data.num_workers,
                    prefetch_batches=config.data.prefetch_batches, pin_memory=world.device.type == "cuda")  # fmt: skip
    run.train_step.model.train()
    pending: tuple[int, StepResult] | None = None
    interval, checksum, checksum_from, stop = _Interval(), 0, position, False

    def read_pending() -> None:
        """Read what the last step did, tell people, and stop a run that is going nowhere."""
        nonlocal pending, stop, interval
        if pending is None:
            return
        (step, result), pending = pending, None
        values = result.read()
        stop = stop or values["stop"] > 0
        progress.bad_images += int(values["bad_images"])
        finite = math.isfinite(values["grad_norm"])
        progress.updates_skipped += not finite
        progress.updates_skipped_in_a_row = 0 if finite else progress.updates_skipped_in_a_row + 1
        if not finite:
            record.write("fault", step + 1, reason="gradient not finite, update skipped", loss=values["loss"])
        interval.losses.append(values["loss"])
        due = (step + 1) % config.log.every_steps == 0 or step + 1 == plan.total_steps
        _log(run, step, values, interval, loader.wait_s, began, first_step, due)
        if due:
            interval = _Interval(waited_before_s=loader.wait_s)
        if progress.updates_skipped_in_a_row >= config.train.max_skipped_steps:
            raise ValueError(
                f"step {step}: the gradient was not finite {progress.updates_skipped_in_a_row} times in a row (loss {values['loss']:.4g}): training has "
                "diverged. Lower optim.lr, lengthen the warm-up, or use train.precision=bf16; the last checkpoint is from before"
            )

    def save() -> None:
        progress.elapsed_s = time.perf_counter() - began
        folder = checkpoints.save_checkpoint(run.folder, run.train_step, progress, config_io.to_dict(config), world, config.checkpoint.keep_last)
        record.write("checkpoint", progress.step, folder=folder.name)

    if progress.step < plan.total_steps:
        first = next(loader)
        run.train_step.settle(first)
        for step in range(progress.step, plan.total_steps):
            batch: Batch = first if step == first_step else next(loader)
            result = run.train_step(batch, step, stop=bool(signals.received))
            checksum = (checksum + sample_checksum(batch.ids.numpy())) % 2**64
            for key in batch.bad_keys:
                record.say(f"step {step}: {key} could not be decoded and counts nowhere")
            read_pending()
            pending, progress.step = (step, result), step + 1
            position = progress.step + progress.batches_skipped
            if position % plan.steps_per_epoch == 0 or progress.step == plan.total_steps:
                _check_samples(run, checksum, checksum_from, position)
                checksum, checksum_from = 0, position
            evaluation_due = plan.evaluates_at(progress.step)
            save_due = progress.step % config.checkpoint.every_steps == 0 or progress.step == plan.total_steps
            if evaluation_due or save_due or stop:
                read_pending()
                paused = time.perf_counter()
                if evaluation_due and not stop:
                    stop = not _evaluate(run, signals)
                if save_due or stop:
                    save()
                    _write_weights(run, "last")
                interval.began += time.perf_counter() - paused
            if stop:
                break
    elif plan.evaluates_at(progress.step) and progress.evaluated_step < progress.step:  # stopped during the last evaluation
        stop = not _evaluate(run, signals)
        save()
        _write_weights(run, "last")
    else:
        record.say(f"{run.folder} is finished: {progress.step} steps, best top-1 {progress.best_top1:.2f} %. A longer run needs another run.dir")
    loader.close()
    outcome = "stopped" if stop else "finished"
    if world.is_main:
        if stop:
            (run.folder / "stopped_early").write_text(json.dumps({"step": progress.step, "signal": signals.received}) + "\n")
            record.say(f"stopped at step {progress.step} of {plan.total_steps}, saved; the same command goes on from here")
        elif progress.step > first_step:
            record.say(f"learning curve: {plot_curves(run.folder / METRICS_FILE, run.folder / 'report' / 'curves.png')}")
    if progress.step > first_step:
        record.write("end", progress.step, outcome=outcome, elapsed_s=round(time.perf_counter() - began, 1))
    record.close()
    return outcome


def _log(run: Run, step: int, values: dict[str, float], interval: _Interval, waited_s: float, began: float, first_step: int, due: bool) -> None:
    """Move the live line; at the end of an interval also write the line of metrics."""
    plan, batch_size = run.plan, run.config.data.global_batch_size
    spent = max(time.perf_counter() - interval.began, 1e-9)
    images_per_s = len(interval.losses) * batch_size / spent
    wait_s, lr = waited_s - interval.waited_before_s, run.train_step.lr_at(step)
    eta_s = (plan.total_steps - step - 1) * batch_size / images_per_s
    loss = sum(interval.losses) / len(interval.losses)
    text = (f"step {step + 1}/{plan.total_steps} epoch {(step + 1) / plan.steps_per_epoch:.2f} | {images_per_s:.0f} images/s, data wait {min(wait_s / spent, 1):.0%}"
            f" | loss {loss:.3f} | lr {lr:.2e} | ETA {duration(eta_s)}")  # fmt: skip
    if not due:
        run.record.progress(step + 1, text)
        return
    memory = torch.cuda.max_memory_allocated() / 2**30 if run.world.device.type == "cuda" else _peak_rss_gib()
    run.record.train_line(step + 1, text)
    run.record.write("train", step + 1, epoch=(step + 1) / plan.steps_per_epoch, loss=loss, lr=lr, grad_norm=values["grad_norm"],
                     images_per_s=images_per_s, data_wait_s=wait_s, elapsed_s=time.perf_counter() - began, peak_memory_gib=memory,
                     updates_skipped=run.progress.updates_skipped, bad_images=run.progress.bad_images)  # fmt: skip


def _peak_rss_gib() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def _check_samples(run: Run, checksum: int, start: int, stop: int) -> None:
    """The samples that all ranks have trained on since position `start` must be those of the order's plan."""
    signed = checksum - 2**64 if checksum >= 2**63 else checksum
    seen = int(run.world.sum_(torch.tensor(signed, dtype=torch.int64, device=run.world.device))) % 2**64
    if run.world.is_main:
        planned = run.order.checksum(start, stop)
        if seen != planned:
            raise RuntimeError(f"batches {start} to {stop}: sample checksum {seen:016x}, the plan has {planned:016x}: a bug in the loader, please report it")
        run.record.write("epoch", run.progress.step, epoch=stop / run.plan.steps_per_epoch, first_batch=start, last_batch=stop - 1,
                         sample_checksum=f"{seen:016x}", samples_dropped=run.plan.dropped_per_epoch)  # fmt: skip


class _Interrupted(Exception):
    """An evaluation was broken off by a signal, on all ranks at the same batch."""


def _evaluate(run: Run, signals: StopSignals) -> bool:
    """Evaluate the weights and their average, record it, write weights files. False if a signal broke it off; a resumed run does it again."""
    config, progress, record = run.config, run.progress, run.record
    def on_batch(done: int, total: int) -> None:
        record.progress(progress.step, f"evaluating: batch {done}/{total}")
        if done % 8 == 0 and run.world.any(bool(signals.received)):
            raise _Interrupted

    try:
        results = evaluate(_models(run), run.val_split, run.image, run.train_step.augment, run.world, batch_size=config.eval.batch_size,
                           crop_ratio=config.eval.crop_ratio, precision=config.train.precision, num_workers=config.data.num_workers, on_batch=on_batch)  # fmt: skip
    except _Interrupted:
        run.train_step.model.train()
        return False
    best = max(results.values(), key=lambda result: result.top1)
    values = {f"{key}{'' if name == 'model' else '_' + name}": value for name, result in results.items() for key, value in result.to_dict().items()}
    record.write("eval", progress.step, **values)
    parts = [f"{'' if name == 'model' else name + ' '}top-1 {r.top1:.2f} %, top-5 {r.top5:.2f} %, loss {r.loss:.4f}" for name, r in results.items()]
    record.say(f"step {progress.step}: {'; '.join(parts)} on {best.num_images} images of {config.data.val_split!r}")
    progress.evaluated_step = progress.step
    if best.top1 > progress.best_top1:
        progress.best_top1 = best.top1
        _write_weights(run, "best")
    return True


def _models(run: Run) -> dict[str, torch.nn.Module]:
    """The weights, and their average if there is one."""
    average = run.train_step.ema
    return {"model": run.train_step.model} | ({"ema": average.module} if average is not None else {})


def _write_weights(run: Run, name: str) -> None:
    """`weights/<name>.safetensors` and, of the average, `weights/<name>_ema.safetensors`, which say themselves what they are."""
    if not run.world.is_main:
        return
    facts = run.progress.facts
    metadata = {"format": "pt", "config": json.dumps(config_io.to_dict(run.config)), "num_classes": str(facts["num_classes"]),
                "grid_size": json.dumps(facts["grid_size"]), "class_names": json.dumps(run.train_split.class_names), "step": str(run.progress.step)}  # fmt: skip
    for kind, model in _models(run).items():
        averaged = kind == "ema"
        path = run.folder / "weights" / f"{name}{'_ema' if averaged else ''}.safetensors"
        save_weights(path, model.state_dict(), {**metadata, "averaged": json.dumps(averaged)})


def describe(config: Config, origins: dict[str, str], world_size: int) -> str:
    """What `--print-config` shows: every value with its origin, and the numbers derived from them."""
    train_split = open_split(config.data.root, config.data.train_split)
    plan, _ = make_plan(config, train_split.num_samples, world_size)
    with torch.device("meta"):
        model = create_model(config.model.name, config.model.image_size, config.model.num_classes or train_split.num_classes, **config.model.fields())
    comments = {key: origins.get(key, "default") for section, group in config_io.to_dict(config).items() for key in (f"{section}.{k}" for k in group)}
    derived = {"ranks": plan.world_size, "training_images": train_split.num_samples, "classes": train_split.num_classes,
               "steps_per_epoch": plan.steps_per_epoch, "dropped_per_epoch": plan.dropped_per_epoch, "total_steps": plan.total_steps,
               "warmup_steps": plan.warmup_steps, "eval_every_steps": plan.eval_every_steps, "micro_batch_size": plan.micro_batch_size,
               "accumulation_steps": plan.accumulation_steps, "num_lanes": plan.num_lanes, "block_samples": plan.block_samples,
               "parameters": f"{count_parameters(model):,}", "gflop_per_image": round(flops_per_image(model) / 1e9, 2)}  # fmt: skip
    return config_io.dump_yaml(config_io.to_dict(config), comments) + "\n# derived\n" + "".join(f"#   {k}: {v}\n" for k, v in derived.items())


def default_run_dir(config_file: str) -> str:
    """`runs/<name of the config file>`."""
    return os.path.join("runs", Path(config_file).stem)
