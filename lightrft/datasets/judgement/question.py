"""A question to a judge: its text or messages, and the form of its verdict."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrft.config.reward_model.judgement import COMPARED, QuestionConfig
from lightrft.utils.errors import ConfigError

if TYPE_CHECKING:
    from jinja2 import Template

Raw = str | Sequence[Mapping[str, Any]]
"""Text, or messages with ``role`` and ``content``."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TEMPLATES = Path(__file__).parent / "templates"
OPEN, CLOSE = "\uf6f0", "\uf6f1"
"""Private characters around the number of a media part, while a template renders."""
_PART = re.compile(f"{OPEN}(\\d+){CLOSE}")


@dataclass(frozen=True, slots=True)
class Question:
    """The content of one question to a judge.

    Attributes:
        prompt: Request that the responses answer.
        responses: Responses in the order that the judge sees.
        reference: Reference answer. Empty if there is none.
        rubric: Criteria with their weights.
    """

    prompt: Raw
    responses: Sequence[Raw]
    reference: str = ""
    rubric: Sequence[tuple[str, float]] = ()


def ask(question: Question, config: QuestionConfig) -> Raw:
    """Return the question as text, or as a message with media parts.

    Args:
        question: Request, responses and what else the judge needs.
        config: Form of the question and of its verdict.

    Raises:
        ValueError: The number of responses does not fit the form, or a text has a character that
            is reserved for media.
        ConfigError: The template is missing or malformed.
    """
    count = len(question.responses)
    if config.form in COMPARED and not 2 <= count <= len(LETTERS):
        raise ValueError(
            f"form {config.form!r} compares 2 to {len(LETTERS)} responses, not {count}"
        )
    if config.form == "pair" and count != 2:
        raise ValueError(f"form 'pair' compares 2 responses, not {count}; take form: best")
    media: list[object] = []
    low, high = config.scale
    rendered = render(
        config,
        form=config.form,
        prompt=flat(question.prompt, media),
        responses=[
            (letter, flat(response, media)) for letter, response in zip(LETTERS, question.responses)
        ],
        reference=question.reference,
        rubric=[text for text, _ in question.rubric],
        criteria=config.criteria,
        ties=config.ties,
        tie=LETTERS[count],
        low=f"{low:g}",
        high=f"{high:g}",
        explain=config.explain,
        example=" or ".join(
            verdict_text(config, one) for one in examples(config, count, len(question.rubric))
        ),
    )
    if not media:
        return rendered
    # The split gives text, number, text, number ... text.
    pieces = _PART.split(rendered)
    content = [
        media[int(piece)] if k % 2 else {"type": "text", "text": piece}
        for k, piece in enumerate(pieces)
        if piece
    ]
    return [{"role": "user", "content": content}]


def render(config: QuestionConfig, **fields: object) -> str:
    """Return the template of ``config`` with ``fields``. Raises ``ConfigError``."""
    from jinja2 import TemplateError

    try:
        return load_template(config.template, config.form).render(**fields)
    except TemplateError as error:
        raise ConfigError(f"template = {config.template!r} cannot be filled: {error}") from error


def flat(said: Raw, media: list[object]) -> str:
    """Return text or messages as one text, with marks for media, which are added to ``media``.

    Several messages are written with their roles. Raises ``ValueError`` for a reserved character.
    """
    if isinstance(said, str):
        return _unmarked(said)
    texts = [_content(message["content"], media) for message in said]
    if len(said) == 1:
        return texts[0]
    named = [f"{m['role'].capitalize()}: {text}" for m, text in zip(said, texts)]
    return "\n\n".join(named)


def _content(content: object, media: list[object]) -> str:
    if not isinstance(content, list | tuple):
        return _unmarked(str(content))
    texts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type", "text") != "text":
            texts.append(f"{OPEN}{len(media)}{CLOSE}")
            media.append(part)
        else:
            texts.append(_unmarked(str(part["text"] if isinstance(part, Mapping) else part)))
    return "".join(texts)


def _unmarked(text: str) -> str:
    if OPEN in text or CLOSE in text:
        raise ValueError(f"the text has the character {OPEN!r} or {CLOSE!r}, which marks media")
    return text


def rubric_entries(given: object) -> list[tuple[str, float]]:
    """Return the criteria of a rubric with their weights.

    Raises ``ValueError`` if ``given`` is not a list of texts, or of tables of ``text`` or
    ``criterion`` and ``weight``.
    """
    if not isinstance(given, list | tuple) or not given:
        raise ValueError("no criteria for form: rubric; add the column rubric, or set rubric")
    found = []
    for k, one in enumerate(given, start=1):
        entry = one if isinstance(one, Mapping) else {"text": one}
        text, weight = entry.get("text", entry.get("criterion")), entry.get("weight", 1.0)
        if not isinstance(text, str) or not isinstance(weight, int | float) or not weight > 0:
            raise ValueError(f"rubric, criterion {k} must be a text, and its weight above 0")
        found.append((text, float(weight)))
    return found


def examples(config: QuestionConfig, count: int, criteria: int) -> list[str]:
    """Return the verdicts that a question shows: every one, or an example.

    Args:
        config: Form of the verdict.
        count: Number of responses.
        criteria: Number of criteria.
    """
    if config.form == "rating":
        return [f"{config.scale[1]:g}"]
    if config.form == "rubric":
        return [", ".join(("yes", "no")[k % 2] for k in range(criteria))]
    if config.form == "ranking":
        return [" > ".join(reversed(LETTERS[:count]))]
    return list(LETTERS[: count + config.ties])


def verdict_text(config: QuestionConfig, verdict: str) -> str:
    """Return ``verdict`` in the place where a judgement has it."""
    if config.verdict == "boxed":
        return f"\\boxed{{{verdict}}}"
    if config.verdict == "brackets":
        return f"[[{verdict}]]"
    if config.verdict == "json":
        return json.dumps({"verdict": verdict})
    # A pattern has no inverse, so its template says how to end.
    if config.verdict in ("number", "regex"):
        return verdict
    return f"<answer>{verdict}</answer>"


def lead(config: QuestionConfig) -> str:
    """Return the text of a judgement before its verdict, without reasons."""
    whole = verdict_text(config, "\0")
    return (json.dumps({"verdict": ""})[:-2] if config.verdict == "json" else whole).split("\0")[0]


@functools.cache
def load_template(path: str | None, form: str) -> Template:
    """Return the template in the file ``path``, or the template of the package for ``form``.

    Templates run in a sandbox, since they may come from elsewhere. Raises ``ConfigError``.
    """
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    name = "compare" if form in COMPARED else "grade"
    file = TEMPLATES / f"{name}.jinja" if path is None else Path(path).expanduser()
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    try:
        return environment.from_string(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template = {str(file)!r} cannot be read: {error}") from error
    except TemplateError as error:
        raise ConfigError(f"template = {str(file)!r} is no Jinja template: {error}") from error
