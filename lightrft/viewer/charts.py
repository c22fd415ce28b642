"""The plots of a report, with their metrics, order and axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from lightrft.viewer.run_data import Points, RunData, mean_at_end
from lightrft.viewer.svg import Series, compact, line_plot, percent, smooth, stacked_bars

NOISY = 40  # number of points above which a smoothed line is added to the raw line
PHASES = ("generate", "reward", "logprobs", "reference", "update", "eval", "checkpoint", "other")


@dataclass(frozen=True, slots=True)
class Plot:
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
    form: Callable[[float], str] = compact
    zero: bool = False
    color: int = 0


PLAIN = (
    Plot("response/length", "Response length", "tokens, mean of a step", zero=True, color=7),
    Plot(
        "response/clip_ratio",
        "Cut responses",
        "share that reached the length limit",
        percent,
        zero=True,
        color=4,
    ),
    Plot("policy/kl", "KL to the reference", "nats per token", color=3),
    Plot("policy/entropy", "Entropy", "nats per token", zero=True, color=2),
    Plot(
        "policy/clip_fraction",
        "Clipped tokens",
        "share of tokens outside the trust region",
        percent,
        zero=True,
        color=6,
    ),
    Plot("policy/grad_norm", "Gradient norm", "before clipping", zero=True, color=5),
    Plot("policy/loss", "Policy loss", "the objective of a step", color=1),
    Plot("loss", "Loss", "nats per token", color=1),
    Plot(
        "tokens_per_second",
        "Tokens per second",
        "over the whole step",
        lambda v: f"{v:,.0f}" if v < 1e4 else compact(v),
        zero=True,
    ),
)


def plots(run: RunData) -> list[str]:
    """Return a figure for each metric that the run has written."""
    drawn = [_reward(run), _accuracy(run)]
    drawn += [_plain(plot, run.points(plot.metric)) for plot in PLAIN]
    warm_up = Plot("loss", "Warm-up loss", "supervised steps, nats per token", color=1)
    drawn += [_time(run), _plain(warm_up, run.points("loss", warm_up=True))]
    return [figure for figure in drawn if figure]


def _reward(run: RunData) -> str:
    points = run.points("reward/mean")
    if not points:
        return ""
    of_all = ("reward/mean", "reward/std", "reward/max", "reward/min")
    terms = [name for name in run.names("reward/") if name not in of_all]
    series = _lines("reward", points, 0)
    if len(terms) > 1:  # a single term equals the reward, up to its weight
        for i, name in enumerate(terms[:6]):
            points_of = run.points(name)
            trend = smooth(points_of) if len(points_of) > NOISY else points_of
            series.append(Series(name.removeprefix("reward/"), trend, i + 1))
    svg = line_plot("Reward", series)
    return _figure("Reward", "mean of a step", svg, compact(mean_at_end(points)), series)


def _accuracy(run: RunData) -> str:
    points = run.points("eval/accuracy")
    if not points:
        return ""
    series = [Series("eval accuracy", points, 2, dots=len(points) <= NOISY)]
    by_source = [name for name in run.names("eval/") if name.endswith("/accuracy")]
    sources = [name for name in by_source if name.count("/") == 2]
    if len(sources) > 1:  # a single source equals the total
        for i, name in enumerate(sources[:5]):
            series.append(Series(name.split("/")[1], run.points(name), 3 + i, dots=True))
    before = run.summary.get("heldout_before")
    (first, _), (last, accuracy) = points[0], points[-1]
    if isinstance(before, int | float) and len(points) > 1:
        level = [(first, before), (last, before)]
        series.append(Series("before", level, 5, dashed=True))
    svg = line_plot("Held-out accuracy", series, y_format=percent, y_range=(0.0, 1.0))
    note = "on problems that were not trained on"
    return _figure("Held-out accuracy", note, svg, percent(accuracy), series)


def _plain(plot: Plot, points: Points) -> str:
    if not points:
        return ""
    if plot.form is percent and not any(y for _, y in points):
        return ""  # leaves out a fraction that was always 0
    lines = _lines(plot.title.lower(), points, plot.color)
    svg = line_plot(plot.title, lines, y_format=plot.form, zero=plot.zero)
    return _figure(plot.title, plot.note, svg, plot.form(mean_at_end(points)))


def _lines(name: str, points: Points, color: int) -> list[Series]:
    if len(points) <= NOISY:
        return [Series(name, points, color)]
    return [
        Series(name, points, color, faint=True),
        Series(f"{name}, smoothed", smooth(points), color),
    ]


def _time(run: RunData) -> str:
    rows = [row for row in run.rows if any(f"time/{phase}" in row for phase in PHASES)]
    columns = {phase: [row.get(f"time/{phase}") or 0.0 for row in rows] for phase in PHASES}
    columns = {phase: values for phase, values in columns.items() if any(values)}
    if not columns:
        return ""
    total = sum(map(sum, columns.values()))
    svg = stacked_bars("Where the time goes", [row["step"] for row in rows], columns)
    shares = []
    for i, (phase, values) in enumerate(columns.items()):
        shares.append(Series(f"{phase} {_share(sum(values) / total)}", [], i))
    now = f"{compact(total / len(rows))} s"
    return _figure("Where the time goes", "seconds per step", svg, now, shares)


def _share(value: float) -> str:
    return percent(round(value, 2)) if value >= 0.005 else "<1%"


def _figure(title: str, note: str, svg: str, now: str, series: list[Series] | None = None) -> str:
    named = [s for s in series or [] if not s.faint]
    legend = ""
    if len(named) > 1:
        items = "".join(f"<li>{_key(s)}{escape(s.name)}</li>" for s in named)
        legend = f'<ul class="legend">{items}</ul>'
    return (
        f'<figure class="card"><figcaption><span class="now">{escape(now)}</span><h3>{escape(title)}</h3>'
        f"<p>{escape(note)}</p>{legend}</figcaption>{svg}</figure>"
    )


def _key(series: Series) -> str:
    dashed = " dashed" if series.dashed else ""
    if series.points:
        mark = f'<path class="line s{series.color % 8}{dashed}" d="M1 4H13"/>'
    else:  # a bar
        mark = f'<rect class="f{series.color % 8}" width="14" height="8" rx="2"/>'
    return f'<svg viewBox="0 0 14 8" aria-hidden="true">{mark}</svg>'
