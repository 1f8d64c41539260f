"""Compare a repeated stretch with the record, or two runs with each other, and name differences.

a loss differs, the tensors at the end agree   the record was changed
both differ                                    the run was computed differently, at the first
                                               loss that differs or in the step before
only the tensors differ                        a tensor was changed after the last loss used it
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from vit.checkpoint.checkpoint import STATE_FILE
from vit.checkpoint.resume import may_change
from vit.config import io as config_io
from vit.extras.audit.history import History, Stretch
from vit.run_folder import CONFIG_FILE, CheckpointError, check_files
from vit.system.spelling import few
from vit.weights.save import bytes_of

COMPARED = {
    "train": (*("loss", "grad_norm", "lr", "weight_decay"), *("updates_skipped", "bad_images")),
    "epoch": ("sample_checksum",),
    "eval": ("top1", "top5", "loss"),
}
"""Maps kinds of lines to the keys that must be equal, also with a set's name or `_ema` added."""
CAUSES = {
    "content_sha256": "the training images or labels have changed since the run",
    "compiled": "torch.compile works only in one of run and audit",
}
"""Maps keys of `start` lines to the explanation if they differ."""


class Difference(NamedTuple):
    """A difference, and the step at which it appears."""

    step: int
    text: str


def damages(history: History) -> Iterator[Difference]:
    """Yield contradictions between the files of kept checkpoints, `checkpoint.json` and record."""
    yield from (Difference(*each) for each in history.damaged.items())
    for step, folder in history.kept.items():
        stored = history.tensors_sha256(step)
        try:
            check_files(folder, history.infos[step])
        except CheckpointError as error:
            yield Difference(step, str(error))
        else:
            if (recorded := history.hashes.get(step, stored)) != stored:
                text = f"{folder.name} has the sha256 {stored[:12]}, but the record {recorded[:12]}"
                yield Difference(step, text)


def judge(history: History, stretch: Stretch, repeated: History) -> list[Difference]:
    """Return the differences of a stretch, in the order of their steps; [] if it is equal.

    Changed data and settings come first, because they explain the others.
    """
    differences = list(_record_differences(history, stretch, repeated))
    kept = history.kept.get(stretch.end)
    hashes = [history.hashes.get(stretch.end)]
    tensors = []
    if kept is not None:
        hashes.append(history.tensors_sha256(stretch.end))
        tensors = different_tensors(kept, repeated.kept[stretch.end])
    is_equal = repeated.tensors_sha256(stretch.end) in hashes and not tensors
    if is_equal and (differences or len({*hashes, None}) > 2):
        differences.append(Difference(stretch.end, "the state agrees, so the record was changed"))
    elif not is_equal:
        detail = in_words(tensors) if kept else "not kept, so its tensors cannot be compared"
        differences.append(Difference(stretch.end, f"the state of the run differs: {detail}"))
    first = differences[0].step if differences else stretch.end
    causes = list(_changed_data(history, stretch, repeated))
    if differences:
        causes += _changed_settings(history, stretch, repeated)
    return [*(Difference(first, text) for text in causes), *differences]


def _record_differences(
    history: History, stretch: Stretch, repeated: History
) -> Iterator[Difference]:
    losses = history.losses()
    last = max(losses, default=0)
    recorded = _values(history.lines, {**dict.fromkeys(range(last), "missing"), **losses})
    for key, value in sorted(_values(repeated.lines, repeated.losses()).items()):
        if stretch.start < key[0] <= stretch.end and recorded.get(key, value) != value:
            yield Difference(key[0], f"{key[1]} {recorded[key]} in the record, {value} repeated")


def _values(lines: list[dict[str, Any]], losses: dict[int, Any]) -> dict[tuple[int, str], Any]:
    """Return the values to compare, by step and name."""
    values = {(step, "loss"): loss for step, loss in losses.items()}
    for line in lines:
        for key in line:
            if key.rpartition("/")[2].removesuffix("_ema") in COMPARED.get(line["kind"], ()):
                values[line["step"], f"{line['kind']} line: {key}"] = line[key]
    return values


def _changed_data(history: History, stretch: Stretch, repeated: History) -> Iterator[str]:
    """Yield what has changed since the run, according to the `start` lines."""
    recorded = history.attempts(stretch)[0]
    repeated_values = repeated.starts[0]
    for key, text in CAUSES.items():
        if recorded.get(key, repeated_values.get(key)) != repeated_values.get(key):
            yield text


def _changed_settings(history: History, stretch: Stretch, repeated: History) -> Iterator[str]:
    """Yield settings that differ from those in a checkpoint of the stretch."""
    near = next((step for step in history.kept if step in (stretch.start, stretch.end)), None)
    if near is not None:
        configs = [history.infos[near]["config"], repeated.infos[stretch.end]["config"]]
        for key, (old, new) in config_io.differences(*configs).items():
            if not may_change(key):
                yield f"{key} was {old} at step {near}, but is {new} in {CONFIG_FILE}"


def different_tensors(first: Path, second: Path) -> list[str]:
    """Return the tensors that differ between two checkpoint folders, with the first difference.

    Returns [] for a file that cannot be read, which `damages` reports.
    """
    texts = []
    with suppress(SafetensorError, OSError):
        files = [safe_open(folder / STATE_FILE, framework="pt") for folder in (first, second)]
        for name in sorted({*files[0].keys()} & {*files[1].keys()}):
            old, new = (file.get_tensor(name).flatten() for file in files)
            common = min(len(old), len(new))
            places = (bytes_of(old[:common]) != bytes_of(new[:common])).nonzero()
            if len(places):
                at = int(places[0]) // old.element_size()
                texts.append(f"{name}, first at {at} ({old[at]:.9g} and {new[at]:.9g})")
    return texts


def in_words(tensors: list[str]) -> str:
    """Return text with the first of `different_tensors` and their number."""
    return f"{len(tensors)} tensor(s) differ: {few(tensors, limit=2)}"


# --- two runs -------------------------------------------------------------------------------------


def compare_runs(one: History, two: History, log_line: Callable[[str], None]) -> list[Difference]:
    """Return the first differences of two runs that should be equal.

    log_line: called with notes. Raises ValueError if the runs have no step in common.
    """
    losses = [history.losses() for history in (one, two)]
    steps = sorted(losses[0].keys() & losses[1].keys())
    saved = sorted(one.hashes.keys() & two.hashes.keys())
    if not steps and not saved:
        raise ValueError(f"{one.run_dir}, {two.run_dir}: no step is in both records")
    paths = [str(history.run_dir / CONFIG_FILE) for history in (one, two)]
    configs = [config_io.to_dict(config_io.load_config(path, used_here=False)) for path in paths]
    for key, (first, second) in config_io.differences(*configs).items():
        log_line(f"setting {key}: {first} and {second}")
    log_line(f"compared the losses of {len(steps):,} steps and {len(saved)} checkpoints")
    differences = [
        Difference(step, f"the first loss that differs: {losses[0][step]} and {losses[1][step]}")
        for step in steps
        if losses[0][step] != losses[1][step]
    ][:1]
    # Runs that differ never become equal again, so bisect.
    place = bisect_left(saved, True, key=lambda step: one.hashes[step] != two.hashes[step])
    extent = f"equal up to step {saved[place - 1]}" if place else "no equal checkpoint"
    if place < len(saved):
        text = f"the first checkpoint that differs ({extent})"
        both = [step for step in saved[place:] if step in one.kept and step in two.kept][:1]
        for step in both:
            tensors = different_tensors(one.kept[step], two.kept[step])
            text += f"; at step {step}, {in_words(tensors)}"
        differences.append(Difference(saved[place], text))
    elif differences and saved and differences[0].step <= saved[-1]:
        differences.append(
            Difference(saved[-1], f"checkpoints {extent}: one of the records was changed")
        )
    return differences
