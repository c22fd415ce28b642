"""Score the responses of a run again by a changed reward function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightrft.config.reward import RewardConfig, RewardTerm
from lightrft.observability.rollout_writer import read_rollouts
from lightrft.rewards.scorer import Scorer
from lightrft.rollout.shown_samples import evidence, shortened
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import DataError

MOST = 2000
"""Most responses that are scored again: the newest ones."""
SHOWN = 3
"""Most examples of each kind of difference."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """Responses with their rewards in the run and by the changed function.

    Attributes:
        term: Name of the reward that is compared: a term of the run, or ``reward``.
        steps: First and last step of the responses.
        rows: Response, reward before, and reward now. A reward that failed is None.
        reward: The changed function.
    """

    term: str
    steps: tuple[int, int]
    rows: Sequence[tuple[Rollout, float | None, float | None]]
    reward: RewardConfig

    @property
    def failures(self) -> int:
        """Number of responses that the changed function did not score."""
        return sum(now is None for _, _, now in self.rows)

    def lines(self, width: int) -> list[str]:
        """Return lines that say how many rewards differ, with examples of each kind.

        Args:
            width: Width of the terminal in characters.
        """
        kinds: dict[str, list[tuple[Rollout, float | None, float | None]]] = {
            kind: [] for kind in ("higher", "lower", "failed", "scored before as failed", "same")
        }
        for row in self.rows:
            kinds[_kind(row[1], row[2])].append(row)
        counts = ", ".join(f"{len(rows)} {kind}" for kind, rows in kinds.items() if rows)
        first, last = self.steps
        lines = [
            f"{len(self.rows)} responses of steps {first} to {last}, compared with {self.term}: "
            f"{counts}",
            f"  mean {_mean(before for _, before, _ in self.rows)} -> "
            f"{_mean(now for _, _, now in self.rows)}",
        ]
        for kind, rows in kinds.items():
            for one, before, now in rows[: 0 if kind == "same" else SHOWN]:
                reason = f": {one.failed}" if now is None else ""
                start = f"  {kind}: {_number(before)} -> {_number(now)}{reason}"
                lines.append(shortened(start, width))
                lines += [f"    {line}" for line in evidence(one, self.reward, width - 4)]
        return lines


def _kind(before: float | None, now: float | None) -> str:
    if now is None:
        return "failed" if before is not None else "same"
    if before is None:
        return "scored before as failed"
    return "same" if before == now else "higher" if now > before else "lower"


def _mean(values: object) -> str:
    known = [value for value in values if value is not None]  # ty: ignore[not-iterable]
    return f"{sum(known) / len(known):.4g}" if known else "none"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def rescore(
    name: str, options: Mapping[str, object], folder: Path, limit: float, workers: int = 2
) -> Rescored:
    """Score the newest responses of a run by a reward function, in worker processes.

    Args:
        name: The function, as in ``reward.terms``.
        options: Keyword arguments of the function.
        folder: The run folder.
        limit: Limit of each call in seconds.
        workers: Number of worker processes.

    Raises:
        DataError: The folder has no responses.
    """
    steps, rollouts = saved_rollouts(folder)
    term = RewardTerm(function=name, options=dict(options))
    has_term = all(term.label in one.terms for one in rollouts if one.reward is not None)
    compared = term.label if has_term else "reward"
    before = [one.terms.get(compared) if has_term else one.reward for one in rollouts]
    found: dict[int, Rollout] = {}
    reward = RewardConfig(terms=(term,), timeout=limit, workers=workers)
    with Scorer(reward) as scorer:
        for k, one in enumerate(rollouts):
            one.reward, one.terms, one.failed, one.sample = None, {}, "", k
            scorer.submit(one)
        for one in scorer.results(wait=True):
            found[one.sample] = one
    now = [found[k] for k in range(len(rollouts))]
    return Rescored(compared, steps, list(zip(now, before, [one.reward for one in now])), reward)


def saved_rollouts(folder: Path, most: int = MOST) -> tuple[tuple[int, int], list[Rollout]]:
    """Return the first and last step, and the newest responses that a run has written.

    Media of prompts are not written, so that rewards that read them fail.

    Args:
        folder: The run folder.
        most: Most responses. Those of a step are kept as a whole.
    """
    files = sorted((folder / "rollouts").glob("step_*.jsonl"), reverse=True)
    rollouts: list[Rollout] = []
    steps: list[int] = []
    for file in files:
        if len(rollouts) >= most:
            break
        steps.append(int(file.stem.rpartition("_")[2]))
        rollouts += map(_rollout, read_rollouts(file))
    if not rollouts:
        raise DataError(
            f"{folder} has no responses in rollouts/; log.rollouts_every says which steps write "
            "theirs"
        )
    return (min(steps), max(steps)), rollouts


def _rollout(row: Mapping[str, Any]) -> Rollout:
    """Return the rollout that a line of ``rollouts/`` shows."""
    given = row["prompt"]
    known = {field.name for field in fields(Prompt)} - {"attachments", "media", "request"}
    prompt = Prompt(**{name: value for name, value in given.items() if name in known})
    known = {field.name for field in fields(Rollout)} - {"prompt", "experts", "step_rewards"}
    return Rollout(prompt, **{name: value for name, value in row.items() if name in known})
