"""Write the pages of the reference, which `make docs` puts into the site. The pages are not
committed, so that they cannot be out of date.

    python docs/reference.py FOLDER

settings.md    every setting, from the classes of vit/config
commands.md    every command, from its docstring and its `--help`
python.md      the names of the Python interface, from their signatures and docstrings
record.md      the keys of metrics.jsonl: RECORD, which a test compares with a real run's
errors.md      every error message, from the rows that tests provoke
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import yaml

import vit
from data_prep import COMMANDS
from vit.config.reference import Setting, recipes, settings

ROOT = Path(__file__).parents[1]
ERRORS = ROOT / "tests" / "project" / "errors" / "rows.yaml"
COMMON_SHARE = 1 / 4
"""A setting that this share of the recipes gives is listed among the common ones."""
RECORD = {
    "every line": {
        "kind": "what the line is about: one of the headings below",
        "step": "steps that were done",
        "time": "seconds since 1970",
    },
    "start": {
        "restarts": "how often the run was resumed before",
        "world_size": "ranks",
        "device": "device of rank 0",
        "compiled": "whether the model is compiled",
        "command": "the command line",
        "git": "commit of the code",
        "code": "hash of the code that computes a step",
        "python": "version of Python",
        "torch": "version of torch",
        "host": "processor and its cores",
        "kernels": "what decides the bits of a sum: torch, processor or GPU, threads",
        "attention": "the attention kernel; `unfused`: plain matrix products",
        "exact": "whether the order of samples is reproduced by a resume",
        "plan": "numbers that follow from the settings, as `--print-config` prints them",
        "shuffle": "how well an epoch's order is mixed",
        "chosen": "what selects the training samples",
        "class_weights": "weight of each class in the loss",
        "teacher": "the teacher of a distilled run",
        "init_source": "repository, commit and license of weights that were fetched",
        "preflight": "what was compared with the host before the first step",
        "content_sha256": "hash of the training images' checksums",
        "first_batch_sha256": "hash of the sample numbers of the first batch",
    },
    "ready": {
        "total_s": "seconds from the start of the command to the first step",
        "parts_s": "seconds of its parts",
    },
    "train": {
        "epoch": "epochs that were done",
        "loss": "mean loss of the steps since the last line",
        "losses": "loss of each of these steps",
        "lr": "learning rate of the last step",
        "weight_decay": "weight decay of the last step, if it changes",
        "image_size": "size of the training images, if it changes",
        "grad_norm": "norm of the last step's gradient before clipping",
        "images_per_s": "images of all ranks in a second",
        "images_per_s_per_gpu": "the same of one rank",
        "mfu": "share of the device's peak that the model's arithmetic needs; null without a peak",
        "data_wait_s": "the longest wait of each step for its images, summed",
        "data_wait_max_s": "the wait of the rank that waited longest in total",
        "data_wait_mean_s": "waits of all ranks, on average",
        "data_wait_rank": "the rank that waited longest",
        "data_wait_host": "its host",
        "loader_images_per_s": "images that all workers can make in a second",
        "elapsed_s": "seconds of the run over all restarts",
        "peak_memory_gib": "largest memory so far: of the GPU, or of the process on a CPU",
        "updates_skipped": "updates that were skipped so far, by the guard or by fp16's loss scale",
        "bad_images": "images that could not be decoded so far",
        "loader_idle_s": "seconds in which workers waited for work, of all workers of all ranks",
        "loader_order_s": "seconds of computing the order",
        "loader_store_s": "seconds of waiting for a store",
        "loader_lock_s": "seconds of waiting for another process's lock on the cache",
        "loader_read_s": "seconds of reading",
        "loader_decode_s": "seconds of decoding",
        "loader_resize_s": "seconds of resizing",
        "loader_draw_s": "seconds of drawing the augmentation's table",
        "loader_retries": "repeated attempts to read",
        "loader_cache_hits": "samples whose block was in the cache",
        "loader_cache_misses": "samples whose block was not in the cache",
        "loader_read_bytes": "bytes of samples",
        "loader_fetched_bytes": "bytes that were fetched into the cache",
        "loader_worker_mib": "memory of the largest worker",
        "loader_replaced": "hung workers that were replaced since the start",
        "loader_slowest": "the same numbers of the rank that waited longest",
    },
    "norms": {
        "grad_norm": "norm of the gradient, by layer",
        "weight_norm": "norm of the weights, by layer",
        "update_norm": "norm of the update, by layer",
        "update_ratio": "norm of the update over that of the weights, by layer",
        "max_attn_logit": "largest attention logit, by layer",
    },
    "eval": {
        "num_images": "images that were evaluated",
        "correct_top1": "images whose class was predicted first",
        "correct_top5": "images whose class was among the first five",
        "top1": "per cent",
        "top5": "per cent",
        "loss": "mean cross-entropy",
        "ece": "expected calibration error, per cent",
        "images_per_s": "images in a second",
        "seconds": "duration",
        "data_wait_s": "wait of the rank that waited longest for its images",
        "..._ema": "the same of the averaged weights",
        "set": "name of a further set of `eval.sets`",
    },
    "epoch": {
        "epoch": "epochs that were done",
        "first_batch": "number of the epoch's first batch that this line covers",
        "last_batch": "number of its last batch",
        "exact": "whether the samples were those of the order",
        "sample_checksum": "sum over the samples that were trained on, compared with the order's",
        "samples_dropped": "samples of the epoch that no batch holds",
    },
    "checkpoint": {
        "folder": "name of the checkpoint",
        "blocked_s": "seconds for which training waited",
        "written_s": "seconds of writing, beside training",
        "sha256": "hash of its tensors",
    },
    "fault": {
        "reason": "what was wrong with the update, and what was done",
        "action": "skip or stop",
        "loss": "loss of the step",
        "grad_norm": "norm of its gradient",
        "loss_limit": "limit of the loss",
        "samples": "samples with the largest losses",
    },
    "reference": {"name": "the published curve", "curves": "its points"},
    "end": {
        "outcome": "finished, stopped or error",
        "reason": "the error",
        "elapsed_s": "seconds of the run over all restarts",
    },
}
"""Kind of a line -> key -> what it is."""


def main() -> None:
    """Write all pages into the folder of the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "settings.md": settings_page(),
        "commands.md": commands_page(),
        "python.md": python_page(),
        "record.md": record_page(),
        "errors.md": errors_page(),
    }
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")


def settings_page() -> str:
    """Return the page of all settings, the common ones first."""
    given = recipes()
    uses = Counter(key for values in given.values() for key in values)
    total = len(given)
    every = settings()
    common = [key for key in every if uses[key] >= COMMON_SHARE * total]
    sections: defaultdict[str, list[str]] = defaultdict(list)
    for key in every:
        sections[key.partition(".")[0]].append(key)
    lines = [
        "# Settings",
        "",
        f"All {len(every)} settings. A config file has `section: {{name: value}}`, a command line",
        "`section.name=value`. `vitline explain KEY` prints one with the recipes that set it.",
        "",
        f"## The {len(common)} common ones",
        "",
        f"A quarter of the {total} recipes or more set them.",
        "",
        *table_of([every[key] for key in common], uses),
    ]
    for section, keys in sections.items():
        lines += ["", f"## {section}", "", *table_of([every[key] for key in keys], uses)]
    return "\n".join(lines) + "\n"


def table_of(chosen: list[Setting], uses: dict[str, int]) -> list[str]:
    """Return a table of settings."""
    lines = [
        "| Setting | Values | Default | What it does | May change on resume | Recipes |",
        "|---|---|---|---|---|---|",
    ]
    for each in chosen:
        sentence = each.sentence
        if each.only_with:
            groups = [f"`{'` or `'.join(group)}`" for group in each.only_with]
            sentence += f" Only with {', and with '.join(groups)}."
        cells = [
            f"`{each.key}`",
            each.type,
            f"`{each.default}`",
            sentence,
            "yes" if each.may_change else "no",
            str(uses[each.key]),
        ]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return lines


def commands_page() -> str:
    """Return the page of all commands, with what `--help` prints."""
    lines = ["# Commands", "", "`vitline NAME` runs `launch/NAME.py`, also where it is installed."]
    for path in sorted((ROOT / "launch").glob("*.py")):
        if path.name != "check_versions.py":
            lines += help_of(f"launch/{path.name}", [str(path)])
    lines += ["", "Preparation of data; `vitline prep NAME` runs `python -m data_prep.NAME`."]
    for name in COMMANDS:
        lines += help_of(f"data_prep.{name}", ["-m", f"data_prep.{name}"])
    return "\n".join(lines) + "\n"


def help_of(title: str, words: list[str]) -> list[str]:
    """Return a heading and what the command prints about itself."""
    command = [sys.executable, *words, "--help"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return ["", f"## {title}", "", "```text", printed.rstrip(), "```"]


def python_page() -> str:
    """Return the page of the Python interface."""
    lines = ["# Python interface", "", inspect.getdoc(vit) or "", ""]
    for name in vit.__all__:
        if name != "__version__":
            value = getattr(vit, name)
            text = inspect.getdoc(value) or ""
            signature = f"vit.{name}{inspect.signature(value)}"
            lines += [f"## vit.{name}", "", "```python", _folded(signature), "```", ""]
            lines += ["```text", text, "```", ""]
    return "\n".join(lines)


def _folded(signature: str) -> str:
    """Return a signature with one argument a line."""
    tree = ast.parse(f"def {signature.removeprefix('vit.')}: ...").body[0]
    assert isinstance(tree, ast.FunctionDef)
    arguments = tree.args
    parts = [_typed(each) for each in arguments.args]
    first_default = len(parts) - len(arguments.defaults)
    for number, default in enumerate(arguments.defaults, start=first_default):
        parts[number] += f" = {ast.unparse(default)}"
    if arguments.kwonlyargs:
        parts.append("*")
    for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parts.append(_typed(each) + (f" = {ast.unparse(value)}" if value else ""))
    if arguments.kwarg:
        parts.append(f"**{_typed(arguments.kwarg)}")
    lines = "".join(f"    {part},\n" for part in parts)
    assert tree.returns is not None
    return f"vit.{tree.name}(\n{lines}) -> {_type(tree.returns)}"


def _typed(argument: ast.arg) -> str:
    """Return `name: type`."""
    assert argument.annotation is not None
    return f"{argument.arg}: {_type(argument.annotation)}"


def _type(annotation: ast.expr) -> str:
    """Return a type without the modules of this project and of Python. Modules with deferred
    annotations have strings."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return re.sub(
        r"\b(?:collections\.abc|typing|pathlib|os|vit(?:\.\w+)*)\.(\w+)",
        r"\1",
        ast.unparse(annotation),
    )


def record_page() -> str:
    """Return the page of the record's keys."""
    lines = [
        "# The record",
        "",
        "`metrics.jsonl` of a run's folder has one JSON object a line. Units stand in the names.",
    ]
    for kind, keys in RECORD.items():
        lines += ["", f"## {kind}", "", "| Key | Meaning |", "|---|---|"]
        lines += [f"| `{key}` | {meaning} |" for key, meaning in keys.items()]
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    """Return the page of all error messages, from the rows that tests provoke."""
    sections = yaml.safe_load(ERRORS.read_text(encoding="utf-8"))
    lines = ["# List of error messages", "", "`<...>` stands for text that varies."]
    for section, parts in sections.items():
        lines += ["", f"## {section}"]
        for part, rows in parts.items():
            lines += ["", f"### {part}"] if part else []
            lines += ["", "| Mistake | Printed lines | Exit status |", "|---|---|---|"]
            for row in rows:
                printed = " <br> ".join(f"`{line}`" for line in row["printed"].splitlines())
                lines.append(f"| {row['what']} | {printed} | {row['status']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
