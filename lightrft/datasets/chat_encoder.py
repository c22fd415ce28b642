"""Conversion of prompts and conversations to text and token ids.

A special token that is spelled out in a row must not act as one. Otherwise a user could end the
turn and speak as the assistant. Each such spelling is therefore replaced by a marker before text
enters a template (``shield``). The rendered text is split at the markers. The spellings are encoded
as plain text, and everything else is encoded normally. A row without such a spelling gets exactly
the tokens of ``tokenizer.apply_chat_template``.

Media are marks in the text until it is rendered. Chat templates see content parts, and the text
that they write for each part becomes its mark again. ``expanded`` replaces each mark by the
processor's text, with one placeholder per feature. If no template writes the text that a model
expects around an item, it is written here (``unwritten``).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from lightrft.config.data import DataConfig
from lightrft.datasets.media import NOTHING, MediaReader, Reads
from lightrft.datasets.media.items import MARK, as_parts, mark, marks, replaced
from lightrft.datasets.media.items import OPEN as MEDIA_OPEN
from lightrft.datasets.row_parser import Message, Record, read_conversation
from lightrft.datasets.row_tables import BadRow, look_up
from lightrft.types import Extent, Prompt
from lightrft.utils.chat_template import rendered
from lightrft.utils.errors import ConfigError, ModelError

_log = logging.getLogger(__name__)
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # Unicode noncharacters: never part of interchanged text
MARKER = re.compile(f"{OPEN}(\\d+){CLOSE}")
MARKUP = re.compile(r"[<\[]\S+[>\]]")
FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.]*)\}")
WAYS_OUT = "set model.chat_template to a template file, or data.chat: false with data.template"


class Encoder:
    """Encodes text and messages for a tokenizer and a media processor.

    Args:
        config: the settings of the data.
        tokenizer: the tokenizer, with its chat template.
        processor: the media processor (see ``lightrft.models.processors``). None for a model that
            reads only text.

    Raises:
        ModelError: ``chat`` is true and the tokenizer has no chat template.
        ConfigError: a system prompt or ``chat_options`` without a chat template, or a ``template``
            without a field.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, processor: Any = None) -> None:
        self.tokenizer = tokenizer
        self.media = None if processor is None else MediaReader(config.media, processor)
        has = bool(tokenizer.chat_template)
        if config.chat is True and not has:
            raise ModelError(f"data.chat is true, but the tokenizer {_name(tokenizer)} has no chat template; {WAYS_OUT}")
        self.chat = (has and config.template is None) if config.chat == "auto" else config.chat
        self.template = None if config.template is None else _parse_template(config.template, processor is not None)
        self.system = config.system
        self.options = dict(config.chat_options)
        if not self.chat and (config.system is not None or config.chat_options):
            named = "data.system" if config.system is not None else "data.chat_options"
            raise ConfigError(f"{named} needs a chat template, and none is in use; put the text in data.template, or: {WAYS_OUT}")
        self._as_text = config.special_tokens == "text"
        added = tokenizer.added_tokens_decoder
        special = {t.content for t in added.values() if t.special} | set(tokenizer.all_special_tokens)
        parts = [] if self.media is None else list(self.media.parts.values())
        places = {part.written for part in parts}
        source = "".join([str(tokenizer.chat_template), *(text for part in parts for text in part.around)])
        written = {t.content for t in added.values() if MARKUP.fullmatch(t.content) and t.content in source}
        # longest first, because a regular expression takes the first alternative that matches
        self._table = [*sorted(special | written | places, key=lambda s: (-len(s), s)), OPEN, CLOSE]
        self._place = {spelling: k for k, spelling in enumerate(self._table)}
        self._anyone = _any_of(self._table)
        self._answer = _any_of([s for s in self._table if s in special or s in places or s in (OPEN, CLOSE)])
        unknown = tokenizer.unk_token_id
        # without the unknown token, which ordinary text can produce
        self.special_ids = frozenset({*tokenizer.all_special_ids, *(k for k, t in added.items() if t.special)} - {unknown})
        self._control_ids = self.special_ids | {k for k, t in added.items() if t.content in written}
        for kind, text in self.unwritten.items() if self.chat else ():
            _log.warning("the chat template takes no %s: each is written into the text of its message as %r", kind, text)

    @cached_property
    def reads(self) -> Reads:
        """Return the media that rows may contain, with their spellings."""
        if self.media is None:
            return NOTHING
        own = {kind: () if self._as_text else (part.written,) for kind, part in self.media.parts.items()}
        return Reads({kind: tuple(dict.fromkeys((f"<{kind}>", *spelled))) for kind, spelled in own.items()})

    @cached_property
    def unwritten(self) -> dict[str, str]:
        """Return the text of one item, for each kind of media that no template writes."""
        parts = {} if self.media is None else self.media.parts
        own = {kind: part for kind, part in parts.items() if not (self.chat and self._takes[kind])}
        return {kind: part.written.join(part.around) for kind, part in own.items()}

    @cached_property
    def placeholders(self) -> frozenset[int]:
        """Return the token ids that stand for media features."""
        return frozenset() if self.media is None else frozenset(self.media.processor.tokens.values())

    @property
    def eos(self) -> int:
        """Return the token that ends a response.

        Raises ``ModelError`` for a tokenizer without an EOS token.
        """
        if self.tokenizer.eos_token_id is None:
            raise ModelError(f"the tokenizer {_name(self.tokenizer)} has no eos token, so no answer could end")
        return self.tokenizer.eos_token_id

    @cached_property
    def start(self) -> list[int]:
        """Return the tokens that the tokenizer puts before a plain text, such as BOS."""
        bare = self._plain_ids(["a"], add_special_tokens=False)[0]
        full = self._plain_ids(["a"], add_special_tokens=True)[0]
        at = next((k for k in range(len(full)) if full[k : k + len(bare)] == bare), 0)
        return full[:at]

    def ask(self, messages: Sequence[Message], where: str) -> Prompt:
        """Return a prompt, without id, for chat messages.

        The content of a message is text or a list of parts. A part is a dictionary such as
        ``{"type": "image", "image": "cat.png"}``.

        Raises ``BadRow``, which is a ``DataError``, if a message or its media cannot be read. The
        message of the error begins with ``where``.
        """
        record = read_conversation(messages, where, self.reads)
        shown = self.render(self.shielded(record.messages), where, generate=True)
        (texts,) = self.expanded([(record, [shown])])
        if isinstance(texts, BadRow):
            raise texts
        prompt = Prompt(id="", token_ids=self.encode_prompts(texts)[0], text=self.readable(shown))
        self.attach(prompt, record, shown)
        return prompt

    def expanded(self, shown: Sequence[tuple[Record, Sequence[str]]]) -> list[list[str] | BadRow]:
        """Replace the media marks in the rendered texts of each record by the text of the media.

        This measures the media. An unreadable record is returned as its ``BadRow`` error.
        """
        if self.media is None:
            return [list(texts) for _, texts in shown]
        used = [sorted({number for text in texts for _, number in marks(text)}) for _, texts in shown]
        items = [record.media[k] for (record, _), numbers in zip(shown, used) for k in numbers]
        extents = iter(self.media.measured(items))
        rows = [{k: next(extents) for k in numbers} for numbers in used]
        return [self._expanded(record, texts, known) for (record, texts), known in zip(shown, rows)]

    def attach(self, prompt: Prompt, record: Record, shown: str) -> None:
        """Load the media whose marks are in ``shown`` and add them to ``prompt``.

        Args:
            prompt: the prompt to change.
            record: the row with its media items.
            shown: the rendered text with marks.

        Raises:
            BadRow: the media cannot be read.
        """
        if self.media is not None and (order := marks(shown)):
            items = [record.media[number] for _, number in order]
            prompt.media, prompt.attachments = self.media.inputs(items, prompt.token_ids, record.where)

    def readable(self, shown: str) -> str:
        """Return a rendered text in human-readable form."""
        return self.unshield(shown if self.media is None else self._written(shown))

    def prompt(self, record: Record, cut: int = 0) -> str:
        """Return the shielded text that the policy continues.

        The first ``cut`` characters of its last message are left out. If a conversation ends with
        an assistant turn, the prompt ends before that turn.

        Raises ``BadRow`` for a conversation of several messages if no chat template is in use.
        """
        if not self.chat:
            return self._surrounded(self._text_of(record, cut))
        return self.render(self.opening(record, cut), record.where, generate=True)

    def opening(self, record: Record, cut: int = 0) -> list[Message]:
        """Return the shielded messages of the prompt, with the system message first."""
        if isinstance(record.prompt, str):
            messages = [{"role": "user", "content": self._text_of(record, cut)}]
        else:
            messages = self.shielded(_asking(record), cut)
        return self.with_system(messages)

    def conversation(self, record: Record) -> list[Message]:
        """Return the shielded messages of the whole record, with the system message first."""
        messages = record.messages
        shown = self.shielded(messages)
        if isinstance(record.prompt, str):
            shown[0] = {**shown[0], "content": self._text_of(record, 0)}
        return self.with_system(shown)

    def last_message(self, record: Record) -> str:
        """Return the text that ``cut`` refers to: the prompt or its last message."""
        return record.prompt if isinstance(record.prompt, str) else _asking(record)[-1]["content"]

    def with_system(self, messages: list[Message]) -> list[Message]:
        """Return ``messages`` after the configured system message, unless they have their own."""
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def shielded(self, messages: Sequence[Message], cut: int = 0) -> list[Message]:
        """Return copies of ``messages`` in which no text acts as a control token."""
        shown = [self._shield_all(m, m["role"] == "assistant") for m in messages]
        if cut:
            last = messages[-1]
            shown[-1] = {
                **shown[-1],
                "content": self.shield(last["content"][cut:], answer=last["role"] == "assistant"),
            }
        return shown

    def render(self, messages: Sequence[Message], where: str, *, generate: bool = False) -> str:
        """Render shielded ``messages`` with the chat template.

        Args:
            messages: the shielded messages.
            where: location of the row, for messages.
            generate: if True, the text ends with the start of the assistant's turn.

        Raises:
            BadRow: the chat template raises an error, or writes a wrong number of media.
        """
        try:
            shown = messages if self.media is None else [self._with_parts(m) for m in messages]
            text = self._apply(shown, generate)
        except Exception as error:  # jinja's errors and whatever a template raises
            roles = ", ".join(m["role"] for m in messages)
            raise BadRow(f"{where}: the chat template refuses messages with the roles {roles}: {error}") from error
        order = [] if self.media is None else [m for message in messages for m in marks(message["content"])]
        return self._with_marks(text, order, where) if order else text

    def shield(self, text: str, *, answer: bool = False) -> str:
        """Return ``text`` with spelled-out special tokens replaced by markers.

        In assistant text (``answer``), added tokens that are not special, such as ``<think>``, keep
        their function.
        """
        if not self._as_text:
            return text
        return (self._answer if answer else self._anyone).sub(lambda m: f"{OPEN}{self._place[m[0]]}{CLOSE}", text)

    def unshield(self, text: str) -> str:
        """Return ``text`` with markers replaced by the spellings."""
        return MARKER.sub(lambda m: self._table[int(m[1])], text) if self._as_text else text

    def is_shielded(self, text: str) -> bool:
        """Return True if ``text`` contains a spelled-out special token."""
        return self._as_text and OPEN in text

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of rendered texts, without added special tokens."""
        cut = [MARKER.split(t) if self.is_shielded(t) else [t] for t in texts]
        plain = self._plain_ids([piece for pieces in cut for piece in pieces[::2]])
        ids: list[list[int]] = []
        at = 0
        for pieces in cut:
            row = plain[at]
            for k, spelling in enumerate(pieces[1::2], start=1):
                row = [*row, *self._spelled(int(spelling)), *plain[at + k]]
            at += (len(pieces) + 1) // 2
            ids.append(row)
        return ids

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of complete prompts.

        Without a chat template, each prompt begins with the tokens of ``start``, once.
        """
        return [self.with_start(row) for row in self.encode(texts)]

    def with_start(self, ids: list[int]) -> list[int]:
        """Return ``ids`` after the tokens of ``start``.

        Nothing is added if a chat template is in use or if ``ids`` already begin with them.
        """
        return ids if self.chat or ids[: len(self.start)] == self.start else [*self.start, *ids]

    def marked(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the tokens of messages and the mask of assistant tokens, each ``[T]``.

        The messages contain no markers. The mask is True inside the ``{% generation %}`` blocks of
        the template.
        """
        made = self.tokenizer.apply_chat_template(
            list(messages), return_dict=True, return_assistant_tokens_mask=True, **self.options
        )
        return made["input_ids"], [bool(m) for m in made["assistant_masks"]]

    def _apply(self, messages: Sequence[Message], generate: bool) -> str:
        return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generate, **self.options)

    def _with_parts(self, message: Message) -> Message:
        """Return ``message`` with media as parts or text, as the chat template accepts it."""
        content = message["content"]
        kinds = {kind for kind, _ in marks(content)}
        if all(self._takes[kind] for kind in kinds or {"text"}):
            return (
                {
                    **message,
                    "content": as_parts(content),
                }
                if kinds or not self._takes["string"]
                else message
            )
        return {**message, "content": self._written(self._surrounded(content))}

    @cached_property
    def _takes(self) -> dict[str, bool]:
        """Return which content the template writes fully: a ``string``, and parts of each kind."""

        def writes(content: Any, *expected: str) -> bool:
            text = rendered(lambda messages: self._apply(messages, False), content)
            return text is not None and all(text.count(e) == 1 for e in expected)

        parts = {} if self.media is None else self.media.parts
        word = {"type": "text", "text": "(word)"}
        kinds = {kind: writes([{"type": kind}, word], part.written, "(word)") for kind, part in parts.items()}
        return {"string": writes("(word)", "(word)"), "text": writes([word], "(word)"), **kinds}

    def _written(self, text: str) -> str:
        assert self.media is not None
        parts = self.media.parts
        return replaced(text, lambda kind, _: parts[kind].written)

    def _surrounded(self, text: str) -> str:
        """Return ``text`` with the expected text around each item, where it is missing."""
        if self.media is None:
            return text
        made, *cut = MARK.split(text)
        for kind, number, after in zip(cut[::3], cut[1::3], cut[2::3]):
            left, right = self.media.parts[kind].around
            made += left * (not made.endswith(left)) + mark(kind, int(number)) + right * (not after.startswith(right)) + after
        return made

    def _with_marks(self, text: str, order: Sequence[tuple[str, int]], where: str) -> str:
        """Return ``text`` with the marks of ``order`` in place of the template's media text."""
        assert self.media is not None
        spelled = {kind: self.media.parts[kind].written for kind, _ in order}
        waiting = {w: [mark(*m) for m in order if spelled[m[0]] == w] for w in spelled.values()}
        found = _any_of(sorted(waiting, key=len, reverse=True))
        for written, items in waiting.items():
            held = sum(m[0] == written for m in found.finditer(text))
            if held != len(items):
                raise BadRow(f"{where}: the chat template writes {written!r} {held} times for {len(items)} items")
        return found.sub(lambda m: waiting[m[0]].pop(0), text)

    def _expanded(
        self,
        record: Record,
        texts: Sequence[str],
        extents: Mapping[int, Extent | BadRow],
    ) -> list[str] | BadRow:
        assert self.media is not None
        put: dict[int, str] = {}
        known = {number: extent for number, extent in extents.items() if not isinstance(extent, BadRow)}
        try:
            for extent in extents.values():
                if isinstance(extent, BadRow):
                    raise extent
            self.media.check_total([record.media[number] for number in known], list(known.values()), record.where)
            for number, extent in known.items():
                put[number] = self.media.expand(record.media[number], extent)
        except BadRow as error:
            return error
        return [replaced(text, lambda _, number: put[number]) for text in texts]

    def _text_of(self, record: Record, cut: int) -> str:
        prompt = record.prompt
        if not isinstance(prompt, str):
            asked = _asking(record)
            if len(asked) != 1 or asked[0]["role"] != "user":
                raise BadRow(
                    f"{record.where}: a conversation of {len(asked)} messages needs a chat template, and none is in use; "
                    "set model.chat_template to a template file"
                )
            prompt = asked[0]["content"]
        if self.template is None:
            return self.shield(prompt[cut:])
        return self._fill(self.template, record, prompt[cut:])

    def _fill(self, template: list[tuple[str, str]], record: Record, prompt: str) -> str:
        parts: list[str] = []
        text = "" if any(name == "prompt" for _, name in template) else "".join(m[0] for m in MARK.finditer(prompt))
        for literal, name in template:
            if literal and text:
                parts.append(self.shield(text))
                text = ""
            parts.append(literal)
            if name:
                value = prompt if name == "prompt" else look_up(record.row, name)
                if value is None:
                    have = ", ".join(record.row)
                    raise BadRow(f"{record.where}: data.template names {{{name}}}; the row has: {have}")
                if self.media is not None and name != "prompt" and MEDIA_OPEN in str(value):
                    raise BadRow(f"{record.where}: {{{name}}} of data.template holds U+FDD2, which is reserved; take it out")
                text += str(value)  # adjacent fields are shielded as one text, because a spelling could span them
        return "".join([*parts, self.shield(text)])

    def _shield_all(self, value: Any, answer: bool) -> Any:
        if isinstance(value, str):
            return self.shield(value, answer=answer)
        if isinstance(value, Mapping):
            return {k: self._shield_all(v, answer) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._shield_all(v, answer) for v in value]
        return value

    def _spelled(self, place: int) -> list[int]:
        """Return a special token's spelling as plain text tokens.

        Encodes character by character if the tokenizer otherwise produces the special token.
        """
        text = self._table[place]
        for pieces in ([text], list(text)):
            ids = [t for row in self._plain_ids(pieces, split_special_tokens=True) for t in row]
            if not self._control_ids & set(ids):
                return ids
        raise ModelError(f"the tokenizer {_name(self.tokenizer)} cannot write {text!r} as plain text")

    def _plain_ids(self, texts: list[str], *, add_special_tokens: bool = False, **options: Any) -> list[list[int]]:
        if not texts:
            return []
        return self.tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **options,
        )["input_ids"]


def check_template(tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
    """Check the prefix property of the chat template.

    The tokens of a conversation up to a turn must be a prefix of the tokens of the longer
    conversation. Several turns can only then share one sequence.

    Raises ``ModelError`` with the first violation and the possible settings.
    """
    encoder = Encoder(DataConfig(chat=True, chat_options=dict(options or {})), tokenizer)
    turns = [
        {
            "role": r,
            "content": c,
        }
        for r, c in zip(("user", "assistant") * 2, ("1+1=?", "It is 2.", "2+1=?", "It is 3."))
    ]
    shorter: list[int] = []
    shown = ""
    for asked in (1, 3):
        for upto, generate in ((asked, True), (asked + 1, False)):
            text = encoder.render(turns[:upto], f"the tokenizer {_name(tokenizer)}", generate=generate)
            ids = encoder.encode([text])[0]
            if ids[: len(shorter)] != shorter:
                raise prefix_error(tokenizer, shown, text)
            shorter, shown = ids, text


def prefix_error(tokenizer: Any, shorter: str, longer: str) -> ModelError:
    """Return the error for a chat template that changes earlier text.

    Args:
        tokenizer: the tokenizer, for its name.
        shorter: the text of the shorter conversation.
        longer: the text of the longer conversation, which should begin with ``shorter``.
    """
    at = next((k for k, (a, b) in enumerate(zip(shorter, longer)) if a != b), min(len(shorter), len(longer)))
    near = slice(max(0, at - 20), at + 40)
    return ModelError(
        f"the chat template of {_name(tokenizer)} does not keep what came before: {shorter[near]!r} becomes {longer[near]!r} "
        "once the conversation goes on, so its turns cannot share one row of tokens. Set data.turns: each (or last) if it is "
        "earlier turns that change, model.chat_template to a template without this, or data.chat_options to switch it off"
    )


def _asking(record: Record) -> list[Message]:
    """Return the messages of a record before the assistant's last turn."""
    messages = [] if isinstance(record.prompt, str) else list(record.prompt)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise BadRow(f"{record.where}: the conversation has no message before the assistant's")
    return messages


def _parse_template(template: str, media: bool) -> list[tuple[str, str]]:
    """Return ``(literal, field name)`` pairs.

    Raises ``ConfigError`` for a template without a field, unless rows differ in their ``media``.
    """
    parts: list[tuple[str, str]] = []
    literal, at = "", 0
    for match in FIELD.finditer(template):
        literal += template[at : match.start()]
        at = match.end()
        if match[1]:
            parts.append((literal, match[1]))
            literal = ""
        else:
            literal += match[0][0]
    if not parts and not media:
        raise ConfigError(f"data.template = {template!r} has no field; write {{prompt}} where the prompt goes")
    return [*parts, (literal + template[at:], "")]


def _name(tokenizer: Any) -> str:
    return tokenizer.name_or_path or type(tokenizer).__name__


def _any_of(spellings: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(s) for s in spellings))
