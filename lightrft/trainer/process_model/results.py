"""The texts of scored steps, and the content of the report of their evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lightrft.algorithms.process_reward.losses import RIGHT
from lightrft.algorithms.process_reward.quality import (
    ScoredSteps,
    step_calibration,
    step_quality,
    worst_judged,
)
from lightrft.datasets.process.process_dataset import ProcessDataset
from lightrft.datasets.row_tables import MalformedRow
from lightrft.trainer.reward_model.results import (
    REPORT,
    Shown,
    distribution,
    saved_media,
    with_nan,
    written,
)
from lightrft.utils.atomic_files import write_json


def scored_response(line: Shown) -> ScoredSteps:
    """Return the scores of a response, from the fields of its line."""
    numbers = {name: with_nan(line[name]) for name in ("logits", "scores", "labels")}
    fields = {name: line[name] for name in ("index", "id", "source", "weight")}
    return ScoredSteps(**fields, **numbers)


def step_texts(dataset: ProcessDataset, index: int) -> Shown:
    """Return the texts of the prompt and of the steps of response ``index``, without media.

    Raises ``MalformedRow`` if the row cannot be read any more.
    """
    row = dataset.record(index)
    return {"prompt": written(row.record.messages), "steps": row.steps}


def write_step_report(
    folder: Path,
    dataset: ProcessDataset,
    responses: Sequence[ScoredSteps],
    threshold: float,
    *,
    worst: int,
) -> None:
    """Write the content of the report to a run folder, with media of badly judged responses.

    Nothing is written if no step has a label and a finite score.

    Args:
        folder: The run folder.
        dataset: The data set of the responses.
        responses: The scored responses.
        threshold: Smallest score of a right step.
        worst: Number of responses to show that are judged worst.
    """
    right: list[float] = []
    wrong: list[float] = []
    for one in responses:
        for k in one.judged():
            (right if one.labels[k] >= RIGHT else wrong).append(one.scores[k])
    if not right and not wrong:
        return
    shown: list[Shown] = []
    for response, place in worst_judged(responses, threshold, worst):
        try:
            shown.append(_response(folder, dataset, response, place, threshold))
        # Files may be gone since they were scored. The numbers are still right.
        except MalformedRow as error:
            shown.append({"id": response.id, "source": response.source, "missing": str(error)})
    content = {
        "steps": len(right) + len(wrong),
        "responses": len(responses),
        "threshold": threshold,
        "distribution": distribution(right=right, wrong=wrong),
        "calibration": [asdict(one) for one in step_calibration(responses)],
        "subsets": _subsets(responses, threshold),
        "worst": shown,
    }
    write_json(folder / REPORT, content)


def _subsets(responses: Sequence[ScoredSteps], threshold: float) -> list[Shown]:
    """Return the F1 of each data source, and the share of its responses that are judged right."""
    of_source: dict[str, list[ScoredSteps]] = {}
    for one in responses:
        of_source.setdefault(one.source, []).append(one)
    found: list[Shown] = []
    for name, own in of_source.items():
        quality = step_quality(own, threshold)
        if quality.responses is not None:
            f1 = quality.f1 and asdict(quality.f1)
            found.append({"name": name, "f1": f1, **asdict(quality.responses)})
    return found


def _response(
    folder: Path, dataset: ProcessDataset, response: ScoredSteps, place: int, threshold: float
) -> Shown:
    """Return a response with its texts and scores, and write its media to ``folder``.

    Args:
        folder: The run folder.
        dataset: The data set of the response.
        response: The scored response.
        place: The step that is judged worst.
        threshold: Smallest score of a right step.
    """
    record, texts = dataset.record(response.index).record, step_texts(dataset, response.index)
    steps: list[Shown] = []
    misjudged = response.misjudged(threshold)
    for k, (text, score, label) in enumerate(zip(texts["steps"], response.scores, response.labels)):
        steps.append({"text": text, "score": score, "label": label, "wrong": k in misjudged})
    return {
        "id": response.id,
        "source": response.source,
        "prompt": texts["prompt"],
        "attachments": saved_media(folder, dataset.encoder, record.media),
        "steps": steps,
        "worst": place,
        "labelled": response.first_wrong(),
        "predicted": response.first_predicted(threshold),
    }
