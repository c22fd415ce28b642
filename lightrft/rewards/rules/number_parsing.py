"""Parse plain numbers as people and models write them: exactly, fast, without computer algebra."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from lightrft.rewards.rules.answer_extraction import UNSPACED

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
        "≈": r"\approx ",
        "°": r"^\circ ",
        "℃": r"^\circ C",
        "℉": r"^\circ F",
        "Ω": r"\Omega ",
        "¢": " cents",
        "⟨": "(",
        "⟩": ")",
        "\u00a0": " ",
        "\u202f": " ",
        "，": ",",
        "：": ":",
        "％": "%",
        "（": "(",
        "）": ")",
        # Marks without width: of the byte order, and between letters.
        **dict.fromkeys("\ufeff\u200b\u2060", ""),
    }
)
_RAISED = re.compile(r"⁻?[⁰¹²³⁴-⁹]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_WHOLE_PART = r"(?P<whole>(?<!\d)(?:\d{1,3}(?:,\d{3}){1,9}|\d{0,30}))"
_REPEATING = re.compile(
    rf"{_WHOLE_PART}\.(?P<once>\d{{0,30}})\\(?:overline|bar|dot)\s*\{{(?P<again>\d{{1,30}})\}}"
)
# Two points, since a third one may have ended the sentence.
_ENDLESS = re.compile(
    rf"{_WHOLE_PART}\.(?P<digits>\d{{2,30}})(?:\s?\\[lc]?dots(?![A-Za-z])|\.{{2,3}}|…)"
)
_ABOUT = r"approximately|approx\.?|about|around|roughly"
_APPROXIMATELY = re.compile(
    rf"\A(?:\\(?:approx|simeq|sim)(?![A-Za-z])|\\text\s*\{{\s*(?:{_ABOUT})\s*\}}|(?:{_ABOUT}|the)\s"
    r"|(?:大?[约約])(?:等于|[为為是])?)\s*(?=[-+.\d\\$€£¥])",
    re.IGNORECASE,
)
_EMPTY = re.compile(
    r"(?:there (?:is|are) )?no solutions?(?: exists?)?|(?:the )?empty set", re.IGNORECASE
)
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+\}"
_WRAPPED = [
    re.compile(r"\$\$(.*)\$\$", re.DOTALL),
    re.compile(r"\$(.*)\$", re.DOTALL),
    re.compile(r"\\\((.*)\\\)", re.DOTALL),
    re.compile(r"\\\[(.*)\\\]", re.DOTALL),
    re.compile(r"\*\*(.*)\*\*", re.DOTALL),
    re.compile(r"\*([^*]*)\*"),
    re.compile(r"__([^_]*)__"),
    re.compile(r"`([^`]*)`"),
    re.compile(rf"\{{((?:[^{{}},]|{_GROUP})*+)\}}"),
]
_LEVELS = 16
_SPACE = "".join(filter(str.isspace, map(chr, range(0x3001))))
_FONTS = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|emph|operatorname)(?![A-Za-z])"
_TEXT = re.compile(rf"{_FONTS}\s*\{{([^{{}}]*)\}}")
_LOOK = re.compile(
    r"(?P<raised>[\^_]\s*)?(?:\\(?:(?:fcolorbox\s*\{[^{}]*\}|colorbox|(?:text)?color)\s*+(?:\[[^][{}]*\]\s*+)?\{[^{}]*\}"
    r"|(?:left|right|[Bb]igg?[lr]?|(?:display|text|script)style|limits|boldsymbol|bm|pmb|underline|bf|bfseries"
    rf"|rm|it|tiny|small|large|Large|LARGE|huge|Huge)(?![A-Za-z]))|{_FONTS}(?!\s*\{{))\s*(?P<group>{_GROUP})?"
)
"""Commands that change only the look of what follows."""
_LETTERS = "A-Za-zÀ-ÖØ-öø-ɏА-яЁё"
_FUNCTIONS = frozenset(
    word
    for row in (
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log exp ln lim max min gcd lcm",
        "det sqrt frac pi inf infty sup arg deg dim ker",
    )
    for word in row.split()
)
_PIECE = re.compile(
    rf"\\(?:begin|end)\s*\{{[^{{}}]*\}}|{_FONTS}\s*\{{(?P<text>[^{{}}]*)\}}"
    rf"|\\[A-Za-z]+|(?P<bare>[{_LETTERS}]{{2,}}|[{UNSPACED}]+)|[^\\{_LETTERS}{UNSPACED}]+|.",
    re.DOTALL,
)
_POWER = re.compile(r"\s*(?:\^\s*\{?\s*([23])(?!\d)\s*\}?|([²³]))")
LONGEST_NUMBER = 4000  # characters; Python refuses to read integers of more than 4300 digits
_CURRENCY = r"(?:(?:US|HK|[AC])?\s?[$]|[€£¥₹]|\\pounds|USD|EUR|Rs\.?)"
_SIMPLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
# Exponents have at most three digits: a power of ten is computed exactly, at any size.
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*{_CURRENCY}?\s*(?P<sign2>-?)\s*"
    rf"(?:(?P<whole>\d+)?\s*\\frac\s*(?:\{{\s*(?P<n1>-?\d+)\s*\}}\s*\{{\s*(?P<d1>\d+)\s*\}}|(?P<n2>\d)\s*(?P<d2>\d))"
    r"|(?:(?P<whole2>\d+)\s+)?(?P<n3>\d+)\s*/\s*(?P<d3>\d+)"
    rf"|(?P<simple>{_SIMPLE})(?:\s*(?:[eE](?P<e1>[-+]?\d{{1,3}})|(?:\\times|\\cdot|\*)\s*10\s*(?:\^|\*\*)\s*\{{?\s*(?P<e2>[-+]?\d{{1,3}})\s*\}}?))?)"
    rf"(?P<gap>\s*)(?:{_CURRENCY})?(?P<rest>.*)",
    re.DOTALL,
)
_MULTIPLES = {
    "dozen": 12,
    "gross": 144,
    "hundred": 10**2,
    "thousand": 10**3,
    "lakh": 10**5,
    "million": 10**6,
    "crore": 10**7,
    "billion": 10**9,
    "trillion": 10**12,
}
"""Words after a number that multiply it, without their plural."""
_TENS = {
    **dict.fromkeys(("百万", "百萬", "백만"), 10**6),
    **dict.fromkeys(("千万", "千萬", "천만"), 10**7),
    **dict.fromkeys("万萬만", 10**4),
    **dict.fromkeys("亿億억", 10**8),
}
"""The same in Chinese, Japanese and Korean, where no space is before them."""
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
        "radians radian rad",
        "celsius centigrade",
        "fahrenheit",
        "kelvin kelvins",
        "ohms ohm",
        "newtons newton",
        "joules joule",
        "watts watt",
        "volts volt",
        "amperes ampere amps amp",
        "Hz hertz",
        "Pa pascal pascals",
        *("kN", "kJ", "eV", "kW", "MW", "mA", "mV", "kV", "nm", "ms"),
        "mph",
        "kph kmh",
        "am AM",
        "pm PM",
    )
    for alias in names.split()
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
"""Words before a unit that raise it to a power."""
_DERIVED = {
    "mph": "mi/h",
    "kph": "km/h",
    "newtons": "kg m/s^2",
    "joules": "newtons m",
    "watts": "joules/s",
    "volts": "watts/amperes",
    "ohms": "volts/amperes",
    "Hz": "s^-1",
    "Pa": "newtons/m^2",
}
"""Units that are products of others."""
_LOOSE = {"degrees": {"celsius", "fahrenheit"}}
"""Units that may stand for others."""
_SYMBOLS = {
    "N": "newtons",
    "J": "joules",
    "W": "watts",
    "V": "volts",
    "A": "amperes",
    "K": "kelvin",
}
"""Units that are variables where no text command tells them."""
_SYMBOL = re.compile(rf"(?<=\d)\s*\\(?:text|mathrm)\s*\{{\s*([{''.join(_SYMBOLS)}])\s*\}}\Z")
_UNIT_FRACTION = re.compile(
    r"\\frac\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}"
    r"\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}"
)
_UNIT_POWERS = re.compile(r"\\(?:text|mathrm)\s*\{(?:[^{}^]|\^\{-?\d\}|\^)*\}")
_FACTOR = re.compile(
    rf"(?P<name>[{_LETTERS}][{_LETTERS}.'-]*+)(?:\^\{{?(?P<power>-?[1-9])\}}?|\{{?(?P<digit>[23²³])\}}?)?"
)
_RUN_TOGETHER = re.compile(r"(?<!\S)(k?m)(?=[sh]\^\{?-)")
_SCALE = r" ?(C|F|celsius|centigrade|fahrenheit)(?![A-Za-z])"
_DEGREES = re.compile(
    rf" ?\^ ?\{{? ?\\circ ?\}}?(?:{_SCALE})?| ?(?<![A-Za-z])deg(?:rees?|\.)?{_SCALE}", re.IGNORECASE
)
_SCALES = {"c": "celsius", "f": "fahrenheit"}
_ORDINAL = re.compile(
    "|".join(
        rf"(?<={digits})(?:(?: ?\^)? ?{end}(?![A-Za-z])| ?\^ ?\{{ ?{end} ?\}})"
        for digits, end in (
            ("1", "st"),
            ("2", "nd"),
            ("3", "rd"),
            ("[04-9]", "th"),
            ("1[123]", "th"),
        )
    )
)
"""The end of an ordinal number, such as 1st, in ``plain`` text."""
_NOT_UNITS = frozenset(
    word
    for row in (
        "and or not no none nor either neither but except without only if when unless while",
        "to plus minus times out more less fewer than over under above below between up down",
        "least most before after until by mod modulo remainder base negative positive",
        "squared cubed root factorial choose divided multiplied twice double triple thrice fold",
        "pi sqrt frac sin cos tan cot sec csc log ln exp lim max min gcd lcm inf infinity",
        "percent half halves third thirds fourth fourths fifth fifths sixth sixths seventh",
        "sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth",
        "thousandths score scores dozen dozens gross hundred hundreds thousand thousands million",
        "millions billion billions trillion trillions lakh lakhs crore crores zero one two three",
        "four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen",
        "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety",
        "und oder dutzend hundert tausend millionen milliarden halb prozent mal",
        "mille milliard milliards douzaine douzaines demi demie moitié fois cent",
        "mil millones millón docena docenas cien cientos medio media mitad veces",
        "или дюжин дюжины сто тысяч тысячи тысяча миллион миллиона миллионов процентов раз",
    )
    for word in row.split()
)
"""Words next to a number that change it. All other words, such as ``apples``, are units."""
_CHANGES = re.compile(
    "[百千万萬亿億兆十零一二三四五六七八九两兩半多余餘几幾打倍成折加减減乘除和与與或及至到约約]"
    "|分之|[백천만억반배]"
)
"""What changes a number before it in Chinese, Japanese or Korean, unless it is in ``_WHOLE``."""
_WHOLE = re.compile("千[克米瓦卡]")
_PER = frozenset({"per", "a", "an", "each", "every"})
"""Words between units that divide."""
_ARTICLES = _PER | {"of", "the", "in", "at"}


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


def tidy(text: str) -> str:
    """Reduce ``text`` to bare LaTeX, without delimiters, sizes, spacing and final full stop."""
    text = _RAISED.sub(_power, text.translate(_UNICODE))
    text = _VULGAR.sub(lambda found: f" {unicodedata.normalize('NFKD', found[0])}", text)
    text = _ENDLESS.sub(_endless, _REPEATING.sub(_repeating, text)).replace("\u2044", "/")
    # Delimiters are nested in any order, e.g. **$5$.**. A written answer has few levels of them.
    for _ in range(_LEVELS):
        before = text
        text = _LOOK.sub(_unadorned, text)
        text = text.lstrip(_SPACE + ";:").rstrip(_SPACE + ";:.,。\\")
        for wrapped in _WRAPPED:
            whole = wrapped.fullmatch(text)
            if whole is None:
                continue
            inner = whole.group(1)
            # "$1$ and $2$" begins and ends with a delimiter, too.
            if "$" not in inner and "**" not in inner:
                text = inner
        if text == before:
            break
    text = _without_delimiters(text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text).replace(r"\varnothing", r"\emptyset")
    # Separators of thousands, e.g. 1{,}000 and 1\,000.
    text = re.sub(r"(?<=\d)(?:\{,\}|\\,|\\!,?\\?!?|,\\!)(?=\d{3})", "", text)
    text = re.sub(r"(?<!\\)\\[,;:!> ]|~", " ", text).replace(r"\%", "%").replace(r"\$", "$")
    text = text.replace(r"\langle", "(").replace(r"\rangle", ")")
    text = _UNIT_POWERS.sub(lambda m: re.sub(r"\^\{(-?\d)\}", r"^\1", m[0]), text.strip())
    text = _UNIT_FRACTION.sub(r"\\text{ \1/\2}", text)
    text = _SYMBOL.sub(lambda found: rf"\text{{ {_SYMBOLS[found[1]]}}}", text)
    text = _APPROXIMATELY.sub("", text)
    return r"\emptyset" if _EMPTY.fullmatch(plain(text)) else text


def _unadorned(found: re.Match[str]) -> str:
    """Return what a command of ``_LOOK`` shows; without braces, unless it is raised or lowered."""
    raised, group = found["raised"] or "", found["group"] or ""
    if raised:
        return raised + group
    shown = group[1:-1]
    # The command before it must not run into a letter.
    following = shown or found.string[found.end() : found.end() + 1]
    return f" {shown}" if following[:1].isalpha() else shown


def _scale(found: re.Match[str]) -> str:
    """Return the unit of degrees, of which a scale may be known."""
    scale = found[1] or found[2]
    return f" {_SCALES[scale[0].lower()] if scale else 'degrees'} "


def _power(found: re.Match[str]) -> str:
    """Write a raised number, such as that of 10³, as a power."""
    return f"^{{{unicodedata.normalize('NFKD', found[0]).replace(chr(0x2212), '-')}}}"


def _repeating(found: re.Match[str]) -> str:
    r"""Write a repeating decimal, such as ``0.1\overline{6}``, as a fraction."""
    return _fraction(found["whole"].replace(",", ""), found["once"], found["again"])


def _endless(found: re.Match[str]) -> str:
    r"""Write a decimal such as ``0.1666\ldots`` as a fraction, if its last digits repeat.

    A single digit must stand three times after other digits: ``3.1411...`` repeats nothing.
    """
    digits = found["digits"]
    for size in range(1, len(digits) // 2 + 1):
        again = digits[-size:]
        once = digits
        while once.endswith(again):
            once = once.removesuffix(again)
        if len(digits) - len(once) >= max(2 * size, 3 if once else 2):
            return _fraction(found["whole"].replace(",", ""), once, again)
    return found[0]


def _fraction(whole: str, once: str, again: str) -> str:
    """Return the fraction of a decimal whose digits ``again`` repeat for ever."""
    top = int(whole + once + again) - int(whole + once or "0")
    return rf"\frac{{{top}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"


def _without_delimiters(text: str) -> str:
    """Remove the delimiters of mathematics between words, as in ``$12$ dollars``."""
    if text.startswith("$") and text.replace(r"\$", "").count("$") % 2 == 0:
        text = re.sub(r"(?<!\\)\$", " ", text)
    if r"\(" in text and r"\)" in text:
        text = re.sub(r"(?<!\\)\\[()]", " ", text)
    return text.strip()


def maths_and_words(text: str) -> tuple[list[str], list[str]]:
    r"""Split ``tidy`` text into mathematics and the words between: one more of the former.

    ``6\text{ hours and }30`` has the mathematics ``6`` and ``30``, and the words ``hours and``.
    Variables and functions are mathematics.
    """
    parts, words = [""], [""]
    for found in _PIECE.finditer(text):
        inner, bare = found["text"], found["bare"]
        is_words = inner is not None and _has_words(inner)
        if bare:
            is_words = bare not in _FUNCTIONS and (
                len(bare) > 3 or bare in _UNITS or bare in _NOT_UNITS or not bare.isascii()
            )
        elif inner and inner.strip() in _FUNCTIONS:
            is_words = False
        if not is_words:
            piece = found.group()
            if not parts[-1] and (power := _POWER.match(piece)):  # of a unit, as in cm^2
                words[-1] += f"^{power[1] or power[2]}"
                piece = piece[power.end() :]
            parts[-1] += piece
            continue
        said = " ".join((inner or bare or "").split())
        if parts[-1].strip() or len(parts) == 1:
            words.append(said)
            parts.append("")
        else:
            words[-1] += f" {said}"
    return [part.strip() for part in parts], words[1:]


def written_out(text: str) -> str:
    r"""Write mathematics of ``tidy`` text without its text command: ``5\text{ or 6}`` is 5 or 6."""

    def inside(found: re.Match[str]) -> str:
        inner = found[1]
        if _has_words(inner) and not re.search(r"(?<![\w^{])\d", inner):
            return found[0]
        return f" {inner} " if inner[:1].isalpha() else inner

    return _TEXT.sub(inside, text)


def _has_words(text: str) -> bool:
    """Return whether the content of a text command has a word or is a unit of one letter."""
    return bool(re.search(f"[{_LETTERS}]{{2}}|[{UNSPACED}]", text)) or unit_of(text) is not None


def unit_of(words: str) -> str | None:
    """Return the common unit that ``words`` are, empty for another unit, ``None`` for no unit."""
    return _unit(words.split(), spaced=True)


def plain(text: str) -> str:
    """Expand the text commands of ``tidy`` text, and remove white space and ends of ordinals."""
    text = " ".join(_TEXT.sub(r" \1 ", text).split()).replace(" ^", "^")
    text = _DEGREES.sub(_scale, text).strip()
    text = _ORDINAL.sub(" ", text).strip()
    return re.sub(
        r"\\Omega\Z", "ohms", re.sub(r"(?:\\mu|[µμ]) ?(?=[A-Za-z]{1,2}\Z)", "micro", text)
    )


def quantity(text: str) -> Quantity | None:
    """Parse ``plain`` text as a number with an optional unit; ``None`` if it is anything else."""
    found = _NUMBER.fullmatch(text) if len(text) <= LONGEST_NUMBER else None
    if found is None:
        return None
    part = found.groupdict()
    value = _value(part)
    if value is None:
        return None
    # The sign is before or after the currency: -$5 and $-5. Two of them cancel.
    if (part["sign"] == "-") != (part["sign2"] == "-"):
        value = -value
    rest = _rest(part["rest"], spaced=bool(part["gap"]))
    if rest is None:
        return None
    power, percent, unit = rest
    exact = "." not in (part["simple"] or "")
    return Quantity(value * power, percent, unit, exact)


def _value(part: Mapping[str, str]) -> Fraction | None:
    """Return the absolute value of a match of ``_NUMBER``; ``None`` for a division by 0."""
    if part["simple"]:
        exponent = int(part["e1"] or part["e2"] or 0)
        return Fraction(part["simple"].replace(",", "")) * Fraction(10) ** exponent
    # Three forms: \frac{1}{2}, \frac12 and 1/2.
    form = next(i for i in "123" if part[f"n{i}"])
    above = int(part[f"n{form}"])
    below = int(part[f"d{form}"])
    if below == 0:
        return None
    whole = int(part["whole"] or part["whole2"] or 0)
    return whole + Fraction(above, below)


def _rest(text: str, spaced: bool) -> tuple[int, bool, str] | None:
    """Parse the factor, percent sign and unit after a number; ``None`` for other text.

    Args:
        text: Follows the number.
        spaced: True if white space is between them.
    """
    percent = re.match(r"\s*(?:%|percent(?:age)?\b)(?:\s+points?\b)?", text, re.IGNORECASE)
    if percent:
        text = text[percent.end() :]
        spaced = True
    text = text.lstrip()
    ten = next(filter(text.startswith, _TENS), "")
    text, power = text.removeprefix(ten), _TENS.get(ten, 1)
    words = text.split()
    if words and spaced and power == 1:
        word = words[0].lower()
        power = _MULTIPLES.get(word) or _MULTIPLES.get(word.removesuffix("s"), 1)
        words = words[1:] if power > 1 else words
    if not words:
        return power, bool(percent), ""
    unit = _unit(words, spaced)
    return None if unit is None else (power, bool(percent), unit)


def _unit(words: Sequence[str], spaced: bool) -> str | None:
    """Return the common unit that ``words`` are, empty for another unit, ``None`` for other text.

    Args:
        words: Follow a number.
        spaced: True if white space is between them.
    """
    text = " ".join(words)
    if re.fullmatch(rf"[{UNSPACED} ]+", text):
        return None if _CHANGES.search(_WHOLE.sub("", text)) else ""
    factors = _factors(text) if re.match(f"[{_LETTERS}]", text) else None
    if factors is None:
        return None
    names = [name for name, _ in factors]
    # "3x" is a product; "3m" is a length.
    if not spaced and names[0] not in _UNITS:
        return None
    if not all(map(_may_be_unit, names)) or all(map(_is_filler, names)):
        return None
    powers = sorted(_powers(factors).items())
    return " ".join(f"{unit}^{power}" if power != 1 else unit for unit, power in powers)


def _factors(text: str) -> list[tuple[str, int]] | None:
    """Return the words of a unit with their powers; ``None`` if it has anything else."""
    # m s^-1 is also written ms^-1, which is no millisecond.
    text = _RUN_TOGETHER.sub(r"\1 ", text.replace(r"\cdot", " ").replace("/", " per "))
    factors = []
    for word in text.split():
        found = _FACTOR.fullmatch(word)
        if found is None:
            return None
        power = int(found["power"] or unicodedata.normalize("NFKD", found["digit"] or "1"))
        factors.append((re.sub(f"[^{_LETTERS}]", "", found["name"]), power))
    return factors


def _powers(factors: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Return the power of each unit of a product; empty if a word is no common unit."""
    powers: dict[str, int] = {}
    sign = raised = 1
    for name, power in factors:
        unit = _UNITS.get(name)
        if name.lower() in _POWERS:
            raised = _POWERS[name.lower()]
        elif name.lower() in _PER:
            sign = -1
        elif unit is None:
            return {}
        else:
            parts = _powers(_factors(_DERIVED[unit]) or ()) if unit in _DERIVED else {unit: 1}
            for part, exponent in parts.items():
                powers[part] = powers.get(part, 0) + sign * raised * power * exponent
            sign = raised = 1
    return {unit: power for unit, power in powers.items() if power}


def _may_be_unit(word: str) -> bool:
    """Return whether ``word`` can be part of a unit; one or two other letters are variables."""
    if word.lower() in _NOT_UNITS:
        return False
    return word in _UNITS or len(word) >= 3 or word.lower() in {*_ARTICLES, *_POWERS}


def _is_filler(word: str) -> bool:
    """Return whether ``word`` belongs to units such as ``a day``, and is none by itself."""
    return word.lower() in _ARTICLES and word not in _UNITS


def units_differ(one: str, other: str) -> bool:
    """Return whether two units as of ``unit_of`` cannot be the same."""
    # A missing unit matches any unit, since labels often omit it.
    if not one or not other or one == other:
        return False
    return one not in _LOOSE.get(other, ()) and other not in _LOOSE.get(one, ())


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Return whether two quantities are equal.

    50% may stand for 0.5 or for 50. A decimal may stand for a fraction rounded to six digits or
    more.
    """
    if units_differ(gold.unit, answer.unit):
        return False
    if gold.percent == answer.percent:
        return _same(gold, answer, Fraction(1))
    if _same(gold, answer, Fraction(1)):
        return True
    scale = Fraction(100) if answer.percent else Fraction(1, 100)
    return _same(gold, answer, scale)


def _same(gold: Quantity, answer: Quantity, scale: Fraction) -> bool:
    wanted = gold.value * scale
    if wanted == answer.value:
        return True
    if gold.exact == answer.exact:
        return False
    if _ends(gold.value) and _ends(answer.value):
        return False  # neither is rounded
    return abs(wanted - answer.value) <= abs(wanted) * Fraction(2, 10**6)


def _ends(value: Fraction) -> bool:
    """Return whether the decimal expansion of ``value`` is finite."""
    # It is if a power of ten is a multiple of the denominator, whose prime factors are at most as
    # many as its bits.
    below = value.denominator
    return pow(10, below.bit_length(), below) == 0
