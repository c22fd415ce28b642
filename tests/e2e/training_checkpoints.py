"""Write checkpoints of DeepSpeed and FSDP by their own code.

``training_checkpoints.py FOLDER RANK SIZE PORT [deepspeed]``

The model is wrapped as the actors of LightRFT and OpenRLHF wrap it. One of its weights is frozen,
and the others have been trained for a step, so that ranks and types matter.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM


class Wrapped(nn.Module):
    """An actor: its weights are those of ``model``."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits.float().square().mean()


def zero(folder: Path, stage: int) -> None:
    import deepspeed

    model = Wrapped(folder / "base")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    # two groups, as of weights with and without decay
    groups = [{"params": trained[::2]}, {"params": trained[1::2]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine: Any
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.tensor([[5, 6, 7 + dist.get_rank()]])))
    engine.step()
    engine.save_checkpoint(
        str(folder / f"zero{stage}"), tag="global_step1", client_state={"step": 1}
    )
    whole = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            whole[name] = parameter.detach().clone()
    if dist.get_rank() == 0:
        torch.save(whole, folder / f"zero{stage}.pt")


def fsdp(folder: Path) -> None:
    model = Wrapped(folder / "base").float()
    for layer in model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.tensor([[5, 6, 7 + dist.get_rank()]])).backward()
    optimizer.step()
    dcp.save(get_model_state_dict(model), checkpoint_id=folder / "fsdp" / "global_step1")
    whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save({"step": 1}, folder / "fsdp" / "global_step1" / "client_state.pt")
        torch.save(whole, folder / "fsdp.pt")


def main() -> None:
    folder, rank, size, port = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "DS_ACCELERATOR": "cpu",
    }
    dist.init_process_group("gloo")
    fsdp(folder)
    if "deepspeed" in sys.argv:
        import deepspeed

        deepspeed.init_distributed("gloo")
        for stage in (1, 2, 3):
            zero(folder, stage)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
