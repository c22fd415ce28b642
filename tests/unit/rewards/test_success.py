"""Which responses are right: one declared term says it, in evaluations, comparisons and best checkpoints."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.config.base import build
from lightrft.config.reward import RewardConfig
from lightrft.config.rollout import EvalConfig
from lightrft.config.verbs import RLConfig
from lightrft.observability.run_health import Health
from lightrft.rewards.success import Success
from lightrft.rollout.evaluation import Evaluation, evaluate
from lightrft.trainer.checks.preflight import evaluation_problems
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import ConfigError


class Scored:
    """An engine and a scorer whose responses have the given terms, in order."""

    shared_by_all_ranks, tensor_parallel_size, shares_weights = False, 1, True

    def __init__(self, config: RewardConfig, terms: list[dict[str, float]]) -> None:
        self.weights = {term.label: term.weight for term in config.terms}
        self.terms = iter(terms)
        self.waiting: list[Rollout] = []

    def generate(self, requests: Any, sampling: Any, stopped: Any = None) -> Any:
        for request in requests:
            own = (request.seed, request.sample)
            yield Rollout(request.prompt, [1], [True], [0.0], [0], "stop", *own)

    def submit(self, rollout: Rollout) -> None:
        rollout.terms = next(self.terms)
        rollout.reward = sum(w * rollout.terms.get(n, 0.0) for n, w in self.weights.items())
        self.waiting.append(rollout)

    def results(self, wait: bool) -> Any:
        while self.waiting:
            yield self.waiting.pop()


def measured(reward: dict[str, Any], terms: list[dict[str, float]], **settings: Any) -> Evaluation:
    config = build(RewardConfig, reward)
    both: Any = Scored(config, terms)
    prompts = [Prompt(str(i), [1]) for i in range(len(terms))]
    return evaluate(both, both, prompts, build(EvalConfig, settings), seed=0, reward=config)


def accuracy(reward: dict[str, Any], terms: list[dict[str, float]], **settings: Any) -> float:
    return measured(reward, terms, **settings).metrics.compute()["eval/accuracy"]


def test_a_second_term_does_not_make_a_wrong_response_right() -> None:
    terms = [{"accuracy": float(i == 0), "has_format": 1.0} for i in range(11)]
    two = {"terms": ["rw.py:accuracy", "rw.py:has_format"], "success": "accuracy"}
    assert accuracy(two, terms) == 1 / 11


def test_a_penalty_does_not_make_a_right_response_wrong() -> None:
    terms = [{"math": 1.0, "length": -0.3}] * 3
    assert accuracy({"terms": ["math", "length"]}, terms) == 1.0


@pytest.mark.parametrize("weight", [0.0, 0.5, -1.0, 3.0])
def test_the_weight_of_the_term_does_not_count(weight: float) -> None:
    terms = [{"math": 1.0}, {"math": 0.0}]
    one = {"terms": [{"function": "math", "weight": weight}]}
    assert accuracy(one, terms) == 0.5
    assert accuracy(one, terms, threshold=-1.0) == 1.0


@given(
    st.lists(st.tuples(st.booleans(), st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=6),
    st.floats(-3, 3),
)
def test_only_the_outcome_term_decides(
    rows: list[tuple[bool, float, float]], weight: float
) -> None:
    terms = [{"exact_match": float(a), "length": b, "bonus": c} for a, b, c in rows]
    three = ["exact_match", "length", {"function": "rw.py:bonus", "weight": weight}]
    expected = sum(a for a, _, _ in rows) / len(rows)
    assert accuracy({"terms": three}, terms) == pytest.approx(expected)


PENALTY = {"function": "rw.py:too_long", "weight": -0.5}
DEFAULTS: dict[str, tuple[Any, str | None]] = {
    "one built-in": (["math"], "math"),
    "one function of the user": (["rw.py:f"], "f"),
    "with a built-in measure": (["rw.py:f", "format", "length"], "f"),
    "a built-in outcome before a function": (["rw.py:f", "exact_match"], "exact_match"),
    "with its own name": ([{"function": "math", "name": "right"}, "length"], "right"),
    "measures alone": (["format", "length"], None),
    "a penalty alone": ([PENALTY], None),
    "a function and a penalty": ([PENALTY, "rw.py:f"], "f"),
    "a built-in outcome with a negative weight": ([{"function": "math", "weight": -1}], "math"),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_only_term_that_says_right_or_wrong_is_the_outcome(name: str) -> None:
    terms, expected = DEFAULTS[name]
    success = Success(build(RewardConfig, {"terms": terms}))
    assert success.term("") == success.term("any") == expected
    assert list(success.problems()) == []


def test_a_model_or_a_judge_is_the_outcome_where_it_is_named() -> None:
    tree: dict[str, Any] = {"models": [{"path": "rm", "name": "good"}], "judges": ["judge"]}
    assert Success(build(RewardConfig, tree)).term("") is None
    for name in ("good", "judge"):
        assert Success(build(RewardConfig, {**tree, "success": name})).term("") == name
    unnamed = {"models": ["rm"], "success": ["helpful"]}
    assert Success(build(RewardConfig, unnamed)).term("") == "helpful"


UNCLEAR: dict[str, tuple[dict[str, Any], list[str]]] = {
    "two functions": ({"terms": ["rw.py:f", "rw.py:g"]}, ["reward.terms has 2", "f, g"]),
    "two built-ins": ({"terms": ["math", "exact_match"]}, ["math, exact_match"]),
    "of a source": (
        {"terms": ["math"], "per_source": {"a": ["rw.py:f", "rw.py:g"]}},
        ["reward.per_source.a has 2"],
    ),
    "a typo": ({"terms": ["math"], "success": "mth"}, ["no such term", "math"]),
    "both of one list": (
        {"terms": ["rw.py:f", "rw.py:g"], "success": ["f", "g"]},
        ["'f' and 'g' are both terms of reward.terms"],
    ),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_an_unclear_outcome_is_an_error_at_start_that_names_the_setting(name: str) -> None:
    reward, parts = UNCLEAR[name]
    tree = {"eval": {"data": {"sources": ["test.jsonl"]}}, "reward": reward}
    (problem,) = evaluation_problems(build(RLConfig, tree))
    assert "reward.success" in problem and all(part in problem for part in parts)
    without_eval_set = {**reward, "success": []}
    assert evaluation_problems(build(RLConfig, {"reward": without_eval_set})) == []


def test_each_data_source_has_its_own_outcome() -> None:
    tree = {
        "terms": ["rw.py:f", "rw.py:g"],
        "per_source": {"sums": ["math"], "style": ["length"], "both": ["rw.py:h", "rw.py:g"]},
        "success": ["f", "h"],
    }
    success = Success(build(RewardConfig, tree))
    found = {source: success.term(source) for source in ("", "sums", "style", "both")}
    assert found == {"": "f", "sums": "math", "style": None, "both": "h"}


def test_one_of_several_named_values_is_the_outcome() -> None:
    named = {"terms": ["rw.py:f", "rw.py:g"], "success": "f/right"}
    terms = [{"f": 0.1, "f/right": 1.0, "g": 0.0}, {"f": 5.0, "f/right": 0.0, "g": 9.0}]
    assert accuracy(named, terms) == 0.5


def test_a_response_that_lacks_the_outcome_fails_and_is_counted() -> None:
    found = measured(
        {"terms": ["rw.py:f"], "success": "f/right"}, [{"f": 1.0, "f/wrong": 1.0}, {"f/right": 1.0}]
    )
    values = found.metrics.compute()
    assert (values["eval/failed"], values["eval/accuracy"]) == (1.0, 0.5)
    (failed,) = [r.failed for r in found.rollouts if r.failed]
    assert "'f/right' of reward.success" in failed and "'f/wrong'" in failed


def test_without_an_outcome_nothing_is_called_accuracy() -> None:
    values = measured({"terms": ["length"]}, [{"length": 2.0}] * 2).metrics.compute()
    assert values["eval/reward"] == 2.0
    assert not [name for name in values if "accuracy" in name or "pass" in name]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("best", "eval/accuracy"),
        ("best", "eval/a/accuracy_low"),
        ("stop_at", 0.9),
    ],
)
def test_what_reads_the_accuracy_needs_an_outcome(setting: str, value: Any) -> None:
    tree: dict[str, Any] = {
        "eval": {"data": {"sources": ["test.jsonl"]}, "every": 1},
        "reward": {"terms": ["length"]},
    }
    section = tree.setdefault("checkpoint", {}) if setting == "best" else tree["eval"]
    section[setting] = value
    (problem,) = evaluation_problems(build(RLConfig, tree))
    assert "reward.success" in problem and repr(value) in problem
    tree["reward"]["success"] = "length"
    assert evaluation_problems(build(RLConfig, tree)) == []


def test_an_outcome_that_no_evaluation_reads_is_refused() -> None:
    tree = {"reward": {"terms": ["math"], "success": "math"}}
    (problem,) = evaluation_problems(build(RLConfig, tree))
    assert "changes nothing" in problem


@given(st.permutations(["math", "format", "length", "rw.py:f"]))
def test_the_order_of_the_terms_does_not_matter(terms: list[str]) -> None:
    for count in range(1, 5):
        for some in itertools.permutations(terms, count):
            success = Success(build(RewardConfig, {"terms": list(some)}))
            expected = "math" if "math" in some else "f" if "rw.py:f" in some else None
            assert success.term("") == expected


def test_two_names_are_refused_where_one_is_asked_for() -> None:
    reward = build(RewardConfig, {"terms": ["math", "exact_match"]})
    with pytest.raises(ConfigError, match=r"reward\.success=math"):
        Success(reward).term("")


SAFE: dict[str, Any] = {
    "eval": {"data": {"sources": ["test.jsonl"]}, "every": 1, "stop_at": 0.9},
    "algorithm": {"preset": "ppo_lag", "lagrangian": {"costs": ["toxic"]}},
    "reward": {"terms": ["rw.py:helpful", {"function": "rw.py:toxic", "weight": 0}]},
}


@pytest.mark.parametrize("first", [0, 1])
def test_a_cost_is_never_what_makes_a_response_right(first: int) -> None:
    terms = list(SAFE["reward"]["terms"])
    reward = {"terms": [terms[first], terms[1 - first]]}
    assert evaluation_problems(build(RLConfig, {**SAFE, "reward": reward})) == []
    success = Success(build(RewardConfig, reward), costs=frozenset({"toxic"}))
    assert success.term("") == "helpful"
    assert success.outcome("", 0.0, {"toxic": 1.0, "helpful": 0.0}) == 0.0


def test_without_another_term_costs_leave_no_accuracy() -> None:
    tree = {**SAFE, "reward": {"terms": ["length", {"function": "rw.py:toxic", "weight": 0}]}}
    (problem,) = evaluation_problems(build(RLConfig, tree))
    assert "eval.stop_at" in problem and "none does" in problem


def test_a_cost_is_refused_as_success() -> None:
    reward = {**SAFE["reward"], "success": "toxic"}
    (problem,) = evaluation_problems(build(RLConfig, {**SAFE, "reward": reward}))
    assert "reward.success = 'toxic': it is a cost" in problem


def test_two_terms_beside_a_cost_are_still_unclear() -> None:
    reward = {"terms": [*SAFE["reward"]["terms"], "rw.py:other"]}
    (problem,) = evaluation_problems(build(RLConfig, {**SAFE, "reward": reward}))
    assert "2 terms" in problem and "helpful, other" in problem


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.5])
def test_a_threshold_that_makes_all_or_no_answers_right_is_refused(threshold: float) -> None:
    tree: dict[str, Any] = {"eval": {**SAFE["eval"], "threshold": threshold}}
    (problem,) = evaluation_problems(build(RLConfig, {**tree, "reward": {"terms": ["math"]}}))
    assert f"eval.threshold = {threshold:g}: 'math' is from 0 to 1" in problem
    assert evaluation_problems(build(RLConfig, {**tree, "reward": {"terms": ["rw.py:f"]}})) == []


SCORES = {
    "right and wrong": ([0, 1, 0, 1], 1),
    "minus and plus one": ([-1, 1], 1),
    "all right": ([1, 1], 1),
    "a share": ([0.1, 0.5, 0.7, 1], 3),
    "never the threshold": ([0, 0.5], 2),
    "lengths": ([3, 17, 120], 3),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_function_that_gives_a_score_is_reported_where_it_is_taken_for_right_or_wrong(
    name: str,
) -> None:
    scores, expected = SCORES[name]
    terms = [{"f": float(score)} for score in scores]
    values = measured({"terms": ["rw.py:f"]}, terms).metrics.compute()
    assert values["eval/outcome_values"] == expected
    warned = [one for one in Health().warnings(values) if "reward.success" in one]
    assert bool(warned) == (expected > 1)


def test_a_declared_outcome_may_be_a_score() -> None:
    terms = [{"f": 0.1, "math": 0.1}, {"f": 0.5, "math": 0.5}]
    declared: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"terms": ["rw.py:f"], "success": "f"}, {}),
        ({"terms": ["rw.py:f"]}, {"threshold": 0.3}),
        ({"terms": ["math"]}, {}),
        ({"terms": ["length"]}, {}),
    ]
    for reward, settings in declared:
        names = measured(reward, terms, **settings).metrics.compute()
        assert "eval/outcome_values" not in names


def test_scores_of_two_data_sources_are_not_mixed() -> None:
    both = {"per_source": {"a": ["rw.py:f"], "b": ["rw.py:g"]}}
    success = Success(build(RewardConfig, both))
    assert success.outcome_values([("a", 1.0), ("b", 2.0), ("a", 0.0), ("b", -1.0)]) == 1
    assert success.outcome_values([("a", 1.0), ("b", 2.0), ("b", 3.0)]) == 2
