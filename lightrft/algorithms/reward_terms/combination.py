"""Combine the terms of the reward of a response by changing their weights.

The reward stays the weighted sum of terms. A normalisation of terms by group therefore sees the
same terms as the reward.
"""

from __future__ import annotations

from collections.abc import Mapping


def gated(
    terms: Mapping[str, float],
    weights: Mapping[str, float],
    gates: Mapping[str, str],
    threshold: float,
) -> dict[str, float]:
    """Return the weights, 0 for a term whose gate is closed.

    Args:
        terms: Value of each term.
        weights: Weight of each term.
        gates: Name of a term to the name of its gate. A gate that the response lacks is closed.
        threshold: Smallest value of a gate that is open.
    """
    found = dict(weights)
    for name, gate in gates.items():
        if name in found and not terms.get(gate, float("-inf")) >= threshold:
            found[name] = 0.0
    return found


def worst(terms: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights, 0 for each term but the one with the smallest product of both.

    Terms of weight 0 do not count. Of equal products, the first counts.

    Args:
        terms: Value of each term.
        weights: Weight of each term.
    """
    counted = [name for name, weight in weights.items() if weight]
    lowest = min(counted, key=lambda name: weights[name] * terms[name], default=None)
    return {name: weight if name == lowest else 0.0 for name, weight in weights.items()}
