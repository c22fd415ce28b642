"""Which tokens of a mini-batch a mask keeps, drops or pulls, against the slow loops."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.token_masks import TOKEN_MASKS, TokenMask
from lightrft.config.algorithm import LossConfig
from tests.numbers import oracles_token_masks
from tests.numbers.compare import every_case, rows_for
from tests.numbers.oracles import Case, Mask
from tests.numbers.oracles_token_masks import Place, covariances, places, second_moment
from tests.numbers.strategies import batch_of, tensor_of

LOSS = LossConfig(name="ppo_clip", clip_low=0.2, clip_high=0.28)


def mask_of(case: Case, name: str, seed: int, **options: float) -> TokenMask:
    """The mask on the case's log-probs, with drawn advantages and entropies (the same numbers twice)."""
    column = tensor_of(rows_for(case, seed)[0])
    batch = batch_of(case).replace(
        advantages=column, entropy=column, logprobs=tensor_of(case.logprobs)
    )
    return TOKEN_MASKS[name](batch, LOSS, torch.Generator().manual_seed(seed % 2**31), **options)


def kept_of(keep: Tensor, case: Case) -> Mask:
    """As ragged rows; nothing counts where nothing was sampled."""
    found = iter(keep.bool().tolist())
    return [[next(found) and m for m in row] for row in case.mask]


def marked(case: Case, mask: Mask) -> list[Place]:
    return [(i, t) for i, t in places(case) if mask[i][t]]


def apart(values: Iterable[float]) -> bool:
    """No two of them are equal up to rounding."""
    ordered = sorted(values)
    return all(b - a > 1e-9 for a, b in pairwise(ordered))


@every_case()
@pytest.mark.parametrize("rho", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize(
    ("name", "level"), [("high_entropy", "batch"), ("high_entropy_per_answer", "sequence")]
)
def test_the_most_uncertain_tokens_are_kept(
    name: str, level: str, rho: float, case: Case, seed: int
) -> None:
    mask = mask_of(case, name, seed, rho=rho)
    assert kept_of(mask.weight, case) == oracles_token_masks.top_entropy(
        case, rows_for(case, seed)[0], rho, level
    )
    assert mask.kl_pull_coef is None


@every_case()
@pytest.mark.parametrize("tau", [0.0, 0.04, 1.0, 30.0])
def test_m2po_drops_the_fewest_tokens_that_are_far_from_the_sampler(
    tau: float, case: Case, seed: int
) -> None:
    found, exact = (
        kept_of(mask_of(case, "m2po", seed, tau=tau).weight, case),
        oracles_token_masks.m2po(case, tau),
    )
    if apart(second_moment(case, at) for at in places(case)):
        assert found == exact
    else:  # equal ones are dropped together
        assert set(marked(case, found)) <= set(marked(case, exact))
        assert {second_moment(case, at) for at in marked(case, exact)} - {
            second_moment(case, at) for at in marked(case, found)
        } <= {max((second_moment(case, at) for at in marked(case, exact)), default=0.0)}


@every_case()
@pytest.mark.parametrize("share", [2e-4, 0.3, 1.0])
def test_kl_cov_pulls_the_tokens_of_largest_covariance(share: float, case: Case, seed: int) -> None:
    (advantages,) = rows_for(case, seed)
    mask = mask_of(case, "kl_cov", seed, share=share, coef=0.5)
    assert mask.kl_pull_coef is not None
    assert kept_of(mask.weight, case) == case.mask
    assert set(mask.kl_pull_coef.tolist()) <= {0.0, 0.5}
    cov = covariances(case, advantages)
    found = [cov[at] for at in marked(case, kept_of(mask.kl_pull_coef, case))]
    exact = [
        cov[at] for at in marked(case, oracles_token_masks.kl_cov_chosen(case, advantages, share))
    ]
    assert sorted(found) == pytest.approx(sorted(exact), rel=1e-9, abs=1e-9)


@every_case()
@pytest.mark.parametrize(
    ("share", "low", "high"),
    [(2e-4, -1.0, 5.0), (0.3, -5.0, 5.0), (1.0, 0.0, 1e9), (1.0, -1e9, 1e9)],
)
def test_clip_cov_drops_a_share_of_the_eligible_tokens(
    share: float, low: float, high: float, case: Case, seed: int
) -> None:
    (advantages,) = rows_for(case, seed)
    mask = mask_of(case, "clip_cov", seed, share=share, low=low, high=high)
    eligible = marked(
        case,
        oracles_token_masks.clip_cov_eligible(
            case, advantages, (low, high), LOSS.clip_low, LOSS.clip_high
        ),
    )
    dropped = [at for at in places(case) if at not in marked(case, kept_of(mask.weight, case))]
    assert set(dropped) <= set(eligible)
    assert len(dropped) == min(
        len(eligible), oracles_token_masks.share_of(len(places(case)), share)
    )
    assert mask.kl_pull_coef is None


def test_which_tokens_clip_cov_drops_is_chance() -> None:
    # 40 tokens in one answer: covariances of 40 different numbers, 4 to drop
    case = Case(
        [40],
        [0],
        [[True] * 40],
        [[-0.1 * k - 0.1 for k in range(40)]],
        *([[[-1.0] * 40]] * 4),
        [0.0],
        [False],
        [0.0],
    )
    case.old = case.logprobs
    drawn = [
        tuple(
            kept_of(mask_of(case, "clip_cov", seed, share=0.1, low=-1e9, high=1e9).weight, case)[0]
        )
        for seed in range(20)
    ]
    assert {row.count(False) for row in drawn} == {4}
    assert len(set(drawn)) > 10
