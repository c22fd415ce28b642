"""``lightrft grm`` in two processes, with media and adapters, and killed; and judges that are killed under ``rl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lightrft
from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import JudgeRLConfig, RLConfig
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.trainer.model_card import model_card
from lightrft.trainer.rl import run_rl
from lightrft.utils.http_client import server_client
from tests import warm
from tests.e2e.finished import assert_a_kill_changes_nothing, steady
from tests.e2e.several import ENVIRONMENT, check_equal
from tests.e2e.test_preference_modalities import EVERYTHING, media_of
from tests.serving_helpers import free_port, judge_server, killing_server, serve_process, wait_for

Tree = dict[str, Any]
TEMPLATE = "{% for letter, response in responses %}{{ letter }}{{ response }}{% endfor %}?"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of ten tokens, pairs of which 1 is better than 0, and a template."""
    folder = tmp_path_factory.mktemp("judge")
    tokenizer = tiny_tokenizer(chars="AB01?q")
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    model = tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer))
    model.save_pretrained(folder / "model")
    rows = [{"prompt": "q", "id": str(i), "chosen": "1", "rejected": "0"} for i in range(8)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "question.jinja").write_text(TEMPLATE)
    return folder


def tree_of(place: Path, tmp_path: Path, method: str, **over: Any) -> Tree:
    """Return the settings of two steps of ``grm``."""
    tree: Tree = {
        "run": {"dir": str(tmp_path), "name": "run", "threads": 1, "progress": False},
        "model": {"path": str(place / "model"), "dtype": "float32"},
        "data": {"sources": [str(place / "pairs.jsonl")]},
        "judgement": {
            "template": str(place / "question.jinja"),
            "verdict": "regex",
            "pattern": "([AB])",
            "order": "both",
        },
        "optimizer": {"lr": 1e-3, "eps": 1e-4},
        "train": {"steps": 2},
        "strategy": {"device": "cpu"},
        "log": {"tensorboard": False},
    }
    if method == "rl":
        tree["rollout"] = {"prompts_per_step": 4, "group_size": 3}
        tree["sampling"] = {"max_new_tokens": 3}
    else:
        tree["batch_size"] = 6
    return deep_merge(tree, over)


def grm(tree: Tree, method: str, name: str, *words: str) -> Path:
    """Run ``lightrft grm`` in processes of its own, and return the run folder."""
    folder = Path(tree["run"]["dir"])
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(deep_merge(tree, {"run": {"name": name}})))
    seats = 2 if "launch.processes=2" in words else 0
    given = ["-m", "lightrft", "grm", method, file, *words]
    done = warm.run(given, env=ENVIRONMENT, seats=seats)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "rl", "dpo"])
def test_two_processes_and_a_resumed_run_end_as_one_run_does(place, tmp_path, method):
    tree = tree_of(place, tmp_path, method)
    one = grm(tree, method, "one")
    check_equal(grm(tree, method, "two", "launch.processes=2", "strategy.kind=fsdp2"), one)
    where = "update" if method == "rl" else "checkpoint publishing"
    assert_a_kill_changes_nothing(tree, f"grm {method}", where, 2, tmp_path)


@pytest.mark.parametrize("method", ["sft", "rl", "dpo"])
def test_a_run_of_grm_says_its_verb_as_typed_and_resumes_as_that(place, tmp_path, method):
    run = lightrft.grm(method, tree_of(place, tmp_path, method), on_step=lambda step: step.stop())
    assert run.summary["steps"] == 1 and run.verb == run.summary["verb"] == f"grm {method}"
    resumed = run.resume()
    assert resumed.summary["steps"] == 2 and resumed.summary["verb"] == f"grm {method}"
    assert set(resumed.metrics["phase"].dropna()) == {method}
    assert f"trained by `lightrft grm {method}`" in model_card(run.path, run.model, run.summary)


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_adapters_learn_judgements_of_media(tmp_path, kind):
    save_tiny_media(EVERYTHING, tmp_path / "model", hidden_size=32)
    rows = []
    for i in range(2):
        row = {"prompt": f"{kind} {i}?", **media_of(kind, tmp_path, i)}
        rows.append({**row, "chosen": "yes", "rejected": "none at all"})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "question.jinja").write_text("{{ prompt }}" + TEMPLATE)
    over = {
        "judgement": {"pattern": "(A|B)"},
        "model": {"lora": {"rank": 4}},
        # the media, and not the text alone, are read
        "eval": {"data": {"sources": [str(tmp_path / "pairs.jsonl")]}, "every": 2},
    }
    config = build(JudgeRLConfig, tree_of(tmp_path, tmp_path, "rl", **over))
    run_rl(config.plain())
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["eval/media_errors"] == 0
    assert {"eval/unparsed", "eval/accuracy"} <= set(rows[-1])
    assert list((tmp_path / "run" / "model").glob("*.safetensors"))


def rewards_of(place: Path, tmp_path: Path, judge: Tree, name: str) -> list[Tree]:
    """Run ``rl`` with a judge and return its metrics, without times."""
    rows = [{"prompt": "0?", "id": str(i)} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = {"template": str(place / "question.jinja"), "verdict": "regex", "pattern": "([AB])"}
    tree = tree_of(place, tmp_path, "rl", run={"name": name}, rollout={"prompts_per_step": 2})
    del tree["judgement"]
    tree["data"] = {"sources": [str(tmp_path / "prompts.jsonl")]}
    tree["reward"] = {"judges": [{**template, "max_new_tokens": 4, **judge}]}
    run_rl(build(RLConfig, tree))
    return [steady(row) for row in read_rows(tmp_path / name / "metrics.jsonl")]


def test_rl_gets_the_same_numbers_from_a_served_greedy_judge_as_from_a_local_one(place, tmp_path):
    greedy = {"temperature": 0.0, "read": "text"}
    local = rewards_of(place, tmp_path, {"path": str(place / "model"), **greedy}, "local")
    with judge_server(place / "model") as (url, _):
        served = rewards_of(place, tmp_path, {"url": url, **greedy}, "served")
    assert served == local
    assert local[0]["scorer/judgements"] > 0


@pytest.mark.slow
def test_a_judge_that_is_killed_and_restarted_under_a_run_changes_no_number(
    place, tmp_path, started, monkeypatch
):
    monkeypatch.setattr(server_client, "FIRST_WAIT", 0.02)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # sampled judgements: the seeds of requests are those of the responses
    judge = {"url": url, "samples": 2, "max_in_flight": 1}
    started.append(serve_process(place / "model", port))
    wait_for(url)
    undisturbed = rewards_of(place, tmp_path, judge, "undisturbed")
    with killing_server(place / "model", port, started, 1, 0.1) as kills:
        disturbed = rewards_of(place, tmp_path, judge, "disturbed")
    assert kills
    assert disturbed == undisturbed
