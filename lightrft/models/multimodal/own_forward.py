"""Score a batch by the model's own forward, for families whose features replace no embeddings.

Rows are padded. There is one call for each prompt and its responses, whose media have one shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrft.models.attention.embedding_noise import noisy_embeddings
from lightrft.models.attention.layouts import Packed, pack
from lightrft.models.logprobs import head_input
from lightrft.models.multimodal.merge_inputs import is_sharded, own_inputs, zero_of_parameters
from lightrft.types import Batch
from lightrft.utils.errors import ModelError

if TYPE_CHECKING:
    from lightrft.models.actor import Backbone


def states_by_own_forward(backbone: Backbone, batch: Batch, final: bool) -> tuple[Tensor, Packed]:
    """Return the last hidden states ``[S * T, H]``, and their call as ``padded`` rows.

    Args:
        backbone: The model.
        batch: Prompts and responses, on its device.
        final: Also compute each response's last token.

    Raises:
        ModelError: Ranks shard weights, and would make unequal numbers of calls.
    """
    model, reader = backbone.base, backbone.family.reader
    # no such family has experts
    assert reader is not None and backbone.router_loss is None
    if any(is_sharded(parameter) for parameter in backbone.parameters()):
        raise ModelError(
            f"model type {model.config.model_type!r}: its own forward reads media, in one call for "
            "each prompt of a rank; set strategy.kind=ddp"
        )
    packed = pack(batch, "padded", final=final)
    if backbone.flops is not None and torch.is_grad_enabled():
        backbone.flops.add(packed)
    backbone.use_attention("padded")
    rows = rows_by_prompt(batch, final)
    calls = [_states(backbone, batch.select(index), final) for index in rows]
    if not calls:
        return backbone.decoder(**packed.inputs, use_cache=False).last_hidden_state[0], packed
    width = packed.input_ids.shape[1]
    padded = [nn.functional.pad(own, (0, 0, 0, width - own.shape[1])) for own in calls]
    states = torch.cat(padded)[torch.cat(rows).argsort()]
    if backbone.run_towers:
        states = states + zero_of_parameters(model, reader)
    return states.flatten(0, 1), packed


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
    taken: list[Tensor] = []

    def take(states: Tensor) -> Tensor:
        taken.append(states)
        return states[:, -1:]

    if backbone.experts is not None:
        backbone.experts.replay(packed.experts_of(packed.source))
    inputs = own_inputs(backbone.base, backbone.family, batch, packed)
    with (
        noisy_embeddings(backbone.base, packed.noise, packed.source),
        head_input(backbone.base.get_output_embeddings(), take),
    ):
        backbone.base(**inputs, use_cache=False)
    return taken[0]
