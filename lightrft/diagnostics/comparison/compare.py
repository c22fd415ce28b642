"""Compare two evaluations of the same prompts as paired samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightrft.config.config_tools import CompareConfig
from lightrft.diagnostics.comparison.saved_evaluation import (
    Key,
    SavedEvaluation,
    SavedPrompt,
    read_evaluation,
)
from lightrft.utils.errors import ConfigError
from lightrft.utils.prompt_digest import prompt_digest
from lightrft.utils.statistics.intervals import (
    Estimate,
    estimate,
    holm,
    minimum_effect,
    paired_difference,
    sign_flip_test,
    student,
)

ALL = "all"
"""Name of the comparison over all data sources."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference in accuracy of two evaluations on the same prompts.

    Attributes:
        baseline: Accuracy of the baseline.
        candidate: Accuracy of the candidate.
        difference: Candidate minus baseline, paired by prompt.
        p_value: Exact p-value of equal accuracy.
        adjusted_p: ``p_value`` adjusted for the number of data sources.
        minimum_effect: Smallest difference that this comparison finds with probability 0.8.
        verdict: ``better``, ``worse``, or ``within noise``.
    """

    baseline: Estimate
    candidate: Estimate
    difference: Estimate
    p_value: float
    adjusted_p: float
    minimum_effect: float
    verdict: str


@dataclass(frozen=True, slots=True)
class Change:
    """A prompt whose accuracy differs between the evaluations.

    Attributes:
        prompt: The prompt with the responses of the baseline.
        after: The prompt with the responses of the candidate.
        before_score: Accuracy of the baseline.
        after_score: Accuracy of the candidate.
    """

    prompt: SavedPrompt
    after: SavedPrompt
    before_score: float
    after_score: float


@dataclass(frozen=True, slots=True)
class EvalComparison:
    """The result of a comparison.

    Attributes:
        differences: Differences in accuracy: ``all``, then each of several data sources.
        others: Differences in the mean reward, the length in tokens and the truncated share.
        regressions: Prompts that the candidate answers worse, the largest loss first.
        improvements: Prompts that the candidate answers better, the largest gain first.
        settings: Settings that differ, as pairs of values.
        notes: Other facts that limit the comparison.
        digest: Digest of the prompts of the baseline that were compared.
    """

    differences: dict[str, Difference]
    others: dict[str, Estimate]
    regressions: list[Change]
    improvements: list[Change]
    settings: dict[str, tuple[object, object]]
    notes: list[str]
    digest: str


def run_compare(config: CompareConfig) -> EvalComparison:
    """Compare the two evaluations that ``config`` names.

    Raises:
        ConfigError: If an evaluation is missing, or the evaluations have different prompts.
        DataError: If a file of a run is malformed.
    """
    for name, side in (("baseline", config.baseline), ("candidate", config.candidate)):
        if not side.path:
            raise ConfigError(f"{name}.path is empty; name two run folders")
    baseline, candidate = (
        read_evaluation(Path(side.path).expanduser(), side.step, config.success)
        for side in (config.baseline, config.candidate)
    )
    return compare(baseline, candidate, config)


def compare(
    baseline: SavedEvaluation, candidate: SavedEvaluation, config: CompareConfig
) -> EvalComparison:
    """Compare two evaluations.

    Args:
        baseline: The evaluation to compare with.
        candidate: The evaluation that may be better or worse.
        config: The settings.

    Raises:
        ConfigError: If the evaluations have different prompts and ``prompts`` is ``equal``.
    """
    keys, notes = _pairs(baseline, candidate, config.prompts)
    notes += [
        f"{side.unjudged} prompts of {side.file} have no outcome term and are left out"
        for side in (baseline, candidate)
        if side.unjudged
    ]
    notes += [
        f"the outcome term of {side.file} has {side.outcome_values} values on one side of "
        "eval.threshold, so it is a score, and accuracy is the share that reaches the threshold"
        for side in (baseline, candidate)
        if side.outcome_values > 1 and config.threshold is None
    ]
    thresholds = [
        side.threshold if config.threshold is None else config.threshold
        for side in (baseline, candidate)
    ]
    before = {key: Marks.of(baseline.prompts[key], thresholds[0]) for key in keys}
    after = {key: Marks.of(candidate.prompts[key], thresholds[1]) for key in keys}
    names = {
        name: (baseline.settings.get(name), candidate.settings.get(name))
        for name in {**baseline.settings, **candidate.settings}
    }
    changed = [
        Change(baseline.prompts[key], candidate.prompts[key], before[key].score, after[key].score)
        for key in keys
        if before[key].score != after[key].score
    ]
    changed.sort(key=lambda change: -abs(change.after_score - change.before_score))
    return EvalComparison(
        differences=_differences(keys, before, after, config.confidence),
        others=_others(keys, baseline, candidate, config.confidence),
        regressions=[c for c in changed if c.after_score < c.before_score],
        improvements=[c for c in changed if c.after_score > c.before_score],
        settings={name: pair for name, pair in names.items() if pair[0] != pair[1]},
        notes=notes,
        digest=prompt_digest(baseline.prompts[key].prompt for key in keys),
    )


@dataclass(frozen=True, slots=True)
class Marks:
    """The numbers of correct responses and of all responses to a prompt."""

    right: int
    samples: int

    @classmethod
    def of(cls, saved: SavedPrompt, threshold: float) -> Marks:
        """Count the responses to a prompt. A response that failed to be scored is wrong."""
        right = sum(_is_correct(response, threshold) for response in saved.responses)
        return cls(right, len(saved.responses))

    @property
    def score(self) -> float:
        """The share of correct responses."""
        return self.right / self.samples


def _is_correct(response: Mapping[str, Any], threshold: float) -> bool:
    outcome = response["outcome"]
    return not response["failed"] and outcome is not None and outcome >= threshold


def _pairs(
    baseline: SavedEvaluation, candidate: SavedEvaluation, prompts: str
) -> tuple[list[Key], list[str]]:
    """Return the keys of the prompts to compare, and notes about the prompts."""
    first, second = baseline.prompts, candidate.prompts
    common = [key for key in first if key in second]
    same = [key for key in common if first[key].prompt["label"] == second[key].prompt["label"]]
    problems = []
    for one, other, keys in ((baseline, candidate, first), (candidate, baseline, second)):
        missing = [key for key in keys if key not in other.prompts]
        if missing:
            problems.append(
                f"{len(missing)} of {len(keys)} prompts of {one.file} are not in {other.file}, such as "
                f"{_listed(missing)}"
            )
    if len(same) < len(common):
        equal = set(same)
        differing = [key for key in common if key not in equal]
        problems.append(
            f"{len(differing)} of {len(common)} prompts have the same id and different labels, such as "
            f"{_listed(differing)}"
        )
    if problems and (prompts == "equal" or not same):
        hint = f"; set prompts=common to compare the {len(same)} others" if same else ""
        raise ConfigError(f"the evaluations have different prompts: {'; '.join(problems)}{hint}")
    texts = sum(first[key].prompt["text"] != second[key].prompt["text"] for key in same)
    if texts:
        problems.append(
            f"the text of {texts} of {len(same)} prompts differs, as with another template"
        )
    return same, problems


def _listed(keys: Sequence[Key], most: int = 3) -> str:
    shown = ", ".join(name for _, name in keys[:most])
    return f"{shown}, ..." if len(keys) > most else shown


def _differences(
    keys: Sequence[Key],
    before: Mapping[Key, Marks],
    after: Mapping[Key, Marks],
    confidence: float,
) -> dict[str, Difference]:
    """Return the difference over all prompts, and of each data source if there are several.

    Args:
        keys: The prompts.
        before: Marks of the baseline.
        after: Marks of the candidate.
        confidence: Coverage of the intervals.
    """
    sources: dict[str, list[Key]] = defaultdict(list)
    for key in keys:
        sources[key[0] or "unnamed"].append(key)
    parts: dict[str, Sequence[Key]] = {ALL: keys}
    if len(sources) > 1:
        parts |= sources
    p_values = {name: _p_value(members, before, after) for name, members in parts.items()}
    # The test over all prompts is the one question. Those of the sources are a family.
    of_sources = {name: p_values[name] for name in parts if name != ALL}
    adjusted = {ALL: p_values[ALL], **holm(of_sources)}
    found: dict[str, Difference] = {}
    for name, members in parts.items():
        one = [before[key].score for key in members]
        two = [after[key].score for key in members]
        difference = paired_difference(one, two, confidence)
        found[name] = Difference(
            baseline=estimate(one, confidence, (0.0, 1.0)),
            candidate=estimate(two, confidence, (0.0, 1.0)),
            difference=difference,
            p_value=p_values[name],
            adjusted_p=adjusted[name],
            minimum_effect=minimum_effect(difference.stderr, confidence),
            verdict=_verdict(difference, adjusted[name], confidence),
        )
    return found


def _p_value(keys: Sequence[Key], before: Mapping[Key, Marks], after: Mapping[Key, Marks]) -> float:
    """Return the exact p-value of the difference in accuracy."""
    # In units of a common denominator, the differences are whole numbers.
    unit = math.lcm(*(marks[key].samples for key in keys for marks in (before, after)))
    counts = []
    for key in keys:
        one, two = before[key], after[key]
        counts.append(two.right * (unit // two.samples) - one.right * (unit // one.samples))
    return sign_flip_test(counts)


def _verdict(difference: Estimate, p_value: float, confidence: float) -> str:
    contains_zero = difference.low <= 0 <= difference.high
    if contains_zero or math.isnan(difference.stderr) or p_value > 1 - confidence:
        return "within noise"
    return "better" if difference.mean > 0 else "worse"


def _others(
    keys: Sequence[Key],
    baseline: SavedEvaluation,
    candidate: SavedEvaluation,
    confidence: float,
) -> dict[str, Estimate]:
    """Return the paired differences of other measures of a response.

    Args:
        keys: The prompts.
        baseline: The baseline.
        candidate: The candidate.
        confidence: Coverage of the intervals.
    """
    found: dict[str, Estimate] = {}
    for name, measure in MEASURES.items():
        changes = []
        for key in keys:
            means = [_mean_of(side.prompts[key], measure) for side in (baseline, candidate)]
            if None not in means:
                one, two = means
                changes.append(float(two or 0) - float(one or 0))
        if changes:
            found[name] = student(changes, confidence)
    return found


def _mean_of(
    saved: SavedPrompt, measure: Callable[[Mapping[str, Any]], float | None]
) -> float | None:
    """Return the mean of a measure over the responses that have it; None if none has."""
    values = [value for r in saved.responses if (value := measure(r)) is not None]
    return math.fsum(values) / len(values) if values else None


MEASURES: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "reward": lambda response: None if response["failed"] else response["reward"],
    "length": lambda response: float(response["length"]),
    "truncated": lambda response: float(response["finish_reason"] == "length"),
}
"""Measures of a response besides its accuracy; None where a response has none."""


def as_json(found: EvalComparison, config: CompareConfig) -> dict[str, Any]:
    """Return a comparison as plain data."""
    return {
        "baseline": config.baseline.model_dump(mode="json"),
        "candidate": config.candidate.model_dump(mode="json"),
        "confidence": config.confidence,
        "prompts_digest": found.digest,
        "accuracy": {name: asdict(value) for name, value in found.differences.items()},
        "differences": {name: asdict(value) for name, value in found.others.items()},
        "settings": {name: list(pair) for name, pair in found.settings.items()},
        "notes": found.notes,
        "regressions": [_change(change) for change in found.regressions],
        "improvements": [_change(change) for change in found.improvements],
    }


def _change(change: Change) -> dict[str, Any]:
    prompt = change.prompt.prompt
    sides = ((change.prompt, change.before_score), (change.after, change.after_score))
    before, after = ({"score": score, "responses": saved.responses} for saved, score in sides)
    kept = {name: prompt.get(name) for name in ("id", "data_source", "text", "label")}
    return {**kept, "baseline": before, "candidate": after}


LONGEST = 160
"""Characters of a text that are shown."""


def to_text(found: EvalComparison, confidence: float, show: int) -> str:
    """Return the comparison as lines of text.

    Args:
        found: The comparison.
        confidence: Coverage of the intervals.
        show: Number of prompts to show that became worse, and that became better.
    """
    lines = [*_table(found, confidence), "", _sentence(found.differences[ALL], confidence)]
    lines += [f"note: {note}" for note in found.notes]
    lines += [
        f"note: {name} differs: {one!r} and {two!r}" for name, (one, two) in found.settings.items()
    ]
    lines += _changes("became worse", found.regressions, show)
    lines += _changes("became better", found.improvements, show)
    return "\n".join(lines)


def _table(found: EvalComparison, confidence: float) -> Iterator[str]:
    width = max(len(name) for name in [*found.differences, *found.others])
    interval = f"{_percent(confidence)} interval"
    yield (
        f"{'accuracy':<{width}}  prompts  baseline  candidate  difference  {interval:<18}  "
        f"{'p':>6}  verdict"
    )
    for name, row in found.differences.items():
        yield (
            f"{name:<{width}}  {row.difference.count:7}  {row.baseline.mean:8.1%}  "
            f"{row.candidate.mean:9.1%}  {row.difference.mean:+10.1%}  "
            f"{_interval(row.difference, '+.1%'):<18}  {row.adjusted_p:6.3g}  {row.verdict}"
        )
    for name, change in found.others.items():
        form = "+.1%" if name == "truncated" else "+.4g"
        yield (
            f"{name:<{width}}  {change.count:7}  {'':8}  {'':9}  {change.mean:>+10{form[1:]}}  "
            f"{_interval(change, form)}"
        )


def _interval(found: Estimate, form: str) -> str:
    return f"{found.low:{form}} to {found.high:{form}}"


def _sentence(row: Difference, confidence: float) -> str:
    """Return the result over all prompts as sentences."""
    low, high = f"{row.difference.low:+.1%}", f"{row.difference.high:+.1%}"
    power = ""
    # Neither NaN, of a single prompt, nor 0, of prompts that all differ by the same amount.
    if row.minimum_effect > 0:
        effect = f"{row.minimum_effect:.1%}"
        power = f" This comparison finds a difference of {effect} with probability 0.8."
    if row.verdict == "within noise":
        return (
            f"The difference of {row.difference.mean:+.1%} is within noise: the {_percent(confidence)} "
            f"interval is {low} to {high}, and p = {row.p_value:.3g}.{power}"
        )
    return (
        f"The candidate is {row.verdict} by {abs(row.difference.mean):.1%} ({_percent(confidence)} "
        f"interval {low} to {high}, p = {row.p_value:.3g}).{power}"
    )


def _changes(title: str, changes: Sequence[Change], show: int) -> Iterator[str]:
    yield ""
    yield f"prompts that {title}: {len(changes)}"
    for change in changes[:show]:
        prompt = change.prompt.prompt
        label = "" if prompt["label"] is None else f", label {_short(str(prompt['label']))}"
        fell = change.after_score < change.before_score
        yield f"  {prompt['id']}: {change.before_score:.0%} to {change.after_score:.0%}{label}"
        yield f"    prompt     {_short(prompt['text'])}"
        yield f"    baseline   {_response(change.prompt, best=fell)}"
        yield f"    candidate  {_response(change.after, best=not fell)}"


def _response(saved: SavedPrompt, *, best: bool) -> str:
    """Return the response with the highest or the lowest reward, shortened."""
    ordered = sorted(saved.responses, key=_reward)
    chosen = ordered[-1] if best else ordered[0]
    return _short(chosen["text"]) or "(no text)"


def _reward(response: Mapping[str, Any]) -> float:
    """Return the reward of a response; a response without one is the lowest."""
    reward = response["reward"]
    return -math.inf if reward is None else reward


def _percent(confidence: float) -> str:
    return f"{100 * confidence:g}%"


def _short(text: str) -> str:
    """Return ``text`` in one line, with its middle cut if it is long."""
    line = " ".join(text.split())
    if len(line) <= LONGEST:
        return line
    half = (LONGEST - 5) // 2
    return f"{line[:half]} ... {line[-half:]}"
