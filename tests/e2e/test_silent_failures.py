"""Runs that would learn nothing, or less than they seem to: refused at start, or said on the terminal and in the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.observability.trackers import read_rows
from tests.e2e.command import Outcome, assert_refused, command

REWARD = """
def constant(rollout):
    return 0.5


def zero(rollout):
    return 0.0


def varied(rollout):
    return sum(rollout.token_ids) % 7 / 7


def huge(rollout):
    return 1e200 if rollout.seed % 2 else varied(rollout)


def one_in_four(rollout):
    if rollout.seed and rollout.seed % 4 == 0:
        raise ValueError("no score today")
    return varied(rollout)
"""

Rl = Callable[..., Outcome]


@pytest.fixture
def rl(capsys, monkeypatch, model_folder, data_folder, tmp_path) -> Rl:
    """``rl(words...)``: a run of two steps of two groups of four, in ``tmp_path/runs/run``, without a KL term."""
    (tmp_path / "own.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    base = {
        "model": model_folder,
        "data.sources": data_folder / "train.jsonl",
        "reward.terms": "[own.py:varied]",
        "algorithm.kl.where": "none",
        "algorithm.kl.coef": 0,
        "rollout.prompts_per_step": 2,
        "rollout.group_size": 4,
        "sampling.max_new_tokens": 4,
        "train.steps": 2,
        "log.tensorboard": "false",
        "run.progress": "false",
    }

    def run(*words: str, verb: str = "rl") -> Outcome:
        mine = {
            k: v
            for k, v in base.items()
            if verb == "rl" or not k.startswith(("rollout", "sampling", "algorithm", "reward"))
        }
        return command(capsys, verb, *(f"{k}={v}" for k, v in mine.items()), *words)

    return run


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return read_rows(tmp_path / "runs" / "run" / "metrics.jsonl")


def warnings(outcome: Outcome) -> list[str]:
    return [line for line in outcome.err.splitlines() if line.startswith("WARNING")]


def test_a_reward_that_raises_on_some_samples_is_said_with_the_share_and_the_cause(rl, tmp_path):
    outcome = rl("reward.terms=[own.py:one_in_four]", "rollout.group_size=8")
    assert outcome.status == 0
    failed = [row["rollout/frac_reward_failed"] for row in rows(tmp_path)]
    assert any(0 < share < 1 for share in failed)
    (line, *_) = [line for line in warnings(outcome) if "got no reward" in line]
    assert (
        "own.py" not in line and "no score today" in line and "rollout/frac_reward_failed" in line
    )


def test_a_constant_reward_under_dapo_is_said_and_the_exit_status_is_not_0(rl, tmp_path):
    outcome = rl(
        "reward.terms=[own.py:constant]", "algorithm=dapo", "rollout.max_rounds=2", "train.steps=4"
    )
    assert outcome.status == 2 and "nothing was trained (steps: 4)" in outcome.err
    assert [row["rollout/frac_reward_zero_std"] for row in rows(tmp_path)] == [1.0] * 4
    assert [row["rollout/steps_not_trained"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    said = warnings(outcome)
    assert sum("groups have equal rewards (mean 0.5)" in line for line in said) == 1
    assert [
        line.split("learned nothing: ")[1][0] for line in said if "learned nothing" in line
    ] == list("124")


def test_a_constant_reward_with_a_kl_term_has_learned_nothing_either(rl):
    outcome = rl(
        "reward.terms=[own.py:constant]", "algorithm.kl={where: loss, coef: 0.1}", "train.steps=1"
    )
    assert outcome.status == 2 and "nothing was trained (steps: 1)" in outcome.err


def test_a_reward_of_0_for_several_steps_is_said_once_and_again_when_the_number_has_doubled(
    rl, tmp_path
):
    outcome = rl("reward.terms=[own.py:zero]", "train.steps=6", "rollout.group_size=2")
    assert [row["rollout/steps_reward_zero"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    said = [line for line in warnings(outcome) if "every reward was 0" in line]
    assert [line.split("in the last ")[1][0] for line in said] == list("36")


def test_responses_that_are_cut_are_said(rl, tmp_path):
    outcome = rl("sampling.max_new_tokens=1")
    assert rows(tmp_path)[0]["response/clip_ratio"] > 0.25
    assert sum("were cut at sampling.max_new_tokens" in line for line in warnings(outcome)) == 1


def test_a_run_that_learns_says_nothing(rl):
    outcome = rl("sampling.max_new_tokens=200", "train.steps=1")
    assert outcome.status == 0 and not warnings(outcome)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["sampling.temperature=0"],
            ["sampling.temperature = 0", "the same", "sampling.temperature=1"],
        ),
        (["optimizer.lr=1000"], ["optimizer", "lr = 1000", "AdamW", "1e-6"]),
        (["eval.every=2"], ["eval.every = 2", "eval.data.sources"]),
        (["checkpoint.best=eval/acc"], ["checkpoint.best = 'eval/acc'", "eval.data.sources"]),
        (
            ["rollout.prompts_per_step=11"],
            ["rollout.prompts_per_step = 11", "10 prompts", "lower rollout.prompts_per_step to 10"],
        ),
        (["algorithm={preset: grpo, preset: dapo}"], ["algorithm", "'preset' is given twice"]),
    ],
)
def test_what_can_be_known_before_the_first_step_is_refused(rl, tmp_path, words, said):
    assert_refused(rl(*words), *said)
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists() or not rows(tmp_path)


def test_a_key_that_a_config_file_gives_twice_is_named_with_its_lines(rl, tmp_path):
    (tmp_path / "twice.yaml").write_text(
        "train: {steps: 1}\nrollout:\n  group_size: 2\ntrain: {steps: 2}\n"
    )
    assert_refused(rl("twice.yaml"), "twice.yaml", "'train' is given twice (lines 1 and 4)")


def test_a_best_metric_that_no_step_reports_is_refused_after_the_first_step(rl):
    assert_refused(
        rl("checkpoint.best=reward/maen"),
        "checkpoint.best = 'reward/maen'",
        "did you mean reward/mean?",
    )


def test_supervised_training_on_fewer_rows_than_a_batch_is_refused(rl):
    assert_refused(rl("batch_size=11", verb="sft"), "batch_size = 11", "10 examples")


def test_one_row_without_a_label_is_refused_where_the_reward_compares_with_it(rl, tmp_path):
    lines = [{"prompt": f"{i}+1=", "label": None if i == 3 else str(i + 1)} for i in range(6)]
    (tmp_path / "gap.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["data.sources=gap.jsonl", "reward.terms=[math]"]
    assert_refused(
        rl(*words),
        "gap.jsonl, line 4",
        "no label",
        "'math'",
        "1 row is without one",
        "data.columns.label",
    )
    held = ["reward.terms=[math]", "eval.data.sources=gap.jsonl"]
    assert_refused(rl(*held), "gap.jsonl, line 4", "eval.data.columns.label")


def test_one_row_without_a_label_among_others_that_have_one_is_said_for_any_reward(rl, tmp_path):
    lines = [{"prompt": f"{i}+1=", "label": None if i == 3 else str(i + 1)} for i in range(6)]
    (tmp_path / "gap.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = rl("data.sources=gap.jsonl", "train.steps=1")
    assert outcome.status == 0
    assert any(
        "1 of 6 rows has no label" in line and "line 4" in line for line in warnings(outcome)
    ), outcome.err


def test_text_that_the_tokenizer_does_not_know_is_refused_and_a_single_character_is_said(
    rl, tmp_path
):
    assert tiny_tokenizer().encode("é") == [tiny_tokenizer().unk_token_id]
    texts = ["Ünïcödé é à ü ö ä", *(f"{i}+1=" for i in range(5))]
    (tmp_path / "odd.jsonl").write_text(
        "".join(json.dumps({"prompt": t, "label": "1"}) + "\n" for t in texts)
    )
    assert_refused(
        rl("data.sources=odd.jsonl"), "model.tokenizer", "does not know", "odd.jsonl, line 1"
    )
    texts = [
        "1 + 1 = é",
        *(f"what is {i} + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 = ?" for i in range(5)),
    ]
    (tmp_path / "few.jsonl").write_text(
        "".join(json.dumps({"prompt": t, "label": "1"}) + "\n" for t in texts)
    )
    outcome = rl("data.sources=few.jsonl", "train.steps=1")
    assert outcome.status == 0
    assert any(
        "does not know" in line and "few.jsonl, line 1" in line for line in warnings(outcome)
    ), outcome.err


def test_a_run_that_was_only_evaluated_before_its_first_step_names_no_accuracy_after(
    rl, tmp_path, data_folder
):
    held = [
        f"eval.data.sources={data_folder / 'train.jsonl'}",
        "eval.threshold=-1",
        "eval.every=1",
        "eval.stop_at=1",
    ]
    outcome = rl(*held)
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert outcome.status == 0 and summary["steps"] == 0
    assert summary["heldout_before"] == 1.0 and "heldout_after" not in summary
    assert outcome.out.startswith("eval accuracy before training 100.0%\n")


def test_a_finite_reward_that_is_too_large_fails_its_responses_and_the_run_goes_on(rl, tmp_path):
    outcome = rl("reward.terms=[own.py:huge]")
    assert outcome.status == 0, outcome.err
    assert "beyond +-1e+15" in outcome.err
    rows = [row for row in read_rows(tmp_path / "runs/run/metrics.jsonl") if "reward/max" in row]
    assert rows and all(row["reward/max"] < 1 for row in rows)
    assert sum(row["rollout/num_failed"] for row in rows) > 0
