"""Weights as bytes: what is sent arrives, in buckets of bounded size, and malformed buckets are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.engines.served.weight_buckets import SIZE, read_bucket, weight_buckets
from lightrft.engines.weight_transport import WeightBuffer
from lightrft.utils.errors import DataError

WEIGHTS = {
    "large": torch.randn(70, 33),
    "half": torch.randn(40, 3).bfloat16(),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}


def bucket(**changed: Any) -> bytes:
    entry = {"name": "half", "dtype": "bfloat16", "shape": [40, 3], "first": 0, "count": 8, "at": 0}
    header = json.dumps([{**entry, **changed}]).encode()
    return len(header).to_bytes(SIZE, "little") + header + bytes(8)


@pytest.mark.parametrize("most", [1024, 100_000])
def test_weights_arrive_bit_for_bit_in_buckets_of_bounded_size(most: int) -> None:
    found: dict[str, Tensor] = {}
    buffer = WeightBuffer(lambda weights: found.update(weights))
    buckets = list(weight_buckets(WEIGHTS.items(), most))
    assert max(map(len, buckets)) <= most
    assert (len(buckets) > 1) == (most == 1024)
    for one in buckets:
        buffer.put(*read_bucket(one, SHAPES))
    assert found.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize(
    "wrong",
    [
        bucket(name="other"),
        bucket(shape=[3, 40]),
        bucket(first=240),
        bucket(count=1000),
        bucket(at=4),
        bucket(at=-1),
        bucket(first=True),
        bucket(dtype="load"),
        bucket(dtype=None),
        bucket()[:30],
        b"",
        b"\xff" * 64,
    ],
)
def test_a_malformed_bucket_is_refused(wrong: bytes) -> None:
    with pytest.raises(DataError):
        read_bucket(wrong, SHAPES)


def test_a_bucket_of_a_whole_slice_is_read() -> None:
    values, [piece] = read_bucket(bucket(), SHAPES)
    assert (piece.name, piece.count, len(values)) == ("half", 8, 8)
