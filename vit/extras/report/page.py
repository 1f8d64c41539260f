"""Write the report of a run as a single HTML file that needs no server and no network.

Attempts, tables, faults and curves are read from metrics.jsonl, even if parts of it are damaged.
Settings come from the config. Pictures come from `vit.extras.report.pictures` and are embedded as
data URIs. If a picture is missing, the page shows the reason. Curves are inline SVG, which is sharp
at any size and matches the page's colors in light and dark mode.

All content of a run is escaped, because it is untrusted. The page's content security policy blocks
all external resources, and allows only one script, which is identified by its hash.

    runs/<name>/report/index.html
"""

import base64
import hashlib
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any

import jinja2
import torch
from markupsafe import Markup, escape

from vit.config.base import VAL
from vit.config.schema import Config
from vit.distributed.outcome import Outcome
from vit.extras.report import facts
from vit.extras.report.curves import plot_panels
from vit.extras.report.history import History, read_history
from vit.extras.report.pictures import (
    PAINTERS,
    ClassAccuracy,
    ConfusedPair,
    Pictures,
    draw_pictures,
)
from vit.extras.report.source import ReportSource, as_sentence
from vit.feature import Parts
from vit.run import Hook, Run
from vit.run_folder.paths import CONFIG_FILE, METRICS_FILE, REPORT_FOLDER
from vit.system.files import replacing
from vit.system.meter import duration
from vit.system.redact import shown
from vit.training.metrics import TOP5_CLASSES, format_interval, interval95

PAGE_FILE = f"{REPORT_FOLDER}/index.html"
TEMPLATE = Path(__file__).with_name("page.html.j2")
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
"""Maps each color of the curves to a CSS variable, whose value differs in dark mode."""


@dataclass(frozen=True)
class Report:
    """The result of `make_report`."""

    page: Path
    pictures: Pictures


def make_report(
    run_dir: Path,
    device: torch.device,
    *,
    in_use: bool | None = None,
    on_picture: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Report:
    """Draw all pictures of a run and write its report.

    Args:
        in_use: Whether a process is training in the folder, or None if unknown.
        on_picture: Called after each picture with (done, total, name).

    Raises ValueError if `run_dir` is not a run folder or is not writable.
    """
    pictures = draw_pictures(run_dir, device, on_picture)
    return Report(write_page(run_dir, pictures, in_use=in_use), pictures)


def parts(config: Config) -> Parts:
    """Return the parts of a run that ends with a report."""
    return Parts(hooks=(ReportHook(),))


class ReportHook(Hook):
    """A hook that writes the report of a finished run and logs its pictures to W&B.

    No report is written for a stopped run, because its process may be killed within seconds.
    """

    def ended(self, run: Run, outcome: Outcome) -> None:
        """See `Hook`."""
        if outcome != "finished":
            return

        run.signals.release_interrupt()
        try:
            report = make_report(run.folder, run.world.device, in_use=False)
        except (Exception, KeyboardInterrupt) as error:  # must not change the run's outcome
            run.record.log(
                f"no report ({type(error).__name__}: {error}); to try again, run python"
                f" launch/report.py {quote(str(run.folder))}"
            )
            return

        pictures = report.pictures
        pairs = [list(pair) for pair in pictures.confused_pairs]
        classes = [list(row) for row in pictures.class_accuracies]
        run.record.log_pictures(pictures.paths)
        run.record.log_table("most_confused", list(ConfusedPair._fields), pairs)
        run.record.log_table("classes", list(ClassAccuracy._fields), classes)
        run.record.log(f"report: {report.page}")


def write_page(run_dir: Path, pictures: Pictures, *, in_use: bool | None = None) -> Path:
    """Write `run_dir`/report/index.html atomically, and return its path.

    Raises ValueError if the page cannot be written.
    """
    source = ReportSource(run_dir, torch.device("cpu"))
    history = read_history(run_dir / METRICS_FILE, in_use)
    content = page_template(TEMPLATE.name).render(_page_values(source, history, pictures))
    return write_html(run_dir / PAGE_FILE, content)


def write_html(page: Path, content: str) -> Path:
    """Write a page atomically, and return its path. Raises ValueError if it cannot be written."""
    try:
        page.parent.mkdir(exist_ok=True)
        with replacing(page) as file:
            file.write(content.encode("utf-8", "replace"))
    except OSError as error:
        raise ValueError(f"{page}: cannot be written ({error.strerror})") from None
    return page


def page_template(name: str) -> jinja2.Template:
    """Load a template that escapes all values and raises an error for unknown names."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    environment.filters.update(
        count=lambda value: _number(value, ",.0f"),
        fixed=lambda value, digits=2: _number(value, f",.{digits}f"),
        short=lambda value: _number(value, ".4g"),
        exact=_exact,
        interval=lambda result: format_interval(result["correct_top1"], result["num_images"]),
        range95=_range95,
        duration=lambda seconds: "–" if seconds is None else duration(seconds),
        moment=_moment,
        code=_code,
    )
    return environment.get_template(name)


def _page_values(source: ReportSource, history: History, pictures: Pictures) -> dict[str, Any]:
    """Return all values of the template."""
    run_dir = source.run_dir
    made_s = time.time()
    plan = history.plan

    config_values = _config_values(source, history)
    evaluations = facts.evaluation_rows(history, plan, config_values["best_by"])
    classes = pictures.class_accuracies
    with_images = [row for row in classes if row.num_images]

    return {
        **config_values,
        "name": run_dir.resolve().name,
        "script_hash": _script_hash(),
        "made_s": made_s,
        "state": facts.run_state(history, plan, run_dir, made_s),
        "evaluations": evaluations,
        "averaged": any(row["top1_ema"] is not None for row in evaluations),
        "headline": facts.headline(evaluations),
        "has_top5": len(source.class_names) not in range(1, TOP5_CLASSES),
        "reference": facts.reference_facts(history, evaluations),
        "sets": facts.set_rows(history),
        "has_norms": bool(history.of_kind("norms")),
        "curves": _curves(run_dir),
        "pictures": {name: _picture(pictures, name) for name in PAINTERS},
        "confused_pairs": pictures.confused_pairs,
        "num_mistakes": pictures.num_mistakes,
        "classes": sorted(with_images, key=lambda row: (row.top1, -row.num_images)),
        "empty_classes": len(classes) - len(with_images),
        "attempts": history.attempts,
        "checkpoints": [line for line in history.of_kind("checkpoint") if line.get("sha256")],
        "faults": facts.fault_lists(history, run_dir),
        "plan": plan,
        "provenance": facts.provenance_rows(history),
    }


def _config_values(source: ReportSource, history: History) -> dict[str, Any]:
    """Return the values that depend on the config. If the config cannot be read, return the reason
    and the config's text."""
    try:
        config = source.config
    except ValueError as error:
        file = source.run_dir / CONFIG_FILE
        text = file.read_text("utf-8", errors="replace") if file.is_file() else ""
        return {
            "facts": facts.host_facts(history, ""),
            "best_by": VAL,
            "throughput": facts.throughput(history, 0),
            "exact_over_ranks": False,
            "settings": [],
            "config_problem": as_sentence(error),
            "config_text": shown(text),
        }

    return {
        "facts": [
            *facts.config_facts(source, config, history.plan),
            *facts.twin_facts(history, source.run_dir, config),
            *facts.host_facts(history, config.train.precision),
        ],
        "best_by": config.eval.best_by,
        "throughput": facts.throughput(history, config.data.global_batch_size),
        "exact_over_ranks": config.train.exact_over_ranks,
        "settings": facts.setting_rows(config),
        "config_problem": "",
        "config_text": "",
    }


def _script_hash() -> str:
    """Return the hash by which the page's security policy recognizes its script."""
    script = TEMPLATE.read_text("utf-8").partition("<script>")[2].partition("</script>")[0]
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _curves(run_dir: Path) -> list[Markup]:
    """Return the panels of the curves as SVG elements, or [] if they cannot be drawn."""
    with suppress(Exception), tempfile.TemporaryDirectory() as folder:
        return [_svg_element(path) for path in plot_panels(run_dir / METRICS_FILE, Path(folder))]
    return []


def _svg_element(picture: Path) -> Markup:
    """Return an SVG file as an element of the page, in the colors of the page's theme."""
    document = picture.read_text("utf-8")
    svg = re.sub(
        r"<metadata>.*?</metadata>|<!--.*?-->",
        "",
        document[document.index("<svg") :],
        flags=re.DOTALL,
    )

    # The panels are part of one page, so their ids must differ.
    svg = re.sub(r'(?P<before_id>\bid="|"#|url\(#)', rf"\g<before_id>{picture.stem}_", svg)

    # `Markup` prevents escaping. The SVG is safe, because its texts are drawn as outlines.
    return Markup(re.sub("|".join(THEME), lambda match: f"var(--{THEME[match[0]]})", svg))


def _picture(pictures: Pictures, name: str) -> dict[str, str]:
    try:
        data = base64.b64encode(pictures.paths[name].read_bytes()).decode()
    except (KeyError, OSError):
        return {"uri": "", "text": pictures.reasons.get(name, "The picture does not exist yet.")}
    return {"uri": f"data:image/png;base64,{data}", "text": pictures.notes.get(name, "")}


# --- filters of the template ----------------------------------------------------------------------


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _exact(value: float | None, digits: int = 2) -> Markup:
    """Return a rounded number with all recorded digits as a tooltip."""
    if value is None:
        return Markup("–")
    return Markup('<data value="{0!r}" title="{0!r}">{1}</data>').format(
        value, f"{value:.{digits}f}"
    )


def _range95(result: dict[str, Any]) -> str:
    if result["correct_top1"] is None or not result["num_images"]:
        return "–"
    low, high = interval95(result["correct_top1"], result["num_images"])
    return f"{low:.1f} to {high:.1f}"


def _moment(seconds: float | None, after: float | None = None, zone: bool = True) -> Markup:
    """Format a time in the local time zone, and omit the date if `after` is on the same day."""
    if seconds is None:
        return Markup("–")

    moment = datetime.fromtimestamp(seconds).astimezone()
    text = f"{moment:%H:%M}"
    if after is None or datetime.fromtimestamp(after).astimezone().date() != moment.date():
        text = f"{moment:%Y-%m-%d} {text}"
    if zone:
        text += f" {moment:%Z}"

    return Markup('<time datetime="{}">{}</time>').format(
        moment.isoformat(timespec="seconds"), text
    )


def _code(text: str) -> Markup:
    """Convert text with code in backticks to HTML."""
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if n % 2 else escape(part)
        for n, part in enumerate(re.split(r"`([^`]*)`", text))
    )
