"""Ask a server over HTTP, with repetitions until a deadline."""

from __future__ import annotations

import json
import logging
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from lightrft.utils.errors import ConfigError
from lightrft.utils.lazy_imports import httpx

log = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0
"""Seconds before the first repetition of a request, and most seconds before a later one."""
CONNECT_SECONDS = 10.0
"""Limit of connecting to the server."""
ALIVE = (401, 408, 425, 429, 503)
"""HTTP statuses of a server that works, and may answer later. 401: tokens may be replaced."""
QUIET_SECONDS, SAY_SECONDS = 5.0, 30.0
"""Seconds that a request waits before a warning, and seconds between two warnings."""
PARTING_SECONDS = 1.0
"""Limit of a last request to a server that did not answer before its deadline."""
SHORTEST_PREFIX = len("sha256:") + 12
"""Fewest characters of a digest that names a model."""

T = TypeVar("T")
R = TypeVar("R")


class Unanswered(Exception):
    """A request failed, or was not answered before its deadline.

    Attributes:
        refused: The server refused it, so that a repetition would not help.
        status: HTTP status of the answer to the last trial, or 0 without one.
    """

    refused = False
    status = 0


class Passing(Exception):
    """A trial of a request failed, and another one may succeed.

    Args:
        problem: The cause.
        pause: Fewest seconds before the next trial.
        broken: The server does not work. Otherwise the trial counts as an answer.
        status: HTTP status of the answer, or 0 without one.
    """

    def __init__(
        self, problem: str, pause: float = 0.0, *, broken: bool = False, status: int = 0
    ) -> None:
        super().__init__(problem)
        self.pause = pause
        self.broken = broken
        self.status = status


class OpenStream:
    """A stream of events that another thread may close."""

    def __init__(self) -> None:
        self.is_closed = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def close(self) -> None:
        """Close the connection. A thread that waits for its next event wakes at once."""
        with self._lock:
            self.is_closed = True
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def over(self, answer: httpx.Response) -> Generator[None]:
        """Return the context in which the events of ``answer`` are read."""
        with self._lock:
            # documented by httpcore; other transports have no socket
            found = answer.extensions.get("network_stream")
            self._socket = None if found is None else found.get_extra_info("socket")
        try:
            yield
        finally:
            # the connection may serve another request from now on
            with self._lock:
                self._socket = None


@dataclass(slots=True)
class _Trials:
    """The trials of one request: when it began or last got something new, and the next pause."""

    start: float = field(init=False)
    wait: float = field(init=False)

    def __post_init__(self) -> None:
        self.progressed()

    def progressed(self) -> None:
        self.start, self.wait = time.monotonic(), FIRST_WAIT


class ServerClient:
    """Sends requests to one server. Every method may be called from several threads.

    Args:
        url: Address of the server.
        deadline: Time in seconds after which a request and all its repetitions have failed.
        most: Largest number of requests at once.
        authorization: Returns the headers with the token or the key, for each trial.
        passing: HTTP statuses of a server that works, and may answer later.
        direct: Use no proxy that the environment names.

    Attributes:
        breaker: Holds requests back while the server does not answer.
        counts: Number of ``requests``, ``retries`` and ``unanswered`` ones.
    """

    def __init__(
        self,
        url: str,
        deadline: float,
        most: int,
        authorization: Callable[[], dict[str, str]],
        passing: Collection[int] = ALIVE,
        *,
        direct: bool = False,
    ) -> None:
        self.url = url
        self.deadline = deadline
        self.most = most
        self.authorization = authorization
        self.passing = passing
        self.breaker = CircuitBreaker()
        self.counts: Counter[str] = Counter()
        self._news = self._heard = self._says_again = 0.0
        self._gave_up = False
        limits = httpx.Limits(max_connections=most)
        self._client = httpx.Client(base_url=url.rstrip("/"), limits=limits, trust_env=not direct)

    @property
    def patience(self) -> float:
        """Longest wait in seconds for an answer that nothing depends on, as at the end of a run."""
        return PARTING_SECONDS if self._gave_up else math.inf

    def refuse_silence(self, start: float) -> None:
        """Raise ``Unanswered`` if nothing new came for ``deadline`` seconds.

        A trial of a stream may wait longer than that, since other streams may bring something.

        Args:
            start: When the last stream began, by ``time.monotonic``.
        """
        if time.monotonic() - max(start, self._news, self._heard) >= self.deadline:
            raise self._silent(self.breaker.problem or "nothing new came")

    def _silent(self, problem: str) -> Unanswered:
        """Return the error that ends a request after its deadline."""
        self._gave_up = True
        return Unanswered(
            f"{self.url} did not answer within deadline = {self.deadline:g} s: {problem}"
        )

    def send_all(self, send: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return ``send`` of each item. At most ``most`` are computed at once."""
        with ThreadPoolExecutor(self.most) as threads:
            return list(threads.map(send, items))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
        *,
        once: bool = False,
        is_text: bool = False,
        silence: float = math.inf,
    ) -> Mapping[str, Any]:
        """Return the server's answer, after repetitions.

        Args:
            method: HTTP method.
            path: Path of the endpoint below ``url``. Empty for ``url`` itself.
            body: JSON object to send. ``None`` for none.
            headers: Further headers.
            data: Bytes to send in place of a body.
            once: Repeat nothing.
            is_text: The answer is a text, which is left out.
            silence: Seconds without any data after which the request is repeated.

        Raises:
            Unanswered: The server refuses the request, or does not answer before ``deadline``.
        """

        def trial(left: float) -> Mapping[str, Any]:
            sent = {**(headers or {}), **self.authorization()}
            waits = _timeout(min(silence, left), left)
            answer = self._client.request(
                method, path or self.url, json=body, content=data, headers=sent, timeout=waits
            )
            self._check(answer)
            return {} if is_text else answer.json()

        found = self._repeated(trial, _Trials(), once=once)
        self._heard, self._gave_up = time.monotonic(), False
        return found

    def stream(
        self,
        path: str,
        body: Callable[[], Mapping[str, Any]],
        take: Callable[[Mapping[str, Any]], bool],
        silence: float,
        handle: OpenStream,
        prepare: Callable[[], object] = lambda: None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Pass each server-sent event of an answer to ``take``, up to the last one.

        A stream that breaks is asked for again. The deadline then counts from the last event of
        any stream that brought something new, since a busy server lets requests wait.

        Args:
            path: Path of the endpoint.
            body: Returns the JSON object to send, for each trial.
            take: Takes an event. It returns True if the event brings something new.
            silence: Seconds without an event after which the stream is asked for again.
            handle: Closes the stream. No trial follows then.
            prepare: Called before each trial. It may send other requests.
            headers: Further headers.

        Raises:
            Unanswered: The server refuses the request, or does not answer before ``deadline``.
        """
        trials = _Trials()

        def trial(left: float) -> None:
            if handle.is_closed:
                return
            with self._client.stream(
                "POST",
                path,
                json=body(),
                headers={**headers, **self.authorization()},
                timeout=_timeout(silence, left),
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    answer.read()
                self._check(answer)
                with handle.over(answer):
                    for event in self._events(answer, handle):
                        # it answers, and ``take`` may ask it in turn
                        self.breaker.succeeded()
                        if take(event):
                            trials.progressed()
                            self._news, self._gave_up = time.monotonic(), False

        try:
            self._repeated(trial, trials, handle, prepare)
        except Unanswered:
            if not handle.is_closed:
                raise

    def _events(self, answer: httpx.Response, handle: OpenStream) -> Iterator[Mapping[str, Any]]:
        """Yield the JSON data of each event. Raise ``Passing`` if the last one does not come.

        An answer that is not a stream is its only event.
        """
        if answer.headers.get("content-type", "").startswith("application/json"):
            yield self._event(answer.read())
            return
        try:
            for line in answer.iter_lines():
                if handle.is_closed:
                    return
                if not line.startswith("data:"):
                    continue
                text = line.removeprefix("data:").strip()
                if text == "[DONE]":
                    return
                yield self._event(text)
        except httpx.TransportError:
            if handle.is_closed:
                return
            raise
        if not handle.is_closed:
            raise httpx.RemoteProtocolError("the stream ended before its last event")

    def _event(self, text: str | bytes) -> Mapping[str, Any]:
        """Return the JSON object ``text``.

        Raises:
            Passing: It is an error that a repetition may end.
            Unanswered: It is another error.
            ValueError: It is no JSON object.
        """
        event = json.loads(text)
        if not isinstance(event, dict):
            raise ValueError(f"an event is no JSON object: {event!r:.100}")
        error = event.get("error")
        if isinstance(error, Mapping):
            code = str(error.get("code"))
            # SGLang gives no code to a request that it refuses, and others a word
            status = int(code) if code.isdecimal() else httpx.codes.BAD_REQUEST
            self._check_status(status, str(error.get("message")), 0)
        elif error:
            self._check_status(httpx.codes.BAD_REQUEST, str(error), 0)
        return event

    def _repeated(
        self,
        trial: Callable[[float], R],
        trials: _Trials,
        handle: OpenStream | None = None,
        prepare: Callable[[], object] = lambda: None,
        *,
        once: bool = False,
    ) -> R:
        """Return the result of the first ``trial`` that succeeds.

        Args:
            trial: Sends the request. It gets the seconds that are left.
            trials: When the request began, and the pause before its next trial.
            handle: Ends the trials once it is closed.
            prepare: Called before each trial, which may have to wait for the server.
            once: Make one trial.
        """
        # others may have waited for the server that long already: one trial only
        seconds = 0.0 if self.breaker.silent_for > self.deadline else self.deadline

        def end() -> float:
            return seconds + (trials.start if handle is None else max(trials.start, self._news))

        def given_up() -> bool:
            return self._client.is_closed or (handle is not None and handle.is_closed)

        problem, status = "", 0
        while not given_up():
            prepare()
            if not self.breaker.enter(end()):
                break
            if given_up():
                self.breaker.ended()
                break
            # the last trial too has some time
            shortest = min(CONNECT_SECONDS, self.deadline)
            try:
                result = trial(max(shortest, end() - time.monotonic()))
            except Passing as error:
                problem, pause = str(error), max(trials.wait, error.pause)
                status = error.status
                if error.broken:
                    self.breaker.failed(problem)
                else:
                    self.breaker.succeeded()
            except (httpx.TransportError, ValueError) as error:
                problem, pause = f"{type(error).__name__}: {error}", trials.wait
                status = 0
                self.breaker.failed(problem)
            except Exception:
                # it has answered, whatever the caller thinks of that
                self.breaker.succeeded()
                raise
            else:
                self.breaker.succeeded()
                return result
            if once:
                failure = Unanswered(f"{self.url} did not answer: {problem}")
                failure.status = status
                raise failure
            if given_up():
                break
            self._say_once(problem, time.monotonic() - trials.start, end() - time.monotonic())
            if time.monotonic() + pause >= end():
                break
            self.counts["retries"] += 1
            time.sleep(pause)
            trials.wait = min(2 * trials.wait, LONGEST_WAIT)
        raise self._silent(problem or self.breaker.problem)

    def _say_once(self, problem: str, waited: float, left: float) -> None:
        """Log that an answer is late, once in a while for all requests together.

        Args:
            problem: The reason.
            waited: Seconds since the request began.
            left: Seconds until its deadline.
        """
        now = time.monotonic()
        if waited < QUIET_SECONDS or now < self._says_again:
            return
        self._says_again = now + SAY_SECONDS
        log.warning(
            "%s has not answered for %.0f s, and is asked for %.0f s more: %s",
            self.url,
            waited,
            max(0.0, left),
            problem,
        )

    def _check(self, answer: httpx.Response) -> None:
        """Raise ``Passing`` or ``Unanswered`` unless the server has answered."""
        if answer.status_code != httpx.codes.OK:
            pause = _seconds(answer.headers.get("retry-after", ""))
            self._check_status(answer.status_code, answer.text[:300], pause)

    def _check_status(self, status: int, text: str, pause: float) -> None:
        """Raise ``Passing`` for a refusal that a repetition may change, else ``Unanswered``.

        Args:
            status: HTTP status of the refusal.
            text: The reason.
            pause: Fewest seconds before a repetition.
        """
        problem = f"status {status}: {text}"
        if status in self.passing:
            raise Passing(problem, pause, status=status)
        if status >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise Passing(problem, pause, broken=True, status=status)
        refusal = Unanswered(f"{self.url} refused the request: {problem}")
        refusal.refused, refusal.status = True, status
        raise refusal


def check_digest(wanted: str | None, found: str, model: str, key: str) -> None:
    """Raise ``ConfigError`` unless ``wanted`` is the digest of a served model, or begins it.

    Args:
        wanted: The setting ``digest``. ``None`` takes any model.
        found: Digest of the served model.
        model: Name of the served model.
        key: Key of the settings, for messages.
    """
    if wanted is None or (len(wanted) >= SHORTEST_PREFIX and found.startswith(wanted)):
        return
    raise ConfigError(
        f"{key}.url serves the model {model!r} of digest {found or 'unknown'}, and {key}.digest = "
        f"{wanted!r}; serve the named model, or name this one"
    )


def _seconds(text: str) -> float:
    """Return the seconds of a header ``Retry-After``, or 0 for a date."""
    return min(float(text), LONGEST_WAIT) if text.isdigit() else 0.0


def _timeout(silence: float, left: float) -> httpx.Timeout:
    """Return the timeouts of a trial: of reading, and of the rest with ``left`` seconds."""
    return httpx.Timeout(left, read=silence, connect=min(left, CONNECT_SECONDS))


TRIPS_AFTER = 3
"""Failures in a row after which requests are held back."""
PAUSE = 1.0
"""Seconds between two trials of a server that does not answer."""


class CircuitBreaker:
    """Holds requests back while a server does not answer.

    After some failures in a row, one request at a time tries the server, once in a pause. The first
    answer lets all requests through again. A thread reports the end of each request that it has
    entered, by one of the methods ``succeeded``, ``failed`` and ``ended``.

    Args:
        after: Failures in a row after which requests are held back.
        pause: Seconds between two trials.

    Attributes:
        problem: Reason of the last failure.
    """

    def __init__(self, after: int = TRIPS_AFTER, pause: float = PAUSE) -> None:
        self.after = after
        self.pause = pause
        self.problem = ""
        self._failures = 0
        self._first = 0.0
        self._next = 0.0
        # Thread whose request tries the server. Earlier requests may still fail meanwhile.
        self._trial: int | None = None
        self._changed = threading.Condition()

    @property
    def silent_for(self) -> float:
        """Seconds since the first failure after the last answer; 0 without one."""
        return time.monotonic() - self._first if self._failures else 0.0

    @property
    def holds(self) -> bool:
        """The last requests failed, so others are held back."""
        return self._failures >= self.after

    @property
    def is_ready(self) -> bool:
        """A request may be sent now, if only to try the server."""
        with self._changed:
            return not self.holds or (self._trial is None and time.monotonic() >= self._next)

    def enter(self, deadline: float) -> bool:
        """Wait until a request may be sent. Return False if that is after ``deadline``.

        Args:
            deadline: Time of ``time.monotonic``.
        """
        with self._changed:
            while True:
                now = time.monotonic()
                if not self.holds:
                    return True
                if self._trial is None and now >= self._next:
                    self._trial = threading.get_ident()
                    return True
                if now >= deadline:
                    return False
                until = deadline if self._trial else min(deadline, self._next)
                self._changed.wait(max(0.001, until - now))

    def succeeded(self) -> None:
        """Note an answer of the server."""
        with self._changed:
            self._failures = 0
            self._trial = None
            self._changed.notify_all()

    def failed(self, problem: str) -> None:
        """Note a request without an answer, and its reason."""
        with self._changed:
            self.problem = problem
            now = time.monotonic()
            self._first = self._first if self._failures else now
            self._failures += 1
            self._next = now + self.pause
        self.ended()

    def ended(self) -> None:
        """Note a request that ended before it could tell whether the server answers."""
        with self._changed:
            if self._trial == threading.get_ident():
                self._trial = None
                self._changed.notify_all()
