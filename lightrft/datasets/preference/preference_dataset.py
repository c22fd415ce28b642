"""Token sequences of prompts with compared or labelled responses."""

from __future__ import annotations

import hashlib
import itertools
import types
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightrft.config.data import PreferenceDataConfig, RewardColumns
from lightrft.config.preference.sections import PreferenceKind
from lightrft.datasets.encoded_dataset import EncodedDataset
from lightrft.datasets.media.items import identity, marks
from lightrft.datasets.preference.formats import check_format
from lightrft.datasets.preference.head_labels import LabelledHeads
from lightrft.datasets.preference.preference_rows import (
    PreferenceRow,
    labelled,
    ranked,
    read_preference,
)
from lightrft.datasets.row_parser import ParsedRow
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.row_warnings import note_text
from lightrft.datasets.turns import Tokens, TurnEncoder, TurnTexts, Weights
from lightrft.types import Media
from lightrft.utils.errors import ConfigError, DataError, did_you_mean
from lightrft.utils.lazy_imports import np
from lightrft.utils.seeding import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = {
    "tokens": "i",
    "trained": "B",
    "ends": "Q",
    "groups": "Q",
    "rank": "i",
    "desirable": "B",
    "rating": "d",
    "margin": "d",
    "weight": "d",
    "data_source": "I",
    "source": "H",
    "row": "Q",
}
"""Stored columns of the examples.

An example is a prompt, followed by its responses. They are sequences. ``ends`` has the end of each
sequence in ``tokens`` and ``trained``, and ``groups`` the end of each example in ``ends``. The
columns ``rank``, ``desirable``, ``rating`` and ``margin`` have one entry per sequence. The columns
``weight``, ``data_source``, ``source`` and ``row`` have one per example.
"""

LABELS = "labels"
"""Stored column of labels, with one entry per head and sequence. It exists if there are heads."""

ABSENT = float("nan")
"""Stored rating, margin or label of a response that has none."""

ExampleKind = PreferenceKind | Literal["rated"]
"""Form of the examples. ``rated`` responses need no order: each has labels of heads."""

CUT_TOKENS = "truncated/tokens"
"""Key of ``counts``: number of response tokens that the length limit cut off."""


Encoded = tuple[Tokens, Weights]
"""The tokens of a response, and their weights in the loss."""


@dataclass(slots=True)
class PreferenceResponse:
    """One response of an example.

    Args:
        token_ids: the tokens.
        trained: mask ``[len(token_ids)]``. True for the assistant's words and its end-of-turn
            token, never for a media placeholder.
        rank: 0 for the best responses of the example, ``GOLD`` for the gold one. None for losses of
            labels.
        desirable: the label. None for losses that compare responses.
        rating: the rating. None if the row has none.
        margin: how much better the response is than the next worse one. None if the row does not
            say it.
        media: media of ``token_ids``.
        labels: rating for each head of a reward model, higher is better. A head without a label is
            absent.
    """

    token_ids: list[int]
    trained: list[bool]
    rank: int | None = None
    desirable: bool | None = None
    rating: float | None = None
    margin: float | None = None
    media: Media = field(default_factory=dict)
    labels: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class PreferenceExample:
    """A prompt with its responses.

    Args:
        prompt_ids: tokens of the prompt.
        responses: the responses.
        id: name of the example.
        index: place in the dataset.
        weight: weight of the example in the loss.
        data_source: name of the data source.
        prompt_media: media of ``prompt_ids``.
        corrupted_media: corrupted media of ``prompt_ids``. None for losses that read none.
    """

    prompt_ids: list[int]
    responses: list[PreferenceResponse]
    id: str
    index: int = 0
    weight: float = 1.0
    data_source: str = ""
    prompt_media: Media = field(default_factory=dict)
    corrupted_media: Media | None = None


@dataclass(slots=True)
class _Group:
    """A row on its way to an example.

    ``judged`` has the ranks or the labels, as the losses read them.
    """

    row: int
    record: PreferenceRow
    parts: list[TurnTexts]
    judged: Sequence[int]

    @property
    def bundles(self) -> list[list[TurnTexts]]:
        """Return the parts that have the same media together."""
        return [self.parts] if self.record.is_split else [[part] for part in self.parts]


class PreferenceDataset(EncodedDataset[PreferenceExample]):
    """The examples of ``config``, encoded once.

    The prompt is stored once per example. Its responses are trained on the assistant turns that
    ``data.turns`` selects. The tokens of users and tools are masked. Media are loaded as in
    ``PromptDataset``.

    ``truncated`` counts responses that are cut at the end. ``counts`` also contains:

    * ``truncated/tokens``: tokens that were cut off. ``row_warnings.is_plain`` leaves it out.
    * ``labels/HEAD``: responses with a label of the head, for each head.

    With ``heads``, questions for a judge become two conversations, one for each candidate. Their
    prompt is the text before the media, and no token is trained.

    Args:
        config: the settings of the data.
        tokenizer: the tokenizer, with its chat template.
        kind: what the losses read: ``pair``, ``ranked``, ``labelled`` or ``rated`` responses.
        max_tokens: largest number of tokens of a prompt with one response.
        seed: seed of the order of mixed sources, and of corrupted media.
        processor: the media processor. None for a model that reads only text.
        gold: if True, each row has a gold response, in the column ``reference``.
        corrupted: if True, each prompt also gets corrupted media.
        heads: names of the heads of a reward model whose labels are read.
        keep_ties: if True, responses that are equal for every head are kept.
        rating_range: number of ratings of a head, by its name. Labels of the head must be integers
            from 0 to one less.

    Raises:
        DataError: a row cannot be used, no example is left, or a head has no label.
        ConfigError: ``data.turns`` is ``each``, or a setting does not fit the tokenizer.
        ModelError: the chat template lacks the prefix property, or the tokenizer has no EOS token.
    """

    config: PreferenceDataConfig
    purpose = "preferences"
    columns = COLUMNS

    def __init__(
        self,
        config: PreferenceDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        kind: ExampleKind,
        max_tokens: int,
        seed: int,
        processor: Any = None,
        gold: bool = False,
        corrupted: bool = False,
        heads: Sequence[str] = (),
        keep_ties: bool = False,
        rating_range: Mapping[str, int] = types.MappingProxyType({}),
    ) -> None:
        if config.turns == "each":
            problem = "data.turns: each makes examples of single turns, which have no rank"
            raise ConfigError(f"{problem}; set data.turns: all or last")
        self.heads = tuple(heads)
        labelled_heads = _labelled_heads(config, kind, self.heads, keep_ties, rating_range)
        check_format(config.columns, scored=bool(heads))
        read = partial(
            read_preference,
            columns=config.columns,
            gold=gold,
            heads=labelled_heads,
            prefill=config.prefill,
        )
        super().__init__(config, tokenizer, processor, read)
        self.counts[CUT_TOKENS] = 0
        self.kind: ExampleKind = kind
        self.max_tokens = max_tokens
        self.seed = seed
        self.corrupted = corrupted
        self.turns = TurnEncoder(config, self.encoder)
        if self.heads:
            self._kept[LABELS] = array("d")
        # Item numbers by stored example. Most have no media, so it is no column.
        self._media: dict[int, list[tuple[int, ...]]] = {}
        # The same examples, with the identities of their items.
        self._identities: dict[int, bytes] = {}
        options = {
            "max_tokens": max_tokens,
            "kind": kind,
            "gold": gold,
            "corrupted": corrupted,
            "heads": labelled_heads,
        }
        self._fill(options, seed)
        self._check_heads()

    def __getitem__(self, i: int) -> PreferenceExample:
        k = self._stored(i)
        part = self._part("groups", k)
        first, *others = range(part.start, part.stop)
        prompt_ids, _ = self._tokens(first)
        example = PreferenceExample(
            prompt_ids=prompt_ids,
            responses=[self._response(s) for s in others],
            id=self._ids[i],
            index=i,
            weight=float(self._kept["weight"][k]),
            data_source=self._source_names[self._kept["data_source"][k]],
        )
        if k in self._media:
            self._attach(k, example)
        return example

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest prompt with one response."""
        lengths = self._sizes("ends")
        groups = np.asarray(self._kept["groups"], dtype=np.int64)
        starts = np.concatenate([[0], groups[:-1]])
        rows = np.repeat(starts, groups - starts)
        whole = lengths + lengths[rows]
        whole[starts] = 0
        return int(whole.max())

    @property
    def most_responses(self) -> int:
        """Return the largest number of responses of an example."""
        return int(self._sizes("groups").max()) - 1

    @property
    def is_weighted(self) -> bool:
        """Return True if any example has a weight other than 1."""
        return bool((np.asarray(self._kept["weight"]) != 1.0).any())

    @property
    def response_tokens(self) -> np.ndarray:
        """Return the number of response tokens of each example, in the order of the dataset."""
        ends = np.asarray(self._kept["ends"], dtype=np.int64)
        groups = np.asarray(self._kept["groups"], dtype=np.int64)
        # The first sequence of an example is its prompt.
        prompts = np.concatenate([[0], groups[:-1]])
        counts = ends[groups - 1] - ends[prompts]
        if self.corrupted:
            # A copy of the first of the best responses follows the others.
            best = np.asarray(self._kept["rank"]) == 0
            best[prompts] = False
            places = np.flatnonzero(best)
            first = places[np.searchsorted(places, prompts)]
            counts = counts + ends[first] - ends[first - 1]
        return counts[self._order]

    def _bounds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the start and the end of each stored prompt, and the length of each response."""
        starts, ends, _ = super()._bounds()
        firsts = np.concatenate([[0], np.asarray(self._kept["groups"], dtype=np.int64)[:-1]])
        return starts[firsts], ends[firsts], np.delete(ends - starts, firsts)

    def labels_of(self, head: str) -> np.ndarray:
        """Return the labels of all responses that have one for ``head``."""
        column = np.asarray(self._kept[LABELS])[self.heads.index(head) :: len(self.heads)]
        return column[~np.isnan(column)]

    def digest(self) -> str:
        """Return a digest of the tokens and media of all examples, in their order."""
        found = hashlib.blake2b(digest_size=20)
        for name in ("tokens", "ends", "groups"):
            found.update(np.asarray(self._kept[name]).tobytes())
        found.update(self._order.tobytes())
        for seen in self._identities.values():
            found.update(seen)
        found.update(self.config.media.model_dump_json().encode())
        if self.corrupted:
            found.update(f"corrupted {self.seed}".encode())
            for name in ("source", "row", "rank"):
                found.update(np.asarray(self._kept[name]).tobytes())
        return found.hexdigest()

    def record(self, i: int) -> PreferenceRow:
        """Return the row of example ``i``. Raises ``MalformedRow`` if it cannot be read again."""
        return self._record(*self._place(self._stored(i)))

    def require(self, column: Literal["rating", "margin"]) -> None:
        """Check that every response has a ``rating`` or ``margin``.

        Raises ``DataError`` with the location of the first response that has none.
        """
        absent = np.flatnonzero(np.isnan(np.asarray(self._kept[column], dtype=np.float64)))
        if not len(absent):
            return
        groups = np.asarray(self._kept["groups"], dtype=np.int64)
        k = int(np.searchsorted(groups, absent[0], side="right"))
        where = self._where(*self._place(k))
        raise DataError(
            f"{where}: the row has no {column}, which the loss needs for every response"
        )

    def _check_heads(self) -> None:
        """Raise ``DataError`` if a head has no label in any row."""
        for head in self.heads:
            if not self.counts[f"{LABELS}/{head}"]:
                columns = self.config.columns
                named = columns.labels if isinstance(columns, RewardColumns) else {}
                sources = ", ".join(source.path for source in self.config.sources)
                problem = f"no response in {sources} has a label of head {head!r}"
                looked = f"looked for the column {named.get(head, head)!r}"
                way_out = f"name the column in data.columns.labels.{head}, or leave the head out"
                raise DataError(f"{problem} ({looked}); {way_out}")

    def _tokens(self, s: int) -> tuple[list[int], list[bool]]:
        part = self._part("ends", s)
        trained = [bool(t) for t in self._kept["trained"][part]]
        return self._kept["tokens"][part].tolist(), trained

    def _response(self, s: int) -> PreferenceResponse:
        token_ids, trained = self._tokens(s)
        is_labelled = self.kind == "labelled"
        is_ranked = self.kind in ("pair", "ranked")
        rating, margin = float(self._kept["rating"][s]), float(self._kept["margin"][s])
        return PreferenceResponse(
            token_ids,
            trained,
            rank=int(self._kept["rank"][s]) if is_ranked else None,
            desirable=bool(self._kept["desirable"][s]) if is_labelled else None,
            rating=None if rating != rating else rating,
            margin=None if margin != margin else margin,
            labels=self._labels(s),
        )

    def _labels(self, s: int) -> dict[str, float]:
        """Return the labels of stored sequence ``s`` by head."""
        if not self.heads:
            return {}
        first = s * len(self.heads)
        values = self._kept[LABELS][first : first + len(self.heads)]
        labels: dict[str, float] = {}
        for head, value in zip(self.heads, values):
            if value == value:
                labels[head] = float(value)
        return labels

    def _attach(self, k: int, example: PreferenceExample) -> None:
        """Load the media of stored example ``k``. Raises ``MalformedRow``."""
        assert self.encoder.media is not None
        row = self.record(example.index)
        for response, record, numbers in zip(example.responses, row.responses, self._media[k]):
            items = [record.media[n] for n in numbers]
            parts = (example.prompt_ids, response.token_ids)
            media = self.encoder.media.split(items, parts, record.where)
            # equal for all responses: they continue the same prompt
            example.prompt_media, response.media = media
        if self.corrupted:
            example.corrupted_media = self._corrupted(k, example, row.responses[0])

    def _corrupted(self, k: int, example: PreferenceExample, record: ParsedRow) -> Media:
        """Return the corrupted media of the prompt of stored example ``k``."""
        assert self.encoder.media is not None
        items = []
        place = self._place(k)
        for n in self._media[k][0]:
            seed = derive_seed(self.seed, "corrupted", *place, n)
            items.append(replace(record.media[n], corruption=seed))
        # Media of later turns are part of the response, which keeps them as they are.
        parts = (example.prompt_ids, example.responses[0].token_ids)
        media, _ = self.encoder.media.split(items, parts, record.where)
        return media

    def _add(self, source: int, chunk: Sequence[tuple[int, PreferenceRow]]) -> list[str]:
        """Encode rows and store the examples that fit. Return their names."""
        good = self._expanded(list(self._groups(chunk)))
        known = self.turns.encode(list(itertools.chain.from_iterable(g.parts for g in good)))
        names = []
        for group in good:
            try:
                kept = self._keep(source, group, known)
            except MalformedRow as error:
                self._skip(error)
                continue
            if kept:
                names.append(self._name(group.record.id, source, group.row))
        return names

    def _expanded(self, groups: Sequence[_Group]) -> list[_Group]:
        """Return the groups whose media can be read, with the text of media in their parts."""
        shown = [self.turns.texts(parts) for group in groups for parts in group.bundles]
        expanded = iter(self.encoder.expanded(shown))
        good: list[_Group] = []
        for group in groups:
            made = list(itertools.islice(expanded, len(group.bundles)))
            problems = [one for one in made if isinstance(one, MalformedRow)]
            # once for the row, even if both candidates cannot be read
            if problems:
                self._skip(problems[0])
                continue
            texts = [one for one in made if not isinstance(one, MalformedRow)]
            for parts, own in zip(group.bundles, texts):
                self.turns.expand(parts, own)
            good.append(group)
        return good

    def _groups(self, chunk: Sequence[tuple[int, PreferenceRow]]) -> Iterator[_Group]:
        """Yield the rows that the losses can read, with their texts."""
        for row, record in chunk:
            try:
                judged = self._judged(record)
                if record.is_split:
                    parts = [self.turns.continuation(response) for response in record.responses]
                    self._check_words(record)
                else:
                    parts = [self.turns.question(response) for response in record.responses]
                if self.corrupted:
                    first = record.responses[0]
                    asked = first.messages[: first.asked]
                    if not any(marks(message["content"]) for message in asked):
                        problem = (
                            "the loss corrupts the media of a prompt, and this prompt has none"
                        )
                        raise MalformedRow(f"{first.where}: {problem}")
            except MalformedRow as error:
                self._skip(error)
                continue
            yield _Group(row, record, parts, judged)

    def _judged(self, record: PreferenceRow) -> list[int]:
        """Return the label or the rank of each response, or zeros for ratings.

        Raises ``MalformedRow`` if the row has no such labels or ranks.
        """
        if self.kind == "rated":
            return [0] * len(record.responses)
        if self.kind == "labelled":
            return [int(good) for good in labelled(record)]
        return ranked(record)

    def _check_words(self, row: PreferenceRow) -> None:
        """Raise ``MalformedRow`` if a response consists of special tokens alone."""
        for record, name in zip(row.responses, row.names):
            said = [m for m in record.messages[record.asked :] if m["role"] == "assistant"]
            if any(len(message) > 2 for message in said):
                continue
            words = "".join(message["content"] for message in said)
            for token in self.encoder.tokenizer.all_special_tokens:
                words = words.replace(token, "")
            if not words.strip():
                raise MalformedRow(f"{row.where}: {name} contains only special tokens")

    def _keep(self, source: int, group: _Group, known: Mapping[str, Tokens]) -> bool:
        """Store an example if it fits or can be cut. Return True if it was stored.

        Raises ``MalformedRow`` if responses of different ranks have equal tokens.
        """
        encode = self._continuations if group.record.is_split else self._conversations
        prompt, responses = encode(group, known)
        fitting = self._fitting(group, len(prompt), responses)
        if fitting is None:
            return False
        self._store(source, group, prompt, fitting)
        self._note(source, group, prompt, fitting)
        return True

    def _continuations(
        self, group: _Group, known: Mapping[str, Tokens]
    ) -> tuple[Tokens, list[Encoded]]:
        """Return the tokens of a prompt and of its responses."""
        where = group.record.where
        prompt = self.turns.prompt_tokens(group.parts[0], known)
        responses: list[Encoded] = []
        for part in group.parts:
            ids, weights = self.turns.tokens(part, known)
            # every continuation begins with the tokens of its prompt
            assert ids[: len(prompt)] == prompt
            responses.append((ids[len(prompt) :], weights[len(prompt) :]))
        for name, (_, weights) in zip(group.record.names, responses):
            if not any(weights):
                raise MalformedRow(f"{where}: {name} has no token to train on")
            if others := set(weights) - {0.0, 1.0}:
                problem = f"{name} has a turn of weight {min(others):g}"
                way_out = "turns of compared responses have weight 0 or 1"
                raise MalformedRow(f"{where}: {problem}; {way_out}")
        if equal := _equal(group, responses):
            raise MalformedRow(f"{where}: {equal} have equal tokens, but one is better")
        return prompt, responses

    def _conversations(
        self, group: _Group, known: Mapping[str, Tokens]
    ) -> tuple[Tokens, list[Encoded]]:
        """Return the tokens of conversations as those of a prompt and of responses.

        The prompt is their common tokens before the first placeholder of media.
        """
        whole = [self.turns.prompt_tokens(part, known) for part in group.parts]
        placeholders = self.encoder.placeholders
        same = 0
        for ids in zip(*whole):
            if len(set(ids)) > 1 or ids[0] in placeholders:
                break
            same += 1
        if not same:
            problem = "the chat template writes the media first, so there is no prompt"
            raise MalformedRow(f"{group.record.where}: {problem}; set data.system")
        return whole[0][:same], [(ids[same:], [0.0] * (len(ids) - same)) for ids in whole]

    def _note(
        self, source: int, group: _Group, prompt: Tokens, responses: Sequence[Encoded]
    ) -> None:
        """Count unknown text and spelled special tokens of a stored row."""
        # the prompt once, as it is stored
        texts = [group.parts[0].start]
        for part in group.parts:
            texts += [said.removeprefix(part.start) for _, said in part.turns[-1:]]
        ids = [*prompt, *itertools.chain.from_iterable(ids for ids, _ in responses)]
        unknown = self._unknown.count("".join(texts), ids)
        note_text(self.counts, unknown, len(ids), source, group.row)
        self.counts["special_tokens"] += any(map(self.encoder.is_shielded, texts))
        self.counts["media_words"] += any(part.record.words for part in group.parts)

    def _fitting(
        self, group: _Group, asked: int, responses: Sequence[Encoded]
    ) -> list[Encoded] | None:
        """Return the responses, cut at the length limit, or None for a row that is left out.

        Args:
            group: the row.
            asked: number of tokens of the prompt.
            responses: tokens of each response with their weights.

        Raises:
            DataError: ``data.overlong_prompts`` is ``error`` and a response is too long.
        """
        room = self.max_tokens - asked
        longest = asked + max(len(ids) for ids, _ in responses)
        if longest <= self.max_tokens:
            return list(responses)
        cut: list[Encoded] = []
        for ids, weights in responses:
            shorter = self.turns.cut(ids, weights, room)
            if shorter is not None:
                cut.append(shorter)
        if len(cut) < len(responses) or _equal(group, cut):
            self._overlong(group.record.where, longest, self.max_tokens, "max_tokens")
            return None
        lost = [len(ids) - room for ids, _ in responses if len(ids) > room]
        self.counts["truncated"] += len(lost)
        self.counts[CUT_TOKENS] += sum(lost)
        return cut

    def _store(
        self, source: int, group: _Group, prompt: Tokens, responses: Sequence[Encoded]
    ) -> None:
        kept, record = self._kept, group.record
        if any(part.items for part in group.parts):
            k = len(kept["groups"])
            self._media[k] = [part.items for part in group.parts]
            # Here, where the row is at hand: ``digest`` need not read it again.
            pairs = zip(record.responses, group.parts)
            self._identities[k] = b"".join(
                identity(response.media[n]) for response, part in pairs for n in part.items
            )
        count = len(responses)
        # the first entry of each column belongs to the prompt, and is never read
        ratings = [0.0, *(record.ratings or [ABSENT] * count)]
        margins = [0.0, *(record.margins or [ABSENT] * count)]
        sequences = [(prompt, [0.0] * len(prompt)), *responses]
        for k, (ids, weights) in enumerate(sequences):
            judged = group.judged[k - 1] if k else 0
            kept["tokens"].extend(ids)
            kept["trained"].extend(weight != 0 for weight in weights)
            kept["ends"].append(len(kept["tokens"]))
            kept["rank"].append(0 if self.kind == "labelled" else judged)
            kept["desirable"].append(judged if self.kind == "labelled" else 0)
            kept["rating"].append(ratings[k])
            kept["margin"].append(margins[k])
            labels = record.labels[k - 1] if k and self.heads else {}
            for head in self.heads:
                kept[LABELS].append(labels.get(head, ABSENT))
                self.counts[f"{LABELS}/{head}"] += head in labels
        kept["groups"].append(len(kept["ends"]))
        kept["weight"].append(record.weight)
        kept["data_source"].append(self._data_source(record.responses[0], source))
        kept["source"].append(source)
        kept["row"].append(group.row)


def _labelled_heads(
    config: PreferenceDataConfig,
    kind: ExampleKind,
    heads: tuple[str, ...],
    keep_ties: bool,
    rating_range: Mapping[str, int],
) -> LabelledHeads | None:
    """Return how labels of heads are read, or None without heads.

    Raises ``ConfigError`` if ``data.columns.labels`` names another head. The arguments are those of
    ``PreferenceDataset``.
    """
    columns = config.columns.labels if isinstance(config.columns, RewardColumns) else {}
    for name in columns:
        if name not in heads:
            hint = did_you_mean(name, heads)
            known = f"Known: {', '.join(heads) or 'none'}"
            raise ConfigError(f"data.columns.labels: no head {name!r}{hint}. {known}")
    if not heads:
        return None
    return LabelledHeads(heads, dict(columns), dict(rating_range), kind == "rated", keep_ties)


def _equal(group: _Group, responses: Sequence[Encoded]) -> str:
    """Return the names of two equal responses of different ranks or labels, or an empty text."""
    triples = zip(group.record.names, responses, group.judged)
    # a gold response is compared with no other one
    judged = [one for one in triples if one[2] >= 0]
    for one, other in itertools.combinations(judged, 2):
        if one[1] == other[1] and one[2] != other[2]:
            return f"{one[0]} and {other[0]}"
    return ""
