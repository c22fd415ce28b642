"""What the CUDA kernel is given, by a slow kernel with the arguments of each version of torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lightrft.models.attention import varlen_cuda
from tests.unit.models.attention.test_segment_plan import WINDOWS, dense, plan_of, visible


def one_run(query: Tensor, key: Tensor, value: Tensor, scale: float, back: int) -> Tensor:
    """Attention of one run, causal from the lower right. A token sees ``back`` keys before it."""
    at = torch.arange(len(query))[:, None] + len(key) - len(query)
    keys = torch.arange(len(key))
    mask = (keys <= at) & ((keys >= at - back) | (back < 0))
    heads_first = (x.transpose(0, 1)[None] for x in (query, key, value))
    return dense(*heads_first, mask, scale, None)[0]


def without_grouped_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """The arguments of torch 2.11, which takes fewer key heads without a word."""
    assert window_size[1] == 0
    times = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    starts, ends = query_starts.tolist(), key_starts.tolist()
    assert longest_query == query_starts.diff().max() and longest_key == key_starts.diff().max()
    rows = [
        one_run(query[a:b], key[c:d], value[c:d], scale, window_size[0])
        for a, b, c, d in zip(starts, starts[1:], ends, ends[1:])
    ]
    return torch.cat(rows)


def with_grouped_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *bounds: object,
    enable_gqa: bool = False,
    **more: object,
) -> Tensor:
    """The arguments of torch 2.13."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return without_grouped_heads(query, key, value, *bounds, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kernel", [without_grouped_heads, with_grouped_heads])
def test_the_kernel_of_each_torch_attends_as_the_mask_says_forward_and_backward(
    kernel: object, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen_cuda, "kernel", lambda: kernel)
    rows = [([7, 3, 5], [[4, 1], [], [6]]), ([7, 3, 5], [[], [], []])]
    for window, (prompts, answers) in itertools.product(WINDOWS, rows):
        mask, positions = visible(prompts, answers, [], window)
        generator = torch.Generator().manual_seed(0)
        shapes = [(1, heads, len(positions), 8) for heads in (4, kv_heads, kv_heads)]
        inputs = [
            torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
            for shape in shapes
        ]
        plan = plan_of(prompts, answers, [], positions)
        keys = varlen_cuda.gather_keys(plan.runs, plan.shared, positions.device)
        found = varlen_cuda.attend(*inputs, keys, 0.3, window)
        expected = dense(*inputs, mask, 0.3, None)
        weight = torch.randn(found.shape, dtype=torch.float64, generator=generator)
        grads = torch.autograd.grad((found * weight).sum(), inputs)
        truth = torch.autograd.grad((expected * weight).sum(), inputs)
        assert (found - expected).abs().max() < 1e-12
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(grads, truth))


def test_rows_that_are_in_order_are_not_gathered() -> None:
    runs, prompt = [(0, 7), (7, 3), (10, 5)], (0, 7)
    alone = varlen_cuda.gather_keys(runs, [], torch.device("cpu"))
    assert alone.query_index is None and alone.key_index is None
    shared = varlen_cuda.gather_keys(runs, [(prompt, runs[1:])], torch.device("cpu"))
    assert shared.query_index is None and shared.key_index is not None
    expected = [*range(7), *range(7), *range(7, 10), *range(7), *range(10, 15)]
    assert shared.key_index.tolist() == expected
    turned = varlen_cuda.gather_keys(runs[::-1], [], torch.device("cpu"))
    assert turned.query_index is not None
    assert turned.query_index.tolist() == [*range(10, 15), *range(7, 10), *range(7)]


def test_the_installed_torch_has_the_kernel() -> None:
    assert varlen_cuda.kernel() is not None
