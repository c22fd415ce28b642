"""The oracles of the second circle of methods, against numbers worked out by hand; the working stands beside each number."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.numbers import oracles_advantages as advantages
from tests.numbers import oracles_corrections as corrections
from tests.numbers import oracles_losses as losses
from tests.numbers import oracles_rewards as rewards
from tests.numbers import oracles_token_masks as masks
from tests.numbers.oracles import Case, aggregate_token, flat, on_sampled, unclipped
from tests.numbers.scalars import Rows, gradients, leaves, mean, number
from tests.numbers.strategies import cases, cases_with_scores
from tests.numbers.test_oracles_by_hand import (
    GROUPED,
    LN2,
    LN3,
    REWARDS,
    case_of,
    close,
    rows_close,
    tokens,
    two_and_one,
)

# Advantages. GROUPED: group 1 = responses 0, 2, 3 (rewards 1, 2, 6: mean 3, variance 7), group 0 = response 1, group 2 = 4, 5, 6


def test_pass_at_k_pays_only_the_best_by_its_lead() -> None:
    assert close(advantages.pass_at_k(GROUPED, REWARDS), [0, 0, 0, 4, 0, 0, 0])  # 6 - 2
    assert close(advantages.pass_at_k(GROUPED, REWARDS, eps=1.0)[3], 4 / (math.sqrt(7) + 1))
    # A tie for the best.
    assert advantages.pass_at_k(case_of([[True]] * 3), [1.0, 1.0, 0.0]) == [
        0.0,
        0.0,
        0.0,
    ]


def test_lite_ppo_divides_by_the_deviation_of_the_whole_batch() -> None:
    # 1, 3 | 5, 7: means 2 and 6; over all four mean 4, squares 9+1+1+9 = 20: biased variance 5, unbiased 20/3
    case = case_of([[True]] * 4, [0, 0, 1, 1])
    s = math.sqrt(5) + 1
    assert close(
        advantages.lite_ppo(case, [1.0, 3.0, 5.0, 7.0], False, 1.0), [-1 / s, 1 / s, -1 / s, 1 / s]
    )
    assert close(
        advantages.lite_ppo(case, [1.0, 3.0, 5.0, 7.0], True, 0.0)[1], 1 / math.sqrt(20 / 3)
    )
    # No signal inside a group.
    assert advantages.lite_ppo(case, [1.0, 1.0, 5.0, 5.0], True, 0.0) == [0.0] * 4


def test_gdpo_normalises_each_term_then_the_sum() -> None:
    # two responses: rewards 0, 2 have deviation sqrt 2 over n-1, so A = -1/sqrt 2, 1/sqrt 2, whatever the scale of the term.
    # Weights 3 and 1, terms pointing against each other: sum = -2/sqrt 2, 2/sqrt 2 = -sqrt 2, sqrt 2; biased deviation sqrt 2.
    case, terms = case_of([[True]] * 2), [[0.0, 2.0], [100.0, 0.0]]
    assert close(advantages.gdpo(case, terms, [3.0, 1.0], False, 0.0), [-1, 1])
    # Deviation 2.
    assert close(
        advantages.gdpo(case, terms, [3.0, 1.0], True, 0.0), [-1 / math.sqrt(2), 1 / math.sqrt(2)]
    )
    assert advantages.gdpo(case, terms, [1.0, 1.0], True, 0.0) == [0.0, 0.0]
    assert advantages.gdpo(case, [[0.1, 0.1]], [1.0], True, 0.0) == [0.0, 0.0]


def test_gpg_makes_up_for_groups_without_signal() -> None:
    # 3 of 7 responses are in a group with signal: alpha 7/3, times -2, -1, 3
    assert close(advantages.gpg(GROUPED, REWARDS), [-14 / 3, 0, -7 / 3, 7, 0, 0, 0])
    assert close(advantages.gpg(GROUPED, REWARDS, eps=0.0)[3], 7 / math.sqrt(7))
    assert advantages.gpg(case_of([[True]] * 2), [1.0, 1.0]) == [0.0, 0.0]


def test_raft_and_rft_pay_ones() -> None:
    assert advantages.raft(GROUPED, REWARDS) == [0, 1, 0, 1, 1, 0, 0]
    assert advantages.rft(REWARDS, 2.0) == [0, 1, 1, 1, 0, 0, 0]


def test_rae_subtracts_the_running_reward_of_the_role() -> None:
    # decay 1/2, role 0: b = 0 -> 2 -> 1; role 1: b = 4 -> 5
    assert advantages.rae([4.0, 6.0, 0.0], [0, 1, 0], 0.5, {1: 4.0}) == [2.0, 1.0, -1.0]


def test_remax_subtracts_the_greedy_answer() -> None:
    # token rewards 1, -, 2: sums 3, 2; greedy 5
    found = advantages.remax(case_of([[True, False, True], []]), [[1.0, 9.0, 2.0], []], [5.0, 1.0])
    assert found == [[-2.0, 0.0, -3.0], []]


@pytest.mark.parametrize(
    ("length", "lam"), [(0, 0.0), (1, 0.0), (10, 0.0), (20, 0.0), (40, 0.5), (200, 0.9)]
)
def test_lambda_grows_with_the_length(length: int, lam: float) -> None:
    assert close(advantages.adaptive_lambda(length, 0.05), lam)


def test_vapo_learns_the_critic_without_lambda() -> None:
    # V = 1, 2, reward 4 at the end, gamma 1: delta = 1, 2. alpha 1, length 2: lambda 1/2: A = 2, 2. Targets of lambda 1: 4, 4
    case = case_of([[True, True]], values=[[1.0, 2.0]])
    found, targets = advantages.vapo(case, [[0.0, 4.0]], 1.0, 1.0)
    assert found == [[2.0, 2.0]]
    assert targets == [[4.0, 4.0]]


def test_implicit_rewards_are_scaled_log_ratios() -> None:
    case = case_of([[True, False]], ref=[[-3.0, 0.0]])
    assert advantages.implicit_rewards(case, [[-1.0, -1.0]], 0.5) == [[1.0, 0.0]]


# Token rewards 1, 3 | 4 | (none sampled) in one group, outcomes 1, 0, 0. Baseline of 0: 4; of 1: (1+3)/2 = 2.
PRIME = case_of([[True, False, True], [True], [False]])
PROCESS: Rows = [[1.0, 9.0, 3.0], [4.0], [9.0]]


def test_prime_adds_returns_of_centred_token_rewards_to_the_outcome() -> None:
    # centred -3, -1 | 2; gamma 1/2: -1, -3 - 1/2 = -3.5. RLOO of outcomes: 1 - 0, 0 - 1/2
    found = advantages.prime(PRIME, [1.0, 0.0, 0.0], PROCESS, 0.5)
    assert rows_close(found, [[-2.5, 0, 0], [1.5], [0]])


def test_the_released_prime_also_counts_its_own_mean() -> None:
    # G = 2: 2 r - (2 + 4): -4, 0 | 8 - 6 = 2; sums -4, 0 | 2; process weight 1/2, outcome weight 2
    found = advantages.prime_released(PRIME, [1.0, 0.0, 0.0], PROCESS, 2.0, 0.5)
    assert rows_close(found, [[-2 + 2, 0, 0 + 2], [1 - 1], [0]])


def test_prime_without_another_response_has_no_process_part() -> None:
    assert advantages.prime(case_of([[True]]), [1.0], [[5.0]], 1.0) == [[0.0]]
    assert advantages.prime_released(
        case_of([[True], [False]]), [1.0, 0.0], [[5.0], [1.0]], 1.0, 1.0
    ) == [[1.0], [0.0]]


def test_distillation_pays_where_the_teacher_is_likelier() -> None:
    case = case_of([[True, False, True]], old=[[-1.0, 0.0, -3.0]])
    teacher: Rows = [[-3.0, 0.0, -1.0]]
    assert advantages.distilled(case, None, teacher, 0.5) == [[-1.0, 0.0, 1.0]]
    assert advantages.distilled(case, [[7.0, 7.0, 7.0]], teacher, 0.5) == [[6.0, 0.0, 8.0]]


# Losses. ``tokens`` has ratios against an old probability of 1/8, ``two_and_one`` ratios 2, 8 (product 16) and 1/2


def test_vespo_weighs_the_log_prob_by_a_gate_of_the_whole_response() -> None:
    # k, lam = 2, 3: phi(16) = 256 e^(3 - 48); 3, 2: phi(1/2) = 1/8 e^(2 - 1)
    case = two_and_one(masked=True).with_leaves("logprobs")
    rows = losses.vespo(case, [[1.0, 0.0, 1.0], [-2.0]])
    high, low = 256 * math.exp(-45), math.e / 8
    assert rows_close(rows, [[-high * LN2, 0, -3 * high * LN2], [-2 * low * LN2]])
    assert rows_close(
        gradients(rows[0][0] + rows[0][2] + rows[1][0], case.logprobs),
        [[-high, 0, -high], [2 * low]],
    )
    assert losses.sequence_gate(0.0, 3.0, 2.0) == 1.0


def test_dppo_lets_go_of_tokens_whose_probability_moved_with_the_advantage() -> None:
    # from 1/8 to 1/2, 1/4, 1/16: moved 3/8, 1/8, -1/16. Bounds 1/5 up, 1/20 down.
    case = tokens([4.0, 2.0, 0.5])
    case.behavior = case.old
    case = case.with_leaves("logprobs")
    up, down = losses.dppo(case, [[1.0] * 3], 0.05, 0.2), losses.dppo(case, [[-1.0] * 3], 0.05, 0.2)
    assert rows_close(up, [[0, -2, -0.5]])
    assert rows_close(down, [[4, 2, 0]])
    assert rows_close(gradients(up[0][1] + down[0][0], case.logprobs), [[4, -2, 0]])
    both = losses.dppo(case, [[1.0] * 3], 0.05, 0.2, kl_coef=0.5)
    # Log ratios 2, 1, -1 times ln 2.
    assert rows_close(both, [[2 * LN2**2, -2 + LN2**2 / 2, -0.5 + LN2**2 / 2]])


def test_luspo_sums_over_the_tokens() -> None:
    # gspo rows -4, -4 | 1/2 at wide bounds: (-8 + 1/2) / 2
    assert close(losses.luspo(two_and_one(masked=True), [1.0, -1.0], 0.9, 9.0), -3.75)


def test_the_drift_is_k3_of_the_old_policy() -> None:
    # r = 2: 2 - 1 - ln 2; r = 1/2: ln 2 - 1/2; gradients r - 1
    row = leaves([[LN2, -LN2]])[0]
    assert close([number(losses.drift(x, 0.0)) for x in row], [1 - LN2, LN2 - 0.5])
    assert rows_close(
        gradients(losses.drift(row[0], 0.0) + losses.drift(row[1], 0.0), [row]), [[1.0, -0.5]]
    )


def test_the_capped_drift_pulls_back_with_a_bounded_force() -> None:
    # cap 2: r = 8 pulls with 2 and not with 7; r = 2 with 1; r = 1/2 with -1/2. Values: times log r
    case = tokens([8.0, 2.0, 0.5, 1.0]).with_leaves("logprobs")
    row = [losses.capped_drift(now, -3 * LN2, 2.0) for now in case.logprobs[0]]
    assert rows_close([row], [[6 * LN2, LN2, LN2 / 2, 0]])
    assert rows_close(gradients(sum(row), case.logprobs), [[2, 1, -0.5, 0]])


def test_cpgd_with_its_drift() -> None:
    # A = 2 at r = 8 is clipped to -2 ln 1.3 and gradient 0, r = 1/2: 2 ln 2, gradient -2; the drift at a quarter on top
    case = tokens([8.0, 0.5]).with_leaves("logprobs")
    capped = losses.cpgd_with_drift(case, [[2.0] * 2], 0.2, 0.3, 0.25, 2.0)
    assert rows_close(capped, [[-2 * math.log(1.3) + 1.5 * LN2, 2 * LN2 + LN2 / 8]])
    assert rows_close(gradients(sum(capped[0]), case.logprobs), [[0.5, -2.125]])
    plain = losses.cpgd_with_drift(case, [[2.0] * 2], 0.2, 0.3, 0.25, None)
    assert rows_close(gradients(sum(plain[0]), case.logprobs), [[1.75, -2.125]])  # (8 - 1)/4


def test_clip_cov_silences_chosen_tokens() -> None:
    case = tokens([1.0, 2.0, 1.0]).with_leaves("logprobs")
    rows = losses.clip_cov(case, [[2.0] * 3], 0.2, 0.3, [[True, False, False]])
    assert rows_close(rows, [[0, -2.6, -2]])
    assert rows_close(gradients(sum(rows[0]), case.logprobs), [[0, 0, -2]])
    assert close(number(aggregate_token(case, rows)), -4.6 / 3)  # a silenced token still counts


def test_kl_cov_pulls_chosen_tokens_back() -> None:
    # r = 2, 1/2, 1, 2: -r A + beta |ln r|; the sign of ln r in the gradient
    case = tokens([2.0, 0.5, 1.0, 2.0]).with_leaves("logprobs")
    rows = losses.kl_cov(case, [[2.0] * 4], 3.0, [[True, True, True, False]])
    assert rows_close(rows, [[-4 + 3 * LN2, -1 + 3 * LN2, -2, -4]])
    assert rows_close(gradients(sum(rows[0]), case.logprobs), [[-4 + 3, -1 - 3, -2, -4]])


def test_ptx_adds_the_language_modelling_loss() -> None:
    # -(-1 - 2) = 3 and 3: mean 3; by token (1 + 2 + 3) / 3 = 2
    assert close(losses.ptx(1.0, [[-1.0, -2.0], [-3.0]], 0.5), 2.5)
    assert close(losses.ptx_by_token(1.0, [[-1.0, -2.0], [-3.0]], 0.5), 2.0)
    assert losses.ptx(1.0, [], 0.5) == losses.ptx_by_token(1.0, [[]], 0.5) == 1.0


def test_the_nll_of_positive_examples_is_over_their_tokens_alone() -> None:
    case = case_of(
        [[True, False, True], [True], [True]], logprobs=[[-1.0, -9.0, -2.0], [-7.0], [-3.0]]
    )
    assert close(losses.positive_nll(case, [True, False, True]), 2.0)  # (1 + 2 + 3) / 3
    assert losses.positive_nll(case, [False] * 3) == 0.0
    # 4/4 + 0.1 * 2.
    assert close(
        losses.whole_loss(case, [[4.0, 9.0, 0.0], [0.0], [0.0]], [True, False, True], 0.1), 1.2
    )


def test_an_implicit_prm_is_a_classifier_of_the_outcome() -> None:
    # x = 1/2 (ln 3 + ln 3) = ln 3: sigma = 3/4. Right: -ln 3/4; wrong: -ln 1/4. d/dx = sigma - o, times beta 1/2, over 2 responses
    case = case_of(
        [[True, False, True], [True], [False]], ref=[[-LN3, 0.0, -LN3], [-2 * LN3], [0.0]]
    ).with_leaves("logprobs")
    found = losses.implicit_prm_loss(case, 0.5, [1.0, 0.0, 1.0])
    assert close(number(found), (math.log(4 / 3) + math.log(4)) / 2)
    assert rows_close(gradients(found, case.logprobs), [[-1 / 16, 0, -1 / 16], [3 / 16], [0]])
    assert losses.implicit_prm_loss(case_of([[], [False]]), 1.0, [1.0, 0.0]) == 0.0


def test_divergences_of_two_distributions() -> None:
    # student 1/2, 1/2; teacher 3/4, 1/4. reverse: ln(2/3)/2 + ln(2)/2; forward: 3/4 ln(3/2) + 1/4 ln(1/2)
    student, teacher = [0.0, 0.0], [LN3, 0.0]
    forward, reverse = 0.75 * math.log(1.5) - LN2 / 4, (math.log(2 / 3) + LN2) / 2
    assert close(losses.forward_kl(student, teacher), forward)
    assert close(losses.reverse_kl(student, teacher), reverse)
    # beta 1/2: m = 5/8, 3/8: (3/4 ln 6/5 + 1/4 ln 2/3)/2 + (1/2 ln 4/5 + 1/2 ln 4/3)/2
    middle = (0.75 * math.log(6 / 5) + 0.25 * math.log(2 / 3)) / 2 + (
        math.log(4 / 5) + math.log(4 / 3)
    ) / 4
    assert close(losses.jsd(student, teacher, 0.5), middle)
    # beta 1/4: m = 9/16, 7/16, the teacher's part is weighed 1/4: 3/4 ln 4/3 + 1/4 ln 4/7, and ln(8/9)/2 + ln(8/7)/2
    quarter = (0.75 * math.log(4 / 3) + 0.25 * math.log(4 / 7)) / 4 + 3 * (
        math.log(8 / 9) + math.log(8 / 7)
    ) / 8
    assert close(losses.jsd(student, teacher, 0.25), quarter)


def test_the_ends_of_the_jensen_shannon_family() -> None:
    student, teacher = [0.0, 1.0], [LN3, 0.0]
    assert close(losses.jsd(student, teacher, 0.0), 0) and close(
        losses.jsd(student, teacher, 1.0), 0
    )
    assert losses.jsd(student, teacher, 1e-7) / 1e-7 == pytest.approx(
        losses.forward_kl(student, teacher), rel=1e-5
    )
    assert losses.jsd_with_limits(student, teacher, 0.0) == losses.forward_kl(student, teacher)
    assert losses.jsd_with_limits(student, teacher, 1.0) == losses.reverse_kl(student, teacher)
    assert losses.jsd_with_limits(student, teacher, 0.5) == losses.jsd(student, teacher, 0.5)


def test_a_temperature_flattens_both_sides() -> None:
    # logits 2 ln 3 at temperature 2 are ln 3
    assert close(
        losses.forward_kl([0.0, 0.0], [2 * LN3, 0.0], 2.0),
        losses.forward_kl([0.0, 0.0], [LN3, 0.0]),
    )


# Gates

FOUR = case_of([[True, False, True], [True], [True]])
ENTROPIES: Rows = [[1.0, 99.0, 2.0], [3.0], [4.0]]


def test_quantiles_are_interpolated() -> None:
    assert [masks.quantile([4.0, 1.0, 2.0, 3.0], q) for q in (0.0, 0.5, 1.0)] == [1.0, 2.5, 4.0]
    assert masks.quantile([5.0], 0.8) == 5.0


def test_the_top_of_the_entropy_of_a_batch() -> None:
    # rho 1/2: threshold 2.5; rho 1/4: the 3/4 quantile 3.25; rho 0.2: 3.4
    assert masks.top_entropy(FOUR, ENTROPIES, 0.5) == [[False, False, False], [True], [True]]
    assert masks.top_entropy(FOUR, ENTROPIES, 0.2) == [[False, False, False], [False], [True]]
    assert masks.top_entropy(FOUR, ENTROPIES, 1.0) == FOUR.mask
    # Ceil(1.2)
    assert masks.top_entropy_by_count(FOUR, ENTROPIES, 0.3) == [
        [False, False, False],
        [True],
        [True],
    ]
    # All at the threshold.
    assert masks.top_entropy(FOUR, [[1.0, 9.0, 1.0], [1.0], [1.0]], 0.2) == FOUR.mask


def test_the_top_of_the_entropy_of_each_response() -> None:
    assert masks.top_entropy(FOUR, ENTROPIES, 0.5, "sequence") == [
        [False, False, True],
        [True],
        [True],
    ]
    assert masks.top_entropy_by_count(FOUR, ENTROPIES, 0.2, "sequence") == [
        [False, False, True],
        [True],
        [True],
    ]
    assert masks.top_entropy(case_of([[], [False]]), [[], [1.0]], 0.2, "sequence") == [[], [False]]


# log-probs -1, -3 | -2 | -6 have mean -3; advantages 1, 1 | -1 | 3 mean 1: covariances 0, 0 | -2 | -6; masked ones do not count
COVARIANCE = case_of(
    [[True, False, True], [True], [True]],
    logprobs=[[-1.0, 50.0, -3.0], [-2.0], [-6.0]],
    old=[[-1.0, 0.0, -3.0], [-2.0], [-5.0]],
)
PULLS: Rows = [[1.0, 50.0, 1.0], [-1.0], [3.0]]


def test_covariances_are_around_the_means_of_the_batch() -> None:
    assert list(masks.covariances(COVARIANCE, PULLS).values()) == [0.0, 0.0, -2.0, -6.0]
    assert masks.covariances(case_of([[False]]), [[1.0]]) == {}


def test_tokens_that_clip_cov_may_choose() -> None:
    # strictly inside (-6, 0): only the third; in (-7, 1) all four, unless the clip holds them: r = e on a negative advantage does not
    assert masks.clip_cov_eligible(COVARIANCE, PULLS, (-6.0, 0.0), 0.2, 0.2) == [
        [False, False, False],
        [True],
        [False],
    ]
    assert masks.clip_cov_eligible(COVARIANCE, PULLS, (-7.0, 1.0), 0.2, 0.2) == COVARIANCE.mask
    held = case_of([[True, True]], logprobs=[[-1.0, -1.0]], old=[[-2.0, -2.0]])  # r = e
    assert masks.clip_cov_eligible(held, [[1.0, -1.0]], (-1.0, 1.0), 0.2, 0.2) == [[False, True]]


def test_kl_cov_chooses_the_largest_share() -> None:
    assert masks.kl_cov_chosen(COVARIANCE, PULLS, 0.5) == [[True, False, True], [False], [False]]
    assert masks.kl_cov_chosen(COVARIANCE, PULLS, 0.01) == [[True, False, False], [False], [False]]
    assert masks.kl_cov_chosen(COVARIANCE, PULLS, 0.01, at_least_one=False) == [
        [False] * 3,
        [False],
        [False],
    ]
    assert (masks.share_of(0, 0.5), masks.share_of(10, 0.25), masks.share_of(10, 0.01, False)) == (
        0,
        2,
        0,
    )


def test_m2po_drops_the_fewest_far_tokens() -> None:
    # squares 1, 4 | 9 | 0: mean 14/4 = 3.5; without 9: 5/3; without 4: 1/2
    case = case_of([[True, False, True], [True], [True]], logprobs=[[1.0, 9.0, -2.0], [3.0], [0.0]])
    assert masks.m2po(case, 3.5) == case.mask
    assert masks.m2po(case, 2.0) == [[True, False, True], [False], [True]]
    assert masks.m2po(case, 0.5) == [[True, False, False], [False], [True]]
    assert masks.m2po(case, 0.1) == [[False] * 3, [False], [True]]
    assert masks.m2po(case_of([[True]], logprobs=[[1.0]]), 0.5) == [[False]]


# Corrections. Weights 2, -, 8 | 1/2: products 16, 1/2; geometric means 4, 1/2
OFF = case_of([[True, False, True], [True], []], old=[[LN2, 99.0, 3 * LN2], [-LN2], []])


def test_weights_of_tokens_and_of_responses() -> None:
    assert rows_close(corrections.truncated(OFF, "token", 99.0), [[2, 0, 8], [0.5], []])
    assert rows_close(corrections.truncated(OFF, "sequence", 99.0), [[16, 0, 16], [0.5], []])
    assert rows_close(corrections.truncated(OFF, "geometric", 99.0), [[4, 0, 4], [0.5], []])
    assert rows_close(corrections.truncated(OFF, "token", 3.0, low=1.0), [[2, 0, 3], [1], []])


def test_masked_weights_are_dropped_not_bounded() -> None:
    assert rows_close(corrections.icepop(OFF, 0.6, 5.0), [[2, 0, 0], [0], []])
    assert rows_close(corrections.masked(OFF, "sequence", 0.25, 10.0), [[0, 0, 0], [0.5], []])
    assert rows_close(corrections.masked(OFF, "geometric", 0.75, 5.0), [[4, 0, 4], [0], []])
    assert rows_close(corrections.rejected(OFF, "geometric", 0.75, 5.0), [[1, 0, 1], [0], []])


def test_a_kept_response_keeps_its_token_weights() -> None:
    assert rows_close(
        corrections.masked_by_sequence(OFF, "geometric", 0.75, 5.0), [[2, 0, 8], [0], []]
    )
    assert rows_close(
        corrections.masked_by_sequence(OFF, "geometric", 0.75, 5.0, cap=3.0), [[2, 0, 3], [0], []]
    )


def test_bad_responses_far_from_the_sampler_are_dropped() -> None:
    # mean(behavior - now): 2, 2, 0
    case = case_of(
        [[True, False, True], [True], [True]], logprobs=[[-1.0, 9.0, -3.0], [-2.0], [0.0]]
    )
    found = corrections.off_policy_sequence_mask(case, [-1.0, 1.0, -1.0], 1.5)
    assert found == [[0.0, 0.0, 0.0], [1.0], [1.0]]
    assert corrections.off_policy_sequence_mask(case, [-1.0, 1.0, -1.0], 2.0) == [
        [1.0, 0.0, 1.0],
        [1.0],
        [1.0],
    ]


def test_decoupled_ppo_clips_around_the_proximal_policy() -> None:
    # pi/prox = 2, 1; prox/behavior = 3, 1/2: 3 * -min(2, 1.3) and 1/2 * -1
    case = case_of(
        [[True, True]], logprobs=[[LN2 + LN3, 0.0]], old=[[LN3, 0.0]], behavior=[[0.0, LN2]]
    )
    case = case.with_leaves("logprobs")
    rows = corrections.decoupled_ppo(case, [[1.0, 1.0]], 0.2, 0.3)
    assert rows_close(rows, [[-3.9, -0.5]])
    assert rows_close(gradients(sum(rows[0]), case.logprobs), [[0, -0.5]])
    assert rows_close(corrections.decoupled_ppo(case, [[1.0, 1.0]], 0.2, 0.3, cap=2.0), [[0, -0.5]])


def test_the_proximal_policy_lies_between_sampler_and_now() -> None:
    assert [corrections.version_share(v, 4, 5) for v in (1, 3, 4, 5, 6)] == [
        0.75,
        0.5,
        0.0,
        0.0,
        0.0,
    ]
    case = case_of(
        [[True, False], [True]], logprobs=[[-1.0, 0.0], [-1.0]], behavior=[[-5.0, 0.0], [-5.0]]
    )
    assert corrections.interpolated_proximal(case, [1, 5], 4, 5) == [[-2.0, 0.0], [-5.0]]


# Rewards and coefficients


@pytest.mark.parametrize(
    ("length", "right", "wrong"),
    [(0, 2.0, -10.0), (50, 1.5, -5.0), (25, 1.5 + math.sqrt(2) / 4, -5 - 2.5 * math.sqrt(2))],
)
def test_the_cosine_reward_between_its_ends(length: int, right: float, wrong: float) -> None:
    found = [
        rewards.cosine_length(length, 100, ok, (2.0, 1.0), (-10.0, 0.0), -11.0)
        for ok in (True, False)
    ]
    assert close(found, [right, wrong])


def test_the_cosine_reward_of_a_cut_answer() -> None:
    assert rewards.cosine_length(100, 100, True, (2.0, 1.0), (-10.0, 0.0), -11.0) == -11.0
    assert rewards.cosine_length(99, 100, False, (2.0, 1.0), (-10.0, 0.0), -11.0) == pytest.approx(
        0.0, abs=3e-3
    )


def test_kimi_rewards_the_short_ones_of_a_group() -> None:
    # lengths 1, 2, 3 in one group, 1, 1 in another: lambda 1/2, 0, -1/2
    case = case_of(
        [[True], [True, True], [True, True, True], [True], [True, False]], [0, 0, 0, 1, 1]
    )
    assert close(rewards.kimi_length(case, [True] * 5), [0.5, 0, -0.5, 0, 0])
    assert close(rewards.kimi_length(case, [False] * 5), [0, 0, -0.5, 0, 0])


def test_running_moments_know_no_order() -> None:
    # 1, 2 | 6: mean 3, biased variance 14/3, unbiased 7
    found = rewards.running_normalized([[1.0, 2.0], [6.0]], True, 1.0)
    assert close(found, [3 / (math.sqrt(7) + 1)])
    assert close(
        rewards.running_normalized([[6.0, 1.0], [2.0]], False, 0.0), [-1 / math.sqrt(14 / 3)]
    )
    assert close(rewards.running_scaled([[1.0, 2.0], [6.0]], True, 0.0), [6 / math.sqrt(7)])
    assert rewards.running_normalized([[0.1], [0.1, 0.1]], True, 0.0) == [0.0, 0.0]
    assert rewards.running_scaled([[0.5]], True, 0.0) == [0.5]
    assert rewards.moments([[]], True) == (0.0, 0.0)


def test_terms_are_normalised_before_they_are_added() -> None:
    # 0, 2 and 0, 200 have the same shape: biased -1, 1 each
    assert close(
        rewards.normalized_terms([[[0.0, 2.0]], [[0.0, 200.0]]], [1.0, 3.0], False, 0.0), [-4, 4]
    )


def test_values_on_a_normalised_scale_come_back() -> None:
    assert rewards.normalized_value_target(7.0, 3.0, 1.5, 0.5) == 2.0
    assert rewards.denormalized_value(2.0, 3.0, 1.5, 0.5) == 7.0


def test_moving_averages() -> None:
    assert rewards.ema([4.0, 0.0], 0.5, 2.0) == 1.5  # 3, 1.5
    assert close(rewards.unbiased_ema([4.0, 0.0], 0.5), 4 / 3)  # 2, 1, over 3/4
    assert rewards.unbiased_ema([], 0.5) == 0.0


def test_the_linear_coefficient_stays_at_its_end() -> None:
    assert [rewards.linear_kl(k, 1.0, 0.0, 4) for k in (0, 1, 4, 9)] == [1.0, 0.75, 0.0, 0.0]
    assert rewards.linear_kl(0, 1.0, 0.5, 0) == 0.5


def test_the_entropy_coefficient_works_only_below_its_target() -> None:
    assert rewards.entropy_step(0.5, 0.1, 0.2, 0.25) == (0.5, 0.75)
    assert rewards.entropy_step(0.5, 0.3, 0.2, 0.25) == (0.0, 0.25)
    assert rewards.entropy_step(0.5, 0.2, 0.2, 0.25) == (0.5, 0.5)
    assert rewards.entropy_step(0.0, 0.3, 0.2, 0.25) == (0.0, 0.0)
    assert rewards.entropy_step(0.5, 0.1, 0.2, 0.25, high=0.6) == (0.5, 0.6)


# On any case


@settings(deadline=None)
@given(cases_with_scores())
def test_every_loss_of_the_second_circle_has_the_plain_policy_gradient_on_policy(
    drawn: tuple[Case, list[float]],
) -> None:
    case, scores = drawn
    case.old = case.behavior = case.logprobs
    case = case.with_leaves("logprobs")
    rows = on_sampled(case, scores)
    found = {
        "vespo": losses.vespo(case, rows),
        "dppo": losses.dppo(case, rows, 0.1, 0.2, kl_coef=0.5),
        "cpgd with drift": losses.cpgd_with_drift(case, rows, 0.2, 0.28, 0.5, None),
        "cpgd with capped drift": losses.cpgd_with_drift(case, rows, 0.2, 0.28, 0.5, 2.0),
        "kl_cov": losses.kl_cov(case, rows, 0.5, case.mask),
        "decoupled ppo": corrections.decoupled_ppo(case, rows, 0.2, 0.28),
    }
    plain = [[-a for a in row] for row in rows]
    for name, each in found.items():
        gradient = gradients(sum((x for row in each for x in row), 0.0), case.logprobs)
        assert flat(gradient) == pytest.approx(flat(plain), abs=1e-12), name


@settings(deadline=None)
@given(cases_with_scores())
def test_dppo_without_bounds_is_the_weighted_policy_gradient_of_the_sampler(
    drawn: tuple[Case, list[float]],
) -> None:
    case, scores = drawn
    case.old = case.behavior
    rows = on_sampled(case, scores)
    assert losses.dppo(case, rows, math.inf, math.inf) == unclipped(case, rows)


@settings(deadline=None)
@given(cases(), st.floats(0, 50))
def test_m2po_keeps_as_much_as_it_may(case: Case, tau: float) -> None:
    kept = masks.m2po(case, tau)
    moment = {at: masks.second_moment(case, at) for at in masks.places(case)}
    inside = [m for (i, t), m in moment.items() if kept[i][t]]
    outside = [m for (i, t), m in moment.items() if not kept[i][t]]
    assert not inside or mean(inside) <= tau
    assert max(inside, default=0.0) <= min(outside, default=math.inf)
    if outside:
        assert mean([*inside, min(outside)]) > tau


@settings(deadline=None)
@given(cases())
def test_a_sampler_that_is_the_policy_needs_no_correction(case: Case) -> None:
    case.behavior = case.old = case.logprobs
    ones = [[float(m) for m in row] for row in case.mask]
    for level in corrections.LEVELS:
        assert corrections.truncated(case, level, 2.0, 0.5) == ones
        assert corrections.masked(case, level, 0.999, 1.001) == ones
        assert corrections.rejected(case, level, 0.999, 1.001) == ones
        assert corrections.masked_by_sequence(case, level, 0.999, 1.001) == ones
    assert corrections.off_policy_sequence_mask(case, [-1.0] * len(case), 0.0) == ones
