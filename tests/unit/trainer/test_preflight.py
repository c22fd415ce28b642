"""Settings with which a run would learn nothing are refused, with the way out."""

from __future__ import annotations

from typing import Any

import pytest

from lightrft.algorithms.requirements import Requirements
from lightrft.config.base import build
from lightrft.config.rollout import EvalConfig
from lightrft.config.verbs import RLConfig, SFTConfig
from lightrft.rollout.evaluation import evaluate
from lightrft.trainer.checks.check_config import check
from lightrft.trainer.checks.preflight import (
    BARE,
    EVAL_METRICS,
    NAMESPACES,
    check_best,
    check_enough,
    check_evaluation,
    check_learning,
)
from lightrft.trainer.supervised import check_supervised
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import ConfigError

HELD = {"data": {"sources": ["test.jsonl"]}}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (
            {"sampling": {"temperature": 0}},
            "sampling.temperature = 0: all responses of a group are the same",
        ),
        ({"sampling": {"top_k": 1}}, "sampling.top_k = 1"),
        ({"sampling": {"min_p": 1.0}}, "sampling.min_p = 1"),
        (
            {"reward": {"terms": [{"function": "math", "weight": 0}]}},
            "reward.terms: every weight is 0",
        ),
        (
            {"reward": {"per_source": {"a": [{"function": "math", "weight": 0}]}}},
            "reward.per_source.a: every weight is 0",
        ),
        ({"eval": {"every": 5}}, "eval.every = 5 changes nothing: eval.data.sources is empty"),
        ({"eval": {"stop_at": 0.9}}, "eval.stop_at = 0.9 changes nothing"),
        ({"eval": {"limit": 9}}, "eval.limit = 9 changes nothing"),
        ({"eval": {"samples": 4}}, "eval.samples = 4 changes nothing"),
        ({"eval": {**HELD, "stop_at": 0.9}}, "eval.stop_at = 0.9 needs eval.every"),
        (
            {"eval": {**HELD, "every": 1}, "checkpoint": {"best": "eval/acc"}},
            "did you mean eval/accuracy?",
        ),
        (
            {"eval": {**HELD, "every": 1}, "checkpoint": {"best": "-eval/nonsense"}},
            "an evaluation reports eval/accuracy",
        ),
        (
            {"eval": {**HELD, "every": 1}, "checkpoint": {"best": "eval/pass"}},
            "eval.samples above 1",
        ),
        (
            {"eval": {**HELD, "every": 1, "samples": 6}, "checkpoint": {"best": "eval/pass@3"}},
            "is not measured with eval.samples = 6; k can be: 2, 4",
        ),
        ({"eval": HELD, "checkpoint": {"best": "eval/accuracy"}}, "needs eval.every"),
        (
            {"checkpoint": {"best": "eval/accuracy"}},
            "is never measured: eval.data.sources is empty",
        ),
        ({"checkpoint": {"best": "accuracy"}}, "checkpoint.best = 'accuracy' is not a metric"),
        (
            {"engine": {"kind": "vllm"}, "sampling": {"min_p": 0.1, "top_p": 0.9}},
            "sampling.min_p = 0.1 with sampling.top_p = 0.9: vLLM applies min_p first",
        ),
        (
            {"engine": {"kind": "vllm"}, "eval": {"sampling": {"temperature": 0.001}}},
            "eval.sampling.temperature = 0.001: vLLM samples at 0.01",
        ),
        (
            {"checkpoint": {"best": "evl/accuracy"}},
            "checkpoint.best = 'evl/accuracy' is not a metric",
        ),
    ],
)
def test_a_setting_that_teaches_nothing_is_refused(tree, said) -> None:
    base = {"data": {"sources": ["train.jsonl"]}, "reward": {"terms": ["math"]}}
    config = build(RLConfig, {**base, **tree})
    with pytest.raises(ConfigError, match=said.replace("(", r"\(").replace("?", r"\?")):
        check_learning(config, Requirements.of(config.algorithm))
    with pytest.raises(ConfigError):
        check(config)


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"sampling": {"temperature": 0}, "algorithm": {"preset": "ppo"}},
        {"eval": {**HELD, "every": 1, "stop_at": 1.0}, "checkpoint": {"best": "-eval/length"}},
        {"eval": {**HELD, "every": 1}, "checkpoint": {"best": "eval/some source/accuracy"}},
        {"eval": {**HELD, "every": 1, "samples": 4}, "checkpoint": {"best": "eval/a/pass@4"}},
        {"checkpoint": {"best": "reward/mean"}},
        {"checkpoint": {"best": "-policy/kl"}},
    ],
)
def test_a_setting_that_means_something_passes(tree) -> None:
    config = build(RLConfig, tree)
    check_learning(config, Requirements.of(config.algorithm))


def test_supervised_training_refuses_an_engine_that_nobody_asks() -> None:
    tree = {"data": {"sources": ["train.jsonl"]}, "engine": {"kind": "vllm"}}
    with pytest.raises(ConfigError, match=r"engine\.kind = vllm changes nothing: no step"):
        check_supervised(build(SFTConfig, tree))
    asks = {"eval": {**HELD, "every": 1}, "reward": {"terms": ["math"]}}
    check_supervised(build(SFTConfig, {**tree, **asks}))


def test_supervised_training_refuses_what_asks_for_an_evaluation_without_data() -> None:
    with pytest.raises(ConfigError, match=r"eval\.every = 2"):
        check_evaluation(build(SFTConfig, {"eval": {"every": 2}}))


@pytest.mark.parametrize("key", ["lr", "lr_of"])
def test_a_learning_rate_that_replaces_every_weight_is_refused(key) -> None:
    value: Any = 1000.0 if key == "lr" else {"language": 1000.0}
    with pytest.raises(ConfigError, match="AdamW moves each weight by about lr"):
        build(RLConfig, {"optimizer": {key: value}})


def test_a_metric_that_the_first_step_does_not_report_is_refused_then() -> None:
    check_best(None, {})
    check_best("-reward/mean", {"reward/mean": 0.5})
    check_best("eval/accuracy", {"reward/mean": 0.5})
    with pytest.raises(ConfigError, match="did you mean reward/mean"):
        check_best("reward/maen", {"reward/mean": 0.5})


def test_fewer_rows_than_a_step_takes_are_refused() -> None:
    check_enough("rollout.prompts_per_step", 8, 8, "prompts")
    with pytest.raises(
        ConfigError, match=r"rollout\.prompts_per_step = 8, and the data has 7 prompts"
    ):
        check_enough("rollout.prompts_per_step", 8, 7, "prompts")


class Echo:
    """Gives every request one response, and every response a reward."""

    shared_by_all_ranks, tensor_parallel_size, shares_weights = False, 1, True

    def __init__(self) -> None:
        self.waiting: list[Rollout] = []

    def generate(self, requests, sampling, stopped=None):
        for request in requests:
            yield Rollout(
                request.prompt,
                [1],
                [True],
                [0.0],
                [0],
                "stop",
                seed=request.seed,
                sample=request.sample,
            )

    def submit(self, rollout):
        rollout.reward = 1.0
        self.waiting.append(rollout)

    def results(self, wait):
        while self.waiting:
            yield self.waiting.pop()


def test_the_names_of_an_evaluations_metrics_are_known() -> None:
    echo: Any = Echo()
    found = evaluate(
        echo,
        echo,
        [Prompt("a", [1], data_source="x"), Prompt("b", [1])],
        EvalConfig(samples=2),
        seed=0,
    )
    leaves = {name.rpartition("/")[2] for name in found.metrics}
    assert leaves == {*EVAL_METRICS, "pass@2", "pass^2"}


def test_no_namespace_is_named_twice() -> None:
    assert len({*NAMESPACES, *BARE, "eval"}) == len(NAMESPACES) + len(BARE) + 1


@pytest.mark.parametrize("verb", [check, check_supervised])
def test_weights_in_4_bits_without_adapters_are_refused(verb) -> None:
    cls = RLConfig if verb is check else SFTConfig
    tree: dict[str, Any] = {"data": {"sources": ["train.jsonl"]}}
    if verb is check:
        tree["reward"] = {"terms": ["math"]}
    verb(build(cls, {**tree, "model": {"load_in_4bit": True, "lora": {"rank": 4}}}))
    with pytest.raises(ConfigError, match=r"model\.load_in_4bit = true.*model\.lora\.rank"):
        verb(build(cls, {**tree, "model": {"load_in_4bit": True}}))
