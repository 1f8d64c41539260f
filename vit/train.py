"""Train a run until the last step or a signal, with evaluations and checkpoints.

`vit.build.build` creates the `Run`, and this module contains the loop. `step` is the number of
finished training steps. Data order, learning rate and all seeds depend only on `step`, so a resumed
run continues bit for bit as if it had never stopped. The host reads the result of a step after
queueing the next step, so the device never waits for Python.
"""

from shlex import quote

from vit.checkpoint.checkpoint import mark_interrupted
from vit.data.loader import Loader
from vit.distributed.exit import Interrupted
from vit.distributed.outcome import Outcome
from vit.monitor import Monitor, collect_garbage_at_log_lines, create_monitor
from vit.run import Run
from vit.run_folder.paths import STOPPED_FILE, mark_stopped
from vit.validate import evaluate


def train(run: Run) -> Outcome:
    """Train until the last step or a signal, and return "finished" or "stopped".

    A checkpoint is saved in both cases. Raises ValueError if training diverges or a disk is full.
    """
    with run, collect_garbage_at_log_lines():
        try:
            with run.signals.instead_of_errors(
                "in an unfinished step: run the same command to continue from the newest checkpoint"
            ):
                return _train_from_state(run)
        except Interrupted as error:
            mark_interrupted(run.folder, error.number, run.record.lock, run.world, is_new=False)
            raise
        except Exception as error:
            for hook in run.hooks:
                hook.failed(run, error)
            raise


def _train_from_state(run: Run) -> Outcome:
    """Train from the step in `run.state`."""
    state = run.state
    first_step = state.step
    with _open_loader(run) as loader:
        monitor = create_monitor(run, loader)
        for hook in run.hooks:
            hook.begin(run)
        if run.world.is_main:
            # Remove the file that marks the previous attempt as stopped. After another signal, the
            # file is written again.
            (run.folder / STOPPED_FILE).unlink(missing_ok=True)

        run.train_step.model.train()
        run.watch.start()
        while True:
            _evaluate_and_save(run, monitor, first_step)
            if state.step == run.plan.total_steps or monitor.stop:
                return _finish(run, monitor)
            monitor.resume()
            _do_step(run, monitor, loader)
            state.step += 1


def _open_loader(run: Run) -> Loader:
    """Open a loader that begins with the batch of the step in `run.state`."""
    loader = run.config.loader
    return Loader(
        run.batches,
        run.state.step,
        run.plan.total_steps,
        num_workers=loader.num_workers,
        device=run.world.device,
        stall_timeout_s=loader.stall_timeout_s,
        on_device=run.train_step.augment.change_batch,
    )


def _evaluate_and_save(run: Run, monitor: Monitor, first_step: int) -> None:
    """Evaluate and save before this step, if either is due. Set `monitor.stop` after a signal.

    first_step: the first step of this attempt.
    """
    step = run.state.step
    is_last = step == run.plan.total_steps
    # At the first step of an attempt, an evaluation is due only if a signal interrupted the
    # previous attempt's evaluation.
    evaluation_due = run.state.is_evaluation_due(run.plan)
    save_due = step % run.config.checkpoint.every_steps == 0 or is_last
    if step == first_step:
        save_due = evaluation_due  # the previous attempt has already saved this step

    # Verify before evaluating and saving, so that no checkpoint is saved after a batch that differs
    # from the planned order.
    is_epoch_end = step % run.plan.steps_per_epoch == 0 or is_last
    if is_epoch_end or save_due:
        run.verify(is_epoch_end)

    # `pause` waits until the device has finished the previous step and may set `monitor.stop`, so
    # call `pause` only when training pauses anyway.
    if evaluation_due or save_due or monitor.stop:
        monitor.pause()

    weights = set[str]()  # the names of the files in `weights/` to write
    if evaluation_due and not monitor.stop:
        weights = evaluate(run, monitor)  # sets `monitor.stop` if a signal interrupts it

    if monitor.stop:
        run.verify(is_end=True)  # verify the unfinished epoch, if any
    if save_due or monitor.stop or weights:
        _save(run, monitor, save_due or monitor.stop, weights)


def _do_step(run: Run, monitor: Monitor, loader: Loader) -> None:
    """Queue a step, and read the result of the previous step."""
    step = run.state.step
    run.watch.mark(step, "waiting for its data")
    batch = next(loader)
    run.watch.mark(step, "in the step")

    if not monitor.is_started:
        # Gradient sums depend on DDP's bucket layout, which must be the same in all attempts, so
        # every process prepares its step, even on resume. The time counts as startup, not as
        # training.
        with run.watch.away(step, "compiling"):
            run.train_step.prepare(batch)
        run.start_times.end("workers and first batch")
        run.start_times.report(run.record, step)
        monitor.start_clock()

    # vit/step.py runs the forward pass, the backward pass and the update. The ranks sum their stop
    # flags in each step, so all ranks stop at the same step.
    stop = bool(run.signals.received) or run.saver.has_failed
    result = run.train_step(batch, step, stop, monitor.rank_report(step), run.loss_limit(step))
    monitor.queue(step, result, batch.bad_keys)  # reads the previous step

    for hook in run.hooks:
        hook.queued(batch)
    run.saver.report()


def _save(run: Run, monitor: Monitor, with_checkpoint: bool, weights: set[str]) -> None:
    """Copy the state. A thread then writes a checkpoint and `weights/<name>.safetensors`.

    Weights are also in the checkpoint. Separate weights files are written only after an evaluation
    and when the run stops or finishes, because users need them only then.
    """
    state = run.state
    run.record.progress(state.step, f"step {state.step}: saving")
    state.elapsed_s = monitor.elapsed_s()
    if monitor.stop or state.step == run.plan.total_steps:
        weights = weights | {"last"}
    with run.watch.away(state.step, "saving"):
        run.saver.save(state, with_checkpoint, tuple(sorted(weights)))


def _finish(run: Run, monitor: Monitor) -> Outcome:
    """Wait for the last save, and report the outcome in the run folder and the log."""
    state = run.state
    with run.watch.away(state.step, "waiting for its save"):
        run.saver.finish()
    run.watch.close()  # only rank 0 still works, so the other ranks send no more marks

    outcome: Outcome = "finished" if state.is_finished(run.plan) or not monitor.stop else "stopped"
    run.signals.end_announcements()
    if not run.world.is_main:
        return outcome

    if outcome == "stopped":
        mark_stopped(run.folder, state.step, run.signals.received or "of another rank")
        run.record.log(
            f"stopped at step {state.step} of {run.plan.total_steps}, saved; run the same command"
            " to continue"
        )
    elif state.evaluated_step < 0:
        run.record.log(
            f"not evaluated: the run has only {state.step} steps, but evaluates every"
            f" {run.plan.eval_every_steps} steps (eval.every_steps, eval.every_epochs): run python"
            f" launch/eval.py {quote(str(run.folder))} to evaluate its weights"
        )

    run.record.write("end", state.step, outcome=outcome, elapsed_s=round(monitor.elapsed_s(), 1))
    for hook in run.hooks:
        hook.ended(run, outcome)
    run.place.push()
    if address := run.place.address():
        run.record.log(f"run folder: {address}, uploaded up to step {state.step}")
    return outcome
