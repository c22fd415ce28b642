"""Measure how well scores order responses.

The measures are accuracy, calibration, length bias, agreement of heads, and best-of-n.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lightrft.utils.statistics.intervals import Estimate, estimate, student

BINS = 10
"""Number of bins of ``calibration_error``, of equal width."""


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The scores and labels of the responses to one prompt. Lists have one entry per response.

    Attributes:
        index: Place of the prompt in its data set.
        id: Name of the prompt.
        source: Name of the data source or subset.
        scores: Scores by head. A score may be NaN or infinite.
        labels: Ratings by head; higher is better. NaN is no rating.
        lengths: Number of tokens.
    """

    index: int
    id: str
    source: str
    scores: Mapping[str, Sequence[float]]
    labels: Mapping[str, Sequence[float]]
    lengths: Sequence[int]

    def rated(self, head: str) -> list[int]:
        """Return the responses that have a finite score and a label for ``head``."""
        pairs = zip(self.scores[head], self.labels[head])
        return [
            k
            for k, (score, label) in enumerate(pairs)
            if math.isfinite(score) and not math.isnan(label)
        ]

    def pairs(self, head: str) -> Iterator[tuple[int, int]]:
        """Yield the better and the worse response of each pair with different labels."""
        labels = self.labels[head]
        for first, second in itertools.permutations(self.rated(head), 2):
            if labels[first] > labels[second]:
                yield first, second


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """A pair of responses to one prompt whose order is known.

    Attributes:
        group: Number of the prompt. Pairs of one prompt are not independent.
        better: Score of the better response.
        worse: Score of the worse response.
        longer: Tokens of the better response less those of the worse one.
        source: Name of the data source or subset.
    """

    group: int
    better: float
    worse: float
    longer: int = 0
    source: str = ""

    @property
    def right(self) -> float:
        """1 if the scores have the right order, 0 if they have the other, 1/2 if they are equal."""
        if self.better == self.worse:
            return 0.5
        return float(self.better > self.worse)

    @property
    def probability(self) -> float:
        """The probability of the right order under Bradley-Terry."""
        gap = self.better - self.worse
        # without overflow for large gaps of either sign
        return 1 / (1 + math.exp(-gap)) if gap >= 0 else math.exp(gap) / (1 + math.exp(gap))


def pair_accuracy(pairs: Sequence[JudgedPair]) -> Estimate:
    """Return the mean over prompts of the share of right pairs, with its interval.

    Args:
        pairs: At least one pair.
    """
    shares: dict[int, list[float]] = {}
    for pair in pairs:
        shares.setdefault(pair.group, []).append(pair.right)
    means = [math.fsum(rights) / len(rights) for rights in shares.values()]
    return estimate(means, bounds=(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Pairs of similar confidence.

    Attributes:
        confidence: Mean probability of the more probable order.
        accuracy: Share of pairs in which this order is right.
        count: Number of pairs.
    """

    confidence: float
    accuracy: float
    count: int


def calibration_bins(pairs: Sequence[JudgedPair], bins: int = BINS) -> list[CalibrationBin]:
    """Return the bins that hold pairs, by rising confidence.

    The confidence is the larger of the two probabilities, so that bins divide [1/2, 1].

    Args:
        pairs: The pairs.
        bins: Number of bins, of equal width.
    """
    members: dict[int, list[tuple[float, float]]] = {}
    for pair in pairs:
        confidence = max(pair.probability, 1 - pair.probability)
        place = min(int((confidence - 0.5) * 2 * bins), bins - 1)
        members.setdefault(place, []).append((confidence, pair.right))
    found = []
    for _, inside in sorted(members.items()):
        confidence, accuracy = (math.fsum(column) / len(inside) for column in zip(*inside))
        found.append(CalibrationBin(confidence, accuracy, len(inside)))
    return found


def calibration_error(pairs: Sequence[JudgedPair], bins: int = BINS) -> float:
    """Return the expected calibration error of the more probable order.

    It is the mean over pairs of the distance between confidence and accuracy of their bin (Guo et
    al., arXiv 1706.04599, eq. 3).

    Args:
        pairs: At least one pair.
        bins: Number of bins.
    """
    distances = []
    for one in calibration_bins(pairs, bins):
        distances.append(abs(one.confidence - one.accuracy) * one.count)
    return math.fsum(distances) / len(pairs)


def length_bias(pairs: Sequence[JudgedPair]) -> float:
    """Return how much more often the longer response gets the higher score than it is better.

    0 is no bias, 1 is a model that always prefers the longer response where the shorter is better.
    Pairs of equal lengths do not count; without others it is NaN.
    """
    counted = [pair for pair in pairs if pair.longer]
    if not counted:
        return math.nan
    prefers_longer = better_is_longer = 0.0
    for pair in counted:
        is_longer = pair.longer > 0
        prefers_longer += pair.right if is_longer else 1 - pair.right
        better_is_longer += is_longer
    return (prefers_longer - better_is_longer) / len(counted)


def judged_pairs(prompts: Sequence[ScoredPrompt], head: str) -> list[JudgedPair]:
    """Return all pairs of responses whose labels for ``head`` differ, with its scores.

    Args:
        prompts: The prompts.
        head: A head with labels.
    """
    found = []
    for number, prompt in enumerate(prompts):
        scores, lengths = prompt.scores[head], prompt.lengths
        for better, worse in prompt.pairs(head):
            longer = lengths[better] - lengths[worse]
            found.append(JudgedPair(number, scores[better], scores[worse], longer, prompt.source))
    return found


def head_agreement(prompts: Sequence[ScoredPrompt], first: str, second: str) -> Estimate | None:
    """Return the share of pairs of responses that two heads order alike, with its interval.

    No labels are read. A pair with equal scores of one head counts half. The mean is over prompts.
    The result is None if no prompt has two responses with finite scores.

    Args:
        prompts: The prompts.
        first: Name of a head.
        second: Name of another head.
    """
    shares = []
    for prompt in prompts:
        both = list(zip(prompt.scores[first], prompt.scores[second]))
        both = [pair for pair in both if all(map(math.isfinite, pair))]
        alike = []
        for (a, b), (c, d) in itertools.combinations(both, 2):
            product = (a > c) - (a < c), (b > d) - (b < d)
            alike.append(0.5 if 0 in product else float(product[0] == product[1]))
        if alike:
            shares.append(math.fsum(alike) / len(alike))
    return estimate(shares, bounds=(0.0, 1.0)) if shares else None


@dataclass(frozen=True, slots=True)
class BestOfN:
    """Expected gold rating of the best of ``n`` responses.

    Attributes:
        n: Number of responses to choose from.
        chosen: Rating of the response with the highest score.
        best: Rating of the response with the highest rating, which no model exceeds.
    """

    n: int
    chosen: Estimate
    best: Estimate


def best_of_n_curve(
    prompts: Sequence[ScoredPrompt], head: str, most: int | None = None
) -> list[BestOfN]:
    """Return the expected rating of the best of n = 1, 2, ... responses, with intervals.

    Only prompts with ``most`` rated responses count, so that all points have the same prompts.

    Args:
        prompts: The prompts.
        head: Head whose score chooses and whose labels are the gold ratings.
        most: Largest n. None takes the smallest number of rated responses to a prompt that has
            any.
    """
    rated = [(prompt, prompt.rated(head)) for prompt in prompts]
    if most is None:
        most = min((len(places) for _, places in rated if places), default=0)
    kept = []
    for prompt, places in rated:
        if places and len(places) >= most:
            gold = [prompt.labels[head][k] for k in places]
            kept.append(([prompt.scores[head][k] for k in places], gold))
    curve = []
    measured = _interval_of([rating for _, gold in kept for rating in gold])
    for n in range(1, most + 1 if kept else 1):
        chosen = [expected_best(scores, gold, n) for scores, gold in kept]
        best = [expected_best(gold, gold, n) for _, gold in kept]
        curve.append(BestOfN(n, measured(chosen), measured(best)))
    return curve


def reported_curve(
    prompts: Sequence[ScoredPrompt], head: str, most: int | None = None
) -> list[BestOfN]:
    """Return ``best_of_n_curve``, or nothing for pairs whose curve nobody asked for.

    With two responses to each prompt, the curve says what the accuracy says.

    Args:
        prompts: The prompts.
        head: See ``best_of_n_curve``.
        most: See ``best_of_n_curve``.
    """
    curve = best_of_n_curve(prompts, head, most)
    return curve if most is not None or len(curve) > 2 else []


def _interval_of(ratings: Sequence[float]) -> Callable[[Sequence[float]], Estimate]:
    """Return the estimate of a mean of ``ratings``.

    Wilson's interval is for ratings of 0 and 1. Means of other ratings may be 0 or 1 by chance.
    """
    if all(rating in (0, 1) for rating in ratings):
        return partial(estimate, bounds=(0.0, 1.0))
    return student


def expected_best(scores: Sequence[float], gold: Sequence[float], n: int) -> float:
    """Return the expected gold rating of the highest score among ``n`` random responses.

    The mean is exact over all subsets of size n, without replacement. The highest score of a
    subset is the k-th smallest of all K with probability ``C(k - 1, n - 1) / C(K, n)``. Equal
    scores are chosen at random.

    Args:
        scores: Scores of the K responses.
        gold: Ratings of the K responses.
        n: Size of a subset, from 1 to K.
    """
    order = sorted(range(len(scores)), key=lambda k: scores[k])
    subsets = math.comb(len(scores), n)
    terms, below = [], 0
    for _, equal in itertools.groupby(order, key=lambda k: scores[k]):
        members = list(equal)
        upto = below + len(members)
        # integers, so that large binomials neither overflow nor cancel
        share = (math.comb(upto, n) - math.comb(below, n)) / subsets
        terms.append(share * math.fsum(gold[k] for k in members) / len(members))
        below = upto
    return math.fsum(terms)
