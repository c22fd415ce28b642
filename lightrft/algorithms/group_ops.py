"""Numbers of answers compared with those of their group: the answers to one prompt, wherever they stand in the batch."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.algorithms.token_ops import group_sum
from lightrft.utils.lazy_imports import Tensor, torch


@dataclass(frozen=True, slots=True)
class Groups:
    """``x [B]``, and of which of ``count`` groups each answer is: ``of [B]``. What a method says of a group stands at each of its
    answers: ``[B]``. Numbers that are all equal have differences of exactly 0, whatever rounding does to their mean."""

    x: Tensor
    of: Tensor
    count: int

    @staticmethod
    def whole(x: Tensor) -> Groups:
        """All answers as one group."""
        return Groups(x, torch.zeros(len(x), dtype=torch.long, device=x.device), 1)

    def sum(self, x: Tensor) -> Tensor:
        return group_sum(x, self.of, self.count)[self.of]

    def size(self) -> Tensor:
        return self.sum(torch.ones_like(self.x))

    def mean(self) -> Tensor:
        return self.sum(self.x) / self.size()

    def highest(self, x: Tensor | None = None) -> Tensor:
        """Of ``x [B]`` if given; minus infinity stands for none."""
        x = self.x if x is None else x
        none = torch.full((self.count,), -torch.inf, dtype=x.dtype, device=x.device)
        return none.scatter_reduce(0, self.of, x, "amax")[self.of]

    def uneven(self) -> Tensor:
        """Bool: the group's numbers are not all equal."""
        return self.highest() != -self.highest(-self.x)

    def centred(self) -> Tensor:
        """Less the mean of the group."""
        return torch.where(self.uneven(), self.x - self.mean(), torch.zeros_like(self.x))

    def deviation(self) -> Tensor:
        """Unbiased standard deviation; 0 in a group of one."""
        return (self.sum(self.centred().square()) / (self.size() - 1).clamp(min=1)).sqrt()

    def standardised(self, eps: float) -> Tensor:
        """(x - mean) / (deviation + eps)."""
        return torch.where(self.uneven(), self.centred() / (self.deviation() + eps), torch.zeros_like(self.x))
