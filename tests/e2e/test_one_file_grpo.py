"""The method with no framework: it learns, and it is the reward that it learns from."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

FILE = Path(__file__).resolve().parents[2] / "examples" / "one_file_grpo.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file_grpo", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
@pytest.mark.slow
def test_held_out_answers_get_much_better(example: ModuleType) -> None:
    before, after = example.train()
    assert before < 0.6
    assert after > 0.85


@pytest.mark.slow
def test_with_advantages_of_the_wrong_sign_nothing_is_learned(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right_sign = example.group_advantages
    monkeypatch.setattr(example, "group_advantages", lambda *args: -right_sign(*args))
    before, after = example.train(rl_steps=25)
    assert after < before / 2


def test_the_loss_equals_the_formula_written_as_a_loop(example: ModuleType) -> None:
    torch.manual_seed(0)
    new, old = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    advantages, mask = torch.randn(6, dtype=torch.float64), torch.rand(6, 4) < 0.7
    total, tokens = 0.0, 0
    for i in range(6):
        for t in range(4):
            if mask[i, t]:
                ratio = torch.exp(new[i, t] - old[i, t]).item()
                clipped = min(max(ratio, 0.8), 1.2)
                total -= min(ratio * advantages[i].item(), clipped * advantages[i].item())
                tokens += 1
    assert example.grpo_loss(new, old, advantages, mask).item() == pytest.approx(
        total / tokens, abs=1e-12
    )


def test_advantages_compare_an_answer_with_its_own_group_only(example: ModuleType) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 5.0], dtype=torch.float64)
    a = (1 - 0.5) / (3**-0.5 + 1e-6)  # unbiased deviation of 1, 0, 0, 1
    assert example.group_advantages(rewards, 4).tolist() == pytest.approx(
        [a, -a, -a, a, 0, 0, 0, 0]
    )


def test_nothing_after_the_end_token_counts(example: ModuleType) -> None:
    torch.manual_seed(0)
    answers, mask = example.sample(
        example.make_policy(), example.make_prompts(64, example.random.Random(0))
    )
    for row, counts in zip(answers.tolist(), mask.tolist()):
        end = row.index(example.END) if example.END in row else len(row) - 1
        assert counts == [t <= end for t in range(len(row))]
