"""One step of supervised training: weights of tokens and examples, noise, and what is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lightrft.algorithms.nonfinite_tokens import without_tokens
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.datasets.sft_dataset import Example
from lightrft.learner.sft_step import (
    examples_to_batch,
    mean_nll,
    sft_step,
    with_mean_weights,
    with_noise,
)
from lightrft.models.actor import Actor
from lightrft.models.attention.embedding_noise import EmbeddingNoise
from lightrft.models.tiny.text import tiny_model
from lightrft.roles import TrainableModel
from lightrft.strategy.single import SingleStrategy
from lightrft.types import Batch
from tests.numbers.exact import evaluate, gradient
from tests.numbers.oracles_distillation import sft_loss

LARGE = 10_000
SMALL = 24


def example(weights: list[float], weight: float = 1.0, prompt: int = 3, seed: int = 0) -> Example:
    """An example of random tokens whose response has ``weights``."""
    g = torch.Generator().manual_seed(seed)
    asked = torch.randint(4, 99, (prompt,), generator=g).tolist()
    said = torch.randint(4, 99, (len(weights),), generator=g).tolist()
    return Example(asked, said, weights, f"e{seed}", weight)


def examples() -> list[Example]:
    """Responses of several lengths, turns of several weights, and examples of several weights."""
    return [
        example([1.0, 1.0, 0.0, 0.5], 2.0, 5, 1),
        example([1.0] * 9, 1.0, 3, 2),
        example([0.25, 0.0, 0.0, 3.0, 1.0, 1.0], 0.125, 8, 3),
        example([1.0], 1.5, 1, 4),
    ]


def policy(**config: Any) -> tuple[SingleStrategy, TrainableModel]:
    strategy = SingleStrategy(StrategyConfig(device="cpu"))
    model = tiny_model("qwen2", seed=3, dtype=torch.float64)
    actor = Actor(model, ModelConfig(**config)).eval()
    return strategy, TrainableModel(actor, strategy.prepare(actor, OptimizerConfig(lr=1e-2), 10))


def stepped(
    batch: Batch, budget: int = LARGE, alpha: float = 0.0, **config: Any
) -> tuple[float, torch.Tensor]:
    """The loss of one step and its gradient."""
    strategy, trained = policy(**config)
    step, found = strategy.step, []

    def recorded(state: Any) -> Any:
        grads = [p.grad for p in trained.model.parameters() if p.grad is not None]
        found.append(torch.cat([grad.detach().clone().flatten() for grad in grads]))
        return step(state)

    strategy.step = recorded  # type: ignore[method-assign]
    noise = lambda whole: with_noise(whole, alpha, seed=1, step=2)  # noqa: E731
    metrics = sft_step(strategy, trained, batch, budget, noise).compute()
    return metrics["loss"], found[0]


weight = st.sampled_from([0.0, 0.0, 1.0, 0.25, 0.1, 3.0])
row = st.tuples(
    st.lists(weight, min_size=1, max_size=5).filter(any), st.sampled_from([1.0, 0.3, 2.0])
)


@settings(max_examples=60, deadline=None)
@given(st.lists(row, min_size=1, max_size=4), st.randoms())
def test_the_loss_is_the_mean_over_weighted_tokens(rows: list[Any], chance: Any) -> None:
    batch = with_mean_weights(examples_to_batch([example(w, e) for w, e in rows]))
    logprobs = [[chance.uniform(-5, 0) for _ in weights] for weights, _ in rows]
    token_weights = [weights for weights, _ in rows]
    example_weights = [e for _, e in rows]

    def oracle(numbers: Any) -> Any:
        return sft_loss(numbers, token_weights, example_weights)

    flat = torch.tensor([x for part in logprobs for x in part], dtype=torch.float64)
    flat.requires_grad_()
    loss, _, _ = mean_nll(flat, batch)
    (found,) = torch.autograd.grad(loss, flat)
    assert loss.item() == pytest.approx(evaluate(oracle, [logprobs]), rel=1e-9)
    (expected,) = gradient(oracle, [logprobs])
    assert found.tolist() == pytest.approx([x for part in expected for x in part], rel=1e-9)


def test_without_weights_the_loss_is_the_mean_over_the_trained_tokens() -> None:
    batch = examples_to_batch([example([1.0, 0.0, 1.0]), example([1.0])])
    assert batch.token_weights is None and batch.example_weights is None
    assert with_mean_weights(batch).loss_weights.tolist() == [1 / 3, 0.0, 1 / 3, 1 / 3]  # type: ignore[union-attr]


def test_an_omitted_token_keeps_its_weight_in_the_divisor() -> None:
    batch = with_mean_weights(examples_to_batch(examples()))
    lost = torch.zeros(batch.tokens, dtype=torch.bool)
    lost[0] = True
    kept = without_tokens(batch, lost)
    assert torch.equal(kept.loss_weights[1:], batch.loss_weights[1:])  # type: ignore[index]


@pytest.mark.parametrize("alpha", [0.0, 5.0])
def test_the_split_of_a_weighted_batch_changes_nothing(alpha: float) -> None:
    batch = examples_to_batch(examples())
    loss, grads = stepped(batch, LARGE, alpha)
    split, split_grads = stepped(batch, SMALL, alpha)
    assert split == pytest.approx(loss, rel=1e-6)
    assert torch.allclose(split_grads, grads, rtol=1e-6, atol=1e-9)


def test_an_example_of_weight_2_counts_as_two_examples() -> None:
    one, other = example([1.0, 1.0], 2.0, seed=1), example([1.0, 1.0, 1.0], 1.0, seed=2)
    loss, grads = stepped(examples_to_batch([one, other]))
    again = example([1.0, 1.0], 1.0, seed=1)
    twice, twice_grads = stepped(examples_to_batch([again, again, other]))
    assert loss == pytest.approx(twice, rel=1e-6)
    assert torch.allclose(grads, twice_grads, rtol=1e-6, atol=1e-9)


def embedded(actor: Actor, batch: Batch) -> list[torch.Tensor]:
    """The token embeddings of each row of ``batch``, as the decoder gets them."""
    found: list[torch.Tensor] = []
    hook = actor.decoder.layers[0].register_forward_pre_hook(
        lambda module, given: found.append(given[0][0])
    )
    with torch.no_grad():
        for row in range(len(batch)):
            actor.score(batch.select(torch.tensor([row])))
    hook.remove()
    return found


@pytest.mark.parametrize("layout", ["prefix_shared", "packed", "padded"])
def test_noise_is_uniform_within_alpha_over_the_root_of_tokens_times_width(layout: str) -> None:
    _, trained = policy(layout=layout)
    batch = examples_to_batch([example([1.0] * 90, prompt=30), example([1.0] * 20, prompt=5)])
    plain = embedded(trained.model, batch)
    noisy = embedded(trained.model, with_noise(batch, 7.0, 0, 0))
    for before, after, tokens in zip(plain, noisy, (120, 25), strict=True):
        # The last token is not computed, but is a token of the row.
        assert before.shape[0] == tokens - 1
        bound = 7.0 / (tokens * before.shape[1]) ** 0.5
        noise = (after - before) / bound
        assert noise.abs().max() <= 1 + 1e-6 and noise.abs().max() > 0.99
        assert abs(float(noise.mean())) < 0.06
        assert float(noise.square().mean()) == pytest.approx(1 / 3, abs=0.03)


def test_noise_is_equal_in_every_layout_and_order() -> None:
    batch = with_noise(examples_to_batch(examples()), 5.0, 0, 3)
    found = []
    for layout in ("prefix_shared", "packed", "padded"):
        _, trained = policy(layout=layout)
        found.append(trained.model.score(batch).logprobs)
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-9)
    assert torch.allclose(found[0], found[2], rtol=0, atol=1e-9)
    _, trained = policy()
    order = torch.tensor([2, 0, 3, 1])
    shuffled = trained.model.score(batch.select(order)).logprobs.split(
        batch.lengths[order].tolist()
    )
    ordered = found[0].split(batch.lengths.tolist())
    for place, row in enumerate(order.tolist()):
        assert torch.allclose(shuffled[place], ordered[row], rtol=0, atol=1e-9)


def noise_of(batch: Batch) -> torch.Tensor:
    noise = EmbeddingNoise.of(batch)
    assert noise is not None
    return noise.values(4)


def test_noise_depends_on_seed_step_and_row() -> None:
    same = [example([1.0, 1.0])] * 2
    batch = examples_to_batch(same)
    first = noise_of(with_noise(batch, 5.0, 0, 0))
    assert torch.equal(first, noise_of(with_noise(batch, 5.0, 0, 0)))
    assert not torch.equal(first, noise_of(with_noise(batch, 5.0, 0, 1)))
    assert not torch.equal(first, noise_of(with_noise(batch, 5.0, 1, 0)))
    assert not torch.equal(first[:3], first[3:6])
    assert torch.allclose(noise_of(with_noise(batch, 10.0, 0, 0)), 2 * first)


def test_no_noise_is_left_behind_or_added_without_alpha() -> None:
    batch = examples_to_batch(examples())
    assert with_noise(batch, 0.0, 0, 0) is batch
    _, trained = policy()
    before = trained.model.score(batch).logprobs
    noisy = trained.model.score(with_noise(batch, 5.0, 0, 0)).logprobs
    assert not torch.equal(noisy, before)
    assert torch.equal(trained.model.score(batch).logprobs, before)


def test_noise_for_responses_that_share_a_prompt_is_refused() -> None:
    batch = with_noise(examples_to_batch(examples()), 5.0, 0, 0)
    shared = batch.replace(prompt_of=torch.zeros(len(batch), dtype=torch.long))
    with pytest.raises(ValueError, match="a prompt for each response"):
        EmbeddingNoise.of(shared)


class Logits(TorchDispatchMode):
    """Records the rows of every matrix with a column for each token of the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.vocabulary,):
                self.rows.append(tensor.numel() // self.vocabulary)
        return out


def test_no_token_is_padding_and_all_logits_never_exist_together() -> None:
    batch = examples_to_batch([example([1.0] * 3000, prompt=4, seed=1), *examples()])
    strategy, trained = policy(logits_mb=1)
    trained.layout_verified = True
    calls: list[int] = []
    trained.model.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    vocabulary = trained.model.text_config.vocab_size
    with Logits(vocabulary) as logits:
        sft_step(strategy, trained, batch, LARGE)
    # The last token of a row predicts nothing, so it is not computed.
    assert calls == [int(batch.prompts.lengths.sum() + batch.lengths.sum()) - len(batch)]
    assert 100 < max(logits.rows) <= 2**20 // (8 * vocabulary)
