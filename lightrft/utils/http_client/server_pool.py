"""Spread requests over servers that give the same answers."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from lightrft.utils.http_client.server_client import (
    FIRST_WAIT,
    LONGEST_WAIT,
    ServerClient,
    Unanswered,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


class ServerPool:
    """Sends each request to the server with the fewest open ones.

    A server that fails several times in a row gets no further requests but one trial from time to
    time, see ``CircuitBreaker``. Every method may be called from several threads.

    Args:
        urls: Addresses of the servers.
        deadline: Time in seconds after which a request and all its repetitions have failed. With
            several servers, each trial gets an equal part of it.
        most: Largest number of requests to each server at once.
        authorization: Returns the headers with the token or the key, for each trial.

    Attributes:
        clients: A client for each server.
        counts: Number of ``requests``, ``retries`` and ``unanswered`` ones.
    """

    def __init__(
        self,
        urls: Sequence[str],
        deadline: float,
        most: int,
        authorization: Callable[[], dict[str, str]],
    ) -> None:
        self.deadline = deadline
        self.counts: Counter[str] = Counter()
        self.clients = [ServerClient(u, deadline / len(urls), most, authorization) for u in urls]
        for client in self.clients:
            client.counts = self.counts
        self._open = dict.fromkeys(range(len(urls)), 0)
        self._left_out: set[int] = set()
        self._next = itertools.count()
        self._lock = threading.Lock()

    def send_all(self, send: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return ``send`` of each item, with all servers busy at once."""
        with ThreadPoolExecutor(sum(client.most for client in self.clients)) as threads:
            return list(threads.map(send, items))

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Mapping[str, Any]:
        """Return the answer of a server. See ``ServerClient.ask``.

        Args:
            method: HTTP method.
            path: Path of the endpoint below each address. Empty for the address itself.
            body: JSON object to send. ``None`` for none.
            headers: Further headers.

        Raises:
            Unanswered: A server refuses the request, or none answers before ``deadline``.
        """
        if len(self.clients) == 1:
            return self.clients[0].ask(method, path, body, headers)
        end, wait, tried = time.monotonic() + self.deadline, FIRST_WAIT, set[int]()
        while True:
            number = self._least_busy(tried)
            with self._counted(number):
                try:
                    return self.clients[number].ask(method, path, body, headers, once=True)
                except Unanswered as error:
                    if error.refused:
                        raise
                    problem = str(error)
            self._note(number, problem)
            tried.add(number)
            if len(tried) == len(self.clients):
                if time.monotonic() + wait >= end:
                    raise Unanswered(
                        f"none of {len(tried)} servers answered within deadline = "
                        f"{self.deadline:g} s: {problem}"
                    )
                time.sleep(wait)
                tried, wait = set(), min(2 * wait, LONGEST_WAIT)
            self.counts["retries"] += 1

    def close(self) -> None:
        """Close the connections."""
        for client in self.clients:
            client.close()

    def _least_busy(self, tried: set[int]) -> int:
        """Return the server for the next trial of a request.

        Args:
            tried: Servers that have just failed it.
        """
        with self._lock:
            turn = next(self._next)
            count = len(self.clients)

            def place(number: int) -> tuple[bool, int, int]:
                breaker, busy = self.clients[number].breaker, self._open[number]
                # One trial of a silent server at a time: others would wait for its result.
                is_ready = breaker.is_ready and not (breaker.holds and busy)
                return not is_ready, busy, (number - turn) % count

            return min((n for n in range(count) if n not in tried), key=place)

    @contextmanager
    def _counted(self, number: int) -> Generator[None]:
        """Count a request to a server as open. Note if the server answers again."""
        with self._lock:
            self._open[number] += 1
        try:
            yield
        finally:
            client = self.clients[number]
            with self._lock:
                self._open[number] -= 1
                is_back = number in self._left_out and not client.breaker.holds
                if is_back:
                    self._left_out.discard(number)
            if is_back:
                log.warning("%s answers again", client.url)

    def _note(self, number: int, problem: str) -> None:
        """Log once that a server is left out."""
        client = self.clients[number]
        with self._lock:
            is_new = client.breaker.holds and number not in self._left_out
            if is_new:
                self._left_out.add(number)
        if is_new:
            log.warning("%s; other servers get its requests", problem)
