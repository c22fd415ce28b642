"""Score a batch by the model's own forward, for families whose features replace no embeddings.

Rows are padded. There is one call for each prompt and its responses, whose media have one shape.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from lightrft.models.attention.embedding_noise import noisy_embeddings
from lightrft.models.attention.layouts import Packed, pack
from lightrft.models.families import Family
from lightrft.models.logprobs import head_input
from lightrft.models.multimodal.blanks import blank_run, check_calls
from lightrft.models.multimodal.merge_inputs import (
    given,
    own_inputs,
    zero_of_parameters,
)
from lightrft.models.multimodal.towers import ModalityEncoder
from lightrft.types import Batch, Segments

if TYPE_CHECKING:
    from lightrft.models.actor import Backbone


def states_by_own_forward(backbone: Backbone, batch: Batch, final: bool) -> tuple[Tensor, Packed]:
    """Return the last hidden states ``[S * T, H]``, and their call as ``padded`` rows.

    Args:
        backbone: The model.
        batch: Prompts and responses, on its device.
        final: Also compute each response's last token.

    Raises:
        ModelError: Weights are sharded by another program, in which ranks would make unequal calls.
    """
    model, reader = backbone.base, backbone.family.reader
    # no such family has experts
    assert reader is not None and backbone.router_loss is None
    check_calls(model, backbone.equal_calls)
    packed = pack(batch, "padded", final=final)
    if backbone.flops is not None and torch.is_grad_enabled():
        backbone.flops.add(packed)
    backbone.use_attention("padded")
    rows = _rows_by_kinds(reader, batch, final)
    blanks = backbone.equal_calls.missing(_blank_calls(batch, rows))
    width = packed.input_ids.shape[1]
    found, idle = [], []
    for kinds in sorted(rows.keys() | blanks.keys()):
        for index in rows.get(kinds, ()):
            own = _states(backbone, batch.select(index), final)
            found.append(nn.functional.pad(own, (0, 0, 0, width - own.shape[1])))
        for blank in blanks.get(kinds, ()):
            idle.append(_states(backbone, blank.to(backbone.device), final))
    if found:
        order = torch.cat([index for each in sorted(rows) for index in rows[each]]).argsort()
        states = torch.cat(found)[order]
    else:
        head: Any = model.get_output_embeddings()
        states = head.weight.new_zeros(*packed.input_ids.shape, head.weight.shape[1])
    if torch.is_grad_enabled() and (backbone.run_towers or not found):
        states = states + zero_of_parameters(model, reader)
    # times 0, not detached: the blanks must run backward too
    return sum((0 * each.sum() for each in idle), states).flatten(0, 1), packed


def _rows_by_kinds(
    reader: ModalityEncoder, batch: Batch, final: bool
) -> dict[tuple[str, ...], list[Tensor]]:
    """Return the rows of each call, by the kinds of media that the call reads."""
    found: dict[tuple[str, ...], list[Tensor]] = {}
    for index in rows_by_prompt(batch, final):
        call = batch.select(index)
        media = Segments.cat([call.prompts, call.responses]).media
        kinds = tuple(tower.kind for tower in reader.towers if given(tower, media))
        found.setdefault(kinds, []).append(index)
    return found


def _blank_calls(
    batch: Batch, rows: dict[tuple[str, ...], list[Tensor]]
) -> dict[tuple[str, ...], tuple[int, Batch]]:
    """Return the number of calls of each kind, and a blank row for one."""
    calls = {}
    for kinds, found in rows.items():
        one = batch.select(found[0][:1])
        blank = Batch(blank_run(one.prompts), blank_run(one.responses), one.prompt_of.cpu())
        calls[kinds] = len(found), blank
    return calls


def rows_by_prompt(batch: Batch, final: bool) -> list[Tensor]:
    """Return the responses of each prompt, whose media have one shape.

    Responses with media of their own are alone.

    Args:
        batch: Prompts and responses.
        final: Keep responses without tokens, whose last state is read too.
    """
    media = batch.responses.media.values()
    found: dict[tuple[int, int], list[int]] = {}
    for b, (prompt, tokens) in enumerate(zip(batch.groups, batch.responses.sizes)):
        if tokens or final:
            is_rich = any(int(rows.lengths[b]) for rows in media)
            found.setdefault((prompt, b if is_rich else -1), []).append(b)
    return [torch.tensor(rows, device=batch.prompt_of.device) for rows in found.values()]


def _states(backbone: Backbone, batch: Batch, final: bool) -> Tensor:
    """Return the last hidden states ``[S, T, H]``: what the head reads in one call."""
    packed = pack(batch, "padded", final=final)
    if backbone.experts is not None:
        backbone.experts.replay(packed.experts_of(packed.source))
    inputs = own_inputs(backbone.base, backbone.family, batch, packed)
    with (
        _towers_once(backbone.base, backbone.family, len(packed.input_ids)),
        noisy_embeddings(backbone.base, packed.noise, packed.source),
    ):
        return states_of_call(backbone.base, inputs)


def states_of_call(model: PreTrainedModel, inputs: Mapping[str, object]) -> Tensor:
    """Return what the head reads ``[S, T, H]`` in one call of the model's own forward.

    Args:
        model: The transformers model.
        inputs: Keywords of the call.
    """
    taken: list[Tensor] = []

    def take(states: Tensor) -> Tensor:
        taken.append(states)
        return states[:, -1:]

    with head_input(model.get_output_embeddings(), take):
        model(**inputs, use_cache=False)
    return taken[0]


@contextmanager
def _towers_once(model: PreTrainedModel, family: Family, rows: int) -> Generator[None]:
    """Run each tower once for ``rows`` equal rows of media, and repeat its outputs.

    The media of all rows follow each other along the first axis of each tensor. A module whose
    inputs differ between rows, such as token ids, runs on all of them.
    """
    repeats: set[nn.Module] = set()

    def before(module: nn.Module, *given: Any) -> Any:
        tensors = [values for values in tree_leaves(given) if isinstance(values, Tensor)]
        if not all(_repeats(values, rows) for values in tensors):
            return None
        repeats.add(module)
        return tree_map(
            lambda values: values[: len(values) // rows] if isinstance(values, Tensor) else values,
            given,
        )

    def after(module: nn.Module, given: Any, made: Any) -> Any:
        if module not in repeats:
            return made
        repeats.remove(module)
        return tree_map(
            lambda values: (
                values.repeat(rows, *[1] * (values.ndim - 1))
                if isinstance(values, Tensor)
                else values
            ),
            made,
        )

    handles = []
    if rows > 1 and family.reader is not None:
        for name, module in model.named_modules():
            if f"{name}." in family.reader.parts["tower"]:
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _repeats(values: Tensor, rows: int) -> bool:
    """Return ``True`` if ``values`` are ``rows`` equal parts along the first axis."""
    if values.ndim == 0 or len(values) % rows:
        return False
    parts = values.unflatten(0, (rows, -1))
    return bool((parts == parts[:1]).all())
