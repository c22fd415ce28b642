"""Updates of the weights of a served model, by those who have a token for it.

An update has three parts: begin, buckets, end. From its begin to its end the server answers no
request, since some weights are new and some are old. An update that nobody continues ends by
itself, and the server answers from whole weights again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping

from torch import Tensor

from lightrft.engines.base import Fingerprint
from lightrft.engines.fingerprint import checksums
from lightrft.engines.native import NativeEngine
from lightrft.engines.served.weight_buckets import read_bucket
from lightrft.engines.weight_transport import WeightBuffer
from lightrft.serving.bearer_tokens import BearerTokens
from lightrft.serving.chat.generation_loop import GenerationLoop
from lightrft.serving.field_table import INTEGER, TEXT, RequestFields, Types
from lightrft.serving.http_server import Endpoint
from lightrft.serving.problems import HTTPCall, HTTPProblem, bad
from lightrft.utils.errors import DataError

_log = logging.getLogger(__name__)
PATH = "/v1/weights"


class WeightUpdates:
    """Answers requests to update the weights.

    Args:
        engine: Generates from the weights.
        loop: Generates the answers of all requests.
        digest: The digest of the weights that the server started with.
        replaced: Called with the digest of new weights.
        tokens: Who may update the weights.
        largest: Most bytes of a bucket.
        patience: Seconds after the last request of an update in which the next one must come.
        start_weights: Returns the weights that the server started with, read again.
    """

    def __init__(
        self,
        engine: NativeEngine,
        loop: GenerationLoop,
        digest: str,
        replaced: Callable[[str], None],
        tokens: BearerTokens,
        largest: int,
        patience: float,
        start_weights: Callable[[], Iterable[tuple[str, Tensor]]],
    ) -> None:
        self.engine = engine
        self.loop = loop
        self.digest = self._start = digest
        self.replaced = replaced
        self.tokens = tokens
        self.largest = largest
        self.patience = patience
        self.start_weights = start_weights
        self._deadline = 0.0
        self._timer: threading.Timer | None = None
        self._shapes = {name: tuple(p.shape) for name, p in engine.decoder.parameters()}
        self._lock = threading.Lock()
        self._update = ""
        self._last = ""
        self._version = 0
        self._next = 0
        self._is_whole = True
        self._sums: Fingerprint | None = None
        self._buffer = WeightBuffer(engine.decoder.load)

    def endpoints(self) -> list[Endpoint]:
        """Return the addresses."""
        return [
            Endpoint((PATH,), self._in_thread(self.held), "GET", tokens=self.tokens),
            self._changes("begin", self.begin, {"version": (INTEGER,)}),
            self._changes("bucket", self.bucket, {"update": (TEXT,), "number": (TEXT,)}),
            self._changes("end", self.end, {"update": (TEXT,)}),
        ]

    def _changes(
        self, name: str, answer: Callable[[HTTPCall], object], read: Mapping[str, Types]
    ) -> Endpoint:
        """Return the address of a part of an update, whose requests have the fields ``read``."""
        path, answered, fields = f"{PATH}/{name}", self._in_thread(answer), RequestFields(read)
        return Endpoint((path,), answered, tokens=self.tokens, fields=fields)

    def held(self, call: HTTPCall) -> dict[str, object]:
        """Return version, digest and checksums of the weights.

        ``start_digest`` is that of the weights that the server has after a restart.
        """
        return {
            "version": self.engine.version,
            "digest": self.digest,
            "start_digest": self._start,
            "fingerprint": self._fingerprint(),
            "is_whole": self._is_whole and not self._update,
        }

    def _fingerprint(self) -> Fingerprint:
        """Return the checksum of every tensor that the engine holds."""
        if self._sums is None:
            self._sums = checksums(self.engine.decoder.parameters())
        return self._sums

    def begin(self, call: HTTPCall) -> dict[str, object]:
        """Begin an update to ``version``. It replaces an update that was cut off.

        The answer has the checksums of the weights, so that only others need to be sent.
        """
        version = call.number("version", 0, 0, 2**63 - 1)
        reason = (
            f"an update of the weights to version {version} has begun, and has not ended; repeat "
            "the request later, or send the weights again"
        )
        if not self.loop.hold(reason, call.deadline):
            raise HTTPProblem(503, "requests are still open (http.timeout); repeat the request")
        self._update, self._version, self._next = uuid.uuid4().hex, version, 0
        self._buffer.leave()
        return {
            "update": self._update,
            "fingerprint": self._fingerprint(),
            "largest": self.largest,
        }

    def bucket(self, call: HTTPCall) -> dict[str, object]:
        """Load a bucket. One that is sent again changes nothing.

        If one does not fit before any tensor has changed, the update ends, and the server answers
        requests again.
        """
        self._check_update(call)
        number = str(call.body.get("number"))
        if number.isdigit() and int(number) < self._next:
            return {}
        if number != str(self._next):
            raise bad(f"number = {number}: bucket {self._next} of the update comes next")
        try:
            values, layout = read_bucket(call.data, self._shapes)
        except DataError as error:
            if self._is_whole:
                self._leave()
            raise bad(str(error)) from error
        self._sums, self._is_whole = None, False
        self._buffer.put(values, layout)
        self._next += 1
        return {}

    def end(self, call: HTTPCall) -> dict[str, object]:
        """End an update, and return the checksum of every tensor that the engine holds."""
        # an end that is sent again changes nothing
        if not self._last or call.body.get("update") != self._last:
            self._check_update(call)
            self._sums = self.engine.load_weights((), self._version)
            self._last, self._is_whole = self._update, True
            self._replace(f"update:{self._last}")
            self._leave()
        return {
            "version": self.engine.version,
            "digest": self.digest,
            "fingerprint": self._fingerprint(),
        }

    def _in_thread(
        self, answer: Callable[[HTTPCall], object]
    ) -> Callable[[HTTPCall], Awaitable[object]]:
        def alone(call: HTTPCall) -> object:
            with self._lock:
                try:
                    return answer(call)
                finally:
                    self._await_next()

        async def answered(call: HTTPCall) -> object:
            return await asyncio.to_thread(alone, call)

        return answered

    def close(self) -> None:
        """Await no further request."""
        if self._timer is not None:
            self._timer.cancel()

    def _replace(self, digest: str) -> None:
        self.digest = digest
        self.replaced(digest)

    def _leave(self) -> None:
        """End the update, whose weights are whole, and answer requests again."""
        self._update = ""
        self.loop.release()

    def _await_next(self) -> None:
        """End the update after ``patience`` seconds without a further request."""
        self.close()
        self._timer = None
        if self._update:
            self._deadline = time.monotonic() + self.patience
            self._timer = threading.Timer(self.patience, self._expire, [self._update])
            self._timer.daemon = True
            self._timer.start()

    def _expire(self, update: str) -> None:
        with self._lock:
            # A request may have come while this thread waited for the lock.
            if self._update != update or time.monotonic() < self._deadline:
                return
            _log.warning(
                "the update of the weights to version %d was left: no request for it came within "
                "%g s (http.timeout); the server answers from %s weights",
                self._version,
                self.patience,
                "its former" if self._is_whole else "its first",
            )
            self._buffer.leave()
            if not self._is_whole:
                try:
                    self.engine.decoder.load(self.start_weights())
                    self._sums = self.engine.load_weights((), 0)
                except Exception:
                    _log.exception("the first weights cannot be read; requests are refused")
                    return
                self._is_whole = True
                self._replace(self._start)
            self._leave()

    def _check_update(self, call: HTTPCall) -> None:
        if not self._update or call.body.get("update") != self._update:
            raise HTTPProblem(409, "no such update: another one has begun, or the server is new")
