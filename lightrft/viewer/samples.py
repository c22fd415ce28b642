"""The section with responses before and after training.

Responses are shown in full, or as a gallery if all of them are short and have media.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lightrft.viewer.media import shown
from lightrft.viewer.run_data import Answer, RunData
from lightrft.viewer.svg import compact

ANSWERS = 5
SHORT = 32
"""Largest number of characters of a response in the gallery."""

Pairs = Sequence[tuple[Answer, Answer]]


def answers(run: RunData) -> str:
    """Return the section, or an empty text if the run has no responses."""
    pairs = list(zip(run.before, run.after))
    if not pairs:
        return ""
    paired = all(a.prompt == b.prompt for a, b in pairs)
    if paired and all(_small(answer) for pair in pairs for answer in pair):
        return _section("Answers, before and after", _about_all(pairs), _gallery(run, pairs))
    head = "Answers, before and after" if paired else "Answers at the first step and at the last"
    some = pairs[:ANSWERS]
    of = f"The first {len(some)} of {len(pairs)} held-out problems that were kept." if paired and len(pairs) > len(some) else ""
    items = "".join(_pair(run, before, after, paired) for before, after in some)
    return _section(head, of, f'<ol class="answers">{items}</ol>')


def _section(head: str, about: str, body: str) -> str:
    about = f"<p>{about}</p>" if about else ""
    return f'<section aria-labelledby="answers">\n<h2 id="answers">{head}</h2>\n{about}{body}\n</section>'


def _small(answer: Answer) -> bool:
    return bool(answer.attachments) and len(answer.text) <= SHORT and "\n" not in answer.text.strip()


def _about_all(pairs: Pairs) -> str:
    """Return the common prompt, if there is one, and the numbers of correct responses."""
    asked = {before.prompt for before, _ in pairs}
    question = f"Asked: {escape(asked.pop())} " if len(asked) == 1 else ""
    if any(a.correct is None for pair in pairs for a in pair):
        return question.strip()
    right = [sum(bool(a.correct) for a in side) for side in zip(*pairs)]
    return f"{question}Of these {len(pairs)} held-out problems {right[0]} were answered right before, {right[1]} after."


def _gallery(run: RunData, pairs: Pairs) -> str:
    same = len({before.prompt for before, _ in pairs}) == 1
    return f'<ol class="gallery">{"".join(_tile(run, *pair, asked=not same) for pair in pairs)}</ol>'


def _tile(run: RunData, before: Answer, after: Answer, asked: bool) -> str:
    ask = f'<p class="prompt">{escape(before.prompt)}</p>' if asked else ""
    about = f"expected {before.label}" if before.label else "what the model was given"
    told = f'<p class="expected">{escape(about)}</p>' if before.label else ""
    said = f'{_word(before, "before")}<span class="arrow" aria-label="to">→</span>{_word(after, "after")}'
    css = " wrong" if after.correct is False else ""
    return f'<li class="card{css}">{shown(before.attachments, run.media, about)}{ask}{told}<p class="said">{said}</p></li>'


def _word(answer: Answer, when: str) -> str:
    mark, css = "", ""
    if answer.correct is not None:
        mark, css = ("✓", " good") if answer.correct else ("✗", " bad")
    text = escape(answer.text.strip()) or "no text"
    return f'<span class="mark{css}" title="{when}">{mark} {text}</span>'


def _pair(run: RunData, before: Answer, after: Answer, paired: bool) -> str:
    ask = _ask(run, before) if paired else ""
    left, right = ("Before", "After") if paired else ("First step", "Last step")
    sides = f"{_answer(run, left, before, paired)}{_answer(run, right, after, paired)}"
    return f'<li class="card">{ask}<div class="pair">{sides}</div></li>'


def _ask(run: RunData, answer: Answer) -> str:
    expected = f'<p class="expected">expected <code>{escape(answer.label)}</code></p>' if answer.label else ""
    given = shown(answer.attachments, run.media, "what the model was given")
    given = f'<div class="given">{given}</div>' if given else ""
    return f'<div class="ask"><p class="prompt">{escape(answer.prompt)}</p>{expected}</div>{given}'


def _answer(run: RunData, title: str, answer: Answer, paired: bool) -> str:
    if answer.correct is not None:
        mark = '<span class="mark good">✓ right</span>' if answer.correct else '<span class="mark bad">✗ wrong</span>'
    else:
        mark = f'<span class="mark">reward {compact(answer.reward)}</span>' if answer.reward is not None else ""
    text = f"<pre>{escape(answer.text)}</pre>" if answer.text.strip() else '<p class="empty">no text</p>'
    ask = "" if paired else _ask(run, answer)
    return f'<div class="answer"><header><span>{title}</span>{mark}</header>{ask}{text}</div>'
