"""Open HTML pages in Chromium, and find elements that overlap, are cut off or extend beyond their
box."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import environment

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: apt-get install chromium"
)
WIDTHS_PX = (390, 1280)
"""The widths of a phone and of a laptop, in CSS pixels."""
OPTIONS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-component-update",
    "--disable-background-networking",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
    "--window-size=1400,900",
]

FIND_FAULTS = """
for (const details of document.querySelectorAll("details")) details.open = true;
const faults = [];
const style = (e) => getComputedStyle(e);
const box = (e) => e.getBoundingClientRect();
const scrolls = (e) => /auto|scroll/.test(style(e).overflowX);
const isInline = (e) => style(e).display === "inline";
const isInFlow = (e) => ["static", "relative"].includes(style(e).position);
const name = (e) => {
  const words = e.textContent.trim().replace(/\\s+/g, " ").slice(0, 40);
  const kind = e.getAttribute("class") || e.id;
  return `<${e.tagName.toLowerCase()}${kind ? " " + kind : ""}> "${words}"`;
};
const report = (e, fault) => faults.push(`${name(e)} ${fault}`);
const isWithin = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1;
const isBetween = (a, b) => a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
const meet = (a, b) =>
  Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5 &&
  Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1.5;
const pairs = (all) => all.flatMap((a, n) => all.slice(n + 1).map((b) => [a, b]));
const holder = (node) => {
  let block = node.parentElement;
  while (isInline(block)) block = block.parentElement;
  return block;
};

const page = document.documentElement;
if (page.scrollWidth > innerWidth) {
  faults.push(`the page is ${page.scrollWidth} px wide, the window ${innerWidth} px`);
}
const shown = [...document.body.querySelectorAll("*")].filter(
  (e) => e.getClientRects().length && !e.parentElement.closest("svg"),
);
for (const e of shown) {
  const block = holder(e);
  if (isInFlow(e) && !scrolls(block)) {
    const isOut = !isWithin(box(e), box(block)) || (!isInline(e) && !isBetween(box(e), box(block)));
    if (isOut) report(e, `leaves its box ${name(block)}`);
  }
  const isWide = e.scrollWidth > e.clientWidth + 1;
  const isHigh = e.scrollHeight > e.clientHeight + 1;
  if (/hidden|clip/.test(style(e).overflow) && (isWide || isHigh)) report(e, "is cut");
  if (scrolls(e) && isWide && style(e).backgroundImage === "none") {
    report(e, "scrolls without a visible sign");
  }
  const below = [...e.children].filter((c) => shown.includes(c) && isInFlow(c) && !isInline(c));
  for (const [a, b] of pairs(e.tagName === "TBODY" ? [] : below)) {
    if (meet(box(a), box(b))) report(a, `overlaps ${name(b)}`);
  }
}
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let text = walker.nextNode(); text; text = walker.nextNode()) {
  const range = document.createRange();
  range.selectNodeContents(text);
  const block = holder(text);
  const isShown = text.data.trim() && range.getClientRects().length && !block.closest("svg");
  if (!isShown) continue;
  if (!scrolls(block) && !isWithin(range.getBoundingClientRect(), box(block))) {
    report(block, "has text that leaves its box");
  }
  if (parseFloat(style(text.parentElement).fontSize) < 11) report(block, "has tiny text");
}
for (const image of document.images) {
  const { width, height } = box(image);
  if (!image.complete || !image.naturalWidth) report(image, "is not loaded");
  else if (!width || !height) continue;
  else if (style(image).objectFit === "fill") {
    const stretch = width / height / (image.naturalWidth / image.naturalHeight);
    if (Math.abs(stretch - 1) > 0.03) report(image, `is stretched by ${stretch.toFixed(2)}`);
  }
}
// matplotlib draws each text as a group of outlines whose id contains "text_".
for (const svg of document.querySelectorAll("body svg")) {
  const texts = [...svg.querySelectorAll("g[id*=text_]")];
  for (const text of texts) {
    const isInside = isWithin(box(text), box(svg)) && isBetween(box(text), box(svg));
    if (!isInside) report(svg, `cuts its ${text.id}`);
    if (Math.max(box(text).width, box(text).height) < 5) report(svg, `has a tiny ${text.id}`);
  }
  for (const [a, b] of pairs(texts)) {
    if (meet(box(a), box(b))) report(svg, `draws ${a.id} over ${b.id}`);
  }
}
"""


def console_of(page: Path, folder: Path) -> list[str]:
    """Open a page, and return the lines of the browser's console. folder: for the browser's
    profile."""
    done = subprocess.run(
        [str(CHROMIUM), *OPTIONS, f"--user-data-dir={folder / 'profile'}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def with_script(page: Path, code: str) -> str:
    """Return a page that has no security policy and runs `code` as soon as it is loaded."""
    html = page.read_text(encoding="utf-8")
    html, count = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    assert count == html.count("</body>") == 1
    script = f'<script>addEventListener("load", () => {{{code}}});</script></body>'
    return html.replace("</body>", script)


def faults_in(pages: Sequence[Path], folder: Path, more: str = "") -> dict[str, list[str]]:
    """Return the faults of each page, keyed by its name, such as "390 px: <p> is cut".

    To read the console, each page is opened unchanged. It is also opened in a frame of each width,
    because a frame can be narrower than a browser window. more: JavaScript that may add to
    `faults`.
    """
    frames = [(page.as_uri(), 1280) for page in pages]
    for number, page in enumerate(pages):
        for width in WIDTHS_PX:
            report = f'console.log("FOUND" + JSON.stringify([{number}, {width}, faults]) + "END");'
            copy = folder / f"{number}_{width}.html"
            copy.write_text(with_script(page, FIND_FAULTS + more + report), encoding="utf-8")
            frames.append((copy.as_uri(), width))
    frame_page = folder / "frames.html"
    frame_page.write_text(
        "".join(
            f'<iframe src="{url}" style="width: {width}px; height: 900px; border: 0"></iframe>'
            for url, width in frames
        )
    )
    faults: dict[str, list[str]] = {page.name: [] for page in pages}
    num_found = 0
    for line in console_of(frame_page, folder):
        found = re.search(r'"FOUND(.*)END"', line)
        assert found, f"the console must be empty: {line}"
        number, width, texts = json.loads(found[1])
        faults[pages[number].name] += [f"{width} px: {text}" for text in texts]
        num_found += 1
    assert num_found == len(pages) * len(WIDTHS_PX), "a page was not measured"
    return faults
