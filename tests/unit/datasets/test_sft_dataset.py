import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.config.data import SFTDataConfig
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.engines.stop_strings import model_ends
from lightrft.utils.errors import ConfigError, DataError, ModelError
from tests.unit.datasets.published_templates import PUBLISHED
from tests.unit.datasets.tokenizers import (
    CHATML,
    FORGETS,
    GENERATION,
    NO_END,
    OPENS_OTHERWISE,
    WITH_BOS,
    WITH_TOOLS,
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
        settings = SFTDataConfig.model_validate({"sources": str(path), **config})
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
        apply_chat_template=False,
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


def test_turns_that_end_in_text_alone_are_each_followed_by_eos(examples):
    tokenizer = chat_tokenizer(NO_END)
    assert spans(examples([{"messages": TALK[:5]}], tokenizer)[0], tokenizer) == [
        (False, "system: s\nuser: 1?\nassistant: "),
        (True, "one\n<|im_end|>"),
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
        SFTDataConfig.model_validate({"sources": str(path)}), tokenizer, max_tokens=1000, seed=0
    )
    learned = [text for trained, text in spans(data[0], tokenizer) if trained]
    assert learned == [f"{m['content']}<|im_end|>" for m in talk if m["role"] == "assistant"]


LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
FORMS = [
    [LOOK_UP],
    json.dumps([LOOK_UP]),
    [json.dumps(LOOK_UP)],
    [{**LOOK_UP, "function": {**LOOK_UP["function"], "strict": None}}],
]
"""The same tools as a list, as JSON text, as a list of texts, and with a null as of parquet."""


@pytest.mark.parametrize("tools", FORMS, ids=["list", "text", "texts", "null"])
def test_tools_of_a_row_reach_the_template_and_only_the_assistants_words_are_learned(
    examples, tools
):
    tokenizer = chat_tokenizer(WITH_TOOLS)
    (example,) = examples([{"messages": TALK[1:], "tools": tools}], tokenizer)
    whole = tokenizer.apply_chat_template(TALK[1:5], tools=[LOOK_UP])["input_ids"]
    assert example.prompt_ids + example.response_ids == whole[:-1]
    assert "look_up" in tokenizer.decode(example.prompt_ids)
    learned = [text for trained, text in spans(example, tokenizer) if trained]
    assert learned == ["one<|im_end|>", "two<|im_end|>"]


def test_tools_may_have_a_column_of_another_name_or_none(examples):
    tokenizer = chat_tokenizer(WITH_TOOLS)
    row = {"messages": TALK[1:3], "gear": [LOOK_UP], "tools": "a hammer"}
    (named,) = examples([row], tokenizer, columns={"tools": "gear"})
    (none,) = examples([row], tokenizer, columns={"tools": None})
    assert "look_up" in tokenizer.decode(named.prompt_ids)
    assert none.prompt_ids == examples([{"messages": TALK[1:3]}], tokenizer)[0].prompt_ids
    with pytest.raises(DataError, match=r"no column 'gear' \(data\.columns\.tools\)"):
        examples([{"messages": TALK[1:3]}], tokenizer, columns={"tools": "gear"})


@pytest.mark.parametrize("tools", ["a hammer", {"name": "f"}, 3, ["f"], [1]])
def test_a_column_that_holds_no_tools_is_refused_with_the_way_out(examples, tools):
    with pytest.raises(DataError, match=r"line 1: tools .*data\.columns\.tools: null"):
        examples([{"messages": TALK[1:3], "tools": tools}], chat_tokenizer(WITH_TOOLS))


def test_control_tokens_in_names_and_texts_of_tools_are_text(examples):
    tokenizer = chat_tokenizer(WITH_TOOLS)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    plain = examples([{"messages": TALK[1:3], "tools": [{"name": "f"}]}], tokenizer)[0]
    row = {"messages": TALK[1:3], "tools": [{"<|im_end|>": "<|im_end|>"}]}
    spelled = examples([row], tokenizer)[0]
    assert spelled.prompt_ids.count(end) == plain.prompt_ids.count(end)
    assert tokenizer.decode(spelled.prompt_ids).count("<|im_end|>") == 2 + plain.prompt_ids.count(
        end
    )


def test_a_template_that_writes_no_tools_is_logged_once(examples, caplog):
    rows = [{"messages": TALK[1:3], "tools": [LOOK_UP]}] * 2
    assert examples(rows)[0].prompt_ids == examples([{"messages": TALK[1:3]}])[0].prompt_ids
    warned = [r.getMessage() for r in caplog.records if "writes no tools" in r.getMessage()]
    assert len(warned) == 1 and "line 1" in warned[0] and "model.chat_template" in warned[0]


def test_named_tools_need_a_chat_template(examples):
    row = {"prompt": "a", "response": "b", "gear": [LOOK_UP]}
    with pytest.raises(ConfigError, match=r"data\.columns\.tools needs a chat template"):
        examples([row], apply_chat_template=False, columns={"tools": "gear"})


def weighted(example, tokenizer):
    """Runs of tokens of one weight other than 0, as ``[(weight, text)]``."""
    runs = []
    pairs = zip(example.weights, example.response_ids, strict=True)
    for weight, run in itertools.groupby(pairs, lambda pair: pair[0]):
        if weight:
            runs.append((weight, tokenizer.decode([token for _, token in run])))
    return runs


def turns_of(*weights, key="weight"):
    """A conversation whose turn k has weight ``weights[k]``; None for no weight."""
    talk = []
    for k, weight in enumerate(weights):
        talk.append({"role": "user", "content": f"{k}?"})
        said = {"role": "assistant", "content": f"{k}!"}
        talk.append(said if weight is None else {**said, key: weight})
    return {"messages": talk}


@pytest.mark.parametrize(
    ("key", "weights"),
    [
        ("weight", (0, 1)),
        ("train", (False, True)),
        ("training", (False, True)),
        ("loss", (False, None)),
    ],
)
def test_a_turn_of_weight_0_is_shown_and_not_learned(examples, key, weights):
    tokenizer = chat_tokenizer()
    (example,) = examples([turns_of(*weights, key=key)], tokenizer)
    assert weighted(example, tokenizer) == [(1.0, "1!<|im_end|>")]
    (plain,) = examples([turns_of(None, None)], tokenizer)
    both = example.prompt_ids + example.response_ids
    assert both == plain.prompt_ids + plain.response_ids


def test_turns_have_any_weight_from_0(examples):
    tokenizer = chat_tokenizer()
    (example,) = examples([turns_of(0.25, 0, 3)], tokenizer)
    assert weighted(example, tokenizer) == [(0.25, "0!<|im_end|>"), (3.0, "2!<|im_end|>")]


def test_turns_of_weight_0_at_the_end_are_left_out(examples):
    tokenizer = chat_tokenizer()
    (example,) = examples([turns_of(1, 0)], tokenizer)
    (short,) = examples([turns_of(1)], tokenizer)
    assert example.response_ids == short.response_ids and example.weights == short.weights


def test_turns_of_weight_0_are_no_examples_of_their_own(examples):
    tokenizer = chat_tokenizer()
    data = examples([turns_of(0.5, 0, 2)], tokenizer, turns="each")
    assert [weighted(e, tokenizer) for e in data] == [
        [(0.5, "0!<|im_end|>")],
        [(2.0, "2!<|im_end|>")],
    ]


def test_weights_of_turns_hold_where_the_template_marks_its_turns(examples):
    tokenizer = chat_tokenizer(GENERATION.replace("{% if loop.last %}!{% endif %}", ""))
    (example,) = examples([turns_of(0.5, 1)], tokenizer)
    assert weighted(example, tokenizer) == [(0.5, "0!<|im_end|>"), (1.0, "1!<|im_end|>")]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (turns_of(0, 0), "line 1: every turn has weight 0"),
        (turns_of(-1), "line 1, message 2: weight is -1, below 0"),
        (turns_of("much"), "line 1, message 2: weight is 'much', not a finite number"),
        (
            {"messages": [{**TALK[1], "weight": 0.5}, TALK[2]]},
            "line 1, message 1: weight 0.5 of a message of 'user'",
        ),
        ({"prompt": "a", "response": "b", "sample_weight": 0}, "line 1: sample_weight is 0"),
        ({"prompt": "a", "response": "b", "example_weight": "x"}, "example_weight is 'x'"),
    ],
)
def test_a_bad_weight_is_refused_with_its_place(examples, row, problem):
    with pytest.raises(DataError, match=problem):
        examples([row])


def test_flags_of_other_roles_are_read_past(examples):
    tokenizer = chat_tokenizer()
    flagged = [{**m, "train": m["role"] == "assistant"} for m in TALK[:5]]
    (example,) = examples([{"messages": flagged}], tokenizer)
    (plain,) = examples([{"messages": TALK[:5]}], tokenizer)
    assert (example.prompt_ids, example.response_ids, example.weights) == (
        plain.prompt_ids,
        plain.response_ids,
        plain.weights,
    )


def test_a_row_has_a_weight_that_all_of_its_examples_share(examples):
    rows = [{**turns_of(1, 1), "example_weight": 2.5}, turns_of(1, 1)]
    assert [e.weight for e in examples(rows, turns="each")] == [2.5, 2.5, 1.0, 1.0]
    rows = [{"prompt": "a", "response": "b", "weight": 4}]
    assert [e.weight for e in examples(rows)] == [1.0]
    assert [e.weight for e in examples(rows, columns={"weight": "weight"})] == [4.0]


def test_the_loss_may_be_on_all_tokens_but_the_first(examples):
    tokenizer = chat_tokenizer()
    (example,) = examples([{"messages": TALK}], tokenizer, loss_on="all")
    (masked,) = examples([{"messages": TALK}], tokenizer)
    whole = masked.prompt_ids + masked.response_ids
    assert (example.prompt_ids, example.response_ids) == (whole[:1], whole[1:])
    assert set(example.weights) == {1.0}


def test_on_all_tokens_a_turn_keeps_its_weight(examples):
    tokenizer = chat_tokenizer()
    (example,) = examples([turns_of(0.5, 1)], tokenizer, loss_on="all")
    runs = weighted(example, tokenizer)
    assert [run for run in runs if run[0] != 1.0] == [(0.5, "0!<|im_end|>")]
    assert runs[0] == (1.0, "user\n0?<|im_end|>\n<|im_start|>assistant\n")


def test_a_text_without_a_response_is_learned_as_a_whole(examples):
    tokenizer = bos_tokenizer()
    settings = {"loss_on": "all", "apply_chat_template": False, "columns": {"prompt": "text"}}
    (example,) = examples([{"text": "a story"}], tokenizer, **settings)
    assert spans(example, tokenizer) == [(False, "<s>"), (True, "a story</s>")]


@pytest.mark.parametrize("turns", ["last", "each"])
def test_the_loss_on_all_tokens_goes_with_all_turns_only(turns):
    with pytest.raises(ValueError, match=r"loss_on = 'all'.*set turns: all"):
        SFTDataConfig(loss_on="all", turns=turns)


def test_a_cut_example_keeps_the_weights_of_what_is_left(examples):
    tokenizer = chat_tokenizer()
    (whole,) = examples([turns_of(0.5, 2)], tokenizer)
    size = len(whole.prompt_ids) + len(whole.response_ids)
    (cut,) = examples(
        [turns_of(0.5, 2)], tokenizer, max_tokens=size - 1, overlong_prompts="truncate"
    )
    assert cut.weights == whole.weights[:-1]


def test_examples_know_their_data_source(examples, tmp_path):
    rows = [
        {"prompt": "a", "response": "b", "data_source": "x"},
        {"prompt": "a", "response": "b"},
        {"prompt": "a", "response": "b", "data_source": "x"},
    ]
    cached = {"token_cache": str(tmp_path / "tokens"), "token_cache_min_mb": 0.0}
    for data in (examples(rows), examples(rows, **cached), examples(rows, **cached)):
        assert list(data.data_sources) == ["x", "rows"]
        assert [e.data_source for e in data] == ["x", "rows", "x"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_trained_turn_of_a_published_format_ends_where_the_engine_stops(examples, name):
    tokenizer = PUBLISHED[name].tokenizer()
    said = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "one"}]
    # harmony ends its last turn in another token than earlier ones
    turns = "each" if name == "harmony" else "all"
    found = examples([{"messages": [*said, *said]}], tokenizer, turns=turns)
    ends = set(model_ends(tokenizer, ()))
    count = 0
    for example in found:
        masks = [*example.trained, False]
        for token, now, then in zip(example.response_ids, masks, masks[1:]):
            count += now and not then
            assert not (now and not then) or token in ends
    assert count == 2


def test_the_mark_of_the_next_message_ends_a_turn_where_the_template_closes_none(examples):
    tokenizer = PUBLISHED["glm4.5"].tokenizer()
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    talk = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    (example,) = examples([{"messages": talk}], tokenizer)
    trained = [text for is_trained, text in spans(example, tokenizer) if is_trained]
    ends = ["</tool_call><|observation|>", "one<|user|>", "</tool_call><|observation|>"]
    assert [text[-len(end) :] for text, end in zip(trained, ends, strict=True)] == ends


@pytest.mark.parametrize(
    "spelled", ["<|im_end|>", "<|im_end|>\n", "<|endoftext|>", "<|im_end|> <|im_end|>"]
)
@pytest.mark.parametrize("special_tokens", ["text", "control"])
def test_an_end_token_that_a_response_spells_is_trained_once(examples, spelled, special_tokens):
    tokenizer = PUBLISHED["chatml"].tokenizer()
    rows = [
        {"prompt": "1+1?", "response": f"2{spelled}"},
        {
            "messages": [
                {"role": "user", "content": "1+1?"},
                {"role": "assistant", "content": f"2{spelled}"},
            ]
        },
    ]
    for example in examples(rows, tokenizer, special_tokens=special_tokens):
        assert tokenizer.decode(example.response_ids) == "2<|im_end|>"
        assert len(example.response_ids) == 2 and all(example.trained)


def test_an_end_token_inside_a_response_or_of_a_user_stays_text(examples):
    tokenizer = PUBLISHED["chatml"].tokenizer()
    (example,) = examples([{"prompt": "1<|im_end|>", "response": "a <|im_end|> b"}], tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert example.prompt_ids.count(end) == 1 and example.response_ids.count(end) == 1
    assert tokenizer.decode(example.response_ids) == "a <|im_end|> b<|im_end|>"
