"""``lightrft label-steps``: labels equal direct continuations, rows train, and a killed labelling resumes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.base import build, to_yaml
from lightrft.config.data import ProcessDataConfig
from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import LabelStepsConfig
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.process.process_dataset import ProcessDataset
from lightrft.engines.native import NativeEngine
from lightrft.models.actor import Actor
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.processors import load_processor
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.trainer.pipelines.journal import Journal
from lightrft.trainer.pipelines.label_steps import Prefixes
from lightrft.trainer.pipelines.step_labels import Solution
from lightrft.types import Prompt, Request
from lightrft.utils.seeding import derive_seed
from tests.e2e.command import assert_refused, command

REWARD = '''
from pathlib import Path

SEEN = Path(__file__).with_name("seen.txt")


def varied(rollout):
    """Different for equal starts, and right for about half of all responses."""
    with SEEN.open("a") as file:
        file.write(f"{rollout.seed}\\n")
    return float(sum(map(ord, rollout.text)) % 2)


def careful(rollout):
    return float("OOPS" not in rollout.text)


def labelled(rollout):
    """Reads the row of the prompt."""
    return float(rollout.prompt.label == "right" and rollout.text.startswith(rollout.prompt.columns["start"]))


def failing(rollout):
    if rollout.seed % 3 == 0:
        raise ValueError("no score today")
    return 1.0
'''
STEPS = [["a=1", "b=2", "c=3"], ["d", "OOPS", "f", "g", "h"], ["one step"]]
FEW = 3
Line = dict[str, Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = [
        {"prompt": f"{k}+{k}=", "completions": steps, "label": "right", "start": steps[0]}
        for k, steps in enumerate(STEPS)
    ]
    (tmp_path / "solved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def label(capsys, monkeypatch, model_folder, root):
    monkeypatch.chdir(root)

    def run(*words: str, reward: str = "varied", output: str = "steps.jsonl"):
        given = [
            f"model={{path: {model_folder}, dtype: float32}}",
            "data.sources=solved.jsonl",
            "sampling.max_new_tokens=6",
            f"steps.continuations={FEW}",
            f"reward.terms=[{root / 'rewards.py'}:{reward}]",
            "run.seed=3",
        ]
        return command(capsys, "label-steps", *given, f"output={output}", *words)

    return run


def lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def score(text: str) -> float:
    return float(sum(map(ord, text)) % 2)


def test_labels_are_the_shares_of_right_responses_that_continue_the_steps_one_by_one(
    label, root, model_folder
):
    outcome = label()
    assert outcome.status == 0, outcome.err
    rows = lines(root / "steps.jsonl")
    assert [row["completions"] for row in rows] == STEPS
    tokenizer = load_tokenizer(ModelConfig(path=str(model_folder)))
    actor = Actor.load(
        ModelConfig(path=str(model_folder), dtype="float32"), device=torch.device("cpu")
    )
    engine = NativeEngine(KVDecoder(actor.model), tokenizer, EngineConfig())
    generated = 0
    for index, (row, steps) in enumerate(zip(rows, STEPS, strict=True)):
        asked = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=False
        )
        expected = []
        for k in range(1, len(steps)):
            start = "\n".join(steps[:k]) + "\n"
            ids = tokenizer.encode(asked + start, add_special_tokens=False)
            right = 0.0
            for sample in range(FEW):
                seed = derive_seed(3, "label-steps", index, 0, k, sample)
                request = Request(Prompt("x", ids), seed, sample)
                (found,) = engine.generate([request], SamplingConfig(max_new_tokens=6))
                right += score(start + found.text)
                generated += 1
            expected.append(right / FEW)
        expected.append(score("\n".join(steps)))
        assert row["soft_labels"] == row["labels"] == expected
        assert row["hard_labels"] == [math.ceil(value) for value in expected]
        assert row["continuations"] == [FEW] * (len(steps) - 1) + [1]
    summary = json.loads((root / "steps.summary.json").read_text())
    assert summary["continuations"] == generated == FEW * 6
    # Some label is neither 0 nor 1, so the test could tell a wrong share.
    assert any(0 < value < 1 for row in rows for value in row["labels"])


def test_the_first_wrong_step_is_found_with_fewer_responses_than_every_step_needs(label, root):
    """The continuations of the one wrong solution all contain its mistake from the second step on."""
    assert label(reward="careful", output="every.jsonl").status == 0
    searched = label("steps.search=first_wrong", "steps.labels=hard", reward="careful")
    assert searched.status == 0, searched.err
    every, found = lines(root / "every.jsonl"), lines(root / "steps.jsonl")
    assert [row["labels"] for row in every] == [[1, 1, 1], [1, 0, 0, 0, 0], [1]]
    assert [row["labels"] for row in found] == [[1, 1, 1], [1, 0, None, None, None], [1]]
    assert found[1]["soft_labels"] == [1, 0, None, None, None]
    assert found[1]["continuations"] == [FEW, FEW, 0, 0, 1]
    counts = [
        json.loads((root / f"{name}.summary.json").read_text())["continuations"]
        for name in ("every", "steps")
    ]
    assert counts == [FEW * 6, FEW * 2]


def test_the_rows_are_those_of_a_process_dataset_and_rewards_read_the_row(
    label, root, model_folder
):
    assert label(reward="labelled").status == 0
    config = ProcessDataConfig.model_validate({"sources": ["steps.jsonl"], "shuffle": False})
    tokenizer = load_tokenizer(ModelConfig(path=str(model_folder)))
    dataset = ProcessDataset(config, tokenizer, max_tokens=200, seed=0)
    assert [dataset[i].labels for i in range(3)] == [[1.0] * len(steps) for steps in STEPS]


def test_a_killed_labelling_resumes_and_generates_no_continuation_twice(label, root, model_folder):
    assert label(output="whole.jsonl").status == 0
    whole = Counter((root / "seen.txt").read_text().split())
    tree = {
        "model": {"path": str(model_folder), "dtype": "float32"},
        "data": {"sources": ["solved.jsonl"]},
        "sampling": {"max_new_tokens": 6},
        "steps": {"continuations": FEW},
        "reward": {"terms": [f"{root / 'rewards.py'}:varied"]},
        "run": {"seed": 3},
        "output": "steps.jsonl",
    }
    (root / "config.yaml").write_text(to_yaml(build(LabelStepsConfig, tree)))
    killing = Path(__file__).with_name("killing.py")
    words = [str(root / "config.yaml"), "a group of responses", "4", "0", "kill", "label-steps"]
    done = subprocess.run([sys.executable, str(killing), *words], cwd=root, capture_output=True)
    assert done.returncode == -9, done.stderr
    journal = root / ".steps.jsonl.partial" / "responses.jsonl"
    kept = lines(journal)
    assert len(kept) == 4 and not (root / "steps.jsonl").exists()
    (root / "seen.txt").unlink()
    outcome = label()
    assert outcome.status == 0, outcome.err
    assert "4 steps are complete" in outcome.err
    assert (root / "steps.jsonl").read_bytes() == (root / "whole.jsonl").read_bytes()
    assert not journal.parent.exists()
    # Both commands also score the same responses of a trial at their start.
    resumed = Counter((root / "seen.txt").read_text().split())
    assert resumed <= whole
    assert (whole - resumed).total() == sum(len(line["responses"]) for line in kept) > 4


def test_other_solutions_are_refused_on_a_resume(label, root, monkeypatch):
    add = Journal.add

    def ending(self, index, prompt, group):
        add(self, index, prompt, group)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", ending)
        assert label().status == 130
    rows = lines(root / "solved.jsonl")
    for row in rows:
        row["completions"] = [step + "!" for step in row["completions"]]
    (root / "solved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert_refused(label(), "data.sources has changed", "run.overwrite=true")


def test_solutions_are_generated_first_if_asked_and_split_at_the_separator(
    label, root, model_folder
):
    words = ["samples=3", "steps.separator=e", "sampling.max_new_tokens=80", "sampling.stop=[a]"]
    outcome = label(*words)
    assert outcome.status == 0, outcome.err
    rows = lines(root / "steps.jsonl")
    assert rows and all(len(row["completions"]) == len(row["labels"]) for row in rows)
    assert any(len(row["completions"]) > 1 for row in rows)
    assert len({row["id"] for row in rows}) == len(rows) <= 9
    assert not list(root.glob(".steps*"))
    again = label(*words, "engine.max_num_seqs=2", output="again.jsonl")
    assert again.status == 0
    assert (root / "again.jsonl").read_bytes() == (root / "steps.jsonl").read_bytes()


def test_steps_that_were_sampled_are_continued_after_their_special_tokens():
    tokenizer = tiny_tokenizer(special=["<think>", "</think>"])
    encoder = ChatEncoder(ProcessDataConfig(), tokenizer)
    solution = Solution.split(0, 0, "<think>a\nb</think>\nc", "\n")
    for is_sampled in (True, False):
        encode = encoder.encode_sampled if is_sampled else encoder.encode_answers
        prefix = Prefixes([Prompt("p", [1])], [solution], encode)[1]
        whole = tokenizer.encode("<think>a\nb</think>\n", add_special_tokens=False)
        assert (prefix.token_ids == [1, *whole]) == is_sampled


def test_responses_that_could_not_be_scored_are_counted_and_left_out_of_the_share(label, root):
    outcome = label(reward="failing")
    assert outcome.status == 0, outcome.err
    summary = json.loads((root / "steps.summary.json").read_text())
    lost = summary["left_out"]["responses not scored"]
    assert 0 < lost < summary["continuations"]
    for row in lines(root / "steps.jsonl"):
        assert all(value in (1.0, None) for value in row["labels"])
    assert f"{lost} responses not scored" in outcome.out


@pytest.mark.parametrize(("threshold", "share", "one"), [(5, "none", 0), (0, "all", 1)])
def test_a_threshold_that_divides_no_responses_is_warned_of(label, root, threshold, share, one):
    outcome = label(f"steps.threshold={threshold}")
    assert outcome.status == 0, outcome.err
    said = f"steps.threshold = {threshold}: {share} of the {FEW * 6 + 3} scored responses reached"
    assert said in outcome.err and f"every label is {one}; set it" in outcome.err
    summary = json.loads((root / "steps.summary.json").read_text())
    assert len(summary["warnings"]) == 1 and said in summary["warnings"][0]
    assert {value for row in lines(root / "steps.jsonl") for value in row["labels"]} == {one}
    assert label("run.overwrite=true").status == 0
    assert json.loads((root / "steps.summary.json").read_text())["warnings"] == []


@pytest.mark.parametrize("words", [(), ("steps.search=first_wrong", "steps.labels=hard")])
def test_counted_labels_are_those_of_the_column_that_training_reads(label, root, words):
    outcome = label(*words, reward="careful")
    labels = [value for row in lines(root / "steps.jsonl") for value in row["labels"]]
    given = [value for value in labels if value is not None]
    right = sum(value > 0 for value in given)
    assert f"{right} of {len(given)} labelled steps are right" in outcome.out
    summary = json.loads((root / "steps.summary.json").read_text())
    assert (summary["labelled"], summary["right"]) == (len(given), right)


def test_settings_that_cannot_label_are_refused(label, root):
    assert_refused(label("reward.terms=[]"), "reward.terms is empty", "reward.terms=[math]")
    assert_refused(label("sampling.temperature=0"), "steps.continuations = 3", "temperature=1")
    assert_refused(label("samples=2", "steps.column=x"), "steps.column = 'x'", "leave one")
    assert_refused(label("steps.column=missing"), "solved.jsonl", "column 'missing'")
    assert_refused(label("data.sources=[]"), "data.sources is empty")
    soft = label("steps.search=first_wrong")
    assert_refused(soft, "search = 'first_wrong'", "labels = 'soft'", "set steps.labels=hard")
    (root / "steps.jsonl").write_text("mine\n")
    assert_refused(label(), "steps.jsonl exists", "run.overwrite=true")


def test_rows_without_a_solution_are_counted_if_bad_rows_are_skipped(label, root):
    with (root / "solved.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "none", "label": "x", "start": ""}) + "\n")
    outcome = label("data.bad_rows=skip")
    assert outcome.status == 0, outcome.err
    assert "1 rows without a solution" in outcome.out
    assert len(lines(root / "steps.jsonl")) == 3


def test_rows_with_pictures_are_labelled_and_read_again(capsys, root, monkeypatch):
    from PIL import Image

    monkeypatch.chdir(root)
    save_tiny_media("qwen2_5_vl", root / "eye")
    for k in range(2):
        Image.new("RGB", (56, 56), (90 * k, 50, 200)).save(root / f"p{k}.png")
    rows = [
        {"prompt": "What is it?", "image": f"p{k}.png", "completions": ["see", f"say {k}"]}
        for k in range(2)
    ]
    (root / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "model={path: eye, dtype: float32}",
        "data.sources=seen.jsonl",
        "sampling.max_new_tokens=5",
        "steps.continuations=2",
        f"reward.terms=[{root / 'rewards.py'}:varied]",
        "output=steps.jsonl",
    ]
    outcome = command(capsys, "label-steps", *words)
    assert outcome.status == 0, outcome.err
    model = ModelConfig(path=str(root / "eye"))
    tokenizer = load_tokenizer(model)
    config = ProcessDataConfig.model_validate({"sources": ["steps.jsonl"], "shuffle": False})
    processor = load_processor(model, tokenizer)
    dataset = ProcessDataset(config, tokenizer, max_tokens=400, seed=0, processor=processor)
    assert [len(dataset[i].labels) for i in range(2)] == [2, 2]
    assert not torch.equal(
        dataset[0].prompt_media["pixel_values"].values,
        dataset[1].prompt_media["pixel_values"].values,
    )
