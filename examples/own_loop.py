"""GRPO as a loop of your own: the parts of a step are methods of ``lightrft.Policy``.

The loop trains a tiny model with random weights to answer with digits, in ten seconds on a CPU:

    python examples/own_loop.py

It gives the numbers of ``lightrft.rl`` with the same settings. The run folder, evaluations,
checkpoints and resume are the same too. Change any line: where responses come from, how they are
scored, the advantages or the loss. With torchrun, the same program trains on several processes.
"""

from __future__ import annotations

import torch

import lightrft
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer

GROUP = 8
rows = [{"prompt": f"What is {a} + {a}?", "label": str(2 * a)} for a in range(16)]


def digits(rollout):
    """Reward the share of digits in a response."""
    return sum(map(str.isdigit, rollout.text)) / max(1, len(rollout.text))


def clipped(logprobs, batch):
    """Return the loss of each token: PPO, arXiv 1707.06347, equation 7."""
    ratio = (logprobs - batch.old_logprobs).exp()
    bounded = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * batch.advantages, bounded * batch.advantages)


settings = {
    "model": (tiny_model("llama"), tiny_tokenizer()),
    "data": rows,
    "rewards": [digits],
    "steps": 20,
    "optimizer": {"lr": 1e-3},
    "rollout": {"prompts_per_step": 8, "group_size": GROUP},
    "sampling": {"max_new_tokens": 8},
    "run": {"name": "own_loop", "overwrite": True},
}
with lightrft.Policy(**settings) as policy:
    for _ in policy:
        groups = policy.score(policy.sample(policy.prompts()))
        batch = policy.batch(groups)
        # GRPO, arXiv 2402.03300, section 4.1: the rewards of a group, standardized.
        rewards = batch.rewards.view(-1, GROUP)
        spread = rewards.std(1, keepdim=True) + 1e-6
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten()
        advantages = advantages.repeat_interleave(batch.lengths).float()
        policy.update(batch.replace(advantages=advantages), clipped)
        policy.sync()
