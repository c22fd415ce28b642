"""Engines in processes of their own: they draw what one engine draws, whatever becomes of them."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.config.model import PolicyModelConfig
from lightrft.config.strategy import SamplingConfig, StrategyConfig
from lightrft.distributed.worker_api import WorkerLost
from lightrft.engines.base import Fingerprint, never_stop
from lightrft.engines.fingerprint import checksum
from lightrft.engines.native import NativeEngine
from lightrft.engines.native_parts import compiled_steps
from lightrft.engines.sending.tensor_slices import Layout
from lightrft.engines.weight_transport import (
    ProcessGroupBroadcast,
    RayObject,
    Way,
    WeightBuffer,
    WeightTransport,
    open_meeting,
)
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.decoding.static_step import uncompiled
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import ModelError, RankError, ResourceError, WorkerError
from lightrft.workers.engine_kinds import engine_worker
from lightrft.workers.engine_workers import (
    DrawReply,
    EngineWorker,
    EngineWorkerGroup,
    NativeEngineWorker,
    split_requests,
)
from lightrft.workers.weight_sync import WeightSyncConfig
from lightrft.workers.worker_group import FaultPolicy
from tests.unit.rollout.test_collect import Threads, of_all_ranks
from tests.worker_helpers import ProcessWorker, time_out_after

CONFIG = EngineConfig(max_num_seqs=6)
SAMPLING = SamplingConfig(max_new_tokens=24, temperature=1.0)
LIMITS = FaultPolicy(restarts=2, call_timeout=600.0)
# Models in float64: who is drawn with whom depends on the clock, and in float32 their rounding now and then turns a token.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen2", seed=3, eos_token_id=None, dtype=torch.float64).save_pretrained(path)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[list[ProcessWorker]]:
    """Two workers, for tests that leave them alive."""
    made = [worker_of(folder, f"engine {i}") for i in range(2)]
    yield made
    for worker in made:
        worker.close()


def worker_of(folder: Path, name: str, config: EngineConfig = CONFIG) -> ProcessWorker:
    strategy = StrategyConfig(device="cpu")
    return ProcessWorker(
        name, partial(engine_worker, PolicyModelConfig(path=str(folder)), config, strategy, 1)
    )


def other_weights(folder: Path, seed: int = 9) -> dict[str, Tensor]:
    """Those of a model of the same shape."""
    return dict(
        tiny_model("qwen2", seed=seed, eos_token_id=None, dtype=torch.float64).named_parameters()
    )


def local_engine(folder: Path, weights: dict[str, Tensor], version: int) -> NativeEngine:
    from lightrft.models.actor import Actor
    from lightrft.models.loading.from_pretrained import load_tokenizer

    config = PolicyModelConfig(path=str(folder))
    engine = NativeEngine(
        KVDecoder(Actor.load(config).model), load_tokenizer(config), CONFIG, shared=False
    )
    engine.load_weights(weights.items(), version)
    return engine


def requests_of(prompts: int = 5, samples: int = 4) -> list[Request]:
    made = [Prompt(f"p{i}", [5 + i, 7, 9 + 2 * i, 30]) for i in range(prompts)]
    return [
        Request(p, 1000 * i + s, s, max_new_tokens=6 + (5 * i + 3 * s) % 18)
        for i, p in enumerate(made)
        for s in range(samples)
    ]


def told(rollouts: list[Rollout]) -> dict[int, tuple[object, ...]]:
    assert len({r.seed for r in rollouts}) == len(rollouts)
    return {
        r.seed: (r.token_ids, r.versions, r.finish_reason, r.sample, r.text, id(r.prompt))
        for r in rollouts
    }


def answers(
    engine: EngineWorkerGroup | NativeEngine,
    requests: list[Request],
    stopped: Callable[[], bool] = never_stop,
) -> list[Rollout]:
    return list(engine.generate(requests, SAMPLING, stopped))


def losses(engines: EngineWorkerGroup) -> dict[str, float]:
    """What was counted but for bytes and seconds."""
    return {n: c for n, c in engines.take_counts().items() if not n.startswith("update")}


def transfer(way: Way = "message", **more: object) -> WeightSyncConfig:
    return WeightSyncConfig(way=way, bucket=20_000, **more)  # type: ignore[arg-type]


def test_two_engines_draw_what_one_draws_with_the_weights_that_they_were_given(
    folder: Path, two: list[ProcessWorker]
) -> None:
    weights, requests = other_weights(folder), requests_of()
    engines = EngineWorkerGroup(two, CONFIG, LIMITS, transfer())
    found = engines.load_weights(weights.items(), 7)
    local = local_engine(folder, weights, 7)
    assert found == {name: checksum(tensor) for name, tensor in weights.items()}
    drawn = answers(engines, requests)
    expected = answers(local, requests)
    assert told(drawn) == told(expected) and len(drawn) == len(requests)
    by_seed = {r.seed: r.logprobs for r in expected}
    for rollout in drawn:
        assert rollout.logprobs == pytest.approx(by_seed[rollout.seed], abs=1e-5)
    assert losses(engines) == {"restarts": 0, "weights_resent": 0}


def test_an_answer_that_was_begun_goes_on_and_one_that_is_stopped_comes_back_as_it_is(
    folder: Path, two: list[ProcessWorker]
) -> None:
    engines, requests = EngineWorkerGroup(two, CONFIG, LIMITS, transfer()), requests_of(12, 4)
    engines.load_weights(other_weights(folder).items(), 1)
    whole = {r.seed: r.token_ids for r in answers(engines, requests)}
    seen = itertools.count()
    part = answers(engines, requests, lambda: next(seen) > 1)
    assert sorted(r.seed for r in part) == sorted(r.seed for r in requests)
    cut = [r for r in part if r.finish_reason == "abort"]
    assert cut and all(whole[r.seed][: len(r)] == r.token_ids for r in part)
    asked = {r.seed: r for r in requests}
    rest = [
        Request(r.prompt, r.seed, r.sample, asked[r.seed].max_new_tokens, partial=r) for r in cut
    ]
    assert {r.seed: r.token_ids for r in answers(engines, rest)} == {
        r.seed: whole[r.seed] for r in cut
    }


def compiling_worker(folder: Path) -> EngineWorker:
    """A worker whose compiled steps are counted, and run as they are."""
    compiled_steps.compiler_for = lambda device: uncompiled
    config = EngineConfig(max_num_seqs=6, compile=True)
    return engine_worker(PolicyModelConfig(path=str(folder)), config, StrategyConfig(), 1)


def test_compiled_steps_of_all_workers_are_counted_in_the_metrics(folder: Path) -> None:
    workers = [ProcessWorker(f"engine {i}", partial(compiling_worker, folder)) for i in range(2)]
    engines = EngineWorkerGroup(workers, CONFIG, LIMITS, transfer())
    assert compiled_steps.compile_metrics(engines).compute() == {}
    found = []
    # a shape is compiled when it occurs again
    for _ in range(2):
        assert len(answers(engines, requests_of(2))) == 8
        found.append(compiled_steps.compile_metrics(engines).compute())
    counts = [worker.call("compiled").result(300) for worker in workers]
    assert all(count.steps > 0 for count in counts)
    assert found[1]["rollout/compiled_steps"] == sum(count.steps for count in counts)
    assert found[1]["rollout/compiled_graphs"] == sum(count.graphs for count in counts)
    assert found[1]["rollout/compiled_steps"] > found[0]["rollout/compiled_steps"]
    assert found[1]["rollout/compile_failed"] == 0
    engines.close()


def test_a_job_that_nobody_waits_for_any_more_is_forgotten(
    folder: Path, two: list[ProcessWorker]
) -> None:
    engines = EngineWorkerGroup(two, CONFIG, LIMITS, transfer())
    drawing = engines.generate(requests_of(), SAMPLING)
    next(drawing)
    drawing.close()
    assert len(answers(engines, requests_of(2))) == 8


def test_a_request_that_no_engine_can_hold_is_refused_before_anything_is_drawn(
    two: list[ProcessWorker],
) -> None:
    engines = EngineWorkerGroup(two, EngineConfig(max_cache_tokens=20), LIMITS, transfer())
    with pytest.raises(ResourceError, match=r"engine\.max_cache_tokens"):
        engines.generate(requests_of(), SAMPLING)


def test_a_group_is_cut_only_where_one_worker_would_get_more_than_its_part() -> None:
    requests = requests_of(2, 4)
    assert [len(p) for p in split_requests(requests, 2)] == [4, 4]
    assert [len(p) for p in split_requests(requests, 4)] == [2, 2, 2, 2]
    assert [r for p in split_requests(requests, 3) for r in p] == requests


@pytest.mark.parametrize("way", ["message", "shared", "broadcast"])
def test_weights_arrive_bit_for_bit_by_each_way_and_only_trained_ones_travel_again(
    way: Way, folder: Path, two: list[ProcessWorker]
) -> None:
    for worker in two:
        worker.restart()  # as from disk
    first = dict(
        tiny_model("qwen2", seed=3, eos_token_id=None, dtype=torch.float64).named_parameters()
    )
    trained = frozenset(name for name in first if "layers.1" in name)
    engines = EngineWorkerGroup(two, CONFIG, LIMITS, transfer(way, trained=trained))
    for version in (1, 2):
        moved = {n: torch.randn_like(w) if n in trained else w for n, w in first.items()}
        found = engines.load_weights(moved.items(), version)
        assert found == {name: checksum(tensor) for name, tensor in moved.items()}
        assert engines.delivery.travelled == trained
    with pytest.raises(ModelError, match="do not fit"):
        engines.load_weights([(min(trained), torch.zeros(3))], 3)
    assert losses(engines) == {"restarts": 0, "weights_resent": 0}


def test_frozen_weights_that_a_worker_was_not_made_with_travel_too_once_to_each_that_is_started(
    folder: Path, two: list[ProcessWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    for worker in two:
        worker.restart()
    weights = dict(
        tiny_model("qwen2", seed=3, eos_token_id=None, dtype=torch.float64).named_parameters()
    )
    trained, odd = (
        next(n for n in weights if part in n) for part in ("q_proj.weight", "norm.weight")
    )
    weights[odd] = torch.full_like(weights[odd], 2.0)
    engines = EngineWorkerGroup(two, CONFIG, LIMITS, transfer(trained=frozenset([trained])))
    first = engines.load_weights(weights.items(), 1)
    assert first[odd] == checksum(weights[odd]) and engines.delivery.travelled == {odd}
    carrier = type(engines.delivery._transport)
    sent: list[str] = []
    send = carrier.send

    def seen(self: WeightTransport, slot: int, layout: Layout) -> None:
        sent.extend(piece.name for piece in layout)
        send(self, slot, layout)

    monkeypatch.setattr(carrier, "send", seen)
    weights[trained] = torch.randn_like(weights[trained])
    expected = {**first, trained: checksum(weights[trained])}
    assert engines.load_weights(weights.items(), 2) == expected and set(sent) == {trained}
    two[0].signal(signal.SIGKILL)
    engines.group.each("ping")
    engines.group.settle()
    assert engines.group.each("fingerprint") == [expected, expected]
    assert engines.load_weights(weights.items(), 3) == expected


def test_only_tensors_that_changed_are_sent_and_in_the_dtype_of_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PolicyModelConfig(path=str(folder), dtype="bfloat16")
    made = partial(engine_worker, model, CONFIG, StrategyConfig(device="cpu"), 1)
    worker = ProcessWorker("engine 0", made)
    engines = EngineWorkerGroup([worker], CONFIG, LIMITS, transfer())
    # at numbers of bfloat16, far from the points where rounding changes
    weights = {n: p.detach().bfloat16().double() for n, p in other_weights(folder).items()}
    halves = {name: checksum(tensor.bfloat16()) for name, tensor in weights.items()}
    sent: list[tuple[str, torch.dtype]] = []
    send = RayObject.send

    def seen(self: WeightTransport, slot: int, layout: Layout) -> None:
        sent.extend((piece.name, piece.dtype) for piece in layout)
        send(self, slot, layout)

    monkeypatch.setattr(RayObject, "send", seen)
    try:
        assert engines.load_weights(weights.items(), 1) == halves
        start = {n: checksum(p.bfloat16()) for n, p in other_weights(folder, 3).items()}
        changed = {name for name in weights if halves[name] != start[name]}
        assert set(sent) == {(name, torch.bfloat16) for name in changed}
        assert 0 < len(changed) < len(weights)
        sent.clear()
        name = min(changed)
        # too small a change for bfloat16: the engine would hold the same numbers
        moved = {**weights, name: weights[name] * (1 + 1e-6)}
        assert engines.load_weights(moved.items(), 2) == halves
        assert sent == []
        moved[name] = weights[name] * 1.5
        halves[name] = checksum(moved[name].bfloat16())
        assert engines.load_weights(moved.items(), 3) == halves
        assert {found for found, _ in sent} == {name}
        counts = engines.take_counts()
        assert (
            counts["update_bytes"]
            == sum(weights[n].numel() * 2 for n in changed) + 2 * weights[name].numel()
        )
        assert counts["update_seconds"] > 0 and "update_bytes" not in engines.take_counts()
        worker.signal(signal.SIGKILL)
        engines.group.each("ping")
        engines.group.settle()
        assert engines.group.each("fingerprint") == [halves]
    finally:
        engines.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["message", "broadcast"])
def test_a_killed_engine_is_started_anew_and_nothing_is_lost_or_drawn_twice(
    way: Way, folder: Path
) -> None:
    workers = [worker_of(folder, f"engine {i}") for i in range(2)]
    weights, requests = other_weights(folder), requests_of(30, 4)
    engines = EngineWorkerGroup(workers, CONFIG, LIMITS, transfer(way))
    try:
        engines.load_weights(weights.items(), 4)
        drawn: list[Rollout] = []
        for rollout in engines.generate(requests, SAMPLING):
            drawn.append(rollout)
            if len(drawn) == 5:
                workers[0].signal(signal.SIGKILL)
        assert told(drawn) == told(answers(local_engine(folder, weights, 4), requests))
        engines.group.settle()
        assert workers[0].starts == 2 and engines.take_counts()["restarts"] == 1
        newer = other_weights(folder, seed=11)
        assert engines.load_weights(newer.items(), 5) == {
            name: checksum(tensor) for name, tensor in newer.items()
        }
        workers[1].signal(signal.SIGKILL)  # while nobody looks
        time.sleep(0.2)
        engines.load_weights(weights.items(), 6)
        assert told(answers(engines, requests[:8])) == told(
            answers(local_engine(folder, weights, 6), requests[:8])
        )
        assert losses(engines) == {"restarts": 1, "weights_resent": 0}
    finally:
        engines.close()


@pytest.mark.parametrize("way", ["message", "shared", "broadcast"])
def test_an_engine_that_dies_while_weights_are_handed_over_has_them_in_the_end(
    way: Way, folder: Path
) -> None:
    workers = [worker_of(folder, f"engine {i}") for i in range(2)]
    engines = EngineWorkerGroup(workers, CONFIG, LIMITS, transfer(way))
    weights = other_weights(folder, seed=11)

    def dying() -> Iterator[tuple[str, Tensor]]:
        for i, pair in enumerate(weights.items()):
            if i == len(weights) // 2:
                workers[1].signal(signal.SIGKILL)
            yield pair

    try:
        engines.load_weights(other_weights(folder).items(), 1)
        assert engines.load_weights(dying(), 2) == {
            name: checksum(tensor) for name, tensor in weights.items()
        }
        assert losses(engines) == {"restarts": 1, "weights_resent": 1}
        assert {v for r in answers(engines, requests_of()) for v in r.versions} == {2}
    finally:
        engines.close()


class Stalling:
    """A worker that no longer answers once weights come, until it is started anew. ``told``: what it was asked in each life; those that
    start anew ``meet`` there."""

    def __init__(self, name: str, meet: threading.Barrier) -> None:
        self.name, self.told, self._meet = name, [[]], meet
        self._host = SmallHost()

    def call(self, method: str, *args: object) -> Future[object]:
        answer: Future[object] = Future()
        self.told[-1].append(method)
        if len(self.told) > 1 or "weights" not in self.told[0]:
            answer.set_result(getattr(self._host, method)(*args))
        return answer

    def restart(self) -> None:
        self._meet.wait(300)
        self.told.append([])

    def close(self) -> None:
        return


class SmallHost(NativeEngineWorker):
    """Holds weights, and no engine."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {"w": torch.zeros(3)}
        self.inbox = WeightBuffer(self.held.update)

    def fingerprint(self) -> Fingerprint:
        return {name: checksum(tensor) for name, tensor in self.held.items()}

    def settle(self, version: int) -> Fingerprint:
        return self.fingerprint()


def test_engines_that_fall_silent_in_a_hand_over_are_waited_for_once_and_started_anew_side_by_side() -> (
    None
):
    meet = threading.Barrier(2)
    workers = [Stalling(f"engine {i}", meet) for i in range(2)]
    engines = EngineWorkerGroup(
        workers, CONFIG, FaultPolicy(restarts=1, call_timeout=2), transfer()
    )
    try:
        assert engines.load_weights([("w", torch.ones(3))], 1) == {"w": checksum(torch.ones(3))}
    finally:
        engines.close()
    assert [w.told for w in workers] == [
        [["fingerprint", "weights", "weights", "ping"], ["weights", "settle"]]
    ] * 2
    assert losses(engines) == {"restarts": 2, "weights_resent": 1}
    assert [FaultPolicy(call_timeout=silence).grace for silence in (900.0, 30.0, 5.0)] == [
        180.0,
        10.0,
        5.0,
    ]


def test_an_engine_that_ends_while_a_group_forms_is_not_waited_for() -> None:
    gone: Future[object] = Future()
    gone.set_exception(WorkerLost("its process ended"))
    worker = SimpleNamespace(name="engine 0", call=lambda *_: gone)
    with pytest.raises(WorkerLost, match="its process ended"):
        ProcessGroupBroadcast(
            [worker],  # type: ignore[list-item]
            64,
            torch.device("cpu"),
            8.0,
            open_meeting("127.0.0.1", 1, 1, 8.0),
        )


def test_an_only_engine_that_is_back_before_it_is_known_who_was_lost_has_the_weights_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(folder, "engine 0")
    engines = EngineWorkerGroup([worker], CONFIG, LIMITS, transfer())
    group, weights = engines.delivery.group, other_weights(folder)
    each = group.each

    def slow(method: str, *args: object) -> list[object]:
        """Who was lost is back before its caller goes on."""
        if method == "settle":
            worker.signal(signal.SIGKILL)
        found = each(method, *args)
        group.settle()
        return found

    monkeypatch.setattr(group, "each", slow)
    try:
        assert engines.load_weights(weights.items(), 1) == {
            name: checksum(tensor) for name, tensor in weights.items()
        }
        assert engines.take_counts()["restarts"] == 1
    finally:
        engines.close()


def test_an_engine_that_falls_silent_is_taken_for_lost(folder: Path) -> None:
    worker = worker_of(folder, "engine 0")
    engines = EngineWorkerGroup([worker], CONFIG, LIMITS, transfer())
    try:
        engines.load_weights(other_weights(folder).items(), 1)
        requests = requests_of()
        expected = told(answers(engines, requests))
        time_out_after(3.0, engines.group, worker)
        worker.signal(signal.SIGSTOP)
        began = time.monotonic()
        assert told(answers(engines, requests)) == expected
        assert engines.take_counts()["restarts"] == 1
        assert time.monotonic() - began < 300
    finally:
        engines.close()


def test_an_engine_that_dies_again_and_again_ends_the_run_with_a_reason(folder: Path) -> None:
    worker = worker_of(folder, "engine 0")
    engines = EngineWorkerGroup([worker], CONFIG, LIMITS, transfer())
    done = threading.Event()

    def hunt() -> None:
        while not done.wait(0.01):
            worker.signal(signal.SIGKILL)

    hunter = threading.Thread(target=hunt)
    hunter.start()
    try:
        with pytest.raises(
            WorkerError, match=r"engine 0 was lost again after launch\.ray\.restarts = 2"
        ):
            answers(engines, requests_of())
    finally:
        done.set()
        hunter.join()
        engines.close()


class Fatal:
    """Stands in for an engine that draws without finishing anything, and is killed in its third turn, as for memory that it lacks."""

    turns = 0

    def draw(self, *asked: object) -> DrawReply:
        self.turns += 1
        return DrawReply([], None) if self.turns < 3 else os._exit(1)

    def abort(self, job: str) -> DrawReply:
        return DrawReply([], None)


@pytest.mark.parametrize("count", [1, 2])
def test_a_request_that_ends_one_engine_after_another_ends_the_run_though_they_answer_in_between(
    count: int,
) -> None:
    workers = [ProcessWorker(f"engine {i}", Fatal) for i in range(count)]
    engines = EngineWorkerGroup(
        workers, CONFIG, FaultPolicy(restarts=1, call_timeout=600.0), transfer()
    )
    try:
        said = r"3 engines were lost .* the same 1 responses, e\.g\. to prompt 'p0' .*launch\.ray\.restarts = 1"
        with pytest.raises(WorkerError, match=said):
            answers(
                engines, requests_of(1, 1), lambda: sum(worker.starts for worker in workers) > 8
            )
    finally:
        engines.close()


def test_all_ranks_put_weights_together_and_the_first_hands_them_over(
    folder: Path, two: list[ProcessWorker]
) -> None:
    weights = other_weights(folder)

    def hand_over(ranks: Threads, sent: dict[str, Tensor]) -> object:
        def gathered() -> Iterator[tuple[str, Tensor]]:
            for pair in sent.items():
                ranks.gather(None)  # as where each rank has a part of every tensor
                yield pair

        engines = EngineWorkerGroup(
            two if ranks.rank == 0 else [], CONFIG, LIMITS, transfer(), ranks
        )
        try:
            return engines.load_weights(gathered(), 3)
        except (ModelError, RankError) as error:
            return str(error)

    told_to = of_all_ranks(lambda ranks: hand_over(ranks, weights), 2)
    assert told_to == [{name: checksum(tensor) for name, tensor in weights.items()}] * 2
    name = next(iter(weights))
    first, second = of_all_ranks(
        lambda ranks: hand_over(ranks, {**weights, name: torch.zeros(3)}), 2
    )
    assert "do not fit" in str(first) and "rank 0: ModelError" in str(second)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "pause"), [("shared", 1.0), ("broadcast", 1.0), ("broadcast", None)]
)
def test_a_pause_within_the_limit_is_waited_for_and_a_longer_one_is_a_loss(
    folder: Path, way: Way, pause: float | None
) -> None:
    workers = [worker_of(folder, f"engine {i}") for i in range(2)]
    engines = EngineWorkerGroup(workers, CONFIG, LIMITS, transfer(way))
    weights = other_weights(folder)

    def stopping() -> Iterator[tuple[str, Tensor]]:
        for i, pair in enumerate(weights.items()):
            if i == len(weights) // 2:
                workers[1].signal(signal.SIGSTOP)
                if pause is not None:
                    threading.Timer(pause, workers[1].signal, (signal.SIGCONT,)).start()
            yield pair

    try:
        engines.group.each("ping")
        time_out_after(300.0 if pause else 15.0, engines.group, workers[1])
        began = time.monotonic()
        assert engines.load_weights(stopping(), 2) == {
            name: checksum(tensor) for name, tensor in weights.items()
        }
        assert time.monotonic() - began < 300
        lost = int(pause is None)
        assert losses(engines) == {"restarts": lost, "weights_resent": lost}
    finally:
        engines.close()
