"""Run servers on 127.0.0.1: an HTTP server with configurable faults, a Hugging Face Hub, an FTP
server and an S3 server.

`cable` and `Gate` forward connections, which tests can then interrupt.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import logging
import math
import os
import re
import socket
import socketserver
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import unquote, urlparse

import boto3
import fsspec
import pytest
from moto.server import ThreadedMotoServer


class LocalServer:
    def __init__(self, server: ThreadingHTTPServer | socketserver.ThreadingTCPServer):
        self._server = server
        self._server.daemon_threads = True

    def __enter__(self) -> Self:
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class WebServer(LocalServer):
    """A context manager that serves `files` ({"/path": bytes}) over HTTP with ranges and ETags.

        with WebServer({"/a.bin": data}) as server:
            server.cuts = [1000, 5000]     # the first two GET responses end after this many bytes
            download(f"{server.url}/a.bin", path)

    `statuses` lists status codes that are sent instead of files, one per GET. If `ranges` is False,
    the server ignores the Range header. If `lengths` is False, the server omits Content-Length.
    `claimed_length` is a wrong Content-Length. Responses pause after `hang_after` bytes until this
    value is set to None. With `whole_if_empty`, the server sends status 200 instead of 416 for an
    empty file, as servers written in Go do. One in `fails_each` GETs fails, alternately with status
    503 and with a truncated body. Each response is delayed by `delay_s` seconds. `retry_after` is
    sent with every error status. The server sends status 503 until `time.monotonic` reaches
    `away_until_s`. The first `wrong_ranges` responses contain a range that was not requested. With
    `endless`, responses never end. `drip` is (bytes, seconds), and the server pauses for this many
    seconds whenever it has sent this many bytes. `tags` are ETags that are sent in rotation, as a
    group of mirrors would send them. `login` ("user:password"), `header` (name, value) and
    `signature` (a query) are required credentials. A request without them fails with status 401, or
    with 403 if the signature is missing. `redirects` maps paths to addresses. `requests` lists
    (method, path, Range or None) for each request, and `headers` lists the headers of each request.
    """

    def __init__(self, files: dict[str, bytes]):
        self.files = files
        self.requests: list[tuple[str, str, str | None]] = []
        self.cuts: list[int] = []
        self.statuses: list[int] = []
        self.ranges = self.lengths = True
        self.whole_if_empty = False
        self.claimed_length: int | None = None
        self.hang_after: int | None = None
        self.login = self.signature = ""
        self.header: tuple[str, str] | None = None
        self.redirects: dict[str, str] = {}
        self.headers: list[dict[str, str]] = []
        self.fails_each = 0
        self.delay_s = 0.0
        self.retry_after: str | None = None
        self.away_until_s = 0.0
        self.wrong_ranges = 0
        self.endless = False
        self.drip: tuple[int, float] | None = None
        self.tags: list[str] = []
        handler = type("Handler", (_FileHandler,), {"web": self})
        super().__init__(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"


class _FileHandler(BaseHTTPRequestHandler):
    web: WebServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        web = self.web
        range_header = self.headers["Range"]
        self.path, _, query = self.path.partition("?")
        web.requests.append((self.command, self.path, range_header))
        web.headers.append(dict(self.headers))

        if to := web.redirects.get(self.path):
            self.send_response(302)
            self.send_header("Location", to)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return

        time.sleep(web.delay_s)
        content = web.files.get(self.path)
        cut = False
        if time.monotonic() < web.away_until_s:
            self._refuse(503)
            return

        name, value = web.header or (
            "Authorization",
            f"Basic {base64.b64encode(web.login.encode()).decode()}" if web.login else "",
        )
        if (value and self.headers[name] != value) or query != (web.signature or query):
            self.send_error(401 if query == (web.signature or query) else 403)
            return

        if web.fails_each and len(web.requests) % web.fails_each == 0:
            cut = len(web.requests) % (2 * web.fails_each) == 0
            if not cut:
                self._refuse(503)
                return

        if (body and web.statuses) or content is None:
            self._refuse(web.statuses.pop(0) if body and web.statuses else 404)
            return

        tag = f'"{hash(content):x}"'
        start = 0
        stop = len(content)
        if web.tags:
            tag = web.tags[len(web.requests) % len(web.tags)]

        if (
            range_header
            and web.ranges
            and not (web.whole_if_empty and not content)
            and self.headers["If-Range"] in (None, tag)
        ):
            byte_range = re.fullmatch(r"bytes=(\d+)-(\d*)", range_header)
            assert byte_range is not None, range_header
            first, last = byte_range.groups()
            start, stop = int(first), min(int(last) + 1, len(content)) if last else len(content)
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if web.wrong_ranges:
                web.wrong_ranges -= 1
                start, stop = start // 2, (start + stop) // 2 + 1
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        else:
            self.send_response(200)

        self.send_header("ETag", tag)
        if web.lengths:
            self.send_header(
                "Content-Length",
                str(1 << 40 if web.endless else web.claimed_length or stop - start),
            )
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()

        if body:
            end = start + web.cuts.pop(0) if web.cuts else (start + stop) // 2 if cut else stop
            pause = end if web.hang_after is None else start + web.hang_after
            with suppress(ConnectionError):  # ignore clients that have been killed
                while web.drip is not None and start < pause:
                    self.wfile.write(content[start : min(start + web.drip[0], pause)])
                    start += web.drip[0]
                    time.sleep(web.drip[1])
                self.wfile.write(content[start:pause])
                while web.endless:
                    self.wfile.write(bytes(1 << 16))
                while web.hang_after is not None:
                    time.sleep(0.01)
                self.wfile.write(content[pause:end])

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        if self.web.retry_after is not None:
            self.send_header("Retry-After", self.web.retry_after)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()


class HubServer(LocalServer):
    """A context manager that serves a Hugging Face Hub with the given `repositories` ({name: {file:
    bytes}}). Each repository has one commit, which an upload replaces.

    No user may read the repositories in `gated`. `licenses` maps repository names to the licenses
    on their model cards. `requests` lists the path of each request, and `downloads` lists the files
    that were sent. `writers` maps each token to the owner whose repositories it may write, or to
    "" for a token that may only read. `refused` maps the end of a path to the status that requests
    to it get. `uploads` lists the digests of the large files that arrived.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]]):
        self.repositories = repositories
        self.gated: set[str] = set()
        self.licenses: dict[str, str] = {}
        self.requests: list[str] = []
        self.downloads: list[str] = []
        self.writers: dict[str, str] = {}
        self.refused: dict[str, int] = {}
        self.uploads: list[str] = []
        self.large: dict[str, bytes] = {}
        handler = type("Handler", (_HubHandler,), {"hub": self})
        super().__init__(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def commit_of(self, name: str) -> str:
        return hashlib.sha1(repr(sorted(self.repositories[name].items())).encode()).hexdigest()


class _HubHandler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        """Handle the requests of the Hub's API that create a repository, ask how to upload files,
        or commit files."""
        path = unquote(urlparse(self.path).path)
        self.hub.requests.append(path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        lines = [json.loads(line) for line in body.splitlines()]
        if path == "/api/repos/create":
            name = f"{lines[0]['organization']}/{lines[0]['name']}"
        else:
            name = "/".join(path.removeprefix("/api/models").split("/")[1:3]).removesuffix(".git")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if path == "/api/validate-yaml":
            self._send_json({"warnings": [], "errors": []})
        elif token not in self.hub.writers:
            self._refuse(401, "")
        elif self.hub.writers[token] != name.split("/")[0]:
            self._refuse(403, "")
        elif status := next((s for end, s in self.hub.refused.items() if path.endswith(end)), 0):
            self._refuse(status, "", f"not for the login {token}")
        elif path == "/api/repos/create":
            exists = name in self.hub.repositories
            self.hub.repositories.setdefault(name, {".gitattributes": b""})
            self._send_json({"url": f"{self.hub.url}/{name}"}, 409 if exists else 200)
        elif "/preupload/" in path:
            self._send_json({"files": [self._way_of(file["path"]) for file in lines[0]["files"]]})
        elif path.endswith("/info/lfs/objects/batch"):
            self._send_json({"objects": [self._place_of(each) for each in lines[0]["objects"]]})
        else:
            self._commit(name, lines)

    def do_PUT(self) -> None:
        """Store a large file at the address that `_place_of` returned."""
        digest = self.path.rpartition("/")[2]
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert hashlib.sha256(content).hexdigest() == digest
        self.hub.large[digest] = content
        self.hub.uploads.append(digest)
        self._send(b"", {})

    def _way_of(self, path: str) -> object:
        mode = "lfs" if path.endswith((".safetensors", ".png")) else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False}

    def _place_of(self, large_file: dict) -> object:
        is_stored = large_file["oid"] in self.hub.large
        upload = {"upload": {"href": f"{self.hub.url}/large/{large_file['oid']}"}}
        return large_file | ({} if is_stored else {"actions": upload})

    def _commit(self, name: str, lines: list[dict]) -> None:
        added = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                added[value["path"]] = self.hub.large[value["oid"]]
        self.hub.repositories[name] = self.hub.repositories[name] | added
        commit = self.hub.commit_of(name)
        url = f"{self.hub.url}/{name}/commit/{commit}"
        self._send_json({"commitUrl": url, "commitOid": commit})

    def do_GET(self) -> None:
        """Respond to requests below /api/models/OWNER/REPO and
        /OWNER/REPO/resolve/REVISION/FILE."""
        path = unquote(urlparse(self.path).path)
        self.hub.requests.append(path)
        is_api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models" if is_api else "").split("/")[1:]
        name = "/".join(parts[:2])
        kind, revision, *file = parts[2:] or ["revision", "main"]
        files = self.hub.repositories.get(name)
        if files is None:
            self._refuse(401, "RepoNotFound")
        elif revision not in ("main", self.hub.commit_of(name)):
            self._refuse(404, "RevisionNotFound")
        elif kind == "resolve" and name in self.hub.gated:
            self._refuse(403, "GatedRepo")
        elif kind == "resolve":
            self._send_file(name, "/".join(file))
        else:
            self._send_json(self._tree(files) if kind == "tree" else self._facts(name))

    def _facts(self, name: str) -> object:
        license = self.hub.licenses.get(name)
        return {
            "id": name,
            "sha": self.hub.commit_of(name),
            "siblings": [{"rfilename": file} for file in self.hub.repositories[name]],
            "cardData": {"license": license} if license else {},
        }

    def _tree(self, files: dict[str, bytes]) -> object:
        return [
            {
                "type": "file",
                "path": name,
                "size": len(content),
                "oid": hashlib.sha1(content).hexdigest(),
            }
            for name, content in files.items()
        ]

    def _send_json(self, content: object, status: int = 200) -> None:
        self._send(json.dumps(content).encode(), {"Content-Type": "application/json"}, status)

    def _send_file(self, name: str, file: str) -> None:
        content = self.hub.repositories[name].get(file)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        if self.command == "GET":
            self.hub.downloads.append(file)
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        self._send(content, {"ETag": tag, "X-Repo-Commit": self.hub.commit_of(name)})

    def _send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


class FtpServer(LocalServer):
    """A context manager that serves `files` ({"/folder/name": bytes}) over FTP. The server accepts
    any user and does not report file versions.

    The server closes a connection after `commands_each` commands.
    """

    def __init__(self, files: dict[str, bytes], commands_each: int | None = None):
        self.files = files
        self.commands_each = commands_each
        handler = type("Handler", (_FtpHandler,), {"ftp": self})
        super().__init__(socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler))
        self.address = f"127.0.0.1:{self._server.server_address[1]}"

    def listing(self, folder: str) -> bytes:
        inside = [
            (path.rsplit("/", 1)[1], data)
            for path, data in self.files.items()
            if path.rsplit("/", 1)[0] == folder
        ]
        return "".join(f"type=file;size={len(data)}; {name}\r\n" for name, data in inside).encode()


class _FtpHandler(socketserver.StreamRequestHandler):
    ftp: FtpServer

    def handle(self) -> None:
        # Receive the ABOR command, which clients send as out-of-band data.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        # Ignore clients that disconnect after they have received the bytes that they need.
        with suppress(ConnectionError):
            self._say("220 ready")
            start = 0
            listener = socket.socket()
            for line in itertools.islice(self.rfile, self.ftp.commands_each):
                command, _, argument = line.decode().strip().partition(" ")
                if command == "PASV":
                    listener.close()
                    listener = socket.create_server(("127.0.0.1", 0))
                    high, low = divmod(listener.getsockname()[1], 256)
                    self._say(f"227 (127,0,0,1,{high},{low})")
                elif command == "REST":
                    start = int(argument)
                    self._say("350 go on")
                elif command in ("MLSD", "RETR"):
                    content = (
                        self.ftp.listing(argument)
                        if command == "MLSD"
                        else self.ftp.files[argument]
                    )
                    self._say("150 here it comes")
                    with listener.accept()[0] as connection, suppress(ConnectionError):
                        connection.sendall(content[start:])
                    start = 0
                    self._say("226 done")
                else:
                    self._say("226 done")

    def _say(self, line: str) -> None:
        self.wfile.write(f"{line}\r\n".encode())


_NUMBERS = itertools.count()
"""Unique numbers for bucket names, because all S3 servers in a process share their buckets."""


class S3Server:
    """A context manager that runs an S3 server in this process.

    The server's address and credentials are stored in the environment, which child processes
    inherit.
    """

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)

    def __enter__(self) -> S3Server:
        self._server.start()
        self.port = self._server.get_host_and_port()[1]
        # Use a separate MonkeyPatch, because tests use the fixture for their own variables.
        self._environment = pytest.MonkeyPatch()
        for name, value in {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "no_proxy": "127.0.0.1",
            "NO_PROXY": "127.0.0.1",
        }.items():
            self._environment.setenv(name, value)
        forget_clients()
        return self

    def __exit__(self, *_: object) -> None:
        self._environment.undo()
        forget_clients()
        self._server.stop()

    def new_bucket(self) -> str:
        name = f"bucket-{next(_NUMBERS)}"
        boto3.client("s3").create_bucket(Bucket=name)
        return f"s3://{name}"

    def objects(self, url: str) -> dict[str, bytes]:
        """Return all objects in a bucket by key, using Amazon's client to read them."""
        client = boto3.client("s3")
        bucket = url.split("/")[2]
        entries = client.list_objects_v2(Bucket=bucket).get("Contents", [])
        return {
            entry["Key"]: client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
            for entry in entries
        }

    @contextmanager
    def only(self, *actions: str) -> Iterator[None]:
        """Restrict the credentials to the given permissions until the `with` block ends. The server
        checks these permissions."""
        iam = boto3.client("iam")
        environment = pytest.MonkeyPatch()
        policy = {
            "Version": "2012-10-17",
            "Statement": [{"Effect": "Allow", "Action": [*actions], "Resource": "*"}],
        }
        iam.create_user(UserName="somebody")
        iam.put_user_policy(
            UserName="somebody", PolicyName="only", PolicyDocument=json.dumps(policy)
        )
        key = iam.create_access_key(UserName="somebody")["AccessKey"]
        self._ask_for_credentials(after_requests=0)
        environment.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        environment.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        forget_clients()
        try:
            yield
        finally:
            environment.undo()
            forget_clients()
            self._ask_for_credentials(after_requests=1 << 60)
            iam.delete_access_key(UserName="somebody", AccessKeyId=key["AccessKeyId"])
            iam.delete_user_policy(UserName="somebody", PolicyName="only")
            iam.delete_user(UserName="somebody")

    def _ask_for_credentials(self, after_requests: int) -> None:
        url = f"http://127.0.0.1:{self.port}/moto-api/reset-auth"
        urllib.request.urlopen(
            urllib.request.Request(url, b"%d" % after_requests, {"Content-Type": "text/plain"})
        ).close()


def forget_clients() -> None:
    """Delete the clients that fsspec has cached.

    fsspec caches one client per protocol. A cached client keeps the address and credentials of its
    first use.
    """
    fsspec.get_filesystem_class("s3").clear_instance_cache()


class Gate:
    """A proxy that listens on a new port and forwards connections to `port` on this machine.

    While the gate is `closed`, existing connections are closed and new connections are answered
    with status 503.
    """

    def __init__(self, port: int):
        self._behind = port
        self._open_ends: set[socket.socket] = set()
        self.closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port = self._listener.getsockname()[1]
        self.num_refused = 0

    def __enter__(self) -> Gate:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.close()

    def close(self) -> None:
        self.closed = True
        for end in list(self._open_ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def open(self) -> None:
        self.closed = False

    def _serve(self) -> None:
        with suppress(OSError):  # ignore the error raised by a closed listener
            while True:
                client = self._listener.accept()[0]
                threading.Thread(
                    target=self._refuse if self.closed else self._connect,
                    args=(client,),
                    daemon=True,
                ).start()

    def _refuse(self, client: socket.socket) -> None:
        self.num_refused += 1
        with client, suppress(OSError):
            client.settimeout(60)
            client.recv(1 << 16)
            client.sendall(
                b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )

    def _connect(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._behind))
        self._open_ends |= {client, server}
        for ends in ((client, server), (server, client)):
            threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        while data := _received(source):
            with suppress(OSError):
                target.sendall(data)
        for end in (source, target):
            self._open_ends.discard(end)
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def cable(
    port: int, *, carries: int, then: str, times: int = 1
) -> Iterator[tuple[int, threading.Event]]:
    """Forward connections to `port` on this machine, and break some of them.

    Each of the first `times` connections sets the event after it has sent `carries` bytes to the
    server. The connection then closes if `then` is "cut", or hangs if `then` is "hangs". Later
    connections work normally.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()
    over = threading.Event()

    def carry(source: socket.socket, target: socket.socket, left: float) -> None:
        with source, target:
            while data := _received(source):
                left -= len(data)
                if left < 0:
                    stopped.set()
                    if then == "hangs":
                        over.wait()
                    for end in (source, target):
                        with suppress(OSError):
                            end.shutdown(socket.SHUT_RDWR)
                    return
                with suppress(OSError):
                    target.sendall(data)

    def serve() -> None:
        for number in itertools.count():
            try:
                client = listener.accept()[0]
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", port))
            for ends in (
                (client, server, carries if number < times else math.inf),
                (server, client, math.inf),
            ):
                threading.Thread(target=carry, args=ends, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1], stopped
    finally:
        over.set()
        listener.close()


def _received(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 16)
    except OSError:
        return b""
