"""One step of preference learning: the same loss and gradient for any split of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightrft.algorithms.preference.objective import preference_loss, preference_terms
from lightrft.algorithms.preference.requirements import preference_requirements
from lightrft.config.base import build
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.learner.preference_batch import (
    PreferenceStats,
    TokenColumns,
    mismatched,
    pair_rows,
    preferences_of,
)
from lightrft.learner.preference_step import (
    PreferenceSettings,
    coupled,
    mismatched_kl,
    preference_step,
    with_reference,
)
from lightrft.models.actor import Actor
from lightrft.models.tiny.text import tiny_model
from lightrft.roles import FrozenModel, Roles, TrainableModel
from lightrft.strategy.single import SingleStrategy
from lightrft.types import CORRUPTED, GOLD, Batch, Ragged, Segments
from tests.unit.trainer.test_rl_step import Unused

LARGE = 10_000
PAIRS = 4


def roles_of() -> Roles:
    strategy = SingleStrategy(StrategyConfig(device="cpu"))
    actor = Actor(tiny_model("qwen2", seed=3, dtype=torch.float64)).eval()
    frozen = Actor(tiny_model("qwen2", seed=4, dtype=torch.float64)).eval().requires_grad_(False)
    policy = TrainableModel(actor, strategy.prepare(actor, OptimizerConfig(lr=1e-2), 10))
    return Roles(strategy, policy, Unused(), Unused(), None, reference=FrozenModel(frozen))  # type: ignore[arg-type]


def batch_of(*ranks: int, seed: int = 0, corrupted: bool = False) -> Batch:
    """``PAIRS`` examples with responses of ``ranks``, in mixed lengths, some tokens not trained."""
    g = torch.Generator().manual_seed(seed)
    kinds = [*ranks, *([CORRUPTED] if corrupted else [])]
    prompts, answers, prompt_of, example, rank = [], [], [], [], []
    for e in range(PAIRS):
        prompts.append(torch.randint(4, 99, (5 + e,), generator=g).tolist())
        if corrupted:
            prompts.append(torch.randint(4, 99, (5 + e,), generator=g).tolist())
        for k, kind in enumerate(kinds):
            answers.append(torch.randint(4, 99, (2 + (3 * e + 5 * k) % 7,), generator=g).tolist())
            prompt_of.append(
                len(prompts) - 1 if kind == CORRUPTED else len(prompts) - 1 - corrupted
            )
            example.append(e)
            rank.append(kind)
    tokens = sum(map(len, answers))
    rows = len(answers)
    sampled = torch.rand(tokens, generator=g) > 0.2
    sampled[torch.tensor([len(a) for a in answers]).cumsum(0) - 1] = True
    return Batch(
        Segments.of(prompts),
        Segments.of(answers),
        torch.tensor(prompt_of),
        sampled=sampled,
        example=torch.tensor(example),
        rank=torch.tensor(rank),
        rating=torch.rand(rows, generator=g),
        margin=torch.rand(rows, generator=g),
        desirable=torch.rand(rows, generator=g) > 0.4,
        example_weights=None,
    )


def settings_of(budget: int, **tree: Any) -> PreferenceSettings:
    config = build(PreferenceConfig, tree)
    return PreferenceSettings(config, preference_requirements(config), budget, 0)


def stepped(settings: PreferenceSettings, batch: Batch) -> tuple[dict[str, Any], torch.Tensor]:
    """The metrics of one step, and its gradient."""
    roles, found = roles_of(), []
    step = roles.strategy.step

    def recorded(state: Any) -> Any:
        grads = [p.grad for p in roles.actor.parameters() if p.grad is not None]
        found.append(torch.cat([grad.detach().clone().flatten() for grad in grads]))
        return step(state)

    roles.strategy.step = recorded  # type: ignore[method-assign]
    metrics = preference_step(roles, batch, settings, PreferenceStats(), 0)
    return metrics.compute(), found[0]


def expected(settings: PreferenceSettings, batch: Batch) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the whole batch in one graph, without micro-batches."""
    roles = roles_of()
    kl = mismatched_kl(batch, roles, settings) if settings.requirements.kl else None
    batch = with_reference(batch, roles, settings)
    scores = roles.actor.score(batch, energy=True)
    columns = TokenColumns(scores.logprobs, None, scores.energy)
    stats = PreferenceStats()
    first = preferences_of(batch, columns, settings.requirements, kl)
    stats.include(first, settings.preference.beta, settings.preference.beta)
    data = preferences_of(batch, columns, settings.requirements, kl, stats)
    loss = preference_loss(preference_terms(data, settings.preference))
    loss.backward()
    grads = [p.grad for p in roles.actor.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat([grad.flatten() for grad in grads])


CASES: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("dpo", {"losses": ["sigmoid"]}, (0, 1)),
    ("mpo", {"preset": "mpo"}, (0, 1)),
    ("simpo", {"preset": "simpo"}, (0, 1)),
    ("aot", {"preset": "aot"}, (0, 1)),
    ("beta_dpo", {"losses": ["beta_dpo"]}, (0, 1)),
    ("odpo", {"preset": "odpo"}, (0, 1)),
    ("tpo", {"preset": "tpo"}, (GOLD, 0, 1)),
    ("wpo", {"preset": "wpo"}, (0, 1)),
    ("kto", {"preset": "kto"}, (0, 1)),
    ("bco", {"preset": "bco"}, (0, 1)),
    ("plackett_luce", {"preset": "plackett_luce"}, (0, 1, 2)),
    ("dpo over all pairs of three", {"losses": ["sigmoid"]}, (0, 1, 2)),
]


@pytest.mark.parametrize("budget", [16, LARGE])
@pytest.mark.parametrize(("tree", "ranks"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_any_split_gives_the_loss_and_gradient_of_the_whole_batch(
    tree: dict[str, Any], ranks: tuple[int, ...], budget: int
) -> None:
    batch, settings = batch_of(*ranks), settings_of(budget, **tree)
    check_step(batch, settings)


def check_step(batch: Batch, settings: PreferenceSettings) -> None:
    metrics, gradient = stepped(settings, batch)
    loss, whole = expected(settings, batch)
    largest = float(whole.abs().max())
    whole_at_once = settings.max_tokens == LARGE and not coupled(batch, settings, "prefix_shared")
    # Log-probs are float32: those of 8 tokens of up to 8 nats, each rounded.
    exact = 1e-9 if whole_at_once else 8 * 8 * 2.0**-24
    assert metrics["loss"] == pytest.approx(loss, rel=exact)
    assert largest > 1e-4
    torch.testing.assert_close(gradient, whole, rtol=0, atol=exact * largest)


def test_a_group_above_the_budget_takes_two_passes_and_a_smaller_one_takes_one() -> None:
    batch = batch_of(0, 1)
    assert coupled(batch, settings_of(16, losses=["sigmoid"]), "prefix_shared")
    assert not coupled(batch, settings_of(LARGE, losses=["sigmoid"]), "prefix_shared")
    assert coupled(batch, settings_of(LARGE, preset="aot"), "prefix_shared")
    assert not coupled(batch, settings_of(16, preset="kto"), "prefix_shared")


def test_a_response_after_corrupted_media_meets_its_pair_though_its_prompt_is_another() -> None:
    check_step(batch_of(0, 1, corrupted=True), settings_of(LARGE, preset="mdpo"))


def test_mismatched_pairs_have_each_response_once_and_never_after_its_own_prompt() -> None:
    batch = batch_of(0, 1)
    other = mismatched(batch)
    assert len(other) == len(batch)
    assert not (other.prompt_of == batch.prompt_of).any()
    assert sorted(other.prompt_of.unique().tolist()) == list(range(PAIRS))


def test_a_mismatched_pair_takes_the_next_prompt_that_is_another() -> None:
    prompts = [[5, 6], [5, 6], [7], [5, 6], [5]]
    batch = Batch(
        Segments.of(prompts), Segments.of([[1], [2], [3], [4], [5]]), torch.arange(len(prompts))
    )
    assert mismatched(batch).prompt_of.tolist() == [2, 2, 3, 4, 0]
    same = batch.replace(prompts=Segments.of([[5, 6]] * len(prompts)))
    assert len(mismatched(same)) == 0
    pictures = Ragged(torch.arange(5.0)[:, None].bfloat16(), torch.ones(5, dtype=torch.long))
    seen = same.replace(
        prompts=Segments(same.prompts.tokens, same.prompts.lengths, {"x": pictures})
    )
    assert mismatched(seen).prompt_of.tolist() == [1, 2, 3, 4, 0]


def test_a_step_of_one_prompt_alone_has_no_kl_of_mismatched_pairs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch = batch_of(0)
    batch = batch.replace(prompts=Segments.of([[5, 6]] * PAIRS))
    assert mismatched_kl(batch, roles_of(), settings_of(LARGE, preset="kto")) == 0.0
    assert "counts as 0" in caplog.text


def test_pairs_are_found_by_rank_and_ties_make_none() -> None:
    batch = batch_of(0, 1, 1)
    better, worse = pair_rows(batch)
    assert better.tolist() == [0, 0, 3, 3, 6, 6, 9, 9]
    assert worse.tolist() == [1, 2, 4, 5, 7, 8, 10, 11]


def test_an_example_of_weight_2_counts_as_two() -> None:
    settings = settings_of(LARGE, losses=["sigmoid", {"name": "sft", "weight": 0.5}])
    batch = batch_of(0, 1)
    twice = torch.cat([torch.arange(len(batch)), torch.tensor([2, 3])])
    doubled = batch.select(twice)
    doubled = doubled.replace(example=torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4]))
    weighted = batch.replace(example_weights=torch.tensor([1.0, 1, 2, 2, 1, 1, 1, 1]))
    first, second = stepped(settings, doubled), stepped(settings, weighted)
    assert first[0]["loss"] == pytest.approx(second[0]["loss"], rel=1e-9)
    torch.testing.assert_close(first[1], second[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("preset", "kind"), [("bco", "rewards"), ("beta_dpo", "margins")])
def test_a_log_prob_that_is_not_finite_stays_out_of_the_running_numbers(
    preset: str, kind: str
) -> None:
    settings = (
        settings_of(LARGE, losses=[preset])
        if kind == "margins"
        else settings_of(LARGE, preset=preset)
    )
    batch = with_reference(batch_of(0, 1), roles_of(), settings)
    token = int(batch.mask.nonzero()[0])
    spoiled = batch.ref_logprobs.clone()
    spoiled[token] = -torch.inf
    left_out = batch.sampled.clone()
    left_out[token] = False
    found, wanted = PreferenceStats(), PreferenceStats()
    metrics = preference_step(
        roles_of(), batch.replace(ref_logprobs=spoiled), settings, found, 0
    ).compute()
    preference_step(roles_of(), batch.replace(sampled=left_out), settings, wanted, 0)
    assert metrics["preference/nonfinite_tokens"] == 1
    assert found.state_dict()[kind] == wanted.state_dict()[kind]
    assert wanted.state_dict()[kind][1] != 0
