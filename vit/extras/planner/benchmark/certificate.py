"""Format the measurements of a machine as tables, and write the file that the planner reads.

`vit.extras.planner.benchmark.bench.measure` -> `tables` -> terminal
                            -> `write_results` -> <date>-gpu-<name>.json and .md
                                 -> `vit.extras.planner.speed.choose_speed`
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vit.loggers.record import provenance
from vit.system.files import replacing
from vit.system.gpus import find_device
from vit.system.meter import digits
from vit.training.step_result import StepPhase

Table = list[list[str]]
"""A table. The first row is the header, and the first column contains the row names."""
PART_NAMES = {
    StepPhase.CHANGE: "augmentation, gray levels",
    StepPhase.FINISH: "augmentation, float32",
    StepPhase.TEACHER: "teacher",
    StepPhase.FORWARD: "forward, loss",
    StepPhase.BACKWARD: "backward",
    StepPhase.UPDATE: "norm, optimizer, average",
}
IDENTITY = (
    "model",
    "image_size",
    "flops_per_image",
    "drop_path_form",
    "precision",
    "compiled",
    "deterministic",
    "activation_checkpointing",
    "num_devices",
    "micro_batch_size",
)
"""The fields that identify a row. A new row replaces the stored row that has the same
values in these fields."""


def check_writable(option: str, folder: Path) -> None:
    """Create `folder`, and raise ValueError if files cannot be written to it."""
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"{option} {folder}: cannot be written ({error.strerror}): choose another folder"
        ) from None


def step_table(result: Mapping[str, Any]) -> Table:
    """Return a table of the step measurements, with a column for each mode and micro-batch size."""
    rows = result["training"]

    def line(name: str, cell: Callable[[Mapping[str, Any]], str]) -> list[str]:
        return [name, *map(cell, rows)]

    table = [
        line("", _mode),
        line("micro-batch, images", lambda row: f"{row['micro_batch_size']:,}"),
        line("step of a device, images", lambda row: f"{row['rank_batch_size']:,}"),
        line("images/s", lambda row: digits(row["images_per_s"])),
    ]
    if result["num_devices"] > 1:
        table.append(line("  of each device", lambda row: digits(row["images_per_s_per_gpu"])))
    table += [
        line("share of the peak (MFU)", lambda row: f"{100 * row['mfu']:.1f} %"),
        line("a step, ms", lambda row: digits(1e3 * row["step_s"])),
    ]

    if all(row["bound_s"] for row in rows):
        table.append(line("  at the limits of the GPU", lambda row: _share(row, row["bound_s"])))
    for part, name in PART_NAMES.items():
        part_s = [row["parts_s"].get(part, 0.0) for row in rows]
        if part != StepPhase.TEACHER or any(part_s):  # most configs have no teacher
            table.append([f"  {name}", *map(_share, rows, part_s)])
    if all(row["all_reduce"] for row in rows):
        table += [
            line(
                "  all-reduce not hidden", lambda row: _share(row, row["all_reduce"]["exposed_s"])
            ),
            line("all-reduce alone, ms", lambda row: digits(1e3 * row["all_reduce"]["alone_s"])),
        ]

    table += [
        line("peak memory, GiB", lambda row: _gib(row["peak_memory_gib"])),
        line("  as planned", lambda row: _gib(row["planned_memory_gib"])),
    ]
    if any(row["largest_micro_batch_size"] for row in rows):
        largest = line(
            "largest micro-batch to fit", lambda row: f"{row['largest_micro_batch_size']:,}"
        )
        table.append(largest)
    return table


def proposal(result: Mapping[str, Any]) -> str:
    """Return a line with the fastest micro-batch in the last mode, or "" if only one was measured.

    Only rows with the batch size of the last row are compared, so only the micro-batch size
    differs.
    """
    last = result["training"][-1]
    rows = [
        row
        for row in result["training"]
        if (row["compiled"], row["rank_batch_size"]) == (last["compiled"], last["rank_batch_size"])
    ]
    if len(rows) == 1:
        return ""

    best = max(rows, key=lambda row: row["images_per_s"])
    sizes = ", ".join(f"{row['micro_batch_size']:,}" for row in rows)
    return (
        f"fastest of {sizes}, {_mode(best)}: data.micro_batch_size={best['micro_batch_size']}"
        f" ({digits(best['images_per_s'])} images/s); batches stay the same"
    )


def loading_table(result: Mapping[str, Any]) -> Table:
    """Return the speeds of the loader, the step and both together, or [] if none were measured."""
    loading = result["loading"]
    if loading is None:
        return []

    workers = f"{loading['num_workers']} worker(s)" if loading["num_workers"] else "no workers"
    lost = f"{100 * loading['lost_share']:.1f} % less than the step alone"
    if loading["lost_share"] < 0:
        lost = "nothing lost"

    return [
        ["", "images/s", ""],
        ["loader alone", digits(loading["loader_images_per_s"]), f"{workers} for each rank"],
        ["step alone", digits(loading["step_images_per_s"]), ""],
        [
            "loader and step",
            digits(loading["together_images_per_s"]),
            f"{lost}, data wait {100 * loading['data_wait_share']:.0f} %",
        ],
    ]


def title(result: Mapping[str, Any]) -> str:
    """Return a title with the model, image size, precision and devices."""
    row = result["training"][0]
    height, width = row["image_size"]
    return (
        f"{row['model']} at {height}x{width}, {row['precision']}, on {result['num_devices']} x"
        f" {result['device']}: {peak_text(result['peak_tflops'], result['peak_source'])}"
    )


def write_results(folder: Path, result: Mapping[str, Any]) -> Path:
    """Write `result` to `<date>-gpu-<name>.json` in `folder`, and to a .md file next to it.

    Existing rows for other measurements are kept. The planner does not read the file for a CPU,
    which is named `<date>-<name>.json`. Raises ValueError if the file cannot be written.
    """
    before = stored_results(results_file(folder, result["device"], result["device_type"]))
    new = [_identity(row) for row in result["training"]]
    other_rows = [row for row in before["training"] if _identity(row) not in new]

    loading = before["loading"]
    if result["loading"] is not None:
        model = result["loading"]["model"]
        loading = [row for row in loading if row["model"] != model] + [result["loading"]]

    changes = {
        "peak_tflops": result["peak_tflops"],
        "peak_source": result["peak_source"],
        "training": [*other_rows, *result["training"]],
        "loading": loading,
    }
    return write_document(folder, result["device"], result["device_type"], changes)


def write_document(folder: Path, device: str, device_type: str, changes: Mapping[str, Any]) -> Path:
    """Update the results of `device` with `changes`, in the JSON and Markdown files.

    Raises ValueError if the files cannot be written.
    """
    path = results_file(folder, device, device_type)
    document = {
        **stored_results(path),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": _short_name(device),
        "device": device,
        **provenance(),
        **changes,
    }

    with replacing(path) as file:
        file.write((json.dumps(document, indent=1) + "\n").encode())
    with replacing(path.with_suffix(".md")) as file:
        file.write(as_markdown(document).encode())

    return path


def _identity(row: Mapping[str, Any]) -> list[Any]:
    """Return the values that distinguish a row of a results file from the others."""
    return [row.get(key) for key in IDENTITY]


def stored_results(path: Path) -> dict[str, Any]:
    """Return the content of a results file, or empty lists if it does not exist."""
    return json.loads(path.read_text()) if path.exists() else {"training": [], "loading": []}


def results_file(folder: Path, device: str, device_type: str) -> Path:
    """Return the path of the results file for `device`. Raises ValueError if it is not writable."""
    check_writable("--out", folder)
    slug = re.sub(r"[^a-z0-9]+", "-", _short_name(device).lower()).strip("-")
    kind = "gpu-" if device_type == "cuda" else ""
    return folder / f"{time.strftime('%Y-%m-%d')}-{kind}{slug}.json"


def _short_name(device: str) -> str:
    gpu = find_device(device)
    return gpu.name if gpu is not None else device.partition(" (")[0]


def as_markdown(document: Mapping[str, Any]) -> str:
    """Format a results file as Markdown, with a section for each model."""
    facts = ("command", "git", "python", "torch", "host")
    parts = [
        f"# Measured on {document['device']}, {document['date']}",
        "; ".join(f"{name} {document[name]}" for name in facts) + ".",
    ]

    promises = document.get("promises")
    if promises:
        verdict = {True: "kept", False: "**not kept**", None: "measured"}
        table = [[line["what"], verdict[line["passed"]], line["text"]] for line in promises]
        parts += ["## Promises", _as_rows([["promise", "", "found"], *table])]

    for model in dict.fromkeys(row["model"] for row in document["training"]):
        rows = [row for row in document["training"] if row["model"] == model]
        for num_devices in sorted({row["num_devices"] for row in rows}):
            training = [row for row in rows if row["num_devices"] == num_devices]
            part = {**document, "num_devices": num_devices, "training": training}
            parts += [f"## {title(part)}", _as_rows(step_table(part))]

        for loading in [row for row in document["loading"] if row["model"] == model]:
            parts.append(_as_rows(loading_table({"loading": loading})))

    return "\n\n".join(parts) + "\n"


def peak_text(tflops: float, source: str) -> str:
    """Format the peak FLOP/s of a device."""
    rate = f"{digits(tflops)} TFLOP/s" if tflops >= 1 else f"{digits(1e3 * tflops)} GFLOP/s"
    return f"peak {rate} ({source})"


def _mode(row: Mapping[str, Any]) -> str:
    """Return the mode of a row, such as "compiled, deterministic"."""
    parts = ["compiled" if row["compiled"] else "eager"]
    if row["deterministic"]:
        parts.append("deterministic")
    if row["activation_checkpointing"] != "none":
        parts.append("checkpointing")
    return ", ".join(parts)


def _share(row: Mapping[str, Any], seconds: float) -> str:
    return f"{100 * seconds / row['step_s']:.1f} %"


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _as_rows(table: Sequence[Sequence[str]]) -> str:
    """Format a table as Markdown. Columns with a name are right-aligned."""
    head, *body = [f"| {' | '.join(map(str.strip, row))} |" for row in table]
    rule = "|".join("---:" if name else "---" for name in table[0])
    return "\n".join([head, f"|{rule}|", *body])
