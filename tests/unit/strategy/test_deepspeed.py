"""ZeRO by DeepSpeed: what is refused, what is sharded, half precision, and steps that are skipped on all ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightrft.config.strategy import StrategyConfig
from lightrft.models.tiny.text import tiny_model
from lightrft.strategy.deepspeed import DeepSpeedStrategy
from lightrft.strategy.single import STATE_FILE
from lightrft.utils.errors import ConfigError
from tests import warm
from tests.model_helpers import rounding

TWO = SimpleNamespace(rank=0, size=2)
STAGES = (1, 2, 3)


def needs_deepspeed(test: Any) -> Any:
    """Mark ``test`` as one that starts processes with the package."""
    absent = pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="the package deepspeed is not installed",
    )
    return pytest.mark.slow(pytest.mark.deepspeed(absent(test)))


START = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from lightrft.strategy.deepspeed import DeepSpeedStrategy
from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.strategy.single import SingleStrategy
from lightrft.utils.errors import ConfigError
from lightrft.distributed.process_group import init_process_group

def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)

def zero(stage, **deepspeed):
    return DeepSpeedStrategy(StrategyConfig(kind="deepspeed", zero_stage=stage, device="cpu", deepspeed=deepspeed), ranks)

def refused(work):
    try:
        work()
    except ConfigError as error:
        return str(error)

folder = Path(sys.argv[1])
with init_process_group(10.0) as ranks:
    found = {stage: cell(stage) for stage in (1, 2, 3)}
    everyone = ranks.gather(found)
    if ranks.rank == 0:
        print("FOUND" + json.dumps(everyone), flush=True)
"""


def on_two_ranks(cell: str, folder: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What the function ``cell`` of a stage gives on each of two ranks, for every stage."""
    head, tail = START.split("folder = ", 1)
    script = folder / "cells.py"
    script.write_text(f"{head}{cell}\nfolder = {tail}")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = warm.run([*torchrun, script, folder], env=os.environ, seats=2, timeout=600)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.partition("FOUND")[2].splitlines()[0])
    return [(first[str(stage)], second[str(stage)]) for stage in STAGES]


@needs_deepspeed
def test_the_compiler_of_torch_is_not_loaded_for_an_optimizer_that_is_not_used() -> None:
    code = (
        "import sys; from lightrft.strategy.deepspeed import _deepspeed; _deepspeed(); "
        "from deepspeed.runtime import compiler; from deepspeed.runtime.zero.muon import "
        "muon_optimizer; print('torch._inductor.compile_fx' in sys.modules, "
        "muon_optimizer.MuonWithAuxAdam.__name__, compiler.compile.__name__)"
    )
    done = warm.run(["-c", code], env=os.environ)
    assert done.stdout.splitlines()[-1:] == ["False MuonWithAuxAdam compile"], done.stderr


STEPS = """
def cell(stage):
    strategy = zero(stage)
    state = strategy.prepare(net(), OptimizerConfig(lr=0.1, warmup_steps=1), 10)
    found = {"held": sum(p.numel() for p in state.model.parameters()), "skipped": [], "lr": [], "norms": []}
    for poison in (1.0, float("nan"), 1.0):
        loss = state.model(torch.ones(1, 5)).sum()
        strategy.backward(state, loss, last=False)
        loss = state.model(torch.ones(1, 5)).sum()
        strategy.backward(state, loss * (poison if ranks.rank == 1 else 1.0), last=True)
        info = strategy.step(state)
        found["skipped"].append(info.skipped), found["lr"].append(info.lr), found["norms"].append(info.grad_norm)
    found["weights"] = [w.flatten().tolist() for _, w in strategy.full_parameters(state)]
    zero_of = state.inner.engine.optimizer
    weights = zero_of.fp16_partitioned_groups_flat if stage == 3 else []
    found["apart"] = sum(m.data_ptr() != w.data_ptr() for m, w in zip(state.inner.flat, weights))
    asked = zero(stage, zero_optimization={"reduce_bucket_size": 9}).prepare(net(), OptimizerConfig(), 1)
    found["collected"] = [s.inner.engine.zero_reduce_bucket_size() for s in (state, asked)]
    within = zero_of.dp_process_group, state.inner.engine.data_parallel_group
    found["limits"] = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in within]
    found["half"] = refused(lambda: strategy.prepare(net(torch.float16), OptimizerConfig(), 1))
    wrong = zero(stage, zero_optimization={"no_such": 1})
    found["wrong"] = refused(lambda: wrong.prepare(net(), OptimizerConfig(), 1))
    return found
"""


@needs_deepspeed
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
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
    for stage, (first, second) in zip(STAGES, on_two_ranks(STEPS, tmp_path), strict=True):
        assert first["skipped"] == second["skipped"] == ["", "gradient not finite", ""]
        assert first["lr"] == second["lr"] == pytest.approx([0.05, 0.1, 0.1])
        assert first["weights"] == second["weights"]
        assert "torch.float16; set model.dtype=bfloat16" in first["half"]
        assert "strategy.deepspeed = " in first["wrong"] and "no_such" in first["wrong"]
        assert first["held"] == (0 if stage == 3 else 50)
        assert first["apart"] == 0, "float32 shards of stage 3 are their own masters"
        assert set(first["limits"]) == {600.0}, (
            "ranks wait for one another in DeepSpeed's groups as long as anywhere"
        )
        assert first["collected"] == [50, 9], (
            "gradients are collected by as much as the model has, or as is asked for"
        )
        assert [first["norms"][0], first["norms"][2]] == pytest.approx(norms, rel=rounding(50))
        for found, parameter in zip(first["weights"], own.parameters(), strict=True):
            assert found == pytest.approx(
                parameter.flatten().tolist(), rel=rounding(50), abs=rounding(50)
            )


HALF = """
def inputs(step, rank):
    # Large ones first: what is added to them later is lost in a sum of half precision.
    drawn = torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(10 * step + rank))
    return (drawn * torch.tensor([256.0] + 7 * [1.0])[:, None, None]).to(torch.bfloat16)

def run(strategy, ranks_here, path, kind=torch.bfloat16):
    state = strategy.prepare(net(kind), OptimizerConfig(lr=1e-3, weight_decay=0.1), 10)
    norms = []
    for step in range(4):
        if step == 2:  # masters and moments survive
            strategy.save(state, path)
            state = strategy.prepare(net(kind), OptimizerConfig(lr=1e-3, weight_decay=0.1), 10)
            strategy.load(state, path)
        parts = [x for rank in ranks_here for x in inputs(step, rank)]
        for i, x in enumerate(parts):
            strategy.backward(state, state.model(x).float().sum(), last=i == len(parts) - 1)
        norms.append(strategy.step(state).grad_norm)
    strategy.save(state, path)
    return norms, sorted({str(w.dtype) for _, w in strategy.full_parameters(state)})

def cell(stage):
    norms, kinds = run(zero(stage), [ranks.rank], folder / f"zero{stage}")
    one, _ = run(SingleStrategy(StrategyConfig(device="cpu")), [0, 1], folder / f"one{ranks.rank}")
    return {"norms": norms, "one": one, "kinds": kinds}
"""


BOUND = rounding(4 * 48)
"""Of float32 sums in another order: four steps, each of which adds 48 rows."""


@needs_deepspeed
def test_bfloat16_weights_have_float32_masters_and_sums_of_gradients_as_on_one_process(
    tmp_path: Path,
) -> None:
    for stage, (first, second) in zip(STAGES, on_two_ranks(HALF, tmp_path), strict=True):
        assert first["kinds"] == ["torch.bfloat16"]
        assert first["norms"] == second["norms"] == pytest.approx(first["one"], rel=BOUND)
        states = [load_file(tmp_path / name / STATE_FILE) for name in (f"zero{stage}", "one0")]
        assert states[0].keys() == states[1].keys()
        for key, tensor in states[1].items():
            atol = BOUND * float(tensor.abs().max())
            torch.testing.assert_close(states[0][key], tensor, rtol=0, atol=atol)
            if key.startswith("weights/"):
                assert tensor.dtype == torch.float32 and not torch.equal(
                    tensor, tensor.bfloat16().float()
                )


LOADING = """
import gc
from deepspeed.runtime.zero import partition_parameters
from lightrft.models.actor import Actor
from lightrft.models.critic import Critic
from lightrft.config.model import LoRAConfig, ModelConfig

made, live = [], []

def watch(owner, name):
    inner = getattr(owner, name)
    def watched(self, *parameters):
        made.extend(parameters)
        live.append(sum(p.numel() for p in made))
        result = inner(self, *parameters)
        live.append(sum(p.numel() for p in made))
        return result
    setattr(owner, name, watched)

watch(partition_parameters.Init, "_convert_to_deepspeed_param")
watch(partition_parameters.GatheredParameters, "__enter__")

def resident(which):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(which))
    return int(line.split()[1]) * 1024

def growth(path):
    # The resident set has pages of mapped files too.
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before, strategy = resident("VmRSS"), zero(3)
    with strategy.loading() as device:
        model = Actor.load(ModelConfig(path=str(path)), device=device)
    strategy.place(model.requires_grad_(False))
    return resident("VmHWM") - before

def cell(stage):
    found = {}
    for name in ("reference", "policy", "adapters", "decomposed", "critic", "experts", "pickled"):
        strategy, dtype, kind = zero(stage), "bfloat16" if name == "policy" else "float32", Critic if name == "critic" else Actor
        lora = LoRAConfig(rank=2, dora=name == "decomposed") if name in ("adapters", "decomposed") else None
        path = folder / (name if name in ("experts", "pickled") else "model")
        config = ModelConfig(path=str(path), dtype=dtype, lora=lora)
        torch.manual_seed(ranks.rank)  # what is drawn, the first rank tells
        with strategy.loading() as device:
            model = kind.load(config, device=device)
        made.clear(), live.clear()
        if name in ("policy", "adapters", "decomposed", "critic"):
            strategy.prepare(model, OptimizerConfig(), 1)
        else:
            strategy.place(model.requires_grad_(False))
        kinds = sorted({str(p.dtype) for p in model.parameters()})
        buffers = sorted({str(b.dtype) for b in model.buffers()})
        found[name] = {"largest": max(live, default=0), "kinds": kinds, "buffers": buffers}
        found[name]["whole"] = sum(p.numel() for p in model.parameters())
        found[name]["held"] = sum(t.numel() for _, t in strategy.shards(model))
        torch.manual_seed(0)
        expected = dict(kind.load(config).named_parameters())
        with strategy.local_parameters(model) as own:
            assert list(own) == list(expected)
            found[name]["odd"] = [n for n, t in own.items() if not torch.equal(t, expected[n])]
            found[name]["size"] = sum(t.numel() for t in expected.values())
    if stage < 3:
        return {"models": found, "growth": 0}
    wrong = refused(lambda: zero(3, zero_optimization={"no_such": 1}).place(Actor.load(config, device="meta")))
    return {"models": found, "growth": growth(folder / "large"), "wrong": wrong}
"""


@needs_deepspeed
def test_in_stage_3_no_rank_holds_more_of_a_model_than_its_shard_also_while_it_is_read(
    tmp_path: Path,
) -> None:
    # Odd: shards end within rows.
    sizes = {
        "hidden_size": 36,
        "intermediate_size": 83,
        "num_hidden_layers": 3,
        "vocab_size": 61,
    }
    model = tiny_model("qwen2", num_attention_heads=2, **sizes)
    for name in ("model", "pickled"):
        model.save_pretrained(tmp_path / name)
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "experts")
    large = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 3,
        "vocab_size": 8000,
    }
    tiny_model("qwen2", num_attention_heads=8, **large).save_pretrained(
        tmp_path / "large", max_shard_size="80MB"
    )
    weights = sum(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    assert weights > 150e6
    largest = max(
        sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()
    )
    for stage, ranks in zip(STAGES, on_two_ranks(LOADING, tmp_path), strict=True):
        assert sum(found["growth"] for found in ranks) < 1.15 * weights + 50e6, (
            "one copy on all ranks together"
        )
        for found in ranks:
            assert stage < 3 or "no_such" in found["wrong"]
            for name, of in found["models"].items():
                kinds = ["torch.bfloat16"] if name == "policy" else ["torch.float32"]
                assert of["kinds"] == kinds and of["buffers"] == ["torch.float32"]
                assert stage < 3 or of["odd"] == [], name
                if stage == 3:
                    assert 0 < of["largest"] <= largest or name == "experts"
                    assert of["whole"] == 0
                    assert of["size"] / 2 <= of["held"] < 0.6 * of["size"]
                else:
                    assert of["held"] == of["whole"] == of["size"]


HIERARCHY = """
from lightrft.models.actor import Actor
from lightrft.config.model import ModelConfig

def run(strategy):
    state = strategy.prepare(net(), OptimizerConfig(lr=0.1), 10)
    for i in range(3):
        x = torch.full((1, 5), 1.0 + i + ranks.rank)
        strategy.backward(state, state.model(x).sum(), last=True)
        strategy.step(state)
    read = []
    for _ in range(2):
        with strategy.loading() as device:
            model = Actor.load(ModelConfig(path=str(folder / "model")), device=device).requires_grad_(False)
        strategy.place(model)
        with strategy.local_parameters(model) as own:
            read += [float(t.double().sum()) for t in own.values()]
    return state.inner.engine.zero_hpz_partition_size(), [w.flatten().tolist() for _, w in strategy.full_parameters(state)], read

def cell(stage):
    return {"plain": run(zero(3)), "near": run(zero(3, zero_optimization={"zero_hpz_partition_size": 2}))} if stage == 3 else {}
"""


@needs_deepspeed
def test_a_second_copy_of_the_shards_near_by_is_passed_on_and_changes_no_number(
    tmp_path: Path,
) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path / "model")
    *_, ranks = on_two_ranks(HIERARCHY, tmp_path)
    for found in ranks:
        assert [found["plain"][0], found["near"][0]] == [1, 2]
        assert found["plain"][1:] == found["near"][1:]


def test_quantised_messages_are_refused_on_a_cpu() -> None:
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        tree = {"zero_optimization": {name: True}}
        with pytest.raises(
            ConfigError, match=rf"zero_optimization.{name} = True: .* leave it out on a CPU"
        ):
            DeepSpeedStrategy(StrategyConfig(kind="deepspeed", device="cpu", deepspeed=tree), TWO)


def test_without_the_package_the_way_to_get_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(
        ConfigError,
        match=r"strategy.kind = 'deepspeed' needs .*pip install -e '\.\[deepspeed\]'",
    ):
        DeepSpeedStrategy(StrategyConfig(kind="deepspeed", device="cpu"), TWO)


def test_shards_on_a_disk_are_refused() -> None:
    tree = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/tmp"}}}
    with pytest.raises(ConfigError, match=r"offload_param.device = 'nvme': .* set cpu"):
        DeepSpeedStrategy(StrategyConfig(kind="deepspeed", device="cpu", deepspeed=tree), TWO)


@pytest.mark.parametrize(
    "tree",
    [{"bf16": {"enabled": True}}, {"gradient_clipping": 1.0}, {"zero_optimization": {"stage": 1}}],
)
def test_what_has_a_setting_here_is_refused_in_that_of_deepspeed(tree: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"strategy.deepspeed.{next(iter(tree))}"):
        DeepSpeedStrategy(StrategyConfig(kind="deepspeed", device="cpu", deepspeed=tree), TWO)


@pytest.mark.parametrize(
    "tree",
    [{"zero_stage": 3}, {"deepspeed": {"steps_per_print": 1}}, {"kind": "fsdp2", "zero_stage": 1}],
)
def test_settings_of_deepspeed_are_refused_with_another_strategy(tree: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError,
        match=r'deepspeed, which is (auto|fsdp2); set strategy=\{"kind": "deepspeed"\}',
    ):
        StrategyConfig(**tree)  # type: ignore[arg-type]
