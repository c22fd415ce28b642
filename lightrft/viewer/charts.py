"""The plots of a report: their metrics, order and axes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightrft.viewer.plots import FORMS, Form, Plot, Series, compact, percent, smooth, time_bars
from lightrft.viewer.run_data import Points, RunData, mean_at_end

NOISY = 40
"""Number of points above which a smoothed line is added to the raw line."""
PHASES = ("generate", "reward", "logprobs", "reference", "update", "eval", "checkpoint", "other")
"""Phases of a step, in the order in which a bar stacks them."""
OF_SOURCE = re.compile(r"eval/[^/]+/accuracy")
"""Metrics of the accuracy on one data source."""
STATISTICS = ("reward/mean", "reward/std", "reward/max", "reward/min")
"""Metrics of the whole reward. The others under ``reward/`` are its terms."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The plot of one metric.

    Args:
        metric: name of the metric.
        title: title of the plot.
        note: subtitle with the unit.
        form: formatting of a value.
        zero: if True, the axis starts at 0.
        color: index of the palette.
    """

    metric: str
    title: str
    note: str
    form: Form = "compact"
    zero: bool = False
    color: int = 0


CURVES = (
    Curve("response/length", "Response length", "tokens, mean of a step", zero=True, color=7),
    Curve(
        "response/clip_ratio",
        "Cut responses",
        "share that reached the length limit",
        "percent",
        zero=True,
        color=4,
    ),
    Curve("policy/kl", "KL to the reference", "nats per token", color=3),
    Curve("policy/entropy", "Entropy", "nats per token", zero=True, color=2),
    Curve(
        "policy/clip_fraction",
        "Clipped tokens",
        "share of tokens outside the trust region",
        "percent",
        zero=True,
        color=6,
    ),
    Curve("policy/grad_norm", "Gradient norm", "before clipping", zero=True, color=5),
    Curve("policy/loss", "Policy loss", "the objective of a step", color=1),
    Curve("loss", "Loss", "the objective of a step", color=1),
    Curve("tokens_per_second", "Tokens per second", "over the whole step", "count", zero=True),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The plot of several metrics.

    Args:
        title: title of the plot.
        note: subtitle.
        metrics: labels by metric. The last one that the run has written gives the number.
        form: formatting of a value.
        y_range: range of the axis. None fits it to the values.
    """

    title: str
    note: str
    metrics: dict[str, str]
    form: Form = "compact"
    y_range: tuple[float, float] | None = None


COMPARISONS = (
    Comparison("Held-out loss", "of conversations or pairs not trained on", {"eval/loss": "loss"}),
    Comparison(
        "Divergence from the teacher",
        "mean of a step, and on responses not trained on",
        {"distill/divergence": "training", "eval/divergence": "held out"},
    ),
    Comparison(
        "Pair accuracy",
        "share of pairs whose implicit rewards have the right order",
        {"preference/accuracy": "training", "eval/pair_accuracy": "held out"},
        form="percent",
        y_range=(0.0, 1.0),
    ),
    Comparison(
        "Margin",
        "implicit reward of the better response minus that of the worse one",
        {"preference/margin": "training", "eval/margin": "held out"},
    ),
    Comparison(
        "Implicit rewards",
        "beta times the log-ratio to the reference",
        {
            "preference/reward_chosen": "chosen",
            "preference/reward_rejected": "rejected",
            "preference/reward_desirable": "desirable",
            "preference/reward_undesirable": "undesirable",
        },
    ),
)


def plots(run: RunData) -> list[Plot]:
    """Return a plot for each metric that the run has written."""
    found = [_reward(run), _accuracy(run), _gold_and_proxy(run), _reward_model(run)]
    found += [_comparison(row, run) for row in COMPARISONS]
    found += [_curve(curve, run.points(curve.metric)) for curve in CURVES]
    warm_up = Curve("loss", "Warm-up loss", "supervised steps, nats per token", color=1)
    # Supervised steps are counted from 1 as well, so they need an axis of their own.
    warm_up_loss = _curve(warm_up, run.points("loss", run.warm_up), axis="supervised step")
    found += [_time(run), warm_up_loss]
    return [plot for plot in found if plot is not None]


def _reward(run: RunData) -> Plot | None:
    points = run.points("reward/mean")
    if not points:
        return None
    terms = [name for name in run.names("reward/") if name not in STATISTICS]
    series = _lines("reward", points, 0)
    if len(terms) > 1:  # a single term equals the reward, up to its weight
        for color, name in enumerate(terms[:6], 1):
            term = run.points(name)
            trend = smooth(term) if len(term) > NOISY else term
            series.append(Series(name.removeprefix("reward/"), trend, color))
    now = compact(mean_at_end(points))
    return Plot("Reward", "mean of a step", now, [line for line in series if line.points])


def _accuracy(run: RunData) -> Plot | None:
    points = run.points("eval/accuracy")
    if not points:
        return None
    series = [Series("eval accuracy", points, 2, dots=len(points) <= NOISY)]
    sources = [name for name in run.names("eval/") if OF_SOURCE.fullmatch(name)]
    if len(sources) > 1:  # a single source equals the total
        for color, name in enumerate(sources[:5], 3):
            series.append(Series(name.split("/")[1], run.points(name), color, dots=True))
    before = run.number("heldout_before")
    (first, _), (last, accuracy) = points[0], points[-1]
    if before is not None and len(points) > 1:
        level = [(first, before), (last, before)]
        series.append(Series("before", level, 5, dashed=True))
    return Plot(
        "Held-out accuracy",
        "on problems that were not trained on",
        percent(accuracy),
        [line for line in series if line.points],
        form="percent",
        y_range=(0.0, 1.0),
    )


def _gold_and_proxy(run: RunData) -> Plot | None:
    """Return the plot of held-out responses: the measured reward and the learned one."""
    gold = run.summary.get("gold")
    names = {f"eval/terms/{gold}": f"{gold} (gold)", "eval/terms/reward_model": "reward model"}
    series = [
        Series(label, run.points(metric), color, dots=True)
        for color, (metric, label) in enumerate(names.items(), 2)
        if run.points(metric)
    ]
    if gold is None or len(series) < 2:
        return None
    _, last = series[0].points[-1]
    note = "held-out responses; training raises the reward model's score alone"
    return Plot("Gold reward and learned reward", note, compact(last), series)


def _reward_model(run: RunData) -> Plot | None:
    """Return the plot of the reward model that the policy learned from."""
    points = run.points("eval/pair_accuracy", run.reward_model)
    if not points:
        return None
    ends = ("low", "high")
    bounds = {end: run.points(f"eval/pair_accuracy_{end}", run.reward_model) for end in ends}
    series = [Series("accuracy", points, 0, dots=True)]
    for end, line in bounds.items():
        if line:
            series.append(Series(f"{end} end of the 95 % interval", line, 5, dashed=True))
    return Plot(
        "Reward model",
        "share of held-out pairs in the right order",
        percent(points[-1][1]),
        series,
        form="percent",
        y_range=(0.0, 1.0),
        axis="step of the reward model",
    )


def _comparison(row: Comparison, run: RunData) -> Plot | None:
    series: list[Series] = []
    last = 0.0
    for color, (metric, label) in enumerate(row.metrics.items()):
        points = run.points(metric)
        if points:
            series.append(Series(label, points, color, dots=len(points) <= NOISY))
            _, last = points[-1]
    if not series:
        return None
    now = FORMS[row.form](last)
    return Plot(row.title, row.note, now, series, form=row.form, y_range=row.y_range)


def _curve(curve: Curve, points: Points, axis: str = "step") -> Plot | None:
    always_zero = not any(y for _, y in points)
    if not points or (curve.form == "percent" and always_zero):
        return None
    return Plot(
        curve.title,
        curve.note,
        FORMS[curve.form](mean_at_end(points)),
        _lines(curve.title.lower(), points, curve.color),
        form=curve.form,
        zero=curve.zero,
        axis=axis,
    )


def _lines(name: str, points: Points, color: int) -> list[Series]:
    """Return the line of a metric, after the raw one if it is smoothed."""
    if len(points) <= NOISY:
        return [Series(name, points, color)]
    return [
        Series(name, points, color, faint=True),
        Series(f"{name}, smoothed", smooth(points), color),
    ]


def _time(run: RunData) -> Plot | None:
    seconds = {phase: dict(run.points(f"time/{phase}")) for phase in PHASES}
    every: set[float] = set().union(*seconds.values())
    steps = sorted(every)
    columns = {}
    for phase, by_step in seconds.items():
        if any(by_step.values()):
            columns[phase] = [by_step.get(step, 0.0) for step in steps]
    return time_bars("Where the time goes", steps, columns) if columns else None
