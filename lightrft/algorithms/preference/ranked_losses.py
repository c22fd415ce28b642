"""Losses of groups of ranked responses.

``registry`` explains the symbols in the formulas. ``s_i = b d_i`` is the implicit reward of
response ``i``.
"""

from __future__ import annotations

from lightrft.algorithms.preference.inputs import Ranked
from lightrft.algorithms.preference.registry import PREFERENCE_LOSSES, log_sigmoid
from lightrft.algorithms.token_ops import require_column
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.utils.errors import DataError
from lightrft.utils.lazy_imports import Tensor, torch


@PREFERENCE_LOSSES.register(
    "plackett_luce",
    formula="L = -sum_i log( exp(s_i) / (exp(s_i) + sum_{j worse than i} exp(s_j)) ),  s = b d",
    latex=r"L=-\sum_i\log\frac{e^{s_i}}{e^{s_i}+\sum_{j\prec i}e^{s_j}},\quad s_i=\beta d_i",
    paper="DPO, arXiv 2305.18290, appendix A.3",
    needs=["reference"],
    reads=["beta"],
    kind="ranked",
)
def plackett_luce(data: Ranked, settings: PreferenceConfig) -> Tensor:
    """Compute the negative log-likelihood of the order of each group.

    Each response competes with those of a worse rank. Ties do not compete with each other. Two
    responses have the loss of DPO.
    """
    index, real = data.padded()
    scores = settings.beta * data.responses.log_ratio[index]
    return plackett_luce_losses(scores, data.rank[index], real)


@PREFERENCE_LOSSES.register(
    "lipo",
    formula="L = -sum_{rating_i > rating_j} D_ij log s(s_i - s_j),  D_ij = |2^rating_i - "
    "2^rating_j| |1 / log(1 + t_i) - 1 / log(1 + t_j)|, t: place by s, from 1",
    latex=r"L=-\sum_{\psi_i>\psi_j}\Delta_{ij}\log\sigma(s_i-s_j),\quad "
    r"\Delta_{ij}=\big|2^{\psi_i}-2^{\psi_j}\big|\,"
    r"\Big|\frac1{\log(1+\tau_i)}-\frac1{\log(1+\tau_j)}\Big|",
    paper="LiPO-lambda, arXiv 2402.01878, section 3",
    needs=["reference", "rating"],
    reads=["beta"],
    kind="ranked",
)
def lipo(data: Ranked, settings: PreferenceConfig) -> Tensor:
    """Sum the pairwise losses of DPO over each group, weighted by what a swap would cost.

    The weights carry no gradient. Equal scores take places by rank, so that the loss does not
    depend on the order of the responses.
    """
    index, real = data.padded()
    rating = require_column(data.rating)[index]
    scores = settings.beta * data.responses.log_ratio[index]
    gain = torch.exp2(rating.to(scores.dtype))
    if not bool(torch.isfinite(gain).all()):
        raise DataError(
            f"preference loss lipo takes 2 to the power of ratings, and one is "
            f"{float(rating.max()):g}; scale them to about [0, 1]"
        )
    discount = 1 / torch.log1p(_places(scores, data.rank[index], real).to(scores.dtype))
    # above 0 for the pairs that count
    swap_gain = gain[:, :, None] - gain[:, None, :]
    swap_discount = (discount[:, :, None] - discount[:, None, :]).abs()
    losses = -swap_gain * swap_discount * log_sigmoid(scores[:, :, None] - scores[:, None, :])
    better = _better(-rating, real)
    return torch.where(better, losses, torch.zeros_like(losses)).sum((1, 2))


def plackett_luce_losses(scores: Tensor, rank: Tensor, real: Tensor) -> Tensor:
    """Return the negative log-likelihood of the order of each group, ``[G]``.

    Args:
        scores: ``[G, K]``.
        rank: ``[G, K]`` long. 0 is the best of a group. Equal ranks do not compete.
        real: ``[G, K]`` bool. False at padded places.
    """
    worse = _better(rank, real)
    itself = torch.eye(rank.shape[1], dtype=torch.bool, device=rank.device)
    # a padded place competes with itself alone, so that its loss is 0
    competing = scores[:, None, :].masked_fill(~(worse | itself), -torch.inf)
    return (torch.logsumexp(competing, dim=2) - scores).sum(1)


def _better(rank: Tensor, real: Tensor) -> Tensor:
    """Return where response i has a smaller rank than response j, bool ``[G, K, K]``.

    Args:
        rank: ``[G, K]``.
        real: ``[G, K]`` bool. False at padded places.
    """
    both = real[:, :, None] & real[:, None, :]
    return both & (rank[:, :, None] < rank[:, None, :])


def _places(scores: Tensor, rank: Tensor, real: Tensor) -> Tensor:
    """Return the place of each response by descending score, from 1, long ``[G, K]``.

    Args:
        scores: ``[G, K]``.
        rank: ``[G, K]``. Decides between equal scores; of equal ranks the first response is first.
        real: ``[G, K]`` bool. False at padded places, which push no response back.
    """
    column = torch.arange(rank.shape[1], device=rank.device)
    # [G, i, j]: response j comes before response i
    own_rank, other_rank = rank[:, :, None], rank[:, None, :]
    is_first = column[None, :] < column[:, None]
    before = (other_rank < own_rank) | ((other_rank == own_rank) & is_first)
    own_score, other_score = scores[:, :, None], scores[:, None, :]
    before = (other_score > own_score) | ((other_score == own_score) & before)
    return (before & real[:, None, :]).sum(2) + 1
