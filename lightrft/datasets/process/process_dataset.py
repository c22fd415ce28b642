"""Token sequences of responses with a label for each step."""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrft.config.data import ProcessDataConfig
from lightrft.datasets.cache_key import token_cache_of
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.media import NOTHING, SupportedMedia
from lightrft.datasets.media.identity import identity
from lightrft.datasets.media.items import marks
from lightrft.datasets.media.prefetch import Fetcher
from lightrft.datasets.process.step_formats import read_steps
from lightrft.datasets.prompt_dataset import Columns, EncodedDataset, Sources
from lightrft.datasets.row_parser import ParsedRow
from lightrft.datasets.row_tables import MalformedRow, Row
from lightrft.datasets.row_warnings import UnknownText, note_steps, note_text
from lightrft.datasets.rows.recorded_row import recorded
from lightrft.datasets.rows.row_reader import check_begun, media_finder, parsed_row, row_weight
from lightrft.types import Media
from lightrft.utils.errors import ConfigError
from lightrft.utils.lazy_imports import np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_SPECIAL = re.compile(r"<\S+>|\[\S+\]")
"""The usual form of a special token."""

COLUMNS = {
    "tokens": "i",
    "ends": "Q",
    "split": "Q",
    "separators": "i",
    "labels": "d",
    "steps": "Q",
    "weight": "d",
    "data_source": "I",
    "source": "H",
    "row": "Q",
}
"""Stored columns of the examples.

They are the concatenated tokens, the end of each example and the end of each prompt. ``separators``
and ``labels`` have one entry per step, and ``steps`` has the end of each example among them. The
columns ``weight``, ``data_source``, ``source`` and ``row`` have one entry per example.
"""


@dataclass(slots=True)
class ProcessExample:
    """A prompt with one response in steps.

    Args:
        prompt_ids: tokens of the prompt.
        response_ids: tokens of the steps, each followed by the separator.
        separators: position in ``response_ids`` of the last token of each separator.
        labels: probability that each step is right. NaN for a step without a label.
        id: name of the example.
        index: place in the dataset.
        weight: weight of the example in the loss.
        data_source: name of the data source.
        prompt_media: media of ``prompt_ids``.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    separators: list[int]
    labels: list[float]
    id: str
    index: int = 0
    weight: float = 1.0
    data_source: str = ""
    prompt_media: Media = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """A parsed row.

    Args:
        record: the prompt, with its media.
        steps: the steps of the response.
        labels: label of each step, NaN for none.
        weight: weight of the row in the loss.
    """

    record: ParsedRow
    steps: list[str]
    labels: list[float]
    weight: float

    @property
    def row(self) -> Row:
        """Return the row, with the record of its columns."""
        return self.record.row


def read_process_row(
    row: Row,
    config: ProcessDataConfig,
    where: str,
    reads: SupportedMedia = NOTHING,
    root: Path = Path(),
) -> ProcessRow:
    """Return ``row`` as a ``ProcessRow``.

    Args:
        row: the row.
        config: the settings of the data.
        where: location of the row, for messages.
        reads: media that the model reads.
        root: folder of relative media paths.

    Raises:
        MalformedRow: see ``read_steps`` and ``parsed_row``.
    """
    row, columns = recorded(row), config.columns
    raw = read_steps(row, config, where)
    finder = media_finder(columns, where, reads, root)
    is_begun = check_begun(raw.prompt, config.prefill, where)
    record = parsed_row(row, raw.prompt, None, columns, where, finder, is_begun=is_begun)
    return ProcessRow(record, raw.steps, raw.labels, row_weight(row, columns, where))


class ProcessDataset(EncodedDataset[ProcessExample]):
    """The examples of ``config``, encoded once.

    Steps and separators are encoded one by one, so that the tokens of a separator do not depend on
    the text around it. Media are loaded as in ``PromptDataset``.

    ``counts`` contains:

    * ``rows``: rows read.
    * ``malformed``: rows skipped.
    * ``overlong``: rows dropped because they exceed ``max_tokens``.
    * ``truncated``: examples that lost their last steps.
    * ``special_tokens``: rows that spell a special token as text.
    * ``examples``: the length of the dataset.
    * ``steps/labelled`` and ``steps/unlabelled``: number of steps with and without a label.
    * ``steps/with_separator``: number of steps that contain the separator.

    Args:
        config: the settings of the data.
        tokenizer: the tokenizer, with its chat template.
        max_tokens: largest number of tokens of an example.
        seed: seed of the order of mixed sources.
        processor: the media processor. None for a model that reads only text.

    Raises:
        DataError: a row cannot be used, or no example is left.
        ConfigError: the tokenizer does not encode ``data.separator``.
    """

    def __init__(
        self,
        config: ProcessDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        seed: int,
        processor: Any = None,
    ) -> None:
        self.config = config
        self.max_tokens = max_tokens
        self.encoder = ChatEncoder(config, tokenizer, processor)
        self.separator_ids = self._separator()
        self._sources = Sources(
            config, self.encoder.reads, partial(read_process_row, config=config)
        )
        self.counts = self._sources.counts
        self.counts.update(truncated=0, overlong=0, special_tokens=0)
        self._kept: Columns = {name: array(code) for name, code in COLUMNS.items()}
        # Item numbers by stored example. Most have no media, so it is no column.
        self._media: dict[int, tuple[int, ...]] = {}
        self._fetcher = Fetcher(self.__getitem__, self.encoder.media)
        self._unknown = UnknownText(tokenizer)
        cache = token_cache_of(config, tokenizer, "steps", {"max_tokens": max_tokens}, processor)
        self._order, self._ids = self._sources.read(self._add, self._kept, cache, seed)
        self.counts["examples"] = len(self._order)
        self._source_names = self.data_sources

    def __getitem__(self, i: int) -> ProcessExample:
        k, start = self._stored(i, "example")
        kept = self._kept
        split, end = kept["split"][k], kept["ends"][k]
        steps = slice(int(kept["steps"][k - 1]) if k else 0, int(kept["steps"][k]))
        example = ProcessExample(
            prompt_ids=kept["tokens"][start:split].tolist(),
            response_ids=kept["tokens"][split:end].tolist(),
            separators=kept["separators"][steps].tolist(),
            labels=kept["labels"][steps].tolist(),
            id=self._ids[i],
            index=i,
            weight=float(kept["weight"][k]),
            data_source=self._source_names[kept["data_source"][k]],
        )
        if k in self._media:
            assert self.encoder.media is not None
            row = self._sources.record(int(kept["source"][k]), int(kept["row"][k]))
            items = [row.record.media[n] for n in self._media[k]]
            example.prompt_media, _ = self.encoder.media.inputs(
                items, example.prompt_ids, row.record.where
            )
        return example

    def digest(self) -> str:
        """Return a digest of the tokens, labels and media of all examples, in their order."""
        found = hashlib.blake2b(digest_size=20)
        for name in ("tokens", "ends", "split", "separators", "labels", "steps", "weight"):
            found.update(np.asarray(self._kept[name]).tobytes())
        found.update(self._order.tobytes())
        for k, places in sorted(self._media.items()):
            row = self._sources.record(int(self._kept["source"][k]), int(self._kept["row"][k]))
            for n in places:
                found.update(identity(row.record.media[n]))
        found.update(self.config.media.model_dump_json().encode())
        return found.hexdigest()

    def record(self, i: int) -> ProcessRow:
        """Return the row of example ``i``. Raises ``MalformedRow`` if it cannot be read again."""
        k, _ = self._stored(i, "example")
        return self._sources.record(int(self._kept["source"][k]), int(self._kept["row"][k]))

    @property
    def most_steps(self) -> int:
        """Return the largest number of steps of an example."""
        return int(np.diff(np.asarray(self._kept["steps"], dtype=np.int64), prepend=0).max())

    def _separator(self) -> list[int]:
        """Return the tokens of the separator.

        Raises ``ConfigError`` if the tokenizer has none for it.
        """
        text = self.config.separator
        (ids,) = self.encoder.encode([text])
        if ids and self.encoder.tokenizer.unk_token_id not in ids:
            if len(ids) > 1 and _SPECIAL.fullmatch(text):
                log.warning(
                    "data.separator = %r looks like a special token, but the tokenizer encodes it "
                    "as %d tokens; the model scores each step at the last of them",
                    text,
                    len(ids),
                )
            return ids
        name = self.encoder.tokenizer.name_or_path or type(self.encoder.tokenizer).__name__
        problem = f"data.separator = {text!r} is unknown to the tokenizer {name}"
        raise ConfigError(f"{problem}; set one of its own tokens, or a line break")

    def _add(self, source: int, chunk: Sequence[tuple[int, ProcessRow]]) -> list[str]:
        """Encode rows and store the examples that fit. Return their names."""
        shown: list[tuple[int, ProcessRow, str]] = []
        for number, row in chunk:
            try:
                shown.append((number, row, self.encoder.prompt(row.record)))
            except MalformedRow as error:
                self._sources.skip(error)
        expanded = self.encoder.expanded([(row.record, [text]) for _, row, text in shown])
        good = self._sources.made(shown, expanded)
        # one call for each kind: a fast tokenizer encodes them in parallel
        prompts = self.encoder.encode_prompts([full for _, (full,) in good])
        texts = [self._shielded(row) for (_, row, _), _ in good]
        encoded = iter(self.encoder.encode(list(itertools.chain.from_iterable(texts))))
        names = []
        for ((number, row, text), (full,)), prompt, own in zip(good, prompts, texts):
            steps = list(itertools.islice(encoded, len(own)))
            fitting = self._fitting(row, prompt, steps)
            if not fitting:
                continue
            self._store(source, number, row, prompt, fitting)
            items = tuple(n for _, n in marks(text))
            if items:
                self._media[len(self._kept["ends"]) - 1] = items
            ids = [*prompt, *itertools.chain.from_iterable(fitting)]
            unknown = self._unknown.count("".join([full, *own[: len(fitting)]]), ids)
            note_text(self.counts, unknown, len(ids), source, number)
            kept = row.steps[: len(fitting)]
            note_steps(self.counts, kept, self.config.separator, source, number)
            self.counts["special_tokens"] += any(map(self.encoder.is_shielded, [full, *own]))
            self.counts["media_words"] += bool(row.record.words)
            names.append(row.record.id or f"{self._sources.names[source]}/{number}")
        return names

    def _shielded(self, row: ProcessRow) -> list[str]:
        """Return the steps as text in which no special token acts as one."""
        return [self.encoder.escape_special_tokens(step, answer=True) for step in row.steps]

    def _fitting(
        self, row: ProcessRow, prompt: Sequence[int], steps: list[list[int]]
    ) -> list[list[int]]:
        """Return the steps that fit, or none for a row that is left out."""
        sizes = [len(step) + len(self.separator_ids) for step in steps]
        ends = list(itertools.accumulate(sizes, initial=len(prompt)))
        if ends[-1] <= self.max_tokens:
            return steps
        count = sum(end <= self.max_tokens for end in ends[1:])
        has_labels = any(label == label for label in row.labels[:count])
        if self.config.overlong_prompts == "truncate" and has_labels:
            self.counts["truncated"] += 1
            return steps[:count]
        self._sources.overlong(row.record.where, ends[-1], self.max_tokens, "max_tokens")
        return []

    def _store(
        self,
        source: int,
        number: int,
        row: ProcessRow,
        prompt: Sequence[int],
        steps: Sequence[Sequence[int]],
    ) -> None:
        kept = self._kept
        kept["tokens"].extend(prompt)
        split = len(kept["tokens"])
        for ids, label in zip(steps, row.labels):
            kept["tokens"].extend(ids)
            kept["tokens"].extend(self.separator_ids)
            kept["separators"].append(len(kept["tokens"]) - split - 1)
            kept["labels"].append(label)
            self.counts["steps/labelled" if label == label else "steps/unlabelled"] += 1
        kept["split"].append(split)
        kept["ends"].append(len(kept["tokens"]))
        kept["steps"].append(len(kept["labels"]))
        kept["weight"].append(row.weight)
        name = self._sources.data_source(row.record, source)
        kept["data_source"].append(self._sources.data_sources[name])
        kept["source"].append(source)
        kept["row"].append(number)
