"""Ask a server over HTTP, with repetitions until a deadline."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from lightrft.utils.errors import ConfigError
from lightrft.workers.scoring.circuit_breaker import CircuitBreaker

FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0
"""Seconds before the first repetition of a request, and most seconds before a later one."""
CONNECT_SECONDS = 10.0
"""Limit of connecting to the server."""
ALIVE = (401, 408, 425, 429, 503)
"""HTTP statuses of a server that works, and may answer later. 401: tokens may be replaced."""
SHORTEST_PREFIX = len("sha256:") + 12
"""Fewest characters of a digest that names a model."""

T = TypeVar("T")
R = TypeVar("R")


class Unanswered(Exception):
    """A request failed, or was not answered before its deadline."""


class ServerClient:
    """Sends requests to one server. Every method may be called from several threads.

    Args:
        url: Address of the server.
        deadline: Time in seconds after which a request and all its repetitions have failed.
        most: Largest number of requests at once.
        authorization: Returns the headers with the token or the key, for each trial.

    Attributes:
        breaker: Holds requests back while the server does not answer.
        counts: Number of ``requests``, ``retries`` and ``unanswered`` ones.
    """

    def __init__(
        self, url: str, deadline: float, most: int, authorization: Callable[[], dict[str, str]]
    ) -> None:
        self.url = url
        self.deadline = deadline
        self.most = most
        self.authorization = authorization
        self.breaker = CircuitBreaker()
        self.counts: Counter[str] = Counter()
        limits = httpx.Limits(max_connections=most)
        self._client = httpx.Client(base_url=url.rstrip("/"), limits=limits)

    def together(self, send: Callable[[T], R], items: Sequence[T]) -> list[R]:
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
    ) -> Mapping[str, Any]:
        """Return the server's answer, after repetitions.

        Args:
            method: HTTP method.
            path: Path of the endpoint.
            body: JSON object to send. ``None`` for none.
            headers: Further headers.

        Raises:
            Unanswered: The server refuses the request, or does not answer before ``deadline``.
        """
        start = time.monotonic()
        deadline = start + self.deadline
        if self.breaker.silent_for > self.deadline:
            # others have waited for it that long already: one trial only
            deadline = start
        wait, problem = FIRST_WAIT, ""
        while self.breaker.enter(deadline):
            # the last trial too has some time
            shortest = min(CONNECT_SECONDS, self.deadline)
            left = max(shortest, deadline - time.monotonic())
            timeout = httpx.Timeout(left, connect=min(left, CONNECT_SECONDS))
            pause = wait
            try:
                sent = {**(headers or {}), **self.authorization()}
                answer = self._client.request(
                    method, path, json=body, headers=sent, timeout=timeout
                )
                problem = self._problem(answer)
                if not problem:
                    self.breaker.succeeded()
                    return answer.json()
                pause = max(wait, _seconds(answer.headers.get("retry-after", "")))
            except (httpx.TransportError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
                self.breaker.failed(problem)
            if time.monotonic() + pause >= deadline:
                break
            self.counts["retries"] += 1
            time.sleep(pause)
            wait = min(2 * wait, LONGEST_WAIT)
        raise Unanswered(
            f"{self.url} did not answer within deadline = {self.deadline:g} s: "
            f"{problem or self.breaker.problem}"
        )

    def _problem(self, answer: httpx.Response) -> str:
        """Return the reason to repeat a request, or an empty text.

        Raises ``Unanswered`` for a refusal that a repetition would not change.
        """
        if answer.status_code == httpx.codes.OK:
            return ""
        problem = f"status {answer.status_code}: {answer.text[:300]}"
        if answer.status_code in ALIVE:
            self.breaker.succeeded()
            return problem
        if answer.status_code >= 500:
            self.breaker.failed(problem)
            return problem
        self.breaker.succeeded()
        raise Unanswered(f"{self.url} refused the request: {problem}")


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
