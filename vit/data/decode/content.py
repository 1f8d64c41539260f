"""Recognize files that are not images: web pages and compressed files."""

import re

WEB_PAGE = re.compile(rb"\s*<(!doctype|html|\?xml|head)", re.IGNORECASE)
COMPRESSED = {
    b"\x1f\x8b": "compressed with gzip",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"PK": "a zip",
}

HEAD_BYTES = 512
"""The first bytes of a file that are enough to recognize it."""


def describe_content(head: bytes) -> str:
    """Return a description if a file that begins with `head` is a web page or compressed, else
    ""."""
    if WEB_PAGE.match(head):
        return "a web page (a login or an error page was saved in its place)"
    return next((kind for magic, kind in COMPRESSED.items() if head.startswith(magic)), "")
