"""Every policy loss and the value loss, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightrft.algorithms.policy_losses import POLICY_LOSSES, value_loss
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.algorithm import LossConfig

# ratio, advantage -> loss with clip 0.2 / 0.5, loss with a dual clip of 3 besides, held without and with it
SURROGATE = [
    (2.0, 1.0, -1.5, -1.5, 1, 1),
    (2.0, -1.0, 2.0, 2.0, 0, 0),
    (0.5, 1.0, -0.5, -0.5, 0, 0),
    (0.5, -1.0, 0.8, 0.8, 1, 1),
    (1.0, 2.0, -2.0, -2.0, 0, 0),
    (4.0, -1.0, 4.0, 3.0, 0, 1),
    (4.0, 1.0, -1.5, -1.5, 1, 1),
    (4.0, 0.0, 0.0, 0.0, 0, 0),
]


@pytest.mark.parametrize("dual", [False, True])
def test_the_surrogate_by_hand(dual: bool) -> None:
    n = len(SURROGATE)
    ratio, advantages = (
        torch.tensor([row[k] for row in SURROGATE], dtype=torch.float64) for k in (0, 1)
    )
    old = torch.full((n,), math.log(0.125), dtype=torch.float64)
    one = torch.ones(n, dtype=torch.long)
    rows = TokenRows(torch.arange(n), one, 0 * one, one.bool())
    settings = LossConfig(clip_low=0.2, clip_high=0.5, dual_clip=3.0 if dual else None)
    losses, stats = POLICY_LOSSES["ppo_clip"](old + ratio.log(), old, advantages, rows, settings)
    assert losses.tolist() == pytest.approx([row[3 if dual else 2] for row in SURROGATE], rel=1e-12)
    assert stats["clip_fraction"].tolist() == [row[5 if dual else 4] for row in SURROGATE]
    assert stats["ratio"].tolist() == pytest.approx(ratio.tolist(), rel=1e-12)


def test_stats_carry_no_gradient() -> None:
    x = torch.zeros(2, requires_grad=True)
    rows = TokenRows(
        torch.zeros(2, dtype=torch.long),
        torch.tensor([2]),
        torch.zeros(1, dtype=torch.long),
        torch.ones(2, dtype=torch.bool),
    )
    losses, stats = POLICY_LOSSES["ppo_clip"](x, torch.zeros(2), torch.ones(2), rows, LossConfig())
    assert losses.requires_grad
    assert not any(s.requires_grad for s in stats.values())


def test_the_value_loss_takes_the_worse_of_plain_and_clipped() -> None:
    # old 0, clip 1/2, target 1: V 2 -> 1/2: max(1, 1/4)/2; V -2 -> -1/2: max(9, 9/4)/2; V 1 -> 1/2: max(0, 1/4)/2
    values, old, returns = torch.tensor([2.0, -2.0, 1.0, 0.25]), torch.zeros(4), torch.ones(4)
    assert value_loss(values, old, returns, 0.5).tolist() == [0.5, 4.5, 0.125, 0.28125]
    assert value_loss(values, old, returns, None).tolist() == [0.5, 4.5, 0.0, 0.28125]


def alone(
    ratios: list[float], advantages: list[float], name: str, old: float = 0.5, **tree: Any
) -> tuple[Any, list[float], Any]:
    """Losses, gradient of their sum and stats of one response, its old probabilities all ``old``."""
    before = torch.full((len(ratios),), math.log(old), dtype=torch.float64)
    logprobs = (before + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    n = len(ratios)
    rows = TokenRows(
        torch.zeros(n, dtype=torch.long),
        torch.tensor([n]),
        torch.zeros(1, dtype=torch.long),
        torch.ones(n).bool(),
    )
    settings = LossConfig.model_validate({"name": name, **tree})
    a = torch.tensor(advantages, dtype=torch.float64)
    losses, stats = POLICY_LOSSES[name](logprobs, before, a, rows, settings, **settings.options)
    (slopes,) = torch.autograd.grad(losses.sum(), logprobs)
    return losses.detach(), slopes.tolist(), {k: v.tolist() for k, v in stats.items()}


def test_reinforce_knows_no_ratio() -> None:
    losses, slopes, _ = alone([2.0, 0.5], [3.0, -1.0], "reinforce")
    assert losses.tolist() == pytest.approx([0.0, math.log(0.25)])
    assert slopes == [-3.0, 1.0]


def test_importance_is_weighted_and_never_held() -> None:
    losses, slopes, _ = alone([50.0, 0.02], [1.0, -1.0], "importance")
    assert losses.tolist() == pytest.approx([-50.0, 0.02])
    assert slopes == pytest.approx([-50.0, 0.02])


def test_importance_of_a_whole_response_weighs_every_token_by_the_geometric_mean() -> None:
    losses, slopes, _ = alone([2.0, 8.0], [1.0, 1.0], "importance", ratio="sequence")
    assert losses.tolist() == pytest.approx([-4.0, -4.0])
    assert slopes == pytest.approx([-4.0, -4.0])


def test_gmpo_clips_each_ratio_in_log_space_and_takes_their_geometric_mean() -> None:
    # A > 0: 4 is held at e^(ln 2) = 2, 1/4 is free: mean of (2, 1/4) is 1/sqrt 2; only the free token has gradient
    bound = math.log(2)
    losses, slopes, stats = alone([4.0, 0.25], [1.0, 1.0], "gmpo", clip_low=bound, clip_high=bound)
    assert losses.tolist() == pytest.approx([-(0.5**0.5)] * 2)
    assert slopes == pytest.approx([0.0, -(0.5**0.5)])
    assert stats["clip_fraction"] == [1.0, 0.0]
    losses, slopes, stats = alone(
        [4.0, 0.25], [-1.0, -1.0], "gmpo", clip_low=bound, clip_high=bound
    )
    assert losses.tolist() == pytest.approx([2**0.5] * 2)
    assert slopes == pytest.approx([2**0.5, 0.0])
    assert stats["clip_fraction"] == [0.0, 1.0]


def test_cispo_clips_the_weight_on_both_sides_and_keeps_the_gradient() -> None:
    _, slopes, stats = alone(
        [4.0, 0.25, 1.1], [1.0, -2.0, 1.0], "cispo", clip_low=0.5, clip_high=0.25
    )
    assert slopes == pytest.approx([-1.25, 1.0, -1.1])
    assert stats["clip_fraction"] == [1.0, 1.0, 0.0]


def test_cispo_without_a_lower_bound_and_with_a_cap_differ_in_what_the_number_means() -> None:
    ratios, advantages = [4.0, 0.01], [1.0, 1.0]
    _, relative, _ = alone(ratios, advantages, "cispo", clip_low=1.0, clip_high=2.0)
    _, absolute, stats = alone(ratios, advantages, "cispo_cap", options={"cap": 2.0})
    assert stats["clip_fraction"] == [1.0, 0.0]
    assert relative == pytest.approx([-3.0, -0.01])
    assert absolute == pytest.approx([-2.0, -0.01])


def test_cpgd_has_the_gradient_of_the_advantage_whatever_the_ratio() -> None:
    _, slopes, stats = alone(
        [1.1, 0.9, 50.0, 0.02, 50.0, 0.02], [2.0, -2.0, -1.0, 1.0, 1.0, -1.0], "cpgd"
    )
    assert slopes == pytest.approx([-2.0, 2.0, 1.0, -1.0, 0.0, 0.0])
    assert stats["clip_fraction"] == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]


def test_cpgd_with_a_lower_bound_of_zero_is_not_held_from_below() -> None:
    _, slopes, _ = alone([1e-6], [-1.0], "cpgd", clip_low=1.0)
    assert slopes == [1.0]


def test_sapo_fades_with_the_distance_from_one_and_faster_for_negative_advantages() -> None:
    _, slopes, _ = alone([1.0, 1.0], [1.0, -2.0], "sapo")
    assert slopes == pytest.approx([-1.0, 2.0])
    _, slopes, _ = alone([3.0, 3.0], [1.0, -1.0], "sapo", options={"tau_pos": 1.0, "tau_neg": 2.0})
    fade = [4 * 3 * p * (1 - p) for p in (1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-4)))]
    assert slopes == pytest.approx([-fade[0], fade[1]])


def test_vespo_weighs_a_response_by_the_product_of_its_ratios() -> None:
    # w = 2 * 3 = 6: phi = 6^2 e^(3 - 18) for A >= 0, 6^3 e^(2 - 12) below
    _, slopes, stats = alone([2.0, 3.0], [1.0, -1.0], "vespo")
    up, down = 36 * math.exp(-15), 216 * math.exp(-10)
    assert slopes == pytest.approx([-up, down], rel=1e-12)
    assert stats["weight"] == pytest.approx([up, down], rel=1e-12)
    _, slopes, _ = alone([2.0, 0.5], [1.0, -1.0], "vespo")
    assert slopes == pytest.approx([-1.0, 1.0])


def test_dppo_holds_by_the_distance_of_probabilities() -> None:
    # old 0.5: 0.5 -> 0.8 moved by 0.3; old 0.001 -> 0.05 has a ratio of 50 and moved by 0.049 alone
    _, slopes, stats = alone(
        [1.6, 1.6, 0.4, 0.4], [1.0, -1.0, -1.0, 1.0], "dppo", options={"low": 0.2, "high": 0.2}
    )
    assert slopes == pytest.approx([0.0, 1.6, 0.0, -0.4])
    assert stats["clip_fraction"] == [1.0, 0.0, 1.0, 0.0]
    _, slopes, _ = alone([50.0], [1.0], "dppo", old=0.001)
    assert slopes == pytest.approx([-50.0])


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_on_policy_every_loss_has_the_gradient_of_the_policy_gradient(name: str) -> None:
    advantages = [1.5, 1.5, 1.5]
    assert alone([1.0] * 3, advantages, name)[1] == pytest.approx([-1.5] * 3, rel=1e-12)
    assert alone([1.0] * 3, [-0.5] * 3, name)[1] == pytest.approx([0.5] * 3, rel=1e-12)


def test_vespo_without_a_fading_side_is_held_to_a_number() -> None:
    # w = 1e30 ^ 2 with lam 0 would be e^138
    _, _, stats = alone([1e30], [1.0], "vespo", options={"k_pos": 2.0, "lam_pos": 0.0})
    assert stats["weight"] == pytest.approx([math.exp(40)])


def test_topr_clips_only_where_its_bounds_leave_a_choice() -> None:
    # Good responses have the constant weight 1, whatever their ratio of 4 is.
    _, _, stats = alone([2.0, 2.0], [1.0, 1.0], "topr")
    assert stats["weight"] == [1.0, 1.0] and stats["clip_fraction"] == [0.0, 0.0]
    _, _, stats = alone([2.0, 2.0], [-1.0, -1.0], "topr")
    assert stats["weight"] == [1.0, 1.0] and stats["clip_fraction"] == [1.0, 1.0]
    _, _, stats = alone([0.5, 0.5], [-1.0, -1.0], "topr")
    assert stats["weight"] == [0.25, 0.25] and stats["clip_fraction"] == [0.0, 0.0]
