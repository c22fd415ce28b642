"""Steps of reinforcement learning in simulated time: engines that draw answers of given lengths, and a trainer that waits for them.

Every answer is followed from its start to the step that trains it; engines go from one end of an answer to the next by the closed form of
``Decode.span``, so that nothing is rounded to ticks of a clock. Same lengths, same numbers: there is no other source of chance.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.scaling_costs import Decode

Seconds = float
Training = Callable[[Sequence["Answer"]], Seconds]


@dataclass
class Answer:
    """``drawn``: tokens that are there. ``first``: version of the weights that it was begun with. ``read_again``: tokens computed anew
    because the weights changed under it."""

    group: int
    length: int
    prompt: int
    drawn: int = 0
    first: int = -1
    read_again: int = 0


class Engine:
    """Continuous batching over at most ``slots`` answers. ``clock`` is when its last whole decoding step ended; ``read``: seconds to read
    a token of a prompt, which is read once for all answers of its group."""

    def __init__(self, decode: Decode, read: Seconds, slots: int) -> None:
        self.decode, self.read, self.slots = decode, read, slots
        self.clock = self.busy = 0.0
        self.tick = self.context = self.decoded = self.count = 0
        self.rows: list[
            tuple[int, int, int, Answer]
        ] = []  # tick of its end, number, tick of its beginning
        self.known: set[int] = set()

    @property
    def free(self) -> int:
        return self.slots - len(self.rows)

    def admit(self, answer: Answer, now: Seconds, version: int) -> None:
        """Begin ``answer``, or go on with it: what is drawn of it is read again."""
        if not self.rows:
            self.clock = max(self.clock, now)
        reads = answer.drawn + (0 if answer.group in self.known else answer.prompt)
        self.known.add(answer.group)
        self._spend(self.read * reads)
        answer.read_again += answer.drawn
        answer.first = version if answer.first < 0 else answer.first
        heapq.heappush(
            self.rows, (self.tick + answer.length - answer.drawn, self.count, self.tick, answer)
        )
        self.count += 1
        self.context += answer.prompt + answer.drawn

    def next_end(self) -> Seconds:
        return self.clock + self._span(self.rows[0][0] - self.tick) if self.rows else math.inf

    def end(self) -> list[Answer]:
        """Go on to the next end of an answer, and give those that end there."""
        self._advance(self.rows[0][0] - self.tick)
        done = []
        while self.rows and self.rows[0][0] == self.tick:
            answer = heapq.heappop(self.rows)[-1]
            self.context -= answer.prompt + answer.length
            answer.drawn = answer.length
            done.append(answer)
        return done

    def run_until(self, time: Seconds) -> None:
        """Take the steps that begin before ``time``; no answer may end before it."""
        low, high = 0, self.rows[0][0] - self.tick if self.rows else 0
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if self.clock + self._span(middle) >= time else (middle + 1, high)
            )
        self._advance(low)

    def stop(self, time: Seconds) -> list[Answer]:
        """Take back what is not finished at ``time``, in the order of its beginning, and forget what was read."""
        self.run_until(time)
        unfinished = []
        for _, _, began, answer in sorted(self.rows, key=lambda row: row[1]):
            answer.drawn += self.tick - began
            unfinished.append(answer)
        self.rows, self.context, self.known = [], 0, set()
        return unfinished

    def _span(self, steps: int) -> Seconds:
        return self.decode.span(len(self.rows), self.context, steps)

    def _advance(self, steps: int) -> None:
        self._spend(self._span(steps))
        self.decoded += steps * len(self.rows)
        self.context += steps * len(self.rows)
        self.tick += steps

    def _spend(self, seconds: Seconds) -> None:
        self.clock += seconds
        self.busy += seconds


@dataclass(frozen=True)
class Plan:
    """``groups`` groups make a step. ``train``: seconds to train on answers. ``sync``: seconds to hand weights over, in which engines
    wait. ``shared``: engines take answers from one queue; without, whole groups are dealt out before their lengths are known, as
    ranks share out prompts."""

    decode: Decode
    read: Seconds
    slots: int
    engines: int
    train: Training
    groups: int
    steps: int
    prompt: int = 0
    sync: Seconds = 0.0
    shared: bool = True

    def groups_of(self, lengths: np.ndarray) -> Iterator[list[Answer]]:
        """Groups without end: the rows of ``lengths [P, G]``, over and over."""
        for number, row in enumerate(itertools.cycle(lengths.tolist())):
            yield [Answer(number, length, self.prompt) for length in row]


@dataclass
class Outcome:
    """What a run came to. ``ends``: when each step was over; ``tokens``: of the answers that it trained. ``lags``: for each trained
    answer, by how many versions the weights that it trained are ahead of those that drew its first token. ``idle``: of the engines'
    time in each generation, the share without work; ``tails``: the share of each generation after nine tenths of its answers were
    there. ``generating``: busy seconds of all engines."""

    ends: list[Seconds] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)
    trained: int = 0
    decoded: int = 0
    left: int = 0
    read_again: int = 0
    generating: Seconds = 0.0
    training: Seconds = 0.0

    def learn(self, step: int, batch: Sequence[Answer]) -> None:
        self.tokens.append(sum(a.length for a in batch))
        self.trained += self.tokens[-1]
        self.read_again += sum(a.read_again for a in batch)
        self.lags += [step - a.first for a in batch]

    def step_seconds(self, skip: int = 2) -> Seconds:
        """Seconds a step, without the first ``skip``, which fill the lead."""
        skip = min(skip, len(self.ends) - 1)
        return (self.ends[-1] - (self.ends[skip - 1] if skip else 0.0)) / (len(self.ends) - skip)

    def token_seconds(self, skip: int = 2) -> Seconds:
        """Seconds a trained token, without the first ``skip`` steps. Fair where a step trains what came first, which is short, and leaves
        what is long to later ones."""
        skip = min(skip, len(self.ends) - 1)
        return (
            self.step_seconds(skip)
            * (len(self.ends) - skip)
            / sum(self.tokens[skip : len(self.ends)])
        )


class Fleet:
    """Engines side by side, by the order of events. ``next``: when the next answer ends."""

    def __init__(self, plan: Plan) -> None:
        self.engines = [Engine(plan.decode, plan.read, plan.slots) for _ in range(plan.engines)]
        self._heap: list[tuple[Seconds, int, int]] = []
        self._stamps = [0] * plan.engines

    @property
    def next(self) -> Seconds:
        while self._heap and self._heap[0][2] != self._stamps[self._heap[0][1]]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def give(self, waiting: deque[Answer], now: Seconds, version: int) -> None:
        """Begin answers while there is room, each where there is most."""
        room = [(-e.free, i) for i, e in enumerate(self.engines) if e.free] if waiting else []
        heapq.heapify(room)
        touched = set()
        while waiting and room:
            free, i = heapq.heappop(room)
            self.place(i, waiting.popleft(), now, version)
            touched.add(i)
            if free < -1:
                heapq.heappush(room, (free + 1, i))
        for i in sorted(touched):
            self.note(i)

    def place(self, i: int, answer: Answer, now: Seconds, version: int) -> None:
        self.engines[i].run_until(now)
        self.engines[i].admit(answer, now, version)

    def note(self, i: int) -> None:
        """Have the next end of engine ``i`` in its place among all."""
        self._stamps[i] += 1
        if self.engines[i].rows:
            heapq.heappush(self._heap, (self.engines[i].next_end(), i, self._stamps[i]))

    def end(self) -> tuple[Seconds, int, list[Answer]]:
        """The next end of an answer: when, on which engine, and which ones."""
        time, i, _ = heapq.heappop(self._heap) if self.next < math.inf else (math.inf, 0, 0)
        done = self.engines[i].end()
        self.note(i)
        return time, i, done

    def stop(self, now: Seconds) -> deque[Answer]:
        back = [answer for engine in self.engines for answer in engine.stop(now)]
        for i in range(len(self.engines)):
            self.note(i)
        return deque(sorted(back, key=lambda answer: answer.group))

    def settle(self, out: Outcome) -> None:
        out.generating += sum(e.busy for e in self.engines)
        out.decoded += sum(e.decoded for e in self.engines)


def generate(
    plan: Plan, groups: Sequence[Sequence[Answer]], start: Seconds, version: int, out: Outcome
) -> Seconds:
    """Draw every answer of ``groups`` from ``start`` on: when the last one ends."""
    fleet = Fleet(plan)
    common: deque[Answer] = deque(a for group in groups for a in group) if plan.shared else deque()
    own: list[deque[Answer]] = [deque() for _ in fleet.engines]
    if plan.shared:
        fleet.give(common, start, version)
    else:
        for i, queue in enumerate(own):
            queue.extend(a for group in groups[i :: plan.engines] for a in group)
            _fill(fleet, i, queue, start, version)
    ends: list[Seconds] = []
    while fleet.next < math.inf:
        now, i, done = fleet.end()
        ends += [now] * len(done)
        _fill(fleet, i, common if plan.shared else own[i], now, version)
    fleet.settle(out)
    last = max(ends)
    out.idle.append(1 - sum(e.busy for e in fleet.engines) / (plan.engines * (last - start)))
    out.tails.append((last - sorted(ends)[math.ceil(0.9 * len(ends)) - 1]) / (last - start))
    return last


def _fill(fleet: Fleet, i: int, queue: deque[Answer], now: Seconds, version: int) -> None:
    if not queue:
        return
    while queue and fleet.engines[i].free:
        fleet.place(i, queue.popleft(), now, version)
    fleet.note(i)


def flat(groups: Sequence[Sequence[Answer]]) -> list[Answer]:
    return [answer for group in groups for answer in group]


def ahead(plan: Plan, lengths: np.ndarray, staleness: int) -> Outcome:
    """Batch n drawn by version max(0, n - ``staleness``) and no other, batch after batch, beside the training of earlier ones."""
    out, source = Outcome(), plan.groups_of(lengths)
    versions = [0.0]  # when each version of the weights is there
    drawn = 0.0
    for n in range(plan.steps):
        groups = list(itertools.islice(source, plan.groups))
        version = max(0, n - staleness)
        drawn = generate(plan, groups, max(drawn, versions[version]) + plan.sync, version, out)
        seconds = plan.train(flat(groups))
        out.training += seconds
        out.learn(n, flat(groups))
        versions.append(max(drawn, versions[-1]) + seconds)
        out.ends.append(versions[-1])
    return out


def each_ahead(plan: Plan, lengths: np.ndarray, staleness: int) -> Outcome:
    """As ``ahead`` with groups dealt out, but an engine that has drawn its part of a batch goes on to its part of the next as soon as the
    weights for that are there, while others are still at the last one. What is drawn by which version is the same."""
    out, source = Outcome(), plan.groups_of(lengths)
    alone = replace(plan, engines=1)
    versions, drawn = [0.0], [0.0] * plan.engines
    for n in range(plan.steps):
        groups = list(itertools.islice(source, plan.groups))
        version = max(0, n - staleness)
        for i, free in enumerate(drawn):
            if groups[i :: plan.engines]:
                start = max(free, versions[version]) + plan.sync
                drawn[i] = generate(alone, groups[i :: plan.engines], start, version, out)
        seconds = plan.train(flat(groups))
        out.training += seconds
        out.learn(n, flat(groups))
        versions.append(max(*drawn, versions[-1]) + seconds)
        out.ends.append(versions[-1])
    out.idle, out.tails = [], []  # those of one engine are not those of all
    return out


def synchronous(plan: Plan, lengths: np.ndarray) -> Outcome:
    """Draw, train, draw: by the newest weights always."""
    return ahead(plan, lengths, 0)


def partial(plan: Plan, lengths: np.ndarray, oversample: float) -> Outcome:
    """As ``synchronous``, but ``oversample`` times the groups are begun and the step ends with the first ``plan.groups`` that are whole;
    the others go on in the next step, by its weights."""
    out, source = Outcome(), plan.groups_of(lengths)
    fleet, now = Fleet(plan), 0.0
    waiting: deque[Answer] = deque()
    missing: dict[int, list[Answer]] = {}
    for n in range(plan.steps):
        whole: list[list[Answer]] = []
        for group in itertools.islice(
            source, max(0, math.ceil(oversample * plan.groups) - len(missing))
        ):
            missing[group[0].group] = group
            waiting.extend(group)
        now += plan.sync
        start, before = now, sum(e.busy for e in fleet.engines)
        fleet.give(waiting, now, n)
        while len(whole) < plan.groups:
            now, _, done = fleet.end()
            whole += _finished(missing, done)
            fleet.give(waiting, now, n)
        waiting = deque([*fleet.stop(now), *waiting])
        now = max(now, *(e.clock for e in fleet.engines))
        out.idle.append(
            1 - (sum(e.busy for e in fleet.engines) - before) / (plan.engines * (now - start))
        )
        seconds = plan.train(flat(whole))
        out.training += seconds
        out.learn(n, flat(whole))
        now += seconds
        out.ends.append(now)
    fleet.settle(out)
    out.left = sum(a.drawn for group in missing.values() for a in group)
    return out


def _finished(missing: dict[int, list[Answer]], done: Sequence[Answer]) -> list[list[Answer]]:
    """Groups that ``done`` has made whole; they are taken out of ``missing``."""
    whole = []
    for number in dict.fromkeys(a.group for a in done):
        if number in missing and all(a.drawn == a.length for a in missing[number]):
            whole.append(missing.pop(number))
    return whole


def streaming(plan: Plan, lengths: np.ndarray, staleness: float) -> Outcome:
    """Engines begin a group whenever there is room, as long as no more than ``plan.groups`` times (version + 1 + ``staleness``) groups
    were begun, and the trainer takes whole groups in the order of their ends. New weights interrupt answers, which go on after what
    is there of them was read again (as in AReaL, arXiv 2505.24298)."""
    out, source, fleet = Outcome(), plan.groups_of(lengths), Fleet(plan)
    waiting: deque[Answer] = deque()
    missing: dict[int, list[Answer]] = {}
    ready: deque[list[Answer]] = deque()
    begun = version = 0
    now, over = 0.0, math.inf
    while version < plan.steps:
        while begun < math.floor((version + 1 + staleness) * plan.groups):
            group = next(source)
            missing[group[0].group] = group
            waiting.extend(group)
            begun += 1
        fleet.give(waiting, now, version)
        if over == math.inf and len(ready) >= plan.groups:
            batch = flat([ready.popleft() for _ in range(plan.groups)])
            out.learn(version, batch)
            seconds = plan.train(batch)
            out.training += seconds
            over = now + seconds
        if fleet.next < over:
            now, _, done = fleet.end()
            ready.extend(_finished(missing, done))
            continue
        now, over, version = over, math.inf, version + 1
        out.ends.append(now)
        waiting = deque([*fleet.stop(now), *waiting])
        now += plan.sync
    fleet.settle(out)
    out.left = sum(a.drawn for group in (*missing.values(), *ready) for a in group)
    return out
