"""Build a `Run` from a config, with everything that `vit.train.train` needs.

`build` opens and checks the data, computes the plan, creates the model, the optimizer and the
training step, and loads the newest checkpoint if the run folder contains one. metrics.jsonl is
opened last, after everything else has succeeded. `Parts` lists the hooks and functions that the
config adds to a plain run.
"""

from collections.abc import Iterable
from contextlib import nullcontext

import torch

from vit.checkpoint import checkpoint as checkpoints
from vit.checkpoint.resume import (
    check_same_settings,
    find_checkpoint,
    fit_state,
    rate_notes,
    settings_for_start,
    settings_of_step,
)
from vit.checkpoint.saver import Saver
from vit.checkpoint.state import RunState
from vit.config import io as config_io
from vit.config.schema import Config
from vit.distributed.exit import Interrupted, StopSignals
from vit.distributed.process_group import World
from vit.evaluation.evaluate import create_evaluators
from vit.feature import Parts
from vit.layers.init import undrawn
from vit.layers.parts import grid_size
from vit.loggers.record import StartTimes
from vit.run import Run
from vit.run_folder.lock import RunLock
from vit.run_folder.place import Place
from vit.start.create_step import create_train_step
from vit.start.start_record import start_record
from vit.training.freeze import create_trained_model
from vit.training.run_data import Notes, as_trained, open_data


def build(config: Config, world: World, allow_change: Iterable[str], parts: Parts) -> Run:
    """Build the run described by `config`, and load its newest checkpoint if one exists.

    Raises ValueError for mistakes in the config or the data, and
    `vit.distributed.exit.Interrupted` after SIGTERM, SIGHUP or SIGINT, even while this rank waits
    for other ranks.

    Args:
        allow_change: Settings that may differ from those in the checkpoint.
        parts: The result of `vit.compose.parts_of` for `config`.
    """
    place = parts.open_place(config, world)
    is_new = world.is_main and not place.folder.is_dir()
    lock = RunLock(place.folder)
    signals = StopSignals()

    try:
        with signals.instead_of_errors("before the first step: nothing to save"):
            # 1. Lock the run folder if it exists. A new folder is created and locked only in part
            # 6, so that no empty folder remains after a mistake in the config.
            check_same_settings(config_io.to_dict(config), world)
            world.main_first(lambda: place.lock(lock) if world.is_main else None)
            config = settings_for_start(config, place.folder, world)
            run = _build(config, world, set(allow_change), parts, place, lock, signals)
        # From now on, a signal only sets a flag that stops the training loop after the step.
        signals.remember_only()
    except BaseException as error:
        signals.restore()
        place.leave(error)
        if isinstance(error, Interrupted):
            checkpoints.mark_interrupted(place.folder, error.number, lock, world, is_new)
        raise

    return run


def _build(
    config: Config,
    world: World,
    allowed: set[str],
    parts: Parts,
    place: Place,
    lock: RunLock,
    signals: StopSignals,
) -> Run:
    """Do parts 2 to 6 of `build`, which a signal interrupts.

    If another process has meanwhile created the run folder, saved a checkpoint and ended, these
    parts are repeated, so that this process resumes from that checkpoint.
    """
    times = StartTimes(world.joined_s)
    settings = config_io.to_dict(config)

    # 2. Data and plan. Cheap checks run first, so that mistakes are reported within a second.
    data = open_data(config, world, parts.reader)
    config = as_trained(config, data)
    objective = parts.create_objective(config, data, world)

    notes = [Notes(lines=parts.lines), objective.notes]
    notes += [hook.opened(config, world, data, place) for hook in parts.hooks]
    facts = dict(data.facts)
    for part in notes:
        facts |= part.facts
    times.end("data")

    checkpoint = find_checkpoint(place.folder, settings, facts, allowed, world)
    times.end("checkpoint")

    # 3. The model. All ranks start from the same weights, which come from a seed, a file or a
    # checkpoint.
    with world.fail_together(), nullcontext() if checkpoint is None else undrawn():
        torch.manual_seed(config.train.seed)
        model = create_trained_model(config, data.num_classes)
    model.to(world.device)
    if checkpoint is None and parts.load_weights is not None:
        facts |= parts.load_weights(model, config, data, world)

    # 4. The training step and the evaluators.
    train_step = create_train_step(
        settings_of_step(config, checkpoint, data.plan),
        plan=data.plan,
        num_classes=data.num_classes,
        model=model,
        world=world,
        objective=objective,
        create_reduce=parts.create_reduce,
        is_filled_later=checkpoint is not None,
    )
    evaluators = create_evaluators(config, data.sets, data.image_format, train_step)
    times.end("model")

    # 5. DDP and the EMA refer to the existing tensors, so copy the checkpoint's values into them.
    if checkpoint is None:
        state = RunState(facts={**facts, "grid_size": grid_size(model)})
    else:
        state = checkpoints.state_of(checkpoint.info)
        fit_state(state, place.folder, facts, data.plan, world)
        notes.append(rate_notes(checkpoint.info, config, data, state))
        checkpoints.load_checkpoint(checkpoint.folder, train_step)
        times.end("checkpoint")

    # 6. The folder of a new run, which another process may have created first, and metrics.jsonl.
    has_new_checkpoint = world.broadcast_from_main(lambda: not lock.is_held and place.create(lock))
    if has_new_checkpoint:
        return _build(config, world, allowed, parts, place, lock, signals)

    record = world.main_first(
        lambda: start_record(
            config, world, place.folder, lock, data, notes, state, train_step, parts.create_loggers
        )
    )
    with world.fail_together():
        place.push()  # upload the first files if run.dir is a URL

    saver = Saver(
        place,
        train_step,
        config_io.to_dict(config),
        data.class_names,
        kept=config.checkpoint,
        record=record,
        beside=[hook.saved for hook in parts.hooks if hook.saved is not None],
    )
    times.end("record")

    return Run(
        config=config,
        world=world,
        plan=data.plan,
        batches=data.batches,
        evaluators=evaluators,
        train_step=train_step,
        state=state,
        record=record,
        saver=saver,
        hooks=parts.hooks,
        place=place,
        signals=signals,
        start_times=times,
    )
