"""Sampling of the next token from logits: pure functions over ``[R, V]``, one row per response.

Every filter sets the logits that it removes to ``-inf``. Tokens are then sampled from the remaining
distribution, which also gives their log-probs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightrft.config.strategy import SamplingConfig
from lightrft.utils.token_filters import (
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
    wide_dtype,
)

# increment and multipliers of SplitMix64; other numbers would give other samples for a seed
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    return z ^ (z >> np.uint64(31))


def seed_keys(seeds: list[int]) -> np.ndarray:
    """Return uint64 keys ``[R]`` of integer ``seeds``.

    Hashing gives neighbouring seeds unrelated keys.
    """
    # numpy refuses to convert negative seeds to uint64
    unsigned = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    return _mix(unsigned + _GOLDEN)


def uniforms(keys: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return ``[R]`` float64 in [0, 1): one number per (key, step), independent of all other rows.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) is a counter-based generator: the n-th number is
    a hash of the counter.
    """
    bits = _mix(keys + (steps.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    # 52 bits, so that u * total < total for every float64 total.
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def of_first_token(sampling: SamplingConfig) -> SamplingConfig:
    """Return the settings of the first token of a response (FIRE, arXiv 2410.21236)."""
    if sampling.first_token_temperature is None:
        return sampling
    return sampling.model_copy(update={"temperature": sampling.first_token_temperature})


def process(
    logits: Tensor,
    sampling: SamplingConfig,
    seen: Tensor | None = None,
    suppress: Tensor | None = None,
) -> Tensor:
    """Return the logits of the distribution to sample from, ``[R, V]`` float32.

    At temperature 0 only the repetition penalty and ``suppress`` apply, since the other filters do
    not move the maximum.

    Args:
        logits: ``[R, V]``, as the model returns them.
        sampling: Temperature, filters and repetition penalty.
        seen: ``[R, V]`` bool, tokens of the prompt and of the response so far. ``None`` applies no
            repetition penalty.
        suppress: ``[R, V]`` bool, tokens that must not be sampled at this step. ``None`` suppresses
            none.
    """
    # bfloat16 has eight significant bits, too few for the sums of top_p and for log-probs
    logits = logits.float()
    if seen is not None:
        logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
    if suppress is not None:
        # before top_k and top_p, so that these fill their sets with tokens that may be sampled
        logits = logits.masked_fill(suppress, -torch.inf)
    if sampling.temperature == 0:
        return logits
    if sampling.temperature != 1:
        # before top_p and min_p, whose sets depend on the temperature
        logits = logits / sampling.temperature
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p > 0:
        logits = keep_min_p(logits, sampling.min_p)
    return logits


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most likely token of each row and its log-prob at temperature 1, both ``[R]``.

    NaN stays NaN.

    Under a point mass, the log-prob would be 0 for every token and carry no information. Training
    scores greedy responses at temperature 1 too.
    """
    best, tokens = logits.max(-1)
    return tokens, best - torch.logsumexp(logits, -1)


def sample_tokens(logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Sample tokens ``[R]`` by inverse distribution function at ``u [R]`` in [0, 1).

    Return them with their log-probs ``[R]`` float32.

    A token of probability 0 is never sampled. Cumulative sums run over blocks of about sqrt(V)
    tokens, then inside the one block that was hit. So no ``[R, V]`` array is scanned in float64.
    """
    rows, vocabulary = logits.shape
    wide = wide_dtype(logits)
    size = 1 << max(0, (vocabulary - 1).bit_length() // 2)
    blocks = -(-vocabulary // size)
    top = logits.amax(-1, keepdim=True)
    weights = logits.new_empty(rows, blocks * size)
    if blocks * size > vocabulary:
        weights[:, vocabulary:] = 0
    # the largest weight is 1, so no sum overflows
    torch.exp(logits - top, out=weights[:, :vocabulary])
    weights = weights.view(rows, blocks, size)
    # Sum before the cast: a sum straight to float64 would first copy [R, V] to float64.
    outer = torch.cumsum(weights.sum(-1).to(wide), dim=-1)
    target = u.to(wide).unsqueeze(-1) * outer[:, -1:]
    block = _first_above(outer, target)
    # the cumulative sum before the block that was hit
    below = torch.where(block > 0, outer.gather(-1, (block - 1).clamp_(min=0)), 0)
    hit = weights.gather(1, block.unsqueeze(-1).expand(-1, -1, size))[:, 0]
    inner = torch.cumsum(hit.to(wide), dim=-1)
    tokens = (block * size + _first_above(inner, target - below)).clamp_(max=vocabulary - 1)
    logprobs = (logits.gather(-1, tokens) - top).to(wide) - outer[:, -1:].log()
    return tokens[:, 0], logprobs[:, 0].float()


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the ``[R, 1]`` index of the first of ``cumulative [R, n]`` above ``target [R, 1]``;
    never one of weight 0.

    Rounding can put the target at or past the end: then return the last index of positive weight.
    NaN gives some valid index.
    """
    # the first place that reaches the total is the last one of positive weight
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    found = torch.minimum(torch.searchsorted(cumulative, target, right=True), last)
    return found.clamp_(max=cumulative.shape[-1] - 1)
