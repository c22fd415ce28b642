"""The formulas of memory, with numbers worked out by hand."""

from __future__ import annotations

import pytest

from lightrft.diagnostics.memory import phases
from lightrft.diagnostics.memory.formulas import (
    MemoryPhase,
    ModelMemory,
    Parameters,
    ShardingFactors,
    collected,
    generation_phase,
    gradients,
    held,
    kept_by_blocks,
    key_value_cache,
    last_sum,
    layout_check,
    on_device,
    on_their_way,
    peak,
    recurrent_states,
    shown,
    size_of,
    tokens_held,
    unsharded_bytes,
)
from lightrft.models.tiny.text_families import TEXT_FAMILIES, family_config


def test_a_float32_model_that_is_trained_holds_its_weights_and_two_moments() -> None:
    assert held([Parameters(1000, 4, True)]) == ModelMemory(weights=4000, masters=0, moments=8000)


def test_half_precision_adds_float32_masters_and_what_is_frozen_holds_weights_alone() -> None:
    assert held([Parameters(1000, 2, True), Parameters(500, 4, False)]) == ModelMemory(
        weights=4000, masters=4000, moments=8000
    )


def test_shards_share_all_of_it() -> None:
    whole, half = (
        held([Parameters(1000, 2, True)]),
        held([Parameters(1000, 2, True)], ShardingFactors(2, 2, 2)),
    )
    assert (half.weights, half.masters, half.moments) == (1000, 2000, 4000)
    assert half.total == whole.total / 2 == 7000


def test_gradients_are_float32_over_their_shares_and_over_the_cut_of_those_that_are_cut() -> None:
    parameters = [
        Parameters(1000, 2, True, cut=True),
        Parameters(600, 4, True),
        Parameters(500, 4, False),
    ]
    assert gradients(parameters) == 6400
    assert gradients(parameters, ShardingFactors(4, 4, 4)) == 1600
    assert gradients(parameters, ShardingFactors(4, 4, 4, cut=2)) == 4 * (500 + 600) / 4 == 1100


def test_what_is_cut_is_a_part_of_each_share_and_the_rest_whole() -> None:
    cut = [Parameters(1000, 4, True, cut=True), Parameters(600, 4, True)]
    assert held(cut, ShardingFactors(2, 2, 2, cut=5)) == ModelMemory(
        weights=4 * (200 + 600) / 2, moments=8 * (200 + 600) / 2
    )


def test_weights_that_lie_in_float32_alone_have_no_masters() -> None:
    assert held(
        [Parameters(1000, 2, True), Parameters(500, 2, False)],
        ShardingFactors(2, 2, 2, precise=True),
    ) == ModelMemory(2500, 0, 4000)


def test_what_lies_in_the_hosts_memory_is_not_on_the_device() -> None:
    whole = ModelMemory(10, 20, 30)
    assert on_device(
        whole, ShardingFactors(on_host=("weights", "state", "gradients"))
    ) == ModelMemory(0, 0, 0)
    assert on_device(whole, ShardingFactors(on_host=("state",))) == ModelMemory(10, 0, 0)


def test_a_bucket_is_there_as_far_as_it_is_filled_on_a_cpu_and_whole_on_a_device() -> None:
    assert collected(1000, 300, touched=True) == collected(1000, 300, touched=False) == 4 * 600
    assert collected(100, 300, touched=True) == 4 * 200
    assert collected(100, 300, touched=False) == 4 * 400


def test_the_cache_has_a_key_and_a_value_in_every_layer() -> None:
    assert key_value_cache(10, [8, 8, 8], itemsize=2) == 10 * 2 * 24 * 2 == 960


def test_the_engine_holds_each_prompt_once_and_as_many_rows_as_fit() -> None:
    assert tokens_held(4, 4, 10, 20, budget=1000, max_rows=256) == (4 * 10 + 16 * 20, 16, 4)
    assert tokens_held(4, 4, 10, 20, budget=1000, max_rows=6) == (2 * 10 + 6 * 20, 6, 2)
    assert tokens_held(4, 4, 10, 20, budget=100, max_rows=256) == (90, 4, 1)
    assert tokens_held(4, 4, 10, 20, budget=5, max_rows=256) == (30, 1, 1)


def test_a_plain_block_keeps_norms_attention_and_the_four_arrays_of_its_mlp() -> None:
    """Two tokens, width 8, one key head of two, inner width 16: float32 is 2 x 8 x 12 for the norms and (24 + 8 + 64) x 4."""
    sizes = {"hidden": 8, "queries": 8, "keys": 4, "inner": 16}
    assert kept_by_blocks(2, 1, 4, **sizes) == 2 * (192 + 384) == 1152
    assert kept_by_blocks(2, 3, 2, **sizes) == 2 * 3 * (2 * 8 * 8 + 96 * 2) == 1920


def test_a_token_for_every_row_takes_scores_and_logits() -> None:
    assert (
        generation_phase(rows=2, heads=3, columns=5, vocabulary=7)
        == 4 * (3 * 2 * 3 * 5 + 4 * 2 * 7)
        == 584
    )


def test_the_layout_check_holds_the_logits_that_the_bound_allows_and_two_at_least() -> None:
    assert layout_check(8, vocabulary=10, itemsize=4, bound=1000) == 8 * 10 * 8 == 640
    assert layout_check(800, vocabulary=10, itemsize=4, bound=1000) == 25 * 10 * 8 == 2000
    assert layout_check(800, vocabulary=10, itemsize=2, bound=1000) == 25 * 10 * 10 == 2500
    assert layout_check(800, vocabulary=10, itemsize=4, bound=1) == 2 * 10 * 8 == 160


def test_two_blocks_of_a_sharded_model_are_whole_at_one_time_and_what_lies_outside() -> None:
    assert unsharded_bytes(100, [10, 30, 20]) == 150
    assert unsharded_bytes(100, [10, 30, 20], left=0.5) == 155
    assert unsharded_bytes(100, [10, 30, 20], left=1.0) == 160


def test_gradients_are_whole_outside_of_blocks_and_in_one_block_with_the_float32_copy_that_is_summed() -> (
    None
):
    assert on_their_way(100, [10, 30, 20], 4) == 100 + 30 + 30
    assert on_their_way(100, [10, 30, 20], 2) == 100 + 30 + 60
    assert last_sum(100, [10, 30, 20], 2) == 2 * 100 + 2 * 130


def test_the_peak_is_all_models_and_the_largest_phase() -> None:
    phases = [MemoryPhase("a", {"x": 3.0, "y": 4.0}), MemoryPhase("b", {"x": 5.0})]
    assert peak({"policy": ModelMemory(10, 1, 2), "reference": ModelMemory(20)}, phases) == (
        40.0,
        phases[0],
    )
    rested = [*phases, MemoryPhase("c", {"x": 9.0}, resting=3.0)]
    assert peak({"policy": ModelMemory(10, 1, 2)}, rested) == (20.0, phases[0])


def test_sizes_are_read_and_written() -> None:
    assert [size_of(text) for text in ("80GiB", "1.5 MiB", "2GB", "512KiB")] == [
        80 * 2**30,
        1572864,
        2 * 10**9,
        524288,
    ]
    assert [shown(size) for size in (3 * 2**30, 1.5 * 2**20, 2048)] == [
        "3.00 GiB",
        "1.50 MiB",
        "2 KiB",
    ]


@pytest.mark.parametrize("text", ["80", "a lot", "GiB", "xGiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|convert"):
        size_of(text)


def test_the_recurrent_states_of_mamba_and_rwkv_are_counted_by_row() -> None:
    mamba = {
        "model_type": "mamba",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "state_size": 16,
        "expand": 2,
    }
    assert recurrent_states(5, mamba) == 5 * 3 * 64 * 16 * 4
    assert (
        recurrent_states(5, {"model_type": "rwkv", "num_hidden_layers": 3, "hidden_size": 32})
        == 5 * 3 * 5 * 32 * 4
    )
    assert (
        recurrent_states(5, {"model_type": "qwen2", "num_hidden_layers": 3, "hidden_size": 32}) == 0
    )


def test_heads_are_found_in_the_config_of_every_text_family() -> None:
    without = set()
    for family in TEXT_FAMILIES:
        heads, keys = phases.heads_of(family_config(family).get_text_config(decoder=True))
        assert (heads > 0) == (keys > 0)
        if not heads:
            without.add(family)
    assert without == {"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"} & set(TEXT_FAMILIES)
