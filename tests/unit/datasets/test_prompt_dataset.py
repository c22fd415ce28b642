import json
import pickle
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.config.data import DataConfig
from lightrft.datasets.encoded_dataset import blend, unique_names
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.sampler import PromptSampler
from lightrft.types import Prompt
from lightrft.utils.errors import CheckpointError, ConfigError, DataError
from tests.unit.datasets.tokenizers import WITH_TOOLS, chat_tokenizer

TOKENIZER = chat_tokenizer()
# Tokens that the chat template adds: a special token is one token.
FRAME = len("<user\n>\n<assistant\n")


@pytest.fixture
def source(tmp_path):
    def write(rows, name="rows"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
        return str(path)

    return write


def dataset(sources, seed=0, **config):
    return PromptDataset(
        DataConfig.model_validate({"sources": sources, **config}), TOKENIZER, seed=seed
    )


def test_a_prompt_carries_its_row(source):
    path = source(
        [
            {"question": "1+1=?", "answer": "2", "level": 3},
            {"question": "2+2=?", "answer": "4", "id": "x", "data_source": "y"},
        ]
    )
    first, second = list(dataset(path))
    assert first == Prompt(
        id="rows/0",
        token_ids=TOKENIZER.apply_chat_template(
            [{"role": "user", "content": "1+1=?"}], add_generation_prompt=True
        )["input_ids"],
        text="<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n",
        label="2",
        reference="2",
        data_source="rows",
        columns={"level": 3},
        request=[{"role": "user", "content": "1+1=?"}],
    )
    assert (second.id, second.data_source, second.label) == ("x", "y", "4")


def test_the_last_answer_of_a_conversation_is_its_reference(source):
    messages = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]
    assert dataset(source([{"messages": messages}]))[0].reference == "2"


def test_equal_ids_of_rows_become_different(source):
    path = source(
        [{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}, {"prompt": "c", "id": "x~2"}]
    )
    assert [p.id for p in dataset(path)] == ["x", "x~3", "x~2"]


@given(st.lists(st.sampled_from(["a", "a~2", "a~3", "b"])))
def test_unique_names_are_unique_and_stable(names):
    given_names = unique_names(names)
    assert len(set(given_names)) == len(names)
    assert unique_names(names) == given_names


def test_overlong_prompts_are_dropped_and_counted(source):
    path = source([{"prompt": "a" * n} for n in (5, 6, 7, 20)])
    data = dataset(path, max_prompt_tokens=FRAME + 6)
    assert [p.columns | {"n": len(p.token_ids)} for p in data] == [
        {"n": FRAME + 5},
        {"n": FRAME + 6},
    ]
    assert (data.counts["rows"], data.counts["overlong"], data.counts["prompts"]) == (4, 2, 2)


def test_an_overlong_prompt_can_be_an_error_that_names_row_and_setting(source):
    path = source([{"prompt": "a"}, {"prompt": "a" * 9}])
    with pytest.raises(
        DataError,
        match=rf"line 2: {FRAME + 9} tokens, more than data\.max_prompt_tokens = {FRAME + 6}.*overlong",
    ):
        dataset(path, max_prompt_tokens=FRAME + 6, overlong_prompts="error")


def test_truncation_cuts_the_start_of_the_question_and_leaves_the_template_whole(source):
    path = source(
        [
            {"prompt": "0123456789"},
            {"prompt": "ab"},
            {"messages": [{"role": "user", "content": "<|im_end|>6789"}]},
        ]
    )
    data = dataset(path, max_prompt_tokens=FRAME + 4, overlong_prompts="truncate")
    assert [p.text.split("\n")[1] for p in data] == [
        "6789<|im_end|>",
        "ab<|im_end|>",
        "6789<|im_end|>",
    ]
    assert all(p.token_ids == TOKENIZER(p.text)["input_ids"] for p in data)
    assert (data.counts["truncated"], data.counts["overlong"]) == (2, 0)


def test_what_no_cut_can_shorten_enough_is_dropped(source):
    path = source([{"prompt": "0123456789"}])
    with pytest.raises(
        DataError,
        match=r"nothing is left of .*rows\.jsonl \(1 rows, 0 malformed, 1 overlong\); the first: .*line 1",
    ):
        dataset(path, max_prompt_tokens=FRAME, overlong_prompts="truncate")


def test_bad_rows_are_skipped_and_counted_when_told_so(source):
    path = source(
        [
            {"prompt": "a"},
            "not json",
            {"prompt": ""},
            {"text": "b"},
            {"messages": [{"from": "x"}]},
            {"prompt": "c"},
        ]
    )
    data = dataset(path, bad_rows="skip")
    assert [p.id for p in data] == ["rows/0", "rows/4"]
    assert (data.counts["malformed"], data.counts["prompts"]) == (4, 2)
    with pytest.raises(DataError, match="line 2"):
        dataset(path)


def test_nothing_left_says_why(source):
    with pytest.raises(
        DataError,
        match=r"nothing is left of .* \(2 rows, 2 malformed, 0 overlong\); the first: .*no column 'x'",
    ):
        dataset(
            source([{"prompt": "a"}, {"prompt": "b"}]), bad_rows="skip", columns={"prompt": "x"}
        )
    with pytest.raises(ConfigError, match=r"data\.sources is empty"):
        dataset([])


def test_spelled_special_tokens_are_counted(source):
    assert (
        dataset(source([{"prompt": "a<|im_end|>"}, {"prompt": "b"}])).counts["special_tokens"] == 1
    )


def test_a_data_set_pickles(source):
    data = dataset(source([{"prompt": "a"}, {"prompt": "b"}]))
    assert list(pickle.loads(pickle.dumps(data))) == list(data)


def sources_of(source, sizes, weights):
    files = [
        source([{"prompt": f"{k} {i}"} for i in range(n)], f"s{k}") for k, n in enumerate(sizes)
    ]
    return [{"path": f, "weight": w} for f, w in zip(files, weights)]


def test_concat_takes_every_row_once(source):
    assert [p.id for p in dataset(sources_of(source, [2, 3], [1, 1]))] == [
        "s0/0",
        "s0/1",
        "s1/0",
        "s1/1",
        "s1/2",
    ]


def test_sampling_ends_with_the_first_source_and_keeps_the_shares(source):
    data = dataset(sources_of(source, [600, 3000], [1, 3]), blend="sample")
    drawn = Counter(p.data_source for p in data)
    assert drawn["s0"] == 600
    # 2400 draws: four standard errors are 0.035.
    assert drawn["s0"] / len(data) == pytest.approx(0.25, abs=0.03)
    assert data[len(data) - 1].data_source == "s0"
    assert len({p.id for p in data}) == len(data)


def test_sampling_all_sees_every_row_and_repeats_the_short_source(source):
    data = dataset(sources_of(source, [50, 400], [1, 1]), blend="sample_all")
    ids = [p.id for p in data]
    assert {f"s1/{i}" for i in range(400)} | {f"s0/{i}" for i in range(50)} <= set(ids)
    assert len(set(ids)) == len(ids)
    assert Counter(p.data_source for p in data)["s0"] / len(data) == pytest.approx(0.5, abs=0.08)


def test_a_blend_is_a_function_of_the_seed(source):
    spec = sources_of(source, [40, 40], [1, 2])
    orders = [[p.id for p in dataset(spec, seed, blend="sample")] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.2, 5)), min_size=1, max_size=4),
    st.sampled_from(["concat", "sample", "sample_all"]),
    st.booleans(),
    st.integers(0, 2**40),
)
def test_a_blend_keeps_its_promise(parts, mode, shuffle, seed):
    lengths, weights = [n for n, _ in parts], [w for _, w in parts]
    order = blend(lengths, weights, mode, shuffle=shuffle, seed=seed).tolist()
    counts = Counter(order)
    starts = [sum(lengths[:k]) for k in range(len(lengths) + 1)]
    taken = [[counts[i] for i in range(starts[k], starts[k + 1])] for k in range(len(lengths))]
    for rows in taken:
        assert max(rows) - min(rows) <= 1  # a pass over a source ends before the next begins
    if mode == "concat":
        assert order == list(range(sum(lengths)))
    elif mode == "sample":
        assert max(counts.values()) == 1 and any(all(rows) for rows in taken)
    else:
        assert all(all(rows) for rows in taken)


def test_an_epoch_is_a_permutation_that_seed_and_epoch_decide():
    first = PromptSampler(50, seed=3, shuffle=True)
    epochs = [first.next(50) for _ in range(3)]
    assert all(sorted(e) == list(range(50)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    later = PromptSampler(50, seed=3, shuffle=True)
    assert later.order(2).tolist() == epochs[2]
    assert later.order(0).tolist() == epochs[0]
    assert PromptSampler(50, seed=4, shuffle=True).next(50) != epochs[0]
    assert PromptSampler(4, seed=3, shuffle=False).next(6) == [0, 1, 2, 3, 0, 1]


@given(
    st.integers(1, 9),
    st.lists(st.integers(0, 12), max_size=6),
    st.lists(st.integers(0, 12), max_size=6),
    st.booleans(),
)
def test_a_resumed_sampler_goes_on_as_if_never_stopped(length, before, after, shuffle):
    whole = PromptSampler(length, 5, shuffle)
    for k in before:
        whole.next(k)
    resumed = PromptSampler(length, 5, shuffle)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert [resumed.next(k) for k in after] == [whole.next(k) for k in after]
    assert resumed.state_dict() == whole.state_dict()


@given(st.integers(1, 9), st.lists(st.integers(0, 12), max_size=8))
def test_how_many_are_taken_at_a_time_changes_nothing(length, takes):
    apart, together = PromptSampler(length, 5, True), PromptSampler(length, 5, True)
    assert [i for k in takes for i in apart.next(k)] == together.next(sum(takes))


def test_a_state_of_other_data_is_refused():
    with pytest.raises(CheckpointError, match="prompt 9 of epoch 0, but the data has 4 prompts"):
        PromptSampler(4, 0, True).load_state_dict({"epoch": 0, "position": 9})


def seconds(work):
    """The least processor time of three goes."""

    def once():
        start = time.process_time()
        work()
        return time.process_time() - start

    return min(once() for _ in range(3))


def test_preparing_a_whole_benchmark_costs_little_more_than_its_tokenisation():
    made = []
    whole = seconds(lambda: made.append(dataset({"path": "data/gsm8k", "reader": "gsm8k"})))
    data = made.pop()
    assert len(data) == 7473
    texts = [data[i].text for i in range(1000)]
    part = seconds(lambda: TOKENIZER(texts, add_special_tokens=False))
    assert whole < 4 * 7.473 * part


def test_tools_of_a_row_reach_the_prompt(source):
    tokenizer = chat_tokenizer(WITH_TOOLS)
    tools = [{"name": "look_up", "parameters": {"word": {"type": "string"}}}]
    path = source([{"prompt": "1?", "tools": json.dumps(tools)}])
    prompt = PromptDataset(DataConfig(sources=[path]), tokenizer, seed=0)[0]
    messages = [{"role": "user", "content": "1?"}]
    expected = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    assert prompt.token_ids == expected["input_ids"] and "look_up" in prompt.text
    # rewards can read them
    assert prompt.columns == {"tools": json.dumps(tools)}


def test_without_a_chat_template_a_column_of_tools_is_a_column_like_any_other(source):
    path = source([{"prompt": "1?", "tools": "a hammer"}])
    prompt = dataset(path, template="{tools}: {prompt}", apply_chat_template=False)[0]
    assert prompt.text == "a hammer: 1?"
