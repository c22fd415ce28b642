"""What a process of vLLM holds is compared with what it was sent. Layers stand for vLLM's; ``tests/e2e/vllm`` has these."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightrft.engines.vllm_parts.held_weights import HeldWeights, read_copy, repack_tied_layers
from lightrft.engines.vllm_parts.weights import lost_adapter
from lightrft.utils.errors import ModelError

HEADS, KV_HEADS, SIZE, HIDDEN, INNER, WORDS = 4, 2, 3, 8, 12, 10


class Layer(nn.Module):
    """A layer of vLLM: the shard of ``rank`` of one or several matrices."""

    def __init__(self, weight: Tensor, **about: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        for name, value in about.items():
            setattr(self, name, value)


class Packed(Layer):
    """A layer on a CPU, whose kernel keeps a copy."""

    def __init__(self, weight: Tensor, **about: Any) -> None:
        super().__init__(weight, **about)
        self.quant_method = SimpleNamespace(
            process_weights_after_loading=lambda layer: layer.pack()
        )
        self.pack()

    def pack(self) -> None:
        kept = self.weight.detach().clone()
        self.cpu_linear = lambda x, weight, bias: x @ kept.T


def whole_weights() -> dict[str, Tensor]:
    shapes = {
        "model.embed_tokens.weight": (WORDS, HIDDEN),
        "model.q_proj.weight": (HEADS * SIZE, HIDDEN),
        "model.k_proj.weight": (KV_HEADS * SIZE, HIDDEN),
        "model.v_proj.weight": (KV_HEADS * SIZE, HIDDEN),
        "model.o_proj.weight": (HIDDEN, HEADS * SIZE),
        "model.gate_proj.weight": (INNER, HIDDEN),
        "model.up_proj.weight": (INNER, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def shard(w: dict[str, Tensor], rank: int, shards: int, kind: type[Layer] = Layer) -> nn.Module:
    """Return the model that vLLM makes of the weights ``w`` in the process ``rank``."""
    w = {name.removeprefix("model.").removesuffix(".weight"): tensor for name, tensor in w.items()}
    copies = max(1, shards // KV_HEADS)
    cut = lambda tensor, n=shards, k=rank, dim=0: tensor.chunk(n, dim)[k]  # noqa: E731
    keys = [cut(w[name], shards // copies, rank // copies) for name in ("k_proj", "v_proj")]
    fused = [cut(w["q_proj"]), *keys]
    place = {"tp_rank": rank, "tp_size": shards}
    inner = nn.Module()
    inner.qkv_proj = kind(
        torch.cat(fused),
        output_partition_sizes=[len(part) for part in fused],
        input_size=HIDDEN,
        input_size_per_partition=HIDDEN,
        num_kv_head_replicas=copies,
        **place,
    )
    inner.gate_up_proj = kind(
        torch.cat([cut(w["gate_proj"]), cut(w["up_proj"])]),
        output_partition_sizes=[INNER // shards] * 2,
        input_size=HIDDEN,
        input_size_per_partition=HIDDEN,
        **place,
    )
    columns = HEADS * SIZE
    inner.o_proj = kind(
        cut(w["o_proj"], dim=1),
        output_partition_sizes=[HIDDEN],
        input_size=columns,
        input_size_per_partition=columns // shards,
        **place,
    )
    rows = WORDS // shards
    vocabulary = SimpleNamespace(
        org_vocab_start_index=rank * rows,
        org_vocab_end_index=WORDS if rank == shards - 1 else (rank + 1) * rows,
    )
    start, end = vocabulary.org_vocab_start_index, vocabulary.org_vocab_end_index
    padded = torch.cat([w["embed_tokens"][start:end], torch.zeros(3, HIDDEN)])
    inner.embed_tokens = kind(padded, shard_indices=vocabulary)
    inner.norm = Layer(w["norm"])
    model = nn.Module()
    model.model = inner
    return model


def held(model: nn.Module, sent: dict[str, Tensor], family: str = "llama") -> HeldWeights:
    about = SimpleNamespace(dtype=torch.float32, hf_config=SimpleNamespace(model_type=family))
    found = HeldWeights(model, about)
    assert list(found.recorded(sent.items())) == list(sent.items())
    return found


PLACES = [(0, 1), (0, 2), (1, 2), (0, 4), (3, 4)]


@pytest.mark.parametrize("kind", [Layer, Packed])
@pytest.mark.parametrize(("rank", "shards"), PLACES)
def test_each_process_holds_its_shards_of_all_tensors(
    rank: int, shards: int, kind: type[Layer]
) -> None:
    weights = whole_weights()
    found = held(shard(weights, rank, shards, kind), weights)
    assert found.check() == set()


@pytest.mark.parametrize(("rank", "shards"), PLACES)
@given(name=st.sampled_from(sorted(whole_weights())), scale=st.sampled_from([-1.0, 1 + 2**-23]))
def test_a_tensor_that_differs_in_its_last_bits_is_lost(
    rank: int, shards: int, name: str, scale: float
) -> None:
    weights = whole_weights()
    sent = {**weights, name: weights[name] * scale}
    assert held(shard(weights, rank, shards), sent).lost() == [name]
    with pytest.raises(ModelError, match=rf"1 of 8 tensors .*{name}\. Cause: a lost update"):
        held(shard(weights, rank, shards), sent).check()


def test_equal_parts_of_a_layer_in_another_order_are_lost() -> None:
    weights = whole_weights()
    swapped = {**weights, "model.gate_proj.weight": weights["model.up_proj.weight"]}
    swapped["model.up_proj.weight"] = weights["model.gate_proj.weight"]
    lost = held(shard(weights, 0, 1), swapped).lost()
    assert lost == ["model.gate_proj.weight", "model.up_proj.weight"]


@pytest.mark.parametrize(("rank", "shards"), PLACES)
def test_parts_that_a_checkpoint_has_in_one_tensor_are_compared_too(rank: int, shards: int) -> None:
    weights = whole_weights()
    model = shard(weights, rank, shards)
    parts = [weights.pop(f"model.{name}.weight") for name in ("q_proj", "k_proj", "v_proj")]
    weights["model.qkv_proj.weight"] = torch.cat(parts)
    found = held(model, weights)
    assert found.check() == set()
    other = held(model, {**weights, "model.qkv_proj.weight": torch.cat(parts[::-1])})
    assert other.lost() == ["model.qkv_proj.weight"]


def test_a_tensor_without_a_place_is_named_and_not_lost() -> None:
    weights = whole_weights()
    sent = {**weights, "model.experts.0.w1.weight": torch.zeros(2, 2)}
    assert held(shard(weights, 0, 1), sent).check() == {"model.experts.0.w1.weight"}


def test_the_copy_of_a_kernel_is_compared_and_not_the_tensor_alone() -> None:
    weights = whole_weights()
    model = shard(weights, 0, 1, Packed)
    changed = {name: tensor + 1 for name, tensor in weights.items()}
    for name, parameter in shard(changed, 0, 1).named_parameters():
        model.get_parameter(name).data.copy_(parameter)
    assert set(held(model, changed).lost()) == set(weights) - {"model.norm.weight"}


def test_an_output_layer_that_is_the_embeddings_is_compared_through_its_kernel() -> None:
    weights = whole_weights()
    model = shard(weights, 0, 1, Packed)
    embeddings: Any = model.model.embed_tokens  # type: ignore[union-attr]
    head: Any = Packed(embeddings.weight.detach(), shard_indices=embeddings.shard_indices)
    head.weight = embeddings.weight
    model.lm_head = head
    assert held(model, weights).check() == set()
    embeddings.weight.data[0, 0] += 1
    embeddings.pack()
    sent = {**weights, "model.embed_tokens.weight": embeddings.weight.detach()[:WORDS].clone()}
    assert held(model, sent).lost() == ["model.embed_tokens.weight"]
    repack_tied_layers(model)
    assert held(model, sent).check() == set()


def test_matrices_that_vllm_transposes_are_compared_as_it_holds_them() -> None:
    weight = torch.randn(4, 6)
    model = nn.Module()
    model.c_attn = Layer(weight.T)
    assert held(model, {"c_attn.weight": weight}, "gpt2").check() == set()
    assert held(model, {"c_attn.weight": weight}).lost() == ["c_attn.weight"]


def test_names_follow_the_renaming_of_the_class() -> None:
    weights = whole_weights()
    model: Any = shard(weights, 0, 1)
    model.hf_to_vllm_mapper = SimpleNamespace(
        _map_name=lambda name: name.replace("language.", "model.")
    )
    sent = {name.replace("model.", "language."): tensor for name, tensor in weights.items()}
    assert held(model, sent).check() == set()


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=12, max_size=12)
)
def test_a_matrix_comes_back_through_its_kernel_as_it_is(values: list[float]) -> None:
    weight = torch.tensor(values, dtype=torch.float32).view(3, 4)
    torch.testing.assert_close(read_copy(Packed(weight), 4), weight, atol=0, rtol=0)


def test_an_adapter_is_compared_with_its_scale_in_the_padded_place() -> None:
    weights = whole_weights()
    model: Any = shard(weights, 0, 1)
    sizes = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
    layer = model.model.qkv_proj
    layer.lora_a_stacked = tuple(torch.zeros(1, 1, 8, HIDDEN) for _ in sizes)
    layer.lora_b_stacked = tuple(torch.zeros(1, 1, size, 8) for size in sizes)
    down, up = torch.randn(2, HIDDEN), torch.randn(KV_HEADS * SIZE, 2)
    layer.lora_a_stacked[2][0, 0, :2] = down
    layer.lora_b_stacked[2][0, 0, :, :2] = up * 4
    adapter = {
        "base_model.model.model.v_proj.lora_A.default.weight": down,
        "base_model.model.model.v_proj.lora_B.default.weight": up,
    }
    assert lost_adapter(model, adapter, 4.0, torch.float32) == ([], [])
    lost, _ = lost_adapter(model, adapter, 2.0, torch.float32)
    assert lost == ["base_model.model.model.v_proj.lora_B.default.weight"]
    other = {"base_model.model.model.o_proj.lora_A.default.weight": down}
    assert lost_adapter(model, other, 4.0, torch.float32) == ([], list(other))
