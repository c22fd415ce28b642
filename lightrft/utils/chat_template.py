"""Content and ends of turns that a chat template writes, and the arguments that it reads."""

from __future__ import annotations

import functools
import inspect
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrft.utils.errors import ConfigError, ModelError, did_you_mean

GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""A tag of transformers around what the assistant says."""
_OF_RENDERING = frozenset({"messages", "conversations", "raise_exception", "strftime_now"})
"""Names that transformers gives to every template, or needs itself."""


def rendered(apply: Callable[[list[dict[str, object]]], str], content: object) -> str | None:
    """Return the text that ``apply`` renders for a user message with ``content``.

    ``content`` is text or a list of parts. Returns None if the template does not accept it.
    """
    try:
        text = apply([{"role": "user", "content": content}])
    # A template can raise any error, by jinja or by its own checks.
    except Exception:
        return None
    # A template for text alone prints a list of parts with Python's ``repr()``.
    return None if "'type'" in text else text


@functools.lru_cache(maxsize=16)
def names_read(template: str) -> frozenset[str]:
    """Return the names of the arguments that a chat template reads.

    Args:
        template: The source of the template.

    Raises:
        ModelError: It cannot be parsed.
    """
    from jinja2 import Environment, TemplateSyntaxError, meta

    # with the tags of transformers; another one cannot be rendered either
    known = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = known.parse(GENERATION.sub("", template))
    except TemplateSyntaxError as error:
        problem = f"the chat template is malformed in line {error.lineno}: {error.message}"
        raise ModelError(f"{problem}; set model.chat_template to another") from error
    return frozenset(meta.find_undeclared_variables(parsed))


def names_of_rendering(tokenizer: Any) -> set[str]:
    """Return the names that ``tokenizer`` takes itself when it renders, or gives to templates."""
    return {*inspect.signature(tokenizer.apply_chat_template).parameters, *_OF_RENDERING}


def argument_problem(
    field: str, given: Iterable[str], templates: Iterable[str], reserved: set[str]
) -> str:
    """Return what is wrong with the arguments of chat templates; empty if each of them is read.

    Args:
        field: Name of the setting or field that gives the arguments.
        given: Names of the arguments.
        templates: The sources of the templates that may get them.
        reserved: Names that cannot be given.

    Raises:
        ModelError: A template cannot be parsed.
    """
    read = frozenset[str]().union(*map(names_read, templates)) - reserved
    for name in given:
        if name in reserved:
            return f"{field}.{name} is set by lightrft itself; leave it out"
        if name not in read:
            names = ", ".join(sorted(read)) or "no argument"
            problem = f"{field}: the chat template does not read {reprlib.repr(name)}"
            return f"{problem}; it reads {names}{did_you_mean(name, read) or '; leave it out'}"
    return ""


def check_options(setting: str, options: Collection[str], tokenizer: Any) -> None:
    """Check that a chat template of ``tokenizer`` reads all options that hold for every row.

    Args:
        setting: Name of the setting that gives the options.
        options: Names of the options.
        tokenizer: The tokenizer with its chat template.

    Raises:
        ConfigError: No template reads an option, or an option cannot be set.
        ModelError: A template cannot be parsed.
    """
    if not options:
        return
    source = tokenizer.chat_template
    # some tokenizers have another template for rows with tools
    templates = source.values() if isinstance(source, Mapping) else [source]
    reserved = names_of_rendering(tokenizer) - {"tools", "documents"}
    if problem := argument_problem(setting, options, templates, reserved):
        raise ConfigError(problem)


_SAID, _NEXT = "sentinelsaid", "sentinelnext"
"""Words that no template writes itself."""
_CALL = {"name": "sentinel", "arguments": {"value": _SAID}}
PROBE_TOOL = {
    "type": "function",
    "function": {"name": "sentinel", "description": "A tool.", "parameters": {"type": "object"}},
}
"""A tool for templates that write calls only next to tools."""


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """The tokens that end a turn of the assistant, as a chat template writes them.

    Attributes:
        closing: Special tokens that the template writes at the end of a turn.
        marks: First token of the next message, by its role, for a template that closes no turn and
            begins each message with a special token (GLM-4.5).
        is_open: The template writes no special token at the end of a turn with text.
    """

    closing: tuple[int, ...] = ()
    marks: Mapping[str, int] = field(default_factory=dict)
    is_open: bool = False

    @property
    def ids(self) -> tuple[int, ...]:
        """Return all tokens that end a turn."""
        return tuple(dict.fromkeys((*self.closing, *self.marks.values())))


def turn_ends(tokenizer: Any) -> TurnEnds:
    """Return the tokens that end a turn of the assistant in the chat template of ``tokenizer``.

    They are found by rendering a turn with text and a turn with a tool call. A tokenizer without a
    chat template has none.
    """
    if not tokenizer.chat_template:
        return TurnEnds()
    return _turn_ends(tokenizer, repr(tokenizer.chat_template))


@functools.lru_cache(maxsize=16)
def _turn_ends(tokenizer: Any, template: str) -> TurnEnds:
    """Return ``turn_ends``. ``template`` keeps the result apart from that of another template."""
    special = special_tokens(tokenizer)
    spelled = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "$^")
    closing: list[int] = []
    marks: dict[str, int] = {}
    is_open = False
    for said, following in _probes():
        turn = _rendered_probe(tokenizer, said)
        if turn is None:
            continue
        ends = spelled.findall(turn, turn.rindex(_SAID) + len(_SAID))
        if ends:
            closing.append(special[ends[-1]])
            continue
        is_open |= "tool_calls" not in said[-1]
        longer = _rendered_probe(tokenizer, [*said, following])
        if longer is not None and longer.startswith(turn):
            rest = longer[len(turn) :].lstrip()
            if start := spelled.match(rest):
                marks[following["role"]] = special[start[0]]
    return TurnEnds(tuple(dict.fromkeys(closing)), marks, is_open)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the special tokens of ``tokenizer`` with their ids, without the unknown token."""
    found = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids))
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            found[token.content] = number
    # ordinary text can produce the unknown token, and a vocabulary may lack the token of a setting
    unknown = tokenizer.unk_token_id
    ends = (tokenizer.eos_token_id, tokenizer.bos_token_id)
    return {text: i for text, i in found.items() if i is not None and (i != unknown or i in ends)}


def _probes() -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Return conversations that end with a turn of the assistant, and a message after each."""
    # an id that Mistral's templates accept
    call = {"id": "sentinel1", "type": "function", "function": _CALL}
    user = {"role": "user", "content": "Hello"}
    said = [user, {"role": "assistant", "content": _SAID}]
    called = [user, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "content": _NEXT, "name": "sentinel", "tool_call_id": "sentinel1"}
    return [(said, {"role": "user", "content": _NEXT}), (called, result)]


def _rendered_probe(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> str | None:
    """Return the text of ``messages``; ``None`` if the template writes no such messages."""
    tools = [PROBE_TOOL] if any("tool_calls" in message for message in messages) else None
    in_parts = [
        {**m, "content": [{"type": "text", "text": m["content"]}] if m["content"] else []}
        for m in messages
    ]
    for shown in (list(messages), in_parts):
        try:
            text = str(tokenizer.apply_chat_template(shown, tools=tools, tokenize=False))
        # A template can raise any error, by jinja or by its own checks.
        except Exception:
            text = ""
        if _SAID in text and "'type'" not in text:
            return text
    return None
