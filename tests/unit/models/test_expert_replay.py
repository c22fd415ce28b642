"""Experts that generation picks are recorded as a plain forward pass picks them, and training uses the ones that it is given."""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.config.engine import EngineConfig
from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.actor import Actor
from lightrft.models.decoding.kinds import decodes_by_plan
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.expert_replay import ExpertReplay
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.models.tiny.text_families import family_model
from lightrft.rollout.collate import collate
from lightrft.rollout.serialization import load_batch, pack_rollout, save_batch, unpack_rollout
from lightrft.types import Batch, Prompt, Request, Rollout, Segments
from lightrft.utils.atomic_files import json_line
from lightrft.utils.errors import ModelError
from tests.model_helpers import by_family

REPLAYED = (
    *("afmoe", "aria_text", "axk1", "bailing_hybrid", "beam", "cohere2_moe", "dbrx", "deepseek_v2"),
    *("deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe"),
    *("glm4_moe_lite", "granitemoe", "granitemoehybrid", "hunyuan_v1_moe", "hy_v3", "jamba"),
    *(
        "gpt_oss",
        "kolibri1",
        "laguna",
        "lfm2_moe",
        "mellum",
        "minimax_m2",
        "mixtral",
        "nemotron_h",
        "olmoe",
    ),
    *("qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open"),
)
REFUSED = ("deepseek_v4", "phimoe", "zaya")
PROMPTS = (6, 3, 9)


def sampler(model: PreTrainedModel, **config: int) -> NativeEngine:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    return NativeEngine(KVDecoder(model, ExpertReplay(model)), tokenizer, EngineConfig(**config))


def asked(samples: int = 2, **more: Any) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(str(i), torch.randint(4, 99, (n,), generator=generator).tolist())
        for i, n in enumerate(PROMPTS)
    ]
    return [
        Request(p, 10 * i + s, s, **more) for i, p in enumerate(prompts) for s in range(samples)
    ]


def generated(model: PreTrainedModel, engine: NativeEngine | None = None) -> list[Rollout]:
    engine = engine or sampler(model, max_num_seqs=4)
    found = list(engine.generate(asked(), SamplingConfig(max_new_tokens=7)))
    return sorted(found, key=lambda r: r.seed)


def batch_of(rollouts: list[Rollout]) -> Batch:
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        rollout.reward = 0.0
        groups.setdefault(rollout.prompt.id, []).append(rollout)
    return collate(list(groups.values()))


def plain_experts(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """``[T, layers, k]``, as the experts' modules get them in the model's own forward."""
    seen: list[Tensor] = []

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [*args, *kwargs.values()]
        seen.extend(x for x in given if x.dtype == torch.long)

    modules = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    hooks = [m.register_forward_pre_hook(look, with_kwargs=True) for m in modules]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1)


@pytest.mark.parametrize("family", by_family(REPLAYED))
def test_generation_records_the_experts_of_a_plain_forward_pass(family: str) -> None:
    model = family_model(family, eos_token_id=None)
    rollouts = generated(model)
    assert len(rollouts) == 6
    for rollout in rollouts:
        experts = rollout.experts
        assert experts is not None
        expected = plain_experts(model, rollout.prompt.token_ids + rollout.token_ids)
        n = len(rollout.prompt.token_ids)
        # the last layer may skip the states of a prompt that nothing reads
        torch.testing.assert_close(experts.prompt[:, :-1].long(), expected[:n, :-1])
        torch.testing.assert_close(experts.prompt[-1].long(), expected[n - 1])
        torch.testing.assert_close(experts.response[:-1].long(), expected[n:-1])
        assert (experts.response[-1] == -1).all()


@pytest.mark.parametrize("family", by_family(REPLAYED))
def test_training_with_the_recorded_experts_gives_the_log_probs_of_generation(family: str) -> None:
    model = family_model(family, eos_token_id=None)
    batch = batch_of(generated(model))
    actor = Actor(model)
    actor.experts = ExpertReplay(model)
    with torch.no_grad():
        found = actor.score(batch).logprobs
    assert batch.behavior_logprobs is not None
    torch.testing.assert_close(found, batch.behavior_logprobs, atol=1e-4, rtol=0)


def slow_block(block: nn.Module, states: Tensor, chosen: Tensor) -> Tensor:
    """A layer of qwen3_moe, token by token, with the experts ``chosen [T, k]``."""
    router, experts = block.get_submodule("gate"), block.get_submodule("experts")
    rows = []
    for state, picked in zip(states, chosen.tolist()):
        share = (state @ router.weight.T).softmax(-1)
        total = sum(share[e] for e in picked)
        row = torch.zeros_like(state)
        for e in picked:
            gate, up = (experts.gate_up_proj[e] @ state).chunk(2)
            row = row + share[e] / total * (experts.down_proj[e] @ (nn.functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


def test_a_layer_with_given_experts_equals_its_formula() -> None:
    model = family_model("qwen3_moe", norm_topk_prob=True)
    replay = ExpertReplay(model)
    block = model.get_submodule("model.layers.1.mlp")
    states = torch.randn(5, 32, requires_grad=True)
    chosen = torch.tensor([[0, 1], [3, 0], [2, 1], [1, 3], [3, 2]])
    replay.replay(torch.stack([chosen.roll(1, 0), chosen], dim=1))
    found = block(states[None])[0]
    expected = slow_block(block, states, chosen)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    router = block.get_submodule("gate")
    wanted = torch.autograd.grad(
        expected.square().sum(), [states, router.weight], retain_graph=True
    )
    gradients = torch.autograd.grad(found.square().sum(), [states, router.weight])
    for one, other in zip(gradients, wanted):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert gradients[1].abs().sum() > 0


def rerouted(batch: Batch, experts: int = 4) -> Batch:
    """Every known token goes to the next expert."""

    def moved(of: Segments) -> Segments:
        assert of.experts is not None
        return dataclasses.replace(
            of, experts=torch.where(of.experts < 0, -1, (of.experts + 1) % experts)
        )

    return dataclasses.replace(
        batch, prompts=moved(batch.prompts), responses=moved(batch.responses)
    )


def gradients(actor: Actor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    actor.zero_grad()
    logprobs = actor.score(batch).logprobs
    logprobs.sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in actor.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_layouts_agree_on_given_experts_with_and_without_checkpointing(checkpointing: bool) -> None:
    model = family_model("qwen3_moe", eos_token_id=None)
    batch = rerouted(batch_of(generated(model)))
    actor = Actor(model)
    actor.experts = ExpertReplay(model)
    actor.layout = "padded"
    expected, wanted = gradients(actor, batch)
    assert batch.behavior_logprobs is not None
    assert (expected - batch.behavior_logprobs).abs().max() > 0.01
    actor.train()
    if checkpointing:
        actor.gradient_checkpointing_enable()
    for layout in ("prefix_shared", "packed", "padded"):
        actor.layout = layout
        found, grads = gradients(actor, batch)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert grads.keys() == wanted.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted[name], atol=1e-3, rtol=1e-3)
    with torch.no_grad():
        own = actor.own_logprobs(batch)
    torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)


def test_a_part_of_a_batch_keeps_the_experts_of_its_rows() -> None:
    model = family_model("qwen3_moe", eos_token_id=None)
    batch = rerouted(batch_of(generated(model)))
    actor = Actor(model)
    actor.experts = ExpertReplay(model)
    with torch.no_grad():
        whole = actor.score(batch).logprobs.split(batch.lengths.tolist())
        index = torch.tensor([4, 1])
        part = batch.select(index)
        found = actor.score(part).logprobs.split(part.lengths.tolist())
        joined = Batch.cat([part, batch.select(torch.tensor([0]))])
        three = actor.score(joined).logprobs.split(joined.lengths.tolist())
    for b, row in zip([4, 1], found):
        torch.testing.assert_close(row, whole[b], atol=1e-4, rtol=1e-4)
    for b, row in zip([4, 1, 0], three):
        torch.testing.assert_close(row, whole[b], atol=1e-4, rtol=1e-4)


def test_tokens_of_unknown_experts_are_routed_by_the_router() -> None:
    model = family_model("qwen3_moe", eos_token_id=None)
    batch = batch_of(generated(model))
    free = batch.replace(
        prompts=dataclasses.replace(batch.prompts, experts=None),
        responses=dataclasses.replace(batch.responses, experts=None),
    )
    unknown = Batch.cat([free, rerouted(batch)])
    assert unknown.responses.experts is not None
    actor = Actor(model)
    actor.experts = ExpertReplay(model)
    with torch.no_grad():
        expected = actor.score(free).logprobs
        found = actor.score(unknown).logprobs
    n = free.tokens
    torch.testing.assert_close(found[:n], expected, atol=1e-4, rtol=1e-4)
    assert (found[n:] - expected).abs().max() > 0.01


def test_a_resumed_response_keeps_the_experts_that_it_was_sampled_with() -> None:
    model = family_model("qwen3_moe", eos_token_id=None)
    engine = sampler(model)
    sampling = SamplingConfig(max_new_tokens=8)
    parts = list(engine.generate(asked(1, pause_after_tokens=3), sampling))
    for part in parts:
        assert part.experts is not None
        part.experts.response[0] = 3  # as if older weights had picked others
    rest = [Request(p.prompt, p.seed, p.sample, partial=p) for p in parts]
    for whole in engine.generate(rest, sampling):
        assert whole.experts is not None
        assert whole.experts.response.shape == (8, 2, 2)
        assert (whole.experts.response[0] == 3).all()
        known = (whole.experts.response >= 0).flatten(1).all(1)
        assert known.tolist() == [True] * 7 + [False]


def test_the_reference_without_adapters_is_not_rerouted() -> None:
    model = family_model("qwen3_moe", eos_token_id=None)
    batch = batch_of(generated(model))
    from lightrft.models.lora import add_adapters

    actor = Actor(add_adapters(model, LoRAConfig(rank=2)), ModelConfig())
    with torch.no_grad(), actor.reference():
        expected = actor.score(batch).logprobs
    actor.experts = ExpertReplay(actor.model)
    with torch.no_grad(), actor.reference():
        found = actor.score(rerouted(batch)).logprobs
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        assert (actor.score(rerouted(batch)).logprobs - expected).abs().max() > 0.01


def test_a_copied_decoder_records_its_own_calls() -> None:
    model = family_model("qwen3_moe", eos_token_id=None)
    decoder = KVDecoder(model, ExpertReplay(model))
    other = decoder.with_own_weights()
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    copied = NativeEngine(other, tokenizer, EngineConfig(), shared=False)
    for one, two in zip(generated(model), generated(model, copied), strict=True):
        assert one.experts is not None
        assert two.experts is not None
        assert torch.equal(one.experts.response, two.experts.response)


@pytest.mark.parametrize("family", REFUSED)
def test_a_router_that_picks_in_another_way_is_refused_at_the_first_replay(family: str) -> None:
    model = family_model(family)
    replay = ExpertReplay(model)
    ids = torch.randint(4, 90, (1, 9))
    with torch.no_grad():
        replay.record()
        model(input_ids=ids, use_cache=False)
        recorded = replay.recorded()
        replay.record(False)
        replay.replay((recorded + 1) % 4)
        with pytest.raises(ModelError, match="router does not pick experts by one"):
            model(input_ids=ids, use_cache=False)


def test_a_model_without_experts_is_refused_with_the_way_out() -> None:
    with pytest.raises(ModelError, match=r"'qwen3'.*set model\.replay_routes=false"):
        ExpertReplay(family_model("qwen3"))


def test_experts_of_another_number_of_layers_are_refused() -> None:
    replay = ExpertReplay(family_model("qwen3_moe"))
    with pytest.raises(ModelError, match="recorded 3 layers with experts, and the model has 2"):
        replay.replay(torch.zeros(4, 3, 2, dtype=torch.int16))


def test_saved_rollouts_and_batches_hold_the_experts(tmp_path: Path) -> None:
    model = family_model("qwen3_moe", eos_token_id=None)
    rollouts = generated(model)
    experts = rollouts[0].experts
    assert experts is not None
    again = unpack_rollout(pack_rollout(rollouts[0]), rollouts[0].prompt).experts
    assert again is not None
    assert torch.equal(again.prompt, experts.prompt)
    row = json.loads(json_line(rollouts[0]))["experts"]["response"]
    raw = zlib.decompress(base64.b64decode(row["zlib"]))
    shown = np.frombuffer(raw, dtype="<i2").reshape(row["shape"])
    assert np.array_equal(shown, experts.response.numpy())
    batch = batch_of(rollouts)
    save_batch(tmp_path / "batch", batch)
    loaded = load_batch(tmp_path / "batch")
    for one, two in ((loaded.prompts, batch.prompts), (loaded.responses, batch.responses)):
        assert one.experts is not None
        assert two.experts is not None
        assert torch.equal(one.experts, two.experts)


def test_both_ways_to_decode_are_tested() -> None:
    found = {decodes_by_plan(family_model(name).config) for name in ("qwen3_moe", "qwen3_next")}
    assert found == {True, False}
