"""Parse plain numbers as people and models write them: exactly, fast, without computer algebra."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_UNICODE = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": "/",
        "⁄": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "∪": r"\cup ",
        "∅": r"\emptyset ",
        "°": r"^\circ ",
        "\u00a0": " ",
        "\u202f": " ",
        "，": ",",
    }
)
_WRAPPED = [re.compile(p, re.DOTALL) for p in (r"\$\$(.*)\$\$", r"\$(.*)\$", r"\\\((.*)\\\)", r"\\\[(.*)\\\]", r"\*\*(.*)\*\*")]
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_CURRENCY = r"(?:[$€£¥₹]|\\pounds|USD|EUR)"
_SIMPLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*{_CURRENCY}?\s*(?P<sign2>-?)\s*"
    rf"(?:(?P<whole>\d+)?\s*\\frac\s*(?:\{{\s*(?P<n1>-?\d+)\s*\}}\s*\{{\s*(?P<d1>\d+)\s*\}}|(?P<n2>\d)\s*(?P<d2>\d))"
    r"|(?:(?P<whole2>\d+)\s+)?(?P<n3>\d+)\s*/\s*(?P<d3>\d+)"
    rf"|(?P<simple>{_SIMPLE})(?:\s*(?:[eE](?P<e1>[-+]?\d{{1,3}})|(?:\\times|\\cdot|\*)\s*10\s*(?:\^|\*\*)\s*\{{?\s*(?P<e2>[-+]?\d{{1,3}})\s*\}}?))?)"
    rf"(?P<gap>\s*)(?:{_CURRENCY})?(?P<rest>.*)",
    re.DOTALL,
)
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_UNITS = {
    alias: names.split()[0]
    for names in (
        "m meter meters metre metres",
        "km kilometer kilometers kilometre kilometres",
        "cm centimeter centimeters centimetre centimetres",
        "mm millimeter millimeters millimetre millimetres",
        "g gram grams",
        "kg kilogram kilograms",
        "mg milligram milligrams",
        "s sec secs second seconds",
        "min mins minute minutes",
        "h hr hrs hour hours",
        "day days",
        "week weeks",
        "month months",
        "yr yrs year years",
        "in inch inches",
        "ft foot feet",
        "mi mile miles",
        "lb lbs pound pounds",
        "oz ounce ounces",
        "l L liter liters litre litres",
        "ml mL milliliter milliliters",
        "cents cent",
        "degrees degree",
        "mph",
        "am",
        "pm",
    )
    for alias in names.split()
}
_NOT_UNITS = frozenset(
    {
        "and",
        "or",
        "not",
        "to",
        "plus",
        "minus",
        "times",
        "out",
        "more",
        "less",
        "than",
        "squared",
        "cubed",
        "over",
        "by",
        "mod",
    }
    | {
        "root",
        "pi",
        "sqrt",
        "frac",
        "sin",
        "cos",
        "tan",
        "log",
        "exp",
        "inf",
        "infinity",
        "percent",
        "divided",
        "half",
        "third",
    }
)
_ARTICLES = frozenset({"a", "an", "per", "of", "each", "the", "in", "at"})


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its unit.

    Attributes:
        value: The number as written, e.g. 50 for ``50%``.
        percent: The number is a percentage.
        unit: A common unit, or empty.
        exact: ``value`` is exact. False for a decimal, which may be a rounded fraction.
    """

    value: Fraction
    percent: bool = False
    unit: str = ""
    exact: bool = True
    """False for a decimal, which may be a rounded fraction."""


def tidy(text: str) -> str:
    """Reduce ``text`` to bare LaTeX, without delimiters, sizes, spacing and final full stop."""
    text = text.translate(_UNICODE).strip()
    before = None
    while before != text:
        before = text
        text = text.strip(" \n\t;:").removesuffix(".").removesuffix(",").removesuffix("\\").strip()
        for wrapped in _WRAPPED:
            whole = wrapped.fullmatch(text)
            if whole and "$" not in whole.group(1) and "**" not in whole.group(1):
                text = whole.group(1)
    text = re.sub(r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr|displaystyle|limits)(?![A-Za-z])\s*", "", text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"(?<=\d)(?:\{,\}|\\,|\\!,?\\?!?|,\\!)(?=\d{3})", "", text)
    text = re.sub(r"(?<!\\)\\[,;:!> ]|~", " ", text).replace(r"\%", "%").replace(r"\$", "$")
    return text.strip()


def plain(text: str) -> str:
    """Expand the text commands of ``tidy`` text and remove outer braces and white space."""
    text = " ".join(_TEXT.sub(r" \1 ", text).split())
    text = re.sub(r"\s*\^\s*\{?\s*\\circ\s*\}?", " degrees ", text).strip()
    inner = re.fullmatch(r"\{([^{},]*)\}", text)
    return inner.group(1).strip() if inner else text


def quantity(text: str) -> Quantity | None:
    """Parse ``plain`` text as a number with an optional unit; ``None`` if it is anything else."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    part = found.groupdict()
    if part["simple"]:
        value = Fraction(part["simple"].replace(",", "")) * Fraction(10) ** int(part["e1"] or part["e2"] or 0)
    else:
        above, below = next((int(part[f"n{i}"]), int(part[f"d{i}"])) for i in "123" if part[f"n{i}"])
        if below == 0:
            return None
        value = int(part["whole"] or part["whole2"] or 0) + Fraction(above, below)
    if (part["sign"] == "-") != (part["sign2"] == "-"):
        value = -value
    rest = _rest(part["rest"], spaced=bool(part["gap"]))
    if rest is None:
        return None
    power, percent, unit = rest
    return Quantity(value * 10**power, percent, unit, exact="." not in (part["simple"] or ""))


def _rest(text: str, spaced: bool) -> tuple[int, bool, str] | None:
    """Parse the power of ten, percent sign and unit after a number; ``None`` for other text."""
    percent = re.match(r"\s*(?:%|percent(?:age)?\b)(?:\s+points?\b)?", text, re.IGNORECASE)
    if percent:
        text, spaced = text[percent.end() :], True
    words = text.split()
    power = 0
    if words and spaced and words[0].lower() in _POWERS:
        power = _POWERS[words.pop(0).lower()]
    if not words:
        return power, bool(percent), ""
    if not re.fullmatch(r"[A-Za-z][A-Za-z./'\- ]*(?:\^?\{?[23²³]\}?)?", " ".join(words)):
        return None
    bare = [re.sub(r"[^A-Za-z]", "", w) for w in words]
    known = [w in _UNITS for w in bare]
    if any(w.lower() in _NOT_UNITS for w in bare) or (not spaced and not known[0]):
        return None
    if not all(k or len(w) >= 3 or w.lower() in _ARTICLES for w, k in zip(bare, known)):
        return None
    return (
        power,
        bool(percent),
        _UNITS.get(bare[0], "") if len(words) == 1 and bare[0] == words[0] else "",
    )


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Return whether two quantities are equal.

    50% may stand for 0.5 or for 50. A decimal may stand for a fraction rounded to six digits or
    more.
    """
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.percent == answer.percent:
        return _same(gold, answer, Fraction(1))
    whole = Fraction(1, 100)
    return _same(gold, answer, Fraction(1)) or (_same(gold, answer, 1 / whole) if answer.percent else _same(gold, answer, whole))


def _same(gold: Quantity, answer: Quantity, scale: Fraction) -> bool:
    wanted = gold.value * scale
    if wanted == answer.value:
        return True
    endless = gold.exact != answer.exact and not (_ends(gold.value) and _ends(answer.value))
    return endless and abs(wanted - answer.value) <= abs(wanted) * Fraction(2, 10**6)


def _ends(value: Fraction) -> bool:
    """Return whether the decimal expansion of ``value`` is finite."""
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    return below == 1
