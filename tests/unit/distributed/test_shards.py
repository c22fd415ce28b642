"""Parts of tensors that lie on one of several ranks."""

from __future__ import annotations

import pytest
import torch

from lightrft.distributed.shards import LocalShard, _runs, flat_blocks, local_shard_of

SHAPES = [(), (7,), (5, 3), (4, 1, 3), (3, 2, 2, 5), (0, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_stretches_of_a_flattened_tensor_are_filled_from_blocks_of_the_whole(shape, count):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    size = -(-whole.numel() // count)
    padded = torch.nn.functional.pad(whole.flatten(), (0, size * count - whole.numel()), value=-1)
    for rank in range(count):
        part = torch.full((size,), -1)
        for index, values in LocalShard(shape, flat_blocks(shape, rank * size, part)).pieces(16):
            values.copy_(whole[index])
        assert torch.equal(part, padded[rank * size :][:size])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 8, 40, 10**6])
def test_pieces_are_no_larger_than_asked_for_and_cover_all(shape, size):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    copy = torch.full_like(whole, -1)
    for index, values in local_shard_of(copy).pieces(size):
        assert values.numel() * 8 <= max(size, 8)
        values.copy_(whole[index])
    assert torch.equal(copy, whole)


def test_of_a_strided_split_each_rank_has_a_stretch_of_every_group():
    assert _runs(10, [(2, 1, 2)]) == [(slice(3, 5), slice(0, 2)), (slice(8, 10), slice(2, 4))]
    assert _runs(10, [(2, 1, 2), (1, 1, 2)]) == [(slice(8, 10), slice(0, 2))]
    assert _runs(3, [(1, 3, 4)]) == []
