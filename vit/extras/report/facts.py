"""Collect the numbers and sentences of the report from metrics.jsonl, the config and the run
folder.

Missing values are None, which the template shows as a dash.
"""

import json
import re
from collections import defaultdict
from contextlib import suppress
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from pydantic.fields import FieldInfo

from vit.checkpoint.state import rank
from vit.config import io as config_io
from vit.config.base import VAL
from vit.config.schema import Config
from vit.data.image_format import ImageFormat
from vit.extras.report.history import Attempt, History, median, set_names
from vit.extras.report.source import ReportSource
from vit.model import create_model
from vit.run_folder.paths import CHECKPOINTS, STOPPED_FILE
from vit.system.meter import duration
from vit.system.redact import shown
from vit.training.model_summary import count_parameters, flops_per_image

RESULT_NAMES = ("num_images", "top1", "top5", "correct_top1", "loss", "ece")
"""The result fields of an evaluation. For averaged weights, the names have the suffix `_ema`."""
_LONG_FRACTION = re.compile(r"(?P<shown>\.\d{5})\d{6,}")
"""Matches the decimals of a default such as 1/3, of which the first five are shown."""


def run_state(
    history: History, plan: dict[str, Any], run_dir: Path, now_s: float
) -> dict[str, Any]:
    """Return the state of the run: a word, a sentence and the progress."""
    step = max((line["step"] for line in history.lines), default=0)
    total = plan.get("total_steps")
    progress = f"step {step:,} of {total:,}" if total else f"step {step:,}"

    times = [line["time"] for line in history.lines if line.get("time") is not None]
    age = duration(max(now_s - max(times), 0)) if times else "an unknown time"

    last = history.attempts[-1] if history.attempts else Attempt(0, {}, [], "not started")
    outcome = last.outcome
    return {
        "word": "running?" if outcome == "unclear" else outcome,
        "tone": {"finished": "good", "failed": "bad", "killed": "bad"}.get(outcome, "busy"),
        "sentence": _outcome_sentence(last, progress, age, run_dir),
        "step": step,
        "total_steps": total,
        "began_s": min(times, default=None),
        "ended_s": max(times, default=None),
        "share": min(step / total, 1.0) if total else None,
    }


def _outcome_sentence(attempt: Attempt, progress: str, age: str, run_dir: Path) -> str:
    """Describe how far an attempt came and how it ended. age: the age of the newest line."""
    resume = "the same command resumes from its newest checkpoint"
    newest = f"the last line of metrics.jsonl is {age} old"
    sentences = {
        "finished": f"Finished at {progress}.",
        "stopped": f"Stopped{_stopped_by(run_dir)} at {progress} and saved; {resume}.",
        "failed": f"Failed at {progress}: {attempt.reason}",
        "running": f"Running, at {progress}; {newest}.",
        "killed": f"Killed after {progress}; {resume}.",
        "unclear": f"Running or killed, at {progress}; {newest}.",
        "not started": "metrics.jsonl is still empty.",
    }
    return sentences.get(attempt.outcome, f"{attempt.outcome} at {progress}.")


def _stopped_by(run_dir: Path) -> str:
    """Return ` by SIGTERM`, for example, or "" if the folder does not show what stopped the run."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return f" by {json.loads((run_dir / STOPPED_FILE).read_bytes())['signal'] or 'request'}"
    return ""


def config_facts(
    source: ReportSource, config: Config, plan: dict[str, Any]
) -> list[tuple[str, str]]:
    """Return facts about the config, each with a name and a short text."""
    form = ImageFormat.from_config(config.model, config.data, config.schedule)
    height, width = form.size
    rows = [("model", f"{config.model.name} at {height} × {width} pixels")]
    if form.stages:
        rows.append(("images", f"{form.sizes_text()} pixels in training"))

    # If the model cannot be created, the report shows the reason in place of the pictures.
    with suppress(Exception):
        num_classes = config.model.num_classes or len(source.class_names) or 1000
        with torch.device("meta"):
            model = create_model(config.model, num_classes=num_classes)
        size = f"{count_parameters(model) / 1e6:.3g} M parameters"
        rows.append(("size", f"{size}, {flops_per_image(model) / 1e9:.3g} GFLOP per image"))

    batch_size = config.data.global_batch_size
    data = shown(config.data.root)
    length = f"batches of {batch_size:,} images"
    if {"steps_per_epoch", "total_steps"} <= plan.keys():
        steps_per_epoch = plan["steps_per_epoch"]
        num_images = steps_per_epoch * batch_size + plan.get("dropped_per_epoch", 0)
        data += f", {num_images:,} training images"
        length = (
            f"{plan['total_steps']:,} steps of {batch_size:,} images,"
            f" {plan['total_steps'] / steps_per_epoch:.4g} epochs"
        )

    optimizer = f"{config.optim.name}, peak learning rate {config.optim.lr:g}"
    rows += [("data", data), ("recipe", f"{length}; {optimizer}")]
    if config.distill.teacher is not None:
        targets = f"{config.distill.distill_type} targets"
        rows.append(("teacher", f"{shown(config.distill.teacher)}; {targets}"))
    return rows


def twin_facts(history: History, run_dir: Path, config: Config) -> list[tuple[str, str]]:
    """Return the first run beside `run_dir` that differs only in changed samples, if any.

    Such a run has the same settings except `data.exclude` and `data.relabel`, which it lacks.
    """
    chosen = str(history.attempts[-1].start.get("chosen")) if history.attempts else ""
    match = re.search(r"(?P<count>[\d,]+) changed", chosen)
    if match is None:
        return []

    own = _settings_of_samples(config)
    for path in sorted(run_dir.parent.glob("*/config.yaml")):
        with suppress(ValueError, OSError):  # not a config, or of another release
            other = config_io.load_config(path)
            is_plain = other.data.exclude is None and other.data.relabel is None
            is_twin = is_plain and _settings_of_samples(other) == own
            if is_twin and path.parent != run_dir:
                images = f"{match['count']} excluded or relabeled images"
                return [("equal to", f"{path.parent.name}, but for {images}")]
    return []


def _settings_of_samples(config: Config) -> dict[str, Any]:
    """Return all settings except those in which a run and its twin may differ."""
    settings = config_io.to_dict(config)
    for section, name in (("data", "exclude"), ("data", "relabel"), ("run", "dir")):
        settings[section].pop(name)
    return settings


def host_facts(history: History, precision: str) -> list[tuple[str, str]]:
    """Return facts about the hardware of the last attempt."""
    if not history.attempts:
        return []

    start = history.attempts[-1].start
    num_ranks = start.get("world_size", 1)
    device = str(start.get("device", "?")).partition(":")[0]
    ranks = f"{num_ranks} {'rank' if num_ranks == 1 else 'ranks'}"
    hardware = f"{ranks} on {device} ({start.get('host', '?')})"
    return [("hardware", f"{hardware}, {precision}" if precision else hardware)]


def evaluation_rows(
    history: History, plan: dict[str, Any], best_by: str = VAL
) -> list[dict[str, Any]]:
    """Return a row for each evaluation, with results for weights and averaged weights (`_ema`).

    `by_top1` and `by_loss` are the results on the set `best_by`, which determines the best weights.
    """
    names = list(RESULT_NAMES) + [f"{name}_ema" for name in RESULT_NAMES]
    prefix = "" if best_by == VAL else f"{best_by}/"

    rows = []
    for line in history.of_kind("eval"):
        epoch = line["step"] / plan["steps_per_epoch"] if plan.get("steps_per_epoch") else None
        values = {name: line.get(name) for name in names}
        for name in ("top1", "top1_ema", "loss", "loss_ema"):
            values[f"by_{name}"] = line.get(prefix + name)
        beside = {key: line.get(key) for key in ("top1_reference", "top1_minus_reference")}
        rows.append({**values, **beside, "step": line["step"], "epoch": epoch})
    return rows


def reference_facts(history: History, evaluations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the `reference` line of metrics.jsonl with the evaluations that were compared.

    Returns None for a run without a published curve.
    """
    lines = history.of_kind("reference")
    if not lines:
        return None

    suffix = "_ema" if lines[-1]["weights"] == "ema" else ""
    rows = [
        {**row, "here": row[f"top1{suffix}"]}
        for row in evaluations
        if row["top1_reference"] is not None
    ]
    return {**lines[-1], "rows": rows}


def set_rows(history: History) -> list[dict[str, Any]]:
    """Return a row for each additional set and type of weights, from the last evaluation.

    `best` is the highest top-1 accuracy of all evaluations, and `best_step` is its step.
    """
    rows = []
    for name, suffix in product(set_names(history), ("", "_ema")):
        key = f"{name}/top1{suffix}"
        lines = [line for line in history.of_kind("eval") if f"{name}/num_images" in line]
        measured = [line for line in lines if line.get(key) is not None]
        if not measured:
            continue

        best = max(measured, key=lambda line: line[key])
        rows.append(
            {
                **{each: measured[-1].get(f"{name}/{each}{suffix}") for each in RESULT_NAMES},
                "name": name,
                "averaged": bool(suffix),
                "best": best[key],
                "best_step": best["step"],
            }
        )
    return rows


def headline(evaluations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the results of the last and the best evaluation.

    If averaged weights exist, the last result is for the averaged weights.
    """
    if not evaluations:
        return None
    results = list(chain.from_iterable(map(_results, evaluations)))
    best = max(results, key=lambda result: rank(result["by_top1"] or 0.0, result["by_loss"]))
    return {"last": _results(evaluations[-1])[0], "best": best}


def _results(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of the averaged weights, if they exist, and of the weights."""
    suffixes = [""] if row["top1_ema"] is None else ["_ema", ""]
    return [
        {
            **{name: row[name + suffix] for name in (*RESULT_NAMES, "by_top1", "by_loss")},
            "step": row["step"],
            "epoch": row["epoch"],
            "averaged": bool(suffix),
            "other": row["top1" if suffix else "top1_ema"],
        }
        for suffix in suffixes
    ]


def throughput(history: History, batch_size: int) -> dict[str, Any]:
    """Return speeds, times and counts over all steps. Repeated steps are counted once."""
    train = history.of_kind("train")
    elapsed = [line["elapsed_s"] for line in history.lines if line.get("elapsed_s") is not None]
    memory = [line["peak_memory_gib"] for line in train if line.get("peak_memory_gib") is not None]

    intervals = list(history.intervals())
    spent_s = sum(interval_s for _, _, interval_s in intervals)
    waited_s = sum(line["data_wait_s"] for line, _, _ in intervals)
    total_s = elapsed[-1] if elapsed else None

    return {
        "images_per_s": median(train, "images_per_s"),
        "images_per_s_per_gpu": median(train, "images_per_s_per_gpu"),
        "mfu": median(train, "mfu"),
        "loader_images_per_s": median(train, "loader_images_per_s"),
        "data_wait_share": min(waited_s / spent_s, 1.0) if spent_s else None,
        "total_s": total_s,
        "training_share": min(spent_s / total_s, 1.0) if spent_s and total_s else None,
        "num_images": max((line["step"] for line in train), default=0) * batch_size or None,
        "peak_memory_gib": max(memory, default=None),
        "batches_checked": sum(
            line["last_batch"] - line["first_batch"] + 1
            for line in history.of_kind("epoch")
            if line["exact"]
        ),
    }


def fault_lists(history: History, run_dir: Path) -> dict[str, Any]:
    """Return the faults of the run from metrics.jsonl and the run folder."""
    train = history.of_kind("train")
    errors = [line for line in history.of_kind("end") if line.get("outcome") == "error"]
    faults = [
        {"step": line["step"], "time": line.get("time"), "text": _fault_text(line)}
        for line in [*history.of_kind("fault"), *errors]
    ]

    return {
        "lines": sorted(faults, key=lambda fault: fault["step"]),
        "updates_skipped": max((line.get("updates_skipped") or 0 for line in train), default=0),
        "bad_images": max((line.get("bad_images") or 0 for line in train), default=0),
        "damaged": sorted(path.name for path in (run_dir / CHECKPOINTS).glob("damaged_*")),
        "unreadable": history.num_unreadable,
    }


def _fault_text(line: dict[str, Any]) -> str:
    """Return the reason of a fault, and its measured values and largest losses if recorded."""
    general = ("kind", "step", "time", "reason", "outcome", "elapsed_s", "action", "samples")
    unlimited = [key for key in line if key.endswith("_limit") and line[key] is None]
    details = [
        f"{key.replace('_', ' ').replace('grad norm', 'gradient norm')} {_short(value)}"
        for key, value in line.items()
        if key not in general and key not in unlimited
    ]
    if line.get("samples"):
        details.append(f"largest losses: {', '.join(key for key, _ in line['samples'][:3])}")

    reason = str(line.get("reason", "?"))
    return f"{reason} ({'; '.join(details)})" if details else reason


def _short(value: object) -> str:
    if value is None:
        return "not finite"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def setting_rows(config: Config) -> list[dict[str, Any]]:
    """Return all settings with their defaults and descriptions from `vit.config.schema`."""
    rows = list[dict[str, Any]]()
    for section, values in config_io.to_dict(config).items():
        for key, info in type(getattr(config, section)).model_fields.items():
            default = _default_of(f"{section}.{key}", info)
            rows.append(
                {
                    "key": f"{section}.{key}",
                    "value": _text(values[key]),
                    "default": _LONG_FRACTION.sub(r"\g<shown>…", _text(default)),
                    "differs": info.is_required() or values[key] != default,
                    "about": info.description or "",
                }
            )
    return rows


def _default_of(key: str, info: FieldInfo) -> object:
    """Return the default of the setting `key` as a config has it, or "required"."""
    if key == "optim.name":
        # Each optimizer has its own settings class, whose default is this optimizer's name.
        return Config.model_fields["optim"].default.name
    if info.is_required():
        return "required"
    # JSON converts tuples to lists, as in the config.
    return json.loads(json.dumps(info.get_default(call_default_factory=True)))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def provenance_rows(history: History) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (name, [(value, attempts with this value)]) for each provenance field.

    The second entry is "" if all attempts have the same value.
    """
    skipped = {"kind", "step", "time", "restarts", "plan"}
    starts = {attempt.number: attempt.start for attempt in history.attempts}
    names = dict.fromkeys(key for key in chain.from_iterable(starts.values()) if key not in skipped)

    rows = []
    for name in names:
        attempts = defaultdict[str, list[str]](list)
        for number, start in starts.items():
            attempts[_text(start.get(name, "not recorded"))].append(str(number))
        values = [(value, f"attempt {', '.join(numbers)}") for value, numbers in attempts.items()]
        rows.append((name, values if len(values) > 1 else [(values[0][0], "")]))
    return rows
