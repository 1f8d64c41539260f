"""Send GET requests, with redirects, credentials and proxies, and classify failures."""

from __future__ import annotations

import functools
import os
import socket
import ssl
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

from vit.system.files import ShardError
from vit.system.redact import shown
from vit.system.retry import RetryableError
from vit.system.urls import address, credentials, on_the_web

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

NUM_CONNECTIONS = 16
"""The number of connections per server that a process keeps open."""
MAX_REDIRECTS = 5
NUM_CLOSED = 9
"""The number of attempts (about 70 s) to reach a port that has never responded, because the server
may still be starting."""
HEADERS = {"User-Agent": "vit", "Accept-Encoding": "identity"}


def get(
    url: str,
    name: str,
    headers: dict[str, str],
    *,
    was_there: bool,
    connect_s: float,
    silence_s: float,
) -> BaseHTTPResponse:
    """Return the response to a GET request after redirects. Its content is not read yet.

    Each server receives only its own credentials. Raises RetryableError or ShardError.

    Args:
        url, name: See `address`.
        was_there: Whether the server has responded before. If so, an unknown host means an outage,
            not a typo.
        connect_s: The time limit for connecting.
        silence_s: The time limit for the next byte.
    """
    import urllib3  # not needed for shards on a local disk

    timeout = urllib3.Timeout(connect=connect_s, read=silence_s)
    target = address(url, name)
    login = credentials(url)

    for _ in range(MAX_REDIRECTS + 1):
        try:
            response = pool(os.getpid(), _proxy(target)).request(
                "GET",
                target,
                headers=HEADERS | headers | login,
                timeout=timeout,
                preload_content=False,
                redirect=False,
                retries=False,
            )
        except urllib3.exceptions.LocationValueError as error:
            raise ShardError(f"{shown(target)}: {error}; correct the address") from error
        except urllib3.exceptions.HTTPError as error:
            raise _unreachable(target, error, was_there or _server(target) in _answered) from error

        server = _server(target)
        _answered.add(server)
        location = response.get_redirect_location()
        if not location:
            return response

        response.close()
        target = urllib.parse.urljoin(target, location)
        if not on_the_web(target):
            raise ShardError(
                f"{shown(address(url, name))}: redirected to {shown(target)}, which is not followed"
                " because it is not a web address; correct the address"
            )

        # Do not send a URL's login to another server after a redirect.
        login = credentials(target) or (login if _server(target) == server else {})
        target = address(target)

    raise ShardError(
        f"{shown(address(url, name))}: too many redirects, the last one to {shown(target)}; correct"
        " the address"
    )


_answered = set[tuple[str, str]]()
"""The servers that have responded to this process, as returned by `_server`."""


def _server(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc


def _unreachable(url: str, error: Exception, was_there: bool) -> Exception:
    """Return the error to raise for a request without a response.

    If the server has never responded, retries end early, because the address is probably wrong.
    """
    inner = error.args[0] if error.args else None
    cause = error.__cause__
    if isinstance(inner, ssl.SSLCertVerificationError):
        return ShardError(
            f"{shown(url)}: {error}; check the clock and the installed CA certificates"
        )

    reason = f"cannot be reached ({reason_of(error)})"
    if was_there:
        return RetryableError(reason)

    if isinstance(inner, ssl.SSLError) and inner.reason == "WRONG_VERSION_NUMBER":
        return ShardError(f"{shown(url)}: the server does not use TLS at this port; try http://")
    if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
        final = ShardError(
            f"{shown(url)}: the host is unknown; correct the address, or check the network of"
            " this machine"
        )
        return RetryableError(reason, final=final)
    if isinstance(cause, ConnectionRefusedError):
        final = ShardError(
            f"{shown(url)}: no server listens at this port (connection refused); correct the"
            " address, or start the server"
        )
        return RetryableError(reason, final=final, num_refusals=NUM_CLOSED)
    return RetryableError(reason)


def _proxy(url: str) -> str | None:
    parts = urllib.parse.urlsplit(url)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    return urllib.request.getproxies().get(parts.scheme)


@functools.cache
def pool(pid: int, proxy: str | None) -> Any:
    """Return the connections of process `pid`. Forked processes must not share connections."""
    import urllib3

    if proxy:
        return urllib3.ProxyManager(proxy, maxsize=NUM_CONNECTIONS)
    return urllib3.PoolManager(maxsize=NUM_CONNECTIONS)


def reason_of(error: Exception) -> str:
    """Return the cause of a urllib3 error, without urllib3's additional text."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    return shown(str(cause).rpartition("): ")[2])
