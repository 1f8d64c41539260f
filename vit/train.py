"""Train a run to its end: step, evaluate, save, until it is done or asked to stop.

`vit.build.build` makes the `Run`; here is the loop. There is one clock: `step` is the number of
global batches attempted, and order, learning rate and all seeds are functions of it. So a run that
resumes from a checkpoint continues bit for bit as if it had never stopped. What a step did is read
while the next one is already queued: the device never waits for Python.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from shlex import quote
from typing import Any

from vit.build import Run
from vit.config.eval_section import VAL
from vit.data.batches import TrainBatches
from vit.data.loader import Loader
from vit.estimate.fitting import naming_what_fits
from vit.evaluate import Evaluation, save_predictions
from vit.mfu import Utilization, find_peak, train_flops_per_image
from vit.ranks.outcome import Outcome
from vit.recipes.difference import deviations
from vit.report.page import make_report
from vit.report.pictures import ClassAccuracy, ConfusedPair
from vit.run import checkpoint as checkpoints
from vit.run.folder import CHECKPOINTS, STOPPED_FILE, mark_stopped
from vit.run.guard import Guard, Rewind
from vit.run.monitor import Monitor, collect_garbage_at_log_lines
from vit.run.order_check import OrderCheck
from vit.run.resume import restart_best
from vit.run.state import RunState
from vit.system.meter import Meter

CHECK_STOP_EVERY_BATCHES = 8
"""An evaluation checks every this many batches whether a rank was asked to stop; each check is a
collective."""


def train(run: Run) -> Outcome:
    """Train to the end or to a signal; return "finished" or "stopped".

    Saves on every exit it controls. Raises ValueError if training diverges or a disk is full.
    """
    num_classes = run.state.facts["num_classes"]
    with (
        run,
        naming_what_fits(run.config, run.plan, num_classes, run.world.device),
        collect_garbage_at_log_lines(),
    ):
        _tell_reference(run)
        is_started = False
        while True:
            try:
                return _train_on(run, is_started)
            except Rewind as event:
                go_back(run, event)
                is_started = True


def _train_on(run: Run, is_started: bool) -> Outcome:
    """Train from where `run.state` stands; raises `Rewind` where the guard asks for it.

    is_started: whether this process has trained already.
    """
    config = run.config
    plan = run.plan
    state = run.state
    first_step = state.step
    with _open_loader(run) as loader:
        guard = Guard(config, state, run.world, run.record, run.batches)
        monitor = _create_monitor(run, loader, guard)
        order = run.batches.order if isinstance(run.batches, TrainBatches) else None
        order_check = OrderCheck(run.world, order, plan, run.record, state)
        if run.world.is_main:
            # a signal in this attempt writes it again
            (run.folder / STOPPED_FILE).unlink(missing_ok=True)
        run.train_step.model.train()
        run.watch.start()

        while True:
            step = state.step
            is_epoch_end = step % plan.steps_per_epoch == 0 or step == plan.total_steps
            # At the first step of an attempt it is due only if a signal interrupted it in the
            # previous attempt.
            evaluation_due = state.is_evaluation_due(plan)
            save_due = step % config.checkpoint.every_steps == 0 or step == plan.total_steps
            if step == first_step:
                # Nothing else is new since the checkpoint; the guard may rewind to step 0.
                save_due = evaluation_due or (config.guard.rewinds() and step == 0)

            # Nothing should be evaluated or saved after batches that differ from the planned order.
            if is_epoch_end:
                order_check.write()
            # Reading the previous step waits for the device to finish it, and may set
            # `monitor.stop`. So it is done only where training pauses anyway.
            if evaluation_due or save_due or monitor.stop:
                monitor.pause()
            weights = set[str]()  # what `weights/` is to get of this step
            if evaluation_due and not monitor.stop:
                weights = evaluate(run, monitor)  # sets `monitor.stop` if a signal interrupts it
            if monitor.stop:
                order_check.write()  # the epoch so far; does nothing at an epoch's end
            if save_due:
                order_check.compare()
            if save_due or monitor.stop or weights:
                save(run, monitor, save_due or monitor.stop, weights)
            if step == plan.total_steps or monitor.stop:
                break
            monitor.resume()
            if state.is_passed_over(step):
                monitor.pass_over(step)
                state.step += 1
                continue

            run.watch.mark(step, "waiting for its data")
            batch = next(loader)
            run.watch.mark(step, "in the step")
            if not is_started:
                is_started = True
                # DDP fixes its bucket layout here, in every attempt: a resumed run needs the layout
                # that the first attempt had. Waiting for the first batch counts as start-up, not as
                # training.
                with run.watch.away(step, "compiling"):
                    run.train_step.fix_bucket_layout(batch)
                run.start_times.end("workers and first batch")
                run.start_times.tell(run.record, step)
            if not monitor.is_started:
                monitor.start_clock()
            # Forward, backward, update: vit/step.py. The stop flag travels with the sums that the
            # ranks exchange anyway, so all ranks stop at the same step.
            stop = bool(run.signals.received) or run.saver.has_failed
            result = run.train_step(
                batch, step, stop, monitor.rank_report(step), guard.limits(step)
            )
            monitor.queue(step, result, batch.bad_keys)  # reads the step before this one
            order_check.add(batch)
            run.saver.report()
            state.step += 1
        return finish(run, monitor)


def _open_loader(run: Run) -> Loader:
    """Open what gives the batches from `run.state` on."""
    data = run.config.data
    return Loader(
        run.batches,
        run.state.step,
        run.plan.total_steps,
        num_workers=data.num_workers,
        prefetch_gib=data.prefetch_gib,
        device=run.world.device,
        stall_timeout_s=data.stall_timeout_s,
        on_device=run.train_step.augment.change_batch,
        passed_over=run.state.passed_over,
    )


def _create_monitor(run: Run, loader: Loader, guard: Guard) -> Monitor:
    """Create what reads, counts and logs the steps; the main rank also knows the device's peak."""
    step = run.train_step
    utilization = None
    if run.world.is_main:
        flops = partial(train_flops_per_image, step.model, step.micro_batch_size)
        of_stages = [
            (until * run.plan.steps_per_epoch, flops(size))
            for until, size in run.batches.image_format.stages
        ]
        peak = find_peak(run.world.device, step.precision)
        utilization = Utilization(flops(), peak, tuple(of_stages))
    return Monitor(
        guard,
        run.plan,
        run.world,
        run.state,
        run.record,
        loader,
        step.lr_at,
        run.batches.image_format,
        utilization,
        run.saver.samples,
        step.weight_decay_at,
    )


def _tell_reference(run: Run) -> None:
    """Record and print which published curve the run is compared with, and which settings differ
    from its recipe. A run that is finished prints nothing."""
    comparison = run.comparison
    if comparison is None or not run.world.is_main or run.state.is_finished(run.plan):
        return
    header = comparison.reference.header
    unlike: list[str] = []
    if not comparison.refusal:
        unlike = deviations(run.config, header.recipe, header.settings)
        num_images = run.plan.steps_per_epoch * run.plan.global_batch_size
        num_images += run.plan.dropped_per_epoch
        if header.train_images not in (None, num_images):
            unlike.append(f"images to train on {header.train_images:,} -> {num_images:,}")
    run.record.write(
        "reference",
        run.state.step,
        name=comparison.reference.name,
        title=header.title,
        source=header.source,
        note=header.note,
        weights=header.weights,
        refused=comparison.refusal,
        length=comparison.length_note,
        recipe=header.recipe,
        unlike=unlike,
        curves=comparison.curves(),
    )
    if comparison.refusal:  # a trial, or own data: only the record and the report have the reason
        return
    say = run.record.say
    what = "the averaged weights" if header.weights == "ema" else "the weights"
    say(f"reference: {header.title}: top-1 of {what} ({header.source})")
    if comparison.length_note:
        say(f"reference: {comparison.length_note}")
    if unlike:
        say(
            f"reference: other than its recipe: {'; '.join(unlike)} (python"
            f" launch/recipe.py diff {header.recipe} {quote(str(run.folder))} says what they do)"
        )


# --- go back, evaluate, save, finish --------------------------------------------------------------


def go_back(run: Run, event: Rewind) -> None:
    """Bring `run` to its newest checkpoint, to pass over the batches around those of `event`."""
    run.watch.close()  # what follows waits through the store, and begins anew after it
    run.saver.finish()
    if run.saver.samples is not None:
        run.saver.samples.drop()
    skip_steps = run.config.guard.rewind_skip_steps

    def note() -> tuple[str, dict[str, Any]]:
        found = checkpoints.newest_checkpoint(run.folder, verify=True)
        assert found is not None, "a run that may go back saves its start"
        folder, info = found
        state = event.state_from(checkpoints.state_of(info), run.state, skip_steps)
        # Before anything is done again: a kill from here on changes nothing.
        checkpoints.update_info(folder, asdict(state))
        if run.store is not None:
            run.store.push()
        return folder.name, asdict(state)

    name, values = run.world.broadcast_from_main(note)
    run.state = RunState(**values)
    checkpoints.load_checkpoint(run.folder / CHECKPOINTS / name, run.train_step)
    restart_best(run.folder, run.state, run.world)
    first, stop = run.state.passed_over[-1]
    stop = min(stop, run.plan.total_steps)
    run.record.go_back(
        run.state.step,
        f"back at step {run.state.step} after {event} (rewind {run.state.rewinds} of"
        f" {run.config.guard.max_rewinds}): steps {first + 1} to {stop} will be passed over"
        f"{', the rest of the run' if stop == run.plan.total_steps else ''}",
        at_step=event.step + 1,
        first_passed_over=first + 1,
        last_passed_over=stop,
        rewinds=run.state.rewinds,
        **event.found,
    )


class _Interrupted(Exception):
    """A signal interrupted an evaluation, on all ranks at the same batch."""


def evaluate(run: Run, monitor: Monitor) -> set[str]:
    """Evaluate the model and its moving average (EMA), and record the results.

    Returns the names under which the weights are to be saved: last, and best if they are that. If a
    signal interrupts it, `monitor.stop` is set and nothing is recorded: the resumed run evaluates
    again.
    """
    state = run.state
    record = run.record
    run.watch.mark(state.step, "evaluating")
    try:
        results = _evaluate_all(run)
    except _Interrupted:
        monitor.stop = True
        return set()

    num_images = sum(evaluator.split.num_samples for evaluator in run.evaluators)
    times = [evaluator.took for evaluator in run.evaluators if evaluator.took is not None]
    seconds = sum(took.seconds for took in times)
    values: dict[str, Any] = {}
    for set_name, by_model in results.items():
        prefix = "" if set_name == VAL else f"{set_name}/"
        for name, result in by_model.items():
            suffix = "" if name == "model" else f"_{name}"
            found = result.accuracy.to_dict()
            values |= {prefix + key + suffix: value for key, value in found.items()}
    beside = ""
    if run.comparison is not None:
        beside = run.comparison.line(state.step, values)
        values |= run.comparison.values(state.step, values)
    record.write(
        "eval",
        state.step,
        **values,
        images_per_s=num_images / seconds,
        seconds=seconds,
        data_wait_s=sum(took.data_wait_s for took in times),
    )
    for scored in [scored for evaluator in run.evaluators for scored in evaluator.sets]:
        parts = [
            f"{'' if name == 'model' else name + ' '}{result.accuracy}"
            for name, result in results[scored.name].items()
        ]
        which = "" if scored.name == VAL else f"{scored.name}: "
        record.say(f"step {state.step}: {which}{'; '.join(parts)} on {scored.where()}")
        if beside and scored.name == VAL:
            record.say(beside)
    state.evaluated_step = state.step
    best_by = run.config.eval.best_by
    choosing = [result.accuracy for result in results[best_by].values()]
    is_best = state.take_best(best_by, *((each.top1, each.loss) for each in choosing))
    with run.world.fail_together():
        if run.world.is_main:
            # The averaged weights, if there are any, are the ones meant to be used.
            preferred = results[VAL].get("ema", results[VAL]["model"])
            split = run.evaluators[0].split
            save_predictions(run.folder, preferred, split, state.step)
    return {"last", "best"} if is_best else {"last"}


def _evaluate_all(run: Run) -> dict[str, dict[str, Evaluation]]:
    """Evaluate all models on all sets: set -> model -> result. Raises `_Interrupted`."""
    record = run.record
    live_line = partial(record.progress, run.state.step) if record.is_live else None
    results: dict[str, dict[str, Evaluation]] = {}
    for number, evaluator in enumerate(run.evaluators):
        num_images = evaluator.split.num_samples
        names = f" {', '.join(each.name for each in evaluator.sets)}" if number else ""
        meter = Meter(
            f"evaluating{names}", num_images, "images", shown=run.world.is_main, into=live_line
        )

        def on_batch(
            done: int, total: int, meter: Meter = meter, num_images: int = num_images
        ) -> None:
            meter.update(num_images * done // total)
            run.watch.mark(run.state.step, "evaluating")
            due = done % CHECK_STOP_EVERY_BATCHES == 0
            if due and run.world.any_rank(bool(run.signals.received)):
                raise _Interrupted

        try:
            results |= evaluator.evaluate(run.models(), on_batch)
        finally:
            # The workers of the first stay, at rest; those of all sets would fill the host.
            if number:
                evaluator.close()
    return results


def save(run: Run, monitor: Monitor, with_checkpoint: bool, weights: set[str]) -> None:
    """Copy the state, which a thread then writes: a checkpoint, and `weights/<name>.safetensors`.

    The files of weights repeat the state, so they are written where one looks for them: after an
    evaluation, at a stop and at the end.
    """
    state = run.state
    run.record.progress(state.step, f"step {state.step}: saving")
    state.elapsed_s = monitor.elapsed_s()
    if monitor.stop or state.step == run.plan.total_steps:
        weights = weights | {"last"}
    with run.watch.away(state.step, "saving"):
        run.saver.save(state, with_checkpoint, tuple(sorted(weights)))


def finish(run: Run, monitor: Monitor) -> Outcome:
    """Wait for the last save; report how the run ended, in its folder, the record and to people."""
    state = run.state
    with run.watch.away(state.step, "waiting for its save"):
        run.saver.finish()
    run.watch.close()  # the main rank draws the report alone
    outcome: Outcome = "finished" if state.is_finished(run.plan) or not monitor.stop else "stopped"
    if not run.world.is_main:
        return outcome
    if outcome == "stopped":
        mark_stopped(run.folder, state.step, run.signals.received or "of another rank")
        run.record.say(
            f"stopped at step {state.step} of {run.plan.total_steps}, saved; the same command"
            " continues from here"
        )
    elif state.evaluated_step < 0:
        run.record.say(
            f"not evaluated: the run has {state.step} steps, and an evaluation is due"
            f" every {run.plan.eval_every_steps} steps (eval.every_steps, eval.every_epochs);"
            f" python launch/eval.py {quote(str(run.folder))} evaluates its weights"
        )
    run.record.write("end", state.step, outcome=outcome, elapsed_s=round(monitor.elapsed_s(), 1))
    if outcome == "finished" and run.config.log.report:
        _report(run)
    if run.store is not None:
        run.store.push()
        run.record.say(f"run folder: {run.store}, complete there up to step {state.step}")
    return outcome


def _report(run: Run) -> None:
    """Make pictures and page of a finished run, also for W&B.

    A stopped run may have seconds to live: `launch/report.py` makes its page.
    """
    run.signals.release_interrupt()
    try:
        report = make_report(run.folder, run.world.device, in_use=False)
    except (Exception, KeyboardInterrupt) as error:  # a view must not decide how the run ended
        run.record.say(
            f"no report ({type(error).__name__}: {error}); python launch/report.py"
            f" {quote(str(run.folder))} tries again"
        )
        return
    pictures = report.pictures
    pairs = [list(pair) for pair in pictures.confused_pairs]
    classes = [list(row) for row in pictures.class_accuracies]
    run.record.log_pictures(pictures.paths)
    run.record.log_table("most_confused", list(ConfusedPair._fields), pairs)
    run.record.log_table("classes", list(ClassAccuracy._fields), classes)
    run.record.say(f"report: {report.page}")
