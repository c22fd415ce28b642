"""The dataset of prompts for the policy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightrft.config.data import DataConfig
from lightrft.datasets.chat_encoder import asking
from lightrft.datasets.encoded_dataset import EncodedDataset
from lightrft.datasets.row_parser import ParsedRow, ends_with_assistant
from lightrft.datasets.row_tables import look_up
from lightrft.datasets.row_warnings import note_label, note_text
from lightrft.datasets.rows.row_reader import read_record
from lightrft.types import Prompt
from lightrft.utils.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = {"tokens": "i", "ends": "Q", "source": "H", "row": "Q", "cut_rows": "Q", "cuts": "Q"}
"""Stored columns of the prompts.

They are the concatenated tokens, the end, source and row of each prompt, and the truncated prompts
with their cuts.
"""


class PromptDataset(EncodedDataset[Prompt]):
    """The prompts of ``config``, encoded once.

    Rows stay in their files and are read again on access. With ``processor``, rows may contain
    media. Media are measured on construction, decoded on access, and never truncated. The dataset
    can be pickled.

    Prompts that are ``truncated`` are cut at the start of their last message. ``counts`` also
    contains:

    * ``prefilled``: prompts that end with an assistant turn which the policy continues.
    * ``answered``: conversations that end with an assistant turn, which is left out.

    Args:
        config: the settings of the data.
        tokenizer: the tokenizer, with its chat template.
        seed: seed of the order of mixed sources.
        processor: the media processor (see ``lightrft.models.processors``). None for a model that
            reads only text.

    Raises:
        DataError: a row cannot be used, or no prompt is left.
        ConfigError: the settings do not fit the tokenizer.
        ModelError: the tokenizer lacks a chat template or token that the settings need.
    """

    feeds_rewards = True
    entry = "prompt"
    purpose = "prompts"
    columns = COLUMNS

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        processor: Any = None,
    ) -> None:
        read = partial(read_record, columns=config.columns, prefill=config.prefill, is_prompt=True)
        super().__init__(config, tokenizer, processor, read)
        self._fill({}, seed)
        self._cuts = dict(zip(self._kept["cut_rows"].tolist(), self._kept["cuts"].tolist()))

    def __getitem__(self, i: int) -> Prompt:
        return self.prompt(i)

    def prompt(self, i: int, *, media: bool = True) -> Prompt:
        """Return prompt ``i``, without its media if ``media`` is False.

        Raises ``MalformedRow`` if its media have become unreadable.
        """
        k = self._stored(i)
        record, cut = self.record(i)
        text = self.encoder.prompt(record, cut)
        prompt = Prompt(
            id=self._ids[i],
            token_ids=self._kept["tokens"][self._part("ends", k)].tolist(),
            text=self.encoder.readable(text),
            label=record.label,
            reference=_reference(record),
            data_source=record.data_source or self._names[self._place(k)[0]],
            columns=record.columns,
            request=record.request,
        )
        if media:
            self.encoder.attach(prompt, record, text)
        return prompt

    def record(self, i: int) -> tuple[ParsedRow, int]:
        """Return the row of prompt ``i``, and the number of characters cut from its last message.

        Raises ``MalformedRow`` if the row has become unreadable.
        """
        k = self._stored(i)
        return self._record(*self._place(k)), self._cuts.get(k, 0)

    @property
    def reads_media(self) -> bool:
        """Return True if prompts may have media, which take time to decode and memory to store."""
        return self.encoder.media is not None

    def places(self, ids: Sequence[str]) -> list[int]:
        """Return the indices of the prompts called ``ids``.

        Raises ``CheckpointError`` for an unknown id.
        """
        wanted = set(ids)
        found = {name: i for i, name in enumerate(self._ids) if name in wanted}
        try:
            return [found[name] for name in ids]
        except KeyError as error:
            problem = f"the checkpoint holds responses to prompt {error}"
            raise CheckpointError(f"{problem}, which the data does not have") from None

    def _add(self, source: int, chunk: Sequence[tuple[int, ParsedRow]]) -> list[str]:
        """Encode records and store the prompts that fit. Return their names."""
        names = []
        for row, record, text, _, ids in self._prompts(chunk):
            fitting = self._fitting(record, ids)
            if fitting is None:
                continue
            cut, tokens = fitting
            self.counts["special_tokens"] += self.encoder.is_shielded(text)
            self.counts["media_words"] += bool(record.words)
            if ends_with_assistant(record.prompt):
                self.counts["prefilled" if record.is_begun else "answered"] += 1
            kept = self._kept
            # cuts are rare, so they are stored by the index of their prompt
            if cut:
                kept["cut_rows"].append(len(kept["ends"]))
                kept["cuts"].append(cut)
            kept["tokens"].extend(tokens)
            # The end after the tokens: a prompt is from the end before it to its own.
            kept["ends"].append(len(kept["tokens"]))
            kept["source"].append(source)
            kept["row"].append(row)
            note_text(self.counts, self._unknown.count(text, tokens), len(tokens), source, row)
            data_source = record.data_source or self._names[source]
            self._data_source(record, source)
            for name in record.gold:
                look_up(record.row, name)  # recorded as read
            gold = _reference(record) if record.label is None else record.label
            note_label(self.counts, data_source, gold, source, row)
            names.append(self._name(record.id, source, row))
        return names

    def _fitting(self, record: ParsedRow, ids: list[int]) -> tuple[int, list[int]] | None:
        """Return the cut of a prompt and its tokens, or None for a prompt that is left out.

        Raises ``DataError`` if ``data.overlong_prompts`` is ``error`` and the prompt is too long.
        """
        limit = self.config.max_prompt_tokens
        if len(ids) <= limit:
            return 0, ids
        shorter = None
        # media cannot be cut: their placeholders must fit their features
        if self.config.overlong_prompts == "truncate" and not record.media:
            shorter = self._truncate(record, ids)
        if shorter is None:
            self._overlong(record.where, len(ids), limit, "data.max_prompt_tokens")
        else:
            self.counts["truncated"] += 1
        return shorter

    def _truncate(self, record: ParsedRow, ids: list[int]) -> tuple[int, list[int]] | None:
        """Return the smallest cut of the last message that fits, and the resulting tokens.

        The cut is a number of characters. Returns None if no cut suffices.
        """
        limit = self.config.max_prompt_tokens
        prompt = record.prompt
        text = prompt if isinstance(prompt, str) else asking(record)[-1]["content"]
        # invariant: a cut of low characters is too small, and high is the smallest cut known to fit
        low = 0
        high = len(text) - 1
        best = self._at(record, high)
        if len(text) < 2 or len(best) > limit:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            tried = self._at(record, middle)
            if len(tried) <= limit:
                high, best = middle, tried
            else:
                low = middle
        return high, best

    def _at(self, record: ParsedRow, cut: int) -> list[int]:
        return self.encoder.encode_prompts([self.encoder.prompt(record, cut)])[0]


def _reference(record: ParsedRow) -> object:
    """Return the worked solution of a row, else its answer."""
    return record.answer if record.reference is None else record.reference
