"""Handle environment variables, logins and brace patterns in the addresses of data.

An address or command may contain a login (`https://user:password@host/...`, a signed query, a
header for curl) or, better, an environment variable (`${NAME}`). `resolve` substitutes variables.
`bare` returns the address without its login. This bare address identifies a data set. Requests use
`address`, with the headers from `credentials`.

The login is taken from the first of these sources that has one: the address; VIT_HTTP_HEADER, with
lines of `host Header: value`; HF_TOKEN, for https://huggingface.co; and `.netrc`, or the file named
by NETRC. A login is sent only to its own host, never to a different host after a redirect.
"""

import base64
import fnmatch
import functools
import logging
import netrc
import os
import re
import urllib.parse
from collections.abc import Iterable
from pathlib import Path

from vit.system.files import ShardError
from vit.system.redact import HEADER_VARIABLE, MASK, QUERY, USERINFO, keep_secret, shown

PIPE = "pipe:"
log = logging.getLogger(__name__)


def local_path(root: str | Path) -> Path | None:
    """Return the local folder of a path or file:// URL; None for other URLs."""
    scheme, is_url, path = str(root).partition("://")
    if not is_url:
        return Path(root)
    return Path(path) if scheme in ("file", "local") else None


def on_the_web(url: str) -> bool:
    """Return whether `url` is a URL that `vit.data.storage.http` reads."""
    return url.startswith(("http://", "https://"))


def unset_variables(text: str) -> list[str]:
    """Return the distinct `${NAME}` names in `text` for which no environment variable is set."""
    names = (
        reference["name"]
        for part in text.split("::")
        if not part.startswith(PIPE)
        for reference in _VARIABLE.finditer(part)
        if not reference[0].startswith("$$")
    )
    return list(dict.fromkeys(name for name in names if name not in os.environ))


def resolve(text: str) -> str:
    """Return `text` with `${NAME}` replaced by the values of environment variables.

    `text` consists of URLs, paths and commands joined by `::`. `$${NAME}` stands for the literal
    text `${NAME}`. A masked login in a recorded URL is restored if this process knows it. Commands
    after `pipe:` are left to the shell. Secrets in the result are registered, so that `shown` masks
    them.

    Call this function only with text from the user, never with text from a data set. Otherwise the
    author of a data set could read the environment variables of every user who opens it.

    Raises:
        ShardError: a variable is not set, or the login of a command was not recorded.
    """
    unset = unset_variables(text)
    if unset:
        raise ShardError(f"{shown(text)}: {not_set(unset)}")

    def value(reference: re.Match[str]) -> str:
        is_escaped = reference[0].startswith("$$")
        return reference[0][1:] if is_escaped else os.environ[reference["name"]]

    parts = []
    for part in text.split("::"):
        if part.startswith(PIPE) and MASK in part:
            raise ShardError(
                f"{part}: the login was not recorded: repeat the command with an environment"
                " variable ($NAME) as the login"
            )
        full = part if part.startswith(PIPE) else _VARIABLE.sub(value, part)
        bare_address = bare(full)
        # A recorded URL lacks its login. Use the login that the user gave for this URL, if any.
        if MASK in full and bare_address != full:
            full = _used.get(bare_address, bare_address)
            _lost_login.add(urllib.parse.urlsplit(full).netloc)
        elif bare_address != full:
            _used[bare_address] = full
        _remember(full)
        parts.append(full)

    return "::".join(parts)


def not_set(names: Iterable[str]) -> str:
    """Return a message about variables that are not set."""
    listed = [f"${{{name}}}" for name in names]
    return (
        f"{', '.join(listed)} not set in the environment: export the variable, or write"
        f" ${listed[0]} for the literal text {listed[0]}"
    )


_used: dict[str, str] = {}
"""Maps each bare address to the full address, with its login, that the user gave."""
_lost_login = set[str]()
"""The hosts whose addresses were recorded without their login."""
_VARIABLE = re.compile(r"\$?\$\{(?P<name>[A-Za-z_]\w*)\}")


def _remember(url: str) -> None:
    """Register the secrets of a URL, so that `shown` masks them."""
    if "://" not in url or url.startswith(PIPE):
        return

    parts = urllib.parse.urlsplit(url)
    userinfo, _, _ = parts.netloc.rpartition("@")
    user, _, password = userinfo.partition(":")
    plain = ":".join(map(urllib.parse.unquote, userinfo.split(":", 1)))
    keep_secret(password or user, base64.b64encode(plain.encode()).decode() if userinfo else "")
    keep_secret(*(value for _, value in urllib.parse.parse_qsl(parts.query) if len(value) >= 12))


def is_url(place: object) -> bool:
    """Return whether `place` is a URL rather than a path."""
    return re.match(r"[a-z][a-z0-9+.-]+://.", str(place)) is not None


def bare(text: str) -> str:
    """Return `text` without the userinfo and query of its URLs, so that it is the same for all
    users."""
    return QUERY.sub(r"\g<address>", USERINFO.sub(r"\g<slash>", text))


def address(url: str, name: str = "") -> str:
    """Return the URL to request for the file `name` in the folder `url`, or for `url` alone.

    The userinfo is removed, because the login is sent in a header. A query, such as the signature
    of a folder, is placed after the name.
    """
    _remember(url)
    parts = urllib.parse.urlsplit(url)
    path = f"{parts.path.rstrip('/')}/{name}" if name else parts.path
    return urllib.parse.urlunsplit(
        (parts.scheme, parts.netloc.rpartition("@")[2], path, parts.query, "")
    )


def expand_braces(pattern: str) -> list[str]:
    """Expand braces like shells and webdataset: `a-{0..2}.tar` -> a-0.tar, a-1.tar, a-2.tar.

    {000..002} keeps leading zeros, {a,b} stands for a or b, and all other braces are kept. The
    results are distinct.
    """
    for match in re.finditer(r"\{([^{}]*)\}", pattern):
        choices = _choices(match[1])
        if choices:
            whole = [
                pattern[: match.start()] + choice + pattern[match.end() :] for choice in choices
            ]
            return list(dict.fromkeys(name for part in whole for name in expand_braces(part)))

    return [pattern]


def _choices(inside: str) -> list[str]:
    """Return the alternatives inside a pair of braces, or [] if `inside` is not a pattern."""
    bounds = re.fullmatch(r"(\d+)\.\.(\d+)", inside)
    if bounds is None:
        return inside.split(",") if "," in inside else []
    numbers = range(int(bounds[1]), int(bounds[2]) + 1)
    is_padded = re.search(r"\b0\d", inside)
    width = max(map(len, bounds.groups())) if is_padded else 1
    return [f"{number:0{width}d}" for number in numbers]


def credentials(url: str) -> dict[str, str]:
    """Return the login headers to send to the host of an http(s) URL, or {}.

    Call this function again for the host of a redirect. Raises ShardError if VIT_HTTP_HEADER or
    `.netrc` cannot be read.
    """
    _remember(url)
    parts = urllib.parse.urlsplit(url)
    headers = (
        _from_userinfo(parts)
        or _from_variable(parts)
        or _from_hugging_face(parts)
        or _from_netrc(parts)
    )
    for value in headers.values():
        keep_secret(value, value.rpartition(" ")[2])

    is_local = re.fullmatch(r"localhost|::1|127\..*", parts.hostname or "")
    is_exposed = parts.scheme == "http" and not is_local
    if headers and is_exposed:
        _warn_of_plain_text(parts.netloc.rpartition("@")[2])
    return headers


def login_hint(url: str) -> str:
    """Return a remedy for a 401 or 403 response from `url`."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    ways = (
        f"a login for {host} in ~/.netrc, or {HEADER_VARIABLE}='{host} Authorization: Bearer ...'"
        f"{', or HF_TOKEN' if _is_hugging_face(host) else ''}"
    )

    if credentials(url) or parts.query:
        return "the login is wrong or has expired, or the file does not exist"
    if parts.netloc in _lost_login:
        return (
            "the login in the address was not recorded: give data.root=... (--data of eval.py) with"
            f" the login again, or {ways}"
        )
    return f"a login is required, or the file does not exist: give {ways} (docs/data.md)"


def _basic(user: str, password: str) -> dict[str, str]:
    keep_secret(password or user)
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def _from_userinfo(parts: urllib.parse.SplitResult) -> dict[str, str]:
    userinfo = parts.netloc.rpartition("@")[0]
    user, _, password = userinfo.partition(":")
    return _basic(*map(urllib.parse.unquote, (user, password))) if userinfo else {}


def _from_variable(parts: urllib.parse.SplitResult) -> dict[str, str]:
    """Return the headers for a host in `HEADER_VARIABLE`. Raises ShardError for an invalid line."""
    headers = {}
    for line in filter(None, map(str.strip, os.environ.get(HEADER_VARIABLE, "").splitlines())):
        match = re.fullmatch(r"(?P<host>[\w.*\[\]:-]+)\s+(?P<name>[\w-]+):\s*(?P<value>\S.*)", line)
        if match is None:
            raise ShardError(
                f"{HEADER_VARIABLE}: expected lines with a host, a header and its value, such as"
                f" {HEADER_VARIABLE}='data.example.org Authorization: Bearer ...'"
            )
        if any(fnmatch.fnmatchcase(host, match["host"].lower()) for host in _names(parts)):
            headers[match["name"]] = match["value"]
    return headers


def _from_hugging_face(parts: urllib.parse.SplitResult) -> dict[str, str]:
    token = os.environ.get("HF_TOKEN", "").strip()
    is_for_host = parts.scheme == "https" and _is_hugging_face(parts.hostname or "")
    return {"Authorization": f"Bearer {token}"} if token and is_for_host else {}


def _is_hugging_face(host: str) -> bool:
    return host in ("huggingface.co", "hf.co") or host.endswith(".huggingface.co")


def _from_netrc(parts: urllib.parse.SplitResult) -> dict[str, str]:
    """Return the header for a login in the netrc file. Raises ShardError for an invalid file."""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        hosts = netrc.netrc(str(path)).hosts
    except FileNotFoundError:
        return {}
    except (OSError, netrc.NetrcParseError) as error:
        reason = (
            f"line {error.lineno}: {error.msg}"  # without the path, which `str(error)` repeats
            if isinstance(error, netrc.NetrcParseError)
            else error.strerror
        )
        raise ShardError(
            f"{path}: cannot be read ({reason}): fix the file, or set NETRC to another file"
        ) from None

    login = next((hosts[host] for host in _names(parts) if host in hosts), None)
    return _basic(login[0], login[2] or "") if login else {}


def _names(parts: urllib.parse.SplitResult) -> tuple[str, str]:
    return parts.netloc.rpartition("@")[2].lower(), parts.hostname or ""


@functools.lru_cache
def _warn_of_plain_text(host: str) -> None:
    log.warning("http://%s: the login is sent without encryption; use https://", host)
