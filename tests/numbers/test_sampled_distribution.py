"""Log-probs under every filter of sampling, with gradient, entropy and energy, against loops and against the engine's functions."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightrft.config.strategy import SamplingConfig
from lightrft.engines import sampling as draws
from lightrft.models.attention.ulysses import SequencePart
from lightrft.models.logprobs import logit_energy, token_logprobs
from lightrft.models.sampled_distribution import SampledDistribution, distribution_of
from lightrft.types import Batch, Segments

V, H, ENDS, BANNED = 12, 5, (3, 7), (2, 11)
SETTINGS: list[dict[str, Any]] = [
    {"top_p": 0.7},
    {"top_k": 4},
    {"min_p": 0.2},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"min_new_tokens": 2},
    {"first_token_temperature": 3.0},
    {"temperature": 0.6, "top_p": 0.8, "top_k": 6, "min_p": 0.05},
    {
        "temperature": 1.4,
        "top_p": 0.9,
        "top_k": 9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "min_new_tokens": 3,
        "first_token_temperature": 2.0,
    },
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_new_tokens": 2, "top_p": 0.5},
    {"temperature": 0.0, "first_token_temperature": 2.0, "top_k": 4},
]
ids = [", ".join(f"{k} {v}" for k, v in s.items()) for s in SETTINGS]
CASES = [(s, banned) for banned in ((), BANNED) for s in SETTINGS]
CASES += [({}, BANNED), ({"temperature": 0.7}, BANNED), ({"temperature": 0.0}, BANNED)]
"""Settings and tokens that are never sampled. The responses of ``case`` have one of these."""


def case() -> tuple[Batch, Tensor, nn.Linear]:
    """Two prompts, four responses; a hidden state for each response token; and a head."""
    rng = random.Random(4)
    rows = [[rng.choice([0, 1, 2, 4, 5, 6, 8, 9]) for _ in range(n)] for n in (5, 1, 3, 4)]
    batch = Batch(Segments.of([[0, 1, 1], [8]]), Segments.of(rows), torch.tensor([0, 0, 1, 1]))
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(batch.tokens, H, generator=generator, dtype=torch.float64)
    head = nn.Linear(H, V, bias=True, dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return batch, hidden, head


def oracle(
    logits: list[float],
    seen: set[int],
    step: int,
    target: int,
    s: SamplingConfig,
    banned: tuple[int, ...],
) -> dict[int, float]:
    """Return the probability of each token that the sampler may give, and of ``target``: one filter after the other, by loops."""
    z = list(logits)
    for v in seen:
        z[v] = z[v] * s.repetition_penalty if z[v] < 0 else z[v] / s.repetition_penalty
    early = ENDS if step < s.min_new_tokens else ()
    allowed = [v for v in range(V) if v not in early and (v not in banned or v == target)]
    temperature = s.temperature or 1.0
    if step == 0 and s.first_token_temperature is not None:
        temperature = s.first_token_temperature
    z = [x / temperature for x in z]
    total = sum(math.exp(z[v]) for v in allowed)
    p = {v: math.exp(z[v]) / total for v in allowed}
    kept = sorted(allowed, key=lambda v: -p[v])
    if s.temperature or (step == 0 and s.first_token_temperature is not None):
        if s.top_k:
            kept = kept[: s.top_k]
        mass, first = 0.0, []
        whole = sum(p[v] for v in kept)
        for v in kept:
            if s.top_p < 1 and mass / whole >= s.top_p:
                break
            first.append(v)
            mass += p[v]
        kept = [v for v in first if p[v] >= s.min_p * p[first[0]]]
    kept = list(dict.fromkeys([*kept, target]))
    total = sum(p[v] for v in kept)
    return {v: p[v] / total for v in kept}


def by_loops(
    batch: Batch, logits: Tensor, s: SamplingConfig, banned: tuple[int, ...] = ()
) -> list[dict[int, float]]:
    found = []
    for i, (length, prompt) in enumerate(zip(batch.lengths.tolist(), batch.prompt_of.tolist())):
        start = sum(batch.lengths.tolist()[:i])
        begin = sum(batch.prompts.lengths.tolist()[:prompt])
        asked = batch.prompts.tokens[begin : begin + int(batch.prompts.lengths[prompt])].tolist()
        tokens = batch.responses.tokens[start : start + length].tolist()
        for step in range(length):
            seen = {*asked, *tokens[:step]}
            row = logits[start + step].tolist()
            found.append(oracle(row, seen, step, tokens[step], s, banned))
    return found


def computed(
    batch: Batch,
    hidden: Tensor,
    head: nn.Module,
    s: SamplingConfig,
    banned: tuple[int, ...] = (),
    **options: Any,
):
    part = SequencePart(None, batch.tokens)  # type: ignore[arg-type]
    distribution = SampledDistribution(s, ENDS, banned)
    filters = distribution.at_tokens(batch, part)
    targets = batch.responses.tokens
    options["temperature"] = distribution.temperature
    return token_logprobs(
        hidden, head, targets, entropy=True, filters=filters, **options
    ), logit_energy(hidden, head, targets, filters=filters, **options)


@pytest.mark.parametrize(("settings", "banned"), CASES)
def test_log_probs_entropy_and_energy_are_those_of_the_filtered_distribution(settings, banned):
    batch, hidden, head = case()
    s = SamplingConfig(**settings)
    (logprobs, entropy), energy = computed(batch, hidden, head, s, banned)
    for n, p in enumerate(by_loops(batch, head(hidden), s, banned)):
        target = int(batch.responses.tokens[n])
        assert float(logprobs[n]) == pytest.approx(math.log(p[target]), abs=1e-12)
        assert float(entropy[n]) == pytest.approx(-sum(x * math.log(x) for x in p.values()))
        expected = 1 - 2 * p[target] + sum(x * x for x in p.values())
        assert float(energy[n]) == pytest.approx(expected)


@pytest.mark.parametrize("chunk_mb", [1.0, 3 * 8 * V / 2**20])
@pytest.mark.parametrize(("settings", "banned"), CASES)
def test_the_gradient_is_that_of_the_log_prob_by_finite_differences(settings, banned, chunk_mb):
    batch, hidden, head = case()
    s = SamplingConfig(**settings)
    weights = torch.linspace(-1, 1, batch.tokens, dtype=torch.float64)

    def loss_by_loops(states: Tensor) -> float:
        found = by_loops(batch, head(states).detach(), s, banned)
        targets = batch.responses.tokens.tolist()
        logprob = sum(w * math.log(p[t]) for w, p, t in zip(weights.tolist(), found, targets))
        entropy = sum(-x * math.log(x) for p in found for x in p.values())
        return logprob + 0.3 * entropy

    hidden.requires_grad_()
    (logprobs, entropy), _ = computed(batch, hidden, head, s, banned, chunk_mb=chunk_mb)
    ((weights * logprobs).sum() + 0.3 * entropy.sum()).backward()
    assert hidden.grad is not None and head.weight.grad is not None
    step = 1e-6
    for n in range(batch.tokens):
        for h in range(H):
            moved = [hidden.detach().clone() for _ in range(2)]
            moved[0][n, h] += step
            moved[1][n, h] -= step
            slope = (loss_by_loops(moved[0]) - loss_by_loops(moved[1])) / (2 * step)
            assert float(hidden.grad[n, h]) == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize("settings", SETTINGS, ids=ids)
def test_sampled_tokens_have_the_log_prob_that_the_engine_gives(settings):
    batch, hidden, head = case()
    s = SamplingConfig(**settings)
    logits = head(hidden).detach().float()
    steps = torch.cat([torch.arange(n) for n in batch.lengths.tolist()])
    seen = torch.zeros(batch.tokens, V, dtype=torch.bool)
    for n in range(batch.tokens):
        row = int(batch.row_of[n])
        prompt = int(batch.prompt_of[row])
        begin = int(batch.prompts.lengths[:prompt].sum())
        seen[n, batch.prompts.tokens[begin : begin + int(batch.prompts.lengths[prompt])]] = True
        seen[n, batch.responses.tokens[n - int(steps[n]) : n]] = True
    banned = torch.zeros(batch.tokens, V, dtype=torch.bool)
    banned[:, list(ENDS)] = True
    banned &= steps[:, None] < s.min_new_tokens
    tokens, reported = torch.zeros(batch.tokens, dtype=torch.long), torch.zeros(batch.tokens)
    u = torch.rand(batch.tokens, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for n in range(batch.tokens):
        one = draws.of_first_token(s) if steps[n] == 0 else s
        kept = draws.process(logits[n : n + 1], one, seen[n : n + 1], banned[n : n + 1])
        greedy = one.temperature == 0
        token, logprob = draws.greedy(kept) if greedy else draws.sample_tokens(kept, u[n : n + 1])
        tokens[n], reported[n] = token[0], logprob[0]
    filters = SampledDistribution(s, ENDS).at_tokens(
        batch,
        SequencePart(None, batch.tokens),  # type: ignore[arg-type]
    )
    found, _ = token_logprobs(hidden.float(), head.float(), tokens, filters=filters)
    torch.testing.assert_close(found, reported, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_mb", [1.0, 3 * 8 * V / 2**20])
def test_bans_alone_give_the_same_by_the_kernel_of_linear_heads_and_by_autograd(chunk_mb):
    batch, hidden, head = case()
    options = {"softcap": 3.0, "scale": 0.7, "chunk_mb": chunk_mb}
    found = []
    for one in (head, nn.Sequential(head)):
        states = hidden.clone().requires_grad_()
        one.zero_grad()
        (logprobs, entropy), _ = computed(
            batch, states, one, SamplingConfig(temperature=0.8), BANNED, **options
        )
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
        found.append([logprobs, entropy, states.grad, head.weight.grad.clone()])
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow)


def test_a_token_outside_of_the_filter_counts_as_inside():
    batch, hidden, head = case()
    (logprobs, _), _ = computed(batch, hidden, head, SamplingConfig(top_k=1))
    assert logprobs.isfinite().all() and (logprobs < 0).any()


def test_an_end_that_may_not_be_sampled_yet_has_no_probability():
    batch, hidden, head = case()
    batch = batch.replace(responses=Segments.of([[3], [1, 7]]), prompt_of=torch.tensor([0, 1]))
    (logprobs, _), _ = computed(batch, hidden[:3], head, SamplingConfig(min_new_tokens=2))
    assert logprobs.isneginf().tolist() == [True, False, True]


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7}, {"temperature": 0.0, "top_p": 0.5, "top_k": 3}]
)
def test_without_an_acting_filter_the_distribution_is_a_temperature(settings):
    sampling = SamplingConfig(**settings)
    assert distribution_of(sampling, ENDS) == (sampling.temperature or 1.0)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_tokens_that_are_never_sampled_are_part_of_the_distribution(temperature):
    found = distribution_of(SamplingConfig(temperature=temperature), ENDS, BANNED)
    assert isinstance(found, SampledDistribution)
    assert not found.depends_on_tokens


@pytest.mark.parametrize("settings", SETTINGS, ids=ids)
def test_every_filter_is_part_of_the_distribution(settings):
    assert isinstance(distribution_of(SamplingConfig(**settings), ENDS), SampledDistribution)
