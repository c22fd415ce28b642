"""Preference losses by hand, where a formula has a case, an option or a bound."""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest
import torch

from lightrft.algorithms.preference.inputs import Pairs, Ranked
from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.algorithms.preference.registry import f_score, logistic
from lightrft.algorithms.validate.component_kinds import COMPONENT_KINDS
from lightrft.config.preference.sections import FDivergenceConfig
from lightrft.utils.errors import ConfigError, DataError
from tests.unit.algorithms.preference.examples import (
    labelled,
    loss_of,
    numbers,
    pair,
    ranked,
    responses,
    settings,
)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


# d_w = 2, d_l = -3, with 4 and 2 tokens
WIDE = pair((-6.0, -8.0, 4.0), (-9.0, -6.0, 2.0))


def test_smoothed_labels_mix_the_loss_of_both_orders() -> None:
    plain, turned = softplus(-0.5), softplus(0.5)
    smooth = settings(label_smoothing=0.25)
    assert loss_of("sigmoid", WIDE, smooth) == pytest.approx([0.75 * plain + 0.25 * turned])
    assert loss_of("robust", WIDE, smooth) == pytest.approx([(0.75 * plain - 0.25 * turned) / 0.5])


def test_the_two_forms_of_ipo_divide_by_tokens_or_not() -> None:
    assert loss_of("ipo", WIDE) == pytest.approx([(2 / 4 + 3 / 2 - 5) ** 2])
    assert loss_of("ipo_sum", WIDE) == pytest.approx([(2 + 3 - 5) ** 2])


def test_hinge_is_zero_beyond_its_margin() -> None:
    assert loss_of("hinge", WIDE) == [0.5]
    assert loss_of("hinge", WIDE, settings(beta=0.25)) == [0.0]


def test_bco_compares_rewards_with_their_running_mean_unless_told_not_to() -> None:
    shifted = dataclasses.replace(WIDE, shift=numbers(0.4)[0])
    expected = softplus(-(0.2 - 0.4)) + softplus(-0.3 - 0.4)
    assert loss_of("bco_pair", shifted) == pytest.approx([expected])
    plain = softplus(-0.2) + softplus(-0.3)
    assert loss_of("bco_pair", shifted, shifted=False) == pytest.approx([plain])
    without = dataclasses.replace(WIDE, shift=None)
    assert loss_of("bco_pair", without) == pytest.approx([plain])


def test_bco_of_single_responses_compares_them_with_the_running_mean() -> None:
    data = labelled([-1.0, -6.0], [-3.0, -3.0], [True, False], shift=numbers(0.4)[0])
    assert loss_of("bco", data) == pytest.approx([softplus(0.4 - 0.2), softplus(-0.3 - 0.4)])
    plain = loss_of("bco", dataclasses.replace(data, shift=None))
    assert plain == pytest.approx([softplus(-0.2), softplus(-0.3)])


def test_kto_takes_a_negative_kl_for_zero_and_weighs_the_labels() -> None:
    data = labelled([-1.0, -6.0], [-3.0, -3.0], [True, False], kl=numbers(-5.0)[0])
    expected = [1 - sigmoid(0.2), 1 - sigmoid(0.3)]
    assert loss_of("kto", data) == pytest.approx(expected)
    weighed = loss_of("kto", data, desirable_weight=2.0, undesirable_weight=0.5)
    assert weighed == pytest.approx([2 * expected[0], expected[1] / 2])
    far = dataclasses.replace(data, kl=numbers(4.0)[0])
    assert loss_of("kto", far) == pytest.approx([1 - sigmoid(-0.2), 1 - sigmoid(0.7)])


def test_discopop_blends_at_its_temperature_and_stays_finite_on_the_wrong_side() -> None:
    z, tau = 0.5, 0.05
    m = sigmoid(z / tau)
    expected = (1 - m) * softplus(-z) + m * math.exp(-z)
    assert loss_of("discopop", WIDE) == pytest.approx([expected])
    wrong = pair((-10_000.0, 0.0, 1.0), (0.0, 0.0, 1.0))
    assert loss_of("discopop", wrong) == pytest.approx([1000.0])


@pytest.mark.parametrize("tau", [-0.5, 0.0, 1.01])
def test_discopop_refuses_a_temperature_out_of_its_range(tau: float) -> None:
    said = rf"discopop: options.tau is {tau}; it must be above 0 and at most 1"
    with pytest.raises(ConfigError, match=said):
        loss_of("discopop", WIDE, tau=tau)


def test_discopop_takes_a_temperature_of_one() -> None:
    m = sigmoid(0.5)
    expected = (1 - m) * softplus(-0.5) + m * math.exp(-0.5)
    assert loss_of("discopop", WIDE, tau=1.0) == pytest.approx([expected])


def test_exo_is_the_kl_from_the_preference_of_the_policy_to_smoothed_labels() -> None:
    right = sigmoid(0.5)
    expected = right * math.log(right / 0.75) + (1 - right) * math.log((1 - right) / 0.25)
    assert loss_of("exo", WIDE, settings(label_smoothing=0.25)) == pytest.approx([expected])


def test_nca_contrasts_the_chosen_reward_with_zero_on_both_sides() -> None:
    expected = softplus(-0.2) + softplus(0.2) / 2 + softplus(-0.3) / 2
    assert loss_of("nca", WIDE) == pytest.approx([expected])


def test_sppo_and_apo_by_hand() -> None:
    assert loss_of("sppo_hard", WIDE) == pytest.approx([(2 - 5) ** 2 + (-3 + 5) ** 2])
    assert loss_of("apo_zero", WIDE) == pytest.approx([1 - sigmoid(0.2) + sigmoid(-0.3)])
    assert loss_of("apo_down", WIDE) == pytest.approx([sigmoid(0.2) + 1 - sigmoid(0.5)])


def test_aot_compares_sorted_margins() -> None:
    data = Pairs(
        chosen=responses([-1.0, -9.0, -4.0], [-2.0, -2.0, -2.0]),
        rejected=responses([-5.0, -5.0, -5.0], [-3.0, -9.0, -4.0]),
    )
    # policy margins 4, -4, 1; reference margins 1, 7, 2
    paired = [softplus(-0.1 * gap) for gap in (-4 - 1, 1 - 2, 4 - 7)]
    assert loss_of("aot", data) == pytest.approx(paired)
    # chosen log-ratios 1, -7, -2; rejected -2, 4, -1
    unpaired = [softplus(-0.1 * gap) for gap in (-7 + 2, -2 + 1, 1 - 4)]
    assert loss_of("aot_unpaired", data) == pytest.approx(unpaired)


def test_simpo_subtracts_its_margin_outside_beta() -> None:
    z = 2.0 * (-6 / 4 + 9 / 2) - 0.5
    assert loss_of("simpo", WIDE, settings(beta=2.0), gamma=0.5) == pytest.approx([softplus(-z)])


def test_alphapo_nears_simpo_at_a_small_power() -> None:
    simpo = loss_of("simpo", WIDE, settings(beta=2.0))
    assert loss_of("alphapo", WIDE, settings(beta=2.0), alpha=0.0) == simpo
    assert loss_of("alphapo", WIDE, settings(beta=2.0), alpha=1e-12) == pytest.approx(simpo)


def test_alphapo_takes_a_power_of_the_mean_probability() -> None:
    def reward(mean: float) -> float:
        return (1 - math.exp(mean) ** -0.25) / 0.25

    z = 2.5 * (reward(-1.5) - reward(-4.5)) - 0.1
    found = loss_of("alphapo", WIDE, settings(beta=2.5), alpha=0.25, gamma=0.1)
    assert found == pytest.approx([softplus(-z)])


@pytest.mark.parametrize(
    ("form", "contrast"),
    [("sigmoid", softplus(-0.3)), ("hinge", 0.7), ("ipo", (-1.5 + 4.5 - 5) ** 2)],
)
def test_cpo_and_tpo_add_a_likelihood_to_each_form_of_contrast(form: str, contrast: float) -> None:
    assert loss_of("cpo", WIDE, form=form, alpha=0.0) == pytest.approx([contrast])
    assert loss_of("cpo", WIDE, form=form) == pytest.approx([contrast + 6 / 4])
    assert loss_of("cpo", WIDE, form=form, alpha=0.5, nll="sum") == pytest.approx([contrast + 3])
    assert loss_of("tpo", WIDE, form=form) == pytest.approx([contrast + 2 / 2])
    assert loss_of("tpo", WIDE, form=form, nll="sum") == pytest.approx([contrast + 2])


def test_length_normalized_tpo_has_a_margin() -> None:
    z = 0.1 * (-1.5 + 4.5) - 0.75
    found = loss_of("tpo", WIDE, form="length_normalized", gamma=0.75, alpha=0.0)
    assert found == pytest.approx([softplus(-z)])


def test_orpo_compares_odds() -> None:
    def log_odds(mean: float) -> float:
        return math.log(math.exp(mean) / (1 - math.exp(mean)))

    gap = log_odds(-1.5) - log_odds(-4.5)
    assert loss_of("orpo", WIDE) == pytest.approx([1.5 + 0.1 * softplus(-gap)])


def test_orpo_keeps_its_digits_near_a_probability_of_one() -> None:
    sure = pair((-1e-9, 0.0, 1.0), (-2.0, 0.0, 1.0))
    # odds of 1e9 - 1/2 against 1 / (e^2 - 1)
    gap = math.log(1e9 - 0.5) + math.log(math.expm1(2.0))
    expected = 0.1 * math.log1p(math.exp(-gap))
    found = loss_of("orpo", sure, alpha=0.0)
    assert found == pytest.approx([expected], rel=1e-9)


@pytest.mark.parametrize("chosen", [0.0, -1e-15])
@pytest.mark.parametrize("rejected", [0.0, -3.0])
def test_orpo_is_finite_at_a_probability_of_one(chosen: float, rejected: float) -> None:
    data = pair((chosen, 0.0, 1.0), (rejected, 0.0, 1.0))
    leaf = data.rejected.logprobs.requires_grad_()
    (loss,) = PREFERENCE_LOSSES["orpo"](data, settings())
    (slope,) = torch.autograd.grad(loss, leaf)
    assert math.isfinite(loss.item())
    assert 0 < float(slope) < math.inf


def test_dpo_positive_penalises_only_a_chosen_response_that_became_unlikely() -> None:
    assert loss_of("dpop", WIDE) == pytest.approx(loss_of("sigmoid", WIDE))
    worse = pair((-10.0, -8.0, 4.0), (-9.0, -6.0, 2.0))
    assert loss_of("dpop", worse, lam=5.0) == pytest.approx([softplus(-0.1 * (1 - 5 * 2))])


def test_tdpo_takes_the_gap_of_kls_off_the_margin() -> None:
    data = dataclasses.replace(
        WIDE,
        chosen=dataclasses.replace(WIDE.chosen, sequence_kl=numbers(1.0)),
        rejected=dataclasses.replace(WIDE.rejected, sequence_kl=numbers(3.0)),
    )
    assert loss_of("tdpo", data) == pytest.approx([softplus(-0.1 * (5 - 2))])
    assert loss_of("tdpo2", data, alpha=0.25) == pytest.approx([softplus(-0.1 * (5 - 0.5))])


@pytest.mark.parametrize(("name", "flows"), [("tdpo", True), ("tdpo2", False)])
def test_the_kl_of_the_chosen_response_has_gradient_in_tdpo_alone(name: str, flows: bool) -> None:
    kl = numbers(1.0).requires_grad_()
    other = numbers(2.0).requires_grad_()
    data = dataclasses.replace(
        WIDE,
        chosen=dataclasses.replace(WIDE.chosen, sequence_kl=kl),
        rejected=dataclasses.replace(WIDE.rejected, sequence_kl=other),
    )
    loss = PREFERENCE_LOSSES[name](data, settings()).sum()
    slopes = torch.autograd.grad(loss, (kl, other), allow_unused=True)
    assert slopes[1] is not None
    assert (slopes[0] is not None) == flows


def test_cal_dpo_regresses_both_log_ratios_and_has_no_beta_in_the_logistic_term() -> None:
    squares = (2 - 5) ** 2 + (-3 + 5) ** 2
    assert loss_of("cal_dpo", WIDE) == pytest.approx([softplus(-5.0) + squares])
    assert loss_of("cal_dpo", WIDE, weight=0.5) == pytest.approx([softplus(-5.0) + squares / 2])


def test_r_dpo_explains_part_of_a_preference_by_length() -> None:
    assert loss_of("r_dpo", WIDE, alpha=0.25) == pytest.approx([softplus(-(0.5 + 0.25 * 2))])


def test_odpo_offsets_by_the_margin_or_its_logarithm() -> None:
    data = dataclasses.replace(WIDE, margin=numbers(4.0))
    assert loss_of("odpo", data) == pytest.approx([softplus(-(0.5 - math.log(4)))])
    linear = loss_of("odpo", data, alpha=0.25, scale="linear")
    assert linear == pytest.approx([softplus(-(0.5 - 1))])


def test_odpo_refuses_a_margin_without_a_logarithm() -> None:
    data = dataclasses.replace(WIDE, margin=numbers(0.0))
    with pytest.raises(DataError, match=r"one is 0; drop pairs .* options.scale: linear"):
        loss_of("odpo", data)
    with pytest.raises(DataError, match=r"one is -2;"):
        loss_of("odpo", dataclasses.replace(WIDE, margin=numbers(1.0, -2.0)))
    assert loss_of("odpo", data, scale="linear") == pytest.approx([softplus(-0.5)])


def test_mdpo_adds_a_comparison_with_corrupted_media_and_an_anchor() -> None:
    data = dataclasses.replace(WIDE, corrupted=responses([-7.0], [-3.0]))
    expected = softplus(-0.5) + softplus(-0.1 * (2 + 4)) + softplus(-(0.2 - 0.05))
    assert loss_of("mdpo", data, anchor=0.05) == pytest.approx([expected])


def batch_of_margins() -> Pairs:
    """Pairs with log-ratio gaps of 10, 0 and 30."""
    return Pairs(
        chosen=responses([-10.0, -20.0, 0.0], [-20.0, -20.0, -30.0]),
        rejected=responses([-20.0] * 3, [-20.0] * 3),
        margin_mean=numbers(1.0)[0],
        margin_std=numbers(2.0)[0],
    )


def test_beta_dpo_moves_beta_by_the_margin_of_the_batch() -> None:
    # margins 1, 0 and 3 with a mean of 4/3
    beta = 0.1 * (1 + 0.6 * (4 / 3 - 1))
    found = loss_of("beta_dpo", batch_of_margins(), filtered=False)
    assert found == pytest.approx([softplus(-beta * gap) for gap in (10, 0, 30)])


def test_beta_dpo_weighs_pairs_by_the_likelihood_of_their_margin() -> None:
    density = [math.exp(-(((m - 1) / 2) ** 2) / 2) for m in (1, 0, 3)]
    weights = [3 * g / sum(density) for g in density]
    mean = (weights[0] * 1 + weights[1] * 0 + weights[2] * 3) / 3
    beta = 0.1 * (1 + 0.6 * (mean - 1))
    expected = [w * softplus(-beta * gap) for w, gap in zip(weights, (10, 0, 30), strict=True)]
    assert loss_of("beta_dpo", batch_of_margins()) == pytest.approx(expected)


def test_beta_and_the_weights_of_beta_dpo_carry_no_gradient() -> None:
    data = batch_of_margins()
    leaf = data.chosen.logprobs.requires_grad_()
    loss = PREFERENCE_LOSSES["beta_dpo"](data, settings(), filtered=False).sum()
    (slope,) = torch.autograd.grad(loss, leaf)
    beta = 0.1 * (1 + 0.6 * (4 / 3 - 1))
    assert slope.tolist() == pytest.approx([-beta * sigmoid(-beta * gap) for gap in (10, 0, 30)])


def test_beta_dpo_of_one_pair_takes_its_margin_for_that_of_the_batch() -> None:
    one = dataclasses.replace(WIDE, margin_mean=numbers(0.25)[0], margin_std=numbers(0.5)[0])
    reward = 0.1 * (1 + 0.6 * (0.5 - 0.25))
    assert loss_of("beta_dpo", one) == pytest.approx([softplus(-reward * 5)])
    log_ratio = 0.1 * (1 + 0.6 * (5 - 0.25))
    found = loss_of("beta_dpo", one, margin="log_ratio")
    assert found == pytest.approx([softplus(-log_ratio * 5)])


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_beta_dpo_weighs_pairs_also_where_margins_hardly_differ(spread: float) -> None:
    data = batch_of_margins()
    data = dataclasses.replace(data, margin_std=numbers(spread)[0])
    found = loss_of("beta_dpo", data, alpha=0.0)
    density = [1.0, 0.0, 0.0]
    if spread:
        density = [math.exp(-(((m - 1) / spread) ** 2) / 2) for m in (1, 0, 3)]
    weights = [3 * g / sum(density) for g in density]
    expected = [w * softplus(-0.1 * gap) for w, gap in zip(weights, (10, 0, 30), strict=True)]
    assert found == pytest.approx(expected)


def test_beta_dpo_can_measure_margins_in_log_ratios_and_keeps_beta_above_its_bound() -> None:
    far = dataclasses.replace(batch_of_margins(), margin_mean=numbers(1000.0)[0])
    found = loss_of("beta_dpo", far, margin="log_ratio", filtered=False)
    assert found == pytest.approx([softplus(-1e-3 * gap) for gap in (10, 0, 30)])


def test_ties_of_a_ranking_do_not_compete() -> None:
    # rewards 0.1 and 0.2 share the first place, above -0.3
    found = loss_of("plackett_luce", ranked([1.0, -3.0, 2.0], [0, 1, 0]))
    expected = softplus(-0.3 - 0.1) + softplus(-0.3 - 0.2)
    assert found == pytest.approx([expected])


def test_a_group_with_one_rank_has_no_loss_and_no_gradient() -> None:
    data = ranked([1.0, -3.0], [0, 0])
    leaf = data.responses.logprobs.requires_grad_()
    loss = PREFERENCE_LOSSES["plackett_luce"](data, settings()).sum()
    (slope,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == 0
    assert slope.tolist() == [0, 0]


def test_groups_of_rankings_are_apart_wherever_their_responses_are() -> None:
    data = ranked([5.0, 1.0, -4.0, 2.0, 0.0], [0, 1, 1, 2, 0], [0, 1, 0, 1, 1])
    first = loss_of("plackett_luce", ranked([5.0, -4.0], [0, 1]))
    second = loss_of("plackett_luce", ranked([1.0, 2.0, 0.0], [1, 2, 0]))
    assert loss_of("plackett_luce", data) == pytest.approx(first + second)


def test_lipo_weighs_pairs_by_the_gain_of_swapping_their_places() -> None:
    # rewards 0.1, 0.3, -0.2: places 2, 1, 3
    data = ranked([1.0, 3.0, -2.0], [0, 1, 2], rating=[1.0, 0.5, 0.0])

    def weight(gain: tuple[float, float], place: tuple[int, int]) -> float:
        discounts = [1 / math.log(1 + t) for t in place]
        return abs(2 ** gain[0] - 2 ** gain[1]) * abs(discounts[0] - discounts[1])

    expected = weight((1.0, 0.5), (2, 1)) * softplus(-(0.1 - 0.3))
    expected += weight((1.0, 0.0), (2, 3)) * softplus(-(0.1 + 0.2))
    expected += weight((0.5, 0.0), (1, 3)) * softplus(-(0.3 + 0.2))
    assert loss_of("lipo", data) == pytest.approx([expected])


def test_lipo_learns_from_a_policy_that_equals_the_reference() -> None:
    data = ranked([0.0, 0.0], [1, 0], rating=[0.0, 1.0])
    weight = (2 - 1) * (1 / math.log(2) - 1 / math.log(3))
    assert loss_of("lipo", data) == pytest.approx([weight * math.log(2)])


def test_lipo_refuses_ratings_whose_gain_overflows() -> None:
    with pytest.raises(DataError, match=r"one is 2000; scale them"):
        loss_of("lipo", ranked([0.0, 1.0], [0, 1], rating=[2000.0, 0.0]))


def test_padded_groups_hold_every_response_once() -> None:
    data = ranked([0.0] * 5, [0] * 5, [1, 0, 1, 1, 0])
    index, real = data.padded()
    assert index.tolist() == [[1, 4, 0], [0, 2, 3]]
    assert real.tolist() == [[True, True, False], [True, True, True]]
    assert len(Ranked(responses([], []), torch.zeros(0).long(), torch.zeros(0).long())) == 0


DEFAULTS = {
    "bco_pair": {"shifted": True},
    "discopop": {"tau": 0.05},
    "simpo": {"gamma": 0.5},
    "alphapo": {"alpha": 0.25, "gamma": 0.5},
    "cpo": {"form": "sigmoid", "alpha": 1.0, "nll": "mean"},
    "orpo": {"alpha": 1.0},
    "tpo": {"form": "sigmoid", "gamma": 0.5, "alpha": 1.0, "nll": "mean"},
    "sft": {"per": "token"},
    "sft_gold": {"per": "token"},
    "dpop": {"lam": 50.0},
    "beta_dpo": {"alpha": 0.6, "margin": "reward", "filtered": True},
    "tdpo2": {"alpha": 0.5},
    "cal_dpo": {"weight": 1.0},
    "r_dpo": {"alpha": inspect.Parameter.empty},
    "odpo": {"alpha": 1.0, "scale": "log"},
    "mdpo": {"anchor": 0.0},
    "kto": {"desirable_weight": 1.0, "undesirable_weight": 1.0},
    "apo_zero_unpaired": {"desirable_weight": 1.0, "undesirable_weight": 1.0},
}


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
def test_a_loss_has_these_options_with_these_defaults(name: str) -> None:
    found = COMPONENT_KINDS["preference"].options(PREFERENCE_LOSSES[name])
    assert found == DEFAULTS.get(name, {})


def test_a_likelihood_is_a_sum_or_a_mean_over_tokens() -> None:
    assert loss_of("sft", WIDE) == [6.0]
    assert loss_of("sft", WIDE, per="response") == [1.5]
    assert loss_of("sft_gold", WIDE) == [2.0]
    assert loss_of("sft_gold", WIDE, per="response") == [1.0]


def test_apo_of_single_responses_weighs_the_labels() -> None:
    data = labelled([-1.0, -6.0], [-3.0, -3.0], [True, False])
    expected = [2 * (1 - sigmoid(0.2)), sigmoid(-0.3) / 2]
    found = loss_of("apo_zero_unpaired", data, desirable_weight=2.0, undesirable_weight=0.5)
    assert found == pytest.approx(expected)


def scores(kind: str, x: float, **tree: float) -> float:
    divergence = FDivergenceConfig.model_validate({"kind": kind, **tree})
    return float(f_score(numbers(x), divergence)[0])


@pytest.mark.parametrize("x", [-3.0, 0.0, 1.5])
def test_each_f_divergence_scores_a_log_ratio_by_its_formula(x: float) -> None:
    assert scores("reverse_kl", x) == x
    assert scores("forward_kl", x) == pytest.approx(1 - math.exp(-x))
    assert scores("js", x) == pytest.approx(math.log(2 * sigmoid(x)), abs=1e-15)
    assert scores("alpha", x, alpha=0.25) == pytest.approx((math.exp(-0.75 * x) - 1) / -0.75)


@pytest.mark.parametrize("x", [-3.0, 0.0, 1.5])
def test_the_alpha_divergence_ends_at_the_two_kls(x: float) -> None:
    assert scores("alpha", x, alpha=0.0) == pytest.approx(scores("forward_kl", x))
    assert scores("alpha", x, alpha=1.0) == x


@pytest.mark.parametrize("kind", ["forward_kl", "js", "alpha"])
@pytest.mark.parametrize("name", ["sigmoid", "sigmoid_norm", "hinge", "ipo", "exo", "discopop"])
def test_an_f_divergence_is_finite_far_from_the_reference(kind: str, name: str) -> None:
    chosen = settings(label_smoothing=0.1, f_divergence={"kind": kind})
    for d_w in (-1e4, 0.0, 1e4):
        for d_l in (-1e4, 0.0, 1e4):
            data = pair((d_w - 1e4, -1e4, 2.0), (d_l - 1e4, -1e4, 2.0))
            leaf = data.chosen.logprobs.requires_grad_()
            (loss,) = PREFERENCE_LOSSES[name](data, chosen)
            (slope,) = torch.autograd.grad(loss, leaf)
            assert math.isfinite(loss.item())
            assert math.isfinite(float(slope))


def test_a_row_refuses_smoothed_labels_that_its_formula_cannot_take() -> None:
    with pytest.raises(ConfigError, match="divides by 1 - 2 label_smoothing"):
        loss_of("robust", WIDE, settings(label_smoothing=0.5))
    with pytest.raises(ConfigError, match=r"takes its logarithm; take a small share, e.g. 0.001"):
        loss_of("exo", WIDE)


@pytest.mark.parametrize(
    ("name", "column", "said"),
    [("mdpo", "corrupted", "corrupted media"), ("tpo", "gold", "gold response")],
)
def test_a_pair_without_the_response_that_a_loss_reads_is_an_error(
    name: str, column: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        loss_of(name, dataclasses.replace(WIDE, **{column: None}))


@pytest.mark.parametrize("rating", [[0.0, 0.5, 1.0], [1.0, 0.0, 0.5]])
def test_equal_scores_of_equal_rank_take_places_in_the_order_of_the_responses(
    rating: list[float],
) -> None:
    expected = 0.0
    for i, above in enumerate(rating):
        for j, below in enumerate(rating):
            if above > below:
                discount = 1 / math.log(2 + i) - 1 / math.log(2 + j)
                expected += (2**above - 2**below) * abs(discount) * math.log(2)
    found = loss_of("lipo", ranked([0.0] * 3, [0] * 3, rating=rating))
    assert found == pytest.approx([expected])


def test_an_infinite_logit_without_smoothed_labels_has_loss_0_and_not_nan() -> None:
    assert logistic(numbers(math.inf), settings()).tolist() == [0.0]
