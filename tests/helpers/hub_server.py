"""Helpers for tests: a Hugging Face hub on 127.0.0.1, as far as huggingface_hub's own client asks
it, and small models in timm's form to put on it."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import timm
import torch
from timm.models import save_for_hf

NAME = "timm/vit_small_patch16_224.augreg_in21k_ft_in1k"
"""The repository that configs/photos.yaml starts from, and `small_vit` stands for."""
SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
"""Its own arguments: those of `processes.TINY`."""


class HubServer:
    """Serves `repositories` (name -> {file: bytes}) until the block ends, each at one commit.

    `gated`: names of those that nobody here may read. `licences`: name -> what the card states.
    `requests` has the path of each request, `downloads` the files that were sent.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]]):
        self.repositories = repositories
        self.gated: set[str] = set()
        self.licences: dict[str, str] = {}
        self.requests: list[str] = []
        self.downloads: list[str] = []
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_HubHandler,), {"hub": self})
        )
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit_of(self, name: str) -> str:
        """Return the 40 digits of the only commit of a repository."""
        return hashlib.sha1(repr(sorted(self.repositories[name].items())).encode()).hexdigest()


class _HubHandler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        """Answer below /api/models/OWNER/REPO, and /OWNER/REPO/resolve/REVISION/FILE."""
        path = unquote(urlparse(self.path).path)
        self.hub.requests.append(path)
        is_api = path.startswith("/api/models/")
        words = path.removeprefix("/api/models" if is_api else "").split("/")[1:]
        name = "/".join(words[:2])
        kind, revision, *file = words[2:] or ["revision", "main"]
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
        licence = self.hub.licences.get(name)
        return {
            "id": name,
            "sha": self.hub.commit_of(name),
            "siblings": [{"rfilename": file} for file in self.hub.repositories[name]],
            "cardData": {"license": licence} if licence else {},
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

    def _send_json(self, content: object) -> None:
        self._send(json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str, file: str) -> None:
        content = self.hub.repositories[name].get(file)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        if self.command == "GET":
            self.hub.downloads.append(file)
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        self._send(content, {"ETag": tag, "X-Repo-Commit": self.hub.commit_of(name)})

    def _send(self, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def small_vit(num_classes: int = 3) -> torch.nn.Module:
    """Create a ViT of timm's with `SIZES`, whose head is not zero."""
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224", num_classes=num_classes, **SIZES).eval()
    torch.nn.init.normal_(model.head.weight)
    return model


def small_repository(folder: Path, num_classes: int = 3) -> dict[str, bytes]:
    """Return the files that timm's own export writes for the hub, pickled weights among them."""
    save_for_hf(small_vit(num_classes), folder, model_args=SIZES, safe_serialization="both")
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files in `folder` by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
