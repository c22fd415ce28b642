"""Score rollouts in worker processes while other rollouts are still being generated.

Scored rollouts come back in any order. Each call of a reward function has a deadline and a memory
limit. A call that crashes its process fails only its own rollout. Every rollout comes back exactly
once.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import queue
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightrft.config.reward import RewardConfig, RewardTerm
from lightrft.distributed.guarded.guardian import BOMB_STATUS, MOST
from lightrft.rewards import REWARDS, Reward, load_reward
from lightrft.rewards.sandbox.process import Garbled, WorkerDied, WorkerProcess
from lightrft.rewards.sandbox.protocol import CallOutcome, WorkerMessage
from lightrft.rewards.sandbox.results import VALUE, wrong_and_ungraded
from lightrft.rewards.sandbox.rollout_view import view_of
from lightrft.rewards.sandbox.worker import WorkBatch, WorkerInit, describe
from lightrft.utils.errors import RewardError

if TYPE_CHECKING:
    from lightrft.types import Rollout

__all__ = ["REWARDS", "Scorer"]

log = logging.getLogger(__name__)

GROUP = 64  # rollouts in one batched call or one event loop
# Of plain calls per message: long enough to hide the sending, short enough to balance workers.
SLICE_SECONDS = 0.05
SLICE = 256
FRAME_BYTES = 8 * 2**20  # of one message, beyond which no further call is added
GRACE_SECONDS = 1.0  # past the deadline, before a worker whose alarm did not fire is killed
# Between polls of a busy worker, so that cheap rewards do not wake this process once per call.
LISTEN_SECONDS = 0.002
STARTS = 3  # consecutive failed starts of a worker that end the run
CAUSES = {
    -signal.SIGKILL: ("memory", "killed from outside, as when the machine runs out of memory"),
    BOMB_STATUS: ("died", f"started more than {MOST} processes"),
}
"""Kind and reason of a failed call, by the exit status of its worker."""


@dataclass(slots=True)
class _Term:
    name: str
    weight: float
    reward: Reward
    waiting: deque[_Call] = field(default_factory=deque)
    seconds: float = math.inf  # running mean of one call; infinite before the first


@dataclass(slots=True)
class _Pending:
    """A rollout being scored, with the results of its terms so far."""

    rollout: Rollout
    terms: list[int]
    missing: int
    since: float
    values: dict[int, dict[str, float]] = field(default_factory=dict)
    failed: str = ""
    kind: str = ""
    started: bool = False


@dataclass(slots=True)
class _Call:
    pending: _Pending
    term: int


class _Silent(WorkerDied):
    """A call is far past its deadline."""


def _check_turn(message: WorkerMessage, begun: bool, left: Mapping[int, _Call]) -> None:
    """Raise ``Garbled`` if ``message`` is out of order: first begun, then one outcome per call.

    Args:
        message: The next message of a worker.
        begun: True after the first message.
        left: The calls without an outcome.
    """
    if message.full:
        return
    if begun:
        in_turn = message.outcome is not None and message.outcome.index in left
    else:
        in_turn = message.begun
    if not in_turn:
        raise Garbled("its socket brought a message out of turn")


class Scorer:
    """Scores rollouts in worker processes as ``config`` specifies.

    Close it, or use it as a context manager. Kinds of failures are ``raised``, ``deadline``,
    ``memory``, ``died``, ``unsendable`` and ``closed``. The kind ``value`` means that the result is
    not a reward. The kind ``garbled`` means a stray line on the worker's socket.

    Args:
        config: The settings ``reward``.

    Attributes:
        counts: Number of rollouts ``scored``, and of failed ones by kind.
        seconds: Total time that rollouts waited for a worker (``queue``) and that functions ran
            (``busy``).
        restarts: Number of workers that were replaced.

    Raises:
        RewardError: If a function is not found or does not take a rollout and its options. Later,
            if a worker cannot be started.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.folder = os.getcwd()  # noqa: PTH109 (a plain string for another process)
        self.counts: Counter[str] = Counter()
        self.seconds = {"queue": 0.0, "busy": 0.0}
        self.restarts = 0
        self._terms: list[_Term] = []
        self._default = self._load("reward.terms", config.terms)
        self._per_source: dict[str, list[int]] = {}
        for source, terms in config.per_source.items():
            self._per_source[source] = self._load(f"reward.per_source.{source}", terms)
        if not self._terms:
            raise RewardError(
                "reward.terms is empty: name at least one reward, e.g. reward.terms=[math]"
            )
        self._lock = threading.Condition()
        self._alone: deque[_Call] = deque()
        self._done: queue.SimpleQueue[Rollout | None] = queue.SimpleQueue()
        self._unfinished: dict[int, _Pending] = {}
        self._given_back = 0
        self._submitted = 0
        self._broken: RewardError | None = None
        self._closed = False
        self._workers: dict[int, WorkerProcess] = {}
        self._threads: list[threading.Thread] = []
        for i in range(config.workers):
            name = f"reward-{i}"
            thread = threading.Thread(target=self._serve, args=(i,), name=name, daemon=True)
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pending(self) -> int:
        """Return the number of rollouts submitted and not yet returned by ``results``."""
        return self._submitted - self._given_back

    def check_sources(self, sources: Iterable[str]) -> None:
        """Raise ``RewardError`` naming the data sources for which no terms are configured."""
        unknown = sorted({source for source in sources if not self._terms_of(source)})
        if unknown:
            missing = ", ".join(map(repr, unknown))
            known = ", ".join(map(repr, sorted(self._per_source))) or "none"
            raise RewardError(
                f"no reward for data source {missing}: reward.per_source has {known} and "
                "reward.terms, which serves all others, is empty"
            )

    def submit(self, rollout: Rollout) -> None:
        """Queue ``rollout`` and return at once.

        Raises:
            RewardError: If its data source has no terms.
        """
        terms = self._terms_of(rollout.prompt.data_source)
        self.check_sources([rollout.prompt.data_source])
        rollout.reward = None
        rollout.terms = {}
        rollout.weights = {}
        rollout.failed = ""
        with self._lock:
            if self._broken:
                raise self._broken
            if self._closed:
                raise RewardError("the scorer is closed")
            pending = _Pending(rollout, terms, len(terms), time.perf_counter())
            # By id, since a dataclass that compares its fields has no hash.
            self._unfinished[id(pending)] = pending
            self._submitted += 1
            for term in terms:
                self._terms[term].waiting.append(_Call(pending, term))
            self._lock.notify(len(terms))

    def results(self, wait: bool = False) -> Iterator[Rollout]:
        """Yield each scored rollout once, with ``reward`` and ``terms`` set, or ``failed``.

        Args:
            wait: Block until no rollout is pending. If false, return when none is ready.

        Raises:
            RewardError: If workers cannot be started.
        """
        while self.pending:
            if self._broken:
                raise self._broken
            try:
                rollout = self._done.get(block=wait)
            except queue.Empty:
                return
            if rollout is None:  # woken by ``_break``; the loop raises its error
                continue
            self._given_back += 1
            yield rollout

    def close(self) -> None:
        """Stop the workers. Rollouts not scored yet come back as failed."""
        with self._lock:
            self._closed = True
            workers = list(self._workers.values())
            self._lock.notify_all()
        for worker in workers:
            worker.interrupt()
        for thread in self._threads:
            thread.join()
        with self._lock:
            for pending in list(self._unfinished.values()):
                pending.failed = "the scorer was closed"
                pending.kind = "closed"
                self._finish(pending)

    def _load(self, where: str, terms: Iterable[RewardTerm]) -> list[int]:
        indices: list[int] = []
        names: set[str] = set()
        for term in terms:
            reward = load_reward(term.function, term.options)
            name = term.label
            if name in names:
                raise RewardError(
                    f"{where}: two terms are called {name!r}; give one of them another name"
                )
            names.add(name)
            indices.append(len(self._terms))
            self._terms.append(_Term(name, term.weight, reward))
        return indices

    def _terms_of(self, source: str) -> list[int]:
        return self._per_source.get(source) or self._default

    # The methods below run in one thread per worker.

    def _serve(self, number: int) -> None:
        """Keep one worker process alive and busy.

        A death that no call caused counts as a failed start.
        """
        failures = 0
        why = ""
        worker: WorkerProcess | None = None
        while not (self._closed or self._broken) and failures < STARTS:
            healthy = True
            try:
                worker = worker or self._launch(number)
                calls = self._take()
                if calls:
                    healthy = self._run(worker, calls)
                    failures = 0
            except WorkerDied as gone:
                healthy = False
                failures += 1
                why = str(gone)
                time.sleep(0.1 * failures)
            except RewardError as error:
                self._break(error)
            except Exception as error:
                # A thread that ends silently would leave the run waiting forever.
                log.exception("a reward thread failed")
                bug = f"the scorer itself failed, which is a bug: {describe(error)}"
                self._break(RewardError(bug))
            if not healthy and worker is not None:
                self._end(number, worker)
                worker = None
        if worker is not None:
            self._end(number, worker)
        if failures >= STARTS:
            self._break(
                RewardError(
                    f"reward workers cannot run: {why} ({failures} times in a row); the lines "
                    "above may say more"
                )
            )

    def _launch(self, number: int) -> WorkerProcess:
        """Start a worker and return it when it is ready.

        Raises ``WorkerDied``, or ``RewardError`` if the worker reports that it can never serve.
        """
        specs = [(t.reward.name, dict(t.reward.options)) for t in self._terms]
        worker = WorkerProcess(self.folder)
        with self._lock:
            self._workers[number] = worker
            # ``close`` interrupts the workers that it finds, and did not find this one.
            if self._closed:
                worker.interrupt()
        try:
            error = worker.begin(WorkerInit(specs, self.config.timeout, self.config.memory_mb))
            if error:
                raise RewardError(error)
        except BaseException:
            self._end(number, worker)
            raise
        return worker

    def _end(self, number: int, worker: WorkerProcess) -> None:
        worker.end()
        with self._lock:
            if self._workers.pop(number, None) is worker and not self._closed:
                self.restarts += 1

    def _take(self) -> list[_Call]:
        """Block until a term has calls; return the next ones, oldest first, or none when closed."""
        with self._lock:
            while not self._closed:
                if self._alone:
                    return self._started([self._alone.popleft()])
                queues = [term for term in self._terms if term.waiting]
                if not queues:
                    self._lock.wait()
                    continue
                oldest = min(queues, key=lambda term: term.waiting[0].pending.since)
                calls = [oldest.waiting.popleft() for _ in range(self._share(oldest))]
                calls = self._started(calls)
                if calls:
                    return calls
            return []

    def _share(self, term: _Term) -> int:
        """Return how many calls of ``term`` to send at once."""
        # No more than that, so that all workers end a short queue at about the same time.
        fair = math.ceil(len(term.waiting) / self.config.workers)
        if term.reward.grouped:
            return min(fair, GROUP)
        quick = int(SLICE_SECONDS / max(term.seconds, 1e-6))
        return min(fair, SLICE, max(quick, 1))

    def _started(self, calls: list[_Call]) -> list[_Call]:
        """Return ``calls`` without the calls of rollouts that another term has failed meanwhile."""
        now = time.perf_counter()
        kept = []
        for call in calls:
            if call.pending.failed:
                self._settle(call)
                continue
            kept.append(call)
            if not call.pending.started:
                call.pending.started = True
                self.seconds["queue"] += now - call.pending.since
        return kept

    def _run(self, worker: WorkerProcess, calls: list[_Call]) -> bool:
        """Run ``calls``, all of one term, and return whether ``worker`` can serve further calls.

        Raises ``WorkerDied``, with the calls queued again, if the worker ends before it has begun.
        """
        calls, views = self._pickled(calls)
        if not calls:
            return True
        left = dict(enumerate(calls))
        grouped = self._terms[calls[0].term].reward.grouped
        begun = False
        try:
            worker.send(WorkBatch(calls[0].term, views))
            for message in self._listen(worker, left):
                begun = True
                if message.full:
                    self._too_large(list(left.values()))
                    return False
                outcome = message.outcome
                if outcome is not None and not self._hear(left.pop(outcome.index), outcome):
                    self._again(left.values(), alone=grouped)
                    return False
        except WorkerDied as gone:
            # A stray line does not say which call wrote it; else calls run in order.
            shared = grouped or isinstance(gone, Garbled)
            status = None
            if not isinstance(gone, _Silent | Garbled):
                status = worker.status(GRACE_SECONDS)
            suspects = list(left) if shared else list(left)[:1]
            if begun and len(suspects) == 1 and not self._closed:
                self._gone(left.pop(suspects[0]), gone, status)
            self._again(left.values(), alone=begun and shared)
            if not begun:
                raise
            return False
        return True

    def _listen(self, worker: WorkerProcess, left: Mapping[int, _Call]) -> Iterator[WorkerMessage]:
        """Yield the messages of ``worker`` until no call is ``left``.

        Raises ``WorkerDied``, also after a long silence, and ``Garbled`` for a message out of
        order.
        """
        patience = self.config.timeout + GRACE_SECONDS
        heard = time.monotonic()
        begun = False
        while left:
            messages = worker.receive(heard + patience - time.monotonic())
            if messages:
                heard = time.monotonic()
                for message in messages:
                    _check_turn(message, begun, left)
                    begun = True
                    yield message
                if left:
                    time.sleep(LISTEN_SECONDS)
            elif time.monotonic() - heard >= patience:
                raise _Silent("it fell silent")

    def _too_large(self, calls: list[_Call]) -> None:
        """Fail the call whose message exceeds the worker's memory, or retry several calls alone."""
        if len(calls) == 1:
            self._fail(calls[0], "memory", "")
        else:
            self._again(calls, alone=True)

    def _pickled(self, calls: list[_Call]) -> tuple[list[_Call], list[bytes]]:
        """Pickle the first of ``calls``, up to ``FRAME_BYTES``, and queue the others again."""
        kept: list[_Call] = []
        views: list[bytes] = []
        for number, call in enumerate(calls):
            if sum(map(len, views)) > FRAME_BYTES:
                self._again(calls[number:], alone=False)
                break
            try:
                view = view_of(call.pending.rollout)
                pickled = pickle.dumps(view, protocol=pickle.HIGHEST_PROTOCOL)
            except Exception as error:  # columns hold whatever the data set does
                reason = f"cannot be sent to a worker: {type(error).__name__}: {error}"
                self._fail(call, "unsendable", reason)
                continue
            views.append(pickled)
            kept.append(call)
        return kept, views

    def _hear(self, call: _Call, outcome: CallOutcome) -> bool:
        """Record the ``outcome`` of ``call``. Return whether its worker can serve further calls."""
        term = self._terms[call.term]
        with self._lock:
            self.seconds["busy"] += outcome.seconds
        if outcome.again:
            self._again([call], alone=True)
            return outcome.again != "memory"
        if math.isinf(term.seconds):
            term.seconds = outcome.seconds
        else:
            term.seconds = 0.9 * term.seconds + 0.1 * outcome.seconds
        if outcome.terms is not None:
            self._take_terms(call, outcome.terms)
            return True
        self._fail(call, outcome.kind, outcome.reason)
        return outcome.kind != "memory"

    def _take_terms(self, call: _Call, terms: Mapping[str, float]) -> None:
        with self._lock:
            call.pending.values[call.term] = dict(terms)
            self._settle(call)

    def _gone(self, call: _Call, gone: WorkerDied, status: int | None) -> None:
        """Settle the call in which a worker ended.

        Args:
            call: The call.
            gone: How the worker was lost.
            status: Exit status of the worker, if it is known.
        """
        has_budget = self._terms[call.term].reward.cpu_seconds is not None
        if has_budget and status == -signal.SIGPROF:
            self._take_terms(call, wrong_and_ungraded())
            return
        kind, reason = self._cause(gone, status)
        self._fail(call, kind, reason)

    def _cause(self, gone: WorkerDied, status: int | None) -> tuple[str, str]:
        if isinstance(gone, _Silent):
            return "deadline", ""
        if isinstance(gone, Garbled):
            return "garbled", f"ended its worker: {gone}"
        if status is None:
            return "died", "cut its worker off"
        if status in CAUSES:
            return CAUSES[status]
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return "died", f"ended its process {how}"

    def _again(self, calls: Iterable[_Call], alone: bool) -> None:
        with self._lock:
            # Reversed, since each call is put at the front of the queue.
            for call in reversed(list(calls)):
                waiting = self._alone if alone else self._terms[call.term].waiting
                waiting.appendleft(call)
            self._lock.notify_all()

    def _fail(self, call: _Call, kind: str, reason: str) -> None:
        standard = {
            "deadline": f"deadline {self.config.timeout:g} s",
            "memory": f"memory {self.config.memory_mb} MiB",
        }
        with self._lock:
            pending = call.pending
            if not pending.failed:
                pending.kind = kind
                pending.failed = f"{reason or standard[kind]} ({self._terms[call.term].name})"
            self._settle(call)

    def _settle(self, call: _Call) -> None:
        call.pending.missing -= 1
        if not call.pending.missing:
            self._finish(call.pending)

    def _finish(self, pending: _Pending) -> None:
        """Write the outcome into the rollout and return it to the caller. The lock must be held."""
        rollout = pending.rollout
        if not pending.failed:
            self._fill_in(pending)
        if pending.failed:
            rollout.failed = pending.failed
            rollout.terms = {}
            rollout.weights = {}
        self.counts[pending.kind or "scored"] += 1
        del self._unfinished[id(pending)]
        self._done.put(rollout)

    def _fill_in(self, pending: _Pending) -> None:
        """Write the reward and its terms into the rollout. An infinite sum fails it."""
        rollout = pending.rollout
        weighted = []
        for index in pending.terms:
            term = self._terms[index]
            values = pending.values[index]
            # The product with a weight may be infinite although the value is finite.
            weighted.append(term.weight * values[VALUE])
            rollout.weights[term.name] = term.weight
            for key, value in values.items():
                rollout.terms[f"{term.name}/{key}" if key else term.name] = value
        try:
            total = math.fsum(weighted)
        except (OverflowError, ValueError):
            # fsum raises where the sum of finite numbers, or of both infinities, is none.
            total = sum(weighted)
        if math.isfinite(total):
            rollout.reward = total
        else:
            pending.failed = f"the weighted sum of terms is {total}"
            pending.kind = "value"

    def _break(self, error: RewardError) -> None:
        with self._lock:
            self._broken = self._broken or error
        self._done.put(None)
