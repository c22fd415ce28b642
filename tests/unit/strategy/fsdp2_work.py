"""What each rank of ``test_fsdp2`` does. Run as a program, it forks as many ranks as it is told and writes what they find; where
there is a large model, what reading it takes."""

from __future__ import annotations

import gc
import os
import socket
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.distributed.process_group import (
    SINGLE_PROCESS,
    ProcessGroup,
    init_process_group,
)
from lightrft.models.actor import Actor
from lightrft.models.critic import Critic
from lightrft.strategy import activation_offload
from lightrft.strategy.fsdp2 import Fsdp2Strategy
from lightrft.strategy.single import SingleStrategy, moved
from lightrft.types import Batch
from lightrft.utils.errors import ConfigError, ModelError
from tests.model_helpers import ragged_batch

ROWS = 8
ADAPTERS = {"lora": LoRAConfig(rank=4, dora=True)}
CELLS: dict[str, tuple[str, dict[str, Any], dict[str, Any], type]] = {
    "float32": ("untied", {}, {}, Actor),
    "tied": ("tied", {}, {}, Actor),
    "experts": ("experts", {}, {}, Actor),
    "adapters": ("untied", ADAPTERS, {}, Actor),
    "tied bfloat16": ("tied", {"dtype": "bfloat16"}, {}, Actor),
    "critic": ("untied", {}, {}, Critic),
    "bfloat16": ("untied", {"dtype": "bfloat16"}, {}, Actor),
    "bfloat16 adapters": ("untied", {"dtype": "bfloat16", **ADAPTERS}, {}, Actor),
    "bfloat16 critic": ("untied", {"dtype": "bfloat16"}, {}, Critic),
    "kept whole": ("untied", {}, {"reshard_after_forward": False}, Actor),
    "offload": ("untied", {}, {"cpu_offload": True}, Actor),
    "activations": ("untied", {}, {"offload_activations": True}, Actor),
    "activations of layers": (
        "untied",
        {"gradient_checkpointing": True},
        {"offload_activations": True},
        Actor,
    ),
    "sleep": ("untied", {}, {"offload_during_generation": True}, Actor),
}
TEAMS: dict[str, tuple[str, dict[str, Any], dict[str, Any], type]] = {
    "team of experts": ("experts", {}, {"tensor_parallel": 2}, Actor),
    "team of adapters": ("untied", {"lora": LoRAConfig(rank=4)}, {"tensor_parallel": 2}, Actor),
    "team of a bfloat16 critic": ("untied", {"dtype": "bfloat16"}, {"tensor_parallel": 2}, Critic),
}
OF_FOUR: dict[str, tuple[str, dict[str, Any], dict[str, Any], type]] = {
    "replicas": ("untied", {}, {"hsdp_shard_size": 2}, Actor),
    "kept on two": ("untied", {}, {"reshard_after_forward": 2}, Actor),
    "all at once": (
        "tied",
        {"dtype": "bfloat16"},
        {"hsdp_shard_size": 2, "cpu_offload": True, "offload_activations": True},
        Actor,
    ),
    "team": ("untied", {}, {"tensor_parallel": 2}, Actor),
    **TEAMS,
}
PLANNED = ("qwen2", "qwen3_moe", "qwen2_5_vl", "no_safetensors")


def batch() -> Batch:
    return ragged_batch([5, 7, 3], [4, 6, 2, 5, 3, 7, 1, 4], [0, 0, 0, 1, 1, 1, 2, 2])


def loss_of(model: Any, part: Batch) -> Tensor:
    """The share of ``part`` in a loss of the whole batch."""
    if isinstance(model, Critic):
        return (model.values(part)[0] - 1).square().sum() / 32
    return -model.score(part).logprobs.sum() / 32


def shard(tensor: Tensor) -> Tensor:
    """What is held here of ``tensor``."""
    return getattr(tensor, "to_local", lambda: tensor)()


def local(tensor: Tensor) -> int:
    """Numbers that are held here of ``tensor``."""
    return shard(tensor).numel()


def held(model: Any) -> int:
    return sum(local(p) for p in model.parameters())


def unsharded_gradients(model: Any) -> int:
    """Numbers of gradients that are held whole."""
    groups = [
        m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)
    ]
    params = [p for g in groups if g is not None for p in g.fsdp_params]
    whole = [p.unsharded_accumulated_grad for p in params]
    whole += [p._unsharded_param.grad for p in params if hasattr(p, "_unsharded_param")]
    return sum(grad.numel() for grad in whole if grad is not None)


def states(trained: Any) -> Iterator[Tensor]:
    for held in trained.optimizer.state.values():
        yield from (held[key] for key in ("exp_avg", "exp_avg_sq"))


def train(strategy: SingleStrategy, config: ModelConfig, kind: type) -> dict[str, Any]:
    """Two optimizer steps of two micro-batches each, of which every rank has its share of the rows."""
    torch.manual_seed(3)
    with strategy.loading() as device:
        model = kind.load(config, device=device)
    state = strategy.prepare(model, OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-3), 4)
    start = {name: tensor.detach().clone() for name, tensor in strategy.full_parameters(state)}
    found: dict[str, Any] = {
        "norms": [],
        "losses": [],
        "after forward": [],
        "whole gradients": [],
        "held": held(model),
    }
    ranks = strategy.data_parallel_group
    whole, rows = batch(), list(range(ROWS))[ranks.rank :: ranks.size]
    frozen = Actor.load(ModelConfig(path=config.path))
    strategy.place(frozen.requires_grad_(False))
    for _ in range(2):
        model.train()
        total = torch.zeros(())
        for half in (rows[::2], rows[1::2]):
            loss = loss_of(model, whole.select(torch.tensor(half, dtype=torch.long)))
            found["after forward"].append(sum(local(p) for p in model.decoder.layers.parameters()))
            strategy.backward(state, loss, last=half == rows[1::2])
            found["whole gradients"].append(unsharded_gradients(model))
            total += loss.detach().float()
        found["losses"].append(float(strategy.data_parallel_group.sum(total)))
        found["norms"].append(strategy.step(state).grad_norm)
        with strategy.offloaded([state], [frozen]), strategy.gathered(model), torch.no_grad():
            found["drawn"] = float(loss_of(model.eval(), whole))
    found["master"] = sorted({str(m.dtype) for m in state.inner.masters.values()})
    found["masters apart"] = sum(
        m is not p for m, p in zip(state.inner.masters.values(), state.inner.parameters.values())
    )
    found["homes"] = sorted({str(p.device) for p in model.parameters()})
    found["weights"] = {
        name: tensor.detach().clone() for name, tensor in strategy.full_parameters(state)
    }
    found["moved"] = {name: tensor - start[name] for name, tensor in found["weights"].items()}
    found["state"] = sum(local(t) for t in states(state))
    folder = Path(config.path).parent / f"saved-{strategy.ranks.size}"
    found["whole at once"] = saved(strategy, state, folder)
    strategy.load(state, folder)
    again = dict(strategy.full_parameters(state))
    found["restored"] = all(
        torch.equal(again[name], tensor) for name, tensor in found["weights"].items()
    )
    strategy._bring([state], [], torch.device("meta"))  # from there nothing comes back
    masters = (
        m
        for m, p in zip(state.inner.masters.values(), state.inner.parameters.values())
        if m is not p
    )
    found["asleep"] = sorted(
        {(str(t.device), str(shard(t).device)) for t in (*masters, *states(state))}
    )
    return found


def saved(strategy: SingleStrategy, state: Any, folder: Path) -> int:
    """Write a checkpoint; of how many tensors that are put together for it there are the copies where they are put together at a time."""
    made: list[weakref.ref[Tensor]] = []
    there: list[int] = []

    def full(tensor: Tensor) -> Tensor:
        whole = type(strategy).gather(strategy, tensor)
        made.extend([weakref.ref(whole)] * (whole is not tensor))
        there.append(sum(one() is not None for one in made))
        return whole

    strategy.gather = full
    strategy.save(state, folder)
    del strategy.gather
    return max(there)


def elsewhere(ranks: ProcessGroup) -> dict[str, Any]:
    """What becomes of a shard that does not lie on the device of its mesh, for which the meta device stands in."""
    strategy = Fsdp2Strategy(StrategyConfig(device="cpu"), ranks)
    whole = torch.arange(14.0).view(7, 2)
    mesh = DeviceMesh("meta", list(range(ranks.size)))
    offloaded = torch.empty_like(
        distribute_tensor(whole.to("meta"), mesh, [Shard(0)], src_data_rank=None), device="cpu"
    )
    made = {
        "like": strategy.shard_like(whole, offloaded),
        "moved": moved(offloaded, torch.device("cpu")),
    }
    found = {name: [str(tensor.device), str(shard(tensor).device)] for name, tensor in made.items()}
    held = shard(made["like"])
    return {
        **found,
        "kind": str(strategy.shard_like(whole.bfloat16(), offloaded).dtype),
        "held": [] if held.is_meta else held.tolist(),
    }


def cell(name: str, folder: Path, ranks: ProcessGroup) -> dict[str, Any]:
    where, model, strategy, kind = {**CELLS, **OF_FOUR}[name]
    config = ModelConfig(path=str(folder / where), **model)
    made = StrategyConfig(device="cpu", **strategy)
    copies: list[int] = []
    to_host = activation_offload.to_host

    def counted(tensor: Tensor) -> Any:
        kept = to_host(tensor)
        copies.append(0 if isinstance(kept, Tensor) else kept[1].numel())
        return kept

    activation_offload.to_host = counted
    try:
        found = train(
            Fsdp2Strategy(made, ranks) if ranks.size > 1 else SingleStrategy(made), config, kind
        )
    finally:
        activation_offload.to_host = to_host
    return {**found, "copied": sum(copies)}


def reads(folder: Path, ranks: ProcessGroup) -> str:
    """What a rank is told when the files lack a weight."""
    with Fsdp2Strategy(StrategyConfig(device="cpu"), ranks).loading() as device:
        actor = Actor.load(ModelConfig(path=str(folder / "lacking")), device=device)
    try:
        Fsdp2Strategy(StrategyConfig(device="cpu"), ranks).place(actor)
    except ModelError as error:
        return str(error)
    return ""


def families(
    folder: Path, ranks: ProcessGroup, only: tuple[str, ...] = (), **teams: int
) -> dict[str, str]:
    """By model folder, what of a model that was read by shards is not what loading it gives."""
    strategy = Fsdp2Strategy(StrategyConfig(device="cpu", **teams), ranks)
    odd: dict[str, str] = {}
    for path in sorted(p for p in folder.iterdir() if (p / "config.json").is_file()):
        if only and path.name not in only:
            continue
        for more in ({}, {"dtype": "bfloat16"}):
            config = ModelConfig(path=str(path), **more)
            with strategy.loading() as device:
                actor = Actor.load(config, device=device)
            strategy.place(actor.requires_grad_(False))
            expected = Actor.load(config)
            for kind in ("named_parameters", "named_buffers"):
                for (name, tensor), (other, wanted) in zip(
                    getattr(actor, kind)(), getattr(expected, kind)(), strict=True
                ):
                    full = strategy.gather(tensor.detach())
                    if name != other or full.dtype != wanted.dtype or not torch.equal(full, wanted):
                        odd.setdefault(path.name, f"{name} {full.dtype} {wanted.dtype}")
    return odd


def refused(ranks: ProcessGroup) -> str:
    try:
        Fsdp2Strategy(StrategyConfig(device="cpu", hsdp_shard_size=3), ranks)
    except ConfigError as error:
        return str(error)
    return ""


def peak_of_loading(folder: Path, strategy: SingleStrategy) -> int:
    """Bytes by which the resident set grew at most while a model was read, pages of its files included."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _resident("VmRSS")
    with strategy.loading() as device:
        actor = Actor.load(ModelConfig(path=str(folder)), device=device)
    strategy.place(actor)
    for (
        parameter
    ) in actor.parameters():  # what a file is only mapped to is there once it is looked at
        getattr(parameter, "to_local", lambda p=parameter: p)().detach().sum()
    return _resident("VmHWM") - before


def _resident(which: str) -> int:
    line = next(
        x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(which)
    )
    return int(line.split()[1]) * 1024


def rank_of(rank: int, size: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with init_process_group(10.0) as ranks:
        if (folder / "large").is_dir():
            peak = peak_of_loading(
                folder / "large", Fsdp2Strategy(StrategyConfig(device="cpu"), ranks)
            )
            model_parallel_group = peak_of_loading(
                folder / "large",
                Fsdp2Strategy(StrategyConfig(device="cpu", tensor_parallel=2), ranks),
            )
            torch.save(
                {"peak": peak, "team": model_parallel_group}, folder / f"found-{size}-{rank}.pt"
            )
            # rank 0 has the store, which the others need to make their groups
            torch.distributed.barrier()
            return
        found: dict[str, Any] = {
            name: cell(name, folder, ranks) for name in (CELLS if size == 2 else OF_FOUR)
        }
        if size == 2:
            found["families"] = families(folder / "families", ranks)
            found["lacking"] = reads(folder, ranks)
            found["elsewhere"] = elsewhere(ranks)
        else:
            found["refused"] = refused(ranks)
            found["families"] = families(folder / "families", ranks, PLANNED, tensor_parallel=2)
        torch.save(found, folder / f"found-{size}-{rank}.pt")


def main(folder: Path, sizes: list[int]) -> None:
    for size in sizes:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        start_processes(rank_of, (size, port, folder), nprocs=size, start_method="fork")
    if (folder / "large").is_dir():
        peak = peak_of_loading(folder / "large", SingleStrategy(StrategyConfig(device="cpu")))
        torch.save({"peak": peak}, folder / "found-1.pt")
        return
    torch.save({name: cell(name, folder, SINGLE_PROCESS) for name in ONE}, folder / "found-1.pt")


ONE = [name for name, (_, _, strategy, _) in CELLS.items() if not strategy] + [
    "activations",
    "sleep",
    *TEAMS,
]
"""Cells that one process has too; the others are held against the one without settings of the strategy."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), [int(size) for size in sys.argv[2:]])
