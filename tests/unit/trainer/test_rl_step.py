"""What is not needed is not run; and no split of a batch changes a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightrft.algorithms.requirements import Requirements
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.config.base import build, deep_merge
from lightrft.config.model import ModelConfig
from lightrft.config.presets import PRESETS
from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.config.verbs import RLConfig
from lightrft.learner.controllers import Controllers
from lightrft.models.actor import Actor
from lightrft.models.tiny.text import tiny_model
from lightrft.roles import FrozenModel, Roles, TrainableModel
from lightrft.rollout.accounting import CollectedRollouts, FilterResult
from lightrft.strategy.single import SingleStrategy
from lightrft.trainer.phases import PHASES, StepContext, run_phases, with_policy, with_reference
from lightrft.trainer.rl_step import equal_groups, learn
from lightrft.types import Batch, Prompt, Rollout, Segments
from tests.model_helpers import gap


def batch_of(groups: int = 3, samples: int = 4, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    rows = groups * samples
    prompts = [torch.randint(4, 99, (5 + p,), generator=g).tolist() for p in range(groups)]
    answers = [torch.randint(4, 99, (1 + (3 * i) % 7,), generator=g).tolist() for i in range(rows)]
    tokens = sum(map(len, answers))
    return Batch(
        Segments.of(prompts),
        Segments.of(answers),
        torch.arange(groups).repeat_interleave(samples),
        sampled=torch.rand(tokens, generator=g) > 0.1,
        behavior_logprobs=-torch.rand(tokens, generator=g),
        rewards=torch.randn(rows, generator=g),
        truncated=torch.zeros(rows, dtype=torch.bool),
        costs=torch.randn(rows, 1, generator=g),
    )


def config_of(**over: Any) -> RLConfig:
    tree = {
        "algorithm": {"preset": "grpo", "kl": {"coef": 0.0}},
        "sampling": {"max_new_tokens": 8},
        "optimizer": {"lr": 1e-2},
    }
    return build(RLConfig, deep_merge(tree, over))


class Unused:
    def close(self) -> None: ...

    def submit(self, rollout: Any) -> None: ...

    def results(self, wait: bool) -> Iterator[Any]:
        yield from ()


def roles_of(config: RLConfig, dtype: torch.dtype = torch.float32) -> Roles:
    strategy = SingleStrategy(StrategyConfig(device="cpu"))
    actor = Actor(
        tiny_model("qwen2", seed=3, dtype=dtype), ModelConfig(layout=config.model.layout)
    ).eval()
    frozen = Actor(tiny_model("qwen2", seed=4, dtype=dtype)).eval()
    state = strategy.prepare(actor, OptimizerConfig(lr=config.optimizer.lr), 10)
    teacher = FrozenModel(
        Actor(tiny_model("llama", seed=5, dtype=dtype)).eval().requires_grad_(False)
    )
    policy = TrainableModel(actor, state)
    return Roles(strategy, policy, Unused(), Unused(), None, reference=frozen, teacher=teacher)  # type: ignore[arg-type]


def context_of(roles: Roles, config: RLConfig, **over: Any) -> StepContext:
    return StepContext(
        roles=roles,
        config=config,
        requirements=Requirements.of(config.algorithm),
        **{"controllers": Controllers.of(config.algorithm), **over},
    )


def step(config: RLConfig, batch: Batch, roles: Roles) -> dict[str, torch.Tensor]:
    run_phases(batch, context_of(roles, config), PHASES)
    return {n: p.detach().clone() for n, p in roles.actor.named_parameters()}


@pytest.mark.parametrize(
    ("over", "computed"),
    [
        ({}, False),
        ({"train": {"num_mini_batches": 2}}, True),
        ({"train": {"ppo_epochs": 2}}, True),
        ({"algorithm": {"kl": {"where": "reward", "estimator": "k1", "coef": 0.1}}}, True),
        ({"algorithm": {"kl": {"where": "loss", "coef": 0.1}}}, False),
    ],
)
def test_old_logprobs_are_computed_only_where_a_later_update_or_a_reward_reads_them(
    over: dict[str, Any], computed: bool
) -> None:
    config = config_of(**over)
    found = with_policy(batch_of(), context_of(roles_of(config), config))
    assert (found.old_logprobs is not None) is computed


def test_the_reference_runs_only_where_a_kl_term_reads_it() -> None:
    without, with_kl = config_of(), config_of(algorithm={"kl": {"coef": 0.1}})
    found = with_reference(batch_of(), context_of(roles_of(without), without))
    assert found.ref_logprobs is None
    found = with_reference(batch_of(), context_of(roles_of(with_kl), with_kl))
    assert found.ref_logprobs is not None


def test_the_clip_fraction_is_one_of_all_tokens_and_is_there_without_a_gradient() -> None:
    config = config_of()
    batch = batch_of()
    assert batch.rewards is not None
    equal = torch.ones_like(batch.rewards)
    one = torch.where(batch.prompt_of == 1, equal, batch.rewards)
    found = {}
    for name, rewards in (("none", equal), ("some", one), ("all", batch.rewards)):
        roles = roles_of(config, torch.float64)
        scored = batch.replace(rewards=rewards)
        context = context_of(roles, config)
        run_phases(scored, context, PHASES[-2:])
        found[name] = context.metrics.compute()
    assert found["none"]["policy/clip_fraction"] == 0.0
    assert all("policy/clip_fraction" in values for values in found.values())
    assert found["none"]["policy/frac_rows_with_loss"] == 0.0


def test_a_group_of_equal_rewards_counts_as_trained_once_a_response_has_an_advantage() -> None:
    batch = batch_of(groups=3, samples=4)
    assert batch.rewards is not None
    outcomes = torch.where(batch.prompt_of == 1, torch.ones(12), batch.rewards).double()
    outcomes = torch.where(batch.prompt_of == 2, torch.zeros(12).double(), outcomes)
    batch = batch.replace(outcomes=outcomes)
    some = torch.tensor([True] * 5 + [False] * 7)
    assert equal_groups(batch, torch.zeros(12, dtype=torch.bool)) == 0
    assert equal_groups(batch, some) == 1  # the first group is unequal, the last has no advantage
    assert equal_groups(batch, torch.ones(12, dtype=torch.bool)) == 2


@pytest.mark.usefixtures("exact")
def test_rows_without_any_loss_term_are_not_run_and_change_nothing() -> None:
    config = config_of()
    batch = batch_of()
    flat = batch.rewards
    assert flat is not None
    batch = batch.replace(rewards=torch.where(batch.prompt_of == 1, torch.ones_like(flat), flat))
    seen: list[int] = []
    roles = roles_of(config, torch.float64)
    score = roles.actor.score
    roles.actor.score = lambda part, **k: (seen.append(len(part)), score(part, **k))[1]  # type: ignore[method-assign]
    found = gradients(config, batch, roles)
    assert sum(seen) == 8
    everything = config_of(algorithm={"entropy": {"coef": 1e-300}})
    assert gap(found, gradients(everything, batch)) < 1e-9


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence_sum", "constant", "prompt"])
@pytest.mark.parametrize("layout", ["prefix_shared", "packed", "padded"])
def test_neither_micro_batches_nor_layouts_change_a_step(aggregation: str, layout: str) -> None:
    over = {
        "algorithm": {"aggregation": aggregation, "kl": {"coef": 0.1}, "entropy": {"coef": 0.01}}
    }
    whole = config_of(**over)
    pieces = config_of(**over, train={"max_tokens_per_micro_batch": 16}, model={"layout": layout})
    batch = batch_of()
    assert gap(gradients(pieces, batch), gradients(whole, batch)) < 1e-9


def runs_alone(preset: str) -> bool:
    """Whether a preset needs neither another model nor terms of a reward."""
    algorithm = AlgorithmConfig.model_validate(preset)
    other = {"critic", "prm", "greedy", "teacher"}
    return not Requirements.of(algorithm).needs & other and algorithm.normalize.terms == "none"


def near_policy(batch: Batch, config: RLConfig) -> Batch:
    """``batch`` as if the policy, or one a little way off, had drawn it."""
    logprobs = roles_of(config).actor.score(batch, temperature=1.0).logprobs.detach()
    noise = torch.rand(batch.tokens, generator=torch.Generator().manual_seed(1)) - 0.5
    return batch.replace(behavior_logprobs=logprobs + 0.2 * noise, sample=torch.arange(len(batch)))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("preset", [preset for preset in sorted(PRESETS) if runs_alone(preset)])
def test_no_micro_batch_changes_a_step_of_a_preset(preset: str) -> None:
    tree = {
        "algorithm": preset,
        "sampling": {"max_new_tokens": 8},
        "train": {"num_mini_batches": 2},
    }
    whole = build(RLConfig, tree)
    pieces = build(RLConfig, deep_merge(tree, {"train": {"max_tokens_per_micro_batch": 16}}))
    batch = near_policy(batch_of(groups=4), whole)
    one, other = (gradients(config, batch) for config in (whole, pieces))
    assert max(float(g.abs().max()) for g in one.values()) > 1e-6
    assert gap(other, one) < 1e-9


def gradients(
    config: RLConfig, batch: Batch, roles: Roles | None = None
) -> dict[str, torch.Tensor]:
    """The gradient, in float64, that the optimizer gets for ``batch``."""
    roles = roles or roles_of(config, torch.float64)
    found: dict[str, torch.Tensor] = {}

    def keep(state: Any) -> Any:
        found.update(
            {n: p.grad.clone() for n, p in roles.actor.named_parameters() if p.grad is not None}
        )
        return SingleStrategy.step(roles.strategy, state)  # type: ignore[arg-type]

    roles.strategy.step = keep  # type: ignore[method-assign]
    step(config, batch, roles)
    return found


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", ["sampled", "jsd"])
def test_neither_micro_batches_nor_layouts_change_what_is_learned_from_a_teacher(kind: str) -> None:
    over = {
        "algorithm": {"preset": "opd", "distill": {"kind": kind}},
        "train": {"max_tokens_per_micro_batch": 16},
    }
    whole = config_of(**{**over, "train": {}})
    one = gradients(whole, batch_of())
    for layout in ("prefix_shared", "padded"):
        other = gradients(config_of(**over, model={"layout": layout}), batch_of())
        assert max(float(g.abs().max()) for g in one.values()) > 1e-3
        assert gap(other, one) < 1e-9


@pytest.mark.parametrize("preset", ["grpo", "gspo", "clip_cov"])
def test_a_policy_that_gives_a_token_no_probability_is_trained_on_the_others(preset: str) -> None:
    config = config_of(algorithm={"preset": preset, "kl": {}}, train={"num_mini_batches": 2})
    roles, batch = roles_of(config), near_policy(batch_of(), config)
    score = roles.actor.score

    def without_the_first(part: Batch, **options: Any) -> Any:
        scores = score(part, **options)
        first = torch.arange(part.tokens) == 0
        return scores._replace(logprobs=torch.where(first, -torch.inf, scores.logprobs))

    before = {n: p.detach().clone() for n, p in roles.actor.named_parameters()}
    roles.actor.score = without_the_first  # type: ignore[method-assign]
    after = step(config, batch, roles)
    assert all(torch.isfinite(p).all() for p in after.values())
    assert any(not torch.equal(p, before[n]) for n, p in after.items())


class Told(Unused):
    """An engine that takes weights and does nothing with them."""

    compiled = None

    def load_weights(self, weights: Any, version: int) -> None:
        list(weights)


def spoil_first_of_group(
    batch: Batch, rewards: torch.Tensor, *, max_new_tokens: int
) -> torch.Tensor:
    """NaN for the first response to each prompt."""
    return torch.where(batch.sample == 0, torch.nan, rewards)


@pytest.mark.parametrize(("samples", "trained"), [(3, 4), (1, 0)])
def test_a_step_counts_the_responses_that_its_shaping_spoiled_and_learns_from_the_others(
    samples: int, trained: int
) -> None:
    off = {"check_logprobs": False}  # the log-probs of this test are made up
    config = config_of(algorithm={"shaping": [f"{__name__}:spoil_first_of_group"]}, engine=off)
    roles = roles_of(config)
    roles.engine = Told()  # type: ignore[assignment]
    got = CollectedRollouts()
    for p in range(2):
        group = [
            Rollout(
                Prompt(str(p), [5, 6 + p]),
                [7 + i],
                [True],
                [-1.0],
                [0],
                "stop",
                i,
                i,
                reward=float(i),
            )
            for i in range(samples)
        ]
        got.add_group(group, FilterResult(group))
    result = learn(context_of(roles, config), got)
    metrics = result.metrics.compute()
    assert metrics["rollout/num_failed"] == 2
    assert (metrics["rollout/tokens_trained"], metrics["rollout/tokens_failed"]) == (trained, 2)
    assert (0 if result.batch is None else len(result.batch)) == trained


@pytest.mark.parametrize(
    ("rewards", "num_mini_batches"),
    [
        ([1.0, 1.0], 2),
        ([0.0, 1.0], 2),
        ([0.0, 1.0], 9),
        ([torch.nan, torch.nan], 3),
        ([], 2),
    ],
)
def test_a_schedule_advances_in_every_step_whatever_the_step_trains(
    rewards: list[float], num_mini_batches: int
) -> None:
    train = {"num_mini_batches": num_mini_batches}
    config = config_of(train=train, engine={"check_logprobs": False})
    roles = roles_of(config)
    roles.engine = Told()  # type: ignore[assignment]
    got = CollectedRollouts()
    for p in range(2 if rewards else 0):
        group = [
            Rollout(
                Prompt(str(p), [5, 6 + p]), [7 + i], [True], [-1.0], [0], "stop", i, i, reward=r
            )
            for i, r in enumerate(rewards)
        ]
        got.add_group(group, FilterResult(group))
    learn(context_of(roles, config), got)
    assert roles.policy.state.inner.step == num_mini_batches
