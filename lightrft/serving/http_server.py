"""The HTTP side of a server, on starlette and uvicorn.

It checks tokens and limits, reads bodies, repeats remembered answers, and stops without losing
accepted requests. It does not know the answers: an ``Endpoint`` computes them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import socket
import time
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrft.config.generation.serving import HTTPConfig
from lightrft.serving.bearer_tokens import BearerTokens
from lightrft.serving.connections import connection_limits, limited_protocol
from lightrft.serving.field_table import RequestFields
from lightrft.serving.problems import HTTPCall, HTTPProblem, bad, openai_error
from lightrft.serving.server_metrics import ServerMetrics
from lightrft.utils.errors import ConfigError, UserError, first_line, install_extra, is_unicode
from lightrft.utils.stop_signal import TERMINATING, handling
from lightrft.utils.yaml_text import RepeatedKeyError, parse_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


_log = logging.getLogger(__name__)
LAST_WORDS = 2.0
"""Seconds after ``http.drain_seconds`` in which dropped requests get their error."""
LINGER = 2.0
"""Seconds in which the rest of a refused body is read and dropped, so that the client reads the
refusal before the connection ends."""
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape of half a character in JSON."""
KEEP_ALIVE = 75
"""Seconds after which an idle connection is closed."""
CLIENT_LEFT = 499
"""Status by which requests of clients that have left are counted, as in nginx."""
REQUEST_ID = "x-request-id"
PROTOBUF = "application/x-protobuf"
"""Content type of an answer in bytes."""
BYTES = ("application/octet-stream", PROTOBUF)
"""Content types of a body that is no JSON."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address of a server.

    Attributes:
        paths: Its paths.
        answer: Returns JSON data, a text, a message of protobuf, or an ``EventStream``. It raises
            ``HTTPProblem`` or ``UserError``.
        method: ``GET`` or ``POST``.
        is_open: It needs no token, and is answered also by a full server.
        error: Returns the body of a refusal.
        tokens: Who may ask. ``None`` for everybody who may ask the other addresses.
        fields: The fields of a request, and their types. ``None`` if they are not checked.
    """

    paths: tuple[str, ...]
    answer: Callable[[HTTPCall], Awaitable[object]]
    method: str = "POST"
    is_open: bool = False
    error: Callable[[HTTPProblem], dict[str, object]] = openai_error
    tokens: BearerTokens | None = None
    fields: RequestFields | None = None


@dataclass(frozen=True, slots=True)
class EventStream:
    """An answer that is sent piece by piece, as server-sent events.

    Attributes:
        events: JSON data of each event.
        close: Called once, after the last event, or when the client has left.
        has_names: Events are named by their ``type``, and the last one ends the stream, as in the
            API of Anthropic. Else ``[DONE]`` ends it.
    """

    events: AsyncIterator[object]
    close: Callable[[], None]
    has_names: bool = False


def check_address(config: HTTPConfig) -> None:
    """Raise ``ConfigError`` if the address is in use, so that no model is loaded in vain."""
    _bound(config, listens=False).close()


def _bound(config: HTTPConfig, *, listens: bool) -> socket.socket:
    """Return a socket that is bound to the address, or raise ``ConfigError``."""
    host, port = config.host, config.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sends small answers at once (TCP_NODELAY).
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        if listens:
            found.listen(1024)
    except OSError as error:
        found.close()
        raise ConfigError(
            f"http.host = {host!r}, http.port = {port}: {error}; choose another port, or 0 "
            "for a free one"
        ) from error
    return found


class HTTPServer:
    """A server of ``endpoints``.

    Args:
        endpoints: The addresses.
        config: Address, tokens and limits.
        metrics: Counts requests, by path and status.
        on_stop: Called once no further request is accepted, before the open ones are finished.

    Raises:
        ConfigError: starlette and uvicorn are missing, or the token file cannot be used.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        config: HTTPConfig,
        metrics: ServerMetrics,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.on_stop = on_stop
        self.tokens = None
        if config.token_file is not None:
            self.tokens = BearerTokens(Path(config.token_file).expanduser())
        self.answers = RememberedAnswers(config.remembered)
        self._open = 0
        self._limits: set[asyncio.Timeout] = set()
        self._is_over = False
        self._seconds = 0.0
        self._server: Any = None
        self._socket: socket.socket | None = None
        self.app = self._application(endpoints)
        metrics.gauges["open_requests"] = lambda: float(self._open)

    def bind(self) -> str:
        """Listen, and return the URL. Raises ``ConfigError`` if the address is in use."""
        self._socket = _bound(self.config, listens=True)
        host = self.config.host
        name = f"[{host}]" if self._socket.family == socket.AF_INET6 else host
        return f"http://{name}:{self._socket.getsockname()[1]}"

    def run(self) -> None:
        """Answer until SIGTERM or Ctrl-C, then finish the accepted requests."""
        import uvicorn

        stop, drop, seconds = self.on_stop, self._drop, self.config.drain_seconds

        class Draining(uvicorn.Server):
            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                timer = asyncio.get_running_loop().call_later(seconds, drop)
                stop()
                await super().shutdown(sockets)
                timer.cancel()

        assert self._socket is not None, "bind first"
        most, backlog = connection_limits()
        settings = uvicorn.Config(
            self.app,
            http=limited_protocol(most, self.metrics),
            backlog=backlog,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=math.ceil(seconds + LAST_WORDS),
        )
        self._server = Draining(settings)
        # uvicorn raises the signal again once it has stopped: this end was asked for
        with suppress(KeyboardInterrupt), handling(TERMINATING, self._server.handle_exit):
            self._server.run(sockets=[self._socket])

    def _drop(self) -> None:
        """End all open requests, since the time to finish them is over."""
        self._is_over = True
        if self._limits:
            _log.warning(
                "%d requests were dropped: the server stops, and they were not finished within %g "
                "s (http.drain_seconds)",
                len(self._limits),
                self.config.drain_seconds,
            )
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0)

    @asynccontextmanager
    async def _limited(self, seconds: float, late: HTTPProblem) -> AsyncGenerator[None]:
        """Limit the time of a part of a request.

        Args:
            seconds: The longest time.
            late: The refusal after that time.

        Raises:
            HTTPProblem: The time is over, or the server stops.
        """
        try:
            async with asyncio.timeout(0 if self._is_over else max(0.0, seconds)) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError as error:
            if self._is_over:
                raise HTTPProblem(503, "the server stops; repeat the request later") from error
            raise late from error

    def stop(self) -> None:
        """Make ``run`` finish the accepted requests and return. For other threads."""
        if self._server is not None:
            self._server.should_exit = True

    def _application(self, endpoints: Sequence[Endpoint]) -> Any:
        try:
            import uvicorn  # noqa: F401  so that its absence is an error at start
            from starlette.applications import Starlette
            from starlette.responses import JSONResponse
            from starlette.routing import Route
        except ImportError as error:
            raise ConfigError(
                f"a server needs starlette and uvicorn ({error}): {install_extra('serve')}"
            ) from error

        async def unrouted(request: Request, error: Any) -> Response:
            problem = _unrouted(request, error.status_code, error.headers)
            near = (e.error for e in endpoints if request.url.path.startswith(e.paths))
            return JSONResponse(next(near, openai_error)(problem), problem.status, problem.headers)

        routes = []
        for endpoint in endpoints:
            for path in endpoint.paths:
                routes.append(Route(path, self._handler(endpoint, path), methods=[endpoint.method]))
        return Starlette(routes=routes, exception_handlers={404: unrouted, 405: unrouted})

    def _handler(self, endpoint: Endpoint, path: str) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            start = time.monotonic()
            try:
                response = await self._answer(endpoint, request)
            except HTTPProblem as problem:
                response = self._refusal(problem, request, endpoint)
            except UserError as error:
                response = self._refusal(bad(str(error)), request, endpoint)
            except Exception as error:
                # the traceback is for the log of the server, not for the client
                _log.exception("a request to %s failed", path)
                problem = HTTPProblem(500, f"the server failed: {first_line(error)}")
                response = self._refusal(problem, request, endpoint)
            labels = {"path": path, "status": str(response.status_code)}
            self.metrics.count("requests", labels=labels)
            if not endpoint.is_open:
                self._timed(time.monotonic() - start)
            return response

        return handle

    def _timed(self, seconds: float) -> None:
        self.metrics.observe("request_seconds", seconds)
        self._seconds += 0.1 * (seconds - self._seconds)

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response:
        from starlette.responses import JSONResponse, PlainTextResponse
        from starlette.responses import Response as PlainResponse

        if endpoint.is_open:
            answer = await endpoint.answer(HTTPCall({}, math.inf))
            is_text = isinstance(answer, str)
            return PlainTextResponse(answer) if is_text else JSONResponse(answer)
        tokens = endpoint.tokens or self.tokens
        if tokens is not None:
            # the header of Anthropic's clients holds the token alone
            key = request.headers.get("x-api-key")
            given = f"Bearer {key}" if key else ""
            tokens.check(request.headers.get("authorization", given))
        if self._open >= self.config.max_requests:
            after = max(1, math.ceil(self._seconds))
            raise HTTPProblem(
                429,
                f"{self._open} requests are open, the most of this server (http.max_requests); "
                f"repeat the request in {after} s",
                {"Retry-After": str(after)},
            )
        self._open += 1
        is_stream = False
        try:
            is_post = endpoint.method == "POST"
            call = await self._read(request) if is_post else self._in_path(request)
            if endpoint.fields is not None:
                # in a thread, so that long lists delay no other request
                await asyncio.to_thread(endpoint.fields.check, call.body)
            computed = self._computed(call, endpoint)
            answer, is_repeated = await self._while_connected(request, computed)
            is_stream = isinstance(answer, EventStream)
        finally:
            # a stream is open until its last event
            self._open -= not is_stream
        if is_repeated:
            self.metrics.count("repeated_requests")
        if isinstance(answer, EventStream):
            return self._streamed(answer, call, endpoint)
        if isinstance(answer, str):
            return PlainTextResponse(answer)
        if isinstance(answer, bytes):
            return PlainResponse(answer, media_type=PROTOBUF)
        headers = {REQUEST_ID: call.id} if call.id else {}
        return JSONResponse(answer, headers=headers)

    def _in_path(self, request: Request) -> HTTPCall:
        return HTTPCall(request.path_params, time.monotonic() + self.config.timeout)

    async def _computed(self, call: HTTPCall, endpoint: Endpoint) -> tuple[object, bool]:
        late = f"no answer within {self.config.timeout:g} s (http.timeout); send less at once"
        async with self._limited(call.deadline - time.monotonic(), HTTPProblem(504, late)):
            if call.body.get("stream"):
                # events are not kept, so a repeated request is computed again
                return await endpoint.answer(call), False
            return await self.answers.get(call, endpoint.answer)

    async def _while_connected(
        self, request: Request, answer: Coroutine[Any, Any, tuple[object, bool]]
    ) -> tuple[object, bool]:
        """Return the result of ``answer``, which is cancelled once the client has left.

        Raises ``HTTPProblem`` if the client has left.
        """
        task = asyncio.ensure_future(answer)
        left = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self.metrics.count("left_requests")
            raise HTTPProblem(CLIENT_LEFT, "the client has left")
        finally:
            left.cancel()
            task.cancel()

    def _streamed(self, stream: EventStream, call: HTTPCall, endpoint: Endpoint) -> Response:
        """Return the response that sends the events of ``stream``."""
        from starlette.responses import StreamingResponse

        server = self
        is_whole = False

        async def events() -> AsyncIterator[str]:
            nonlocal is_whole
            async for event in self._events(stream, call, endpoint):
                yield event
            is_whole = True

        class Streamed(StreamingResponse):
            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                try:
                    await super().__call__(scope, receive, send)
                finally:
                    # also if the client has left before the first event
                    server._open -= 1
                    stream.close()
                    if not is_whole:
                        server.metrics.count("broken_streams")

        headers = {"Cache-Control": "no-cache"}
        return Streamed(events(), headers=headers, media_type="text/event-stream")

    async def _events(
        self, stream: EventStream, call: HTTPCall, endpoint: Endpoint
    ) -> AsyncIterator[str]:
        """Yield the events of ``stream`` as text, and a last one that says how it ended."""
        failure: HTTPProblem | None = None
        last = "" if stream.has_names else "data: [DONE]\n\n"
        late = f"no whole answer within {self.config.timeout:g} s (http.timeout); ask for less"
        try:
            async with self._limited(call.deadline - time.monotonic(), HTTPProblem(504, late)):
                async for event in stream.events:
                    yield _event(event, stream.has_names)
        except HTTPProblem as problem:
            failure = problem
        except UserError as error:
            failure = bad(str(error))
        except Exception as error:
            _log.exception("a stream failed")
            failure = HTTPProblem(500, f"the server failed: {first_line(error)}")
        if failure is not None:
            last = _event(endpoint.error(failure), stream.has_names)
        if last:
            yield last

    async def _read(self, request: Request) -> HTTPCall:
        """Return the body of ``request``: a JSON object, or bytes."""
        from starlette.requests import ClientDisconnect

        self._check_size(request)
        data = bytearray()
        late = f"the body did not arrive within {self.config.timeout:g} s (http.timeout)"
        try:
            async with self._limited(self.config.timeout, HTTPProblem(408, late)):
                async for piece in request.stream():
                    data += piece
                    if len(data) > self._largest:
                        raise self._too_large(f"more than {len(data)}")
        except ClientDisconnect as error:
            self.metrics.count("truncated_uploads")
            raise bad(f"the upload was truncated after {len(data)} bytes") from error
        id = request.headers.get(REQUEST_ID, "")[:200]
        if request.headers.get("content-type") in BYTES:
            end = time.monotonic() + self.config.timeout
            return HTTPCall(dict(request.query_params), end, data=bytes(data))
        tree = await asyncio.to_thread(_parsed, bytes(data))
        query = hashlib.blake2b(request.url.path.encode() + b"\0" + data, digest_size=16)
        deadline = time.monotonic() + self.config.timeout
        return HTTPCall({**tree, **request.path_params}, deadline, query.hexdigest(), id)

    @property
    def _largest(self) -> float:
        """The largest body in bytes."""
        return self.config.max_body_mb * 2**20

    def _check_size(self, request: Request) -> None:
        """Raise ``HTTPProblem`` if the header says that the body is too large."""
        given = request.headers.get("content-length", "")
        if given.isdigit() and int(given) > self._largest:
            raise self._too_large(given)

    def _too_large(self, size: str) -> HTTPProblem:
        limit = self.config.max_body_mb
        return HTTPProblem(
            413,
            f"the body has {size} bytes, and the limit is {limit:g} MiB (http.max_body_mb); send "
            "fewer items at once, or media as URLs",
            {"Connection": "close"},
        )

    def _refusal(self, problem: HTTPProblem, request: Request, endpoint: Endpoint) -> Response:
        from starlette.responses import JSONResponse, StreamingResponse

        body = endpoint.error(problem)
        if problem.status != 413:
            return JSONResponse(body, problem.status, headers=problem.headers)
        text = json.dumps(body).encode()
        headers = {**problem.headers, "Content-Length": str(len(text))}
        return StreamingResponse(
            _then_drop(text, request), 413, headers=headers, media_type="application/json"
        )


def _unrouted(request: Request, status: int, headers: Mapping[str, str] | None) -> HTTPProblem:
    """Return the refusal of a path that nothing answers, or of a method that a path lacks."""
    asked = f"{request.method} {request.url.path}"
    if status == 404:
        return HTTPProblem(404, f"{asked}: this server has no such address; see its documentation")
    return HTTPProblem(status, f"{asked}: send {(headers or {}).get('Allow', 'POST')}", headers)


async def _disconnected(request: Request) -> None:
    """Return once the client of ``request``, whose body was read, has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(data: Any, has_name: bool = False) -> str:
    """Return a server-sent event."""
    name = f"event: {data['type']}\n" if has_name else ""
    return f"{name}data: {json.dumps(data)}\n\n"


async def _then_drop(text: bytes, request: Request) -> AsyncIterator[bytes]:
    """Yield ``text``, then drop what the client still sends for some seconds."""
    from starlette.requests import ClientDisconnect

    yield text
    with suppress(TimeoutError, ClientDisconnect, RuntimeError):
        async with asyncio.timeout(LINGER):
            async for _ in request.stream():
                pass


def _parsed(data: bytes) -> Mapping[str, Any]:
    try:
        text = data.decode("utf-8-sig")
        tree = parse_json(text)
    except RepeatedKeyError as error:
        raise bad(f"the body: {error}") from error
    except (ValueError, RecursionError) as error:
        raise bad(
            f"the body of {len(data)} bytes is not JSON ({first_line(error)}): was the upload "
            "truncated?"
        ) from error
    if not isinstance(tree, Mapping):
        raise bad(f"the body must be a JSON object, not a {type(tree).__name__}")
    # two escapes can spell one character: only a body with such escapes is searched
    if SURROGATE.search(text) and (where := _broken_text(tree)) is not None:
        raise bad(f"{where} is not valid Unicode: it has half of a surrogate pair; leave it out")
    return tree


def _broken_text(value: object) -> str | None:
    """Return the name of the first text in ``value`` that is not valid Unicode, or None."""
    if isinstance(value, str):
        return None if is_unicode(value) else ""
    if not isinstance(value, Mapping | list):
        return None
    for name, one in value.items() if isinstance(value, Mapping) else enumerate(value):
        if not is_unicode(str(name)):
            return "a name"
        if (below := _broken_text(one)) is not None:
            return f"{name}.{below}".removesuffix(".")
    return None


class RememberedAnswers:
    """The latest answers, and the requests that are being computed. For one event loop.

    Args:
        most: Number of answers that are kept.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._tasks: OrderedDict[str, tuple[str, asyncio.Task[object]]] = OrderedDict()

    async def get(
        self, call: HTTPCall, make: Callable[[HTTPCall], Awaitable[object]]
    ) -> tuple[object, bool]:
        """Return the answer, and True if an earlier request with this id has made it.

        A request that fails is forgotten, so that its repetition is computed.

        Args:
            call: The request.
            make: Computes the answer.

        Raises:
            HTTPProblem: Another request has had the same id.
        """
        if not call.id or not self.most:
            return await make(call), False
        known = self._tasks.get(call.id)
        if known is not None:
            query, task = known
            if query != call.query:
                raise HTTPProblem(
                    409, f"request id {call.id!r} was used for another request; make a new one"
                )
            return await asyncio.shield(task), True
        task = asyncio.ensure_future(_computed(call, make))
        self._tasks[call.id] = (call.query, task)
        task.add_done_callback(lambda done: self._finished(call.id, done))
        # shielded: a client that is gone may repeat the request
        return await asyncio.shield(task), False

    def _finished(self, name: str, task: asyncio.Task[object]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._tasks.pop(name, None)
        finished = [key for key, (_, one) in self._tasks.items() if one.done()]
        for key in finished[: max(0, len(finished) - self.most)]:
            with suppress(KeyError):
                del self._tasks[key]


async def _computed(call: HTTPCall, make: Callable[[HTTPCall], Awaitable[object]]) -> object:
    return await make(call)
