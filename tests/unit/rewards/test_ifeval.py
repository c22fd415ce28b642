"""Every instruction of IFEval: a response that follows it, and one that does not."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lightrft.rewards.rules.ifeval import checks
from lightrft.rewards.rules.ifeval.checks import LANGUAGE_CHECKS
from lightrft.rewards.rules.ifeval.rule import CHECKS, ifeval
from lightrft.rewards.sandbox.rollout_view import PromptView, RolloutView

Options = dict[str, Any]

TABLE: dict[str, list[tuple[Options, list[str], list[str]]]] = {
    "keywords:existence": [
        ({"keywords": ["fish", "Sea"]}, ["A FISH of the sea"], ["a fish", "the sea"])
    ],
    "keywords:frequency": [
        (
            {"keyword": "fish", "frequency": 2, "relation": "at least"},
            ["Fish and fish", "fish fish fish"],
            ["one fish"],
        ),
        (
            {"keyword": "fish", "frequency": 2, "relation": "less than"},
            ["one fish", "none"],
            ["fish, fish"],
        ),
    ],
    "keywords:forbidden_words": [
        ({"forbidden_words": ["cat", "c++"]}, ["a category"], ["A Cat.", "no CAT"])
    ],
    "keywords:letter_frequency": [
        (
            {"letter": "e", "let_frequency": 2, "let_relation": "at least"},
            ["Eve"],
            ["end"],
        ),
        (
            {"letter": "!", "let_frequency": 1, "let_relation": "less than"},
            ["calm"],
            ["loud!"],
        ),
    ],
    "length_constraints:number_words": [
        ({"num_words": 3, "relation": "at least"}, ["one, two: three"], ["one - two"]),
        ({"num_words": 3, "relation": "less than"}, ["one two"], ["one two three"]),
    ],
    "length_constraints:number_paragraphs": [
        (
            {"num_paragraphs": 2},
            ["one\n***\ntwo", "***\none\n***\ntwo\n***"],
            ["one", "one\n***\n***\ntwo", "one\n\ntwo", "a *** b *** c"],
        )
    ],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
            ["One.\n\nThen two.", 'One.\n\n\n"Then", two.', "One.\n\n'\"then, two\n\n\n\n"],
            [
                *("Then.\n\nOne.", "One.\n\nThen.\n\nThree.", "Then.", "One.\n\nThence two."),
                *("One.\n\n\n\nThen two.", "One.\n\n\"'then' two", "One.\n\n**Then** two."),
            ],
        )
    ],
    "detectable_content:number_placeholders": [
        ({"num_placeholders": 2}, ["[name] at [place]"], ["[name]", "none"])
    ],
    "detectable_content:postscript": [
        (
            {"postscript_marker": "P.S."},
            ["Bye.\nP.S. more", "bye\np. s. more"],
            ["Bye.", "PS", "p .s. more", "P.S more"],
        ),
        ({"postscript_marker": "P.P.S"}, ["Bye.\nP.P.S more"], ["Bye.\nP.S. more"]),
    ],
    "detectable_format:number_bullet_lists": [
        (
            {"num_bullets": 2},
            [
                *("* one\n* two", "Points:\n- one\n  - two", "* one\n- two", "* \n* b"),
                *("* one\n---", "\u00a0* eins\r\n\t- zwei\r\n", "```\n- a\n```\n-1"),
            ],
            [
                *("* one", "* a\n* b\n* c", "**bold**\n* one", "*\n* b", "• one\n• two"),
                *("1. one\n2. two", "– one\n– two", "- one\n---\n- two"),
            ],
        )
    ],
    "detectable_format:constrained_response": [
        ({}, ["My answer is yes.", "Well. My answer is maybe."], ["yes", "My answer is yes"])
    ],
    "detectable_format:number_highlighted_sections": [
        (
            {"num_highlights": 2},
            ["*one* and *two*", "**one** and *two*", "**one** **two**"],
            ["*one*", "**one**", "** ** and *one*", "2 * 3"],
        )
    ],
    "detectable_format:multiple_sections": [
        (
            {"section_spliter": "Section", "num_sections": 2},
            ["Section 1\na\nSection 2\nb", "## Section1\n**Section 2:**"],
            ["Section 1\na", "a Section b Section", "section 1 section 2", "Section I Section II"],
        ),
        ({"section_spliter": " Day ", "num_sections": 1}, ["Day 1"], ["Today", "Day one"]),
    ],
    "detectable_format:json_format": [
        (
            {},
            ['{"a": 1}', '"名"', "[1]\n```", '```json\n{"a": 1}\n```', "```\n[1]\n```"],
            ["{a: 1}", "Here: {}", "```jSON\n1```", "```json\n{}\n```\nDone.", "{'a': 1}"],
        )
    ],
    "detectable_format:title": [
        (
            {},
            ["<<A title>>\ntext"],
            ["<A title>", "<< >>", "<<>>", "<<\u00a0>>", "<<a\nb>>", "《题》"],
        )
    ],
    "combination:two_responses": [
        (
            {},
            ["one\n******\ntwo", "******\none\n******\ntwo"],
            ["one", "one\n******\none", "one******two******three", "one************two"],
        )
    ],
    "combination:repeat_prompt": [
        ({"prompt_to_repeat": "Say this. "}, ["Say this. Here it is."], ["Here: Say this."])
    ],
    "startend:end_checker": [
        ({"end_phrase": "Any questions?"}, ['Bye. "any questions?" '], ["Any questions? No."])
    ],
    "startend:quotation": [({}, [' "all of it" '], ['"a" b', "'a'", '"'])],
    "change_case:capital_word_frequency": [
        (
            {"capital_frequency": 2, "capital_relation": "at least"},
            [
                "A BIG day",
                "DON'T SHOUT",
                "NASA's and the U.S.A.",
                "**Ja**, ÜBER ALL",
                "A--B",
                "A, B",
            ],
            ["BIG day", "Big Day", "A/B or a/B", "X=Y", "COVID-19", "**BOLD**", "大 小"],
        ),
        ({"capital_frequency": 1, "capital_relation": "less than"}, ["quiet"], ["LOUD"]),
    ],
    "change_case:english_capital": [({}, ["ALL OF IT, 2!"], ["All of it", "2"])],
    "change_case:english_lowercase": [({}, ["all of it, 2!"], ["All of it", "2"])],
    "punctuation:no_comma": [({}, ["one; two"], ["one, two"])],
}
CASES = [
    (name, options, text, follows)
    for name, rows in TABLE.items()
    for options, right, wrong in rows
    for texts, follows in ((right, 1.0), (wrong, 0.0))
    for text in texts
]


def graded(text: str, names: list[str], options: list[Options], **given: bool) -> dict[str, float]:
    columns = {"instruction_id_list": names, "kwargs": options}
    prompt = PromptView("p", [1], "asked", None, None, "ifeval", columns)
    view = RolloutView(prompt, [1], [True], [0.0], [0], "stop", 0, 0, text)
    return ifeval(view, **given)


def test_all_25_instructions_are_checked() -> None:
    assert len(CHECKS) == 25
    assert {*TABLE, *LANGUAGE_CHECKS} == set(CHECKS)


LANGUAGE, SENTENCES = LANGUAGE_CHECKS


@pytest.mark.parametrize(
    ("text", "language", "follows"),
    [
        ("Die Sonne scheint heute über den Bergen und dem See.", "de", 1.0),
        ("Die Sonne scheint heute über den Bergen und dem See.", "en", 0.0),
        ("The sun shines on the mountains and on the lake today.", "en", 1.0),
        ("12 34", "fr", 1.0),
    ],
)
def test_the_language_of_a_response_is_detected(text: str, language: str, follows: float) -> None:
    assert graded(text, [LANGUAGE], [{"language": language}])["strict"] == follows


def test_sentences_are_counted_by_the_model_of_nltk(sentence_model: None) -> None:
    text = "One came. Two left! Why?"
    for relation, count, follows in (
        ("at least", 3, 1.0),
        ("at least", 4, 0.0),
        ("less than", 4, 1.0),
        ("less than", 3, 0.0),
    ):
        options: Options = {"relation": relation, "num_sentences": count}
        assert graded(text, [SENTENCES], [options])["strict"] == follows


def test_a_check_without_its_library_or_data_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    checks._sentence_model.cache_clear()
    options: list[Options] = [{"relation": "at least", "num_sentences": 1}, {}]
    names = [SENTENCES, "punctuation:no_comma"]
    with pytest.raises(ValueError, match=r"number_sentences.*nltk.downloader punkt_tab"):
        graded("One. Two.", names, options)
    found = graded("One. Two.", names, options, skip_unchecked=True)
    assert (found["reward"], found["instructions"], found["unchecked"]) == (1.0, 1.0, 1.0)
    checks._detector.cache_clear()
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(ValueError, match=r"response_language.*pip install -e '\.\[ifeval\]'"):
        graded("One. Two.", [LANGUAGE], [{"language": "en"}])
    checks._detector.cache_clear()


@pytest.mark.parametrize(("name", "options", "text", "follows"), CASES)
def test_an_instruction_is_followed_or_not(
    name: str, options: Options, text: str, follows: float
) -> None:
    # Parquet fills the arguments of other instructions with null.
    found = graded(text, [name], [{**options, "other": None}])
    assert found["strict"] == found["reward"] == found["followed_strict"] == follows


def test_all_instructions_must_be_followed_and_each_is_counted() -> None:
    names = ["punctuation:no_comma", "change_case:english_lowercase"]
    found = graded("One; two", names, [{}, {}])
    assert (found["reward"], found["followed_strict"], found["instructions"]) == (0.0, 1.0, 2.0)
    assert graded("one; two", names, [{}, {}])["reward"] == 1.0


def test_a_loose_check_forgives_a_first_or_last_line_and_asterisks() -> None:
    names, options = ["startend:quotation"], [{}]
    for text in ('Sure:\n"yes"', '"yes"\nDone.', 'Sure:\n"yes"\nDone.', '*"yes"*'):
        found = graded(text, names, options)
        assert (found["strict"], found["loose"], found["reward"]) == (0.0, 1.0, 0.0)
        assert graded(text, names, options, loose=True)["reward"] == 1.0
    assert graded("no", names, options)["loose"] == 0.0


def test_a_blank_response_follows_nothing_and_thinking_does_not_count() -> None:
    names, options = ["punctuation:no_comma"], [{}]
    assert graded(" \n", names, options)["loose"] == 0.0
    assert graded("<think>a, b</think>c", names, options)["strict"] == 1.0


def test_a_response_of_opening_brackets_is_not_json() -> None:
    assert graded("[" * 100_000, ["detectable_format:json_format"], [{}])["reward"] == 0.0


def test_a_loose_check_after_thinking_leaves_out_the_first_line_of_the_answer() -> None:
    names, options = ["startend:quotation"], [{}]
    text = '<think>Quote it.</think>\n\nSure:\n"yes"\n'
    assert graded(text, names, options)["loose"] == 1.0


@pytest.mark.parametrize(
    ("names", "options", "said"),
    [
        ([], [], "set the source's reader: ifeval"),
        (["punctuation:no_comma"], [], "lists of one length"),
        (["punctuation:none"], [{}], "instruction 'punctuation:none' is unknown"),
        (["keywords:existence"], [{}], "needs the argument 'keywords'"),
        (
            ["length_constraints:number_words"],
            [{"num_words": 3, "relation": "around"}],
            "relation 'around' is neither",
        ),
    ],
)
def test_rows_that_cannot_be_checked_are_refused(
    names: list[str], options: list[Options], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        graded("text", names, options)
