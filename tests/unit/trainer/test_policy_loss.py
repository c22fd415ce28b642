"""The clipped surrogate and the value loss, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lightrft.config import LossConfig
from lightrft.trainer.policy_loss import POLICY_LOSSES, value_loss
from lightrft.trainer.rows import Rows

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
    ratio, advantages = (torch.tensor([row[k] for row in SURROGATE], dtype=torch.float64) for k in (0, 1))
    old = torch.full((n,), math.log(0.125), dtype=torch.float64)
    one = torch.ones(n, dtype=torch.long)
    rows = Rows(torch.arange(n), one, 0 * one, one.bool())
    settings = LossConfig(clip_low=0.2, clip_high=0.5, dual_clip=3.0 if dual else None)
    losses, stats = POLICY_LOSSES["ppo_clip"](old + ratio.log(), old, advantages, rows, settings)
    assert losses.tolist() == pytest.approx([row[3 if dual else 2] for row in SURROGATE], rel=1e-12)
    assert stats["clip_fraction"].tolist() == [row[5 if dual else 4] for row in SURROGATE]
    assert stats["ratio"].tolist() == pytest.approx(ratio.tolist(), rel=1e-12)


def test_stats_carry_no_gradient() -> None:
    x = torch.zeros(2, requires_grad=True)
    rows = Rows(
        torch.zeros(2, dtype=torch.long), torch.tensor([2]), torch.zeros(1, dtype=torch.long), torch.ones(2, dtype=torch.bool)
    )
    losses, stats = POLICY_LOSSES["ppo_clip"](x, torch.zeros(2), torch.ones(2), rows, LossConfig())
    assert losses.requires_grad
    assert not any(s.requires_grad for s in stats.values())


def test_the_value_loss_takes_the_worse_of_plain_and_clipped() -> None:
    # old 0, clip 1/2, target 1: V 2 -> 1/2: max(1, 1/4)/2; V -2 -> -1/2: max(9, 9/4)/2; V 1 -> 1/2: max(0, 1/4)/2
    values, old, returns = torch.tensor([2.0, -2.0, 1.0, 0.25]), torch.zeros(4), torch.ones(4)
    assert value_loss(values, old, returns, 0.5).tolist() == [0.5, 4.5, 0.125, 0.28125]
    assert value_loss(values, old, returns, None).tolist() == [0.5, 4.5, 0.0, 0.28125]
