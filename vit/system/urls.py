"""Addresses that hold secrets: what may be shown of them, what they become when they are used, and
how to log in. Free of torch.

The data's story: a person gives an address or a command, with a login in it
(`https://user:password@host/...`, a signed query string, a header for curl) or, better, with the
name of an environment variable in its place (`${NAME}`). `resolve` makes of it what is used. Beside
it `bare` is the address without any login, which names the data set; `address` is what is sent to a
server; `credentials` are the headers that go with it. Whatever is told or written for people or for
later goes through `shown`: there `***` stands for a login.

A login is looked for in four places, and the first that has one counts: the address itself; in
VIT_HTTP_HEADER, lines of `host Header: value`; in HF_TOKEN, for https://huggingface.co; in
`.netrc`, or the file that NETRC names. Each names the host that it is for, so that no other host,
be it one that the first redirects to, gets it.
"""

from __future__ import annotations

import base64
import difflib
import fnmatch
import functools
import logging
import netrc
import os
import re
import sys
import urllib.parse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from vit.system.files import ShardError

MASK = "***"
HEADER_VARIABLE = "VIT_HTTP_HEADER"
PIPE = "pipe:"
log = logging.getLogger(__name__)


# ---- what may be shown ---------------------------------------------------------------------------

_REFERENCE = r"\$\{[A-Za-z_]\w*\}|\$[A-Za-z_]\w*"
"""The name of an environment variable in the place of its value; in a command the shell's form,
too."""
_NO_SECRET = re.compile(rf"(?:{_REFERENCE}|\*\*\*|\.\.\.)+")
_WORD = r"""(?:\\[^"']|[^\s"'\\])+"""
"""Of a shell's command, which may stand in a JSON text."""
_USERINFO = re.compile(r"(?<=:/)(/?)((?:[^/\s\"<>]*|[^/\s:@\"<>]+:(?!\d+(?:[/\s]|$))[^\s@\"<>]*)@)")
"""Behind one slash, too: so a path shows a URL that somebody gave in its place."""
_END = r"(?=[).,;:|]*(?:[\s#\"'<>\\]|::|$))"
_QUERY = re.compile(r"(:/[^\s?#\"'<>\\]*)\?(?![).,;:|])([^\s#\"'<>\\]+?)" + _END)
_PARAMETER = re.compile(
    r"([?&](?:X-Amz-|X-Goog-|AWSAccessKeyId|GoogleAccessId|Signature|sig|(?:\w+[_-])?token|(?:\w+[_-])?key|auth|password)[\w-]*=)"
    r"([^&\s#\"'<>\\]+?)(?=&|" + _END[3:],
    re.IGNORECASE,
)
_HEADER_NAME = (
    r"(?:Proxy-)?Authorization|Cookie|[\w-]+-(?:Token|Key|Secret|Password|Signature|Auth)"
)
_QUOTED_HEADER = re.compile(
    rf"""(?P<before>(?P<quote>\\?["'])(?:{_HEADER_NAME})(?:(?P=quote)\s*:\s*(?P=quote)|\s*:\s*))(?P<secret>.*?)(?=(?P=quote))""",
    re.IGNORECASE,
)
_HEADER = re.compile(
    rf"""(?P<before>(?<![\w./-])(?:{_HEADER_NAME}):(?:\\*\s)*(?:(?:Basic|Bearer|Token|Digest|ApiKey)(?:\\*\s)+)?)"""
    rf"""(?P<secret>(?!//){_WORD})""",
    re.IGNORECASE,
)
_OPTION = re.compile(
    r"""(?P<before>(?<!\S)--(?:[\w-]+-)?(?:user|pass|password|cookie|token|bearer|secret|key)[ =]|(?<!\S)-[uU] ?(?=\S+:))"""
    rf"""(?P<secret>"[^"]*"|'[^']*'|{_WORD})"""
)
_ASSIGNMENT = re.compile(
    rf"""(?P<before>\b\w*(?:SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_KEY)\w*=)(?P<secret>"[^"]*"|'[^']*'|{_WORD})"""
)
_SECRET_VARIABLE = re.compile(
    r"(?:SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|SAS|CONNECTION_STRING|(?:API|ACCESS|SECRET|STORAGE|ACCOUNT|PRIVATE)_?KEY)(?:_ID)?$"
    rf"|^{HEADER_VARIABLE}$",
    re.IGNORECASE,
)
_known: dict[str, str] = {}
"""Secrets that this process has used, in all the forms in which they travel, and what is shown for
them."""


def shown(text: str) -> str:
    """`text`, any text, as it may be published: `***` for the userinfo and the query of URLs, for
    headers and options that log in, and for every secret that this process has used or has in its
    environment, wherever it stands. `${NAME}` stays. Shown twice is shown once.
    """
    for secret, instead in sorted(
        (_of_environment() | _known).items(), key=lambda item: -len(item[0])
    ):
        text = text.replace(secret, instead)
    if ":/" in text:
        text = _USERINFO.sub(_without_userinfo, text)
        text = _QUERY.sub(
            lambda found: f"{found[1]}?{found[2] if _is_shown_query(found[2]) else MASK}", text
        )
    text = _PARAMETER.sub(
        lambda found: found[0] if _NO_SECRET.fullmatch(found[2]) else f"{found[1]}{MASK}", text
    )
    for pattern in (_QUOTED_HEADER, _HEADER, _OPTION, _ASSIGNMENT):
        text = pattern.sub(_masked, text)
    return text


def shown_values(value: Any) -> Any:
    """`value` with every text in it as `shown`, in lists and in values of dictionaries."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, dict):
        return {key: shown_values(inner) for key, inner in value.items()}
    return [shown_values(inner) for inner in value] if isinstance(value, list | tuple) else value


def _without_userinfo(found: re.Match[str]) -> str:
    user, has_password, password = found[2][:-1].partition(":")
    is_no_secret = MASK not in found[2] and _NO_SECRET.fullmatch(password if has_password else user)
    return found[0] if is_no_secret else f"{found[1]}{MASK}@"


def _is_shown_query(query: str) -> bool:
    return MASK not in query and all(
        _NO_SECRET.fullmatch(part.partition("=")[2] or part) for part in query.split("&")
    )


def _masked(found: re.Match[str]) -> str:
    secret = re.sub(
        r"^(?:Basic|Bearer|Token|Digest|ApiKey)\s+",
        "",
        found["secret"].strip("\"'"),
        flags=re.IGNORECASE,
    )
    return found[0] if not secret or _NO_SECRET.fullmatch(secret) else f"{found['before']}{MASK}"


def _of_environment() -> dict[str, str]:
    """What the environment's secrets are shown as. Told from the names of variables; a path or a
    switch is no secret."""
    found = dict[str, str]()
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.search(name) and not value.startswith(("/", "~", ".")):
            found |= _forms(value, f"${{{name}}}")
            if name == HEADER_VARIABLE:
                for line in value.splitlines():
                    found |= _forms(line.rpartition(" ")[2], f"${{{name}}}")
    return found


def _forms(secret: str, instead: str = MASK) -> dict[str, str]:
    """The forms in which a secret travels; {} for one that plain text may hold by chance."""
    if len(secret) < (12 if secret.isdecimal() else 6) or _NO_SECRET.fullmatch(secret):
        return {}
    quoted = {
        urllib.parse.quote(secret),
        urllib.parse.quote(secret, safe=""),
        urllib.parse.quote_plus(secret),
        urllib.parse.unquote(secret),
    }
    return dict.fromkeys({secret, *quoted}, instead)


def _keep_secret(*secrets: str) -> None:
    for secret in secrets:
        _known.update(_forms(secret))


class _Guarded:
    """A stream whose text goes through `shown`; in all else the stream itself."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(shown(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard_console() -> None:
    """Whatever this process prints from here on, libraries' warnings and stack traces included, is
    printed as `shown`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Guarded):
            setattr(sys, name, _Guarded(stream))


# ---- what is used --------------------------------------------------------------------------------


def unset_variables(text: str) -> list[str]:
    """The names `${NAME}` in `text` that are not in the environment, each once."""
    names = (
        found[1]
        for part in _parts(text)
        for found in _VARIABLE.finditer(part)
        if not found[0].startswith("$$")
    )
    return list(dict.fromkeys(name for name in names if name not in os.environ))


def resolve(text: str) -> str:
    """What is used of `text`, URLs, paths and commands joined by `::`: the values of the
    environment for `${NAME}` (`$${NAME}` stands for `${NAME}` itself), and no `***` of a URL that
    was recorded as `shown`. A command behind `pipe:` is left to the shell, which knows variables of
    its own.

    For what a person gave, never for what was read from a data set: its author would learn the
    environment of all who read it. From here on `shown` knows the secrets of the result. Raises
    ShardError naming all variables that are not set, and for a command whose login was not
    recorded.
    """
    if unset := unset_variables(text):
        raise ShardError(f"{shown(text)}: {not_set(unset)}")

    def value(found: re.Match[str]) -> str:
        return found[0][1:] if found[0].startswith("$$") else os.environ[found[1]]

    parts = []
    for part in text.split("::"):
        if part.startswith(PIPE) and MASK in part:
            raise ShardError(
                f"{part}: its login is recorded nowhere; give the command once more, with $NAME of"
                " an environment variable for it"
            )
        used = part if part.startswith(PIPE) else _VARIABLE.sub(value, part)
        without = bare(used)
        # as it was recorded; this very process may have been given the login, too
        if MASK in used and without != used:
            used = _used.get(without, without)
            _lost_login.add(urllib.parse.urlsplit(used).netloc)
        elif without != used:
            _used[without] = used
        _remember(used)
        parts.append(used)
    return "::".join(parts)


def not_set(names: Iterable[str]) -> str:
    """In words, what to do about variables."""
    listed = [f"${{{name}}}" for name in names]
    return (
        f"{', '.join(listed)} not set in the environment; export it, or write ${listed[0]} for the"
        f" text {listed[0]} itself"
    )


def did_you_mean(given: str) -> str:
    """What was meant by an address or folder that is not there, in words to stand behind others; ""
    if nobody knows."""
    scheme, _, rest = given.partition(":")
    web = difflib.get_close_matches(scheme, ("https", "http"), n=1, cutoff=0.75)
    if given.startswith("~"):
        meant = os.path.expanduser(given)
    elif re.match(r"/(?!/)", rest) and re.fullmatch(r"[a-z][a-z0-9+]+", scheme):
        meant = f"{web[0] if web else scheme}:/{rest}"
    elif rest.startswith("//") and web and scheme != web[0]:
        meant = f"{web[0]}:{rest}"
    elif re.match(r"[\w-]+(\.[\w-]+)*:\d+/|[\w-]+(\.[\w-]+){2,}/", given):
        meant = f"https://{given}"
    else:
        meant = given
    return "" if meant == given else f"; did you mean {shown(meant)}?"


_used: dict[str, str] = {}
"""Addresses with the logins that this process was given, by their bare forms."""
_lost_login = set[str]()
"""Hosts of addresses that were recorded without the login they had."""
_VARIABLE = re.compile(r"\$?\$\{([A-Za-z_]\w*)\}")


def _parts(text: str) -> list[str]:
    return [part for part in text.split("::") if not part.startswith(PIPE)]


def _remember(url: str) -> None:
    """Keep the secrets of a URL from being shown anywhere."""
    if "://" not in url or url.startswith(PIPE):
        return
    parts = urllib.parse.urlsplit(url)
    userinfo, _, _ = parts.netloc.rpartition("@")
    user, _, password = userinfo.partition(":")
    plain = ":".join(map(urllib.parse.unquote, userinfo.split(":", 1)))
    _keep_secret(password or user, base64.b64encode(plain.encode()).decode() if userinfo else "")
    _keep_secret(*(value for _, value in urllib.parse.parse_qsl(parts.query) if len(value) >= 12))


def bare(text: str) -> str:
    """`text` without the userinfo and query of its URLs: the same data set has the same name,
    whoever reads it and with whatever token."""
    return _QUERY.sub(lambda found: found[1], _USERINFO.sub(r"\1", text))


def address(url: str, name: str = "") -> str:
    """What to ask a server for: the file `name` in the folder `url`, or `url` itself. The userinfo
    goes, as it travels in a header, and a query, such as a signature for a folder, comes behind the
    name."""
    _remember(url)
    parts = urllib.parse.urlsplit(url)
    path = f"{parts.path.rstrip('/')}/{name}" if name else parts.path
    return urllib.parse.urlunsplit(
        (parts.scheme, parts.netloc.rpartition("@")[2], path, parts.query, "")
    )


def expand_braces(pattern: str) -> list[str]:
    """`a-{0..2}.tar` -> a-0.tar, a-1.tar, a-2.tar, as shells and webdataset do, each once;
    {000..002} keeps zeros, {0..9..3} goes in steps, {a..c} through letters, {a,b} is either. Other
    braces stay."""
    for match in re.finditer(r"\{([^{}]*)\}", pattern):
        if choices := _choices(match[1]):
            whole = [
                pattern[: match.start()] + choice + pattern[match.end() :] for choice in choices
            ]
            return list(dict.fromkeys(name for part in whole for name in expand_braces(part)))
    return [pattern]


def _choices(inside: str) -> list[str]:
    bounds = re.fullmatch(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?", inside)
    if bounds is None or bounds[1].isalpha() != bounds[2].isalpha():
        return inside.split(",") if "," in inside else []
    low, high = (ord(text) if text.isalpha() else int(text) for text in bounds.groups()[:2])
    step = abs(int(bounds[3] or 1)) or 1
    numbers = range(low, high + 1, step) if low <= high else range(low, high - 1, -step)
    if bounds[1].isalpha():
        return list(map(chr, numbers))
    is_padded = any(
        len(digits) > 1 and digits[0] == "0"
        for digits in (bounds[1].lstrip("-"), bounds[2].lstrip("-"))
    )
    return [
        f"{number:0{max(map(len, bounds.groups()[:2])) if is_padded else 0}d}" for number in numbers
    ]


# ---- logging in ----------------------------------------------------------------------------------


def credentials(url: str) -> dict[str, str]:
    """The headers that log in at the host of a http(s) URL; {} where nobody gave any. To be asked
    again for the host of a redirect.

    Raises ShardError for a VIT_HTTP_HEADER or `.netrc` that cannot be read.
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
        _keep_secret(value, value.rpartition(" ")[2])
    if headers and parts.scheme == "http" and not _is_local(parts.hostname or ""):
        _warn_of_plain_text(parts.netloc.rpartition("@")[2])
    return headers


def login_hint(url: str) -> str:
    """What to do, in words, where a server answers 401 or 403 to `url`."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    ways = (
        f"a login for {host} in ~/.netrc, or {HEADER_VARIABLE}='{host} Authorization: Bearer ...'"
    )
    ways += ", or HF_TOKEN" if _is_hugging_face(host) else ""
    if credentials(url) or parts.query:
        return "the login that was sent is not accepted, or has run out, or there is no such file"
    if parts.netloc in _lost_login:
        return (
            "the login that its address had is recorded nowhere: give data.root=... (--data of"
            f" eval.py) with it once more, or {ways}"
        )
    return f"it wants a login, or there is no such file: give {ways} (docs/data.md)"


def _basic(user: str, password: str) -> dict[str, str]:
    _keep_secret(password or user)
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def _from_userinfo(parts: urllib.parse.SplitResult) -> dict[str, str]:
    userinfo = parts.netloc.rpartition("@")[0]
    user, _, password = userinfo.partition(":")
    return _basic(*map(urllib.parse.unquote, (user, password))) if userinfo else {}


def _from_variable(parts: urllib.parse.SplitResult) -> dict[str, str]:
    headers = {}
    for line in filter(None, map(str.strip, os.environ.get(HEADER_VARIABLE, "").splitlines())):
        said = re.fullmatch(r"([\w.*\[\]:-]+)\s+([\w-]+):\s*(\S.*)", line)
        if said is None:
            example = f"{HEADER_VARIABLE}='data.example.org Authorization: Bearer ...'"
            raise ShardError(
                f"{HEADER_VARIABLE}: expected lines of a host, a header and its value, as {example}"
            )
        if any(fnmatch.fnmatchcase(host, said[1].lower()) for host in _names(parts)):
            headers[said[2]] = said[3]
    return headers


def _from_hugging_face(parts: urllib.parse.SplitResult) -> dict[str, str]:
    token = os.environ.get("HF_TOKEN", "").strip()
    is_there = token and parts.scheme == "https" and _is_hugging_face(parts.hostname or "")
    return {"Authorization": f"Bearer {token}"} if is_there else {}


def _is_hugging_face(host: str) -> bool:
    return host in ("huggingface.co", "hf.co") or host.endswith(".huggingface.co")


def _from_netrc(parts: urllib.parse.SplitResult) -> dict[str, str]:
    named = os.environ.get("NETRC")
    for file in [named] if named else ["~/.netrc", "~/_netrc"]:
        path = Path(file).expanduser()
        try:
            hosts = _netrc(path, path.stat().st_mtime_ns)
        except FileNotFoundError:
            continue
        except (OSError, netrc.NetrcParseError) as error:
            why = (
                f"line {error.lineno}: {error.msg}"
                if isinstance(error, netrc.NetrcParseError)
                else error.strerror
            )
            raise ShardError(
                f"{path}: cannot be read ({why}); mend it, or name another file with NETRC"
            ) from None
        for host in _names(parts):
            if found := hosts.get(host):
                return _basic(found[0], found[2] or "")
    return {}


@functools.lru_cache(maxsize=4)
def _netrc(path: Path, changed_ns: int) -> dict[str, tuple[str, str, str]]:
    return netrc.netrc(str(path)).hosts


def _names(parts: urllib.parse.SplitResult) -> tuple[str, str]:
    """How a host may be named: with its port, and without."""
    return parts.netloc.rpartition("@")[2].lower(), parts.hostname or ""


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


@functools.lru_cache
def _warn_of_plain_text(host: str) -> None:
    log.warning(
        "http://%s: a login is sent to it that anybody on the way can read; use https://", host
    )
