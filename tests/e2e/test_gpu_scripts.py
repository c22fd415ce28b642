"""The scripts of ``benchmarks/gpu`` run on whatever is there, and what they count is right."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode

from lightrft.diagnostics.memory.phases import Device
from lightrft.models.actor import Actor
from lightrft.models.tiny.text import tiny_config, tiny_model
from lightrft.types import Batch, Segments
from tests import warm
from tests.e2e.command import ROOT
from tests.e2e.several import ENVIRONMENT
from tests.sglang_server import sglang_server

SCRIPTS = ROOT / "benchmarks" / "gpu"
ENGINES = ("vllm", "sglang")
"""Parts that need a package which CI does not have."""


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import common

    return common


@pytest.fixture
def layouts(common: ModuleType) -> Iterator[ModuleType]:
    import layouts

    yield layouts


@pytest.fixture
def run_all(common: ModuleType) -> ModuleType:
    import run_all

    return run_all


@pytest.mark.thorough
@pytest.mark.slow
def test_all_parts_run_with_tiny_models_and_leave_two_files_with_the_machine_in_their_names(
    run_all: ModuleType, tmp_path: Path
) -> None:
    words = [sys.executable, SCRIPTS / "run_all.py", "--smoke", "--machine=here", "--out", tmp_path]
    done = subprocess.run(
        words, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["smoke-here.json", "smoke-here.md"]
    parts = json.loads((tmp_path / "smoke-here.json").read_text(encoding="utf-8"))["parts"]
    assert list(parts) == list(run_all.PARTS)
    for name, part in parts.items():
        for side, found in part["sides"].items():
            missing = any(importlib.util.find_spec(m) is None for m in run_all.NEEDS.get(side, ()))
            wanted = ("left out", "not run") if missing or name in ENGINES else ("done",)
            assert found["ended"].startswith(wanted), (name, side, found)
    step = parts["step-0.5b-512"]["sides"]["lightrft"]
    numbers = step["numbers"]
    assert 0 < numbers["utilization of the update"] < 1
    assert 0 < numbers["optimizer, s"] < numbers["update, s"] < numbers["step, s"]
    assert 10 < len(step["profile"]["rows"]) <= 20
    assert parts["deterministic"]["ended"] == "done"
    gaps = parts["ranks"]["sides"]["lightrft"]["result"]["gaps"]
    assert gaps["grpo"]["weights"] < 1e-5
    assert "| operation | calls |" in (tmp_path / "smoke-here.md").read_text(encoding="utf-8")


@pytest.mark.thorough
@pytest.mark.slow
def test_the_steps_fit_into_80_gigabytes_by_the_estimate_of_doctor(
    run_all: ModuleType, common: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import measure

    monkeypatch.setattr(measure, "half", lambda: "bfloat16")
    # Offloading takes less than the same step without it.
    every = {words for part in run_all.PARTS.values() for words in part.sides.values()}
    known: dict[str, float] = {}
    for words in sorted(every):
        rest = words.split()[1:]
        if rest[:1] != ["grpo"] or "--set engine" in words or "--set strategy" in words:
            continue
        args = measure.parser().parse_args(rest)
        folder = tmp_path / args.size
        common.config_of(args.size).save_pretrained(folder)
        # The tower of Qwen2.5-VL-3B adds 0.7 billion weights, which take 18 bytes each.
        beside = 13 * measure.GIB if args.pictures else 0
        data = {"sources": [str(tmp_path / "prompts.jsonl")], "apply_chat_template": False}
        args.pictures, args.steps = 0, 1
        config = measure.grpo_config(args, folder, tmp_path, data)
        key = config.model_dump_json()
        if key not in known:
            known[key] = measure.estimate(args, config, Device("cuda", 80 * 10**9)).peak
        # The allocator and the context of CUDA take a part.
        assert known[key] + beside < 0.9 * 80 * 10**9, words
    assert len(known) == 6


FAKE = """
import sys
from pathlib import Path
words = sys.argv[1:]
micro, out = int(words[words.index("--micro") + 1]), Path(words[words.index("--out") + 1])
if micro > {fits}:
    raise SystemExit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
(out / "measured.json").write_text('{{"work": "w", "numbers": {{"step, s": 2.0}}}}')
"""


def runner_of(run_all: ModuleType, out: Path, fits: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a runner whose script runs only with micro-batches of ``fits`` tokens or fewer."""
    (out / "measure.py").write_text(FAKE.format(fits=fits), encoding="utf-8")
    monkeypatch.setattr(run_all, "HERE", out)
    results = run_all.Results(out / "gpu-here", {"device": "none"})
    end = time.monotonic() + 600
    return run_all.Runner(results, dict(os.environ), (), False, end)


def test_a_side_that_lacks_memory_is_tried_again_with_half_the_micro_batch(
    run_all: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(run_all, tmp_path, 5000, monkeypatch)
    sides = {"lightrft": "measure.py grpo --micro 16384", "trl": "measure.py trl-grpo --micro 1"}
    runner.part("step", run_all.Part("a step", 300, sides))
    found = json.loads((tmp_path / "gpu-here.json").read_text(encoding="utf-8"))["parts"]["step"]
    ended = found["sides"]["lightrft"]["ended"]
    assert ended.startswith("micro-batch 16384 lacks memory, so 8192; micro-batch 8192 lacks")
    assert "done in" in ended and found["sides"]["lightrft"]["numbers"] == {"step, s": 2.0}
    assert found["ended"] == "without trl"
    assert found["sides"]["trl"]["ended"] == "left out, since trl, datasets is missing"


def test_a_side_that_fails_is_reported_with_its_last_words_and_is_not_tried_for_ever(
    run_all: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(run_all, tmp_path, 0, monkeypatch)
    part = run_all.Part("a step", 300, {"lightrft": "measure.py grpo --micro 16384"})
    runner.part("step", part)
    text = (tmp_path / "gpu-here.md").read_text(encoding="utf-8")
    assert runner.results.failed == ["step"]
    assert "micro-batch 8192 lacks memory, so 4096; FAILED with status 1" in text
    assert "Tried to allocate" in text
    runner.end = time.monotonic() + 10
    runner.part("later", part)
    assert "not run, since" in runner.results.parts["later"]["ended"]


def test_a_part_is_skipped_where_a_committed_result_has_it_by_the_same_version(
    run_all: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"lightrft": "measure.py grpo", "trl": "measure.py trl-grpo"}
    sides = {"lightrft": {"ended": "done in 3 s"}, "trl": {"ended": "left out"}}
    found = {"step": {"version": 1, "words": both, "ended": "without trl", "sides": sides}}
    for part, modules, skipped in (
        (run_all.Part("a step", 9, both), (), True),
        (run_all.Part("a step", 9, both), ("trl", "datasets"), False),
        (run_all.Part("a step", 9, both, version=2), (), False),
        (run_all.Part("a step", 9, {**both, "lightrft": "measure.py sft"}), (), False),
    ):
        monkeypatch.setitem(run_all.PARTS, "step", part)
        assert run_all.is_measured("step", found, modules) == skipped
    found["step"]["ended"] = "FAILED: lightrft"
    assert not run_all.is_measured("step", found, ())


def test_wheels_of_packages_that_are_missing_or_older_are_installed_without_a_network(
    run_all: ModuleType, tmp_path: Path
) -> None:
    for name, number in (("gpu_only_package", "1.0"), ("torch", "0.1"), ("Pillow", "999.0")):
        with zipfile.ZipFile(tmp_path / f"{name}-{number}-py3-none-any.whl", "w") as wheel:
            about = f"{name}-{number}.dist-info"
            wheel.writestr(f"{name}/__init__.py", "")
            wheel.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
            )
            wheel.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{about}/RECORD", "")
    said = run_all.install(tmp_path, tmp_path / "site")
    assert said == "wheels: installed Pillow, gpu_only_package"
    assert (tmp_path / "site" / "gpu_only_package" / "__init__.py").is_file()
    (tmp_path / "broken_package-1.0-py3-none-any.whl").write_text("", encoding="utf-8")
    assert "cannot be installed" in run_all.install(tmp_path, tmp_path / "other")


def event(name: str, device: DeviceType, start: float, end: float, **more: Any) -> Any:
    """An event as ``torch.profiler`` gives it, with times in microseconds."""
    own = {"self_device_time_total": 0.0, "self_cpu_time_total": 0.0, "is_user_annotation": False}
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=device, time_range=span, **{**own, **more})


def test_the_profile_of_a_gpu_counts_gaps_waits_and_launches(common: ModuleType) -> None:
    import operations

    host, gpu = DeviceType.CPU, DeviceType.CUDA
    events = [
        event("aten::mm", host, 0, 10, self_device_time_total=300.0),
        event("aten::add", host, 10, 20, self_device_time_total=100.0),
        event("cudaLaunchKernel", host, 1, 2),
        event("cudaLaunchKernelExC", host, 11, 12),
        event("cudaStreamSynchronize", host, 20, 920),
        event("Optimizer.step", gpu, 0, 1000, is_user_annotation=True),
        event("kernel a", gpu, 100, 400),
        event("kernel b", gpu, 300, 500),
        event("kernel c", gpu, 900, 1000),
    ]
    found = operations.summary(events)
    assert found["numbers"] == {
        "update under the profiler, ms": 1.0,
        "not covered by kernels, ms": 0.5,
        "share not covered by kernels": 0.5,
        "waits of the host": 1,
        "waits of the host, ms": 0.9,
        "launches": 2,
    }
    assert found["heads"][2] == "CUDA ms"
    assert found["rows"] == [
        ["aten::mm", "1", "0.300", "75.0%"],
        ["aten::add", "1", "0.100", "25.0%"],
    ]


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


@pytest.mark.thorough
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


def test_weights_are_counted_as_the_models_have_them(common: ModuleType) -> None:
    from transformers import AutoModelForCausalLM

    for size, fields in common.SIZES.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config("qwen2", **fields))
        assert common.parameters(size) == sum(p.numel() for p in model.parameters()), size
    billions = {
        size: round(common.parameters(size) / 1e9, 2) for size in ("0.5b", "1.5b", "3b", "7b")
    }
    assert billions == {"0.5b": 0.49, "1.5b": 1.54, "3b": 3.09, "7b": 7.62}


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
