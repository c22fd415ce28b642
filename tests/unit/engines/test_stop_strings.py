"""Stop strings over a byte-level tokenizer: any cutting of the text into tokens finds the first stop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lightrft.config.strategy import SamplingConfig
from lightrft.engines.stop_strings import StopStrings, end_ids


def byte_level() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=alphabet,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(
        ["so the answer is </answer>\n\n here, é é 猫 <answer> the end."] * 5, trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        bos_token="<s>",
        clean_up_tokenization_spaces=False,
    )


TOKENIZER = byte_level()
BYTES = [i for i in range(len(TOKENIZER)) if len(TOKENIZER.convert_ids_to_tokens(i)) == 1]
PIECES = st.one_of(
    st.sampled_from(range(2, len(TOKENIZER))).map(lambda i: [i]),
    st.sampled_from(
        ["</answer>", "the end.", "猫", "é ", "\n\n", "</ans", "the", "a", ">", "\n"]
    ).map(TOKENIZER.encode),
    st.sampled_from(["猫", "é", "</answer>"]).map(
        lambda s: [TOKENIZER.convert_tokens_to_ids(c) for c in byte_letters(s)]
    ),
    st.just([0]),
)


def byte_letters(text: str) -> str:
    """The byte-level alphabet's letter of each byte."""
    [(word, _)] = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(text)
    return word


def scan(tokens: list[int], stop: tuple[str, ...]) -> tuple[int, str] | None:
    """Number of tokens and text at the first stop: decodes everything after every token."""
    for n in range(1, len(tokens) + 1):
        text = TOKENIZER.decode(tokens[:n], skip_special_tokens=True)
        found = [text.find(s) for s in stop if s in text]
        if found:
            return n, text[: min(found)]
    return None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(PIECES, min_size=1, max_size=25).map(
        lambda parts: [t for part in parts for t in part]
    ),
    st.lists(
        st.sampled_from(["</answer>", "the end.", "猫", "é ", "\n\n", "a", "s>\n"]),
        min_size=1,
        max_size=3,
    ).map(tuple),
)
def test_the_first_stop_is_found_at_its_last_token_wherever_tokens_are_cut(
    tokens: list[int], stop: tuple[str, ...]
) -> None:
    stops = StopStrings(TOKENIZER, stop)
    got = None
    for n in range(1, len(tokens) + 1):
        if stops.may_end(tokens[n - 1]):
            text = stops.cut(np.array(tokens[:n]))
            if text is not None:
                got = n, text
                break
    assert got == scan(tokens, stop)


def test_only_tokens_that_may_end_a_stop_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = StopStrings(TOKENIZER, ("</answer>",))
    answer = TOKENIZER.encode("so the end")
    assert not any(stops.may_end(t) for t in answer)
    monkeypatch.setattr(stops, "_decode", None)
    assert not any(stops.may_end(t) for t in answer)
    assert stops.may_end(TOKENIZER.encode(">")[0])


def test_a_stop_string_may_spell_special_tokens():
    the, end, space = TOKENIZER.encode("the")[0], TOKENIZER.eos_token_id, TOKENIZER.encode("\n")[0]
    alone = StopStrings(TOKENIZER, ("</s>",))
    assert alone.may_end(end) and not alone.may_end(TOKENIZER.bos_token_id)
    assert alone.match(np.array([the, end])) == ("the", "</s>")
    assert alone.match(np.array([the, end, the])) is None
    within = StopStrings(TOKENIZER, ("e</s>\n", "none"))
    assert within.match(np.array([the, end, space])) == ("th", "e</s>\n")
    assert within.match(np.array([the, space])) is None
    # other special tokens stay out of the text
    assert within.match(np.array([0, the, 0, end, space])) == ("th", "e</s>\n")


def test_special_tokens_of_stop_are_end_tokens():
    sampling = SamplingConfig(stop=("</s>", "x</s>", "the"), stop_token_ids=(7,))
    assert end_ids(TOKENIZER, [9], sampling) == [TOKENIZER.eos_token_id, 7, 9]
    assert end_ids(TOKENIZER, [9], SamplingConfig()) == [9]
