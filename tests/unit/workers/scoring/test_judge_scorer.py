"""Verdicts of judges as terms of the reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.config.base import build
from lightrft.config.model import ModelConfig
from lightrft.config.reward import JudgeConfig, RewardConfig
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.rewards.base import NullScorer
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import ConfigError
from lightrft.workers.scoring.decisive_token import common_length
from lightrft.workers.scoring.judge import open_judges
from lightrft.workers.scoring.judge_scorer import JudgeScorer

CPU = torch.device("cpu")


@dataclass
class LongerIsBetter:
    """A judge that prefers the longer response, or always says ``fixed``."""

    config: JudgeConfig
    fixed: str | None = None
    asked: list[str] = field(default_factory=list)

    def write(self, questions: Sequence[Any], seeds: Sequence[int]) -> list[str]:
        self.asked += questions
        return [self.fixed or self.verdict(question) for question in questions]

    def verdict(self, question: str) -> str:
        shown = question.split("[Response")[1:]
        texts = [part.split("]\n")[1].split("\n")[0] for part in shown]
        if self.config.form == "rating":
            return f"<answer>{min(len(texts[0]), 10)}</answer>"
        order = sorted(range(len(texts)), key=lambda k: -len(texts[k]))
        letters = ["ABCDEF"[k] for k in order]
        said = " > ".join(letters) if self.config.form == "ranking" else letters[0]
        return f"<answer>{said}</answer>"

    def probabilities(self, groups: Any, verdicts: Any) -> Any:
        raise AssertionError

    def reasoned(self, questions: Any, seeds: Any, forms: Any) -> Any:
        raise AssertionError

    def close(self) -> None:
        self.asked.append("closed")


def counted(**given: int) -> dict[str, int]:
    return {"judgements": 0, "unparsed": 0, "partial": 0, "unanswered": 0, **given}


def rollouts(*texts: str, reference: str | None = None) -> list[Rollout]:
    request = [{"role": "user", "content": "say it"}]
    prompt = Prompt("0", [5], "rendered", reference=reference, request=request)
    return [
        Rollout(prompt, [4], [True], [0.0], [0], "stop", seed=k, text=text)
        for k, text in enumerate(texts)
    ]


def scored(judge: LongerIsBetter, given: list[Rollout]) -> JudgeScorer:
    scorer = JudgeScorer(NullScorer(1.0), [judge])
    for rollout in given:
        scorer.submit(rollout)
    assert not list(scorer.results(wait=False))
    assert len(list(scorer.results(wait=True))) == len(given)
    return scorer


def test_pairs_of_a_group_give_each_response_its_share_of_wins():
    given = rollouts("a", "aaa", "aa")
    judge = LongerIsBetter(JudgeConfig(path="x", weight=2.0))
    scorer = scored(judge, given)
    assert [one.terms["judge"] for one in given] == [0, 1, 0.5]
    assert [one.reward for one in given] == [1, 3, 2]
    assert scorer.take_counts() == counted(judgements=6)
    assert scorer.take_counts() == counted()
    # the judge reads the request of the row, not the policy's template
    assert all("[Request]\nsay it\n" in question for question in judge.asked)


def test_a_judge_that_always_chooses_the_first_gives_all_the_same_score_in_both_orders():
    given = rollouts("a", "aaa", "aa")
    scored(LongerIsBetter(JudgeConfig(path="x"), "<answer>A</answer>"), given)
    assert [one.terms["judge"] for one in given] == [0.5, 0.5, 0.5]
    biased = rollouts("a", "aaa", "aa")
    once = JudgeConfig(path="x", both_orders=False)
    scored(LongerIsBetter(once, "<answer>A</answer>"), biased)
    assert [one.terms["judge"] for one in biased] == [1, 0.5, 0]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"form": "ranking"}, [0, 1, 0.5]),
        ({"form": "best"}, [0, 1, 0]),
        ({"form": "rating", "scale": [1, 10]}, [0, 2 / 9, 1 / 9]),
        ({"against": "reference"}, [0, 1, 1]),
    ],
)
def test_other_questions_give_scores_from_0_to_1(tree, expected):
    given = rollouts("a", "aaa", "aa", reference="r" if "against" not in tree else "")
    scored(LongerIsBetter(build(JudgeConfig, {"path": "x", **tree})), given)
    if "against" in tree:
        expected = [1, 1, 1]
    assert [one.terms["judge"] for one in given] == pytest.approx(expected)


def test_judgements_without_a_verdict_are_counted_and_fail_their_responses():
    given = rollouts("a", "aa")
    scorer = scored(LongerIsBetter(JudgeConfig(path="x"), "hm"), given)
    assert [one.failed for one in given] == ["judge judge: no judgement has a verdict"] * 2
    assert [one.reward for one in given] == [None, None]
    assert scorer.take_counts() == counted(judgements=2, unparsed=2)


@pytest.mark.parametrize(
    ("texts", "tree", "said"),
    [
        (["a"], {}, "no other"),
        (["a", "b"], {"against": "reference"}, "no reference"),
        (["a", "b"], {"form": "rubric"}, "rubric"),
    ],
)
def test_a_response_without_a_question_fails_and_says_why(texts, tree, said):
    given = rollouts(*texts)
    scored(LongerIsBetter(build(JudgeConfig, {"path": "x", **tree})), given)
    assert all(said in one.failed for one in given)


def test_a_majority_outvotes_the_mean():
    class Alternating(LongerIsBetter):
        def write(self, questions: Sequence[Any], seeds: Sequence[int]) -> list[str]:
            assert len(set(seeds)) == len(seeds) == 3
            return [f"<answer>{n}</answer>" for n in (10, 1, 1)]

    found = {}
    for vote in ("mean", "majority"):
        (one,) = given = rollouts("a")
        tree = {"path": "x", "form": "rating", "samples": 3, "vote": vote}
        scored(Alternating(build(JudgeConfig, tree)), given)
        found[vote] = one.terms["judge"]
    assert found == {"mean": pytest.approx(1 / 3), "majority": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judge")
    tokenizer = tiny_tokenizer()
    model = tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer))
    model.double().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("budget", [1, 100_000])
def test_soft_scores_equal_a_plain_forward_pass_of_transformers(folder, budget):
    tree = {
        "path": str(folder),
        "read": "probability",
        "ties": True,
        "max_tokens_per_micro_batch": budget,
    }
    reward = build(RewardConfig, {"judges": [tree]})
    (judge,) = open_judges(reward, ModelConfig(), CPU)
    judge.actor.double()
    given = rollouts("first", "second", "third one")
    scored(judge, given)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = tiny_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "ABC"]
    wins: list[list[float]] = [[], [], []]
    for a in range(3):
        for b in range(3):
            if a == b:
                continue
            shown = given[a].text, given[b].text
            question = (
                "2 responses to a request follow. Compare them by how well each follows the "
                "request, and how correct and helpful it is. Their order and their length must "
                f"not count.\n\n[Request]\nsay it\n\n[Response A]\n{shown[0]}\n\n[Response B]\n"
                f"{shown[1]}\n\nWhich response is better? The verdict C says that both are equally "
                "good.\n\nGive your reasons first, then end with the verdict: <answer>A</answer> "
                "or <answer>B</answer> or <answer>C</answer>"
            )
            chat = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
            tokens = tokenizer(chat + "<answer>", return_tensors="pt").input_ids
            p = plain(tokens).logits[0, -1, ids].softmax(-1).tolist()
            wins[a].append(p[0] + p[2] / 2)
            wins[b].append(p[1] + p[2] / 2)
    expected = [sum(some) / len(some) for some in wins]
    assert [one.terms["judge"] for one in given] == pytest.approx(expected, rel=1e-9)


def test_a_rating_by_probabilities_needs_verdicts_of_one_token(folder):
    tree = {"path": str(folder), "read": "probability", "form": "rating"}
    (judge,) = open_judges(build(RewardConfig, {"judges": [tree]}), ModelConfig(), CPU)
    with pytest.raises(ConfigError, match="one token"):
        scored(judge, rollouts("a"))
    tree["scale"] = [1, 5]
    (judge,) = open_judges(build(RewardConfig, {"judges": [tree]}), ModelConfig(), CPU)
    (one,) = given = rollouts("a")
    scored(judge, given)
    assert 0 < one.terms["judge"] < 1


def test_a_sampled_judgement_depends_on_its_seed_alone(folder):
    tree = {"path": str(folder), "max_new_tokens": 8}
    (judge,) = open_judges(build(RewardConfig, {"judges": [tree]}), ModelConfig(), CPU)
    together = judge.write(["one", "two", "one"], [1, 2, 3])
    alone = [judge.write([q], [s])[0] for q, s in zip(("one", "two", "one"), (1, 2, 3))]
    assert together == alone
    assert together[0] != together[2]


def test_names_and_folders_of_judges_are_checked(folder, tmp_path):
    twice = build(RewardConfig, {"judges": [str(folder), str(folder)]})
    with pytest.raises(ConfigError, match="two judges"):
        open_judges(twice, ModelConfig(), CPU)
    missing = build(RewardConfig, {"judges": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match=r"reward\.judges\.0\.path"):
        open_judges(missing, ModelConfig(), CPU)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"read": "probability", "form": "ranking"}, "one token"),
        ({"read": "probability", "samples": 2}, "samples"),
        ({"form": "rating", "against": "reference"}, "against"),
    ],
)
def test_settings_of_a_judge_that_do_not_fit_are_refused(tree, said):
    with pytest.raises(ConfigError, match=said):
        build(RewardConfig, {"judges": [{"path": "x", **tree}]})


def test_the_common_beginning_is_where_all_rows_agree():
    assert common_length([[1, 2, 3], [1, 2, 4], [1, 2]]) == 2
    assert common_length([[1]]) == 1
