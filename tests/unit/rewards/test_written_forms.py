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
    ],
)
def test_units_lists_vectors_and_contrasts_are_read_as_written(
    label: str, text: str, reward: float
) -> None:
    assert grade("math", text, label) == reward


def test_a_date_is_no_difference_of_numbers() -> None:
    assert grade("math", r"\boxed{2018}", "2024-01-05") == 0.0
    assert grade("math", r"\boxed{2024-01-05}", "2018") == 0.0
    assert grade("math", r"\boxed{2024-01-05}", "2024-01-05") == 1.0


@pytest.mark.parametrize("label", [{"value": "Bob"}, ["Bob", {"value": "B"}], b"Bob", [["Bob"]]])
def test_a_label_that_no_response_can_spell_is_refused(label: object) -> None:
    with pytest.raises(ValueError, match="not a text or a number"):
        grade("exact_match", "Bob", label)
