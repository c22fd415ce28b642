"""All verbs read one row alike, and columns that nothing reads are refused or counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from lightrft.config.base import build
from lightrft.config.data import (
    Columns,
    DataConfig,
    PreferenceColumns,
    PreferenceDataConfig,
    ProcessDataConfig,
    SFTDataConfig,
    SourceConfig,
)
from lightrft.config.reward import RewardConfig
from lightrft.config.reward_model.judgement import JudgementConfig
from lightrft.datasets.open_source import open_source
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.preference.preference_rows import read_preference
from lightrft.datasets.process.process_dataset import ProcessDataset
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.row_warnings import check_held_out, check_rows
from lightrft.datasets.rows.recorded_row import RecordedRow
from lightrft.datasets.rows.row_reader import read_record
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.rollout.row_check import check_labels
from lightrft.utils.errors import DataError
from tests.unit.datasets.published_templates import PUBLISHED
from tests.unit.datasets.tokenizers import WITH_TOOLS, chat_tokenizer

TOKENIZER = chat_tokenizer()
CONVERSATION = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]
ASKED = {"role": "user", "content": "1+1?"}
TOLD = {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Add."}
PAST = [{"role": "user", "content": "0+0?"}, {"role": "assistant", "content": "0"}]


def saved(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts(folder: Path, *rows: dict[str, Any], **options: Any) -> PromptDataset:
    data = DataConfig(sources=[{"path": saved(folder, *rows)}], shuffle=False, **options)
    return PromptDataset(data, TOKENIZER, seed=0)


def examples(folder: Path, *rows: dict[str, Any], tokenizer: Any = TOKENIZER, **options: Any):
    data = SFTDataConfig(sources=[{"path": saved(folder, *rows)}], shuffle=False, **options)
    return SFTDataset(data, tokenizer, max_tokens=500, seed=0)


def compared(folder: Path, *rows: dict[str, Any], kind: Any = "pair", **options: Any):
    data = PreferenceDataConfig(sources=[{"path": saved(folder, *rows)}], shuffle=False, **options)
    return PreferenceDataset(data, TOKENIZER, kind=kind, max_tokens=500, seed=0)


def learned(example: Any) -> tuple[str, str]:
    return TOKENIZER.decode(example.prompt_ids), TOKENIZER.decode(example.response_ids)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"conversations": CONVERSATION, "system": "Add."}, [SYSTEM, ASKED]),
        ({"question": "1+1?", "answer": "2", "system_prompt": "Add."}, [SYSTEM, ASKED]),
        ({"query": "1+1?", "response": "2", "history": [["0+0?", "0"]]}, [*PAST, ASKED]),
        ({"query": "1+1?", "response": "2", "history": json.dumps(PAST)}, [*PAST, ASKED]),
        (
            {"instruction": "1+1?", "output": "2", "system": "Add.", "history": PAST},
            [SYSTEM, *PAST, ASKED],
        ),
        ({"messages": [SYSTEM, ASKED, TOLD], "history": PAST}, [SYSTEM, *PAST, ASKED]),
        ({"messages": [SYSTEM, ASKED, TOLD], "system": " Add. "}, [SYSTEM, ASKED]),
    ],
)
def test_system_message_and_history_come_before_the_prompt_in_every_verb(
    tmp_path: Path, row: dict[str, Any], prompt: list[dict[str, str]]
) -> None:
    text = TOKENIZER.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    (sampled,) = prompts(tmp_path, row)
    assert sampled.text == text
    (example,) = examples(tmp_path, row, turns="last")
    assert learned(example) == (text, "2<|im_end|>")
    # one conversation, and a pair with the same conversation as its prompt
    pair = {**row, "chosen": "2", "rejected": "3"}
    messages = pair.pop("messages", None) or pair.pop("conversations", None)
    if messages is not None:
        pair["prompt"] = messages[:-1]
    (preferred,) = compared(tmp_path, pair)
    assert TOKENIZER.decode(preferred.prompt_ids) == text


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"messages": [SYSTEM, ASKED, TOLD], "system": "Subtract."},
            "another system message than column 'system'",
        ),
        ({"prompt": "1?", "response": "2", "system": {"a": 1}}, "must be text, not dict"),
        ({"prompt": "1?", "response": "2", "history": "once"}, "history, turn 1 is not a question"),
        (
            {"prompt": "1?", "response": "2", "history": [["a"]]},
            "history, turn 1 is not a question",
        ),
        ({"prompt": "1?", "response": "2", "history": [["a", None]]}, "columns.history: null"),
        (
            {"prompt": "1?", "messages": [{"role": "user", "content": "2?"}, TOLD]},
            "'prompt' and 'messages' hold two prompts; .*data.columns.prompt",
        ),
        (
            {"prompt": [ASKED], "messages": [{"role": "user", "content": "2?"}, TOLD]},
            "'prompt' and 'messages' hold two prompts; .*data.columns.prompt",
        ),
    ],
)
def test_a_system_message_or_history_that_cannot_be_used_is_refused_by_name(
    row: dict[str, Any], problem: str
) -> None:
    with pytest.raises(MalformedRow, match=problem):
        read_record(row, Columns(), "line 1")


def test_null_leaves_a_column_of_a_known_meaning_out_and_a_name_takes_another_one() -> None:
    row = {"prompt": "1+1?", "system": "no", "sys": "Add.", "history": "once"}
    found = read_record(row, Columns(system="sys", history=None), "line 1")
    assert found.prompt == [SYSTEM, ASKED]
    assert read_record(row, Columns(system=None, history=None), "line 1").prompt == "1+1?"


@pytest.mark.parametrize(
    ("row", "columns", "prompt", "response", "label"),
    [
        ({"system": "1+1?", "response": "2"}, {"prompt": "system"}, "1+1?", "2", None),
        ({"history": "1+1?", "response": "2"}, {"prompt": "history"}, "1+1?", "2", None),
        ({"tools": "1+1?", "response": "2"}, {"prompt": "tools"}, "1+1?", "2", None),
        ({"answer": "1+1?", "final_answer": "2"}, {"prompt": "answer"}, "1+1?", None, "2"),
        ({"prompt": "1+1?", "system": "2"}, {"label": "system"}, "1+1?", None, "2"),
        ({"instruction": "1+1?", "input": "2"}, {"label": "input"}, "1+1?", None, "2"),
        ({"question": "2", "problem": "1+1?"}, {"response": "question"}, "1+1?", "2", None),
        ({"question": "1+1?", "answer": "2"}, {"label": "answer"}, "1+1?", "2", "2"),
        (
            {"prompt": "Add.", "question": "1+1?", "answer": "2"},
            {"system": "prompt"},
            [SYSTEM, ASKED],
            "2",
            "2",
        ),
    ],
)
def test_a_column_that_is_named_for_one_part_of_a_row_is_no_other_part_of_its_prompt(
    row: dict[str, Any], columns: dict[str, str], prompt: Any, response: Any, label: Any
) -> None:
    found = read_record(row, Columns(**columns), "line 1")
    assert (found.prompt, found.response, found.label) == (prompt, response, label)


@pytest.mark.parametrize("name", ["input", "prompt", "system", "history"])
def test_a_response_of_a_pair_is_no_part_of_its_prompt(tmp_path: Path, name: str) -> None:
    row = {"question": "1+1?", name: "2", "rejected": "3"}
    found = compared(tmp_path, row, columns={"chosen": name})
    assert "1+1?" in TOKENIZER.decode(found[0].prompt_ids)
    assert "2" not in TOKENIZER.decode(found[0].prompt_ids)
    assert found.unread == {}


@pytest.mark.parametrize(
    ("solution", "answer"), [("solution", "answer"), ("generated_solution", "expected_answer")]
)
def test_a_worked_solution_is_learned_and_its_answer_is_the_label(
    tmp_path: Path, solution: str, answer: str
) -> None:
    row = {"problem": "1+1?", solution: "1+1 is 2.", answer: "2"}
    (example,) = examples(tmp_path, row)
    assert learned(example)[1] == "1+1 is 2.<|im_end|>"
    (prompt,) = prompts(tmp_path, row)
    assert (prompt.label, prompt.reference) == ("2", "1+1 is 2.")


@pytest.mark.parametrize("asked", ["0+0?", PAST[:1]])
def test_messages_that_begin_with_the_prompt_are_the_conversation(
    tmp_path: Path, asked: Any
) -> None:
    row = {"prompt": asked, "prompt_id": "a1", "messages": [*PAST, ASKED, TOLD]}
    (example,) = examples(tmp_path, row, turns="last")
    (prompt,) = prompts(tmp_path, row)
    assert learned(example) == (prompt.text, "2<|im_end|>")
    assert "0+0?" in prompt.text and "1+1?" in prompt.text
    labelled = {**row, "label": True}
    (example,) = compared(tmp_path, labelled, kind="labelled")
    assert TOKENIZER.decode(example.prompt_ids).count("0+0?") == 1


def test_a_label_that_names_a_rule_of_lightrft_is_its_data_source(tmp_path: Path) -> None:
    rows = [
        {"prompt": "2+2?", "reference": "4", "label": "geo3k_rule"},
        {"prompt": "2+2?", "reward_model": {"ground_truth": "4"}, "label": "math_rule"},
        {"prompt": "2+2?", "reference": "4", "label": "geo3k_rule", "data_source": "mine"},
        {"prompt": "2+2?", "label": "math_rule"},
    ]
    found = [(p.label, p.reference, p.data_source) for p in prompts(tmp_path, *rows)]
    assert found == [
        ("4", "4", "geo3k_rule"),
        ("4", "4", "math_rule"),
        ("4", "4", "mine"),
        (None, None, "math_rule"),
    ]
    named = prompts(tmp_path, rows[0], columns={"label": "label"})
    assert named[0].label == "geo3k_rule"


def test_each_column_that_nothing_reads_is_counted_once_for_each_source(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"prompt": "1+1?", "response": "2", "note": "easy", "level": 3, "tags": ["a"], "about": {}},
        {"prompt": "1+1?", "response": "2", "note": "", "tags": [], "picture": {"path": "a.png"}},
        {"prompt": "1+1?", "response": "2", "about": {"source": {"name": "x", "year": 1}}},
        {"prompt": "1+1?", "response": "2", "counts": {"a": 1, "b": None, "c": {"d": 2.5}}},
    ]
    found = examples(tmp_path, *rows)
    (columns,) = found.unread.values()
    assert columns == {"note": 1, "tags": 1, "picture": 1, "about": 1}
    check_rows(found, "data.sources")
    (line,) = [r.getMessage() for r in caplog.records if "read by nothing" in r.getMessage()]
    assert "data.sources" in line and "note (1 row)" in line
    caplog.clear()
    check_rows(prompts(tmp_path, *rows), "data.sources")
    assert "left to reward functions" in caplog.text
    caplog.clear()
    options = {"template": "{note}{tags}: {prompt}", "apply_chat_template": True}
    check_rows(prompts(tmp_path, *rows[:1], **options), "data.sources")
    assert "note" not in caplog.text and not caplog.records


@pytest.mark.parametrize("name", ["prompt", "question", "messages"])
def test_an_instruction_next_to_another_prompt_is_counted(tmp_path: Path, name: str) -> None:
    asked = [ASKED, TOLD] if name == "messages" else "1+1?"
    row = {"instruction": "Add.", name: asked, "response": "2"}
    (columns,) = prompts(tmp_path, row).unread.values()
    assert columns == {"instruction": 1}


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({"prompt": "a\ud800", "chosen": "2", "rejected": "3"}, "line 1"),
        ({"prompt": "1?", "chosen": "2\udfff", "rejected": "3"}, "line 1"),
        ({"prompt": "1?", "chosen": "2", "rejected": "3", "system": "\ud83d"}, "message 1"),
        ({"prompt": "1?", "chosen": "2", "rejected": "3", "note": "\ud83d"}, "line 1, note"),
        ({"prompt": [{**ASKED, "name": "\ud83d"}], "chosen": "2", "rejected": "3"}, "message 1"),
    ],
)
def test_half_of_a_surrogate_pair_is_a_malformed_row(
    tmp_path: Path, row: dict[str, Any], place: str
) -> None:
    problem = f"{place}.*: a text has half of a surrogate pair, .*; leave it out"
    options = {"template": "{note} {prompt}"} if "note" in row else {}
    with pytest.raises(MalformedRow, match=problem):
        compared(tmp_path, row, **options)
    with pytest.raises(MalformedRow, match=problem):
        examples(tmp_path, {**row, "response": row["chosen"]}, **options)
    steps = {**row, "completions": [row["chosen"]], "labels": [True]}
    with pytest.raises(MalformedRow, match=problem):
        data = ProcessDataConfig(sources=[{"path": saved(tmp_path, steps)}], **options)
        ProcessDataset(data, TOKENIZER, max_tokens=99, seed=0)


def test_columns_beside_a_nested_one_that_is_read_are_counted(tmp_path: Path) -> None:
    row = {"data": {"q": {"text": "1+1?", "by": "Ann"}, "a": "2", "note": "easy", "level": 3}}
    found = examples(tmp_path, row, columns={"prompt": "data.q.text", "response": "data.a"})
    assert list(found.unread.values()) == [{"data.q.by": 1, "data.note": 1}]
    assert RecordedRow(row).unread == {"data"}


def test_messages_that_no_turn_of_the_assistant_follows_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    later = {"role": "user", "content": "2+2?"}
    row = {"messages": [ASKED, TOLD, later]}
    (example, _) = examples(tmp_path, row, row)
    assert learned(example)[1] == "2<|im_end|>"
    (line,) = caplog.messages
    assert "line 1: the last message is no part of the example" in line
    caplog.clear()
    sides = {"chosen": [ASKED, TOLD, later], "rejected": [ASKED, {**TOLD, "content": "3"}, later]}
    compared(tmp_path, sides)
    assert "the last message is no part of the example" in caplog.text
    caplog.clear()
    examples(tmp_path, {"messages": [ASKED, TOLD]})
    assert not caplog.messages


def test_counts_of_columns_are_restored_with_the_token_cache(tmp_path: Path) -> None:
    rows = [{"prompt": f"{k}+1?", "note": "easy"} for k in range(9)]
    options = {"token_cache": str(tmp_path / "cache"), "token_cache_min_mb": 0}
    first, second = (prompts(tmp_path, *rows, **options) for _ in range(2))
    assert list((tmp_path / "cache").glob("*.arrow"))
    assert first.unread == second.unread and list(second.unread.values()) == [{"note": 9}]


def test_a_reader_reads_what_it_looks_at_changes_or_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def read(row):\n"
        "    made = {**row, 'prompt': row['q'], 'changed': 'new'}\n"
        "    del made['gone']\n"
        "    return made\n"
    )
    row = {"q": "1?", "response": "2", "changed": "old", "gone": "text", "left": "text"}
    source = {"path": saved(tmp_path, row), "reader": f"{tmp_path / 'mine.py'}:read"}
    found = SFTDataset(SFTDataConfig(sources=[source]), TOKENIZER, max_tokens=99, seed=0)
    assert list(found.unread.values()) == [{"left": 1}]


def test_copies_of_a_recorded_row_read_no_column() -> None:
    row = RecordedRow({"a": "x", "b": "y", "c": "z", "d": 1})
    assert {**row} == dict(row) == row.copy() == {"a": "x", "b": "y", "c": "z", "d": 1}
    assert "a" in row and list(row.items()) and row.unread == {"a", "b", "c"}
    assert (row["a"], row.get("b"), row.get("e", 2)) == ("x", "y", 2)
    assert row.unread == {"c"}


@pytest.mark.parametrize("column", ["system", "history", "images", "video"])
def test_a_column_of_a_known_meaning_that_a_layout_does_not_read_is_refused(
    tmp_path: Path, column: str
) -> None:
    row: dict[str, Any] = {"context": [ASKED], "response1": "2", "response2": "3"}
    row = {**row, "overall_preference": -1, column: [["a", "b"]] if column == "history" else "x"}
    if column in ("system", "history"):
        assert read_preference(row, PreferenceColumns(), "line 1").responses[0].asked > 1
        row = {**row, "messages": [ASKED, TOLD], "label": 1}
        row = {k: v for k, v in row.items() if not k.startswith(("response", "overall"))}
        assert read_preference(row, PreferenceColumns(), "line 1").responses[0].asked > 1
        return
    with pytest.raises(MalformedRow, match=rf"{column}.*data\.columns\.\w+: null"):
        read_preference(row, PreferenceColumns(), "line 1")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1?", "completions": ["It is 2."], "labels": [True]},
        {"input": "1+1?\nIt is 2. ки", "label": "1+1?\nIt is 2. +"},
        {
            "question": {"problem": "1+1?"},
            "label": {
                "steps": [STEP]
                if (
                    STEP := {
                        "completions": [{"text": "It is 2.", "rating": 1}],
                        "chosen_completion": 0,
                    }
                )
                else []
            },
        },
    ],
)
def test_rows_of_steps_have_their_system_message(tmp_path: Path, row: dict[str, Any]) -> None:
    path = saved(tmp_path, {**row, "system": "Add."})
    data = ProcessDataConfig(sources=[{"path": path}])
    (example,) = ProcessDataset(data, TOKENIZER, max_tokens=99, seed=0)
    assert "system\nAdd." in TOKENIZER.decode(example.prompt_ids)


def test_a_question_to_a_judge_keeps_the_record_of_its_row(tmp_path: Path) -> None:
    row = {"prompt": "1+1?", "chosen": "2", "rejected": "3", "note": "easy", "solution": "two"}
    data = SFTDataConfig(
        sources=[{"path": saved(tmp_path, row)}], judgement=JudgementConfig(form="pair")
    )
    found = SFTDataset(data, TOKENIZER, max_tokens=999, seed=0)
    assert set(*found.unread.values()) == {"note", "solution"}


def test_tools_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {"prompt": "1+1?", "response": "2", "tools": tools}
    with pytest.raises(MalformedRow, match=r"tools need a chat template.*columns.tools: null"):
        examples(tmp_path, row, apply_chat_template=False)
    assert len(examples(tmp_path, row, apply_chat_template=False, columns={"tools": None})) == 1
    (example,) = examples(tmp_path, row, tokenizer=chat_tokenizer(WITH_TOOLS))
    assert '"add"' in learned(example)[0]


@pytest.mark.parametrize(
    "words", [("true", "False"), ("1", "0"), ("1.0", "0.0"), ("TRUE", "false")]
)
def test_labels_of_responses_may_be_the_text_of_a_csv_file(
    tmp_path: Path, words: tuple[str, str]
) -> None:
    lines = [f"{k}+1?,{k + 1},{word}" for k, word in enumerate(words)]
    (tmp_path / "rows.csv").write_text("\n".join(["prompt,completion,label", *lines]))
    data = PreferenceDataConfig(sources=[{"path": str(tmp_path / "rows.csv")}], shuffle=False)
    found = PreferenceDataset(data, TOKENIZER, kind="labelled", max_tokens=99, seed=0)
    assert [example.responses[0].desirable for example in found] == [True, False]
    with pytest.raises(MalformedRow, match="label is 'maybe', not a boolean"):
        compared(tmp_path, {"prompt": "1?", "completion": "2", "label": "maybe"}, kind="labelled")


@pytest.mark.parametrize("kind", ["parquet", "saved", "function"])
def test_nulls_that_a_table_added_are_removed_at_every_depth(tmp_path: Path, kind: str) -> None:
    def row(arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]}

    given = [row({"x": 4.0}), row({"a": {"b": [{"c": 1}, {"d": "e"}]}}), row({"many": [1, 2]})]
    table = datasets.Dataset.from_list(given)
    path = str(tmp_path / "rows")
    if kind == "parquet":
        path += ".parquet"
        table.to_parquet(path)
    elif kind == "saved":
        table.save_to_disk(path)
    else:
        table.to_parquet(f"{path}.parquet")
        (tmp_path / "mine.py").write_text(
            f"import datasets\ndef rows():\n"
            f"    return datasets.Dataset.from_parquet({path + '.parquet'!r})\n"
        )
        path = f"{tmp_path / 'mine.py'}:rows"
    read = open_source(SourceConfig(path=path))
    calls = [read_record(read[k], Columns(), "line 1").messages[-1]["tool_calls"] for k in range(3)]
    assert calls == [g["messages"][-1]["tool_calls"] for g in given]


def test_nulls_of_json_lines_are_kept(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
    told = {"role": "assistant", "content": "", "tool_calls": [call]}
    read = open_source(SourceConfig(path=saved(tmp_path, {"messages": [ASKED, told]})))
    record = read_record(read[0], Columns(), "line 1")
    assert record.messages[-1]["tool_calls"] == [call]


def test_held_out_prompts_that_are_learned_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"{k}+1?", "response": "2", "label": True} for k in range(4)]
    pairs = [{"prompt": f"{k}+1?", "chosen": "2", "rejected": "3"} for k in range(4)]
    held_out = list(prompts(tmp_path, *rows[2:], {"prompt": "new?"}).prompt_keys())
    learned = (prompts(tmp_path, *rows), examples(tmp_path, *rows), compared(tmp_path, *pairs))
    for dataset in learned:
        caplog.clear()
        check_held_out(dataset.prompt_keys(), held_out, "eval.data.sources")
        assert "eval.data.sources: 2 of 3 prompts are prompts of data.sources too" in caplog.text
    caplog.clear()
    check_held_out(learned[0].prompt_keys(), held_out[2:], "eval.data.sources")
    assert not caplog.records


@pytest.mark.parametrize(("label", "reported"), [(12.0, True), (12, False), ("12", False)])
def test_a_label_with_a_fraction_is_reported_where_text_is_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, label: object, reported: bool
) -> None:
    dataset = prompts(tmp_path, {"prompt": "1?", "label": "1"}, {"prompt": "12?", "label": label})
    check_labels(dataset, build(RewardConfig, {"terms": ["exact_match"]}), "data.sources")
    assert ("1 label is a float" in caplog.text and "line 2" in caplog.text) == reported
    caplog.clear()
    check_labels(dataset, build(RewardConfig, {"terms": ["math"]}), "data.sources")
    assert not caplog.records


def test_a_transcript_is_one_conversation_in_every_verb(tmp_path: Path) -> None:
    row = {"prompt": "\n\nHuman: 1+1?\n\nAssistant:", "response": "2", "label": True}
    text = TOKENIZER.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    (sampled,), (example,) = prompts(tmp_path, row), examples(tmp_path, row)
    (labelled,) = compared(tmp_path, row, kind="labelled")
    texts = [sampled.text, learned(example)[0], TOKENIZER.decode(labelled.prompt_ids)]
    assert texts == [text] * 3
    (plain,) = prompts(tmp_path, row, apply_chat_template=False)
    assert plain.text == row["prompt"]


WORDS = st.text(st.sampled_from("abc 12?+"), min_size=1, max_size=8).filter(str.strip)
PAIRS = st.lists(st.tuples(WORDS, WORDS).map(list), max_size=2)


def _messages(system: str | None, turns: list[list[str]], question: str) -> list[dict[str, str]]:
    said = [] if system is None else [{"role": "system", "content": system}]
    for asked, told in turns:
        said += [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
    return [*said, {"role": "user", "content": question}]


def _sharegpt(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[m["role"]], "value": m["content"]} for m in messages]


@st.composite
def rows(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, str]], str]:
    """A row with a prompt, the messages that it means, and another response."""
    question, answer = draw(WORDS), draw(WORDS)
    system, past = draw(st.none() | WORDS), draw(PAIRS)
    messages = _messages(system, past, question)
    form = draw(st.sampled_from(["columns", "alpaca", "messages", "sharegpt", "json", "both"]))
    row: dict[str, Any] = {}
    if form in ("columns", "alpaca"):
        if form == "alpaca":
            given = draw(st.none() | WORDS)
            row = {"instruction": question, "input": given}
            question = f"{question}\n\n{given}" if given else question
            messages = _messages(system, past, question)
        else:
            name = draw(st.sampled_from(["prompt", "input", "question", "problem", "query"]))
            row = {name: question}
        if system is not None:
            row[draw(st.sampled_from(["system", "system_prompt", "system_message"]))] = system
        if past:
            row["history"] = draw(
                st.sampled_from([past, json.dumps(past), _messages(None, past, "")[:-1]])
            )
        row[draw(st.sampled_from(["response", "output", "completion"]))] = answer
    else:
        full = [*messages, {"role": "assistant", "content": answer}]
        name = draw(st.sampled_from(["messages", "conversations", "conversation"]))
        row = {name: _sharegpt(full) if form == "sharegpt" else full}
        if form == "json":
            row = {"prompt": json.dumps(full)}
        if form == "both":
            row["prompt"] = next(m["content"] for m in full if m["role"] == "user")
    if draw(st.booleans()):
        row["topic"] = draw(WORDS)
    return row, messages, answer


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(drawn=rows())
def test_every_verb_sees_the_same_prompt_of_a_row_and_loses_no_column(
    tmp_path: Path, drawn: tuple[dict[str, Any], list[dict[str, str]], str]
) -> None:
    row, messages, answer = drawn
    expected = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    # Also in a column of prompts, the last turn is the answer.
    sampled = prompts(tmp_path, row, prefill=False)
    assert sampled[0].token_ids == expected
    learned_rows = examples(tmp_path, row, turns="last")
    assert learned_rows[0].prompt_ids == expected
    assert TOKENIZER.decode(learned_rows[0].response_ids) == f"{answer}<|im_end|>"
    labelled = compared(tmp_path, {**row, "label": True}, kind="labelled", turns="last")
    own = labelled[0]
    whole = [*own.prompt_ids, *own.responses[0].token_ids]
    assert whole[: len(expected)] == expected
    for found in (sampled, learned_rows, labelled):
        columns = set().union(*found.unread.values())
        assert columns - {"prompt"} == ({"topic"} & row.keys())


@pytest.mark.parametrize("read", [prompts, examples])
def test_a_row_with_media_whose_text_column_is_unknown_is_refused(
    tmp_path: Path, read: Any
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "d.png")
    row = {"q": "Which digit?", "image": str(tmp_path / "d.png"), "label": "3", "response": "3"}
    with pytest.raises(DataError, match=r"no column with a prompt .* Name the column in data\."):
        read(tmp_path, row)


@pytest.mark.parametrize(
    ("role", "content"),
    [
        ("human", "SECRET"),
        ("tool_response", "SECRET"),
        ("observation", "SECRET"),
        ("tool_call", json.dumps({"name": "look", "arguments": {"what": "SECRET"}})),
    ],
)
def test_roles_of_other_formats_are_read_by_every_data_set(
    tmp_path: Path, role: str, content: str
) -> None:
    call = {"role": "tool_call", "content": json.dumps({"name": "look", "arguments": {}})}
    before = [ASKED, call] if role in ("tool_response", "observation") else []
    after = [{"role": "tool", "content": "seen"}] if role == "tool_call" else []
    asked = [*before, *([ASKED] if role == "tool_call" else []), {"role": role, "content": content}]
    row = {"messages": [*asked, *after, TOLD], "label": True}
    tokenizer = PUBLISHED["qwen2.5"].tokenizer()
    (example,) = examples(tmp_path, row, tokenizer=tokenizer, turns="last")
    data = {"sources": [{"path": saved(tmp_path, row)}], "shuffle": False}
    sampled = PromptDataset(DataConfig(**data), tokenizer, seed=0)
    labelled = PreferenceDataset(
        PreferenceDataConfig(**data), tokenizer, kind="labelled", max_tokens=500, seed=0
    )
    own = labelled[0]
    whole = [*own.prompt_ids, *own.responses[0].token_ids]
    for ids in (example.prompt_ids, sampled[0].token_ids, whole):
        assert "SECRET" in tokenizer.decode(ids)
