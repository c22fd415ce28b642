"""An assistant turn at the end of a prompt is continued by every verb, as transformers continues it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightrft.config.data import (
    DataConfig,
    MediaConfig,
    PreferenceDataConfig,
    ProcessDataConfig,
    SFTDataConfig,
)
from lightrft.config.rollout import ConditionConfig
from lightrft.datasets.conversations.conversation_encoder import ConversationEncoder
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.process.process_dataset import ProcessDataset
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.row_writer.prompt_rows import PromptRows
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.trainer.pipelines.selection import with_condition
from lightrft.types import Prompt
from lightrft.utils.errors import DataError
from lightrft.workers.scoring.judge_scorer import request_of
from tests.unit.datasets.published_templates import PUBLISHED
from tests.unit.datasets.tokenizers import chat_tokenizer

TOKENIZER = chat_tokenizer()
ASKED = {"role": "user", "content": "1+1?"}
BEGUN = {"role": "assistant", "content": "It is"}
PROMPT = [ASKED, BEGUN]
WHOLE = [ASKED, {"role": "assistant", "content": "It is 2."}]


def saved(folder: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"sources": [{"path": str(path)}], "shuffle": False}


def prompts(folder: Path, *rows: dict[str, Any], tokenizer: Any = TOKENIZER, **options: Any):
    return PromptDataset(DataConfig(**saved(folder, *rows), **options), tokenizer, seed=0)


def examples(folder: Path, *rows: dict[str, Any], tokenizer: Any = TOKENIZER, **options: Any):
    data = SFTDataConfig(**saved(folder, *rows), **options)
    return SFTDataset(data, tokenizer, max_tokens=500, seed=0)


def compared(folder: Path, *rows: dict[str, Any], tokenizer: Any = TOKENIZER, kind: Any = "pair"):
    data = PreferenceDataConfig(**saved(folder, *rows))
    return PreferenceDataset(data, tokenizer, kind=kind, max_tokens=500, seed=0)


def expected(messages: Any, tokenizer: Any = TOKENIZER) -> list[int]:
    made = tokenizer.apply_chat_template(messages, continue_final_message=True)
    return made["input_ids"]


def rows_of(prompt: Any, rest: str) -> dict[str, dict[str, Any]]:
    """The rows of each verb with one prompt and a response that continues it."""
    return {
        "rl": {"prompt": prompt, "label": "2"},
        "sft": {"prompt": prompt, "response": rest},
        "pair": {"prompt": prompt, "chosen": rest, "rejected": f"{rest}?"},
        "labelled": {"prompt": prompt, "completion": rest, "label": True},
        "prm": {"prompt": prompt, "completions": [rest, "So."], "labels": [True, False]},
    }


def encoded(folder: Path, rows: dict[str, dict[str, Any]], tokenizer: Any) -> dict[str, list[int]]:
    """The prompt tokens of each verb."""
    found = {"rl": prompts(folder, rows["rl"], tokenizer=tokenizer)[0].token_ids}
    found["sft"] = examples(folder, rows["sft"], tokenizer=tokenizer)[0].prompt_ids
    for kind in ("pair", "labelled"):
        found[kind] = compared(folder, rows[kind], tokenizer=tokenizer, kind=kind)[0].prompt_ids
    data = ProcessDataConfig(**saved(folder, rows["prm"]))
    found["prm"] = ProcessDataset(data, tokenizer, max_tokens=500, seed=0)[0].prompt_ids
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_verb_continues_a_prompt_of_each_published_format_as_transformers_does(
    name: str, tmp_path: Path
) -> None:
    tokenizer = PUBLISHED[name].tokenizer()
    wanted = expected(PROMPT, tokenizer)
    assert encoded(tmp_path, rows_of(PROMPT, " 2."), tokenizer) == dict.fromkeys(
        ("rl", "sft", "pair", "labelled", "prm"), wanted
    )
    # The response and the beginning are one turn.
    (example,) = examples(tmp_path, rows_of(PROMPT, " 2.")["sft"], tokenizer=tokenizer)
    (whole,) = examples(tmp_path, {"messages": WHOLE}, tokenizer=tokenizer)
    assert [*example.prompt_ids, *example.response_ids] == [
        *whole.prompt_ids,
        *whole.response_ids,
    ]


WORDS = st.text(st.sampled_from("ab 12?+"), min_size=1, max_size=8).filter(str.strip)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(past=st.lists(st.tuples(WORDS, WORDS), max_size=2), system=st.none() | WORDS, data=st.data())
def test_conversations_with_a_past_are_continued_alike(
    tmp_path: Path, past: list[tuple[str, str]], system: str | None, data: st.DataObject
) -> None:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for asked, told in past:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
    begun, rest = data.draw(WORDS), data.draw(WORDS)
    messages += [
        {"role": "user", "content": data.draw(WORDS)},
        {"role": "assistant", "content": begun},
    ]
    given_prompt: Any = json.dumps(messages) if data.draw(st.booleans()) else messages
    rows = rows_of(given_prompt, rest)
    wanted = expected(messages)
    assert encoded(tmp_path, rows, TOKENIZER) == dict.fromkeys(rows, wanted)
    (example,) = examples(tmp_path, rows["sft"], turns="last")
    assert TOKENIZER.decode(example.response_ids) == f"{rest}<|im_end|>"


def test_the_last_turn_of_messages_is_the_answer_unless_the_setting_says_otherwise(
    tmp_path: Path,
) -> None:
    row = {"messages": WHOLE}
    dataset = prompts(tmp_path, row)
    assert dataset[0].text.endswith("assistant\n") and dataset[0].reference == "It is 2."
    assert dataset.counts["answered"] == 1
    continued = prompts(tmp_path, row, prefill=True)
    assert continued[0].token_ids == expected(WHOLE) and continued[0].reference is None
    assert continued.counts["prefilled"] == 1
    cut = prompts(tmp_path, {"prompt": PROMPT}, prefill=False)
    assert cut[0].text.endswith("assistant\n") and cut[0].reference == "It is"
    named = prompts(tmp_path, {"turns": {"messages": PROMPT}}, columns={"prompt": "turns.messages"})
    assert named.counts["answered"] == 1


def test_supervised_rows_without_a_response_learn_the_last_turn(tmp_path: Path) -> None:
    (example,) = examples(tmp_path, {"prompt": WHOLE})
    assert TOKENIZER.decode(example.response_ids) == "It is 2.<|im_end|>"
    # The label of a row is no continuation of its answer.
    (example,) = examples(tmp_path, {"prompt": WHOLE, "answer": "2"})
    assert TOKENIZER.decode(example.response_ids) == "It is 2.<|im_end|>"


def test_a_response_that_continues_nothing_is_refused(tmp_path: Path) -> None:
    rest = [{"role": "user", "content": "No."}, {"role": "assistant", "content": "Yes."}]
    with pytest.raises(MalformedRow, match="begins with one of 'user'"):
        examples(tmp_path, {"prompt": PROMPT, "response": rest})
    with pytest.raises(MalformedRow, match=r"data\.prefill: true"):
        data = PreferenceDataConfig(
            **saved(tmp_path, rows_of(PROMPT, " 2.")["pair"]), prefill=False
        )
        PreferenceDataset(data, TOKENIZER, kind="pair", max_tokens=500, seed=0)
    with pytest.raises(MalformedRow, match=r"data\.prefill"):
        rows = {"messages": PROMPT, "response": " 2."}
        examples(tmp_path, rows, columns={"response": "response"})


@pytest.mark.parametrize("text", ["", "I add."])
def test_a_call_of_a_tool_at_the_end_of_a_prompt_is_refused(tmp_path: Path, text: str) -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    prompt = [ASKED, {"role": "assistant", "content": text, "tool_calls": [call]}]
    rows, tokenizer = rows_of(prompt, " 2."), PUBLISHED["qwen2.5"].tokenizer()
    readers = {
        "rl": prompts,
        "sft": examples,
        "pair": compared,
        "labelled": partial(compared, kind="labelled"),
    }
    for name, reader in readers.items():
        with pytest.raises(MalformedRow, match="ends with a call of a tool"):
            reader(tmp_path, rows[name], tokenizer=tokenizer)


def test_a_response_of_messages_continues_the_turn_and_keeps_what_follows(tmp_path: Path) -> None:
    rest = [
        {"role": "assistant", "content": " 2.", "weight": 0},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
    (example,) = examples(tmp_path, {"prompt": PROMPT, "response": rest})
    tokens = [*example.prompt_ids, *example.response_ids]
    joined = [*WHOLE, *rest[1:]]
    whole = TOKENIZER.apply_chat_template(joined)["input_ids"]
    assert tokens == whole[: len(tokens)]
    trained = [t for t, weight in zip(example.response_ids, example.weights) if weight]
    assert TOKENIZER.decode(trained) == "Yes.<|im_end|>"


def test_a_long_question_is_cut_and_its_beginning_of_an_answer_is_not(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x" * 200}, BEGUN]
    (prompt,) = prompts(
        tmp_path, {"prompt": long}, max_prompt_tokens=80, overlong_prompts="truncate"
    )
    assert len(prompt.token_ids) <= 80
    assert prompt.text.endswith("assistant\nIt is") and "user\nx" in prompt.text


def test_templates_and_options_reach_a_begun_prompt(tmp_path: Path) -> None:
    row = {"prompt": PROMPT, "topic": "sums"}
    (prompt,) = prompts(tmp_path, row, template="{topic}: {prompt}", apply_chat_template=True)
    asked = {"role": "user", "content": "sums: 1+1?"}
    assert prompt.token_ids == expected([asked, BEGUN])
    (plain,) = prompts(tmp_path, row, template="Q: {prompt}\nA: ", apply_chat_template=False)
    assert plain.text == "Q: 1+1?\nA: It is"


def test_special_tokens_in_a_beginning_do_not_act(tmp_path: Path) -> None:
    begun = [ASKED, {"role": "assistant", "content": "a<|im_start|>b"}]
    (prompt,) = prompts(tmp_path, {"prompt": begun})
    start = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    assert prompt.token_ids.count(start) == 2 and prompt.text.endswith("a<|im_start|>b")


def test_rows_that_are_written_have_the_beginning_and_are_read_alike(tmp_path: Path) -> None:
    dataset = prompts(tmp_path, {"prompt": PROMPT})
    rows = PromptRows(dataset, DataConfig(), tmp_path / "media")
    row = rows.row(0)
    assert row["prompt"] == PROMPT and not rows.unlike
    (example,) = examples(tmp_path, {**row, "response": " 2."})
    assert example.prompt_ids == dataset[0].token_ids
    stated = with_condition(PROMPT, "reward 1", "prompt")
    assert stated == [{"role": "user", "content": "reward 1\n1+1?"}, BEGUN]
    assert PROMPT == [ASKED, BEGUN]
    assert ConditionConfig().where in ("prompt", "system")


def test_judges_and_reward_models_read_the_whole_turn(tmp_path: Path) -> None:
    (prompt,) = prompts(tmp_path, {"prompt": PROMPT})
    assert request_of(prompt) == ([ASKED], "It is")
    assert request_of(Prompt("", [], text="1+1?")) == ("1+1?", "")
    encoder = ConversationEncoder(TOKENIZER, None, MediaConfig())
    sample = encoder.answered(prompt.request, " 2.", cut=False, where="here")
    tokens = [*sample.prompt.token_ids, *sample.response]
    assert tokens == TOKENIZER.apply_chat_template(WHOLE)["input_ids"][: len(tokens)]
    assert encoder.prompt(prompt.request, "here").token_ids == prompt.token_ids


def test_messages_whose_last_turn_is_marked_as_a_prefix_are_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marked = {"messages": [ASKED, {**BEGUN, "prefix": True}]}
    continued = prompts(tmp_path, marked)
    assert continued[0].token_ids == expected(PROMPT) and continued[0].reference is None
    assert not any("prefix" in line for line in caplog.messages)
    answered = prompts(tmp_path, {"messages": [ASKED, {**BEGUN, "prefix": False}]})
    assert answered[0].reference == "It is" and answered.counts["answered"] == 1
    assert prompts(tmp_path, marked, prefill=False)[0].reference == "It is"
    with pytest.raises(DataError, match=r"end with the beginning of a turn \(prefix: true\)"):
        examples(tmp_path, marked)
