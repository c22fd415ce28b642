"""An actor beside a teacher: the divergence at every response token, in every layout, from the models' own logits."""

from __future__ import annotations

import pytest
import torch

from tests.model_helpers import Float64, hard_batch, small_actor, weights


@pytest.mark.parametrize("layout", ["prefix_shared", "packed", "padded"])
@pytest.mark.parametrize(("family", "other"), [("qwen2", "gemma2"), ("gemma2", "llama")])
def test_the_divergence_is_that_of_the_models_own_logits(
    family: str, other: str, layout: str
) -> None:
    batch = hard_batch()
    with Float64():
        student = small_actor(family, torch.float64, layout, seed=1)
        teacher = small_actor(other, torch.float64, layout, seed=2).requires_grad_(False)
        target = teacher.target(batch, "reverse_kl", temperature=0.7)
        scores = student.score(batch, temperature=0.7, target=target)
        assert scores.divergence is not None
        found = torch.autograd.grad(
            (scores.divergence * weights(batch.tokens, torch.float64)).sum(),
            list(student.parameters()),
        )
        q, p = (a.logits(a.hidden(batch)[0]) / 0.7 for a in (student, teacher))
        q, p = q.log_softmax(-1), p.log_softmax(-1)
        expected = (q.exp() * (q - p)).sum(-1)
        exact = torch.autograd.grad(
            (expected * weights(batch.tokens, torch.float64)).sum(), list(student.parameters())
        )
    assert (scores.divergence - expected).abs().max() < 1e-9
    for f, e in zip(found, exact, strict=True):
        assert (f - e).abs().max() < 1e-9 * max(1.0, float(e.abs().max()))
    assert not target.states.requires_grad


def test_without_a_target_no_divergence_is_made() -> None:
    assert small_actor("qwen2").score(hard_batch()).divergence is None
