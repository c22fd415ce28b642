"""Distillation by the sampled token equals the loops, and its expected gradient is that of the exact reverse KL."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.algorithm import AlgorithmConfig, DistillConfig
from lightrft.learner.distillation.targets import add_distillation_reward
from lightrft.learner.policy_update import Objective
from lightrft.models.actor import TokenScores
from lightrft.types import Batch, Segments
from tests.numbers import oracles_advantages
from tests.numbers.compare import assert_equal, every_case, gradient, rows_for
from tests.numbers.distributions import reverse_kl_gradient
from tests.numbers.oracles import Case
from tests.numbers.strategies import batch_of, tensor_of

OPD = AlgorithmConfig.model_validate("opd")


@pytest.mark.parametrize("alone", [True, False])
@every_case(examples=25)
def test_the_log_ratio_to_the_teacher_comes_off_the_advantage_of_its_own_token(
    alone: bool, case: Case, seed: int
) -> None:
    given, teacher = rows_for(case, seed, 2)
    batch = batch_of(case).replace(teacher_logprobs=tensor_of(teacher))
    start = torch.where(batch.mask, 0.0 if alone else tensor_of(given), 0.0).double()
    found = add_distillation_reward(start, batch, DistillConfig(kind="sampled", coef=0.7))
    expected = oracles_advantages.distilled(case, None if alone else given, teacher, 0.7)
    assert_equal(found, expected)
    assert found[~batch.mask].tolist() == [0.0] * int((~batch.mask).sum())


def test_without_a_teacher_the_advantage_is_the_same_object() -> None:
    advantages = torch.ones(3)
    assert (
        add_distillation_reward(
            advantages,
            Batch(Segments.of([[1]]), Segments.of([[1, 2, 3]]), torch.tensor([0])),
            DistillConfig(),
        )
        is advantages
    )


def every_answer(tokens: int, length: int, logprobs: Tensor, teacher: Tensor) -> Batch:
    """All answers of ``length`` tokens to one prompt, each weighted by its probability; log-probs ``[answers, length]``."""
    rows = [list(row) for row in itertools.product(range(tokens), repeat=length)]
    share = logprobs.detach().sum(1, keepdim=True).exp().expand_as(logprobs)
    flat = {"old_logprobs": logprobs.detach(), "teacher_logprobs": teacher, "loss_weights": share}
    columns = {k: v.flatten().double() for k, v in flat.items()}
    return Batch(
        Segments.of([[0]]), Segments.of(rows), torch.zeros(len(rows), dtype=torch.long), **columns
    )


def expected_gradient(batch: Batch, logprobs: Tensor, table: Tensor) -> Tensor:
    """Of the loss that the loop minimises, over all answers."""
    nothing = torch.zeros(batch.tokens, dtype=torch.float64)
    advantages, _ = ADVANTAGES["teacher"](batch, nothing, OPD.advantage)
    batch = batch.replace(advantages=add_distillation_reward(advantages, batch, OPD.distill))
    loss, _ = Objective(OPD, Requirements.of(OPD), 0.0, 0.0)(batch, TokenScores(logprobs.flatten()))
    return gradient(loss, table)


def test_the_expected_gradient_of_one_token_is_that_of_the_exact_reverse_kl() -> None:
    logits = torch.tensor([0.3, -1.2, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([1.0, 0.5, -0.5, 0.2], dtype=torch.float64)
    logprobs, teacher = logits.log_softmax(0)[:, None], other.log_softmax(0)[:, None]
    found = expected_gradient(every_answer(4, 1, logprobs, teacher), logprobs, logits)
    assert found.tolist() == pytest.approx(
        reverse_kl_gradient(logits.tolist(), other.tolist()), abs=1e-12
    )


def test_the_expected_gradient_of_a_sequence_is_that_of_the_reverse_kl_of_each_token_at_the_prefixes_that_are_seen() -> (
    None
):
    """Tables of next-token logits: one for the first token, one for the second after each first. No discount carries a later
    token's reward back, so that the prefixes count as given."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda: torch.randn(4, 3, dtype=torch.float64, generator=generator)  # noqa: E731
    table, other = draw().requires_grad_(), draw()

    def of(rows: Tensor) -> Tensor:
        logp = rows.log_softmax(1)
        return torch.stack(
            [
                torch.stack([logp[0, a], logp[1 + a, b]])
                for a, b in itertools.product(range(3), repeat=2)
            ]
        )

    logprobs = of(table)
    found = expected_gradient(every_answer(3, 2, logprobs, of(other)), logprobs, table)
    p, q = table.log_softmax(1), other.log_softmax(1)
    kl = (p.exp() * (p - q)).sum(1)
    seen = torch.cat([torch.ones(1, dtype=torch.float64), p[0].exp().detach()])
    assert_equal(found.flatten(), gradient((seen * kl).sum(), table).flatten().tolist())


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@every_case(examples=15)
def test_a_divergence_is_aggregated_like_the_policy_loss_and_reaches_rows_without_advantage(
    aggregation: str, case: Case, seed: int
) -> None:
    algorithm = AlgorithmConfig.model_validate(
        {"preset": "opd", "aggregation": aggregation, "distill": {"kind": "jsd", "coef": 0.3}}
    )
    batch = batch_of(case)
    rows = TokenRows.of(batch)
    batch = batch.replace(
        advantages=torch.zeros(batch.tokens, dtype=torch.float64),
        loss_weights=AGGREGATIONS[aggregation](rows, 5),
    )
    divergence = tensor_of(rows_for(case, seed)[0]).abs().requires_grad_()
    objective = Objective(algorithm, Requirements.of(algorithm), 0.0, 0.0)
    active = objective.active(batch).tolist()
    assert active == [i for i in range(len(case)) if case.sampled(i)]
    loss, metrics = objective(batch, TokenScores(tensor_of(case.logprobs), None, divergence))
    weights = torch.where(batch.mask, batch.loss_weights, 0.0)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(
        0.3 * float((weights * divergence.detach()).sum()), abs=1e-12
    )
    assert_equal(gradient(loss, divergence), (0.3 * weights).double().tolist())
    assert "policy/divergence" in metrics.compute() or not batch.mask.any()
