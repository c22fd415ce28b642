"""The section with responses before and after training.

Responses are shown in full, or as a gallery if all of them are short and have media.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import chain

from lightrft.viewer.page import shown
from lightrft.viewer.plots import compact
from lightrft.viewer.run_data import Answer, RunData

ANSWERS = 5
SHORT = 32
"""Largest number of characters of a response in the gallery."""
VERDICTS = {True: ("good", "✓", "right"), False: ("bad", "✗", "wrong"), None: ("", "", "")}
"""CSS class, mark and word of a verdict. None stands for no verdict."""

Pairs = Sequence[tuple[Answer, Answer]]


def answers(run: RunData) -> str:
    """Return the section, or an empty text if the run has no responses."""
    pairs = list(zip(run.before, run.after))
    if not pairs:
        return ""
    paired = all(before.prompt == after.prompt for before, after in pairs)
    if paired and all(map(_small, chain.from_iterable(pairs))):
        same = len({before.prompt for before, _ in pairs}) == 1
        tiles = "".join(_tile(run, before, after, asked=not same) for before, after in pairs)
        gallery = f'<ol class="gallery">{tiles}</ol>'
        return _section("Responses, before and after", _about_all(pairs), gallery)
    head = (
        "Responses, before and after" if paired else "Responses at the first step and at the last"
    )
    some = pairs[:ANSWERS]
    about = ""
    if paired and len(pairs) > len(some):
        about = f"The first {len(some)} of {len(pairs)} prompts of the eval set that were kept."
    items = "".join(_pair(run, before, after, paired) for before, after in some)
    return _section(head, about, f'<ol class="answers">{items}</ol>')


def _section(head: str, about: str, body: str) -> str:
    about = f"<p>{about}</p>" if about else ""
    return f'<section aria-labelledby="answers">\n<h2 id="answers">{head}</h2>\n{about}{body}\n</section>'


def _small(answer: Answer) -> bool:
    if not answer.attachments or len(answer.text) > SHORT:
        return False
    return "\n" not in answer.text.strip()


def _about_all(pairs: Pairs) -> str:
    """Return the common prompt, if there is one, and the numbers of correct responses."""
    asked = {before.prompt for before, _ in pairs}
    question = f"Asked: {escape(asked.pop())} " if len(asked) == 1 else ""
    right_before = right_after = 0
    for before, after in pairs:
        if before.correct is None or after.correct is None:
            return question.strip()
        right_before += before.correct
        right_after += after.correct
    return (
        f"{question}Of these {len(pairs)} prompts of the eval set, {right_before} had a right "
        f"response before, {right_after} after."
    )


def _tile(run: RunData, before: Answer, after: Answer, asked: bool) -> str:
    ask = f'<p class="prompt">{escape(before.prompt)}</p>' if asked else ""
    about = "what the model was given"
    expected = ""
    if before.label:
        about = f"expected {before.label}"
        expected = f'<p class="expected">{escape(about)}</p>'
    media = shown(before.attachments, run.media, about)
    arrow = '<span class="arrow" aria-label="to">→</span>'
    said = f'<p class="said">{_word(before, "before")}{arrow}{_word(after, "after")}</p>'
    css = " wrong" if after.correct is False else ""
    return f'<li class="card{css}">{media}{ask}{expected}{said}</li>'


def _word(answer: Answer, when: str) -> str:
    css, mark, _ = VERDICTS[answer.correct]
    text = escape(answer.text.strip()) or "no text"
    return f'<span class="mark {css}" title="{when}">{mark} {text}</span>'


def _pair(run: RunData, before: Answer, after: Answer, paired: bool) -> str:
    ask = _ask(run, before) if paired else ""
    left, right = ("Before", "After") if paired else ("First step", "Last step")
    sides = f"{_answer(run, left, before, paired)}{_answer(run, right, after, paired)}"
    return f'<li class="card">{ask}<div class="pair">{sides}</div></li>'


def _ask(run: RunData, answer: Answer) -> str:
    expected = ""
    if answer.label:
        expected = f'<p class="expected">expected <code>{escape(answer.label)}</code></p>'
    media = shown(answer.attachments, run.media, "what the model was given")
    given = f'<div class="given">{media}</div>' if media else ""
    prompt = f'<p class="prompt">{escape(answer.prompt)}</p>'
    return f'<div class="ask">{prompt}{expected}</div>{given}'


def _answer(run: RunData, title: str, answer: Answer, paired: bool) -> str:
    text = '<p class="empty">no text</p>'
    if answer.text.strip():
        text = f"<pre>{escape(answer.text)}</pre>"
    ask = "" if paired else _ask(run, answer)
    header = f"<header><span>{title}</span>{_mark(answer)}</header>"
    return f'<div class="answer">{header}{ask}{text}</div>'


def _mark(answer: Answer) -> str:
    """Return the verdict on a response, else its reward."""
    if answer.correct is not None:
        css, mark, word = VERDICTS[answer.correct]
        return f'<span class="mark {css}">{mark} {word}</span>'
    if answer.reward is None:
        return ""
    return f'<span class="mark">reward {compact(answer.reward)}</span>'
