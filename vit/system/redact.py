"""Replace logins and other secrets in text with `***`.

`shown` is applied to all messages, records and reports. `guard_console` masks everything that a
process prints.
"""

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
"""Matches `$NAME` and `${NAME}`, references to environment variables."""
_NO_SECRET = re.compile(rf"(?:{_REFERENCE}|\*\*\*|\.\.\.)+")
_WORD = r"""(?:\\[^"']|[^\s"'\\])+"""
"""Matches one word of a shell command, possibly inside JSON text."""
USERINFO = re.compile(
    r"(?<=:/)(?P<slash>/?)"
    r"(?P<login>(?:[^/\s\"<>]*|[^/\s:@\"<>]+:(?!\d+(?:[/\s]|$))[^\s@\"<>]*)@)"
)
"""Matches a login in a URL. A single slash before the login matches, because `Path` removes the
second slash."""
_END = r"[).,;:|]*(?:[\s#\"'<>\\]|::|$)"
"""Matches the end of a URL in a sentence, with the punctuation that follows the URL."""
QUERY = re.compile(
    rf"(?P<address>:/[^\s?#\"'<>\\]*)\?(?![).,;:|])(?P<query>[^\s#\"'<>\\]+?)(?={_END})"
)
_PARAMETER = re.compile(
    r"(?P<before>[?&](?:X-Amz-|X-Goog-|AWSAccessKeyId|GoogleAccessId|Signature|sig|(?:\w+[_-])?token|(?:\w+[_-])?key|auth|password)[\w-]*=)"
    rf"(?P<secret>[^&\s#\"'<>\\]+?)(?=&|{_END})",
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
"""The Unicode categories of control characters, format characters, lone surrogates and line
ends."""
_COMMANDS = re.compile(r"\x1b(?!\[[0-9;?]*[A-Za-z])|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
"""Matches control characters (window titles, clipboard, bells), except tab, line feed, carriage
return and CSI sequences."""
_LONG_LINE = re.compile(r"(?m)^(.{1200}).+(.{600})$")
"""Matches a line that would fill a screen. Such a line is cut, but its end is kept, because a
message ends with the remedy."""
_known: dict[str, str] = {}
"""Maps every encoding of the secrets that this process has used to its replacement."""


def shown(text: str) -> str:
    """Return `text` with every secret replaced by `***`.

    Secrets are the userinfo and query of URLs, headers and options with credentials, and all
    secrets that this process has used or has in its environment. `${NAME}` is kept. Applying the
    function twice has no further effect.
    """
    secrets = _of_environment() | _known
    # A secret may be part of a longer one, so replace the longest first.
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, secrets[secret])

    if ":/" in text:
        text = USERINFO.sub(_without_userinfo, text)
        text = QUERY.sub(_without_query, text)

    for pattern in (_PARAMETER, _QUOTED_HEADER, _HEADER, _OPTION, _ASSIGNMENT):
        text = pattern.sub(_masked, text)
    return text


def shown_values(value: object) -> Any:
    """Return `value` with `shown` applied to every string in its lists and dictionaries."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, dict):
        return {key: shown_values(inner) for key, inner in value.items()}
    return [shown_values(inner) for inner in value] if isinstance(value, list | tuple) else value


def _without_userinfo(match: re.Match[str]) -> str:
    """Return the text of a USERINFO match with the login masked, unless the login is only a
    variable."""
    login = match["login"]
    user, has_password, password = login.removesuffix("@").partition(":")
    is_harmless = MASK not in login and _NO_SECRET.fullmatch(password if has_password else user)
    return match[0] if is_harmless else f"{match['slash']}{MASK}@"


def _without_query(match: re.Match[str]) -> str:
    """Return the text of a QUERY match with the query masked, unless all its values are
    variables."""
    values = [part.partition("=")[2] or part for part in match["query"].split("&")]
    is_harmless = MASK not in match["query"] and all(map(_NO_SECRET.fullmatch, values))
    return match[0] if is_harmless else f"{match['address']}?{MASK}"


def _masked(match: re.Match[str]) -> str:
    """Return a match's text with the group `secret` masked, unless the secret is only a
    variable."""
    secret = re.sub(
        r"^(?:Basic|Bearer|Token|Digest|ApiKey)\s+",
        "",
        match["secret"].strip("\"'"),
        flags=re.IGNORECASE,
    )
    return match[0] if not secret or _NO_SECRET.fullmatch(secret) else f"{match['before']}{MASK}"


def _of_environment() -> dict[str, str]:
    """Return a dict that maps each secret in the environment to its replacement.

    Variable names determine which values are secrets. A path is never a secret.
    """
    replacements = dict[str, str]()
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.search(name) and not value.startswith(("/", "~", ".")):
            replacements |= _forms(value, f"${{{name}}}")
            if name == HEADER_VARIABLE:
                for line in value.splitlines():
                    replacements |= _forms(line.rpartition(" ")[2], f"${{{name}}}")
    return replacements


def _forms(secret: str, instead: str = MASK) -> dict[str, str]:
    """Return a dict that maps every encoding of `secret` to `instead`.

    The dict is empty if the secret is so short that other text may contain it by coincidence.
    """
    if len(secret) < (12 if secret.isdecimal() else 6) or _NO_SECRET.fullmatch(secret):
        return {}

    forms = {
        secret,
        urllib.parse.quote(secret),
        urllib.parse.quote(secret, safe=""),
        urllib.parse.quote_plus(secret),
        urllib.parse.unquote(secret),
    }
    return dict.fromkeys(forms, instead)


def keep_secret(*secrets: str) -> None:
    """Make `shown` replace `secrets` from now on."""
    for secret in secrets:
        _known.update(_forms(secret))


def printed(message: str) -> str:
    """Return `message` with secrets masked, control characters escaped, and long lines cut."""
    return _LONG_LINE.sub(r"\1 [...] \2", escape_unprinted(shown(message)))


def escape_unprinted(text: str) -> str:
    """Return `text` with the control characters escaped that a terminal would interpret.

    The names of files, classes and runs may come from untrusted sources.
    """
    if text.isprintable():  # a fast path for almost all names
        return text
    return "".join(
        letter.encode("unicode_escape").decode()
        if unicodedata.category(letter) in UNPRINTED and letter not in "\n\t"
        else letter
        for letter in text
    )


def escape_to_one_line(text: str) -> str:
    """Return `text` like `escape_unprinted`, with line breaks and tabs escaped as well."""
    return escape_unprinted(text).replace("\n", r"\n").replace("\t", r"\t")


class _Guarded:
    """A stream that masks secrets in text, and forwards everything else to `stream`.

    Control sequences are escaped, except colors and cursor movements, which progress lines need.
    Characters that the stream cannot encode are escaped as well.

    is_view: whether to ignore failed writes, for example to a full disk, instead of raising
    OSError.
    """

    def __init__(self, stream: TextIO, is_view: bool):
        self._stream = stream
        self._lost = (OSError,) if is_view else ()

    def write(self, text: str) -> int:
        """Write `text` without secrets and control characters. Return its length."""
        clean = _COMMANDS.sub(lambda match: repr(match[0])[1:-1], shown(text))
        encoding = self._stream.encoding or "utf-8"
        clean = clean.encode(encoding, "backslashreplace").decode(encoding)
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
    """Mask secrets in everything that this process prints, including warnings and stack traces.

    Characters that the stream cannot encode, such as a class name on an ASCII terminal, are printed
    as escape sequences. If stderr is a file on a full disk, its text is lost and the run continues.
    A failed write to stdout is an error, because stdout contains the result of a command.
    """
    _open_closed_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Guarded):
            setattr(sys, name, _Guarded(stream, is_view=name == "stderr"))


def _open_closed_streams() -> None:
    """Open standard streams that are closed (`>&-`, some launchers) as /dev/null."""
    # Otherwise the next opened file would get the descriptor of a standard stream, and C++
    # libraries would print into that file.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    # Python sets closed streams to None, which libraries do not expect.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for good)
