"""Weights for a sampler that is not the policy that is trained, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.importance_sampling import (
    IS_CORRECTIONS,
    compares_whole_batch,
    correction_weights,
    interpolated_proximal,
    version_share,
)
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.base import ComponentConfig

# pi_old / pi_sampler of two responses; the last token of the second was not sampled
RATIOS = [4.0, 0.5, 1.0, 0.1, 1000.0]
ROWS = TokenRows(
    torch.tensor([0, 0, 1, 1, 1]),
    torch.tensor([2, 3]),
    torch.zeros(2, dtype=torch.long),
    torch.tensor([True, True, True, True, False]),
)
PRODUCTS, MEANS = [2.0, 2.0, 0.1, 0.1], [2**0.5, 2**0.5, 0.1**0.5, 0.1**0.5]


def weights(
    name: str, advantages: list[float] | None = None, now: Tensor | None = None, **options: Any
) -> list[float]:
    """Of the sampled tokens."""
    old = torch.tensor(RATIOS, dtype=torch.float64).log()
    behavior = torch.zeros_like(old)
    a = torch.tensor(advantages or [1.0] * 5, dtype=torch.float64)
    return IS_CORRECTIONS[name](old if now is None else now, old, behavior, a, ROWS, **options)[
        ROWS.mask
    ].tolist()


def test_importance_has_no_bound() -> None:
    assert weights("importance") == pytest.approx(RATIOS[:4])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2.0, 0.5, 1.0, 0.1]),
        ({"low": 0.25, "high": 3.0}, [3.0, 0.5, 1.0, 0.25]),
        ({"level": "sequence"}, PRODUCTS),
        ({"level": "sequence", "high": 1.5}, [1.5, 1.5, 0.1, 0.1]),
        ({"level": "geometric"}, MEANS),
        ({"level": "geometric", "low": 1.0}, [2**0.5, 2**0.5, 1.0, 1.0]),
    ],
)
def test_truncated_weights(options: dict[str, Any], expected: list[float]) -> None:
    assert weights("tis", **options) == pytest.approx(expected)


def test_icepop_leaves_out_what_truncation_would_hold() -> None:
    assert weights("icepop") == pytest.approx([4.0, 0.5, 1.0, 0.0])
    assert weights("icepop", high=3.0) == pytest.approx([0.0, 0.5, 1.0, 0.0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, PRODUCTS),
        ({"low": 0.5}, [2.0, 2.0, 0.0, 0.0]),
        ({"high": 1.0}, [0.0, 0.0, 0.1, 0.1]),
        ({"level": "token", "high": 1.0}, [0.0, 0.5, 1.0, 0.1]),
        ({"level": "geometric", "high": 1.0}, [0.0, 0.0, 0.1**0.5, 0.1**0.5]),
    ],
)
def test_masked_weights(options: dict[str, Any], expected: list[float]) -> None:
    assert weights("mis", **options) == pytest.approx(expected)


def test_a_sequence_mask_keeps_the_weights_of_tokens_without_a_bound_unless_there_is_a_cap() -> (
    None
):
    kept = {"low": 1.0, "high": 2.0}
    assert weights("sequence_mask", **kept) == pytest.approx([4.0, 0.5, 0.0, 0.0])
    assert weights("sequence_mask", **kept, cap=3.0) == pytest.approx([3.0, 0.5, 0.0, 0.0])
    assert weights("sequence_mask", low=0.05, high=0.2, level="sequence") == pytest.approx(
        [0.0, 0.0, 1.0, 0.1]
    )


def test_a_sequence_reject_keeps_or_drops_and_never_weighs() -> None:
    assert weights("sequence_reject", low=1.0, high=2.0) == [1.0, 1.0, 0.0, 0.0]
    assert weights("sequence_reject", low=0.05, high=0.2, level="sequence") == [0.0, 0.0, 1.0, 1.0]
    assert weights("sequence_reject") == [0.0] * 4


def test_off_policy_responses_to_move_away_from_are_dropped() -> None:
    # mean of log(sampler / policy now): 0.5 in the first response, 1 in the second
    now = torch.tensor([-1.0, 0.0, -0.5, -1.5, 100.0], dtype=torch.float64)
    negative, positive = [-1.0] * 5, [1.0] * 5
    assert weights("opsm", negative, now, delta=0.7) == [1.0, 1.0, 0.0, 0.0]
    assert weights("opsm", negative, now, delta=0.4) == [0.0] * 4
    assert weights("opsm", negative, now, delta=1.0) == [1.0] * 4
    assert weights("opsm", positive, now, delta=0.4) == [1.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_weight_that_overflows_is_truncated_or_left_out(level: str, dtype: torch.dtype) -> None:
    old, behavior = torch.zeros(5, dtype=dtype), torch.full((5,), -1000.0, dtype=dtype)
    args = (old, old, behavior, torch.ones(5, dtype=dtype), ROWS)
    assert IS_CORRECTIONS["tis"](*args, level=level)[ROWS.mask].tolist() == [2.0] * 4
    assert IS_CORRECTIONS["mis"](*args, level=level)[ROWS.mask].tolist() == [0.0] * 4


def test_several_corrections_multiply() -> None:
    old = torch.tensor(RATIOS, dtype=torch.float64).log()
    parts = [ComponentConfig(name="icepop"), ComponentConfig(name="opsm", options={"delta": 0.0})]
    a = torch.tensor([-1.0, 1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    found = correction_weights(parts, old - 9, old, torch.zeros_like(old), a, ROWS)
    assert found[ROWS.mask].tolist() == pytest.approx([0.0, 0.5, 0.0, 0.0])
    assert correction_weights([], old, old, old, a, ROWS).tolist() == [1.0] * 5


def test_the_share_of_a_version_is_its_place_on_the_way_to_the_current_one() -> None:
    versions = torch.tensor([0, 2, 3, 4, 9])
    assert version_share(versions, 3, 4).tolist() == pytest.approx([0.75, 0.5, 0.0, 0.0, 0.0])
    assert version_share(versions, 4, 4).tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_the_proximal_log_probs_lie_between_sampler_and_policy_and_carry_no_gradient() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    behavior = torch.tensor([-3.0, -3.0, -3.0])
    found = interpolated_proximal(logprobs, behavior, torch.tensor([3, 2, 0]), 3, 4)
    assert found.tolist() == pytest.approx([-3.0, -2.0, -1.5])
    assert not found.requires_grad


def test_on_policy_every_weight_is_one() -> None:
    same = torch.full((5,), math.log(0.3))
    for name in IS_CORRECTIONS:
        options = {"opsm": {"delta": 0.1}, "divergence_reject": {"limit": 0.1}}.get(name, {})
        assert (
            IS_CORRECTIONS[name](same, same, same, -torch.ones(5), ROWS, **options).tolist()
            == [1.0] * 5
        )


def test_the_product_of_corrections_stays_a_number_in_float32() -> None:
    old = torch.full((5,), 30.0)
    parts = [ComponentConfig(name="importance"), ComponentConfig(name="importance")]
    found = correction_weights(parts, old, old, torch.zeros(5), torch.ones(5), ROWS)
    assert found.tolist() == pytest.approx([math.exp(40.0)] * 5)


def test_one_correction_that_reads_the_batch_is_enough_to_compare_all_of_it() -> None:
    alone, whole = ComponentConfig(name="tis"), ComponentConfig(name="tis_normalized")
    assert not compares_whole_batch([alone])
    assert compares_whole_batch([alone, whole])
    assert not compares_whole_batch([])
