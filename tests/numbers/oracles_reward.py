"""Losses of reward models from the papers, one number at a time.

A loss of pairs is ``loss(w, x, **options)`` of the scores of the better and of the worse response.
A loss of ratings is ``loss(r, y)``. ``tests.numbers.exact`` gives values and derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmath import mp

from tests.numbers.exact import Number, absolute, exp, log, log_softmax, sigmoid

Numbers = Sequence[Number]


def bradley_terry(w, x, m=0, label_smoothing=0, weight=1):
    """Bradley and Terry 1952; the margin of Llama 2, eq. 2; the weight of Scaled BT."""
    right = sigmoid(w - x - m)
    return weight * (-(1 - label_smoothing) * log(right) - label_smoothing * log(1 - right))


def log_exp(w, x):
    return log(1 + exp(x - w))


def centre(w, x):
    """arXiv 2312.09244, eq. 2."""
    return (w + x) ** 2


def l2(w, x):
    return (w**2 + x**2) / 2


def hps(w, x, label_smoothing=0):
    """Cross-entropy of the softmax over both scores."""
    first, second = log_softmax([w, x])
    return -(1 - label_smoothing) * first - label_smoothing * second


def hps_tie(a, b):
    return hps(a, b, mp.mpf(1) / 2)


def rao_kupper(w, x, theta=2):
    """Rao and Kupper 1967, with strengths exp(score)."""
    return -log(exp(w) / (exp(w) + theta * exp(x)))


def rao_kupper_tie(a, b, theta=2):
    first, second = exp(a), exp(b)
    shares = (first + theta * second) * (theta * first + second)
    return -log((theta**2 - 1) * first * second / shares)


def davidson(w, x, nu=1):
    """Davidson 1970, with strengths exp(score)."""
    return -log(exp(w) / davidson_total(w, x, nu))


def davidson_tie(a, b, nu=1):
    return -log(nu * mp.sqrt(exp(a) * exp(b)) / davidson_total(a, b, nu))


def davidson_total(a, b, nu):
    return exp(a) + exp(b) + nu * mp.sqrt(exp(a) * exp(b))


def tie_distance(w, x):
    return 0 * w


def tie_distance_tie(a, b):
    return absolute(a - b)


def thurstone(w: Numbers, x: Numbers) -> Number:
    """``w`` and ``x`` are mean and log variance."""
    deviation = mp.sqrt(exp(w[1]) + exp(x[1]))
    return -log(mp.ncdf((w[0] - x[0]) / deviation))


def mse(r, y):
    return (r - y) ** 2


def cost_sign(r, y, unsafe_from=None):
    """Safe RLHF: -log s(sign r), with the sign 1 of unsafe and -1 of safe, weighted by y."""
    if unsafe_from is not None:
        y = 1 if y >= unsafe_from else 0
    return y * -log(sigmoid(r)) + (1 - y) * -log(sigmoid(-r))


def cross_entropy(logits: Numbers, y: float) -> Number:
    """The probability of the rating, shared by its two neighbours."""
    below = min(int(y), len(logits) - 1)
    above = min(below + 1, len(logits) - 1)
    share = y - below
    log_probs = log_softmax(logits)
    return -(1 - share) * log_probs[below] - share * log_probs[above]


def ordinal(logits: Numbers, y: float) -> Number:
    """One binary label for each threshold: does the rating exceed it?"""
    total = mp.mpf(0)
    for threshold, logit in enumerate(logits):
        label = max(0, min(1, y - threshold))
        total += -label * log(sigmoid(logit)) - (1 - label) * log(1 - sigmoid(logit))
    return total


def gaussian_nll(outputs: Numbers, y: float) -> Number:
    """The negative log-density, without its constant."""
    mean, variance = outputs[0], exp(outputs[1])
    density = exp(-((y - mean) ** 2) / (2 * variance)) / mp.sqrt(2 * mp.pi * variance)
    return -log(density) - log(2 * mp.pi) / 2
