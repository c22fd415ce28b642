"""The rule math against math-verify on a few thousand pairs of written forms, each difference settled by hand."""

from __future__ import annotations

import itertools
import logging
from functools import cache
from typing import Any

import pytest

from tests.unit.rewards.test_rules import grade

pytestmark = pytest.mark.slow

NUMBERS = (
    "12",
    "-3",
    "0.5",
    "1/2",
    r"\frac{1}{2}",
    r"\frac12",
    "50%",
    "1,234",
    "1234",
    "1e3",
    "1000",
    r"1.5\times10^3",
    "3.14159",
    r"\pi",
    r"2\pi",
    r"\sqrt{2}",
    r"\frac{\sqrt{2}}{2}",
    r"\frac{1}{\sqrt{2}}",
    "2.50",
    "0",
    "-0",
    r"1\frac{1}{2}",
    "1.5",
    "3/2",
    "0.3333333",
    "1/3",
    r"90^\circ",
    "90",
    r"\$12",
    "12.0",
)
EXPRESSIONS = (
    "x^2-1",
    "(x-1)(x+1)",
    "x=5",
    "5",
    "2x+1",
    "1+2x",
    "(1,2)",
    "(2,1)",
    r"\{1,2\}",
    "1,2",
    r"(-\infty,3]",
    r"x\le 3",
    r"x=1 \text{ or } x=2",
    r"1 \text{ and } 2",
    "ab",
    "ba",
    "abc",
    "cab",
    "ABC",
    "BCA",
    r"\text{ABC}",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
    r"\text{Yes}",
    "yes",
    r"\frac{1}{2}x",
    r"\frac{x}{2}",
)
WORDS = (
    "12",
    "12 cm",
    r"12\text{ cm}",
    r"12\,\mathrm{cm}",
    r"12\text{ dozen}",
    r"12\text{ dollars}",
    r"12\text{ hundred}",
    "1200",
    "144",
    r"12\text{ squared}",
    r"12\text{ or }13",
    r"12\text{ or 13}",
    r"7\text{ R 2}",
    r"2\text{, 7}",
    "2t",
    r"12\text{ and }13",
    "12,13",
    r"6\text{ hours and }30\text{ minutes}",
    "6",
    "30",
    "6.5",
    r"6\text{ hours}",
    r"5\text{ feet }3\text{ inches}",
    "5'3''",
    "5",
    r"12\text{ plus }5",
    "17",
    r"\text{Area}=12",
    r"\text{about }12",
    r"12\text{ percent}",
    r"12\%",
    "0.12",
    r"12\text{ thousandths}",
    r"7\text{ remainder }2",
    "7",
    "2",
    r"12 \text{ m}^2",
    r"12\sqrt{2}\text{ cm}",
    r"12\sqrt{2}",
    r"\text{12 apples}",
    r"12\text{ red apples}",
    r"\text{twelve}",
    r"12\text{ half}",
    r"5\text{ out of }10",
    r"\frac{5}{10}",
)
TWELVE = (
    *("12", r"12\text{ dollars}", r"\text{Area}=12", r"\text{12 apples}", r"12\text{ red apples}"),
    r"\text{about }12",
)
MEANINGS: dict[str, set[str]] = {
    **{key: {"1000"} for key in ("1e3", "1000")},
    # An ordered pair is no set.
    "(1,2)": {"the pair 1, 2"},
    **{
        key: {"the set 1, 2"}
        for key in (
            r"\{1,2\}",
            r"\{2,1\}",
            "1,2",
            "2,1",
            r"x=1 \text{ or } x=2",
            r"1 \text{ and } 2",
        )
    },
    **{key: {"up to 3"} for key in (r"(-\infty,3]", r"x\le 3")},
    # Small letters are variables, capitals an order.
    **{key: {"the product of a, b and c"} for key in ("abc", "cab")},
    "ABC": {"A, B, C"},
    "BCA": {"B, C, A"},
    # A number without a unit of measure may have any. Percent may stand for both.
    **{key: {"12 cm", "12 m^2"} for key in TWELVE},
    **{key: {"12 cm"} for key in ("12 cm", r"12\text{ cm}", r"12\,\mathrm{cm}")},
    r"12 \text{ m}^2": {"12 m^2"},
    **{key: {"12 cm", "12 m^2", "0.12"} for key in (r"12\text{ percent}", r"12\%")},
    "0.12": {"0.12"},
    # These words change it.
    **{key: {"144"} for key in (r"12\text{ dozen}", "144")},
    **{key: {"1200"} for key in (r"12\text{ hundred}", "1200")},
    **{key: {"12 or 13"} for key in (r"12\text{ or }13", r"12\text{ or 13}", "12,13")},
    r"12\text{ and }13": {"12 or 13"},
    r"7\text{ R 2}": {"7 R 2"},
    r"2\text{, 7}": {"2 or 7"},
    "2t": {"2 t"},
    "2": {"2"},
    "7": {"7"},
    r"12\text{ squared}": {"12 squared"},
    r"12\text{ thousandths}": {"0.012"},
    r"12\text{ half}": {"12 halves"},
    # A second quantity does, too.
    r"6\text{ hours and }30\text{ minutes}": {"390 minutes"},
    **{key: {"6"} for key in ("6", r"6\text{ hours}")},
    r"5\text{ feet }3\text{ inches}": {"63 inches"},
    "5": {"5"},
}
"""Values that a form may stand for, of the forms on which both differ. Two forms are equal if they share one."""


@cache
def parsed(form: str) -> Any:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    kinds = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return parse(rf"\boxed{{{form}}}", kinds, parsing_timeout=0)


@pytest.mark.parametrize(
    "forms", [NUMBERS, EXPRESSIONS, WORDS], ids=["numbers", "expressions", "words"]
)
def test_each_difference_from_math_verify_is_settled_by_hand(
    forms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from math_verify import verify

    monkeypatch.setattr(logging.getLogger("math_verify"), "disabled", True)
    differing = 0
    for label, answer in itertools.product(forms, forms):
        theirs = verify(parsed(label), parsed(answer), timeout_seconds=None)
        ours = grade("math", rf"\boxed{{{answer}}}", label) == 1.0
        if ours != theirs:
            differing += 1
            assert label in MEANINGS and answer in MEANINGS, (label, answer, ours)
            assert ours == bool(MEANINGS[label] & MEANINGS[answer]), (label, answer, ours)
    assert differing  # else this table is of no use
