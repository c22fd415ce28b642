"""Modifiers, weighted sums and running numbers of preference losses equal their oracles."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightrft.algorithms.preference.inputs import Labelled, Pairs, Responses, responses_of
from lightrft.algorithms.preference.objective import (
    preference_loss,
    preference_terms,
    token_weights,
    wpo_weights,
)
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.learner.preference_batch import PreferenceStats
from lightrft.learner.preference_step import mismatched_kl
from lightrft.models.actor import Actor
from lightrft.models.divergence.token_divergence import Target, token_divergence
from lightrft.roles import FrozenModel
from lightrft.types import Segments
from tests.numbers import oracles_preference as oracles
from tests.numbers.compare import assert_equal, tensor
from tests.numbers.exact import Number, evaluate, gradient
from tests.numbers.strategies import SEEDS
from tests.unit.learner.test_preference_step import LARGE, batch_of, roles_of, settings_of

VOCABULARY = 4
Row = list[float]
Table = list[Row]


# ---------------------------------------------------------------- tokens of one pair


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of a pair: policy and reference, chosen and rejected."""

    policy_w: Row
    policy_l: Row
    reference_w: Row
    reference_l: Row

    @property
    def rows(self) -> tuple[Row, Row, Row, Row]:
        return self.policy_w, self.policy_l, self.reference_w, self.reference_l


@st.composite
def token_pairs(draw: Any) -> tuple[list[Tokens], int]:
    """A few pairs, and the seed of the tokens between those that are trained."""
    rng = random.Random(draw(SEEDS))
    pairs = []
    for _ in range(draw(st.integers(1, 3))):
        lengths = [draw(st.integers(1, 5)), draw(st.integers(1, 5))]
        rows = [[-rng.uniform(0.01, 4) for _ in range(n)] for n in lengths * 2]
        pairs.append(Tokens(*rows))
    return pairs, draw(SEEDS)


def with_holes(rows: Sequence[Row], rng: random.Random) -> tuple[Tensor, TokenRows]:
    """Packed rows with tokens between the given ones that are not trained."""
    numbers: Row = []
    mask: list[bool] = []
    lengths = []
    for row in rows:
        start = len(numbers)
        for x in row:
            while rng.random() < 0.3:
                numbers.append(rng.uniform(-9, 0))
                mask.append(False)
            numbers.append(x)
            mask.append(True)
        lengths.append(len(numbers) - start)
    row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    layout = TokenRows(
        row_of, torch.tensor(lengths), torch.arange(len(rows)) // 2, torch.tensor(mask)
    )
    return tensor(numbers), layout


def packed(pairs: Sequence[Tokens], seed: int) -> tuple[Tensor, Tensor, TokenRows]:
    """Log-probs of policy and reference, a chosen row and its rejected one after the other."""
    policy = [row for pair in pairs for row in pair.rows[:2]]
    reference = [row for pair in pairs for row in pair.rows[2:]]
    logprobs, rows = with_holes(policy, random.Random(seed))
    ref_logprobs, _ = with_holes(reference, random.Random(seed))
    return logprobs.requires_grad_(), ref_logprobs, rows


def loss_of_pairs(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    rows: TokenRows,
    chosen: PreferenceConfig,
    weights: Tensor | None = None,
    **columns: Any,
) -> Tensor:
    responses = responses_of(rows, logprobs, ref_logprobs, weights, **columns)
    even = torch.arange(0, len(rows), 2)
    data = Pairs(responses.select(even), responses.select(even + 1))
    return preference_loss(preference_terms(data, chosen))


def mean_of(functions: Sequence[Callable[..., Number]], points: Sequence[Any]) -> float:
    values = [evaluate(f, at) for f, at in zip(functions, points, strict=True)]
    return sum(values) / len(values)


def expect_equal(
    loss: Tensor, leaf: Tensor, mask: Tensor, functions: Sequence[Any], points: Sequence[Any]
) -> None:
    """``loss`` is the mean of ``functions``; ``leaf`` has their derivatives in its order."""
    assert_equal(loss[None], [mean_of(functions, points)])
    expected: list[float] = []
    for f, at in zip(functions, points, strict=True):
        for part in gradient(f, at):
            expected += [slope / len(functions) for slope in part]
    (slope,) = torch.autograd.grad(loss, leaf)
    assert_equal(slope[mask], expected)
    assert not slope[~mask].any()


LD_LOSSES = {
    "sigmoid": oracles.dpo,
    "hinge": oracles.hinge,
    "nca": oracles.nca_pair,
    "sppo_hard": oracles.sppo_hard,
    "apo_down": oracles.apo_down,
}


@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("name", sorted(LD_LOSSES))
@settings(deadline=None, max_examples=15)
@given(drawn=token_pairs())
def test_ld_dpo_weighs_the_tail_of_the_longer_response_as_its_oracle(
    drawn: tuple[list[Tokens], int], name: str, alpha: float
) -> None:
    pairs, seed = drawn
    chosen = PreferenceConfig.model_validate({"losses": [name], "beta": 0.3, "ld_alpha": alpha})
    logprobs, ref_logprobs, rows = packed(pairs, seed)
    weights = token_weights(rows, torch.arange(len(rows)) ^ 1, chosen, range(len(rows)))
    loss = loss_of_pairs(logprobs, ref_logprobs, rows, chosen, weights)
    functions = [
        lambda w, l, p=pair: oracles.ld_dpo(  # noqa: E741 as in the papers
            w, l, p.reference_w, p.reference_l, 0.3, alpha, loss=LD_LOSSES[name]
        )
        for pair in pairs
    ]
    expect_equal(loss, logprobs, rows.mask, functions, [[p.policy_w, p.policy_l] for p in pairs])


@settings(deadline=None, max_examples=25)
@given(drawn=token_pairs())
def test_sampo_is_its_oracle_on_the_tokens_that_it_samples(
    drawn: tuple[list[Tokens], int],
) -> None:
    pairs, seed = drawn
    chosen = PreferenceConfig.model_validate({"sampo": True, "beta": 0.3})
    logprobs, ref_logprobs, rows = packed(pairs, seed)
    seeds = [seed + row for row in range(len(rows))]
    weights = token_weights(rows, torch.arange(len(rows)) ^ 1, chosen, seeds)
    loss = loss_of_pairs(logprobs, ref_logprobs, rows, chosen, weights)
    of_row = weights[rows.mask].split(rows.count().tolist())
    kept = [row.nonzero()[:, 0].tolist() for row in of_row]
    functions = [
        lambda w, l, p=pair, k=k: oracles.sampo(  # noqa: E741 as in the papers
            w, l, p.reference_w, p.reference_l, kept[2 * k], kept[2 * k + 1], 0.3
        )
        for k, pair in enumerate(pairs)
    ]
    expect_equal(loss, logprobs, rows.mask, functions, [[p.policy_w, p.policy_l] for p in pairs])


# ---------------------------------------------------------------- logits of every token


@dataclass(frozen=True)
class Logits:
    """Logits of a pair at each position, and the tokens there."""

    policy_w: Table
    policy_l: Table
    reference_w: Table
    reference_l: Table
    tokens_w: list[int]
    tokens_l: list[int]


@st.composite
def logit_pairs(draw: Any) -> list[Logits]:
    rng = random.Random(draw(SEEDS))
    scale = draw(st.sampled_from([0.3, 3.0]))
    pairs = []
    for _ in range(draw(st.integers(1, 2))):
        lengths = [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
        tables = [
            [[rng.uniform(-scale, scale) for _ in range(VOCABULARY)] for _ in range(n)]
            for n in lengths * 2
        ]
        tokens = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in lengths]
        pairs.append(Logits(*tables, *tokens))
    return pairs


def flat_logits(pairs: Sequence[Logits], policy: bool) -> Tensor:
    """The logits of all positions, ``[N, V]``, chosen and rejected of each pair in turn."""
    tables = []
    for pair in pairs:
        tables += [pair.policy_w, pair.policy_l] if policy else [pair.reference_w, pair.reference_l]
    return tensor([row for table in tables for row in table])


def flat_tokens(pairs: Sequence[Logits]) -> Tensor:
    return torch.tensor([token for p in pairs for row in (p.tokens_w, p.tokens_l) for token in row])


def rows_of(pairs: Sequence[Logits]) -> TokenRows:
    lengths = [len(row) for pair in pairs for row in (pair.tokens_w, pair.tokens_l)]
    row_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    everything = torch.ones(sum(lengths), dtype=torch.bool)
    return TokenRows(row_of, torch.tensor(lengths), torch.arange(len(lengths)) // 2, everything)


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def check_logits(
    loss: Tensor, leaf: Tensor, functions: Sequence[Any], pairs: Sequence[Logits]
) -> None:
    points = [[pair.policy_w, pair.policy_l] for pair in pairs]
    assert_equal(loss[None], [mean_of(functions, points)])
    expected = [
        slope / len(pairs)
        for f, at in zip(functions, points, strict=True)
        for table in gradient(f, at)
        for row in table
        for slope in row
    ]
    (slope,) = torch.autograd.grad(loss, leaf)
    assert_equal(slope.flatten(), expected)


def identity() -> nn.Linear:
    """A head whose logits are the hidden states."""
    head = nn.Linear(VOCABULARY, VOCABULARY, bias=False, dtype=torch.float64)
    head.weight.data.copy_(torch.eye(VOCABULARY, dtype=torch.float64))
    return head.requires_grad_(False)


@pytest.mark.parametrize("alpha", [None, 0.5, 2.0])
@settings(deadline=None, max_examples=10)
@given(pairs=logit_pairs())
def test_tdpo_from_logits_has_the_sequence_kl_of_its_oracle(
    pairs: list[Logits], alpha: float | None
) -> None:
    name = "tdpo" if alpha is None else "tdpo2"
    options = {} if alpha is None else {"alpha": alpha}
    tree = {"losses": [{"name": name, "options": options}], "beta": 0.3}
    leaf = flat_logits(pairs, policy=True).requires_grad_()
    reference, tokens = flat_logits(pairs, policy=False), flat_tokens(pairs)
    kl = token_divergence(leaf, identity(), Target(reference, identity(), "forward_kl"))
    loss = loss_of_pairs(
        logprobs_of(leaf, tokens),
        logprobs_of(reference, tokens),
        rows_of(pairs),
        PreferenceConfig.model_validate(tree),
        token_kl=kl,
    )
    functions = [
        lambda w, l, p=pair: oracles.tdpo_of_logits(  # noqa: E741 as in the papers
            w, l, p.reference_w, p.reference_l, p.tokens_w, p.tokens_l, 0.3, alpha
        )
        for pair in pairs
    ]
    check_logits(loss, leaf, functions, pairs)


@pytest.mark.parametrize("cap", [None, 1.0, 0.6])
@settings(deadline=None, max_examples=10)
@given(pairs=logit_pairs())
def test_wpo_from_logits_multiplies_a_loss_by_the_weight_of_its_oracle(
    pairs: list[Logits], cap: float | None
) -> None:
    chosen = PreferenceConfig.model_validate({"wpo": True, "wpo_cap": cap, "beta": 0.3})
    leaf = flat_logits(pairs, policy=True).requires_grad_()
    reference, tokens = flat_logits(pairs, policy=False), flat_tokens(pairs)
    rows, logprobs = rows_of(pairs), logprobs_of(leaf, tokens)
    collision = (2 * leaf.log_softmax(-1)).logsumexp(-1)
    wpo = wpo_weights(rows, logprobs, collision)
    loss = loss_of_pairs(logprobs, logprobs_of(reference, tokens), rows, chosen, wpo=wpo)

    def oracle(p: Logits) -> Callable[..., Number]:
        rw = oracles.chosen_sum(p.reference_w, p.tokens_w)
        rl = oracles.chosen_sum(p.reference_l, p.tokens_l)

        def of(w: Any, l: Any) -> Number:  # noqa: E741 as in the papers
            sums = oracles.chosen_sum(w, p.tokens_w), oracles.chosen_sum(l, p.tokens_l)
            loss = oracles.dpo(*sums, rw, rl, 1, 1, 0.3)
            return oracles.wpo_weight(w, p.tokens_w, l, p.tokens_l, cap) * loss

        return of

    check_logits(loss, leaf, [oracle(pair) for pair in pairs], pairs)


# ---------------------------------------------------------------- weighted sums


@dataclass(frozen=True)
class Sums:
    """Sums of the log-probs of one pair and its gold response, and its weight."""

    pw: float
    pl: float
    pg: float
    rw: float
    rl: float
    nw: int
    nl: int
    ng: int
    weight: float


@st.composite
def summed_pairs(draw: Any) -> list[Sums]:
    rng = random.Random(draw(SEEDS))
    pairs = []
    for _ in range(draw(st.integers(1, 4))):
        counts = [rng.randint(1, 20) for _ in range(3)]
        rw, rl, rg = (-n * rng.uniform(0.1, 3) for n in counts)
        moved = [r + rng.uniform(-2, 0.1) for r in (rw, rl, rg)]
        # a weight of 0 leaves a pair out
        pairs.append(Sums(*moved, rw, rl, *counts, rng.choice([0.5, 1.0, 2.0, 0.0])))
    # one at least must count
    return [dataclasses.replace(pairs[0], weight=1.5), *pairs[1:]]


def columns_of(pairs: Sequence[Sums], *names: str) -> list[list[float]]:
    return [[float(getattr(pair, name)) for pair in pairs] for name in names]


def data_of(pairs: Sequence[Sums], shift: float) -> tuple[Pairs, list[Tensor]]:
    leaves = [tensor(column).requires_grad_() for column in columns_of(pairs, "pw", "pl", "pg")]
    rw, rl, nw, nl, ng = (tensor(c) for c in columns_of(pairs, "rw", "rl", "nw", "nl", "ng"))
    gold = Responses(leaves[2], torch.zeros_like(ng), ng)
    chosen, rejected = Responses(leaves[0], rw, nw), Responses(leaves[1], rl, nl)
    return Pairs(chosen, rejected, gold=gold, shift=tensor(shift)), leaves


def mean_over_pairs(loss: Callable[..., Number]) -> Callable[..., Number]:
    """The mean of a loss of one pair, by example weights."""

    def of(pairs: Sequence[Sums], pws: Any, pls: Any, pgs: Any, weights: Row) -> Number:
        losses = [
            loss(pw, pl, p.rw, p.rl, p.nw, p.nl, pg, p.ng)
            for p, pw, pl, pg in zip(pairs, pws, pls, pgs, strict=True)
        ]
        return oracles.weighted(losses, weights)

    return of


def mean_over_tokens(side: str) -> Callable[..., Number]:
    """The mean of -log p over all tokens of chosen or of gold responses, by example weights."""

    def of(pairs: Sequence[Sums], pws: Any, pls: Any, pgs: Any, weights: Row) -> Number:
        sums = pws if side == "w" else pgs
        counts = [pair.nw if side == "w" else pair.ng for pair in pairs]
        totals = [w * p for w, p in zip(weights, sums, strict=True)]
        return oracles.sft_over_tokens(totals, [w * n for w, n in zip(weights, counts)])

    return of


B = 0.1
SHIFT = 0.4
Part = tuple[float, Callable[..., Number]]
SUMS: dict[str, tuple[Any, list[Part]]] = {
    "mpo": (
        {"preset": "mpo", "beta": B},
        [
            (0.8, mean_over_pairs(lambda *n: oracles.dpo(*n[:6], B))),
            (0.2, mean_over_pairs(lambda *n: oracles.bco_pair(*n[:6], B, SHIFT))),
            (1.0, mean_over_tokens("w")),
        ],
    ),
    "mpo per response": (
        {
            "losses": [
                {"name": "sigmoid", "weight": 0.8},
                {"name": "bco_pair", "weight": 0.2},
                {"name": "sft", "options": {"per": "response"}},
            ],
            "beta": B,
        },
        [(1.0, mean_over_pairs(lambda *n: oracles.mpo(*n[:6], B, (0.8, 0.2, 1), SHIFT)))],
    ),
    "rpo": (
        {"preset": "rpo", "beta": B},
        [(1.0, mean_over_pairs(lambda *n: oracles.rpo(*n[:6], B)))],
    ),
    "cpo": (
        {"preset": "cpo", "beta": B},
        [
            (1.0, mean_over_pairs(lambda *n: oracles.cpo(*n[:6], B, 0))),
            (1.0, mean_over_tokens("w")),
        ],
    ),
    "tpo": (
        {"preset": "tpo", "beta": B},
        [
            (1.0, mean_over_pairs(lambda *n: oracles.tpo(*n[:6], B, n[6], n[7], 0))),
            (1.0, mean_over_tokens("g")),
        ],
    ),
    "three of four weights": (
        {"losses": [{"name": "ipo", "weight": 3}, {"name": "sft_gold", "weight": 0.25}], "beta": B},
        [
            (3.0, mean_over_pairs(lambda *n: oracles.ipo(*n[:6], B))),
            (0.25, mean_over_tokens("g")),
        ],
    ),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", sorted(SUMS))
@settings(deadline=None, max_examples=12)
@given(pairs=summed_pairs())
def test_a_weighted_sum_is_that_of_its_oracles_by_pairs_and_by_tokens(
    pairs: list[Sums], name: str, weighted: bool
) -> None:
    tree, parts = SUMS[name]
    data, leaves = data_of(pairs, SHIFT)
    weights = [pair.weight if weighted else 1.0 for pair in pairs]
    terms = preference_terms(data, PreferenceConfig.model_validate(tree))
    loss = preference_loss(terms, tensor(weights) if weighted else None)

    def oracle(pws: Any, pls: Any, pgs: Any) -> Number:
        return sum(factor * part(pairs, pws, pls, pgs, weights) for factor, part in parts)

    point = columns_of(pairs, "pw", "pl", "pg")
    assert_equal(loss[None], [evaluate(oracle, point)])
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    for slope, leaf, expected in zip(found, leaves, gradient(oracle, point), strict=True):
        assert_equal(torch.zeros_like(leaf) if slope is None else slope, expected)


# ---------------------------------------------------------------- numbers that steps carry over

BATCHES = st.lists(summed_pairs(), min_size=1, max_size=4)


def margins_of(pairs: Sequence[Sums]) -> list[Number]:
    return oracles.reward_gaps(*columns_of(pairs, "pw", "pl", "rw", "rl"))


@pytest.mark.parametrize("unit", [1.0, 0.3])
@settings(deadline=None, max_examples=20)
@given(batches=BATCHES)
def test_the_margins_of_beta_dpo_move_as_in_its_oracle_after_a_first_batch_at_the_reference(
    batches: list[list[Sums]], unit: float
) -> None:
    # the policy starts at the reference, where the oracle's start at 0 is the first batch's
    start = [dataclasses.replace(pair, pw=pair.rw, pl=pair.rl) for pair in batches[0]]
    stats, mean, std = PreferenceStats(), 0.0, 0.0
    for pairs in [start, *batches]:
        stats.include(data_of(pairs, 0.0)[0], unit, 0.1)
        margins = tensor([unit * float(gap) for gap in margins_of(pairs)])
        mean = float(oracles.moved_threshold(mean, float(margins.mean())))
        spread = float((margins - margins.mean()).square().mean().sqrt())
        std = float(oracles.moved_threshold(std, spread))
        assert stats.margin_mean == pytest.approx(mean, rel=1e-9, abs=1e-12)
        assert stats.margin_std == pytest.approx(std, rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=20)
@given(batches=BATCHES)
def test_the_shift_of_bco_is_the_mean_of_all_rewards_so_far(batches: list[list[Sums]]) -> None:
    stats, seen = PreferenceStats(), []
    for pairs in batches:
        stats.include(data_of(pairs, 0.0)[0], 1.0, 0.3)
        pws, pls, rws, rls = columns_of(pairs, "pw", "pl", "rw", "rl")
        ratios = [p - r for p, r in zip([*pws, *pls], [*rws, *rls], strict=True)]
        seen.append([0.3 * ratio for ratio in ratios])
        expected = float(oracles.running_shift(seen))
        assert stats.rewards.mean == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=20)
@given(pairs=summed_pairs())
def test_labelled_responses_move_the_shift_of_bco_as_pairs_do(pairs: list[Sums]) -> None:
    of_pairs, of_labels = PreferenceStats(), PreferenceStats()
    data, _ = data_of(pairs, 0.0)
    of_pairs.include(data, 1.0, 0.3)
    sides = (data.chosen, data.rejected)
    joined = [
        torch.cat([getattr(side, name) for side in sides])
        for name in ("logprobs", "ref_logprobs", "tokens")
    ]
    labels = torch.arange(2 * len(pairs)) % 3 == 0
    of_labels.include(Labelled(Responses(*joined), labels), 1.0, 0.3)
    assert of_labels.rewards == of_pairs.rewards
    assert of_labels.margin_mean is None


def summed(actor: Actor, prompt: Row, response: Row, trained: Sequence[bool]) -> float:
    """The sum of the log-probs of the trained tokens, from the logits of the whole sequence."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = actor.model(ids).logits[0].double()
    places = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    own = logprobs_of(logits[places], ids[0, len(prompt) :])
    return float(own[torch.tensor(trained)].sum())


@pytest.mark.parametrize("swapped", [False, True])
def test_the_reference_point_of_kto_has_each_response_after_the_next_prompt(swapped: bool) -> None:
    roles, batch = roles_of(), batch_of(0, 1)
    policy, reference = roles.actor, roles.reference
    assert isinstance(reference, FrozenModel)
    actors = [policy, reference.model]
    if swapped:
        roles.policy.model, reference.model = actors[::-1]
        actors.reverse()
    prompts, responses = lists_of(batch.prompts), lists_of(batch.responses)
    masks = [part.tolist() for part in batch.mask.split(batch.lengths.tolist())]
    after = [prompts[(k + 1) % len(prompts)] for k in batch.prompt_of.tolist()]
    sums = [[summed(actor, *row) for row in zip(after, responses, masks)] for actor in actors]
    z = float(oracles.reference_point(*sums))
    # one order of the models has a negative mean, which the loss takes for 0
    assert (z > 0.01) == swapped
    found = mismatched_kl(batch, roles, settings_of(LARGE, preset="kto"))
    # log-probs are float32
    assert max(0.0, found) == pytest.approx(z, rel=1e-5)


def lists_of(segments: Segments) -> list[Row]:
    return [part.tolist() for part in segments.tokens.split(segments.lengths.tolist())]
