"""Measure how well the scores of steps find wrong steps.

The measures are accuracy of steps and of responses, the F1 of ProcessBench, and calibration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightrft.algorithms.process_reward.losses import RIGHT
from lightrft.algorithms.reward_model.benchmarks import ProcessBenchScores, process_bench
from lightrft.algorithms.reward_model.quality import BINS, CalibrationBin
from lightrft.utils.statistics.intervals import Estimate, estimate

NONE = -1
"""Index of the first wrong step of a response without one, as in ProcessBench."""


@dataclass(frozen=True, slots=True)
class ScoredSteps:
    """The scores and labels of the steps of one response. Lists have one entry per step.

    Attributes:
        index: Place of the response in its data set.
        id: Name of the response.
        source: Name of the data source.
        logits: Log-odds that the step is right. NaN or infinite if the model failed.
        scores: Scores.
        labels: Probabilities that the step is right. NaN is no label.
        weight: Weight of the response in the loss.
    """

    index: int
    id: str
    source: str
    logits: Sequence[float]
    scores: Sequence[float]
    labels: Sequence[float]
    weight: float = 1.0

    def judged(self) -> list[int]:
        """Return the steps that have a label and a finite score."""
        pairs = zip(self.logits, self.labels)
        return [k for k, (z, y) in enumerate(pairs) if math.isfinite(z) and not math.isnan(y)]

    def misjudged(self, threshold: float) -> list[int]:
        """Return the judged steps whose score is on the other side of ``threshold``."""
        scores, labels = self.scores, self.labels
        return [k for k in self.judged() if (scores[k] >= threshold) != (labels[k] >= RIGHT)]

    def first_predicted(self, threshold: float) -> int:
        """Return the first step with a score below ``threshold``, or ``NONE``.

        A score that is not finite finds no step right.
        """
        for k, (logit, score) in enumerate(zip(self.logits, self.scores)):
            if not (math.isfinite(logit) and score >= threshold):
                return k
        return NONE

    def first_wrong(self) -> int | None:
        """Return the first step that is labelled wrong, or ``NONE``.

        Without a label of each step up to it, it is unknown: ``None``.
        """
        for k, label in enumerate(self.labels):
            if math.isnan(label):
                return None
            if label < RIGHT:
                return k
        return NONE


@dataclass(frozen=True, slots=True)
class StepQuality:
    """The agreement of the scores and the labels of steps.

    Attributes:
        steps: For each judged step, if its score is on the side of its label.
        responses: Share of responses whose first wrong step is found, or found to be none.
            ``None`` if no response has one that is known.
        f1: The F1 of ProcessBench. ``None`` unless there are responses with and without a wrong
            step.
    """

    steps: Sequence[bool]
    responses: Estimate | None
    f1: ProcessBenchScores | None


def step_quality(responses: Sequence[ScoredSteps], threshold: float) -> StepQuality:
    """Return how well the steps of ``responses`` are judged.

    Args:
        responses: The scored responses.
        threshold: Smallest score of a right step.
    """
    steps: list[bool] = []
    labels, predictions = [], []
    for one in responses:
        missed = set(one.misjudged(threshold))
        steps += [k not in missed for k in one.judged()]
        label = one.first_wrong()
        if label is not None:
            labels.append(label)
            predictions.append(one.first_predicted(threshold))
    if not labels:
        return StepQuality(steps, None, None)
    hits = [float(a == b) for a, b in zip(labels, predictions)]
    has_both = 0 < sum(label >= 0 for label in labels) < len(labels)
    f1 = process_bench(labels, predictions) if has_both else None
    return StepQuality(steps, estimate(hits), f1)


def step_calibration(responses: Sequence[ScoredSteps], bins: int = BINS) -> list[CalibrationBin]:
    """Return the bins that hold steps, by rising score.

    A score is a probability here, and bins divide [0, 1]. The accuracy of a bin is the mean label
    of its steps. Scores outside of [0, 1], which only a regression has, are left out.

    Args:
        responses: The scored responses.
        bins: Number of bins, of equal width.
    """
    members: dict[int, list[tuple[float, float]]] = {}
    for one in responses:
        for k in one.judged():
            if 0.0 <= one.scores[k] <= 1.0:
                place = min(int(one.scores[k] * bins), bins - 1)
                members.setdefault(place, []).append((one.scores[k], one.labels[k]))
    found = []
    for _, inside in sorted(members.items()):
        score, right = (math.fsum(column) / len(inside) for column in zip(*inside))
        found.append(CalibrationBin(score, right, len(inside)))
    return found


def worst_judged(
    responses: Sequence[ScoredSteps], threshold: float, count: int
) -> list[tuple[ScoredSteps, int]]:
    """Return the responses with the most wrongly judged steps, and that step of each.

    The largest difference of score and label comes first. Of equal ones, the first response does.

    Args:
        responses: The scored responses.
        threshold: Smallest score of a right step.
        count: Largest number of responses.
    """
    found: list[tuple[float, ScoredSteps, int]] = []
    for one in responses:
        errors = [(abs(one.scores[k] - one.labels[k]), -k) for k in one.misjudged(threshold)]
        if errors:
            error, place = max(errors)
            found.append((error, one, -place))
    found.sort(key=lambda item: -item[0])
    return [(one, place) for _, one, place in found[:count]]
