"""What was drawn, as plain data: answers that wait for their step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightrft.trainer.account import Collected
from lightrft.types import Prompt, Rollout

FindPrompts = Callable[[Sequence[str]], list[Prompt]]
"""Prompts of the run's data set by their ids."""


def pack_rollout(rollout: Rollout) -> dict[str, Any]:
    """``rollout`` as plain data, with the id of its prompt in place of the prompt."""
    fields = {f.name: getattr(rollout, f.name) for f in dataclasses.fields(rollout)}
    return {**fields, "prompt": rollout.prompt.id}


def unpack_rollouts(packed: Sequence[Mapping[str, Any]], find: FindPrompts) -> list[Rollout]:
    """The inverse of ``pack_rollout``. Answers to one prompt share one object again, since groups are told by it."""
    ids = list(dict.fromkeys(fields["prompt"] for fields in packed))
    prompts = dict(zip(ids, find(ids), strict=True))
    whole: list[dict[str, Any]] = [{**fields, "prompt": prompts[fields["prompt"]]} for fields in packed]
    return [Rollout(**fields) for fields in whole]


def pack_collected(collected: Collected) -> dict[str, Any]:
    """``collected``, settled, as plain data; groups name their answers by place."""
    place = {id(rollout): i for i, rollout in enumerate(collected.rollouts)}
    fields = {f.name: getattr(collected, f.name) for f in dataclasses.fields(collected)}
    packed = {name: dict(value) if isinstance(value, Counter) else value for name, value in fields.items()}
    groups = [[place[id(rollout)] for rollout in group] for group in collected.groups]
    return {**packed, "rollouts": [pack_rollout(r) for r in collected.rollouts], "groups": groups}


def unpack_collected(packed: Mapping[str, Any], find: FindPrompts) -> Collected:
    """The inverse of ``pack_collected``."""
    rollouts = unpack_rollouts(packed["rollouts"], find)
    whole: dict[str, Any] = {n: Counter(value) if isinstance(value, dict) else value for n, value in packed.items()}
    whole |= {"rollouts": rollouts, "groups": [[rollouts[i] for i in group] for group in packed["groups"]]}
    return Collected(**whole)
