"""Compare the layout of a model's inputs with the model's own padded forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from lightrft.config.model import Layout
from lightrft.models.families import attention_reach, context_length
from lightrft.models.logprobs import wide
from lightrft.models.multimodal.merge_inputs import misread
from lightrft.types import Batch, Segments
from lightrft.utils.errors import ModelError

if TYPE_CHECKING:
    from lightrft.models.actor import Actor

LAYOUTS: tuple[Layout, ...] = ("prefix_shared", "packed", "padded")
"""From the fastest to the most general, the order in which ``check_layout`` falls back."""

LONG_ROW = 8192
"""Upper bound, in tokens, of a row that ``check_layout`` builds to reach beyond a window. Longer
windows are not checked in a run."""

LONG_ROW_MARGIN = 64
"""Tokens of such a row beyond the window."""

LONG_ROW_BYTES = 2 * 2**30
"""Upper bound, in bytes, of the attention scores of such a row under an eager implementation.
Larger models are not checked under it."""


@torch.no_grad()
def check_layout(actor: Actor, batch: Batch) -> str:
    """Compare the layout of ``actor`` with the model's own padded forward.

    Fall back to the next layout until they agree.

    Checks a few rows of ``batch``. If the config bounds how far attention reaches, also checks one
    group of two longer rows. These have up to ``longest_row`` tokens, and at most ``LONG_ROW``.
    Returns the reasons for the fall-back; an empty string if there was none.

    Raises:
        ModelError: Even ``padded`` disagrees, so the family's head computes something unknown here.
    """
    batch = batch.to(actor.device)
    few = _few(batch, misread(actor.base, actor.family, batch))
    training = actor.training
    # dropout would make the two forwards differ
    actor.eval()
    reasons = []
    try:
        checks = []
        for rows in (few, *_long_rows(actor, few)):
            at = _compared(actor, rows)
            checks.append((rows, at, actor.own_logprobs(rows, at)))
        for layout in LAYOUTS[LAYOUTS.index(actor.layout) :]:
            for rows, at, truth in checks:
                why = _differs(actor, rows, layout, at, truth)
                if why:
                    reasons.append(f"layout {layout} {why}")
                    break
            else:
                actor.layout = layout
                return "; ".join([*reasons, f"using {layout} instead"]) if reasons else ""
    finally:
        actor.train(training)
    raise ModelError(
        f"model type {actor.base.config.model_type!r} cannot be scored: {'; '.join(reasons)}"
    )


def _long_rows(actor: Actor, batch: Batch) -> list[Batch]:
    """Return one group of two rows that reach beyond every window, made of tokens of ``batch``;
    empty if there is no window."""
    reach = attention_reach(actor.text_config, LONG_ROW - LONG_ROW_MARGIN)
    tokens = batch.responses.tokens
    if not reach or not len(tokens):
        return []
    length = min(
        reach + LONG_ROW_MARGIN,
        actor.longest_row or LONG_ROW,
        context_length(actor.base.config) or LONG_ROW,
    )
    # too short to cut responses off its end and still share a prompt
    if length < 16:
        return []
    # the eager implementation holds the scores of all heads in float32
    score_bytes = 4 * _most_heads(actor.text_config) * length**2
    if actor.padded_attention == "eager" and score_bytes > LONG_ROW_BYTES:
        return []
    row = tokens.repeat(length // len(tokens) + 1)[:length].tolist()
    prompts = Segments.of([row[8:]])
    # two responses of unequal length: prefix_shared shares the prompt, padded pads a row
    responses = Segments.of([row[:8], row[4:8]])
    return [Batch(prompts, responses, torch.zeros(2, dtype=torch.long)).to(actor.device)]


def _most_heads(config: PreTrainedConfig) -> int:
    """Return the largest number of attention heads of a layer, 0 for a model without attention."""
    # Some configs refuse one number for layers that differ. Older transformers knows no such ones.
    layers: Any = [config]
    if hasattr(config, "per_layer_config"):
        layers = config.per_layer_config
    return max(getattr(layer, "num_attention_heads", 0) for layer in layers)


def _compared(actor: Actor, batch: Batch) -> Tensor:
    """Return evenly spaced indices of response tokens whose logits fit into ``logits_mb``
    together."""
    tokens = batch.responses.tokens.numel()
    row_bytes = actor.text_config.vocab_size * wide(actor.base.dtype).itemsize
    limit = actor.config.logits_limit(actor.base.device.type)
    count = min(tokens, max(2, limit * 2**20 // row_bytes))
    # float32 counts no further than 2**24 exactly
    spaced = torch.linspace(0, max(0, tokens - 1), count, dtype=torch.float64)
    return spaced.round().long().to(batch.responses.tokens.device)


def _differs(actor: Actor, batch: Batch, layout: Layout, at: Tensor, truth: Tensor) -> str:
    before, actor.layout = actor.layout, layout
    try:
        found = actor.score(batch).logprobs[at]
    except (
        RuntimeError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        AssertionError,
        ModelError,
    ) as error:
        return f"failed with {type(error).__name__}: {error}"
    finally:
        actor.layout = before
    gap = (found - truth).abs()
    if not gap.numel():
        return ""
    is_exact = actor.base.dtype in (torch.float32, torch.float64)
    # in half precision single tokens differ by rounding, but their mean does not
    worst, bound = (gap.max(), 1e-3) if is_exact else (gap.mean(), 0.03)
    if float(worst) <= bound:
        return ""
    return f"differs from the model's own log-probs by {float(worst):.2g}"


def _few(batch: Batch, out: Tensor, rows: int = 4) -> Batch:
    """Return a few short rows, none of them in ``out [B]``.

    Rows with media and of the largest group come first, so that the check covers a shared prompt.
    """
    sizes = torch.bincount(batch.prompt_of, minlength=len(batch.prompts))
    media = sum((r.lengths for r in batch.prompts.media.values()), torch.zeros_like(sizes))
    # the first key decides: rows with tokens, with media, of large groups, of one prompt together
    of = batch.prompt_of
    keys = torch.stack([(batch.lengths == 0).long(), (media == 0).long()[of], -sizes[of], of], 1)
    order = sorted((~out).nonzero()[:, 0].tolist(), key=keys.tolist().__getitem__)
    return batch.select(torch.tensor(order[:rows], dtype=torch.long, device=of.device))
