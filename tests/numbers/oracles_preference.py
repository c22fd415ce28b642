"""Losses on pairs, on labelled and on ranked responses, from the papers, one number at a time.

A pair loss is ``loss(pw, pl, rw, rl, nw, nl, beta, **options)``. The numbers of the chosen response
(w) and of the rejected one (l) are

- ``pw``, ``pl``: the sum of the policy's log-probs over the trained tokens of the response,
- ``rw``, ``rl``: the same sum of the reference model,
- ``nw``, ``nl``: the number of these tokens.

The comments name the differences between a paper, the scripts of its authors and TRL 1.16.
``tests.numbers.exact`` gives the values and derivatives of these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpmath import mpf

from tests.numbers.exact import (
    Number,
    constant,
    exp,
    log,
    log_one_minus_exp,
    log_sigmoid,
    log_softmax,
    mean,
    order,
    positive_part,
    sigmoid,
)

PairLoss = Callable[..., Number]
Numbers = Sequence[Number]
Table = Sequence[Numbers]
"""One row per position, one number per token of the vocabulary."""


def logistic(z: Number, label_smoothing: Number = 0) -> Number:
    """Return the cross-entropy of sigmoid(z) with a label that is wrong at this rate."""
    return -(1 - label_smoothing) * log_sigmoid(z) - label_smoothing * log_sigmoid(-z)


def margin(pw: Number, pl: Number, rw: Number, rl: Number) -> Number:
    """Return log pi/ref of the chosen response minus log pi/ref of the rejected one."""
    return (pw - rw) - (pl - rl)


# Pairs, with a reference


def dpo(pw, pl, rw, rl, nw, nl, beta, label_smoothing=0):
    """DPO, arXiv 2305.18290, eq. 7. With ``label_smoothing`` cDPO, Mitchell 2023, eq. 3."""
    return logistic(beta * margin(pw, pl, rw, rl), label_smoothing)


def cdpo(pw, pl, rw, rl, nw, nl, beta, label_smoothing):
    """Conservative DPO, Mitchell 2023 (ericmitchell.ai/cdpo.pdf), eq. 3."""
    return dpo(pw, pl, rw, rl, nw, nl, beta, label_smoothing)


def robust(pw, pl, rw, rl, nw, nl, beta, label_smoothing):
    """Robust DPO, arXiv 2403.00409: unbiased under flips at the rate ``label_smoothing``."""
    z = beta * margin(pw, pl, rw, rl)
    right = -(1 - label_smoothing) * log_sigmoid(z)
    flipped = -label_smoothing * log_sigmoid(-z)
    return (right - flipped) / (1 - 2 * label_smoothing)


def hinge(pw, pl, rw, rl, nw, nl, beta):
    """The normalised hinge of RSO, arXiv 2309.06657.

    SLiC-HF, arXiv 2305.10425, has max(0, delta - log pi_w + log pi_l), without a reference model.
    """
    return positive_part(1 - beta * margin(pw, pl, rw, rl))


def ipo(pw, pl, rw, rl, nw, nl, beta):
    """IPO with means per token, as in TRL, which has it from the authors: their results are so."""
    return ((pw - rw) / mpf(nw) - (pl - rl) / mpf(nl) - 1 / (2 * mpf(beta))) ** 2


def ipo_sum(pw, pl, rw, rl, nw, nl, beta):
    """IPO, arXiv 2310.12036, eq. 17, where beta is tau: with sums."""
    return (margin(pw, pl, rw, rl) - 1 / (2 * mpf(beta))) ** 2


def exo_pair(pw, pl, rw, rl, nw, nl, beta, label_smoothing):
    """EXO, arXiv 2402.00856, eq. 16: KL of (sigmoid z, sigmoid -z) and (1 - e, e)."""
    z = beta * margin(pw, pl, rw, rl)
    right = sigmoid(z) * (log_sigmoid(z) - log(1 - mpf(label_smoothing)))
    wrong = sigmoid(-z) * (log_sigmoid(-z) - log(mpf(label_smoothing)))
    return right + wrong


def nca_pair(pw, pl, rw, rl, nw, nl, beta):
    """NCA of two responses where one is preferred, arXiv 2402.05369."""
    chosen, rejected = beta * (pw - rw), beta * (pl - rl)
    repelled = -log_sigmoid(-chosen) / 2 - log_sigmoid(-rejected) / 2
    return -log_sigmoid(chosen) + repelled


def bco_pair(pw, pl, rw, rl, nw, nl, beta, shift=0):
    """BCO on a pair, arXiv 2404.04656. ``shift`` is in units of the reward beta log pi/ref.

    TRL's ``bco_pair`` has no shift, LLaMA-Factory's has a running one.
    """
    chosen = bco(pw, rw, True, shift, beta)
    return chosen + bco(pl, rl, False, shift, beta)


def sppo_hard(pw, pl, rw, rl, nw, nl, beta):
    """SPPO, arXiv 2405.00675, eq. 4.7, with win rates 1 and 0, and with beta = 1 / eta."""
    half = 1 / (2 * mpf(beta))
    return (pw - rw - half) ** 2 + (pl - rl + half) ** 2


def apo_zero(pw, pl, rw, rl, nw, nl, beta):
    """APO-zero, arXiv 2408.06266, eq. 7. TRL adds the constant 1."""
    return 1 - sigmoid(beta * (pw - rw)) + sigmoid(beta * (pl - rl))


def apo_down(pw, pl, rw, rl, nw, nl, beta):
    """APO-down, arXiv 2408.06266, eq. 8. TRL adds the constant 1."""
    return sigmoid(beta * (pw - rw)) + 1 - sigmoid(beta * margin(pw, pl, rw, rl))


def discopop(pw, pl, rw, rl, nw, nl, beta, tau=0.05):
    """The log-ratio modulated loss of DiscoPOP, arXiv 2406.08414, eq. 5."""
    z = beta * margin(pw, pl, rw, rl)
    gate = sigmoid(z / mpf(tau))
    return -log_sigmoid(z) * (1 - gate) + exp(-z) * gate


def sigmoid_norm(pw, pl, rw, rl, nw, nl, beta, label_smoothing=0):
    """Length-normalised DPO, Tulu 3, arXiv 2411.15124, which has no smoothed labels."""
    return logistic(beta * ((pw - rw) / mpf(nw) - (pl - rl) / mpf(nl)), label_smoothing)


def dpop(pw, pl, rw, rl, nw, nl, beta, weight=50):
    """DPO-positive, arXiv 2402.13228: the penalty is inside the sigmoid, times beta.

    At policy = reference the penalty is at its kink. Its derivative counts as 0 there.
    """
    penalty = weight * positive_part(rw - pw)
    return logistic(beta * (margin(pw, pl, rw, rl) - penalty))


def cal_dpo(pw, pl, rw, rl, nw, nl, beta, weight=1):
    """Cal-DPO, arXiv 2412.14516: beta stands in the targets +-1/(2 beta) alone.

    ``weight`` of the two squares: 1 in the paper, 0.5 in the authors' script.
    """
    half = 1 / (2 * mpf(beta))
    calibration = (pw - rw - half) ** 2 + (pl - rl + half) ** 2
    return logistic(margin(pw, pl, rw, rl)) + weight * calibration


def r_dpo(pw, pl, rw, rl, nw, nl, beta, alpha):
    """R-DPO, arXiv 2403.19159: the reward that is learned is r - alpha * length.

    From max E[r - alpha n] - beta KL: r = beta log pi/ref + alpha n + const, so the sign is plus.
    SimPO's table of losses agrees. The scripts of alpha-DPO have the opposite sign.
    """
    return logistic(beta * margin(pw, pl, rw, rl) + alpha * (nw - nl))


def odpo(pw, pl, rw, rl, nw, nl, beta, gap, alpha=1, scale="log"):
    """DPO with an offset, arXiv 2402.10571.

    ``gap`` is the score of the chosen response minus the score of the rejected one, and
    ``scale`` is the paper's f: ``log`` (its choice, needs gap > 0) or ``linear``.
    """
    offset = alpha * (log(mpf(gap)) if scale == "log" else gap)
    return logistic(beta * margin(pw, pl, rw, rl) - offset)


def mdpo(pw, pl, rw, rl, nw, nl, beta, corrupted, corrupted_ref, anchor=0):
    """mDPO, arXiv 2406.11839: DPO + conditional DPO + anchor, all with weight 1.

    ``corrupted`` and ``corrupted_ref``: the sums of the chosen response given the corrupted image,
    of the policy and of the reference.
    """
    conditional = logistic(beta * margin(pw, corrupted, rw, corrupted_ref))
    anchored = logistic(beta * (pw - rw) - anchor)
    return dpo(pw, pl, rw, rl, nw, nl, beta) + conditional + anchored


def tdpo(pw, pl, rw, rl, nw, nl, beta, kw, kl):
    """TDPO1, arXiv 2404.11999. ``kw``, ``kl``: the ``sequence_kl`` of each response."""
    return logistic(beta * (margin(pw, pl, rw, rl) - (kl - kw)))


def tdpo2(pw, pl, rw, rl, nw, nl, beta, kw, kl, alpha=0.5):
    """TDPO2, arXiv 2404.11999: no gradient through the KL of the chosen response."""
    return logistic(beta * (margin(pw, pl, rw, rl) - alpha * (kl - constant(kw))))


# Pairs, without a reference


def simpo(pw, pl, rw, rl, nw, nl, beta, gamma, label_smoothing=0):
    """SimPO, arXiv 2405.14734, eq. 6. beta does not scale ``gamma``."""
    return logistic(beta * (pw / mpf(nw) - pl / mpf(nl)) - gamma, label_smoothing)


def contrast(difference: Number, beta: Number, kind: str, label_smoothing: Number) -> Number:
    """Return the ``sigmoid``, ``hinge`` or ``ipo`` loss of a difference of log-probs."""
    if kind == "sigmoid":
        return logistic(beta * difference, label_smoothing)
    if kind == "hinge":
        return positive_part(1 - beta * difference)
    return (difference - 1 / (2 * mpf(beta))) ** 2


def cpo(pw, pl, rw, rl, nw, nl, beta, alpha=1, kind="sigmoid", label_smoothing=0):
    """CPO, arXiv 2401.08417, eq. 3: contrast + alpha * NLL of the chosen response.

    ``ipo`` takes means per token, as in TRL; ``sigmoid`` and ``hinge`` take sums.
    The paper's NLL is -log pi(y_w), a sum. The authors' script and TRL take the mean over the
    chosen tokens of the batch (``sft_over_tokens``); for one pair this is -pw / nw, as here.
    """
    normalised = kind == "ipo"
    difference = pw / mpf(nw) - pl / mpf(nl) if normalised else pw - pl
    return contrast(difference, beta, kind, label_smoothing) + alpha * sft(pw, nw)


def alphapo(pw, pl, rw, rl, nw, nl, beta, gamma, alpha, label_smoothing=0):
    """AlphaPO, arXiv 2501.03884: SimPO with the reward beta (1 - p^-alpha) / alpha.

    p is the probability per token, e^(pw / nw). The limit alpha = 0 is SimPO. The paper has no
    smoothed labels; TRL has SimPO's.
    """

    def reward(total: Number, count: Number) -> Number:
        return beta * (1 - exp(-alpha * total / mpf(count))) / mpf(alpha)

    if alpha == 0:
        return simpo(pw, pl, rw, rl, nw, nl, beta, gamma, label_smoothing)
    return logistic(reward(pw, nw) - reward(pl, nl) - gamma, label_smoothing)


def orpo(pw, pl, rw, rl, nw, nl, beta, alpha=1):
    """ORPO, arXiv 2403.07691, eq. 4 to 7, beta is lambda: NLL - lambda log sigmoid(log odds ratio).

    ``alpha`` weighs the NLL: 1 in the paper. The NLL is over the response. TRL's is over prompt and response, averaged over the batch's
    tokens. Undefined where a mean log-prob is 0.
    """
    chosen, rejected = pw / mpf(nw), pl / mpf(nl)
    ratio = (chosen - rejected) - (log_one_minus_exp(chosen) - log_one_minus_exp(rejected))
    return alpha * sft(pw, nw) + beta * logistic(ratio)


def tpo(pw, pl, rw, rl, nw, nl, beta, pg, ng, alpha=1, kind="sigmoid", gamma=0, label_smoothing=0):
    """TPO, arXiv 2405.16681: contrast + alpha * NLL of a third, gold response.

    ``pg``, ``ng``: its sum of log-probs and its number of tokens. ``kind`` is ``sigmoid``,
    ``hinge``, ``ipo`` or ``length`` (TPO-L, TRL's ``tpo-l``: SimPO's contrast with ``gamma``). As
    in TRL, ``ipo`` and ``length`` take means per token. The NLL is a mean per token, as in TRL.
    """
    nll = alpha * sft(pg, ng)
    if kind == "length":
        return simpo(pw, pl, rw, rl, nw, nl, beta, gamma, label_smoothing) + nll
    return cpo(pw, pl, rw, rl, nw, nl, beta, 0, kind, label_smoothing) + nll


# Sums with the NLL of the chosen response


def sft(total: Number, count: Number) -> Number:
    """Return the mean negative log-prob of one response."""
    return -total / mpf(count)


def sft_over_tokens(totals: Numbers, counts: Sequence[int]) -> Number:
    """Return the mean over all tokens of several responses: ``sft`` in TRL's DPO trainer."""
    return -sum(totals) / mpf(sum(counts))


def rpo(pw, pl, rw, rl, nw, nl, beta, dpo_weight=1, nll_weight=1):
    """Iterative RPO, arXiv 2404.19733, eq. 1: NLL per token + alpha * DPO.

    The paper's alpha is ``dpo_weight``. TRL's former ``rpo_alpha`` was ``nll_weight``, with the NLL
    of ``sft_over_tokens``.
    """
    return dpo_weight * dpo(pw, pl, rw, rl, nw, nl, beta) + nll_weight * sft(pw, nw)


def mpo(pw, pl, rw, rl, nw, nl, beta, weights=(0.8, 0.2, 1), shift=0):
    """MPO, arXiv 2411.10442: preference (DPO), quality (BCO), generation (NLL per token).

    The paper shifts BCO by a moving average of rewards. TRL's ``bco_pair`` has no shift and its
    ``sft`` is ``sft_over_tokens``. LLaMA-Factory divides DPO + w BCO by 1 + w: w 0.25 is 0.8, 0.2.
    """
    pair = (pw, pl, rw, rl, nw, nl, beta)
    terms = (dpo(*pair), bco_pair(*pair, shift=shift), sft(pw, nw))
    return sum(weight * term for weight, term in zip(weights, terms, strict=True))


PAIR_LOSSES: dict[str, PairLoss] = {
    "sigmoid": dpo,
    "cdpo": cdpo,
    "robust": robust,
    "hinge": hinge,
    "ipo": ipo,
    "ipo_sum": ipo_sum,
    "exo": exo_pair,
    "nca": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "sigmoid_norm": sigmoid_norm,
    "simpo": simpo,
    "cpo": cpo,
    "alphapo": alphapo,
    "orpo": orpo,
    "tpo": tpo,
    "dpop": dpop,
    "tdpo": tdpo,
    "tdpo2": tdpo2,
    "cal_dpo": cal_dpo,
    "r_dpo": r_dpo,
    "odpo": odpo,
    "mdpo": mdpo,
}


# Pairs of a whole batch


def aot(pws, pls, rws, rls, beta, label_smoothing=0) -> list[Number]:
    """Paired AOT, arXiv 2406.05882: one loss per quantile, not per pair. Use their mean."""
    policy = [pw - pl for pw, pl in zip(pws, pls, strict=True)]
    reference = [rw - rl for rw, rl in zip(rws, rls, strict=True)]
    return between_quantiles(policy, reference, beta, label_smoothing)


def aot_unpaired(pws, pls, rws, rls, beta, label_smoothing=0) -> list[Number]:
    """Unpaired AOT, arXiv 2406.05882: one loss per quantile."""
    chosen = [pw - rw for pw, rw in zip(pws, rws, strict=True)]
    rejected = [pl - rl for pl, rl in zip(pls, rls, strict=True)]
    return between_quantiles(chosen, rejected, beta, label_smoothing)


def between_quantiles(above: Numbers, below: Numbers, beta: Number, smoothing: Number) -> list:
    """Return the logistic loss of each order statistic of ``above`` over that of ``below``."""
    pairs = zip(order(above), order(below), strict=True)
    return [logistic(beta * (above[i] - below[j]), smoothing) for i, j in pairs]


def reward_gaps(pws, pls, rws, rls) -> list[Number]:
    """Return the difference of log pi/ref of each pair, without beta."""
    return [margin(*pair) for pair in zip(pws, pls, rws, rls, strict=True)]


def beta_dpo(
    pws, pls, rws, rls, beta, alpha, threshold, kept=None, scaled=False, floor=1e-3
) -> list[Number]:
    """beta-DPO at the level of the batch, arXiv 2407.08639: one loss per kept pair.

    ``kept``: the pairs that its filter chose, all when None. beta has no gradient.
    ``scaled``: the paper's gap is a difference of rewards, beta included. The authors' script
    leaves beta out, and puts a ``floor`` under the new beta.
    ``threshold`` is M_0: ``moved_threshold`` of earlier batches and, in the script, of this one.
    """
    gaps = reward_gaps(pws, pls, rws, rls)
    indices = range(len(gaps)) if kept is None else kept
    unit = beta if scaled else 1
    middle = mean([unit * gaps[i] for i in indices])
    new_beta = constant(max(beta * (1 + alpha * (middle - threshold)), mpf(floor)))
    return [logistic(new_beta * gaps[i]) for i in indices]


def weighed_beta_dpo(
    pws, pls, rws, rls, beta, alpha, threshold, deviation, scaled=True, floor=1e-3
) -> list[Number]:
    """beta-DPO with the filter's weights in place of its samples: one loss per pair.

    Pair i has the weight w_i = P g_i / sum g, where g is ``beta_dpo_filter_weight``. Weights and
    beta have no gradient. Equal weights are ``beta_dpo`` with every pair kept.
    """
    gaps = reward_gaps(pws, pls, rws, rls)
    margins = [constant(gap * (beta if scaled else 1)) for gap in gaps]
    likely = [beta_dpo_filter_weight(m, threshold, deviation) for m in margins]
    weights = [len(gaps) * g / sum(likely) for g in likely]
    middle = mean([w * m for w, m in zip(weights, margins, strict=True)])
    new_beta = constant(max(beta * (1 + alpha * (middle - threshold)), mpf(floor)))
    return [w * logistic(new_beta * gap) for w, gap in zip(weights, gaps, strict=True)]


def moved_threshold(old: Number, batch_value: Number, momentum: Number = 0.9) -> Number:
    """Return M_0 (or the deviation) of beta-DPO after a batch, arXiv 2407.08639. It starts at 0."""
    return momentum * old + (1 - mpf(momentum)) * batch_value


def beta_dpo_filter_weight(gap: Number, threshold: Number, deviation: Number) -> Number:
    """Return the weight with which beta-DPO samples a pair, without replacement."""
    return exp(-(((gap - threshold) / mpf(deviation)) ** 2) / 2)


# Labelled responses


def kto(p, r, desirable, z, beta, lambda_d=1, lambda_u=1):
    """KTO, arXiv 2402.01306, eq. 7: lambda - value. ``z``: the ``reference_point``."""
    ratio = p - r
    if desirable:
        return lambda_d * (1 - sigmoid(beta * (ratio - constant(z))))
    return lambda_u * (1 - sigmoid(beta * (constant(z) - ratio)))


def reference_point(mismatched_p: Numbers, mismatched_r: Numbers) -> Number:
    """Return KTO's z: max(0, mean log pi/ref) of prompts with responses of other prompts.

    The mean is over the global batch, each pair with weight 1. TRL averages the means of the ranks,
    which is the same where all have as many rows. HALOs leaves out pairs with log-ratio 0.
    """
    ratios = [p - r for p, r in zip(mismatched_p, mismatched_r, strict=True)]
    return constant(positive_part(mean(ratios)))


def next_response(count: int) -> list[int]:
    """Return the index of the response that each prompt gets for z: j = i + 1, cyclic.

    As in the paper and in HALOs. TRL takes the previous response, i - 1.
    """
    return [(i + 1) % count for i in range(count)]


def apo_zero_unpaired(p, r, desirable, beta, lambda_d=1, lambda_u=1):
    """APO-zero of single responses, from the terms of arXiv 2408.06266, eq. 7, as in TRL's KTO."""
    value = sigmoid(beta * (p - r))
    return lambda_d * (1 - value) if desirable else lambda_u * value


def bco(p, r, desirable, shift, beta, weight=1):
    """BCO, arXiv 2404.04656. ``weight`` is the density ratio of an undesirable response."""
    reward = beta * (p - r) - constant(shift)
    return -log_sigmoid(reward) if desirable else -weight * log_sigmoid(-reward)


def balanced_shift(chosen_rewards: Numbers, rejected_rewards: Numbers) -> Number:
    """Return BCO's delta as in its theorem: the mean of two classes' mean rewards."""
    return constant((mean(chosen_rewards) + mean(rejected_rewards)) / 2)


def running_shift(batches: Sequence[Numbers]) -> Number:
    """Return the mean of all rewards up to and with the current batch: delta in TRL's BCO trainer.

    LLaMA-Factory takes the mean of the batches' means. MPO's paper calls it a moving average.
    """
    return constant(mean([reward for batch in batches for reward in batch]))


# Ranked responses


def plackett_luce(scores: Numbers, ranks: Sequence[int]) -> Number:
    """Return -log probability of a ranking, arXiv 2305.18290, appendix A.3. Rank 1 is the best.

    ``scores`` are beta log pi/ref. Papers have no ties. Here responses of one rank do not compete:
    each one is chosen against all of a worse rank.
    """
    total = mpf(0)
    for score, rank in zip(scores, ranks, strict=True):
        worse = [other for other, place in zip(scores, ranks, strict=True) if place > rank]
        rivals = [exp(other) for other in worse]
        total += log(exp(score) + sum(rivals)) - score
    return total


def lipo(scores: Numbers, labels: Numbers) -> Number:
    """LiPO-lambda, arXiv 2402.01878: a sum over pairs with different labels.

    ``labels`` are psi: more is better, gain 2^psi - 1. Discounts are 1 / log(1 + place), with the
    natural log, for the place in the order of the current scores. Of equal scores the earlier
    response is placed first: at policy = reference all are equal. The weights have no gradient.
    """
    place = [0] * len(scores)
    for position, i in enumerate(order(scores, descending=True), start=1):
        place[i] = position
    total = mpf(0)
    for i in range(len(scores)):
        for j in range(len(scores)):
            if labels[i] > labels[j]:
                gain = mpf(2) ** labels[i] - mpf(2) ** labels[j]
                discount = abs(1 / log(mpf(1 + place[i])) - 1 / log(mpf(1 + place[j])))
                total += gain * discount * logistic(scores[i] - scores[j])
    return total


# Modifiers


def divergence_score(ratio: Number, kind: str, alpha: Number = 0.5) -> Number:
    """Return f'(u) - f'(1) of a log-ratio log u, f-DPO, arXiv 2309.16240, table 1.

    It replaces log pi/ref. f'(1) cancels in a difference of sums, but not in a difference of means
    (``ipo``, ``sigmoid_norm``): TRL has f'(1) = 0 too, for which the loss at policy = reference
    stays independent of lengths. ``alpha`` is the paper's; TRL's ``f_alpha_divergence_coef`` is
    1 - alpha. TRL clamps exponents at 80 in float32. The oracle does not.
    """
    if kind == "forward_kl":
        return 1 - exp(-ratio)
    if kind == "js_divergence":
        return log(mpf(2)) + log_sigmoid(ratio)
    if kind == "alpha_divergence" and alpha != 0:
        return (1 - exp(-alpha * ratio)) / mpf(alpha)
    # Of reverse_kl: f' = log u + 1. The limit of the alpha-divergence at 0 is the same.
    return ratio


def with_divergence(loss: PairLoss, kind: str, alpha: Number = 0.5) -> PairLoss:
    """Return ``loss`` with log pi/ref of both responses replaced by their ``divergence_score``."""

    def changed(pw, pl, rw, rl, nw, nl, beta, **options):
        chosen = divergence_score(pw - rw, kind, alpha)
        rejected = divergence_score(pl - rl, kind, alpha)
        return loss(chosen, rejected, 0, 0, nw, nl, beta, **options)

    return changed


def desensitized_sum(logprobs: Numbers, shared: int, alpha: Number) -> Number:
    """Return LD-DPO's log-prob: tokens after the first ``shared`` count alpha. arXiv 2409.06411.

    ``shared`` is the length of the shorter response of the pair.
    """
    return sum(logprobs[:shared]) + alpha * sum(logprobs[shared:])


def ld_dpo(policy_w, policy_l, reference_w, reference_l, beta, alpha, reference_too=True, loss=dpo):
    """LD-DPO, arXiv 2409.06411, from the log-probs of the trained tokens.

    TRL changes the reference too. LLaMA-Factory changes the policy alone, for which the loss at
    policy = reference depends on the lengths.
    """
    shared = min(len(policy_w), len(policy_l))
    policy = [desensitized_sum(row, shared, alpha) for row in (policy_w, policy_l)]
    of_reference = alpha if reference_too else 1
    reference = [desensitized_sum(row, shared, of_reference) for row in (reference_w, reference_l)]
    return loss(*policy, *reference, len(policy_w), len(policy_l), beta)


def sampo(policy_w, policy_l, reference_w, reference_l, kept_w, kept_l, beta):
    """SamPO, arXiv 2406.10957: DPO on as many tokens of both responses.

    ``kept_w``, ``kept_l``: positions of the tokens; min(nw, nl) of each, chosen uniformly without
    replacement in the longer response. The paper takes the same tokens of policy and reference.
    The authors' script samples for each model again.
    """
    size = min(len(policy_w), len(policy_l))
    if not len(kept_w) == len(kept_l) == size:
        raise ValueError(f"{size} positions of each response, not {len(kept_w)} and {len(kept_l)}")
    chosen = sum(policy_w[t] - reference_w[t] for t in kept_w)
    rejected = sum(policy_l[t] - reference_l[t] for t in kept_l)
    return dpo(chosen, rejected, 0, 0, size, size, beta)


def alignment(logits: Table, tokens: Sequence[int]) -> Number:
    """Return the mean over positions of log pi(y_t) - log sum_v pi(v)^2."""
    terms = []
    for row, token in zip(logits, tokens, strict=True):
        logprobs = log_softmax(row)
        collision = sum(exp(2 * x) for x in logprobs)
        terms.append(logprobs[token] - log(collision))
    return mean(terms)


def wpo_weight(logits_w, tokens_w, logits_l, tokens_l, cap=None) -> Number:
    """Return the weight of a pair in WPO, arXiv 2406.11827, eq. 2 (sampled alignment).

    It is e^(alignment) of both responses, of the policy, a constant, times the pair's loss.
    ``cap``: the authors' script clamps the product at 1. TRL 1.16 does not.
    """
    weight = exp(alignment(logits_w, tokens_w) + alignment(logits_l, tokens_l))
    return constant(weight if cap is None else min(weight, mpf(cap)))


def sequence_kl(logits: Table, reference_logits: Table) -> Number:
    """Return TDPO's sum over positions of KL(reference, policy). arXiv 2404.11999."""
    total = mpf(0)
    for row, reference_row in zip(logits, reference_logits, strict=True):
        policy, reference = log_softmax(row), log_softmax(reference_row)
        total += sum(exp(b) * (b - a) for a, b in zip(policy, reference, strict=True))
    return total


def chosen_sum(logits: Table, tokens: Sequence[int]) -> Number:
    """Return the sum of the log-probs of ``tokens``."""
    return sum(log_softmax(row)[token] for row, token in zip(logits, tokens, strict=True))


def tdpo_of_logits(policy_w, policy_l, reference_w, reference_l, tokens_w, tokens_l, beta, alpha):
    """TDPO2 from the logits of every position; TDPO1 if ``alpha`` is None."""
    numbers = (
        chosen_sum(policy_w, tokens_w),
        chosen_sum(policy_l, tokens_l),
        chosen_sum(reference_w, tokens_w),
        chosen_sum(reference_l, tokens_l),
        len(tokens_w),
        len(tokens_l),
        beta,
        sequence_kl(policy_w, reference_w),
        sequence_kl(policy_l, reference_l),
    )
    return tdpo(*numbers) if alpha is None else tdpo2(*numbers, alpha)


def moved_reference(reference: Number, policy: Number, alpha: Number = 0.6) -> Number:
    """Return a weight of TR-DPO's reference after an update, arXiv 2404.09656.

    The soft update comes every step in the paper, the hard one (alpha 1) every tau steps. TRL has
    alpha 0.6 every 512 steps.
    """
    return alpha * policy + (1 - mpf(alpha)) * reference


def weighted(losses: Numbers, weights: Numbers) -> Number:
    """Return sum w l / sum w: losses of examples with weights."""
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    return total / sum(mpf(weight) for weight in weights)
