"""Sampled responses as people see them, through the verbs: ``log.samples`` and the warnings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lightrft.observability import run_directory
from lightrft.observability.trackers import Sample
from tests.e2e.command import Outcome, assert_refused, command

SAMPLING = {
    "rl": ["rollout.prompts_per_step=2", "rollout.group_size=2"],
    "dpo": ["batch_size=2", "online.group_size=2", "online.max_rounds=1"],
    "kto": ["batch_size=2", "online.group_size=2", "online.threshold=0.5"],
    "distill": ["batch_size=2", "distill.on_policy=1"],
}
"""Settings with which a verb samples responses."""


@pytest.fixture
def run(
    model_folder: Path,
    data_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Outcome]:
    """``run(verb, words...)``: one step on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def start(verb: str, *words: str) -> Outcome:
        scored = f"teacher={model_folder}" if verb == "distill" else "reward.terms=[math, format]"
        return command(
            capsys,
            verb,
            f"model={model_folder}",
            f"data={data_folder / 'train.jsonl'}",
            f"run.dir={tmp_path}",
            "run.name=run",
            "train.steps=1",
            "log.tensorboard=false",
            scored,
            *words,
        )

    return start


@pytest.mark.parametrize("verb", SAMPLING)
def test_every_verb_that_samples_prints_its_responses_and_sends_them_to_the_trackers(
    run, verb, monkeypatch
):
    sent: list[Sample] = []
    monkeypatch.setattr(
        run_directory.RunDirectory, "show_samples", lambda self, found: sent.extend(found)
    )
    done = run(verb, *SAMPLING[verb], "sampling.max_new_tokens=5", "log.samples=2")
    lines = done.err.splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("step 1: '"))
    assert lines[first].endswith(")") and "=' (label '" in lines[first]
    shown = [line for line in lines[first:] if line.startswith(("step 1: ", "  best", "  worst"))]
    best = [one["response"] for one in sent]
    if verb == "distill":
        # nothing scores its responses, so none of them is the best
        assert len(shown) == 2 and [one["reward"] for one in sent] == ["", ""]
        assert lines[first + 1].strip() == repr(best[0])
    else:
        assert len(shown) == 6 and [one["which"] for one in sent] == ["best", "worst"] * 2
        assert lines[first + 1] == f"  best       0 (math 0, format 0)  {best[0]!r}"
    assert all(len(line) <= 80 for line in shown)


@pytest.mark.parametrize(
    ("verb", "setting"),
    [("dpo", "online.group_size"), ("kto", "online.group_size"), ("distill", "distill.on_policy")],
)
def test_a_run_that_samples_nothing_refuses_to_show_samples_and_says_how_it_would_sample(
    model_folder, data_folder, tmp_path, capsys, verb, setting
):
    words = [f"model={model_folder}", f"data={data_folder / 'train.jsonl'}", f"run.dir={tmp_path}"]
    done = command(capsys, verb, *words, "log.samples=1")
    assert_refused(
        done, "log.samples changes nothing", "trains on given responses", f"or set {setting}"
    )


def test_supervised_training_refuses_to_show_samples_which_it_never_has(
    model_folder, data_folder, tmp_path, capsys
):
    words = [f"model={model_folder}", f"data={data_folder / 'train.jsonl'}", f"run.dir={tmp_path}"]
    done = command(capsys, "sft", *words, "log.samples=1")
    assert_refused(done, "log.samples changes nothing in lightrft sft", "leave it out")
    assert "to sample them" not in done.err


@pytest.mark.parametrize("verb", ["rl", "dpo"])
def test_a_warning_about_equal_rewards_shows_prompt_response_label_and_what_the_rule_reads(
    run, verb, tmp_path
):
    done = run(verb, *SAMPLING[verb], "sampling.max_new_tokens=30")
    lines = done.err.splitlines()
    start = next(k for k, line in enumerate(lines) if "groups have equal rewards" in line)
    assert lines[start].endswith("(rollout/frac_reward_zero_std). For example:")
    prompt, *rest = itertools.takewhile(lambda line: line.startswith("  "), lines[start + 1 :])
    file = tmp_path / "run" / "rollouts" / "step_000001.jsonl"
    asked = json.loads(file.read_text().splitlines()[0])["prompt"]
    # the question without the chat template
    question = prompt.removeprefix("  prompt    '").removesuffix("'")
    assert question[0].isdigit() and question in asked["text"] and "user" not in question
    assert rest[0].startswith("  response  ")
    result = next(line for line in rest if line.startswith("  result"))
    assert f"label {asked['label']!r}, math reads " in result
    assert "(math 0, format" in " ".join(rest) and all(len(line) <= 80 for line in rest)


def test_a_warning_of_distillation_about_cut_responses_shows_one_without_a_reward(run):
    done = run("distill", *SAMPLING["distill"], "sampling.max_new_tokens=2")
    said = done.err.split("(response/clip_ratio). For example:\n")[1]
    assert said.startswith("  prompt    '") and "\n  response  '" in said
    assert "reward" not in said.split("\nWARNING")[0]


def test_the_report_shows_what_the_rule_reads_from_each_response(run, tmp_path):
    run("rl", *SAMPLING["rl"], "sampling.max_new_tokens=5")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "<th>math reads</th>" in page and "format reads" not in page
