"""Checks of IFEval about paragraphs, formats, and the start and end (arXiv 2311.07911, table 1)."""

from __future__ import annotations

import json
import re

from lightrft.rewards.rules.ifeval.word_checks import Check, Options

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
