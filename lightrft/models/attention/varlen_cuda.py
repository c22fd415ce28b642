"""Variable-length attention kernels of CUDA devices.

The keys that each run attends to are gathered per run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightrft.utils.device_transfer import to_device

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Keys:
    """Gathered queries and keys of all runs, in order.

    Attributes:
        query_index: ``[Q]`` row index of each query. ``None`` for all rows in order.
        key_index: ``[K]`` row index of each key. ``None`` for all rows in order.
        query_starts: ``[runs + 1]`` start of each run among the queries.
        key_starts: ``[runs + 1]`` start of each run among the keys.
        longest_query: Queries of the longest run.
        longest_key: Keys of the longest run.
    """

    query_index: Tensor | None
    key_index: Tensor | None
    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int


@cache
def kernel() -> Callable[..., Any] | None:
    """Return torch's variable-length attention, or ``None``.

    It must support a scale and a window.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    # older versions of torch have the function without these arguments
    return varlen_attn if {"scale", "window_size"} <= arguments(varlen_attn) else None


@cache
def arguments(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the arguments of ``function``."""
    return frozenset(inspect.signature(function).parameters)


def usable(query: Tensor, value: Tensor, softcap: float | None) -> bool:
    """Return ``True`` if the kernel supports these inputs.

    It needs half precision on CUDA, no soft-cap, and equal head widths up to 256.

    Args:
        query: ``[1, H, T, d]``.
        value: ``[1, H_kv, T, d]``.
        softcap: Soft-cap of the scores. ``None`` for none.
    """
    if not query.is_cuda or softcap is not None:
        return False
    if query.dtype not in (torch.bfloat16, torch.float16):
        return False
    if query.shape[-1] != value.shape[-1] or query.shape[-1] > 256:
        return False
    return kernel() is not None


def gather_keys(
    runs: Sequence[Run],
    shared: Sequence[tuple[Run, Sequence[Run]]],
    device: torch.device,
) -> Keys:
    """Gather each run of ``runs`` with the earlier run that it attends to, if any.

    Args:
        runs: Start and length of each run.
        shared: Pairs of a key run and the runs that also attend to it.
        device: Device of the result.
    """
    earlier: dict[Run, Run] = {}
    for key, queries in shared:
        earlier |= dict.fromkeys(queries, key)
    pieces: list[Run] = []
    key_counts = []
    for run in runs:
        # the earlier run comes first, so that causality from the lower right holds
        own = [earlier[run], run] if run in earlier else [run]
        pieces += own
        key_counts.append(sum(n for _, n in own))
    query_counts = [n for _, n in runs]

    def positions(parts: Sequence[Run]) -> Tensor | None:
        first, lengths = torch.tensor(parts).unbind(1)
        ends = lengths.cumsum(0)
        index = torch.arange(int(ends[-1])) + (first - ends + lengths).repeat_interleave(lengths)
        # to gather all rows in order would only copy them, in each layer and its backward pass
        in_order = torch.equal(index, torch.arange(sum(query_counts)))
        return None if in_order else to_device(index, device)

    def starts(lengths: Sequence[int]) -> Tensor:
        # the kernel takes offsets as int32
        return to_device(torch.tensor([0, *lengths]).cumsum(0).int(), device)

    return Keys(
        query_index=positions(runs),
        key_index=positions(pieces),
        query_starts=starts(query_counts),
        key_starts=starts(key_counts),
        longest_query=max(query_counts),
        longest_key=max(key_counts),
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Keys,
    scale: float,
    window: int | None,
) -> Tensor:
    """Return attention ``[1, T, H, d]``, causal from the lower right.

    Args:
        query: ``[1, H, T, d]``.
        key: ``[1, H_kv, T, d]``.
        value: ``[1, H_kv, T, d]``.
        keys: Queries and keys of each run.
        scale: Factor of the scores.
        window: Number of keys that a query attends to, itself included. ``None`` is unlimited.
    """
    run = kernel()
    assert run is not None
    q = _rows(query, keys.query_index)
    k, v = (_rows(x, keys.key_index) for x in (key, value))
    bounds = keys.query_starts, keys.key_starts, keys.longest_query, keys.longest_key
    # the kernel counts earlier keys without the query itself; -1 is unlimited
    back = -1 if window is None else window - 1
    # torch 2.11 has no such argument, and takes fewer key heads as they are
    named = "enable_gqa" in arguments(run)
    grouped = {"enable_gqa": q.shape[1] > k.shape[1]} if named else {}
    out = run(q, k, v, *bounds, scale=scale, window_size=(back, 0), **grouped)
    if keys.query_index is not None:
        # every token is a query of exactly one run, so no row stays uninitialised
        out = torch.empty_like(out).index_copy(0, keys.query_index, out)
    return out.unsqueeze(0)


def _rows(x: Tensor, index: Tensor | None) -> Tensor:
    """Return the rows ``index`` of ``x [1, H, T, d]`` as ``[n, H, d]``."""
    rows = x[0].transpose(0, 1)
    return rows if index is None else rows.index_select(0, index)
