"""Checks of IFEval (arXiv 2311.07911, table 1).

They are about words, letters, case, length, paragraphs, formats, and the start and end. Two need a
library: the language, and the number of sentences.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from lightrft.utils.errors import install_extra

Options = Mapping[str, Any]
Check = Callable[[str, Options], bool]
"""Return whether a text follows an instruction with these arguments."""

WORD = re.compile(r"\w+")
CAPITALIZED = re.compile(r"\w+(?:(?:(?!\.\.\.|--|\*\*)[-./\\=|+*~^])++\w+)*")
"""A word with its points, hyphens and signs, as the tokens of nltk that IFEval counts: ``A/B``.

An apostrophe ends a word, so that ``NASA's`` has one.
"""


def holds(count: int, relation: str, bound: int) -> bool:
    """Return whether ``count`` has the ``relation`` to ``bound``.

    Args:
        count: The number that was counted.
        relation: ``at least`` or ``less than``.
        bound: The number of the instruction.

    Raises:
        ValueError: If the relation is another one.
    """
    if relation == "at least":
        return count >= bound
    if relation == "less than":
        return count < bound
    raise ValueError(f"relation {relation!r} is neither 'at least' nor 'less than'")


def has_keywords(text: str, options: Options) -> bool:
    """Return whether every keyword occurs, in any case."""
    lower = text.lower()
    return all(str(word).lower() in lower for word in options["keywords"])


def has_keyword_often(text: str, options: Options) -> bool:
    """Return whether a keyword occurs as often as asked."""
    count = text.lower().count(str(options["keyword"]).strip().lower())
    return holds(count, options["relation"], int(options["frequency"]))


def has_no_forbidden_word(text: str, options: Options) -> bool:
    """Return whether no forbidden word occurs as a whole word."""
    found = (
        re.search(rf"\b{re.escape(str(word))}\b", text, re.IGNORECASE)
        for word in options["forbidden_words"]
    )
    return not any(found)


def has_letter_often(text: str, options: Options) -> bool:
    """Return whether a letter occurs as often as asked, in any case."""
    count = text.lower().count(str(options["letter"]).strip().lower())
    return holds(count, options["let_relation"], int(options["let_frequency"]))


def has_number_of_words(text: str, options: Options) -> bool:
    """Return whether the number of words is as asked."""
    return holds(len(WORD.findall(text)), options["relation"], int(options["num_words"]))


def has_capital_words(text: str, options: Options) -> bool:
    """Return whether words in capitals are as frequent as asked."""
    count = sum(word.isupper() for word in CAPITALIZED.findall(text))
    return holds(count, options["capital_relation"], int(options["capital_frequency"]))


WORD_CHECKS: dict[str, Check] = {
    "keywords:existence": has_keywords,
    "keywords:frequency": has_keyword_often,
    "keywords:forbidden_words": has_no_forbidden_word,
    "keywords:letter_frequency": has_letter_often,
    "length_constraints:number_words": has_number_of_words,
    "change_case:capital_word_frequency": has_capital_words,
    "change_case:english_capital": lambda text, options: text.isupper(),
    "change_case:english_lowercase": lambda text, options: text.islower(),
    "punctuation:no_comma": lambda text, options: "," not in text,
}
"""Instruction id to its check."""


SENTENCES = "english"
"""Language of the sentence model. IFEval counts English sentences."""


class MissingTool(Exception):
    """A check needs a library or its data, which are missing. The message names the fix."""


def is_in_language(text: str, options: Options) -> bool:
    """Return whether the language of a text is as asked.

    Any language is accepted for a text without one, such as digits alone, as IFEval does.
    """
    detector = _detector()
    try:
        return detector.detect(text) == options["language"]
    except detector.LangDetectException:
        return True


def has_number_of_sentences(text: str, options: Options) -> bool:
    """Return whether the number of sentences is as asked."""
    count = len(_sentence_model().tokenize(text))
    return holds(count, options["relation"], int(options["num_sentences"]))


@cache
def _detector() -> Any:
    """Return langdetect. Raises ``MissingTool`` if it is not installed."""
    try:
        import langdetect
    except ImportError as error:
        raise MissingTool(f"langdetect: {install_extra('ifeval')}") from error
    # Its features are sampled: the same text must have the same language in every process.
    langdetect.DetectorFactory.seed = 0
    return langdetect


@cache
def _sentence_model() -> Any:
    """Return the sentence model of nltk. Raises ``MissingTool`` if it is not there."""
    try:
        from nltk.tokenize import PunktTokenizer
    except ImportError as error:
        raise MissingTool(f"nltk: {install_extra('ifeval')}") from error
    try:
        return PunktTokenizer(SENTENCES)
    except LookupError as error:
        raise MissingTool(
            "the data punkt_tab of nltk: python -m nltk.downloader punkt_tab"
        ) from error


LANGUAGE_CHECKS: Mapping[str, Check] = {
    "language:response_language": is_in_language,
    "length_constraints:number_sentences": has_number_of_sentences,
}


CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
DIVIDER = "***"
BULLETS = (
    re.compile(r"^[^\S\n]*\*[^*].*$", re.MULTILINE),
    re.compile(r"^[^\S\n]*-", re.MULTILINE),
)
FENCES = ("```json", "```Json", "```JSON", "```")


def has_paragraphs(text: str, options: Options) -> bool:
    """Return whether the number of paragraphs between ``***`` is as asked, none of them blank."""
    parts = [part.strip() for part in text.split(DIVIDER)]
    # A divider at the start or the end divides nothing.
    if not parts[0]:
        parts = parts[1:]
    if parts and not parts[-1]:
        parts = parts[:-1]
    return all(parts) and len(parts) == int(options["num_paragraphs"])


def starts_paragraph(text: str, options: Options) -> bool:
    """Return whether the nth paragraph begins with a word, and their number is as asked.

    As in IFEval, blank paragraphs count for the position and not for the number.
    """
    paragraphs = [part.strip() for part in text.split("\n\n")]
    written = [part for part in paragraphs if part]
    nth = int(options["nth_paragraph"])
    if len(written) != int(options["num_paragraphs"]) or nth > len(written):
        return False
    words = paragraphs[nth - 1].split()
    if not words:
        return False
    word = re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'))[0]
    return word.lower() == str(options["first_word"]).lower()


def has_placeholders(text: str, options: Options) -> bool:
    """Return whether there are enough placeholders in square brackets."""
    return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= int(options["num_placeholders"])


def has_postscript(text: str, options: Options) -> bool:
    """Return whether there is a postscript with the marker; white space may follow its points."""
    marker = re.escape(str(options["postscript_marker"]).strip())
    return re.search(re.sub(r"(?<=\.)(?=\w)", r"\\s?", marker), text, re.IGNORECASE) is not None


def has_bullets(text: str, options: Options) -> bool:
    """Return whether the number of bullet points is exactly as asked."""
    count = sum(len(bullet.findall(text)) for bullet in BULLETS)
    return count == int(options["num_bullets"])


def has_highlights(text: str, options: Options) -> bool:
    """Return whether enough sections are between asterisks, as in ``*this*`` or ``**this**``."""
    # Between the two asterisks of a double mark, a single one finds blank text, which is left out.
    found = re.findall(r"\*([^\n*]*)\*", text) + re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(mark.strip()) for mark in found) >= int(options["num_highlights"])


def has_sections(text: str, options: Options) -> bool:
    """Return whether enough sections begin with the marker and a number."""
    marker = re.escape(str(options["section_spliter"]).strip())
    return len(re.findall(rf"{marker}\s?\d+", text)) >= int(options["num_sections"])


def is_json(text: str, options: Options) -> bool:
    """Return whether the text is JSON, alone or in one block of code."""
    body = text.strip()
    for fence in FENCES:
        body = body.removeprefix(fence)
    body = body.removesuffix("```")
    try:
        json.loads(body)
    # Thousands of opening brackets are a RecursionError.
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str, options: Options) -> bool:
    """Return whether there is a title in double angular brackets."""
    # A pattern would search to the end of the line at each of a thousand angular brackets.
    titles = (line.partition("<<")[2].rpartition(">>")[0] for line in text.split("\n"))
    return any(title.lstrip("<").rstrip(">").strip() for title in titles)


def are_two_responses(text: str, options: Options) -> bool:
    """Return whether there are two different responses, with six asterisks between them."""
    parts = [part.strip() for part in text.split("******")]
    if any(not part for part in parts[1:-1]):
        return False
    written = [part for part in parts if part]
    return len(written) == 2 and written[0] != written[1]


def repeats_prompt(text: str, options: Options) -> bool:
    """Return whether the text begins with the request."""
    return text.strip().lower().startswith(str(options["prompt_to_repeat"]).strip().lower())


def has_end(text: str, options: Options) -> bool:
    """Return whether the text ends with a phrase, quotation marks aside."""
    end = str(options["end_phrase"]).strip().lower()
    return text.strip().strip('"').lower().endswith(end)


def is_quoted(text: str, options: Options) -> bool:
    """Return whether the whole text is between double quotation marks."""
    body = text.strip()
    return len(body) > 1 and body[0] == body[-1] == '"'


STRUCTURE_CHECKS: dict[str, Check] = {
    "length_constraints:number_paragraphs": has_paragraphs,
    "length_constraints:nth_paragraph_first_word": starts_paragraph,
    "detectable_content:number_placeholders": has_placeholders,
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": has_bullets,
    "detectable_format:constrained_response": lambda text, options: any(
        choice in text for choice in CONSTRAINED
    ),
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:multiple_sections": has_sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": has_title,
    "combination:two_responses": are_two_responses,
    "combination:repeat_prompt": repeats_prompt,
    "startend:end_checker": has_end,
    "startend:quotation": is_quoted,
}
"""Instruction id to its check."""
