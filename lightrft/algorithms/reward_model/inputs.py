"""The argument of losses of reward models: scores and labels of responses, for one head.

One type serves pairs, K ranked responses and ratings. The gradient flows to ``outputs`` and
``scores``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lightrft.algorithms.group_ops import padded_groups
from lightrft.algorithms.token_ops import require_column
from lightrft.utils.lazy_imports import Tensor, torch


@dataclass(frozen=True, slots=True)
class ScoredResponses:
    """B responses in G groups with the outputs of one head and their labels for it, in float64.

    A group is the responses to one prompt. Two responses of a group are a pair if their ranks
    differ, and a tie if their ranks are equal.

    Attributes:
        outputs: ``[B, C]``. Outputs of the head: the score; the logits of ``classes`` and of the
            thresholds of ``ordinal``; mean and log variance of ``gaussian``; the score of each
            member of an ``ensemble``.
        scores: ``[B]``. The score that the head makes of its outputs.
        group_of: ``[B]`` long. The group of each response, in ``range(G)``.
        rank: ``[B]`` long. 0 is the best of a group, 1 the next. Equal ranks are ties. A response
            of rank -1 is not compared. ``None`` compares none.
        rating: ``[B]``. How good each response is. NaN has no rating. ``None`` rates none.
        margin: ``[B]``. How much better a response is than the best one of the next rank of its
            group; 0 at the last rank.
        example_weights: ``[B]``. A response of weight 2 counts as two. All responses of a group
            have the same weight. ``None`` is 1.
    """

    outputs: Tensor
    scores: Tensor
    group_of: Tensor
    rank: Tensor | None = None
    rating: Tensor | None = None
    margin: Tensor | None = None
    example_weights: Tensor | None = None

    def __len__(self) -> int:
        """Return the number of responses."""
        return int(self.scores.numel())

    @property
    def groups(self) -> int:
        """Number of groups."""
        return int(self.group_of.max()) + 1 if self.group_of.numel() else 0

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return the members of each group, and which of them are real and have a rank.

        Returns:
            ``index [G, K]`` long and ``ranked [G, K]`` bool. ``index`` is 0 at padded places.
        """
        index, real = padded_groups(self.group_of, self.groups)
        if self.rank is None:
            return index, torch.zeros_like(real)
        return index, real & (self.rank[index] >= 0)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return the better and the worse response of all pairs: two indices ``[P]`` long.

        Pairs are sorted by group, then by the index of the better and of the worse response.
        """
        index, first, second = self._ranks()
        # -1, a place without a rank, is not better than any other
        is_pair = (first >= 0) & (first < second)
        group, i, j = is_pair.nonzero(as_tuple=True)
        return index[group, i], index[group, j]

    def ties(self) -> tuple[Tensor, Tensor]:
        """Return the two responses of all ties: two indices ``[T]`` long, the smaller one first."""
        index, first, second = self._ranks()
        is_tie = (first >= 0) & (first == second)
        group, i, j = is_tie.triu(diagonal=1).nonzero(as_tuple=True)
        return index[group, i], index[group, j]

    def pair_margins(self) -> Tensor:
        """Return how much better the better response of each pair is, ``[P]``.

        With more than two responses it is the sum of the margins from one rank to the next. Of
        the ranks between, the best response counts.
        """
        margin, rank = require_column(self.margin), require_column(self.rank)
        better, worse = self.pairs()
        places = int(rank.max()) + 1 if rank.numel() else 0
        # the step from each rank of a group to its next one; a rank without responses has none
        step = margin.new_zeros(self.groups, places)
        ranked = (rank >= 0).nonzero()[:, 0]
        flat = self.group_of[ranked] * places + rank[ranked]
        largest = step.flatten().scatter_reduce(0, flat, margin[ranked], "amax")
        # [g, k]: the steps of all ranks before k
        before = torch.nn.functional.pad(largest.view_as(step).cumsum(1), (1, 0))
        group = self.group_of[better]
        between = before[group, rank[worse]] - before[group, rank[better] + 1]
        return margin[better] + between

    def rated(self) -> Tensor:
        """Return the indices of the responses with a rating, ``[R]`` long."""
        if self.rating is None:
            return self.group_of.new_zeros(0)
        return (~self.rating.isnan()).nonzero()[:, 0]

    def members(self) -> list[ScoredResponses]:
        """Return the responses once for each output, with this output as their score."""
        return [
            dataclasses.replace(self, outputs=column[:, None], scores=column)
            for column in self.outputs.unbind(1)
        ]

    def _ranks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the members of each group and the ranks of any two of them; -1 has none.

        Returns:
            ``index [G, K]``, and ranks ``[G, K, 1]`` and ``[G, 1, K]``.
        """
        index, ranked = self.padded()
        rank = torch.full_like(index, -1)
        if self.rank is not None:
            rank = self.rank[index].masked_fill(~ranked, -1)
        return index, rank[:, :, None], rank[:, None, :]


def rated_responses(scores: Tensor, rating: Tensor) -> ScoredResponses:
    """Return responses with ``scores [B]`` and ``rating [B]``, each in a group of its own."""
    group = torch.arange(rating.numel(), device=rating.device)
    return ScoredResponses(scores[:, None], scores, group, rating=rating)
