"""``torchrun teams.py FOLDER CONFIG..``: ranks that work on the same rows, in real processes. Prints what each found.

Per cell with one team of all ranks, how far log-probs and gradients, summed over the ranks, are from those of the model alone, in float64
if not said otherwise; FOLDER holds tiny media models. Then RL runs, each into the folder that its config names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightrft.config.base import load_settings
from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.config.strategy import StrategyConfig
from lightrft.config.verbs import RLConfig
from lightrft.distributed import process_group as ranks_module
from lightrft.distributed.process_group import (
    ModelParallelGroup,
    ProcessGroup,
    build_parallel_groups,
    init_process_group,
)
from lightrft.models.actor import Actor, Backbone
from lightrft.models.critic import Critic
from lightrft.models.lora import add_adapters
from lightrft.strategy.fsdp2 import Fsdp2Strategy
from lightrft.strategy.tensor_parallel import partial_names, shard_layers, sum_partial
from lightrft.trainer import rl, training_loop
from lightrft.types import Batch, Segments
from tests.media_helpers import mixed_batch, mixed_prompts, rig_in
from tests.model_helpers import (
    Float64,
    gap,
    hard_batch,
    ragged_batch,
    small_actor,
    small_model,
    weights,
)

Call = Callable[[Any, Batch], torch.Tensor]
FAMILIES = ("qwen2", "qwen3_moe", "gemma2", "gemma3", "phi3")
PLANNED = ("qwen2", "qwen3", "llama", "gemma2", "qwen3_moe")
MEDIA = ("qwen2_5_vl", "qwen3_vl", "gemma3")


def logprobs(actor: Actor, batch: Batch) -> torch.Tensor:
    """And entropies after them."""
    scores = actor.score(batch, entropy=True, temperature=0.7)
    assert scores.entropy is not None
    return torch.cat([scores.logprobs, scores.entropy])


def values(critic: Critic, batch: Batch) -> torch.Tensor:
    """And those after the last tokens."""
    return torch.cat(critic.values(batch, final=True))


def learned(
    model: Backbone, batch: Batch, call: Call
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What ``call`` gives, and the gradient of a fixed weighting of it in every parameter."""
    model.zero_grad()
    found = call(model, batch)
    (found * weights(len(found), found.dtype)).sum().backward()
    return found.detach(), {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def apart(
    model: Backbone, model_parallel_group: ModelParallelGroup, batch: Batch, call: Call
) -> list[float]:
    """The largest differences of what ``call`` gives and of gradients, between a team and the model alone."""
    with Float64() if model.base.dtype == torch.float64 else nullcontext():
        expected, wanted = learned(model, batch, call)
        model.model_parallel_group = model_parallel_group
        found, grads = learned(model, batch, call)
    for grad in grads.values():
        dist.all_reduce(grad)
    worst = (found - expected).abs().max() / expected.abs().max() if len(expected) else 0.0
    return [
        float(worst),
        gap(grads, wanted) if len(expected) else max(float(g.abs().max()) for g in grads.values()),
    ]


def adapted(**sizes: int) -> Actor:
    """A model whose adapters do something."""
    model = add_adapters(small_model("qwen2", torch.float64, **sizes), LoRAConfig(rank=4)).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return Actor(model)


def cells(folder: Path) -> Iterator[tuple[str, Backbone, Batch, Call]]:
    batch = hard_batch()
    for family in FAMILIES:
        for layout in ("prefix_shared", "packed"):
            yield f"{family} {layout}", small_actor(family, torch.float64, layout), batch, logprobs
    yield "critic", Critic(small_model("qwen2", torch.float64)), batch, values
    yield "adapters", adapted(), batch, logprobs
    # In float32: what is computed in the backward pass is out of reach of ``Float64``.
    recomputed = small_actor("qwen2")
    recomputed.gradient_checkpointing_enable()
    yield "recomputed in float32", recomputed.train(), batch, logprobs
    for family in MEDIA:
        r = rig_in(folder / family, torch.float64)
        yield f"{family} with media", r.actor, mixed_batch(mixed_prompts(r)), logprobs
    few = ragged_batch([1, 1], [1, 1], [0, 1])
    yield "fewer tokens than ranks", small_actor("qwen2", torch.float64), few, logprobs
    none = Batch(Segments.of([[5, 6]]), Segments.of([]), torch.zeros(0, dtype=torch.long))
    yield "no rows", small_actor("qwen2", torch.float64), none, logprobs


def tensor_gaps(ranks: ProcessGroup) -> dict[str, list[float]]:
    """The same of models whose layers all ranks share out."""
    mesh, gaps = init_device_mesh("cpu", (ranks.size,)), {}
    for name in (*PLANNED, "adapters"):
        sizes, batch = {"num_key_value_heads": 4}, hard_batch()
        actor = (
            adapted(**sizes) if name == "adapters" else small_actor(name, torch.float64, **sizes)
        )
        with Float64():
            expected, wanted = learned(actor, batch, logprobs)
            partial = partial_names(actor)
            shard_layers(actor, mesh)
            found, grads = learned(actor, batch, logprobs)
        assert sum(isinstance(g, DTensor) for g in grads.values()) >= 12
        sum_partial([grads[name] for name in partial], mesh)
        whole = {
            name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()
        }
        gaps[name] = [
            float((found - expected).abs().max() / expected.abs().max()),
            gap(whole, wanted),
        ]
    return gaps


def held(model_parallel_group: ModelParallelGroup) -> dict[str, int]:
    """Bytes that a model holds for its backward pass, alone and in a team."""
    actor = Actor(small_model("qwen2", num_hidden_layers=4), ModelConfig(logits_mb=1))
    batch = ragged_batch([60, 40], [200, 150, 90, 210], [0, 0, 1, 1])
    found = {}
    for name in ("alone", "team"):
        if name == "team":
            actor.model_parallel_group = model_parallel_group
        seen = {p.untyped_storage().data_ptr(): 0 for p in actor.parameters()}

        def note(x: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            seen.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            loss = actor.score(batch).logprobs.sum()
        found[name] = sum(seen.values())
        loss.backward()
    return found


def models(ranks: ProcessGroup, folder: Path) -> dict[str, Any]:
    model_parallel_group, _ = build_parallel_groups(ranks, ranks.size)
    gaps = {
        name: apart(model, model_parallel_group, batch, call)
        for name, model, batch, call in cells(folder)
    }
    return {
        "gaps": gaps,
        "tensor": tensor_gaps(ranks),
        "held": held(model_parallel_group),
        "limit": limit_of(ranks),
    }


def limit_of(ranks: ProcessGroup) -> float:
    """Seconds that a rank waits for the others of its team."""
    across = Fsdp2Strategy(StrategyConfig(device="cpu", tensor_parallel=2), ranks).across
    assert across is not None
    return across.get_group()._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def runs(ranks: ProcessGroup, files: list[str]) -> list[dict[str, int]]:
    """The steps of each run, and how often this rank has said that it is still drawing: it is made to at any time."""
    training_loop.init_process_group = lambda *_: nullcontext(ranks)  # ty: ignore[invalid-assignment]
    signs, tell, found = [], ranks_module.KeepAlive._tell, []
    ranks_module.KEEPALIVES = 10**9
    ranks_module.KeepAlive._tell = lambda self, given: (signs.append(1), tell(self, given))[1]
    for file in files:
        signs.clear()
        steps = rl.run_rl(load_settings(RLConfig, [file]).settings)["steps"]
        found.append({"steps": steps, "signs": len(signs)})
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same models on every rank
    with init_process_group(10.0) as together:
        everyone = together.gather(
            models(together, Path(sys.argv[1])) | {"runs": runs(together, sys.argv[2:])}
        )
        if together.rank == 0:
            sys.stdout.write(f"FOUND{json.dumps(everyone)}\n")
