"""The section about a reward model: score distributions, calibration, subsets and worst pairs.

``step_scores`` has the section about a process reward model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightrft.viewer.figures import figures
from lightrft.viewer.formatting import compact, percent
from lightrft.viewer.media import shown
from lightrft.viewer.plots import Plot, Series
from lightrft.viewer.run_data import RunData
from lightrft.viewer.step_scores import (
    is_of_steps,
    share_bar,
    step_plots,
    step_section,
    subsets_table,
    what_was_given,
)

SIDES = (("better", "Better, by its label"), ("worse", "Worse, with the higher score"))
"""Responses of a pair in wrong order, with their headings."""


def reward_plots(run: RunData) -> list[Plot]:
    """Return the plots of ``reward_scores.json``, in the order of their cards."""
    judged = run.judged
    if is_of_steps(judged):
        return step_plots(judged)
    found = [_distribution(judged), _calibration(judged), _best_of_n(judged)]
    return [plot for plot in found if plot is not None]


def reward_section(run: RunData, plots: Sequence[Plot]) -> str:
    """Return the section, or an empty text for a run without scores of a reward model.

    Args:
        run: The run.
        plots: The result of ``reward_plots``.
    """
    judged = run.judged
    if not judged:
        return ""
    if is_of_steps(judged):
        return step_section(run, plots)
    head, pairs = escape(str(judged.get("head", ""))), judged.get("pairs", 0)
    about = f"Scores of the head <code>{head}</code> for {pairs:,} pairs of responses."
    return (
        '<section aria-labelledby="scores">\n<h2 id="scores">Scores of responses</h2>\n'
        f"<p>{about}</p>\n{figures(plots)}\n{_subsets(judged)}\n</section>\n{_worst(run)}"
    )


def _distribution(judged: Mapping[str, Any]) -> Plot | None:
    spread = judged.get("distribution") or {}
    centers = spread.get("centers") or []
    if not centers:
        return None
    series = []
    for color, name in ((2, "better"), (1, "worse")):
        series.append(Series(name, list(zip(centers, spread[name])), color))
    means = [
        sum(center * share for center, share in zip(centers, spread[name]))
        for name in ("better", "worse")
    ]
    return Plot(
        "Distribution of scores",
        "share of better and of worse responses in each bin; the number is the mean difference",
        compact(means[0] - means[1]),
        series,
        form="percent",
        zero=True,
        axis="score",
        whole=False,
    )


def _calibration(judged: Mapping[str, Any]) -> Plot | None:
    bins = judged.get("calibration") or []
    if not bins:
        return None
    points = [(one["confidence"], one["accuracy"]) for one in bins]
    total = sum(one["count"] for one in bins)
    error = sum(abs(one["confidence"] - one["accuracy"]) * one["count"] for one in bins) / total
    series = [
        Series("accuracy", points, 0, dots=True),
        Series("perfect", [(0.5, 0.5), (1.0, 1.0)], 5, dashed=True),
    ]
    return Plot(
        "Calibration",
        "accuracy by the confidence of the model; the number is the calibration error",
        compact(error),
        series,
        form="percent",
        y_range=(0.0, 1.0),
        axis="confidence",
        whole=False,
    )


def _best_of_n(judged: Mapping[str, Any]) -> Plot | None:
    curve = judged.get("best_of_n") or []
    if not curve:
        return None

    def line(kind: str, end: str) -> list[tuple[float, float]]:
        points = [(point["n"], point[kind][end]) for point in curve]
        return [(n, value) for n, value in points if value is not None]

    series = [
        Series("by the model", line("chosen", "mean"), 0, dots=True),
        Series("95 % interval, low", line("chosen", "low"), 0, dashed=True),
        Series("95 % interval, high", line("chosen", "high"), 0, dashed=True),
        Series("by the gold rating", line("best", "mean"), 5),
    ]
    return Plot(
        "Best of n",
        "expected gold rating of the response that is chosen among n",
        compact(curve[-1]["chosen"]["mean"]),
        [one for one in series if one.points],
        axis="n",
    )


def _subsets(judged: Mapping[str, Any]) -> str:
    """Return the accuracy of each data source as a table with bars."""
    subsets = judged.get("subsets") or []
    rows = ""
    for one in sorted(subsets, key=lambda one: one["mean"]):
        rows += (
            f'<tr><th scope="row">{escape(one["name"] or "unnamed")}</th>'
            f"<td>{share_bar(one)}</td><td>{percent(one['mean'])}</td>"
            f"<td>{percent(one['low'])} to {percent(one['high'])}</td>"
            f"<td>{one['count']:,}</td></tr>"
        )
    heads = ("Data source", "", "Pair accuracy", "95 % interval", "Prompts")
    return subsets_table(heads, rows)


def _worst(run: RunData) -> str:
    worst = run.judged.get("worst") or []
    if not worst:
        return ""
    items = "".join(_pair(one, run.media) for one in worst)
    return (
        '<section aria-labelledby="worst">\n<h2 id="worst">Pairs in the most wrong order</h2>\n'
        "<p>At most one pair of each prompt, the largest difference of scores first.</p>\n"
        f'<ol class="answers">{items}</ol>\n</section>'
    )


def _pair(one: Mapping[str, Any], media: Path) -> str:
    """Return a pair with its prompt and media.

    Args:
        one: The pair, as in ``reward_scores.json``.
        media: Folder of the attachments.
    """
    name = escape(" ".join(filter(None, (one.get("source"), one.get("id")))))
    if "missing" in one:
        return f'<li class="card"><p class="empty">{name}: {escape(one["missing"])}</p></li>'
    gap = one["worse"]["score"] - one["better"]["score"]
    prompt, given = what_was_given(one, media)
    sides = ""
    for side, title in SIDES:
        response = one[side]
        own = shown(response["attachments"], media, title)
        own = f'<div class="given">{own}</div>' if own else ""
        text = f"<pre>{escape(response['text'])}</pre>" if response["text"] else ""
        mark = f'<span class="mark">score {compact(response["score"])}</span>'
        sides += f'<div class="answer"><header><span>{title}</span>{mark}</header>{text}{own}</div>'
    return (
        f'<li class="card"><div class="ask">{prompt}<p class="expected"><code>{name}</code>, '
        f'wrong by {compact(gap)}</p></div>{given}<div class="pair">{sides}</div></li>'
    )
