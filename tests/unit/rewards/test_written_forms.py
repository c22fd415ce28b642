"""Answers in the forms of LaTeX and of dates, and labels that no response can spell."""

from __future__ import annotations

import pytest

from tests.unit.rewards.test_rules import grade


@pytest.mark.parametrize(
    "written",
    [
        r"12\ \frac{\text{km}}{\text{h}}",
        r"12\,\mathrm{m\,s^{-1}}",
        r"12\ \mathrm{kg\cdot m/s^2}",
        *(r"12\ \Omega", r"12\ \mu\text{m}", "12 µm", r"12\text{ N}", r"12^\circ\text{C}"),
        *("12 ℃", r"12^\circ F", "12¢", r"US\$12", r"\text{Rs. }12", r"\text{HK}\$12"),
    ],
)
def test_a_unit_in_latex_does_not_change_a_number(written: str) -> None:
    assert grade("math", rf"\boxed{{{written}}}", "12") == 1.0
    assert grade("math", rf"\boxed{{{written}}}", "13") == 0.0


@pytest.mark.parametrize(
    ("label", "text", "reward"),
    [
        (r"12\sqrt{2}\text{ cm}", r"\boxed{12\sqrt{2}\text{ m}}", 0),
        (r"12\sqrt{2}\text{ cm}", r"\boxed{12\sqrt{2}\text{ centimeters}}", 1),
        ("12", r"\boxed{12N}", 0),
        ("12", r"\boxed{12 m/n}", 0),
        ("12", r"\boxed{12\ \frac{\text{half}}{\text{h}}}", 0),
        (r"12^\circ C", r"\boxed{12^\circ F}", 0),
        ("7:45", r"\boxed{7:45\text{ a.m.}}", 1),
        ("7:45", r"\boxed{8:45\text{ a.m.}}", 0),
        ("1, 2, 3", r"\boxed{1, 2, \text{ and } 3}", 1),
        ("1, 2, 3", r"\boxed{1, 2, and 4}", 0),
        ("(1,2)", r"\boxed{\langle 1, 2\rangle}", 1),
        ("(1,2)", r"\boxed{\langle 2, 1\rangle}", 0),
        ("12", "The answer is 12, not 13.", 1),
        ("12", "The answer is 12 rather than 13.", 1),
        ("12", "The answer is 13, and not 12.", 0),
        ("(2,-3)", r"\boxed{p=2, q=-3}", 1),
        ("(0,5)", r"\boxed{y=5 \text{ and } x=0}", 1),
        ("(4,7)", r"\boxed{m=4, b=7}", 1),
        ("(1,2)", r"\boxed{x_1=1; x_2=2}", 1),
        ("x=1,y=2", r"\boxed{(1,2)}", 1),
        ("(2,-3)", r"\boxed{q=2, p=-3}", 0),
        ("(1,2)", r"\boxed{x=1, x=2}", 0),
        ("(1,2,3)", r"\boxed{x=1, y=2}", 0),
        ("3.14", r"\boxed{3.14\ldots}", 0),
        ("12", r"\boxed{12,\dots}", 0),
        ("3", r"\boxed{3\cdots}", 0),
        (r"3.14\ldots", r"\boxed{3.14}", 1),
    ],
)
def test_units_lists_vectors_and_contrasts_are_read_as_written(
    label: str, text: str, reward: float
) -> None:
    assert grade("math", text, label) == reward


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        *(
            ("12", rf"{look}{{12}}")
            for look in (r"\color{red}", r"\textcolor{#00f}", r"\colorbox{gray}")
        ),
        *(
            ("12", rf"{look}{{12}}")
            for look in (r"\fcolorbox{red}{white}", r"\textcolor[rgb]{1,0,0}")
        ),
        *(("12", rf"{look}{{12}}") for look in (r"\boldsymbol", r"\bm", r"\underline", r"\mathsf")),
        *(("12", rf"{look} 12") for look in (r"\color{red}", r"\bf", r"\Large", r"\mathbf")),
        *(("12", r"{\color{blue}12}\text{ cm}"), ("12", r"\textcolor{red}{\textbf{12 apples}}")),
        *(("1/2", r"\mathbf{\frac{1}{2}}"), ("1/2", r"\color{red}{\frac{1}{\textcolor{blue}{2}}}")),
        *(("0.12", r"\textcolor{red}{12}\%"), ("x^{12}", r"x^\textcolor{red}{12}")),
        *((r"\{1, 2\}", r"\color{red}{\{1,2\}}"), (r"\pi x", r"\pi\color{red}{x}")),
    ],
)
def test_colours_and_fonts_do_not_change_an_answer(label: str, shown: str) -> None:
    assert grade("math", rf"\boxed{{{shown}}}", label) == 1.0
    assert grade("math", rf"\boxed{{{shown}}}", "13") == 0.0


@pytest.mark.parametrize("written", ["21st", "22nd", "23rd", "24th", "11th", "112th"])
def test_an_ordinal_is_its_number(written: str) -> None:
    number, end = written[:-2], written[-2:]
    for form in (written, rf"{number}\text{{{end}}}", rf"{number}^{{\mathrm{{{end}}}}} place"):
        assert grade("math", rf"\boxed{{{form}}}", number) == 1.0
        assert grade("math", rf"\boxed{{{form}}}", number + "0") == 0.0
    assert grade("math", f"The answer is the {written}.", number) == 1.0
    assert grade("math", r"\boxed{2rd}", "2") == 0.0  # a product


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("#### The final answer is: $9$.", 1),
        ("#### Janet makes $9 every day", 1),
        (r"#### The length is \frac{18}{2} cm", 1),
        ("#### The answer is 8", 0),
        ("#### She does not have 9 eggs", 0),
        ("#### She had 9 and has 2", 0),
        ("#### Step 9", 0),
    ],
)
def test_a_sentence_behind_the_mark_of_gsm8k_is_read(text: str, reward: float) -> None:
    assert grade("math", text, "9") == reward


@pytest.mark.parametrize(
    ("label", "written", "reward"),
    [
        *(("5i", r"\sqrt{-25}", 1), (r"1+\sqrt{-9}", "3i+1", 1), ("2", "(1+i)(1-i)", 1)),
        *((r"e^{i\pi}", "-1", 1), (r"\pm i", r"\pm\sqrt{-1}", 1), ("x > i", "x > i", 1)),
        *(("3i", r"\sqrt{9}", 0), ("i", "-i", 0), ("x > i", "x > 2i", 0), ("(1, i)", "(1, 3)", 0)),
    ],
)
def test_i_is_the_square_root_of_minus_one(label: str, written: str, reward: float) -> None:
    assert grade("math", rf"\boxed{{{written}}}", label) == reward


SAME_UNITS = (
    ("mph", "mi/h", "miles per hour", "miles an hour", r"\frac{\text{mi}}{\text{h}}"),
    ("m/s", "ms^{-1}", "m s^{-1}", "meters per second", r"\text{ metres}/\text{second}"),
    ("cm^2", "cm²", "square centimeters", "sq. cm", r"\text{ cm}^2"),
    ("ft^3", "cubic feet", "cu. ft"),
    ("Hz", "hertz", "s^{-1}"),
    (r"\text{ N}", "newtons", r"kg\cdot m/s^2"),
    ("°C", "degrees Celsius", "deg C", r"^{\circ}\mathrm{C}"),
    ("°F", "fahrenheit", "degrees F"),
    ("kelvin", "kelvins", r"\text{ K}"),
    ("radians", "rad"),
)
"""Units that are the same in each row, and differ between rows."""


def test_units_of_an_answer_and_its_label_are_the_same_or_wrong() -> None:
    for row in SAME_UNITS:
        for other in SAME_UNITS:
            text = rf"\boxed{{12 {other[-1]}}}"
            grades = {grade("math", text, f"12 {unit}") for unit in row}
            assert grades == {float(row is other)}, (row, other)


@pytest.mark.parametrize("unit", ["°", "degrees", "", "°C", "apples per day"])
def test_degrees_have_any_scale_where_none_is_named(unit: str) -> None:
    assert grade("math", rf"\boxed{{12 {unit}}}", "12 degrees Celsius") == 1.0
    assert grade("math", r"\boxed{12 degrees Celsius}", f"12 {unit}") == 1.0
    assert grade("math", rf"\boxed{{13 {unit}}}", "12 degrees Celsius") == 0.0


def test_a_date_is_no_difference_of_numbers() -> None:
    assert grade("math", r"\boxed{2018}", "2024-01-05") == 0.0
    assert grade("math", r"\boxed{2024-01-05}", "2018") == 0.0
    assert grade("math", r"\boxed{2024-01-05}", "2024-01-05") == 1.0


@pytest.mark.parametrize("label", [{"value": "Bob"}, ["Bob", {"value": "B"}], b"Bob", [["Bob"]]])
def test_a_label_that_no_response_can_spell_is_refused(label: object) -> None:
    with pytest.raises(ValueError, match="not a text or a number"):
        grade("exact_match", "Bob", label)
