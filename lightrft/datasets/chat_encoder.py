"""Conversion of prompts and conversations to text and token ids.

Spelled-out special tokens stay text (``conversations.text_encoder``). A row without such a spelling
gets exactly the tokens of ``tokenizer.apply_chat_template``.

Media are marks in the text until it is rendered. Chat templates see content parts, and the text
that they write for each part becomes its mark again. ``expanded`` replaces each mark by the
processor's text, with one placeholder per feature. If no template writes the text that a model
expects around an item, it is written here (``unsupported_media``).
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lightrft.config.data import DataConfig
from lightrft.datasets.conversations.messages import MessageFit
from lightrft.datasets.conversations.text_encoder import CLOSE as CLOSE
from lightrft.datasets.conversations.text_encoder import OPEN as OPEN
from lightrft.datasets.conversations.text_encoder import TextEncoder, any_of, tokenizer_name
from lightrft.datasets.media import MediaReader, SupportedMedia
from lightrft.datasets.media.items import MARK, Item, as_parts, mark, marks, replaced
from lightrft.datasets.media.items import OPEN as MEDIA_OPEN
from lightrft.datasets.row_parser import (
    Message,
    ParsedRow,
    check_row_options,
    no_prompt,
    read_conversation,
    read_tools,
)
from lightrft.datasets.row_tables import MalformedRow, check_unicode, look_up
from lightrft.datasets.rows.recorded_row import RecordedRow, unrecorded
from lightrft.datasets.rows.row_content import tools_column
from lightrft.types import Extent, Prompt
from lightrft.utils.chat_template import PROBE_TOOL, check_options, rendered
from lightrft.utils.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.]*)\}")
WAYS_OUT = (
    "set model.chat_template to a template file, or data.apply_chat_template: false with "
    "data.template"
)


class ChatEncoder(TextEncoder):
    """Encodes text and messages for a tokenizer and a media processor.

    Args:
        config: the settings of the data.
        tokenizer: the tokenizer, with its chat template.
        processor: the media processor (see ``lightrft.models.processors``). None for a model that
            reads only text.

    Raises:
        ModelError: ``apply_chat_template`` is true and the tokenizer has no chat template.
        ConfigError: a system prompt, ``chat_template_options`` or ``columns.tools`` without a chat
            template, an option that the chat template does not read, or a ``template`` without a
            field.
    """

    def __init__(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, processor: Any = None
    ) -> None:
        self.processor = processor
        self.media = None if processor is None else MediaReader(config.media, processor)
        self._media_parts = {} if self.media is None else self.media.parts
        parts = self._media_parts.values()
        super().__init__(
            tokenizer,
            spelled=config.special_tokens,
            places={part.written for part in parts},
            written="".join("".join(part.around) for part in parts),
        )
        has_template = bool(tokenizer.chat_template)
        if config.apply_chat_template is True and not has_template:
            problem = f"the tokenizer {tokenizer_name(tokenizer)} has no chat template"
            raise ModelError(f"data.apply_chat_template is true, but {problem}; {WAYS_OUT}")
        is_auto = config.apply_chat_template == "auto"
        self.chat = has_template if is_auto else bool(config.apply_chat_template)
        if is_auto and has_template and config.template is not None:
            _warn_once(INSIDE, config.template)
        self._has_note = is_auto and not has_template and config.template is None
        self.template = None
        if config.template is not None:
            self.template = _parse_template(config.template, self.media is not None)
        self.system = config.system
        self.options = dict(config.chat_template_options)
        self._tools_column = tools_column(config.columns)
        # Transformers has no other name for the tools of a template.
        self._writes_tools = "tools" in str(tokenizer.chat_template)
        self._warned = False
        self._fit = MessageFit(self._probed)
        if not self.chat:
            _refuse_chat_settings(config)
        else:
            check_options("data.chat_template_options", self.options, tokenizer)
            for kind, text in self.unsupported_media.items():
                way_out = "each is written into the text of its message"
                _log.warning("the chat template takes no %s: %s as %r", kind, way_out, text)

    @cached_property
    def reads(self) -> SupportedMedia:
        """Return the media that rows may contain, with their spellings."""
        spellings: dict[str, tuple[str, ...]] = dict.fromkeys(self._media_parts, ())
        if self.media is not None and self.media.config.marks:
            for kind, part in self._media_parts.items():
                whole = part.written.join(part.around).strip()
                spellings[kind] = tuple(dict.fromkeys((f"<{kind}>", whole, part.written)))
        return SupportedMedia(spellings)

    @cached_property
    def unsupported_media(self) -> dict[str, str]:
        """Return the text of one item, for each kind of media that no template writes."""
        texts = {}
        for kind, part in self._media_parts.items():
            # In this order: without a chat template there is none to ask.
            if not self.chat or not self._takes[kind]:
                texts[kind] = part.written.join(part.around)
        return texts

    @cached_property
    def placeholders(self) -> frozenset[int]:
        """Return the token ids that stand for media features."""
        if self.media is None:
            return frozenset()
        return frozenset(self.media.processor.tokens.values())

    def ask(
        self,
        messages: Sequence[Message],
        where: str,
        tools: Sequence[object] = (),
        options: Mapping[str, object] | None = None,
        *,
        is_begun: bool = False,
    ) -> Prompt:
        """Return a prompt, without id, for chat messages.

        The content of a message is text or a list of parts. A part is a dictionary such as
        ``{"type": "image", "image": "cat.png"}``.

        Args:
            messages: the messages.
            where: location of the conversation, for messages.
            tools: JSON schemas of the tools that the chat template describes.
            options: keyword arguments of the chat template, in place of those of the settings.
            is_begun: if True, the response continues the last message, which is the assistant's.

        Raises:
            MalformedRow: a message or its media cannot be read, or the chat template writes no
                tools. It is a ``DataError``, and begins with ``where``.
        """
        if tools and not self._writes_tools:
            raise MalformedRow(
                f"{where}: the chat template writes no tools; set model.chat_template to a "
                "template with tools"
            )
        record = read_conversation(messages, where, self.reads)
        shielded = self.shielded(self._fit.fit(record.messages, where))
        shown = self.render(
            shielded[:-1] if is_begun else shielded,
            where,
            generate=True,
            begun=shielded[-1] if is_begun else None,
            tools=self._shield_given(list(tools), "tools", where),
            options=self._shield_given(options or {}, "options of the template", where),
        )
        texts = self.expanded_row(record, [shown])
        prompt = Prompt(id="", token_ids=self.encode_prompts(texts)[0], text=self.readable(shown))
        self.attach(prompt, record, shown)
        return prompt

    def expanded(
        self, shown: Sequence[tuple[ParsedRow, Sequence[str]]]
    ) -> list[list[str] | MalformedRow]:
        """Replace the media marks in the rendered texts of each record by the text of the media.

        This measures the media. An unreadable record is returned as its ``MalformedRow`` error.
        """
        if self.media is None:
            return [list(texts) for _, texts in shown]
        used: list[list[int]] = []
        items: list[Item] = []
        for record, texts in shown:
            # Once each: the texts of several turns repeat the media of earlier ones.
            used.append(sorted({number for _, number in marks("".join(texts))}))
            items += [record.media[number] for number in used[-1]]
        # one call measures the items of all records, so that they are read concurrently
        extents = iter(self.media.measured(items))
        made = []
        for (record, texts), numbers in zip(shown, used):
            known = {number: next(extents) for number in numbers}
            made.append(self._expanded(record, texts, known))
        return made

    def expanded_row(self, record: ParsedRow, texts: Sequence[str]) -> list[str]:
        """Return the ``texts`` of one record as ``expanded`` does. Raises ``MalformedRow``."""
        (made,) = self.expanded([(record, texts)])
        if isinstance(made, MalformedRow):
            raise made
        return made

    def attach(self, prompt: Prompt, record: ParsedRow, shown: str) -> None:
        """Load the media whose marks are in ``shown`` and add them to ``prompt``.

        Args:
            prompt: the prompt to change.
            record: the row with its media items.
            shown: the rendered text with marks.

        Raises:
            MalformedRow: the media cannot be read.
        """
        order = marks(shown)
        if self.media is None or not order:
            return
        items = [record.media[number] for _, number in order]
        prompt.media, prompt.attachments = self.media.inputs(items, prompt.token_ids, record.where)

    def readable(self, shown: str) -> str:
        """Return a rendered text in human-readable form."""
        return self.unescape_special_tokens(shown if self.media is None else self._written(shown))

    def prompt(self, record: ParsedRow, cut: int = 0) -> str:
        """Return the shielded text that the policy continues.

        The first ``cut`` characters of its last message are left out. If a conversation ends with
        an assistant turn, the prompt ends before that turn, or within it if it is a beginning.

        Raises ``MalformedRow`` for a conversation of several messages if no chat template is in
        use.
        """
        if not self.chat:
            text = self.text_of(record, cut)
            if record.is_begun and not isinstance(record.prompt, str):
                text += self.escape_special_tokens(record.prompt[-1]["content"], answer=True)
            self._refuse_tools(record)
            return self._surrounded(text)
        if isinstance(record.prompt, str):
            messages = [{"role": "user", "content": self.text_of(record, cut)}]
        else:
            asked = asking(record)
            messages = self.shielded(self._fit.fit(asked, record.where), cut)
            self.fill_template(record, messages, cut)
        messages, tools = self.with_system(messages), self.tools(record)
        begun = self.begun(record)
        return self.render(messages, record.where, generate=True, tools=tools, begun=begun)

    def begun(self, record: ParsedRow) -> Message | None:
        """Return the shielded turn of the assistant that the response to ``record`` continues."""
        if not record.is_begun or isinstance(record.prompt, str):
            return None
        return self.shielded(self._fit.fit(record.prompt, record.where)[-1:])[0]

    def tools(self, record: ParsedRow) -> list[object]:
        """Return the shielded JSON schemas of the tools of a record.

        A chat template must be in use. If it writes no tools, this is an empty list, and the first
        record with tools is logged.

        Raises ``MalformedRow`` if the column is no list of JSON schemas.
        """
        check_row_options(record.row, self.options, record.where)
        tools = read_tools(record.row, self._tools_column, record.where)
        if tools and not self._writes_tools:
            if not self._warned:
                problem = "the chat template writes no tools, so the model does not see those of"
                way_out = "set model.chat_template to a template with tools"
                _log.warning("%s: %s this and other rows; %s", record.where, problem, way_out)
                self._warned = True
            return []
        return self._shield_given(tools, "tools", record.where)

    def _refuse_tools(self, record: ParsedRow) -> None:
        """Raise ``MalformedRow`` for columns of a chat template, where none is in use."""
        check_row_options(record.row, self.options, record.where)
        if not isinstance(record.row, RecordedRow) or "tools" not in record.row.unread:
            return
        try:
            tools = read_tools(unrecorded(record.row), self._tools_column, record.where)
        except MalformedRow:  # something else, such as a text
            return
        if tools:
            problem = "tools need a chat template, and none is in use"
            way_out = "set model.chat_template to a template file, or data.columns.tools: null"
            raise MalformedRow(f"{record.where}: {problem}; {way_out}")

    def conversation(self, record: ParsedRow) -> list[Message]:
        """Return the shielded messages of the whole record, with the system message first."""
        messages = record.messages
        shown = self.shielded(self._fit.fit(messages, record.where))
        if isinstance(record.prompt, str):
            shown[0] = {**shown[0], "content": self.text_of(record, 0)}
        else:
            self.fill_template(record, shown)
        return self.with_system(shown)

    def fill_template(self, record: ParsedRow, messages: list[Message], cut: int = 0) -> None:
        """Write the last question of a conversation by the configured template.

        The last question is the last message of the user before the response.

        Args:
            record: the row, with messages as its prompt.
            messages: the shielded messages of the row, which this method changes.
            cut: number of characters to leave out at the start of the last message of the prompt.
        """
        if self.template is None:
            return
        asked = asking(record)
        users = [k for k, message in enumerate(asked) if message["role"] == "user"]
        if not users:
            problem = "data.template writes a message of the user, and this prompt has none"
            raise MalformedRow(f"{record.where}: {problem}")
        k = users[-1]
        # Media without a place are at the start of the first message of the user.
        front = record.front if k == users[0] else ""
        question = asked[k]["content"][cut if k == len(asked) - 1 else 0 :]
        filled = self._fill(self.template, record, question, front)
        messages[k] = {**messages[k], "content": filled}

    def with_system(self, messages: list[Message]) -> list[Message]:
        """Return ``messages`` after the configured system message, unless they have their own."""
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def shielded(self, messages: Sequence[Message], cut: int = 0) -> list[Message]:
        """Return copies of ``messages`` in which no text acts as a control token.

        Turns of the assistant lose the end token that they spell, since the template writes it.
        """
        shown = []
        for message in messages:
            is_answer = message["role"] == "assistant"
            if is_answer:
                message = {**message, "content": self.without_end(message["content"])}
            shown.append(self._shield_all(message, is_answer))
        if cut:
            last = messages[-1]
            # Cut before escaping: a marker and the spelling that it stands for differ in length.
            rest = last["content"][cut:]
            is_answer = last["role"] == "assistant"
            shown[-1] = {**shown[-1], "content": self.escape_special_tokens(rest, answer=is_answer)}
        return shown

    def render(
        self,
        messages: Sequence[Message],
        where: str,
        *,
        generate: bool = False,
        tools: Sequence[object] = (),
        options: Mapping[str, object] | None = None,
        begun: Message | None = None,
    ) -> str:
        """Render shielded ``messages`` with the chat template.

        Args:
            messages: the shielded messages.
            where: location of the row, for messages.
            generate: if True, the text ends with the start of the assistant's turn.
            begun: shielded turn of the assistant with which the text ends, left open. None for an
                empty one.
            tools: the shielded JSON schemas of tools.
            options: shielded keyword arguments of the chat template, in place of those of the
                settings.

        Raises:
            MalformedRow: the chat template raises an error, or writes a wrong number of media.
        """
        if begun is not None:
            messages = [*messages, begun]
        try:
            shown = messages if self.media is None else [self._with_parts(m) for m in messages]
            text = self._apply(
                shown, generate and begun is None, tools, options, is_open=begun is not None
            )
        except Exception as error:  # jinja's errors and whatever a template raises
            roles = ", ".join(m["role"] for m in messages)
            problem = f"the chat template refuses messages with the roles {roles}"
            raise MalformedRow(
                f"{where}: {problem}: {error}; leave such messages out, or give another template "
                "in model.chat_template"
            ) from error
        if self.media is None:
            return text
        order = marks("".join(m["content"] for m in messages))
        return self._with_marks(text, order, where) if order else text

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of complete prompts.

        Without a chat template, each prompt begins with the tokens of ``start``, once.
        """
        return [self.with_start(row) for row in self.encode(texts)]

    def with_start(self, ids: list[int]) -> list[int]:
        """Return ``ids`` after the tokens of ``start``.

        Nothing is added if a chat template is in use or if ``ids`` already begin with them.
        """
        if self.chat or ids[: len(self.start)] == self.start:
            return ids
        return [*self.start, *ids]

    def with_loss_mask(
        self, messages: Sequence[Message], tools: Sequence[object] = ()
    ) -> tuple[list[int], list[bool]]:
        """Return the tokens of messages and the mask of assistant tokens, each ``[T]``.

        The messages and ``tools`` contain no markers. The mask is True inside the
        ``{% generation %}`` blocks of the template.
        """
        made = self.tokenizer.apply_chat_template(
            list(messages),
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._options(tools),
        )
        return made["input_ids"], [bool(m) for m in made["assistant_masks"]]

    def _apply(
        self,
        messages: Sequence[Message],
        generate: bool,
        tools: Sequence[object] = (),
        options: Mapping[str, object] | None = None,
        *,
        is_open: bool = False,
    ) -> str:
        # As text, not tokens: markers and marks must be found in it first.
        return self.tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=generate,
            continue_final_message=is_open,
            **{**self._options(tools), **(options or {})},
        )

    def _probed(self, messages: Sequence[Message]) -> str:
        """Return the text of messages that examine the chat template. It may raise any error."""
        shown = [self._with_parts(message) for message in messages]
        calls = any("tool_calls" in message for message in messages)
        return self._apply(shown, False, [PROBE_TOOL] if calls else ())

    def _options(self, tools: Sequence[object]) -> dict[str, object]:
        """Return the keyword arguments of the chat template for a row with ``tools``."""
        return {**self.options, "tools": list(tools)} if tools else self.options

    def _with_parts(self, message: Message) -> Message:
        """Return ``message`` with media as parts or text, as the chat template accepts it."""
        content = message["content"]
        kinds = {kind for kind, _ in marks(content)}
        if not all(self._takes[kind] for kind in kinds or {"text"}):
            return {**message, "content": self._written(self._surrounded(content))}
        # text alone stays a string, unless the template reads only parts
        if kinds or not self._takes["string"]:
            return {**message, "content": as_parts(content)}
        return message

    @cached_property
    def _takes(self) -> dict[str, bool]:
        """Return which content the template writes fully: a ``string``, and parts of each kind."""

        def writes(content: object, *expected: str) -> bool:
            text = rendered(lambda messages: self._apply(messages, False), content)
            # Once each: a template that repeats or drops content would change the prompt.
            return text is not None and all(text.count(e) == 1 for e in expected)

        word = {"type": "text", "text": "(word)"}
        takes = {"string": writes("(word)", "(word)"), "text": writes([word], "(word)")}
        for kind, part in self._media_parts.items():
            takes[kind] = writes([{"type": kind}, word], part.written, "(word)")
        return takes

    def _written(self, text: str) -> str:
        return replaced(text, lambda kind, _: self._media_parts[kind].written)

    def _surrounded(self, text: str) -> str:
        """Return ``text`` with the expected text around each item, where it is missing."""
        if self.media is None:
            return text
        # The split gives: text, kind, number, text, kind, number, text ...
        made, *cut = MARK.split(text)
        for kind, number, after in zip(cut[::3], cut[1::3], cut[2::3]):
            left, right = self._media_parts[kind].around
            if not made.endswith(left):
                made += left
            made += mark(kind, int(number))
            if not after.startswith(right):
                made += right
            made += after
        return made

    def _with_marks(self, text: str, order: Sequence[tuple[str, int]], where: str) -> str:
        """Return ``text`` with the marks of ``order`` in place of the template's media text."""
        # kinds may share a spelling, so the marks that wait for a place are kept by spelling
        waiting: dict[str, list[str]] = {}
        for kind, number in order:
            waiting.setdefault(self._media_parts[kind].written, []).append(mark(kind, number))
        found = any_of(sorted(waiting, key=len, reverse=True))
        for written, items in waiting.items():
            held = sum(match[0] == written for match in found.finditer(text))
            if held != len(items):
                problem = f"writes {written!r} {held} times for {len(items)} items"
                raise MalformedRow(f"{where}: the chat template {problem}")
        return found.sub(lambda match: waiting[match[0]].pop(0), text)

    def _expanded(
        self, record: ParsedRow, texts: Sequence[str], extents: Mapping[int, Extent | MalformedRow]
    ) -> list[str] | MalformedRow:
        assert self.media is not None
        known: dict[int, Extent] = {}
        for number, extent in extents.items():
            if isinstance(extent, MalformedRow):
                return extent
            known[number] = extent
        items = [record.media[number] for number in known]
        try:
            self.media.check_total(items, list(known.values()), record.where)
            return self.media.expanded(texts, record.media, known)
        except MalformedRow as error:
            return error

    def text_of(self, record: ParsedRow, cut: int) -> str:
        """Return the shielded text of a prompt, in the configured template."""
        prompt = record.prompt
        if record.text is not None and not self.chat:
            prompt = record.text
        elif not isinstance(prompt, str):
            asked = asking(record)
            if len(asked) != 1 or asked[0]["role"] != "user":
                problem = f"a conversation of {len(asked)} messages needs a chat template"
                way_out = "set model.chat_template to a template file"
                raise MalformedRow(f"{record.where}: {problem}, and none is in use; {way_out}")
            prompt = asked[0]["content"]
            if self._has_note:
                _warn_once(NO_TEMPLATE, tokenizer_name(self.tokenizer))
        if self.template is None:
            if record.possible_prompts:
                raise no_prompt(record.row, record.where)
            return self.escape_special_tokens(prompt[cut:])
        return self._fill(self.template, record, prompt[cut:], record.front)

    def _fill(
        self, template: list[tuple[str, str]], record: ParsedRow, prompt: str, front: str
    ) -> str:
        parts: list[str] = []
        text = ""
        # media without a place in the row go to the marks of the template
        free = [match[0] for match in MARK.finditer(front)]
        literals = [self.reads.with_places(literal, free) for literal, _ in template]
        # a marker of the template without media is a word of the prompt, like one of the row
        record.words = max(record.words, sum(map(self.reads.spelled, literals)))
        prompt = "".join(free) + prompt.removeprefix(front)
        if all(name != "prompt" for _, name in template):
            # without a field for the prompt, its media come first
            text = "".join(match[0] for match in MARK.finditer(prompt))
        for literal, (_, name) in zip(literals, template):
            if literal and text:
                parts.append(self.escape_special_tokens(text))
                text = ""
            parts.append(literal)
            if name:
                # adjacent fields are shielded as one text, because a spelling could span them
                text += self._field(name, record, prompt)
        return "".join([*parts, self.escape_special_tokens(text)])

    def _field(self, name: str, record: ParsedRow, prompt: str) -> str:
        """Return the text of the field ``name`` of the template."""
        if name == "prompt":
            return prompt
        value = look_up(record.row, name)
        if value is None:
            have = ", ".join(record.row)
            problem = f"data.template names {{{name}}}; the row has: {have}"
            raise MalformedRow(f"{record.where}: {problem}")
        if self.media is not None and MEDIA_OPEN in str(value):
            problem = f"{{{name}}} of data.template holds U+FDD2, which is reserved"
            raise MalformedRow(f"{record.where}: {problem}; take it out")
        check_unicode(str(value), f"{record.where}, {name}")
        return str(value)

    def _shield_given(self, value: Any, name: str, where: str) -> Any:
        """Return ``value``, which the chat template gets besides messages, with shielded texts.

        Args:
            value: the data, as JSON has it.
            name: name of the data, for messages.
            where: location of the row, for messages.

        Raises:
            MalformedRow: a text has a mark of media.
        """
        text = json.dumps(value, ensure_ascii=False, default=str)
        check_unicode(text, f"{where}, {name}")
        if self.media is not None and MEDIA_OPEN in text:
            raise MalformedRow(f"{where}: the {name} hold U+FDD2, which is reserved; take it out")
        return self._shield_all(value, False)


def asking(record: ParsedRow) -> Sequence[Message]:
    """Return the messages of a prompt before the assistant's last turn.

    Raises ``MalformedRow`` if there is none.
    """
    prompt, where = record.prompt, record.where
    assert not isinstance(prompt, str)
    if record.is_begun and len(prompt) > 1:
        return prompt[:-1]
    for end in range(len(prompt), 0, -1):
        if prompt[end - 1]["role"] != "assistant":
            return prompt[:end]
    raise MalformedRow(f"{where}: the conversation has no message before the assistant's")


def _parse_template(template: str, media: bool) -> list[tuple[str, str]]:
    """Return ``(literal, field name)`` pairs.

    Raises ``ConfigError`` for a template without a field, unless rows differ in their ``media``.
    """
    parts: list[tuple[str, str]] = []
    literal = ""
    at = 0
    for match in FIELD.finditer(template):
        literal += template[at : match.start()]
        at = match.end()
        name = match[1]
        if name:
            parts.append((literal, name))
            literal = ""
        else:
            literal += match[0][0]  # {{ stands for {, and }} for }
    if not parts and not media:
        way_out = "write {prompt} where the prompt goes"
        raise ConfigError(f"data.template = {template!r} has no field; {way_out}")
    literal += template[at:]
    return [*parts, (literal, "")]


INSIDE = (
    "data.template = %r is written inside the chat template, as the message of the user; set "
    "data.apply_chat_template: false to write prompts by data.template alone, or true to keep both "
    "without this line"
)
NO_TEMPLATE = (
    "the tokenizer %s has no chat template: messages are written as their text alone; set "
    "model.chat_template to a template file, or data.apply_chat_template: false"
)
_warn_once = functools.cache(_log.warning)


def _refuse_chat_settings(config: DataConfig) -> None:
    """Raise ``ConfigError`` for settings that act only through a chat template."""
    if config.system is not None:
        named = "data.system"
    elif config.chat_template_options:
        named = "data.chat_template_options"
    elif config.columns.tools:
        named = "data.columns.tools"
    else:
        return
    problem = f"{named} needs a chat template, and none is in use"
    raise ConfigError(f"{problem}; put the text in data.template, or: {WAYS_OUT}")
