"""Drawing functions against slow float64 oracles."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.config.strategy import SamplingConfig
from lightrft.engines import sampling as draws
from tests.model_helpers import rounding


def oracle(logits: list[float], sampling: SamplingConfig, seen: set[int]) -> list[float]:
    """Probabilities by the definitions, one row at a time, in plain Python floats."""
    x = [float(v) for v in logits]
    for token in seen:
        x[token] = (
            x[token] * sampling.repetition_penalty
            if x[token] < 0
            else x[token] / sampling.repetition_penalty
        )
    x = [v / sampling.temperature for v in x]
    keep = set(range(len(x)))
    if sampling.top_k:
        kth = sorted(x, reverse=True)[min(sampling.top_k, len(x)) - 1]
        keep = {i for i in keep if x[i] >= kth}
    probability = normalised(x, keep)
    if sampling.top_p < 1:
        mass, kept = 0.0, set()
        for i in sorted(keep, key=lambda i: (-probability[i], i)):
            if mass >= sampling.top_p:
                break
            kept.add(i)
            mass += probability[i]
        keep = kept
        probability = normalised(x, keep)
    if sampling.min_p > 0:
        keep = {i for i in keep if probability[i] >= sampling.min_p * max(probability)}
    return normalised(x, keep)


def normalised(x: list[float], keep: set[int]) -> list[float]:
    top = max(x[i] for i in keep)
    weights = [math.exp(v - top) if i in keep else 0.0 for i, v in enumerate(x)]
    return [w / math.fsum(weights) for w in weights]


CONFIGS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.3),
    SamplingConfig(temperature=1.7, top_k=5),
    SamplingConfig(top_p=0.6),
    SamplingConfig(min_p=0.2),
    SamplingConfig(repetition_penalty=1.4),
    SamplingConfig(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05, repetition_penalty=0.7),
]


@pytest.mark.parametrize(
    "sampling", CONFIGS, ids=lambda c: str(c.model_dump(exclude_defaults=True))
)
@pytest.mark.parametrize("vocabulary", [1, 2, 3, 17, 100, 1025])
def test_every_filter_gives_the_distribution_of_its_definition(
    sampling: SamplingConfig, vocabulary: int
) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(4, vocabulary, generator=generator) * 2
    seen = torch.rand(4, vocabulary, generator=generator) < 0.3
    got = draws.process(logits, sampling, seen if sampling.repetition_penalty != 1 else None)
    marked = seen if sampling.repetition_penalty != 1 else torch.zeros_like(seen)
    want = [
        oracle(row.tolist(), sampling, set(torch.nonzero(s)[:, 0].tolist()))
        for row, s in zip(logits, marked)
    ]
    want = torch.tensor(want, dtype=torch.float64)
    assert torch.equal(torch.isinf(got), want == 0)
    bound = rounding(vocabulary)
    torch.testing.assert_close(torch.softmax(got.double(), -1), want, atol=bound, rtol=bound)

    u = torch.rand(4, generator=generator, dtype=torch.float64)
    tokens, logprobs = draws.sample_tokens(got, u)
    torch.testing.assert_close(
        logprobs.double(), want.gather(1, tokens[:, None])[:, 0].log(), atol=bound, rtol=bound
    )


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 2.0**-52, 0.25, 0.5, 1 - 2.0**-52]),
    st.sampled_from([1.0, 10.0, 60.0]),
)
def test_the_drawn_token_is_the_one_whose_interval_holds_u_and_is_never_impossible(
    vocabulary: int, seed: int, u: float, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocabulary, generator=generator) * spread
    removed = torch.rand(1, vocabulary, generator=generator) < 0.5
    removed[0, int(torch.randint(vocabulary, (1,), generator=generator))] = False
    logits = logits.masked_fill(removed, -torch.inf)
    token, logprob = draws.sample_tokens(logits, torch.tensor([u], dtype=torch.float64))
    probability = torch.softmax(logits.double(), -1)[0]
    cumulative = torch.cumsum(probability, 0)
    assert probability[token] > 0
    assert logprob > -torch.inf
    assert cumulative[token] - probability[token] <= u + rounding(vocabulary)
    assert cumulative[token] >= u - rounding(vocabulary)


def test_masses_at_both_ends_are_reached_exactly() -> None:
    logits = torch.full((2, 300), -torch.inf)
    logits[:, 7] = 0.0
    logits[:, 290] = 0.0
    tokens, logprobs = draws.sample_tokens(
        logits, torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    )
    assert tokens.tolist() == [7, 290]
    assert logprobs.tolist() == pytest.approx([-math.log(2)] * 2)


def test_samples_over_many_seeds_follow_the_softmax() -> None:
    count, vocabulary = 40_000, 40
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(1))
    for step in (0, 5):
        u = torch.from_numpy(
            draws.uniforms(draws.seed_keys(list(range(count))), np.full(count, step))
        )
        tokens, _ = draws.sample_tokens(logits.expand(count, -1), u)
        seen = torch.bincount(tokens, minlength=vocabulary).double()
        expected = torch.softmax(logits.double(), -1)[0] * count
        chi2 = float(((seen - expected) ** 2 / expected).sum())
        assert chi2 < 72.1  # 39 degrees of freedom: above this once in a thousand


def test_uniform_numbers_depend_on_seed_and_step_only_and_are_even() -> None:
    keys = draws.seed_keys([0, 1, -1, 2**70 + 5])
    steps = np.array([3, 3, 3, 9])
    together = draws.uniforms(keys, steps)
    alone = [draws.uniforms(keys[i : i + 1], steps[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(together.tolist())) == 4
    stream = draws.uniforms(np.repeat(draws.seed_keys([11]), 100_000), np.arange(100_000))
    assert stream.min() >= 0
    assert stream.max() < 1
    counts = np.bincount((stream * 64).astype(int), minlength=64)
    assert (
        (counts - 100_000 / 64) ** 2 / (100_000 / 64)
    ).sum() < 103.4  # 63 degrees of freedom, once in a thousand
    assert abs(np.corrcoef(stream[:-1], stream[1:])[0, 1]) < 0.01
    neighbour = draws.uniforms(np.repeat(draws.seed_keys([12]), 100_000), np.arange(100_000))
    assert abs(np.corrcoef(stream, neighbour)[0, 1]) < 0.01


def test_greedy_takes_the_largest_with_its_log_prob_at_temperature_1_and_keeps_nan_visible() -> (
    None
):
    tokens, logprobs = draws.greedy(torch.tensor([[1.0, 3.0, 2.0], [float("nan"), 0.0, 0.0]]))
    assert tokens[0] == 1
    assert logprobs[0].item() == pytest.approx(-math.log(1 + math.exp(-1) + math.exp(-2)))
    assert torch.isnan(logprobs[1])


def test_logits_that_are_not_numbers_give_a_log_prob_that_is_not_a_number() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, float("nan"), 1.0], [-torch.inf] * 3])
    _, logprobs = draws.sample_tokens(logits, torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64))
    assert torch.isnan(logprobs).tolist() == [False, True, True]


def test_nothing_is_sorted_when_nothing_is_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("sorted")

    monkeypatch.setattr(torch, "sort", refuse)
    monkeypatch.setattr(torch, "topk", refuse)
    logits = torch.randn(3, 50)
    torch.testing.assert_close(draws.process(logits, SamplingConfig(temperature=0.5)), logits * 2)
    with pytest.raises(AssertionError, match="sorted"):
        draws.process(logits, SamplingConfig(top_p=0.5))
