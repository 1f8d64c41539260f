"""Check that every link, image and anchor in the built documentation site points to an existing
target.

    python tests/project/check_site.py build/site

`make docs` runs this check, because the site generator does not report broken links to files
outside its pages. The script prints one line per broken link, and exits with status 1 if there are
any.
"""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {"", "__top"}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def find_dead_links(site: Path) -> list[str]:
    """Return a line `page -> link` for each relative link in `site` that points to a missing file
    or anchor."""
    read = cache(Page)
    dead = []
    for path in sorted(site.rglob("*.html")):
        # The 404 page has absolute links, because a server can show it at any address.
        if path.name == "404.html":
            continue
        for link in read(path).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                dead.append(f"{path.relative_to(site)} -> {link}: no such file")
            elif target.suffix == ".html" and unquote(parts.fragment) not in read(target).anchors:
                dead.append(f"{path.relative_to(site)} -> {link}: no such anchor")
    return dead


if __name__ == "__main__":
    problems = find_dead_links(Path(sys.argv[1]))
    sys.exit("\n".join(problems) or 0)
