"""A changed reward on the responses of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightrft.cli.main import main
from lightrft.diagnostics.rescoring import rescore, saved_rollouts
from lightrft.observability.rollout_writer import RolloutWriter
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import DataError

REWARD = """
def digits(rollout):
    return float(sum(map(str.isdigit, rollout.text)))

def label(rollout, scale=1.0):
    if rollout.text == "odd":
        raise ValueError("cannot read it")
    return scale * float(rollout.text == rollout.prompt.label)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with the responses of steps 1 and 2, as a run writes them."""
    (tmp_path / "rollouts").mkdir()
    writer = RolloutWriter(tmp_path / "rollouts")
    for step, texts in {1: ("1", "22"), 2: ("3", "odd", "x")}.items():
        rollouts = []
        for k, text in enumerate(texts):
            prompt = Prompt(f"p{k}", [1, 2], text="1+2=", label="3", columns={"level": k})
            one = Rollout(prompt, [7], [True], [-0.5], [0], "stop", seed=3, sample=k, text=text)
            one.reward, one.terms = 1.0, {"digits": float(len(text)), "other": 0.5}
            rollouts.append(one)
        writer.write(tmp_path / "rollouts" / f"step_{step:06d}.jsonl", rollouts, {}, ())
    writer.close()
    (tmp_path / "my.py").write_text(REWARD, encoding="utf-8")
    return tmp_path


def test_what_a_run_has_written_is_read_as_it_was_newest_steps_first(run):
    steps, found = saved_rollouts(run)
    assert steps == (1, 2) and [one.text for one in found] == ["3", "odd", "x", "1", "22"]
    assert found[1].prompt.columns == {"level": 1} and found[1].prompt.label == "3"
    assert found[1].terms == {"digits": 3.0, "other": 0.5} and found[1].seed == 3
    assert saved_rollouts(run, most=2)[0] == (2, 2)
    line = json.loads((run / "rollouts" / "step_000001.jsonl").read_text().splitlines()[0])
    assert found[3].logprobs == line["logprobs"]


def test_a_term_of_the_same_name_is_compared_and_otherwise_the_reward(run):
    found = rescore(f"{run}/my.py:digits", {}, run, 10.0)
    assert found.term == "digits" and found.failures == 0
    assert [(before, now) for _, before, now in found.rows] == [
        (1.0, 1.0), (3.0, 0.0), (1.0, 0.0), (1.0, 1.0), (2.0, 2.0)
    ]  # fmt: skip
    found = rescore(f"{run}/my.py:label", {"scale": 2.0}, run, 10.0)
    assert found.term == "reward" and found.failures == 1
    assert [now for _, _, now in found.rows] == [2.0, None, 0.0, 0.0, 0.0]


def test_the_command_counts_and_shows_what_differs(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["check", f"{run}/my.py:digits", str(run)]) == 0
    said = capsys.readouterr().out
    assert "5 responses of steps 1 to 2, compared with digits: 2 lower, 3 same" in said
    assert "mean 1.6 -> 0.8" in said and "  lower: 3 -> 0\n    prompt    '1+2='\n" in said
    assert "    response  'odd'\n    result    label '3', reward 0\n" in said
    assert main(["check", f"{run}/my.py:label", str(run), "scale=2"]) == 1
    said = capsys.readouterr().out
    assert "1 higher, 3 lower, 1 failed" in said and "cannot read it" in said


def test_the_command_shows_what_a_rule_of_lightrft_reads_from_a_response(run, capsys):
    assert main(["check", "math", str(run)]) == 0
    said = capsys.readouterr().out
    assert "response  '1'\n    result    label '3', math reads '1', reward 0\n" in said
    assert "response  'odd'\n    result    label '3', math reads 'odd', reward 0\n" in said


def test_a_folder_without_responses_and_two_functions_are_refused(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no responses in rollouts/"):
        saved_rollouts(tmp_path / "empty")
    assert main(["check", "math", "format", str(run)]) == 2
    assert "2 functions and 1 run folders are named" in capsys.readouterr().err
    assert main(["check", "math", str(run), "--kind", "loss"]) == 2
    assert "scored by a reward" in capsys.readouterr().err
