"""``lightrft generate`` with a selection: rows that sft, dpo and kto read without settings, and generation that resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build
from lightrft.config.data import DataConfig, PreferenceDataConfig, SFTDataConfig
from lightrft.config.model import ModelConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.trainer.pipelines.journal import Journal
from tests.e2e.command import assert_refused, command

WORDS = ["sampling.max_new_tokens=6", "samples=4"]
Line = dict[str, Any]


@pytest.fixture
def generate(capsys, monkeypatch, model_folder, data_folder, tmp_path):
    """``generate(words...)``: four responses to each of ten prompts, scored by ``varied``."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, output: str = "rows.jsonl"):
        given = [
            f"model={model_folder}",
            f"data.sources={data_folder / 'train.jsonl'}",
            f"reward.terms=[{data_folder / 'rewards.py'}:varied]",
        ]
        # Six tokens are too few for most responses to end.
        selects = any(word.startswith("select=") for word in words)
        kept = ["select.keep_truncated=true"] if selects else []
        return command(capsys, "generate", *given, *WORDS, *kept, f"output={output}", *words)

    return run


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_tokenizer(ModelConfig(path=str(model_folder)))


def lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prompts_of(data: DataConfig, tokenizer) -> dict[str, list[int]]:
    """The tokens of the prompts of a generation, by their ids."""
    dataset = PromptDataset(data, tokenizer, seed=0)
    return {name: dataset[i].token_ids for i, name in enumerate(dataset.ids)}


def stem(name: str) -> str:
    """The id of the prompt of a row."""
    return name.rpartition("/")[0]


PROMPTS: dict[str, Line] = {
    "plain": {},
    "chat": {"system": "Be brief.", "apply_chat_template": True, "template": "Work out {prompt}"},
    "truncated": {"max_prompt_tokens": 34, "overlong_prompts": "truncate", "system": "No"},
}


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize(
    ("keep", "reader"),
    [("best", "sft"), ("correct", "sft"), ("pairs", "pair"), ("ranked", "ranked")],
)
def test_rows_are_read_without_settings_and_have_the_prompts_that_the_model_was_asked(
    generate, tokenizer, data_folder, tmp_path, kind, keep, reader
):
    words = [f"data.{name}={json.dumps(value)}" for name, value in PROMPTS[kind].items()]
    more = ["select.threshold=0.3"] if keep == "correct" else []
    outcome = generate(f"select={keep}", *more, *words)
    assert outcome.status == 0, outcome.err
    assert "other tokens" not in outcome.err
    rows = lines(tmp_path / "rows.jsonl")
    assert len(rows) >= 8
    source = {"sources": [str(data_folder / "train.jsonl")], "shuffle": False}
    asked = prompts_of(build(DataConfig, {**source, **PROMPTS[kind]}), tokenizer)
    there = {"sources": [str(tmp_path / "rows.jsonl")], "shuffle": False}
    if reader == "sft":
        examples = SFTDataset(build(SFTDataConfig, there), tokenizer, max_tokens=200, seed=0)
    else:
        data = build(PreferenceDataConfig, there)
        examples = PreferenceDataset(data, tokenizer, kind=reader, max_tokens=200, seed=0)
    assert len(examples) == len(rows)
    for i, name in enumerate(examples.ids):
        assert examples[i].prompt_ids == asked[stem(name)]


def test_the_rewards_of_rows_are_those_of_the_responses_and_the_best_is_the_highest(
    generate, tmp_path
):
    assert generate(output="all.jsonl").status == 0
    groups: dict[str, list[Line]] = {}
    for row in lines(tmp_path / "all.jsonl"):
        groups.setdefault(row["id"], []).append(row)
    assert generate("select=best").status == 0
    for row in lines(tmp_path / "rows.jsonl"):
        group = groups[stem(row["id"])]
        highest = max(line["reward"] for line in group)
        first = next(line for line in group if line["reward"] == highest)
        assert row["reward"] == highest
        assert row["completion"] == [{"role": "assistant", "content": first["response"]}]
        assert row["id"] == f"{first['id']}/{first['sample']}"
        assert row["label"] == first["label"]
    assert generate("select=pairs", output="pairs.jsonl").status == 0
    for row in lines(tmp_path / "pairs.jsonl"):
        rewards = [line["reward"] for line in groups[stem(row["id"])]]
        assert (row["score_chosen"], row["score_rejected"]) == (max(rewards), min(rewards))


def test_labelled_rows_are_read_by_kto_with_the_label_of_their_reward(
    generate, tokenizer, tmp_path
):
    assert generate("select=labelled", "select.threshold=0.5").status == 0
    rows = lines(tmp_path / "rows.jsonl")
    data = build(
        PreferenceDataConfig, {"sources": [str(tmp_path / "rows.jsonl")], "shuffle": False}
    )
    examples = PreferenceDataset(data, tokenizer, kind="labelled", max_tokens=200, seed=0)
    assert len(examples) == len(rows)
    assert [row["label"] for row in rows] == [row["reward"] >= 0.5 for row in rows]
    assert {row["label"] for row in rows} == {True, False}


def test_conditioned_rows_state_their_reward_in_the_prompt(generate, tmp_path):
    words = [
        "select.condition={template: 'Quality: {reward}.', where: system, labels: [low, high]}"
    ]
    assert generate("select=conditioned", *words).status == 0
    rows = lines(tmp_path / "rows.jsonl")
    said = {row["prompt"][0]["content"]: [] for row in rows}
    for row in rows:
        said[row["prompt"][0]["content"]].append(row["reward"])
    assert set(said) == {"Quality: low.", "Quality: high."}
    assert max(said["Quality: low."]) <= min(said["Quality: high."])


def test_self_play_prefers_the_response_of_the_data_and_needs_no_reward(generate, tmp_path):
    outcome = generate("select=self_play", "select.per_prompt=1", "reward.terms=[]")
    assert outcome.status == 0, outcome.err
    rows = lines(tmp_path / "rows.jsonl")
    answers = {f"{i}+{i}=": str(2 * i) for i in range(10)}
    assert len(rows) > 5
    for row in rows:
        assert row["chosen"][0]["content"] == answers[row["prompt"][-1]["content"]]
    assert all(row["chosen"] != row["rejected"] for row in rows)


def test_what_is_left_out_is_counted_on_the_terminal_and_in_a_file(generate, data_folder, tmp_path):
    outcome = generate(
        "select=correct",
        "select.keep_truncated=false",
        "sampling.max_new_tokens=40",
        f"reward.terms=[{data_folder / 'rewards.py'}:sometimes_fails]",
    )
    assert outcome.status == 0, outcome.err
    counts = json.loads((tmp_path / "rows.summary.json").read_text())
    rows = lines(tmp_path / "rows.jsonl")
    assert counts["rows"] == len(rows) and counts["responses"] == 40
    left_out = counts["responses_left_out"]
    assert left_out["truncated"] > 0 and left_out["not scored"] > 0
    without = counts["prompts_without_rows"]
    assert len({stem(row["id"]) for row in rows}) + sum(without.values()) == 10
    assert f"{len(rows)} rows in rows.jsonl" in outcome.out
    assert f"{left_out['truncated']} truncated" in outcome.out


def test_a_selection_that_leaves_no_row_is_an_error_and_another_one_generates_nothing_again(
    generate, tmp_path, monkeypatch
):
    outcome = generate("select=correct", "select.threshold=9")
    assert_refused(
        outcome, "leaves no row", "10 prompts, 40 responses", "without a correct response"
    )
    assert not (tmp_path / "rows.jsonl").exists()
    monkeypatch.setattr("lightrft.trainer.pipelines.generate.local_policy", None)
    outcome = generate("select=best")
    assert outcome.status == 0, outcome.err
    assert "10 of 10 prompts are complete" in outcome.err
    assert len(lines(tmp_path / "rows.jsonl")) == 10


def test_responses_that_a_judge_failed_to_score_are_tried_again_by_the_same_command(
    generate, tmp_path
):
    (tmp_path / "judge.py").write_text(
        "import pathlib\n"
        "def judge(rollout):\n"
        "    # The seeds of the trial at the start are small.\n"
        f"    if rollout.seed > 99 and not pathlib.Path({str(tmp_path / 'up')!r}).exists():\n"
        "        raise ConnectionError('the judge is down')\n"
        "    return float(rollout.seed % 7)\n"
    )
    words = ["select=best", f"reward.terms=[{tmp_path / 'judge.py'}:judge]"]
    outcome = generate(*words)
    assert_refused(outcome, "leaves no row", "40 not scored", "the judge is down", "same command")
    (tmp_path / "up").touch()
    assert generate(*words).status == 0
    assert generate(*words, output="whole.jsonl").status == 0
    assert (tmp_path / "rows.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(lines(tmp_path / "rows.jsonl")) == 10


def test_a_data_source_without_reward_is_refused_before_the_model_is_loaded(
    generate, data_folder, monkeypatch
):
    monkeypatch.setattr("lightrft.trainer.pipelines.generate.local_policy", None)
    reward = f"reward.per_source.other=[{data_folder / 'rewards.py'}:varied]"
    outcome = generate("select=best", "reward.terms=[]", reward)
    assert_refused(outcome, "no reward for data source", "reward.per_source has 'other'")


@pytest.fixture
def interrupted(generate, monkeypatch):
    """``interrupted(words...)``: a generation that ends after four prompts, in the middle of a line."""

    def run(*words: str) -> None:
        add = Journal.add

        def failing(journal: Journal, *given: Any) -> None:
            add(journal, *given)
            if len(journal) == 4:
                journal._file.write(b'{"index": 7, "id"')
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "add", failing)
            assert generate(*words).status == 130

    return run


@pytest.mark.parametrize("words", [(), ("select=pairs",)])
def test_an_interrupted_generation_resumes_and_writes_the_same_bytes(
    generate, interrupted, tmp_path, words
):
    assert generate(*words, output="whole.jsonl").status == 0
    interrupted(*words)
    assert not (tmp_path / "rows.jsonl").exists()
    outcome = generate(*words)
    assert outcome.status == 0, outcome.err
    assert "the generation resumes; 4 of 10 prompts are complete" in outcome.err
    assert (tmp_path / "rows.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_an_interrupted_generation_is_not_resumed_with_other_settings_or_other_data(
    generate, interrupted, data_folder, tmp_path
):
    data = tmp_path / "train.jsonl"
    shutil.copy(data_folder / "train.jsonl", data)
    source = f"data.sources={data}"
    interrupted(source)
    assert_refused(
        generate(source, "sampling.temperature=0.5"),
        "rows.jsonl with other settings",
        "sampling.temperature: 1.0 in the folder, 0.5 now",
        "run.overwrite=true",
    )
    assert_refused(generate(source, "run.seed=3"), "run.seed: 0 in the folder, 3 now")
    (responses,) = tmp_path.glob(".*/responses.jsonl")
    whole = responses.read_bytes()
    responses.write_bytes(whole.replace(b"}", b"", 1))
    assert_refused(generate(source), "responses.jsonl", "the file is damaged")
    responses.write_bytes(whole)
    data.write_text(data.read_text().replace("+", "-"))
    assert_refused(generate(source), "data.sources has changed")
    assert generate(source, "run.overwrite=true").status == 0
    assert len(lines(tmp_path / "rows.jsonl")) == 40


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["select=best", "reward.terms=[]"], ["goes by rewards", "reward.terms is empty"]),
        (["select=pairs", "samples=1"], ["samples = 1", "samples=8"]),
        (["select=correct", "sampling.temperature=0"], ["sampling.temperature = 0", "no choice"]),
        (["select=bets"], ["select.keep", "bets"]),
        (
            [
                "select=conditioned",
                "select.condition.where=system",
                "data.apply_chat_template=false",
            ],
            ["needs a chat template", "select.condition.where=prompt"],
        ),
    ],
)
def test_selections_that_cannot_work_are_refused(generate, tmp_path, words, said):
    assert_refused(generate(*words), *said)
    assert not list(tmp_path.glob("*")) and not list(tmp_path.glob(".*"))


def test_rows_that_the_defaults_encode_otherwise_are_told(generate, tmp_path):
    outcome = generate("select=best", "data.apply_chat_template=false")
    assert outcome.status == 0, outcome.err
    assert "10 prompts of the rows are encoded to other tokens" in outcome.err
    assert "data.apply_chat_template" in outcome.err
