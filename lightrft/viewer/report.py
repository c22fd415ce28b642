"""The report of one run as a single HTML file.

The page holds its scripts, styles and data. It makes no requests, regardless of the texts of the
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

import yaml

from lightrft.utils.atomic_files import write_atomic
from lightrft.viewer.charts import plots
from lightrft.viewer.groups import Extract, groups
from lightrft.viewer.page import figures, page
from lightrft.viewer.plots import Plot, compact, css_of, percent
from lightrft.viewer.reward_scores import is_of_steps, reward_plots, reward_section
from lightrft.viewer.run_data import Points, RunData, mean_at_end, mean_at_start, read_run
from lightrft.viewer.samples import answers

FOOTER = "Written by lightrft from the files next to this page."
JUDGED = {
    "Prompts": "eval/prompts",
    "Without a score": "eval/unscored",
    "Scores that are not finite": "eval/nonfinite_scores",
    "Calibration error": "eval/calibration_error",
    "Calibration error of steps": "eval/step_calibration_error",
    "F1 of ProcessBench": "eval/process_bench_f1",
    "Length bias": "eval/length_bias",
    "Mean margin": "eval/margin",
}
"""Entries of the summary of an evaluation of a reward model, by their labels."""


def write_report(folder: Path, extract: Extract | None = None) -> Path:
    """Write ``report.html`` into a run folder, from the files written so far.

    Args:
        folder: the folder.
        extract: returns what rules read from a response. None leaves it out.

    Raises:
        DataError: ``folder`` is not a run folder or has a malformed file.
    """
    path = folder / "report.html"
    write_atomic(path, render(read_run(folder, extract)))
    return path


def write_curves(folder: Path) -> Path:
    """Write ``curves.html``, the curves of the report alone, into a run folder.

    Raises ``DataError`` if ``folder`` is not a run folder or has a malformed file.
    """
    run, path = read_run(folder), folder / "curves.html"
    curves = plots(run)
    write_atomic(path, page(f"{run.name}: run report", FOOTER, [_curves(run, curves)], curves))
    return path


def render(run: RunData) -> str:
    """Return the page of the report."""
    drawn, judged = plots(run), reward_plots(run)
    sections = [
        _header(run),
        _hero(run),
        _curves(run, drawn),
        reward_section(run, judged),
        answers(run),
        groups(run.steps),
        _settings(run),
        _next(run),
    ]
    return page(f"{run.name}: run report", FOOTER, sections, [*drawn, *judged])


def _header(run: RunData) -> str:
    if run.summary and run.summary.get("finished", True):
        seconds = run.number("seconds")
        lede = "Finished." if seconds is None else f"Finished in {duration(seconds)}."
    elif run.rows:
        lede = f"Not finished: these are the numbers up to step {run.rows[-1]['step']:.0f}."
    else:
        lede = "No step has been written yet."
    return (
        f'<header>\n<p class="eyebrow">Run report</p>\n<h1>{escape(run.name)}</h1>\n<p '
        f'class="lede">{lede}</p>\n</header>'
    )


def _hero(run: RunData) -> str:
    headline = _headline(run)
    facts = ""
    for label, value, note in _facts(run):
        small = f"<small>{escape(note)}</small>" if note else ""
        facts += f"<div><dt>{escape(label)}</dt><dd>{escape(value)}{small}</dd></div>"
    facts = f'<dl class="facts card">{facts}</dl>' if facts else ""
    return f'<div class="hero">{headline}{facts}</div>' if headline or facts else ""


def _headline(run: RunData) -> str:
    """Return the eval accuracy before and after training, or the only measured value."""
    measured = dict(run.points("eval/accuracy"))
    # Step 0 is before training.
    before = run.number("heldout_before", measured.pop(0, None))
    _, latest = max(measured.items(), default=(0, None))
    after = run.number("heldout_after", latest)
    if before is None:
        when = ""
    elif after is None:
        after, before, when = before, None, ", before training"
    else:
        when = ", before and after"
    if after is None:
        return ""
    value = f'<span class="to">{percent(after)}</span>'
    delta = ""
    if before is not None:
        value = (
            f'<span class="from">{percent(before)}</span><span class="arrow" '
            f'aria-label="to">→</span>{value}'
        )
        points = (after - before) * 100
        # A minus sign, which is as wide as the plus. The names of the classes have no hyphen.
        delta = f'<p class="delta {css_of(points)}">{points:+.1f} points</p>'.replace("-", "−", 1)
    of_pairs = ""
    if run.judged:
        of_pairs = "step " if is_of_steps(run.judged) else "pair "
    return (
        f'<div class="headline card"><p class="label">Held-out {of_pairs}accuracy{when}</p><p '
        f'class="value">{value}</p>{delta}</div>'
    )


def _facts(run: RunData) -> list[tuple[str, str, str]]:
    """Return ``(label, value, note)`` of the available facts."""
    facts = []
    if run.rows:
        warm = f"after {len(run.warm_up):,} supervised" if run.warm_up else ""
        facts.append(("Steps", f"{run.summary.get('steps', len(run.rows)):,}", warm))
    measured = run.points("seconds")
    seconds = run.number("seconds")
    if seconds is None and measured:
        _, seconds = measured[-1]
    if seconds is not None:
        step = run.points("time/step")
        note = f"{compact(sum(y for _, y in step) / len(step))} s per step" if step else ""
        facts.append(("Wall clock", duration(seconds), note))
    facts += _reward_model(run)
    written = run.points("rollout/tokens")
    tokens = run.number("tokens", run.total("rollout/tokens") if written else None)
    if tokens is not None:
        count = compact(tokens) if tokens >= 1e6 else f"{tokens:,.0f}"
        note = "prompts and responses" if written else ""
        facts.append(("Tokens", count, note))
    for label, name in JUDGED.items():
        value = run.number(name)
        if value is not None:
            facts.append((label, compact(value), ""))
    for label, name, form in (
        ("Tokens per second", "tokens_per_second", lambda v: f"{v:,.0f}"),
        ("Reward", "reward/mean", compact),
        ("Response length", "response/length", compact),
    ):
        facts += _first_and_last(label, run.points(name), form)
    return facts


def _reward_model(run: RunData) -> list[tuple[str, str, str]]:
    """Return the accuracy of the reward model that the policy learned from."""
    points = run.points("eval/pair_accuracy", run.reward_model)
    if not points:
        return []
    (_, first), (_, last) = points[0], points[-1]
    return [("Reward model", f"{percent(last)} of pairs", f"{percent(first)} before training")]


def _first_and_last(
    label: str, points: Points, form: Callable[[float], str]
) -> list[tuple[str, str, str]]:
    """Return the mean of a value over the last tenth of the run, and over the first tenth."""
    if not points:
        return []
    first = f"{form(mean_at_start(points))} at the start" if len(points) > 1 else ""
    return [(label, form(mean_at_end(points)), first)]


def _curves(run: RunData, drawn: Sequence[Plot]) -> str:
    account = _account(run)
    if not drawn and not account:
        return ""
    about = ""
    if drawn:
        about = (
            "<p>Drag over a plot to zoom, double-click to see every step again. Click a name in a "
            "legend to hide its line.</p>\n"
        )
    return (
        f'<section aria-labelledby="curves">\n<h2 id="curves">How it went</h2>\n{about}'
        f"{figures(drawn)}\n{account}</section>"
    )


def _account(run: RunData) -> str:
    """Return the account of all sampled tokens."""
    sampled = run.total("rollout/tokens_sampled")
    if not sampled:
        return ""
    kinds = ("trained", "filtered", "failed")
    parts = {kind: run.total(f"rollout/tokens_{kind}") for kind in kinds}
    classes = ["f2", "f5", "f1"]
    # Tokens carried into a step were counted as sampled in an earlier one.
    waiting = run.total("rollout/tokens_carried_out") - run.total("rollout/tokens_carried_in")
    if waiting:
        parts["left for a next step"] = waiting
        classes.append("f3")
    missing = sampled - sum(parts.values())
    verdict = "every one accounted for"
    if missing:
        parts["not accounted for"] = abs(missing)
        classes.append("fbad")
        verdict = f"{missing:,.0f} not accounted for"
    legend = "".join(
        f"<li>{_swatch(css)}{escape(name)} {value:,.0f} ({percent(value / sampled)})</li>"
        for (name, value), css in zip(parts.items(), classes, strict=True)
    )
    return (
        f'<div class="account card"><h3>{sampled:,.0f} tokens sampled <span>{verdict}</span></h3>'
        f"{_share_bar('Where the sampled tokens went', parts, classes)}<ul "
        f'class="legend">{legend}</ul></div>'
    )


def _share_bar(title: str, shares: Mapping[str, float], classes: Sequence[str]) -> str:
    """Return one horizontal bar that is divided in proportion to ``shares``.

    The widths are attributes of SVG, because the policy of the page forbids attributes of style.

    Args:
        title: title for screen readers.
        shares: values by name.
        classes: CSS class of each part.
    """
    total = sum(shares.values()) or 1.0
    start, parts = 0.0, ""
    for (name, value), css in zip(shares.items(), classes, strict=True):
        width = value / total * 1000
        about = f"{escape(name)}: {value:,.0f} ({percent(value / total)})"
        parts += f'<rect class="{css}" x="{start:.2f}" width="{width:.2f}" height="14">'
        parts += f"<title>{about}</title></rect>"
        start += width
    view = 'viewBox="0 0 1000 14" preserveAspectRatio="none"'
    return f'<svg class="share" {view} role="img" aria-label="{escape(title)}">{parts}</svg>'


def _swatch(css: str) -> str:
    return (
        f'<svg viewBox="0 0 14 8" aria-hidden="true"><rect class="{css}" width="14" height="8" '
        'rx="2"/></svg>'
    )


def _settings(run: RunData) -> str:
    changed: Mapping[str, object] = run.summary.get("changed") or {}
    if not changed and not run.config:
        return ""
    body = ""
    if changed:
        body = _table(changed)
    elif run.summary:  # without a summary it is not known what was changed
        body = "<p>Every setting is at its default.</p>"
    every = ""
    if run.config:
        label = f"All {len(run.config)} settings"
        every = f"<details><summary>{label}</summary>{_table(run.config)}</details>"
    head = "Settings that were changed" if changed else "Settings"
    return f'<section aria-labelledby="settings">\n<h2 id="settings">{head}</h2>\n{body}{every}\n</section>'


def _table(settings: Mapping[str, object]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{escape(_value(value))}</td></tr>'
        for key, value in settings.items()
    )
    return f'<table class="settings"><tbody>{rows}</tbody></table>'


def _value(value: object) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**9)
    # YAML ends a bare scalar with a document marker.
    return text.removesuffix("\n").removesuffix("\n...")


def _next(run: RunData) -> str:
    commands = run.summary.get("next") or []
    if not commands:
        return ""
    items = ""
    for command in commands:
        line, _, why = str(command).partition("  # ")
        caption = f"<p>{escape(why.strip())}</p>" if why else ""
        items += (
            f'<li>{caption}<div class="command card"><pre tabindex="0">{escape(line.strip())}</pre>'
            '<button type="button" hidden>Copy</button></div></li>'
        )
    return (
        '<section aria-labelledby="next">\n<h2 id="next">What to type next</h2>\n<ol '
        f'class="next">{items}</ol>\n</section>'
    )


def duration(seconds: float) -> str:
    """Return seconds as text, e.g. ``222`` as ``3 min 42 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, second = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {second} s"
    return f"{minutes // 60} h {minutes % 60} min"
