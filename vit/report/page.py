"""The report of a run: one page that can be sent to somebody.

The data's story: the record gives attempts, tables, faults and curves, also where a kill or a bad
disk left only a part of it; the config gives the settings beside their defaults;
`vit.report.pictures` gives the pictures, or why there are none. All of it goes through one template
into one file that points to nothing outside: pictures are data URIs, curves inline SVG. Whatever
comes from a run is escaped, and the page's own policy lets a browser run one script, known by its
hash, and load nothing.

    runs/<name>/report/index.html
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import torch
from markupsafe import Markup, escape

from vit.report.facts import TEMPLATE_FILE, page_values
from vit.report.history import read_history
from vit.report.pictures import Pictures, draw_pictures
from vit.report.source import ReportSource
from vit.run.folder import METRICS_FILE, REPORT_FOLDER
from vit.system.files import replacing
from vit.system.meter import duration

PAGE_FILE = f"{REPORT_FOLDER}/index.html"


@dataclass(frozen=True)
class Report:
    """What `make_report` made."""

    page: Path
    pictures: Pictures


def make_report(
    run_dir: Path,
    device: torch.device,
    *,
    in_use: bool | None = None,
    on_picture: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Draw all pictures of a run and write its page. Raises ValueError if `run_dir` is no run
    folder or cannot be written.

    `in_use` says whether a process is training there (None: not known), `on_picture(done, total,
    name)` is called after each picture.
    """
    pictures = draw_pictures(run_dir, device, on_picture)
    return Report(write_page(run_dir, pictures, in_use=in_use), pictures)


# --- the page -------------------------------------------------------------------------------------


def write_page(run_dir: Path, pictures: Pictures, *, in_use: bool | None = None) -> Path:
    """Write `run_dir`/report/index.html, whole or not at all, with `pictures` and what else the
    folder tells. Returns its path.

    Raises ValueError if it cannot be written.
    """
    page = run_dir / PAGE_FILE
    source = ReportSource(run_dir, torch.device("cpu"))
    story = read_history(run_dir / METRICS_FILE, in_use)
    content = (
        _environment().get_template(TEMPLATE_FILE).render(**page_values(source, story, pictures))
    )
    try:
        page.parent.mkdir(exist_ok=True)
        with replacing(page) as file:
            file.write(content.encode("utf-8", "replace"))
    except OSError as error:
        raise ValueError(f"{page}: cannot be written ({error.strerror})") from None
    return page


def _environment() -> jinja2.Environment:
    """Every value is escaped, and one that the template names wrongly is an error."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    options: dict[str, Any] = {
        "autoescape": True,
        "undefined": jinja2.StrictUndefined,
        "trim_blocks": True,
        "lstrip_blocks": True,
    }
    environment = jinja2.Environment(loader=loader, **options)
    environment.filters |= {"count": _count, "fixed": _fixed, "short": _short, "exact": _exact}
    environment.filters |= {"duration": _duration, "moment": _moment, "code": _code}
    return environment


# --- how values are written -----------------------------------------------------------------------


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _fixed(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _exact(value: float | None, digits: int = 2) -> Markup:
    """A number for the eye, with the record's own digits behind it."""
    if value is None:
        return Markup("–")
    return Markup('<data value="{0!r}" title="{0!r}">{1}</data>').format(
        value, f"{value:.{digits}f}"
    )


def _duration(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)


def _moment(seconds: float | None, after: float | None = None, zone: bool = True) -> Markup:
    """A moment in the time zone of who makes the page; without the day if that is also the day of
    `after`."""
    if seconds is None:
        return Markup("–")
    when = datetime.fromtimestamp(seconds).astimezone()
    same_day = (
        after is not None and datetime.fromtimestamp(after).astimezone().date() == when.date()
    )
    text = f"{when:{'' if same_day else '%Y-%m-%d '}%H:%M{' %Z' if zone else ''}}"
    return Markup('<time datetime="{}">{}</time>').format(when.isoformat(timespec="seconds"), text)


def _code(text: str) -> Markup:
    """Text with `code` between backticks."""
    parts = re.split(r"`([^`]*)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if n % 2 else escape(part)
        for n, part in enumerate(parts)
    )
