"""Responses end where the chat template ends a turn, and continue a turn that a prompt begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from tests.e2e.command import command
from tests.model_helpers import save_scripted_model
from tests.serving_helpers import model_server
from tests.unit.datasets.published_templates import PUBLISHED

END = "<|im_end|>"
SCRIPT = {"\n": "o", "o": "k", "k": END, "s": " ", " ": "2", "2": END}
"""A turn that the model begins is ``ok``, and one that ends with ``s`` goes on with `` 2``."""
ASKED = {"role": "user", "content": "1+1?"}
PROMPT = [ASKED, {"role": "assistant", "content": "It is"}]
BEFORE = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer and configs name ``<|endoftext|>`` alone as an end."""
    tokenizer = PUBLISHED["chatml"].tokenizer()
    return save_scripted_model(tmp_path_factory.mktemp("turns"), SCRIPT, tokenizer)


@pytest.fixture
def responses(capsys, monkeypatch, folder, data_folder, tmp_path):
    """``responses(verb, prompt, **data)``: prompts, responses and reasons that a run saves."""
    monkeypatch.chdir(tmp_path)

    def run(verb: str, prompt: Any, **data: Any) -> set[tuple[str, str, str]]:
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt, "label": "2"}) + "\n")
        settings = {"data.sources": "rows.jsonl", "sampling.max_new_tokens": 9}
        settings |= {f"data.{name}": json.dumps(value) for name, value in data.items()}
        section = "eval." if verb == "eval" else ""
        words = [f"model={folder}", *(f"{section}{name}={v}" for name, v in settings.items())]
        more = {
            "generate": ["output=out.jsonl"],
            "eval": ["reward.terms=[math]"],
            "rl": [
                "algorithm.preset=grpo",
                f"reward.terms=[{data_folder / 'rewards.py'}:seeded]",
                "rollout.prompts_per_step=1",
                "rollout.group_size=4",
                "train.steps=1",
                "log.tensorboard=false",
            ],
        }
        outcome = command(capsys, verb, *words, *more[verb])
        assert outcome.status == 0, outcome.err
        file = tmp_path / "out.jsonl"
        if verb != "generate":
            [file] = (tmp_path / "runs").glob("*/rollouts/*.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        if verb != "generate":
            rows = [
                {**row, "prompt": row["prompt"]["text"], "response": row["text"]} for row in rows
            ]
        return {
            tuple(row[name] for name in ("prompt", "response", "finish_reason")) for row in rows
        }

    return run


def test_no_config_of_the_model_names_the_end_of_a_turn(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(END)
    for kind in (AutoConfig, GenerationConfig):
        assert kind.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id != end


@pytest.mark.parametrize("verb", ["rl", "eval", "generate"])
def test_responses_of_a_run_end_where_the_template_alone_ends_a_turn(responses, verb):
    assert responses(verb, "1+1?") == {(BEFORE, "ok", "stop")}


def test_a_chat_completion_ends_where_the_template_alone_ends_a_turn(folder):
    with model_server(folder, sampling={"max_new_tokens": 9}) as (url, _):
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": [ASKED]})
    [choice] = answer.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ok", "stop")


@pytest.mark.parametrize("verb", ["rl", "eval", "generate"])
def test_a_run_continues_a_turn_of_the_assistant_at_the_end_of_a_prompt(responses, verb):
    assert responses(verb, PROMPT) == {(BEFORE + "It is", " 2", "stop")}


@pytest.mark.parametrize("verb", ["rl", "generate"])
def test_a_setting_takes_the_turn_at_the_end_of_a_prompt_for_the_answer(responses, verb):
    assert responses(verb, PROMPT, prefill=False) == {(BEFORE, "ok", "stop")}
    # The turn is the reference, next to the label.
    if verb == "rl":
        [file] = Path("runs").glob("*/rollouts/*.jsonl")
        row = json.loads(file.read_text().splitlines()[0])
        assert (row["prompt"]["reference"], row["prompt"]["label"]) == ("It is", "2")
