"""Run a proxy in front of a real S3 server, so that tests can decide the outcome of each
request."""

from __future__ import annotations

import http.client
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from servers import forget_clients


class Way:
    """A proxy that injects faults into the requests to an S3 server. In the environment, the
    proxy's address replaces the server's address.

    `fault` is called with the method and path of each request. If `fault` returns None, the request
    succeeds. If `fault` returns a status and an S3 error code such as "503 SlowDown", the request
    fails with this error. "cut" closes the connection in the middle of the body, and "hold" blocks
    the request until `let_go` is set.

    `requests` lists all requests in order of arrival.
    """

    def __init__(self, port: int):
        self.server_port = port
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self.is_holding = threading.Event()
        self.let_go = threading.Event()
        handler = type("Handler", (_Passes,), {"way": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Way:
        self._environment = pytest.MonkeyPatch()
        self._environment.setenv("AWS_ENDPOINT_URL", self.url)
        forget_clients()
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        self._server.shutdown()
        self._server.server_close()
        self._environment.undo()
        forget_clients()

    def is_good(self) -> None:
        self.fault = lambda method, path: None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Passes(BaseHTTPRequestHandler):
    way: Way
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _pass_on(self) -> None:
        proxy = self.way
        proxy.requests.append((self.command, self.path))
        fault = proxy.fault(self.command, self.path)
        if fault == "cut":
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self._body()
        if fault == "hold":
            proxy.is_holding.set()
            proxy.let_go.wait()
        elif fault:
            status, _, code = fault.partition(" ")
            text = f"<Error><Code>{code}</Code><Message>{code} it is</Message></Error>".encode()
            self._answer(int(status), [("Content-Type", "application/xml")], text)
            return
        server = http.client.HTTPConnection("127.0.0.1", proxy.server_port, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
        server.request(self.command, self.path, body, headers)
        answer = server.getresponse()
        content = answer.read()
        self._answer(answer.status, answer.getheaders(), content)
        server.close()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        with suppress(ConnectionError):  # ignore connections of killed clients
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in (*_HOP, "content-length") or self.command == "HEAD":
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on


_HOP = ("connection", "keep-alive", "transfer-encoding", "expect")
