"""What a run needs: which models, on how many devices, in which phases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightrft.config.base import build
from lightrft.config.verbs import RLConfig, SFTConfig
from lightrft.diagnostics.memory.estimate import MemoryEstimate, estimate_memory, workers
from lightrft.diagnostics.memory.formulas import QUANTISED, MemoryPhase, ModelMemory
from lightrft.diagnostics.memory.phases import Device, Lengths, Model
from lightrft.models.actor import Actor
from lightrft.models.loading.meta_device import meta_model
from lightrft.models.tiny.text import tiny_config
from lightrft.utils.cpu import BYTES, CACHES

LENGTHS = Lengths(16, 32, 4, 4)
SIZES = {"vocab_size": 300, "num_attention_heads": 2}


WITH_KL = {"preset": "grpo", "kl": {"where": "loss", "coef": 0.1}}


def built(folder: Path, family: str = "qwen2", layers: int = 2, **tree: Any) -> RLConfig:
    config = tiny_config(family, num_hidden_layers=layers, **SIZES)
    config.dtype = "float32"
    config.save_pretrained(folder / family)
    model = {"path": str(folder / family), **tree.pop("model", {})}
    return build(RLConfig, {"model": model, "train": {"max_tokens_per_micro_batch": 200}, **tree})


def found(
    folder: Path, family: str = "qwen2", processes: int = 1, kind: str = "cuda", **tree: Any
) -> MemoryEstimate:
    return estimate_memory(built(folder, family, **tree), LENGTHS, Device(kind, 0, processes))


def phase_of(needed: MemoryEstimate, name: str) -> MemoryPhase:
    return next(phase for phase in needed.phases if phase.name == name)


def test_only_the_models_that_the_algorithm_needs_are_counted(tmp_path: Path) -> None:
    plain = {"preset": "grpo", "kl": {"where": "none", "coef": 0.0}}
    assert list(found(tmp_path, algorithm=plain).models) == ["policy"]
    assert list(found(tmp_path, algorithm={"preset": "ppo"}).models) == [
        "policy",
        "reference",
        "critic",
    ]
    with_kl = {"preset": "grpo", "kl": {"where": "loss", "coef": 0.1}}
    assert list(found(tmp_path, algorithm=with_kl, model={"lora": {}}).models) == ["policy"]


def test_four_bits_are_counted_for_weights_of_linear_layers_except_the_head(tmp_path: Path) -> None:
    config = built(tmp_path).model
    model = Actor(meta_model(config), config).requires_grad_(False)
    head = model.base.get_output_embeddings()
    small = 0
    for module in model.base.modules():
        if isinstance(module, nn.Linear) and module is not head:
            small += module.weight.numel()
    counted = Model("policy", model, False, quantised=True).parameters
    assert small == sum(p.count for p in counted if p.itemsize == QUANTISED)
    assert {p.itemsize for p in counted} == {QUANTISED, 4}


def test_all_phases_of_a_step_are_there(tmp_path: Path) -> None:
    names = [phase.name for phase in found(tmp_path, algorithm={"preset": "ppo"}).phases]
    assert {
        "generation",
        "policy: layout check",
        "policy: update",
        "reference: forward",
        "critic: update",
    } <= set(names)


def test_shards_halve_what_is_held_and_what_is_whole_meanwhile_is_added(tmp_path: Path) -> None:
    one, two = found(tmp_path), found(tmp_path, processes=2)
    assert two.models["policy"].total == one.models["policy"].total / 2
    assert update_of(two)["blocks made whole"] > 0
    drawing = phase_of(two, "generation").parts
    assert drawing["policy made whole"] == one.models["policy"].weights


def test_reading_holds_a_piece_of_one_tensor_or_room_for_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frozen reference is read last, when all else is there."""
    monkeypatch.setattr("lightrft.diagnostics.memory.phases.PIECE", 1000)
    parts = [
        phase_of(
            found(tmp_path, processes=2, strategy=strategy, algorithm=WITH_KL), "loading"
        ).parts["weights as they are read"]
        for strategy in ({}, {"kind": "deepspeed", "zero_stage": 3}, {"tensor_parallel": 2})
    ]
    largest = 4 * 300 * tiny_config("qwen2", **SIZES).hidden_size  # embeddings
    assert parts == [1000, largest, 1000]


def update_of(needed: MemoryEstimate) -> Mapping[str, float]:
    return phase_of(needed, "policy: update").parts


def test_logits_have_the_bound_of_the_device_and_not_of_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "vocab_size", 1_000_000)
    small, large = (
        update_of(found(tmp_path, kind="cuda", model={"logits_mb": size}))["activations"]
        for size in (64, 256)
    )
    assert large > small
    on = {k: update_of(found(tmp_path, kind=k))["activations"] for k in ("cpu", "cuda")}
    assert on == {"cpu": small, "cuda": large}
    launch = {"kind": "ray", "ray": {"references": 1}}
    config = built(tmp_path, algorithm=WITH_KL, launch=launch)
    small, large = (
        phase_of(
            workers(config, LENGTHS, Device(kind, 0, 1))["reference"], "reference: forward"
        ).total
        for kind in ("cpu", "cuda")
    )
    assert large > small


def test_gradients_are_shared_out_with_every_micro_batch(tmp_path: Path) -> None:
    for size in (200, 10_000):
        train = {"train": {"max_tokens_per_micro_batch": size}}
        assert (
            update_of(found(tmp_path, processes=2, **train))["gradients"]
            == update_of(found(tmp_path, **train))["gradients"] / 2
        )


@pytest.mark.parametrize(("stage", "weights", "gradients"), [(1, 1, 1), (2, 1, 2), (3, 2, 2)])
def test_each_stage_of_zero_shares_out_what_it_says_and_of_frozen_models_the_third_alone(
    tmp_path: Path, stage: int, weights: int, gradients: int
) -> None:
    zero = {
        "kind": "deepspeed",
        "zero_stage": stage,
        "deepspeed": {"zero_optimization": {"reduce_bucket_size": 1000}},
    }
    algorithm = {"preset": "grpo", "kl": {"where": "loss", "coef": 0.1}}
    one, two = (
        found(tmp_path, algorithm=algorithm),
        found(tmp_path, processes=2, strategy=zero, algorithm=algorithm),
    )
    alone, shared = one.models["policy"], two.models["policy"]
    assert (alone.weights / shared.weights, alone.moments / shared.moments) == (weights, 2)
    assert shared.masters == (alone.weights / 2 if stage < 3 else 0)
    assert two.models["reference"].weights == one.models["reference"].weights / (
        2 if stage == 3 else 1
    )
    assert update_of(two)["gradients"] == update_of(one)["gradients"] / gradients
    assert update_of(two)["gradients on their way"] == 2 * 4 * 1000
    assert ("blocks made whole" in update_of(two)) is (stage == 3)


def test_optimizer_state_that_is_offloaded_is_not_on_the_device(tmp_path: Path) -> None:
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    held = found(
        tmp_path, processes=2, strategy={"kind": "deepspeed", "deepspeed": offload}
    ).models["policy"]
    assert (held.masters, held.moments) == (0, 0)
    assert held.weights > 0
    zero = {"kind": "deepspeed", "zero_stage": 3}
    nowhere = {"zero_optimization": {"offload_optimizer": None, "offload_param": None}}
    given = found(tmp_path, processes=2, strategy={**zero, "deepspeed": nowhere})
    assert given.models == found(tmp_path, processes=2, strategy=zero).models


def test_drawing_ahead_holds_copies_of_the_weights_and_goes_on_beside_every_phase(
    tmp_path: Path,
) -> None:
    plain, ahead = found(tmp_path), found(tmp_path, rollout={"staleness": 1})
    assert ahead.models["sampling copies"].weights == 2 * plain.models["policy"].weights
    assert all("generating at the same time" in phase.parts for phase in ahead.phases[1:])


def test_a_draft_model_is_held_whole_by_each_rank_and_caches_the_same_tokens(
    tmp_path: Path,
) -> None:
    plain = found(tmp_path, processes=2)
    (tmp_path / "draft").mkdir()
    built(tmp_path / "draft", layers=1)
    speculative = {"kind": "draft", "path": str(tmp_path / "draft" / "qwen2")}
    drafted = found(tmp_path, processes=2, engine={"speculative": speculative})
    # the draft model has one of the policy's two layers
    ours, theirs = (phase_of(x, "generation").parts for x in (drafted, plain))
    assert ours["draft model's cache"] == theirs["cache"] / 2
    one = found(tmp_path / "draft", layers=1).models["policy"].weights
    assert drafted.models["draft model"] == ModelMemory(one)
    assert drafted.models["policy"] == plain.models["policy"]


def test_compiled_decoding_pads_the_cache(tmp_path: Path) -> None:
    chosen = (found(tmp_path, engine={"compile": choice}) for choice in (True, False, None))
    compiled, plain, by_default = (phase_of(x, "generation").parts["cache"] for x in chosen)
    assert by_default == compiled > plain
    on_cpu = (found(tmp_path, kind="cpu", engine={"compile": choice}) for choice in (False, None))
    plain, by_default = (phase_of(x, "generation").parts["cache"] for x in on_cpu)
    assert by_default == plain


def test_a_mixture_of_experts_is_computed_and_what_cannot_be_traced_is_said(tmp_path: Path) -> None:
    needed = found(tmp_path, "qwen3_moe")
    assert next(p for p in needed.phases if p.name == "policy: update").parts["activations"] > 0
    assert all("cannot be traced" in problem for problem in needed.problems)


@pytest.mark.parametrize("evaluates", [False, True])
def test_supervised_runs_draw_only_to_evaluate(tmp_path: Path, evaluates: bool) -> None:
    tiny_config("qwen2", **SIZES).save_pretrained(tmp_path)
    data = {"eval": {"data": {"sources": ["held.jsonl"]}}} if evaluates else {}
    config = build(SFTConfig, {"model": {"path": str(tmp_path)}, **data})
    names = [
        phase.name
        for phase in estimate_memory(config, Lengths(1, 63, 4, 1), Device("cpu", 0)).phases
    ]
    assert ("generation" in names) is evaluates


def test_ranks_that_share_a_row_hold_a_part_of_its_activations(tmp_path: Path) -> None:
    rows, two = (
        found(tmp_path, processes=2, strategy={"sequence_parallel": 2}),
        found(tmp_path, processes=2),
    )
    assert rows.models == two.models
    assert update_of(rows)["activations"] == update_of(two)["activations"] / 2


def test_ranks_that_share_layers_hold_a_part_of_each_and_all_of_what_lies_between(
    tmp_path: Path,
) -> None:
    one, layers = found(tmp_path), found(tmp_path, processes=2, strategy={"tensor_parallel": 2})
    model = tiny_config("qwen2", **SIZES)
    head, keys, inner = model.hidden_size // 2, model.num_key_value_heads, model.intermediate_size
    queries = model.hidden_size * (2 * model.hidden_size + 1) + 2 * keys * head * (
        model.hidden_size + 1
    )
    in_layers = model.num_hidden_layers * (queries + 3 * model.hidden_size * inner)
    assert one.models["policy"].weights - layers.models["policy"].weights == 4 * in_layers / 2
    assert update_of(layers)["gradients"] == update_of(one)["gradients"] - 4 * in_layers / 2
    assert update_of(layers)["activations"] < update_of(one)["activations"]


def test_a_team_draws_and_trains_the_rows_that_its_ranks_would_have_had(tmp_path: Path) -> None:
    cache = [
        next(
            p for p in found(tmp_path, processes=4, strategy=s).phases if p.name == "generation"
        ).parts["cache"]
        for s in ({}, {"sequence_parallel": 2}, {"tensor_parallel": 2})
    ]
    assert cache[0] == cache[1] == cache[2]


def test_groups_of_ranks_that_hold_a_copy_each_share_it_among_themselves(tmp_path: Path) -> None:
    two, groups = (
        found(tmp_path, processes=2),
        found(tmp_path, processes=4, strategy={"hsdp_shard_size": 2}),
    )
    assert groups.models == two.models
    assert update_of(groups)["gradients"] == update_of(two)["gradients"]


def test_half_precision_weights_that_are_trained_lie_in_float32_alone(tmp_path: Path) -> None:
    one, two = (
        found(tmp_path, processes=n, algorithm=WITH_KL, model={"dtype": "bfloat16"}) for n in (1, 2)
    )
    count = one.parameters["policy"][0]
    assert one.models["policy"] == ModelMemory(2 * count, 4 * count, 8 * count)
    assert two.models["policy"] == ModelMemory(2 * count, 0, 4 * count)
    assert two.models["reference"] == ModelMemory(count)


def test_what_is_left_of_blocks_between_the_passes_is_what_the_strategy_says(
    tmp_path: Path,
) -> None:
    config = tiny_config("qwen2", **SIZES)
    settings: list[dict[str, Any]] = [
        {},
        {"reshard_after_forward": 2},
        {"reshard_after_forward": False},
    ]
    four = [
        update_of(found(tmp_path, layers=4, processes=2, strategy=s))["blocks made whole"]
        for s in settings
    ]
    # Embeddings, head and the last norm.
    outside = 4 * (2 * 300 * config.hidden_size + config.hidden_size)
    block = (4 * found(tmp_path, layers=4).parameters["policy"][0] - outside) / 4
    assert four == [outside + 2 * block, outside + 2 * block + 2 * block / 2, outside + 4 * block]


def test_weights_in_the_hosts_memory_are_on_the_device_only_when_they_are_called(
    tmp_path: Path,
) -> None:
    shared, away = (
        found(tmp_path, processes=2, strategy={"cpu_offload": offload}) for offload in (False, True)
    )
    assert away.models["policy"].total == 0
    assert "gradients" not in update_of(away)
    assert update_of(away)["blocks made whole"] == update_of(shared)["blocks made whole"]
    assert away.host["policy"] == shared.models["policy"].total + update_of(shared)["gradients"]
    on_cpu = found(tmp_path, processes=2, kind="cpu", strategy={"cpu_offload": True})
    assert on_cpu.models["policy"] == shared.models["policy"]
    assert on_cpu.host == {}


def test_activations_in_the_hosts_memory_are_not_on_the_device_and_on_a_cpu_they_are_copies(
    tmp_path: Path,
) -> None:
    off = {"offload_activations": True}
    kept, away = (found(tmp_path, strategy=strategy) for strategy in ({}, off))
    on_cpu, copied = (found(tmp_path, kind="cpu", strategy=strategy) for strategy in ({}, off))
    assert update_of(away)["activations"] < 0.6 * update_of(kept)["activations"]
    assert 0.5 < away.host["policy: activations"] / update_of(kept)["activations"] < 1.5
    assert update_of(copied)["activations"] >= update_of(on_cpu)["activations"]


def test_what_sleeps_is_not_there_while_answers_are_drawn(tmp_path: Path) -> None:
    awake, asleep = (
        found(tmp_path, algorithm=WITH_KL, strategy={"offload_during_generation": sleep})
        for sleep in (False, True)
    )
    away = awake.models["policy"].moments + awake.models["reference"].weights
    drawing = [phase_of(needed, "generation") for needed in (awake, asleep)]
    assert drawing[0].total - drawing[1].total == drawing[1].resting == away
    assert asleep.host["offloaded during generation"] == away


def test_roles_with_workers_of_their_own_are_not_with_the_ranks_and_have_a_table_each(
    tmp_path: Path,
) -> None:
    staff = {"engines": 2, "references": 1, "bucket_mb": 1}
    launch = {"kind": "ray", "processes": 2, "ray": staff}
    config = built(tmp_path, algorithm={"preset": "ppo"}, launch=launch)
    ranks, apart = (
        estimate_memory(config, LENGTHS, Device("cuda", 0, 2)),
        workers(config, LENGTHS, Device("cuda", 0, 2)),
    )
    alone = found(tmp_path, algorithm={"preset": "ppo"})
    assert list(ranks.models) == ["policy", "critic", "weights for engines"]
    assert ranks.models["weights for engines"] == ModelMemory(2 * 2**20)
    one, two = (
        estimate_memory(
            built(tmp_path, launch={**launch, "ray": {"engines": 1, "weights": way}}),
            LENGTHS,
            Device("cpu", 0, 2),
        ).models["weights for engines"]
        for way in ("message", "broadcast")
    )
    # each of two senders has a half of the copies
    assert two.weights == one.weights / 2
    assert {phase.name.partition(":")[0] for phase in ranks.phases} == {
        "policy",
        "critic",
        "loading",
    }
    assert list(apart) == ["engine", "reference"]
    assert apart["engine"].models == {
        "policy": ModelMemory(alone.models["policy"].weights),
        "weights on their way": ModelMemory(2**20),
    }
    assert (
        phase_of(apart["engine"], "generation").parts["cache"]
        == phase_of(alone, "generation").parts["cache"] / 2
    )
    assert apart["reference"].models["reference"] == alone.models["reference"]
    assert all(
        needed.peak > sum(held.total for held in needed.models.values())
        for needed in apart.values()
    )


def test_a_cpu_that_compiles_products_in_half_precision_keeps_as_many_as_the_process_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    for name in CACHES:
        monkeypatch.setenv(name, "10")
    half = found(tmp_path, kind="cpu", model={"dtype": "bfloat16"})
    assert half.models["compiled products"].total == 10 * BYTES
    assert "compiled products" not in found(tmp_path, kind="cpu").models
    assert "compiled products" not in found(tmp_path, model={"dtype": "bfloat16"}).models


URL = {"url": "http://127.0.0.1:1"}


def test_a_server_generates_in_its_own_memory(tmp_path: Path) -> None:
    for kind in ("http", "sglang"):
        served = found(tmp_path, kind="cpu", engine={"kind": kind, **URL})
        assert "packed weights" not in served.models
        assert "generation" not in [phase.name for phase in served.phases]


@pytest.mark.parametrize(
    ("engine", "server", "host", "device"),
    [
        ({"kind": "http"}, "lightrft", 2.0, 0.0),
        ({"kind": "http"}, "vllm", 1.0, 1.0),
        ({"kind": "http"}, None, 1.0, 1.0),
        ({"kind": "http", "weights_dir": "/shared"}, "vllm", 0.0, 0.0),
        ({"kind": "sglang"}, "sglang", 1.0, 1.0),
        ({"kind": "sglang", "weights_dir": "/shared"}, "sglang", 1.0, 0.0),
    ],
)
def test_a_run_keeps_copies_of_what_it_sends_to_a_server(
    tmp_path: Path, engine: dict[str, Any], server: Any, host: float, device: float
) -> None:
    """Weights that are smaller than a bucket fill no more of it than they are large."""
    config = built(tmp_path, engine={**engine, **URL})
    needed = estimate_memory(config, LENGTHS, Device("cuda", 0), server)
    weights = needed.models["policy"].weights
    assert needed.host.get("weights for the server", 0.0) == host * weights
    buckets = needed.models.get("buckets of weights", ModelMemory(0.0))
    assert buckets.weights == device * weights
    on_cpu = estimate_memory(config, LENGTHS, Device("cpu", 0), server).models
    together = on_cpu.get("weights for the server", ModelMemory(0.0))
    assert together.weights == (host + device) * weights


def test_lightrft_serve_gets_the_layers_with_adapters_alone(tmp_path: Path) -> None:
    config = built(tmp_path, engine={"kind": "http", **URL}, model={"lora": {"rank": 2}})
    needed = estimate_memory(config, LENGTHS, Device("cuda", 0), "lightrft")
    whole = estimate_memory(config, LENGTHS, Device("cuda", 0), "vllm")
    kept, all_of_them = (x.host["weights for the server"] for x in (needed, whole))
    assert 0 < kept < 2 * all_of_them
