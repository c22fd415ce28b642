"""Token sequences of conversations, with the weight of each token in the loss.

The tokens of a turn are the difference between two renderings of the conversation. The first ends
with the opened assistant turn, and the second includes the turn. The new tokens up to the
end-of-turn token are the tokens that the policy would have sampled. If the template marks assistant
text itself (``{% generation %}``), its marks are used.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightrft.config.data import DataConfig
from lightrft.datasets.chat_encoder import ChatEncoder, tokenizer_name
from lightrft.datasets.media.items import marks
from lightrft.datasets.row_parser import CONVERSATIONS, Message, ParsedRow
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.rows.row_content import USUAL
from lightrft.utils.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_log = logging.getLogger(__name__)
GENERATION = re.compile(r"\{%[-+]?\s*generation\b")

Tokens = list[int]
Weights = list[float]
"""Weight of each token in the loss. 0 for tokens that are not trained."""


@dataclass(slots=True)
class TurnTexts:
    """The rendered texts of one token sequence.

    Args:
        record: the row.
        turns: texts before and after each turn to train on.
        weights: weight of each turn in the loss.
        messages: the messages, if the template marks the turns. Otherwise empty.
        tools: JSON schemas of the tools of ``messages``.
        start: a text whose tokens the sequence begins with. Empty for no such text.
        items: numbers of the media items of the sequence, in order.
        calls: True if the last turn calls tools.
    """

    record: ParsedRow
    turns: list[tuple[str, str]]
    weights: list[float]
    messages: list[Message] = field(default_factory=list)
    tools: list[object] = field(default_factory=list)
    start: str = ""
    items: tuple[int, ...] = ()
    calls: bool = False

    @property
    def texts(self) -> list[str]:
        """Return all texts, in order."""
        return [self.start, *itertools.chain.from_iterable(self.turns)]


class TurnEncoder:
    """Converts the assistant turns of rows to tokens and their weights in the loss.

    Args:
        config: the settings of the data.
        encoder: the encoder of the tokenizer.
        outside: weight of tokens outside of the assistant's turns.
    """

    def __init__(self, config: DataConfig, encoder: ChatEncoder, outside: float = 0.0) -> None:
        self.config = config
        self.encoder = encoder
        self.outside = outside
        self._checked = self._told = self._told_rest = False
        template = str(encoder.tokenizer.chat_template)
        self._marks = encoder.chat and bool(GENERATION.search(template))

    def parts(self, record: ParsedRow) -> list[TurnTexts]:
        """Return the texts of each token sequence of a record.

        There is one sequence, or one for each turn if ``data.turns`` is ``each``. Turns of weight 0
        at the end of a conversation are left out.

        Raises ``MalformedRow`` if there is no response to train on.
        """
        if not self.encoder.chat:
            return [self._plain_part(record)]
        messages = record.messages
        first = 0 if record.response is None else record.asked
        own = range(first, len(messages))
        spoken = [k for k in own if messages[k]["role"] == "assistant"]
        # a message of more than role and content, such as tool calls, is an answer without text too
        answered = any(messages[k]["content"].strip() or len(messages[k]) > 2 for k in spoken)
        if not answered:
            raise no_answer(record)
        if spoken[0] == 0:
            problem = "the conversation begins with the assistant"
            way_out = "begin with a message of the user or the system, or leave that turn out"
            raise MalformedRow(f"{record.where}: {problem}; {way_out}")
        self._tell_rest(record.where, len(messages) - 1 - spoken[-1])
        weights = [record.turn_weights.get(k, 1.0) for k in spoken]
        while weights and not weights[-1]:
            weights.pop()
        if not weights:
            raise MalformedRow(f"{record.where}: every turn has weight 0; leave the row out")
        shown, tools = self.encoder.conversation(record), self.encoder.tools(record)
        ahead = len(shown) - len(messages)  # 1 with the configured system message
        turns = []
        begun = self.encoder.begun(record)
        for k, _ in zip(spoken, weights):
            # The text that asks for the message, and the text that ends with it.
            before, upto = shown[: k + ahead], shown[: k + ahead + 1]
            asking = self.encoder.render(
                before,
                record.where,
                generate=True,
                tools=tools,
                begun=begun if k == record.asked else None,
            )
            turns.append((asking, self.encoder.render(upto, record.where, tools=tools)))
        calls = [bool(messages[k].get("tool_calls")) for k, _ in zip(spoken, weights)]
        if self.config.turns == "each":
            return [
                TurnTexts(record, [turn], [weight], calls=last)
                for turn, weight, last in zip(turns, weights, calls)
                if weight
            ]
        if self.config.turns == "last":
            return [TurnTexts(record, turns[-1:], weights[-1:], calls=calls[-1])]
        if self._marks_answers(record, turns):
            upto = shown[: spoken[-1] + ahead + 1]
            return [TurnTexts(record, turns, weights, upto, tools, calls=calls[-1])]
        # once is enough, since it depends on the template alone
        if len(turns) > 1 and not self._checked:
            check_template(self.encoder.tokenizer, self.config.chat_template_options)
            self._checked = True
        return [TurnTexts(record, turns, weights, calls=calls[-1])]

    def continuation(self, record: ParsedRow) -> TurnTexts:
        """Return the texts of one sequence that begins with the tokens of the prompt.

        The record has a response that begins with an assistant turn.

        Raises ``MalformedRow`` if there is no response to train on, or if it has several messages
        and no chat template is in use.
        """
        count = len(record.messages) - record.asked
        if not self.encoder.chat and count > 1:
            problem = f"a response of {count} messages needs a chat template, and none is in use"
            way_out = "set model.chat_template to a template file"
            raise MalformedRow(f"{record.where}: {problem}; {way_out}")
        (part,) = self.parts(record)
        part.start = part.turns[0][0]
        several = isinstance(record.response, list)
        if self.encoder.chat and several and self.config.turns == "last":
            # the last turn may begin after the prompt
            shown = self.encoder.conversation(record)
            asked = len(shown) - len(record.messages) + record.asked
            tools = self.encoder.tools(record)
            part.start = self.encoder.render(
                shown[:asked],
                record.where,
                generate=True,
                tools=tools,
                begun=self.encoder.begun(record),
            )
        return part

    def question(self, record: ParsedRow) -> TurnTexts:
        """Return the text of a conversation that the assistant has yet to answer.

        ``prompt_tokens`` are its tokens. It has no turn to train on.

        Raises ``MalformedRow`` for a conversation of several messages if no chat template is in
        use.
        """
        return TurnTexts(record, [], [], start=self.encoder.prompt(record))

    def texts(self, parts: Sequence[TurnTexts]) -> tuple[ParsedRow, list[str]]:
        """Return the arguments of ``ChatEncoder.expanded`` for sequences of one row."""
        texts: list[str] = []
        for part in parts:
            texts += part.texts
        return parts[0].record, texts

    def expand(self, parts: Sequence[TurnTexts], texts: Sequence[str]) -> None:
        """Put the text of media into sequences of one row.

        Args:
            parts: the sequences.
            texts: the result of ``ChatEncoder.expanded`` for ``texts(parts)``.
        """
        whole = iter(texts)
        for part in parts:
            if part.record.media:
                part.items = tuple(number for _, number in marks(self._whole(part)))
            part.start = next(whole)
            part.turns = [(next(whole), next(whole)) for _ in part.turns]

    def encode(self, parts: Sequence[TurnTexts]) -> dict[str, Tokens]:
        """Return the tokens of each text of ``parts``."""
        # each text once, in one call: turns of one conversation share their beginnings
        texts: dict[str, None] = {}
        for part in parts:
            texts |= dict.fromkeys(part.texts)
        return dict(zip(texts, self.encoder.encode(list(texts))))

    def tokens(self, part: TurnTexts, known: Mapping[str, Tokens]) -> tuple[Tokens, Weights]:
        """Return the tokens of a sequence and their weights, ``[T]``, up to the end of a turn.

        The weights can all be 0 only for a sequence with media, whose placeholders are not trained.

        Args:
            part: the texts of the sequence.
            known: the tokens of each text, from ``encode``.

        Raises:
            ModelError: the chat template lacks the prefix property, or the tokenizer has no EOS
                token.
        """
        ids, weights = self._tokens(part, known)
        if self.outside:
            # nothing predicts the first token
            weights[0] = 0.0
        if part.items:
            # the model is not trained to write the placeholders of media
            placeholders = self.encoder.placeholders
            weights = [0.0 if i in placeholders else w for w, i in zip(weights, ids)]
        return ids, weights

    def cut(self, ids: Tokens, weights: Weights, room: int) -> tuple[Tokens, Weights] | None:
        """Return the first tokens of a sequence and their weights, or None if it cannot be cut.

        Media cannot be cut. ``data.overlong_prompts`` decides about the rest.

        Args:
            ids: the tokens of the sequence.
            weights: the weights of the tokens.
            room: number of tokens to keep.
        """
        if self.config.overlong_prompts != "truncate" or room <= 0:
            return None
        # the placeholders of media must fit their features
        if not self.encoder.placeholders.isdisjoint(ids[room:]):
            return None
        # a sequence without a trained token would teach nothing
        return (ids[:room], weights[:room]) if any(weights[:room]) else None

    def prompt_tokens(self, part: TurnTexts, known: Mapping[str, Tokens]) -> Tokens:
        """Return the tokens of the prompt that a ``continuation`` begins with."""
        return self.encoder.with_start(known[part.start])

    def _whole(self, part: TurnTexts) -> str:
        """Return the text of all tokens of a sequence."""
        if not part.turns:
            return part.start
        return part.turns[-1][1] if self.encoder.chat else "".join(part.turns[-1])

    def _plain_part(self, record: ParsedRow) -> TurnTexts:
        """Return the texts of a record without a chat template."""
        answer = record.answer
        # A document without a response is trained as a whole.
        if self.outside and answer is None:
            answer = ""
        elif answer is None or not answer.strip():
            raise no_answer(record)
        weight = record.turn_weights.get(len(record.messages) - 1, 1.0)
        if not weight:
            raise MalformedRow(f"{record.where}: every turn has weight 0; leave the row out")
        # some datasets end a response with EOS, which _tokens appends
        answer = answer.removesuffix(self.encoder.tokenizer.eos_token or "")
        turn = (
            self.encoder.prompt(record),
            self.encoder.escape_special_tokens(answer, answer=True),
        )
        return TurnTexts(record, [turn], [weight])

    def _marks_answers(self, record: ParsedRow, turns: Sequence[tuple[str, str]]) -> bool:
        """Return True if the template can mark the answers of ``record`` with ``generation``."""
        if not self._marks or record.response is not None or record.media:
            return False
        # the marks do not tell one turn from another
        if self.outside or record.turn_weights:
            return False
        # the template knows nothing of spellings that are encoded as plain text
        return not self.encoder.is_shielded(turns[-1][1])

    def _tokens(self, part: TurnTexts, known: Mapping[str, Tokens]) -> tuple[Tokens, Weights]:
        if not self.encoder.chat:
            prompt, answer = part.turns[0]
            asked, said = self.encoder.with_start(known[prompt]), [*known[answer], self.encoder.eos]
            return [*asked, *said], [self.outside] * len(asked) + part.weights * len(said)
        if part.messages:
            ids, trained = self.encoder.with_loss_mask(part.messages, part.tools)
            if any(trained):
                last = len(trained) - trained[::-1].index(True)
                return ids[:last], [float(t) for t in trained[:last]]
        return self._by_turns(part, known)

    def _by_turns(self, part: TurnTexts, known: Mapping[str, Tokens]) -> tuple[Tokens, Weights]:
        # ``ids`` are the tokens of the template, and ``row`` may have an end after a turn too
        ids: Tokens = known[part.start] if part.start else []
        row, weights = list(ids), [self.outside] * len(ids)
        before, open_weight, closing = part.start, None, len(row)
        for (asking, said), weight in zip(part.turns, part.weights):
            ended = len(ids)
            ids = self._extend(ids, before, asking, known)
            following = ids[ended:]
            if open_weight is not None:
                mark = self._mark(following)
                if not mark:
                    self._tell_of_ends()
                    row.append(self.encoder.eos)
                # the first token of the next message, or the EOS token, ends the turn before it
                weights += [open_weight] * (mark or 1)
            row += following
            weights += [self.outside] * (len(row) - len(weights))
            start = len(ids)
            ids = self._extend(ids, asking, said, known)
            end = self._end_of_turn(ids, start)
            # what follows, such as a line break of the template, is never sampled
            last = len(ids) if end is None else end
            closing = len(row) + last - start
            row += ids[start:]
            weights += [weight] * (last - start) + [self.outside] * (len(ids) - last)
            before, open_weight = said, weight if end is None else None
        row, weights = row[:closing], weights[:closing]
        # without an end the model would not learn to stop
        if open_weight is not None:
            # the first token of the next message, a result of a tool or a user's, or the EOS token
            marks = self.encoder.turn_ends.marks
            mark = marks.get("tool") if part.calls else None
            mark = marks.get("user") if mark is None else mark
            row.append(self.encoder.eos if mark is None else mark)
            weights.append(open_weight)
        return row, weights

    def _tell_rest(self, where: str, count: int) -> None:
        """Warn once about ``count`` messages that no turn of the assistant follows."""
        if count and not self._told_rest:
            named = f"the last {count} messages are" if count > 1 else "the last message is"
            problem = "no part of the example, since no message of the assistant follows"
            _log.warning("%s: %s %s, in this and other rows", where, named, problem)
            self._told_rest = True

    def _tell_of_ends(self) -> None:
        if not self._told:
            way_out = "set data.turns: each for examples without them in earlier turns"
            _log.warning("the chat template ends no turn, so the EOS token does; %s", way_out)
            self._told = True

    def _end_of_turn(self, ids: Tokens, start: int) -> int | None:
        """Return the position after the token that ends the turn ``ids[start:]``, None if open."""
        # an image in an answer does not end it
        special = self.encoder.special_ids - self.encoder.placeholders
        ends = self.encoder.turn_ends
        # a template may end some turns in other tokens than the turns by which it was examined
        kinds = [set(ends.closing)] if ends.is_open else [set(ends.closing), special]
        for closing in kinds:
            for k in range(len(ids) - 1, start - 1, -1):
                if ids[k] in closing:
                    return k + 1
        return None

    def _mark(self, following: Tokens) -> int:
        """Return the number of tokens of the next message up to the one that ends the turn before.

        It is 0 if the message does not begin with such a token.
        """
        ends = self.encoder.turn_ends.ids
        for k, token in enumerate(following):
            if token in self.encoder.special_ids:
                blank = not self.encoder.tokenizer.decode(following[:k]).strip()
                return k + 1 if blank and token in ends else 0
        return 0

    def _extend(
        self, ids: Tokens, shorter: str, longer: str, known: Mapping[str, Tokens]
    ) -> Tokens:
        """Return the tokens of ``longer``, which begin with ``ids``, the tokens of ``shorter``.

        If a merge across the border would change ``ids``, the rest is encoded separately. The
        prompt tokens then stay unchanged, as in sampling.

        Raises ``ModelError`` if ``longer`` does not begin with ``shorter``.
        """
        if known[longer][: len(ids)] == ids:
            return known[longer]
        if not longer.startswith(shorter):
            raise prefix_error(
                self.encoder.tokenizer,
                self.encoder.unescape_special_tokens(shorter),
                self.encoder.unescape_special_tokens(longer),
            )
        return [*ids, *self.encoder.encode([longer[len(shorter) :]])[0]]


def no_answer(record: ParsedRow) -> MalformedRow:
    """Return the error for a record without a response to train on."""
    have = ", ".join(record.row)
    empty = [key for key in USUAL["response"] if key in record.row and not record.row[key]]
    for key in CONVERSATIONS:
        last = talk[-1] if isinstance(talk := record.row.get(key), list) and talk else None
        if isinstance(last, dict) and not (last.get("content") or last.get("value")):
            empty.append(f"the last of {key}")
    problem = f"{record.where}: no response to learn from; "
    if empty:
        problem += f"empty: {', '.join(empty)}"
        return MalformedRow(f"{problem}. Mend the row, or set data.bad_rows: skip")
    problem += f"the row has: {have}."
    way_out = "Name its column in data.columns.response"
    if "chosen" in record.row:
        way_out += ", or learn from chosen and rejected by lightrft dpo"
    elif isinstance(record.prompt, list) and not isinstance(record.row.get("prompt"), str):
        way_out = f"End the conversation by a message of the role assistant. Or: {way_out}"
    return MalformedRow(f"{problem} {way_out}")


def check_template(
    tokenizer: PreTrainedTokenizerBase, options: Mapping[str, object] | None = None
) -> None:
    """Check the prefix property of the chat template.

    The tokens of a conversation up to a turn must be a prefix of the tokens of the longer
    conversation. Several turns can only then share one sequence.

    Raises ``ModelError`` with the first violation and the possible settings.
    """
    encoder = ChatEncoder(
        DataConfig(apply_chat_template=True, chat_template_options=dict(options or {})), tokenizer
    )
    where = f"the tokenizer {tokenizer_name(tokenizer)}"
    turns: list[Message] = [
        {"role": "user", "content": "1+1=?"},
        {"role": "assistant", "content": "It is 2."},
        {"role": "user", "content": "2+1=?"},
        {"role": "assistant", "content": "It is 3."},
    ]
    shorter: list[int] = []
    shown = ""
    for upto, last in enumerate(turns, start=1):
        # after a user's turn, the prompt includes the start of the answer
        text = encoder.render(turns[:upto], where, generate=last["role"] == "user")
        ids = encoder.encode([text])[0]
        # Tokens, not text: a merge across the border would change the earlier ones.
        if ids[: len(shorter)] != shorter:
            raise prefix_error(tokenizer, shown, text)
        shorter = ids
        shown = text


def prefix_error(tokenizer: PreTrainedTokenizerBase, shorter: str, longer: str) -> ModelError:
    """Return the error for a chat template that changes earlier text.

    Args:
        tokenizer: the tokenizer, for its name.
        shorter: the text of the shorter conversation.
        longer: the text of the longer conversation, which should begin with ``shorter``.
    """
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(shorter, longer))
    at = sum(1 for _ in same)
    near = slice(max(0, at - 20), at + 40)
    change = f"{shorter[near]!r} becomes {longer[near]!r} once the conversation continues"
    return ModelError(
        f"the chat template of {tokenizer_name(tokenizer)} does not keep what came before: {change}, "
        "so its turns cannot share one row of tokens. Set data.turns: each (or last) "
        "if it is earlier turns that change, model.chat_template to a template without this, "
        "or data.chat_template_options to switch it off"
    )
