"""Run reward functions in a process that loads neither torch nor the user's program.

It therefore starts in an instant. Its parent starts it on one end of a socket pair and sends
frames. The first frame is a ``WorkerInit``, then one ``WorkBatch`` follows per group of calls. The
worker replies with JSON lines, one when a group has begun and one per call. The parent therefore
knows which call a silent worker is in. Output printed by functions goes to standard error.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.distributed.guarded.guardian import become_guardian
from lightrft.rewards.registry import OverBudget, Reward, load_reward
from lightrft.rewards.sandbox.results import InvalidReward, rows_of, terms_of, wrong_and_ungraded
from lightrft.rewards.sandbox.rollout_view import PromptView, RolloutView
from lightrft.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import asyncio

HEADER = struct.Struct(">Q")
# Times the CPU limit, when the kernel ends a call that does not return to Python.
KILL_FACTOR = 1.25
# Seconds, so that an event loop that is not blocked cancels its calls before the alarm fires.
LOOP_SLACK = 0.2


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """Initial message to a worker: the functions, and the limits of each call.

    Attributes:
        rewards: Name and options of each function.
        deadline: Seconds for each call.
        memory_mb: MiB beyond the memory in use after loading the functions.
    """

    rewards: list[tuple[str, dict[str, object]]]
    deadline: float
    memory_mb: int


@dataclass(frozen=True, slots=True)
class WorkBatch:
    """Calls of one function, one per pickled rollout view.

    Attributes:
        reward: Index of the function in ``WorkerInit.rewards``.
        views: Pickled ``RolloutView`` objects.
    """

    reward: int
    views: list[bytes]


class DeadlineExceeded(BaseException):
    """Raised by the alarm in a call that is past its deadline.

    Not an ``Exception``, so that handlers of the function do not catch it.
    """


def main(fd: int, parent: int) -> None:
    """Serve process ``parent`` at the other end of ``fd`` until it closes the connection."""
    os.dup2(2, 1)
    # Before any user code is imported, which may start processes.
    become_guardian(parent, fd)
    connection = socket.socket(fileno=fd)
    frame = _receive(connection)
    if frame is None:
        return
    start: WorkerInit = pickle.loads(frame)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = RewardWorker(connection, start.deadline)
    try:
        worker.rewards = [load_reward(name, options) for name, options in start.rewards]
        warm_up(worker.rewards)
        if any(reward.asynchronous for reward in worker.rewards):
            import asyncio  # noqa: F401  (a third of the start of a process; later an alarm could interrupt it)
        _limit_memory(start.memory_mb)
    except UserError as error:
        worker.tell(error=str(error))
        return
    except BaseException as error:
        worker.tell(error=f"a reward worker could not start: {describe(error)}")
        return
    worker.tell(ready=True)
    while True:
        try:
            frame = _receive(connection)
            work = None if frame is None else pickle.loads(frame)
        except MemoryError:
            worker.tell(full=True)
            return
        if work is None:
            return
        worker.serve(work)


class RewardWorker:
    """Runs calls one group at a time, each under an alarm."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.connection = connection
        self.deadline = deadline
        self.rewards: list[Reward] = []
        self.pid = os.getpid()
        self.armed = False
        self.rang = False
        self.loop: asyncio.AbstractEventLoop | None = None

    def tell(self, **message: object) -> None:
        """Send ``message`` to the parent as one JSON line."""
        if os.getpid() != self.pid:  # a function forked and its child came back here
            os._exit(0)
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def serve(self, work: WorkBatch) -> None:
        """Run the calls of ``work`` and send the outcome of each."""
        self.tell(begun=True)
        reward = self.rewards[work.reward]
        if not reward.grouped or len(work.views) == 1:
            for index, view in enumerate(work.views):
                self._alone(index, partial(self._score, reward, view), reward.cpu_seconds)
        elif reward.batched:
            self._batch(reward, work.views)
        else:
            self._score_batch(reward, work.views)

    def _score(self, reward: Reward, view: bytes) -> dict[str, float]:
        """Call a reward function on one pickled view."""
        # Unpickled within the call, so that its time and memory limits hold for a huge view, too.
        rollout = pickle.loads(view)
        result = reward.function([rollout] if reward.batched else rollout, **reward.options)
        if reward.asynchronous:
            result = self._event_loop().run_until_complete(result)
        return terms_of(rows_of(result, 1)[0] if reward.batched else result)

    def _alone(
        self, index: int, call: Callable[[], dict[str, float]], cpu_seconds: float | None
    ) -> None:
        began = time.perf_counter()
        outcome = self._guarded(call, self.deadline, cpu_seconds)
        self.tell(i=index, s=time.perf_counter() - began, **outcome)

    def _batch(self, reward: Reward, views: list[bytes]) -> None:
        """Run one call for all views; if it fails, each view is retried alone to find the cause."""

        rows: list[object] = []

        def call() -> None:
            result = reward.function([pickle.loads(view) for view in views], **reward.options)
            if reward.asynchronous:
                result = self._event_loop().run_until_complete(result)
            rows.extend(rows_of(result, len(views)))

        began = time.perf_counter()
        outcome = self._guarded(call, self.deadline)
        seconds = (time.perf_counter() - began) / len(views)
        for index in range(len(views)):
            if "terms" not in outcome:
                self.tell(i=index, s=seconds, again=outcome["kind"])
                continue
            # Guarded too, since the numbers of a user's class may run code.
            terms = self._guarded(partial(terms_of, rows[index]), self.deadline)
            self.tell(i=index, s=seconds, **terms)

    def _score_batch(self, reward: Reward, views: list[bytes]) -> None:
        """Run all calls in one event loop. If one blocks it, unfinished calls are retried alone."""
        import asyncio

        told: set[int] = set()

        async def one(index: int, view: bytes) -> None:
            began = time.perf_counter()
            scope = asyncio.timeout(self.deadline)
            outcome: dict[str, object]
            try:
                async with scope:
                    result = await reward.function(pickle.loads(view), **reward.options)
                    outcome = {"terms": terms_of(result)}
            except (DeadlineExceeded, asyncio.CancelledError):
                raise
            except BaseException as error:
                outcome = failure(error)
                if scope.expired() and isinstance(error, TimeoutError):
                    outcome = {"kind": "deadline", "reason": ""}
            if not self.rang:
                told.add(index)
                self.tell(i=index, s=time.perf_counter() - began, **outcome)

        async def all_of_them() -> None:
            calls = [one(index, view) for index, view in enumerate(views)]
            await asyncio.gather(*calls, return_exceptions=True)

        outcome = self._guarded(
            lambda: self._event_loop().run_until_complete(all_of_them()),
            self.deadline + LOOP_SLACK,
        )
        for index in range(len(views)):
            if index not in told:
                self.tell(i=index, s=0.0, again=outcome.get("kind", "deadline"))

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self.loop is None:
            import asyncio

            self.loop = asyncio.new_event_loop()
        return self.loop

    def _guarded(
        self,
        call: Callable[[], object],
        seconds: float,
        cpu_seconds: float | None = None,
    ) -> dict[str, object]:
        """Return the result of ``call`` under the key ``terms``, or ``kind`` and ``reason``.

        Args:
            call: Calls a reward function.
            seconds: Deadline of the call.
            cpu_seconds: CPU time of the call, if it is limited.
        """
        self.rang = False
        # For every call, since functions may install a handler of their own.
        signal.signal(signal.SIGALRM, self._ring)
        try:
            # An alarm that fires outside of the call must not raise in the worker's own code.
            self.armed = True
            signal.setitimer(signal.ITIMER_REAL, seconds)
            if cpu_seconds is not None:
                self._budget(cpu_seconds)
            outcome: dict[str, object] = {"terms": call()}
            self.armed = False
        except OverBudget:
            self.armed = False
            outcome = {"terms": wrong_and_ungraded()}
        except BaseException as error:
            self.armed = False
            outcome = failure(error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if cpu_seconds is not None:
            self._budget(0.0)
        if self.rang:
            self.loop = None  # the loop was interrupted, so its state is unknown
        return outcome

    def _budget(self, cpu_seconds: float) -> None:
        """Limit the CPU time of a call; 0 removes the limit.

        First a handler raises ``OverBudget``. A call inside a C function, e.g. a product of huge
        integers, does not see it. SIGPROF then ends the process.
        """
        signal.signal(signal.SIGVTALRM, self._spend)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, KILL_FACTOR * cpu_seconds)
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)

    def _spend(self, *_: object) -> None:
        if self.armed:
            self.armed = False
            raise OverBudget

    def _ring(self, *_: object) -> None:
        if self.armed:
            self.armed = False
            self.rang = True
            raise DeadlineExceeded


def failure(error: BaseException) -> dict[str, object]:
    """Return why a call has no result, in the words of the protocol."""
    if isinstance(error, DeadlineExceeded):
        return {"kind": "deadline", "reason": ""}
    if isinstance(error, MemoryError):
        return {"kind": "memory", "reason": ""}
    if isinstance(error, InvalidReward):
        return {"kind": "value", "reason": str(error)[:300]}
    return {"kind": "raised", "reason": f"raised {describe(error)}"}


def describe(error: BaseException) -> str:
    """Format the class and the message of ``error``, cut to a length that suits a log."""
    try:
        text = str(error)
    except Exception:  # a broken __str__ of a user's class must not hide the class name
        text = "(its message cannot be shown)"
    return f"{type(error).__name__}: {text[:300]}{_near(error)}"


def _near(error: BaseException) -> str:
    """Return the attribute that a wrong one may mean, as the interpreter shows it."""
    if not isinstance(error, AttributeError) or not isinstance(error.obj, PromptView | RolloutView):
        return ""
    known = [name for name in dir(error.obj) if not name.startswith("_")]
    if found := MEANT[isinstance(error.obj, PromptView)].get(error.name or ""):
        return f"; did you mean {found!r}?"
    return did_you_mean(error.name or "", known) or f"; it has {', '.join(known)}"


_LABELS = ("answer", "ground_truth", "solution", "target")
_RESPONSES = ("response", "completion", "output", "content", "solution_str", "response_text")
MEANT = {
    True: dict.fromkeys(_LABELS, "label"),
    False: {
        **dict.fromkeys(_RESPONSES, "text"),
        **dict.fromkeys((*_LABELS, "label"), "prompt.label"),
        "columns": "prompt.columns",
    },
}
"""Names that users guess for an attribute of a prompt (``True``) or of a rollout."""


def _receive(connection: socket.socket) -> bytearray | None:
    """Return the next frame, or ``None`` when the parent has gone.

    Raises ``MemoryError`` if the frame is too large, after reading past it.
    """
    header = _exactly(connection, HEADER.size)
    if header is None:
        return None
    (count,) = HEADER.unpack(header)
    return _exactly(connection, count)


def _exactly(connection: socket.socket, count: int) -> bytearray | None:
    held: bytearray | None = bytearray()
    while count:
        try:
            part = connection.recv(min(count, 1 << 18))
        except ConnectionError:
            return None
        if not part:
            return None
        count -= len(part)
        try:
            if held is not None:
                held += part
        except MemoryError:
            # Read on, since the parent is blocked in sending, and could not read the answer.
            held = None
    if held is None:
        raise MemoryError
    return held


def warm_up(rewards: list[Reward]) -> None:
    """Call ``warm_up`` of each module that defines it and one of ``rewards``."""
    functions = [reward.function for reward in rewards]
    # A callable object may lack __module__. A dict keeps the order and calls each module once.
    modules = {
        function.__module__: None for function in functions if hasattr(function, "__module__")
    }
    for name in modules:
        # The module of a function that was sent here by its code may be absent, and slow to import.
        prepare = getattr(sys.modules.get(name), "warm_up", None)
        if callable(prepare):
            prepare()


def _limit_memory(memory_mb: int) -> None:
    """Limit the private memory of this process to its current use plus ``memory_mb`` MiB."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = Path("/proc/self/status")
    if not status.exists():  # only Linux both reports and limits private memory
        return
    lines = status.read_text().splitlines()
    # VmData is what RLIMIT_DATA limits. Mapped files of libraries do not count.
    data_line = next(line for line in lines if line.startswith("VmData:"))
    held_kib = int(data_line.split()[1])
    limit = held_kib * 1024 + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    # On low memory the kernel kills this process, not the trainer.
    Path("/proc/self/oom_score_adj").write_text("1000")
