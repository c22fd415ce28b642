"""GRPO with no framework: one file, torch and transformers only, one CPU core, under a minute.

A two-layer Qwen2 with random weights learns to write a string of digits backwards: "4821>" gives
"1284" and an end token. A short supervised warm-up teaches it the form of an answer, so that some
answers are right. GRPO then learns from right and wrong answers. Read it from top to bottom, or run
it:

    python examples/one_file_grpo.py

Group Relative Policy Optimization: DeepSeekMath, arXiv 2402.03300, section 4.1. Its clipped ratio
is PPO's, arXiv 1707.06347.
"""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

# ----------------------------------------------------------------------------------------- the task
DIGITS = 4
END, ARROW = 10, 11  # tokens 0-9 are the digits
VOCABULARY = 12
ANSWER = DIGITS + 1  # longest answer, with its end token


def make_prompts(n: int, rng: random.Random) -> Tensor:
    """Return random digits, then the arrow: ``[n, DIGITS + 1]``."""
    return torch.tensor([[rng.randrange(10) for _ in range(DIGITS)] + [ARROW] for _ in range(n)])


def right_answers(prompts: Tensor) -> Tensor:
    """Return the digits backwards, then the end token: ``[n, ANSWER]``."""
    return torch.cat([prompts[:, :DIGITS].flip(1), torch.full((len(prompts), 1), END)], dim=1)


def reward(prompts: Tensor, answers: Tensor) -> Tensor:
    """Return 1 if every token is right, else 0: ``[n]``. GRPO learns from nothing else."""
    return (answers == right_answers(prompts)).all(dim=1).float()


# --------------------------------------------------------------------------------------- the policy
def make_policy() -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=END,
        )
    )


def logprobs_of(policy: Qwen2ForCausalLM, prompts: Tensor, answers: Tensor) -> Tensor:
    """Return log pi(y_t | x, y_<t), ``[n, ANSWER]``.

    The logits at position t - 1 predict token t, hence the shift by one.
    """
    logits = policy(input_ids=torch.cat([prompts, answers], dim=1)).logits
    logits = logits[:, prompts.shape[1] - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def sample(
    policy: Qwen2ForCausalLM, prompts: Tensor, greedy: bool = False
) -> tuple[Tensor, Tensor]:
    """Sample answers ``[n, ANSWER]`` token by token, with the mask of the tokens that count.

    The tokens up to the end token count. Rows of a tensor have one length, so a row continues after
    its end token, and the mask excludes these tokens.
    """
    tokens, cache, written = prompts, None, []
    for _ in range(ANSWER):
        out = policy(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        tokens = (
            logits.argmax(-1, keepdim=True) if greedy else torch.multinomial(logits.softmax(-1), 1)
        )
        written.append(tokens)
    answers = torch.cat(written, dim=1)
    ended_before = (answers == END).cumsum(1) - (answers == END).long()
    return answers, ended_before == 0


# --------------------------------------------------------------------------------------------- GRPO
def group_advantages(rewards: Tensor, group: int, eps: float = 1e-6) -> Tensor:
    """Return ``A_i = (R_i - mean(R)) / (std(R) + eps)`` over the answers to one prompt.

    The other answers to a prompt show how hard it is, so no value model is needed. If all answers
    are right, or all are wrong, A = 0.

    Args:
        rewards: ``[n]``. The answers to one prompt are consecutive.
        group: Number of answers to each prompt.
        eps: Added to the standard deviation.
    """
    r = rewards.view(-1, group)
    return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + eps)).view(-1)


def grpo_loss(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, clip: float = 0.2
) -> Tensor:
    """Return ``-1/N sum_t min(r_t A, clip(r_t, 1 - clip, 1 + clip) A)``.

    ``r_t = pi(y_t) / pi_old(y_t)``, and N is the number of tokens that count. The ratio corrects
    for answers of a slightly older policy. The clip removes the incentive to move far from it.
    Every token has the advantage of its answer. Dividing once, by the tokens of the whole batch,
    gives all tokens the same weight.

    Args:
        new: ``[n, ANSWER]``. Log-probs of the current policy.
        old: ``[n, ANSWER]``. Log-probs of the policy that sampled.
        advantages: ``[n]``.
        mask: ``[n, ANSWER]``. The tokens that count.
        clip: Width of the clip.
    """
    ratio = (new - old).exp()
    a = advantages.unsqueeze(1)
    per_token = -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
    return (per_token * mask).sum() / mask.sum()


def train(
    seed: int = 0,
    enough: float = 0.4,
    rl_steps: int = 200,
    prompts_per_step: int = 32,
    group: int = 8,
    updates: int = 2,
) -> tuple[float, float]:
    """Warm up, then run GRPO. Return the accuracy on held-out prompts before and after GRPO.

    Args:
        seed: Determines weights, prompts and samples.
        enough: Accuracy that ends the warm-up.
        rl_steps: Number of GRPO steps.
        prompts_per_step: Number of prompts in a step.
        group: Number of answers to each prompt.
        updates: Optimizer steps on each batch.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    policy = make_policy()
    # 10,000 prompts exist, and training uses few of them.
    held_out = make_prompts(256, random.Random(-1 - seed))

    def accuracy() -> float:
        return reward(held_out, sample(policy, held_out, greedy=True)[0]).mean().item()

    # Supervised warm-up: raise the log-probs of right answers, and stop while most are still wrong.
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    while (before := accuracy()) < enough:
        prompts = make_prompts(32, rng)
        loss = -logprobs_of(policy, prompts, right_answers(prompts)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"after the supervised warm-up: {before:.0%} of held-out answers right")

    # GRPO: sample answers, and learn from their rewards.
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for step in range(1, rl_steps + 1):
        prompts = make_prompts(prompts_per_step, rng).repeat_interleave(group, dim=0)
        answers, mask = sample(policy, prompts)
        rewards = reward(prompts, answers)
        advantages = group_advantages(rewards, group)
        with torch.no_grad():
            old = logprobs_of(policy, prompts, answers)
        for _ in range(updates):
            loss = grpo_loss(logprobs_of(policy, prompts, answers), old, advantages, mask)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        if step % 25 == 0:
            print(f"step {step:3d}: {rewards.mean():.0%} of sampled answers right")
    after = accuracy()
    print(f"after GRPO: {after:.0%} of held-out answers right")
    return before, after


if __name__ == "__main__":
    torch.set_num_threads(1)  # the model is too small for a second thread
    start = time.perf_counter()
    train()
    print(f"{time.perf_counter() - start:.0f} s")
