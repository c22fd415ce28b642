"""The scripts of ``benchmarks/gpu`` run on whatever is there, and what they count is right."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightrft.models.actor import Actor
from lightrft.models.tiny.text import tiny_config, tiny_model
from lightrft.types import Batch, Segments
from tests import warm
from tests.e2e.command import ROOT
from tests.e2e.several import ENVIRONMENT
from tests.sglang_server import sglang_server

SCRIPTS = ROOT / "benchmarks" / "gpu"


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import common

    return common


@pytest.fixture
def layouts(common: ModuleType) -> Iterator[ModuleType]:
    import layouts

    yield layouts


@pytest.mark.slow
def test_all_scripts_run_and_leave_two_files_with_the_machine_in_their_names(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = [
        str(SCRIPTS / "run_all.py"),
        "--smoke",
        "--machine",
        "here",
        "--out",
        str(tmp_path),
    ]
    env = {**ENVIRONMENT, "WARM_PYTHON": str(warm.interpreter(tmp_path_factory.mktemp("warm")))}
    done = warm.run(words, env=env, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpu-here.json", "gpu-here.md"]
    found = json.loads((tmp_path / "gpu-here.json").read_text(encoding="utf-8"))
    scripts = ["layouts", "compiled", "decoding", "step-0.5b", "generate-0.5b", "vs_trl", "ranks"]
    assert list(found["ended"]) == scripts
    assert all(said.startswith("done") for said in found["ended"].values())
    step = found["results"]["step-0.5b"][0]["numbers"]
    assert 0 < step["utilisation"] < 1
    assert sum(s for name, s in step["phases"].items() if name != "step") == pytest.approx(
        step["phases"]["step"], abs=0.01
    )
    assert found["results"]["ranks"][0]["gaps"]["grpo"]["weights"] < 1e-5


@pytest.mark.slow
def test_the_script_for_sglang_checks_a_server_of_its_protocol(
    tmp_path: Path, model_folder: Path
) -> None:
    script = str(SCRIPTS / "served_sglang.py")
    with sglang_server(model_folder) as (url, server):
        words = [script, "--smoke", "--url", url, "--model", str(model_folder)]
        words += ["--out", str(tmp_path), "--machine", "here"]
        done = warm.run(words, env=ENVIRONMENT, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        server.broken = lambda weights: {}
        assert warm.run(words, env=ENVIRONMENT, timeout=240).returncode == 1
    found = json.loads((tmp_path / "sglang-here.json").read_text(encoding="utf-8"))
    assert "at the start" in found["wrong"]


@pytest.mark.slow
def test_the_script_for_sglang_starts_a_server_of_its_own(
    tmp_path: Path, model_folder: Path
) -> None:
    words = [str(SCRIPTS / "served_sglang.py"), "--smoke", "--model", str(model_folder)]
    words += ["--out", str(tmp_path), "--machine", "here"]
    paths = os.pathsep.join([str(ROOT / "tests" / "sglang_package"), str(ROOT)])
    done = warm.run(words, env={**ENVIRONMENT, "PYTHONPATH": paths}, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "sglang-here.json").read_text(encoding="utf-8"))
    assert found["weights by"] == "memory of cpu" and found["wrong"] == {}
    assert "log-prob difference after an update in sleep 2" in found


def test_a_script_that_fails_is_told_with_its_last_words_and_one_without_its_package_is_not_run(
    common: ModuleType, tmp_path: Path
) -> None:
    import run_all

    (tmp_path / "log").write_text("", encoding="utf-8")
    results = run_all.Results(tmp_path / "out", "here")
    results.add("layouts", "FAILED with status 1 after 3 s", "the last words", tmp_path)
    results.add("vs_trl", "not run: needs trl (pip install trl)", "", tmp_path)
    text = (tmp_path / "out" / "gpu-here.md").read_text(encoding="utf-8")
    assert results.failed == ["layouts"]
    assert "the last words" in text
    assert "* vs_trl: not run: needs trl" in text


def test_weights_are_counted_as_the_models_have_them(common: ModuleType) -> None:
    from transformers import AutoModelForCausalLM

    for size, fields in common.SIZES.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config("qwen2", **fields))
        assert common.parameters(size) == sum(p.numel() for p in model.parameters()), size
    billions = {size: round(common.parameters(size) / 1e9, 2) for size in ("0.5b", "1.5b", "7b")}
    assert billions == {"0.5b": 0.49, "1.5b": 1.54, "7b": 7.62}


def test_the_work_of_a_step_is_what_a_counter_of_operations_finds(common: ModuleType) -> None:
    """Of matrix products: attention here goes through a kernel that the counter does not know, and is held by hand below."""
    prompts, answers = [5, 9], [4, 7, 3]
    batch = Batch(
        Segments.of([[5] * n for n in prompts]),
        Segments.of([[6] * n for n in answers]),
        torch.tensor([0, 0, 1]),
        sampled=torch.ones(sum(answers), dtype=torch.bool),
    )
    actor = Actor(tiny_model("qwen2", **common.SIZES["smoke"]))
    with FlopCounterMode(display=False) as counter:
        logprobs = actor.score(batch).logprobs
    ahead = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        logprobs.sum().backward()
    model, head = common.dense("smoke")
    work = common.work_of(model, head, prompts, answers, [0, 0, 1], frozen=False)
    pairs = 15 + 45 + (3 * 5 + 6) + (6 * 5 + 21) + (2 * 9 + 3)
    attention = 4 * model.layers * model.queries * pairs
    # Norms and biases are weights without products.
    assert ahead == pytest.approx(work.forward - attention, rel=0.01)
    in_place = 2 * head * sum(answers)  # the gradient of the head, which the counter does not see
    assert counter.get_total_flops() + in_place == pytest.approx(
        2 * (work.forward - attention), rel=0.01
    )
    assert work.update == 3 * work.forward
    assert (
        common.work_of(model, head, prompts, answers, [0, 0, 1], frozen=True).update
        == 2 * work.forward
    )


def test_a_layout_that_is_off_is_seen(layouts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = layouts.ragged(99, 3, 24)
    model = tiny_model("qwen2")
    assert all(row.good for row in layouts.exact("qwen2", Actor(model), batch))
    scored = layouts.scored

    def wrong(actor: Actor, batch: Batch, layout: str) -> tuple[torch.Tensor, torch.Tensor, int]:
        logprobs, gradient, calls = scored(actor, batch, layout)
        return logprobs * (1 + 1e-4 * (layout == "packed")), gradient, calls

    monkeypatch.setattr(layouts, "scored", wrong)
    bad = [
        (row.layout, row.quantity)
        for row in layouts.exact("qwen2", Actor(model), batch)
        if not row.good
    ]
    assert bad == [("packed", "log-probs")]
