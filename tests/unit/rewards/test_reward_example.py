"""The documented example of a custom reward does what its text says, from the YAML that its text shows."""

import ast
import textwrap
from pathlib import Path

import pytest
import yaml

from lightrft.config.reward import RewardConfig
from lightrft.rewards.scorer import Scorer
from lightrft.types import Prompt, Rollout

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "custom_reward.py"
ANSWERS = {
    "<answer>8 * (4 - 2) + 3</answer>": (0.1, 1, 0),
    "Let me see... <answer> 8 * 3 * (4 - 2) / 2 </answer>": (0.0, 0, 0),  # 2 is used twice
    "<answer>8 * 3</answer>": (1.0, 1, 1),
    "<answer>1</answer> or rather <answer>(8 + 4) * 2</answer>": (1.0, 1, 1),
    "<answer>24</answer>": (0.0, 0, 0),
    "<answer>8 / (4 - 4)</answer>": (0.0, 0, 0),
    "<answer>__import__('os').getpid()</answer>": (0.0, 0, 0),
    "<answer>8 *</answer>": (0.0, 0, 0),
    "<answer>True * 8 * 3</answer>": (0.0, 0, 0),
    "8 * 3": (0.0, 0, 0),
    "": (0.0, 0, 0),
}


def test_the_example_grades_as_its_yaml_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = ast.get_docstring(ast.parse(EXAMPLE.read_text()), clean=False)
    assert text is not None
    block = text[text.index("    reward:") : text.index("Rules for a reward function")]
    config = RewardConfig.model_validate(yaml.safe_load(textwrap.dedent(block))["reward"])
    prompt = Prompt(
        "c", [1], r"Reach 24. <answer>8 * 3</answer>", label=24, columns={"numbers": [3, 8, 4, 2]}
    )
    rollouts = [
        Rollout(prompt, [1], [True], [0.0], [0], "stop", i, i, text)
        for i, text in enumerate(ANSWERS)
    ]
    with Scorer(config) as scorer:
        for rollout in rollouts:
            scorer.submit(rollout)
        assert len(list(scorer.results(wait=True))) == len(ANSWERS)
    for rollout in rollouts:
        reward, legal, solved = ANSWERS[rollout.text]
        assert (rollout.failed, rollout.reward) == ("", pytest.approx(reward)), rollout.text
        assert rollout.terms == {
            "reward": reward,
            "reward/legal": legal,
            "reward/solved": solved,
            "length": 0.0,
        }
