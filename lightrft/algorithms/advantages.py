"""Compute advantages from rewards: one function and one equation per estimator.

Every estimator has the same signature:

    ADVANTAGES[name](batch, token_rewards, settings, **options) -> (advantages, returns)

Args:
    batch: The global batch. ``batch.rewards [B]`` are the outcome rewards after shaping.
    token_rewards: ``[N]``. The outcome reward at the last sampled token of each row. Every sampled
        token also has the KL penalty, if one is configured.
    settings: ``algorithm.advantage``, of which ``reads`` names the fields in use.

Returns:
    Advantages and returns, ``[N]`` each. Tokens that the policy did not sample get 0. They are
    skipped, so they do not change the result at other tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from lightrft.algorithms.group_ops import GroupStats
from lightrft.algorithms.token_ops import (
    TokenRows,
    compact,
    discounted,
    group_sum,
    last_sampled,
    scatter,
    whiten,
)
from lightrft.config.algorithm import AdvantageConfig
from lightrft.config.presets import preset_hint
from lightrft.types import Batch
from lightrft.utils.errors import ConfigError
from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.registry import Registry

Advantage = Callable[..., tuple[Tensor, Tensor]]
ADVANTAGES: Registry[Advantage] = Registry("advantage", preset_hint)


def scores(batch: Batch, token_rewards: Tensor, rows: TokenRows) -> Tensor:
    """Return the outcome reward of each response plus its summed KL penalty, ``[B]``.

    A response without sampled tokens has a score too, so it counts for the baseline.

    Args:
        batch: The global batch.
        token_rewards: ``[N]``. Outcome rewards and KL penalties.
        rows: The rows of ``batch``.

    Raises:
        ValueError: If ``batch.rewards`` is missing.
    """
    if batch.rewards is None:
        raise ValueError("advantages need batch.rewards")
    rewards = batch.rewards.to(token_rewards.dtype)
    # token_rewards hold the outcome of rows with sampled tokens; the rest of a row is the penalty
    placed = torch.where(rows.count() > 0, rewards, torch.zeros_like(rewards))
    return rewards + (rows.sum(token_rewards) - placed)


def by_prompt(batch: Batch, token_rewards: Tensor) -> GroupStats:
    """Return the ``scores`` of all responses, grouped by prompt."""
    score = scores(batch, token_rewards, TokenRows.of(batch))
    return GroupStats(score, batch.prompt_of, len(batch.prompts))


def on_tokens(advantage: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Expand one number per response, ``[B]``, to its sampled tokens, ``[N]``.

    The result is returned twice, as the advantage and as the return.
    """
    rows = TokenRows.of(batch)
    spread = rows.spread(advantage)
    tokens = torch.where(rows.mask, spread, torch.zeros_like(spread))
    return tokens, tokens


@ADVANTAGES.register(
    "grpo",
    formula="A_i = (R_i - mean_group R) / (std_group R + eps)",
    latex=r"\hat A_i=\frac{R_i-\operatorname{mean}(R)}{\operatorname{std}(R)+\epsilon}",
    paper="DeepSeekMath, arXiv 2402.03300, section 4.1.2",
    needs=["groups"],
    reads=["eps"],
)
def grpo(batch: Batch, token_rewards: Tensor, settings: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Standardize each reward within its group, with the unbiased standard deviation.

    The advantage is exactly 0 in a group of one response and in a group of equal rewards.
    """
    return on_tokens(by_prompt(batch, token_rewards).standardised(settings.eps), batch)


@ADVANTAGES.register(
    "group_mean",
    formula="A_i = R_i - mean_group R",
    latex=r"\hat A_i=R_i-\operatorname{mean}(R)",
    paper="Dr. GRPO, arXiv 2503.20783, section 3.2",
    needs=["groups"],
)
def group_mean(
    batch: Batch, token_rewards: Tensor, settings: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    """Subtract the mean reward of the group from each reward."""
    return on_tokens(by_prompt(batch, token_rewards).centred(), batch)


@ADVANTAGES.register(
    "rloo",
    formula="A_i = R_i - mean_{j != i} R_j, over the group",
    latex=r"\hat A_i=R_i-\frac{1}{G-1}\sum_{j\ne i}R_j",
    paper="RLOO, arXiv 2402.14740, section 3.1",
    needs=["groups"],
)
def rloo(batch: Batch, token_rewards: Tensor, settings: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Subtract the mean reward of the other responses in the group from each reward.

    Leaving out the response's own reward makes the baseline independent of the response.
    """
    groups = by_prompt(batch, token_rewards)
    size = groups.size()
    # R_i minus the mean of the others equals (R_i - mean) * n / (n - 1)
    return on_tokens(groups.centred() * size / (size - 1).clamp(min=1), batch)


@ADVANTAGES.register(
    "opo",
    formula="A_i = R_i - sum_j l_j R_j / sum_j l_j, over the group; l counts sampled tokens",
    latex=r"\hat A_i=R_i-\frac{\sum_j l_jR_j}{\sum_j l_j}",
    paper="OPO, arXiv 2505.23585, section 3.2",
    needs=["groups"],
)
def opo(batch: Batch, token_rewards: Tensor, settings: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Subtract the length-weighted mean reward of the group from each reward.

    This baseline has minimum variance if the squared gradient norm of a response grows with its
    length.
    """
    groups = by_prompt(batch, token_rewards)
    length = TokenRows.of(batch).count()
    baseline = groups.sum(length * groups.x) / groups.sum(length).clamp(min=1)
    # equal rewards get exactly 0, which rounding of the baseline would miss
    advantage = torch.where(groups.uneven(), groups.x - baseline, torch.zeros_like(baseline))
    return on_tokens(advantage, batch)


@ADVANTAGES.register(
    "pass_at_k",
    formula="A_i = R_(1) - R_(2) for the best response of the group, 0 for the others",
    latex=r"\hat A_i=\mathbb 1[R_i=R_{(1)}]\,(R_{(1)}-R_{(2)})",
    paper="Inference-time objectives, arXiv 2503.19595, section 3 (leave-one-out of max@k)",
    needs=["groups"],
)
def pass_at_k(
    batch: Batch, token_rewards: Tensor, settings: AdvantageConfig, *, std_eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """Give the best response its margin over the second-best reward of the group.

    Two equal best responses both get 0.

    Args:
        std_eps: If given, divide by the standard deviation of the group plus ``std_eps``.
    """
    groups = by_prompt(batch, token_rewards)
    best = groups.x == groups.highest()
    # minus infinity in a group of equal rewards, where ``alone`` is false
    second = groups.highest(torch.where(best, -torch.inf, groups.x))
    alone = best & groups.uneven() & (groups.sum(best.to(groups.x.dtype)) == 1)
    gap = torch.where(alone, groups.x - second, torch.zeros_like(groups.x))
    if std_eps is not None:
        gap = torch.where(alone, gap / (groups.deviation() + std_eps), gap)
    return on_tokens(gap, batch)


@ADVANTAGES.register(
    "maxrl",
    formula="A_i = (R_i - mean_group R) / (mean_group R + eps), 0 where the mean is not positive",
    latex=r"\hat A_i=\frac{R_i-\operatorname{mean}(R)}{\operatorname{mean}(R)+\epsilon}",
    paper="MaxRL, arXiv 2602.02710",
    needs=["groups"],
    reads=["eps"],
)
def maxrl(batch: Batch, token_rewards: Tensor, settings: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Normalize each centered reward by the mean reward of its group.

    Rewards must be 0 or positive, with 1 for a success. Rare successes weigh most, as in the
    gradient of the log-likelihood.
    """
    groups = by_prompt(batch, token_rewards)
    mean = groups.mean()
    # a mean below 0 would flip the sign, and at 0 the quotient would be as large as 1 / eps
    relative = groups.centred() / (mean + settings.eps)
    return on_tokens(torch.where(mean > 0, relative, torch.zeros_like(mean)), batch)


@ADVANTAGES.register(
    "lite_ppo",
    formula="A_i = (R_i - mean_group R) / (std_batch R + eps)",
    latex=r"\hat A_i=\frac{R_i-\operatorname{mean}_{group}(R)}{\operatorname{std}_{batch}(R)+\epsilon}",
    paper="Lite PPO, arXiv 2508.08221, section 4.1",
    needs=["groups", "batch"],
    reads=["eps"],
)
def lite_ppo(
    batch: Batch, token_rewards: Tensor, settings: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    """Center each reward on its group mean and divide by the standard deviation of the batch.

    The standard deviation is unbiased and is taken over all rewards of the batch.
    """
    groups = by_prompt(batch, token_rewards)
    centred = groups.centred()
    spread = GroupStats.whole(groups.x).deviation()
    # 0 / 0 would be NaN for a batch of equal rewards with eps = 0
    return on_tokens(torch.where(centred != 0, centred / (spread + settings.eps), centred), batch)


@ADVANTAGES.register(
    "batch_standard",
    formula="A_i = (R_i - mean_batch R) / (std_batch R + eps)",
    latex=r"\hat A_i=\frac{R_i-\operatorname{mean}_{batch}(R)}{\operatorname{std}_{batch}(R)+\epsilon}",
    paper="the second step of GDPO, arXiv 2601.05242; the first is normalize.terms = group",
    needs=["batch"],
    reads=["eps"],
)
def batch_standard(
    batch: Batch, token_rewards: Tensor, settings: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    """Standardize each reward over all responses of the batch, with the unbiased deviation.

    Every response counts once.
    """
    score = scores(batch, token_rewards, TokenRows.of(batch))
    return on_tokens(GroupStats.whole(score).standardised(settings.eps), batch)


@ADVANTAGES.register(
    "gpg",
    formula="A_i = alpha (R_i - mean_group R) / F,  alpha = responses / responses of groups with "
    "unequal rewards,  F = 1",
    latex=r"\hat A_i=\alpha\,\frac{R_i-\operatorname{mean}(R)}{F},\quad\alpha=\frac{B}{B-M},\quad F=1",
    paper="GPG, arXiv 2504.02546, section 3",
    needs=["groups", "batch"],
)
def gpg(
    batch: Batch, token_rewards: Tensor, settings: AdvantageConfig, *, std_eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """Center each reward on its group mean and scale it by ``alpha``.

    ``alpha`` compensates for groups of equal rewards, which have no gradient.

    Args:
        std_eps: If given, ``F`` is the standard deviation of the group plus ``std_eps``.
    """
    groups = by_prompt(batch, token_rewards)
    # clamped: where every group is equal, there is nothing to scale
    alpha = len(batch) / groups.uneven().sum().clamp(min=1).to(groups.x.dtype)
    centred = groups.centred() if std_eps is None else groups.standardised(std_eps)
    return on_tokens(alpha * centred, batch)


@ADVANTAGES.register(
    "raft",
    formula="A_i = 1 for the first i with R_i = max_group R, 0 for the others",
    latex=r"\hat A_i=\mathbb 1[i=\min\arg\max R]",
    paper="RAFT, arXiv 2304.06767, algorithm 1",
    needs=["groups"],
)
def raft(batch: Batch, token_rewards: Tensor, settings: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Imitate the best response of each group, without a baseline.

    Of several best responses the first one requested is chosen, wherever it is in the batch.

    Raises:
        ValueError: If ``batch.sample`` is missing.
    """
    if batch.sample is None:
        raise ValueError("raft needs batch.sample")
    groups = by_prompt(batch, token_rewards)
    # negated, since ``highest`` finds maxima
    order = -batch.sample.to(groups.x.dtype)
    earliest = torch.where(groups.x == groups.highest(), order, -torch.inf)
    chosen = earliest == groups.highest(earliest)
    return on_tokens(chosen.to(groups.x.dtype), batch)


@ADVANTAGES.register(
    "rft",
    formula="A_i = 1 if R_i >= threshold, else 0",
    latex=r"\hat A_i=\mathbb 1[R_i\ge\tau]",
    paper="Rejection sampling fine-tuning, arXiv 2308.01825",
)
def rft(
    batch: Batch, token_rewards: Tensor, settings: AdvantageConfig, *, threshold: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Imitate every response whose reward reaches a threshold.

    Args:
        threshold: Smallest reward that is imitated.
    """
    score = scores(batch, token_rewards, TokenRows.of(batch))
    return on_tokens((score >= threshold).to(score.dtype), batch)


@ADVANTAGES.register(
    "reinforce",
    formula="A_t = sum_{s>=t} gamma^(s-t) r_s",
    latex=r"\hat A_t=\sum_{s\ge t}\gamma^{s-t}r_s",
    paper="REINFORCE++, arXiv 2501.03262, section 3 (whitened over the global batch)",
    reads=["gamma"],
)
def reinforce(
    batch: Batch, token_rewards: Tensor, settings: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    """Return the discounted sum of rewards from each token on."""
    returns = returns_of(batch, token_rewards, settings.gamma)
    return returns, returns


@ADVANTAGES.register(
    "remax",
    formula="A_t = sum_{s>=t} gamma^(s-t) r_s - gamma^(T-t) R(greedy response),  T the last sampled "
    "token",
    latex=r"\hat A_t=\sum_{s\ge t}\gamma^{s-t}r_s-\gamma^{T-t}R(y^{greedy})",
    paper="ReMax, arXiv 2310.10505, algorithm 2; the discount follows its authors' code",
    needs=["greedy"],
    reads=["gamma"],
)
def remax(batch: Batch, token_rewards: Tensor, settings: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Subtract the discounted reward of the greedy response from the return of each token.

    ``batch.baselines [B]`` holds the reward of the greedy response to the same prompt. It is placed
    at the last sampled token of the row, where the outcome reward is.

    Raises:
        ValueError: If ``batch.baselines`` is missing.
    """
    if batch.baselines is None:
        raise ValueError("remax needs batch.baselines")
    returns = returns_of(batch, token_rewards, settings.gamma)
    placed = torch.zeros_like(token_rewards)
    last = last_sampled(TokenRows.of(batch))
    placed[last[last >= 0]] = batch.baselines.to(placed.dtype)[last >= 0]
    return returns - returns_of(batch, placed, settings.gamma), returns


@ADVANTAGES.register(
    "gae",
    formula="delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  return_t = "
    "A_t + V_t;  V = 0 after the last token",
    latex=r"\delta_t=r_t+\gamma V_{t+1}-V_t,\quad \hat A_t=\delta_t+\gamma\lambda\hat A_{t+1},\quad \hat R_t=\hat A_t+V_t",
    paper="GAE, arXiv 1506.02438, eq. 16; lam_critic: VC-PPO, arXiv 2503.01491",
    needs=["critic"],
    reads=["gamma", "gae_lambda", "bootstrap_truncated"],
)
def gae(
    batch: Batch,
    token_rewards: Tensor,
    settings: AdvantageConfig,
    *,
    lam_critic: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimation (GAE).

    The value after the last token is 0. With ``bootstrap_truncated``, a truncated row takes the
    critic's value there.

    Args:
        lam_critic: Trace decay of the returns. ``None`` uses ``gae_lambda`` for advantages and
            returns.
    """
    return traced(batch, token_rewards, settings, settings.gae_lambda, lam_critic)


@ADVANTAGES.register(
    "vapo",
    formula="A_t as in gae with lam_i = max(0, 1 - 1 / (alpha l_i)), l_i sampled tokens;  return_t "
    "as in gae with lam_critic",
    latex=r"\hat A_t=\sum_{k\ge 0}(\gamma\lambda_i)^k\delta_{t+k},\ "
    r"\lambda_i=1-\tfrac{1}{\alpha l_i},\quad "
    r"\hat R_t=V_t+\sum_{k\ge 0}(\gamma\lambda_{critic})^k\delta_{t+k}",
    paper="VAPO, arXiv 2504.05118, section 4.2; decoupled traces: VC-PPO, arXiv 2503.01491",
    needs=["critic"],
    reads=["gamma", "bootstrap_truncated"],
)
def vapo(
    batch: Batch,
    token_rewards: Tensor,
    settings: AdvantageConfig,
    *,
    alpha: float = 0.05,
    lam_critic: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute GAE with a length-adaptive trace decay per response.

    The reward propagates over the same fraction of a long and of a short response. The returns use
    a separate trace decay. Responses of fewer than ``1 / alpha`` tokens have a decay of 0. Their
    advantage is the one-step temporal difference. Use a larger ``alpha`` for short responses.

    Args:
        alpha: Controls how fast ``lam_i`` approaches 1 as the response gets longer.
        lam_critic: Trace decay of the returns.

    Raises:
        ConfigError: If ``alpha`` is not positive.
    """
    if alpha <= 0:
        raise ConfigError(f"advantage vapo: options.alpha is {alpha}; it must be positive")
    length = TokenRows.of(batch).count().to(token_rewards.dtype)
    # A response without sampled tokens has length 0: 1 / 0 is infinite, and the clamp gives 0.
    lam = (1 - 1 / (alpha * length)).clamp(min=0)
    return traced(batch, token_rewards, settings, lam, lam_critic)


def traced(
    batch: Batch,
    token_rewards: Tensor,
    settings: AdvantageConfig,
    lam: float | Tensor,
    lam_critic: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns from temporal differences.

    Args:
        batch: Has ``values [N]``, and ``final_values [B]`` to bootstrap truncated rows.
        token_rewards: ``[N]``.
        settings: Discount factor per token, and whether truncated rows are bootstrapped.
        lam: Trace decay, one number for all rows or ``[B]``.
        lam_critic: Trace decay of the returns. ``None`` uses ``gae_lambda``.

    Returns:
        Advantages and returns, ``[N]`` each.

    Raises:
        ValueError: If ``batch.values`` is missing, or the values after truncated rows.
    """
    if batch.values is None:
        raise ValueError("a trace of temporal differences needs batch.values")
    rows, gamma = TokenRows.of(batch), settings.gamma
    # without the tokens that the policy did not sample: time passes at sampled tokens only
    rewards, row, column = compact(token_rewards, rows)
    values, _, _ = compact(batch.values.to(token_rewards.dtype), rows)
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    if settings.bootstrap_truncated:
        if batch.final_values is None or batch.truncated is None:
            raise ValueError("bootstrap_truncated needs batch.final_values and batch.truncated")
        cut = (rows.count() > 0) & batch.truncated
        following[cut, rows.count()[cut] - 1] = batch.final_values[cut].to(values.dtype)
    inside = torch.arange(values.shape[1], device=values.device) < rows.count()[:, None]
    delta = torch.where(inside, rewards + gamma * following - values, torch.zeros_like(values))
    advantages = discounted(delta, gamma * lam)
    targets = advantages if lam_critic is None else discounted(delta, gamma * lam_critic)
    return scatter(advantages, rows, row, column), scatter(targets + values, rows, row, column)


@ADVANTAGES.register(
    "prime",
    formula="A_t = sum_{s>=t} gamma^(s-t) (p_s - mean_{j != i} mean_s p_js) + R_i - mean_{j != i} "
    "R_j;  p_t process rewards",
    latex=r"\hat A_t=\sum_{s\ge t}\gamma^{s-t}\Big(p_s-\tfrac1{G-1}\sum_{j\ne i}\bar p_j\Big)+R_i-\tfrac1{G-1}\sum_{j\ne i}R_j",
    paper="PRIME, arXiv 2502.01456",
    needs=["groups", "prm"],
    reads=["gamma"],
)
def prime(batch: Batch, token_rewards: Tensor, settings: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Add the return of centered process rewards to the leave-one-out outcome advantage.

    The baseline of the process rewards is the mean, over the other responses of the group, of their
    mean token reward.
    """
    process, others, count = process_means(batch, token_rewards.dtype)
    rows = TokenRows.of(batch)
    baseline = rows.spread(others / count.clamp(min=1))
    # without other responses there is no baseline, and the process rewards count for nothing
    has_baseline = rows.mask & rows.spread(count > 0)
    centred = torch.where(has_baseline, process - baseline, 0.0)
    outcome, _ = rloo(batch, token_rewards, settings)
    total = returns_of(batch, centred.to(process.dtype), settings.gamma) + outcome
    return total, total


@ADVANTAGES.register(
    "prime_released",
    formula="A_t = process_coef sum_{s>=t} (G p_s - sum_j mean_s p_js) / (G - 1) + outcome_coef (R_i "
    "- mean_{j != i} R_j)",
    latex=r"\hat A_t=c_p\sum_{s\ge t}\frac{G\,p_s-\sum_j\bar p_j}{G-1}+c_o\Big(R_i-\tfrac1{G-1}\sum_{j\ne i}R_j\Big)",
    paper="PRIME, arXiv 2502.01456, as its released code has it",
    needs=["groups", "prm", "batch"],
)
def prime_released(
    batch: Batch,
    token_rewards: Tensor,
    settings: AdvantageConfig,
    *,
    outcome_coef: float = 1.0,
    process_coef: float = 1.0,
    batch_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute PRIME advantages as the authors' released code does.

    The process baseline is the mean of the whole group, including the response's own mean. ``G``
    counts the responses that have sampled tokens.

    Args:
        outcome_coef: Weight of the outcome advantage.
        process_coef: Weight of the process advantage.
        batch_norm: Divide process rewards by their largest absolute return in the batch.
    """
    if batch_norm and batch.process_rewards is not None:
        returns = returns_of(batch, batch.process_rewards.to(token_rewards.dtype), 1.0)
        largest = returns.abs().max() if returns.numel() else returns.new_zeros(())
        scale = (largest + 1e-6).to(batch.process_rewards.dtype)
        batch = batch.replace(process_rewards=batch.process_rewards / scale)
    process, others, count = process_means(batch, token_rewards.dtype)
    rows = TokenRows.of(batch)
    group = rows.spread(rows.mean(process) + others)
    spread = (process * rows.spread(count + 1) - group) / rows.spread(count.clamp(min=1))
    centred = torch.where(rows.mask & rows.spread(count > 0), process_coef * spread, 0.0)
    outcome, _ = rloo(batch, token_rewards, settings)
    total = returns_of(batch, centred.to(process.dtype), 1.0) + outcome_coef * outcome
    return total, total


@ADVANTAGES.register(
    "otb",
    formula="A_t = G_t - sum_i G_it W_it / (sum_i W_it + eps),  G_t = sum_{s>=t} r_s,  W_t = "
    "sum_{s<=t} (1 - 2 pi_s + sum_v pi_v^2), over the responses of the group that have a "
    "token t",
    latex=r"\hat A_t=G_t-\frac{\sum_iG_{i,t}W_{i,t}}{\sum_iW_{i,t}+\epsilon},\quad "
    r"G_t=\sum_{s\ge t}r_s,\quad W_t=\sum_{s\le t}\Big(1-2\pi_s+\sum_v\pi_v^2\Big)",
    paper="the optimal token baseline, arXiv 2602.07078",
    needs=["groups", "energy"],
    reads=["eps"],
)
def otb(
    batch: Batch, token_rewards: Tensor, settings: AdvantageConfig, *, zero_tail: bool = True
) -> tuple[Tensor, Tensor]:
    """Subtract the optimal baseline of each token position from the return.

    Responses with more uncertain tokens up to that position weigh more. The only response of a
    group has no baseline, so its advantage is its return.

    Args:
        zero_tail: Positions that only the longest response of a group reaches have no baseline. If
            false, the advantage is 0 there.

    Raises:
        ValueError: If ``batch.energy`` is missing.
    """
    if batch.energy is None:
        raise ValueError("otb needs batch.energy")
    rows = TokenRows.of(batch)
    padded, row, column = compact(token_rewards, rows)
    togo = discounted(padded, 1.0)[row, column]
    work = compact(batch.energy.to(togo.dtype), rows)[0].cumsum(1)[row, column]
    longest = padded.shape[1]
    # every token position of every prompt is a group
    places = GroupStats(togo, batch.prompt_of[row] * longest + column, len(batch.prompts) * longest)
    baseline = places.sum(togo * work) / (places.sum(work) + settings.eps)
    # Equal returns have exactly no advantage, whatever eps is.
    baseline = torch.where(places.uneven(), baseline, togo)
    ones = torch.ones_like(batch.prompt_of)
    responses = group_sum(ones, batch.prompt_of, len(batch.prompts))
    alone = responses[batch.prompt_of][row] == 1
    if zero_tail:
        alone = alone | (places.size() == 1)
    tokens = torch.zeros_like(token_rewards)
    tokens[rows.mask] = togo - torch.where(alone, 0.0, baseline)
    returns = torch.zeros_like(token_rewards)
    returns[rows.mask] = togo
    return tokens, returns


@ADVANTAGES.register(
    "gigpo",
    formula="A_t = (R_i - mean_group R) / F + weight (U_s - mean_state U) / F,  U_s = sum_{k>=s} "
    "gamma^(k-s) r_k of step s, the mean over the steps of the group taken in an equal "
    "state;  F = std + eps, one for each term",
    latex=r"\hat A_t=\frac{R_i-\operatorname{mean}(R)}{\operatorname{std}(R)+\epsilon}+\omega\,"
    r"\frac{U_s-\operatorname{mean}_{state}(U)}{\operatorname{std}_{state}(U)+\epsilon},\quad "
    r"U_s=\sum_{k\ge s}\gamma^{k-s}r_k",
    paper="GiGPO, arXiv 2505.10978, eq. 3, 6, 7 and 8",
    needs=["groups", "steps"],
    reads=["gamma", "eps"],
)
def gigpo(
    batch: Batch,
    token_rewards: Tensor,
    settings: AdvantageConfig,
    *,
    weight: float = 1.0,
    std: bool = True,
) -> tuple[Tensor, Tensor]:
    """Combine episode advantages with advantages of steps that began in the same state.

    For responses of several steps. All tokens of one step share one value of ``batch.steps`` and of
    ``batch.states``.

    Args:
        weight: Weight of the step advantage.
        std: Divide by the standard deviation. If false, ``F`` is 1.

    Raises:
        ValueError: If ``batch.steps`` or ``batch.states`` is missing.
    """
    if batch.steps is None or batch.states is None:
        raise ValueError("gigpo needs batch.steps and batch.states")
    mask = TokenRows.of(batch).mask
    row_of = batch.row_of[mask]
    # `number [S, 2]` is the response and the step of each step; `step` is the step of each token.
    pairs = torch.stack([row_of, batch.steps[mask].to(row_of.dtype)], 1)
    number, step = torch.unique(pairs, dim=0, return_inverse=True)
    response = number[:, 0]
    back = group_sum(token_rewards[mask], step, len(number))
    for k in range(len(number) - 2, -1, -1):  # sorted by response, then by step
        if response[k] == response[k + 1]:
            back[k] += settings.gamma * back[k + 1]
    state = batch.states.new_zeros(len(number)).index_copy(0, step, batch.states[mask])
    # states are compared within the responses to one prompt only
    prompt = batch.prompt_of[response]
    same_state = torch.stack([prompt, state.to(prompt.dtype)], 1)
    states, state_of = torch.unique(same_state, dim=0, return_inverse=True)
    episodes = by_prompt(batch, token_rewards)
    steps = GroupStats(back, state_of, len(states))
    if std:
        episode_advantage = episodes.standardised(settings.eps)
        step_advantage = steps.standardised(settings.eps)
    else:
        episode_advantage = episodes.centred()
        step_advantage = steps.centred()
    tokens = torch.zeros_like(token_rewards)
    tokens[mask] = episode_advantage[row_of] + weight * step_advantage[step]
    return tokens, tokens


def process_means(batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the process rewards and the sums that their leave-one-out baseline needs.

    Returns:
        The process rewards ``[N]``, and two tensors ``[B]`` over the other responses of the group.
        The first is the sum of their mean token rewards. The second counts the responses with
        sampled tokens.

    Raises:
        ValueError: If ``batch.process_rewards`` is missing.
    """
    if batch.process_rewards is None:
        raise ValueError("prime needs batch.process_rewards")
    rows, process = TokenRows.of(batch), batch.process_rewards.to(dtype)
    own, some = rows.mean(process), (rows.count() > 0).to(dtype)
    groups = GroupStats(own, batch.prompt_of, len(batch.prompts))
    return process, groups.sum(own) - own, groups.sum(some) - some


@ADVANTAGES.register(
    "teacher",
    formula="A_t = 0, and what distill adds",
    latex=r"\hat A_t=0",
    paper="distillation without a reward: GKD, arXiv 2306.13649",
    needs=["teacher"],
)
def teacher(
    batch: Batch, token_rewards: Tensor, settings: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of 0, so that only a teacher's term trains the policy."""
    nothing = torch.zeros_like(token_rewards)
    return nothing, nothing


def returns_of(batch: Batch, token_rewards: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum of this and later token rewards of the row, ``[N]``.

    Args:
        batch: Gives the rows and their sampled tokens.
        token_rewards: ``[N]``.
        gamma: Discount factor per token.
    """
    rows = TokenRows.of(batch)
    padded, row, column = compact(token_rewards, rows)
    return scatter(discounted(padded, gamma), rows, row, column)


def _by_group(x: Tensor, batch: Batch, eps: float) -> Tensor:
    group = batch.prompt_of[batch.row_of]
    # each part is 0 outside its group, so the sum joins them
    parts = [whiten(x, batch.mask & (group == g), eps) for g in range(len(batch.prompts))]
    return torch.stack(parts).sum(0) if parts else torch.zeros_like(x)


WHITENINGS: dict[str, Callable[[Tensor, Batch, float], Tensor]] = {
    "none": lambda x, batch, eps: x,
    "group": _by_group,
    "batch": lambda x, batch, eps: whiten(x, batch.mask, eps),
}
"""Whitening modes: ``WHITENINGS[mode](advantages [N], batch, eps) -> advantages [N]``."""
