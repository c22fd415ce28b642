"""The section with the groups of some steps: prompts, responses, rewards and advantages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lightrft.utils.errors import DataError
from lightrft.viewer.svg import compact

STEPS, GROUPS, RESPONSES, CHARACTERS = 8, 4, 16, 2000
"""Largest numbers of steps, groups per step, responses per group and characters per text."""


@dataclass(frozen=True, slots=True)
class Response:
    """One response of a group.

    ``advantage`` is the mean over its trained tokens, or None if no advantage was computed.
    """

    text: str
    reward: float | None
    advantage: float | None
    terms: Mapping[str, float]
    tokens: int
    ended: str


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its responses."""

    prompt: str
    label: str
    responses: Sequence[Response]


@dataclass(frozen=True, slots=True)
class Step:
    """The first groups of a step. ``count`` is the total number of groups."""

    step: int
    groups: Sequence[Group]
    count: int


def read_steps(folder: Path) -> list[Step]:
    """Return the groups of some steps of a run, spread evenly from the first to the last.

    Raises ``DataError`` for a malformed file.
    """
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    last = len(files) - 1
    chosen = sorted({round(k * last / max(1, min(STEPS, len(files)) - 1)) for k in range(min(STEPS, len(files)))})
    return [_step(files[k]) for k in chosen]


def groups(steps: Sequence[Step]) -> str:
    """Return the section, or an empty text if the run has no rollouts."""
    if not any(step.groups for step in steps):
        return ""
    about = "Each prompt with its responses. The advantage is the mean over the trained tokens of a response."
    items = "".join(_shown(step, k == len(steps) - 1) for k, step in enumerate(steps) if step.groups)
    return f'<section aria-labelledby="groups">\n<h2 id="groups">Groups and advantages</h2>\n<p>{about}</p>\n{items}\n</section>'


def _step(path: Path) -> Step:
    found: dict[str, list[dict[str, Any]]] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                rows = found.setdefault(str(row["prompt"]["id"]), [])
                if len(found) <= GROUPS and len(rows) < RESPONSES:
                    rows.append(row)
            except (ValueError, KeyError, TypeError):
                raise DataError(f"{path}, line {number}: not a rollout") from None
    kept = [_group(rows) for rows in list(found.values())[:GROUPS]]
    return Step(int(path.stem.rpartition("_")[2]), kept, len(found))


def _group(rows: Sequence[Mapping[str, Any]]) -> Group:
    prompt = rows[0]["prompt"]
    label = prompt.get("label")
    told = "" if label is None else label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)
    return Group(str(prompt.get("text") or ""), told, [_response(row) for row in rows])


def _response(row: Mapping[str, Any]) -> Response:
    sampled, per_token = row.get("sampled") or [], row.get("advantages") or []
    trained = [a for a, s in zip(per_token, sampled) if s and a is not None] if len(sampled) == len(per_token) else per_token
    return Response(
        str(row.get("text") or ""),
        row.get("reward"),
        sum(trained) / len(trained) if trained else None,
        row.get("terms") or {},
        len(row.get("token_ids") or ()),
        str(row.get("failed") or row.get("finish_reason") or ""),
    )


def _shown(step: Step, opened: bool) -> str:
    some = f" ({len(step.groups)} of {step.count} groups)" if step.count > len(step.groups) else ""
    body = "".join(_table(group) for group in step.groups)
    return f"<details{' open' if opened else ''}><summary>Step {step.step}{some}</summary>{body}</details>"


def _table(group: Group) -> str:
    names = list(dict.fromkeys(name for response in group.responses for name in response.terms))
    names = names if len(names) > 1 else []
    head = "".join(f"<th>{escape(name)}</th>" for name in ("reward", *names, "advantage", "tokens", "ended", "response"))
    rows = "".join(_row(response, names) for response in group.responses)
    expected = f' <span class="expected">expected <code>{escape(_cut(group.label))}</code></span>' if group.label else ""
    prompt = f'<p class="prompt">{escape(_cut(group.prompt))}{expected}</p>'
    return f'<div class="card group">{prompt}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _row(response: Response, names: Sequence[str]) -> str:
    advantage = response.advantage
    css = "" if not advantage else ' class="good"' if advantage > 0 else ' class="bad"'
    terms = "".join(f"<td>{_number(response.terms.get(name))}</td>" for name in names)
    return (
        f"<tr><td>{_number(response.reward)}</td>{terms}<td{css}>{_number(advantage)}</td><td>{response.tokens}</td>"
        f"<td>{escape(response.ended)}</td><td><pre>{escape(_cut(response.text))}</pre></td></tr>"
    )


def _number(value: float | None) -> str:
    return "" if value is None else compact(value)


def _cut(text: str) -> str:
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]} ... ({len(text) - CHARACTERS:,} more characters)"
