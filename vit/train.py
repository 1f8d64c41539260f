"""Everything together: `build` makes a `Run` of a config, `train` runs it. The only module that
knows all the others.

The data's story: shards are opened and checked, the plan derives every number; model, optimizer and
step are built, and filled from the newest checkpoint if there is one. Then one loop with one clock:
`step` counts global batches attempted, and order, learning rate and all seeds are functions of it.
What a step did is read while the next one is already queued, so the device never waits for Python.

    runs/<name>/
      config.yaml            the resolved config; command, commit and versions in its header
      metrics.jsonl          the record
      predictions.npz        the newest evaluation, image by image
      checkpoints/           full state, see vit.run.checkpoint
      weights/               last, best (and last_ema, best_ema): for evaluation and for other tools
      report/index.html      curves, pictures, settings and record in one page
      stopped_early          only while the run was asked to stop and is not finished
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vit import config_io
from vit.config import Config
from vit.data.augment.apply import create_augment
from vit.data.batches import EvalBatches, ImageFormat, TrainBatches
from vit.data.loader import Loader
from vit.data.order import Order
from vit.data.shards.split import Split
from vit.data.shuffle_quality import measure_shuffle
from vit.data.sources import TrainSet
from vit.data.stream import NOT_EXACT, StreamBatches
from vit.distributed import World, wrap
from vit.ema import Ema
from vit.evaluate import evaluate, save_predictions
from vit.exit import Interrupted, StopSignals
from vit.model import create_model
from vit.model_summary import count_parameters, flops_per_image
from vit.open_data import choose_num_classes, open_split, open_train_set
from vit.optim import create_optimizer
from vit.plan import Plan, make_plan
from vit.report.page import make_report
from vit.report.pictures import ClassAccuracy, ConfusedPair
from vit.run import checkpoint as checkpoints
from vit.run.checkpoint import RunState
from vit.run.folder import CONFIG_FILE, RunLock, clear_stopped, mark_stopped, weights_file
from vit.run.monitor import Monitor, collecting_at_log_lines
from vit.run.order_check import OrderCheck
from vit.run.preflight import Preflight, check_disk, filling_note, preflight
from vit.run.record import Record, provenance
from vit.run.resume import find_checkpoint
from vit.schedule import lr_at
from vit.step import TrainStep, compile_blocks
from vit.system.files import replacing
from vit.system.meter import Meter
from vit.weights import (
    LoadedWeights,
    WeightsError,
    class_mismatch,
    fingerprint,
    grid_size,
    load_weights,
    read_weights,
    save_weights,
)


@dataclass
class Run:
    """A run that is ready to go, or to go on."""

    config: Config
    world: World
    folder: Path
    plan: Plan
    order: Order
    batches: TrainBatches | StreamBatches
    val_split: Split
    image_format: ImageFormat
    train_step: TrainStep
    record: Record
    state: RunState
    signals: StopSignals

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """However it ends, the record is closed, the terminal given back and the signals with
        it."""
        try:
            if error is not None:
                with suppress(ValueError):  # a full disk: the first error is the one to tell
                    self.record.write(
                        "end",
                        self.state.step,
                        outcome="error",
                        reason=f"{type(error).__name__}: {error}",
                    )
        finally:
            self.record.close()
            self.signals.restore()

    def models(self) -> dict[str, nn.Module]:
        """The weights, and their average if there is one."""
        ema = self.train_step.ema
        return {"model": self.train_step.model} | ({"ema": ema.module} if ema is not None else {})


# --- making a run ---------------------------------------------------------------------------------


def build(config: Config, world: World, allow_change: Iterable[str] = ()) -> Run:
    """Make the run of `config`, from its newest checkpoint if its folder has one.

    Raises ValueError for what a user can get wrong; `vit.exit.Interrupted` where SIGTERM or SIGINT
    comes meanwhile, also while this rank waits for another.
    """
    assert config.run.dir is not None, "load_config names the run folder"
    folder = Path(config.run.dir)
    lock = RunLock(folder)
    is_new_here = world.is_main and not folder.is_dir()
    signals = StopSignals()
    try:
        # A folder that is not there yet is locked by `_open_record`, which makes it.
        world.main_first(lambda: lock.acquire() if world.is_main and folder.is_dir() else None)
        run = _build(config, world, folder, set(allow_change), signals, lock)
        signals.remember_only()
    except BaseException as error:
        signals.restore()
        # As if it had been just saved, also a new run: Slurm's script goes by the mark.
        preempted = isinstance(error, Interrupted) and error.number == signal.SIGTERM
        if isinstance(error, Interrupted) and (lock.is_held or (is_new_here and preempted)):
            with suppress(OSError, checkpoints.CheckpointError):  # the signal is what to tell
                folder.mkdir(parents=True, exist_ok=True)
                newest = checkpoints.newest_checkpoint(folder)
                mark_stopped(folder, newest[1]["step"] if newest else 0, error.number.name)
        raise
    return run


def _build(
    config: Config,
    world: World,
    folder: Path,
    allow_change: set[str],
    signals: StopSignals,
    lock: RunLock,
) -> Run:
    """`build` in its order:

    1. data and plan, 2. weights: seeded, or `init.checkpoint`, 3. everything that surrounds them,
    4. a checkpoint over all of it. `world.main_first`: rank 0 does it, then the others.
    `world.fail_together`: all do it, and a mistake on any rank ends all, told once.
    """
    # 1. The cheap checks come first: a mistake should show in a second.
    val_split = open_split(config.data, config.data.val_split, world)
    train_set = open_train_set(config.data, val_split, world, config.model.num_classes)
    train_split = train_set.split
    with world.fail_together():
        plan, order = make_plan(config, train_set.num_draws, world.size, train_set.shares)
        num_classes = choose_num_classes(config.model, config.data, train_split, val_split)
        image_format = ImageFormat.from_config(config.model, config.data)
        placed = {"rank": world.rank, "world_size": world.size}
        rows: dict[str, Any] = {**placed, "on_bad_image": config.data.on_bad_image}
        batches: TrainBatches | StreamBatches
        if config.data.reader == "index":
            batches = TrainBatches(
                train_split,
                order,
                config.augment,
                image_format,
                num_batches=plan.total_steps,
                **rows,
            )
        else:
            batches = StreamBatches(
                train_split,
                order,
                config.augment,
                image_format,
                num_workers=config.data.num_workers,
                **rows,
            )
        val_batches = EvalBatches(
            val_split, image_format, config.eval, config.eval.batch_size, **placed
        )
        checked = preflight(config, world, plan, batches, val_batches)
    identity = world.check_same(train_split.identity, "training data")
    world.check_same(lambda: train_set.identity, "chosen samples")
    # What must be the same after a resume.
    facts = {
        "num_samples": train_split.num_samples,
        "index_sha256": identity,
        "num_classes": num_classes,
    }
    facts["class_names"] = train_split.class_names
    facts |= {"chosen": train_set.identity} if train_set.identity else {}
    found = find_checkpoint(folder, config, facts, allow_change, world)
    with world.fail_together():
        if world.is_main and (found is None or found[1]["step"] < plan.total_steps):
            checked = check_disk(checked, config, plan, folder, num_classes)

    # 2. All ranks draw the same weights.
    with world.fail_together():
        torch.manual_seed(config.train.seed)
        model = create_model(config.model, num_classes=num_classes)
        if config.init.checkpoint is not None and found is None:
            trained = read_weights(config.init.checkpoint)
            try:
                notes = load_weights(
                    model, trained.weights, trained.grid_size, config.init.reset_head
                )
            except WeightsError as error:
                raise WeightsError(
                    f"{trained.path}: {error}{_other_model_settings(trained, config)}"
                ) from None
            if not config.init.reset_head and (
                note := class_mismatch(trained, train_split.class_names, num_classes)
            ):
                notes.append(f"{note}; init.reset_head=true starts the head anew")
            for note in notes:
                if world.is_main:
                    print(f"{trained.path}: {note}", file=sys.stderr)
            facts["init_sha256"] = fingerprint(trained.weights)
    model.to(world.device)

    # 3. The average copies the model before anything is compiled into it.
    ema = None
    if config.train.ema_decay is not None:
        ema = Ema(model, config.train.ema_decay, config.train.ema_warmup)
    if config.train.compile:
        compile_blocks(model)
    schedule = partial(
        lr_at, peak_lr=config.optim.lr, name=config.schedule.name, min_lr=config.schedule.min_lr
    )
    train_step = TrainStep(
        model,
        wrap(model, world),
        create_optimizer(model, config.optim),
        create_augment(
            config.augment, config.data, num_classes, world.device, compiled=config.train.compile
        ),
        world,
        lr_at=partial(schedule, total_steps=plan.total_steps, warmup_steps=plan.warmup_steps),
        micro_batch_size=plan.micro_batch_size,
        precision=config.train.precision,
        label_smoothing=config.loss.label_smoothing,
        clip_grad_norm=config.optim.clip_grad_norm,
        ema=ema,
        seed=config.train.seed,
    )

    # 4. In place: DDP and the average keep their tensors.
    state = RunState(facts={**facts, "grid_size": grid_size(model)})
    if found is not None:
        with world.fail_together():
            state = checkpoints.load_checkpoint(*found, train_step)
            if state.step > plan.total_steps:
                raise ValueError(
                    f"{folder} has come to step {state.step}, the run is to end at"
                    f" {plan.total_steps}: nothing is left to train"
                )
        state.restarts += 1
    record = world.main_first(
        lambda: _open_record(
            config, world, folder, plan, checked, state, model, lock, batches, train_set
        )
    )
    return Run(
        config,
        world,
        folder,
        plan,
        order,
        batches,
        val_split,
        image_format,
        train_step,
        record,
        state,
        signals,
    )


def _other_model_settings(trained: LoadedWeights, config: Config) -> str:
    """What in `model` differs from the config inside the weights, where they have one; sizes of
    images and rates change no shapes."""
    there, here = (trained.config or {}).get("model", {}), config_io.to_dict(config)["model"]
    changed = config_io.differences({"model": there}, {"model": here}) if there else {}
    lines = [
        f"{key} is {old} there, {new} here"
        for key, (old, new) in changed.items()
        if not key.endswith(("image_size", "_rate"))
    ]
    return f"; {', '.join(lines)}" if lines else ""


def _open_record(
    config: Config,
    world: World,
    folder: Path,
    plan: Plan,
    checked: Preflight,
    state: RunState,
    model: nn.Module,
    lock: RunLock,
    batches: TrainBatches | StreamBatches,
    train_set: TrainSet,
) -> Record:
    if not world.is_main:
        return Record(folder, config.log, False, total_steps=plan.total_steps)
    values = config_io.to_dict(config)
    made_by = provenance()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        record = Record(
            folder, config.log, True, total_steps=plan.total_steps, first_step=state.step, lock=lock
        )
        header = "".join(f"# {key}: {value}\n" for key, value in made_by.items())
        with replacing(folder / CONFIG_FILE) as file:
            file.write((header + config_io.dump_yaml(values)).encode())
    except OSError as error:
        raise ValueError(
            f"run.dir={folder}: cannot be written ({error.strerror}): choose another folder, or"
            " make room for it"
        ) from None
    start = {
        "restarts": state.restarts,
        "world_size": world.size,
        "device": str(world.device),
        **made_by,
    }
    start["exact"] = isinstance(batches, TrainBatches)
    mixing = (
        measure_shuffle(batches.order, batches.split.index["label"])
        if isinstance(batches, TrainBatches)
        else None
    )
    shuffle = mixing and asdict(mixing)
    record.write(
        "start",
        state.step,
        **start,
        plan=asdict(plan),
        preflight=checked.numbers,
        shuffle=shuffle,
        chosen=train_set.identity or None,
    )
    for line in train_set.summary:
        record.say(f"chosen: {line}")
    for line in checked.lines:
        record.say(line)
    accumulation = (
        f" in {plan.accumulation_steps} micro-steps" if plan.accumulation_steps > 1 else ""
    )
    record.say(
        f"{config.model.name}: {count_parameters(model):,} parameters,"
        f" {flops_per_image(model) / 1e9:.2f} GFLOP per image; {world.size} rank(s) on"
        f" {world.device.type}, {config.train.precision}; {plan.total_steps} steps of"
        f" {config.data.global_batch_size} images{accumulation}"
    )
    repeats = config.data.aug_repeats
    shown = (
        f"{plan.distinct_images_per_epoch:,} of {batches.order.num_samples:,} images in an epoch"
    )
    record.say(
        f"shuffle: {f'{shown}, {repeats} copies of each; ' if repeats > 1 else ''}{mixing}"
        if mixing
        else f"streamed, {NOT_EXACT}"
    )
    if plan.warmup_steps >= plan.total_steps:
        record.say(
            f"note: the warm-up takes {plan.warmup_steps} steps, the run has {plan.total_steps}:"
            " the peak learning rate is not reached"
        )
    decay = config.train.ema_decay
    if decay is not None and not config.train.ema_warmup and config.init.checkpoint is None:
        share = decay**plan.total_steps
        if share > 0.01:
            record.say(
                f"note: train.ema_decay={decay} over {plan.total_steps} steps leaves {share:.0%} of"
                " the initial weights in the average: train.ema_warmup=true, or a smaller decay"
            )
    if (filling := filling_note(batches, state.step, plan)) is not None:
        record.say(filling)
    if state.restarts:
        record.say(
            f"resumed at step {state.step} of {plan.total_steps} from {folder}/checkpoints"
            f" (restart {state.restarts})"
        )
    if not _is_done(plan, state):  # the same command again on a finished run shows nothing new
        record.start_wandb({**values, "provenance": made_by})
    return record


def _is_done(plan: Plan, state: RunState) -> bool:
    """Whether nothing is left to train and to evaluate."""
    return state.step == plan.total_steps and (
        not plan.evaluates_at(state.step) or state.evaluated_step == state.step
    )


# --- running it -----------------------------------------------------------------------------------


def train(run: Run) -> str:
    """Train to the end or to a signal; returns "finished" or "stopped". Saves at every ending that
    is in its hands."""
    config = run.config
    plan = run.plan
    state = run.state
    first_step = state.step
    loading: dict[str, Any] = {
        "num_workers": config.data.num_workers,
        "prefetch_gib": config.data.prefetch_gib,
    }
    loading |= {"device": run.world.device, "stall_timeout_s": config.data.stall_timeout_s}
    positions = first_step, plan.total_steps
    with run, Loader(run.batches, *positions, **loading) as loader, collecting_at_log_lines():
        monitor = Monitor(config, plan, run.world, state, run.record, loader, run.train_step.lr_at)
        # forget an earlier stop; a signal in this attempt writes the file again
        if run.world.is_main:
            clear_stopped(run.folder)
        # broken off by a signal: made up for
        if plan.evaluates_at(state.step) and state.evaluated_step < state.step:
            monitor.stop = not _evaluate(run)
            _save(run, monitor)
            monitor.resume_clock()
        elif state.step == plan.total_steps:
            best = f", best top-1 {state.best_top1:.2f} %" if state.best_top1 >= 0 else ""
            length = "train.epochs" if config.train.steps is None else "train.steps"
            run.record.say(
                f"{run.folder} is finished: {state.step} steps{best}; for more: another run.dir,"
                f" or a larger {length} with --allow-change {length}"
            )
        run.train_step.model.train()
        order = run.order if isinstance(run.batches, TrainBatches) else None
        check = OrderCheck(run.world, order, run.plan, run.record, first_step)
        while state.step < plan.total_steps and not monitor.stop:
            waited_before_s = loader.stats.wait_s
            batch = next(loader)
            waited_s = loader.stats.wait_s - waited_before_s
            if state.step == first_step:
                waited_s = 0.0  # that was the start of the process
                run.train_step.settle(batch)
                monitor.start_clock()
            # Forward, backward, update: vit/step.py. That a signal came, how long this rank waited,
            # and now and then what its loader did, travel with the sums that all ranks exchange.
            stop = bool(run.signals.received)
            result = run.train_step(batch, state.step, stop, waited_s, monitor.tell(state.step))
            for key in batch.bad_keys:
                print(
                    f"step {state.step}: {key} could not be decoded and counts nowhere",
                    file=sys.stderr,
                )
            # reads the step before this one, and sets monitor.stop
            monitor.take(state.step, result)
            state.step += 1

            check.add(batch)
            if state.step % plan.steps_per_epoch == 0 or state.step == plan.total_steps:
                check(state.step)

            evaluation_due = plan.evaluates_at(state.step)
            save_due = (
                state.step % config.checkpoint.every_steps == 0 or state.step == plan.total_steps
            )
            if evaluation_due or save_due or monitor.stop:
                monitor.read()
                if evaluation_due and not monitor.stop:
                    monitor.stop = not _evaluate(run)
                if monitor.stop:
                    check(state.step)  # what was trained on since the epoch began
                if save_due or monitor.stop:
                    _save(run, monitor)
                monitor.resume_clock()
        return _finish(run, monitor)


def _save(run: Run, monitor: Monitor) -> None:
    """Weights first: a run whose last checkpoint is whole is finished, and nobody would write them
    again. The other ranks wait, and end with the main rank where it cannot write."""
    run.record.progress(run.state.step, f"step {run.state.step}: saving")
    run.state.elapsed_s = monitor.elapsed_s()
    values = config_io.to_dict(run.config)
    keep_last = run.config.checkpoint.keep_last
    with run.world.fail_together():
        _write_weights(run, "last")
        folder = checkpoints.save_checkpoint(
            run.folder, run.train_step, run.state, values, run.world, keep_last
        )
    run.record.write("checkpoint", run.state.step, folder=folder.name)


def _finish(run: Run, monitor: Monitor) -> str:
    """Tell how it ended, in the folder, in the record and to people."""
    step = run.state.step
    outcome = "stopped" if monitor.stop and not _is_done(run.plan, run.state) else "finished"
    if run.world.is_main:
        if outcome == "stopped":
            mark_stopped(run.folder, step, run.signals.received)
            run.record.say(
                f"stopped at step {step} of {run.plan.total_steps}, saved; the same command goes on"
                " from here"
            )
        else:
            clear_stopped(run.folder)
            if run.state.evaluated_step < 0:
                run.record.say(
                    f"not evaluated: the run has {step} steps, and an evaluation comes each"
                    f" {run.plan.eval_every_steps} (eval.every_steps, eval.every_epochs); python"
                    f" launch/eval.py {run.folder} evaluates its weights"
                )
        run.record.write("end", step, outcome=outcome, elapsed_s=round(monitor.elapsed_s(), 1))
        if outcome == "finished" and run.config.log.report:
            _report(run)
    return outcome


def _report(run: Run) -> None:
    """Pictures and page of a finished run, also for W&B. A stopped one may have seconds to live:
    `launch/report.py` makes them then."""
    run.signals.release_interrupt()
    try:
        report = make_report(run.folder, run.world.device, in_use=False)
    except (Exception, KeyboardInterrupt) as error:  # a view must not decide how the run ended
        run.record.say(
            f"no report ({type(error).__name__}: {error}); python launch/report.py {run.folder}"
            " tries again"
        )
        return
    pictures = report.pictures
    run.record.log_pictures(pictures.paths)
    run.record.log_table(
        "most_confused",
        list(ConfusedPair._fields),
        [list(pair) for pair in pictures.confused_pairs],
    )
    run.record.log_table(
        "classes", list(ClassAccuracy._fields), [list(row) for row in pictures.class_accuracies]
    )
    run.record.say(f"report: {report.page}")


# --- evaluation and weights -----------------------------------------------------------------------


class _Interrupted(Exception):
    """An evaluation was broken off by a signal, on all ranks at the same batch."""


def _evaluate(run: Run) -> bool:
    """Evaluate the weights and their average, and record it. False if a signal broke it off; a
    resumed run then does it again."""
    config = run.config
    state = run.state
    record = run.record

    into = (lambda text: record.progress(state.step, text)) if record.is_live else None
    meter = Meter(
        "evaluating", run.val_split.num_samples, "images", shown=run.world.is_main, into=into
    )

    def on_batch(done: int, total: int) -> None:
        meter.update(run.val_split.num_samples * done // total)
        if done % 8 == 0 and run.world.any_rank(bool(run.signals.received)):
            raise _Interrupted

    try:
        results = evaluate(
            run.models(),
            run.val_split,
            run.image_format,
            run.train_step.augment,
            run.world,
            batch_size=config.eval.batch_size,
            view=config.eval,
            precision=config.train.precision,
            num_workers=config.data.num_workers,
            stall_timeout_s=config.data.stall_timeout_s,
            on_batch=on_batch,
        )
    except _Interrupted:
        return False
    values = {name: result.accuracy.to_dict() for name, result in results.items()}
    suffixed = {name: "" if name == "model" else f"_{name}" for name in results}
    record.write(
        "eval",
        state.step,
        **{key + suffixed[name]: v for name, group in values.items() for key, v in group.items()},
    )
    parts = [
        f"{'' if name == 'model' else name + ' '}{result.accuracy}"
        for name, result in results.items()
    ]
    record.say(
        f"step {state.step}: {'; '.join(parts)} on {run.val_split.num_samples} images of"
        f" {config.data.val_split!r}"
    )
    state.evaluated_step = state.step
    is_best = state.take_best(
        *((result.accuracy.top1, result.accuracy.loss) for result in results.values())
    )
    with run.world.fail_together():
        if run.world.is_main:
            save_predictions(
                run.folder, results.get("ema", results["model"]), run.val_split, state.step
            )
        if is_best:
            _write_weights(run, "best")
    return True


def _write_weights(run: Run, name: str) -> None:
    """`weights/<name>.safetensors` and, of the average, `weights/<name>_ema.safetensors`, which say
    themselves what they are."""
    if not run.world.is_main:
        return
    facts = run.state.facts
    metadata = {
        "format": "pt",
        "config": json.dumps(config_io.to_dict(run.config)),
        "num_classes": str(facts["num_classes"]),
        "grid_size": json.dumps(facts["grid_size"]),
        "class_names": json.dumps(run.batches.split.class_names),
        "step": str(run.state.step),
    }
    for kind, model in run.models().items():
        averaged = kind == "ema"
        path = weights_file(run.folder, name, averaged)
        save_weights(path, model.state_dict(), {**metadata, "averaged": json.dumps(averaged)})
