"""The section with the groups of some steps: prompts, responses, rewards, and what they became."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import compress
from pathlib import Path
from typing import Any

from lightrft.config.reward import RewardConfig, RewardTerm
from lightrft.observability.rollout_writer import read_rollouts
from lightrft.viewer.plots import compact, css_of

STEPS, GROUPS, RESPONSES, CHARACTERS = 8, 4, 16, 2000
"""Largest numbers of steps, groups per step, responses per group and characters per text."""
Row = Mapping[str, Any]
"""A line of a file of the run, or an object in it. The writer and the reader agree on its keys."""
Extract = Callable[[Sequence[RewardTerm], str, Row], Mapping[str, str | None]]
"""Return what reward terms read from a response, see ``lightrft.rewards.rules.answers.extracted``.

The report gets it from its caller, since it needs nothing that computes.
"""


@dataclass(frozen=True, slots=True)
class Rules:
    """The reward of a run, and a function that returns what its rules read from a response."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    extract: Extract = lambda terms, text, columns: {}


@dataclass(frozen=True, slots=True)
class Response:
    """One response of a group.

    Args:
        text: the response.
        reward: its reward. None if it was not scored.
        advantage: mean over its trained tokens. None if no advantage was computed.
        terms: reward terms by name.
        tokens: number of its tokens.
        ended: why it ended, or why it was not scored.
        preference: its rank or label, empty if it was not compared. None in a run that compares no
            responses.
        reads: what each rule reads from it, by the name of its term. None for no answer.
    """

    text: str
    reward: float | None
    advantage: float | None
    terms: Mapping[str, float]
    tokens: int
    ended: str
    preference: str | None = None
    reads: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its responses."""

    prompt: str
    label: str
    responses: Sequence[Response]

    @property
    def compares(self) -> bool:
        """True if the responses were compared by rank or label, and have no advantages."""
        return any(response.preference is not None for response in self.responses)


@dataclass(frozen=True, slots=True)
class Step:
    """The first groups of a step. ``count`` is the total number of groups."""

    step: int
    groups: Sequence[Group]
    count: int


def read_steps(folder: Path, rules: Rules) -> list[Step]:
    """Return the groups of some steps of a run, spread evenly from the first to the last.

    Args:
        folder: the run folder.
        rules: how its responses are scored.

    Raises:
        DataError: a file is malformed.
    """
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    count = min(STEPS, len(files))
    last = len(files) - 1
    # A set, since rounding may choose a file twice.
    chosen = sorted({round(k * last / max(1, count - 1)) for k in range(count)})
    return [_step(files[k], rules) for k in chosen]


def groups(steps: Sequence[Step]) -> str:
    """Return the section, or an empty text if the run has no rollouts."""
    shown = [step for step in steps if step.groups]
    if not shown:
        return ""
    items = "".join(_shown(step, opened=step is steps[-1]) for step in shown)
    title = "Groups and advantages"
    note = "The advantage is the mean over the trained tokens of a response."
    if shown[0].groups[0].compares:
        title = "Groups and preferences"
        note = "The preference is the rank (0 is the best) or the label of a trained response."
    return (
        f'<section aria-labelledby="groups">\n<h2 id="groups">{title}</h2>\n'
        f"<p>Each prompt with its responses. {note}</p>\n"
        f"{items}\n</section>"
    )


def _step(path: Path, rules: Rules) -> Step:
    found: dict[str, list[Row]] = {}
    for row in read_rollouts(path):
        rows = found.setdefault(str(row["prompt"]["id"]), [])
        if len(found) <= GROUPS and len(rows) < RESPONSES:
            rows.append(row)
    kept = [_group(rows, rules) for rows in list(found.values())[:GROUPS]]
    return Step(int(path.stem.rpartition("_")[2]), kept, len(found))


def _group(rows: Sequence[Row], rules: Rules) -> Group:
    prompt = rows[0]["prompt"]
    terms = rules.reward.terms_of(prompt.get("data_source") or "")
    responses = []
    for row in rows:
        reads = rules.extract(terms, str(row.get("text") or ""), row["prompt"].get("columns") or {})
        responses.append(_response(row, reads))
    return Group(text_of(prompt.get("text")), text_of(prompt.get("label")), responses)


def _response(row: Row, reads: Mapping[str, str | None]) -> Response:
    return Response(
        text=str(row.get("text") or ""),
        reward=row.get("reward"),
        advantage=_mean_advantage(row.get("sampled") or [], row.get("advantages") or []),
        terms=row.get("terms") or {},
        tokens=len(row.get("token_ids") or ()),
        ended=str(row.get("failed") or row.get("finish_reason") or ""),
        preference=_preference(row),
        reads=reads,
    )


def _preference(row: Row) -> str | None:
    """Return the rank or the label of a response; None in a run that compares no responses."""
    if "rank" not in row and "desirable" not in row:
        return None
    label = row.get("desirable")
    if label is not None:
        return "desirable" if label else "undesirable"
    rank = row.get("rank")
    return "" if rank is None else f"rank {rank}"


def text_of(value: object) -> str:
    """Return a value of a file as text. A label may be any JSON value, e.g. a list of answers."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _mean_advantage(
    sampled: Sequence[bool],
    advantages: Sequence[float | None],
) -> float | None:
    """Return the mean advantage of the sampled tokens; None if there are none.

    A response that was not trained on has no advantages.
    """
    own = compress(advantages, sampled)
    trained = [advantage for advantage in own if advantage is not None]
    return sum(trained) / len(trained) if trained else None


def _shown(step: Step, opened: bool) -> str:
    some = ""
    if step.count > len(step.groups):
        some = f" ({len(step.groups)} of {step.count} groups)"
    body = "".join(_table(group) for group in step.groups)
    opening = "<details open>" if opened else "<details>"
    return f"{opening}<summary>Step {step.step}{some}</summary>{body}</details>"


def _table(group: Group) -> str:
    names: dict[str, None] = {}
    for response in group.responses:
        names |= dict.fromkeys(response.terms)
    # A single term equals the reward, up to its weight.
    terms = list(names) if len(names) > 1 else []
    judged = "preference" if group.compares else "advantage"
    reads = list(group.responses[0].reads)
    says = [f"{name} reads" for name in reads]
    columns = ("reward", *terms, judged, "tokens", "ended", *says, "response")
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    rows = "".join(_row(response, terms, reads) for response in group.responses)
    expected = ""
    if group.label:
        label = escape(_cut(group.label))
        expected = f' <span class="expected">expected <code>{label}</code></span>'
    prompt = f'<p class="prompt">{escape(_cut(group.prompt))}{expected}</p>'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="card group">{prompt}{table}</div>'


def _row(response: Response, names: Sequence[str], rules: Sequence[str]) -> str:
    advantage = response.advantage
    judged = f'<td class="{css_of(advantage or 0.0)}">{_number(advantage)}</td>'
    if response.preference is not None:
        judged = f"<td>{escape(response.preference)}</td>"
    terms = "".join(f"<td>{_number(response.terms.get(name))}</td>" for name in names)
    answers = [response.reads[name] for name in rules]
    reads = "".join(
        "<td>nothing</td>" if one is None else f"<td><code>{escape(_cut(one))}</code></td>"
        for one in answers
    )
    return (
        f"<tr><td>{_number(response.reward)}</td>{terms}{judged}"
        f"<td>{response.tokens}</td><td>{escape(response.ended)}</td>{reads}"
        f"<td><pre>{escape(_cut(response.text))}</pre></td></tr>"
    )


def _number(value: float | None) -> str:
    return "" if value is None else compact(value)


def _cut(text: str) -> str:
    if len(text) <= CHARACTERS:
        return text
    return f"{text[:CHARACTERS]} ... ({len(text) - CHARACTERS:,} more characters)"
