"""The passes over a batch that ``lightrft explain`` shows are those that a step makes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from lightrft.config.base import deep_merge
from lightrft.config.presets import PRESETS
from lightrft.models.actor import Actor
from lightrft.models.critic import Critic
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.trainer.explanation.explain import explain
from lightrft.trainer.rl import run_rl


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[bool, bool]]:
    """(whether of the critic, whether with gradient) to how often, beside what is really done."""
    seen: Counter[tuple[bool, bool]] = Counter()
    forward, values = Actor.forward, Critic.values

    def counted_forward(self: Actor, *inputs: object, **options: object) -> object:
        seen[False, torch.is_grad_enabled()] += 1
        return forward(self, *inputs, **options)  # type: ignore[arg-type]

    def counted_values(self: Critic, *inputs: object, **options: object) -> object:
        seen[True, torch.is_grad_enabled()] += 1
        return values(self, *inputs, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Actor, "forward", counted_forward)
    monkeypatch.setattr(Critic, "values", counted_values)
    return seen


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("teacher"), tiny_tokenizer()
    tiny_model(
        "qwen2", seed=7, hidden_size=32, intermediate_size=64, vocab_size=len(tokenizer)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_step_makes_the_passes_that_are_shown(
    rl_config, teacher: Path, tmp_path: Path, passes, preset, updates
) -> None:
    (tmp_path / "reward.py").write_text(
        "def reward(rollout):\n    return sum(rollout.token_ids) % 7 / 6\n"
    )
    tree = {
        "model": {"check_layout": False},
        "engine": {"check_logprobs": False},
        "algorithm": {"preset": preset},
        "reward": {"terms": [f"{tmp_path}/reward.py:reward"]},
        "train": {"steps": 1, "ppo_epochs": updates},
    }
    if preset.endswith("_lag"):
        cost = {"function": tree["reward"]["terms"][0], "name": "cost", "weight": 0}
        tree["reward"]["terms"].append(cost)
    taught = {"teacher": {"path": str(teacher)}} if preset == "opd" else {}
    config = rl_config(**deep_merge(tree, taught))
    run_rl(config)
    shown: Counter[tuple[bool, bool]] = Counter()
    for forward in explain(config, {}).forwards:
        shown[forward.model.endswith("critic"), forward.gradient] += forward.passes
    assert passes == shown
