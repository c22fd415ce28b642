"""The section about a reward model: score distributions, calibration, subsets and worst cases.

It is about pairs of responses, or about steps of responses for a process reward model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightrft.viewer.page import figures, shown
from lightrft.viewer.plots import Plot, Series, compact, percent
from lightrft.viewer.run_data import RunData

SIDES = (("better", "Better, by its label"), ("worse", "Worse, with the higher score"))
"""Responses of a pair in wrong order, with their headings."""

WIDTH = 1000
"""Width of the bar of an accuracy, in units of its picture."""


def is_of_steps(judged: Mapping[str, Any]) -> bool:
    """Return True if ``judged`` is the content of the report of a process reward model."""
    return "steps" in judged


def reward_plots(run: RunData) -> list[Plot]:
    """Return the plots of ``reward_scores.json``, in the order of their cards."""
    judged = run.judged
    if is_of_steps(judged):
        about = "share of right steps by score; the number is the calibration error"
        found = [
            _distribution(judged, "right", "wrong", "steps"),
            _calibration(judged, about, "right steps", "score", 0.0),
        ]
    else:
        about = "accuracy by the confidence of the model; the number is the calibration error"
        found = [
            _distribution(judged, "better", "worse", "responses"),
            _calibration(judged, about, "accuracy", "confidence", 0.5),
            _best_of_n(judged),
        ]
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
        unit, subsets = (
            "steps",
            _subset_table(judged, ("First wrong step found", "Responses"), F1_CELLS),
        )
        about = (
            f"Scores of {judged['steps']:,} labelled steps of {judged['responses']:,} responses. A "
            f"step is found right from the score {compact(judged['threshold'])}."
        )
        worst = _worst(
            run,
            "Responses that are judged worst",
            "The largest difference of score and label of a step first.",
            _response,
        )
    else:
        unit, subsets = "responses", _subset_table(judged, ("Pair accuracy", "Prompts"), {})
        head, pairs = escape(str(judged.get("head", ""))), judged.get("pairs", 0)
        about = f"Scores of the head <code>{head}</code> for {pairs:,} pairs of responses."
        worst = _worst(
            run,
            "Pairs in the most wrong order",
            "At most one pair of each prompt, the largest difference of scores first.",
            _pair,
        )
    return (
        f'<section aria-labelledby="scores">\n<h2 id="scores">Scores of {unit}</h2>\n'
        f"<p>{about}</p>\n{figures(plots)}\n{subsets}\n</section>\n{worst}"
    )


def _distribution(judged: Mapping[str, Any], high: str, low: str, unit: str) -> Plot | None:
    """Return the plot of the distribution of scores.

    Args:
        judged: Content of ``reward_scores.json``.
        high: Name of the side that should have the larger scores.
        low: Name of the other side.
        unit: What is scored.
    """
    spread = judged.get("distribution") or {}
    centers = spread.get("centers") or []
    if not centers:
        return None
    lines = {name: list(zip(centers, spread[name])) for name in (high, low)}
    means = {name: sum(x * share for x, share in line) for name, line in lines.items()}
    return Plot(
        "Distribution of scores",
        f"share of {high} and of {low} {unit} in each bin; the number is the mean difference",
        compact(means[high] - means[low]),
        [Series(high, lines[high], 2), Series(low, lines[low], 1)],
        form="percent",
        zero=True,
        axis="score",
        whole=False,
    )


def _calibration(
    judged: Mapping[str, Any], about: str, name: str, axis: str, start: float
) -> Plot | None:
    """Return the plot of the calibration.

    Args:
        judged: Content of ``reward_scores.json``.
        about: What the plot shows.
        name: Name of the measured line.
        axis: Name of the axis of confidence.
        start: Smallest confidence.
    """
    bins = judged.get("calibration") or []
    if not bins:
        return None
    points = [(one["confidence"], one["accuracy"]) for one in bins]
    total = sum(one["count"] for one in bins)
    error = sum(abs(one["confidence"] - one["accuracy"]) * one["count"] for one in bins) / total
    return Plot(
        "Calibration",
        about,
        compact(error),
        [
            Series(name, points, 0, dots=True),
            Series("perfect", [(start, start), (1.0, 1.0)], 5, dashed=True),
        ],
        form="percent",
        y_range=(0.0, 1.0),
        axis=axis,
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


def share_bar(one: Mapping[str, Any]) -> str:
    """Return a bar from 0 to 1 with a mark at 1/2, and the interval as a line.

    Positions are attributes of SVG, because the policy of the page forbids attributes of style.
    """
    low, mean, high = (one[name] * WIDTH for name in ("low", "mean", "high"))
    words = f"{percent(one['mean'])}, {percent(one['low'])} to {percent(one['high'])}"
    return (
        f'<svg class="share" viewBox="0 0 {WIDTH} 14" preserveAspectRatio="none" role="img" '
        f'aria-label="{words}"><rect class="f2" width="{mean:.1f}" height="14"/>'
        f'<rect class="fline" x="{low:.1f}" y="5.5" width="{max(high - low, 2):.1f}" height="3"/>'
        f'<rect class="fline" x="{WIDTH / 2 - 1}" width="2" height="14"/></svg>'
    )


def _subset_table(
    judged: Mapping[str, Any],
    heads: tuple[str, str],
    more: Mapping[str, Callable[[Mapping[str, Any]], str]],
) -> str:
    """Return the accuracy of each data source as a table with bars.

    Args:
        judged: Content of ``reward_scores.json``.
        heads: Headings of the accuracy, and of the number of prompts or responses.
        more: Further cells of a data source, by their headings.
    """
    rows = ""
    for one in sorted(judged.get("subsets") or [], key=lambda one: one["mean"]):
        rows += (
            f'<tr><th scope="row">{escape(one["name"] or "unnamed")}</th>'
            f"<td>{share_bar(one)}</td><td>{percent(one['mean'])}</td>"
            f"<td>{percent(one['low'])} to {percent(one['high'])}</td>"
            + "".join(f"<td>{cell(one)}</td>" for cell in more.values())
            + f"<td>{one['count']:,}</td></tr>"
        )
    if not rows:
        return ""
    names = ("Data source", "", heads[0], "95 % interval", *more, heads[1])
    top = "".join(f'<th scope="col">{name}</th>' for name in names)
    return (
        '<div class="card subsets"><table><thead><tr>'
        f"{top}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _f1_cell(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda one: percent(one["f1"][name]) if one["f1"] else ""


F1_CELLS = {
    "F1": _f1_cell("f1"),
    "With a wrong step": _f1_cell("wrong"),
    "Without": _f1_cell("right"),
}
"""Cells of a data source of steps, by their headings."""


def _worst(run: RunData, title: str, about: str, entry: Callable[..., tuple[str, str]]) -> str:
    """Return the section of what is judged worst.

    Args:
        run: The run.
        title: Heading of the section.
        about: Order of the entries.
        entry: Returns the heading, media and texts of an entry.
    """
    items = ""
    for one in run.judged.get("worst") or []:
        name = escape(" ".join(filter(None, (one.get("source"), one.get("id")))))
        if "missing" in one:
            items += f'<li class="card"><p class="empty">{name}: {escape(one["missing"])}</p></li>'
            continue
        given = shown(one["attachments"], run.media, "what the model was given")
        given = f'<div class="given">{given}</div>' if given else ""
        prompt = f'<p class="prompt">{escape(one["prompt"])}</p>' if one["prompt"] else ""
        found, texts = entry(one, run.media)
        items += (
            f'<li class="card"><div class="ask">{prompt}<p class="expected"><code>{name}</code>, '
            f"{found}</p></div>{given}{texts}</li>"
        )
    if not items:
        return ""
    return (
        f'<section aria-labelledby="worst">\n<h2 id="worst">{title}</h2>\n'
        f'<p>{about}</p>\n<ol class="answers">{items}</ol>\n</section>'
    )


def _pair(one: Mapping[str, Any], media: Path) -> tuple[str, str]:
    """Return what is wrong with a pair in wrong order, and its responses.

    Args:
        one: The pair, as in ``reward_scores.json``.
        media: Folder of the attachments.
    """
    gap = one["worse"]["score"] - one["better"]["score"]
    sides = ""
    for side, title in SIDES:
        response = one[side]
        own = shown(response["attachments"], media, title)
        own = f'<div class="given">{own}</div>' if own else ""
        text = f"<pre>{escape(response['text'])}</pre>" if response["text"] else ""
        mark = f'<span class="mark">score {compact(response["score"])}</span>'
        sides += f'<div class="answer"><header><span>{title}</span>{mark}</header>{text}{own}</div>'
    return f"wrong by {compact(gap)}", f'<div class="pair">{sides}</div>'


def _response(one: Mapping[str, Any], media: Path) -> tuple[str, str]:
    """Return what is found wrong in a response in steps, and its steps."""
    rows = "".join(_step(k, step) for k, step in enumerate(one["steps"]))
    top = "".join(f'<th scope="col">{head}</th>' for head in ("Step", "Score", "Label", ""))
    return (
        f"first wrong step: {_place(one['labelled'])}, found {_place(one['predicted'])}",
        f'<div class="steps"><table><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table></div>',
    )


def _step(number: int, step: Mapping[str, Any]) -> str:
    """Return a step as the row of a table. A step that is judged wrongly is marked."""
    score, label = step["score"], step["label"]
    shown_score = "none" if score is None else compact(score)
    shown_label = "none" if label is None else compact(label)
    css = ' class="wrong"' if step["wrong"] else ""
    return (
        f"<tr{css}><td>{number + 1}</td><td>{shown_score}</td><td>{shown_label}</td>"
        f"<td><pre>{escape(step['text'])}</pre></td></tr>"
    )


def _place(index: int | None) -> str:
    """Return the number of a step from 1, as text."""
    if index is None:
        return "unknown"
    return "none" if index < 0 else str(index + 1)
