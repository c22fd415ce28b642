"""Reward servers as OpenRLHF, LMM-R1 and LightRFT document them: ``reward_servers.py KIND PORT LOG``.

They are written from the request and answer shapes of ``openrlhf/cli/serve_rm.py``,
``examples/python/math_reward_func.py``, ``openrlhf/models/remote_rm/math_verifier.py`` and
``lightrft/utils/remote_rm_utils.py``.
"""

import base64
import io
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KIND, PORT, LOG = sys.argv[1], int(sys.argv[2]), sys.argv[3]
WRONG: dict[str, Any] = {
    "short": {"rewards": [0.5]},
    "words": {"rewards": ["good", "bad"]},
    "nested": {"rewards": [[0.5], [0.5]]},
    "null": {"rewards": [None, None]},
    "infinite": {"rewards": [float("inf"), float("-inf")]},
    "error": {"error": "out of memory"},
}


def openrlhf(data: dict[str, Any]) -> dict[str, Any]:
    rewards = []
    for query, prompt, label in zip(data["query"], data["prompts"], data["labels"], strict=True):
        response = query[len(prompt) :] if prompt in query else query
        rewards.append(1.0 if response.startswith(label) else 0.0)
    accuracy = sum(rewards) / len(rewards)
    logs = {"length": [len(query) for query in data["query"]], "accuracy": accuracy}
    return {"rewards": rewards, "scores": rewards, "extra_logs": logs}


def verifier(data: dict[str, Any]) -> dict[str, Any]:
    for label in data["labels"]:
        assert not label.startswith("$")
    right = [0.5] * len(data["query"])
    wrong = [0.0] * len(data["query"])
    return {"rewards": right, "format_rewards": right, "acc_rewards": wrong}


def lightrft(data: dict[str, Any]) -> dict[str, Any]:
    from PIL import Image

    rewards = []
    for given in data.get("images") or [[]] * len(data["queries"]):
        sizes = [Image.open(io.BytesIO(base64.b64decode(one))).size for one in given]
        rewards.append(float(sum(a * b for a, b in sizes)))
    return {"rewards": rewards}


def strict(data: dict[str, Any]) -> dict[str, Any]:
    return {"rewards": [float("answer" in json.loads(label)) for label in data["labels"]]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send(200, {})

    def do_POST(self) -> None:
        data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Path(LOG).open("a") as log:
            log.write(json.dumps(data) + "\n")
        if self.path != "/get_reward":
            self.send(404, {"detail": "Not Found"})
            return
        try:
            self.send(200, self.answer(data))
        except Exception as error:
            self.send(500, {"error": f"{type(error).__name__}: {error}"})

    def answer(self, data: dict[str, Any]) -> dict[str, Any]:
        later = KIND.startswith("later-")
        if later and len(data["query"]) == 1:
            return {"rewards": [0.0]}
        if KIND == "later-hang":
            time.sleep(900)
        if later or KIND in WRONG:
            return WRONG[KIND.removeprefix("later-")]
        scorers = {
            "openrlhf": openrlhf,
            "verifier": verifier,
            "lightrft": lightrft,
            "strict": strict,
        }
        return scorers[KIND](data)

    def send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
