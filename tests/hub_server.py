"""A stand-in for the server of the hub, for the hub's own client."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import huggingface_hub
import pytest


class StandIn:
    """The part of the hub's interface that an upload calls: names of repositories, and their files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.stored: dict[str, bytes] = {}
        self.made: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self.refused: set[str] = set()
        """Messages of commits that are refused."""


class Handler(BaseHTTPRequestHandler):
    """Answers as the hub does."""

    hub: StandIn

    def log_message(self, *_: object) -> None:
        return

    def answer(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        if self.path == "/api/whoami-v2" and self.headers.get("Authorization") != "Bearer right":
            self.answer({"error": "Invalid username or password."}, 401)
        else:
            self.answer({"id": "me/it", "name": "me", "siblings": [], "sha": "0" * 40})

    def do_PUT(self) -> None:
        self.hub.stored[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        body, hub = self.body(), self.hub
        if self.headers.get("Authorization") != "Bearer right":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            hub.made.append(json.loads(body))
            name = hub.made[-1]["name"]
            self.answer({"url": f"{self.root}/me/{name}", "name": f"me/{name}", "id": "1"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            large = [f["path"].endswith(".safetensors") for f in files]
            modes = ["lfs" if is_large else "regular" for is_large in large]
            found = [
                {"path": f["path"], "uploadMode": mode, "shouldIgnore": False}
                for f, mode in zip(files, modes, strict=True)
            ]
            self.answer({"files": found})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.root}/store/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            lines = [*map(json.loads, body.splitlines())]
            if lines[0]["value"]["summary"] in hub.refused:
                self.send_response(403, "No space is left")
                self.end_headers()
                return
            for line in lines:
                value = line["value"]
                if line["key"] == "header":
                    hub.messages.append(value["summary"])
                elif line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                else:
                    hub.files[value["path"]] = hub.stored[value["oid"]]
            address = f"{self.root}/me/it/commit/{'0' * 40}"
            self.answer({"commitUrl": address, "commitOid": "0" * 40, "success": True})
        else:
            self.answer({"error": f"unknown {self.path}"}, 404)

    @property
    def root(self) -> str:
        return f"http://{self.headers['Host']}"


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Yield a hub that the client of this process calls. Its token is ``right``."""
    found = StandIn()
    handler = type("OfThisTest", (Handler,), {"hub": found})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "right")
        # For processes that this one starts.
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield found
        server.shutdown()
        thread.join()
