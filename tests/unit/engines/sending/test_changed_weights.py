"""Which weights are sent to an engine, and in which dtype."""

from __future__ import annotations

import torch

from lightrft.engines.fingerprint import HeldDtypes, changed_weights, checksum

HELD = HeldDtypes({"a": torch.bfloat16}, of_matrices=torch.float16)


def test_a_weight_has_the_dtype_of_its_name_or_that_of_matrices() -> None:
    matrix, vector = torch.ones(2, 2), torch.ones(2)
    assert HELD.convert("a", matrix).dtype == HELD.convert("a", vector).dtype == torch.bfloat16
    assert HELD.convert("b", matrix).dtype == torch.float16
    assert HELD.convert("b", vector).dtype == torch.float32
    assert HELD.convert("a", matrix.long()).dtype == torch.int64
    assert HeldDtypes().convert("b", matrix) is matrix


def test_weights_that_the_engine_starts_with_or_was_sent_are_left_out() -> None:
    start = {"a": checksum(torch.ones(2, 2).bfloat16())}
    sums: dict[str, str] = {}

    def sent(scale: float, *, all_of_them: bool = False) -> list[str]:
        weights = {"a": torch.ones(2, 2), "b": torch.full((2, 2), scale)}
        found = changed_weights(weights.items(), sums, HELD, start=start, all_of_them=all_of_them)
        return [name for name, _ in found]

    assert sent(1.0) == ["b"]
    assert sent(1.0) == sent(1 + 1e-6) == []
    assert sent(2.0) == ["b"]
    assert sent(2.0, all_of_them=True) == ["a", "b"]
    assert sums == {**start, "b": checksum(torch.full((2, 2), 2.0).half())}
