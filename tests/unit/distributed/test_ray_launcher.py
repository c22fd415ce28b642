"""What the launcher says and decides where no cluster is needed for it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge, to_yaml
from lightrft.config.launch import LaunchConfig
from lightrft.config.verbs import RLConfig, SFTConfig
from lightrft.distributed import ray_cluster, ray_workers
from lightrft.distributed.error_report import error_listener, report_error
from lightrft.distributed.placement import RankPlacement
from lightrft.distributed.ray_cluster import cluster, package, reason_of
from lightrft.distributed.ray_launcher import (
    RankActor,
    RankLost,
    RankResult,
    RankTask,
    RayLauncher,
    check_launch,
    resumes_run,
)
from lightrft.distributed.ray_workers import WorkerRegistry, current_allocator
from lightrft.utils.errors import RESUMES, ConfigError, RankError, ResourceError, RewardError
from lightrft.utils.stop_signal import StopFlag
from lightrft.workers.worker_group import FaultPolicy


def driver_of(tree: dict[str, Any] | None = None) -> RayLauncher:
    """That of two ranks on two nodes, that has not begun."""
    config = build(RLConfig, {"launch": {"kind": "ray", "processes": 2}, **(tree or {})})
    driver = RayLauncher("a:b", config, None, StopFlag())  # type: ignore[arg-type]
    driver.places = (
        RankPlacement("first", "10.0.0.1", 11),
        RankPlacement("second", "10.0.0.2", 12),
    )
    return driver


def test_without_the_package_the_way_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs the package ray .*: pip install -e '\.\[ray\]'"):
        package()


def test_the_command_line_does_not_load_torch_or_ray_to_launch() -> None:
    code = (
        "import sys; import lightrft.distributed.ray_launcher; print(*sorted({'torch', 'ray'} & "
        "set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        timeout=600,
        check=True,
    )
    assert done.stdout.split() == []


def test_a_remote_client_is_refused_with_the_way_to_start_on_the_cluster() -> None:
    launch = build(LaunchConfig, {"kind": "ray", "ray": {"address": "ray://host:10001"}})
    with (
        pytest.raises(ConfigError, match=r"ray://host:10001'.*launch\.ray\.address=auto"),
        cluster(launch.ray),
    ):
        pass


class LateRay:
    """Ray whose ``init`` raises ``errors``, one a call, and then starts."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), []

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        self.calls.append("init")
        if self.errors:
            raise self.errors.pop(0)

    def shutdown(self) -> None:
        self.calls.append("shutdown")


LATE = (
    "The current node timed out during startup. This could happen because some of the raylet "
    "failed to startup"
)


@pytest.fixture
def late_ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    def of(*errors: Exception) -> LateRay:
        ray = LateRay(*errors)
        monkeypatch.setattr(ray_cluster, "package", lambda: ray)
        monkeypatch.setattr(ray_cluster, "_token", lambda _: nullcontext())
        return ray

    return of


def test_a_ray_that_is_late_is_started_again_and_what_it_left_is_ended_first(
    late_ray, caplog
) -> None:
    ray = late_ray(Exception(LATE), TimeoutError("the GCS"))
    with cluster(build(LaunchConfig, {"kind": "ray"}).ray):
        pass
    assert ray.calls == ["init", "shutdown", "init", "shutdown", "init", "shutdown"]
    assert caplog.text.count("Ray did not start in time") == 2


@pytest.mark.parametrize("error", [Exception(LATE), TimeoutError("the GCS timed out")])
def test_a_ray_that_does_not_start_in_time_is_an_error_that_says_what_to_do(
    late_ray, error
) -> None:
    ray = late_ray(error)
    launch = build(LaunchConfig, {"kind": "ray", "ray": {"placement_timeout_minutes": 1e-12}})
    with pytest.raises(
        ResourceError,
        match=r"within launch\.ray\.placement_timeout_minutes = 1e-12 minutes \(.*timed out.*raise launch\.ray\.placement_timeout_minutes",
    ):
        cluster(launch.ray).__enter__()
    assert ray.calls == ["init", "shutdown"]


def test_a_ray_that_cannot_start_or_be_joined_is_not_tried_again(late_ray) -> None:
    ray = late_ray(Exception("no such file: raylet"))
    with pytest.raises(
        ResourceError, match="did not start on this machine \\(no such file: raylet"
    ):
        cluster(build(LaunchConfig, {"kind": "ray"}).ray).__enter__()
    assert ray.calls == ["init", "shutdown"]
    late_ray(Exception(LATE))
    with pytest.raises(
        ConfigError, match=r"launch\.ray\.address = 'auto': no Ray cluster could be joined"
    ):
        cluster(build(LaunchConfig, {"kind": "ray", "ray": {"address": "auto"}}).ray).__enter__()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:{free}", "Connection refused"),
        ("no-such-host.invalid:6379", "Name or service not known|failure in name resolution"),
        ("first-node", "neither auto nor host:port"),
        ("first-node:http", "neither auto nor host:port"),
    ],
    ids=["nobody listens", "no such name", "no port", "no number"],
)
def test_a_cluster_that_is_not_there_is_refused_before_ray_waits_for_it(
    late_ray, address, why, monkeypatch
) -> None:
    monkeypatch.setattr(ray_cluster, "JOIN_SECONDS", 0.5)
    ray = late_ray(Exception("not called"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        place = address.format(free=unused.getsockname()[1])
        with pytest.raises(
            ConfigError, match=rf"launch\.ray\.address = '{place}': no Ray cluster .*({why})"
        ):
            cluster(build(LaunchConfig, {"kind": "ray", "ray": {"address": place}}).ray).__enter__()
    assert "init" not in ray.calls


def test_a_cluster_that_is_still_starting_is_waited_for(late_ray, monkeypatch) -> None:
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        # the first attempt is refused, since nobody listens yet
        monkeypatch.setattr(time, "sleep", lambda seconds: head.listen())
        place = f"127.0.0.1:{head.getsockname()[1]}"
        ray = late_ray(Exception("no driver"))
        with pytest.raises(ConfigError, match="no driver"):
            cluster(build(LaunchConfig, {"kind": "ray", "ray": {"address": place}}).ray).__enter__()
    assert ray.calls[0] == "init"


def test_devices_on_processors_and_workers_of_supervised_training_are_refused() -> None:
    cpu = {"strategy": {"device": "cpu"}, "launch": {"kind": "ray", "ray": {"devices": 0.5}}}
    with pytest.raises(
        ConfigError, match=r"launch\.ray\.devices = 0\.5 changes nothing: strategy\.device is cpu"
    ):
        check_launch(build(RLConfig, cpu))
    with pytest.raises(
        ConfigError, match=r"launch\.ray\.engines = 2 changes nothing: sft has no such workers"
    ):
        check_launch(build(SFTConfig, {"launch": {"kind": "ray", "ray": {"engines": 2}}}))


def test_a_worker_that_falls_silent_is_missed_before_the_ranks_that_wait_for_it_give_up() -> None:
    tree = {
        "launch": {"kind": "ray", "processes": 2, "ray": {"engines": 1}},
        "strategy": {"timeout_minutes": 6.0},
    }
    assert FaultPolicy.of(build(RLConfig, tree)) == FaultPolicy(restarts=3, call_timeout=180.0)
    said = (
        r"launch\.ray\.call_timeout_minutes = 6 minutes is not below strategy\.timeout_minutes = 6"
    )
    silent = {"launch": {"ray": {"call_timeout_minutes": 6}}}
    with pytest.raises(ConfigError, match=said):
        check_launch(build(RLConfig, deep_merge(tree, silent)))
    check_launch(
        build(RLConfig, deep_merge(tree, {"launch": {"ray": {"call_timeout_minutes": 5}}}))
    )
    # Nobody waits.
    check_launch(
        build(RLConfig, deep_merge(tree, deep_merge(silent, {"launch": {"processes": 1}})))
    )


def test_workers_without_a_launcher_are_an_error_that_says_how_to_start() -> None:
    with pytest.raises(ConfigError, match=r"start the run by the command lightrft"):
        current_allocator()


@pytest.mark.parametrize("starts", [True, False])
def test_the_token_of_a_cluster_of_its_own_is_forgotten_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    """By Ray, too, which would offer it to a cluster whose token is in the user's home."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("f" * 64)
    loader = package()._raylet.AuthenticationTokenLoader.instance()
    loader.reset_cache()

    def token() -> str:
        return loader.get_token_for_http_header(ignore_auth_mode=True)[
            "authorization"
        ].removeprefix("Bearer ")

    def init(**_: Any) -> None:
        os.environ["RAY_AUTH_MODE"] = "token"
        assert token() == os.environ["RAY_AUTH_TOKEN"] != "f" * 64
        if not starts:
            raise RuntimeError("no room")

    ray = SimpleNamespace(
        is_initialized=lambda: False, init=init, shutdown=lambda: None, _raylet=package()._raylet
    )
    monkeypatch.setattr(ray_cluster, "package", lambda: ray)
    with nullcontext() if starts else pytest.raises(ResourceError, match="no room"):
        for _ in range(2):
            with cluster(build(LaunchConfig, {"kind": "ray"}).ray):
                pass
            assert token() == "f" * 64
    assert token() == "f" * 64
    assert not {"RAY_AUTH_TOKEN", "RAY_AUTH_MODE"} & set(os.environ)
    monkeypatch.undo()
    loader.reset_cache()


class Actor:
    """One whose node is there, or not. It answers calls in order, and is never done making its object."""

    def __init__(self, node: bool) -> None:
        self._begun = not node

    @property
    def make(self) -> SimpleNamespace:
        return SimpleNamespace(remote=self._never)

    @property
    def ready(self) -> SimpleNamespace:
        return SimpleNamespace(remote=self._ready)

    def _never(self, *_: Any) -> None:
        self._begun = True

    def _ready(self) -> asyncio.Future[None]:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._begun:
            answer.set_result(None)
        return answer


def test_a_worker_that_is_started_anew_has_its_place_though_its_model_loads_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_workers, "package", lambda: SimpleNamespace(kill=lambda actor: None))
    nodes = iter([True, True, False])
    monkeypatch.setattr(ray_workers, "start_actor", lambda *_: Actor(next(nodes)))

    async def lost_twice() -> None:
        roster = WorkerRegistry(None, 0.5, ("", {}, None))
        first, life = await roster.hold("engine 0", None, [])  # type: ignore[arg-type]
        second, again = await roster.again("engine 0", life)
        assert second is not first and again == life + 1
        # Another rank, that has lost the first one too.
        assert await roster.again("engine 0", life) == (
            second,
            again,
        )
        with pytest.raises(
            ResourceError,
            match=r"engine 0 found no place within launch\.ray\.placement_timeout_minutes",
        ):
            await roster.again("engine 0", again)

    asyncio.run(lost_twice())


def test_a_folder_that_another_node_does_not_see_is_an_error_that_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, mark = RankActor(), RankActor().put_mark(str(tmp_path / "runs"))
    assert rank.sees(mark, 0.0)
    rank.remove_mark(mark)
    assert not rank.sees(mark, 0.3) and not rank.sees(str(tmp_path / "elsewhere" / "mark"), 0.0)
    answers = iter([["mark"], [False], [None]])
    monkeypatch.setattr(RayLauncher, "all_of", lambda *_: next(answers))
    said = r"run\.dir = 'runs': rank 1 on 10\.0\.0\.2 \(second\) does not see what rank 0 on 10\.0\.0\.1 \(first\) writes there"
    with pytest.raises(ConfigError, match=said):
        driver_of().check_shared([Anything(), Anything()])


class Anything:
    """Has every method, and each gives back the same."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any) -> Any:
        return self


def test_the_error_of_the_rank_where_it_began_is_told_and_not_that_of_those_that_heard_of_it() -> (
    None
):
    heard = RankResult(error="RankError", text="rank 1: RewardError: no")
    with pytest.raises(RewardError, match=r"^no$"):
        driver_of().outcome({0: heard, 1: RankResult(error="RewardError", text="no")})
    with pytest.raises(
        RuntimeError, match=r"(?s)^ValueError on rank 1, node 10\.0\.0\.2 .*: odd\nTraceback"
    ):
        driver_of().outcome(
            {0: heard, 1: RankResult(error="ValueError", text="odd", trace="Traceback")}
        )
    with pytest.raises(MemoryError):
        driver_of().outcome({0: heard, 1: RankResult(error="MemoryError")})


def test_a_rank_that_does_not_answer_when_another_has_given_up_is_lost() -> None:
    with pytest.raises(RankLost, match=r"rank 1 on node 10\.0\.0\.2 \(second\) did not respond"):
        driver_of().outcome({0: RankResult(error="RankError", text="rank 0 did not hear")})
    with pytest.raises(
        RankLost,
        match=r"rank 1 on node .* did not respond after another ended \(rank 1 sends no heartbeat\)",
    ):
        driver_of().outcome(
            {0: RankResult(error="LostRankError", text="rank 1 sends no heartbeat")}
        )
    with pytest.raises(RankLost, match=r"lost one another"):
        driver_of().outcome(
            {rank: RankResult(error="RankError", text="a connection broke") for rank in (0, 1)}
        )
    with pytest.raises(RankLost, match=r"^critic 0 was lost$"):
        driver_of().outcome({0: RankResult(error="WorkerError", text="critic 0 was lost")})
    assert driver_of().outcome({0: RankResult(result={"steps": 2}), 1: RankResult()}) == {
        "steps": 2
    }


def test_a_rank_that_has_given_up_is_lost_by_its_own_words_and_one_that_said_nothing_by_those_of_ray() -> (
    None
):
    driver, heard = driver_of(), []
    driver.pass_on([("left", (0, f"rank 1 is silent. {RESUMES}"))])
    assert (
        str(driver.lost(0, "exit 2"))
        == "rank 0 on node 10.0.0.1 (first) has given up: rank 1 is silent"
    )
    assert str(driver.lost(1, "exit 2")) == "rank 1 on node 10.0.0.2 (second) was lost: exit 2"
    with error_listener(heard.append):
        assert report_error(error := RankError("rank 1 is silent")) and heard == [error]
    assert not report_error(error) and heard == [error]


@pytest.mark.parametrize(
    ("resume", "saved", "expected"),
    [("never", 0, "auto"), ("auto", 1, "auto"), ("other", 0, "other"), ("other", 1, "auto")],
)
def test_ranks_that_go_on_take_up_what_was_saved_whatever_the_first_ones_began_with(
    tmp_path: Path, resume: str, saved: int, expected: str
) -> None:
    for step in range(saved):
        (tmp_path / "run" / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    first = build(RLConfig, {"run": {"dir": str(tmp_path), "resume": resume, "overwrite": True}})
    run = resumes_run(RankTask("a:b", "RLConfig", to_yaml(first), {}, None, again=True)).run
    assert (run.resume, run.overwrite) == (expected, False)
    assert resumes_run(RankTask("a:b", "RLConfig", to_yaml(first), {}, None, again=False)) == first


def test_what_ray_says_of_a_lost_actor_is_told_in_short() -> None:
    long = (
        "The actor died.\n\tpid: 7\nThe actor is dead because its node has died. Worker exit "
        "detail: gone. Some common causes: (1)"
    )
    assert (
        reason_of(RuntimeError(long))
        == "The actor is dead because its node has died. Worker exit detail: gone"
    )
    assert reason_of(RuntimeError("odd\nmore")) == "odd"
