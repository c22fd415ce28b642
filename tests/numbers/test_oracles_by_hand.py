"""The oracles themselves, against numbers worked out by hand; the working stands beside each number."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.numbers import distributions as dist
from tests.numbers import oracles
from tests.numbers.oracles import Case
from tests.numbers.scalars import Rows, gradients
from tests.numbers.strategies import batch_of, cases, cases_with_scores, corner_cases, partitions

LN2, LN3 = math.log(2), math.log(3)


def case_of(mask: list[list[bool]], prompt_of: list[int] | None = None, **columns: Any) -> Case:
    zeros: Rows = [[0.0] * len(row) for row in mask]
    plain: dict[str, Any] = dict.fromkeys(("logprobs", "old", "behavior", "ref", "values"), zeros)
    plain |= {
        "rewards": [0.0] * len(mask),
        "truncated": [False] * len(mask),
        "final_values": [0.0] * len(mask),
    }
    return Case(
        lengths=[len(r) for r in mask],
        prompt_of=prompt_of or [0] * len(mask),
        mask=mask,
        **{**plain, **columns},
    )


def close(left: object, right: object) -> bool:
    return left == pytest.approx(right, rel=1e-12, abs=1e-12)


def tokens(ratios: list[float]) -> Case:
    """One response whose old probability is 1/8 and whose ratios are given."""
    return case_of(
        [[True] * len(ratios)],
        logprobs=[[math.log(r / 8) for r in ratios]],
        old=[[math.log(1 / 8)] * len(ratios)],
    )


def rows_close(left: Rows, right: Rows) -> bool:
    return [len(r) for r in left] == [len(r) for r in right] and close(
        oracles.flat(left), oracles.flat(right)
    )


# Groups: group 1 = rewards 1, 2, 6 (responses 0, 2, 3), mean 3, deviations -2, -1, 3, variance (4+1+9)/2 = 7.
# Group 0 = reward 5 alone. Group 2 = 0.1, 0.1, 0.1.
GROUPED = case_of(
    [[True], [True], [True, True], [True, True, True], [True], [True], [True]],
    [1, 0, 1, 1, 2, 2, 2],
)
REWARDS = [1.0, 5.0, 2.0, 6.0, 0.1, 0.1, 0.1]


def test_grpo_divides_by_the_unbiased_deviation_plus_eps() -> None:
    s = math.sqrt(7) + 0.5
    assert close(oracles.grpo(GROUPED, REWARDS, eps=0.5), [-2 / s, 0, -1 / s, 3 / s, 0, 0, 0])
    # -2 / 2.6457513110645906.
    assert close(oracles.grpo(GROUPED, REWARDS, eps=0.0)[0], -0.7559289460184544)


def test_equal_rewards_and_groups_of_one_have_exactly_no_advantage() -> None:
    assert oracles.grpo(GROUPED, REWARDS, eps=1e-6)[4:] == [0.0, 0.0, 0.0]
    assert oracles.grpo(GROUPED, REWARDS, eps=1e-6)[1] == 0.0


def test_dr_grpo_only_removes_the_mean() -> None:
    assert close(oracles.dr_grpo(GROUPED, REWARDS), [-2, 0, -1, 3, 0, 0, 0])


def test_rloo_removes_the_mean_of_the_others() -> None:
    # 1 - (2+6)/2 = -3; 2 - (1+6)/2 = -1.5; 6 - (1+2)/2 = 4.5
    assert close(oracles.rloo(GROUPED, REWARDS), [-3, 0, -1.5, 4.5, 0, 0, 0])


def test_opo_removes_the_length_weighted_mean() -> None:
    # lengths 1, 2, 3: (1*1 + 2*2 + 3*6) / 6 = 23/6
    assert close(oracles.opo(GROUPED, REWARDS), [1 - 23 / 6, 0, 2 - 23 / 6, 6 - 23 / 6, 0, 0, 0])


def test_opo_counts_sampled_tokens_only() -> None:
    # sampled lengths 1 and 3: (1*0 + 3*1) / 4 = 3/4
    case = case_of([[True, False, False], [True, True, True]])
    assert close(oracles.opo(case, [0.0, 1.0]), [-0.75, 0.25])
    assert oracles.opo(case_of([[False], []]), [0.0, 1.0]) == [0.0, 0.0]


def test_maxrl_divides_by_the_mean() -> None:
    # rewards 1, 0, 0, 1: mean 1/2, (1 - 1/2)/(1/2) = 1
    four = case_of([[True]] * 4)
    assert close(oracles.maxrl(four, [1.0, 0.0, 0.0, 1.0], eps=0.0), [1, -1, -1, 1])
    # Mean 1/4, over 1/2.
    assert close(oracles.maxrl(four, [1.0, 0.0, 0.0, 0.0], eps=0.25), [1.5, -0.5, -0.5, -0.5])
    assert oracles.maxrl(four, [0.0] * 4, eps=0.0) == [0.0] * 4


HOLES = [[True, False, True, True, False], [], [False, False]]


def test_returns_step_over_tokens_that_were_not_sampled() -> None:
    # rewards 1, 2, 4 at gamma 1/2: 4; 2 + 4/2 = 4; 1 + 4/2 = 3. What stands on unsampled tokens is not read.
    found = oracles.returns(case_of(HOLES), [[1.0, 9.0, 2.0, 4.0, 9.0], [], [9.0, 9.0]], gamma=0.5)
    assert found == [[3.0, 0.0, 4.0, 4.0, 0.0], [], [0.0, 0.0]]


GAE_VALUES: Rows = [[1.0, 7.0, 2.0, 3.0, 7.0], [], [7.0, 7.0]]
GAE_REWARDS: Rows = [[0.0, 0.0, 0.0, 1.0, 0.0], [], [0.0, 0.0]]


def test_gae_of_a_finished_answer() -> None:
    # V = 1, 2, 3, then 0; gamma = lambda = 1/2. delta = 2/2-1 = 0, 3/2-2 = -1/2, 1+0-3 = -2.
    # A = -2; -1/2 - 2/4 = -1; 0 - 1/4 = -1/4. Returns add V: 1, 1, 3/4.
    case = case_of(HOLES, values=GAE_VALUES, final_values=[4.0, 4.0, 4.0])
    advantages, targets = oracles.gae(case, GAE_REWARDS, gamma=0.5, lam=0.5)
    assert advantages == [[-0.25, 0.0, -1.0, -2.0, 0.0], [], [0.0, 0.0]]
    assert targets == [[0.75, 0.0, 1.0, 1.0, 0.0], [], [0.0, 0.0]]


def test_bootstrapped_gae_of_a_cut_answer_goes_on_from_its_final_value() -> None:
    # the last delta = 1 + 4/2 - 3 = 0, so A = 0; -1/2; 0 - 1/8.
    case = case_of(
        HOLES, values=GAE_VALUES, final_values=[4.0, 4.0, 4.0], truncated=[True, True, True]
    )
    advantages, targets = oracles.gae(case, GAE_REWARDS, gamma=0.5, lam=0.5, bootstrap=True)
    assert advantages == [[-0.125, 0.0, -0.5, 0.0, 0.0], [], [0.0, 0.0]]
    assert targets == [[0.875, 0.0, 1.5, 3.0, 0.0], [], [0.0, 0.0]]


def test_whitening_is_over_all_sampled_tokens() -> None:
    # sampled 1, 2, 3, 6: mean 3, squares 4+1+0+9 = 14; biased variance 3.5, unbiased 14/3.
    case, rows = case_of([[True, False, True], [True, True]]), [[1.0, 99.0, 2.0], [3.0, 6.0]]
    biased, unbiased = math.sqrt(3.5), math.sqrt(14 / 3)
    assert rows_close(
        oracles.whiten(case, rows, False, 0.0), [[-2 / biased, 0, -1 / biased], [0, 3 / biased]]
    )
    assert rows_close(
        oracles.whiten(case, rows, True, 1.0),
        [[-2 / (unbiased + 1), 0, -1 / (unbiased + 1)], [0, 3 / (unbiased + 1)]],
    )
    # Sqrt(4) = 2.
    assert rows_close(oracles.whiten(case, rows, False, 0.5, "var+eps"), [[-1, 0, -0.5], [0, 1.5]])
    # Sqrt(9) = 3.
    assert rows_close(
        oracles.whiten(case, rows, False, 9.0, "var>=eps"), [[-2 / 3, 0, -1 / 3], [0, 1]]
    )
    assert oracles.whiten(case, [[0.1, 0.1, 0.1], [0.1, 0.1]], True, 1e-8) == [
        [0.0, 0.0, 0.0],
        [0.0, 0.0],
    ]
    assert oracles.whiten(case_of([[True, False]]), [[5.0, 1.0]], True, 0.0) == [[0.0, 0.0]]


def test_reinforce_pp_whitens_returns() -> None:
    # returns at gamma 1: 3, 2 | -1 (one token): mean 4/3, deviations 5/3, 2/3, -7/3, squares 78/9, over n-1: 13/3.
    case = case_of([[True, True], [True]])
    s = math.sqrt(13 / 3)
    found = oracles.reinforce_pp(case, [[1.0, 2.0], [-1.0]], gamma=1.0, unbiased=True, eps=0.0)
    assert rows_close(found, [[5 / 3 / s, 2 / 3 / s], [-7 / 3 / s]])


def test_reinforce_pp_baseline_weighs_by_tokens() -> None:
    # rewards 1, 3: -1 on one token, +1 on three: mean 1/2, squares 9/4 + 3/4 = 3, biased variance 3/4.
    case, s = case_of([[True], [True, True, True]]), math.sqrt(0.75)
    found = oracles.reinforce_pp_baseline(case, [1.0, 3.0], unbiased=False, eps=0.0)
    assert rows_close(found, [[-1.5 / s], [0.5 / s] * 3])


def test_kl_estimators() -> None:
    # d = ln 2: k1 = ln 2, k2 = (ln 2)^2 / 2, k3 = 1/2 - 1 + ln 2. The ratio is 3.
    assert close(oracles.kl_estimate(-LN2, -2 * LN2, "k1"), 0.6931471805599453)
    assert close(oracles.kl_estimate(-LN2, -2 * LN2, "k2"), 0.2402265069591007)
    assert close(oracles.kl_estimate(-LN2, -2 * LN2, "k3"), 0.1931471805599453)
    assert close(
        oracles.weighted_kl_estimate(-LN2, -LN2 - LN3, -2 * LN2, "k3"), 3 * 0.1931471805599453
    )


def test_kl_rows_skip_what_was_not_sampled() -> None:
    case = case_of(
        [[True, False], []],
        logprobs=[[-1.0, -1.0], []],
        old=[[-1.0 - LN2, 0.0], []],
        ref=[[-3.0, -3.0], []],
    )
    assert rows_close(oracles.kl_rows(case, "k1"), [[2, 0], []])
    assert rows_close(oracles.kl_rows(case, "k2", weighted=True), [[4, 0], []])  # 2 * 2^2/2


def test_the_outcome_lands_on_the_last_sampled_token() -> None:
    # k1 = -1 - (-3) = 2 where sampled, coefficient 1/4: -1/2. Outcomes 7, 8, 9; the last two rows have nowhere to put theirs.
    case = case_of(HOLES, old=[[-1.0] * 5, [], [-1.0] * 2], ref=[[-3.0] * 5, [], [-3.0] * 2])
    found = oracles.token_rewards(case, [7.0, 8.0, 9.0], kl_coef=0.25, kind="k1")
    assert found == [[-0.5, 0.0, -0.5, 6.5, 0.0], [], [0.0, 0.0]]
    clipped = oracles.token_rewards(
        case, [7.0, 8.0, 9.0], kl_coef=0.25, kind="k1", reward_clip=(-5.0, 5.0)
    )
    assert clipped == [[-0.5, 0.0, -0.5, 4.5, 0.0], [], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (60, 0.0), (70, -0.25), (90, -0.75), (100, -1.0), (101, -1.0)]
)
def test_the_overlong_penalty_falls_over_the_buffer(length: int, penalty: float) -> None:
    # L_max 100, buffer 40: from 60 on (60 - l) / 40
    assert oracles.overlong_penalty(length, 100, 40) == penalty
    assert oracles.overlong_penalty(length, 100, 40, factor=2.0) == 2 * penalty
    assert oracles.overlong_penalty(length, 100, 0) == (-1.0 if length > 100 else 0.0)


def test_the_adaptive_controller_moves_at_most_a_fifth() -> None:
    assert close(oracles.adaptive_kl(0.5, 0.11, 0.1, 10, 100), 0.505)  # error 0.1, * 10/100 = 0.01
    assert close(oracles.adaptive_kl(0.5, 9.0, 0.1, 10, 100), 0.51)  # error bounded by 0.2
    assert close(oracles.adaptive_kl(0.5, 0.0, 0.1, 10, 100), 0.49)


def test_ppo_in_every_quadrant() -> None:
    # ratios 1/2, 1, 2, clip to [0.8, 1.3]; A = 2: -min(1, 1.6), -2, -min(4, 2.6); A = -2: -min(-1, -1.6), 2, -min(-4, -2.6)
    case = tokens([0.5, 1.0, 2.0])
    assert rows_close(oracles.ppo(case, [[2.0] * 3], 0.2, 0.3), [[-1, -2, -2.6]])
    assert rows_close(oracles.ppo(case, [[-2.0] * 3], 0.2, 0.3), [[1.6, 2, 4]])
    assert rows_close(oracles.ppo(case, [[0.0] * 3], 0.2, 0.3), [[0, 0, 0]])


def test_ppo_has_no_gradient_where_it_is_clipped() -> None:
    # d(-rA)/d logprob = -rA: A=2: -1, -2, none at ratio 2; A=-2: none at ratio 1/2, 2, 4
    case = tokens([0.5, 1.0, 2.0]).with_leaves("logprobs")
    assert rows_close(
        gradients(sum(oracles.ppo(case, [[2.0] * 3], 0.2, 0.3)[0]), case.logprobs), [[-1, -2, 0]]
    )
    assert rows_close(
        gradients(sum(oracles.ppo(case, [[-2.0] * 3], 0.2, 0.3)[0]), case.logprobs), [[0, 2, 4]]
    )


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    # ratio 5, A = -2: 10, bounded by 3 * 2 = 6; ratio 2: 4; A = 2 is untouched: -min(10, 2.6)
    case = tokens([5.0, 2.0, 5.0]).with_leaves("logprobs")
    rows = oracles.ppo(case, [[-2.0, -2.0, 2.0]], 0.2, 0.3, dual=3.0)
    assert rows_close(rows, [[6, 4, -2.6]])
    assert rows_close(gradients(sum(rows[0]), case.logprobs), [[0, 4, 0]])


def test_a_ratio_cap_bounds_both_sides() -> None:
    # ratio 5 capped at 4: A = -2: -min(-8, -2.6) = 8; A = 2: -min(8, 2.6)
    case = tokens([5.0, 2.0, 5.0]).with_leaves("logprobs")
    rows = oracles.ppo(case, [[-2.0, -2.0, 2.0]], 0.2, 0.3, ratio_cap=4.0)
    assert rows_close(rows, [[8, 4, -2.6]])
    assert rows_close(gradients(sum(rows[0]), case.logprobs), [[0, 4, 0]])


def test_unclipped_and_reinforce() -> None:
    case = tokens([0.5, 2.0])  # log-probs ln 1/16, ln 1/4
    assert rows_close(oracles.unclipped(case, [[2.0, -3.0]]), [[-1, 6]])
    # -2 * -4 ln 2; 3 * -2 ln 2.
    assert rows_close(oracles.reinforce(case, [[2.0, -3.0]]), [[8 * LN2, -6 * LN2]])


def test_cispo_weighs_the_log_prob_by_a_bounded_ratio() -> None:
    # ratios 1/2, 1, 2, 8 -> 0.8, 1, 1.3, 1.3; log-probs -4, -3, -2, 0 times ln 2; A = 1
    case = tokens([0.5, 1.0, 2.0, 8.0]).with_leaves("logprobs")
    rows = oracles.cispo(case, [[1.0] * 4], 0.2, 0.3)
    assert rows_close(rows, [[3.2 * LN2, 3 * LN2, 2.6 * LN2, 0]])
    assert rows_close(gradients(sum(rows[0]), case.logprobs), [[-0.8, -1, -1.3, -1.3]])


def test_the_absolute_cispo_variant_bounds_from_above_only() -> None:
    case = tokens([0.5, 1.0, 2.0, 8.0]).with_leaves("logprobs")
    rows = oracles.cispo_absolute(case, [[-1.0] * 4], 5.0)
    assert rows_close(gradients(sum(rows[0]), case.logprobs), [[0.5, 1, 2, 5]])


def test_cpgd_clips_the_log_ratio() -> None:
    # log-ratios -ln 2, 0, ln 2; ln 0.8 = -0.2231435513142097, ln 1.3 = 0.26236426446749106
    # A = 2: -2 min(d, clip d): 2 ln 2, 0, -2 ln 1.3; A = -2: 2 max(d, clip d): 2 ln 0.8, 0, 2 ln 2
    case = tokens([0.5, 1.0, 2.0]).with_leaves("logprobs")
    up, down = oracles.cpgd(case, [[2.0] * 3], 0.2, 0.3), oracles.cpgd(case, [[-2.0] * 3], 0.2, 0.3)
    assert rows_close(up, [[2 * LN2, 0, -0.5247285289349821]])
    assert rows_close(down, [[-0.4462871026284194, 0, 2 * LN2]])
    assert rows_close(gradients(sum(up[0]), case.logprobs), [[-2, -2, 0]])
    assert rows_close(gradients(sum(down[0]), case.logprobs), [[0, 2, 2]])


def test_cpgd_on_log_probs_differs_by_a_constant() -> None:
    # -A log pi_old = -2 * -3 ln 2 = 6 ln 2 more, the same gradient
    case = tokens([0.5, 1.0, 2.0]).with_leaves("logprobs")
    for a in (2.0, -2.0):
        ours, theirs = (
            oracles.cpgd(case, [[a] * 3], 0.2, 0.3),
            oracles.cpgd_of_logprobs(case, [[a] * 3], 0.2, 0.3),
        )
        assert rows_close(theirs, [[x + 3 * a * LN2 for x in ours[0]]])
        assert rows_close(
            gradients(sum(ours[0]), case.logprobs), gradients(sum(theirs[0]), case.logprobs)
        )


def test_sapo_gates_softly() -> None:
    # r = 1: sigmoid(0) = 1/2: -A * 2/tau, gradient -A r 4 s(1-s) = -A. r = 2, tau 1: sigmoid(1) = 0.7310585786300049
    case = tokens([1.0, 2.0, 1.0]).with_leaves("logprobs")
    rows = oracles.sapo(case, [[3.0, 1.0, -3.0]], tau_pos=1.0, tau_neg=1.5)
    assert rows_close(rows, [[-6, -4 * 0.7310585786300049, 4]])
    # second: -4 * 2 * 0.7310585786300049 * 0.2689414213699951 = -1.5728954659318548
    assert rows_close(gradients(sum(rows[0]), case.logprobs), [[-3, -1.5728954659318548, 3]])


def two_and_one(masked: bool = False) -> Case:
    """Response 0 has ratios 2 and 8 (geometric mean 4), response 1 ratio 1/2."""
    mask = [[True, False, True], [True]] if masked else [[True, True, True], [True]]
    return case_of(mask, logprobs=[[LN2, 99.0, 3 * LN2], [-LN2]])


def test_gspo_uses_the_geometric_mean_of_the_ratios() -> None:
    # s = 4, 1/2; A = 1, -1: wide clip: -4 on both tokens, 1/2. Clip to [0.8, 1.3]: -min(4, 1.3), -min(-1/2, -0.8) = 0.8
    case = two_and_one(masked=True).with_leaves("logprobs")
    wide = oracles.gspo(case, [1.0, -1.0], 0.9, 9.0)
    assert rows_close(wide, [[-4, 0, -4], [0.5]])
    assert rows_close(oracles.gspo(case, [1.0, -1.0], 0.2, 0.3), [[-1.3, 0, -1.3], [0.8]])
    # mean over 2 responses of -s A: d/d logprob = -s A / l / 2 = -1, 0, -1 | 1/4
    found = gradients(oracles.aggregate_sequence(case, wide), case.logprobs)
    assert rows_close(found, [[-1, 0, -1], [0.25]])


def test_gspo_by_token_has_the_value_and_gradient_of_gspo() -> None:
    case = two_and_one(masked=True).with_leaves("logprobs")
    by_token = oracles.gspo_token(case, oracles.on_sampled(case, [1.0, -1.0]), 0.9, 9.0)
    assert rows_close(by_token, [[-4, 0, -4], [0.5]])
    assert rows_close(
        gradients(oracles.aggregate_sequence(case, by_token), case.logprobs), [[-1, 0, -1], [0.25]]
    )


def test_gmpo_clips_each_log_ratio_before_the_mean() -> None:
    # log2-ratios 1, 3 clipped to [-1, 2] ln 2, A = 2: exp(mean(1, 2) ln 2) = 2^1.5: -2 * 2^1.5. Ratio 1/2, A = -3: 1.5
    case = two_and_one(masked=True).with_leaves("logprobs")
    rows = oracles.gmpo(case, [2.0, -3.0], LN2, 2 * LN2)
    assert rows_close(rows, [[-5.656854249492381, 0, -5.656854249492381], [1.5]])
    # the clipped token has no gradient; the other half of the loss: -2 * 2^1.5 / 2 (tokens) / 2 (responses)
    found = gradients(oracles.aggregate_sequence(case, rows), case.logprobs)
    assert rows_close(found, [[-1.4142135623730951, 0, 0], [0.75]])


def test_gmpo_bounds_only_the_side_that_the_advantage_pushes_to() -> None:
    # A < 0: max(d, clip d): 1 and 3 stay 1 and 3: exp(2 ln 2) = 4. Ratio 1/2 with A > 0 stays, with A < 0 goes to the bound 0.8.
    case, low = two_and_one(masked=True), -math.log(0.8)
    assert rows_close(oracles.gmpo(case, [-1.0, 1.0], low, low), [[4, 0, 4], [-0.5]])
    assert close(oracles.gmpo(case, [0.0, -1.0], low, low)[1][0], 0.8)
    assert rows_close(oracles.gmpo(case, [0.0, 0.0], low, low), [[0, 0, 0], [0]])


def test_the_value_loss_takes_the_worse_of_both() -> None:
    # V_old 0, eps 1/2, targets 1, 1, 1, 1, -2, -2: V = 2 -> 1/2: max(1, 1/4)/2; V = -2 -> -1/2: max(9, 9/4)/2;
    # V = 1 -> 1/2: max(0, 1/4)/2; V = 1/4 stays: (3/4)^2/2; V = -2 -> -1/2: max(0, 9/4)/2; V = -1/4 stays: (7/4)^2/2
    case = case_of(
        [[True] * 6 + [False]], values=[[2.0, -2.0, 1.0, 0.25, -2.0, -0.25, 9.0]]
    ).with_leaves("values")
    old, targets = [[0.0] * 7], [[1.0] * 4 + [-2.0] * 3]
    rows = oracles.value_loss(case, old, targets, 0.5)
    assert rows_close(rows, [[0.5, 4.5, 0.125, 0.28125, 1.125, 1.53125, 0]])
    # V - target, none where clipped
    assert rows_close(gradients(sum(rows[0]), case.values), [[1, -3, 0, -0.75, 0, 1.75, 0]])
    assert rows_close(
        oracles.value_loss(case, old, targets, None), [[0.5, 4.5, 0, 0.28125, 0, 1.53125, 0]]
    )


# Losses 1, 3 | 8 | - | 5 (masked) | 2 in prompts 0, 1, 0, 2, 0
RAGGED = case_of([[True, False, True], [True], [], [False], [True]], [0, 1, 0, 2, 0])
LOSSES: Rows = [[1.0, 99.0, 3.0], [8.0], [], [5.0], [2.0]]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token", 14 / 4),  # (1+3+8+2) / 4
        ("sequence", 4.0),  # (2 + 8 + 2) / 3
        ("sequence_sum", 14 / 3),  # (4 + 8 + 2) / 3
        ("constant", 0.28),  # 14 / (5 * 10)
        ("prompt", 5.0),  # ((1+3+2)/3 + 8) / 2
    ],
)
def test_aggregation(mode: str, expected: float) -> None:
    assert close(oracles.aggregate(RAGGED, LOSSES, mode, max_length=10), expected)


@pytest.mark.parametrize("mode", ["token", "sequence", "sequence_sum", "constant", "prompt"])
def test_a_batch_without_a_sampled_token_has_no_loss(mode: str) -> None:
    assert oracles.aggregate(case_of([[False], []]), [[7.0], []], mode, max_length=10) == 0.0


def test_kl_gradients_in_closed_form() -> None:
    # pi = (1/2, 1/2), ref = (1/4, 3/4): log ratios ln 2, ln 2/3; KL = (ln 2 + ln 2/3)/2 = ln(4/3)/2 = 0.14384103622589045
    # reverse: 1/2 (ln 2 - KL) = ln(3)/4; forward: 1/2 - 1/4
    logits, ref = [0.0, 0.0], [0.0, LN3]
    assert close(dist.kl_divergence([0.5, 0.5], [0.25, 0.75]), 0.14384103622589045)
    assert close(dist.reverse_kl_gradient(logits, ref), [LN3 / 4, -LN3 / 4])
    assert close(dist.forward_kl_gradient(logits, ref), [0.25, -0.25])


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(*[st.floats(-2, 2)] * 3), min_size=3, max_size=4))
def test_kl_gradients_by_enumeration(rows: list[tuple[float, float, float]]) -> None:
    logits, ref_logits, sampler_logits = ([r[k] for r in rows] for k in range(3))
    ref, sampler = dist.log_softmax(ref_logits), dist.log_softmax(sampler_logits)

    def in_loss(kind: str) -> list[float]:
        return dist.enumerated_gradient(logits, lambda y, lp: oracles.kl_estimate(lp, ref[y], kind))

    def off_policy() -> list[float]:
        return dist.enumerated_gradient(
            logits,
            lambda y, lp: oracles.weighted_kl_estimate(lp, sampler[y], ref[y], "k3"),
            dist.softmax(sampler_logits),
        )

    found = {
        "k1_in_loss": in_loss("k1"),
        "k2_in_loss": in_loss("k2"),
        "k3_in_loss": in_loss("k3"),
        # the reward -k1 as the advantage of REINFORCE: the loss is k1 log pi
        "k1_in_reward": dist.enumerated_gradient(
            logits, lambda y, lp: float(lp.detach() - ref[y]) * lp
        ),
        "weighted_k3_in_loss": off_policy(),
    }
    for name, gradient in found.items():
        assert gradient == pytest.approx(
            dist.EXPECTED_KL_GRADIENT[name](logits, ref_logits), abs=1e-10
        ), name


def test_log_softmax_with_temperature_and_cap() -> None:
    # logits ln 1, ln 3 -> 1/4, 3/4; at temperature 1/2 squared: 1/10, 9/10
    assert close(dist.softmax([0.0, LN3]), [0.25, 0.75])
    assert close(dist.softmax([0.0, LN3], temperature=0.5), [0.1, 0.9])
    assert close(dist.log_softmax([0.0, 2000.0]), [-2000, 0])
    # cap c: c tanh(x/c) with x/c = ln 3: tanh = (9-1)/(9+1) = 0.8; c = ln 3 / 0.8 gives back ln 3
    cap = LN3 / 0.8
    assert close(dist.softmax([0.0, cap * LN3], softcap=cap), [0.25, 0.75])
    # The cap comes before the temperature.
    assert close(dist.softmax([0.0, cap * LN3], temperature=0.5, softcap=cap), [0.1, 0.9])


def test_entropy_in_nats() -> None:
    # -(1/4 ln 1/4 + 3/4 ln 3/4) = 2 ln 2 - 3/4 ln 3
    assert close(dist.entropy([0.0, LN3]), 0.5623351446188083)
    assert close(dist.entropy([5.0] * 8), 3 * LN2)
    assert close(dist.entropy([0.0, LN3 / 2], temperature=0.5), 0.5623351446188083)


FIVE = [math.log(p) for p in (0.1, 0.4, 0.2, 0.05, 0.25)]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.05, 0.25]),
        ({"top_k": 2}, [0, 8 / 13, 0, 0, 5 / 13]),  # .4, .25 of .65
        ({"top_p": 0.6}, [0, 8 / 13, 0, 0, 5 / 13]),  # .4 + .25 is the first sum >= .6
        ({"top_p": 0.3}, [0, 1, 0, 0, 0]),
        ({"min_p": 0.3}, [0, 8 / 17, 4 / 17, 0, 5 / 17]),  # at least .12
        # .4/.85 + .25/.85 = .7647 (of all: .65 would not do)
        (
            {"top_k": 3, "top_p": 0.7},
            [0, 8 / 13, 0, 0, 5 / 13],
        ),
        ({"top_p": 0.7}, [0, 8 / 17, 4 / 17, 0, 5 / 17]),
        ({"temperature": 0.5, "top_k": 2}, [0, 64 / 89, 0, 0, 25 / 89]),  # .16, .0625
        # .04/.16 = .25 falls, .0625/.16 = .39 stays.
        (
            {"temperature": 0.5, "min_p": 0.3},
            [0, 64 / 89, 0, 0, 25 / 89],
        ),
        ({"temperature": 0.0, "top_p": 0.1}, [0, 1, 0, 0, 0]),
        ({"top_k": 9}, [0.1, 0.4, 0.2, 0.05, 0.25]),
    ],
)
def test_sampling_filters(filters: dict[str, Any], expected: list[float]) -> None:
    assert close(dist.sampling_distribution(FIVE, **filters), expected)


def test_equal_probabilities_are_taken_in_order() -> None:
    assert dist.keep_top_p([0.25, 0.25, 0.25, 0.25], 0.5) == [0.5, 0.5, 0.0, 0.0]
    assert dist.keep_top_k([0.125, 0.25, 0.375, 0.25], 2) == [0.0, 0.4, 0.6, 0.0]
    assert dist.sampling_distribution([1.0, 3.0, 3.0], temperature=0.0) == [0.0, 1.0, 0.0]


def test_the_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones_once() -> None:
    assert dist.penalize_repetition([2.0, -2.0, 4.0, -4.0], [0, 1, 0], 2.0) == [
        1.0,
        -4.0,
        4.0,
        -4.0,
    ]
    # it comes before the temperature: (2/2) * 2 = 2 and 1 * 2 = 2 are equal
    assert close(
        dist.sampling_distribution([2.0, 1.0], [0], repetition_penalty=2.0, temperature=0.5),
        [0.5, 0.5],
    )
    assert dist.sampling_distribution([3.0, 2.0], [0], repetition_penalty=2.0, temperature=0.0) == [
        0.0,
        1.0,
    ]


@pytest.mark.parametrize(
    ("warmup", "total", "steps"),
    [(0.0, 10, 0), (0.25, 10, 3), (0.1, 30, 3), (0.5, 4, 2), (7.0, 10, 7)],
)
def test_warm_up_is_a_share_or_a_number_of_steps(warmup: float, total: int, steps: int) -> None:
    assert dist.warmup_steps(warmup, total) == steps


@pytest.mark.parametrize(
    ("schedule", "ramp_first", "decay_first", "expected"),
    [
        # 2 of 6 steps warm up; progress 0, 1/4, 1/2, 3/4; floor 1/5 of 10: linear 10 - 8 p; cosine 2 + 4 (1 + cos pi p)
        ("constant", 1, 0, [5, 10, 10, 10, 10, 10]),
        ("linear", 1, 0, [5, 10, 10, 8, 6, 4]),
        ("linear", 1, 1, [5, 10, 8, 6, 4, 2]),
        ("linear", 0, 0, [0, 5, 10, 8, 6, 4]),
        ("cosine", 1, 0, [5, 10, 10, 6 + 2 * math.sqrt(2), 6, 6 - 2 * math.sqrt(2)]),
        ("cosine", 1, 1, [5, 10, 6 + 2 * math.sqrt(2), 6, 6 - 2 * math.sqrt(2), 2]),
    ],
)
def test_learning_rates(
    schedule: str, ramp_first: int, decay_first: int, expected: list[float]
) -> None:
    found = [
        dist.learning_rate(k, 6, 10.0, schedule, 2.0, 0.2, ramp_first, decay_first)
        for k in range(6)
    ]
    assert close(found, expected)
    assert close(
        dist.learning_rate(50, 6, 10.0, schedule, 2.0, 0.2), 10.0 if schedule == "constant" else 2.0
    )


def test_a_run_of_one_step_learns_at_the_full_rate() -> None:
    assert dist.learning_rate(0, 1, 10.0, "cosine", 0.0, 0.1) == 10.0


@settings(deadline=None)
@given(cases_with_scores())
def test_every_policy_loss_on_policy_has_the_plain_policy_gradient(
    drawn: tuple[Case, list[float]],
) -> None:
    case, scores = drawn
    case.old = case.logprobs
    case = case.with_leaves("logprobs")
    rows = oracles.on_sampled(case, scores)
    found = {
        "ppo": oracles.ppo(case, rows, 0.2, 0.28, dual=3.0, ratio_cap=4.0),
        "unclipped": oracles.unclipped(case, rows),
        "reinforce": oracles.reinforce(case, rows),
        "cispo": oracles.cispo(case, rows, 0.2, 0.28),
        "cispo_absolute": oracles.cispo_absolute(case, rows, 5.0),
        "cpgd": oracles.cpgd(case, rows, 0.2, 0.28),
        "sapo": oracles.sapo(case, rows, 1.0, 1.05),
        "gspo": oracles.gspo(case, scores, 3e-4, 4e-4),
        "gspo_token": oracles.gspo_token(case, rows, 3e-4, 4e-4),
        "gmpo": oracles.gmpo(case, scores, 0.4, 0.4),
    }
    counted = max(1, sum(1 for i in range(len(case)) if case.sampled(i)))
    plain = [
        [-a / max(1, len(case.sampled(i))) / counted for a in row] for i, row in enumerate(rows)
    ]
    for name, losses in found.items():
        gradient = gradients(oracles.aggregate_sequence(case, losses), case.logprobs)
        assert oracles.flat(gradient) == pytest.approx(oracles.flat(plain), abs=1e-12), name


@settings(deadline=None)
@given(cases(), st.data())
def test_cases_are_consistent_and_become_batches(case: Case, data: st.DataObject) -> None:
    per_token = (case.mask, case.logprobs, case.old, case.behavior, case.ref, case.values)
    assert all([len(row) for row in rows] == case.lengths for rows in per_token)
    assert sorted(set(case.prompt_of)) == list(range(max(case.prompt_of) + 1))
    assert all(
        abs(a - b) <= 20
        for p, q in zip(case.logprobs, case.old, strict=True)
        for a, b in zip(p, q, strict=True)
    )
    batch = batch_of(case)
    assert batch.lengths.tolist() == case.lengths
    assert batch.mask.tolist() == [m for row in case.mask for m in row]
    parts = data.draw(partitions(len(case)))
    assert sorted(i for part in parts for i in part) == list(range(len(case)))
    assert all(parts)


def test_corner_cases_become_batches() -> None:
    assert [batch_of(case).tokens for case in corner_cases()] == [
        sum(case.lengths) for case in corner_cases()
    ]
