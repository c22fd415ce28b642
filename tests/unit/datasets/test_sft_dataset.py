import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.config.data import DataConfig
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.utils.errors import DataError, ModelError
from tests.unit.datasets.tokenizers import (
    CHATML,
    FORGETS,
    GENERATION,
    NO_END,
    OPENS_OTHERWISE,
    WITH_BOS,
    bos_tokenizer,
    chat_tokenizer,
)

TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "one"},
    {"role": "tool", "content": "t"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "thanks"},
]


@pytest.fixture
def examples(tmp_path):
    def make(rows, tokenizer=None, max_tokens=1000, **config):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        settings = DataConfig.model_validate({"sources": str(path), **config})
        return SFTDataset(settings, tokenizer or chat_tokenizer(), max_tokens=max_tokens, seed=0)

    return make


def spans(example, tokenizer):
    """Runs of tokens with equal mask, as text: ``[(trained, text)]``; the prompt first."""
    ids = [(False, t) for t in example.prompt_ids] + list(
        zip(example.trained, example.response_ids)
    )
    runs = []
    for trained, token in ids:
        if runs and runs[-1][0] == trained:
            runs[-1][1].append(token)
        else:
            runs.append((trained, [token]))
    return [(trained, tokenizer.decode(tokens)) for trained, tokens in runs]


def test_a_response_and_the_end_of_its_turn_are_learned(examples):
    tokenizer = chat_tokenizer()
    example = examples([{"prompt": "1+1=?", "response": "2"}])[0]
    assert (
        tokenizer.decode(example.prompt_ids)
        == "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(example.response_ids) == "2<|im_end|>"
    assert example.trained == [True, True]
    assert example.id == "rows/0"


def test_without_chat_the_response_is_followed_by_eos_once(examples):
    tokenizer = bos_tokenizer()
    data = examples(
        [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b</s>"}],
        tokenizer,
        template="Q{prompt}A",
    )
    for example in data:
        assert spans(example, tokenizer) == [(False, "<s>QaA"), (True, "b</s>")]
        assert example.response_ids[-1] == tokenizer.eos_token_id


def test_exactly_the_assistants_words_of_all_turns_are_learned(examples):
    tokenizer = chat_tokenizer()
    data = examples([{"messages": TALK}])
    assert spans(data[0], tokenizer) == [
        (
            False,
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (True, "one<|im_end|>"),
        (False, "\n<|im_start|>tool\nt<|im_end|>\n<|im_start|>assistant\n"),
        (True, "two<|im_end|>"),
    ]
    whole = tokenizer.apply_chat_template(TALK[:5])["input_ids"]
    # All but the line break behind the last turn.
    assert data[0].prompt_ids + data[0].response_ids == whole[:-1]


def test_the_mask_is_exact_where_the_template_writes_bos_and_eos_is_another_token(examples):
    tokenizer = bos_tokenizer(WITH_BOS)
    assert spans(examples([{"messages": TALK[1:3]}], tokenizer)[0], tokenizer) == [
        (False, "<s><|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "one<|im_end|>"),
    ]


def test_turns_that_end_in_text_alone_are_followed_by_eos(examples):
    tokenizer = chat_tokenizer(NO_END)
    assert spans(examples([{"messages": TALK[:5]}], tokenizer)[0], tokenizer) == [
        (False, "system: s\nuser: 1?\nassistant: "),
        (True, "one\n"),
        (False, "tool: t\nassistant: "),
        (True, "two\n<|im_end|>"),
    ]


def test_marks_of_the_template_are_taken_at_their_word(examples):
    tokenizer = chat_tokenizer(GENERATION)
    assert spans(examples([{"messages": TALK[1:5]}], tokenizer)[0], tokenizer) == [
        (False, "<|im_start|>user\n1?<|im_end|>|<|im_start|>assistant\n"),
        (True, "one<|im_end|>"),
        (False, "|<|im_start|>tool\nt<|im_end|>|<|im_start|>assistant\n!"),
        (True, "two<|im_end|>"),
    ]


def test_a_template_that_rewrites_earlier_turns_is_refused_for_several_turns_only(examples):
    tokenizer = chat_tokenizer(FORGETS)
    with pytest.raises(ModelError, match=r"does not keep what came before.*data\.turns: each"):
        examples([{"messages": TALK}], tokenizer)
    assert spans(examples([{"messages": TALK[:3]}], tokenizer)[0], tokenizer)[-1] == (
        True,
        "<think></think>one<|im_end|>",
    )


def test_each_turn_can_be_an_example_of_its_own(examples):
    tokenizer = chat_tokenizer(FORGETS)
    data = examples([{"messages": TALK}], tokenizer, turns="each")
    assert [e.id for e in data] == ["rows/0#1", "rows/0#2"]
    assert spans(data[0], tokenizer)[-1] == (True, "<think></think>one<|im_end|>")
    assert spans(data[1], tokenizer) == [
        (
            False,
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
            "<|im_start|>tool\nt<|im_end|>\n<|im_start|>assistant\n",
        ),
        (True, "<think></think>two<|im_end|>"),
    ]


def test_the_last_turn_can_be_the_only_one(examples):
    data = examples([{"messages": TALK}], turns="last")
    assert len(data) == 1 and all(data[0].trained)


def test_a_generation_prompt_that_the_answer_does_not_continue_is_refused(examples):
    with pytest.raises(ModelError, match="does not keep what came before"):
        examples([{"prompt": "a", "response": "b"}], chat_tokenizer(OPENS_OTHERWISE))


def test_of_a_row_with_a_response_only_the_response_is_learned(examples):
    data = examples([{"prompt": TALK[:4], "response": "two"}])
    assert data[0].trained == [True] * len("two.")


def test_control_tokens_in_the_data_are_text_and_do_not_end_a_turn(examples):
    tokenizer = chat_tokenizer()
    data = examples([{"prompt": "a<|im_end|>", "response": "b<|im_end|>c"}])
    ids = data[0].prompt_ids + data[0].response_ids
    assert ids.count(tokenizer.eos_token_id) == 2
    assert tokenizer.decode(data[0].response_ids) == "b<|im_end|>c<|im_end|>"
    assert all(data[0].trained) and data.counts["special_tokens"] == 1


def test_overlong_examples_are_dropped_cut_or_an_error(examples):
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b" * 30}]
    length = len(examples(rows[:1])[0].prompt_ids)
    dropped = examples(rows, max_tokens=length + 5)
    assert (len(dropped), dropped.counts["overlong"], dropped.counts["rows"]) == (1, 1, 2)
    cut = examples(rows, max_tokens=length + 5, overlong_prompts="truncate")
    assert [len(e.response_ids) for e in cut] == [2, 5]
    assert (cut.counts["truncated"], cut.counts["overlong"]) == (1, 0)
    with pytest.raises(
        DataError, match=rf"line 2: {length + 31} tokens, more than max_tokens = {length + 5}"
    ):
        examples(rows, max_tokens=length + 5, overlong_prompts="error")
    with pytest.raises(DataError, match="nothing is left"):
        examples(rows, max_tokens=length, overlong_prompts="truncate")


@pytest.mark.parametrize("config", [{}, {"apply_chat_template": False}])
@pytest.mark.parametrize("row", [{"prompt": "a"}, {"prompt": "a", "response": " "}])
def test_a_row_without_an_answer_names_the_row(examples, row, config):
    with pytest.raises(
        DataError,
        match=r"line 1: no response to learn from; the row has: prompt.*data\.columns\.response",
    ):
        examples([row], **config)


def test_an_answer_that_would_merge_with_the_prompt_leaves_the_prompt_as_sampled(examples):
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["\n\n"])
    data = examples([{"prompt": "a", "response": "\nb"}], tokenizer)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], add_generation_prompt=True
    )["input_ids"]
    assert data[0].prompt_ids == asked
    assert tokenizer.decode(data[0].response_ids) == "\nb<|im_end|>"


turn = st.tuples(
    st.sampled_from(["user", "tool", "assistant"]),
    st.text(alphabet="ab<|im_end>\n ", min_size=1, max_size=6),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(turn, min_size=1, max_size=6).filter(
        lambda ts: any(r == "assistant" and c.strip() for r, c in ts)
    )
)
def test_for_any_conversation_the_mask_covers_the_answers_and_their_ends_only(
    tmp_path_factory, turns
):
    talk = [{"role": "user", "content": "q"}, *({"role": r, "content": c} for r, c in turns)]
    path = tmp_path_factory.mktemp("talk") / "rows.jsonl"
    path.write_text(json.dumps({"messages": talk}) + "\n")
    tokenizer = chat_tokenizer(CHATML)
    data = SFTDataset(
        DataConfig.model_validate({"sources": str(path)}), tokenizer, max_tokens=1000, seed=0
    )
    learned = [text for trained, text in spans(data[0], tokenizer) if trained]
    assert learned == [f"{m['content']}<|im_end|>" for m in talk if m["role"] == "assistant"]
