"""Wall-clock time of the phases of a step, nested by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from lightrft.observability.metrics import Metrics, Sum


class Timers:
    """Wall-clock seconds per phase of the thread that owns it.

    A phase opened inside another phase is named under it. For example, ``update`` and then
    ``forward`` give ``time/update`` and ``time/update/forward``.

    Args:
        synchronize: called at the end of each phase. Work queued on an accelerator is then charged
            to the phase that queued it. None calls nothing.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._synchronize = synchronize
        self._clock = clock
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._began = clock()

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        """Charge the time of the body to phase ``name``, even if the body raises."""
        self._open.append(name)
        full = "/".join(self._open)
        start = self._clock()
        try:
            yield
        finally:
            if self._synchronize is not None:
                self._synchronize()
            self._seconds[full] = self._seconds.get(full, 0.0) + self._clock() - start
            self._open.pop()

    def seconds(self, name: str) -> float:
        """Return the seconds charged to ``name`` since the last ``take``."""
        return self._seconds.get(name, 0.0)

    def take(self) -> Metrics:
        """Return the seconds of all phases and start again from zero.

        ``time/<phase>`` is the time of a phase. ``time/step`` is the time since the last ``take``.
        ``time/other`` is the part of it that no phase was charged with.

        Raises ``RuntimeError`` inside a phase, because its time would be split.
        """
        if self._open:
            raise RuntimeError(f"phase {'/'.join(self._open)!r} is still open")
        now = self._clock()
        step, self._began = now - self._began, now
        phases, self._seconds = self._seconds, {}
        # The time of a nested phase is part of the phase around it.
        charged = sum(seconds for name, seconds in phases.items() if "/" not in name)
        metrics = Metrics({f"time/{name}": Sum(seconds) for name, seconds in phases.items()})
        metrics.add("time/other", Sum(max(0.0, step - charged)))
        metrics.add("time/step", Sum(step))
        return metrics


def queued_is_done() -> None:
    """Wait until the accelerator has finished the work that this thread queued.

    Does nothing if no accelerator is in use.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.get_device_module(accelerator).is_initialized():
        # Only this stream: another thread may be generating on the device.
        torch.accelerator.current_stream().synchronize()


def tokens_per_second(tokens: float, seconds: float) -> float:
    """Return the throughput, or 0 if ``seconds`` is 0."""
    return tokens / seconds if seconds > 0 else 0.0
