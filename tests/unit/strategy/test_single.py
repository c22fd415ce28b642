"""One process: master weights, clipping, skipped steps, and a checkpoint that is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.distributed.process_group import SINGLE_PROCESS
from lightrft.strategy import single
from lightrft.strategy.base import TrainState
from lightrft.strategy.single import STATE_FILE, SingleStrategy
from lightrft.utils.errors import CheckpointError, ConfigError
from lightrft.workers.local import strategy_of
from tests.model_helpers import rounding


def make(
    dtype: torch.dtype = torch.float32, width: int = 8, **config: object
) -> tuple[SingleStrategy, TrainState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 1)).to(
        dtype
    )
    strategy = SingleStrategy(StrategyConfig(device="cpu"))
    return strategy, strategy.prepare(model, OptimizerConfig(**config), 100)  # type: ignore[arg-type]


def loss_of(state: TrainState, seed: int) -> torch.Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)).to(
        next(state.model.parameters()).dtype
    )
    return state.model(x).square().mean()


def take(strategy: SingleStrategy, state: TrainState, seed: int) -> None:
    strategy.backward(state, loss_of(state, seed), last=True)
    strategy.step(state)


def test_a_learning_rate_of_one_millionth_moves_bfloat16_weights() -> None:
    strategy, state = make(torch.bfloat16, lr=1e-6)
    before = [p.detach().clone() for p in state.model.parameters()]
    for seed in range(1000):
        take(strategy, state, seed)
    assert all(p.dtype == torch.bfloat16 for p in state.model.parameters())
    moved = sum(int((p != b).sum()) for p, b in zip(state.model.parameters(), before, strict=True))
    assert moved > 0.1 * sum(b.numel() for b in before)


def test_without_master_weights_such_steps_are_lost() -> None:
    _, state = make(torch.bfloat16)
    before = [p.detach().clone() for p in state.model.parameters()]
    plain = torch.optim.AdamW(state.model.parameters(), lr=1e-6, weight_decay=0.0)
    for seed in range(200):
        loss_of(state, seed).backward()
        plain.step()
        plain.zero_grad()
    weights = [
        (p, b) for p, b in zip(state.model.parameters(), before, strict=True) if p.dim() == 2
    ]
    assert all(torch.equal(p, b) for p, b in weights)


@pytest.mark.parametrize("piece", [1, single.PIECE_BYTES])
def test_bfloat16_gradients_of_micro_batches_add_up_in_float32(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single, "PIECE_BYTES", piece)
    strategy, state = make(torch.bfloat16)
    for seed in range(64):
        strategy.backward(state, loss_of(state, seed) / 64, last=seed == 63)
    found = {n: m.grad for n, m in state.inner.masters.items()}
    assert all(g is not None and g.dtype == torch.float32 for g in found.values())
    singles = []
    for seed in range(64):
        _, fresh = make(torch.bfloat16)
        (loss_of(fresh, seed) / 64).backward()
        singles.append(
            {n: p.grad.double() for n, p in fresh.model.named_parameters() if p.grad is not None}
        )
    for name, grad in found.items():
        assert grad is not None
        torch.testing.assert_close(
            grad.double(), sum(s[name] for s in singles), rtol=rounding(64), atol=1e-9
        )


def test_the_gradient_norm_is_global_and_reported_before_clipping() -> None:
    strategy, state = make(max_grad_norm=1e-3)
    strategy.backward(state, loss_of(state, 0) * 100, last=True)
    expected = torch.cat(
        [p.grad.flatten() for p in state.model.parameters() if p.grad is not None]
    ).norm()
    clipped: list[float] = []
    step = state.optimizer.step
    state.optimizer.step = lambda *a: (  # type: ignore[method-assign, assignment]
        clipped.append(
            float(
                torch.cat(
                    [p.grad.flatten() for p in state.model.parameters() if p.grad is not None]
                ).norm()
            )
        ),
        step(*a),
    )[1]
    info = strategy.step(state)
    assert info.grad_norm == pytest.approx(
        float(expected), rel=rounding(sum(p.numel() for p in state.model.parameters()))
    )
    assert clipped[0] == pytest.approx(1e-3, rel=1e-4)


def test_a_gradient_that_is_not_finite_skips_the_step_and_says_so() -> None:
    strategy, state = make()
    before = [p.detach().clone() for p in state.model.parameters()]
    strategy.backward(state, loss_of(state, 0) * float("nan"), last=True)
    info = strategy.step(state)
    assert info.skipped == "gradient not finite"
    assert all(torch.equal(p, b) for p, b in zip(state.model.parameters(), before, strict=True))
    assert all(p.grad is None for p in state.model.parameters())
    assert state.inner.step == 0


def test_weight_decay_leaves_vectors_alone() -> None:
    strategy, state = make(lr=0.1, weight_decay=0.5)
    vectors = [p.detach().clone() for p in state.model.parameters() if p.dim() == 1]
    for parameter in state.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    strategy.step(state)
    assert all(
        torch.equal(p, b)
        for p, b in zip([p for p in state.model.parameters() if p.dim() == 1], vectors, strict=True)
    )
    assert state.optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_loading_changes_no_later_step(tmp_path: Path, dtype: torch.dtype) -> None:
    options = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.1}
    strategy, whole = make(dtype, **options)
    for seed in range(8):
        take(strategy, whole, seed)
    strategy, first = make(dtype, **options)
    for seed in range(4):
        take(strategy, first, seed)
    strategy.save(first, tmp_path / "state")
    strategy, second = make(dtype, **options)
    for parameter in second.model.parameters():
        parameter.data.zero_()
    strategy.load(second, tmp_path / "state")
    for seed in range(4, 8):
        take(strategy, second, seed)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert whole.optimizer.param_groups[0]["lr"] == second.optimizer.param_groups[0]["lr"]


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    strategy, state = make()
    strategy.save(state, tmp_path / "state")
    other = nn.Sequential(nn.Linear(8, 4))
    there = strategy.prepare(other, OptimizerConfig(), 1)
    with pytest.raises(CheckpointError, match=r"another model.*model\.path"):
        strategy.load(there, tmp_path / "state")


def test_a_truncated_checkpoint_is_an_error_of_its_own(tmp_path: Path) -> None:
    strategy, state = make()
    strategy.save(state, tmp_path / "state")
    file = tmp_path / "state" / STATE_FILE
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="cannot be read"):
        strategy.load(state, tmp_path / "state")


def test_what_only_training_needs_sleeps_on_the_host_while_answers_are_drawn(monkeypatch) -> None:
    """The host is stood in for by the meta device, from which nothing comes back: that is tried, and fails."""
    _, state = make()
    strategy = SingleStrategy(StrategyConfig(device="cpu", offload_during_generation=True))
    take(strategy, state, 0)
    frozen = nn.Linear(2, 2)
    monkeypatch.setattr(single, "HOST", torch.device("meta"))
    with pytest.raises(NotImplementedError, match="meta"), strategy.offloaded([state], [frozen]):
        held = [
            moments[key]
            for moments in state.optimizer.state.values()
            for key in ("exp_avg", "exp_avg_sq")
        ]
        assert held and all(tensor.is_meta for tensor in (*held, *frozen.parameters()))
        # Answers are drawn with them.
        assert not any(parameter.is_meta for parameter in state.model.parameters())


def test_masters_of_half_precision_weights_sleep_too(monkeypatch) -> None:
    strategy, state = make(torch.bfloat16)
    take(strategy, state, 0)
    there: list[str] = []
    monkeypatch.setattr(
        single, "moved", lambda tensor, device: [there.append(device.type), tensor][1]
    )
    monkeypatch.setattr(single, "HOST", torch.device("meta"))
    asleep = SingleStrategy(StrategyConfig(device="cpu", offload_during_generation=True))
    with asleep.offloaded([state], []):
        assert there == ["meta"] * 3 * len(state.inner.masters)
    assert there == ["meta"] * 3 * len(state.inner.masters) + ["cpu"] * 3 * len(state.inner.masters)
    with strategy.offloaded([state], []):
        assert len(there) == 6 * len(state.inner.masters)  # without the setting nothing moves


def test_a_step_after_sleep_is_the_step_without_it() -> None:
    runs = []
    for sleep in (False, True):
        _, state = make(torch.bfloat16)
        strategy = SingleStrategy(StrategyConfig(device="cpu", offload_during_generation=sleep))
        for seed in range(3):
            with strategy.offloaded([state], []):
                pass
            take(strategy, state, seed)
        runs.append([p.detach().clone() for p in state.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("recomputed", [False, True])
def test_activations_on_the_host_give_the_same_gradients(recomputed: bool) -> None:
    found = []
    for offload in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        strategy = SingleStrategy(StrategyConfig(device="cpu", offload_activations=offload))
        strategy.place(model)
        x = torch.randn(32, 64)
        whole = (lambda v, m=model: checkpoint(m, v, use_reentrant=False)) if recomputed else model
        whole(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("setting", "value", "kind", "needed"),
    [
        ("hsdp_shard_size", 2, "single", "auto or fsdp2"),
        ("reshard_after_forward", False, "deepspeed", "auto or fsdp2"),
        ("offload_during_generation", True, "deepspeed", "auto, single or fsdp2"),
        ("zero_stage", 3, "fsdp2", "deepspeed"),
    ],
)
def test_a_setting_of_another_strategy_is_refused(
    setting: str, value: bool | int, kind: str, needed: str
) -> None:
    said = (
        rf"strategy\.{setting} = {value} needs strategy\.kind {needed}, which is {kind}; "
        rf'set strategy=\{{"kind": "{needed.split()[-1]}"\}}, or leave it out'
    )
    with pytest.raises(ConfigError, match=said):
        StrategyConfig(kind=kind, **{setting: value})


def offloading(
    dtype: torch.dtype, **config: object
) -> tuple[SingleStrategy, TrainState, SingleStrategy, TrainState]:
    """A strategy that keeps its state beside the weights, and one that keeps it on the host."""
    plain, state = make(dtype, **config)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)).to(dtype)
    host = SingleStrategy(StrategyConfig(device="cpu", cpu_offload=True))
    return plain, state, host, host.prepare(model, OptimizerConfig(**config), 100)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_optimizer_state_on_the_host_gives_the_same_numbers_bit_for_bit(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    plain, one, host, other = offloading(dtype, lr=1e-2, max_grad_norm=0.1, weight_decay=0.1)
    for seed in range(6):
        infos = []
        for strategy, state in ((plain, one), (host, other)):
            for part in range(2):  # micro-batches
                strategy.backward(state, loss_of(state, 2 * seed + part), last=part == 1)
            infos.append(strategy.step(state))
        assert infos[0] == infos[1]
        pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        if seed == 3:  # checkpoints of one are read by the other
            plain.save(one, tmp_path / "plain")
            host.load(other, tmp_path / "plain")
    masters = other.inner.masters
    assert all(masters[n] is not p for n, p in other.inner.parameters.items())


def test_a_skipped_step_leaves_weights_and_masters_on_the_host_alone() -> None:
    _, _, host, state = offloading(torch.float32, lr=1e-2)
    before = [p.detach().clone() for p in state.model.parameters()]
    host.backward(state, loss_of(state, 1) * float("inf"), last=True)
    assert host.step(state).skipped
    assert all(torch.equal(p, b) for p, b in zip(state.model.parameters(), before, strict=True))


def test_state_on_the_host_is_refused_where_the_device_is_the_host() -> None:
    config = StrategyConfig(device="cpu", cpu_offload=True)
    with pytest.raises(ConfigError, match=r"cpu_offload = True changes nothing.*on the CPU"):
        strategy_of(config, SINGLE_PROCESS)
