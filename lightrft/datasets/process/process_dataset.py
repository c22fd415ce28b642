"""Token sequences of responses with a label for each step."""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrft.config.data import ProcessDataConfig
from lightrft.datasets.encoded_dataset import EncodedDataset
from lightrft.datasets.media import SupportedMedia
from lightrft.datasets.media.items import identity, marks
from lightrft.datasets.process.step_formats import read_steps
from lightrft.datasets.row_parser import ParsedRow
from lightrft.datasets.row_tables import Row
from lightrft.datasets.row_warnings import SEPARATED, note, note_text
from lightrft.datasets.rows.recorded_row import recorded
from lightrft.datasets.rows.row_content import GivenRow
from lightrft.datasets.rows.row_reader import parsed_row, row_weight
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


class ProcessDataset(EncodedDataset[ProcessExample]):
    """The examples of ``config``, encoded once.

    Steps and separators are encoded one by one, so that the tokens of a separator do not depend on
    the text around it. Media are loaded as in ``PromptDataset``.

    Examples that are ``truncated`` lose their last steps. ``counts`` also contains:

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

    config: ProcessDataConfig
    purpose = "steps"
    columns = COLUMNS

    def __init__(
        self,
        config: ProcessDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        seed: int,
        processor: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, processor, self._parsed)
        self.max_tokens = max_tokens
        self.separator_ids = self._separator()
        # Item numbers by stored example. Most have no media, so it is no column.
        self._media: dict[int, tuple[int, ...]] = {}
        self._fill({"max_tokens": max_tokens}, seed)

    def __getitem__(self, i: int) -> ProcessExample:
        k = self._stored(i)
        kept, part, steps = self._kept, self._part("ends", k), self._part("steps", k)
        split = kept["split"][k]
        example = ProcessExample(
            prompt_ids=kept["tokens"][part.start : split].tolist(),
            response_ids=kept["tokens"][split : part.stop].tolist(),
            separators=kept["separators"][steps].tolist(),
            labels=kept["labels"][steps].tolist(),
            id=self._ids[i],
            index=i,
            weight=float(kept["weight"][k]),
            data_source=self._source_names[kept["data_source"][k]],
        )
        if k in self._media:
            assert self.encoder.media is not None
            row = self._record(*self._place(k))
            items = [row.record.media[n] for n in self._media[k]]
            example.prompt_media, _ = self.encoder.media.inputs(
                items, example.prompt_ids, row.record.where
            )
        return example

    def _parsed(self, row: Row, where: str, reads: SupportedMedia, root: Path) -> ProcessRow:
        """Return ``row`` as a ``ProcessRow``. Raises ``MalformedRow``."""
        columns = self.config.columns
        given = GivenRow(recorded(row), columns, where, reads, root, self.config.prefill)
        raw = read_steps(given.row, self.config, where)
        record = parsed_row(given, raw.prompt, None, is_begun=given.continues(raw.prompt))
        return ProcessRow(record, raw.steps, raw.labels, row_weight(given.row, columns, where))

    def digest(self) -> str:
        """Return a digest of the tokens, labels and media of all examples, in their order."""
        found = hashlib.blake2b(digest_size=20)
        for name in ("tokens", "ends", "split", "separators", "labels", "steps", "weight"):
            found.update(np.asarray(self._kept[name]).tobytes())
        found.update(self._order.tobytes())
        for k, places in sorted(self._media.items()):
            row = self._record(*self._place(k))
            for n in places:
                found.update(identity(row.record.media[n]))
        found.update(self.config.media.model_dump_json().encode())
        return found.hexdigest()

    def record(self, i: int) -> ProcessRow:
        """Return the row of example ``i``. Raises ``MalformedRow`` if it cannot be read again."""
        return self._record(*self._place(self._stored(i)))

    @property
    def most_steps(self) -> int:
        """Return the largest number of steps of an example."""
        return int(self._sizes("steps").max())

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
        rows = dict(chunk)
        good = self._prompts([(number, row.record) for number, row in chunk])
        texts = [
            [self.encoder.escape_special_tokens(s, answer=True) for s in rows[number].steps]
            for number, *_ in good
        ]
        encoded = iter(self.encoder.encode(list(itertools.chain.from_iterable(texts))))
        names = []
        for (number, _, text, full, prompt), own in zip(good, texts):
            row, steps = rows[number], list(itertools.islice(encoded, len(own)))
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
            separated = sum(self.config.separator in s for s in row.steps[: len(fitting)])
            note(self.counts, SEPARATED, separated, source, number)
            self.counts["special_tokens"] += any(map(self.encoder.is_shielded, [full, *own]))
            self.counts["media_words"] += bool(row.record.words)
            names.append(self._name(row.record.id, source, number))
        return names

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
        self._overlong(row.record.where, ends[-1], self.max_tokens, "max_tokens")
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
        kept["data_source"].append(self._data_source(row.record, source))
        kept["source"].append(source)
        kept["row"].append(number)
