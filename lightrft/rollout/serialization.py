"""Save rollouts as plain data, and batches as files from which any phase can be rerun."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightrft.rollout.accounting import CollectedRollouts
from lightrft.types import Batch, ExpertChoices, Prompt, Ragged, Rollout, Segments
from lightrft.utils.atomic_files import is_disk_full
from lightrft.utils.errors import CheckpointError, ResourceError
from lightrft.utils.state_io import SUFFIX, State, load_state, save_state

FORMAT = "lightrft-batch/1"

COUNTS = {f.name for f in dataclasses.fields(CollectedRollouts) if f.default_factory is Counter}

PackedRollout = dict[str, Any]
"""The fields of a rollout as plain data, with the id of its prompt in place of the prompt."""

FindPrompts = Callable[[Sequence[str]], list[Prompt]]
"""Finds prompts of the run's data set by their ids."""


def pack_rollout(rollout: Rollout) -> PackedRollout:
    """Return ``rollout`` as plain data."""
    fields = {f.name: getattr(rollout, f.name) for f in dataclasses.fields(rollout)}
    experts = rollout.experts
    if experts is not None:
        fields["experts"] = {"prompt": experts.prompt, "response": experts.response}
    return {**fields, "prompt": rollout.prompt.id}


def unpack_rollouts(packed: Sequence[PackedRollout], find: FindPrompts) -> list[Rollout]:
    """Invert ``pack_rollout``.

    Responses to one prompt share one prompt object again, since its identity defines groups.
    """
    ids = list(dict.fromkeys(fields["prompt"] for fields in packed))
    prompts = dict(zip(ids, find(ids), strict=True))
    return [unpack_rollout(fields, prompts[fields["prompt"]]) for fields in packed]


def unpack_rollout(packed: PackedRollout, prompt: Prompt) -> Rollout:
    """Invert ``pack_rollout`` for a response to ``prompt``."""
    whole: State = {**packed, "prompt": prompt}
    if packed.get("experts") is not None:
        whole["experts"] = ExpertChoices(**packed["experts"])
    return Rollout(**whole)


def pack_collected(collected: CollectedRollouts) -> State:
    """Return a settled ``CollectedRollouts`` as plain data; groups refer to responses by index."""
    place = {id(rollout): i for i, rollout in enumerate(collected.rollouts)}
    # Groups carried in from an earlier step are not among the rollouts of this one.
    earlier: list[Rollout] = []
    groups: list[list[int]] = []
    for group in collected.groups:
        for rollout in group:
            if id(rollout) not in place:
                place[id(rollout)] = len(collected.rollouts) + len(earlier)
                earlier.append(rollout)
        groups.append([place[id(rollout)] for rollout in group])
    packed: State = {}
    for field in dataclasses.fields(collected):
        value = getattr(collected, field.name)
        packed[field.name] = dict(value) if field.name in COUNTS else value
    packed["groups"] = groups
    packed["rollouts"] = [pack_rollout(r) for r in collected.rollouts]
    packed["earlier"] = [pack_rollout(r) for r in earlier]
    return packed


def unpack_collected(packed: State, find: FindPrompts) -> CollectedRollouts:
    """Invert ``pack_collected``."""
    # In one call, so that responses of both lists to one prompt share its prompt object.
    found = unpack_rollouts([*packed["rollouts"], *packed["earlier"]], find)
    whole: State = {}
    for field in dataclasses.fields(CollectedRollouts):
        value = packed[field.name]
        whole[field.name] = Counter(value) if field.name in COUNTS else value
    whole["rollouts"] = found[: len(packed["rollouts"])]
    whole["groups"] = [[found[i] for i in group] for group in packed["groups"]]
    return CollectedRollouts(**whole)


def save_batch(path: Path, batch: Batch) -> None:
    """Write ``batch`` as ``<path>.pt``. The file appears when it is complete.

    Raises:
        ResourceError: If the disk is full.
    """
    batch = batch.to("cpu")
    columns = {axis: batch.columns(axis) for axis in ("token", "sample")}
    parts = {name: _segments_state(getattr(batch, name)) for name in ("prompts", "responses")}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    written = temporary.with_name(temporary.name + SUFFIX)
    try:
        named = {"prompt_of": batch.prompt_of, "term_names": list(batch.term_names)}
        save_state(temporary, {"format": FORMAT, **parts, **named, **columns})
        written.replace(path.with_name(path.name + SUFFIX))
    except Exception as error:
        written.unlink(missing_ok=True)
        if is_disk_full(error):
            raise ResourceError(
                f"{path} was not saved: the disk is full; free some space, or set "
                "log.batches_every=0"
            ) from error
        raise


def load_batch(path: Path) -> Batch:
    """Load a batch that ``save_batch`` wrote at ``path``.

    Raises:
        CheckpointError: If the file is not such a batch.
    """
    state = load_state(path)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path}{SUFFIX} is not a batch of {FORMAT}")
    prompts = _segments_of(state["prompts"])
    responses = _segments_of(state["responses"])
    # The file may be from a version whose batches have other columns.
    try:
        batch = Batch(prompts, responses, state["prompt_of"], **state["token"], **state["sample"])
        return dataclasses.replace(batch, term_names=tuple(state.get("term_names", ())))
    except TypeError as error:
        raise CheckpointError(
            f"{path}{SUFFIX} has columns that batches do not have here: {error}"
        ) from None


def _segments_state(segments: Segments) -> State:
    media = {
        name: {"values": rows.values, "lengths": rows.lengths}
        for name, rows in segments.media.items()
    }
    state: State = {"tokens": segments.tokens, "lengths": segments.lengths, "media": media}
    return state if segments.experts is None else {**state, "experts": segments.experts}


def _segments_of(state: State) -> Segments:
    media = {name: Ragged(**rows) for name, rows in state["media"].items()}
    return Segments(state["tokens"], state["lengths"], media, experts=state.get("experts"))


def with_outcomes(batch: Batch, collected: CollectedRollouts) -> Batch:
    """Restore the rewards of ``batch`` as they were scored.

    The phase ``advantages`` starts from them and replaces them.
    """
    scored = [r.reward for group in collected.groups for r in group]
    return batch.replace(rewards=torch.tensor(scored, dtype=torch.float64))
