"""Rule rewards against tables of answers that were graded by hand."""

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.rewards import REWARDS
from lightrft.rewards.rules.math import final_answer
from lightrft.rewards.rules.multiple_choice import picked
from lightrft.rewards.sandbox.rollout_view import PromptView, RolloutView, view_of
from lightrft.types import Prompt, Rollout


def answer(text, label=None, reference=None, tokens=3):
    prompt = PromptView(
        "p0",
        [1],
        r"Put your answer in \boxed{42} <answer>42</answer> #### 42",
        label,
        reference,
        "",
        {},
    )
    return RolloutView(
        prompt, [7] * tokens, [True] * tokens, [0.0] * tokens, [0] * tokens, "stop", 0, 0, text
    )


def grade(name, text, label=None, **options):
    return REWARDS[name](answer(text, label), **options)


def test_what_a_reward_sees_has_every_field_of_a_rollout_but_media_and_what_scoring_fills():
    names = lambda kind: {f.name for f in dataclasses.fields(kind)}  # noqa: E731
    assert names(RolloutView) == names(Rollout) - {
        "reward",
        "baseline",
        "terms",
        "weights",
        "failed",
        "step_rewards",
        # what servers send
        "plain",
        # how it was generated, not what
        "experts",
        "drafted",
        "accepted",
        "reused_tokens",
    }
    # a property of a prompt
    assert names(PromptView) - {"begun"} == names(Prompt) - {"media", "attachments", "request"}
    prompt = Prompt("a", [1], "b", "c", "d", "e", {"f": 1})
    seen = view_of(Rollout(prompt, [2], [True], [-1.0], [3], "stop", 4, 5, "g"))
    assert seen == RolloutView(
        PromptView("a", [1], "b", "c", "d", "e", {"f": 1}),
        [2],
        [True],
        [-1.0],
        [3],
        "stop",
        4,
        5,
        "g",
    )


@pytest.mark.parametrize(
    ("name", "begun", "text", "label", "score"),
    [
        ("math", r"So it is \boxed{", "18} dollars", "18", 1.0),
        ("math", "The answer is", " 18.", "18", 1.0),
        ("math", r"\boxed{18} or", " 19", "18", 1.0),
        ("exact_match", "<answer>", "18</answer>", "18", 1.0),
        ("multiple_choice", "The answer is (", "B).", "B", 1.0),
        ("format", "<think>First,", " add.</think><answer>2</answer>", None, 1.0),
        ("format", "<think>\n", "Add.</think><answer>2</answer>", None, 1.0),
        ("format", "First,", "<think>add.</think><answer>2</answer>", None, 0.0),
    ],
)
def test_rules_read_the_turn_that_the_prompt_begins(name, begun, text, label, score):
    request = [{"role": "user", "content": "?"}, {"role": "assistant", "content": begun}]
    prompt = Prompt("a", [1], f"?\n{begun}", label, request=request)
    seen = view_of(Rollout(prompt, [2], [True], [-1.0], [3], "stop", 4, 5, text))
    assert (REWARDS[name](seen), seen.turn) == (score, begun + text)


RIGHT = [
    ("12", r"\boxed{\approx 12}"),
    ("12", r"\boxed{\text{about } 12}"),
    ("12", "The answer is approximately 12."),
    ("12", "The answer is about 12 apples."),
    ("12", "答案是约12。"),
    (r"\approx 12", r"\boxed{12}"),
    ("1/3", r"\boxed{0.333\ldots}"),
    ("1/3", "The answer is 0.333..."),
    ("1/6", r"\boxed{0.1666…}"),
    ("2/11", r"\boxed{0.1818\dots}"),
    ("3703/3", r"\boxed{1,234.\overline{3}}"),
    ("(1, 1/3)", r"\boxed{(1,0.\overline{3})}"),
    (r"\emptyset", r"\boxed{\varnothing}"),
    (r"\emptyset", r"\boxed{\text{no solution}}"),
    ("no solutions", r"\boxed{∅}"),
    (r"\varnothing", "The answer is the empty set."),
    ("12 p.m.", r"\boxed{12\text{ PM}}"),
    ("12", "12 p.m."),
    ("12", r"\boxed{12_{10}}"),
    ("1010_2", r"\boxed{1010_{2}}"),
    ("12", r"The answer is $\boxed 12$."),
    ("-1.5", r"\boxed -1.5"),
    ("1/3", r"\boxed{0.\overline{3}}"),
    (r"0.\bar{3}", r"\boxed{\frac13}"),
    ("-7/6", r"\boxed{-1.1\overline{6}}"),
    ("3/4", r"\boxed{¾}"),
    ("3.75", r"\boxed{3¾}"),
    ("1200", r"\boxed{1.2×10³}"),
    ("0.001", r"\boxed{10⁻³}"),
    ("x^2+1", r"\boxed{x²+1}"),
    ("12", r"\boxed{12 cm²}"),
    ("5", r"\boxed{5 = x}"),
    ("18", r"So she makes \boxed{18} dollars."),
    ("18", "She makes 9 * 2 = $18 every day.\n#### 18"),
    ("18", "#### $18"),
    ("18", "#### 18 dollars"),
    ("18", r"\boxed{\$18}"),
    ("18", r"\boxed{18 \text{ dollars}}"),
    ("18", r"\boxed{18.00}"),
    ("18", "18"),
    ("18", "The answer is 18."),
    ("18", "**Final answer:** 18"),
    ("18", "<think>It may be 17.</think><answer>18</answer>"),
    ("18", r"<think>\boxed{17}</think> The result is $\boxed{18}$."),
    (18, r"\boxed{18}"),
    (18.0, r"\boxed{18}"),
    (0.5, r"\boxed{\frac{1}{2}}"),
    ("0.5", r"\boxed{\frac{1}{2}}"),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    (r"\frac12", r"\boxed{1/2}"),
    (r"\dfrac{3}{4}", r"\boxed{\tfrac{6}{8}}"),
    ("1/3", r"\boxed{0.333333}"),
    ("1.5", r"\boxed{1\frac{1}{2}}"),
    ("1234", r"\boxed{1,234}"),
    ("1,234", "#### 1234"),
    ("1234567", r"\boxed{1{,}234{,}567}"),
    ("1,234.50", r"\boxed{\$1234.5}"),
    ("0.5", r"\boxed{50\%}"),
    ("50", r"\boxed{5000\%}"),
    ("50", r"\boxed{50\%}"),
    ("50%", r"\boxed{50}"),
    ("50%", r"\boxed{0.5}"),
    ("50%", r"\boxed{50 \text{ percent}}"),
    ("-3", r"\boxed{−3}"),
    ("5", r"first \boxed{4}, no, wait: \boxed{5}"),
    ("5", "#### 4\nLet me correct that.\n#### 5"),
    ("5", r"\boxed{4} is wrong" + "\n#### 5"),
    ("5", r"\boxed{x = 5}"),
    ("x = 5", r"\boxed{5}"),
    ("5", r"\fbox{5}"),
    ("5", r"\boxed 5"),
    (r"\frac{1}{\sqrt{2}}", r"\boxed{\frac{\sqrt{2}}{2}}"),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
    (r"2\pi", r"\boxed{2π}"),
    ("2x+1", r"\boxed{1 + 2x}"),
    ("x^2-1", r"\boxed{(x-1)(x+1)}"),
    (r"(-\infty, 3]", r"\boxed{\left(-\infty,3\right]}"),
    (r"(-\infty, 3]", r"\boxed{x \le 3}"),
    (r"x \le 3", r"\boxed{(-\infty,3]}"),
    (r"(-\infty,1)\cup(2,\infty)", r"\boxed{(2,\infty) \cup (-\infty,1)}"),
    ("{1,2}", r"\boxed{\{2, 1\}}"),
    (r"\{1, 2\}", r"\boxed{{2,1}}"),
    ("1, 2", r"\boxed{2 \text{ and } 1}"),
    ("1, 2", r"\boxed{x = 2, x = 1}"),
    ("(1,2)", r"\boxed{(1, 2)}"),
    (r"(\frac{1}{2}, 3)", r"\boxed{(0.5, 3)}"),
    ("x=5", r"\boxed{x=5}"),
    (r"\text{blue}", r"\boxed{blue}"),
    ("Tuesday", r"\boxed{\text{tuesday}}"),
    ("C", r"\boxed{\text{(C)}}"),
    ("90", r"\boxed{90^\circ}"),
    (r"90^{\circ}", r"\boxed{90}"),
    ("5", r"\boxed{5 cm}"),
    ("5", r"\boxed{5\,\text{cm}}"),
    ("12 km", r"\boxed{12\text{ kilometers}}"),
    ("3000000", r"\boxed{3 million}"),
    ("1500", r"\boxed{1.5 \times 10^{3}}"),
    ("9^{9^{9}}", r"\boxed{9^{9^{9}}}"),
    (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}}",
    ),
    ("Janet sells 9 <<16-3-4=9>>9 eggs.\n#### 18", r"\boxed{18}"),
    (r"We find that $x = \boxed{7}$.", "#### 7"),
    (r"\frac{\frac{1}{2}}{3}", r"\boxed{\frac{1}{6}}"),
    ("0", r"\boxed{-0}"),
]
WRONG = [
    ("12", r"\boxed{\approx 13}"),
    ("12", "The answer is about 12 dozen."),
    ("12", "The answer is about 12 or 13."),
    (r"\pi", r"\boxed{\approx 3.14}"),
    ("12", "答案是约12万。"),
    ("1/3", r"\boxed{0.334\ldots}"),
    ("1/3", r"\boxed{0.3\ldots}"),
    (r"\sqrt{2}", r"\boxed{1.414\ldots}"),
    ("3.1411", r"\boxed{3.141\overline{1}}"),
    (r"\emptyset", r"\boxed{\{\emptyset\}}"),
    (r"\emptyset", r"\boxed{0}"),
    (r"\emptyset", r"\boxed{\text{one solution}}"),
    ("no solution", r"\boxed{\{0\}}"),
    ("0", r"\boxed{\text{no solution}}"),
    ("12 p.m.", r"\boxed{12\text{ a.m.}}"),
    ("12 PM", r"\boxed{11 PM}"),
    ("1010_2", r"\boxed{1010}"),
    ("1010", r"\boxed{1010_2}"),
    ("1010_2", r"\boxed{10}"),
    ("1010_2", r"\boxed{1010_3}"),
    ("1", r"\boxed 12"),
    ("1/3", r"\boxed{0.\overline{4}}"),
    ("1/3", r"\boxed{0.3\overline{0}}"),
    ("1.210", r"\boxed{1.2×10³}"),
    ("5", r"\boxed{2 + 3 = x, 6}"),
    ("18", ""),
    ("18", "   \n"),
    ("18", r"\boxed{}"),
    ("18", r"\boxed{19}"),
    ("18", "#### 19"),
    ("18", "####"),
    ("18", r"\boxed{18} and then \boxed{19}"),
    ("18", r"\boxed{18} and then \boxed{1"),
    ("18", r"<think>The answer is \boxed{18}.</think>"),
    ("18", r"<think>The answer is \boxed{18}. Now let me"),
    ("18", r"<think>\boxed{18}</think><answer>19</answer>"),
    ("18", "18 or 19"),
    ("18", "She has 18 apples left over, or maybe fewer."),
    ("18", r"\boxed{18 or 19}"),
    ("18", r"\boxed{18, 19}"),
    ("18", r"\boxed{\text{not } 18}"),
    ("18", r"\boxed{18.00001}"),
    ("1000000", r"\boxed{1000001}"),
    ("1234", r"\boxed{1,2,3,4}"),
    ("2", r"\boxed{2x}"),
    ("2", r"\boxed{2\pi}"),
    ("2", r"\boxed{2 pi}"),
    ("3", r"\boxed{3 million}"),
    ("5", r"\boxed{5 out of 10}"),
    ("50%", r"\boxed{0.5\%}"),
    ("50", r"\boxed{500\%}"),
    ("0.5", r"\boxed{\frac{1}{3}}"),
    ("1/3", r"\boxed{0.33}"),
    ("5", r"\boxed{\frac{5}{0}}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    ("(1,2)", r"\boxed{\{1,2\}}"),
    (r"(-\infty, 3]", r"\boxed{(-\infty, 3)}"),
    ("{1,2}", r"\boxed{\{1,2,3\}}"),
    ("{1,2}", r"\boxed{1}"),
    ("blue", r"\boxed{lube}"),
    ("x=5", r"\boxed{y=5}"),
    ("12 km", r"\boxed{12 m}"),
    ("5", r"\boxed{__import__('os').system('echo 5')}"),
    ("5", "__import__('os')"),
    ("5", r"\boxed{exec(\"raise SystemExit\")}"),
    ("5", r"\boxed{9^{9^{9^{9}}}}"),
    ("5", r"\boxed{(10^{9})!}"),
    ("5", r"\boxed{" + "(" * 200 + "}"),
    ("5", r"\boxed{" + "1+" * 5000 + "1}"),
    ("5", r"\boxed{\frac{}{}}"),
    ("5", r"\boxed{5"),
    ("5", "\\boxed{\x00}"),
    ("5", "-5"),
    ("5", r"\boxed{5e400}"),
]


@pytest.mark.parametrize(("label", "text"), RIGHT)
def test_math_accepts(label, text):
    assert grade("math", text, label) == 1.0


@pytest.mark.parametrize(("label", "text"), WRONG)
def test_math_rejects(label, text):
    assert grade("math", text, label) in (0.0, {"reward": 0.0, "ungraded": 1.0})


@pytest.mark.parametrize(
    "label",
    [None, "", "  ", "???", float("nan"), True, ["1"], "####", r"\boxed{}", "not a thing, at all!"],
)
def test_math_never_rewards_a_label_that_it_cannot_read(label):
    for text in (str(label), rf"\boxed{{{label}}}", "5"):
        with pytest.raises(ValueError, match="label"):
            grade("math", text, label)


def test_math_takes_the_reference_when_there_is_no_label():
    assert REWARDS["math"](answer("#### 5", reference="so it is\n#### 5")) == 1.0


@pytest.mark.parametrize(
    ("text", "plain", "evaluated"),
    [
        ("41 + 37 = 78", 1.0, 1.0),
        ("41 + 37 = 78.", 1.0, 1.0),
        ("78", 1.0, 1.0),
        ("\\boxed{78}", 1.0, 1.0),
        ("41 + 37", 1.0, 0.0),
        ("\\boxed{41 + 37}", 1.0, 0.0),
        ("78 = 41 + 37", 1.0, 0.0),
        ("\\boxed{156/2}", 1.0, 1.0),
        ("41 + 37 = 77", 0.0, 0.0),
    ],
)
def test_an_expression_with_the_value_of_the_label_may_be_refused(text, plain, evaluated):
    assert grade("math", text, "78") == plain
    assert grade("math", text, "78", evaluated=True) == evaluated


def test_a_label_that_is_an_expression_takes_expressions():
    assert grade("math", "\\boxed{1 + x}", "x + 1", evaluated=True) == 1.0


def test_the_last_number_counts_only_when_asked_for():
    assert (
        grade("math", "It is $72.", "72"),
        grade("math", "It is $72.", "72", last_number=True),
    ) == (0.0, 1.0)
    text = "She had 20 and gave 2 away, which leaves her with 1,018 in the end"
    assert grade("math", text, "1018") == 0.0
    assert grade("math", text, "1018", last_number=True) == 1.0
    assert grade("math", "no number here", "1018", last_number=True) == 0.0


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_integers_are_equal_only_to_themselves(a, b):
    assert grade("math", f"#### {a:,}", str(a)) == 1.0
    assert grade("math", rf"\boxed{{{b}}}", a) == float(a == b)


@given(st.text(max_size=60))
def test_whatever_is_written_a_final_answer_is_found_or_not_but_nothing_breaks(text):
    found = final_answer(text)
    assert found is None or found in text
    picked(text)
    assert grade("format", text) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "label", "options", "reward"),
    [
        ("Paris", "Paris", {}, 1),
        (" Paris \n", "Paris", {}, 1),
        (" Paris", "Paris", {"ignore_space": False}, 0),
        ("New  York", "New York", {}, 1),
        ("paris", "Paris", {}, 0),
        ("paris", "Paris", {"ignore_case": True}, 1),
        ("Paris.", "Paris", {}, 0),
        ("Paris.", "Paris", {"ignore_punctuation": True}, 1),
        ("The Hague", "Hague", {"ignore_articles": True}, 1),
        ("<think>Rome?</think>\nParis", "Paris", {}, 1),
        ("<think>Paris</think>", "Paris", {}, 0),
        ("I say <answer>Paris</answer>.", "Paris", {}, 1),
        (r"I say \boxed{Paris}.", "Paris", {}, 1),
        ("Paris", ["Paris", "Paname"], {}, 1),
        ("7", 7, {}, 1),
        ("e\u0301", "\u00e9", {}, 1),
        ("", "Paris", {}, 0),
    ],
)
def test_exact_match(text, label, options, reward):
    assert grade("exact_match", text, label, **options) == reward


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("**B**", "B"),
        ("B) Paris", "B"),
        ("B. Paris", "B"),
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{(B)}", "B"),
        (r"\boxed{\text{(B) } 12}", "B"),
        ("The answer is B.", "B"),
        ("The answer is (B).", "B"),
        ("The correct answer is: **B**", "B"),
        ("故选B。", "B"),
        ("正确答案：(B)", "B"),
        ("选项C不对，所以答案是B的说法。", "B"),
        ("La respuesta correcta: A no. La respuesta es (B).", "B"),
        ("答案为B或C", None),
        ("正确答案为A、C", None),
        ("Answer: B", "B"),
        ("ANSWER: $B$", "B"),
        ("**Answer:** B", "B"),
        ("So the correct option is C, not A.", "C"),
        ("The correct choice is option D", "D"),
        ("<think>Answer: A</think> Answer: D", "D"),
        ("<think>Answer: A", None),
        ("<answer>C</answer>", "C"),
        ("Let me see.\nA is wrong.\nC", "C"),
        ("Answer: A\nNo. Answer: C", "C"),
        ("A or B", None),
        ("The answer is A or B.", None),
        ("A. one\nB. two", None),
        ("The answer is Apple", None),
        ("A good question indeed", None),
        ("E", None),
        ("", None),
        ("b", None),
    ],
)
def test_which_choice_an_answer_picks(text, letter):
    assert picked(text) == letter


def test_multiple_choice_compares_with_letters_and_positions():
    assert grade("multiple_choice", "Answer: B", "B") == 1.0
    assert grade("multiple_choice", "Answer: B", "(B)") == 1.0
    assert grade("multiple_choice", "Answer: B", 1) == 1.0
    assert grade("multiple_choice", "Answer: B", "A") == 0.0
    assert grade("multiple_choice", "no idea", "A") == 0.0
    assert grade("multiple_choice", "J", "J", choices="ABCDEFGHIJ") == 1.0
    for label in ("E", "", 4, "A or B"):
        with pytest.raises(ValueError, match="label"):
            grade("multiple_choice", "Answer: A", label)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>why</think><answer>18</answer>", 1),
        ("<think>why\nnot</think>\n\n<answer>\n18\n</answer>\n", 1),
        ("<think>why</think> so <answer>18</answer>", 0),
        ("<answer>18</answer>", 0),
        ("<think></think><answer>18</answer>", 0),
        ("<think>why</think><answer>18</answer> and more", 0),
        ("first <think>why</think><answer>18</answer>", 0),
        ("<think>a</think><answer>1</answer><answer>2</answer>", 0),
        ("<think>a<think>b</think><answer>1</answer>", 0),
        ("<think>why</think><answer>18", 0),
        ("", 0),
    ],
)
def test_the_default_format_is_thinking_then_an_answer(text, reward):
    assert grade("format", text) == reward


def test_a_pattern_must_match_the_whole_answer_and_be_one():
    assert grade("format", "abc", pattern="b") == 0
    assert grade("format", "abc", pattern=".b.") == 1
    with pytest.raises(re.error):
        grade("format", "abc", pattern="(")


def test_the_length_penalty_falls_in_a_straight_line_over_its_buffer():
    rewards = [
        REWARDS["length"](answer("", tokens=n), limit=10, buffer=4) for n in (0, 6, 7, 8, 10, 12)
    ]
    assert rewards == [0, 0, -0.25, -0.5, -1, -1]
    with pytest.raises(ValueError, match="buffer 0"):
        REWARDS["length"](answer(""), limit=10, buffer=0)


def test_the_length_target_costs_the_distance_beyond_its_tolerance():
    rewards = [
        REWARDS["length_target"](answer("", tokens=n), target=10, tolerance=2)
        for n in (0, 5, 8, 10, 12, 13, 40)
    ]
    assert rewards == pytest.approx([-0.8, -0.3, 0, 0, 0, -0.1, -1])
    with pytest.raises(ValueError, match="target 0"):
        REWARDS["length_target"](answer(""), target=0)


def test_every_rule_survives_the_trip_through_json():
    assert json.loads(json.dumps(grade("math", "#### 5", "5"))) == 1.0


OPENED = "<|im_start|>assistant\n<think>\n"
OPENED_TEXTS = [
    (OPENED, "2+2=4</think><answer>4</answer>", 1),
    (OPENED, "2+2=4</think>4", 0),
    (OPENED, "<think>2</think><answer>4</answer>", 0),
    (OPENED, "</think><answer>4</answer>", 1),
    ("Q: <think>", "</think><answer>4</answer>", 0),
    ("assistant\n<think>\n\n</think>\n\n", "<answer>4</answer>", 1),
    ("assistant\n<think>\n\n</think>\n\n", "<think>2</think><answer>4</answer>", 0),
    ("What does <think> mean?", "<think>2</think><answer>4</answer>", 1),
    ("What does <think> mean?", "2</think><answer>4</answer>", 0),
]


@pytest.mark.parametrize(("prompt", "text", "reward"), OPENED_TEXTS)
def test_the_format_is_that_of_the_response_as_the_model_continued_it(prompt, text, reward):
    rollout = answer(text)
    rollout.prompt.text = prompt
    assert REWARDS["format"](rollout) == reward


def test_a_pattern_of_the_user_may_match_with_or_without_the_tag_of_the_prompt():
    rollout = answer("2+2=4</think>4")
    rollout.prompt.text = OPENED
    for pattern in (r".*</think>\d", r"<think>\s.*</think>\d"):
        assert REWARDS["format"](rollout, pattern=pattern) == 1
    assert REWARDS["format"](rollout, pattern=r"\d") == 0


SAID = [
    ("12", "The answer is **12**."),
    ("12", "The answer is __12__."),
    ("12", "The answer is *12*."),
    ("12", "The answer is `12`."),
    ("12", "*12*"),
    ("12", "\ufeff12\u200b"),
    ("12", "The answer would be 12."),
    ("12", "So the answer must be 12 (because 3*4 = 12)."),
    ("12", "The answer equals 12 — as computed."),
    ("12", "The answer is 12 -- done"),
    (1e300, "The answer is 1e300."),
    ("12", "**Answer**: **12**."),
    ("12", "So, the answer is **$12$**."),
    ("12", "The answer is $12$ dollars."),
    ("12", "The answer is $12."),
    ("12", r"The answer is \(12\) dollars."),
    ("12", "The answer is 12, because 3*4=12."),
    ("12", "The answer is 12 since 3*4=12. And 5 is not."),
    ("12", "The answer is:\n$$12$$"),
    ("12", "**Final Answer:**\n12"),
    ("12", "Answer: 12 apples."),
    ("3.5", "The answer is 3.5 m. That is it."),
    ("1234", "The answer is 1,234 dollars, as computed."),
    ("1/2", "The answer is 1/2, which is half."),
    ("(1,2)", "The answer is (1, 2)."),
    ("12", "The answer is **12** dollars."),
    ("12", "所以，答案是12。"),
    ("12", "最终答案：**12**"),
    ("12", "答案应为 **12** 元。"),
    ("12", "答案是 12，因为 3*4=12。"),
    ("1200", "答案为1，200元"),
    ("120000", "答案是12万元。"),
    ("12", "答えは12個です。"),
    ("12", "정답은 12개입니다."),
    ("12", "La respuesta es 12."),
    ("12", "Die Antwort ist 12, da 3*4=12."),
    ("12", "Ответ: 12 рублей."),
]
NOT_SAID = [
    ("12", "The answer is 13, because 12 is too few."),
    ("12", "The answer is correct."),
    ("12", "The answer is 12 or 13."),
    ("12", "The answer is 12 dozen."),
    ("12", "The answer is"),
    ("12", "答案是12万。"),
    ("12", "答案是13，因为12太少。"),
    ("12", "答案是12或13。"),
    ("12", "答案是正确的。"),
    ("12", "La respuesta es 12 docenas."),
]


@pytest.mark.parametrize(("label", "text"), SAID)
def test_an_answer_in_a_sentence_is_read_to_the_end_of_its_clause(label, text):
    assert grade("math", text, label) == 1.0


@pytest.mark.parametrize(("label", "text"), NOT_SAID)
def test_a_sentence_that_says_something_else_is_wrong(label, text):
    assert grade("math", text, label) in (0.0, {"reward": 0.0, "ungraded": 1.0})


UNITS = (
    *(
        "apples",
        "cm",
        "dollars",
        "hours",
        "people",
        "miles per hour",
        "square meters",
        "red apples",
    ),
    *("degrees", "years", "students", "pairs", "quarters", "ways", "balls", "cents"),
    *("m/s", "kg m/s^2", "g/cm^3", "Hz", "sq. units", "a.m."),
    *("个", "个苹果", "厘米", "千克", "人民币", "円", "개", "рублей", "manzanas", "Äpfel"),
)
CHANGES = (
    *("dozen", "hundred", "thousand", "million", "gross", "squared", "cubed", "factorial", "half"),
    *("thirds", "hundredths", "or more", "and 30 minutes", "out of 20", "plus 5", "times", "fold"),
    *("万", "亿", "打", "倍", "多个", "小时30分钟", "만", "docenas", "Dutzend", "тысяч", "y medio"),
    *("remainder 2", "modulo 5", "less than x", "not", "score", "twice", "percent of 30", "mod 7"),
)


@pytest.mark.parametrize("words", UNITS)
def test_a_unit_beside_a_number_does_not_change_it(words):
    for text in (rf"\boxed{{12\text{{ {words}}}}}", rf"\boxed{{12 {words}}}", f"#### 12 {words}"):
        assert grade("math", text, "12") == 1.0
        assert grade("math", text, "13") == 0.0
    assert grade("math", rf"\boxed{{12\sqrt{{2}}\text{{ {words}}}}}", r"12\sqrt{2}") == 1.0


@pytest.mark.parametrize("words", CHANGES)
def test_a_word_that_changes_a_number_is_no_unit(words):
    for number, label in (("12", "12"), (r"12\sqrt{2}", r"12\sqrt{2}")):
        found = grade("math", rf"\boxed{{{number}\text{{ {words}}}}}", label)
        assert found in (0.0, {"reward": 0.0, "ungraded": 1.0})


PARTS = [
    ("6 hours and 30 minutes", r"\boxed{6\text{ hours and }30\text{ minutes}}", 1),
    ("6 hours and 30 minutes", r"\boxed{6\text{ hours and }31\text{ minutes}}", 0),
    ("6", r"\boxed{6\text{ hours and }30\text{ minutes}}", 0),
    ("30", r"\boxed{6\text{ hours and }30\text{ minutes}}", 0),
    ("5", r"\boxed{5\text{ feet }3\text{ inches}}", 0),
    ("12", r"\boxed{12\text{ or 13}}", 0),
    ("12 or 13", r"\boxed{13\text{ or 12}}", 1),
    ("5", r"\boxed{5\text{ R 3}}", 0),
    ("3", r"\boxed{3\text{.5}}", 0),
    ("3", r"\boxed{3\text{!}}", 0),
    ("3", r"\boxed{3\text{, 4}}", 0),
    ("12", r"\boxed{12\text{ ± 1}}", 0),
    # Letters that math-verify takes for units.
    ("2", r"\boxed{2t}", 0),
    ("2", r"\boxed{2ab}", 0),
    ("2", r"\boxed{2 a}", 0),
    ("2ab", r"\boxed{2ba}", 1),
    ("12", r"\boxed{12\text{ cm}^2}", 1),
    ("12", r"\boxed{12\text{ units}^{3}}", 1),
    (r"12\pi", r"\boxed{12\pi\text{ cm}^{3}}", 1),
    (r"12\pi", r"\boxed{12\pi\ \mathrm{m}^2}", 1),
    (r"12\pi", r"\boxed{12\pi\text{ m}}", 1),
    (r"12\pi", r"\boxed{12\pi\text{ hours }30\text{ minutes}}", 0),
    ("144", r"\boxed{12\text{ dozen}}", 1),
    ("12", r"\boxed{1\text{ dozen}}", 1),
    ("3000000", r"\boxed{3\text{ millions}}", 1),
    ("5", r"\boxed{\text{Area} = 5}", 1),
    ("BCA", r"\boxed{BCA}", 1),
    (r"\angle ABC", r"\boxed{\angle BAC}", 0),
    (r"\angle ABC", r"\boxed{\angle CBA}", 1),
    (r"\triangle BCA", r"\boxed{\triangle ABC}", 0),
    (r"\triangle ABC", r"\boxed{\triangle ABC}", 1),
    ("101_2", r"\boxed{101_{3}}", 0),
    ("101_2", r"\boxed{101_{2}}", 1),
    ("101_2", r"\boxed{101}", 0),
    (r"\varnothing", r"\boxed{\emptyset}", 1),
    ("BCA", r"\boxed{\text{BCA}}", 1),
    ("BCA", r"\boxed{ABC}", 0),
    ("AB", r"\boxed{BA}", 0),
    ("ab", r"\boxed{ba}", 1),
    ("2abc", r"\boxed{2cab}", 1),
    (r"\sin x", r"\boxed{\sin(x)}", 1),
]


@pytest.mark.parametrize(("label", "text", "reward"), PARTS)
def test_words_between_mathematics_are_compared_as_words(label, text, reward):
    assert grade("math", text, label) == reward


TITLED = [
    (r"\boxed{\textbf{(B)}\ 12}", "B"),
    (r"\boxed{\text{(B) }12}", "B"),
    (r"\boxed{\mathrm{(B)}\ \frac{1}{2}}", "B"),
    (r"\boxed{(B)\ 12}", "B"),
    (r"\boxed{(B)\quad 12}", "B"),
    (r"\boxed{B. 12}", "B"),
    (r"\boxed{\textbf{B}}", "B"),
    (r"The answer is \textbf{(B)}\ 12.", "B"),
    (r"\boxed{\textbf{(A)}\ 1\ \textbf{(B)}\ 2}", None),
    (r"\boxed{\text{(A) or (B)}}", None),
    ("The answer is B, C.", None),
    ("The answer is B/C", None),
    ("The answer is (B) & (C)", None),
    ("The answer is B, A is wrong.", "B"),
    ("The answer is B, a fruit.", "B"),
    ("The answer should be B.", "B"),
    ("The answer is __B__.", "B"),
    ("The answer is `B`.", "B"),
    ("The answer is（B）", "B"),
    ("\ufeffB", "B"),
]


@pytest.mark.parametrize(("text", "letter"), TITLED)
def test_a_letter_may_stand_before_its_choice(text, letter):
    assert picked(text) == letter
