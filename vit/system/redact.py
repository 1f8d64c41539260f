"""What may be printed or recorded of a text: `***` in place of logins and other secrets.

Everything for people or for later goes through `shown`: messages, records, reports. `guard_console`
applies it to all that a process prints.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
import urllib.parse
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO

MASK = "***"
HEADER_VARIABLE = "VIT_HTTP_HEADER"

_REFERENCE = r"\$\{[A-Za-z_]\w*\}|\$[A-Za-z_]\w*"
"""Name of an environment variable in place of its value, also in the shell's form."""
_NO_SECRET = re.compile(rf"(?:{_REFERENCE}|\*\*\*|\.\.\.)+")
_WORD = r"""(?:\\[^"']|[^\s"'\\])+"""
"""A word of a shell command, possibly inside a JSON text."""
USERINFO = re.compile(r"(?<=:/)(/?)((?:[^/\s\"<>]*|[^/\s:@\"<>]+:(?!\d+(?:[/\s]|$))[^\s@\"<>]*)@)")
"""After one slash, too: so a URL looks that was taken for a path."""
_END = r"(?=[).,;:|]*(?:[\s#\"'<>\\]|::|$))"
QUERY = re.compile(r"(:/[^\s?#\"'<>\\]*)\?(?![).,;:|])([^\s#\"'<>\\]+?)" + _END)
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
    r"""(?P<before>(?<!\S)--(?:[\w-]+-)?(?:user|pass|password|cookie|token|bearer|secret|key)[ =]"""
    r"""|(?<!\S)-[uU] ?(?=\S+:))"""
    rf"""(?P<secret>"[^"]*"|'[^']*'|{_WORD})"""
)
_ASSIGNMENT = re.compile(
    rf"""(?P<before>\b\w*(?:TOKEN|CREDENTIAL|(?i:SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY))\w*=)(?P<secret>"[^"]*"|'[^']*'|{_WORD})"""
)
_SECRET_VARIABLE = re.compile(
    r"(?:SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|SAS|CONNECTION_STRING|(?:API|ACCESS|SECRET|STORAGE|ACCOUNT|PRIVATE)_?KEY)(?:_ID)?$"
    rf"|^{HEADER_VARIABLE}$",
    re.IGNORECASE,
)
UNPRINTED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode's categories of control and format characters, lone surrogates and line ends."""
_COMMANDS = re.compile(r"\x1b(?!\[[0-9;?]*[A-Za-z])|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
"""Control characters but tab, line feed, carriage return and CSI sequences: titles of windows, the
clipboard, bells."""
_known: dict[str, str] = {}
"""Secrets that this process has used, in all forms in which they are sent, with what to show."""


def shown(text: str) -> str:
    """`text` as it may be published, with `***` in place of every secret.

    Secrets are the userinfo and the query of URLs, headers and options that log in, and anywhere in
    the text what this process has used to log in or has in its environment. `${NAME}` stays.
    Idempotent.
    """
    for secret, instead in sorted(
        (_of_environment() | _known).items(), key=lambda item: -len(item[0])
    ):
        text = text.replace(secret, instead)
    if ":/" in text:
        text = USERINFO.sub(_without_userinfo, text)
        text = QUERY.sub(
            lambda found: f"{found[1]}?{found[2] if _is_shown_query(found[2]) else MASK}", text
        )
    text = _PARAMETER.sub(
        lambda found: found[0] if _NO_SECRET.fullmatch(found[2]) else f"{found[1]}{MASK}", text
    )
    for pattern in (_QUOTED_HEADER, _HEADER, _OPTION, _ASSIGNMENT):
        text = pattern.sub(_masked, text)
    return text


def shown_values(value: Any) -> Any:
    """`value` with `shown` applied to every text in its lists and dictionaries."""
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
    """Each secret in the environment with what to show for it.

    Recognised by the names of variables; a path or a switch is not a secret.
    """
    found = dict[str, str]()
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.search(name) and not value.startswith(("/", "~", ".")):
            found |= _forms(value, f"${{{name}}}")
            if name == HEADER_VARIABLE:
                for line in value.splitlines():
                    found |= _forms(line.rpartition(" ")[2], f"${{{name}}}")
    return found


def _forms(secret: str, instead: str = MASK) -> dict[str, str]:
    """The forms in which a secret is sent; {} for one that plain text may contain by chance."""
    if len(secret) < (12 if secret.isdecimal() else 6) or _NO_SECRET.fullmatch(secret):
        return {}
    quoted = {
        urllib.parse.quote(secret),
        urllib.parse.quote(secret, safe=""),
        urllib.parse.quote_plus(secret),
        urllib.parse.unquote(secret),
    }
    return dict.fromkeys({secret, *quoted}, instead)


def keep_secret(*secrets: str) -> None:
    """Never show `secrets` from here on."""
    for secret in secrets:
        _known.update(_forms(secret))


def printed(message: str) -> str:
    """Return a message for people, `shown`, without what a terminal would obey."""
    return escape_unprinted(shown(message))


def escape_unprinted(text: str) -> str:
    """Return `text` with what a terminal would obey as its escape.

    Names of files, classes and runs come from other people.
    """
    if text.isprintable():  # nearly all names
        return text
    return "".join(
        letter.encode("unicode_escape").decode()
        if unicodedata.category(letter) in UNPRINTED and letter not in "\n\t"
        else letter
        for letter in text
    )


class _Guarded:
    """A stream whose text is printed as `shown`; everything else is passed on.

    Colours and moves of the cursor pass, which progress lines are made of, and nothing else that a
    terminal obeys.

    is_view: what a full disk refuses is lost, and ends nothing; else it raises OSError.
    """

    def __init__(self, stream: TextIO, is_view: bool):
        self._stream = stream
        self._lost = (OSError,) if is_view else ()

    def write(self, text: str) -> int:
        clean = _COMMANDS.sub(lambda found: repr(found[0])[1:-1], shown(text))
        with suppress(*self._lost):
            self._stream.write(clean)
        return len(text)

    def flush(self) -> None:
        with suppress(*self._lost):
            self._stream.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard_console() -> None:
    """From here on this process prints everything as `shown`, also warnings and stack traces.

    stderr is for people: where it is a file on a full disk, what a run says is lost, and the run
    goes on. What a command prints to stdout is its result.
    """
    _open_closed_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Guarded):
            setattr(sys, name, _Guarded(stream, is_view=name == "stderr"))


def _open_closed_streams() -> None:
    """Open what this process was started without (`>&-`, some launchers), as /dev/null."""
    # The next file that is opened would get such a number, and what C++ prints would go into it.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    # Python has None in place of them, which libraries do not expect.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for good)
