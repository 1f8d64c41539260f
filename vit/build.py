"""`build` makes a `Run` from a config: everything that `vit.train.train` works with.

Data are opened and checked, and the plan derives every number from them. Model, optimizer and step
are created, and filled from the newest checkpoint if the run folder has one. The record is opened
last, once everything else has succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vit.config import io as config_io
from vit.config.schema import Config
from vit.data.augment.apply import create_augment
from vit.data.batches import EvalBatches, TrainBatches
from vit.data.decode.images import decoder_name
from vit.data.image_format import ImageFormat
from vit.data.shards.split import Split
from vit.data.sources import TrainSet
from vit.data.stream import StreamBatches
from vit.eval_sets import EvalSet, ModelClasses, open_sets
from vit.evaluate import Evaluator, create_evaluators
from vit.exact.leaves import Leaves, check_leaves, same_kernels
from vit.freeze import create_trained_model
from vit.layers.init import undrawn
from vit.loss import choose_class_weights, create_loss
from vit.one_reader import load_initial_weights
from vit.open_data import choose_num_classes, open_split, open_train_set
from vit.optim.ema import create_average
from vit.optim.norms import create_norms
from vit.optim.optimizer import create_optimizer
from vit.plan import Plan, make_plan, rates
from vit.ranks.alike import compare_hosts
from vit.ranks.distributed import World, wrap
from vit.ranks.exit import Interrupted, StopSignals, leave_hung, problem_of
from vit.ranks.watch import Verdict, Watch
from vit.run import checkpoint as checkpoints
from vit.run.folder import RunLock
from vit.run.preflight import DiskNeeds, Preflight, check_disk, disk_needs, preflight
from vit.run.record import Record
from vit.run.reference import Comparison, create_comparison
from vit.run.resume import check_same_settings, find_checkpoint, renew_bits, restart_best
from vit.run.sample_losses import SampleLosses
from vit.run.saver import Saver
from vit.run.start_record import start_record
from vit.run.start_times import StartTimes
from vit.run.state import RunState
from vit.run_store.opening import leave, lock_place, open_place, put_start
from vit.run_store.place import is_url
from vit.run_store.store import RunStore
from vit.step import TrainStep, checkpoint_activations, compile_where_it_works
from vit.weights.files import grid_size
from vit.weights.teacher import Teacher, load_teacher


@dataclass(frozen=True)
class RunData:
    """The data and the teacher of a run, and what follows from them."""

    plan: Plan
    train_set: TrainSet
    batches: TrainBatches | StreamBatches
    sets: list[tuple[EvalSet, ...]]
    """What to evaluate on: those of the same images together, first `data.val_split`."""
    comparison: Comparison | None
    image_format: ImageFormat
    num_classes: int
    """Outputs of the model's head."""
    class_weights: tuple[float, ...] | None
    """Of the loss."""
    checked: Preflight
    disk: DiskNeeds
    facts: dict[str, Any]
    """What must be the same after a resume."""
    teacher: Teacher | None


@dataclass
class Run:
    """A run that is ready to be trained, from its first step or from a checkpoint."""

    config: Config
    world: World
    folder: Path
    plan: Plan
    batches: TrainBatches | StreamBatches
    evaluators: list[Evaluator]
    """One for each split; the first for `data.val_split`."""
    comparison: Comparison | None
    """With `eval.reference`."""
    train_step: TrainStep
    state: RunState
    record: Record
    saver: Saver
    signals: StopSignals
    start_times: StartTimes
    store: RunStore | None
    """Of a run at a URL, on the main rank; `folder` is its working copy."""
    watch: Watch = field(init=False)
    """Ends all ranks once one keeps the others waiting; begins with the training."""

    def __post_init__(self) -> None:
        self.watch = Watch(self.world, self.config.run.hang_timeout_s, self._end_hung)

    def _end_hung(self, verdict: Verdict) -> None:
        """Record why the run ends, and end it, from the thread of the watch."""
        with suppress(ValueError):  # a full disk: it ends all the same
            self.record.write("end", self.state.step, outcome="error", reason=verdict.message)
        leave_hung(verdict)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """End writing, close the record, and give back the terminal, the folder and the signals."""
        self.watch.close()
        try:
            # A second Ctrl-C: whatever the thread waits for may never come.
            self.saver.close(at_once=isinstance(error, KeyboardInterrupt))
            if error is not None:
                reason = type(error).__name__
                if isinstance(error, Exception):
                    reason = problem_of(error)
                with suppress(ValueError):  # a full disk: the first error is the one to report
                    self.record.write("end", self.state.step, outcome="error", reason=reason)
        finally:
            for evaluator in self.evaluators:
                evaluator.close()
            leave(self.store, error)
            self.record.close()
            # A rank of several is to wait for the others: rank 0 draws the report meanwhile, and
            # whoever asks a finished run to stop must not end it by one of those who wait.
            if error is not None or self.world.size == 1:
                self.signals.restore()

    def models(self) -> dict[str, nn.Module]:
        """Return the model, and its moving average if there is one, by name: model and ema."""
        models = {"model": self.train_step.model}
        if self.train_step.ema is not None:
            models["ema"] = self.train_step.ema.module
        return models


def build(config: Config, world: World, allow_change: Iterable[str] = ()) -> Run:
    """Build the run of `config`, from its newest checkpoint if its folder has one.

    allow_change: settings that may differ from the checkpoint's. Raises ValueError for mistakes,
    and `vit.ranks.exit.Interrupted` if SIGTERM, SIGHUP or SIGINT comes, also in a wait for others.
    """
    folder, store = open_place(config, world)
    is_new = world.is_main and not folder.is_dir()
    lock = RunLock(folder)
    signals = StopSignals()
    times = StartTimes(world.joined_s)
    settings = config_io.to_dict(config)
    try:
        # 1. Lock the folder. One that does not exist yet is created and locked in part 6.
        check_same_settings(settings, world)
        world.main_first(lambda: lock_place(lock, folder, store) if world.is_main else None)

        # 2. Data and plan. The cheap checks come first: a mistake should show within a second.
        data = open_data(config, world)
        config = _with_exif(config, data.sets[0][0].split)
        times.end("data")
        found = find_checkpoint(folder, settings, data.facts, set(allow_change), world)
        times.end("checkpoint")
        checked = _with_hosts(data.checked, world)
        with world.fail_together():
            checked = _check_disk(checked, config, data, found, folder, world)

        # 3. The model. All ranks draw the same weights from the seed, or get those of a file.
        with world.fail_together(), nullcontext() if found is None else undrawn():
            torch.manual_seed(config.train.seed)
            model = create_trained_model(config, data.num_classes)
        model.to(world.device)
        if config.init.checkpoint is not None and found is None:
            data.facts["init_sha256"] = load_initial_weights(
                model, config.init, config.model, data.facts["class_names"], data.num_classes, world
            )

        # 4. The training step and the evaluators.
        its = _config_of_step(config, found, data.plan)
        known = (data.plan, data.num_classes, model, world, data.class_weights, data.teacher)
        train_step = create_train_step(its, *known, is_filled_later=found is not None)
        evaluators = create_evaluators(config, data.sets, data.image_format, train_step)
        times.end("model")

        # 5. Copy the checkpoint into the existing tensors, which DDP and the average refer to.
        state = RunState(facts={**data.facts, "grid_size": grid_size(model)})
        if found is not None:
            state = _load_checkpoint(*found, train_step, data)
            times.end("checkpoint")

        # 6. The record: main rank first, since it creates the folder.
        record = world.main_first(
            lambda: start_record(config, world, folder, lock, data, checked, state, train_step)
        )
        put_start(store, world)
        saver = _create_saver(config, folder, data, train_step, record, store)
        times.end("record")
        # From here on a signal is remembered, and the loop acts on it at the next step.
        signals.remember_only()
    except BaseException as error:
        signals.restore()
        leave(store, error)
        _mark_interrupted(error, folder, lock, is_new)
        raise
    return Run(
        config=config,
        world=world,
        folder=folder,
        plan=data.plan,
        batches=data.batches,
        evaluators=evaluators,
        comparison=data.comparison,
        train_step=train_step,
        state=state,
        record=record,
        saver=saver,
        signals=signals,
        start_times=times,
        store=store,
    )


def _with_exif(config: Config, split: Split) -> Config:
    """Return `config`, which follows EXIF orientations if the images of `split` were turned so."""
    if config.eval.apply_exif is None and split.apply_exif:
        return config_io.with_settings(config, {"eval.apply_exif": True})
    return config


def _check_disk(
    checked: Preflight,
    config: Config,
    data: RunData,
    found: tuple[Path, dict] | None,
    folder: Path,
    world: World,
) -> Preflight:
    """Return `checked` with the room for what the main rank has yet to save."""
    if not world.is_main or (found is not None and found[1]["step"] >= data.plan.total_steps):
        return checked
    setting = "run.local_dir" if is_url(config.run.dir) else "run.dir"
    return check_disk(checked, data.disk, folder, config.checkpoint.keep_last, setting)


def _mark_interrupted(error: BaseException, folder: Path, lock: RunLock, is_new: bool) -> None:
    if isinstance(error, Interrupted):
        checkpoints.mark_interrupted(folder, error.number, lock, is_new)


def open_data(config: Config, world: World) -> RunData:
    """Open the data, derive the plan, and check the host against both."""
    # The main rank opens first: it may have to make an index, which the others then read.
    val_split = open_split(config.data, config.data.val_split, world)
    train_set = open_train_set(config.data, val_split, world, config.model.num_classes)
    split = train_set.split
    with world.fail_together():
        plan, order = make_plan(config, train_set.num_draws, world.size, train_set.shares)
        num_classes = choose_num_classes(config.model, config.data, split, val_split)
        weights = choose_class_weights(config.loss, train_set, num_classes)
        comparison = create_comparison(config, plan, val_split)
    namings = {"": split.class_names} if split.class_names else {}
    sets = open_sets(config, val_split, ModelClasses(num_classes, namings), world)
    with world.fail_together():
        image_format = ImageFormat.from_config(config.model, config.data)
        train_format = ImageFormat.from_config(config.model, config.data, config.schedule)
        place = {"rank": world.rank, "world_size": world.size}
        create: Callable[..., TrainBatches | StreamBatches]
        if config.data.reader == "index":
            rows = plan.rows_of(world.rank)
            create = partial(TrainBatches, rows=rows, num_batches=plan.total_steps)
        else:
            workers = config.data.num_workers
            create = partial(
                StreamBatches, num_workers=workers, rank=world.rank, world_size=world.size
            )
        batches = create(
            split, order, config.augment, train_format, on_bad_image=config.data.on_bad_image
        )
        eval_batches = [
            EvalBatches(group[0].split, image_format, config.eval, config.eval.batch_size, **place)
            for group in sets
        ]
        disk = disk_needs(config, plan, num_classes)
        checked = preflight(
            config.data, world, plan, batches, eval_batches, saved_bytes=disk.checkpoint_bytes
        )
    # What a resumed run must find unchanged. `check_same` compares across hosts, too.
    facts = {
        "num_samples": split.num_samples,
        "index_sha256": world.check_same(split.identity, "training data"),
        "num_classes": num_classes,
        "class_names": split.class_names,
    }
    world.check_same(lambda: train_set.identity, "chosen samples")
    if train_set.identity:
        facts["chosen"] = train_set.identity
    teacher = load_teacher(config, split.class_names, num_classes, world)
    if teacher is not None:
        facts["teacher_sha256"] = teacher.sha256
    if config.train.exact_over_ranks:
        facts["micro_batch_size"] = plan.micro_batch_size
        facts["kernels"] = same_kernels(world) + (", compiled" if config.train.compile else "")
    found = (plan, train_set, batches, sets, comparison, image_format, num_classes, weights)
    return RunData(*found, checked, disk, facts, teacher)


def _with_hosts(checked: Preflight, world: World) -> Preflight:
    """Add what several hosts have alike, and what not: else that shows as a hang, or as other
    numbers."""
    lines = compare_hosts(world, {"JPEG decoder": decoder_name()})
    return replace(checked, lines=(*checked.lines, *lines))


def _config_of_step(config: Config, found: tuple[Path, dict] | None, plan: Plan) -> Config:
    """Return `config`; of a run without a further step not compiled, so that it says so at once."""
    if found is None or not checkpoints.state_of(found[1]).is_over(plan):
        return config
    return config_io.with_settings(config, {"train.compile": False})


def create_train_step(
    config: Config,
    plan: Plan,
    num_classes: int,
    model: nn.Module,
    world: World,
    class_weights: tuple[float, ...] | None = None,
    teacher: Teacher | None = None,
    is_filled_later: bool = False,
) -> TrainStep:
    """Move `model` to its device, compile and wrap it, and create all that updates it.

    is_filled_later: all of it will be replaced by a checkpoint's values on each rank.
    """
    model.to(world.device)
    # The order matters. The moving average copies the model before anything is compiled into it.
    # The optimizer takes the parameters that the wrapped model has. DDP keeps the parameters; with
    # `fully_shard`, which replaces them, the average would have to be made after `wrap`, too.
    ema = create_average(model, config.train, plan.steps_per_epoch)
    with world.fail_together():
        loss = create_loss(config.loss, class_weights, world.device)
        checkpoint_activations(model, config.train.activation_checkpointing)
        norms = create_norms(model, config.log, plan.total_steps)
        if config.train.exact_over_ranks:
            check_leaves(model)
    why_eager = ""
    if config.train.compile:
        # The average, too: it is evaluated as often as the model.
        models = [model] if ema is None else [model, ema.module]
        models += [] if teacher is None else [teacher.model]
        why_eager = compile_where_it_works(models, world)
    is_compiled = config.train.compile and not why_eager
    with world.fail_together():
        if why_eager and config.train.exact_over_ranks:
            raise ValueError(
                f"train.exact_over_ranks: torch.compile does not work here ({why_eager}), and other"
                " kernels give other bits: install what it needs, or set train.compile=false from"
                " the first step on"
            )
    leaves = None
    if config.train.exact_over_ranks:
        leaves = Leaves(model, plan.num_leaves, plan.micro_batch_size, world, config.train.seed)
    wrapped = model if leaves else wrap(model, world, sync=not is_filled_later)
    learning_rate, weight_decay = rates(config, plan)
    return TrainStep(
        model,
        wrapped,
        create_optimizer(model, config.optim),
        create_augment(
            config.augment, config.data, num_classes, world.device, compiled=is_compiled
        ),
        world,
        lr_at=learning_rate,
        weight_decay_at=weight_decay,
        micro_batch_size=plan.micro_batch_size,
        precision=config.train.precision,
        loss=loss,
        teacher=teacher,
        clip_grad_norm=config.optim.clip_grad_norm,
        ema=ema,
        norms=norms,
        seed=config.train.seed,
        why_eager=why_eager,
        leaves=leaves,
    )


def _load_checkpoint(
    folder: Path, info: dict[str, Any], train_step: TrainStep, data: RunData
) -> RunState:
    """Load the checkpoint into `train_step`; ValueError if it is beyond the end of the run."""
    state = checkpoints.state_of(info)
    with train_step.world.fail_together():
        if state.step > data.plan.total_steps:
            raise ValueError(
                f"{folder.parents[1]} has come to step {state.step}, the run is to end at"
                f" {data.plan.total_steps}: nothing is left to train"
            )
    checkpoints.load_checkpoint(folder, train_step)
    if not state.is_finished(data.plan):
        restart_best(folder.parents[1], state, train_step.world)
    renew_bits(state.facts, data.facts)
    state.restarts += 1
    return state


def _create_saver(
    config: Config,
    folder: Path,
    data: RunData,
    train_step: TrainStep,
    record: Record,
    store: RunStore | None,
) -> Saver:
    """Create what saves the run."""
    settings = config_io.to_dict(config)
    class_names = data.batches.split.class_names
    keep_last = config.checkpoint.keep_last
    samples = None
    # A stream does not know which samples it shows.
    if config.log.sample_losses and isinstance(data.batches, TrainBatches):
        every_epochs = config.log.sample_losses
        samples = SampleLosses(folder, train_step.world, data.plan, every_epochs)
    return Saver(folder, train_step, settings, class_names, keep_last, record, samples, store)
