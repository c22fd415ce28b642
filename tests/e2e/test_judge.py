"""``lightrft grm``: whole runs of judges on a tiny real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrft.cli.verbs import config_of
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from tests.e2e.command import assert_refused, command

Row = dict[str, Any]
TEMPLATE = "{% for letter, response in responses %}{{ letter }}{{ response }}{% endfor %}?"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of eleven tokens, pairs of which 1 is better than 0, and a template."""
    folder = tmp_path_factory.mktemp("judge")
    tokenizer = tiny_tokenizer(chars="AB01?")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "model")
    model = tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer))
    model.save_pretrained(folder / "model")
    rows = [{"prompt": f"q{i}", "chosen": "1", "rejected": "0"} for i in range(16)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "question.jinja").write_text(TEMPLATE)
    return folder


def settings(place: Path, tmp_path: Path, **over: Any) -> list[str]:
    """Return the arguments of a run of ``grm`` with short verdicts."""
    tree = {
        "run.dir": tmp_path,
        "run.name": "run",
        "model.path": place / "model",
        "model.dtype": "float32",
        "data.sources": [str(place / "pairs.jsonl")],
        "eval.data.sources": [str(place / "pairs.jsonl")],
        "eval.sampling.max_new_tokens": 1,
        "judgement.template": place / "question.jinja",
        "judgement.verdict": "regex",
        "judgement.pattern": "([AB])",
        "log.tensorboard": "false",
        **over,
    }
    return [f"{key}={value}" for key, value in tree.items()]


def rows_of(tmp_path: Path) -> list[Row]:
    return read_rows(tmp_path / "run" / "metrics.jsonl")


def test_rl_on_judgements_raises_the_agreement_in_both_orders(place, tmp_path, capsys):
    rl = {
        "data.shuffle": "false",
        "judgement.order": "both",
        "rollout.prompts_per_step": 8,
        "rollout.group_size": 8,
        "sampling.max_new_tokens": 1,
        "train.steps": 25,
        "optimizer.lr": 0.01,
        "eval.every": 25,
        "eval.at_start": "true",
    }
    outcome = command(capsys, "grm", "rl", *settings(place, tmp_path, **rl))
    assert outcome.status == 0, outcome.err
    rows = rows_of(tmp_path)
    first, last = rows[0], rows[-1]
    assert first["eval/accuracy"] < 0.75
    assert first["eval/unparsed"] > 0 or first["eval/consistency"] < 1
    assert last["eval/accuracy"] == last["eval/consistency"] == last["eval/both_right"] == 1
    assert last["eval/unparsed"] == 0 and last["eval/first_chosen"] == 0.5
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["data"]["judgement"]["order"] == "both"
    # the saved settings are of rl, and the finished run is found again
    assert command(capsys, "rl", tmp_path / "run" / "config.yaml").status == 0


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_sft_and_dpo_learn_verdicts_that_labels_give(place, tmp_path, capsys, method):
    over = {
        "judgement.order": "both",
        "batch_size": 8,
        "train.steps": 30,
        "optimizer.lr": 0.01,
        "eval.every": 30,
        "validation.sources": [str(place / "pairs.jsonl")],
    }
    outcome = command(capsys, "grm", method, *settings(place, tmp_path, **over))
    assert outcome.status == 0, outcome.err
    rows = rows_of(tmp_path)
    # SFT learns the verdict itself; DPO prefers it to the wrong one
    metric = "eval/accuracy" if method == "sft" else "eval/pair_accuracy"
    found = [row[metric] for row in rows if metric in row]
    assert found[-1] == 1, rows[-1]


def test_a_wrong_method_is_refused_and_explained(capsys):
    assert_refused(command(capsys, "grm", "sfd"), "method", "sft")
    assert command(capsys, "grm").status == 0


def test_explain_and_doctor_read_the_settings_of_a_judge(place, tmp_path, capsys):
    given = settings(place, tmp_path)
    loaded = config_of("grm-rl", given)
    assert loaded.settings.data.judgement.pattern == "([AB])"
    assert loaded.settings.reward.terms[0].function == "judgement"
    assert command(capsys, "explain", "explain.verb=grm-rl", *given).status == 0
    doctor = command(capsys, "doctor", "doctor.verb=grm-rl", *given)
    assert doctor.status in (0, 2), doctor.err
    # held-out comparisons are asked in both orders
    assert loaded.settings.eval.data.judgement.order == "both"


def test_a_judge_scores_the_responses_of_an_rl_run(place, tmp_path, capsys):
    rows = [{"prompt": "0?", "id": str(i)} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = {
        "path": str(place / "model"),
        "template": str(place / "question.jinja"),
        "verdict": "regex",
        "pattern": "([AB])",
        "read": "probability",
    }
    tree = {
        "run": {"dir": str(tmp_path), "name": "run"},
        "model": {"path": str(place / "model"), "dtype": "float32"},
        "data": {"sources": [str(tmp_path / "prompts.jsonl")]},
        "rollout": {"prompts_per_step": 2, "group_size": 3},
        "sampling": {"max_new_tokens": 3},
        "reward": {"judges": [judge]},
        "train": {"steps": 2},
        "log": {"tensorboard": False},
    }
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(tree))
    outcome = command(capsys, "rl", tmp_path / "rl.yaml")
    assert outcome.status == 0, outcome.err
    for row in rows_of(tmp_path):
        # wins and losses of a group sum to one for each pair
        assert row["reward/mean"] == pytest.approx(0.5)
        assert row["scorer/judgements"] == 12


@pytest.mark.parametrize("form", ["best", "rating"])
def test_eval_rm_scores_rewardbench_2_of_a_judge(place, tmp_path, capsys, form):
    tied = {"prompt": "?", "rejected": ["00"], "subset": "Ties"}
    rows = [
        {"prompt": "B?", "chosen": ["1"], "rejected": ["0", "00", "01"], "subset": "Math", "id": 1},
        {**tied, "chosen": ["1", "11"], "id": "tied:1"},
        {**tied, "chosen": ["1"], "id": "ref:1"},
    ]
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "question.jinja").write_text(TEMPLATE.replace("{{ letter }}", ""))
    tree = {
        "run.dir": tmp_path,
        "data.sources": f"[{{path: {tmp_path / 'bench.jsonl'}, reader: reward_bench_2}}]",
        "model.dtype": "float32",
        "judgement.form": form,
        "judgement.template": tmp_path / "question.jinja",
        "judgement.verdict": "regex",
        "judgement.pattern": "([AB01])",
        "judgement.scale": "[0,1]",
        "sampling.max_new_tokens": 4,
        "strategy.device": "cpu",
    }
    words = [f"{key}={value}" for key, value in tree.items()]
    outcome = command(capsys, "eval-rm", place / "model", *words)
    assert outcome.status == 0, outcome.err
    found = json.loads(outcome.out)
    parts = [found["eval/reward_bench_2/Math"], found["eval/reward_bench_2/Ties"]]
    assert found["eval/reward_bench_2/score"] == pytest.approx(sum(parts) / 2)
    assert 0 <= found["eval/best_rated"] <= 1


def test_eval_rm_measures_a_judge_in_both_orders_and_scores_rewardbench(place, tmp_path, capsys):
    subsets = {"alpacaeval-easy": "10", "donotanswer": "01"}
    rows = []
    for subset, (chosen, rejected) in subsets.items():
        prompt = f"{subset}?"
        row = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "subset": subset}
        rows.append({**row, "id": 1, "chosen_model": "a", "rejected_model": "b"})
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "run.dir": tmp_path,
        "data.sources": f"[{{path: {tmp_path / 'bench.jsonl'}, reader: reward_bench}}]",
        "model.dtype": "float32",
        "judgement.template": place / "question.jinja",
        "judgement.verdict": "regex",
        "judgement.pattern": "([AB])",
        "sampling.max_new_tokens": 4,
        "strategy.device": "cpu",
    }
    words = [f"{key}={value}" for key, value in tree.items()]
    outcome = command(capsys, "eval-rm", place / "model", *words)
    assert outcome.status == 0, outcome.err
    found = json.loads(outcome.out)
    assert {"eval/consistency", "eval/both_right", "eval/unparsed"} <= set(found)
    sources = [found[f"eval/reward_bench/{subset}/accuracy"] for subset in subsets]
    sections = [found["eval/reward_bench/Chat"], found["eval/reward_bench/Safety"]]
    # a judgement without a verdict is wrong, and counts one half in the benchmark
    unparsed = [found[f"eval/reward_bench/{subset}/unparsed"] for subset in subsets]
    assert sections == [a + lost / 2 for a, lost in zip(sources, unparsed, strict=True)]
    assert found["eval/reward_bench/score"] == pytest.approx(sum(sections) / 2)
    wrong = command(capsys, "eval-rm", place / "model", *words, "best_of=4", "run.name=x")
    assert_refused(wrong, "best_of", "judgement")
    plain = [word for word in words if "judgement" not in word and "sampling" not in word]
    assert_refused(
        command(capsys, "eval-rm", place / "model", *plain, "run.name=y"), "judgement.form"
    )
