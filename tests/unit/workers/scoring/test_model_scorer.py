"""Scores of reward models as terms of the reward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.model import ModelConfig
from lightrft.config.reward import RewardConfig, ScoringModelConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.rewards.base import NullScorer
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import ConfigError
from lightrft.workers.local import model_scorers
from lightrft.workers.scoring.collecting import CombiningScorer, batch_of
from lightrft.workers.scoring.model_scorer import (
    ModelScorer,
    ScoringModel,
    TermModel,
    scoring_models,
)

CPU = torch.device("cpu")


def rollout(prompt: Prompt, token_ids: list[int]) -> Rollout:
    n = len(token_ids)
    return Rollout(prompt, token_ids, [True] * n, [0.0] * n, [0] * n, "stop", seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rm")
    tokenizer = tiny_tokenizer()
    model = tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer))
    settings = RewardModelConfig(heads=[{"name": "good"}, {"name": "short"}])  # type: ignore[arg-type]
    RewardModel(model, ModelConfig(), settings, seed=3).save(tokenizer, path)
    return path


@pytest.fixture
def rollouts() -> list[Rollout]:
    first, second = Prompt("0", [5, 6, 7]), Prompt("1", [8, 9])
    rows = [(first, [4, 5]), (second, [6]), (first, [7, 7, 7])]
    return [rollout(prompt, ids) for prompt, ids in rows]


def load(folder: Path, *terms: ScoringModelConfig) -> list[TermModel]:
    config = ModelConfig(path=str(folder), dtype="float32")
    return scoring_models(terms, config, load_tokenizer(config), torch.device("cpu"))


def run(scorer: ModelScorer, rollouts: list[Rollout]) -> list[Rollout]:
    def both() -> Iterator[Rollout]:
        for one in rollouts:
            scorer.submit(one)
            yield from scorer.results(wait=False)
        yield from scorer.results(wait=True)

    return list(both())


def test_the_weighted_scores_are_added_to_the_reward_and_every_response_comes_back_once(
    folder: Path, rollouts: list[Rollout]
) -> None:
    terms = (
        ScoringModelConfig(path=str(folder), weight=2.0),
        ScoringModelConfig(path=str(folder), head="short", weight=-1.0, name="brevity"),
    )
    found = run(ModelScorer(NullScorer(0.5), load(folder, *terms), CPU), rollouts)
    assert sorted(map(id, found)) == sorted(map(id, rollouts))
    model = RewardModel.open(folder)
    scores = model.score(batch_of(rollouts))
    for k, one in enumerate(rollouts):
        good, short = float(scores["good"].scores[k]), float(scores["short"].scores[k])
        assert one.terms == pytest.approx({"good": good, "brevity": short}, abs=1e-6)
        assert one.reward == pytest.approx(0.5 + 2 * good - short, abs=1e-5)


def test_a_score_does_not_depend_on_when_it_is_computed(
    folder: Path, rollouts: list[Rollout]
) -> None:
    term = ScoringModelConfig(path=str(folder), max_tokens_per_micro_batch=1)
    together = run(ModelScorer(NullScorer(0.0), load(folder, term), CPU), rollouts)
    expected = {id(one): one.reward for one in together}
    for one in rollouts:
        one.terms.clear()
    alone = run(ModelScorer(NullScorer(0.0), load(folder, term), CPU, budget=1), rollouts)
    for one in alone:
        assert one.reward == pytest.approx(expected[id(one)], abs=1e-6)


def test_a_score_that_is_not_finite_fails_its_response_only(
    folder: Path, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    (model,) = load(folder, ScoringModelConfig(path=str(folder)))
    true = ScoringModel.scores
    monkeypatch.setattr(
        ScoringModel, "scores", lambda self, *given: [math.nan, *true(self, *given)[1:]]
    )
    scorer = ModelScorer(NullScorer(0.0), [model], CPU)
    first, *others = run(scorer, rollouts)
    assert first.reward is None and "its score is nan" in first.failed
    assert all(one.reward is not None for one in others)
    assert scorer.counts == {"scored": 3, "nonfinite": 1, "unanswered": 0}


def test_an_unknown_head_no_head_and_equal_names_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward.models.0.head = 'truth'.*good, short"):
        load(folder, ScoringModelConfig(path=str(folder), head="truth"))
    term = ScoringModelConfig(path=str(folder))
    with pytest.raises(ConfigError, match=r"two reward models are called 'good'"):
        load(folder, term, term)
    with pytest.raises(ConfigError, match=r"models.0.separator = ';' changes nothing.*whole resp"):
        load(folder, ScoringModelConfig(path=str(folder), separator=";"))
    plain = tmp_path / "plain"
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    tiny_model("qwen2", hidden_size=32, vocab_size=len(tokenizer)).save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    with pytest.raises(ConfigError, match=r"reward.models.0.path.*holds no reward model"):
        load(folder, ScoringModelConfig(path=str(plain)))


class Counting(NullScorer):
    """A scorer on workers of which some were restarted."""

    def take_counts(self) -> dict[str, int]:
        return {"restarts": 2}


def test_counts_of_the_workers_inside_and_of_the_models_are_reported_once(
    folder: Path, rollouts: list[Rollout]
) -> None:
    scorer = ModelScorer(Counting(0.0), load(folder, ScoringModelConfig(path=str(folder))), CPU)
    outer = CombiningScorer(scorer, RewardConfig(combine="worst"))
    for scored in (3, 0):
        run(scorer, rollouts[:scored])
        assert outer.take_counts() == {
            "restarts": 2,
            "scored": scored,
            "nonfinite": 0,
            "unanswered": 0,
        }


def test_a_model_scores_only_rows_of_its_data_sources(
    folder: Path, rollouts: list[Rollout]
) -> None:
    rollouts[0].prompt.data_source = "maths"
    term = ScoringModelConfig(path=str(folder), sources=("maths",))
    found = run(ModelScorer(NullScorer(0.5), load(folder, term), CPU), rollouts)
    by_source = {one.prompt.data_source: one for one in found}
    assert list(by_source["maths"].terms) == ["good"]
    assert by_source[""].terms == {} and by_source[""].reward == 0.5


def test_an_offloaded_model_is_on_the_device_only_while_it_scores(
    folder: Path, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[str] = []
    to = RewardModel.to
    monkeypatch.setattr(
        RewardModel, "to", lambda self, place: moves.append(str(place)) or to(self, place)
    )
    true = ScoringModel.scores
    monkeypatch.setattr(
        ScoringModel, "scores", lambda self, *given: moves.append("scores") or true(self, *given)
    )
    term = ScoringModelConfig(path=str(folder), offload=True)
    run(ModelScorer(NullScorer(0.0), load(folder, term), CPU), rollouts)
    assert moves == ["cpu", "scores", "cpu"]
    kept = ScoringModelConfig(path=str(folder))
    run(ModelScorer(NullScorer(0.0), load(folder, kept), CPU), rollouts)
    assert moves[3:] == ["scores"]


class Terms(NullScorer):
    """Gives every response the same terms."""

    def __init__(self, terms: dict[str, float], weights: dict[str, float]) -> None:
        super().__init__()
        self.terms, self.weights = terms, weights

    def results(self, wait: bool) -> Iterator[Rollout]:
        for one in super().results(wait):
            one.terms, one.weights = dict(self.terms), dict(self.weights)
            one.reward = sum(w * self.terms[name] for name, w in self.weights.items())
            yield one


@pytest.mark.parametrize(
    ("right", "settings", "reward"),
    [
        (1.0, {"gates": {"length": "right"}}, 1.0 + 0.5 * -2.0),
        (0.9, {"gates": {"length": "right"}}, 0.9),
        (0.9, {"gates": {"length": "right"}, "gate_threshold": 0.5}, 0.9 + 0.5 * -2.0),
        (math.nan, {"gates": {"length": "right"}, "combine": "worst"}, math.nan),
        (1.0, {"combine": "worst"}, -1.0),
        (-3.0, {"combine": "worst"}, -3.0),
    ],
)
def test_gates_and_the_worst_term_by_hand(
    rollouts: list[Rollout], right: float, settings: dict[str, Any], reward: float
) -> None:
    inner = Terms({"right": right, "length": -2.0, "other": 7.0}, {"right": 1.0, "length": 0.5})
    terms = [{"function": "math", "name": name} for name in ("right", "length")]
    config = RewardConfig.model_validate({"terms": terms, **settings})
    (one,) = run(CombiningScorer(inner, config), rollouts[:1])  # type: ignore[arg-type]
    assert one.reward == pytest.approx(reward, nan_ok=True)
    # The reward stays the weighted sum of its terms, which normalisation by group reads.
    assert one.reward == pytest.approx(
        sum(w * one.terms[name] for name, w in one.weights.items()), nan_ok=True
    )


def test_a_gate_of_an_unknown_term_is_refused() -> None:
    config = RewardConfig.model_validate({"terms": ["math"], "gates": {"length": "math"}})
    with pytest.raises(ConfigError, match=r"reward.gates.*no term 'length'.*the terms: math"):
        CombiningScorer(NullScorer(), config)


def test_a_reward_model_whose_head_has_the_name_of_another_term_is_refused(folder: Path) -> None:
    config = ModelConfig(path=str(folder), dtype="float32")
    tree = {"terms": [{"function": "m.py:good"}], "models": [str(folder)]}
    with pytest.raises(ConfigError, match=r"models\.0 and reward\.terms\.0 are both called 'good'"):
        model_scorers(RewardConfig.model_validate(tree), config, load_tokenizer(config), CPU)


def test_a_success_that_no_head_is_called_is_refused_once_the_model_is_loaded(folder: Path) -> None:
    config = ModelConfig(path=str(folder), dtype="float32")
    tree = {"terms": ["math"], "models": [str(folder)], "success": "god"}
    with pytest.raises(ConfigError, match=r"reward\.success = 'god'.*'good'.*terms: good, math"):
        model_scorers(RewardConfig.model_validate(tree), config, load_tokenizer(config), CPU)
    known = RewardConfig.model_validate({**tree, "success": "good"})
    assert len(model_scorers(known, config, load_tokenizer(config), CPU)) == 1
