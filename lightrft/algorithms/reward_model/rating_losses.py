"""Losses of single responses with a rating.

``registry`` explains the symbols in the formulas.
"""

from __future__ import annotations

from lightrft.algorithms.preference.registry import log_sigmoid
from lightrft.algorithms.reward_model.inputs import ScoredResponses
from lightrft.algorithms.reward_model.registry import REWARD_LOSSES, SIGNED, ratings_of
from lightrft.algorithms.token_ops import clamp_log_ratio, require_column
from lightrft.utils.lazy_imports import Tensor, torch


@REWARD_LOSSES.register(
    "mse",
    formula="L = (r - y)^2",
    latex=r"L=(r-y)^2",
    paper="HelpSteer2, arXiv 2406.08673",
    kind="rating",
)
def mse(data: ScoredResponses) -> Tensor:
    """Fit scores to ratings."""
    index, rating = ratings_of(data, "mse")
    return (data.scores[index] - rating).square()


@REWARD_LOSSES.register(
    "cross_entropy",
    formula="L = -sum_k q_k log p_k,  p = softmax of the outputs; q: 1 at a whole rating, else "
    "split between the two nearest ones with mean y",
    latex=r"L=-\sum_kq_k\log p_k,\quad q_k=\max(0,1-|y-k|)",
    paper="softmax regression; targets between two classes: two-hot, arXiv 2301.04104",
    needs=["outputs"],
    kind="rating",
    heads=("classes",),
)
def cross_entropy(data: ScoredResponses) -> Tensor:
    """Fit the probabilities of the classes. Ratings are from 0 to the number of classes less 1."""
    classes = data.outputs.shape[1]
    index, rating = ratings_of(data, "cross_entropy", classes - 1)
    place = torch.arange(classes, dtype=rating.dtype, device=rating.device)
    target = (1 - (rating[:, None] - place).abs()).clamp(min=0)
    log_probs = torch.log_softmax(data.outputs[index], dim=1)
    return -(target * log_probs).sum(1)


@REWARD_LOSSES.register(
    "ordinal",
    formula="L = -sum_k (q_k log s(o_k) + (1 - q_k) log s(-o_k)),  q_k = 1 if y > k else 0, "
    "o: outputs",
    latex=r"L=-\sum_k\big(q_k\log\sigma(o_k)+(1-q_k)\log\sigma(-o_k)\big),\quad q_k=[y>k]",
    paper="CORAL, arXiv 1901.07884, with a weight vector for each threshold",
    needs=["outputs"],
    kind="rating",
    heads=("ordinal",),
)
def ordinal(data: ScoredResponses) -> Tensor:
    """Fit the probability that the rating exceeds each threshold 0, 1, ...

    Ratings are from 0 to the number of thresholds. Between two whole numbers, ``q_k`` of the
    threshold between them is the fraction.
    """
    thresholds = data.outputs.shape[1]
    index, rating = ratings_of(data, "ordinal", thresholds)
    place = torch.arange(thresholds, dtype=rating.dtype, device=rating.device)
    target = (rating[:, None] - place).clamp(0, 1)
    return _binary_cross_entropy(data.outputs[index], target).sum(1)


@REWARD_LOSSES.register(
    "gaussian_nll",
    formula="L = (log v + (mu - y)^2 / v) / 2,  mu: mean, v: variance",
    latex=r"L=\tfrac12\Big(\log v+\frac{(\mu-y)^2}{v}\Big)",
    paper="Nix and Weigend 1994, without the constant log(2 pi) / 2",
    needs=["outputs"],
    kind="rating",
    heads=("gaussian",),
)
def gaussian_nll(data: ScoredResponses) -> Tensor:
    """Fit mean and variance of the ratings.

    Variances are at least ``exp(-40)``; the gradient below is that at the bound.
    """
    index, rating = ratings_of(data, "gaussian_nll")
    mean, log_variance = data.outputs[index].unbind(1)
    precision = torch.exp(clamp_log_ratio(-log_variance))
    return (log_variance + (mean - rating).square() * precision) / 2


@REWARD_LOSSES.register(
    "cost_sign",
    formula="L = -y log s(r) - (1 - y) log s(-r),  y = 1: unsafe, y = 0: safe",
    latex=r"L=-y\log\sigma(r)-(1-y)\log\sigma(-r)",
    paper="Safe RLHF, arXiv 2310.12773: the sign terms of the cost model",
    kind="rating",
    heads=SIGNED,
)
def cost_sign(data: ScoredResponses, *, unsafe_from: float | None = None) -> Tensor:
    """Make the score of unsafe responses positive, and that of safe ones negative.

    Together with ``bradley_terry``, where the better response of a pair is the more harmful one,
    it is the loss of a cost model. The paper adds the terms of both responses of a pair, which is
    ``weight: 2``.

    Args:
        unsafe_from: Smallest rating of an unsafe response. ``None`` takes a rating between 0 and 1
            for the probability of unsafe.
    """
    index, unsafe = unsafe_ratings(data, unsafe_from)
    return _binary_cross_entropy(data.scores[index], unsafe)


def unsafe_ratings(data: ScoredResponses, unsafe_from: float | None) -> tuple[Tensor, Tensor]:
    """Return the indices ``[R]`` of rated responses, and the probability ``[R]`` of unsafe.

    Args:
        data: The responses.
        unsafe_from: As in ``cost_sign``.
    """
    if unsafe_from is None:
        way_out = "Scale the ratings, or set options.unsafe_from of the loss"
        return ratings_of(data, "cost_sign", 1, way_out)
    index = data.rated()
    rating = require_column(data.rating)[index]
    return index, (rating >= unsafe_from).to(rating.dtype)


def right_signs(data: ScoredResponses, unsafe_from: float | None) -> Tensor:
    """Return True ``[R]`` for each rated response whose score has the sign of its rating.

    Unsafe responses need a score above 0, and safe ones a score of at most 0.

    Args:
        data: The responses.
        unsafe_from: As in ``cost_sign``.
    """
    index, unsafe = unsafe_ratings(data, unsafe_from)
    return (data.scores[index] > 0) == (unsafe > 0.5)


def sign_problem(data: ScoredResponses, unsafe_from: float | None) -> str:
    """Return why the ratings of ``data`` cannot tell right signs, or an empty text.

    Args:
        data: The responses, at least one of them rated.
        unsafe_from: As in ``cost_sign``.
    """
    unsafe = unsafe_ratings(data, unsafe_from)[1] > 0.5
    if bool(unsafe.any()) and not bool(unsafe.all()):
        return ""
    rating = require_column(data.rating)[data.rated()]
    share = "every" if bool(unsafe.all()) else "no"
    return (
        f"the ratings are from {float(rating.min()):g} to {float(rating.max()):g}, so that with "
        f"options.unsafe_from = {unsafe_from} of the loss cost_sign {share} response is unsafe"
    )


def _binary_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of ``s(logits)`` with the probability ``target``, elementwise."""
    return -target * log_sigmoid(logits) - (1 - target) * log_sigmoid(-logits)
