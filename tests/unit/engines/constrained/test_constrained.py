"""Constrained decoding: every response has its form, and log-probs are of the constrained distribution."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from lightrft.config.base import build
from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import EvaluateConfig, RLConfig
from lightrft.engines.constrained.grammars import (
    GrammarCompiler,
    check_column,
    check_constraint,
    constraint_of,
)
from lightrft.engines.native import NativeEngine
from lightrft.models.actor import Actor
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.rollout.logprob_check import CheckedEngine
from lightrft.trainer.checks.preflight import evaluation_problems
from lightrft.trainer.inference import run_eval
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import ConfigError, DataError, ModelError
from tests.model_helpers import vllm_model

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
PROMPT = Prompt("p", TOKENIZER("say: ")["input_ids"])
CHOICES = ("yes", "yellow", "no", "n", "maybe")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen2", vocab_size=len(TOKENIZER), eos_token_id=END)


def engine_of(model: PreTrainedModel, **config: Any) -> NativeEngine:
    return NativeEngine(KVDecoder(model), TOKENIZER, EngineConfig(**config))


def run(model: PreTrainedModel, requests: list[Request], **sampling: Any) -> list[Rollout]:
    found = list(engine_of(model).generate(requests, SamplingConfig(**sampling)))
    return sorted(found, key=lambda r: r.seed)


def seeds(count: int, **more: Any) -> list[Request]:
    return [Request(PROMPT, seed, seed, **more) for seed in range(count)]


def text_of(token_ids: list[int]) -> str:
    return TOKENIZER.decode([t for t in token_ids if t != END])


def logits_after(model: PreTrainedModel, response: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT.token_ids + response])).logits[0, -1].double()


def next_tokens(text: str) -> list[int]:
    """The tokens after ``text``, by trying each character on every choice."""
    found = {
        TOKENIZER(c[len(text)])["input_ids"][0]
        for c in CHOICES
        if c.startswith(text) != (c == text)
    }
    return sorted(found | ({END} if text in CHOICES else set()))


def test_a_column_of_constraints_that_no_row_has_is_refused_by_its_setting() -> None:
    rows = [Prompt("0", [1], columns={"from": None}), Prompt("1", [1], columns={"form": None})]
    sampling = SamplingConfig(constraint={"column": "form"})
    check_column(rows, sampling, "eval.sampling", "eval.data")
    check_column([], SamplingConfig(), "eval.sampling", "eval.data")
    said = r"^eval\.sampling\.constraint\.column = 'form': no row of eval\.data.*mean 'from'"
    with pytest.raises(ConfigError, match=said):
        check_column(rows[:1], sampling, "eval.sampling", "eval.data")


def test_an_evaluation_refuses_a_misspelt_column_of_constraints(tmp_path: Path) -> None:
    vllm_model(tmp_path / "model")
    row = {"prompt": "1+1=", "label": "2", "form": {"choices": ["2", "3"]}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    tree = {
        "model": {"path": str(tmp_path / "model")},
        "eval": {
            "data": {"sources": [str(tmp_path / "rows.jsonl")]},
            "sampling": {"constraint": {"column": "fork"}, "max_new_tokens": 2},
        },
        "reward": {"terms": ["math"]},
        "run": {"dir": str(tmp_path / "runs")},
    }
    with pytest.raises(ConfigError, match=r"column = 'fork'.*did you mean 'form'"):
        run_eval(build(EvaluateConfig, tree))


@pytest.mark.parametrize(
    ("constraint", "form"),
    [
        ({"choices": CHOICES}, "|".join(CHOICES)),
        ({"regex": r"[a-c]{2,5}-\d+"}, r"[a-c]{2,5}-\d+"),
    ],
    ids=["choices", "regex"],
)
def test_every_finished_response_has_the_form(
    model: PreTrainedModel, constraint: dict[str, Any], form: str
) -> None:
    rollouts = run(model, seeds(30), constraint=constraint, max_new_tokens=40)
    finished = [r for r in rollouts if r.finish_reason == "stop"]
    assert len(finished) > 15
    assert len({r.text for r in finished}) > 3
    for rollout in finished:
        assert re.fullmatch(form, rollout.text), rollout.text
        assert rollout.token_ids[-1] == END


def test_a_schema_is_followed_with_tokens_of_several_characters(tmp_path: Path) -> None:
    model = vllm_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    engine = NativeEngine(KVDecoder(model), tokenizer, EngineConfig())
    prompt = Prompt("p", tokenizer("the quick brown fox")["input_ids"])
    sampling = SamplingConfig(constraint={"json_schema": SCHEMA}, max_new_tokens=120, top_k=5)
    rollouts = list(engine.generate([Request(prompt, seed) for seed in range(12)], sampling))
    finished = [r for r in rollouts if r.finish_reason == "stop"]
    assert len(finished) >= 6
    for rollout in finished:
        found = json.loads(rollout.text)
        assert set(found) == {"a", "b"}
        assert isinstance(found["a"], int) and found["b"] in ("x", "y")


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_k": 2}, {"temperature": 0}])
def test_logprobs_are_of_the_constrained_distribution(
    model: PreTrainedModel, sampling: dict[str, Any]
) -> None:
    for rollout in run(model, seeds(12), constraint={"choices": CHOICES}, **sampling):
        for t, token in enumerate(rollout.token_ids):
            logits = logits_after(model, rollout.token_ids[:t])
            kept = next_tokens(text_of(rollout.token_ids[:t]))
            scaled = logits[kept] / (sampling.get("temperature") or 1)
            if sampling.get("temperature") == 0:
                assert token == kept[int(scaled.argmax())]
            if top_k := sampling.get("top_k"):
                scaled = scaled.masked_fill(
                    scaled < scaled.topk(min(top_k, len(kept))).values[-1], -torch.inf
                )
            expected = float(scaled.log_softmax(-1)[kept.index(token)])
            assert rollout.logprobs[t] == pytest.approx(expected, abs=1e-4)


def test_responses_have_the_frequencies_of_the_exact_constrained_distribution(
    model: PreTrainedModel,
) -> None:
    def probability(choice: str) -> float:
        tokens, total = [*TOKENIZER(choice)["input_ids"], END], 0.0
        for t, token in enumerate(tokens):
            kept = next_tokens(choice[:t])
            logprobs = logits_after(model, tokens[:t])[kept].log_softmax(-1)
            total += float(logprobs[kept.index(token)])
        return math.exp(total)

    count = 3000
    found = Counter(r.text for r in run(model, seeds(count), constraint={"choices": CHOICES}))
    expected = {choice: count * probability(choice) for choice in CHOICES}
    assert sum(expected.values()) == pytest.approx(count, rel=1e-6)
    chi2 = sum((found[c] - e) ** 2 / e for c, e in expected.items())
    # of four degrees of freedom: above 23.5 by chance once in 10,000
    assert chi2 < 23.5


def test_a_response_depends_on_its_request_alone_among_free_ones(model: PreTrainedModel) -> None:
    own = {"constraint": SamplingConfig(constraint={"regex": "[ab]{3,9}"}).constraint}
    mixed = [*seeds(6), *(Request(PROMPT, 100 + k, **own) for k in range(6))]
    together = run(model, mixed, max_new_tokens=12)
    free = run(model, seeds(6), max_new_tokens=12)
    assert [r.token_ids for r in together[:6]] == [r.token_ids for r in free]
    for request, rollout in zip(mixed[6:], together[6:]):
        [alone] = run(model, [request], max_new_tokens=12)
        assert alone.token_ids == rollout.token_ids
        assert re.fullmatch("[ab]{3,9}", rollout.text)
    small = engine_of(model, max_num_seqs=3).generate(mixed, SamplingConfig(max_new_tokens=12))
    by_seed = {r.seed: r.token_ids for r in small}
    assert by_seed == {r.seed: r.token_ids for r in together}


def test_a_continued_response_keeps_its_form_and_its_tokens(model: PreTrainedModel) -> None:
    sampling: dict[str, Any] = {"constraint": {"regex": "[ab]{6}(cd){2}"}, "max_new_tokens": 20}
    [whole] = run(model, [Request(PROMPT, 3)], **sampling)
    [part] = run(model, [Request(PROMPT, 3, pause_after_tokens=4)], **sampling)
    [done] = run(model, [Request(PROMPT, 3, partial=part)], **sampling)
    assert done.token_ids == whole.token_ids
    assert done.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    other = {**sampling, "constraint": {"regex": "[xy]{9}"}}
    with pytest.raises(ConfigError, match="tokens that its constraint does not allow"):
        run(model, [Request(PROMPT, 3, partial=part)], **other)


def test_the_minimum_gives_way_where_only_the_end_is_left(model: PreTrainedModel) -> None:
    short = run(model, seeds(20), constraint={"choices": CHOICES}, min_new_tokens=4)
    # "n" and "no" can grow no further than "no", so they end before the minimum
    assert {r.text for r in short} <= {"yes", "yellow", "no", "maybe"}
    long = run(model, seeds(20), constraint={"regex": "[ab]{1,9}"}, min_new_tokens=6)
    assert all(len(r.text) >= 6 for r in long)


def test_stop_tokens_and_stop_strings_end_a_constrained_response(model: PreTrainedModel) -> None:
    [b] = TOKENIZER("b")["input_ids"]
    for rollout in run(model, seeds(9), constraint={"regex": "[ab]{30}"}, stop_token_ids=(b,)):
        assert rollout.finish_reason == "stop"
        assert rollout.token_ids.index(b) == len(rollout) - 1
    for rollout in run(model, seeds(9), constraint={"regex": "[ab]{30}"}, stop=("ab",)):
        assert "ab" not in rollout.text


def test_each_row_has_the_constraint_of_its_column(model: PreTrainedModel) -> None:
    given = [
        {"regex": "a+b", "json_schema": None},
        {"json_schema": json.dumps({"type": "boolean"})},
        None,
    ]
    rows = [Prompt(str(k), PROMPT.token_ids, columns={"form": g}) for k, g in enumerate(given)]
    rollouts = run(
        model,
        [Request(prompt, seed) for seed, prompt in enumerate(rows)],
        constraint={"column": "form"},
        max_new_tokens=30,
    )
    assert re.fullmatch("a*b?", rollouts[0].text)
    assert rollouts[1].text in ("true", "false")
    [free] = run(model, [Request(rows[2], 2)], max_new_tokens=30)
    assert rollouts[2].token_ids == free.token_ids


@pytest.mark.parametrize("given", ["yes|no", {"regexp": "a"}, {"regex": "a", "choices": ["b"]}, 3])
def test_a_column_that_holds_no_constraint_is_named(given: Any) -> None:
    prompt = Prompt("row 7", [1], columns={"form": given})
    with pytest.raises(DataError, match="column 'form' of prompt 'row 7' is no constraint"):
        constraint_of(prompt, SamplingConfig(constraint={"column": "form"}))


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        ({"regex": "(a"}, "constraint.regex is not supported"),
        ({"json_schema": {"type": "strin"}}, "constraint.json_schema is not supported"),
        ({"json_schema": {"not": {}}}, "Unimplemented keys"),
    ],
)
def test_a_constraint_that_cannot_be_followed_is_refused_before_anything_is_generated(
    model: PreTrainedModel, constraint: dict[str, Any], said: str
) -> None:
    sampling = SamplingConfig(constraint=constraint)
    with pytest.raises(ConfigError, match=said):
        engine_of(model).generate(seeds(1), sampling)
    with pytest.raises(ConfigError, match=said):
        check_constraint(sampling.constraint)


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choices": ["b"]}, "regex and choices"),
        ({"choices": []}, "allows no response"),
        ({"choices": [""]}, "must not have an empty text"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
    ],
)
def test_a_contradictory_constraint_is_refused(constraint: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplingConfig(constraint=constraint)


def test_a_missing_package_and_a_missing_end_token_are_named(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="needs a model with an end token"):
        GrammarCompiler(TOKENIZER, None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[constrained\]'"):
        engine_of(model).generate(seeds(1), SamplingConfig(constraint={"regex": "a"}))


def test_a_constraint_that_no_token_continues_is_named(model: PreTrainedModel) -> None:
    # the vocabulary spells ASCII alone
    with pytest.raises(ModelError, match="no token of the vocabulary continues the response"):
        run(model, seeds(1), constraint={"choices": ["\u00fc"]})


def test_the_comparison_with_the_model_knows_the_constraint(model: PreTrainedModel) -> None:
    actor = Actor(model, ModelConfig(layout="padded"))
    sampling = SamplingConfig(constraint={"regex": "[a-f]{8}"}, max_new_tokens=12)
    checked = CheckedEngine(engine_of(model), actor, EngineConfig())
    assert len(list(checked.generate(seeds(6), sampling))) == 6
    assert checked.checked

    class Unmasked(NativeEngine):
        def generate(self, *args: Any) -> Any:
            for rollout in super().generate(*args):
                rollout.logprobs = [p - 0.5 for p in rollout.logprobs]
                yield rollout

    wrong = Unmasked(KVDecoder(model), TOKENIZER, EngineConfig())
    with pytest.raises(ModelError, match="log-probs differ"):
        list(CheckedEngine(wrong, actor, EngineConfig()).generate(seeds(6), sampling))


def test_training_on_constrained_responses_is_refused_and_evaluating_them_is_not() -> None:
    def problems(**tree: Any) -> list[str]:
        return evaluation_problems(build(RLConfig, tree))

    form = {"constraint": {"regex": "a"}}
    assert "reward the form" in " ".join(problems(sampling=form))
    data = {"sources": ["rows.jsonl"]}
    assert problems(eval={"sampling": form, "data": data}) == []
    wrong = {"sampling": {"constraint": {"regex": "("}}, "data": data}
    assert "eval.sampling: sampling.constraint.regex" in " ".join(problems(eval=wrong))
