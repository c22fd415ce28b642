"""Scalars of the oracles: a float or a 0-d float64 tensor, so that autograd through a loop gives the exact gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

Scalar = Any  # a float or a 0-d float64 tensor
Rows = list[list[Scalar]]  # ragged


def leaves(rows: Rows) -> Rows:
    return [
        [torch.tensor(number(x), dtype=torch.float64, requires_grad=True) for x in row]
        for row in rows
    ]


def gradients(total: Scalar, rows: Rows) -> list[list[float]]:
    """d total / d rows, 0 where ``total`` does not depend on the entry."""
    flat = [x for row in rows for x in row]
    if not flat or not isinstance(total, torch.Tensor) or not total.requires_grad:
        return [[0.0 for _ in row] for row in rows]
    found = iter(torch.autograd.grad(total, flat, allow_unused=True))
    return [[0.0 if g is None else float(g) for g in (next(found) for _ in row)] for row in rows]


def exp(x: Scalar) -> Scalar:
    return torch.exp(x) if isinstance(x, torch.Tensor) else math.exp(x)


def log(x: Scalar) -> Scalar:
    return torch.log(x) if isinstance(x, torch.Tensor) else math.log(x)


def tanh(x: Scalar) -> Scalar:
    return torch.tanh(x) if isinstance(x, torch.Tensor) else math.tanh(x)


def sigmoid(x: Scalar) -> Scalar:
    return 1 / (1 + exp(-x)) if x >= 0 else exp(x) / (1 + exp(x))


def number(x: Scalar) -> float:
    return float(detach(x))


def detach(x: Scalar) -> Scalar:
    return x.detach() if isinstance(x, torch.Tensor) else x


def least(a: Scalar, b: Scalar) -> Scalar:
    return a if a <= b else b


def greatest(a: Scalar, b: Scalar) -> Scalar:
    return a if a >= b else b


def clip(x: Scalar, low: float, high: float) -> Scalar:
    if x < low:
        return low
    return high if x > high else x


def mean(xs: Sequence[Scalar]) -> Scalar:
    return sum(xs) / len(xs)


def deviation(xs: Sequence[float], unbiased: bool) -> float:
    """Standard deviation, over n-1 or n. Exactly 0 for equal numbers and for one number alone."""
    if len(xs) < 2 or all(x == xs[0] for x in xs):
        return 0.0
    m = mean(xs)
    return math.sqrt(sum((x - m) ** 2 for x in xs) / (len(xs) - (1 if unbiased else 0)))
