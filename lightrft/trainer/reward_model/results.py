"""The texts of scored responses, and the content of the report of their evaluation."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from lightrft.algorithms.reward_model.quality import (
    ScoredPrompt,
    calibration_bins,
    judged_pairs,
    pair_accuracy,
    reported_curve,
)
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.media import Item
from lightrft.datasets.media.items import replaced
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.row_parser import Message, ParsedRow
from lightrft.datasets.row_tables import MalformedRow
from lightrft.trainer.reward_model.results_file import Shown, with_nan
from lightrft.types import Attachment
from lightrft.utils.atomic_files import write_atomic, write_json

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
