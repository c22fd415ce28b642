"""The oracles of preference learning against numbers worked out by hand, and against each other."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from mpmath import mp, mpf

from tests.numbers import oracles_preference as losses
from tests.numbers.exact import (
    absolute,
    constant,
    evaluate,
    gradient,
    log_sigmoid,
    order,
    positive_part,
    sigmoid,
)
from tests.numbers.test_oracles_by_hand import LN2, close, rows_close


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# Every loss at policy = reference, beta = 0.1. The options: label smoothing 0.1, no margin, ...

SAME = (-7.0, -3.0, -7.0, -3.0, 5, 5, 0.1)
IDENTITIES: list[tuple[str, dict[str, Any], float]] = [
    ("sigmoid", {}, LN2),
    ("cdpo", {"label_smoothing": 0.1}, LN2),
    ("robust", {"label_smoothing": 0.1}, LN2),
    ("hinge", {}, 1.0),
    ("ipo", {}, 25.0),
    ("ipo_sum", {}, 25.0),
    # Both halves: ln 1/2 - (ln 0.9 + ln 0.1) / 2.
    ("exo", {"label_smoothing": 0.1}, -LN2 - math.log(0.09) / 2),
    ("nca", {}, 2 * LN2),
    ("bco_pair", {}, 2 * LN2),
    ("sppo_hard", {}, 50.0),
    ("apo_zero", {}, 1.0),
    ("apo_down", {}, 1.0),
    ("discopop", {}, 0.8465735902799727),
    ("sigmoid_norm", {}, LN2),
    ("dpop", {}, LN2),
    ("tdpo", {"kw": 0.0, "kl": 0.0}, LN2),
    ("tdpo2", {"kw": 0.0, "kl": 0.0}, LN2),
    ("cal_dpo", {}, 50 + LN2),
    ("r_dpo", {"alpha": 0.3}, LN2),
    ("odpo", {"gap": 1.0}, LN2),
    ("mdpo", {"corrupted": -4.0, "corrupted_ref": -4.0}, 3 * LN2),
]


@pytest.mark.parametrize(("name", "options", "expected"), IDENTITIES, ids=lambda x: str(x)[:20])
def test_a_loss_at_the_reference_has_its_known_value(
    name: str, options: dict[str, Any], expected: float
) -> None:
    found = evaluate(lambda: losses.PAIR_LOSSES[name](*SAME, **options), [])
    assert close(found, expected)


def test_every_loss_with_a_reference_has_an_identity() -> None:
    without = {"simpo", "cpo", "alphapo", "orpo", "tpo"}
    assert {name for name, _, _ in IDENTITIES} == set(losses.PAIR_LOSSES) - without


def test_labelled_and_ranked_losses_at_the_reference() -> None:
    for desirable in (True, False):
        assert close(float(losses.kto(-2, -2, desirable, 0, 0.1)), 0.5)
        assert close(float(losses.apo_zero_unpaired(-2, -2, desirable, 0.1)), 0.5)
        assert close(float(losses.bco(-2, -2, desirable, 0, 0.1)), LN2)
    # Every one of 4! orders is as probable.
    assert close(
        evaluate(lambda: losses.plackett_luce([0, 0, 0, 0], [3, 1, 4, 2]), []), math.log(24)
    )


# Literals. dw = 1, dl = -1, margin 2, beta 1/2: the logit is 1, the rewards are 1/2 and -1/2

PAIR = (-4.0, -6.0, -5.0, -5.0, 2, 4, 0.5)
BY_HAND: list[tuple[str, dict[str, Any], float]] = [
    ("sigmoid", {}, 0.3132616875182228),
    ("sigmoid", {"label_smoothing": 0.25}, 0.75 * softplus(-1) + 0.25 * softplus(1)),
    ("cdpo", {"label_smoothing": 0.25}, 0.5632616875182228),
    # (3/4 softplus(-1) - 1/4 softplus(1)) / (1/2), softplus(1) = softplus(-1) + 1.
    ("robust", {"label_smoothing": 0.25}, 0.3132616875182228 - 0.5),
    ("hinge", {}, 0.0),
    # 1/2 + 1/4 - 1.
    ("ipo", {}, 1 / 16),
    ("ipo_sum", {}, 1.0),
    (
        "exo",
        {"label_smoothing": 0.25},
        logistic(1) * math.log(logistic(1) / 0.75) + logistic(-1) * math.log(logistic(-1) / 0.25),
    ),
    # softplus(-1/2) + softplus(1/2) / 2 + softplus(-1/2) / 2.
    ("nca", {}, 1.5 * softplus(-0.5) + 0.5 * softplus(0.5)),
    ("bco_pair", {}, 2 * softplus(-0.5)),
    # The shifted rewards are 1/4 and -3/4.
    ("bco_pair", {"shift": 0.25}, softplus(-0.25) + softplus(-0.75)),
    # The targets are 1 and -1.
    ("sppo_hard", {}, 0.0),
    ("apo_zero", {}, 2 * logistic(-0.5)),
    ("apo_down", {}, logistic(0.5) + logistic(-1)),
    ("discopop", {"tau": 1.0}, softplus(-1) * logistic(-1) + math.exp(-1) * logistic(1)),
    ("discopop", {}, softplus(-1) * logistic(-20) + math.exp(-1) * logistic(20)),
    # 1/2 (1/2 + 1/4).
    ("sigmoid_norm", {}, softplus(-3 / 8)),
    # The chosen response gained: no penalty.
    ("dpop", {"weight": 3}, softplus(-1)),
    ("cal_dpo", {}, softplus(-2)),
    # 1 + 0.1 (2 - 4): the chosen response is the shorter one.
    ("r_dpo", {"alpha": 0.1}, softplus(-0.8)),
    ("odpo", {"gap": math.e, "alpha": 0.5}, softplus(-0.5)),
    ("odpo", {"gap": math.e}, softplus(0)),
    ("odpo", {"gap": 3.0, "alpha": 0.5, "scale": "linear"}, softplus(0.5)),
    # Given the corrupted image the log-ratio is -3: 1/2 (1 + 3) = 2. The anchor: 1/2 - 1/4.
    (
        "mdpo",
        {"corrupted": -9.0, "corrupted_ref": -6.0, "anchor": 0.25},
        softplus(-1) + softplus(-2) + softplus(-0.25),
    ),
    # 1/2 (2 - (3 - 1)) and 1/2 (2 - 1/2 (3 - 1)).
    ("tdpo", {"kw": 1.0, "kl": 3.0}, LN2),
    ("tdpo2", {"kw": 1.0, "kl": 3.0}, softplus(-0.5)),
    # Means -2 and -3/2: 1/2 (-1/2) - 1.
    ("simpo", {"gamma": 1.0}, softplus(1.25)),
    ("simpo", {"gamma": 1.0, "label_smoothing": 0.1}, 0.9 * softplus(1.25) + 0.1 * softplus(-1.25)),
    # Difference 2, NLL 2.
    ("cpo", {"alpha": 0.5}, softplus(-1) + 1),
    ("cpo", {}, softplus(-1) + 2),
    ("cpo", {"alpha": 0, "kind": "hinge"}, 0.0),
    # Means differ by -1/2, the target is 1.
    ("cpo", {"alpha": 0, "kind": "ipo"}, 2.25),
    # p = e^-2 and e^-3/2: 1/2 (1 - e^2 - 1 + e^(3/2)) / 1 - 1.
    (
        "alphapo",
        {"gamma": 1.0, "alpha": 1.0},
        softplus(1 + (math.e**2 - math.e**1.5) / 2),
    ),
    ("tpo", {"pg": -6.0, "ng": 2, "alpha": 0.5}, softplus(-1) + 1.5),
    ("tpo", {"pg": -6.0, "ng": 2}, softplus(-1) + 3),
    ("tpo", {"pg": -6.0, "ng": 2, "alpha": 0.5, "kind": "hinge"}, 1.5),
    ("tpo", {"pg": -6.0, "ng": 2, "alpha": 0.5, "kind": "ipo"}, 2.25 + 1.5),
    (
        "tpo",
        {"pg": -6.0, "ng": 2, "alpha": 0.5, "kind": "length", "gamma": 1.0},
        softplus(1.25) + 1.5,
    ),
]


@pytest.mark.parametrize(("name", "options", "expected"), BY_HAND, ids=lambda x: str(x)[:20])
def test_a_loss_of_a_small_pair_is_the_one_worked_out(
    name: str, options: dict[str, Any], expected: float
) -> None:
    assert close(evaluate(lambda: losses.PAIR_LOSSES[name](*PAIR, **options), []), expected)


def test_dpop_penalises_a_chosen_response_that_lost_probability() -> None:
    # dw = -1, dl = -3: 1/2 (2 - 3 * 1).
    found = evaluate(lambda: losses.dpop(-6, -8, -5, -5, 1, 1, 0.5, weight=3), [])
    assert close(found, softplus(0.5))
    # The default weight: 1/50 (2 - 50).
    assert close(evaluate(lambda: losses.dpop(-6, -8, -5, -5, 1, 1, 0.02), []), softplus(0.96))


def test_the_squares_of_cpo_and_ipo_have_their_minimum_at_half_of_one_over_beta() -> None:
    for name in ("cpo", "ipo", "ipo_sum"):
        options = {"alpha": 0, "kind": "ipo"} if name == "cpo" else {}
        assert float(losses.PAIR_LOSSES[name](-1, -3, 0, 0, 1, 1, 0.25, **options)) == 0.0


def test_orpo_compares_odds() -> None:
    # Mean probabilities 1/2 and 1/4: odds 1 and 1/3, log-ratio ln 3, and NLL ln 2.
    pw, pl = 3 * math.log(0.5), 2 * math.log(0.25)
    found = evaluate(lambda w, u: losses.orpo(w, u, 0, 0, 3, 2, 0.1), [pw, pl])
    assert close(found, LN2 + 0.1 * math.log(4 / 3))


def test_weighted_sums_with_the_nll() -> None:
    assert close(
        evaluate(lambda: losses.mpo(*PAIR), []), 0.8 * softplus(-1) + 0.4 * softplus(-0.5) + 2
    )
    shifted = evaluate(lambda: losses.mpo(*PAIR, weights=(0, 1, 0), shift=0.25), [])
    assert close(shifted, softplus(-0.25) + softplus(-0.75))
    assert close(evaluate(lambda: losses.rpo(*PAIR, dpo_weight=3), []), 3 * softplus(-1) + 2)
    assert close(evaluate(lambda: losses.rpo(*PAIR, nll_weight=3), []), softplus(-1) + 6)
    assert close(float(losses.sft_over_tokens([-4, -2], [2, 4])), 1.0)
    assert close(float(losses.weighted([1, 4], [3, 1])), 7 / 4)


# Batches


def test_aot_pairs_order_statistics() -> None:
    # Policy margins 3, 1 and reference margins 0, 2: 1 over 0 and 3 over 2.
    batch = ([-1.0, -1.0], [-4.0, -2.0], [-3.0, -1.0], [-3.0, -3.0])
    found = evaluate(lambda: losses.aot(*batch, 1, 0.25), [])
    assert close(found, [0.75 * softplus(-1) + 0.25 * softplus(1)] * 2)
    # Chosen ratios 2, 0, rejected ratios -1, 1: 0 over -1 and 2 over 1.
    assert close(evaluate(lambda: losses.aot_unpaired(*batch, 1), []), [softplus(-1)] * 2)


@pytest.mark.parametrize("loss", [losses.aot, losses.aot_unpaired])
def test_aot_of_one_pair_is_dpo(loss: Callable[..., Any]) -> None:
    columns = [[number] for number in PAIR[:4]]
    assert close(evaluate(lambda: loss(*columns, PAIR[-1]), []), [softplus(-1)])


def test_beta_dpo_scales_beta_by_the_lead_of_the_batch() -> None:
    # Gaps 1 and 3. Mean 2, threshold 1, alpha 0.6: beta = 0.5 * 1.6.
    batch = ([1.0, 3.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0])
    found = evaluate(lambda: losses.beta_dpo(*batch, 0.5, 0.6, 1), [])
    assert close(found, [softplus(-0.8), softplus(-2.4)])
    # The paper's gap includes beta: mean 1, so beta stays.
    found = evaluate(lambda: losses.beta_dpo(*batch, 0.5, 0.6, 1, scaled=True), [])
    assert close(found, [softplus(-0.5), softplus(-1.5)])
    # Of the kept pair alone: 0.5 * (1 + 0.6 * 2).
    found = evaluate(lambda: losses.beta_dpo(*batch, 0.5, 0.6, 1, kept=[1]), [])
    assert close(found, [softplus(-3.3)])
    # 0.5 * (1 + 0.6 * (2 - 9)) < 0.
    found = evaluate(lambda: losses.beta_dpo(*batch, 0.5, 0.6, 9), [])
    assert close(found, [softplus(-0.001), softplus(-0.003)])


def test_beta_dpo_has_no_gradient_through_beta() -> None:
    def total(gaps: list[Any]) -> Any:
        zeros = [0, 0]
        return sum(losses.beta_dpo(gaps, zeros, zeros, zeros, 0.5, 0.6, 1))

    found = gradient(total, [[1.0, 3.0]])
    assert rows_close(found, [[-0.8 * logistic(-0.8), -0.8 * logistic(-2.4)]])


def test_the_threshold_and_the_filter_of_beta_dpo() -> None:
    assert close(float(losses.moved_threshold(2, 7)), 2.5)
    assert close(float(losses.beta_dpo_filter_weight(7, 1, 2)), math.exp(-4.5))


# Labelled responses


def test_kto_measures_from_its_reference_point() -> None:
    # Ratio 3, z 1, beta 1/2: the value is sigmoid(1), or sigmoid(-1) of an undesirable response.
    assert close(
        evaluate(lambda: losses.kto(-2, -5, True, 1, 0.5, lambda_d=2), []), 2 * logistic(-1)
    )
    assert close(
        evaluate(lambda: losses.kto(-2, -5, False, 1, 0.5, lambda_u=3), []), 3 * logistic(1)
    )


def test_the_reference_point_is_a_mean_that_is_not_negative_and_has_no_gradient() -> None:
    assert float(losses.reference_point([-1, -2], [-4, -3])) == 2.0
    assert float(losses.reference_point([-4, -3], [-1, -2])) == 0.0
    assert gradient(lambda p: losses.reference_point([p, -2], [-4, -3]), [-1.0]) == [0.0]
    (slope,) = gradient(lambda p: losses.kto(p, -5, True, p + 3, 0.5), [-2.0])
    bend = 0.5 * logistic(1) * logistic(-1)
    assert close(slope, -bend)
    (slope,) = gradient(lambda p: losses.kto(p, -5, False, p + 3, 0.5), [-2.0])
    assert close(slope, bend)


def test_prompts_get_the_response_of_the_next_prompt() -> None:
    assert losses.next_response(4) == [1, 2, 3, 0]
    assert losses.next_response(1) == [0]


def test_single_responses_of_apo_and_bco() -> None:
    # Reward 1/2 (3) = 1.5.
    assert close(float(losses.apo_zero_unpaired(-2, -5, True, 0.5, lambda_d=2)), 2 * logistic(-1.5))
    assert close(float(losses.apo_zero_unpaired(-2, -5, False, 0.5, lambda_u=3)), 3 * logistic(1.5))
    assert close(float(losses.bco(-2, -5, True, 1, 0.5)), softplus(-0.5))
    assert close(float(losses.bco(-2, -5, False, 1, 0.5, weight=4)), 4 * softplus(0.5))
    (slope,) = gradient(lambda p: losses.bco(p, -5, True, p + 3, 0.5), [-2.0])
    assert close(slope, -0.5 * logistic(-0.5))


def test_two_shifts_of_bco() -> None:
    assert float(losses.balanced_shift([6, 0], [1])) == 2.0
    assert float(losses.running_shift([[6, 0], [1, 1, 2]])) == 2.0


# Ranked responses


def test_plackett_luce_multiplies_choices_among_those_that_are_left() -> None:
    # Masses 1, 2, 3 ranked 3, 2, 1: 3/6 * 2/3.
    scores = [0.0, math.log(2), math.log(3)]
    assert close(evaluate(lambda s: losses.plackett_luce(s, [3, 2, 1]), [scores]), math.log(3))
    # The best two are level: 2/3 and 3/4 against the third.
    assert close(evaluate(lambda s: losses.plackett_luce(s, [2, 1, 1]), [scores]), math.log(2))


def test_plackett_luce_of_two_is_dpo() -> None:
    assert close(evaluate(lambda: losses.plackett_luce([0.5, -0.5], [1, 2]), []), softplus(-1))


def test_lipo_weighs_pairs_by_gain_and_place() -> None:
    # Scores 0, 2, 1 are placed 3, 1, 2. Gains of labels 3, 1, 0: 7, 1, 0.
    d1, d2, d3 = 1 / math.log(2), 1 / math.log(3), 1 / math.log(4)
    expected = (
        6 * (d1 - d3) * softplus(2) + 7 * (d2 - d3) * softplus(1) + 1 * (d1 - d2) * softplus(-1)
    )
    assert close(evaluate(lambda: losses.lipo([0, 2, 1], [3, 1, 0]), []), expected)


def test_lipo_ignores_pairs_of_one_label_and_places_equal_scores_in_order() -> None:
    assert float(losses.lipo([0, 2], [1, 1])) == 0.0
    d1, d2, d3 = 1 / math.log(2), 1 / math.log(3), 1 / math.log(4)
    # Labels 0, 1, 1 in places 1, 2, 3.
    expected = ((d1 - d2) + (d1 - d3)) * LN2
    assert close(evaluate(lambda: losses.lipo([0, 0, 0], [0, 1, 1]), []), expected)


# Gradients


def slopes(loss: Callable[..., Any], **options: Any) -> list[float]:
    """d loss / d (pw, pl) at PAIR."""
    _, _, *rest = PAIR
    return gradient(lambda pw, pl: loss(pw, pl, *rest, **options), list(PAIR[:2]))


def test_the_gradient_of_dpo_is_beta_times_the_probability_of_the_wrong_order() -> None:
    assert close(slopes(losses.dpo), [-0.5 * logistic(-1), 0.5 * logistic(-1)])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sigmoid", {}),
        ("cdpo", {"label_smoothing": 0.1}),
        ("robust", {"label_smoothing": 0.1}),
        ("ipo_sum", {}),
        ("exo", {"label_smoothing": 0.1}),
        ("discopop", {}),
        ("r_dpo", {"alpha": 0.1}),
        ("odpo", {"gap": 2.0}),
        ("tdpo", {"kw": 1.0, "kl": 2.0}),
    ],
)
def test_losses_of_the_margin_push_both_responses_alike(name: str, options: dict[str, Any]) -> None:
    chosen, rejected = slopes(losses.PAIR_LOSSES[name], **options)
    assert chosen != 0
    assert close(chosen + rejected, 0.0)


def test_gradients_of_more_losses_in_closed_form() -> None:
    bend = logistic(0.5) * logistic(-0.5)
    assert close(slopes(losses.hinge), [0.0, 0.0])
    assert close(slopes(losses.ipo), [2 * -0.25 / 2, -2 * -0.25 / 4])
    assert close(slopes(losses.apo_zero), [-0.5 * bend, 0.5 * bend])
    assert close(slopes(losses.bco_pair), [-0.5 * logistic(-0.5), 0.5 * logistic(-0.5)])
    # -1/2 (1 - s) + 1/4 s and 1/4 (1 - s), with s = sigmoid of the rewards 1/2 and -1/2.
    nca = [-0.5 * logistic(-0.5) + 0.25 * logistic(0.5), 0.25 * logistic(-0.5)]
    assert close(slopes(losses.nca_pair), nca)
    assert close(slopes(losses.simpo, gamma=0), [-0.25 * logistic(0.25), 0.125 * logistic(0.25)])


def test_dpop_has_no_gradient_of_its_penalty_at_the_reference() -> None:
    found = gradient(lambda pw, pl: losses.dpop(pw, pl, -7, -3, 5, 5, 0.1), [-7.0, -3.0])
    assert close(found, [-0.05, 0.05])
    found = gradient(lambda pw: losses.dpop(pw, -3, -6.5, -3, 5, 5, 0.1, weight=9), [-7.0])
    # d = -1/2 and the penalty 9/2: slope 1 + 9 of the logit -1/2.
    assert close(found, [-0.1 * 10 * logistic(0.5)])


def test_tdpo2_has_no_gradient_through_the_kl_of_the_chosen_response() -> None:
    def loss(kw: Any, kl: Any, kind: Callable[..., Any]) -> Any:
        return kind(*PAIR, kw=kw, kl=kl)

    first = gradient(lambda kw, kl: loss(kw, kl, losses.tdpo), [1.0, 3.0])
    second = gradient(lambda kw, kl: loss(kw, kl, losses.tdpo2), [1.0, 3.0])
    assert close(first, [-0.25, 0.25])
    assert close(second, [0.0, 0.25 * logistic(-0.5)])


def test_the_weights_of_lipo_have_no_gradient() -> None:
    d = 1 / math.log(2) - 1 / math.log(3)
    found = gradient(lambda s: losses.lipo(s, [1, 0]), [[2.0, 1.0]])
    assert rows_close(found, [[-d * logistic(-1), d * logistic(-1)]])


# Relations


def random_pair(rng: random.Random) -> tuple[Any, ...]:
    sums = [-rng.uniform(0.1, 20) for _ in range(4)]
    return (*sums, rng.randint(1, 9), rng.randint(1, 9), rng.uniform(0.05, 2))


@pytest.mark.parametrize("seed", range(5))
def test_special_cases_meet_their_general_forms(seed: int) -> None:
    pair = random_pair(random.Random(seed))
    pw, pl, rw, rl, nw, nl, beta = pair

    def same(one: Callable[[], Any], other: Callable[[], Any], tolerance: float = 1e-12) -> None:
        a, b = evaluate(one, []), evaluate(other, [])
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance)

    same(lambda: losses.robust(*pair, 0), lambda: losses.dpo(*pair))
    same(lambda: losses.cdpo(*pair, 0.5), lambda: losses.cdpo(pl, pw, rl, rw, nl, nw, beta, 0.5))
    same(lambda: losses.odpo(*pair, 0, scale="linear"), lambda: losses.dpo(*pair))
    same(lambda: losses.r_dpo(*pair, 0), lambda: losses.dpo(*pair))
    same(lambda: losses.dpop(*pair, weight=0), lambda: losses.dpo(*pair))
    same(lambda: losses.tdpo2(*pair, 2, 3, alpha=1), lambda: losses.tdpo(*pair, 2, 3))
    same(lambda: losses.ipo(pw, pl, rw, rl, 1, 1, beta), lambda: losses.ipo_sum(*pair))
    same(lambda: losses.sigmoid_norm(pw, pl, rw, rl, 1, 1, beta), lambda: losses.dpo(*pair))
    same(lambda: losses.simpo(pw, pl, 0, 0, 1, 1, beta, 0), lambda: losses.cpo(*pair, alpha=0))
    # The mean log-prob is at most 20, so the second term of the reward is at most alpha 200.
    same(
        lambda: losses.alphapo(*pair, gamma=0.5, alpha=1e-12),
        lambda: losses.alphapo(*pair, gamma=0.5, alpha=0),
        tolerance=1e-8,
    )
    same(
        lambda: losses.plackett_luce([beta * (pl - rl), beta * (pw - rw)], [2, 1]),
        lambda: losses.dpo(*pair),
    )
    same(lambda: losses.discopop(*pair, tau=1e12), lambda: mixed(pair), tolerance=1e-9)


def mixed(pair: tuple[Any, ...]) -> Any:
    """DiscoPOP with the gate at one half: the mean of the logistic and the exponential loss."""
    *numbers, beta = pair
    z = beta * losses.margin(*numbers[:4])
    return (losses.dpo(*pair) + mp.exp(-z)) / 2


def test_exo_is_the_kl_of_the_policys_choice_and_the_label() -> None:
    assert close(evaluate(lambda: losses.exo_pair(*PAIR, logistic(-1)), []), 0.0)


# Modifiers

GENERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "reverse_kl": lambda u, a: u * mp.log(u),
    "forward_kl": lambda u, a: -mp.log(u),
    "js_divergence": lambda u, a: u * mp.log(u) - (u + 1) * mp.log((u + 1) / 2),
    "alpha_divergence": lambda u, a: (u ** (1 - a) - (1 - a) * u - a) / (a * (a - 1)),
}


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("ratio", [-2.0, 0.0, 0.7])
def test_a_score_is_the_derivative_of_the_generator_of_its_divergence(
    kind: str, ratio: float
) -> None:
    with mp.workdps(30):
        slope = lambda u: mp.diff(lambda t: GENERATORS[kind](t, mpf("0.3")), u)  # noqa: E731
        expected = float(slope(mp.exp(ratio)) - slope(1))
    found = evaluate(lambda x: losses.divergence_score(x, kind, mpf("0.3")), [ratio])
    assert close(found, expected)


def test_the_ends_of_the_alpha_divergence_are_the_two_kls() -> None:
    score = losses.divergence_score
    assert float(score(0.7, "alpha_divergence", 0)) == 0.7
    ends = [float(score(0.7, kind, 1)) for kind in ("alpha_divergence", "forward_kl")]
    assert ends[0] == ends[1]
    assert close(evaluate(lambda: score(0.7, "alpha_divergence", mpf("1e-20")), []), 0.7)
    # The default is half way: 2 (1 - u^-1/2), and u = 4.
    assert close(evaluate(lambda: score(mp.log(4), "alpha_divergence"), []), 1.0)


def test_a_divergence_replaces_both_log_ratios() -> None:
    changed = losses.with_divergence(losses.dpo, "forward_kl")
    # 1/2 ((1 - e^-1) - (1 - e)).
    assert close(evaluate(lambda: changed(*PAIR), []), softplus(-(math.e - math.exp(-1)) / 2))
    plain = losses.with_divergence(losses.ipo, "reverse_kl")
    assert close(evaluate(lambda: plain(*PAIR), []), 1 / 16)
    smooth = losses.with_divergence(losses.dpo, "js_divergence")
    found = evaluate(lambda: smooth(*PAIR, label_smoothing=0.5), [])
    z = (softplus(1) - softplus(-1)) / 2
    assert close(found, (softplus(z) + softplus(-z)) / 2)


@pytest.mark.parametrize("kind", GENERATORS)
def test_at_the_reference_no_divergence_depends_on_lengths(kind: str) -> None:
    changed = losses.with_divergence(losses.sigmoid_norm, kind, 0.3)
    assert close(float(changed(-4, -6, -4, -6, 2, 5, 0.5)), LN2)


def test_ld_dpo_counts_the_tokens_past_the_shorter_length_by_alpha() -> None:
    rows = ([-1.0, -2.0], [-1.0, -1.0, -3.0], [-2.0, -2.0], [-2.0, -1.0, -2.0])
    # Chosen ratio 1. Rejected ratio 1 + alpha (-1).
    for alpha in (0.0, 0.5, 1.0):
        found = evaluate(lambda a=alpha: losses.ld_dpo(*rows, 0.5, a), [])
        assert close(found, softplus(-alpha / 2))
    normalised = evaluate(lambda: losses.ld_dpo(*rows, 0.5, 0, loss=losses.sigmoid_norm), [])
    assert close(normalised, softplus(-(1 / 2 - 1 / 3) / 2))
    # The reference's last token counts whole: the rejected ratio is -2 + 5.
    policy_alone = evaluate(lambda: losses.ld_dpo(*rows, 0.5, 0, reference_too=False), [])
    assert close(policy_alone, softplus(1))


def test_sampo_compares_as_many_tokens_of_both_responses() -> None:
    rows = ([-1.0, -2.0], [-1.0, -1.0, -3.0], [-2.0, -2.0], [-2.0, -1.0, -2.0])
    # Tokens 0 and 2 of the rejected response: 1 - 1.
    found = evaluate(lambda: losses.sampo(*rows, [0, 1], [0, 2], 0.5), [])
    assert close(found, softplus(-0.5))
    with pytest.raises(ValueError, match="2 positions"):
        losses.sampo(*rows, [0, 1], [0, 1, 2], 0.5)


def test_the_weight_of_wpo_is_the_probability_over_the_collision_probability() -> None:
    # Probabilities 3/4, 1/4: collision 5/8, ratios 6/5 and 2/5. Uniform: ratio 1.
    peaked, uniform = [math.log(3), 0.0], [0.0, 0.0]
    found = evaluate(lambda: losses.wpo_weight([peaked, uniform], [0, 1], [peaked], [1]), [])
    assert close(found, math.sqrt(6 / 5) * 2 / 5)
    assert close(evaluate(lambda: losses.wpo_weight([peaked], [0], [peaked], [0]), []), 36 / 25)
    assert float(losses.wpo_weight([peaked], [0], [peaked], [0], cap=1)) == 1.0
    assert gradient(lambda row: losses.wpo_weight([row], [0], [peaked], [0]), [peaked]) == [[0, 0]]


def test_sequence_kl_sums_kl_from_the_reference_over_positions() -> None:
    peaked, uniform = [math.log(3), 0.0], [0.0, 0.0]
    # KL((1/2, 1/2), (3/4, 1/4)) = ln(4/3) / 2, and KL the other way = 3/4 ln 3 - ln 2.
    found = evaluate(lambda: losses.sequence_kl([peaked, uniform], [uniform, peaked]), [])
    assert close(found, math.log(4 / 3) / 2 + 0.75 * math.log(3) - LN2)
    assert float(losses.sequence_kl([peaked], [peaked])) == 0.0


def test_tdpo_of_logits_takes_its_sums_and_kls_from_the_same_rows() -> None:
    peaked, uniform = [math.log(3), 0.0], [0.0, 0.0]
    # Chosen token 0 of the peaked policy: ratio ln(3/2), KL ln(4/3) / 2. Rejected: ratio 0, KL 0.
    arguments = ([peaked], [uniform], [uniform], [uniform], [0], [0], 1)
    kl = math.log(4 / 3) / 2
    first = evaluate(lambda: losses.tdpo_of_logits(*arguments, None), [])
    second = evaluate(lambda: losses.tdpo_of_logits(*arguments, 0.5), [])
    assert close(first, softplus(-math.log(1.5) - kl))
    assert close(second, softplus(-math.log(1.5) - kl / 2))


def test_the_reference_moves_towards_the_policy() -> None:
    assert close(float(losses.moved_reference(3, 2)), 2.4)
    assert float(losses.moved_reference(1, 2, 1)) == 2.0


# The arithmetic itself


def test_gradient_keeps_the_shape_of_its_arguments() -> None:
    found = gradient(lambda a, b: a * a * b[0] + mp.exp(b[1][0]), [3.0, [2.0, [0.0]]])
    assert found == [12.0, [9.0, [1.0]]]


def test_constants_conditions_and_orders_stay_at_the_point() -> None:
    assert gradient(lambda x: x * constant(x), [3.0]) == [3.0]
    assert gradient(positive_part, [0.0]) == [0.0]
    assert gradient(positive_part, [1e-30]) == [1.0]
    assert gradient(absolute, [0.0]) == [0.0]
    assert gradient(absolute, [-2.0]) == [-1.0]
    assert gradient(lambda x: x[order(x)[0]], [[1.0, 1.0]]) == [[1.0, 0.0]]
    assert gradient(lambda x: x[order(x, descending=True)[0]], [[1.0, 2.0]]) == [[0.0, 1.0]]


def test_values_far_out_keep_their_digits() -> None:
    assert close(evaluate(log_sigmoid, [-800.0]), -800.0)
    assert evaluate(log_sigmoid, [700.0]) == pytest.approx(-math.exp(-700), rel=1e-12)
    assert evaluate(sigmoid, [-700.0]) == pytest.approx(math.exp(-700), rel=1e-12)
