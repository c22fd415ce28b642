"""The load-balancing loss of experts: transformers' own over all rows of an optimizer step, for any split of them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.learner.policy_update import optimizer_step
from lightrft.learner.preference_batch import PreferenceStats
from lightrft.learner.preference_step import preference_step
from lightrft.learner.sft_step import sft_step
from lightrft.models.actor import Actor
from lightrft.models.attention.layouts import pack
from lightrft.models.lora import add_adapters
from lightrft.models.router_loss import RouterLoss, counts_of_tokens
from lightrft.models.tiny.text_families import TEXT_FAMILIES, family_model
from lightrft.models.training_mode import values_of_evaluation
from lightrft.observability.metrics import Metrics
from lightrft.roles import FrozenModel, Roles, TrainableModel
from lightrft.strategy.single import SingleStrategy
from lightrft.types import Batch
from lightrft.utils.errors import ModelError
from tests.model_helpers import Float64, by_family, gap, hard_batch, ragged_batch, weights
from tests.unit.learner.test_preference_step import batch_of as preference_rows
from tests.unit.learner.test_preference_step import settings_of
from tests.unit.trainer.test_rl_step import Unused

LARGE = 10_000
COEF = 0.3
BALANCED = (
    *("dbrx", "deepseek_v4", "ernie4_5_moe", "flex_olmo", "gpt_oss", "granitemoe"),
    *("granitemoe_swa", "granitemoehybrid", "granitemoeshared", "jamba", "jetmoe", "laguna"),
    *("mellum", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe"),
    *("qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text"),
)
REFUSED = ("deepseek_v3", "glm4_moe", "llama", "doge", "flint")
Gradients = dict[str, Tensor]


def model_of(family: str, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    model = family_model(family, seed=3, **fields).to(dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    return model


def trained_of(
    family: str, coef: float = COEF, dtype: torch.dtype = torch.float64, **config: Any
) -> tuple[SingleStrategy, TrainableModel[Actor]]:
    strategy = SingleStrategy(StrategyConfig(device="cpu"))
    actor = Actor(model_of(family, dtype), ModelConfig(**config)).eval()
    if actor.config.gradient_checkpointing:
        actor.gradient_checkpointing_enable()
    if coef:
        actor.router_loss = RouterLoss(actor.base, actor.decoder, coef, tries=False)
    return strategy, TrainableModel(actor, strategy.prepare(actor, OptimizerConfig(lr=1e-2), 10))


def padded_rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """All prompts with their responses, ``[B, T]``, and the mask of their tokens."""
    prompts = batch.prompts.tokens.split(batch.prompts.lengths.tolist())
    answers = batch.responses.tokens.split(batch.lengths.tolist())
    rows = [torch.cat([prompts[p], own]) for p, own in zip(batch.prompt_of.tolist(), answers)]
    pad = torch.nn.utils.rnn.pad_sequence
    mask = [torch.ones_like(row) for row in rows]
    return pad(rows, batch_first=True), pad(mask, batch_first=True)


def logprob_loss(actor: Actor, whole: Batch) -> Any:
    """A loss whose weights depend on the place of a token in the whole batch alone."""
    whole = whole.replace(loss_weights=weights(whole.tokens, torch.float64) / whole.tokens)

    def loss_of(part: Batch) -> tuple[Tensor, Metrics]:
        scores = actor.score(part)
        assert part.loss_weights is not None
        return (scores.logprobs * part.loss_weights).sum(), Metrics()

    return whole, loss_of


def oracle(actor: Actor, batch: Batch) -> Tensor:
    """E sum_e f_e P_e, each row alone, token by token and expert by expert."""
    actor.use_attention("padded")
    top_k, total = actor.base.num_experts_per_tok, 0
    chosen: list[float] = []
    probability: list[Tensor | float] = []
    for ids, mask in zip(*padded_rows(batch)):
        own = actor.decoder(
            input_ids=ids[mask.bool()][None], output_router_logits=True, use_cache=False
        )
        for layer in own.router_logits:
            for token in layer.flatten(0, -2).softmax(-1):
                total += 1
                chosen = chosen or [0.0] * len(token)
                probability = probability or [0.0] * len(token)
                for expert in token.argsort(descending=True)[:top_k].tolist():
                    chosen[expert] += 1
                for expert, share in enumerate(token):
                    probability[expert] = probability[expert] + share
    terms = [f / total * p / total for f, p in zip(chosen, probability)]
    return len(chosen) * torch.stack([torch.as_tensor(term) for term in terms]).sum()


def transformers_own(actor: Actor, batch: Batch) -> Tensor:
    """The loss of transformers over all padded rows in one forward pass."""
    actor.use_attention("padded")
    ids, mask = padded_rows(batch)
    given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    return actor.base(**given, output_router_logits=True).aux_loss


def expected_of(
    family: str, *batches: Batch, own: Any = oracle, dtype: torch.dtype = torch.float64
) -> tuple[float, Gradients]:
    """Loss of the routers, and the gradient of both losses, in one graph."""
    _, trained = trained_of(family, 0.0, dtype)
    actor = trained.model
    loss = COEF * (aux := own(actor, Batch.cat(batches)))
    for batch in batches:
        whole, loss_of = logprob_loss(actor, batch)
        loss = loss + loss_of(whole)[0]
    loss.backward()
    return float(aux.detach()), gradients_of(actor)


def gradients_of(actor: Actor) -> Gradients:
    return {name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None}


def record(strategy: SingleStrategy, actor: Actor, found: list[Gradients]) -> None:
    """Append the gradient of each optimizer step to ``found``."""
    step = strategy.step

    def recorded(state: Any) -> Any:
        found.append(gradients_of(actor))
        return step(state)

    strategy.step = recorded  # type: ignore[method-assign]


def distance(found: Gradients, expected: Gradients) -> float:
    """The largest difference, over the largest entry of all: some gradients are nothing but rounding."""
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    return max(float((found[name] - g).abs().max()) for name, g in expected.items()) / largest


def found_of(
    family: str,
    batch: Batch,
    budget: int = LARGE,
    extra: Batch | None = None,
    dtype: torch.dtype = torch.float64,
    coef: float = COEF,
    **config: Any,
) -> tuple[dict[str, float | None], float, Gradients]:
    """The metrics, the loss and the gradient of an optimizer step."""
    strategy, trained = trained_of(family, coef, dtype, **config)
    found: list[Gradients] = []
    record(strategy, trained.model, found)
    more = () if extra is None else (logprob_loss(trained.model, extra),)
    whole, loss_of = logprob_loss(trained.model, batch)
    loss, metrics = optimizer_step("policy", strategy, trained, whole, budget, loss_of, more)
    return metrics.compute(), float(loss), found[0]


@pytest.mark.parametrize("layout", ["prefix_shared", "packed", "padded"])
@pytest.mark.parametrize("budget", [LARGE, 60, 1])
def test_loss_and_gradient_are_those_of_all_padded_rows(layout: Any, budget: int) -> None:
    with Float64():
        aux, gradients = expected_of("mixtral", hard_batch())
        metrics, _, found = found_of("mixtral", hard_batch(), budget, layout=layout)
    assert metrics["policy/router_aux_loss"] == pytest.approx(aux, rel=1e-6)
    assert gap(found, gradients) < 1e-9


@pytest.mark.parametrize(
    "family", by_family(family for family in BALANCED if family in TEXT_FAMILIES)
)
def test_every_family_with_such_a_loss_adds_transformers_own(family: str) -> None:
    batch = ragged_batch([9, 4], [3, 7, 1, 5], [0, 0, 1, 0])
    actor = Actor(model_of(family, torch.float32))
    if not isinstance(transformers_own(actor, batch), Tensor):  # in older versions of transformers
        with pytest.raises(ModelError, match="no load-balancing loss"):
            RouterLoss(actor.base, actor.decoder, COEF, tries=True)
        return
    aux, gradients = expected_of(family, batch, own=transformers_own, dtype=torch.float32)
    for budget in (LARGE, 1):
        metrics, _, found = found_of(family, batch, budget, dtype=torch.float32)
        assert metrics["policy/router_aux_loss"] == pytest.approx(aux, rel=1e-6)
        assert distance(found, gradients) < 1e-4


def test_all_data_of_an_optimizer_step_count_as_one_batch() -> None:
    batch, more = hard_batch(), ragged_batch([6], [9], [0], seed=5)
    with Float64():
        aux, gradients = expected_of("mixtral", batch, more)
        metrics, _, found = found_of("mixtral", batch, 60, more)
    assert metrics["policy/router_aux_loss"] == pytest.approx(aux, rel=1e-6)
    assert gap(found, gradients) < 1e-9


def test_layers_that_are_computed_again_count_once_and_keep_their_gradient() -> None:
    aux, _, gradients = found_of("mixtral", hard_batch(), 60, dtype=torch.float32)
    again, _, found = found_of(
        "mixtral", hard_batch(), 60, dtype=torch.float32, gradient_checkpointing=True
    )
    assert again["policy/router_aux_loss"] == aux["policy/router_aux_loss"]
    assert distance(found, gradients) < 1e-6


def test_the_reported_loss_is_that_of_the_tokens_alone() -> None:
    _, loss, _ = found_of("mixtral", hard_batch(), dtype=torch.float32)
    metrics, expected, _ = found_of("mixtral", hard_batch(), dtype=torch.float32, coef=0.0)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert "policy/router_aux_loss" not in metrics


def test_experts_are_counted_under_the_dropout_of_the_step_and_not_in_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Tensor] = []
    read = RouterLoss.read

    def kept(self: RouterLoss, logits: Any, *more: Any) -> None:
        seen.append(torch.stack([router.detach() for router in logits]))
        read(self, logits, *more)

    monkeypatch.setattr(RouterLoss, "read", kept)
    strategy = SingleStrategy(StrategyConfig(device="cpu"))
    settings = LoRAConfig(rank=4, dropout=0.5, targets=("q_proj", "v_proj"))
    model = add_adapters(model_of("mixtral", torch.float32), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    actor = Actor(model)
    actor.router_loss = RouterLoss(actor.base, actor.decoder, COEF, tries=False)
    trained = TrainableModel(actor, strategy.prepare(actor, OptimizerConfig(), 10))
    whole = hard_batch()

    def compared(part: Batch) -> tuple[Tensor, Metrics]:
        """Values of evaluation mode, as losses of log-ratios read them."""
        scores = values_of_evaluation(actor, lambda: actor.score(part))
        return scores.logprobs.sum(), Metrics()

    optimizer_step("policy", strategy, trained, whole, 60, compared)
    half = len(seen) // 2
    assert half > 1 and len(seen) == 2 * half
    for counted, trained_on in zip(seen[:half], seen[half:]):
        assert torch.equal(counted, trained_on)
    actor.eval()
    assert actor.router_loss is not None and not actor.router_loss.reads_calls
    seen.clear()
    actor.score(hard_batch())
    assert not seen


@pytest.mark.parametrize("layout", ["prefix_shared", "packed", "padded"])
def test_every_token_of_every_row_counts_once_in_each_layout(layout: Any) -> None:
    batch = hard_batch()
    counts = counts_of_tokens(batch, pack(batch, layout, final=True).source)
    rows = batch.prompts.lengths[batch.prompt_of] + batch.lengths
    assert int(counts.sum()) == int(rows.sum())
    nothing = batch.select(torch.zeros(0, dtype=torch.long))
    assert counts_of_tokens(nothing, pack(nothing, layout, final=True).source).tolist() == [0]


def test_supervised_steps_add_it_to_the_gradient() -> None:
    rows = ragged_batch([9, 4, 1], [3, 7, 2], [0, 1, 2])
    batch = rows.replace(sampled=torch.arange(rows.tokens) % 3 > 0)
    strategy, trained = trained_of("mixtral")
    found: list[Gradients] = []
    record(strategy, trained.model, found)
    with Float64():
        aux, expected = stepwise(batch)
        metrics = sft_step(strategy, trained, batch, 12).compute()
    assert metrics["policy/router_aux_loss"] == pytest.approx(aux, rel=1e-6)
    assert gap(found[0], expected) < 1e-9


def stepwise(batch: Batch) -> tuple[float, Gradients]:
    """The supervised loss and the loss of the routers in one graph."""
    _, trained = trained_of("mixtral", 0.0)
    logprobs = trained.model.score(batch).logprobs
    aux = oracle(trained.model, batch)
    (-logprobs[batch.mask].mean() + COEF * aux).backward()
    return float(aux.detach()), gradients_of(trained.model)


@pytest.mark.parametrize("losses", [["sigmoid"], ["bco_pair"]], ids=["alone", "coupled"])
def test_preference_steps_add_it_in_one_pass_and_in_two(losses: list[str]) -> None:
    batch = preference_rows(0, 1)
    _, trained = trained_of("mixtral", 0.0, torch.float32)
    aux = oracle(trained.model, batch)
    aux.backward()
    balance = gradients_of(trained.model)
    found: dict[float, list[Gradients]] = {0.0: [], COEF: []}
    for coef, taken in found.items():
        for budget in (LARGE, 40):
            strategy, trained = trained_of("mixtral", coef, torch.float32)
            record(strategy, trained.model, taken)
            reference = Actor(model_of("mixtral", torch.float32)).requires_grad_(False)
            given = (Unused(), Unused(), None)
            roles = Roles(strategy, trained, *given, reference=FrozenModel(reference))  # type: ignore[arg-type]
            settings = settings_of(budget, losses=losses)
            metrics = preference_step(roles, batch, settings, PreferenceStats(), 0).compute()
            if coef:
                assert metrics["policy/router_aux_loss"] == pytest.approx(
                    float(aux.detach()), rel=1e-6
                )
    for without, with_it in zip(found[0.0], found[COEF]):
        expected = {name: g + COEF * balance.get(name, 0) for name, g in without.items()}
        assert distance(with_it, expected) < 1e-5


@pytest.mark.parametrize("family", [family for family in REFUSED if family in TEXT_FAMILIES])
def test_a_family_whose_own_forward_adds_no_such_loss_is_refused_by_name(family: str) -> None:
    actor = Actor(family_model(family, seed=0))
    actor.use_attention("padded")
    with pytest.raises(ModelError, match=f"router_aux_loss_coef = 0.3 .* '{family}'.*leave"):
        RouterLoss(actor.base, actor.decoder, COEF, tries=True)


def test_a_family_with_another_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor(family_model("mixtral", seed=0))
    actor.use_attention("padded")
    RouterLoss(actor.base, actor.decoder, COEF, tries=True)
    family = sys.modules[type(actor.base).__module__]
    own = family.load_balancing_loss_func
    monkeypatch.setattr(family, "load_balancing_loss_func", lambda *given: 2 * own(*given))
    with pytest.raises(ModelError, match=r"its own loss is .* and this one"):
        RouterLoss(actor.base, actor.decoder, COEF, tries=True)
