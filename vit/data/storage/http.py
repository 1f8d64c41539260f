"""Files on the web: one client, whose transfers go on where a connection broke off. Free of torch.

The data's story: a `WebFile` asks for a range of bytes and gives them in pieces as they come. When
the connection ends, falls silent or takes too long, the rest is asked for on another one;
`vit.data.storage.retry` says for how long without a byte. The first answer tells the file's
version (size, ETag), and later ones must be of that version. An answer is read to the byte that was
asked for and no further.

By urllib3, whose answers show what was understood (ranges, ETag). Any number of threads; a forked
process opens its own connections.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import os
import re
import socket
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

from vit.data.storage.retry import NUM_REFUSALS, RetryableError, RetryPolicy, note_progress
from vit.system.files import ShardError
from vit.system.urls import address, credentials, login_hint, shown

PIECE_BYTES = 1 << 20
NUM_CONNECTIONS = 16
"""Kept open to a server by one process."""
CONNECT_S = 10.0
SILENCE_S = 30.0
ATTEMPT_S = 120.0
"""How long an attempt may take to connect, without a byte arriving, and in all; then another goes
on where it stopped."""
SLOWEST_BYTES_PER_S = 1000
"""What is slower for as long as patience lasts is told as not answering."""
MOST_REDIRECTS = 5
NUM_CLOSED = 9
"""Attempts (some 70 s) at a port where nothing has answered yet: the server may be starting."""
RETRYABLE_STATUS = {408, 425, 429, *range(500, 600)} - {501, 505}
"""Answers that a later attempt may not get. Of 5xx all, as proxies have numbers of their own, but
not "I cannot do that"."""
HEADERS = {"User-Agent": "vit", "Accept-Encoding": "identity"}


class Version(NamedTuple):
    """What a server tells of a file: its size in bytes, -1 if it does not tell, and a tag that
    differs from version to version."""

    size: int
    tag: str

    def digest(self) -> str:
        """For file names."""
        return hashlib.sha256(f"{self.size} {self.tag}".encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.size} bytes" + (f" with the tag {self.tag}" if self.tag else "")


class Refused(ShardError):
    """The server answers with a `status` that another attempt would meet, too."""

    status: int


def replaced(was: Version, now: Version) -> OSError:
    """What to raise when a file is of another version than before."""
    told = f"it was replaced at its URL while it was in use (it had {was}, now it has {now})"
    if was.size == now.size:
        told += (
            ", or several servers share the address and give one file different tags (ETag), which"
            " they must not"
        )
    return OSError(errno.ESTALE, told)


def on_the_web(url: str) -> bool:
    """Whether a URL is for this client."""
    return url.startswith(("http://", "https://"))


class WebFile(io.RawIOBase):
    """Bytes [start, stop) of a file, or all from `start` on, to be read once from the beginning to
    the end."""

    version: Version | None
    """Known from the first answer on, if it was not given."""

    def __init__(
        self,
        url: str,
        name: str,
        retry: RetryPolicy,
        *,
        start: int = 0,
        stop: int | None = None,
        version: Version | None = None,
        parts_only: bool = False,
        while_waiting: Callable[[], None] | None = None,
    ):
        """url: of a folder and `name` of the file in it, or of the file itself and "".

        version: of a file that is in use; another one is an error. parts_only: do not take a whole
        file to skip what is not wanted.

        while_waiting: see `RetryPolicy.call`.
        """
        self.url = url
        self.name = name
        self.retry = retry
        self.at = start
        self.stop = stop
        self.version = version
        self._where = shown(address(url, name))
        self._start = start
        self.parts_only = parts_only
        self._while_waiting = while_waiting
        self._response: Any = None
        self._is_whole = False
        """The answer is the file from its beginning, whatever was asked for."""
        # type: int, int | None
        self._given = 0
        self._until: int | None = None
        """Where in the file the answer's next byte is, and where its last byte ends."""
        self._waited_s = 0.0
        self._attempt_s = 0.0
        """How long the network has kept its reader waiting, in all, and when this attempt began;
        what the reader takes does not count."""
        self._mark_s = 0.0
        self._mark_at = start

    def readable(self) -> bool:
        """For `io.BufferedReader`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next bytes, 0 at the end."""
        piece = self.read1(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def read1(self, most: int = PIECE_BYTES) -> bytes:
        """The next bytes as they come, at most so many; b"" at the end. Raises FileNotFoundError,
        OSError for a file that was replaced, ShardError for what patience does not mend."""
        while self.at != self.stop:
            began_s = time.monotonic()
            piece = self.retry.call(self._where, lambda: self._next(most), self._while_waiting)
            # more is what this process was suspended for
            self._waited_s += min(time.monotonic() - began_s, CONNECT_S + SILENCE_S)
            if not piece:
                break
            note_progress()
            first = self._given
            self._given = self._given + len(piece)
            if self._given == self._until:
                self._end_answer()
            if self._given > self.at:
                piece = piece[max(self.at - first, 0) :]
                self.at = self._given
                return piece
        return b""

    def close(self) -> None:
        """End the transfer, at its end or before."""
        self._end_answer()
        super().close()

    def open(self) -> Version:
        """Ask, if that was not done; the file's version."""
        if self._response is None and self.version is None:
            self.retry.call(self._where, self._ask, self._while_waiting)
        assert self.version is not None
        return self.version

    # ---- one attempt ----

    def _next(self, most: int) -> bytes:
        import urllib3

        if self._response is None:
            self._ask()
            if self._response is None:
                return b""
        elif self._waited_s - self._attempt_s > ATTEMPT_S and not self._is_whole:
            self._end_answer()
            self._ask()
        try:
            piece = self._response.read1(
                most if self._until is None else min(most, self._until - self._given),
                decode_content=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self._end_answer()
            raise RetryableError(
                f"the connection broke ({_reason(error)}) {self._progress()}"
            ) from error
        if not piece:
            self._end_answer()
            if self._until is not None:
                raise RetryableError(f"the connection ended {self._progress()}")
            self.stop = self.at  # nobody knows better
        return piece

    def _ask(self) -> None:
        came = self.at - self._mark_at
        elapsed_s = self._waited_s - self._mark_s
        if elapsed_s > self.retry.limit_s:
            if came < SLOWEST_BYTES_PER_S * elapsed_s:
                raise ShardError(
                    f"{self._where}: only {came} bytes came in {elapsed_s:.0f} s; check the"
                    " network, then start again"
                )
            self._mark_s = self._waited_s
            self._mark_at = self.at
        wanted = f"bytes={self.at}-{'' if self.stop is None else self.stop - 1}"
        headers = {"Range": wanted} if self.at or self.stop is not None else {}
        response = _get(self.url, self.name, headers, was_there=self.version is not None)
        try:
            self._understand(response, wanted)
        except BaseException:
            response.close()
            raise
        self._attempt_s = self._waited_s

    def _understand(self, response: Any, wanted: str) -> None:
        """Take an answer. Raises RetryableError or what will not pass."""
        self._is_whole = response.status == 200
        told = re.fullmatch(
            r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", response.headers.get("Content-Range", "")
        )
        length = response.headers.get("Content-Length", "")
        size = int(told[3]) if told and told[3] != "*" else -1
        if response.status == 206 and told and told[1] and (size >= 0 or not self.parts_only):
            first, last = int(told[1]), int(told[2])
            if first != self.at or last < first or (self.stop is not None and last >= self.stop):
                raise RetryableError(
                    f"it gives bytes {first} to {last} where {wanted} was asked for"
                )
            self._given = first
            self._until = last + 1
        elif response.status == 416:
            if self.at < size:
                raise RetryableError(
                    f"it says that the file ends before byte {self.at}, and that it has {size}"
                )
        elif self._is_whole:
            size = int(length) if length.isdecimal() else -1
            self._given = 0
            self._until = size if size >= 0 else None
        elif response.status == 206:
            raise ShardError(
                f"{self._where}: the server does not tell the size of the file; serve the shards"
                " with another one"
            )
        else:
            raise self._refusal(response)
        if self._is_whole and self.parts_only and size != 0:
            whole = "the server does not give parts of files (it ignores Range)"
            if self.version is not None:
                raise RetryableError(whole)
            raise ShardError(
                f"{self._where}: {whole}, which reading at random needs; copy the shards to a disk,"
                " or stream them with data.reader: webdataset, which is not exact"
            )
        now = Version(
            size, response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
        )
        if self.version not in (None, now):
            was_replaced = replaced(self.version, now)
            raise RetryableError(str(was_replaced.strerror), final=was_replaced)
        self.version = now
        if self.stop is None and size >= 0:
            self.stop = size
        if response.status == 416 or self._given == self._until:
            response.close()
            return
        self._response = response

    def _refusal(self, response: Any) -> Exception:
        """What to raise for an answer that is not the file. Of a file in use it may pass: a token
        that is just being renewed."""
        said = f"the server answers {response.status} {response.reason}"
        retry_after_s = _retry_after_s(response)
        if response.status in RETRYABLE_STATUS:
            return RetryableError(said, retry_after_s)
        final: Exception
        if response.status in (404, 410):
            final = FileNotFoundError(errno.ENOENT, "no such file on the server")
        else:
            hint = login_hint(self.url) if response.status in (401, 403) else "correct the address"
            final = Refused(f"{self._where}: {said}; {hint}")
            final.status = response.status
        return final if self.version is None else RetryableError(said, retry_after_s, final)

    def _end_answer(self) -> None:
        # not read to its end: the connection is of no use
        if self._response is not None and self._response.connection is not None:
            self._response.close()
        self._response = None

    def _progress(self) -> str:
        return (
            f"after {self.at - self._start:,}"
            f" {'' if self.stop is None else f'of {self.stop - self._start:,} '}bytes"
        )


class WebFolder:
    """The files directly at `<url>/`. Any number of threads; pickled as its URL."""

    def __init__(self, url: str, retry: RetryPolicy | None = None):
        self.url = url.rstrip("/")
        self.retry = retry or RetryPolicy()

    def __str__(self) -> str:
        return shown(self.url)

    def list(self) -> dict[str, Version]:
        """The web has no lists."""
        return {}

    def stat(
        self, name: str, while_waiting: Callable[[], None] | None = None, parts_only: bool = True
    ) -> Version:
        """Size and tag, by asking for the first byte: servers that know no ranges are found out at
        once. Raises FileNotFoundError."""
        with WebFile(
            self.url, name, self.retry, stop=1, parts_only=parts_only, while_waiting=while_waiting
        ) as file:
            if parts_only:
                file.read1()  # and the connection can be used again
            return file.open()

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Bytes [start, stop). Raises OSError if the file is gone or of another version,
        ShardError."""
        with WebFile(
            self.url, name, self.retry, start=start, stop=stop, version=version, parts_only=True
        ) as file:
            return b"".join(iter(file.read1, b""))


def _get(url: str, name: str, headers: dict[str, str], was_there: bool) -> Any:
    """The answer to a GET, after redirections, none of it read. Each server is given its own
    credentials and nobody else's.

    was_there: the server has answered before, so a name that nobody knows now is an outage and no
    misspelling.
    """
    import urllib3  # here, as shards on a disk need none of it

    timeout = urllib3.Timeout(connect=CONNECT_S, read=SILENCE_S)
    at = address(url, name)
    login = credentials(url)
    for _ in range(MOST_REDIRECTS + 1):
        try:
            response = _pool(os.getpid(), _proxy(at)).request(
                "GET",
                at,
                headers=HEADERS | headers | login,
                timeout=timeout,
                preload_content=False,
                redirect=False,
                retries=False,
            )
        except urllib3.exceptions.LocationValueError as error:
            raise ShardError(f"{shown(at)}: {error}; correct the address") from error
        except urllib3.exceptions.HTTPError as error:
            if isinstance(error.args[0] if error.args else None, ssl.SSLCertVerificationError):
                raise ShardError(
                    f"{shown(at)}: {error}; is the clock right, are the CA certificates installed?"
                ) from error
            raise _unreached(at, error, was_there or _server(at) in _answered) from error
        _answered.add(_server(at))
        location = response.get_redirect_location()
        if not location:
            return response
        response.close()
        before = _server(at)
        at = urllib.parse.urljoin(at, location)
        if not on_the_web(at):
            break
        is_same_server = _server(at) == before  # the login of an address is for all of its server
        at, login = address(at), credentials(at) or (login if is_same_server else {})
    raise ShardError(
        f"{shown(address(url, name))}: redirected again and again, at last to {shown(at)}; correct"
        " the address"
    )


_answered = set[tuple[str, str]]()
"""Servers, as `_server` gives them, from which this process has heard."""


def _server(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc


def _unreached(url: str, error: Exception, was_there: bool) -> Exception:
    """What to raise where there is no answer; what is probably a wrong address ends a start soon,
    and is an outage later."""
    inner = error.args[0] if error.args else None
    if not was_there and isinstance(inner, ssl.SSLError) and inner.reason == "WRONG_VERSION_NUMBER":
        return ShardError(f"{shown(url)}: the server speaks no TLS there; is http:// meant?")
    final = None
    num_refusals = NUM_REFUSALS
    if (
        not was_there
        and isinstance(error.__cause__, socket.gaierror)
        and error.__cause__.errno == socket.EAI_NONAME
    ):
        final = ShardError(
            f"{shown(url)}: no host of this name is known; correct the address, or look at this"
            " machine's network"
        )
    if not was_there and isinstance(error.__cause__, ConnectionRefusedError):
        told = (
            "nothing answers at this port (connection refused); correct the address, or start the"
            " server"
        )
        final = ShardError(f"{shown(url)}: {told}")
        num_refusals = NUM_CLOSED
    return RetryableError(
        f"cannot be reached ({_reason(error)})", final=final, num_refusals=num_refusals
    )


def _proxy(url: str) -> str | None:
    parts = urllib.parse.urlsplit(url)
    return (
        None
        if urllib.request.proxy_bypass(parts.hostname or "")
        else urllib.request.getproxies().get(parts.scheme)
    )


@functools.cache
def _pool(pid: int, proxy: str | None) -> Any:
    import urllib3

    return (
        urllib3.ProxyManager(proxy, maxsize=NUM_CONNECTIONS)
        if proxy
        else urllib3.PoolManager(maxsize=NUM_CONNECTIONS)
    )


def _reason(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    return shown(str(cause).rpartition("): ")[2])


def _retry_after_s(response: Any) -> float | None:
    import urllib3

    try:
        return urllib3.Retry().get_retry_after(response)  # of seconds, and of a date
    except urllib3.exceptions.InvalidHeader:
        return None
