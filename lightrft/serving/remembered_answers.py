"""Answers by request id, so that a repeated request is not computed twice."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress

from lightrft.serving.problems import HTTPCall, HTTPProblem


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
