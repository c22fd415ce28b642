"""Prompts and conversations to text and token ids.

A special token that is spelled out in a row must not act as one: a user could end the turn and speak as the assistant. Before
text enters a template, each such spelling is replaced by a marker (``shield``); the rendered whole is cut at the markers, the
spellings are encoded as plain text, and everything else as the tokenizer encodes it. A row without such a spelling gets the very
tokens of ``tokenizer.apply_chat_template``.

Media are marks in the text until it has been rendered: chat templates see parts of their kinds, what they write for each becomes
its mark again, and ``expanded`` puts the processor's text, with a placeholder for each feature, where the marks are. What a model
was trained to find around an item is written here where no template writes it (``unwritten``).
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
    """What ``config``, a tokenizer and a processor of media do to text. Raises at construction when they do not fit.

    ``ModelError``: ``chat: true`` and a tokenizer without chat template. ``ConfigError``: a system prompt without a chat
    template, or a ``template`` without a field. Without ``processor`` (see ``lightrft.models.processors``) only text is read.
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
        self._table = [*sorted(special | written | places, key=lambda s: (-len(s), s)), OPEN, CLOSE]
        self._place = {spelling: k for k, spelling in enumerate(self._table)}
        self._anyone = _any_of(self._table)
        self._answer = _any_of([s for s in self._table if s in special or s in places or s in (OPEN, CLOSE)])
        unknown = tokenizer.unk_token_id
        self.special_ids = frozenset({*tokenizer.all_special_ids, *(k for k, t in added.items() if t.special)} - {unknown})
        self._control_ids = self.special_ids | {k for k, t in added.items() if t.content in written}
        for kind, text in self.unwritten.items() if self.chat else ():
            _log.warning("the chat template takes no %s: each is written into the text of its message as %r", kind, text)

    @cached_property
    def reads(self) -> Reads:
        """What may stand in a row besides text."""
        if self.media is None:
            return NOTHING
        own = {kind: () if self._as_text else (part.written,) for kind, part in self.media.parts.items()}
        return Reads({kind: tuple(dict.fromkeys((f"<{kind}>", *spelled))) for kind, spelled in own.items()})

    @cached_property
    def unwritten(self) -> dict[str, str]:
        """For each kind that no template writes, what is written for one of it instead."""
        parts = {} if self.media is None else self.media.parts
        own = {kind: part for kind, part in parts.items() if not (self.chat and self._takes[kind])}
        return {kind: part.written.join(part.around) for kind, part in own.items()}

    @cached_property
    def placeholders(self) -> frozenset[int]:
        """Tokens that stand for features of media."""
        return frozenset() if self.media is None else frozenset(self.media.processor.tokens.values())

    @property
    def eos(self) -> int:
        """The token that ends an answer. Raises ``ModelError`` for a tokenizer without one."""
        if self.tokenizer.eos_token_id is None:
            raise ModelError(f"the tokenizer {_name(self.tokenizer)} has no eos token, so no answer could end")
        return self.tokenizer.eos_token_id

    @cached_property
    def start(self) -> list[int]:
        """Tokens that the tokenizer itself puts before a text without chat template, such as BOS."""
        bare = self._plain_ids(["a"], add_special_tokens=False)[0]
        full = self._plain_ids(["a"], add_special_tokens=True)[0]
        at = next((k for k in range(len(full)) if full[k : k + len(bare)] == bare), 0)
        return full[:at]

    def ask(self, messages: Sequence[Message], where: str) -> Prompt:
        """A prompt, without id, of chat messages whose content is text or parts: ``{"type": "image", "image": "cat.png"}``.

        Raises ``BadRow``, a ``DataError``, that begins with ``where`` for what cannot be read.
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
        """The rendered texts of each record with the text of its media, as large as they are, in the place of their marks."""
        if self.media is None:
            return [list(texts) for _, texts in shown]
        used = [sorted({number for text in texts for _, number in marks(text)}) for _, texts in shown]
        items = [record.media[k] for (record, _), numbers in zip(shown, used) for k in numbers]
        extents = iter(self.media.measured(items))
        rows = [{k: next(extents) for k in numbers} for numbers in used]
        return [self._expanded(record, texts, known) for (record, texts), known in zip(shown, rows)]

    def attach(self, prompt: Prompt, record: Record, shown: str) -> None:
        """Give ``prompt`` the media whose marks ``shown`` has. Raises ``BadRow`` when they cannot be read."""
        if self.media is not None and (order := marks(shown)):
            items = [record.media[number] for _, number in order]
            prompt.media, prompt.attachments = self.media.inputs(items, prompt.token_ids, record.where)

    def readable(self, shown: str) -> str:
        """A rendered text as people read it."""
        return self.unshield(shown if self.media is None else self._written(shown))

    def prompt(self, record: Record, cut: int = 0) -> str:
        """The shielded text that the policy continues, without the first ``cut`` characters of its last message.

        A conversation that ends with the assistant's turn is prompted up to that turn. Raises ``BadRow`` for messages where no
        chat template is in use.
        """
        if not self.chat:
            return self._surrounded(self._text_of(record, cut))
        return self.render(self.opening(record, cut), record.where, generate=True)

    def opening(self, record: Record, cut: int = 0) -> list[Message]:
        """The shielded messages that ask, the system's first."""
        if isinstance(record.prompt, str):
            messages = [{"role": "user", "content": self._text_of(record, cut)}]
        else:
            messages = self.shielded(_asking(record), cut)
        return self.with_system(messages)

    def conversation(self, record: Record) -> list[Message]:
        """The shielded messages of the whole record, the system's first."""
        messages = record.messages
        shown = self.shielded(messages)
        if isinstance(record.prompt, str):
            shown[0] = {**shown[0], "content": self._text_of(record, 0)}
        return self.with_system(shown)

    def last_message(self, record: Record) -> str:
        """The text that ``cut`` counts in: the prompt, or the last message that asks."""
        return record.prompt if isinstance(record.prompt, str) else _asking(record)[-1]["content"]

    def with_system(self, messages: list[Message]) -> list[Message]:
        """``messages`` with the configured system message, unless they begin with their own."""
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def shielded(self, messages: Sequence[Message], cut: int = 0) -> list[Message]:
        """Copies of ``messages`` in which no text acts as a control token."""
        shown = [self._shield_all(m, m["role"] == "assistant") for m in messages]
        if cut:
            last = messages[-1]
            shown[-1] = {**shown[-1], "content": self.shield(last["content"][cut:], answer=last["role"] == "assistant")}
        return shown

    def render(self, messages: Sequence[Message], where: str, *, generate: bool = False) -> str:
        """Shielded ``messages`` through the chat template; ``generate`` opens the assistant's turn."""
        try:
            shown = messages if self.media is None else [self._with_parts(m) for m in messages]
            text = self._apply(shown, generate)
        except Exception as error:  # jinja's errors and whatever a template raises
            roles = ", ".join(m["role"] for m in messages)
            raise BadRow(f"{where}: the chat template refuses messages with the roles {roles}: {error}") from error
        order = [] if self.media is None else [m for message in messages for m in marks(message["content"])]
        return self._with_marks(text, order, where) if order else text

    def shield(self, text: str, *, answer: bool = False) -> str:
        """``text`` with spelled-out special tokens replaced by markers.

        In the assistant's own text, added tokens that are not special, such as ``<think>``, keep their meaning.
        """
        if not self._as_text:
            return text
        return (self._answer if answer else self._anyone).sub(lambda m: f"{OPEN}{self._place[m[0]]}{CLOSE}", text)

    def unshield(self, text: str) -> str:
        """The text as people read it."""
        return MARKER.sub(lambda m: self._table[int(m[1])], text) if self._as_text else text

    def is_shielded(self, text: str) -> bool:
        """Whether ``text`` spells a special token that is not one."""
        return self._as_text and OPEN in text

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered texts, nothing added."""
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
        """Token ids of whole prompts: with the tokenizer's own start where no chat template wrote one, and never twice."""
        return [self.with_start(row) for row in self.encode(texts)]

    def with_start(self, ids: list[int]) -> list[int]:
        """``ids`` after the tokenizer's own start, unless a chat template is in use or they begin with it."""
        return ids if self.chat or ids[: len(self.start)] == self.start else [*self.start, *ids]

    def marked(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """``[T]`` tokens of messages without markers, and which of them the template's ``{% generation %}`` blocks hold."""
        made = self.tokenizer.apply_chat_template(
            list(messages), return_dict=True, return_assistant_tokens_mask=True, **self.options
        )
        return made["input_ids"], [bool(m) for m in made["assistant_masks"]]

    def _apply(self, messages: Sequence[Message], generate: bool) -> str:
        return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generate, **self.options)

    def _with_parts(self, message: Message) -> Message:
        """``message`` as the chat template takes its media: parts, or what would be written for them inside the text."""
        content = message["content"]
        kinds = {kind for kind, _ in marks(content)}
        if all(self._takes[kind] for kind in kinds or {"text"}):
            return {**message, "content": as_parts(content)} if kinds or not self._takes["string"] else message
        return {**message, "content": self._written(self._surrounded(content))}

    @cached_property
    def _takes(self) -> dict[str, bool]:
        """What the chat template writes in full: content that is a ``string``, and parts of each kind."""

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
        """``text`` with what belongs around each item, where it does not stand there already."""
        if self.media is None:
            return text
        made, *cut = MARK.split(text)
        for kind, number, after in zip(cut[::3], cut[1::3], cut[2::3]):
            left, right = self.media.parts[kind].around
            made += left * (not made.endswith(left)) + mark(kind, int(number)) + right * (not after.startswith(right)) + after
        return made

    def _with_marks(self, text: str, order: Sequence[tuple[str, int]], where: str) -> str:
        """``text`` with the marks of ``order`` in the places that the template has written for media."""
        assert self.media is not None
        spelled = {kind: self.media.parts[kind].written for kind, _ in order}
        waiting = {w: [mark(*m) for m in order if spelled[m[0]] == w] for w in spelled.values()}
        found = _any_of(sorted(waiting, key=len, reverse=True))
        for written, items in waiting.items():
            held = sum(m[0] == written for m in found.finditer(text))
            if held != len(items):
                raise BadRow(f"{where}: the chat template writes {written!r} {held} times for {len(items)} items")
        return found.sub(lambda m: waiting[m[0]].pop(0), text)

    def _expanded(self, record: Record, texts: Sequence[str], extents: Mapping[int, Extent | BadRow]) -> list[str] | BadRow:
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
                text += str(value)  # neighbouring fields are shielded as one text: a spelling could span them
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
        """A special token's spelling as plain text. Character by character where the tokenizer would not let go of it."""
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
    """Check the prefix property: the tokens of a conversation up to a turn begin those of the longer one.

    It is what lets several turns share one row of tokens. Raises ``ModelError`` that shows the first break and the ways out.
    """
    encoder = Encoder(DataConfig(chat=True, chat_options=dict(options or {})), tokenizer)
    turns = [{"role": r, "content": c} for r, c in zip(("user", "assistant") * 2, ("1+1=?", "It is 2.", "2+1=?", "It is 3."))]
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
    """The error for a chat template that writes ``shorter`` differently inside ``longer``."""
    at = next((k for k, (a, b) in enumerate(zip(shorter, longer)) if a != b), min(len(shorter), len(longer)))
    near = slice(max(0, at - 20), at + 40)
    return ModelError(
        f"the chat template of {_name(tokenizer)} does not keep what came before: {shorter[near]!r} becomes {longer[near]!r} "
        "once the conversation goes on, so its turns cannot share one row of tokens. Set data.turns: each (or last) if it is "
        "earlier turns that change, model.chat_template to a template without this, or data.chat_options to switch it off"
    )


def _asking(record: Record) -> list[Message]:
    """The messages of a record up to the assistant's last turn."""
    messages = [] if isinstance(record.prompt, str) else list(record.prompt)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise BadRow(f"{record.where}: the conversation has no message before the assistant's")
    return messages


def _parse_template(template: str, media: bool) -> list[tuple[str, str]]:
    """``(literal, field name)`` pairs. Raises ``ConfigError`` for a template without a field, unless ``media`` can differ."""
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
