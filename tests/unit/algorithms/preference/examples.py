"""Small preference data, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightrft.algorithms.preference.inputs import Labelled, Pairs, Ranked, Responses
from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.config.preference.sections import PreferenceConfig

BETA = 0.1


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def responses(
    logprobs: Sequence[float],
    ref: Sequence[float],
    tokens: Sequence[float] | None = None,
    sequence_kl: Sequence[float] | None = None,
) -> Responses:
    return Responses(
        numbers(*logprobs),
        numbers(*ref),
        numbers(*(tokens or [1.0] * len(logprobs))),
        None if sequence_kl is None else numbers(*sequence_kl),
    )


def pair(
    chosen: tuple[float, float, float] = (-3.0, -3.0, 2.0),
    rejected: tuple[float, float, float] = (-4.0, -4.0, 2.0),
    **columns: Any,
) -> Pairs:
    """One pair; each side is its policy log-prob, its reference log-prob and its token count."""
    sides = [responses([p], [r], [n], [0.7]) for p, r, n in (chosen, rejected)]
    given: dict[str, Any] = {
        "margin": numbers(1.0),
        "corrupted": responses([-5.0], [-5.0], [2.0]),
        "gold": responses([-2.0], [-2.0], [2.0]),
        "shift": numbers(0.0)[0],
        "margin_mean": numbers(0.0)[0],
        "margin_std": numbers(1.0)[0],
    }
    return Pairs(*sides, **{**given, **columns})


def labelled(
    logprobs: Sequence[float], ref: Sequence[float], desirable: Sequence[bool], **columns: Any
) -> Labelled:
    given: dict[str, Any] = {"kl": numbers(0.0)[0], "shift": numbers(0.0)[0]}
    return Labelled(responses(logprobs, ref), torch.tensor(desirable), **{**given, **columns})


def ranked(
    log_ratios: Sequence[float],
    rank: Sequence[int],
    group_of: Sequence[int] | None = None,
    rating: Sequence[float] | None = None,
) -> Ranked:
    return Ranked(
        responses([-20.0 + x for x in log_ratios], [-20.0] * len(log_ratios)),
        torch.tensor(group_of or [0] * len(log_ratios)),
        torch.tensor(rank),
        None if rating is None else numbers(*rating),
    )


def settings(name: str = "sigmoid", beta: float = BETA, **tree: Any) -> PreferenceConfig:
    return PreferenceConfig.model_validate({"losses": [name], "beta": beta, **tree})


def loss_of(
    name: str, data: Any, chosen: PreferenceConfig | None = None, **options: Any
) -> list[float]:
    found = PREFERENCE_LOSSES[name](data, chosen or settings(), **options)
    return found.tolist()
