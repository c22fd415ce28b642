"""The table of losses of process reward models.

``STEP_LOSSES[name](steps, **options) -> losses``. Losses are minimised. ``kind`` of a row tells how
many there are: ``step``: one per step, or ``response``: one per response.

Symbols in the formulas:

* ``z``: log-odds that a step is right, ``r``: its score, ``y``: its label
* ``c_1, c_2, ...``: right steps of a response in order, ``W``: its wrong steps
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.registry import Registry

StepLoss = Callable[..., Tensor]
STEP_LOSSES: Registry[StepLoss] = Registry("step loss")
STEP_KINDS = ("step", "response")

RIGHT = 0.5
"""Smallest label of a right step, for losses that compare right with wrong steps."""

NOTHING = -1e30
"""Logit of a step that is left out of a sum. Its exponential is 0, and its gradient too."""


@dataclass(frozen=True, slots=True)
class LabelledSteps:
    """The labelled steps of some responses, response by response, in order.

    Attributes:
        logits: ``[S]``. Log-odds that the step is right. It is the score of a regression.
        scores: ``[S]``.
        labels: ``[S]``. Probability that the step is right.
        response_of: ``[S]`` long. Response of each step, 0 to R - 1. Each has a step.
        weights: ``[R]``. Weight of each response in the mean. ``None`` if all are 1.
    """

    logits: Tensor
    scores: Tensor
    labels: Tensor
    response_of: Tensor
    weights: Tensor | None = None

    @property
    def responses(self) -> int:
        """Return R, the number of responses."""
        return int(self.response_of[-1]) + 1 if self.response_of.numel() else 0


@STEP_LOSSES.register(
    "cross_entropy",
    formula="L = -y log s(z) - (1 - y) log s(-z)",
    latex=r"L=-y\log\sigma(z)-(1-y)\log\sigma(-z)",
    paper="hard labels: arXiv 2305.20050; soft labels: Math-Shepherd, arXiv 2312.08935",
    kind="step",
)
def cross_entropy(steps: LabelledSteps) -> Tensor:
    """Fit the probability that each step is right.

    It equals the cross-entropy of two classes, whose softmax is the sigmoid of their difference.
    """
    return torch.nn.functional.binary_cross_entropy_with_logits(
        steps.logits, steps.labels, reduction="none"
    )


@STEP_LOSSES.register(
    "mse",
    formula="L = (r - y)^2",
    latex=r"L=(r-y)^2",
    paper="regression to Monte-Carlo estimates, arXiv 2406.06592",
    kind="step",
)
def mse(steps: LabelledSteps) -> Tensor:
    """Fit scores to soft labels."""
    return (steps.scores - steps.labels).square()


@STEP_LOSSES.register(
    "pqm",
    formula="L = -mean_t log( exp z_t / (sum_{q <= t} exp z_q + sum_{w in W} exp(z_w + margin)) ), "
    "t over c_0, c_1, ...,  z_0 = 0; c_0 counts if W is not empty",
    latex=r"L=-\frac1{|C|}\sum_{t\in C}\log\frac{\exp z_t}{\sum_{q\in C,q\le t}\exp z_q+"
    r"\sum_{w\in W}\exp(z_w+\zeta)},\quad z_{c_0}=0",
    paper="PQM, arXiv 2410.11287; z_0 and its count as in the authors' code",
    kind="response",
)
def pqm(steps: LabelledSteps, margin: float = 4.0) -> Tensor:
    """Rank each right step above the right ones before it, and above wrong steps by a margin.

    A label of at least 0.5 is right.

    Args:
        steps: The steps.
        margin: ``zeta``: the least lead of right steps over wrong ones.
    """
    logits, right, wrong = _padded(steps)
    start = logits.new_zeros(len(logits), 1)
    ordered = torch.cat([start, logits.masked_fill(~right, NOTHING)], 1)
    worse = (logits + margin).masked_fill(~wrong, NOTHING).logsumexp(1, keepdim=True)
    total = torch.logaddexp(ordered.logcumsumexp(1), worse)
    counted = torch.cat([wrong.any(1, keepdim=True), right], 1)
    losses = torch.where(counted, total - ordered, 0.0)
    return losses.sum(1) / counted.sum(1)


def _padded(steps: LabelledSteps) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, right steps and wrong steps by response, ``[R, T]`` each."""
    row, count = steps.response_of, torch.bincount(steps.response_of)
    place = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    shape = (steps.responses, int(count.max()) if len(count) else 0)
    logits = steps.logits.new_zeros(shape).index_put((row, place), steps.logits)
    is_right = steps.labels >= RIGHT
    right = torch.zeros(shape, dtype=torch.bool, device=row.device)
    wrong = right.index_put((row, place), ~is_right)
    return logits, right.index_put((row, place), is_right), wrong
