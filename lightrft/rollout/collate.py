"""Collate scored groups to a batch without padding, with each prompt stored once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from lightrft.types import Attachment, Batch, Rollout, Segments
from lightrft.utils.errors import RewardError


def collate(
    groups: Sequence[Sequence[Rollout]],
    dtype: torch.dtype = torch.float32,
    costs: Sequence[str] = (),
) -> Batch:
    """Build one ``Batch`` of all responses, group after group.

    Every response must be scored. Either all responses have a baseline or none has. Reward terms
    become columns, sorted by name.

    Args:
        groups: The responses of each prompt.
        dtype: Type of the log-probs.
        costs: Names of the terms that become the columns of ``Batch.costs``.
    """
    rollouts = list(chain.from_iterable(groups))
    prompts = [group[0].prompt for group in groups]
    prompt_of: list[int] = []
    for index, group in enumerate(groups):
        prompt_of += [index] * len(group)
    names = _term_names(rollouts)
    terms, weights = _reward_terms(rollouts, names)
    # The policy's oldest token decides how stale a response is.
    oldest = [min(r.versions, default=0) for r in rollouts]
    truncated = [r.finish_reason == "length" for r in rollouts]
    asked, answered = Segments.of_prompts(prompts), Segments.of([r.token_ids for r in rollouts])
    asked.experts, answered.experts = _experts(groups)
    return Batch(
        asked,
        answered,
        torch.tensor(prompt_of, dtype=torch.long),
        sampled=_flat([r.sampled for r in rollouts], torch.bool),
        behavior_logprobs=_flat([r.logprobs for r in rollouts], dtype),
        versions=_flat([r.versions for r in rollouts], torch.long),
        sample=torch.tensor([r.sample for r in rollouts], dtype=torch.long),
        # Python floats are doubles: keep rewards exactly as they were scored. Distillation has none.
        rewards=torch.tensor(
            [math.nan if r.reward is None else r.reward for r in rollouts], dtype=torch.float64
        ),
        baselines=_baselines(rollouts),
        step_rewards=_step_rewards(rollouts),
        terms=terms,
        term_weights=weights,
        term_names=tuple(names),
        costs=_costs(rollouts, costs),
        version=torch.tensor(oldest, dtype=torch.long),
        truncated=torch.tensor(truncated, dtype=torch.bool),
    )


def attached(rollouts: Iterable[Rollout]) -> list[Attachment]:
    """Return the attachments of the prompts of ``rollouts``, each once."""
    found: dict[str, Attachment] = {}
    for rollout in rollouts:
        for attachment in rollout.prompt.attachments:
            found[attachment.name] = attachment
    return list(found.values())


def _flat(rows: Iterable[Iterable[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)


def _experts(groups: Sequence[Sequence[Rollout]]) -> tuple[Tensor | None, Tensor | None]:
    """Return the experts of the tokens of prompts and of responses; ``None`` without any.

    The prompt of a group is computed once in training. It takes the experts of the newest response,
    since responses of a group that was interrupted have prompts of several policy versions.
    """
    rollouts = list(chain.from_iterable(groups))
    known = [r.experts for r in rollouts if r.experts is not None]
    if not known:
        return None, None
    shape = known[0].response.shape[1:]

    def unknown(tokens: int) -> Tensor:
        return torch.full((tokens, *shape), -1, dtype=torch.int16)

    prompts = []
    for group in groups:
        own = [r for r in group if r.experts is not None]
        newest = max(own, key=lambda r: max(r.versions, default=0), default=None)
        if newest is None or newest.experts is None:
            prompts.append(unknown(len(group[0].prompt.token_ids)))
        else:
            prompts.append(newest.experts.prompt)
    responses = [unknown(len(r)) if r.experts is None else r.experts.response for r in rollouts]
    return torch.cat(prompts), torch.cat(responses)


def _baselines(rollouts: Sequence[Rollout]) -> Tensor | None:
    values = [r.baseline for r in rollouts]
    if values.count(None) == len(values):
        return None
    # A missing value among others makes torch raise: the batch would be wrong.
    return torch.tensor(values, dtype=torch.float64)


def _costs(rollouts: Sequence[Rollout], names: Sequence[str]) -> Tensor | None:
    """Return the terms ``names`` of each response, ``[rows, names]``; ``None`` without names.

    Raises ``RewardError`` if a response lacks one.
    """
    if not names:
        return None
    for rollout in rollouts:
        if missing := [name for name in names if name not in rollout.terms]:
            raise RewardError(
                f"the cost {missing[0]!r} of algorithm.lagrangian.costs is missing for prompt "
                f"{rollout.prompt.id}, whose terms are {', '.join(rollout.terms) or 'none'}; "
                "name one of them"
            )
    values = [[rollout.terms[name] for name in names] for rollout in rollouts]
    return torch.tensor(values, dtype=torch.float64)


def _reward_terms(
    rollouts: Sequence[Rollout], names: Sequence[str]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the values and the weights of the terms ``[rows, terms]``; ``None`` without terms."""
    if not names:
        return None, None
    values = [[r.terms.get(name, math.nan) for name in names] for r in rollouts]
    weights = [[r.weights.get(name, 0.0) for name in names] for r in rollouts]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)


def _term_names(rollouts: Sequence[Rollout]) -> list[str]:
    """Return the names of the terms of the rewards, sorted."""
    names: set[str] = set()
    for rollout in rollouts:
        names |= rollout.weights.keys()
    # the order of a set differs between ranks
    return sorted(names)


def _step_rewards(rollouts: Sequence[Rollout]) -> Tensor | None:
    """Return the rewards of steps, ``[N]``, 0 at other tokens; ``None`` without any."""
    if not any(rollout.step_rewards for rollout in rollouts):
        return None
    rows: list[list[float]] = []
    for rollout in rollouts:
        row = [0.0] * len(rollout)
        for place, value in rollout.step_rewards:
            row[place] += value
        rows.append(row)
    return _flat(rows, torch.float64)
