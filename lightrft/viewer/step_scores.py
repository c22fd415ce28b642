"""The section about a process reward model: scores of steps, calibration, F1, worst responses."""

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

SIDES = ((2, "right"), (1, "wrong"))
"""Color and label of the steps of a distribution."""
WIDTH = 1000
"""Width of the bar of an accuracy, in units of its picture."""


def is_of_steps(judged: Mapping[str, Any]) -> bool:
    """Return True if ``judged`` is the content of the report of a process reward model."""
    return "steps" in judged


def step_plots(judged: Mapping[str, Any]) -> list[Plot]:
    """Return the plots of a process reward model, in the order of their cards."""
    found = [_distribution(judged), _calibration(judged)]
    return [plot for plot in found if plot is not None]


def step_section(run: RunData, plots: Sequence[Plot]) -> str:
    """Return the section.

    Args:
        run: The run, whose ``judged`` is of steps.
        plots: The result of ``step_plots``.
    """
    judged = run.judged
    about = (
        f"Scores of {judged['steps']:,} labelled steps of {judged['responses']:,} responses. A "
        f"step is found right from the score {compact(judged['threshold'])}."
    )
    return (
        '<section aria-labelledby="scores">\n<h2 id="scores">Scores of steps</h2>\n'
        f"<p>{about}</p>\n{figures(plots)}\n{_subsets(judged)}\n</section>\n{_worst(run)}"
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


def _distribution(judged: Mapping[str, Any]) -> Plot | None:
    spread = judged["distribution"]
    centers = spread["centers"]
    if not centers:
        return None
    means = {
        name: sum(center * share for center, share in zip(centers, spread[name]))
        for _, name in SIDES
    }
    return Plot(
        "Distribution of scores",
        "share of right and of wrong steps in each bin; the number is the mean difference",
        compact(means["right"] - means["wrong"]),
        [Series(name, list(zip(centers, spread[name])), color) for color, name in SIDES],
        form="percent",
        zero=True,
        axis="score",
        whole=False,
    )


def _calibration(judged: Mapping[str, Any]) -> Plot | None:
    bins = judged["calibration"]
    if not bins:
        return None
    points = [(one["confidence"], one["accuracy"]) for one in bins]
    total = sum(one["count"] for one in bins)
    error = sum(abs(one["confidence"] - one["accuracy"]) * one["count"] for one in bins) / total
    return Plot(
        "Calibration",
        "share of right steps by score; the number is the calibration error",
        compact(error),
        [
            Series("right steps", points, 0, dots=True),
            Series("perfect", [(0.0, 0.0), (1.0, 1.0)], 5, dashed=True),
        ],
        form="percent",
        y_range=(0.0, 1.0),
        axis="score",
        whole=False,
    )


def subsets_table(heads: Sequence[str], rows: str) -> str:
    """Return a table over data sources; nothing without ``rows``."""
    if not rows:
        return ""
    top = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return (
        '<div class="card subsets"><table><thead><tr>'
        f"{top}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def what_was_given(one: Mapping[str, Any], media: Path) -> tuple[str, str]:
    """Return the prompt and the media of an entry of ``reward_scores.json``, each maybe empty."""
    given = shown(one["attachments"], media, "what the model was given")
    given = f'<div class="given">{given}</div>' if given else ""
    prompt = f'<p class="prompt">{escape(one["prompt"])}</p>' if one["prompt"] else ""
    return prompt, given


def _subsets(judged: Mapping[str, Any]) -> str:
    """Return the F1 and the accuracy of responses of each data source as a table with bars."""
    rows = ""
    for one in sorted(judged["subsets"], key=lambda one: one["mean"]):
        f1 = one["f1"] or {}
        cells = [percent(f1[name]) if f1 else "" for name in ("f1", "wrong", "right")]
        rows += (
            f'<tr><th scope="row">{escape(one["name"] or "unnamed")}</th>'
            f"<td>{share_bar(one)}</td><td>{percent(one['mean'])}</td>"
            f"<td>{percent(one['low'])} to {percent(one['high'])}</td>"
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + f"<td>{one['count']:,}</td></tr>"
        )
    heads = (
        *("Data source", "", "First wrong step found", "95 % interval", "F1"),
        *("With a wrong step", "Without", "Responses"),
    )
    return subsets_table(heads, rows)


def _worst(run: RunData) -> str:
    worst = run.judged["worst"]
    if not worst:
        return ""
    items = "".join(_response(one, run.media) for one in worst)
    return (
        '<section aria-labelledby="worst">\n<h2 id="worst">Responses that are judged worst</h2>\n'
        "<p>The largest difference of score and label of a step first.</p>\n"
        f'<ol class="answers">{items}</ol>\n</section>'
    )


def _response(one: Mapping[str, Any], media: Path) -> str:
    """Return a response in steps with its prompt and media.

    Args:
        one: The response, as in ``reward_scores.json``.
        media: Folder of the attachments.
    """
    name = escape(" ".join(filter(None, (one.get("source"), one.get("id")))))
    if "missing" in one:
        return f'<li class="card"><p class="empty">{name}: {escape(one["missing"])}</p></li>'
    prompt, given = what_was_given(one, media)
    rows = "".join(_step(k, step) for k, step in enumerate(one["steps"]))
    top = "".join(f'<th scope="col">{head}</th>' for head in ("Step", "Score", "Label", ""))
    found = f"first wrong step: {_place(one['labelled'])}, found {_place(one['predicted'])}"
    return (
        f'<li class="card"><div class="ask">{prompt}<p class="expected"><code>{name}</code>, '
        f'{found}</p></div>{given}<div class="steps"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></li>"
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
