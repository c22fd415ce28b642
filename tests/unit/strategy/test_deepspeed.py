"""ZeRO by DeepSpeed: what is refused, what is sharded, and steps that are skipped on all ranks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from lightrft.strategy.deepspeed import DeepSpeedStrategy
from lightrft.strategy.settings import StrategyConfig
from lightrft.utils.errors import ConfigError

TWO = SimpleNamespace(rank=0, size=2)

STEPS = """
import json, sys
import torch
from torch import nn
from lightrft.strategy.deepspeed import DeepSpeedStrategy
from lightrft.strategy.settings import OptimizerConfig, StrategyConfig
from lightrft.utils.errors import ConfigError
from lightrft.utils.ranks import joined

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

with joined(1.0) as ranks:
    strategy = DeepSpeedStrategy(StrategyConfig(kind="deepspeed", stage=int(sys.argv[1]), device="cpu"), ranks)
    state = strategy.prepare(model(), OptimizerConfig(lr=0.1, warmup=1.0), 10)
    found = {"held": sum(p.numel() for p in state.model.parameters()), "skipped": [], "lr": [], "norms": []}
    for poison in (1.0, float("nan"), 1.0):
        loss = state.model(torch.ones(1, 5)).sum()
        strategy.backward(state, loss, last=False)
        loss = state.model(torch.ones(1, 5)).sum()
        strategy.backward(state, loss * (poison if ranks.rank == 1 else 1.0), last=True)
        info = strategy.step(state)
        found["skipped"].append(info.skipped), found["lr"].append(info.lr), found["norms"].append(info.grad_norm)
    found["weights"] = [w.flatten().tolist() for _, w in strategy.full_parameters(state)]
    half = model().to(torch.bfloat16)
    try:
        strategy.prepare(half, OptimizerConfig(), 1)
    except ConfigError as error:
        found["half"] = str(error)
    wrong = StrategyConfig(kind="deepspeed", device="cpu", deepspeed={"zero_optimization": {"no_such": 1}})
    try:
        DeepSpeedStrategy(wrong, ranks).prepare(model(), OptimizerConfig(), 1)
    except ConfigError as error:
        found["wrong"] = str(error)
    everyone = ranks.gather(found)
    if ranks.rank == 0:
        print("FOUND" + json.dumps(everyone), flush=True)
"""


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(tmp_path: Path, stage: int) -> None:
    import torch

    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, str(script), str(stage)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.partition("FOUND")[2].splitlines()[0])
    assert first["skipped"] == second["skipped"] == ["", "gradient not finite", ""]
    assert first["lr"] == second["lr"] == pytest.approx([0.05, 0.1, 0.1])
    assert first["weights"] == second["weights"]
    assert "model.dtype=float32" in first["half"]
    assert "strategy.deepspeed = " in first["wrong"] and "no_such" in first["wrong"]
    assert first["held"] == (0 if stage == 3 else 50)

    torch.manual_seed(0)
    own = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    adamw = torch.optim.AdamW(own.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    norms = []
    for rate in (0.05, 0.1):
        (4 * own(torch.ones(1, 5)).sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)))
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
        adamw.zero_grad()
    assert [first["norms"][0], first["norms"][2]] == pytest.approx(norms, rel=1e-6)
    for found, parameter in zip(first["weights"], own.parameters(), strict=True):
        assert found == pytest.approx(parameter.flatten().tolist(), rel=1e-5, abs=1e-7)


def test_without_the_package_the_way_to_get_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"strategy.kind = 'deepspeed' needs .*pip install 'lightrft\[deepspeed\]'"):
        DeepSpeedStrategy(StrategyConfig(kind="deepspeed", device="cpu"), TWO)


@pytest.mark.parametrize("tree", [{"bf16": {"enabled": True}}, {"gradient_clipping": 1.0}, {"zero_optimization": {"stage": 1}}])
def test_what_has_a_setting_here_is_refused_in_that_of_deepspeed(tree: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"strategy.deepspeed.{next(iter(tree))}"):
        DeepSpeedStrategy(StrategyConfig(kind="deepspeed", device="cpu", deepspeed=tree), TWO)


@pytest.mark.parametrize("tree", [{"stage": 3}, {"deepspeed": {"steps_per_print": 1}}, {"kind": "fsdp2", "stage": 1}])
def test_settings_of_deepspeed_are_refused_with_another_strategy(tree: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"changes nothing with kind (auto|fsdp2); set strategy.kind=deepspeed"):
        StrategyConfig(**tree)  # type: ignore[arg-type]
