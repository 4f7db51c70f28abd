"""A model hub for tests: real HTTP on two ports, as the real one has an address for names and another for bytes.

Speaks /api/models/{repo}/revision/{revision} and /{repo}/resolve/{revision}/{file}, with redirects to the store, ETags,
ranges and error codes; counts what it serves, and does wrong what a test asks for.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

COMMIT = "5a" * 20
OLDER = "b3" * 20
HELD_SECONDS = 60


@dataclass
class Fault:
    """One request for a file goes wrong: a status instead of bytes, or bytes that stop after `cut`."""

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    """Send so many bytes and close the connection."""
    hold: int | None = None
    """Send so many bytes and then wait for `HubServer.release`."""
    piece: int | None = None
    """Send pieces of this size, each after a moment."""


@dataclass
class Repository:
    files: dict[str, bytes]
    commit: str = COMMIT
    gated: bool = False
    served: dict[str, bytes] = field(default_factory=dict)
    """What arrives in place of a file."""
    listed: list[dict[str, Any]] = field(default_factory=list)
    """More entries for the list of files."""
    without_hashes: bool = False
    licence: str | None = "apache-2.0"
    """Of its model card."""

    def siblings(self) -> list[dict[str, Any]]:
        return [self._sibling(name, content) for name, content in self.files.items()] + self.listed

    def _sibling(self, name: str, content: bytes) -> dict[str, Any]:
        if self.without_hashes:
            return {"rfilename": name}
        entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git_sha1(content)}
        if is_lfs(name):
            entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return entry


class HubServer:
    """Use it in a `with`. `faults` of a path are used up one a request; `served_bytes` counts bytes of bodies by path."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.api_faults: list[Fault] = []
        self.served_bytes: dict[str, int] = defaultdict(int)
        self.ranges: dict[str, list[str | None]] = defaultdict(list)
        self.store_headers: list[dict[str, str]] = []
        self.hub_headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.knows_ranges = True
        self.token: str | None = None
        self.holding = threading.Event()
        self.release = threading.Event()
        self.lock = threading.Lock()
        self._hub, self._store = _Listener(self, _Hub), _Listener(self, _Store)

    def __enter__(self) -> Self:
        for listener in (self._hub, self._store):
            threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        for listener in (self._hub, self._store):
            listener.shutdown()
            listener.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._hub.server_port}"

    @property
    def store_address(self) -> str:
        return f"http://127.0.0.1:{self._store.server_port}"

    def add(self, name: str, files: dict[str, bytes], **fields: Any) -> Repository:
        self.repositories[name] = Repository(files, **fields)
        return self.repositories[name]

    def forget_counts(self) -> None:
        self.served_bytes.clear()
        self.ranges.clear()
        self.paths.clear()


def is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".onnx", ".bin", ".pt"))


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, hub: HubServer, handler: type[_Answers]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.hub = hub

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is part of the tests."""


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    @property
    def hub(self) -> HubServer:
        return self.server.hub

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def answer(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_file(self, path: str, content: bytes, headers: Mapping[str, str]) -> None:
        asked = self.headers.get("Range")
        with self.hub.lock:
            fault = self.hub.faults[path].pop(0) if self.hub.faults[path] else Fault()
            self.hub.ranges[path].append(asked)
        if fault.status is not None:
            self.answer(fault.status, fault.headers, b'{"error": "as the test asked"}')
            return
        start, end = 0, len(content)
        if asked and self.hub.knows_ranges:
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
            assert found is not None
            start, end = int(found[1]), min(end, int(found[2] or end) + 1)
            if start >= len(content):
                self.answer(416, {"Content-Range": f"bytes */{len(content)}"})
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        else:
            self.send_response(200)
        for name, value in {"Content-Length": str(end - start), "Accept-Ranges": "bytes", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self._send_bytes(path, content[start:end], fault)

    def _send_bytes(self, path: str, body: bytes, fault: Fault) -> None:
        first = len(body)
        if fault.cut is not None or fault.hold is not None:
            first = fault.cut if fault.cut is not None else fault.hold or 0
        step = fault.piece or 2**16
        for at in range(0, min(first, len(body)), step):
            piece = body[at : min(at + step, first)]
            if fault.piece:
                self.hub.release.wait(0.005)
            self.wfile.write(piece)
            with self.hub.lock:
                self.hub.served_bytes[path] += len(piece)
        self.wfile.flush()
        if fault.hold is not None:
            self.hub.holding.set()
            self.hub.release.wait(HELD_SECONDS)
        if first < len(body):
            self.close_connection = True


class _Hub(_Answers):
    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.paths.append(path)
            self.hub.hub_headers.append({name.lower(): value for name, value in self.headers.items()})
        if path.startswith("/api/models/"):
            self._describe(path.removeprefix("/api/models/"))
        elif (found := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path)) is not None:
            self._resolve(found[1], found[2], found[3])
        else:
            self.answer(404, {}, b"")

    def _describe(self, rest: str) -> None:
        with self.hub.lock:
            fault = self.hub.api_faults.pop(0) if self.hub.api_faults else None
        if fault is not None:
            self.answer(fault.status or 500, fault.headers, b'{"error": "as the test asked"}')
            return
        name, _, revision = rest.partition("/revision/")
        repository = self._known(name, revision or "main")
        if repository is None:
            return
        described = {
            "id": name,
            "sha": revision if re.fullmatch("[0-9a-f]{40}", revision) else repository.commit,
            "gated": "manual" if repository.gated else False,
            "cardData": {"license": repository.licence} if repository.licence else {},
            "siblings": repository.siblings(),
        }
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(described).encode())

    def _known(self, name: str, revision: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        authorization = self.headers.get("Authorization")
        if authorization is not None and self.hub.token and authorization != f"Bearer {self.hub.token}":
            self.answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b"{}")
        elif repository is None:
            code = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self.answer(401 if authorization is None else 404, code, b'{"error": "Repository not found"}')
        elif revision not in {"main", repository.commit, OLDER}:
            self.answer(404, {"X-Error-Code": "RevisionNotFound"}, b'{"error": "Invalid rev id"}')
        else:
            return repository
        return None

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self._known(name, revision)
        if repository is None:
            return
        if repository.gated and self.headers.get("Authorization") is None:
            self.answer(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, b"{}")
        elif path not in repository.files:
            self.answer(404, {"X-Error-Code": "EntryNotFound"}, b"{}")
        else:
            content = repository.files[path]
            headers = {"X-Repo-Commit": revision, "X-Linked-Size": str(len(content))}
            if is_lfs(path):
                etag = hashlib.sha256(content).hexdigest()
                there = {"Location": f"{self.hub.store_address}/{name}/{path}", "X-Linked-ETag": f'"{etag}"'}
                self.answer(302, headers | there)
            else:
                content = repository.served.get(path, content)
                self.send_file(path, content, headers | {"ETag": f'"{git_sha1(content)}"'})


class _Store(_Answers):
    def do_GET(self) -> None:
        owner, name, path = unquote(self.path).lstrip("/").split("/", 2)
        repository = self.hub.repositories[f"{owner}/{name}"]
        with self.hub.lock:
            self.hub.store_headers.append({name.lower(): value for name, value in self.headers.items()})
        self.send_file(path, repository.served.get(path, repository.files[path]), {})
