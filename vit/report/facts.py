"""The values of the report's page: how the run stands, its numbers, faults and settings."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup

from vit import config_io
from vit.config import Config
from vit.data.batches import ImageFormat
from vit.metrics import format_interval
from vit.model import create_model
from vit.model_summary import count_parameters, flops_per_image
from vit.report.curves import curve_panels
from vit.report.history import History
from vit.report.pictures import PAINTERS, Pictures
from vit.report.source import ReportSource, sentence
from vit.run.folder import CHECKPOINTS, CONFIG_FILE, METRICS_FILE, STOPPED_FILE
from vit.system.meter import duration
from vit.system.urls import shown

TEMPLATE_FILE = "page.html.j2"


def page_values(source: ReportSource, story: History, pictures: Pictures) -> dict[str, Any]:
    run_dir = source.run_dir
    made_s = time.time()
    plan: dict[str, Any] = next(
        (
            a.start["plan"]
            for a in reversed(story.attempts)
            if isinstance(a.start.get("plan"), dict)
        ),
        {},
    )
    evaluations = _evaluations(story, plan)
    script = (Path(__file__).parent / TEMPLATE_FILE).read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", script, re.DOTALL)[1]  # type: ignore[index]
    try:
        config = source.config
        config_problem = ""
    except ValueError as error:
        config = None
        config_problem = sentence(error)
    return {
        "name": run_dir.resolve().name,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "made_s": made_s,
        "state": _state(story, plan, run_dir, made_s),
        "facts": _facts(source, config, story, plan),
        "evaluations": evaluations,
        "averaged": any(row["top1_ema"] is not None for row in evaluations),
        "headline": _headline(evaluations),
        "curves": _curves(run_dir),
        "pictures": {name: _picture(pictures, name) for name in PAINTERS},
        "confused_pairs": pictures.confused_pairs,
        "classes": sorted(
            (row for row in pictures.class_accuracies if row.num_images),
            key=lambda row: (row.top1, -row.num_images),
        ),
        "empty_classes": sum(not row.num_images for row in pictures.class_accuracies),
        "throughput": _throughput(story, config),
        "attempts": story.attempts,
        "images_per_s": {a.number: _median(a.lines, "images_per_s") for a in story.attempts},
        "faults": _faults(story, run_dir),
        "settings": _settings(config) if config is not None else [],
        "config_problem": config_problem,
        "config_text": _text(run_dir / CONFIG_FILE) if config is None else "",
        "plan": plan,
        "provenance": _provenance(story),
    }


def _text(path: Path) -> str:
    try:
        return shown(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""


def _state(story: History, plan: dict[str, Any], run_dir: Path, now_s: float) -> dict[str, Any]:
    """How the run stands, in a word for the eye and a sentence."""
    step = max((line["step"] for line in story.lines), default=0)
    total = plan.get("total_steps")
    of_total = f"step {step:,} of {total:,}" if total else f"step {step:,}"
    last = story.attempts[-1] if story.attempts else None
    outcome = last.outcome if last else "not started"
    ago = duration(max(now_s - last.last_time, 0)) if last and last.last_time else "an unknown time"
    resume = "the same command goes on from its newest checkpoint"
    sentence = {
        "finished": f"Finished at {of_total}.",
        "stopped": f"Stopped{_signal(run_dir)} at {of_total} and saved; {resume}.",
        "failed": f"Failed at {of_total}: {last.reason if last else ''}",
        "going on": f"Going on, at {of_total}; the newest line of the record was {ago} old.",
        "killed": f"Killed after {of_total}; {resume}.",
        "unclear": (
            f"Going on or killed, at {of_total}; the newest line of the record was {ago} old."
        ),
        "not started": "Nothing is in the record yet.",
    }.get(outcome, f"{outcome} at {of_total}.")
    tone = {"finished": "good", "failed": "bad", "killed": "bad"}.get(outcome, "busy")
    times = [line["time"] for line in story.lines if isinstance(line.get("time"), int | float)]
    return {
        "word": "going on?" if outcome == "unclear" else outcome,
        "tone": tone,
        "sentence": sentence,
        "step": step,
        "total_steps": total,
        "began_s": story.attempts[0].start.get("time") if story.attempts else None,
        "ended_s": max(times, default=None),
        "share": min(step / total, 1.0) if total else None,
    }


def _signal(run_dir: Path) -> str:
    try:
        return f" by {json.loads((run_dir / STOPPED_FILE).read_text())['signal'] or 'request'}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _facts(
    source: ReportSource, config: Config | None, story: History, plan: dict[str, Any]
) -> list[tuple[str, str]]:
    """What was trained on what, in a few words each."""
    facts = []
    if config is not None:
        height, width = ImageFormat.from_config(config.model, config.data).size
        facts.append(("model", f"{config.model.name} at {height} × {width} pixels"))
        # a fact less; a model that cannot be made has its sentence at the pictures
        with suppress(Exception):
            with torch.device("meta"):
                num_classes = config.model.num_classes or len(source.class_names) or 1000
                model = create_model(config.model, num_classes=num_classes)
            facts.append(
                (
                    "size",
                    (
                        f"{_si(count_parameters(model))} parameters,"
                        f" {flops_per_image(model) / 1e9:.3g} GFLOP an image"
                    ),
                )
            )
        batch = config.data.global_batch_size
        images = (
            plan["steps_per_epoch"] * batch + plan.get("dropped_per_epoch", 0)
            if "steps_per_epoch" in plan
            else None
        )
        num_val = next(
            (
                line["num_images"]
                for line in reversed(story.of_kind("eval"))
                if "num_images" in line
            ),
            None,
        )
        counts = [
            f"{images:,} to train on" if images else "",
            f"{num_val:,} to evaluate on" if num_val else "",
        ]
        known = f": {', '.join(filter(None, counts))}" if any(counts) else ""
        facts.append(("data", f"{shown(config.data.root)}{known}"))
        length = (
            f"{plan['total_steps']:,} steps"
            if "total_steps" in plan
            else f"{config.train.epochs or config.train.steps}"
        )
        epochs = (
            f", {plan['total_steps'] / plan['steps_per_epoch']:.4g} epochs"
            if plan.get("steps_per_epoch")
            else ""
        )
        facts.append(
            (
                "recipe",
                (
                    f"{length} of {batch:,} images{epochs}; {config.optim.name}, peak rate"
                    f" {config.optim.lr:g}"
                ),
            )
        )
    if story.attempts:
        start = story.attempts[-1].start
        ranks = start.get("world_size", 1)
        device = str(start.get("device", "?")).partition(":")[0]
        host = f"{ranks} rank{'s' if ranks != 1 else ''} on {device} ({start.get('host', '?')})"
        facts.append(("hardware", f"{host}, {config.train.precision}" if config else host))
        given = re.search(r"--config[ =](\S+)", str(start.get("command", "")))
        if given:
            facts.append(("config", given[1]))
    return facts


def _evaluations(story: History, plan: dict[str, Any]) -> list[dict[str, Any]]:
    names = ("num_images", "top1", "top5", "correct_top1", "loss")
    rows = []
    for line in story.of_kind("eval"):
        row = {name + suffix: line.get(name + suffix) for name in names for suffix in ("", "_ema")}
        epoch = line["step"] / plan["steps_per_epoch"] if plan.get("steps_per_epoch") else None
        rows.append({**row, "step": line["step"], "epoch": epoch, "best": False})
    best = max(rows, key=_best_rank, default=None)
    if best is not None:
        best["best"] = True
    return rows


def _rank(row: dict[str, Any], suffix: str) -> tuple[float, float]:
    """Larger is better: top-1, and of equals the smaller loss, as in `RunState.take_best`."""
    top1 = row[f"top1{suffix}"]
    loss = row[f"loss{suffix}"]
    return -1.0 if top1 is None else top1, -math.inf if loss is None else -loss


def _best_rank(row: dict[str, Any]) -> tuple[float, float]:
    return max(_rank(row, suffix) for suffix in ("", "_ema"))


def _headline(evaluations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The last evaluation, of the averaged weights where there are some, as they are the ones meant
    to be used; and the best."""
    if not evaluations:
        return None

    def chosen(row: dict[str, Any], suffix: str) -> dict[str, Any]:
        averaged = suffix == "_ema"
        values = {name: row[name + suffix] for name in ("top1", "top5", "correct_top1", "loss")}
        num_images = row["num_images"] if row["num_images"] is not None else row["num_images_ema"]
        other = row["top1"] if averaged else row["top1_ema"]
        known = values["correct_top1"] is not None and num_images is not None
        values["interval"] = format_interval(values["correct_top1"], num_images) if known else ""
        return {
            **values,
            "num_images": num_images,
            "step": row["step"],
            "epoch": row["epoch"],
            "averaged": averaged,
            "other": other,
        }

    last = evaluations[-1]
    best = max(evaluations, key=_best_rank)
    return {
        "last": chosen(last, "_ema" if last["top1_ema"] is not None else ""),
        "best": chosen(
            best,
            (
                "_ema"
                if best["top1_ema"] is not None and _rank(best, "_ema") == _best_rank(best)
                else ""
            ),
        ),
    }


def _curves(run_dir: Path) -> dict[str, Any]:
    """The panels as inline SVG, or why there are none."""
    try:
        panels = curve_panels(run_dir / METRICS_FILE)
    except Exception as error:
        return {"panels": {}, "reason": sentence(error)}
    # markup of our own, made from numbers
    inline = {name: Markup(_themed(svg)) for name, svg in panels.items()}
    return {"panels": inline, "reason": "" if inline else "Nothing has been measured yet."}


THEME = {
    "#ffffff": "card",
    "#000000": "ink",
    "#b0b0b0": "soft",
    "#cccccc": "rule",
    "#666666": "soft",
    "#0072b2": "blue",
    "#d55e00": "orange",
    "#009e73": "green",
}
"""Colours of the curves -> those of the page, which are others in the dark."""


def _themed(svg: str) -> str:
    return re.sub("|".join(THEME), lambda found: f"var(--{THEME[found[0]]})", svg)


def _picture(pictures: Pictures, name: str) -> dict[str, str]:
    try:
        data = base64.b64encode(pictures.paths[name].read_bytes()).decode()
    except (KeyError, OSError):
        return {"uri": "", "text": pictures.reasons.get(name, "It has not been drawn.")}
    return {"uri": f"data:image/png;base64,{data}", "text": pictures.notes.get(name, "")}


def _median(lines: list[dict[str, Any]], name: str) -> float | None:
    values = [
        line[name] for line in lines if line["kind"] == "train" and line.get(name) is not None
    ]
    return statistics.median(values) if values else None


def _throughput(story: History, config: Config | None) -> dict[str, Any]:
    """Medians and shares over the steps that count. An interval's length is its images over its
    speed."""
    train = story.of_kind("train")
    elapsed = [line["elapsed_s"] for line in story.lines if line.get("elapsed_s") is not None]
    batch_size = config.data.global_batch_size if config is not None else 0
    spent_s = waited_s = 0.0
    step = 0
    for line in story.lines:
        if (
            line["kind"] == "train"
            and line.get("images_per_s")
            and line.get("data_wait_s") is not None
        ):
            spent_s += (line["step"] - step) * batch_size / line["images_per_s"]
            waited_s += line["data_wait_s"]
        if line["kind"] in ("start", "train"):
            step = line["step"]
    total_s = elapsed[-1] if elapsed else None
    return {
        "images_per_s": _median(train, "images_per_s"),
        "loader_images_per_s": _median(train, "loader_images_per_s"),
        "data_wait_share": min(waited_s / spent_s, 1.0) if spent_s else None,
        "total_s": total_s,
        "training_share": min(spent_s / total_s, 1.0) if spent_s and total_s else None,
        "num_images": step * batch_size if batch_size and step else None,
        "peak_memory_gib": max(
            (line["peak_memory_gib"] for line in train if line.get("peak_memory_gib") is not None),
            default=None,
        ),
        "batches_checked": sum(
            line["last_batch"] - line["first_batch"] + 1
            for line in story.of_kind("epoch")
            if line["exact"]
        ),
    }


def _faults(story: History, run_dir: Path) -> dict[str, Any]:
    """What went wrong on the way, as far as record and folder know."""
    train = story.of_kind("train")
    faults = [
        {"step": line["step"], "time": line.get("time"), "text": _fault_text(line)}
        for line in (*story.of_kind("fault"), *story.of_kind("end"))
        if line["kind"] == "fault" or line.get("outcome") == "error"
    ]
    damaged = sorted(path.name for path in (run_dir / CHECKPOINTS).glob("damaged_*"))
    return {
        "lines": sorted(faults, key=lambda fault: fault["step"]),
        "updates_skipped": max((line.get("updates_skipped") or 0 for line in train), default=0),
        "bad_images": max((line.get("bad_images") or 0 for line in train), default=0),
        "damaged": damaged,
        "unreadable": story.num_unreadable,
    }


def _fault_text(line: dict[str, Any]) -> str:
    others = {
        key: value
        for key, value in line.items()
        if key not in ("kind", "step", "time", "reason", "outcome", "elapsed_s")
    }
    details = ", ".join(
        f"{key} {'not finite' if value is None else value}" for key, value in others.items()
    )
    return f"{line.get('reason', '?')}{f' ({details})' if details else ''}"


def _settings(config: Config) -> list[dict[str, Any]]:
    """Every setting with its default and the sentence from `vit.config`, section by section."""
    values = config_io.to_dict(config)
    rows = list[dict[str, Any]]()
    for section, group in values.items():
        for key, info in type(getattr(config, section)).model_fields.items():
            default = (
                None
                if info.is_required()
                else json.loads(json.dumps(info.get_default(call_default_factory=True)))
            )
            rows.append(
                {
                    "key": f"{section}.{key}",
                    "value": _plain(group[key]),
                    "default": (
                        "required"
                        if info.is_required()
                        else re.sub(r"(\.\d{5})\d{6,}", r"\1…", _plain(default))
                    ),
                    "differs": info.is_required() or group[key] != default,
                    "about": info.description or "",
                }
            )
    # the fields are then those of another class
    if config.optim.name != Config.model_fields["optim"].default.name:
        next(row for row in rows if row["key"] == "optim.name").update(
            differs=True, default=Config.model_fields["optim"].default.name
        )
    return rows


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _provenance(story: History) -> list[tuple[str, list[tuple[str, str]]]]:
    """Name -> its values with the attempts that had them; one without attempts where all had the
    same."""
    told = {"kind", "step", "time", "restarts", "plan"}
    names = dict.fromkeys(
        key for attempt in story.attempts for key in attempt.start if key not in told
    )
    found = []
    for name in names:
        by_value: dict[str, list[int]] = {}
        for attempt in story.attempts:
            by_value.setdefault(_plain(attempt.start.get(name, "not recorded")), []).append(
                attempt.number
            )
        one = len(by_value) == 1
        found.append(
            (
                name,
                [(value, "" if one else _ranges(numbers)) for value, numbers in by_value.items()],
            )
        )
    return found


def _ranges(numbers: list[int]) -> str:
    """1, 2, 3, 7 -> "attempts 1–3, 7"."""
    ranges = ", ".join(
        f"{first}" if first == last else f"{first}–{last}" for first, last in _runs(numbers)
    )
    return f"attempt{'s' if len(numbers) > 1 else ''} {ranges}"


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def _si(number: int) -> str:
    """12,345,678 -> 12.3 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
