"""Updates that two ranks send, in real processes: each sends its part, and workers hold every bit, whoever is killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightrft.engines.sending.sender_turns import SenderTurns, Turn
from lightrft.engines.weight_transport import build_transport
from lightrft.workers import weight_sync
from lightrft.workers.weight_sync import WeightSync, WeightSyncConfig
from lightrft.workers.worker_group import FaultPolicy
from tests import warm
from tests.unit.distributed.test_process_group import free_port
from tests.unit.workers import sender_ranks
from tests.unit.workers.sender_ranks import SHAPES, sums_of, weights_of
from tests.worker_helpers import ProcessWorker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have written what they found, before and after one of them was killed."""
    path = tmp_path_factory.mktemp("senders")
    (path / "port").write_text(str(free_port()))
    with pytest.raises(AssertionError):  # of the rank that was killed
        warm.spawn(sender_ranks.main, path)
    return path


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


@pytest.mark.slow
def test_two_ranks_send_a_part_each_and_workers_hold_every_bit_whoever_is_killed(
    folder: Path,
) -> None:
    ranks = [read(folder / f"updates-{rank}.json") for rank in range(2)]
    first, third = sums_of(weights_of(1)), sums_of(weights_of(3))
    flipped = {name: -weights_of(1)[name] for name in ("layers.0.weight", "layers.5.weight")}
    second = first | sums_of(flipped)
    sizes = {name: 2 * weight.numel() for name, weight in weights_of(1).items()}
    for found in ranks:
        assert [found[name] for name in ("first", "second", "same", "third", "fourth")] == [
            first,
            second,
            second,
            third,
            first,
        ]
        assert found["first bytes"] == sum(sizes.values())
        assert found["second bytes"] == sum(sizes[name] for name in flipped)
        assert found["same bytes"] == 0
        assert "do not fit" in found["misfit"] and found["misfit seconds"] < sender_ranks.SECONDS
    assert ranks[0]["restarted"] == [second, second]
    counts = ranks[0]["third counts"], ranks[0]["fourth counts"]
    assert [(c["restarts"], c["weights_resent"]) for c in counts] == [(1, 1), (0, 0)]
    kept = [set(found["kept"]) for found in ranks]
    assert not kept[0] & kept[1] and kept[0] | kept[1] == set(SHAPES)
    # the embedding is half as large as everything else, and no tensor is cut between ranks
    parts = [sum(sizes[name] for name in part) for part in kept]
    assert max(parts) < 0.6 * sum(sizes.values())


@pytest.mark.slow
def test_a_sender_that_is_killed_in_an_update_ends_the_others_at_once_and_frees_the_workers(
    folder: Path,
) -> None:
    found = read(folder / "killed-0.json")
    assert "rank 1" in found["said"] and "The same command resumes" in found["said"]
    assert found["seconds"] < sender_ranks.SECONDS / 2
    assert not (folder / "killed-1.json").exists()


def test_tensors_go_in_turns_to_the_sender_with_the_fewest_bytes_and_stay_there() -> None:
    turns = SenderTurns(2, room=10)
    sizes = {"a": 25, "b": 6, "c": 4, "d": 7, "e": 3, "f": 9}
    turns.begin()
    found = {name: turns.next(name, size) for name, size in sizes.items()}
    assert found == {
        "a": Turn(0, True),
        "b": Turn(1, True),
        "c": Turn(1, False),
        "d": Turn(1, True),
        "e": Turn(1, False),
        "f": Turn(1, True),
    }
    turns.begin()
    sizes["new"] = 5
    assert [turns.next(name, sizes[name]) for name in ("f", "a", "new")] == [
        Turn(1, True),
        Turn(0, True),
        Turn(0, True),
    ]


class OnGPU(sender_ranks.Shelf):
    """A worker that says that it computes on a GPU."""

    def __init__(self, gpu: str) -> None:
        super().__init__()
        self.gpu = gpu

    def weights(self, method: str, *args: object) -> object:
        return self.gpu if method == "device_name" else super().weights(method, *args)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (("1", "2"), "broadcast"),
        (("0", "1"), "message"),
        (("1", "1"), "message"),
        (("0", "0"), "shared"),
    ],
)
def test_engines_that_share_a_gpu_get_no_broadcast_which_nccl_would_refuse(
    gpus: Sequence[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ways: list[str] = []

    def build(way: Any, *more: Any) -> Any:
        ways.append(way)
        return build_transport(way, *more)

    monkeypatch.setattr(weight_sync, "device_name", lambda device: "0")
    monkeypatch.setattr(weight_sync, "build_transport", build)
    workers = [ProcessWorker(f"engine {gpu}", partial(OnGPU, gpu)) for gpu in gpus]
    sync = WeightSync(workers, FaultPolicy(), WeightSyncConfig("broadcast", sender_ranks.BUCKET))
    try:
        for seed in (1, 2):
            assert sync.sync(weights_of(seed).items(), seed) == sums_of(weights_of(seed))
    finally:
        sync.close()
    assert ways == [expected]
    said = "launch.ray.weights = broadcast is replaced by"
    assert caplog.text.count(said) == (expected != "broadcast")
    assert f"set launch.ray.weights={expected}" in caplog.text or expected == "broadcast"


def test_a_transport_that_times_out_is_named_by_the_class_of_its_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def build(*_: object) -> Any:
        # as ``Future.result`` raises it
        raise TimeoutError

    monkeypatch.setattr(weight_sync, "build_transport", build)
    workers = [ProcessWorker("engine 0", partial(OnGPU, "0"))]
    sync = WeightSync(workers, FaultPolicy(), WeightSyncConfig("broadcast", sender_ranks.BUCKET))
    try:
        assert sync.sync(weights_of(1).items(), 1) == sums_of(weights_of(1))
    finally:
        sync.close()
    assert "weights did not reach all workers (TimeoutError); they are sent again" in caplog.text


def test_senders_are_spread_over_the_machines_and_only_a_broadcast_has_several() -> None:
    assert WeightSyncConfig("broadcast").ranks_that_send(64) == list(range(0, 64, 8))
    assert WeightSyncConfig("broadcast").ranks_that_send(3) == [0, 1, 2]
    assert WeightSyncConfig("broadcast", senders=1).ranks_that_send(4) == [0]
    assert WeightSyncConfig("message").ranks_that_send(4) == [0]
    assert WeightSyncConfig("shared").ranks_that_send(4) == [0]
