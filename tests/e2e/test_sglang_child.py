"""Runs that start the server that they sample from: ``tests/sglang_package`` in the place of SGLang."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.config.base import build, deep_merge
from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.verbs import RLConfig
from lightrft.distributed.guarded.guardian import descendants
from lightrft.engines import sglang
from lightrft.engines.sending import sglang_weights
from lightrft.engines.served import sglang_options, sglang_process
from lightrft.engines.served.sglang_options import server_options
from lightrft.engines.served.sglang_process import SGLangProcess
from lightrft.engines.sglang import SGLangEngine
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ConfigError, ResourceError
from lightrft.utils.http_client import server_client
from tests import warm
from tests.e2e.command import ROOT
from tests.e2e.several import ENVIRONMENT, check_equal, config_file, named
from tests.e2e.test_sglang_broadcast import changed, weights_of
from tests.e2e.test_sglang_engine import (
    answers,
    assert_fault_stops,
    half_done,
    of_the_wrong_layer,
    on,
    opened,
    skipped,
)
from tests.sglang_server import PACKAGE, SGLangServer, sglang_server, started_sglang

SLEEPS = {"enable-memory-saver": True, "enable-weights-cpu-backup": True}
Served = tuple[str, SGLangServer]
Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(server_client, "FIRST_WAIT", 0.02)


@pytest.fixture
def served(model_folder: Path) -> Iterator[Served]:
    with sglang_server(model_folder, max_total_num_tokens=2**20) as found:
        yield found


@pytest.fixture
def in_a_thread(served: Served, monkeypatch: pytest.MonkeyPatch) -> SGLangServer:
    """A server in a thread of the test, which runs take for the one that they start."""

    class InAThread:
        url, starts = served[0], 1

        def __init__(self, options: Sequence[str], seconds: float) -> None:
            self.authorization: Callable[[], dict[str, str]] = dict

        def start(self) -> None: ...

        progressed = need = rest = end = start

        def take_restarts(self) -> int:
            return 0

        def has_ended(self, start: int, patience: float = 0.0) -> bool:
            return False

    monkeypatch.setattr(sglang, "SGLangProcess", InAThread)
    return served[1]


def without_url(tree: dict[str, Any], tmp_path: Path, **over: Any) -> dict[str, Any]:
    found = on(tree, "", tmp_path, **over)
    del found["engine"]["url"], found["engine"]["weights_dir"]
    return found


def started(model: Path, **settings: Any) -> SGLangEngine:
    return started_sglang(model, tiny_tokenizer(), **settings)


def processes_of_server() -> list[int]:
    """The guardian, SGLang, and SGLang's other process."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if sglang_process.CHILD.encode() in words or b"multiprocessing.spawn" in words:
                found.append(pid)
        except FileNotFoundError:
            pass
    return found


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_an_engine_starts_its_server_and_updates_it_and_ends_it(
    model_folder: Path, served: Served
) -> None:
    url, reference = served
    engine = started(model_folder, server_options=SLEEPS)
    pids = processes_of_server()
    # another user of the machine has no key
    status = server_client.httpx.get(f"{engine.client.url}/server_info").status_code
    first = changed(weights_of(reference))
    engine.load_weights(first.items(), 1)
    reference.generator.engine.decoder.load(first.items())
    expected = {seed: r.token_ids for seed, r in answers(opened(url)).items()}
    found = answers(engine)
    assert {seed: r.token_ids for seed, r in found.items()} == expected
    assert {v for r in found.values() for v in r.versions} == {1}
    engine.sleep(1)
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        answers(engine)
    second = changed(first, "lm_head.weight", by=0.7)
    # while it sleeps
    engine.load_weights(second.items(), 2)
    engine.wake()
    reference.generator.engine.decoder.load(second.items())
    expected = {seed: r.token_ids for seed, r in answers(opened(url)).items()}
    assert {seed: r.token_ids for seed, r in answers(engine).items()} == expected
    engine.close()
    assert status == 401 and len(pids) >= 3
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
def test_a_run_whose_server_is_killed_has_the_responses_of_one_whose_server_is_not(
    rl_tree: dict[str, Any], in_a_thread: SGLangServer, tmp_path: Path, monkeypatch: Any
) -> None:
    run_rl(build(RLConfig, without_url(rl_tree, tmp_path)))
    expected = read_rows(tmp_path / "run" / "metrics.jsonl")
    monkeypatch.setattr(sglang, "SGLangProcess", SGLangProcess)
    begun = tmp_path / "again" / "run" / "metrics.jsonl"
    killed: list[int] = []

    def kill() -> None:
        wait_until(lambda: begun.exists() and len(read_rows(begun)) >= 1)
        # SGLang itself: its guardian ends then
        killed.extend(processes_of_server()[1:2])
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    own = {"server_options": SLEEPS}
    tree = without_url(rl_tree, tmp_path, engine=own, run={"dir": str(begun.parent.parent)})
    run_rl(build(RLConfig, tree))
    thread.join()
    rows = read_rows(begun)
    assert sum(row.get("engine/restarts", 0) for row in rows) == 1
    assert max(row["policy/rollout_logprob_diff"] for row in rows) < 1e-5
    for row, other in zip(rows, expected, strict=True):
        assert row["step"] == other["step"]
        assert row["rollout/tokens_sampled"] == other["rollout/tokens_sampled"]
        assert row["reward/mean"] == pytest.approx(other["reward/mean"])
    wait_until(lambda: not processes_of_server())


@pytest.mark.slow
def test_each_of_two_processes_starts_a_server_and_they_have_the_numbers_of_one(
    uneven_tree: dict[str, Any], in_a_thread: SGLangServer, tmp_path: Path
) -> None:
    over = {"rollout": {"staleness": 1}, "algorithm": {"importance_sampling": ["tis"]}}
    paths = os.pathsep.join([str(PACKAGE), str(ROOT)])
    tree = without_url(uneven_tree, tmp_path, **over)
    run_rl(build(RLConfig, named(tree, tmp_path, "one")))
    file = config_file(tree, tmp_path, "two")
    words = ["-m", "lightrft", "rl", file, "launch.processes=2"]
    done = warm.run(words, env={**ENVIRONMENT, "PYTHONPATH": paths}, seats=2)
    assert done.returncode == 0, done.stdout + done.stderr
    check_equal(tmp_path / "two", tmp_path / "one")


def test_the_server_ends_with_a_run_that_is_killed(tmp_path: Path, model_folder: Path) -> None:
    found = tmp_path / "found"
    program = (
        "import time; from pathlib import Path\n"
        "from tests.e2e.test_sglang_child import processes_of_server, started\n"
        f"engine = started(Path({str(model_folder)!r}))\n"
        f"Path({str(found)!r}).write_text(' '.join(map(str, processes_of_server())) + '\\n')\n"
        "time.sleep(600)"
    )
    env = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(ROOT)])}
    run = warm.Process(["-c", program], env, tmp_path)
    wait_until(lambda: found.exists() and found.read_text().endswith("\n"))
    pids = [int(word) for word in found.read_text().split()]
    assert len(pids) >= 3 and all(map(is_alive, pids))
    run.send_signal(signal.SIGKILL)
    run.wait(300)
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_server_that_ends_early_is_told_with_its_last_words_and_without_its_key(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG_TALE", "CUDA out of memory, key")
    with pytest.raises(
        ResourceError, match=r"(?s)ended with status 1 before.*out of memory, key \.\.\.\n.*lower"
    ):
        started(model_folder)
    assert not processes_of_server()


def test_a_server_that_is_not_ready_in_time_is_ended(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG_LATE", "900")
    with pytest.raises(ResourceError, match=r"(?s)was not ready after 1 s.*engine\.deadline = 1"):
        started(model_folder, deadline=1.0)
    assert not processes_of_server()


def test_an_option_that_sglang_refuses_is_told(model_folder: Path) -> None:
    with pytest.raises(ResourceError, match=r"argument --attention-backend: invalid choice: 'x'"):
        started(model_folder, server_options={"attention-backend": "x"})


@pytest.mark.slow
def test_a_server_that_ends_is_started_again_when_it_is_needed_up_to_a_limit(
    model_folder: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started(model_folder, server_options=SLEEPS)
    engine.load_weights(weights_of(served[1]).items(), 1)
    expected = {seed: r.token_ids for seed, r in answers(engine).items()}
    engine.sleep(1)
    os.kill(processes_of_server()[1], signal.SIGKILL)
    wait_until(lambda: not processes_of_server())
    time.sleep(2 * sglang_process.LOOK_SECONDS)
    assert not processes_of_server()
    engine.wake()
    assert {seed: r.token_ids for seed, r in answers(engine).items()} == expected
    counts = engine.take_counts()
    assert (counts["restarts"], counts["weights_resent"]) == (1, 1)
    monkeypatch.setenv("FAKE_SGLANG_TALE", "no GPU any more")
    os.kill(processes_of_server()[1], signal.SIGKILL)
    with pytest.raises(ResourceError, match=r"(?s)4 times in a row.*no GPU any more"):
        answers(engine)
    assert engine.take_counts()["restarts"] == 3
    engine.close()


def test_only_changed_tensors_are_shared_in_buckets_of_bounded_size(
    in_a_thread: SGLangServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = weights_of(in_a_thread)
    largest = max(tensor.nbytes for tensor in start.values())
    monkeypatch.setattr(sglang_weights, "BUCKET", largest)
    engine = started(model_folder)
    engine.load_weights(start.items(), 1)
    assert sorted(name for call in in_a_thread.received for name in call) == sorted(start)
    assert all(sum(start[n].nbytes for n in call) <= largest for call in in_a_thread.received)
    in_a_thread.received.clear()
    names = ("model.norm.weight", "model.layers.1.mlp.up_proj.weight")
    new = changed(start, *names)
    engine.load_weights(new.items(), 2)
    assert sorted(name for call in in_a_thread.received for name in call) == sorted(names)
    assert all(torch.equal(t, new[name]) for name, t in weights_of(in_a_thread).items())
    assert in_a_thread.version == engine.weights and not in_a_thread.in_session
    assert not any("group" in path for path in in_a_thread.calls)
    engine.close()


@pytest.mark.parametrize(
    "fault", [skipped, half_done, of_the_wrong_layer], ids=lambda f: f.__name__
)
def test_an_update_that_goes_wrong_stops_the_run_at_its_first_batch(
    fault: Callable[[Weights], Weights],
    rl_tree: dict[str, Any],
    in_a_thread: SGLangServer,
    tmp_path: Path,
) -> None:
    assert_fault_stops(fault, in_a_thread, without_url(rl_tree, tmp_path), tmp_path / "run")


def test_an_update_that_broke_off_is_repeated_in_a_new_session(
    in_a_thread: SGLangServer, model_folder: Path
) -> None:
    engine = started(model_folder)
    weights = weights_of(in_a_thread)
    engine.load_weights(weights.items(), 1)
    in_a_thread.received.clear()

    async def broken(call: Any) -> object:
        del in_a_thread.edited["/update_weights_from_tensor"]
        return {"success": False, "message": "Failed to update parameter online"}

    in_a_thread.edited["/update_weights_from_tensor"] = broken
    new = changed(weights, "model.norm.weight")
    engine.load_weights(new.items(), 2)
    assert sorted(name for call in in_a_thread.received for name in call) == sorted(weights)
    assert all(torch.equal(t, new[name]) for name, t in weights_of(in_a_thread).items())
    engine.close()


def test_a_version_without_sessions_is_updated_too(
    in_a_thread: SGLangServer, model_folder: Path
) -> None:
    in_a_thread.sessions = False
    engine = started(model_folder)
    engine.load_weights(changed(weights_of(in_a_thread)).items(), 1)
    assert in_a_thread.version == engine.weights
    engine.close()


def test_adapters_are_merged_and_evaluation_has_the_weights_of_the_policy(
    rl_tree: dict[str, Any], in_a_thread: SGLangServer, tmp_path: Path
) -> None:
    over = {"model": {"lora": {"rank": 2}}}
    run_rl(build(RLConfig, without_url(rl_tree, tmp_path, **over)))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert max(row["policy/rollout_logprob_diff"] for row in rows) < 1e-5


def test_filters_are_refused_before_a_server_is_started(
    rl_tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "SGLangProcess", None)
    tree = without_url(rl_tree, tmp_path, sampling={"top_p": 0.9})
    with pytest.raises(ConfigError, match=r"sampling\.top_p = 0\.9: the log-probs of SGLang"):
        run_rl(build(RLConfig, tree))


def test_a_cache_that_has_no_room_is_refused_with_its_size(
    in_a_thread: SGLangServer, model_folder: Path
) -> None:
    in_a_thread.about_server["max_total_num_tokens"] = 500
    with pytest.raises(ResourceError, match=r"memory for 500 tokens.*max_cache_tokens = 1000"):
        started(model_folder, max_cache_tokens=1000)


def test_options_follow_the_settings() -> None:
    model = ModelConfig(path="base", tokenizer="words", trust_remote_code=True, revision="main")
    config = EngineConfig(
        kind="sglang",
        max_cache_tokens=1000,
        max_num_seqs=7,
        compile=False,
        server_options={"attention-backend": "fa3", "random-seed": 5, "log-level": "info"},
    )
    device = torch.device("cuda", 3)
    words = server_options(model, "folder", config, torch.bfloat16, device, 4096)
    assert " ".join(words) == (
        "--model-path folder --tokenizer-path words --revision main --trust-remote-code "
        "--dtype bfloat16 --device cuda --tp-size 1 --max-total-tokens 1256 "
        "--max-running-requests 7 --context-length 1256 --random-seed 5 "
        "--enable-deterministic-inference --disable-cuda-graph --log-level info --base-gpu-id 3 "
        "--enable-memory-saver --enable-weights-cpu-backup --attention-backend fa3"
    )


@pytest.mark.parametrize("found", ["0.5.4", "0.6.0", ""])
def test_a_version_that_was_not_compared_is_named(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_options, "installed_version", lambda: found)
    assert found in sglang_options.version_warning()
    assert "versions 0.5.5 to 0.5.23" in sglang_options.version_warning()
    for version in ("0.5.5.post1", "0.5.10", "0.5.23+cu128"):
        monkeypatch.setattr(sglang_options, "installed_version", lambda v=version: v)
        assert not sglang_options.version_warning()


def test_a_missing_package_is_named_with_the_way_out(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_options.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"package sglang is not installed.*set engine\.url"):
        started(model_folder)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"kind": "sglang", "served_model": "m"},
            "needs engine.kind sglang with engine.url or http",
        ),
        ({"kind": "sglang", "server_options": {"port": 1}}, "engine.server_options has port"),
        ({"kind": "vllm", "server_options": {"a": 1}}, "engine.server_options = "),
        ({"kind": "sglang", "url": "http://a", "compile": True}, "engine.compile = true"),
    ],
)
def test_settings_that_would_change_nothing_are_refused(
    settings: dict[str, Any], named: str, rl_tree: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=named):
        build(RLConfig, deep_merge(rl_tree, {"engine": settings}))
