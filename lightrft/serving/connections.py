"""Limits of the connections of a server that uvicorn does not have."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from lightrft.serving.server_metrics import ServerMetrics

_log = logging.getLogger(__name__)
HEADER_SECONDS = 30.0
"""Seconds in which the header of a request must arrive, from the connection or its first byte."""
BACKLOG = 256
"""Most connections that are accepted in one turn of the event loop."""
RESERVED = 64
"""Open files that are left for everything but connections."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)


def connection_limits() -> tuple[int, int]:
    """Return the most connections of this process, and the most that one turn accepts.

    Without a free file, asyncio accepts no connection and logs each attempt with its traceback.
    """
    try:
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except ImportError:
        # Windows has no such limit.
        return 2**31, BACKLOG
    files = Path("/dev/fd")
    used = len(list(files.iterdir())) if files.is_dir() else 0
    room = max(4, most - used - RESERVED)
    backlog = min(BACKLOG, room // 4)
    # A refused connection keeps its file for two further turns.
    return room - 3 * backlog, backlog


def limited_protocol(most: int, metrics: ServerMetrics) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with a limit of connections, and of the time of a header.

    Args:
        most: Most open connections. Further ones are answered with status 503 and closed.
        metrics: Counts ``refused_connections`` and ``late_headers``.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol

    class LimitedProtocol(base):
        has_warned = False
        header_timer: asyncio.TimerHandle | None = None
        is_refused = False

        def connection_made(self, transport: asyncio.Transport) -> None:
            if len(self.connections) >= most:
                if not LimitedProtocol.has_warned:
                    LimitedProtocol.has_warned = True
                    _log.warning(
                        "a connection was refused: %d are open, the most that the limit of open "
                        "files allows; raise it by ulimit -n (further ones are counted as "
                        "refused_connections)",
                        len(self.connections),
                    )
                metrics.count("refused_connections")
                self.is_refused = True
                transport.write(_FULL)
                transport.close()
                return
            super().connection_made(transport)
            self._await_header()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.is_refused:
                return
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_timer()
            else:
                self._await_header()

        def _await_header(self) -> None:
            if self.header_timer is None:
                loop = asyncio.get_running_loop()
                self.header_timer = loop.call_later(HEADER_SECONDS, self._close_late)

        def _stop_timer(self) -> None:
            if self.header_timer is not None:
                self.header_timer.cancel()
                self.header_timer = None

        def _close_late(self) -> None:
            self.header_timer = None
            if self.cycle is None or self.cycle.response_complete:
                metrics.count("late_headers")
                self.transport.close()

    return LimitedProtocol
