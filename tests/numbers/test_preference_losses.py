"""Every preference loss with every option equals its oracle, in value and gradient."""

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
from torch import Tensor

from lightrft.algorithms.preference.inputs import Labelled, Pairs, Ranked, Responses
from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.algorithms.validate.component_kinds import COMPONENT_KINDS
from lightrft.config.preference.sections import PreferenceConfig
from tests.numbers import oracles_preference as oracles
from tests.numbers.compare import assert_equal, tensor
from tests.numbers.exact import Number, evaluate, gradient
from tests.numbers.strategies import SEEDS

Settings = PreferenceConfig
DIVERGENCES = {"forward_kl": "forward_kl", "js": "js_divergence", "alpha": "alpha_divergence"}
"""Names of the oracle by those of the settings."""


@dataclass(frozen=True)
class Pair:
    """The numbers of one pair: c is the response after corrupted media, g the gold response."""

    pw: Number
    pl: Number
    pc: Number
    pg: Number
    kw: Number
    kl: Number
    rw: float
    rl: float
    rc: float
    nw: int
    nl: int
    ng: int
    gap: float
    shift: float

    @property
    def six(self) -> tuple[Number, ...]:
        return self.pw, self.pl, self.rw, self.rl, self.nw, self.nl


VARIABLES = ("pw", "pl", "pc", "pg", "kw", "kl")
"""Numbers that a loss may have a gradient in."""


# ---------------------------------------------------------------- losses of single pairs


def divergent(loss: oracles.PairLoss, s: Settings) -> oracles.PairLoss:
    """``loss`` under ``f_divergence``. The paper's alpha is 1 less that of the settings."""
    kind = s.f_divergence.kind
    if kind == "reverse_kl":
        return loss
    return oracles.with_divergence(loss, DIVERGENCES[kind], 1 - s.f_divergence.alpha)


def plain(loss: oracles.PairLoss) -> Callable[..., Number]:
    return lambda p, s: divergent(loss, s)(*p.six, s.beta)


def smoothed(loss: oracles.PairLoss) -> Callable[..., Number]:
    return lambda p, s: divergent(loss, s)(*p.six, s.beta, label_smoothing=s.label_smoothing)


def simpo(p: Pair, s: Settings, gamma: float = 0.5) -> Number:
    return oracles.simpo(*p.six, s.beta, gamma, s.label_smoothing)


def alphapo(p: Pair, s: Settings, alpha: float = 0.25, gamma: float = 0.5) -> Number:
    return oracles.alphapo(*p.six, s.beta, gamma, alpha, s.label_smoothing)


def cpo(
    p: Pair, s: Settings, form: str = "sigmoid", alpha: float = 1.0, nll: str = "mean"
) -> Number:
    contrast = oracles.cpo(*p.six, s.beta, 0, form, s.label_smoothing)
    return contrast + alpha * sft(p, s, "response" if nll == "mean" else "token")


def tpo(
    p: Pair,
    s: Settings,
    form: str = "sigmoid",
    gamma: float = 0.5,
    alpha: float = 1.0,
    nll: str = "mean",
) -> Number:
    kind = "length" if form == "length_normalized" else form
    tokens = p.ng if nll == "mean" else 1
    return oracles.tpo(*p.six, s.beta, p.pg, tokens, alpha, kind, gamma, s.label_smoothing)


def sft(p: Pair, s: Settings, per: str = "token") -> Number:
    return oracles.sft(p.pw, p.nw if per == "response" else 1)


def sft_gold(p: Pair, s: Settings, per: str = "token") -> Number:
    return oracles.sft(p.pg, p.ng if per == "response" else 1)


def bco_pair(p: Pair, s: Settings, shifted: bool = True) -> Number:
    return oracles.bco_pair(*p.six, s.beta, p.shift if shifted else 0)


PAIR_ORACLES: dict[str, Callable[..., Number]] = {
    "sigmoid": smoothed(oracles.dpo),
    "sigmoid_norm": smoothed(oracles.sigmoid_norm),
    "robust": smoothed(oracles.robust),
    "exo": smoothed(oracles.exo_pair),
    "hinge": plain(oracles.hinge),
    "ipo": plain(oracles.ipo),
    "ipo_sum": plain(oracles.ipo_sum),
    "nca": plain(oracles.nca_pair),
    "sppo_hard": plain(oracles.sppo_hard),
    "apo_zero": plain(oracles.apo_zero),
    "apo_down": plain(oracles.apo_down),
    "bco_pair": bco_pair,
    "discopop": lambda p, s, tau=0.05: divergent(oracles.discopop, s)(*p.six, s.beta, tau=tau),
    "simpo": simpo,
    "alphapo": alphapo,
    "cpo": cpo,
    "orpo": lambda p, s, alpha=1.0: oracles.orpo(*p.six, s.beta, alpha),
    "tpo": tpo,
    "sft": sft,
    "sft_gold": sft_gold,
    "dpop": lambda p, s, lam=50.0: oracles.dpop(*p.six, s.beta, lam),
    "tdpo": lambda p, s: oracles.tdpo(*p.six, s.beta, p.kw, p.kl),
    "tdpo2": lambda p, s, alpha=0.5: oracles.tdpo2(*p.six, s.beta, p.kw, p.kl, alpha),
    "cal_dpo": lambda p, s, weight=1.0: oracles.cal_dpo(*p.six, s.beta, weight),
    "r_dpo": lambda p, s, alpha: oracles.r_dpo(*p.six, s.beta, alpha),
    "odpo": lambda p, s, alpha=1.0, scale="log": oracles.odpo(*p.six, s.beta, p.gap, alpha, scale),
    "mdpo": lambda p, s, anchor=0.0: oracles.mdpo(*p.six, s.beta, p.pc, p.rc, anchor),
}


# ---------------------------------------------------------------- losses of all pairs of a batch


def aot(columns: Sequence[list[Number]], s: Settings, data: Pairs) -> list[Number]:
    return oracles.aot(*columns, s.beta, s.label_smoothing)


def aot_unpaired(columns: Sequence[list[Number]], s: Settings, data: Pairs) -> list[Number]:
    return oracles.aot_unpaired(*columns, s.beta, s.label_smoothing)


def beta_dpo(
    columns: Sequence[list[Number]],
    s: Settings,
    data: Pairs,
    alpha: float = 0.6,
    margin: str = "reward",
    filtered: bool = True,
) -> list[Number]:
    scaled, typical = margin == "reward", float(data.margin_mean)
    if not filtered:
        return oracles.beta_dpo(*columns, s.beta, alpha, typical, scaled=scaled)
    spread = float(data.margin_std)
    return oracles.weighed_beta_dpo(*columns, s.beta, alpha, typical, spread, scaled)


BATCH_ORACLES: dict[str, Callable[..., list[Number]]] = {
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "beta_dpo": beta_dpo,
}


# ---------------------------------------------------------------- labelled and ranked responses


def kto(
    p: Number,
    r: float,
    good: bool,
    data: Labelled,
    s: Settings,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Number:
    # as if one mismatched pair had this log-ratio
    z = oracles.reference_point([float(data.kl)], [0.0])
    return oracles.kto(p, r, good, z, s.beta, desirable_weight, undesirable_weight)


def apo_zero_unpaired(
    p: Number,
    r: float,
    good: bool,
    data: Labelled,
    s: Settings,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Number:
    return oracles.apo_zero_unpaired(p, r, good, s.beta, desirable_weight, undesirable_weight)


def bco(p: Number, r: float, good: bool, data: Labelled, s: Settings) -> Number:
    return oracles.bco(p, r, good, float(data.shift), s.beta)


def implicit_prm(p: Number, r: float, good: bool, data: Labelled, s: Settings) -> Number:
    return oracles.bco(p, r, good, 0.0, s.beta)


LABELLED_ORACLES: dict[str, Callable[..., Number]] = {
    "kto": kto,
    "apo_zero_unpaired": apo_zero_unpaired,
    "bco": bco,
    "implicit_prm": implicit_prm,
}
RANKED_ORACLES: dict[str, Callable[..., Number]] = {
    "plackett_luce": lambda scores, ranks, ratings: oracles.plackett_luce(scores, ranks),
    "lipo": lambda scores, ranks, ratings: oracles.lipo(scores, ratings),
}


# ---------------------------------------------------------------- the cases of each loss


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "discopop": [{"tau": 0.5}, {"tau": 1.0}],
    "simpo": [{"gamma": 0.0}, {"gamma": 2.0}],
    "alphapo": [{"alpha": 0.0}, {"alpha": -0.5, "gamma": 0.0}, {"alpha": 1e-9}, {"gamma": 1.5}],
    "cpo": [{"form": "hinge"}, {"form": "ipo", "alpha": 0.5}, {"alpha": 0.0}, {"nll": "sum"}],
    "orpo": [{"alpha": 0.0}, {"alpha": 2.0}],
    "tpo": [
        {"form": "hinge"},
        {"form": "ipo", "alpha": 0.5},
        {"form": "length_normalized"},
        {"form": "length_normalized", "gamma": 2.0, "alpha": 0.0},
        {"nll": "sum"},
    ],
    "sft": [{"per": "response"}],
    "sft_gold": [{"per": "response"}],
    "bco_pair": [{"shifted": False}],
    "dpop": [{"lam": 0.0}, {"lam": 2.0}],
    "tdpo2": [{"alpha": 0.0}, {"alpha": 2.0}],
    "cal_dpo": [{"weight": 0.5}],
    "r_dpo": [{"alpha": 0.0}, {"alpha": 0.03}],
    "odpo": [{"alpha": 0.5}, {"scale": "linear"}, {"scale": "linear", "alpha": 2.0}],
    "mdpo": [{"anchor": 0.3}],
    "beta_dpo": [{"alpha": 0.0}, {"alpha": 3.0}, {"margin": "log_ratio"}, {"filtered": False}],
    "kto": [{"desirable_weight": 1.5}, {"undesirable_weight": 0.3}],
    "apo_zero_unpaired": [{"desirable_weight": 1.5}, {"undesirable_weight": 0.3}],
}
REQUIRED = {"r_dpo": {"alpha": 0.01}}
SHARED: dict[str, list[dict[str, Any]]] = {
    "label_smoothing": [{"label_smoothing": 0.2}],
    "f_divergence": [
        *({"f_divergence": {"kind": kind}} for kind in ("forward_kl", "js")),
        *({"f_divergence": {"kind": "alpha", "alpha": alpha}} for alpha in (0, 0.25, 0.5, 1)),
    ],
}
"""Values of the settings that only some losses read."""

Case = tuple[str, dict[str, Any], dict[str, Any]]


def cases_of(table: dict[str, Any]) -> list[Case]:
    """Name, options and settings: the defaults, each option and each shared setting."""
    found: list[Case] = []
    for name in table:
        base = {"label_smoothing": 0.01} if name == "exo" else {}
        own = REQUIRED.get(name, {})
        found.append((name, own, base))
        found += [(name, {**own, **options}, base) for options in OPTIONS.get(name, [])]
        for key in sorted(PREFERENCE_LOSSES.about(name).reads & set(SHARED)):
            found += [(name, own, {**base, **tree}) for tree in SHARED[key]]
    return found


def smoothed_options() -> list[Case]:
    """Options whose smoothed labels go another way than those of the defaults."""
    smooth = {"label_smoothing": 0.2}
    return [
        ("tpo", {"form": "length_normalized"}, smooth),
        ("alphapo", {"alpha": 0.0}, smooth),
        ("exo", {}, {"label_smoothing": 0.2, "f_divergence": {"kind": "js"}}),
    ]


PAIR_CASES = [*cases_of(PAIR_ORACLES), *smoothed_options()]


def label(case: Case) -> str:
    name, options, tree = case
    return " ".join([name, *(f"{k}={v}" for k, v in (options | tree).items())])


def test_every_registered_loss_has_one_oracle() -> None:
    tables = (PAIR_ORACLES, BATCH_ORACLES, LABELLED_ORACLES, RANKED_ORACLES)
    names = [name for table in tables for name in table]
    assert sorted(names) == sorted(PREFERENCE_LOSSES)
    kinds = ("pair", "pair", "labelled", "ranked")
    for kind, table in zip(kinds, tables, strict=True):
        assert {PREFERENCE_LOSSES.about(name).kind for name in table} == {kind}


def test_every_option_of_a_loss_is_compared() -> None:
    for name in PREFERENCE_LOSSES:
        known = set(COMPONENT_KINDS["preference"].options(PREFERENCE_LOSSES[name]))
        compared = {key for options in OPTIONS.get(name, []) for key in options}
        assert compared == known, name


def test_every_shared_setting_that_a_loss_reads_is_compared() -> None:
    for name in PREFERENCE_LOSSES:
        assert PREFERENCE_LOSSES.about(name).reads <= {"beta", *SHARED}, name


# ---------------------------------------------------------------- random groups


BETAS = st.sampled_from([0.01, 0.1, 0.5, 2.0])
SCALES = st.sampled_from([0.0, 0.1, 2.0, 8.0])
"""Largest distance of a policy from the reference, in nats. 0 is the reference."""


def random_pair(rng: random.Random, scale: float) -> Pair:
    counts = {key: rng.randint(1, 30) for key in ("nw", "nl", "ng")}
    # the corrupted prompt has the chosen response
    tokens = {"w": counts["nw"], "l": counts["nl"], "c": counts["nw"], "g": counts["ng"]}
    reference = {side: -n * rng.uniform(0.05, 3) for side, n in tokens.items()}
    policy = {}
    for side, n in tokens.items():
        # log-probs are negative, and odds of ORPO are infinite at 0
        policy[side] = min(reference[side] + rng.uniform(-scale, scale), -1e-3 * n)
    kls = {key: scale * rng.random() for key in ("kw", "kl")}
    return Pair(
        **{f"p{side}": policy[side] for side in "wlcg"},
        **{f"r{side}": reference[side] for side in "wlc"},
        **counts,
        **kls,
        gap=rng.uniform(0.05, 4),
        shift=rng.uniform(-1, 1),
    )


@st.composite
def pair_lists(draw: Any) -> list[Pair]:
    count, scale = draw(st.integers(1, 4)), draw(SCALES)
    rng = random.Random(draw(SEEDS))
    shift = rng.uniform(-1, 1)
    return [dataclasses.replace(random_pair(rng, scale), shift=shift) for _ in range(count)]


def pairs_of(pairs: Sequence[Pair], rng: random.Random) -> tuple[Pairs, dict[str, Tensor]]:
    """The argument of the losses, and the leaves that it is made of."""

    def column(name: str) -> Tensor:
        return tensor([float(getattr(pair, name)) for pair in pairs])

    leaves = {name: column(name).requires_grad_() for name in VARIABLES}
    chosen = Responses(leaves["pw"], column("rw"), column("nw"), leaves["kw"])
    rejected = Responses(leaves["pl"], column("rl"), column("nl"), leaves["kl"])
    corrupted = Responses(leaves["pc"], column("rc"), column("nw"))
    gold = Responses(leaves["pg"], torch.zeros_like(leaves["pg"]), column("ng"))
    running = {name: tensor(rng.uniform(0.1, 2)) for name in ("margin_mean", "margin_std")}
    shift = tensor(pairs[0].shift)
    data = Pairs(chosen, rejected, column("gap"), corrupted, gold, shift, **running)
    return data, leaves


def coefficients(count: int) -> list[float]:
    """Unequal weights of the losses: a gradient of their plain sum would miss a swap."""
    return [1.0 + 0.5 * k for k in range(count)]


def slopes(losses: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Derivatives of the weighted sum of ``losses``, 0 where there is none."""
    total = (losses * tensor(coefficients(len(losses)))).sum()
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    zeros = [torch.zeros_like(leaf) for leaf in leaves]
    return [zero if slope is None else slope for slope, zero in zip(found, zeros, strict=True)]


def settings_of(name: str, beta: float, tree: dict[str, Any]) -> Settings:
    return PreferenceConfig.model_validate({"losses": [name], "beta": beta, **tree})


@pytest.mark.parametrize("case", PAIR_CASES, ids=label)
@settings(deadline=None, max_examples=12)
@given(pairs=pair_lists(), beta=BETAS)
def test_a_loss_of_pairs_is_its_oracle_in_value_and_gradient(
    case: Case, pairs: list[Pair], beta: float
) -> None:
    name, options, tree = case
    s = settings_of(name, beta, tree)
    data, leaves = pairs_of(pairs, random.Random(0))
    losses = PREFERENCE_LOSSES[name](data, s, **options)

    def oracle(pair: Pair) -> Callable[..., Number]:
        def of(*numbers: Number) -> Number:
            changed = dict(zip(VARIABLES, numbers, strict=True))
            return PAIR_ORACLES[name](dataclasses.replace(pair, **changed), s, **options)

        return of

    points = [[getattr(pair, name) for name in VARIABLES] for pair in pairs]
    functions = [oracle(pair) for pair in pairs]
    assert_equal(losses, [evaluate(f, at) for f, at in zip(functions, points, strict=True)])
    expected = [gradient(f, at) for f, at in zip(functions, points, strict=True)]
    found = slopes(losses, [leaves[name] for name in VARIABLES])
    for k, slope in enumerate(found):
        weighed = [c * row[k] for c, row in zip(coefficients(len(pairs)), expected, strict=True)]
        assert_equal(slope, weighed)


@pytest.mark.parametrize("case", cases_of(BATCH_ORACLES), ids=label)
@settings(deadline=None, max_examples=12)
@given(pairs=pair_lists(), beta=BETAS, seed=SEEDS)
def test_a_loss_of_the_whole_batch_is_its_oracle_in_value_and_gradient(
    case: Case, pairs: list[Pair], beta: float, seed: int
) -> None:
    name, options, tree = case
    s = settings_of(name, beta, tree)
    data, leaves = pairs_of(pairs, random.Random(seed))
    losses = PREFERENCE_LOSSES[name](data, s, **options)
    pws, pls, rws, rls = ([getattr(p, key) for p in pairs] for key in ("pw", "pl", "rw", "rl"))

    def oracle(pws: list[Number], pls: list[Number]) -> list[Number]:
        return BATCH_ORACLES[name]((pws, pls, rws, rls), s, data, **options)

    def total(pws: list[Number], pls: list[Number]) -> Number:
        found = oracle(pws, pls)
        return sum(c * loss for c, loss in zip(coefficients(len(found)), found, strict=True))

    assert_equal(losses, evaluate(oracle, [pws, pls]))
    found = slopes(losses, [leaves["pw"], leaves["pl"]])
    for slope, expected in zip(found, gradient(total, [pws, pls]), strict=True):
        assert_equal(slope, expected)


@st.composite
def labelled_responses(draw: Any) -> Labelled:
    count, scale = draw(st.integers(1, 5)), draw(SCALES)
    rng = random.Random(draw(SEEDS))
    reference = [-rng.uniform(1, 40) for _ in range(count)]
    policy = [r + rng.uniform(-scale, scale) for r in reference]
    lengths = tensor([float(rng.randint(1, 9)) for _ in range(count)])
    responses = Responses(tensor(policy).requires_grad_(), tensor(reference), lengths)
    good = torch.tensor([rng.random() < 0.5 for _ in range(count)])
    # the mean log-ratio of mismatched pairs may be negative
    return Labelled(responses, good, tensor(rng.uniform(-2, 2)), tensor(rng.uniform(-2, 2)))


@pytest.mark.parametrize("case", cases_of(LABELLED_ORACLES), ids=label)
@settings(deadline=None, max_examples=12)
@given(data=labelled_responses(), beta=BETAS)
def test_a_loss_of_labelled_responses_is_its_oracle_in_value_and_gradient(
    case: Case, data: Labelled, beta: float
) -> None:
    name, options, tree = case
    s = settings_of(name, beta, tree)
    losses = PREFERENCE_LOSSES[name](data, s, **options)
    points = data.responses.logprobs.tolist()
    rows = list(zip(data.responses.ref_logprobs.tolist(), data.desirable.tolist(), strict=True))
    functions = [
        lambda p, r=r, good=good: LABELLED_ORACLES[name](p, r, good, data, s, **options)
        for r, good in rows
    ]
    assert_equal(losses, [evaluate(f, [p]) for f, p in zip(functions, points, strict=True)])
    (slope,) = slopes(losses, [data.responses.logprobs])
    expected = [gradient(f, [p])[0] for f, p in zip(functions, points, strict=True)]
    weighed = [c * g for c, g in zip(coefficients(len(points)), expected, strict=True)]
    assert_equal(slope, weighed)


@st.composite
def ranked_groups(draw: Any) -> Ranked:
    """Groups in any order of their responses, with ties of ranks and of ratings."""
    sizes, scale = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)), draw(SCALES)
    rng = random.Random(draw(SEEDS))
    group_of = [g for g, size in enumerate(sizes) for _ in range(size)]
    rng.shuffle(group_of)
    count = len(group_of)
    rating = [rng.choice([0.0, 0.25, 0.5, 1.0]) for _ in range(count)]
    rank = [sum(b > a for b in set(rating)) for a in rating]
    reference = [-rng.uniform(1, 40) for _ in range(count)]
    policy = [r + rng.uniform(-scale, scale) for r in reference]
    if scale == 0:
        # exactly equal scores
        policy = list(reference)
    tokens = tensor([1.0] * count)
    responses = Responses(tensor(policy).requires_grad_(), tensor(reference), tokens)
    return Ranked(responses, torch.tensor(group_of), torch.tensor(rank), tensor(rating))


@pytest.mark.parametrize("case", cases_of(RANKED_ORACLES), ids=label)
@settings(deadline=None, max_examples=25)
@given(data=ranked_groups(), beta=BETAS)
def test_a_loss_of_ranked_groups_is_its_oracle_in_value_and_gradient(
    case: Case, data: Ranked, beta: float
) -> None:
    name, options, tree = case
    s = settings_of(name, beta, tree)
    losses = PREFERENCE_LOSSES[name](data, s, **options)
    policy, reference = data.responses.logprobs.tolist(), data.responses.ref_logprobs.tolist()
    assert data.rating is not None
    ranks, ratings = data.rank.tolist(), data.rating.tolist()
    values, expected = [], [0.0] * len(policy)
    for group, weight in enumerate(coefficients(len(data))):
        members = (data.group_of == group).nonzero()[:, 0].tolist()
        # the oracle places equal scores by their order, the loss by their rank
        members.sort(key=lambda i: ranks[i])

        def oracle(ps: list[Number], members: list[int] = members) -> Number:
            scores = [beta * (p - reference[i]) for p, i in zip(ps, members, strict=True)]
            columns = ([column[i] for i in members] for column in (ranks, ratings))
            return RANKED_ORACLES[name](scores, *columns)

        point = [policy[i] for i in members]
        values.append(evaluate(oracle, [point]))
        for i, slope in zip(members, gradient(oracle, [point])[0], strict=True):
            expected[i] = weight * slope
    assert_equal(losses, values)
    (slope,) = slopes(losses, [data.responses.logprobs])
    assert_equal(slope, expected)


@pytest.mark.parametrize("tree", SHARED["f_divergence"], ids=str)
@pytest.mark.parametrize(("name", "value"), [("sigmoid_norm", 0.6931471805599453), ("ipo", 25.0)])
def test_lengths_do_not_matter_at_policy_equal_to_reference_under_any_divergence(
    name: str, value: float, tree: dict[str, Any]
) -> None:
    pair = dataclasses.replace(
        random_pair(random.Random(0), 0.0), pw=-3.0, rw=-3.0, pl=-9.0, rl=-9.0, nw=2, nl=11
    )
    data, _ = pairs_of([pair], random.Random(0))
    assert_equal(PREFERENCE_LOSSES[name](data, settings_of(name, 0.1, tree)), [value])
