"""Open metrics.jsonl, and record all facts that are known before the first step.

The `start` line contains the attempt's config, plan, data and host. The report and
`vit.extras.report.replay` read this line. Settings are written to `config.yaml`, and the plan is
logged. Then the loggers are started.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vit.checkpoint.state import RunState
from vit.config import io as config_io
from vit.config.schema import Config
from vit.data.eval_sets import EvalSet
from vit.data.order import rows_sha256
from vit.data.overlap import count_equal
from vit.data.sources import TrainSet, content_sha256
from vit.distributed.process_group import World, kernels_of
from vit.loggers.logger import CreateLogger
from vit.loggers.record import Record, provenance
from vit.run_folder.lock import RunLock, mount_note
from vit.run_folder.paths import CONFIG_FILE
from vit.start.attention import attention_kernel
from vit.start.shuffle_quality import ShuffleQuality, measure_shuffle
from vit.start.start_lines import start_lines
from vit.step import TrainStep
from vit.system.files import replacing
from vit.training.loss import describe_class_weights
from vit.training.mfu import find_peak
from vit.training.run_data import Notes, RunData


def start_record(
    config: Config,
    world: World,
    folder: Path,
    lock: RunLock,
    data: RunData,
    notes: Sequence[Notes],
    state: RunState,
    train_step: TrainStep,
    create_loggers: Sequence[CreateLogger],
) -> Record:
    """Open metrics.jsonl. On rank 0, write everything that is known before the first step.

    notes: the notes of the objective and the hooks. Raises ValueError if the folder is not
    writable.
    """
    if not world.is_main:
        return Record(folder, config.log, False, total_steps=data.plan.total_steps)

    made_by = provenance()
    header = "".join(f"# {key}: {value}\n" for key, value in made_by.items())
    settings = header + config_io.dump_yaml(config_io.to_dict(config))
    try:
        record = Record(
            folder,
            config.log,
            True,
            total_steps=data.plan.total_steps,
            first_step=state.step,
            lock=lock,
        )
        with replacing(folder / CONFIG_FILE) as file:
            file.write(settings.encode())
    except OSError as error:
        raise ValueError(
            f"run.dir={folder}: cannot be written ({error.strerror}): choose another folder, or"
            " free some space"
        ) from None

    batches = data.batches
    shuffle = (
        measure_shuffle(batches.order, batches.split.index["label"]) if batches.exact else None
    )
    _write_start(record, config, world, data, notes, state, train_step, shuffle, made_by)

    lines = [f"chosen: {line}" for line in data.train_set.summary]
    lines += describe_class_weights(data.class_weights, data.train_set.split.class_names)
    for part in notes:
        lines += part.lines
    mounted = mount_note(folder)
    if mounted:
        lines.append(f"note: {mounted}")
    lines += filter(None, (_note_of_trained(sets[0], data.train_set) for sets in data.sets))
    lines += start_lines(
        config, data.plan, train_step=train_step, batches=data.batches, shuffle=shuffle, state=state
    )
    for line in lines:
        record.log(line)

    if not state.is_finished(data.plan):  # a finished run has nothing more to log
        record.start_loggers(create_loggers)
    return record


def _write_start(
    record: Record,
    config: Config,
    world: World,
    data: RunData,
    notes: Sequence[Notes],
    state: RunState,
    train_step: TrainStep,
    shuffle: ShuffleQuality | None,
    made_by: dict[str, str],
) -> None:
    """Write the `start` line of metrics.jsonl."""
    details: dict[str, object] = {}
    for part in notes:
        details |= part.record
    if data.batches.exact:
        # `vit.extras.report.replay` compares the hash to make sure that it shows the same batches.
        details["content_sha256"] = content_sha256(data.batches.split)
        details["first_batch_sha256"] = rows_sha256(data.batches.order, state.step)

    peak = find_peak(world.device, config.train.precision)
    record.write(
        "start",
        state.step,
        restarts=state.restarts,
        world_size=world.size,
        device=str(world.device),
        compiled=config.train.compile and not (train_step.why_eager or state.is_over(data.plan)),
        **made_by,
        kernels=kernels_of(world.device),
        attention=attention_kernel(train_step.model, config.train, world.device),
        exact=data.batches.exact,
        plan=asdict(data.plan),
        shuffle=None if shuffle is None else asdict(shuffle),
        chosen=data.train_set.identity or None,
        class_weights=data.class_weights,
        **{key: state.facts[key] for key in ("init_source",) if key in state.facts},
        **details,
        **({} if peak is None else asdict(peak)),
    )


def _note_of_trained(evaluated: EvalSet, train_set: TrainSet) -> str:
    """Return a note if the training set contains copies of images in an evaluation set, else ""."""
    split = evaluated.split
    count = count_equal(train_set, split)
    if not count:
        return ""

    return (
        f"note: {evaluated.name} ({split.root} {split.name!r}): {count:,} of its"
        f" {split.num_samples:,} images are byte-equal to training images"
    )
