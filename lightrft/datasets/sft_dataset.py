"""Examples for supervised fine-tuning: tokens, and their weights in the loss."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from lightrft.config.data import SFTDataConfig
from lightrft.datasets.encoded_dataset import EncodedDataset
from lightrft.datasets.media import Item
from lightrft.datasets.row_parser import ParsedRow
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.row_warnings import note_text
from lightrft.datasets.rows.row_reader import read_record, row_weight
from lightrft.datasets.turns import Tokens, TurnEncoder, TurnTexts, Weights, no_answer
from lightrft.types import Media
from lightrft.utils.lazy_imports import np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = {
    "tokens": "i",
    "ends": "Q",
    "split": "Q",
    "run_weights": "d",
    "run_lengths": "q",
    "runs": "Q",
    "weight": "d",
    "data_source": "I",
}
"""Stored columns of the examples.

They are the concatenated tokens, the end of each example and the end of each prompt. The weights of
a response are runs of equal weights: ``runs`` has the end of each response among them. Each example
has a ``weight`` and the number of a ``data_source``.
"""


@dataclass(slots=True)
class Example:
    """One training example.

    Args:
        prompt_ids: tokens up to the first token to train on.
        response_ids: the remaining tokens.
        weights: weights ``[len(response_ids)]`` in the loss. 0 for tokens that are not trained, and
            for every media placeholder.
        id: name of the example.
        weight: weight of the example in the loss.
        prompt_media: media of ``prompt_ids``.
        response_media: media of ``response_ids``.
        data_source: name of the data source.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    weights: list[float]
    id: str
    weight: float = 1.0
    prompt_media: Media = field(default_factory=dict)
    response_media: Media = field(default_factory=dict)
    data_source: str = ""

    @property
    def trained(self) -> list[bool]:
        """Return the mask ``[len(response_ids)]`` of the tokens that carry loss."""
        return [weight != 0 for weight in self.weights]


@dataclass(slots=True)
class _Part:
    """The source of one example: its row, and its texts."""

    row: int
    texts: TurnTexts
    name: str
    weight: float


class SFTDataset(EncodedDataset[Example]):
    """The examples of ``config``, encoded once.

    A row with a response is trained on the response only. A conversation is trained on the
    assistant turns that ``turns`` selects, with their weights. With ``loss_on: all``, every token
    but the first is trained. Media are loaded as in ``PromptDataset``. An example is not truncated
    if media would be cut off.

    Examples that are ``truncated`` are cut at the end. They do not teach the model to stop there.

    Args:
        config: the settings of the data.
        tokenizer: the tokenizer, with its chat template.
        max_tokens: largest number of tokens of an example.
        seed: seed of the order of mixed sources.
        processor: the media processor. None for a model that reads only text.

    Raises:
        DataError: a row cannot be used, or no example is left.
        ModelError: the chat template lacks the prefix property although turns share a sequence, or
            the tokenizer has no EOS token.
    """

    config: SFTDataConfig
    columns = COLUMNS

    def __init__(
        self,
        config: SFTDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        seed: int,
        processor: Any = None,
    ) -> None:
        read = partial(read_record, columns=config.columns, prefill=config.prefill)
        super().__init__(config, tokenizer, processor, read)
        self.max_tokens = max_tokens
        outside = 1.0 if config.loss_on == "all" else 0.0
        self.turns = TurnEncoder(config, self.encoder, outside)
        # Source, row and item numbers by stored example. Most have no media, so it is no column.
        self._media: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        self._fill({"max_tokens": max_tokens}, seed)

    def __getitem__(self, i: int) -> Example:
        k = self._stored(i)
        kept, part, runs = self._kept, self._part("ends", k), self._part("runs", k)
        tokens, split = kept["tokens"], kept["split"][k]
        weights = np.repeat(kept["run_weights"][runs], kept["run_lengths"][runs])
        example = Example(
            prompt_ids=tokens[part.start : split].tolist(),
            response_ids=tokens[split : part.stop].tolist(),
            weights=weights.tolist(),
            id=self._ids[i],
            weight=float(kept["weight"][k]),
            data_source=self._source_names[kept["data_source"][k]],
        )
        if self.encoder.media is not None and k in self._media:
            parts = (example.prompt_ids, example.response_ids)
            where = self._where(*self._media[k][:2])
            media = self.encoder.media.split(self.items(i), parts, where)
            example.prompt_media, example.response_media = media
        return example

    def items(self, i: int) -> list[Item]:
        """Return the media items of example ``i``, in the order of their placeholders."""
        k = self._stored(i)
        if k not in self._media:
            return []
        source, row, numbers = self._media[k]
        record = self._record(source, row)
        return [record.media[n] for n in numbers]

    @property
    def longest_prompt(self) -> int:
        """Return the number of tokens of the longest prompt."""
        starts, ends, _ = self._bounds()
        return int((ends - starts).max())

    @property
    def has_untrained_tokens(self) -> bool:
        """Return True if a response has tokens that are not trained, e.g. of a later user turn."""
        return bool((self._sizes("runs") > 1).any())

    @property
    def is_weighted(self) -> bool:
        """Return True if a row or a trained turn has a weight other than 1."""
        turns = np.asarray(self._kept["run_weights"])
        rows = np.asarray(self._kept["weight"])
        return bool((rows != 1).any() or ((turns != 0) & (turns != 1)).any())

    def _add(self, source: int, chunk: Sequence[tuple[int, ParsedRow]]) -> list[str]:
        """Encode records and store the examples that fit. Return their names."""
        rows: list[tuple[int, list[TurnTexts]]] = []
        weights: dict[int, float] = {}
        for row, record in chunk:
            try:
                weights[row] = row_weight(record.row, self.config.columns, record.where)
                rows.append((row, self.turns.parts(record)))
            except MalformedRow as error:
                self._skip(error)
        expanded = self.encoder.expanded([self.turns.texts(made) for _, made in rows])
        parts: list[_Part] = []
        for (row, made), texts in self._made(rows, expanded):
            self.turns.expand(made, texts)
            stem = self._name(made[0].record.id, source, row)
            for k, part in enumerate(made, start=1):
                name = stem if len(made) == 1 else f"{stem}#{k}"
                parts.append(_Part(row, part, name, weights[row]))
        ids = self.turns.encode([part.texts for part in parts])
        names = []
        for part in parts:
            tokens, token_weights = self.turns.tokens(part.texts, ids)
            if self._keep(source, part, tokens, token_weights):
                names.append(part.name)
        return names

    def _keep(self, source: int, part: _Part, ids: Tokens, weights: Weights) -> bool:
        """Store an example if it fits or can be truncated. Return True if it was stored."""
        kept = self._kept
        texts, record = part.texts, part.texts.record
        if not any(weights):
            self._skip(no_answer(record))
            return False
        if len(ids) > self.max_tokens:
            cut = self.turns.cut(ids, weights, self.max_tokens)
            if cut is None:
                self._overlong(record.where, len(ids), self.max_tokens, "max_tokens")
                return False
            self.counts["truncated"] += 1
            ids, weights = cut
        self.counts["special_tokens"] += any(map(self.encoder.is_shielded, texts.turns[-1]))
        self.counts["media_words"] += bool(record.words)
        if texts.items:
            self._media[len(kept["ends"])] = (source, part.row, texts.items)
        asked = next(k for k, weight in enumerate(weights) if weight)
        kept["split"].append(len(kept["tokens"]) + asked)
        kept["tokens"].extend(ids)
        kept["ends"].append(len(kept["tokens"]))
        for weight, run in itertools.groupby(weights[asked:]):
            kept["run_weights"].append(weight)
            kept["run_lengths"].append(len(list(run)))
        kept["runs"].append(len(kept["run_weights"]))
        kept["weight"].append(part.weight)
        kept["data_source"].append(self._data_source(record, source))
        unknown = self._unknown.count("".join(texts.texts), ids)
        note_text(self.counts, unknown, len(ids), source, part.row)
        return True
