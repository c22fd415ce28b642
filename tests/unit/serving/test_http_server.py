"""Limits, tokens and repeated requests of the HTTP side, over real connections."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightrft.config.generation.serving import HTTPConfig
from lightrft.serving import connections, http_server
from lightrft.serving.http_server import Endpoint, EventStream, HTTPServer
from lightrft.serving.problems import HTTPCall, anthropic_error, openai_error
from lightrft.serving.server_metrics import ServerMetrics
from lightrft.utils.errors import ConfigError
from tests.serving_helpers import answering, echo

ECHO = Endpoint(("/echo",), echo)
SERVER_LOG = "lightrft.serving.http_server"


class Slow:
    """Answers after ``seconds``, and counts the calls."""

    def __init__(self, seconds: float, fails: int = 0) -> None:
        self.seconds, self.fails, self.calls = seconds, fails, 0

    async def answer(self, call: HTTPCall) -> Any:
        self.calls += 1
        number = self.calls
        await asyncio.sleep(self.seconds)
        if number <= self.fails:
            raise RuntimeError("no answer today")
        return {"call": number}

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(("/slow",), self.answer)


def message(answer: httpx.Response) -> str:
    return answer.json()["error"]["message"]


def raw(url: str, head: str, body: bytes = b"", *, close: bool = False) -> bytes:
    """Send bytes over a socket and return what comes back."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=300) as sock:
        sock.sendall(f"POST /echo HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + body)
        if close:
            return b""
        said = b""
        while not said.endswith(b"}"):  # the head and the body may come one after the other
            said += sock.recv(65536)
        return said


def wait_for_count(server: HTTPServer, line: str) -> None:
    """Wait until the metrics of ``server`` show ``line``."""
    until = time.monotonic() + 300
    while line not in server.metrics.text():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_answers_on_an_open_connection_wait_for_no_acknowledgement(monkeypatch):
    """Linux delays an acknowledgement by 40 ms, and headers and body are sent one after the other."""
    at_once: list[int] = []
    with answering(ECHO) as (url, server):
        protocol = server._server.config.http_protocol_class
        made = protocol.connection_made

        def connected(self: Any, transport: asyncio.Transport) -> None:
            made(self, transport)
            sock = transport.get_extra_info("socket")
            at_once.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        monkeypatch.setattr(protocol, "connection_made", connected)
        assert httpx.post(f"{url}/echo", json={"a": 1}).status_code == 200
    assert at_once and all(at_once)


def test_a_body_of_one_gigabyte_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(http_server, "LINGER", 900.0)
    with answering(ECHO, max_body_mb=1) as (url, server):
        said = raw(url, f"Content-Length: {2**30}", b"{")
        assert b" 413 " in said.splitlines()[0] and b"http.max_body_mb" in said
        sent = 0

        def pieces() -> Iterator[bytes]:  # without a length, so the server must count
            nonlocal sent
            for _ in range(1024):
                sent += 2**20
                yield b" " * 2**20

        before = server.metrics.gauges["resident_bytes"]()
        answer = httpx.post(f"{url}/echo", content=pieces())
        assert answer.status_code == 413 and "more than" in message(answer)
        assert server.metrics.gauges["resident_bytes"]() - before < 200 * 2**20
        assert httpx.post(f"{url}/echo", json={"a": 1}).json() == {"a": 1}


def test_a_truncated_upload_is_refused_or_counted_and_the_server_answers_the_next_one():
    with answering(ECHO) as (url, server):
        answer = httpx.post(f"{url}/echo", content=b'{"input": ["abc"')
        assert answer.status_code == 400 and "truncated" in message(answer)
        raw(url, "Content-Length: 1000", b'{"input"', close=True)
        wait_for_count(server, "truncated_uploads_total 1")
        assert httpx.post(f"{url}/echo", json={"a": 1}).status_code == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[1, 2]", "a JSON object, not a list"),
        (b"\xff\xfe\x00", "not JSON"),
        (b'{"a": ' + b"[" * 100_000, "not JSON"),
        (b"", "not JSON"),
        (b'{"a": {"b": 1, "b": 2}}', "the key 'b' is given twice"),
        (rb'{"a": [{"b": "x\ud800"}]}', "a.0.b is not valid Unicode"),
        (b'{"a": "\xed\xa0\x80"}', "not JSON"),
        (rb'{"\uDC00": 1}', "a name is not valid Unicode"),
    ],
    ids=[
        "list",
        "binary",
        "deep",
        "empty",
        "twice",
        "surrogate",
        "encoded surrogate",
        "surrogate name",
    ],
)
def test_a_body_that_is_no_object_is_refused(body, said):
    with answering(ECHO) as (url, _):
        answer = httpx.post(f"{url}/echo", content=body)
        assert answer.status_code == 400 and said in message(answer)


def test_a_character_of_two_escapes_is_read():
    with answering(ECHO) as (url, _):
        answer = httpx.post(f"{url}/echo", content=rb'{"a": "\ud83d\ude00"}')
        assert answer.json() == {"a": "\U0001f600"}


def test_a_body_that_does_not_arrive_and_an_answer_that_takes_too_long_are_given_up():
    left: list[float] = []

    async def slow(call: HTTPCall) -> Any:
        [limit] = server._limits
        left.append(limit.when() - asyncio.get_running_loop().time())
        # as if the time of the request were over
        limit.reschedule(0)
        await asyncio.sleep(600)

    with answering(ECHO, timeout=0.3) as (url, _):
        assert b" 408 " in raw(url, "Content-Length: 10", b"{").splitlines()[0]
    with answering(Endpoint(("/slow",), slow), timeout=300) as (url, server):
        answer = httpx.post(f"{url}/slow", json={})
        assert answer.status_code == 504 and "http.timeout" in message(answer)
    assert 0 < left[0] <= 300


def test_a_full_server_refuses_with_the_time_to_wait_and_still_tells_its_health():
    begun, may_end = threading.Semaphore(0), threading.Event()

    async def held(call: HTTPCall) -> Any:
        begun.release()
        await asyncio.to_thread(may_end.wait, 300)
        return {}

    async def health(call: HTTPCall) -> Any:
        return {"status": "ok"}

    healthy = Endpoint(("/health",), health, "GET", is_open=True)
    with answering(Endpoint(("/held",), held), healthy, max_requests=2) as (url, _):
        statuses: list[int] = []
        threads = [
            threading.Thread(
                target=lambda: statuses.append(httpx.post(f"{url}/held", json={}).status_code)
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        assert all(begun.acquire(timeout=300) for _ in threads)
        answer = httpx.post(f"{url}/held", json={})
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert "http.max_requests" in message(answer)
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        may_end.set()
        for thread in threads:
            thread.join()
        assert statuses == [200, 200]
        assert httpx.post(f"{url}/held", json={}).status_code == 200


def test_a_repeated_request_is_computed_once_also_while_the_first_one_runs():
    slow, begun, may_end = Slow(0), threading.Event(), threading.Event()

    async def held(call: HTTPCall) -> Any:
        begun.set()
        await asyncio.to_thread(may_end.wait, 300)
        return await slow.answer(call)

    with answering(Endpoint(("/slow",), held), remembered=2) as (url, server):
        joined, get = threading.Semaphore(0), server.answers.get

        async def joining(*request: Any) -> Any:
            joined.release()
            return await get(*request)

        headers = {"X-Request-Id": "a"}
        host, port = url.removeprefix("http://").split(":")
        body = httpx.Request("POST", url, json={"q": 1}).content
        with socket.create_connection((host, int(port)), timeout=300) as sock:
            head = (
                f"POST /slow HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\r\nContent-Length: {len(body)}"
            )
            sock.sendall(f"{head}\r\n\r\n".encode() + body)
            assert begun.wait(300)
        server.answers.get = joining
        # the client is gone, its request is not
        wait_for_count(server, "left_requests_total 1")
        with ThreadPoolExecutor(1) as thread:
            repeated = thread.submit(httpx.post, f"{url}/slow", json={"q": 1}, headers=headers)
            assert joined.acquire(timeout=300)
            may_end.set()
            again = repeated.result(300)
        assert again.json() == {"call": 1} and again.headers["x-request-id"] == "a"
        other = httpx.post(f"{url}/slow", json={"q": 2}, headers=headers)
        assert other.status_code == 409 and "'a'" in message(other)
        for name in "bc":
            httpx.post(f"{url}/slow", json={}, headers={"X-Request-Id": name})
        assert slow.calls == 3
        # only the latest answers are kept
        assert httpx.post(f"{url}/slow", json={"q": 1}, headers=headers).json() == {"call": 4}
        assert "repeated_requests_total 1" in server.metrics.text()
        assert len(server.answers._tasks) <= 3


def test_a_request_that_failed_is_computed_again():
    slow = Slow(0.0, fails=1)
    with answering(slow.endpoint) as (url, _):
        headers = {"X-Request-Id": "a"}
        answer = httpx.post(f"{url}/slow", json={}, headers=headers)
        assert answer.status_code == 500 and "no answer today" in message(answer)
        assert httpx.post(f"{url}/slow", json={}, headers=headers).json() == {"call": 2}


@pytest.mark.parametrize("is_named", [False, True], ids=["openai", "anthropic"])
def test_requests_that_are_open_at_the_end_of_the_drain_are_told_and_counted(
    is_named, caplog, monkeypatch
):
    monkeypatch.setattr(http_server, "LAST_WORDS", 300.0)

    async def endless() -> Any:
        yield {"type": "piece"}
        await asyncio.sleep(600)

    async def stream(call: HTTPCall) -> Any:
        return EventStream(endless(), lambda: None, is_named)

    shape = anthropic_error if is_named else openai_error
    slow = Endpoint(("/slow",), Slow(600).answer, error=shape)
    found: list[httpx.Response] = []

    def ask(path: str, **headers: str) -> None:
        found.append(httpx.post(f"{url}{path}", json={}, headers=headers))

    with answering(slow, Endpoint(("/stream",), stream, error=shape), drain_seconds=0.5) as (
        url,
        server,
    ):
        asked = [("/slow", {}), ("/slow", {"X-Request-Id": "a"}), ("/stream", {})]
        threads = [threading.Thread(target=ask, args=(p,), kwargs=h) for p, h in asked]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 300
        while len(server._limits) < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        server.stop()
        for thread in threads:
            thread.join()
    (streamed,) = [answer for answer in found if answer.status_code == 200]
    *_, last = [line for line in streamed.text.splitlines() if line]
    ends = [json.loads(last.removeprefix("data: "))]
    ends += [answer.json() for answer in found if answer.status_code == 503]
    assert len(ends) == 3
    for body in ends:
        assert "the server stops" in body["error"]["message"]
        assert body.get("type") == ("error" if is_named else None)
    assert ("event: error" in streamed.text.splitlines()) == is_named
    (line,) = [record.getMessage() for record in caplog.records if record.name == SERVER_LOG]
    assert line.startswith("3 requests were dropped") and "http.drain_seconds" in line
    assert "CancelledError" not in caplog.text


def test_an_address_that_is_not_there_is_refused_in_the_shape_of_its_api():
    messages = Endpoint(("/v1/messages",), echo, error=anthropic_error)
    with answering(ECHO, messages) as (url, _):
        for answer, status in (
            (httpx.get(f"{url}/elsewhere"), 404),
            (httpx.get(f"{url}/echo"), 405),
        ):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (status, status)
            assert answer.request.url.path in error["message"]
        for path, status, kind in (
            ("/v1/messages", 405, "invalid_request_error"),
            ("/v1/messages/elsewhere", 404, "not_found_error"),
        ):
            answer = httpx.get(url + path)
            body = answer.json()
            assert (answer.status_code, body["type"]) == (status, "error")
            assert body["error"]["type"] == kind
        assert httpx.post(f"{url}/v1/messages", content=b"{").json()["error"]["type"] == (
            "invalid_request_error"
        )


@pytest.mark.parametrize("scheme", ["bearer", "BEARER"])
def test_the_scheme_of_a_token_may_have_any_case(scheme, tmp_path: Path):
    (tmp_path / "tokens").write_text("first\n")
    with answering(ECHO, token_file=str(tmp_path / "tokens")) as (url, _):
        headers = {"Authorization": f"{scheme} first"}
        assert httpx.post(f"{url}/echo", json={}, headers=headers).status_code == 200


def test_tokens_are_needed_expire_and_are_replaced_while_the_server_runs(tmp_path: Path):
    file = tmp_path / "tokens"
    now = datetime.now(UTC)
    past, future = (now - timedelta(hours=1)).isoformat(), (now + timedelta(hours=1)).isoformat()
    file.write_text(f"# of two teams\nfirst\nold {past}\nsoon {future}\n")

    def ask(token: str | None) -> httpx.Response:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.post(f"{url}/echo", json={}, headers=headers)

    with answering(ECHO, token_file=str(file)) as (url, _):
        assert ask("first").status_code == ask("soon").status_code == 200
        for token, said in ((None, "no token"), ("wrong", "not one of"), ("old", "expired at")):
            answer = ask(token)
            assert answer.status_code == 401 and said in message(answer)
            assert "Bearer" in answer.headers["www-authenticate"]
        # a body without a token is not read
        assert b" 401 " in raw(url, f"Content-Length: {2**30}").splitlines()[0]
        file.write_text("second\n")
        os.utime(file, ns=(1, 1))
        assert ask("first").status_code == 401 and ask("second").status_code == 200
        file.unlink()
        answer = ask("second")
        assert answer.status_code == 503 and str(file) not in message(answer)


@pytest.mark.parametrize("text", ["", "# nothing\n", "token tomorrow\n", None])
def test_a_token_file_that_cannot_be_used_is_refused_at_start(tmp_path: Path, text):
    file = tmp_path / "tokens"
    if text is not None:
        file.write_text(text)
    config = HTTPConfig(port=0, token_file=str(file))
    with pytest.raises(ConfigError, match=r"http\.token_file"):
        HTTPServer([ECHO], config, ServerMetrics())


def test_an_address_in_use_is_refused_with_the_setting():
    with answering(ECHO) as (url, _):
        config = HTTPConfig(port=int(url.rpartition(":")[2]))
        with pytest.raises(ConfigError, match=r"http\.port"):
            HTTPServer([ECHO], config, ServerMetrics()).bind()


def test_requests_are_counted_by_path_and_status():
    with answering(ECHO) as (url, server):
        httpx.post(f"{url}/echo", json={})
        httpx.post(f"{url}/echo", content=b"x")
        assert httpx.post(f"{url}/elsewhere", json={}).status_code == 404
        text = server.metrics.text()
        for status in (200, 400):
            assert f'requests_total{{path="/echo",status="{status}"}} 1' in text
        assert 'request_seconds_bucket{le="+Inf"} 2' in text
        assert json.loads(httpx.post(f"{url}/echo", json={"é": 1}).text) == {"é": 1}


def test_a_header_that_does_not_arrive_closes_its_connection(monkeypatch):
    def limit(seconds: float) -> None:
        monkeypatch.setattr(connections, "HEADER_SECONDS", seconds)

    limit(0.3)
    with answering(ECHO) as (url, server):
        host, port = url.removeprefix("http://").split(":")
        heads = (b"", b"POST /echo HTTP/1.1\r\nHost: x\r\n", b"POST /echo HTTP/1.1\r\nA: ")
        for head in heads:
            with socket.create_connection((host, int(port)), timeout=300) as sock:
                sock.sendall(head)
                # the server ends the connection, and sends nothing
                assert sock.recv(1) == b""
        assert f"late_headers_total {len(heads)}" in server.metrics.text()
        # the second header of a connection
        limit(900.0)
        with socket.create_connection((host, int(port)), timeout=300) as sock:
            sock.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            said = b""
            while not said.endswith(b"{}"):
                said += sock.recv(4096)
            assert b" 200 " in said
            limit(0.3)
            sock.sendall(b"POST /echo HTTP/1.1\r\n")
            assert sock.recv(1) == b""
        limit(900.0)
        assert httpx.post(f"{url}/echo", json={"a": 1}).status_code == 200


def test_an_answer_that_takes_longer_than_a_header_may_is_sent():
    async def slow(call: HTTPCall) -> Any:
        [connection] = server._server.server_state.connections
        if connection.header_timer is not None:
            # as if the time of the header were over
            connection._close_late()
        return {}

    with (
        answering(Endpoint(("/slow",), slow)) as (url, server),
        httpx.Client(base_url=url) as client,
    ):
        assert [client.post("/slow", json={}).json() for _ in range(2)] == [{}, {}]


def test_connections_beyond_the_limit_of_open_files_are_refused_and_counted(monkeypatch, caplog):
    monkeypatch.setattr(http_server, "connection_limits", lambda: (3, 2))
    monkeypatch.setattr(connections, "HEADER_SECONDS", 900.0)
    with answering(ECHO) as (url, server):
        host, port = url.removeprefix("http://").split(":")
        kept = [socket.create_connection((host, int(port)), timeout=300) for _ in range(3)]
        for _ in range(4):
            with socket.create_connection((host, int(port)), timeout=300) as sock:
                assert sock.recv(4096).startswith(b"HTTP/1.1 503 ")
        for sock in kept:
            sock.close()
        until = time.monotonic() + 300
        while httpx.post(f"{url}/echo", json={"a": 1}).status_code != 200:
            assert time.monotonic() < until
    assert "refused_connections_total" in server.metrics.text()
    assert len([r for r in caplog.records if "ulimit -n" in r.message]) == 1


LIMITED = """
import resource, sys
from lightrft.config.generation.serving import HTTPConfig
from lightrft.serving import connections
from lightrft.serving.http_server import Endpoint, HTTPServer
from lightrft.serving.server_metrics import ServerMetrics

connections.HEADER_SECONDS = 900.0

async def echo(call):
    return dict(call.body)

server = HTTPServer([Endpoint(("/echo",), echo)], HTTPConfig(port=0), ServerMetrics())
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
print(server.bind(), flush=True)
server.run()
"""


def test_a_server_at_its_limit_of_open_files_goes_on_and_floods_no_log(tmp_path):
    """asyncio itself would log each failed attempt to accept a connection, in a loop."""
    log = tmp_path / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", LIMITED], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        host, port = url.removeprefix("http://").split(":")
        kept = [socket.create_connection((host, int(port)), timeout=300) for _ in range(400)]
        # the last one was refused at once
        assert kept[-1].recv(4096).startswith(b"HTTP/1.1 503 ")
        for sock in kept:
            sock.close()
        until = time.monotonic() + 300
        while httpx.post(f"{url}/echo", json={"a": 1}).status_code != 200:
            assert time.monotonic() < until
    finally:
        process.kill()
        process.communicate()
    assert log.stat().st_size < 10_000


def test_an_answer_whose_client_has_left_is_computed_no_further():
    began, ended = threading.Event(), threading.Event()

    async def slow(call: HTTPCall) -> Any:
        began.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            ended.set()
            raise

    with answering(Endpoint(("/slow",), slow)) as (url, server):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=300) as sock:
            sock.sendall(b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            assert began.wait(300)
        assert ended.wait(300)
        wait_for_count(server, "left_requests_total 1")
        assert server.metrics.gauges["open_requests"]() == 0


def test_a_stream_that_takes_too_long_ends_with_the_limit():
    async def endless() -> Any:
        yield {"type": "piece"}
        # as if the time of the request were over
        for limit in server._limits:
            limit.reschedule(0)
        await asyncio.sleep(600)

    async def stream(call: HTTPCall) -> Any:
        return EventStream(endless(), lambda: None)

    with answering(Endpoint(("/stream",), stream)) as (url, server):
        answer = httpx.post(f"{url}/stream", json={})
    first, failure = [line for line in answer.text.splitlines() if line]
    assert first == 'data: {"type": "piece"}'
    assert "http.timeout" in json.loads(failure.removeprefix("data: "))["error"]["message"]
