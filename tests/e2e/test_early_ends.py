"""Runs that end before their first checkpoint or because they are good enough, and are started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.observability.observer import NullObserver
from lightrft.observability.trackers import read_rows
from lightrft.trainer import rl
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import DamagedError, GenerationInterrupted
from tests import warm
from tests.e2e.several import ROOT, config_file
from tests.e2e.test_resume import steady
from tests.unit.distributed.test_process_group import at, free_port


@pytest.fixture
def tree(rl_tree: dict[str, Any]) -> dict[str, Any]:
    held_out = {
        "data": {"sources": rl_tree["data"]["sources"]},
        "every": 1,
        "sampling": {"max_new_tokens": 4},
    }
    return deep_merge(
        rl_tree,
        {
            "eval": held_out,
            "checkpoint": {"every": 0},
            "train": {"steps": 2},
            "log": {"tensorboard": True},
        },
    )


def named(tree: dict[str, Any], name: str, **over: Any) -> RLConfig:
    return build(RLConfig, deep_merge(tree, {"run": {"name": name}, **over}))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [steady(row) for row in read_rows(folder / "metrics.jsonl")]


class Ends(NullObserver):
    """Ends the program once a step is recorded."""

    def __init__(self, step: int) -> None:
        self.step = step

    def update(self, row: Mapping[str, Any]) -> None:
        if row["step"] == self.step:
            raise SystemExit(9)


@pytest.mark.parametrize("step", [0, 1])
def test_a_run_that_ended_after_an_evaluation_and_before_a_checkpoint_begins_anew(
    tree, tmp_path, caplog, step
):
    with pytest.raises(SystemExit):
        run_rl(named(tree, "ended"), Ends(step))
    assert not list((tmp_path / "ended" / "checkpoints").glob("step_*"))
    caplog.clear()
    assert run_rl(named(tree, "ended"))["finished"]
    assert ("holds no checkpoint: the run starts over. Steps taken again: 1" in caplog.text) == (
        step > 0
    )
    assert "resumed" not in caplog.text
    run_rl(named(tree, "whole"))
    assert rows(tmp_path / "ended") == rows(tmp_path / "whole")
    assert [row["step"] for row in rows(tmp_path / "ended")] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated weights", "truncated manifest", "another step"])
def test_a_run_whose_newest_checkpoint_is_damaged_resumes_from_the_one_before_it_bit_for_bit(
    tree, tmp_path, caplog, damage
):
    """The run saves by the clock; the one that it is compared with saves nothing before its end."""
    tree = deep_merge(tree, {"train": {"steps": 4}, "eval": {"every": 2}})
    with pytest.raises(SystemExit):
        run_rl(named(tree, "ended", checkpoint={"every_minutes": 1e-9}), Ends(3))
    newest = tmp_path / "ended" / "checkpoints" / "step_000003"
    if damage == "truncated weights":
        os.truncate(newest / "policy" / "state.safetensors", 1000)
    elif damage == "truncated manifest":
        os.truncate(newest / "manifest.json", 100)
    else:
        text = (newest / "manifest.json").read_text()
        (newest / "manifest.json").write_text(text.replace('"step": 3', '"step": 2'))
    caplog.clear()
    summary = run_rl(named(tree, "ended", checkpoint={"every_minutes": 0}))
    assert (summary["saved_step"], summary["most_unsaved_steps"]) == (4, 2)
    assert (
        "step_000003 is damaged" in caplog.text
        and "resumes from the checkpoint of step 2. Steps taken again: 1" in caplog.text
    )
    names = sorted(path.name for path in (tmp_path / "ended" / "checkpoints").iterdir())
    assert names == ["damaged_step_000003", "step_000002", "step_000004"]
    run_rl(named(tree, "whole", checkpoint={"every_minutes": 0}))
    assert rows(tmp_path / "ended") == rows(tmp_path / "whole")
    end = Path("checkpoints") / "step_000004" / "policy" / "state.safetensors"
    assert (tmp_path / "ended" / end).read_bytes() == (tmp_path / "whole" / end).read_bytes()


def test_a_checkpoint_that_the_user_named_is_not_replaced_by_another(tree, tmp_path):
    run_rl(named(tree, "first", checkpoint={"every": 1}))
    named_one = tmp_path / "first" / "checkpoints" / "step_000002"
    os.truncate(named_one / "trainer.pt", 10)
    with pytest.raises(DamagedError, match="step_000002 is damaged"):
        run_rl(named(tree, "second", run={"name": "second", "resume": str(named_one)}))
    assert named_one.is_dir()


def test_a_run_that_was_stopped_in_its_first_step_is_not_evaluated_twice(
    tree, tmp_path, monkeypatch
):
    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise GenerationInterrupted

    with monkeypatch.context() as patch:
        patch.setattr(rl, "rl_step", interrupted)
        assert not run_rl(named(tree, "stopped"))["finished"]
    assert list((tmp_path / "stopped" / "checkpoints").glob("step_*"))
    assert run_rl(named(tree, "stopped"))["finished"]
    run_rl(named(tree, "whole"))
    assert rows(tmp_path / "stopped") == rows(tmp_path / "whole")


def test_a_run_that_was_good_enough_takes_no_further_step_when_it_is_started_again(tree, tmp_path):
    (tmp_path / "always.py").write_text("def right(rollout):\n    return 1.0\n")
    over = {
        "eval": {"stop_at": 1.0, "at_start": False},
        "train": {"steps": 5},
        "reward": {"terms": [f"{tmp_path}/always.py:right"]},
    }
    first = run_rl(named(tree, "good", **over))
    again = run_rl(named(tree, "good", **over))
    assert first["steps"] == again["steps"] == 1 and again["finished"]
    assert len(rows(tmp_path / "good")) == 1


BROKEN = """
import os, sys, time
from pathlib import Path
from lightrft.config.verbs import RLConfig
from lightrft.trainer import rl
from lightrft.workers import local
from lightrft.config.base import load_settings

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1]).parent
local_async_engine, learn = local.local_async_engine, rl.learn

def without_end(config, *given):
    engine = local_async_engine(config, *given)
    generate = engine.generate
    def generating(requests, sampling, stopped):
        if (folder / "learning").exists():  # as long as nobody says stop
            (folder / f"drawing-{rank}").touch()
            while not stopped():
                time.sleep(0.01)
        return generate(requests, sampling, stopped)
    engine.generate = generating
    return engine

def broken(*given):
    (folder / "learning").touch()
    while rank and not (folder / "drawing-0").exists():
        time.sleep(0.01)
    if rank:
        raise ZeroDivisionError("broken")
    return learn(*given)

local.local_async_engine, rl.learn = without_end, broken
rl.run_rl(load_settings(RLConfig, [sys.argv[1]]).settings)
"""


@pytest.mark.slow
def test_a_rank_that_fails_while_the_others_draw_ends_them_at_once(tree, tmp_path):
    over = {
        "rollout": {"staleness": 2},
        "algorithm": {"old_logprobs": "rollout"},
        "eval": {"data": {"sources": []}, "every": 0},
        "train": {"steps": 4},
        "strategy": {"timeout_minutes": 60.0},
    }
    file = config_file(deep_merge(tree, over), tmp_path, "broken")
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    port = free_port()
    both = [warm.Process(["-c", BROKEN, file], env | at(port, rank)) for rank in range(2)]
    try:
        for one in both:
            one.wait(900)
        first, second = (one.said(2) for one in both)
    finally:
        for one in both:
            one.send_signal(signal.SIGKILL)
            one.close()
    assert "ZeroDivisionError: broken" in second.splitlines()[-1]
    assert "rank 1: ZeroDivisionError: broken" in first
