"""Read files on the web, and resume a transfer after the connection breaks.

A `WebFile` requests a range of bytes and returns them as they arrive. If the connection ends,
stalls or takes too long, the remaining bytes are requested on a new connection, within the limits
of `vit.system.retry`. The first response contains the file's version (size, ETag), and later
responses must have the same version. Each response is read exactly to the last requested byte, so
that the connection can be reused.

The module uses urllib3, which is thread-safe. A forked process opens new connections.
"""

from __future__ import annotations

import errno
import io
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vit.data.shards.reader import Version
from vit.data.storage.http_request import get, reason_of
from vit.system.files import ShardError
from vit.system.redact import shown
from vit.system.retry import RetryableError, RetryPolicy, note_progress
from vit.system.urls import address, login_hint

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

PIECE_BYTES = 1 << 20
CONNECT_S = 10.0
"""The maximum time in seconds to wait for a connection."""
SILENCE_S = 30.0
"""The maximum time in seconds to wait for the next byte."""
ATTEMPT_S = 120.0
"""The maximum time in seconds for one request. The next request resumes where it stopped."""
SLOWEST_BYTES_PER_S = 1000
"""The minimum transfer speed. A transfer fails if it is slower than this during an entire period of
the retry limit."""

RETRYABLE_STATUS = {408, 425, 429, *range(500, 600)} - {501, 505}
"""Status codes of temporary errors. Proxies use their own codes, so all 5xx codes except "not
implemented" and "version not supported" are included."""
COMPRESSIONS = {"gzip", "x-gzip", "deflate", "br", "zstd", "compress"}
"""Values of Content-Encoding that change the bytes of a file. S3's `aws-chunked` does not."""


class Refused(ShardError):
    """The server refused the request with a `status` for which retries are useless."""

    status: int


def replaced(was: Version, now: Version) -> OSError:
    """Return the error to raise for a file whose version has changed."""
    message = f"the file was replaced at its URL while in use (before: {was}, now: {now})"
    if was.size == now.size:
        message += (
            ", or several servers behind this address return different tags (ETag) for the same"
            " file, which is an error"
        )
    return OSError(errno.ESTALE, message)


class WebFile(io.RawIOBase):
    """The bytes [start, stop) of a file, read once from start to end."""

    version: Version | None
    """The version of the file; None before the first response, unless passed by the caller."""

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
        """Prepare to read a range of bytes. The first read sends the first request.

        Args:
            url, name: The URL of a folder and a file name in it, or the URL of a file and "".
            stop: The end of the range; None for the end of the file.
            version: The expected version; a different one is an error.
            parts_only: Fail if the server sends the entire file instead of the requested range.
            while_waiting: See `RetryPolicy.call`.
        """
        self.url = url
        self.name = name
        self.retry = retry
        self.at = start
        """The file offset of the next byte to return."""
        self.stop = stop
        self.version = version
        self.parts_only = parts_only
        self._where = shown(address(url, name))
        self._while_waiting = while_waiting

        self._response: BaseHTTPResponse | None = None
        self._is_whole = False
        """Whether the response contains the entire file, regardless of the requested range."""
        self._position = 0
        """The file offset of the response's next byte."""
        self._end: int | None = None
        """The file offset at which the response ends; None if unknown."""

        # Measure only the time spent waiting for the network. The reader's own work has no time
        # limit.
        self._waited_s = 0.0
        self._attempt_s = 0.0
        """The value of `_waited_s` when this attempt started."""
        self._mark_s, self._mark_at = 0.0, start
        """The values of `_waited_s` and `at` when the speed was last checked."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into `buffer`, and return how many were read; 0 at the end."""
        piece = self.read1(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def read1(self, most: int = PIECE_BYTES) -> bytes:
        """Return the next bytes as they arrive, b"" at the end.

        Raises FileNotFoundError, OSError if the file was replaced, and ShardError if all retries
        failed.
        """
        while self.at != self.stop:
            began_s = time.monotonic()
            piece = self.retry.call(self._where, lambda: self._next(most), self._while_waiting)
            # Limit the measured time: a longer wait means that this process was suspended.
            self._waited_s += min(time.monotonic() - began_s, CONNECT_S + SILENCE_S)
            if not piece:
                break

            note_progress()
            # A response with the entire file begins before the first byte to return.
            num_unwanted = max(self.at - self._position, 0)
            self._position += len(piece)
            if self._position == self._end:
                self._end_answer()
            if num_unwanted < len(piece):
                self.at = self._position
                return piece[num_unwanted:]

        return b""

    def close(self) -> None:
        """Stop the transfer, even if it is incomplete."""
        self._end_answer()
        super().close()

    def open(self) -> Version:
        """Return the version of the file, sending a request if it is unknown."""
        if self._response is None and self.version is None:
            self.retry.call(self._where, self._request, self._while_waiting)
        assert self.version is not None
        return self.version

    # ---- one attempt ----

    def _next(self, most: int) -> bytes:
        """Return the next bytes of the response, b"" at the end. Raises RetryableError."""
        import urllib3

        if self._response is None:
            self._request()
            if self._response is None:  # no bytes remain
                return b""
        elif self._waited_s - self._attempt_s > ATTEMPT_S and not self._is_whole:
            self._end_answer()
            self._request()

        if self._end is not None:
            most = min(most, self._end - self._position)
        try:
            piece: bytes = self._response.read1(most, decode_content=False)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self._end_answer()
            raise RetryableError(
                f"the connection broke ({reason_of(error)}) {self._progress()}"
            ) from error

        if not piece:
            self._end_answer()
            if self._end is not None:
                raise RetryableError(f"the connection ended {self._progress()}")
            self.stop = self.at  # The response has no length, so the file ends here.

        return piece

    def _request(self) -> None:
        """Send a request for the remaining bytes, and check the response."""
        # Check the speed at the first request after every `retry.limit_s` seconds of waiting.
        elapsed_s = self._waited_s - self._mark_s
        if elapsed_s > self.retry.limit_s:
            num_bytes = self.at - self._mark_at
            if num_bytes < SLOWEST_BYTES_PER_S * elapsed_s:
                raise ShardError(
                    f"{self._where}: only {num_bytes} bytes arrived in {elapsed_s:.0f} s; check"
                    " the network, then start again"
                )
            self._mark_s, self._mark_at = self._waited_s, self.at

        requested = f"bytes={self.at}-{'' if self.stop is None else self.stop - 1}"
        response = get(
            self.url,
            self.name,
            {"Range": requested} if self.at or self.stop is not None else {},
            was_there=self.version is not None,
            connect_s=CONNECT_S,
            silence_s=SILENCE_S,
        )

        try:
            size = self._check_answer(response, requested)
            self._check_version(response, size)
        except BaseException:
            response.close()
            raise

        if self.stop is None and size >= 0:
            self.stop = size
        self._attempt_s = self._waited_s
        if response.status == 416 or self._position == self._end:
            response.close()
        else:
            self._response = response

    def _check_answer(self, response: BaseHTTPResponse, requested: str) -> int:
        """Store the response's position in the file, and return the file's size, -1 if unknown.

        Raises RetryableError if a retry may help, else another error. requested: the range.
        """
        encoding = response.headers.get("Content-Encoding", "")
        is_compressed = encoding in COMPRESSIONS and response.status in (200, 206)
        # Without `name`, the file is a stream or an archive, which may be compressed, so skip this
        # check.
        if self.name and is_compressed:
            raise ShardError(
                f"{self._where}: the server compresses the file (Content-Encoding: {encoding}),"
                " even though the request forbids it (Accept-Encoding: identity): switch off"
                " compression for this folder"
            )

        self._is_whole = response.status == 200
        if self._is_whole:
            return self._accept_whole(response)
        return self._accept_part(response, requested)

    def _accept_whole(self, response: BaseHTTPResponse) -> int:
        """Do the work of `_check_answer` for a response with the entire file."""
        length = response.headers.get("Content-Length", "")
        size = int(length) if length.isdecimal() else -1
        self._position = 0
        self._end = size if size >= 0 else None

        if self.parts_only and size != 0:
            problem = "the server does not serve parts of files (it ignores Range)"
            if self.version is not None:
                raise RetryableError(problem)
            raise ShardError(
                f"{self._where}: {problem}, which reading individual images requires; copy the"
                " shards to a disk, or stream them with stream.urls, which is not exactly"
                " reproducible"
            )
        return size

    def _accept_part(self, response: BaseHTTPResponse, requested: str) -> int:
        """Do the work of `_check_answer` for a response with a range of bytes, or without any
        bytes."""
        # "bytes FIRST-LAST/SIZE"; "*" stands for an unknown size, or for a range without bytes.
        content_range = re.fullmatch(
            r"bytes (?:(?P<first>\d+)-(?P<last>\d+)|\*)/(?P<size>\d+|\*)",
            response.headers.get("Content-Range", ""),
        )
        size_text = content_range["size"] if content_range else "*"
        size = -1 if size_text == "*" else int(size_text)
        if response.status == 416:
            if self.at < size:
                raise RetryableError(
                    f"the server reports that the file ends before byte {self.at}, but also that it"
                    f" has {size} bytes"
                )
            return size
        if response.status != 206:
            raise self._refusal(response)

        is_size_missing = size < 0 and self.parts_only
        first_text, last_text = content_range.group("first", "last") if content_range else ("", "")
        if not first_text or is_size_missing:
            raise ShardError(
                f"{self._where}: the server does not report the size of the file; serve the shards"
                " from another server"
            )

        first, last = int(first_text), int(last_text)
        stop = last + 1 if self.stop is None else self.stop
        if not self.at == first <= last < stop:
            raise RetryableError(f"the server sent bytes {first} to {last} instead of {requested}")
        self._position = first
        self._end = last + 1
        return size

    def _check_version(self, response: BaseHTTPResponse, size: int) -> None:
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
        now = Version(size, tag)
        if self.version not in (None, now):
            error = replaced(self.version, now)
            raise RetryableError(str(error.strerror), final=error)
        self.version = now

    def _refusal(self, response: BaseHTTPResponse) -> Exception:
        """Return the error to raise for a response that does not contain the file.

        If the file has been read before, the error is temporary, because a token may be about to be
        renewed.
        """
        reason = f"the server answers {response.status} {response.reason}"
        retry_after_s = _retry_after_s(response)
        if response.status in RETRYABLE_STATUS:
            return RetryableError(reason, retry_after_s)

        if response.status in (404, 410):
            final: Exception = FileNotFoundError(errno.ENOENT, "no such file on the server")
        else:
            hint = login_hint(self.url) if response.status in (401, 403) else "correct the address"
            final = Refused(f"{self._where}: {reason}; {hint}")
            final.status = response.status
        return final if self.version is None else RetryableError(reason, retry_after_s, final)

    def _end_answer(self) -> None:
        if self._response is not None and self._response.connection is not None:
            # A response that was not read to the end prevents its connection from being reused.
            self._response.close()
        self._response = None

    def _progress(self) -> str:
        return f"at byte {self.at:,}{'' if self.stop is None else f' of {self.stop:,}'}"


class WebFolder:
    """The files directly below `<url>/`. The object is thread-safe, and is pickled as its URL."""

    def __init__(self, url: str, retry: RetryPolicy | None = None):
        self.url = url.rstrip("/")
        self.retry = retry or RetryPolicy()

    def __str__(self) -> str:
        return shown(self.url)

    def list(self) -> dict[str, Version]:
        """Return {}, because web servers do not list files."""
        return {}

    def stat(
        self, name: str, while_waiting: Callable[[], None] | None = None, parts_only: bool = True
    ) -> Version:
        """Return the version of a file. Raises FileNotFoundError.

        Requests only the first byte, to detect servers that ignore byte ranges.
        """
        with WebFile(
            self.url, name, self.retry, stop=1, parts_only=parts_only, while_waiting=while_waiting
        ) as file:
            if parts_only:
                file.read1()  # read to the end to reuse the connection
            return file.open()

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Return bytes [start, stop) of a file.

        Raises OSError if the file was removed or replaced, and ShardError.
        """
        with WebFile(
            self.url, name, self.retry, start=start, stop=stop, version=version, parts_only=True
        ) as file:
            return b"".join(iter(file.read1, b""))


def _retry_after_s(response: BaseHTTPResponse) -> float | None:
    import urllib3

    try:
        return urllib3.Retry().get_retry_after(response)  # parses seconds and dates
    except urllib3.exceptions.InvalidHeader:
        return None
