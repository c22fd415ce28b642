"""Bytes on the device, phase by phase: what sleeping and offloading free, and what ``doctor`` computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.diagnostics.memory.estimate import estimate_memory
from lightrft.diagnostics.memory.phases import Device, Lengths
from lightrft.engines.native import NativeEngine
from lightrft.learner import policy_update
from lightrft.models.actor import Actor
from lightrft.models.critic import Critic
from lightrft.trainer.rl import run_rl
from tests.device.counting_device import NAME, Counts, allocated, counted
from tests.device.inside.test_equality import varied
from tests.e2e.conftest import data_folder, model_folder, rl_tree  # noqa: F401

LENGTHS = Lengths(4, 40, 3, 4)
BUFFERS = 64
"""Bytes of a model's rotary frequencies."""
ROLES = {"algorithm": {"preset": "ppo", "kl": {"where": "reward", "coef": 0.1}}}
"""A policy, a critic and a reference."""


@dataclass
class Measured:
    """Bytes at the start of each call of the engine, and counts of each optimizer step."""

    generating: list[int] = field(default_factory=list)
    updates: list[Counts] = field(default_factory=list)
    peak: int = 0


def measure(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **more: Any) -> Measured:
    """Two steps of a run; those of the second are what a run repeats."""
    measured = Measured()
    generate, step = NativeEngine.generate, policy_update.optimizer_step

    def generating(*arguments: Any) -> Any:
        measured.generating.append(allocated())
        return generate(*arguments)

    def stepping(*arguments: Any) -> Any:
        with counted(where=False) as counts:
            result = step(*arguments)
        measured.updates.append(counts)
        return result

    before = allocated()
    tree = varied(tree)
    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "generate", generating)
        patch.setattr(policy_update, "optimizer_step", stepping)
        run_rl(build(RLConfig, deep_merge(deep_merge(tree, {"train": {"steps": 2}}), more)))
    for count in measured.updates:
        count.before, count.peak_bytes, count.after = (
            n - before for n in (count.before, count.peak_bytes, count.after)
        )
    measured.generating = [size - before for size in measured.generating]
    return measured


def sizes(tree: dict[str, Any]) -> tuple[int, int]:
    """Bytes of the policy's and of the critic's float32 weights that are trained."""
    config = build(RLConfig, tree).model
    models = Actor.load(config), Critic.load(config)
    trained = (sum(p.numel() * 4 for p in m.parameters() if p.requires_grad) for m in models)
    return tuple(trained)


def test_sleeping_frees_optimizer_states_and_frozen_models_while_responses_are_generated(
    rl_tree: dict[str, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = deep_merge(rl_tree, ROLES)
    policy, critic = sizes(tree)
    awake = measure(tree, monkeypatch, run={"name": "awake"})
    asleep = measure(
        tree, monkeypatch, run={"name": "asleep"}, strategy={"offload_during_generation": True}
    )
    # The reference is as large as the policy.
    moments, frozen = (
        2 * (policy + critic),
        policy + BUFFERS,
    )
    assert awake.generating[1] - asleep.generating[1] == moments + frozen
    assert awake.generating[0] - asleep.generating[0] == frozen  # no optimizer has a state yet
    computed = estimate_memory(
        build(RLConfig, deep_merge(tree, {"strategy": {"offload_during_generation": True}})),
        LENGTHS,
        Device(NAME, 0),
    )
    assert abs(computed.host["offloaded during generation"] - moments - frozen) <= BUFFERS
    assert [u.after - u.before for u in asleep.updates[:2]] == [
        u.after - u.before for u in awake.updates[:2]
    ]


def test_optimizer_state_in_the_hosts_memory_is_never_on_the_device(
    rl_tree: dict[str, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offload = {"strategy": {"cpu_offload": True}}
    kept = measure(rl_tree, monkeypatch, run={"name": "kept"})
    away = measure(rl_tree, monkeypatch, run={"name": "away"}, **offload)
    policy, _ = sizes(rl_tree)
    assert kept.generating[0] == away.generating[0]  # the weights stay
    weights = len(list(Actor.load(build(RLConfig, rl_tree).model).parameters()))
    # The moments of AdamW, and its step count of four bytes for each weight.
    assert kept.generating[1] - away.generating[1] == 2 * policy + 4 * weights
    # Neither moments nor the gradients of all weights.
    assert kept.updates[1].peak_bytes - away.updates[1].peak_bytes > 2 * policy
    config = build(RLConfig, deep_merge(rl_tree, offload))
    computed = estimate_memory(config, LENGTHS, Device(NAME, 0))
    assert computed.models["policy"].moments == computed.models["policy"].masters == 0
    # Masters, moments and gradients, of four bytes each.
    assert computed.host["policy"] == 4 * policy


def test_offloaded_activations_leave_the_device_until_the_backward_pass(
    rl_tree: dict[str, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = deep_merge(rl_tree, {"sampling": {"max_new_tokens": 40, "min_new_tokens": 40}})
    kept = measure(tree, monkeypatch, run={"name": "kept"})
    offloaded = measure(
        tree, monkeypatch, run={"name": "offloaded"}, strategy={"offload_activations": True}
    )
    policy, _ = sizes(tree)
    # Beside weights, moments and gradients.
    used = [m.updates[1].peak_bytes - 4 * policy for m in (kept, offloaded)]
    assert used[1] < 0.5 * used[0]


@pytest.mark.parametrize("sleep", [False, True])
def test_the_peak_that_doctor_computes_bounds_what_is_allocated(
    rl_tree: dict[str, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    sleep: bool,
) -> None:
    long = {
        "sampling": {"max_new_tokens": 40, "min_new_tokens": 40},
        "strategy": {"offload_during_generation": sleep},
    }
    tree = deep_merge(deep_merge(rl_tree, ROLES), long)
    computed = estimate_memory(build(RLConfig, tree), LENGTHS, Device(NAME, 0))
    measured = measure(tree, monkeypatch)
    highest = max(count.peak_bytes for count in measured.updates)
    # Indices of tokens are left out of what is computed.
    assert abs(computed.peak - highest) <= 0.05 * highest
    holds = sum(model.total for model in computed.models.values())
    assert abs(measured.updates[-1].after - holds) < 0.05 * holds
