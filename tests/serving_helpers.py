"""Servers of tiny models in a thread of the test, and in processes that can be killed."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from lightrft.config.base import build
from lightrft.config.generation.serving import HTTPConfig, ServeConfig, ServeRMConfig
from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.serving.generation_server import ModelServer, open_server
from lightrft.serving.http_server import Endpoint, EventStream, HTTPServer
from lightrft.serving.problems import HTTPCall, HTTPProblem
from lightrft.serving.reward_server import open_reward_server
from lightrft.serving.server_metrics import ServerMetrics
from lightrft.utils.http_client import server_client
from tests import warm
from tests.e2e.command import ROOT


def save_judge(folder: Path, **settings: Any) -> Path:
    """Save a tiny reward model with the heads ``good`` and ``short``."""
    tokenizer = tiny_tokenizer()
    model = tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer))
    tree = {"heads": [{"name": "good"}, {"name": "short"}], **settings}
    RewardModel(model, ModelConfig(), build(RewardModelConfig, tree), seed=3).save(
        tokenizer, folder
    )
    return folder


def advanced_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return the function that advances the clock of clients by seconds, which then need not pass."""
    skipped = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(skipped), sleep=time.sleep)
    monkeypatch.setattr(server_client, "time", clock)
    return skipped.append


def skip_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the waits of clients between two trials pass at once, each by ten seconds of their clock.

    A long deadline is then over after a number of trials, on a machine of any speed.
    """
    advance = advanced_clock(monkeypatch)
    monkeypatch.setattr(server_client.time, "sleep", advance)
    monkeypatch.setattr(server_client, "FIRST_WAIT", server_client.LONGEST_WAIT)


@contextmanager
def running(server: HTTPServer) -> Generator[str]:
    """Run ``server`` in a thread, and yield its address."""
    url = server.bind()
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 300
    while server._server is None or not server._server.started:
        assert time.monotonic() < until
        time.sleep(0.01)
    try:
        yield url
    finally:
        server.stop()
        thread.join(300)
    assert not thread.is_alive()


@contextmanager
def answering(*endpoints: Endpoint, **settings: Any) -> Generator[tuple[str, HTTPServer]]:
    """Run a server of ``endpoints`` and yield its address and the server."""
    config = HTTPConfig(port=0, **settings)
    server = HTTPServer(endpoints, config, ServerMetrics())
    with running(server) as url:
        yield url, server


@contextmanager
def judge_server(folder: Path, **settings: Any) -> Generator[tuple[str, ModelServer]]:
    """Serve the model of ``folder`` in a thread."""
    tree = {"model": {"path": str(folder), "dtype": "float32"}, "device": "cpu", **settings}
    tree["http"] = {"port": 0, **tree.get("http", {})}
    with served(open_reward_server(build(ServeRMConfig, tree))) as found:
        yield found


@contextmanager
def model_server(folder: Path, **settings: Any) -> Generator[tuple[str, ModelServer]]:
    """Serve the generative model of ``folder`` in a thread."""
    tree = {"model": {"path": str(folder), "dtype": "float32"}, "device": "cpu", **settings}
    tree["http"] = {"port": 0, **tree.get("http", {})}
    with served(open_server(build(ServeConfig, tree))) as found:
        yield found


@contextmanager
def served(server: ModelServer) -> Generator[tuple[str, ModelServer]]:
    try:
        with running(server.http) as url:
            yield url, server
    finally:
        server.service.close()


Edit = Callable[[int, dict[str, Any]], "dict[str, Any] | None"]


@contextmanager
def altered(url: str, edit: Edit, **settings: Any) -> Generator[str]:
    """Serve what the server at ``url`` serves, after ``edit(number, event)`` of each event of a stream.

    The number counts the events of all streams. ``None`` ends a stream there, and an ``edit`` that sleeps stalls it.
    """
    numbers = itertools.count()

    async def get(call: HTTPCall) -> object:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{url}/v1/models")).json()

    def passed(path: str) -> Any:
        async def post(call: HTTPCall) -> object:
            async with httpx.AsyncClient() as client:
                answer = await client.post(url + path, json=dict(call.body))
            if answer.status_code != 200:
                raise HTTPProblem(answer.status_code, answer.text)
            return answer.json()

        return post

    async def stream(call: HTTPCall) -> object:
        if not call.body.get("stream"):
            return await passed("/v1/completions")(call)

        async def events() -> Any:
            async with (
                httpx.AsyncClient() as client,
                client.stream("POST", f"{url}/v1/completions", json=dict(call.body)) as answer,
            ):
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    found = await asyncio.to_thread(edit, next(numbers), event)
                    if found is None:
                        raise HTTPProblem(500, "the server broke")
                    yield found

        return EventStream(events(), lambda: None)

    routes = [
        Endpoint(("/v1/models",), get, "GET"),
        Endpoint(("/tokenize",), passed("/tokenize")),
        Endpoint(("/v1/completions",), stream),
    ]
    with answering(*routes, **settings) as (own, _):
        yield own


@dataclass
class Seen:
    """What a server has seen: tokens, and the most requests at once."""

    tokens: set[str] = field(default_factory=set)
    open: int = 0
    most: int = 0


@contextmanager
def judge_at(folder: Path, seconds: float = 0.0, together: int = 1) -> Generator[tuple[str, Seen]]:
    """Serve ``folder``, each request for at least ``seconds``, and yield what the server sees.

    A request waits for others until ``together`` of them have been open at once.
    """
    seen = Seen()
    with judge_server(folder) as (url, server):
        enter = server.http._answer

        async def answer(endpoint: Endpoint, request: Any) -> Any:
            seen.tokens.add(request.headers.get("authorization", ""))
            if endpoint.paths not in (("/v1/rewards",), ("/v1/chat/completions",)):
                return await enter(endpoint, request)
            seen.open += 1
            seen.most = max(seen.most, seen.open)
            await asyncio.sleep(seconds)
            async with asyncio.timeout(300):
                # A busy machine may start the threads of a client one after the other.
                while seen.most < together:
                    await asyncio.sleep(0.01)
            seen.open -= 1
            return await enter(endpoint, request)

        server.http._answer = answer  # ty: ignore[invalid-assignment]
        yield url, seen


def echo(call: HTTPCall) -> Any:
    """Answer with the body of a request."""

    async def answered() -> Any:
        return dict(call.body)

    return answered()


def serve_process(folder: Path, port: int, *words: str, verb: str = "serve-rm") -> warm.Process:
    """Start ``lightrft serve-rm``, or another ``verb`` that serves, in a process of its own."""
    import os

    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    given = ["-m", "lightrft", verb, folder, f"http.port={port}", "device=cpu", *words]
    return warm.Process(given, env, folder)


def wait_for(url: str, seconds: float = 300.0) -> None:
    """Wait until the server at ``url`` is healthy."""
    until = time.monotonic() + seconds
    while True:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < until, f"{url} does not answer"
        time.sleep(0.05)


def wait_for_gauge(url: str, name: str, value: float, seconds: float = 300.0) -> None:
    """Wait until the metrics of the server at ``url`` show ``value``."""
    until = time.monotonic() + seconds
    while f"{name} {value:g}\n" not in (text := httpx.get(f"{url}/metrics").text):
        assert time.monotonic() < until, text
        time.sleep(0.02)


@contextmanager
def killing_server(
    folder: Path,
    port: int,
    started: list[warm.Process],
    most: int,
    after: float,
    words: Sequence[str] = (),
    verb: str = "serve-rm",
) -> Generator[list[int]]:
    """Kill and restart the last server of ``started``, and yield the numbers of the kills.

    It happens up to ``most`` times, each ``after`` seconds of health.
    """
    over = threading.Event()
    kills: list[int] = []

    def disturb() -> None:
        while len(kills) < most and not over.wait(after):
            started[-1].send_signal(signal.SIGKILL)
            started[-1].wait(10)
            kills.append(started[-1].pid)
            time.sleep(0.2)
            started.append(serve_process(folder, port, *words, verb=verb))
            wait_for(f"http://127.0.0.1:{port}")

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield kills
    finally:
        over.set()
        thread.join(300)


def free_port() -> int:
    """Return a port that nothing listens on."""
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def local_scores(folder: Path, pairs: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Return the score ``good`` of prompts and responses, each computed alone."""
    from tests.model_helpers import Batch, Segments

    model = RewardModel.open(folder, dtype=torch.float32)
    found = []
    for prompt, response in pairs:
        batch = Batch(Segments.of([prompt]), Segments.of([response]), torch.zeros(1).long())
        with torch.no_grad():
            found.append(model.score(batch)["good"].scores[0])
    return torch.stack(found)
