"""The scores and texts of an evaluation on disk, from which it resumes, and its report."""

from __future__ import annotations

import heapq
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from lightrft.algorithms.reward_model.quality import (
    ScoredPrompt,
    calibration_bins,
    judged_pairs,
    pair_accuracy,
    reported_curve,
)
from lightrft.config.model import ModelConfig
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.media import Item
from lightrft.datasets.media.items import replaced
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.row_parser import Message, ParsedRow
from lightrft.datasets.row_tables import MalformedRow
from lightrft.types import Attachment
from lightrft.utils.atomic_files import json_line, write_atomic, write_json
from lightrft.utils.errors import DataError

REPORT = "reward_scores.json"
"""File of a run folder with the content of the report."""
BARS = 40
"""Number of bins of the distribution of scores."""


def scored_prompt(line: Shown) -> ScoredPrompt:
    """Return the scores of a prompt, from the fields of its line."""
    fields = {name: line[name] for name in ("index", "id", "source", "lengths")}
    numbers = {}
    for name in ("scores", "labels"):
        numbers[name] = {head: with_nan(values) for head, values in line[name].items()}
    return ScoredPrompt(**fields, **numbers)


def texts_of(dataset: PreferenceDataset, index: int) -> Shown:
    """Return the texts of prompt ``index`` and of its responses, without media.

    Raises ``MalformedRow`` if the row cannot be read any more.
    """
    row = dataset.record(index)
    asked = row.responses[0].asked if row.is_split else 0
    prompt = written(row.responses[0].messages[:asked])
    responses = [written(one.messages[asked:]) for one in row.responses]
    return {"prompt": prompt, "responses": responses}


def written(messages: Sequence[Message]) -> str:
    """Return messages as text. Roles are named where there are several."""
    parts = []
    for message in messages:
        text = replaced(str(message["content"]), lambda kind, number: "").strip()
        parts.append(text if len(messages) == 1 else f"{message['role']}: {text}")
    return "\n\n".join(parts)


def write_report_data(
    folder: Path,
    dataset: PreferenceDataset,
    prompts: Sequence[ScoredPrompt],
    head: str,
    *,
    worst: int,
    best_of: int | None = None,
) -> None:
    """Write the content of the report of an evaluation to a run folder, with media of bad pairs.

    Nothing is written for a head that compares no responses.

    Args:
        folder: The run folder.
        dataset: The data set of the prompts.
        prompts: The scored prompts.
        head: Head whose scores are shown.
        worst: Number of pairs to show whose order is most wrong.
        best_of: See ``reported_curve``.
    """
    pairs = judged_pairs(prompts, head)
    if not pairs:
        return
    shown: list[Shown] = []
    for prompt, better, worse in worst_pairs(prompts, head, worst):
        try:
            shown.append(_pair(folder, dataset, prompt, head, (better, worse)))
        # Files may be gone since they were scored. The numbers are still right.
        except MalformedRow as error:
            shown.append({"id": prompt.id, "source": prompt.source, "missing": str(error)})
    content = {
        "head": head,
        "pairs": len(pairs),
        "distribution": distribution(
            better=[pair.better for pair in pairs], worse=[pair.worse for pair in pairs]
        ),
        "calibration": [asdict(one) for one in calibration_bins(pairs)],
        "subsets": _subsets(prompts, head),
        "best_of_n": [asdict(point) for point in reported_curve(prompts, head, best_of)],
        "worst": shown,
    }
    write_json(folder / REPORT, content)


def worst_pairs(
    prompts: Sequence[ScoredPrompt], head: str, count: int
) -> list[tuple[ScoredPrompt, int, int]]:
    """Return the pairs in wrong order with the largest differences of scores, the largest first.

    A prompt has one pair at most, so that a bad prompt does not fill the list.

    Args:
        prompts: The scored prompts.
        head: Head whose scores count.
        count: Largest number of pairs.
    """

    def gaps() -> Iterator[tuple[float, int, int, int]]:
        for number, prompt in enumerate(prompts):
            scores = prompt.scores[head]
            own = [(scores[w] - scores[b], -number, b, w) for b, w in prompt.pairs(head)]
            if own and max(own)[0] > 0:
                yield max(own)

    return [(prompts[-n], b, w) for _, n, b, w in heapq.nlargest(count, gaps())]


def distribution(**sides: Sequence[float]) -> Shown:
    """Return the share of the scores of each side in bins of equal width.

    Args:
        sides: Scores by the name of the side, such as ``better`` and ``worse``.
    """
    every = list(itertools.chain.from_iterable(sides.values()))
    if not every:
        return {"centers": [], **{name: [] for name in sides}}
    low, high = min(every), max(every)
    width = (high - low) / BARS or 1.0
    found: Shown = {"centers": [low + (k + 0.5) * width for k in range(BARS)]}
    for name, scores in sides.items():
        counts = [0] * BARS
        for score in scores:
            counts[min(int((score - low) / width), BARS - 1)] += 1
        found[name] = [count / max(len(scores), 1) for count in counts]
    return found


def _subsets(prompts: Sequence[ScoredPrompt], head: str) -> list[Shown]:
    """Return the accuracy of each data source with its interval."""
    of_source: dict[str, list[ScoredPrompt]] = {}
    for prompt in prompts:
        of_source.setdefault(prompt.source, []).append(prompt)
    found: list[Shown] = []
    for name, own in of_source.items():
        pairs = judged_pairs(own, head)
        if pairs:
            found.append({"name": name, **asdict(pair_accuracy(pairs))})
    return found


def _pair(
    folder: Path,
    dataset: PreferenceDataset,
    prompt: ScoredPrompt,
    head: str,
    places: tuple[int, int],
) -> Shown:
    """Return a pair with its texts and scores, and write its media to ``folder``.

    Args:
        folder: The run folder.
        dataset: The data set of the prompt.
        prompt: The scored prompt.
        head: Head whose scores are shown.
        places: The better and the worse response.
    """
    row, texts = dataset.record(prompt.index), texts_of(dataset, prompt.index)
    found: Shown = {"id": prompt.id, "source": prompt.source, "prompt": texts["prompt"]}
    # responses to one prompt have the same media
    common = row.responses[0].media if row.is_split else []
    found["attachments"] = saved_media(folder, dataset.encoder, common)
    for name, place in zip(("better", "worse"), places):
        own: Sequence[Item] = [] if row.is_split else _media(row.responses[place])
        found[name] = {
            "text": texts["responses"][place],
            "score": prompt.scores[head][place],
            "attachments": saved_media(folder, dataset.encoder, own),
        }
    return found


def _media(record: ParsedRow) -> Sequence[Item]:
    return record.media


def saved_media(folder: Path, encoder: ChatEncoder, items: Sequence[Item]) -> list[str]:
    """Write previews of media to the folder ``media`` of a run, and return their names.

    Args:
        folder: The run folder.
        encoder: Reads the media. One without media writes nothing.
        items: The media.
    """
    reader = encoder.media
    if reader is None or not items:
        return []
    media = folder / "media"
    media.mkdir(exist_ok=True)
    previews: list[Attachment] = [reader.load(item).attachment for item in items]
    for one in previews:
        if not (media / one.name).exists():
            write_atomic(media / one.name, one.data)
    return [one.name for one in previews]


log = logging.getLogger(__name__)

RESULTS = "results.jsonl"
"""File of a run folder with the scores of each response."""

Shown = dict[str, Any]
"""A value that JSON can express."""


class ScoredRow(Protocol):
    """A dataclass with the scores of a row, and the place of the row in its data set."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def index(self) -> int:
        """Return the place of the row in its data set."""
        ...


R = TypeVar("R", bound=ScoredRow)


class ResultsFile(Generic[R]):
    """Scored rows on disk, so that a stopped evaluation resumes after the last batch.

    The first line identifies data and model. If they have changed, the file begins again. An
    incomplete last batch is removed, since rounding depends on the rows of a batch.

    Args:
        path: The file.
        read: Reads the fields of a line as a row, see ``read_line``.
        identity: What identifies data and model.
        batch_size: Number of rows of a batch.
        total: Number of rows of the data set.

    Attributes:
        rows: The scored rows, in the order of the data set.
        done: Number of rows that are scored.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[Shown], R],
        identity: Mapping[str, str],
        batch_size: int,
        total: int,
    ) -> None:
        self._file = path.open("a+b")
        head = json_line({"of": {**identity, "batch_size": batch_size}}).encode() + b"\n"
        self._file.seek(0)
        end = len(head) if self._file.readline() == head else 0
        found: list[tuple[int, R]] = []
        for raw in self._file if end else ():
            if not raw.endswith(b"\n"):
                break
            found.append((len(raw), read_line(raw, path, read)[0]))
        seen = found[-1][1].index + 1 if found else 0
        self.done = seen if seen == total else seen - seen % batch_size
        kept = [(size, row) for size, row in found if row.index < self.done]
        self.rows = [row for _, row in kept]
        if self.done:
            log.warning("%d of %d rows were scored before", self.done, total)
        self._file.truncate(end + sum(size for size, _ in kept))
        if not end:
            self._file.write(head)

    def add(self, row: R, texts: Shown) -> None:
        """Write a scored row with its texts."""
        self.rows.append(row)
        self._file.write(json_line({**asdict(row), **texts}).encode() + b"\n")

    def flush(self) -> None:
        """Pass all lines to the system, so that a killed process does not lose them."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_line(raw: bytes, path: Path, read: Callable[[Shown], R]) -> tuple[R, Shown]:
    """Return the row of one line of the file ``path``, and the whole line.

    Args:
        raw: The line.
        path: The file, for messages.
        read: Reads the fields of the line.

    Raises:
        DataError: The line is damaged.
    """
    try:
        line = json.loads(raw)
        return read(line), line
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(
            f"{path} is damaged: {raw[:80]!r}; set run.overwrite=true to start over"
        ) from None


def with_nan(values: Sequence[float | None]) -> list[float]:
    """Return numbers of a line. JSON has null for NaN."""
    return [float("nan") if value is None else value for value in values]


def fingerprint(model: ModelConfig, folder: str) -> str:
    """Return what changes when the files of a model folder change: names, sizes and times.

    Args:
        model: Settings of the model.
        folder: Folder of the model, or a name that is no folder.
    """
    seen = blake2b(model.model_dump_json().encode(), digest_size=12)
    path = Path(folder).expanduser()
    for file in sorted(path.glob("*")) if path.is_dir() else ():
        status = file.stat()
        seen.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return seen.hexdigest()
